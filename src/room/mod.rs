//! The room state machines: a sender's and a receiver's. Pure: events in, actions out, time as a value.
//!
//! A machine never touches NIXL, a lock, a thread or a clock. Each event method appends what must happen to a list of
//! [`Action`]s; the engine carries them out.

use std::sync::Arc;

use crate::error::Error;
use crate::protocol::{GrantBody, Last, Message};

mod positions;
mod receiver;
mod sender;
#[cfg(test)]
mod tests;

pub use receiver::{Expectation, Landing, Receiver};
pub use sender::{Chunk, Sender, SenderLimits};

/// A peer as the engine numbers it.
pub type PeerId = u64;
/// Milliseconds of a monotonic clock.
pub type Millis = u64;

/// A room's state, with the values of SGLang's `KVPoll`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum State {
    /// Ended: see the cause.
    Failed = 0,
    /// The other side is not known yet: no grant has come, or the peer has not connected back.
    Bootstrapping = 1,
    /// Granted; no chunk yet.
    WaitingForInput = 2,
    /// Chunks are on their way.
    Transferring = 3,
    /// Ended: every byte is in the receiver's memory, and both sides know.
    Success = 4,
}

impl State {
    /// Whether the room has ended.
    pub fn ended(self) -> bool {
        matches!(self, State::Failed | State::Success)
    }
}

/// What an event leads to.
#[derive(Debug)]
pub enum Action {
    /// Send a control message.
    Tell(PeerId, Message),
    /// Send a grant, in as many messages as it takes.
    Grant {
        /// To whom.
        peer: PeerId,
        /// For which room.
        room: u64,
        /// Of which life of the room.
        generation: u64,
        /// What.
        body: Arc<GrantBody>,
    },
    /// Move a chunk.
    Transfer(Job),
}

/// How long a side waits before it asks for what may have been lost on the way, for the first time; then ever longer.
const ASK_AFTER: Millis = 1000;
/// The longest such wait, as long as the room has not ended.
const MAX_ASK_AFTER: Millis = 8000;

/// When to ask again: what is asked of a stopped peer waits in the transport's memory, so ever more rarely.
#[derive(Debug, Clone, Hash)]
struct Patience {
    since: Millis,
    after: Millis,
}

impl Patience {
    fn new(now: Millis) -> Self {
        Self { since: now, after: ASK_AFTER }
    }

    /// True when it is time to ask; the next time comes twice as late, but no later than after `most`.
    fn is_over(&mut self, now: Millis, most: Millis) -> bool {
        if now.saturating_sub(self.since) < self.after {
            return false;
        }
        self.since = now;
        self.after = self.after.saturating_mul(2).min(most);
        true
    }
}

/// State indices of one group.
pub type StateIndices = (u32, Vec<i32>);

/// One chunk on its way to one receiver.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Job {
    /// The room.
    pub room: u64,
    /// The receiver.
    pub peer: PeerId,
    /// The receiver's generation of the room.
    pub generation: u64,
    /// The chunk's number, from 0 in the order of the calls.
    pub chunk: u32,
    /// Our page indices.
    pub pages: Arc<[i32]>,
    /// Where they start in the room's page list.
    pub page_offset: u64,
    /// The receiver's pages, aux slot and state slots.
    pub grant: Arc<GrantBody>,
    /// Our aux slot, when it goes with this chunk.
    pub aux: Option<i32>,
    /// Our state slots, when they go with this chunk.
    pub states: Arc<[StateIndices]>,
    /// Set on the last chunk.
    pub last: Option<Last>,
}

/// How a job ended: nothing of it is in flight any more.
#[derive(Debug)]
pub struct Settled {
    /// The receiver it went to.
    pub peer: PeerId,
    /// The chunk.
    pub chunk: u32,
    /// `Err` when a piece of it failed; `Ok(false)` when it was cancelled before it had all been posted.
    pub result: Result<bool, Error>,
    /// Bytes that landed.
    pub num_bytes: u64,
    /// Descriptors that were posted.
    pub num_descriptors: u64,
}

/// What poll shows.
#[derive(Debug, Clone)]
pub struct View {
    /// The state.
    pub state: State,
    /// Why it failed.
    pub cause: Option<Error>,
    /// Nothing of the room can touch memory any more.
    pub quiesced: bool,
    /// Chunks that landed.
    pub num_chunks: u64,
    /// Pages that landed.
    pub num_pages: u64,
    /// Bytes that landed.
    pub num_bytes: u64,
    /// Descriptors posted (sender).
    pub num_descriptors: u64,
    /// Chunks accepted that have not landed (sender).
    pub num_pending_chunks: u64,
    /// Senders not complete, or after a failure not drained (receiver).
    pub num_pending_senders: u64,
    /// A peer of the room is suspected to be gone. Filled in by the engine, which knows the clock.
    pub suspect: bool,
}

/// Either machine.
#[derive(Debug, Clone, Hash)]
pub enum Room {
    /// We send.
    Sender(Sender),
    /// We receive.
    Receiver(Receiver),
}

impl Room {
    /// What poll shows. The cause's text is cloned only when there is one.
    pub fn view(&self) -> View {
        match self {
            Room::Sender(room) => room.view(),
            Room::Receiver(room) => room.view(),
        }
    }

    /// The state.
    pub fn state(&self) -> State {
        match self {
            Room::Sender(room) => room.state(),
            Room::Receiver(room) => room.state(),
        }
    }

    /// Whether nothing of the room can touch memory any more.
    pub fn quiesced(&self) -> bool {
        match self {
            Room::Sender(room) => room.quiesced(),
            Room::Receiver(room) => room.quiesced(),
        }
    }

    /// The engine or its user gives the room up.
    pub fn abort(&mut self, cause: Error, out: &mut Vec<Action>) {
        match self {
            Room::Sender(room) => room.abort(cause, out),
            Room::Receiver(room) => room.abort(cause, out),
        }
    }

    /// A peer is silent or gone. `closed` says that its connection is closed, so that it can write no more.
    pub fn peer_gone(&mut self, peer: PeerId, cause: &Error, closed: bool, out: &mut Vec<Action>) {
        match self {
            Room::Sender(room) => room.peer_gone(peer, cause, closed, out),
            Room::Receiver(room) => room.peer_gone(peer, cause, closed, out),
        }
    }

    /// Time passes.
    pub fn tick(&mut self, now: Millis, out: &mut Vec<Action>) {
        match self {
            Room::Sender(room) => room.tick(now, out),
            Room::Receiver(room) => room.tick(now, out),
        }
    }

    /// The peers that the room has to do with.
    pub fn peers(&self) -> Box<dyn Iterator<Item = PeerId> + '_> {
        match self {
            Room::Sender(room) => Box::new(room.lives().map(|(peer, _)| peer)),
            Room::Receiver(room) => Box::new(room.peers()),
        }
    }

    /// Whether the room has to do with this peer.
    pub fn concerns(&self, peer: PeerId) -> bool {
        match self {
            Room::Sender(room) => room.concerns(peer),
            Room::Receiver(room) => room.concerns(peer),
        }
    }
}
