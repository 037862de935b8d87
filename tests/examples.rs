//! The examples build with their own Makefile against this build's library, and do what they promise.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

#[allow(dead_code)]
mod common;

use std::path::Path;
use std::process::Command;

use common::{library_dir, must, nixl_library, root};

/// Builds all examples into `build`.
fn build(scratch: &Path, build: &Path) {
    let mut make = Command::new("make");
    make.arg("-C").arg(root().join("examples-c")).env_remove("MAKEFLAGS").env_remove("MAKELEVEL");
    make.arg("NIXLKV=tree").arg(format!("BUILD={}", build.display()));
    make.arg(format!("TARGET={}", library_dir().display()));
    must(&mut make, scratch, 120);
}

/// Runs one, and gives its last line.
fn last_line(scratch: &Path, build: &Path, program: &str, arguments: &[&str]) -> String {
    let mut command = Command::new(build.join(program));
    command.args(arguments).envs(nixl_library().map(|path| ("NIXLKV_NIXL_LIBRARY", path)));
    let outcome = must(&mut command, scratch, 240);
    outcome.stdout.lines().last().unwrap_or_default().to_owned()
}

#[test]
fn quickstart_the_model_and_a_small_demo() {
    let scratch = tempfile::tempdir().unwrap();
    let (scratch, dir) = (scratch.path(), scratch.path().join("build"));
    build(scratch, &dir);
    last_line(scratch, &dir, "quickstart", &[]);
    last_line(scratch, &dir, "single", &["--selftest"]);
    assert_eq!(last_line(scratch, &dir, "demo", &["--requests", "4"]), "4 requests, all tokens identical");
}
