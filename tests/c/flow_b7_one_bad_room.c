/* B7: 50 rooms move at once, and one chunk of one of them goes wrong: its planning panics, or NIXL refuses its post.
 * That room fails on both sides with its reason; the 49 others arrive whole, and no thread is gone. Then several at
 * once. */
/* timeout: 60 */
#include "flow.h"

enum { ROOMS = 50, EACH = 4, CHUNKS = 2 };

static node_t prefill, decode;
static uint64_t decode_peer, prefill_peer;

static request_t request_in(uint64_t first, int32_t i) {
    return (request_t){.room = first + (uint64_t)i,
                       .key = mix(first + (uint64_t)i),
                       .total = EACH,
                       .from_base = EACH * i,
                       .to_base = EACH * (ROOMS - 1 - i),
                       .aux_from = -1,
                       .aux_to = -1,
                       .state_from = -1,
                       .state_to = -1};
}

static void fifty_rooms(uint64_t first, const char *fault, uint64_t skip, uint64_t times, int32_t code,
                        const char *part) {
    request_t r[ROOMS];
    const usage_t sender = usage_of(prefill.child.pid), receiver = usage_of(decode.child.pid);
    const nixlkv_stats_t sent_before = stats_of(&prefill), got_before = stats_of(&decode);
    poison_all(&decode);
    for (int32_t i = 0; i < ROOMS; i++) {
        r[i] = request_in(first, i);
        EXPECT(receive(&decode, &r[i], &prefill_peer, 1), NIXL_OK);
    }
    arm(&prefill, fault, skip, times);
    for (uint64_t chunk = 0; chunk < CHUNKS; chunk++)
        for (int32_t i = 0; i < ROOMS; i++) {
            const uint32_t flags = chunk + 1 == CHUNKS ? NIXLKV_CHUNK_LAST | NIXLKV_CHUNK_NO_AUX : 0;
            const answer_t sent = send_part(&prefill, &r[i], chunk * EACH / CHUNKS, EACH / CHUNKS, flags);
            /* Its first chunk may have failed the room by now. */
            if (sent.status != NIXL_ERR_ROOM_ENDED || chunk == 0) EXPECT(sent, NIXL_OK);
        }
    uint64_t bad = 0;
    for (int32_t i = 0; i < ROOMS; i++) {
        const answer_t ended = wait_for(&decode, r[i].room, NIXLKV_WAIT_QUIESCED, 20000);
        EXPECT(ended, NIXL_OK);
        if (ended.state == NIXLKV_ROOM_FAILED) {
            bad++;
            EXPECT_OVER(&decode, r[i].room, code, part, 20000);
            EXPECT_OVER(&prefill, r[i].room, code, part, 20000);
            char room[32];
            snprintf(room, sizeof room, "room %" PRIu64 ", chunk ", r[i].room);
            CHECK(strstr(ended.text, room) != NULL);
            continue;
        }
        CHECK(ask(&decode, &(op_t){.what = OP_CHECK, .request = r[i]}).value == 0);
        CHECK(ended.num_chunks == CHUNKS && ended.num_pages == EACH);
        EXPECT_OVER(&decode, r[i].room, NIXL_OK, "", 20000);
        EXPECT_OVER(&prefill, r[i].room, NIXL_OK, "", 20000);
    }
    /* Two faults can hit the two chunks of one room. */
    if (bad > times || bad < (times + CHUNKS - 1) / CHUNKS) FAIL("%" PRIu64 " rooms failed of %d", bad, ROOMS);
    arm(&prefill, fault, 0, 0);
    const nixlkv_stats_t sent = stats_of(&prefill), got = stats_of(&decode);
    CHECK(sent.rooms_failed - sent_before.rooms_failed == bad && got.rooms_failed - got_before.rooms_failed == bad);
    CHECK(sent.rooms_succeeded - sent_before.rooms_succeeded == ROOMS - bad);
    CHECK(got.rooms_succeeded - got_before.rooms_succeeded == ROOMS - bad);
    CHECK(sent.chunks_pending == 0 && sent.transfers_in_flight == 0 && sent.rooms_unquiesced == 0);
    CHECK(got.rooms_unquiesced == 0);
    CHECK(usage_of(prefill.child.pid).threads == sender.threads);
    CHECK(usage_of(decode.child.pid).threads == receiver.threads);
    transfer_works(&prefill, &decode, prefill_peer, first);
}

int main(void) {
    for (uint32_t workers = 1; workers <= 2; workers++) {
        node_config_t config = {.num_pages = ROOMS * EACH, .num_workers = workers};
        config.role = NIXLKV_ROLE_PREFILL;
        prefill = node_start(config);
        config.role = NIXLKV_ROLE_DECODE;
        decode = node_start(config);
        join(&prefill, &decode, &decode_peer, &prefill_peer);
        transfer_works(&prefill, &decode, prefill_peer, 1);
        fifty_rooms(100, "plan_panics", 3, 1, NIXL_ERR_INTERNAL, "panicked");
        fifty_rooms(200, "plan_panics", 40, 8, NIXL_ERR_INTERNAL, "panicked");
        fifty_rooms(300, "post", 3, 1, NIXL_ERR_XFER_FAILED, "fault point");
        fifty_rooms(400, "post", 30, 8, NIXL_ERR_XFER_FAILED, "fault point");
        node_quit(&prefill);
        node_quit(&decode);
    }
    return 0;
}
