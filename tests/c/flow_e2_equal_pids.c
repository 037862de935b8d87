/* E2: two engines in containers that share the host's name and number their processes alike: both have the process id
 * 1. They know each other apart, connect and transfer both ways. UCX reaches the other's memory over tcp then (M15).
 * */
/* timeout: 60 */
#include "flow.h"

#include <fcntl.h>
#include <sched.h>

/* In a PID namespace of its own: the engine's process is a child of this one, and the first there. */
static int isolated(int fd) {
    CHECK(unshare(CLONE_NEWPID) == 0);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        CHECK(getpid() == 1);
        exit(node_main(fd));
    }
    close(fd);
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

static node_t start_isolated(uint32_t role) {
    node_config_t config = {.role = role, .num_layers = 1, .num_pages = 64, .page_len = 1 << 20};
    starting = config;
    return (node_t){spawn(isolated), config};
}

/* Bytes that the loopback device has carried. */
static uint64_t loopback_bytes(void) {
    FILE *file = fopen("/proc/net/dev", "r");
    CHECK(file != NULL);
    char line[512];
    uint64_t bytes = UINT64_MAX;
    while (fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, " lo: %" SCNu64, &bytes) == 1) break;
    fclose(file);
    CHECK(bytes != UINT64_MAX);
    return bytes;
}

int main(void) {
    node_t a = start_isolated(NIXLKV_ROLE_BOTH), b = start_isolated(NIXLKV_ROLE_BOTH);
    uint64_t b_at_a, a_at_b;
    join(&a, &b, &b_at_a, &a_at_b);
    for (uint64_t room = 1; room <= 4; room++) {
        transfer_works(&a, &b, a_at_b, room);
        transfer_works(&b, &a, b_at_a, room);
    }
    const request_t r = request_of(10, 64);
    poison_all(&b);
    const uint64_t before = loopback_bytes();
    EXPECT(receive(&b, &r, &a_at_b, 1), NIXL_OK);
    EXPECT(send_part(&a, &r, 0, 64, NIXLKV_CHUNK_LAST), NIXL_OK);
    EXPECT_ENDED(&b, 10, NIXL_OK, "", 20000);
    EXPECT_CONTENTS(&b, &r);
    printf("64 MiB in all, of which the loopback device carried %" PRIu64 " MiB\n", (loopback_bytes() - before) >> 20);
    fflush(stdout);
    EXPECT_OVER(&b, 10, NIXL_OK, "", 20000);
    EXPECT_OVER(&a, 10, NIXL_OK, "", 20000);
    node_quit(&a);
    node_quit(&b);
    return 0;
}
