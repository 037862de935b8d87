/* How rooms end when something goes wrong: each cause has its code, reaches the other side with its text, and the two
 * engines still work together afterwards. */
#include "api.h"

static const int32_t pages[4] = {1, 2, 3, 4};

static void expect_failed(const nixlkv_engine_t *engine, uint64_t room, int32_t error, const char *say) {
    expect_end(engine, room, error, WAIT_MS);
    const nixlkv_room_status_t status = poll_room(engine, room);
    if (strstr(status.error_text, say) == NULL) FAIL("\"%s\" does not say \"%s\"", status.error_text, say);
}

static void release_both(pair_t *pair, uint64_t room) {
    CHECK_OK(nixlkv_release(pair->decode, room));
    CHECK_OK(nixlkv_release(pair->prefill, room));
}

/* B2, J2: NIXL refuses a post. Both sides fail with the first cause, which names the chunk. */
static void b2_a_post_that_fails(pair_t *pair) {
    const nixlkv_stats_t sender = stats_of(pair->prefill), receiver = stats_of(pair->decode);
    const nixlkv_recv_params_t params = recv_params(1, &pair->prefill_peer, 1, pages, 4);
    CHECK_OK(nixlkv_recv(pair->decode, &params));
    await_state(pair->prefill, 1, NIXLKV_ROOM_WAITING_FOR_INPUT);
    CHECK_OK(nixlkv_test_fault("post", 2, 1));
    for (uint64_t i = 0; i < 4; i++) {
        const nixlkv_chunk_t chunk =
            chunk_of(1, &pages[i], 1, i, i == 3 ? NIXLKV_CHUNK_LAST | NIXLKV_CHUNK_NO_AUX : 0);
        const int32_t sent = nixlkv_send_chunk(pair->prefill, &chunk);
        CHECK(sent == NIXL_OK || sent == NIXL_ERR_ROOM_ENDED);
    }
    expect_failed(pair->prefill, 1, NIXL_ERR_XFER_FAILED, "chunk 2");
    expect_failed(pair->decode, 1, NIXL_ERR_XFER_FAILED, "chunk 2");
    CHECK(nixlkv_status_retryable(NIXL_ERR_XFER_FAILED) == 1);
    /* J1: counted once on each side. */
    CHECK(stats_of(pair->prefill).rooms_failed == sender.rooms_failed + 1);
    CHECK(stats_of(pair->decode).rooms_failed == receiver.rooms_failed + 1);
    CHECK(stats_of(pair->prefill).transfers_failed == sender.transfers_failed + 1);
    CHECK(stats_of(pair->prefill).transfers_in_flight == 0 && stats_of(pair->prefill).chunks_pending == 0);
    release_both(pair, 1);
}

/* B7: a fault inside the library costs one room, not the thread. */
static void b7_a_panic_costs_one_room(pair_t *pair) {
    CHECK_OK(nixlkv_test_fault("plan_panics", 1, 1));
    int failed = 0;
    for (uint64_t room = 10; room < 14; room++) {
        const nixlkv_recv_params_t params = recv_params(room, &pair->prefill_peer, 1, &pages[room - 10], 1);
        const nixlkv_chunk_t chunk =
            chunk_of(room, &pages[room - 10], 1, 0, NIXLKV_CHUNK_LAST | NIXLKV_CHUNK_NO_AUX);
        CHECK_OK(nixlkv_recv(pair->decode, &params));
        CHECK_OK(nixlkv_send_chunk(pair->prefill, &chunk));
    }
    for (uint64_t room = 10; room < 14; room++) {
        CHECK_OK(nixlkv_wait(pair->prefill, &room, 1, NIXLKV_WAIT_QUIESCED, WAIT_MS));
        if (poll_room(pair->prefill, room).error == NIXL_OK) {
            expect_end(pair->decode, room, NIXL_OK, WAIT_MS);
        } else {
            failed++;
            expect_failed(pair->prefill, room, NIXL_ERR_INTERNAL, "panicked");
            expect_failed(pair->decode, room, NIXL_ERR_INTERNAL, "panicked");
        }
        release_both(pair, room);
    }
    CHECK(failed == 1);
}

/* The receiver is granted, and nothing comes; the sender has chunks, and no grant comes. */
static void time_limits(void) {
    nixlkv_engine_config_t prefill = engine_config(NIXLKV_ROLE_PREFILL), decode = engine_config(NIXLKV_ROLE_DECODE);
    prefill.grant_timeout_ms = prefill.room_timeout_ms = decode.connect_timeout_ms = 2000;
    pair_t pair = make_pair_of(&prefill, &decode, WITH_ALL);
    expect_transfer(&pair, 1, 3);
    nixlkv_chunk_t chunk = chunk_of(2, pages, 1, 0, 0);
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    expect_failed(pair.prefill, 2, NIXL_ERR_GRANT_TIMEOUT, "2000 ms");
    CHECK_SAYS(nixlkv_send_chunk(pair.prefill, &chunk), NIXL_ERR_ROOM_ENDED, "NIXL_ERR_GRANT_TIMEOUT");
    CHECK_OK(nixlkv_release(pair.prefill, 2));

    /* The room's own limit goes before the engine's; the sender learns of it. */
    nixlkv_recv_params_t params = recv_params(3, &pair.prefill_peer, 1, pages, 4);
    params.timeout_ms = 150;
    CHECK_OK(nixlkv_recv(pair.decode, &params));
    expect_failed(pair.decode, 3, NIXL_ERR_ROOM_TIMEOUT, "nothing landed");
    CHECK_OK(nixlkv_release(pair.decode, 3));

    /* The sender's limit: the first of two chunks lands, the second never comes. The receiver hears why. */
    params.room = 4;
    params.timeout_ms = 0;
    CHECK_OK(nixlkv_recv(pair.decode, &params));
    chunk.room = 4;
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    expect_failed(pair.prefill, 4, NIXL_ERR_ROOM_TIMEOUT, "1 of 1 chunks landed");
    expect_failed(pair.decode, 4, NIXL_ERR_ROOM_TIMEOUT, "1 of 1 chunks landed");
    CHECK(poll_room(pair.decode, 4).num_pages == 1);
    release_both(&pair, 4);

    /* A sender that never connects back. */
    nixlkv_engine_t *lonely = engine_create(NIXLKV_ROLE_PREFILL);
    char *memory = register_memory(lonely, WITH_ALL);
    blob_t blob = export_blob(lonely);
    uint64_t peer = 0;
    CHECK_OK(nixlkv_connect(pair.decode, blob.bytes, blob.len, &peer));
    params.room = 5;
    params.senders = &peer;
    CHECK_OK(nixlkv_recv(pair.decode, &params));
    CHECK(poll_room(pair.decode, 5).state == NIXLKV_ROOM_BOOTSTRAPPING);
    expect_failed(pair.decode, 5, NIXL_ERR_PEER_NOT_READY, "has not connected back");
    CHECK_OK(nixlkv_release(pair.decode, 5));
    nixlkv_engine_destroy(lonely);
    free(blob.bytes);
    munmap(memory, MEMORY);
    expect_transfer(&pair, 6, 3);
    destroy_pair(&pair);
}

/* A peer that has gone silent: both sides fail the room, and the others' go on. */
static void e5_silence(void) {
    nixlkv_engine_config_t prefill = engine_config(NIXLKV_ROLE_PREFILL), decode = engine_config(NIXLKV_ROLE_DECODE);
    prefill.heartbeat_interval_ms = decode.heartbeat_interval_ms = 100;
    prefill.liveness_limit_ms = decode.liveness_limit_ms = 1500;
    pair_t pair = make_pair_of(&prefill, &decode, WITH_ALL);
    expect_transfer(&pair, 1, 3);
    const nixlkv_recv_params_t params = recv_params(2, &pair.prefill_peer, 1, pages, 4);
    const nixlkv_chunk_t chunk = chunk_of(2, pages, 2, 0, 0);
    CHECK_OK(nixlkv_recv(pair.decode, &params));
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    const uint64_t until = now_ms() + WAIT_MS;
    while (poll_room(pair.decode, 2).num_pages != 2 && now_ms() < until) sleep_ms(1);
    CHECK_OK(nixlkv_test_fault("drop_message", 0, UINT64_MAX));
    CHECK_OK(nixlkv_wait(pair.decode, &params.room, 1, 0, WAIT_MS));
    CHECK_OK(nixlkv_wait(pair.prefill, &params.room, 1, 0, WAIT_MS));
    CHECK(poll_room(pair.decode, 2).error == NIXL_ERR_PEER_LOST);
    CHECK(strstr(poll_room(pair.decode, 2).error_text, "silent") != NULL);
    CHECK(poll_room(pair.decode, 2).quiesced == 0);
    CHECK_STATUS(nixlkv_release(pair.decode, 2), NIXL_ERR_NOT_QUIESCED);
    CHECK_OK(nixlkv_test_fault("drop_message", 0, 0));
    expect_failed(pair.decode, 2, NIXL_ERR_PEER_LOST, "silent");
    expect_failed(pair.prefill, 2, NIXL_ERR_PEER_LOST, "silent");
    release_both(&pair, 2);
    expect_transfer(&pair, 3, 3);
    destroy_pair(&pair);
}

/* The peer leaves in good order while a room waits for it. */
static void the_peer_leaves(void) {
    pair_t pair = make_pair(WITH_ALL);
    const nixlkv_recv_params_t params = recv_params(2, &pair.prefill_peer, 1, pages, 4);
    CHECK_OK(nixlkv_recv(pair.decode, &params));
    const nixlkv_chunk_t chunk = chunk_of(2, pages, 2, 0, 0);
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    nixlkv_engine_destroy(pair.prefill);
    expect_failed(pair.decode, 2, NIXL_ERR_PEER_DISCONNECTED, "");
    CHECK_OK(nixlkv_release(pair.decode, 2));
    destroy_pair(&pair);
}

/* Two receivers of one room where only one was announced; and two that disagree. */
static void receivers_that_contradict(void) {
    pair_t pair = make_pair(WITH_KV);
    nixlkv_engine_t *second = engine_create(NIXLKV_ROLE_DECODE);
    char *memory = register_memory(second, WITH_KV);
    uint64_t second_peer = 0, prefill_peer = 0;
    connect_both(pair.prefill, second, &second_peer, &prefill_peer);
    nixlkv_recv_params_t first = recv_params(1, &pair.prefill_peer, 1, pages, 4);
    nixlkv_recv_params_t other = recv_params(1, &prefill_peer, 1, pages, 4);
    CHECK_OK(nixlkv_recv(pair.decode, &first));
    await_state(pair.prefill, 1, NIXLKV_ROOM_WAITING_FOR_INPUT);
    nixlkv_chunk_t chunk = chunk_of(1, pages, 1, 0, 0);
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    CHECK_OK(nixlkv_recv(second, &other));
    expect_failed(second, 1, NIXL_ERR_PROTOCOL, "more receivers than the 1 that were announced");
    CHECK_OK(nixlkv_release(second, 1));
    /* The room of the first goes on. */
    chunk = chunk_of(1, pages + 1, 3, 1, NIXLKV_CHUNK_LAST);
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    expect_end(pair.decode, 1, NIXL_OK, WAIT_MS);
    expect_end(pair.prefill, 1, NIXL_OK, WAIT_MS);
    release_both(&pair, 1);

    first.room = other.room = 2;
    first.num_receivers = other.num_receivers = 2;
    other.num_pages = 3;
    chunk = chunk_of(2, pages, 4, 0, NIXLKV_CHUNK_LAST);
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    CHECK_OK(nixlkv_recv(pair.decode, &first));
    CHECK_OK(nixlkv_recv(second, &other));
    expect_failed(pair.prefill, 2, NIXL_ERR_PAGE_COUNT, "pages");
    expect_failed(pair.decode, 2, NIXL_ERR_PAGE_COUNT, "pages");
    expect_failed(second, 2, NIXL_ERR_PAGE_COUNT, "pages");
    release_both(&pair, 2);
    CHECK_OK(nixlkv_release(second, 2));

    /* And two that agree: both get the pages. */
    first.room = other.room = 3;
    other.num_pages = 4;
    chunk.room = 3;
    for (uint64_t i = 0; i < 4; i++) stamp_item(pair.source, PAGE, pages[i], 3, 0, i);
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    CHECK_OK(nixlkv_recv(pair.decode, &first));
    CHECK_OK(nixlkv_recv(second, &other));
    expect_end(pair.decode, 3, NIXL_OK, WAIT_MS);
    expect_end(second, 3, NIXL_OK, WAIT_MS);
    expect_end(pair.prefill, 3, NIXL_OK, WAIT_MS);
    for (uint64_t i = 0; i < 4; i++) {
        CHECK(wrong_words(pair.destination, PAGE, pages[i], 3, 0, i) == 0);
        CHECK(wrong_words(memory, PAGE, pages[i], 3, 0, i) == 0);
    }
    nixlkv_engine_destroy(second);
    munmap(memory, MEMORY);
    destroy_pair(&pair);
}

int main(void) {
    pair_t pair = make_pair(WITH_ALL);
    b2_a_post_that_fails(&pair);
    expect_transfer(&pair, 2, 3);
    b7_a_panic_costs_one_room(&pair);
    expect_transfer(&pair, 3, 3);
    destroy_pair(&pair);
    time_limits();
    e5_silence();
    the_peer_leaves();
    receivers_that_contradict();
    return 0;
}
