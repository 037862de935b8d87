//! Link arguments of the shared library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        // The name that programs record, and by which the loader finds the library: changes with the ABI's major number.
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnixlkv.so.0");
        // Threads' destructors and the exit handler point into the library: it must never be unmapped.
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
        // NIXL's stubs are linked in; they must not be taken for NIXL by others in the process.
        println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
    }
}
