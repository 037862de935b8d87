/* A foreign NIXL agent talks to an engine: as a stranger, and as a peer that the engine has connected, with messages
 * made by hand that are broken, or well-formed lies, or far too many. The engine stays up, counts them by reason, grows
 * by little, writes nowhere but where its peers' regions are; and a good peer's rooms never notice. */
/* timeout: 240 */
#include "foreign.h"

enum { PAGES = 64, FLOOD = 1000000, CLAIMED = 1 << 24, NUM_FRESH = 3 };

#define MIB ((uint64_t)1 << 20)

static const char *const TEXT = "words of a peer";

static node_t victim, good, fresh[NUM_FRESH];
static uint64_t good_at_victim, victim_at_good, mallory_at_victim;
static foreign_t mallory, greedy;
static foreign_t *speaking; /* the agent that sends, and listens while we wait */

static uint64_t rss_of(const node_t *node) {
    char path[64], line[128];
    snprintf(path, sizeof path, "/proc/%d/statm", (int)node->child.pid);
    FILE *file = fopen(path, "r");
    CHECK(file != NULL && fgets(line, sizeof line, file) != NULL);
    fclose(file);
    unsigned long size = 0, resident = 0;
    CHECK(sscanf(line, "%lu %lu", &size, &resident) == 2);
    return (uint64_t)resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* Waits until the victim has taken in everything that the agent has sent; `received` is its counter from before. */
static nixlkv_stats_t await_received(foreign_t *f, uint64_t received, uint64_t sent) {
    for (const uint64_t start = now_ms();; sleep_ms(1)) {
        foreign_listen(f);
        const nixlkv_stats_t stats = stats_of(&victim);
        if (stats.messages_received >= received + sent) return stats;
        if (now_ms() - start > 60000)
            FAIL("%" PRIu64 " of %" PRIu64 " messages were received", stats.messages_received - received, sent);
    }
}

/* A counter of the victim rises to this or more. Others' messages, such as heartbeats, may raise it too. */
#define AWAIT(condition)                                                                                               \
    do {                                                                                                               \
        for (const uint64_t start_ = now_ms(); !(condition); sleep_ms(1)) {                                            \
            foreign_listen(speaking);                                                                                  \
            if (now_ms() - start_ > 20000) FAIL("still not true: %s", #condition);                                     \
        }                                                                                                              \
    } while (0)

static nixlkv_stats_t stats(void) { return stats_of(&victim); }

/* The good peer's requests come from the pages up to 20 and go to those from 40 on; the foreign agent's lie between. */
static request_t good_request(uint64_t room) {
    request_t r = request_of(room, 20);
    r.from_seed = r.to_seed = 0;
    r.from_base = 0;
    r.to_base = 40;
    r.aux_from = r.state_from = 1;
    r.aux_to = r.state_to = 9;
    return r;
}

/* Each side is sender and receiver at the same time: beside what has come lies what it sent, 20 pages in each of two
 * layers, aux and state. */
static void expect_good(const node_t *node, uint64_t room) {
    const request_t r = good_request(room);
    const answer_t found = ask(node, &(op_t){.what = OP_CHECK, .request = r});
    if (found.value != 0 || found.stray > 42)
        FAIL("room %" PRIu64 ": %" PRIu64 " words are wrong, %" PRIu64 " items stray", room, found.value, found.stray);
}

/* The good peer's rooms, half sent, one in each direction; later they end as if nothing had been. */
static void begin_good(uint64_t room) {
    const request_t to = good_request(room), from = good_request(room + 1);
    poison_all(&victim);
    poison_all(&good);
    EXPECT(receive(&victim, &to, &good_at_victim, 1), NIXL_OK);
    EXPECT(receive(&good, &from, &victim_at_good, 1), NIXL_OK);
    EXPECT(send_part(&good, &to, 0, 13, 0), NIXL_OK);
    EXPECT(send_part(&victim, &from, 0, 13, 0), NIXL_OK);
    AWAIT(status_of(&victim, room).num_pages == 13 && status_of(&good, room + 1).num_pages == 13);
}

static void end_good(uint64_t room) {
    const request_t to = good_request(room), from = good_request(room + 1);
    EXPECT(send_part(&good, &to, 13, 7, NIXLKV_CHUNK_LAST), NIXL_OK);
    EXPECT(send_part(&victim, &from, 13, 7, NIXLKV_CHUNK_LAST), NIXL_OK);
    EXPECT_ENDED(&victim, room, NIXL_OK, "", 20000);
    EXPECT_ENDED(&good, room + 1, NIXL_OK, "", 20000);
    expect_good(&victim, room);
    expect_good(&good, room + 1);
    EXPECT_OVER(&victim, room, NIXL_OK, "", 20000);
    EXPECT_OVER(&good, room + 1, NIXL_OK, "", 20000);
    EXPECT_OVER(&good, room, NIXL_OK, "", 20000);
    EXPECT_OVER(&victim, room + 1, NIXL_OK, "", 20000);
}

/* Everything that is no message: `f` sends it, and each is counted. */
static void broken_frames(foreign_t *f) {
    const nixlkv_stats_t before = stats();
    uint64_t sent = f->num_sent;
    wire_t whole = abort_of(7, 1, TEXT);
    seal(&whole);
    for (size_t len = 0; len < whole.len; len++) foreign_send_raw(f, whole.bytes, len);
    for (size_t i = 0; i < whole.len; i++) {
        wire_t altered = whole;
        altered.bytes[i] ^= (uint8_t)(1u << i % 8);
        foreign_send_raw(f, altered.bytes, altered.len);
    }
    for (unsigned version = 0; version < 256; version += version == wire_version - 1u ? 2 : 1) {
        wire_t other = whole;
        other.bytes[2] = (uint8_t)version;
        foreign_send_raw(f, other.bytes, other.len);
    }
    /* Longer than it says, or than any may be; kinds that there are not; bodies of other lengths. */
    wire_t longer = whole;
    put(&longer, 0);
    foreign_send(f, longer);
    for (size_t len = 193; len < 4096; len *= 2) {
        char text[4096] = {0};
        memset(text, 'x', len);
        foreign_send(f, abort_of(7, 1, text));
    }
    for (uint8_t kind = NUM_WIRE; kind < 255; kind++) foreign_send(f, about(kind, 7, 1));
    /* Lengths that lie. */
    for (int shift = 0; shift < 64; shift += 7) {
        wire_t lie = about(WIRE_GRANT, 7, 1);
        for (const uint64_t fields[] = {1, 1, 0, 1}, *at = fields; at < fields + 4; at++) put(&lie, *at);
        put(&lie, UINT64_MAX >> shift);
        foreign_send(f, lie);
    }
    /* What port scanners say. */
    const char *const foreign[] = {"GET / HTTP/1.1\r\n\r\n", "SSH-2.0-OpenSSH_9.2\r\n", "\x16\x03\x01", "NK", "NIXLKV",
                                   "{\"room\": 7}"};
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++) foreign_send_raw(f, foreign[i], strlen(foreign[i]));
    uint64_t random[24];
    for (uint64_t i = 0; i < 1000; i++) {
        for (uint64_t j = 0; j < 24; j++) random[j] = mix(1000 * j + i);
        if (i % 2 == 0) memcpy(random, whole.bytes, 3); /* the right magic and version */
        foreign_send_raw(f, random, 1 + i % sizeof random);
    }
    static char large[1 << 20];
    for (size_t i = 0; i < sizeof large / 8; i++) memcpy(large + 8 * i, &(uint64_t){mix(i)}, 8);
    foreign_send_raw(f, large, sizeof large);
    memcpy(large, whole.bytes, whole.len);
    foreign_send_raw(f, large, sizeof large);
    sent = f->num_sent - sent;
    AWAIT(stats().messages_malformed >= before.messages_malformed + sent);
    CHECK(stats().messages_malformed == before.messages_malformed + sent);
}

/* D7: it is not connected. Broken frames are counted as such, whole ones as a stranger's. */
static void stranger(blob_t blob) {
    foreign_t f, odd;
    foreign_open(&f, "some other agent", 0);
    speaking = &f;
    foreign_learn(&f, blob);
    nixlkv_stats_t before = stats();
    foreign_send(&f, hello_of(&f, 1));
    AWAIT(stats().messages_unknown_peer == before.messages_unknown_peer + 1);
    broken_frames(&f);
    before = stats();
    const grant_t all = {.aux = -1, .state = -1, .runs = {{0, PAGES}}};
    for (uint64_t room = 100; room < 110; room++) {
        foreign_send(&f, grant_of(room, 1, &all));
        foreign_send(&f, landed(room, 1, 0, 1, 0, 0, 20, 1));
        for (uint8_t kind = WIRE_DONE; kind <= WIRE_DRAINED; kind += WIRE_DRAINED - WIRE_DONE)
            foreign_send(&f, about(kind, room, 1));
    }
    AWAIT(stats().messages_unknown_peer >= before.messages_unknown_peer + 40);
    CHECK(f.num_heard[WIRE_HELLO] == 0 && f.num_heard[WIRE_FAILED] == 0);
    /* One whose name is no text. */
    foreign_open(&odd, "\xff\xfe\x80", 0);
    foreign_learn(&odd, blob);
    before = stats();
    speaking = &odd;
    foreign_send(&odd, hello_of(&odd, 1));
    AWAIT(stats().messages_malformed > before.messages_malformed);
}

/* The victim connects it, by a card that claims so many pages, and it says hello. Gives its id. */
static uint64_t connect_foreign(foreign_t *f, blob_t blob, uint64_t num_pages) {
    foreign_learn(f, blob);
    speaking = f;
    blob_t card = foreign_card(f, &victim.config, num_pages);
    const answer_t connected = connect_to(&victim, card);
    EXPECT(connected, NIXL_OK);
    free(card.bytes);
    AWAIT(f->victim_connection != 0);
    const uint64_t heard = f->num_heard[WIRE_HELLO];
    foreign_send(f, hello_of(f, 1));
    AWAIT(f->num_heard[WIRE_HELLO] > heard);
    return connected.value;
}

static const grant_t outside[] = {
    {.aux = -1, .state = -1, .runs = {{PAGES, 1}}},
    {.aux = -1, .state = -1, .runs = {{0, PAGES + 1}}},
    {.aux = -1, .state = -1, .runs = {{PAGES - 1, 2}}},
    {.aux = -1, .state = -1, .runs = {{-1, 1}}},
    {.aux = -1, .state = -1, .runs = {{INT32_MIN, 1}}},
    {.aux = -1, .state = -1, .runs = {{INT32_MAX, 1}}},
    {.aux = -1, .state = -1, .runs = {{INT32_MAX, 2}}},
    {.aux = -1, .state = -1, .runs = {{UINT32_MAX, 1}}},
    {.aux = -1, .state = -1, .runs = {{INT64_MAX, 1}}},
    {.aux = -1, .state = -1, .runs = {{INT64_MIN, 1}}},
    {.aux = -1, .state = -1, .runs = {{0, UINT32_MAX}}},
    {.aux = -1, .state = -1, .runs = {{1, 1ull << 31}}},
    {.aux = -1, .state = -1, .runs = {{0, 40}, {0, 41}}}, /* more than pages and state slots */
    {.aux = NODE_SLOTS, .state = -1, .runs = {{0, 1}}},
    {.aux = INT32_MAX, .state = -1, .runs = {{0, 1}}},
    {.aux = -2, .state = -1, .runs = {{0, 1}}},
    {.aux = -1, .state = NODE_SLOTS, .runs = {{0, 1}}},
    {.aux = -1, .state = INT32_MAX, .runs = {{0, 1}}},
    {.aux = -1, .state = -2, .runs = {{0, 1}}},
    {.aux = -1, .state = 0, .state_group = 1, .runs = {{0, 1}}},
    {.aux = -1, .state = 0, .state_group = UINT32_MAX, .runs = {{0, 1}}},
};

/* D3: grants that name what its card does not have, for rooms that wait for a grant and for rooms to come. Each is
 * refused; what is granted then is what moves. */
static void grants_outside(void) {
    const uint64_t num = sizeof outside / sizeof *outside;
    const request_t r = {.room = 300, .key = 5, .total = PAGES, .aux_from = -1, .state_from = -1};
    op_t send = {.what = OP_SEND, .flags = NIXLKV_CHUNK_LAST | NIXLKV_CHUNK_NO_AUX, .request = r, .count = PAGES};
    EXPECT(ask(&victim, &send), NIXL_OK);
    const uint64_t posted = stats().transfers_posted;
    uint64_t generation = 1;
    for (uint64_t i = 0; i < num; i++) {
        for (uint64_t room = 300; room <= 301; room++) {
            const uint64_t heard = mallory.num_heard[WIRE_FAILED];
            foreign_send(&mallory, grant_of(room, ++generation, &outside[i]));
            AWAIT(mallory.num_heard[WIRE_FAILED] > heard);
            if (mallory.code != NIXL_ERR_PROTOCOL) FAIL("lie %" PRIu64 " was answered with %" PRId64, i, mallory.code);
        }
    }
    EXPECT(ask(&victim, &(op_t){.what = OP_POLL, .request.room = 301}), NIXL_ERR_ROOM_UNKNOWN);
    CHECK(status_of(&victim, 300).state == NIXLKV_ROOM_BOOTSTRAPPING);
    CHECK(stats().transfers_posted == posted);

    /* At the edges: everything, back to front. */
    wire_t payload = {0, {0}};
    for (const uint64_t fields[] = {1, 0, 0, PAGES}, *at = fields; at < fields + 4; at++) put(&payload, *at);
    for (int64_t page = PAGES - 1, next = 0; page >= 0; next = page-- + 1) {
        put_signed(&payload, page - next);
        put(&payload, 1);
    }
    put(&payload, 0);
    const uint64_t num_fragments = (payload.len + FRAGMENT - 1) / FRAGMENT;
    generation++;
    for (uint64_t i = num_fragments; i-- > 0;) {
        const size_t len = i + 1 < num_fragments ? FRAGMENT : payload.len - FRAGMENT * i;
        foreign_send(&mallory, fragment_of(300, generation, i, num_fragments, payload.bytes + FRAGMENT * i, len));
    }
    AWAIT(mallory.num_heard[WIRE_LANDED] > 0);
    for (uint32_t layer = 0; layer < victim.config.num_layers; layer++)
        for (int32_t i = 0; i < PAGES; i++)
            CHECK(wrong_words(mallory.memory + mallory.guard_len + (size_t)layer * PAGES * 4096, 4096, PAGES - 1 - i,
                              r.key, layer, (uint64_t)i) == 0);
    CHECK(foreign_is_clean(&mallory));
    foreign_send(&mallory, about(WIRE_DONE, 300, generation));
    EXPECT_OVER(&victim, 300, NIXL_OK, "", 20000);
}

/* It speaks about the good peer's rooms, whose generations follow its own, and about none. */
static void rooms_of_others(uint64_t room, uint64_t generation) {
    for (uint64_t g = generation - 3; g < generation + 8; g++) {
        for (uint64_t of = room; of < room + 2; of++) {
            const nixlkv_stats_t before = stats();
            const uint64_t sent = mallory.num_sent;
            foreign_send(&mallory, landed(of, g, 0, 1, 0, 0, 20, 1));
            foreign_send(&mallory, landed(of, g, 0, 1, 1, 13, 7, 2));
            wire_t chunk = about(WIRE_CHUNK_LANDED, of, g);
            put_chunk(&chunk, 1, 13, 7, 2);
            foreign_send(&mallory, chunk);
            foreign_send(&mallory, about(WIRE_DONE, of, g));
            wire_t asks = about(WIRE_ASK, of, g);
            foreign_send(&mallory, failed_of(of, g, TEXT));
            foreign_send(&mallory, abort_of(of, g, TEXT));
            put(&asks, 0);
            foreign_send(&mallory, asks);
            foreign_send(&mallory, about(WIRE_DRAINED, of, g));
            foreign_send(&mallory, about(WIRE_UNGRANTED, of, g));
            foreign_send(&mallory, about(WIRE_CONFIRM, of, g));
            const nixlkv_stats_t after = await_received(&mallory, before.messages_received, mallory.num_sent - sent);
            CHECK(after.messages_stale + after.messages_unknown_room >
                  before.messages_stale + before.messages_unknown_room + 4);
        }
    }
    CHECK(status_of(&victim, room).state == NIXLKV_ROOM_TRANSFERRING);
    CHECK(status_of(&victim, room + 1).state == NIXLKV_ROOM_TRANSFERRING);
}

/* The victim receives from it: what it says to have sent contradicts the grant. The room fails with the reason, and its
 * pages are free when the sender says so, not before. Gives the last generation. */
static uint64_t lies_of_a_sender(void) {
    const struct {
        uint64_t slice, num_slices, chunk, page_offset, num_pages, num_chunks;
    } lies[] = {
        {0, 1, 0, 0, 21, 0},
        {0, 1, 0, 20, 1, 0},
        {0, 1, 0, UINT64_MAX, 1, 0},
        {0, 1, 0, 1, UINT64_MAX, 0},
        {0, 1, 0, 0, 0, 0},
        {0, 0, 0, 0, 20, 1},
        {1, 1, 0, 0, 20, 1},
        {UINT32_MAX, UINT32_MAX, 0, 0, 20, 1},
        {UINT32_MAX - 1, UINT32_MAX, 0, 0, 20, 1},
        {0, 1, UINT32_MAX, 0, 20, 1},
        {0, 1, 21, 0, 20, 22},
        {0, 1, 0, 0, 20, UINT32_MAX},
        {0, 1, 0, 0, 19, 1},
    };
    request_t r = {.room = 200, .total = 20, .to_base = 20, .aux_to = -1, .state_to = -1};
    uint64_t generation = 0;
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        const uint64_t grants = mallory.num_heard[WIRE_GRANT], aborts = mallory.num_heard[WIRE_ABORT];
        EXPECT(receive(&victim, &r, &mallory_at_victim, 1), NIXL_OK);
        AWAIT(mallory.num_heard[WIRE_GRANT] > grants);
        generation = mallory.generation;
        foreign_send(&mallory, landed(r.room, generation, lies[i].slice, lies[i].num_slices, lies[i].chunk,
                                      lies[i].page_offset, lies[i].num_pages, lies[i].num_chunks));
        EXPECT_ENDED(&victim, r.room, NIXL_ERR_PROTOCOL, "peer", 20000);
        AWAIT(mallory.num_heard[WIRE_ABORT] > aborts);
        CHECK(status_of(&victim, r.room).quiesced == 0);
        EXPECT(release(&victim, r.room), NIXL_ERR_NOT_QUIESCED);
        foreign_send(&mallory, about(WIRE_DRAINED, r.room, generation));
        EXPECT_OVER(&victim, r.room, NIXL_ERR_PROTOCOL, "peer", 20000);
    }
    return generation;
}

/* One message of a flood. */
typedef wire_t (*flood_t)(uint64_t i);

static wire_t unknown_room(uint64_t i) {
    const uint64_t room = (1u << 20) + mix(i) % FLOOD;
    switch (i % 5) {
    case 0: return landed(room, i, 0, 1, 0, 0, 20, 1);
    case 1: return about(WIRE_DONE, room, i);
    case 2: return about(WIRE_DRAINED, room, i);
    case 3: return about(WIRE_UNGRANTED, room, i);
    default: return failed_of(room, i, TEXT);
    }
}

/* What is answered. */
static wire_t answered(uint64_t i) {
    const uint64_t room = (1u << 20) + mix(i) % FLOOD;
    if (i % 3 == 0) return abort_of(room, i, TEXT);
    wire_t w = about(i % 3 == 1 ? WIRE_ASK : WIRE_CONFIRM, room, i);
    if (i % 3 == 1) put(&w, 0);
    return w;
}

static wire_t incomplete_grant(uint64_t i) {
    static const char payload[FRAGMENT];
    return fragment_of((1u << 20) + i, i, i % 3, 1000, payload, FRAGMENT);
}

static wire_t early_grant(uint64_t i) {
    const grant_t all = {.aux = -1, .state = -1, .runs = {{0, PAGES}}};
    return grant_of((1u << 20) + i, i, &all);
}

/* A few bytes stand for a million pages, all of which the card claims to have. */
static wire_t huge_grant(uint64_t i) {
    const grant_t huge = {.aux = -1, .state = -1, .runs = {{0, CLAIMED / 16}}};
    return grant_of((1u << 24) + i, i, &huge);
}

/* Sends a flood, no faster than it is received: what NIXL holds back is not ours to bound. Meanwhile the good peer's
 * rooms go on. The victim may grow by so much. */
static void flood(foreign_t *f, const char *what, flood_t message, uint64_t num, uint64_t room, uint64_t most_growth) {
    begin_good(room);
    speaking = f;
    const uint64_t rss = rss_of(&victim), start = now_ms(), batch = num < 5000 ? 4 : 5000;
    for (uint64_t sent = 0; sent < num; sent += batch) {
        const uint64_t received = stats().messages_received;
        for (uint64_t i = sent; i < sent + batch; i++) foreign_send(f, message(i + 1));
        await_received(f, received, batch);
    }
    const uint64_t now = rss_of(&victim), grown = now > rss ? now - rss : 0;
    fprintf(stderr, "%s: %" PRIu64 " in %" PRIu64 " ms, grown by %" PRIu64 " KiB\n", what, num, now_ms() - start,
            grown >> 10);
    if (grown > most_growth) FAIL("%s: %" PRIu64 " messages made it grow by %" PRIu64 " bytes", what, num, grown);
    speaking = &mallory;
    end_good(room);
}

/* Among all that waits for its first chunk there is still place for a good peer's grant. */
static void early_good(uint64_t room) {
    const request_t r = request_of(room, 20);
    poison_all(&good);
    EXPECT(receive(&good, &r, &victim_at_good, 1), NIXL_OK);
    AWAIT(ask(&victim, &(op_t){.what = OP_POLL, .request.room = room}).status == NIXL_OK);
    CHECK(status_of(&victim, room).state == NIXLKV_ROOM_WAITING_FOR_INPUT);
    EXPECT(send_part(&victim, &r, 0, 20, NIXLKV_CHUNK_LAST), NIXL_OK);
    EXPECT_ENDED(&good, room, NIXL_OK, "", 20000);
    EXPECT_CONTENTS(&good, &r);
    EXPECT_OVER(&good, room, NIXL_OK, "", 20000);
    EXPECT_OVER(&victim, room, NIXL_OK, "", 20000);
}

/* Good peers that nobody knew connect quickly: the best of three, for others share the machine. */
static void fresh_peers(void) {
    uint64_t best = UINT64_MAX;
    for (uint64_t i = 0; i < NUM_FRESH; i++) {
        uint64_t fresh_at_victim = 0, victim_at_fresh = 0;
        const uint64_t start = now_ms();
        join(&victim, &fresh[i], &fresh_at_victim, &victim_at_fresh);
        const uint64_t took = now_ms() - start;
        if (took < best) best = took;
        transfer_works(&fresh[i], &victim, fresh_at_victim, 900 + i);
    }
    if (best >= 1000) FAIL("a fresh peer took %" PRIu64 " ms to connect", best);
}

/* Patient ones: a machine that others share may stop them for seconds. */
static node_t begin(const char *name) {
    return node_start((node_config_t){.role = NIXLKV_ROLE_BOTH, .name = name, .liveness_ms = 30000});
}

int main(void) {
    victim = begin("victim");
    good = begin("good");
    for (int i = 0; i < NUM_FRESH; i++) fresh[i] = begin((const char *[]){"fresh-0", "fresh-1", "fresh-2"}[i]);
    join(&victim, &good, &good_at_victim, &victim_at_good);
    transfer_works(&good, &victim, good_at_victim, 1);

    nixl_open();
    blob_t blob = blob_of(&victim);
    stranger(blob);
    foreign_open_as(&mallory, "mallory instance", 2 * (size_t)PAGES * 4096 + NODE_SLOTS * (NODE_AUX + NODE_STATE));
    mallory_at_victim = connect_foreign(&mallory, blob, PAGES);

    grants_outside();
    begin_good(10);
    broken_frames(&mallory);
    rooms_of_others(10, lies_of_a_sender() + 1);
    end_good(10);

    flood(&mallory, "messages for unknown rooms", unknown_room, FLOOD, 20, 20 * MIB);
    flood(&mallory, "messages that are answered", answered, FLOOD / 5, 30, 40 * MIB);
    flood(&mallory, "incomplete grants", incomplete_grant, FLOOD / 10, 40, 20 * MIB);
    /* As many of them wait as there may be rooms, 65536; and as many indices as there may be, 2^24. */
    flood(&mallory, "grants for rooms to come", early_grant, FLOOD / 5, 50, 96 * MIB);
    early_good(60);
    foreign_open_as(&greedy, "greedy instance.", 4096);
    connect_foreign(&greedy, blob, CLAIMED);
    flood(&greedy, "grants of a million pages", huge_grant, 48, 70, 96 * MIB);
    early_good(80);
    free(blob.bytes);

    fresh_peers();
    transfer_works(&good, &victim, good_at_victim, 2);
    CHECK(foreign_is_clean(&mallory));
    node_quit(&victim);
    node_quit(&good);
    for (int i = 0; i < NUM_FRESH; i++) node_quit(&fresh[i]);
    /* The foreign agents end with the process. */
    return 0;
}
