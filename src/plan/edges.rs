//! The planner against a naive one over fake memories, and at the edges of its numbers.

use proptest::prelude::*;

use super::*;
use crate::layout::{Part as KvPart, Region, RegionTable};

fn region(key: RegionKey, address: u64, item_len: u64, num_items: u64, kind: MemoryKind) -> Region {
    Region { key, address, len: item_len * num_items, item_len, kind, device: 3, local: false }
}

fn key(layer: u32) -> RegionKey {
    RegionKey::Kv { layer, part: KvPart::K }
}

fn one_pair(source: Region, destination: Region) -> Arc<[Pair]> {
    Arc::new([Pair { key: source.key, source, destination }])
}

fn slices(cursor: &mut Cursor) -> Vec<Slice> {
    let mut out = Slice::default();
    let mut all = Vec::new();
    while cursor.next(&mut out) {
        all.push(out.clone());
    }
    assert!(out.spans.is_empty() && out.num_bytes == 0, "nothing is left of the last slice");
    assert!(!cursor.next(&mut out), "the end stays the end");
    all
}

/// Page by page: a new run wherever either side does not go on by one.
fn naive_runs(source: &[i32], destination: &[i32]) -> Vec<(i32, i32, u32)> {
    let mut out: Vec<(i32, i32, u32)> = Vec::new();
    for i in 0..source.len() {
        let goes_on = i > 0 && source[i] - 1 == source[i - 1] && destination[i] - 1 == destination[i - 1];
        if goes_on {
            out.last_mut().unwrap().2 += 1;
        } else {
            out.push((source[i], destination[i], 1));
        }
    }
    out
}

/// Pages that are often, not always, neighbours. No page twice.
fn distinct_pages(num_items: u32) -> impl Strategy<Value = Vec<i32>> {
    let all: Vec<i32> = (0..num_items as i32).collect();
    (Just(all.clone()).prop_shuffle(), 0..=num_items as usize, any::<bool>(), Just(all)).prop_map(
        |(shuffled, n, in_order, all)| {
            let mut pages = if in_order { all } else { shuffled };
            pages.rotate_left(n / 2);
            pages.truncate(n);
            pages
        },
    )
}

#[derive(Clone, Debug)]
struct FakePair {
    item_len: u64,
    source_kind: MemoryKind,
    destination_kind: MemoryKind,
}

#[derive(Clone, Debug)]
struct FakePart {
    num_items: u32,
    pairs: Vec<FakePair>,
    source: Vec<i32>,
    destination: Vec<i32>,
}

fn kind() -> impl Strategy<Value = MemoryKind> {
    prop_oneof![3 => Just(MemoryKind::Dram), 1 => Just(MemoryKind::Vram)]
}

fn fake_part() -> impl Strategy<Value = FakePart> {
    let pair = (1u64..9, kind(), kind()).prop_map(|(item_len, source_kind, destination_kind)| FakePair {
        item_len,
        source_kind,
        destination_kind,
    });
    (1u32..24, prop::collection::vec(pair, 0..4)).prop_flat_map(|(num_items, pairs)| {
        (distinct_pages(num_items), distinct_pages(num_items)).prop_map(move |(mut source, mut destination)| {
            let n = source.len().min(destination.len());
            source.truncate(n);
            destination.truncate(n);
            FakePart { num_items, pairs: pairs.clone(), source, destination }
        })
    })
}

/// One side's memory: byte `i` of it has address `base + i`. Regions follow each other with gaps.
struct FakeMemory {
    base: u64,
    bytes: Vec<u32>,
}

impl FakeMemory {
    fn add(&mut self, key: RegionKey, item_len: u64, num_items: u64, kind: MemoryKind) -> Region {
        let gap = self.bytes.len() + 5;
        self.bytes.resize(gap + (item_len * num_items) as usize, 0);
        region(key, self.base + gap as u64, item_len, num_items, kind)
    }

    fn index(&self, address: u64) -> usize {
        usize::try_from(address - self.base).unwrap()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn runs_agree_with_the_naive_ones(pages in (distinct_pages(40), distinct_pages(40)), step in 0i32..3) {
        let (mut source, mut destination) = pages;
        let n = source.len().min(destination.len());
        source.truncate(n);
        destination.truncate(n);
        // Up to the largest index there is.
        let top = [0, i32::MAX - 39, 1 << 30][step as usize];
        source.iter_mut().for_each(|page| *page += top);
        let mut out = vec![Run { source: 9, destination: 9, count: 9 }];
        runs(&source, &destination, &mut out).unwrap();
        let naive = naive_runs(&source, &destination);
        let got: Vec<_> = out.iter().map(|r| (r.source as i32, r.destination as i32, r.count)).collect();
        prop_assert_eq!(got, naive);
    }

    /// Every byte that should change gets its source byte exactly once, and no other byte is touched.
    #[test]
    fn spans_move_what_the_naive_copy_moves(
        fakes in prop::collection::vec(fake_part(), 0..4), max_bytes in 1u64..80, max_spans in 1usize..12,
        base in prop_oneof![Just(0x1000u64), Just((1 << 63) - 64), Just(u64::MAX - 4096)],
    ) {
        let mut source = FakeMemory { base, bytes: Vec::new() };
        let mut destination = FakeMemory { base: base ^ 0x10, bytes: Vec::new() };
        let mut parts = Vec::new();
        let mut wanted = Vec::new();
        let mut num_runs = 0;
        for (i, fake) in fakes.iter().enumerate() {
            let pairs: Vec<Pair> = fake.pairs.iter().enumerate().map(|(j, pair)| {
                let key = key((i * 10 + j) as u32);
                Pair {
                    key,
                    source: source.add(key, pair.item_len, fake.num_items.into(), pair.source_kind),
                    destination: destination.add(key, pair.item_len, fake.num_items.into(), pair.destination_kind),
                }
            }).collect();
            for pair in &pairs {
                for (from, to) in fake.source.iter().zip(&fake.destination) {
                    for byte in 0..pair.source.item_len {
                        let from = pair.source.address + *from as u64 * pair.source.item_len + byte;
                        let to = pair.destination.address + *to as u64 * pair.source.item_len + byte;
                        wanted.push((source.index(from), destination.index(to)));
                    }
                }
            }
            let mut merged = Vec::new();
            runs(&fake.source, &fake.destination, &mut merged).unwrap();
            num_runs += merged.len() * pairs.len();
            parts.push((Arc::from(pairs), merged));
        }
        for (i, byte) in source.bytes.iter_mut().enumerate() {
            *byte = i as u32 + 1;
        }
        let mut naive = destination.bytes.clone();
        let mut naive_writes = vec![0; naive.len()];
        for (from, to) in &wanted {
            naive[*to] = source.bytes[*from];
            naive_writes[*to] += 1;
        }

        let mut cursor = Cursor::new(parts.clone(), Limits { max_bytes, max_spans }).unwrap();
        prop_assert_eq!(cursor.num_bytes(), wanted.len() as u64);
        let all = slices(&mut cursor);
        prop_assert_eq!(cursor.num_slices() as usize, all.len());
        let mut writes = vec![0; naive.len()];
        for slice in &all {
            prop_assert!((1..=max_spans).contains(&slice.spans.len()));
            prop_assert_eq!(slice.num_bytes, slice.spans.iter().map(|span| span.len).sum::<u64>());
            prop_assert!(slice.num_bytes <= max_bytes || slice.spans.len() == 1);
            for span in &slice.spans {
                prop_assert_eq!((span.source_device, span.destination_device), (3, 3));
                let pairs = parts.iter().flat_map(|(pairs, _)| pairs.iter());
                let inside = |region: &Region, address: u64| {
                    address >= region.address && address + (span.len - 1) < region.address + region.len
                };
                let mut owners =
                    pairs.filter(|p| inside(&p.source, span.source) && inside(&p.destination, span.destination));
                let owner = owners.next().unwrap();
                prop_assert_eq!(slice.source_kind, owner.source.kind);
                prop_assert_eq!(slice.destination_kind, owner.destination.kind);
                prop_assert!(slice.num_bytes <= max_bytes || span.len == owner.source.item_len);
                for byte in 0..span.len {
                    let (from, to) = (source.index(span.source + byte), destination.index(span.destination + byte));
                    destination.bytes[to] = source.bytes[from];
                    writes[to] += 1;
                }
            }
        }
        prop_assert_eq!(&destination.bytes, &naive);
        prop_assert_eq!(writes, naive_writes);

        // Without limits there are no more spans than runs, and slices only where the memory kind changes.
        let mut cursor = Cursor::new(parts, Limits { max_bytes: u64::MAX, max_spans: usize::MAX }).unwrap();
        let all = slices(&mut cursor);
        prop_assert_eq!(all.iter().map(|slice| slice.spans.len()).sum::<usize>(), num_runs);
        for two in all.windows(2) {
            let kinds = [&two[0], &two[1]].map(|slice| (slice.source_kind, slice.destination_kind));
            prop_assert_ne!(kinds[0], kinds[1]);
        }
        prop_assert_eq!(cursor.num_slices() as usize, all.len());
    }

    /// No more slices than a walk that adds item after item as long as the limits allow.
    #[test]
    fn slices_are_as_full_as_the_limits_allow(
        fake in fake_part(), max_bytes in 1u64..60, max_spans in 1usize..8,
    ) {
        let pairs: Vec<Pair> = fake.pairs.iter().zip(0..).map(|(pair, i)| {
            let region = region(key(i), 0x1000, pair.item_len, fake.num_items.into(), MemoryKind::Dram);
            Pair { key: key(i), source: region, destination: region }
        }).collect();
        let (mut slices, mut spans, mut bytes) = (0, 0, 0);
        for pair in &pairs {
            for (_, _, count) in naive_runs(&fake.source, &fake.destination) {
                let mut new_span = true;
                for _ in 0..count {
                    let item_len = pair.source.item_len;
                    let fits = bytes + item_len <= max_bytes && spans + usize::from(new_span) <= max_spans;
                    if slices == 0 || !fits {
                        (slices, spans, bytes, new_span) = (slices + 1, 0, 0, true);
                    }
                    spans += usize::from(new_span);
                    bytes += item_len;
                    new_span = false;
                }
            }
        }
        let mut merged = Vec::new();
        runs(&fake.source, &fake.destination, &mut merged).unwrap();
        let cursor = Cursor::new(vec![(pairs.into(), merged)], Limits { max_bytes, max_spans }).unwrap();
        prop_assert_eq!(cursor.num_slices(), slices);
    }

    /// Offsets past 2^32, addresses past 2^63: exact, by the arithmetic of twice the width.
    #[test]
    fn a12_offsets_and_addresses_are_exact(
        item_len in prop_oneof![Just(65536u64), 1u64..1 << 33], page in 0u32..=i32::MAX as u32,
        low in 1u64..1 << 48, end in prop_oneof![Just(u64::MAX), Just((1 << 63) + 5), Just(0xffff_8000_0000_0000)],
    ) {
        let num_items = u64::from(page) + 1;
        let Some(len) = num_items.checked_mul(item_len).filter(|len| *len < end) else { return Ok(()) };
        let high = Region { len, ..region(key(0), end - len, item_len, 0, MemoryKind::Dram) };
        let Some(low) = low.checked_add(len).map(|_| Region { address: low, ..high }) else { return Ok(()) };
        RegionTable::new(vec![high]).unwrap();
        let pairs = one_pair(high, low);
        let mut merged = Vec::new();
        runs(&[page as i32], &[page as i32], &mut merged).unwrap();
        let mut cursor = Cursor::new(vec![(pairs, merged)], Limits { max_bytes: 1 << 20, max_spans: 64 }).unwrap();
        let all = slices(&mut cursor);
        let [Slice { spans, .. }] = all.as_slice() else { panic!("{all:?}") };
        let [span] = spans.as_slice() else { panic!("{spans:?}") };
        let offset = u128::from(page) * u128::from(item_len);
        prop_assert_eq!(u128::from(span.source), u128::from(high.address) + offset);
        prop_assert_eq!(u128::from(span.destination), u128::from(low.address) + offset);
        prop_assert_eq!(span.source + span.len, end, "the last page ends where the region does");
    }
}

/// One item past the end, on either side and in any pair, refuses the whole chunk with the values named.
#[test]
fn d3_a_run_past_a_region_is_refused_before_anything_moves() {
    let keys = [
        (key(7), NIXL_ERR_PAGE_OUT_OF_RANGE),
        (RegionKey::Aux { array: 7 }, NIXL_ERR_AUX_OUT_OF_RANGE),
        (RegionKey::State { group: 1, tensor: 7 }, NIXL_ERR_STATE_OUT_OF_RANGE),
    ];
    for (key, code) in keys {
        let (large, small) =
            (region(key, 0x10000, 16, 100, MemoryKind::Dram), region(key, 0x90000, 16, 99, MemoryKind::Dram));
        let limits = || Limits { max_bytes: 64, max_spans: 4 };
        for (source, destination, side) in [(large, small, "destination"), (small, large, "source")] {
            let pairs: Arc<[Pair]> =
                Arc::new([Pair { key, source: large, destination: large }, Pair { key, source, destination }]);
            let run = |first, count| vec![Run { source: first, destination: first, count }];
            Cursor::new(vec![(pairs.clone(), run(0, 99))], limits()).unwrap();
            for bad in [run(0, 100), run(99, 1), run(u32::MAX, u32::MAX), run(1, u32::MAX)] {
                let e = Cursor::new(vec![(pairs.clone(), bad)], limits()).unwrap_err();
                assert_eq!(e.code, code);
            }
            let e = Cursor::new(vec![(pairs, run(99, 1))], limits()).unwrap_err();
            assert!(e.text.contains(side) && e.text.contains("99") && e.text.contains(&key.to_string()), "{e}");
        }
    }
}

#[test]
fn d1_pairs_that_are_not_sound_are_refused() {
    let good = region(key(0), 0x1000, 16, 8, MemoryKind::Dram);
    let bad = [
        Region { item_len: 32, ..good },
        Region { item_len: 0, ..good },
        Region { address: u64::MAX - 10, ..good },
        Region { len: u64::MAX, ..good },
    ];
    let run = vec![Run { source: 0, destination: 0, count: 1 }];
    let limits = || Limits { max_bytes: 64, max_spans: 4 };
    for bad in bad {
        for pairs in [one_pair(good, bad), one_pair(bad, good)] {
            // Without a length there are no items to be in range.
            let code = if bad.item_len == 0 { NIXL_ERR_PAGE_OUT_OF_RANGE } else { NIXL_ERR_INTERNAL };
            let e = Cursor::new(vec![(pairs, run.clone())], limits()).unwrap_err();
            assert_eq!(e.code, code, "{bad:?}: {e}");
        }
    }
}

/// 100,000 regions and runs around 0, 2^32, 2^63 and 2^64: what passes the checks stays inside, by wide arithmetic.
#[test]
fn d1_numbers_around_every_edge_never_leave_a_region() {
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    let edges = [0u64, 1, 2, 4096, 1 << 31, 1 << 32, 1 << 63, u64::MAX - 4096, u64::MAX - 1, u64::MAX];
    let (mut passed, mut refused) = (0, 0);
    for _ in 0..100_000 {
        let mut number = || edges[random() as usize % edges.len()].wrapping_add(random() % 5).wrapping_sub(2);
        let item_len = number();
        let len = item_len.wrapping_mul(number());
        let mut side = || Region { address: number(), len, item_len, ..region(key(0), 0, 0, 0, MemoryKind::Dram) };
        let (source, destination) = (side(), side());
        let run = Run { source: number() as u32, destination: number() as u32, count: number() as u32 };
        let sound = |r: &Region| {
            let (address, len, item_len) = (u128::from(r.address), u128::from(r.len), u128::from(r.item_len));
            address > 0 && len > 0 && item_len > 0 && len % item_len == 0 && address + len < 1 << 64
        };
        for side in [source, destination] {
            assert_eq!(RegionTable::new(vec![side]).is_ok(), sound(&side), "{side:?}");
        }
        if !sound(&source) || !sound(&destination) {
            refused += 1;
            continue;
        }
        let fits = |first: u32| (u128::from(first) + u128::from(run.count)) * u128::from(item_len) <= u128::from(len);
        let limits = Limits { max_bytes: u64::MAX, max_spans: 4 };
        match Cursor::new(vec![(one_pair(source, destination), vec![run])], limits) {
            Ok(mut cursor) => {
                assert!(run.count == 0 || (fits(run.source) && fits(run.destination)), "{run:?}");
                passed += 1;
                for span in slices(&mut cursor).into_iter().flat_map(|slice| slice.spans) {
                    for (start, region) in [(span.source, source), (span.destination, destination)] {
                        assert!(start >= region.address);
                        let end = u128::from(start) + u128::from(span.len);
                        assert!(end <= u128::from(region.address) + u128::from(region.len));
                    }
                }
            }
            Err(_) => {
                assert!(run.count > 0 && !(fits(run.source) && fits(run.destination)), "{run:?}");
                refused += 1;
            }
        }
    }
    assert!(passed > 100 && refused > 10_000, "{passed} passed, {refused} refused");
}

/// The chunk of the case with a million pages: counted without walking every page of every layer.
#[test]
fn d11_a_million_scattered_pages_in_many_layers_are_counted() {
    const PAGES: u32 = 1_000_000;
    const LAYERS: u32 = 160;
    let pairs: Arc<[Pair]> = (0..LAYERS)
        .map(|layer| {
            let side = region(key(layer), 1 << 32, 4096, u64::from(PAGES) * 2, MemoryKind::Dram);
            Pair { key: key(layer), source: side, destination: side }
        })
        .collect();
    let scattered: Vec<i32> = (0..PAGES as i32).map(|page| page * 2).collect();
    let mut merged = Vec::new();
    runs(&scattered, &scattered, &mut merged).unwrap();
    assert_eq!(merged.len(), PAGES as usize);
    let mut cursor = Cursor::new(vec![(pairs, merged)], Limits { max_bytes: 8 << 20, max_spans: 512 }).unwrap();
    // A slice goes on into the next layer, so only the very last one can be short.
    assert_eq!(cursor.num_slices(), (PAGES * LAYERS).div_ceil(512));
    assert_eq!(cursor.num_bytes(), u64::from(PAGES) * u64::from(LAYERS) * 4096);
    let mut slice = Slice::default();
    assert!(cursor.next(&mut slice));
    let room = slice.spans.capacity();
    assert!(cursor.next(&mut slice) && slice.spans.len() == 512);
    assert_eq!(slice.spans.capacity(), room, "the allocation is used again");
}
