/* The _init functions: every size, NULL and misaligned pointers; nothing is written beyond the size, or on failure. */
#include "test.h"

static uint64_t buffer[1024];

#define TRY(type, init)                                                                                                \
    do {                                                                                                               \
        const uint32_t size = sizeof(type);                                                                            \
        const uint32_t bad[] = {0, 1, 4, 7, 9, size - 4, size + 4, 4104, UINT32_MAX, 0x80000000u};                     \
        unsigned char *const bytes = (unsigned char *)buffer;                                                          \
        type *const value = (type *)(void *)buffer;                                                                    \
        memset(buffer, 0xa5, sizeof buffer);                                                                           \
        for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {                                                      \
            char text[32];                                                                                             \
            snprintf(text, sizeof text, "struct_size is %" PRIu32, bad[i]);                                            \
            CHECK_SAYS(init(value, bad[i]), NIXL_ERR_STRUCT_SIZE, text);                                               \
        }                                                                                                              \
        CHECK_SAYS(init(NULL, size), NIXL_ERR_INVALID_ARGUMENT, "NULL");                                               \
        CHECK_SAYS(init((type *)(void *)(bytes + 4), size), NIXL_ERR_INVALID_ARGUMENT, "aligned");                     \
        CHECK_SAYS(init((type *)(void *)(bytes + 1), size), NIXL_ERR_INVALID_ARGUMENT, "aligned");                     \
        for (size_t i = 0; i < sizeof buffer; i++) CHECK(bytes[i] == 0xa5);                                            \
        const uint32_t good[] = {8, size - 8, size, size + 8, 4096};                                                   \
        for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {                                                    \
            memset(buffer, 0xa5, sizeof buffer);                                                                       \
            CHECK_OK(init(value, good[i]));                                                                            \
            CHECK(memcmp(bytes, &good[i], 4) == 0);                                                                    \
            for (size_t j = 4; j < sizeof buffer; j++) CHECK(bytes[j] == (j < good[i] ? 0 : 0xa5));                    \
        }                                                                                                              \
        type plain;                                                                                                    \
        CHECK_OK(init(&plain, sizeof plain));                                                                          \
        CHECK(plain.struct_size == sizeof plain);                                                                      \
    } while (0)

int main(void) {
    TRY(nixlkv_engine_config_t, nixlkv_engine_config_init);
    TRY(nixlkv_nixl_info_t, nixlkv_nixl_info_init);
    TRY(nixlkv_stats_t, nixlkv_stats_init);
    TRY(nixlkv_region_t, nixlkv_region_init);
    TRY(nixlkv_state_indices_t, nixlkv_state_indices_init);
    TRY(nixlkv_recv_params_t, nixlkv_recv_params_init);
    TRY(nixlkv_chunk_t, nixlkv_chunk_init);
    TRY(nixlkv_room_status_t, nixlkv_room_status_init);
    return 0;
}
