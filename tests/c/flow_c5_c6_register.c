/* C5: memory registered twice is refused, deregistered twice is unknown, and neither touches what is registered beside
 * it: transfers work before, between and after. C6: an empty buffer in a batch of ten is named, nothing of the batch is
 * registered, and the nine others then are, and are written and read. */
#include "test.h"

enum { PAGE = 4096, PAGES = 16, LAYERS = 10, EMPTY = 4, REGION = PAGE * PAGES };

static nixlkv_engine_t *prefill, *decode;
static char *source, *destination;
static uint64_t decode_peer, prefill_peer;

/* A KV region of the layer at its place in the memory. */
static nixlkv_region_t layer_in(char *memory, uint32_t layer) {
    nixlkv_region_t r = region(NIXLKV_REGION_KV, memory + (size_t)layer * REGION, REGION, PAGE);
    r.layer_id = layer;
    return r;
}

/* A room whose pages have arrived in all of the layers that are registered, and in no other. */
static void transfer(uint64_t room, uint32_t layers) {
    int32_t from[PAGES], to[PAGES];
    shuffle(from, PAGES, room);
    shuffle(to, PAGES, room + 1);
    poison(destination, LAYERS * REGION);
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint64_t i = 0; i < PAGES; i++)
            stamp_item(source + (size_t)layer * REGION, PAGE, from[i], room, layer, i);
    const nixlkv_recv_params_t params = recv_params(room, &prefill_peer, 1, to, PAGES);
    for (const uint64_t start = now_ms();; sleep_ms(1)) {
        const int32_t opened = nixlkv_recv(decode, &params);
        if (opened == NIXL_OK) break;
        CHECK(opened == NIXL_ERR_PEER_STALE && now_ms() - start < 10000); /* a hello is on its way */
    }
    const nixlkv_chunk_t chunk = chunk_of(room, from, PAGES, 0, NIXLKV_CHUNK_LAST);
    CHECK_OK(nixlkv_send_chunk(prefill, &chunk));
    expect_end(decode, room, NIXL_OK, 10000);
    expect_end(prefill, room, NIXL_OK, 10000);
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint64_t i = 0; i < PAGES; i++) {
            const char *base = destination + (size_t)layer * REGION;
            if (layers & (1u << layer)) CHECK(wrong_words(base, PAGE, to[i], room, layer, i) == 0);
            else CHECK(unpoisoned_words(base, PAGE, to[i]) == 0);
        }
    CHECK_OK(nixlkv_release(decode, room));
    CHECK_OK(nixlkv_release(prefill, room));
}

static void reconnect(void) { connect_both(prefill, decode, &decode_peer, &prefill_peer); }

static void c5_twice(void) {
    const nixlkv_region_t theirs = layer_in(source, 0), ours[2] = {layer_in(destination, 0), layer_in(destination, 1)};
    nixlkv_region_t spare = ours[1];
    spare.flags = NIXLKV_REGION_FLAG_LOCAL;
    uint64_t first = 0, second = 0, third = 99;
    CHECK_OK(nixlkv_register(prefill, &theirs, 1, NULL));
    CHECK_OK(nixlkv_register(decode, &ours[0], 1, &first));
    CHECK_OK(nixlkv_register(decode, &spare, 1, &second));
    reconnect();
    transfer(1, 1);

    /* The same once more; the same memory under another layer; a part of it; and all of these beside something new. */
    CHECK_STATUS(nixlkv_register(decode, &ours[0], 1, &third), NIXL_ERR_REGION_DUPLICATE);
    nixlkv_region_t other[2] = {layer_in(destination, 5), ours[0]};
    CHECK_STATUS(nixlkv_register(decode, other, 2, NULL), NIXL_ERR_REGION_DUPLICATE);
    other[1].layer_id = 6;
    CHECK_STATUS(nixlkv_register(decode, other, 2, NULL), NIXL_ERR_REGION_OVERLAP);
    other[1].address = destination + PAGE;
    other[1].len = PAGE;
    CHECK_STATUS(nixlkv_register(decode, other, 2, NULL), NIXL_ERR_REGION_OVERLAP);
    CHECK(third == 99);
    transfer(2, 1); /* without a new exchange of blobs: nothing has changed */

    CHECK_OK(nixlkv_deregister(decode, &second, 1));
    CHECK_STATUS(nixlkv_deregister(decode, &second, 1), NIXL_ERR_REGION_UNKNOWN);
    reconnect();
    transfer(3, 1);
    CHECK_STATUS(nixlkv_deregister(decode, &second, 1), NIXL_ERR_REGION_UNKNOWN);
    transfer(4, 1);

    /* Again and again: an id is good for one deregistration, and the memory for the next registration. */
    for (int i = 0; i < 20; i++) {
        const uint64_t old = first;
        CHECK_OK(nixlkv_deregister(decode, &first, 1));
        CHECK_STATUS(nixlkv_deregister(decode, &old, 1), NIXL_ERR_REGION_UNKNOWN);
        CHECK_OK(nixlkv_register(decode, &ours[0], 1, &first));
        CHECK(first != old);
        CHECK_STATUS(nixlkv_deregister(decode, &old, 1), NIXL_ERR_REGION_UNKNOWN);
        CHECK_STATUS(nixlkv_register(decode, &ours[0], 1, NULL), NIXL_ERR_REGION_DUPLICATE);
        reconnect();
        transfer(10 + (uint64_t)i, 1);
    }
    CHECK_OK(nixlkv_deregister(decode, &first, 1));
}

static void c6_one_is_empty(void) {
    const uint32_t all_but_one = (1u << LAYERS) - 1 - (1u << EMPTY);
    for (int what = 0; what < 2; what++) {
        nixlkv_region_t batch[LAYERS];
        uint64_t ids[LAYERS] = {0};
        for (uint32_t layer = 0; layer < LAYERS; layer++) batch[layer] = layer_in(destination, layer);
        if (what == 0) batch[EMPTY].len = 0;
        else batch[EMPTY].address = NULL;
        CHECK_SAYS(nixlkv_register(decode, batch, LAYERS, ids), NIXL_ERR_REGION_EMPTY, "region 4: ");
        for (int i = 0; i < LAYERS; i++) CHECK(ids[i] == 0);
        /* None of the ten is there. */
        memmove(&batch[EMPTY], &batch[EMPTY + 1], (LAYERS - EMPTY - 1) * sizeof batch[0]);
        CHECK_OK(nixlkv_register(decode, batch, LAYERS - 1, ids));
        for (uint32_t layer = 1; what == 0 && layer < LAYERS; layer++) {
            const nixlkv_region_t theirs = layer_in(source, layer);
            if (layer != EMPTY) CHECK_OK(nixlkv_register(prefill, &theirs, 1, NULL));
        }
        reconnect();
        transfer(100 + (uint64_t)what, all_but_one);
        CHECK_OK(nixlkv_deregister(decode, ids, LAYERS - 1));
    }
}

int main(void) {
    prefill = engine_create(NIXLKV_ROLE_PREFILL);
    decode = engine_create(NIXLKV_ROLE_DECODE);
    source = map_bytes(LAYERS * REGION);
    destination = map_bytes(LAYERS * REGION);
    c5_twice();
    c6_one_is_empty();
    CHECK_OK(nixlkv_engine_shutdown(prefill, 5000));
    CHECK_OK(nixlkv_engine_shutdown(decode, 5000));
    nixlkv_engine_destroy(prefill);
    nixlkv_engine_destroy(decode);
    return 0;
}
