/* J2: chunk 3 of one of three senders fails; then everything else goes wrong too. Both sides and the other senders go
 * on saying the first cause, with the room, the chunk and the engine where it happened. */
/* timeout: 60 */
#include "flow.h"

enum { RANKS = 3, PAGES = 24 };

int main(void) {
    static const char *const names[RANKS] = {"prefill-rank-0", "prefill-rank-1", "prefill-rank-2"};
    node_t rank[RANKS];
    node_t decode = node_start((node_config_t){.role = NIXLKV_ROLE_DECODE, .name = "decode", .num_layers = RANKS});
    uint64_t at_decode[RANKS], unused;
    for (uint32_t i = 0; i < RANKS; i++) {
        rank[i] = node_start((node_config_t){.role = NIXLKV_ROLE_PREFILL,
                                             .name = names[i],
                                             .first_layer = i,
                                             .num_layers = 1,
                                             .no_state = i != 0});
        join(&rank[i], &decode, &unused, &at_decode[i]);
    }
    const request_t r = request_of(77, PAGES);
    EXPECT(receive(&decode, &r, at_decode, RANKS), NIXL_OK);
    arm(&rank[1], "post", 3, 1);
    for (uint32_t i = 0; i < RANKS; i++) await_granted(&rank[i], 77);
    for (uint32_t i = 0; i < RANKS; i++) {
        request_t part = r;
        if (i != 0) part.aux_from = part.state_from = -1;
        for (uint64_t chunk = 0; chunk < 8; chunk++) {
            const answer_t sent = send_part(&rank[i], &part, 3 * chunk, 3, 0);
            CHECK(sent.status == NIXL_OK || sent.status == NIXL_ERR_ROOM_ENDED);
        }
    }
    EXPECT_ENDED(&rank[1], 77, NIXL_ERR_XFER_FAILED, "chunk 3", 5000);
    EXPECT_ENDED(&decode, 77, NIXL_ERR_XFER_FAILED, "chunk 3", 5000);
    EXPECT_ENDED(&rank[0], 77, NIXL_ERR_XFER_FAILED, "chunk 3", 5000);
    /* The cascade. */
    EXPECT(abort_room(&decode, 77, "a later cause"), NIXL_OK);
    EXPECT(abort_room(&rank[1], 77, "a later cause"), NIXL_OK);
    EXPECT(abort_room(&rank[0], 77, "a later cause"), NIXL_OK);
    node_kill(&rank[2]);
    sleep_ms(300);
    const node_t *left[3] = {&rank[0], &rank[1], &decode};
    for (int i = 0; i < 3; i++) {
        EXPECT_ENDED(left[i], 77, NIXL_ERR_XFER_FAILED, "chunk 3", 5000);
        EXPECT_ENDED(left[i], 77, NIXL_ERR_XFER_FAILED, "room 77", 5000);
        if (i != 1) EXPECT_ENDED(left[i], 77, NIXL_ERR_XFER_FAILED, names[1], 5000);
        EXPECT_OVER(left[i], 77, NIXL_ERR_XFER_FAILED, "chunk 3", 10000);
    }
    /* The next room shows nothing of it. */
    rank[2] = node_start((node_config_t){.role = NIXLKV_ROLE_PREFILL,
                                         .name = names[2],
                                         .first_layer = 2,
                                         .num_layers = 1,
                                         .no_state = true});
    join(&rank[2], &decode, &unused, &at_decode[2]);
    poison_all(&decode);
    EXPECT(receive(&decode, &r, at_decode, RANKS), NIXL_OK);
    for (uint32_t i = 0; i < RANKS; i++) {
        request_t part = r;
        if (i != 0) part.aux_from = part.state_from = -1;
        EXPECT(send_part(&rank[i], &part, 0, PAGES, NIXLKV_CHUNK_LAST | (i != 0 ? NIXLKV_CHUNK_NO_AUX : 0)), NIXL_OK);
    }
    EXPECT_ENDED(&decode, 77, NIXL_OK, "", 10000);
    EXPECT_CONTENTS(&decode, &r);
    EXPECT_OVER(&decode, 77, NIXL_OK, "", 10000);
    for (uint32_t i = 0; i < RANKS; i++) {
        EXPECT_OVER(&rank[i], 77, NIXL_OK, "", 10000);
        node_quit(&rank[i]);
    }
    node_quit(&decode);
    return 0;
}
