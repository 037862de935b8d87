//! Control messages and time limits: what thread 0 does beside moving chunks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::engine::{Link, Outgoing, Shared};
use crate::error::*;
use crate::fault;
use crate::metrics::count;
use crate::nixl::Failure;
use crate::protocol::{Message, decode, encode};
use crate::room::Millis;

/// How often the time limits are looked at.
const TICK_MS: Millis = 20;
/// Most messages sent in one round, so that transfers get their turn.
const MAX_SENDS_PER_ROUND: usize = 64;
/// How long what has come holds up everybody else.
const MAX_LOCKED: Duration = Duration::from_millis(1);
/// How long a connection over which nothing goes any more is still listened to: the peer's goodbye can be on its way.
const LAST_WORDS_MS: Millis = 100;

pub struct Control {
    shared: Arc<Shared>,
    last_tick: Millis,
    received: Vec<Received>,
    sending: Vec<Outgoing>,
    /// What a fault point has put off, and until when.
    put_off: Vec<(Millis, Received)>,
    /// Connections over which nothing goes any more, and until when their last words may come.
    breaking: Vec<(Millis, Arc<Link>, Failure)>,
}

/// Who sent a message, and its bytes.
type Received = (String, Vec<u8>);

impl Control {
    pub fn new(shared: Arc<Shared>) -> Self {
        let last_tick = shared.now();
        Self { shared, last_tick, received: Vec::new(), sending: Vec::new(), put_off: Vec::new(), breaking: Vec::new() }
    }

    /// One round. True: there was something to do.
    pub fn step(&mut self) -> bool {
        let sent = self.send();
        let received = self.receive();
        // After a peer's last words: one that has said goodbye is not lost.
        self.give_up_broken();
        self.tick();
        sent | received
    }

    /// Sends what is queued. True: something was.
    fn send(&mut self) -> bool {
        self.shared.tables().outbox.take(MAX_SENDS_PER_ROUND, &mut self.sending);
        let busy = !self.sending.is_empty();
        for Outgoing { link, message } in self.sending.drain(..) {
            if link.agent.is_empty() || (link.is_closed() && !matches!(message, Message::Goodbye { .. })) {
                continue;
            }
            if fault::hit("drop_message") {
                continue;
            }
            count(&self.shared.counters.messages_sent);
            if let Err(failure) = self.shared.agent.notify(&link.agent, &encode(&message))
                && !self.breaking.iter().any(|(_, known, _)| Arc::ptr_eq(known, &link))
            {
                let until = self.shared.now() + LAST_WORDS_MS;
                self.breaking.push((until, link, failure));
            }
        }
        busy
    }

    /// Makes known which connections have broken.
    fn give_up_broken(&mut self) {
        if self.breaking.is_empty() {
            return;
        }
        let now = self.shared.now();
        let mut tables = self.shared.tables();
        let before = tables.num_changes;
        for (_, link, failure) in self.breaking.extract_if(.., |(until, link, _)| *until <= now || link.is_closed()) {
            // Closed meanwhile: by its goodbye, or for another reason that is known.
            if !link.is_closed() {
                let name = tables.peers.get(link.peer).map_or("", |peer| &peer.card.name);
                let cause = Error::new(NIXL_ERR_PEER_LOST, format!("NIXL cannot reach {name}: {failure}"));
                tables.broke(link.peer, cause, now);
            }
        }
        self.shared.finish(tables, before);
    }

    /// Takes in what has come.
    fn receive(&mut self) -> bool {
        let received = &mut self.received;
        let result = self.shared.agent.notifications(&mut |agent, bytes| {
            received.push((agent.to_owned(), bytes.to_owned()));
        });
        if let Err(failure) = result {
            log::error!("NIXL gives no notifications: {failure}");
        }
        if cfg!(feature = "fault-injection") {
            self.mistreat();
        }
        if self.received.is_empty() {
            return false;
        }
        let now = self.shared.now();
        let mut tables = self.shared.tables();
        let mut before = tables.num_changes;
        let mut locked = Instant::now();
        for (agent, bytes) in self.received.drain(..) {
            if locked.elapsed() > MAX_LOCKED {
                // The callers and the other threads have their turn.
                self.shared.finish(tables, before);
                std::thread::sleep(Duration::from_micros(50));
                tables = self.shared.tables();
                before = tables.num_changes;
                locked = Instant::now();
            }
            count(&self.shared.counters.messages_received);
            match decode(&bytes) {
                Ok(message) => tables.receive(&agent, message, now),
                Err(e) => tables.malformed(&agent, bytes.len(), &e, now),
            }
        }
        self.shared.finish(tables, before);
        true
    }

    /// The fault points of a bad network, on what has just come: lost, repeated later, late.
    fn mistreat(&mut self) {
        let now = self.shared.now();
        let put_off = &mut self.put_off;
        self.received.retain(|message| {
            let late = || now + u64::from(message.1.iter().fold(0, |sum: u8, byte| sum.wrapping_add(*byte)));
            if fault::hit("repeat_message") {
                put_off.push((late(), message.clone()));
            }
            if fault::hit("delay_message") {
                put_off.push((late(), message.clone()));
                return false;
            }
            !fault::hit("lose_message")
        });
        self.received.extend(put_off.extract_if(.., |(due, _)| *due <= now).map(|(_, message)| message));
    }

    /// Looks at the time limits, pings, and closes connections on which nothing is in flight any more.
    fn tick(&mut self) {
        let now = self.shared.now();
        let gap = now.saturating_sub(self.last_tick);
        if gap < TICK_MS {
            return;
        }
        self.last_tick = now;
        let closed = self.close_connections();
        let mut tables = self.shared.tables();
        let before = tables.num_changes;
        tables.closed(&closed, now);
        tables.tick(now, gap);
        self.shared.finish(tables, before);
        self.shared.retry_lost();
    }

    /// Closes the connections that wait for it. Forgetting an agent under a posted transfer would free what the
    /// transfer still uses, so that waits.
    fn close_connections(&self) -> Vec<(Arc<Link>, Error)> {
        let ready = self.shared.tables().ready_to_close();
        for (link, cause) in &ready {
            if cause.code == NIXL_ERR_PEER_DISCONNECTED {
                self.shared.agent.rest(&link.agent);
            } else if let Err(failure) = self.shared.agent.forget(&link.agent) {
                log::debug!("closing the connection to {}: {failure}", link.agent);
            }
        }
        ready
    }

    /// Lets the last messages leave: NIXL sends them as somebody drives its progress.
    pub fn finish(mut self) {
        let until = Instant::now() + Duration::from_millis(20);
        loop {
            let busy = self.send();
            let _ = self.shared.agent.notifications(&mut |_, _| {});
            if !busy && Instant::now() >= until {
                break;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}
