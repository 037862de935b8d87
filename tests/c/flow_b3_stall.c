/* B3, E5: a receiver that stops in the middle of a write. NIXL says nothing; the stall limit does. The pages stay with
 * the room until the receiver goes on and the transport lets go of them. */
/* env: UCX_TLS=tcp,self */
#include "test.h"

enum { PAGE = 1 << 20, PAGES = 64 };

static nixlkv_engine_t *engine(uint32_t role, void **memory) {
    nixlkv_engine_config_t config = engine_config(role);
    config.heartbeat_interval_ms = 200;
    config.liveness_limit_ms = 60000;
    config.stall_timeout_ms = 1500;
    return engine_with_pages(&config, PAGE, PAGES, memory);
}

static int receiver(int fd) {
    void *memory;
    nixlkv_engine_t *e = engine(NIXLKV_ROLE_DECODE, &memory);
    const uint64_t sender = exchange_and_connect(e, fd);
    int32_t pages[PAGES];
    shuffle(pages, PAGES, 5);
    for (uint64_t room = 1; room <= 2; room++) {
        nixlkv_recv_params_t params = recv_params(room, &sender, 1, pages, PAGES);
        CHECK_OK(nixlkv_recv(e, &params));
        send_u64(fd, room);
        expect_end(e, room, room == 1 ? NIXL_ERR_XFER_STALLED : NIXL_OK, 30000);
        if (room == 2)
            for (int i = 0; i < PAGES; i++) CHECK(wrong_words(memory, PAGE, pages[i], room, 0, (uint64_t)i) == 0);
        CHECK_OK(nixlkv_release(e, room));
        send_u64(fd, room);
    }
    CHECK(recv_u64(fd) == 0);
    nixlkv_engine_destroy(e);
    return 0;
}

static nixlkv_health_t health_of(const nixlkv_engine_t *e) {
    nixlkv_health_t health;
    CHECK_OK(nixlkv_health_init(&health, sizeof health));
    CHECK_OK(nixlkv_health(e, &health));
    return health;
}

int main(void) {
    child_t child = spawn(receiver);
    void *memory;
    nixlkv_engine_t *e = engine(NIXLKV_ROLE_PREFILL, &memory);
    exchange_and_connect(e, child.fd);
    int32_t pages[PAGES];
    shuffle(pages, PAGES, 9);

    CHECK(recv_u64(child.fd) == 1);
    nixlkv_room_status_t status;
    CHECK_OK(nixlkv_room_status_init(&status, sizeof status));
    while (nixlkv_poll(e, 1, &status) != NIXL_OK) sleep_ms(1); /* until the grant is here */
    CHECK(status.state == NIXLKV_ROOM_WAITING_FOR_INPUT);
    CHECK(kill(child.pid, SIGSTOP) == 0);
    for (int i = 0; i < PAGES; i++) stamp_item(memory, PAGE, pages[i], 1, 0, (uint64_t)i);
    nixlkv_chunk_t chunk = chunk_of(1, pages, PAGES, 0, NIXLKV_CHUNK_LAST);
    CHECK_OK(nixlkv_send_chunk(e, &chunk));
    const uint64_t start = now_ms();
    while (poll_room(e, 1).state == NIXLKV_ROOM_TRANSFERRING) {
        if (now_ms() - start > 6500) FAIL("no stall seen for 6.5 s, and the limit is 1.5 s");
        sleep_ms(5);
    }
    CHECK(now_ms() - start >= 1400);
    status = poll_room(e, 1);
    CHECK(status.state == NIXLKV_ROOM_FAILED && status.error == NIXL_ERR_XFER_STALLED && status.quiesced == 0);
    CHECK(strstr(status.error_text, "room 1") != NULL);
    CHECK(status.suspect == 1);
    CHECK_STATUS(nixlkv_release(e, 1), NIXL_ERR_NOT_QUIESCED);
    const nixlkv_health_t stuck = health_of(e);
    CHECK(stuck.oldest_transfer_ms >= 1400 && stuck.oldest_transfer_room == 1);
    CHECK(stuck.num_peers == 1 && stuck.num_peers_suspect == 1 && stuck.num_rooms_quarantined == 1);
    sleep_ms(500);
    CHECK(poll_room(e, 1).quiesced == 0);

    CHECK(kill(child.pid, SIGCONT) == 0);
    expect_end(e, 1, NIXL_ERR_XFER_STALLED, 30000);
    CHECK_OK(nixlkv_release(e, 1));
    CHECK(recv_u64(child.fd) == 1);

    CHECK(recv_u64(child.fd) == 2);
    for (int i = 0; i < PAGES; i++) stamp_item(memory, PAGE, pages[i], 2, 0, (uint64_t)i);
    chunk = chunk_of(2, pages, PAGES, 0, NIXLKV_CHUNK_LAST);
    CHECK_OK(nixlkv_send_chunk(e, &chunk));
    expect_end(e, 2, NIXL_OK, 30000);
    CHECK_OK(nixlkv_release(e, 2));
    CHECK(recv_u64(child.fd) == 2);
    for (int i = 0; i < 100 && health_of(e).oldest_transfer_ms != 0; i++) sleep_ms(10);
    const nixlkv_health_t well = health_of(e);
    CHECK(well.oldest_transfer_ms == 0 && well.num_peers_suspect == 0 && well.num_rooms_quarantined == 0);
    send_u64(child.fd, 0);
    expect_child_ok(child);
    nixlkv_engine_destroy(e);
    return 0;
}
