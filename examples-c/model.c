/*
 * model.c: see model.h.
 *
 * Every sum is taken in one fixed order: matrix products add over k = 0, 1, 2, ... whatever the number of rows, and
 * attention adds over the tokens in their order. Vectors run across independent outputs only, so that the machine's
 * vector length changes nothing either. `vec_t` is the vector extension of gcc and clang.
 */
#define _POSIX_C_SOURCE 200809L

#include "model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    LANES = 4,
    PANEL = 2 * LANES, /* columns of a matrix that are stored together */
    TILE = 4,          /* rows that are multiplied together */
    GROUP = MODEL_HEADS / MODEL_KV_HEADS,
    HALF = MODEL_HEAD_DIM / 2,
    MAX_PAGES = MODEL_MAX_TOKENS / MODEL_PAGE_TOKENS,
    ALIGNMENT = 4096
};

typedef float vec_t __attribute__((vector_size(LANES * sizeof(float))));

/* An in x out matrix, stored as panels of PANEL columns: [out / PANEL][in][PANEL]. */
typedef struct matrix {
    uint32_t in;
    uint32_t out;
    float *data;
} matrix_t;

typedef struct layer {
    matrix_t query, key, value;          /* attention */
    matrix_t input, gate;                /* recurrent: into the convolution, beside it */
    matrix_t forget, admit;              /* recurrent: the two gates of the recurrence */
    matrix_t output;                     /* both */
    matrix_t up, up_gate, down;          /* feed-forward */
    float taps[MODEL_CONV_TAPS][MODEL_DIM];
    float decay[MODEL_DIM];
} layer_t;

struct model {
    layer_t layers[MODEL_LAYERS];
    float embedding[MODEL_VOCAB][MODEL_DIM];
    matrix_t head;
    float cosine[MODEL_MAX_TOKENS][HALF];
    float sine[MODEL_MAX_TOKENS][HALF];
    uint64_t num_weights;
};

struct workspace {
    float x[MODEL_MAX_ROWS][MODEL_DIM];
    float norm[MODEL_MAX_ROWS][MODEL_DIM];
    float a[MODEL_MAX_ROWS][MODEL_HIDDEN];
    float b[MODEL_MAX_ROWS][MODEL_HIDDEN];
    float mix[MODEL_MAX_ROWS][MODEL_DIM];
    float c[MODEL_MAX_ROWS][MODEL_DIM];
    float keys[MAX_PAGES][MODEL_HEAD_DIM][MODEL_PAGE_TOKENS]; /* one KV head's keys, each page transposed */
    float scores[MODEL_MAX_TOKENS];
};

uint64_t model_random(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Uniform in [-1, 1). */
static float uniform(uint64_t *state) {
    return (float)(model_random(state) >> 40) / 8388608.0f - 1.0f;
}

static float sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x));
}

static vec_t load(const float *from) {
    vec_t vector;
    memcpy(&vector, from, sizeof vector);
    return vector;
}

static void store(float *to, vec_t vector) {
    memcpy(to, &vector, sizeof vector);
}

/* Memory that starts at a page of the machine, as registered memory should; rounded up to whole ones. */
static void *allocate(uint64_t num_bytes) {
    return aligned_alloc(ALIGNMENT, (num_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
}

/* ---- weights ---- */

static int matrix_create(model_t *model, matrix_t *matrix, uint32_t in, uint32_t out, float gain, uint64_t *random) {
    uint64_t count = (uint64_t)in * out;
    float scale = gain * sqrtf(3.0f / (float)in);
    matrix->in = in;
    matrix->out = out;
    matrix->data = allocate(count * sizeof(float));
    if (matrix->data == NULL) {
        return -1;
    }
    for (uint64_t i = 0; i < count; i++) {
        matrix->data[i] = scale * uniform(random);
    }
    model->num_weights += count;
    return 0;
}

static int layer_create(model_t *model, uint32_t index, uint64_t *random) {
    layer_t *layer = &model->layers[index];
    int failed = 0;
    if (index == MODEL_RECURRENT_LAYER) {
        failed |= matrix_create(model, &layer->input, MODEL_DIM, MODEL_DIM, 1.0f, random);
        failed |= matrix_create(model, &layer->gate, MODEL_DIM, MODEL_DIM, 1.5f, random);
        failed |= matrix_create(model, &layer->forget, MODEL_DIM, MODEL_DIM, 1.0f, random);
        failed |= matrix_create(model, &layer->admit, MODEL_DIM, MODEL_DIM, 1.0f, random);
        for (uint32_t i = 0; i < MODEL_DIM; i++) {
            for (uint32_t tap = 0; tap < MODEL_CONV_TAPS; tap++) {
                layer->taps[tap][i] = uniform(random);
            }
            layer->decay[i] = 0.01f + 0.2f * (1.0f + uniform(random)); /* remembers some to some hundred tokens */
        }
        model->num_weights += (MODEL_CONV_TAPS + 1) * MODEL_DIM;
    } else {
        /* a large gain for the queries: sharp attention, so that single distant tokens matter */
        failed |= matrix_create(model, &layer->query, MODEL_DIM, MODEL_DIM, 3.0f, random);
        failed |= matrix_create(model, &layer->key, MODEL_DIM, MODEL_KV_DIM, 1.0f, random);
        failed |= matrix_create(model, &layer->value, MODEL_DIM, MODEL_KV_DIM, 1.5f, random);
    }
    failed |= matrix_create(model, &layer->output, MODEL_DIM, MODEL_DIM, 1.5f, random);
    failed |= matrix_create(model, &layer->up, MODEL_DIM, MODEL_HIDDEN, 1.0f, random);
    failed |= matrix_create(model, &layer->up_gate, MODEL_DIM, MODEL_HIDDEN, 1.5f, random);
    failed |= matrix_create(model, &layer->down, MODEL_HIDDEN, MODEL_DIM, 1.0f, random);
    return failed;
}

model_t *model_create(uint64_t seed) {
    model_t *model = calloc(1, sizeof *model);
    if (model == NULL) {
        return NULL;
    }
    int failed = 0;
    for (uint32_t i = 0; i < MODEL_LAYERS; i++) {
        failed |= layer_create(model, i, &seed);
    }
    failed |= matrix_create(model, &model->head, MODEL_DIM, MODEL_VOCAB, 1.0f, &seed);
    if (failed) {
        model_destroy(model);
        return NULL;
    }
    for (uint32_t token = 0; token < MODEL_VOCAB; token++) {
        for (uint32_t i = 0; i < MODEL_DIM; i++) {
            model->embedding[token][i] = uniform(&seed);
        }
    }
    model->num_weights += MODEL_VOCAB * MODEL_DIM;
    for (uint32_t i = 0; i < HALF; i++) {
        double frequency = pow(10000.0, -(double)i / HALF);
        for (uint32_t position = 0; position < MODEL_MAX_TOKENS; position++) {
            model->cosine[position][i] = (float)cos(frequency * position);
            model->sine[position][i] = (float)sin(frequency * position);
        }
    }
    return model;
}

void model_destroy(model_t *model) {
    if (model == NULL) {
        return;
    }
    for (uint32_t i = 0; i < MODEL_LAYERS; i++) {
        layer_t *layer = &model->layers[i];
        matrix_t *matrices[] = {&layer->query,  &layer->key,    &layer->value,  &layer->input,
                                &layer->gate,   &layer->forget, &layer->admit,  &layer->output,
                                &layer->up,     &layer->up_gate, &layer->down};
        for (uint32_t j = 0; j < sizeof matrices / sizeof matrices[0]; j++) {
            free(matrices[j]->data); /* NULL where this kind of layer has none */
        }
    }
    free(model->head.data);
    free(model);
}

uint64_t model_num_weights(const model_t *model) {
    return model->num_weights;
}

/* ---- memory of the sequences ---- */

workspace_t *workspace_create(void) {
    return calloc(1, sizeof(workspace_t));
}

void workspace_destroy(workspace_t *workspace) {
    free(workspace);
}

static float *allocate_poisoned(uint32_t num_items, uint64_t item_floats) {
    uint64_t num_bytes = num_items * item_floats * sizeof(float);
    float *floats = allocate(num_bytes);
    if (floats != NULL) {
        memset(floats, 0xff, num_bytes);
    }
    return floats;
}

int cache_create(cache_t *cache, uint32_t num_pages, uint32_t num_slots) {
    *cache = (cache_t){.num_pages = num_pages, .num_slots = num_slots};
    int failed = 0;
    for (uint32_t i = 0; i < MODEL_ATTENTION_LAYERS; i++) {
        failed |= (cache->k[i] = allocate_poisoned(num_pages, MODEL_PAGE_FLOATS)) == NULL;
        failed |= (cache->v[i] = allocate_poisoned(num_pages, MODEL_PAGE_FLOATS)) == NULL;
    }
    failed |= (cache->window = allocate_poisoned(num_slots, MODEL_WINDOW_FLOATS)) == NULL;
    failed |= (cache->recurrence = allocate_poisoned(num_slots, MODEL_RECURRENCE_FLOATS)) == NULL;
    if (failed) {
        cache_destroy(cache);
        return -1;
    }
    return 0;
}

void cache_destroy(cache_t *cache) {
    for (uint32_t i = 0; i < MODEL_ATTENTION_LAYERS; i++) {
        free(cache->k[i]);
        free(cache->v[i]);
    }
    free(cache->window);
    free(cache->recurrence);
    *cache = (cache_t){0};
}

void sequence_start(const cache_t *cache, sequence_t *sequence) {
    uint64_t slot = (uint64_t)sequence->slot;
    memset(cache->window + slot * MODEL_WINDOW_FLOATS, 0, MODEL_WINDOW_FLOATS * sizeof(float));
    memset(cache->recurrence + slot * MODEL_RECURRENCE_FLOATS, 0, MODEL_RECURRENCE_FLOATS * sizeof(float));
    sequence->num_tokens = 0;
}

/* ---- arithmetic ---- */

/* to[row] = from[row] * matrix. Strides in floats. */
static void multiply(float *to, uint32_t to_stride, const float *from, uint32_t from_stride, uint32_t rows,
                     const matrix_t *matrix) {
    const uint32_t in = matrix->in;
    for (uint32_t column = 0; column < matrix->out; column += PANEL) {
        const float *panel = matrix->data + (uint64_t)column * in;
        uint32_t row = 0;
        for (; row + TILE <= rows; row += TILE) {
            const float *x0 = from + (uint64_t)row * from_stride;
            const float *x1 = x0 + from_stride, *x2 = x1 + from_stride, *x3 = x2 + from_stride;
            vec_t a0 = {0}, a1 = {0}, b0 = {0}, b1 = {0}, c0 = {0}, c1 = {0}, d0 = {0}, d1 = {0};
            for (uint32_t k = 0; k < in; k++) {
                vec_t w0 = load(panel + k * PANEL), w1 = load(panel + k * PANEL + LANES);
                a0 += w0 * x0[k];
                a1 += w1 * x0[k];
                b0 += w0 * x1[k];
                b1 += w1 * x1[k];
                c0 += w0 * x2[k];
                c1 += w1 * x2[k];
                d0 += w0 * x3[k];
                d1 += w1 * x3[k];
            }
            float *y = to + (uint64_t)row * to_stride + column;
            store(y, a0);
            store(y + LANES, a1);
            store(y += to_stride, b0);
            store(y + LANES, b1);
            store(y += to_stride, c0);
            store(y + LANES, c1);
            store(y += to_stride, d0);
            store(y + LANES, d1);
        }
        for (; row < rows; row++) {
            const float *x = from + (uint64_t)row * from_stride;
            vec_t a0 = {0}, a1 = {0};
            for (uint32_t k = 0; k < in; k++) {
                a0 += load(panel + k * PANEL) * x[k];
                a1 += load(panel + k * PANEL + LANES) * x[k];
            }
            store(to + (uint64_t)row * to_stride + column, a0);
            store(to + (uint64_t)row * to_stride + column + LANES, a1);
        }
    }
}

static void normalize(float to[MODEL_DIM], const float from[MODEL_DIM]) {
    vec_t squares = {0};
    for (uint32_t i = 0; i < MODEL_DIM; i += LANES) {
        vec_t x = load(from + i);
        squares += x * x;
    }
    float mean = ((squares[0] + squares[1]) + (squares[2] + squares[3])) / MODEL_DIM;
    float scale = 1.0f / sqrtf(mean + 1e-6f);
    for (uint32_t i = 0; i < MODEL_DIM; i++) {
        to[i] = from[i] * scale;
    }
}

static void normalize_rows(workspace_t *workspace, uint32_t rows) {
    for (uint32_t row = 0; row < rows; row++) {
        normalize(workspace->norm[row], workspace->x[row]);
    }
}

/* x += from * matrix, through the buffer b. */
static void add_product(workspace_t *workspace, const float *from, uint32_t from_stride, uint32_t rows,
                        const matrix_t *matrix) {
    multiply(workspace->b[0], MODEL_HIDDEN, from, from_stride, rows, matrix);
    for (uint32_t row = 0; row < rows; row++) {
        for (uint32_t i = 0; i < MODEL_DIM; i++) {
            workspace->x[row][i] += workspace->b[row][i];
        }
    }
}

/* ---- attention ---- */

static void rotate(const model_t *model, float *head, uint32_t position) {
    for (uint32_t i = 0; i < HALF; i++) {
        float c = model->cosine[position][i], s = model->sine[position][i];
        float re = head[i], im = head[i + HALF];
        head[i] = re * c - im * s;
        head[i + HALF] = re * s + im * c;
    }
}

static float *page_of(float *region, int32_t page) {
    return region + (uint64_t)page * MODEL_PAGE_FLOATS;
}

/* One query head of one row over the first num_tokens tokens; the keys lie in workspace->keys. */
static void attend(workspace_t *workspace, const sequence_t *sequence, float *values, uint32_t kv_head,
                   const float *query, uint32_t num_tokens, float *out) {
    float *scores = workspace->scores;
    uint32_t num_pages = (num_tokens + MODEL_PAGE_TOKENS - 1) / MODEL_PAGE_TOKENS;
    for (uint32_t page = 0; page < num_pages; page++) {
        vec_t s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
        for (uint32_t i = 0; i < MODEL_HEAD_DIM; i++) {
            const float *key = workspace->keys[page][i];
            s0 += load(key) * query[i];
            s1 += load(key + LANES) * query[i];
            s2 += load(key + 2 * LANES) * query[i];
            s3 += load(key + 3 * LANES) * query[i];
        }
        float *to = scores + page * MODEL_PAGE_TOKENS;
        store(to, s0);
        store(to + LANES, s1);
        store(to + 2 * LANES, s2);
        store(to + 3 * LANES, s3);
    }
    /* the last page may hold more than num_tokens: those scores are not looked at */
    float top = scores[0];
    for (uint32_t token = 1; token < num_tokens; token++) {
        top = scores[token] > top ? scores[token] : top;
    }
    float sum = 0.0f;
    vec_t mix[MODEL_HEAD_DIM / LANES] = {{0}};
    for (uint32_t token = 0; token < num_tokens; token++) {
        float weight = expf(scores[token] - top);
        sum += weight;
        const float *value = page_of(values, sequence->pages[token / MODEL_PAGE_TOKENS]) +
                             token % MODEL_PAGE_TOKENS * MODEL_KV_DIM + kv_head * MODEL_HEAD_DIM;
        for (uint32_t i = 0; i < MODEL_HEAD_DIM / LANES; i++) {
            mix[i] += load(value + i * LANES) * weight;
        }
    }
    for (uint32_t i = 0; i < MODEL_HEAD_DIM / LANES; i++) {
        store(out + i * LANES, mix[i] / sum);
    }
}

static void transpose_keys(workspace_t *workspace, const sequence_t *sequence, float *keys, uint32_t kv_head,
                           uint32_t num_pages) {
    for (uint32_t page = 0; page < num_pages; page++) {
        const float *from = page_of(keys, sequence->pages[page]) + kv_head * MODEL_HEAD_DIM;
        for (uint32_t token = 0; token < MODEL_PAGE_TOKENS; token++) {
            for (uint32_t i = 0; i < MODEL_HEAD_DIM; i++) {
                workspace->keys[page][i][token] = from[token * MODEL_KV_DIM + i];
            }
        }
    }
}

/* Attention of one segment, whose rows begin at `first`: queries in a, keys in b, values in c; the result in mix. */
static void attend_segment(const model_t *model, const cache_t *cache, workspace_t *workspace, uint32_t layer,
                           const segment_t *segment, uint32_t first) {
    const sequence_t *sequence = segment->sequence;
    const float scale = 1.0f / sqrtf((float)MODEL_HEAD_DIM);
    for (uint32_t i = 0; i < segment->num_tokens; i++) {
        uint32_t position = sequence->num_tokens + i, row = first + i;
        uint32_t in_page = position % MODEL_PAGE_TOKENS * MODEL_KV_DIM;
        int32_t page = sequence->pages[position / MODEL_PAGE_TOKENS];
        for (uint32_t head = 0; head < MODEL_HEADS; head++) {
            rotate(model, workspace->a[row] + head * MODEL_HEAD_DIM, position);
        }
        for (uint32_t j = 0; j < MODEL_DIM; j++) {
            workspace->a[row][j] *= scale;
        }
        for (uint32_t head = 0; head < MODEL_KV_HEADS; head++) {
            rotate(model, workspace->b[row] + head * MODEL_HEAD_DIM, position);
        }
        memcpy(page_of(cache->k[layer], page) + in_page, workspace->b[row], MODEL_KV_DIM * sizeof(float));
        memcpy(page_of(cache->v[layer], page) + in_page, workspace->c[row], MODEL_KV_DIM * sizeof(float));
    }
    uint32_t end = sequence->num_tokens + segment->num_tokens;
    uint32_t num_pages = (end + MODEL_PAGE_TOKENS - 1) / MODEL_PAGE_TOKENS;
    for (uint32_t kv_head = 0; kv_head < MODEL_KV_HEADS; kv_head++) {
        transpose_keys(workspace, sequence, cache->k[layer], kv_head, num_pages);
        for (uint32_t i = 0; i < segment->num_tokens; i++) {
            for (uint32_t head = kv_head * GROUP; head < (kv_head + 1) * GROUP; head++) {
                uint32_t at = head * MODEL_HEAD_DIM;
                attend(workspace, sequence, cache->v[layer], kv_head, workspace->a[first + i] + at,
                       sequence->num_tokens + i + 1, workspace->mix[first + i] + at);
            }
        }
    }
}

static void attention(const model_t *model, const cache_t *cache, workspace_t *workspace, const layer_t *layer,
                      uint32_t index, const segment_t *segments, uint32_t num_segments, uint32_t rows) {
    multiply(workspace->a[0], MODEL_HIDDEN, workspace->norm[0], MODEL_DIM, rows, &layer->query);
    multiply(workspace->b[0], MODEL_HIDDEN, workspace->norm[0], MODEL_DIM, rows, &layer->key);
    multiply(workspace->c[0], MODEL_DIM, workspace->norm[0], MODEL_DIM, rows, &layer->value);
    uint32_t first = 0;
    for (uint32_t i = 0; i < num_segments; i++) {
        attend_segment(model, cache, workspace, index, &segments[i], first);
        first += segments[i].num_tokens;
    }
    add_product(workspace, workspace->mix[0], MODEL_DIM, rows, &layer->output);
}

/* ---- the recurrent layer ---- */

/* The convolution of one row, from a to c; the window moves on by one. */
static void convolve(const layer_t *layer, float *window, const float *in, float *out) {
    for (uint32_t i = 0; i < MODEL_DIM; i++) {
        float sum = in[i] * layer->taps[MODEL_CONV_TAPS - 1][i];
        for (uint32_t tap = 0; tap < MODEL_CONV_TAPS - 1; tap++) {
            sum += window[tap * MODEL_DIM + i] * layer->taps[tap][i];
        }
        out[i] = sum;
    }
    memmove(window, window + MODEL_DIM, (MODEL_WINDOW_FLOATS - MODEL_DIM) * sizeof(float));
    memcpy(window + MODEL_WINDOW_FLOATS - MODEL_DIM, in, MODEL_DIM * sizeof(float));
}

static void recurrence(const cache_t *cache, workspace_t *workspace, const layer_t *layer, const segment_t *segments,
                       uint32_t num_segments, uint32_t rows) {
    multiply(workspace->a[0], MODEL_HIDDEN, workspace->norm[0], MODEL_DIM, rows, &layer->input);
    uint32_t row = 0;
    for (uint32_t i = 0; i < num_segments; i++) {
        float *window = cache->window + (uint64_t)segments[i].sequence->slot * MODEL_WINDOW_FLOATS;
        for (uint32_t j = 0; j < segments[i].num_tokens; j++, row++) {
            convolve(layer, window, workspace->a[row], workspace->c[row]);
        }
    }
    multiply(workspace->a[0], MODEL_HIDDEN, workspace->c[0], MODEL_DIM, rows, &layer->forget);
    multiply(workspace->b[0], MODEL_HIDDEN, workspace->c[0], MODEL_DIM, rows, &layer->admit);
    multiply(workspace->mix[0], MODEL_DIM, workspace->norm[0], MODEL_DIM, rows, &layer->gate);
    row = 0;
    for (uint32_t i = 0; i < num_segments; i++) {
        float *hidden = cache->recurrence + (uint64_t)segments[i].sequence->slot * MODEL_RECURRENCE_FLOATS;
        for (uint32_t j = 0; j < segments[i].num_tokens; j++, row++) {
            for (uint32_t k = 0; k < MODEL_DIM; k++) {
                float keep = expf(-layer->decay[k] * sigmoid(workspace->a[row][k]));
                float in = sigmoid(workspace->b[row][k]) * workspace->c[row][k];
                hidden[k] = keep * hidden[k] + sqrtf(1.0f - keep * keep) * in;
                float gate = workspace->mix[row][k];
                workspace->mix[row][k] = hidden[k] * gate * sigmoid(gate);
            }
        }
    }
    add_product(workspace, workspace->mix[0], MODEL_DIM, rows, &layer->output);
}

/* ---- the whole ---- */

static void feed_forward(workspace_t *workspace, const layer_t *layer, uint32_t rows) {
    normalize_rows(workspace, rows);
    multiply(workspace->a[0], MODEL_HIDDEN, workspace->norm[0], MODEL_DIM, rows, &layer->up_gate);
    multiply(workspace->b[0], MODEL_HIDDEN, workspace->norm[0], MODEL_DIM, rows, &layer->up);
    for (uint32_t row = 0; row < rows; row++) {
        for (uint32_t i = 0; i < MODEL_HIDDEN; i++) {
            float gate = workspace->a[row][i];
            workspace->a[row][i] = gate * sigmoid(gate) * workspace->b[row][i];
        }
    }
    add_product(workspace, workspace->a[0], MODEL_HIDDEN, rows, &layer->down);
}

/* The number of rows, or 0 when something is out of range. */
static uint32_t check(const cache_t *cache, const segment_t *segments, uint32_t num_segments) {
    uint32_t rows = 0;
    for (uint32_t i = 0; i < num_segments; i++) {
        const segment_t *segment = &segments[i];
        const sequence_t *sequence = segment->sequence;
        if (segment->num_tokens == 0 || segment->num_tokens > MODEL_MAX_ROWS - rows ||
            sequence->num_tokens > MODEL_MAX_TOKENS - segment->num_tokens || sequence->slot < 0 ||
            (uint32_t)sequence->slot >= cache->num_slots) {
            return 0;
        }
        uint32_t end = sequence->num_tokens + segment->num_tokens;
        uint32_t num_pages = (end + MODEL_PAGE_TOKENS - 1) / MODEL_PAGE_TOKENS;
        if (num_pages > sequence->num_pages) {
            return 0;
        }
        for (uint32_t page = 0; page < num_pages; page++) {
            if (sequence->pages[page] < 0 || (uint32_t)sequence->pages[page] >= cache->num_pages) {
                return 0;
            }
        }
        for (uint32_t token = 0; token < segment->num_tokens; token++) {
            if (segment->tokens[token] < 0 || segment->tokens[token] >= MODEL_VOCAB) {
                return 0;
            }
        }
        rows += segment->num_tokens;
    }
    return rows;
}

int model_forward(const model_t *model, const cache_t *cache, workspace_t *workspace, const segment_t *segments,
                  uint32_t num_segments) {
    uint32_t rows = check(cache, segments, num_segments);
    if (rows == 0) {
        return -1;
    }
    uint32_t row = 0;
    for (uint32_t i = 0; i < num_segments; i++) {
        for (uint32_t token = 0; token < segments[i].num_tokens; token++, row++) {
            memcpy(workspace->x[row], model->embedding[segments[i].tokens[token]], sizeof workspace->x[row]);
        }
    }
    uint32_t attention_index = 0;
    for (uint32_t i = 0; i < MODEL_LAYERS; i++) {
        const layer_t *layer = &model->layers[i];
        normalize_rows(workspace, rows);
        if (i == MODEL_RECURRENT_LAYER) {
            recurrence(cache, workspace, layer, segments, num_segments, rows);
        } else {
            attention(model, cache, workspace, layer, attention_index++, segments, num_segments, rows);
        }
        feed_forward(workspace, layer, rows);
    }
    /* logits, only of the rows that they are wanted of; row by row into the caller's memory */
    row = 0;
    for (uint32_t i = 0; i < num_segments; i++) {
        row += segments[i].num_tokens;
        segments[i].sequence->num_tokens += segments[i].num_tokens;
        if (segments[i].logits != NULL) {
            normalize(workspace->norm[0], workspace->x[row - 1]);
            multiply(segments[i].logits, MODEL_VOCAB, workspace->norm[0], MODEL_DIM, 1, &model->head);
        }
    }
    return 0;
}

int32_t model_argmax(const float *logits) {
    int32_t best = 0;
    for (int32_t token = 1; token < MODEL_VOCAB; token++) {
        best = logits[token] > logits[best] ? token : best;
    }
    return best;
}

uint64_t model_digest(uint64_t digest, const float *logits) {
    for (uint32_t i = 0; i < MODEL_VOCAB; i++) {
        uint32_t bits;
        memcpy(&bits, &logits[i], sizeof bits);
        digest = (digest ^ bits) * 0x100000001b3u;
        digest ^= digest >> 29;
    }
    return digest;
}
