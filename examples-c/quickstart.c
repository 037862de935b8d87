/*
 * quickstart: one request's KV moves between two engines in one process. Read this first.
 * In life they run on two machines, and the blobs of step 3 go over your own control plane.
 */
#include <nixlkv.h>
#include <stdio.h>
#include <string.h>

enum { PAGE_BYTES = 4096, NUM_PAGES = 8, AUX_BYTES = 64, NUM_AUX = 4, ROOM = 42, TIMEOUT_MS = 10000 };

/* Every call returns NIXL_OK or a code; the thread's last error says what exactly was wrong. */
#define CHECK(call)                                                         \
    do {                                                                    \
        if ((call) != NIXL_OK) {                                            \
            fprintf(stderr, "%s\n  by %s\n", nixlkv_last_error(), #call);   \
            goto cleanup;                                                   \
        }                                                                   \
    } while (0)

/* One engine's memory: one layer with K and V fused in a page, and one aux array. */
typedef struct memory {
    unsigned char kv[NUM_PAGES][PAGE_BYTES];
    unsigned char aux[NUM_AUX][AUX_BYTES];
} memory_t;

/* Steps 1 and 2: create an engine, and register its memory. 0, or -1 with what there is of it in *engine. */
static int create(uint32_t role, memory_t *memory, nixlkv_engine_t **engine) {
    nixlkv_engine_config_t config;
    nixlkv_region_t regions[2];
    CHECK(nixlkv_engine_config_init(&config, sizeof config)); /* all zero: the defaults */
    config.role = role;
    CHECK(nixlkv_engine_create(&config, engine));
    CHECK(nixlkv_region_init(&regions[0], sizeof regions[0]));
    CHECK(nixlkv_region_init(&regions[1], sizeof regions[1]));
    regions[0].kind = NIXLKV_REGION_KV;
    regions[0].part = NIXLKV_PART_FUSED;
    regions[0].address = memory->kv;
    regions[0].len = sizeof memory->kv;
    regions[0].item_len = PAGE_BYTES;
    regions[1].kind = NIXLKV_REGION_AUX;
    regions[1].address = memory->aux;
    regions[1].len = sizeof memory->aux;
    regions[1].item_len = AUX_BYTES;
    CHECK(nixlkv_register(*engine, regions, 2, NULL));
    return 0;
cleanup:
    return -1;
}

int main(void) {
    static memory_t prefill_memory, decode_memory;
    static unsigned char blob[1 << 16];
    nixlkv_engine_t *prefill = NULL, *decode = NULL;
    nixlkv_room_status_t status;
    nixlkv_recv_params_t recv;
    nixlkv_chunk_t chunk;
    uint64_t len, sender, receiver, room = ROOM;
    int32_t source[3] = {7, 0, 5}, destination[3] = {1, 6, 2}; /* pages: each side has its own numbers */
    int32_t source_aux = 3, destination_aux = 0, result = 1;
    if (create(NIXLKV_ROLE_PREFILL, &prefill_memory, &prefill) != 0 ||
        create(NIXLKV_ROLE_DECODE, &decode_memory, &decode) != 0) {
        goto cleanup;
    }
    /* Step 3: each side connects the other by the blob that it exports. */
    CHECK(nixlkv_export(prefill, blob, sizeof blob, &len));
    CHECK(nixlkv_connect(decode, blob, len, &sender));
    CHECK(nixlkv_export(decode, blob, sizeof blob, &len));
    CHECK(nixlkv_connect(prefill, blob, len, &receiver));

    /* Step 4: decode opens the room, the place for one request, and says where everything goes. */
    CHECK(nixlkv_recv_params_init(&recv, sizeof recv));
    recv.room = room;
    recv.senders = &sender;
    recv.num_senders = 1;
    recv.pages = destination;
    recv.num_pages = 3;
    recv.aux_index = &destination_aux;
    CHECK(nixlkv_recv(decode, &recv));

    /* Step 5: prefill computes, and sends what it has: first two pages, then the last one with the aux slot. */
    memset(prefill_memory.kv[source[0]], 'a', PAGE_BYTES);
    memset(prefill_memory.kv[source[1]], 'b', PAGE_BYTES);
    CHECK(nixlkv_chunk_init(&chunk, sizeof chunk));
    chunk.room = room;
    chunk.pages = source;
    chunk.num_pages = 2;
    CHECK(nixlkv_send_chunk(prefill, &chunk)); /* only queues: compute on while it moves */
    memset(prefill_memory.kv[source[2]], 'c', PAGE_BYTES);
    memcpy(prefill_memory.aux[source_aux], "first token", 12);
    chunk.pages = source + 2;
    chunk.num_pages = 1;
    chunk.page_offset = 2; /* where they start in the room's page list */
    chunk.aux_index = &source_aux;
    chunk.flags = NIXLKV_CHUNK_LAST;
    CHECK(nixlkv_send_chunk(prefill, &chunk));

    /* Step 6: both wait until the room has ended; poll says how. Success: it is all in decode's memory. */
    CHECK(nixlkv_wait(decode, &room, 1, NIXLKV_WAIT_ALL | NIXLKV_WAIT_QUIESCED, TIMEOUT_MS));
    CHECK(nixlkv_wait(prefill, &room, 1, NIXLKV_WAIT_ALL | NIXLKV_WAIT_QUIESCED, TIMEOUT_MS));
    CHECK(nixlkv_room_status_init(&status, sizeof status));
    CHECK(nixlkv_poll(decode, room, &status));
    if (status.state != NIXLKV_ROOM_SUCCESS) {
        fprintf(stderr, "the room failed: %s: %s\n", nixlkv_status_name(status.error), status.error_text);
        goto cleanup;
    }
    int differ = memcmp(decode_memory.aux[destination_aux], prefill_memory.aux[source_aux], AUX_BYTES) != 0;
    for (uint64_t i = 0; i < status.num_pages; i++) {
        differ += memcmp(decode_memory.kv[destination[i]], prefill_memory.kv[source[i]], PAGE_BYTES) != 0;
    }
    printf("%d pages and an aux slot have moved, %d of them differ\n", (int)status.num_pages, differ);
    /* Step 7: quiesced rooms are released; then their pages may be used again. */
    CHECK(nixlkv_release(decode, room));
    CHECK(nixlkv_release(prefill, room));
    result = differ == 0 ? 0 : 1;
cleanup: /* destroy takes NULL, too, and ends whatever is still open */
    nixlkv_engine_destroy(decode);
    nixlkv_engine_destroy(prefill);
    return result;
}
