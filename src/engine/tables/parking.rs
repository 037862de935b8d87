//! What has come for rooms that we have not opened yet, within bounds.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::error::Error;
use crate::layout::Mapping;
use crate::protocol::GrantBody;
use crate::room::{Millis, PeerId};

/// Most notices that a room was given up before we opened it. The oldest goes first: its room waits for a grant then.
const MAX_ABORTS: usize = 1 << 14;
/// Most indices in all parked grants: 64 MiB.
const MAX_INDICES: u64 = 1 << 24;

/// What has come for a room that we have not opened.
#[derive(Debug, Clone)]
pub enum Parked {
    /// A grant.
    Grant {
        /// What.
        body: Arc<GrantBody>,
        /// The revision of our regions that it was good for.
        revision: u64,
        /// What mapped onto what then.
        mapping: Option<Arc<Mapping>>,
    },
    /// The receiver gave the room up again.
    Aborted {
        /// Why.
        cause: Error,
        /// How many receivers the room has.
        num_receivers: u32,
        /// Of the others, those that have been told.
        told: Vec<PeerId>,
    },
}

impl std::hash::Hash for Parked {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        match self {
            // The mapping follows from the revisions.
            Parked::Grant { body, revision, .. } => (body, revision).hash(state),
            Parked::Aborted { cause, num_receivers, told } => (cause, num_receivers, told).hash(state),
        }
    }
}

/// A parked message.
#[derive(Debug, Clone, Hash)]
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

impl ParkedItem {
    /// Whether it is a notice that the room was given up.
    pub fn is_abort(&self) -> bool {
        matches!(self.item, Parked::Aborted { .. })
    }

    fn num_indices(&self) -> u64 {
        match &self.item {
            Parked::Grant { body, .. } => {
                body.states.iter().fold(body.pages.len(), |sum, (_, slots)| sum + slots.len()) as u64
            }
            Parked::Aborted { .. } => 0,
        }
    }
}

/// The parked messages, one for each peer and room.
#[derive(Debug, Clone, Default)]
pub struct Parking {
    pub(super) rooms: BTreeMap<u64, Vec<ParkedItem>>,
    /// Items and indices.
    by_peer: BTreeMap<PeerId, (usize, u64)>,
    num_items: usize,
    num_indices: u64,
    /// The aborts, oldest first; some are no longer there.
    aborts: VecDeque<(u64, PeerId, u64)>,
}

impl Parking {
    /// How many messages are parked.
    pub fn len(&self) -> usize {
        self.num_items
    }

    /// How many indices a peer may still park, should others have to make room for it.
    pub fn num_indices_left(&self, peer: PeerId) -> u64 {
        MAX_INDICES - self.by_peer.get(&peer).map_or(0, |(_, indices)| *indices)
    }

    /// What is parked for a room.
    pub fn get(&self, room: u64) -> &[ParkedItem] {
        self.rooms.get(&room).map_or(&[], Vec::as_slice)
    }

    /// What is parked of exactly this life of a room.
    pub fn of(&self, peer: PeerId, room: u64, generation: u64) -> Option<&ParkedItem> {
        self.get(room).iter().find(|item| item.peer == peer && item.generation == generation)
    }

    /// Parks a message in the place of an older one of the same peer for the same room. At the limit of `most` items an
    /// abort makes room, then the peer that holds the most; gives what was dropped for that and must be answered, the
    /// new one itself included.
    pub fn park(&mut self, room: u64, item: ParkedItem, most: usize) -> Vec<(u64, ParkedItem)> {
        // Of one life the abort is the last word.
        let newer = |old: &ParkedItem| {
            old.generation > item.generation || (old.generation == item.generation && old.is_abort())
        };
        if self.get(room).iter().any(|old| old.peer == item.peer && newer(old)) {
            return Vec::new();
        }
        self.remove(room, |old| old.peer == item.peer);
        let num_indices = item.num_indices();
        let mut dropped = Vec::new();
        loop {
            let too_many_items = self.num_items >= most;
            if !too_many_items && self.num_indices.saturating_add(num_indices) <= MAX_INDICES {
                break;
            }
            if too_many_items && self.evict_abort() {
                continue;
            }
            let greed = |(_, (items, indices)): &(&PeerId, &(usize, u64))| {
                if too_many_items { *items as u64 } else { *indices }
            };
            let greediest = self.by_peer.iter().max_by_key(greed).map(|(peer, _)| *peer);
            let holds = |items: &[ParkedItem], peer| {
                items.iter().any(|old| old.peer == peer && (too_many_items || old.num_indices() > 0))
            };
            let last_of = |peer| self.rooms.iter().rev().find(|(_, items)| holds(items, peer));
            match greediest.filter(|peer| *peer != item.peer).and_then(|peer| Some((peer, *last_of(peer)?.0))) {
                Some((peer, from)) => {
                    let removed = self.remove(from, |old| old.peer == peer);
                    dropped.extend(removed.into_iter().map(|item| (from, item)));
                }
                None => {
                    dropped.push((room, item));
                    return dropped;
                }
            }
        }
        if item.is_abort() {
            self.aborts.push_back((room, item.peer, item.generation));
        }
        self.num_items += 1;
        self.num_indices += num_indices;
        let held = self.by_peer.entry(item.peer).or_default();
        *held = (held.0 + 1, held.1 + num_indices);
        self.rooms.entry(room).or_default().push(item);
        while self.aborts.len() > MAX_ABORTS && self.evict_abort() {}
        dropped
    }

    /// Drops the oldest abort, if it is still there. False: there is none to drop.
    fn evict_abort(&mut self) -> bool {
        let Some((room, peer, generation)) = self.aborts.pop_front() else { return false };
        self.remove(room, |old| (old.peer, old.generation) == (peer, generation) && old.is_abort());
        true
    }

    /// Takes out of a room what `which` picks.
    fn remove(&mut self, room: u64, which: impl Fn(&ParkedItem) -> bool) -> Vec<ParkedItem> {
        let Some(items) = self.rooms.get_mut(&room) else { return Vec::new() };
        let removed: Vec<ParkedItem> = items.extract_if(.., |item| which(item)).collect();
        if items.is_empty() {
            self.rooms.remove(&room);
        }
        for item in &removed {
            self.num_items -= 1;
            self.num_indices -= item.num_indices();
            if let Some(held) = self.by_peer.get_mut(&item.peer) {
                *held = (held.0 - 1, held.1 - item.num_indices());
                if held.0 == 0 {
                    self.by_peer.remove(&item.peer);
                }
            }
        }
        removed
    }

    /// Takes everything that `which` picks, with its room.
    pub fn take_all(&mut self, which: impl Fn(&ParkedItem) -> bool) -> Vec<(u64, ParkedItem)> {
        let rooms = self.rooms.iter().filter(|(_, items)| items.iter().any(&which));
        let rooms: Vec<u64> = rooms.map(|(room, _)| *room).collect();
        let mut taken = Vec::new();
        for room in rooms {
            taken.extend(self.remove(room, &which).into_iter().map(|item| (room, item)));
        }
        taken
    }

    /// Another receiver of a room that one of so many gave up grants it. Why it was given up, once for each receiver:
    /// what comes later is of another life.
    pub fn meets_abort(&mut self, room: u64, peer: PeerId, receivers: u32) -> Option<Error> {
        self.rooms.get_mut(&room)?.iter_mut().find_map(|item| match &mut item.item {
            Parked::Aborted { cause, num_receivers, told }
                if item.peer != peer && receivers > 1 && *num_receivers == receivers && !told.contains(&peer) =>
            {
                told.push(peer);
                Some(cause.clone())
            }
            _ => None,
        })
    }

    /// Why a room would open as failed: a receiver gave it up, and the others' grants are not all there.
    pub fn failure(&self, room: u64) -> Option<&Error> {
        let items = self.get(room);
        let cause = items.iter().find_map(|item| match &item.item {
            Parked::Aborted { cause, .. } => Some(cause),
            Parked::Grant { .. } => None,
        })?;
        let mut grants = items.iter().filter_map(|item| match &item.item {
            Parked::Grant { body, .. } => Some(body.num_receivers.max(1)),
            Parked::Aborted { .. } => None,
        });
        let complete = grants.next().is_some_and(|receivers| grants.count() as u64 + 1 >= u64::from(receivers));
        (!complete).then_some(cause)
    }

    /// Takes the grants that are parked for a room.
    pub fn take_grants(&mut self, room: u64) -> Vec<ParkedItem> {
        self.remove(room, |item| !item.is_abort())
    }

    /// Takes what is parked for a room.
    pub fn take(&mut self, room: u64) -> Vec<ParkedItem> {
        self.remove(room, |_| true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(peer: PeerId, generation: u64, num_pages: usize) -> ParkedItem {
        let body = GrantBody { pages: vec![0; num_pages], num_receivers: 1, ..GrantBody::default() };
        let item = Parked::Grant { body: Arc::new(body), revision: 1, mapping: None };
        ParkedItem { peer, generation, item, expires: 9 }
    }

    fn abort(peer: PeerId, generation: u64) -> ParkedItem {
        let cause = Error::new(crate::error::NIXL_ERR_ABORTED, "given up");
        let item = Parked::Aborted { cause, num_receivers: 1, told: Vec::new() };
        ParkedItem { peer, generation, item, expires: 9 }
    }

    #[test]
    fn d9_a_greedy_peer_makes_room_for_the_others() {
        let mut parking = Parking::default();
        for room in 0..100 {
            assert!(parking.park(room, grant(1, room, 1), 100).is_empty());
        }
        let refused = parking.park(100, grant(1, 100, 1), 100);
        assert_eq!((refused.len(), refused[0].0), (1, 100), "its own is refused when it is the greediest");
        for room in 200..249 {
            let refused = parking.park(room, grant(2, room, 1), 100);
            assert_eq!((refused.len(), refused[0].1.peer), (1, 1));
        }
        assert_eq!((parking.len(), parking.by_peer[&1].0, parking.by_peer[&2].0), (100, 51, 49));
        // Aborts go before any grant, the oldest first.
        parking.take_all(|item| item.peer == 1 && item.generation < 2);
        assert!(parking.park(300, abort(2, 300), 100).is_empty());
        assert!(parking.park(301, grant(1, 301, 1), 100).is_empty());
        assert!(parking.park(302, grant(1, 302, 1), 100).is_empty());
        assert!(parking.get(300).is_empty() && !parking.get(302).is_empty());
    }

    #[test]
    fn d4_the_indices_of_all_grants_are_bounded() {
        let mut parking = Parking::default();
        let most = MAX_INDICES as usize;
        assert!(parking.park(1, grant(1, 1, most / 2), 100).is_empty());
        assert!(parking.park(2, grant(1, 2, most / 2), 100).is_empty());
        assert_eq!(parking.park(3, grant(1, 3, 1), 100).len(), 1);
        for room in 10..14 {
            assert!(parking.park(room, grant(2, room, 0), 100).is_empty());
        }
        assert_eq!(parking.park(4, grant(2, 4, most), 100).len(), 2, "of whoever holds the most indices");
        assert_eq!((parking.len(), parking.num_indices), (5, MAX_INDICES));
        parking.take_all(|_| true);
        assert_eq!((parking.len(), parking.num_indices), (0, 0));
        assert!(parking.by_peer.is_empty());
    }

    #[test]
    fn the_newest_life_and_its_abort_are_the_last_word() {
        let mut parking = Parking::default();
        parking.park(1, grant(1, 5, 1), 100);
        parking.park(1, abort(1, 5), 100);
        parking.park(1, grant(1, 5, 1), 100);
        parking.park(1, grant(1, 4, 1), 100);
        assert!(parking.get(1).len() == 1 && parking.get(1)[0].is_abort());
        parking.park(1, grant(1, 6, 1), 100);
        parking.park(1, grant(2, 1, 1), 100);
        assert!(parking.get(1).len() == 2 && parking.of(1, 1, 6).is_some() && parking.of(1, 1, 5).is_none());
        for generation in 0..2 * MAX_ABORTS as u64 {
            parking.park(100 + generation, abort(1, generation), 1 << 20);
        }
        assert_eq!(parking.len(), MAX_ABORTS + 2);
        assert!(parking.aborts.len() <= MAX_ABORTS);
    }
}
