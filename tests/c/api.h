/* What the api_ tests share: a connected pair of engines in one process, and structs of every size. */
#ifndef API_H
#define API_H

#include "test.h"

enum {
    LAYERS = 2,
    PAGES = 16,
    PAGE = 256,
    SLOTS = 4,
    SLOT = 64,
    STATES = 4,
    STATE = 128,
    GROUP = 7,
    AUX_AT = LAYERS * PAGES * PAGE,
    STATE_AT = AUX_AT + SLOTS * SLOT,
    MEMORY = STATE_AT + STATES * STATE,
    WAIT_MS = 20000
};

/* What register_memory registers. */
enum { WITH_KV = 1, WITH_AUX = 2, WITH_STATE = 4, WITH_ALL = 7 };

static inline void *register_memory(nixlkv_engine_t *engine, unsigned what) {
    char *memory = map_bytes(MEMORY);
    nixlkv_region_t regions[LAYERS + 2];
    uint64_t n = 0;
    if (what & WITH_KV) {
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            regions[n] = region(NIXLKV_REGION_KV, memory + layer * PAGES * PAGE, PAGES * PAGE, PAGE);
            regions[n++].layer_id = layer;
        }
    }
    if (what & WITH_AUX) regions[n++] = region(NIXLKV_REGION_AUX, memory + AUX_AT, SLOTS * SLOT, SLOT);
    if (what & WITH_STATE) {
        regions[n] = region(NIXLKV_REGION_STATE, memory + STATE_AT, STATES * STATE, STATE);
        regions[n++].group = GROUP;
    }
    CHECK_OK(nixlkv_register(engine, regions, n, NULL));
    return memory;
}

/* A sender and a receiver with the same regions, connected. */
typedef struct pair {
    nixlkv_engine_t *prefill, *decode;
    char *source, *destination;
    uint64_t decode_peer, prefill_peer; /* as the other side knows them */
} pair_t;

static inline pair_t make_pair_of(const nixlkv_engine_config_t *prefill, const nixlkv_engine_config_t *decode,
                                  unsigned what) {
    pair_t pair = {0};
    CHECK_OK(nixlkv_engine_create(prefill, &pair.prefill));
    CHECK_OK(nixlkv_engine_create(decode, &pair.decode));
    pair.source = register_memory(pair.prefill, what);
    pair.destination = register_memory(pair.decode, what);
    connect_both(pair.prefill, pair.decode, &pair.decode_peer, &pair.prefill_peer);
    return pair;
}

static inline pair_t make_pair(unsigned what) {
    const nixlkv_engine_config_t prefill = engine_config(NIXLKV_ROLE_PREFILL);
    const nixlkv_engine_config_t decode = engine_config(NIXLKV_ROLE_DECODE);
    return make_pair_of(&prefill, &decode, what);
}

static inline void destroy_pair(pair_t *pair) {
    nixlkv_engine_destroy(pair->prefill);
    nixlkv_engine_destroy(pair->decode);
    munmap(pair->source, MEMORY);
    munmap(pair->destination, MEMORY);
}

/* The last chunk of a room with one page goes through, so the two engines still work together. */
static inline void expect_transfer(pair_t *pair, uint64_t room, int32_t page) {
    static const int32_t slot = 1;
    nixlkv_state_indices_t state;
    CHECK_OK(nixlkv_state_indices_init(&state, sizeof state));
    state.group = GROUP;
    state.indices = &slot;
    state.num_indices = 1;
    for (int layer = 0; layer < LAYERS; layer++)
        stamp_item(pair->source + layer * PAGES * PAGE, PAGE, page, room, (uint64_t)layer, 0);
    stamp_item(pair->source + AUX_AT, SLOT, slot, room, 100, 0);
    stamp_item(pair->source + STATE_AT, STATE, slot, room, 200, 0);
    nixlkv_recv_params_t params = recv_params(room, &pair->prefill_peer, 1, &page, 1);
    params.aux_index = &slot;
    params.states = &state;
    params.num_states = 1;
    CHECK_OK(nixlkv_recv(pair->decode, &params));
    nixlkv_chunk_t chunk = chunk_of(room, &page, 1, 0, NIXLKV_CHUNK_LAST);
    chunk.aux_index = &slot;
    chunk.states = &state;
    chunk.num_states = 1;
    CHECK_OK(nixlkv_send_chunk(pair->prefill, &chunk));
    expect_end(pair->decode, room, NIXL_OK, WAIT_MS);
    expect_end(pair->prefill, room, NIXL_OK, WAIT_MS);
    for (int layer = 0; layer < LAYERS; layer++)
        CHECK(wrong_words(pair->destination + layer * PAGES * PAGE, PAGE, page, room, (uint64_t)layer, 0) == 0);
    CHECK(wrong_words(pair->destination + AUX_AT, SLOT, slot, room, 100, 0) == 0);
    CHECK(wrong_words(pair->destination + STATE_AT, STATE, slot, room, 200, 0) == 0);
    CHECK_OK(nixlkv_release(pair->decode, room));
    CHECK_OK(nixlkv_release(pair->prefill, room));
}

static inline nixlkv_stats_t stats_of(const nixlkv_engine_t *engine) {
    nixlkv_stats_t stats;
    CHECK_OK(nixlkv_stats_init(&stats, sizeof stats));
    CHECK_OK(nixlkv_stats(engine, &stats));
    return stats;
}

/* Polls until the room is in the state. */
static inline void await_state(const nixlkv_engine_t *engine, uint64_t room, uint32_t state) {
    const uint64_t until = now_ms() + WAIT_MS;
    for (;;) {
        nixlkv_room_status_t status;
        CHECK_OK(nixlkv_room_status_init(&status, sizeof status));
        const int32_t polled = nixlkv_poll(engine, room, &status);
        if (polled == NIXL_OK && status.state == state) return;
        if (now_ms() > until)
            FAIL("room %" PRIu64 " is in state %u (poll gave %s), not %u", room, status.state,
                 nixlkv_status_name(polled), state);
        sleep_ms(1);
    }
}

/* Handles that name no engine, for CHECK_BAD_HANDLES. The destroyed one is made on first use. */
static inline nixlkv_engine_t *bad_handle(int which) {
    static nixlkv_engine_t *destroyed;
    static uint64_t foreign[4];
    if (destroyed == NULL) {
        destroyed = engine_create(NIXLKV_ROLE_BOTH);
        nixlkv_engine_destroy(destroyed);
    }
    nixlkv_engine_t *handles[] = {NULL, destroyed, (nixlkv_engine_t *)(void *)foreign,
                                  (nixlkv_engine_t *)(UINTPTR_MAX - 15), (nixlkv_engine_t *)((uintptr_t)destroyed + 1)};
    return which < (int)(sizeof handles / sizeof handles[0]) ? handles[which] : (nixlkv_engine_t *)&destroyed;
}

enum { NUM_BAD_HANDLES = 6 };

/* The call, in which `engine` is the handle, refuses every handle that names no engine. */
#define CHECK_BAD_HANDLES(call)                                                                                        \
    do {                                                                                                               \
        for (int which_ = 0; which_ < NUM_BAD_HANDLES; which_++) {                                                     \
            nixlkv_engine_t *const engine = bad_handle(which_);                                                        \
            CHECK_SAYS(call, NIXL_ERR_INVALID_HANDLE, "engine");                                                       \
        }                                                                                                              \
    } while (0)

/* A struct of more than 8 bytes that the library reads, tried under every struct_size. `call(bytes, context)` makes
 * the call with the struct; a call that succeeded is undone by `undo`, which may be NULL. `say` must occur in the
 * error. The last 8 bytes of the struct must be zero. */
static inline void try_read_sizes(const void *value, uint32_t size, int32_t (*call)(const void *, void *),
                                  void (*undo)(void *), void *context, const char *say) {
    uint64_t buffer[1024];
    unsigned char *bytes = (unsigned char *)buffer;
    CHECK(size + 16 <= sizeof buffer && size % 8 == 0);
    const uint32_t bad[] = {0, 1, 4, 7, size - 4, size + 4, size - 1, 4104, UINT32_MAX};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        memset(buffer, 0, sizeof buffer);
        memcpy(bytes, value, size);
        memcpy(bytes, &bad[i], 4);
        CHECK_SAYS(call(bytes, context), NIXL_ERR_STRUCT_SIZE, say);
    }
    /* Shorter by one field: what lies behind the end is not looked at, and counts as zero. */
    memset(buffer, 0xff, sizeof buffer);
    memcpy(bytes, value, size - 8);
    const uint32_t shorter = size - 8;
    memcpy(bytes, &shorter, 4);
    CHECK_OK(call(bytes, context));
    if (undo != NULL) undo(context);
    /* Longer: as long as the rest is zero, it asks for nothing that the library does not know. */
    memset(buffer, 0xff, sizeof buffer);
    memcpy(bytes, value, size);
    memset(bytes + size, 0, 8);
    const uint32_t longer = size + 8;
    memcpy(bytes, &longer, 4);
    CHECK_OK(call(bytes, context));
    if (undo != NULL) undo(context);
    for (int i = 0; i < 8; i++) {
        memset(bytes + size, 0, 8);
        bytes[size + (uint32_t)i] = 1;
        CHECK_SAYS(call(bytes, context), NIXL_ERR_STRUCT_SIZE, say);
    }
    /* Misaligned, and none at all. */
    memcpy(bytes + 4, value, size);
    CHECK_SAYS(call(bytes + 4, context), NIXL_ERR_INVALID_ARGUMENT, say);
    CHECK_SAYS(call(NULL, context), NIXL_ERR_INVALID_ARGUMENT, say);
}

/* A struct that the library writes. The call must leave it alone when its size is wrong, and beyond its size. */
static inline void try_write_sizes(uint32_t size, int32_t (*call)(void *, void *), void *context, const char *say) {
    uint64_t buffer[1024], before[1024];
    unsigned char *bytes = (unsigned char *)buffer;
    const uint32_t bad[] = {0, 1, 4, 7, size - 4, size + 4, 4104, UINT32_MAX};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        memset(buffer, 0xa5, sizeof buffer);
        memcpy(bytes, &bad[i], 4);
        memcpy(before, buffer, sizeof buffer);
        CHECK_SAYS(call(bytes, context), NIXL_ERR_STRUCT_SIZE, say);
        CHECK(memcmp(before, buffer, sizeof buffer) == 0);
    }
    const uint32_t good[] = {8, 16, size - 8, size, size + 8};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        const uint32_t end = good[i] < size ? good[i] : size;
        memset(buffer, 0xa5, sizeof buffer);
        memcpy(bytes, &good[i], 4);
        CHECK_OK(call(bytes, context));
        CHECK(memcmp(bytes, &good[i], 4) == 0);
        for (uint32_t j = end; j < sizeof buffer; j++) CHECK(bytes[j] == 0xa5);
        /* The last field that fits has been written: no field of ours holds this pattern. */
        uint32_t unwritten = 0;
        for (uint32_t j = end - 4; j < end; j++) unwritten += bytes[j] == 0xa5;
        CHECK(unwritten < 4);
    }
    CHECK_SAYS(call(bytes + 4, context), NIXL_ERR_INVALID_ARGUMENT, say);
    CHECK_SAYS(call(NULL, context), NIXL_ERR_INVALID_ARGUMENT, say);
}

#endif
