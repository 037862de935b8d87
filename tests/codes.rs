//! Every status code: the header, the library and the table in Rust say the same of it, and a C test produces it.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use nixlkv::error::TABLE;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A code as the header has it.
#[derive(Debug, PartialEq)]
struct Code {
    name: String,
    number: i32,
    text: String,
    retryable: bool,
}

/// The header's codes: a line of comment, then the definition.
fn header_codes() -> Vec<Code> {
    let header = std::fs::read_to_string(root().join("include/nixlkv.h")).unwrap();
    let lines: Vec<&str> = header.lines().collect();
    let code = |pair: &[&str]| {
        let (name, number) = pair[1].strip_prefix("#define ")?.split_once(' ')?;
        if !(name == "NIXL_OK" || name.starts_with("NIXL_ERR_")) {
            return None;
        }
        let comment = pair[0].strip_prefix("/** ").and_then(|rest| rest.strip_suffix(" */"));
        let comment = comment.unwrap_or_else(|| panic!("{name} has no comment"));
        let (text, retryable) = match comment.strip_suffix(" (retryable)") {
            Some(text) => (text, true),
            None => (comment, false),
        };
        let number = number.trim_matches(['(', ')']).parse().unwrap();
        Some(Code { name: name.into(), number, text: text.into(), retryable })
    };
    lines.windows(2).filter_map(code).collect()
}

#[test]
fn the_header_and_the_table_agree() {
    let table: Vec<Code> = TABLE
        .iter()
        .map(|entry| Code {
            name: entry.name.into(),
            number: entry.code,
            text: entry.text.into(),
            retryable: entry.retryable,
        })
        .collect();
    assert_eq!(header_codes(), table);
}

/// A C program that asks the library about every code of the header, by its macro.
#[test]
fn the_library_tells_what_the_header_says() {
    let mut source = String::from(
        "#include <nixlkv.h>\n#include <stdio.h>\n#include <string.h>\nstatic int bad;\n\
         static void check(int32_t code, int32_t number, const char *name, const char *text, int32_t retryable) {\n\
         if (code == number && strcmp(nixlkv_status_name(code), name) == 0 &&\n\
         strcmp(nixlkv_status_text(code), text) == 0 && nixlkv_status_retryable(code) == retryable) return;\n\
         printf(\"%s: %s, %s, %d\\n\", name, nixlkv_status_name(code), nixlkv_status_text(code),\n\
         (int)nixlkv_status_retryable(code));\nbad = 1;\n}\nint main(void) {\n",
    );
    for Code { name, number, text, retryable } in header_codes() {
        let _ = writeln!(source, "    check({name}, {number}, \"{name}\", {text:?}, {});", i32::from(retryable));
    }
    source.push_str("    return bad;\n}\n");
    let dir = tempfile::tempdir().unwrap();
    let (file, program) = (dir.path().join("codes.c"), dir.path().join("codes"));
    std::fs::write(&file, source).unwrap();
    let exe = std::env::current_exe().unwrap();
    let library = exe.parent().unwrap().join("libnixlkv.so");
    std::os::unix::fs::symlink(&library, dir.path().join("libnixlkv.so.0")).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-I"]).arg(root().join("include"));
    let output = compiler.arg(&file).arg("-o").arg(&program).arg(&library).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = Command::new(&program).env("LD_LIBRARY_PATH", dir.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// The statements of a C program, without its comments and the contents of its strings.
fn statements(source: &str) -> Vec<String> {
    let mut plain = String::new();
    let mut chars = source.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '/' if chars.peek() == Some(&'*') => {
                let mut last = ' ';
                chars.next();
                for c in chars.by_ref() {
                    if last == '*' && c == '/' {
                        break;
                    }
                    last = c;
                }
                plain.push(' ');
            }
            '/' if chars.peek() == Some(&'/') => {
                chars.by_ref().find(|c| *c == '\n');
            }
            '"' => {
                plain.push_str("\"\"");
                while let Some(c) = chars.next() {
                    match c {
                        '\\' => drop(chars.next()),
                        '"' => break,
                        _ => {}
                    }
                }
            }
            _ => plain.push(c),
        }
    }
    plain.split([';', '{', '}']).map(str::to_owned).collect()
}

/// Whether a statement fails its test unless this code has come out of the library.
fn expects(statement: &str, name: &str) -> bool {
    let end = |rest: &str| !rest.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
    let mut named = statement.match_indices(name).filter(|(at, _)| end(&statement[at + name.len()..])).peekable();
    if named.peek().is_none() {
        return false;
    }
    let checks = ["CHECK_STATUS(", "CHECK_SAYS(", "expect_", "refused(", "CHECK_BAD_HANDLES("];
    let compares = named.any(|(at, _)| statement[..at].trim_end().ends_with("=="))
        && statement.contains("CHECK(")
        && !statement.contains("||");
    checks.iter().any(|check| statement.contains(check)) || compares
}

fn c_tests() -> Vec<(PathBuf, Vec<String>)> {
    let entries = std::fs::read_dir(root().join("tests/c")).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let sources = paths.filter(|path| path.extension().is_some_and(|extension| extension == "c"));
    sources.map(|path| (path.clone(), statements(&std::fs::read_to_string(path).unwrap()))).collect()
}

#[test]
fn every_code_is_produced_by_a_c_test() {
    let tests = c_tests();
    let missing: Vec<&str> = TABLE
        .iter()
        .map(|entry| entry.name)
        .filter(|name| *name != "NIXL_OK")
        .filter(|name| {
            // CHECK_BAD_HANDLES names this one inside its macro, which a header holds.
            let by_macro = *name == "NIXL_ERR_INVALID_HANDLE";
            !tests
                .iter()
                .flat_map(|(_, statements)| statements)
                .any(|statement| expects(statement, name) || (by_macro && statement.contains("CHECK_BAD_HANDLES(")))
        })
        .collect();
    assert!(missing.is_empty(), "no program in tests/c expects {missing:?}");
}

#[test]
fn the_scan_sees_what_it_should() {
    assert!(expects("    CHECK_STATUS(call(a), NIXL_ERR_ROLE)", "NIXL_ERR_ROLE"));
    assert!(expects("CHECK(status.error == NIXL_ERR_ROLE)", "NIXL_ERR_ROLE"));
    assert!(expects("expect_end(engine, 1, NIXL_ERR_ABORTED, 5)", "NIXL_ERR_ABORTED"));
    assert!(!expects("CHECK_STATUS(call(a), NIXL_ERR_ROLE_OF_A_LIFETIME)", "NIXL_ERR_ROLE"));
    assert!(!expects("status = NIXL_ERR_ROLE", "NIXL_ERR_ROLE"));
    assert!(!expects("CHECK(status != NIXL_ERR_ROLE)", "NIXL_ERR_ROLE"));
    assert!(!expects("CHECK(status == NIXL_OK || status == NIXL_ERR_ROLE)", "NIXL_ERR_ROLE"));
    let source =
        "/* CHECK_STATUS(a, NIXL_ERR_ROLE); */ f(\"CHECK_STATUS(a, \\\"NIXL_ERR_ROLE)\"); // NIXL_ERR_ROLE\n g();";
    assert!(!statements(source).iter().any(|statement| statement.contains("NIXL_ERR_ROLE")));
    assert!(statements(source).iter().any(|statement| statement.contains("g()")));
}
