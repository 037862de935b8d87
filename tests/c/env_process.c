/* I9: creating, using and destroying engines leaves the host's environment, signal dispositions, signal mask, working
 * folder and standard streams as they were; and a signal that ends the process still does. */
/* quiet */
#include "env.h"

extern char **environ;

static uint64_t hash_environment(void) {
    uint64_t hash = 0;
    for (char **entry = environ; *entry != NULL; entry++) {
        hash = mix(hash);
        for (const char *c = *entry; *c != '\0'; c++) hash = mix(hash ^ (unsigned char)*c);
    }
    return hash;
}

/* SA_RESTORER: the C library adds it to whatever it writes, so it tells nothing of the disposition. */
enum { RESTORER = 0x04000000 };

static void on_signal(int signal) { (void)signal; }

static int dies_by_sighup(int fd) {
    nixlkv_engine_t *engine = engine_create(NIXLKV_ROLE_DECODE);
    send_u64(fd, 1);
    sleep_ms(30000);
    nixlkv_engine_destroy(engine);
    return 0;
}

int main(void) {
    child_t child = spawn(dies_by_sighup);

    /* Some dispositions of the host's own, the rest as the system made them. */
    struct sigaction ours = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigaddset(&ours.sa_mask, SIGUSR2);
    CHECK(sigaction(SIGUSR1, &ours, NULL) == 0 && sigaction(SIGSEGV, &ours, NULL) == 0);
    CHECK(signal(SIGPIPE, SIG_IGN) != SIG_ERR);
    struct sigaction before[32], now;
    sigset_t mask_before, mask_now;
    char folder_before[PATH_MAX], folder_now[PATH_MAX];
    for (int signal = 1; signal <= 31; signal++) CHECK(sigaction(signal, NULL, &before[signal]) == 0);
    CHECK(sigprocmask(SIG_BLOCK, NULL, &mask_before) == 0 && getcwd(folder_before, sizeof folder_before) != NULL);
    char **const environ_before = environ;
    const uint64_t hash_before = hash_environment();

    for (int round = 0; round < 2; round++) {
        expect_engines_work(engine_config(NIXLKV_ROLE_DECODE));
        for (int signal = 1; signal <= 31; signal++) {
            CHECK(sigaction(signal, NULL, &now) == 0);
            int same = now.sa_handler == before[signal].sa_handler &&
                       ((now.sa_flags ^ before[signal].sa_flags) & ~RESTORER) == 0;
            for (int other = 1; other <= 31; other++)
                same &= sigismember(&now.sa_mask, other) == sigismember(&before[signal].sa_mask, other);
            if (!same) FAIL("the disposition of signal %d has changed", signal);
        }
        CHECK(sigprocmask(SIG_BLOCK, NULL, &mask_now) == 0);
        for (int signal = 1; signal <= 31; signal++)
            CHECK(sigismember(&mask_now, signal) == sigismember(&mask_before, signal));
        CHECK(environ == environ_before && hash_environment() == hash_before);
        CHECK(getcwd(folder_now, sizeof folder_now) != NULL && strcmp(folder_now, folder_before) == 0);
        const nixlkv_param_t bad = {"UCX_NET_DEVICES", "nosuch0"};
        nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_DECODE);
        config.backend_params = &bad;
        config.num_backend_params = 1;
        expect_no_engine(&config, NIXL_ERR_BACKEND_FAILED, "nosuch0");
    }

    CHECK(recv_u64(child.fd) == 1);
    CHECK(kill(child.pid, SIGHUP) == 0);
    int status = 0;
    CHECK(waitpid(child.pid, &status, 0) == child.pid);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGHUP);
    return 0;
}
