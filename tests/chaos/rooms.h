/* The controller as a router: which room goes where, and whether what became of it may be. */
#ifndef CHAOS_ROOMS_H
#define CHAOS_ROOMS_H

#include "nodes.h"

/* ---- rooms ---- */

/* The first half sends, the second receives. */
static node_t *of_role(uint32_t role, rng_t *rng) {
    const uint32_t half = c.num_nodes / 2;
    return &c.nodes[(role == NIXLKV_ROLE_PREFILL ? 0 : half) + below(rng, half)];
}

static bool is_over(const side_t *side) { return side->stage != ASKED; }
static bool is_final(const side_t *side) { return side->stage >= IS_FREED; }

static bool all_sides(const slot_t *s, bool (*holds)(const side_t *side)) {
    for (uint32_t i = 0; i < s->num_sides; i++)
        if (!holds(&s->sides[i])) return false;
    return true;
}

/* Whether the id may have its next attempt. Nobody has the last one running then; some may still have to release it.
 * A sender that never began it, came back after it died, or ended it before a receiver began, may hold that receiver's
 * grant: then the receiver must have taken it back, or be known to be dead. */
static bool is_reusable(const slot_t *s) {
    bool unbegun = false, granted = false;
    for (uint32_t i = 0; i < s->num_sides; i++) {
        const side_t *side = &s->sides[i];
        if (!is_over(side)) return false;
        unbegun |= side->sends && side->state != NIXLKV_ROOM_SUCCESS;
        granted |= !side->sends && (side->stage == HAS_ENDED ||
                                    (side->stage == HAS_DIED && now_ms() - side->since < REUSE_AFTER_MS));
    }
    return !(unbegun && granted);
}

static void count_code(uint64_t *counts, int32_t code) {
    const int32_t i = code <= 0 && code > -NUM_CODES ? -code : NUM_CODES - 1;
    counts[i]++;
}

/* A room that was opened since the worker came back has succeeded. */
static void has_returned(const slot_t *s, node_t *n) {
    if (n->returned || !n->ready || s->opened < n->disturbed) return;
    n->returned = true;
    if (now_ms() - n->disturbed > c.slowest_return) c.slowest_return = now_ms() - n->disturbed;
}

/* Looks at the attempt as a whole after something has changed. */
static void slot_check(slot_t *s) {
    for (uint32_t i = 0; i < s->num_sides; i++) {
        const side_t *sender = &s->sides[i];
        if (!sender->sends || sender->state != NIXLKV_ROOM_SUCCESS) continue;
        for (uint32_t j = 0; j < s->num_sides; j++) {
            side_t *receiver = &s->sides[j];
            if (receiver->sends || receiver->state == NIXLKV_ROOM_SUCCESS) continue;
            if (receiver->stage == ASKED || receiver->stage == HAS_DIED || receiver->told) continue;
            breach("room %#" PRIx64 ", attempt %" PRIu64 ": %s says success, %s %s with %s (%s)", s->plan.room,
                   s->plan.serial, c.nodes[sender->worker].name, c.nodes[receiver->worker].name,
                   receiver->stage == IS_REFUSED ? "refused it" : "failed", nixlkv_status_name(receiver->code),
                   receiver->text);
            receiver->told = true;
        }
    }
    if (!s->counted && all_sides(s, is_over)) {
        s->counted = true;
        c.recent[c.num_ended % NUM_RECENT].id = s->id;
        c.recent[c.num_ended++ % NUM_RECENT].plan = s->plan;
        bool success = true;
        int32_t code = NIXL_OK;
        for (uint32_t i = 0; i < s->num_sides; i++) {
            const side_t *side = &s->sides[i];
            if (side->stage == IS_REFUSED) count_code(c.refused_by_code, side->code);
            if (!side->sends && side->state != NIXLKV_ROOM_SUCCESS) success = false;
            if (code == NIXL_OK && side->stage != HAS_DIED) code = side->code;
        }
        if (success) {
            c.succeeded++;
            c.big_succeeded += s->big;
            for (uint32_t i = 0; i < s->num_sides; i++) has_returned(s, &c.nodes[s->sides[i].worker]);
        } else {
            c.failed++;
            count_code(c.by_code, code);
        }
    }
    if (all_sides(s, is_final) && is_reusable(s)) {
        if (c.latest[s->id] == s) c.latest[s->id] = NULL;
        s->used = false;
    }
}

static uint32_t num_running(void) {
    uint32_t num = 0;
    for (uint32_t i = 0; i < NUM_SLOTS; i++) num += c.slots[i].used && !c.slots[i].counted;
    return num;
}

static bool has_place(uint32_t workers) {
    for (uint32_t i = 0; i < c.num_nodes; i++)
        if ((workers >> i & 1u) != 0 && (!c.nodes[i].ready || c.nodes[i].open >= MOST_AT_WORKER)) return false;
    return true;
}

/* Asks the workers for a room. */
static bool room_open(plan_t plan, bool big) {
    slot_t *s = NULL;
    for (uint32_t i = 0; i < NUM_SLOTS && s == NULL; i++)
        if (!c.slots[i].used) s = &c.slots[i];
    if (s == NULL) return false;
    for (uint32_t i = 0; i < c.num_nodes; i++)
        if (((plan.senders | plan.receivers) >> i & 1u) != 0 && !c.nodes[i].ready) return false;
    /* An id may come again when nobody has its last attempt running; some may still have to release it. */
    uint32_t id = NUM_IDS;
    bool early = false;
    /* Often one that is only just over, and for the same request, so that late messages meet its next life. */
    if (!plan.calm && !big && c.num_ended >= NUM_RECENT && chance(&c.rooms, 40)) {
        const uint64_t which = below(&c.rooms, NUM_RECENT);
        const plan_t *before = &c.recent[which].plan;
        const uint32_t workers = before->senders | before->receivers;
        if (c.latest[c.recent[which].id] == NULL && before->abort_by == MAX_WORKERS && has_place(workers)) {
            plan = *before;
            id = c.recent[which].id;
            c.reused++;
        }
    }
    for (int tries = 0; tries < 20 && id == NUM_IDS; tries++) {
        const uint32_t candidate = (uint32_t)below(&c.rooms, NUM_IDS);
        const slot_t *last = c.latest[candidate];
        if (last == NULL) id = candidate;
        else if (!plan.calm && tries == 0 && is_reusable(last)) id = candidate, early = true;
    }
    if (id == NUM_IDS) return false;
    memset(s, 0, sizeof *s);
    s->used = true;
    s->big = big;
    s->opened = now_ms();
    s->id = id;
    c.latest[id] = s;
    c.early += early;
    plan.serial = ++c.next_serial;
    plan.room = room_of(id);
    c.id_of[plan.serial % HISTORY] = id;
    plan.slot = (uint32_t)(s - c.slots);
    plan.seed = next_random(&c.rooms);
    s->plan = plan;
    for (uint32_t i = 0; i < c.num_nodes; i++) {
        if (((plan.senders | plan.receivers) >> i & 1u) == 0) continue;
        side_t *side = &s->sides[s->num_sides++];
        side->worker = i;
        side->life = c.nodes[i].life;
        side->sends = (plan.senders >> i & 1u) != 0;
        side->state = NIXLKV_ROOM_BOOTSTRAPPING;
        side->since = now_ms();
        c.nodes[i].open++;
        post_msg(&c.nodes[i], &(msg_t){.what = OPEN, .plan = plan}, NULL);
    }
    c.tried++;
    c.aborts += plan.abort_by < MAX_WORKERS;
    return true;
}

/* A room between the two, and others as the shape wants it. */
static plan_t plan_for(const node_t *prefill, const node_t *decode, bool big) {
    rng_t *rng = &c.rooms;
    plan_t plan = {.abort_by = MAX_WORKERS};
    plan.senders = 1u << prefill->index;
    plan.receivers = 1u << decode->index;
    const uint64_t size = below(rng, 100);
    plan.num_pages = big         ? (uint32_t)between(rng, 128, 512)
                     : size < 10 ? 0
                     : size < 98 ? (uint32_t)between(rng, 1, 8)
                                 : (uint32_t)between(rng, 16, 96);
    if (c.shape == SHAPE_SPLIT && (plan.num_pages > 0 || chance(rng, 50))) plan.senders = 3;
    if (c.shape != SHAPE_PAIR && chance(rng, 15)) plan.receivers = 12;
    plan.num_state = chance(rng, 70) ? (uint32_t)between(rng, 1, MAX_STATE) : 0;
    plan.aux = chance(rng, 80);
    plan.aux_owner = prefill->index;
    if (chance(rng, 6)) {
        const uint32_t all = plan.senders | plan.receivers;
        do plan.abort_by = (uint32_t)below(rng, MAX_WORKERS);
        while ((all >> plan.abort_by & 1u) == 0);
        plan.abort_after_ms = (uint32_t)(chance(rng, 40) ? 0 : big ? below(rng, 200) : below(rng, 30));
        plan.unopened = chance(rng, 20) && (plan.senders >> plan.abort_by & 1u) != 0;
        if (plan.unopened) plan.abort_after_ms = 0;
    }
    return plan;
}

static bool big_room(node_t *n) {
    const bool sends = n->role == NIXLKV_ROLE_PREFILL;
    node_t *other = of_role(sends ? NIXLKV_ROLE_DECODE : NIXLKV_ROLE_PREFILL, &c.rooms);
    const plan_t plan = plan_for(sends ? n : other, sends ? other : n, true);
    return room_open(plan, true);
}

static void open_rooms(void) {
    static uint64_t next_at;
    const uint64_t now = now_ms();
    if (next_at + 100 < now) next_at = now;
    uint32_t running = num_running();
    while (next_at <= now && running < MOST_AT_ONCE) {
        const bool big = below(&c.rooms, 250) == 0;
        const plan_t plan =
            plan_for(of_role(NIXLKV_ROLE_PREFILL, &c.rooms), of_role(NIXLKV_ROLE_DECODE, &c.rooms), big);
        next_at += 1000 / MOST_PER_SECOND;
        if (has_place(plan.senders | plan.receivers) && room_open(plan, big)) running++;
    }
}

/* Every bound that the library promises, and a good deal of slack. */
static void check_bounds(void) {
    const uint64_t now = now_ms();
    for (uint32_t i = 0; i < NUM_SLOTS; i++) {
        slot_t *s = &c.slots[i];
        if (s->used) slot_check(s);
        if (!s->used) continue;
        uint64_t disturbed = 0;
        bool stopped = false;
        for (uint32_t j = 0; j < s->num_sides; j++) {
            const node_t *n = &c.nodes[s->sides[j].worker];
            if (n->disturbed > disturbed) disturbed = n->disturbed;
            stopped |= n->stopped;
        }
        for (uint32_t j = 0; j < s->num_sides; j++) {
            side_t *side = &s->sides[j];
            const node_t *n = &c.nodes[side->worker];
            if (is_final(side) || n->stopped || side->told) continue;
            const uint64_t own = side->since > n->disturbed ? side->since : n->disturbed;
            const uint64_t all = side->since > disturbed ? side->since : disturbed;
            if (side->stage == ASKED && now > own && now - own > c.slowest_end) c.slowest_end = now - own;
            if (side->stage == HAS_ENDED && !stopped && now > all && now - all > c.slowest_quiesce)
                c.slowest_quiesce = now - all;
            if (side->stage == ASKED && now - own > END_BOUND_MS) {
                breach("room %#" PRIx64 ", attempt %" PRIu64 ": not ended at %s for %" PRIu64 " ms", s->plan.room,
                       s->plan.serial, n->name, now - side->since);
                side->told = true;
            }
            if (side->stage == HAS_ENDED && !stopped && now - all > QUIESCE_BOUND_MS) {
                breach("room %#" PRIx64 ", attempt %" PRIu64 ": ended with %s (%s) at %s %" PRIu64
                       " ms ago and not quiesced",
                       s->plan.room, s->plan.serial, nixlkv_status_name(side->code), side->text, n->name,
                       now - side->since);
                side->told = true;
            }
        }
    }
    for (uint32_t i = 0; i < c.num_nodes; i++) {
        node_t *n = &c.nodes[i];
        if (!n->alive || n->stopped) continue;
        if (n->ready && !n->returned && !c.healing && now - n->disturbed > RETURN_BOUND_MS) {
            breach("%s is back for %" PRIu64 " ms, and no room with it has succeeded", n->name, now - n->disturbed);
            n->returned = true;
        }
        const uint64_t bound = n->ready ? SILENCE_BOUND_MS : START_BOUND_MS;
        if (now - n->last_said > bound) {
            breach("%s has said nothing for %" PRIu64 " ms: it hangs", n->name, now - n->last_said);
            node_kill(n, "hangs");
            n->restart_at = now;
        }
    }
}

/* ---- what workers say ---- */

/* What a correct pair of workers may see. */
static bool is_expected(int32_t code, const char *text) {
    static const int32_t codes[] = {
        NIXL_OK,
        NIXL_ERR_ABORTED,
        NIXL_ERR_PEER_LOST,
        NIXL_ERR_PEER_RESTARTED,
        NIXL_ERR_PEER_DISCONNECTED,
        NIXL_ERR_PEER_NOT_READY,
        NIXL_ERR_XFER_FAILED,
        NIXL_ERR_XFER_STALLED,
        NIXL_ERR_GRANT_TIMEOUT,
        NIXL_ERR_ROOM_TIMEOUT,
        NIXL_ERR_ROOM_IN_USE, /* an id used again before the other side has released it */
    };
    for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++)
        if (codes[i] == code) return true;
    /* The same, in the words of a sender that still has the earlier life. */
    return code == NIXL_ERR_PROTOCOL &&
           (strstr(text, "more receivers than") != NULL || strstr(text, "has ended it already") != NULL);
}

static void room_said(node_t *n, const msg_t *msg) {
    slot_t *s = &c.slots[msg->slot % NUM_SLOTS];
    side_t *side = NULL;
    for (uint32_t i = 0; s->used && s->plan.serial == msg->serial && i < s->num_sides; i++)
        if (s->sides[i].worker == n->index && s->sides[i].life == n->life) side = &s->sides[i];
    if (side == NULL || is_final(side)) {
        breach("%s speaks of attempt %" PRIu64 ", which is not running there", n->name, msg->serial);
        return;
    }
    const uint64_t now = now_ms();
    if (side->stage == ASKED && n->open > 0) n->open--;
    switch (msg->what) {
    case REFUSED: side->stage = IS_REFUSED; break;
    case ENDED: side->stage = HAS_ENDED; break;
    default: side->stage = IS_FREED; break;
    }
    if (msg->what != FREED) {
        side->state = msg->state;
        side->code = msg->code;
        snprintf(side->text, sizeof side->text, "%s", msg->text);
    }
    side->since = c.last_freed = now;
    if (msg->what == ENDED && !is_expected(msg->code, msg->text))
        breach("%s: room %#" PRIx64 ", attempt %" PRIu64 " ended with %s (%s)", n->name, msg->room, msg->serial,
               nixlkv_status_name(msg->code), msg->text);
    slot_check(s);
}

/* A blob was connected, or refused: it may have been of a process that is dead. */
static void linked(const node_t *n, const msg_t *msg) {
    const node_t *other = &c.nodes[msg->worker];
    trace("%s: worker %u, life %u: %s %s", n->name, msg->worker, msg->life, nixlkv_status_name(msg->code), msg->text);
    if (msg->code == NIXL_OK || msg->life != other->life || !other->ready || other->stopped) return;
    if (now_ms() - other->disturbed > 2000)
        breach("%s cannot connect %s, which lives: %s", n->name, other->name, msg->text);
}

static void node_said(node_t *n, const msg_t *msg, const char *blob) {
    n->last_said = now_ms();
    switch (msg->what) {
    case READY:
        n->ready = true;
        n->disturbed = now_ms();
        free(n->blob.bytes);
        n->blob = (blob_t){msg->blob_len, malloc(msg->blob_len)};
        CHECK(n->blob.bytes != NULL);
        memcpy(n->blob.bytes, blob, msg->blob_len);
        trace("%s: life %u is ready", n->name, n->life);
        for (uint32_t i = 0; i < c.num_nodes; i++) relink(n->index, i);
        break;
    case REFUSED:
    case ENDED:
    case FREED: room_said(n, msg); break;
    case LINKED: linked(n, msg); break;
    case PARTED:
        c.disconnects++;
        c.relink_at[n->index][msg->worker] = now_ms() + below(&c.rooms, 300);
        trace("%s: parted from worker %u", n->name, msg->worker);
        break;
    case RELINK:
        if (c.relink_at[n->index][msg->worker] == UINT64_MAX) c.relink_at[n->index][msg->worker] = now_ms() + 20;
        break;
    case VIOLATION: {
        char origin[200] = "";
        if (msg->state == 1) tell_origin(msg->seen, msg->where, origin, sizeof origin);
        breach("%s: %s%s", n->name, msg->text, origin);
        break;
    }
    case STATE:
        n->condition = msg->condition;
        n->condition_at = now_ms();
        if (++n->num_states == 12) n->baseline = n->condition;
        break;
    default: FAIL("message %u from %s", msg->what, n->name);
    }
}

/* Takes in what the worker has said; false: it is gone. */
static bool read_all(node_t *n) {
    static char blob[MAX_BLOB];
    for (;;) {
        msg_t msg;
        struct iovec parts[2] = {{&msg, sizeof msg}, {blob, MAX_BLOB}};
        struct msghdr header = {.msg_iov = parts, .msg_iovlen = 2};
        const ssize_t got = recvmsg(n->fd, &header, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && errno == EAGAIN) return true;
        if (got <= 0) return false;
        CHECK(got >= (ssize_t)sizeof msg && (uint64_t)got == sizeof msg + msg.blob_len);
        node_said(n, &msg, blob);
    }
}

#endif
