/* B4: completions may arrive in any order. 16 chunks of each of two senders, both with two transfer threads, are sent
 * in every kind of order, and the messages that tell of them are put off by different times at the receiver: the last
 * chunk's comes first, or anywhere. Every room completes, when all of it is there and no sooner. */
/* timeout: 120 */
#include "flow.h"

enum { CHUNKS = 16, SENDERS = 2, CROWD = 20, BATCHES = 10, LAST_FIRST = 8 };

static node_t prefill[SENDERS], decode;
static uint64_t at_decode[SENDERS];

/* A page for each chunk, on both sides; each sender fills layers of its own. */
static request_t request_in(uint64_t room, int32_t place) {
    return (request_t){.room = room,
                       .key = mix(room),
                       .total = CHUNKS,
                       .from_base = CHUNKS * place,
                       .to_base = CHUNKS * (CROWD - 1 - place),
                       .aux_from = -1,
                       .aux_to = -1,
                       .state_from = -1,
                       .state_to = -1};
}

static uint32_t flags_of(int32_t n) { return n == CHUNKS - 1 ? NIXLKV_CHUNK_LAST | NIXLKV_CHUNK_NO_AUX : 0; }

/* Reversed, the last part first, or random. */
static void order_of(int32_t *order, uint64_t kind) {
    shuffle(order, CHUNKS, mix(kind));
    for (int32_t i = 0; i < CHUNKS; i++)
        if (kind % 8 == 0) order[i] = CHUNKS - 1 - i;
        else if (kind % 8 == 1) order[i] = (i + CHUNKS - 1) % CHUNKS;
}

static void finish(const request_t *r) {
    EXPECT_ENDED(&decode, r->room, NIXL_OK, "", 20000);
    const answer_t found = ask(&decode, &(op_t){.what = OP_CHECK, .request = *r});
    if (found.value != 0) FAIL("room %" PRIu64 " is complete, and %" PRIu64 " words are wrong", r->room, found.value);
    const answer_t got = status_of(&decode, r->room);
    CHECK(got.num_chunks == SENDERS * CHUNKS && got.num_pages == SENDERS * CHUNKS);
    EXPECT_OVER(&decode, r->room, NIXL_OK, "", 20000);
    for (int s = 0; s < SENDERS; s++) EXPECT_OVER(&prefill[s], r->room, NIXL_OK, "", 20000);
}

/* All that one sender's room needs is put off, but not the word of its last chunk. */
static void last_first(uint64_t room) {
    const request_t r = request_in(room, 0);
    poison_all(&decode);
    EXPECT(receive(&decode, &r, at_decode, SENDERS), NIXL_OK);
    for (int32_t n = 0; n < CHUNKS; n++) EXPECT(send_part(&prefill[1], &r, (uint64_t)n, 1, flags_of(n)), NIXL_OK);
    for (const uint64_t start = now_ms(); status_of(&decode, room).num_chunks < CHUNKS; sleep_ms(1))
        CHECK(now_ms() - start < 20000);
    arm(&decode, "delay_message", 0, CHUNKS - 1);
    for (int32_t n = 0; n < CHUNKS; n++) {
        EXPECT(send_part(&prefill[0], &r, (uint64_t)n, 1, flags_of(n)), NIXL_OK);
        /* One after the other, so that they are told of in this order. */
        for (const uint64_t start = now_ms(); stats_of(&prefill[0]).chunks_pending > 0 && n < CHUNKS - 1; sleep_ms(1))
            if (now_ms() - start > 5) break;
    }
    CHECK(status_of(&decode, room).state != NIXLKV_ROOM_FAILED);
    finish(&r);
    arm(&decode, "delay_message", 0, 0);
}

static void crowd(uint64_t first, uint64_t batch) {
    request_t r[CROWD];
    int32_t order[SENDERS][CROWD][CHUNKS];
    poison_all(&decode);
    for (int32_t i = 0; i < CROWD; i++) {
        r[i] = request_in(first + (uint64_t)i, i);
        for (int s = 0; s < SENDERS; s++) order_of(order[s][i], batch * 1000 + (uint64_t)(i * SENDERS + s));
    }
    /* Every second room's grant comes when half of its chunks have been sent. */
    for (int32_t i = 0; i < CROWD; i += 2) EXPECT(receive(&decode, &r[i], at_decode, SENDERS), NIXL_OK);
    for (int32_t n = 0; n < CHUNKS; n++) {
        arm(&decode, "delay_message", mix(first + (uint64_t)n) % 8, mix(first * 31 + (uint64_t)n) % 60);
        if (n == CHUNKS / 2)
            for (int32_t i = 1; i < CROWD; i += 2) EXPECT(receive(&decode, &r[i], at_decode, SENDERS), NIXL_OK);
        for (int32_t i = 0; i < CROWD; i++)
            for (int s = 0; s < SENDERS; s++)
                EXPECT(send_part(&prefill[s], &r[i], (uint64_t)order[s][i][n], 1, flags_of(n)), NIXL_OK);
    }
    for (int32_t i = 0; i < CROWD; i++) finish(&r[i]);
    arm(&decode, "delay_message", 0, 0);
}

int main(void) {
    node_config_t config = {.num_pages = CHUNKS * CROWD, .page_len = 512, .num_workers = 2, .num_layers = 1};
    config.role = NIXLKV_ROLE_DECODE;
    config.num_layers = SENDERS;
    decode = node_start(config);
    config.role = NIXLKV_ROLE_PREFILL;
    config.num_layers = 1;
    for (uint32_t s = 0; s < SENDERS; s++) {
        uint64_t unused;
        config.first_layer = s;
        config.no_state = s != 0;
        prefill[s] = node_start(config);
        join(&prefill[s], &decode, &unused, &at_decode[s]);
    }
    for (uint64_t n = 0; n < LAST_FIRST; n++) last_first(10 + n);
    for (uint64_t batch = 0; batch < BATCHES; batch++) crowd(1000 * (batch + 1), batch);
    const nixlkv_stats_t stats = stats_of(&decode);
    CHECK(stats.rooms_succeeded == LAST_FIRST + BATCHES * CROWD && stats.rooms_failed == 0);
    for (int s = 0; s < SENDERS; s++) node_quit(&prefill[s]);
    node_quit(&decode);
    return 0;
}
