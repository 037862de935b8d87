//! The wire: what is encoded comes back, and nothing else is ever taken for a message, a grant or a card.

use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::sample::Index;

use super::*;
use crate::error::{Error, NIXL_ERR_METADATA_INVALID, NIXL_ERR_WIRE_VERSION};
use crate::layout::{Part, Region, RegionKey, RegionTable};
use crate::nixl::MemoryKind;

/// Small, extreme and arbitrary numbers.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0u64..300, Just(u64::MAX), Just(1 << 32), Just(1 << 63), any::<u64>()]
}

fn small() -> impl Strategy<Value = u32> {
    prop_oneof![0u32..300, Just(u32::MAX), Just(1 << 31), any::<u32>()]
}

fn code() -> impl Strategy<Value = i32> {
    prop_oneof![-500i32..1, Just(i32::MIN), Just(i32::MAX)]
}

fn text(chars: std::ops::Range<usize>) -> impl Strategy<Value = String> {
    prop::collection::vec(any::<char>(), chars).prop_map(String::from_iter)
}

fn landed_chunk() -> impl Strategy<Value = LandedChunk> {
    let last = (small(), any::<bool>(), small()).prop_map(|(num_chunks, has_aux, num_state_groups)| Last {
        num_chunks,
        has_aux,
        num_state_groups,
    });
    (small(), number(), number(), number(), prop::option::of(last)).prop_map(
        |(chunk, page_offset, num_pages, num_bytes, last)| LandedChunk {
            chunk,
            page_offset,
            num_pages,
            num_bytes,
            last,
        },
    )
}

fn message(chars: std::ops::Range<usize>) -> impl Strategy<Value = Message> {
    prop_oneof![
        (number(), number(), any::<[u8; 16]>(), number(), number(), any::<bool>(), number()).prop_map(
            |(revision, known_revision, known_instance, connection, known_connection, reply, oldest_generation)| {
                Message::Hello(Hello {
                    revision,
                    known_revision,
                    known_instance,
                    connection,
                    known_connection,
                    reply,
                    oldest_generation,
                })
            }
        ),
        (number(), number())
            .prop_map(|(connection, known_connection)| Message::Goodbye { connection, known_connection }),
        number().prop_map(|sequence| Message::Ping { sequence }),
        number().prop_map(|sequence| Message::Pong { sequence }),
        (number(), number(), (number(), number()), small(), small(), prop::collection::vec(any::<u8>(), 0..140))
            .prop_map(|(room, generation, (revision, connection), fragment, num_fragments, payload)| Message::Grant {
                room,
                generation,
                revision,
                connection,
                fragment,
                num_fragments,
                payload
            }),
        (number(), number(), small(), small(), landed_chunk()).prop_map(
            |(room, generation, slice, num_slices, chunk)| Message::Landed {
                room,
                generation,
                slice,
                num_slices,
                chunk
            }
        ),
        (number(), number()).prop_map(|(room, generation)| Message::Done { room, generation }),
        (number(), number(), code(), any::<bool>(), text(chars.clone())).prop_map(
            |(room, generation, code, drained, text)| Message::Failed { room, generation, code, drained, text }
        ),
        (number(), number(), small(), code(), text(chars)).prop_map(|(room, generation, num_receivers, code, text)| {
            Message::Abort { room, generation, num_receivers, code, text }
        }),
        (number(), number()).prop_map(|(room, generation)| Message::Drained { room, generation }),
        (number(), number(), small()).prop_map(|(room, generation, num_chunks)| Message::Ask {
            room,
            generation,
            num_chunks
        }),
        (number(), number()).prop_map(|(room, generation)| Message::Ungranted { room, generation }),
        (number(), number(), landed_chunk()).prop_map(|(room, generation, chunk)| Message::ChunkLanded {
            room,
            generation,
            chunk
        }),
        (number(), number()).prop_map(|(room, generation)| Message::Confirm { room, generation }),
    ]
}

/// One message of each kind with every field at its longest; the texts are as long as given.
fn longest(text: &str) -> Vec<Message> {
    let (room, generation) = (u64::MAX, u64::MAX);
    let chunk = LandedChunk {
        chunk: u32::MAX,
        page_offset: u64::MAX,
        num_pages: u64::MAX,
        num_bytes: u64::MAX,
        last: Some(Last { num_chunks: u32::MAX, has_aux: true, num_state_groups: u32::MAX }),
    };
    vec![
        Message::Hello(Hello {
            revision: u64::MAX,
            known_revision: u64::MAX,
            known_instance: [255; 16],
            connection: u64::MAX,
            known_connection: u64::MAX,
            reply: true,
            oldest_generation: u64::MAX,
        }),
        Message::Goodbye { connection: u64::MAX, known_connection: u64::MAX },
        Message::Ping { sequence: u64::MAX },
        Message::Pong { sequence: u64::MAX },
        Message::Grant {
            room,
            generation,
            revision: u64::MAX,
            connection: u64::MAX,
            fragment: u32::MAX,
            num_fragments: u32::MAX,
            payload: vec![255; 139],
        },
        Message::Landed { room, generation, slice: u32::MAX, num_slices: u32::MAX, chunk },
        Message::Ask { room, generation, num_chunks: u32::MAX },
        Message::Ungranted { room, generation },
        Message::ChunkLanded { room, generation, chunk },
        Message::Confirm { room, generation },
        Message::Done { room, generation },
        Message::Failed { room, generation, code: i32::MIN, drained: true, text: text.into() },
        Message::Abort { room, generation, num_receivers: u32::MAX, code: i32::MIN, text: text.into() },
        Message::Drained { room, generation },
    ]
}

fn text_of(message: &Message) -> &str {
    match message {
        Message::Failed { text, .. } | Message::Abort { text, .. } => text,
        _ => "",
    }
}

/// A frame of our version around any body.
fn frame(body: &[u8]) -> Vec<u8> {
    let mut frame = b"NK\x02\0".to_vec();
    frame.extend_from_slice(&crc32fast::hash(body).to_le_bytes());
    frame.extend_from_slice(body);
    frame
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn every_message_comes_back_as_it_was(message in message(0..30)) {
        prop_assert_eq!(decode(&encode(&message)), Ok(message));
    }

    #[test]
    fn truncated_altered_and_lengthened_messages_are_refused(message in message(0..60), at: Index, byte: u8) {
        let frame = encode(&message);
        for len in 0..frame.len() {
            prop_assert!(decode(&frame[..len]).is_err(), "cut to {} bytes", len);
        }
        for bit in 0..frame.len() * 8 {
            let mut altered = frame.clone();
            altered[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(decode(&altered).is_err(), "bit {}", bit);
        }
        let mut altered = frame.clone();
        let i = at.index(frame.len());
        altered[i] = byte;
        prop_assert_eq!(decode(&altered).is_ok(), altered == frame);
        altered.clone_from(&frame);
        altered.push(byte);
        prop_assert!(decode(&altered).is_err());
    }

    #[test]
    fn texts_are_cut_at_a_character_and_no_earlier_than_needed(message in message(0..400)) {
        let frame = encode(&message);
        prop_assert!(frame.len() <= MAX_MESSAGE_BYTES);
        let back = decode(&frame).unwrap();
        let (text, cut) = (text_of(&message), text_of(&back));
        prop_assert!(text.starts_with(cut));
        if cut.len() < text.len() {
            // The next character, and a longer length prefix, would not have fitted.
            let next = text[cut.len()..].chars().next().map_or(0, char::len_utf8);
            prop_assert!(frame.len() + next + 1 > MAX_MESSAGE_BYTES, "{} bytes, next character {}", frame.len(), next);
        }
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..220), kind in 0u8..12) {
        prop_assert!(decode(&bytes).is_err(), "a random checksum fits");
        let mut body = vec![kind];
        body.extend_from_slice(&bytes);
        for body in [&bytes, &body] {
            if let Ok(message) = decode(&frame(body)) {
                let again = encode(&message);
                prop_assert!(again.len() <= MAX_MESSAGE_BYTES);
                prop_assert_eq!(decode(&again), Ok(message));
            }
        }
        prop_assert!(decode_card(&bytes).is_err());
    }
}

#[test]
fn d11_no_message_is_longer_than_200_bytes() {
    for message in longest("") {
        let frame = encode(&message);
        assert!(frame.len() <= MAX_MESSAGE_BYTES, "{} bytes: {message:?}", frame.len());
        assert_eq!(decode(&frame), Ok(message));
    }
    for unit in ["x", "é", "€", "𝄞", "e\u{301}"] {
        for times in 0..300 {
            let text = unit.repeat(times);
            for message in longest(&text) {
                let frame = encode(&message);
                assert!(frame.len() <= MAX_MESSAGE_BYTES, "{} bytes: {message:?}", frame.len());
                assert!(text.starts_with(text_of(&decode(&frame).unwrap())));
            }
        }
    }
}

/// Bytes of version 2, written down. Whoever changes them changes WIRE_VERSION too.
#[test]
fn d6_the_bytes_of_this_version_stand_still() {
    assert_eq!(WIRE_VERSION, 2);
    // Kind, then the fields: unsigned numbers in groups of 7 bits, low ones first; signed ones zigzag; bytes and texts
    // behind their length.
    let chunk = LandedChunk {
        chunk: 3,
        page_offset: 6,
        num_pages: 7,
        num_bytes: 8,
        last: Some(Last { num_chunks: 9, has_aux: true, num_state_groups: 10 }),
    };
    let bodies: [(Message, &[u8]); 14] = [
        (
            Message::Hello(Hello {
                revision: 1,
                known_revision: 300,
                known_instance: [7; 16],
                connection: 5,
                known_connection: 8,
                reply: true,
                oldest_generation: 6,
            }),
            &[0, 1, 0xac, 2, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 5, 8, 1, 6],
        ),
        (Message::Goodbye { connection: 6, known_connection: 7 }, &[1, 6, 7]),
        (Message::Ping { sequence: 128 }, &[2, 0x80, 1]),
        (Message::Pong { sequence: 127 }, &[3, 127]),
        (
            Message::Grant {
                room: 1,
                generation: 2,
                revision: 3,
                connection: 7,
                fragment: 4,
                num_fragments: 5,
                payload: vec![6, 0xff],
            },
            &[4, 1, 2, 3, 7, 4, 5, 2, 6, 0xff],
        ),
        (
            Message::Landed { room: 1, generation: 2, slice: 4, num_slices: 5, chunk },
            &[5, 1, 2, 4, 5, 3, 6, 7, 8, 1, 9, 1, 10],
        ),
        (Message::Done { room: 1, generation: 2 }, &[6, 1, 2]),
        (
            Message::Failed { room: 1, generation: 2, code: -423, drained: false, text: "no".into() },
            &[7, 1, 2, 0xcd, 6, 0, 2, b'n', b'o'],
        ),
        (
            Message::Abort { room: 1, generation: 2, num_receivers: 3, code: -1, text: "é".into() },
            &[8, 1, 2, 3, 1, 2, 0xc3, 0xa9],
        ),
        (Message::Drained { room: 1, generation: 2 }, &[9, 1, 2]),
        (Message::Ask { room: 1, generation: 2, num_chunks: 3 }, &[10, 1, 2, 3]),
        (Message::Ungranted { room: 1, generation: 2 }, &[11, 1, 2]),
        (Message::ChunkLanded { room: 1, generation: 2, chunk }, &[12, 1, 2, 3, 6, 7, 8, 1, 9, 1, 10]),
        (Message::Confirm { room: 1, generation: 2 }, &[13, 1, 2]),
    ];
    for (message, body) in bodies {
        assert_eq!(encode(&message), frame(body), "{message:?}");
    }
    let body = GrantBody {
        pages: vec![5, 6, 7, 3, 9],
        aux: Some(2),
        aux_owner: true,
        states: vec![(4, vec![0])],
        num_receivers: 1,
    };
    let messages = split_grant(1, 2, (3, 4), &body);
    let [Message::Grant { payload, .. }] = &messages[..] else { panic!("{messages:?}") };
    // Receivers, aux, owner; runs (5, 3), (3 - 8, 1), (9 - 4, 1); group 4 with the run (0, 1).
    assert_eq!(payload[..], [1, 1, 4, 1, 3, 10, 3, 9, 1, 10, 1, 1, 4, 1, 0, 1]);
}

#[test]
fn d6_the_version_is_looked_at_before_the_body() {
    for version in (0..=255u8).filter(|&version| version != WIRE_VERSION) {
        for body in [&b""[..], b"anything", &[0xff; 1000]] {
            let mut frame = frame(body);
            frame[2] = version;
            assert_eq!(decode(&frame), Err(DecodeError::Version(version)));
            frame[4] ^= 1;
            assert_eq!(decode(&frame), Err(DecodeError::Version(version)), "another version may check otherwise");
        }
    }
}

#[test]
fn d7_foreign_bytes_are_refused() {
    let hello = [&[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3][..], &[0x55; 506]].concat();
    let mebibyte: Vec<u8> = (0..1u32 << 20).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 24) as u8).collect();
    for bytes in [&b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"[..], &hello, &mebibyte, &[0; 200]] {
        assert_eq!(decode(bytes), Err(DecodeError::Magic));
        assert_eq!(decode_card(bytes).unwrap_err().code, NIXL_ERR_METADATA_INVALID);
    }
    for len in 0..8 {
        assert_eq!(decode(&b"NK\x02\0\0\0\0\0"[..len]), Err(DecodeError::Length));
    }
    assert_eq!(decode(&frame(&[])), Err(DecodeError::Body));
    assert_eq!(decode(&frame(&[2, 1].repeat(100))), Err(DecodeError::Length), "longer than any message");
}

/// Payloads whose inner lengths promise more than there is.
#[test]
fn d4_lengths_that_lie_are_refused() {
    let lengths: [&[u8]; 6] = [
        &[0x7f],
        &[0x80, 0x80, 0x80, 0x80, 8],
        &[0xff, 0xff, 0xff, 0xff, 0x0f],
        &[0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 1],
        &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1],
        &[0xff; 12],
    ];
    let starts: [&[u8]; 3] = [&[4, 1, 2, 3, 0, 1], &[7, 1, 2, 0, 0], &[8, 1, 2, 0]];
    let start = Instant::now();
    for length in lengths {
        for start in starts {
            let body = [start, length, b"abc"].concat();
            assert_eq!(decode(&frame(&body)), Err(DecodeError::Body), "{body:?}");
        }
        for start in [&[1, 0, 0][..], &[1, 0, 0, 0], &[1, 0, 0, 0, 1, 7]] {
            let payload = [start, length, &[2, 1, 2, 1]].concat();
            let result = GrantAssembly::default().add(0, 1, &payload, u64::MAX);
            assert_eq!(result, Err(DecodeError::Body), "{payload:?}");
        }
    }
    assert!(start.elapsed() < Duration::from_secs(60));
}

/// A grant as it is coded: receivers, aux, aux owner, runs of pages, runs of state slots by group.
type Coded = (u32, Option<i32>, bool, Vec<(i64, u32)>, Vec<(u32, Vec<(i64, u32)>)>);

/// Gives a coded grant to a fresh assembly, in fragments of the length that [`split_grant`] uses.
fn assemble(coded: &Coded, max_items: u64) -> Result<Option<GrantBody>, DecodeError> {
    let bytes = postcard::to_stdvec(coded).unwrap();
    let mut assembly = GrantAssembly::default();
    let pieces = bytes.chunks(fragment_len());
    let num_fragments = pieces.len() as u32;
    let mut result = Ok(None);
    for (payload, fragment) in pieces.zip(0..) {
        result = assembly.add(fragment, num_fragments, payload, max_items);
        result.as_ref().map_err(|e| *e)?;
    }
    result
}

/// Bytes in every fragment but the last.
fn fragment_len() -> usize {
    let body = GrantBody { pages: (0..200).map(|i| i * 2).collect(), num_receivers: 1, ..Default::default() };
    match &split_grant(1, 2, (3, 4), &body)[0] {
        Message::Grant { payload, .. } => payload.len(),
        other => panic!("{other:?}"),
    }
}

/// What [`split_grant`] gives, as fragments.
fn fragments(body: &GrantBody) -> Vec<(u32, u32, Vec<u8>)> {
    let messages = split_grant(u64::MAX, u64::MAX, (u64::MAX, u64::MAX), body);
    messages
        .into_iter()
        .map(|message| match message {
            Message::Grant {
                room: u64::MAX,
                generation: u64::MAX,
                revision: u64::MAX,
                connection: u64::MAX,
                fragment,
                num_fragments,
                payload,
            } => (fragment, num_fragments, payload),
            other => panic!("{other:?}"),
        })
        .collect()
}

/// Lists of indices: scattered, in runs, repeated, at both ends of their range.
fn indices(max: usize) -> impl Strategy<Value = Vec<i32>> {
    let index = prop_oneof![0i32..400, Just(0), Just(i32::MAX), 0i32..=i32::MAX];
    prop::collection::vec((index, 1i32..40), 0..max)
        .prop_map(|runs| runs.into_iter().flat_map(|(start, len)| start..=start.saturating_add(len - 1)).collect())
}

fn grant() -> impl Strategy<Value = GrantBody> {
    let states =
        prop::collection::btree_map(small(), indices(20), 0..4).prop_map(|states| states.into_iter().collect());
    (indices(120), prop::option::of(0..=i32::MAX), any::<bool>(), states, 1..=u32::MAX).prop_map(
        |(pages, aux, aux_owner, states, num_receivers)| GrantBody { pages, aux, aux_owner, states, num_receivers },
    )
}

fn num_indices(body: &GrantBody) -> u64 {
    (body.pages.len() + body.states.iter().map(|(_, slots)| slots.len()).sum::<usize>()) as u64
}

/// Puts a list into an arbitrary order.
fn shuffle<T>(list: &mut [T], seed: u64) {
    let mut state = seed | 1;
    for i in (1..list.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        list.swap(i, (state % (i as u64 + 1)) as usize);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_grant_comes_back_from_its_fragments_in_any_order_and_repeated(body in grant(), seed: u64) {
        let mut pieces = fragments(&body);
        let num = pieces.len();
        pieces.extend(pieces.clone());
        shuffle(&mut pieces, seed);
        let mut assembly = GrantAssembly::default();
        let mut seen = std::collections::HashSet::new();
        for (fragment, num_fragments, payload) in &pieces {
            let message = Message::Grant {
                room: u64::MAX, generation: u64::MAX, revision: u64::MAX, connection: u64::MAX,
                fragment: *fragment, num_fragments: *num_fragments, payload: payload.clone(),
            };
            prop_assert_eq!(decode(&encode(&message)), Ok(message));
            let whole = seen.insert(*fragment) && seen.len() == num;
            // The budget is exact: no index more is needed.
            let result = assembly.add(*fragment, *num_fragments, payload, num_indices(&body));
            prop_assert_eq!(result, Ok(whole.then(|| body.clone())));
        }
        prop_assert_eq!(seen.len(), num);
    }

    #[test]
    fn a_grant_over_its_budget_is_refused(body in grant()) {
        let total = num_indices(&body);
        prop_assume!(total > 0);
        let mut assembly = GrantAssembly::default();
        let mut results = fragments(&body)
            .into_iter()
            .map(|(fragment, num_fragments, payload)| assembly.add(fragment, num_fragments, &payload, total - 1));
        prop_assert!(results.any(|result| result == Err(DecodeError::Bounds)));
    }

    #[test]
    fn fragments_that_contradict_are_refused(body in grant(), at: Index, other: Index, bit in 0usize..8) {
        let pieces = fragments(&body);
        let (fragment, num_fragments, payload) = &pieces[at.index(pieces.len())];
        let add = |assembly: &mut GrantAssembly, fragment, num_fragments, payload: &[u8]| {
            assembly.add(fragment, num_fragments, payload, 1 << 20)
        };
        let mut altered = payload.clone();
        altered[other.index(payload.len())] ^= 1 << bit;
        let mut assembly = GrantAssembly::default();
        add(&mut assembly, *fragment, *num_fragments, payload).unwrap();
        prop_assert!(add(&mut assembly, *fragment, *num_fragments, &altered).is_err());
        prop_assert!(add(&mut assembly, *fragment, *num_fragments + 1, payload).is_err());
        prop_assert!(add(&mut assembly, *num_fragments, *num_fragments, payload).is_err());
        prop_assert!(add(&mut assembly, u32::MAX, u32::MAX, payload).is_err());
    }

    #[test]
    fn random_fragments_never_panic(
        pieces in prop::collection::vec((0u32..4, 0u32..4, prop::collection::vec(any::<u8>(), 0..160)), 1..12),
        max_items in number(),
    ) {
        let mut assembly = GrantAssembly::default();
        for (fragment, num_fragments, payload) in &pieces {
            if let Ok(Some(body)) = assembly.add(*fragment, *num_fragments, payload, max_items) {
                prop_assert!(num_indices(&body) <= max_items.min(MAX_GRANT_INDICES));
                prop_assert!(body.pages.iter().all(|page| *page >= 0));
            }
        }
    }
}

#[test]
fn d11_a_grant_of_a_million_pages_goes_in_small_messages() {
    const PAGES: i32 = 1_000_000;
    let body = |pages| GrantBody { pages, aux: Some(7), aux_owner: true, states: vec![(0, vec![3])], num_receivers: 2 };
    let contiguous = body((12..12 + PAGES).collect());
    assert_eq!(fragments(&contiguous).len(), 1);
    let scattered = |stride: i32| {
        let mut pages: Vec<i32> = (0..PAGES).map(|i| i * stride).collect();
        shuffle(&mut pages, 1);
        body(pages)
    };
    // With the bytes that a page may cost: those of case H2 for a pool of some million pages, more across all of i32.
    for (body, most) in [(contiguous, 8), (scattered(4), 8), (scattered(2147), 9)] {
        let max_items = num_indices(&body);
        let mut assembly = GrantAssembly::default();
        let mut back = None;
        let mut num_bytes = 0;
        for message in split_grant(u64::MAX, u64::MAX, (u64::MAX, u64::MAX), &body) {
            let frame = encode(&message);
            assert!(frame.len() <= MAX_MESSAGE_BYTES);
            num_bytes += frame.len() as u64;
            let Ok(Message::Grant { fragment, num_fragments, payload, .. }) = decode(&frame) else { panic!() };
            assert!(back.is_none());
            back = assembly.add(fragment, num_fragments, &payload, max_items).unwrap();
        }
        assert!(back == Some(body), "it comes back as it was");
        assert!(num_bytes <= most * max_items + 256, "{num_bytes} bytes");
    }
}

#[test]
fn fragments_of_two_grants_do_not_mix() {
    // An assembly belongs to one grant; pieces of another that differ in number, or in a piece that both have, are
    // refused. What is cut alike and pieced together falls to the limits of the body.
    let long = |from: i32| GrantBody {
        pages: (0..200).map(|i| from - i * 2).collect(),
        num_receivers: 1,
        ..Default::default()
    };
    let (one, other) = (fragments(&long(1000)), fragments(&long(401)));
    assert!(one.len() > 1);
    let mut assembly = GrantAssembly::default();
    assert_eq!(assembly.add(0, one[0].1, &one[0].2, 1 << 20), Ok(None));
    assert_eq!(assembly.add(0, other[0].1, &other[0].2, 1 << 20), Err(DecodeError::Body));
    let short = fragments(&GrantBody { pages: vec![1], num_receivers: 1, ..Default::default() });
    assert_eq!(assembly.add(0, 1, &short[0].2, 1 << 20), Err(DecodeError::Body));
}

#[test]
fn d4_a_grant_allocates_no_more_than_its_budget() {
    let start = Instant::now();
    let coded = |pages: Vec<(i64, u32)>| -> Coded { (1, None, false, pages, vec![]) };
    // A run of 2^31 entries in a few bytes; many of them, whose sum is past any memory.
    for pages in [
        vec![(0, 1 << 31)],
        vec![(0, u32::MAX)],
        [(0, 1 << 31), (-(1 << 31), 1 << 31)].repeat(1000),
        vec![(0, 1 << 31); 1000],
        vec![(0, 1001)],
    ] {
        assert_eq!(assemble(&coded(pages.clone()), 1000), Err(DecodeError::Bounds));
        // A hostile region table makes the caller's bound huge: then the absolute one holds.
        if pages != [(0, 1001)] {
            assert_eq!(assemble(&coded(pages), u64::MAX), Err(DecodeError::Bounds));
        }
    }
    assert_eq!(assemble(&coded(vec![(0, MAX_GRANT_INDICES as u32 + 1)]), u64::MAX), Err(DecodeError::Bounds));
    assert_eq!(assemble(&coded(vec![(0, 1000)]), 1000).unwrap().unwrap().pages.len(), 1000);
    // The budget holds for pages and states together.
    let shared: Coded = (1, None, false, vec![(0, 600)], vec![(0, vec![(0, 300)]), (1, vec![(0, 101)])]);
    assert_eq!(assemble(&shared, 1000), Err(DecodeError::Bounds));
    assert!(assemble(&shared, 1001).unwrap().is_some());
    // Fragments of nothing, and numbers of fragments that no grant within the budget has.
    for num_fragments in [0, 100, 1 << 18, 1 << 31, u32::MAX] {
        for payload in [&[][..], &[1; 139], &[1; 140]] {
            assert!(GrantAssembly::default().add(0, num_fragments, payload, 1000).is_err(), "{num_fragments}");
        }
    }
    assert!(GrantAssembly::default().add(0, 2, &[], u64::MAX).is_err(), "an empty piece");
    assert!(GrantAssembly::default().add(0, 2, &[1], u64::MAX).is_err(), "a short piece that is not the last");
    assert!(GrantAssembly::default().add(1, 2, &[1], u64::MAX).is_ok());
    // Empty runs and empty groups, as many as the bytes hold, cost neither memory nor time.
    let empty: Coded = (1, None, false, vec![(0, 0); 1_000_000], vec![]);
    assert!(assemble(&empty, 1 << 20).is_ok());
    let groups: Coded = (1, None, false, vec![], (0..300_000).map(|group| (group, vec![])).collect());
    assert_eq!(assemble(&groups, 1 << 20).unwrap().unwrap().states.len(), 300_000);
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
}

#[test]
fn indices_outside_their_range_are_refused() {
    let max = i64::from(i32::MAX);
    let pages = |runs: Vec<(i64, u32)>| assemble(&(1, None, false, runs, vec![]), 1000);
    let states = |runs: Vec<(i64, u32)>| assemble(&(1, None, false, vec![], vec![(3, runs)]), 1000);
    for runs in [
        vec![(-1, 1)],
        vec![(0, 2), (-3, 1)],
        vec![(max, 2)],
        vec![(max + 1, 1)],
        vec![(max, 1), (0, 1)],
        vec![(i64::MAX, 1)],
        vec![(i64::MIN, 1)],
        vec![(max, 1), (i64::MAX, 1)],
        vec![(i64::MAX, 0), (i64::MAX, 1)],
    ] {
        assert_eq!(pages(runs.clone()), Err(DecodeError::Bounds), "{runs:?}");
        assert_eq!(states(runs.clone()), Err(DecodeError::Bounds), "{runs:?}");
    }
    assert_eq!(pages(vec![(max, 1)]).unwrap().unwrap().pages, [i32::MAX]);
    assert_eq!(assemble(&(1, Some(-1), true, vec![], vec![]), 0), Err(DecodeError::Bounds), "a negative aux slot");
    assert_eq!(assemble(&(0, None, false, vec![], vec![]), 0), Err(DecodeError::Bounds), "no receivers");
    let twice: Coded = (1, None, false, vec![], vec![(3, vec![(0, 1)]), (3, vec![(1, 1)])]);
    assert_eq!(assemble(&twice, 1000), Err(DecodeError::Body), "a group twice");
    let bytes = postcard::to_stdvec(&(1u32, None::<i32>, false, [0u8; 0], [0u8; 0])).unwrap();
    let mut longer = postcard::to_stdvec::<Coded>(&(1, None, false, vec![], vec![])).unwrap();
    assert!(bytes.len() < longer.len());
    assert!(GrantAssembly::default().add(0, 1, &longer, 0).unwrap().is_some());
    longer.push(0);
    assert_eq!(GrantAssembly::default().add(0, 1, &longer, 0), Err(DecodeError::Body), "something follows");
}

fn region() -> impl Strategy<Value = Region> {
    let key = prop_oneof![
        (0u32..50, prop_oneof![Just(Part::K), Just(Part::V), Just(Part::Fused)])
            .prop_map(|(layer, part)| RegionKey::Kv { layer, part }),
        (0u32..4).prop_map(|array| RegionKey::Aux { array }),
        (0u32..3, 0u32..5).prop_map(|(group, tensor)| RegionKey::State { group, tensor }),
    ];
    (key, 1u64..1 << 62, 1u64..1 << 20, 1u64..1 << 40, any::<bool>(), 0u64..8, any::<bool>()).prop_map(
        |(key, address, item_len, num_items, vram, device, local)| Region {
            key,
            address,
            len: item_len * num_items,
            item_len,
            kind: if vram { MemoryKind::Vram } else { MemoryKind::Dram },
            device,
            local,
        },
    )
}

fn card() -> impl Strategy<Value = Card> {
    let regions = prop::collection::vec(region(), 0..12).prop_map(|mut regions| {
        regions.sort_by_key(|region| region.key);
        regions.dedup_by_key(|region| region.key);
        RegionTable::new(regions).unwrap()
    });
    let name = || text(0..60);
    let metadata = prop::collection::vec(any::<u8>(), 0..120);
    (any::<[u8; 16]>(), name(), name(), number(), 1u32..4, name(), regions, metadata).prop_map(
        |(instance, name, agent, revision, role, cache_dtype, regions, metadata)| Card {
            instance,
            name,
            agent,
            revision,
            role,
            cache_dtype,
            regions,
            metadata,
        },
    )
}

fn refused(bytes: &[u8]) -> Error {
    decode_card(bytes).expect_err("a bad card")
}

/// A card's bytes with this body under a sound header.
fn card_around(body: &[u8]) -> Vec<u8> {
    let mut bytes = b"NIXLKV\0\0\x02\0\0\0".to_vec();
    bytes.extend_from_slice(&(body.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&crc32fast::hash(body).to_le_bytes());
    bytes.extend_from_slice(&crc32fast::hash(&bytes).to_le_bytes());
    bytes.extend_from_slice(body);
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn a_card_comes_back_and_no_altered_one_does(card in card(), at: Index, byte: u8) {
        let bytes = encode_card(&card);
        prop_assert_eq!(&decode_card(&bytes), &Ok(card));
        for len in 0..bytes.len() {
            prop_assert_eq!(refused(&bytes[..len]).code, NIXL_ERR_METADATA_INVALID, "cut to {} bytes", len);
        }
        for bit in 0..bytes.len() * 8 {
            let mut altered = bytes.clone();
            altered[bit / 8] ^= 1 << (bit % 8);
            let expected = if bit / 8 == 8 || bit / 8 == 9 { NIXL_ERR_WIRE_VERSION } else { NIXL_ERR_METADATA_INVALID };
            prop_assert_eq!(refused(&altered).code, expected, "bit {}", bit);
        }
        let mut altered = bytes.clone();
        let i = at.index(bytes.len());
        altered[i] = byte;
        prop_assert_eq!(decode_card(&altered).is_ok(), altered == bytes);
        altered.clone_from(&bytes);
        altered.push(byte);
        prop_assert_eq!(refused(&altered).code, NIXL_ERR_METADATA_INVALID);
    }

    #[test]
    fn random_bodies_of_cards_never_panic(body in prop::collection::vec(any::<u8>(), 0..300)) {
        // The first fields are often right, so that the later ones are reached.
        for start in [&b""[..], &[1; 16], &[[7; 16].as_slice(), &[1, b'n', 1, b'a', 0, 1, 0, 1, 0]].concat()] {
            let _ = decode_card(&card_around(&[start, &body].concat()));
        }
    }
}

#[test]
fn d6_a_card_of_another_version_is_told_from_an_altered_one() {
    for version in [0u16, 1, 255, 256, 0x0101, u16::MAX] {
        // A header of ours with another version, and one whose rest we do not understand.
        let mut ours = card_around(b"");
        ours[8..10].copy_from_slice(&version.to_le_bytes());
        let mut theirs = b"NIXLKV\0\0".to_vec();
        theirs.extend_from_slice(&version.to_le_bytes());
        theirs.extend_from_slice(&[0xaa; 100]);
        for bytes in [ours, theirs] {
            let error = refused(&bytes);
            assert_eq!(error.code, NIXL_ERR_WIRE_VERSION);
            assert!(error.text.contains("ours is 2") && error.text.contains(&format!("is {version}")), "{error}");
        }
    }
}

/// A card's body as it is coded, up to its regions: instance, name, agent, revision, role, dtype.
type CardStart = ([u8; 16], String, String, u64, u32, String);

fn card_start(name: String, role: u32) -> CardStart {
    ([7; 16], name, "agent".into(), 1, role, "bf16".into())
}

#[test]
fn d4_a_card_with_lying_lengths_or_fields_is_refused() {
    let start = Instant::now();
    let fields = postcard::to_stdvec(&card_start("engine".into(), 1)).unwrap();
    let good = [&fields[..], &[0, 0]].concat();
    assert!(decode_card(&card_around(&good)).is_ok());
    for length in [
        &[0x7f][..],
        &[0xff, 0xff, 0xff, 0xff, 0x0f],
        &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f],
        &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1],
    ] {
        // In the place of the name's length, of the number of regions, and of the metadata's length.
        for body in [
            [&[7; 16], length, b"abc"].concat(),
            [&fields, length, &[0]].concat(),
            [&fields[..], &[0], length].concat(),
        ] {
            assert_eq!(refused(&card_around(&body)).code, NIXL_ERR_METADATA_INVALID);
        }
        // In the header, where the length of the body stands.
        let mut bytes = card_around(&good);
        bytes[12..20].copy_from_slice(&u64::MAX.to_le_bytes());
        let header = crc32fast::hash(&bytes[..24]);
        bytes[24..28].copy_from_slice(&header.to_le_bytes());
        let error = refused(&bytes);
        assert!(error.text.contains(&u64::MAX.to_string()), "{error}");
    }
    for bad in [card_start("n".repeat(256), 1), card_start("engine".into(), 0), card_start("engine".into(), 4)] {
        let body = [&postcard::to_stdvec(&bad).unwrap()[..], &[0, 0]].concat();
        assert_eq!(refused(&card_around(&body)).code, NIXL_ERR_METADATA_INVALID);
    }
    assert!(start.elapsed() < Duration::from_secs(60));
}

#[test]
fn d1_a_card_with_a_hostile_region_table_is_refused() {
    // Key (KV, layer 0, K), then address, len, item_len, kind, device, local.
    type Coded = ((u8, u32, u8), u64, u64, u64, bool, u64, bool);
    let with = |regions: &[Coded]| {
        let mut body = postcard::to_stdvec(&card_start("engine".into(), 2)).unwrap();
        body.extend(postcard::to_stdvec(regions).unwrap());
        body.push(0);
        decode_card(&card_around(&body))
    };
    let key = (0, 0, 0);
    assert!(with(&[(key, 4096, 8192, 4096, false, 0, false)]).is_ok());
    for (address, len, item_len) in [
        (0, 8192, 4096),
        (4096, 0, 4096),
        (4096, 8192, 0),
        (4096, 8192, 4097),
        (4096, 8192, 16384),
        (u64::MAX - 2047, 4096, 4096),
        (u64::MAX, u64::MAX, 1),
        (1 << 63, 1 << 63, 4096),
    ] {
        let error = with(&[(key, address, len, item_len, false, 0, false)]).expect_err("a hostile region");
        assert_eq!(error.code, NIXL_ERR_METADATA_INVALID);
        assert!(error.text.contains(&len.to_string()) || error.text.contains(&format!("{len:#x}")), "{error}");
    }
    let region = (key, 4096, 8192, 4096, false, 0, false);
    assert!(with(&[region, region]).expect_err("twice").text.contains("K of KV layer 0"));
    assert!(with(&[((3, 0, 0), 4096, 8192, 4096, false, 0, false)]).is_err(), "an unknown kind of region");
    assert!(with(&[((0, 0, 3), 4096, 8192, 4096, false, 0, false)]).is_err(), "an unknown part");
}
