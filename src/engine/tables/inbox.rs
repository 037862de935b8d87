//! Messages from the peers, to whom they concern.

use super::*;
use crate::layout::RegionTable;
use crate::protocol::DecodeError;
use crate::room::{Landing, Receiver, Sender};

use super::super::peers::Standing;

/// Grants of one peer of which fragments may be missing at the same time: it sends them one after the other.
const MAX_ASSEMBLIES_PER_PEER: usize = 64;

/// Bytes of them, before another may begin.
const MAX_ASSEMBLY_BYTES: usize = 64 << 20;

/// What a message was to us.
type Concern = Option<bool>;

impl Tables {
    /// A frame's message has come from the NIXL agent `agent`.
    pub fn receive(&mut self, agent: &str, message: Message, now: Millis) {
        let Some(peer) = self.peers.by_agent(agent) else {
            count(&self.counters.messages_unknown_peer);
            log::debug!("dropped a message from {agent:?}, which is not connected");
            // It missed our goodbye.
            if !matches!(message, Message::Goodbye { .. })
                && let Some(parted) = self.parted.iter().find(|parted| parted.link.agent == agent)
                && self.outbox.len_to(parted.link.peer) == 0
            {
                self.outbox.push(parted.clone());
            }
            return;
        };
        if self.peers.get(peer).is_ok_and(|peer| peer.standing == Standing::Closed) {
            count(&self.counters.messages_stale);
            return;
        }
        self.heard(peer, now);
        self.handle(peer, message, now);
    }

    /// Something has come from the NIXL agent `agent` that is no message.
    pub fn malformed(&mut self, agent: &str, num_bytes: usize, why: &dyn std::fmt::Debug, now: Millis) {
        count(&self.counters.messages_malformed);
        let peer = self.peers.by_agent(agent).unwrap_or(0);
        if self.failure_lines.admits((peer, NIXL_ERR_PROTOCOL), now) {
            log::warn!("dropped a malformed message of {num_bytes} bytes from {agent:?}: {why:?}");
        }
    }

    fn handle(&mut self, peer: PeerId, message: Message, now: Millis) {
        match message {
            Message::Hello(hello) => self.greeted(peer, hello, now),
            Message::Goodbye { connection, known_connection } => {
                let Ok(entry) = self.peers.get(peer) else { return };
                if !entry.is_meant(connection, known_connection) {
                    // Of an earlier connection: we have connected it again since.
                    count(&self.counters.messages_stale);
                    return;
                }
                // It drained before it said so.
                let cause = format!("peer {} said goodbye", entry.card.name);
                let cause = Error::new(NIXL_ERR_PEER_DISCONNECTED, cause);
                self.connection_closed(peer, &cause, now);
                self.broke(peer, cause, now);
            }
            Message::Ping { sequence } => self.tell(peer, Message::Pong { sequence }),
            Message::Pong { .. } => {}
            Message::Grant { room, generation, revision, connection, fragment, num_fragments, payload } => {
                // Of an earlier connection; or it overtook the hello, which says what it is worth. If the receiver still
                // waits it will ask, and send it again.
                let current = self.peers.get(peer).is_ok_and(|peer| peer.their_connection == connection);
                if !current || self.is_over(peer, generation) || self.is_granted(peer, room, generation) {
                    count(&self.counters.messages_stale);
                    return;
                }
                let mut limit = self.peers.get(peer).map_or(0, |peer| peer.card.regions.num_indices());
                if !self.rooms.contains_key(&room) {
                    // It would be parked: what cannot be is not even unpacked.
                    limit = limit.min(self.parking.num_indices_left(peer));
                }
                let fragment = (fragment, num_fragments, payload.as_slice());
                if let Some(body) = self.assemble(peer, room, generation, fragment, limit, now) {
                    self.granted(peer, room, generation, revision, body, now);
                }
            }
            Message::Landed { room, generation, slice, num_slices, chunk } => {
                let landing = self.receiver(room, now, |receiver, out| {
                    receiver.landed(peer, generation, (slice, num_slices), chunk, now, out)
                });
                self.count_landing(landing);
            }
            Message::ChunkLanded { room, generation, chunk } => {
                let landing =
                    self.receiver(room, now, |receiver, out| receiver.chunk_landed(peer, generation, chunk, now, out));
                self.count_landing(landing);
            }
            Message::Done { room, generation } => {
                let concern = self.sender(room, now, |sender, _| sender.done(peer, generation, now));
                self.count_concern(concern);
            }
            Message::Failed { room, generation, code, drained, text } => {
                // Of several senders, which: also the others hear it when we pass it on.
                let name = self.peers.get(peer).map_or("", |entry| shortened(&entry.card.name));
                let cause = error_of_peer(code, format!("{name}: {text}"));
                let concern =
                    self.receiver(room, now, |receiver, out| receiver.failed(peer, generation, cause, drained, out));
                self.count_concern(concern);
            }
            Message::Drained { room, generation } => {
                let concern = self.receiver(room, now, |receiver, _| receiver.drained(peer, generation));
                self.count_concern(concern);
            }
            Message::Abort { room, generation, num_receivers, code, text } => {
                self.aborted(peer, room, (generation, num_receivers), error_of_peer(code, text), now);
            }
            Message::Ask { room, generation, num_chunks } => self.asked(peer, room, generation, num_chunks, now),
            Message::Ungranted { room, generation } => {
                let concern = self.receiver(room, now, |receiver, out| receiver.ungranted(peer, generation, out));
                self.count_concern(concern);
            }
            Message::Confirm { room, generation } => self.confirm(peer, room, generation, now),
        }
    }

    /// Gives an event to a room of which we are the receiver. `None`: there is no such room.
    fn receiver<T>(
        &mut self,
        room: u64,
        now: Millis,
        event: impl FnOnce(&mut Receiver, &mut Vec<Action>) -> T,
    ) -> Option<T> {
        if !matches!(self.rooms.get(&room)?.room, Room::Receiver(_)) {
            return None;
        }
        self.with_room(room, now, |machine, out| match machine {
            Room::Receiver(receiver) => Some(event(receiver, out)),
            Room::Sender(_) => None,
        })?
    }

    /// Gives an event to a room of which we are a sender. `None`: there is no such room.
    fn sender<T>(
        &mut self,
        room: u64,
        now: Millis,
        event: impl FnOnce(&mut Sender, &mut Vec<Action>) -> T,
    ) -> Option<T> {
        if !matches!(self.rooms.get(&room)?.room, Room::Sender(_)) {
            return None;
        }
        self.with_room(room, now, |machine, out| match machine {
            Room::Sender(sender) => Some(event(sender, out)),
            Room::Receiver(_) => None,
        })?
    }

    /// Counts a message that concerned no room, or another life of it.
    fn count_concern(&self, concern: Concern) {
        match concern {
            Some(true) => {}
            Some(false) => count(&self.counters.messages_stale),
            None => count(&self.counters.messages_unknown_room),
        }
    }

    fn count_landing(&self, landing: Option<Landing>) {
        match landing {
            Some(Landing::Counted) => {}
            Some(Landing::Duplicate) => count(&self.counters.messages_duplicate),
            Some(Landing::Stale) => count(&self.counters.messages_stale),
            None => count(&self.counters.messages_unknown_room),
        }
    }

    /// Whether a receiver's life of a room will never be sent anything.
    fn is_over(&self, peer: PeerId, generation: u64) -> bool {
        self.peers.get(peer).is_ok_and(|peer| peer.ended.contains(generation))
    }

    /// Whether this grant, or that of a later life, has been taken.
    fn is_granted(&self, peer: PeerId, room: u64, generation: u64) -> bool {
        match self.rooms.get(&room).map(|entry| &entry.room) {
            Some(Room::Sender(sender)) => sender.lives().any(|(from, life)| from == peer && life >= generation),
            _ => false,
        }
    }

    /// A receiver gives a room up: we stop, drain and say so. What we never began is drained already.
    fn aborted(&mut self, peer: PeerId, room: u64, (generation, num_receivers): (u64, u32), cause: Error, now: Millis) {
        self.assemblies.remove(&(peer, room));
        if self.is_over(peer, generation) {
            // It missed our answer. A room of this id that is open here is the next one.
            return self.tell(peer, Message::Drained { room, generation });
        }
        let known =
            self.sender(room, now, |sender, out| sender.aborted(peer, generation, num_receivers, cause.clone(), out));
        if known == Some(true) {
            return;
        }
        // Its grant may still come, or come again: it is void now, for its memory is free.
        self.ended(peer, generation, Some(&cause));
        if known.is_some() {
            return;
        }
        self.tell(peer, Message::Drained { room, generation });
        if self.rooms.contains_key(&room) {
            return count(&self.counters.messages_unknown_room);
        }
        if self.meets_tombstone(peer, room, num_receivers).is_some() {
            // Both sides gave up the same life, and it is released here. The next one is not to hear of it.
            return;
        }
        // The prefill side has yet to hear of it: its first chunk finds the room failed. The other receivers are told.
        let mut told = Vec::new();
        if num_receivers > 1 {
            for item in self.parking.take_grants(room) {
                if item.peer != peer {
                    told.push(item.peer);
                    self.refuse(item.peer, room, item.generation, cause.clone());
                }
            }
        }
        let expires = now.saturating_add(self.config.room_timeout);
        let item = Parked::Aborted { cause, num_receivers, told };
        self.park(room, ParkedItem { peer, generation, item, expires });
        self.num_changes += 1;
    }

    /// Parks a message; whatever has to make room for it is refused.
    fn park(&mut self, room: u64, item: ParkedItem) {
        for (room, dropped) in self.parking.park(room, item, self.config.max_rooms) {
            if !dropped.is_abort() {
                let (parked, name) = (self.parking.len(), &self.identity.name);
                let text = format!("room {room}: {parked} grants wait for their first chunk at {name}");
                self.refuse(dropped.peer, room, dropped.generation, Error::new(NIXL_ERR_TOO_MANY_ROOMS, text));
            }
        }
    }

    /// A receiver has heard nothing of a room for a while.
    fn asked(&mut self, peer: PeerId, room: u64, generation: u64, num_chunks: u32, now: Millis) {
        let known = self.sender(room, now, |sender, out| sender.asked(peer, generation, num_chunks, out));
        if known == Some(true) || self.parking.of(peer, room, generation).is_some() {
            return;
        }
        if !self.is_over(peer, generation) {
            return self.tell(peer, Message::Ungranted { room, generation });
        }
        let ended = self.peers.get(peer).ok().and_then(|peer| peer.ended.cause(generation).cloned());
        let cause = ended.unwrap_or_else(|| {
            Error::new(NIXL_ERR_PROTOCOL, format!("room {room}: {} has ended it already", self.identity.name))
        });
        self.refuse(peer, room, generation, cause);
    }

    /// A sender waits for our confirmation.
    fn confirm(&mut self, peer: PeerId, room: u64, generation: u64, now: Millis) {
        if self.receiver(room, now, |receiver, out| receiver.confirm(peer, generation, now, out)) == Some(true) {
            return;
        }
        let answer = if self.delivered.contains(&generation) {
            Message::Done { room, generation }
        } else {
            count(&self.counters.messages_stale);
            let text = format!("room {room}: {} does not know this life of it", self.identity.name);
            Message::Abort { room, generation, num_receivers: 1, code: NIXL_ERR_PROTOCOL, text }
        };
        self.tell(peer, answer);
    }

    /// Tells a receiver that nothing comes of its grant, now or ever.
    pub fn refuse(&mut self, peer: PeerId, room: u64, generation: u64, cause: Error) {
        self.ended(peer, generation, Some(&cause));
        let (code, text) = (cause.code, cause.text.into_owned());
        self.tell(peer, Message::Failed { room, generation, code, drained: true, text });
    }

    /// Drops what has been parked for too long, and says so to the peer that waits.
    pub fn expire_parked(&mut self, now: Millis) {
        self.tombstones.retain(|_, tombstone| tombstone.expires > now);
        self.unsaid.retain(|unsaid| unsaid.expires > now);
        self.assemblies.retain(|_, assembly| assembly.expires > now);
        for (room, ParkedItem { peer, generation, item, .. }) in self.parking.take_all(|item| item.expires <= now) {
            self.num_changes += 1;
            if let Parked::Grant { .. } = item {
                let text = format!("room {room}: no chunk came for the grant within the time limit");
                self.refuse(peer, room, generation, Error::new(NIXL_ERR_ROOM_TIMEOUT, text));
            }
        }
    }

    /// The engine shuts down: grants whose first chunk never comes now are answered.
    pub fn refuse_parked(&mut self, cause: &Error) {
        for (room, ParkedItem { peer, generation, item, .. }) in self.parking.take_all(|_| true) {
            self.num_changes += 1;
            if let Parked::Grant { .. } = item {
                self.refuse(peer, room, generation, Error::new(cause.code, format!("room {room}: {}", cause.text)));
            }
        }
    }

    /// Drops what a peer that is gone had parked or begun.
    pub fn forget_parked(&mut self, peer: PeerId) {
        self.num_changes += self.parking.take_all(|item| item.peer == peer).len() as u64;
        self.assemblies.retain(|(from, _), _| *from != peer);
    }

    /// Adds a fragment of a grant; gives the grant when it is whole.
    fn assemble(
        &mut self,
        peer: PeerId,
        room: u64,
        generation: u64,
        (fragment, num_fragments, payload): (u32, u32, &[u8]),
        limit: u64,
        now: Millis,
    ) -> Option<GrantBody> {
        let key = (peer, room);
        let known = self.assemblies.get(&key).map(|assembly| assembly.generation);
        if known.is_some_and(|known| known > generation) {
            count(&self.counters.messages_stale);
            return None;
        }
        // A grant that is whole at once needs no memory, so that other peers' incomplete ones cannot get in its way.
        let mut single = Assembly { generation, expires: 0, fragments: GrantAssembly::default() };
        if known != Some(generation) && num_fragments > 1 {
            if self.assemblies.keys().filter(|(from, _)| *from == peer).count() >= MAX_ASSEMBLIES_PER_PEER {
                count(&self.counters.messages_malformed);
                let text = format!("room {room}: too many grants are incomplete");
                self.refuse(peer, room, generation, Error::new(NIXL_ERR_TOO_MANY_ROOMS, text));
                return None;
            }
            let begun = self.assemblies.iter().filter(|((from, _), _)| *from == peer);
            if begun.map(|(_, assembly)| assembly.fragments.num_bytes()).sum::<usize>() > MAX_ASSEMBLY_BYTES {
                let text = format!("room {room}: too much of other grants has come without the rest");
                self.refuse(peer, room, generation, Error::new(NIXL_ERR_TOO_MANY_ROOMS, text));
                return None;
            }
            let expires = now.saturating_add(self.config.grant_timeout);
            self.assemblies.insert(key, Assembly { expires, ..single });
            single = Assembly { generation, expires: 0, fragments: GrantAssembly::default() };
        }
        let begun = self.assemblies.get_mut(&key).filter(|_| num_fragments > 1);
        match begun.unwrap_or(&mut single).fragments.add(fragment, num_fragments, payload, limit) {
            Ok(None) => None,
            Ok(Some(body)) => {
                self.assemblies.remove(&key);
                Some(body)
            }
            Err(DecodeError::Bounds) if self.parking.num_indices_left(peer) <= limit => {
                self.assemblies.remove(&key);
                let text = format!("room {room}: grants with too many indices wait for their first chunk");
                self.refuse(peer, room, generation, Error::new(NIXL_ERR_TOO_MANY_ROOMS, text));
                None
            }
            Err(e) => {
                self.assemblies.remove(&key);
                self.malformed_grant(peer, room, &e, now);
                let cause = Error::new(NIXL_ERR_PROTOCOL, format!("room {room}: the grant was malformed"));
                self.refuse(peer, room, generation, cause);
                None
            }
        }
    }

    fn malformed_grant(&mut self, peer: PeerId, room: u64, why: &dyn std::fmt::Debug, now: Millis) {
        count(&self.counters.messages_malformed);
        if self.failure_lines.admits((peer, NIXL_ERR_PROTOCOL), now) {
            log::warn!("room {room}: dropped a malformed grant of peer {peer}: {why:?}");
        }
    }

    /// A receiver's grant has come whole: to the room, or parked until its first chunk.
    fn granted(&mut self, peer: PeerId, room: u64, generation: u64, revision: u64, body: GrantBody, now: Millis) {
        if let Err(cause) = self.check_grant(peer, room, revision, &body) {
            return self.refuse(peer, room, generation, cause);
        }
        if !self.rooms.contains_key(&room)
            && let Some(cause) = self.meets_tombstone(peer, room, body.num_receivers)
        {
            return self.refuse(peer, room, generation, cause);
        }
        let body = Arc::new(body);
        match self.rooms.get(&room).map(|entry| &entry.room) {
            Some(Room::Receiver(_)) => {
                let cause = self.is_receiver(room);
                self.refuse(peer, room, generation, cause);
            }
            Some(Room::Sender(_)) => {
                let mapping = self.mapping_to(peer);
                let groups = groups_of(mapping.as_deref());
                if let Some(entry) = self.rooms.get_mut(&room) {
                    entry.mappings.entry(peer).or_insert(mapping);
                }
                let taken =
                    self.sender(room, now, |sender, out| sender.grant(peer, generation, body, groups, now, out));
                if let Some(Err(cause)) = taken {
                    self.ended(peer, generation, Some(&cause));
                }
            }
            None => {
                if let Some(cause) = self.parking.meets_abort(room, peer, body.num_receivers) {
                    return self.refuse(peer, room, generation, cause);
                }
                let expires = now.saturating_add(self.config.room_timeout);
                let item = Parked::Grant { body, revision: self.revision, mapping: self.mapping_to(peer) };
                self.park(room, ParkedItem { peer, generation, item, expires });
            }
        }
    }

    /// What a grant for a room that we receive is refused with.
    pub fn is_receiver(&self, room: u64) -> Error {
        Error::new(NIXL_ERR_ROOM_IN_USE, format!("room {room} is open as a receiver at {}", self.identity.name))
    }

    /// One of so many receivers speaks of a room that failed here and was released before it knew. Why it failed, once
    /// for each receiver: what comes later is of another life.
    fn meets_tombstone(&mut self, peer: PeerId, room: u64, num_receivers: u32) -> Option<Error> {
        let tombstone = self.tombstones.get_mut(&room).filter(|tombstone| !tombstone.told.contains(&peer))?;
        let cause = tombstone.cause.clone();
        tombstone.told.push(peer);
        if tombstone.told.len() as u64 >= u64::from(num_receivers.max(1)) {
            self.tombstones.remove(&room);
        }
        Some(cause)
    }

    /// Checks a grant against what we know of the receiver.
    fn check_grant(&self, peer: PeerId, room: u64, revision: u64, body: &GrantBody) -> Result<()> {
        let entry = self.peers.current(peer)?;
        let name = &self.identity.name;
        if entry.to_peer.is_none() {
            fail!(NIXL_ERR_ROLE, "room {room}: engine {name} does not send to decode engines");
        }
        if entry.card.revision != revision {
            fail!(
                NIXL_ERR_PEER_STALE,
                "room {room}: {name} holds revision {} of the receiver's regions, the grant is for {revision}",
                entry.card.revision
            );
        }
        if self.shut_down {
            fail!(NIXL_ERR_PEER_DISCONNECTED, "room {room}: engine {name} shut down");
        }
        if entry.mapped_revision != self.revision {
            fail!(
                NIXL_ERR_PEER_STALE,
                "room {room}: {name}'s regions changed since it connected the receiver: exchange blobs again"
            );
        }
        if entry.known_revision != self.revision {
            fail!(
                NIXL_ERR_PEER_STALE,
                "room {room}: the receiver holds revision {} of {name}'s regions, they are at {}",
                entry.known_revision,
                self.revision
            );
        }
        check_indices(room, body, &entry.card.regions)
    }
}

/// As much of a name as leaves room for a cause in a message.
pub fn shortened(name: &str) -> &str {
    let mut end = name.len().min(48);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    &name[..end]
}

/// A failure that a peer tells us.
fn error_of_peer(code: i32, text: String) -> Error {
    // A code that we do not know came from a newer peer; it is still a failure.
    let known = status_entry(code).is_some_and(|entry| entry.code != NIXL_OK);
    Error::new(if known { code } else { NIXL_ERR_XFER_FAILED }, text)
}

/// Checks what a grant names against the receiver's regions as we know them.
fn check_indices(room: u64, grant: &GrantBody, table: &RegionTable) -> Result<()> {
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
