//! Reading what C hands in and writing what it gets back: sized structs, strings, lists.

use std::ffi::{CStr, c_char};

use crate::error::*;

/// A struct of the C API: it begins with `struct_size`, and all its bytes may be zero.
///
/// # Safety
///
/// `repr(C)`, integers and pointers only, first field `u32 struct_size`, no padding.
pub(super) unsafe trait Sized32: Copy {}

/// No caller's struct is longer than this; a larger `struct_size` is garbage.
const MAX_STRUCT_SIZE: usize = 4096;

fn check_pointer<T>(pointer: *const T, what: &str) -> Result<()> {
    if pointer.is_null() {
        fail!(NIXL_ERR_INVALID_ARGUMENT, "{what} is NULL");
    }
    if !pointer.is_aligned() {
        fail!(NIXL_ERR_INVALID_ARGUMENT, "{what} ({pointer:p}) is not aligned to {} bytes", align_of::<T>());
    }
    Ok(())
}

/// The caller's `struct_size`, checked.
///
/// # Safety
///
/// Not NULL: at least four readable bytes.
unsafe fn struct_size<T: Sized32>(pointer: *const T, what: &str) -> Result<usize> {
    check_pointer(pointer, what)?;
    // SAFETY: checked for NULL and alignment; the caller promises a struct that begins with its size.
    let size = unsafe { pointer.cast::<u32>().read() } as usize;
    if !(8..=MAX_STRUCT_SIZE).contains(&size) || !size.is_multiple_of(align_of::<T>()) {
        fail!(
            NIXL_ERR_STRUCT_SIZE,
            "{what}: struct_size is {size}, not set up by its _init function? (it is {} here)",
            size_of::<T>()
        );
    }
    Ok(size)
}

/// Reads a struct of a shorter or longer caller: what it does not have is zero, what we do not know must be zero.
///
/// # Safety
///
/// `pointer` is NULL or points to as many readable bytes as its `struct_size` says.
pub(super) unsafe fn read<T: Sized32>(pointer: *const T, what: &str) -> Result<T> {
    // SAFETY: the caller's promise.
    let size = unsafe { struct_size(pointer, what)? };
    let bytes = pointer.cast::<u8>();
    if size > size_of::<T>() {
        // SAFETY: `size` bytes are readable.
        let tail = unsafe { std::slice::from_raw_parts(bytes.add(size_of::<T>()), size - size_of::<T>()) };
        if tail.iter().any(|byte| *byte != 0) {
            fail!(
                NIXL_ERR_STRUCT_SIZE,
                "{what}: struct_size is {size}, this library's is {}, and the rest is not zero: it asks for something unknown",
                size_of::<T>()
            );
        }
    }
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: both sides have that many bytes; zero is a valid value of every field (Sized32).
    unsafe {
        std::ptr::copy_nonoverlapping(bytes, value.as_mut_ptr().cast::<u8>(), size.min(size_of::<T>()));
        Ok(value.assume_init())
    }
}

/// Writes a struct to a shorter or longer caller: only what it has room for, and its `struct_size` stays.
///
/// # Safety
///
/// `pointer` is NULL or points to as many writable bytes as its `struct_size` says.
pub(super) unsafe fn write<T: Sized32>(pointer: *mut T, value: &T, what: &str) -> Result<()> {
    // SAFETY: the caller's promise.
    let size = unsafe { struct_size(pointer, what)? };
    let skip = size_of::<u32>();
    let from = std::ptr::from_ref(value).cast::<u8>();
    // SAFETY: both sides have that many bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(from.add(skip), pointer.cast::<u8>().add(skip), size.min(size_of::<T>()) - skip);
    }
    Ok(())
}

/// Checks that an output struct can be written, before anything happens.
///
/// # Safety
///
/// As [`write`].
pub(super) unsafe fn check_writable<T: Sized32>(pointer: *mut T, what: &str) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { struct_size(pointer, what).map(|_| ()) }
}

/// Zeroes a struct and sets its size: the body of every `_init`.
///
/// # Safety
///
/// `pointer` is NULL or points to `size` writable bytes.
pub(super) unsafe fn init<T: Sized32>(pointer: *mut T, size: u32, what: &str) -> Result<()> {
    check_pointer(pointer, what)?;
    let len = size as usize;
    if !(8..=MAX_STRUCT_SIZE).contains(&len) || !len.is_multiple_of(align_of::<T>()) {
        fail!(NIXL_ERR_STRUCT_SIZE, "{what}: struct_size is {size}, this library's is {}", size_of::<T>());
    }
    // SAFETY: `len` bytes are writable; the first four hold the size.
    unsafe {
        std::ptr::write_bytes(pointer.cast::<u8>(), 0, len);
        pointer.cast::<u32>().write(size);
    }
    Ok(())
}

/// A list: NULL with 0 is empty.
///
/// # Safety
///
/// `pointer` is NULL or points to `len` readable values.
pub(super) unsafe fn list<'a, T>(pointer: *const T, len: u64, what: &str) -> Result<&'a [T]> {
    if len == 0 {
        return Ok(&[]);
    }
    check_pointer(pointer, what)?;
    let fits = usize::try_from(len)
        .ok()
        .filter(|len| len.checked_mul(size_of::<T>()).is_some_and(|bytes| isize::try_from(bytes).is_ok()));
    match fits {
        // SAFETY: not NULL, aligned, and the caller promises `len` values.
        Some(len) => Ok(unsafe { std::slice::from_raw_parts(pointer, len) }),
        None => fail!(NIXL_ERR_INVALID_ARGUMENT, "{what}: {len} entries do not fit into memory"),
    }
}

/// A list of sized structs; the first one's `struct_size` is the distance between them, and all must agree.
///
/// # Safety
///
/// `pointer` is NULL or points to `len` structs of that size.
pub(super) unsafe fn structs<T: Sized32>(pointer: *const T, len: u64, what: &str) -> Result<Vec<T>> {
    if len == 0 {
        return Ok(Vec::new());
    }
    // SAFETY: the caller's promise.
    let stride = unsafe { struct_size(pointer, what)? };
    if len > (isize::MAX as u64) / stride as u64 {
        fail!(NIXL_ERR_INVALID_ARGUMENT, "{what}: {len} entries do not fit into memory");
    }
    let mut out = Vec::new();
    for i in 0..len as usize {
        let at = pointer.cast::<u8>().wrapping_add(i * stride).cast::<T>();
        let name = format!("{what}[{i}]");
        // SAFETY: the caller promises `len` structs at this distance.
        unsafe {
            if struct_size(at, &name)? != stride {
                fail!(NIXL_ERR_STRUCT_SIZE, "{name}: its struct_size differs from that of {what}[0], {stride}");
            }
            out.push(read(at, &name)?);
        }
    }
    Ok(out)
}

/// A string, or `None` for NULL.
///
/// # Safety
///
/// `pointer` is NULL or points to a NUL-terminated string.
pub(super) unsafe fn text(pointer: *const c_char, what: &str) -> Result<Option<String>> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    match unsafe { CStr::from_ptr(pointer) }.to_str() {
        Ok(text) => Ok(Some(text.to_owned())),
        Err(_) => fail!(NIXL_ERR_INVALID_ARGUMENT, "{what} is not valid UTF-8"),
    }
}

/// One `int32_t` behind a pointer, or `None` for NULL.
///
/// # Safety
///
/// `pointer` is NULL or points to a readable value.
pub(super) unsafe fn optional(pointer: *const i32, what: &str) -> Result<Option<i32>> {
    if pointer.is_null() {
        return Ok(None);
    }
    check_pointer(pointer, what)?;
    // SAFETY: not NULL and aligned.
    Ok(Some(unsafe { pointer.read() }))
}

/// Refuses an output pointer that is NULL or misaligned.
pub(super) fn output<T>(pointer: *mut T, what: &str) -> Result<()> {
    check_pointer(pointer, what)
}
