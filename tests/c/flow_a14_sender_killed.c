/* The sender is killed at a random point of a large write: the receiver's room ends within the liveness bound, and is a
 * success only if every byte is right (CASES A14). */
/* timeout: 400 */
#include "flow.h"

enum { MIB = 1 << 20, NUM_PAGES = 64, RUNS = 100, LIMIT_MS = 1500 };

int main(void) {
    const uint64_t seed = now_ns();
    printf("seed %" PRIu64 "\n", seed);
    fflush(stdout);
    node_config_t config = {.tls = "tcp,self", .num_layers = 1, .num_pages = NUM_PAGES, .page_len = MIB};
    config.heartbeat_ms = 300;
    config.liveness_ms = LIMIT_MS;
    config.role = NIXLKV_ROLE_DECODE;
    node_t decode = node_start(config);
    config.role = NIXLKV_ROLE_PREFILL;
    uint64_t decode_peer, prefill_peer, lost = 0;
    for (uint64_t run = 0; run < RUNS; run++) {
        node_t prefill = node_start(config);
        join(&prefill, &decode, &decode_peer, &prefill_peer);
        request_t r = request_of(100 + run, NUM_PAGES);
        poison_all(&decode);
        EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
        for (const uint64_t start = now_ms(); status_of(&prefill, r.room).state != NIXLKV_ROOM_WAITING_FOR_INPUT;)
            CHECK(now_ms() - start < 10000);
        for (uint64_t offset = 0; offset < NUM_PAGES; offset += 16)
            EXPECT(send_part(&prefill, &r, offset, 16, offset + 16 == NUM_PAGES ? NIXLKV_CHUNK_LAST : 0), NIXL_OK);
        sleep_ms((unsigned)(mix(seed + run) % (1 + 3 * run)));
        node_kill(&prefill);
        const uint64_t start = now_ms();
        const answer_t ended = wait_for(&decode, r.room, NIXLKV_WAIT_QUIESCED, 20000);
        EXPECT(ended, NIXL_OK);
        const uint64_t took_ms = now_ms() - start;
        if (ended.quiesced != 1 || took_ms >= 3 * LIMIT_MS)
            FAIL("run %" PRIu64 ": quiesced %u after %" PRIu64 " ms: %s", run, ended.quiesced, took_ms, ended.text);
        if (ended.state == NIXLKV_ROOM_SUCCESS) {
            EXPECT_CONTENTS(&decode, &r);
        } else {
            CHECK(ended.error == NIXL_ERR_PEER_LOST);
            lost++;
        }
        EXPECT(release(&decode, r.room), NIXL_OK);
    }
    printf("%" PRIu64 " of %d rooms were lost\n", lost, RUNS);
    fflush(stdout);
    node_t prefill = node_start(config);
    join(&prefill, &decode, &decode_peer, &prefill_peer);
    transfer_works(&prefill, &decode, prefill_peer, 100);
    node_quit(&prefill);
    node_quit(&decode);
    return 0;
}
