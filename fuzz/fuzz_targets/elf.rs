//! Shared libraries, as we look into them before the dynamic linker does.
#![no_main]

#[allow(dead_code, clippy::duplicate_mod)]
#[path = "../../src/nixl/elf.rs"]
mod elf;

use std::path::PathBuf;
use std::sync::OnceLock;

use nixlkv_fuzz::frugal;

/// The file that takes every input. In memory where it can be, in a folder where nothing else is to be found.
fn file() -> &'static PathBuf {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    FILE.get_or_init(|| {
        let shm = PathBuf::from("/dev/shm");
        let base = if shm.is_dir() { shm } else { std::env::temp_dir() };
        let dir = base.join(format!("nixlkv-fuzz-elf-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        dir.join("library.so")
    })
}

extern "C" fn remove_file() {
    if let Some(dir) = file().parent() {
        let _ = std::fs::remove_dir_all(dir);
    }
}

unsafe extern "C" {
    fn atexit(function: extern "C" fn()) -> i32;
}

libfuzzer_sys::fuzz_target!(
    init: {
        // SAFETY: the function lives as long as the program.
        unsafe { atexit(remove_file) };
    },
    |data: &[u8]| {
        let path = file();
        std::fs::write(path, data).unwrap();
        // What is read stays cached, once for each range that was asked for.
        let checked = frugal(data.len(), 64, || elf::check(path));
        let tree = frugal(data.len(), 64, || elf::check_tree(path));
        assert!(checked.is_err() <= tree.is_err(), "the tree is sound and its root is not");
        if let Err((_, fault)) = &tree {
            assert!(!fault.to_string().is_empty());
        }
        if let Ok(names) = frugal(data.len(), 64, || elf::exports(path)) {
            assert!(names.len() <= data.len());
        }
    }
);
