//! Grants: a room's destination indices, in as many messages as they need.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::{DecodeError, MAX_MESSAGE_BYTES, Message};

/// What a receiver grants one sender of a room.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct GrantBody {
    /// The room's page list.
    pub pages: Vec<i32>,
    /// The aux slot.
    pub aux: Option<i32>,
    /// This sender fills the aux slot.
    pub aux_owner: bool,
    /// State slots by group.
    pub states: Vec<(u32, Vec<i32>)>,
    /// Receivers that the sender fills for this room.
    pub num_receivers: u32,
}

/// Consecutive indices: where they start relative to the previous run's end, and how many.
type Runs = Vec<(i64, u32)>;

/// The grant as it travels: index lists as runs, so that contiguous ones of any length are short.
#[derive(Serialize)]
struct Coded {
    num_receivers: u32,
    aux: Option<i32>,
    aux_owner: bool,
    pages: Runs,
    states: Vec<(u32, Runs)>,
}

fn code(indices: &[i32]) -> Runs {
    let mut runs = Runs::new();
    let mut next = 0i64;
    for &index in indices {
        let index = i64::from(index);
        match runs.last_mut() {
            Some((_, count)) if index == next && *count < u32::MAX => *count += 1,
            _ => runs.push((index - next, 1)),
        }
        next = index + 1;
    }
    runs
}

/// Reads a grant, value by value: nothing is allocated for what has not come, or exceeds the budget.
struct Reader<'a> {
    bytes: &'a [u8],
    /// Indices that may still come.
    budget: u64,
}

impl Reader<'_> {
    fn take<T: serde::de::DeserializeOwned>(&mut self) -> Result<T, DecodeError> {
        let (value, rest) = postcard::take_from_bytes(self.bytes).map_err(|_| DecodeError::Body)?;
        self.bytes = rest;
        Ok(value)
    }

    /// Reads [`Runs`] as the indices that they stand for.
    fn indices(&mut self) -> Result<Vec<i32>, DecodeError> {
        let num_runs: u64 = self.take()?;
        let mut indices = Vec::new();
        let mut next = 0i64;
        for _ in 0..num_runs {
            let (delta, count): (i64, u32) = self.take()?;
            let start = next.checked_add(delta).ok_or(DecodeError::Bounds)?;
            let end = start.checked_add(i64::from(count)).ok_or(DecodeError::Bounds)?;
            if start < 0 || end > i64::from(i32::MAX) + 1 {
                return Err(DecodeError::Bounds);
            }
            self.budget = self.budget.checked_sub(u64::from(count)).ok_or(DecodeError::Bounds)?;
            indices.extend((start..end).map(|index| index as i32));
            next = end;
        }
        Ok(indices)
    }

    /// Reads [`Coded`].
    fn grant(mut self) -> Result<GrantBody, DecodeError> {
        let (num_receivers, aux, aux_owner): (u32, Option<i32>, bool) = self.take()?;
        if num_receivers == 0 || aux.is_some_and(|aux| aux < 0) {
            return Err(DecodeError::Bounds);
        }
        let pages = self.indices()?;
        let num_groups: u64 = self.take()?;
        let mut states = Vec::new();
        let mut groups = BTreeSet::new();
        for _ in 0..num_groups {
            let group: u32 = self.take()?;
            if !groups.insert(group) {
                return Err(DecodeError::Body);
            }
            states.push((group, self.indices()?));
        }
        if !self.bytes.is_empty() {
            return Err(DecodeError::Body);
        }
        Ok(GrantBody { pages, aux, aux_owner, states, num_receivers })
    }
}

/// Bytes of a grant in every fragment but the last, which may be shorter. Beside them stand at most 61: the frame's
/// header (8), the kind (1), room, generation, revision and connection (10 each), two fragment numbers (5 each), the
/// payload's length (2).
const FRAGMENT: usize = MAX_MESSAGE_BYTES - 61;
/// Most indices in one grant, whatever the receiver's region table claims: they bound what a peer can make us allocate.
pub const MAX_GRANT_INDICES: u64 = 1 << 21;
/// An index takes at most 6 bytes: 5 for where its run starts, 1 for how long it is. 4 KiB are left for the rest.
const MAX_INDEX_BYTES: u64 = 6;
const MAX_OTHER_BYTES: u64 = 4096;

/// Cuts a grant into messages, for the receiver's region table and connection of these numbers.
pub fn split_grant(room: u64, generation: u64, (revision, connection): (u64, u64), body: &GrantBody) -> Vec<Message> {
    let coded = Coded {
        num_receivers: body.num_receivers,
        aux: body.aux,
        aux_owner: body.aux_owner,
        pages: code(&body.pages),
        states: body.states.iter().map(|(group, slots)| (*group, code(slots))).collect(),
    };
    // Serialising into memory cannot fail for these types.
    let bytes = postcard::to_stdvec(&coded).unwrap_or_default();
    let num_fragments = bytes.len().div_ceil(FRAGMENT) as u32;
    bytes
        .chunks(FRAGMENT)
        .zip(0..)
        .map(|(payload, fragment)| Message::Grant {
            room,
            generation,
            revision,
            connection,
            fragment,
            num_fragments,
            payload: payload.to_vec(),
        })
        .collect()
}

/// Puts a grant's fragments together, in any order, repeated ones included.
#[derive(Debug, Clone, Default)]
pub struct GrantAssembly {
    num_fragments: u32,
    fragments: BTreeMap<u32, Vec<u8>>,
}

impl GrantAssembly {
    /// About how much memory it takes.
    pub fn num_bytes(&self) -> usize {
        self.fragments.len() * FRAGMENT
    }

    /// Adds a fragment; gives the grant when it is whole. `max_items` bounds the indices in it, and with them what is
    /// kept and allocated.
    pub fn add(
        &mut self,
        fragment: u32,
        num_fragments: u32,
        payload: &[u8],
        max_items: u64,
    ) -> Result<Option<GrantBody>, DecodeError> {
        let max_items = max_items.min(MAX_GRANT_INDICES);
        let most = max_items * MAX_INDEX_BYTES + MAX_OTHER_BYTES;
        if fragment >= num_fragments || u64::from(num_fragments) > most.div_ceil(FRAGMENT as u64) {
            return Err(DecodeError::Bounds);
        }
        let shortest = if fragment == num_fragments - 1 { 1 } else { FRAGMENT };
        if !(shortest..=FRAGMENT).contains(&payload.len()) {
            return Err(DecodeError::Body);
        }
        if self.fragments.is_empty() {
            self.num_fragments = num_fragments;
        }
        match self.fragments.get(&fragment) {
            _ if self.num_fragments != num_fragments => return Err(DecodeError::Body),
            Some(known) if known != payload => return Err(DecodeError::Body),
            Some(_) => return Ok(None),
            None => {}
        }
        self.fragments.insert(fragment, payload.to_vec());
        if self.fragments.len() < num_fragments as usize {
            return Ok(None);
        }
        let bytes: Vec<u8> = self.fragments.values().flatten().copied().collect();
        Reader { bytes: &bytes, budget: max_items }.grant().map(Some)
    }
}
