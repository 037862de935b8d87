/* send_chunk only checks and queues: on the default lanes, where posting 256 MiB blocks for a long time, it returns at
 * once. A full queue says so, and takes chunks again when it has drained. Several threads may send and poll. */
/* timeout: 120 */
#include "test.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

enum { MIB = 1 << 20, PAGES = 256, ROUNDS = 6, THREADS = 4, ROOMS_EACH = 50, DEPTH = 64, CALLS = 100 };

static nixlkv_engine_t *prefill, *decode;
static uint64_t prefill_peer, decode_peer;
static char *from, *to;

static int by_value(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void grant(uint64_t room, const int32_t *pages, uint64_t count) {
    const nixlkv_recv_params_t params = recv_params(room, &prefill_peer, 1, pages, count);
    CHECK_OK(nixlkv_recv(decode, &params));
}

/* While huge chunks move, every call takes well under a millisecond. */
static void calls_do_not_block(void) {
    int32_t all[PAGES];
    for (int32_t i = 0; i < PAGES; i++) all[i] = i;
    uint64_t took[CALLS], moved_ms = 0;
    int calls = 0;
    for (uint64_t round = 0; calls < CALLS; round++) {
        /* One chunk of 256 MiB, and around it chunks of rooms without pages, in the queue behind it. */
        const uint64_t room = 1000 + round, start = now_ms();
        grant(room, all, PAGES);
        const nixlkv_chunk_t big = chunk_of(room, all, PAGES, 0, NIXLKV_CHUNK_LAST);
        uint64_t before = now_ns();
        CHECK_OK(nixlkv_send_chunk(prefill, &big));
        took[calls++] = now_ns() - before;
        const int first = calls;
        while (calls < CALLS && calls - first < CALLS / ROUNDS) {
            const nixlkv_chunk_t small = chunk_of(10000 + (uint64_t)calls, NULL, 0, 0, NIXLKV_CHUNK_LAST);
            before = now_ns();
            CHECK_OK(nixlkv_send_chunk(prefill, &small));
            took[calls++] = now_ns() - before;
            sleep_ms(2);
        }
        expect_end(decode, room, NIXL_OK, 30000);
        moved_ms += now_ms() - start;
        expect_end(prefill, room, NIXL_OK, 30000);
        CHECK_OK(nixlkv_release(decode, room));
        CHECK_OK(nixlkv_release(prefill, room));
        for (int i = first; i < calls; i++) {
            grant(10000 + (uint64_t)i, NULL, 0);
            expect_end(decode, 10000 + (uint64_t)i, NIXL_OK, 30000);
            expect_end(prefill, 10000 + (uint64_t)i, NIXL_OK, 30000);
            CHECK_OK(nixlkv_release(decode, 10000 + (uint64_t)i));
            CHECK_OK(nixlkv_release(prefill, 10000 + (uint64_t)i));
        }
    }
    qsort(took, CALLS, sizeof took[0], by_value);
    printf("send_chunk: median %" PRIu64 " us, p99 %" PRIu64 " us; 256 MiB took about %" PRIu64 " ms\n",
           took[CALLS / 2] / 1000, took[CALLS - 2] / 1000, moved_ms / ROUNDS);
    /* Less than 1 ms on a machine with nothing else to do; and whatever else it does, far less than the transfer. */
    CHECK(took[CALLS / 2] < 1000000 && took[CALLS - 2] < moved_ms / ROUNDS * 1000000 / 10);
    for (int32_t i = 0; i < PAGES; i++) CHECK(wrong_words(to, MIB, i, 5, 0, (uint64_t)i) == 0);
}

/* Chunks without a grant wait in the queue until it is full. */
static void full_queue(void) {
    const uint64_t room = 1;
    int32_t pages[DEPTH + 1];
    for (int32_t i = 0; i <= DEPTH; i++) pages[i] = i;
    for (uint64_t i = 0; i < DEPTH; i++) {
        const nixlkv_chunk_t chunk = chunk_of(room, pages + i, 1, i, 0);
        CHECK_OK(nixlkv_send_chunk(prefill, &chunk));
    }
    const nixlkv_chunk_t last = chunk_of(room, pages + DEPTH, 1, DEPTH, NIXLKV_CHUNK_LAST);
    const nixlkv_chunk_t other = chunk_of(2, pages, 1, 0, 0);
    for (int i = 0; i < 3; i++) {
        CHECK_SAYS(nixlkv_send_chunk(prefill, &last), NIXL_ERR_QUEUE_FULL, "64");
        CHECK_STATUS(nixlkv_send_chunk(prefill, &other), NIXL_ERR_QUEUE_FULL);
    }
    CHECK(nixlkv_status_retryable(NIXL_ERR_QUEUE_FULL) == 1);
    nixlkv_room_status_t status;
    CHECK_OK(nixlkv_room_status_init(&status, sizeof status));
    CHECK_STATUS(nixlkv_poll(prefill, 2, &status), NIXL_ERR_ROOM_UNKNOWN);
    CHECK(poll_room(prefill, room).num_pending_chunks == DEPTH);
    grant(room, pages, DEPTH + 1);
    int32_t sent = NIXL_ERR_QUEUE_FULL;
    for (const uint64_t start = now_ms(); sent == NIXL_ERR_QUEUE_FULL && now_ms() - start < 20000; sleep_ms(1))
        sent = nixlkv_send_chunk(prefill, &last);
    CHECK_OK(sent);
    expect_end(decode, room, NIXL_OK, 20000);
    expect_end(prefill, room, NIXL_OK, 20000);
    CHECK_OK(nixlkv_release(decode, room));
    CHECK_OK(nixlkv_release(prefill, room));

    /* A room that fails gives its part of the queue back. */
    for (uint64_t i = 0; i < DEPTH; i++) {
        const nixlkv_chunk_t chunk = chunk_of(3, pages + i, 1, i, 0);
        CHECK_OK(nixlkv_send_chunk(prefill, &chunk));
    }
    CHECK_STATUS(nixlkv_send_chunk(prefill, &other), NIXL_ERR_QUEUE_FULL);
    CHECK_OK(nixlkv_abort(prefill, 3, NULL));
    CHECK_OK(nixlkv_send_chunk(prefill, &other));
    CHECK_OK(nixlkv_abort(prefill, 2, NULL));
    for (uint64_t i = 2; i <= 3; i++) {
        expect_end(prefill, i, NIXL_ERR_ABORTED, 1000);
        CHECK_OK(nixlkv_release(prefill, i));
    }
}

static atomic_bool stop_polling;

/* Rooms of its own, with three chunks each over pages of its own. */
static void *sender(void *argument) {
    const int32_t thread = *(const int32_t *)argument, mine = PAGES / THREADS;
    for (uint64_t n = 0; n < ROOMS_EACH; n++) {
        const uint64_t room = ((uint64_t)thread << 40) + 100 + n;
        int32_t pages[3];
        for (int32_t i = 0; i < 3; i++) pages[i] = thread * mine + (int32_t)((n * 3 + (uint64_t)i) % (uint64_t)mine);
        grant(room, pages, 3);
        for (uint64_t i = 0; i < 3; i++) {
            const nixlkv_chunk_t chunk = chunk_of(room, pages + i, 1, i, i == 2 ? NIXLKV_CHUNK_LAST : 0);
            int32_t sent = NIXL_ERR_QUEUE_FULL;
            while (sent == NIXL_ERR_QUEUE_FULL) sent = nixlkv_send_chunk(prefill, &chunk);
            CHECK_OK(sent);
        }
        expect_end(decode, room, NIXL_OK, 30000);
        expect_end(prefill, room, NIXL_OK, 30000);
        CHECK(poll_room(decode, room).num_pages == 3);
        CHECK_OK(nixlkv_release(decode, room));
        CHECK_OK(nixlkv_release(prefill, room));
    }
    return NULL;
}

static void *poller(void *argument) {
    (void)argument;
    uint64_t random = 1;
    nixlkv_room_status_t status;
    CHECK_OK(nixlkv_room_status_init(&status, sizeof status));
    while (!atomic_load(&stop_polling)) {
        random = mix(random);
        const uint64_t room = ((random % THREADS) << 40) + 100 + random / 8 % ROOMS_EACH;
        const int32_t polled = nixlkv_poll(random & 4 ? decode : prefill, room, &status);
        CHECK(polled == NIXL_OK || polled == NIXL_ERR_ROOM_UNKNOWN);
        if (polled == NIXL_OK) CHECK(status.state != NIXLKV_ROOM_FAILED && status.error_text[0] == '\0');
        nixlkv_stats_t stats;
        CHECK_OK(nixlkv_stats_init(&stats, sizeof stats));
        CHECK_OK(nixlkv_stats(prefill, &stats));
        CHECK(stats.rooms_failed == 2);
        sleep_ms(0);
    }
    return NULL;
}

static void many_threads(void) {
    pthread_t senders[THREADS], pollers[THREADS];
    int32_t numbers[THREADS];
    for (int32_t i = 0; i < THREADS; i++) {
        numbers[i] = i;
        CHECK(pthread_create(&senders[i], NULL, sender, &numbers[i]) == 0);
        CHECK(pthread_create(&pollers[i], NULL, poller, NULL) == 0);
    }
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(senders[i], NULL) == 0);
    atomic_store(&stop_polling, true);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(pollers[i], NULL) == 0);
}

int main(void) {
    nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_PREFILL);
    config.queue_depth = DEPTH;
    CHECK_OK(nixlkv_engine_create(&config, &prefill));
    decode = engine_create(NIXLKV_ROLE_DECODE);
    from = map_bytes((size_t)PAGES * MIB);
    to = map_bytes((size_t)PAGES * MIB);
    poison(to, (size_t)PAGES * MIB);
    for (int32_t i = 0; i < PAGES; i++) stamp_item(from, MIB, i, 5, 0, (uint64_t)i);
    nixlkv_region_t regions[2] = {region(NIXLKV_REGION_KV, from, (uint64_t)PAGES * MIB, MIB),
                                  region(NIXLKV_REGION_KV, to, (uint64_t)PAGES * MIB, MIB)};
    CHECK_OK(nixlkv_register(prefill, &regions[0], 1, NULL));
    CHECK_OK(nixlkv_register(decode, &regions[1], 1, NULL));
    connect_both(prefill, decode, &decode_peer, &prefill_peer);
    full_queue();
    calls_do_not_block();
    poison(to, (size_t)PAGES * MIB);
    many_threads();
    for (int32_t i = 0; i < PAGES; i++) CHECK(wrong_words(to, MIB, i, 5, 0, (uint64_t)i) == 0);
    CHECK_OK(nixlkv_engine_shutdown(prefill, 5000));
    CHECK_OK(nixlkv_engine_shutdown(decode, 5000));
    nixlkv_engine_destroy(prefill);
    nixlkv_engine_destroy(decode);
    return 0;
}
