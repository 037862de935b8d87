//! The peers of an engine: who is connected, what maps onto what, and how long ago each was heard.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::error::*;
use crate::layout::{Mapping, RegionTable};
use crate::protocol::Card;
use crate::room::{Millis, PeerId};

use super::tables::Ended;

/// What the transfer threads need of a peer; it outlives the peer's entry.
#[derive(Debug)]
pub struct Link {
    /// The peer's id.
    pub peer: PeerId,
    /// The peer's NIXL agent name.
    pub agent: String,
    /// Posted and not settled.
    pub in_flight: AtomicU32,
    /// Post nothing more: the connection is closed, or about to be.
    pub closed: AtomicBool,
}

impl Link {
    /// An open link.
    pub fn new(peer: PeerId, agent: String) -> Arc<Self> {
        Arc::new(Self { peer, agent, in_flight: AtomicU32::new(0), closed: AtomicBool::new(false) })
    }

    /// The link of a peer that is no longer here.
    pub fn gone(peer: PeerId) -> Arc<Self> {
        Arc::new(Self { peer, agent: String::new(), in_flight: AtomicU32::new(0), closed: AtomicBool::new(true) })
    }

    /// Whether nothing more may be posted.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

/// How a peer stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// We have loaded its blob; it has not said hello yet.
    Connecting,
    /// It has said hello: messages reach both sides.
    Ready,
    /// Silent for longer than the liveness limit.
    Silent,
    /// The connection is closed. Only another connect brings it back.
    Closed,
}

/// Attempts to connect a lost peer again.
#[derive(Debug, Clone, Copy)]
pub struct Retry {
    /// When the next is due; while one is under way: when it is given up.
    pub due: Millis,
    /// How long to wait after it.
    pub wait: Millis,
    /// After that there are no more: only a call of connect helps.
    pub until: Millis,
}

/// A connected peer.
#[derive(Debug, Clone)]
pub struct Peer {
    /// What the transfer threads share.
    pub link: Arc<Link>,
    /// What we know of it: who it is, its regions.
    pub card: Arc<Card>,
    /// The revision of our own table that the mappings were made with.
    pub mapped_revision: u64,
    /// The revision of its table that it announced last.
    pub announced: u64,
    /// The revision of our table that it holds.
    pub known_revision: u64,
    /// From our regions to its regions, when we may send to it.
    pub to_peer: Option<Arc<Mapping>>,
    /// From its regions to ours, when it may send to us.
    pub from_peer: Option<Arc<Mapping>>,
    /// How it stands.
    pub standing: Standing,
    /// When something of it came last.
    pub last_heard: Millis,
    /// When we pinged it last.
    pub last_ping: Millis,
    /// Why its connection closed.
    pub closed_because: Option<Error>,
    /// Set when a new instance has taken its name: nothing new is opened with it.
    pub replaced: Option<Error>,
    /// Our number of the connection.
    pub connection: u64,
    /// The highest number of its connection that we have heard of; 0: none.
    pub heard_connection: u64,
    /// Its number of the connection, once it has said hello to ours; 0 before. The two belong together: when one side
    /// connects anew the other has to, too.
    pub their_connection: u64,
    /// After a loss: when the next attempt to connect it is due, and how long after that the one after it.
    pub retry: Option<Retry>,
    /// Its lives of rooms that are over for us.
    pub ended: Ended,
}

impl Peer {
    /// Whether it has been silent for so long that something may be wrong, but not yet for the liveness limit: two
    /// heartbeats have gone without an answer.
    pub fn is_suspect(&self, now: Millis, heartbeat_interval: Millis) -> bool {
        match self.standing {
            Standing::Ready => {
                now.saturating_sub(self.last_heard)
                    >= heartbeat_interval.saturating_mul(2).saturating_add(SUSPECT_SLACK)
            }
            Standing::Silent => true,
            Standing::Connecting | Standing::Closed => false,
        }
    }
}

/// What an answer may take beyond its heartbeat.
const SUSPECT_SLACK: Millis = 100;

/// All peers.
#[derive(Debug, Clone, Default)]
pub struct Peers {
    by_id: BTreeMap<PeerId, Peer>,
    by_agent: HashMap<String, PeerId>,
    next_id: PeerId,
}

impl Peers {
    /// The peer, or `NIXL_ERR_PEER_UNKNOWN`.
    pub fn get(&self, id: PeerId) -> Result<&Peer> {
        match self.by_id.get(&id) {
            Some(peer) => Ok(peer),
            None => fail!(NIXL_ERR_PEER_UNKNOWN, "peer {id} is not connected"),
        }
    }

    /// The peer, to change it.
    pub fn get_mut(&mut self, id: PeerId) -> Option<&mut Peer> {
        self.by_id.get_mut(&id)
    }

    /// The peer with this NIXL agent.
    pub fn by_agent(&self, agent: &str) -> Option<PeerId> {
        self.by_agent.get(agent).copied()
    }

    /// The peer with this name and another instance.
    pub fn earlier_instance(&self, card: &Card) -> Option<PeerId> {
        let earlier = |peer: &&Peer| {
            peer.card.name == card.name && peer.card.instance != card.instance && peer.replaced.is_none()
        };
        self.by_id.values().find(earlier).map(|peer| peer.link.peer)
    }

    /// The peer of exactly this instance.
    pub fn same_instance(&self, card: &Card) -> Option<PeerId> {
        self.by_id.values().find(|peer| peer.card.instance == card.instance).map(|peer| peer.link.peer)
    }

    /// The peer that calls may name: not one that has been replaced.
    pub fn current(&self, id: PeerId) -> Result<&Peer> {
        let peer = self.get(id)?;
        match &peer.replaced {
            Some(cause) => fail!(NIXL_ERR_PEER_UNKNOWN, "peer {id} is not connected any more: {cause}"),
            None => Ok(peer),
        }
    }

    /// An id that was never used.
    pub fn reserve_id(&mut self) -> PeerId {
        self.next_id += 1;
        self.next_id
    }

    /// Adds or replaces a peer.
    pub fn insert(&mut self, peer: Peer) {
        self.by_agent.insert(peer.link.agent.clone(), peer.link.peer);
        self.by_id.insert(peer.link.peer, peer);
    }

    /// Takes a peer out. Its link is closed.
    pub fn remove(&mut self, id: PeerId) -> Option<Peer> {
        let peer = self.by_id.remove(&id)?;
        peer.link.closed.store(true, Ordering::Release);
        if self.by_agent.get(&peer.link.agent) == Some(&id) {
            self.by_agent.remove(&peer.link.agent);
        }
        Some(peer)
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Peer> {
        self.by_id.values()
    }

    /// All of them, to change.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Peer> {
        self.by_id.values_mut()
    }
}

/// Refuses a peer with which nothing can be exchanged, and maps both directions.
#[derive(Debug, Clone)]
pub struct Mappings {
    /// We send.
    pub to_peer: Option<Arc<Mapping>>,
    /// We receive.
    pub from_peer: Option<Arc<Mapping>>,
}

/// Prefill: sends.
pub const ROLE_PREFILL: u32 = 1;
/// Decode: receives.
pub const ROLE_DECODE: u32 = 2;

/// The name of a role for people.
pub fn role_name(role: u32) -> &'static str {
    match role {
        ROLE_PREFILL => "prefill",
        ROLE_DECODE => "decode",
        _ => "prefill and decode",
    }
}

/// Compares a peer's card with our own side.
pub fn check_card(card: &Card, role: u32, cache_dtype: &str, ours: &RegionTable) -> Result<Mappings> {
    if card.cache_dtype != cache_dtype {
        fail!(
            NIXL_ERR_DTYPE_DIFFERS,
            "cache dtype: ours is \"{cache_dtype}\", the peer's ({}) is \"{}\"",
            card.name,
            card.cache_dtype
        );
    }
    let sends = role & ROLE_PREFILL != 0 && card.role & ROLE_DECODE != 0;
    let receives = role & ROLE_DECODE != 0 && card.role & ROLE_PREFILL != 0;
    if !sends && !receives {
        fail!(
            NIXL_ERR_LAYOUT_DIFFERS,
            "roles: ours is {}, the peer's ({}) is {}: neither side could send to the other",
            role_name(role),
            card.name,
            role_name(card.role)
        );
    }
    let with_name = |e: Error| Error::new(e.code, format!("peer {}: {}", card.name, e.text));
    let to_peer =
        sends.then(|| crate::layout::map(ours, &card.regions).map(Arc::new).map_err(with_name)).transpose()?;
    let from_peer =
        receives.then(|| crate::layout::map(&card.regions, ours).map(Arc::new).map_err(with_name)).transpose()?;
    Ok(Mappings { to_peer, from_peer })
}
