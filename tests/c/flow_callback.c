/* A log callback may call the library, even destroy the engine that it hears; and a wait in another thread ends when its
 * engine is destroyed. */
#include "test.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

static _Atomic(nixlkv_engine_t *) engine;
static atomic_uint lines;
static atomic_bool destroy;

static void on_line(void *user_data, uint32_t level, const char *message) {
    (void)user_data, (void)level, (void)message;
    nixlkv_engine_t *e = atomic_load(&engine);
    if (e == NULL) return;
    atomic_fetch_add(&lines, 1);
    nixlkv_stats_t stats;
    CHECK_OK(nixlkv_stats_init(&stats, sizeof stats));
    CHECK_OK(nixlkv_stats(e, &stats));
    CHECK_OK(nixlkv_abort(e, 1000, "from the callback"));
    if (atomic_load(&destroy)) {
        atomic_store(&engine, NULL);
        nixlkv_engine_destroy(e);
    }
}

static void *waiter(void *e) {
    const uint64_t room = 5;
    const int32_t status = nixlkv_wait(e, &room, 1, NIXLKV_WAIT_QUIESCED, 60000);
    CHECK(status == NIXL_ERR_SHUT_DOWN || status == NIXL_OK);
    return NULL;
}

int main(void) {
    nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_BOTH);
    config.log_callback = on_line;
    config.log_level = NIXLKV_LOG_TRACE;
    nixlkv_engine_t *e = NULL;
    CHECK_OK(nixlkv_engine_create(&config, &e));
    atomic_store(&engine, e);
    for (uint64_t room = 1; room <= 3; room++) CHECK_OK(nixlkv_abort(e, room, "for the log"));
    for (int i = 0; i < 1000 && atomic_load(&lines) < 3; i++) sleep_ms(10);
    CHECK(atomic_load(&lines) >= 3);
    CHECK(poll_room(e, 1000).state == NIXLKV_ROOM_FAILED);
    atomic_store(&destroy, true);
    CHECK_OK(nixlkv_abort(e, 4, "the last line"));
    for (int i = 0; i < 1000 && atomic_load(&engine) != NULL; i++) sleep_ms(10);
    CHECK(atomic_load(&engine) == NULL);
    while (nixlkv_abort(e, 4, NULL) != NIXL_ERR_INVALID_HANDLE) sleep_ms(1);

    /* A room whose sender never connects back: nothing but the engine's end ends the wait. */
    nixlkv_engine_t *decode = engine_create(NIXLKV_ROLE_DECODE), *prefill = engine_create(NIXLKV_ROLE_PREFILL);
    void *memory = map_bytes(4096);
    nixlkv_region_t r = region(NIXLKV_REGION_KV, memory, 4096, 4096);
    CHECK_OK(nixlkv_register(decode, &r, 1, NULL));
    CHECK_OK(nixlkv_register(prefill, &r, 1, NULL));
    blob_t blob = export_blob(prefill);
    uint64_t peer = 0;
    CHECK_OK(nixlkv_connect(decode, blob.bytes, blob.len, &peer));
    free(blob.bytes);
    const int32_t page = 0;
    nixlkv_recv_params_t params = recv_params(5, &peer, 1, &page, 1);
    CHECK_OK(nixlkv_recv(decode, &params));
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, waiter, decode) == 0);
    sleep_ms(100);
    const uint64_t start = now_ms();
    nixlkv_engine_destroy(decode);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(now_ms() - start < 20000);
    nixlkv_engine_destroy(prefill);
    return 0;
}
