/* D9: messages for rooms that the other side has never opened, or has long released, by the hundred thousand: rooms
 * that decode opens and gives up and prefill never hears of from its caller, and every message of both sides repeated
 * late. Memory stays bounded, and a known room is unharmed. 50,000 rooms; 500,000 with NIXLKV_TEST_LONG in the
 * environment. */
/* timeout: 600 */
#include "test.h"

enum { BATCH = 64, PAGE = 4096, MAX_MORE_KIB = 20 << 10 };

static uint64_t rss_kib(void) {
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file != NULL);
    uint64_t size, resident;
    CHECK(fscanf(file, "%" SCNu64 " %" SCNu64, &size, &resident) == 2);
    fclose(file);
    return resident * ((uint64_t)sysconf(_SC_PAGESIZE) / 1024);
}

static nixlkv_engine_t *engine;
static void *memory;
static uint64_t peer;

static void start(uint32_t role, int fd) {
    const nixlkv_engine_config_t config = engine_config(role);
    engine = engine_with_pages(&config, PAGE, BATCH + 2, &memory);
    peer = exchange_and_connect(engine, fd);
    CHECK_OK(nixlkv_test_fault("repeat_message", 0, UINT64_MAX));
}

static nixlkv_stats_t stats(void) {
    nixlkv_stats_t s;
    CHECK_OK(nixlkv_stats_init(&s, sizeof s));
    CHECK_OK(nixlkv_stats(engine, &s));
    return s;
}

static const int32_t known[2] = {BATCH, BATCH + 1};

static int prefill(int fd) {
    start(NIXLKV_ROLE_PREFILL, fd);
    for (int i = 0; i < 2; i++) stamp_item(memory, PAGE, known[i], 1, 0, (uint64_t)i);
    nixlkv_chunk_t chunk = chunk_of(1, known, 1, 0, 0);
    CHECK_OK(nixlkv_send_chunk(engine, &chunk));
    uint64_t settled = 0;
    for (uint64_t more; (more = recv_u64(fd)) != 0;) {
        if (more == 2) settled = rss_kib();
        send_u64(fd, rss_kib());
    }
    printf("prefill: %" PRIu64 " KiB more; %" PRIu64 " messages, %" PRIu64 " of them for unknown rooms or stale\n",
           rss_kib() - settled, stats().messages_received, stats().messages_unknown_room + stats().messages_stale);
    fflush(stdout);
    CHECK(rss_kib() < settled + MAX_MORE_KIB);
    chunk = chunk_of(1, known + 1, 1, 1, NIXLKV_CHUNK_LAST);
    CHECK_OK(nixlkv_send_chunk(engine, &chunk));
    expect_end(engine, 1, NIXL_OK, 20000);
    CHECK_OK(nixlkv_release(engine, 1));
    send_u64(fd, 1);
    CHECK(recv_u64(fd) == 1);
    nixlkv_engine_destroy(engine);
    return 0;
}

int main(void) {
    const uint64_t num_rooms = getenv("NIXLKV_TEST_LONG") != NULL ? 500000 : 50000;
    child_t child = spawn(prefill);
    start(NIXLKV_ROLE_DECODE, child.fd);
    nixlkv_recv_params_t params = recv_params(1, &peer, 1, known, 2);
    CHECK_OK(nixlkv_recv(engine, &params));
    uint64_t settled = 0, rooms[BATCH];
    for (uint64_t n = 0; n < num_rooms; n += BATCH) {
        for (int32_t i = 0; i < BATCH; i++) {
            rooms[i] = 2 + n + (uint64_t)i;
            params = recv_params(rooms[i], &peer, 1, &i, 1);
            CHECK_OK(nixlkv_recv(engine, &params));
        }
        for (int i = 0; i < BATCH; i++) CHECK_OK(nixlkv_abort(engine, rooms[i], "never mind"));
        CHECK_OK(nixlkv_wait(engine, rooms, BATCH, NIXLKV_WAIT_QUIESCED, 20000));
        for (int i = 0; i < BATCH; i++) CHECK_OK(nixlkv_release(engine, rooms[i]));
        /* The first thousand are for everything to find its size. */
        if (settled == 0 && n >= 1000) {
            settled = rss_kib();
            send_u64(child.fd, 2);
            recv_u64(child.fd);
        }
    }
    const nixlkv_stats_t s = stats();
    printf("decode: %" PRIu64 " KiB more; %" PRIu64 " messages, %" PRIu64 " of them for unknown rooms or stale\n",
           rss_kib() - settled, s.messages_received, s.messages_unknown_room + s.messages_stale);
    CHECK(rss_kib() < settled + MAX_MORE_KIB);
    CHECK(s.messages_unknown_room + s.messages_stale >= num_rooms / 2);
    CHECK(poll_room(engine, 1).state == NIXLKV_ROOM_TRANSFERRING && s.rooms_unquiesced == 1);
    send_u64(child.fd, 0);
    expect_end(engine, 1, NIXL_OK, 20000);
    for (int i = 0; i < 2; i++) CHECK(wrong_words(memory, PAGE, known[i], 1, 0, (uint64_t)i) == 0);
    CHECK_OK(nixlkv_release(engine, 1));
    CHECK(recv_u64(child.fd) == 1);
    send_u64(child.fd, 1);
    expect_child_ok(child);
    nixlkv_engine_destroy(engine);
    return 0;
}
