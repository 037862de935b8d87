/* nixlkv_abort and nixlkv_release: bad inputs, both sides' end, and when a room may be forgotten. */
#include "api.h"

static pair_t pair;

static void arguments(void) {
    static const char not_utf8[] = {'x', (char)0x80, 0};
    CHECK_BAD_HANDLES(nixlkv_abort(engine, 1, NULL));
    CHECK_BAD_HANDLES(nixlkv_release(engine, 1));
    CHECK_SAYS(nixlkv_release(pair.prefill, 5), NIXL_ERR_ROOM_UNKNOWN, "room 5");
    CHECK_SAYS(nixlkv_release(pair.decode, UINT64_MAX), NIXL_ERR_ROOM_UNKNOWN, "room 18446744073709551615");
    CHECK_SAYS(nixlkv_abort(pair.decode, 5, NULL), NIXL_ERR_ROOM_UNKNOWN, "room 5");
    const int32_t page = 1;
    const nixlkv_recv_params_t params = recv_params(5, &pair.prefill_peer, 1, &page, 1);
    CHECK_OK(nixlkv_recv(pair.decode, &params));
    CHECK_SAYS(nixlkv_abort(pair.decode, 5, not_utf8), NIXL_ERR_INVALID_ARGUMENT, "reason");
    CHECK(poll_room(pair.decode, 5).error == NIXL_OK);
    CHECK_SAYS(nixlkv_release(pair.decode, 5), NIXL_ERR_ROOM_ACTIVE, "room 5 has not ended");
    /* A reason of any length; the other side sees its beginning at least. */
    char reason[5000];
    memset(reason, 'r', sizeof reason);
    memcpy(reason, "out of beds", 11);
    reason[sizeof reason - 1] = '\0';
    await_state(pair.prefill, 5, NIXLKV_ROOM_WAITING_FOR_INPUT);
    const nixlkv_chunk_t chunk = chunk_of(5, &page, 1, 0, 0);
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    CHECK_OK(nixlkv_abort(pair.decode, 5, reason));
    CHECK_OK(nixlkv_abort(pair.decode, 5, "the second reason"));
    expect_end(pair.decode, 5, NIXL_ERR_ABORTED, WAIT_MS);
    expect_end(pair.prefill, 5, NIXL_ERR_ABORTED, WAIT_MS);
    CHECK(strstr(poll_room(pair.decode, 5).error_text, reason) != NULL);
    CHECK(strstr(poll_room(pair.prefill, 5).error_text, "out of beds") != NULL);
    CHECK_OK(nixlkv_release(pair.decode, 5));
    CHECK_OK(nixlkv_release(pair.prefill, 5));
    CHECK_STATUS(nixlkv_release(pair.decode, 5), NIXL_ERR_ROOM_UNKNOWN);
    expect_transfer(&pair, 5, 1);
}

/* F7: a room that has ended is left as it is. */
static void f7_ends_are_final(void) {
    const int32_t page = 1;
    const nixlkv_recv_params_t params = recv_params(6, &pair.prefill_peer, 1, &page, 1);
    const nixlkv_chunk_t chunk = chunk_of(6, &page, 1, 0, NIXLKV_CHUNK_LAST | NIXLKV_CHUNK_NO_AUX);
    CHECK_OK(nixlkv_recv(pair.decode, &params));
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    expect_end(pair.decode, 6, NIXL_OK, WAIT_MS);
    expect_end(pair.prefill, 6, NIXL_OK, WAIT_MS);
    CHECK_OK(nixlkv_abort(pair.decode, 6, NULL));
    CHECK_OK(nixlkv_abort(pair.prefill, 6, NULL));
    expect_end(pair.decode, 6, NIXL_OK, 0);
    expect_end(pair.prefill, 6, NIXL_OK, 0);
    CHECK_SAYS(nixlkv_send_chunk(pair.prefill, &chunk), NIXL_ERR_ROOM_ENDED, "has succeeded");
    CHECK_OK(nixlkv_release(pair.decode, 6));
    CHECK_OK(nixlkv_release(pair.prefill, 6));
}

/* A prefill engine gives a room up that it has not opened: the grant that comes then is answered at once. */
static void abort_before_the_grant(void) {
    const int32_t page = 1;
    nixlkv_recv_params_t params = recv_params(7, &pair.prefill_peer, 1, &page, 1);
    CHECK_OK(nixlkv_abort(pair.prefill, 7, "no room for it"));
    expect_end(pair.prefill, 7, NIXL_ERR_ABORTED, 0);
    CHECK_OK(nixlkv_recv(pair.decode, &params));
    expect_end(pair.decode, 7, NIXL_ERR_ABORTED, WAIT_MS);
    CHECK(strstr(poll_room(pair.decode, 7).error_text, "no room for it") != NULL);
    CHECK_OK(nixlkv_release(pair.decode, 7));
    CHECK_OK(nixlkv_release(pair.prefill, 7));
    expect_transfer(&pair, 7, 1);
    /* Given up and forgotten before the grant comes: it is answered all the same, once. */
    CHECK_OK(nixlkv_abort(pair.prefill, 7, "no room for it again"));
    CHECK_OK(nixlkv_release(pair.prefill, 7));
    CHECK_OK(nixlkv_recv(pair.decode, &params));
    expect_end(pair.decode, 7, NIXL_ERR_ABORTED, WAIT_MS);
    CHECK(strstr(poll_room(pair.decode, 7).error_text, "no room for it again") != NULL);
    CHECK_OK(nixlkv_release(pair.decode, 7));
    expect_transfer(&pair, 7, 1);
    /* And the other way round: the receiver gives up before the first chunk. */
    params.room = 8;
    CHECK_OK(nixlkv_recv(pair.decode, &params));
    await_state(pair.prefill, 8, NIXLKV_ROOM_WAITING_FOR_INPUT);
    CHECK_OK(nixlkv_abort(pair.decode, 8, "changed its mind"));
    expect_end(pair.decode, 8, NIXL_ERR_ABORTED, WAIT_MS);
    await_state(pair.prefill, 8, NIXLKV_ROOM_FAILED);
    CHECK(poll_room(pair.prefill, 8).error == NIXL_ERR_ABORTED);
    const nixlkv_chunk_t chunk = chunk_of(8, &page, 1, 0, NIXLKV_CHUNK_LAST | NIXLKV_CHUNK_NO_AUX);
    CHECK_SAYS(nixlkv_send_chunk(pair.prefill, &chunk), NIXL_ERR_ROOM_ENDED, "changed its mind");
    expect_end(pair.prefill, 8, NIXL_ERR_ABORTED, WAIT_MS);
    CHECK_OK(nixlkv_release(pair.prefill, 8));
    CHECK_OK(nixlkv_release(pair.decode, 8));
    expect_transfer(&pair, 8, 1);
}

/* The receiver gives up, and forgets the room, before the sender has connected back. The sender hears of it as soon as it
 * has; but not of a life of the room that is followed by another. */
static void abort_before_the_sender_connects(void) {
    pair_t late = {.prefill = engine_create(NIXLKV_ROLE_PREFILL), .decode = engine_create(NIXLKV_ROLE_DECODE)};
    late.source = register_memory(late.prefill, WITH_ALL);
    late.destination = register_memory(late.decode, WITH_ALL);
    blob_t prefill = export_blob(late.prefill), decode = export_blob(late.decode);
    CHECK_OK(nixlkv_connect(late.decode, prefill.bytes, prefill.len, &late.prefill_peer));
    const int32_t page = 1;
    for (uint64_t room = 1; room <= 2; room++) {
        const nixlkv_recv_params_t params = recv_params(room, &late.prefill_peer, 1, &page, 1);
        const nixlkv_chunk_t chunk = chunk_of(room, &page, 1, 0, NIXLKV_CHUNK_LAST | NIXLKV_CHUNK_NO_AUX);
        CHECK_OK(nixlkv_send_chunk(late.prefill, &chunk));
        CHECK_OK(nixlkv_recv(late.decode, &params));
        CHECK_OK(nixlkv_abort(late.decode, room, "changed its mind early"));
        expect_end(late.decode, room, NIXL_ERR_ABORTED, 0);
        CHECK_OK(nixlkv_release(late.decode, room));
    }
    const nixlkv_recv_params_t again = recv_params(2, &late.prefill_peer, 1, &page, 1);
    CHECK_OK(nixlkv_recv(late.decode, &again));
    const uint64_t start = now_ms();
    CHECK_OK(nixlkv_connect(late.prefill, decode.bytes, decode.len, &late.decode_peer));
    expect_end(late.prefill, 1, NIXL_ERR_ABORTED, WAIT_MS);
    CHECK(strstr(poll_room(late.prefill, 1).error_text, "changed its mind early") != NULL);
    CHECK(now_ms() - start < WAIT_MS);
    expect_end(late.decode, 2, NIXL_OK, WAIT_MS);
    expect_end(late.prefill, 2, NIXL_OK, WAIT_MS);
    free(prefill.bytes);
    free(decode.bytes);
    expect_transfer(&late, 1000, 3);
    destroy_pair(&late);
}

/* A prefill engine's limit of rooms counts the rooms that it gave up, too. */
static void limit_of_rooms(void) {
    nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_PREFILL);
    config.max_rooms = 2;
    nixlkv_engine_t *engine = NULL;
    CHECK_OK(nixlkv_engine_create(&config, &engine));
    CHECK_OK(nixlkv_abort(engine, 1, NULL));
    CHECK_OK(nixlkv_abort(engine, 2, NULL));
    CHECK_OK(nixlkv_abort(engine, 2, NULL));
    CHECK_SAYS(nixlkv_abort(engine, 3, NULL), NIXL_ERR_TOO_MANY_ROOMS, "the limit is 2");
    CHECK_OK(nixlkv_release(engine, 1));
    CHECK_OK(nixlkv_abort(engine, 3, NULL));
    nixlkv_engine_destroy(engine);
}

/* Promise 4: what the sender has not confirmed is not quiesced, however long it takes; nothing of it can be reused. */
static void p4_not_quiesced_until_the_sender_says_so(void) {
    nixlkv_engine_config_t prefill = engine_config(NIXLKV_ROLE_PREFILL), decode = engine_config(NIXLKV_ROLE_DECODE);
    prefill.heartbeat_interval_ms = decode.heartbeat_interval_ms = 100;
    prefill.liveness_limit_ms = decode.liveness_limit_ms = 1500;
    pair_t deaf = make_pair_of(&prefill, &decode, WITH_ALL);
    expect_transfer(&deaf, 1, 3);
    const int32_t page = 2;
    nixlkv_recv_params_t params = recv_params(2, &deaf.prefill_peer, 1, &page, 1);
    CHECK_OK(nixlkv_recv(deaf.decode, &params));
    await_state(deaf.prefill, 2, NIXLKV_ROOM_WAITING_FOR_INPUT);
    /* From now on no control message arrives. */
    CHECK_OK(nixlkv_test_fault("drop_message", 0, UINT64_MAX));
    CHECK_OK(nixlkv_abort(deaf.decode, 2, NULL));
    CHECK_STATUS(nixlkv_wait(deaf.decode, &params.room, 1, NIXLKV_WAIT_QUIESCED, 100), NIXL_ERR_WAIT_TIMEOUT);
    CHECK_OK(nixlkv_wait(deaf.decode, &params.room, 1, 0, 0));
    nixlkv_room_status_t status = poll_room(deaf.decode, 2);
    CHECK(status.state == NIXLKV_ROOM_FAILED && status.quiesced == 0 && status.num_pending_senders == 1);
    CHECK_SAYS(nixlkv_release(deaf.decode, 2), NIXL_ERR_NOT_QUIESCED, "1 senders");
    params.room = 3;
    CHECK_SAYS(nixlkv_recv(deaf.decode, &params), NIXL_ERR_PAGE_IN_USE, "page 2");
    CHECK_SAYS(nixlkv_disconnect(deaf.decode, deaf.prefill_peer), NIXL_ERR_PEER_BUSY, "1 rooms");
    uint64_t id = 1;
    CHECK_SAYS(nixlkv_deregister(deaf.decode, &id, 1), NIXL_ERR_REGION_BUSY, "1 rooms");
    /* Both sides count each other as lost in time, and that alone frees nothing. */
    const int32_t other_page = 9;
    params.pages = &other_page;
    const uint64_t until = now_ms() + WAIT_MS;
    int32_t lost = NIXL_OK;
    while (lost != NIXL_ERR_PEER_LOST && now_ms() < until) {
        params.room++;
        params.num_pages = 0;
        lost = nixlkv_recv(deaf.decode, &params);
        sleep_ms(20);
    }
    CHECK(lost == NIXL_ERR_PEER_LOST);
    CHECK(strstr(nixlkv_last_error(), "silent") != NULL);
    CHECK(poll_room(deaf.decode, 2).error == NIXL_ERR_ABORTED && poll_room(deaf.decode, 2).quiesced == 0);
    for (uint64_t room = 4; room < params.room; room++) {
        status = poll_room(deaf.decode, room);
        CHECK(status.error == NIXL_ERR_PEER_LOST && status.quiesced == 0);
    }
    CHECK_SAYS(nixlkv_engine_shutdown(deaf.decode, 50), NIXL_ERR_DRAIN_TIMEOUT, "not quiesced");
    /* The messages come through again: the sender is heard, asked once more, and confirms. */
    CHECK_OK(nixlkv_test_fault("drop_message", 0, 0));
    CHECK_OK(nixlkv_engine_shutdown(deaf.decode, WAIT_MS));
    expect_end(deaf.decode, 2, NIXL_ERR_ABORTED, 0);
    for (uint64_t room = 4; room < params.room; room++) expect_end(deaf.decode, room, NIXL_ERR_PEER_LOST, 0);
    CHECK_OK(nixlkv_release(deaf.decode, 2));
    destroy_pair(&deaf);
}

int main(void) {
    pair = make_pair(WITH_ALL);
    arguments();
    f7_ends_are_final();
    abort_before_the_grant();
    abort_before_the_sender_connects();
    limit_of_rooms();
    p4_not_quiesced_until_the_sender_says_so();
    expect_transfer(&pair, 99, 3);
    destroy_pair(&pair);
    return 0;
}
