/* I16: in the child of a fork every call is refused, nothing hangs and nothing of the parent is harmed; helper
 * programs that a child starts work. */
#include "api.h"

/* What a child finds; gives 0 when all is as promised. */
static int child_calls(pair_t *pair, int way) {
    nixlkv_engine_t *engine = pair->prefill, *fresh = NULL;
    const nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_PREFILL);
    nixlkv_room_status_t status;
    nixlkv_nixl_info_t info;
    nixlkv_stats_t stats;
    const int32_t page = 1;
    uint64_t number = 1;
    CHECK_OK(nixlkv_room_status_init(&status, sizeof status));
    CHECK_OK(nixlkv_nixl_info_init(&info, sizeof info));
    CHECK_OK(nixlkv_stats_init(&stats, sizeof stats));
    nixlkv_region_t r = region(NIXLKV_REGION_KV, pair->source, PAGE, PAGE);
    const nixlkv_recv_params_t params = recv_params(50, &pair->prefill_peer, 1, &page, 1);
    const nixlkv_chunk_t chunk = chunk_of(51, &page, 1, 0, 0);
    CHECK_SAYS(nixlkv_poll(engine, 1, &status), NIXL_ERR_FORKED, "forked");
    CHECK_STATUS(nixlkv_engine_create(&config, &fresh), NIXL_ERR_FORKED);
    CHECK_STATUS(nixlkv_engine_shutdown(engine, UINT64_MAX), NIXL_ERR_FORKED);
    CHECK_STATUS(nixlkv_nixl_info(engine, &info), NIXL_ERR_FORKED);
    CHECK_STATUS(nixlkv_stats(engine, &stats), NIXL_ERR_FORKED);
    CHECK_STATUS(nixlkv_register(engine, &r, 1, &number), NIXL_ERR_FORKED);
    CHECK_STATUS(nixlkv_deregister(engine, &number, 1), NIXL_ERR_FORKED);
    CHECK_STATUS(nixlkv_export(engine, NULL, 0, &number), NIXL_ERR_FORKED);
    CHECK_STATUS(nixlkv_connect(engine, &number, 8, &number), NIXL_ERR_FORKED);
    CHECK_STATUS(nixlkv_disconnect(engine, pair->decode_peer), NIXL_ERR_FORKED);
    CHECK_STATUS(nixlkv_recv(pair->decode, &params), NIXL_ERR_FORKED);
    CHECK_STATUS(nixlkv_send_chunk(engine, &chunk), NIXL_ERR_FORKED);
    CHECK_STATUS(nixlkv_wait(engine, &number, 1, 0, UINT64_MAX), NIXL_ERR_FORKED);
    CHECK_STATUS(nixlkv_abort(engine, 1, NULL), NIXL_ERR_FORKED);
    CHECK_STATUS(nixlkv_release(engine, 1), NIXL_ERR_FORKED);
    CHECK_STATUS(nixlkv_poll(NULL, 1, &status), NIXL_ERR_FORKED);
    nixlkv_engine_destroy(engine);
    nixlkv_engine_destroy(pair->decode);
    CHECK(fresh == NULL && number == 1);
    CHECK(strcmp(nixlkv_status_name(NIXL_ERR_FORKED), "NIXL_ERR_FORKED") == 0);
    if (way == 0) _exit(0);
    if (way == 1) {
        execlp("true", "true", (char *)NULL);
        _exit(1);
    }
    return 0; /* with the exit handlers */
}

int main(void) {
    pair_t pair = make_pair(WITH_ALL);
    expect_transfer(&pair, 1, 3);
    const int32_t pages[2] = {4, 5};
    const nixlkv_recv_params_t params = recv_params(2, &pair.prefill_peer, 1, pages, 2);
    CHECK_OK(nixlkv_recv(pair.decode, &params));
    nixlkv_chunk_t chunk = chunk_of(2, pages, 1, 0, 0);
    stamp_item(pair.source, PAGE, 4, 2, 0, 0);
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    for (int i = 0; i < 20; i++) {
        fflush(NULL);
        const pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) exit(child_calls(&pair, i % 3));
        int status = 0;
        const uint64_t until = now_ms() + 20000;
        while (waitpid(pid, &status, WNOHANG) == 0) {
            if (now_ms() > until) {
                kill(pid, SIGKILL);
                FAIL("child %d hangs", i);
            }
            sleep_ms(1);
        }
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) FAIL("child %d ended with wait status %#x", i, status);
    }
    /* The room that was open all the while goes on. */
    chunk = chunk_of(2, pages + 1, 1, 1, NIXLKV_CHUNK_LAST | NIXLKV_CHUNK_NO_AUX);
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    expect_end(pair.decode, 2, NIXL_OK, WAIT_MS);
    expect_end(pair.prefill, 2, NIXL_OK, WAIT_MS);
    CHECK(wrong_words(pair.destination, PAGE, 4, 2, 0, 0) == 0);
    CHECK(system("true") == 0);
    expect_transfer(&pair, 3, 3);
    destroy_pair(&pair);
    return 0;
}
