/* Versions, status codes and the last error. None of it needs NIXL. */
/* env: NIXLKV_NIXL_LIBRARY=/nonexistent/libnixl_capi.so */
#include <pthread.h>

#include "test.h"

static void every_number_has_a_name(void) {
    int codes = 0;
    for (int32_t status = -70000; status <= 70000; status++) {
        const char *name = nixlkv_status_name(status), *text = nixlkv_status_text(status);
        const int32_t retryable = nixlkv_status_retryable(status);
        CHECK(name != NULL && text != NULL && text[0] != '\0' && strchr(text, '\n') == NULL);
        CHECK(retryable == 0 || retryable == 1);
        if (strcmp(name, "NIXL_ERR_?") == 0) {
            CHECK(retryable == 0 && strcmp(text, nixlkv_status_text(1)) == 0);
            continue;
        }
        codes++;
        CHECK(status == 0 || (status <= -101 && status > -600));
        CHECK(strcmp(name, "NIXL_OK") == 0 || strncmp(name, "NIXL_ERR_", 9) == 0);
        for (int32_t other = status + 1; other <= 0; other++) CHECK(strcmp(name, nixlkv_status_name(other)) != 0);
    }
    CHECK(codes > 60);
    const int32_t far[] = {INT32_MIN, INT32_MAX, INT32_MIN + 1};
    for (size_t i = 0; i < sizeof far / sizeof far[0]; i++) {
        CHECK(strcmp(nixlkv_status_name(far[i]), "NIXL_ERR_?") == 0);
        CHECK(nixlkv_status_retryable(far[i]) == 0);
    }
    CHECK(strcmp(nixlkv_status_name(NIXL_OK), "NIXL_OK") == 0);
    CHECK(strcmp(nixlkv_status_name(NIXL_ERR_AUX_MISSING), "NIXL_ERR_AUX_MISSING") == 0);
    CHECK(nixlkv_status_retryable(NIXL_ERR_QUEUE_FULL) == 1);
    CHECK(nixlkv_status_retryable(NIXL_ERR_AUX_MISSING) == 0);
}

static void *other_thread(void *unused) {
    (void)unused;
    CHECK(strcmp(nixlkv_last_error(), "") == 0);
    CHECK_STATUS(nixlkv_release(NULL, 5), NIXL_ERR_INVALID_HANDLE);
    CHECK(strstr(nixlkv_last_error(), "NIXL_ERR_INVALID_HANDLE (-102)") != NULL);
    return NULL;
}

static void the_last_error_belongs_to_its_thread(void) {
    CHECK(strcmp(nixlkv_last_error(), "") == 0);
    nixlkv_chunk_t chunk;
    CHECK_STATUS(nixlkv_chunk_init(&chunk, 3), NIXL_ERR_STRUCT_SIZE);
    char said[512];
    snprintf(said, sizeof said, "%s", nixlkv_last_error());
    CHECK(strncmp(said, "NIXL_ERR_STRUCT_SIZE (-103): ", 29) == 0);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, other_thread, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(strcmp(nixlkv_last_error(), said) == 0);
    /* A successful call leaves it as it is. */
    CHECK_OK(nixlkv_chunk_init(&chunk, sizeof chunk));
    CHECK(strcmp(nixlkv_last_error(), said) == 0);
    CHECK_STATUS(nixlkv_release(NULL, 5), NIXL_ERR_INVALID_HANDLE);
    CHECK(strcmp(nixlkv_last_error(), said) != 0);
}

/* I1: a panic inside the library becomes a code, in every function that can fail. */
static void i1_a_panic_does_not_cross_the_boundary(void) {
    nixlkv_engine_config_t config;
    nixlkv_nixl_info_t info;
    nixlkv_stats_t stats;
    nixlkv_region_t a_region;
    nixlkv_state_indices_t indices;
    nixlkv_recv_params_t params;
    nixlkv_chunk_t chunk;
    nixlkv_room_status_t status;
    nixlkv_engine_t *engine = NULL;
    uint64_t number = 0;
#define PANICS(call)                                                                                                   \
    do {                                                                                                               \
        CHECK_OK(nixlkv_test_fault("call_panics", 0, 1));                                                              \
        CHECK_SAYS(call, NIXL_ERR_INTERNAL, "panic");                                                                  \
    } while (0)
    PANICS(nixlkv_engine_config_init(&config, sizeof config));
    PANICS(nixlkv_nixl_info_init(&info, sizeof info));
    PANICS(nixlkv_stats_init(&stats, sizeof stats));
    PANICS(nixlkv_region_init(&a_region, sizeof a_region));
    PANICS(nixlkv_state_indices_init(&indices, sizeof indices));
    PANICS(nixlkv_recv_params_init(&params, sizeof params));
    PANICS(nixlkv_chunk_init(&chunk, sizeof chunk));
    PANICS(nixlkv_room_status_init(&status, sizeof status));
    PANICS(nixlkv_engine_create(&config, &engine));
    PANICS(nixlkv_engine_shutdown(engine, 0));
    PANICS(nixlkv_nixl_info(engine, &info));
    PANICS(nixlkv_stats(engine, &stats));
    PANICS(nixlkv_register(engine, &a_region, 1, &number));
    PANICS(nixlkv_deregister(engine, &number, 1));
    PANICS(nixlkv_export(engine, NULL, 0, &number));
    PANICS(nixlkv_connect(engine, &number, 8, &number));
    PANICS(nixlkv_disconnect(engine, 1));
    PANICS(nixlkv_recv(engine, &params));
    PANICS(nixlkv_send_chunk(engine, &chunk));
    PANICS(nixlkv_poll(engine, 1, &status));
    PANICS(nixlkv_wait(engine, &number, 1, 0, 0));
    PANICS(nixlkv_abort(engine, 1, NULL));
    PANICS(nixlkv_release(engine, 1));
    CHECK_OK(nixlkv_test_fault("call_panics", 0, 1));
    nixlkv_engine_destroy(engine);
    /* It fired: the next call works again. */
    CHECK_OK(nixlkv_chunk_init(&chunk, sizeof chunk));
    CHECK(engine == NULL && number == 0);
}

int main(void) {
    CHECK(nixlkv_abi_version() == NIXLKV_ABI_VERSION);
    int major = -1, minor = -1, patch = -1;
    CHECK(sscanf(nixlkv_version(), "%d.%d.%d", &major, &minor, &patch) == 3 && major >= 0 && minor >= 0 && patch >= 0);
    the_last_error_belongs_to_its_thread();
    every_number_has_a_name();
    i1_a_panic_does_not_cross_the_boundary();
    return 0;
}
