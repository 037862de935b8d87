//! Geometry: which of two engines' regions belong together. Pure; all arithmetic is checked.

#![deny(clippy::arithmetic_side_effects)]

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::*;
use crate::nixl::MemoryKind;

/// Part of a layer's KV cache.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Part {
    /// Keys.
    K,
    /// Values.
    V,
    /// Keys and values in one item, or a latent cache.
    Fused,
}

/// A region's identity. Two engines pair their regions by it, never by position.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum RegionKey {
    /// Pages of one layer.
    Kv {
        /// The model's layer.
        layer: u32,
        /// Which part of it.
        part: Part,
    },
    /// Slots of auxiliary data.
    Aux {
        /// Which array.
        array: u32,
    },
    /// Slots of a state tensor.
    State {
        /// Tensors of one group share the list of slots.
        group: u32,
        /// Which tensor of the group.
        tensor: u32,
    },
}

impl fmt::Display for RegionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RegionKey::Kv { layer, part: Part::K } => write!(f, "K of KV layer {layer}"),
            RegionKey::Kv { layer, part: Part::V } => write!(f, "V of KV layer {layer}"),
            RegionKey::Kv { layer, part: Part::Fused } => write!(f, "fused KV layer {layer}"),
            RegionKey::Aux { array } => write!(f, "aux array {array}"),
            RegionKey::State { group, tensor } => write!(f, "tensor {tensor} of state group {group}"),
        }
    }
}

/// One registered buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Region {
    /// What it is.
    pub key: RegionKey,
    /// First byte.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// Bytes per page or slot.
    pub item_len: u64,
    /// Kind of memory.
    pub kind: MemoryKind,
    /// CUDA device, 0 for DRAM.
    pub device: u64,
    /// No peer sends it.
    pub local: bool,
}

impl Region {
    /// Pages or slots.
    pub fn num_items(&self) -> u64 {
        self.len.checked_div(self.item_len).unwrap_or(0)
    }
}

/// An engine's regions, sorted by key, each sound in itself.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RegionTable {
    regions: Vec<Region>,
}

impl RegionTable {
    /// Checks and sorts regions. A peer's come from the wire, so nothing is taken on trust.
    pub fn new(mut regions: Vec<Region>) -> Result<Self> {
        for region in &regions {
            let Region { key, address, len, item_len, .. } = *region;
            if address == 0 || len == 0 || item_len == 0 {
                fail!(NIXL_ERR_REGION_EMPTY, "{key}: address {address:#x}, len {len}, item_len {item_len}");
            }
            if !len.is_multiple_of(item_len) {
                fail!(NIXL_ERR_REGION_ITEM, "{key}: len {len} is not a multiple of item_len {item_len}");
            }
            if address.checked_add(len).is_none() {
                fail!(NIXL_ERR_REGION_WRAPS, "{key}: address {address:#x} plus len {len:#x} passes 2^64");
            }
        }
        regions.sort_unstable_by_key(|region| region.key);
        for pair in regions.windows(2) {
            if let [a, b] = pair
                && a.key == b.key
            {
                fail!(NIXL_ERR_REGION_DUPLICATE, "{} is there twice", a.key);
            }
        }
        Ok(Self { regions })
    }

    /// The regions in the order of their keys.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn smallest(&self, of: impl Fn(&RegionKey) -> bool) -> Option<u64> {
        self.regions.iter().filter(|region| of(&region.key)).map(Region::num_items).min()
    }

    /// Pages that every KV region has.
    pub fn num_pages(&self) -> u64 {
        self.smallest(|key| matches!(key, RegionKey::Kv { .. })).unwrap_or(0)
    }

    /// Slots that every aux array has.
    pub fn num_aux_slots(&self) -> u64 {
        self.smallest(|key| matches!(key, RegionKey::Aux { .. })).unwrap_or(0)
    }

    /// Slots that every tensor of a group has; `None` when there is no such group.
    pub fn num_state_slots(&self, group: u32) -> Option<u64> {
        self.smallest(|key| matches!(key, RegionKey::State { group: of, .. } if *of == group))
    }

    /// Whether there is an aux array.
    pub fn has_aux(&self) -> bool {
        self.regions.iter().any(|region| matches!(region.key, RegionKey::Aux { .. }))
    }

    fn find(&self, key: RegionKey) -> Option<&Region> {
        let i = self.regions.binary_search_by_key(&key, |region| region.key).ok()?;
        self.regions.get(i)
    }
}

/// A region of the sender with the region of the receiver that it goes to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pair {
    /// What both are.
    pub key: RegionKey,
    /// The sender's.
    pub source: Region,
    /// The receiver's.
    pub destination: Region,
}

/// All pairs from one engine to another.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Mapping {
    /// KV.
    pub kv: Arc<[Pair]>,
    /// Aux. Empty when either side has none.
    pub aux: Arc<[Pair]>,
    /// State, by group.
    pub state: BTreeMap<u32, Arc<[Pair]>>,
}

/// Maps a sender's regions onto a receiver's, or says what cannot be mapped, naming both values.
///
/// Every KV region of the sender needs its counterpart; the receiver may have more (pipeline stages). Aux arrays must
/// agree when both sides have some. A state group of the sender must exist at the receiver with the same tensors.
pub fn map(source: &RegionTable, destination: &RegionTable) -> Result<Mapping> {
    let both_aux = source.has_aux() && destination.has_aux();
    let mut kv = Vec::new();
    let mut aux = Vec::new();
    let mut state: BTreeMap<u32, Vec<Pair>> = BTreeMap::new();
    for region in &source.regions {
        if matches!(region.key, RegionKey::Aux { .. }) && !both_aux {
            continue;
        }
        let pair = pair(region, destination)?;
        match region.key {
            RegionKey::Kv { .. } => kv.push(pair),
            RegionKey::Aux { .. } => aux.push(pair),
            RegionKey::State { group, .. } => state.entry(group).or_default().push(pair),
        }
    }
    for region in destination.regions.iter().filter(|region| !region.local) {
        let shared = match region.key {
            RegionKey::Kv { .. } => false,
            RegionKey::Aux { .. } => both_aux,
            RegionKey::State { group, .. } => state.contains_key(&group),
        };
        if shared && source.find(region.key).is_none() {
            fail!(NIXL_ERR_LAYOUT_DIFFERS, "the receiver has {}, the sender does not", region.key);
        }
    }
    let state = state.into_iter().map(|(group, pairs)| (group, pairs.into())).collect();
    Ok(Mapping { kv: kv.into(), aux: aux.into(), state })
}

fn pair(region: &Region, destination: &RegionTable) -> Result<Pair> {
    let key = region.key;
    let Some(other) = destination.find(key) else {
        let hint = match key {
            RegionKey::Kv { layer, .. } => {
                let theirs: Vec<String> = [Part::K, Part::V, Part::Fused]
                    .into_iter()
                    .filter_map(|part| destination.find(RegionKey::Kv { layer, part }))
                    .map(|region| region.key.to_string())
                    .collect();
                if theirs.is_empty() { String::new() } else { format!(" (it has {})", theirs.join(" and ")) }
            }
            _ => String::new(),
        };
        fail!(NIXL_ERR_LAYOUT_DIFFERS, "the sender has {key}, the receiver does not{hint}");
    };
    if other.local {
        fail!(NIXL_ERR_LAYOUT_DIFFERS, "the sender has {key}, the receiver keeps it local");
    }
    if region.item_len != other.item_len {
        fail!(
            NIXL_ERR_LAYOUT_DIFFERS,
            "{key}: an item has {} bytes at the sender, {} at the receiver",
            region.item_len,
            other.item_len
        );
    }
    Ok(Pair { key, source: *region, destination: *other })
}
