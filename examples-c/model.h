/*
 * model.h: a small hybrid language model for the demo.
 *
 * Decoder-only: grouped-query attention over a paged KV cache, and one recurrent layer (a short convolution and a gated
 * linear recurrence) with a state per request. About 3.7 million weights from a fixed seed, greedy decoding.
 *
 * Exact by design: what a token's row computes does not depend on the chunk or the batch it is computed in, nor on
 * where its pages lie. So two programs on one machine that link this file agree in every bit. Build it with
 * -ffp-contract=off and without -ffast-math.
 */
#ifndef MODEL_H
#define MODEL_H

#include <stdint.h>

enum {
    MODEL_VOCAB = 1024,
    MODEL_DIM = 256,
    MODEL_HIDDEN = 640, /* of the feed-forward part */
    MODEL_LAYERS = 5,
    MODEL_RECURRENT_LAYER = 2, /* the others are attention layers */
    MODEL_ATTENTION_LAYERS = MODEL_LAYERS - 1,
    MODEL_HEADS = 8,
    MODEL_KV_HEADS = 2,
    MODEL_HEAD_DIM = MODEL_DIM / MODEL_HEADS,
    MODEL_KV_DIM = MODEL_KV_HEADS * MODEL_HEAD_DIM,
    MODEL_CONV_TAPS = 4,

    MODEL_PAGE_TOKENS = 16,
    MODEL_PAGE_FLOATS = MODEL_PAGE_TOKENS * MODEL_KV_DIM,         /* of K, or of V, in one layer */
    MODEL_WINDOW_FLOATS = (MODEL_CONV_TAPS - 1) * MODEL_DIM,      /* convolution's part of a state slot */
    MODEL_RECURRENCE_FLOATS = MODEL_DIM,                          /* recurrence's part of a state slot */
    MODEL_MAX_TOKENS = 4096,                                      /* of one sequence */
    MODEL_MAX_ROWS = 256                                          /* tokens in one call of model_forward */
};

/* The weights. Constant after creation: threads may share it. */
typedef struct model model_t;

/* Buffers for one caller of model_forward. */
typedef struct workspace workspace_t;

/* Memory of all sequences of a process: this is what gets registered with nixlkv. */
typedef struct cache {
    uint32_t num_pages;
    uint32_t num_slots;
    float *k[MODEL_ATTENTION_LAYERS]; /* [page][token][kv_head][head_dim] */
    float *v[MODEL_ATTENTION_LAYERS]; /* the same */
    float *window;                    /* [slot][tap][dim]: the convolution's last inputs, the newest last */
    float *recurrence;                /* [slot][dim] */
} cache_t;

/* One request's place in a cache. */
typedef struct sequence {
    const int32_t *pages; /* page i holds the tokens from MODEL_PAGE_TOKENS * i on */
    uint32_t num_pages;
    int32_t slot;         /* state slot */
    uint32_t num_tokens;  /* computed so far */
} sequence_t;

/* The next tokens of one sequence. */
typedef struct segment {
    sequence_t *sequence;
    const int32_t *tokens;
    uint32_t num_tokens;
    float *logits; /* receives MODEL_VOCAB logits of the last token; NULL: not wanted */
} segment_t;

model_t *model_create(uint64_t seed); /* NULL: out of memory */
void model_destroy(model_t *model);
uint64_t model_num_weights(const model_t *model);

workspace_t *workspace_create(void); /* NULL: out of memory */
void workspace_destroy(workspace_t *workspace);

/* Every byte starts as 0xff, which is a NaN: nothing that was not written goes unnoticed. 0, or -1: out of memory. */
int cache_create(cache_t *cache, uint32_t num_pages, uint32_t num_slots);
void cache_destroy(cache_t *cache);

/* Makes the sequence empty and clears its state slot. */
void sequence_start(const cache_t *cache, sequence_t *sequence);

/*
 * Runs the segments, each of another sequence, through the model: writes their K and V, advances their states and
 * num_tokens, computes the logits that are wanted. 0, or -1 when a token, page, slot or length is out of range: then
 * nothing has changed.
 */
int model_forward(const model_t *model, const cache_t *cache, workspace_t *workspace, const segment_t *segments,
                  uint32_t num_segments);

/* Greedy choice: the first of the largest. */
int32_t model_argmax(const float *logits);

/* Mixes the logits' bits into a digest, to compare whole runs by. */
uint64_t model_digest(uint64_t digest, const float *logits);

/* A small generator of 64-bit numbers (splitmix64). */
uint64_t model_random(uint64_t *state);

#endif
