/* nixlkv_export, _connect and _disconnect: bad arguments, altered blobs, what cannot be mapped, who is who. */
#include "api.h"

static uint32_t crc32_of(const unsigned char *bytes, size_t len) {
    uint32_t crc = UINT32_MAX;
    for (size_t i = 0; i < len; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (0xedb88320u & (0u - (crc & 1u)));
    }
    return ~crc;
}

static void refused(nixlkv_engine_t *engine, const blob_t *blob, int32_t code, const char *say) {
    uint64_t peer = 4711;
    const int32_t status = nixlkv_connect(engine, blob->bytes, blob->len, &peer);
    if (status != code || strstr(nixlkv_last_error(), say) == NULL)
        FAIL("expected %s saying \"%s\", got %s: %s", nixlkv_status_name(code), say, nixlkv_status_name(status),
             nixlkv_last_error());
    CHECK(peer == 4711);
}

static void export_arguments(void) {
    uint64_t len = 99, space[2] = {0, 0};
    CHECK_BAD_HANDLES(nixlkv_export(engine, NULL, 0, &len));
    nixlkv_engine_t *engine = engine_create(NIXLKV_ROLE_PREFILL);
    register_memory(engine, WITH_ALL);
    CHECK_SAYS(nixlkv_export(engine, space, sizeof space, NULL), NIXL_ERR_INVALID_ARGUMENT, "len is NULL");
    CHECK_SAYS(nixlkv_export(engine, NULL, 0, (uint64_t *)(void *)((char *)space + 4)), NIXL_ERR_INVALID_ARGUMENT,
               "len");
    CHECK_SAYS(nixlkv_export(engine, NULL, 1, &len), NIXL_ERR_INVALID_ARGUMENT, "buffer is NULL and capacity is 1");
    CHECK_SAYS(nixlkv_export(engine, NULL, UINT64_MAX, &len), NIXL_ERR_INVALID_ARGUMENT, "buffer is NULL");
    CHECK(len == 99);
    CHECK_STATUS(nixlkv_export(engine, NULL, 0, &len), NIXL_ERR_BUFFER_TOO_SMALL);
    CHECK(len > 99);
    unsigned char *bytes = malloc(len + 16);
    CHECK(bytes != NULL);
    memset(bytes, 0xa5, len + 16);
    char say[64];
    snprintf(say, sizeof say, "has %" PRIu64 " bytes, the buffer %" PRIu64, len, len - 1);
    uint64_t needed = 0;
    CHECK_SAYS(nixlkv_export(engine, bytes, len - 1, &needed), NIXL_ERR_BUFFER_TOO_SMALL, say);
    CHECK(needed == len);
    for (uint64_t i = 0; i < len + 16; i++) CHECK(bytes[i] == 0xa5);
    CHECK_OK(nixlkv_export(engine, bytes, UINT64_MAX, &needed)); /* a capacity is a promise, not a size to allocate */
    CHECK(needed == len);
    for (uint64_t i = len; i < len + 16; i++) CHECK(bytes[i] == 0xa5);
    free(bytes);
    nixlkv_engine_destroy(engine);
}

static void connect_arguments(void) {
    nixlkv_engine_t *a = engine_create(NIXLKV_ROLE_PREFILL), *b = engine_create(NIXLKV_ROLE_DECODE);
    blob_t blob = export_blob(b);
    uint64_t peer = 0, space[2] = {0, 0};
    CHECK_BAD_HANDLES(nixlkv_connect(engine, blob.bytes, blob.len, &peer));
    CHECK_SAYS(nixlkv_connect(a, blob.bytes, blob.len, NULL), NIXL_ERR_INVALID_ARGUMENT, "peer is NULL");
    CHECK_SAYS(nixlkv_connect(a, blob.bytes, blob.len, (uint64_t *)(void *)((char *)space + 4)),
               NIXL_ERR_INVALID_ARGUMENT, "peer");
    CHECK_SAYS(nixlkv_connect(a, NULL, 1, &peer), NIXL_ERR_INVALID_ARGUMENT, "blob is NULL");
    CHECK_SAYS(nixlkv_connect(a, NULL, UINT64_MAX, &peer), NIXL_ERR_INVALID_ARGUMENT, "blob is NULL");
    CHECK_SAYS(nixlkv_connect(a, blob.bytes, UINT64_MAX, &peer), NIXL_ERR_INVALID_ARGUMENT, "18446744073709551615");
    CHECK_SAYS(nixlkv_connect(a, NULL, 0, &peer), NIXL_ERR_METADATA_INVALID, "0 bytes");
    CHECK(peer == 0 && space[0] == 0 && space[1] == 0);
    CHECK_BAD_HANDLES(nixlkv_disconnect(engine, 1));
    CHECK_SAYS(nixlkv_disconnect(a, 0), NIXL_ERR_PEER_UNKNOWN, "peer 0");
    CHECK_SAYS(nixlkv_disconnect(a, UINT64_MAX), NIXL_ERR_PEER_UNKNOWN, "peer 18446744073709551615");
    /* The blob may lie anywhere. */
    char *odd = malloc(blob.len + 1);
    CHECK(odd != NULL);
    memcpy(odd + 1, blob.bytes, blob.len);
    CHECK_OK(nixlkv_connect(a, odd + 1, blob.len, &peer));
    CHECK(peer != 0);
    uint64_t again = 0;
    CHECK_OK(nixlkv_connect(a, blob.bytes, blob.len, &again));
    CHECK(again == peer);
    CHECK_OK(nixlkv_disconnect(a, peer));
    CHECK_SAYS(nixlkv_disconnect(a, peer), NIXL_ERR_PEER_UNKNOWN, "peer");
    free(odd);
    free(blob.bytes);
    nixlkv_engine_destroy(a);
    nixlkv_engine_destroy(b);
}

/* M10: every truncation and every altered byte is refused, and the blob itself still connects. */
static void m10_altered_blobs(void) {
    nixlkv_engine_t *a = engine_create(NIXLKV_ROLE_PREFILL), *b = engine_create(NIXLKV_ROLE_DECODE);
    void *at_a = register_memory(a, WITH_ALL), *at_b = register_memory(b, WITH_ALL);
    blob_t blob = export_blob(b);
    unsigned char *bytes = blob.bytes;
    blob_t part = blob;
    for (part.len = 0; part.len < blob.len; part.len++) refused(a, &part, NIXL_ERR_METADATA_INVALID, "the blob (");
    for (uint64_t i = 0; i < blob.len; i++) {
        for (unsigned flip = 1; flip <= 0x80; flip = flip << 3 | 1) {
            bytes[i] ^= (unsigned char)flip;
            uint64_t peer = 0;
            const int32_t status = nixlkv_connect(a, bytes, blob.len, &peer);
            /* Bytes 8 to 11 hold the wire version: what another version's header looks like nobody can know. */
            const int is_version = i >= 8 && i < 12 && status == NIXL_ERR_WIRE_VERSION;
            if ((status != NIXL_ERR_METADATA_INVALID && !is_version) || peer != 0)
                FAIL("byte %" PRIu64 " of %" PRIu64 " altered by %#x: %s", i, blob.len, flip,
                     nixlkv_status_name(status));
            bytes[i] ^= (unsigned char)flip;
        }
    }
    blob_t longer = {blob.len + 1, malloc(blob.len + 1)};
    CHECK(longer.bytes != NULL);
    memcpy(longer.bytes, bytes, blob.len);
    ((char *)longer.bytes)[blob.len] = 0;
    refused(a, &longer, NIXL_ERR_METADATA_INVALID, "the blob (");
    free(longer.bytes);
    /* D4: lengths inside that claim more than there is, with checksums that fit. */
    const uint64_t claims[] = {0, blob.len, (uint64_t)1 << 31, (uint64_t)1 << 63, UINT64_MAX};
    for (size_t i = 0; i < sizeof claims / sizeof claims[0]; i++) {
        unsigned char header[28];
        memcpy(header, bytes, 28);
        for (unsigned j = 0; j < 8; j++) bytes[12 + j] = (unsigned char)(claims[i] >> (8 * j));
        const uint32_t crc = crc32_of(bytes, 24);
        for (unsigned j = 0; j < 4; j++) bytes[24 + j] = (unsigned char)(crc >> (8 * j));
        refused(a, &blob, NIXL_ERR_METADATA_INVALID, "the blob (");
        memcpy(bytes, header, 28);
    }
    uint64_t peer = 0;
    CHECK_OK(nixlkv_connect(a, bytes, blob.len, &peer));
    free(blob.bytes);
    nixlkv_engine_destroy(a);
    nixlkv_engine_destroy(b);
    munmap(at_a, MEMORY);
    munmap(at_b, MEMORY);
}

/* D6: blobs of other wire versions, sound in themselves, with a longer or a shorter body. */
static void d6_another_wire_version(void) {
    nixlkv_engine_t *a = engine_create(NIXLKV_ROLE_PREFILL), *b = engine_create(NIXLKV_ROLE_DECODE);
    blob_t blob = export_blob(b);
    unsigned char *bytes = malloc(blob.len + 64);
    CHECK(bytes != NULL);
    memcpy(bytes, blob.bytes, blob.len);
    memset(bytes + blob.len, 7, 64);
    const unsigned ours = bytes[8] | (unsigned)bytes[9] << 8;
    CHECK(memcmp(bytes, "NIXLKV\0\0", 8) == 0 && ours >= 1);
    const unsigned versions[] = {ours + 1, ours - 1, 255, 256 + ours, 65535};
    const uint64_t lens[] = {blob.len, blob.len + 64, 28};
    for (size_t i = 0; i < sizeof versions / sizeof versions[0]; i++) {
        for (size_t j = 0; j < sizeof lens / sizeof lens[0]; j++) {
            const blob_t other = {lens[j], bytes};
            bytes[8] = (unsigned char)versions[i];
            bytes[9] = (unsigned char)(versions[i] >> 8);
            const uint64_t body = lens[j] - 28;
            for (unsigned k = 0; k < 8; k++) bytes[12 + k] = (unsigned char)(body >> (8 * k));
            const uint32_t body_crc = crc32_of(bytes + 28, body);
            for (unsigned k = 0; k < 4; k++) bytes[20 + k] = (unsigned char)(body_crc >> (8 * k));
            const uint32_t crc = crc32_of(bytes, 24);
            for (unsigned k = 0; k < 4; k++) bytes[24 + k] = (unsigned char)(crc >> (8 * k));
            char say[64];
            snprintf(say, sizeof say, "ours is %u, the blob's is %u", ours, versions[i]);
            refused(a, &other, NIXL_ERR_WIRE_VERSION, say);
        }
    }
    /* The sum that was recomputed is the blob's own kind of sum, so it was the version that was refused. */
    const unsigned char *stored = (const unsigned char *)blob.bytes + 24;
    CHECK(crc32_of(blob.bytes, 24) == (stored[0] | (uint32_t)stored[1] << 8 | (uint32_t)stored[2] << 16 |
                                       (uint32_t)stored[3] << 24));
    uint64_t peer = 0;
    CHECK_OK(nixlkv_connect(a, blob.bytes, blob.len, &peer));
    free(bytes);
    free(blob.bytes);
    nixlkv_engine_destroy(a);
    nixlkv_engine_destroy(b);
}

static void own_blob_and_roles(void) {
    nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_BOTH);
    config.name = "narcissus";
    nixlkv_engine_t *a = NULL;
    CHECK_OK(nixlkv_engine_create(&config, &a));
    blob_t own = export_blob(a);
    refused(a, &own, NIXL_ERR_PEER_SELF, "narcissus");
    free(own.bytes);
    nixlkv_engine_destroy(a);
    /* Two engines of which neither could send to the other. */
    nixlkv_engine_t *b = engine_create(NIXLKV_ROLE_DECODE), *c = engine_create(NIXLKV_ROLE_DECODE);
    blob_t blob = export_blob(c);
    refused(b, &blob, NIXL_ERR_LAYOUT_DIFFERS, "ours is decode");
    free(blob.bytes);
    nixlkv_engine_destroy(b);
    nixlkv_engine_destroy(c);
}

/* What two engines with different regions or dtypes say: both sides refuse, each naming both values. */
static void expect_mismatch(nixlkv_engine_t *prefill, nixlkv_engine_t *decode, int32_t code, const char *first,
                            const char *second) {
    blob_t of_prefill = export_blob(prefill), of_decode = export_blob(decode);
    const uint64_t start = now_ms();
    refused(prefill, &of_decode, code, first);
    CHECK(strstr(nixlkv_last_error(), second) != NULL);
    refused(decode, &of_prefill, code, first);
    CHECK(strstr(nixlkv_last_error(), second) != NULL);
    CHECK(now_ms() - start < 5000);
    free(of_prefill.bytes);
    free(of_decode.bytes);
    nixlkv_engine_destroy(prefill);
    nixlkv_engine_destroy(decode);
}

static nixlkv_engine_t *engine_with(uint32_t role, nixlkv_region_t *regions, uint64_t n) {
    nixlkv_engine_t *engine = engine_create(role);
    for (uint64_t i = 0; i < n; i++) regions[i].address = map_bytes(regions[i].len);
    CHECK_OK(nixlkv_register(engine, regions, n, NULL));
    return engine;
}

static nixlkv_region_t spec(uint32_t kind, uint32_t layer, uint64_t item_len) {
    nixlkv_region_t r = region(kind, NULL, 65536, item_len);
    r.layer_id = layer;
    return r;
}

static void a8_d5_d6_g6_layouts_that_cannot_be_mapped(void) {
    nixlkv_region_t p[4], d[4];
    /* D5: another page size, with the same total. */
    p[0] = spec(NIXLKV_REGION_KV, 0, 4096);
    d[0] = spec(NIXLKV_REGION_KV, 0, 8192);
    expect_mismatch(engine_with(NIXLKV_ROLE_PREFILL, p, 1), engine_with(NIXLKV_ROLE_DECODE, d, 1),
                    NIXL_ERR_LAYOUT_DIFFERS, "4096 bytes at the sender", "8192 at the receiver");
    /* A8: one fused region against K and V, of the same bytes in all. */
    p[0] = spec(NIXLKV_REGION_KV, 5, 8192);
    d[0] = spec(NIXLKV_REGION_KV, 5, 4096);
    d[0].part = NIXLKV_PART_K;
    d[1] = spec(NIXLKV_REGION_KV, 5, 4096);
    d[1].part = NIXLKV_PART_V;
    expect_mismatch(engine_with(NIXLKV_ROLE_PREFILL, p, 1), engine_with(NIXLKV_ROLE_DECODE, d, 2),
                    NIXL_ERR_LAYOUT_DIFFERS, "fused KV layer 5", "K of KV layer 5");
    /* A layer that the receiver lacks, and one that it keeps to itself. */
    p[0] = spec(NIXLKV_REGION_KV, 0, 4096);
    p[1] = spec(NIXLKV_REGION_KV, 1, 4096);
    d[0] = spec(NIXLKV_REGION_KV, 0, 4096);
    expect_mismatch(engine_with(NIXLKV_ROLE_PREFILL, p, 2), engine_with(NIXLKV_ROLE_DECODE, d, 1),
                    NIXL_ERR_LAYOUT_DIFFERS, "layer 1", "the receiver does not");
    d[1] = spec(NIXLKV_REGION_KV, 1, 4096);
    d[1].flags = NIXLKV_REGION_FLAG_LOCAL;
    expect_mismatch(engine_with(NIXLKV_ROLE_PREFILL, p, 2), engine_with(NIXLKV_ROLE_DECODE, d, 2),
                    NIXL_ERR_LAYOUT_DIFFERS, "layer 1", "local");
    /* G6: state tensors of another size, and another number of them. */
    p[0] = spec(NIXLKV_REGION_STATE, 0, 4096);
    p[1] = spec(NIXLKV_REGION_STATE, 1, 4096);
    d[0] = spec(NIXLKV_REGION_STATE, 0, 4096);
    d[1] = spec(NIXLKV_REGION_STATE, 1, 2048);
    expect_mismatch(engine_with(NIXLKV_ROLE_PREFILL, p, 2), engine_with(NIXLKV_ROLE_DECODE, d, 2),
                    NIXL_ERR_LAYOUT_DIFFERS, "4096 bytes at the sender", "2048 at the receiver");
    d[1] = spec(NIXLKV_REGION_STATE, 1, 4096);
    d[2] = spec(NIXLKV_REGION_STATE, 2, 4096);
    expect_mismatch(engine_with(NIXLKV_ROLE_PREFILL, p, 2), engine_with(NIXLKV_ROLE_DECODE, d, 3),
                    NIXL_ERR_LAYOUT_DIFFERS, "the receiver has tensor 2", "the sender does not");
    expect_mismatch(engine_with(NIXLKV_ROLE_PREFILL, d, 3), engine_with(NIXLKV_ROLE_DECODE, p, 2),
                    NIXL_ERR_LAYOUT_DIFFERS, "the sender has tensor 2", "the receiver does not");
    /* Aux slots of another size. */
    p[0] = spec(NIXLKV_REGION_AUX, 0, 64);
    d[0] = spec(NIXLKV_REGION_AUX, 0, 128);
    expect_mismatch(engine_with(NIXLKV_ROLE_PREFILL, p, 1), engine_with(NIXLKV_ROLE_DECODE, d, 1),
                    NIXL_ERR_LAYOUT_DIFFERS, "64 bytes at the sender", "128 at the receiver");
    /* Another element type. */
    nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_PREFILL);
    nixlkv_engine_t *prefill = NULL, *decode = NULL;
    config.cache_dtype = "bf16";
    CHECK_OK(nixlkv_engine_create(&config, &prefill));
    config.role = NIXLKV_ROLE_DECODE;
    config.cache_dtype = "fp8_e4m3";
    CHECK_OK(nixlkv_engine_create(&config, &decode));
    expect_mismatch(prefill, decode, NIXL_ERR_DTYPE_DIFFERS, "bf16", "fp8_e4m3");
}

/* A blob that is older than the one that is connected, and regions that changed after the exchange. */
static void blobs_that_are_out_of_date(void) {
    pair_t pair = make_pair(WITH_KV);
    const int32_t page = 1;
    nixlkv_recv_params_t params = recv_params(1, &pair.prefill_peer, 1, &page, 1);
    nixlkv_chunk_t chunk = chunk_of(1, &page, 1, 0, NIXLKV_CHUNK_LAST);
    /* Both sides have heard each other once a room has gone through. */
    CHECK_OK(nixlkv_recv(pair.decode, &params));
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    expect_end(pair.decode, 1, NIXL_OK, WAIT_MS);
    expect_end(pair.prefill, 1, NIXL_OK, WAIT_MS);
    blob_t old = export_blob(pair.prefill);
    nixlkv_region_t extra = region(NIXLKV_REGION_AUX, map_bytes(4096), 4096, 64);
    CHECK_OK(nixlkv_register(pair.prefill, &extra, 1, NULL));
    blob_t new = export_blob(pair.prefill);
    uint64_t peer = 0;
    CHECK_OK(nixlkv_connect(pair.decode, new.bytes, new.len, &peer));
    CHECK(peer == pair.prefill_peer);
    refused(pair.decode, &old, NIXL_ERR_PEER_STALE, "revision");
    /* Our own regions change: the peer holds an old table of them. */
    extra.address = map_bytes(4096);
    CHECK_OK(nixlkv_register(pair.decode, &extra, 1, NULL));
    params.room = 2;
    CHECK_SAYS(nixlkv_recv(pair.decode, &params), NIXL_ERR_PEER_STALE, "regions changed");
    CHECK(stats_of(pair.decode).rooms_opened == 1);
    connect_both(pair.prefill, pair.decode, &pair.decode_peer, &pair.prefill_peer);
    /* The sender's word that it has the new table is on its way; then the room goes through. */
    chunk.room = 2;
    chunk.flags |= NIXLKV_CHUNK_NO_AUX;
    const uint64_t until = now_ms() + WAIT_MS;
    int32_t status = nixlkv_recv(pair.decode, &params);
    while (status == NIXL_ERR_PEER_STALE && now_ms() < until) {
        sleep_ms(1);
        status = nixlkv_recv(pair.decode, &params);
    }
    CHECK(status == NIXL_OK);
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    expect_end(pair.decode, 2, NIXL_OK, WAIT_MS);
    expect_end(pair.prefill, 2, NIXL_OK, WAIT_MS);
    free(old.bytes);
    free(new.bytes);
    destroy_pair(&pair);
}

/* The receiver's regions change between its two exports, and a room is opened while the sender holds the old table: it
 * waits for the sender to get the new one. */
static void a_room_waits_for_the_newer_blob(void) {
    nixlkv_engine_t *prefill = engine_create(NIXLKV_ROLE_PREFILL), *decode = engine_create(NIXLKV_ROLE_DECODE);
    char *from = register_memory(prefill, WITH_KV), *to = register_memory(decode, WITH_KV);
    blob_t of_prefill = export_blob(prefill), of_decode = export_blob(decode);
    const nixlkv_region_t extra = region(NIXLKV_REGION_AUX, map_bytes(4096), 4096, 64);
    CHECK_OK(nixlkv_register(decode, &extra, 1, NULL));
    uint64_t decode_peer = 0, prefill_peer = 0;
    CHECK_OK(nixlkv_connect(prefill, of_decode.bytes, of_decode.len, &decode_peer));
    CHECK_OK(nixlkv_connect(decode, of_prefill.bytes, of_prefill.len, &prefill_peer));
    const int32_t page = 1;
    const nixlkv_recv_params_t params = recv_params(1, &prefill_peer, 1, &page, 1);
    int32_t status = nixlkv_recv(decode, &params);
    CHECK(status == NIXL_OK || status == NIXL_ERR_PEER_STALE); /* the sender's word of the old table was faster */
    sleep_ms(100);
    if (status == NIXL_OK) CHECK(poll_room(decode, 1).state == NIXLKV_ROOM_BOOTSTRAPPING);
    blob_t newer = export_blob(decode);
    CHECK_OK(nixlkv_connect(prefill, newer.bytes, newer.len, &decode_peer));
    const uint64_t until = now_ms() + WAIT_MS;
    while (status == NIXL_ERR_PEER_STALE && now_ms() < until) {
        sleep_ms(1);
        status = nixlkv_recv(decode, &params);
    }
    CHECK(status == NIXL_OK);
    const nixlkv_chunk_t chunk = chunk_of(1, &page, 1, 0, NIXLKV_CHUNK_LAST);
    stamp_item(from, PAGE, page, 1, 0, 0);
    CHECK_OK(nixlkv_send_chunk(prefill, &chunk));
    expect_end(decode, 1, NIXL_OK, WAIT_MS);
    expect_end(prefill, 1, NIXL_OK, WAIT_MS);
    CHECK(wrong_words(to, PAGE, page, 1, 0, 0) == 0);
    free(of_prefill.bytes);
    free(of_decode.bytes);
    free(newer.bytes);
    nixlkv_engine_destroy(prefill);
    nixlkv_engine_destroy(decode);
    munmap(from, MEMORY);
    munmap(to, MEMORY);
}

/* A new engine under the name of a connected one replaces it; the rooms of the old one fail. */
static void e1_a_restarted_peer_replaces_the_old(void) {
    nixlkv_engine_config_t decode = engine_config(NIXLKV_ROLE_DECODE), prefill = engine_config(NIXLKV_ROLE_PREFILL);
    prefill.name = "worker-0";
    pair_t pair = make_pair_of(&prefill, &decode, WITH_KV);
    const int32_t page = 1;
    nixlkv_recv_params_t params = recv_params(1, &pair.prefill_peer, 1, &page, 1);
    CHECK_OK(nixlkv_recv(pair.decode, &params));
    CHECK_SAYS(nixlkv_disconnect(pair.decode, pair.prefill_peer), NIXL_ERR_PEER_BUSY, "worker-0");
    nixlkv_engine_t *restarted = NULL;
    CHECK_OK(nixlkv_engine_create(&prefill, &restarted));
    char *memory = register_memory(restarted, WITH_KV);
    uint64_t peer = 0, back = 0;
    connect_both(pair.decode, restarted, &peer, &back);
    CHECK(peer != pair.prefill_peer);
    expect_end(pair.decode, 1, NIXL_ERR_PEER_RESTARTED, WAIT_MS);
    CHECK(strstr(poll_room(pair.decode, 1).error_text, "worker-0") != NULL);
    CHECK_SAYS(nixlkv_disconnect(pair.decode, pair.prefill_peer), NIXL_ERR_PEER_UNKNOWN, "peer");
    CHECK_OK(nixlkv_release(pair.decode, 1));
    CHECK_SAYS(nixlkv_recv(pair.decode, &params), NIXL_ERR_PEER_UNKNOWN, "peer");
    params.senders = &peer;
    CHECK_OK(nixlkv_recv(pair.decode, &params));
    const nixlkv_chunk_t chunk = chunk_of(1, &page, 1, 0, NIXLKV_CHUNK_LAST);
    stamp_item(memory, PAGE, page, 1, 0, 0);
    CHECK_OK(nixlkv_send_chunk(restarted, &chunk));
    expect_end(pair.decode, 1, NIXL_OK, WAIT_MS);
    CHECK(wrong_words(pair.destination, PAGE, page, 1, 0, 0) == 0);
    nixlkv_engine_destroy(restarted);
    destroy_pair(&pair);
    munmap(memory, MEMORY);
}

int main(void) {
    export_arguments();
    connect_arguments();
    m10_altered_blobs();
    d6_another_wire_version();
    own_blob_and_roles();
    a8_d5_d6_g6_layouts_that_cannot_be_mapped();
    blobs_that_are_out_of_date();
    a_room_waits_for_the_newer_blob();
    e1_a_restarted_peer_replaces_the_old();
    return 0;
}
