/* One sender fills several receivers, and several senders fill one receiver. */
/* timeout: 120 */
#include "flow.h"

enum { RANKS = 4, LAYERS_EACH = 2 };

static void one_to_two(void) {
    node_t prefill = node_start((node_config_t){.role = NIXLKV_ROLE_PREFILL});
    node_t decode[2];
    uint64_t decode_peer[2], prefill_peer[2];
    for (int i = 0; i < 2; i++) {
        decode[i] = node_start((node_config_t){.role = NIXLKV_ROLE_DECODE});
        join(&prefill, &decode[i], &decode_peer[i], &prefill_peer[i]);
    }

    for (uint64_t room = 1; room <= 6; room++) {
        /* The two receivers have pages and slots of their own. */
        request_t r[2] = {request_of(room, 24), request_of(room, 24)};
        r[1].to_seed = 77;
        r[1].aux_to = (r[0].aux_to + 1) % NODE_SLOTS;
        for (int i = 0; i < 2; i++) {
            r[i].num_receivers = 2;
            poison_all(&decode[i]);
        }
        const bool early = room % 2;
        if (early) EXPECT(send_part(&prefill, &r[0], 0, 10, 0), NIXL_OK);
        EXPECT(receive(&decode[0], &r[0], &prefill_peer[0], 1), NIXL_OK);
        if (!early) EXPECT(send_part(&prefill, &r[0], 0, 10, 0), NIXL_OK);
        /* Nothing moves before the second has granted too. */
        sleep_ms(50);
        CHECK(status_of(&decode[0], room).num_pages == 0);
        CHECK(status_of(&prefill, room).state == NIXLKV_ROOM_BOOTSTRAPPING);
        EXPECT(receive(&decode[1], &r[1], &prefill_peer[1], 1), NIXL_OK);
        EXPECT(send_part(&prefill, &r[0], 10, 14, NIXLKV_CHUNK_LAST), NIXL_OK);
        for (int i = 0; i < 2; i++) {
            EXPECT_ENDED(&decode[i], room, NIXL_OK, "", 10000);
            EXPECT_CONTENTS(&decode[i], &r[i]);
            EXPECT_OVER(&decode[i], room, NIXL_OK, "", 10000);
        }
        EXPECT_ENDED(&prefill, room, NIXL_OK, "", 10000);
        const answer_t sent = status_of(&prefill, room);
        CHECK(sent.num_chunks == 2 && sent.num_pages == 24);
        CHECK(sent.num_bytes == 2 * (24 * 2 * 4096 + NODE_AUX + NODE_STATE));
        EXPECT_OVER(&prefill, room, NIXL_OK, "", 10000);
    }

    /* One of the two gives up: all three sides hear why. */
    request_t r = request_of(20, 24);
    r.num_receivers = 2;
    EXPECT(receive(&decode[0], &r, &prefill_peer[0], 1), NIXL_OK);
    EXPECT(receive(&decode[1], &r, &prefill_peer[1], 1), NIXL_OK);
    EXPECT(send_part(&prefill, &r, 0, 10, 0), NIXL_OK);
    EXPECT(abort_room(&decode[1], 20, "no more"), NIXL_OK);
    EXPECT_OVER(&prefill, 20, NIXL_ERR_ABORTED, "no more", 5000);
    EXPECT_OVER(&decode[0], 20, NIXL_ERR_ABORTED, "no more", 5000);
    EXPECT_OVER(&decode[1], 20, NIXL_ERR_ABORTED, "no more", 5000);

    /* The two do not agree. */
    request_t other = r;
    other.total = 23;
    EXPECT(send_part(&prefill, &r, 0, 10, 0), NIXL_OK);
    EXPECT(receive(&decode[0], &r, &prefill_peer[0], 1), NIXL_OK);
    EXPECT(receive(&decode[1], &other, &prefill_peer[1], 1), NIXL_OK);
    EXPECT_OVER(&prefill, 20, NIXL_ERR_PAGE_COUNT, "differ", 5000);
    EXPECT_OVER(&decode[0], 20, NIXL_ERR_PAGE_COUNT, "differ", 5000);
    EXPECT_OVER(&decode[1], 20, NIXL_ERR_PAGE_COUNT, "differ", 5000);
    transfer_works(&prefill, &decode[0], prefill_peer[0], 20);
    transfer_works(&prefill, &decode[1], prefill_peer[1], 20);
    node_quit(&prefill);
    for (int i = 0; i < 2; i++) node_quit(&decode[i]);
}

/* Four pipeline stages with layers of their own; the aux slot has one owner (CASES A5, B6, G3). */
static void four_to_one(void) {
    node_t prefill[RANKS];
    node_t decode = node_start((node_config_t){.role = NIXLKV_ROLE_DECODE, .num_layers = RANKS * LAYERS_EACH});
    uint64_t at_decode[RANKS], unused;
    for (uint32_t i = 0; i < RANKS; i++) {
        prefill[i] = node_start((node_config_t){.role = NIXLKV_ROLE_PREFILL,
                                                .first_layer = i * LAYERS_EACH,
                                                .num_layers = LAYERS_EACH,
                                                .no_state = i != 2});
        join(&prefill[i], &decode, &unused, &at_decode[i]);
    }

    for (uint64_t room = 1; room <= 8; room++) {
        const uint32_t owner = (uint32_t)(room % RANKS), late = (uint32_t)(room / 2 % RANKS);
        request_t r = request_of(room, 24);
        r.aux_sender = at_decode[owner];
        poison_all(&decode);
        request_t three = r;
        three.aux_sender = at_decode[0];
        EXPECT(receive(&decode, &three, at_decode, 3), NIXL_ERR_LAYERS_INCOMPLETE);
        EXPECT(receive(&decode, &r, at_decode, RANKS), NIXL_OK);
        for (uint32_t i = 0; i < RANKS; i++)
            for (uint64_t start = now_ms(); status_of(&prefill[i], room).state != NIXLKV_ROOM_WAITING_FOR_INPUT;)
                CHECK(now_ms() - start < 5000);
        request_t part[RANKS];
        for (uint32_t i = 0; i < RANKS; i++) {
            part[i] = r;
            part[i].from_seed = mix(room * 10 + i) | 1;
            if (i != 2) part[i].state_from = -1;
            if (i != owner) {
                /* Exactly one may fill the aux slot, and the others are told before anything moves. */
                EXPECT(send_part(&prefill[i], &part[i], 0, 24, NIXLKV_CHUNK_LAST), NIXL_ERR_AUX_NOT_OWNER);
                part[i].aux_from = -1;
            }
        }
        for (uint32_t i = 0; i < RANKS; i++) {
            EXPECT(send_part(&prefill[i], &part[i], 0, 9, 0), NIXL_OK);
            if (i != late) EXPECT(send_part(&prefill[i], &part[i], 9, 15, NIXLKV_CHUNK_LAST), NIXL_OK);
        }
        for (uint64_t start = now_ms(); status_of(&decode, room).num_chunks < 7; sleep_ms(1))
            CHECK(now_ms() - start < 10000);
        /* Three of four are not enough. */
        sleep_ms(50);
        const answer_t waiting = status_of(&decode, room);
        CHECK(waiting.state == NIXLKV_ROOM_TRANSFERRING && waiting.num_chunks == 7);
        for (uint32_t i = 0; i < RANKS; i++) CHECK(status_of(&prefill[i], room).state == NIXLKV_ROOM_TRANSFERRING);
        EXPECT(send_part(&prefill[late], &part[late], 9, 15, NIXLKV_CHUNK_LAST), NIXL_OK);
        EXPECT_ENDED(&decode, room, NIXL_OK, "", 10000);
        EXPECT_CONTENTS(&decode, &r);
        EXPECT_OVER(&decode, room, NIXL_OK, "", 10000);
        for (uint32_t i = 0; i < RANKS; i++) EXPECT_OVER(&prefill[i], room, NIXL_OK, "", 10000);
    }

    /* One of the four fails: the receiver and the three others hear why. */
    request_t r = request_of(30, 24);
    r.state_from = -1;
    EXPECT(receive(&decode, &r, at_decode, RANKS), NIXL_OK);
    for (uint32_t i = 0; i < RANKS; i++) EXPECT(send_part(&prefill[i], &r, 0, 9, 0), NIXL_OK);
    EXPECT(abort_room(&prefill[1], 30, "rank 1 is out of memory"), NIXL_OK);
    EXPECT_OVER(&decode, 30, NIXL_ERR_ABORTED, "rank 1 is out of memory", 5000);
    for (uint32_t i = 0; i < RANKS; i++)
        EXPECT_OVER(&prefill[i], 30, NIXL_ERR_ABORTED, "rank 1 is out of memory", 5000);
    node_kill(&prefill[3]);
    for (uint32_t i = 0; i < 3; i++) node_quit(&prefill[i]);
    node_quit(&decode);
}

int main(void) {
    one_to_two();
    four_to_one();
    return 0;
}
