/* Two engines in one process: a room with two chunks, aux and state; every byte is looked at. Then the same with a
 * room that names every page of the receiver: what it grants beside the pages is within its own means. */
#include "test.h"

enum { CHUNKED = 5, PAGE = 4096, LAYERS = 3, SLOT = 256, STATE = 512 };

static void transfer(int32_t num_pages, const int32_t *from, const int32_t *to) {
    const size_t kv = (size_t)num_pages * PAGE;
    nixlkv_engine_t *prefill = engine_create(NIXLKV_ROLE_PREFILL), *decode = engine_create(NIXLKV_ROLE_DECODE);
    char *memory[2];
    for (int side = 0; side < 2; side++) {
        memory[side] = map_bytes(1 << 20);
        poison(memory[side], 1 << 20);
        nixlkv_region_t regions[LAYERS + 2];
        for (int layer = 0; layer < LAYERS; layer++) {
            regions[layer] = region(NIXLKV_REGION_KV, memory[side] + (size_t)layer * kv, kv, PAGE);
            regions[layer].layer_id = (uint32_t)layer;
        }
        regions[LAYERS] = region(NIXLKV_REGION_AUX, memory[side] + LAYERS * kv, 4 * SLOT, SLOT);
        regions[LAYERS + 1] = region(NIXLKV_REGION_STATE, memory[side] + LAYERS * kv + 4 * SLOT, 4 * STATE, STATE);
        CHECK_OK(nixlkv_register(side ? decode : prefill, regions, LAYERS + 2, NULL));
    }
    uint64_t decode_peer = 0, prefill_peer = 0;
    connect_both(prefill, decode, &decode_peer, &prefill_peer);

    const int32_t aux_from = 2, aux_to = 3, state_from = 1, state_to = 0;
    for (int layer = 0; layer < LAYERS; layer++)
        for (int i = 0; i < CHUNKED; i++)
            stamp_item(memory[0] + (size_t)layer * kv, PAGE, from[i], 77, (uint64_t)layer, (uint64_t)i);
    stamp_item(memory[0] + LAYERS * kv, SLOT, aux_from, 77, 100, 0);
    stamp_item(memory[0] + LAYERS * kv + 4 * SLOT, STATE, state_from, 77, 200, 0);

    nixlkv_state_indices_t state;
    CHECK_OK(nixlkv_state_indices_init(&state, sizeof state));
    state.num_indices = 1;
    nixlkv_recv_params_t params = recv_params(77, &prefill_peer, 1, to, CHUNKED);
    state.indices = &state_to;
    params.states = &state;
    params.num_states = 1;
    params.aux_index = &aux_to;
    CHECK_OK(nixlkv_recv(decode, &params));

    nixlkv_chunk_t chunk = chunk_of(77, from, 2, 0, 0);
    CHECK_OK(nixlkv_send_chunk(prefill, &chunk));
    chunk = chunk_of(77, from + 2, CHUNKED - 2, 2, NIXLKV_CHUNK_LAST);
    state.indices = &state_from;
    chunk.states = &state;
    chunk.num_states = 1;
    CHECK_STATUS(nixlkv_send_chunk(prefill, &chunk), NIXL_ERR_AUX_MISSING);
    chunk.aux_index = &aux_from;
    CHECK_OK(nixlkv_send_chunk(prefill, &chunk));
    expect_end(decode, 77, NIXL_OK, 10000);
    expect_end(prefill, 77, NIXL_OK, 10000);

    for (int layer = 0; layer < LAYERS; layer++) {
        const char *base = memory[1] + (size_t)layer * kv;
        for (int32_t page = 0; page < num_pages; page++) {
            int sent = -1;
            for (int i = 0; i < CHUNKED; i++)
                if (to[i] == page) sent = i;
            if (sent < 0) CHECK(unpoisoned_words(base, PAGE, page) == 0);
            else CHECK(wrong_words(base, PAGE, page, 77, (uint64_t)layer, (uint64_t)sent) == 0);
        }
    }
    CHECK(wrong_words(memory[1] + LAYERS * kv, SLOT, aux_to, 77, 100, 0) == 0);
    CHECK(wrong_words(memory[1] + LAYERS * kv + 4 * SLOT, STATE, state_to, 77, 200, 0) == 0);
    const nixlkv_room_status_t status = poll_room(prefill, 77);
    CHECK(status.num_chunks == 2 && status.num_pages == CHUNKED);
    CHECK(status.num_bytes == (uint64_t)CHUNKED * LAYERS * PAGE + SLOT + STATE);
    CHECK_OK(nixlkv_release(prefill, 77));
    CHECK_OK(nixlkv_release(decode, 77));
    CHECK_OK(nixlkv_engine_shutdown(prefill, 1000));
    CHECK_OK(nixlkv_engine_shutdown(decode, 1000));
    nixlkv_engine_destroy(prefill);
    nixlkv_engine_destroy(decode);
    for (int side = 0; side < 2; side++) CHECK(munmap(memory[side], 1 << 20) == 0);
}

int main(void) {
    transfer(32, (const int32_t[CHUNKED]){3, 9, 10, 30, 1}, (const int32_t[CHUNKED]){8, 20, 21, 0, 31});
    transfer(CHUNKED, (const int32_t[CHUNKED]){3, 0, 1, 4, 2}, (const int32_t[CHUNKED]){4, 1, 2, 0, 3});
    return 0;
}
