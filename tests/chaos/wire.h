/* What the controller and its workers say to each other, and what both derive from a plan. */
#ifndef CHAOS_WIRE_H
#define CHAOS_WIRE_H

#include "../c/test.h"

#include <stdarg.h>
#include <stdbool.h>

enum {
    MAX_WORKERS = 4,
    NUM_LAYERS = 2,
    PAGE_LEN = 32768,
    NUM_PAGES = 1024,
    AUX_LEN = 256,
    NUM_AUX = 1024,
    NUM_GROUPS = 2, /* of state */
    NUM_TENSORS = 2,
    NUM_STATE = 2048,
    MAX_STATE = 3, /* slots of one room in one group */
    MAX_TEXT = 400,
    MAX_BLOB = 100000,
};

static const uint64_t TENSOR_LEN[NUM_TENSORS] = {1024, 2048};

/* The time limits of every engine here: short, so that many rooms pass. */
enum {
    HEARTBEAT_MS = 200,
    LIVENESS_MS = 1000,
    CONNECT_MS = 2000,
    GRANT_MS = 2000,
    ROOM_MS = 3000,
    STALL_MS = 2000,
};

typedef struct rng {
    uint64_t state;
} rng_t;

static inline uint64_t next_random(rng_t *rng) { return mix(rng->state++); }

/* One of 0..n-1. */
static inline uint64_t below(rng_t *rng, uint64_t n) { return next_random(rng) % n; }

/* One of low..high. */
static inline uint64_t between(rng_t *rng, uint64_t low, uint64_t high) { return low + below(rng, high - low + 1); }

static inline bool chance(rng_t *rng, unsigned percent) { return below(rng, 100) < percent; }

/* How a phase's workers are laid out. */
typedef enum shape {
    SHAPE_PAIR,  /* one prefill, one decode */
    SHAPE_FOUR,  /* two of each, all with all layers: one sender a room, one or two receivers */
    SHAPE_SPLIT, /* two of each, a prefill has one layer and one state group: rooms with pages need both */
} shape_t;

/* One attempt at a room, the same for all its workers. */
typedef struct plan {
    uint64_t serial; /* of the attempt: tells its bytes from those of every other */
    uint64_t room;
    uint64_t seed;
    uint32_t slot; /* the controller's */
    uint32_t senders, receivers; /* workers, as bits */
    uint32_t num_pages, num_state;
    uint32_t aux, aux_owner;
    uint32_t abort_by; /* a worker, or MAX_WORKERS */
    uint32_t abort_after_ms;
    uint32_t unopened; /* the worker that aborts does so before anything else */
    uint32_t calm;     /* no pauses: of the last rounds */
} plan_t;

static inline uint64_t key_of(const plan_t *plan) { return mix(plan->room ^ mix(plan->serial)); }

typedef enum what {
    /* to a worker */
    OPEN,
    CONNECT,
    DISCONNECT,
    ARM,
    QUIT,
    /* from a worker */
    READY,
    REFUSED, /* not opened here */
    ENDED,
    FREED, /* quiesced and released */
    LINKED,
    PARTED,
    RELINK, /* the peer seems to be gone: what is its blob now? */
    VIOLATION,
    STATE,
} what_t;

/* How a worker is. */
typedef struct condition {
    uint64_t num_fds, num_threads, rss_kib;
    uint64_t free_pages, open_rooms, num_links;
    nixlkv_stats_t stats;
    nixlkv_health_t health;
} condition_t;

typedef struct msg {
    uint32_t what;
    uint32_t worker, life; /* CONNECT, LINKED, RELINK, DISCONNECT: the peer */
    uint32_t state;
    int32_t code;
    uint32_t slot;
    uint64_t serial, room, skip, times, blob_len;
    uint64_t seen, where; /* VIOLATION with state 1: a word without its index, and what it was found in */
    plan_t plan;
    condition_t condition;
    char text[MAX_TEXT];
} msg_t;

/* A log that outlives the process: the last lines in a mapped file. */
enum { RING_LEN = 1 << 21 };

typedef struct ring {
    uint64_t written;
    char text[RING_LEN];
} ring_t;

static inline void ring_line(ring_t *ring, const char *line) {
    const size_t len = strlen(line);
    for (size_t i = 0; i <= len; i++) ring->text[(ring->written + i) % RING_LEN] = i < len ? line[i] : '\n';
    ring->written += len + 1;
}

#endif
