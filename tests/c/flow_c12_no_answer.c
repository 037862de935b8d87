/* C12: the blob is valid, but its process never answers: it has stopped before it could connect back, it is dead, or
 * nobody told it to connect. A room with it fails at the connect limit at the latest, also at the healthy senders of
 * the same room; rooms with other peers go on meanwhile. The same for a sender whose receiver never answers. */
#include "flow.h"

enum { LIMIT_MS = 1500, STOPPED = 0, DEAD, UNTOLD, KINDS };

static node_t prefill, decode;
static uint64_t decode_peer, prefill_peer;

/* Pages from `base` on, no aux, no state. */
static request_t request_at(uint64_t room, int32_t base) {
    return (request_t){.room = room,
                       .key = mix(room),
                       .total = 8,
                       .from_base = base,
                       .to_base = base,
                       .aux_from = -1,
                       .aux_to = -1,
                       .state_from = -1,
                       .state_to = -1};
}

static const uint32_t LAST = NIXLKV_CHUNK_LAST | NIXLKV_CHUNK_NO_AUX;

/* A room between healthy peers goes through, and nothing else is written. */
static void neighbour_works(uint64_t room) {
    const request_t r = request_at(room, 0);
    poison_all(&decode);
    EXPECT(receive(&decode, &r, &prefill_peer, 1), NIXL_OK);
    EXPECT(send_part(&prefill, &r, 0, 8, LAST), NIXL_OK);
    EXPECT_ENDED(&decode, room, NIXL_OK, "", 10000);
    EXPECT_CONTENTS(&decode, &r);
    EXPECT_OVER(&decode, room, NIXL_OK, "", 10000);
    EXPECT_OVER(&prefill, room, NIXL_OK, "", 10000);
}

/* The room fails at `node` with the code and not before the limit; with a dead peer, the transport may know earlier. */
static void fails_to_connect(const node_t *node, uint64_t room, uint64_t opened, int32_t code, bool may_be_lost) {
    const answer_t ended = wait_for(node, room, NIXLKV_WAIT_QUIESCED, 10000);
    const uint64_t took = now_ms() - opened;
    EXPECT(ended, NIXL_OK);
    CHECK(ended.state == NIXLKV_ROOM_FAILED && ended.quiesced == 1 && ended.text[0] != '\0');
    if (ended.error == NIXL_ERR_PEER_LOST && may_be_lost) CHECK(took < 10000);
    else if (ended.error != code || took < LIMIT_MS - 50 || took > LIMIT_MS + 5000)
        FAIL("room %" PRIu64 ": after %" PRIu64 " ms: %s: %s", room, took, nixlkv_status_name(ended.error), ended.text);
    EXPECT(release(node, room), NIXL_OK);
}

/* Starts a node of every kind and connects it here only: one that has stopped before, one that dies right after, and
 * one that hears nothing of it. The blob of one that is dead already is refused, or leads to the same as the second. */
static void start_silent(const node_t *here, const node_config_t *config, node_t *silent, uint64_t *peers) {
    node_t dead = node_start(*config);
    blob_t dead_blob = blob_of(&dead);
    node_kill(&dead);
    const answer_t refused = connect_to(here, dead_blob);
    if (refused.status != NIXL_OK) EXPECT(refused, NIXL_ERR_PEER_LOST);
    free(dead_blob.bytes);
    for (int i = 0; i < KINDS; i++) {
        silent[i] = node_start(*config);
        blob_t blob = blob_of(&silent[i]);
        if (i == STOPPED) node_stop(&silent[i]);
        const answer_t connected = connect_to(here, blob);
        EXPECT(connected, NIXL_OK);
        peers[i] = connected.value;
        free(blob.bytes);
    }
    node_kill(&silent[DEAD]);
}

static void senders_do_not_answer(void) {
    node_t silent[KINDS];
    uint64_t peers[KINDS], opened[KINDS], here_at_silent;
    start_silent(&decode, &(node_config_t){.role = NIXLKV_ROLE_PREFILL}, silent, peers);
    for (uint64_t i = 0; i < KINDS; i++) {
        const request_t r = request_at(10 + i, 8 + 8 * (int32_t)i);
        const answer_t answer = receive(&decode, &r, &peers[i], 1);
        opened[i] = now_ms();
        if (i == DEAD && answer.status == NIXL_ERR_PEER_LOST) opened[i] = 0; /* noticed already */
        else EXPECT(answer, NIXL_OK);
    }
    CHECK(status_of(&decode, 10 + STOPPED).state == NIXLKV_ROOM_BOOTSTRAPPING);
    CHECK(status_of(&decode, 10 + UNTOLD).state == NIXLKV_ROOM_BOOTSTRAPPING);
    for (uint64_t n = 0; n < 10; n++) neighbour_works(100 + n);
    for (uint64_t i = 0; i < KINDS; i++)
        if (opened[i] != 0) fails_to_connect(&decode, 10 + i, opened[i], NIXL_ERR_PEER_NOT_READY, i == DEAD);
    neighbour_works(200);
    /* Given up before the sender could hear of it: it does when it connects. */
    const request_t early = request_at(50, 40);
    EXPECT(send_part(&silent[UNTOLD], &early, 0, 8, LAST), NIXL_OK);
    EXPECT(receive(&decode, &early, &peers[UNTOLD], 1), NIXL_OK);
    EXPECT(abort_room(&decode, 50, "too early"), NIXL_OK);
    EXPECT_ENDED(&decode, 50, NIXL_ERR_ABORTED, "too early", 5000);
    /* The two that live answer late; from then on they are as good as any peer. */
    node_continue(&silent[STOPPED]);
    for (int i = STOPPED; i < KINDS; i++) {
        if (i == DEAD) continue;
        here_at_silent = introduce(&silent[i], &decode);
        CHECK(here_at_silent != 0);
        if (i == UNTOLD) {
            EXPECT_OVER(&silent[i], 50, NIXL_ERR_ABORTED, "too early", 10000);
            EXPECT_OVER(&decode, 50, NIXL_ERR_ABORTED, "too early", 10000);
        }
        transfer_works(&silent[i], &decode, peers[i], 300 + (uint64_t)i);
        node_quit(&silent[i]);
    }
    neighbour_works(201);
}

/* One room with a healthy sender and one that does not answer: it fails on both living sides. */
static void one_of_two_senders_does_not_answer(void) {
    node_t both = node_start((node_config_t){
        .role = NIXLKV_ROLE_DECODE, .num_layers = 4, .connect_timeout_ms = LIMIT_MS, .no_state = true});
    const node_config_t upper = {.role = NIXLKV_ROLE_PREFILL, .first_layer = 2, .num_layers = 2, .no_state = true};
    node_t lower = node_start((node_config_t){.role = NIXLKV_ROLE_PREFILL, .num_layers = 2, .no_state = true});
    node_t silent[KINDS];
    uint64_t peers[KINDS], opened[KINDS], unused, lower_peer;
    join(&lower, &both, &unused, &lower_peer);
    start_silent(&both, &upper, silent, peers);
    for (uint64_t i = 0; i < KINDS; i++) {
        const request_t r = request_at(20 + i, 8 * (int32_t)i);
        const uint64_t senders[2] = {lower_peer, peers[i]};
        const answer_t answer = receive(&both, &r, senders, 2);
        opened[i] = now_ms();
        if (i == DEAD && answer.status == NIXL_ERR_PEER_LOST) opened[i] = 0;
        else EXPECT(answer, NIXL_OK);
        if (opened[i] == 0) continue;
        const answer_t sent = send_part(&lower, &r, 0, 8, LAST);
        if (i != DEAD || sent.status != NIXL_ERR_ROOM_ENDED) EXPECT(sent, NIXL_OK);
    }
    for (uint64_t i = 0; i < KINDS; i++) {
        if (opened[i] == 0) continue;
        fails_to_connect(&both, 20 + i, opened[i], NIXL_ERR_PEER_NOT_READY, i == DEAD);
        fails_to_connect(&lower, 20 + i, opened[i], NIXL_ERR_PEER_NOT_READY, i == DEAD);
    }
    /* The healthy sender with one that has answered by now. */
    introduce(&silent[UNTOLD], &both);
    const request_t r = request_at(30, 40);
    const uint64_t senders[2] = {lower_peer, peers[UNTOLD]};
    poison_all(&both);
    EXPECT(receive(&both, &r, senders, 2), NIXL_OK);
    EXPECT(send_part(&lower, &r, 0, 8, LAST), NIXL_OK);
    EXPECT(send_part(&silent[UNTOLD], &r, 0, 8, LAST), NIXL_OK);
    EXPECT_ENDED(&both, 30, NIXL_OK, "", 10000);
    EXPECT_CONTENTS(&both, &r);
    node_kill(&silent[STOPPED]);
    node_quit(&silent[UNTOLD]);
    node_quit(&lower);
    node_quit(&both);
}

/* A sender's chunks for a receiver that never grants end at the grant limit. */
static void receivers_do_not_answer(void) {
    node_t silent[KINDS];
    uint64_t peers[KINDS];
    start_silent(&prefill, &(node_config_t){.role = NIXLKV_ROLE_DECODE}, silent, peers);
    uint64_t opened[KINDS];
    for (uint64_t i = 0; i < KINDS; i++) {
        const request_t r = request_at(40 + i, 8 + 8 * (int32_t)i);
        EXPECT(send_part(&prefill, &r, 0, 8, LAST), NIXL_OK);
        opened[i] = now_ms();
    }
    for (uint64_t n = 0; n < 10; n++) neighbour_works(400 + n);
    for (uint64_t i = 0; i < KINDS; i++) fails_to_connect(&prefill, 40 + i, opened[i], NIXL_ERR_GRANT_TIMEOUT, false);
    node_kill(&silent[STOPPED]);
    node_quit(&silent[UNTOLD]);
    transfer_works(&prefill, &decode, prefill_peer, 500);
}

int main(void) {
    prefill = node_start((node_config_t){.role = NIXLKV_ROLE_PREFILL, .grant_timeout_ms = LIMIT_MS});
    decode = node_start((node_config_t){.role = NIXLKV_ROLE_DECODE, .connect_timeout_ms = LIMIT_MS});
    join(&prefill, &decode, &decode_peer, &prefill_peer);
    senders_do_not_answer();
    one_of_two_senders_does_not_answer();
    receivers_do_not_answer();
    node_quit(&prefill);
    node_quit(&decode);
    return 0;
}
