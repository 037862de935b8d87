//! Connecting peers, and their coming and going.

use std::sync::Arc;
use std::sync::PoisonError;

use crate::error::*;
use crate::protocol::{Message, decode_card};
use crate::room::{PeerId, Room};

use super::peers::{self, Link, Peer, Standing};
use super::{Engine, Shared, Tables, agent_name};

/// A hello to a peer: which of its lives we mean, and which table of it we hold.
pub fn hello(our_revision: u64, peer: &Peer, reply: bool) -> Message {
    Message::Hello {
        revision: our_revision,
        known_revision: peer.revision,
        known_instance: peer.instance,
        connection: peer.connection,
        reply,
    }
}

impl Engine {
    /// Connects a peer by its blob and gives its id. The same blob again is the same peer; a newer blob of the same
    /// instance updates it; a new instance under the same name replaces the old one, whose rooms fail.
    pub fn connect(&self, blob: &[u8]) -> Result<PeerId> {
        let shared = self.shared();
        self.check_open()?;
        let card = decode_card(blob)?;
        if card.instance == shared.instance {
            fail!(NIXL_ERR_PEER_SELF, "the blob is of this engine itself, {}", shared.name);
        }
        if card.agent != agent_name(&card.instance) {
            fail!(NIXL_ERR_METADATA_INVALID, "the blob's agent name {:?} does not fit its instance", card.agent);
        }
        // Held throughout: connects of the same peer from two threads must not cross, and our table must stand still.
        let _memory = shared.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let published = shared.published();
        let mappings = peers::check_card(&card, shared.config.role, &shared.config.cache_dtype, &published.table)?;
        let (known, earlier) = {
            let tables = shared.tables();
            let known = tables.peers.same_instance(&card);
            if let Some(peer) = known.and_then(|id| tables.peers.get(id).ok())
                && peer.standing != Standing::Closed
                && peer.replaced.is_none()
                && (peer.revision, peer.mapped_revision) == (card.revision, published.revision)
            {
                return Ok(peer.link.peer);
            }
            if let Some(peer) = known.and_then(|id| tables.peers.get(id).ok())
                && peer.revision > card.revision
            {
                fail!(
                    NIXL_ERR_PEER_STALE,
                    "the blob of {} has revision {}, revision {} is connected already",
                    card.name,
                    card.revision,
                    peer.revision
                );
            }
            if known.and_then(|id| tables.peers.get(id).ok()).is_some_and(|peer| peer.replaced.is_some()) {
                fail!(
                    NIXL_ERR_PEER_BUSY,
                    "a newer instance of {} is connected, and this one has rooms to drain",
                    card.name
                );
            }
            if tables.closing.iter().any(|(link, _)| link.agent == card.agent) {
                fail!(NIXL_ERR_PEER_BUSY, "the earlier connection to {} is still closing", card.name);
            }
            (known, tables.peers.earlier_instance(&card))
        };
        match shared.agent.load_metadata(&card.metadata) {
            Ok(agent) if agent == card.agent => {}
            Ok(agent) => {
                let _ = shared.agent.forget(&agent);
                fail!(
                    NIXL_ERR_METADATA_INVALID,
                    "NIXL's metadata in the blob is of agent {agent:?}, not {:?}",
                    card.agent
                );
            }
            Err(failure) => {
                fail!(NIXL_ERR_METADATA_INVALID, "NIXL refused the metadata of {}: {failure}", card.name);
            }
        }
        let mut tables = shared.tables();
        let before = tables.num_changes;
        if let Some(earlier) = earlier {
            let text = format!("peer {} has restarted: a new instance has connected", card.name);
            tables.replaced(shared, earlier, Error::new(NIXL_ERR_PEER_RESTARTED, text));
        }
        let id = known.unwrap_or_else(|| tables.peers.reserve_id());
        let new_connection = tables.peers.reserve_id();
        let now = shared.now();
        let old = known.and_then(|id| tables.peers.get(id).ok());
        let kept = old.filter(|peer| peer.standing != Standing::Closed);
        let link = kept.map_or_else(|| Link::new(id, card.agent.clone()), |peer| peer.link.clone());
        let connection = kept.map_or(new_connection, |peer| peer.connection);
        let peer = Peer {
            link,
            instance: card.instance,
            revision: card.revision,
            mapped_revision: published.revision,
            announced: kept.map_or(card.revision, |peer| peer.announced.max(card.revision)),
            known_revision: kept.map_or(0, |peer| peer.known_revision),
            table: Arc::new(card.regions),
            to_peer: mappings.to_peer,
            from_peer: mappings.from_peer,
            standing: kept.map_or(Standing::Connecting, |peer| peer.standing),
            last_heard: now,
            last_ping: now,
            closed_because: None,
            replaced: None,
            connection,
            their_connection: kept.map_or(0, |peer| peer.their_connection),
            name: card.name,
        };
        let message = hello(published.revision, &peer, true);
        tables.peers.insert(peer);
        tables.tell(id, message);
        shared.finish(tables, before);
        Ok(id)
    }

    /// Disconnects a peer: its rooms fail, and the connection closes as soon as nothing is in flight on it.
    pub fn disconnect(&self, peer: PeerId) -> Result<()> {
        let shared = self.shared();
        let mut tables = shared.tables();
        let before = tables.num_changes;
        let entry = tables.peers.current(peer)?;
        let (name, connection) = (entry.name.clone(), entry.connection);
        let busy = tables.rooms.values().filter(|entry| entry.room.concerns(peer) && !entry.room.quiesced()).count();
        if busy > 0 {
            fail!(NIXL_ERR_PEER_BUSY, "{busy} rooms with peer {name} are not quiesced: abort them first");
        }
        tables.tell(peer, Message::Goodbye { connection });
        tables.part(shared, peer, Error::new(NIXL_ERR_PEER_DISCONNECTED, format!("peer {name} was disconnected")));
        shared.finish(tables, before);
        shared.wake();
        Ok(())
    }
}

impl Tables {
    /// Takes a peer out: its rooms fail, and its connection is closed once nothing is in flight on it.
    pub fn part(&mut self, shared: &Shared, peer: PeerId, cause: Error) {
        self.with_rooms(
            &shared.counters,
            |room| room.concerns(peer),
            |room, out| room.peer_gone(peer, &cause, false, out),
        );
        if let Some(removed) = self.peers.remove(peer) {
            self.forget_parked(peer);
            if removed.standing != Standing::Closed {
                self.closing.push((removed.link, cause));
            } else if !self.closing.iter().any(|(link, _)| link.peer == peer) {
                self.connection_closed(shared, peer, &cause);
            }
        }
    }

    /// A new instance has taken a peer's name: the old one's rooms fail. Forgetting it would not stop it from writing,
    /// should it still live, so it stays until its rooms have drained or its connection breaks.
    fn replaced(&mut self, shared: &Shared, peer: PeerId, cause: Error) {
        self.with_rooms(
            &shared.counters,
            |room| room.concerns(peer),
            |room, out| room.peer_gone(peer, &cause, false, out),
        );
        self.forget_parked(peer);
        if let Some(entry) = self.peers.get_mut(peer) {
            entry.replaced = Some(cause);
        }
        self.retire(shared);
    }

    /// Takes replaced peers out with which no room can move anything any more.
    pub fn retire(&mut self, shared: &Shared) {
        let replaced: Vec<(PeerId, Error)> =
            self.peers.iter().filter_map(|peer| Some((peer.link.peer, peer.replaced.clone()?))).collect();
        for (peer, cause) in replaced {
            if !self.rooms.values().any(|entry| entry.room.concerns(peer) && !entry.room.quiesced()) {
                self.part(shared, peer, cause);
            }
        }
    }

    /// The connection to a peer broke: it stays known, and a new connect brings it back.
    pub fn broke(&mut self, shared: &Shared, peer: PeerId, cause: Error) {
        let Some(entry) = self.peers.get_mut(peer) else { return };
        if entry.standing == Standing::Closed {
            return;
        }
        if cause.code == NIXL_ERR_PEER_DISCONNECTED {
            log::info!("peer {} has left: {cause}", entry.name);
        } else {
            log::warn!("peer {} is lost: {cause}", entry.name);
        }
        entry.standing = Standing::Closed;
        entry.closed_because = Some(cause.clone());
        entry.link.closed.store(true, std::sync::atomic::Ordering::Release);
        let link = entry.link.clone();
        self.closing.push((link, cause.clone()));
        self.forget_parked(peer);
        self.with_rooms(
            &shared.counters,
            |room| room.concerns(peer),
            |room, out| room.peer_gone(peer, &cause, false, out),
        );
    }

    /// The connection to a peer is closed: it can write no more.
    pub fn connection_closed(&mut self, shared: &Shared, peer: PeerId, cause: &Error) {
        self.with_rooms(
            &shared.counters,
            |room| room.concerns(peer),
            |room, out| room.peer_gone(peer, cause, true, out),
        );
    }

    /// A peer has been silent for longer than the liveness limit. Its connection stays: it may come back and drain.
    pub fn went_silent(&mut self, shared: &Shared, peer: PeerId, cause: Error) {
        let Some(entry) = self.peers.get_mut(peer) else { return };
        log::warn!("peer {}: {cause}", entry.name);
        entry.standing = Standing::Silent;
        self.with_rooms(
            &shared.counters,
            |room| room.concerns(peer),
            |room, out| room.peer_gone(peer, &cause, false, out),
        );
    }

    /// Something came from a peer.
    pub fn heard(&mut self, shared: &Shared, peer: PeerId) {
        let now = shared.now();
        let Some(entry) = self.peers.get_mut(peer) else { return };
        entry.last_heard = now;
        if entry.standing == Standing::Silent {
            log::info!("peer {} is back", entry.name);
            entry.standing = Standing::Ready;
            self.with_rooms(
                &shared.counters,
                |room| room.concerns(peer),
                |room, out| {
                    if let Room::Receiver(receiver) = room {
                        receiver.ask_again(peer, out);
                    }
                },
            );
        }
    }

    /// A peer said hello.
    pub fn greeted(
        &mut self,
        shared: &Shared,
        peer: PeerId,
        (revision, known_revision): (u64, u64),
        connection: u64,
        reply: bool,
    ) {
        let our_revision = self.revision;
        let Some(entry) = self.peers.get_mut(peer) else { return };
        entry.announced = revision;
        entry.known_revision = known_revision;
        entry.their_connection = connection;
        if entry.standing == Standing::Connecting {
            entry.standing = Standing::Ready;
        }
        let answer = reply.then(|| hello(our_revision, entry, false));
        // Both sides hold the other's regions as they are now. Otherwise a hello of after the next exchange will say so,
        // and rooms that wait for this peer wait for that one.
        let current = known_revision == our_revision && entry.stale().is_none();
        if let Some(answer) = answer {
            self.tell(peer, answer);
        }
        if !current {
            return;
        }
        let now = shared.now();
        self.with_rooms(
            &shared.counters,
            |room| room.concerns(peer),
            |room, out| {
                if let Room::Receiver(receiver) = room {
                    receiver.peer_ready(peer, now, out);
                }
            },
        );
    }

    /// Drops what a peer that is gone had parked or begun.
    fn forget_parked(&mut self, peer: PeerId) {
        let mut removed = 0;
        self.parked.retain(|_, items| {
            let before = items.len();
            items.retain(|item| item.peer != peer);
            removed += before - items.len();
            !items.is_empty()
        });
        self.num_parked -= removed;
        self.assemblies.retain(|(from, _), _| *from != peer);
    }
}

impl Peer {
    /// Why its regions or ours no longer are what the blobs said.
    pub fn stale(&self) -> Option<String> {
        (self.announced != self.revision).then(|| {
            format!("peer {} has revision {} of its regions, we hold {}", self.name, self.announced, self.revision)
        })
    }
}
