/* F10: memory that a stopped transfer of 64 MiB reads or writes is not deregistered, on either side; after the drain
 * it is. */
/* timeout: 120 */
#include "flow.h"

enum { MIB = 1 << 20, NUM_PAGES = 64 };

static node_t prefill, decode;
static uint64_t decode_peer, prefill_peer;

static answer_t move_memory(const node_t *node) { return ask(node, &(op_t){.what = OP_MOVE}); }

int main(void) {
    node_config_t config = {.tls = "tcp,self", .num_layers = 1, .num_pages = NUM_PAGES, .page_len = MIB};
    config.liveness_ms = 60000;
    config.role = NIXLKV_ROLE_PREFILL;
    prefill = node_start(config);
    config.role = NIXLKV_ROLE_DECODE;
    decode = node_start(config);
    join(&prefill, &decode, &decode_peer, &prefill_peer);

    /* The source, while the transfer goes on, and after the room has failed with bytes still on their way. */
    for (uint64_t room = 1; room <= 2; room++) {
        const request_t r = request_of(room, NUM_PAGES);
        poison_all(&decode);
        EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
        await_granted(&prefill, room);
        node_stop(&decode);
        EXPECT(send_part(&prefill, &r, 0, NUM_PAGES, NIXLKV_CHUNK_LAST), NIXL_OK);
        for (const uint64_t start = now_ms(); stats_of(&prefill).transfers_in_flight == 0; sleep_ms(1))
            CHECK(now_ms() - start < 10000);
        EXPECT(move_memory(&prefill), NIXL_ERR_REGION_BUSY);
        if (room == 2) {
            EXPECT(abort_room(&prefill, room, "enough"), NIXL_OK);
            EXPECT(move_memory(&prefill), NIXL_ERR_REGION_BUSY);
        }
        node_continue(&decode);
        if (room == 1) {
            EXPECT_ENDED(&decode, room, NIXL_OK, "", 20000);
            EXPECT_CONTENTS(&decode, &r);
        }
        EXPECT_OVER(&decode, room, room == 1 ? NIXL_OK : NIXL_ERR_ABORTED, "", 20000);
        EXPECT_OVER(&prefill, room, room == 1 ? NIXL_OK : NIXL_ERR_ABORTED, "", 20000);
    }
    EXPECT(move_memory(&prefill), NIXL_OK);
    join(&prefill, &decode, &decode_peer, &prefill_peer);

    /* The destination, while the sender is stopped in the middle, and after decode has given the room up. */
    bool caught = false;
    for (uint64_t room = 10; room < 20 && !caught; room++) {
        const request_t r = request_of(room, NUM_PAGES);
        answer_t asked;
        for (const uint64_t start = now_ms(); (asked = receive(&decode, &r, &prefill_peer, 1)).status != NIXL_OK;) {
            EXPECT(asked, NIXL_ERR_PEER_STALE);
            CHECK(now_ms() - start < 5000);
        }
        await_granted(&prefill, room);
        EXPECT(send_part(&prefill, &r, 0, NUM_PAGES, NIXLKV_CHUNK_LAST), NIXL_OK);
        node_stop(&prefill);
        const answer_t busy = move_memory(&decode);
        caught = busy.status == NIXL_ERR_REGION_BUSY;
        if (caught) {
            EXPECT(abort_room(&decode, room, "changed its mind"), NIXL_OK);
            caught = status_of(&decode, room).state == NIXLKV_ROOM_FAILED;
            if (caught) EXPECT(move_memory(&decode), NIXL_ERR_REGION_BUSY);
        } else {
            EXPECT(busy, NIXL_OK);
        }
        node_continue(&prefill);
        EXPECT_OVER(&decode, room, caught ? NIXL_ERR_ABORTED : NIXL_OK, "", 20000);
        EXPECT_OVER(&prefill, room, caught ? NIXL_ERR_ABORTED : NIXL_OK, "", 20000);
        EXPECT(move_memory(&decode), NIXL_OK);
        join(&prefill, &decode, &decode_peer, &prefill_peer);
    }
    CHECK(caught);
    const request_t r = request_of(30, NUM_PAGES);
    answer_t asked;
    for (const uint64_t start = now_ms(); (asked = receive(&decode, &r, &prefill_peer, 1)).status != NIXL_OK;) {
        EXPECT(asked, NIXL_ERR_PEER_STALE);
        CHECK(now_ms() - start < 5000);
    }
    EXPECT(abort_room(&decode, 30, NULL), NIXL_OK);
    EXPECT_OVER(&decode, 30, NIXL_ERR_ABORTED, "", 10000);
    transfer_works(&prefill, &decode, prefill_peer, 31);
    node_quit(&prefill);
    node_quit(&decode);
    return 0;
}
