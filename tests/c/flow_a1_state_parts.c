/* A1: a request's state is three tensors. The sender is stopped when one of them has come and another has not: the
 * room stays in progress for five seconds; it ends in success with all three in place. */
/* timeout: 120 */
/* env: UCX_TLS=tcp,self */
#include "test.h"

#include <stdbool.h>

enum { TENSORS = 3, SLOT = 96 << 20, PAGE = 4096, PAGES = 4, TRIES = 10, HELD_MS = 5000 };

static nixlkv_engine_t *engine;
static char *tensor[TENSORS], *pages;
static uint64_t peer;

static void start(uint32_t role, int fd) {
    nixlkv_engine_config_t config = engine_config(role);
    config.liveness_limit_ms = 60000;
    CHECK_OK(nixlkv_engine_create(&config, &engine));
    nixlkv_region_t regions[TENSORS + 1];
    for (uint32_t i = 0; i < TENSORS; i++) {
        tensor[i] = map_bytes(SLOT);
        regions[i] = region(NIXLKV_REGION_STATE, tensor[i], SLOT, SLOT);
        regions[i].layer_id = i;
    }
    pages = map_bytes(PAGES * PAGE);
    regions[TENSORS] = region(NIXLKV_REGION_KV, pages, PAGES * PAGE, PAGE);
    CHECK_OK(nixlkv_register(engine, regions, TENSORS + 1, NULL));
    peer = exchange_and_connect(engine, fd);
}

static const int32_t slot, all_pages[PAGES] = {0, 1, 2, 3};

static nixlkv_state_indices_t state_slot(void) {
    nixlkv_state_indices_t state;
    CHECK_OK(nixlkv_state_indices_init(&state, sizeof state));
    state.indices = &slot;
    state.num_indices = 1;
    return state;
}

static int prefill(int fd) {
    start(NIXLKV_ROLE_PREFILL, fd);
    for (uint64_t room; (room = recv_u64(fd)) != 0;) {
        for (uint64_t i = 0; i < TENSORS; i++) stamp_item(tensor[i], SLOT, 0, room, i, 0);
        for (int32_t i = 0; i < PAGES; i++) stamp_item(pages, PAGE, i, room, 9, (uint64_t)i);
        const nixlkv_state_indices_t state = state_slot();
        nixlkv_chunk_t chunk = chunk_of(room, all_pages, PAGES, 0, NIXLKV_CHUNK_LAST);
        chunk.states = &state;
        chunk.num_states = 1;
        CHECK_OK(nixlkv_send_chunk(engine, &chunk));
        expect_end(engine, room, NIXL_OK, 60000);
        CHECK_OK(nixlkv_release(engine, room));
    }
    nixlkv_engine_destroy(engine);
    return 0;
}

/* Whether the tensor's last word has come. The first to come is the first that was posted. */
static bool has_come(uint64_t room, uint64_t i) {
    const uint64_t last = SLOT / 8 - 1;
    return ((volatile uint64_t *)tensor[i])[last] == stamp(room, i, 0, last);
}

int main(void) {
    child_t child = spawn(prefill);
    start(NIXLKV_ROLE_DECODE, child.fd);
    bool held = false;
    for (uint64_t room = 1; room <= TRIES && !held; room++) {
        for (int i = 0; i < TENSORS; i++) poison(tensor[i], SLOT);
        const nixlkv_state_indices_t state = state_slot();
        nixlkv_recv_params_t params = recv_params(room, &peer, 1, all_pages, PAGES);
        params.states = &state;
        params.num_states = 1;
        CHECK_OK(nixlkv_recv(engine, &params));
        send_u64(child.fd, room);
        for (const uint64_t begin = now_ms(); !has_come(room, 0) && !has_come(room, 1) && !has_come(room, 2);)
            if (now_ms() - begin > 30000) FAIL("no tensor has come");
        CHECK(kill(child.pid, SIGSTOP) == 0);
        int status;
        CHECK(waitpid(child.pid, &status, WUNTRACED) == child.pid && WIFSTOPPED(status));
        const uint64_t begin = now_ms();
        while (now_ms() - begin < HELD_MS) {
            int come = 0;
            for (uint64_t i = 0; i < TENSORS; i++) come += has_come(room, i);
            const nixlkv_room_status_t now = poll_room(engine, room);
            if (come == TENSORS) break; /* stopped too late */
            if (now.state != NIXLKV_ROOM_TRANSFERRING && now.state != NIXLKV_ROOM_WAITING_FOR_INPUT)
                FAIL("%d tensors have come, state %u", come, now.state);
            held = now_ms() - begin >= HELD_MS - 100;
            sleep_ms(10);
        }
        CHECK(kill(child.pid, SIGCONT) == 0);
        nixlkv_room_status_t end;
        while ((end = poll_room(engine, room)).state != NIXLKV_ROOM_SUCCESS)
            if (end.state == NIXLKV_ROOM_FAILED) FAIL("%s", end.error_text);
        for (uint64_t i = 0; i < TENSORS; i++) CHECK(wrong_words(tensor[i], SLOT, 0, room, i, 0) == 0);
        for (int32_t i = 0; i < PAGES; i++) CHECK(wrong_words(pages, PAGE, i, room, 9, (uint64_t)i) == 0);
        expect_end(engine, room, NIXL_OK, 10000);
        CHECK_OK(nixlkv_release(engine, room));
    }
    CHECK(held);
    send_u64(child.fd, 0);
    expect_child_ok(child);
    nixlkv_engine_destroy(engine);
    return 0;
}
