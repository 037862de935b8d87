//! Control messages and time limits: what thread 0 does beside moving chunks.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::engine::{Assembly, Link, Outgoing, Parked, ParkedItem, Shared, Standing, Tables, check_grant, hello};
use crate::error::*;
use crate::fault;
use crate::metrics::count;
use crate::protocol::{GrantAssembly, GrantBody, Message, decode, encode};
use crate::room::{Landing, Millis, PeerId, Room};

/// How often the time limits are looked at.
const TICK_MS: Millis = 20;
/// Most messages sent in one round, so that transfers get their turn.
const MAX_SENDS_PER_ROUND: usize = 64;
/// Grants of one peer of which fragments may be missing at the same time: it sends them one after the other.
const MAX_ASSEMBLIES_PER_PEER: usize = 64;

pub struct Control {
    shared: Arc<Shared>,
    last_tick: Millis,
    received: Vec<Received>,
    sending: Vec<Outgoing>,
    /// What a fault point has put off, and until when.
    put_off: Vec<(Millis, Received)>,
}

/// Who sent a message, and its bytes.
type Received = (String, Vec<u8>);

impl Control {
    pub fn new(shared: Arc<Shared>) -> Self {
        let last_tick = shared.now();
        Self { shared, last_tick, received: Vec::new(), sending: Vec::new(), put_off: Vec::new() }
    }

    /// One round. True: there was something to do.
    pub fn step(&mut self) -> bool {
        let sent = self.send();
        let received = self.receive();
        self.tick();
        sent | received
    }

    /// Sends what is queued.
    fn send(&mut self) -> bool {
        {
            let mut tables = self.shared.tables();
            let most = tables.outbox.len().min(MAX_SENDS_PER_ROUND);
            self.sending.extend(tables.outbox.drain(..most));
        }
        let busy = !self.sending.is_empty();
        let mut broken: Vec<(Arc<Link>, Error)> = Vec::new();
        for Outgoing { link, message } in self.sending.drain(..) {
            if link.agent.is_empty() || (link.is_closed() && !matches!(message, Message::Goodbye { .. })) {
                continue;
            }
            if fault::hit("drop_message") {
                continue;
            }
            count(&self.shared.counters.messages_sent);
            if let Err(failure) = self.shared.agent.notify(&link.agent, &encode(&message))
                && !broken.iter().any(|(known, _)| known.peer == link.peer)
            {
                let text = format!("NIXL cannot reach peer {}: {failure}", link.peer);
                broken.push((link, Error::new(NIXL_ERR_PEER_LOST, text)));
            }
        }
        if !broken.is_empty() {
            let mut tables = self.shared.tables();
            let before = tables.num_changes;
            for (link, cause) in broken {
                tables.broke(&self.shared, link.peer, cause);
            }
            self.shared.finish(tables, before);
        }
        busy
    }

    /// Takes in what has come.
    fn receive(&mut self) -> bool {
        let received = &mut self.received;
        let result = self.shared.agent.notifications(&mut |agent, bytes| {
            received.push((agent.to_owned(), bytes.to_owned()));
        });
        if let Err(failure) = result {
            log::error!("NIXL gives no notifications: {failure}");
        }
        if cfg!(feature = "fault-injection") {
            self.mistreat();
        }
        if self.received.is_empty() {
            return false;
        }
        let mut tables = self.shared.tables();
        let before = tables.num_changes;
        for (agent, bytes) in self.received.drain(..) {
            count(&self.shared.counters.messages_received);
            let message = match decode(&bytes) {
                Ok(message) => message,
                Err(e) => {
                    count(&self.shared.counters.messages_malformed);
                    log::warn!("dropped a malformed message of {} bytes from {agent:?}: {e:?}", bytes.len());
                    continue;
                }
            };
            let Some(peer) = tables.peers.by_agent(&agent) else {
                count(&self.shared.counters.messages_unknown_peer);
                log::debug!("dropped a message from {agent:?}, which is not connected");
                continue;
            };
            if tables.peers.get(peer).is_ok_and(|peer| peer.standing == Standing::Closed) {
                count(&self.shared.counters.messages_stale);
                continue;
            }
            tables.heard(&self.shared, peer);
            handle(&self.shared, &mut tables, peer, message);
        }
        self.shared.finish(tables, before);
        true
    }

    /// The fault points of a bad network, on what has just come: lost, repeated later, late.
    fn mistreat(&mut self) {
        let now = self.shared.now();
        let put_off = &mut self.put_off;
        self.received.retain(|message| {
            let late = || now + u64::from(message.1.iter().fold(0, |sum: u8, byte| sum.wrapping_add(*byte)));
            if fault::hit("repeat_message") {
                put_off.push((late(), message.clone()));
            }
            if fault::hit("delay_message") {
                put_off.push((late(), message.clone()));
                return false;
            }
            !fault::hit("lose_message")
        });
        self.received.extend(put_off.extract_if(.., |(due, _)| *due <= now).map(|(_, message)| message));
    }

    /// Looks at the time limits, pings, and closes connections on which nothing is in flight any more.
    fn tick(&mut self) {
        let now = self.shared.now();
        let gap = now.saturating_sub(self.last_tick);
        if gap < TICK_MS {
            return;
        }
        self.last_tick = now;
        let closed = self.close_connections();
        let config = &self.shared.config;
        let mut tables = self.shared.tables();
        let before = tables.num_changes;
        let revision = tables.revision;
        for (link, cause) in &closed {
            tables.connection_closed(&self.shared, link.peer, cause);
        }
        let mut pings = Vec::new();
        let mut hellos = Vec::new();
        let mut silent = Vec::new();
        for peer in tables.peers.iter_mut() {
            if gap > config.heartbeat_interval {
                // This thread was stopped, or starved: that says nothing of the peer.
                peer.last_heard += gap;
            }
            if peer.standing == Standing::Closed {
                continue;
            }
            if peer.standing == Standing::Connecting {
                // Also a probe: a peer that died before it said hello shows itself by the transport's error.
                if now.saturating_sub(peer.last_ping) >= config.heartbeat_interval {
                    peer.last_ping = now;
                    hellos.push((peer.link.peer, hello(revision, peer, true)));
                }
                continue;
            }
            let quiet = now.saturating_sub(peer.last_heard);
            if peer.standing == Standing::Ready && quiet >= config.liveness_limit {
                let text = format!("peer {} has been silent for {quiet} ms", peer.name);
                silent.push((peer.link.peer, Error::new(NIXL_ERR_PEER_LOST, text)));
            }
            if now.saturating_sub(peer.last_ping) >= config.heartbeat_interval {
                peer.last_ping = now;
                pings.push(peer.link.peer);
            }
        }
        let suspects = tables.peers.iter().filter(|peer| peer.is_suspect(now, config.heartbeat_interval));
        tables.suspects = suspects.map(|peer| peer.link.peer).collect();
        for (peer, message) in hellos {
            tables.tell(peer, message);
        }
        for peer in pings {
            tables.tell(peer, Message::Ping { sequence: now });
        }
        for (peer, cause) in silent {
            tables.went_silent(&self.shared, peer, cause);
        }
        tables.with_rooms(&self.shared.counters, |room| !room.quiesced(), |room, out| room.tick(now, out));
        tables.retire(&self.shared);
        expire_parked(&mut tables, now);
        tables.assemblies.retain(|_, assembly| assembly.expires > now);
        self.shared.finish(tables, before);
    }

    /// Closes the connections that wait for it. Forgetting an agent under a posted transfer would free what the
    /// transfer still uses, so that waits.
    fn close_connections(&self) -> Vec<(Arc<Link>, Error)> {
        let ready: Vec<(Arc<Link>, Error)> = {
            let mut tables = self.shared.tables();
            if tables.closing.is_empty() {
                return Vec::new();
            }
            // A goodbye, or an abort, may still be on its way out.
            let pending: Vec<PeerId> = tables.outbox.iter().map(|outgoing| outgoing.link.peer).collect();
            let closing = std::mem::take(&mut tables.closing);
            let (ready, wait) = closing
                .into_iter()
                .partition(|(link, _)| link.in_flight.load(Ordering::Acquire) == 0 && !pending.contains(&link.peer));
            tables.closing = wait;
            ready
        };
        for (link, _) in &ready {
            if let Err(failure) = self.shared.agent.forget(&link.agent) {
                log::debug!("closing the connection to {}: {failure}", link.agent);
            }
        }
        ready
    }

    /// Lets the last messages leave: NIXL sends them as somebody drives its progress.
    pub fn finish(mut self) {
        let until = Instant::now() + Duration::from_millis(20);
        loop {
            let busy = self.send();
            let _ = self.shared.agent.notifications(&mut |_, _| {});
            if !busy && Instant::now() >= until {
                break;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

/// Drops what has been parked for too long, and says so to the peer that waits.
fn expire_parked(tables: &mut Tables, now: Millis) {
    let mut expired = Vec::new();
    tables.parked.retain(|room, items| {
        items.retain(|item| {
            let keep = item.expires > now;
            if !keep {
                expired.push((*room, item.peer, item.generation, matches!(item.item, Parked::Grant(_))));
            }
            keep
        });
        !items.is_empty()
    });
    tables.num_parked -= expired.len();
    tables.tombstones.retain(|_, tombstone| tombstone.expires > now);
    for (room, peer, generation, is_grant) in expired {
        if is_grant {
            let text = format!("room {room}: no chunk came for the grant within the time limit");
            tables.tell(peer, Message::Failed { room, generation, code: NIXL_ERR_ROOM_TIMEOUT, drained: true, text });
        }
    }
}

/// Gives one message from a connected peer to whom it concerns.
fn handle(shared: &Shared, tables: &mut Tables, peer: PeerId, message: Message) {
    let counters = &shared.counters;
    let now = shared.now();
    let error = |code: i32, text: String| {
        // A code that we do not know came from a newer peer; it is still a failure.
        let known = status_entry(code).is_some_and(|entry| entry.code != NIXL_OK);
        Error::new(if known { code } else { NIXL_ERR_XFER_FAILED }, text)
    };
    match message {
        Message::Hello { revision, known_revision, known_instance, connection, reply } => {
            if known_instance != shared.instance {
                count(&counters.messages_stale);
                return;
            }
            tables.greeted(shared, peer, (revision, known_revision), connection, reply);
        }
        Message::Goodbye { connection } => {
            let Ok(entry) = tables.peers.get(peer) else { return };
            if entry.their_connection != connection {
                // Of an earlier connection: we have connected it again since.
                count(&counters.messages_stale);
                return;
            }
            // It drained before it said so.
            let name = entry.name.clone();
            let cause = Error::new(NIXL_ERR_PEER_DISCONNECTED, format!("peer {name} said goodbye"));
            tables.connection_closed(shared, peer, &cause);
            tables.broke(shared, peer, cause);
        }
        Message::Ping { sequence } => tables.tell(peer, Message::Pong { sequence }),
        Message::Pong { .. } => {}
        Message::Grant { room, generation, revision, fragment, num_fragments, payload } => {
            let limit = tables.peers.get(peer).map_or(0, |peer| peer.table.num_indices());
            if let Some(body) =
                assemble(shared, tables, peer, room, generation, (fragment, num_fragments, &payload), limit)
            {
                granted(shared, tables, peer, room, generation, revision, body);
            }
        }
        Message::Landed { room, generation, chunk, slice, num_slices, page_offset, num_pages, num_bytes, last } => {
            let landing = tables.with_room(room, counters, |machine, out| match machine {
                Room::Receiver(receiver) => receiver.landed(
                    peer,
                    generation,
                    chunk,
                    slice,
                    num_slices,
                    page_offset,
                    num_pages,
                    num_bytes,
                    last,
                    now,
                    out,
                ),
                Room::Sender(_) => Landing::Stale,
            });
            match landing {
                Some(Landing::Counted) => {}
                Some(Landing::Duplicate) => count(&counters.messages_duplicate),
                Some(Landing::Stale) => count(&counters.messages_stale),
                None => count(&counters.messages_unknown_room),
            }
        }
        Message::Done { room, generation } => {
            concerning(shared, tables, room, |machine, _| match machine {
                Room::Sender(sender) => sender.done(peer, generation, now),
                Room::Receiver(_) => false,
            });
        }
        Message::Failed { room, generation, code, drained, text } => {
            concerning(shared, tables, room, |machine, out| match machine {
                Room::Receiver(receiver) => receiver.failed(peer, generation, error(code, text), drained, out),
                Room::Sender(_) => false,
            });
        }
        Message::Drained { room, generation } => {
            concerning(shared, tables, room, |machine, _| match machine {
                Room::Receiver(receiver) => receiver.drained(peer, generation),
                Room::Sender(_) => false,
            });
        }
        Message::Abort { room, generation, code, text } => {
            aborted(shared, tables, peer, room, generation, error(code, text), now);
        }
    }
}

/// Gives an event to a room and counts it when it concerned nobody.
fn concerning(
    shared: &Shared,
    tables: &mut Tables,
    room: u64,
    event: impl FnOnce(&mut Room, &mut Vec<crate::room::Action>) -> bool,
) {
    match tables.with_room(room, &shared.counters, event) {
        Some(true) => {}
        Some(false) => count(&shared.counters.messages_stale),
        None => count(&shared.counters.messages_unknown_room),
    }
}

/// A receiver gives a room up: we stop, drain and say so. What we never began is drained already.
fn aborted(shared: &Shared, tables: &mut Tables, peer: PeerId, room: u64, generation: u64, cause: Error, now: Millis) {
    tables.assemblies.remove(&(peer, room));
    if matches!(tables.rooms.get(&room).map(|entry| &entry.room), Some(Room::Sender(_))) {
        tables.with_room(room, &shared.counters, |machine, out| {
            if let Room::Sender(sender) = machine {
                sender.aborted(peer, generation, cause, out);
            }
        });
        return;
    }
    tables.tell(peer, Message::Drained { room, generation });
    if let Some(body) = tables.parked_grant(peer, room, generation) {
        // The prefill side has yet to hear of it: its first chunk finds the room failed.
        let expires = now.saturating_add(shared.config.room_timeout);
        let item = ParkedItem { peer, generation, item: Parked::Aborted(cause, body), expires };
        tables.park(room, item, shared.config.max_rooms);
    } else {
        count(&shared.counters.messages_unknown_room);
    }
}

/// Adds a fragment of a grant; gives the grant when it is whole.
fn assemble(
    shared: &Shared,
    tables: &mut Tables,
    peer: PeerId,
    room: u64,
    generation: u64,
    (fragment, num_fragments, payload): (u32, u32, &[u8]),
    limit: u64,
) -> Option<GrantBody> {
    let key = (peer, room);
    let known = tables.assemblies.get(&key).map(|assembly| assembly.generation);
    if known.is_some_and(|known| known > generation) {
        count(&shared.counters.messages_stale);
        return None;
    }
    // A grant that is whole at once needs no memory, so that other peers' incomplete ones cannot get in its way.
    let mut single = Assembly { generation, expires: 0, fragments: GrantAssembly::default() };
    if known != Some(generation) && num_fragments > 1 {
        if tables.assemblies.keys().filter(|(from, _)| *from == peer).count() >= MAX_ASSEMBLIES_PER_PEER {
            count(&shared.counters.messages_malformed);
            let text = format!("room {room}: too many grants are incomplete");
            tables.tell(peer, Message::Failed { room, generation, code: NIXL_ERR_TOO_MANY_ROOMS, drained: true, text });
            return None;
        }
        let expires = shared.now().saturating_add(shared.config.grant_timeout);
        tables.assemblies.insert(key, Assembly { expires, ..single });
        single = Assembly { generation, expires: 0, fragments: GrantAssembly::default() };
    }
    let assembly = &mut tables.assemblies.get_mut(&key).filter(|_| num_fragments > 1).unwrap_or(&mut single).fragments;
    match assembly.add(fragment, num_fragments, payload, limit) {
        Ok(None) => None,
        Ok(Some(body)) => {
            tables.assemblies.remove(&key);
            Some(body)
        }
        Err(e) => {
            tables.assemblies.remove(&key);
            count(&shared.counters.messages_malformed);
            log::warn!("room {room}: dropped a malformed grant of peer {peer}: {e:?}");
            let text = format!("room {room}: the grant was malformed");
            tables.tell(peer, Message::Failed { room, generation, code: NIXL_ERR_PROTOCOL, drained: true, text });
            None
        }
    }
}

/// A receiver's grant has come whole: to the room, or parked until its first chunk.
fn granted(
    shared: &Shared,
    tables: &mut Tables,
    peer: PeerId,
    room: u64,
    generation: u64,
    revision: u64,
    body: GrantBody,
) {
    let now = shared.now();
    let refusal = tables.peers.current(peer).and_then(|entry| {
        if entry.to_peer.is_none() {
            fail!(NIXL_ERR_ROLE, "room {room}: engine {} does not send to decode engines", shared.name);
        }
        if entry.revision != revision {
            fail!(
                NIXL_ERR_PEER_STALE,
                "room {room}: {} holds revision {} of the receiver's regions, the grant is for {revision}",
                shared.name,
                entry.revision
            );
        }
        if tables.shut_down {
            fail!(NIXL_ERR_PEER_DISCONNECTED, "room {room}: engine {} shut down", shared.name);
        }
        if entry.mapped_revision != tables.revision {
            fail!(
                NIXL_ERR_PEER_STALE,
                "room {room}: {}'s regions changed since it connected the receiver: exchange blobs again",
                shared.name
            );
        }
        if entry.known_revision != tables.revision {
            fail!(
                NIXL_ERR_PEER_STALE,
                "room {room}: the receiver holds revision {} of {}'s regions, they are at {}",
                entry.known_revision,
                shared.name,
                tables.revision
            );
        }
        check_grant(room, &body, &entry.table)
    });
    let body = Arc::new(body);
    let mut refusal = refusal;
    if !tables.rooms.contains_key(&room)
        && let Some(tombstone) = tables.tombstones.get_mut(&room)
    {
        refusal = Err(tombstone.cause.clone());
        tombstone.num_told += 1;
        // Everybody has heard: the next grant is for the room's next life.
        if tombstone.num_told >= body.num_receivers.max(1) {
            tables.tombstones.remove(&room);
        }
    }
    let refused = match (refusal, tables.rooms.get(&room).map(|entry| &entry.room)) {
        (Err(refusal), _) => Some(refusal),
        (Ok(()), Some(Room::Receiver(_))) => {
            Some(Error::new(NIXL_ERR_ROOM_IN_USE, format!("room {room} is open as a receiver at {}", shared.name)))
        }
        (Ok(()), Some(Room::Sender(_))) => {
            let groups = tables.shared_groups(peer);
            tables.with_room(room, &shared.counters, |machine, out| {
                if let Room::Sender(sender) = machine {
                    sender.grant(peer, generation, body, groups, now, out);
                }
            });
            None
        }
        (Ok(()), None) => {
            let expires = now.saturating_add(shared.config.room_timeout);
            let item = ParkedItem { peer, generation, item: Parked::Grant(body), expires };
            (!tables.park(room, item, shared.config.max_rooms)).then(|| {
                let text =
                    format!("room {room}: {} grants wait for their first chunk at {}", tables.num_parked, shared.name);
                Error::new(NIXL_ERR_TOO_MANY_ROOMS, text)
            })
        }
    };
    if let Some(Error { code, text }) = refused {
        tables.tell(peer, Message::Failed { room, generation, code, drained: true, text: text.into_owned() });
    }
}
