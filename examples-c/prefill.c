/*
 * prefill: computes prompts in chunks, and sends each chunk's KV while it computes the next.
 *
 *   prefill --socket PATH   serves the one decode process that connects to the socket, until that is done
 */
#define _POSIX_C_SOURCE 200809L

#include "endpoint.h"
#include "model.h"
#include "request.h"
#include "wire.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    MAX_ACTIVE = 4,  /* prompts that are computed in turn, a chunk of each */
    NUM_PAGES = 400, /* far fewer than all prompts together take: pages are used again */
    NUM_SLOTS = 2 * MAX_ACTIVE,
    MAX_PROMPT_PAGES = (REQUEST_MAX_PROMPT + MODEL_PAGE_TOKENS - 1) / MODEL_PAGE_TOKENS,
    POOL_SEED = 11,
    ACCEPT_TIMEOUT_MS = 60000,
    WIRE_TIMEOUT_MS = 30000,
    QUEUE_TIMEOUT_MS = 30000, /* how long to retry a chunk while the library's queue is full */
    STALL_TIMEOUT_MS = 30000  /* nothing at all has happened for so long: give up */
};

typedef enum phase {
    PHASE_WAITING,   /* for pages */
    PHASE_COMPUTING, /* some chunks may have been sent */
    PHASE_SENT,      /* the last chunk is accepted, or the room has failed */
    PHASE_DONE       /* reported; everything is given back */
} phase_t;

typedef struct job {
    phase_t phase;
    uint64_t room;
    uint32_t num_prompt;
    uint32_t num_pages;
    uint32_t num_chunks;
    int32_t aux;
    int32_t tokens[REQUEST_MAX_PROMPT];
    int32_t pages[MAX_PROMPT_PAGES];
    sequence_t sequence;
    uint64_t first_ns;
    uint64_t last_ns;
} job_t;

typedef struct server {
    int listener;
    int fd;
    endpoint_t endpoint;
    model_t *model;
    workspace_t *workspace;
    job_t jobs[REQUEST_MAX];
    uint32_t num_jobs;
    uint32_t num_started; /* jobs that have left PHASE_WAITING; they do so in their order */
    uint32_t current;     /* the job whose chunk was computed last */
    uint32_t num_failed;
    uint64_t num_events; /* counts whatever happens */
    int ended;           /* decode has all it needs */
} server_t;

/* ---- requests come in ---- */

static int accept_request(server_t *server, const wire_request_t *request, uint64_t len) {
    if (server->num_jobs == REQUEST_MAX || len < wire_request_len(0) || request->num_tokens == 0 ||
        request->num_tokens > REQUEST_MAX_PROMPT || len != wire_request_len(request->num_tokens)) {
        fprintf(stderr, "prefill: a malformed request\n");
        return -1;
    }
    job_t *job = &server->jobs[server->num_jobs];
    *job = (job_t){.room = request->room, .num_prompt = request->num_tokens};
    for (uint32_t i = 0; i < request->num_tokens; i++) {
        if (request->tokens[i] < 0 || request->tokens[i] >= MODEL_VOCAB) {
            fprintf(stderr, "prefill: a token out of range in room %llu\n", (unsigned long long)job->room);
            return -1;
        }
        job->tokens[i] = request->tokens[i];
    }
    job->num_pages = request_num_pages(job->num_prompt);
    server->num_jobs++;
    server->num_events++;
    return 0;
}

static int all_done(const server_t *server) {
    for (uint32_t i = 0; i < server->num_jobs; i++) {
        if (server->jobs[i].phase != PHASE_DONE) {
            return 0;
        }
    }
    return 1;
}

/* Takes all frames that have come; waits for the first one at most timeout_ms. */
static int receive(server_t *server, int timeout_ms) {
    wire_request_t request;
    uint32_t type;
    uint64_t len;
    while (!server->ended) {
        if (wire_recv(server->fd, &type, &request, sizeof request, &len, timeout_ms) != 0) {
            if (errno == EAGAIN) {
                return 0;
            }
            perror("prefill: receiving a request");
            return -1;
        }
        timeout_ms = 0;
        if (type == WIRE_REQUEST) {
            if (accept_request(server, &request, len) != 0) {
                return -1;
            }
        } else if (type == WIRE_END && all_done(server)) {
            server->ended = 1;
        } else {
            fprintf(stderr, "prefill: an unexpected frame\n");
            return -1;
        }
    }
    return 0;
}

/* ---- one chunk ---- */

/* Takes what the prompt needs, or leaves it waiting for others to give theirs back. */
static void start_job(server_t *server, job_t *job) {
    endpoint_t *endpoint = &server->endpoint;
    if (pool_take(&endpoint->aux, 1, &job->aux) != 0) {
        return;
    }
    if (pool_take(&endpoint->states, 1, &job->sequence.slot) != 0) {
        pool_give(&endpoint->aux, 1, &job->aux);
        return;
    }
    if (pool_take(&endpoint->pages, job->num_pages, job->pages) != 0) {
        pool_give(&endpoint->aux, 1, &job->aux);
        pool_give(&endpoint->states, 1, &job->sequence.slot);
        return;
    }
    job->sequence.pages = job->pages;
    job->sequence.num_pages = job->num_pages;
    sequence_start(&endpoint->cache, &job->sequence);
    job->phase = PHASE_COMPUTING;
}

/* Hands over the pages of the tokens from `begin` on. The library only queues them: the call does not wait. */
static int send_chunk(server_t *server, job_t *job, uint32_t begin) {
    nixlkv_chunk_t chunk;
    nixlkv_state_indices_t state;
    if (nixlkv_chunk_init(&chunk, sizeof chunk) != NIXL_OK ||
        nixlkv_state_indices_init(&state, sizeof state) != NIXL_OK) {
        return endpoint_error(&server->endpoint, "initialising a chunk");
    }
    uint32_t first_page = begin / MODEL_PAGE_TOKENS; /* chunks are whole pages, but for the last page of all */
    chunk.room = job->room;
    chunk.pages = job->pages + first_page;
    chunk.num_pages = request_num_pages(job->sequence.num_tokens) - first_page;
    chunk.page_offset = first_page;
    if (job->sequence.num_tokens == job->num_prompt) { /* state and aux go with the last */
        state.group = STATE_GROUP;
        state.indices = &job->sequence.slot;
        state.num_indices = 1;
        chunk.states = &state;
        chunk.num_states = 1;
        chunk.aux_index = &job->aux;
        chunk.flags = NIXLKV_CHUNK_LAST;
    }
    uint64_t handed_over = now_ns(), deadline = handed_over + QUEUE_TIMEOUT_MS * 1000000ull;
    int32_t status = nixlkv_send_chunk(server->endpoint.engine, &chunk);
    while (status == NIXL_ERR_QUEUE_FULL && handed_over < deadline) { /* refused whole: try the same again */
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        handed_over = now_ns();
        status = nixlkv_send_chunk(server->endpoint.engine, &chunk);
    }
    if (status == NIXL_ERR_ROOM_ENDED) { /* it failed meanwhile, here or on the other side: poll tells why */
        job->phase = PHASE_SENT;
        return 0;
    }
    if (status != NIXL_OK) {
        return endpoint_error(&server->endpoint, "nixlkv_send_chunk");
    }
    server->num_events++;
    job->last_ns = handed_over;
    job->first_ns = job->num_chunks == 0 ? handed_over : job->first_ns;
    job->num_chunks++;
    if ((chunk.flags & NIXLKV_CHUNK_LAST) != 0) {
        job->phase = PHASE_SENT;
    }
    return 0;
}

static int compute_chunk(server_t *server, job_t *job) {
    uint32_t begin = job->sequence.num_tokens, left = job->num_prompt - begin;
    int last = left <= REQUEST_CHUNK_TOKENS;
    float *logits = server->endpoint.logits[job->aux];
    segment_t segment = {
        .sequence = &job->sequence,
        .tokens = job->tokens + begin,
        .num_tokens = last ? left : REQUEST_CHUNK_TOKENS,
        .logits = last ? logits : NULL,
    };
    if (model_forward(server->model, &server->endpoint.cache, server->workspace, &segment, 1) != 0) {
        fprintf(stderr, "prefill: the model refused a chunk of room %llu\n", (unsigned long long)job->room);
        return -1;
    }
    if (last) {
        server->endpoint.first_tokens[job->aux] = (first_token_t){
            .room = job->room, .token = model_argmax(logits), .num_prompt = job->num_prompt};
    }
    return send_chunk(server, job, begin);
}

/* ---- rooms end ---- */

/* Reports a room that has ended, and gives back what it held: not before it is quiesced, when nothing reads it. */
static int finish_job(server_t *server, job_t *job, const nixlkv_room_status_t *status) {
    endpoint_t *endpoint = &server->endpoint;
    if (status->state == NIXLKV_ROOM_FAILED) {
        fprintf(stderr, "prefill: room %llu failed: %s: %s\n", (unsigned long long)job->room,
                nixlkv_status_name(status->error), status->error_text);
        server->num_failed++;
    }
    wire_report_t report = {
        .room = job->room,
        .error = status->error,
        .num_chunks = job->num_chunks,
        .num_descriptors = status->num_descriptors,
        .first_ns = job->first_ns,
        .last_ns = job->last_ns,
    };
    if (nixlkv_release(endpoint->engine, job->room) != NIXL_OK) {
        return endpoint_error(&server->endpoint, "nixlkv_release");
    }
    pool_give(&endpoint->pages, job->num_pages, job->pages);
    pool_give(&endpoint->states, 1, &job->sequence.slot);
    pool_give(&endpoint->aux, 1, &job->aux);
    job->phase = PHASE_DONE;
    server->num_events++;
    if (wire_send(server->fd, WIRE_REPORT, &report, sizeof report, WIRE_TIMEOUT_MS) != 0) {
        perror("prefill: sending a report");
        return -1;
    }
    return 0;
}

/* Looks at the rooms whose last chunk is accepted, and finishes those that nothing reads from any more. */
static int harvest(server_t *server) {
    nixlkv_room_status_t status;
    for (uint32_t i = 0; i < server->num_jobs; i++) {
        job_t *job = &server->jobs[i];
        if (job->phase != PHASE_SENT) {
            continue;
        }
        if (nixlkv_room_status_init(&status, sizeof status) != NIXL_OK ||
            nixlkv_poll(server->endpoint.engine, job->room, &status) != NIXL_OK) {
            return endpoint_error(&server->endpoint, "nixlkv_poll");
        }
        if (status.quiesced && finish_job(server, job, &status) != 0) {
            return -1;
        }
    }
    return 0;
}

/* ---- the loop ---- */

/* Starts what there is room for. */
static void start_jobs(server_t *server) {
    uint32_t num_active = 0;
    for (uint32_t i = 0; i < server->num_started; i++) {
        num_active += server->jobs[i].phase == PHASE_COMPUTING;
    }
    while (num_active < MAX_ACTIVE && server->num_started < server->num_jobs) {
        job_t *job = &server->jobs[server->num_started];
        start_job(server, job);
        if (job->phase == PHASE_WAITING) {
            break;
        }
        server->num_started++;
        num_active++;
    }
}

/* The active job whose turn it is, so that short prompts do not wait for the end of long ones. NULL: none is active. */
static job_t *next_job(server_t *server) {
    for (uint32_t i = 1; i <= server->num_started; i++) {
        uint32_t index = (server->current + i) % server->num_started;
        if (server->jobs[index].phase == PHASE_COMPUTING) {
            server->current = index;
            return &server->jobs[index];
        }
    }
    return NULL;
}

/* Does one piece of work, or waits a little when there is none. */
static int step(server_t *server) {
    enum { IDLE_MS = 5 };
    start_jobs(server);
    job_t *job = next_job(server);
    if (job != NULL && compute_chunk(server, job) != 0) {
        return -1;
    }
    if (harvest(server) != 0) {
        return -1;
    }
    return receive(server, job != NULL ? 0 : IDLE_MS);
}

static int serve(server_t *server, const char *path) {
    uint64_t num_events = 0;
    server->model = model_create(REQUEST_MODEL_SEED);
    server->workspace = workspace_create();
    if (server->model == NULL || server->workspace == NULL) {
        fprintf(stderr, "prefill: out of memory\n");
        return -1;
    }
    if (endpoint_create(&server->endpoint, NIXLKV_ROLE_PREFILL, NUM_PAGES, NUM_SLOTS, POOL_SEED) != 0) {
        return -1;
    }
    server->listener = wire_listen(path);
    if (server->listener >= 0) {
        server->fd = wire_accept(server->listener, ACCEPT_TIMEOUT_MS);
    }
    if (server->fd < 0) {
        perror("prefill: waiting for the decode process");
        return -1;
    }
    if (endpoint_handshake(&server->endpoint, server->fd, WIRE_TIMEOUT_MS) != 0) {
        return -1;
    }
    uint64_t stalled_at = now_ns() + STALL_TIMEOUT_MS * 1000000ull;
    while (!server->ended) {
        if (step(server) != 0) {
            return -1;
        }
        if (server->num_events != num_events) {
            num_events = server->num_events;
            stalled_at = now_ns() + STALL_TIMEOUT_MS * 1000000ull;
        } else if (now_ns() >= stalled_at) {
            fprintf(stderr, "prefill: nothing has happened for %d s\n", STALL_TIMEOUT_MS / 1000);
            return -1;
        }
    }
    return server->num_failed == 0 ? 0 : -1;
}

int main(int argc, char **argv) {
    if (argc != 3 || strcmp(argv[1], "--socket") != 0) {
        fprintf(stderr, "usage: prefill --socket PATH\n");
        return 2;
    }
    server_t *server = calloc(1, sizeof *server);
    if (server == NULL) {
        fprintf(stderr, "prefill: out of memory\n");
        return EXIT_FAILURE;
    }
    server->listener = server->fd = -1;
    int status = serve(server, argv[2]);
    endpoint_destroy(&server->endpoint); /* fails the rooms that are left, and tells decode so */
    if (server->fd >= 0) {
        close(server->fd);
    }
    if (server->listener >= 0) {
        close(server->listener);
    }
    workspace_destroy(server->workspace);
    model_destroy(server->model);
    free(server);
    return status == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
