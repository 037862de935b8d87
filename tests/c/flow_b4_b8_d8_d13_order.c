/* Chunks in every order, chunks long before the grant, room ids that differ in few bits, and rooms opened twice. */
/* timeout: 90 */
#include "flow.h"

static node_t prefill, decode;
static uint64_t decode_peer, prefill_peer;

/* 16 chunks of 4 pages; the first order begins with the last pages (CASES B4). */
static void any_order(void) {
    for (uint64_t n = 0; n < 24; n++) {
        const request_t r = request_of(100 + n, 64);
        int32_t order[16];
        if (n > 1) shuffle(order, 16, now_ns());
        for (int32_t i = 0; i < 16; i++)
            if (n == 0) order[i] = 15 - i;
            else if (n == 1) order[i] = (i + 15) % 16;
        poison_all(&decode);
        /* Some of them before the grant, in every second round. */
        uint64_t sent = 0;
        if (n % 2 == 1)
            for (; sent < n % 16; sent++) EXPECT(send_part(&prefill, &r, 4 * (uint64_t)order[sent], 4, 0), NIXL_OK);
        EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
        for (; sent < 16; sent++)
            EXPECT(send_part(&prefill, &r, 4 * (uint64_t)order[sent], 4, sent == 15 ? NIXLKV_CHUNK_LAST : 0), NIXL_OK);
        EXPECT_ENDED(&decode, r.room, NIXL_OK, "", 20000);
        EXPECT_CONTENTS(&decode, &r);
        CHECK(status_of(&decode, r.room).num_chunks == 16);
        EXPECT_OVER(&decode, r.room, NIXL_OK, "", 20000);
        EXPECT_OVER(&prefill, r.room, NIXL_OK, "", 20000);
    }
}

/* Everything is sent half a second before decode opens the room (CASES B8). */
static void all_before_the_grant(void) {
    const request_t r = request_of(200, 64);
    poison_all(&decode);
    for (uint64_t i = 0; i < 8; i++)
        EXPECT(send_part(&prefill, &r, 8 * i, 8, i == 7 ? NIXLKV_CHUNK_LAST : 0), NIXL_OK);
    sleep_ms(500);
    CHECK(status_of(&prefill, 200).state == NIXLKV_ROOM_BOOTSTRAPPING);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    EXPECT_ENDED(&decode, 200, NIXL_OK, "", 5000);
    EXPECT_CONTENTS(&decode, &r);
    EXPECT_OVER(&decode, 200, NIXL_OK, "", 5000);
    EXPECT_OVER(&prefill, 200, NIXL_OK, "", 5000);
}

/* Rooms that are equal in their low bits, all open at once, each with pages and an aux slot of its own (CASES D13). */
static void equal_low_bits(void) {
    const uint64_t ids[] = {0x2a,
                            0x2a | UINT64_C(1) << 8,
                            0x2a | UINT64_C(1) << 12,
                            0x2a | UINT64_C(1) << 16,
                            0x2a | UINT64_C(1) << 32,
                            0x2a | UINT64_C(1) << 63,
                            0,
                            UINT64_MAX};
    enum { COUNT = sizeof ids / sizeof ids[0] };
    request_t r[COUNT];
    poison_all(&decode);
    for (int32_t i = 0; i < COUNT; i++) {
        r[i] = (request_t){.room = ids[i], .key = ids[i] + 7, .total = 8, .from_base = 8 * i, .to_base = 56 - 8 * i};
        r[i].aux_from = r[i].state_from = i;
        r[i].aux_to = r[i].state_to = COUNT - 1 - i;
    }
    for (int i = 0; i < COUNT; i++) EXPECT(receive(&decode, &r[i], &prefill_peer, 1), NIXL_OK);
    for (int i = 0; i < COUNT; i++) EXPECT(send_part(&prefill, &r[i], 0, 3, 0), NIXL_OK);
    for (int i = COUNT; i-- > 0;) EXPECT(send_part(&prefill, &r[i], 3, 5, NIXLKV_CHUNK_LAST), NIXL_OK);
    for (int i = 0; i < COUNT; i++) EXPECT_ENDED(&decode, ids[i], NIXL_OK, "", 10000);
    for (int i = 0; i < COUNT; i++) {
        const answer_t found = ask(&decode, &(op_t){.what = OP_CHECK, .request = r[i]});
        CHECK(found.value == 0);
        EXPECT_OVER(&decode, ids[i], NIXL_OK, "", 10000);
        EXPECT_OVER(&prefill, ids[i], NIXL_OK, "", 10000);
    }
}

/* A room that is open already is refused on either side, and completes intact (CASES D8). */
static void opened_twice(void) {
    const request_t r = request_of(300, 20);
    request_t again = r;
    again.to_seed = r.to_seed + 2;
    again.key = 1;
    poison_all(&decode);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    EXPECT(receive(&decode, &again, &prefill_peer, 1), NIXL_ERR_ROOM_IN_USE);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_ERR_ROOM_IN_USE);
    EXPECT(send_part(&prefill, &r, 0, 20, NIXLKV_CHUNK_LAST), NIXL_OK);
    EXPECT_ENDED(&decode, 300, NIXL_OK, "", 10000);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_ERR_ROOM_IN_USE);
    EXPECT_ENDED(&prefill, 300, NIXL_OK, "", 10000);
    EXPECT(send_part(&prefill, &r, 0, 20, NIXLKV_CHUNK_LAST), NIXL_ERR_ROOM_ENDED);
    EXPECT_CONTENTS(&decode, &r);
    EXPECT_OVER(&decode, 300, NIXL_OK, "", 10000);
    EXPECT_OVER(&prefill, 300, NIXL_OK, "", 10000);
    transfer_works(&prefill, &decode, prefill_peer, 300);
}

int main(void) {
    prefill = node_start((node_config_t){.role = NIXLKV_ROLE_PREFILL});
    decode = node_start((node_config_t){.role = NIXLKV_ROLE_DECODE});
    join(&prefill, &decode, &decode_peer, &prefill_peer);
    any_order();
    all_before_the_grant();
    equal_low_bits();
    opened_twice();
    node_quit(&prefill);
    node_quit(&decode);
    return 0;
}
