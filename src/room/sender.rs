//! The sender's room: chunks and grants in, jobs out, until every receiver says that all has landed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::error::*;
use crate::protocol::{GrantBody, LandedChunk, Last, Message};

use super::positions::Positions;
use super::{Action, Job, MAX_ASK_AFTER, Millis, Patience, PeerId, Settled, State, StateIndices, View};

/// A chunk as the caller gives it, its indices already checked against our own regions.
#[derive(Debug, Clone, Hash)]
pub struct Chunk {
    /// Our page indices.
    pub pages: Arc<[i32]>,
    /// Where they start in the room's page list.
    pub page_offset: u64,
    /// Whether it is the last.
    pub last: bool,
    /// Our aux slot.
    pub aux: Option<i32>,
    /// The caller says that another sender owns the aux slot.
    pub no_aux: bool,
    /// Our state slots.
    pub states: Arc<[StateIndices]>,
}

/// A sender's time limits and what our engine has registered.
#[derive(Debug, Clone, Copy, Hash)]
pub struct SenderLimits {
    /// How long the first chunk waits for the grants.
    pub grant_timeout: Millis,
    /// How long the room may go without progress.
    pub room_timeout: Millis,
    /// Our engine has aux regions.
    pub has_aux: bool,
}

/// One receiver of the room.
#[derive(Debug, Clone, Hash)]
struct Grant {
    peer: PeerId,
    generation: u64,
    body: Arc<GrantBody>,
    /// State groups that this engine and the receiver both have.
    groups: Arc<[u32]>,
    /// Jobs handed out and not settled, by chunk; the bytes are not known yet.
    in_flight: BTreeMap<u32, LandedChunk>,
    /// Chunks that have landed, until the receiver has confirmed them all: their messages may have been lost.
    landed: Vec<LandedChunk>,
    /// When the receiver is asked to confirm once more.
    patience: Patience,
    /// The receiver said that everything landed.
    done: bool,
    /// The receiver knows that the room has failed, or told us.
    told: bool,
    /// The receiver knows that nothing is in flight any more.
    drained: bool,
}

impl Grant {
    fn new(peer: PeerId, generation: u64, body: Arc<GrantBody>, groups: Arc<[u32]>, now: Millis) -> Self {
        Self {
            peer,
            generation,
            body,
            groups,
            in_flight: BTreeMap::new(),
            landed: Vec::new(),
            patience: Patience::new(now),
            done: false,
            told: false,
            drained: false,
        }
    }

    /// Nothing more comes to this receiver, and it has not said that it has it all.
    fn is_unconfirmed(&self) -> bool {
        !self.done && self.in_flight.is_empty()
    }
}

/// The sender's state machine.
#[derive(Debug, Clone, Hash)]
pub struct Sender {
    room: u64,
    limits: SenderLimits,
    grants: Vec<Grant>,
    /// Chunks that wait for the grants.
    waiting: Vec<(u32, Chunk)>,
    positions: Positions,
    num_chunks: u32,
    last_sent: bool,
    cause: Option<Error>,
    last_progress: Millis,
    /// Jobs that have still to settle, by chunk: it has landed at zero.
    unsettled: BTreeMap<u32, (u32, u64)>,
    landed_chunks: u64,
    landed_pages: u64,
    landed_bytes: u64,
    num_descriptors: u64,
}

impl Sender {
    /// A room without chunks or grants.
    pub fn new(room: u64, limits: SenderLimits, now: Millis) -> Self {
        Self {
            room,
            limits,
            grants: Vec::new(),
            waiting: Vec::new(),
            positions: Positions::default(),
            num_chunks: 0,
            last_sent: false,
            cause: None,
            last_progress: now,
            unsettled: Default::default(),
            landed_chunks: 0,
            landed_pages: 0,
            landed_bytes: 0,
            num_descriptors: 0,
        }
    }

    /// Whether every receiver has granted.
    fn granted(&self) -> bool {
        self.grants.first().is_some_and(|first| self.grants.len() as u64 >= u64::from(first.body.num_receivers.max(1)))
    }

    /// Checks a chunk against the room without changing it.
    pub fn check(&self, chunk: &Chunk) -> Result<()> {
        if let Some(cause) = &self.cause {
            fail!(NIXL_ERR_ROOM_ENDED, "room {} has failed: {cause}", self.room);
        }
        if self.state() == State::Success {
            fail!(NIXL_ERR_ROOM_ENDED, "room {} has succeeded", self.room);
        }
        if self.last_sent {
            fail!(NIXL_ERR_CHUNK_AFTER_LAST, "room {}: the last chunk was chunk {}", self.room, self.num_chunks - 1);
        }
        if chunk.pages.is_empty() && !chunk.last {
            fail!(
                NIXL_ERR_CHUNK_EMPTY,
                "room {}: chunk {} has no pages and is not the last",
                self.room,
                self.num_chunks
            );
        }
        if !chunk.last && (chunk.aux.is_some() || !chunk.states.is_empty()) {
            let code = if chunk.aux.is_some() { NIXL_ERR_AUX_UNEXPECTED } else { NIXL_ERR_STATE_UNEXPECTED };
            return Err(Error::new(code, format!("room {}: aux and state go with the last chunk only", self.room)));
        }
        let (start, len) = (chunk.page_offset, chunk.pages.len() as u64);
        let Some(end) = start.checked_add(len) else {
            fail!(NIXL_ERR_PAGE_COUNT, "room {}: page_offset {start} plus {len} pages passes 2^64", self.room);
        };
        if let Some(other) = self.positions.overlaps(start, end) {
            fail!(
                NIXL_ERR_PAGE_OVERLAP,
                "room {}: positions {start}..{end} of the page list overlap those sent from {other} on",
                self.room
            );
        }
        if chunk.last {
            let mut all = self.positions.clone();
            let _ = all.add(start, len);
            let expected = self.grants.first().map_or(all.end(), |grant| grant.body.pages.len() as u64);
            if let Some(gap) = all.first_gap(expected) {
                fail!(
                    NIXL_ERR_PAGES_INCOMPLETE,
                    "room {}: the last chunk leaves position {gap} of {expected} unsent",
                    self.room
                );
            }
            if chunk.aux.is_none() && !chunk.no_aux && self.limits.has_aux && !self.granted() {
                fail!(NIXL_ERR_AUX_MISSING, "room {}: the last chunk has no aux index", self.room);
            }
        }
        for grant in &self.grants {
            self.check_against(grant, chunk)?;
        }
        Ok(())
    }

    /// Checks a chunk against one receiver's grant.
    fn check_against(&self, grant: &Grant, chunk: &Chunk) -> Result<()> {
        let room = self.room;
        let granted = grant.body.pages.len() as u64;
        let end = chunk.page_offset.saturating_add(chunk.pages.len() as u64);
        if end > granted {
            fail!(
                NIXL_ERR_PAGE_COUNT,
                "room {room}: the chunk ends at position {end}, peer {} granted {granted} pages",
                grant.peer
            );
        }
        if !chunk.last {
            return Ok(());
        }
        match (grant.body.aux, chunk.aux) {
            (Some(_), None) if grant.body.aux_owner => {
                fail!(
                    NIXL_ERR_AUX_MISSING,
                    "room {room}: the receiver expects aux from us, and the last chunk has no aux index"
                );
            }
            (None, Some(aux)) => {
                fail!(
                    NIXL_ERR_AUX_UNEXPECTED,
                    "room {room}: aux slot {aux} is sent, and the receiver asked for no aux (NIXLKV_CHUNK_NO_AUX sends none)"
                );
            }
            (Some(_), Some(_)) if !grant.body.aux_owner => {
                fail!(NIXL_ERR_AUX_NOT_OWNER, "room {room}: the receiver expects aux from another sender");
            }
            _ => {}
        }
        for &group in grant.groups.iter() {
            let wanted = grant.body.states.iter().find(|(id, _)| *id == group).map(|(_, slots)| slots.len());
            let given = chunk.states.iter().find(|(id, _)| *id == group).map(|(_, slots)| slots.len());
            match (wanted, given) {
                (Some(wanted), Some(given)) if wanted != given => {
                    fail!(
                        NIXL_ERR_STATE_COUNT,
                        "room {room}: state group {group}: {given} indices sent, {wanted} granted"
                    );
                }
                (Some(wanted), None) if wanted > 0 => {
                    fail!(
                        NIXL_ERR_STATE_MISSING,
                        "room {room}: the receiver granted {wanted} slots of state group {group}"
                    );
                }
                (None, Some(given)) if given > 0 => {
                    fail!(
                        NIXL_ERR_STATE_UNEXPECTED,
                        "room {room}: the receiver granted no slots of state group {group}"
                    );
                }
                _ => {}
            }
        }
        for (group, slots) in chunk.states.iter() {
            if !slots.is_empty() && !grant.groups.contains(group) {
                fail!(NIXL_ERR_STATE_UNEXPECTED, "room {room}: the receiver has no state group {group}");
            }
        }
        Ok(())
    }

    /// The caller sends a chunk. A refused one changes nothing.
    pub fn chunk(&mut self, chunk: Chunk, now: Millis, out: &mut Vec<Action>) -> Result<()> {
        self.check(&chunk)?;
        let number = self.num_chunks;
        let Some(next) = number.checked_add(1) else {
            fail!(NIXL_ERR_QUEUE_FULL, "room {} has 2^32 chunks", self.room);
        };
        // `check` has excluded overlap.
        let _ = self.positions.add(chunk.page_offset, chunk.pages.len() as u64);
        self.num_chunks = next;
        self.last_sent = chunk.last;
        // Until it is granted the room's time runs from its first chunk on.
        if self.granted() || number == 0 {
            self.last_progress = now;
        }
        if self.granted() {
            self.launch(number, &chunk, out);
        } else {
            self.waiting.push((number, chunk));
        }
        Ok(())
    }

    /// Hands a chunk out to every receiver.
    fn launch(&mut self, number: u32, chunk: &Chunk, out: &mut Vec<Action>) {
        let num_pages = chunk.pages.len() as u64;
        self.unsettled.insert(number, (self.grants.len() as u32, num_pages));
        for grant in &mut self.grants {
            let aux = chunk.aux.filter(|_| grant.body.aux.is_some() && grant.body.aux_owner);
            let states: Arc<[StateIndices]> =
                if chunk.states.iter().all(|(group, slots)| !slots.is_empty() && grant.groups.contains(group)) {
                    chunk.states.clone()
                } else {
                    chunk.states.iter().filter(|(_, slots)| !slots.is_empty()).cloned().collect()
                };
            let last = chunk.last.then(|| Last {
                num_chunks: self.num_chunks,
                has_aux: aux.is_some(),
                num_state_groups: states.len() as u32,
            });
            let (page_offset, num_bytes) = (chunk.page_offset, 0);
            grant.in_flight.insert(number, LandedChunk { chunk: number, page_offset, num_pages, num_bytes, last });
            out.push(Action::Transfer(Job {
                room: self.room,
                peer: grant.peer,
                generation: grant.generation,
                chunk: number,
                pages: chunk.pages.clone(),
                page_offset: chunk.page_offset,
                grant: grant.body.clone(),
                aux,
                states,
                last,
            }));
        }
    }

    /// A receiver's grant has come. `groups` are the state groups that both sides have. `Err` is what it is answered with:
    /// this life of the room at the receiver will never be sent anything.
    pub fn grant(
        &mut self,
        peer: PeerId,
        generation: u64,
        body: Arc<GrantBody>,
        groups: Arc<[u32]>,
        now: Millis,
        out: &mut Vec<Action>,
    ) -> Result<()> {
        if let Some(known) = self.grants.iter().find(|grant| grant.peer == peer) {
            // The same one again changes nothing; another generation means that the receiver has moved on.
            if known.generation >= generation {
                return Ok(());
            }
            if self.state() != State::Success {
                let text = format!("room {}: the receiver opened it again", self.room);
                self.fail(Error::new(NIXL_ERR_PROTOCOL, text), out);
            }
            return self.refuse(peer, generation, out);
        }
        if self.cause.is_some() {
            // Answered: with it, nothing more is owed to this receiver.
            let answered = Grant { told: true, drained: true, ..Grant::new(peer, generation, body, groups, now) };
            self.grants.push(answered);
            return self.refuse(peer, generation, out);
        }
        if self.granted() {
            return self.refuse(peer, generation, out);
        }
        self.last_progress = now;
        let first = self.grants.first().map(|grant| (grant.body.pages.len(), grant.body.num_receivers));
        let (num_pages, num_receivers) = (body.pages.len(), body.num_receivers);
        self.grants.push(Grant::new(peer, generation, body, groups, now));
        if let Some((pages, receivers)) = first
            && (pages != num_pages || receivers != num_receivers)
        {
            let text = format!(
                "room {}: receivers differ: {pages} and {num_pages} pages, {receivers} and {num_receivers} receivers",
                self.room
            );
            self.fail(Error::new(NIXL_ERR_PAGE_COUNT, text), out);
        } else if self.granted() {
            self.start(out);
        }
        Ok(())
    }

    /// Answers a grant that comes too late, or is one too many.
    fn refuse(&self, peer: PeerId, generation: u64, out: &mut Vec<Action>) -> Result<()> {
        let room = self.room;
        let cause = match &self.cause {
            Some(cause) => cause.clone(),
            None if self.state() == State::Success => {
                let text = format!("room {room}: the sender has not released its earlier life");
                Error::new(NIXL_ERR_ROOM_IN_USE, text)
            }
            None => {
                let text = format!("room {room}: more receivers than the {} that were announced", self.grants.len());
                Error::new(NIXL_ERR_PROTOCOL, text)
            }
        };
        let (code, text) = (cause.code, cause.text.to_string());
        out.push(Action::Tell(peer, Message::Failed { room, generation, code, drained: true, text }));
        Err(cause)
    }

    /// All grants are there: check what waited against them and send it.
    fn start(&mut self, out: &mut Vec<Action>) {
        let waiting = std::mem::take(&mut self.waiting);
        for (_, chunk) in &waiting {
            for grant in &self.grants {
                if let Err(cause) = self.check_against(grant, chunk) {
                    return self.fail(cause, out);
                }
            }
        }
        let granted = self.grants.first().map_or(0, |grant| grant.body.pages.len() as u64);
        if self.last_sent && self.positions.end() != granted {
            let text =
                format!("room {}: {} pages sent, the receiver granted {granted}", self.room, self.positions.end());
            return self.fail(Error::new(NIXL_ERR_PAGE_COUNT, text), out);
        }
        for (number, chunk) in &waiting {
            self.launch(*number, chunk, out);
        }
    }

    /// A job has settled: nothing of it is in flight.
    pub fn settled(&mut self, settled: Settled, now: Millis, out: &mut Vec<Action>) {
        self.last_progress = now;
        self.landed_bytes += settled.num_bytes;
        self.num_descriptors += settled.num_descriptors;
        let mut confirmed = false;
        if let Some(grant) = self.grants.iter_mut().find(|grant| grant.peer == settled.peer) {
            let job = grant.in_flight.remove(&settled.chunk);
            confirmed = grant.done;
            if let (Some(landed), Ok(true), false) = (job, &settled.result, confirmed) {
                grant.landed.push(LandedChunk { num_bytes: settled.num_bytes, ..landed });
                grant.patience = Patience::new(now);
            }
        }
        // A receiver that has confirmed everything may be gone before NIXL tells us that the transfer is complete.
        match settled.result.or_else(|cause| if confirmed { Ok(true) } else { Err(cause) }) {
            Ok(true) => {
                if let Some((left, pages)) = self.unsettled.get_mut(&settled.chunk) {
                    *left = left.saturating_sub(1);
                    if *left == 0 {
                        self.landed_chunks += 1;
                        self.landed_pages += *pages;
                        self.unsettled.remove(&settled.chunk);
                    }
                }
            }
            Ok(false) => {}
            Err(cause) => self.fail(cause, out),
        }
        self.tell_drained(out);
    }

    /// The receiver says that everything of ours has landed.
    pub fn done(&mut self, peer: PeerId, generation: u64, now: Millis) -> bool {
        let complete = self.last_sent && self.granted();
        match self.grants.iter_mut().find(|grant| grant.peer == peer && grant.generation == generation) {
            Some(grant) if complete => {
                self.last_progress = now;
                grant.done = true;
                grant.landed = Vec::new();
                true
            }
            _ => false,
        }
    }

    /// The receiver has heard nothing for a while, and has `num_chunks` of our chunks whole. False: it is of a life of
    /// the room that we hold no grant of.
    pub fn asked(&mut self, peer: PeerId, generation: u64, num_chunks: u32, out: &mut Vec<Action>) -> bool {
        let Some(i) = self.grants.iter().position(|grant| grant.peer == peer && grant.generation == generation) else {
            return false;
        };
        if self.cause.is_some() {
            let drained = self.grants[i].in_flight.is_empty();
            out.push(Action::Tell(peer, self.failed_message(generation, drained)));
            self.grants[i].told = true;
            self.grants[i].drained = drained;
        } else if self.grants[i].landed.len() > num_chunks as usize {
            let room = self.room;
            let again = |&chunk| Action::Tell(peer, Message::ChunkLanded { room, generation, chunk });
            out.extend(self.grants[i].landed.iter().map(again));
        }
        true
    }

    /// The receiver gives the room up and waits for us to drain. False: it is of a life of the room that we hold no
    /// grant of, and that will never be sent anything.
    pub fn aborted(
        &mut self,
        peer: PeerId,
        generation: u64,
        num_receivers: u32,
        cause: Error,
        out: &mut Vec<Action>,
    ) -> bool {
        let Some(grant) = self.grants.iter_mut().find(|grant| grant.peer == peer && grant.generation == generation)
        else {
            out.push(Action::Tell(peer, Message::Drained { room: self.room, generation }));
            // Given up before its grant could come: whoever waits for that need not wait any longer.
            if !self.concerns(peer) && !self.granted() {
                self.fail(cause, out);
                self.knows(peer, generation, num_receivers);
            }
            return false;
        };
        grant.told = true;
        // It asks again when it missed the answer.
        grant.drained = false;
        self.fail(cause, out);
        self.tell_drained(out);
        true
    }

    /// A receiver that has not granted knows that the room has failed: it is owed no answer.
    pub fn knows(&mut self, peer: PeerId, generation: u64, num_receivers: u32) {
        let body = Arc::new(GrantBody { num_receivers, ..GrantBody::default() });
        let grant = Grant::new(peer, generation, body, Arc::default(), self.last_progress);
        self.grants.push(Grant { told: true, drained: true, ..grant });
    }

    /// The caller, or the engine on its behalf, gives the room up.
    pub fn abort(&mut self, cause: Error, out: &mut Vec<Action>) {
        self.fail(cause, out);
    }

    /// A receiver is silent or gone; `closed` says that no message reaches it any more. A silent one is told: it may
    /// come back.
    pub fn peer_gone(&mut self, peer: PeerId, cause: &Error, closed: bool, out: &mut Vec<Action>) {
        if let Some(grant) = self.grants.iter_mut().find(|grant| grant.peer == peer)
            && !grant.done
        {
            grant.told |= closed;
            self.fail(cause.clone(), out);
        }
    }

    /// Time passes.
    pub fn tick(&mut self, now: Millis, out: &mut Vec<Action>) {
        if self.state().ended() {
            return;
        }
        let waited = now.saturating_sub(self.last_progress);
        if !self.granted() {
            if waited >= self.limits.grant_timeout {
                let text = format!(
                    "room {}: no grant within {} ms: no connected decode engine called nixlkv_recv for it, or its side \
                     has not connected us back",
                    self.room, self.limits.grant_timeout
                );
                self.fail(Error::new(NIXL_ERR_GRANT_TIMEOUT, text), out);
            }
        } else if waited >= self.limits.room_timeout {
            let text = format!(
                "room {}: no progress for {waited} ms, {} of {} chunks landed",
                self.room, self.landed_chunks, self.num_chunks
            );
            self.fail(Error::new(NIXL_ERR_ROOM_TIMEOUT, text), out);
        } else if self.last_sent {
            let (room, unconfirmed) = (self.room, self.grants.iter_mut().filter(|grant| grant.is_unconfirmed()));
            for grant in unconfirmed {
                if grant.patience.is_over(now, MAX_ASK_AFTER) {
                    let generation = grant.generation;
                    out.push(Action::Tell(grant.peer, Message::Confirm { room, generation }));
                }
            }
        }
    }

    /// First cause wins. Every receiver is told at once, before anything has drained.
    fn fail(&mut self, cause: Error, out: &mut Vec<Action>) {
        if self.state().ended() {
            return;
        }
        self.waiting.clear();
        self.cause = Some(cause);
        for i in 0..self.grants.len() {
            let drained = self.grants[i].in_flight.is_empty();
            if !self.grants[i].told {
                let message = self.failed_message(self.grants[i].generation, drained);
                let grant = &mut self.grants[i];
                grant.told = true;
                grant.drained = drained;
                out.push(Action::Tell(grant.peer, message));
            }
        }
    }

    /// After a failure, tells each receiver once that nothing more is in flight to it.
    fn tell_drained(&mut self, out: &mut Vec<Action>) {
        if self.cause.is_none() {
            return;
        }
        for grant in &mut self.grants {
            if grant.in_flight.is_empty() && !grant.drained {
                grant.drained = true;
                out.push(Action::Tell(grant.peer, Message::Drained { room: self.room, generation: grant.generation }));
            }
        }
    }

    fn failed_message(&self, generation: u64, drained: bool) -> Message {
        let (code, text) = match &self.cause {
            Some(cause) => (cause.code, cause.text.to_string()),
            None => (NIXL_ERR_INTERNAL, String::new()),
        };
        Message::Failed { room: self.room, generation, code, drained, text }
    }

    fn in_flight(&self) -> u64 {
        self.grants.iter().map(|grant| grant.in_flight.len() as u64).sum()
    }

    /// The state.
    pub fn state(&self) -> State {
        if self.cause.is_some() {
            State::Failed
        } else if !self.granted() {
            State::Bootstrapping
        } else if self.num_chunks == 0 {
            State::WaitingForInput
        } else if self.last_sent && self.in_flight() == 0 && self.grants.iter().all(|grant| grant.done) {
            State::Success
        } else {
            State::Transferring
        }
    }

    /// Whether the room has ended and our pages are no longer read.
    pub fn quiesced(&self) -> bool {
        self.state().ended() && self.in_flight() == 0
    }

    /// What poll shows.
    pub fn view(&self) -> View {
        View {
            state: self.state(),
            cause: self.cause.clone(),
            quiesced: self.quiesced(),
            num_chunks: self.landed_chunks,
            num_pages: self.landed_pages,
            num_bytes: self.landed_bytes,
            num_descriptors: self.num_descriptors,
            num_pending_chunks: self.waiting.len() as u64 + self.unsettled.len() as u64,
            num_pending_senders: 0,
            suspect: false,
        }
    }

    /// The cause, when the room has failed and not every receiver can have heard of it, for want of a grant; with those
    /// that have.
    pub fn owes_an_answer(&self) -> Option<(&Error, Vec<PeerId>)> {
        let told = || self.grants.iter().map(|grant| grant.peer).collect();
        self.cause.as_ref().filter(|_| !self.granted()).map(|cause| (cause, told()))
    }

    /// A posted piece of a chunk does not come to an end. It stays in flight, and its pages with the room.
    pub fn stalled(&mut self, cause: Error, out: &mut Vec<Action>) {
        self.fail(cause, out);
    }

    /// A piece of a chunk has landed.
    pub fn progressed(&mut self, now: Millis) {
        self.last_progress = now;
    }

    /// Chunks accepted that have not settled everywhere. They count against the engine's queue depth.
    pub fn num_pending(&self) -> u64 {
        let in_flight = match self.grants.as_slice() {
            [] => 0,
            [one] => one.in_flight.len(),
            several => several.iter().flat_map(|grant| grant.in_flight.keys()).collect::<BTreeSet<_>>().len(),
        };
        self.waiting.len() as u64 + in_flight as u64
    }

    /// The receivers' lives of the room that we hold grants of.
    pub fn lives(&self) -> impl Iterator<Item = (PeerId, u64)> {
        self.grants.iter().map(|grant| (grant.peer, grant.generation))
    }

    /// Whether this peer is one of the receivers.
    pub fn concerns(&self, peer: PeerId) -> bool {
        self.grants.iter().any(|grant| grant.peer == peer)
    }
}
