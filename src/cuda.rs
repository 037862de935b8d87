//! The only code that names `cudarc`: what a pointer is, and whether a device exists.

#![allow(unsafe_code)]

use std::sync::LazyLock;

use crate::error::*;
use crate::nixl::MemoryKind;
use cudarc::driver::{result, sys};

/// Whether a CUDA driver library can be loaded here and finds at least one device. `cudarc` panics without the
/// library, so nothing else of it may run before this has said yes.
fn available() -> bool {
    static AVAILABLE: LazyLock<bool> = LazyLock::new(|| {
        // SAFETY: only looks for the library file and loads it.
        let present = unsafe { sys::is_culib_present() };
        present && result::init().is_ok() && result::device::get_count().is_ok_and(|count| count > 0)
    });
    *AVAILABLE
}

/// The kind and device of the memory at `address`. Without a CUDA driver everything is host memory.
pub fn detect(address: u64) -> (MemoryKind, u64) {
    if !available() {
        return (MemoryKind::Dram, 0);
    }
    match attribute(address, sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE) {
        Some(kind) if kind == sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32 => {
            let device = attribute(address, sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
            (MemoryKind::Vram, u64::from(device.unwrap_or(0)))
        }
        _ => (MemoryKind::Dram, 0),
    }
}

/// One 32-bit attribute of a pointer; `None` when the driver does not know the pointer.
fn attribute(address: u64, attribute: sys::CUpointer_attribute) -> Option<u32> {
    let mut value = 0u32;
    // SAFETY: the attributes asked for are 32 bits wide, and the driver only looks the address up.
    let status = unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), attribute, address) };
    (status == sys::CUresult::CUDA_SUCCESS).then_some(value)
}

/// Refuses VRAM on a machine without CUDA, or a device that does not exist.
pub fn check_device(device: u64) -> Result<()> {
    if !available() {
        fail!(NIXL_ERR_CUDA_UNAVAILABLE, "memory on CUDA device {device}, but no CUDA driver with a device is here");
    }
    let count = result::device::get_count().unwrap_or(0);
    if device >= u64::try_from(count).unwrap_or(0) {
        fail!(NIXL_ERR_CUDA_UNAVAILABLE, "CUDA device {device} does not exist: there are {count}");
    }
    Ok(())
}
