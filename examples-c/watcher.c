/*
 * watcher.c: see watcher.h.
 */
#define _POSIX_C_SOURCE 200809L

#include "watcher.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "request.h"

struct watcher {
    nixlkv_engine_t *engine;
    pthread_t thread;
    pthread_mutex_t lock; /* of all below; not held in calls of nixlkv */
    pthread_cond_t changed;
    int stopping;
    int failed;
    uint32_t max_rooms;
    uint32_t num_open;
    uint64_t *open;
    uint32_t num_ended;
    uint32_t num_taken;
    ended_room_t *ended; /* in the order of ending; the first num_taken are taken */
    uint64_t *waiting;   /* the thread's own copy of `open` */
};

/* Whether the room has ended; then *ended tells how. -1 after an error. */
static int look(const watcher_t *watcher, uint64_t room, ended_room_t *ended) {
    nixlkv_room_status_t status;
    if (nixlkv_room_status_init(&status, sizeof status) != NIXL_OK ||
        nixlkv_poll(watcher->engine, room, &status) != NIXL_OK) {
        fprintf(stderr, "watcher: nixlkv_poll: %s\n", nixlkv_last_error());
        return -1;
    }
    if (status.state != NIXLKV_ROOM_SUCCESS && status.state != NIXLKV_ROOM_FAILED) {
        return 0;
    }
    *ended = (ended_room_t){
        .room = room,
        .error = status.error,
        .num_chunks = status.num_chunks,
        .num_pages = status.num_pages,
        .num_bytes = status.num_bytes,
        .at_ns = now_ns(),
    };
    snprintf(ended->text, sizeof ended->text, "%s", status.error_text);
    return 1;
}

/* Moves a room from the open to the ended. */
static void move(watcher_t *watcher, const ended_room_t *ended) {
    pthread_mutex_lock(&watcher->lock);
    for (uint32_t i = 0; i < watcher->num_open; i++) {
        if (watcher->open[i] == ended->room) {
            watcher->open[i] = watcher->open[--watcher->num_open];
            break;
        }
    }
    watcher->ended[watcher->num_ended++] = *ended;
    pthread_cond_broadcast(&watcher->changed);
    pthread_mutex_unlock(&watcher->lock);
}

/* Waits until a room is open, and copies the list. 0 when the watcher stops. */
static uint32_t next_wait(watcher_t *watcher) {
    pthread_mutex_lock(&watcher->lock);
    while (watcher->num_open == 0 && !watcher->stopping) {
        pthread_cond_wait(&watcher->changed, &watcher->lock);
    }
    uint32_t num = watcher->stopping ? 0 : watcher->num_open;
    memcpy(watcher->waiting, watcher->open, num * sizeof *watcher->waiting);
    pthread_mutex_unlock(&watcher->lock);
    return num;
}

static void *watch(void *argument) {
    enum { WAIT_MS = 10 }; /* a room that is added meanwhile is seen after this time */
    watcher_t *watcher = argument;
    int failed = 0;
    for (uint32_t num = next_wait(watcher); num > 0 && !failed; num = next_wait(watcher)) {
        int32_t status = nixlkv_wait(watcher->engine, watcher->waiting, num, NIXLKV_WAIT_ANY, WAIT_MS);
        if (status == NIXL_ERR_WAIT_TIMEOUT) {
            continue;
        }
        if (status != NIXL_OK) {
            fprintf(stderr, "watcher: nixlkv_wait: %s\n", nixlkv_last_error());
            failed = 1;
        }
        for (uint32_t i = 0; i < num && !failed; i++) {
            ended_room_t ended;
            int looked = look(watcher, watcher->waiting[i], &ended);
            failed = looked < 0;
            if (looked > 0) {
                move(watcher, &ended);
            }
        }
    }
    pthread_mutex_lock(&watcher->lock);
    watcher->failed = failed;
    pthread_cond_broadcast(&watcher->changed);
    pthread_mutex_unlock(&watcher->lock);
    return NULL;
}

static void free_watcher(watcher_t *watcher) {
    free(watcher->open);
    free(watcher->ended);
    free(watcher->waiting);
    free(watcher);
}

/* The condition counts time by the monotonic clock. 0, or an error number. */
static int create_locks(watcher_t *watcher) {
    pthread_condattr_t attributes;
    int error = pthread_condattr_init(&attributes);
    if (error != 0) {
        return error;
    }
    error = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    if (error == 0) {
        error = pthread_cond_init(&watcher->changed, &attributes);
    }
    pthread_condattr_destroy(&attributes);
    if (error == 0) {
        error = pthread_mutex_init(&watcher->lock, NULL);
        if (error != 0) {
            pthread_cond_destroy(&watcher->changed);
        }
    }
    return error;
}

watcher_t *watcher_start(nixlkv_engine_t *engine, uint32_t max_rooms) {
    watcher_t *watcher = calloc(1, sizeof *watcher);
    if (watcher == NULL) {
        fprintf(stderr, "watcher: out of memory\n");
        return NULL;
    }
    watcher->engine = engine;
    watcher->max_rooms = max_rooms;
    watcher->open = calloc(max_rooms, sizeof *watcher->open);
    watcher->ended = calloc(max_rooms, sizeof *watcher->ended);
    watcher->waiting = calloc(max_rooms, sizeof *watcher->waiting);
    if (watcher->open == NULL || watcher->ended == NULL || watcher->waiting == NULL) {
        fprintf(stderr, "watcher: out of memory\n");
        free_watcher(watcher);
        return NULL;
    }
    int error = create_locks(watcher);
    if (error == 0) {
        error = pthread_create(&watcher->thread, NULL, watch, watcher);
        if (error != 0) {
            pthread_mutex_destroy(&watcher->lock);
            pthread_cond_destroy(&watcher->changed);
        }
    }
    if (error != 0) {
        fprintf(stderr, "watcher: %s\n", strerror(error));
        free_watcher(watcher);
        return NULL;
    }
    return watcher;
}

void watcher_stop(watcher_t *watcher) {
    if (watcher == NULL) {
        return;
    }
    pthread_mutex_lock(&watcher->lock);
    watcher->stopping = 1;
    pthread_cond_broadcast(&watcher->changed);
    pthread_mutex_unlock(&watcher->lock);
    pthread_join(watcher->thread, NULL);
    pthread_mutex_destroy(&watcher->lock);
    pthread_cond_destroy(&watcher->changed);
    free_watcher(watcher);
}

int watcher_add(watcher_t *watcher, uint64_t room) {
    pthread_mutex_lock(&watcher->lock);
    /* counts those that have ended, too: each has its place in `ended` */
    int fits = watcher->num_open + watcher->num_ended < watcher->max_rooms;
    if (fits) {
        watcher->open[watcher->num_open++] = room;
        pthread_cond_broadcast(&watcher->changed);
    }
    pthread_mutex_unlock(&watcher->lock);
    return fits ? 0 : -1;
}

int watcher_next(watcher_t *watcher, ended_room_t *ended, uint32_t timeout_ms) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += timeout_ms % 1000 * 1000000;
    until.tv_sec += timeout_ms / 1000 + until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&watcher->lock);
    int timed_out = timeout_ms == 0;
    while (watcher->num_taken == watcher->num_ended && !watcher->failed && !timed_out) {
        timed_out = pthread_cond_timedwait(&watcher->changed, &watcher->lock, &until) != 0;
    }
    int result = 0;
    if (watcher->num_taken < watcher->num_ended) {
        *ended = watcher->ended[watcher->num_taken++];
        result = 1;
    } else if (watcher->failed) {
        result = -1;
    }
    pthread_mutex_unlock(&watcher->lock);
    return result;
}
