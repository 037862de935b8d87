//! Registration.

use std::ffi::c_void;

use crate::error::*;
use crate::layout::{Part, RegionKey};
use crate::memory::NewRegion;
use crate::nixl::MemoryKind;

use super::engine::nixlkv_engine_t;
use super::guard::guard;
use super::handle;
use super::params::{self, Sized32};

/// Kind of a region: pages of the KV cache of one layer.
pub const NIXLKV_REGION_KV: u32 = 1;
/// Kind of a region: slots of auxiliary data, one per request.
pub const NIXLKV_REGION_AUX: u32 = 2;
/// Kind of a region: slots of one state tensor.
pub const NIXLKV_REGION_STATE: u32 = 3;

/// Part of a KV region: keys.
pub const NIXLKV_PART_K: u32 = 1;
/// Part of a KV region: values.
pub const NIXLKV_PART_V: u32 = 2;
/// Part of a KV region: keys and values in one item, or a latent (MLA) cache.
pub const NIXLKV_PART_FUSED: u32 = 3;

/// Memory kind: asked of the CUDA driver if there is one, else DRAM.
pub const NIXLKV_MEMORY_AUTO: u32 = 0;
/// Memory kind: host memory.
pub const NIXLKV_MEMORY_DRAM: u32 = 1;
/// Memory kind: memory of the CUDA device device_id.
pub const NIXLKV_MEMORY_VRAM: u32 = 2;

/// Flag of a region of a decode engine: no peer sends it (the layers of a draft model, say).
pub const NIXLKV_REGION_FLAG_LOCAL: u32 = 1;

/// One buffer to register. Set up by nixlkv_region_init. The memory stays the caller's; it must stay mapped until it is
/// deregistered or the engine is destroyed.
///
/// Two engines pair their regions by (kind, layer_id, part) and (kind, group, layer_id), never by position. A page
/// index names the item_len bytes at address + index * item_len in every KV region.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nixlkv_region_t {
    /// sizeof(nixlkv_region_t) of the caller.
    pub struct_size: u32,
    /// NIXLKV_REGION_*.
    pub kind: u32,
    /// First byte.
    pub address: *mut c_void,
    /// Bytes, a multiple of item_len.
    pub len: u64,
    /// Bytes per page (KV) or per slot (aux, state).
    pub item_len: u64,
    /// KV: the model's layer. Aux: which array. State: which tensor of the group.
    pub layer_id: u32,
    /// KV: NIXLKV_PART_*. Otherwise 0.
    pub part: u32,
    /// State: the group, a set of tensors that share one list of slot indices. Otherwise 0.
    pub group: u32,
    /// NIXLKV_MEMORY_*.
    pub memory_kind: u32,
    /// VRAM: the CUDA device. Otherwise 0.
    pub device_id: u64,
    /// NIXLKV_REGION_FLAG_*, or-ed.
    pub flags: u32,
    /// Zero.
    pub reserved: u32,
}

// SAFETY: see Sized32.
unsafe impl Sized32 for nixlkv_region_t {}

fn region_from_c(i: usize, raw: &nixlkv_region_t) -> Result<NewRegion> {
    let nixlkv_region_t { kind, part, group, layer_id, memory_kind, device_id, flags, .. } = *raw;
    let key = match (kind, part) {
        (NIXLKV_REGION_KV, NIXLKV_PART_K) => RegionKey::Kv { layer: layer_id, part: Part::K },
        (NIXLKV_REGION_KV, NIXLKV_PART_V) => RegionKey::Kv { layer: layer_id, part: Part::V },
        (NIXLKV_REGION_KV, NIXLKV_PART_FUSED) => RegionKey::Kv { layer: layer_id, part: Part::Fused },
        (NIXLKV_REGION_AUX, 0) => RegionKey::Aux { array: layer_id },
        (NIXLKV_REGION_STATE, 0) => RegionKey::State { group, tensor: layer_id },
        _ => fail!(NIXL_ERR_REGION_KIND, "region {i}: kind {kind} with part {part}"),
    };
    if kind != NIXLKV_REGION_STATE && group != 0 {
        fail!(NIXL_ERR_REGION_KIND, "region {i}: group {group} on a region that is not state");
    }
    if flags & !NIXLKV_REGION_FLAG_LOCAL != 0 || raw.reserved != 0 {
        fail!(NIXL_ERR_REGION_KIND, "region {i}: unknown flags {flags:#x}, or reserved is not zero");
    }
    let kind = match memory_kind {
        NIXLKV_MEMORY_AUTO => None,
        NIXLKV_MEMORY_DRAM => Some(MemoryKind::Dram),
        NIXLKV_MEMORY_VRAM => Some(MemoryKind::Vram),
        _ => fail!(NIXL_ERR_REGION_KIND, "region {i}: memory_kind {memory_kind}"),
    };
    Ok(NewRegion {
        key,
        address: raw.address.addr() as u64,
        len: raw.len,
        item_len: raw.item_len,
        kind,
        device: device_id,
        local: flags & NIXLKV_REGION_FLAG_LOCAL != 0,
    })
}

/// Zeroes a region and sets its size.
///
/// region: the caller's struct. struct_size: sizeof(nixlkv_region_t).
/// Any thread; never blocks. Errors: NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE.
///
/// # Safety
///
/// C contract: region points to struct_size writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_region_init(region: *mut nixlkv_region_t, struct_size: u32) -> i32 {
    // SAFETY: the caller's promise.
    guard(|| unsafe { params::init(region, struct_size, "region") })
}

/// Registers a batch of regions: all of them, or none. The whole batch is checked first, also against what is
/// registered already; the error's text names the entry's index and values.
///
/// Peers that are connected keep what they know, and rooms that both sides have opened go on; before others are opened
/// with them, both sides must export and connect again (NIXL_ERR_PEER_STALE tells).
///
/// regions: num_regions entries, read during the call only. region_ids: NULL, or room for num_regions ids, written on
/// success only; an id is never 0 and never used twice.
/// Any thread. Blocks while NIXL registers, which for large memory can take seconds.
/// Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_STRUCT_SIZE,
/// NIXL_ERR_SHUT_DOWN, NIXL_ERR_REGION_EMPTY, NIXL_ERR_REGION_ITEM, NIXL_ERR_REGION_WRAPS, NIXL_ERR_REGION_UNMAPPED,
/// NIXL_ERR_REGION_OVERLAP, NIXL_ERR_REGION_DUPLICATE, NIXL_ERR_REGION_KIND, NIXL_ERR_CUDA_UNAVAILABLE,
/// NIXL_ERR_REGISTER_KV, NIXL_ERR_REGISTER_AUX, NIXL_ERR_REGISTER_STATE, NIXL_ERR_INTERNAL.
///
/// # Safety
///
/// C contract: regions and region_ids point to num_regions entries.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_register(
    engine: *mut nixlkv_engine_t,
    regions: *const nixlkv_region_t,
    num_regions: u64,
    region_ids: *mut u64,
) -> i32 {
    guard(|| {
        let engine = handle::get(engine)?;
        // SAFETY: the caller's promise.
        let raw = unsafe { params::structs(regions, num_regions, "regions")? };
        if raw.is_empty() {
            fail!(NIXL_ERR_INVALID_ARGUMENT, "num_regions is 0");
        }
        if !region_ids.is_null() {
            params::output(region_ids, "region_ids")?;
        }
        let batch = raw.iter().enumerate().map(|(i, raw)| region_from_c(i, raw)).collect::<Result<Vec<_>>>()?;
        let ids = engine.register(&batch)?;
        if !region_ids.is_null() {
            // SAFETY: the caller promises room for num_regions ids.
            unsafe { std::ptr::copy_nonoverlapping(ids.as_ptr(), region_ids, ids.len()) };
        }
        Ok(())
    })
}

/// Deregisters regions: all of them, or none. Refused with NIXL_ERR_REGION_BUSY while any room is not quiesced.
///
/// region_ids: num_regions ids that nixlkv_register gave.
/// Any thread. Blocks while NIXL deregisters.
/// Errors: NIXL_ERR_INVALID_HANDLE, NIXL_ERR_FORKED, NIXL_ERR_INVALID_ARGUMENT, NIXL_ERR_SHUT_DOWN,
/// NIXL_ERR_REGION_UNKNOWN, NIXL_ERR_REGION_BUSY, NIXL_ERR_INTERNAL.
///
/// # Safety
///
/// C contract: region_ids points to num_regions ids.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixlkv_deregister(
    engine: *mut nixlkv_engine_t,
    region_ids: *const u64,
    num_regions: u64,
) -> i32 {
    guard(|| {
        let engine = handle::get(engine)?;
        // SAFETY: the caller's promise.
        let ids = unsafe { params::list(region_ids, num_regions, "region_ids")? };
        if ids.is_empty() {
            fail!(NIXL_ERR_INVALID_ARGUMENT, "num_regions is 0");
        }
        engine.deregister(ids)
    })
}
