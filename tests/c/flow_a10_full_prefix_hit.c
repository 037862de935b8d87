/* Decode has every page already: the last chunk has none, and the room completes by state and aux alone, or by nothing
 * at all. */
#include "flow.h"

int main(void) {
    node_t prefill = node_start((node_config_t){.role = NIXLKV_ROLE_PREFILL});
    node_t decode = node_start((node_config_t){.role = NIXLKV_ROLE_DECODE});
    uint64_t decode_peer, prefill_peer;
    join(&prefill, &decode, &decode_peer, &prefill_peer);

    for (uint64_t room = 0; room < 8; room++) {
        request_t r = request_of(room + 40, 0);
        const bool aux = room & 1, state = room & 2, early = room & 4;
        if (!aux) r.aux_from = r.aux_to = -1;
        if (!state) r.state_from = r.state_to = -1;
        const uint32_t last = NIXLKV_CHUNK_LAST | (aux ? 0u : NIXLKV_CHUNK_NO_AUX);
        poison_all(&decode);
        if (early) {
            EXPECT(send_part(&prefill, &r, 0, 0, last), NIXL_OK);
            sleep_ms(20);
            CHECK(status_of(&prefill, r.room).state == NIXLKV_ROOM_BOOTSTRAPPING);
        }
        EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
        if (!early) {
            /* Not before the sender has said so. */
            sleep_ms(50);
            CHECK(status_of(&decode, r.room).state == NIXLKV_ROOM_WAITING_FOR_INPUT);
            EXPECT(send_part(&prefill, &r, 0, 0, 0), NIXL_ERR_CHUNK_EMPTY);
            if (aux) {
                request_t without = r;
                without.aux_from = -1;
                EXPECT(send_part(&prefill, &without, 0, 0, NIXLKV_CHUNK_LAST), NIXL_ERR_AUX_MISSING);
            }
            if (state) {
                request_t without = r;
                without.state_from = -1;
                EXPECT(send_part(&prefill, &without, 0, 0, last), NIXL_ERR_STATE_MISSING);
            }
            EXPECT(send_part(&prefill, &r, 0, 0, last), NIXL_OK);
        }
        EXPECT_ENDED(&decode, r.room, NIXL_OK, "", 10000);
        EXPECT_CONTENTS(&decode, &r);
        const answer_t at_decode = status_of(&decode, r.room);
        CHECK(at_decode.quiesced == 1 && at_decode.num_chunks == 1 && at_decode.num_pages == 0);
        CHECK(at_decode.num_bytes == (aux ? NODE_AUX : 0u) + (state ? NODE_STATE : 0u));
        EXPECT_OVER(&decode, r.room, NIXL_OK, "", 10000);
        EXPECT_OVER(&prefill, r.room, NIXL_OK, "", 10000);
    }

    /* All pages were sent before; the last chunk has none, but the rest. */
    const request_t r = request_of(90, 20);
    poison_all(&decode);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    EXPECT(send_part(&prefill, &r, 0, 20, 0), NIXL_OK);
    for (uint64_t start = now_ms(); status_of(&decode, 90).num_pages < 20; sleep_ms(1)) CHECK(now_ms() - start < 10000);
    CHECK(status_of(&decode, 90).state == NIXLKV_ROOM_TRANSFERRING);
    EXPECT(send_part(&prefill, &r, 20, 0, NIXLKV_CHUNK_LAST), NIXL_OK);
    EXPECT_ENDED(&decode, 90, NIXL_OK, "", 10000);
    EXPECT_CONTENTS(&decode, &r);
    EXPECT_OVER(&decode, 90, NIXL_OK, "", 10000);
    EXPECT_OVER(&prefill, 90, NIXL_OK, "", 10000);

    /* A sender's last chunk without pages where decode does want some: refused, and the corrected one completes
     * (CASES A10). */
    const request_t more = request_of(91, 64);
    poison_all(&decode);
    EXPECT(receive(&decode, &more, &prefill_peer, 1), NIXL_OK);
    EXPECT(send_part(&prefill, &more, 0, 48, 0), NIXL_OK);
    for (uint64_t start = now_ms(); status_of(&decode, 91).num_pages < 48; sleep_ms(1)) CHECK(now_ms() - start < 10000);
    EXPECT(send_part(&prefill, &more, 48, 0, NIXLKV_CHUNK_LAST), NIXL_ERR_PAGES_INCOMPLETE);
    EXPECT(send_part(&prefill, &more, 49, 15, NIXLKV_CHUNK_LAST), NIXL_ERR_PAGES_INCOMPLETE);
    EXPECT(send_part(&prefill, &more, 47, 17, NIXLKV_CHUNK_LAST), NIXL_ERR_PAGE_OVERLAP);
    CHECK(status_of(&decode, 91).state == NIXLKV_ROOM_TRANSFERRING);
    EXPECT(send_part(&prefill, &more, 48, 16, NIXLKV_CHUNK_LAST), NIXL_OK);
    EXPECT_ENDED(&decode, 91, NIXL_OK, "", 10000);
    EXPECT_CONTENTS(&decode, &more);
    EXPECT_OVER(&decode, 91, NIXL_OK, "", 10000);
    EXPECT_OVER(&prefill, 91, NIXL_OK, "", 10000);
    node_quit(&prefill);
    node_quit(&decode);
    return 0;
}
