/*
 * wire.h: the demo's control plane: frames over a unix stream socket between decode and prefill.
 *
 * nixlkv needs a control plane of the engine's own for one thing only: to carry the two sides' nixlkv_export blobs,
 * once per pair of engines. An engine also tells prefill over it which prompts to compute. Everything later, grants and
 * completion included, travels inside nixlkv.
 *
 * A frame is a type, a length and that many bytes. Numbers are in the machine's order: both ends are on one machine.
 * Every call takes a time limit, and returns -1 with errno set when it fails.
 */
#ifndef WIRE_H
#define WIRE_H

#include "request.h"

#include <stdint.h>

enum {
    WIRE_BLOB = 1,    /* both ways: nixlkv_export's bytes */
    WIRE_REQUEST = 2, /* decode to prefill: wire_request_t and the prompt's tokens */
    WIRE_END = 3,     /* decode to prefill: no more requests, and decode has all it needs */
    WIRE_REPORT = 4   /* prefill to decode: wire_report_t, once per request that was sent */
};

enum { WIRE_MAX_PAYLOAD = 1 << 20 };

typedef struct wire_request {
    uint64_t room;
    uint32_t num_tokens;
    uint32_t reserved; /* zero */
    int32_t tokens[REQUEST_MAX_PROMPT];
} wire_request_t;

/* Bytes of a request of that many tokens. */
uint64_t wire_request_len(uint32_t num_tokens);

typedef struct wire_report {
    uint64_t room;
    int32_t error; /* NIXL_OK, or why the room failed */
    uint32_t num_chunks;
    uint64_t num_descriptors;
    uint64_t first_ns;
    uint64_t last_ns;
} wire_report_t;

/* A listening socket at the path, which must not exist. */
int wire_listen(const char *path);

/* One connection. */
int wire_accept(int listener, int timeout_ms);

/* Tries until somebody listens at the path. */
int wire_connect(const char *path, int timeout_ms);

int wire_send(int fd, uint32_t type, const void *payload, uint64_t len, int timeout_ms);

/*
 * Receives a frame of at most `capacity` bytes. errno is EAGAIN when no frame began within the time limit, EPIPE when
 * the other end has closed, and EMSGSIZE when the frame is too long.
 */
int wire_recv(int fd, uint32_t *type, void *payload, uint64_t capacity, uint64_t *len, int timeout_ms);

/* Receives a frame of exactly this type, of any length up to the capacity; errno is EPROTO for another type. */
int wire_expect(int fd, uint32_t type, void *payload, uint64_t capacity, uint64_t *len, int timeout_ms);

#endif
