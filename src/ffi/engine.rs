//! The engine object: configuration, create, shutdown, destroy, information.

use std::ffi::{c_char, c_void};
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::engine::{Config, Engine, ROLE_DECODE, ROLE_PREFILL};
use crate::error::*;
use crate::metrics;

use super::guard::{c_string, guard};
use super::handle;
use super::params::{self, Sized32};

/// Role of an engine: it sends.
pub const NIXLKV_ROLE_PREFILL: u32 = 1;
/// Role of an engine: it receives.
pub const NIXLKV_ROLE_DECODE: u32 = 2;
/// Role of an engine: it sends and receives.
pub const NIXLKV_ROLE_BOTH: u32 = 3;

/// Log level: nothing.
pub const NIXLKV_LOG_OFF: u32 = 0;
/// Log level: errors.
pub const NIXLKV_LOG_ERROR: u32 = 1;
/// Log level: errors and warnings.
pub const NIXLKV_LOG_WARN: u32 = 2;
/// Log level: also what an operator may want to know.
pub const NIXLKV_LOG_INFO: u32 = 3;
/// Log level: also what helps to find a fault.
pub const NIXLKV_LOG_DEBUG: u32 = 4;
/// Log level: everything.
pub const NIXLKV_LOG_TRACE: u32 = 5;

/// An engine: one NIXL agent, its registered memory, its peers and rooms. A process may have several.
///
/// Opaque; made by nixlkv_engine_create, ended by nixlkv_engine_destroy. All functions that take it may be called from
/// any thread at any time; a handle that is NULL, destroyed or never given out is refused with
/// NIXL_ERR_INVALID_HANDLE. In the child of a fork every call is refused with NIXL_ERR_FORKED.
pub struct nixlkv_engine_t {
    _private: [u8; 0],
}

/// Receives log lines: user_data as configured, the level (NIXLKV_LOG_ERROR to NIXLKV_LOG_TRACE) and one line without
/// a newline, valid during the call. It is called from a thread of the library's own, one line at a time; it may call
/// any function of the library, and must not throw or longjmp. It is not called any more once nixlkv_engine_destroy has
/// returned, unless it destroyed the engine itself.
pub type nixlkv_log_callback_t =
    Option<unsafe extern "C" fn(user_data: *mut c_void, level: u32, message: *const c_char)>;

/// A key with its value, both NUL-terminated UTF-8.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nixlkv_param_t {
    /// The key.
    pub key: *const c_char,
    /// The value.
    pub value: *const c_char,
}

/// How to create an engine. Set up by nixlkv_engine_config_init; every zero means the default. Everything it points to
/// is copied by nixlkv_engine_create.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nixlkv_engine_config_t {
    /// sizeof(nixlkv_engine_config_t) of the caller.
    pub struct_size: u32,
    /// NIXLKV_ROLE_*. No default.
    pub role: u32,
    /// The engine's name in messages; an engine that restarts under the name of an earlier one replaces it at its
    /// peers, so it must be unique among live engines. At most 255 bytes. NULL: 128 random bits in hex.
    pub name: *const c_char,
    /// Path of libnixl_capi.so. NULL: the environment's NIXLKV_NIXL_LIBRARY, then the dynamic linker, then the nixl_cu12
    /// or nixl_cu13 wheel of the active Python environment.
    pub nixl_library: *const c_char,
    /// NIXL's backend. NULL: "UCX".
    pub backend: *const c_char,
    /// The backend's parameters. A key that starts with UCX_ becomes a setting of UCX for this engine, as if it stood in
    /// the environment, which has precedence; others go to NIXL's backend as they are.
    pub backend_params: *const nixlkv_param_t,
    /// Entries of backend_params.
    pub num_backend_params: u64,
    /// A tag for the element type of the cache, such as "bf16" or "fp8_e4m3"; compared with the peers'. NULL: "".
    pub cache_dtype: *const c_char,
    /// Transfer threads. 0: 1. At most 64.
    pub num_workers: u32,
    /// Most chunks that nixlkv_send_chunk has accepted and that have not settled; more is NIXL_ERR_QUEUE_FULL. Of 64 or
    /// more a quarter is kept for others when one of several peers has taken the rest. 0: 4096.
    pub queue_depth: u32,
    /// Most rooms open at a time, ended ones included until they are released; more is NIXL_ERR_TOO_MANY_ROOMS.
    /// 0: 65536.
    pub max_rooms: u32,
    /// NIXLKV_LOG_*: the most verbose level that reaches log_callback. 0: nothing.
    pub log_level: u32,
    /// Receives log lines. NULL: nobody does. The library never writes to stdout or stderr.
    pub log_callback: nixlkv_log_callback_t,
    /// Handed to log_callback. Must stay valid until nixlkv_engine_destroy has returned.
    pub log_user_data: *mut c_void,
    /// Most milliseconds that nixlkv_engine_create may take. 0: 30000.
    pub create_timeout_ms: u64,
    /// Milliseconds that a receiving room waits for its senders to have connected back. 0: 10000.
    pub connect_timeout_ms: u64,
    /// Milliseconds that a sending room's chunks wait for the decode side's grant. 0: 60000.
    pub grant_timeout_ms: u64,
    /// Milliseconds that a room may go without progress before it fails. 0: 300000.
    pub room_timeout_ms: u64,
    /// Milliseconds between heartbeats to each peer. 0: 1000.
    pub heartbeat_interval_ms: u64,
    /// Milliseconds of silence after which a peer counts as lost. 0: 5000.
    pub liveness_limit_ms: u64,
    /// Milliseconds that one posted transfer (at most 8 MiB, or one page) may take before its room fails with
    /// NIXL_ERR_XFER_STALLED; its pages stay with the room until the transport lets go of them. 0: 60000.
    pub stall_timeout_ms: u64,
}

// SAFETY: see Sized32; the sizes and offsets are asserted in tests/abi.rs.
unsafe impl Sized32 for nixlkv_engine_config_t {}

/// What NIXL is made of here. The pointers belong to the engine and live until it is destroyed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nixlkv_nixl_info_t {
    /// sizeof(nixlkv_nixl_info_t) of the caller.
    pub struct_size: u32,
    /// Entries of plugins.
    pub num_plugins: u32,
    /// Path of the libnixl_capi.so that is loaded.
    pub nixl_library: *const c_char,
    /// The backend that is running.
    pub backend: *const c_char,
    /// The plugins that NIXL found.
    pub plugins: *const *const c_char,
    /// The backend's parameters as it runs with them.
    pub backend_params: *const nixlkv_param_t,
    /// Entries of backend_params.
    pub num_backend_params: u64,
}

// SAFETY: see Sized32.
unsafe impl Sized32 for nixlkv_nixl_info_t {}

/// Counters since the engine was created. Each is exact; together they are not one moment's snapshot.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nixlkv_stats_t {
    /// sizeof(nixlkv_stats_t) of the caller.
    pub struct_size: u32,
    /// Zero.
    pub reserved: u32,
    /// Rooms opened here.
    pub rooms_opened: u64,
    /// Rooms that succeeded.
    pub rooms_succeeded: u64,
    /// Rooms that failed.
    pub rooms_failed: u64,
    /// Rooms that have not ended, now.
    pub rooms_active: u64,
    /// Rooms whose memory something may still touch, now: active ones, and failed ones that have not drained.
    pub rooms_unquiesced: u64,
    /// Chunks accepted and not settled, now.
    pub chunks_pending: u64,
    /// Chunks that have settled, counted for each receiver.
    pub chunks_sent: u64,
    /// Bytes that landed at peers.
    pub bytes_sent: u64,
    /// Descriptors posted to NIXL.
    pub descriptors_sent: u64,
    /// Transfers posted to NIXL.
    pub transfers_posted: u64,
    /// Transfers in progress, now.
    pub transfers_in_flight: u64,
    /// Transfers that failed.
    pub transfers_failed: u64,
    /// Control messages sent.
    pub messages_sent: u64,
    /// Control messages received, dropped ones included.
    pub messages_received: u64,
    /// Dropped: truncated, altered, of another wire version, or out of bounds.
    pub messages_malformed: u64,
    /// Dropped: from an engine that is not connected.
    pub messages_unknown_peer: u64,
    /// Dropped: for a room that is not open here.
    pub messages_unknown_room: u64,
    /// Dropped: of an earlier life of a room or a peer.
    pub messages_stale: u64,
    /// Dropped: counted before.
    pub messages_duplicate: u64,
    /// Control messages not sent because too many to one peer waited. What matters of them is asked for again.
    pub messages_dropped: u64,
}

// SAFETY: see Sized32.
unsafe impl Sized32 for nixlkv_stats_t {}

/// What an operator asks when something seems to hang: all of it is of this moment.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nixlkv_health_t {
    /// sizeof(nixlkv_health_t) of the caller.
    pub struct_size: u32,
    /// Zero.
    pub reserved: u32,
    /// Milliseconds since the oldest transfer in progress was posted; 0: none is. Up to 20 ms late.
    pub oldest_transfer_ms: u64,
    /// The room of the oldest transfer in progress.
    pub oldest_transfer_room: u64,
    /// Peers that are connected, lost ones included.
    pub num_peers: u64,
    /// Peers that have missed two heartbeats and are not lost.
    pub num_peers_suspect: u64,
    /// Peers that have been silent for longer than the liveness limit and whose connection is still open.
    pub num_peers_silent: u64,
    /// Peers whose connection broke.
    pub num_peers_lost: u64,
    /// Rooms that have failed and are not quiesced.
    pub num_rooms_quarantined: u64,
    /// Destination pages of such rooms.
    pub num_pages_quarantined: u64,
    /// Grants that wait for the first chunk of their room.
    pub num_grants_parked: u64,
    /// Connections that close when the last transfer on them has settled.
    pub num_connections_closing: u64,
}

// SAFETY: see Sized32.
unsafe impl Sized32 for nixlkv_health_t {}

/// Zeroes a configuration and sets its size.
///
/// config: the caller's struct. struct_size: sizeof(nixlkv_engine_config_t).
/// Any thread; never blocks. Errors: NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE.
///
/// # Safety
///
/// C contract: config points to struct_size writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_engine_config_init(config: *mut nixlkv_engine_config_t, struct_size: u32) -> i32 {
    // SAFETY: the caller's promise.
    guard(|| unsafe { params::init(config, struct_size, "config") })
}

/// Zeroes an information struct and sets its size.
///
/// info: the caller's struct. struct_size: sizeof(nixlkv_nixl_info_t).
/// Any thread; never blocks. Errors: NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE.
///
/// # Safety
///
/// C contract: info points to struct_size writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_nixl_info_init(info: *mut nixlkv_nixl_info_t, struct_size: u32) -> i32 {
    // SAFETY: the caller's promise.
    guard(|| unsafe { params::init(info, struct_size, "info") })
}

/// Zeroes a counter struct and sets its size.
///
/// stats: the caller's struct. struct_size: sizeof(nixlkv_stats_t).
/// Any thread; never blocks. Errors: NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE.
///
/// # Safety
///
/// C contract: stats points to struct_size writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_stats_init(stats: *mut nixlkv_stats_t, struct_size: u32) -> i32 {
    // SAFETY: the caller's promise.
    guard(|| unsafe { params::init(stats, struct_size, "stats") })
}

fn or<T: PartialEq + Default>(value: T, default: T) -> T {
    if value == T::default() { default } else { value }
}

const MAX_NAME: usize = 255;
const MAX_WORKERS: u32 = 64;

/// # Safety
///
/// The pointers in `raw` are as nixlkv_engine_config_t says.
unsafe fn config_from_c(raw: &nixlkv_engine_config_t) -> Result<Config> {
    if !matches!(raw.role, NIXLKV_ROLE_PREFILL..=NIXLKV_ROLE_BOTH) {
        fail!(NIXL_ERR_INVALID_ARGUMENT, "config: role is {}, not one of NIXLKV_ROLE_*", raw.role);
    }
    if raw.log_level > NIXLKV_LOG_TRACE {
        fail!(NIXL_ERR_INVALID_ARGUMENT, "config: log_level is {}, the most is {NIXLKV_LOG_TRACE}", raw.log_level);
    }
    if raw.num_workers > MAX_WORKERS {
        fail!(NIXL_ERR_INVALID_ARGUMENT, "config: num_workers is {}, the most is {MAX_WORKERS}", raw.num_workers);
    }
    const { assert!(NIXLKV_ROLE_PREFILL == ROLE_PREFILL && NIXLKV_ROLE_DECODE == ROLE_DECODE) };
    // SAFETY: the caller's promise, for each string and the list.
    let (name, nixl_library, backend, cache_dtype, list) = unsafe {
        (
            params::text(raw.name, "config: name")?,
            params::text(raw.nixl_library, "config: nixl_library")?,
            params::text(raw.backend, "config: backend")?,
            params::text(raw.cache_dtype, "config: cache_dtype")?,
            params::list(raw.backend_params, raw.num_backend_params, "config: backend_params")?,
        )
    };
    let mut backend_params = Vec::new();
    for (i, param) in list.iter().enumerate() {
        // SAFETY: the caller's promise.
        let (key, value) =
            unsafe { (params::text(param.key, "a backend parameter's key")?, params::text(param.value, "its value")?) };
        let (Some(key), Some(value)) = (key, value) else {
            fail!(NIXL_ERR_INVALID_ARGUMENT, "config: backend_params[{i}] has a NULL key or value");
        };
        backend_params.push((key, value));
    }
    for (what, text) in [("name", &name), ("cache_dtype", &cache_dtype), ("backend", &backend)] {
        if text.as_ref().is_some_and(|text| text.len() > MAX_NAME) {
            fail!(NIXL_ERR_INVALID_ARGUMENT, "config: {what} is longer than {MAX_NAME} bytes");
        }
    }
    if name.as_deref() == Some("") || backend.as_deref() == Some("") {
        fail!(NIXL_ERR_INVALID_ARGUMENT, "config: name or backend is empty; NULL means the default");
    }
    let heartbeat_interval = or(raw.heartbeat_interval_ms, 1000);
    let liveness_limit = or(raw.liveness_limit_ms, 5000);
    if liveness_limit <= heartbeat_interval {
        fail!(
            NIXL_ERR_INVALID_ARGUMENT,
            "config: liveness_limit_ms ({liveness_limit}) must be above heartbeat_interval_ms ({heartbeat_interval})"
        );
    }
    Ok(Config {
        role: raw.role,
        name,
        nixl_library,
        backend: backend.unwrap_or_else(|| "UCX".into()),
        backend_params,
        cache_dtype: cache_dtype.unwrap_or_default(),
        num_workers: or(raw.num_workers, 1) as usize,
        queue_depth: u64::from(or(raw.queue_depth, 4096)),
        max_rooms: or(raw.max_rooms, 65536) as usize,
        log: raw
            .log_callback
            .map(|callback| (callback as metrics::LogCallback, raw.log_user_data as usize, raw.log_level)),
        create_timeout: or(raw.create_timeout_ms, 30_000),
        connect_timeout: or(raw.connect_timeout_ms, 10_000),
        grant_timeout: or(raw.grant_timeout_ms, 60_000),
        room_timeout: or(raw.room_timeout_ms, 300_000),
        heartbeat_interval,
        liveness_limit,
        stall_timeout: or(raw.stall_timeout_ms, 60_000),
    })
}

/// Creates an engine: finds and loads NIXL, starts the backend and the threads.
///
/// config: read during the call only. engine: receives the handle on success, is left alone otherwise.
/// Any thread. Blocks for at most the configuration's create_timeout_ms. After an error the process is as before, and
/// another attempt may succeed when the cause is gone.
/// Errors: NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE, NIXL_ERR_FORKED, NIXL_ERR_LIBRARY_NOT_FOUND,
/// NIXL_ERR_LIBRARY_INVALID, NIXL_ERR_SYMBOL_MISSING, NIXL_ERR_PLUGIN_NOT_FOUND, NIXL_ERR_PLUGIN_INVALID,
/// NIXL_ERR_BACKEND_FAILED, NIXL_ERR_CREATE_TIMEOUT, NIXL_ERR_INTERNAL.
///
/// # Safety
///
/// C contract: config points to a nixlkv_engine_config_t as described, engine to a writable pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_engine_create(
    config: *const nixlkv_engine_config_t,
    engine: *mut *mut nixlkv_engine_t,
) -> i32 {
    guard(|| {
        handle::check_process()?;
        params::output(engine, "engine")?;
        // SAFETY: the caller's promise.
        let config = unsafe { config_from_c(&params::read(config, "config")?)? };
        let created = Engine::create(config)?;
        handle::watch_process();
        // SAFETY: checked for NULL and alignment; the caller promises it is writable.
        unsafe { engine.write(handle::insert(created)) };
        Ok(())
    })
}

/// Shuts an engine down in good order: refuses new work, fails every room that has not ended (the peers are told), and
/// waits until nothing is in flight and every sending peer has confirmed that it drained. Poll, wait, release and stats
/// go on working; so does shutting down again, to wait longer.
///
/// timeout_ms: most milliseconds to wait.
/// Any thread. Blocks for at most timeout_ms.
/// Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_DRAIN_TIMEOUT (its text says what is pending),
/// NIXL_ERR_INTERNAL.
///
/// # Safety
///
/// C contract: none beyond the types.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_engine_shutdown(engine: *mut nixlkv_engine_t, timeout_ms: u64) -> i32 {
    guard(|| handle::get(engine)?.shutdown(Duration::from_millis(timeout_ms)))
}

/// Destroys an engine: its rooms, peers, registrations and threads. NULL, destroyed and foreign handles are ignored.
/// Registered memory may be freed when it returns, if nixlkv_engine_shutdown has succeeded before; otherwise it waits
/// up to a second for transfers in progress, and leaves what is still moving then registered for good rather than free
/// it under the transfer: such memory must not be reused.
///
/// Any thread; a call on the engine that is in progress in another thread ends with an error. Blocks for at most about
/// two seconds. In the child of a fork it does nothing.
///
/// # Safety
///
/// C contract: none beyond the types.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_engine_destroy(engine: *mut nixlkv_engine_t) {
    guard(|| {
        handle::check_process()?;
        if let Some(engine) = handle::remove(engine) {
            engine.close();
        }
        Ok(())
    });
}

/// Tells which NIXL library is loaded, which plugins it found, and the parameters its backend runs with.
///
/// info: set up by nixlkv_nixl_info_init; written on success only. The pointers in it live until the engine is
/// destroyed.
/// Any thread; never blocks.
/// Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE, NIXL_ERR_INTERNAL.
///
/// # Safety
///
/// C contract: info points to a nixlkv_nixl_info_t of its struct_size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_nixl_info(engine: *const nixlkv_engine_t, info: *mut nixlkv_nixl_info_t) -> i32 {
    guard(|| {
        let engine = handle::get(engine)?;
        let shared = engine.shared();
        let strings = engine.info.get_or_init(|| {
            let agent = &shared.agent;
            InfoStrings::new(&shared.nixl_library, &shared.config.backend, agent.plugins(), agent.backend_params())
        });
        let value = nixlkv_nixl_info_t {
            struct_size: 0,
            num_plugins: strings.plugins.len() as u32,
            nixl_library: strings.nixl_library.as_ptr(),
            backend: strings.backend.as_ptr(),
            plugins: strings.plugins.as_ptr(),
            backend_params: strings.params.as_ptr(),
            num_backend_params: strings.params.len() as u64,
        };
        // SAFETY: the caller's promise.
        unsafe { params::write(info, &value, "info") }
    })
}

/// Reads the engine's counters.
///
/// stats: set up by nixlkv_stats_init; written on success only.
/// Any thread; never blocks.
/// Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE, NIXL_ERR_INTERNAL.
///
/// # Safety
///
/// C contract: stats points to a nixlkv_stats_t of its struct_size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_stats(engine: *const nixlkv_engine_t, stats: *mut nixlkv_stats_t) -> i32 {
    guard(|| {
        let engine = handle::get(engine)?;
        let shared = engine.shared();
        let (active, unquiesced, pending) = {
            let tables = shared.tables();
            (tables.num_active as u64, tables.num_unquiesced as u64, tables.num_pending)
        };
        let counters = &shared.counters;
        let read = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        // Settled is read first, so that a transfer between the two reads does not make the difference negative.
        let settled = read(&counters.transfers_settled);
        let posted = read(&counters.transfers_posted);
        let value = nixlkv_stats_t {
            struct_size: 0,
            reserved: 0,
            rooms_opened: read(&counters.rooms_opened),
            rooms_succeeded: read(&counters.rooms_succeeded),
            rooms_failed: read(&counters.rooms_failed),
            rooms_active: active,
            rooms_unquiesced: unquiesced,
            chunks_pending: pending,
            chunks_sent: read(&counters.chunks_sent),
            bytes_sent: read(&counters.bytes_sent),
            descriptors_sent: read(&counters.descriptors_sent),
            transfers_posted: posted,
            transfers_in_flight: posted.saturating_sub(settled),
            transfers_failed: read(&counters.transfers_failed),
            messages_sent: read(&counters.messages_sent),
            messages_received: read(&counters.messages_received),
            messages_malformed: read(&counters.messages_malformed),
            messages_unknown_peer: read(&counters.messages_unknown_peer),
            messages_unknown_room: read(&counters.messages_unknown_room),
            messages_stale: read(&counters.messages_stale),
            messages_duplicate: read(&counters.messages_duplicate),
            messages_dropped: read(&counters.messages_dropped),
        };
        // SAFETY: the caller's promise.
        unsafe { params::write(stats, &value, "stats") }
    })
}

/// Zeroes a health struct and sets its size.
///
/// health: the caller's struct. struct_size: sizeof(nixlkv_health_t).
/// Any thread; never blocks. Errors: NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE.
///
/// # Safety
///
/// C contract: health points to struct_size writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_health_init(health: *mut nixlkv_health_t, struct_size: u32) -> i32 {
    // SAFETY: the caller's promise.
    guard(|| unsafe { params::init(health, struct_size, "health") })
}

/// Tells what may be stuck: the oldest transfer in progress, suspected and silent peers, quarantined pages.
///
/// health: set up by nixlkv_health_init; written on success only.
/// Any thread; never blocks.
/// Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE, NIXL_ERR_INTERNAL.
///
/// # Safety
///
/// C contract: health points to a nixlkv_health_t of its struct_size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_health(engine: *const nixlkv_engine_t, health: *mut nixlkv_health_t) -> i32 {
    guard(|| {
        let now = handle::get(engine)?.health();
        let value = nixlkv_health_t {
            struct_size: 0,
            reserved: 0,
            oldest_transfer_ms: now.oldest_transfer,
            oldest_transfer_room: now.oldest_room,
            num_peers: now.peers,
            num_peers_suspect: now.peers_suspect,
            num_peers_silent: now.peers_silent,
            num_peers_lost: now.peers_lost,
            num_rooms_quarantined: now.rooms_quarantined,
            num_pages_quarantined: now.pages_quarantined,
            num_grants_parked: now.grants_parked,
            num_connections_closing: now.connections_closing,
        };
        // SAFETY: the caller's promise.
        unsafe { params::write(health, &value, "health") }
    })
}

/// The strings behind nixlkv_nixl_info_t, made once an engine.
pub(super) struct InfoStrings {
    nixl_library: std::ffi::CString,
    backend: std::ffi::CString,
    plugins: Vec<*const c_char>,
    params: Vec<nixlkv_param_t>,
    _owned: Vec<std::ffi::CString>,
}

// SAFETY: the pointers point into `_owned`, which never changes.
unsafe impl Send for InfoStrings {}
// SAFETY: as above.
unsafe impl Sync for InfoStrings {}

impl InfoStrings {
    /// Collects them.
    fn new(nixl_library: &str, backend: &str, plugins: &[String], params: &[(String, String)]) -> Self {
        let mut owned: Vec<std::ffi::CString> = plugins.iter().map(|plugin| c_string(plugin)).collect();
        let plugin_pointers = owned.iter().map(|plugin| plugin.as_ptr()).collect();
        let mut pairs = Vec::new();
        for (key, value) in params {
            let (key, value) = (c_string(key), c_string(value));
            // A CString's bytes stay where they are when it moves.
            pairs.push(nixlkv_param_t { key: key.as_ptr(), value: value.as_ptr() });
            owned.extend([key, value]);
        }
        Self {
            nixl_library: c_string(nixl_library),
            backend: c_string(backend),
            plugins: plugin_pointers,
            params: pairs,
            _owned: owned,
        }
    }
}
