/* F4: 10,000 rooms given up by either side at any point. Each is free on both sides, usually within 100 ms, and no
 * page is held at the end. */
/* timeout: 300 */
#include "test.h"

enum { PAGE = 4096, EACH = 4, BATCH = 50, ROOMS = 10000, PAGES = BATCH * EACH };

static nixlkv_engine_t *engine;
static void *memory;
static uint64_t peer;

static void start(uint32_t role, int fd) {
    const nixlkv_engine_config_t config = engine_config(role);
    engine = engine_with_pages(&config, PAGE, PAGES, &memory);
    peer = exchange_and_connect(engine, fd);
    /* Both know each other when a first room is over. */
    const int32_t page = 0;
    if (role == NIXLKV_ROLE_PREFILL) {
        const nixlkv_chunk_t chunk = chunk_of(0, &page, 1, 0, NIXLKV_CHUNK_LAST);
        CHECK_OK(nixlkv_send_chunk(engine, &chunk));
    } else {
        const nixlkv_recv_params_t params = recv_params(0, &peer, 1, &page, 1);
        CHECK_OK(nixlkv_recv(engine, &params));
    }
    expect_end(engine, 0, NIXL_OK, 20000);
    CHECK_OK(nixlkv_release(engine, 0));
}

static void nothing_held(void) {
    nixlkv_health_t health;
    CHECK_OK(nixlkv_health_init(&health, sizeof health));
    CHECK_OK(nixlkv_health(engine, &health));
    CHECK(health.num_rooms_quarantined == 0 && health.num_pages_quarantined == 0);
    nixlkv_stats_t stats;
    CHECK_OK(nixlkv_stats_init(&stats, sizeof stats));
    CHECK_OK(nixlkv_stats(engine, &stats));
    CHECK(stats.rooms_unquiesced == 0 && stats.rooms_active == 0 && stats.chunks_pending == 0);
    CHECK(stats.transfers_in_flight == 0);
}

/* Who gives a room up: decode, prefill, both, or nobody. */
static uint64_t who_aborts(uint64_t room) { return mix(room) % 8; }

static void end_all(uint64_t first) {
    uint64_t rooms[BATCH];
    for (uint64_t i = 0; i < BATCH; i++) rooms[i] = first + i;
    CHECK_OK(nixlkv_wait(engine, rooms, BATCH, NIXLKV_WAIT_QUIESCED, 30000));
    for (uint64_t i = 0; i < BATCH; i++) {
        const nixlkv_room_status_t end = poll_room(engine, rooms[i]);
        CHECK(end.error == NIXL_OK || (end.error == NIXL_ERR_ABORTED && who_aborts(rooms[i]) < 7));
        CHECK_OK(nixlkv_release(engine, rooms[i]));
    }
}

static int prefill(int fd) {
    start(NIXLKV_ROLE_PREFILL, fd);
    for (uint64_t first; (first = recv_u64(fd)) != 0;) {
        for (uint64_t i = 0; i < BATCH; i++) {
            int32_t pages[EACH];
            for (int32_t k = 0; k < EACH; k++) pages[k] = (int32_t)i * EACH + k;
            const uint64_t room = first + i, who = who_aborts(room);
            const uint64_t sent = who == 7 ? EACH : mix(room + 1) % (EACH + 1);
            for (uint64_t k = 0; k < sent; k++) {
                nixlkv_chunk_t chunk = chunk_of(room, pages + k, 1, k, k + 1 == EACH ? NIXLKV_CHUNK_LAST : 0);
                const int32_t status = nixlkv_send_chunk(engine, &chunk);
                CHECK(status == NIXL_OK || (status == NIXL_ERR_ROOM_ENDED && who < 6));
            }
            /* Also what it has not begun, or decode gives up. */
            if (who >= 4 && who < 7) CHECK_OK(nixlkv_abort(engine, room, "prefill"));
            else if (sent == 0) CHECK_OK(nixlkv_abort(engine, room, NULL));
        }
        end_all(first);
        send_u64(fd, first);
    }
    nothing_held();
    nixlkv_engine_destroy(engine);
    return 0;
}

int main(void) {
    child_t child = spawn(prefill);
    start(NIXLKV_ROLE_DECODE, child.fd);
    int slow = 0;
    uint64_t slowest = 0;
    for (uint64_t first = 1; first < ROOMS; first += BATCH) {
        for (uint64_t i = 0; i < BATCH; i++) {
            int32_t pages[EACH];
            for (int32_t k = 0; k < EACH; k++) pages[k] = (int32_t)i * EACH + EACH - 1 - k;
            const nixlkv_recv_params_t params = recv_params(first + i, &peer, 1, pages, EACH);
            CHECK_OK(nixlkv_recv(engine, &params));
        }
        send_u64(child.fd, first);
        const uint64_t begin = now_ms();
        for (uint64_t i = 0; i < BATCH; i++)
            if (who_aborts(first + i) < 6) CHECK_OK(nixlkv_abort(engine, first + i, "decode"));
        end_all(first);
        const uint64_t took = now_ms() - begin;
        slow += took >= 100;
        if (took > slowest) slowest = took;
        CHECK(recv_u64(child.fd) == first);
    }
    printf("%d of %d batches took 100 ms or more, the slowest %" PRIu64 " ms\n", slow, ROOMS / BATCH, slowest);
    CHECK(slow <= ROOMS / BATCH / 2);
    nothing_held();

    /* The sender is killed with rooms open: they are free within twice the heartbeat's interval and the drain. */
    for (uint64_t i = 0; i < BATCH; i++) {
        const int32_t page = (int32_t)i;
        const nixlkv_recv_params_t params = recv_params(ROOMS + 1 + i, &peer, 1, &page, 1);
        CHECK_OK(nixlkv_recv(engine, &params));
    }
    CHECK(kill(child.pid, SIGKILL) == 0 && waitpid(child.pid, NULL, 0) == child.pid);
    const uint64_t begin = now_ms();
    for (uint64_t i = 0; i < BATCH; i++) expect_end(engine, ROOMS + 1 + i, NIXL_ERR_PEER_LOST, 20000);
    printf("after a kill: %" PRIu64 " ms\n", now_ms() - begin);
    CHECK(now_ms() - begin < 5000);
    for (uint64_t i = 0; i < BATCH; i++) CHECK_OK(nixlkv_release(engine, ROOMS + 1 + i));
    nothing_held();
    nixlkv_engine_destroy(engine);
    return 0;
}
