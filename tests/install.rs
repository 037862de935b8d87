//! `make install` gives a tree that a program links and runs with, dynamically and statically.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

#[allow(dead_code)]
mod common;

use std::fs::read_link;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{library_dir, must, nixl_library, root};

/// Installs this build under a folder of its own; gives the prefix.
fn install(scratch: &Path) -> PathBuf {
    let prefix = scratch.join("prefix");
    let mut make = Command::new("make");
    make.arg("-C").arg(root()).arg("install-built").env_remove("MAKEFLAGS").env_remove("MAKELEVEL");
    make.arg(format!("PREFIX={}", prefix.display())).arg(format!("BUILT={}", library_dir().display()));
    make.args(["DESTDIR=", "LIBDIR=$(PREFIX)/lib", "INCLUDEDIR=$(PREFIX)/include"]);
    must(&mut make, scratch, 60);
    prefix
}

/// A line of `nixlkv.pc`, with its variables filled in.
fn pc(prefix: &Path, key: &str) -> Vec<String> {
    let text = std::fs::read_to_string(prefix.join("lib/pkgconfig/nixlkv.pc")).unwrap();
    assert!(!text.contains('@'), "a variable is left open:\n{text}");
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(": ")).unwrap();
    let variable = |name: &str| {
        let assignment = format!("{name}=");
        text.lines().find_map(|line| line.strip_prefix(&assignment)).unwrap().to_owned()
    };
    let filled = line.replace("${libdir}", &variable("libdir")).replace("${includedir}", &variable("includedir"));
    filled.split_whitespace().map(str::to_owned).collect()
}

/// Compiles the quickstart with the flags and runs it with nothing but the installed library to find.
fn quickstart(scratch: &Path, prefix: &Path, flags: &[String]) {
    let program = scratch.join("quickstart");
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&program);
    cc.arg(root().join("examples-c/quickstart.c")).args(flags);
    must(&mut cc, scratch, 60);
    let mut run = Command::new(&program);
    run.env("LD_LIBRARY_PATH", prefix.join("lib")).envs(nixl_library().map(|path| ("NIXLKV_NIXL_LIBRARY", path)));
    must(&mut run, scratch, 60);
}

#[test]
fn the_installed_tree_is_complete_and_a_program_links_it() {
    let scratch = tempfile::tempdir().unwrap();
    let prefix = install(scratch.path());
    let lib = prefix.join("lib");
    let real = format!("libnixlkv.so.{}", env!("CARGO_PKG_VERSION"));
    assert_eq!(read_link(lib.join("libnixlkv.so")).unwrap(), Path::new("libnixlkv.so.0"));
    assert_eq!(read_link(lib.join("libnixlkv.so.0")).unwrap(), Path::new(&real));
    assert!(lib.join(&real).symlink_metadata().unwrap().is_file());
    let mut flags = pc(&prefix, "Cflags");
    flags.extend(pc(&prefix, "Libs"));
    quickstart(scratch.path(), &prefix, &flags);

    // pkg-config is no tool that the build needs; where it is, it must say the same.
    let mut pkg_config = Command::new("pkg-config");
    pkg_config.args(["--cflags", "--libs", "nixlkv"]).env("PKG_CONFIG_PATH", lib.join("pkgconfig"));
    if let Ok(output) = pkg_config.output() {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(said.split_whitespace().collect::<Vec<_>>(), flags);
    }
}

#[test]
fn a_program_links_the_static_library() {
    let scratch = tempfile::tempdir().unwrap();
    let prefix = install(scratch.path());
    for name in ["libnixlkv.so", "libnixlkv.so.0"] {
        std::fs::remove_file(prefix.join("lib").join(name)).unwrap();
    }
    let mut flags = pc(&prefix, "Cflags");
    flags.extend(pc(&prefix, "Libs"));
    flags.extend(pc(&prefix, "Libs.private"));
    quickstart(scratch.path(), &prefix, &flags);
}
