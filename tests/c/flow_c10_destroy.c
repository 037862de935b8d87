/* C10: an engine is destroyed with five writes in flight, first the sender's, then the receiver's, while the other
 * side is stopped. Shutdown says within its limit that it could not drain and what is pending; destroy returns; a
 * second one does nothing; the process lives and works on with a new engine. When the other side goes on, its rooms
 * end, and nothing is written into the memory of the engine that is gone. */
/* env: UCX_TLS=tcp,self */
/* timeout: 120 */
#include "test.h"

#include <sched.h>

enum { PAGE = 1 << 20, EACH = 16, ROOMS = 5, PAGES = (ROOMS + 1) * EACH, SHUTDOWN_MS = 500, DESTROY_MS = 10000 };

static nixlkv_engine_t *engine(uint32_t role, void **memory) {
    nixlkv_engine_config_t config = engine_config(role);
    config.heartbeat_interval_ms = 200;
    config.liveness_limit_ms = 1500;
    nixlkv_engine_t *e = engine_with_pages(&config, PAGE, PAGES, memory);
    poison(*memory, (size_t)PAGE * PAGES);
    return e;
}

static void pages_of(uint64_t room, int32_t *pages) {
    for (int32_t i = 0; i < EACH; i++) pages[i] = (int32_t)(room % (ROOMS + 1)) * EACH + i;
}

static void receive_room(nixlkv_engine_t *e, uint64_t peer, uint64_t room) {
    int32_t pages[EACH];
    pages_of(room, pages);
    const nixlkv_recv_params_t params = recv_params(room, &peer, 1, pages, EACH);
    CHECK_OK(nixlkv_recv(e, &params));
}

static void stamp_room(void *memory, uint64_t room) {
    int32_t pages[EACH];
    pages_of(room, pages);
    for (uint64_t i = 0; i < EACH; i++) stamp_item(memory, PAGE, pages[i], room, 0, i);
}

static void send_room(nixlkv_engine_t *e, uint64_t room) {
    int32_t pages[EACH];
    pages_of(room, pages);
    const nixlkv_chunk_t chunk = chunk_of(room, pages, EACH, 0, NIXLKV_CHUNK_LAST);
    CHECK_OK(nixlkv_send_chunk(e, &chunk));
}

static void check_room(const void *memory, uint64_t room) {
    int32_t pages[EACH];
    pages_of(room, pages);
    for (uint64_t i = 0; i < EACH; i++) CHECK(wrong_words(memory, PAGE, pages[i], room, 0, i) == 0);
}

static void await_grants(nixlkv_engine_t *e) {
    nixlkv_room_status_t status;
    CHECK_OK(nixlkv_room_status_init(&status, sizeof status));
    for (uint64_t room = 0; room < ROOMS; room++)
        for (const uint64_t start = now_ms(); nixlkv_poll(e, room, &status) != NIXL_OK; sleep_ms(1))
            CHECK(now_ms() - start < 10000);
}

static uint64_t in_flight(const nixlkv_engine_t *e) {
    nixlkv_stats_t stats;
    CHECK_OK(nixlkv_stats_init(&stats, sizeof stats));
    CHECK_OK(nixlkv_stats(e, &stats));
    return stats.transfers_in_flight;
}

/* Shuts down and destroys an engine that can't drain. */
static void end_engine(nixlkv_engine_t *e) {
    uint64_t start = now_ms();
    CHECK_STATUS(nixlkv_engine_shutdown(e, SHUTDOWN_MS), NIXL_ERR_DRAIN_TIMEOUT);
    CHECK(now_ms() - start >= SHUTDOWN_MS - 10 && now_ms() - start < SHUTDOWN_MS + 5000);
    CHECK(strstr(nixlkv_last_error(), "quiesced") != NULL || strstr(nixlkv_last_error(), "flight") != NULL);
    CHECK(nixlkv_status_retryable(NIXL_ERR_DRAIN_TIMEOUT) == 1);
    uint64_t unquiesced = 0;
    for (uint64_t room = 0; room < ROOMS; room++) {
        const nixlkv_room_status_t status = poll_room(e, room);
        CHECK(status.state == NIXLKV_ROOM_FAILED || status.state == NIXLKV_ROOM_SUCCESS);
        unquiesced += status.quiesced == 0;
    }
    CHECK(unquiesced > 0);
    start = now_ms();
    nixlkv_engine_destroy(e);
    if (now_ms() - start >= DESTROY_MS) FAIL("destroy took %" PRIu64 " ms", now_ms() - start);
    nixlkv_engine_destroy(e);
    CHECK_STATUS(nixlkv_engine_shutdown(e, 0), NIXL_ERR_INVALID_HANDLE);
}

/* What either process is asked to do. */
enum { CONNECT = 1, OPEN, SEND, END, FAIL_ALL, QUIESCED, UNTOUCHED, RENEW, ONE_RECEIVE, ONE_SEND, ONE_DONE, QUIT };

static int serve(int fd, uint32_t role) {
    void *memory, *old = NULL;
    nixlkv_engine_t *e = engine(role, &memory);
    uint64_t peer = 0;
    for (;;) {
        const uint64_t what = recv_u64(fd);
        switch (what) {
        case CONNECT: peer = exchange_and_connect(e, fd); break;
        case OPEN:
            for (uint64_t room = 0; room < ROOMS; room++) receive_room(e, peer, room);
            break;
        case SEND:
            await_grants(e);
            for (uint64_t room = 0; room < ROOMS; room++) stamp_room(memory, room);
            send_u64(fd, 0);
            const uint64_t stop_now = recv_u64(fd);
            for (uint64_t room = 0; room < ROOMS; room++) send_room(e, room);
            /* As soon as writes are in flight, so that most of them still are when it has stopped. */
            for (const uint64_t start = now_ms(); in_flight(e) < 4; sched_yield()) CHECK(now_ms() - start < 10000);
            if (stop_now) CHECK(kill(getpid(), SIGSTOP) == 0);
            break;
        case END: end_engine(e); break;
        case FAIL_ALL: { /* its rooms end: one may have been complete before */
            uint64_t failed = 0;
            for (uint64_t room = 0; room < ROOMS; room++) {
                CHECK_OK(nixlkv_wait(e, &room, 1, NIXLKV_WAIT_ALL, 20000));
                const nixlkv_room_status_t status = poll_room(e, room);
                failed += status.state == NIXLKV_ROOM_FAILED;
                if (status.state != NIXLKV_ROOM_SUCCESS && status.error != NIXL_ERR_PEER_DISCONNECTED &&
                    status.error != NIXL_ERR_PEER_LOST)
                    FAIL("room %" PRIu64 ": state %u, %s: %s", room, status.state, nixlkv_status_name(status.error),
                         status.error_text);
            }
            CHECK(failed > 0);
            break;
        }
        case QUIESCED:
            for (uint64_t room = 0; room < ROOMS; room++) {
                CHECK_OK(nixlkv_wait(e, &room, 1, NIXLKV_WAIT_QUIESCED, 20000));
                CHECK_OK(nixlkv_release(e, room));
            }
            break;
        case UNTOUCHED: /* the memory of the engine that is gone */
            for (int32_t page = 0; page < PAGES; page++) CHECK(unpoisoned_words(old, PAGE, page) == 0);
            break;
        case RENEW: /* the old memory stays as it is: something may have been left in flight */
            old = memory;
            if (role == NIXLKV_ROLE_DECODE) poison(old, (size_t)PAGE * PAGES);
            e = engine(role, &memory);
            break;
        case ONE_RECEIVE: receive_room(e, peer, ROOMS); break;
        case ONE_SEND:
            stamp_room(memory, ROOMS);
            send_room(e, ROOMS);
            break;
        case ONE_DONE:
            expect_end(e, ROOMS, NIXL_OK, 20000);
            if (role == NIXLKV_ROLE_DECODE) check_room(memory, ROOMS);
            CHECK_OK(nixlkv_release(e, ROOMS));
            break;
        case QUIT:
            nixlkv_engine_destroy(e);
            send_u64(fd, what);
            return 0;
        default: FAIL("asked for %" PRIu64, what);
        }
        send_u64(fd, what);
    }
}

static int prefill_main(int fd) { return serve(fd, NIXLKV_ROLE_PREFILL); }
static int decode_main(int fd) { return serve(fd, NIXLKV_ROLE_DECODE); }

static void ask(child_t child, uint64_t what) {
    send_u64(child.fd, what);
    CHECK(recv_u64(child.fd) == what);
}

static void relay(child_t from, child_t to) {
    const uint64_t len = recv_u64(from.fd);
    char *bytes = malloc(len);
    CHECK(bytes != NULL);
    recv_bytes(from.fd, bytes, len);
    send_u64(to.fd, len);
    send_bytes(to.fd, bytes, len);
    free(bytes);
}

static void join(child_t a, child_t b) {
    send_u64(a.fd, CONNECT);
    send_u64(b.fd, CONNECT);
    relay(a, b);
    relay(b, a);
    CHECK(recv_u64(a.fd) == CONNECT && recv_u64(b.fd) == CONNECT);
}

static void await_stop(child_t child) {
    int status = 0;
    CHECK(waitpid(child.pid, &status, WUNTRACED) == child.pid && WIFSTOPPED(status));
}

/* Five rooms that the sender has begun to write, and one side is stopped. */
static void begin(child_t prefill, child_t decode, uint32_t stopped) {
    join(prefill, decode);
    ask(decode, OPEN);
    send_u64(prefill.fd, SEND);
    CHECK(recv_u64(prefill.fd) == 0);
    if (stopped == NIXLKV_ROLE_DECODE) {
        CHECK(kill(decode.pid, SIGSTOP) == 0);
        await_stop(decode);
        send_u64(prefill.fd, 0);
        CHECK(recv_u64(prefill.fd) == SEND);
    } else {
        send_u64(prefill.fd, 1);
        await_stop(prefill);
    }
}

/* One side's engine is gone, and it has a new one: they work. */
static void work_again(child_t prefill, child_t decode) {
    join(prefill, decode);
    ask(decode, ONE_RECEIVE);
    ask(prefill, ONE_SEND);
    ask(decode, ONE_DONE);
    ask(prefill, ONE_DONE);
}

static void sender_destroyed(void) {
    child_t prefill = spawn(prefill_main), decode = spawn(decode_main);
    begin(prefill, decode, NIXLKV_ROLE_DECODE);
    ask(prefill, END);
    ask(prefill, RENEW);
    CHECK(kill(decode.pid, SIGCONT) == 0);
    ask(decode, FAIL_ALL);
    work_again(prefill, decode);
    ask(prefill, QUIT);
    expect_child_ok(prefill);
    /* The last of what could still write is gone with the process. */
    ask(decode, QUIESCED);
    ask(decode, QUIT);
    expect_child_ok(decode);
}

static void receiver_destroyed(void) {
    child_t prefill = spawn(prefill_main), decode = spawn(decode_main);
    begin(prefill, decode, NIXLKV_ROLE_PREFILL);
    ask(decode, END);
    ask(decode, RENEW);
    CHECK(kill(prefill.pid, SIGCONT) == 0);
    CHECK(recv_u64(prefill.fd) == SEND);
    ask(prefill, FAIL_ALL);
    ask(prefill, QUIESCED);
    ask(decode, UNTOUCHED);
    work_again(prefill, decode);
    sleep_ms(200);
    ask(decode, UNTOUCHED);
    ask(prefill, QUIT);
    ask(decode, QUIT);
    expect_child_ok(prefill);
    expect_child_ok(decode);
}

int main(void) {
    sender_destroyed();
    receiver_destroyed();
    return 0;
}
