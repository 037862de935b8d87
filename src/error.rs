//! The status codes and the error type: one table for Rust, the header and README.

use std::borrow::Cow;
use std::fmt;

/// Declares every status code once: number, whether a retry can help, and one line of text.
///
/// The order of the ranges follows who can mend the fault: -1xx the caller, -2xx the caller's memory, -3xx the
/// machine, -4xx the transfer or the peer, -5xx this library.
macro_rules! status_table {
    ($($name:ident = $code:literal, $retry:literal, $text:literal;)*) => {
        $(#[doc = $text] pub const $name: i32 = $code;)*

        /// Every code with its name, its text and whether a retry can help, in the order of the numbers.
        pub const TABLE: &[StatusEntry] = &[
            $(StatusEntry {
                code: $code,
                name: stringify!($name),
                c_name: concat!(stringify!($name), "\0"),
                text: $text,
                c_text: concat!($text, "\0"),
                retryable: $retry,
            },)*
        ];
    };
}

/// One row of the code table.
#[derive(Debug, Clone, Copy)]
pub struct StatusEntry {
    /// The number, stable for ever.
    pub code: i32,
    /// The name as C spells it.
    pub name: &'static str,
    pub(crate) c_name: &'static str,
    /// One line for people.
    pub text: &'static str,
    pub(crate) c_text: &'static str,
    /// Whether the same call, or a fresh room, can succeed later without anybody changing anything.
    pub retryable: bool,
}

status_table! {
    NIXL_OK = 0, false, "success";

    NIXL_ERR_INVALID_ARGUMENT = -101, false, "an argument is null, misaligned, out of its domain or not valid UTF-8";
    NIXL_ERR_INVALID_HANDLE = -102, false, "the handle is null, destroyed, or was never given out";
    NIXL_ERR_STRUCT_SIZE = -103, false, "struct_size is too small, or an unknown tail of the struct is not zero";
    NIXL_ERR_FORKED = -104, false, "this process is a fork's child: the engine belongs to its parent";
    NIXL_ERR_ROLE = -105, false, "the engine's role does not include this call";
    NIXL_ERR_BUFFER_TOO_SMALL = -106, false, "the caller's buffer is too small: the needed length was written";
    NIXL_ERR_SHUT_DOWN = -107, false, "the engine has been shut down";
    NIXL_ERR_ROOM_IN_USE = -110, false, "the room is open already: release it first";
    NIXL_ERR_ROOM_UNKNOWN = -111, false, "no such room is open here";
    NIXL_ERR_ROOM_ENDED = -112, false, "the room has ended: poll tells how";
    NIXL_ERR_ROOM_ACTIVE = -113, false, "the room has not ended: wait for it, or abort it";
    NIXL_ERR_NOT_QUIESCED = -114, true, "something can still touch the room's memory";
    NIXL_ERR_PAGE_OUT_OF_RANGE = -120, false, "a page index lies outside the registered KV regions";
    NIXL_ERR_PAGE_DUPLICATE = -121, false, "a destination page is listed twice";
    NIXL_ERR_PAGE_OVERLAP = -122, false, "the chunk covers positions of the page list that an earlier chunk sent";
    NIXL_ERR_PAGE_COUNT = -123, false, "the two sides' page lists differ in length";
    NIXL_ERR_PAGES_INCOMPLETE = -124, false, "the last chunk leaves positions of the page list unsent";
    NIXL_ERR_PAGE_IN_USE = -125, true, "a destination page belongs to a room that is not quiesced";
    NIXL_ERR_CHUNK_AFTER_LAST = -126, false, "the room's last chunk has been sent";
    NIXL_ERR_CHUNK_EMPTY = -127, false, "a chunk without pages must be the last";
    NIXL_ERR_AUX_MISSING = -130, false, "the last chunk needs an aux index";
    NIXL_ERR_AUX_OUT_OF_RANGE = -131, false, "the aux index lies outside the registered aux regions";
    NIXL_ERR_AUX_NOT_OWNER = -132, false, "another sender owns the room's aux slot";
    NIXL_ERR_AUX_UNEXPECTED = -133, false, "an aux index where none belongs";
    NIXL_ERR_AUX_IN_USE = -134, true, "the aux slot belongs to a room that is not quiesced";
    NIXL_ERR_STATE_MISSING = -140, false, "the last chunk needs state indices for this group";
    NIXL_ERR_STATE_OUT_OF_RANGE = -141, false, "a state index lies outside the group's regions";
    NIXL_ERR_STATE_COUNT = -142, false, "the two sides' state index lists differ in length";
    NIXL_ERR_STATE_UNEXPECTED = -143, false, "state indices where none belong";
    NIXL_ERR_STATE_IN_USE = -144, true, "a state slot belongs to a room that is not quiesced";
    NIXL_ERR_PEER_UNKNOWN = -150, false, "no such peer is connected";
    NIXL_ERR_PEER_SELF = -151, false, "the blob is this engine's own";
    NIXL_ERR_PEER_DUPLICATE = -152, false, "a sender is listed twice";
    NIXL_ERR_PEER_BUSY = -153, true, "the peer has rooms that are not quiesced";
    NIXL_ERR_LAYERS_INCOMPLETE = -155, false, "no sender of the room has this region";
    NIXL_ERR_LAYERS_OVERLAP = -156, false, "two senders of the room have the same region";

    NIXL_ERR_REGION_EMPTY = -201, false, "a region's address, length or item length is zero";
    NIXL_ERR_REGION_ITEM = -202, false, "a region's length is not a whole number of items";
    NIXL_ERR_REGION_WRAPS = -203, false, "a region's address plus length passes 2^64";
    NIXL_ERR_REGION_UNMAPPED = -204, false, "a region is not mapped, or not readable and writable as its role needs";
    NIXL_ERR_REGION_OVERLAP = -205, false, "a region overlaps another one";
    NIXL_ERR_REGION_DUPLICATE = -206, false, "a region with this layer, part, array or tensor is registered already";
    NIXL_ERR_REGION_KIND = -207, false, "an unknown kind, part, memory kind or flag of a region";
    NIXL_ERR_REGION_UNKNOWN = -208, false, "no such region is registered";
    NIXL_ERR_REGION_BUSY = -209, true, "rooms that are not quiesced use the registered memory";
    NIXL_ERR_REGISTER_KV = -210, false, "NIXL refused to register a KV region";
    NIXL_ERR_REGISTER_AUX = -211, false, "NIXL refused to register an aux region";
    NIXL_ERR_REGISTER_STATE = -212, false, "NIXL refused to register a state region";

    NIXL_ERR_LIBRARY_NOT_FOUND = -301, false, "libnixl_capi.so was found nowhere";
    NIXL_ERR_LIBRARY_INVALID = -302, false, "libnixl_capi.so was found but cannot be loaded";
    NIXL_ERR_SYMBOL_MISSING = -303, false, "libnixl_capi.so lacks a function: another version of NIXL";
    NIXL_ERR_PLUGIN_NOT_FOUND = -304, false, "NIXL has no plugin for the backend";
    NIXL_ERR_PLUGIN_INVALID = -305, false, "the backend's plugin cannot be loaded";
    NIXL_ERR_BACKEND_FAILED = -306, false, "the backend could not start";
    NIXL_ERR_CREATE_TIMEOUT = -307, true, "the engine did not start within its time limit";
    NIXL_ERR_CUDA_UNAVAILABLE = -308, false, "VRAM was asked for, and there is no CUDA driver or no such device";

    NIXL_ERR_QUEUE_FULL = -401, true, "the queue is full: poll, then try again";
    NIXL_ERR_TOO_MANY_ROOMS = -402, true, "the limit of open rooms is reached";
    NIXL_ERR_METADATA_INVALID = -410, false, "the blob is truncated, altered, or not a nixlkv blob";
    NIXL_ERR_WIRE_VERSION = -411, false, "the peer speaks another version of the wire format";
    NIXL_ERR_DTYPE_DIFFERS = -412, false, "the two sides' cache dtypes differ";
    NIXL_ERR_LAYOUT_DIFFERS = -413, false, "the two sides' layouts cannot be mapped onto each other";
    NIXL_ERR_PEER_STALE = -414, false, "regions changed since the blobs were exchanged: export and connect again";
    NIXL_ERR_PEER_LOST = -415, true, "the peer is gone, or silent for longer than the liveness limit";
    NIXL_ERR_PEER_RESTARTED = -416, true, "a new instance of the peer has replaced the one this room used";
    NIXL_ERR_PEER_DISCONNECTED = -417, false, "the peer was disconnected, or shut down";
    NIXL_ERR_PEER_NOT_READY = -418, true, "the peer has not connected back within the time limit";
    NIXL_ERR_XFER_FAILED = -420, true, "NIXL reported a failed transfer";
    NIXL_ERR_GRANT_TIMEOUT = -421, true, "no decode side asked for the room within the time limit";
    NIXL_ERR_ROOM_TIMEOUT = -422, true, "the room made no progress within its time limit";
    NIXL_ERR_ABORTED = -423, false, "the room was aborted";
    NIXL_ERR_WAIT_TIMEOUT = -424, true, "the wait's time limit passed first";
    NIXL_ERR_PROTOCOL = -425, false, "the peer sent something that contradicts the room";
    NIXL_ERR_DRAIN_TIMEOUT = -426, true, "transfers were still in progress when the drain's time limit passed";
    NIXL_ERR_XFER_STALLED = -427, true, "a posted transfer made no progress within its time limit";

    NIXL_ERR_INTERNAL = -501, false, "a fault inside nixlkv: please report it";
}

/// Looks a code up in [`TABLE`].
pub fn status_entry(code: i32) -> Option<&'static StatusEntry> {
    TABLE.iter().find(|entry| entry.code == code)
}

/// An error: a code of [`TABLE`] and a text with the offending values.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Error {
    /// The code, negative.
    pub code: i32,
    /// What exactly was wrong.
    pub text: Cow<'static, str>,
}

impl Error {
    /// An error with its text.
    pub fn new(code: i32, text: impl Into<Cow<'static, str>>) -> Self {
        Self { code, text: text.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = status_entry(self.code).map_or("unknown code", |entry| entry.name);
        write!(f, "{name} ({}): {}", self.code, self.text)
    }
}

impl std::error::Error for Error {}

/// The crate's result.
pub type Result<T> = std::result::Result<T, Error>;

/// `fail!(CODE, "format {}", value)`: builds the error and returns it.
macro_rules! fail {
    ($code:ident, $($arg:tt)*) => {
        return Err($crate::error::Error::new($crate::error::$code, format!($($arg)*)))
    };
}
pub(crate) use fail;

/// [`fail!`] with a code that is computed.
macro_rules! fail_with {
    ($code:expr, $($arg:tt)*) => {
        return Err($crate::error::Error::new($code, format!($($arg)*)))
    };
}
pub(crate) use fail_with;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_unique_and_in_their_ranges() {
        for (i, entry) in TABLE.iter().enumerate() {
            assert!(entry.code == 0 || (-599..=-101).contains(&entry.code), "{}", entry.name);
            assert!(
                TABLE[..i].iter().all(|other| other.code > entry.code && other.name != entry.name),
                "{}",
                entry.name
            );
            assert!(!entry.text.is_empty() && !entry.text.contains('\n'));
        }
    }

    /// Names of NIXL's own `nixl_status_t`, which a C++ engine includes beside our header.
    #[test]
    fn no_name_of_nixl_is_taken() {
        let taken = [
            "NOT_POSTED",
            "INVALID_PARAM",
            "BACKEND",
            "NOT_FOUND",
            "MISMATCH",
            "NOT_ALLOWED",
            "REPOST_ACTIVE",
            "UNKNOWN",
            "NOT_SUPPORTED",
            "REMOTE_DISCONNECT",
            "CANCELED",
            "NO_TELEMETRY",
        ];
        for entry in TABLE {
            assert!(!taken.iter().any(|name| entry.name == format!("NIXL_ERR_{name}")), "{}", entry.name);
            assert!(entry.name != "NIXL_SUCCESS" && entry.name != "NIXL_IN_PROG");
        }
    }
}
