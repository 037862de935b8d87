/*
 * pool.h: a free list of indices: KV pages, state slots or aux slots.
 *
 * It starts shuffled, so that a request's pages are scattered, and differently in every process, as they are in an
 * engine that has run for a while.
 */
#ifndef POOL_H
#define POOL_H

#include <stdint.h>

typedef struct pool {
    int32_t *free;
    uint32_t num_free;
    uint32_t num_total;
} pool_t;

/* Indices from 0 to num_total - 1. 0, or -1: out of memory. */
int pool_create(pool_t *pool, uint32_t num_total, uint64_t seed);
void pool_destroy(pool_t *pool);

/* Takes num indices, or none and returns -1 when there are not as many. */
int pool_take(pool_t *pool, uint32_t num, int32_t *indices);

/* Gives back what pool_take gave. */
void pool_give(pool_t *pool, uint32_t num, const int32_t *indices);

#endif
