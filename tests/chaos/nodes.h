/* The controller's workers: their processes, and the messages to them. */
#ifndef CHAOS_NODES_H
#define CHAOS_NODES_H

#include "control.h"

/* ---- messages ---- */

static void flush_queue(node_t *n) {
    while (n->queue_num > 0) {
        queued_t *q = &n->queue[n->queue_first];
        const ssize_t sent = send(n->fd, q->bytes, q->len, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0) return; /* full, or the worker is gone: that shows elsewhere */
        free(q->bytes);
        n->queue_first = (n->queue_first + 1) % MAX_QUEUED;
        n->queue_num--;
    }
}

static void post_msg(node_t *n, const msg_t *msg, const void *blob) {
    if (!n->alive || n->quitting) return;
    CHECK(n->queue_num < MAX_QUEUED);
    queued_t *q = &n->queue[(n->queue_first + n->queue_num++) % MAX_QUEUED];
    q->len = sizeof *msg + msg->blob_len;
    q->bytes = malloc(q->len);
    CHECK(q->bytes != NULL);
    memcpy(q->bytes, msg, sizeof *msg);
    if (msg->blob_len > 0) memcpy(q->bytes + sizeof *msg, blob, msg->blob_len);
    flush_queue(n);
}

/* Hands one worker's blob to another. */
static void introduce_to(node_t *n, const node_t *other) {
    if (!n->ready || !other->ready || n->role == other->role) return;
    post_msg(n, &(msg_t){.what = CONNECT, .worker = other->index, .life = other->life, .blob_len = other->blob.len},
             other->blob.bytes);
}

static void relink(uint32_t a, uint32_t b) {
    introduce_to(&c.nodes[a], &c.nodes[b]);
    introduce_to(&c.nodes[b], &c.nodes[a]);
}

/* ---- workers ---- */

static worker_config_t config_of(const node_t *n) {
    const uint64_t seed = mix(c.seed ^ mix(c.phase * 64 + n->index) ^ n->life);
    /* Over tcp alone large writes stay in flight for a while; elsewhere they are copied inside the post. */
    const char *tls = mix(seed) % 2 == 0 ? "tcp,self" : NULL;
    return (worker_config_t){.index = n->index,
                             .role = n->role,
                             .shape = c.shape,
                             .life = n->life,
                             .name = n->name,
                             .tls = tls,
                             .num_workers = 1 + (uint32_t)(mix(seed + 1) % 3),
                             .seed = seed,
                             .ring = n->ring};
}

static void node_start(node_t *n) {
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    const int size = 1 << 20;
    for (int i = 0; i < 2; i++) CHECK(setsockopt(pair[i], SOL_SOCKET, SO_SNDBUF, &size, sizeof size) == 0);
    n->life++;
    fflush(stdout);
    const pid_t parent = getpid(), pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(1);
        close(pair[0]);
        for (uint32_t i = 0; i < c.num_nodes; i++)
            if (i != n->index && c.nodes[i].alive) close(c.nodes[i].fd);
        const worker_config_t config = config_of(n);
        exit(worker_main(&config, pair[1]));
    }
    close(pair[1]);
    n->pid = pid;
    n->fd = pair[0];
    n->alive = true;
    n->ready = n->stopped = n->quitting = n->returned = false;
    n->queue_first = n->queue_num = 0;
    n->kill_at = n->continue_at = n->restart_at = UINT64_MAX;
    n->last_said = n->disturbed = now_ms();
    n->num_states = 0;
    n->open = 0;
    trace("%s: life %u starts, pid %d", n->name, n->life, pid);
}

static void slot_check(slot_t *s);

/* The process has gone, as ordered or not. */
static void node_gone(node_t *n) {
    n->alive = n->ready = n->stopped = false;
    n->disturbed = now_ms();
    close(n->fd);
    for (uint32_t i = 0; i < n->queue_num; i++) free(n->queue[(n->queue_first + i) % MAX_QUEUED].bytes);
    n->queue_num = 0;
    n->open = 0;
    for (uint32_t i = 0; i < NUM_SLOTS; i++) {
        slot_t *s = &c.slots[i];
        for (uint32_t j = 0; s->used && j < s->num_sides; j++)
            if (s->sides[j].worker == n->index && s->sides[j].stage <= HAS_ENDED) {
                if (s->sides[j].stage == ASKED) s->sides[j].state = NIXLKV_ROOM_BOOTSTRAPPING;
                s->sides[j].stage = HAS_DIED;
                s->sides[j].since = now_ms();
            }
        if (s->used) slot_check(s);
    }
    c.bytes += n->condition.stats.bytes_sent;
    c.stale += n->condition.stats.messages_stale;
    c.duplicate += n->condition.stats.messages_duplicate;
    c.unknown_room += n->condition.stats.messages_unknown_room;
    c.unknown_peer += n->condition.stats.messages_unknown_peer;
    n->condition = (condition_t){0};
}

static bool read_all(node_t *n);

static void node_kill(node_t *n, const char *why) {
    if (!n->alive) return;
    read_all(n);
    trace("%s: killed, %s", n->name, why);
    CHECK(kill(n->pid, SIGKILL) == 0);
    CHECK(waitpid(n->pid, NULL, 0) == n->pid);
    read_all(n); /* what it said before */
    node_gone(n);
}

static void node_stop(node_t *n) {
    int status = 0;
    if (!n->alive || n->stopped) return;
    CHECK(kill(n->pid, SIGSTOP) == 0);
    const pid_t waited = waitpid(n->pid, &status, WUNTRACED);
    CHECK(waited == n->pid);
    if (!WIFSTOPPED(status)) {
        breach("%s ended by itself with wait status %#x", n->name, (unsigned)status);
        node_gone(n);
        n->restart_at = now_ms();
        return;
    }
    n->stopped = true;
    n->disturbed = now_ms();
}

static void node_continue(node_t *n) {
    n->continue_at = UINT64_MAX;
    if (!n->alive || !n->stopped) return;
    CHECK(kill(n->pid, SIGCONT) == 0);
    n->stopped = n->returned = false;
    n->last_said = n->disturbed = now_ms();
    trace("%s: continued", n->name);
}

#endif
