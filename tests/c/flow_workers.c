/* Three transfer threads and three peers: rooms with all of them at the same time, and a stopped one holds up only its
 * own. */
/* timeout: 90 */
#include "flow.h"

enum { PEERS = 3, NUM_PAGES = 64, ROOMS = 12 };

/* A room without KV, so that it leaves the pages alone that the stopped peer's room still sends. */
static void transfer_works_beside(const node_t *from, const node_t *to, uint64_t from_at_to, uint64_t room) {
    request_t r = request_of(room, 0);
    r.aux_from = r.state_from = NODE_SLOTS - 1;
    poison_all(to);
    EXPECT(receive(to, &r, &from_at_to, 1), NIXL_OK);
    EXPECT(send_part(from, &r, 0, 0, NIXLKV_CHUNK_LAST), NIXL_OK);
    EXPECT_ENDED(to, room, NIXL_OK, "", 2000);
    EXPECT_CONTENTS(to, &r);
    EXPECT_OVER(to, room, NIXL_OK, "", 2000);
    EXPECT_OVER(from, room, NIXL_OK, "", 2000);
}

int main(void) {
    node_config_t config = {.tls = "tcp,self", .num_pages = NUM_PAGES, .page_len = 256 << 10, .num_layers = 2};
    config.role = NIXLKV_ROLE_PREFILL;
    config.num_workers = 3;
    node_t prefill = node_start(config);
    config.role = NIXLKV_ROLE_DECODE;
    config.num_workers = 2;
    node_t decode[PEERS];
    uint64_t decode_peer[PEERS], prefill_peer[PEERS];
    for (int i = 0; i < PEERS; i++) {
        decode[i] = node_start(config);
        join(&prefill, &decode[i], &decode_peer[i], &prefill_peer[i]);
    }

    for (uint64_t n = 0; n < ROOMS; n++) {
        request_t r[PEERS];
        for (uint64_t i = 0; i < PEERS; i++) {
            r[i] = request_of(100 * n + i, 10 + n % 8 + i);
            /* The peers' source pages and slots are apart from each other: none is stamped twice. */
            r[i].from_seed = 0;
            r[i].from_base = (int32_t)i * (NUM_PAGES / PEERS);
            r[i].aux_from = r[i].state_from = (int32_t)i;
            poison_all(&decode[i]);
            EXPECT(receive(&decode[i], &r[i], &prefill_peer[i], 1), NIXL_OK);
        }
        for (uint64_t part = 0; part < 2; part++)
            for (uint64_t i = 0; i < PEERS; i++) {
                const uint64_t count = part == 0 ? 5 : r[i].total - 5;
                EXPECT(send_part(&prefill, &r[i], part * 5, count, part ? NIXLKV_CHUNK_LAST : 0), NIXL_OK);
            }
        for (uint64_t i = 0; i < PEERS; i++) {
            EXPECT_ENDED(&decode[i], r[i].room, NIXL_OK, "", 20000);
            EXPECT_CONTENTS(&decode[i], &r[i]);
            EXPECT_OVER(&decode[i], r[i].room, NIXL_OK, "", 20000);
            EXPECT_OVER(&prefill, r[i].room, NIXL_OK, "", 20000);
        }
    }

    for (int stopped = 0; stopped < PEERS; stopped++) {
        request_t r = request_of(5000 + (uint64_t)stopped, NUM_PAGES);
        r.from_seed = 0;
        EXPECT(receive(&decode[stopped], &r, &prefill_peer[stopped], 1), NIXL_OK);
        for (uint64_t start = now_ms(); status_of(&prefill, r.room).state != NIXLKV_ROOM_WAITING_FOR_INPUT; sleep_ms(1))
            CHECK(now_ms() - start < 5000);
        node_stop(&decode[stopped]);
        EXPECT(send_part(&prefill, &r, 0, NUM_PAGES, NIXLKV_CHUNK_LAST), NIXL_OK);
        for (int i = 0; i < PEERS; i++)
            if (i != stopped) transfer_works_beside(&prefill, &decode[i], prefill_peer[i], 6000);
        CHECK(status_of(&prefill, r.room).state == NIXLKV_ROOM_TRANSFERRING);
        node_continue(&decode[stopped]);
        EXPECT_OVER(&decode[stopped], r.room, NIXL_OK, "", 20000);
        EXPECT_OVER(&prefill, r.room, NIXL_OK, "", 20000);
    }
    node_quit(&prefill);
    for (int i = 0; i < PEERS; i++) node_quit(&decode[i]);
    return 0;
}
