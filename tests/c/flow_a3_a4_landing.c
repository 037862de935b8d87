/* Success means landed: the receiver looks at every byte in the poll that first says success, or, without polling at
 * all, when the sender tells it over a socket of their own that its poll says success (CASES A3, A4). */
/* timeout: 180 */
#include "test.h"

#include <sched.h>

#ifndef ITERATIONS
#define ITERATIONS 300
#endif

enum { PAGE = 4096, PAGES = 2048, BYTES = 1 << 14 };

static char *pages, *bytes;
static nixlkv_engine_t *engine;
static uint64_t peer;
static int32_t identity[BYTES];

static void start(uint32_t role, int fd) {
    engine = engine_create(role);
    pages = map_bytes(PAGES * PAGE);
    bytes = map_bytes(BYTES);
    nixlkv_region_t regions[2] = {region(NIXLKV_REGION_KV, pages, PAGES * PAGE, PAGE),
                                  region(NIXLKV_REGION_STATE, bytes, BYTES, 1)};
    CHECK_OK(nixlkv_register(engine, regions, 2, NULL));
    peer = exchange_and_connect(engine, fd);
    for (int32_t i = 0; i < BYTES; i++) identity[i] = i;
}

/* 1 byte to 8 MiB: whole pages, and single bytes as state slots. */
static void sizes(uint64_t n, uint64_t *num_pages, uint64_t *num_bytes) {
    static const uint64_t fixed[] = {1, 8, 8 << 10, 17 << 10, 1 << 20, 8 << 20};
    const uint64_t random = mix(n);
    uint64_t total = n % 4 == 0 ? fixed[n / 4 % 6] : (random % ((uint64_t)PAGES * PAGE)) >> (random % 24);
    if (total == 0) total = 1;
    *num_pages = total / PAGE;
    *num_bytes = total % PAGE;
}

static char byte_of(uint64_t n, uint64_t i) { return (char)(mix(n * 31 + i) | 1); }

static int prefill(int fd) {
    start(NIXLKV_ROLE_PREFILL, fd);
    for (uint64_t n = 0; n < ITERATIONS; n++) {
        uint64_t num_pages, num_bytes;
        sizes(n, &num_pages, &num_bytes);
        for (uint64_t i = 0; i < num_pages; i++) stamp_item(pages, PAGE, (int32_t)i, n, 0, i);
        for (uint64_t i = 0; i < num_bytes; i++) bytes[i] = byte_of(n, i);
        nixlkv_chunk_t chunk = chunk_of(n, identity, num_pages, 0, NIXLKV_CHUNK_LAST);
        nixlkv_state_indices_t state;
        CHECK_OK(nixlkv_state_indices_init(&state, sizeof state));
        state.indices = identity;
        state.num_indices = num_bytes;
        chunk.states = &state;
        chunk.num_states = num_bytes > 0;
        CHECK_OK(nixlkv_send_chunk(engine, &chunk));
        nixlkv_room_status_t status;
        while ((status = poll_room(engine, n)).state != NIXLKV_ROOM_SUCCESS && status.state != NIXLKV_ROOM_FAILED)
            sched_yield();
        send_u64(fd, status.state);
        if (status.state != NIXLKV_ROOM_SUCCESS) FAIL("room %" PRIu64 ": %s", n, status.error_text);
        CHECK(recv_u64(fd) == n);
        CHECK_OK(nixlkv_release(engine, n));
    }
    CHECK_OK(nixlkv_engine_shutdown(engine, 5000));
    nixlkv_engine_destroy(engine);
    return 0;
}

int main(void) {
    const child_t child = spawn(prefill);
    start(NIXLKV_ROLE_DECODE, child.fd);
    for (uint64_t n = 0; n < ITERATIONS; n++) {
        uint64_t num_pages, num_bytes;
        sizes(n, &num_pages, &num_bytes);
        memset(pages, 0, PAGES * PAGE);
        memset(bytes, 0, BYTES);
        nixlkv_recv_params_t params = recv_params(n, &peer, 1, identity, num_pages);
        nixlkv_state_indices_t state;
        CHECK_OK(nixlkv_state_indices_init(&state, sizeof state));
        state.indices = identity;
        state.num_indices = num_bytes;
        params.states = &state;
        params.num_states = num_bytes > 0;
        CHECK_OK(nixlkv_recv(engine, &params));
        const int by_sender = (int)(n % 2);
        if (by_sender) CHECK(recv_u64(child.fd) == NIXLKV_ROOM_SUCCESS);
        else {
            nixlkv_room_status_t status;
            while ((status = poll_room(engine, n)).state != NIXLKV_ROOM_SUCCESS && status.state != NIXLKV_ROOM_FAILED)
                sched_yield();
            if (status.state != NIXLKV_ROOM_SUCCESS) FAIL("room %" PRIu64 ": %s", n, status.error_text);
        }
        /* The last bytes first: what is late is late at the end. */
        for (uint64_t i = num_bytes; i-- > 0;)
            if (bytes[i] != byte_of(n, i)) FAIL("room %" PRIu64 ": byte %" PRIu64 " of %" PRIu64, n, i, num_bytes);
        for (uint64_t i = num_pages; i-- > 0;)
            if (wrong_words(pages, PAGE, (int32_t)i, n, 0, i) != 0)
                FAIL("room %" PRIu64 ": page %" PRIu64 " of %" PRIu64, n, i, num_pages);
        for (uint64_t i = num_bytes; i < BYTES; i++) CHECK(bytes[i] == 0);
        if (!by_sender) CHECK(recv_u64(child.fd) == NIXLKV_ROOM_SUCCESS);
        expect_end(engine, n, NIXL_OK, 10000);
        CHECK_OK(nixlkv_release(engine, n));
        send_u64(child.fd, n);
    }
    expect_child_ok(child);
    CHECK_OK(nixlkv_engine_shutdown(engine, 5000));
    nixlkv_engine_destroy(engine);
    return 0;
}
