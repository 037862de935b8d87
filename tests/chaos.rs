//! The soak under faults: two and four processes over real NIXL. As a test it runs for two minutes.
//!
//! With `NIXLKV_CHAOS_SECONDS` set, as `make chaos` does, it runs for so long with the seed `NIXLKV_CHAOS_SEED`, prints
//! as it goes, and its last line is `violations: N`.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

#[allow(dead_code)]
mod common;

use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use common::{library_dir, must, nixl_library, root};
use libtest_mimic::{Arguments, Failed, Trial};

/// Builds the program; gives the command that runs it.
fn soak(scratch: &Path, seconds: u64, seed: u64) -> Command {
    let (libraries, program) = (library_dir(), scratch.join("chaos"));
    // The program records the library's SONAME; give the loader that name.
    std::os::unix::fs::symlink(libraries.join("libnixlkv.so"), scratch.join("libnixlkv.so.0")).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-D_GNU_SOURCE", "-O2", "-g", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-pthread", "-I"])
        .arg(root().join("include"))
        .arg(root().join("tests/chaos/chaos.c"))
        .arg("-o")
        .arg(&program)
        .arg(libraries.join("libnixlkv.so"));
    must(&mut cc, scratch, 120);
    let mut command = Command::new(program);
    command
        .args([seconds.to_string(), seed.to_string()])
        .env("LD_LIBRARY_PATH", scratch)
        .envs(nixl_library().map(|path| ("NIXLKV_NIXL_LIBRARY", path)));
    command
}

fn no_violation_in_two_minutes() -> Result<(), Failed> {
    let scratch = tempfile::tempdir().unwrap();
    let mut command = soak(scratch.path(), 120, 1);
    // Starting and healing come on top.
    let outcome = common::run(&mut command, scratch.path(), Duration::from_secs(480))?.success()?;
    match outcome.stdout.lines().last() {
        Some("violations: 0") => Ok(()),
        _ => Err(outcome.to_string().into()),
    }
}

fn main() -> ExitCode {
    let number =
        |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap_or_else(|e| panic!("{name}: {e}")));
    let Some(seconds) = number("NIXLKV_CHAOS_SECONDS") else {
        let trials = vec![Trial::test("no_violation_in_two_minutes", no_violation_in_two_minutes)];
        return libtest_mimic::run(&Arguments::from_args(), trials).exit_code();
    };
    let scratch = tempfile::tempdir().unwrap();
    // The program itself ends when it takes far too long.
    let status = soak(scratch.path(), seconds, number("NIXLKV_CHAOS_SEED").unwrap_or(1)).status().unwrap();
    if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
