/* nixlkv_send_chunk: promise 1. Every refusal leaves the room as it was, and the corrected call completes it. */
#include "api.h"

static pair_t pair;

static const int32_t source[4] = {3, 9, 1, 12}, destination[4] = {8, 2, 3, 0};
static const int32_t aux = 2, slots[2] = {3, 0};

static nixlkv_state_indices_t state(void) {
    nixlkv_state_indices_t indices;
    CHECK_OK(nixlkv_state_indices_init(&indices, sizeof indices));
    indices.group = GROUP;
    indices.indices = slots;
    indices.num_indices = 2;
    return indices;
}

static uint64_t next_room = 1;
static nixlkv_state_indices_t granted_state;

/* Opens a room at the receiver, with four pages, aux and two state slots, and waits until its grant is here. */
static uint64_t granted_room(void) {
    granted_state = state();
    nixlkv_recv_params_t params = recv_params(next_room, &pair.prefill_peer, 1, destination, 4);
    params.aux_index = &aux;
    params.states = &granted_state;
    params.num_states = 1;
    CHECK_OK(nixlkv_recv(pair.decode, &params));
    await_state(pair.prefill, next_room, NIXLKV_ROOM_WAITING_FOR_INPUT);
    return next_room++;
}

static nixlkv_chunk_t last_chunk(uint64_t room, uint64_t num_pages, uint64_t offset,
                                 const nixlkv_state_indices_t *indices) {
    nixlkv_chunk_t chunk = chunk_of(room, source + offset, num_pages, offset, NIXLKV_CHUNK_LAST);
    chunk.aux_index = &aux;
    chunk.states = indices;
    chunk.num_states = 1;
    return chunk;
}

/* The counters once nothing moves any more of what was accepted before. */
static nixlkv_stats_t quiet_stats(void) {
    const uint64_t until = now_ms() + WAIT_MS;
    nixlkv_stats_t stats = stats_of(pair.prefill);
    for (;;) {
        sleep_ms(10);
        const nixlkv_stats_t next = stats_of(pair.prefill);
        const int moves = next.transfers_in_flight != 0 || next.transfers_posted != stats.transfers_posted ||
                          next.chunks_sent != stats.chunks_sent;
        stats = next;
        if (!moves) return stats;
        CHECK(now_ms() < until);
    }
}

static void expect_refused(const nixlkv_chunk_t *chunk, int32_t code, const char *say) {
    nixlkv_room_status_t before, after;
    CHECK_OK(nixlkv_room_status_init(&before, sizeof before));
    CHECK_OK(nixlkv_room_status_init(&after, sizeof after));
    const nixlkv_stats_t stats_before = quiet_stats();
    const int32_t known = nixlkv_poll(pair.prefill, chunk->room, &before);
    const int32_t status = nixlkv_send_chunk(pair.prefill, chunk);
    if (status != code || strstr(nixlkv_last_error(), say) == NULL)
        FAIL("expected %s saying \"%s\", got %s: %s", nixlkv_status_name(code), say, nixlkv_status_name(status),
             nixlkv_last_error());
    CHECK_STATUS(nixlkv_poll(pair.prefill, chunk->room, &after), known);
    CHECK(before.state == after.state && before.error == after.error && before.num_pages == after.num_pages);
    CHECK(before.num_pending_chunks == after.num_pending_chunks && before.num_chunks == after.num_chunks);
    const nixlkv_stats_t stats_after = stats_of(pair.prefill);
    CHECK(stats_before.rooms_opened == stats_after.rooms_opened);
    CHECK(stats_before.chunks_pending == stats_after.chunks_pending);
    CHECK(stats_before.transfers_posted == stats_after.transfers_posted);
}

static void stamp_source(uint64_t room) {
    for (int layer = 0; layer < LAYERS; layer++)
        for (uint64_t i = 0; i < 4; i++)
            stamp_item(pair.source + layer * PAGES * PAGE, PAGE, source[i], room, (uint64_t)layer, i);
    stamp_item(pair.source + AUX_AT, SLOT, aux, room, 100, 0);
    for (uint64_t i = 0; i < 2; i++) stamp_item(pair.source + STATE_AT, STATE, slots[i], room, 200, i);
    poison(pair.destination, MEMORY);
}

/* The room has succeeded on both sides, and every byte is where it belongs. */
static void expect_landed(uint64_t room) {
    expect_end(pair.decode, room, NIXL_OK, WAIT_MS);
    expect_end(pair.prefill, room, NIXL_OK, WAIT_MS);
    for (int layer = 0; layer < LAYERS; layer++)
        for (uint64_t i = 0; i < 4; i++)
            CHECK(wrong_words(pair.destination + layer * PAGES * PAGE, PAGE, destination[i], room, (uint64_t)layer,
                              i) == 0);
    CHECK(wrong_words(pair.destination + AUX_AT, SLOT, aux, room, 100, 0) == 0);
    for (uint64_t i = 0; i < 2; i++)
        CHECK(wrong_words(pair.destination + STATE_AT, STATE, slots[i], room, 200, i) == 0);
    CHECK(poll_room(pair.decode, room).num_pages == 4);
    CHECK_OK(nixlkv_release(pair.decode, room));
    CHECK_OK(nixlkv_release(pair.prefill, room));
}

static int32_t call(const void *chunk, void *unused) {
    (void)unused;
    return nixlkv_send_chunk(pair.prefill, chunk);
}

static void undo(void *room) {
    CHECK_OK(nixlkv_abort(pair.prefill, *(uint64_t *)room, NULL));
    CHECK_OK(nixlkv_release(pair.prefill, *(uint64_t *)room));
}

static void arguments(void) {
    uint64_t room = next_room++, space[32];
    nixlkv_state_indices_t indices = state();
    nixlkv_chunk_t chunk = chunk_of(room, source, 2, 0, 0);
    CHECK_BAD_HANDLES(nixlkv_send_chunk(engine, &chunk));
    CHECK_SAYS(nixlkv_send_chunk(pair.decode, &chunk), NIXL_ERR_ROLE, "decode");
    try_read_sizes(&chunk, sizeof chunk, call, undo, &room, "chunk");

    const uint32_t flags[] = {4, 8, 255, 0x80000000u, UINT32_MAX};
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++) {
        chunk.flags = flags[i];
        expect_refused(&chunk, NIXL_ERR_INVALID_ARGUMENT, "flags");
    }
    chunk.flags = 0;
    const uint64_t huge[] = {UINT64_MAX, UINT64_MAX / 4 + 2, (uint64_t)1 << 62, (uint64_t)1 << 61};
    for (size_t i = 0; i < sizeof huge / sizeof huge[0]; i++) {
        char say[32];
        snprintf(say, sizeof say, "%" PRIu64 " entries", huge[i]);
        chunk.num_pages = huge[i];
        expect_refused(&chunk, NIXL_ERR_INVALID_ARGUMENT, say);
        chunk.num_pages = 2;
        chunk.states = &indices;
        chunk.num_states = huge[i];
        expect_refused(&chunk, NIXL_ERR_INVALID_ARGUMENT, say);
        chunk.num_states = 1;
        indices.num_indices = huge[i];
        expect_refused(&chunk, NIXL_ERR_INVALID_ARGUMENT, say);
        indices = state();
        chunk.num_states = 0;
    }
    chunk.pages = NULL;
    expect_refused(&chunk, NIXL_ERR_INVALID_ARGUMENT, "pages is NULL");
    chunk.pages = (const int32_t *)(const void *)((const char *)space + 2);
    expect_refused(&chunk, NIXL_ERR_INVALID_ARGUMENT, "pages");
    chunk.pages = source;
    chunk.aux_index = (const int32_t *)(const void *)((const char *)space + 2);
    expect_refused(&chunk, NIXL_ERR_INVALID_ARGUMENT, "aux_index");
    chunk.aux_index = NULL;
    chunk.states = NULL;
    chunk.num_states = 1;
    expect_refused(&chunk, NIXL_ERR_INVALID_ARGUMENT, "states is NULL");
    chunk.states = (const nixlkv_state_indices_t *)(const void *)((const char *)space + 4);
    expect_refused(&chunk, NIXL_ERR_INVALID_ARGUMENT, "states");
    chunk.states = &indices;
    indices.struct_size = 4;
    expect_refused(&chunk, NIXL_ERR_STRUCT_SIZE, "states");
    indices = state();
    indices.indices = NULL;
    expect_refused(&chunk, NIXL_ERR_INVALID_ARGUMENT, "state indices is NULL");
    chunk.num_states = 0;
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    undo(&room);
}

static void indices_out_of_range(void) {
    const uint64_t room = granted_room();
    nixlkv_state_indices_t indices = state();
    nixlkv_chunk_t chunk = last_chunk(room, 4, 0, &indices);
    const int32_t far[] = {PAGES, -1, INT32_MIN, INT32_MAX};
    char say[64];
    for (size_t i = 0; i < sizeof far / sizeof far[0]; i++) {
        const int32_t list[4] = {3, far[i], 1, 12}, slot = far[i] == PAGES ? SLOTS : far[i], pair_of[2] = {slot, 0};
        chunk.pages = list;
        snprintf(say, sizeof say, "pages[1] = %" PRId32 " is not one of the 16 from 0 on", far[i]);
        expect_refused(&chunk, NIXL_ERR_PAGE_OUT_OF_RANGE, say);
        chunk.pages = source;
        chunk.aux_index = &slot;
        snprintf(say, sizeof say, "= %" PRId32 " is not one of the 4 from 0 on", slot);
        expect_refused(&chunk, NIXL_ERR_AUX_OUT_OF_RANGE, say);
        chunk.aux_index = &aux;
        indices.indices = pair_of;
        expect_refused(&chunk, NIXL_ERR_STATE_OUT_OF_RANGE, say);
        indices.indices = slots;
    }
    stamp_source(room);
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    expect_landed(room);
}

/* A10: the last chunk needs all of the room's pages sent; a page is sent once. */
static void a10_pages_of_the_room(void) {
    const uint64_t room = granted_room();
    nixlkv_state_indices_t indices = state();
    stamp_source(room);
    nixlkv_chunk_t chunk = chunk_of(room, source, 3, 0, 0);
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    /* From here on nothing changes but by our own calls. */
    const uint64_t until = now_ms() + WAIT_MS;
    while (poll_room(pair.prefill, room).num_chunks != 1 && now_ms() < until) sleep_ms(1);
    CHECK(poll_room(pair.prefill, room).num_chunks == 1);
    chunk = last_chunk(room, 0, 4, &indices);
    expect_refused(&chunk, NIXL_ERR_PAGES_INCOMPLETE, "position 3 of 4");
    chunk.pages = NULL;
    expect_refused(&chunk, NIXL_ERR_PAGES_INCOMPLETE, "position 3 of 4");
    chunk = last_chunk(room, 1, 2, &indices);
    expect_refused(&chunk, NIXL_ERR_PAGE_OVERLAP, "positions 2..3");
    chunk = chunk_of(room, source, 4, 0, 0);
    expect_refused(&chunk, NIXL_ERR_PAGE_OVERLAP, "positions 0..4");
    chunk = chunk_of(room, source, 1, 4, 0);
    expect_refused(&chunk, NIXL_ERR_PAGE_COUNT, "ends at position 5, peer 1 granted 4 pages");
    chunk.page_offset = UINT64_MAX;
    expect_refused(&chunk, NIXL_ERR_PAGE_COUNT, "18446744073709551615");
    chunk.page_offset = UINT64_MAX - 1;
    expect_refused(&chunk, NIXL_ERR_PAGE_COUNT, "granted 4 pages");
    chunk = chunk_of(room, source, 0, 3, 0);
    expect_refused(&chunk, NIXL_ERR_CHUNK_EMPTY, "chunk 1");
    chunk = last_chunk(room, 1, 3, &indices);
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    const int32_t sent = nixlkv_send_chunk(pair.prefill, &chunk);
    /* After the last: the room has succeeded meanwhile, or is about to. */
    CHECK(sent == NIXL_ERR_CHUNK_AFTER_LAST || sent == NIXL_ERR_ROOM_ENDED);
    expect_landed(room);
}

static void after_the_last(void) {
    /* Without a grant the room cannot end, so nothing but the last chunk stands in the way. */
    const uint64_t room = next_room++;
    nixlkv_state_indices_t indices = state();
    nixlkv_chunk_t chunk = last_chunk(room, 4, 0, &indices);
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    expect_refused(&chunk, NIXL_ERR_CHUNK_AFTER_LAST, "the last chunk was chunk 0");
    chunk = chunk_of(room, source, 1, 4, 0);
    expect_refused(&chunk, NIXL_ERR_CHUNK_AFTER_LAST, "the last chunk was chunk 0");
    CHECK_OK(nixlkv_abort(pair.prefill, room, NULL));
    expect_refused(&chunk, NIXL_ERR_ROOM_ENDED, "has failed");
    CHECK_OK(nixlkv_release(pair.prefill, room));
    expect_transfer(&pair, next_room++, 3);
}

static void aux_and_state_of_the_last_chunk(void) {
    uint64_t room = granted_room();
    nixlkv_state_indices_t groups[2] = {state(), state()};
    stamp_source(room);
    nixlkv_chunk_t chunk = last_chunk(room, 4, 0, groups);
    chunk.flags = 0;
    expect_refused(&chunk, NIXL_ERR_AUX_UNEXPECTED, "last chunk only");
    chunk.aux_index = NULL;
    expect_refused(&chunk, NIXL_ERR_STATE_UNEXPECTED, "last chunk only");
    chunk.flags = NIXLKV_CHUNK_LAST;
    expect_refused(&chunk, NIXL_ERR_AUX_MISSING, "no aux index");
    chunk.flags = NIXLKV_CHUNK_LAST | NIXLKV_CHUNK_NO_AUX;
    expect_refused(&chunk, NIXL_ERR_AUX_MISSING, "expects aux from us");
    chunk.aux_index = &aux;
    expect_refused(&chunk, NIXL_ERR_AUX_UNEXPECTED, "NIXLKV_CHUNK_NO_AUX");
    chunk.flags = NIXLKV_CHUNK_LAST;
    chunk.num_states = 0;
    expect_refused(&chunk, NIXL_ERR_STATE_MISSING, "2 slots of state group 7");
    chunk.num_states = 1;
    groups[0].num_indices = 1;
    expect_refused(&chunk, NIXL_ERR_STATE_COUNT, "1 indices sent, 2 granted");
    groups[0].num_indices = 0;
    expect_refused(&chunk, NIXL_ERR_STATE_COUNT, "0 indices sent, 2 granted");
    groups[0] = state();
    groups[0].group = 1;
    expect_refused(&chunk, NIXL_ERR_STATE_UNEXPECTED, "group 1");
    groups[0] = state();
    chunk.num_states = 2;
    expect_refused(&chunk, NIXL_ERR_STATE_UNEXPECTED, "group 7 is listed twice");
    chunk.num_states = 1;
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    expect_landed(room);

    /* Before the grant: what our own registrations tell is checked at once. */
    room = next_room++;
    chunk = chunk_of(room, source, 4, 0, NIXLKV_CHUNK_LAST);
    expect_refused(&chunk, NIXL_ERR_AUX_MISSING, "no aux index");
    CHECK_STATUS(nixlkv_release(pair.prefill, room), NIXL_ERR_ROOM_UNKNOWN);
    chunk = chunk_of(room, source, 1, 3, NIXLKV_CHUNK_LAST);
    chunk.aux_index = &aux;
    expect_refused(&chunk, NIXL_ERR_PAGES_INCOMPLETE, "position 0");
    expect_transfer(&pair, room, 3);
}

/* A receiver that granted no aux and no state: then none is needed, and state is refused. */
static void nothing_but_pages_was_granted(void) {
    const uint64_t room = next_room++;
    nixlkv_recv_params_t params = recv_params(room, &pair.prefill_peer, 1, destination, 4);
    CHECK_OK(nixlkv_recv(pair.decode, &params));
    await_state(pair.prefill, room, NIXLKV_ROOM_WAITING_FOR_INPUT);
    nixlkv_state_indices_t indices = state();
    nixlkv_chunk_t chunk = chunk_of(room, source, 4, 0, NIXLKV_CHUNK_LAST);
    chunk.states = &indices;
    chunk.num_states = 1;
    expect_refused(&chunk, NIXL_ERR_STATE_UNEXPECTED, "granted no slots of state group 7");
    chunk.num_states = 0;
    CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
    expect_end(pair.decode, room, NIXL_OK, WAIT_MS);
    expect_end(pair.prefill, room, NIXL_OK, WAIT_MS);
    CHECK_OK(nixlkv_release(pair.decode, room));
    CHECK_OK(nixlkv_release(pair.prefill, room));
}

/* What only the grant can tell, when chunks came first: the room fails on both sides, with the same code. */
static void d_the_grant_contradicts_what_waits(void) {
    const struct {
        uint64_t num_pages, num_slots;
        int last, no_aux, code;
    } cases[] = {{3, 2, 0, 0, NIXL_ERR_PAGE_COUNT},   {3, 2, 1, 0, NIXL_ERR_PAGE_COUNT},
                 {5, 2, 1, 0, NIXL_ERR_PAGE_COUNT},   {4, 1, 1, 0, NIXL_ERR_STATE_COUNT},
                 {4, 0, 1, 0, NIXL_ERR_STATE_MISSING}, {4, 2, 1, 1, NIXL_ERR_AUX_MISSING}};
    static const int32_t five[5] = {8, 2, 3, 0, 5};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const uint64_t room = next_room++;
        nixlkv_state_indices_t indices = state(), wanted = state();
        nixlkv_chunk_t chunk = chunk_of(room, source, 4, 0, 0);
        if (cases[i].last) {
            chunk = last_chunk(room, 4, 0, &indices);
            if (cases[i].no_aux) {
                chunk.flags |= NIXLKV_CHUNK_NO_AUX;
                chunk.aux_index = NULL;
            }
            indices.num_indices = cases[i].num_slots;
            if (cases[i].num_slots == 0) chunk.num_states = 0;
        }
        CHECK_OK(nixlkv_send_chunk(pair.prefill, &chunk));
        nixlkv_recv_params_t params = recv_params(room, &pair.prefill_peer, 1, five, cases[i].num_pages);
        params.aux_index = &aux;
        params.states = &wanted;
        params.num_states = 1;
        CHECK_OK(nixlkv_recv(pair.decode, &params));
        expect_end(pair.prefill, room, cases[i].code, WAIT_MS);
        expect_end(pair.decode, room, cases[i].code, WAIT_MS);
        CHECK(strcmp(poll_room(pair.prefill, room).error_text, "") != 0);
        CHECK(strcmp(poll_room(pair.decode, room).error_text, "") != 0);
        CHECK(stats_of(pair.prefill).chunks_pending == 0);
        CHECK_OK(nixlkv_release(pair.decode, room));
        CHECK_OK(nixlkv_release(pair.prefill, room));
        expect_transfer(&pair, room, 3);
    }
}

/* D8: the room is a receiver's here. The queue and the number of rooms are bounded. */
static void d8_limits(void) {
    nixlkv_engine_config_t config = engine_config(NIXLKV_ROLE_BOTH);
    config.queue_depth = 3;
    config.max_rooms = 2;
    nixlkv_engine_config_t other = engine_config(NIXLKV_ROLE_BOTH);
    pair_t both = make_pair_of(&config, &other, WITH_KV);
    const nixlkv_recv_params_t params = recv_params(7, &both.decode_peer, 1, destination, 1);
    CHECK_OK(nixlkv_recv(both.prefill, &params));
    nixlkv_chunk_t chunk = chunk_of(7, source, 1, 0, 0);
    CHECK_SAYS(nixlkv_send_chunk(both.prefill, &chunk), NIXL_ERR_ROOM_IN_USE, "room 7");
    for (uint64_t i = 0; i < 3; i++) {
        chunk = chunk_of(8, source, 1, i, 0);
        CHECK_OK(nixlkv_send_chunk(both.prefill, &chunk));
    }
    chunk.page_offset = 3;
    CHECK_SAYS(nixlkv_send_chunk(both.prefill, &chunk), NIXL_ERR_QUEUE_FULL, "the queue depth is 3");
    CHECK(nixlkv_status_retryable(NIXL_ERR_QUEUE_FULL) == 1);
    CHECK(poll_room(both.prefill, 8).num_pending_chunks == 3);
    CHECK_OK(nixlkv_abort(both.prefill, 8, NULL));
    chunk.room = 9;
    CHECK_SAYS(nixlkv_send_chunk(both.prefill, &chunk), NIXL_ERR_TOO_MANY_ROOMS, "the limit is 2");
    CHECK_OK(nixlkv_release(both.prefill, 8));
    CHECK_OK(nixlkv_send_chunk(both.prefill, &chunk));
    destroy_pair(&both);
}

static void without_aux_regions(void) {
    pair_t plain = make_pair(WITH_KV);
    nixlkv_chunk_t chunk = chunk_of(1, source, 1, 0, NIXLKV_CHUNK_LAST);
    chunk.aux_index = &aux;
    CHECK_SAYS(nixlkv_send_chunk(plain.prefill, &chunk), NIXL_ERR_AUX_UNEXPECTED, "no aux region is registered");
    chunk.aux_index = NULL;
    nixlkv_state_indices_t indices = state();
    chunk.states = &indices;
    chunk.num_states = 1;
    CHECK_SAYS(nixlkv_send_chunk(plain.prefill, &chunk), NIXL_ERR_STATE_UNEXPECTED, "group 7");
    chunk.num_states = 0;
    CHECK_OK(nixlkv_send_chunk(plain.prefill, &chunk));
    destroy_pair(&plain);
}

int main(void) {
    pair = make_pair(WITH_ALL);
    arguments();
    indices_out_of_range();
    a10_pages_of_the_room();
    after_the_last();
    aux_and_state_of_the_last_chunk();
    nothing_but_pages_was_granted();
    d_the_grant_contradicts_what_waits();
    d8_limits();
    without_aux_regions();
    expect_transfer(&pair, next_room, 3);
    destroy_pair(&pair);
    return 0;
}
