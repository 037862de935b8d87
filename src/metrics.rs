//! Counters, and the bridge from the `log` crate to the host's callback.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Counters of one engine. They only ever grow; a reader sees each of them, not a snapshot of all.
#[derive(Debug, Default)]
pub struct Counters {
    /// Rooms opened on this side.
    pub rooms_opened: AtomicU64,
    /// Rooms that ended in success.
    pub rooms_succeeded: AtomicU64,
    /// Rooms that failed.
    pub rooms_failed: AtomicU64,
    /// Chunks whose transfers have settled.
    pub chunks_sent: AtomicU64,
    /// Bytes that landed at peers.
    pub bytes_sent: AtomicU64,
    /// Descriptors posted.
    pub descriptors_sent: AtomicU64,
    /// Transfers posted.
    pub transfers_posted: AtomicU64,
    /// Transfers that have settled.
    pub transfers_settled: AtomicU64,
    /// Transfers that failed, while posting or later.
    pub transfers_failed: AtomicU64,
    /// Control messages sent.
    pub messages_sent: AtomicU64,
    /// Control messages received.
    pub messages_received: AtomicU64,
    /// Dropped: not a message of ours.
    pub messages_malformed: AtomicU64,
    /// Dropped: from an agent that is not connected.
    pub messages_unknown_peer: AtomicU64,
    /// Dropped: for a room that is not open here.
    pub messages_unknown_room: AtomicU64,
    /// Dropped: of an earlier life of the room or of the peer.
    pub messages_stale: AtomicU64,
    /// Dropped: counted before.
    pub messages_duplicate: AtomicU64,
}

/// Adds one.
pub fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// The host's callback: user data, level (1 error to 5 trace), one NUL-terminated line.
pub type LogCallback = unsafe extern "C" fn(*mut std::ffi::c_void, u32, *const std::ffi::c_char);

#[derive(Clone, Copy)]
struct Sink {
    id: u64,
    level: u32,
    callback: LogCallback,
    user_data: *mut std::ffi::c_void,
}

// SAFETY: the host promises (nixlkv_engine_config_t) that its callback and user data may be used from any thread.
#[allow(unsafe_code)]
unsafe impl Send for Sink {}

static SINKS: Mutex<Vec<Sink>> = Mutex::new(Vec::new());
static MOST_VERBOSE: AtomicU32 = AtomicU32::new(0);

struct Bridge;

impl log::Log for Bridge {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() as u32 <= MOST_VERBOSE.load(Ordering::Relaxed)
    }

    fn log(&self, record: &log::Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let mut line = format!("{}: {}", record.target(), record.args()).replace('\0', " ");
        line.push('\0');
        // Called without the lock: a callback may create or destroy an engine.
        let sinks: Vec<Sink> = SINKS.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for sink in sinks.iter().filter(|sink| record.level() as u32 <= sink.level) {
            // SAFETY: the line ends in NUL, and the engine that owns the sink lives until `remove_sink`.
            #[allow(unsafe_code)]
            unsafe {
                (sink.callback)(sink.user_data, record.level() as u32, line.as_ptr().cast());
            }
        }
    }

    fn flush(&self) {}
}

/// Adds an engine's callback and gives its id. When the host program, being Rust itself, has set a logger of its own, ours is not
/// installed and lines go there instead.
pub fn add_sink(level: u32, callback: LogCallback, user_data: *mut std::ffi::c_void) -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut sinks = SINKS.lock().unwrap_or_else(PoisonError::into_inner);
    sinks.push(Sink { id, level, callback, user_data });
    refresh(&sinks);
    id
}

/// Removes an engine's callback. A line that is being delivered on another thread may still arrive.
pub fn remove_sink(id: u64) {
    let mut sinks = SINKS.lock().unwrap_or_else(PoisonError::into_inner);
    sinks.retain(|sink| sink.id != id);
    refresh(&sinks);
}

fn refresh(sinks: &[Sink]) {
    static INSTALLED: std::sync::Once = std::sync::Once::new();
    static OURS: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
    INSTALLED.call_once(|| OURS.store(log::set_logger(&Bridge).is_ok(), Ordering::Relaxed));
    let level = sinks.iter().map(|sink| sink.level).max().unwrap_or(0);
    MOST_VERBOSE.store(level, Ordering::Relaxed);
    if OURS.load(Ordering::Relaxed) {
        log::set_max_level(match level {
            0 => log::LevelFilter::Off,
            1 => log::LevelFilter::Error,
            2 => log::LevelFilter::Warn,
            3 => log::LevelFilter::Info,
            4 => log::LevelFilter::Debug,
            _ => log::LevelFilter::Trace,
        });
    }
}
