/* What the controller knows, and how it says what it finds. */
#ifndef CHAOS_CONTROL_H
#define CHAOS_CONTROL_H

#include "worker.h"

#include <fcntl.h>
#include <ftw.h>
#include <sys/stat.h>

enum {
    NUM_IDS = 400,    /* of rooms */
    NUM_SLOTS = 1024, /* attempts that the controller follows at a time */
    NUM_RECENT = 4,
    HISTORY = 1 << 15, /* attempts whose bytes it can name */
    MOST_AT_ONCE = 40, /* attempts that have not ended */
    MOST_AT_WORKER = 24,
    MOST_PER_SECOND = 260,
    END_BOUND_MS = 20000, /* the sum of the engines' limits is 8 s; the rest is for a busy machine */
    QUIESCE_BOUND_MS = 15000,
    REUSE_AFTER_MS = 5000, /* for an id, where a sender may hold the grant of a receiver that died */
    RETURN_BOUND_MS = 30000, /* others may be down meanwhile */
    SILENCE_BOUND_MS = 20000,
    START_BOUND_MS = 60000,
    MOST_REPORTED = 30,
    MAX_QUEUED = 4096,
    NUM_CODES = 600,
};

static const char *const POINTS[] = {"lose_message", "repeat_message", "delay_message", "drop_message", "post"};
enum { NUM_POINTS = 5 };

typedef enum stage { ASKED, HAS_ENDED, IS_FREED, IS_REFUSED, HAS_DIED } stage_t;

typedef struct side {
    uint32_t worker, life;
    bool sends;
    stage_t stage;
    uint32_t state;
    int32_t code;
    uint64_t since;
    char text[MAX_TEXT];
    bool told; /* a breach */
} side_t;

typedef struct slot {
    bool used, big;
    uint64_t opened;
    uint32_t id;
    plan_t plan;
    side_t sides[MAX_WORKERS];
    uint32_t num_sides;
    bool counted;
} slot_t;

typedef struct queued {
    char *bytes;
    size_t len;
} queued_t;

typedef struct node {
    uint32_t index, role, life;
    char name[32];
    pid_t pid;
    int fd;
    bool alive, ready, stopped, survivor, quitting;
    bool returned; /* a room with it has succeeded since it started or went on */
    blob_t blob;
    queued_t queue[MAX_QUEUED];
    uint32_t queue_first, queue_num;
    uint64_t disturbed, last_said, condition_at, kill_at, continue_at, restart_at;
    uint32_t open; /* rooms that have not ended here */
    condition_t condition, baseline;
    uint64_t num_states;
    ring_t *ring;
} node_t;

static struct {
    uint64_t seed, seconds, started, deadline;
    char dir[64];
    ring_t *ring; /* of the controller itself */
    uint32_t phase;
    bool healing;
    shape_t shape;
    uint32_t num_nodes;
    node_t nodes[MAX_WORKERS];
    slot_t slots[NUM_SLOTS];
    slot_t *latest[NUM_IDS];
    uint64_t next_serial;
    uint32_t id_of[HISTORY]; /* of the last attempts, by serial */
    struct {
        uint32_t id;
        plan_t plan;
    } recent[NUM_RECENT]; /* those that ended last */
    uint64_t num_ended;
    rng_t rooms, faults;
    uint64_t last_freed;
    uint64_t relink_at[MAX_WORKERS][MAX_WORKERS];
    uint64_t violations;
    /* what has happened */
    uint64_t tried, succeeded, big_succeeded, failed, by_code[NUM_CODES], refused_by_code[NUM_CODES];
    uint64_t kills, kills_mid, restarts, stops, long_stops, disconnects, aborts, reused, early, armed[NUM_POINTS];
    uint64_t bytes, stale, duplicate, unknown_room, unknown_peer;
    uint64_t slowest_end, slowest_quiesce, slowest_return;
} c;

static void trace(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void trace(const char *format, ...) {
    char line[1024];
    const int n = snprintf(line, sizeof line, "%" PRIu64 " ", now_ms());
    va_list args;
    va_start(args, format);
    vsnprintf(line + n, sizeof line - (size_t)n, format, args);
    va_end(args);
    ring_line(c.ring, line);
}

/* Writes a ring out in the order of time. */
static void ring_write(const ring_t *ring, const char *dir, const char *name) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *file = fopen(path, "w");
    if (file == NULL) return;
    const uint64_t from = ring->written > RING_LEN ? ring->written - RING_LEN : 0;
    for (uint64_t i = from; i < ring->written; i++) fputc(ring->text[i % RING_LEN], file);
    fclose(file);
}

/* Keeps everybody's last lines as they are now. */
static void keep_logs(void) {
    char dir[128];
    snprintf(dir, sizeof dir, "%s/violation%" PRIu64, c.dir, c.violations);
    if (mkdir(dir, 0777) != 0) return;
    ring_write(c.ring, dir, "controller.log");
    for (uint32_t i = 0; i < c.num_nodes; i++) {
        char name[64];
        snprintf(name, sizeof name, "%s.log", c.nodes[i].name);
        ring_write(c.nodes[i].ring, dir, name);
    }
}

static void breach(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void breach(const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    trace("VIOLATION %s", text);
    if (++c.violations <= MOST_REPORTED)
        printf("violation (seed %" PRIu64 ", phase %u, at %" PRIu64 " ms): %s\n", c.seed, c.phase, now_ms() - c.started,
               text);
    fflush(stdout);
    if (c.violations <= 5) keep_logs();
}

static uint64_t room_of(uint32_t id) { return mix(id ^ mix(c.seed)); }

/* Whose bytes are they? */
static void tell_origin(uint64_t seen, uint64_t where, char *text, size_t len) {
    const uint64_t first = c.next_serial > HISTORY ? c.next_serial - HISTORY + 1 : 1;
    for (uint64_t serial = c.next_serial; serial >= first; serial--) {
        const plan_t plan = {.serial = serial, .room = room_of(c.id_of[serial % HISTORY])};
        for (uint64_t position = 0; position < (where < 1000 ? NUM_PAGES : MAX_STATE); position++)
            if (stamp(key_of(&plan), where, position, 0) == seen) {
                snprintf(text, len, "; these are the bytes of room %#" PRIx64 ", attempt %" PRIu64
                         ", position %" PRIu64, plan.room, serial, position);
                return;
            }
    }
}

static ring_t *ring_map(const char *name) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s.ring", c.dir, name);
    const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    CHECK(fd >= 0 && ftruncate(fd, sizeof(ring_t)) == 0);
    ring_t *ring = mmap(NULL, sizeof(ring_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(ring != MAP_FAILED);
    close(fd);
    return ring;
}

#endif
