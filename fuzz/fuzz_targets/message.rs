//! Control messages: the input as a frame, and as the body of a frame whose header fits.
#![no_main]

use nixlkv::protocol::{MAX_MESSAGE_BYTES, Message, decode, encode};
use nixlkv_fuzz::{frame, frugal};

/// What is taken for a message is bounded, and comes back from the wire as it was.
fn accepted(bytes: &[u8]) -> bool {
    let Ok(message) = frugal(bytes.len(), 4, || decode(bytes)) else { return false };
    assert!(bytes.len() <= MAX_MESSAGE_BYTES);
    let texts = matches!(message, Message::Failed { .. } | Message::Abort { .. });
    let again = encode(&message);
    assert!(again.len() <= MAX_MESSAGE_BYTES);
    let back = decode(&again);
    // A number that took more bytes than it needs may have made place for a text; never the other way round.
    assert!(back == Ok(message), "text {texts}: {back:?}");
    true
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    accepted(data);
    let framed = frame(data);
    if accepted(&framed) {
        // The version comes first: a frame of another one is that, whatever it holds.
        let mut other = framed.clone();
        other[2] = other[2].wrapping_add(1);
        assert!(decode(&other) == Err(nixlkv::protocol::DecodeError::Version(other[2])));
        // One bit more or less is seen.
        let i = data.iter().fold(0usize, |sum, byte| sum.wrapping_mul(31).wrapping_add(usize::from(*byte)));
        let (mut altered, bit) = (framed, i % 8);
        let at = i / 8 % altered.len();
        altered[at] ^= 1 << bit;
        assert!(decode(&altered).is_err(), "bit {bit} of byte {at}");
    }
});
