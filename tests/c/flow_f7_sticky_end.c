/* F7: a room's time limit passes at decode about when its write completes, 1,000 times. However the race ends, the
 * state is final on both sides, and decode's failure is never prefill's success. */
/* timeout: 200 */
#include "test.h"

enum { PAGE = 1 << 16, EACH = 4, BATCH = 20, RACES = 1000, PAGES = BATCH * EACH };

static nixlkv_engine_t *engine;
static void *memory;
static uint64_t peer;

static void start(uint32_t role, int fd) {
    const nixlkv_engine_config_t config = engine_config(role);
    engine = engine_with_pages(&config, PAGE, PAGES, &memory);
    peer = exchange_and_connect(engine, fd);
    /* Both know each other when a first room is over. */
    const int32_t page = 0;
    if (role == NIXLKV_ROLE_PREFILL) {
        const nixlkv_chunk_t chunk = chunk_of(0, &page, 1, 0, NIXLKV_CHUNK_LAST);
        CHECK_OK(nixlkv_send_chunk(engine, &chunk));
    } else {
        const nixlkv_recv_params_t params = recv_params(0, &peer, 1, &page, 1);
        CHECK_OK(nixlkv_recv(engine, &params));
    }
    expect_end(engine, 0, NIXL_OK, 20000);
    CHECK_OK(nixlkv_release(engine, 0));
}

/* Looks at all rooms until each is quiesced and some time after; an ended one stays as it is. */
static void watch(uint64_t first, uint32_t *states) {
    int32_t errors[BATCH] = {0};
    uint32_t quiesced[BATCH] = {0};
    for (int i = 0; i < BATCH; i++) states[i] = UINT32_MAX;
    uint64_t until = 0;
    for (const uint64_t start = now_ms(); until == 0 || now_ms() < until; sleep_ms(1)) {
        int num_quiesced = 0;
        for (int i = 0; i < BATCH; i++) {
            const nixlkv_room_status_t now = poll_room(engine, first + (uint64_t)i);
            if (states[i] != UINT32_MAX &&
                (now.state != states[i] || now.error != errors[i] || now.quiesced < quiesced[i]))
                FAIL("room %" PRIu64 ": state %u, error %s, quiesced %u after state %u, error %s, quiesced %u",
                     first + (uint64_t)i, now.state, nixlkv_status_name(now.error), now.quiesced, states[i],
                     nixlkv_status_name(errors[i]), quiesced[i]);
            if (now.state == NIXLKV_ROOM_SUCCESS || now.state == NIXLKV_ROOM_FAILED) {
                states[i] = now.state;
                errors[i] = now.error;
                quiesced[i] = now.quiesced;
                CHECK(now.error == (now.state == NIXLKV_ROOM_SUCCESS ? NIXL_OK : NIXL_ERR_ROOM_TIMEOUT));
            }
            num_quiesced += (int)now.quiesced;
        }
        if (until == 0 && num_quiesced == BATCH) until = now_ms() + 5;
        if (now_ms() - start > 30000) FAIL("%d of %d rooms are quiesced", num_quiesced, BATCH);
    }
}

static int prefill(int fd) {
    start(NIXLKV_ROLE_PREFILL, fd);
    for (uint64_t first; (first = recv_u64(fd)) != 0;) {
        const uint64_t begin = now_ms();
        for (uint64_t i = 0; i < BATCH; i++) {
            int32_t pages[EACH];
            for (int32_t k = 0; k < EACH; k++) {
                pages[k] = (int32_t)i * EACH + k;
                stamp_item(memory, PAGE, pages[k], first + i, 0, (uint64_t)k);
            }
            const nixlkv_chunk_t chunk = chunk_of(first + i, pages, 1, 0, 0);
            const int32_t status = nixlkv_send_chunk(engine, &chunk);
            CHECK(status == NIXL_OK || status == NIXL_ERR_ROOM_ENDED);
        }
        /* The rest about when the time limit passes. */
        while (now_ms() - begin < 15 + mix(first) % 40) sleep_ms(1);
        for (uint64_t i = 0; i < BATCH; i++) {
            int32_t pages[EACH];
            for (int32_t k = 0; k < EACH; k++) pages[k] = (int32_t)i * EACH + k;
            const nixlkv_chunk_t chunk = chunk_of(first + i, pages + 1, EACH - 1, 1, NIXLKV_CHUNK_LAST);
            const int32_t status = nixlkv_send_chunk(engine, &chunk);
            CHECK(status == NIXL_OK || status == NIXL_ERR_ROOM_ENDED);
        }
        uint32_t states[BATCH];
        watch(first, states);
        for (uint64_t i = 0; i < BATCH; i++) CHECK_OK(nixlkv_release(engine, first + i));
        send_bytes(fd, states, sizeof states);
    }
    nixlkv_engine_destroy(engine);
    return 0;
}

int main(void) {
    child_t child = spawn(prefill);
    start(NIXLKV_ROLE_DECODE, child.fd);
    int succeeded = 0, failed = 0, disagree = 0;
    for (uint64_t first = 1; first < RACES || ((succeeded < 20 || failed < 20) && first < 5 * RACES); first += BATCH) {
        poison(memory, (size_t)PAGES * PAGE);
        for (uint64_t i = 0; i < BATCH; i++) {
            int32_t pages[EACH];
            for (int32_t k = 0; k < EACH; k++) pages[k] = (int32_t)i * EACH + EACH - 1 - k;
            nixlkv_recv_params_t params = recv_params(first + i, &peer, 1, pages, EACH);
            params.timeout_ms = 20 + mix(first + i) % 40;
            CHECK_OK(nixlkv_recv(engine, &params));
        }
        send_u64(child.fd, first);
        uint32_t states[BATCH], theirs[BATCH];
        watch(first, states);
        for (uint64_t i = 0; i < BATCH; i++) {
            if (states[i] == NIXLKV_ROOM_FAILED) {
                failed++;
            } else {
                succeeded++;
                for (int32_t k = 0; k < EACH; k++)
                    CHECK(wrong_words(memory, PAGE, (int32_t)i * EACH + EACH - 1 - k, first + i, 0, (uint64_t)k) == 0);
            }
            CHECK_OK(nixlkv_release(engine, first + i));
        }
        recv_bytes(child.fd, theirs, sizeof theirs);
        for (int i = 0; i < BATCH; i++) disagree += states[i] != theirs[i];
        CHECK(disagree == 0);
    }
    printf("%d rooms succeeded, %d failed\n", succeeded, failed);
    CHECK(succeeded >= 20 && failed >= 20);
    send_u64(child.fd, 0);
    expect_child_ok(child);
    nixlkv_engine_destroy(engine);
    return 0;
}
