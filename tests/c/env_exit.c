/* I19: a process that ends without destroying its engines ends with the status it chose, at once, however it ends:
 * idle, in the middle of a transfer, from another thread, or while a thread waits inside the library. */
/* timeout: 120 */
#include <pthread.h>

#include "env.h"

enum { PAGE = 1 << 20, PAGES = 16 };

static nixlkv_engine_t *prefill, *decode;

static void *wait_for_ever(void *unused) {
    (void)unused;
    const uint64_t room = 1;
    nixlkv_wait(decode, &room, 1, 0, UINT64_MAX);
    sleep_ms(60000);
    return NULL;
}

static void *exit_here(void *unused) {
    (void)unused;
    exit(0);
}

/* Ends the process by `way`, with a room open or under way. */
static int body(int way) {
    prefill = engine_create(NIXLKV_ROLE_PREFILL);
    decode = engine_create(NIXLKV_ROLE_DECODE);
    char *from = map_bytes((size_t)PAGES * PAGE), *to = map_bytes((size_t)PAGES * PAGE);
    nixlkv_region_t r = region(NIXLKV_REGION_KV, from, (uint64_t)PAGES * PAGE, PAGE);
    CHECK_OK(nixlkv_register(prefill, &r, 1, NULL));
    r.address = to;
    CHECK_OK(nixlkv_register(decode, &r, 1, NULL));
    uint64_t decode_peer = 0, prefill_peer = 0;
    connect_both(prefill, decode, &decode_peer, &prefill_peer);
    int32_t pages[PAGES];
    shuffle(pages, PAGES, 7);
    const nixlkv_recv_params_t params = recv_params(1, &prefill_peer, 1, pages, PAGES);
    CHECK_OK(nixlkv_recv(decode, &params));
    pthread_t thread;
    if (way == 2) CHECK(pthread_create(&thread, NULL, wait_for_ever, NULL) == 0);
    if (way != 0) {
        const nixlkv_chunk_t chunk = chunk_of(1, pages, PAGES, 0, way == 1 ? NIXLKV_CHUNK_LAST : 0);
        CHECK_OK(nixlkv_send_chunk(prefill, &chunk));
    }
    sleep_ms((unsigned)(way * 3));
    if (way == 3) {
        CHECK(pthread_create(&thread, NULL, exit_here, NULL) == 0);
        sleep_ms(60000);
    }
    return 0;
}

int main(void) {
    for (int i = 0; i < 12; i++) {
        const pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) exit(body(i % 4));
        int status = 0;
        const uint64_t until = now_ms() + 20000;
        while (waitpid(pid, &status, WNOHANG) == 0) {
            if (now_ms() > until) {
                kill(pid, SIGKILL);
                FAIL("run %d, way %d: the process does not end", i, i % 4);
            }
            sleep_ms(2);
        }
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
            FAIL("run %d, way %d: ended with wait status %#x", i, i % 4, status);
    }
    return 0;
}
