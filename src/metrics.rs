//! Counters, and the bridge from the `log` crate to the host's callback.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

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
    /// Dropped: too many to one peer waited to be sent.
    pub messages_dropped: AtomicU64,
}

/// Adds one.
pub fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Lines of one peer and code that are logged in [`WINDOW`] each; of the others only the number.
const MAX_LINES_PER_WINDOW: u64 = 10;
/// In milliseconds.
const WINDOW: u64 = 60_000;
/// Peers and codes that are told apart.
const MAX_WINDOWS: usize = 1024;

/// Keeps lines that may come by the thousand from filling the log. Pure: time comes in as a value.
#[derive(Debug, Clone, Default)]
pub struct LineLimit {
    /// By peer and code: when the window began, lines in it.
    windows: HashMap<(u64, i32), (u64, u64)>,
}

impl LineLimit {
    /// Whether one more line of this peer and code may be logged now.
    pub fn admits(&mut self, (peer, code): (u64, i32), now: u64) -> bool {
        if self.windows.len() >= MAX_WINDOWS && !self.windows.contains_key(&(peer, code)) {
            return false;
        }
        let (_, lines) = self.windows.entry((peer, code)).or_insert((now, 0));
        *lines += 1;
        *lines <= MAX_LINES_PER_WINDOW
    }

    /// Ends the windows that are over, with one line for each that had more lines than were logged.
    pub fn tick(&mut self, now: u64) {
        self.windows.retain(|(peer, code), (since, lines)| {
            let over = now.saturating_sub(*since) >= WINDOW;
            if over && *lines > MAX_LINES_PER_WINDOW {
                let name = crate::error::status_entry(*code).map_or("?", |entry| entry.name);
                log::info!("peer {peer}, {name}: {} more lines like these", *lines - MAX_LINES_PER_WINDOW);
            }
            !over
        });
    }
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

/// Lines on their way, and who wants them. A thread of its own delivers: a callback may call any function of the
/// library, and lines come from places where locks are held.
struct Logger {
    sinks: Vec<Sink>,
    lines: VecDeque<(u32, String)>,
    delivering: bool,
    thread: Option<ThreadId>,
}

static LOGGER: Mutex<Logger> =
    Mutex::new(Logger { sinks: Vec::new(), lines: VecDeque::new(), delivering: false, thread: None });
static CHANGED: Condvar = Condvar::new();
static MOST_VERBOSE: AtomicU32 = AtomicU32::new(0);

/// Most lines on their way; what comes on top is dropped.
const MAX_LINES: usize = 1024;
/// How long removing a callback waits for lines on their way.
const FLUSH: Duration = Duration::from_secs(1);

fn logger() -> MutexGuard<'static, Logger> {
    LOGGER.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Bridge;

impl log::Log for Bridge {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() as u32 <= MOST_VERBOSE.load(Ordering::Relaxed)
    }

    fn log(&self, record: &log::Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let mut line = format!("{}: {}", record.target(), record.args()).replace(['\0', '\n'], " ");
        line.push('\0');
        let mut logger = logger();
        if logger.lines.len() < MAX_LINES {
            logger.lines.push_back((record.level() as u32, line));
            CHANGED.notify_all();
        }
    }

    fn flush(&self) {}
}

/// The body of the delivering thread; it ends when nobody listens any more.
fn deliver() {
    let mut state = logger();
    loop {
        if state.sinks.is_empty() {
            state.lines.clear();
            state.thread = None;
            CHANGED.notify_all();
            return;
        }
        let Some((level, line)) = state.lines.pop_front() else {
            CHANGED.notify_all();
            state = CHANGED.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        state.delivering = true;
        let sinks: Vec<Sink> = state.sinks.iter().filter(|sink| level <= sink.level).copied().collect();
        drop(state);
        for sink in sinks {
            // SAFETY: the line ends in NUL, and `remove_sink` waits for a delivery that is in progress.
            #[allow(unsafe_code)]
            unsafe {
                (sink.callback)(sink.user_data, level, line.as_ptr().cast());
            }
        }
        state = logger();
        state.delivering = false;
    }
}

/// Adds an engine's callback and gives its id. When the host program, being Rust itself, has set a logger of its own,
/// ours is not installed and lines go there instead.
pub fn add_sink(level: u32, callback: LogCallback, user_data: *mut std::ffi::c_void) -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut state = logger();
    state.sinks.push(Sink { id, level, callback, user_data });
    if state.thread.is_none()
        && let Ok(handle) = std::thread::Builder::new().name("nixlkv-log".into()).spawn(deliver)
    {
        state.thread = Some(handle.thread().id());
    }
    refresh(&state.sinks);
    id
}

/// Removes an engine's callback, after the lines on their way have been delivered; it is not called again. From within
/// a callback it does not wait.
pub fn remove_sink(id: u64) {
    let deadline = Instant::now() + FLUSH;
    let mut state = logger();
    let inside = state.thread == Some(std::thread::current().id());
    while !inside && state.thread.is_some() && (state.delivering || !state.lines.is_empty()) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        state = CHANGED.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
    }
    state.sinks.retain(|sink| sink.id != id);
    refresh(&state.sinks);
    CHANGED.notify_all();
    // With the last callback the thread goes too.
    while !inside && state.sinks.is_empty() && state.thread.is_some() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        state = CHANGED.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
    }
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
