/* E11: decode registers more memory in the middle of a room, and moves all of its memory elsewhere between rooms, 50
 * times, with and without connecting again. A room ends in success with its bytes where they belong, or the peer is
 * stale, or being connected again just then: no success with bytes at an earlier place. */
/* timeout: 120 */
#include "flow.h"

enum { ROUNDS = 50 };

static node_t prefill, decode;
static uint64_t decode_peer, prefill_peer, num_stale, num_good;

static answer_t simple(const node_t *node, uint32_t what, uint32_t flags) {
    return ask(node, &(op_t){.what = what, .flags = flags});
}

/* Of the two sides the one that hears last finds itself disconnected for a moment. */
static bool is_stale(int32_t code) { return code == NIXL_ERR_PEER_STALE || code == NIXL_ERR_PEER_LOST; }

/* A room that may be stale at any step, but is never wrong. */
static void good_or_stale(uint64_t room) {
    const request_t r = request_of(room, 20);
    poison_all(&decode);
    const bool early = room % 2;
    if (early) EXPECT(send_part(&prefill, &r, 0, 8, 0), NIXL_OK);
    const answer_t asked = receive(&decode, &r, &prefill_peer, 1);
    if (asked.status != NIXL_OK) {
        CHECK(is_stale(asked.status));
        num_stale++;
        if (early) {
            EXPECT(abort_room(&prefill, room, NULL), NIXL_OK);
            EXPECT_OVER(&prefill, room, NIXL_ERR_ABORTED, "", 10000);
        }
        return;
    }
    if (!early) await_granted(&prefill, room);
    const answer_t sent = send_part(&prefill, &r, early ? 8 : 0, early ? 12 : 20, NIXLKV_CHUNK_LAST);
    CHECK(sent.status == NIXL_OK || sent.status == NIXL_ERR_ROOM_ENDED);
    const answer_t ended = wait_for(&decode, room, NIXLKV_WAIT_QUIESCED, 10000);
    EXPECT(ended, NIXL_OK);
    EXPECT(wait_for(&prefill, room, NIXLKV_WAIT_QUIESCED, 10000), NIXL_OK);
    if (ended.state == NIXLKV_ROOM_SUCCESS) {
        EXPECT_CONTENTS(&decode, &r);
        num_good++;
    } else {
        if (!is_stale(ended.error)) FAIL("%s: %s", nixlkv_status_name(ended.error), ended.text);
        num_stale++;
    }
    EXPECT(release(&decode, room), NIXL_OK);
    EXPECT(release(&prefill, room), NIXL_OK);
}

int main(void) {
    prefill = node_start((node_config_t){.role = NIXLKV_ROLE_PREFILL});
    decode = node_start((node_config_t){.role = NIXLKV_ROLE_DECODE});
    join(&prefill, &decode, &decode_peer, &prefill_peer);
    uint64_t room = 1;
    for (int round = 0; round < ROUNDS; round++) {
        /* A room goes on while decode registers more, which no peer sends. */
        const request_t r = request_of(room, 20);
        poison_all(&decode);
        EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
        await_granted(&prefill, room);
        EXPECT(send_part(&prefill, &r, 0, 5, 0), NIXL_OK);
        EXPECT(simple(&decode, OP_REGISTER_MORE, NIXLKV_REGION_FLAG_LOCAL), NIXL_OK);
        EXPECT(simple(&decode, OP_MOVE, 0), NIXL_ERR_REGION_BUSY);
        EXPECT(send_part(&prefill, &r, 5, 15, NIXLKV_CHUNK_LAST), NIXL_OK);
        EXPECT_ENDED(&decode, room, NIXL_OK, "", 10000);
        EXPECT_CONTENTS(&decode, &r);
        EXPECT_OVER(&decode, room, NIXL_OK, "", 10000);
        EXPECT_OVER(&prefill, room, NIXL_OK, "", 10000);
        good_or_stale(++room);
        /* All of decode's memory is somewhere else, and prefill does not know. */
        EXPECT(simple(&decode, OP_DEREGISTER, 0), NIXL_OK);
        EXPECT(simple(&decode, OP_MOVE, 0), NIXL_OK);
        good_or_stale(++room);
        /* One side knows; then both. */
        if (round % 2 == 0) introduce(&prefill, &decode);
        else introduce(&decode, &prefill);
        good_or_stale(++room);
        join(&prefill, &decode, &decode_peer, &prefill_peer);
        good_or_stale(++room);
        const uint64_t start = now_ms();
        for (const uint64_t good = num_good; num_good == good; good_or_stale(++room)) CHECK(now_ms() - start < 5000);
        room++;
    }
    printf("%" PRIu64 " rooms stale, %" PRIu64 " good\n", num_stale, num_good);
    CHECK(num_stale >= ROUNDS && num_good >= ROUNDS);
    transfer_works(&prefill, &decode, prefill_peer, 1);
    node_quit(&prefill);
    node_quit(&decode);
    return 0;
}
