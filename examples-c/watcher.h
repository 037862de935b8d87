/*
 * watcher.h: a thread that waits for rooms to end, so that decoding need not poll between its steps.
 */
#ifndef WATCHER_H
#define WATCHER_H

#include <nixlkv.h>
#include <stdint.h>

/* How a room ended. */
typedef struct ended_room {
    uint64_t room;
    int32_t error; /* NIXL_OK: success */
    uint64_t num_chunks;
    uint64_t num_pages;
    uint64_t num_bytes;
    uint64_t at_ns; /* when it was seen */
    char text[256]; /* what exactly failed */
} ended_room_t;

typedef struct watcher watcher_t;

/* Starts the thread, for at most max_rooms rooms. NULL, after a message on stderr, when it cannot. */
watcher_t *watcher_start(nixlkv_engine_t *engine, uint32_t max_rooms);

/* Stops the thread. The engine must still be there. NULL is fine. */
void watcher_stop(watcher_t *watcher);

/* Watches a room that is open. The room may be released once watcher_next has given it. -1: too many. */
int watcher_add(watcher_t *watcher, uint64_t room);

/*
 * Takes the next room that has ended, waiting for it at most timeout_ms. 1, or 0: none has; -1: watching has failed, a
 * message is on stderr.
 */
int watcher_next(watcher_t *watcher, ended_room_t *ended, uint32_t timeout_ms);

#endif
