/* B1: a lost control message hangs nobody. Each message of a room in turn is lost on its way: the first, a middle and
 * the last completion, the grant, the confirmation; then several at once, then a part of all that is sent while 48
 * rooms run, with others repeated and put off. Every room is completed by asking again, long before its deadline, and
 * nothing counts twice. When all is lost, the room fails by its deadline on both sides. */
/* timeout: 180 */
#include "test.h"

#include <stdbool.h>

enum { PAGE = 1024, PAGES = 512, CHUNKS = 8, CROWD = 48, DEADLINE_MS = 60000, SOON_MS = 20000 };

static nixlkv_engine_t *prefill, *decode;
static char *source, *destination;
static uint64_t decode_peer, prefill_peer, succeeded;

static nixlkv_stats_t stats_of(const nixlkv_engine_t *e) {
    nixlkv_stats_t stats;
    CHECK_OK(nixlkv_stats_init(&stats, sizeof stats));
    CHECK_OK(nixlkv_stats(e, &stats));
    return stats;
}

static void lose(const char *name, uint64_t skip, uint64_t times) { CHECK_OK(nixlkv_test_fault(name, skip, times)); }

/* Eight pages of its own in eight chunks. */
static int32_t page_of(uint64_t room, uint64_t i) { return (int32_t)(room % (PAGES / CHUNKS) * CHUNKS + i); }

static void begin(uint64_t room, uint64_t timeout_ms) {
    int32_t pages[CHUNKS];
    for (uint64_t i = 0; i < CHUNKS; i++) {
        pages[i] = page_of(room, i);
        poison(destination + (size_t)pages[i] * PAGE, PAGE);
        stamp_item(source, PAGE, pages[i], room, 0, i);
    }
    nixlkv_recv_params_t params = recv_params(room, &prefill_peer, 1, pages, CHUNKS);
    params.timeout_ms = timeout_ms;
    CHECK_OK(nixlkv_recv(decode, &params));
}

static void send_chunks(uint64_t room, uint64_t first, uint64_t end) {
    for (uint64_t i = first; i < end; i++) {
        const int32_t page = page_of(room, i);
        const nixlkv_chunk_t chunk = chunk_of(room, &page, 1, i, i + 1 == CHUNKS ? NIXLKV_CHUNK_LAST : 0);
        CHECK_OK(nixlkv_send_chunk(prefill, &chunk));
    }
}

/* Both sides say success, each chunk has counted once, and every word is there. */
static void finish(uint64_t room) {
    expect_end(decode, room, NIXL_OK, SOON_MS);
    expect_end(prefill, room, NIXL_OK, SOON_MS);
    const nixlkv_room_status_t got = poll_room(decode, room);
    CHECK(got.num_chunks == CHUNKS && got.num_pages == CHUNKS && got.num_bytes == CHUNKS * PAGE);
    const nixlkv_room_status_t sent = poll_room(prefill, room);
    CHECK(sent.num_chunks == CHUNKS && sent.num_pages == CHUNKS && sent.num_bytes == CHUNKS * PAGE);
    for (uint64_t i = 0; i < CHUNKS; i++) CHECK(wrong_words(destination, PAGE, page_of(room, i), room, 0, i) == 0);
    CHECK_OK(nixlkv_release(decode, room));
    CHECK_OK(nixlkv_release(prefill, room));
    succeeded++;
}

static void expect_counted_once(void) {
    CHECK(stats_of(decode).rooms_succeeded == succeeded && stats_of(prefill).rooms_succeeded == succeeded);
    CHECK(stats_of(decode).rooms_active == 0 && stats_of(prefill).rooms_active == 0);
}

static void await_grant(uint64_t room) {
    nixlkv_room_status_t status;
    CHECK_OK(nixlkv_room_status_init(&status, sizeof status));
    for (const uint64_t start = now_ms(); nixlkv_poll(prefill, room, &status) != NIXL_OK; sleep_ms(1))
        CHECK(now_ms() - start < SOON_MS);
}

/* Loses messages of the transfer, from the `skip`-th on that comes after the grant: eight completions, then an end. */
static void lost_in_transfer(uint64_t room, uint64_t skip, uint64_t times) {
    begin(room, DEADLINE_MS);
    await_grant(room);
    lose("lose_message", skip, times);
    const uint64_t start = now_ms();
    send_chunks(room, 0, CHUNKS);
    finish(room);
    expect_counted_once();
    lose("lose_message", 0, 0);
    CHECK(now_ms() - start > 500); /* or nothing was lost */
    printf("message %" PRIu64 " and %" PRIu64 " more lost: complete after %" PRIu64 " ms\n", skip, times - 1,
           now_ms() - start);
}

static void lost_grant(uint64_t room, bool chunks_first) {
    if (chunks_first) send_chunks(room, 0, CHUNKS / 2);
    lose("lose_message", 0, 1);
    begin(room, DEADLINE_MS);
    if (!chunks_first) await_grant(room);
    send_chunks(room, chunks_first ? CHUNKS / 2 : 0, CHUNKS);
    finish(room);
    expect_counted_once();
}

static void crowd(uint64_t first) {
    const uint64_t duplicates = stats_of(decode).messages_duplicate + stats_of(decode).messages_stale;
    for (uint64_t i = 0; i < CROWD; i++) begin(first + i, DEADLINE_MS);
    /* All three fault points fall somewhere into the 48 rooms' 480 messages and more. */
    for (uint64_t chunk = 0; chunk < CHUNKS; chunk++) {
        lose("lose_message", 3 + chunk, 12);
        lose("repeat_message", 5, 20);
        lose("delay_message", 2, 20);
        for (uint64_t i = 0; i < CROWD; i++) send_chunks(first + i, chunk, chunk + 1);
        sleep_ms(5);
    }
    sleep_ms(300);
    lose("lose_message", 0, 0);
    lose("repeat_message", 0, 0);
    lose("delay_message", 0, 0);
    for (uint64_t i = 0; i < CROWD; i++) finish(first + i);
    expect_counted_once();
    sleep_ms(300);
    CHECK(stats_of(decode).messages_duplicate + stats_of(decode).messages_stale +
              stats_of(decode).messages_unknown_room >
          duplicates);
}

/* Nothing arrives any more: the deadline ends the room on both sides. */
static void all_lost(uint64_t room) {
    begin(room, 1500);
    await_grant(room);
    lose("lose_message", 0, UINT64_MAX);
    send_chunks(room, 0, CHUNKS);
    const int32_t waited = nixlkv_wait(decode, &room, 1, NIXLKV_WAIT_ALL, SOON_MS);
    CHECK_OK(waited);
    CHECK(poll_room(decode, room).error == NIXL_ERR_ROOM_TIMEOUT);
    CHECK(poll_room(decode, room).quiesced == 0); /* the sender has not said that it drained */
    CHECK_STATUS(nixlkv_release(decode, room), NIXL_ERR_NOT_QUIESCED);
    lose("lose_message", 0, 0);
    expect_end(decode, room, NIXL_ERR_ROOM_TIMEOUT, SOON_MS);
    expect_end(prefill, room, NIXL_ERR_ROOM_TIMEOUT, SOON_MS);
    CHECK_OK(nixlkv_release(decode, room));
    CHECK_OK(nixlkv_release(prefill, room));
}

int main(void) {
    nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_PREFILL);
    config.heartbeat_interval_ms = 100000; /* so that the messages are those of the rooms */
    config.liveness_limit_ms = 1000000;
    prefill = engine_with_pages(&config, PAGE, PAGES, (void **)&source);
    config.role = NIXLKV_ROLE_DECODE;
    decode = engine_with_pages(&config, PAGE, PAGES, (void **)&destination);
    connect_both(prefill, decode, &decode_peer, &prefill_peer);
    begin(1, DEADLINE_MS);
    send_chunks(1, 0, CHUNKS);
    finish(1);
    sleep_ms(300); /* the last hello has come */

    for (uint64_t skip = 0; skip <= CHUNKS; skip += CHUNKS / 4) lost_in_transfer(2 + skip, skip, 1);
    lost_in_transfer(12, CHUNKS - 1, 1);
    lost_in_transfer(13, 1, CHUNKS - 2);
    lost_in_transfer(14, 0, CHUNKS + 1);
    lost_grant(15, false);
    lost_grant(16, true);
    crowd(100);
    all_lost(200);
    begin(201, DEADLINE_MS);
    send_chunks(201, 0, CHUNKS);
    finish(201);
    CHECK_OK(nixlkv_engine_shutdown(prefill, 5000));
    CHECK_OK(nixlkv_engine_shutdown(decode, 5000));
    nixlkv_engine_destroy(prefill);
    nixlkv_engine_destroy(decode);
    return 0;
}
