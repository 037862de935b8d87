/* C8: the backend cannot start: no such network device, no lane that it could use, or a network namespace of which even
 * the loopback device is down. The reason is readable, nothing is left behind, and another attempt in the same process
 * succeeds when the cause is gone. */
/* quiet */
#include "env.h"

#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>

static void try(const char *key, const char *value, const char *say) {
    const nixlkv_param_t param = {key, value};
    nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_DECODE);
    config.backend_params = &param;
    config.num_backend_params = 1;
    expect_no_engine(&config, NIXL_ERR_BACKEND_FAILED, say);
}

/* A process in a fresh network namespace. As an ordinary user that takes a user namespace too. */
static int without_network(int fd) {
    (void)fd;
    if (unshare(CLONE_NEWNET) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0)
        FAIL("no network namespace can be made here: %s; run as root, or allow user namespaces", strerror(errno));
    const nixlkv_engine_config_t plain = engine_config(NIXLKV_ROLE_DECODE);
    for (int i = 0; i < 3; i++) expect_no_engine(&plain, NIXL_ERR_BACKEND_FAILED, "UCX");
    const int s = socket(AF_INET, SOCK_DGRAM, 0);
    struct ifreq lo = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    if (s < 0 || ioctl(s, SIOCSIFFLAGS, &lo) != 0) FAIL("lo cannot be brought up: %s", strerror(errno));
    close(s);
    expect_engines_work(plain);
    return 0;
}

int main(void) {
    expect_child_ok(spawn(without_network));
    const nixlkv_engine_config_t plain = engine_config(NIXLKV_ROLE_DECODE);
    usage_t after_one = {0};
    for (int round = 0; round < 2; round++) {
        try("UCX_NET_DEVICES", "nosuch0", "UCX");
        CHECK(strstr(nixlkv_last_error(), "nosuch0") != NULL);
        try("UCX_TLS", "posix,self", "UCX");
        try("UCX_NO_SUCH_SETTING", "1", "UCX_NO_SUCH_SETTING");
        expect_engines_work(plain);
        if (round == 0) after_one = usage_of(getpid());
    }
    for (int i = 0; i < 20; i++) try("UCX_NET_DEVICES", "nosuch0", "UCX");
    usage_t after_many = usage_of(getpid());
    /* A thread that has ended is listed until the kernel has taken it off. */
    for (const uint64_t start = now_ms(); after_many.threads > after_one.threads && now_ms() - start < 5000;) {
        sleep_ms(10);
        after_many = usage_of(getpid());
    }
    if (after_many.fds > after_one.fds || after_many.threads > after_one.threads ||
        after_many.rss_kib > after_one.rss_kib + (8 << 10))
        FAIL("20 attempts left %lld fds (%lld before), %lld threads (%lld), %lld KiB (%lld)", (long long)after_many.fds,
             (long long)after_one.fds, (long long)after_many.threads, (long long)after_one.threads,
             (long long)after_many.rss_kib, (long long)after_one.rss_kib);
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
