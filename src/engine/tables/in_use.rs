//! Which of our memory is promised to which room.

use std::collections::HashMap;

use crate::error::*;
use crate::protocol::GrantBody;

/// Destination memory that rooms hold until they are quiesced.
#[derive(Debug, Clone, Default)]
pub struct InUse {
    pages: HashMap<i32, u64>,
    aux: HashMap<i32, u64>,
    states: HashMap<(u32, i32), u64>,
}

impl InUse {
    /// Claims everything that a grant names, or nothing.
    pub fn claim(&mut self, room: u64, grant: &GrantBody) -> Result<()> {
        if let Some((page, owner)) = grant.pages.iter().find_map(|page| Some((page, self.pages.get(page)?))) {
            fail!(NIXL_ERR_PAGE_IN_USE, "room {room}: page {page} belongs to room {owner}, which is not quiesced");
        }
        if let Some((aux, owner)) = grant.aux.and_then(|aux| Some((aux, self.aux.get(&aux)?))) {
            fail!(NIXL_ERR_AUX_IN_USE, "room {room}: aux slot {aux} belongs to room {owner}, which is not quiesced");
        }
        for (group, slots) in &grant.states {
            if let Some((slot, owner)) = slots.iter().find_map(|slot| Some((slot, self.states.get(&(*group, *slot))?)))
            {
                fail!(
                    NIXL_ERR_STATE_IN_USE,
                    "room {room}: slot {slot} of state group {group} belongs to room {owner}, which is not quiesced"
                );
            }
        }
        self.pages.extend(grant.pages.iter().map(|page| (*page, room)));
        self.aux.extend(grant.aux.map(|aux| (aux, room)));
        for (group, slots) in &grant.states {
            self.states.extend(slots.iter().map(|slot| ((*group, *slot), room)));
        }
        Ok(())
    }

    /// Whether nothing is claimed.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty() && self.aux.is_empty() && self.states.is_empty()
    }

    /// Gives back what [`InUse::claim`] took.
    pub fn give_back(&mut self, grant: &GrantBody) {
        for page in &grant.pages {
            self.pages.remove(page);
        }
        if let Some(aux) = grant.aux {
            self.aux.remove(&aux);
        }
        for (group, slots) in &grant.states {
            for slot in slots {
                self.states.remove(&(*group, *slot));
            }
        }
    }
}
