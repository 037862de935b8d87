/* Engines in processes of their own, told what to do over a socket. The test itself is the controller: it owns no
 * engine, so that it can stop, kill and restart any of them. */
#ifndef FLOW_H
#define FLOW_H

#include "test.h"

#include <stdbool.h>

/* What a node's engine is like. Zero is the default throughout. */
typedef struct node_config {
    uint32_t role;
    const char *name, *tls;
    uint64_t heartbeat_ms, liveness_ms, room_timeout_ms, grant_timeout_ms, connect_timeout_ms;
    uint32_t queue_depth, num_workers;
    uint32_t first_layer, num_layers; /* 0 layers: 2 */
    int32_t num_pages;                /* 0: 64 */
    uint64_t page_len;                /* 0: 4096 */
    bool no_aux, no_state;
} node_config_t;

typedef struct node {
    child_t child;
    node_config_t config;
} node_t;

/* One request: which pages and slots of either side it uses. */
typedef struct request {
    uint64_t room;
    uint64_t key;                /* what its contents are stamped with */
    uint64_t from_seed, to_seed; /* 0: pages from_base, from_base + 1, ...; otherwise scattered */
    int32_t from_base, to_base;
    uint64_t total;
    int32_t aux_from, aux_to, state_from, state_to; /* -1: none */
    uint64_t aux_sender, num_receivers, timeout_ms;
} request_t;

enum { NODE_SLOTS = 16, NODE_AUX = 256, NODE_STATE = 1024, MAX_SENDERS = 8, MAX_TEXT = 512 };

enum {
    OP_SEND,
    OP_RECV,
    OP_POLL,
    OP_WAIT,
    OP_CHECK,
    OP_POISON,
    OP_ABORT,
    OP_RELEASE,
    OP_FAULT,
    OP_EXPORT,
    OP_CONNECT,
    OP_DISCONNECT,
    OP_REGISTER_MORE,
    OP_DEREGISTER,
    OP_MOVE,
    OP_STAMP,
    OP_STATS,
    OP_HEALTH,
    OP_SHUTDOWN,
    OP_QUIT,
};

typedef struct op {
    uint32_t what, flags;
    request_t request;
    uint64_t offset, count, timeout_ms; /* SEND: the part; FAULT: skip and times; CONNECT: the blob's length */
    uint64_t senders[MAX_SENDERS], num_senders;
    char text[MAX_TEXT];
} op_t;

typedef struct answer {
    int32_t status; /* of the call */
    int32_t error;
    uint32_t state, quiesced, suspect;
    uint64_t num_chunks, num_pages, num_bytes;
    uint64_t value; /* EXPORT: length; CONNECT: peer; CHECK: wrong words */
    uint64_t stray; /* CHECK: items outside the request that are not poison */
    uint64_t alien; /* CHECK: words of the request's pages that are neither its own nor poison */
    nixlkv_stats_t stats;
    nixlkv_health_t health;
    char text[MAX_TEXT]; /* the room's error text, or the call's last error */
} answer_t;

/* ---- inside a node ---- */

typedef struct store {
    nixlkv_engine_t *engine;
    node_config_t config;
    char *kv, *aux, *state, *more;
    uint64_t more_id;
    uint64_t ids[64], num_ids;
} store_t;

static inline char *layer_of(const store_t *s, uint32_t layer) {
    return s->kv + (size_t)layer * (size_t)s->config.num_pages * s->config.page_len;
}

/* Registers KV, aux and state, in new memory full of poison. */
static inline int32_t store_register(store_t *s) {
    const node_config_t *c = &s->config;
    const uint64_t layer_len = (uint64_t)c->num_pages * c->page_len;
    nixlkv_region_t regions[64];
    uint32_t n = 0;
    CHECK(c->num_layers <= 60);
    s->kv = map_bytes(layer_len * c->num_layers);
    poison(s->kv, layer_len * c->num_layers);
    for (uint32_t i = 0; i < c->num_layers; i++) {
        regions[n] = region(NIXLKV_REGION_KV, layer_of(s, i), layer_len, c->page_len);
        regions[n++].layer_id = c->first_layer + i;
    }
    s->aux = map_bytes(NODE_SLOTS * NODE_AUX);
    poison(s->aux, NODE_SLOTS * NODE_AUX);
    if (!c->no_aux) regions[n++] = region(NIXLKV_REGION_AUX, s->aux, NODE_SLOTS * NODE_AUX, NODE_AUX);
    s->state = map_bytes(NODE_SLOTS * NODE_STATE);
    poison(s->state, NODE_SLOTS * NODE_STATE);
    if (!c->no_state) regions[n++] = region(NIXLKV_REGION_STATE, s->state, NODE_SLOTS * NODE_STATE, NODE_STATE);
    s->num_ids = n;
    return nixlkv_register(s->engine, regions, n, s->ids);
}

/* Deregisters all that store_register did and registers it anew elsewhere. What was there stays mapped, so that a late
 * write would find it. */
static inline int32_t store_move(store_t *s) {
    const int32_t status = nixlkv_deregister(s->engine, s->ids, s->num_ids);
    return status == NIXL_OK ? store_register(s) : status;
}

static inline void store_open(store_t *s) {
    const node_config_t *c = &s->config;
    nixlkv_engine_config_t config = engine_config(c->role);
    const nixlkv_param_t tls = {"UCX_TLS", c->tls};
    config.name = c->name;
    config.backend_params = &tls;
    config.num_backend_params = c->tls != NULL;
    config.heartbeat_interval_ms = c->heartbeat_ms;
    config.liveness_limit_ms = c->liveness_ms;
    config.room_timeout_ms = c->room_timeout_ms;
    config.grant_timeout_ms = c->grant_timeout_ms;
    config.connect_timeout_ms = c->connect_timeout_ms;
    config.queue_depth = c->queue_depth;
    config.num_workers = c->num_workers;
    CHECK_OK(nixlkv_engine_create(&config, &s->engine));
    CHECK_OK(store_register(s));
}

/* The request's page list on one side; free it. */
static inline int32_t *page_list(const store_t *s, uint64_t seed, int32_t base, uint64_t total) {
    const uint64_t room_for = total > (uint64_t)s->config.num_pages ? total : (uint64_t)s->config.num_pages;
    int32_t *list = malloc(room_for * sizeof *list);
    CHECK(list != NULL);
    if (seed != 0) shuffle(list, s->config.num_pages, seed);
    else
        for (uint64_t i = 0; i < total; i++) list[i] = base + (int32_t)i;
    return list;
}

/* Writes the request's contents into the source pages of a part of it. */
static inline void node_stamp(store_t *s, const op_t *op, const int32_t *list) {
    const request_t *r = &op->request;
    for (uint32_t layer = 0; layer < s->config.num_layers; layer++)
        for (uint64_t i = op->offset; i < op->offset + op->count; i++)
            if (list[i] >= 0 && list[i] < s->config.num_pages)
                stamp_item(layer_of(s, layer), s->config.page_len, list[i], r->key, s->config.first_layer + layer, i);
}

static inline int32_t node_send(store_t *s, const op_t *op) {
    const request_t *r = &op->request;
    int32_t *list = page_list(s, r->from_seed, r->from_base, r->total);
    const bool last = (op->flags & NIXLKV_CHUNK_LAST) != 0;
    node_stamp(s, op, list);
    nixlkv_chunk_t chunk = chunk_of(r->room, list + op->offset, op->count, op->offset, op->flags);
    nixlkv_state_indices_t state;
    CHECK_OK(nixlkv_state_indices_init(&state, sizeof state));
    if (last && r->state_from >= 0) {
        stamp_item(s->state, NODE_STATE, r->state_from, r->key, 2000, 0);
        state.indices = &r->state_from;
        state.num_indices = 1;
        chunk.states = &state;
        chunk.num_states = 1;
    }
    if (last && r->aux_from >= 0) {
        stamp_item(s->aux, NODE_AUX, r->aux_from, r->key, 1000, 0);
        chunk.aux_index = &r->aux_from;
    }
    const int32_t status = nixlkv_send_chunk(s->engine, &chunk);
    free(list);
    return status;
}

static inline int32_t node_recv(store_t *s, const op_t *op) {
    const request_t *r = &op->request;
    int32_t *list = page_list(s, r->to_seed, r->to_base, r->total);
    nixlkv_recv_params_t params = recv_params(r->room, op->senders, op->num_senders, list, r->total);
    nixlkv_state_indices_t state;
    CHECK_OK(nixlkv_state_indices_init(&state, sizeof state));
    if (r->state_to >= 0) {
        state.indices = &r->state_to;
        state.num_indices = 1;
        params.states = &state;
        params.num_states = 1;
    }
    if (r->aux_to >= 0) params.aux_index = &r->aux_to;
    params.aux_sender = r->aux_sender;
    params.num_receivers = r->num_receivers;
    params.timeout_ms = r->timeout_ms;
    const int32_t status = nixlkv_recv(s->engine, &params);
    free(list);
    return status;
}

static inline void node_check(const store_t *s, const op_t *op, answer_t *answer) {
    const request_t *r = &op->request;
    int32_t *list = page_list(s, r->to_seed, r->to_base, r->total);
    bool *ours = calloc((size_t)s->config.num_pages, sizeof *ours);
    CHECK(ours != NULL);
    for (uint64_t i = 0; i < r->total; i++) ours[list[i]] = true;
    for (uint32_t layer = 0; layer < s->config.num_layers; layer++) {
        const char *base = layer_of(s, layer);
        for (uint64_t i = 0; i < r->total; i++)
            answer->value += wrong_words(base, s->config.page_len, list[i], r->key, s->config.first_layer + layer, i);
        for (int32_t page = 0; page < s->config.num_pages; page++)
            answer->stray += !ours[page] && unpoisoned_words(base, s->config.page_len, page) != 0;
    }
    for (int32_t slot = 0; slot < NODE_SLOTS; slot++) {
        if (slot == r->aux_to) answer->value += wrong_words(s->aux, NODE_AUX, slot, r->key, 1000, 0);
        else answer->stray += unpoisoned_words(s->aux, NODE_AUX, slot) != 0;
        if (slot == r->state_to) answer->value += wrong_words(s->state, NODE_STATE, slot, r->key, 2000, 0);
        else answer->stray += unpoisoned_words(s->state, NODE_STATE, slot) != 0;
    }
    for (uint32_t layer = 0; answer->value != 0 && layer < s->config.num_layers; layer++)
        for (uint64_t i = 0; i < r->total; i++) {
            const uint64_t *words = (const uint64_t *)(layer_of(s, layer) + (uint64_t)list[i] * s->config.page_len);
            for (uint64_t k = 0; k < s->config.page_len / 8; k++)
                answer->alien +=
                    words[k] != POISON && words[k] != stamp(r->key, s->config.first_layer + layer, i, k);
        }
    free(ours);
    free(list);
}

static inline int32_t node_poll(const store_t *s, uint64_t room, answer_t *answer) {
    nixlkv_room_status_t status;
    CHECK_OK(nixlkv_room_status_init(&status, sizeof status));
    const int32_t polled = nixlkv_poll(s->engine, room, &status);
    if (polled != NIXL_OK) return polled;
    answer->state = status.state;
    answer->error = status.error;
    answer->quiesced = status.quiesced;
    answer->suspect = status.suspect;
    answer->num_chunks = status.num_chunks;
    answer->num_pages = status.num_pages;
    answer->num_bytes = status.num_bytes;
    snprintf(answer->text, sizeof answer->text, "%s", status.error_text);
    return NIXL_OK;
}

/* Carries out what the controller asks for, until it says that this was all. */
static inline int node_serve(store_t *s, int fd) {
    for (;;) {
        op_t op;
        recv_bytes(fd, &op, sizeof op);
        answer_t answer = {0};
        blob_t blob = {0, NULL};
        const uint64_t room = op.request.room;
        switch (op.what) {
        case OP_SEND: answer.status = node_send(s, &op); break;
        case OP_RECV: answer.status = node_recv(s, &op); break;
        case OP_WAIT: answer.status = nixlkv_wait(s->engine, &room, 1, op.flags, op.timeout_ms); break;
        case OP_POLL: break;
        case OP_CHECK: node_check(s, &op, &answer); break;
        case OP_POISON:
            poison(s->kv, (size_t)s->config.num_pages * s->config.page_len * s->config.num_layers);
            poison(s->aux, NODE_SLOTS * NODE_AUX);
            poison(s->state, NODE_SLOTS * NODE_STATE);
            break;
        case OP_ABORT: answer.status = nixlkv_abort(s->engine, room, op.text[0] ? op.text : NULL); break;
        case OP_RELEASE: answer.status = nixlkv_release(s->engine, room); break;
        case OP_FAULT: answer.status = nixlkv_test_fault(op.text, op.offset, op.count); break;
        case OP_EXPORT:
            blob = export_blob(s->engine);
            answer.value = blob.len;
            break;
        case OP_CONNECT:
            blob = (blob_t){op.count, malloc(op.count)};
            CHECK(blob.bytes != NULL);
            recv_bytes(fd, blob.bytes, blob.len);
            answer.status = nixlkv_connect(s->engine, blob.bytes, blob.len, &answer.value);
            break;
        case OP_DISCONNECT: answer.status = nixlkv_disconnect(s->engine, op.senders[0]); break;
        case OP_REGISTER_MORE: {
            s->more = map_bytes((size_t)s->config.num_pages * s->config.page_len);
            const uint64_t len = (uint64_t)s->config.num_pages * s->config.page_len;
            nixlkv_region_t more = region(NIXLKV_REGION_KV, s->more, len, s->config.page_len);
            more.layer_id = s->config.first_layer + s->config.num_layers + 100;
            more.flags = op.flags;
            answer.status = nixlkv_register(s->engine, &more, 1, &s->more_id);
            break;
        }
        case OP_DEREGISTER: answer.status = nixlkv_deregister(s->engine, &s->more_id, 1); break;
        case OP_MOVE: answer.status = store_move(s); break;
        case OP_STAMP: {
            int32_t *list = page_list(s, op.request.from_seed, op.request.from_base, op.request.total);
            node_stamp(s, &op, list);
            free(list);
            break;
        }
        case OP_HEALTH:
            CHECK_OK(nixlkv_health_init(&answer.health, sizeof answer.health));
            answer.status = nixlkv_health(s->engine, &answer.health);
            break;
        case OP_STATS:
            CHECK_OK(nixlkv_stats_init(&answer.stats, sizeof answer.stats));
            answer.status = nixlkv_stats(s->engine, &answer.stats);
            break;
        case OP_SHUTDOWN: answer.status = nixlkv_engine_shutdown(s->engine, op.timeout_ms); break;
        case OP_QUIT:
            nixlkv_engine_destroy(s->engine);
            send_bytes(fd, &answer, sizeof answer);
            return 0;
        default: FAIL("op %u", op.what);
        }
        if (answer.status != NIXL_OK) snprintf(answer.text, sizeof answer.text, "%s", nixlkv_last_error());
        if (op.what == OP_POLL || op.what == OP_WAIT) {
            const int32_t waited = answer.status;
            answer.status = node_poll(s, room, &answer);
            if (answer.status == NIXL_OK) answer.status = waited;
        }
        send_bytes(fd, &answer, sizeof answer);
        if (op.what == OP_EXPORT) send_bytes(fd, blob.bytes, blob.len);
        free(blob.bytes);
    }
}

/* ---- the controller ---- */

static node_config_t starting;

static inline int node_main(int fd) {
    store_t store = {.config = starting};
    store_open(&store);
    return node_serve(&store, fd);
}

static inline node_t node_start(node_config_t config) {
    if (config.num_layers == 0) config.num_layers = 2;
    if (config.num_pages == 0) config.num_pages = 64;
    if (config.page_len == 0) config.page_len = 4096;
    starting = config;
    return (node_t){spawn(node_main), config};
}

static inline void ask_begin(const node_t *node, const op_t *op) { send_bytes(node->child.fd, op, sizeof *op); }

static inline answer_t ask_end(const node_t *node) {
    answer_t answer;
    recv_bytes(node->child.fd, &answer, sizeof answer);
    return answer;
}

static inline answer_t ask(const node_t *node, const op_t *op) {
    ask_begin(node, op);
    return ask_end(node);
}

/* The call gives the code. */
#define EXPECT(answer, code)                                                                                           \
    do {                                                                                                               \
        const answer_t answer_ = (answer);                                                                             \
        if (answer_.status != (code))                                                                                  \
            FAIL("%s gave %s, not %s: %s", #answer, nixlkv_status_name(answer_.status), nixlkv_status_name(code),      \
                 answer_.text);                                                                                        \
    } while (0)

static inline blob_t blob_of(const node_t *node) {
    const answer_t answer = ask(node, &(op_t){.what = OP_EXPORT});
    blob_t blob = {answer.value, malloc(answer.value)};
    CHECK(blob.bytes != NULL);
    recv_bytes(node->child.fd, blob.bytes, blob.len);
    return blob;
}

static inline answer_t connect_to(const node_t *node, blob_t blob) {
    ask_begin(node, &(op_t){.what = OP_CONNECT, .count = blob.len});
    send_bytes(node->child.fd, blob.bytes, blob.len);
    return ask_end(node);
}

/* Tells `node` about `other`; gives its id there. An earlier connection may have to close first. */
static inline uint64_t introduce(const node_t *node, const node_t *other) {
    blob_t blob = blob_of(other);
    answer_t answer = connect_to(node, blob);
    for (const uint64_t start = now_ms(); answer.status == NIXL_ERR_PEER_BUSY; answer = connect_to(node, blob)) {
        CHECK(now_ms() - start < 10000);
        sleep_ms(2);
    }
    free(blob.bytes);
    EXPECT(answer, NIXL_OK);
    return answer.value;
}

static inline void join(const node_t *a, const node_t *b, uint64_t *b_at_a, uint64_t *a_at_b) {
    *b_at_a = introduce(a, b);
    *a_at_b = introduce(b, a);
}

static inline answer_t send_part(const node_t *node, const request_t *r, uint64_t offset, uint64_t count,
                                 uint32_t flags) {
    return ask(node, &(op_t){.what = OP_SEND, .request = *r, .offset = offset, .count = count, .flags = flags});
}

static inline answer_t receive(const node_t *node, const request_t *r, const uint64_t *senders, uint64_t num_senders) {
    op_t op = {.what = OP_RECV, .request = *r, .num_senders = num_senders};
    for (uint64_t i = 0; i < num_senders; i++) op.senders[i] = senders[i];
    return ask(node, &op);
}

static inline answer_t status_of(const node_t *node, uint64_t room) {
    return ask(node, &(op_t){.what = OP_POLL, .request.room = room});
}

static inline answer_t wait_for(const node_t *node, uint64_t room, uint32_t flags, uint64_t timeout_ms) {
    return ask(node, &(op_t){.what = OP_WAIT, .request.room = room, .flags = flags, .timeout_ms = timeout_ms});
}

static inline answer_t abort_room(const node_t *node, uint64_t room, const char *reason) {
    op_t op = {.what = OP_ABORT, .request.room = room};
    if (reason != NULL) snprintf(op.text, sizeof op.text, "%s", reason);
    return ask(node, &op);
}

static inline answer_t release(const node_t *node, uint64_t room) {
    return ask(node, &(op_t){.what = OP_RELEASE, .request.room = room});
}

static inline void arm(const node_t *node, const char *name, uint64_t skip, uint64_t times) {
    op_t op = {.what = OP_FAULT, .offset = skip, .count = times};
    snprintf(op.text, sizeof op.text, "%s", name);
    EXPECT(ask(node, &op), NIXL_OK);
}

static inline nixlkv_stats_t stats_of(const node_t *node) {
    const answer_t answer = ask(node, &(op_t){.what = OP_STATS});
    EXPECT(answer, NIXL_OK);
    return answer.stats;
}

static inline nixlkv_health_t health_of(const node_t *node) {
    const answer_t answer = ask(node, &(op_t){.what = OP_HEALTH});
    EXPECT(answer, NIXL_OK);
    return answer.health;
}

static inline void poison_all(const node_t *node) { EXPECT(ask(node, &(op_t){.what = OP_POISON}), NIXL_OK); }

/* The room ends within the time with the code, at this node, and its text holds the part. */
#define EXPECT_ENDED(node, room, code, part, timeout_ms)                                                               \
    do {                                                                                                               \
        const answer_t ended_ = wait_for(node, room, NIXLKV_WAIT_ALL, timeout_ms);                                     \
        if (ended_.status != NIXL_OK || ended_.error != (code) || strstr(ended_.text, part) == NULL ||                 \
            ended_.state != ((code) == NIXL_OK ? NIXLKV_ROOM_SUCCESS : NIXLKV_ROOM_FAILED))                            \
            FAIL("%s, room %" PRIu64 ": wait gave %s; state %u, error %s (%s); expected %s with \"%s\"", #node,        \
                 (uint64_t)(room), nixlkv_status_name(ended_.status), ended_.state, nixlkv_status_name(ended_.error),  \
                 ended_.text, nixlkv_status_name(code), part);                                                         \
    } while (0)

/* The same, and it is quiesced within the time; then it is released. */
#define EXPECT_OVER(node, room, code, part, timeout_ms)                                                                \
    do {                                                                                                               \
        EXPECT_ENDED(node, room, code, part, timeout_ms);                                                              \
        const answer_t over_ = wait_for(node, room, NIXLKV_WAIT_QUIESCED, timeout_ms);                                 \
        EXPECT(over_, NIXL_OK);                                                                                        \
        CHECK(over_.quiesced == 1 && over_.error == (code));                                                           \
        EXPECT(release(node, room), NIXL_OK);                                                                          \
    } while (0)

/* A request with scattered pages, aux and state. */
static inline request_t request_of(uint64_t room, uint64_t total) {
    return (request_t){.room = room,
                       .key = mix(room),
                       .from_seed = mix(room + 1) | 1,
                       .to_seed = mix(room + 2) | 1,
                       .total = total,
                       .aux_from = (int32_t)(room % NODE_SLOTS),
                       .aux_to = (int32_t)(room / 3 % NODE_SLOTS),
                       .state_from = (int32_t)(room / 5 % NODE_SLOTS),
                       .state_to = (int32_t)(room / 7 % NODE_SLOTS)};
}

/* Every word of the request, and nothing else, has arrived. */
#define EXPECT_CONTENTS(node, r)                                                                                       \
    do {                                                                                                               \
        const answer_t found_ = ask(node, &(op_t){.what = OP_CHECK, .request = *(r)});                                 \
        if (found_.value != 0 || found_.stray != 0)                                                                    \
            FAIL("%s, room %" PRIu64 ": %" PRIu64 " words are wrong, %" PRIu64 " items were written astray", #node,    \
                 (r)->room, found_.value, found_.stray);                                                               \
    } while (0)

/* A whole request in two chunks from one to the other, looked at and released: they work. */
static inline void transfer_works(const node_t *from, const node_t *to, uint64_t from_at_to, uint64_t room) {
    const request_t r = request_of(room, 20);
    poison_all(to);
    EXPECT(receive(to, &r, &from_at_to, 1), NIXL_OK);
    EXPECT(send_part(from, &r, 0, 13, 0), NIXL_OK);
    EXPECT(send_part(from, &r, 13, 7, NIXLKV_CHUNK_LAST), NIXL_OK);
    EXPECT_ENDED(to, room, NIXL_OK, "", 20000);
    EXPECT_CONTENTS(to, &r);
    EXPECT_OVER(to, room, NIXL_OK, "", 20000);
    EXPECT_OVER(from, room, NIXL_OK, "", 20000);
}

/* The grant of the room is at the sender. */
static inline void await_granted(const node_t *node, uint64_t room) {
    for (const uint64_t start = now_ms(); status_of(node, room).state != NIXLKV_ROOM_WAITING_FOR_INPUT; sleep_ms(1))
        CHECK(now_ms() - start < 10000);
}

static inline void node_quit(node_t *node) {
    EXPECT(ask(node, &(op_t){.what = OP_QUIT}), NIXL_OK);
    expect_child_ok(node->child);
}

static inline void node_kill(node_t *node) {
    CHECK(kill(node->child.pid, SIGKILL) == 0);
    CHECK(waitpid(node->child.pid, NULL, 0) == node->child.pid);
    close(node->child.fd);
}

static inline void node_stop(const node_t *node) {
    int status = 0;
    CHECK(kill(node->child.pid, SIGSTOP) == 0);
    CHECK(waitpid(node->child.pid, &status, WUNTRACED) == node->child.pid && WIFSTOPPED(status));
}

static inline void node_continue(const node_t *node) { CHECK(kill(node->child.pid, SIGCONT) == 0); }

#endif
