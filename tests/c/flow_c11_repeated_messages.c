/* C11: every control message comes twice, the second time up to a quarter of a second late: by then most rooms have
 * been released, so thousands of grants, completions, aborts and answers name a room that nobody tracks any more, or an
 * earlier life of one. Counters change, and nothing else: rooms end once and as they should, nothing is kept, and no
 * life of a room gets an earlier one's bytes or pages. */
/* timeout: 120 */
#include "test.h"

enum { PAGE = 256, PAGES = 256, ROOMS = 1000, LIVES = 400, ABORTS = 200, LATEST_MS = 256 };

static nixlkv_engine_t *prefill, *decode;
static char *source, *destination;
static uint64_t decode_peer, prefill_peer, succeeded, failed;

static nixlkv_stats_t stats_of(const nixlkv_engine_t *e) {
    nixlkv_stats_t stats;
    CHECK_OK(nixlkv_stats_init(&stats, sizeof stats));
    CHECK_OK(nixlkv_stats(e, &stats));
    return stats;
}

static nixlkv_health_t health_of(const nixlkv_engine_t *e) {
    nixlkv_health_t health;
    CHECK_OK(nixlkv_health_init(&health, sizeof health));
    CHECK_OK(nixlkv_health(e, &health));
    return health;
}

/* Two pages in two chunks; the grant comes first, in the middle or at the end. Nothing else of the memory changes. */
static void whole_room(uint64_t room, uint64_t life) {
    const uint64_t key = room * 1000003 + life, grant_at = mix(key) % 3;
    int32_t from[PAGES], to[PAGES];
    shuffle(from, PAGES, key);
    shuffle(to, PAGES, key + 1);
    poison(destination, PAGE * PAGES);
    const nixlkv_recv_params_t params = recv_params(room, &prefill_peer, 1, to, 2);
    for (uint64_t i = 0; i < 2; i++) {
        stamp_item(source, PAGE, from[i], key, 0, i);
        if (grant_at == i) CHECK_OK(nixlkv_recv(decode, &params));
        const nixlkv_chunk_t chunk = chunk_of(room, &from[i], 1, i, i == 1 ? NIXLKV_CHUNK_LAST : 0);
        CHECK_OK(nixlkv_send_chunk(prefill, &chunk));
    }
    if (grant_at == 2) CHECK_OK(nixlkv_recv(decode, &params));
    expect_end(decode, room, NIXL_OK, 20000);
    expect_end(prefill, room, NIXL_OK, 20000);
    const nixlkv_room_status_t got = poll_room(decode, room);
    CHECK(got.num_chunks == 2 && got.num_pages == 2 && got.num_bytes == 2 * PAGE);
    const nixlkv_room_status_t sent = poll_room(prefill, room);
    CHECK(sent.num_chunks == 2 && sent.num_pages == 2 && sent.num_bytes == 2 * PAGE);
    CHECK_OK(nixlkv_release(decode, room));
    CHECK_OK(nixlkv_release(prefill, room));
    for (uint64_t i = 0; i < 2; i++) CHECK(wrong_words(destination, PAGE, to[i], key, 0, i) == 0);
    for (int32_t i = 2; i < PAGES; i++)
        if (unpoisoned_words(destination, PAGE, to[i]) != 0)
            FAIL("room %" PRIu64 ", life %" PRIu64 ": page %d of an earlier life was written", room, life, to[i]);
    succeeded++;
}

static void given_up(uint64_t room) {
    const int32_t pages[2] = {7, 8};
    const nixlkv_recv_params_t params = recv_params(room, &prefill_peer, 1, pages, 2);
    const nixlkv_chunk_t chunk = chunk_of(room, pages, 1, 0, 0);
    CHECK_OK(nixlkv_send_chunk(prefill, &chunk));
    CHECK_OK(nixlkv_recv(decode, &params));
    for (const uint64_t start = now_ms(); poll_room(decode, room).num_chunks < 1; sleep_ms(1))
        CHECK(now_ms() - start < 10000);
    CHECK_OK(nixlkv_abort(room % 2 ? prefill : decode, room, "given up"));
    expect_end(decode, room, NIXL_ERR_ABORTED, 20000);
    expect_end(prefill, room, NIXL_ERR_ABORTED, 20000);
    CHECK_OK(nixlkv_release(decode, room));
    CHECK_OK(nixlkv_release(prefill, room));
    failed++;
}

static void expect_nothing_held(const nixlkv_engine_t *e) {
    const nixlkv_stats_t stats = stats_of(e);
    const nixlkv_health_t health = health_of(e);
    CHECK(stats.rooms_succeeded == succeeded && stats.rooms_failed == failed);
    CHECK(stats.rooms_active == 0 && stats.rooms_unquiesced == 0 && stats.chunks_pending == 0);
    CHECK(stats.transfers_in_flight == 0 && stats.messages_malformed == 0 && stats.messages_unknown_peer == 0);
    CHECK(health.num_peers == 1 && health.num_peers_lost == 0 && health.num_rooms_quarantined == 0);
    if (health.num_grants_parked != 0)
        FAIL("%" PRIu64 " grants of rooms that are over are kept", health.num_grants_parked);
}

static uint64_t dropped(const nixlkv_engine_t *e) {
    const nixlkv_stats_t stats = stats_of(e);
    return stats.messages_unknown_room + stats.messages_stale + stats.messages_duplicate;
}

int main(void) {
    nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_PREFILL);
    config.heartbeat_interval_ms = 200;
    prefill = engine_with_pages(&config, PAGE, PAGES, (void **)&source);
    config.role = NIXLKV_ROLE_DECODE;
    decode = engine_with_pages(&config, PAGE, PAGES, (void **)&destination);
    connect_both(prefill, decode, &decode_peer, &prefill_peer);
    whole_room(1, 0);
    const uint64_t posted = stats_of(prefill).transfers_posted;

    CHECK_OK(nixlkv_test_fault("repeat_message", 0, UINT64_MAX));
    for (uint64_t room = 1000; room < 1000 + ROOMS; room++) whole_room(room, 0);
    for (uint64_t life = 1; life <= LIVES; life++) whole_room(2, life);
    for (uint64_t room = 5000; room < 5000 + ABORTS; room++) given_up(room);
    CHECK_OK(nixlkv_test_fault("repeat_message", 0, 0));
    sleep_ms(2 * LATEST_MS);

    printf("dropped: prefill %" PRIu64 " (%" PRIu64 " of unknown rooms), decode %" PRIu64 " (%" PRIu64 ")\n",
           dropped(prefill), stats_of(prefill).messages_unknown_room, dropped(decode),
           stats_of(decode).messages_unknown_room);
    expect_nothing_held(prefill);
    expect_nothing_held(decode);
    /* Each room's two completions came twice to decode, and its end twice to prefill. */
    CHECK(dropped(decode) >= 2 * (ROOMS + LIVES) && stats_of(decode).messages_unknown_room >= ROOMS);
    CHECK(dropped(prefill) >= ROOMS + LIVES && stats_of(prefill).messages_unknown_room >= ROOMS / 2);
    CHECK(stats_of(prefill).transfers_posted == posted + 2 * (ROOMS + LIVES) + ABORTS);

    whole_room(3, 0);
    CHECK_OK(nixlkv_engine_shutdown(prefill, 5000));
    CHECK_OK(nixlkv_engine_shutdown(decode, 5000));
    nixlkv_engine_destroy(prefill);
    nixlkv_engine_destroy(decode);
    return 0;
}
