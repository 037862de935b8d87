/* E1: one of a pair is killed and started anew under its name, 20 times for either role, idle and in the middle of
 * requests. The first request after its blob is known works within 5 s, with nothing done at the other side but that.
 * */
/* timeout: 180 */
#include "flow.h"

enum { RESTARTS = 40, LOAD = 4, WITHIN_MS = 5000 };

static node_config_t configs[2] = {{.role = NIXLKV_ROLE_PREFILL, .name = "prefill-0"},
                                   {.role = NIXLKV_ROLE_DECODE, .name = "decode-0"}};
static node_t nodes[2];
static uint64_t peers[2]; /* each one's id of the other */

static request_t bare(uint64_t room, uint64_t total, int32_t base) {
    return (request_t){.room = room,
                       .key = mix(room),
                       .total = total,
                       .from_base = base,
                       .to_base = base,
                       .aux_from = -1,
                       .aux_to = -1,
                       .state_from = -1,
                       .state_to = -1};
}

static void request_works(uint64_t room) {
    const request_t r = bare(room, 20, 44);
    poison_all(&nodes[1]);
    EXPECT(receive(&nodes[1], &r, &peers[1], 1), NIXL_OK);
    EXPECT(send_part(&nodes[0], &r, 0, 7, 0), NIXL_OK);
    EXPECT(send_part(&nodes[0], &r, 7, 13, NIXLKV_CHUNK_LAST), NIXL_OK);
    EXPECT_ENDED(&nodes[1], room, NIXL_OK, "", 20000);
    EXPECT_CONTENTS(&nodes[1], &r);
    EXPECT_OVER(&nodes[1], room, NIXL_OK, "", 20000);
    EXPECT_OVER(&nodes[0], room, NIXL_OK, "", 20000);
}

int main(void) {
    for (int i = 0; i < 2; i++) {
        configs[i].heartbeat_ms = 200;
        configs[i].no_aux = configs[i].no_state = true;
        nodes[i] = node_start(configs[i]);
    }
    join(&nodes[0], &nodes[1], &peers[0], &peers[1]);
    uint64_t slowest = 0;
    for (uint64_t n = 0; n < RESTARTS; n++) {
        const int victim = (int)(n % 2), survivor = 1 - victim;
        const bool loaded = n / 2 % 2;
        request_t load[LOAD];
        if (loaded)
            for (int32_t i = 0; i < LOAD; i++) {
                load[i] = bare(1000 + n * LOAD + (uint64_t)i, 10, 10 * i);
                EXPECT(receive(&nodes[1], &load[i], &peers[1], 1), NIXL_OK);
                await_granted(&nodes[0], load[i].room);
                /* One without a chunk, one with all but the last. */
                if (i > 0) EXPECT(send_part(&nodes[0], &load[i], 0, i == 1 ? 1 : 9, 0), NIXL_OK);
            }
        else request_works(1);
        node_kill(&nodes[victim]);
        const uint64_t start = now_ms();
        nodes[victim] = node_start(configs[victim]);
        const uint64_t old = peers[survivor];
        join(&nodes[0], &nodes[1], &peers[0], &peers[1]);
        CHECK(peers[survivor] != old);
        request_works(1);
        const uint64_t took = now_ms() - start;
        if (took > WITHIN_MS) FAIL("restart %" PRIu64 ": the first request took %" PRIu64 " ms", n, took);
        if (took > slowest) slowest = took;
        for (int i = 0; loaded && i < LOAD; i++) {
            if (survivor == 0 && i == 0) continue; /* it had not begun it */
            const answer_t ended = wait_for(&nodes[survivor], load[i].room, NIXLKV_WAIT_QUIESCED, 10000);
            if (ended.status != NIXL_OK)
                FAIL("restart %" PRIu64 ", room %d: %s; state %u, error %s (%s), quiesced %u", n, i,
                     nixlkv_status_name(ended.status), ended.state, nixlkv_status_name(ended.error), ended.text,
                     ended.quiesced);
            CHECK(ended.error == NIXL_ERR_PEER_LOST || ended.error == NIXL_ERR_PEER_RESTARTED);
            EXPECT(release(&nodes[survivor], load[i].room), NIXL_OK);
        }
        CHECK(stats_of(&nodes[survivor]).rooms_unquiesced == 0);
    }
    printf("the slowest first request was through %" PRIu64 " ms after the kill\n", slowest);
    for (int i = 0; i < 2; i++) node_quit(&nodes[i]);
    return 0;
}
