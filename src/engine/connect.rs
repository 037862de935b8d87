//! Connecting and disconnecting peers.

use std::sync::{MutexGuard, PoisonError, TryLockError};

use crate::error::*;
use crate::memory::Memory;
use crate::nixl::FailureStatus;
use crate::protocol::{Card, Message, decode_card, encode};
use crate::room::PeerId;

use super::{Engine, Shared, agent_name, peers};

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
        let memory = shared.memory.lock().unwrap_or_else(PoisonError::into_inner);
        shared.connect_card(card, &memory)
    }

    /// Disconnects a peer: its rooms fail, and the connection closes as soon as nothing is in flight on it.
    pub fn disconnect(&self, peer: PeerId) -> Result<()> {
        let shared = self.shared();
        let mut tables = shared.tables();
        let before = tables.num_changes;
        tables.disconnect(peer, shared.now())?;
        shared.finish(tables, before);
        shared.wake();
        Ok(())
    }
}

impl Shared {
    /// Connects a peer by its card, which has been checked for who it is of.
    fn connect_card(&self, card: Card, _memory: &MutexGuard<'_, Memory>) -> Result<PeerId> {
        let published = self.published();
        let mappings = peers::check_card(&card, self.config.role, &self.config.cache_dtype, &published.table)?;
        if let Some(known) = self.tables().admit(&card, published.revision)? {
            return Ok(known);
        }
        if self.agent.is_resting(&card.agent) {
            // It may have broken meanwhile. Then a message fails at once, and the connection is made anew.
            let probe = encode(&Message::Ping { sequence: self.now() });
            if self.agent.notify(&card.agent, &probe).is_err() {
                let _ = self.agent.forget(&card.agent);
            }
        }
        match self.agent.load_metadata(&card.metadata) {
            Ok(agent) if agent == card.agent => {}
            Ok(agent) => {
                let _ = self.agent.forget(&agent);
                fail!(
                    NIXL_ERR_METADATA_INVALID,
                    "NIXL's metadata in the blob is of agent {agent:?}, not {:?}",
                    card.agent
                );
            }
            // The envelope was whole. A backend fails when it reaches nobody at the address.
            Err(failure) if failure.status == FailureStatus::Backend => {
                fail!(NIXL_ERR_PEER_LOST, "NIXL cannot reach {}: {failure}", card.name);
            }
            Err(failure) => {
                fail!(NIXL_ERR_METADATA_INVALID, "NIXL refused the metadata of {}: {failure}", card.name);
            }
        }
        let mut tables = self.tables();
        let before = tables.num_changes;
        let id = tables.connected(card, mappings, published.revision, self.now());
        self.finish(tables, before);
        Ok(id)
    }

    /// Connects lost peers again that are due. What they and we had under way is over; new rooms need nobody's hand.
    pub fn retry_lost(&self) {
        let due = self.tables().due_retries(self.now());
        if due.is_empty() {
            return;
        }
        // Never waits: who holds it may be registering memory for long. The next look comes soon.
        let memory = match self.memory.try_lock() {
            Ok(memory) => memory,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        for card in due {
            if let Err(e) = self.connect_card(Card::clone(&card), &memory) {
                log::debug!("peer {} cannot be connected again: {e}", card.name);
                self.tables().retry_failed(&card, self.now());
            }
        }
    }
}
