//! Rooms: receive, send, poll, wait, abort, release.

use std::ffi::c_char;
use std::time::Duration;

use crate::engine::{RecvRequest, WaitFor};
use crate::error::*;
use crate::room::{Chunk, StateIndices};

use super::engine::nixlkv_engine_t;
use super::guard::{guard, keep_poll_text};
use super::handle;
use super::params::{self, Sized32};

/// State of a room: it failed; error and error_text say why. Ended.
pub const NIXLKV_ROOM_FAILED: u32 = 0;
/// State of a room: the other side is not known yet (no grant has come, or a sender has not connected back).
pub const NIXLKV_ROOM_BOOTSTRAPPING: u32 = 1;
/// State of a room: both sides know each other, and no chunk has come yet.
pub const NIXLKV_ROOM_WAITING_FOR_INPUT: u32 = 2;
/// State of a room: chunks are on their way.
pub const NIXLKV_ROOM_TRANSFERRING: u32 = 3;
/// State of a room: everything is in the receiver's memory, and this side knows. Ended.
pub const NIXLKV_ROOM_SUCCESS: u32 = 4;

/// Flag of a chunk: it is the room's last.
pub const NIXLKV_CHUNK_LAST: u32 = 1;
/// Flag of the last chunk: no aux index is given although aux regions are registered, since another sender owns the
/// room's aux slot or the receiver asked for none.
pub const NIXLKV_CHUNK_NO_AUX: u32 = 2;

/// Wait until every room has ended.
pub const NIXLKV_WAIT_ALL: u32 = 0;
/// Flag of nixlkv_wait: until at least one has.
pub const NIXLKV_WAIT_ANY: u32 = 1;
/// Flag of nixlkv_wait: ended and quiesced, rather than ended.
pub const NIXLKV_WAIT_QUIESCED: u32 = 2;

/// Slot indices in one state group. Set up by nixlkv_state_indices_init.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nixlkv_state_indices_t {
    /// sizeof(nixlkv_state_indices_t) of the caller.
    pub struct_size: u32,
    /// The group, as registered.
    pub group: u32,
    /// num_indices slots; the sender's i-th goes to the receiver's i-th.
    pub indices: *const i32,
    /// Entries of indices.
    pub num_indices: u64,
}

// SAFETY: see Sized32.
unsafe impl Sized32 for nixlkv_state_indices_t {}

/// What a decode engine wants to receive: the grant of a room. Set up by nixlkv_recv_params_init. Read during the call
/// only.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nixlkv_recv_params_t {
    /// sizeof(nixlkv_recv_params_t) of the caller.
    pub struct_size: u32,
    /// Zero.
    pub reserved: u32,
    /// The room: chosen by the engines' router, the same on both sides.
    pub room: u64,
    /// The sending peers. Several senders have different layers or state groups; together they must have every region
    /// that the room needs, and no region twice.
    pub senders: *const u64,
    /// Entries of senders, at least 1.
    pub num_senders: u64,
    /// Destination pages: the room's page list. NULL with 0: everything is on this side already (a full prefix hit).
    pub pages: *const i32,
    /// Entries of pages.
    pub num_pages: u64,
    /// Points to the destination aux slot. NULL: this room has no aux.
    pub aux_index: *const i32,
    /// The sender that fills the aux slot. 0: senders[0].
    pub aux_sender: u64,
    /// Destination state slots.
    pub states: *const nixlkv_state_indices_t,
    /// Entries of states.
    pub num_states: u64,
    /// How many decode engines each sender fills for this room. 0: 1.
    pub num_receivers: u64,
    /// Milliseconds without progress after which the room fails. 0: the engine's room_timeout_ms.
    pub timeout_ms: u64,
}

// SAFETY: see Sized32.
unsafe impl Sized32 for nixlkv_recv_params_t {}

/// What a prefill engine sends in one go. Set up by nixlkv_chunk_init. Read during the call only; the pages and slots
/// themselves must stay unchanged until poll says that the room is quiesced.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nixlkv_chunk_t {
    /// sizeof(nixlkv_chunk_t) of the caller.
    pub struct_size: u32,
    /// NIXLKV_CHUNK_*, or-ed.
    pub flags: u32,
    /// The room.
    pub room: u64,
    /// Source pages. NULL with 0 only with NIXLKV_CHUNK_LAST.
    pub pages: *const i32,
    /// Entries of pages.
    pub num_pages: u64,
    /// Where they start in the room's page list: pages[i] goes to the receiver's page number page_offset + i.
    pub page_offset: u64,
    /// Points to the source aux slot. NULL: none. With NIXLKV_CHUNK_LAST only, and only when the receiver asked for aux.
    pub aux_index: *const i32,
    /// Source state slots. With NIXLKV_CHUNK_LAST only.
    pub states: *const nixlkv_state_indices_t,
    /// Entries of states.
    pub num_states: u64,
}

// SAFETY: see Sized32.
unsafe impl Sized32 for nixlkv_chunk_t {}

/// What nixlkv_poll tells of a room.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nixlkv_room_status_t {
    /// sizeof(nixlkv_room_status_t) of the caller.
    pub struct_size: u32,
    /// NIXLKV_ROOM_*.
    pub state: u32,
    /// NIXL_OK, or the code of the first cause, from whichever side.
    pub error: i32,
    /// 1: the room has ended and nothing can read or write its memory any more; its pages and slots may be reused.
    pub quiesced: u32,
    /// What exactly failed, or "". Valid until the calling thread's next nixlkv_poll.
    pub error_text: *const c_char,
    /// Chunks that have landed (sender: at every receiver).
    pub num_chunks: u64,
    /// Pages that have landed.
    pub num_pages: u64,
    /// Bytes that have landed: KV, state and aux.
    pub num_bytes: u64,
    /// Sender: descriptors posted to NIXL; neighbouring pages share one.
    pub num_descriptors: u64,
    /// Sender: chunks accepted that have not landed.
    pub num_pending_chunks: u64,
    /// Receiver: senders whose part is not complete; after a failure, senders that have not drained.
    pub num_pending_senders: u64,
    /// 1: a peer of the room has missed two heartbeats. It is not lost yet, or it is lost and its pages wait for it.
    pub suspect: u32,
    /// Zero.
    pub reserved: u32,
}

// SAFETY: see Sized32.
unsafe impl Sized32 for nixlkv_room_status_t {}

/// Zeroes a state index list and sets its size.
///
/// indices: the caller's struct. struct_size: sizeof(nixlkv_state_indices_t).
/// Any thread; never blocks. Errors: NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE.
///
/// # Safety
///
/// C contract: indices points to struct_size writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_state_indices_init(indices: *mut nixlkv_state_indices_t, struct_size: u32) -> i32 {
    // SAFETY: the caller's promise.
    guard(|| unsafe { params::init(indices, struct_size, "indices") })
}

/// Zeroes receive parameters and sets their size.
///
/// params: the caller's struct. struct_size: sizeof(nixlkv_recv_params_t).
/// Any thread; never blocks. Errors: NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE.
///
/// # Safety
///
/// C contract: params points to struct_size writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_recv_params_init(params: *mut nixlkv_recv_params_t, struct_size: u32) -> i32 {
    // SAFETY: the caller's promise.
    guard(|| unsafe { params::init(params, struct_size, "params") })
}

/// Zeroes a chunk and sets its size.
///
/// chunk: the caller's struct. struct_size: sizeof(nixlkv_chunk_t).
/// Any thread; never blocks. Errors: NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE.
///
/// # Safety
///
/// C contract: chunk points to struct_size writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_chunk_init(chunk: *mut nixlkv_chunk_t, struct_size: u32) -> i32 {
    // SAFETY: the caller's promise.
    guard(|| unsafe { params::init(chunk, struct_size, "chunk") })
}

/// Zeroes a room status and sets its size.
///
/// status: the caller's struct. struct_size: sizeof(nixlkv_room_status_t).
/// Any thread; never blocks. Errors: NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE.
///
/// # Safety
///
/// C contract: status points to struct_size writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_room_status_init(status: *mut nixlkv_room_status_t, struct_size: u32) -> i32 {
    // SAFETY: the caller's promise.
    guard(|| unsafe { params::init(status, struct_size, "status") })
}

/// # Safety
///
/// `states` points to `num` structs as nixlkv_state_indices_t says.
unsafe fn states_from_c(states: *const nixlkv_state_indices_t, num: u64) -> Result<Vec<StateIndices>> {
    // SAFETY: the caller's promise.
    let raw = unsafe { params::structs(states, num, "states")? };
    raw.iter()
        // SAFETY: the caller's promise.
        .map(|raw| unsafe { Ok((raw.group, params::list(raw.indices, raw.num_indices, "state indices")?.to_vec())) })
        .collect()
}

/// Opens a room as its receiver: tells the senders where the request's KV, state and aux go.
///
/// The pages and slots belong to the room until poll says that it is quiesced; a page or slot of another room that is
/// not quiesced is refused. The call checks and queues; a refused call changes nothing.
///
/// params: read during the call only.
/// Any thread; never blocks.
/// Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE,
/// NIXL_ERR_SHUT_DOWN, NIXL_ERR_ROLE, NIXL_ERR_ROOM_IN_USE, NIXL_ERR_TOO_MANY_ROOMS, NIXL_ERR_PAGE_OUT_OF_RANGE,
/// NIXL_ERR_PAGE_DUPLICATE, NIXL_ERR_PAGE_IN_USE, NIXL_ERR_AUX_OUT_OF_RANGE, NIXL_ERR_AUX_UNEXPECTED,
/// NIXL_ERR_AUX_IN_USE, NIXL_ERR_STATE_OUT_OF_RANGE, NIXL_ERR_STATE_UNEXPECTED, NIXL_ERR_STATE_IN_USE,
/// NIXL_ERR_PEER_UNKNOWN, NIXL_ERR_PEER_DUPLICATE, NIXL_ERR_PEER_LOST, NIXL_ERR_PEER_DISCONNECTED (it has said goodbye),
/// NIXL_ERR_PEER_STALE, NIXL_ERR_LAYERS_INCOMPLETE, NIXL_ERR_LAYERS_OVERLAP, NIXL_ERR_INTERNAL.
///
/// # Safety
///
/// C contract: params points to a nixlkv_recv_params_t as described.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_recv(engine: *mut nixlkv_engine_t, params: *const nixlkv_recv_params_t) -> i32 {
    guard(|| {
        let engine = handle::get(engine)?;
        // SAFETY: the caller's promise, for the struct and all that it points to.
        let request = unsafe {
            let raw = params::read(params, "params")?;
            if raw.reserved != 0 {
                fail!(NIXL_ERR_INVALID_ARGUMENT, "params: reserved is not zero");
            }
            let Ok(num_receivers) = u32::try_from(raw.num_receivers) else {
                fail!(NIXL_ERR_INVALID_ARGUMENT, "params: num_receivers is {}", raw.num_receivers);
            };
            RecvRequest {
                room: raw.room,
                senders: params::list(raw.senders, raw.num_senders, "params: senders")?.to_vec(),
                pages: params::list(raw.pages, raw.num_pages, "params: pages")?.to_vec(),
                aux: params::optional(raw.aux_index, "params: aux_index")?,
                aux_sender: (raw.aux_sender != 0).then_some(raw.aux_sender),
                states: states_from_c(raw.states, raw.num_states)?,
                num_receivers: num_receivers.max(1),
                timeout: (raw.timeout_ms != 0).then_some(raw.timeout_ms),
            }
        };
        engine.recv(request)
    })
}

/// Sends a chunk of a room: queues it, and returns. The first chunk opens the room on this side; it may come before the
/// receiver's grant and waits then, for at most the engine's grant_timeout_ms. With the last chunk go the aux slot and
/// the state slots. Chunks may be sent in any order of page_offset; the last must leave no page unsent.
///
/// Everything that can be checked is checked before anything moves: a refused call leaves the room as it was, and the
/// corrected call succeeds.
///
/// chunk: read during the call only.
/// Any thread; never blocks.
/// Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE,
/// NIXL_ERR_SHUT_DOWN, NIXL_ERR_ROLE, NIXL_ERR_ROOM_IN_USE, NIXL_ERR_ROOM_ENDED (poll tells why),
/// NIXL_ERR_TOO_MANY_ROOMS, NIXL_ERR_QUEUE_FULL, NIXL_ERR_PAGE_OUT_OF_RANGE, NIXL_ERR_PAGE_OVERLAP,
/// NIXL_ERR_PAGE_COUNT, NIXL_ERR_PAGES_INCOMPLETE, NIXL_ERR_CHUNK_AFTER_LAST, NIXL_ERR_CHUNK_EMPTY,
/// NIXL_ERR_AUX_MISSING, NIXL_ERR_AUX_OUT_OF_RANGE, NIXL_ERR_AUX_NOT_OWNER, NIXL_ERR_AUX_UNEXPECTED,
/// NIXL_ERR_STATE_MISSING, NIXL_ERR_STATE_OUT_OF_RANGE, NIXL_ERR_STATE_COUNT, NIXL_ERR_STATE_UNEXPECTED,
/// NIXL_ERR_INTERNAL. What only the grant can tell is checked when it comes, and fails the room on both sides with the
/// same codes.
///
/// # Safety
///
/// C contract: chunk points to a nixlkv_chunk_t as described.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_send_chunk(engine: *mut nixlkv_engine_t, chunk: *const nixlkv_chunk_t) -> i32 {
    guard(|| {
        let engine = handle::get(engine)?;
        // SAFETY: the caller's promise, for the struct and all that it points to.
        let (room, chunk) = unsafe {
            let raw = params::read(chunk, "chunk")?;
            if raw.flags & !(NIXLKV_CHUNK_LAST | NIXLKV_CHUNK_NO_AUX) != 0 {
                fail!(NIXL_ERR_INVALID_ARGUMENT, "chunk: unknown flags {:#x}", raw.flags);
            }
            let chunk = Chunk {
                pages: params::list(raw.pages, raw.num_pages, "chunk: pages")?.into(),
                page_offset: raw.page_offset,
                last: raw.flags & NIXLKV_CHUNK_LAST != 0,
                aux: params::optional(raw.aux_index, "chunk: aux_index")?,
                no_aux: raw.flags & NIXLKV_CHUNK_NO_AUX != 0,
                states: states_from_c(raw.states, raw.num_states)?.into(),
            };
            (raw.room, chunk)
        };
        engine.send_chunk(room, chunk)
    })
}

/// Tells how a room stands. On a prefill engine a room that a receiver has granted shows as
/// NIXLKV_ROOM_WAITING_FOR_INPUT before its first chunk.
///
/// status: set up by nixlkv_room_status_init; written on success only.
/// Any thread; never blocks.
/// Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE,
/// NIXL_ERR_ROOM_UNKNOWN, NIXL_ERR_INTERNAL.
///
/// # Safety
///
/// C contract: status points to a nixlkv_room_status_t of its struct_size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_poll(
    engine: *const nixlkv_engine_t,
    room: u64,
    status: *mut nixlkv_room_status_t,
) -> i32 {
    guard(|| {
        let engine = handle::get(engine)?;
        // SAFETY: the caller's promise.
        unsafe { params::check_writable(status, "status")? };
        let view = engine.poll(room)?;
        let value = nixlkv_room_status_t {
            struct_size: 0,
            state: view.state as u32,
            error: view.cause.as_ref().map_or(NIXL_OK, |cause| cause.code),
            quiesced: u32::from(view.quiesced),
            error_text: match &view.cause {
                Some(cause) => keep_poll_text(&cause.text),
                None => c"".as_ptr(),
            },
            num_chunks: view.num_chunks,
            num_pages: view.num_pages,
            num_bytes: view.num_bytes,
            num_descriptors: view.num_descriptors,
            num_pending_chunks: view.num_pending_chunks,
            num_pending_senders: view.num_pending_senders,
            suspect: u32::from(view.suspect),
            reserved: 0,
        };
        // SAFETY: the caller's promise.
        unsafe { params::write(status, &value, "status") }
    })
}

/// Waits until rooms have ended, in success or failure; poll tells which.
///
/// rooms: num_rooms rooms that are open here. flags: NIXLKV_WAIT_ALL, or NIXLKV_WAIT_ANY and NIXLKV_WAIT_QUIESCED
/// or-ed. timeout_ms: most milliseconds to wait; 0 looks once.
/// Any thread. Blocks for at most timeout_ms.
/// Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_ROOM_UNKNOWN,
/// NIXL_ERR_WAIT_TIMEOUT, NIXL_ERR_SHUT_DOWN (the engine was destroyed meanwhile), NIXL_ERR_INTERNAL.
///
/// # Safety
///
/// C contract: rooms points to num_rooms values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_wait(
    engine: *const nixlkv_engine_t,
    rooms: *const u64,
    num_rooms: u64,
    flags: u32,
    timeout_ms: u64,
) -> i32 {
    guard(|| {
        let engine = handle::get(engine)?;
        if flags & !(NIXLKV_WAIT_ANY | NIXLKV_WAIT_QUIESCED) != 0 {
            fail!(NIXL_ERR_INVALID_ARGUMENT, "flags: unknown {flags:#x}");
        }
        // SAFETY: the caller's promise.
        let rooms = unsafe { params::list(rooms, num_rooms, "rooms")? };
        let what = WaitFor { any: flags & NIXLKV_WAIT_ANY != 0, quiesced: flags & NIXLKV_WAIT_QUIESCED != 0 };
        engine.wait(rooms, what, Duration::from_millis(timeout_ms))
    })
}

/// Gives a room up: it fails with NIXL_ERR_ABORTED, and so does the other side's within a round trip. Its memory may be
/// touched until poll says that it is quiesced. A room that has ended is left as it is. A prefill engine may abort a
/// room that it has not opened: that opens it as failed, and a grant that comes for it is answered with the failure.
///
/// reason: text for the other side's error_text, or NULL. Read during the call only.
/// Any thread; never blocks.
/// Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_SHUT_DOWN,
/// NIXL_ERR_ROOM_UNKNOWN, NIXL_ERR_TOO_MANY_ROOMS, NIXL_ERR_INTERNAL.
///
/// # Safety
///
/// C contract: reason is NULL or a NUL-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_abort(engine: *mut nixlkv_engine_t, room: u64, reason: *const c_char) -> i32 {
    guard(|| {
        let engine = handle::get(engine)?;
        // SAFETY: the caller's promise.
        let reason = unsafe { params::text(reason, "reason")? };
        engine.abort(room, reason.as_deref().unwrap_or(""))
    })
}

/// Forgets a room that has ended and is quiesced. Its id may be used again once every engine that takes part had opened it
/// and has released it. Otherwise the next life may meet what is left of this one: at a sender that had not opened the
/// room, a receiver's abort (poll shows it for up to room_timeout_ms; releasing the room forgets it) or the grant of a
/// receiver that has died unnoticed; at a receiver that had not, the sender's failure (for up to grant_timeout_ms).
///
/// Any thread; never blocks.
/// Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_ROOM_UNKNOWN, NIXL_ERR_ROOM_ACTIVE,
/// NIXL_ERR_NOT_QUIESCED (its text says what is pending), NIXL_ERR_INTERNAL.
///
/// # Safety
///
/// C contract: none beyond the types.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_release(engine: *mut nixlkv_engine_t, room: u64) -> i32 {
    guard(|| handle::get(engine)?.release(room))
}
