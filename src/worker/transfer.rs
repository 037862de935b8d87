//! Moves chunks: plans, posts in bounded slices, and settles.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::engine::{QueuedJob, Shared};
use crate::error::*;
use crate::fault;
use crate::metrics::count;
use crate::nixl::{Failure, FailureStatus, Posted, Transfer, TransferStatus, Write};
use crate::plan::{Cursor, Limits, Run, Slice, runs};
use crate::protocol::{LandedChunk, Message, encode};
use crate::room::{Job, Millis, PeerId, Room, Settled};

/// One post moves at most this much: on UCX's shared-memory lanes NIXL copies inside the post, and neither other
/// rooms nor control messages should wait for long.
const LIMITS: Limits = Limits { max_bytes: 8 << 20, max_spans: 512 };
/// Posted and not settled, for one peer: enough to keep a link busy, and no more, so that a peer that has stopped
/// holds up only its own.
const MAX_IN_FLIGHT_PER_PEER: u32 = 4;
/// Chunks planned at the same time.
const MAX_ACTIVE: usize = 256;
/// Of these, to one peer: a peer that has stopped leaves the others' chunks their places.
const MAX_ACTIVE_PER_PEER: usize = 16;
/// How often posted slices are looked at for a stall.
const WATCH_MS: Millis = 20;

/// A chunk that is being sent.
struct Active {
    queued: QueuedJob,
    cursor: Cursor,
    num_slices: u32,
    next_slice: u32,
    num_bytes: u64,
    /// Posted and not settled.
    in_flight: u32,
    failure: Option<Error>,
    landed_bytes: u64,
    num_descriptors: u64,
}

impl Active {
    /// Nothing more of it will be posted.
    fn stopped(&self) -> bool {
        self.next_slice >= self.num_slices
            || self.failure.is_some()
            || self.queued.cancelled.load(Ordering::Acquire)
            || self.queued.link.is_closed()
    }
}

/// A posted slice.
struct Flight {
    transfer: Box<dyn Transfer>,
    active: u64,
    num_bytes: u64,
    posted: Millis,
    /// Its room knows that it has stalled.
    stalled: bool,
}

pub struct Transfers {
    shared: Arc<Shared>,
    index: usize,
    /// In turn: the front posts a slice, then goes to the back.
    turns: VecDeque<u64>,
    active: std::collections::HashMap<u64, Active>,
    /// How many of them go to each peer.
    active_of: std::collections::HashMap<PeerId, usize>,
    /// Queued chunks that had to wait for one of their peer's to settle.
    passed_over: usize,
    next_key: u64,
    flights: Vec<Flight>,
    slice: Slice,
    settled: Vec<(u64, Settled)>,
    /// Rooms of which a slice has landed since the last report.
    progressed: Vec<u64>,
    last_watch: Millis,
}

impl Transfers {
    pub fn new(shared: Arc<Shared>, index: usize) -> Self {
        Self {
            shared,
            index,
            turns: VecDeque::new(),
            active: Default::default(),
            active_of: Default::default(),
            passed_over: 0,
            next_key: 0,
            flights: Vec::new(),
            slice: Slice::default(),
            settled: Vec::new(),
            progressed: Vec::new(),
            last_watch: 0,
        }
    }

    /// Whether NIXL has transfers of ours in progress.
    pub fn in_flight(&self) -> bool {
        !self.flights.is_empty()
    }

    /// One round. True: there was something to do.
    pub fn step(&mut self) -> bool {
        let mut busy = self.take_jobs();
        busy |= self.settle_flights();
        self.watch_flights();
        busy |= self.post_round();
        busy |= self.report();
        busy
    }

    /// Plans queued chunks.
    fn take_jobs(&mut self) -> bool {
        let mut room = MAX_ACTIVE.saturating_sub(self.active.len());
        let mut jobs: Vec<QueuedJob> = Vec::new();
        {
            let mut tables = self.shared.tables();
            let queue = &mut tables.jobs[self.index];
            // What was passed over stays passed over until a chunk settles or another is queued.
            if queue.len() == self.passed_over {
                return false;
            }
            let mut left = VecDeque::with_capacity(queue.len());
            for queued in queue.drain(..) {
                let active = self.active_of.entry(queued.job.peer).or_default();
                // A cancelled one needs no turn: it settles at once.
                let cancelled = queued.cancelled.load(Ordering::Acquire) || queued.link.is_closed();
                // However many others are stuck, each peer has a turn.
                if cancelled || *active == 0 || (room > 0 && *active < MAX_ACTIVE_PER_PEER) {
                    *active += 1;
                    room = room.saturating_sub(1);
                    jobs.push(queued);
                } else {
                    left.push_back(queued);
                }
            }
            self.passed_over = left.len();
            *queue = left;
        }
        let busy = !jobs.is_empty();
        for queued in jobs {
            // A fault in one job is that room's failure, not the thread's.
            let planned = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| plan(&queued)));
            let (cursor, failure) = match planned {
                Ok(Ok(cursor)) => (cursor, None),
                Ok(Err(e)) => (Cursor::default(), Some(e)),
                Err(_) => {
                    let text = format!("room {}, chunk {}: planning panicked", queued.job.room, queued.job.chunk);
                    (Cursor::default(), Some(Error::new(NIXL_ERR_INTERNAL, text)))
                }
            };
            let active = Active {
                // A chunk with nothing to move is still told about, in one slice without spans.
                num_slices: cursor.num_slices().max(1),
                num_bytes: cursor.num_bytes(),
                queued,
                cursor,
                next_slice: 0,
                in_flight: 0,
                failure,
                landed_bytes: 0,
                num_descriptors: 0,
            };
            self.next_key += 1;
            self.active.insert(self.next_key, active);
            self.turns.push_back(self.next_key);
        }
        busy
    }

    /// Asks NIXL about every posted slice.
    fn settle_flights(&mut self) -> bool {
        let mut busy = false;
        let mut i = 0;
        while i < self.flights.len() {
            let status = self.flights[i].transfer.status();
            if status == TransferStatus::InProgress {
                i += 1;
                continue;
            }
            busy = true;
            let flight = self.flights.swap_remove(i);
            drop(flight.transfer);
            count(&self.shared.counters.transfers_settled);
            let Some(active) = self.active.get_mut(&flight.active) else { continue };
            active.in_flight -= 1;
            active.queued.link.in_flight.fetch_sub(1, Ordering::AcqRel);
            match status {
                TransferStatus::Failed(failure) => {
                    count(&self.shared.counters.transfers_failed);
                    let error = transfer_error(&self.shared, &active.queued, &failure);
                    active.failure.get_or_insert(error);
                }
                _ => {
                    active.landed_bytes += flight.num_bytes;
                    let room = active.queued.job.room;
                    if self.progressed.last() != Some(&room) {
                        self.progressed.push(room);
                    }
                }
            }
        }
        busy
    }

    /// Fails the rooms of slices that take too long. NIXL itself never says so.
    fn watch_flights(&mut self) {
        let oldest = &self.shared.oldest[self.index];
        if self.flights.is_empty() {
            oldest.posted.store(0, Ordering::Release);
            return;
        }
        let now = self.shared.now();
        if now.saturating_sub(self.last_watch) < WATCH_MS {
            return;
        }
        self.last_watch = now;
        self.passed_over = 0;
        if let Some(first) = self.flights.iter().min_by_key(|flight| flight.posted)
            && let Some(active) = self.active.get(&first.active)
        {
            oldest.room.store(active.queued.job.room, Ordering::Release);
            oldest.posted.store(first.posted.max(1), Ordering::Release);
        }
        let limit = self.shared.config.stall_timeout;
        let mut stalled = Vec::new();
        for flight in &mut self.flights {
            let took = now.saturating_sub(flight.posted);
            if !flight.stalled && took >= limit {
                flight.stalled = true;
                if let Some(active) = self.active.get(&flight.active) {
                    let Job { room, chunk, peer, .. } = &active.queued.job;
                    let text =
                        format!("room {room}, chunk {chunk}, peer {peer}: a transfer has not ended for {took} ms");
                    stalled.push((*room, Error::new(NIXL_ERR_XFER_STALLED, text)));
                }
            }
        }
        if stalled.is_empty() {
            return;
        }
        let mut tables = self.shared.tables();
        let before = tables.num_changes;
        for (room, cause) in stalled {
            tables.with_room(room, now, |machine, out| {
                if let Room::Sender(sender) = machine {
                    sender.stalled(cause, out);
                }
            });
        }
        self.shared.finish(tables, before);
    }

    /// Gives every chunk a turn to post one slice.
    fn post_round(&mut self) -> bool {
        let mut busy = false;
        for _ in 0..self.turns.len() {
            let Some(key) = self.turns.pop_front() else { break };
            let Some(active) = self.active.get_mut(&key) else { continue };
            if active.stopped() {
                if active.in_flight > 0 {
                    self.turns.push_back(key);
                    continue;
                }
                if let Some(active) = self.active.remove(&key) {
                    self.passed_over = 0;
                    if let Some(count) = self.active_of.get_mut(&active.queued.job.peer) {
                        *count -= 1;
                        if *count == 0 {
                            self.active_of.remove(&active.queued.job.peer);
                        }
                    }
                    self.settled.push(settle(active));
                    busy = true;
                }
                continue;
            }
            // Counted before the look at `closed`: whoever closes the link looks the other way round, so that no post
            // begins on a connection that is being forgotten.
            let before = active.queued.link.in_flight.fetch_add(1, Ordering::SeqCst);
            let mut posted = None;
            let landed_before = active.landed_bytes;
            if before < MAX_IN_FLIGHT_PER_PEER && !active.queued.link.closed.load(Ordering::SeqCst) {
                busy = true;
                posted = post(&self.shared, active, &mut self.slice);
            }
            match posted {
                Some(transfer) => {
                    active.in_flight += 1;
                    let (num_bytes, posted) = (self.slice.num_bytes, self.shared.now());
                    self.flights.push(Flight { transfer, active: key, num_bytes, posted, stalled: false });
                }
                None => {
                    // Whatever NIXL copied inside the post is progress too.
                    let room = active.queued.job.room;
                    if active.landed_bytes > landed_before && self.progressed.last() != Some(&room) {
                        self.progressed.push(room);
                    }
                    active.queued.link.in_flight.fetch_sub(1, Ordering::SeqCst);
                }
            }
            self.turns.push_back(key);
        }
        busy
    }

    /// Tells the rooms what has settled.
    fn report(&mut self) -> bool {
        if self.settled.is_empty() && self.progressed.is_empty() {
            return false;
        }
        let counters = &self.shared.counters;
        let mut tables = self.shared.tables();
        let before = tables.num_changes;
        let now = self.shared.now();
        for room in self.progressed.drain(..) {
            if let Some(Room::Sender(sender)) = tables.rooms.get_mut(&room).map(|entry| &mut entry.room) {
                sender.progressed(now);
            }
        }
        for (room, settled) in self.settled.drain(..) {
            count(&counters.chunks_sent);
            counters.bytes_sent.fetch_add(settled.num_bytes, Ordering::Relaxed);
            tables.with_room(room, now, |machine, out| {
                if let Room::Sender(sender) = machine {
                    sender.settled(settled, now, out);
                }
            });
        }
        self.shared.finish(tables, before);
        true
    }

    /// The engine goes away. A transfer in progress is never released: its bytes would still move, through a handle
    /// that is gone. So it is leaked, and with it the agent and its registrations.
    pub fn finish(mut self) {
        if !self.flights.is_empty() {
            log::warn!("{} transfers were still in progress: they and their agent are left behind", self.flights.len());
        }
        if !self.flights.is_empty() {
            std::mem::forget(self.shared.agent.clone());
        }
        for flight in self.flights.drain(..) {
            std::mem::forget(flight.transfer);
        }
    }
}

/// Posts the next slice. `Some`: it is in progress.
fn post(shared: &Shared, active: &mut Active, slice: &mut Slice) -> Option<Box<dyn Transfer>> {
    let number = active.next_slice;
    active.next_slice += 1;
    let job = &active.queued.job;
    let notification = encode(&Message::Landed {
        room: job.room,
        generation: job.generation,
        slice: number,
        num_slices: active.num_slices,
        chunk: LandedChunk {
            chunk: job.chunk,
            page_offset: job.page_offset,
            num_pages: job.pages.len() as u64,
            num_bytes: active.num_bytes,
            last: job.last,
        },
    });
    let agent = &active.queued.link.agent;
    slice.spans.clear();
    slice.num_bytes = 0;
    let posted = if fault::hit("post") {
        Err(Failure { status: FailureStatus::Backend, text: "the post was refused by an armed fault point".into() })
    } else if active.cursor.next(slice) {
        count(&shared.counters.transfers_posted);
        shared.agent.write(&Write {
            peer: agent,
            source_kind: slice.source_kind,
            destination_kind: slice.destination_kind,
            spans: &slice.spans,
            notification: &notification,
        })
    } else {
        shared.agent.notify(agent, &notification).map(|()| Posted::Done)
    };
    let num_descriptors = slice.spans.len() as u64;
    match posted {
        Ok(posted) => {
            active.num_descriptors += num_descriptors;
            shared.counters.descriptors_sent.fetch_add(num_descriptors, Ordering::Relaxed);
            match posted {
                Posted::Pending(transfer) => return Some(transfer),
                Posted::Done => {
                    active.landed_bytes += slice.num_bytes;
                    if num_descriptors > 0 {
                        count(&shared.counters.transfers_settled);
                    }
                }
            }
        }
        Err(failure) => {
            count(&shared.counters.transfers_failed);
            if num_descriptors > 0 {
                count(&shared.counters.transfers_settled);
            }
            let error = transfer_error(shared, &active.queued, &failure);
            active.failure.get_or_insert(error);
        }
    }
    None
}

/// The error of a failed transfer. NIXL's backend reports a peer that is gone like any other fault; a message to the
/// peer, which fails at once then, tells them apart.
fn transfer_error(shared: &Shared, queued: &QueuedJob, failure: &Failure) -> Error {
    let QueuedJob { job, link, .. } = queued;
    let ping = encode(&Message::Ping { sequence: shared.now() });
    let gone = link.is_closed() || shared.agent.notify(&link.agent, &ping).is_err();
    let code = if gone { NIXL_ERR_PEER_LOST } else { NIXL_ERR_XFER_FAILED };
    Error::new(code, format!("room {}, chunk {}, peer {}: {failure}", job.room, job.chunk, job.peer))
}

/// What becomes of a chunk of which nothing is in flight.
fn settle(active: Active) -> (u64, Settled) {
    let complete = active.next_slice >= active.num_slices;
    let Active { queued: QueuedJob { job, link, cancelled, .. }, failure, landed_bytes, num_descriptors, .. } = active;
    let lost =
        || Error::new(NIXL_ERR_PEER_LOST, format!("room {}, chunk {}: peer {} is gone", job.room, job.chunk, job.peer));
    let result = match failure {
        Some(failure) => Err(failure),
        None if !complete && link.is_closed() && !cancelled.load(Ordering::Acquire) => Err(lost()),
        None => Ok(complete),
    };
    (job.room, Settled { peer: job.peer, chunk: job.chunk, result, num_bytes: landed_bytes, num_descriptors })
}

/// From a chunk's indices to a cursor over spans.
fn plan(queued: &QueuedJob) -> Result<Cursor> {
    let QueuedJob { job, mapping, .. } = queued;
    assert!(!fault::hit("plan_panics"), "armed fault point");
    let Some(mapping) = mapping else {
        fail!(NIXL_ERR_PEER_LOST, "room {}: peer {} is gone", job.room, job.peer);
    };
    let mut parts = Vec::new();
    if !job.pages.is_empty() {
        let start = usize::try_from(job.page_offset).unwrap_or(usize::MAX);
        let end = start.saturating_add(job.pages.len());
        let Some(destination) = job.grant.pages.get(start..end) else {
            fail!(NIXL_ERR_PAGE_COUNT, "room {}: positions {start}..{end} of {}", job.room, job.grant.pages.len());
        };
        let mut merged: Vec<Run> = Vec::new();
        runs(&job.pages, destination, &mut merged)?;
        parts.push((mapping.kv.clone(), merged));
    }
    for (group, source) in job.states.iter() {
        let (Some((_, destination)), Some(pairs)) =
            (job.grant.states.iter().find(|(id, _)| id == group), mapping.state.get(group))
        else {
            fail!(NIXL_ERR_STATE_UNEXPECTED, "room {}: the receiver has no state group {group}", job.room);
        };
        let mut merged = Vec::new();
        runs(source, destination, &mut merged)?;
        parts.push((pairs.clone(), merged));
    }
    if let (Some(source), Some(destination)) = (job.aux, job.grant.aux) {
        let mut merged = Vec::new();
        runs(&[source], &[destination], &mut merged)?;
        parts.push((mapping.aux.clone(), merged));
    }
    Cursor::new(parts, LIMITS)
}
