/* Prefill changes its regions while a grant waits there: the room fails as stale on both sides rather than move bytes by
 * the old meaning. And a prefill engine that shuts down answers the grants that wait there. */
#include "test.h"

enum { PAGE = 4096, PAGES = 8 };

static nixlkv_engine_t *prefill, *decode;
static char *source, *destination;
static uint64_t ids[2], prefill_peer;

static void add_regions(nixlkv_engine_t *e, char *base, int swapped, uint64_t *out) {
    nixlkv_region_t regions[2];
    for (int i = 0; i < 2; i++) {
        regions[i] = region(NIXLKV_REGION_KV, base + i * PAGES * PAGE, PAGES * PAGE, PAGE);
        regions[i].layer_id = (uint32_t)(swapped ? 1 - i : i);
    }
    CHECK_OK(nixlkv_register(e, regions, 2, out));
}

static void grant(uint64_t room) {
    const int32_t pages[2] = {1, 2};
    nixlkv_recv_params_t params = recv_params(room, &prefill_peer, 1, pages, 2);
    CHECK_OK(nixlkv_recv(decode, &params));
    nixlkv_room_status_t status;
    CHECK_OK(nixlkv_room_status_init(&status, sizeof status));
    while (nixlkv_poll(prefill, room, &status) != NIXL_OK) sleep_ms(1);
    CHECK(status.state == NIXLKV_ROOM_WAITING_FOR_INPUT);
}

static int32_t send_all(uint64_t room) {
    const int32_t pages[2] = {3, 4};
    nixlkv_chunk_t chunk = chunk_of(room, pages, 2, 0, NIXLKV_CHUNK_LAST);
    return nixlkv_send_chunk(prefill, &chunk);
}

int main(void) {
    prefill = engine_create(NIXLKV_ROLE_PREFILL);
    decode = engine_create(NIXLKV_ROLE_DECODE);
    source = map_bytes(2 * PAGES * PAGE);
    destination = map_bytes(2 * PAGES * PAGE);
    add_regions(prefill, source, 0, ids);
    add_regions(decode, destination, 0, NULL);
    uint64_t decode_peer = 0;
    connect_both(prefill, decode, &decode_peer, &prefill_peer);

    poison(destination, 2 * PAGES * PAGE);
    grant(1);
    CHECK_OK(nixlkv_deregister(prefill, ids, 2));
    add_regions(prefill, source, 1, ids);
    CHECK_STATUS(send_all(1), NIXL_ERR_ROOM_ENDED);
    expect_end(prefill, 1, NIXL_ERR_PEER_STALE, 10000);
    expect_end(decode, 1, NIXL_ERR_PEER_STALE, 10000);
    for (int32_t i = 0; i < 2 * PAGES; i++) CHECK(unpoisoned_words(destination, PAGE, i) == 0);
    CHECK_OK(nixlkv_release(prefill, 1));
    CHECK_OK(nixlkv_release(decode, 1));

    /* After blobs are exchanged again, the regions mean what they say. */
    connect_both(prefill, decode, &decode_peer, &prefill_peer);
    for (int layer = 0; layer < 2; layer++)
        for (int32_t i = 0; i < 2; i++)
            stamp_item(source + (1 - layer) * PAGES * PAGE, PAGE, 3 + i, 2, (uint64_t)layer, (uint64_t)i);
    grant(2);
    CHECK_OK(send_all(2));
    expect_end(decode, 2, NIXL_OK, 10000);
    for (int layer = 0; layer < 2; layer++)
        for (int32_t i = 0; i < 2; i++)
            CHECK(wrong_words(destination + layer * PAGES * PAGE, PAGE, 1 + i, 2, (uint64_t)layer, (uint64_t)i) == 0);
    expect_end(prefill, 2, NIXL_OK, 10000);
    CHECK_OK(nixlkv_release(prefill, 2));
    CHECK_OK(nixlkv_release(decode, 2));

    grant(3);
    CHECK_OK(nixlkv_engine_shutdown(prefill, 10000));
    expect_end(decode, 3, NIXL_ERR_PEER_DISCONNECTED, 10000);
    CHECK_OK(nixlkv_release(decode, 3));
    nixlkv_engine_destroy(prefill);
    nixlkv_engine_destroy(decode);
    return 0;
}
