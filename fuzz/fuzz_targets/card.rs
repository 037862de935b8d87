//! Cards: the input as a card, and as the body of a card whose header fits.
#![no_main]

use std::collections::HashSet;

use nixlkv::protocol::{Card, decode_card, encode_card};
use nixlkv_fuzz::{card, frugal};

/// What is taken for a card is sound in itself, and comes back as it was.
fn accepted(bytes: &[u8]) {
    // A coded region takes at least 7 bytes, and 64 in memory, twice.
    let Ok(card) = frugal(bytes.len(), 40, || decode_card(bytes)) else { return };
    let Card { name, agent, role, cache_dtype, regions, .. } = &card;
    assert!(name.len() <= 255 && agent.len() <= 255 && cache_dtype.len() <= 255 && (1..=3).contains(role));
    let mut keys = HashSet::new();
    for region in regions.regions() {
        assert!(keys.insert(region.key), "{} twice", region.key);
        assert!(region.address != 0 && region.len != 0 && region.item_len != 0);
        assert!(u128::from(region.address) + u128::from(region.len) <= u128::from(u64::MAX), "{} wraps", region.key);
        assert!(region.num_items() * region.item_len == region.len);
        assert!(regions.num_indices() >= regions.num_pages());
    }
    assert!(decode_card(&encode_card(&card)).as_ref() == Ok(&card));
    // Against itself, as a peer that claims our own layout.
    let _ = nixlkv::layout::map(regions, regions);
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    accepted(data);
    accepted(&card(data));
});
