//! The receiver's room: a grant out to every sender, landed chunks in, until each sender's part is complete.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::*;
use crate::protocol::{GrantBody, Last, Message};

use super::positions::Positions;
use super::{Action, Millis, PeerId, State, View};

/// What the receiver expects of one sender, declared when the room is opened.
#[derive(Debug, Clone)]
pub struct Expectation {
    /// The sender.
    pub peer: PeerId,
    /// It has connected back, so that a grant reaches it.
    pub ready: bool,
    /// What it is granted.
    pub grant: Arc<GrantBody>,
    /// How many state groups with at least one slot it sends.
    pub num_state_groups: u32,
}

/// A chunk of which slices have landed.
#[derive(Debug)]
struct Partial {
    num_slices: u32,
    seen: Vec<u64>,
    num_seen: u32,
    page_offset: u64,
    num_pages: u64,
    num_bytes: u64,
    last: Option<Last>,
}

/// One sender of the room.
#[derive(Debug)]
struct Source {
    expected: Expectation,
    granted: bool,
    partial: BTreeMap<u32, Partial>,
    complete: std::collections::BTreeSet<u32>,
    positions: Positions,
    last: Option<Last>,
    finished: bool,
    /// It said, or its closed connection says, that nothing of it is in flight.
    drained: bool,
    told: bool,
}

impl Source {
    fn is_drained(&self) -> bool {
        self.drained || !self.granted
    }
}

/// Bounds the memory in which one room remembers slices of unfinished chunks (8 MiB), whatever a peer claims.
const MAX_SEEN_WORDS: usize = 1 << 20;

/// When a sender that has not confirmed that it drained is asked again for the first time.
const ASK_AGAIN: Millis = 1000;

/// What came of a landed message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Landing {
    /// It counted.
    Counted,
    /// It had been counted before.
    Duplicate,
    /// It belongs to another life of the room, to no sender of it, or comes after its end.
    Stale,
}

/// The receiver's state machine.
#[derive(Debug)]
pub struct Receiver {
    room: u64,
    generation: u64,
    sources: Vec<Source>,
    cause: Option<Error>,
    succeeded: bool,
    touched: bool,
    timeout: Millis,
    connect_timeout: Millis,
    opened: Millis,
    last_progress: Millis,
    last_asked: Millis,
    ask_after: Millis,
    /// Words of all `seen` sets, bounded by [`MAX_SEEN_WORDS`].
    seen_words: usize,
    num_chunks: u64,
    num_pages: u64,
    num_bytes: u64,
}

impl Receiver {
    /// Opens the room and grants it to every sender that is ready.
    pub fn new(
        room: u64,
        generation: u64,
        senders: Vec<Expectation>,
        timeout: Millis,
        connect_timeout: Millis,
        now: Millis,
        out: &mut Vec<Action>,
    ) -> Self {
        let sources = senders
            .into_iter()
            .map(|expected| Source {
                expected,
                granted: false,
                partial: BTreeMap::new(),
                complete: Default::default(),
                positions: Positions::default(),
                last: None,
                finished: false,
                drained: false,
                told: false,
            })
            .collect();
        let mut receiver = Self {
            room,
            generation,
            sources,
            cause: None,
            succeeded: false,
            touched: false,
            timeout,
            connect_timeout,
            opened: now,
            last_progress: now,
            last_asked: now,
            ask_after: ASK_AGAIN,
            seen_words: 0,
            num_chunks: 0,
            num_pages: 0,
            num_bytes: 0,
        };
        for i in 0..receiver.sources.len() {
            if receiver.sources[i].expected.ready {
                receiver.send_grant(i, out);
            }
        }
        receiver
    }

    /// The room's generation.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    fn send_grant(&mut self, i: usize, out: &mut Vec<Action>) {
        let source = &mut self.sources[i];
        source.granted = true;
        out.push(Action::Grant {
            peer: source.expected.peer,
            room: self.room,
            generation: self.generation,
            body: source.expected.grant.clone(),
        });
    }

    /// A sender has connected back.
    pub fn peer_ready(&mut self, peer: PeerId, now: Millis, out: &mut Vec<Action>) {
        if self.state().ended() {
            return;
        }
        if let Some(i) = self.sources.iter().position(|s| s.expected.peer == peer && !s.granted) {
            self.last_progress = now;
            self.send_grant(i, out);
        }
    }

    /// A slice of a chunk is in our memory.
    #[allow(clippy::too_many_arguments)]
    pub fn landed(
        &mut self,
        peer: PeerId,
        generation: u64,
        chunk: u32,
        slice: u32,
        num_slices: u32,
        page_offset: u64,
        num_pages: u64,
        num_bytes: u64,
        last: Option<Last>,
        now: Millis,
        out: &mut Vec<Action>,
    ) -> Landing {
        if generation != self.generation || self.state().ended() {
            return Landing::Stale;
        }
        let room = self.room;
        let Some(source) = self.sources.iter_mut().find(|s| s.expected.peer == peer && s.granted) else {
            return Landing::Stale;
        };
        if source.complete.contains(&chunk) {
            return Landing::Duplicate;
        }
        let granted = source.expected.grant.pages.len() as u64;
        // Every chunk but the last holds a page, so an honest sender stays within this many; it bounds our memory.
        let most_chunks = granted.saturating_add(1);
        let known = source.partial.get(&chunk);
        let contradicts = num_slices == 0
            || slice >= num_slices
            || u64::from(chunk) >= most_chunks
            || page_offset.checked_add(num_pages).is_none_or(|end| end > granted)
            || (num_pages == 0 && last.is_none())
            || last.as_ref().is_some_and(|last| chunk.checked_add(1) != Some(last.num_chunks))
            || known.is_some_and(|partial| {
                partial.num_slices != num_slices
                    || partial.page_offset != page_offset
                    || partial.num_pages != num_pages
                    || partial.num_bytes != num_bytes
                    || partial.last != last
            });
        if contradicts {
            let text = format!("room {room}: peer {peer} contradicts itself or the grant in chunk {chunk}");
            self.fail(Error::new(NIXL_ERR_PROTOCOL, text), out);
            return Landing::Counted;
        }
        let partial = source.partial.entry(chunk).or_insert_with(|| Partial {
            num_slices,
            seen: Vec::new(),
            num_seen: 0,
            page_offset,
            num_pages,
            num_bytes,
            last,
        });
        let (word, bit) = (slice as usize / 64, 1u64 << (slice % 64));
        if partial.seen.len() <= word {
            let more = word + 1 - partial.seen.len();
            if self.seen_words.saturating_add(more) > MAX_SEEN_WORDS {
                let text = format!("room {room}: peer {peer} claims slice {slice} of {num_slices} in chunk {chunk}");
                self.fail(Error::new(NIXL_ERR_PROTOCOL, text), out);
                return Landing::Counted;
            }
            self.seen_words += more;
            partial.seen.resize(word + 1, 0);
        }
        if partial.seen[word] & bit != 0 {
            return Landing::Duplicate;
        }
        partial.seen[word] |= bit;
        partial.num_seen += 1;
        self.touched = true;
        self.last_progress = now;
        if partial.num_seen < num_slices {
            return Landing::Counted;
        }
        self.seen_words -= partial.seen.len();
        source.partial.remove(&chunk);
        source.complete.insert(chunk);
        if source.positions.add(page_offset, num_pages).is_err() || (last.is_some() && source.last.is_some()) {
            let text = format!("room {room}: peer {peer} sent positions of the page list twice in chunk {chunk}");
            self.fail(Error::new(NIXL_ERR_PROTOCOL, text), out);
            return Landing::Counted;
        }
        if last.is_some() {
            source.last = last;
        }
        self.num_chunks += 1;
        self.num_pages += num_pages;
        self.num_bytes = self.num_bytes.saturating_add(num_bytes);
        self.finish(peer, out);
        Landing::Counted
    }

    /// Checks whether a sender's part, and with it the room, is complete.
    fn finish(&mut self, peer: PeerId, out: &mut Vec<Action>) {
        let room = self.room;
        let Some(source) = self.sources.iter_mut().find(|s| s.expected.peer == peer) else { return };
        let Some(last) = source.last else { return };
        if (source.complete.len() as u64) < u64::from(last.num_chunks) {
            return;
        }
        let grant = &source.expected.grant;
        let wants_aux = grant.aux.is_some() && grant.aux_owner;
        let gap = source.positions.first_gap(grant.pages.len() as u64);
        if gap.is_some()
            || source.complete.len() as u64 != u64::from(last.num_chunks)
            || last.has_aux != wants_aux
            || last.num_state_groups != source.expected.num_state_groups
        {
            let text = format!(
                "room {room}: peer {peer} ended with {} chunks of {}, first unsent page {gap:?}, aux {} (expected {wants_aux}), \
                 {} state groups (expected {})",
                source.complete.len(),
                last.num_chunks,
                last.has_aux,
                last.num_state_groups,
                source.expected.num_state_groups
            );
            return self.fail(Error::new(NIXL_ERR_PROTOCOL, text), out);
        }
        source.finished = true;
        if self.sources.iter().all(|source| source.finished) {
            self.succeeded = true;
            for source in &self.sources {
                out.push(Action::Tell(
                    source.expected.peer,
                    Message::Done { room: self.room, generation: self.generation },
                ));
            }
        }
    }

    /// A sender reports its failure. False: it does not concern this life of the room.
    pub fn failed(
        &mut self,
        peer: PeerId,
        generation: u64,
        cause: Error,
        drained: bool,
        out: &mut Vec<Action>,
    ) -> bool {
        if generation != self.generation || self.succeeded {
            return false;
        }
        let Some(source) = self.sources.iter_mut().find(|s| s.expected.peer == peer && s.granted) else { return false };
        source.told = true;
        source.drained |= drained;
        self.fail(cause, out);
        true
    }

    /// A sender says that nothing of it is in flight. False: it does not concern this life of the room.
    pub fn drained(&mut self, peer: PeerId, generation: u64) -> bool {
        if generation != self.generation || self.cause.is_none() {
            return false;
        }
        match self.sources.iter_mut().find(|s| s.expected.peer == peer && s.granted) {
            Some(source) => {
                source.drained = true;
                true
            }
            None => false,
        }
    }

    /// The caller, or the engine on its behalf, gives the room up.
    pub fn abort(&mut self, cause: Error, out: &mut Vec<Action>) {
        self.fail(cause, out);
    }

    /// A sender is silent or gone; `closed` says that its connection is closed and that it can write no more.
    pub fn peer_gone(&mut self, peer: PeerId, cause: &Error, closed: bool, out: &mut Vec<Action>) {
        let Some(source) = self.sources.iter_mut().find(|s| s.expected.peer == peer) else { return };
        source.drained |= closed;
        // Telling it now leads nowhere when it is closed, and must be tried when it is only silent.
        source.told |= closed;
        if !self.succeeded {
            self.fail(cause.clone(), out);
        }
    }

    /// The sender has been heard again after a silence: ask it once more to drain what it has not confirmed.
    pub fn ask_again(&mut self, peer: PeerId, out: &mut Vec<Action>) {
        let Some(cause) = &self.cause else { return };
        let generation = self.generation;
        for source in self.sources.iter().filter(|s| s.expected.peer == peer && !s.is_drained()) {
            out.push(Action::Tell(source.expected.peer, abort_message(self.room, generation, cause)));
        }
    }

    /// Time passes.
    pub fn tick(&mut self, now: Millis, out: &mut Vec<Action>) {
        if self.cause.is_some() && !self.quiesced() && now.saturating_sub(self.last_asked) >= self.ask_after {
            // The abort or its answer may have been lost. Whoever has drained answers every time.
            self.last_asked = now;
            // Ever more rarely: what is asked of a stopped peer waits in the transport's memory.
            self.ask_after = self.ask_after.saturating_mul(2);
            for i in 0..self.sources.len() {
                self.ask_again(self.sources[i].expected.peer, out);
            }
        }
        if self.state().ended() {
            return;
        }
        let waited = now.saturating_sub(self.opened);
        if waited >= self.connect_timeout
            && let Some(source) = self.sources.iter().find(|source| !source.granted)
        {
            let text = format!(
                "room {}: peer {} has not connected back for {waited} ms: it must call nixlkv_connect with our blob",
                self.room, source.expected.peer
            );
            return self.fail(Error::new(NIXL_ERR_PEER_NOT_READY, text), out);
        }
        let waited = now.saturating_sub(self.last_progress);
        if waited >= self.timeout {
            let text = format!("room {}: nothing landed for {waited} ms, {} pages so far", self.room, self.num_pages);
            self.fail(Error::new(NIXL_ERR_ROOM_TIMEOUT, text), out);
        }
    }

    /// First cause wins. Every other sender is told to stop and drain.
    fn fail(&mut self, cause: Error, out: &mut Vec<Action>) {
        if self.cause.is_some() || self.succeeded {
            return;
        }
        for source in &mut self.sources {
            source.partial.clear();
            if source.granted && !source.told {
                source.told = true;
                out.push(Action::Tell(source.expected.peer, abort_message(self.room, self.generation, &cause)));
            }
        }
        self.cause = Some(cause);
    }

    /// The state.
    pub fn state(&self) -> State {
        if self.cause.is_some() {
            State::Failed
        } else if self.succeeded {
            State::Success
        } else if self.sources.iter().any(|source| !source.granted) {
            State::Bootstrapping
        } else if self.touched {
            State::Transferring
        } else {
            State::WaitingForInput
        }
    }

    /// Whether the room has ended and nothing can write into its pages any more. Success is quiesced by itself: every
    /// slice of every sender has landed.
    pub fn quiesced(&self) -> bool {
        self.succeeded || (self.cause.is_some() && self.sources.iter().all(Source::is_drained))
    }

    /// What poll shows.
    pub fn view(&self) -> View {
        let pending = |source: &&Source| if self.cause.is_some() { !source.is_drained() } else { !source.finished };
        View {
            state: self.state(),
            cause: self.cause.clone(),
            quiesced: self.quiesced(),
            num_chunks: self.num_chunks,
            num_pages: self.num_pages,
            num_bytes: self.num_bytes,
            num_descriptors: 0,
            num_pending_chunks: 0,
            num_pending_senders: self.sources.iter().filter(pending).count() as u64,
            suspect: false,
        }
    }

    /// Whether this peer is one of the senders.
    pub fn concerns(&self, peer: PeerId) -> bool {
        self.sources.iter().any(|source| source.expected.peer == peer)
    }
}

fn abort_message(room: u64, generation: u64, cause: &Error) -> Message {
    Message::Abort { room, generation, code: cause.code, text: cause.text.to_string() }
}
