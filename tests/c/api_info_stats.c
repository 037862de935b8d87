/* nixlkv_nixl_info and nixlkv_stats: bad inputs, struct sizes, and that they tell the truth. */
#include "api.h"

static int32_t info_of(void *info, void *engine) { return nixlkv_nixl_info(engine, info); }

static int32_t read_stats(void *stats, void *engine) { return nixlkv_stats(engine, stats); }

int main(void) {
    nixlkv_nixl_info_t info;
    nixlkv_stats_t stats;
    CHECK_OK(nixlkv_nixl_info_init(&info, sizeof info));
    CHECK_OK(nixlkv_stats_init(&stats, sizeof stats));
    const nixlkv_nixl_info_t info_before = info;
    const nixlkv_stats_t stats_before = stats;
    CHECK_BAD_HANDLES(nixlkv_nixl_info(engine, &info));
    CHECK_BAD_HANDLES(nixlkv_stats(engine, &stats));
    CHECK(memcmp(&info, &info_before, sizeof info) == 0);
    CHECK(memcmp(&stats, &stats_before, sizeof stats) == 0);

    pair_t pair = make_pair(WITH_ALL);
    try_write_sizes(sizeof info, info_of, pair.prefill, "info");
    try_write_sizes(sizeof stats, read_stats, pair.prefill, "stats");

    CHECK_OK(nixlkv_nixl_info(pair.prefill, &info));
    CHECK(info.struct_size == sizeof info && strcmp(info.backend, "UCX") == 0);
    CHECK(info.nixl_library[0] == '/' && strstr(info.nixl_library, "libnixl_capi") != NULL);
    CHECK(access(info.nixl_library, R_OK) == 0);
    int ucx = 0;
    CHECK(info.num_plugins > 0 && info.num_backend_params > 0);
    for (uint32_t i = 0; i < info.num_plugins; i++) ucx |= strcmp(info.plugins[i], "UCX") == 0;
    CHECK(ucx);
    for (uint64_t i = 0; i < info.num_backend_params; i++)
        CHECK(info.backend_params[i].key[0] != '\0' && info.backend_params[i].value != NULL);
    nixlkv_nixl_info_t again;
    CHECK_OK(nixlkv_nixl_info_init(&again, sizeof again));
    CHECK_OK(nixlkv_nixl_info(pair.prefill, &again));
    CHECK(memcmp(&again, &info, sizeof info) == 0);

    for (uint64_t room = 1; room <= 3; room++) expect_transfer(&pair, room, 2);
    const int32_t page = 5;
    nixlkv_chunk_t chunk = chunk_of(8, &page, 1, 0, 0);
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    stats = stats_of(pair.prefill);
    CHECK(stats.struct_size == sizeof stats && stats.reserved == 0);
    CHECK(stats.rooms_opened == 4 && stats.rooms_succeeded == 3 && stats.rooms_failed == 0);
    CHECK(stats.rooms_active == 1 && stats.rooms_unquiesced == 1 && stats.chunks_pending == 1);
    CHECK(stats.chunks_sent == 3 && stats.bytes_sent == 3 * (LAYERS * PAGE + SLOT + STATE));
    CHECK(stats.descriptors_sent == 3 * (LAYERS + 2) && stats.transfers_posted >= 3);
    CHECK(stats.transfers_in_flight == 0 && stats.transfers_failed == 0);
    CHECK(stats.messages_sent > 0 && stats.messages_received > 0 && stats.messages_malformed == 0);
    CHECK_OK(nixlkv_abort(pair.prefill, 8, NULL));
    stats = stats_of(pair.prefill);
    CHECK(stats.rooms_failed == 1 && stats.rooms_active == 0 && stats.chunks_pending == 0);
    stats = stats_of(pair.decode);
    CHECK(stats.rooms_opened == 3 && stats.rooms_succeeded == 3 && stats.bytes_sent == 0);
    destroy_pair(&pair);
    CHECK_STATUS(nixlkv_stats(pair.prefill, &stats), NIXL_ERR_INVALID_HANDLE);
    return 0;
}
