/* B8: what comes before the other side has opened the room waits for it, within bounds of count and time. Chunks for
 * 200 rooms that decode opens half a second later arrive whole. Of 10,000 grants for rooms that prefill never opens, as
 * many as the room limit are kept and the others answered at once; the kept ones are answered when their time is over.
 * Of chunks that are never granted, as many as the queue holds are kept. Memory stays bounded throughout. */
/* timeout: 120 */
#include "test.h"

enum {
    PAGE = 1024,
    PAGES = 12000,
    EARLY = 200,
    GRANTS = 10000,
    LIMIT = 4000,       /* rooms, and so parked grants */
    DEPTH = 3000,       /* chunks */
    EXPIRE_MS = 5000,   /* of prefill: how long a grant waits for its first chunk, and a chunk for its grant */
    MAX_GROWTH_KIB = 16 << 10
};

static nixlkv_health_t health_of(const nixlkv_engine_t *e) {
    nixlkv_health_t health;
    CHECK_OK(nixlkv_health_init(&health, sizeof health));
    CHECK_OK(nixlkv_health(e, &health));
    return health;
}

static nixlkv_stats_t stats_of(const nixlkv_engine_t *e) {
    nixlkv_stats_t stats;
    CHECK_OK(nixlkv_stats_init(&stats, sizeof stats));
    CHECK_OK(nixlkv_stats(e, &stats));
    return stats;
}

/* Two pages of its own for each room, on both sides. */
static void pages_of(uint64_t room, int32_t *pages) {
    pages[0] = (int32_t)(room % (PAGES / 2)) * 2;
    pages[1] = pages[0] + 1;
}

static int32_t open_room(nixlkv_engine_t *e, uint64_t peer, uint64_t room) {
    int32_t pages[2];
    pages_of(room, pages);
    const nixlkv_recv_params_t params = recv_params(room, &peer, 1, pages, 2);
    return nixlkv_recv(e, &params);
}

/* The room's pages one by one, so that most rooms wait with two chunks. */
static int32_t send_page(nixlkv_engine_t *e, void *memory, uint64_t room, uint64_t which) {
    int32_t pages[2];
    pages_of(room, pages);
    stamp_item(memory, PAGE, pages[which], room, 0, which);
    const nixlkv_chunk_t chunk = chunk_of(room, &pages[which], 1, which, which == 1 ? NIXLKV_CHUNK_LAST : 0);
    return nixlkv_send_chunk(e, &chunk);
}

static void expect_pages(const void *memory, uint64_t room) {
    int32_t pages[2];
    pages_of(room, pages);
    for (uint64_t i = 0; i < 2; i++) CHECK(wrong_words(memory, PAGE, pages[i], room, 0, i) == 0);
}

static int receiver(int fd) {
    nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_DECODE);
    void *memory;
    nixlkv_engine_t *e = engine_with_pages(&config, PAGE, PAGES, &memory);
    const uint64_t peer = exchange_and_connect(e, fd);

    CHECK(recv_u64(fd) == EARLY);
    sleep_ms(500);
    for (uint64_t room = 0; room < EARLY; room++) CHECK_OK(open_room(e, peer, room));
    for (uint64_t room = 0; room < EARLY; room++) {
        expect_end(e, room, NIXL_OK, 20000);
        expect_pages(memory, room);
        CHECK(poll_room(e, room).num_chunks == 2);
        CHECK_OK(nixlkv_release(e, room));
    }
    send_u64(fd, EARLY);

    /* Grants of no page at all: it is their number that counts. */
    CHECK(recv_u64(fd) == GRANTS);
    const uint64_t first = 100000;
    for (uint64_t i = 0; i < GRANTS; i++) {
        const nixlkv_recv_params_t params = recv_params(first + i, &peer, 1, NULL, 0);
        CHECK_OK(nixlkv_recv(e, &params));
    }
    uint64_t refused = 0;
    for (const uint64_t start = now_ms(); refused < GRANTS - LIMIT; sleep_ms(20)) {
        if (now_ms() - start > 20000) FAIL("%" PRIu64 " of %d grants were refused", refused, GRANTS);
        refused = 0;
        for (uint64_t i = 0; i < GRANTS; i++) {
            const nixlkv_room_status_t status = poll_room(e, first + i);
            CHECK(status.state == NIXLKV_ROOM_FAILED || status.state == NIXLKV_ROOM_WAITING_FOR_INPUT);
            if (status.state == NIXLKV_ROOM_FAILED && status.error == NIXL_ERR_TOO_MANY_ROOMS) refused++;
        }
    }
    send_u64(fd, refused);
    /* The others end when prefill has held them for its limit. */
    uint64_t expired = 0;
    for (uint64_t i = 0; i < GRANTS; i++) {
        const uint64_t room = first + i;
        if (room == first) continue; /* this one is opened after all */
        CHECK_OK(nixlkv_wait(e, &room, 1, NIXLKV_WAIT_QUIESCED, EXPIRE_MS + 20000));
        const nixlkv_room_status_t status = poll_room(e, room);
        CHECK(status.state == NIXLKV_ROOM_FAILED);
        if (status.error == NIXL_ERR_ROOM_TIMEOUT) expired++;
        else CHECK(status.error == NIXL_ERR_TOO_MANY_ROOMS);
        CHECK_OK(nixlkv_release(e, room));
    }
    expect_end(e, first, NIXL_OK, 20000);
    CHECK_OK(nixlkv_release(e, first));
    CHECK(expired + 1 + refused == GRANTS);
    send_u64(fd, expired);

    CHECK(recv_u64(fd) == 7);
    CHECK_OK(open_room(e, peer, 7));
    expect_end(e, 7, NIXL_OK, 20000);
    expect_pages(memory, 7);
    CHECK(recv_u64(fd) == 0);
    nixlkv_engine_destroy(e);
    return 0;
}

int main(void) {
    child_t child = spawn(receiver);
    nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_PREFILL);
    config.max_rooms = LIMIT;
    config.queue_depth = DEPTH;
    config.room_timeout_ms = EXPIRE_MS;
    config.grant_timeout_ms = EXPIRE_MS;
    void *memory;
    nixlkv_engine_t *e = engine_with_pages(&config, PAGE, PAGES, &memory);
    poison(memory, PAGE * PAGES); /* so that stamping it does not count as growth */
    exchange_and_connect(e, child.fd);

    for (uint64_t room = 0; room < EARLY; room++)
        for (uint64_t i = 0; i < 2; i++) CHECK_OK(send_page(e, memory, room, i));
    CHECK(poll_room(e, 0).state == NIXLKV_ROOM_BOOTSTRAPPING && stats_of(e).chunks_pending == 2 * EARLY);
    send_u64(child.fd, EARLY);
    CHECK(recv_u64(child.fd) == EARLY);
    for (uint64_t room = 0; room < EARLY; room++) {
        expect_end(e, room, NIXL_OK, 20000);
        CHECK_OK(nixlkv_release(e, room));
    }

    const usage_t before = usage_of(getpid());
    send_u64(child.fd, GRANTS);
    const uint64_t refused = recv_u64(child.fd);
    CHECK(refused == GRANTS - LIMIT);
    const nixlkv_health_t full = health_of(e);
    CHECK(full.num_grants_parked == LIMIT);
    /* A parked grant is as good as any, and a full shelf keeps nobody from sending first. */
    const uint64_t first = 100000;
    const nixlkv_chunk_t nothing = chunk_of(first, NULL, 0, 0, NIXLKV_CHUNK_LAST);
    CHECK_OK(nixlkv_send_chunk(e, &nothing));
    expect_end(e, first, NIXL_OK, 20000);
    CHECK_OK(nixlkv_release(e, first));
    CHECK(health_of(e).num_grants_parked < LIMIT); /* what expired below tells how many it took */
    const uint64_t expired = recv_u64(child.fd);
    CHECK(expired == LIMIT - 1 && health_of(e).num_grants_parked == 0);

    /* Chunks for rooms that decode never opens. */
    uint64_t accepted = 0, too_many = 0;
    for (uint64_t n = 0; n < GRANTS; n++) {
        const int32_t sent = send_page(e, memory, 200000 + n / 2, n % 2);
        if (sent == NIXL_OK) accepted++;
        else if (sent == NIXL_ERR_QUEUE_FULL) too_many++;
        else FAIL("chunk %" PRIu64 ": %s: %s", n, nixlkv_status_name(sent), nixlkv_last_error());
    }
    CHECK(accepted == DEPTH && too_many == GRANTS - DEPTH && stats_of(e).chunks_pending == DEPTH);
    const usage_t after = usage_of(getpid());
    printf("RSS %lld KiB, then %lld KiB\n", (long long)before.rss_kib, (long long)after.rss_kib);
    CHECK(after.rss_kib - before.rss_kib < MAX_GROWTH_KIB && after.threads == before.threads);
    for (uint64_t n = 0; n < DEPTH; n += 2) {
        expect_end(e, 200000 + n / 2, NIXL_ERR_GRANT_TIMEOUT, EXPIRE_MS + 20000);
        CHECK_OK(nixlkv_release(e, 200000 + n / 2));
    }
    const nixlkv_stats_t stats = stats_of(e);
    CHECK(stats.chunks_pending == 0 && stats.rooms_active == 0 && stats.rooms_unquiesced == 0);

    CHECK_OK(send_page(e, memory, 7, 0));
    CHECK_OK(send_page(e, memory, 7, 1));
    send_u64(child.fd, 7);
    expect_end(e, 7, NIXL_OK, 20000);
    send_u64(child.fd, 0);
    expect_child_ok(child);
    nixlkv_engine_destroy(e);
    return 0;
}
