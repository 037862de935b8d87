/* C7: engines that are created at the same moment in 8 processes are all ready within 10 s, round after round; one
 * whose backend hangs while it starts is given up within its time limit, and the next attempt succeeds.
 * NIXLKV_TEST_LOOPS: rounds, 4 by default. */
/* quiet */
/* timeout: 400 */
#include "env.h"

#include <stdatomic.h>

enum { PROCESSES = 8, READY_MS = 10000, HANG_LIMIT_MS = 300 };

/* Shared with the children: the number of the round that has begun. */
static atomic_uint *gate;
static unsigned my_round;

static int create_at_the_gate(int fd) {
    send_u64(fd, 0);
    while (atomic_load(gate) < my_round) usleep(100);
    const uint64_t start = now_ms();
    nixlkv_engine_t *engine = engine_create(NIXLKV_ROLE_DECODE);
    send_u64(fd, now_ms() - start);
    free(export_blob(engine).bytes);
    CHECK_OK(nixlkv_engine_shutdown(engine, 5000));
    nixlkv_engine_destroy(engine);
    return 0;
}

static void together(uint64_t rounds) {
    gate = mmap(NULL, sizeof *gate, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(gate != MAP_FAILED);
    for (my_round = 1; my_round <= rounds; my_round++) {
        child_t children[PROCESSES];
        for (int i = 0; i < PROCESSES; i++) children[i] = spawn(create_at_the_gate);
        for (int i = 0; i < PROCESSES; i++) CHECK(recv_u64(children[i].fd) == 0);
        const uint64_t start = now_ms();
        atomic_store(gate, my_round);
        for (int i = 0; i < PROCESSES; i++) {
            const uint64_t took = recv_u64(children[i].fd);
            if (took >= READY_MS || now_ms() - start >= READY_MS + 1000)
                FAIL("round %u, process %d: ready after %" PRIu64 " ms", my_round, i, took);
        }
        for (int i = 0; i < PROCESSES; i++) expect_child_ok(children[i]);
    }
}

static void hanging(void) {
    nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_DECODE);
    config.create_timeout_ms = HANG_LIMIT_MS;
    CHECK_OK(nixlkv_test_fault("create_hangs", 0, 1));
    const uint64_t start = now_ms();
    expect_no_engine(&config, NIXL_ERR_CREATE_TIMEOUT, "within 300 ms");
    CHECK(now_ms() - start < 1800); /* it would have hung for 2000 */
    CHECK(strstr(nixlkv_last_error(), "UCX") != NULL);
    CHECK(nixlkv_status_retryable(NIXL_ERR_CREATE_TIMEOUT) == 1);
    config.create_timeout_ms = 0;
    expect_engines_work(config);
    sleep_ms(2500); /* what was hanging has started by now, and is taken down behind our back */
    expect_engines_work(config);
}

int main(void) {
    together(count_from("NIXLKV_TEST_LOOPS", 4)); /* first: the children must be forked before we have an engine */
    hanging();
    return 0;
}
