//! The calls on rooms.

use super::super::peers::Standing;
use super::*;
use crate::layout::Mapping;
use crate::memory::Published;
use crate::protocol::MAX_GRANT_INDICES;
use crate::room::{Chunk, Expectation, Receiver, Sender, SenderLimits, State, StateIndices, View};

/// Of the queue every so many-th place is kept for other peers when one has taken all the rest.
const RESERVED: u64 = 4;
/// A queue with fewer places is not shared out.
const MIN_SHARED: u64 = 64;

/// A room that the decode side opens.
#[derive(Debug, Clone)]
pub struct RecvRequest {
    /// The room.
    pub room: u64,
    /// The sending peers.
    pub senders: Vec<PeerId>,
    /// Destination pages.
    pub pages: Vec<i32>,
    /// Destination aux slot.
    pub aux: Option<i32>,
    /// The sender that fills it; `None`: the first.
    pub aux_sender: Option<PeerId>,
    /// Destination state slots.
    pub states: Vec<StateIndices>,
    /// Decode engines that each sender fills for this room.
    pub num_receivers: u32,
    /// How long the room may go without progress; `None`: the engine's.
    pub timeout: Option<Millis>,
}

/// Refuses a room with more indices than a grant can hold.
fn check_num_indices(request: &RecvRequest) -> Result<()> {
    let num_indices = request.states.iter().fold(request.pages.len(), |sum, (_, slots)| sum + slots.len());
    if num_indices as u64 > MAX_GRANT_INDICES {
        let room = request.room;
        fail!(NIXL_ERR_INVALID_ARGUMENT, "room {room}: {num_indices} indices, the most is {MAX_GRANT_INDICES}");
    }
    Ok(())
}

/// Refuses an aux slot where no aux is, or outside it.
fn check_aux(room: u64, aux: i32, published: &Published) -> Result<()> {
    if !published.table.has_aux() {
        fail!(NIXL_ERR_AUX_UNEXPECTED, "room {room}: aux slot {aux}, but no aux region is registered");
    }
    check_indices(NIXL_ERR_AUX_OUT_OF_RANGE, room, &"aux_index", &[aux], published.table.num_aux_slots())
}

/// Refuses an index outside `0..len`.
fn check_indices(code: i32, room: u64, what: &dyn std::fmt::Display, indices: &[i32], len: u64) -> Result<()> {
    for (i, &index) in indices.iter().enumerate() {
        if u64::try_from(index).map_or(true, |index| index >= len) {
            fail_with!(code, "room {room}: {what}[{i}] = {index} is not one of the {len} from 0 on");
        }
    }
    Ok(())
}

/// Refuses an index that is listed twice.
fn check_distinct(code: i32, room: u64, what: &dyn std::fmt::Display, indices: &[i32]) -> Result<()> {
    let mut seen = HashSet::with_capacity(indices.len());
    for (i, index) in indices.iter().enumerate() {
        if !seen.insert(index) {
            fail_with!(code, "room {room}: {what}[{i}] = {index} is listed twice");
        }
    }
    Ok(())
}

/// Checks state indices against our regions.
fn check_states(room: u64, states: &[StateIndices], published: &Published, distinct: bool) -> Result<()> {
    for (i, (group, slots)) in states.iter().enumerate() {
        if states[..i].iter().any(|(other, _)| other == group) {
            fail!(NIXL_ERR_STATE_UNEXPECTED, "room {room}: state group {group} is listed twice");
        }
        let Some(len) = published.table.num_state_slots(*group) else {
            fail!(NIXL_ERR_STATE_UNEXPECTED, "room {room}: no region of state group {group} is registered");
        };
        let what = format!("state group {group} indices");
        check_indices(NIXL_ERR_STATE_OUT_OF_RANGE, room, &what, slots, len)?;
        if distinct {
            check_distinct(NIXL_ERR_STATE_IN_USE, room, &what, slots)?;
        }
    }
    Ok(())
}

impl RecvRequest {
    /// What can be checked of it without an engine.
    pub fn check(&self) -> Result<()> {
        check_num_indices(self)?;
        check_distinct(NIXL_ERR_PAGE_DUPLICATE, self.room, &"pages", &self.pages)
    }
}

impl Tables {
    /// Opens a room as its receiver and grants it to the senders. `published` is our region table.
    pub fn recv(&mut self, request: RecvRequest, published: &Published, now: Millis) -> Result<()> {
        let room = request.room;
        check_indices(NIXL_ERR_PAGE_OUT_OF_RANGE, room, &"pages", &request.pages, published.table.num_pages())?;
        if let Some(aux) = request.aux {
            check_aux(room, aux, published)?;
        }
        check_states(room, &request.states, published, true)?;
        if self.rooms.contains_key(&room) {
            fail!(NIXL_ERR_ROOM_IN_USE, "room {room} is open here already");
        }
        self.check_num_rooms()?;
        let expectations = expect(self, published, &request)?;
        let claim = Arc::new(GrantBody {
            pages: request.pages,
            aux: request.aux,
            aux_owner: true,
            states: request.states,
            num_receivers: request.num_receivers,
        });
        self.in_use.claim(room, &claim)?;
        // Who would take it for the end of this life must not hear of the end of the last one any more.
        self.unsaid.retain(|unsaid| unsaid.room != room);
        let generation = self.next_generation;
        self.next_generation += 1;
        let mut out = Vec::new();
        let timeout = request.timeout.unwrap_or(self.config.room_timeout);
        let connect_timeout = self.config.connect_timeout;
        let receiver = Receiver::new(room, generation, expectations, timeout, connect_timeout, now, &mut out);
        self.open(room, Room::Receiver(receiver), Some(claim), Mappings::new(), out, now);
        for item in self.parking.take(room) {
            if !item.is_abort() {
                let cause = self.is_receiver(room);
                self.refuse(item.peer, room, item.generation, cause);
            }
        }
        Ok(())
    }

    /// Checks a chunk and queues it. Opens the room with its first chunk.
    pub fn send_chunk(&mut self, room: u64, chunk: Chunk, published: &Published, now: Millis) -> Result<()> {
        check_indices(NIXL_ERR_PAGE_OUT_OF_RANGE, room, &"pages", &chunk.pages, published.table.num_pages())?;
        if let Some(aux) = chunk.aux {
            check_aux(room, aux, published)?;
            if chunk.no_aux {
                fail!(NIXL_ERR_AUX_UNEXPECTED, "room {room}: aux slot {aux} together with NIXLKV_CHUNK_NO_AUX");
            }
        }
        check_states(room, &chunk.states, published, false)?;
        self.check_queue(room)?;
        match self.rooms.get(&room).map(|entry| &entry.room) {
            Some(Room::Receiver(_)) => fail!(NIXL_ERR_ROOM_IN_USE, "room {room} is open here as a receiver"),
            Some(Room::Sender(_)) => {
                let sent = self.with_room(room, now, |machine, out| match machine {
                    Room::Sender(sender) => sender.chunk(chunk, now, out),
                    Room::Receiver(_) => Ok(()),
                });
                sent.unwrap_or(Ok(()))
            }
            None => {
                let mut out = Vec::new();
                let mut sender = self.draft_sender(published, room, now, &mut out)?;
                // What was parked can have failed the room already: then it opens as failed, and poll tells why.
                let failed = sender.state() == State::Failed;
                let sent = sender.chunk(chunk, now, &mut out);
                if !failed {
                    sent.clone()?;
                }
                let mappings = mappings_of(&self.parking.take(room));
                self.tombstones.remove(&room);
                self.open(room, Room::Sender(sender), None, mappings, out, now);
                sent
            }
        }
    }

    /// Refuses a chunk when the queue is full, or when the room's peer has taken as much of it as one of several may.
    fn check_queue(&self, room: u64) -> Result<()> {
        let depth = self.config.queue_depth;
        if self.num_pending >= depth {
            fail!(NIXL_ERR_QUEUE_FULL, "{} chunks have not settled, the queue depth is {depth}", self.num_pending);
        }
        let share = if depth < MIN_SHARED { depth } else { depth - depth / RESERVED };
        if self.num_pending < share {
            return Ok(());
        }
        let whose = match self.rooms.get(&room) {
            Some(entry) => entry.room.peers().next(),
            None => self.parking.get(room).first().map(|item| item.peer),
        };
        let pending = self.pending_by_peer.get(&whose.unwrap_or(0)).copied().unwrap_or(0);
        let receivers = self.peers.iter().filter(|peer| peer.standing != Standing::Closed && peer.to_peer.is_some());
        if pending >= share && receivers.count() > 1 {
            let name = whose
                .and_then(|peer| self.peers.get(peer).ok())
                .map_or("rooms without a grant", |peer| &peer.card.name);
            fail!(
                NIXL_ERR_QUEUE_FULL,
                "{pending} chunks to {name} have not settled; of the queue depth of {depth} the rest is for other peers"
            );
        }
        Ok(())
    }

    /// What a room looks like now. A grant for a room that we have not opened shows as waiting for input.
    pub fn poll(&self, room: u64) -> Result<View> {
        if let Some(entry) = self.rooms.get(&room) {
            let mut view = entry.room.view();
            // An ended and quiesced room needs nothing of its peers any more.
            view.suspect = !view.quiesced && self.suspects.iter().any(|peer| entry.room.concerns(*peer));
            return Ok(view);
        }
        let items = self.parking.get(room);
        if items.is_empty() {
            fail!(NIXL_ERR_ROOM_UNKNOWN, "room {room} is not open here");
        }
        let cause = self.parking.failure(room).cloned();
        Ok(View {
            state: if cause.is_some() { State::Failed } else { State::WaitingForInput },
            quiesced: cause.is_some(),
            cause,
            num_chunks: 0,
            num_pages: 0,
            num_bytes: 0,
            num_descriptors: 0,
            num_pending_chunks: 0,
            num_pending_senders: 0,
            suspect: false,
        })
    }

    /// Gives a room up on both sides. A prefill engine may give up a room that it has not opened yet: a grant that
    /// comes for it is answered with the failure then.
    pub fn abort(&mut self, room: u64, cause: Error, published: &Published, now: Millis) -> Result<()> {
        if self.with_room(room, now, |machine, out| machine.abort(cause.clone(), out)).is_some() {
            return Ok(());
        }
        if self.config.role & super::super::ROLE_PREFILL == 0 {
            fail!(NIXL_ERR_ROOM_UNKNOWN, "room {room} is not open here");
        }
        let mut out = Vec::new();
        let mut sender = self.draft_sender(published, room, now, &mut out)?;
        sender.abort(cause, &mut out);
        let mappings = mappings_of(&self.parking.take(room));
        self.open(room, Room::Sender(sender), None, mappings, out, now);
        Ok(())
    }

    fn check_num_rooms(&self) -> Result<()> {
        let (open, limit) = (self.rooms.len(), self.config.max_rooms);
        if open >= limit {
            fail!(NIXL_ERR_TOO_MANY_ROOMS, "{open} rooms are open, the limit is {limit}");
        }
        Ok(())
    }

    /// A sender's room with the grants that are parked for it. Nothing of it is in the tables yet.
    fn draft_sender(&self, published: &Published, room: u64, now: Millis, out: &mut Vec<Action>) -> Result<Sender> {
        self.check_num_rooms()?;
        let limits = SenderLimits {
            grant_timeout: self.config.grant_timeout,
            room_timeout: self.config.room_timeout,
            has_aux: published.table.has_aux(),
        };
        let mut sender = Sender::new(room, limits, now);
        let items = self.parking.get(room);
        for item in items {
            if let Parked::Grant { body, mapping, .. } = &item.item {
                let groups = groups_of(mapping.as_deref());
                // What it is refused with is in `out`, and in the room.
                let _ = sender.grant(item.peer, item.generation, body.clone(), groups, now, out);
            }
        }
        for item in items {
            let silent = self.peers.get(item.peer).is_ok_and(|peer| peer.standing == Standing::Silent);
            if silent && !item.is_abort() {
                let cause = Error::new(NIXL_ERR_PEER_LOST, format!("room {room}: peer {} is silent", item.peer));
                sender.peer_gone(item.peer, &cause, false, out);
            }
        }
        for item in items {
            if let Parked::Grant { revision, .. } = item.item
                && revision != published.revision
            {
                let text = format!("room {room}: our regions changed since peer {} granted it", item.peer);
                sender.abort(Error::new(NIXL_ERR_PEER_STALE, text), out);
            }
        }
        for item in items {
            // One of several receivers gave up: the room fails as a whole, unless the others are enough.
            if let Parked::Aborted { cause, num_receivers, .. } = &item.item
                && matches!(sender.state(), State::Bootstrapping | State::Failed)
            {
                sender.abort(cause.clone(), out);
                sender.knows(item.peer, item.generation, *num_receivers);
            }
        }
        Ok(sender)
    }

    /// What of ours maps onto what of a receiver's, as things are.
    pub fn mapping_to(&self, peer: PeerId) -> Option<Arc<Mapping>> {
        self.peers.get(peer).ok()?.to_peer.clone()
    }
}

/// The state groups that both sides have.
pub fn groups_of(mapping: Option<&Mapping>) -> Arc<[u32]> {
    mapping.map_or_else(Arc::default, |mapping| mapping.state.keys().copied().collect())
}

/// What mapped onto what when the grants came.
fn mappings_of(items: &[ParkedItem]) -> Mappings {
    let mapping = |item: &ParkedItem| match &item.item {
        Parked::Grant { mapping, .. } => Some((item.peer, mapping.clone())),
        Parked::Aborted { .. } => None,
    };
    items.iter().filter_map(mapping).collect()
}

/// Checks the senders of a room and says what is expected of each.
fn expect(tables: &Tables, published: &Published, request: &RecvRequest) -> Result<Vec<Expectation>> {
    let room = request.room;
    if request.senders.is_empty() {
        fail!(NIXL_ERR_INVALID_ARGUMENT, "room {room}: no senders");
    }
    let mut senders: Vec<&Peer> = Vec::with_capacity(request.senders.len());
    for (i, &id) in request.senders.iter().enumerate() {
        if request.senders[..i].contains(&id) {
            fail!(NIXL_ERR_PEER_DUPLICATE, "room {room}: senders[{i}] = {id} is listed twice");
        }
        let peer = tables.peers.current(id)?;
        if let Some(cause) = &peer.closed_because {
            if cause.code == NIXL_ERR_PEER_DISCONNECTED {
                fail!(NIXL_ERR_PEER_DISCONNECTED, "room {room}: {cause}");
            }
            fail!(NIXL_ERR_PEER_LOST, "room {room}: peer {} is lost: {cause}", peer.card.name);
        }
        if peer.standing == Standing::Silent {
            fail!(NIXL_ERR_PEER_LOST, "room {room}: peer {} is silent", peer.card.name);
        }
        let stale = peer.stale().or_else(|| {
            (peer.mapped_revision != published.revision
                || (peer.standing != Standing::Connecting && peer.known_revision != published.revision))
                .then(|| format!("peer {} was connected before our regions changed", peer.card.name))
        });
        if let Some(stale) = stale {
            fail!(NIXL_ERR_PEER_STALE, "room {room}: {stale}");
        }
        if peer.from_peer.is_none() {
            fail!(NIXL_ERR_ROLE, "room {room}: peer {} does not send: its role is decode", peer.card.name);
        }
        senders.push(peer);
    }
    let owner = request.aux_sender.unwrap_or(request.senders[0]);
    if !request.senders.contains(&owner) {
        fail!(NIXL_ERR_PEER_UNKNOWN, "room {room}: aux_sender {owner} is not one of the senders");
    }
    check_coverage(published, request, &senders, owner)?;
    let expectation = |peer: &&Peer| {
        let states: Vec<StateIndices> = request
            .states
            .iter()
            .filter(|(group, _)| peer.from_peer.as_ref().is_some_and(|mapping| mapping.state.contains_key(group)))
            .cloned()
            .collect();
        let num_state_groups = states.iter().filter(|(_, slots)| !slots.is_empty()).count() as u32;
        Expectation {
            peer: peer.link.peer,
            ready: peer.standing != Standing::Connecting,
            grant: Arc::new(GrantBody {
                pages: request.pages.clone(),
                aux: request.aux,
                aux_owner: request.aux.is_some() && peer.link.peer == owner,
                states,
                num_receivers: request.num_receivers,
            }),
            num_state_groups,
        }
    };
    Ok(senders.iter().map(expectation).collect())
}

/// Every region that the room needs comes from exactly one of its senders.
fn check_coverage(published: &Published, request: &RecvRequest, senders: &[&Peer], owner: PeerId) -> Result<()> {
    let room = request.room;
    let mut supplied = std::collections::HashMap::new();
    for peer in senders {
        let Some(mapping) = &peer.from_peer else { continue };
        let states = mapping.state.values().flat_map(|pairs| pairs.iter());
        for pair in mapping.kv.iter().chain(states) {
            if let Some(other) = supplied.insert(pair.key, &peer.card.name) {
                fail!(
                    NIXL_ERR_LAYERS_OVERLAP,
                    "room {room}: peers {other} and {} both send {}",
                    peer.card.name,
                    pair.key
                );
            }
        }
        if peer.link.peer == owner && request.aux.is_some() && mapping.aux.is_empty() {
            fail!(
                NIXL_ERR_AUX_UNEXPECTED,
                "room {room}: peer {} owns the aux slot and has no aux regions",
                peer.card.name
            );
        }
    }
    for region in published.table.regions().iter().filter(|region| !region.local) {
        let needed = match region.key {
            crate::layout::RegionKey::Kv { .. } => !request.pages.is_empty(),
            crate::layout::RegionKey::Aux { .. } => false,
            crate::layout::RegionKey::State { group, .. } => {
                request.states.iter().any(|(id, slots)| *id == group && !slots.is_empty())
            }
        };
        if needed && !supplied.contains_key(&region.key) {
            fail!(
                NIXL_ERR_LAYERS_INCOMPLETE,
                "room {room}: no sender has {}; flag it NIXLKV_REGION_FLAG_LOCAL if none should",
                region.key
            );
        }
    }
    Ok(())
}
