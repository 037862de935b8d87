//! A hostile card's regions and a hostile grant, mapped and planned: whatever they hold, no span leaves its regions.
#![no_main]

use nixlkv::layout::{Part, Region, RegionKey, RegionTable, map};
use nixlkv::nixl::MemoryKind;
use nixlkv::plan::{Cursor, Limits, Run, Slice, runs};
use nixlkv_fuzz::Input;

/// Items of each of our regions.
const ITEMS: u64 = 32;

fn kind(bits: u8) -> MemoryKind {
    if bits & 1 == 0 { MemoryKind::Dram } else { MemoryKind::Vram }
}

fn key(bits: u8) -> RegionKey {
    let number = u32::from(bits >> 4);
    match bits % 5 {
        0 => RegionKey::Kv { layer: number, part: Part::K },
        1 => RegionKey::Kv { layer: number, part: Part::V },
        2 => RegionKey::Kv { layer: number, part: Part::Fused },
        3 => RegionKey::Aux { array: number },
        _ => RegionKey::State { group: number & 1, tensor: number >> 1 },
    }
}

/// What a card may claim of a region: anything.
fn claimed(input: &mut Input<'_>, key: RegionKey, item_len: u64) -> Region {
    let how = input.u8();
    let address = if how & 2 == 0 { u64::from(input.u16()) + 1 } else { input.u64() };
    let item_len = if how & 4 == 0 { item_len } else { input.u64() };
    let num_items = if how & 8 == 0 { u64::from(input.u8()) } else { input.u64() };
    let len = if how & 16 == 0 { item_len.wrapping_mul(num_items) } else { input.u64() };
    Region { key, address, len, item_len, kind: kind(how), device: u64::from(how >> 6), local: how & 32 != 0 }
}

/// An index as it comes from the wire, small ones more often.
fn index(input: &mut Input<'_>) -> i32 {
    match input.u8() {
        255 => input.u32() as i32,
        byte => i32::from(byte) - 1,
    }
}

fn inside(region: &Region, address: u64, len: u64) -> bool {
    let (start, end) = (u128::from(address), u128::from(address) + u128::from(len));
    start >= u128::from(region.address) && end <= u128::from(region.address) + u128::from(region.len)
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for i in 0..u64::from(input.u8() % 12) {
        let (key, how) = (key(input.u8()), input.u8());
        let item_len = 1 + u64::from(how >> 2);
        let address = (i + 1) << 40;
        ours.push(Region {
            key,
            address,
            len: item_len * ITEMS,
            item_len,
            kind: kind(how),
            device: 0,
            local: how & 2 != 0,
        });
        theirs.push(claimed(&mut input, key, item_len));
    }
    for _ in 0..input.u8() % 4 {
        let key = key(input.u8());
        theirs.push(claimed(&mut input, key, 64));
    }
    let (Ok(ours), Ok(theirs)) = (RegionTable::new(ours), RegionTable::new(theirs)) else { return };
    let both = [map(&ours, &theirs), map(&theirs, &ours)];
    let [Ok(mapping), _] = both else { return };
    for pair in mapping.kv.iter().chain(mapping.aux.iter()).chain(mapping.state.values().flat_map(|pairs| pairs.iter()))
    {
        assert!(ours.regions().contains(&pair.source) && theirs.regions().contains(&pair.destination));
        assert!(pair.source.key == pair.key && pair.destination.key == pair.key);
        assert!(pair.source.item_len == pair.destination.item_len);
        assert!(!pair.source.local && !pair.destination.local);
    }

    let limits = Limits { max_bytes: u64::from(input.u16()), max_spans: usize::from(input.u8()) };
    let mut parts = Vec::new();
    let groups = [mapping.kv.clone(), mapping.aux.clone()].into_iter().chain(mapping.state.values().cloned());
    for pairs in groups {
        let (mut source, mut destination) = (Vec::new(), Vec::new());
        for _ in 0..input.u8() % 40 {
            source.push(index(&mut input));
            destination.push(index(&mut input));
        }
        let mut list: Vec<Run> = Vec::new();
        if runs(&source, &destination, &mut list).is_ok() {
            parts.push((pairs, list));
        }
    }
    let expected: u128 = parts
        .iter()
        .map(|(pairs, list)| {
            let num_items: u128 = list.iter().map(|run| u128::from(run.count)).sum();
            pairs.iter().map(|pair| num_items * u128::from(pair.source.item_len)).sum::<u128>()
        })
        .sum();
    let Ok(mut cursor) = Cursor::new(parts, limits) else { return };
    assert!(u128::from(cursor.num_bytes()) == expected);
    let (mut slice, mut num_slices, mut num_bytes) = (Slice::default(), 0u32, 0u64);
    while cursor.next(&mut slice) {
        num_slices += 1;
        num_bytes += slice.num_bytes;
        assert!((1..=limits.max_spans.max(1)).contains(&slice.spans.len()));
        assert!(slice.num_bytes == slice.spans.iter().map(|span| span.len).sum::<u64>());
        for span in &slice.spans {
            let (kinds, len) = ((slice.source_kind, slice.destination_kind), span.len);
            let fits = ours.regions().iter().filter(|region| inside(region, span.source, len)).any(|ours| {
                let theirs = theirs.regions().iter().find(|theirs| theirs.key == ours.key);
                theirs.is_some_and(|theirs| {
                    inside(theirs, span.destination, len)
                        && kinds == (ours.kind, theirs.kind)
                        && (span.source_device, span.destination_device) == (ours.device, theirs.device)
                })
            });
            assert!(len > 0 && fits, "{span:?} leaves its regions");
        }
    }
    assert!(num_slices == cursor.num_slices() && num_bytes == cursor.num_bytes());
});
