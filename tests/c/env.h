/* What the env_ tests share: attempts to create an engine in surroundings that are broken, and files to break. */
#ifndef ENV_H
#define ENV_H

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>

#include "test.h"

/* The test's own folder. */
static inline const char *in_folder(const char *name) {
    static char paths[8][PATH_MAX];
    static int next;
    char *path = paths[next++ % 8];
    const char *folder = getenv("NIXLKV_TEST_DIR");
    CHECK(folder != NULL);
    snprintf(path, PATH_MAX, "%s/%s", folder, name);
    return path;
}

/* The NIXL library that the tests run with. */
static inline const char *real_library(void) {
    const char *path = getenv("NIXLKV_NIXL_LIBRARY");
    if (path == NULL || access(path, R_OK) != 0) FAIL("NIXLKV_NIXL_LIBRARY names no library: see `make test`");
    return path;
}

/* A file beside the real library. */
static inline const char *beside_library(const char *name) {
    static char path[PATH_MAX];
    snprintf(path, sizeof path, "%s", real_library());
    char *slash = strrchr(path, '/');
    CHECK(slash != NULL);
    snprintf(slash + 1, sizeof path - (size_t)(slash + 1 - path), "%s", name);
    return path;
}

/* Copies the part of a file that comes before `numerator / denominator` of it. */
static inline void copy_part(const char *from, const char *to, uint64_t numerator, uint64_t denominator) {
    struct stat st;
    CHECK(stat(from, &st) == 0);
    uint64_t left = (uint64_t)st.st_size * numerator / denominator;
    CHECK(left > 0);
    const int in = open(from, O_RDONLY), out = open(to, O_WRONLY | O_CREAT | O_TRUNC, 0755);
    CHECK(in >= 0 && out >= 0);
    static char block[1 << 16];
    while (left > 0) {
        const ssize_t n = read(in, block, left < sizeof block ? (size_t)left : sizeof block);
        CHECK(n > 0 && write(out, block, (size_t)n) == n);
        left -= (uint64_t)n;
    }
    close(in);
    close(out);
}

/* No engine comes of the configuration; the error has the code and says the part, in one line. */
static inline void expect_no_engine(const nixlkv_engine_config_t *config, int32_t code, const char *part) {
    nixlkv_engine_t *engine = NULL;
    const int32_t status = nixlkv_engine_create(config, &engine);
    if (status != code || strstr(nixlkv_last_error(), part) == NULL)
        FAIL("expected %s saying \"%s\", got %s: %s", nixlkv_status_name(code), part, nixlkv_status_name(status),
             nixlkv_last_error());
    CHECK(engine == NULL && strchr(nixlkv_last_error(), '\n') == NULL);
}

/* A pair of engines with this configuration moves a page: all is well. */
static inline void expect_engines_work(nixlkv_engine_config_t config) {
    enum { LEN = 4096 };
    nixlkv_engine_t *prefill = NULL, *decode = NULL;
    config.role = NIXLKV_ROLE_PREFILL;
    CHECK_OK(nixlkv_engine_create(&config, &prefill));
    config.role = NIXLKV_ROLE_DECODE;
    CHECK_OK(nixlkv_engine_create(&config, &decode));
    char *from = map_bytes(LEN), *to = map_bytes(LEN);
    nixlkv_region_t r = region(NIXLKV_REGION_KV, from, LEN, LEN);
    CHECK_OK(nixlkv_register(prefill, &r, 1, NULL));
    r.address = to;
    CHECK_OK(nixlkv_register(decode, &r, 1, NULL));
    uint64_t decode_peer = 0, prefill_peer = 0;
    connect_both(prefill, decode, &decode_peer, &prefill_peer);
    const int32_t page = 0;
    stamp_item(from, LEN, page, 1, 0, 0);
    const nixlkv_recv_params_t params = recv_params(1, &prefill_peer, 1, &page, 1);
    const nixlkv_chunk_t chunk = chunk_of(1, &page, 1, 0, NIXLKV_CHUNK_LAST);
    CHECK_OK(nixlkv_recv(decode, &params));
    CHECK_OK(nixlkv_send_chunk(prefill, &chunk));
    expect_end(decode, 1, NIXL_OK, 20000);
    expect_end(prefill, 1, NIXL_OK, 20000);
    CHECK(wrong_words(to, LEN, page, 1, 0, 0) == 0);
    nixlkv_engine_destroy(prefill);
    nixlkv_engine_destroy(decode);
    munmap(from, LEN);
    munmap(to, LEN);
}

#endif
