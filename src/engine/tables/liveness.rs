//! The peers' coming and going, and the time limits.

use super::super::peers::Retry;
use super::super::peers::{Mappings, Standing};
use super::*;
use crate::protocol::Card;

/// How long after a loss the peer is connected again; then ever longer.
const FIRST_RETRY: Millis = 250;
/// The longest wait between two attempts.
const LAST_RETRY: Millis = 3000;
/// How long after a loss the last attempt is made.
const RETRY_FOR: Millis = 600_000;
/// A gap between two looks at the clock that is longer than this, and than a heartbeat, is our own doing.
const STARVED: Millis = 100;
/// How long such an attempt waits for the peer's answer.
const RETRY_LIMIT: Millis = 3000;

impl Tables {
    /// Whether a peer's card can be taken in now. `Some`: it is connected just so already.
    pub fn admit(&self, card: &Card, mapped_revision: u64) -> Result<Option<PeerId>> {
        let name = &card.name;
        if let Some(peer) = self.peers.same_instance(card).and_then(|id| self.peers.get(id).ok()) {
            if peer.standing != Standing::Closed
                && peer.replaced.is_none()
                && (peer.card.revision, peer.mapped_revision) == (card.revision, mapped_revision)
            {
                return Ok(Some(peer.link.peer));
            }
            if peer.card.revision > card.revision {
                fail!(
                    NIXL_ERR_PEER_STALE,
                    "the blob of {name} has revision {}, revision {} is connected already",
                    card.revision,
                    peer.card.revision
                );
            }
            if peer.replaced.is_some() {
                fail!(NIXL_ERR_PEER_BUSY, "a newer instance of {name} is connected, and this one has rooms to drain");
            }
        }
        if self.closing.iter().any(|(link, _)| link.agent == card.agent) {
            fail!(NIXL_ERR_PEER_BUSY, "the earlier connection to {name} is still closing");
        }
        Ok(None)
    }

    /// A peer's card has been taken in: it is a peer from now on, or is one again, and is greeted. An earlier instance
    /// with its name is replaced.
    pub fn connected(&mut self, card: Card, mappings: Mappings, mapped_revision: u64, now: Millis) -> PeerId {
        let known = self.peers.same_instance(&card);
        if let Some(earlier) = self.peers.earlier_instance(&card) {
            let text = format!("peer {} has restarted: a new instance has connected", card.name);
            self.replaced(earlier, Error::new(NIXL_ERR_PEER_RESTARTED, text), now);
        }
        let id = known.unwrap_or_else(|| self.peers.reserve_id());
        let new_connection = self.peers.reserve_id();
        let old = known.and_then(|id| self.peers.get(id).ok());
        let kept = old.filter(|peer| peer.standing != Standing::Closed);
        let kept_revision = kept.map(|peer| peer.card.revision);
        let peer = Peer {
            link: kept.map_or_else(|| Link::new(id, card.agent.clone()), |peer| peer.link.clone()),
            mapped_revision,
            announced: kept.map_or(card.revision, |peer| peer.announced.max(card.revision)),
            known_revision: kept.map_or(0, |peer| peer.known_revision),
            to_peer: mappings.to_peer,
            from_peer: mappings.from_peer,
            standing: kept.map_or(Standing::Connecting, |peer| peer.standing),
            last_heard: now,
            last_ping: now,
            closed_because: None,
            replaced: None,
            connection: kept.map_or(new_connection, |peer| peer.connection),
            heard_connection: old.map_or(0, |peer| peer.heard_connection),
            their_connection: kept.map_or(0, |peer| peer.their_connection),
            // As long as it does not answer this is an attempt, and is given up in time.
            retry: old.and_then(|peer| peer.retry).map(|retry| Retry { due: now.saturating_add(RETRY_LIMIT), ..retry }),
            ended: old.map_or_else(Ended::default, |peer| peer.ended.clone()),
            card: Arc::new(card),
        };
        self.parted.retain(|parted| parted.link.agent != peer.card.agent);
        let (changed, name) = (kept_revision != Some(peer.card.revision), peer.card.name.clone());
        self.peers.insert(peer);
        if changed {
            // What is expected of it no longer is what it has. Where something has landed, it had taken the grant.
            let text = format!("peer {name}'s regions changed while the room was on its way");
            let cause = Error::new(NIXL_ERR_PEER_STALE, text);
            self.with_rooms(
                now,
                |room| room.concerns(id),
                |room, out| {
                    if let Room::Receiver(receiver) = room {
                        receiver.sender_changed(id, &cause, out);
                    }
                },
            );
        }
        self.greet(id, true);
        id
    }

    /// Takes leave of a peer with which nothing is under way.
    pub fn disconnect(&mut self, peer: PeerId, now: Millis) -> Result<()> {
        let entry = self.peers.current(peer)?;
        let (name, goodbye) = (entry.card.name.clone(), entry.goodbye());
        let busy = self.rooms.values().filter(|entry| entry.room.concerns(peer) && !entry.room.quiesced()).count();
        if busy > 0 {
            fail!(NIXL_ERR_PEER_BUSY, "{busy} rooms with peer {name} are not quiesced: abort them first");
        }
        self.say_goodbye(peer, goodbye);
        let cause = Error::new(NIXL_ERR_PEER_DISCONNECTED, format!("peer {name} was disconnected"));
        self.part(peer, cause, now);
        Ok(())
    }

    /// Takes leave of a peer, now and when it shows that it has not heard it.
    fn say_goodbye(&mut self, peer: PeerId, goodbye: Message) {
        let Ok(entry) = self.peers.get(peer) else { return };
        let farewell = Outgoing { link: entry.link.clone(), message: goodbye };
        self.outbox.push(farewell.clone());
        self.parted.push_back(farewell);
        if self.parted.len() > MAX_PARTED {
            self.parted.pop_front();
        }
    }

    /// Takes a peer out: its rooms fail, and its connection is closed once nothing is in flight on it.
    fn part(&mut self, peer: PeerId, cause: Error, now: Millis) {
        self.with_rooms(now, |room| room.concerns(peer), |room, out| room.peer_gone(peer, &cause, false, out));
        if let Some(removed) = self.peers.remove(peer) {
            self.forget_parked(peer);
            self.unsaid.retain(|unsaid| unsaid.peer != peer);
            if removed.standing == Standing::Silent {
                // Not in good order: the next connection is a new one, not the same that is stuck.
                let text = format!("peer {} was silent", removed.card.name);
                self.closing.push((removed.link, Error::new(NIXL_ERR_PEER_LOST, text)));
            } else if removed.standing != Standing::Closed {
                self.closing.push((removed.link, cause));
            } else if !self.closing.iter().any(|(link, _)| link.peer == peer) {
                self.connection_closed(peer, &cause, now);
            }
        }
    }

    /// A new instance has taken a peer's name: the old one's rooms fail. Forgetting it would not stop it from writing,
    /// should it still live, so it stays until its rooms have drained or its connection breaks.
    fn replaced(&mut self, peer: PeerId, cause: Error, now: Millis) {
        self.with_rooms(now, |room| room.concerns(peer), |room, out| room.peer_gone(peer, &cause, false, out));
        self.forget_parked(peer);
        if let Some(entry) = self.peers.get_mut(peer) {
            entry.replaced = Some(cause);
        }
        self.retire(now);
    }

    /// Takes replaced peers out with which no room can move anything any more.
    fn retire(&mut self, now: Millis) {
        let replaced: Vec<(PeerId, Error)> =
            self.peers.iter().filter_map(|peer| Some((peer.link.peer, peer.replaced.clone()?))).collect();
        for (peer, cause) in replaced {
            if !self.rooms.values().any(|entry| entry.room.concerns(peer) && !entry.room.quiesced()) {
                if let Ok(entry) = self.peers.get(peer)
                    && entry.standing != Standing::Closed
                {
                    let goodbye = entry.goodbye();
                    self.say_goodbye(peer, goodbye);
                }
                self.part(peer, cause, now);
            }
        }
    }

    /// The connection to a peer broke: it stays known, and a new connect brings it back.
    pub fn broke(&mut self, peer: PeerId, cause: Error, now: Millis) {
        let Some(entry) = self.peers.get_mut(peer) else { return };
        if entry.standing == Standing::Closed {
            return;
        }
        if cause.code == NIXL_ERR_PEER_DISCONNECTED {
            log::info!("peer {} has left: {cause}", entry.card.name);
        } else if entry.retry.is_none() {
            log::warn!("peer {} is lost: {cause}", entry.card.name);
        }
        entry.standing = Standing::Closed;
        // One that has left comes back by itself, if at all.
        if cause.code != NIXL_ERR_PEER_DISCONNECTED {
            entry.retry_later(now);
        }
        entry.closed_because = Some(cause.clone());
        entry.link.closed.store(true, Ordering::Release);
        let link = entry.link.clone();
        self.closing.push((link, cause.clone()));
        self.forget_parked(peer);
        self.with_rooms(now, |room| room.concerns(peer), |room, out| room.peer_gone(peer, &cause, false, out));
    }

    /// The connection to a peer is closed: it can write no more.
    pub fn connection_closed(&mut self, peer: PeerId, cause: &Error, now: Millis) {
        self.with_rooms(now, |room| room.concerns(peer), |room, out| room.peer_gone(peer, cause, true, out));
    }

    /// A peer has been silent for longer than the liveness limit. Its connection stays: it may come back and drain.
    fn went_silent(&mut self, peer: PeerId, cause: Error, now: Millis) {
        let Some(entry) = self.peers.get_mut(peer) else { return };
        log::warn!("peer {} is silent: {cause}", entry.card.name);
        entry.standing = Standing::Silent;
        self.with_rooms(now, |room| room.concerns(peer), |room, out| room.peer_gone(peer, &cause, false, out));
    }

    /// Something came from a peer.
    pub(super) fn heard(&mut self, peer: PeerId, now: Millis) {
        let Some(entry) = self.peers.get_mut(peer) else { return };
        entry.last_heard = now;
        if entry.standing == Standing::Silent {
            log::info!("peer {} is back", entry.card.name);
            entry.standing = Standing::Ready;
            self.with_rooms(
                now,
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
    pub(super) fn greeted(&mut self, peer: PeerId, hello: Hello, now: Millis) {
        let our_revision = self.revision;
        let Some(entry) = self.peers.get_mut(peer) else { return };
        if hello.known_instance != self.identity.instance || hello.connection < entry.heard_connection {
            // Meant for an earlier life of ours, or of an earlier connection of its.
            count(&self.counters.messages_stale);
            return;
        }
        entry.heard_connection = hello.connection;
        if entry.their_connection != 0 && entry.their_connection != hello.connection {
            // It has connected anew, and so has given up whatever it had under way with us, and drained it.
            let text = format!("peer {} has connected anew", entry.card.name);
            let cause = Error::new(NIXL_ERR_PEER_LOST, text);
            self.connection_closed(peer, &cause, now);
            return self.broke(peer, cause, now);
        }
        if hello.known_connection != entry.connection {
            // It has not heard of our connection yet. Until it has, nothing that it says can be meant for it.
            return self.greet(peer, true);
        }
        let before = (entry.announced, entry.known_revision, entry.their_connection);
        // Hellos may overtake each other, and revisions only grow.
        entry.announced = entry.announced.max(hello.revision);
        entry.known_revision = entry.known_revision.max(hello.known_revision);
        entry.their_connection = hello.connection;
        entry.ended.raise(hello.oldest_generation);
        entry.retry = None;
        if entry.standing == Standing::Connecting {
            entry.standing = Standing::Ready;
        }
        let changed = before != (entry.announced, entry.known_revision, entry.their_connection);
        // Both sides hold the other's regions as they are now. Otherwise a hello of after the next exchange will say so,
        // and rooms that wait for this peer wait for that one.
        let current = entry.known_revision == our_revision && entry.stale().is_none();
        if hello.reply {
            self.greet(peer, false);
        }
        if !changed || !current {
            return;
        }
        let (said, unsaid) = std::mem::take(&mut self.unsaid).into_iter().partition(|unsaid| unsaid.peer == peer);
        self.unsaid = unsaid;
        let said: VecDeque<Unsaid> = said;
        for unsaid in said {
            self.tell(peer, unsaid.message);
        }
        self.with_rooms(
            now,
            |room| room.concerns(peer),
            |room, out| {
                if let Room::Receiver(receiver) = room {
                    receiver.peer_ready(peer, now, out);
                }
            },
        );
    }

    /// Says hello to a peer.
    pub fn greet(&mut self, peer: PeerId, reply: bool) {
        if let Ok(entry) = self.peers.get(peer) {
            let hello = self.hello(entry, reply);
            self.tell(peer, hello);
        }
    }

    /// Time has passed, `gap` of it since the last tick: limits, heartbeats.
    pub fn tick(&mut self, now: Millis, gap: Millis) {
        let (heartbeat_interval, liveness_limit) = (self.config.heartbeat_interval, self.config.liveness_limit);
        let mut greet = Vec::new();
        let mut silent = Vec::new();
        for peer in self.peers.iter_mut() {
            if gap > heartbeat_interval.max(STARVED) {
                // This thread was stopped, or starved: that says nothing of the peer.
                peer.last_heard = peer.last_heard.saturating_add(gap).min(now);
            }
            if peer.standing == Standing::Closed {
                continue;
            }
            if peer.standing == Standing::Connecting && peer.retry.is_some_and(|retry| retry.due <= now) {
                silent.push((peer.link.peer, Error::new(NIXL_ERR_PEER_LOST, "it does not answer")));
                continue;
            }
            let quiet = now.saturating_sub(peer.last_heard);
            if peer.standing == Standing::Ready && quiet >= liveness_limit {
                let text = format!("peer {} has been silent for {quiet} ms", peer.card.name);
                silent.push((peer.link.peer, Error::new(NIXL_ERR_PEER_LOST, text)));
            }
            // The heartbeat is a hello: it also makes up for one that was lost. And it is a probe: a peer that has died
            // shows itself by the transport's error.
            if now.saturating_sub(peer.last_ping) >= heartbeat_interval {
                peer.last_ping = now;
                greet.push(peer.link.peer);
            }
        }
        let suspects = self.peers.iter().filter(|peer| peer.is_suspect(now, heartbeat_interval));
        self.suspects = suspects.map(|peer| peer.link.peer).collect();
        for peer in greet {
            self.greet(peer, true);
        }
        for (peer, cause) in silent {
            match self.peers.get(peer).map(|peer| peer.standing) {
                Ok(Standing::Connecting) => self.broke(peer, cause, now),
                _ => self.went_silent(peer, cause, now),
            }
        }
        self.with_rooms(now, |room| !room.quiesced(), |room, out| room.tick(now, out));
        self.retire(now);
        self.expire_parked(now);
        self.failure_lines.tick(now);
    }

    /// The connections that can be closed now: nothing is in flight on them, and no message, such as a goodbye, is on
    /// its way out. They stay in the list until [`Tables::closed`], so that no connect comes in between.
    pub fn ready_to_close(&self) -> Vec<(Arc<Link>, Error)> {
        if self.closing.is_empty() {
            return Vec::new();
        }
        let ready = |link: &Link| link.in_flight.load(Ordering::Acquire) == 0 && self.outbox.len_to(link.peer) == 0;
        self.closing.iter().filter(|(link, _)| ready(link)).cloned().collect()
    }

    /// Lost peers that should be connected again now: their cards.
    pub fn due_retries(&self, now: Millis) -> Vec<Arc<Card>> {
        if self.shut_down {
            return Vec::new();
        }
        let is_closing = |peer: &Peer| self.closing.iter().any(|(link, _)| link.peer == peer.link.peer);
        let is_due = |peer: &&Peer| {
            peer.standing == Standing::Closed
                && peer.replaced.is_none()
                && peer.retry.is_some_and(|retry| retry.due <= now && now < retry.until)
                && !is_closing(peer)
        };
        self.peers.iter().filter(is_due).map(|peer| peer.card.clone()).collect()
    }

    /// Such an attempt has failed at once.
    pub fn retry_failed(&mut self, card: &Card, now: Millis) {
        if let Some(entry) = self.peers.same_instance(card).and_then(|peer| self.peers.get_mut(peer)) {
            entry.retry_later(now);
        }
    }

    /// These connections have been closed: the peers can write no more.
    pub fn closed(&mut self, closed: &[(Arc<Link>, Error)], now: Millis) {
        self.closing.retain(|(link, _)| !closed.iter().any(|(done, _)| done.peer == link.peer));
        for (link, cause) in closed {
            self.connection_closed(link.peer, cause, now);
        }
    }
}

impl Peer {
    /// Takes leave of it.
    pub fn goodbye(&self) -> Message {
        Message::Goodbye { connection: self.connection, known_connection: self.heard_connection }
    }

    /// Whether a goodbye is for this connection, and not for an earlier one. It may come before the two are paired.
    pub(super) fn is_meant(&self, connection: u64, known_connection: u64) -> bool {
        if self.their_connection != 0 {
            return connection == self.their_connection;
        }
        connection >= self.heard_connection && (known_connection == 0 || known_connection == self.connection)
    }

    /// Books the next attempt to connect it again.
    fn retry_later(&mut self, now: Millis) {
        let first = Retry { due: 0, wait: FIRST_RETRY, until: now.saturating_add(RETRY_FOR) };
        let Retry { wait, until, .. } = self.retry.unwrap_or(first);
        let next = wait.saturating_mul(2).min(LAST_RETRY);
        self.retry = Some(Retry { due: now.saturating_add(wait), wait: next, until });
    }

    /// Why its regions or ours no longer are what the blobs said.
    pub fn stale(&self) -> Option<String> {
        (self.announced != self.card.revision).then(|| {
            format!(
                "peer {} has revision {} of its regions, we hold {}",
                self.card.name, self.announced, self.card.revision
            )
        })
    }
}
