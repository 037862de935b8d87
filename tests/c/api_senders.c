/* Several senders of one room: who owns the aux slot, who has which layers, and that all of them must be complete. */
#include "api.h"

enum { SENDERS = 4, KV_BYTES = PAGES * PAGE };

static nixlkv_engine_t *senders[SENDERS], *decode;
static char *source[SENDERS], *destination;
static uint64_t sender_peers[SENDERS], decode_peers[SENDERS];

static nixlkv_region_t layer_of(char *memory, uint32_t layer) {
    nixlkv_region_t r = region(NIXLKV_REGION_KV, memory + layer * KV_BYTES, KV_BYTES, PAGE);
    r.layer_id = layer;
    return r;
}

static char *aux_of(char *memory) { return memory + SENDERS * KV_BYTES; }

/* Every sender has one layer and aux slots; the receiver has all layers. */
static void set_up(void) {
    decode = engine_create(NIXLKV_ROLE_DECODE);
    destination = map_bytes(SENDERS * KV_BYTES + SLOTS * SLOT);
    nixlkv_region_t regions[SENDERS + 1];
    for (uint32_t i = 0; i < SENDERS; i++) regions[i] = layer_of(destination, i);
    regions[SENDERS] = region(NIXLKV_REGION_AUX, aux_of(destination), SLOTS * SLOT, SLOT);
    CHECK_OK(nixlkv_register(decode, regions, SENDERS + 1, NULL));
    for (uint32_t i = 0; i < SENDERS; i++) {
        senders[i] = engine_create(NIXLKV_ROLE_PREFILL);
        source[i] = map_bytes(SENDERS * KV_BYTES + SLOTS * SLOT);
        regions[0] = layer_of(source[i], i);
        regions[1] = region(NIXLKV_REGION_AUX, aux_of(source[i]), SLOTS * SLOT, SLOT);
        CHECK_OK(nixlkv_register(senders[i], regions, 2, NULL));
        connect_both(senders[i], decode, &decode_peers[i], &sender_peers[i]);
    }
}

static const int32_t pages[3] = {4, 9, 2}, aux = 1;

static nixlkv_recv_params_t all_of(uint64_t room) {
    nixlkv_recv_params_t params = recv_params(room, sender_peers, SENDERS, pages, 3);
    params.aux_index = &aux;
    params.aux_sender = sender_peers[2];
    return params;
}

static void stamp_sender(uint64_t room, int sender) {
    for (uint64_t i = 0; i < 3; i++)
        stamp_item(source[sender] + sender * KV_BYTES, PAGE, pages[i], room, (uint64_t)sender, i);
    stamp_item(aux_of(source[sender]), SLOT, aux, room, 100 + (uint64_t)sender, 0);
}

/* A5: one sender owns the aux slot. The others are refused before anything moves, and go on without aux.
 * B6: the room is complete when all four are, not three. */
static void a5_b6_one_aux_owner_and_all_senders(uint64_t room) {
    const nixlkv_recv_params_t params = all_of(room);
    CHECK_OK(nixlkv_recv(decode, &params));
    for (int i = 0; i < SENDERS; i++) await_state(senders[i], room, NIXLKV_ROOM_WAITING_FOR_INPUT);
    poison(destination, SENDERS * KV_BYTES + SLOTS * SLOT);
    const int order[SENDERS] = {3, 0, 2, 1};
    for (int n = 0; n < SENDERS; n++) {
        const int i = order[n];
        stamp_sender(room, i);
        nixlkv_chunk_t chunk = chunk_of(room, pages, 3, 0, NIXLKV_CHUNK_LAST);
        chunk.aux_index = &aux;
        if (i != 2) {
            CHECK_SAYS(nixlkv_send_chunk(senders[i], &chunk), NIXL_ERR_AUX_NOT_OWNER, "another sender");
            chunk.aux_index = NULL;
            chunk.flags |= NIXLKV_CHUNK_NO_AUX;
        } else {
            chunk.aux_index = NULL;
            CHECK_STATUS(nixlkv_send_chunk(senders[i], &chunk), NIXL_ERR_AUX_MISSING);
            chunk.aux_index = &aux;
        }
        if (n == SENDERS - 1) {
            const uint64_t until = now_ms() + WAIT_MS;
            while (poll_room(decode, room).num_pending_senders != 1 && now_ms() < until) sleep_ms(1);
            sleep_ms(100);
            const nixlkv_room_status_t status = poll_room(decode, room);
            CHECK(status.state == NIXLKV_ROOM_TRANSFERRING && status.num_pending_senders == 1);
        }
        CHECK_OK(nixlkv_send_chunk(senders[i], &chunk));
    }
    expect_end(decode, room, NIXL_OK, WAIT_MS);
    for (int i = 0; i < SENDERS; i++) {
        expect_end(senders[i], room, NIXL_OK, WAIT_MS);
        for (uint64_t k = 0; k < 3; k++)
            CHECK(wrong_words(destination + i * KV_BYTES, PAGE, pages[k], room, (uint64_t)i, k) == 0);
        CHECK_OK(nixlkv_release(senders[i], room));
    }
    CHECK(wrong_words(aux_of(destination), SLOT, aux, room, 102, 0) == 0);
    CHECK_OK(nixlkv_release(decode, room));
}

/* A5: aux of one that is not the owner, sent before the grant: the room fails on every side with one cause. */
static void a5_aux_before_the_grant(uint64_t room) {
    nixlkv_chunk_t chunk = chunk_of(room, pages, 3, 0, NIXLKV_CHUNK_LAST);
    chunk.aux_index = &aux;
    CHECK_OK(nixlkv_send_chunk(senders[1], &chunk));
    const nixlkv_recv_params_t params = all_of(room);
    CHECK_OK(nixlkv_recv(decode, &params));
    expect_end(decode, room, NIXL_ERR_AUX_NOT_OWNER, WAIT_MS);
    expect_end(senders[1], room, NIXL_ERR_AUX_NOT_OWNER, WAIT_MS);
    CHECK_OK(nixlkv_release(senders[1], room));
    CHECK_OK(nixlkv_release(decode, room));
}

/* G3: together the senders must have every layer, and none twice. */
static void g3_layers(uint64_t room) {
    nixlkv_recv_params_t params = all_of(room);
    params.num_senders = 3;
    CHECK_SAYS(nixlkv_recv(decode, &params), NIXL_ERR_LAYERS_INCOMPLETE, "layer 3");
    nixlkv_engine_t *fifth = engine_create(NIXLKV_ROLE_PREFILL);
    char *memory = map_bytes(SENDERS * KV_BYTES);
    const nixlkv_region_t twice = layer_of(memory, 1);
    CHECK_OK(nixlkv_register(fifth, &twice, 1, NULL));
    uint64_t decode_peer = 0, list[SENDERS + 1];
    connect_both(fifth, decode, &decode_peer, &list[SENDERS]);
    memcpy(list, sender_peers, sizeof sender_peers);
    params.senders = list;
    params.num_senders = SENDERS + 1;
    CHECK_SAYS(nixlkv_recv(decode, &params), NIXL_ERR_LAYERS_OVERLAP, "layer 1");
    /* An owner of the aux slot that has none. */
    list[1] = list[SENDERS];
    params.num_senders = SENDERS;
    params.aux_sender = list[1];
    CHECK_SAYS(nixlkv_recv(decode, &params), NIXL_ERR_AUX_UNEXPECTED, "no aux regions");
    /* Without pages no layer is needed: one sender can do it alone. */
    params.senders = &sender_peers[2];
    params.num_senders = 1;
    params.aux_sender = 0;
    params.pages = NULL;
    params.num_pages = 0;
    CHECK_OK(nixlkv_recv(decode, &params));
    nixlkv_chunk_t chunk = chunk_of(room, NULL, 0, 0, NIXLKV_CHUNK_LAST);
    chunk.aux_index = &aux;
    stamp_sender(room, 2);
    CHECK_OK(nixlkv_send_chunk(senders[2], &chunk));
    expect_end(decode, room, NIXL_OK, WAIT_MS);
    expect_end(senders[2], room, NIXL_OK, WAIT_MS);
    CHECK(wrong_words(aux_of(destination), SLOT, aux, room, 102, 0) == 0);
    CHECK_OK(nixlkv_release(senders[2], room));
    CHECK_OK(nixlkv_release(decode, room));
    nixlkv_engine_destroy(fifth);
    munmap(memory, SENDERS * KV_BYTES);
}

/* G4: one of four fails; every one of them gets an end, and so does the receiver, with the first cause. */
static void g4_one_fails_for_all(uint64_t room) {
    const nixlkv_recv_params_t params = all_of(room);
    CHECK_OK(nixlkv_recv(decode, &params));
    for (int i = 0; i < SENDERS; i++) {
        await_state(senders[i], room, NIXLKV_ROOM_WAITING_FOR_INPUT);
        const nixlkv_chunk_t chunk = chunk_of(room, pages, 1, 0, 0);
        CHECK_OK(nixlkv_send_chunk(senders[i], &chunk));
    }
    CHECK_OK(nixlkv_abort(senders[3], room, "number three"));
    expect_end(decode, room, NIXL_ERR_ABORTED, WAIT_MS);
    for (int i = 0; i < SENDERS; i++) {
        expect_end(senders[i], room, NIXL_ERR_ABORTED, WAIT_MS);
        CHECK(strstr(poll_room(senders[i], room).error_text, "number three") != NULL);
        CHECK_OK(nixlkv_release(senders[i], room));
    }
    CHECK_OK(nixlkv_release(decode, room));
}

int main(void) {
    set_up();
    a5_b6_one_aux_owner_and_all_senders(1);
    a5_aux_before_the_grant(2);
    a5_b6_one_aux_owner_and_all_senders(3);
    g3_layers(4);
    g4_one_fails_for_all(5);
    a5_b6_one_aux_owner_and_all_senders(6);
    for (int i = 0; i < SENDERS; i++) nixlkv_engine_destroy(senders[i]);
    nixlkv_engine_destroy(decode);
    return 0;
}
