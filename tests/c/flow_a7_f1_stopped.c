/* A process is stopped while a transfer to or from it is in flight: the room fails at the other side, and its memory
 * is not reported free before the stopped one goes on. Over tcp, where a stopped peer holds a transfer up. */
/* timeout: 120 */
#include "flow.h"

enum { MIB = 1 << 20, NUM_PAGES = 96 };

static node_t prefill, decode;
static uint64_t decode_peer, prefill_peer;

static request_t big(uint64_t room) {
    request_t r = request_of(room, NUM_PAGES);
    r.from_seed = r.to_seed = 0;
    return r;
}

static void await_grant(uint64_t room) {
    for (uint64_t start = now_ms(); status_of(&prefill, room).state != NIXLKV_ROOM_WAITING_FOR_INPUT; sleep_ms(1))
        CHECK(now_ms() - start < 5000);
}

/* The room stays failed and unquiesced for as long as the other side is stopped, and cannot be released. */
static void held(const node_t *node, uint64_t room, int32_t code) {
    for (int i = 0; i < 20; i++) {
        const answer_t status = status_of(node, room);
        EXPECT(status, NIXL_OK);
        CHECK(status.state == NIXLKV_ROOM_FAILED && status.error == code && status.quiesced == 0);
        sleep_ms(20);
    }
    EXPECT(release(node, room), NIXL_ERR_NOT_QUIESCED);
    CHECK(wait_for(node, room, NIXLKV_WAIT_QUIESCED, 50).status == NIXL_ERR_WAIT_TIMEOUT);
    CHECK(stats_of(node).rooms_unquiesced == 1);
}

int main(void) {
    const node_config_t common = {.tls = "tcp,self", .num_layers = 1, .num_pages = NUM_PAGES, .page_len = MIB};
    node_config_t config = common;
    config.role = NIXLKV_ROLE_PREFILL;
    config.room_timeout_ms = 1000;
    config.liveness_ms = 60000;
    prefill = node_start(config);
    config.role = NIXLKV_ROLE_DECODE;
    config.room_timeout_ms = 30000;
    decode = node_start(config);
    join(&prefill, &decode, &decode_peer, &prefill_peer);

    /* The sender's time limit passes (CASES A7). */
    request_t r = big(1);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    await_grant(1);
    node_stop(&decode);
    EXPECT(send_part(&prefill, &r, 0, NUM_PAGES, NIXLKV_CHUNK_LAST), NIXL_OK);
    EXPECT_ENDED(&prefill, 1, NIXL_ERR_ROOM_TIMEOUT, "no progress", 10000);
    held(&prefill, 1, NIXL_ERR_ROOM_TIMEOUT);
    EXPECT(ask(&prefill, &(op_t){.what = OP_DISCONNECT, .senders = {decode_peer}}), NIXL_ERR_PEER_BUSY);
    node_continue(&decode);
    EXPECT_OVER(&prefill, 1, NIXL_ERR_ROOM_TIMEOUT, "no progress", 20000);
    EXPECT_OVER(&decode, 1, NIXL_ERR_ROOM_TIMEOUT, "no progress", 20000);
    transfer_works(&prefill, &decode, prefill_peer, 1);

    /* The sender gives up. */
    r = big(2);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    await_grant(2);
    node_stop(&decode);
    EXPECT(send_part(&prefill, &r, 0, NUM_PAGES, NIXLKV_CHUNK_LAST), NIXL_OK);
    for (uint64_t start = now_ms(); stats_of(&prefill).transfers_in_flight == 0; sleep_ms(1))
        CHECK(now_ms() - start < 5000);
    EXPECT(abort_room(&prefill, 2, "enough"), NIXL_OK);
    held(&prefill, 2, NIXL_ERR_ABORTED);
    node_continue(&decode);
    EXPECT_OVER(&prefill, 2, NIXL_ERR_ABORTED, "enough", 20000);
    EXPECT_OVER(&decode, 2, NIXL_ERR_ABORTED, "enough", 20000);
    transfer_works(&prefill, &decode, prefill_peer, 2);

    /* The receiver gives up while the sender is stopped with a part of it sent: its pages stay taken (CASES F1). */
    bool caught = false;
    for (uint64_t room = 3; room < 13 && !caught; room++) {
        r = big(room);
        EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
        await_grant(room);
        EXPECT(send_part(&prefill, &r, 0, NUM_PAGES, NIXLKV_CHUNK_LAST), NIXL_OK);
        node_stop(&prefill);
        EXPECT(abort_room(&decode, room, "changed its mind"), NIXL_OK);
        caught = status_of(&decode, room).state == NIXLKV_ROOM_FAILED;
        if (caught) {
            held(&decode, room, NIXL_ERR_ABORTED);
            r.room = 99;
            EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_ERR_PAGE_IN_USE);
            /* Other pages, but its slots. */
            r.total = 0;
            EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_ERR_AUX_IN_USE);
            r.aux_to = -1;
            EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_ERR_STATE_IN_USE);
        }
        node_continue(&prefill);
        EXPECT_OVER(&decode, room, caught ? NIXL_ERR_ABORTED : NIXL_OK, caught ? "changed its mind" : "", 20000);
        EXPECT_OVER(&prefill, room, caught ? NIXL_ERR_ABORTED : NIXL_OK, caught ? "changed its mind" : "", 20000);
        transfer_works(&prefill, &decode, prefill_peer, room);
    }
    CHECK(caught);
    node_quit(&prefill);
    node_quit(&decode);
    return 0;
}
