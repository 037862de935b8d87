/* E5: a sender is killed before, while and after its first chunk is sent, with several rooms open: decode says so for
 * all of them within two heartbeats, without being asked to look. A sender that is stopped is suspect first, then
 * lost. */
/* timeout: 120 */
#include "flow.h"

enum { MIB = 1 << 20, NUM_PAGES = 64, ROOMS = 3, EACH = 20, HEARTBEAT_MS = 1500, LIMIT_MS = 4000 };

static node_t prefill, decode;
static uint64_t decode_peer, prefill_peer;
static node_config_t config = {.tls = "tcp,self", .num_layers = 1, .num_pages = NUM_PAGES, .page_len = MIB,
                               .heartbeat_ms = HEARTBEAT_MS, .liveness_ms = LIMIT_MS};

static void start_prefill(void) {
    config.role = NIXLKV_ROLE_PREFILL;
    prefill = node_start(config);
    join(&prefill, &decode, &decode_peer, &prefill_peer);
}

static request_t part(uint64_t room, int32_t n) {
    request_t r = request_of(room, EACH);
    r.from_seed = r.to_seed = 0;
    r.from_base = r.to_base = EACH * n;
    r.aux_from = r.aux_to = r.state_from = r.state_to = n;
    return r;
}

static request_t open_rooms(uint64_t first) {
    request_t r = {0};
    for (int32_t n = 0; n < ROOMS; n++) {
        r = part(first + (uint64_t)n, n);
        EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
        await_granted(&prefill, r.room);
    }
    return r;
}

int main(void) {
    config.role = NIXLKV_ROLE_DECODE;
    decode = node_start(config);
    enum { BEFORE, DURING, AFTER, NUM_MOMENTS };
    for (int moment = BEFORE; moment < NUM_MOMENTS; moment++) {
        start_prefill();
        const uint64_t first = 10 * (uint64_t)(moment + 1);
        const request_t last = open_rooms(first);
        if (moment != BEFORE) EXPECT(send_part(&prefill, &last, 0, EACH - 1, 0), NIXL_OK);
        if (moment == AFTER)
            for (const uint64_t start = now_ms(); status_of(&decode, last.room).num_chunks == 0; sleep_ms(1))
                CHECK(now_ms() - start < 10000);
        node_kill(&prefill);
        const uint64_t start = now_ms();
        for (uint64_t n = 0; n < ROOMS; n++) {
            EXPECT_OVER(&decode, first + n, NIXL_ERR_PEER_LOST, "", 10000);
            const uint64_t took = now_ms() - start;
            if (took > 2 * HEARTBEAT_MS) FAIL("room %" PRIu64 " after %" PRIu64 " ms", first + n, took);
        }
        CHECK(health_of(&decode).num_peers_lost + health_of(&decode).num_peers_silent >= 1);
    }

    start_prefill();
    open_rooms(100);
    node_stop(&prefill);
    const uint64_t start = now_ms();
    bool suspected = false;
    for (;; sleep_ms(10)) {
        const answer_t status = status_of(&decode, 100);
        if (status.state == NIXLKV_ROOM_FAILED) {
            CHECK(status.error == NIXL_ERR_PEER_LOST && status.quiesced == 0);
            break;
        }
        if (status.suspect == 1 && !suspected) {
            suspected = true;
            CHECK(health_of(&decode).num_peers_suspect == 1);
        }
        if (now_ms() - start > 3 * LIMIT_MS) FAIL("not lost");
    }
    CHECK(suspected && now_ms() - start > HEARTBEAT_MS);
    for (uint64_t n = 0; n < ROOMS; n++) EXPECT_ENDED(&decode, 100 + n, NIXL_ERR_PEER_LOST, "silent", 1000);
    /* Lost, and its pages wait for it. */
    CHECK(status_of(&decode, 100).suspect == 1);
    node_continue(&prefill);
    for (uint64_t n = 0; n < ROOMS; n++) EXPECT_OVER(&decode, 100 + n, NIXL_ERR_PEER_LOST, "silent", 10000);
    transfer_works(&prefill, &decode, prefill_peer, 200);
    node_quit(&prefill);
    node_quit(&decode);
    return 0;
}
