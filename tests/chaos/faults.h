/* The faults, and the time at which they come. */
#ifndef CHAOS_FAULTS_H
#define CHAOS_FAULTS_H

#include "rooms.h"

/* ---- faults ---- */

typedef enum fault {
    FAULT_ARM,
    FAULT_KILL,
    FAULT_KILL_MID,
    FAULT_STOP,
    FAULT_STOP_MID,
    FAULT_STOP_LONG,
    FAULT_STOP_KILL,
    FAULT_DISCONNECT,
    NUM_FAULTS,
} fault_t;

static const unsigned FAULT_WEIGHT[NUM_FAULTS] = {66, 4, 5, 8, 4, 4, 2, 5};

/* The first faults of a phase show each kind once, one after the other. */
enum { NUM_FIRST = NUM_POINTS + NUM_FAULTS - 1 };

/* What comes next. Draws the same numbers whatever the workers do, so that a seed has one schedule. */
static void next_fault(uint64_t number) {
    rng_t *rng = &c.faults;
    uint64_t draw = below(rng, 98);
    fault_t fault = FAULT_ARM;
    while (draw >= FAULT_WEIGHT[fault]) draw -= FAULT_WEIGHT[fault++];
    const uint64_t victim_draw = next_random(rng), a = next_random(rng), b = next_random(rng), d = next_random(rng);
    uint64_t point = a % NUM_POINTS;
    if (number < NUM_POINTS) {
        fault = FAULT_ARM;
        point = number;
    } else if (number < NUM_FIRST) fault = (fault_t)(FAULT_ARM + 1 + number - NUM_POINTS);
    node_t *n = &c.nodes[victim_draw % c.num_nodes];
    const bool kills = fault == FAULT_KILL || fault == FAULT_KILL_MID || fault == FAULT_STOP_KILL;
    if (kills)
        while (n->survivor) n = &c.nodes[(n->index + 1) % c.num_nodes];
    const uint64_t now = now_ms();
    trace("fault %" PRIu64 ": %d at %s%s", number, fault, n->name, n->ready ? "" : ", which is not up");
    if (!n->ready || n->stopped || n->kill_at != UINT64_MAX) return;
    switch (fault) {
    case FAULT_ARM: {
        static const uint64_t most_times[NUM_POINTS] = {8, 300, 150, 8, 2};
        msg_t msg = {.what = ARM, .skip = b % 60, .times = 1 + d % most_times[point]};
        snprintf(msg.text, sizeof msg.text, "%s", POINTS[point]);
        post_msg(n, &msg, NULL);
        c.armed[point] += msg.times;
        break;
    }
    case FAULT_KILL_MID:
        big_room(n);
        n->kill_at = now + 3 + a % 80;
        n->restart_at = n->kill_at + (b % 3 == 0 ? 0 : d % 600);
        c.kills_mid++;
        break;
    case FAULT_KILL:
        n->kill_at = now;
        n->restart_at = now + (b % 3 == 0 ? 0 : b % 3 == 1 ? d % 100 : d % 1500);
        break;
    case FAULT_STOP_MID:
        big_room(n);
        n->continue_at = now + 50 + a % 700;
        break;
    case FAULT_STOP: n->continue_at = now + 20 + a % 700; break;
    case FAULT_STOP_LONG: n->continue_at = now + LIVENESS_MS + 200 + a % 1500; break;
    case FAULT_STOP_KILL:
        n->kill_at = now + 100 + a % (2 * LIVENESS_MS);
        n->restart_at = n->kill_at + d % 300;
        break;
    case FAULT_DISCONNECT: {
        const uint32_t half = c.num_nodes / 2, first = n->index < half ? half : 0;
        post_msg(n, &(msg_t){.what = DISCONNECT, .worker = first + (uint32_t)(a % half)}, NULL);
        break;
    }
    case NUM_FAULTS: break;
    }
    if (fault == FAULT_STOP || fault == FAULT_STOP_MID || fault == FAULT_STOP_LONG || fault == FAULT_STOP_KILL) {
        if (fault == FAULT_STOP_MID) sleep_ms((unsigned)(b % 40));
        node_stop(n);
        c.stops++;
        c.long_stops += fault == FAULT_STOP_LONG;
    }
}

/* What is due. */
static void run_clock(void) {
    const uint64_t now = now_ms();
    for (uint32_t i = 0; i < c.num_nodes; i++) {
        node_t *n = &c.nodes[i];
        if (n->kill_at <= now) {
            const uint64_t restart_at = n->restart_at;
            n->kill_at = UINT64_MAX;
            if (n->alive) c.kills++;
            node_kill(n, n->stopped ? "stopped" : "as planned");
            n->restart_at = restart_at;
        }
        if (n->continue_at <= now) node_continue(n);
        if (!n->alive && n->restart_at <= now) {
            c.restarts++;
            node_start(n);
        }
        for (uint32_t j = 0; j < c.num_nodes; j++)
            if (c.relink_at[i][j] <= now) {
                c.relink_at[i][j] = UINT64_MAX;
                relink(i, j);
            }
    }
}

/* Listens for a millisecond. */
static void listen_a_little(void) {
    struct pollfd fds[MAX_WORKERS];
    for (uint32_t i = 0; i < c.num_nodes; i++) {
        node_t *n = &c.nodes[i];
        if (n->alive) flush_queue(n);
        fds[i] = (struct pollfd){n->alive ? n->fd : -1, POLLIN, 0};
    }
    poll(fds, c.num_nodes, 1);
    for (uint32_t i = 0; i < c.num_nodes; i++) {
        node_t *n = &c.nodes[i];
        if (!n->alive || (fds[i].revents & (POLLIN | POLLHUP)) == 0 || read_all(n)) continue;
        int status = 0;
        CHECK(waitpid(n->pid, &status, 0) == n->pid);
        if (!n->quitting || !WIFEXITED(status) || WEXITSTATUS(status) != 0)
            breach("%s ended by itself with wait status %#x", n->name, (unsigned)status);
        const bool quitting = n->quitting;
        node_gone(n);
        if (!quitting) n->restart_at = now_ms();
    }
}

static void progress_line(void) {
    static uint64_t next_at;
    const uint64_t now = now_ms();
    if (next_at == 0) next_at = c.started + 60000;
    if (now < next_at) return;
    next_at += 60000;
    printf("%4" PRIu64 " s: %" PRIu64 " rooms, %" PRIu64 " succeeded, %" PRIu64 " failed; %" PRIu64 " kills, %" PRIu64
           " stops; violations: %" PRIu64 "\n",
           (now - c.started) / 1000, c.tried, c.succeeded, c.failed, c.kills, c.stops, c.violations);
    fflush(stdout);
}

static void turn(void) {
    static uint64_t next_check;
    const uint64_t start = now_ms();
    listen_a_little();
    const uint64_t heard = now_ms();
    run_clock();
    if (now_ms() - start > 200)
        trace("a turn took %" PRIu64 " ms, %" PRIu64 " of them to listen", now_ms() - start, heard - start);
    if (now_ms() >= next_check) {
        next_check = now_ms() + 200;
        check_bounds();
    }
    progress_line();
}

#endif
