/* E8: both cores busy with four spinning processes, 32 MiB transfers all the time, and now and then a peer that is
 * stopped for less than the liveness limit: nobody is taken for lost. 20 s; 60 s with NIXLKV_TEST_LONG in the
 * environment. */
/* timeout: 150 */
#include "flow.h"

enum { NUM_PAGES = 128, TRANSFER = 64, PAGE = 1 << 19, SPINNERS = 4, STOPPED_MS = 2000 };

static int spin(int fd) {
    (void)fd;
    for (volatile uint64_t n = 0;; n++) {
    }
    return 0;
}

static node_t prefill, decode;
static uint64_t decode_peer, prefill_peer;

static void alive(void) {
    const node_t *nodes[2] = {&prefill, &decode};
    for (int i = 0; i < 2; i++) {
        const nixlkv_health_t health = health_of(nodes[i]);
        CHECK(health.num_peers == 1 && health.num_peers_lost == 0 && health.num_peers_silent == 0);
        CHECK(stats_of(nodes[i]).rooms_failed == 0);
    }
}

static request_t part_of(uint64_t room, int32_t base) {
    request_t r = request_of(room, TRANSFER);
    r.from_seed = r.to_seed = 0;
    r.from_base = r.to_base = base;
    return r;
}

int main(void) {
    const uint64_t duration_ms = getenv("NIXLKV_TEST_LONG") != NULL ? 60000 : 20000;
    node_config_t config = {.tls = "tcp,self", .num_layers = 1, .num_pages = NUM_PAGES, .page_len = PAGE};
    config.role = NIXLKV_ROLE_PREFILL;
    prefill = node_start(config);
    config.role = NIXLKV_ROLE_DECODE;
    decode = node_start(config);
    join(&prefill, &decode, &decode_peer, &prefill_peer);
    /* Open from the first to the last moment: a loss in between would fail it. */
    request_t witness = part_of(1, TRANSFER);
    witness.aux_from = witness.aux_to = witness.state_from = witness.state_to = NODE_SLOTS - 1;
    EXPECT(receive(&decode, &witness, &prefill_peer, 1), NIXL_OK);
    EXPECT(send_part(&prefill, &witness, 0, 1, 0), NIXL_OK);

    child_t spinners[SPINNERS];
    for (int i = 0; i < SPINNERS; i++) spinners[i] = spawn(spin);
    uint64_t room = 2, next_stop = now_ms() + 4000;
    for (const uint64_t start = now_ms(); now_ms() - start < duration_ms; room++) {
        request_t r = part_of(room, 0);
        r.aux_from = r.aux_to = r.state_from = r.state_to = 0;
        EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
        EXPECT(send_part(&prefill, &r, 0, TRANSFER, NIXLKV_CHUNK_LAST), NIXL_OK);
        if (now_ms() > next_stop) {
            /* Less than the limit, which is 5 s. */
            const node_t *node = room % 2 ? &decode : &prefill;
            node_stop(node);
            sleep_ms(STOPPED_MS);
            node_continue(node);
            next_stop = now_ms() + 3000;
        }
        EXPECT_OVER(&decode, room, NIXL_OK, "", 30000);
        EXPECT_OVER(&prefill, room, NIXL_OK, "", 30000);
        alive();
    }
    for (int i = 0; i < SPINNERS; i++) {
        kill(spinners[i].pid, SIGKILL);
        waitpid(spinners[i].pid, NULL, 0);
        close(spinners[i].fd);
    }
    CHECK(room > 4);
    EXPECT(send_part(&prefill, &witness, 1, TRANSFER - 1, NIXLKV_CHUNK_LAST), NIXL_OK);
    EXPECT_OVER(&decode, 1, NIXL_OK, "", 30000);
    EXPECT_OVER(&prefill, 1, NIXL_OK, "", 30000);
    alive();
    printf("%" PRIu64 " transfers of 32 MiB\n", room - 2);
    transfer_works(&prefill, &decode, prefill_peer, 1);
    node_quit(&prefill);
    node_quit(&decode);
    return 0;
}
