//! Lengths that lie: nothing is allocated on their word.

use super::*;
use crate::error::NIXL_ERR_METADATA_INVALID;
use crate::layout::{Part, Region, RegionKey, RegionTable};
use crate::nixl::MemoryKind;

/// What a length can claim beyond what is there.
const CLAIMS: [u64; 9] = [1, 200, 201, 1 << 20, 1 << 31, u32::MAX as u64, 1 << 40, 1 << 63, u64::MAX];

/// Length of the card's header.
const CARD_HEADER: usize = 28;

fn example() -> Card {
    let region = |key, kind, local| Region {
        key,
        address: 0xffff_8000_0000_0000,
        len: 0x60_0000,
        item_len: 0x1_0000,
        kind,
        device: 7,
        local,
    };
    let regions = vec![
        region(RegionKey::Kv { layer: 300, part: Part::V }, MemoryKind::Vram, false),
        region(RegionKey::Kv { layer: 0, part: Part::Fused }, MemoryKind::Dram, true),
        region(RegionKey::Aux { array: 1 }, MemoryKind::Dram, false),
        region(RegionKey::State { group: 2, tensor: 3 }, MemoryKind::Vram, false),
    ];
    Card {
        instance: *b"0123456789abcdef",
        name: "prefill-0 é".into(),
        agent: "prefill-0/1".into(),
        revision: u64::MAX,
        role: 3,
        cache_dtype: "fp8_e4m3".into(),
        regions: RegionTable::new(regions).unwrap(),
        metadata: (0..=255).cycle().take(700).collect(),
    }
}

/// A card around any body, with checksums that fit.
fn envelope(version: u16, len: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = [b"NIXLKV\0\0".as_slice(), &version.to_le_bytes(), &[0, 0], &len.to_le_bytes()].concat();
    bytes.extend_from_slice(&crc32fast::hash(body).to_le_bytes());
    bytes.extend_from_slice(&crc32fast::hash(&bytes).to_le_bytes());
    bytes.extend_from_slice(body);
    bytes
}

fn card(body: &[u8]) -> Vec<u8> {
    envelope(WIRE_VERSION.into(), body.len() as u64, body)
}

/// A frame around any body, with a checksum that fits.
fn frame(body: &[u8]) -> Vec<u8> {
    let mut frame = [MAGIC.as_slice(), &[WIRE_VERSION, 0], &crc32fast::hash(body).to_le_bytes()].concat();
    frame.extend_from_slice(body);
    frame
}

fn varint(value: u64) -> Vec<u8> {
    postcard::to_stdvec(&value).unwrap()
}

/// A grant's bytes as fragments.
fn cut(bytes: &[u8]) -> Vec<(u32, u32, Vec<u8>)> {
    let num_fragments = bytes.len().div_ceil(139) as u32;
    bytes.chunks(139).zip(0..).map(|(payload, fragment)| (fragment, num_fragments, payload.to_vec())).collect()
}

/// A grant that claims, in the place of its runs: this many runs, of this length each, then these groups.
fn grant(num_runs: u64, count: u64, num_groups: u64) -> Vec<u8> {
    // One receiver, no aux, not its owner.
    let mut bytes = vec![1, 0, 0];
    bytes.extend(varint(num_runs));
    bytes.extend([vec![0], varint(count)].concat());
    bytes.extend(varint(num_groups));
    bytes
}

fn tell_every_lie() {
    for claim in CLAIMS {
        // Message: the payload of a grant, the text of a failure.
        for head in [&[4u8, 1, 1, 1, 1, 0, 1][..], &[7, 1, 1, 1, 0], &[8, 1, 1, 1, 1]] {
            let body = [head, &varint(claim)].concat();
            assert_eq!(decode(&frame(&body)), Err(DecodeError::Body), "{claim}");
        }
        // Grant: fragments that never come; runs, a run's length and groups that are not there.
        if claim > 1 {
            let fragments = u32::try_from(claim).unwrap_or(u32::MAX);
            let mut assembly = GrantAssembly::default();
            let first = assembly.add(0, fragments, &[1; 139], 1000);
            assert_eq!(first.is_err(), claim >= 200, "{claim}: {first:?}");
        }
        for (bytes, max_items) in [
            (grant(claim.max(2), 1, 0), 1_000_000),
            (grant(1, claim.max(2), 0), 1),
            (grant(1, claim.max(1001), 0), 1000),
            (grant(1, 1, claim), 1_000_000),
            (grant(claim, u64::from(u32::MAX), claim), 1_000_000),
        ] {
            for (fragment, num_fragments, payload) in cut(&bytes) {
                let got = GrantAssembly::default().add(fragment, num_fragments, &payload, max_items);
                assert!(got.is_err(), "{claim}: {got:?}");
            }
        }
        // Card: the header's length, then each length in the body.
        let body = encode_card(&example())[CARD_HEADER..].to_vec();
        if claim != body.len() as u64 {
            assert!(decode_card(&envelope(WIRE_VERSION.into(), claim, &body)).is_err(), "{claim}");
        }
        let instance = [7u8; 16];
        for head in [&[][..], &[0], &[0, 0, 1, 3], &[0, 0, 1, 3, 0], &[0, 0, 1, 3, 0, 0]] {
            let body = [&instance, head, &varint(claim)].concat();
            assert!(decode_card(&card(&body)).is_err(), "{claim}");
        }
    }
}

/// A line of this process's memory figures, in bytes.
fn memory(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// Address space, not resident memory: an allocation counts even when nothing is written to it. In a process of its
/// own, where no other test allocates meanwhile.
#[test]
#[cfg_attr(miri, ignore)]
fn d4_lying_length_allocates_nothing() {
    const CHILD: &str = "NIXLKV_TEST_LIES";
    if std::env::var_os(CHILD).is_none() {
        let name = format!("{}::d4_lying_length_allocates_nothing", module_path!().split_once("::").unwrap().1);
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args([name.as_str(), "--exact", "--nocapture", "--test-threads=1"])
            .env(CHILD, "1")
            // So that an allocation is address space at once, not a part of what is set aside for a thread.
            .env("MALLOC_ARENA_MAX", "1")
            .env("MALLOC_MMAP_THRESHOLD_", "131072")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        assert!(text.contains("1 passed"), "the child ran no test: {text}");
        return;
    }
    // Up to the peak so far, so that anything more moves it.
    let peak = || memory("VmPeak");
    let _below_the_peak = Vec::<u8>::with_capacity((peak() - memory("VmSize")) as usize);
    let before = peak();
    tell_every_lie();
    let after = peak();
    assert!(after - before < 10 << 20, "{} bytes for lies", after - before);
    // And the measure is one: this it sees.
    std::hint::black_box(Vec::<u8>::with_capacity(16 << 20));
    let seen = peak() - after;
    assert!(seen >= 6 << 20, "{seen} bytes seen of 16 MiB");
}

/// A later version may have a shorter header than ours.
#[test]
fn d6_ten_bytes_of_a_card_tell_its_version() {
    let e = decode_card(&encode_card(&example())[..10]).unwrap_err();
    assert_eq!(e.code, NIXL_ERR_METADATA_INVALID, "ours, cut");
    let e = decode_card(b"NIXLKV\0\0\x01\0").unwrap_err();
    assert_eq!(e.code, crate::error::NIXL_ERR_WIRE_VERSION);
    assert!(e.text.contains("ours is 2") && e.text.contains("blob's is 1"), "{e}");
}

#[test]
fn d6_a_reserved_byte_is_no_version() {
    let mut bytes = encode(&Message::Ping { sequence: 7 });
    bytes[3] = 1;
    assert_eq!(decode(&bytes), Err(DecodeError::Magic));
}
