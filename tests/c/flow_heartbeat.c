/* A peer that is stopped for longer than the liveness limit, or killed, is lost: its rooms fail, quiesced only when
 * nothing of them can move any more; one that comes back goes on. */
/* timeout: 120 */
#include "flow.h"

enum { MIB = 1 << 20, NUM_PAGES = 96, LIMIT_MS = 1500 };

static node_t prefill, decode, second;
static uint64_t decode_peer, prefill_peer, second_peer, prefill_at_second;

static request_t big(uint64_t room) {
    request_t r = request_of(room, NUM_PAGES);
    r.from_seed = r.to_seed = 0;
    return r;
}

static void await_grant(uint64_t room) {
    for (uint64_t start = now_ms(); status_of(&prefill, room).state != NIXLKV_ROOM_WAITING_FOR_INPUT; sleep_ms(1))
        CHECK(now_ms() - start < 5000);
}

static void held(const node_t *node, uint64_t room) {
    for (int i = 0; i < 20; i++) {
        const answer_t status = status_of(node, room);
        CHECK(status.error == NIXL_ERR_PEER_LOST && status.quiesced == 0);
        sleep_ms(20);
    }
    EXPECT(release(node, room), NIXL_ERR_NOT_QUIESCED);
}

int main(void) {
    node_config_t config = {.tls = "tcp,self", .num_layers = 1, .num_pages = NUM_PAGES, .page_len = MIB};
    config.heartbeat_ms = 100;
    config.liveness_ms = LIMIT_MS;
    config.role = NIXLKV_ROLE_PREFILL;
    prefill = node_start(config);
    config.role = NIXLKV_ROLE_DECODE;
    decode = node_start(config);
    second = node_start(config);
    join(&prefill, &decode, &decode_peer, &prefill_peer);
    join(&prefill, &second, &second_peer, &prefill_at_second);
    transfer_works(&prefill, &decode, prefill_peer, 1);

    /* Stopped for less than the limit, twice: nothing is lost. */
    request_t r = big(2);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    await_grant(2);
    node_stop(&decode);
    EXPECT(send_part(&prefill, &r, 0, NUM_PAGES, NIXLKV_CHUNK_LAST), NIXL_OK);
    sleep_ms(LIMIT_MS / 3);
    node_continue(&decode);
    node_stop(&prefill);
    sleep_ms(LIMIT_MS / 3);
    node_continue(&prefill);
    EXPECT_OVER(&decode, 2, NIXL_OK, "", 20000);
    EXPECT_OVER(&prefill, 2, NIXL_OK, "", 20000);

    /* A stopped receiver: the sender's room is lost, its pages are still read; another peer's room is unharmed. */
    r = big(3);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    await_grant(3);
    node_stop(&decode);
    uint64_t start = now_ms();
    EXPECT(send_part(&prefill, &r, 0, NUM_PAGES, NIXLKV_CHUNK_LAST), NIXL_OK);
    EXPECT_ENDED(&prefill, 3, NIXL_ERR_PEER_LOST, "silent", 10000);
    CHECK(now_ms() - start < 3 * LIMIT_MS);
    held(&prefill, 3);
    transfer_works(&prefill, &second, prefill_at_second, 4);
    node_continue(&decode);
    EXPECT_OVER(&prefill, 3, NIXL_ERR_PEER_LOST, "silent", 20000);
    EXPECT_OVER(&decode, 3, NIXL_ERR_PEER_LOST, "silent", 20000);
    transfer_works(&prefill, &decode, prefill_peer, 5);

    /* A stopped sender: the receiver's room is lost, its pages may still be written. */
    r = big(6);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    EXPECT(send_part(&prefill, &r, 0, NUM_PAGES / 2, 0), NIXL_OK);
    node_stop(&prefill);
    start = now_ms();
    EXPECT_ENDED(&decode, 6, NIXL_ERR_PEER_LOST, "silent", 10000);
    CHECK(now_ms() - start < 3 * LIMIT_MS);
    held(&decode, 6);
    r.room = 7;
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_ERR_PEER_LOST);
    node_continue(&prefill);
    EXPECT_OVER(&decode, 6, NIXL_ERR_PEER_LOST, "silent", 20000);
    EXPECT_OVER(&prefill, 6, NIXL_ERR_PEER_LOST, "silent", 20000);
    transfer_works(&prefill, &decode, prefill_peer, 7);

    /* A killed receiver: lost and quiesced, soon. */
    r = big(8);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    await_grant(8);
    node_stop(&decode);
    EXPECT(send_part(&prefill, &r, 0, NUM_PAGES, NIXLKV_CHUNK_LAST), NIXL_OK);
    node_kill(&decode);
    start = now_ms();
    EXPECT_OVER(&prefill, 8, NIXL_ERR_PEER_LOST, "", 10000);
    CHECK(now_ms() - start < 3 * LIMIT_MS);
    transfer_works(&prefill, &second, prefill_at_second, 9);

    /* A killed sender. */
    r = big(10);
    EXPECT(receive(&second, &r, &prefill_at_second, 1), NIXL_OK);
    EXPECT(send_part(&prefill, &r, 0, NUM_PAGES / 2, 0), NIXL_OK);
    node_kill(&prefill);
    start = now_ms();
    EXPECT_OVER(&second, 10, NIXL_ERR_PEER_LOST, "", 10000);
    CHECK(now_ms() - start < 3 * LIMIT_MS);
    config.role = NIXLKV_ROLE_PREFILL;
    prefill = node_start(config);
    join(&prefill, &second, &second_peer, &prefill_at_second);
    transfer_works(&prefill, &second, prefill_at_second, 10);

    /* A sender that is killed before it has connected back: sooner than the time limit for that. */
    node_t third = node_start(config);
    const uint64_t third_at_second = introduce(&second, &third);
    r = big(11);
    EXPECT(receive(&second, &r, &third_at_second, 1), NIXL_OK);
    node_kill(&third);
    start = now_ms();
    EXPECT_OVER(&second, 11, NIXL_ERR_PEER_LOST, "", 20000);
    CHECK(now_ms() - start < 3 * LIMIT_MS);
    transfer_works(&prefill, &second, prefill_at_second, 11);
    node_quit(&prefill);
    node_quit(&second);
    return 0;
}
