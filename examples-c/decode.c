/*
 * decode: gets prompts' KV from prefill, and continues them, many in one batch.
 *
 *   decode --socket PATH --requests N --out FILE   connects to prefill's socket; writes the results to the file
 */
#define _POSIX_C_SOURCE 200809L

#include "endpoint.h"
#include "model.h"
#include "request.h"
#include "watcher.h"
#include "wire.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    NUM_PAGES = 1536,
    NUM_SLOTS = REQUEST_MAX,
    MAX_TOKENS = REQUEST_MAX_PROMPT + REQUEST_NEW_TOKENS,
    MAX_REQUEST_PAGES = (MAX_TOKENS + MODEL_PAGE_TOKENS - 1) / MODEL_PAGE_TOKENS,
    POOL_SEED = 23,
    FIRST_ROOM = 7000,
    WIRE_TIMEOUT_MS = 60000,
    STALL_TIMEOUT_MS = 30000 /* nothing at all has happened for so long: give up */
};

typedef enum phase {
    PHASE_WAITING,  /* for pages */
    PHASE_OPEN,     /* the room is open: the prompt's KV comes */
    PHASE_DECODING,
    PHASE_ENDED,    /* succeeded or failed; the room is not released yet */
    PHASE_DONE
} phase_t;

typedef struct request {
    phase_t phase;
    uint64_t room;
    int reported; /* by prefill */
    uint32_t num_new;
    int32_t aux;
    int32_t pages[MAX_REQUEST_PAGES]; /* for the prompt and the new tokens */
    sequence_t sequence;
    result_t *result;
} request_t;

typedef struct client {
    int fd;
    endpoint_t endpoint;
    watcher_t *watcher;
    model_t *model;
    workspace_t *workspace;
    uint32_t num_requests;
    uint32_t num_open;   /* requests whose room has been opened, so far */
    uint64_t num_events; /* counts whatever happens */
    int prefill_is_gone;
    request_t requests[REQUEST_MAX];
    result_t results[REQUEST_MAX];
    float logits[REQUEST_MAX][MODEL_VOCAB];
} client_t;

/* ---- a request begins ---- */

/* Asks prefill to compute the prompt. */
static int send_request(const client_t *client, const request_t *request) {
    wire_request_t message = {.room = request->room, .num_tokens = request->result->num_prompt};
    request_prompt(request->result->index, message.tokens);
    if (wire_send(client->fd, WIRE_REQUEST, &message, wire_request_len(message.num_tokens), WIRE_TIMEOUT_MS) != 0) {
        perror("decode: sending a request");
        return -1;
    }
    return 0;
}

/* Opens the room: tells the library where the prompt's pages, its state and its aux slot go. */
static int open_room(client_t *client, request_t *request) {
    nixlkv_recv_params_t params;
    nixlkv_state_indices_t state;
    if (nixlkv_recv_params_init(&params, sizeof params) != NIXL_OK ||
        nixlkv_state_indices_init(&state, sizeof state) != NIXL_OK) {
        return endpoint_error(&client->endpoint, "initialising a room's parameters");
    }
    state.group = STATE_GROUP;
    state.indices = &request->sequence.slot;
    state.num_indices = 1;
    params.room = request->room;
    params.senders = &client->endpoint.peer;
    params.num_senders = 1;
    params.pages = request->pages; /* of these the prompt's; the new tokens' follow them */
    params.num_pages = request->result->num_pages;
    params.aux_index = &request->aux;
    params.states = &state;
    params.num_states = 1;
    request->result->opened_ns = now_ns();
    if (nixlkv_recv(client->endpoint.engine, &params) != NIXL_OK) {
        return endpoint_error(&client->endpoint, "nixlkv_recv");
    }
    if (watcher_add(client->watcher, request->room) != 0) {
        fprintf(stderr, "decode: too many rooms\n");
        return -1;
    }
    request->phase = PHASE_OPEN;
    return send_request(client, request);
}

/* Takes what the request needs from the pools. -1: not all of it is free. */
static int take_memory(endpoint_t *endpoint, request_t *request) {
    if (pool_take(&endpoint->aux, 1, &request->aux) != 0) {
        return -1;
    }
    if (pool_take(&endpoint->states, 1, &request->sequence.slot) != 0) {
        pool_give(&endpoint->aux, 1, &request->aux);
        return -1;
    }
    if (pool_take(&endpoint->pages, request->sequence.num_pages, request->pages) != 0) {
        pool_give(&endpoint->states, 1, &request->sequence.slot);
        pool_give(&endpoint->aux, 1, &request->aux);
        return -1;
    }
    return 0;
}

static void give_memory(endpoint_t *endpoint, const request_t *request) {
    pool_give(&endpoint->pages, request->sequence.num_pages, request->pages);
    pool_give(&endpoint->states, 1, &request->sequence.slot);
    pool_give(&endpoint->aux, 1, &request->aux);
}

/* Opens as many rooms as there is memory for. */
static int open_rooms(client_t *client) {
    while (client->num_open < client->num_requests) {
        request_t *request = &client->requests[client->num_open];
        if (take_memory(&client->endpoint, request) != 0) {
            break;
        }
        if (open_room(client, request) != 0) {
            return -1;
        }
        client->num_open++;
    }
    return 0;
}

/* ---- a request ends ---- */

/*
 * Releases the rooms of ended requests, and gives their memory back: not before the room is quiesced, when nothing can
 * write to it any more. A room that succeeded is; one that failed may take a while.
 */
static int release_rooms(client_t *client) {
    for (uint32_t i = 0; i < client->num_open; i++) {
        request_t *request = &client->requests[i];
        if (request->phase != PHASE_ENDED) {
            continue;
        }
        int32_t status = nixlkv_release(client->endpoint.engine, request->room);
        if (status == NIXL_ERR_NOT_QUIESCED) {
            continue;
        }
        if (status != NIXL_OK) {
            return endpoint_error(&client->endpoint, "nixlkv_release");
        }
        give_memory(&client->endpoint, request);
        request->phase = PHASE_DONE;
        client->num_events++;
    }
    return 0;
}

/* Whether what came in the aux slot belongs to the request and agrees with itself. */
static int aux_is_good(const client_t *client, const request_t *request) {
    const first_token_t *first = &client->endpoint.first_tokens[request->aux];
    const float *logits = client->endpoint.logits[request->aux];
    return first->room == request->room && first->num_prompt == request->result->num_prompt &&
           first->token == model_argmax(logits);
}

/* Adds a token, and the logits that it was chosen by. */
static void add_token(request_t *request, int32_t token, const float *logits) {
    request->result->tokens[request->num_new++] = token;
    request->result->digest = model_digest(request->result->digest, logits);
}

/* The room has ended: all has landed, and decoding begins, or it has failed. */
static int start_decoding(client_t *client, const ended_room_t *ended) {
    request_t *request = &client->requests[ended->room - FIRST_ROOM];
    result_t *result = request->result;
    client->num_events++;
    result->error = ended->error;
    result->landed_ns = ended->at_ns;
    result->num_chunks = (uint32_t)ended->num_chunks;
    result->num_bytes = ended->num_bytes;
    if (ended->error != NIXL_OK) {
        fprintf(stderr, "decode: room %llu failed: %s: %s\n", (unsigned long long)ended->room,
                nixlkv_status_name(ended->error), ended->text);
        request->phase = PHASE_ENDED;
        return 0;
    }
    if (!aux_is_good(client, request)) {
        fprintf(stderr, "decode: room %llu: the aux slot does not fit the request\n", (unsigned long long)ended->room);
        return -1;
    }
    request->sequence.num_tokens = result->num_prompt;
    request->phase = PHASE_DECODING;
    add_token(request, client->endpoint.first_tokens[request->aux].token, client->endpoint.logits[request->aux]);
    return 0;
}

/* ---- decoding ---- */

/* One more token for every request that is decoding. Their number, or -1. */
static int decode_step(client_t *client) {
    segment_t segments[REQUEST_MAX];
    request_t *batch[REQUEST_MAX];
    int num = 0;
    for (uint32_t i = 0; i < client->num_requests; i++) {
        request_t *request = &client->requests[i];
        if (request->phase == PHASE_DECODING) {
            segments[num] = (segment_t){
                .sequence = &request->sequence,
                .tokens = &request->result->tokens[request->num_new - 1],
                .num_tokens = 1,
                .logits = client->logits[num],
            };
            batch[num++] = request;
        }
    }
    if (num == 0) {
        return 0;
    }
    if (model_forward(client->model, &client->endpoint.cache, client->workspace, segments, (uint32_t)num) != 0) {
        fprintf(stderr, "decode: the model refused a step\n");
        return -1;
    }
    for (int i = 0; i < num; i++) {
        add_token(batch[i], model_argmax(client->logits[i]), client->logits[i]);
        if (batch[i]->num_new == REQUEST_NEW_TOKENS) {
            batch[i]->phase = PHASE_ENDED;
        }
    }
    client->num_events++;
    return num;
}

/* ---- the loop ---- */

/* Takes the reports that have come from prefill. When prefill is gone, what has landed is decoded all the same. */
static int receive_reports(client_t *client) {
    wire_report_t report;
    uint64_t len;
    while (!client->prefill_is_gone && wire_expect(client->fd, WIRE_REPORT, &report, sizeof report, &len, 0) == 0) {
        uint64_t index = report.room - FIRST_ROOM;
        if (len != sizeof report || index >= client->num_open || client->requests[index].reported) {
            fprintf(stderr, "decode: a malformed report\n");
            return -1;
        }
        result_t *result = client->requests[index].result;
        result->num_descriptors = report.num_descriptors;
        result->first_ns = report.first_ns;
        result->last_ns = report.last_ns;
        client->requests[index].reported = 1;
        client->num_events++;
    }
    if (!client->prefill_is_gone && errno != EAGAIN) {
        perror("decode: receiving a report");
        client->prefill_is_gone = 1;
    }
    return 0;
}

static int all_done(const client_t *client) {
    for (uint32_t i = 0; i < client->num_requests; i++) {
        const request_t *request = &client->requests[i];
        if (request->phase != PHASE_DONE || !(request->reported || client->prefill_is_gone)) {
            return 0;
        }
    }
    return 1;
}

static int step(client_t *client) {
    enum { IDLE_MS = 20 };
    if (open_rooms(client) != 0 || receive_reports(client) != 0) {
        return -1;
    }
    int num_decoding = decode_step(client);
    if (num_decoding < 0 || release_rooms(client) != 0) {
        return -1;
    }
    ended_room_t ended;
    int next = watcher_next(client->watcher, &ended, num_decoding > 0 ? 0 : IDLE_MS);
    while (next > 0) {
        if (start_decoding(client, &ended) != 0) {
            return -1;
        }
        next = watcher_next(client->watcher, &ended, 0);
    }
    return next;
}

static void prepare_requests(client_t *client) {
    for (uint32_t i = 0; i < client->num_requests; i++) {
        request_t *request = &client->requests[i];
        request->result = &client->results[i];
        request->result->index = i;
        request->result->num_prompt = request_num_prompt(i);
        request->result->num_pages = request_num_pages(request->result->num_prompt);
        request->room = FIRST_ROOM + i;
        request->sequence.pages = request->pages;
        request->sequence.num_pages = request_num_pages(request->result->num_prompt + REQUEST_NEW_TOKENS);
    }
}

/* All requests, from the first to the report of the last. */
static int run(client_t *client) {
    uint64_t num_events = 0, stalled_at = now_ns() + STALL_TIMEOUT_MS * 1000000ull;
    while (!all_done(client)) {
        if (step(client) != 0) {
            return -1;
        }
        if (client->num_events != num_events) {
            num_events = client->num_events;
            stalled_at = now_ns() + STALL_TIMEOUT_MS * 1000000ull;
        } else if (now_ns() >= stalled_at) {
            fprintf(stderr, "decode: nothing has happened for %d s\n", STALL_TIMEOUT_MS / 1000);
            return -1;
        }
    }
    if (client->prefill_is_gone) {
        return -1;
    }
    if (wire_send(client->fd, WIRE_END, NULL, 0, WIRE_TIMEOUT_MS) != 0) {
        perror("decode: ending");
        return -1;
    }
    for (uint32_t i = 0; i < client->num_requests; i++) {
        if (client->results[i].error != NIXL_OK) {
            return -1;
        }
    }
    return 0;
}

static int start(client_t *client, const char *path) {
    client->model = model_create(REQUEST_MODEL_SEED);
    client->workspace = workspace_create();
    if (client->model == NULL || client->workspace == NULL) {
        fprintf(stderr, "decode: out of memory\n");
        return -1;
    }
    if (endpoint_create(&client->endpoint, NIXLKV_ROLE_DECODE, NUM_PAGES, NUM_SLOTS, POOL_SEED) != 0) {
        return -1;
    }
    client->fd = wire_connect(path, WIRE_TIMEOUT_MS);
    if (client->fd < 0) {
        perror("decode: connecting to prefill");
        return -1;
    }
    if (endpoint_handshake(&client->endpoint, client->fd, WIRE_TIMEOUT_MS) != 0) {
        return -1;
    }
    client->watcher = watcher_start(client->endpoint.engine, REQUEST_MAX);
    return client->watcher == NULL ? -1 : 0;
}

int main(int argc, char **argv) {
    uint32_t num_requests;
    if (argc != 7 || strcmp(argv[1], "--socket") != 0 || strcmp(argv[3], "--requests") != 0 ||
        parse_number(argv[4], 1, REQUEST_MAX, &num_requests) != 0 || strcmp(argv[5], "--out") != 0) {
        fprintf(stderr, "usage: decode --socket PATH --requests N --out FILE\n");
        return 2;
    }
    client_t *client = calloc(1, sizeof *client);
    if (client == NULL) {
        fprintf(stderr, "decode: out of memory\n");
        return EXIT_FAILURE;
    }
    client->fd = -1;
    client->num_requests = num_requests;
    prepare_requests(client);
    int status = start(client, argv[2]) != 0 || run(client) != 0 ? -1 : 0;
    /* the results of the requests that succeeded are worth having when others have failed */
    if (results_write(argv[6], client->results, num_requests) != 0) {
        perror(argv[6]);
        status = -1;
    }
    watcher_stop(client->watcher);
    endpoint_destroy(&client->endpoint); /* fails the rooms that are left, and tells prefill so */
    if (client->fd >= 0) {
        close(client->fd);
    }
    workspace_destroy(client->workspace);
    model_destroy(client->model);
    free(client);
    return status == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
