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

impl RegionKey {
    /// The state group that a region belongs to.
    fn state_group(&self) -> Option<u32> {
        match self {
            RegionKey::State { group, .. } => Some(*group),
            _ => None,
        }
    }
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
    /// It takes no part in transfers.
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

    /// Pages and state slots in all: no grant that names each once has more indices.
    pub fn num_indices(&self) -> u64 {
        let mut sum = self.num_pages();
        // Sorted by key, so a group's tensors are neighbours.
        let state = self.regions.iter().filter_map(|region| Some((region.key.state_group()?, region.num_items())));
        let mut group = None;
        for (of, num_items) in state {
            group = match group {
                Some((known, smallest)) if known == of => Some((of, num_items.min(smallest))),
                _ => {
                    sum = sum.saturating_add(group.map_or(0, |(_, smallest)| smallest));
                    Some((of, num_items))
                }
            };
        }
        sum.saturating_add(group.map_or(0, |(_, smallest)| smallest))
    }

    /// Whether there is an aux array.
    pub fn has_aux(&self) -> bool {
        self.regions.iter().any(|region| matches!(region.key, RegionKey::Aux { .. }))
    }

    /// The regions that take part in transfers.
    fn shared(&self) -> impl Iterator<Item = &Region> {
        self.regions.iter().filter(|region| !region.local)
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
/// Local regions take no part, and what the sender sends must not be local at the receiver.
pub fn map(source: &RegionTable, destination: &RegionTable) -> Result<Mapping> {
    let is_aux = |region: &Region| matches!(region.key, RegionKey::Aux { .. });
    let both_aux = source.shared().any(is_aux) && destination.has_aux();
    let mut kv = Vec::new();
    let mut aux = Vec::new();
    let mut state: BTreeMap<u32, Vec<Pair>> = BTreeMap::new();
    for region in source.shared() {
        if is_aux(region) && !both_aux {
            continue;
        }
        let pair = pair(region, destination)?;
        match region.key {
            RegionKey::Kv { .. } => kv.push(pair),
            RegionKey::Aux { .. } => aux.push(pair),
            RegionKey::State { group, .. } => state.entry(group).or_default().push(pair),
        }
    }
    for region in destination.shared() {
        let shared = match region.key {
            RegionKey::Kv { .. } => false,
            RegionKey::Aux { .. } => both_aux,
            RegionKey::State { group, .. } => state.contains_key(&group),
        };
        if shared && source.find(region.key).is_none_or(|region| region.local) {
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

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects)]
mod naive;

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn region(key: RegionKey, address: u64, len: u64, item_len: u64) -> Region {
        Region { key, address, len, item_len, kind: MemoryKind::Dram, device: 0, local: false }
    }

    fn kv(layer: u32, part: Part, item_len: u64) -> Region {
        let key = RegionKey::Kv { layer, part };
        region(key, 4096 + (u64::from(layer) << 32) + ((part as u64) << 30), item_len * 16, item_len)
    }

    fn aux(array: u32, item_len: u64) -> Region {
        region(RegionKey::Aux { array }, 1 << 50, item_len * 8, item_len)
    }

    fn state(group: u32, tensor: u32, item_len: u64) -> Region {
        region(RegionKey::State { group, tensor }, 1 << 51, item_len * 4, item_len)
    }

    fn local(region: Region) -> Region {
        Region { local: true, ..region }
    }

    fn table(regions: &[Region]) -> RegionTable {
        RegionTable::new(regions.to_vec()).unwrap()
    }

    fn mapped(source: &[Region], destination: &[Region]) -> Mapping {
        map(&table(source), &table(destination)).unwrap()
    }

    /// The text of a refused mapping.
    fn differs(source: &[Region], destination: &[Region]) -> String {
        let error = map(&table(source), &table(destination)).unwrap_err();
        assert_eq!(error.code, NIXL_ERR_LAYOUT_DIFFERS);
        error.text.into_owned()
    }

    fn keys(pairs: &[Pair]) -> Vec<RegionKey> {
        pairs.iter().map(|pair| pair.key).collect()
    }

    const K: Part = Part::K;
    const V: Part = Part::V;
    const FUSED: Part = Part::Fused;

    /// (address, len, item_len) with the code that refuses it, 0 when it is sound.
    const TABLE: [(u64, u64, u64, i32); 30] = [
        (0, 0, 0, NIXL_ERR_REGION_EMPTY),
        (0, 4096, 4096, NIXL_ERR_REGION_EMPTY),
        (0, u64::MAX, 1, NIXL_ERR_REGION_EMPTY),
        (1, 0, 1, NIXL_ERR_REGION_EMPTY),
        (u64::MAX, 0, 1, NIXL_ERR_REGION_EMPTY),
        (1, 1, 0, NIXL_ERR_REGION_EMPTY),
        (1, u64::MAX - 1, 0, NIXL_ERR_REGION_EMPTY),
        (1, 1, 1, NIXL_OK),
        (1, 1, 2, NIXL_ERR_REGION_ITEM),
        (1, 2, 1, NIXL_OK),
        (4096, 4095, 4096, NIXL_ERR_REGION_ITEM),
        (4096, 4096, 4096, NIXL_OK),
        (4096, 4097, 4096, NIXL_ERR_REGION_ITEM),
        (4096, 8192, 4096, NIXL_OK),
        (4096, 4096, u64::MAX, NIXL_ERR_REGION_ITEM),
        (4096, (1 << 32) - 1, 1 << 32, NIXL_ERR_REGION_ITEM),
        (4096, 1 << 32, 1 << 32, NIXL_OK),
        (4096, (1 << 32) + 1, 1 << 32, NIXL_ERR_REGION_ITEM),
        (1 << 32, 3 << 32, 1 << 16, NIXL_OK),
        (1 << 63, (1 << 63) - 1, 1, NIXL_OK),
        (1 << 63, 1 << 63, 1, NIXL_ERR_REGION_WRAPS),
        ((1 << 63) - 1, 1 << 63, 1 << 63, NIXL_OK),
        ((1 << 63) + 1, 1 << 63, 1 << 63, NIXL_ERR_REGION_WRAPS),
        (0xffff_8000_0000_0000, 1 << 46, 4096, NIXL_OK),
        (0xffff_8000_0000_0000, 1 << 47, 4096, NIXL_ERR_REGION_WRAPS),
        (u64::MAX - 2047, 4096, 4096, NIXL_ERR_REGION_WRAPS),
        (u64::MAX - 4096, 4096, 4096, NIXL_OK),
        (u64::MAX, 1, 1, NIXL_ERR_REGION_WRAPS),
        (1, u64::MAX, u64::MAX, NIXL_ERR_REGION_WRAPS),
        (4096, u64::MAX - 4095, 4096, NIXL_ERR_REGION_WRAPS),
    ];

    #[test]
    fn d1_d3_regions_around_the_edges_of_the_address_space() {
        let key = RegionKey::Aux { array: 9 };
        for (address, len, item_len, code) in TABLE {
            // Alone, and behind a sound one.
            for others in [vec![], vec![kv(0, K, 4096)]] {
                let mut regions = others;
                regions.push(region(key, address, len, item_len));
                match RegionTable::new(regions) {
                    Ok(_) => assert_eq!(code, NIXL_OK, "{address:#x} {len:#x} {item_len:#x}"),
                    Err(error) => {
                        assert_eq!(error.code, code, "{address:#x} {len:#x} {item_len:#x}: {error}");
                        assert!(error.text.contains("aux array 9"), "{error}");
                    }
                }
            }
        }
    }

    fn edge() -> impl Strategy<Value = u64> {
        let around = prop_oneof![Just(0u64), Just(4096), Just(1 << 32), Just(1 << 63), Just(u64::MAX)];
        let near = (around, 0u64..5, any::<bool>())
            .prop_map(|(at, by, up)| if up { at.wrapping_add(by) } else { at.wrapping_sub(by) });
        prop_oneof![near, any::<u64>()]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn d3_a_table_holds_sound_regions_only(address in edge(), len in edge(), item_len in edge()) {
            let sound = address > 0
                && len > 0
                && item_len > 0
                && len % item_len == 0
                && u128::from(address) + u128::from(len) <= u128::from(u64::MAX);
            let result = RegionTable::new(vec![region(RegionKey::Aux { array: 0 }, address, len, item_len)]);
            prop_assert_eq!(result.is_ok(), sound);
            if let Ok(table) = result {
                prop_assert_eq!(table.num_aux_slots() * item_len, len);
            }
        }
    }

    #[test]
    fn a_table_is_sorted_and_has_each_key_once() {
        let regions = [state(1, 0, 8), kv(1, V, 64), aux(0, 16), kv(0, FUSED, 64), kv(1, K, 64), state(0, 1, 8)];
        let sorted = table(&regions);
        assert!(sorted.regions().windows(2).all(|two| two[0].key < two[1].key));
        let mut reversed = regions;
        reversed.reverse();
        assert_eq!(table(&reversed), sorted);
        for i in 0..regions.len() {
            let mut twice = regions.to_vec();
            twice.push(Region { address: 1 << 60, ..regions[i] });
            let error = RegionTable::new(twice).unwrap_err();
            assert_eq!(error.code, NIXL_ERR_REGION_DUPLICATE);
            assert!(error.text.contains(&regions[i].key.to_string()), "{error}");
        }
    }

    #[test]
    fn the_smallest_region_counts() {
        let empty = table(&[]);
        assert_eq!((empty.num_pages(), empty.num_aux_slots(), empty.num_indices()), (0, 0, 0));
        assert_eq!(empty.num_state_slots(0), None);
        let with = |region: Region, num_items: u64| Region { len: region.item_len * num_items, ..region };
        let table = table(&[
            with(kv(0, K, 64), 9),
            with(kv(0, V, 32), 7),
            with(kv(1, FUSED, 32), 8),
            with(aux(0, 4), 5),
            with(aux(1, 8), 3),
            with(state(2, 0, 4), 6),
            with(state(2, 1, 4), 4),
            with(state(5, 0, 4), 11),
        ]);
        assert_eq!((table.num_pages(), table.num_aux_slots()), (7, 3));
        assert_eq!([0, 2, 5].map(|group| table.num_state_slots(group)), [None, Some(4), Some(11)]);
        assert_eq!(table.num_indices(), 7 + 4 + 11);
        let huge = RegionTable::new(vec![
            region(RegionKey::Kv { layer: 0, part: K }, 1, u64::MAX - 1, 1),
            region(RegionKey::State { group: 0, tensor: 0 }, 1, u64::MAX - 1, 1),
        ]);
        assert_eq!(huge.unwrap().num_indices(), u64::MAX);
    }

    #[test]
    fn regions_are_paired_by_key_and_never_by_position() {
        let source = [kv(3, K, 64), kv(3, V, 64), kv(4, K, 32), kv(4, V, 32), aux(0, 8), state(0, 0, 4)];
        // The receiver registered in another order, elsewhere, and has more: layers, parts, groups, local regions.
        let mut destination: Vec<Region> = source
            .iter()
            .rev()
            .map(|region| Region { address: region.address + (1 << 20), kind: MemoryKind::Vram, device: 3, ..*region })
            .collect();
        destination.extend([kv(0, K, 999), kv(4, FUSED, 1), local(kv(5, K, 7)), state(7, 0, 4), local(state(0, 9, 5))]);
        let mapping = mapped(&source, &destination);
        assert_eq!(keys(&mapping.kv), source[..4].iter().map(|region| region.key).collect::<Vec<_>>());
        assert_eq!(keys(&mapping.aux), [source[4].key]);
        assert_eq!(mapping.state.keys().collect::<Vec<_>>(), [&0]);
        assert_eq!(keys(&mapping.state[&0]), [source[5].key]);
        let all = mapping.kv.iter().chain(mapping.aux.iter()).chain(mapping.state[&0].iter());
        for (pair, ours) in all.zip(source) {
            assert_eq!(pair.source, ours);
            let theirs = Region { address: ours.address + (1 << 20), kind: MemoryKind::Vram, device: 3, ..ours };
            assert_eq!(pair.destination, theirs);
        }
    }

    #[test]
    fn g3_a_receiver_may_have_more_layers_and_a_sender_may_not() {
        let stage = [kv(4, K, 64), kv(4, V, 64)];
        let all: Vec<Region> = (0..10).flat_map(|layer| [kv(layer, K, 64), kv(layer, V, 64)]).collect();
        assert_eq!(keys(&mapped(&stage, &all).kv), [stage[0].key, stage[1].key]);
        let text = differs(&all, &stage);
        assert!(text.contains("K of KV layer 0"), "{text}");
        assert_eq!(mapped(&[], &all), Mapping::default());
    }

    #[test]
    fn a8_a_fused_layer_is_not_keys_and_values() {
        // The bytes are the same in all: only the parts differ.
        let apart = [kv(0, K, 64), kv(0, V, 64)];
        let fused = [kv(0, FUSED, 128)];
        let text = differs(&apart, &fused);
        assert!(text.contains("K of KV layer 0") && text.contains("fused KV layer 0"), "{text}");
        let text = differs(&fused, &apart);
        assert!(text.contains("fused KV layer 0"), "{text}");
        assert!(text.contains("K of KV layer 0 and V of KV layer 0"), "{text}");
        // Two layers of keys against one of keys and values.
        let text = differs(&[kv(0, K, 64), kv(1, K, 64)], &apart);
        assert!(text.contains("K of KV layer 1") && !text.contains("it has"), "{text}");
        let text = differs(&[kv(0, V, 64)], &[kv(0, K, 64)]);
        assert!(text.contains("V of KV layer 0") && text.contains("it has K of KV layer 0"), "{text}");
    }

    #[test]
    fn d5_item_lengths_that_differ_are_named_both() {
        for (ours, theirs) in [
            (kv(2, K, 4096), kv(2, K, 8192)),
            (kv(2, FUSED, 8192), kv(2, FUSED, 4096)),
            (aux(1, 4096), aux(1, 8192)),
            (state(3, 1, 4096), state(3, 1, 8192)),
        ] {
            for (source, destination) in [(ours, theirs), (theirs, ours)] {
                let text = differs(&[source], &[destination]);
                assert!(text.contains(&source.key.to_string()), "{text}");
                let [a, b] = [source, destination].map(|region| text.find(&region.item_len.to_string()).unwrap());
                assert!(a < b, "the sender's comes first: {text}");
            }
        }
    }

    #[test]
    fn g6_state_tensors_must_be_the_same_on_both_sides() {
        let two = [state(1, 0, 4096), state(1, 1, 64)];
        let three = [state(1, 0, 4096), state(1, 1, 64), state(1, 2, 64)];
        assert_eq!(keys(&mapped(&two, &two).state[&1]).len(), 2);
        for (source, destination, who) in [(&two[..], &three[..], "receiver"), (&three, &two, "sender")] {
            let text = differs(source, destination);
            assert!(
                text.contains("tensor 2 of state group 1") && text.starts_with(&format!("the {who} has")),
                "{text}"
            );
        }
        let text = differs(&[state(1, 0, 4096)], &[state(1, 0, 2048)]);
        assert!(text.contains("4096") && text.contains("2048"), "{text}");
        // A group that only the receiver has is filled by another sender; one that only the sender has goes nowhere.
        assert!(mapped(&[], &two).state.is_empty());
        assert!(differs(&two, &[]).contains("tensor 0 of state group 1"));
        assert!(differs(&two, &[state(2, 0, 4096), state(2, 1, 64)]).contains("state group 1"));
    }

    #[test]
    fn aux_arrays_agree_when_both_sides_have_some() {
        let (one, two) = ([aux(0, 16)], [aux(0, 16), aux(1, 16)]);
        assert_eq!(keys(&mapped(&two, &two).aux).len(), 2);
        assert!(mapped(&one, &[]).aux.is_empty());
        assert!(mapped(&[], &one).aux.is_empty());
        assert!(differs(&one, &two).starts_with("the receiver has aux array 1"));
        assert!(differs(&two, &one).starts_with("the sender has aux array 1"));
    }

    #[test]
    fn no_peer_sends_a_local_region() {
        let source = [kv(0, K, 64), kv(1, K, 64)];
        let text = differs(&source, &[kv(0, K, 64), local(kv(1, K, 64))]);
        assert!(text.contains("K of KV layer 1") && text.contains("local"), "{text}");
        // Even where the item lengths differ too, and in each class.
        for region in [kv(0, K, 64), aux(0, 64), state(0, 0, 64)] {
            assert!(differs(&[region], &[local(Region { item_len: 32, ..region })]).contains("local"));
        }
        // The receiver's own beside what is sent: no counterpart is missed.
        let mapping = mapped(&[state(0, 0, 64)], &[state(0, 0, 64), local(state(0, 1, 8)), local(kv(0, K, 8))]);
        assert_eq!(keys(&mapping.state[&0]), [state(0, 0, 64).key]);
    }
}
