/* H5: an idle pair of connected engines uses next to no CPU, and answers at once nevertheless. */
#include <sys/resource.h>

#include "env.h"

enum { LEN = 4096, IDLE_MS = 5000 };

static double cpu_seconds(void) {
    struct rusage usage;
    CHECK(getrusage(RUSAGE_SELF, &usage) == 0);
    return (double)usage.ru_utime.tv_sec + (double)usage.ru_stime.tv_sec +
           ((double)usage.ru_utime.tv_usec + (double)usage.ru_stime.tv_usec) * 1e-6;
}

/* One engine, idle for a while between two transfers; exits with the CPU share in 1/1000 of a core over the limit. */
static int idle_engine(int fd, uint32_t role) {
    nixlkv_engine_t *engine = engine_create(role);
    char *memory = map_bytes(LEN);
    const nixlkv_region_t r = region(NIXLKV_REGION_KV, memory, LEN, LEN);
    CHECK_OK(nixlkv_register(engine, &r, 1, NULL));
    const uint64_t peer = exchange_and_connect(engine, fd);
    const int32_t page = 0;
    for (uint64_t room = 1; room <= 2; room++) {
        if (role == NIXLKV_ROLE_DECODE) {
            const nixlkv_recv_params_t params = recv_params(room, &peer, 1, &page, 1);
            CHECK_OK(nixlkv_recv(engine, &params));
        } else {
            const nixlkv_chunk_t chunk = chunk_of(room, &page, 1, 0, NIXLKV_CHUNK_LAST);
            CHECK_OK(nixlkv_send_chunk(engine, &chunk));
        }
        expect_end(engine, room, NIXL_OK, 20000);
        if (room == 2) break;
        sleep_ms(200);
        const double cpu = cpu_seconds();
        const uint64_t start = now_ns();
        sleep_ms(IDLE_MS);
        const double share = (cpu_seconds() - cpu) / ((double)(now_ns() - start) * 1e-9);
        fprintf(stderr, "role %u: %.2f %% of a core\n", role, share * 100.0);
        /* 2 % is promised; twice that is allowed for a machine that is busy with other things. */
        if (share > 0.04) FAIL("an idle engine used %.2f %% of a core", share * 100.0);
    }
    send_u64(fd, 1);
    CHECK(recv_u64(fd) == 1);
    nixlkv_engine_destroy(engine);
    return 0;
}

static int child_body(int fd) { return idle_engine(fd, NIXLKV_ROLE_DECODE); }

int main(void) {
    const child_t child = spawn(child_body);
    const int result = idle_engine(child.fd, NIXLKV_ROLE_PREFILL);
    expect_child_ok(child);
    return result;
}
