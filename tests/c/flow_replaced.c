/* An engine takes the name of one that is only stopped, in the middle of a write: the old one's room fails, but its
 * pages are not reported free before it has drained or its process is gone. */
/* timeout: 120 */
#include "flow.h"

enum { MIB = 1 << 20, NUM_PAGES = 96, TRIES = 10 };

int main(void) {
    node_config_t config = {.tls = "tcp,self", .num_layers = 1, .num_pages = NUM_PAGES, .page_len = MIB};
    config.heartbeat_ms = 200;
    config.liveness_ms = 60000;
    config.role = NIXLKV_ROLE_DECODE;
    node_t decode = node_start(config);
    config.role = NIXLKV_ROLE_PREFILL;
    config.name = "prefill-0";
    int caught = 0;
    for (uint64_t n = 0; n < TRIES && caught < 2; n++) {
        node_t old = node_start(config), fresh = node_start(config);
        uint64_t decode_at_old, old_at_decode, decode_at_fresh, fresh_at_decode;
        join(&old, &decode, &decode_at_old, &old_at_decode);
        const request_t r = request_of(100 + n, NUM_PAGES);
        poison_all(&decode);
        EXPECT(receive(&decode, &r, &old_at_decode, 1), NIXL_OK);
        for (const uint64_t start = now_ms(); status_of(&old, r.room).state != NIXLKV_ROOM_WAITING_FOR_INPUT;)
            CHECK(now_ms() - start < 10000);
        EXPECT(send_part(&old, &r, 0, NUM_PAGES, NIXLKV_CHUNK_LAST), NIXL_OK);
        node_stop(&old);
        join(&fresh, &decode, &decode_at_fresh, &fresh_at_decode);
        const answer_t ended = wait_for(&decode, r.room, NIXLKV_WAIT_ALL, 10000);
        EXPECT(ended, NIXL_OK);
        if (ended.state == NIXLKV_ROOM_FAILED) {
            caught++;
            CHECK(ended.error == NIXL_ERR_PEER_RESTARTED);
            CHECK(wait_for(&decode, r.room, NIXLKV_WAIT_QUIESCED, 1000).status == NIXL_ERR_WAIT_TIMEOUT);
            EXPECT(release(&decode, r.room), NIXL_ERR_NOT_QUIESCED);
            EXPECT(receive(&decode, &r, &old_at_decode, 1), NIXL_ERR_ROOM_IN_USE);
            request_t other = request_of(99, 0);
            other.aux_to = other.state_to = -1;
            EXPECT(receive(&decode, &other, &old_at_decode, 1), NIXL_ERR_PEER_UNKNOWN);
            /* The first time it comes back and drains, the second time it is killed. */
            if (caught == 1) {
                node_continue(&old);
                EXPECT_OVER(&old, r.room, NIXL_ERR_PEER_RESTARTED, "prefill-0", 20000);
            } else {
                node_kill(&old);
            }
            EXPECT_OVER(&decode, r.room, NIXL_ERR_PEER_RESTARTED, "prefill-0", 20000);
            /* What was free when we were told so stays as it is. */
            poison_all(&decode);
            sleep_ms(300);
            const answer_t found = ask(&decode, &(op_t){.what = OP_CHECK, .request = other});
            CHECK(found.stray == 0);
            if (caught == 1) node_kill(&old);
        } else {
            node_kill(&old);
            EXPECT(release(&decode, r.room), NIXL_OK);
        }
        transfer_works(&fresh, &decode, fresh_at_decode, 1);
        node_quit(&fresh);
    }
    CHECK(caught == 2);
    node_quit(&decode);
    return 0;
}
