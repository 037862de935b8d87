/* E6: two engines connect, transfer and disconnect 300 times under a low limit of file descriptors. All of it works,
 * and what the processes hold does not grow: a connection that ended in good order is used again. */
/* timeout: 180 */
#include "flow.h"

#include <dirent.h>
#include <sys/resource.h>

enum { CYCLES = 300, SETTLED = 30, MAX_MORE_FDS = 4, MAX_MORE_KIB = 4096 };

static long fds_of(const node_t *node) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd", (int)node->child.pid);
    DIR *dir = opendir(path);
    CHECK(dir != NULL);
    long count = -2; /* . and .. */
    while (readdir(dir) != NULL) count++;
    closedir(dir);
    return count;
}

static long rss_kib_of(const node_t *node) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/statm", (int)node->child.pid);
    FILE *file = fopen(path, "r");
    CHECK(file != NULL);
    long size, resident;
    CHECK(fscanf(file, "%ld %ld", &size, &resident) == 2);
    fclose(file);
    return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

static void disconnect(const node_t *node, uint64_t peer) {
    EXPECT(ask(node, &(op_t){.what = OP_DISCONNECT, .senders = {peer}}), NIXL_OK);
}

int main(void) {
    const struct rlimit limit = {1024, 1024};
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    node_t nodes[2] = {node_start((node_config_t){.role = NIXLKV_ROLE_PREFILL}),
                       node_start((node_config_t){.role = NIXLKV_ROLE_DECODE})};
    const node_t *prefill = &nodes[0], *decode = &nodes[1];
    long fds[2] = {0, 0}, kib[2] = {0, 0};
    for (uint64_t cycle = 0; cycle < CYCLES; cycle++) {
        uint64_t decode_peer, prefill_peer;
        join(prefill, decode, &decode_peer, &prefill_peer);
        transfer_works(prefill, decode, prefill_peer, 1);
        /* Either side first; the other's goodbye may or may not have come by then. */
        if (cycle % 2 == 0) disconnect(prefill, decode_peer);
        disconnect(decode, prefill_peer);
        if (cycle % 2 == 1) disconnect(prefill, decode_peer);
        if (cycle == SETTLED)
            for (int i = 0; i < 2; i++) {
                fds[i] = fds_of(&nodes[i]);
                kib[i] = rss_kib_of(&nodes[i]);
            }
    }
    sleep_ms(200);
    for (int i = 0; i < 2; i++) {
        const long more_fds = fds_of(&nodes[i]) - fds[i], more_kib = rss_kib_of(&nodes[i]) - kib[i];
        printf("%s: %ld file descriptors and %ld KiB more in %d cycles\n", i == 0 ? "prefill" : "decode", more_fds,
               more_kib, CYCLES - SETTLED);
        fflush(stdout);
        CHECK(more_fds <= MAX_MORE_FDS && more_kib <= MAX_MORE_KIB);
    }
    for (int i = 0; i < 2; i++) node_quit(&nodes[i]);
    return 0;
}
