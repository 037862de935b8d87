/*
 * single: the model without any transfer, one request after the other in one process.
 *
 *   single --requests N --out FILE   writes the results that the demo compares with
 *   single --selftest                checks that chunks, batches and page positions do not change a bit
 */
#define _POSIX_C_SOURCE 200809L

#include "model.h"
#include "request.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PAGES = MODEL_MAX_TOKENS / MODEL_PAGE_TOKENS, TEST_SEQUENCES = 3, TEST_STEPS = 20 };

typedef struct runner {
    model_t *model;
    workspace_t *workspace;
    cache_t cache;
} runner_t;

static int runner_create(runner_t *runner, uint32_t num_pages, uint32_t num_slots) {
    *runner = (runner_t){.model = model_create(REQUEST_MODEL_SEED), .workspace = workspace_create()};
    if (runner->model == NULL || runner->workspace == NULL || cache_create(&runner->cache, num_pages, num_slots) != 0) {
        fprintf(stderr, "single: out of memory\n");
        return -1;
    }
    return 0;
}

/* Also after runner_create has failed. */
static void runner_destroy(runner_t *runner) {
    cache_destroy(&runner->cache);
    workspace_destroy(runner->workspace);
    model_destroy(runner->model);
}

/* Computes a prompt in chunks of chunk_tokens. */
static int prefill(const runner_t *runner, sequence_t *sequence, const int32_t *prompt, uint32_t num_prompt,
                   uint32_t chunk_tokens, float *logits) {
    sequence_start(&runner->cache, sequence);
    while (sequence->num_tokens < num_prompt) {
        uint32_t left = num_prompt - sequence->num_tokens;
        segment_t segment = {
            .sequence = sequence,
            .tokens = prompt + sequence->num_tokens,
            .num_tokens = left < chunk_tokens ? left : chunk_tokens,
            .logits = left <= chunk_tokens ? logits : NULL,
        };
        if (model_forward(runner->model, &runner->cache, runner->workspace, &segment, 1) != 0) {
            fprintf(stderr, "single: the model refused a chunk\n");
            return -1;
        }
    }
    return 0;
}

static int run_request(const runner_t *runner, const int32_t *pages, uint32_t index, result_t *result) {
    int32_t prompt[REQUEST_MAX_PROMPT];
    float logits[MODEL_VOCAB];
    sequence_t sequence = {.pages = pages, .num_pages = MAX_PAGES, .slot = 0};
    result->index = index;
    result->num_prompt = request_num_prompt(index);
    request_prompt(index, prompt);
    if (prefill(runner, &sequence, prompt, result->num_prompt, REQUEST_CHUNK_TOKENS, logits) != 0) {
        return -1;
    }
    for (uint32_t i = 0; i < REQUEST_NEW_TOKENS; i++) {
        result->tokens[i] = model_argmax(logits);
        result->digest = model_digest(result->digest, logits);
        segment_t segment = {.sequence = &sequence, .tokens = &result->tokens[i], .num_tokens = 1, .logits = logits};
        if (i + 1 < REQUEST_NEW_TOKENS &&
            model_forward(runner->model, &runner->cache, runner->workspace, &segment, 1) != 0) {
            fprintf(stderr, "single: the model refused a token\n");
            return -1;
        }
    }
    return 0;
}

static int run_all(uint32_t num_requests, const char *path) {
    static result_t results[REQUEST_MAX];
    int32_t pages[MAX_PAGES];
    runner_t runner;
    int status = runner_create(&runner, MAX_PAGES, 1);
    for (int32_t i = 0; i < MAX_PAGES; i++) {
        pages[i] = i;
    }
    for (uint32_t i = 0; i < num_requests && status == 0; i++) {
        status = run_request(&runner, pages, i, &results[i]);
    }
    if (status == 0 && results_write(path, results, num_requests) != 0) {
        perror(path);
        status = -1;
    }
    runner_destroy(&runner);
    return status;
}

/* ---- the self-test ---- */

/* Some steps of greedy decoding of all sequences, in one batch or one after the other. */
static int decode_steps(const runner_t *runner, sequence_t *sequences, uint32_t num_sequences, int32_t *tokens,
                        float (*logits)[MODEL_VOCAB], int batched, uint64_t *digest) {
    for (uint32_t step = 0; step < TEST_STEPS; step++) {
        segment_t segments[TEST_SEQUENCES];
        for (uint32_t i = 0; i < num_sequences; i++) {
            segments[i] = (segment_t){&sequences[i], &tokens[i], 1, logits[i]};
            if (!batched && model_forward(runner->model, &runner->cache, runner->workspace, &segments[i], 1) != 0) {
                return -1;
            }
        }
        if (batched &&
            model_forward(runner->model, &runner->cache, runner->workspace, segments, num_sequences) != 0) {
            return -1;
        }
        for (uint32_t i = 0; i < num_sequences; i++) {
            tokens[i] = model_argmax(logits[i]);
            *digest = model_digest(*digest, logits[i]);
        }
    }
    return 0;
}

/* The digest of a few sequences, run with the given chunks and batching, on pages that are `stride` apart. */
static int test_run(const runner_t *runner, uint32_t chunk_tokens, int batched, int32_t stride, int flip,
                    uint64_t *digest) {
    static const uint32_t requests[TEST_SEQUENCES] = {0, 2, 4};
    static int32_t pages[TEST_SEQUENCES][MAX_PAGES];
    static float logits[TEST_SEQUENCES][MODEL_VOCAB];
    static int32_t prompt[REQUEST_MAX_PROMPT];
    sequence_t sequences[TEST_SEQUENCES];
    int32_t tokens[TEST_SEQUENCES], num_pages = (int32_t)runner->cache.num_pages, next = 0;
    *digest = 0;
    for (uint32_t i = 0; i < TEST_SEQUENCES; i++) {
        uint32_t num_tokens = request_num_prompt(requests[i]);
        sequences[i] = (sequence_t){pages[i], request_num_pages(num_tokens + TEST_STEPS), (int32_t)i, 0};
        for (uint32_t j = 0; j < sequences[i].num_pages; j++) {
            pages[i][j] = next;
            next = (next + stride) % num_pages;
        }
        request_prompt(requests[i], prompt);
        if (prefill(runner, &sequences[i], prompt, num_tokens, chunk_tokens, logits[i]) != 0) {
            return -1;
        }
        *digest = model_digest(*digest, logits[i]);
        tokens[i] = model_argmax(logits[i]);
    }
    if (flip) { /* one bit of one value of the longest prompt's first page, as a misplaced byte would */
        uint32_t bits;
        float *value = runner->cache.v[0] + (uint64_t)pages[0][0] * MODEL_PAGE_FLOATS + 5;
        memcpy(&bits, value, sizeof bits);
        bits ^= 1u << 20;
        memcpy(value, &bits, sizeof bits);
    }
    return decode_steps(runner, sequences, TEST_SEQUENCES, tokens, logits, batched, digest);
}

static int self_test(void) {
    enum { NUM_PAGES = 127 }; /* prime, so that every stride visits every page */
    static const struct {
        const char *what;
        uint32_t chunk_tokens;
        int batched;
        int32_t stride;
        int flip;
    } runs[] = {
        {"chunks of 256 tokens, one at a time", 256, 0, 1, 0}, {"chunks of 100 tokens", 100, 0, 1, 0},
        {"chunks of 1 token", 1, 0, 1, 0},                     {"batched", 256, 1, 1, 0},
        {"scattered pages, batched", 240, 1, 45, 0},           {"a flipped bit of one value", 256, 0, 1, 1},
    };
    uint64_t digest, expected = 0;
    runner_t runner;
    int status = runner_create(&runner, NUM_PAGES, TEST_SEQUENCES);
    for (uint32_t i = 0; i < sizeof runs / sizeof runs[0] && status == 0; i++) {
        status = test_run(&runner, runs[i].chunk_tokens, runs[i].batched, runs[i].stride, runs[i].flip, &digest);
        if (status != 0) {
            fprintf(stderr, "single: the model refused %s\n", runs[i].what);
            break;
        }
        expected = i == 0 ? digest : expected;
        int good = runs[i].flip ? digest != expected : digest == expected;
        printf("%-40s %016llx %s\n", runs[i].what, (unsigned long long)digest, good ? "ok" : "WRONG");
        status = good ? 0 : -1;
    }
    runner_destroy(&runner);
    return status;
}

int main(int argc, char **argv) {
    uint32_t num_requests;
    if (argc == 2 && strcmp(argv[1], "--selftest") == 0) {
        return self_test() == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
    }
    if (argc == 5 && strcmp(argv[1], "--requests") == 0 && parse_number(argv[2], 1, REQUEST_MAX, &num_requests) == 0 &&
        strcmp(argv[3], "--out") == 0) {
        return run_all(num_requests, argv[4]) == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
    }
    fprintf(stderr, "usage: single --requests N --out FILE | single --selftest\n");
    return 2;
}
