/* Pages beyond 2 and 4 GiB of a 6 GiB region: every stamp at its place, and nothing else touched (CASES A12). */
/* timeout: 90 */
#include "test.h"

enum { PAGE = 64 << 10, NUM = 12 };
static const uint64_t GIB = UINT64_C(1) << 30, LEN = UINT64_C(6) << 30;

/* How many of the region's system pages are in memory. */
static uint64_t resident(char *base) {
    const uint64_t unit = (uint64_t)sysconf(_SC_PAGESIZE), count = LEN / unit;
    unsigned char *in = malloc(count);
    CHECK(in != NULL);
    CHECK(mincore(base, LEN, in) == 0);
    uint64_t sum = 0;
    for (uint64_t i = 0; i < count; i++) sum += in[i] & 1;
    free(in);
    return sum * unit;
}

int main(void) {
    nixlkv_engine_t *prefill = engine_create(NIXLKV_ROLE_PREFILL), *decode = engine_create(NIXLKV_ROLE_DECODE);
    char *from = map_bytes(LEN), *to = map_bytes(LEN);
    /* So that one page more or less in memory is one that was touched. */
    CHECK(madvise(to, LEN, MADV_NOHUGEPAGE) == 0);
    CHECK(madvise(from, LEN, MADV_NOHUGEPAGE) == 0);
    const nixlkv_region_t regions[2] = {region(NIXLKV_REGION_KV, from, LEN, PAGE),
                                        region(NIXLKV_REGION_KV, to, LEN, PAGE)};
    CHECK_OK(nixlkv_register(prefill, &regions[0], 1, NULL));
    CHECK_OK(nixlkv_register(decode, &regions[1], 1, NULL));
    uint64_t decode_peer, prefill_peer;
    connect_both(prefill, decode, &decode_peer, &prefill_peer);

    const uint64_t offsets[NUM] = {
        0,           PAGE,    2 * GIB - 1,    2 * GIB,        2 * GIB + PAGE, 3 * GIB,
        4 * GIB - 1, 4 * GIB, 4 * GIB + PAGE, 5 * GIB - PAGE, LEN - 2 * PAGE, LEN - 1,
    };
    int32_t source[NUM], destination[NUM];
    for (int i = 0; i < NUM; i++) {
        source[i] = (int32_t)(offsets[i] / PAGE);
        destination[NUM - 1 - i] = source[i];
    }
    CHECK(resident(to) == 0);
    for (int i = 0; i < NUM; i++) stamp_item(from, PAGE, source[i], 12, 0, (uint64_t)i);
    const nixlkv_recv_params_t params = recv_params(12, &prefill_peer, 1, destination, NUM);
    CHECK_OK(nixlkv_recv(decode, &params));
    for (uint64_t i = 0; i < NUM; i += 4) {
        const nixlkv_chunk_t chunk = chunk_of(12, source + i, 4, i, i + 4 == NUM ? NIXLKV_CHUNK_LAST : 0);
        CHECK_OK(nixlkv_send_chunk(prefill, &chunk));
    }
    expect_end(decode, 12, NIXL_OK, 20000);
    expect_end(prefill, 12, NIXL_OK, 20000);
    CHECK(resident(to) == (uint64_t)NUM * PAGE);
    for (int i = 0; i < NUM; i++) CHECK(wrong_words(to, PAGE, destination[i], 12, 0, (uint64_t)i) == 0);

    /* One past the last page is none. */
    const int32_t past = (int32_t)(LEN / PAGE);
    const nixlkv_chunk_t chunk = chunk_of(13, &past, 1, 0, NIXLKV_CHUNK_LAST);
    CHECK_SAYS(nixlkv_send_chunk(prefill, &chunk), NIXL_ERR_PAGE_OUT_OF_RANGE, "98304");
    const nixlkv_recv_params_t beyond = recv_params(13, &prefill_peer, 1, &past, 1);
    CHECK_SAYS(nixlkv_recv(decode, &beyond), NIXL_ERR_PAGE_OUT_OF_RANGE, "98304");
    CHECK_OK(nixlkv_release(decode, 12));
    CHECK_OK(nixlkv_release(prefill, 12));
    CHECK_OK(nixlkv_engine_shutdown(prefill, 5000));
    CHECK_OK(nixlkv_engine_shutdown(decode, 5000));
    nixlkv_engine_destroy(prefill);
    nixlkv_engine_destroy(decode);
    return 0;
}
