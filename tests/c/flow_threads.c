/* Eight threads use the same engines at once: two send and receive, two abort half-way, one polls everything, one
 * waits for other threads' rooms, one connects and disconnects a third engine, one makes and ends engines that log.
 * What was sent arrives, what was aborted ends, and afterwards a transfer works. The program for ThreadSanitizer. */
/* timeout: 120 */
#include "api.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

enum { THREADS = 8, TIME_MS = 6000, PAGES_EACH = PAGES / 4 };

static pair_t pair;
static atomic_bool stop;
static _Atomic uint64_t latest[4]; /* the newest room of each thread that opens some */
static atomic_ulong done[THREADS];

static void release_room(uint64_t room) {
    CHECK_OK(nixlkv_release(pair.decode, room));
    CHECK_OK(nixlkv_release(pair.prefill, room));
}

/* Threads 0 to 3 own a quarter of the pages and the room ids with their number in the high word. */
static void one_room(uint64_t me, uint64_t n, bool abort_it) {
    const uint64_t room = (me + 1) << 32 | n;
    int32_t pages[PAGES_EACH];
    for (int32_t i = 0; i < PAGES_EACH; i++) pages[i] = (int32_t)me * PAGES_EACH + i;
    for (uint64_t layer = 0; layer < LAYERS; layer++)
        for (uint64_t i = 0; i < PAGES_EACH; i++)
            stamp_item(pair.source + layer * PAGES * PAGE, PAGE, pages[i], room, layer, i);
    const nixlkv_recv_params_t params = recv_params(room, &pair.prefill_peer, 1, pages, PAGES_EACH);
    const nixlkv_chunk_t first = chunk_of(room, pages, 1, 0, 0);
    const nixlkv_chunk_t rest = chunk_of(room, pages + 1, PAGES_EACH - 1, 1, NIXLKV_CHUNK_LAST);
    const bool send_first = n % 2 == 0;
    if (send_first) CHECK_OK(nixlkv_send_chunk(pair.prefill, &first));
    CHECK_OK(nixlkv_recv(pair.decode, &params));
    atomic_store(&latest[me], room);
    if (!send_first) CHECK_OK(nixlkv_send_chunk(pair.prefill, &first));
    if (abort_it) {
        CHECK_OK(nixlkv_abort(n % 3 == 0 ? pair.prefill : pair.decode, room, "for the test"));
        expect_end(pair.decode, room, NIXL_ERR_ABORTED, WAIT_MS);
        expect_end(pair.prefill, room, NIXL_ERR_ABORTED, WAIT_MS);
    } else {
        CHECK_OK(nixlkv_send_chunk(pair.prefill, &rest));
        expect_end(pair.decode, room, NIXL_OK, WAIT_MS);
        expect_end(pair.prefill, room, NIXL_OK, WAIT_MS);
        for (uint64_t layer = 0; layer < LAYERS; layer++)
            for (uint64_t i = 0; i < PAGES_EACH; i++)
                CHECK(wrong_words(pair.destination + layer * PAGES * PAGE, PAGE, pages[i], room, layer, i) == 0);
    }
    release_room(room);
}

static void look_around(uint64_t n) {
    nixlkv_engine_t *engine = n % 2 == 0 ? pair.prefill : pair.decode;
    const uint64_t room = atomic_load(&latest[n / 2 % 4]);
    nixlkv_room_status_t status;
    CHECK_OK(nixlkv_room_status_init(&status, sizeof status));
    const int32_t polled = nixlkv_poll(engine, room, &status);
    CHECK(polled == NIXL_OK || polled == NIXL_ERR_ROOM_UNKNOWN);
    if (polled != NIXL_OK) CHECK(nixlkv_last_error()[0] != '\0');
    CHECK(stats_of(engine).rooms_opened >= stats_of(engine).rooms_succeeded);
    nixlkv_health_t health;
    CHECK_OK(nixlkv_health_init(&health, sizeof health));
    CHECK_OK(nixlkv_health(engine, &health));
    nixlkv_nixl_info_t info;
    CHECK_OK(nixlkv_nixl_info_init(&info, sizeof info));
    CHECK_OK(nixlkv_nixl_info(engine, &info));
    blob_t blob = export_blob(engine);
    free(blob.bytes);
}

static void wait_for_others(uint64_t n) {
    uint64_t rooms[4];
    for (int i = 0; i < 4; i++) rooms[i] = atomic_load(&latest[i]);
    const int32_t waited = nixlkv_wait(n % 2 == 0 ? pair.prefill : pair.decode, &rooms[n / 2 % 4], 1, 0, 5);
    CHECK(waited == NIXL_OK || waited == NIXL_ERR_WAIT_TIMEOUT || waited == NIXL_ERR_ROOM_UNKNOWN);
}

/* Another prefill engine comes and goes at the same decode engine. */
static void come_and_go(nixlkv_engine_t *other) {
    uint64_t decode_peer = 0, other_peer = 0;
    blob_t blob_a = export_blob(other), blob_b = export_blob(pair.decode);
    const uint64_t until = now_ms() + WAIT_MS;
    int32_t status;
    while ((status = nixlkv_connect(other, blob_b.bytes, blob_b.len, &decode_peer)) == NIXL_ERR_PEER_BUSY ||
           (status == NIXL_OK &&
            (status = nixlkv_connect(pair.decode, blob_a.bytes, blob_a.len, &other_peer)) == NIXL_ERR_PEER_BUSY)) {
        CHECK(now_ms() < until);
        sleep_ms(1);
    }
    CHECK_OK(status);
    free(blob_a.bytes);
    free(blob_b.bytes);
    CHECK_OK(nixlkv_disconnect(pair.decode, other_peer));
    const int32_t gone = nixlkv_disconnect(other, decode_peer);
    CHECK(gone == NIXL_OK || gone == NIXL_ERR_PEER_UNKNOWN);
}

static void on_line(void *user_data, uint32_t level, const char *message) {
    (void)level, (void)message;
    ++*(uint64_t *)user_data; /* no lock: lines come one at a time, and none after the engine's end */
}

static void make_and_end(void) {
    uint64_t lines = 0;
    nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_BOTH);
    config.log_callback = on_line;
    config.log_user_data = &lines;
    config.log_level = NIXLKV_LOG_TRACE;
    void *memory = NULL;
    nixlkv_engine_t *engine = engine_with_pages(&config, PAGE, PAGES, &memory);
    const nixlkv_region_t aux = region(NIXLKV_REGION_AUX, &lines, sizeof lines, sizeof lines);
    uint64_t id = 0;
    CHECK_OK(nixlkv_register(engine, &aux, 1, &id));
    CHECK_OK(nixlkv_deregister(engine, &id, 1));
    CHECK_OK(nixlkv_abort(engine, 1, "for the log"));
    nixlkv_engine_destroy(engine);
    lines = 0;
    munmap(memory, PAGE * PAGES);
}

static void *thread_main(void *index) {
    const uint64_t me = (uint64_t)(uintptr_t)index;
    nixlkv_engine_t *other = NULL;
    void *memory = NULL;
    if (me == 6) {
        other = engine_create(NIXLKV_ROLE_PREFILL);
        memory = register_memory(other, WITH_KV);
    }
    for (uint64_t n = 1; !atomic_load(&stop) || n == 1; n++) {
        if (me < 4) one_room(me, n, me >= 2);
        else if (me == 4) look_around(n);
        else if (me == 5) wait_for_others(n);
        else if (me == 6) come_and_go(other);
        else make_and_end();
        atomic_fetch_add(&done[me], 1);
    }
    nixlkv_engine_destroy(other);
    if (memory != NULL) munmap(memory, MEMORY);
    return NULL;
}

int main(void) {
    pair = make_pair(WITH_KV);
    one_room(0, UINT32_MAX - 1, false); /* both have connected back */
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, thread_main, (void *)i) == 0);
    sleep_ms(TIME_MS);
    atomic_store(&stop, true);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    for (int i = 0; i < THREADS; i++) CHECK(atomic_load(&done[i]) > 0);
    one_room(0, UINT32_MAX, false);
    destroy_pair(&pair);
    return 0;
}
