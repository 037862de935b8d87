//! From page lists to descriptors: neighbours merged, in slices of bounded size. Pure.

#![deny(clippy::arithmetic_side_effects)]

use std::sync::Arc;

use crate::error::*;
use crate::layout::Pair;
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

/// Merges neighbours that are contiguous on both sides. `out` is cleared first.
pub fn runs(source: &[i32], destination: &[i32], out: &mut Vec<Run>) -> Result<()> {
    out.clear();
    if source.len() != destination.len() {
        fail!(NIXL_ERR_INTERNAL, "{} source items, {} destination items", source.len(), destination.len());
    }
    for (from, to) in source.iter().zip(destination) {
        let (Ok(from), Ok(to)) = (u32::try_from(*from), u32::try_from(*to)) else {
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

/// Where in (parts, pairs, runs, items) a cursor stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Position {
    part: usize,
    pair: usize,
    run: usize,
    item: u32,
}

/// Hands out the spans of a chunk slice by slice, without ever holding all of them.
#[derive(Debug)]
pub struct Cursor {
    parts: Vec<(Arc<[Pair]>, Vec<Run>)>,
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
    /// Checks every run against every pair's regions, and counts the slices.
    pub fn new(parts: Vec<(Arc<[Pair]>, Vec<Run>)>, limits: Limits) -> Result<Self> {
        let mut num_bytes = 0u64;
        for (pairs, runs) in &parts {
            let mut num_items = 0u64;
            let (mut source_end, mut destination_end) = (0u64, 0u64);
            for run in runs {
                num_items = num_items.saturating_add(u64::from(run.count));
                source_end = source_end.max(u64::from(run.source).saturating_add(u64::from(run.count)));
                destination_end = destination_end.max(u64::from(run.destination).saturating_add(u64::from(run.count)));
            }
            for pair in pairs.iter() {
                for (end, region, side) in
                    [(source_end, &pair.source, "source"), (destination_end, &pair.destination, "destination")]
                {
                    if end > region.num_items() {
                        fail!(
                            NIXL_ERR_PAGE_OUT_OF_RANGE,
                            "{side} item {} of {}, which has {}",
                            end.saturating_sub(1),
                            pair.key,
                            region.num_items()
                        );
                    }
                }
                let bytes = num_items.checked_mul(pair.source.item_len);
                let Some(sum) = bytes.and_then(|bytes| num_bytes.checked_add(bytes)) else {
                    fail!(NIXL_ERR_PAGE_OUT_OF_RANGE, "the chunk has more than 2^64 bytes");
                };
                num_bytes = sum;
            }
        }
        let mut cursor = Self { parts, limits, position: Position::default(), num_slices: 0, num_bytes };
        let mut position = Position::default();
        let mut num_slices = 0u32;
        while cursor.walk(&mut position, &mut |_, _| {}) {
            let Some(more) = num_slices.checked_add(1) else {
                fail!(NIXL_ERR_PAGE_OUT_OF_RANGE, "the chunk has more than 2^32 slices");
            };
            num_slices = more;
        }
        cursor.num_slices = num_slices;
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
        let more = self.walk(&mut position, &mut |pair, span| {
            out.source_kind = pair.source.kind;
            out.destination_kind = pair.destination.kind;
            out.num_bytes = out.num_bytes.saturating_add(span.len);
            out.spans.push(span);
        });
        self.position = position;
        more
    }

    /// Walks one slice from `position`. False: nothing was left.
    fn walk(&self, position: &mut Position, emit: &mut dyn FnMut(&Pair, Span)) -> bool {
        let mut kinds = None;
        let mut spans = 0usize;
        let mut bytes = 0u64;
        while let Some((pairs, runs)) = self.parts.get(position.part) {
            let (Some(pair), false) = (pairs.get(position.pair), runs.is_empty()) else {
                *position = Position { part: position.part.saturating_add(1), ..Position::default() };
                continue;
            };
            let Some(run) = runs.get(position.run) else {
                position.pair = position.pair.saturating_add(1);
                position.run = 0;
                position.item = 0;
                continue;
            };
            let left = run.count.saturating_sub(position.item);
            if left == 0 {
                position.run = position.run.saturating_add(1);
                position.item = 0;
                continue;
            }
            let these = (pair.source.kind, pair.destination.kind);
            if spans >= self.limits.max_spans || kinds.is_some_and(|kinds| kinds != these) {
                break;
            }
            // As many items as still fit; at least one when the slice is empty.
            let item_len = pair.source.item_len;
            let budget = self.limits.max_bytes.saturating_sub(bytes).checked_div(item_len).unwrap_or(0);
            let mut take = u64::from(left).min(budget);
            if take == 0 {
                if spans > 0 {
                    break;
                }
                take = 1;
            }
            let take = u32::try_from(take).unwrap_or(left);
            let Some(span) = span(pair, run, position.item, take) else { break };
            kinds = Some(these);
            spans = spans.saturating_add(1);
            bytes = bytes.saturating_add(span.len);
            emit(pair, span);
            position.item = position.item.saturating_add(take);
        }
        spans > 0
    }
}

/// The span of `count` items of a run from `first` on; `None` cannot happen after the checks of [`Cursor::new`].
fn span(pair: &Pair, run: &Run, first: u32, count: u32) -> Option<Span> {
    let at = |base: u64, item: u32, item_len: u64| {
        let item = u64::from(item).checked_add(u64::from(first))?;
        base.checked_add(item.checked_mul(item_len)?)
    };
    Some(Span {
        source: at(pair.source.address, run.source, pair.source.item_len)?,
        source_device: pair.source.device,
        destination: at(pair.destination.address, run.destination, pair.destination.item_len)?,
        destination_device: pair.destination.device,
        len: u64::from(count).checked_mul(pair.source.item_len)?,
    })
}
