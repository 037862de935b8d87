//! Compiles every `tests/c/*.c` against the library that this test run has built, and runs it as a test of its own.
//!
//! A program's comments say how: `/* timeout: 300 */` (seconds, default 60), `/* env: NAME=value */`,
//! `/* quiet */` (nothing may appear on stdout or stderr). Exit code 0 passes; anything else fails, 77 ("skip")
//! included: a test that did not run has not passed.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The shared library of this build: cargo puts it beside the test programs.
fn library_dir() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    let dir = exe.parent().unwrap().to_path_buf();
    assert!(dir.join("libnixlkv.so").exists(), "no libnixlkv.so in {}", dir.display());
    dir
}

/// The values of all `/* key: value */` comments.
fn directives(source: &str, key: &str) -> Vec<String> {
    let prefix = format!("/* {key}");
    source
        .lines()
        .filter_map(|line| line.trim().strip_prefix(&prefix)?.strip_suffix("*/"))
        .map(|rest| rest.trim_start_matches(':').trim().to_owned())
        .collect()
}

fn build(source: &Path, program: &Path, libraries: &Path) -> Result<(), Failed> {
    let output = Command::new("cc")
        .args(["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-pthread"])
        .arg("-I")
        .arg(root().join("include"))
        .arg(source)
        .arg("-o")
        .arg(program)
        .arg(libraries.join("libnixlkv.so"))
        .arg(format!("-Wl,-rpath,{}", libraries.display()))
        .output()
        .map_err(|e| format!("cc: {e}"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
    }
    Ok(())
}

fn run(source: &Path) -> Result<(), Failed> {
    let text = std::fs::read_to_string(source).map_err(|e| e.to_string())?;
    let name = source.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let work = tempfile::tempdir().map_err(|e| e.to_string())?;
    let program = work.path().join(&name);
    let libraries = library_dir();
    // The program records the library's SONAME; give the loader that name beside it.
    std::os::unix::fs::symlink(libraries.join("libnixlkv.so"), work.path().join("libnixlkv.so.0"))
        .map_err(|e| e.to_string())?;
    build(source, &program, &libraries)?;
    let timeout = directives(&text, "timeout").first().and_then(|t| t.parse().ok()).unwrap_or(60);
    let quiet = text.lines().any(|line| line.trim() == "/* quiet */");
    let out = work.path().join("stdout");
    let err = work.path().join("stderr");
    let create = |path: &Path| std::fs::File::create(path).map_err(|e| e.to_string());
    let mut command = Command::new(&program);
    command
        .current_dir(work.path())
        .env("NIXLKV_TEST_DIR", work.path())
        .env("NIXLKV_TEST_NAME", &name)
        .env("LD_LIBRARY_PATH", work.path())
        .stdin(Stdio::null())
        .stdout(create(&out)?)
        .stderr(create(&err)?)
        .process_group(0);
    for setting in directives(&text, "env") {
        if let Some((key, value)) = setting.split_once('=') {
            command.env(key, value);
        }
    }
    let mut child = command.spawn().map_err(|e| e.to_string())?;
    let deadline = Instant::now() + Duration::from_secs(timeout);
    let status = loop {
        match child.try_wait().map_err(|e| e.to_string())? {
            Some(status) => break Some(status),
            None if Instant::now() >= deadline => break None,
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    // What the program left running goes with it: its process group is its own.
    let _ = Command::new("kill").args(["-KILL", "--", &format!("-{}", child.id())]).stderr(Stdio::null()).status();
    let _ = child.wait();
    let read = |path: &Path| String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned();
    let (stdout, stderr) = (read(&out), read(&err));
    let report = format!("stdout:\n{stdout}\nstderr:\n{stderr}");
    match status {
        None => Err(format!("still running after {timeout} s\n{report}").into()),
        Some(status) if !status.success() => Err(format!("{status}\n{report}").into()),
        Some(_) if quiet && !(stdout.is_empty() && stderr.is_empty()) => Err(format!("not quiet\n{report}").into()),
        Some(_) => Ok(()),
    }
}

fn main() {
    let mut arguments = Arguments::from_args();
    // Two cores: more at a time would only disturb each other's time limits.
    arguments.test_threads.get_or_insert(2);
    let mut sources: Vec<PathBuf> = std::fs::read_dir(root().join("tests/c"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "c"))
        .collect();
    sources.sort();
    assert!(!sources.is_empty(), "no C programs found");
    let trials = sources
        .into_iter()
        .map(|source| {
            let name = source.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            Trial::test(name, move || run(&source))
        })
        .collect();
    libtest_mimic::run(&arguments, trials).exit();
}
