//! Fault points for the tests. Without the feature `fault-injection` every point is a constant `false`.
//!
//! A test arms a point through `nixlkv_test_fault(name, skip, times)`: the point lets `skip` passages through, then
//! fires `times` times.

#[cfg(feature = "fault-injection")]
mod armed {
    use std::collections::HashMap;
    use std::sync::{LazyLock, Mutex, PoisonError};

    static POINTS: LazyLock<Mutex<HashMap<String, (u64, u64)>>> = LazyLock::new(Default::default);

    /// Arms a point; `times` 0 disarms it.
    pub fn arm(name: &str, skip: u64, times: u64) {
        POINTS.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned(), (skip, times));
    }

    /// Whether the point fires now.
    pub fn hit(name: &str) -> bool {
        let mut points = POINTS.lock().unwrap_or_else(PoisonError::into_inner);
        match points.get_mut(name) {
            Some((0, 0)) | None => false,
            Some((0, times)) => {
                *times -= 1;
                true
            }
            Some((skip, _)) => {
                *skip -= 1;
                false
            }
        }
    }
}

#[cfg(feature = "fault-injection")]
pub use armed::{arm, hit};

/// Whether the point fires now.
#[cfg(not(feature = "fault-injection"))]
#[inline(always)]
pub fn hit(_name: &str) -> bool {
    false
}
