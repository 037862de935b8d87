/* A room on one side: what an engine author would write around it, and the checks that only it can make. */
#ifndef CHAOS_ATTEMPT_H
#define CHAOS_ATTEMPT_H

#include "memory.h"

/* ---- rooms ---- */

static inline void tell(const worker_t *w, const attempt_t *a, uint32_t what, int32_t code, const char *text) {
    msg_t msg = {.what = what, .slot = a->plan.slot, .serial = a->plan.serial, .room = a->plan.room, .code = code,
                 .state = a->state};
    snprintf(msg.text, sizeof msg.text, "%s", text);
    static const char *const names[] = {[REFUSED] = "refused", [ENDED] = "ended", [FREED] = "freed"};
    note(w, "room %#" PRIx64 " attempt %" PRIu64 " %s %s %s", a->plan.room, a->plan.serial, names[what],
         nixlkv_status_name(code), text);
    say(w, &msg);
}

/* Asks the controller, as the router, how the peers are reached now. */
static inline void ask_links(worker_t *w, uint32_t peers, int32_t code) {
    if (code != NIXL_ERR_PEER_LOST && code != NIXL_ERR_PEER_DISCONNECTED && code != NIXL_ERR_PEER_NOT_READY &&
        code != NIXL_ERR_PEER_RESTARTED && code != NIXL_ERR_PEER_UNKNOWN && code != NIXL_ERR_PEER_STALE)
        return;
    for (uint32_t i = 0; i < MAX_WORKERS; i++)
        if ((peers >> i & 1u) != 0 && now_ms() - w->links[i].asked_at >= 500) {
            w->links[i].asked_at = now_ms();
            say(w, &(msg_t){.what = RELINK, .worker = i});
        }
}

static inline uint32_t counterparts(const worker_t *w, const plan_t *plan) {
    return is_sender(w) ? plan->receivers : plan->senders;
}

static inline void attempt_over(attempt_t *a) { a->used = false; }

static inline void refuse(worker_t *w, attempt_t *a, int32_t code, const char *text) {
    a->state = NIXLKV_ROOM_FAILED;
    tell(w, a, REFUSED, code, text);
    ask_links(w, counterparts(w, &a->plan), code);
    hold_give(w, &a->hold);
    attempt_over(a);
}

static inline attempt_t *attempt_of(worker_t *w, uint64_t room) {
    for (uint32_t i = 0; i < w->most_used; i++)
        if (w->attempts[i].used && w->attempts[i].plan.room == room) return &w->attempts[i];
    return NULL;
}

/* Cuts the page list into chunks in some order. */
static inline void cut(attempt_t *a) {
    const uint32_t n = a->plan.num_pages;
    rng_t *rng = &a->rng;
    const bool empty_last = n == 0 || chance(rng, 15), uneven = chance(rng, 30);
    uint32_t num = n == 0 ? 0 : chance(rng, 50) ? 1 : chance(rng, 80) ? (uint32_t)between(rng, 2, 5) : MAX_CHUNKS - 1;
    if (num > n) num = n;
    for (uint32_t i = 0; i < num; i++) {
        /* Even pieces, or all but the first as small as can be. */
        const uint32_t start = uneven && i > 0 ? n - num + i : (uint32_t)((uint64_t)n * i / num);
        const uint32_t end = uneven ? n - num + i + 1 : (uint32_t)((uint64_t)n * (i + 1) / num);
        a->chunks[i].offset = start;
        a->chunks[i].count = end - start;
    }
    int32_t order[MAX_CHUNKS];
    shuffle(order, (int32_t)num, next_random(rng));
    for (uint32_t i = 0; i < num; i++) {
        const uint32_t j = (uint32_t)order[i], offset = a->chunks[i].offset, count = a->chunks[i].count;
        a->chunks[i].offset = a->chunks[j].offset, a->chunks[i].count = a->chunks[j].count;
        a->chunks[j].offset = offset, a->chunks[j].count = count;
    }
    if (empty_last) {
        a->chunks[num].offset = n;
        a->chunks[num++].count = 0;
    }
    a->num_chunks = num;
}

static inline int32_t receive(worker_t *w, attempt_t *a) {
    const plan_t *plan = &a->plan;
    uint64_t senders[MAX_WORKERS], num_senders = 0, owner = 0;
    for (uint32_t i = 0; i < MAX_WORKERS; i++) {
        if ((plan->senders >> i & 1u) == 0) continue;
        if (w->links[i].peer == 0 || w->links[i].parting) return NIXL_ERR_PEER_UNKNOWN;
        if (i == plan->aux_owner) owner = w->links[i].peer;
        senders[num_senders++] = w->links[i].peer;
    }
    nixlkv_recv_params_t params = recv_params(plan->room, senders, num_senders, a->hold.pages, plan->num_pages);
    nixlkv_state_indices_t states[NUM_GROUPS];
    for (uint32_t g = 0; g < NUM_GROUPS; g++) {
        if (!group_in_room(w, plan, g)) continue;
        nixlkv_state_indices_t *s = &states[params.num_states++];
        CHECK_OK(nixlkv_state_indices_init(s, sizeof *s));
        s->group = g;
        s->indices = a->hold.state[g];
        s->num_indices = plan->num_state;
    }
    params.states = states;
    if (a->hold.aux >= 0) params.aux_index = &a->hold.aux;
    params.aux_sender = owner;
    params.num_receivers = (uint64_t)__builtin_popcount(plan->receivers);
    return nixlkv_recv(w->engine, &params);
}

typedef struct stamper {
    uint64_t key;
    uint32_t offset, count;
    bool last;
} stamper_t;

static inline void visit_stamp(void *context, char *item, uint64_t len, uint64_t what, uint64_t position,
                               int32_t index) {
    (void)index;
    const stamper_t *s = context;
    if (what < 1000 ? position < s->offset || position >= s->offset + s->count : !s->last) return;
    const uint64_t first = stamp(s->key, what, position, 0);
    uint64_t *words = (uint64_t *)item;
    for (uint64_t i = 0; i < len / 8; i++) words[i] = first ^ i;
}

/* Computes the next chunk's contents and sends it. */
static inline int32_t send_next(worker_t *w, attempt_t *a) {
    const plan_t *plan = &a->plan;
    const uint32_t offset = a->chunks[a->sent].offset, count = a->chunks[a->sent].count;
    const bool last = a->sent + 1 == a->num_chunks;
    stamper_t stamper = {key_of(plan), offset, count, last};
    hold_visit(w, &a->hold, visit_stamp, &stamper);
    nixlkv_chunk_t chunk =
        chunk_of(plan->room, count == 0 ? NULL : a->hold.pages + offset, count, offset, last ? NIXLKV_CHUNK_LAST : 0);
    nixlkv_state_indices_t states[NUM_GROUPS];
    if (last) {
        for (uint32_t g = 0; g < NUM_GROUPS; g++) {
            if (!group_in_room(w, plan, g)) continue;
            nixlkv_state_indices_t *s = &states[chunk.num_states++];
            CHECK_OK(nixlkv_state_indices_init(s, sizeof *s));
            s->group = g;
            s->indices = a->hold.state[g];
            s->num_indices = plan->num_state;
        }
        chunk.states = states;
        if (a->hold.aux >= 0) chunk.aux_index = &a->hold.aux;
        else chunk.flags |= NIXLKV_CHUNK_NO_AUX;
    }
    return nixlkv_send_chunk(w->engine, &chunk);
}

static inline void attempt_begin(worker_t *w, const plan_t *plan) {
    attempt_t refused = {.plan = *plan};
    if (attempt_of(w, plan->room) != NULL) {
        tell(w, &refused, REFUSED, NIXL_ERR_ROOM_IN_USE, "the worker has not released it");
        return;
    }
    attempt_t *a = NULL;
    for (uint32_t i = 0; i < MAX_OPEN && a == NULL; i++)
        if (!w->attempts[i].used) {
            a = &w->attempts[i];
            if (i >= w->most_used) w->most_used = i + 1;
        }
    if (a == NULL) {
        tell(w, &refused, REFUSED, NIXL_ERR_TOO_MANY_ROOMS, "the worker has no room");
        return;
    }
    memset(a, 0, sizeof *a);
    a->plan = *plan;
    a->rng = (rng_t){mix(plan->seed ^ w->config.index)};
    if (!hold_take(w, &a->hold, plan, &a->rng)) {
        tell(w, a, REFUSED, NIXL_ERR_TOO_MANY_ROOMS, "the worker has no memory");
        return;
    }
    a->used = true;
    const uint64_t now = now_ms();
    a->next_at = now;
    if (!plan->calm && chance(&a->rng, 30))
        a->next_at += chance(&a->rng, 10) ? between(&a->rng, 100, 1000) : below(&a->rng, 60);
    a->abort_at = plan->abort_by == w->config.index ? now + plan->abort_after_ms : UINT64_MAX;
    if (is_sender(w)) cut(a);
    else expect_poison(w, &a->hold, "written before it was opened");
}

/* Opens the room, or sends what is due. */
static inline void attempt_push(worker_t *w, attempt_t *a) {
    const plan_t *plan = &a->plan;
    const uint64_t now = now_ms();
    if (!a->opened && plan->unopened && a->abort_at <= now && is_sender(w)) {
        a->abort_at = UINT64_MAX;
        const int32_t aborted = nixlkv_abort(w->engine, plan->room, "given up before it began");
        if (aborted != NIXL_OK) {
            violation(w, plan, "abort before open gave %s", nixlkv_last_error());
            refuse(w, a, aborted, nixlkv_last_error());
            return;
        }
        a->opened = a->all_sent = true;
    }
    while (!a->all_sent && a->next_at <= now) {
        const int32_t code = is_sender(w) ? send_next(w, a) : receive(w, a);
        if (code == NIXL_OK) {
            if (!a->opened) note(w, "room %#" PRIx64 " attempt %" PRIu64 " opened", plan->room, plan->serial);
            a->opened = true;
            a->all_sent = !is_sender(w) || ++a->sent == a->num_chunks;
            if (!plan->calm && chance(&a->rng, 20)) a->next_at = now + below(&a->rng, 30);
        } else if (is_sender(w) && code == NIXL_ERR_QUEUE_FULL) {
            a->next_at = now + 2;
        } else if (is_sender(w) && code == NIXL_ERR_ROOM_ENDED) {
            /* Also of a first chunk, when the receiver has given the room up already: then poll tells why. */
            a->opened = a->all_sent = true;
        } else if (a->opened) {
            violation(w, plan, "chunk %u of %u gave %s", a->sent, a->num_chunks, nixlkv_last_error());
            a->all_sent = true;
        } else {
            const char *text = code == NIXL_ERR_PEER_UNKNOWN ? "" : nixlkv_last_error();
            if (code != NIXL_ERR_PEER_UNKNOWN && code != NIXL_ERR_PEER_LOST && code != NIXL_ERR_PEER_DISCONNECTED &&
                code != NIXL_ERR_PEER_STALE)
                violation(w, plan, "opening it gave %s", nixlkv_last_error());
            refuse(w, a, code, text);
            return;
        }
    }
}

static inline void attempt_abort(worker_t *w, attempt_t *a) {
    a->abort_at = UINT64_MAX;
    a->aborted = true;
    const int32_t code = nixlkv_abort(w->engine, a->plan.room, "chaos");
    if (code != NIXL_OK) violation(w, &a->plan, "abort gave %s", nixlkv_last_error());
}

static inline void attempt_step(worker_t *w, attempt_t *a) {
    if (!a->ended) attempt_push(w, a);
    if (!a->used || !a->opened) return;
    const uint64_t now = now_ms();
    if (a->abort_at <= now && !a->ended) attempt_abort(w, a);
    nixlkv_room_status_t status = poll_room(w->engine, a->plan.room);
    const bool ended = status.state == NIXLKV_ROOM_SUCCESS || status.state == NIXLKV_ROOM_FAILED;
    if (a->ended && (status.state != a->state || status.error != a->error))
        violation(w, &a->plan, "ended as %u %s, now %u %s (%s)", a->state, nixlkv_status_name(a->error), status.state,
                  nixlkv_status_name(status.error), status.error_text);
    if (a->aborted && !ended) violation(w, &a->plan, "aborted and not ended: state %u", status.state);
    if (a->quiesced && !status.quiesced) violation(w, &a->plan, "quiesced, and then not any more");
    if (status.quiesced && !ended) violation(w, &a->plan, "quiesced in state %u", status.state);
    if (ended && !a->ended) {
        a->ended = true;
        a->state = status.state;
        a->error = status.error;
        char text[MAX_TEXT];
        snprintf(text, sizeof text, "%s", status.error_text);
        if ((status.state == NIXLKV_ROOM_SUCCESS) != (status.error == NIXL_OK))
            violation(w, &a->plan, "state %u with %s", status.state, nixlkv_status_name(status.error));
        if (status.state == NIXLKV_ROOM_SUCCESS && !is_sender(w)) expect_contents(w, a, "wrong at success");
        if (status.state == NIXLKV_ROOM_SUCCESS && is_sender(w) && !(a->all_sent && a->sent == a->num_chunks))
            violation(w, &a->plan, "success after %u of %u chunks", a->sent, a->num_chunks);
        tell(w, a, ENDED, status.error, text);
        ask_links(w, counterparts(w, &a->plan), status.error);
    }
    if (!a->ended) return;
    if (!status.quiesced) {
        /* What is not quiesced may not be released. It may become so between the two calls. */
        if (chance(&w->rng, 2)) {
            const int32_t code = nixlkv_release(w->engine, a->plan.room);
            if (code == NIXL_OK) {
                fill(w, &a->hold, is_sender(w) ? SCRIBBLE : POISON);
                hold_release(w, a);
                tell(w, a, FREED, NIXL_OK, "");
                attempt_over(a);
            } else if (code != NIXL_ERR_NOT_QUIESCED)
                violation(w, &a->plan, "release before it is quiesced gave %s", nixlkv_last_error());
        }
        return;
    }
    const bool in_use = a->state == NIXLKV_ROOM_SUCCESS && !is_sender(w);
    if (!a->quiesced) {
        a->quiesced = true;
        if (!in_use && !is_sender(w)) expect_unscribbled(w, a);
        if (!in_use) fill(w, &a->hold, is_sender(w) ? SCRIBBLE : POISON);
        a->release_at = now + (!a->plan.calm && chance(&w->rng, 20) ? below(&w->rng, 200) : 0);
    }
    if (a->release_at > now) return;
    if (in_use) {
        expect_contents(w, a, "wrong some time after success");
        fill(w, &a->hold, POISON);
    }
    const int32_t code = nixlkv_release(w->engine, a->plan.room);
    if (code != NIXL_OK) {
        violation(w, &a->plan, "release of a quiesced room gave %s", nixlkv_last_error());
        a->release_at = now + 1000;
        return;
    }
    hold_release(w, a);
    tell(w, a, FREED, NIXL_OK, "");
    attempt_over(a);
}

#endif
