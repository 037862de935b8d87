/*
 * request.h: the demo's requests and their results, the same for every program of it.
 */
#ifndef REQUEST_H
#define REQUEST_H

#include "model.h"

#include <stdint.h>

enum {
    REQUEST_MAX = 32,           /* requests of one run */
    REQUEST_MAX_PROMPT = 3000,  /* tokens */
    REQUEST_NEW_TOKENS = 128,   /* tokens that decode adds, the first one (of prefill) included */
    REQUEST_CHUNK_TOKENS = 256, /* tokens that prefill computes, and sends, in one go: whole pages */
    REQUEST_MODEL_SEED = 2025
};

/* What became of a request. All zero but `index`: nothing yet. */
typedef struct result {
    uint32_t index;
    uint32_t num_prompt;
    int32_t tokens[REQUEST_NEW_TOKENS];
    uint64_t digest; /* of the logits of every new token */
    /* the rest is of a transferred request only */
    int32_t error; /* NIXL_OK, or the code that its room failed with */
    uint32_t reserved;
    uint32_t num_pages;
    uint32_t num_chunks;
    uint64_t num_bytes; /* KV, state and aux, as the library counted what landed */
    uint64_t num_descriptors;
    uint64_t opened_ns; /* decode opened the room; on the machine's monotonic clock, as the next three */
    uint64_t first_ns;  /* the first chunk was handed to nixlkv */
    uint64_t last_ns;   /* the last chunk was */
    uint64_t landed_ns; /* the decode side saw success */
} result_t;

/* Tokens of the prompt of request `index`, which is below REQUEST_MAX. */
uint32_t request_num_prompt(uint32_t index);

/* Writes the prompt. */
void request_prompt(uint32_t index, int32_t *tokens);

/* Pages that num_tokens tokens take. */
uint32_t request_num_pages(uint32_t num_tokens);

/* The whole of a file of results. 0, or -1: errno tells why, or the file does not hold exactly `num`. */
int results_write(const char *path, const result_t *results, uint32_t num);
int results_read(const char *path, result_t *results, uint32_t num);

/* Reads a decimal number in [min, max]. 0, or -1. */
int parse_number(const char *text, uint32_t min, uint32_t max, uint32_t *number);

/* The machine's monotonic clock. */
uint64_t now_ns(void);

#endif
