//! The engine: puts agent, memory, rooms and threads together.
//!
//! # Threads
//!
//! Callers' threads check, change the tables and queue; they never call NIXL on the send and poll paths. Thread 0
//! (`nixlkv-0`) sends and receives control messages, watches the time limits and moves chunks; further threads only
//! move chunks, of the peers that fall to them. `register`, `deregister`, `export` and `connect` call NIXL on the
//! caller's thread and may wait for a post that is under way.
//!
//! # Lock order
//!
//! `memory`, then `published`, then `tables`. `tables` is never held over a call of NIXL, a callback or a wait other
//! than the condition variable's.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use crate::error::*;
use crate::fault;
use crate::layout::RegionTable;
use crate::memory::{Access, Memory, NewRegion, Published};
use crate::metrics::{self, Counters, LogCallback};
use crate::nixl::{self, Agent, AgentOptions};
use crate::protocol::{Card, Message};
use crate::room::{Millis, PeerId};
use crate::worker;

mod connect;
mod peers;
mod rooms;
mod tables;

pub use peers::{Link, ROLE_DECODE, ROLE_PREFILL, Standing};
pub use rooms::WaitFor;
pub use tables::{Identity, Outgoing, QueuedJob, RecvRequest, Tables, shortened};
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub use {peers::check_card, tables::Parked};

/// What an engine is created with. Defaults are filled in by the caller.
#[derive(Debug, Clone)]
pub struct Config {
    /// `ROLE_PREFILL`, `ROLE_DECODE`, or both.
    pub role: u32,
    /// The engine's name; `None`: 128 random bits.
    pub name: Option<String>,
    /// Path of `libnixl_capi.so`; `None`: search.
    pub nixl_library: Option<String>,
    /// NIXL's backend.
    pub backend: String,
    /// The backend's parameters.
    pub backend_params: Vec<(String, String)>,
    /// Compared with the peers'.
    pub cache_dtype: String,
    /// Transfer threads.
    pub num_workers: usize,
    /// Most chunks accepted and not settled.
    pub queue_depth: u64,
    /// Most rooms open.
    pub max_rooms: usize,
    /// The host's log callback, its user data and the level.
    pub log: Option<(LogCallback, usize, u32)>,
    /// How long creating may take.
    pub create_timeout: Millis,
    /// How long a room waits for its peer to connect back.
    pub connect_timeout: Millis,
    /// How long a chunk waits for its grant.
    pub grant_timeout: Millis,
    /// How long a room may go without progress.
    pub room_timeout: Millis,
    /// How often peers are pinged.
    pub heartbeat_interval: Millis,
    /// How long a peer may be silent.
    pub liveness_limit: Millis,
    /// How long a posted transfer may take.
    pub stall_timeout: Millis,
}

/// What the caller configured, and that UCX connects without blocking. Otherwise a peer that does not answer would hold up
/// the thread that connects, and UCX loses a socket at every connection that is refused.
fn backend_params(backend: &str, configured: &[(String, String)]) -> Vec<(String, String)> {
    const SETTING: &str = "UCX_TCP_CONN_NB";
    let mut params = configured.to_vec();
    let given = params.iter().any(|(key, _)| key == SETTING || key == "engine_config");
    if backend == "UCX" && !given && std::env::var_os(SETTING).is_none() {
        params.push((SETTING.into(), "y".into()));
    }
    params
}

/// The oldest transfer in progress of a transfer thread, as of its last look at the clock.
#[derive(Debug, Default)]
pub struct Oldest {
    /// When it was posted; 0: nothing is in progress.
    pub posted: AtomicU64,
    /// Its room.
    pub room: AtomicU64,
}

/// What the callers' threads and ours share.
pub struct Shared {
    /// The configuration.
    pub config: Arc<Config>,
    /// The engine's name.
    pub name: String,
    /// This life of the engine.
    pub instance: [u8; 16],
    /// The NIXL agent.
    pub agent: Arc<dyn Agent>,
    /// The oldest transfer in progress of each thread.
    pub oldest: Vec<Oldest>,
    /// Path of NIXL's library.
    pub nixl_library: String,
    /// What is registered.
    pub memory: Mutex<Memory>,
    /// The region table as peers see it.
    pub published: RwLock<Published>,
    /// Rooms, peers, queues.
    pub tables: Mutex<Tables>,
    /// Signalled when `Tables::num_changes` grows.
    pub changed: Condvar,
    /// Counters.
    pub counters: Arc<Counters>,
    /// The threads stop.
    pub stop: AtomicBool,
    threads: Mutex<Vec<Thread>>,
    start: Instant,
}

impl Shared {
    /// The tables.
    pub fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Milliseconds since the engine was created.
    pub fn now(&self) -> Millis {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// The region table now.
    pub fn published(&self) -> Published {
        self.published.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Wakes the transfer threads.
    pub fn wake(&self) {
        for thread in self.threads.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            thread.unpark();
        }
    }

    /// Unlocks the tables after a change: wakes waiters if a room ended, and our threads if there is work.
    pub fn finish(&self, tables: MutexGuard<'_, Tables>, changes_before: u64) {
        let changed = tables.num_changes != changes_before;
        let work = !tables.outbox.is_empty() || tables.jobs.iter().any(|jobs| !jobs.is_empty());
        drop(tables);
        if changed {
            self.changed.notify_all();
        }
        if work {
            self.wake();
        }
    }
}

/// What [`Engine::health`] tells. Times in milliseconds.
#[derive(Debug, Default, Clone, Copy)]
pub struct Health {
    /// Age of the oldest transfer in progress.
    pub oldest_transfer: Millis,
    /// Its room.
    pub oldest_room: u64,
    /// Peers connected, lost ones included.
    pub peers: u64,
    /// Peers that have missed two heartbeats.
    pub peers_suspect: u64,
    /// Peers silent for longer than the liveness limit.
    pub peers_silent: u64,
    /// Peers whose connection broke.
    pub peers_lost: u64,
    /// Rooms that have failed and are not quiesced.
    pub rooms_quarantined: u64,
    /// Destination pages of such rooms.
    pub pages_quarantined: u64,
    /// Grants for rooms that are not open here.
    pub grants_parked: u64,
    /// Connections that wait for their transfers before they close.
    pub connections_closing: u64,
}

/// One engine.
pub struct Engine {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    closed: AtomicBool,
    sink: Option<u64>,
}

/// Removes the log callback again when creating fails.
struct SinkGuard(Option<u64>);

impl SinkGuard {
    fn keep(&mut self) -> Option<u64> {
        self.0.take()
    }
}

impl Drop for SinkGuard {
    fn drop(&mut self) {
        if let Some(id) = self.0 {
            metrics::remove_sink(id);
        }
    }
}

/// The NIXL agent's name of an engine instance: it is derived, so that a blob cannot claim another's.
pub fn agent_name(instance: &[u8; 16]) -> String {
    format!("nixlkv-{}", hex(instance))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn random_128() -> Result<[u8; 16]> {
    let mut bytes = [0u8; 16];
    match getrandom::fill(&mut bytes) {
        Ok(()) => Ok(bytes),
        Err(e) => fail!(NIXL_ERR_INTERNAL, "the system gives no random bytes: {e}"),
    }
}

/// The error of a call on an engine that has been shut down.
pub(crate) fn shut_down_error() -> Error {
    Error::new(NIXL_ERR_SHUT_DOWN, "the engine has been shut down")
}

impl Engine {
    /// Finds NIXL, starts the backend and the threads. Waits no longer than the configuration's time limit; what is
    /// still starting then is taken down in the background when it has started.
    pub fn create(config: Config) -> Result<Self> {
        let start = Instant::now();
        // From the first step on: what goes wrong while NIXL starts is what a user wants to read.
        let sink = config
            .log
            .filter(|(.., level)| *level > 0)
            .map(|(callback, user_data, level)| metrics::add_sink(level, callback, user_data as *mut std::ffi::c_void));
        let mut sink = SinkGuard(sink);
        let instance = random_128()?;
        let name = config.name.clone().unwrap_or_else(|| hex(&instance));
        let options = AgentOptions {
            name: agent_name(&instance),
            backend: config.backend.clone(),
            params: backend_params(&config.backend, &config.backend_params),
        };
        let nixl_library = config.nixl_library.clone();
        let (sender, receiver) = mpsc::sync_channel(1);
        let open = move || {
            if fault::hit("create_hangs") {
                std::thread::sleep(Duration::from_secs(2));
            }
            let opened = nixl::find_library(nixl_library.as_deref()).and_then(|library| {
                let path = library.path().display().to_string();
                nixl::open(&library, &options).map(|agent| (agent, path))
            });
            // Nobody listens any more when the time limit has passed; the agent is dropped here then.
            let _ = sender.send(opened);
        };
        let spawned = std::thread::Builder::new().name("nixlkv-open".into()).spawn(open);
        if let Err(e) = spawned {
            fail!(NIXL_ERR_INTERNAL, "cannot start a thread: {e}");
        }
        let (agent, nixl_library) = match receiver.recv_timeout(Duration::from_millis(config.create_timeout)) {
            Ok(opened) => opened?,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                fail!(
                    NIXL_ERR_CREATE_TIMEOUT,
                    "NIXL's backend {} did not start within {} ms",
                    config.backend,
                    config.create_timeout
                );
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                fail!(NIXL_ERR_INTERNAL, "the thread that starts NIXL's backend {} panicked", config.backend);
            }
        };
        // Generations of a restarted engine do not repeat those of its earlier life: they start at a random point.
        let first = u64::from_le_bytes(random_128()?[..8].try_into().unwrap_or([1; 8])) >> 16;
        let num_workers = config.num_workers;
        let (config, counters) = (Arc::new(config), Arc::new(Counters::default()));
        let identity = Identity { name: name.clone(), instance };
        let tables = Tables::new(identity, config.clone(), counters.clone(), first.max(1));
        let shared = Arc::new(Shared {
            name,
            instance,
            agent,
            oldest: (0..num_workers).map(|_| Oldest::default()).collect(),
            nixl_library,
            memory: Mutex::new(Memory::default()),
            published: RwLock::new(Published { table: Arc::new(RegionTable::new(Vec::new())?), revision: 0 }),
            tables: Mutex::new(tables),
            changed: Condvar::new(),
            counters,
            stop: AtomicBool::new(false),
            threads: Mutex::new(Vec::new()),
            start,
            config,
        });
        let engine =
            Self { shared, threads: Mutex::new(Vec::new()), closed: AtomicBool::new(false), sink: sink.keep() };
        for index in 0..num_workers {
            let shared = engine.shared.clone();
            let spawned =
                std::thread::Builder::new().name(format!("nixlkv-{index}")).spawn(move || worker::run(&shared, index));
            match spawned {
                Ok(handle) => {
                    engine.shared.threads.lock().unwrap_or_else(PoisonError::into_inner).push(handle.thread().clone());
                    engine.threads.lock().unwrap_or_else(PoisonError::into_inner).push(handle);
                }
                Err(e) => {
                    engine.stop();
                    fail!(NIXL_ERR_INTERNAL, "cannot start a transfer thread: {e}");
                }
            }
        }
        Ok(engine)
    }

    /// What the threads share; for reading counters and names.
    pub fn shared(&self) -> &Shared {
        &self.shared
    }

    fn check_open(&self) -> Result<()> {
        if self.shared.tables().shut_down { Err(shut_down_error()) } else { Ok(()) }
    }

    /// Registers a batch of regions: all, or none. May wait for NIXL.
    pub fn register(&self, batch: &[NewRegion]) -> Result<Vec<u64>> {
        self.check_open()?;
        let access = Access { write: self.shared.config.role & ROLE_DECODE != 0 };
        let mut memory = self.shared.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let ids = memory.register(self.shared.agent.as_ref(), batch, access)?;
        let mut published = self.shared.published.write().unwrap_or_else(PoisonError::into_inner);
        self.publish(&memory, &mut published, self.shared.tables())?;
        Ok(ids)
    }

    /// Deregisters regions. Refused while a room that is not quiesced may use them.
    pub fn deregister(&self, ids: &[u64]) -> Result<()> {
        self.check_open()?;
        let mut memory = self.shared.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let tokens = {
            let mut published = self.shared.published.write().unwrap_or_else(PoisonError::into_inner);
            // A room opened after this look sees the new revision and takes the new table.
            let tables = self.shared.tables();
            let busy = tables.num_unquiesced;
            if busy > 0 {
                fail!(NIXL_ERR_REGION_BUSY, "{busy} rooms are not quiesced");
            }
            let tokens = memory.take(ids)?;
            self.publish(&memory, &mut published, tables)?;
            tokens
        };
        memory.drop_registrations(self.shared.agent.as_ref(), tokens)
    }

    /// Makes a changed table known: to our own calls, and by a hello to every peer, which must exchange blobs again.
    fn publish(&self, memory: &Memory, published: &mut Published, mut tables: MutexGuard<'_, Tables>) -> Result<()> {
        *published = Published { table: Arc::new(memory.table()?), revision: memory.revision() };
        let before = tables.num_changes;
        tables.revision = memory.revision();
        let open = tables.peers.iter().filter(|peer| peer.standing != Standing::Closed);
        let open: Vec<PeerId> = open.map(|peer| peer.link.peer).collect();
        for peer in open {
            tables.greet(peer, false);
        }
        self.shared.finish(tables, before);
        Ok(())
    }

    /// The blob that peers connect with: NIXL's metadata, the regions, the layout, this instance.
    pub fn export(&self) -> Result<Vec<u8>> {
        self.check_open()?;
        // Held over both reads, so that table and metadata belong together.
        let memory = self.shared.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let metadata = match self.shared.agent.local_metadata() {
            Ok(metadata) => metadata,
            Err(failure) => fail!(NIXL_ERR_INTERNAL, "NIXL gives no metadata: {failure}"),
        };
        Ok(crate::protocol::encode_card(&Card {
            instance: self.shared.instance,
            name: self.shared.name.clone(),
            agent: agent_name(&self.shared.instance),
            revision: memory.revision(),
            role: self.shared.config.role,
            cache_dtype: self.shared.config.cache_dtype.clone(),
            regions: memory.table()?,
            metadata,
        }))
    }

    /// Fails every room that has not ended, waits until nothing is in flight and every peer has drained, and takes
    /// leave of the peers. No new work is accepted from now on.
    pub fn shutdown(&self, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        let mut tables = self.shared.tables();
        let before = tables.num_changes;
        tables.shut_down = true;
        let cause = Error::new(NIXL_ERR_PEER_DISCONNECTED, format!("engine {} shut down", self.shared.name));
        tables.with_rooms(self.shared.now(), |room| !room.state().ended(), |room, out| room.abort(cause.clone(), out));
        tables.refuse_parked(&cause);
        self.shared.finish(tables, before);
        let mut tables = self.shared.tables();
        while tables.num_unquiesced > 0 || tables.num_pending > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                fail!(
                    NIXL_ERR_DRAIN_TIMEOUT,
                    "{} rooms are not quiesced and {} chunks have not settled after {} ms",
                    tables.num_unquiesced,
                    tables.num_pending,
                    timeout.as_millis()
                );
            }
            tables = self.shared.changed.wait_timeout(tables, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// What an operator asks when something seems to hang.
    pub fn health(&self) -> Health {
        let shared = &self.shared;
        let now = shared.now();
        let mut health = Health::default();
        for oldest in &shared.oldest {
            let posted = oldest.posted.load(Ordering::Acquire);
            let age = now.saturating_sub(posted).max(1);
            if posted != 0 && age > health.oldest_transfer {
                health.oldest_transfer = age;
                health.oldest_room = oldest.room.load(Ordering::Acquire);
            }
        }
        let tables = shared.tables();
        for peer in tables.peers.iter() {
            health.peers += 1;
            match peer.standing {
                Standing::Silent => health.peers_silent += 1,
                Standing::Closed => health.peers_lost += 1,
                // An attempt to bring it back is under way.
                Standing::Connecting if peer.retry.is_some() => health.peers_lost += 1,
                Standing::Ready | Standing::Connecting => {
                    health.peers_suspect += u64::from(tables.suspects.contains(&peer.link.peer));
                }
            }
        }
        for entry in tables.rooms.values().filter(|entry| entry.room.state().ended() && !entry.room.quiesced()) {
            health.rooms_quarantined += 1;
            health.pages_quarantined += entry.claim.as_ref().map_or(0, |claim| claim.pages.len() as u64);
        }
        health.grants_parked = tables.parking.len() as u64;
        health.connections_closing = tables.closing.len() as u64;
        health
    }

    /// Says goodbye and ends the threads.
    fn stop(&self) {
        let mut tables = self.shared.tables();
        tables.shut_down = true;
        let open = tables.peers.iter().filter(|peer| peer.standing != Standing::Closed);
        let goodbyes: Vec<(PeerId, Message)> = open.map(|peer| (peer.link.peer, peer.goodbye())).collect();
        // A goodbye promises that nothing of ours is in flight any more.
        if tables.num_unquiesced == 0 && tables.num_pending == 0 {
            for (peer, goodbye) in goodbyes {
                tables.tell(peer, goodbye);
            }
        }
        drop(tables);
        self.shared.stop.store(true, Ordering::Release);
        self.shared.changed.notify_all();
        self.shared.wake();
        for thread in std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner)) {
            if thread.join().is_err() {
                log::error!("a transfer thread had panicked");
            }
        }
    }
}

/// How long destroying an engine waits for its rooms to drain when nobody called shutdown before.
const DESTROY_DRAIN: Duration = Duration::from_secs(1);

impl Engine {
    /// Ends the engine: fails its rooms, drains for at most a second, says goodbye, joins the threads. What is still in
    /// flight then is left behind together with the agent, never freed under NIXL's hands. A second time does nothing.
    pub fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Err(e) = self.shutdown(DESTROY_DRAIN) {
            log::warn!("engine {} destroyed before it had drained: {e}", self.shared.name);
        }
        self.stop();
        if let Some(id) = self.sink {
            metrics::remove_sink(id);
        }
    }

    /// For the process's exit: asks the threads to end and waits for them, for at most `limit`. Nothing is freed.
    pub fn stop_threads(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake();
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        while threads.iter().any(|thread| !thread.is_finished()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.close();
    }
}
