//! From page lists to descriptors: neighbours merged, in slices of bounded size. Pure.

#![deny(clippy::arithmetic_side_effects)]

use std::sync::Arc;

use crate::error::*;
use crate::layout::{Pair, RegionKey};
use crate::nixl::{MemoryKind, Span};

/// Items that are contiguous on both sides.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// First source item.
    pub source: u32,
    /// First destination item.
    pub destination: u32,
    /// How many.
    pub count: u32,
}

/// Merges neighbours that are contiguous on both sides. `out` is cleared first, and stays empty on an error.
pub fn runs(source: &[i32], destination: &[i32], out: &mut Vec<Run>) -> Result<()> {
    out.clear();
    if source.len() != destination.len() {
        fail!(NIXL_ERR_INTERNAL, "{} source items, {} destination items", source.len(), destination.len());
    }
    for (from, to) in source.iter().zip(destination) {
        let (Ok(from), Ok(to)) = (u32::try_from(*from), u32::try_from(*to)) else {
            out.clear();
            fail!(NIXL_ERR_INTERNAL, "a negative index: {from} to {to}");
        };
        match out.last_mut() {
            Some(run)
                if run.source.checked_add(run.count) == Some(from)
                    && run.destination.checked_add(run.count) == Some(to) =>
            {
                run.count = run.count.saturating_add(1);
            }
            _ => out.push(Run { source: from, destination: to, count: 1 }),
        }
    }
    Ok(())
}

/// How large a slice may be.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes; a single item may exceed it.
    pub max_bytes: u64,
    /// Spans.
    pub max_spans: usize,
}

/// What is posted in one go.
#[derive(Clone, Debug)]
pub struct Slice {
    /// Kind of our side.
    pub source_kind: MemoryKind,
    /// Kind of the peer's side.
    pub destination_kind: MemoryKind,
    /// What to copy.
    pub spans: Vec<Span>,
    /// Bytes of all spans.
    pub num_bytes: u64,
}

impl Default for Slice {
    fn default() -> Self {
        Self { source_kind: MemoryKind::Dram, destination_kind: MemoryKind::Dram, spans: Vec::new(), num_bytes: 0 }
    }
}

/// Runs, and the pairs of regions that each of them is copied between.
#[derive(Debug)]
struct Part {
    pairs: Arc<[Pair]>,
    runs: Vec<Run>,
    /// Items before each run, and at the end the items of all: with it a slice's end is found by bisection, so that
    /// counting slices costs nothing per page.
    starts: Vec<u64>,
}

impl Part {
    fn num_items(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Checks that every run lies inside every pair's regions, so that no address computed later can leave them.
    fn new(pairs: Arc<[Pair]>, mut runs: Vec<Run>) -> Result<Self> {
        runs.retain(|run| run.count > 0);
        let mut starts = Vec::with_capacity(runs.len().saturating_add(1));
        let (mut num_items, mut source_end, mut destination_end) = (0u64, 0u64, 0u64);
        starts.push(0);
        for run in &runs {
            let count = u64::from(run.count);
            num_items = num_items.saturating_add(count);
            starts.push(num_items);
            source_end = source_end.max(u64::from(run.source).saturating_add(count));
            destination_end = destination_end.max(u64::from(run.destination).saturating_add(count));
        }
        for Pair { key, source, destination } in pairs.iter() {
            for (end, region, side) in [(source_end, source, "source"), (destination_end, destination, "destination")] {
                if region.address.checked_add(region.len).is_none() {
                    fail!(NIXL_ERR_INTERNAL, "{side} {key}: {:#x} plus {:#x} passes 2^64", region.address, region.len);
                }
                if end > region.num_items() {
                    let code = match key {
                        RegionKey::Kv { .. } => NIXL_ERR_PAGE_OUT_OF_RANGE,
                        RegionKey::Aux { .. } => NIXL_ERR_AUX_OUT_OF_RANGE,
                        RegionKey::State { .. } => NIXL_ERR_STATE_OUT_OF_RANGE,
                    };
                    let last = end.saturating_sub(1);
                    fail_with!(code, "{side} item {last} of {key}, which has {}", region.num_items());
                }
            }
            if source.item_len != destination.item_len || source.item_len == 0 {
                fail!(NIXL_ERR_INTERNAL, "{key}: items of {} and {} bytes", source.item_len, destination.item_len);
            }
        }
        Ok(Self { pairs, runs, starts })
    }

    /// Bytes of all runs between all pairs. `None`: 2^64 or more.
    fn num_bytes(&self) -> Option<u64> {
        let mut bytes = self.pairs.iter().map(|pair| self.num_items().checked_mul(pair.source.item_len));
        bytes.try_fold(0u64, |sum, bytes| sum.checked_add(bytes?))
    }
}

/// Where a cursor stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Position {
    part: usize,
    pair: usize,
    run: usize,
    /// Counted over the part's runs; in `run`.
    item: u64,
}

/// A piece of a slice: items of one pair, from a position on.
struct Stretch<'a> {
    part: &'a Part,
    pair: &'a Pair,
    run: usize,
    items: std::ops::Range<u64>,
}

/// Hands out the spans of a chunk slice by slice, without ever holding all of them.
#[derive(Debug)]
pub struct Cursor {
    parts: Vec<Part>,
    limits: Limits,
    position: Position,
    num_slices: u32,
    num_bytes: u64,
}

impl Default for Cursor {
    fn default() -> Self {
        Self {
            parts: Vec::new(),
            limits: Limits { max_bytes: u64::MAX, max_spans: usize::MAX },
            position: Position::default(),
            num_slices: 0,
            num_bytes: 0,
        }
    }
}

impl Cursor {
    /// Checks every run against every pair's regions, and counts the slices. A slice holds at least one span, whatever
    /// the limits.
    pub fn new(parts: Vec<(Arc<[Pair]>, Vec<Run>)>, mut limits: Limits) -> Result<Self> {
        limits.max_spans = limits.max_spans.max(1);
        let parts: Vec<Part> = parts.into_iter().map(|(pairs, runs)| Part::new(pairs, runs)).collect::<Result<_>>()?;
        let num_bytes = parts.iter().try_fold(0u64, |sum, part| sum.checked_add(part.num_bytes()?));
        let Some(num_bytes) = num_bytes else {
            fail!(NIXL_ERR_PAGE_OUT_OF_RANGE, "the chunk has 2^64 bytes or more");
        };
        let mut cursor = Self { parts, limits, position: Position::default(), num_slices: 0, num_bytes };
        let mut position = Position::default();
        while cursor.walk(&mut position, &mut |_| {}) {
            let Some(num_slices) = cursor.num_slices.checked_add(1) else {
                fail!(NIXL_ERR_PAGE_OUT_OF_RANGE, "the chunk has 2^32 slices or more");
            };
            cursor.num_slices = num_slices;
        }
        Ok(cursor)
    }

    /// How many slices there are in all.
    pub fn num_slices(&self) -> u32 {
        self.num_slices
    }

    /// Bytes of all slices.
    pub fn num_bytes(&self) -> u64 {
        self.num_bytes
    }

    /// Fills in the next slice. False: there is none.
    pub fn next(&mut self, out: &mut Slice) -> bool {
        out.spans.clear();
        out.num_bytes = 0;
        let mut position = self.position;
        let more = self.walk(&mut position, &mut |stretch| {
            out.source_kind = stretch.pair.source.kind;
            out.destination_kind = stretch.pair.destination.kind;
            push_spans(&stretch, out);
        });
        self.position = position;
        more
    }

    /// Walks one slice from `position`: of each pair in turn as many items as the limits let in. False: nothing is left.
    fn walk(&self, position: &mut Position, emit: &mut dyn FnMut(Stretch<'_>)) -> bool {
        let mut kinds = None;
        let mut spans = 0usize;
        let mut bytes = 0u64;
        while let Some(part) = self.parts.get(position.part) {
            let (Some(pair), false) = (part.pairs.get(position.pair), part.runs.is_empty()) else {
                *position = Position { part: position.part.saturating_add(1), ..Position::default() };
                continue;
            };
            let these = (pair.source.kind, pair.destination.kind);
            if kinds.is_some_and(|kinds| kinds != these) {
                break;
            }
            let first = position.item;
            let spans_left = self.limits.max_spans.saturating_sub(spans);
            let last_run = position.run.saturating_add(spans_left).min(part.runs.len());
            let by_spans = part.starts.get(last_run).copied().unwrap_or(first).saturating_sub(first);
            let bytes_left = self.limits.max_bytes.saturating_sub(bytes);
            let mut by_bytes = bytes_left.checked_div(pair.source.item_len).unwrap_or(0);
            if spans == 0 {
                // An item larger than the limit still has to go.
                by_bytes = by_bytes.max(1);
            }
            let count = by_spans.min(by_bytes);
            if count == 0 {
                break;
            }
            let end = first.saturating_add(count);
            // Where the next item lies: the last run that starts at or before it.
            let next_run = part.starts.partition_point(|start| *start <= end).saturating_sub(1);
            let cut = part.starts.get(next_run).is_some_and(|start| *start < end);
            emit(Stretch { part, pair, run: position.run, items: first..end });
            kinds = Some(these);
            spans = spans.saturating_add(next_run.saturating_sub(position.run)).saturating_add(usize::from(cut));
            bytes = bytes.saturating_add(count.saturating_mul(pair.source.item_len));
            if end < part.num_items() {
                (position.run, position.item) = (next_run, end);
                break;
            }
            *position = Position { part: position.part, pair: position.pair.saturating_add(1), run: 0, item: 0 };
        }
        spans > 0
    }
}

/// Turns a stretch into spans. [`Part::new`] has checked that no address or length can saturate.
fn push_spans(stretch: &Stretch<'_>, out: &mut Slice) {
    let Stretch { part, pair, run, items } = stretch;
    let runs = part.runs.iter().skip(*run);
    let starts = part.starts.iter().skip(*run);
    for (run, start) in runs.zip(starts).take_while(|(_, start)| **start < items.end) {
        let skip = items.start.saturating_sub(*start);
        let end = items.end.saturating_sub(*start).min(u64::from(run.count));
        let offset = |item: u32| u64::from(item).saturating_add(skip).saturating_mul(pair.source.item_len);
        let len = end.saturating_sub(skip).saturating_mul(pair.source.item_len);
        out.num_bytes = out.num_bytes.saturating_add(len);
        out.spans.push(Span {
            source: pair.source.address.saturating_add(offset(run.source)),
            source_device: pair.source.device,
            destination: pair.destination.address.saturating_add(offset(run.destination)),
            destination_device: pair.destination.device,
            len,
        });
    }
}

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects)]
mod edges;

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects)]
mod tests {
    use super::*;
    use crate::layout::{Part, Region, RegionKey};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// A byte of a memory: kind, device, address.
    type At = (MemoryKind, u64, u64);

    fn region(key: RegionKey, (kind, device, address): At, item_len: u64, num_items: u64) -> Region {
        Region { key, address, len: item_len * num_items, item_len, kind, device, local: false }
    }

    fn pair(source: At, destination: At, item_len: u64, num_items: (u64, u64)) -> Pair {
        let key = RegionKey::Kv { layer: 0, part: Part::Fused };
        Pair {
            key,
            source: region(key, source, item_len, num_items.0),
            destination: region(key, destination, item_len, num_items.1),
        }
    }

    const DRAM: MemoryKind = MemoryKind::Dram;
    const NO_LIMITS: Limits = Limits { max_bytes: u64::MAX, max_spans: usize::MAX };

    fn drain(cursor: &mut Cursor) -> Vec<Slice> {
        let mut slices = Vec::new();
        let mut slice = Slice::default();
        while cursor.next(&mut slice) {
            slices.push(slice.clone());
        }
        assert!(!cursor.next(&mut slice), "at its end it stays there");
        assert!(slice.spans.is_empty() && slice.num_bytes == 0);
        slices
    }

    /// The naive way: which source byte every destination byte gets, item by item.
    fn naive(parts: &[(Vec<Pair>, Vec<i32>, Vec<i32>)]) -> BTreeMap<At, At> {
        let mut bytes = BTreeMap::new();
        for (pairs, source, destination) in parts {
            for pair in pairs {
                for (from, to) in source.iter().zip(destination) {
                    for byte in 0..pair.source.item_len {
                        let at = |region: &Region, item: i32| {
                            (region.kind, region.device, region.address + item as u64 * region.item_len + byte)
                        };
                        let old = bytes.insert(at(&pair.destination, *to), at(&pair.source, *from));
                        assert!(old.is_none(), "the test's own regions or destinations overlap");
                    }
                }
            }
        }
        bytes
    }

    /// What the slices copy; fails when a destination byte is written twice.
    fn copied(slices: &[Slice]) -> BTreeMap<At, At> {
        let mut bytes = BTreeMap::new();
        for slice in slices {
            for span in &slice.spans {
                for byte in 0..span.len {
                    let from = (slice.source_kind, span.source_device, span.source + byte);
                    let to = (slice.destination_kind, span.destination_device, span.destination + byte);
                    assert!(bytes.insert(to, from).is_none(), "{to:?} is written twice");
                }
            }
        }
        bytes
    }

    const ITEMS: i32 = 24;

    /// Regions of one part with their lists: the destinations distinct, the sources any, often in runs.
    #[derive(Clone, Debug)]
    struct Shape {
        pairs: Vec<(u64, bool, bool)>,
        source: Vec<i32>,
        destination: Vec<i32>,
    }

    fn shape() -> impl Strategy<Value = Shape> {
        let pairs = prop::collection::vec((1u64..9, any::<bool>(), any::<bool>()), 0..5);
        let pieces = prop::collection::vec((0..ITEMS, 0..ITEMS, 1..10i32), 0..8);
        (pairs, pieces).prop_map(|(pairs, pieces)| {
            let (mut source, mut destination) = (Vec::new(), Vec::new());
            for (from, to, len) in pieces {
                for i in 0..len {
                    if from + i < ITEMS && to + i < ITEMS && !destination.contains(&(to + i)) {
                        source.push(from + i);
                        destination.push(to + i);
                    }
                }
            }
            Shape { pairs, source, destination }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn every_byte_is_copied_once_and_no_other(
            shapes in prop::collection::vec(shape(), 0..4), max_bytes in 0u64..70, max_spans in 0usize..7,
        ) {
            let mut next = 1u64 << 40;
            let mut place = |vram: bool| {
                next += 1 << 20;
                if vram { (MemoryKind::Vram, next % 3, next) } else { (DRAM, 0, next) }
            };
            let parts: Vec<(Vec<Pair>, Vec<i32>, Vec<i32>)> = shapes
                .into_iter()
                .map(|Shape { pairs, source, destination }| {
                    let items = ITEMS as u64;
                    let pairs = pairs.into_iter().map(|(item_len, from, to)| {
                        pair(place(from), place(to), item_len, (items, items))
                    });
                    (pairs.collect(), source, destination)
                })
                .collect();
            let coded = parts.iter().map(|(pairs, source, destination)| {
                let mut list = vec![Run { source: 9, destination: 9, count: 9 }];
                runs(source, destination, &mut list).unwrap();
                (pairs.clone().into(), list)
            });
            let limits = Limits { max_bytes, max_spans };
            let mut cursor = Cursor::new(coded.collect(), limits).unwrap();
            let (num_slices, num_bytes) = (cursor.num_slices(), cursor.num_bytes());
            let slices = drain(&mut cursor);
            prop_assert_eq!(slices.len(), num_slices as usize);
            prop_assert_eq!(slices.iter().map(|slice| slice.num_bytes).sum::<u64>(), num_bytes);
            for slice in &slices {
                prop_assert!((1..=max_spans.max(1)).contains(&slice.spans.len()));
                prop_assert_eq!(slice.spans.iter().map(|span| span.len).sum::<u64>(), slice.num_bytes);
                // Too long a slice is a single item.
                prop_assert!(slice.num_bytes <= max_bytes || (slice.spans.len() == 1 && slice.num_bytes < 9));
            }
            let expected = naive(&parts);
            prop_assert_eq!(num_bytes, expected.len() as u64);
            prop_assert!(copied(&slices) == expected, "the bytes differ");
        }

        #[test]
        fn runs_are_as_long_as_they_can_be(shape in shape()) {
            let mut list = Vec::new();
            runs(&shape.source, &shape.destination, &mut list).unwrap();
            let expand = |start: fn(&Run) -> u32| -> Vec<i32> {
                list.iter().flat_map(|run| start(run)..start(run) + run.count).map(|item| item as i32).collect()
            };
            prop_assert_eq!(expand(|run| run.source), shape.source);
            prop_assert_eq!(expand(|run| run.destination), shape.destination);
            for two in list.windows(2) {
                let [a, b] = two else { unreachable!() };
                let joins = a.source + a.count == b.source && a.destination + a.count == b.destination;
                prop_assert!(!joins, "{:?} and {:?}", a, b);
            }
        }
    }

    #[test]
    fn h1_neighbours_are_merged() {
        let pages: Vec<i32> = (0..16384).collect();
        let mut list = Vec::new();
        runs(&pages, &pages, &mut list).unwrap();
        assert_eq!(list, [Run { source: 0, destination: 0, count: 16384 }]);
        let place = |address| (DRAM, 0, address);
        let pairs: Arc<[Pair]> = vec![pair(place(1 << 30), place(1 << 40), 4096, (16384, 16384))].into();
        let limits = Limits { max_bytes: 8 << 20, max_spans: 512 };
        let slices = drain(&mut Cursor::new(vec![(pairs, list)], limits).unwrap());
        assert_eq!(slices.iter().map(|slice| slice.spans.len()).sum::<usize>(), 8);
    }

    #[test]
    fn lists_that_do_not_belong_together_are_refused() {
        let mut list = Vec::new();
        for (source, destination) in [(&[1, 2][..], &[1][..]), (&[], &[1]), (&[-1], &[1]), (&[1], &[i32::MIN])] {
            assert_eq!(runs(source, destination, &mut list).unwrap_err().code, NIXL_ERR_INTERNAL);
        }
        runs(&[i32::MAX], &[i32::MAX], &mut list).unwrap();
        assert_eq!(list, [Run { source: i32::MAX as u32, destination: i32::MAX as u32, count: 1 }]);
        let mut other = pair((DRAM, 0, 4096), (DRAM, 0, 8192), 64, (4, 4));
        other.destination.item_len = 32;
        let error = Cursor::new(vec![(vec![other].into(), list)], NO_LIMITS).unwrap_err();
        assert_eq!(error.code, NIXL_ERR_PAGE_OUT_OF_RANGE);
        let list = vec![Run { source: 0, destination: 0, count: 1 }];
        let error = Cursor::new(vec![(vec![other].into(), list)], NO_LIMITS).unwrap_err();
        assert_eq!(error.code, NIXL_ERR_INTERNAL);
        assert!(error.text.contains("64") && error.text.contains("32"), "{error}");
    }

    #[test]
    fn nothing_to_move_is_no_slice() {
        let pairs: Arc<[Pair]> = vec![pair((DRAM, 0, 4096), (DRAM, 0, 8192), 64, (4, 4))].into();
        let run = vec![Run { source: 0, destination: 0, count: 1 }];
        for parts in [vec![], vec![(pairs, vec![])], vec![(Arc::default(), run)]] {
            let mut cursor = Cursor::new(parts, NO_LIMITS).unwrap();
            assert_eq!((cursor.num_slices(), cursor.num_bytes()), (0, 0));
            assert_eq!(drain(&mut cursor).len(), 0);
        }
    }

    /// Every run past a region's end is refused before anything is handed out, whichever side it is on.
    #[test]
    fn d1_runs_outside_a_region_are_refused() {
        let place = |address| (DRAM, 0, address);
        let most = u64::from(u32::MAX);
        for num_items in [1, 2, 1000, i32::MAX as u64, most - 1, most, most + 1, 1 << 40] {
            for (start, count) in [
                (0, 1),
                (0, 2),
                (0, 1001),
                (999, 1),
                (1000, 1),
                (999, 2),
                (i32::MAX as u64 - 1, 1),
                (i32::MAX as u64, 1),
                (1 << 31, 1),
                (0, most),
                (1, most),
                (most, 1),
                (most, most),
            ] {
                let fits = start + count <= num_items;
                let (at, count) = (start as u32, count as u32);
                for source_side in [true, false] {
                    // The side that is not looked at has room for everything.
                    let room = 2 * most;
                    let (lens, run) = if source_side {
                        ((num_items, room), Run { source: at, destination: 0, count })
                    } else {
                        ((room, num_items), Run { source: 0, destination: at, count })
                    };
                    let pairs: Arc<[Pair]> = vec![pair(place(1 << 20), place(1 << 50), 1, lens)].into();
                    let result = Cursor::new(vec![(pairs, vec![run])], NO_LIMITS);
                    assert_eq!(result.is_ok(), fits, "{run:?} in {lens:?}");
                    if let Err(error) = result {
                        assert_eq!(error.code, NIXL_ERR_PAGE_OUT_OF_RANGE);
                        assert!(error.text.contains(if source_side { "source" } else { "destination" }));
                        assert!(error.text.contains(&num_items.to_string()), "{error}");
                    }
                }
            }
        }
    }

    #[test]
    fn a12_large_items_and_high_addresses_stay_exact() {
        // (item_len, item, count, source address, destination address)
        let high = 0xffff_8000_0000_0000u64;
        for (item_len, item, count, source, destination) in [
            (65536, 32767, 2, 4096, 1 << 40),
            (65536, 65535, 1, 4096, 1 << 40),
            (65536, 65536, 3, 4096, 1 << 40),
            (1 << 33, 5, 2, 4096, 1 << 40),
            (1, i32::MAX as u32, 1, 4096, 1 << 40),
            (3, i32::MAX as u32 - 1, 2, (1 << 63) - 1, 1 << 63),
            (2 << 20, i32::MAX as u32, 1, 1, (1 << 63) + 1),
            (4096, 1_000_000, 1000, high, high + (1 << 46)),
        ] {
            let num_items = u64::from(item) + u64::from(count);
            let place = |address| (DRAM, 0, address);
            let pairs: Arc<[Pair]> =
                vec![pair(place(source), place(destination), item_len, (num_items, num_items))].into();
            let run = Run { source: item, destination: item, count };
            let offset = u128::from(item) * u128::from(item_len);
            let len = u128::from(count) * u128::from(item_len);
            let slices = drain(&mut Cursor::new(vec![(pairs, vec![run])], NO_LIMITS).unwrap());
            let span = slices[0].spans[0];
            assert_eq!(u128::from(span.source), u128::from(source) + offset);
            assert_eq!(u128::from(span.destination), u128::from(destination) + offset);
            assert_eq!(u128::from(span.len), len);
        }
        // The last byte of a region may be the last but one of the address space.
        let at = u64::MAX - 4096;
        let pairs: Arc<[Pair]> = vec![pair((DRAM, 0, at), (DRAM, 0, at), 1024, (4, 4))].into();
        let run = Run { source: 3, destination: 3, count: 1 };
        let slices = drain(&mut Cursor::new(vec![(pairs, vec![run])], NO_LIMITS).unwrap());
        assert_eq!(slices[0].spans[0].source + 1024, u64::MAX);
    }

    #[test]
    fn a12_sums_past_2_to_the_64_are_refused() {
        // 2^31 items of 2^32 bytes in each of two layers: no region wraps, the chunk's sum does.
        let one = pair((DRAM, 0, 1), (DRAM, 0, 1), 1 << 32, (1 << 31, 1 << 31));
        let run = Run { source: 0, destination: 0, count: 1 << 31 };
        let limits = Limits { max_bytes: u64::MAX, max_spans: 512 };
        let cursor = Cursor::new(vec![(vec![one].into(), vec![run])], limits).unwrap();
        assert_eq!(cursor.num_bytes(), 1 << 63);
        let error = Cursor::new(vec![(vec![one, one].into(), vec![run])], limits).unwrap_err();
        assert_eq!(error.code, NIXL_ERR_PAGE_OUT_OF_RANGE);
    }
}
