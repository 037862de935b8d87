/* nixlkv_poll and nixlkv_wait: bad inputs, struct sizes, what they show, and that they never wait too long. */
#include <pthread.h>

#include "api.h"

static pair_t pair;

static int32_t poll_sizes(void *status, void *room) { return nixlkv_poll(pair.prefill, *(uint64_t *)room, status); }

static void poll_arguments(void) {
    nixlkv_room_status_t status;
    uint64_t room = 1;
    CHECK_OK(nixlkv_room_status_init(&status, sizeof status));
    const nixlkv_room_status_t before = status;
    CHECK_BAD_HANDLES(nixlkv_poll(engine, room, &status));
    CHECK_SAYS(nixlkv_poll(pair.prefill, 1, &status), NIXL_ERR_ROOM_UNKNOWN, "room 1 ");
    CHECK_SAYS(nixlkv_poll(pair.prefill, UINT64_MAX, &status), NIXL_ERR_ROOM_UNKNOWN, "room 18446744073709551615");
    CHECK(memcmp(&status, &before, sizeof status) == 0);
    const int32_t page = 0;
    const nixlkv_chunk_t chunk = chunk_of(room, &page, 1, 0, 0);
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    /* Failed, so that the fields hold something: a text, too. */
    CHECK_OK(nixlkv_abort(pair.prefill, room, "why not"));
    try_write_sizes(sizeof status, poll_sizes, &room, "status");
    CHECK_OK(nixlkv_poll(pair.prefill, room, &status));
    CHECK(status.state == NIXLKV_ROOM_FAILED && status.error == NIXL_ERR_ABORTED && status.quiesced == 1);
    CHECK(strstr(status.error_text, "why not") != NULL);
    /* The text lives until this thread's next poll, whatever else is called. */
    const char *text = status.error_text;
    CHECK_OK(nixlkv_release(pair.prefill, room));
    CHECK_STATUS(nixlkv_release(pair.prefill, room), NIXL_ERR_ROOM_UNKNOWN);
    CHECK(strstr(text, "why not") != NULL);
}

static void wait_arguments(void) {
    const int32_t page = 0;
    uint64_t rooms[3] = {11, 12, 13}, space[2] = {11, 11};
    for (int i = 0; i < 3; i++) {
        const nixlkv_chunk_t chunk = chunk_of(rooms[i], &page, 1, 0, 0);
        CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    }
    CHECK_BAD_HANDLES(nixlkv_wait(engine, rooms, 3, 0, 1000));
    const uint32_t flags[] = {4, 8, 255, 0x80000000u, UINT32_MAX};
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++)
        CHECK_SAYS(nixlkv_wait(pair.prefill, rooms, 3, flags[i], UINT64_MAX), NIXL_ERR_INVALID_ARGUMENT, "flags");
    CHECK_SAYS(nixlkv_wait(pair.prefill, NULL, 1, 0, UINT64_MAX), NIXL_ERR_INVALID_ARGUMENT, "rooms is NULL");
    CHECK_SAYS(nixlkv_wait(pair.prefill, rooms, UINT64_MAX, 0, UINT64_MAX), NIXL_ERR_INVALID_ARGUMENT,
               "18446744073709551615 entries");
    CHECK_SAYS(nixlkv_wait(pair.prefill, rooms, UINT64_MAX / 8 + 2, 0, UINT64_MAX), NIXL_ERR_INVALID_ARGUMENT,
               "entries");
    CHECK_SAYS(nixlkv_wait(pair.prefill, (uint64_t *)(void *)((char *)space + 4), 1, 0, UINT64_MAX),
               NIXL_ERR_INVALID_ARGUMENT, "rooms");
    const uint64_t unknown[2] = {11, 99};
    CHECK_SAYS(nixlkv_wait(pair.prefill, unknown, 2, 0, UINT64_MAX), NIXL_ERR_ROOM_UNKNOWN, "room 99");
    /* No rooms: all of them have ended. */
    CHECK_OK(nixlkv_wait(pair.prefill, NULL, 0, 0, UINT64_MAX));
    CHECK_OK(nixlkv_wait(pair.prefill, rooms, 0, NIXLKV_WAIT_QUIESCED, UINT64_MAX));

    CHECK_SAYS(nixlkv_wait(pair.prefill, rooms, 3, 0, 0), NIXL_ERR_WAIT_TIMEOUT, "0 of 3 rooms");
    CHECK(nixlkv_status_retryable(NIXL_ERR_WAIT_TIMEOUT) == 1);
    const uint64_t start = now_ms();
    CHECK_STATUS(nixlkv_wait(pair.prefill, rooms, 3, NIXLKV_WAIT_ANY, 100), NIXL_ERR_WAIT_TIMEOUT);
    const uint64_t waited = now_ms() - start;
    CHECK(waited >= 99 && waited < 5000);
    CHECK_OK(nixlkv_abort(pair.prefill, 12, NULL));
    CHECK_OK(nixlkv_wait(pair.prefill, rooms, 3, NIXLKV_WAIT_ANY, UINT64_MAX));
    CHECK_OK(nixlkv_wait(pair.prefill, rooms, 3, NIXLKV_WAIT_ANY | NIXLKV_WAIT_QUIESCED, 0));
    CHECK_SAYS(nixlkv_wait(pair.prefill, rooms, 3, NIXLKV_WAIT_ALL, 10), NIXL_ERR_WAIT_TIMEOUT, "1 of 3 rooms");
    CHECK_OK(nixlkv_abort(pair.prefill, 11, NULL));
    CHECK_OK(nixlkv_abort(pair.prefill, 13, NULL));
    CHECK_OK(nixlkv_wait(pair.prefill, rooms, 3, NIXLKV_WAIT_ALL | NIXLKV_WAIT_QUIESCED, 0));
    for (int i = 0; i < 3; i++) CHECK_OK(nixlkv_release(pair.prefill, rooms[i]));
}

static void *abort_room(void *room) {
    sleep_ms(50);
    CHECK_OK(nixlkv_abort(pair.prefill, *(uint64_t *)room, NULL));
    return NULL;
}

static void *destroy_prefill(void *unused) {
    (void)unused;
    sleep_ms(50);
    nixlkv_engine_destroy(pair.prefill);
    return NULL;
}

/* A wait ends with the room, whoever ended it, and with the engine. */
static void wait_is_woken(void) {
    const int32_t page = 0;
    uint64_t room = 21;
    nixlkv_chunk_t chunk = chunk_of(room, &page, 1, 0, 0);
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, abort_room, &room) == 0);
    CHECK_OK(nixlkv_wait(pair.prefill, &room, 1, 0, UINT64_MAX));
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK_OK(nixlkv_release(pair.prefill, room));
    chunk.room = 22;
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    CHECK(pthread_create(&thread, NULL, destroy_prefill, NULL) == 0);
    /* The room has failed, or the engine is gone; it does not hang. */
    const int32_t status = nixlkv_wait(pair.prefill, &chunk.room, 1, 0, UINT64_MAX);
    CHECK(status == NIXL_OK || status == NIXL_ERR_INVALID_HANDLE || status == NIXL_ERR_SHUT_DOWN);
    CHECK(pthread_join(thread, NULL) == 0);
}

/* B13: a thousand rooms that are stuck cost a poll nothing. */
static void b13_poll_does_not_wait(void) {
    const int32_t page = 0;
    for (uint64_t room = 1000; room < 2000; room++) {
        const nixlkv_chunk_t chunk = chunk_of(room, &page, 1, 0, 0);
        CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    }
    const uint64_t start = now_ms();
    for (uint64_t i = 0; i < 20000; i++) CHECK(poll_room(pair.prefill, 1000 + i % 1000).num_pending_chunks == 1);
    CHECK(now_ms() - start < 20000); /* a millisecond each, on average, would be far too slow */
    for (uint64_t room = 1000; room < 2000; room++) {
        CHECK_OK(nixlkv_abort(pair.prefill, room, NULL));
        CHECK_OK(nixlkv_release(pair.prefill, room));
    }
}

/* D13: rooms whose numbers agree in their low bits, or differ in the highest only, run side by side. */
static void d13_all_64_bits_of_a_room_count(void) {
    const uint64_t base = 0x1122334455667788u;
    const uint64_t rooms[8] = {base,
                               base ^ (uint64_t)1 << 8,
                               base ^ (uint64_t)1 << 12,
                               base ^ (uint64_t)1 << 16,
                               base ^ (uint64_t)1 << 32,
                               base ^ (uint64_t)1 << 63,
                               0,
                               UINT64_MAX};
    poison(pair.destination, MEMORY);
    for (int32_t i = 0; i < 8; i++) {
        const nixlkv_recv_params_t params = recv_params(rooms[i], &pair.prefill_peer, 1, &i, 1);
        CHECK_OK(nixlkv_recv(pair.decode, &params));
        stamp_item(pair.source, PAGE, 15 - i, rooms[i], 0, 0);
    }
    for (int32_t i = 7; i >= 0; i--) {
        const int32_t page = 15 - i;
        const nixlkv_chunk_t chunk = chunk_of(rooms[i], &page, 1, 0, NIXLKV_CHUNK_LAST);
        CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    }
    CHECK_OK(nixlkv_wait(pair.decode, rooms, 8, 0, WAIT_MS));
    CHECK_OK(nixlkv_wait(pair.prefill, rooms, 8, 0, WAIT_MS));
    for (int32_t i = 0; i < 8; i++) {
        expect_end(pair.decode, rooms[i], NIXL_OK, 0);
        expect_end(pair.prefill, rooms[i], NIXL_OK, 0);
        CHECK(wrong_words(pair.destination, PAGE, i, rooms[i], 0, 0) == 0);
        CHECK_OK(nixlkv_release(pair.decode, rooms[i]));
        CHECK_OK(nixlkv_release(pair.prefill, rooms[i]));
    }
}

int main(void) {
    pair = make_pair(WITH_KV);
    poll_arguments();
    wait_arguments();
    b13_poll_does_not_wait();
    d13_all_64_bits_of_a_room_count();
    wait_is_woken();
    destroy_pair(&pair);
    return 0;
}
