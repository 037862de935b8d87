//! A grant's fragments, in any order, with lies. The first byte says how the input is read: its lowest bit whether as
//! one grant that is cut properly or as single fragments, the others how many indices the receiver's regions have.
#![no_main]

use nixlkv::protocol::{GrantAssembly, GrantBody, MAX_GRANT_INDICES, Message, split_grant};
use nixlkv_fuzz::{Input, heap};

/// Bytes of a grant in every fragment but the last.
const FRAGMENT: usize = 139;

/// A grant that was taken is within the limit, and comes through the wire as it is, in any order.
fn taken(body: &GrantBody, limit: u64) {
    let lists = std::iter::once(&body.pages).chain(body.states.iter().map(|(_, slots)| slots));
    let num_indices: usize = lists.clone().map(Vec::len).sum();
    assert!(num_indices as u64 <= limit.min(MAX_GRANT_INDICES), "{num_indices} indices of {limit}");
    assert!(lists.flatten().all(|index| *index >= 0) && body.aux.is_none_or(|aux| aux >= 0) && body.num_receivers > 0);
    let mut messages = split_grant(1, 2, (3, 4), body);
    messages.reverse();
    let mut assembly = GrantAssembly::default();
    let mut whole = None;
    for message in &messages {
        let Message::Grant { fragment, num_fragments, payload, .. } = message else { panic!("{message:?}") };
        assert!(whole.is_none());
        whole = assembly.add(*fragment, *num_fragments, payload, limit).unwrap();
    }
    assert!(whole.as_ref() == Some(body));
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let how = input.u8();
    let limit = [0, 1, 64, 4096, 1 << 20, 1 << 31, u64::MAX][usize::from(how >> 1) % 7];
    let len = data.len();
    let (body, most, held) = heap(|| {
        let mut assembly = GrantAssembly::default();
        if how & 1 == 0 {
            let num_fragments = input.0.len().div_ceil(FRAGMENT) as u32;
            let mut fragments: Vec<_> = input.0.chunks(FRAGMENT).zip(0..).collect();
            let by = len % fragments.len().max(1);
            fragments.rotate_left(by);
            let mut body = None;
            for (payload, fragment) in fragments {
                assert!(body.is_none(), "whole before its last fragment");
                match assembly.add(fragment, num_fragments, payload, limit) {
                    Ok(whole) => body = whole,
                    Err(_) => break,
                }
            }
            return body;
        }
        while !input.is_over() {
            let (fragment, num_fragments, len) = (input.u8(), input.u16(), input.u8());
            let payload = input.bytes(usize::from(len));
            match assembly.add(fragment.into(), num_fragments.into(), payload, limit) {
                Ok(None) => {}
                Ok(Some(body)) => return Some(body),
                Err(_) => return None,
            }
        }
        // What waits for more is no more than what came.
        let (again, _, _) = heap(|| format!("{assembly:?}").len());
        assert!(again <= 16 * len + 1024, "{again} characters for {len} bytes");
        None
    });
    // Runs stand for indices of 4 bytes, as many as the limit lets in; a growing list is twice as long for a moment.
    let indices = usize::try_from(limit.min(MAX_GRANT_INDICES)).unwrap() * 4;
    assert!(most <= 3 * indices + 64 * len + 4096, "{most} bytes of heap for {len}, limit {limit}");
    assert!(held <= 2 * indices + 64 * len + 4096, "{held} bytes of heap for {len}, limit {limit}");
    // A grant of millions of indices is put through the wire by its own seed only: it takes long.
    if let Some(body) = body.filter(|body| body.pages.len() < 1 << 14) {
        taken(&body, limit);
    }
});
