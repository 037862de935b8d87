/* B10: progress and liveness do not depend on the caller. A transfer completes while neither side makes a call; after
 * the other side is killed, or stopped, a single poll, the first call since, tells that it is lost. */
#include "test.h"

enum { PAGE = 64 << 10, PAGES = 32, LIVENESS_MS = 1000 };

static nixlkv_engine_t *engine(uint32_t role, void **memory) {
    nixlkv_engine_config_t config = engine_config(role);
    config.heartbeat_interval_ms = 200;
    config.liveness_limit_ms = LIVENESS_MS;
    return engine_with_pages(&config, PAGE, PAGES, memory);
}

enum { RECEIVES, SENDS };

/* Whether it receives or sends, it makes no call from the moment on at which it says `room`. */
static int other_side(int fd, int what) {
    void *memory;
    nixlkv_engine_t *e = engine(what == RECEIVES ? NIXLKV_ROLE_DECODE : NIXLKV_ROLE_PREFILL, &memory);
    const uint64_t peer = exchange_and_connect(e, fd);
    int32_t pages[PAGES];
    shuffle(pages, PAGES, 7);
    for (;;) {
        const uint64_t room = recv_u64(fd);
        if (room == 0) break;
        if (what == RECEIVES) {
            poison(memory, PAGE * PAGES);
            const nixlkv_recv_params_t params = recv_params(room, &peer, 1, pages, PAGES);
            CHECK_OK(nixlkv_recv(e, &params));
            send_u64(fd, room);
            if (recv_u64(fd) == 0) {
                /* This one will not end well. */
                CHECK(recv_u64(fd) == room);
                CHECK_OK(nixlkv_wait(e, &room, 1, NIXLKV_WAIT_QUIESCED, 10000));
                CHECK(poll_room(e, room).state == NIXLKV_ROOM_FAILED);
                CHECK_OK(nixlkv_release(e, room));
                continue;
            }
            /* Until every word is there, without a call. */
            const uint64_t start = now_ms();
            for (int32_t i = 0; i < PAGES; i++)
                while (wrong_words(memory, PAGE, pages[i], room, 0, (uint64_t)i) != 0) {
                    if (now_ms() - start > 10000) FAIL("page %d has not arrived in 10 s", i);
                    sleep_ms(1);
                }
            sleep_ms(500);
            const nixlkv_room_status_t status = poll_room(e, room);
            CHECK(status.state == NIXLKV_ROOM_SUCCESS && status.quiesced == 1);
            CHECK_OK(nixlkv_release(e, room));
            send_u64(fd, room);
        } else {
            for (int32_t i = 0; i < PAGES; i++) stamp_item(memory, PAGE, pages[i], room, 0, (uint64_t)i);
            /* A quarter: half of what rooms 21 and 22 expect, all of what room 23 does. */
            const nixlkv_chunk_t chunk = chunk_of(room, pages, PAGES / 4, 0, room == 23 ? NIXLKV_CHUNK_LAST : 0);
            CHECK_OK(nixlkv_send_chunk(e, &chunk));
            send_u64(fd, room);
        }
    }
    nixlkv_engine_destroy(e);
    return 0;
}

static int receiver(int fd) { return other_side(fd, RECEIVES); }
static int sender(int fd) { return other_side(fd, SENDS); }

/* The one poll after the other side's end. */
static void expect_lost(nixlkv_engine_t *e, uint64_t room) {
    const nixlkv_room_status_t status = poll_room(e, room);
    if (status.state != NIXLKV_ROOM_FAILED || status.error != NIXL_ERR_PEER_LOST)
        FAIL("room %" PRIu64 ": state %u, %s: %s", room, status.state, nixlkv_status_name(status.error),
             status.error_text);
}

static void kill_child(child_t child) {
    CHECK(kill(child.pid, SIGKILL) == 0 && waitpid(child.pid, NULL, 0) == child.pid);
    close(child.fd);
}

/* A whole room to the child, which looks at its memory only; we make one poll when it says that all is there. */
static void expect_good_transfer(nixlkv_engine_t *e, void *memory, const int32_t *pages, const child_t *child,
                                 uint64_t room) {
    for (int32_t i = 0; i < PAGES; i++) stamp_item(memory, PAGE, pages[i], room, 0, (uint64_t)i);
    send_u64(child->fd, room);
    CHECK(recv_u64(child->fd) == room);
    const nixlkv_chunk_t chunk = chunk_of(room, pages, PAGES, 0, NIXLKV_CHUNK_LAST);
    CHECK_OK(nixlkv_send_chunk(e, &chunk));
    send_u64(child->fd, 1);
    CHECK(recv_u64(child->fd) == room);
    const nixlkv_room_status_t status = poll_room(e, room);
    CHECK(status.state == NIXLKV_ROOM_SUCCESS && status.quiesced == 1);
    CHECK_OK(nixlkv_release(e, room));
}

static void as_sender(void) {
    child_t killed = spawn(receiver), stopped = spawn(receiver);
    void *memory;
    nixlkv_engine_t *e = engine(NIXLKV_ROLE_PREFILL, &memory);
    exchange_and_connect(e, killed.fd);
    exchange_and_connect(e, stopped.fd);
    int32_t pages[PAGES];
    shuffle(pages, PAGES, 3);

    for (uint64_t room = 1; room <= 4; room++)
        expect_good_transfer(e, memory, pages, room % 2 ? &killed : &stopped, room);

    /* A chunk of either room has landed, and there is nothing in flight that could fail. */
    for (uint64_t room = 11; room <= 12; room++) {
        const child_t *child = room == 11 ? &killed : &stopped;
        send_u64(child->fd, room);
        CHECK(recv_u64(child->fd) == room);
        send_u64(child->fd, 0);
        nixlkv_chunk_t chunk = chunk_of(room, pages, PAGES / 2, 0, 0);
        CHECK_OK(nixlkv_send_chunk(e, &chunk));
        for (const uint64_t start = now_ms(); poll_room(e, room).num_chunks < 1; sleep_ms(1))
            CHECK(now_ms() - start < 10000);
    }
    kill_child(killed);
    CHECK(kill(stopped.pid, SIGSTOP) == 0);
    sleep_ms(2 * LIVENESS_MS);
    expect_lost(e, 11);
    expect_lost(e, 12);
    CHECK_OK(nixlkv_release(e, 11)); /* nothing of ours is in flight to either: our pages are free */
    CHECK_OK(nixlkv_release(e, 12));
    CHECK(kill(stopped.pid, SIGCONT) == 0);
    send_u64(stopped.fd, 12);
    expect_good_transfer(e, memory, pages, &stopped, 13);
    send_u64(stopped.fd, 0);
    expect_child_ok(stopped);
    nixlkv_engine_destroy(e);
}

/* A receiver hears of a sender's end only because its engine asks. */
static void as_receiver(void) {
    child_t killed = spawn(sender), stopped = spawn(sender);
    void *memory;
    nixlkv_engine_t *e = engine(NIXLKV_ROLE_DECODE, &memory);
    const child_t *children[2] = {&killed, &stopped};
    uint64_t peers[2];
    int32_t pages[PAGES];
    for (int32_t i = 0; i < PAGES; i++) pages[i] = i;
    for (uint64_t i = 0; i < 2; i++) {
        peers[i] = exchange_and_connect(e, children[i]->fd);
        const nixlkv_recv_params_t params = recv_params(21 + i, &peers[i], 1, pages + i * PAGES / 2, PAGES / 2);
        CHECK_OK(nixlkv_recv(e, &params));
        send_u64(children[i]->fd, 21 + i);
        CHECK(recv_u64(children[i]->fd) == 21 + i);
        for (const uint64_t start = now_ms(); poll_room(e, 21 + i).num_chunks < 1; sleep_ms(1))
            CHECK(now_ms() - start < 10000);
    }
    kill_child(killed);
    CHECK(kill(stopped.pid, SIGSTOP) == 0);
    sleep_ms(2 * LIVENESS_MS);
    expect_lost(e, 21);
    expect_lost(e, 22);
    CHECK_OK(nixlkv_release(e, 21)); /* the killed sender's connection is closed */
    CHECK_STATUS(nixlkv_release(e, 22), NIXL_ERR_NOT_QUIESCED); /* the stopped one may still write */
    CHECK(kill(stopped.pid, SIGCONT) == 0);
    expect_end(e, 22, NIXL_ERR_PEER_LOST, 10000);
    CHECK_OK(nixlkv_release(e, 22));

    const nixlkv_recv_params_t params = recv_params(23, &peers[1], 1, pages, PAGES / 4);
    CHECK_OK(nixlkv_recv(e, &params));
    send_u64(stopped.fd, 23);
    CHECK(recv_u64(stopped.fd) == 23);
    expect_end(e, 23, NIXL_OK, 10000);
    for (int32_t i = 0; i < PAGES / 4; i++) CHECK(wrong_words(memory, PAGE, i, 23, 0, (uint64_t)i) == 0);
    send_u64(stopped.fd, 0);
    expect_child_ok(stopped);
    nixlkv_engine_destroy(e);
}

static int in_process(void (*body)(void)) {
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        body();
        exit(0);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    return status;
}

int main(void) {
    /* In a process each: children must be forked before their parent has an engine. */
    CHECK(in_process(as_sender) == 0);
    CHECK(in_process(as_receiver) == 0);
    return 0;
}
