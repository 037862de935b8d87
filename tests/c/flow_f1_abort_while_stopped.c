/* F1: decode gives a room up at a random point of a large write whose sender is stopped. Its pages are not free while
 * the sender could still write; as soon as they are said to be, somebody else writes there, and those bytes stay. 200
 * runs. */
/* timeout: 300 */
/* env: UCX_TLS=tcp,self */
#include "test.h"

#include <stdbool.h>

enum { PAGE = 1 << 18, PAGES = 256, RUNS = 200 };

static nixlkv_engine_t *engine;
static void *memory;
static uint64_t peer;
static int32_t pages[PAGES];

static void start(uint32_t role, int fd) {
    nixlkv_engine_config_t config = engine_config(role);
    config.liveness_limit_ms = 60000;
    engine = engine_with_pages(&config, PAGE, PAGES, &memory);
    peer = exchange_and_connect(engine, fd);
}

static int prefill(int fd) {
    start(NIXLKV_ROLE_PREFILL, fd);
    memset(memory, 1, (size_t)PAGES * PAGE);
    for (int32_t i = 0; i < PAGES; i++) pages[i] = i;
    for (uint64_t room; (room = recv_u64(fd)) != 0;) {
        const uint64_t num_pages = recv_u64(fd);
        /* Two chunks; the room may have failed before either. */
        for (uint64_t i = 0, half = num_pages / 2; i < 2; i++) {
            const nixlkv_chunk_t chunk = i == 0 ? chunk_of(room, pages, half, 0, 0)
                                                : chunk_of(room, pages, num_pages - half, half, NIXLKV_CHUNK_LAST);
            const int32_t status = nixlkv_send_chunk(engine, &chunk);
            CHECK(status == NIXL_OK || status == NIXL_ERR_ROOM_ENDED);
        }
        CHECK_OK(nixlkv_wait(engine, &room, 1, NIXLKV_WAIT_QUIESCED, 30000));
        const nixlkv_room_status_t end = poll_room(engine, room);
        CHECK(end.error == NIXL_OK || end.error == NIXL_ERR_ABORTED);
        CHECK_OK(nixlkv_release(engine, room));
        send_u64(fd, room);
    }
    nixlkv_engine_destroy(engine);
    return 0;
}

static bool all_bytes_are(int value) {
    const char *p = memory;
    return p[0] == value && memcmp(p, p + 1, (size_t)PAGES * PAGE - 1) == 0;
}

/* The room's pages. */
static void fill(uint64_t num_pages, int value) {
    for (uint64_t i = 0; i < num_pages; i++) memset((char *)memory + (size_t)pages[i] * PAGE, value, PAGE);
}

static bool some_bytes_are(int value) { return memchr(memory, value, (size_t)PAGES * PAGE) != NULL; }

int main(void) {
    const uint64_t seed = now_ns();
    printf("seed %" PRIu64 "\n", seed);
    fflush(stdout);
    child_t child = spawn(prefill);
    start(NIXLKV_ROLE_DECODE, child.fd);
    memset(memory, 2, (size_t)PAGES * PAGE);
    int held = 0, midway = 0, too_late = 0;
    for (uint64_t run = 1; run <= RUNS; run++) {
        const uint64_t random = mix(seed + run), num_pages = run % 8 == 0 ? PAGES : 8 + random % 56;
        shuffle(pages, PAGES, random);
        fill(num_pages, 0);
        const nixlkv_recv_params_t params = recv_params(run, &peer, 1, pages, num_pages);
        CHECK_OK(nixlkv_recv(engine, &params));
        send_u64(child.fd, run);
        send_u64(child.fd, num_pages);
        sleep_ms((unsigned)((random >> 32) % (2 + num_pages / 6)));
        CHECK(kill(child.pid, SIGSTOP) == 0);
        int status;
        CHECK(waitpid(child.pid, &status, WUNTRACED) == child.pid && WIFSTOPPED(status));
        CHECK_OK(nixlkv_abort(engine, run, "changed its mind"));
        const bool failed = poll_room(engine, run).state == NIXLKV_ROOM_FAILED;
        if (failed) {
            const bool some = some_bytes_are(1);
            for (int i = 0; i < 5; i++) {
                const nixlkv_room_status_t now = poll_room(engine, run);
                CHECK(now.state == NIXLKV_ROOM_FAILED && now.error == NIXL_ERR_ABORTED && now.quiesced == 0);
                sleep_ms(2);
            }
            CHECK_STATUS(nixlkv_release(engine, run), NIXL_ERR_NOT_QUIESCED);
            nixlkv_recv_params_t other = recv_params(RUNS + 1, &peer, 1, pages, 1);
            CHECK_STATUS(nixlkv_recv(engine, &other), NIXL_ERR_PAGE_IN_USE);
            held++;
            midway += some;
        }
        too_late += !failed;
        CHECK(kill(child.pid, SIGCONT) == 0);
        /* Free: the next owner's bytes, at once. */
        CHECK_OK(nixlkv_wait(engine, &run, 1, NIXLKV_WAIT_QUIESCED, 30000));
        fill(num_pages, 2);
        expect_end(engine, run, failed ? NIXL_ERR_ABORTED : NIXL_OK, 1);
        CHECK_OK(nixlkv_release(engine, run));
        /* Whatever the sender could still send has come when it is through. */
        CHECK(recv_u64(child.fd) == run);
        if (random % 4 == 0) sleep_ms(20);
        if (!all_bytes_are(2)) FAIL("run %" PRIu64 ": bytes came after the pages were free", run);
    }
    printf("%d held, in %d of them some bytes had come, %d too late\n", held, midway, too_late);
    CHECK(held >= RUNS / 4 && midway >= RUNS / 20);

    memset(memory, 0, (size_t)PAGES * PAGE);
    for (int32_t i = 0; i < PAGES; i++) pages[i] = i;
    const uint64_t room = RUNS + 1;
    const nixlkv_recv_params_t params = recv_params(room, &peer, 1, pages, PAGES);
    CHECK_OK(nixlkv_recv(engine, &params));
    send_u64(child.fd, room);
    send_u64(child.fd, PAGES);
    expect_end(engine, room, NIXL_OK, 30000);
    CHECK(all_bytes_are(1));
    CHECK(recv_u64(child.fd) == room);
    send_u64(child.fd, 0);
    expect_child_ok(child);
    nixlkv_engine_destroy(engine);
    return 0;
}
