/* nixlkv_recv: every refusal leaves nothing behind, and the corrected call succeeds. */
#include "api.h"

static pair_t pair;

static const int32_t pages[3] = {4, 0, 15};
static const int32_t aux = 2;
static const int32_t slots[2] = {3, 0};

static nixlkv_state_indices_t state(void) {
    nixlkv_state_indices_t indices;
    CHECK_OK(nixlkv_state_indices_init(&indices, sizeof indices));
    indices.group = GROUP;
    indices.indices = slots;
    indices.num_indices = 2;
    return indices;
}

/* A refused call opens nothing and claims nothing. */
static void expect_refused(const nixlkv_recv_params_t *params, int32_t code, const char *say) {
    const nixlkv_stats_t before = stats_of(pair.decode);
    const int32_t status = nixlkv_recv(pair.decode, params);
    if (status != code || strstr(nixlkv_last_error(), say) == NULL)
        FAIL("expected %s saying \"%s\", got %s: %s", nixlkv_status_name(code), say, nixlkv_status_name(status),
             nixlkv_last_error());
    const nixlkv_stats_t after = stats_of(pair.decode);
    CHECK(before.rooms_opened == after.rooms_opened && before.rooms_active == after.rooms_active);
}

/* Ends the room at both sides, so that its number and pages can be used again. */
static void close_room(uint64_t room) {
    CHECK_OK(nixlkv_abort(pair.decode, room, "the test has seen enough"));
    CHECK_OK(nixlkv_wait(pair.decode, &room, 1, NIXLKV_WAIT_QUIESCED, WAIT_MS));
    CHECK_OK(nixlkv_release(pair.decode, room));
}

static void expect_accepted(const nixlkv_recv_params_t *params) {
    CHECK_OK(nixlkv_recv(pair.decode, params));
    close_room(params->room);
}

static int32_t call(const void *params, void *unused) {
    (void)unused;
    return nixlkv_recv(pair.decode, params);
}

static void undo(void *unused) {
    (void)unused;
    close_room(1);
}

static void arguments(void) {
    nixlkv_recv_params_t params = recv_params(1, &pair.prefill_peer, 1, pages, 3);
    nixlkv_state_indices_t indices = state();
    uint64_t space[32];
    CHECK_BAD_HANDLES(nixlkv_recv(engine, &params));
    CHECK_SAYS(nixlkv_recv(pair.prefill, &params), NIXL_ERR_ROLE, "prefill");
    try_read_sizes(&params, sizeof params, call, undo, NULL, "params");
    params.reserved = 1;
    expect_refused(&params, NIXL_ERR_INVALID_ARGUMENT, "reserved");
    params.reserved = 0;

    const uint64_t huge[] = {UINT64_MAX, UINT64_MAX / 4 + 2, UINT64_MAX / 8 + 2, (uint64_t)1 << 62, (uint64_t)1 << 61};
    for (size_t i = 0; i < sizeof huge / sizeof huge[0]; i++) {
        char say[32];
        snprintf(say, sizeof say, "%" PRIu64 " entries", huge[i]);
        if (huge[i] * 4 / 4 != huge[i] || huge[i] * 4 > INT64_MAX) {
            params.num_pages = huge[i];
            expect_refused(&params, NIXL_ERR_INVALID_ARGUMENT, say);
            params.num_pages = 3;
        }
        params.num_senders = huge[i];
        expect_refused(&params, NIXL_ERR_INVALID_ARGUMENT, say);
        params.num_senders = 1;
        params.states = &indices;
        params.num_states = huge[i];
        expect_refused(&params, NIXL_ERR_INVALID_ARGUMENT, say);
        params.num_states = 1;
        indices.num_indices = (uint64_t)1 << 62;
        expect_refused(&params, NIXL_ERR_INVALID_ARGUMENT, "4611686018427387904 entries");
        indices = state();
        params.states = NULL;
        params.num_states = 0;
    }
    params.pages = NULL;
    expect_refused(&params, NIXL_ERR_INVALID_ARGUMENT, "pages is NULL");
    params.pages = (const int32_t *)(const void *)((const char *)space + 2);
    expect_refused(&params, NIXL_ERR_INVALID_ARGUMENT, "pages");
    params.pages = pages;
    params.senders = NULL;
    expect_refused(&params, NIXL_ERR_INVALID_ARGUMENT, "senders is NULL");
    params.num_senders = 0;
    expect_refused(&params, NIXL_ERR_INVALID_ARGUMENT, "no senders");
    params.num_senders = 1;
    params.senders = (const uint64_t *)(const void *)((const char *)space + 4);
    expect_refused(&params, NIXL_ERR_INVALID_ARGUMENT, "senders");
    params.senders = &pair.prefill_peer;
    params.aux_index = (const int32_t *)(const void *)((const char *)space + 1);
    expect_refused(&params, NIXL_ERR_INVALID_ARGUMENT, "aux_index");
    params.aux_index = NULL;
    params.num_states = 1;
    expect_refused(&params, NIXL_ERR_INVALID_ARGUMENT, "states is NULL");
    params.states = (const nixlkv_state_indices_t *)(const void *)((const char *)space + 4);
    expect_refused(&params, NIXL_ERR_INVALID_ARGUMENT, "states");
    params.states = &indices;
    indices.struct_size = sizeof indices - 4;
    expect_refused(&params, NIXL_ERR_STRUCT_SIZE, "states");
    indices.struct_size = 0;
    expect_refused(&params, NIXL_ERR_STRUCT_SIZE, "states");
    indices = state();
    indices.indices = NULL;
    expect_refused(&params, NIXL_ERR_INVALID_ARGUMENT, "state indices is NULL");
    indices.indices = (const int32_t *)(const void *)((const char *)space + 2);
    expect_refused(&params, NIXL_ERR_INVALID_ARGUMENT, "state indices");
    indices = state();
    params.num_receivers = (uint64_t)1 << 32;
    expect_refused(&params, NIXL_ERR_INVALID_ARGUMENT, "num_receivers is 4294967296");
    params.num_receivers = UINT64_MAX;
    expect_refused(&params, NIXL_ERR_INVALID_ARGUMENT, "num_receivers is 18446744073709551615");
    params.num_receivers = 0;
    params.aux_index = &aux;
    params.timeout_ms = UINT64_MAX;
    expect_accepted(&params);
    /* NULL with 0 is an empty list; so is anything with 0. */
    params.pages = NULL;
    params.num_pages = 0;
    params.states = (const nixlkv_state_indices_t *)(const void *)((const char *)space + 4);
    params.num_states = 0;
    expect_accepted(&params);
}

/* A state index list of every size, as entry of the params. */
static int32_t call_with_state(const void *indices, void *params) {
    nixlkv_recv_params_t copy = *(const nixlkv_recv_params_t *)params;
    copy.states = indices;
    copy.num_states = 1;
    return nixlkv_recv(pair.decode, &copy);
}

static void state_struct_sizes(void) {
    nixlkv_recv_params_t params = recv_params(1, &pair.prefill_peer, 1, pages, 3);
    const nixlkv_state_indices_t indices = state();
    try_read_sizes(&indices, sizeof indices, call_with_state, undo, &params, "states");
}

static void indices(void) {
    nixlkv_recv_params_t params = recv_params(1, &pair.prefill_peer, 1, NULL, 3);
    const int32_t far[] = {PAGES, -1, INT32_MIN, INT32_MAX, PAGES + 1};
    char say[64];
    for (size_t i = 0; i < sizeof far / sizeof far[0]; i++) {
        const int32_t list[3] = {1, 2, far[i]};
        params.pages = list;
        snprintf(say, sizeof say, "pages[2] = %" PRId32 " is not one of the 16 from 0 on", far[i]);
        expect_refused(&params, NIXL_ERR_PAGE_OUT_OF_RANGE, say);
    }
    const int32_t twice[3] = {7, 1, 7};
    params.pages = twice;
    expect_refused(&params, NIXL_ERR_PAGE_DUPLICATE, "pages[2] = 7");
    params.pages = pages;
    for (size_t i = 0; i < sizeof far / sizeof far[0]; i++) {
        const int32_t index = far[i] == PAGES ? SLOTS : far[i];
        params.aux_index = &index;
        snprintf(say, sizeof say, "= %" PRId32 " is not one of the 4 from 0 on", index);
        expect_refused(&params, NIXL_ERR_AUX_OUT_OF_RANGE, say);
        params.aux_index = NULL;
        const int32_t list[2] = {0, index};
        nixlkv_state_indices_t in_group = state();
        in_group.indices = list;
        params.states = &in_group;
        params.num_states = 1;
        expect_refused(&params, NIXL_ERR_STATE_OUT_OF_RANGE, say);
        params.num_states = 0;
    }
    nixlkv_state_indices_t groups[2] = {state(), state()};
    params.states = groups;
    params.num_states = 2;
    expect_refused(&params, NIXL_ERR_STATE_UNEXPECTED, "group 7 is listed twice");
    params.num_states = 1;
    groups[0].group = GROUP + 1;
    expect_refused(&params, NIXL_ERR_STATE_UNEXPECTED, "group 8");
    groups[0] = state();
    const int32_t same_slot[2] = {1, 1};
    groups[0].indices = same_slot;
    expect_refused(&params, NIXL_ERR_STATE_IN_USE, "= 1 is listed twice");
    groups[0].indices = slots;
    expect_accepted(&params);
}

static void senders(void) {
    const uint64_t twice[2] = {pair.prefill_peer, pair.prefill_peer}, unknown[2] = {pair.prefill_peer, 12345};
    nixlkv_recv_params_t params = recv_params(1, twice, 2, pages, 3);
    expect_refused(&params, NIXL_ERR_PEER_DUPLICATE, "senders[1]");
    params.senders = unknown;
    expect_refused(&params, NIXL_ERR_PEER_UNKNOWN, "peer 12345");
    params.num_senders = 1;
    params.aux_index = &aux;
    params.aux_sender = 12345;
    expect_refused(&params, NIXL_ERR_PEER_UNKNOWN, "aux_sender 12345");
    params.aux_sender = pair.prefill_peer;
    expect_accepted(&params);
}

/* D8: the number of an open room; and its pages and slots, until it is quiesced. */
static void d8_room_pages_and_slots_in_use(void) {
    nixlkv_state_indices_t in_group = state();
    nixlkv_recv_params_t first = recv_params(1, &pair.prefill_peer, 1, pages, 3);
    first.aux_index = &aux;
    first.states = &in_group;
    first.num_states = 1;
    CHECK_OK(nixlkv_recv(pair.decode, &first));
    const int32_t other_pages[2] = {1, 2}, overlapping[2] = {1, 15}, other_aux = 0, other_slots[1] = {1};
    nixlkv_state_indices_t other_state = state();
    other_state.indices = other_slots;
    other_state.num_indices = 1;
    nixlkv_recv_params_t second = recv_params(1, &pair.prefill_peer, 1, other_pages, 2);
    expect_refused(&second, NIXL_ERR_ROOM_IN_USE, "room 1");
    second.room = 2;
    second.aux_index = &other_aux;
    second.states = &other_state;
    second.num_states = 1;
    second.pages = overlapping;
    expect_refused(&second, NIXL_ERR_PAGE_IN_USE, "page 15");
    second.pages = other_pages;
    second.aux_index = &aux;
    expect_refused(&second, NIXL_ERR_AUX_IN_USE, "aux slot 2");
    second.aux_index = &other_aux;
    second.states = &in_group;
    expect_refused(&second, NIXL_ERR_STATE_IN_USE, "slot 3 of state group 7");
    /* What the refused calls named first was not kept from others. */
    second.states = &other_state;
    CHECK_OK(nixlkv_recv(pair.decode, &second));
    close_room(1);
    second.room = 3;
    second.pages = pages;
    second.num_pages = 3;
    second.aux_index = &aux;
    second.states = &in_group;
    expect_accepted(&second);
    close_room(2);
    /* The engine has a limit of rooms: see main. */
    nixlkv_recv_params_t small = recv_params(0, &pair.prefill_peer, 1, NULL, 0);
    for (small.room = 10; small.room < 14; small.room++) CHECK_OK(nixlkv_recv(pair.decode, &small));
    expect_refused(&small, NIXL_ERR_TOO_MANY_ROOMS, "the limit is 4");
    CHECK(nixlkv_status_retryable(NIXL_ERR_TOO_MANY_ROOMS) == 1);
    for (uint64_t room = 10; room < 14; room++) close_room(room);
    expect_accepted(&small);
}

static void without_aux_and_state(void) {
    pair_t plain = make_pair(WITH_KV);
    nixlkv_recv_params_t params = recv_params(1, &plain.prefill_peer, 1, pages, 3);
    params.aux_index = &aux;
    CHECK_SAYS(nixlkv_recv(plain.decode, &params), NIXL_ERR_AUX_UNEXPECTED, "no aux region is registered");
    params.aux_index = NULL;
    nixlkv_state_indices_t in_group = state();
    params.states = &in_group;
    params.num_states = 1;
    CHECK_SAYS(nixlkv_recv(plain.decode, &params), NIXL_ERR_STATE_UNEXPECTED, "group 7");
    params.num_states = 0;
    CHECK_OK(nixlkv_recv(plain.decode, &params));
    destroy_pair(&plain);
}

int main(void) {
    const nixlkv_engine_config_t prefill = engine_config(NIXLKV_ROLE_PREFILL);
    nixlkv_engine_config_t decode = engine_config(NIXLKV_ROLE_DECODE);
    decode.max_rooms = 4;
    pair = make_pair_of(&prefill, &decode, WITH_ALL);
    arguments();
    state_struct_sizes();
    indices();
    senders();
    d8_room_pages_and_slots_in_use();
    without_aux_and_state();
    expect_transfer(&pair, 99, 3);
    destroy_pair(&pair);
    return 0;
}
