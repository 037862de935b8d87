/* C1: one side is killed in the middle of a transfer and started again under its name, many times, first the receiver,
 * then the sender. The survivor never dies, fails what was in flight and serves the new instance within 5 s. What it
 * loses per restart (file descriptors, threads, memory) is reported and bounded. NIXLKV_TEST_LOOPS: restarts of each
 * side, 50 by default. */
/* env: UCX_TLS=tcp,self */
/* timeout: 600 */
#include "flow.h"

enum { PAGE = 256 << 10, NUM_PAGES = 48, WARM_UP = 5, MAX_FDS_PER_RESTART = 4, MAX_KIB_PER_RESTART = 300 };

static void restart_loops(uint32_t survivor_role, uint64_t loops) {
    const bool sender_survives = survivor_role == NIXLKV_ROLE_PREFILL;
    const char *what = sender_survives ? "receiver" : "sender";
    node_config_t config = {.num_layers = 1, .num_pages = NUM_PAGES, .page_len = PAGE};
    node_config_t mortal_config = config;
    config.name = "survivor";
    config.role = survivor_role;
    mortal_config.name = "mortal";
    mortal_config.role = sender_survives ? NIXLKV_ROLE_DECODE : NIXLKV_ROLE_PREFILL;
    node_t survivor = node_start(config), mortal = node_start(mortal_config);
    const node_t *from = sender_survives ? &survivor : &mortal, *to = sender_survives ? &mortal : &survivor;
    uint64_t mortal_peer, survivor_peer, caught = 0, slowest = 0;
    join(&survivor, &mortal, &mortal_peer, &survivor_peer);
    usage_t first = {0}, last = {0};

    for (uint64_t n = 0; n < loops; n++) {
        const request_t r = request_of(100 + n, NUM_PAGES);
        const uint64_t *at_receiver = sender_survives ? &survivor_peer : &mortal_peer;
        EXPECT(receive(to, &r, at_receiver, 1), NIXL_OK);
        for (const uint64_t start = now_ms(); status_of(from, r.room).state != NIXLKV_ROOM_WAITING_FOR_INPUT;)
            CHECK(now_ms() - start < 10000);
        /* In every second loop the transfer is stuck when the kill comes; in the others, wherever it happens to be. */
        const bool stopped = n % 2 == 0;
        if (stopped && sender_survives) node_stop(&mortal);
        EXPECT(send_part(from, &r, 0, NUM_PAGES / 2, 0), NIXL_OK);
        if (!stopped || sender_survives)
            EXPECT(send_part(from, &r, NUM_PAGES / 2, NUM_PAGES / 2, NIXLKV_CHUNK_LAST), NIXL_OK);
        if (!stopped) sleep_ms((unsigned)(mix(n) % 24));
        node_kill(&mortal);
        mortal = node_start(mortal_config);
        const blob_t blob = blob_of(&mortal); /* it is up */
        free(blob.bytes);
        const uint64_t start = now_ms();
        join(&survivor, &mortal, &mortal_peer, &survivor_peer);

        /* What was in flight has ended here: a room that had not completed before the kill as a failure. */
        const answer_t ended = wait_for(&survivor, r.room, NIXLKV_WAIT_QUIESCED, 10000);
        EXPECT(ended, NIXL_OK);
        CHECK(ended.quiesced == 1);
        if (ended.state == NIXLKV_ROOM_FAILED) {
            caught++;
            if (ended.error != NIXL_ERR_PEER_LOST && ended.error != NIXL_ERR_PEER_RESTARTED)
                FAIL("loop %" PRIu64 ": room failed with %s: %s", n, nixlkv_status_name(ended.error), ended.text);
        } else {
            CHECK(ended.state == NIXLKV_ROOM_SUCCESS && !stopped);
        }
        EXPECT(release(&survivor, r.room), NIXL_OK);
        transfer_works(from, to, sender_survives ? survivor_peer : mortal_peer, r.room);
        const uint64_t took = now_ms() - start;
        slowest = took > slowest ? took : slowest;
        if (took >= 5000) FAIL("loop %" PRIu64 ": served %" PRIu64 " ms after the restart of the %s", n, took, what);
        const nixlkv_stats_t stats = stats_of(&survivor);
        CHECK(stats.rooms_active == 0 && stats.rooms_unquiesced == 0 && stats.chunks_pending == 0);
        /* Of the lives that are over, nothing is kept. */
        nixlkv_health_t health = health_of(&survivor);
        for (const uint64_t end = now_ms() + 5000; health.num_peers > 1 && now_ms() < end; sleep_ms(10))
            health = health_of(&survivor);
        CHECK(health.num_peers == 1 && health.num_rooms_quarantined == 0 && health.num_grants_parked == 0);
        last = usage_of(survivor.child.pid);
        if (n == WARM_UP) first = last;
        if (n % 20 == 0 || n + 1 == loops)
            printf("%s %" PRIu64 ": survivor has %lld fds, %lld threads, %lld KiB\n", what, n, (long long)last.fds,
                   (long long)last.threads, (long long)last.rss_kib);
    }
    const double between = (double)(loops - 1 - WARM_UP);
    const double fds = (double)(last.fds - first.fds) / between, rss = (double)(last.rss_kib - first.rss_kib) / between;
    printf("%s killed %" PRIu64 " times, %" PRIu64 " in mid-transfer; slowest restart %" PRIu64
           " ms; per restart the survivor gained %.2f fds, %.1f KiB; threads %lld, then %lld\n",
           what, loops, caught, slowest, fds, rss, (long long)first.threads, (long long)last.threads);
    CHECK(caught >= loops / 2);
    CHECK(fds <= MAX_FDS_PER_RESTART);
    CHECK(rss <= MAX_KIB_PER_RESTART);
    CHECK(last.threads == first.threads);
    node_quit(&mortal);
    node_quit(&survivor);
}

int main(void) {
    const uint64_t loops = count_from("NIXLKV_TEST_LOOPS", 50);
    CHECK(loops > 2 * WARM_UP);
    setvbuf(stdout, NULL, _IONBF, 0); /* or each restarted process would print what is buffered again */
    restart_loops(NIXLKV_ROLE_PREFILL, loops);
    restart_loops(NIXLKV_ROLE_DECODE, loops);
    return 0;
}
