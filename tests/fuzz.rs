//! The fuzz targets of `fuzz/`, each for a few seconds from its seeds; `make fuzz SECONDS=…` runs them for longer and
//! under AddressSanitizer. The seeds that our own encoders write are compared with what they write today, so that they
//! never become bytes that the first check refuses; `NIXLKV_BLESS=1 cargo test --test fuzz seeds` rewrites them.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

#[allow(dead_code)]
mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use common::{must, root};
use nixlkv::layout::{Part, Region, RegionKey, RegionTable};
use nixlkv::nixl::MemoryKind;
use nixlkv::protocol::{Card, GrantBody, Hello, LandedChunk, Last, Message, encode, encode_card, split_grant};

/// Seconds that each target runs.
const SECONDS: u32 = 5;
/// Fewer inputs than this, or fewer edges reached, and a target has tested nothing. The seeds alone reach more edges,
/// and a busy machine does ten times as many inputs.
const MIN_RUNS: u64 = 300;
const MIN_EDGES: u64 = 60;
/// Length of a control message's header, and of a card's.
const FRAME_HEADER: usize = 8;
const CARD_HEADER: usize = 28;

/// The targets' names.
fn targets() -> Vec<String> {
    let entries = std::fs::read_dir(root().join("fuzz/fuzz_targets")).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned()).collect();
    names.sort();
    let manifest = std::fs::read_to_string(root().join("fuzz/Cargo.toml")).unwrap();
    for name in &names {
        assert!(manifest.contains(&format!("path = \"fuzz_targets/{name}.rs\"")), "{name} is not in fuzz/Cargo.toml");
    }
    names
}

/// What libFuzzer says of a run that found nothing.
#[derive(Debug, PartialEq)]
struct Report {
    runs: u64,
    edges: u64,
}

/// Reads libFuzzer's report. `Err`: what is missing in it.
fn report(output: &str) -> Result<Report, String> {
    let number = |line: &str, after: &str| {
        let (_, rest) = line.split_once(after)?;
        rest.split_whitespace().next()?.parse::<u64>().ok()
    };
    let last = |after: &str| {
        output.lines().filter_map(|line| number(line, after)).next_back().ok_or_else(|| format!("no {after:?}"))
    };
    Ok(Report { runs: last("stat::number_of_executed_units:")?, edges: last("\tDONE   cov:").or(last(" cov:"))? })
}

/// Runs a target from its seeds. `Err` holds what it said, and the input that it failed on.
fn fuzz(programs: &Path, target: &str, scratch: &Path, options: &[&str]) -> Result<Report, String> {
    let (corpus, artifacts) = (scratch.join("corpus"), scratch.join("artifacts"));
    for dir in [&corpus, &artifacts] {
        std::fs::create_dir_all(dir).map_err(|e| e.to_string())?;
    }
    let mut command = Command::new(programs.join(target));
    command.arg(format!("-artifact_prefix={}/", artifacts.display()));
    command.args(["-print_final_stats=1", "-timeout=20", "-rss_limit_mb=1024", "-max_len=4096"]).args(options);
    command.arg(&corpus).arg(root().join("fuzz/seeds").join(target));
    let limit = Duration::from_secs(120);
    let outcome = common::run(&mut command, scratch, limit)?.success();
    let outcome = outcome.map_err(|said| {
        let mut text = format!("{target} failed\n{said}");
        for entry in std::fs::read_dir(&artifacts).into_iter().flatten().flatten() {
            let bytes = std::fs::read(entry.path()).unwrap_or_default();
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            text += &format!("--- {}, {} bytes\n{hex}\n", entry.file_name().to_string_lossy(), bytes.len());
        }
        text
    })?;
    report(&outcome.stderr).map_err(|missing| format!("{target}: {missing}\n{outcome}"))
}

/// Builds the targets, in a folder of their own: their flags are no other build's.
fn build(scratch: &Path) -> PathBuf {
    let mut command = Command::new(root().join("fuzz/build.sh"));
    // What cargo sets for tests is not for the build of another crate.
    for (name, _) in std::env::vars_os().filter(|(name, _)| {
        let name = name.to_string_lossy();
        name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST") || name.starts_with("CARGO_CRATE")
    }) {
        command.env_remove(name);
    }
    let outcome = must(&mut command, scratch, 1200);
    PathBuf::from(outcome.stdout.trim())
}

#[test]
fn hostile_bytes_find_nothing() {
    let scratch = tempfile::tempdir().unwrap();
    let programs = build(scratch.path());
    let mut failed = Vec::new();
    for target in targets() {
        let dir = scratch.path().join(&target);
        let seconds = format!("-max_total_time={SECONDS}");
        match fuzz(&programs, &target, &dir, &[&seconds]) {
            Ok(Report { runs, edges }) if runs < MIN_RUNS || edges < MIN_EDGES => {
                failed.push(format!("{target}: {runs} inputs, {edges} edges reached: too few"));
            }
            Ok(report) => println!("{target}: {report:?}"),
            Err(text) => failed.push(text),
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));

    // The test must be able to fail: a run that libFuzzer ends for its memory is one, and shows its input.
    let text = fuzz(&programs, "message", &scratch.path().join("memory"), &["-rss_limit_mb=1", "-max_total_time=60"]);
    let text = text.unwrap_err();
    assert!(text.contains("--- oom-"), "{text}");
}

#[test]
fn a_report_without_coverage_is_none() {
    let said = "#2\tINITED cov: 10 ft: 3\n#9\tDONE   cov: 77 ft: 11\nstat::number_of_executed_units: 9\n";
    assert_eq!(report(said), Ok(Report { runs: 9, edges: 77 }));
    assert!(report("#9\tDONE   exec/s: 5\nstat::number_of_executed_units: 9\n").is_err());
    assert!(report("#9\tDONE   cov: 77 ft: 11\n").is_err());
}

// ---- seeds ----

/// Seeds by their names.
type Seeds = BTreeMap<String, Vec<u8>>;

fn chunk(chunk: u32, page_offset: u64, num_pages: u64, last: Option<Last>) -> LandedChunk {
    LandedChunk { chunk, page_offset, num_pages, num_bytes: num_pages * 128, last }
}

const LAST: Option<Last> = Some(Last { num_chunks: 2, has_aux: true, num_state_groups: 1 });

/// A message of each kind.
fn messages() -> Vec<(&'static str, Message)> {
    let (room, generation, text) = (10, 1, String::from("why it failed"));
    vec![
        (
            "hello",
            Message::Hello(Hello {
                revision: 1,
                known_revision: 1,
                known_instance: *b"our own instance",
                connection: 2,
                known_connection: 1,
                reply: true,
                oldest_generation: 1,
            }),
        ),
        ("goodbye", Message::Goodbye { connection: 1, known_connection: 0 }),
        ("ping", Message::Ping { sequence: 300 }),
        ("pong", Message::Pong { sequence: u64::MAX }),
        ("grant", split_grant(room, 50, (1, 1), &grants()[1].1).remove(0)),
        ("landed", Message::Landed { room, generation, slice: 0, num_slices: 1, chunk: chunk(0, 0, 4, None) }),
        ("landed_last", Message::Landed { room, generation, slice: 1, num_slices: 2, chunk: chunk(1, 4, 4, LAST) }),
        ("done", Message::Done { room, generation }),
        ("failed", Message::Failed { room, generation, code: -420, drained: true, text: text.clone() }),
        ("abort", Message::Abort { room, generation, num_receivers: 1, code: -423, text }),
        ("drained", Message::Drained { room, generation }),
        ("ask", Message::Ask { room, generation, num_chunks: 1 }),
        ("ungranted", Message::Ungranted { room, generation }),
        ("chunk_landed", Message::ChunkLanded { room, generation, chunk: chunk(1, 4, 4, LAST) }),
        ("confirm", Message::Confirm { room, generation }),
    ]
}

/// A grant of each form.
fn grants() -> Vec<(&'static str, GrantBody)> {
    let body = |pages: Vec<i32>| GrantBody { pages, num_receivers: 1, ..GrantBody::default() };
    vec![
        ("nothing", body(vec![])),
        ("contiguous", body((0..8).collect())),
        ("scattered", body((0..600).map(|i| (i * 7919) % 4096).collect())),
        ("a_million", body((5..1_000_005).collect())),
        ("aux", GrantBody { aux: Some(3), aux_owner: true, ..body(vec![2, 1]) }),
        ("edges", GrantBody { aux: Some(i32::MAX), num_receivers: u32::MAX, ..body(vec![i32::MAX, 0]) }),
        ("state", GrantBody { states: vec![(0, vec![1, 2, 7]), (9, vec![]), (u32::MAX, vec![0])], ..body(vec![4]) }),
    ]
}

fn example_card(num_pages: u64, metadata: Vec<u8>) -> Card {
    let region = |key, kind, local| Region {
        key,
        address: 0x7f00_0000_0000 + num_pages,
        len: 4096 * num_pages,
        item_len: 4096,
        kind,
        device: 3,
        local,
    };
    let regions = vec![
        region(RegionKey::Kv { layer: 0, part: Part::K }, MemoryKind::Vram, false),
        region(RegionKey::Kv { layer: 0, part: Part::V }, MemoryKind::Vram, false),
        region(RegionKey::Kv { layer: 61, part: Part::Fused }, MemoryKind::Dram, true),
        region(RegionKey::Aux { array: 0 }, MemoryKind::Dram, false),
        region(RegionKey::State { group: 1, tensor: 2 }, MemoryKind::Dram, false),
    ];
    Card {
        instance: *b"0123456789abcdef",
        name: "decode-0".into(),
        agent: "nixlkv-30313233343536373839616263646566".into(),
        revision: 2,
        role: 2,
        cache_dtype: "bf16".into(),
        regions: RegionTable::new(regions).unwrap(),
        metadata,
    }
}

/// What the target `message` and `card` read: the whole, and the body alone.
fn both_ways(seeds: &mut Seeds, name: &str, whole: Vec<u8>, header: usize) {
    seeds.insert(format!("{name}_body"), whole[header..].to_vec());
    seeds.insert(name.into(), whole);
}

fn grant_seeds() -> Seeds {
    let mut seeds = Seeds::new();
    for (name, body) in grants() {
        let fragments: Vec<_> = split_grant(1, 2, (3, 4), &body)
            .into_iter()
            .map(|message| match message {
                Message::Grant { fragment, num_fragments, payload, .. } => (fragment, num_fragments, payload),
                other => panic!("{other:?}"),
            })
            .collect();
        // See fuzz/fuzz_targets/grant.rs.
        let limit = if body.pages.len() > 1 << 19 { 4 } else { 3 };
        let mut whole = vec![limit << 1];
        fragments.iter().for_each(|(.., payload)| whole.extend_from_slice(payload));
        seeds.insert(name.into(), whole);
        let mut apart = vec![limit << 1 | 1];
        for (fragment, num_fragments, payload) in fragments.iter().rev() {
            apart.push(*fragment as u8);
            apart.extend_from_slice(&(*num_fragments as u16).to_le_bytes());
            apart.push(payload.len() as u8);
            apart.extend_from_slice(payload);
        }
        seeds.insert(format!("{name}_reversed"), apart);
    }
    seeds
}

/// A step of the target `peer` that hands it a message.
fn step(message: &Message) -> Vec<u8> {
    let frame = encode(message);
    let body = &frame[FRAME_HEADER..];
    [&[0, body.len() as u8], body].concat()
}

fn peer_seeds() -> Seeds {
    let mut seeds = Seeds::new();
    for (name, message) in messages() {
        // To a room that we opened as its receiver, to one that we opened as its sender, and to none.
        let recv: &[u8] = &[9, 0, 0, 7, 13];
        let send: &[u8] = &[8, 0, 0x40, 8, 0, 0x4c];
        for (room, open) in [("recv", recv), ("send", send), ("none", &[])] {
            let then: &[u8] = &[12, 0, 12, 2, 7, 0xff, 0xff, 13, 10, 0, 11, 0];
            seeds.insert(format!("{name}_{room}"), [&[0], open, &step(&message), then].concat());
        }
    }
    for (name, body) in grants() {
        // Early, then given up; and to an open room, then all of it.
        let mut early = vec![4];
        let mut open = vec![4, 8, 0, 0x40];
        for message in split_grant(10, 50, (1, 1), &body) {
            early.extend(step(&message));
            open.extend(step(&message));
        }
        early.extend(step(&Message::Abort {
            room: 10,
            generation: 50,
            num_receivers: 1,
            code: -423,
            text: "early".into(),
        }));
        open.extend([8, 0, 0x4c, 12, 0, 12, 0]);
        open.extend(step(&Message::Ask { room: 10, generation: 50, num_chunks: 0 }));
        open.extend(step(&Message::Done { room: 10, generation: 50 }));
        open.extend([11, 0, 14, 15, 9]);
        for (kind, seed) in [("early", early), ("open", open)] {
            // Longer than the longest input: as much as a peer can say there.
            seeds.insert(format!("grant_{name}_{kind}"), seed.into_iter().take(4096).collect());
        }
    }
    // One past the end of what the peer claims to have, and the last of it.
    let edge = |pages: &[i32], aux, states| GrantBody { pages: pages.to_vec(), aux, states, ..grants()[1].1.clone() };
    for (name, body) in [
        ("inside", edge(&[15], Some(7), vec![(0, vec![7])])),
        ("page_outside", edge(&[15, 16], None, vec![])),
        ("aux_outside", edge(&[15], Some(8), vec![])),
        ("state_outside", edge(&[15], None, vec![(0, vec![8])])),
    ] {
        let message = split_grant(10, 50, (1, 1), &body).remove(0);
        seeds.insert(name.into(), [&[0], &*step(&message)].concat());
    }
    let mut whole = vec![0, 9, 0, 0, 7, 13];
    for (_, message) in messages().iter().filter(|(name, _)| name.contains("landed")) {
        whole.extend(step(message));
    }
    whole.extend(step(&Message::Confirm { room: 10, generation: 2 }));
    whole.extend(step(&Message::Ungranted { room: 10, generation: 2 }));
    seeds.insert("receive".into(), whole);
    seeds
}

/// See fuzz/fuzz_targets/layout.rs: our regions with what the peer claims of each, then limits and lists.
fn layout_seeds() -> Seeds {
    let kinds: [u8; 5] = [0, 1, 3, 4, 0x10];
    let mut seeds = Seeds::new();
    for (name, claim) in [
        ("sound", vec![0, 1, 0, 32]),
        ("wraps", vec![2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 32]),
        ("far", vec![2, 0, 0, 0, 0, 0, 0, 0, 0xff, 32]),
        ("huge", vec![8, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0]),
        ("small", vec![0, 1, 0, 3]),
    ] {
        let mut seed = vec![kinds.len() as u8];
        for kind in kinds {
            seed.extend([kind, 0xfc]);
            seed.extend(&claim);
        }
        seed.extend([0, 0, 4, 8]);
        for list in 0..4u8 {
            seed.push(6);
            seed.extend((0..6).flat_map(|i| [i + 1 + list, 6 - i + list]));
        }
        seeds.insert(name.into(), seed);
    }
    seeds
}

fn seeds() -> BTreeMap<&'static str, Seeds> {
    let real = std::fs::read(root().join("fuzz/seeds/metadata/real")).unwrap();
    let mut message = Seeds::new();
    for (name, example) in messages() {
        both_ways(&mut message, name, encode(&example), FRAME_HEADER);
    }
    let mut card = Seeds::new();
    both_ways(&mut card, "real", encode_card(&example_card(64, real)), CARD_HEADER);
    both_ways(&mut card, "bare", encode_card(&example_card(1 << 40, Vec::new())), CARD_HEADER);
    let encoded = [
        ("message", message),
        ("card", card),
        ("grant", grant_seeds()),
        ("peer", peer_seeds()),
        ("layout", layout_seeds()),
    ];
    BTreeMap::from(encoded)
}

#[test]
fn seeds_are_what_the_encoders_write() {
    let bless = std::env::var_os("NIXLKV_BLESS").is_some();
    for (target, seeds) in seeds() {
        let dir = root().join("fuzz/seeds").join(target);
        if bless {
            let _ = std::fs::remove_dir_all(&dir);
            std::fs::create_dir_all(&dir).unwrap();
            seeds.iter().for_each(|(name, bytes)| std::fs::write(dir.join(name), bytes).unwrap());
        }
        let committed: Seeds = std::fs::read_dir(&dir)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(path).unwrap()))
            .collect();
        let differ: Vec<_> = seeds.iter().filter(|(name, bytes)| committed.get(*name) != Some(bytes)).collect();
        let (differ, extra) = (
            differ.iter().map(|(name, _)| name).collect::<Vec<_>>(),
            committed.keys().filter(|name| !seeds.contains_key(*name)).collect::<Vec<_>>(),
        );
        assert!(
            differ.is_empty() && extra.is_empty(),
            "fuzz/seeds/{target} is of another day: {differ:?} differ, {extra:?} have gone; \
             NIXLKV_BLESS=1 cargo test --test fuzz seeds rewrites them"
        );
    }
    for target in targets() {
        let dir = root().join("fuzz/seeds").join(&target);
        assert!(std::fs::read_dir(&dir).is_ok_and(|mut entries| entries.next().is_some()), "{target} has no seeds");
    }
}
