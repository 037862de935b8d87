//! NIXL's metadata, as we look into it before NIXL does.
#![no_main]

#[allow(dead_code)]
#[path = "../../src/nixl/metadata.rs"]
mod metadata;

use metadata::Metadata;
use nixlkv_fuzz::{Input, frugal};

fn parse(bytes: &[u8]) -> Option<Metadata> {
    // A block takes at least 34 bytes, and about 200 in memory with its backend's name once more.
    let parsed = frugal(bytes.len(), 64, || Metadata::parse(bytes))?;
    assert!(!parsed.agent.is_empty() && parsed.agent.len() <= bytes.len() && !parsed.agent.contains('\0'));
    assert!(parsed.extends(&parsed) == parsed.is_known());
    Some(parsed)
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    parse(data);
    // Two blobs behind the length of the first, as the earlier and the later one of a peer.
    let mut input = Input(data);
    let len = usize::from(input.u16());
    if let (Some(older), Some(newer)) = (parse(input.bytes(len)), parse(input.0))
        && newer.extends(&older)
    {
        assert!(newer.agent == older.agent && newer.is_known() && older.is_known());
        assert!(!older.extends(&newer) || newer == older);
    }
});
