//! The committed header is what the code says, and compiles everywhere. `NIXLKV_BLESS=1` rewrites it.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Status codes come from one table; cbindgen cannot see inside the macro that declares it.
fn status_block() -> String {
    let mut block = String::from("\n");
    for entry in nixlkv::error::TABLE {
        let retry = if entry.retryable { " (retryable)" } else { "" };
        let _ = writeln!(block, "/** {}{retry} */", entry.text);
        let code = if entry.code < 0 { format!("({})", entry.code) } else { entry.code.to_string() };
        let _ = writeln!(block, "#define {} {code}", entry.name);
    }
    block
}

fn generate() -> String {
    let mut config = cbindgen::Config::from_file(root().join("cbindgen.toml")).unwrap();
    config.after_includes = Some(status_block());
    let mut builder = cbindgen::Builder::new().with_config(config);
    for file in ["status", "engine", "memory", "peer", "room"] {
        builder = builder.with_src(root().join(format!("src/ffi/{file}.rs")));
    }
    let mut bytes = Vec::new();
    builder.generate().unwrap().write(&mut bytes);
    let text = String::from_utf8(bytes).unwrap();
    // Rust's own safety section says nothing to a C reader.
    let mut out = String::new();
    let mut skipping = false;
    for line in text.lines() {
        let trimmed = line.trim_start();
        if trimmed.starts_with("* # Safety") {
            skipping = true;
            while out.ends_with("*\n") && !out.ends_with("**\n") {
                let cut = out[..out.len() - 1].rfind('\n').map_or(0, |i| i + 1);
                out.truncate(cut);
            }
            continue;
        }
        if skipping && !trimmed.starts_with("*/") {
            continue;
        }
        skipping = false;
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

#[test]
fn the_committed_header_is_what_the_code_says() {
    let path = root().join("include/nixlkv.h");
    let fresh = generate();
    if std::env::var_os("NIXLKV_BLESS").is_some() {
        std::fs::write(&path, &fresh).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    for (i, (a, b)) in fresh.lines().zip(committed.lines()).enumerate() {
        assert_eq!(a, b, "include/nixlkv.h line {} differs: run `make header`", i + 1);
    }
    assert!(fresh == committed, "include/nixlkv.h has more or fewer lines than the code says: run `make header`");
}

fn compiles(compiler: &str, language: &str, standard: &str, source: &str, what: &str) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join(if language == "c" { "t.c" } else { "t.cc" });
    std::fs::write(&file, source).unwrap();
    let output = Command::new(compiler)
        .args(["-x", language, standard, "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", "-I"])
        .arg(root().join("include"))
        .arg(&file)
        .output()
        .unwrap();
    assert!(output.status.success(), "{compiler} {standard}, {what}:\n{}", String::from_utf8_lossy(&output.stderr));
}

fn installed(compiler: &str) -> bool {
    Command::new(compiler).arg("--version").output().is_ok_and(|output| output.status.success())
}

#[test]
fn i3_the_header_compiles_in_every_dialect_alone_twice_and_beside_nixl() {
    let alone = "#include <nixlkv.h>\nint unit(void);\nint unit(void) { return NIXL_OK; }\n";
    let twice = "#include <nixlkv.h>\n#include <nixlkv.h>\nint unit(void);\nint unit(void) { return NIXL_OK; }\n";
    let nixl = std::fs::read_to_string(root().join("tests/c/nixl_names.h")).unwrap();
    let beside = format!("{nixl}\n#include <nixlkv.h>\nint unit(void);\nint unit(void) {{ return NIXL_OK; }}\n");
    let after = format!("#include <nixlkv.h>\n{nixl}\nint unit(void);\nint unit(void) {{ return NIXL_OK; }}\n");
    let mut ran = Vec::new();
    for (language, compilers, standards) in [
        ("c", ["gcc", "clang"], &["-std=c99", "-std=c11"][..]),
        ("c++", ["g++", "clang++"], &["-std=c++11", "-std=c++17", "-std=c++20"][..]),
    ] {
        for compiler in compilers.into_iter().filter(|compiler| installed(compiler)) {
            ran.push(compiler);
            for standard in standards {
                for (source, what) in
                    [(alone, "alone"), (twice, "included twice"), (&beside, "after NIXL"), (&after, "before NIXL")]
                {
                    compiles(compiler, language, standard, source, what);
                }
            }
        }
    }
    println!("compilers: {ran:?}");
    assert!(ran.contains(&"gcc") && ran.contains(&"g++"), "gcc and g++ are needed, found {ran:?}");
}

#[test]
fn readme_prints_the_whole_code_table() {
    let readme = std::fs::read_to_string(Path::new(&root()).join("README.md")).unwrap();
    for entry in nixlkv::error::TABLE {
        let retry = if entry.retryable { "yes" } else { "" };
        let row = format!("| `{}` | {} | {retry} | {} |", entry.name, entry.code, entry.text);
        assert!(readme.contains(&row), "README.md lacks the row\n{row}");
    }
}
