//! What the shared library shows to the dynamic linker: exactly the functions of `tests/symbols.txt`, which only ever
//! grows, under a SONAME of its own; and it can never be unmapped.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The shared library of this build: cargo puts it beside the test programs.
fn library() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    let library = exe.parent().unwrap().join("libnixlkv.so");
    assert!(library.exists(), "no {}", library.display());
    library
}

fn output(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).env("LC_ALL", "C").args(arguments).arg(library()).output();
    let output = output.unwrap_or_else(|e| panic!("{program}: {e}"));
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn listed() -> BTreeSet<String> {
    let text = std::fs::read_to_string(root().join("tests/symbols.txt")).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines.windows(2).all(|pair| pair[0] < pair[1]), "tests/symbols.txt is not sorted, or lists a name twice");
    lines.into_iter().map(str::to_owned).collect()
}

/// The functions that the header declares: a name that follows a type at the start of a line and precedes a bracket.
fn declared() -> BTreeSet<String> {
    let header = std::fs::read_to_string(root().join("include/nixlkv.h")).unwrap();
    let name = |line: &str| {
        let (before, _) = line.split_once('(')?;
        let name = before.rsplit([' ', '*']).next()?;
        (before.len() > name.len() && name.starts_with("nixlkv_")).then(|| name.to_owned())
    };
    header.lines().filter(|line| line.starts_with(|c: char| c.is_ascii_lowercase())).filter_map(name).collect()
}

#[test]
fn the_library_exports_what_is_listed_and_nothing_else() {
    let mut expected = listed();
    if cfg!(feature = "fault-injection") {
        expected.insert("nixlkv_test_fault".into());
    }
    let nm = output("nm", &["-D", "--defined-only"]);
    let exported: BTreeSet<String> =
        nm.lines().filter_map(|line| line.split_whitespace().nth(2)).map(str::to_owned).collect();
    let missing: Vec<_> = expected.difference(&exported).collect();
    let extra: Vec<_> = exported.difference(&expected).collect();
    assert!(missing.is_empty() && extra.is_empty(), "missing: {missing:?}; not in tests/symbols.txt: {extra:?}");
}

#[test]
fn the_header_declares_what_is_listed() {
    assert_eq!(declared(), listed());
}

#[test]
fn i2_i6_the_library_has_a_soname_and_stays_loaded() {
    let dynamic = output("readelf", &["-d", "-W"]);
    let entry = |tag: &str| dynamic.lines().filter(|line| line.contains(tag)).collect::<Vec<_>>().join("\n");
    assert!(entry("(SONAME)").contains("[libnixlkv.so.0]"), "{dynamic}");
    assert!(entry("(FLAGS_1)").contains("NODELETE"), "{dynamic}");
}

/// NIXL and CUDA are found at run time: a machine without them loads the library all the same.
#[test]
fn i13_the_library_needs_neither_nixl_nor_cuda_to_load() {
    let dynamic = output("readelf", &["-d", "-W"]);
    let needed: Vec<&str> = dynamic.lines().filter(|line| line.contains("(NEEDED)")).collect();
    assert!(!needed.is_empty(), "{dynamic}");
    for foreign in ["nixl", "ucp", "ucs", "uct", "cuda", "nvrtc"] {
        assert!(!needed.iter().any(|line| line.contains(&format!("lib{foreign}"))), "{needed:?}");
    }
}
