/* A worker: an engine in a process of its own, its peers, and its loop. */
#ifndef CHAOS_WORKER_H
#define CHAOS_WORKER_H

#include "attempt.h"

/* ---- peers ---- */

static inline void link_step(worker_t *w, uint32_t index) {
    link_t *l = &w->links[index];
    const uint64_t now = now_ms();
    if (l->parting) {
        /* Refused while rooms with it are open: give them up first. */
        for (uint32_t i = 0; i < w->most_used; i++) {
            attempt_t *a = &w->attempts[i];
            const bool concerned = (counterparts(w, &a->plan) >> index & 1u) != 0;
            if (a->used && a->opened && !a->ended && concerned) attempt_abort(w, a);
        }
        const int32_t code = nixlkv_disconnect(w->engine, l->peer);
        if (code == NIXL_ERR_PEER_BUSY) return;
        if (code != NIXL_OK && code != NIXL_ERR_PEER_UNKNOWN) violation(w, NULL, "disconnect: %s", nixlkv_last_error());
        note(w, "worker %u: disconnected, %s", index, nixlkv_status_name(code));
        l->parting = false;
        l->peer = 0;
        say(w, &(msg_t){.what = PARTED, .worker = index, .life = l->life});
    }
    if (l->pending.bytes == NULL || l->retry_at > now) return;
    uint64_t peer = 0;
    const int32_t code = nixlkv_connect(w->engine, l->pending.bytes, l->pending.len, &peer);
    if (code == NIXL_ERR_PEER_BUSY) {
        l->retry_at = now + 5;
        return;
    }
    if (code != NIXL_OK) {
        /* Whether that may be, the controller knows. */
        msg_t msg = {.what = LINKED, .worker = index, .life = l->pending_life, .code = code};
        snprintf(msg.text, sizeof msg.text, "%s", nixlkv_last_error());
        note(w, "worker %u, life %u: %s", index, l->pending_life, msg.text);
        say(w, &msg);
        l->retry_at = now + 200;
        return;
    }
    if (peer != l->peer) {
        note(w, "worker %u, life %u: connected as peer %" PRIu64, index, l->pending_life, peer);
        w->num_links++;
    }
    l->peer = peer;
    l->life = l->pending_life;
    free(l->pending.bytes);
    l->pending.bytes = NULL;
    say(w, &(msg_t){.what = LINKED, .worker = index, .life = l->life});
}

/* ---- the process ---- */

static inline condition_t condition_of(const worker_t *w) {
    condition_t c = {.free_pages = w->pages.num, .num_links = w->num_links};
    for (uint32_t i = 0; i < w->most_used; i++) c.open_rooms += w->attempts[i].used;
    DIR *dir = opendir("/proc/self/fd");
    CHECK(dir != NULL);
    while (readdir(dir) != NULL) c.num_fds++;
    closedir(dir);
    FILE *status = fopen("/proc/self/status", "r");
    CHECK(status != NULL);
    for (char line[256]; fgets(line, sizeof line, status) != NULL;) {
        if (strncmp(line, "VmRSS:", 6) == 0) c.rss_kib = strtoull(line + 6, NULL, 10);
        if (strncmp(line, "Threads:", 8) == 0) c.num_threads = strtoull(line + 8, NULL, 10);
    }
    fclose(status);
    CHECK_OK(nixlkv_stats_init(&c.stats, sizeof c.stats));
    CHECK_OK(nixlkv_stats(w->engine, &c.stats));
    CHECK_OK(nixlkv_health_init(&c.health, sizeof c.health));
    CHECK_OK(nixlkv_health(w->engine, &c.health));
    return c;
}

static inline void worker_open(worker_t *w) {
    nixlkv_engine_config_t config = engine_config(w->config.role);
    const nixlkv_param_t tls = {"UCX_TLS", w->config.tls};
    config.name = w->config.name;
    config.backend_params = &tls;
    config.num_backend_params = w->config.tls != NULL;
    config.num_workers = w->config.num_workers;
    config.heartbeat_interval_ms = HEARTBEAT_MS;
    config.liveness_limit_ms = LIVENESS_MS;
    config.connect_timeout_ms = CONNECT_MS;
    config.grant_timeout_ms = GRANT_MS;
    config.room_timeout_ms = ROOM_MS;
    config.stall_timeout_ms = STALL_MS;
    config.log_level = NIXLKV_LOG_INFO;
    config.log_callback = log_line;
    config.log_user_data = w;
    CHECK_OK(nixlkv_engine_create(&config, &w->engine));

    nixlkv_region_t regions[NUM_LAYERS + 1 + NUM_GROUPS * NUM_TENSORS];
    uint32_t n = 0;
    const bool part = w->config.shape == SHAPE_SPLIT && is_sender(w);
    for (uint32_t i = 0; i < NUM_LAYERS; i++) {
        w->has_layer[i] = !part || i == w->config.index;
        if (!w->has_layer[i]) continue;
        w->kv[i] = map_bytes((size_t)NUM_PAGES * PAGE_LEN);
        poison(w->kv[i], (size_t)NUM_PAGES * PAGE_LEN);
        regions[n] = region(NIXLKV_REGION_KV, w->kv[i], (uint64_t)NUM_PAGES * PAGE_LEN, PAGE_LEN);
        regions[n++].layer_id = i;
    }
    w->aux = map_bytes(NUM_AUX * AUX_LEN);
    poison(w->aux, NUM_AUX * AUX_LEN);
    regions[n++] = region(NIXLKV_REGION_AUX, w->aux, NUM_AUX * AUX_LEN, AUX_LEN);
    for (uint32_t g = 0; g < NUM_GROUPS; g++) {
        w->has_group[g] = !part || g == w->config.index;
        for (uint32_t t = 0; t < NUM_TENSORS && w->has_group[g]; t++) {
            w->state[g][t] = map_bytes(NUM_STATE * TENSOR_LEN[t]);
            poison(w->state[g][t], NUM_STATE * TENSOR_LEN[t]);
            regions[n] = region(NIXLKV_REGION_STATE, w->state[g][t], NUM_STATE * TENSOR_LEN[t], TENSOR_LEN[t]);
            regions[n].group = g;
            regions[n++].layer_id = t;
        }
        w->state_slots[g] = pool_of(NUM_STATE);
    }
    w->pages = pool_of(NUM_PAGES);
    w->aux_slots = pool_of(NUM_AUX);
    CHECK_OK(nixlkv_register(w->engine, regions, n, NULL));
}

/* Reads one message, and the blob behind it; false: there is none. */
static inline bool worker_read(worker_t *w, msg_t *msg, char *blob) {
    struct iovec parts[2] = {{msg, sizeof *msg}, {blob, MAX_BLOB}};
    struct msghdr header = {.msg_iov = parts, .msg_iovlen = 2};
    const ssize_t n = recvmsg(w->fd, &header, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    CHECK(n >= (ssize_t)sizeof *msg && (uint64_t)n == sizeof *msg + msg->blob_len);
    return true;
}

static inline void worker_do(worker_t *w, const msg_t *msg, const char *blob) {
    switch (msg->what) {
    case OPEN: attempt_begin(w, &msg->plan); break;
    case CONNECT: {
        link_t *l = &w->links[msg->worker];
        if (msg->life < l->life || (l->pending.bytes != NULL && msg->life < l->pending_life)) break;
        free(l->pending.bytes);
        l->pending = (blob_t){msg->blob_len, malloc(msg->blob_len)};
        CHECK(l->pending.bytes != NULL);
        memcpy(l->pending.bytes, blob, msg->blob_len);
        l->pending_life = msg->life;
        l->retry_at = 0;
        if (msg->life > l->life) l->parting = false;
        break;
    }
    case DISCONNECT:
        if (w->links[msg->worker].peer != 0) w->links[msg->worker].parting = true;
        else say(w, &(msg_t){.what = PARTED, .worker = msg->worker, .life = w->links[msg->worker].life});
        break;
    case ARM:
        note(w, "armed %s, %" PRIu64 " to pass, %" PRIu64 " times", msg->text, msg->skip, msg->times);
        CHECK_OK(nixlkv_test_fault(msg->text, msg->skip, msg->times));
        break;
    case QUIT: w->quitting = true; break;
    default: FAIL("message %u", msg->what);
    }
}

static inline int worker_main(const worker_config_t *config, int fd) {
    worker_t *w = calloc(1, sizeof *w);
    char *blob = malloc(MAX_BLOB);
    CHECK(w != NULL && blob != NULL);
    w->config = *config;
    w->fd = fd;
    w->rng = (rng_t){mix(config->seed)};
    struct rlimit files;
    CHECK(getrlimit(RLIMIT_NOFILE, &files) == 0);
    files.rlim_cur = files.rlim_max < 65536 ? files.rlim_max : 65536;
    CHECK(setrlimit(RLIMIT_NOFILE, &files) == 0);
    note(w, "%s, life %u, pid %d, %u transfer threads, UCX_TLS %s", config->name, config->life, getpid(),
         config->num_workers, config->tls ? config->tls : "-");
    worker_open(w);
    msg_t msg = {.what = READY};
    blob_t mine = export_blob(w->engine);
    CHECK(mine.len <= MAX_BLOB);
    msg.blob_len = mine.len;
    struct iovec parts[2] = {{&msg, sizeof msg}, {mine.bytes, mine.len}};
    const struct msghdr header = {.msg_iov = parts, .msg_iovlen = 2};
    CHECK(sendmsg(fd, &header, MSG_NOSIGNAL) == (ssize_t)(sizeof msg + mine.len));
    free(mine.bytes);

    uint64_t next_state = 0;
    while (!w->quitting) {
        struct pollfd wait = {fd, POLLIN, 0};
        poll(&wait, 1, 1);
        while (worker_read(w, &msg, blob)) worker_do(w, &msg, blob);
        for (uint32_t i = 0; i < MAX_WORKERS; i++) link_step(w, i);
        for (uint32_t i = 0; i < w->most_used; i++)
            if (w->attempts[i].used) attempt_step(w, &w->attempts[i]);
        while (w->most_used > 0 && !w->attempts[w->most_used - 1].used) w->most_used--;
        retire_aside(w);
        if (now_ms() >= next_state) {
            next_state = now_ms() + 250;
            say(w, &(msg_t){.what = STATE, .condition = condition_of(w)});
        }
    }
    const int32_t code = nixlkv_engine_shutdown(w->engine, 10000);
    if (code != NIXL_OK) violation(w, NULL, "shutdown of an idle engine gave %s", nixlkv_last_error());
    nixlkv_engine_destroy(w->engine);
    return 0;
}

#endif
