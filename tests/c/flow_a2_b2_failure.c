/* A failure on either side reaches the other's poll with its code and text; both are quiesced, the pages can be used
 * again, and the next request works. */
/* timeout: 120 */
#include "flow.h"

static node_t prefill, decode;
static uint64_t decode_peer, prefill_peer, rooms_failed;

/* Both sides have ended with the code and the text, within a second: no timeout is that short. */
static void both_failed(uint64_t room, int32_t code, const char *part) {
    const uint64_t start = now_ms();
    EXPECT_OVER(&prefill, room, code, part, 5000);
    EXPECT_OVER(&decode, room, code, part, 5000);
    CHECK(now_ms() - start < 2000);
    rooms_failed++;
    CHECK(stats_of(&prefill).rooms_failed == rooms_failed && stats_of(&decode).rooms_failed == rooms_failed);
    CHECK(stats_of(&prefill).rooms_unquiesced == 0 && stats_of(&decode).rooms_unquiesced == 0);
    /* The same room id, and with it the same pages, slots and seeds. */
    transfer_works(&prefill, &decode, prefill_peer, room);
}

int main(void) {
    const node_config_t config = {.num_layers = 3};
    node_config_t prefill_config = config, decode_config = config;
    prefill_config.role = NIXLKV_ROLE_PREFILL;
    decode_config.role = NIXLKV_ROLE_DECODE;
    prefill = node_start(prefill_config);
    decode = node_start(decode_config);
    join(&prefill, &decode, &decode_peer, &prefill_peer);
    transfer_works(&prefill, &decode, prefill_peer, 1);

    /* The sender gives up: before the grant, after it, after a chunk, and without a reason. */
    request_t r = request_of(10, 20);
    EXPECT(send_part(&prefill, &r, 0, 5, 0), NIXL_OK);
    EXPECT(abort_room(&prefill, 10, "too early"), NIXL_OK);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    both_failed(10, NIXL_ERR_ABORTED, "too early");

    r = request_of(11, 20);
    EXPECT(abort_room(&prefill, 11, "never begun"), NIXL_OK);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    both_failed(11, NIXL_ERR_ABORTED, "never begun");

    r = request_of(12, 20);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    EXPECT(send_part(&prefill, &r, 0, 5, 0), NIXL_OK);
    EXPECT(abort_room(&prefill, 12, "the user left"), NIXL_OK);
    EXPECT(send_part(&prefill, &r, 5, 15, NIXLKV_CHUNK_LAST), NIXL_ERR_ROOM_ENDED);
    both_failed(12, NIXL_ERR_ABORTED, "the user left");

    r = request_of(13, 20);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    EXPECT(send_part(&prefill, &r, 0, 5, 0), NIXL_OK);
    EXPECT(abort_room(&prefill, 13, NULL), NIXL_OK);
    both_failed(13, NIXL_ERR_ABORTED, "room 13");

    /* The receiver gives up: before any chunk, and after one. */
    r = request_of(20, 20);
    EXPECT(send_part(&prefill, &r, 0, 5, 0), NIXL_OK);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    EXPECT(abort_room(&decode, 20, "no slot left: \"\xc3\xa4\""), NIXL_OK);
    both_failed(20, NIXL_ERR_ABORTED, "no slot left: \"\xc3\xa4\"");

    r = request_of(21, 20);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    EXPECT(abort_room(&decode, 21, "changed its mind"), NIXL_OK);
    /* The sender has not opened the room yet: poll tells it, and its first chunk opens the room as a failed one. */
    EXPECT_OVER(&decode, 21, NIXL_ERR_ABORTED, "changed its mind", 5000);
    rooms_failed++;
    for (uint64_t start = now_ms(); status_of(&prefill, 21).error != NIXL_ERR_ABORTED; sleep_ms(1))
        CHECK(now_ms() - start < 2000);
    EXPECT(send_part(&prefill, &r, 0, 5, 0), NIXL_ERR_ROOM_ENDED);
    EXPECT_OVER(&prefill, 21, NIXL_ERR_ABORTED, "changed its mind", 5000);
    /* The id's next life has nothing of the earlier one, also when its grant comes before its first chunk. */
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    for (uint64_t start = now_ms(); status_of(&prefill, 21).state != NIXLKV_ROOM_WAITING_FOR_INPUT; sleep_ms(1))
        CHECK(now_ms() - start < 2000);
    EXPECT(send_part(&prefill, &r, 0, 20, NIXLKV_CHUNK_LAST), NIXL_OK);
    EXPECT_OVER(&decode, 21, NIXL_OK, "", 5000);
    EXPECT_OVER(&prefill, 21, NIXL_OK, "", 5000);
    transfer_works(&prefill, &decode, prefill_peer, 21);

    /* The grant doesn't fit what was sent before it: the first cause, on both sides. */
    r = request_of(30, 20);
    EXPECT(send_part(&prefill, &r, 0, 20, NIXLKV_CHUNK_LAST), NIXL_OK);
    r.total = 21;
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    both_failed(30, NIXL_ERR_PAGE_COUNT, "21");

    r = request_of(31, 20);
    EXPECT(send_part(&prefill, &r, 0, 20, NIXLKV_CHUNK_LAST), NIXL_OK);
    r.total = 19;
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    both_failed(31, NIXL_ERR_PAGE_COUNT, "19");

    r = request_of(32, 20);
    r.state_from = -1;
    EXPECT(send_part(&prefill, &r, 0, 20, NIXLKV_CHUNK_LAST), NIXL_OK);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    both_failed(32, NIXL_ERR_STATE_MISSING, "state group 0");

    r = request_of(33, 20);
    EXPECT(send_part(&prefill, &r, 0, 20, NIXLKV_CHUNK_LAST), NIXL_OK);
    r.state_to = -1;
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    both_failed(33, NIXL_ERR_STATE_UNEXPECTED, "state group 0");

    r = request_of(34, 20);
    r.aux_from = -1;
    EXPECT(send_part(&prefill, &r, 0, 20, NIXLKV_CHUNK_LAST | NIXLKV_CHUNK_NO_AUX), NIXL_OK);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    both_failed(34, NIXL_ERR_AUX_MISSING, "aux");

    /* A post that NIXL refuses (CASES A2, B2): the sender's reason is there long before any time limit. */
    r = request_of(40, 24);
    arm(&prefill, "post", 5, 1);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    for (uint64_t chunk = 0; chunk < 8; chunk++) {
        const answer_t sent = send_part(&prefill, &r, 3 * chunk, 3, chunk == 7 ? NIXLKV_CHUNK_LAST : 0);
        CHECK(sent.status == NIXL_OK || sent.status == NIXL_ERR_ROOM_ENDED);
    }
    both_failed(40, NIXL_ERR_XFER_FAILED, "chunk 5");
    CHECK(stats_of(&prefill).transfers_failed == 1 && stats_of(&prefill).transfers_in_flight == 0);

    /* A fault in one job is its room's alone. */
    r = request_of(41, 24);
    arm(&prefill, "plan_panics", 0, 1);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    EXPECT(send_part(&prefill, &r, 0, 24, NIXLKV_CHUNK_LAST), NIXL_OK);
    both_failed(41, NIXL_ERR_INTERNAL, "chunk 0");

    /* The decode engine shuts down with a room open: it is over on both sides. */
    r = request_of(50, 24);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    EXPECT(send_part(&prefill, &r, 0, 3, 0), NIXL_OK);
    EXPECT(ask(&decode, &(op_t){.what = OP_SHUTDOWN, .timeout_ms = 5000}), NIXL_OK);
    EXPECT_OVER(&prefill, 50, NIXL_ERR_PEER_DISCONNECTED, "shut down", 5000);
    EXPECT_OVER(&decode, 50, NIXL_ERR_PEER_DISCONNECTED, "shut down", 5000);
    node_quit(&decode);
    node_quit(&prefill);
    return 0;
}
