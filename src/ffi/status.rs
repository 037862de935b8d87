//! Versions, status codes and the last error.

use std::ffi::c_char;

use crate::error::status_entry;

use super::guard::last_error;

/// The version of this header's binary interface. A library with another major number is not compatible.
pub const NIXLKV_ABI_VERSION: u32 = 1;

/// Tells the binary interface's version of the loaded library, to compare with NIXLKV_ABI_VERSION.
///
/// Any thread; never blocks; works without NIXL.
#[unsafe(no_mangle)]
pub extern "C" fn nixlkv_abi_version() -> u32 {
    NIXLKV_ABI_VERSION
}

/// Tells the library's version as text, such as "0.1.0". The string is static.
///
/// Any thread; never blocks; works without NIXL.
#[unsafe(no_mangle)]
pub extern "C" fn nixlkv_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Gives a status code's name, such as "NIXL_ERR_AUX_MISSING", or "NIXL_ERR_?" for a number that is no code. The
/// string is static.
///
/// Any thread; never blocks; works without NIXL.
#[unsafe(no_mangle)]
pub extern "C" fn nixlkv_status_name(status: i32) -> *const c_char {
    status_entry(status).map_or("NIXL_ERR_?\0", |entry| entry.c_name).as_ptr().cast()
}

/// Gives one line of text for a status code. The string is static.
///
/// Any thread; never blocks; works without NIXL.
#[unsafe(no_mangle)]
pub extern "C" fn nixlkv_status_text(status: i32) -> *const c_char {
    status_entry(status).map_or("not a status code of nixlkv\0", |entry| entry.c_text).as_ptr().cast()
}

/// Tells whether a retry can help: 1 when the same call, or a new room for the same request, may succeed later without
/// anybody changing anything; 0 otherwise, also for a number that is no code.
///
/// Any thread; never blocks; works without NIXL.
#[unsafe(no_mangle)]
pub extern "C" fn nixlkv_status_retryable(status: i32) -> i32 {
    i32::from(status_entry(status).is_some_and(|entry| entry.retryable))
}

/// Gives the code's name, number and the offending values of the calling thread's last failed call, or "" when none
/// has failed. The string belongs to the library and lives until the thread's next failed call. A successful call does
/// not change it.
///
/// Any thread; never blocks; works without NIXL.
#[unsafe(no_mangle)]
pub extern "C" fn nixlkv_last_error() -> *const c_char {
    last_error()
}
