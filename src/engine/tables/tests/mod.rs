//! Engines without NIXL, threads or a clock: only their tables. A random simulation and an exhaustive model drive them.

use super::super::peers::check_card;
use super::super::{ROLE_DECODE, ROLE_PREFILL};
use super::*;
use crate::layout::{Part, Region, RegionKey, RegionTable};
use crate::memory::Published;
use crate::nixl::MemoryKind;
use crate::protocol::Card;

mod model;
mod simulation;

/// Bytes of a page, and of an aux slot.
const ITEM: u64 = 64;

/// Time limits and bounds of the engines under test.
#[derive(Clone, Copy)]
struct Limits {
    heartbeat: Millis,
    liveness: Millis,
    room: Millis,
    grant: Millis,
    max_rooms: usize,
}

/// One engine's tables, with what peers need to know of it.
#[derive(Clone)]
struct Node {
    tables: Tables,
    published: Published,
    card: Card,
}

impl Node {
    /// An engine named `name` in its life number `life`, with these KV layers.
    fn new(name: &str, life: u64, role: u32, layers: std::ops::Range<u32>, num_pages: u64, limits: Limits) -> Self {
        let mut instance = [0; 16];
        instance[..8].copy_from_slice(&life.to_le_bytes());
        let region = |key, num_items: u64, i: u64| Region {
            key,
            address: 0x10_0000 * (i + 1),
            len: ITEM * num_items,
            item_len: ITEM,
            kind: MemoryKind::Dram,
            device: 0,
            local: false,
        };
        let kv = layers.zip(0..).map(|(layer, i)| region(RegionKey::Kv { layer, part: Part::Fused }, num_pages, i));
        let aux = region(RegionKey::Aux { array: 0 }, num_pages, 100);
        let table = RegionTable::new(kv.chain([aux]).collect()).unwrap();
        let config = Config {
            role,
            name: Some(name.to_owned()),
            nixl_library: None,
            backend: "UCX".into(),
            backend_params: Vec::new(),
            cache_dtype: "bf16".into(),
            num_workers: 1,
            queue_depth: 1024,
            max_rooms: limits.max_rooms,
            log: None,
            create_timeout: 1000,
            connect_timeout: limits.grant,
            grant_timeout: limits.grant,
            room_timeout: limits.room,
            heartbeat_interval: limits.heartbeat,
            liveness_limit: limits.liveness,
            stall_timeout: limits.room,
        };
        let identity = Identity { name: name.to_owned(), instance };
        // As the engine does it: another starting point in every life.
        let first_generation = 1 + (life << 32);
        let mut tables = Tables::new(identity, Arc::new(config), Arc::default(), first_generation);
        tables.revision = 1;
        let card = Card {
            instance,
            name: name.to_owned(),
            agent: agent(life),
            revision: 1,
            role,
            cache_dtype: "bf16".into(),
            regions: table.clone(),
            metadata: Vec::new(),
        };
        Self { tables, published: Published { table: Arc::new(table), revision: 1 }, card }
    }

    /// What `nixlkv_connect` does, without NIXL.
    fn connect(&mut self, card: &Card, now: Millis) -> Result<PeerId> {
        let config = self.tables.config.clone();
        let mappings = check_card(card, config.role, &config.cache_dtype, &self.published.table)?;
        match self.tables.admit(card, self.published.revision)? {
            Some(known) => Ok(known),
            None => Ok(self.tables.connected(card.clone(), mappings, self.published.revision, now)),
        }
    }

    /// The peer with this card, if calls may name it.
    fn peer(&self, card: &Card) -> Option<PeerId> {
        let id = self.tables.peers.same_instance(card)?;
        self.tables.peers.current(id).ok().map(|peer| peer.link.peer)
    }
}

/// The NIXL agent's name of a life.
fn agent(life: u64) -> String {
    format!("agent {life}")
}
