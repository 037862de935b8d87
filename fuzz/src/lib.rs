//! What the targets share: reading an input, checksums that fit, and a heap that counts.

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's heap, and how much of it is taken.
struct Counting;

static TAKEN: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's heap as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let taken = TAKEN.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(taken, Ordering::Relaxed);
        // SAFETY: the caller's promises are the system heap's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        TAKEN.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are the system heap's.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static HEAP: Counting = Counting;

/// Runs `work` and gives its result, the bytes of heap that it held at its peak, and those that it still holds.
pub fn heap<T>(work: impl FnOnce() -> T) -> (T, usize, usize) {
    let before = TAKEN.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    let result = work();
    let (most, after) = (MOST.load(Ordering::Relaxed), TAKEN.load(Ordering::Relaxed));
    (result, most.saturating_sub(before), after.saturating_sub(before))
}

/// Runs a decoder that must not hold more than `times` its input's length on the heap, and 64 KiB.
pub fn frugal<T>(len: usize, times: usize, work: impl FnOnce() -> T) -> T {
    let (result, most, _) = heap(work);
    assert!(most <= times * len + (64 << 10), "{most} bytes of heap for an input of {len}");
    result
}

/// A control message's frame around any body, with a header that fits.
pub fn frame(body: &[u8]) -> Vec<u8> {
    let mut frame = vec![b'N', b'K', nixlkv::protocol::WIRE_VERSION, 0];
    frame.extend_from_slice(&crc32fast::hash(body).to_le_bytes());
    frame.extend_from_slice(body);
    frame
}

/// A card around any body, with a header that fits.
pub fn card(body: &[u8]) -> Vec<u8> {
    let mut card = b"NIXLKV\0\0".to_vec();
    card.extend_from_slice(&u16::from(nixlkv::protocol::WIRE_VERSION).to_le_bytes());
    card.extend_from_slice(&[0, 0]);
    card.extend_from_slice(&(body.len() as u64).to_le_bytes());
    card.extend_from_slice(&crc32fast::hash(body).to_le_bytes());
    card.extend_from_slice(&crc32fast::hash(&card).to_le_bytes());
    card.extend_from_slice(body);
    card
}

/// An input, read from its start. What is missing at its end is zero.
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    /// Whether nothing is left.
    pub fn is_over(&self) -> bool {
        self.0.is_empty()
    }

    /// The next bytes, as many as there are.
    pub fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        bytes
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let bytes = self.bytes(N);
        array[..bytes.len()].copy_from_slice(bytes);
        array
    }

    /// One byte.
    pub fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// Two bytes, the low one first.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// Four bytes, the low one first.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// Eight bytes, the low one first.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }
}
