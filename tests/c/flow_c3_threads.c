/* C3: one engine, eight threads. Three send rooms to one receiver and look at every word, two open rooms on both sides
 * and give them up at any moment, one polls, waits and reads counters, two connect and disconnect a second receiver and
 * use it. Nothing crashes, hangs or mixes up; what must succeed does, and the engine ends with nothing held. 10 s, or
 * NIXLKV_TEST_LONG seconds. */
/* timeout: 300 */
#include "test.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>

enum { PAGE = 4096, PAGES = 256, SENDERS = 3, ABORTERS = 2, MOST_PAGES = 32 };

static nixlkv_engine_t *prefill, *decode, *guest; /* guest: the receiver that comes and goes */
static char *source, *destination, *guest_memory;
static uint64_t decode_peer, prefill_peer;
static atomic_bool over;
static atomic_ullong num_sent, num_aborted, num_polled, num_connects, num_guest_rooms, num_refused;

/* A generator for each thread. */
static uint64_t next(uint64_t *state) { return *state = mix(*state); }

/* Pages of thread `who`, in a random order. */
static void own_pages(int32_t *pages, int32_t who, uint64_t seed) {
    shuffle(pages, MOST_PAGES, seed);
    for (int i = 0; i < MOST_PAGES; i++) pages[i] += who * MOST_PAGES;
}

static void release_both(uint64_t room) {
    CHECK_OK(nixlkv_release(decode, room));
    CHECK_OK(nixlkv_release(prefill, room));
}

/* Rooms that go through, each in 1 to 4 chunks, with its grant before or after the first. */
static void *send_rooms(void *argument) {
    const int32_t who = (int32_t)(intptr_t)argument;
    uint64_t random = 1 + (uint64_t)who, room = (uint64_t)who << 32;
    int32_t from[MOST_PAGES], to[MOST_PAGES];
    while (!atomic_load(&over)) {
        room++;
        const uint64_t total = 1 + next(&random) % MOST_PAGES, parts = 1 + next(&random) % 4;
        own_pages(from, who, next(&random));
        own_pages(to, who, next(&random));
        for (uint64_t i = 0; i < total; i++) stamp_item(source, PAGE, from[i], room, 0, i);
        poison(destination + (size_t)who * MOST_PAGES * PAGE, MOST_PAGES * PAGE);
        const nixlkv_recv_params_t params = recv_params(room, &prefill_peer, 1, to, total);
        const uint64_t grant_at = next(&random) % parts;
        for (uint64_t part = 0; part < parts; part++) {
            if (part == grant_at) CHECK_OK(nixlkv_recv(decode, &params));
            const uint64_t start = total * part / parts, end = total * (part + 1) / parts;
            const bool last = part + 1 == parts;
            if (start == end && !last) continue;
            const nixlkv_chunk_t chunk = chunk_of(room, from + start, end - start, start, last ? NIXLKV_CHUNK_LAST : 0);
            CHECK_OK(nixlkv_send_chunk(prefill, &chunk));
        }
        expect_end(decode, room, NIXL_OK, 60000);
        for (uint64_t i = 0; i < total; i++) CHECK(wrong_words(destination, PAGE, to[i], room, 0, i) == 0);
        for (uint64_t i = total; i < MOST_PAGES; i++) CHECK(unpoisoned_words(destination, PAGE, to[i]) == 0);
        expect_end(prefill, room, NIXL_OK, 60000);
        release_both(room);
        atomic_fetch_add(&num_sent, 1);
    }
    return NULL;
}

/* Rooms that either side gives up, before, while or after they move. */
static void *abort_rooms(void *argument) {
    const int32_t who = (int32_t)(intptr_t)argument;
    uint64_t random = 1 + (uint64_t)who, room = (uint64_t)who << 32;
    int32_t from[MOST_PAGES], to[MOST_PAGES];
    while (!atomic_load(&over)) {
        room++;
        own_pages(from, who, next(&random));
        own_pages(to, who, next(&random));
        const nixlkv_recv_params_t params = recv_params(room, &prefill_peer, 1, to, MOST_PAGES);
        const nixlkv_chunk_t chunk = chunk_of(room, from, MOST_PAGES / 2, 0, 0);
        const bool send_first = next(&random) % 2, by_prefill = next(&random) % 2;
        if (send_first) CHECK_OK(nixlkv_send_chunk(prefill, &chunk));
        CHECK_OK(nixlkv_recv(decode, &params));
        if (!send_first) CHECK_OK(nixlkv_send_chunk(prefill, &chunk));
        for (uint64_t pause = next(&random) % 3000; pause > 2000; pause--) sched_yield();
        CHECK_OK(nixlkv_abort(by_prefill ? prefill : decode, room, "given up"));
        if (next(&random) % 4 == 0) CHECK_OK(nixlkv_abort(by_prefill ? decode : prefill, room, "given up too"));
        expect_end(decode, room, NIXL_ERR_ABORTED, 60000);
        expect_end(prefill, room, NIXL_ERR_ABORTED, 60000);
        release_both(room);
        atomic_fetch_add(&num_aborted, 1);
    }
    return NULL;
}

/* Looks at everybody's rooms, known and unknown. */
static void *look(void *argument) {
    uint64_t random = (uint64_t)(intptr_t)argument;
    while (!atomic_load(&over)) {
        const uint64_t who = next(&random) % (SENDERS + ABORTERS + 2);
        const uint64_t room = (who << 32) + 1 + next(&random) % (2 + atomic_load(&num_sent));
        const nixlkv_engine_t *e = next(&random) % 2 ? prefill : decode;
        nixlkv_room_status_t status;
        CHECK_OK(nixlkv_room_status_init(&status, sizeof status));
        const int32_t polled = nixlkv_poll(e, room, &status);
        CHECK(polled == NIXL_OK || polled == NIXL_ERR_ROOM_UNKNOWN);
        if (polled == NIXL_OK && status.state == NIXLKV_ROOM_FAILED) CHECK(status.error != NIXL_OK);
        if (polled == NIXL_OK && status.error != NIXL_OK) CHECK(status.error_text[0] != '\0');
        const int32_t waited = nixlkv_wait(e, &room, 1, NIXLKV_WAIT_ALL, next(&random) % 3);
        CHECK(waited == NIXL_OK || waited == NIXL_ERR_ROOM_UNKNOWN || waited == NIXL_ERR_WAIT_TIMEOUT);
        nixlkv_stats_t stats;
        nixlkv_health_t health;
        CHECK_OK(nixlkv_stats_init(&stats, sizeof stats));
        CHECK_OK(nixlkv_health_init(&health, sizeof health));
        CHECK_OK(nixlkv_stats(e, &stats));
        CHECK_OK(nixlkv_health(e, &health));
        CHECK(health.num_peers_lost == 0 || e == prefill); /* the guest leaves */
        if (next(&random) % 64 == 0) free(export_blob(prefill).bytes);
        atomic_fetch_add(&num_polled, 1);
    }
    return NULL;
}

/* Connects the guest and disconnects it again; the other thread may be in the middle of using it. */
static void *come_and_go(void *argument) {
    uint64_t random = (uint64_t)(intptr_t)argument;
    const blob_t ours = export_blob(prefill), theirs = export_blob(guest);
    while (!atomic_load(&over)) {
        uint64_t at_prefill = 0, at_guest = 0;
        const int32_t here = nixlkv_connect(prefill, theirs.bytes, theirs.len, &at_prefill);
        const int32_t there = nixlkv_connect(guest, ours.bytes, ours.len, &at_guest);
        /* Busy: an earlier connection is still closing. */
        if (here != NIXL_OK) CHECK(here == NIXL_ERR_PEER_BUSY);
        if (there != NIXL_OK) CHECK(there == NIXL_ERR_PEER_BUSY);
        if (here == NIXL_OK && there == NIXL_OK) atomic_fetch_add(&num_connects, 1);
        sleep_ms((unsigned)(next(&random) % 20));
        if (here == NIXL_OK) {
            const int32_t left = nixlkv_disconnect(prefill, at_prefill);
            CHECK(left == NIXL_OK || left == NIXL_ERR_PEER_BUSY || left == NIXL_ERR_PEER_UNKNOWN);
        }
        if (there == NIXL_OK && next(&random) % 2) {
            const int32_t left = nixlkv_disconnect(guest, at_guest);
            CHECK(left == NIXL_OK || left == NIXL_ERR_PEER_BUSY || left == NIXL_ERR_PEER_UNKNOWN);
        }
    }
    free(ours.bytes);
    free(theirs.bytes);
    return NULL;
}

/* Rooms to the guest: they end, in whatever way; one that succeeds has every word. */
static void *use_the_guest(void *argument) {
    const int32_t who = (int32_t)(intptr_t)argument;
    uint64_t random = 1 + (uint64_t)who, room = (uint64_t)who << 32;
    int32_t pages[MOST_PAGES];
    const blob_t ours = export_blob(prefill), theirs = export_blob(guest);
    while (!atomic_load(&over)) {
        room++;
        uint64_t at_prefill = 0, at_guest = 0;
        nixlkv_connect(prefill, theirs.bytes, theirs.len, &at_prefill);
        if (nixlkv_connect(guest, ours.bytes, ours.len, &at_guest) != NIXL_OK) {
            sleep_ms(1);
            continue;
        }
        own_pages(pages, who, next(&random));
        for (uint64_t i = 0; i < MOST_PAGES; i++) stamp_item(source, PAGE, pages[i], room, 0, i);
        const nixlkv_recv_params_t params = recv_params(room, &at_guest, 1, pages, MOST_PAGES);
        const int32_t opened = nixlkv_recv(guest, &params);
        if (opened != NIXL_OK) {
            CHECK(opened == NIXL_ERR_PEER_UNKNOWN || opened == NIXL_ERR_PEER_LOST);
            atomic_fetch_add(&num_refused, 1);
            continue;
        }
        const nixlkv_chunk_t chunk = chunk_of(room, pages, MOST_PAGES, 0, NIXLKV_CHUNK_LAST);
        CHECK_OK(nixlkv_send_chunk(prefill, &chunk));
        CHECK_OK(nixlkv_wait(guest, &room, 1, NIXLKV_WAIT_ALL, 60000));
        const nixlkv_room_status_t status = poll_room(guest, room);
        if (status.state == NIXLKV_ROOM_SUCCESS) {
            for (uint64_t i = 0; i < MOST_PAGES; i++)
                CHECK(wrong_words(guest_memory, PAGE, pages[i], room, 0, i) == 0);
            atomic_fetch_add(&num_guest_rooms, 1);
        } else {
            CHECK(status.error == NIXL_ERR_PEER_LOST || status.error == NIXL_ERR_PEER_DISCONNECTED ||
                  status.error == NIXL_ERR_PEER_NOT_READY);
        }
        /* A sender that the grant never reached has heard of no end. */
        CHECK_OK(nixlkv_abort(prefill, room, NULL));
        CHECK_OK(nixlkv_wait(prefill, &room, 1, NIXLKV_WAIT_QUIESCED, 60000));
        CHECK_OK(nixlkv_wait(guest, &room, 1, NIXLKV_WAIT_QUIESCED, 60000));
        CHECK_OK(nixlkv_release(prefill, room));
        CHECK_OK(nixlkv_release(guest, room));
    }
    free(ours.bytes);
    free(theirs.bytes);
    return NULL;
}

int main(void) {
    nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_PREFILL);
    config.num_workers = 2;
    config.connect_timeout_ms = 2000;
    prefill = engine_with_pages(&config, PAGE, PAGES, (void **)&source);
    config.role = NIXLKV_ROLE_DECODE;
    decode = engine_with_pages(&config, PAGE, PAGES, (void **)&destination);
    guest = engine_with_pages(&config, PAGE, PAGES, (void **)&guest_memory);
    connect_both(prefill, decode, &decode_peer, &prefill_peer);

    void *(*const bodies[8])(void *) = {send_rooms, send_rooms,  send_rooms,    abort_rooms,
                                        abort_rooms, look, come_and_go, use_the_guest};
    pthread_t threads[8];
    for (intptr_t i = 0; i < 8; i++) CHECK(pthread_create(&threads[i], NULL, bodies[i], (void *)i) == 0);
    sleep_ms((unsigned)(1000 * count_from("NIXLKV_TEST_LONG", 10)));
    atomic_store(&over, true);
    for (int i = 0; i < 8; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    printf("%llu rooms sent, %llu given up, %llu looks, %llu connects, %llu rooms to the guest, %llu refused\n",
           atomic_load(&num_sent), atomic_load(&num_aborted), atomic_load(&num_polled), atomic_load(&num_connects),
           atomic_load(&num_guest_rooms), atomic_load(&num_refused));
    CHECK(atomic_load(&num_sent) > 100 && atomic_load(&num_aborted) > 100 && atomic_load(&num_polled) > 100);
    CHECK(atomic_load(&num_connects) > 20 && atomic_load(&num_guest_rooms) > 0);

    nixlkv_engine_t *const engines[3] = {prefill, decode, guest};
    for (int i = 0; i < 3; i++) {
        nixlkv_stats_t stats;
        CHECK_OK(nixlkv_stats_init(&stats, sizeof stats));
        CHECK_OK(nixlkv_stats(engines[i], &stats));
        CHECK(stats.rooms_active == 0 && stats.rooms_unquiesced == 0 && stats.chunks_pending == 0);
        CHECK(stats.transfers_in_flight == 0 && stats.messages_malformed == 0);
    }
    for (int i = 0; i < 3; i++) CHECK_OK(nixlkv_engine_shutdown(engines[i], 10000));
    for (int i = 0; i < 3; i++) nixlkv_engine_destroy(engines[i]);
    return 0;
}
