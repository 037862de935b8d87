/* Whatever is not an unaltered blob is refused: every truncation, every byte changed, bytes added, other bytes. The
 * blob itself works afterwards. */
/* timeout: 90 */
#include "test.h"

static nixlkv_engine_t *prefill, *decode;
static uint64_t num_refused;

static void refused(const void *bytes, uint64_t len, const char *what, uint64_t where) {
    uint64_t peer = 4711;
    const int32_t status = nixlkv_connect(decode, bytes, len, &peer);
    if (status != NIXL_ERR_METADATA_INVALID && status != NIXL_ERR_WIRE_VERSION && status != NIXL_ERR_INVALID_ARGUMENT)
        FAIL("%s at %" PRIu64 ": %s", what, where, nixlkv_status_name(status));
    CHECK(peer == 4711);
    num_refused++;
}

int main(void) {
    enum { PAGE = 4096, PAGES = 8 };
    prefill = engine_create(NIXLKV_ROLE_PREFILL);
    decode = engine_create(NIXLKV_ROLE_DECODE);
    char *memory[2];
    for (int side = 0; side < 2; side++) {
        memory[side] = map_bytes(PAGE * PAGES);
        poison(memory[side], PAGE * PAGES);
        const nixlkv_region_t kv = region(NIXLKV_REGION_KV, memory[side], PAGE * PAGES, PAGE);
        CHECK_OK(nixlkv_register(side ? decode : prefill, &kv, 1, NULL));
    }
    blob_t blob = export_blob(prefill);
    /* At the end of a mapping, so that reading past the length is a fault. */
    const uint64_t room_for = (blob.len + PAGE - 1) / PAGE * PAGE;
    char *mapped = map_bytes(room_for + PAGE);
    CHECK(mprotect(mapped + room_for, PAGE, PROT_NONE) == 0);
    char *end = mapped + room_for;
    const char *real = blob.bytes;

    for (uint64_t len = 0; len < blob.len; len++) {
        memcpy(end - len, real, len);
        refused(end - len, len, "cut", len);
    }
    char *copy = end - blob.len;
    memcpy(copy, real, blob.len);
    for (uint64_t i = 0; i < blob.len; i++) {
        for (int bit = 0; bit <= 8; bit++) {
            copy[i] = (char)(real[i] ^ (bit == 8 ? 0xff : 1 << bit));
            refused(copy, blob.len, "changed", i);
        }
        copy[i] = real[i];
    }
    char *longer = malloc(blob.len + 8);
    CHECK(longer != NULL);
    memcpy(longer, real, blob.len);
    memset(longer + blob.len, 0, 8);
    for (uint64_t more = 1; more <= 8; more++) refused(longer, blob.len + more, "longer", more);
    free(longer);
    uint64_t random = 1;
    for (uint64_t n = 0; n < 2000; n++) {
        const uint64_t len = mix(n) % blob.len;
        for (uint64_t i = 0; i < len; i++) end[-1 - (int64_t)i] = (char)(random = mix(random));
        /* Every second one begins like a blob. */
        if (n % 2 == 0) memcpy(end - len, real, len < 8 ? len : 8);
        refused(end - len, len, "random", n);
    }
    CHECK(num_refused == blob.len + 9 * blob.len + 8 + 2000);

    uint64_t peer = 0;
    CHECK_STATUS(nixlkv_connect(prefill, real, blob.len, &peer), NIXL_ERR_PEER_SELF);
    CHECK(peer == 0);
    uint64_t decode_peer, prefill_peer;
    connect_both(prefill, decode, &decode_peer, &prefill_peer);
    /* Now that it is connected, its altered blobs change nothing either. */
    memcpy(copy, real, blob.len);
    for (uint64_t i = 0; i < blob.len; i++) {
        copy[i] ^= 0x10;
        refused(copy, blob.len, "changed, connected", i);
        copy[i] ^= 0x10;
    }
    const int32_t from = 3, to = 5;
    stamp_item(memory[0], PAGE, from, 1, 0, 0);
    const nixlkv_recv_params_t params = recv_params(1, &prefill_peer, 1, &to, 1);
    CHECK_OK(nixlkv_recv(decode, &params));
    const nixlkv_chunk_t chunk = chunk_of(1, &from, 1, 0, NIXLKV_CHUNK_LAST);
    CHECK_OK(nixlkv_send_chunk(prefill, &chunk));
    expect_end(decode, 1, NIXL_OK, 10000);
    CHECK(wrong_words(memory[1], PAGE, to, 1, 0, 0) == 0);
    expect_end(prefill, 1, NIXL_OK, 10000);
    free(blob.bytes);
    CHECK_OK(nixlkv_engine_shutdown(prefill, 5000));
    CHECK_OK(nixlkv_engine_shutdown(decode, 5000));
    nixlkv_engine_destroy(prefill);
    nixlkv_engine_destroy(decode);
    return 0;
}
