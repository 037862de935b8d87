//! Compiles every `tests/c/*.c` against the library that this test run has built, and runs it as a test of its own.
//!
//! A program's comments, each on a line of its own, say how: `/* timeout: 300 */` (seconds, default 120),
//! `/* env: NAME=value */`, `/* quiet */` (nothing may appear on stdout or stderr). Exit code 0 passes; anything else
//! fails, 77 ("skip") included: a test that did not run has not passed.
//!
//! NIXLKV_TEST_UNDER=asan, tsan or valgrind compiles and runs them under that tool, whose every report fails the
//! program, whichever of its processes it is about. `tests/sanitizers/left_out` lists what a tool can't run, and why.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

#[allow(dead_code)]
mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use common::under::{Under, built_for_asan, read_reports};
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

fn build(source: &Path, program: &Path, libraries: &Path, under: Under) -> Result<(), Failed> {
    let object = program.with_extension("o");
    let mut compile = Command::new("cc");
    compile
        .args(["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-pthread"])
        .args(under.compiler_flags())
        .arg("-I")
        .arg(root().join("include"))
        .arg("-c")
        .arg(source)
        .arg("-o")
        .arg(&object);
    let mut link = Command::new("cc");
    link.arg(&object).arg("-o").arg(program).arg(libraries.join("libnixlkv.so")).args(["-pthread", "-lm"]);
    link.args(under.linker_flags()?);
    for command in [&mut compile, &mut link] {
        let output = command.output().map_err(|e| format!("cc: {e}"))?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
        }
    }
    Ok(())
}

fn run(source: &Path, under: Under, leaks: bool) -> Result<(), Failed> {
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
    build(source, &program, &libraries, under)?;
    let reports = scratch.path().join("reports");
    std::fs::create_dir(&reports).map_err(|e| e.to_string())?;
    let mut command = under.command(&program, &reports, leaks);
    command
        .current_dir(&work)
        .env("NIXLKV_TEST_DIR", &work)
        .env("NIXLKV_TEST_NAME", &name)
        .env("LD_LIBRARY_PATH", scratch.path())
        .envs(nixl_library().map(|path| ("NIXLKV_NIXL_LIBRARY", path)))
        .envs(directives.env);
    let outcome = common::run(&mut command, scratch.path(), directives.timeout * under.slowdown())?;
    let reports = read_reports(&reports)?;
    if !reports.is_empty() {
        return Err(format!("reported:\n{reports}\n{outcome}").into());
    }
    let outcome = outcome.success()?;
    if directives.quiet && !(outcome.stdout.is_empty() && outcome.stderr.is_empty()) {
        return Err(format!("not quiet\n{outcome}").into());
    }
    Ok(())
}

/// The harness must be able to fail: a program for each way to do so, and the reason that it must give.
fn the_harness_sees(name: &str, source: &str, reason: &str, under: Under) -> Result<(), Failed> {
    let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
    let path = dir.path().join(format!("{name}.c"));
    std::fs::write(&path, source).map_err(|e| e.to_string())?;
    match run(&path, under, true) {
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

/// What a tool must see: a bug of its kind, also in a child that comes to a bad end.
const ASAN_SEES: &[(&str, &str, &str)] = &[
    (
        "a_use_after_free",
        "#include <stdlib.h>\nint main(void) { int *volatile p = malloc(4); free(p); return *p; }\n",
        "heap-use-after-free",
    ),
    ("an_overflow", "int main(int argc, char **argv) { (void)argv; return argc + 0x7fffffff; }\n", "signed integer"),
    (
        "a_leak",
        "#include <stdlib.h>\nint main(void) { void *volatile p = malloc(4); p = NULL; return p != NULL; }\n",
        "detected memory leaks",
    ),
    ("a_bug_in_a_child", CHILD, "heap-use-after-free"),
];
/// With a library that has been built for it, too.
const ASAN_SEES_INSIDE: &[(&str, &str, &str)] = &[("a_list_too_short", LIST_TOO_SHORT, "heap-buffer-overflow")];
const VALGRIND_SEES: &[(&str, &str, &str)] = &[
    (
        "a_use_after_free",
        "#include <stdlib.h>\nint main(void) { int *volatile p = malloc(4); free(p); return *p; }\n",
        "Invalid read",
    ),
    (
        "an_uninitialised_value",
        "#include <stdlib.h>\nint main(void) { int *volatile p = malloc(4); const int r = *p == 7 ? 2 : 0; free(p); \
         return r; }\n",
        "uninitialised",
    ),
    (
        "a_leak",
        "#include <stdlib.h>\nint main(void) { void *volatile p = malloc(4); p = NULL; return p != NULL; }\n",
        "definitely lost",
    ),
    ("a_bug_in_a_child", CHILD, "Invalid read"),
    ("a_list_too_short", LIST_TOO_SHORT, "Invalid read"),
];
const TSAN_SEES: &[(&str, &str, &str)] = &[
    (
        "a_race",
        "#include <pthread.h>\nstatic int n;\nstatic void *add(void *p) { n++; return p; }\n\
         int main(void) { pthread_t t; pthread_create(&t, NULL, add, NULL); n++; pthread_join(t, NULL); return 0; }\n",
        "data race",
    ),
    ("a_race_with_the_library", RACE_WITH_THE_LIBRARY, "data race"),
];

const CHILD: &str = "#include <stdlib.h>\n#include <signal.h>\n#include <sys/wait.h>\n#include <unistd.h>\n\
    int main(void) {\n    const pid_t pid = fork();\n\
    if (pid == 0) { volatile int *volatile p = malloc(4); free((void *)p); (void)*p; raise(SIGKILL); }\n\
    return waitpid(pid, NULL, 0) != pid;\n}\n";

/// The library itself reads past the end of the caller's list.
const LIST_TOO_SHORT: &str = "#include <stdlib.h>\n#include <nixlkv.h>\nint main(void) {\n\
    nixlkv_engine_config_t config; nixlkv_engine_t *engine; nixlkv_region_t *one = malloc(sizeof *one);\n\
    nixlkv_engine_config_init(&config, sizeof config); config.role = NIXLKV_ROLE_DECODE;\n\
    if (nixlkv_engine_create(&config, &engine) != 0 || nixlkv_region_init(one, sizeof *one) != 0) return 2;\n\
    nixlkv_register(engine, one, 2, NULL); free(one); nixlkv_engine_destroy(engine); return 0;\n}\n";

/// The library's threads write what the caller reads.
const RACE_WITH_THE_LIBRARY: &str = "#include <unistd.h>\n#include <nixlkv.h>\nstatic int n;\n\
    static void count(void *p, uint32_t level, const char *line) { (void)p; (void)level; (void)line; n++; }\n\
    int main(void) {\n    nixlkv_engine_config_t config; nixlkv_engine_t *engine;\n\
    nixlkv_engine_config_init(&config, sizeof config); config.role = NIXLKV_ROLE_DECODE;\n\
    config.log_callback = count; config.log_level = 5;\n\
    if (nixlkv_engine_create(&config, &engine) != 0) return 2;\n\
    for (int i = 0; i < 100; i++) { usleep(1000); n++; }\n    nixlkv_engine_destroy(engine); return 0;\n}\n";

fn main() {
    let mut arguments = Arguments::from_args();
    // Two cores: more at a time would only disturb each other's time limits.
    arguments.test_threads.get_or_insert(2);
    let under = Under::from_env().unwrap();
    let (left_out, leaky) = under.left_out().unwrap();
    let mut sources: Vec<PathBuf> = std::fs::read_dir(root().join("tests/c"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "c"))
        .collect();
    sources.sort();
    assert!(!sources.is_empty(), "no C programs found");
    let programs = sources.into_iter().map(|source| {
        let name = source.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let (ignored, leaks) = (left_out.contains(&name), !leaky.contains(&name));
        Trial::test(name, move || run(&source, under, leaks)).with_ignored_flag(ignored)
    });
    let sees = match under {
        Under::Nothing => FAILING,
        Under::Asan => ASAN_SEES,
        Under::Tsan => TSAN_SEES,
        Under::Valgrind => VALGRIND_SEES,
    };
    let inside = if under == Under::Asan && built_for_asan(&library_dir()) { ASAN_SEES_INSIDE } else { &[] };
    let harness = sees.iter().chain(inside).map(|&(name, source, reason)| {
        Trial::test(format!("harness_sees_{name}"), move || the_harness_sees(name, source, reason, under))
    });
    libtest_mimic::run(&arguments, harness.chain(programs).collect()).exit();
}
