//! The calls on rooms: receive, send, poll, wait, abort, release.

use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::*;
use crate::memory::Published;
use crate::room::{Chunk, View};

use super::{Engine, ROLE_DECODE, ROLE_PREFILL, RecvRequest, Tables, shortened, shut_down_error};

/// What `wait` waits for.
#[derive(Debug, Clone, Copy)]
pub struct WaitFor {
    /// One room is enough.
    pub any: bool,
    /// Ended is not enough: quiesced too.
    pub quiesced: bool,
}

impl Engine {
    /// Locks the tables together with the region table that belongs to them.
    fn tables_with_regions(&self) -> Result<(MutexGuard<'_, Tables>, Published)> {
        loop {
            let published = self.shared().published();
            let tables = self.shared().tables();
            if tables.shut_down {
                return Err(shut_down_error());
            }
            // Between the two reads a registration may have come; then look again.
            if tables.revision == published.revision {
                return Ok((tables, published));
            }
            drop(tables);
            std::thread::yield_now();
        }
    }

    fn check_role(&self, role: u32, call: &str) -> Result<()> {
        if self.shared().config.role & role == 0 {
            let ours = super::peers::role_name(self.shared().config.role);
            fail!(NIXL_ERR_ROLE, "{call} on an engine whose role is {ours}");
        }
        Ok(())
    }

    /// Opens a room as its receiver and grants it to the senders.
    pub fn recv(&self, request: RecvRequest) -> Result<()> {
        self.check_role(ROLE_DECODE, "nixlkv_recv")?;
        request.check()?;
        let (mut tables, published) = self.tables_with_regions()?;
        let before = tables.num_changes;
        tables.recv(request, &published, self.shared().now())?;
        self.shared().finish(tables, before);
        Ok(())
    }

    /// Checks a chunk and queues it. Opens the room with its first chunk.
    pub fn send_chunk(&self, room: u64, chunk: Chunk) -> Result<()> {
        self.check_role(ROLE_PREFILL, "nixlkv_send_chunk")?;
        let (mut tables, published) = self.tables_with_regions()?;
        let before = tables.num_changes;
        let sent = tables.send_chunk(room, chunk, &published, self.shared().now());
        self.shared().finish(tables, before);
        sent
    }

    /// What a room looks like now. A grant for a room that we have not opened shows as waiting for input.
    pub fn poll(&self, room: u64) -> Result<View> {
        self.shared().tables().poll(room)
    }

    /// Waits until the rooms have ended, or have ended and are quiesced.
    pub fn wait(&self, rooms: &[u64], what: WaitFor, timeout: Duration) -> Result<()> {
        let deadline = Instant::now().checked_add(timeout);
        let shared_stop = &self.shared().stop;
        let mut tables = self.shared().tables();
        loop {
            let mut reached = 0;
            for room in rooms {
                let done = match (tables.rooms.get(room), tables.parking.get(*room)) {
                    (Some(entry), _) if what.quiesced => entry.room.quiesced(),
                    (Some(entry), _) => entry.room.state().ended(),
                    // Granted and without a chunk yet, as poll shows it; or given up again by its receiver.
                    (None, []) => fail!(NIXL_ERR_ROOM_UNKNOWN, "room {room} is not open here"),
                    (None, _) => tables.parking.failure(*room).is_some(),
                };
                reached += usize::from(done);
            }
            if reached == rooms.len() || (what.any && reached > 0) {
                return Ok(());
            }
            if shared_stop.load(std::sync::atomic::Ordering::Acquire) {
                fail!(
                    NIXL_ERR_SHUT_DOWN,
                    "the engine was destroyed while {reached} of {} rooms were done",
                    rooms.len()
                );
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                fail!(
                    NIXL_ERR_WAIT_TIMEOUT,
                    "{reached} of {} rooms were done after {} ms",
                    rooms.len(),
                    timeout.as_millis()
                );
            }
            let left = left.unwrap_or(Duration::from_secs(3600));
            tables = self.shared().changed.wait_timeout(tables, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Gives a room up on both sides. A prefill engine may give up a room that it has not opened yet: a grant that
    /// comes for it is answered with the failure then.
    pub fn abort(&self, room: u64, reason: &str) -> Result<()> {
        let (mut tables, published) = self.tables_with_regions()?;
        let before = tables.num_changes;
        let name = shortened(&self.shared().name);
        let text = match reason {
            "" => format!("room {room} was aborted by {name}"),
            reason => format!("room {room} was aborted by {name}: {reason}"),
        };
        tables.abort(room, Error::new(NIXL_ERR_ABORTED, text), &published, self.shared().now())?;
        self.shared().finish(tables, before);
        Ok(())
    }

    /// Forgets a room that has ended and is quiesced.
    pub fn release(&self, room: u64) -> Result<()> {
        let now = self.shared().now();
        self.shared().tables().release(room, now)
    }
}
