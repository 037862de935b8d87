/* What the C tests share: checks that say what was wrong, two processes, stamped pages over poison. */
#ifndef TEST_H
#define TEST_H

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <nixlkv.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Only in a library built with the feature fault-injection: arms a fault point. */
int32_t nixlkv_test_fault(const char *name, uint64_t skip, uint64_t times);

#define FAIL(...)                                                                                                      \
    do {                                                                                                               \
        fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                                                \
        fprintf(stderr, __VA_ARGS__);                                                                                  \
        fprintf(stderr, "\n");                                                                                         \
        exit(1);                                                                                                       \
    } while (0)

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) FAIL("not true: %s", #condition);                                                            \
    } while (0)

#define CHECK_STATUS(call, code)                                                                                       \
    do {                                                                                                               \
        const int32_t status_ = (call);                                                                                \
        if (status_ != (code))                                                                                         \
            FAIL("%s gave %s, not %s; last error: %s", #call, nixlkv_status_name(status_), nixlkv_status_name(code),   \
                 nixlkv_last_error());                                                                                 \
    } while (0)

#define CHECK_OK(call) CHECK_STATUS(call, NIXL_OK)

/* The call fails with the code, and the last error's text holds the part. */
#define CHECK_SAYS(call, code, part)                                                                                   \
    do {                                                                                                               \
        CHECK_STATUS(call, code);                                                                                      \
        if (strstr(nixlkv_last_error(), part) == NULL)                                                                 \
            FAIL("%s: the last error does not say \"%s\": %s", #call, part, nixlkv_last_error());                      \
    } while (0)

static inline uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline uint64_t now_ms(void) { return now_ns() / 1000000u; }

/* A time limit, longer under a tool that slows the program down (tests/common/under.rs). */
static inline uint64_t slowed(uint64_t ms) {
    const char *factor = getenv("NIXLKV_TEST_SLOWDOWN");
    return factor == NULL ? ms : ms * strtoull(factor, NULL, 10);
}

static inline void sleep_ms(unsigned ms) {
    struct timespec t = {(time_t)(ms / 1000u), (long)(ms % 1000u) * 1000000L};
    while (nanosleep(&t, &t) != 0 && errno == EINTR) {
    }
}

/* Pages from the system, so that their edges are known; zero-filled. */
static inline void *map_bytes(size_t len) {
    void *p = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) FAIL("mmap of %zu bytes: %s", len, strerror(errno));
    return p;
}

/* ---- engines ---- */

static inline nixlkv_engine_config_t engine_config(uint32_t role) {
    nixlkv_engine_config_t config;
    CHECK_OK(nixlkv_engine_config_init(&config, sizeof config));
    config.role = role;
    if (slowed(1) > 1) config.create_timeout_ms = slowed(30000);
    return config;
}

static inline nixlkv_engine_t *engine_create(uint32_t role) {
    nixlkv_engine_config_t config = engine_config(role);
    nixlkv_engine_t *engine = NULL;
    CHECK_OK(nixlkv_engine_create(&config, &engine));
    return engine;
}

static inline nixlkv_region_t region(uint32_t kind, void *address, uint64_t len, uint64_t item_len) {
    nixlkv_region_t r;
    CHECK_OK(nixlkv_region_init(&r, sizeof r));
    r.kind = kind;
    r.address = address;
    r.len = len;
    r.item_len = item_len;
    r.memory_kind = NIXLKV_MEMORY_DRAM;
    if (kind == NIXLKV_REGION_KV) r.part = NIXLKV_PART_FUSED;
    return r;
}

/* An engine with one KV region of so many pages, in memory of its own. */
static inline nixlkv_engine_t *engine_with_pages(const nixlkv_engine_config_t *config, uint64_t page_len,
                                                 uint64_t num_pages, void **memory) {
    nixlkv_engine_t *engine = NULL;
    CHECK_OK(nixlkv_engine_create(config, &engine));
    *memory = map_bytes(page_len * num_pages);
    const nixlkv_region_t kv = region(NIXLKV_REGION_KV, *memory, page_len * num_pages, page_len);
    CHECK_OK(nixlkv_register(engine, &kv, 1, NULL));
    return engine;
}

typedef struct blob {
    uint64_t len;
    void *bytes;
} blob_t;

static inline blob_t export_blob(nixlkv_engine_t *engine) {
    blob_t blob = {0, NULL};
    CHECK_STATUS(nixlkv_export(engine, NULL, 0, &blob.len), NIXL_ERR_BUFFER_TOO_SMALL);
    blob.bytes = malloc(blob.len);
    CHECK(blob.bytes != NULL);
    CHECK_OK(nixlkv_export(engine, blob.bytes, blob.len, &blob.len));
    return blob;
}

/* Connects two engines of one process both ways; gives each one's id of the other. */
static inline void connect_both(nixlkv_engine_t *a, nixlkv_engine_t *b, uint64_t *b_at_a, uint64_t *a_at_b) {
    blob_t blob_a = export_blob(a), blob_b = export_blob(b);
    CHECK_OK(nixlkv_connect(a, blob_b.bytes, blob_b.len, b_at_a));
    CHECK_OK(nixlkv_connect(b, blob_a.bytes, blob_a.len, a_at_b));
    free(blob_a.bytes);
    free(blob_b.bytes);
}

static inline nixlkv_room_status_t poll_room(const nixlkv_engine_t *engine, uint64_t room) {
    nixlkv_room_status_t status;
    CHECK_OK(nixlkv_room_status_init(&status, sizeof status));
    CHECK_OK(nixlkv_poll(engine, room, &status));
    return status;
}

static inline nixlkv_recv_params_t recv_params(uint64_t room, const uint64_t *senders, uint64_t num_senders,
                                               const int32_t *pages, uint64_t num_pages) {
    nixlkv_recv_params_t params;
    CHECK_OK(nixlkv_recv_params_init(&params, sizeof params));
    params.room = room;
    params.senders = senders;
    params.num_senders = num_senders;
    params.pages = pages;
    params.num_pages = num_pages;
    return params;
}

static inline nixlkv_chunk_t chunk_of(uint64_t room, const int32_t *pages, uint64_t num_pages, uint64_t page_offset,
                                      uint32_t flags) {
    nixlkv_chunk_t chunk;
    CHECK_OK(nixlkv_chunk_init(&chunk, sizeof chunk));
    chunk.room = room;
    chunk.pages = pages;
    chunk.num_pages = num_pages;
    chunk.page_offset = page_offset;
    chunk.flags = flags;
    return chunk;
}

/* Waits until the room has ended and is quiesced, and checks how it ended. */
static inline void expect_end(const nixlkv_engine_t *engine, uint64_t room, int32_t error, uint64_t timeout_ms) {
    const int32_t waited = nixlkv_wait(engine, &room, 1, NIXLKV_WAIT_QUIESCED, slowed(timeout_ms));
    const nixlkv_room_status_t status = poll_room(engine, room);
    if (waited != NIXL_OK || status.error != error || status.quiesced != 1)
        FAIL("room %" PRIu64 ": state %u, quiesced %u, error %s (%s), expected %s; wait gave %s", room, status.state,
             status.quiesced, nixlkv_status_name(status.error), status.error_text, nixlkv_status_name(error),
             nixlkv_status_name(waited));
    CHECK(status.state == (error == NIXL_OK ? NIXLKV_ROOM_SUCCESS : NIXLKV_ROOM_FAILED));
}

/* ---- stamped pages over poison ---- */

#define POISON 0xdeadbeefcafef00du

/* splitmix64, as a hash of what a word stands for. */
static inline uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* The word that belongs at (room, what, position, index): what tells regions and kinds apart. */
static inline uint64_t stamp(uint64_t room, uint64_t what, uint64_t position, uint64_t index) {
    return mix(mix(mix(room ^ 0x5151u) ^ what) ^ position) ^ index;
}

static inline void poison(void *p, size_t len) {
    uint64_t *words = p;
    for (size_t i = 0; i < len / 8; i++) words[i] = POISON;
}

static inline void stamp_item(void *base, uint64_t item_len, int32_t item, uint64_t room, uint64_t what,
                              uint64_t position) {
    uint64_t *words = (uint64_t *)((char *)base + (uint64_t)item * item_len);
    for (uint64_t i = 0; i < item_len / 8; i++) words[i] = stamp(room, what, position, i);
}

/* How many words of the item are not the stamp. */
static inline uint64_t wrong_words(const void *base, uint64_t item_len, int32_t item, uint64_t room, uint64_t what,
                                   uint64_t position) {
    const uint64_t *words = (const uint64_t *)((const char *)base + (uint64_t)item * item_len);
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < item_len / 8; i++) wrong += words[i] != stamp(room, what, position, i);
    return wrong;
}

static inline uint64_t unpoisoned_words(const void *base, uint64_t item_len, int32_t item) {
    const uint64_t *words = (const uint64_t *)((const char *)base + (uint64_t)item * item_len);
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < item_len / 8; i++) wrong += words[i] != POISON;
    return wrong;
}

/* A shuffled 0..n-1. */
static inline void shuffle(int32_t *list, int32_t n, uint64_t seed) {
    for (int32_t i = 0; i < n; i++) list[i] = i;
    for (int32_t i = n - 1; i > 0; i--) {
        const int32_t j = (int32_t)(mix(seed + (uint64_t)i) % (uint64_t)(i + 1));
        const int32_t t = list[i];
        list[i] = list[j];
        list[j] = t;
    }
}

/* ---- what a process holds ---- */

typedef struct usage {
    int64_t fds, threads, rss_kib;
} usage_t;

static inline usage_t usage_of(pid_t pid) {
    char path[64], line[256];
    usage_t usage = {0};
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *fds = opendir(path);
    CHECK(fds != NULL);
    while (readdir(fds) != NULL) usage.fds++;
    closedir(fds);
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    FILE *status = fopen(path, "r");
    CHECK(status != NULL);
    while (fgets(line, sizeof line, status) != NULL) {
        long long value;
        if (sscanf(line, "Threads: %lld", &value) == 1) usage.threads = value;
        if (sscanf(line, "VmRSS: %lld", &value) == 1) usage.rss_kib = value;
    }
    fclose(status);
    CHECK(usage.fds > 0 && usage.threads > 0 && usage.rss_kib > 0);
    return usage;
}

/* A count from the environment, for longer runs than the default. */
static inline uint64_t count_from(const char *name, uint64_t otherwise) {
    const char *given = getenv(name);
    if (given == NULL) return otherwise;
    char *end;
    const uint64_t value = strtoull(given, &end, 10);
    if (end == given || *end != '\0') FAIL("%s=%s is not a count", name, given);
    return value;
}

/* ---- two processes ---- */

typedef struct child {
    pid_t pid;
    int fd; /* a socket to it */
} child_t;

/* Runs body in another process, before this one has called nixlkv. Its argument is the socket to the parent. */
static inline child_t spawn(int (*body)(int fd)) {
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    const pid_t parent = getpid(), pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(1);
        close(pair[0]);
        exit(body(pair[1]));
    }
    close(pair[1]);
    return (child_t){pid, pair[0]};
}

static inline void send_bytes(int fd, const void *bytes, size_t len) {
    const char *p = bytes;
    while (len > 0) {
        const ssize_t n = send(fd, p, len, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) FAIL("the other process does not listen: %s", strerror(errno));
        p += n;
        len -= (size_t)n;
    }
}

static inline void recv_bytes(int fd, void *bytes, size_t len) {
    char *p = bytes;
    while (len > 0) {
        struct pollfd wait = {fd, POLLIN, 0};
        const int ready = poll(&wait, 1, (int)slowed(60000));
        if (ready < 0 && errno == EINTR) continue;
        if (ready != 1) FAIL("the other process said nothing for a minute, or the longer limit of a slow tool");
        const ssize_t n = recv(fd, p, len, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) FAIL("the other process is gone");
        p += n;
        len -= (size_t)n;
    }
}

static inline void send_u64(int fd, uint64_t value) { send_bytes(fd, &value, sizeof value); }

static inline uint64_t recv_u64(int fd) {
    uint64_t value;
    recv_bytes(fd, &value, sizeof value);
    return value;
}

/* Exchanges blobs over the socket and connects; gives the peer's id. */
static inline uint64_t exchange_and_connect(nixlkv_engine_t *engine, int fd) {
    blob_t mine = export_blob(engine);
    send_u64(fd, mine.len);
    send_bytes(fd, mine.bytes, mine.len);
    free(mine.bytes);
    blob_t theirs = {recv_u64(fd), NULL};
    CHECK(theirs.len < (64u << 20));
    theirs.bytes = malloc(theirs.len);
    CHECK(theirs.bytes != NULL);
    recv_bytes(fd, theirs.bytes, theirs.len);
    uint64_t peer = 0;
    CHECK_OK(nixlkv_connect(engine, theirs.bytes, theirs.len, &peer));
    free(theirs.bytes);
    return peer;
}

/* Waits for the child's end, which must be an exit with 0. */
static inline void expect_child_ok(child_t child) {
    int status = 0;
    CHECK(waitpid(child.pid, &status, 0) == child.pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) FAIL("the other process ended with wait status %#x", status);
    close(child.fd);
}

#endif
