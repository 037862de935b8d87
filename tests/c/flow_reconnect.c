/* Peers come and go: disconnected and connected again, restarted under the same name, with memory registered and
 * deregistered in between. Each time the next request works without anybody else being restarted. */
/* timeout: 120 */
#include "flow.h"

static node_config_t prefill_config = {.role = NIXLKV_ROLE_PREFILL, .name = "prefill-0"};
static node_config_t decode_config = {.role = NIXLKV_ROLE_DECODE, .name = "decode-0"};
static node_t prefill, decode;
static uint64_t decode_peer, prefill_peer;

static answer_t disconnect(const node_t *node, uint64_t peer) {
    return ask(node, &(op_t){.what = OP_DISCONNECT, .senders = {peer}});
}

/* The other side has closed its connection, and we have seen it: what we open with it is refused. */
static void await_closed(uint64_t room) {
    const request_t r = request_of(room, 1);
    for (const uint64_t start = now_ms();; sleep_ms(5)) {
        const answer_t answer = receive(&decode, &r, &prefill_peer, 1);
        if (answer.status == NIXL_ERR_PEER_DISCONNECTED) return;
        EXPECT(answer, NIXL_OK);
        EXPECT(abort_room(&decode, room, NULL), NIXL_OK);
        EXPECT(wait_for(&decode, room, NIXLKV_WAIT_QUIESCED, 10000), NIXL_OK);
        EXPECT(release(&decode, room), NIXL_OK);
        CHECK(now_ms() - start < 10000);
    }
}

static void disconnected(void) {
    for (uint64_t round = 0; round < 20; round++) {
        const request_t r = request_of(110 + round, 20);
        EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
        EXPECT(send_part(&prefill, &r, 0, 5, 0), NIXL_OK);
        for (const uint64_t start = now_ms(); status_of(&decode, r.room).num_pages < 5; sleep_ms(1))
            CHECK(now_ms() - start < 10000);
        EXPECT(disconnect(&prefill, decode_peer), NIXL_ERR_PEER_BUSY);
        EXPECT(disconnect(&decode, prefill_peer), NIXL_ERR_PEER_BUSY);
        EXPECT(abort_room(&prefill, r.room, "going"), NIXL_OK);
        EXPECT_OVER(&decode, r.room, NIXL_ERR_ABORTED, "going", 10000);
        EXPECT_OVER(&prefill, r.room, NIXL_ERR_ABORTED, "going", 10000);

        EXPECT(disconnect(&prefill, decode_peer), NIXL_OK);
        EXPECT(disconnect(&prefill, decode_peer), NIXL_ERR_PEER_UNKNOWN);
        await_closed(140 + round);
        if (round % 2 == 1) {
            EXPECT(disconnect(&decode, prefill_peer), NIXL_OK);
            EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_ERR_PEER_UNKNOWN);
        }
        const uint64_t old = decode_peer;
        join(&prefill, &decode, &decode_peer, &prefill_peer);
        CHECK(decode_peer != old);
        transfer_works(&prefill, &decode, prefill_peer, 170 + round);
        /* The same blob again is the same peer. */
        CHECK(introduce(&prefill, &decode) == decode_peer && introduce(&decode, &prefill) == prefill_peer);
        transfer_works(&prefill, &decode, prefill_peer, 170 + round);
    }
}

/* The code of a room whose peer has gone and come back: whichever was noticed first. */
static void over_after_restart(const node_t *node, uint64_t room) {
    const answer_t ended = wait_for(node, room, NIXLKV_WAIT_QUIESCED, 10000);
    EXPECT(ended, NIXL_OK);
    CHECK(ended.state == NIXLKV_ROOM_FAILED && ended.quiesced == 1);
    CHECK(ended.error == NIXL_ERR_PEER_RESTARTED || ended.error == NIXL_ERR_PEER_LOST);
    EXPECT(release(node, room), NIXL_OK);
}

static void restarted(void) {
    for (uint64_t round = 0; round < 4; round++) {
        const request_t r = request_of(40 + round, 20);
        EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
        EXPECT(send_part(&prefill, &r, 0, 5, 0), NIXL_OK);
        for (const uint64_t start = now_ms(); status_of(&decode, r.room).num_pages < 5; sleep_ms(1))
            CHECK(now_ms() - start < 10000);
        const uint64_t old_decode = decode_peer, old_prefill = prefill_peer;
        if (round % 2 == 0) {
            node_kill(&prefill);
            prefill = node_start(prefill_config);
        } else {
            node_kill(&decode);
            decode = node_start(decode_config);
        }
        join(&prefill, &decode, &decode_peer, &prefill_peer);
        if (round % 2 == 0) {
            CHECK(prefill_peer != old_prefill);
            over_after_restart(&decode, r.room);
            EXPECT(receive(&decode, &r, &old_prefill, 1), NIXL_ERR_PEER_UNKNOWN);
        } else {
            CHECK(decode_peer != old_decode);
            over_after_restart(&prefill, r.room);
            EXPECT(disconnect(&prefill, old_decode), NIXL_ERR_PEER_UNKNOWN);
        }
        /* The same room id, pages and slots. */
        transfer_works(&prefill, &decode, prefill_peer, r.room);
    }

    /* It has not been noticed that the earlier one is gone: it is only stopped. */
    const request_t r = request_of(50, 20);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    EXPECT(send_part(&prefill, &r, 0, 5, 0), NIXL_OK);
    for (const uint64_t start = now_ms(); status_of(&decode, 50).num_pages < 5; sleep_ms(1))
        CHECK(now_ms() - start < 10000);
    node_t earlier = prefill;
    node_stop(&earlier);
    prefill = node_start(prefill_config);
    join(&prefill, &decode, &decode_peer, &prefill_peer);
    EXPECT_ENDED(&decode, 50, NIXL_ERR_PEER_RESTARTED, "prefill-0", 1000);
    node_kill(&earlier);
    EXPECT_OVER(&decode, 50, NIXL_ERR_PEER_RESTARTED, "prefill-0", 10000);
    transfer_works(&prefill, &decode, prefill_peer, 50);
}

static answer_t simple(const node_t *node, uint32_t what) { return ask(node, &(op_t){.what = what}); }

/* A room that is open while the table changes goes on; new ones wait for new blobs. */
static void registered_more(void) {
    const request_t r = request_of(60, 20), next = request_of(61, 20);
    poison_all(&decode);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    EXPECT(send_part(&prefill, &r, 0, 5, 0), NIXL_OK);
    EXPECT(simple(&decode, OP_REGISTER_MORE), NIXL_OK);
    EXPECT(receive(&decode, &next, &prefill_peer, 1), NIXL_ERR_PEER_STALE);
    EXPECT(send_part(&prefill, &r, 5, 15, NIXLKV_CHUNK_LAST), NIXL_OK);
    EXPECT_ENDED(&decode, 60, NIXL_OK, "", 10000);
    EXPECT_CONTENTS(&decode, &r);
    EXPECT_OVER(&decode, 60, NIXL_OK, "", 10000);
    EXPECT_OVER(&prefill, 60, NIXL_OK, "", 10000);

    /* One side's new blob is not enough. */
    EXPECT(receive(&decode, &next, &prefill_peer, 1), NIXL_ERR_PEER_STALE);
    CHECK(introduce(&decode, &prefill) == prefill_peer);
    EXPECT(receive(&decode, &next, &prefill_peer, 1), NIXL_ERR_PEER_STALE);
    CHECK(introduce(&prefill, &decode) == decode_peer);
    for (const uint64_t start = now_ms();; sleep_ms(1)) {
        const answer_t answer = receive(&decode, &next, &prefill_peer, 1);
        if (answer.status == NIXL_ERR_LAYERS_INCOMPLETE) break;
        EXPECT(answer, NIXL_ERR_PEER_STALE);
        CHECK(now_ms() - start < 5000);
    }
    EXPECT(simple(&prefill, OP_REGISTER_MORE), NIXL_OK);
    join(&prefill, &decode, &decode_peer, &prefill_peer);
    /* Our own hello may still be on its way; a refusal changes nothing. */
    for (const uint64_t start = now_ms(); receive(&decode, &next, &prefill_peer, 1).status != NIXL_OK; sleep_ms(1))
        CHECK(now_ms() - start < 5000);
    EXPECT(send_part(&prefill, &next, 0, 20, NIXLKV_CHUNK_LAST), NIXL_OK);
    EXPECT_OVER(&decode, 61, NIXL_OK, "", 10000);
    EXPECT_OVER(&prefill, 61, NIXL_OK, "", 10000);
    transfer_works(&prefill, &decode, prefill_peer, 62);
}

static void deregistered(void) {
    const request_t r = request_of(70, 20);
    poison_all(&decode);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    EXPECT(send_part(&prefill, &r, 0, 5, 0), NIXL_OK);
    EXPECT(simple(&decode, OP_DEREGISTER), NIXL_ERR_REGION_BUSY);
    EXPECT(simple(&prefill, OP_DEREGISTER), NIXL_ERR_REGION_BUSY);
    EXPECT(send_part(&prefill, &r, 5, 15, NIXLKV_CHUNK_LAST), NIXL_OK);
    EXPECT_OVER(&decode, 70, NIXL_OK, "", 10000);
    EXPECT_OVER(&prefill, 70, NIXL_OK, "", 10000);
    EXPECT(simple(&decode, OP_DEREGISTER), NIXL_OK);
    EXPECT(simple(&prefill, OP_DEREGISTER), NIXL_OK);
    EXPECT(simple(&prefill, OP_DEREGISTER), NIXL_ERR_REGION_UNKNOWN);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_ERR_PEER_STALE);
    join(&prefill, &decode, &decode_peer, &prefill_peer);
    for (const uint64_t start = now_ms(); receive(&decode, &r, &prefill_peer, 1).status != NIXL_OK; sleep_ms(1))
        CHECK(now_ms() - start < 5000);
    EXPECT(send_part(&prefill, &r, 0, 20, NIXLKV_CHUNK_LAST), NIXL_OK);
    EXPECT_OVER(&decode, 70, NIXL_OK, "", 10000);
    EXPECT_OVER(&prefill, 70, NIXL_OK, "", 10000);
    transfer_works(&prefill, &decode, prefill_peer, 71);
}

int main(void) {
    prefill = node_start(prefill_config);
    decode = node_start(decode_config);
    join(&prefill, &decode, &decode_peer, &prefill_peer);
    transfer_works(&prefill, &decode, prefill_peer, 1);
    disconnected();
    restarted();
    registered_more();
    deregistered();
    node_quit(&prefill);
    node_quit(&decode);
    return 0;
}
