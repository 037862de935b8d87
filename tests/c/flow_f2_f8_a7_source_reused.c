/* F2, A7: a write is in flight when its room ends at the sender, by abort or by its time limit. The sender rewrites
 * its pages as soon as they are said to be free, and no sooner: nothing of what it writes then arrives, and the
 * receiver's room has failed. F8: a caller that rewrites its pages too early harms its own request's bytes alone. *
 * */
/* timeout: 120 */
#include "flow.h"

enum { MIB = 1 << 20, NUM_PAGES = 64, RUNS = 12 };

static node_t prefill, decode;
static uint64_t decode_peer, prefill_peer;

/* The source pages get other contents. */
static void rewrite(const request_t *r) {
    request_t other = *r;
    other.key = ~r->key;
    EXPECT(ask(&prefill, &(op_t){.what = OP_STAMP, .request = other, .count = NUM_PAGES}), NIXL_OK);
}

static void in_flight_with_decode_stopped(const request_t *r) {
    EXPECT(receive(&decode, r, &prefill_peer, 1), NIXL_OK);
    await_granted(&prefill, r->room);
    node_stop(&decode);
    EXPECT(send_part(&prefill, r, 0, NUM_PAGES, NIXLKV_CHUNK_LAST), NIXL_OK);
    for (const uint64_t start = now_ms(); stats_of(&prefill).transfers_in_flight == 0; sleep_ms(1))
        CHECK(now_ms() - start < 30000);
}

int main(void) {
    node_config_t config = {.tls = "tcp,self", .num_layers = 1, .num_pages = NUM_PAGES, .page_len = MIB};
    config.liveness_ms = 60000;
    config.role = NIXLKV_ROLE_DECODE;
    decode = node_start(config);
    config.room_timeout_ms = 3000; /* long enough to be in flight before it, on a busy machine too */
    config.role = NIXLKV_ROLE_PREFILL;
    prefill = node_start(config);
    join(&prefill, &decode, &decode_peer, &prefill_peer);
    uint64_t arrived = 0;
    for (uint64_t run = 0; run < RUNS; run++) {
        const request_t r = request_of(10 + run, NUM_PAGES);
        const bool by_time = run % 4 == 0;
        const int32_t code = by_time ? NIXL_ERR_ROOM_TIMEOUT : NIXL_ERR_ABORTED;
        poison_all(&decode);
        in_flight_with_decode_stopped(&r);
        if (!by_time) EXPECT(abort_room(&prefill, r.room, "enough"), NIXL_OK);
        EXPECT_ENDED(&prefill, r.room, code, "", 10000);
        CHECK(wait_for(&prefill, r.room, NIXLKV_WAIT_QUIESCED, 100).status == NIXL_ERR_WAIT_TIMEOUT);
        CHECK(status_of(&prefill, r.room).quiesced == 0);
        EXPECT(release(&prefill, r.room), NIXL_ERR_NOT_QUIESCED);
        node_continue(&decode);
        EXPECT(wait_for(&prefill, r.room, NIXLKV_WAIT_QUIESCED, 20000), NIXL_OK);
        rewrite(&r);
        EXPECT_ENDED(&decode, r.room, code, "", 20000);
        EXPECT(wait_for(&decode, r.room, NIXLKV_WAIT_QUIESCED, 20000), NIXL_OK);
        sleep_ms(100);
        const answer_t found = ask(&decode, &(op_t){.what = OP_CHECK, .request = r});
        if (found.alien != 0) FAIL("%" PRIu64 " words of the new contents have arrived", found.alien);
        CHECK(status_of(&decode, r.room).state == NIXLKV_ROOM_FAILED);
        /* Of 64 MiB and two slots; some of it has come, or the test has tested nothing. */
        arrived += found.value < (uint64_t)NUM_PAGES * MIB / 8 + NODE_AUX / 8 + NODE_STATE / 8;
        EXPECT_OVER(&decode, r.room, code, "", 20000);
        EXPECT_OVER(&prefill, r.room, code, "", 20000);
    }
    if (arrived < RUNS / 2) FAIL("only in %" PRIu64 " of %d runs anything had arrived", arrived, RUNS);

    /* Too early: between the send and the end. Both rooms end, and the bytes are the old or the new ones. */
    for (uint64_t run = 0; run < 4; run++) {
        const request_t r = request_of(50 + run, NUM_PAGES);
        poison_all(&decode);
        in_flight_with_decode_stopped(&r);
        rewrite(&r);
        node_continue(&decode);
        EXPECT_OVER(&decode, r.room, NIXL_OK, "", 20000);
        EXPECT_OVER(&prefill, r.room, NIXL_OK, "", 20000);
        CHECK(ask(&decode, &(op_t){.what = OP_CHECK, .request = r}).stray == 0);
    }
    transfer_works(&prefill, &decode, prefill_peer, 1);
    node_quit(&prefill);
    node_quit(&decode);
    return 0;
}
