/* I11: log lines reach the callback of the engine that asked for them, at its level and no deeper, and nothing else
 * of the process: neither its standard streams nor another engine's callback. */
/* quiet */
#include <stdatomic.h>

#include "env.h"

typedef struct sink {
    atomic_uint lines[8]; /* by level */
    atomic_uint bad, about_devices;
    int destroyed;
} sink_t;

static void on_line(void *user_data, uint32_t level, const char *message) {
    sink_t *sink = user_data;
    if (level < 1 || level > 5 || message == NULL || message[0] == '\0' || strchr(message, '\n') != NULL) {
        atomic_fetch_add(&sink->bad, 1);
        return;
    }
    atomic_fetch_add(&sink->lines[level], 1);
    if (strstr(message, "nosuch0") != NULL) atomic_fetch_add(&sink->about_devices, 1);
}

static unsigned lines_above(sink_t *sink, uint32_t level) {
    unsigned n = 0;
    for (uint32_t i = level + 1; i < 8; i++) n += atomic_load(&sink->lines[i]);
    return n;
}

static unsigned all_lines(sink_t *sink) { return lines_above(sink, 0); }

static nixlkv_engine_config_t config_with(sink_t *sink, uint32_t level) {
    nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_BOTH);
    config.log_callback = on_line;
    config.log_user_data = sink;
    config.log_level = level;
    return config;
}

int main(void) {
    static sink_t sinks[6], off, late;
    /* Each level gets its lines and none that are more verbose; what is wrong with the backend is an error line. */
    for (uint32_t level = 0; level <= 5; level++) {
        nixlkv_engine_config_t config = config_with(&sinks[level], level);
        const nixlkv_param_t bad = {"UCX_NET_DEVICES", "nosuch0"};
        config.backend_params = &bad;
        config.num_backend_params = 1;
        expect_no_engine(&config, NIXL_ERR_BACKEND_FAILED, "nosuch0");
        config.num_backend_params = 0;
        expect_engines_work(config);
        CHECK(sinks[level].bad == 0 && lines_above(&sinks[level], level) == 0);
    }
    CHECK(all_lines(&sinks[0]) == 0);
    CHECK(all_lines(&sinks[5]) > 0);
    CHECK(sinks[2].about_devices > 0 && sinks[5].about_devices > 0);

    /* A room that fails is worth a line at INFO, to those who listen at INFO. */
    nixlkv_engine_t *loud = NULL, *silent = NULL;
    nixlkv_engine_config_t config = config_with(&late, NIXLKV_LOG_INFO);
    CHECK_OK(nixlkv_engine_create(&config, &loud));
    config = config_with(&off, NIXLKV_LOG_OFF);
    CHECK_OK(nixlkv_engine_create(&config, &silent));
    const unsigned before = atomic_load(&late.lines[NIXLKV_LOG_INFO]);
    CHECK_OK(nixlkv_abort(loud, 1, "for the log"));
    for (int i = 0; i < 500 && atomic_load(&late.lines[NIXLKV_LOG_INFO]) == before; i++) sleep_ms(10);
    CHECK(atomic_load(&late.lines[NIXLKV_LOG_INFO]) > before);
    CHECK(all_lines(&off) == 0);
    /* After its engine is gone, a callback is not called any more. */
    nixlkv_engine_destroy(loud);
    const unsigned after = all_lines(&late);
    CHECK_OK(nixlkv_abort(silent, 1, "for nobody"));
    expect_engines_work(engine_config(NIXLKV_ROLE_BOTH));
    CHECK(all_lines(&late) == after && all_lines(&off) == 0);
    nixlkv_engine_destroy(silent);
    return 0;
}
