/* H11: a receiver that has stopped, with as many chunks queued to it as one may have, does not hold up what goes to
 * another one: a quarter of the queue is for the others. */
/* env: UCX_TLS=tcp,self */
#include "test.h"

enum { PAGE = 1 << 20, PAGES = 128, DEPTH = 160, SHARE = DEPTH - DEPTH / 4 };

static nixlkv_engine_t *engine(uint32_t role, void **memory) {
    nixlkv_engine_config_t config = engine_config(role);
    config.liveness_limit_ms = 120000;
    config.queue_depth = DEPTH;
    return engine_with_pages(&config, PAGE, PAGES + 1, memory);
}

/* Opens the rooms that the parent names, of so many pages each, until it names 0. */
static int receiver(int fd) {
    void *memory;
    nixlkv_engine_t *e = engine(NIXLKV_ROLE_DECODE, &memory);
    const uint64_t sender = exchange_and_connect(e, fd);
    int32_t pages[PAGES];
    shuffle(pages, PAGES, 3);
    for (uint64_t room; (room = recv_u64(fd)) != 0;) {
        const uint64_t num_pages = recv_u64(fd);
        nixlkv_recv_params_t params = recv_params(room, &sender, 1, pages, num_pages);
        CHECK_OK(nixlkv_recv(e, &params));
        send_u64(fd, room);
        expect_end(e, room, NIXL_OK, 60000);
        for (uint64_t i = 0; i < num_pages; i++) CHECK(wrong_words(memory, PAGE, pages[i], room, 0, i) == 0);
        CHECK_OK(nixlkv_release(e, room));
        send_u64(fd, room);
    }
    nixlkv_engine_destroy(e);
    return 0;
}

static void open_room(child_t child, uint64_t room, uint64_t num_pages) {
    send_u64(child.fd, room);
    send_u64(child.fd, num_pages);
    CHECK(recv_u64(child.fd) == room);
}

/* Of room 1: the next page, a chunk of its own. */
static int32_t send_page(nixlkv_engine_t *e, int32_t page) {
    const nixlkv_chunk_t chunk = chunk_of(1, &page, 1, (uint64_t)page, page + 1 == PAGES ? NIXLKV_CHUNK_LAST : 0);
    return nixlkv_send_chunk(e, &chunk);
}

int main(void) {
    child_t stopped = spawn(receiver), well = spawn(receiver);
    void *memory;
    nixlkv_engine_t *e = engine(NIXLKV_ROLE_PREFILL, &memory);
    exchange_and_connect(e, stopped.fd);
    exchange_and_connect(e, well.fd);
    for (int32_t page = 0; page < PAGES; page++) stamp_item(memory, PAGE, page, 1, 0, (uint64_t)page);

    open_room(stopped, 1, PAGES);
    nixlkv_room_status_t status;
    CHECK_OK(nixlkv_room_status_init(&status, sizeof status));
    while (nixlkv_poll(e, 1, &status) != NIXL_OK) sleep_ms(1); /* until the grant is here */
    CHECK(kill(stopped.pid, SIGSTOP) == 0);
    int32_t sent = 0;
    for (const uint64_t start = now_ms(); now_ms() - start < 300;) {
        const int32_t status_of_call = send_page(e, sent);
        if (status_of_call == NIXL_OK) sent++;
        else CHECK_STATUS(status_of_call, NIXL_ERR_QUEUE_FULL);
        CHECK(sent < PAGES);
        if (status_of_call != NIXL_OK) sleep_ms(1);
    }
    CHECK_STATUS(send_page(e, sent), NIXL_ERR_QUEUE_FULL);
    CHECK(strstr(nixlkv_last_error(), "for other peers") != NULL);
    CHECK(poll_room(e, 1).state == NIXLKV_ROOM_TRANSFERRING && poll_room(e, 1).num_pending_chunks == SHARE);

    /* From a page of its own: room 1's are still being read. */
    const int32_t own = PAGES;
    stamp_item(memory, PAGE, own, 2, 0, 0);
    open_room(well, 2, 1);
    nixlkv_chunk_t chunk = chunk_of(2, &own, 1, 0, NIXLKV_CHUNK_LAST);
    CHECK_OK(nixlkv_send_chunk(e, &chunk));
    expect_end(e, 2, NIXL_OK, 20000);
    CHECK(recv_u64(well.fd) == 2);
    CHECK_OK(nixlkv_release(e, 2));
    CHECK(poll_room(e, 1).state == NIXLKV_ROOM_TRANSFERRING);

    CHECK(kill(stopped.pid, SIGCONT) == 0);
    for (const uint64_t start = now_ms(); sent < PAGES; sleep_ms(1)) {
        const int32_t status_of_call = send_page(e, sent);
        if (status_of_call == NIXL_OK) sent++;
        else CHECK_STATUS(status_of_call, NIXL_ERR_QUEUE_FULL);
        CHECK(now_ms() - start < 60000);
    }
    expect_end(e, 1, NIXL_OK, 60000);
    CHECK(recv_u64(stopped.fd) == 1);
    CHECK_OK(nixlkv_release(e, 1));
    for (int32_t page = 0; page < PAGES; page++) stamp_item(memory, PAGE, page, 3, 0, (uint64_t)page);
    open_room(well, 3, 4);
    const int32_t pages[4] = {0, 1, 2, 3};
    chunk = chunk_of(3, pages, 4, 0, NIXLKV_CHUNK_LAST);
    CHECK_OK(nixlkv_send_chunk(e, &chunk));
    expect_end(e, 3, NIXL_OK, 20000);
    CHECK(recv_u64(well.fd) == 3);
    send_u64(stopped.fd, 0);
    send_u64(well.fd, 0);
    expect_child_ok(stopped);
    expect_child_ok(well);
    nixlkv_engine_destroy(e);
    return 0;
}
