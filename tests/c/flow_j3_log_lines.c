/* J3: a receiver is killed with 1,000 rooms in flight. Its sender fails them all, and says so in few lines: no more
 * than 50 in a minute, here 20 s of it; 60 s with NIXLKV_TEST_LONG in the environment. */
/* timeout: 120 */
#include "test.h"

#include <stdatomic.h>

enum { PAGE = 4096, ROOMS = 1000, MAX_LINES = 50 };

static atomic_int num_lines;
static char last_line[512];

static void log_line(void *user_data, uint32_t level, const char *message) {
    (void)user_data;
    snprintf(last_line, sizeof last_line, "%u %s", level, message);
    atomic_fetch_add(&num_lines, 1);
}

static int receiver(int fd) {
    struct pollfd turn = {fd, POLLIN, 0};
    CHECK(poll(&turn, 1, -1) == 1 && recv_u64(fd) == 1);
    void *memory;
    const nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_DECODE);
    nixlkv_engine_t *e = engine_with_pages(&config, PAGE, 2 * ROOMS, &memory);
    const uint64_t sender = exchange_and_connect(e, fd);
    for (uint64_t room = 1; room <= ROOMS; room++) {
        const int32_t pages[2] = {(int32_t)(2 * room - 2), (int32_t)(2 * room - 1)};
        const nixlkv_recv_params_t params = recv_params(room, &sender, 1, pages, 2);
        CHECK_OK(nixlkv_recv(e, &params));
    }
    send_u64(fd, ROOMS);
    for (;;) pause();
}

int main(void) {
    const uint64_t duration_ms = getenv("NIXLKV_TEST_LONG") != NULL ? 60000 : 20000;
    child_t child = spawn(receiver), next = spawn(receiver);
    send_u64(child.fd, 1);
    nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_PREFILL);
    config.log_level = NIXLKV_LOG_INFO;
    config.log_callback = log_line;
    void *memory;
    nixlkv_engine_t *e = engine_with_pages(&config, PAGE, 2, &memory);
    exchange_and_connect(e, child.fd);
    const int32_t page = 0;
    for (uint64_t room = 1; room <= ROOMS; room++) {
        const nixlkv_chunk_t chunk = chunk_of(room, &page, 1, 0, 0);
        CHECK_OK(nixlkv_send_chunk(e, &chunk));
    }
    CHECK(recv_u64(child.fd) == ROOMS);
    for (uint64_t room = 1; room <= ROOMS; room++) {
        const uint64_t start = now_ms();
        while (poll_room(e, room).num_chunks != 1) CHECK(now_ms() - start < 20000);
    }
    const uint64_t start = now_ms();
    atomic_store(&num_lines, 0);
    CHECK(kill(child.pid, SIGKILL) == 0);
    CHECK(waitpid(child.pid, NULL, 0) == child.pid);
    for (uint64_t room = 1; room <= ROOMS; room++) expect_end(e, room, NIXL_ERR_PEER_LOST, 20000);
    while (now_ms() - start < duration_ms) {
        const int lines = atomic_load(&num_lines);
        if (lines > MAX_LINES) FAIL("%d lines after %" PRIu64 " ms, the last: %s", lines, now_ms() - start, last_line);
        sleep_ms(20);
    }
    const int lines = atomic_load(&num_lines);
    printf("%d lines, the last: %s\n", lines, last_line);
    CHECK(lines >= 1);
    for (uint64_t room = 1; room <= ROOMS; room++) CHECK_OK(nixlkv_release(e, room));

    child = next;
    send_u64(child.fd, 1);
    exchange_and_connect(e, child.fd);
    CHECK(recv_u64(child.fd) == ROOMS);
    for (uint64_t room = 1; room <= ROOMS; room++) {
        const int32_t two[2] = {0, 1};
        const nixlkv_chunk_t chunk = chunk_of(room, two, 2, 0, NIXLKV_CHUNK_LAST);
        CHECK_OK(nixlkv_send_chunk(e, &chunk));
    }
    for (uint64_t room = 1; room <= ROOMS; room++) expect_end(e, room, NIXL_OK, 20000);
    CHECK(kill(child.pid, SIGKILL) == 0);
    CHECK(waitpid(child.pid, NULL, 0) == child.pid);
    nixlkv_engine_destroy(e);
    return 0;
}
