//! The receiver's room: a grant out to every sender, landed chunks in, until each sender's part is complete.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::*;
use crate::protocol::{GrantBody, LandedChunk, Last, Message};

use super::positions::Positions;
use super::{Action, MAX_ASK_AFTER, Millis, Patience, PeerId, State, View};

/// What the receiver expects of one sender, declared when the room is opened.
#[derive(Debug, Clone, Hash)]
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
#[derive(Debug, Clone, Hash)]
struct Partial {
    chunk: LandedChunk,
    num_slices: u32,
    seen: Vec<u64>,
    num_seen: u32,
}

/// One sender of the room.
#[derive(Debug, Clone, Hash)]
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
    /// When it is asked what we may have missed.
    patience: Patience,
    /// It has been asked, and has not been sent the grant again since.
    asked: bool,
}

impl Source {
    fn is_drained(&self) -> bool {
        self.drained || !self.granted
    }
}

/// Bounds the memory in which one room remembers slices of unfinished chunks (8 MiB), whatever a peer claims.
const MAX_SEEN_WORDS: usize = 1 << 20;

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
#[derive(Debug, Clone, Hash)]
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
    /// When those that have not confirmed that they drained are asked again.
    patience: Patience,
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
                patience: Patience::new(now),
                asked: false,
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
            patience: Patience::new(now),
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
        source.asked = false;
        out.push(Action::Grant {
            peer: source.expected.peer,
            room: self.room,
            generation: self.generation,
            body: source.expected.grant.clone(),
        });
    }

    /// Whether a sender has yet to be told that the room failed before it could be granted: to it, this life is not over.
    pub fn owes_word(&self) -> bool {
        self.cause.is_some() && self.sources.iter().any(|source| !source.granted && !source.told)
    }

    /// Those senders, and what they are to be told as soon as they can be.
    pub fn unsaid(&self) -> Vec<(PeerId, Message)> {
        let Some(cause) = &self.cause else { return Vec::new() };
        let waits = self.sources.iter().filter(|source| !source.granted && !source.told);
        waits.map(|source| (source.expected.peer, self.abort_message(cause))).collect()
    }

    /// A sender has connected back.
    pub fn peer_ready(&mut self, peer: PeerId, now: Millis, out: &mut Vec<Action>) {
        if let Some(cause) = &self.cause {
            // It may be waiting for a grant that never comes.
            let message = self.abort_message(cause);
            let waits = |source: &&mut Source| source.expected.peer == peer && !source.granted && !source.told;
            if let Some(source) = self.sources.iter_mut().find(waits) {
                source.told = true;
                out.push(Action::Tell(peer, message));
            }
            return;
        }
        if self.succeeded {
            return;
        }
        if let Some(i) = self.sources.iter().position(|s| s.expected.peer == peer && !s.granted) {
            self.last_progress = now;
            self.sources[i].patience = Patience::new(now);
            self.send_grant(i, out);
        }
    }

    /// A sender that we asked holds no grant of ours. False: it was not asked, or the room has moved on.
    pub fn ungranted(&mut self, peer: PeerId, generation: u64, out: &mut Vec<Action>) -> bool {
        let asked = |source: &Source| source.expected.peer == peer && source.asked && !source.finished;
        match self.sources.iter().position(asked) {
            Some(i) if generation == self.generation && !self.state().ended() => {
                self.send_grant(i, out);
                true
            }
            _ => false,
        }
    }

    /// A sender has sent everything and waits for our confirmation. False: it is no sender of this life of the room.
    pub fn confirm(&mut self, peer: PeerId, generation: u64, now: Millis, out: &mut Vec<Action>) -> bool {
        let Some(i) = self.sources.iter().position(|source| source.expected.peer == peer) else { return false };
        if generation != self.generation || !self.sources[i].granted {
            return false;
        }
        if self.succeeded {
            out.push(Action::Tell(peer, Message::Done { room: self.room, generation }));
        } else if let Some(cause) = &self.cause {
            out.push(Action::Tell(peer, self.abort_message(cause)));
        } else if !self.sources[i].finished {
            self.sources[i].patience = Patience::new(now);
            self.ask(i, out);
        }
        true
    }

    /// Asks a sender what we may have missed.
    fn ask(&mut self, i: usize, out: &mut Vec<Action>) {
        let source = &mut self.sources[i];
        source.asked = true;
        // `landed` bounds the number.
        let num_chunks = u32::try_from(source.complete.len()).unwrap_or(u32::MAX);
        out.push(Action::Tell(
            source.expected.peer,
            Message::Ask { room: self.room, generation: self.generation, num_chunks },
        ));
    }

    /// A slice of a chunk is in our memory: number `slice` of `num_slices`.
    pub fn landed(
        &mut self,
        peer: PeerId,
        generation: u64,
        (slice, num_slices): (u32, u32),
        chunk: LandedChunk,
        now: Millis,
        out: &mut Vec<Action>,
    ) -> Landing {
        let i = match self.incomplete(peer, generation, &chunk) {
            Ok(i) => i,
            Err(landing) => return landing,
        };
        let source = &mut self.sources[i];
        let known = source.partial.get(&chunk.chunk);
        if slice >= num_slices
            || contradicts(&source.expected.grant, &chunk)
            || known.is_some_and(|partial| partial.num_slices != num_slices || partial.chunk != chunk)
        {
            return self.contradicted(peer, &chunk, out);
        }
        let fresh = || Partial { chunk, num_slices, seen: Vec::new(), num_seen: 0 };
        let partial = source.partial.entry(chunk.chunk).or_insert_with(fresh);
        let (word, bit) = (slice as usize / 64, 1u64 << (slice % 64));
        if partial.seen.len() <= word {
            let more = word + 1 - partial.seen.len();
            if self.seen_words.saturating_add(more) > MAX_SEEN_WORDS {
                let (room, chunk) = (self.room, chunk.chunk);
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
        source.patience = Patience::new(now);
        self.touched = true;
        self.last_progress = now;
        if partial.num_seen == num_slices {
            self.complete(i, chunk, out);
        }
        Landing::Counted
    }

    /// Every slice of a chunk is in our memory, says the sender whom we asked.
    pub fn chunk_landed(
        &mut self,
        peer: PeerId,
        generation: u64,
        chunk: LandedChunk,
        now: Millis,
        out: &mut Vec<Action>,
    ) -> Landing {
        let i = match self.incomplete(peer, generation, &chunk) {
            Ok(i) => i,
            Err(landing) => return landing,
        };
        let source = &mut self.sources[i];
        let known = source.partial.get(&chunk.chunk);
        if contradicts(&source.expected.grant, &chunk) || known.is_some_and(|partial| partial.chunk != chunk) {
            return self.contradicted(peer, &chunk, out);
        }
        source.patience = Patience::new(now);
        self.touched = true;
        self.last_progress = now;
        self.complete(i, chunk, out);
        Landing::Counted
    }

    /// The sender of a chunk that we do not have whole.
    fn incomplete(&self, peer: PeerId, generation: u64, chunk: &LandedChunk) -> std::result::Result<usize, Landing> {
        if generation != self.generation || self.state().ended() {
            return Err(Landing::Stale);
        }
        match self.sources.iter().position(|s| s.expected.peer == peer && s.granted) {
            Some(i) if self.sources[i].complete.contains(&chunk.chunk) => Err(Landing::Duplicate),
            Some(i) => Ok(i),
            None => Err(Landing::Stale),
        }
    }

    fn contradicted(&mut self, peer: PeerId, chunk: &LandedChunk, out: &mut Vec<Action>) -> Landing {
        let (room, chunk) = (self.room, chunk.chunk);
        let text = format!("room {room}: peer {peer} contradicts itself or the grant in chunk {chunk}");
        self.fail(Error::new(NIXL_ERR_PROTOCOL, text), out);
        Landing::Counted
    }

    /// A chunk is whole.
    fn complete(&mut self, i: usize, chunk: LandedChunk, out: &mut Vec<Action>) {
        let source = &mut self.sources[i];
        let peer = source.expected.peer;
        if let Some(partial) = source.partial.remove(&chunk.chunk) {
            self.seen_words -= partial.seen.len();
        }
        source.complete.insert(chunk.chunk);
        if source.positions.add(chunk.page_offset, chunk.num_pages).is_err()
            || (chunk.last.is_some() && source.last.is_some())
        {
            let (room, chunk) = (self.room, chunk.chunk);
            let text = format!("room {room}: peer {peer} sent positions of the page list twice in chunk {chunk}");
            return self.fail(Error::new(NIXL_ERR_PROTOCOL, text), out);
        }
        source.last = chunk.last.or(source.last);
        self.num_chunks += 1;
        self.num_pages += chunk.num_pages;
        self.num_bytes = self.num_bytes.saturating_add(chunk.num_bytes);
        self.finish(peer, out);
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

    /// A sender says that nothing of it is in flight, or ever will be; why may still be on its way. False: it does not
    /// concern this life of the room.
    pub fn drained(&mut self, peer: PeerId, generation: u64) -> bool {
        if generation != self.generation || self.succeeded {
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

    /// A sender's regions are no longer those that the room was opened for. As long as nothing of it has landed it may not
    /// have taken the grant, and must not take it any more.
    pub fn sender_changed(&mut self, peer: PeerId, cause: &Error, out: &mut Vec<Action>) {
        let untouched = |source: &Source| source.partial.is_empty() && source.complete.is_empty();
        if self.sources.iter().any(|source| source.expected.peer == peer && untouched(source)) {
            self.fail(Error::new(cause.code, format!("room {}: {}", self.room, cause.text)), out);
        }
    }

    /// The sender has been heard again after a silence: ask it once more to drain what it has not confirmed.
    pub fn ask_again(&mut self, peer: PeerId, out: &mut Vec<Action>) {
        let Some(cause) = &self.cause else { return };
        for source in self.sources.iter().filter(|s| s.expected.peer == peer && !s.is_drained()) {
            out.push(Action::Tell(source.expected.peer, self.abort_message(cause)));
        }
    }

    /// Time passes.
    pub fn tick(&mut self, now: Millis, out: &mut Vec<Action>) {
        // The abort or its answer may have been lost. Whoever has drained answers every time.
        if self.cause.is_some() && !self.quiesced() && self.patience.is_over(now, Millis::MAX) {
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
            return self.fail(Error::new(NIXL_ERR_ROOM_TIMEOUT, text), out);
        }
        for i in 0..self.sources.len() {
            let source = &mut self.sources[i];
            if source.granted && !source.finished && source.patience.is_over(now, MAX_ASK_AFTER) {
                self.ask(i, out);
            }
        }
    }

    /// First cause wins. Every other sender is told to stop and drain.
    fn fail(&mut self, cause: Error, out: &mut Vec<Action>) {
        if self.cause.is_some() || self.succeeded {
            return;
        }
        let message = self.abort_message(&cause);
        for source in &mut self.sources {
            source.partial.clear();
            if source.granted && !source.told {
                source.told = true;
                out.push(Action::Tell(source.expected.peer, message.clone()));
            }
        }
        self.patience = Patience::new(self.patience.since);
        self.cause = Some(cause);
    }

    fn abort_message(&self, cause: &Error) -> Message {
        let num_receivers = self.sources.first().map_or(1, |source| source.expected.grant.num_receivers);
        let (room, generation) = (self.room, self.generation);
        Message::Abort { room, generation, num_receivers, code: cause.code, text: cause.text.to_string() }
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

    /// The senders.
    pub fn peers(&self) -> impl Iterator<Item = PeerId> {
        self.sources.iter().map(|source| source.expected.peer)
    }

    /// Whether this peer is one of the senders.
    pub fn concerns(&self, peer: PeerId) -> bool {
        self.sources.iter().any(|source| source.expected.peer == peer)
    }
}

/// Whether a chunk cannot be one of the grant, whatever else has landed.
fn contradicts(grant: &GrantBody, chunk: &LandedChunk) -> bool {
    let LandedChunk { chunk, page_offset, num_pages, last, .. } = *chunk;
    let granted = grant.pages.len() as u64;
    // Every chunk but the last holds a page, so an honest sender stays within this many; it bounds our memory.
    u64::from(chunk) > granted
        || page_offset.checked_add(num_pages).is_none_or(|end| end > granted)
        || (num_pages == 0 && last.is_none())
        || last.is_some_and(|last| chunk.checked_add(1) != Some(last.num_chunks))
}
