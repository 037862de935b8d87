//! What an engine's mutex guards: rooms, parked grants, queues, and which of our memory is promised to whom.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::error::*;
use crate::layout::RegionTable;
use crate::metrics::{Counters, count};
use crate::protocol::{GrantAssembly, GrantBody, Message};
use crate::room::{Action, Job, Millis, PeerId, Room};

use super::peers::{Link, Peers};

/// Destination memory that rooms hold until they are quiesced.
#[derive(Debug, Default)]
pub struct InUse {
    pages: HashMap<i32, u64>,
    aux: HashMap<i32, u64>,
    states: HashMap<(u32, i32), u64>,
}

impl InUse {
    /// Claims everything that a grant names, or nothing.
    pub fn claim(&mut self, room: u64, grant: &GrantBody) -> Result<()> {
        if let Some((page, owner)) = grant.pages.iter().find_map(|page| Some((page, self.pages.get(page)?))) {
            fail!(NIXL_ERR_PAGE_IN_USE, "room {room}: page {page} belongs to room {owner}, which is not quiesced");
        }
        if let Some((aux, owner)) = grant.aux.and_then(|aux| Some((aux, self.aux.get(&aux)?))) {
            fail!(NIXL_ERR_AUX_IN_USE, "room {room}: aux slot {aux} belongs to room {owner}, which is not quiesced");
        }
        for (group, slots) in &grant.states {
            if let Some((slot, owner)) = slots.iter().find_map(|slot| Some((slot, self.states.get(&(*group, *slot))?)))
            {
                fail!(
                    NIXL_ERR_STATE_IN_USE,
                    "room {room}: slot {slot} of state group {group} belongs to room {owner}, which is not quiesced"
                );
            }
        }
        self.pages.extend(grant.pages.iter().map(|page| (*page, room)));
        self.aux.extend(grant.aux.map(|aux| (aux, room)));
        for (group, slots) in &grant.states {
            self.states.extend(slots.iter().map(|slot| ((*group, *slot), room)));
        }
        Ok(())
    }

    /// Gives back what [`InUse::claim`] took.
    pub fn give_back(&mut self, grant: &GrantBody) {
        for page in &grant.pages {
            self.pages.remove(page);
        }
        if let Some(aux) = grant.aux {
            self.aux.remove(&aux);
        }
        for (group, slots) in &grant.states {
            for slot in slots {
                self.states.remove(&(*group, *slot));
            }
        }
    }
}

/// A room with what the engine remembers beside the machine.
#[derive(Debug)]
pub struct Entry {
    /// The machine.
    pub room: Room,
    /// Destination memory to give back when it is quiesced.
    pub claim: Option<Arc<GrantBody>>,
    ended: bool,
    quiesced: bool,
    pending: u64,
}

/// What has come for a room that we have not opened.
#[derive(Debug)]
pub enum Parked {
    /// A grant.
    Grant(Arc<GrantBody>),
    /// The receiver gave the room up again, after this grant.
    Aborted(Error, Arc<GrantBody>),
}

impl Parked {
    fn body(&self) -> &Arc<GrantBody> {
        match self {
            Parked::Grant(body) | Parked::Aborted(_, body) => body,
        }
    }
}

/// A parked message.
#[derive(Debug)]
pub struct ParkedItem {
    /// From whom.
    pub peer: PeerId,
    /// Of which life of the room.
    pub generation: u64,
    /// What.
    pub item: Parked,
    /// When it is dropped.
    pub expires: Millis,
}

/// A grant of which fragments are missing.
#[derive(Debug)]
pub struct Assembly {
    /// Of which life of the room.
    pub generation: u64,
    /// When it is dropped.
    pub expires: Millis,
    /// What has come.
    pub fragments: GrantAssembly,
}

/// What is kept of a failed room that was released while receivers had still to be told.
#[derive(Debug)]
pub struct Tombstone {
    /// Why it failed.
    pub cause: Error,
    /// When it is dropped.
    pub expires: Millis,
    /// How many receivers have been told.
    pub num_told: u32,
}

/// A control message on its way out.
#[derive(Debug)]
pub struct Outgoing {
    /// To whom.
    pub link: Arc<Link>,
    /// What.
    pub message: Message,
}

/// A chunk on its way to the transfer threads.
#[derive(Debug)]
pub struct QueuedJob {
    /// The chunk.
    pub job: Job,
    /// The peer.
    pub link: Arc<Link>,
    /// What maps onto what.
    pub mapping: Option<Arc<crate::layout::Mapping>>,
}

/// The engine's state under its mutex. It is never held over a call of NIXL.
pub struct Tables {
    /// Open rooms, ended ones included until they are released.
    pub rooms: HashMap<u64, Entry>,
    /// What has come for rooms that are not open.
    pub parked: HashMap<u64, Vec<ParkedItem>>,
    /// How many items are parked.
    pub num_parked: usize,
    /// Why rooms failed that were released before every receiver had granted: a grant that comes late is answered with
    /// it, until the room is opened again or the time is over.
    pub tombstones: HashMap<u64, Tombstone>,
    /// Grants of which fragments are missing.
    pub assemblies: HashMap<(PeerId, u64), Assembly>,
    /// The peers.
    pub peers: Peers,
    /// Peers that have missed two heartbeats, as of the last look at the clock.
    pub suspects: Vec<PeerId>,
    /// Connections that close as soon as nothing is in flight on them.
    pub closing: Vec<(Arc<Link>, Error)>,
    /// Control messages to send.
    pub outbox: VecDeque<Outgoing>,
    /// Chunks to send, per transfer thread.
    pub jobs: Vec<VecDeque<QueuedJob>>,
    /// Destination memory in use.
    pub in_use: InUse,
    /// Chunks accepted and not settled.
    pub num_pending: u64,
    /// Rooms that have not ended.
    pub num_active: usize,
    /// Rooms that are not quiesced.
    pub num_unquiesced: usize,
    /// Counts the changes of our region table.
    pub revision: u64,
    /// The generation of the next room that we open as a receiver.
    pub next_generation: u64,
    /// No new work is accepted.
    pub shut_down: bool,
    /// Grows whenever a room ends or is quiesced; `wait` looks at it.
    pub num_changes: u64,
}

impl Tables {
    /// Nothing open.
    pub fn new(num_workers: usize, first_generation: u64) -> Self {
        Self {
            rooms: HashMap::new(),
            parked: HashMap::new(),
            num_parked: 0,
            tombstones: HashMap::new(),
            assemblies: HashMap::new(),
            peers: Peers::default(),
            suspects: Vec::new(),
            closing: Vec::new(),
            outbox: VecDeque::new(),
            jobs: (0..num_workers).map(|_| VecDeque::new()).collect(),
            in_use: InUse::default(),
            num_pending: 0,
            num_active: 0,
            num_unquiesced: 0,
            revision: 0,
            next_generation: first_generation,
            shut_down: false,
            num_changes: 0,
        }
    }

    /// Adds a room and carries out what opening it led to.
    pub fn open(&mut self, id: u64, room: Room, claim: Option<Arc<GrantBody>>, out: Vec<Action>, counters: &Counters) {
        count(&counters.rooms_opened);
        self.num_active += 1;
        self.num_unquiesced += 1;
        self.rooms.insert(id, Entry { room, claim, ended: false, quiesced: false, pending: 0 });
        self.carry_out(out);
        self.after(id, counters);
    }

    /// Gives an event to a room, carries out its actions and keeps the books. `None`: no such room.
    pub fn with_room<T>(
        &mut self,
        id: u64,
        counters: &Counters,
        event: impl FnOnce(&mut Room, &mut Vec<Action>) -> T,
    ) -> Option<T> {
        let entry = self.rooms.get_mut(&id)?;
        let mut out = Vec::new();
        let result = event(&mut entry.room, &mut out);
        self.carry_out(out);
        self.after(id, counters);
        Some(result)
    }

    /// Gives the same event to every room that `filter` picks.
    pub fn with_rooms(
        &mut self,
        counters: &Counters,
        filter: impl Fn(&Room) -> bool,
        mut event: impl FnMut(&mut Room, &mut Vec<Action>),
    ) {
        let ids: Vec<u64> = self.rooms.iter().filter(|(_, entry)| filter(&entry.room)).map(|(id, _)| *id).collect();
        for id in ids {
            self.with_room(id, counters, &mut event);
        }
    }

    /// Books what an event changed in a room.
    fn after(&mut self, id: u64, counters: &Counters) {
        let Some(entry) = self.rooms.get_mut(&id) else { return };
        let pending = match &entry.room {
            Room::Sender(sender) => sender.num_pending(),
            Room::Receiver(_) => 0,
        };
        self.num_pending = self.num_pending - entry.pending + pending;
        entry.pending = pending;
        if !entry.ended && entry.room.state().ended() {
            entry.ended = true;
            self.num_active -= 1;
            self.num_changes += 1;
            let view = entry.room.view();
            match view.cause {
                Some(cause) => {
                    count(&counters.rooms_failed);
                    log::info!("room {id} failed: {cause}");
                }
                None => count(&counters.rooms_succeeded),
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
    }

    /// Forgets a room that has ended and is quiesced. `keep_until` is when its tombstone, if it needs one, goes too.
    pub fn release(&mut self, id: u64, keep_until: Millis, limit: usize) -> Result<()> {
        let given_up = |items: &Vec<ParkedItem>| items.iter().all(|item| matches!(item.item, Parked::Aborted(..)));
        if !self.rooms.contains_key(&id) && self.parked.get(&id).is_some_and(given_up) {
            // Given up by its receiver before we opened it: poll shows it as failed.
            self.unpark(id);
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
        if let Some(Entry { room: Room::Sender(sender), .. }) = self.rooms.remove(&id)
            && let Some((cause, num_told)) = sender.owes_an_answer()
            && self.tombstones.len() < limit
        {
            self.tombstones.insert(id, Tombstone { cause: cause.clone(), expires: keep_until, num_told });
        }
        Ok(())
    }

    /// Carries out actions: queues messages and jobs. Nothing blocks, nothing calls NIXL.
    fn carry_out(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Tell(peer, message) => self.tell(peer, message),
                Action::Grant { peer, room, generation, body } => {
                    for message in crate::protocol::split_grant(room, generation, self.revision, &body) {
                        self.tell(peer, message);
                    }
                }
                Action::Transfer(job) => {
                    // A job to a peer that has just left settles as a failure in the transfer thread.
                    let (link, mapping) = match self.peers.get(job.peer) {
                        Ok(peer) => (peer.link.clone(), peer.to_peer.clone()),
                        Err(_) => (Link::gone(job.peer), None),
                    };
                    let lane = (job.peer as usize) % self.jobs.len();
                    self.jobs[lane].push_back(QueuedJob { job, link, mapping });
                }
            }
        }
    }

    /// Queues a message. To a peer that is gone it is dropped.
    pub fn tell(&mut self, peer: PeerId, message: Message) {
        if let Ok(peer) = self.peers.get(peer) {
            self.outbox.push_back(Outgoing { link: peer.link.clone(), message });
        }
    }

    /// Parks something for a room that is not open. False: the limit is reached.
    pub fn park(&mut self, room: u64, item: ParkedItem, limit: usize) -> bool {
        let items = self.parked.entry(room).or_default();
        if items.iter().any(|old| old.peer == item.peer && old.generation > item.generation) {
            return true;
        }
        let before = items.len();
        items.retain(|old| old.peer != item.peer);
        self.num_parked -= before - items.len();
        if self.num_parked >= limit {
            self.evict_parked_abort();
        }
        let items = self.parked.entry(room).or_default();
        if self.num_parked >= limit {
            if items.is_empty() {
                self.parked.remove(&room);
            }
            return false;
        }
        items.push(item);
        self.num_parked += 1;
        true
    }

    /// Makes room by dropping a notice that a room was given up before we opened it.
    fn evict_parked_abort(&mut self) {
        let aborted = |item: &ParkedItem| matches!(item.item, Parked::Aborted(..));
        let Some(room) = self.parked.iter().find(|(_, items)| items.iter().any(aborted)).map(|(room, _)| *room) else {
            return;
        };
        if let Some(items) = self.parked.get_mut(&room) {
            let before = items.len();
            items.retain(|item| !aborted(item));
            self.num_parked -= before - items.len();
            if items.is_empty() {
                self.parked.remove(&room);
            }
        }
    }

    /// The grant of exactly this life of a room that is parked.
    pub fn parked_grant(&self, peer: PeerId, room: u64, generation: u64) -> Option<Arc<GrantBody>> {
        let items = self.parked.get(&room)?;
        let item = items.iter().find(|item| item.peer == peer && item.generation == generation)?;
        Some(item.item.body().clone())
    }

    /// Takes what is parked for a room.
    pub fn unpark(&mut self, room: u64) -> Vec<ParkedItem> {
        let items = self.parked.remove(&room).unwrap_or_default();
        self.num_parked -= items.len();
        items
    }
}

/// Checks what a grant names against the receiver's regions as we know them.
pub fn check_grant(room: u64, grant: &GrantBody, table: &RegionTable) -> Result<()> {
    let outside = |index: &&i32, len: u64| u64::try_from(**index).map_or(true, |index| index >= len);
    if let Some(page) = grant.pages.iter().find(|page| outside(page, table.num_pages())) {
        fail!(NIXL_ERR_PROTOCOL, "room {room}: the receiver granted page {page} of {}", table.num_pages());
    }
    if let Some(aux) = grant.aux.filter(|aux| outside(&aux, table.num_aux_slots())) {
        fail!(NIXL_ERR_PROTOCOL, "room {room}: the receiver granted aux slot {aux} of {}", table.num_aux_slots());
    }
    for (group, slots) in &grant.states {
        let len = table.num_state_slots(*group).unwrap_or(0);
        if let Some(slot) = slots.iter().find(|slot| outside(slot, len)) {
            fail!(NIXL_ERR_PROTOCOL, "room {room}: the receiver granted slot {slot} of {len} in state group {group}");
        }
    }
    Ok(())
}
