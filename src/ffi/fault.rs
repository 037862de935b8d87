//! The tests' way to arm a fault point. Only with the feature `fault-injection`; not in the header.

use std::ffi::c_char;

use super::guard::guard;
use super::params;

/// Arms the fault point `name`: it lets `skip` passages through, then fires `times` times.
///
/// # Safety
///
/// `name` is NULL or a NUL-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_test_fault(name: *const c_char, skip: u64, times: u64) -> i32 {
    guard(|| {
        // SAFETY: the caller's promise.
        if let Some(name) = unsafe { params::text(name, "name")? } {
            crate::fault::arm(&name, skip, times);
        }
        Ok(())
    })
}
