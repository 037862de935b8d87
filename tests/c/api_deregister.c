/* nixlkv_deregister: unknown ids, ids listed twice, busy memory; all or none. */
#include "api.h"

int main(void) {
    uint64_t ids[3] = {1, 1, 1}, space[2] = {0, 0};
    CHECK_BAD_HANDLES(nixlkv_deregister(engine, ids, 1));

    nixlkv_engine_t *engine = engine_create(NIXLKV_ROLE_BOTH);
    char *memory = map_bytes(64 << 10);
    nixlkv_region_t batch[3];
    for (uint32_t i = 0; i < 3; i++) {
        batch[i] = region(NIXLKV_REGION_KV, memory + 4096 * i, 4096, 64);
        batch[i].layer_id = i;
    }
    CHECK_OK(nixlkv_register(engine, batch, 3, ids));
    CHECK_SAYS(nixlkv_deregister(engine, ids, 0), NIXL_ERR_INVALID_ARGUMENT, "num_regions");
    CHECK_SAYS(nixlkv_deregister(engine, NULL, 0), NIXL_ERR_INVALID_ARGUMENT, "num_regions");
    CHECK_SAYS(nixlkv_deregister(engine, NULL, 3), NIXL_ERR_INVALID_ARGUMENT, "region_ids is NULL");
    CHECK_SAYS(nixlkv_deregister(engine, ids, UINT64_MAX), NIXL_ERR_INVALID_ARGUMENT, "18446744073709551615");
    CHECK_SAYS(nixlkv_deregister(engine, ids, UINT64_MAX / 8 + 2), NIXL_ERR_INVALID_ARGUMENT, "entries");
    CHECK_SAYS(nixlkv_deregister(engine, (uint64_t *)(void *)((char *)space + 4), 1), NIXL_ERR_INVALID_ARGUMENT,
               "region_ids");
    const uint64_t unknown[3] = {ids[0], 0, ids[2]}, twice[3] = {ids[0], ids[1], ids[0]}, far[1] = {UINT64_MAX};
    CHECK_SAYS(nixlkv_deregister(engine, unknown, 3), NIXL_ERR_REGION_UNKNOWN, "region_ids[1] = 0");
    CHECK_SAYS(nixlkv_deregister(engine, twice, 3), NIXL_ERR_REGION_UNKNOWN, "region_ids[2]");
    CHECK_SAYS(nixlkv_deregister(engine, far, 1), NIXL_ERR_REGION_UNKNOWN, "18446744073709551615");
    /* None of them has gone. */
    CHECK_STATUS(nixlkv_register(engine, batch, 1, NULL), NIXL_ERR_REGION_DUPLICATE);
    CHECK_OK(nixlkv_deregister(engine, ids, 3));
    CHECK_SAYS(nixlkv_deregister(engine, ids, 3), NIXL_ERR_REGION_UNKNOWN, "region_ids[0]");
    /* Ids are not used again. */
    uint64_t later = 0;
    CHECK_OK(nixlkv_register(engine, batch, 1, &later));
    CHECK(later != ids[0] && later != ids[1] && later != ids[2]);
    nixlkv_engine_destroy(engine);

    /* F10: memory that an open room uses stays, and goes when the room is quiesced. */
    pair_t pair = make_pair(WITH_KV);
    nixlkv_region_t aux = region(NIXLKV_REGION_AUX, memory, 4096, 64);
    const int32_t page = 1;
    nixlkv_recv_params_t params = recv_params(5, &pair.prefill_peer, 1, &page, 1);
    CHECK_OK(nixlkv_recv(pair.decode, &params));
    uint64_t id = 0;
    CHECK_OK(nixlkv_register(pair.decode, &aux, 1, &id));
    CHECK_SAYS(nixlkv_deregister(pair.decode, &id, 1), NIXL_ERR_REGION_BUSY, "1 rooms");
    CHECK_OK(nixlkv_abort(pair.decode, 5, NULL));
    CHECK_OK(nixlkv_wait(pair.decode, &params.room, 1, NIXLKV_WAIT_QUIESCED, WAIT_MS));
    CHECK_OK(nixlkv_deregister(pair.decode, &id, 1));
    CHECK_OK(nixlkv_release(pair.decode, 5));
    destroy_pair(&pair);
    return 0;
}
