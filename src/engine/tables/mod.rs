//! What an engine's mutex guards: rooms, peers, parked grants, queues. Pure: no NIXL, no lock, no thread, no clock; time
//! comes in as a value, and what must be done goes into queues that the threads empty.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::*;
use crate::metrics::{Counters, LineLimit, count};
use crate::protocol::{GrantAssembly, GrantBody, Hello, Message};
use crate::room::{Action, Job, Millis, PeerId, Room};

use super::Config;
use super::peers::{Link, Peer, Peers};
use calls::groups_of;

mod calls;
mod ended;
mod in_use;
mod inbox;
mod liveness;
mod outbox;
mod parking;
#[cfg(test)]
mod tests;

pub use calls::RecvRequest;
pub use ended::Ended;
pub use in_use::InUse;
pub use inbox::shortened;
pub use outbox::{Outbox, Outgoing};
pub use parking::{Parked, ParkedItem, Parking};

/// Chunks of a room that have not settled, and the first peer that granted it; 0: nobody has.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Pending {
    num: u64,
    peer: PeerId,
}

/// A room with what the engine remembers beside the machine.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The machine.
    pub room: Room,
    /// Destination memory to give back when it is quiesced.
    pub claim: Option<Arc<GrantBody>>,
    /// Set when the room has failed: the transfer threads post nothing more of it.
    pub cancelled: Arc<AtomicBool>,
    /// What maps onto what at each receiver, as of its grant: what is registered or connected later changes nothing.
    mappings: Mappings,
    ended: bool,
    quiesced: bool,
    pending: Pending,
}

/// By receiver: what of ours maps onto what of its.
type Mappings = BTreeMap<PeerId, Option<Arc<crate::layout::Mapping>>>;

/// A grant of which fragments are missing.
#[derive(Debug, Clone)]
pub struct Assembly {
    /// Of which life of the room.
    pub generation: u64,
    /// When it is dropped.
    pub expires: Millis,
    /// What has come.
    pub fragments: GrantAssembly,
}

/// What is kept of a failed room that was released while receivers had still to be told.
#[derive(Debug, Clone, Hash)]
pub struct Tombstone {
    /// Why it failed.
    pub cause: Error,
    /// When it is dropped.
    pub expires: Millis,
    /// The receivers that have been told. Another grant of one of these is for the room's next life.
    pub told: Vec<PeerId>,
}

/// What a sender must be told of a failed room that was released before it had connected back.
#[derive(Debug, Clone, Hash)]
pub struct Unsaid {
    peer: PeerId,
    room: u64,
    generation: u64,
    message: Message,
    expires: Millis,
}

/// A chunk on its way to the transfer threads.
#[derive(Debug, Clone)]
pub struct QueuedJob {
    /// The chunk.
    pub job: Job,
    /// The peer.
    pub link: Arc<Link>,
    /// What maps onto what.
    pub mapping: Option<Arc<crate::layout::Mapping>>,
    /// Its room has failed: post nothing more of it.
    pub cancelled: Arc<AtomicBool>,
}

/// Most control messages to one peer that wait to be sent. One on top is dropped, as if the network had lost it; a grant
/// is dropped, or sent, as a whole.
const MAX_OUTGOING_PER_PEER: usize = 1 << 16;
/// Most words that wait for their peer to connect back. The oldest goes first: its room waits for a grant then.
const MAX_UNSAID: usize = 1 << 14;
/// Peers whose goodbye is remembered.
const MAX_PARTED: usize = 1 << 10;
/// Rooms whose success is remembered after their release, for senders that missed our confirmation.
const MAX_DELIVERED: usize = 1 << 16;

/// Who an engine is.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Its name.
    pub name: String,
    /// This life of it.
    pub instance: [u8; 16],
}

/// The engine's state under its mutex. It is never held over a call of NIXL. What is walked through has an order, so
/// that a simulation can be replayed.
#[derive(Clone)]
pub struct Tables {
    /// Who we are.
    pub identity: Identity,
    /// The engine's configuration.
    pub config: Arc<Config>,
    /// The engine's counters.
    pub counters: Arc<Counters>,
    /// Open rooms, ended ones included until they are released.
    pub rooms: BTreeMap<u64, Entry>,
    /// What has come for rooms that are not open.
    pub parking: Parking,
    /// Why rooms failed that were released before every receiver had granted: a grant that comes late is answered with
    /// it, until the room is opened again or the time is over.
    pub tombstones: BTreeMap<u64, Tombstone>,
    /// What senders must be told as soon as they have connected back, oldest first.
    pub unsaid: VecDeque<Unsaid>,
    /// Grants of which fragments are missing.
    pub assemblies: BTreeMap<(PeerId, u64), Assembly>,
    /// The peers.
    pub peers: Peers,
    /// Peers that have missed two heartbeats, as of the last look at the clock.
    pub suspects: Vec<PeerId>,
    /// Goodbyes to peers that may have missed them, the latest ones.
    parted: VecDeque<Outgoing>,
    /// Connections that close as soon as nothing is in flight on them.
    pub closing: Vec<(Arc<Link>, Error)>,
    /// Control messages to send.
    pub outbox: Outbox,
    /// Chunks to send, per transfer thread.
    pub jobs: Vec<VecDeque<QueuedJob>>,
    /// Destination memory in use.
    pub in_use: InUse,
    /// Chunks accepted and not settled.
    pub num_pending: u64,
    /// The same by the first peer that granted the room; 0: nobody has yet.
    pending_by_peer: BTreeMap<PeerId, u64>,
    /// Rooms that have not ended.
    pub num_active: usize,
    /// Rooms that are not quiesced.
    pub num_unquiesced: usize,
    /// Counts the changes of our region table.
    pub revision: u64,
    /// The generation of the next room that we open as a receiver.
    pub next_generation: u64,
    /// Generations of rooms that have succeeded here, the latest ones.
    delivered: HashSet<u64>,
    delivered_order: VecDeque<u64>,
    /// Keeps a peer's loss from filling the log.
    failure_lines: LineLimit,
    /// No new work is accepted.
    pub shut_down: bool,
    /// Grows whenever a room ends or is quiesced; `wait` looks at it.
    pub num_changes: u64,
}

impl Tables {
    /// Nothing open.
    pub fn new(identity: Identity, config: Arc<Config>, counters: Arc<Counters>, first_generation: u64) -> Self {
        let num_workers = config.num_workers;
        Self {
            identity,
            config,
            counters,
            rooms: BTreeMap::new(),
            parking: Parking::default(),
            tombstones: BTreeMap::new(),
            unsaid: VecDeque::new(),
            assemblies: BTreeMap::new(),
            peers: Peers::default(),
            suspects: Vec::new(),
            parted: VecDeque::new(),
            closing: Vec::new(),
            outbox: Outbox::default(),
            jobs: (0..num_workers).map(|_| VecDeque::new()).collect(),
            in_use: InUse::default(),
            num_pending: 0,
            pending_by_peer: BTreeMap::new(),
            num_active: 0,
            num_unquiesced: 0,
            revision: 0,
            next_generation: first_generation,
            delivered: HashSet::new(),
            delivered_order: VecDeque::new(),
            failure_lines: LineLimit::default(),
            shut_down: false,
            num_changes: 0,
        }
    }

    /// Adds a room and carries out what opening it led to.
    pub fn open(
        &mut self,
        id: u64,
        room: Room,
        claim: Option<Arc<GrantBody>>,
        mappings: Mappings,
        out: Vec<Action>,
        now: Millis,
    ) {
        count(&self.counters.rooms_opened);
        self.num_active += 1;
        self.num_unquiesced += 1;
        let cancelled = Arc::new(AtomicBool::new(false));
        self.rooms.insert(
            id,
            Entry { room, claim, cancelled, mappings, ended: false, quiesced: false, pending: Pending::default() },
        );
        self.carry_out(out);
        self.after(id, now);
    }

    /// Gives an event to a room, carries out its actions and keeps the books. `None`: no such room.
    pub fn with_room<T>(
        &mut self,
        id: u64,
        now: Millis,
        event: impl FnOnce(&mut Room, &mut Vec<Action>) -> T,
    ) -> Option<T> {
        let entry = self.rooms.get_mut(&id)?;
        let mut out = Vec::new();
        let result = event(&mut entry.room, &mut out);
        self.carry_out(out);
        self.after(id, now);
        Some(result)
    }

    /// Gives the same event to every room that `filter` picks.
    pub fn with_rooms(
        &mut self,
        now: Millis,
        filter: impl Fn(&Room) -> bool,
        mut event: impl FnMut(&mut Room, &mut Vec<Action>),
    ) {
        let ids: Vec<u64> = self.rooms.iter().filter(|(_, entry)| filter(&entry.room)).map(|(id, _)| *id).collect();
        for id in ids {
            self.with_room(id, now, &mut event);
        }
    }

    /// Books what an event changed in a room.
    fn after(&mut self, id: u64, now: Millis) {
        let Some(entry) = self.rooms.get_mut(&id) else { return };
        if let Room::Sender(sender) = &entry.room {
            let pending =
                Pending { num: sender.num_pending(), peer: sender.lives().next().map_or(0, |(peer, _)| peer) };
            let before = std::mem::replace(&mut entry.pending, pending);
            self.num_pending = self.num_pending - before.num + pending.num;
            if before != pending {
                *self.pending_by_peer.entry(pending.peer).or_default() += pending.num;
                *self.pending_by_peer.entry(before.peer).or_default() -= before.num;
                for peer in [before.peer, pending.peer] {
                    if self.pending_by_peer.get(&peer) == Some(&0) {
                        self.pending_by_peer.remove(&peer);
                    }
                }
            }
        }
        if !entry.ended && entry.room.state().ended() {
            entry.ended = true;
            self.num_active -= 1;
            self.num_changes += 1;
            match entry.room.view().cause {
                Some(cause) => {
                    entry.cancelled.store(true, Ordering::Release);
                    count(&self.counters.rooms_failed);
                    let peer = entry.room.peers().next().unwrap_or(0);
                    if self.failure_lines.admits((peer, cause.code), now) {
                        log::info!("room {id} failed: {cause}");
                    }
                }
                None => {
                    count(&self.counters.rooms_succeeded);
                    if let Room::Receiver(receiver) = &entry.room {
                        let generation = receiver.generation();
                        self.delivered.insert(generation);
                        self.delivered_order.push_back(generation);
                    }
                }
            }
        }
        if !entry.quiesced && entry.room.quiesced() {
            entry.quiesced = true;
            self.num_unquiesced -= 1;
            self.num_changes += 1;
            if let Some(claim) = entry.claim.take() {
                self.in_use.give_back(&claim);
            }
        }
        while self.delivered_order.len() > MAX_DELIVERED {
            if let Some(oldest) = self.delivered_order.pop_front() {
                self.delivered.remove(&oldest);
            }
        }
    }

    /// Forgets a room that has ended and is quiesced.
    pub fn release(&mut self, id: u64, now: Millis) -> Result<()> {
        if !self.rooms.contains_key(&id)
            && let Some(cause) = self.parking.failure(id).cloned()
        {
            // Given up by a receiver before we opened it: poll shows it as failed.
            for item in self.parking.take(id) {
                if !item.is_abort() {
                    self.refuse(item.peer, id, item.generation, cause.clone());
                }
            }
            return Ok(());
        }
        let Some(entry) = self.rooms.get(&id) else { fail!(NIXL_ERR_ROOM_UNKNOWN, "room {id} is not open here") };
        if !entry.ended {
            fail!(
                NIXL_ERR_ROOM_ACTIVE,
                "room {id} has not ended ({:?}): wait until poll says that it is quiesced, or abort it",
                entry.room.state()
            );
        }
        if !entry.quiesced {
            let view = entry.room.view();
            fail!(
                NIXL_ERR_NOT_QUIESCED,
                "room {id}: {} chunks in flight, {} senders have not confirmed that they drained",
                view.num_pending_chunks,
                view.num_pending_senders
            );
        }
        let sender = match self.rooms.remove(&id) {
            Some(Entry { room: Room::Sender(sender), .. }) => sender,
            Some(Entry { room: Room::Receiver(receiver), .. }) => {
                let (generation, expires) = (receiver.generation(), now.saturating_add(self.config.grant_timeout));
                for (peer, message) in receiver.unsaid() {
                    self.unsaid.push_back(Unsaid { peer, room: id, generation, message, expires });
                }
                while self.unsaid.len() > MAX_UNSAID {
                    self.unsaid.pop_front();
                }
                return Ok(());
            }
            None => return Ok(()),
        };
        let cause = sender.view().cause;
        for (peer, generation) in sender.lives() {
            self.ended(peer, generation, cause.as_ref());
        }
        if let Some((cause, told)) = sender.owes_an_answer()
            && self.tombstones.len() < self.config.max_rooms
        {
            let expires = now.saturating_add(self.config.grant_timeout);
            self.tombstones.insert(id, Tombstone { cause: cause.clone(), expires, told });
        }
        Ok(())
    }

    /// Remembers that a life of a room at a receiver will never be sent anything again: its grant may come once more.
    fn ended(&mut self, peer: PeerId, generation: u64, cause: Option<&Error>) {
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.ended.insert(generation, cause);
        }
    }

    /// The lowest generation of ours that is not quiesced, or the next one. Grants of lower ones are void.
    fn oldest_generation(&self) -> u64 {
        let live = self.rooms.values().filter_map(|entry| match &entry.room {
            Room::Receiver(receiver) if !receiver.quiesced() || receiver.owes_word() => Some(receiver.generation()),
            _ => None,
        });
        live.chain(self.unsaid.iter().map(|unsaid| unsaid.generation)).min().unwrap_or(self.next_generation)
    }

    /// A hello to a peer: which of its lives we mean, and which table of it we hold.
    fn hello(&self, peer: &Peer, reply: bool) -> Message {
        Message::Hello(Hello {
            revision: self.revision,
            known_revision: peer.card.revision,
            known_instance: peer.card.instance,
            connection: peer.connection,
            known_connection: peer.heard_connection,
            reply,
            oldest_generation: self.oldest_generation(),
        })
    }

    /// Carries out actions: queues messages and jobs. Nothing blocks, nothing calls NIXL.
    fn carry_out(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Tell(peer, message) => self.tell(peer, message),
                Action::Grant { peer, room, generation, body } => {
                    // It is asked for again when it does not come.
                    if self.outbox.len_to(peer) >= MAX_OUTGOING_PER_PEER {
                        count(&self.counters.messages_dropped);
                        continue;
                    }
                    let connection = self.peers.get(peer).map_or(0, |peer| peer.connection);
                    let of = (self.revision, connection);
                    for message in crate::protocol::split_grant(room, generation, of, &body) {
                        self.tell(peer, message);
                    }
                }
                Action::Transfer(job) => {
                    // A job to a peer that has just left settles as a failure in the transfer thread.
                    let link = self.peers.get(job.peer).map_or_else(|_| Link::gone(job.peer), |peer| peer.link.clone());
                    let entry = self.rooms.get(&job.room);
                    let mapping = entry.and_then(|entry| entry.mappings.get(&job.peer).cloned()).flatten();
                    let cancelled = entry.map_or_else(Arc::default, |entry| entry.cancelled.clone());
                    let lane = (job.peer as usize) % self.jobs.len();
                    self.jobs[lane].push_back(QueuedJob { job, link, mapping, cancelled });
                }
            }
        }
    }

    /// Queues a message. To a peer that is gone, or takes nothing, it is dropped.
    pub fn tell(&mut self, peer: PeerId, message: Message) {
        let Ok(entry) = self.peers.get(peer) else { return };
        if self.outbox.len_to(peer) >= MAX_OUTGOING_PER_PEER && !matches!(message, Message::Grant { .. }) {
            count(&self.counters.messages_dropped);
            return;
        }
        self.outbox.push(Outgoing { link: entry.link.clone(), message });
    }
}
