//! Exporting and connecting.

use std::ffi::c_void;

use crate::error::*;

use super::engine::nixlkv_engine_t;
use super::guard::guard;
use super::handle;
use super::params;

/// Gives the blob that peers connect with: NIXL's metadata, the region table, the layout and the engine's instance,
/// checksummed and versioned. The engines' own control plane carries it. It is opaque, holds no secrets beyond
/// addresses, and goes out of date when regions are registered or deregistered.
///
/// buffer: receives the blob; may be NULL when capacity is 0. capacity: its bytes. len: receives the blob's length, also
/// with NIXL_ERR_BUFFER_TOO_SMALL.
/// Any thread. May wait for a NIXL call that is under way.
/// Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_BUFFER_TOO_SMALL,
/// NIXL_ERR_SHUT_DOWN, NIXL_ERR_INTERNAL.
///
/// # Safety
///
/// C contract: buffer points to capacity writable bytes, len to a writable value.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_export(
    engine: *mut nixlkv_engine_t,
    buffer: *mut c_void,
    capacity: u64,
    len: *mut u64,
) -> i32 {
    guard(|| {
        let engine = handle::get(engine)?;
        params::output(len, "len")?;
        if buffer.is_null() && capacity > 0 {
            fail!(NIXL_ERR_INVALID_ARGUMENT, "buffer is NULL and capacity is {capacity}");
        }
        let blob = engine.export()?;
        // SAFETY: checked for NULL and alignment; the caller promises it is writable.
        unsafe { len.write(blob.len() as u64) };
        if (blob.len() as u64) > capacity {
            fail!(NIXL_ERR_BUFFER_TOO_SMALL, "the blob has {} bytes, the buffer {capacity}", blob.len());
        }
        // SAFETY: the caller promises `capacity` writable bytes, and the blob fits.
        unsafe { std::ptr::copy_nonoverlapping(blob.as_ptr(), buffer.cast::<u8>(), blob.len()) };
        Ok(())
    })
}

/// Connects a peer by the blob that its nixlkv_export gave. Both sides must connect each other; the order does not
/// matter, and rooms may be opened at once: they wait until the peer has connected back.
///
/// What cannot be mapped is refused, naming both values: another wire version, cache dtype, region set, bytes per page
/// or slot. The same blob again gives the same peer. A newer blob of the same engine updates it. A blob of an engine
/// with the name of a connected one but another instance means that it restarted: it gets a new id, and the rooms of
/// the old one fail with NIXL_ERR_PEER_RESTARTED. A peer that was lost and still lives is connected again by itself, and
/// at once by this call. An engine that reaches nobody at the blob's address gets NIXL_ERR_PEER_LOST, unless the
/// process of a destroyed engine still lives there: then the rooms fail with it.
///
/// blob, len: read during the call only; altered or truncated ones are refused. peer: receives the id on success, never
/// 0.
/// Any thread. May wait for a NIXL call that is under way, not for the peer.
/// Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_SHUT_DOWN, NIXL_ERR_PEER_SELF,
/// NIXL_ERR_PEER_BUSY, NIXL_ERR_METADATA_INVALID, NIXL_ERR_WIRE_VERSION, NIXL_ERR_DTYPE_DIFFERS,
/// NIXL_ERR_LAYOUT_DIFFERS, NIXL_ERR_PEER_STALE, NIXL_ERR_PEER_LOST, NIXL_ERR_INTERNAL.
///
/// # Safety
///
/// C contract: blob points to len readable bytes, peer to a writable value.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_connect(
    engine: *mut nixlkv_engine_t,
    blob: *const c_void,
    len: u64,
    peer: *mut u64,
) -> i32 {
    guard(|| {
        let engine = handle::get(engine)?;
        params::output(peer, "peer")?;
        // SAFETY: the caller's promise.
        let bytes = unsafe { params::list(blob.cast::<u8>(), len, "blob")? };
        let id = engine.connect(bytes)?;
        // SAFETY: checked for NULL and alignment; the caller promises it is writable.
        unsafe { peer.write(id) };
        Ok(())
    })
}

/// Disconnects a peer and closes the connection. Refused with NIXL_ERR_PEER_BUSY while a room with it is not quiesced:
/// abort such rooms first.
///
/// peer: the id that nixlkv_connect gave; it is not used again.
/// Any thread; never blocks.
/// Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_PEER_UNKNOWN, NIXL_ERR_PEER_BUSY, NIXL_ERR_INTERNAL.
///
/// # Safety
///
/// C contract: none beyond the types.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_disconnect(engine: *mut nixlkv_engine_t, peer: u64) -> i32 {
    guard(|| handle::get(engine)?.disconnect(peer))
}
