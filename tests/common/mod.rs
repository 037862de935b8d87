//! What the tests that run programs share: where things are, and running a command under a time limit.

pub mod under;

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Where the shared library of this very build is: cargo links it beside the test programs, in `deps/`, and links it
/// anew when sources or features change. The copy one folder up is `cargo build`'s and may be of another day.
pub fn library_dir() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    let dir = exe.parent().unwrap().to_path_buf();
    assert!(dir.join("libnixlkv.so").exists(), "no libnixlkv.so in {}", dir.display());
    dir
}

/// NIXL's library, for programs that open it: the environment's, else the one that `make` fetches.
pub fn nixl_library() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("NIXLKV_NIXL_LIBRARY") {
        return Some(path.into());
    }
    let fetched = root().join(".deps/nixl/.nixl_cu12.mesonpy.libs/libnixl_capi.so");
    fetched.exists().then_some(fetched)
}

/// What became of a command.
pub struct Outcome {
    /// `None`: it was still running at its time limit, and was killed.
    pub status: Option<ExitStatus>,
    pub stdout: String,
    pub stderr: String,
    limit: Duration,
}

impl Outcome {
    /// `Err` with all that the command said, unless it exited with 0.
    pub fn success(self) -> Result<Self, String> {
        match self.status {
            Some(status) if status.success() => Ok(self),
            Some(status) if status.code() == Some(77) => Err(format!("skipped, which is not passed\n{self}")),
            Some(status) => Err(format!("{status}\n{self}")),
            None => Err(format!("still running after {} s\n{self}", self.limit.as_secs())),
        }
    }
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "--- stdout\n{}--- stderr\n{}", self.stdout, self.stderr)
    }
}

/// Runs a command in a process group of its own; whatever of the group is left at the end is killed. `scratch` takes
/// the output, in files: a pipe would be held open by what the command leaves behind.
pub fn run(command: &mut Command, scratch: &Path, limit: Duration) -> Result<Outcome, String> {
    let (out, err) = (scratch.join("stdout"), scratch.join("stderr"));
    let create = |path: &Path| std::fs::File::create(path).map_err(|e| format!("{}: {e}", path.display()));
    command.stdin(Stdio::null()).stdout(create(&out)?).stderr(create(&err)?).process_group(0);
    let mut child = command.spawn().map_err(|e| format!("{command:?}: {e}"))?;
    let deadline = Instant::now() + limit;
    let status = loop {
        match child.try_wait().map_err(|e| e.to_string())? {
            Some(status) => break Some(status),
            None if Instant::now() >= deadline => break None,
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    // The shell's own kill: the program of that name is not everywhere.
    let kill = format!("kill -s KILL -- -{}", child.id());
    let _ = Command::new("sh").arg("-c").arg(kill).stderr(Stdio::null()).status();
    let _ = child.wait();
    let read = |path: &Path| String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned();
    Ok(Outcome { status, stdout: read(&out), stderr: read(&err), limit })
}

/// Runs a command that must succeed; says all that it said if it does not.
pub fn must(command: &mut Command, scratch: &Path, seconds: u64) -> Outcome {
    match run(command, scratch, Duration::from_secs(seconds)).and_then(Outcome::success) {
        Ok(outcome) => outcome,
        Err(text) => panic!("{command:?}: {text}"),
    }
}
