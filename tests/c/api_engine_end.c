/* nixlkv_engine_shutdown and _destroy: handles, order, what goes on working, parent before child. */
#include "api.h"

static void handles(void) {
    CHECK_BAD_HANDLES(nixlkv_engine_shutdown(engine, 0));
    for (int i = 0; i < NUM_BAD_HANDLES; i++) nixlkv_engine_destroy(bad_handle(i));
    nixlkv_engine_t *engine = engine_create(NIXLKV_ROLE_BOTH), *other = engine_create(NIXLKV_ROLE_BOTH);
    CHECK(engine != other);
    nixlkv_engine_destroy(engine);
    nixlkv_engine_destroy(engine);
    CHECK_STATUS(nixlkv_engine_shutdown(engine, 0), NIXL_ERR_INVALID_HANDLE);
    /* A handle is not given out again. */
    for (int i = 0; i < 8; i++) {
        nixlkv_engine_t *next = engine_create(NIXLKV_ROLE_BOTH);
        CHECK(next != engine && next != other);
        nixlkv_engine_destroy(next);
    }
    CHECK_OK(nixlkv_engine_shutdown(other, 0));
    nixlkv_engine_destroy(other);
}

static void shutdown_refuses_new_work_and_lets_the_rest_go_on(void) {
    pair_t pair = make_pair(WITH_ALL);
    expect_transfer(&pair, 1, 3);
    const int32_t pages[2] = {4, 5};
    nixlkv_recv_params_t params = recv_params(2, &pair.prefill_peer, 1, pages, 2);
    CHECK_OK(nixlkv_recv(pair.decode, &params));
    await_state(pair.prefill, 2, NIXLKV_ROOM_WAITING_FOR_INPUT);
    nixlkv_chunk_t chunk = chunk_of(2, pages, 1, 0, 0);
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));

    CHECK_OK(nixlkv_engine_shutdown(pair.prefill, WAIT_MS));
    CHECK_OK(nixlkv_engine_shutdown(pair.prefill, 0));
    /* Both sides of the open room have ended, and know why. */
    expect_end(pair.prefill, 2, NIXL_ERR_PEER_DISCONNECTED, WAIT_MS);
    expect_end(pair.decode, 2, NIXL_ERR_PEER_DISCONNECTED, WAIT_MS);
    CHECK(strstr(poll_room(pair.decode, 2).error_text, "shut down") != NULL);

    uint64_t id = 0, len = 99;
    nixlkv_region_t r = region(NIXLKV_REGION_KV, pair.source, PAGE, PAGE);
    char byte;
    chunk.room = 3;
    CHECK_STATUS(nixlkv_send_chunk(pair.prefill, &chunk), NIXL_ERR_SHUT_DOWN);
    CHECK_STATUS(nixlkv_register(pair.prefill, &r, 1, &id), NIXL_ERR_SHUT_DOWN);
    id = 1;
    CHECK_STATUS(nixlkv_deregister(pair.prefill, &id, 1), NIXL_ERR_SHUT_DOWN);
    CHECK_STATUS(nixlkv_export(pair.prefill, NULL, 0, &len), NIXL_ERR_SHUT_DOWN);
    CHECK_STATUS(nixlkv_connect(pair.prefill, &byte, 0, &len), NIXL_ERR_SHUT_DOWN);
    CHECK_STATUS(nixlkv_abort(pair.prefill, 2, NULL), NIXL_ERR_SHUT_DOWN);
    CHECK(id == 1 && len == 99);
    CHECK(stats_of(pair.prefill).rooms_failed == 1);
    CHECK_OK(nixlkv_release(pair.prefill, 2));
    CHECK_STATUS(nixlkv_release(pair.prefill, 2), NIXL_ERR_ROOM_UNKNOWN);
    CHECK_OK(nixlkv_release(pair.decode, 2));

    CHECK_OK(nixlkv_engine_shutdown(pair.decode, WAIT_MS));
    CHECK_STATUS(nixlkv_recv(pair.decode, &params), NIXL_ERR_SHUT_DOWN);
    destroy_pair(&pair);
}

/* Destroyed with rooms open and memory registered: the other side learns of it, and works on with a third. */
static void c10_destroy_before_anything_else(void) {
    pair_t pair = make_pair(WITH_KV);
    const int32_t page = 2;
    nixlkv_recv_params_t params = recv_params(9, &pair.prefill_peer, 1, &page, 1);
    CHECK_OK(nixlkv_recv(pair.decode, &params));
    await_state(pair.prefill, 9, NIXLKV_ROOM_WAITING_FOR_INPUT);
    nixlkv_engine_destroy(pair.decode);
    const nixlkv_chunk_t chunk = chunk_of(9, &page, 1, 0, NIXLKV_CHUNK_LAST);
    const int32_t sent = nixlkv_send_chunk(pair.prefill, &chunk);
    /* The room had not been opened here: the receiver's goodbye leaves either nothing, or a failed room. */
    CHECK(sent == NIXL_OK || sent == NIXL_ERR_ROOM_ENDED);
    CHECK_OK(nixlkv_abort(pair.prefill, 9, NULL));
    CHECK_OK(nixlkv_wait(pair.prefill, &chunk.room, 1, NIXLKV_WAIT_QUIESCED, WAIT_MS));
    CHECK_OK(nixlkv_release(pair.prefill, 9));

    nixlkv_engine_t *third = engine_create(NIXLKV_ROLE_DECODE);
    char *memory = register_memory(third, WITH_KV);
    uint64_t third_peer = 0, prefill_peer = 0;
    connect_both(pair.prefill, third, &third_peer, &prefill_peer);
    params.senders = &prefill_peer;
    CHECK_OK(nixlkv_recv(third, &params));
    stamp_item(pair.source, PAGE, page, 9, 0, 0);
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    expect_end(third, 9, NIXL_OK, WAIT_MS);
    expect_end(pair.prefill, 9, NIXL_OK, WAIT_MS);
    CHECK(wrong_words(memory, PAGE, page, 9, 0, 0) == 0);
    nixlkv_engine_destroy(third);
    nixlkv_engine_destroy(pair.prefill);
    munmap(memory, MEMORY);
    munmap(pair.source, MEMORY);
    munmap(pair.destination, MEMORY);
}

int main(void) {
    handles();
    shutdown_refuses_new_work_and_lets_the_rest_go_on();
    c10_destroy_before_anything_else();
    return 0;
}
