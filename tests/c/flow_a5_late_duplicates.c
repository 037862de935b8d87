/* A5: four senders fill one room, one of them its aux slot; the others are refused. Every message that decode gets
 * comes a second time up to a quarter of a second later, when the room's id, pages and aux slot are another request's
 * already: nothing of that changes, and no room ends early. */
/* timeout: 120 */
#include "flow.h"

enum { RANKS = 4, ROOMS = 60, PAGES = 12 };

int main(void) {
    node_t rank[RANKS];
    node_t decode = node_start((node_config_t){.role = NIXLKV_ROLE_DECODE, .num_layers = RANKS, .no_state = true});
    uint64_t at_decode[RANKS], unused;
    for (uint32_t i = 0; i < RANKS; i++) {
        rank[i] = node_start(
            (node_config_t){.role = NIXLKV_ROLE_PREFILL, .first_layer = i, .num_layers = 1, .no_state = true});
        join(&rank[i], &decode, &unused, &at_decode[i]);
    }
    arm(&decode, "repeat_message", 0, UINT64_MAX);
    for (uint64_t n = 0; n < ROOMS; n++) {
        /* One id, one aux slot, the same pages; other contents, other owners. */
        const uint32_t owner = (uint32_t)(n % RANKS), late = (uint32_t)(n / 3 % RANKS);
        request_t r = request_of(1, PAGES);
        r.key = mix(1000 + n);
        r.state_from = r.state_to = -1;
        r.aux_sender = at_decode[owner];
        poison_all(&decode);
        EXPECT(receive(&decode, &r, at_decode, RANKS), NIXL_OK);
        request_t part[RANKS];
        for (uint32_t i = 0; i < RANKS; i++) {
            await_granted(&rank[i], 1);
            part[i] = r;
            if (i == owner) continue;
            EXPECT(send_part(&rank[i], &part[i], 0, PAGES, NIXLKV_CHUNK_LAST), NIXL_ERR_AUX_NOT_OWNER);
            part[i].aux_from = -1;
        }
        for (uint32_t i = 0; i < RANKS; i++) {
            EXPECT(send_part(&rank[i], &part[i], 0, 5, 0), NIXL_OK);
            if (i != late) EXPECT(send_part(&rank[i], &part[i], 5, PAGES - 5, NIXLKV_CHUNK_LAST), NIXL_OK);
        }
        if (n % 4 == 0) sleep_ms(60);
        CHECK(status_of(&decode, 1).state != NIXLKV_ROOM_SUCCESS);
        EXPECT(send_part(&rank[late], &part[late], 5, PAGES - 5, NIXLKV_CHUNK_LAST), NIXL_OK);
        EXPECT_ENDED(&decode, 1, NIXL_OK, "", 10000);
        EXPECT_CONTENTS(&decode, &r);
        if (n % 8 == 0) {
            sleep_ms(300);
            EXPECT_CONTENTS(&decode, &r);
        }
        EXPECT_OVER(&decode, 1, NIXL_OK, "", 10000);
        for (uint32_t i = 0; i < RANKS; i++) EXPECT_OVER(&rank[i], 1, NIXL_OK, "", 10000);
    }
    const nixlkv_stats_t stats = stats_of(&decode);
    printf("%" PRIu64 " duplicates, %" PRIu64 " of an earlier life, %" PRIu64 " for no room\n",
           stats.messages_duplicate, stats.messages_stale, stats.messages_unknown_room);
    CHECK(stats.messages_duplicate + stats.messages_stale + stats.messages_unknown_room > ROOMS);
    CHECK(stats.messages_stale > 0);
    for (uint32_t i = 0; i < RANKS; i++) node_quit(&rank[i]);
    node_quit(&decode);
    return 0;
}
