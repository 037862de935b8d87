//! No panic crosses the boundary, and each thread remembers why its last call failed.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use crate::error::*;

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::new(CString::default());
    static POLL_TEXT: RefCell<CString> = RefCell::new(CString::default());
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// A C string without the inner NULs that a text could hold.
pub(super) fn c_string(text: &str) -> CString {
    CString::new(text.replace('\0', " ")).unwrap_or_default()
}

/// Runs the body of an export: an error becomes its code, a panic `NIXL_ERR_INTERNAL`, and the thread's last error
/// tells the rest.
pub(super) fn guard(body: impl FnOnce() -> Result<()>) -> i32 {
    quiet_panics();
    let outer = INSIDE.replace(true);
    let result = catch_unwind(AssertUnwindSafe(|| {
        assert!(!crate::fault::hit("call_panics"), "armed fault point");
        body()
    }));
    INSIDE.set(outer);
    let error = match result {
        Ok(Ok(())) => return NIXL_OK,
        Ok(Err(error)) => error,
        Err(payload) => {
            let text = payload
                .downcast_ref::<&str>()
                .map(|text| (*text).to_owned())
                .or_else(|| payload.downcast_ref::<String>().cloned())
                .unwrap_or_default();
            Error::new(NIXL_ERR_INTERNAL, format!("panic: {text}"))
        }
    };
    let code = error.code;
    let _ = LAST_ERROR.try_with(|last| *last.borrow_mut() = c_string(&error.to_string()));
    code
}

/// The text of this thread's last failed call. It lives until the thread's next failed call.
pub(super) fn last_error() -> *const std::ffi::c_char {
    LAST_ERROR.try_with(|last| last.borrow().as_ptr()).unwrap_or(CStr::as_ptr(c""))
}

/// Keeps a text alive until this thread's next poll.
pub(super) fn keep_poll_text(text: &str) -> *const std::ffi::c_char {
    POLL_TEXT
        .try_with(|kept| {
            *kept.borrow_mut() = c_string(text);
            kept.borrow().as_ptr()
        })
        .unwrap_or(CStr::as_ptr(c""))
}

/// A panic that we catch must not print to the host's stderr: it goes to the log. Others keep their hook.
fn quiet_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let ours = std::thread::current().name().is_some_and(|name| name.starts_with("nixlkv-"));
            if ours || INSIDE.try_with(Cell::get).unwrap_or(false) {
                log::error!("{info}");
            } else {
                before(info);
            }
        }));
    });
}
