/* C8: the backend cannot start: no such network device, or no lane that it could use. Readable, and another attempt
 * in the same process succeeds. */
/* quiet */
#include "env.h"

static void try(const char *key, const char *value, const char *say) {
    const nixlkv_param_t param = {key, value};
    nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_DECODE);
    config.backend_params = &param;
    config.num_backend_params = 1;
    expect_no_engine(&config, NIXL_ERR_BACKEND_FAILED, say);
}

int main(void) {
    const nixlkv_engine_config_t plain = engine_config(NIXLKV_ROLE_DECODE);
    for (int round = 0; round < 2; round++) {
        try("UCX_NET_DEVICES", "nosuch0", "UCX");
        CHECK(strstr(nixlkv_last_error(), "nosuch0") != NULL);
        try("UCX_TLS", "posix,self", "UCX");
        try("UCX_NO_SUCH_SETTING", "1", "UCX_NO_SUCH_SETTING");
        expect_engines_work(plain);
    }
    /* The same through the environment, which is the host's own. */
    CHECK(setenv("UCX_NET_DEVICES", "nosuch0", 1) == 0);
    expect_no_engine(&plain, NIXL_ERR_BACKEND_FAILED, "UCX");
    CHECK(unsetenv("UCX_NET_DEVICES") == 0);
    CHECK(setenv("UCX_TLS", "posix,self", 1) == 0);
    expect_no_engine(&plain, NIXL_ERR_BACKEND_FAILED, "UCX");
    CHECK(unsetenv("UCX_TLS") == 0);
    const nixlkv_param_t tcp[2] = {{"UCX_TLS", "tcp,self"}, {"num_workers", "1"}};
    nixlkv_engine_config_t config = plain;
    config.backend_params = tcp;
    config.num_backend_params = 2;
    expect_engines_work(config);
    /* What it runs with is reported as it was given. */
    nixlkv_engine_t *engine = NULL;
    nixlkv_nixl_info_t info;
    CHECK_OK(nixlkv_engine_create(&config, &engine));
    CHECK_OK(nixlkv_nixl_info_init(&info, sizeof info));
    CHECK_OK(nixlkv_nixl_info(engine, &info));
    CHECK(strcmp(info.nixl_library, real_library()) == 0 && strcmp(info.backend, "UCX") == 0);
    int seen = 0;
    for (uint64_t i = 0; i < info.num_backend_params; i++) {
        seen |= strcmp(info.backend_params[i].key, "UCX_TLS") == 0 &&
                strcmp(info.backend_params[i].value, "tcp,self") == 0;
        seen |= (strcmp(info.backend_params[i].key, "num_workers") == 0 &&
                 strcmp(info.backend_params[i].value, "1") == 0) << 1;
    }
    CHECK(seen == 3);
    CHECK(getenv("UCX_TLS") == NULL);
    nixlkv_engine_destroy(engine);
    return 0;
}
