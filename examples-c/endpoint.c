/*
 * endpoint.c: see endpoint.h.
 */
#define _POSIX_C_SOURCE 200809L

#include "endpoint.h"

#include "wire.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NUM_REGIONS = 2 * MODEL_ATTENTION_LAYERS + 4, ALIGNMENT = 4096, SHUTDOWN_TIMEOUT_MS = 10000 };

static const char *name_of(const endpoint_t *endpoint) {
    return endpoint->role == NIXLKV_ROLE_PREFILL ? "prefill" : "decode";
}

int endpoint_error(const endpoint_t *endpoint, const char *what) {
    fprintf(stderr, "%s: %s: %s\n", name_of(endpoint), what, nixlkv_last_error());
    return -1;
}

/* What the system, and not nixlkv, has refused. */
static int system_error(const endpoint_t *endpoint, const char *what) {
    fprintf(stderr, "%s: %s: %s\n", name_of(endpoint), what, strerror(errno));
    return -1;
}

/* The library prints nothing itself; what it has to say goes to stderr here. */
static void log_line(void *user_data, uint32_t level, const char *message) {
    (void)level;
    fprintf(stderr, "%s: nixlkv: %s\n", (const char *)user_data, message);
}

static void *allocate_slots(uint32_t num_slots, uint64_t slot_bytes) {
    uint64_t num_bytes = (num_slots * slot_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    void *memory = aligned_alloc(ALIGNMENT, num_bytes);
    if (memory != NULL) {
        memset(memory, 0xff, num_bytes);
    }
    return memory;
}

/* Regions to register in one go. */
typedef struct batch {
    nixlkv_region_t regions[NUM_REGIONS];
    uint32_t num;
    int32_t status; /* of the first call that has failed */
} batch_t;

/* Adds `num_items` pages or slots; the two sides pair regions by kind, id and part, not by their order. */
static void add_region(batch_t *batch, uint32_t kind, uint32_t id, uint32_t part, void *address, uint64_t num_items,
                       uint64_t item_len) {
    nixlkv_region_t *region = &batch->regions[batch->num];
    int32_t status = nixlkv_region_init(region, sizeof *region);
    if (status != NIXL_OK) {
        batch->status = batch->status != NIXL_OK ? batch->status : status;
        return;
    }
    region->kind = kind;
    region->layer_id = id;
    region->part = part;
    region->group = kind == NIXLKV_REGION_STATE ? STATE_GROUP : 0;
    region->address = address;
    region->len = num_items * item_len;
    region->item_len = item_len;
    batch->num++;
}

static int register_memory(endpoint_t *endpoint, uint32_t num_slots) {
    const cache_t *cache = &endpoint->cache;
    const uint64_t page_len = MODEL_PAGE_FLOATS * sizeof(float);
    batch_t batch = {.status = NIXL_OK};
    for (uint32_t layer = 0, i = 0; layer < MODEL_LAYERS; layer++) {
        if (layer != MODEL_RECURRENT_LAYER) {
            add_region(&batch, NIXLKV_REGION_KV, layer, NIXLKV_PART_K, cache->k[i], cache->num_pages, page_len);
            add_region(&batch, NIXLKV_REGION_KV, layer, NIXLKV_PART_V, cache->v[i], cache->num_pages, page_len);
            i++;
        }
    }
    /* the ids say which tensor of the state group, and which aux array */
    add_region(&batch, NIXLKV_REGION_STATE, 0, 0, cache->window, num_slots, MODEL_WINDOW_FLOATS * sizeof(float));
    add_region(&batch, NIXLKV_REGION_STATE, 1, 0, cache->recurrence, num_slots,
               MODEL_RECURRENCE_FLOATS * sizeof(float));
    add_region(&batch, NIXLKV_REGION_AUX, 0, 0, endpoint->first_tokens, num_slots, sizeof *endpoint->first_tokens);
    add_region(&batch, NIXLKV_REGION_AUX, 1, 0, endpoint->logits, num_slots, sizeof *endpoint->logits);
    if (batch.status != NIXL_OK) {
        return endpoint_error(endpoint, "nixlkv_region_init");
    }
    if (nixlkv_register(endpoint->engine, batch.regions, batch.num, NULL) != NIXL_OK) {
        return endpoint_error(endpoint, "nixlkv_register");
    }
    return 0;
}

static int create_engine(endpoint_t *endpoint) {
    nixlkv_engine_config_t config;
    if (nixlkv_engine_config_init(&config, sizeof config) != NIXL_OK) {
        return endpoint_error(endpoint, "nixlkv_engine_config_init");
    }
    config.role = endpoint->role;
    config.cache_dtype = "f32";
    config.log_level = NIXLKV_LOG_ERROR;
    config.log_callback = log_line;
    config.log_user_data = (void *)name_of(endpoint); /* only read */
    if (nixlkv_engine_create(&config, &endpoint->engine) != NIXL_OK) {
        return endpoint_error(endpoint, "nixlkv_engine_create");
    }
    return 0;
}

int endpoint_create(endpoint_t *endpoint, uint32_t role, uint32_t num_pages, uint32_t num_slots, uint64_t seed) {
    *endpoint = (endpoint_t){.role = role};
    endpoint->first_tokens = allocate_slots(num_slots, sizeof *endpoint->first_tokens);
    endpoint->logits = allocate_slots(num_slots, sizeof *endpoint->logits);
    if (endpoint->first_tokens == NULL || endpoint->logits == NULL ||
        cache_create(&endpoint->cache, num_pages, num_slots) != 0 ||
        pool_create(&endpoint->pages, num_pages, model_random(&seed)) != 0 ||
        pool_create(&endpoint->states, num_slots, model_random(&seed)) != 0 ||
        pool_create(&endpoint->aux, num_slots, model_random(&seed)) != 0) {
        return system_error(endpoint, "allocating memory");
    }
    if (create_engine(endpoint) != 0) {
        return -1;
    }
    return register_memory(endpoint, num_slots);
}

/* Sends this engine's blob, whose length is asked for first. */
static int send_blob(endpoint_t *endpoint, int fd, int timeout_ms) {
    uint64_t len = 0;
    int32_t status = nixlkv_export(endpoint->engine, NULL, 0, &len);
    if (status != NIXL_ERR_BUFFER_TOO_SMALL) {
        return endpoint_error(endpoint, "nixlkv_export");
    }
    void *blob = malloc(len);
    if (blob == NULL) {
        return system_error(endpoint, "allocating memory");
    }
    int result = 0;
    if (nixlkv_export(endpoint->engine, blob, len, &len) != NIXL_OK) {
        result = endpoint_error(endpoint, "nixlkv_export");
    } else if (wire_send(fd, WIRE_BLOB, blob, len, timeout_ms) != 0) {
        result = system_error(endpoint, "sending the blob");
    }
    free(blob);
    return result;
}

/* Receives the other side's blob, and connects the engine by it. */
static int recv_blob(endpoint_t *endpoint, int fd, int timeout_ms) {
    uint64_t len;
    void *blob = malloc(WIRE_MAX_PAYLOAD);
    if (blob == NULL) {
        return system_error(endpoint, "allocating memory");
    }
    int result = 0;
    if (wire_expect(fd, WIRE_BLOB, blob, WIRE_MAX_PAYLOAD, &len, timeout_ms) != 0) {
        result = system_error(endpoint, "receiving the blob");
    } else if (nixlkv_connect(endpoint->engine, blob, len, &endpoint->peer) != NIXL_OK) {
        result = endpoint_error(endpoint, "nixlkv_connect");
    }
    free(blob);
    return result;
}

int endpoint_handshake(endpoint_t *endpoint, int fd, int timeout_ms) {
    /* one side speaks first, so that blobs of any size pass */
    if (endpoint->role == NIXLKV_ROLE_DECODE) {
        return send_blob(endpoint, fd, timeout_ms) != 0 ? -1 : recv_blob(endpoint, fd, timeout_ms);
    }
    return recv_blob(endpoint, fd, timeout_ms) != 0 ? -1 : send_blob(endpoint, fd, timeout_ms);
}

void endpoint_destroy(endpoint_t *endpoint) {
    int drained = 1;
    if (endpoint->engine != NULL) {
        if (nixlkv_engine_shutdown(endpoint->engine, SHUTDOWN_TIMEOUT_MS) != NIXL_OK) {
            drained = endpoint_error(endpoint, "nixlkv_engine_shutdown") == 0;
        }
        nixlkv_engine_destroy(endpoint->engine);
    }
    if (drained) {
        cache_destroy(&endpoint->cache);
        free(endpoint->first_tokens);
        free(endpoint->logits);
    }
    pool_destroy(&endpoint->pages);
    pool_destroy(&endpoint->states);
    pool_destroy(&endpoint->aux);
    *endpoint = (endpoint_t){0};
}
