/* A soak under faults: `chaos SECONDS SEED`.
 *
 * Prefill and decode workers, each a process with one engine, exchange rooms over NIXL. The controller, which owns no
 * engine, plays the router and the world's malice: it kills, stops and restarts workers, arms fault points in them,
 * has rooms aborted and peers disconnected, and uses room ids again. All it does for a restarted worker is what a
 * router does: it hands its blob to the others. The last line is `violations: N`; the exit code is 0 when there are
 * none and enough has happened. The same seed gives the same schedule of faults. */
#include "faults.h"

/* ---- the end of a phase: everything heals ---- */

static bool all_ready(void) {
    for (uint32_t i = 0; i < c.num_nodes; i++)
        if (!c.nodes[i].ready) return false;
    return true;
}

static bool no_rooms(void) {
    for (uint32_t i = 0; i < NUM_SLOTS; i++)
        if (c.slots[i].used) return false;
    return true;
}

/* All memory is free again, on every worker. */
static bool all_free(void) {
    for (uint32_t i = 0; i < c.num_nodes; i++) {
        const condition_t *s = &c.nodes[i].condition;
        if (c.nodes[i].condition_at <= c.last_freed || s->free_pages != NUM_PAGES || s->open_rooms != 0 ||
            s->stats.rooms_unquiesced != 0 || s->health.num_pages_quarantined != 0)
            return false;
    }
    return true;
}

static bool wait_until(bool (*holds)(void), uint64_t timeout_ms) {
    for (const uint64_t start = now_ms(); !holds();) {
        if (now_ms() - start > timeout_ms) return false;
        turn();
    }
    return true;
}

/* A room that must succeed, in so many attempts: the first may find a connection that is just being made. */
static void fresh_room(uint32_t senders, uint32_t receivers, uint32_t num_pages) {
    for (int tries = 0; tries < 10; tries++) {
        plan_t plan = {.senders = senders,
                       .receivers = receivers,
                       .num_pages = num_pages,
                       .num_state = 1,
                       .aux = 1,
                       .abort_by = MAX_WORKERS,
                       .calm = 1};
        while ((senders >> plan.aux_owner & 1u) == 0) plan.aux_owner++;
        const uint64_t before = c.succeeded;
        if (room_open(plan, num_pages > 100) && wait_until(no_rooms, END_BOUND_MS) && c.succeeded > before &&
            wait_until(all_free, 5000))
            return;
        for (const uint64_t start = now_ms(); now_ms() - start < 500;) turn();
    }
    breach("a fresh room of %u pages from workers %#x to %#x does not succeed after everything has healed", num_pages,
           senders, receivers);
}

static void report_growth(const node_t *n) {
    const condition_t *from = &n->baseline, *to = &n->condition;
    const double links = (double)(to->num_links - from->num_links);
    if (!n->survivor || n->num_states < 12 || links < 1) return;
    const double fds = (double)to->num_fds - (double)from->num_fds;
    const double threads = (double)to->num_threads - (double)from->num_threads;
    const double rss = (double)to->rss_kib - (double)from->rss_kib;
    printf("phase %u: %s survived %.0f new connections: fds %" PRIu64 " -> %" PRIu64 " (%+.2f each), threads %" PRIu64
           " -> %" PRIu64 ", RSS %" PRIu64 " -> %" PRIu64 " MiB (%+.0f KiB each)\n",
           c.phase, n->name, links, from->num_fds, to->num_fds, fds / links, from->num_threads, to->num_threads,
           from->rss_kib / 1024, to->rss_kib / 1024, rss / links);
    if (fds > 64 + 16 * links) breach("%s: file descriptors have grown by %.0f", n->name, fds);
    if (threads > 8) breach("%s: threads have grown by %.0f", n->name, threads);
    if (rss > 128 * 1024 + 1024 * links) breach("%s: memory has grown by %.0f KiB", n->name, rss);
}

static void heal(void) {
    for (uint32_t i = 0; i < c.num_nodes; i++) {
        node_t *n = &c.nodes[i];
        if (n->kill_at != UINT64_MAX) n->kill_at = now_ms();
        node_continue(n);
        if (!n->alive || n->kill_at != UINT64_MAX) n->restart_at = now_ms();
    }
    turn();
    trace("everything heals");
    c.healing = true;
    if (!wait_until(all_ready, START_BOUND_MS)) breach("not every worker has come back");
    for (uint32_t i = 0; i < c.num_nodes; i++)
        for (uint32_t p = 0; p < NUM_POINTS; p++) {
            msg_t msg = {.what = ARM};
            snprintf(msg.text, sizeof msg.text, "%s", POINTS[p]);
            post_msg(&c.nodes[i], &msg, NULL);
        }
    const bool drained = wait_until(no_rooms, END_BOUND_MS + QUIESCE_BOUND_MS + 10000);
    const bool freed = wait_until(all_free, 10000);
    for (uint32_t i = 0; i < c.num_nodes && !(drained && freed); i++) {
        const condition_t *s = &c.nodes[i].condition;
        breach("%s after everything has healed: %" PRIu64 " of %d pages are free, %" PRIu64 " rooms are open, %" PRIu64
               " not quiesced, %" PRIu64 " pages quarantined",
               c.nodes[i].name, s->free_pages, NUM_PAGES, s->open_rooms, s->stats.rooms_unquiesced,
               s->health.num_pages_quarantined);
    }
    const uint32_t half = c.num_nodes / 2, all_senders = (1u << half) - 1;
    for (uint32_t d = half; d < c.num_nodes; d++) {
        for (uint32_t p = 0; p < half; p++) relink(p, d);
        if (c.shape == SHAPE_SPLIT) {
            fresh_room(all_senders, 1u << d, 5);
            for (uint32_t p = 0; p < half; p++) fresh_room(1u << p, 1u << d, 0);
        } else {
            for (uint32_t p = 0; p < half; p++) fresh_room(1u << p, 1u << d, 5);
        }
        /* Every page of both sides, so that none has leaked. */
        fresh_room(c.shape == SHAPE_SPLIT ? all_senders : 1u << (d - half), 1u << d, NUM_PAGES);
    }
    for (uint32_t i = 0; i < c.num_nodes; i++) report_growth(&c.nodes[i]);
    for (uint32_t i = 0; i < c.num_nodes; i++) {
        post_msg(&c.nodes[i], &(msg_t){.what = QUIT}, NULL);
        c.nodes[i].quitting = true;
    }
    for (const uint64_t start = now_ms(); now_ms() - start < 30000;) {
        bool alive = false;
        for (uint32_t i = 0; i < c.num_nodes; i++) alive |= c.nodes[i].alive;
        if (!alive) break;
        turn();
    }
    for (uint32_t i = 0; i < c.num_nodes; i++)
        if (c.nodes[i].alive) {
            breach("%s does not exit", c.nodes[i].name);
            node_kill(&c.nodes[i], "does not exit");
        }
}

/* Nobody is stopped, down or about to be killed. */
static bool is_calm(void) {
    for (uint32_t i = 0; i < c.num_nodes; i++)
        if (!c.nodes[i].ready || c.nodes[i].stopped || c.nodes[i].kill_at != UINT64_MAX) return false;
    return true;
}

static void run_phase(uint32_t phase, shape_t shape, uint64_t until) {
    c.phase = phase;
    c.healing = false;
    c.shape = shape;
    c.num_nodes = shape == SHAPE_PAIR ? 2 : 4;
    c.faults = (rng_t){mix(c.seed ^ mix(phase))};
    c.num_ended = 0;
    memset(c.slots, 0, sizeof c.slots);
    memset(c.latest, 0, sizeof c.latest);
    memset(c.relink_at, 0xff, sizeof c.relink_at);
    const uint32_t survivor = (uint32_t)(mix(c.seed ^ phase) % c.num_nodes);
    for (uint32_t i = 0; i < c.num_nodes; i++) {
        node_t *n = &c.nodes[i];
        ring_t *ring = n->ring;
        free(n->blob.bytes);
        memset(n, 0, sizeof *n);
        n->index = i;
        n->role = i < c.num_nodes / 2 ? NIXLKV_ROLE_PREFILL : NIXLKV_ROLE_DECODE;
        n->survivor = i == survivor;
        n->ring = ring;
        snprintf(n->name, sizeof n->name, "%s%u", n->role == NIXLKV_ROLE_PREFILL ? "prefill" : "decode",
                 i % (c.num_nodes / 2));
    }
    for (uint32_t i = 0; i < c.num_nodes; i++) {
        node_t *n = &c.nodes[i];
        char name[64];
        snprintf(name, sizeof name, "worker%u", i);
        if (n->ring == NULL) n->ring = ring_map(name);
        node_start(n);
    }
    if (!wait_until(all_ready, START_BOUND_MS)) breach("the workers do not start");
    uint64_t next_at = now_ms() + 300;
    for (uint64_t number = 0; now_ms() < until;) {
        turn();
        open_rooms();
        if (now_ms() >= next_at && (number >= NUM_FIRST || is_calm())) {
            next_at = now_ms() + between(&c.faults, 50, 400);
            next_fault(number++);
        }
    }
    heal();
}

/* ---- the whole ---- */

static int remove_one(const char *path, const struct stat *info, int flag, struct FTW *where) {
    (void)info, (void)flag, (void)where;
    return remove(path);
}

static void print_codes(const char *what, const uint64_t *counts) {
    for (int32_t i = 0; i < NUM_CODES; i++)
        if (counts[i] != 0)
            printf("  %s %-32s %8" PRIu64 "\n", what, i == 0 ? "(its workers died)" : nixlkv_status_name(-i),
                   counts[i]);
}

static bool enough(const char *what, uint64_t count, uint64_t wanted) {
    if (count >= wanted) return true;
    printf("too little has happened: %" PRIu64 " %s, at least %" PRIu64 " are expected\n", count, what, wanted);
    return false;
}

int main(int argc, char **argv) {
    c.seconds = argc > 1 ? strtoull(argv[1], NULL, 10) : 120;
    c.seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    if (argc > 3 || c.seconds == 0) FAIL("usage: chaos SECONDS SEED");
    alarm((unsigned)(c.seconds + c.seconds / 10 + 300)); /* a hard limit */
    const char *tmp = getenv("TMPDIR");
    snprintf(c.dir, sizeof c.dir, "%s/nixlkv-chaos-XXXXXX", tmp != NULL && strlen(tmp) < 30 ? tmp : "/tmp");
    CHECK(mkdtemp(c.dir) != NULL);
    c.ring = ring_map("controller");
    c.rooms = (rng_t){mix(c.seed)};
    c.started = now_ms();
    printf("chaos: %" PRIu64 " s, seed %" PRIu64 "\n", c.seconds, c.seed);
    fflush(stdout);

    const uint64_t thirds = (c.seconds + 1799) / 1800, num_phases = 3 * thirds;
    for (uint64_t phase = 0; phase < num_phases; phase++) {
        const uint64_t until = c.started + c.seconds * 1000 * (phase + 1) / num_phases;
        run_phase((uint32_t)phase, (shape_t)(phase % 3), until);
    }

    const uint64_t took = now_ms() - c.started;
    printf("rooms: %" PRIu64 " tried, %" PRIu64 " succeeded (%" PRIu64 " of 8 MiB and more), %" PRIu64
           " failed, in %.1f s: %.0f a second\n",
           c.tried, c.succeeded, c.big_succeeded, c.failed, (double)took / 1000, (double)c.tried * 1000 / (double)took);
    print_codes("failed ", c.by_code);
    print_codes("refused", c.refused_by_code);
    printf("faults: %" PRIu64 " kills (%" PRIu64 " with a large room), %" PRIu64 " restarts, %" PRIu64
           " stops (%" PRIu64 " longer than the liveness limit), %" PRIu64 " disconnects, %" PRIu64 " aborts, %" PRIu64
           " ids used again at once, %" PRIu64 " before all had released them\n",
           c.kills, c.kills_mid, c.restarts, c.stops, c.long_stops, c.disconnects, c.aborts, c.reused, c.early);
    printf("armed:");
    for (uint32_t p = 0; p < NUM_POINTS; p++)
        printf(" %s %" PRIu64 "%s", POINTS[p], c.armed[p], p + 1 < NUM_POINTS ? "," : "\n");
    printf("slowest, counted from the last disturbance: %" PRIu64 " ms to the end, %" PRIu64
           " ms from it to quiesced, %" PRIu64 " ms from a worker's return to its first room\n",
           c.slowest_end, c.slowest_quiesce, c.slowest_return);
    printf("bytes sent: %" PRIu64 " MiB; messages dropped: %" PRIu64 " stale, %" PRIu64 " duplicate, %" PRIu64
           " for unknown rooms, %" PRIu64 " of unknown peers\n",
           c.bytes >> 20, c.stale, c.duplicate, c.unknown_room, c.unknown_peer);
    bool ok = enough("rooms succeeded", c.succeeded, c.seconds * 5);
    const uint64_t some = 1 + c.seconds / 60;
    ok &= enough("large rooms succeeded", c.big_succeeded, some);
    ok &= enough("kills", c.kills, some) & enough("restarts", c.restarts, some) & enough("stops", c.stops, some);
    ok &= enough("long stops", c.long_stops, 1) & enough("disconnects", c.disconnects, some);
    ok &= enough("aborts", c.aborts, some) & enough("duplicates dropped", c.duplicate, 1);
    ok &= enough("stale messages dropped", c.stale, 1);
    for (uint32_t p = 0; p < NUM_POINTS; p++) ok &= enough(POINTS[p], c.armed[p], some);
    if (getenv("CHAOS_KEEP") != NULL) keep_logs();
    if (c.violations != 0 || getenv("CHAOS_KEEP") != NULL) printf("logs are kept in %s\n", c.dir);
    else nftw(c.dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    printf("violations: %" PRIu64 "\n", c.violations);
    return ok && c.violations == 0 ? 0 : 1;
}
