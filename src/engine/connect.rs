//! Connecting and disconnecting peers.

use std::sync::PoisonError;

use crate::error::*;
use crate::protocol::{Message, decode_card, encode};
use crate::room::PeerId;

use super::peers::{self, Standing};
use super::{Engine, agent_name};

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
        if shared.agent.is_resting(&card.agent) {
            // It may have broken meanwhile. Then a message fails at once, and the connection is made anew.
            let probe = encode(&Message::Ping { sequence: shared.now() });
            if shared.agent.notify(&card.agent, &probe).is_err() {
                let _ = shared.agent.forget(&card.agent);
            }
        }
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
        let now = shared.now();
        if let Some(earlier) = earlier {
            let text = format!("peer {} has restarted: a new instance has connected", card.name);
            tables.replaced(earlier, Error::new(NIXL_ERR_PEER_RESTARTED, text), now);
        }
        let id = tables.connected(card, known, mappings, published.revision, now);
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
        let cause = Error::new(NIXL_ERR_PEER_DISCONNECTED, format!("peer {name} was disconnected"));
        tables.part(peer, cause, shared.now());
        shared.finish(tables, before);
        shared.wake();
        Ok(())
    }
}
