//! The only code that names `nixl_sys`. The rest of the crate sees the [`Agent`] and [`Transfer`] traits.

use std::fmt;

mod agent;
mod elf;
mod library;
mod logging;
mod metadata;
mod plugin;
mod process;
mod search;
mod ucx;

pub use agent::{AgentOptions, open};
pub use library::{Library, find_library};

/// Where a block of memory lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MemoryKind {
    /// Host memory.
    Dram,
    /// CUDA device memory.
    Vram,
}

/// A block of memory to register: start, length in bytes, kind and (VRAM) CUDA device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// First byte.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// Kind of memory.
    pub kind: MemoryKind,
    /// CUDA device, 0 for DRAM.
    pub device: u64,
}

/// One contiguous copy: `len` bytes from our `source` to the peer's `destination`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Our address.
    pub source: u64,
    /// Our CUDA device (0 for DRAM).
    pub source_device: u64,
    /// The peer's address.
    pub destination: u64,
    /// The peer's CUDA device (0 for DRAM).
    pub destination_device: u64,
    /// Bytes.
    pub len: u64,
}

/// What NIXL said no to, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The class of NIXL's status.
    pub status: FailureStatus,
    /// The call and NIXL's own text.
    pub text: String,
}

/// NIXL's C API keeps four classes of failure apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureStatus {
    /// NIXL_CAPI_ERROR_INVALID_PARAM
    InvalidParam,
    /// NIXL_CAPI_ERROR_BACKEND: among others, the remote end is gone
    Backend,
    /// NIXL_CAPI_ERROR_NOT_FOUND: unknown agent or memory
    NotFound,
    /// Anything else
    Other,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The state of a posted transfer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TransferStatus {
    /// Still moving: asking again drives progress.
    InProgress,
    /// Every byte is in the peer's memory and the notification, if any, has been sent.
    Done,
    /// It failed. What landed is unknown; nothing moves any more.
    Failed(Failure),
}

/// A posted transfer. Dropping it releases NIXL's handle, so it must have settled before: releasing a transfer that
/// is in progress returns at once and the bytes still move later.
pub trait Transfer: Send {
    /// Asks NIXL, and drives progress.
    fn status(&mut self) -> TransferStatus;
}

/// What posting led to.
pub enum Posted {
    /// It completed inside the call.
    Done,
    /// It is under way.
    Pending(Box<dyn Transfer>),
}

/// A write into a peer's memory. All spans share the two memory kinds.
pub struct Write<'a> {
    /// The peer's NIXL agent name.
    pub peer: &'a str,
    /// Kind of our side.
    pub source_kind: MemoryKind,
    /// Kind of the peer's side.
    pub destination_kind: MemoryKind,
    /// What to copy, already merged and bounded.
    pub spans: &'a [Span],
    /// A notification that the peer gets after all spans have landed.
    pub notification: &'a [u8],
}

/// One NIXL agent with one backend. Safe to call from any thread; calls are serialised inside.
pub trait Agent: Send + Sync {
    /// Registers memory. The token names it to [`Agent::deregister`].
    fn register(&self, block: &Block) -> Result<u64, Failure>;
    /// Drops a registration.
    fn deregister(&self, token: u64) -> Result<(), Failure>;
    /// Our metadata, for the peers to load.
    fn local_metadata(&self) -> Result<Vec<u8>, Failure>;
    /// Loads a peer's metadata (again, when its memory or its address has changed) and returns the agent name in it.
    /// Anything but added memory closes the old connection, which is refused while transfers to the peer are in flight.
    fn load_metadata(&self, metadata: &[u8]) -> Result<String, Failure>;
    /// Forgets a peer and closes the connection to it. Refused while transfers to it are in flight: closing does not
    /// stop them, so they have to settle first (or the agent has to go).
    fn forget(&self, peer: &str) -> Result<(), Failure>;
    /// A peer that has left in good order, with nothing in flight: its connection is kept for its return, since UCX
    /// never frees one that both sides have closed so. The kept ones are bounded; the oldest is forgotten.
    fn rest(&self, peer: &str);
    /// Whether the peer's connection is such a kept one.
    fn is_resting(&self, peer: &str) -> bool;
    /// Sends a control message.
    fn notify(&self, peer: &str, message: &[u8]) -> Result<(), Failure>;
    /// Drives progress and hands every message that has come to `sink` as (agent name, bytes).
    fn notifications(&self, sink: &mut dyn FnMut(&str, &[u8])) -> Result<(), Failure>;
    /// Posts a write.
    fn write(&self, write: &Write<'_>) -> Result<Posted, Failure>;
    /// The plugins that NIXL found.
    fn plugins(&self) -> &[String];
    /// The backend's parameters after it started.
    fn backend_params(&self) -> &[(String, String)];
}

#[cfg(test)]
mod tests;
