//! Tables and their mapping against a naive restatement of the rules.

use proptest::prelude::*;

use super::*;

fn region(key: RegionKey, item_len: u64) -> Region {
    let len = item_len * 8;
    Region { key, address: 0x10000, len, item_len, kind: MemoryKind::Dram, device: 0, local: false }
}

fn kv(layer: u32, part: Part) -> RegionKey {
    RegionKey::Kv { layer, part }
}

fn aux(array: u32) -> RegionKey {
    RegionKey::Aux { array }
}

fn state(group: u32, tensor: u32) -> RegionKey {
    RegionKey::State { group, tensor }
}

fn table(regions: impl IntoIterator<Item = (RegionKey, u64)>) -> RegionTable {
    RegionTable::new(regions.into_iter().map(|(key, item_len)| region(key, item_len)).collect()).unwrap()
}

fn local(mut table: RegionTable, key: RegionKey) -> RegionTable {
    table.regions.iter_mut().filter(|region| region.key == key).for_each(|region| region.local = true);
    table
}

/// The mapping is refused, and the text has every one of `named`.
#[track_caller]
fn refused(source: &RegionTable, destination: &RegionTable, named: &[&str]) {
    let e = map(source, destination).unwrap_err();
    assert_eq!(e.code, NIXL_ERR_LAYOUT_DIFFERS, "{e}");
    for name in named {
        assert!(e.text.contains(name), "{e} lacks {name:?}");
    }
}

#[test]
fn local_regions_take_no_part() {
    let both = table([(kv(0, Part::K), 64), (kv(1, Part::K), 64)]);
    let draft = local(both.clone(), kv(1, Part::K));
    refused(&both, &draft, &["K of KV layer 1", "local"]);
    // Engines with both roles flag the same layers on both sides.
    for receiver in [&both, &draft] {
        let mapping = map(&draft, receiver).unwrap();
        assert_eq!(mapping.kv.iter().map(|pair| pair.key).collect::<Vec<_>>(), [kv(0, Part::K)]);
    }
    let own = local(table([(aux(0), 64)]), aux(0));
    assert!(map(&own, &own).unwrap().aux.is_empty());
    assert!(map(&own, &table([(aux(0), 64)])).unwrap().aux.is_empty());
    refused(&table([(aux(0), 64)]), &own, &["aux array 0", "local"]);
    // Its group goes on with the other tensors, and lacks one.
    let group = table([(state(0, 0), 8), (state(0, 1), 8)]);
    refused(&local(group.clone(), state(0, 1)), &group, &["tensor 1 of state group 0"]);
}

fn any_key() -> impl Strategy<Value = RegionKey> {
    prop_oneof![
        3 => (0u32..3, prop_oneof![Just(Part::K), Just(Part::V), Just(Part::Fused)])
            .prop_map(|(layer, part)| RegionKey::Kv { layer, part }),
        1 => (0u32..2).prop_map(|array| RegionKey::Aux { array }),
        2 => (0u32..2, 0u32..2).prop_map(|(group, tensor)| RegionKey::State { group, tensor }),
    ]
}

fn any_regions() -> impl Strategy<Value = Vec<Region>> {
    let length = prop_oneof![12 => Just(64u64), 1 => Just(32u64)];
    let one = (any_key(), length, prop::bool::weighted(0.08));
    prop::collection::vec(one, 0..7).prop_map(|all| {
        let mut regions: Vec<Region> = Vec::new();
        for (key, item_len, local) in all {
            if regions.iter().all(|region| region.key != key) {
                regions.push(Region { local, ..region(key, item_len) });
            }
        }
        regions
    })
}

/// A receiver that has what the sender has and more, unless something was changed.
fn any_two() -> impl Strategy<Value = (Vec<Region>, Vec<Region>)> {
    (any_regions(), any_regions(), any::<bool>()).prop_map(|(source, mut more, related)| {
        if related {
            more.retain(|region| source.iter().all(|other| other.key != region.key));
            more.extend(source.iter().map(|region| Region { local: false, address: 0x90000, ..*region }));
        }
        (source, more)
    })
}

/// The rules, one after the other, over plain lists.
fn naive_map(source: &[Region], destination: &[Region]) -> Option<Vec<(RegionKey, u64, u64)>> {
    let sent: Vec<&Region> = source.iter().filter(|region| !region.local).collect();
    let taken: Vec<&Region> = destination.iter().filter(|region| !region.local).collect();
    let is_aux = |region: &Region| matches!(region.key, RegionKey::Aux { .. });
    let aux_used = sent.iter().any(|region| is_aux(region)) && destination.iter().any(is_aux);
    let mut pairs = Vec::new();
    for region in &sent {
        if is_aux(region) && !aux_used {
            continue;
        }
        let other = taken.iter().find(|other| other.key == region.key)?;
        if other.item_len != region.item_len {
            return None;
        }
        pairs.push((region.key, region.address, other.address));
    }
    for region in &taken {
        let needed = match region.key {
            RegionKey::Kv { .. } => false,
            RegionKey::Aux { .. } => aux_used,
            RegionKey::State { group, .. } => {
                sent.iter().any(|other| matches!(other.key, RegionKey::State { group: of, .. } if of == group))
            }
        };
        if needed && !sent.iter().any(|other| other.key == region.key) {
            return None;
        }
    }
    pairs.sort();
    Some(pairs)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6000))]

    #[test]
    fn map_agrees_with_the_naive_rules((source, destination) in any_two()) {
        let tables = [&source, &destination].map(|regions| RegionTable::new(regions.clone()).unwrap());
        let got = map(&tables[0], &tables[1]);
        if let Err(e) = &got {
            prop_assert_eq!(e.code, NIXL_ERR_LAYOUT_DIFFERS);
        }
        let got = got.ok().map(|mapping| {
            for (group, pairs) in &mapping.state {
                assert!(!pairs.is_empty() && pairs.iter().all(|pair| pair.key.state_group() == Some(*group)));
            }
            assert!(mapping.aux.iter().all(|pair| matches!(pair.key, RegionKey::Aux { .. })));
            assert!(mapping.kv.iter().all(|pair| matches!(pair.key, RegionKey::Kv { .. })));
            let all = mapping.kv.iter().chain(mapping.aux.iter()).chain(mapping.state.values().flat_map(|p| p.iter()));
            all.map(|pair| {
                assert_eq!((pair.key, pair.key), (pair.source.key, pair.destination.key));
                (pair.key, pair.source.address, pair.destination.address)
            }).collect::<Vec<_>>()
        });
        prop_assert_eq!(got, naive_map(&source, &destination));
    }

    #[test]
    fn a_table_is_sorted_whatever_the_order(regions in any_regions().prop_shuffle()) {
        let table = RegionTable::new(regions.clone()).unwrap();
        prop_assert!(table.regions().windows(2).all(|two| two[0].key < two[1].key));
        prop_assert_eq!(table.regions().len(), regions.len());
        for region in &regions {
            prop_assert_eq!(table.find(region.key), Some(region));
        }
    }
}
