/* A worker's state and memory: what each room holds, what must stand in it. */
#ifndef CHAOS_MEMORY_H
#define CHAOS_MEMORY_H

#include "wire.h"

#include <dirent.h>
#include <pthread.h>
#include <sys/resource.h>

enum { MAX_OPEN = 512, MAX_CHUNKS = 32, MAX_LAID_ASIDE = 4096 };

/* What the pages of a sender hold once nothing can read them any more. */
#define SCRIBBLE 0xbad0bad0bad0bad0u

typedef struct worker_config {
    uint32_t index, role, shape, life;
    const char *name, *tls;
    uint32_t num_workers;
    uint64_t seed;
    ring_t *ring;
} worker_config_t;

/* The memory of one room. */
typedef struct hold {
    uint64_t serial, room;
    int32_t *pages;
    uint32_t num_pages, num_state;
    int32_t aux;
    int32_t state[NUM_GROUPS][MAX_STATE];
} hold_t;

/* One attempt at a room, on this side. */
typedef struct attempt {
    bool used, opened, ended, quiesced, aborted, all_sent;
    plan_t plan;
    rng_t rng;
    hold_t hold;
    uint64_t abort_at, next_at, release_at;
    uint32_t num_chunks, sent;
    struct {
        uint32_t offset, count;
    } chunks[MAX_CHUNKS];
    uint32_t state;
    int32_t error;
} attempt_t;

typedef struct link {
    uint64_t peer; /* 0: not connected */
    uint32_t life;
    bool parting;
    blob_t pending; /* to connect as soon as it is possible */
    uint32_t pending_life;
    uint64_t retry_at, asked_at;
} link_t;

/* Memory that is free for the engine and that nobody may touch for a while. */
typedef struct aside {
    uint64_t due;
    hold_t hold;
} aside_t;

typedef struct pool {
    int32_t *items;
    uint32_t num;
} pool_t;

typedef struct worker {
    worker_config_t config;
    int fd;
    nixlkv_engine_t *engine;
    rng_t rng;
    char *kv[NUM_LAYERS], *aux, *state[NUM_GROUPS][NUM_TENSORS];
    bool has_layer[NUM_LAYERS], has_group[NUM_GROUPS];
    pool_t pages, aux_slots, state_slots[NUM_GROUPS];
    attempt_t attempts[MAX_OPEN];
    uint32_t most_used; /* attempts beyond were never used */
    aside_t aside[MAX_LAID_ASIDE];
    uint32_t num_aside;
    link_t links[MAX_WORKERS];
    uint64_t num_links;
    bool quitting;
} worker_t;

static pthread_mutex_t ring_lock = PTHREAD_MUTEX_INITIALIZER;

static inline void note(const worker_t *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
static inline void note(const worker_t *w, const char *format, ...) {
    char line[1024];
    int n = snprintf(line, sizeof line, "%" PRIu64 " ", now_ms());
    va_list args;
    va_start(args, format);
    vsnprintf(line + n, sizeof line - (size_t)n, format, args);
    va_end(args);
    pthread_mutex_lock(&ring_lock);
    ring_line(w->config.ring, line);
    pthread_mutex_unlock(&ring_lock);
}

static inline void log_line(void *user_data, uint32_t level, const char *message) {
    note(user_data, "  [%u] %s", level, message);
}

static inline void say(const worker_t *w, const msg_t *msg) {
    for (;;) {
        const ssize_t n = send(w->fd, msg, sizeof *msg, MSG_NOSIGNAL);
        if (n == (ssize_t)sizeof *msg) return;
        if (n < 0 && errno == EINTR) continue;
        FAIL("the controller does not listen: %s", strerror(errno));
    }
}

static inline void violation(const worker_t *w, const plan_t *plan, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static inline void violation(const worker_t *w, const plan_t *plan, const char *format, ...) {
    msg_t msg = {.what = VIOLATION};
    int n = plan == NULL ? 0
                         : snprintf(msg.text, sizeof msg.text, "room %#" PRIx64 ", attempt %" PRIu64 ": ", plan->room,
                                    plan->serial);
    va_list args;
    va_start(args, format);
    vsnprintf(msg.text + n, sizeof msg.text - (size_t)n, format, args);
    va_end(args);
    note(w, "VIOLATION %s", msg.text);
    say(w, &msg);
}

/* ---- memory ---- */

static inline pool_t pool_of(uint32_t num) {
    pool_t pool = {malloc(num * sizeof(int32_t)), num};
    CHECK(pool.items != NULL);
    for (uint32_t i = 0; i < num; i++) pool.items[i] = (int32_t)i;
    return pool;
}

static inline int32_t take(pool_t *pool, rng_t *rng) {
    CHECK(pool->num > 0);
    const uint64_t i = below(rng, pool->num);
    const int32_t item = pool->items[i];
    pool->items[i] = pool->items[--pool->num];
    return item;
}

static inline void give(pool_t *pool, int32_t item) { pool->items[pool->num++] = item; }

static inline bool is_sender(const worker_t *w) { return w->config.role == NIXLKV_ROLE_PREFILL; }

/* The state group that a room takes from a sender, or all that a receiver has of it. */
static inline bool group_in_room(const worker_t *w, const plan_t *plan, uint32_t group) {
    if (plan->num_state == 0 || !w->has_group[group]) return false;
    return w->config.shape != SHAPE_SPLIT || (plan->senders >> group & 1u) != 0;
}

static inline int by_index(const void *a, const void *b) { return *(const int32_t *)a - *(const int32_t *)b; }

/* Takes the room's memory; false: there is not enough. */
static inline bool hold_take(worker_t *w, hold_t *hold, const plan_t *plan, rng_t *rng) {
    *hold = (hold_t){.serial = plan->serial, .room = plan->room, .aux = -1};
    if (w->pages.num < plan->num_pages || w->aux_slots.num < 1 || w->num_aside >= MAX_LAID_ASIDE) return false;
    for (uint32_t g = 0; g < NUM_GROUPS; g++)
        if (w->state_slots[g].num < MAX_STATE) return false;
    hold->num_pages = plan->num_pages;
    hold->num_state = plan->num_state;
    hold->pages = malloc((plan->num_pages + 1) * sizeof(int32_t));
    CHECK(hold->pages != NULL);
    for (uint32_t i = 0; i < plan->num_pages; i++) hold->pages[i] = take(&w->pages, rng);
    if (chance(rng, 50)) qsort(hold->pages, plan->num_pages, sizeof(int32_t), by_index);
    if (plan->aux != 0 && (!is_sender(w) || plan->aux_owner == w->config.index)) hold->aux = take(&w->aux_slots, rng);
    for (uint32_t g = 0; g < NUM_GROUPS; g++)
        for (uint32_t i = 0; i < MAX_STATE; i++)
            hold->state[g][i] = group_in_room(w, plan, g) && i < plan->num_state ? take(&w->state_slots[g], rng) : -1;
    return true;
}

static inline void hold_give(worker_t *w, hold_t *hold) {
    for (uint32_t i = 0; i < hold->num_pages; i++) give(&w->pages, hold->pages[i]);
    if (hold->aux >= 0) give(&w->aux_slots, hold->aux);
    for (uint32_t g = 0; g < NUM_GROUPS; g++)
        for (uint32_t i = 0; i < MAX_STATE; i++)
            if (hold->state[g][i] >= 0) give(&w->state_slots[g], hold->state[g][i]);
    free(hold->pages);
    hold->pages = NULL;
}

/* Calls visit for every item of the room's memory. */
typedef void (*visit_t)(void *context, char *item, uint64_t len, uint64_t what, uint64_t position, int32_t index);

static inline void hold_visit(const worker_t *w, const hold_t *hold, visit_t visit, void *context) {
    for (uint32_t layer = 0; layer < NUM_LAYERS; layer++)
        for (uint32_t i = 0; w->has_layer[layer] && i < hold->num_pages; i++)
            visit(context, w->kv[layer] + (size_t)hold->pages[i] * PAGE_LEN, PAGE_LEN, layer, i, hold->pages[i]);
    if (hold->aux >= 0) visit(context, w->aux + (size_t)hold->aux * AUX_LEN, AUX_LEN, 1000, 0, hold->aux);
    for (uint32_t g = 0; g < NUM_GROUPS; g++)
        for (uint32_t i = 0; i < MAX_STATE; i++)
            for (uint32_t t = 0; t < NUM_TENSORS && hold->state[g][i] >= 0; t++)
                visit(context, w->state[g][t] + (size_t)hold->state[g][i] * TENSOR_LEN[t], TENSOR_LEN[t],
                      2000 + g * 16 + t, i, hold->state[g][i]);
}

static inline void visit_fill(void *context, char *item, uint64_t len, uint64_t what, uint64_t position,
                              int32_t index) {
    (void)what, (void)position, (void)index;
    uint64_t *words = (uint64_t *)item;
    for (uint64_t i = 0; i < len / 8; i++) words[i] = *(const uint64_t *)context;
}

static inline void fill(const worker_t *w, const hold_t *hold, uint64_t word) {
    hold_visit(w, hold, visit_fill, &word);
}

/* What was found that does not belong there. */
typedef struct found {
    uint64_t key, wrong, num_items;
    uint64_t what, position, word, seen, expected; /* the first */
    int32_t index;
} found_t;

static inline void found_word(found_t *found, uint64_t what, uint64_t position, int32_t index, uint64_t word,
                              uint64_t seen, uint64_t expected) {
    if (found->wrong++ != 0) return;
    found->what = what, found->position = position, found->index = index;
    found->word = word, found->seen = seen, found->expected = expected;
}

static inline void visit_compare(void *context, char *item, uint64_t len, uint64_t what, uint64_t position,
                                 int32_t index) {
    found_t *found = context;
    const uint64_t before = found->wrong, first = stamp(found->key, what, position, 0), *words = (uint64_t *)item;
    for (uint64_t i = 0; i < len / 8; i++)
        if (words[i] != (first ^ i)) found_word(found, what, position, index, i, words[i], first ^ i);
    found->num_items += found->wrong != before;
}

static inline void visit_poisoned(void *context, char *item, uint64_t len, uint64_t what, uint64_t position,
                                  int32_t index) {
    found_t *found = context;
    const uint64_t before = found->wrong, *words = (uint64_t *)item;
    for (uint64_t i = 0; i < len / 8; i++)
        if (words[i] != POISON) found_word(found, what, position, index, i, words[i], POISON);
    found->num_items += found->wrong != before;
}

/* Says what was found; the controller adds whose bytes they are. */
static inline void found_tell(const worker_t *w, const hold_t *hold, const found_t *found, const char *when) {
    if (found->wrong == 0) return;
    msg_t msg = {.what = VIOLATION, .state = 1, .seen = found->seen ^ found->word, .where = found->what};
    snprintf(msg.text, sizeof msg.text,
             "room %#" PRIx64 ", attempt %" PRIu64 ": %s: %" PRIu64 " words of %" PRIu64 " items, first in %s %" PRIu64
             " position %" PRIu64 " index %d word %" PRIu64 ": %#" PRIx64 " for %#" PRIx64 "%s",
             hold->room, hold->serial, when, found->wrong, found->num_items,
             found->what < 1000 ? "layer" : found->what == 1000 ? "aux" : "state", found->what, found->position,
             found->index, found->word, found->seen, found->expected,
             found->seen == POISON     ? " (never written)"
             : found->seen == SCRIBBLE ? " (read after it was free)"
                                       : "");
    note(w, "VIOLATION %s", msg.text);
    say(w, &msg);
}

static inline void visit_unscribbled(void *context, char *item, uint64_t len, uint64_t what, uint64_t position,
                                     int32_t index) {
    found_t *found = context;
    const uint64_t before = found->wrong, *words = (uint64_t *)item;
    for (uint64_t i = 0; i < len / 8; i++)
        if (words[i] == SCRIBBLE) found_word(found, what, position, index, i, words[i], POISON);
    found->num_items += found->wrong != before;
}

/* Whatever a failed room left behind, its sender had not freed it when it was read. */
static inline void expect_unscribbled(const worker_t *w, const attempt_t *a) {
    found_t found = {0};
    hold_visit(w, &a->hold, visit_unscribbled, &found);
    found_tell(w, &a->hold, &found, "in a failed room");
}

static inline void expect_contents(const worker_t *w, const attempt_t *a, const char *when) {
    found_t found = {.key = key_of(&a->plan)};
    hold_visit(w, &a->hold, visit_compare, &found);
    found_tell(w, &a->hold, &found, when);
}

static inline void expect_poison(const worker_t *w, const hold_t *hold, const char *when) {
    found_t found = {0};
    hold_visit(w, hold, visit_poisoned, &found);
    found_tell(w, hold, &found, when);
    if (found.wrong != 0) fill(w, hold, POISON);
}

/* Frees a room's memory. A receiver's is poisoned by now and laid aside for a while. */
static inline void hold_release(worker_t *w, attempt_t *a) {
    if (is_sender(w)) {
        hold_give(w, &a->hold);
        return;
    }
    const uint64_t wait = a->plan.calm ? 50 : chance(&w->rng, 10) ? between(&w->rng, 300, 3000) : below(&w->rng, 300);
    w->aside[w->num_aside++] = (aside_t){now_ms() + wait, a->hold};
}

static inline void retire_aside(worker_t *w) {
    const uint64_t now = now_ms();
    for (uint32_t i = 0; i < w->num_aside;) {
        if (w->aside[i].due > now) {
            i++;
            continue;
        }
        expect_poison(w, &w->aside[i].hold, "written after it was free");
        hold_give(w, &w->aside[i].hold);
        w->aside[i] = w->aside[--w->num_aside];
    }
}

#endif
