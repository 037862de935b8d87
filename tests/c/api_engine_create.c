/* nixlkv_engine_create: every bad configuration is refused before anything starts, and the corrected one works. */
#include "api.h"

static nixlkv_engine_t *const UNTOUCHED = (nixlkv_engine_t *)(uintptr_t)0x1234;

static void refused(const nixlkv_engine_config_t *config, int32_t code, const char *say) {
    nixlkv_engine_t *engine = UNTOUCHED;
    const int32_t status = nixlkv_engine_create(config, &engine);
    if (status != code || strstr(nixlkv_last_error(), say) == NULL)
        FAIL("expected %s saying \"%s\", got %s: %s", nixlkv_status_name(code), say, nixlkv_status_name(status),
             nixlkv_last_error());
    CHECK(engine == UNTOUCHED);
}

static void accepted(const nixlkv_engine_config_t *config) {
    nixlkv_engine_t *engine = NULL;
    CHECK_OK(nixlkv_engine_create(config, &engine));
    CHECK(engine != NULL);
    CHECK(stats_of(engine).rooms_opened == 0);
    nixlkv_engine_destroy(engine);
}

static nixlkv_engine_t *created;

static int32_t create(const void *config, void *unused) {
    (void)unused;
    return nixlkv_engine_create(config, &created);
}

static void destroy(void *unused) {
    (void)unused;
    nixlkv_engine_destroy(created);
}

static void i4_struct_sizes(void) {
    const nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_BOTH);
    try_read_sizes(&config, sizeof config, create, destroy, NULL, "config");
    /* The oldest caller that there can be: a size and a role. */
    uint64_t oldest;
    const uint32_t words[2] = {8, NIXLKV_ROLE_PREFILL};
    memcpy(&oldest, words, sizeof oldest);
    accepted((const nixlkv_engine_config_t *)(const void *)&oldest);
}

static void i15_numbers(void) {
    const uint32_t roles[] = {0, 4, 5, 7, 255, 256, 0x80000001u, UINT32_MAX};
    for (size_t i = 0; i < sizeof roles / sizeof roles[0]; i++) {
        const nixlkv_engine_config_t config = engine_config(roles[i]);
        char say[32];
        snprintf(say, sizeof say, "role is %" PRIu32, roles[i]);
        refused(&config, NIXL_ERR_INVALID_ARGUMENT, say);
    }
    nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_DECODE);
    config.log_level = 6;
    refused(&config, NIXL_ERR_INVALID_ARGUMENT, "log_level is 6");
    config.log_level = UINT32_MAX;
    refused(&config, NIXL_ERR_INVALID_ARGUMENT, "log_level is 4294967295");
    config.log_level = 0;
    config.num_workers = 65;
    refused(&config, NIXL_ERR_INVALID_ARGUMENT, "num_workers is 65");
    config.num_workers = UINT32_MAX;
    refused(&config, NIXL_ERR_INVALID_ARGUMENT, "num_workers is 4294967295");
    config.num_workers = 3;
    config.heartbeat_interval_ms = 200;
    config.liveness_limit_ms = 200;
    refused(&config, NIXL_ERR_INVALID_ARGUMENT, "liveness_limit_ms (200)");
    config.liveness_limit_ms = 0;
    config.heartbeat_interval_ms = UINT64_MAX;
    refused(&config, NIXL_ERR_INVALID_ARGUMENT, "heartbeat_interval_ms (18446744073709551615)");
    config.heartbeat_interval_ms = 0;
    /* The largest of everything else is a limit that is never reached, not an overflow. */
    config.queue_depth = UINT32_MAX;
    config.max_rooms = UINT32_MAX;
    config.create_timeout_ms = UINT64_MAX;
    config.connect_timeout_ms = UINT64_MAX;
    config.grant_timeout_ms = UINT64_MAX;
    config.room_timeout_ms = UINT64_MAX;
    config.liveness_limit_ms = UINT64_MAX;
    accepted(&config);
}

static void i15_strings(void) {
    static const char not_utf8[] = {(char)0xc3, (char)0x28, 0}, cut_utf8[] = {'a', (char)0xe2, (char)0x82, 0};
    char long_name[257];
    memset(long_name, 'n', sizeof long_name);
    long_name[256] = '\0';
    nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_PREFILL);
    struct {
        const char **field;
        const char *name;
    } fields[] = {{&config.name, "name"},
                  {&config.backend, "backend"},
                  {&config.cache_dtype, "cache_dtype"},
                  {&config.nixl_library, "nixl_library"}};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        *fields[i].field = not_utf8;
        refused(&config, NIXL_ERR_INVALID_ARGUMENT, fields[i].name);
        *fields[i].field = cut_utf8;
        refused(&config, NIXL_ERR_INVALID_ARGUMENT, fields[i].name);
        *fields[i].field = NULL;
    }
    for (size_t i = 0; i < 3; i++) {
        *fields[i].field = long_name;
        refused(&config, NIXL_ERR_INVALID_ARGUMENT, fields[i].name);
        *fields[i].field = NULL;
    }
    config.name = "";
    refused(&config, NIXL_ERR_INVALID_ARGUMENT, "name");
    config.name = NULL;
    config.backend = "";
    refused(&config, NIXL_ERR_INVALID_ARGUMENT, "backend");
    config.backend = "../UCX";
    refused(&config, NIXL_ERR_INVALID_ARGUMENT, "../UCX");
    config.backend = "UCX";
    long_name[255] = '\0';
    config.name = long_name;
    config.cache_dtype = long_name;
    accepted(&config);
    config.name = "\xe5\xbc\x95\xe6\x93\x8e \xf0\x9f\x9a\x80"; /* UTF-8 beyond ASCII */
    accepted(&config);
}

static void i15_parameters(void) {
    static const char not_utf8[] = {(char)0xff, 0};
    uint64_t space[8] = {0};
    nixlkv_param_t param = {"UCX_TLS", "tcp,self"};
    nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_PREFILL);
    config.num_backend_params = 1;
    refused(&config, NIXL_ERR_INVALID_ARGUMENT, "backend_params is NULL");
    config.num_backend_params = UINT64_MAX;
    refused(&config, NIXL_ERR_INVALID_ARGUMENT, "backend_params is NULL");
    config.backend_params = &param;
    const uint64_t huge[] = {UINT64_MAX, UINT64_MAX / 16, UINT64_MAX / 16 + 2, (uint64_t)1 << 63, (uint64_t)1 << 60};
    for (size_t i = 0; i < sizeof huge / sizeof huge[0]; i++) {
        char say[32];
        snprintf(say, sizeof say, "%" PRIu64 " entries", huge[i]);
        config.num_backend_params = huge[i];
        refused(&config, NIXL_ERR_INVALID_ARGUMENT, say);
    }
    config.num_backend_params = 1;
    config.backend_params = (const nixlkv_param_t *)(const void *)((const char *)space + 4);
    refused(&config, NIXL_ERR_INVALID_ARGUMENT, "backend_params");
    config.backend_params = &param;
    param.key = NULL;
    refused(&config, NIXL_ERR_INVALID_ARGUMENT, "backend_params[0]");
    param.key = "UCX_TLS";
    param.value = NULL;
    refused(&config, NIXL_ERR_INVALID_ARGUMENT, "backend_params[0]");
    param.value = not_utf8;
    refused(&config, NIXL_ERR_INVALID_ARGUMENT, "UTF-8");
    param.value = "tcp,self";
    param.key = "";
    refused(&config, NIXL_ERR_INVALID_ARGUMENT, "\"\"");
    param.key = "UCX_A=B";
    refused(&config, NIXL_ERR_INVALID_ARGUMENT, "UCX_A=B");
    param.key = "UCX_TLS";
    param.value = "tcp\x01";
    refused(&config, NIXL_ERR_INVALID_ARGUMENT, "UCX_TLS");
    param.value = "tcp,self";
    accepted(&config);
    /* NULL with 0, and a list with 0: no parameters. */
    config.num_backend_params = 0;
    config.backend_params = (const nixlkv_param_t *)(const void *)((const char *)space + 4);
    accepted(&config);
}

static void outputs(void) {
    const nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_PREFILL);
    uint64_t space[2] = {0, 0};
    CHECK_SAYS(nixlkv_engine_create(&config, NULL), NIXL_ERR_INVALID_ARGUMENT, "engine");
    nixlkv_engine_t **misaligned = (nixlkv_engine_t **)(void *)((char *)space + 1);
    CHECK_SAYS(nixlkv_engine_create(&config, misaligned), NIXL_ERR_INVALID_ARGUMENT, "engine");
    CHECK(space[0] == 0 && space[1] == 0);
}

int main(void) {
    outputs();
    i15_numbers();
    i15_strings();
    i15_parameters();
    i4_struct_sizes();
    return 0;
}
