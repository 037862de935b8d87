//! Keeps the host's stdout and stderr clean: UCX logs to stdout, NIXL to stderr. UCX's lines go to the `log` crate
//! and, while an agent is being opened, to the text of its error.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::panic::catch_unwind;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use libloading::os::unix::{Library as Handle, RTLD_NOW};

use super::elf;
use super::library::Library;
use super::process::loaded_file;

/// Where UCX's lines go.
const TARGET: &str = "nixlkv::ucx";
/// A line's longest text; the rest is cut.
const MAX_LINE: usize = 512;
/// Lines kept for one error text.
const MAX_CAPTURED: usize = 16;

/// Warnings and errors of one place that are logged in a [`WINDOW`].
const MAX_LINES_PER_WINDOW: u32 = 10;
const WINDOW: Duration = Duration::from_secs(60);
/// By line number: when the window began, lines in it. UCX has some thousand such places.
static PLACES: Mutex<BTreeMap<c_uint, (Instant, u32)>> = Mutex::new(BTreeMap::new());

/// The start of `ucs_log_level_t`. PRINT comes last, behind the debug levels.
const LEVELS: [log::Level; 5] =
    [log::Level::Error, log::Level::Error, log::Level::Warn, log::Level::Warn, log::Level::Info];

/// `UCS_LOG_FUNC_RC_STOP` and `UCS_LOG_FUNC_RC_CONTINUE`.
const STOP: c_int = 0;
const CONTINUE: c_int = 1;

type Handler = unsafe extern "C" fn(
    *const c_char,
    c_uint,
    *const c_char,
    c_int,
    *const c_void,
    *const c_char,
    *mut c_void,
) -> c_int;

unsafe extern "C" {
    /// The C library's. On this crate's targets a `va_list` parameter is passed as a pointer.
    fn vsnprintf(buffer: *mut c_char, size: usize, format: *const c_char, arguments: *mut c_void) -> c_int;
}

static ATTACHED: Once = Once::new();
static CAPTURED: Mutex<Option<Vec<String>>> = Mutex::new(None);
/// The host used this UCX before us: its log settings stay in force.
static SHARED: AtomicBool = AtomicBool::new(false);

/// Whether UCX is in this process already. Asked before anything of ours loads it.
pub(super) fn ucx_is_loaded() -> bool {
    loaded_file("libucs").is_some()
}

/// Takes UCX's log over, once, when it is loaded. `shared`: the host had loaded it before us.
pub(super) fn attach_ucx(shared: bool) {
    let Some(path) = loaded_file("libucs") else { return };
    ATTACHED.call_once(|| {
        SHARED.store(shared, Ordering::Relaxed);
        // SAFETY: RTLD_NOLOAD finds the loaded library; nothing new is run.
        let Ok(handle) = (unsafe { Handle::open(Some(&path), RTLD_NOW | libc::RTLD_NOLOAD) }) else { return };
        // SAFETY: the signature is that of ucs/debug/log_def.h.
        if let Ok(push) = unsafe { handle.get::<unsafe extern "C" fn(Handler)>(b"ucs_log_push_handler") } {
            // SAFETY: the handler has the type UCX expects and lives as long as the process.
            unsafe { push(on_ucx_line) };
        }
    });
}

/// UCX calls this for each line that its own level lets through, from any thread.
unsafe extern "C" fn on_ucx_line(
    _file: *const c_char,
    line: c_uint,
    _function: *const c_char,
    level: c_int,
    _component: *const c_void,
    format: *const c_char,
    arguments: *mut c_void,
) -> c_int {
    if SHARED.load(Ordering::Relaxed) {
        // The list of arguments may be walked once only, and the host's own handler comes next.
        return CONTINUE;
    }
    let mut buffer = [0u8; MAX_LINE];
    // SAFETY: the buffer has MAX_LINE bytes; format and arguments come from UCX's own printf-like call.
    let written = unsafe { vsnprintf(buffer.as_mut_ptr().cast(), MAX_LINE, format, arguments) };
    if written > 0 {
        let text = CStr::from_bytes_until_nul(&buffer).unwrap_or_default().to_string_lossy();
        // A panic of the host's logger must not unwind through UCX.
        let _ = catch_unwind(|| record(level, line, text.trim_end()));
    }
    STOP
}

fn record(level: c_int, line: c_uint, text: &str) {
    let level = usize::try_from(level).ok().and_then(|level| LEVELS.get(level)).copied().unwrap_or(log::Level::Debug);
    if level <= log::Level::Warn
        && let Some(lines) = &mut *CAPTURED.lock().unwrap_or_else(PoisonError::into_inner)
        && lines.len() < MAX_CAPTURED
        && !lines.iter().any(|line| line == text)
    {
        lines.push(text.to_string());
    }
    if level > log::Level::Warn || admits(line) {
        log::log!(target: TARGET, level, "{text}");
    }
}

/// Whether the place in UCX's sources may log once more in this minute: a lost peer makes it repeat itself at every try.
fn admits(line: c_uint) -> bool {
    let now = Instant::now();
    let mut places = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
    let (since, lines) = places.entry(line).or_insert((now, 0));
    if now.saturating_duration_since(*since) >= WINDOW {
        (*since, *lines) = (now, 0);
    }
    *lines += 1;
    *lines <= MAX_LINES_PER_WINDOW
}

/// Collects UCX's warnings and errors from its creation on. One at a time.
pub(super) struct Capture;

impl Capture {
    /// Starts collecting.
    pub(super) fn start() -> Self {
        *CAPTURED.lock().unwrap_or_else(PoisonError::into_inner) = Some(Vec::new());
        Capture
    }

    /// What has come so far.
    pub(super) fn lines(&self) -> Vec<String> {
        CAPTURED.lock().unwrap_or_else(PoisonError::into_inner).clone().unwrap_or_default()
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        *CAPTURED.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Stops NIXL's lines on stderr, unless somebody asked for them with NIXL_LOG_LEVEL. NIXL logs through Abseil; only a
/// copy that came with NIXL is touched, because the host may share another one.
pub(super) fn silence_nixl(library: &Library) {
    static DONE: Once = Once::new();
    if std::env::var_os("NIXL_LOG_LEVEL").is_some() {
        return;
    }
    DONE.call_once(|| {
        let Some(path) = loaded_file("libabsl_log_globals") else { return };
        if !came_with(&path, library.path()) {
            return;
        }
        let Ok(exports) = elf::exports(&path) else { return };
        // absl::SetStderrThreshold(absl::LogSeverityAtLeast), in whatever inline namespace this version has.
        let wanted = |name: &&String| name.ends_with("18SetStderrThresholdENS0_18LogSeverityAtLeastE");
        let Some(name) = exports.iter().find(wanted) else { return };
        // SAFETY: RTLD_NOLOAD finds the loaded library; nothing new is run.
        let Ok(handle) = (unsafe { Handle::open(Some(&path), RTLD_NOW | libc::RTLD_NOLOAD) }) else { return };
        // SAFETY: the mangled name gives the parameter's type, an enum of int; the result is void.
        if let Ok(set) = unsafe { handle.get::<unsafe extern "C" fn(c_int)>(name.as_bytes()) } {
            const INFINITY: c_int = 1000;
            // SAFETY: see above; LogSeverityAtLeast::kInfinity means "no severity".
            unsafe { set(INFINITY) };
        }
    });
}

/// Whether a library lies in NIXL's own folder or in its wheel's folder of bundled libraries.
fn came_with(file: &Path, nixl: &Path) -> bool {
    let (Ok(file), Ok(nixl)) = (file.canonicalize(), nixl.canonicalize()) else { return false };
    let (Some(folder), Some(home)) = (file.parent(), nixl.parent()) else { return false };
    let bundled = folder.parent() == home.parent()
        && folder.file_name().is_some_and(|name| name.to_string_lossy().ends_with(".libs"));
    bundled || (folder == home && home.file_name().is_some_and(|name| name.to_string_lossy().ends_with(".libs")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_bundled_library_came_with_nixl() {
        let root = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, "").unwrap();
            path
        };
        let nixl = file("site/.nixl_cu12.mesonpy.libs/libnixl_capi.so");
        assert!(came_with(&file("site/nixl_cu12.libs/libabsl.so"), &nixl));
        assert!(!came_with(&file("site/torch/libabsl.so"), &nixl));
        let system = file("usr/lib/libnixl_capi.so");
        assert!(!came_with(&file("usr/lib/libabsl.so"), &system));
    }

    #[test]
    fn warnings_are_captured_once_each_and_only_while_asked_for() {
        record(2, 0, "before");
        let capture = Capture::start();
        record(1, 0, "an error");
        record(2, 0, "a warning");
        record(2, 0, "a warning");
        record(5, 0, "debug");
        record(-7, 0, "odd");
        assert_eq!(capture.lines(), ["an error", "a warning"]);
        for i in 0..100 {
            record(1, 0, &format!("line {i}"));
        }
        assert_eq!(capture.lines().len(), MAX_CAPTURED);
        drop(capture);
        assert!(CAPTURED.lock().unwrap().is_none());
    }
}
