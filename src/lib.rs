//! `libnixlkv`: moves a request's KV cache from prefill to decode workers over NVIDIA NIXL, through a C ABI.
//!
//! The C API is `include/nixlkv.h`; its functions live in [`ffi`]. Pure parts decide ([`layout`], [`plan`],
//! [`protocol`], [`room`]); thin parts act ([`nixl`], [`cuda`], [`memory`], [`worker`]); [`engine`] puts them together.

pub mod cuda;
pub mod engine;
pub mod error;
pub mod fault;
pub mod ffi;
pub mod layout;
pub mod memory;
pub mod metrics;
pub mod nixl;
pub mod plan;
pub mod protocol;
pub mod room;
pub mod worker;
