/* nixlkv_register: one bad entry registers nothing, the error names its index and values, and the corrected batch
 * goes through. */
#include "api.h"

enum { KEEP = 0xee };

static nixlkv_engine_t *engine;
static char *memory; /* 64 KiB */

static nixlkv_region_t kv(uint32_t layer, uint64_t offset, uint64_t len) {
    nixlkv_region_t r = region(NIXLKV_REGION_KV, memory + offset, len, 64);
    r.layer_id = layer;
    return r;
}

static void expect_refused(const nixlkv_region_t *regions, uint64_t n, int32_t code, const char *say) {
    uint64_t ids[16];
    memset(ids, KEEP, sizeof ids);
    blob_t before = export_blob(engine);
    const int32_t status = nixlkv_register(engine, regions, n, ids);
    if (status != code || strstr(nixlkv_last_error(), say) == NULL)
        FAIL("expected %s saying \"%s\", got %s: %s", nixlkv_status_name(code), say, nixlkv_status_name(status),
             nixlkv_last_error());
    for (size_t i = 0; i < sizeof ids; i++) CHECK(((unsigned char *)ids)[i] == KEEP);
    /* Nothing was registered: the region table that peers see is the same. */
    blob_t after = export_blob(engine);
    CHECK(before.len == after.len && memcmp(before.bytes, after.bytes, before.len) == 0);
    free(before.bytes);
    free(after.bytes);
}

static void accept_and_undo(const nixlkv_region_t *regions, uint64_t n) {
    uint64_t ids[16] = {0};
    CHECK(n <= 16);
    CHECK_OK(nixlkv_register(engine, regions, n, ids));
    for (uint64_t i = 0; i < n; i++) {
        CHECK(ids[i] != 0);
        for (uint64_t j = 0; j < i; j++) CHECK(ids[i] != ids[j]);
    }
    CHECK_OK(nixlkv_deregister(engine, ids, n));
}

static void arguments(void) {
    nixlkv_region_t r = kv(0, 0, 4096);
    uint64_t id = 77, space[64];
    CHECK_BAD_HANDLES(nixlkv_register(engine, &r, 1, &id));
    CHECK_SAYS(nixlkv_register(engine, &r, 0, &id), NIXL_ERR_INVALID_ARGUMENT, "num_regions");
    CHECK_SAYS(nixlkv_register(engine, NULL, 0, &id), NIXL_ERR_INVALID_ARGUMENT, "num_regions");
    CHECK_SAYS(nixlkv_register(engine, NULL, 1, &id), NIXL_ERR_INVALID_ARGUMENT, "regions is NULL");
    CHECK_SAYS(nixlkv_register(engine, NULL, UINT64_MAX, &id), NIXL_ERR_INVALID_ARGUMENT, "regions is NULL");
    CHECK_SAYS(nixlkv_register(engine, &r, UINT64_MAX, &id), NIXL_ERR_INVALID_ARGUMENT, "18446744073709551615");
    CHECK_SAYS(nixlkv_register(engine, &r, UINT64_MAX / sizeof r + 2, &id), NIXL_ERR_INVALID_ARGUMENT, "entries");
    memcpy((char *)space + 4, &r, sizeof r);
    CHECK_SAYS(nixlkv_register(engine, (nixlkv_region_t *)(void *)((char *)space + 4), 1, &id),
               NIXL_ERR_INVALID_ARGUMENT, "regions");
    CHECK_SAYS(nixlkv_register(engine, &r, 1, (uint64_t *)(void *)((char *)space + 2)), NIXL_ERR_INVALID_ARGUMENT,
               "region_ids");
    CHECK(id == 77);
    accept_and_undo(&r, 1);
}

static uint64_t registered;

static int32_t try_register(const void *regions, void *unused) {
    (void)unused;
    return nixlkv_register(engine, regions, 1, &registered);
}

static void undo_register(void *unused) {
    (void)unused;
    CHECK_OK(nixlkv_deregister(engine, &registered, 1));
}

static void i4_struct_sizes(void) {
    nixlkv_region_t batch[3] = {kv(0, 0, 4096), kv(1, 4096, 4096), kv(2, 8192, 4096)};
    try_read_sizes(&batch[0], sizeof batch[0], try_register, undo_register, NULL, "regions");
    /* In a list all structs have the size of the first. */
    batch[2].struct_size = sizeof batch[2] - 8;
    expect_refused(batch, 3, NIXL_ERR_STRUCT_SIZE, "regions[2]");
    batch[2].struct_size = 0;
    expect_refused(batch, 3, NIXL_ERR_STRUCT_SIZE, "regions[2]");
    batch[2].struct_size = sizeof batch[2];
    accept_and_undo(batch, 3);
    /* A list of an older program's shorter structs, and of a newer one's longer ones. */
    uint64_t list[64];
    for (int delta = -8; delta <= 8; delta += 16) {
        const size_t size = (size_t)((int)sizeof batch[0] + delta);
        memset(list, 0, sizeof list);
        for (size_t i = 0; i < 3; i++) {
            batch[i].struct_size = (uint32_t)size;
            memcpy((char *)list + i * size, &batch[i], delta < 0 ? size : sizeof batch[0]);
        }
        accept_and_undo((const nixlkv_region_t *)(const void *)list, 3);
    }
}

/* G7, I15: kinds, parts, groups, memory kinds and flags that mean nothing. */
static void g7_unknown_kinds(void) {
    const uint32_t wrong[] = {0, 4, 250, 255, 256, UINT32_MAX};
    char say[64];
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        nixlkv_region_t batch[2] = {kv(0, 0, 4096), kv(1, 4096, 4096)};
        batch[1].kind = wrong[i];
        snprintf(say, sizeof say, "region 1: kind %" PRIu32, wrong[i]);
        expect_refused(batch, 2, NIXL_ERR_REGION_KIND, say);
        batch[1] = kv(1, 4096, 4096);
        batch[1].part = wrong[i];
        snprintf(say, sizeof say, "part %" PRIu32, wrong[i]);
        expect_refused(batch, 2, NIXL_ERR_REGION_KIND, say);
        if (wrong[i] != 0) {
            batch[1] = kv(1, 4096, 4096);
            batch[1].memory_kind = wrong[i];
            snprintf(say, sizeof say, "memory_kind %" PRIu32, wrong[i]);
            expect_refused(batch, 2, NIXL_ERR_REGION_KIND, say);
            batch[1] = kv(1, 4096, 4096);
            batch[1].flags = wrong[i] & ~1u;
            if (batch[1].flags != 0) expect_refused(batch, 2, NIXL_ERR_REGION_KIND, "flags");
            batch[1] = kv(1, 4096, 4096);
            batch[1].reserved = wrong[i];
            expect_refused(batch, 2, NIXL_ERR_REGION_KIND, "reserved");
        }
        batch[1] = kv(1, 4096, 4096);
        accept_and_undo(batch, 2);
    }
    nixlkv_region_t r = kv(0, 0, 4096);
    r.group = 1;
    expect_refused(&r, 1, NIXL_ERR_REGION_KIND, "group 1");
    r = region(NIXLKV_REGION_AUX, memory, 4096, 64);
    r.group = 1;
    expect_refused(&r, 1, NIXL_ERR_REGION_KIND, "group 1");
    r.group = 0;
    r.part = NIXLKV_PART_K;
    expect_refused(&r, 1, NIXL_ERR_REGION_KIND, "part 1");
    r.part = 0;
    accept_and_undo(&r, 1);
    r = region(NIXLKV_REGION_STATE, memory, 4096, 64);
    r.part = NIXLKV_PART_FUSED;
    expect_refused(&r, 1, NIXL_ERR_REGION_KIND, "part 3");
    r.part = 0;
    r.group = UINT32_MAX;
    accept_and_undo(&r, 1);
}

/* C6: ten buffers, the fifth of them empty; the other nine can be registered then. */
static void c6_an_empty_entry_is_named(void) {
    nixlkv_region_t batch[10];
    for (uint32_t i = 0; i < 10; i++) batch[i] = kv(i, 4096 * i, 4096);
    batch[4].len = 0;
    expect_refused(batch, 10, NIXL_ERR_REGION_EMPTY, "region 4: ");
    batch[4].len = 4096;
    batch[4].item_len = 0;
    expect_refused(batch, 10, NIXL_ERR_REGION_EMPTY, "region 4: ");
    batch[4].item_len = 64;
    batch[4].address = NULL;
    expect_refused(batch, 10, NIXL_ERR_REGION_EMPTY, "region 4: ");
    for (uint32_t i = 4; i < 9; i++) batch[i] = batch[i + 1];
    accept_and_undo(batch, 9);
}

static void lengths(void) {
    nixlkv_region_t r = kv(0, 0, 4096 + 32);
    expect_refused(&r, 1, NIXL_ERR_REGION_ITEM, "len 4128 is not a multiple of item_len 64");
    r = kv(0, 0, 32); /* smaller than one item */
    expect_refused(&r, 1, NIXL_ERR_REGION_ITEM, "len 32");
    r = kv(0, 0, 4096);
    r.item_len = UINT64_MAX;
    expect_refused(&r, 1, NIXL_ERR_REGION_ITEM, "item_len 18446744073709551615");
    r = kv(0, 0, 4096);
    r.item_len = 4096; /* one item */
    accept_and_undo(&r, 1);
}

/* D1: an end beyond 2^64, or there exactly. */
static void d1_addresses_that_wrap(void) {
    nixlkv_region_t r = kv(0, 0, 4096);
    r.address = (void *)(UINTPTR_MAX - 4095 + 64);
    expect_refused(&r, 1, NIXL_ERR_REGION_WRAPS, "passes 2^64");
    r.address = memory;
    r.len = UINT64_MAX - 63;
    expect_refused(&r, 1, NIXL_ERR_REGION_WRAPS, "len 0xffffffffffffffc0");
    r.address = (void *)64;
    expect_refused(&r, 1, NIXL_ERR_REGION_WRAPS, "address 0x40");
    r.address = (void *)(UINTPTR_MAX & ~(uintptr_t)63);
    r.len = 64;
    CHECK_STATUS(nixlkv_register(engine, &r, 1, NULL), NIXL_ERR_REGION_WRAPS);
    r.address = (void *)((uintptr_t)1 << 63); /* the kernel's half, not ours */
    expect_refused(&r, 1, NIXL_ERR_REGION_UNMAPPED, "0x8000000000000000");
}

static void d2_overlap_is_refused_and_adjacent_is_fine(void) {
    nixlkv_region_t batch[3] = {kv(0, 0, 128), kv(1, 64, 128), kv(2, 192, 64)};
    expect_refused(batch, 2, NIXL_ERR_REGION_OVERLAP, "region 1");
    batch[1] = kv(1, 0, 64); /* inside */
    expect_refused(batch, 2, NIXL_ERR_REGION_OVERLAP, "region 0");
    batch[1] = kv(1, 0, 128); /* the same bytes */
    expect_refused(batch, 2, NIXL_ERR_REGION_OVERLAP, "overlap");
    batch[1] = kv(1, 128, 64);
    accept_and_undo(batch, 3);
    /* Overlap with what is registered, also of another kind and across several. */
    uint64_t id = 0;
    CHECK_OK(nixlkv_register(engine, &batch[0], 1, &id));
    nixlkv_region_t aux = region(NIXLKV_REGION_AUX, memory + 64, 128, 64);
    char say[64];
    snprintf(say, sizeof say, "the registered region %" PRIu64, id);
    expect_refused(&aux, 1, NIXL_ERR_REGION_OVERLAP, say);
    batch[1] = kv(1, 64, 64);
    expect_refused(batch + 1, 2, NIXL_ERR_REGION_OVERLAP, "region 0");
    aux.address = memory + 128;
    accept_and_undo(&aux, 1);
    CHECK_OK(nixlkv_deregister(engine, &id, 1));
}

static void d2_unmapped_memory_is_refused(void) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *hole = map_bytes(4 * page);
    CHECK(munmap(hole + page, page) == 0);
    nixlkv_region_t batch[2] = {kv(0, 0, 4096), kv(1, 0, 4 * page)};
    batch[1].address = hole;
    char say[64];
    snprintf(say, sizeof say, "the memory at %#" PRIxPTR " is not mapped", (uintptr_t)(hole + page));
    expect_refused(batch, 2, NIXL_ERR_REGION_UNMAPPED, say);
    batch[1].len = page;
    accept_and_undo(batch, 2);
    batch[1].address = hole + 2 * page;
    batch[1].len = 4 * page; /* runs out at the end, unless something lies there; then it reaches further than that */
    CHECK(mprotect(hole + 3 * page, page, PROT_NONE) == 0);
    expect_refused(batch, 2, NIXL_ERR_REGION_UNMAPPED, "not readable");
    batch[1].len = page;
    accept_and_undo(batch, 2);
    batch[1].address = (void *)64;
    batch[1].len = 64;
    expect_refused(batch, 2, NIXL_ERR_REGION_UNMAPPED, "0x40");
    /* Read-only memory is enough for a sender, and too little for a receiver. */
    CHECK(mprotect(hole + 2 * page, page, PROT_READ) == 0);
    batch[1].address = hole + 2 * page;
    batch[1].len = page;
    expect_refused(batch, 2, NIXL_ERR_REGION_UNMAPPED, "not writable");
    nixlkv_engine_t *sender = engine_create(NIXLKV_ROLE_PREFILL);
    CHECK_OK(nixlkv_register(sender, &batch[1], 1, NULL));
    nixlkv_engine_destroy(sender);
    CHECK(munmap(hole, page) == 0 && munmap(hole + 2 * page, 2 * page) == 0);
}

/* C5: the same region again is refused, whatever of it is the same; so a second deregistration has nothing to free. */
static void c5_duplicate_registration(void) {
    nixlkv_region_t batch[2] = {kv(3, 0, 4096), kv(3, 4096, 4096)};
    expect_refused(batch, 2, NIXL_ERR_REGION_DUPLICATE, "region 0 and region 1");
    uint64_t id = 0;
    CHECK_OK(nixlkv_register(engine, batch, 1, &id));
    expect_refused(batch, 1, NIXL_ERR_REGION_DUPLICATE, "layer 3");
    expect_refused(batch + 1, 1, NIXL_ERR_REGION_DUPLICATE, "layer 3");
    batch[1].part = NIXLKV_PART_K;
    expect_refused(batch + 1, 1, NIXL_ERR_REGION_DUPLICATE, "either fused or K and V");
    batch[1].layer_id = 4;
    accept_and_undo(batch + 1, 1);
    CHECK_OK(nixlkv_deregister(engine, &id, 1));
    CHECK_SAYS(nixlkv_deregister(engine, &id, 1), NIXL_ERR_REGION_UNKNOWN, "region_ids[0]");
    batch[0].part = NIXLKV_PART_K;
    batch[1] = kv(3, 4096, 4096);
    batch[1].part = NIXLKV_PART_V;
    accept_and_undo(batch, 2);
}

static void video_memory_needs_a_device(void) {
    nixlkv_region_t batch[2] = {kv(0, 0, 4096), kv(1, 4096, 4096)};
    batch[1].memory_kind = NIXLKV_MEMORY_VRAM;
    batch[1].device_id = 4096; /* no machine has so many */
    expect_refused(batch, 2, NIXL_ERR_CUDA_UNAVAILABLE, "CUDA device 4096");
    batch[1].device_id = UINT64_MAX;
    expect_refused(batch, 2, NIXL_ERR_CUDA_UNAVAILABLE, "18446744073709551615");
    /* Host memory is detected as such, with a driver or without. */
    batch[1] = kv(1, 4096, 4096);
    batch[1].memory_kind = NIXLKV_MEMORY_AUTO;
    accept_and_undo(batch, 2);
}

/* NIXL itself refuses an entry: each class has its code, and what the batch had registered before is undone. */
static void nixl_refuses(void) {
    nixlkv_region_t batch[3] = {kv(0, 0, 4096), region(NIXLKV_REGION_AUX, memory + 4096, 4096, 64),
                                region(NIXLKV_REGION_STATE, memory + 8192, 4096, 64)};
    CHECK_OK(nixlkv_test_fault("register_kv", 0, 1));
    expect_refused(batch, 3, NIXL_ERR_REGISTER_KV, "region 0 (");
    CHECK_OK(nixlkv_test_fault("register_aux", 0, 1));
    expect_refused(batch, 3, NIXL_ERR_REGISTER_AUX, "region 1 (");
    CHECK_OK(nixlkv_test_fault("register_state", 0, 1));
    expect_refused(batch, 3, NIXL_ERR_REGISTER_STATE, "region 2 (");
    accept_and_undo(batch, 3);
}

int main(void) {
    engine = engine_create(NIXLKV_ROLE_DECODE);
    memory = map_bytes(64 << 10);
    arguments();
    i4_struct_sizes();
    g7_unknown_kinds();
    c6_an_empty_entry_is_named();
    lengths();
    d1_addresses_that_wrap();
    d2_overlap_is_refused_and_adjacent_is_fine();
    d2_unmapped_memory_is_refused();
    c5_duplicate_registration();
    video_memory_needs_a_device();
    nixl_refuses();
    nixlkv_engine_destroy(engine);
    return 0;
}
