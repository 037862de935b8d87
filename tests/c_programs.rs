//! Compiles every `tests/c/*.c` against the library that this test run has built, and runs it as a test of its own.
//!
//! A program's comments, each on a line of its own, say how: `/* timeout: 300 */` (seconds, default 120),
//! `/* env: NAME=value */`, `/* quiet */` (nothing may appear on stdout or stderr). Exit code 0 passes; anything else
//! fails, 77 ("skip") included: a test that did not run has not passed.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

#[allow(dead_code)]
mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use common::{library_dir, nixl_library, root};
use libtest_mimic::{Arguments, Failed, Trial};

/// How a program wants to be run.
#[derive(Debug, PartialEq)]
struct Directives {
    timeout: Duration,
    env: Vec<(String, String)>,
    quiet: bool,
}

impl Directives {
    /// A comment that looks like a directive and is none is an error: it would otherwise be lost without a word.
    fn parse(source: &str) -> Result<Self, String> {
        let mut directives = Self { timeout: Duration::from_secs(120), env: Vec::new(), quiet: false };
        for line in source.lines() {
            let Some(comment) = line.trim().strip_prefix("/*").and_then(|rest| rest.strip_suffix("*/")) else {
                continue;
            };
            let wrong = || format!("not a directive of tests/c_programs.rs: {}", line.trim());
            match comment.trim().split_once(':').map(|(key, value)| (key, value.trim())) {
                None if comment.trim() == "quiet" => directives.quiet = true,
                Some(("timeout", value)) => {
                    directives.timeout = Duration::from_secs(value.parse().map_err(|_| wrong())?);
                }
                Some(("env", value)) => {
                    let (name, value) = value.split_once('=').ok_or_else(wrong)?;
                    directives.env.push((name.to_owned(), value.to_owned()));
                }
                Some(("quiet", _)) => return Err(wrong()),
                _ => {}
            }
        }
        Ok(directives)
    }
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
        .arg("-lm")
        .output()
        .map_err(|e| format!("cc: {e}"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
    }
    Ok(())
}

fn run(source: &Path) -> Result<(), Failed> {
    let text = std::fs::read_to_string(source).map_err(|e| e.to_string())?;
    let directives = Directives::parse(&text)?;
    let name = source.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let scratch = tempfile::tempdir().map_err(|e| e.to_string())?;
    let work = scratch.path().join("work");
    std::fs::create_dir(&work).map_err(|e| e.to_string())?;
    let program = scratch.path().join(&name);
    let libraries = library_dir();
    // The program records the library's SONAME; give the loader that name.
    std::os::unix::fs::symlink(libraries.join("libnixlkv.so"), scratch.path().join("libnixlkv.so.0"))
        .map_err(|e| e.to_string())?;
    build(source, &program, &libraries)?;
    let mut command = Command::new(&program);
    command
        .current_dir(&work)
        .env("NIXLKV_TEST_DIR", &work)
        .env("NIXLKV_TEST_NAME", &name)
        .env("LD_LIBRARY_PATH", scratch.path())
        .envs(nixl_library().map(|path| ("NIXLKV_NIXL_LIBRARY", path)))
        .envs(directives.env);
    let outcome = common::run(&mut command, scratch.path(), directives.timeout)?.success()?;
    if directives.quiet && !(outcome.stdout.is_empty() && outcome.stderr.is_empty()) {
        return Err(format!("not quiet\n{outcome}").into());
    }
    Ok(())
}

/// The harness must be able to fail: a program for each way to do so, and the reason that it must give.
fn the_harness_sees(name: &str, source: &str, reason: &str) -> Result<(), Failed> {
    let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
    let path = dir.path().join(format!("{name}.c"));
    std::fs::write(&path, source).map_err(|e| e.to_string())?;
    match run(&path) {
        Ok(()) => Err("passed".into()),
        Err(failed) if failed.message().is_some_and(|message| message.contains(reason)) => Ok(()),
        Err(failed) => Err(format!("failed for another reason than {reason:?}: {failed:?}").into()),
    }
}

const FAILING: &[(&str, &str, &str)] = &[
    ("an_exit_code", "int main(void) { return 3; }\n", "exit status: 3"),
    ("a_skip", "int main(void) { return 77; }\n", "skipped, which is not passed"),
    ("a_crash", "#include <stdlib.h>\nint main(void) { abort(); }\n", "signal: 6"),
    ("a_warning", "int main(void) { int unused; return 0; }\n", "unused"),
    (
        "a_hang",
        "#include <unistd.h>\n/* timeout: 1 */\nint main(void) { pause(); return 0; }\n",
        "still running after 1 s",
    ),
    ("a_word", "#include <stdio.h>\n/* quiet */\nint main(void) { puts(\"word\"); return 0; }\n", "not quiet"),
    ("a_bad_directive", "/* timeout: soon */\nint main(void) { return 0; }\n", "not a directive"),
    (
        "a_failed_check",
        "#include <nixlkv.h>\n/* env: A=b */\n#include <stdlib.h>\n\
         int main(void) { return getenv(\"A\") != NULL && nixlkv_abi_version() != 0 ? 4 : 0; }\n",
        "exit status: 4",
    ),
];

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
    let programs = sources.into_iter().map(|source| {
        let name = source.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Trial::test(name, move || run(&source))
    });
    let harness = FAILING.iter().map(|&(name, source, reason)| {
        Trial::test(format!("harness_sees_{name}"), move || the_harness_sees(name, source, reason))
    });
    libtest_mimic::run(&arguments, harness.chain(programs).collect()).exit();
}
