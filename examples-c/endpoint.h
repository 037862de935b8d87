/*
 * endpoint.h: what prefill and decode have in common on nixlkv's side: an engine, its registered memory, its peer.
 */
#ifndef ENDPOINT_H
#define ENDPOINT_H

#include "model.h"
#include "pool.h"

#include <nixlkv.h>
#include <stdint.h>

enum { STATE_GROUP = 0 }; /* of the recurrent layer: two tensors that share a slot index */

/* What travels in the first aux array. */
typedef struct first_token {
    uint64_t room;
    int32_t token;
    uint32_t num_prompt;
} first_token_t;

typedef struct endpoint {
    uint32_t role; /* NIXLKV_ROLE_PREFILL or NIXLKV_ROLE_DECODE */
    nixlkv_engine_t *engine;
    uint64_t peer; /* the other engine, once the two have shaken hands */
    cache_t cache;                /* KV and state */
    first_token_t *first_tokens;  /* [slot]: the first aux array */
    float (*logits)[MODEL_VOCAB]; /* [slot]: the second */
    pool_t pages, states, aux;    /* free indices */
} endpoint_t;

/*
 * Creates the engine, allocates and registers its memory. `seed` shuffles the free lists. 0, or -1 after a message on
 * stderr; endpoint_destroy is due in both cases.
 */
int endpoint_create(endpoint_t *endpoint, uint32_t role, uint32_t num_pages, uint32_t num_slots, uint64_t seed);

/* Exchanges blobs over the socket, and connects the engine by the other side's. 0, or -1 as above. */
int endpoint_handshake(endpoint_t *endpoint, int fd, int timeout_ms);

/*
 * Shuts the engine down, destroys it, and frees the memory. When transfers do not end in time, the memory is left
 * allocated: something may still be writing to it.
 */
void endpoint_destroy(endpoint_t *endpoint);

/* One line on stderr: the program, what failed, and this thread's last error. Returns -1. */
int endpoint_error(const endpoint_t *endpoint, const char *what);

#endif
