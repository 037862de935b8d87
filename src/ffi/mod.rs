//! The C boundary: argument checks, handle checks, the panic guard, conversion. It decides nothing.

#![allow(unsafe_code, non_camel_case_types)]

mod engine;
#[cfg(feature = "fault-injection")]
mod fault;
mod guard;
mod handle;
mod memory;
mod params;
mod peer;
mod room;
mod status;

pub use engine::*;
pub use memory::*;
pub use peer::*;
pub use room::*;
pub use status::*;
