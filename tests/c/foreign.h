/* A NIXL agent that is none of nixlkv's: it opens NIXL's library itself, writes the messages by hand, and may lie. What
 * it knows of the wire stands in src/protocol: frames and cards with bodies in postcard's format. */
#ifndef FOREIGN_H
#define FOREIGN_H

#include "flow.h"

#include <dlfcn.h>

/* NIXL's C API, as far as it is needed. Its structs are opaque, its status is 0 or an error. */
typedef struct nixl_agent_config {
    bool enable_prog_thread, enable_listen_thread;
    int listen_port;
    int thread_sync; /* 0: none */
    unsigned num_workers;
    uint64_t pthr_delay_us, lthr_delay_us;
    bool capture_telemetry;
} nixl_agent_config_t;

static struct {
    int (*create_configured_agent)(const char *name, const nixl_agent_config_t *config, void **agent);
    int (*get_plugin_params)(void *agent, const char *plugin, void **mems, void **params);
    int (*create_backend)(void *agent, const char *plugin, void *params, void **backend);
    int (*create_reg_dlist)(int mem_type, void **list);
    int (*reg_dlist_add_desc)(void *list, uintptr_t at, size_t len, uint64_t device, const void *metadata, size_t meta);
    int (*register_mem)(void *agent, void *list, void *arguments);
    int (*get_local_md)(void *agent, void **data, size_t *len);
    int (*load_remote_md)(void *agent, const void *data, size_t len, char **name);
    int (*gen_notif)(void *agent, const char *remote, const void *data, size_t len, void *arguments);
    int (*create_notif_map)(void **map);
    int (*get_notifs)(void *agent, void *map, void *arguments);
    int (*notif_map_get_notifs_size)(void *map, const char *agent, size_t *size);
    int (*notif_map_get_notif)(void *map, const char *agent, size_t index, const void **data, size_t *len);
    int (*notif_map_clear)(void *map);
} nixl;

static inline void nixl_open(void) {
    const char *path = getenv("NIXLKV_NIXL_LIBRARY");
    CHECK(path != NULL);
    void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (library == NULL) FAIL("%s", dlerror());
#define NIXL_FUNCTION(name)                                                                                            \
    do {                                                                                                               \
        void *found_ = dlsym(library, "nixl_capi_" #name);                                                             \
        CHECK(found_ != NULL);                                                                                         \
        memcpy(&nixl.name, &found_, sizeof found_);                                                                    \
    } while (0)
    NIXL_FUNCTION(create_configured_agent);
    NIXL_FUNCTION(get_plugin_params);
    NIXL_FUNCTION(create_backend);
    NIXL_FUNCTION(create_reg_dlist);
    NIXL_FUNCTION(reg_dlist_add_desc);
    NIXL_FUNCTION(register_mem);
    NIXL_FUNCTION(get_local_md);
    NIXL_FUNCTION(load_remote_md);
    NIXL_FUNCTION(gen_notif);
    NIXL_FUNCTION(create_notif_map);
    NIXL_FUNCTION(get_notifs);
    NIXL_FUNCTION(notif_map_get_notifs_size);
    NIXL_FUNCTION(notif_map_get_notif);
    NIXL_FUNCTION(notif_map_clear);
#undef NIXL_FUNCTION
}

/* ---- the wire ---- */

enum {
    WIRE_HELLO,
    WIRE_GOODBYE,
    WIRE_PING,
    WIRE_PONG,
    WIRE_GRANT,
    WIRE_LANDED,
    WIRE_DONE,
    WIRE_FAILED,
    WIRE_ABORT,
    WIRE_DRAINED,
    WIRE_ASK,
    WIRE_UNGRANTED,
    WIRE_CHUNK_LANDED,
    WIRE_CONFIRM,
    NUM_WIRE,
};

enum { FRAME_HEADER = 8, CARD_HEADER = 28, FRAGMENT = 139, INSTANCE = 16 };

/* Bytes under construction. */
typedef struct wire {
    size_t len;
    uint8_t bytes[8192];
} wire_t;

static uint8_t wire_version;

static inline uint32_t crc32_of(const void *bytes, size_t len) {
    uint32_t crc = ~0u;
    for (size_t i = 0; i < len; i++) {
        crc ^= ((const uint8_t *)bytes)[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (0xedb88320u & (0u - (crc & 1)));
    }
    return ~crc;
}

static inline void put_raw(wire_t *w, const void *bytes, size_t len) {
    CHECK(w->len + len <= sizeof w->bytes);
    if (len > 0) memcpy(w->bytes + w->len, bytes, len);
    w->len += len;
}

static inline void put_le(wire_t *w, uint64_t value, int len) {
    for (int i = 0; i < len; i++) put_raw(w, &(uint8_t){(uint8_t)(value >> 8 * i)}, 1);
}

/* Seven bits a byte, the low ones first. */
static inline void put(wire_t *w, uint64_t value) {
    for (; value >= 128; value >>= 7) put_le(w, value | 128, 1);
    put_le(w, value, 1);
}

static inline void put_signed(wire_t *w, int64_t value) {
    put(w, (uint64_t)value << 1 ^ (value < 0 ? UINT64_MAX : 0));
}

static inline void put_bytes(wire_t *w, const void *bytes, size_t len) {
    put(w, len);
    put_raw(w, bytes, len);
}

static inline void put_text(wire_t *w, const char *text) { put_bytes(w, text, strlen(text)); }

static inline uint64_t get(const uint8_t **at, const uint8_t *end) {
    uint64_t value = 0;
    for (int shift = 0; *at < end && shift < 64; shift += 7) {
        const uint8_t byte = *(*at)++;
        value |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) break;
    }
    return value;
}

/* A message about a room; its further fields follow. */
static inline wire_t about(uint8_t kind, uint64_t room, uint64_t generation) {
    wire_t w = {FRAME_HEADER, {0}};
    put(&w, kind);
    put(&w, room);
    put(&w, generation);
    return w;
}

/* Puts the header before a body, with a checksum that fits. */
static inline void seal(wire_t *w) {
    const uint8_t header[4] = {'N', 'K', wire_version, 0};
    const uint32_t crc = crc32_of(w->bytes + FRAME_HEADER, w->len - FRAME_HEADER);
    memcpy(w->bytes, header, 4);
    for (int i = 0; i < 4; i++) w->bytes[4 + i] = (uint8_t)(crc >> 8 * i);
}

/* A receiver, the only one of the room, gives it up. */
static inline wire_t abort_of(uint64_t room, uint64_t generation, const char *text) {
    wire_t w = about(WIRE_ABORT, room, generation);
    put(&w, 1);
    put_signed(&w, NIXL_ERR_ABORTED);
    put_text(&w, text);
    return w;
}

/* A sender, of which nothing is in flight, has failed. */
static inline wire_t failed_of(uint64_t room, uint64_t generation, const char *text) {
    wire_t w = about(WIRE_FAILED, room, generation);
    put_signed(&w, NIXL_ERR_XFER_FAILED);
    put(&w, 1);
    put_text(&w, text);
    return w;
}

static inline void put_chunk(wire_t *w, uint64_t chunk, uint64_t page_offset, uint64_t num_pages, uint64_t num_chunks) {
    put(w, chunk);
    put(w, page_offset);
    put(w, num_pages);
    put(w, num_pages * 4096);
    put(w, num_chunks > 0);
    if (num_chunks > 0) {
        put(w, num_chunks);
        put(w, 0); /* no aux */
        put(w, 0); /* no state */
    }
}

static inline wire_t landed(uint64_t room, uint64_t generation, uint64_t slice, uint64_t num_slices, uint64_t chunk,
                            uint64_t page_offset, uint64_t num_pages, uint64_t num_chunks) {
    wire_t w = about(WIRE_LANDED, room, generation);
    put(&w, slice);
    put(&w, num_slices);
    put_chunk(&w, chunk, page_offset, num_pages, num_chunks);
    return w;
}

/* What a grant names: aux and state -1 for none; runs of pages. */
typedef struct grant {
    int64_t aux, state, state_group;
    struct {
        int64_t first;
        uint64_t count;
    } runs[4];
} grant_t;

static inline void put_grant(wire_t *w, const grant_t *grant) {
    put(w, 1); /* receivers */
    put(w, grant->aux != -1);
    if (grant->aux != -1) put_signed(w, grant->aux);
    put(w, 1); /* we own the aux slot */
    uint64_t num_runs = 0;
    while (num_runs < 4 && grant->runs[num_runs].count > 0) num_runs++;
    put(w, num_runs);
    int64_t next = 0;
    for (uint64_t i = 0; i < num_runs; i++) {
        put_signed(w, grant->runs[i].first - next);
        put(w, grant->runs[i].count);
        next = grant->runs[i].first + (int64_t)grant->runs[i].count;
    }
    put(w, grant->state != -1);
    if (grant->state != -1) {
        put(w, (uint64_t)grant->state_group);
        put(w, 1);
        put_signed(w, grant->state);
        put(w, 1);
    }
}

/* One fragment of a grant of revision 1, around any bytes. */
static inline wire_t fragment_of(uint64_t room, uint64_t generation, uint64_t fragment, uint64_t num_fragments,
                                 const void *payload, size_t len) {
    wire_t w = about(WIRE_GRANT, room, generation);
    put(&w, 1);
    put(&w, 1); /* connection, as our hello says */
    put(&w, fragment);
    put(&w, num_fragments);
    put_bytes(&w, payload, len);
    return w;
}

static inline wire_t grant_of(uint64_t room, uint64_t generation, const grant_t *grant) {
    wire_t payload = {0, {0}};
    put_grant(&payload, grant);
    return fragment_of(room, generation, 0, 1, payload.bytes, payload.len);
}

/* ---- agents ---- */

/* An agent, and the engine that it talks to. */
typedef struct foreign {
    void *agent, *map;
    char name[64];
    uint8_t instance[INSTANCE];
    char victim[64];
    uint8_t victim_instance[INSTANCE];
    char *memory; /* guard, regions, guard: all of it registered with NIXL, the card claims the middle only */
    size_t guard_len, len;
    uint64_t num_heard[NUM_WIRE], num_sent;
    uint64_t victim_connection; /* as its last hello says; 0 before */
    uint64_t generation;        /* of the last grant heard */
    int64_t code;               /* of the last failure heard */
} foreign_t;

static inline void foreign_open(foreign_t *f, const char *name, size_t len) {
    memset(f, 0, sizeof *f);
    snprintf(f->name, sizeof f->name, "%s", name);
    const nixl_agent_config_t config = {.num_workers = 1};
    CHECK(nixl.create_configured_agent(f->name, &config, &f->agent) == 0);
    void *mems = NULL, *params = NULL, *backend = NULL, *list = NULL;
    CHECK(nixl.get_plugin_params(f->agent, "UCX", &mems, &params) == 0);
    CHECK(nixl.create_backend(f->agent, "UCX", params, &backend) == 0);
    CHECK(nixl.create_notif_map(&f->map) == 0);
    f->guard_len = len / 2;
    f->len = len;
    if (len == 0) return;
    f->memory = map_bytes(2 * f->guard_len + len);
    poison(f->memory, 2 * f->guard_len + len);
    CHECK(nixl.create_reg_dlist(0, &list) == 0);
    CHECK(nixl.reg_dlist_add_desc(list, (uintptr_t)f->memory, 2 * f->guard_len + len, 0, NULL, 0) == 0);
    CHECK(nixl.register_mem(f->agent, list, NULL) == 0);
}

/* An agent under the name that an engine of this instance has. */
static inline void foreign_open_as(foreign_t *f, const char instance[INSTANCE + 1], size_t len) {
    char name[64] = "nixlkv-";
    for (int i = 0; i < INSTANCE; i++) snprintf(name + 7 + 2 * i, 3, "%02x", (unsigned)(uint8_t)instance[i]);
    foreign_open(f, name, len);
    memcpy(f->instance, instance, INSTANCE);
}

/* Takes NIXL's metadata and the instance out of an engine's blob, and loads it. */
static inline void foreign_learn(foreign_t *f, blob_t blob) {
    const char *bytes = blob.bytes, *metadata = memmem(bytes, blob.len, "nixlSerDes|", 11);
    CHECK(metadata != NULL && blob.len > CARD_HEADER + INSTANCE);
    wire_version = (uint8_t)bytes[8];
    memcpy(f->victim_instance, bytes + CARD_HEADER, INSTANCE);
    char *name = NULL;
    CHECK(nixl.load_remote_md(f->agent, metadata, blob.len - (size_t)(metadata - bytes), &name) == 0);
    snprintf(f->victim, sizeof f->victim, "%s", name);
    free(name);
}

static inline void put_region(wire_t *w, const uint64_t *key, uint64_t num_key, uint64_t address, uint64_t num_items,
                              uint64_t item_len) {
    for (uint64_t i = 0; i < num_key; i++) put(w, key[i]);
    put(w, address);
    put(w, num_items * item_len);
    put(w, item_len);
    put(w, 0); /* DRAM */
    put(w, 0); /* device */
    put(w, 0); /* not local */
}

/* A card of the same layout as a node's, with so many pages, in the middle of our memory. */
static inline blob_t foreign_card(const foreign_t *f, const node_config_t *like, uint64_t num_pages) {
    void *metadata = NULL;
    size_t metadata_len = 0;
    CHECK(nixl.get_local_md(f->agent, &metadata, &metadata_len) == 0);
    wire_t w = {0, {0}};
    put_raw(&w, f->instance, INSTANCE);
    put_text(&w, f->name);
    put_text(&w, f->name);
    put(&w, 1); /* revision */
    put(&w, NIXLKV_ROLE_BOTH);
    put_text(&w, "");
    const uint64_t middle = (uint64_t)(uintptr_t)f->memory + f->guard_len, page_len = like->page_len;
    put(&w, like->num_layers + 2);
    for (uint64_t i = 0; i < like->num_layers; i++)
        put_region(&w, (uint64_t[]){0, i, 2}, 3, middle + i * num_pages * page_len, num_pages, page_len);
    const uint64_t slots = middle + like->num_layers * like->num_pages * page_len;
    put_region(&w, (uint64_t[]){1, 0}, 2, slots, NODE_SLOTS, NODE_AUX);
    put_region(&w, (uint64_t[]){2, 0, 0}, 3, slots + NODE_SLOTS * NODE_AUX, NODE_SLOTS, NODE_STATE);
    put_bytes(&w, metadata, metadata_len);
    free(metadata);

    wire_t card = {0, {0}};
    put_raw(&card, "NIXLKV\0\0", 8);
    put_le(&card, wire_version, 2);
    put_le(&card, 0, 2);
    put_le(&card, w.len, 8);
    put_le(&card, crc32_of(w.bytes, w.len), 4);
    put_le(&card, crc32_of(card.bytes, card.len), 4);
    put_raw(&card, w.bytes, w.len);
    blob_t blob = {card.len, malloc(card.len)};
    CHECK(blob.bytes != NULL);
    memcpy(blob.bytes, card.bytes, card.len);
    return blob;
}

static inline void foreign_send_raw(foreign_t *f, const void *bytes, size_t len) {
    CHECK(nixl.gen_notif(f->agent, f->victim, bytes, len, NULL) == 0);
    f->num_sent++;
}

static inline void foreign_send(foreign_t *f, wire_t w) {
    seal(&w);
    foreign_send_raw(f, w.bytes, w.len);
}

/* Takes in what has come from the engine, and lets NIXL send what it has not yet. */
static inline void foreign_listen(foreign_t *f) {
    CHECK(nixl.get_notifs(f->agent, f->map, NULL) == 0);
    size_t num = 0;
    if (nixl.notif_map_get_notifs_size(f->map, f->victim, &num) != 0) num = 0;
    for (size_t i = 0; i < num; i++) {
        const void *data = NULL;
        size_t len = 0;
        CHECK(nixl.notif_map_get_notif(f->map, f->victim, i, &data, &len) == 0);
        CHECK(len > FRAME_HEADER && len <= 200);
        const uint8_t *at = (const uint8_t *)data + FRAME_HEADER, *end = (const uint8_t *)data + len;
        const uint64_t kind = get(&at, end);
        CHECK(kind < NUM_WIRE);
        f->num_heard[kind]++;
        if (kind == WIRE_HELLO) {
            get(&at, end);
            get(&at, end);
            at += INSTANCE;
            f->victim_connection = get(&at, end);
        }
        if (kind == WIRE_GRANT) {
            get(&at, end);
            f->generation = get(&at, end);
        }
        if (kind == WIRE_FAILED) {
            get(&at, end);
            get(&at, end);
            const uint64_t zigzag = get(&at, end);
            f->code = (int64_t)(zigzag >> 1) ^ -(int64_t)(zigzag & 1);
        }
    }
    CHECK(nixl.notif_map_clear(f->map) == 0);
}

static inline wire_t hello_of(const foreign_t *f, uint64_t known_revision) {
    wire_t w = {FRAME_HEADER, {0}};
    put(&w, WIRE_HELLO);
    put(&w, 1);
    put(&w, known_revision);
    put_raw(&w, f->victim_instance, INSTANCE);
    put(&w, 1); /* connection */
    put(&w, f->victim_connection);
    put(&w, 1); /* reply */
    put(&w, 0); /* oldest generation */
    return w;
}

/* Whether the guards before and behind the regions are as they were. */
static inline bool foreign_is_clean(const foreign_t *f) {
    const uint64_t *words = (const uint64_t *)f->memory;
    const size_t guard = f->guard_len / 8, middle = f->len / 8;
    for (size_t i = 0; i < guard; i++)
        if (words[i] != POISON || words[guard + middle + i] != POISON) return false;
    return true;
}

#endif
