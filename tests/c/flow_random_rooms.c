/* Two processes and many rooms of random shape, several at a time; after every room every item of the receiver's
 * memory is looked at. The seed is printed; NIXLKV_SEED and NIXLKV_ROOMS choose another one and longer runs. */
/* timeout: 240 */
#include "test.h"

#include <stdbool.h>

#ifndef ROOMS
#define ROOMS 1000
#endif
#ifndef TLS
#define TLS NULL /* UCX_TLS as a backend parameter */
#endif

enum {
    PAGES = 3072,
    MAX_PAGES = 512,
    MAX_CHUNKS = 16,
    WINDOW = 12,
    SLOTS = 16,
    MAX_STATES = 3,
    GROUPS = 2,
    REGIONS = 10,
    GUARD = 4096,
};

/* Every region has items of its own length; aux has two arrays, one state group has two tensors. */
static const struct {
    uint32_t kind, layer_id, part, group, item_len;
    int32_t num_items;
} table[REGIONS] = {
    {NIXLKV_REGION_KV, 0, NIXLKV_PART_K, 0, 128, PAGES},    {NIXLKV_REGION_KV, 0, NIXLKV_PART_V, 0, 64, PAGES},
    {NIXLKV_REGION_KV, 7, NIXLKV_PART_K, 0, 128, PAGES},    {NIXLKV_REGION_KV, 7, NIXLKV_PART_V, 0, 64, PAGES},
    {NIXLKV_REGION_KV, 3, NIXLKV_PART_FUSED, 0, 24, PAGES}, {NIXLKV_REGION_AUX, 0, 0, 0, 512, SLOTS},
    {NIXLKV_REGION_AUX, 1, 0, 0, 8, SLOTS},                 {NIXLKV_REGION_STATE, 0, 0, 4, 1024, 3 * SLOTS},
    {NIXLKV_REGION_STATE, 1, 0, 4, 40, 3 * SLOTS},          {NIXLKV_REGION_STATE, 0, 0, 9, 4096, 3 * SLOTS},
};
static const uint32_t groups[GROUPS] = {4, 9};

static uint64_t seed, num_rooms;

static uint64_t env_or(const char *name, uint64_t fallback) {
    const char *text = getenv(name);
    return text != NULL ? strtoull(text, NULL, 0) : fallback;
}

/* ---- what a room looks like: both sides work it out from the seed and its number ---- */

typedef struct shape {
    uint64_t id;
    int32_t num_pages, num_chunks, num_states[GROUPS];
    int32_t start[MAX_CHUNKS], count[MAX_CHUNKS]; /* in the order of sending */
    bool aux;
    bool early;        /* the sender does not wait for the grant */
    bool scattered[2]; /* at the sender, at the receiver */
} shape_t;

static uint64_t draw(uint64_t *state, uint64_t below) {
    *state = mix(*state + 1);
    return *state % below;
}

static shape_t shape_of(uint64_t number) {
    uint64_t random = mix(seed ^ mix(number));
    shape_t s = {.id = mix(random ^ 0x600d)};
    /* Small ones, full prefix hits and the largest come often enough to meet each other. */
    const uint64_t kind = draw(&random, 8);
    if (kind == 0) s.num_pages = 0;
    else if (kind == 1) s.num_pages = 1 + (int32_t)draw(&random, 4);
    else if (kind == 2) s.num_pages = MAX_PAGES - (int32_t)draw(&random, 2);
    else s.num_pages = (int32_t)draw(&random, MAX_PAGES + 1);
    s.aux = draw(&random, 3) != 0;
    for (int i = 0; i < GROUPS; i++)
        s.num_states[i] = draw(&random, 2) == 0 ? 0 : (int32_t)draw(&random, MAX_STATES + 1);
    s.early = draw(&random, 2) != 0;
    for (int i = 0; i < 2; i++) s.scattered[i] = draw(&random, 2) != 0;

    const int32_t most = s.num_pages < MAX_CHUNKS ? s.num_pages : MAX_CHUNKS;
    int32_t parts = most == 0 ? 0 : 1 + (int32_t)draw(&random, (uint64_t)most);
    /* Now and then the last chunk has no pages: everything has been sent before it. */
    const bool empty_last = parts == 0 || (parts < MAX_CHUNKS && draw(&random, 4) == 0);
    int32_t order[MAX_CHUNKS];
    shuffle(order, parts, draw(&random, UINT64_MAX));
    int32_t left = s.num_pages, start = 0;
    for (int32_t i = 0; i < parts; i++) {
        const int32_t after = parts - 1 - i;
        const int32_t count = after == 0 ? left : 1 + (int32_t)draw(&random, (uint64_t)(left - after));
        s.start[order[i]] = start;
        s.count[order[i]] = count;
        start += count;
        left -= count;
    }
    s.num_chunks = parts;
    if (empty_last) {
        s.start[parts] = parts == 0 ? 0 : (int32_t)draw(&random, (uint64_t)s.num_pages + 1);
        s.count[parts] = 0;
        s.num_chunks++;
    }
    return s;
}

/* ---- memory of one side ---- */

typedef struct room {
    bool open;
    shape_t shape;
    uint64_t number;
    int32_t chunks_sent;
    int32_t pages[MAX_PAGES], states[GROUPS][MAX_STATES], aux;
} room_t;

static char *memory[REGIONS];
static bool page_taken[PAGES], aux_taken[SLOTS], state_taken[GROUPS][3 * SLOTS];
static room_t rooms[WINDOW];

static size_t region_bytes(int r) { return (size_t)table[r].item_len * (size_t)table[r].num_items; }

static int group_of(int r) { return table[r].group == groups[0] ? 0 : 1; }

/* Whether the item belongs to an open room. */
static bool taken(int r, int32_t item) {
    if (table[r].kind == NIXLKV_REGION_KV) return page_taken[item];
    if (table[r].kind == NIXLKV_REGION_AUX) return aux_taken[item];
    return state_taken[group_of(r)][item];
}

static void map_and_register(nixlkv_engine_t *engine) {
    nixlkv_region_t regions[REGIONS];
    for (int r = 0; r < REGIONS; r++) {
        char *base = map_bytes(region_bytes(r) + 2 * GUARD);
        poison(base, region_bytes(r) + 2 * GUARD);
        memory[r] = base + GUARD;
        regions[r] = region(table[r].kind, memory[r], region_bytes(r), table[r].item_len);
        regions[r].layer_id = table[r].layer_id;
        regions[r].part = table[r].part;
        regions[r].group = table[r].group;
    }
    CHECK_OK(nixlkv_register(engine, regions, REGIONS, NULL));
}

/* Takes `count` free entries of a list, in one run if asked for and possible. */
static bool take(bool *flags, int32_t len, int32_t count, bool scattered, uint64_t random, int32_t *out) {
    int32_t num_free = 0;
    for (int32_t i = 0; i < len; i++) num_free += !flags[i];
    if (num_free < count) return false;
    int32_t found = 0;
    if (!scattered) {
        const int32_t first = (int32_t)(random % (uint64_t)len);
        for (int32_t k = 0; k < len && found < count; k++) {
            const int32_t i = (first + k) % len;
            if (i == 0 || flags[i]) found = 0;
            if (!flags[i]) out[found++] = i;
        }
    }
    if (found < count) {
        found = 0;
        while (found < count) {
            int32_t i = (int32_t)((random = mix(random)) % (uint64_t)len);
            while (flags[i]) i = (i + 1) % len;
            flags[i] = true;
            out[found++] = i;
        }
    }
    for (int32_t i = 0; i < count; i++) flags[out[i]] = true;
    return true;
}

static void drop(bool *flags, const int32_t *list, int32_t count) {
    for (int32_t i = 0; i < count; i++) flags[list[i]] = false;
}

/* Takes a room's memory, or nothing. */
static bool take_room(room_t *room, int side) {
    const shape_t *s = &room->shape;
    const uint64_t random = mix(s->id + (uint64_t)side);
    if (!take(page_taken, PAGES, s->num_pages, s->scattered[side], random, room->pages)) return false;
    if (!take(aux_taken, SLOTS, s->aux, true, random, &room->aux)) {
        drop(page_taken, room->pages, s->num_pages);
        return false;
    }
    for (int i = 0; i < GROUPS; i++)
        CHECK(take(state_taken[i], 3 * SLOTS, s->num_states[i], true, mix(random + (uint64_t)i), room->states[i]));
    return true;
}

static void drop_room(room_t *room) {
    drop(page_taken, room->pages, room->shape.num_pages);
    drop(aux_taken, &room->aux, room->shape.aux);
    for (int i = 0; i < GROUPS; i++) drop(state_taken[i], room->states[i], room->shape.num_states[i]);
    room->open = false;
}

/* The items of one region that belong to the room: their number, and where their list is. */
static int32_t items_of(const room_t *room, int r, const int32_t **list) {
    switch (table[r].kind) {
    case NIXLKV_REGION_KV: *list = room->pages; return room->shape.num_pages;
    case NIXLKV_REGION_AUX: *list = &room->aux; return room->shape.aux;
    default: *list = room->states[group_of(r)]; return room->shape.num_states[group_of(r)];
    }
}

static void poison_room(const room_t *room) {
    for (int r = 0; r < REGIONS; r++) {
        const int32_t *list;
        const int32_t count = items_of(room, r, &list);
        for (int32_t i = 0; i < count; i++) poison(memory[r] + (size_t)list[i] * table[r].item_len, table[r].item_len);
    }
}

/* Writes what the room's chunk sends: its pages, and with the last one aux and state. */
static void stamp_chunk(const room_t *room, int32_t start, int32_t count, bool last) {
    for (int r = 0; r < REGIONS; r++) {
        const int32_t *list;
        int32_t from = start, to = start + count;
        const int32_t all = items_of(room, r, &list);
        if (table[r].kind != NIXLKV_REGION_KV) {
            from = 0;
            to = last ? all : 0;
        }
        for (int32_t i = from; i < to; i++)
            stamp_item(memory[r], table[r].item_len, list[i], room->shape.id, (uint64_t)r, (uint64_t)i);
    }
}

static void check_room(const room_t *room) {
    for (int r = 0; r < REGIONS; r++) {
        const int32_t *list;
        const int32_t count = items_of(room, r, &list);
        for (int32_t i = 0; i < count; i++) {
            const uint64_t wrong =
                wrong_words(memory[r], table[r].item_len, list[i], room->shape.id, (uint64_t)r, (uint64_t)i);
            if (wrong != 0)
                FAIL("seed %" PRIu64 ", room %" PRIu64 ": region %d, position %d of %d: %" PRIu64 " words are wrong",
                     seed, room->number, r, i, count, wrong);
        }
    }
}

/* Nothing outside the open rooms has been written. */
static void check_rest(uint64_t number) {
    for (int r = 0; r < REGIONS; r++) {
        for (int32_t item = 0; item < table[r].num_items; item++)
            if (!taken(r, item) && unpoisoned_words(memory[r], table[r].item_len, item) != 0)
                FAIL("seed %" PRIu64 ": region %d, item %d, of no room, was written; last ended room %" PRIu64, seed, r,
                     item, number);
        CHECK(unpoisoned_words(memory[r] - GUARD, GUARD, 0) == 0);
        CHECK(unpoisoned_words(memory[r] + region_bytes(r), GUARD, 0) == 0);
    }
}

static uint64_t bytes_of(const room_t *room) {
    uint64_t bytes = 0;
    for (int r = 0; r < REGIONS; r++) {
        const int32_t *list;
        bytes += (uint64_t)items_of(room, r, &list) * table[r].item_len;
    }
    return bytes;
}

static uint32_t state_lists(const room_t *room, nixlkv_state_indices_t *lists) {
    uint32_t used = 0;
    for (int i = 0; i < GROUPS; i++) {
        if (room->shape.num_states[i] == 0) continue;
        CHECK_OK(nixlkv_state_indices_init(&lists[used], sizeof lists[used]));
        lists[used].group = groups[i];
        lists[used].indices = room->states[i];
        lists[used].num_indices = (uint64_t)room->shape.num_states[i];
        used++;
    }
    return used;
}

/* ---- the two sides ---- */

static nixlkv_engine_t *engine;
static uint64_t peer;

static void start(int side, int fd) {
    nixlkv_engine_config_t config = engine_config(side == 0 ? NIXLKV_ROLE_PREFILL : NIXLKV_ROLE_DECODE);
    const nixlkv_param_t tls = {"UCX_TLS", TLS};
    if (tls.value != NULL) {
        config.backend_params = &tls;
        config.num_backend_params = 1;
    }
    CHECK_OK(nixlkv_engine_create(&config, &engine));
    map_and_register(engine);
    peer = exchange_and_connect(engine, fd);
}

static void send_next(room_t *room) {
    const shape_t *s = &room->shape;
    const int32_t k = room->chunks_sent;
    const bool last = k + 1 == s->num_chunks;
    stamp_chunk(room, s->start[k], s->count[k], last);
    nixlkv_chunk_t chunk = chunk_of(s->id, room->pages + s->start[k], (uint64_t)s->count[k], (uint64_t)s->start[k],
                                    last ? NIXLKV_CHUNK_LAST : 0);
    nixlkv_state_indices_t lists[GROUPS];
    if (last) {
        chunk.states = lists;
        chunk.num_states = state_lists(room, lists);
        if (s->aux) chunk.aux_index = &room->aux;
        else if (s->early) chunk.flags |= NIXLKV_CHUNK_NO_AUX;
    }
    CHECK_OK(nixlkv_send_chunk(engine, &chunk));
    room->chunks_sent++;
}

static bool granted(uint64_t id) {
    nixlkv_room_status_t status;
    CHECK_OK(nixlkv_room_status_init(&status, sizeof status));
    const int32_t polled = nixlkv_poll(engine, id, &status);
    if (polled == NIXL_ERR_ROOM_UNKNOWN) return false;
    CHECK_OK(polled);
    return status.state != NIXLKV_ROOM_BOOTSTRAPPING;
}

static void grant(const room_t *room) {
    nixlkv_recv_params_t params = recv_params(room->shape.id, &peer, 1, room->pages, (uint64_t)room->shape.num_pages);
    nixlkv_state_indices_t lists[GROUPS];
    params.states = lists;
    params.num_states = state_lists(room, lists);
    if (room->shape.aux) params.aux_index = &room->aux;
    CHECK_OK(nixlkv_recv(engine, &params));
}

/* True when the room has ended, well, and its memory has been taken back. */
static bool finished(room_t *room, int side) {
    const nixlkv_room_status_t status = poll_room(engine, room->shape.id);
    if (status.state == NIXLKV_ROOM_FAILED)
        FAIL("seed %" PRIu64 ", room %" PRIu64 " at %s failed: %s (%s)", seed, room->number,
             side ? "decode" : "prefill", nixlkv_status_name(status.error), status.error_text);
    if (status.state != NIXLKV_ROOM_SUCCESS) return false;
    CHECK(status.quiesced == 1 && status.error == NIXL_OK);
    if (side == 1) {
        check_room(room);
        CHECK(status.num_pending_senders == 0);
    } else {
        CHECK(status.num_pending_chunks == 0);
    }
    CHECK(status.num_chunks == (uint64_t)room->shape.num_chunks && status.num_pages == (uint64_t)room->shape.num_pages);
    CHECK(status.num_bytes == bytes_of(room));
    CHECK_OK(nixlkv_release(engine, room->shape.id));
    poison_room(room);
    drop_room(room);
    if (side == 1) check_rest(room->number);
    return true;
}

static void run(int side, int fd) {
    start(side, fd);
    uint64_t next = 0, num_finished = 0, random = mix(seed + (uint64_t)side), progress = now_ms();
    while (num_finished < num_rooms) {
        bool busy = false;
        for (int i = 0; i < WINDOW; i++) {
            room_t *room = &rooms[i];
            if (!room->open && next < num_rooms) {
                room->shape = shape_of(next);
                if (!take_room(room, side)) continue;
                room->number = next++;
                room->chunks_sent = 0;
                room->open = busy = true;
                if (side == 1) {
                    if (draw(&random, 4) == 0) sleep_ms((unsigned)draw(&random, 3));
                    grant(room);
                }
            } else if (room->open && side == 0 && room->chunks_sent < room->shape.num_chunks) {
                if (room->chunks_sent == 0 && !room->shape.early && !granted(room->shape.id)) continue;
                send_next(room);
                busy = true;
            } else if (room->open && finished(room, side)) {
                num_finished++;
                busy = true;
            }
        }
        if (busy) progress = now_ms();
        else sleep_ms(1);
        if (now_ms() - progress > 60000)
            FAIL("seed %" PRIu64 ": nothing happened for a minute at %s, after %" PRIu64 " rooms", seed,
                 side ? "decode" : "prefill", num_finished);
    }
    check_rest(num_rooms);

    nixlkv_stats_t stats;
    CHECK_OK(nixlkv_stats_init(&stats, sizeof stats));
    CHECK_OK(nixlkv_stats(engine, &stats));
    CHECK(stats.rooms_opened == num_rooms && stats.rooms_succeeded == num_rooms && stats.rooms_failed == 0);
    CHECK(stats.rooms_active == 0 && stats.rooms_unquiesced == 0 && stats.chunks_pending == 0);
    CHECK(stats.transfers_in_flight == 0 && stats.transfers_failed == 0);
    CHECK(stats.messages_malformed == 0);
    send_u64(fd, num_finished);
    CHECK(recv_u64(fd) == num_rooms);
    CHECK_OK(nixlkv_engine_shutdown(engine, 10000));
    nixlkv_engine_destroy(engine);
}

static int prefill(int fd) {
    run(0, fd);
    return 0;
}

int main(void) {
    seed = env_or("NIXLKV_SEED", now_ns());
    num_rooms = env_or("NIXLKV_ROOMS", ROOMS);
    printf("NIXLKV_SEED=%" PRIu64 " NIXLKV_ROOMS=%" PRIu64 "\n", seed, num_rooms);
    fflush(stdout);
    const child_t child = spawn(prefill);
    run(1, child.fd);
    expect_child_ok(child);
    return 0;
}
