/*
 * pool.c: see pool.h.
 */
#define _POSIX_C_SOURCE 200809L

#include "pool.h"

#include "model.h"

#include <stdlib.h>
#include <string.h>

int pool_create(pool_t *pool, uint32_t num_total, uint64_t seed) {
    *pool = (pool_t){.free = malloc(num_total * sizeof *pool->free), .num_free = num_total, .num_total = num_total};
    if (pool->free == NULL) {
        return -1;
    }
    for (uint32_t i = 0; i < num_total; i++) {
        uint32_t other = (uint32_t)(model_random(&seed) % (i + 1));
        pool->free[i] = pool->free[other];
        pool->free[other] = (int32_t)i;
    }
    return 0;
}

void pool_destroy(pool_t *pool) {
    free(pool->free);
    *pool = (pool_t){0};
}

int pool_take(pool_t *pool, uint32_t num, int32_t *indices) {
    if (num > pool->num_free) {
        return -1;
    }
    pool->num_free -= num;
    memcpy(indices, pool->free + pool->num_free, num * sizeof *indices);
    return 0;
}

void pool_give(pool_t *pool, uint32_t num, const int32_t *indices) {
    memcpy(pool->free + pool->num_free, indices, num * sizeof *indices);
    pool->num_free += num;
}
