/*
 * nixlkv.h: the C API of libnixlkv, which moves a request's KV cache from prefill to decode workers over NVIDIA NIXL.
 *
 * Generated from src/ffi by cbindgen: `make header` rewrites it, and a test compares it. SPDX-License-Identifier: Apache-2.0
 *
 * Rules that hold for every function:
 *  - It returns NIXL_OK (0) or a negative NIXL_ERR_* code; nixlkv_last_error() tells what exactly was wrong. Outputs are
 *    written on success only, unless the comment says otherwise.
 *  - It may be called from any thread. It does not block unless its comment says so.
 *  - What it takes is read during the call only; nothing is kept but the registered memory itself.
 *  - Structs begin with struct_size and are set up by their _init function; a zero field means the default. A program that
 *    was built with an older or newer header works as long as it asks for nothing that this library does not know.
 *  - Nothing aborts, throws, prints, installs signal handlers or changes the environment.
 */

#ifndef NIXLKV_H
#define NIXLKV_H

#include <stddef.h>
#include <stdint.h>

/** success */
#define NIXL_OK 0
/** an argument is null, misaligned, out of its domain or not valid UTF-8 */
#define NIXL_ERR_INVALID_ARGUMENT (-101)
/** the handle is null, destroyed, or was never given out */
#define NIXL_ERR_INVALID_HANDLE (-102)
/** struct_size is too small, or an unknown tail of the struct is not zero */
#define NIXL_ERR_STRUCT_SIZE (-103)
/** this process is a fork's child: the engine belongs to its parent */
#define NIXL_ERR_FORKED (-104)
/** the engine's role does not include this call */
#define NIXL_ERR_ROLE (-105)
/** the caller's buffer is too small: the needed length was written */
#define NIXL_ERR_BUFFER_TOO_SMALL (-106)
/** the engine has been shut down */
#define NIXL_ERR_SHUT_DOWN (-107)
/** the room is open already: release it first */
#define NIXL_ERR_ROOM_IN_USE (-110)
/** no such room is open here */
#define NIXL_ERR_ROOM_UNKNOWN (-111)
/** the room has ended: poll tells how */
#define NIXL_ERR_ROOM_ENDED (-112)
/** the room has not ended: wait for it, or abort it */
#define NIXL_ERR_ROOM_ACTIVE (-113)
/** something can still touch the room's memory (retryable) */
#define NIXL_ERR_NOT_QUIESCED (-114)
/** a page index lies outside the registered KV regions */
#define NIXL_ERR_PAGE_OUT_OF_RANGE (-120)
/** a destination page is listed twice */
#define NIXL_ERR_PAGE_DUPLICATE (-121)
/** the chunk covers positions of the page list that an earlier chunk sent */
#define NIXL_ERR_PAGE_OVERLAP (-122)
/** the two sides' page lists differ in length */
#define NIXL_ERR_PAGE_COUNT (-123)
/** the last chunk leaves positions of the page list unsent */
#define NIXL_ERR_PAGES_INCOMPLETE (-124)
/** a destination page belongs to a room that is not quiesced (retryable) */
#define NIXL_ERR_PAGE_IN_USE (-125)
/** the room's last chunk has been sent */
#define NIXL_ERR_CHUNK_AFTER_LAST (-126)
/** a chunk without pages must be the last */
#define NIXL_ERR_CHUNK_EMPTY (-127)
/** the last chunk needs an aux index */
#define NIXL_ERR_AUX_MISSING (-130)
/** the aux index lies outside the registered aux regions */
#define NIXL_ERR_AUX_OUT_OF_RANGE (-131)
/** another sender owns the room's aux slot */
#define NIXL_ERR_AUX_NOT_OWNER (-132)
/** an aux index where none belongs */
#define NIXL_ERR_AUX_UNEXPECTED (-133)
/** the aux slot belongs to a room that is not quiesced (retryable) */
#define NIXL_ERR_AUX_IN_USE (-134)
/** the last chunk needs state indices for this group */
#define NIXL_ERR_STATE_MISSING (-140)
/** a state index lies outside the group's regions */
#define NIXL_ERR_STATE_OUT_OF_RANGE (-141)
/** the two sides' state index lists differ in length */
#define NIXL_ERR_STATE_COUNT (-142)
/** state indices where none belong */
#define NIXL_ERR_STATE_UNEXPECTED (-143)
/** a state slot belongs to a room that is not quiesced (retryable) */
#define NIXL_ERR_STATE_IN_USE (-144)
/** no such peer is connected */
#define NIXL_ERR_PEER_UNKNOWN (-150)
/** the blob is this engine's own */
#define NIXL_ERR_PEER_SELF (-151)
/** a sender is listed twice */
#define NIXL_ERR_PEER_DUPLICATE (-152)
/** the peer has rooms that are not quiesced (retryable) */
#define NIXL_ERR_PEER_BUSY (-153)
/** no sender of the room has this region */
#define NIXL_ERR_LAYERS_INCOMPLETE (-155)
/** two senders of the room have the same region */
#define NIXL_ERR_LAYERS_OVERLAP (-156)
/** a region's address, length or item length is zero */
#define NIXL_ERR_REGION_EMPTY (-201)
/** a region's length is not a whole number of items */
#define NIXL_ERR_REGION_ITEM (-202)
/** a region's address plus length passes 2^64 */
#define NIXL_ERR_REGION_WRAPS (-203)
/** a region is not mapped, or not readable and writable as its role needs */
#define NIXL_ERR_REGION_UNMAPPED (-204)
/** a region overlaps another one */
#define NIXL_ERR_REGION_OVERLAP (-205)
/** a region with this layer, part, array or tensor is registered already */
#define NIXL_ERR_REGION_DUPLICATE (-206)
/** an unknown kind, part, memory kind or flag of a region */
#define NIXL_ERR_REGION_KIND (-207)
/** no such region is registered */
#define NIXL_ERR_REGION_UNKNOWN (-208)
/** rooms that are not quiesced use the registered memory (retryable) */
#define NIXL_ERR_REGION_BUSY (-209)
/** NIXL refused to register a KV region */
#define NIXL_ERR_REGISTER_KV (-210)
/** NIXL refused to register an aux region */
#define NIXL_ERR_REGISTER_AUX (-211)
/** NIXL refused to register a state region */
#define NIXL_ERR_REGISTER_STATE (-212)
/** libnixl_capi.so was found nowhere */
#define NIXL_ERR_LIBRARY_NOT_FOUND (-301)
/** libnixl_capi.so was found but cannot be loaded */
#define NIXL_ERR_LIBRARY_INVALID (-302)
/** libnixl_capi.so lacks a function: another version of NIXL */
#define NIXL_ERR_SYMBOL_MISSING (-303)
/** NIXL has no plugin for the backend */
#define NIXL_ERR_PLUGIN_NOT_FOUND (-304)
/** the backend's plugin cannot be loaded */
#define NIXL_ERR_PLUGIN_INVALID (-305)
/** the backend could not start */
#define NIXL_ERR_BACKEND_FAILED (-306)
/** the engine did not start within its time limit (retryable) */
#define NIXL_ERR_CREATE_TIMEOUT (-307)
/** VRAM was asked for, and there is no CUDA driver or no such device */
#define NIXL_ERR_CUDA_UNAVAILABLE (-308)
/** the queue is full: poll, then try again (retryable) */
#define NIXL_ERR_QUEUE_FULL (-401)
/** the limit of open rooms is reached (retryable) */
#define NIXL_ERR_TOO_MANY_ROOMS (-402)
/** the blob is truncated, altered, or not a nixlkv blob */
#define NIXL_ERR_METADATA_INVALID (-410)
/** the peer speaks another version of the wire format */
#define NIXL_ERR_WIRE_VERSION (-411)
/** the two sides' cache dtypes differ */
#define NIXL_ERR_DTYPE_DIFFERS (-412)
/** the two sides' layouts cannot be mapped onto each other */
#define NIXL_ERR_LAYOUT_DIFFERS (-413)
/** regions changed since the blobs were exchanged: export and connect again */
#define NIXL_ERR_PEER_STALE (-414)
/** the peer is gone, or silent for longer than the liveness limit (retryable) */
#define NIXL_ERR_PEER_LOST (-415)
/** a new instance of the peer has replaced the one this room used (retryable) */
#define NIXL_ERR_PEER_RESTARTED (-416)
/** the peer was disconnected, or shut down */
#define NIXL_ERR_PEER_DISCONNECTED (-417)
/** the peer has not connected back within the time limit (retryable) */
#define NIXL_ERR_PEER_NOT_READY (-418)
/** NIXL reported a failed transfer (retryable) */
#define NIXL_ERR_XFER_FAILED (-420)
/** no decode side asked for the room within the time limit (retryable) */
#define NIXL_ERR_GRANT_TIMEOUT (-421)
/** the room made no progress within its time limit (retryable) */
#define NIXL_ERR_ROOM_TIMEOUT (-422)
/** the room was aborted */
#define NIXL_ERR_ABORTED (-423)
/** the wait's time limit passed first (retryable) */
#define NIXL_ERR_WAIT_TIMEOUT (-424)
/** the peer sent something that contradicts the room */
#define NIXL_ERR_PROTOCOL (-425)
/** transfers were still in progress when the drain's time limit passed (retryable) */
#define NIXL_ERR_DRAIN_TIMEOUT (-426)
/** a posted transfer made no progress within its time limit (retryable) */
#define NIXL_ERR_XFER_STALLED (-427)
/** a fault inside nixlkv: please report it */
#define NIXL_ERR_INTERNAL (-501)


/**
 * The version of this header's binary interface. A library with another major number is not compatible.
 */
#define NIXLKV_ABI_VERSION 1

/**
 * Role of an engine: it sends.
 */
#define NIXLKV_ROLE_PREFILL 1

/**
 * Role of an engine: it receives.
 */
#define NIXLKV_ROLE_DECODE 2

/**
 * Role of an engine: it sends and receives.
 */
#define NIXLKV_ROLE_BOTH 3

/**
 * Log level: nothing.
 */
#define NIXLKV_LOG_OFF 0

/**
 * Log level: errors.
 */
#define NIXLKV_LOG_ERROR 1

/**
 * Log level: errors and warnings.
 */
#define NIXLKV_LOG_WARN 2

/**
 * Log level: also what an operator may want to know.
 */
#define NIXLKV_LOG_INFO 3

/**
 * Log level: also what helps to find a fault.
 */
#define NIXLKV_LOG_DEBUG 4

/**
 * Log level: everything.
 */
#define NIXLKV_LOG_TRACE 5

/**
 * Kind of a region: pages of the KV cache of one layer.
 */
#define NIXLKV_REGION_KV 1

/**
 * Kind of a region: slots of auxiliary data, one per request.
 */
#define NIXLKV_REGION_AUX 2

/**
 * Kind of a region: slots of one state tensor.
 */
#define NIXLKV_REGION_STATE 3

/**
 * Part of a KV region: keys.
 */
#define NIXLKV_PART_K 1

/**
 * Part of a KV region: values.
 */
#define NIXLKV_PART_V 2

/**
 * Part of a KV region: keys and values in one item, or a latent (MLA) cache.
 */
#define NIXLKV_PART_FUSED 3

/**
 * Memory kind: asked of the CUDA driver if there is one, else DRAM.
 */
#define NIXLKV_MEMORY_AUTO 0

/**
 * Memory kind: host memory.
 */
#define NIXLKV_MEMORY_DRAM 1

/**
 * Memory kind: memory of the CUDA device device_id.
 */
#define NIXLKV_MEMORY_VRAM 2

/**
 * Flag of a region of a decode engine: no peer sends it (the layers of a draft model, say).
 */
#define NIXLKV_REGION_FLAG_LOCAL 1

/**
 * State of a room: it failed; error and error_text say why. Ended.
 */
#define NIXLKV_ROOM_FAILED 0

/**
 * State of a room: the other side is not known yet (no grant has come, or a sender has not connected back).
 */
#define NIXLKV_ROOM_BOOTSTRAPPING 1

/**
 * State of a room: both sides know each other, and no chunk has come yet.
 */
#define NIXLKV_ROOM_WAITING_FOR_INPUT 2

/**
 * State of a room: chunks are on their way.
 */
#define NIXLKV_ROOM_TRANSFERRING 3

/**
 * State of a room: everything is in the receiver's memory, and this side knows. Ended.
 */
#define NIXLKV_ROOM_SUCCESS 4

/**
 * Flag of a chunk: it is the room's last.
 */
#define NIXLKV_CHUNK_LAST 1

/**
 * Flag of the last chunk: no aux index is given although aux regions are registered, since another sender owns the
 * room's aux slot or the receiver asked for none.
 */
#define NIXLKV_CHUNK_NO_AUX 2

/**
 * Wait until every room has ended.
 */
#define NIXLKV_WAIT_ALL 0

/**
 * Flag of nixlkv_wait: until at least one has.
 */
#define NIXLKV_WAIT_ANY 1

/**
 * Flag of nixlkv_wait: ended and quiesced, rather than ended.
 */
#define NIXLKV_WAIT_QUIESCED 2

/**
 * An engine: one NIXL agent, its registered memory, its peers and rooms. A process may have several.
 *
 * Opaque; made by nixlkv_engine_create, ended by nixlkv_engine_destroy. All functions that take it may be called from
 * any thread at any time; a handle that is NULL, destroyed or never given out is refused with
 * NIXL_ERR_INVALID_HANDLE. In the child of a fork every call is refused with NIXL_ERR_FORKED.
 */
typedef struct nixlkv_engine_t nixlkv_engine_t;

/**
 * A key with its value, both NUL-terminated UTF-8.
 */
typedef struct nixlkv_param_t {
    /**
     * The key.
     */
    const char *key;
    /**
     * The value.
     */
    const char *value;
} nixlkv_param_t;

/**
 * Receives log lines: user_data as configured, the level (NIXLKV_LOG_ERROR to NIXLKV_LOG_TRACE) and one line without
 * a newline, valid during the call. It is called from a thread of the library's own, one line at a time; it may call
 * any function of the library, and must not throw or longjmp. It is not called any more once nixlkv_engine_destroy has
 * returned, unless it destroyed the engine itself.
 */
typedef void (*nixlkv_log_callback_t)(void *user_data, uint32_t level, const char *message);

/**
 * How to create an engine. Set up by nixlkv_engine_config_init; every zero means the default. Everything it points to
 * is copied by nixlkv_engine_create.
 */
typedef struct nixlkv_engine_config_t {
    /**
     * sizeof(nixlkv_engine_config_t) of the caller.
     */
    uint32_t struct_size;
    /**
     * NIXLKV_ROLE_*. No default.
     */
    uint32_t role;
    /**
     * The engine's name in messages; an engine that restarts under the name of an earlier one replaces it at its
     * peers, so it must be unique among live engines. At most 255 bytes. NULL: 128 random bits in hex.
     */
    const char *name;
    /**
     * Path of libnixl_capi.so. NULL: the environment's NIXLKV_NIXL_LIBRARY, then the dynamic linker, then the nixl_cu12
     * or nixl_cu13 wheel of the active Python environment.
     */
    const char *nixl_library;
    /**
     * NIXL's backend. NULL: "UCX".
     */
    const char *backend;
    /**
     * The backend's parameters. A key that starts with UCX_ becomes a setting of UCX for this engine, as if it stood in
     * the environment, which has precedence; others go to NIXL's backend as they are.
     */
    const struct nixlkv_param_t *backend_params;
    /**
     * Entries of backend_params.
     */
    uint64_t num_backend_params;
    /**
     * A tag for the element type of the cache, such as "bf16" or "fp8_e4m3"; compared with the peers'. NULL: "".
     */
    const char *cache_dtype;
    /**
     * Transfer threads. 0: 1. At most 64.
     */
    uint32_t num_workers;
    /**
     * Most chunks that nixlkv_send_chunk has accepted and that have not settled; more is NIXL_ERR_QUEUE_FULL. Of 64 or
     * more a quarter is kept for others when one of several peers has taken the rest. 0: 4096.
     */
    uint32_t queue_depth;
    /**
     * Most rooms open at a time, ended ones included until they are released; more is NIXL_ERR_TOO_MANY_ROOMS.
     * 0: 65536.
     */
    uint32_t max_rooms;
    /**
     * NIXLKV_LOG_*: the most verbose level that reaches log_callback. 0: nothing.
     */
    uint32_t log_level;
    /**
     * Receives log lines. NULL: nobody does. The library never writes to stdout or stderr.
     */
    nixlkv_log_callback_t log_callback;
    /**
     * Handed to log_callback. Must stay valid until nixlkv_engine_destroy has returned.
     */
    void *log_user_data;
    /**
     * Most milliseconds that nixlkv_engine_create may take. 0: 30000.
     */
    uint64_t create_timeout_ms;
    /**
     * Milliseconds that a receiving room waits for its senders to have connected back. 0: 10000.
     */
    uint64_t connect_timeout_ms;
    /**
     * Milliseconds that a sending room's chunks wait for the decode side's grant. 0: 60000.
     */
    uint64_t grant_timeout_ms;
    /**
     * Milliseconds that a room may go without progress before it fails. 0: 300000.
     */
    uint64_t room_timeout_ms;
    /**
     * Milliseconds between heartbeats to each peer. 0: 1000.
     */
    uint64_t heartbeat_interval_ms;
    /**
     * Milliseconds of silence after which a peer counts as lost. 0: 5000.
     */
    uint64_t liveness_limit_ms;
    /**
     * Milliseconds that one posted transfer (at most 8 MiB, or one page) may take before its room fails with
     * NIXL_ERR_XFER_STALLED; its pages stay with the room until the transport lets go of them. 0: 60000.
     */
    uint64_t stall_timeout_ms;
} nixlkv_engine_config_t;

/**
 * What NIXL is made of here. The pointers belong to the engine and live until it is destroyed.
 */
typedef struct nixlkv_nixl_info_t {
    /**
     * sizeof(nixlkv_nixl_info_t) of the caller.
     */
    uint32_t struct_size;
    /**
     * Entries of plugins.
     */
    uint32_t num_plugins;
    /**
     * Path of the libnixl_capi.so that is loaded.
     */
    const char *nixl_library;
    /**
     * The backend that is running.
     */
    const char *backend;
    /**
     * The plugins that NIXL found.
     */
    const char *const *plugins;
    /**
     * The backend's parameters as it runs with them.
     */
    const struct nixlkv_param_t *backend_params;
    /**
     * Entries of backend_params.
     */
    uint64_t num_backend_params;
} nixlkv_nixl_info_t;

/**
 * Counters since the engine was created. Each is exact; together they are not one moment's snapshot.
 */
typedef struct nixlkv_stats_t {
    /**
     * sizeof(nixlkv_stats_t) of the caller.
     */
    uint32_t struct_size;
    /**
     * Zero.
     */
    uint32_t reserved;
    /**
     * Rooms opened here.
     */
    uint64_t rooms_opened;
    /**
     * Rooms that succeeded.
     */
    uint64_t rooms_succeeded;
    /**
     * Rooms that failed.
     */
    uint64_t rooms_failed;
    /**
     * Rooms that have not ended, now.
     */
    uint64_t rooms_active;
    /**
     * Rooms whose memory something may still touch, now: active ones, and failed ones that have not drained.
     */
    uint64_t rooms_unquiesced;
    /**
     * Chunks accepted and not settled, now.
     */
    uint64_t chunks_pending;
    /**
     * Chunks that have settled, counted for each receiver.
     */
    uint64_t chunks_sent;
    /**
     * Bytes that landed at peers.
     */
    uint64_t bytes_sent;
    /**
     * Descriptors posted to NIXL.
     */
    uint64_t descriptors_sent;
    /**
     * Transfers posted to NIXL.
     */
    uint64_t transfers_posted;
    /**
     * Transfers in progress, now.
     */
    uint64_t transfers_in_flight;
    /**
     * Transfers that failed.
     */
    uint64_t transfers_failed;
    /**
     * Control messages sent.
     */
    uint64_t messages_sent;
    /**
     * Control messages received, dropped ones included.
     */
    uint64_t messages_received;
    /**
     * Dropped: truncated, altered, of another wire version, or out of bounds.
     */
    uint64_t messages_malformed;
    /**
     * Dropped: from an engine that is not connected.
     */
    uint64_t messages_unknown_peer;
    /**
     * Dropped: for a room that is not open here.
     */
    uint64_t messages_unknown_room;
    /**
     * Dropped: of an earlier life of a room or a peer.
     */
    uint64_t messages_stale;
    /**
     * Dropped: counted before.
     */
    uint64_t messages_duplicate;
    /**
     * Control messages not sent because too many to one peer waited. What matters of them is asked for again.
     */
    uint64_t messages_dropped;
} nixlkv_stats_t;

/**
 * What an operator asks when something seems to hang: all of it is of this moment.
 */
typedef struct nixlkv_health_t {
    /**
     * sizeof(nixlkv_health_t) of the caller.
     */
    uint32_t struct_size;
    /**
     * Zero.
     */
    uint32_t reserved;
    /**
     * Milliseconds since the oldest transfer in progress was posted; 0: none is. Up to 20 ms late.
     */
    uint64_t oldest_transfer_ms;
    /**
     * The room of the oldest transfer in progress.
     */
    uint64_t oldest_transfer_room;
    /**
     * Peers that are connected, lost ones included.
     */
    uint64_t num_peers;
    /**
     * Peers that have missed two heartbeats and are not lost.
     */
    uint64_t num_peers_suspect;
    /**
     * Peers that have been silent for longer than the liveness limit and whose connection is still open.
     */
    uint64_t num_peers_silent;
    /**
     * Peers whose connection broke.
     */
    uint64_t num_peers_lost;
    /**
     * Rooms that have failed and are not quiesced.
     */
    uint64_t num_rooms_quarantined;
    /**
     * Destination pages of such rooms.
     */
    uint64_t num_pages_quarantined;
    /**
     * Grants that wait for the first chunk of their room.
     */
    uint64_t num_grants_parked;
    /**
     * Connections that close when the last transfer on them has settled.
     */
    uint64_t num_connections_closing;
} nixlkv_health_t;

/**
 * One buffer to register. Set up by nixlkv_region_init. The memory stays the caller's; it must stay mapped until it is
 * deregistered or the engine is destroyed.
 *
 * Two engines pair their regions by (kind, layer_id, part) and (kind, group, layer_id), never by position. A page
 * index names the item_len bytes at address + index * item_len in every KV region.
 */
typedef struct nixlkv_region_t {
    /**
     * sizeof(nixlkv_region_t) of the caller.
     */
    uint32_t struct_size;
    /**
     * NIXLKV_REGION_*.
     */
    uint32_t kind;
    /**
     * First byte.
     */
    void *address;
    /**
     * Bytes, a multiple of item_len.
     */
    uint64_t len;
    /**
     * Bytes per page (KV) or per slot (aux, state).
     */
    uint64_t item_len;
    /**
     * KV: the model's layer. Aux: which array. State: which tensor of the group.
     */
    uint32_t layer_id;
    /**
     * KV: NIXLKV_PART_*. Otherwise 0.
     */
    uint32_t part;
    /**
     * State: the group, a set of tensors that share one list of slot indices. Otherwise 0.
     */
    uint32_t group;
    /**
     * NIXLKV_MEMORY_*.
     */
    uint32_t memory_kind;
    /**
     * VRAM: the CUDA device. Otherwise 0.
     */
    uint64_t device_id;
    /**
     * NIXLKV_REGION_FLAG_*, or-ed.
     */
    uint32_t flags;
    /**
     * Zero.
     */
    uint32_t reserved;
} nixlkv_region_t;

/**
 * Slot indices in one state group. Set up by nixlkv_state_indices_init.
 */
typedef struct nixlkv_state_indices_t {
    /**
     * sizeof(nixlkv_state_indices_t) of the caller.
     */
    uint32_t struct_size;
    /**
     * The group, as registered.
     */
    uint32_t group;
    /**
     * num_indices slots; the sender's i-th goes to the receiver's i-th.
     */
    const int32_t *indices;
    /**
     * Entries of indices.
     */
    uint64_t num_indices;
} nixlkv_state_indices_t;

/**
 * What a decode engine wants to receive: the grant of a room. Set up by nixlkv_recv_params_init. Read during the call
 * only.
 */
typedef struct nixlkv_recv_params_t {
    /**
     * sizeof(nixlkv_recv_params_t) of the caller.
     */
    uint32_t struct_size;
    /**
     * Zero.
     */
    uint32_t reserved;
    /**
     * The room: chosen by the engines' router, the same on both sides.
     */
    uint64_t room;
    /**
     * The sending peers. Several senders have different layers or state groups; together they must have every region
     * that the room needs, and no region twice.
     */
    const uint64_t *senders;
    /**
     * Entries of senders, at least 1.
     */
    uint64_t num_senders;
    /**
     * Destination pages: the room's page list. NULL with 0: everything is on this side already (a full prefix hit).
     */
    const int32_t *pages;
    /**
     * Entries of pages.
     */
    uint64_t num_pages;
    /**
     * Points to the destination aux slot. NULL: this room has no aux.
     */
    const int32_t *aux_index;
    /**
     * The sender that fills the aux slot. 0: senders[0].
     */
    uint64_t aux_sender;
    /**
     * Destination state slots.
     */
    const struct nixlkv_state_indices_t *states;
    /**
     * Entries of states.
     */
    uint64_t num_states;
    /**
     * How many decode engines each sender fills for this room. 0: 1.
     */
    uint64_t num_receivers;
    /**
     * Milliseconds without progress after which the room fails. 0: the engine's room_timeout_ms.
     */
    uint64_t timeout_ms;
} nixlkv_recv_params_t;

/**
 * What a prefill engine sends in one go. Set up by nixlkv_chunk_init. Read during the call only; the pages and slots
 * themselves must stay unchanged until poll says that the room is quiesced.
 */
typedef struct nixlkv_chunk_t {
    /**
     * sizeof(nixlkv_chunk_t) of the caller.
     */
    uint32_t struct_size;
    /**
     * NIXLKV_CHUNK_*, or-ed.
     */
    uint32_t flags;
    /**
     * The room.
     */
    uint64_t room;
    /**
     * Source pages. NULL with 0 only with NIXLKV_CHUNK_LAST.
     */
    const int32_t *pages;
    /**
     * Entries of pages.
     */
    uint64_t num_pages;
    /**
     * Where they start in the room's page list: pages[i] goes to the receiver's page number page_offset + i.
     */
    uint64_t page_offset;
    /**
     * Points to the source aux slot. NULL: none. With NIXLKV_CHUNK_LAST only, and only when the receiver asked for aux.
     */
    const int32_t *aux_index;
    /**
     * Source state slots. With NIXLKV_CHUNK_LAST only.
     */
    const struct nixlkv_state_indices_t *states;
    /**
     * Entries of states.
     */
    uint64_t num_states;
} nixlkv_chunk_t;

/**
 * What nixlkv_poll tells of a room.
 */
typedef struct nixlkv_room_status_t {
    /**
     * sizeof(nixlkv_room_status_t) of the caller.
     */
    uint32_t struct_size;
    /**
     * NIXLKV_ROOM_*.
     */
    uint32_t state;
    /**
     * NIXL_OK, or the code of the first cause, from whichever side.
     */
    int32_t error;
    /**
     * 1: the room has ended and nothing can read or write its memory any more; its pages and slots may be reused.
     */
    uint32_t quiesced;
    /**
     * What exactly failed, or "". Valid until the calling thread's next nixlkv_poll.
     */
    const char *error_text;
    /**
     * Chunks that have landed (sender: at every receiver).
     */
    uint64_t num_chunks;
    /**
     * Pages that have landed.
     */
    uint64_t num_pages;
    /**
     * Bytes that have landed: KV, state and aux.
     */
    uint64_t num_bytes;
    /**
     * Sender: descriptors posted to NIXL; neighbouring pages share one.
     */
    uint64_t num_descriptors;
    /**
     * Sender: chunks accepted that have not landed.
     */
    uint64_t num_pending_chunks;
    /**
     * Receiver: senders whose part is not complete; after a failure, senders that have not drained.
     */
    uint64_t num_pending_senders;
    /**
     * 1: a peer of the room has missed two heartbeats. It is not lost yet, or it is lost and its pages wait for it.
     */
    uint32_t suspect;
    /**
     * Zero.
     */
    uint32_t reserved;
} nixlkv_room_status_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Tells the binary interface's version of the loaded library, to compare with NIXLKV_ABI_VERSION.
 *
 * Any thread; never blocks; works without NIXL.
 */
uint32_t nixlkv_abi_version(void);

/**
 * Tells the library's version as text, such as "0.1.0". The string is static.
 *
 * Any thread; never blocks; works without NIXL.
 */
const char *nixlkv_version(void);

/**
 * Gives a status code's name, such as "NIXL_ERR_AUX_MISSING", or "NIXL_ERR_?" for a number that is no code. The
 * string is static.
 *
 * Any thread; never blocks; works without NIXL.
 */
const char *nixlkv_status_name(int32_t status);

/**
 * Gives one line of text for a status code. The string is static.
 *
 * Any thread; never blocks; works without NIXL.
 */
const char *nixlkv_status_text(int32_t status);

/**
 * Tells whether a retry can help: 1 when the same call, or a new room for the same request, may succeed later without
 * anybody changing anything; 0 otherwise, also for a number that is no code.
 *
 * Any thread; never blocks; works without NIXL.
 */
int32_t nixlkv_status_retryable(int32_t status);

/**
 * Gives the code's name, number and the offending values of the calling thread's last failed call, or "" when none
 * has failed. The string belongs to the library and lives until the thread's next failed call. A successful call does
 * not change it.
 *
 * Any thread; never blocks; works without NIXL.
 */
const char *nixlkv_last_error(void);

/**
 * Zeroes a configuration and sets its size.
 *
 * config: the caller's struct. struct_size: sizeof(nixlkv_engine_config_t).
 * Any thread; never blocks. Errors: NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE.
 */
int32_t nixlkv_engine_config_init(struct nixlkv_engine_config_t *config, uint32_t struct_size);

/**
 * Zeroes an information struct and sets its size.
 *
 * info: the caller's struct. struct_size: sizeof(nixlkv_nixl_info_t).
 * Any thread; never blocks. Errors: NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE.
 */
int32_t nixlkv_nixl_info_init(struct nixlkv_nixl_info_t *info, uint32_t struct_size);

/**
 * Zeroes a counter struct and sets its size.
 *
 * stats: the caller's struct. struct_size: sizeof(nixlkv_stats_t).
 * Any thread; never blocks. Errors: NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE.
 */
int32_t nixlkv_stats_init(struct nixlkv_stats_t *stats, uint32_t struct_size);

/**
 * Creates an engine: finds and loads NIXL, starts the backend and the threads.
 *
 * config: read during the call only. engine: receives the handle on success, is left alone otherwise.
 * Any thread. Blocks for at most the configuration's create_timeout_ms. After an error the process is as before, and
 * another attempt may succeed when the cause is gone.
 * Errors: NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE, NIXL_ERR_FORKED, NIXL_ERR_LIBRARY_NOT_FOUND,
 * NIXL_ERR_LIBRARY_INVALID, NIXL_ERR_SYMBOL_MISSING, NIXL_ERR_PLUGIN_NOT_FOUND, NIXL_ERR_PLUGIN_INVALID,
 * NIXL_ERR_BACKEND_FAILED, NIXL_ERR_CREATE_TIMEOUT, NIXL_ERR_INTERNAL.
 */
int32_t nixlkv_engine_create(const struct nixlkv_engine_config_t *config, struct nixlkv_engine_t **engine);

/**
 * Shuts an engine down in good order: refuses new work, fails every room that has not ended (the peers are told), and
 * waits until nothing is in flight and every sending peer has confirmed that it drained. Poll, wait, release and stats
 * go on working; so does shutting down again, to wait longer.
 *
 * timeout_ms: most milliseconds to wait.
 * Any thread. Blocks for at most timeout_ms.
 * Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_DRAIN_TIMEOUT (its text says what is pending),
 * NIXL_ERR_INTERNAL.
 */
int32_t nixlkv_engine_shutdown(struct nixlkv_engine_t *engine, uint64_t timeout_ms);

/**
 * Destroys an engine: its rooms, peers, registrations and threads. NULL, destroyed and foreign handles are ignored.
 * Registered memory may be freed when it returns, if nixlkv_engine_shutdown has succeeded before; otherwise it waits
 * up to a second for transfers in progress, and leaves what is still moving then registered for good rather than free
 * it under the transfer: such memory must not be reused.
 *
 * Any thread; a call on the engine that is in progress in another thread ends with an error. Blocks for at most about
 * two seconds. In the child of a fork it does nothing.
 */
void nixlkv_engine_destroy(struct nixlkv_engine_t *engine);

/**
 * Tells which NIXL library is loaded, which plugins it found, and the parameters its backend runs with.
 *
 * info: set up by nixlkv_nixl_info_init; written on success only. The pointers in it live until the engine is
 * destroyed.
 * Any thread; never blocks.
 * Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE, NIXL_ERR_INTERNAL.
 */
int32_t nixlkv_nixl_info(const struct nixlkv_engine_t *engine, struct nixlkv_nixl_info_t *info);

/**
 * Reads the engine's counters.
 *
 * stats: set up by nixlkv_stats_init; written on success only.
 * Any thread; never blocks.
 * Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE, NIXL_ERR_INTERNAL.
 */
int32_t nixlkv_stats(const struct nixlkv_engine_t *engine, struct nixlkv_stats_t *stats);

/**
 * Zeroes a health struct and sets its size.
 *
 * health: the caller's struct. struct_size: sizeof(nixlkv_health_t).
 * Any thread; never blocks. Errors: NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE.
 */
int32_t nixlkv_health_init(struct nixlkv_health_t *health, uint32_t struct_size);

/**
 * Tells what may be stuck: the oldest transfer in progress, suspected and silent peers, quarantined pages.
 *
 * health: set up by nixlkv_health_init; written on success only.
 * Any thread; never blocks.
 * Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE, NIXL_ERR_INTERNAL.
 */
int32_t nixlkv_health(const struct nixlkv_engine_t *engine, struct nixlkv_health_t *health);

/**
 * Zeroes a region and sets its size.
 *
 * region: the caller's struct. struct_size: sizeof(nixlkv_region_t).
 * Any thread; never blocks. Errors: NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE.
 */
int32_t nixlkv_region_init(struct nixlkv_region_t *region, uint32_t struct_size);

/**
 * Registers a batch of regions: all of them, or none. The whole batch is checked first, also against what is
 * registered already; the error's text names the entry's index and values.
 *
 * Peers that are connected keep what they know, and rooms that both sides have opened go on; before others are opened
 * with them, both sides must export and connect again (NIXL_ERR_PEER_STALE tells).
 *
 * regions: num_regions entries, read during the call only. region_ids: NULL, or room for num_regions ids, written on
 * success only; an id is never 0 and never used twice.
 * Any thread. Blocks while NIXL registers, which for large memory can take seconds.
 * Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE,
 * NIXL_ERR_SHUT_DOWN, NIXL_ERR_REGION_EMPTY, NIXL_ERR_REGION_ITEM, NIXL_ERR_REGION_WRAPS, NIXL_ERR_REGION_UNMAPPED,
 * NIXL_ERR_REGION_OVERLAP, NIXL_ERR_REGION_DUPLICATE, NIXL_ERR_REGION_KIND, NIXL_ERR_CUDA_UNAVAILABLE,
 * NIXL_ERR_REGISTER_KV, NIXL_ERR_REGISTER_AUX, NIXL_ERR_REGISTER_STATE, NIXL_ERR_INTERNAL.
 */
int32_t nixlkv_register(struct nixlkv_engine_t *engine,
                        const struct nixlkv_region_t *regions,
                        uint64_t num_regions,
                        uint64_t *region_ids);

/**
 * Deregisters regions: all of them, or none. Refused with NIXL_ERR_REGION_BUSY while any room is not quiesced.
 *
 * region_ids: num_regions ids that nixlkv_register gave.
 * Any thread. Blocks while NIXL deregisters.
 * Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_SHUT_DOWN,
 * NIXL_ERR_REGION_UNKNOWN, NIXL_ERR_REGION_BUSY, NIXL_ERR_INTERNAL.
 */
int32_t nixlkv_deregister(struct nixlkv_engine_t *engine, const uint64_t *region_ids, uint64_t num_regions);

/**
 * Gives the blob that peers connect with: NIXL's metadata, the region table, the layout and the engine's instance,
 * checksummed and versioned. The engines' own control plane carries it. It is opaque, holds no secrets beyond
 * addresses, and goes out of date when regions are registered or deregistered.
 *
 * buffer: receives the blob; may be NULL when capacity is 0. capacity: its bytes. len: receives the blob's length, also
 * with NIXL_ERR_BUFFER_TOO_SMALL.
 * Any thread. May wait for a NIXL call that is under way.
 * Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_BUFFER_TOO_SMALL,
 * NIXL_ERR_SHUT_DOWN, NIXL_ERR_INTERNAL.
 */
int32_t nixlkv_export(struct nixlkv_engine_t *engine, void *buffer, uint64_t capacity, uint64_t *len);

/**
 * Connects a peer by the blob that its nixlkv_export gave. Both sides must connect each other; the order does not
 * matter, and rooms may be opened at once: they wait until the peer has connected back.
 *
 * What cannot be mapped is refused, naming both values: another wire version, cache dtype, region set, bytes per page
 * or slot. The same blob again gives the same peer. A newer blob of the same engine updates it. A blob of an engine
 * with the name of a connected one but another instance means that it restarted: it gets a new id, and the rooms of
 * the old one fail with NIXL_ERR_PEER_RESTARTED. A peer that was lost and still lives is connected again by itself, and
 * at once by this call. An engine that reaches nobody at the blob's address gets NIXL_ERR_PEER_LOST, unless the
 * process of a destroyed engine still lives there: then the rooms fail with it.
 *
 * blob, len: read during the call only; altered or truncated ones are refused. peer: receives the id on success, never
 * 0.
 * Any thread. May wait for a NIXL call that is under way, not for the peer.
 * Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_SHUT_DOWN, NIXL_ERR_PEER_SELF,
 * NIXL_ERR_PEER_BUSY, NIXL_ERR_METADATA_INVALID, NIXL_ERR_WIRE_VERSION, NIXL_ERR_DTYPE_DIFFERS,
 * NIXL_ERR_LAYOUT_DIFFERS, NIXL_ERR_PEER_STALE, NIXL_ERR_PEER_LOST, NIXL_ERR_INTERNAL.
 */
int32_t nixlkv_connect(struct nixlkv_engine_t *engine, const void *blob, uint64_t len, uint64_t *peer);

/**
 * Disconnects a peer and closes the connection. Refused with NIXL_ERR_PEER_BUSY while a room with it is not quiesced:
 * abort such rooms first.
 *
 * peer: the id that nixlkv_connect gave; it is not used again.
 * Any thread; never blocks.
 * Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_PEER_UNKNOWN, NIXL_ERR_PEER_BUSY, NIXL_ERR_INTERNAL.
 */
int32_t nixlkv_disconnect(struct nixlkv_engine_t *engine, uint64_t peer);

/**
 * Zeroes a state index list and sets its size.
 *
 * indices: the caller's struct. struct_size: sizeof(nixlkv_state_indices_t).
 * Any thread; never blocks. Errors: NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE.
 */
int32_t nixlkv_state_indices_init(struct nixlkv_state_indices_t *indices, uint32_t struct_size);

/**
 * Zeroes receive parameters and sets their size.
 *
 * params: the caller's struct. struct_size: sizeof(nixlkv_recv_params_t).
 * Any thread; never blocks. Errors: NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE.
 */
int32_t nixlkv_recv_params_init(struct nixlkv_recv_params_t *params, uint32_t struct_size);

/**
 * Zeroes a chunk and sets its size.
 *
 * chunk: the caller's struct. struct_size: sizeof(nixlkv_chunk_t).
 * Any thread; never blocks. Errors: NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE.
 */
int32_t nixlkv_chunk_init(struct nixlkv_chunk_t *chunk, uint32_t struct_size);

/**
 * Zeroes a room status and sets its size.
 *
 * status: the caller's struct. struct_size: sizeof(nixlkv_room_status_t).
 * Any thread; never blocks. Errors: NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE.
 */
int32_t nixlkv_room_status_init(struct nixlkv_room_status_t *status, uint32_t struct_size);

/**
 * Opens a room as its receiver: tells the senders where the request's KV, state and aux go.
 *
 * The pages and slots belong to the room until poll says that it is quiesced; a page or slot of another room that is
 * not quiesced is refused. The call checks and queues; a refused call changes nothing.
 *
 * params: read during the call only.
 * Any thread; never blocks.
 * Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE,
 * NIXL_ERR_SHUT_DOWN, NIXL_ERR_ROLE, NIXL_ERR_ROOM_IN_USE, NIXL_ERR_TOO_MANY_ROOMS, NIXL_ERR_PAGE_OUT_OF_RANGE,
 * NIXL_ERR_PAGE_DUPLICATE, NIXL_ERR_PAGE_IN_USE, NIXL_ERR_AUX_OUT_OF_RANGE, NIXL_ERR_AUX_UNEXPECTED,
 * NIXL_ERR_AUX_IN_USE, NIXL_ERR_STATE_OUT_OF_RANGE, NIXL_ERR_STATE_UNEXPECTED, NIXL_ERR_STATE_IN_USE,
 * NIXL_ERR_PEER_UNKNOWN, NIXL_ERR_PEER_DUPLICATE, NIXL_ERR_PEER_LOST, NIXL_ERR_PEER_DISCONNECTED (it has said goodbye),
 * NIXL_ERR_PEER_STALE, NIXL_ERR_LAYERS_INCOMPLETE, NIXL_ERR_LAYERS_OVERLAP, NIXL_ERR_INTERNAL.
 */
int32_t nixlkv_recv(struct nixlkv_engine_t *engine, const struct nixlkv_recv_params_t *params);

/**
 * Sends a chunk of a room: queues it, and returns. The first chunk opens the room on this side; it may come before the
 * receiver's grant and waits then, for at most the engine's grant_timeout_ms. With the last chunk go the aux slot and
 * the state slots. Chunks may be sent in any order of page_offset; the last must leave no page unsent.
 *
 * Everything that can be checked is checked before anything moves: a refused call leaves the room as it was, and the
 * corrected call succeeds.
 *
 * chunk: read during the call only.
 * Any thread; never blocks.
 * Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE,
 * NIXL_ERR_SHUT_DOWN, NIXL_ERR_ROLE, NIXL_ERR_ROOM_IN_USE, NIXL_ERR_ROOM_ENDED (poll tells why),
 * NIXL_ERR_TOO_MANY_ROOMS, NIXL_ERR_QUEUE_FULL, NIXL_ERR_PAGE_OUT_OF_RANGE, NIXL_ERR_PAGE_OVERLAP,
 * NIXL_ERR_PAGE_COUNT, NIXL_ERR_PAGES_INCOMPLETE, NIXL_ERR_CHUNK_AFTER_LAST, NIXL_ERR_CHUNK_EMPTY,
 * NIXL_ERR_AUX_MISSING, NIXL_ERR_AUX_OUT_OF_RANGE, NIXL_ERR_AUX_NOT_OWNER, NIXL_ERR_AUX_UNEXPECTED,
 * NIXL_ERR_STATE_MISSING, NIXL_ERR_STATE_OUT_OF_RANGE, NIXL_ERR_STATE_COUNT, NIXL_ERR_STATE_UNEXPECTED,
 * NIXL_ERR_INTERNAL. What only the grant can tell is checked when it comes, and fails the room on both sides with the
 * same codes.
 */
int32_t nixlkv_send_chunk(struct nixlkv_engine_t *engine, const struct nixlkv_chunk_t *chunk);

/**
 * Tells how a room stands. On a prefill engine a room that a receiver has granted shows as
 * NIXLKV_ROOM_WAITING_FOR_INPUT before its first chunk.
 *
 * status: set up by nixlkv_room_status_init; written on success only.
 * Any thread; never blocks.
 * Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE,
 * NIXL_ERR_ROOM_UNKNOWN, NIXL_ERR_INTERNAL.
 */
int32_t nixlkv_poll(const struct nixlkv_engine_t *engine, uint64_t room, struct nixlkv_room_status_t *status);

/**
 * Waits until rooms have ended, in success or failure; poll tells which.
 *
 * rooms: num_rooms rooms that are open here. flags: NIXLKV_WAIT_ALL, or NIXLKV_WAIT_ANY and NIXLKV_WAIT_QUIESCED
 * or-ed. timeout_ms: most milliseconds to wait; 0 looks once.
 * Any thread. Blocks for at most timeout_ms.
 * Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_ROOM_UNKNOWN,
 * NIXL_ERR_WAIT_TIMEOUT, NIXL_ERR_SHUT_DOWN (the engine was destroyed meanwhile), NIXL_ERR_INTERNAL.
 */
int32_t nixlkv_wait(const struct nixlkv_engine_t *engine,
                    const uint64_t *rooms,
                    uint64_t num_rooms,
                    uint32_t flags,
                    uint64_t timeout_ms);

/**
 * Gives a room up: it fails with NIXL_ERR_ABORTED, and so does the other side's within a round trip. Its memory may be
 * touched until poll says that it is quiesced. A room that has ended is left as it is. A prefill engine may abort a
 * room that it has not opened: that opens it as failed, and a grant that comes for it is answered with the failure.
 *
 * reason: text for the other side's error_text, or NULL. Read during the call only.
 * Any thread; never blocks.
 * Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_SHUT_DOWN,
 * NIXL_ERR_ROOM_UNKNOWN, NIXL_ERR_TOO_MANY_ROOMS, NIXL_ERR_INTERNAL.
 */
int32_t nixlkv_abort(struct nixlkv_engine_t *engine, uint64_t room, const char *reason);

/**
 * Forgets a room that has ended and is quiesced. Its id may be used again once every engine that takes part had opened it
 * and has released it. Otherwise the next life may meet what is left of this one: at a sender that had not opened the
 * room, a receiver's abort (poll shows it for up to room_timeout_ms; releasing the room forgets it) or the grant of a
 * receiver that has died unnoticed; at a receiver that had not, the sender's failure (for up to grant_timeout_ms).
 *
 * Any thread; never blocks.
 * Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_ROOM_UNKNOWN, NIXL_ERR_ROOM_ACTIVE,
 * NIXL_ERR_NOT_QUIESCED (its text says what is pending), NIXL_ERR_INTERNAL.
 */
int32_t nixlkv_release(struct nixlkv_engine_t *engine,
                       uint64_t room);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* NIXLKV_H */
