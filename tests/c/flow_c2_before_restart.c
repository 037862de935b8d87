/* C2: what was begun with one life of a peer is never carried out on the next. A receiver is killed while chunks to it
 * are in flight and queued, and while its grants wait for their first chunk; it comes back under its name, with its
 * memory at the same addresses. The old rooms end with their code, and not a byte of them reaches the new instance. The
 * same with the sender killed. */
/* env: UCX_TLS=tcp,self */
#include "flow.h"

enum { PAGE = 256 << 10, NUM_PAGES = 64, ROOMS = 8, EACH = NUM_PAGES / ROOMS };

static node_config_t prefill_config = {.role = NIXLKV_ROLE_PREFILL,
                                       .name = "prefill-0",
                                       .num_layers = 1,
                                       .num_pages = NUM_PAGES,
                                       .page_len = PAGE,
                                       .grant_timeout_ms = 1500};
static node_config_t decode_config = {
    .role = NIXLKV_ROLE_DECODE, .name = "decode-0", .num_layers = 1, .num_pages = NUM_PAGES, .page_len = PAGE};
static node_t prefill, decode;
static uint64_t decode_peer, prefill_peer;

/* Pages of its own on both sides; no aux, no state. */
static request_t request_in(uint64_t room, uint64_t place) {
    const int32_t base = (int32_t)(place * EACH);
    return (request_t){.room = room,
                       .key = mix(room),
                       .total = EACH,
                       .from_base = base,
                       .to_base = base,
                       .aux_from = -1,
                       .aux_to = -1,
                       .state_from = -1,
                       .state_to = -1};
}

static void await_grant(uint64_t room) {
    for (const uint64_t start = now_ms(); status_of(&prefill, room).state != NIXLKV_ROOM_WAITING_FOR_INPUT; sleep_ms(1))
        CHECK(now_ms() - start < 10000);
}

static answer_t send_all(const request_t *r) {
    return send_part(&prefill, r, 0, EACH, NIXLKV_CHUNK_LAST | NIXLKV_CHUNK_NO_AUX);
}

/* Nothing at all has been written at the decode node. */
static void expect_untouched(void) {
    const request_t none = {.total = 0, .aux_to = -1, .state_to = -1};
    const answer_t found = ask(&decode, &(op_t){.what = OP_CHECK, .request = none});
    if (found.stray != 0) FAIL("%" PRIu64 " items were written to the new instance", found.stray);
}

static void over_after_restart(const node_t *node, uint64_t room) {
    const answer_t ended = wait_for(node, room, NIXLKV_WAIT_QUIESCED, 10000);
    EXPECT(ended, NIXL_OK);
    CHECK(ended.state == NIXLKV_ROOM_FAILED && ended.quiesced == 1);
    if (ended.error != NIXL_ERR_PEER_LOST && ended.error != NIXL_ERR_PEER_RESTARTED)
        FAIL("room %" PRIu64 " ended with %s: %s", room, nixlkv_status_name(ended.error), ended.text);
    EXPECT(release(node, room), NIXL_OK);
}

/* Rooms 0 to 3 have chunks in flight or queued, 4 and 5 a grant without a chunk, 6 and 7 half of their chunks. */
static void receiver_restarts(uint64_t round) {
    request_t r[ROOMS];
    for (uint64_t i = 0; i < ROOMS; i++) {
        r[i] = request_in(1000 * round + i, i);
        EXPECT(receive(&decode, &r[i], &prefill_peer, 1), NIXL_OK);
        await_grant(r[i].room);
    }
    node_stop(&decode);
    for (uint64_t i = 0; i < 4; i++) EXPECT(send_all(&r[i]), NIXL_OK);
    for (uint64_t i = 6; i < 8; i++) EXPECT(send_part(&prefill, &r[i], 0, EACH / 2, 0), NIXL_OK);
    const uint64_t old = decode_peer;
    node_kill(&decode);
    decode = node_start(decode_config);
    join(&prefill, &decode, &decode_peer, &prefill_peer);
    CHECK(decode_peer != old);
    for (uint64_t i = 0; i < ROOMS; i++)
        if (i < 4 || i > 5) over_after_restart(&prefill, r[i].room);
    expect_untouched();

    /* The old grants are gone with their instance: a chunk that comes now waits for the new one's. */
    for (uint64_t i = 4; i < 6; i++) {
        EXPECT(status_of(&prefill, r[i].room), NIXL_ERR_ROOM_UNKNOWN);
        EXPECT(send_all(&r[i]), NIXL_OK);
        CHECK(status_of(&prefill, r[i].room).state == NIXLKV_ROOM_BOOTSTRAPPING);
    }
    sleep_ms(100);
    expect_untouched();
    /* One of them is granted by the new instance, on other pages; the other one never is. */
    r[4].to_base = 0;
    EXPECT(receive(&decode, &r[4], &prefill_peer, 1), NIXL_OK);
    EXPECT_ENDED(&decode, r[4].room, NIXL_OK, "", 10000);
    EXPECT_CONTENTS(&decode, &r[4]);
    EXPECT_OVER(&decode, r[4].room, NIXL_OK, "", 10000);
    EXPECT_OVER(&prefill, r[4].room, NIXL_OK, "", 10000);
    EXPECT_OVER(&prefill, r[5].room, NIXL_ERR_GRANT_TIMEOUT, "no grant", 10000);
    EXPECT_CONTENTS(&decode, &r[4]);
    const nixlkv_stats_t stats = stats_of(&prefill);
    CHECK(stats.chunks_pending == 0 && stats.transfers_in_flight == 0 && stats.rooms_unquiesced == 0);
    transfer_works(&prefill, &decode, prefill_peer, 1000 * round + ROOMS);
}

/* The receiver's rooms of the killed sender end; the new sender's chunks for the same rooms find no grant. */
static void sender_restarts(uint64_t round) {
    request_t r[ROOMS];
    for (uint64_t i = 0; i < ROOMS; i++) {
        r[i] = request_in(1000 * round + i, i);
        EXPECT(receive(&decode, &r[i], &prefill_peer, 1), NIXL_OK);
        await_grant(r[i].room);
    }
    EXPECT(send_part(&prefill, &r[0], 0, EACH / 2, 0), NIXL_OK);
    node_kill(&prefill);
    prefill = node_start(prefill_config);
    join(&prefill, &decode, &decode_peer, &prefill_peer);
    for (uint64_t i = 0; i < ROOMS; i++) EXPECT(send_all(&r[i]), NIXL_OK);
    for (uint64_t i = 0; i < ROOMS; i++) over_after_restart(&decode, r[i].room);
    poison_all(&decode);
    for (uint64_t i = 0; i < ROOMS; i++)
        EXPECT_OVER(&prefill, r[i].room, NIXL_ERR_GRANT_TIMEOUT, "no grant", 10000);
    expect_untouched();
    CHECK(stats_of(&prefill).transfers_posted == 0);
    transfer_works(&prefill, &decode, prefill_peer, 1000 * round + ROOMS);
}

int main(void) {
    prefill = node_start(prefill_config);
    decode = node_start(decode_config);
    join(&prefill, &decode, &decode_peer, &prefill_peer);
    for (uint64_t round = 1; round <= 4; round++)
        if (round % 2 == 1) receiver_restarts(round);
        else sender_restarts(round);
    node_quit(&prefill);
    node_quit(&decode);
    return 0;
}
