/* F3: two senders fill one room. One of them is killed while the other is stopped in the middle of its write: the
 * room has failed, but its pages are not free before the other has drained. */
/* timeout: 120 */
#include "flow.h"

enum { MIB = 1 << 20, NUM_PAGES = 64, TRIES = 12, CAUGHT = 3 };

int main(void) {
    node_config_t config = {.tls = "tcp,self", .num_pages = NUM_PAGES, .page_len = MIB};
    config.heartbeat_ms = 200;
    config.liveness_ms = 60000;
    config.role = NIXLKV_ROLE_DECODE;
    config.num_layers = 2;
    node_t decode = node_start(config);
    config.role = NIXLKV_ROLE_PREFILL;
    config.num_layers = 1;
    node_t rank[2];
    uint64_t unused, at_decode[2];
    rank[0] = node_start(config);
    join(&rank[0], &decode, &unused, &at_decode[0]);
    int caught = 0;
    for (uint64_t n = 0; n < TRIES && caught < CAUGHT; n++) {
        config.first_layer = 1;
        config.no_state = true;
        rank[1] = node_start(config);
        join(&rank[1], &decode, &unused, &at_decode[1]);
        request_t r = request_of(10 + n, NUM_PAGES), second = r;
        second.aux_from = second.state_from = -1;
        poison_all(&decode);
        EXPECT(receive(&decode, &r, at_decode, 2), NIXL_OK);
        for (int i = 0; i < 2; i++) await_granted(&rank[i], r.room);
        EXPECT(send_part(&rank[1], &second, 0, 1, 0), NIXL_OK);
        for (const uint64_t start = now_ms(); status_of(&decode, r.room).num_pages == 0; sleep_ms(1))
            CHECK(now_ms() - start < 10000);
        EXPECT(send_part(&rank[0], &r, 0, NUM_PAGES, NIXLKV_CHUNK_LAST), NIXL_OK);
        node_stop(&rank[0]);
        node_kill(&rank[1]);
        EXPECT_ENDED(&decode, r.room, NIXL_ERR_PEER_LOST, "", 10000);
        for (int i = 0; i < 20; i++) {
            const answer_t status = status_of(&decode, r.room);
            CHECK(status.state == NIXLKV_ROOM_FAILED && status.error == NIXL_ERR_PEER_LOST && status.quiesced == 0);
            sleep_ms(10);
        }
        CHECK(wait_for(&decode, r.room, NIXLKV_WAIT_QUIESCED, 50).status == NIXL_ERR_WAIT_TIMEOUT);
        EXPECT(release(&decode, r.room), NIXL_ERR_NOT_QUIESCED);
        const nixlkv_health_t health = health_of(&decode);
        CHECK(health.num_rooms_quarantined == 1 && health.num_pages_quarantined == NUM_PAGES);
        const answer_t before = ask(&decode, &(op_t){.what = OP_CHECK, .request = r});
        node_continue(&rank[0]);
        EXPECT_OVER(&decode, r.room, NIXL_ERR_PEER_LOST, "", 20000);
        const answer_t after = ask(&decode, &(op_t){.what = OP_CHECK, .request = r});
        CHECK(after.alien == 0);
        /* Bytes came after the failure and before the room was quiesced: what the quarantine is for. */
        caught += after.value < before.value;
        EXPECT_OVER(&rank[0], r.room, NIXL_ERR_PEER_LOST, "", 20000);
        poison_all(&decode);
        sleep_ms(50);
        const request_t nothing = {.aux_to = -1, .state_to = -1};
        const answer_t none = ask(&decode, &(op_t){.what = OP_CHECK, .request = nothing});
        CHECK(none.stray == 0);
    }
    printf("bytes came after the failure in %d runs\n", caught);
    fflush(stdout);
    CHECK(caught > 0);
    config.first_layer = 1;
    config.no_state = true;
    rank[1] = node_start(config);
    join(&rank[1], &decode, &unused, &at_decode[1]);
    request_t r = request_of(1, NUM_PAGES), second = r;
    second.aux_from = second.state_from = -1;
    poison_all(&decode);
    EXPECT(receive(&decode, &r, at_decode, 2), NIXL_OK);
    EXPECT(send_part(&rank[1], &second, 0, NUM_PAGES, NIXLKV_CHUNK_LAST | NIXLKV_CHUNK_NO_AUX), NIXL_OK);
    EXPECT(send_part(&rank[0], &r, 0, NUM_PAGES, NIXLKV_CHUNK_LAST), NIXL_OK);
    EXPECT_ENDED(&decode, 1, NIXL_OK, "", 20000);
    EXPECT_CONTENTS(&decode, &r);
    EXPECT_OVER(&decode, 1, NIXL_OK, "", 20000);
    for (int i = 0; i < 2; i++) {
        EXPECT_OVER(&rank[i], 1, NIXL_OK, "", 20000);
        node_quit(&rank[i]);
    }
    node_quit(&decode);
    return 0;
}
