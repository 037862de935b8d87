//! The wire: control messages, grants in fragments, and the card that engines exchange. Versioned, bounded, pure.
//!
//! A frame is: magic `NK` (2 bytes), wire version (1 byte), zero (1 byte), CRC-32 of the body (4 bytes, little-endian),
//! body. The body is the message in postcard's format (<https://postcard.jamesmunns.com/wire-format>), nothing after it.
//! No message is longer than [`MAX_MESSAGE_BYTES`], whatever it speaks of: some of NIXL's backends carry no more.

use serde::{Deserialize, Serialize};

mod card;
mod grant;
#[cfg(test)]
mod lies;
#[cfg(test)]
mod tests;

pub use card::{Card, decode_card, encode_card};
pub use grant::{GrantAssembly, GrantBody, MAX_GRANT_INDICES, split_grant};

/// The version of everything that engines tell each other.
pub const WIRE_VERSION: u8 = 2;
/// The longest message.
pub const MAX_MESSAGE_BYTES: usize = 200;

const MAGIC: [u8; 2] = *b"NK";
const HEADER: usize = 8;

/// What the last chunk adds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Last {
    /// Chunks in all.
    pub num_chunks: u32,
    /// The aux slot came with it.
    pub has_aux: bool,
    /// State groups that came with it.
    pub num_state_groups: u32,
}

/// How an engine stands to a peer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// Revision of the sender's region table.
    pub revision: u64,
    /// Revision of the addressee's table that the sender holds.
    pub known_revision: u64,
    /// Which life of the addressee is meant.
    pub known_instance: [u8; 16],
    /// The sender's number of this connection: a higher one whenever it connects anew.
    pub connection: u64,
    /// The addressee's number of its connection, as far as the sender has heard; 0: it has not heard of it yet.
    pub known_connection: u64,
    /// Please answer with a hello.
    pub reply: bool,
    /// No life of a room with a lower generation is open at the sender: a grant of one comes too late.
    pub oldest_generation: u64,
}

/// A control message between two engines.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Message {
    /// I have connected you; and then, as long as I am here, the heartbeat.
    Hello(Hello),
    /// I am going; nothing of mine is in flight.
    Goodbye {
        /// The sender's number of the connection that ends.
        connection: u64,
        /// The addressee's number, as far as the sender has heard; 0: it has not.
        known_connection: u64,
    },
    /// Are you there?
    Ping {
        /// Comes back.
        sequence: u64,
    },
    /// I am.
    Pong {
        /// Of the ping.
        sequence: u64,
    },
    /// Receiver to sender: a piece of a grant.
    Grant {
        /// The room.
        room: u64,
        /// The receiver's life of the room.
        generation: u64,
        /// Revision of the receiver's region table that the indices refer to.
        revision: u64,
        /// The receiver's number of the connection, as its hello gave it.
        connection: u64,
        /// Which piece.
        fragment: u32,
        /// Of how many.
        num_fragments: u32,
        /// The piece.
        payload: Vec<u8>,
    },
    /// Sender to receiver: a slice of a chunk is in your memory.
    Landed {
        /// The room.
        room: u64,
        /// The receiver's life of the room.
        generation: u64,
        /// Which slice of the chunk.
        slice: u32,
        /// Of how many.
        num_slices: u32,
        /// The chunk.
        chunk: LandedChunk,
    },
    /// Receiver to sender: everything has landed.
    Done {
        /// The room.
        room: u64,
        /// The receiver's life of the room.
        generation: u64,
    },
    /// Sender to receiver: the room has failed.
    Failed {
        /// The room.
        room: u64,
        /// The receiver's life of the room.
        generation: u64,
        /// The first cause.
        code: i32,
        /// Nothing is in flight any more.
        drained: bool,
        /// The first cause in words.
        text: String,
    },
    /// Receiver to sender: stop, drain, and say so.
    Abort {
        /// The room.
        room: u64,
        /// The receiver's life of the room.
        generation: u64,
        /// How many receivers the room has.
        num_receivers: u32,
        /// The first cause.
        code: i32,
        /// The first cause in words.
        text: String,
    },
    /// Sender to receiver: nothing of this life of the room is in flight, or ever will be.
    Drained {
        /// The room.
        room: u64,
        /// The receiver's life of the room.
        generation: u64,
    },
    /// Receiver to sender: I have heard nothing of this room for a while. Tell me again what I may have missed.
    Ask {
        /// The room.
        room: u64,
        /// The receiver's life of the room.
        generation: u64,
        /// Chunks of yours that I have whole.
        num_chunks: u32,
    },
    /// Sender to receiver, to an [`Message::Ask`]: no grant of this life of the room has reached me.
    Ungranted {
        /// The room.
        room: u64,
        /// The receiver's life of the room.
        generation: u64,
    },
    /// Sender to receiver, to an [`Message::Ask`]: every slice of this chunk is in your memory.
    ChunkLanded {
        /// The room.
        room: u64,
        /// The receiver's life of the room.
        generation: u64,
        /// The chunk.
        chunk: LandedChunk,
    },
    /// Sender to receiver: everything of mine is in your memory, and you have not said so.
    Confirm {
        /// The room.
        room: u64,
        /// The receiver's life of the room.
        generation: u64,
    },
}

/// A chunk as its receiver sees it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct LandedChunk {
    /// Its number.
    pub chunk: u32,
    /// Where its pages start in the page list.
    pub page_offset: u64,
    /// Its pages.
    pub num_pages: u64,
    /// Its bytes.
    pub num_bytes: u64,
    /// Set on the last chunk.
    pub last: Option<Last>,
}

/// Why bytes are no message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DecodeError {
    /// Shorter than a header, or longer than any message.
    Length,
    /// Not ours.
    Magic,
    /// Another wire version.
    Version(u8),
    /// Altered.
    Checksum,
    /// The body is no message, or something follows it.
    Body,
    /// More than the limits allow.
    Bounds,
}

/// Encodes a message. Texts are cut so that it fits.
pub fn encode(message: &Message) -> Vec<u8> {
    let mut message = std::borrow::Cow::Borrowed(message);
    loop {
        // Serialising into memory cannot fail for these types.
        let body = postcard::to_stdvec(message.as_ref()).unwrap_or_default();
        let excess = (HEADER + body.len()).saturating_sub(MAX_MESSAGE_BYTES);
        if excess > 0
            && let Message::Failed { text, .. } | Message::Abort { text, .. } = message.to_mut()
            && !text.is_empty()
        {
            let mut end = text.len().saturating_sub(excess);
            while !text.is_char_boundary(end) {
                end -= 1;
            }
            text.truncate(end);
            continue;
        }
        debug_assert!(excess == 0, "{message:?}");
        let mut frame = Vec::with_capacity(HEADER + body.len());
        frame.extend_from_slice(&MAGIC);
        frame.extend_from_slice(&[WIRE_VERSION, 0]);
        frame.extend_from_slice(&crc32fast::hash(&body).to_le_bytes());
        frame.extend_from_slice(&body);
        return frame;
    }
}

/// Decodes a message. Allocates no more than the frame's length.
pub fn decode(frame: &[u8]) -> Result<Message, DecodeError> {
    let Some((header, body)) = frame.split_first_chunk::<HEADER>() else { return Err(DecodeError::Length) };
    if header[..2] != MAGIC {
        return Err(DecodeError::Magic);
    }
    if header[2] != WIRE_VERSION {
        return Err(DecodeError::Version(header[2]));
    }
    if header[3] != 0 {
        return Err(DecodeError::Magic);
    }
    if frame.len() > MAX_MESSAGE_BYTES {
        return Err(DecodeError::Length);
    }
    if header[4..] != crc32fast::hash(body).to_le_bytes() {
        return Err(DecodeError::Checksum);
    }
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Ok(message),
        _ => Err(DecodeError::Body),
    }
}
