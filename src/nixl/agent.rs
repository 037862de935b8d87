//! An agent over `nixl_sys`: opening it with one backend, registration, peers, messages and writes.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nixl_sys::{
    AgentConfig, Backend, MemType, MemoryRegion, NixlDescriptor, NixlError, NotificationMap, OptArgs, Params,
    RegistrationHandle, ThreadSync, XferDescList, XferOp, XferRequest, XferStatus,
};

use super::library::Library;
use super::logging::{self, Capture};
use super::metadata::Metadata;
use super::process::Signals;
use super::ucx::Settings;
use super::{Agent, Block, Failure, FailureStatus, MemoryKind, Posted, Span, Transfer, TransferStatus, Write, plugin};
use crate::error::{Result, fail};

/// How much of a message is handed on; ours are far shorter, and NIXL itself has no limit. What is cut is none of ours,
/// and is counted as such.
const MAX_NOTIFICATION: usize = 64 * 1024;

/// How to open an agent.
#[derive(Debug, Clone, Default)]
pub struct AgentOptions {
    /// The agent's name, unique among all peers.
    pub name: String,
    /// The backend, such as `UCX`.
    pub backend: String,
    /// Its parameters. `UCX_` keys are UCX's own settings, the others are NIXL's for this backend.
    pub params: Vec<(String, String)>,
}

/// Most connections that are kept for peers that have left.
const MAX_RESTING: usize = 64;

/// One agent at a time is opened: signals and captured log lines belong to the process.
static OPENING: Mutex<()> = Mutex::new(());

/// Creates an agent with its backend. Blocks while UCX looks at the machine, usually for some 10 ms.
pub fn open(library: &Arc<Library>, options: &AgentOptions) -> Result<Arc<dyn Agent>> {
    let settings = Settings::new(&options.params)?;
    if options.name.is_empty() || options.name.contains('\0') {
        fail!(NIXL_ERR_INVALID_ARGUMENT, "the agent's name is empty or contains a NUL byte: {:?}", options.name);
    }
    if options.backend.is_empty() || options.backend.contains(['\0', '/']) {
        fail!(NIXL_ERR_INVALID_ARGUMENT, "the backend's name can't be a plugin's: {:?}", options.backend);
    }
    let _one_at_a_time = lock(&OPENING);
    let _signals = Signals::save();
    let shared = logging::ucx_is_loaded();
    let checked = plugin::check(library, &options.backend);
    logging::attach_ucx(shared);
    checked?;
    logging::silence_nixl(library);
    let capture = Capture::start();
    match create(library, options, &settings, shared) {
        Ok(agent) => Ok(Arc::new(agent)),
        Err(failure) => {
            let mut text = format!("backend {} of agent {}: {}", options.backend, options.name, failure.text);
            for line in settings.refusals().into_iter().chain(capture.lines()) {
                text.push_str("; ");
                text.push_str(&line);
            }
            fail!(NIXL_ERR_BACKEND_FAILED, "{text}")
        }
    }
}

fn create(
    library: &Arc<Library>,
    options: &AgentOptions,
    settings: &Settings,
    shared: bool,
) -> std::result::Result<NixlAgent, Failure> {
    let config = AgentConfig {
        // An idle progress thread takes a whole core (its delay of 0 makes it poll); our own thread drives progress.
        enable_prog_thread: false,
        enable_listen_thread: false,
        // STRICT makes each of NIXL's calls take its lock exclusively. RW would share it between createXferReq,
        // postXferReq, getXferStatus and genNotif, and each of these may run UCX's receive callback, which without a
        // progress thread appends to the list of notifications with no lock of its own. `nixl_sys` holds a lock too,
        // but only for reading while it creates a request, so NONE would not do either.
        thread_sync: ThreadSync::Strict,
        ..AgentConfig::default()
    };
    let agent = nixl_sys::Agent::new_configured(&options.name, &config).map_err(during("create the agent"))?;
    let defaults = agent.get_plugin_params(&options.backend).and_then(|(_, params)| list_params(&params));
    let defaults = defaults.map_err(during("read the plugin's parameters"))?;
    // That call has loaded the plugin, if the check before had to leave it to NIXL.
    logging::attach_ucx(shared);
    let params = settings.for_nixl(&options.backend).map_err(|text| refused(FailureStatus::InvalidParam, text))?;
    let parameters = Params::from(params.iter().map(|(key, value)| (key, value))).map_err(during("set parameters"))?;
    let backend = agent.create_backend(&options.backend, &parameters).map_err(during("create the backend"))?;
    if !settings.refusals().is_empty() {
        return Err(refused(FailureStatus::InvalidParam, "a setting has no effect"));
    }
    let plugins = list_plugins(&agent).map_err(during("list the plugins"))?;
    let actual = agent.get_backend_params(&backend).and_then(|(_, params)| list_params(&params));
    let actual = actual.map_err(during("read the backend's parameters"))?;
    let own = agent.get_local_md().map_err(during("give its metadata"))?;
    Ok(NixlAgent {
        metadata_is_known: Metadata::parse(&own).is_some_and(|own| own.is_known()),
        registrations: Mutex::default(),
        next_token: AtomicU64::new(1),
        peers: Mutex::default(),
        backend,
        agent,
        plugins,
        backend_params: settings.report(defaults, actual),
        _library: Arc::clone(library),
    })
}

fn list_plugins(agent: &nixl_sys::Agent) -> std::result::Result<Vec<String>, NixlError> {
    let list = agent.get_available_plugins()?;
    let mut plugins: Vec<String> = list.iter().flatten().map(str::to_string).collect();
    plugins.sort();
    Ok(plugins)
}

fn list_params(params: &Params) -> std::result::Result<Vec<(String, String)>, NixlError> {
    params.iter()?.map(|pair| pair.map(|(key, value)| (key.to_string(), value.to_string()))).collect()
}

/// A peer whose metadata was loaded.
struct Peer {
    metadata: Metadata,
    /// Transfers to it that have not settled.
    in_flight: Arc<AtomicUsize>,
    /// It has left, and may come back; when, in the order of leaving.
    resting: Option<u64>,
}

struct NixlAgent {
    registrations: Mutex<HashMap<u64, RegistrationHandle>>,
    next_token: AtomicU64,
    /// Whether this NIXL writes metadata that can be read here; then a peer's must be readable too.
    metadata_is_known: bool,
    /// Held across NIXL's calls on a peer's metadata, so that what is noted here is what NIXL has.
    peers: Mutex<HashMap<String, Peer>>,
    backend: Backend,
    agent: nixl_sys::Agent,
    plugins: Vec<String>,
    backend_params: Vec<(String, String)>,
    _library: Arc<Library>,
}

/// A panic of another thread leaves these plain maps whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn during(call: &'static str) -> impl Fn(NixlError) -> Failure {
    move |error| failure(call, &error)
}

fn failure(call: &str, error: &NixlError) -> Failure {
    let status = match error {
        NixlError::InvalidParam | NixlError::StringConversionError(_) | NixlError::IndexOutOfBounds => {
            FailureStatus::InvalidParam
        }
        NixlError::NotFound => FailureStatus::NotFound,
        NixlError::BackendError | NixlError::FailedToCreateBackend | NixlError::FailedToCreateXferRequest => {
            FailureStatus::Backend
        }
        _ => FailureStatus::Other,
    };
    Failure { status, text: format!("NIXL could not {call}: {error}") }
}

fn refused(status: FailureStatus, text: impl Into<String>) -> Failure {
    Failure { status, text: text.into() }
}

fn mem_type(kind: MemoryKind) -> MemType {
    match kind {
        MemoryKind::Dram => MemType::Dram,
        MemoryKind::Vram => MemType::Vram,
    }
}

/// A block as `nixl_sys` wants to see it. It only asks for the numbers.
#[derive(Debug)]
struct Described(Block);

#[allow(unsafe_code)]
impl MemoryRegion for Described {
    unsafe fn as_ptr(&self) -> *const u8 {
        self.0.address as *const u8
    }

    fn size(&self) -> usize {
        self.0.len as usize
    }
}

impl NixlDescriptor for Described {
    fn mem_type(&self) -> MemType {
        mem_type(self.0.kind)
    }

    fn device_id(&self) -> u64 {
        self.0.device
    }
}

impl Agent for NixlAgent {
    fn register(&self, block: &Block) -> std::result::Result<u64, Failure> {
        let handle = self.agent.register_memory(&Described(*block), None).map_err(during("register memory"))?;
        let token = self.next_token.fetch_add(1, Ordering::Relaxed);
        lock(&self.registrations).insert(token, handle);
        Ok(token)
    }

    fn deregister(&self, token: u64) -> std::result::Result<(), Failure> {
        let handle = lock(&self.registrations).remove(&token);
        let mut handle = handle.ok_or_else(|| refused(FailureStatus::NotFound, format!("no registration {token}")))?;
        handle.deregister().map_err(during("deregister memory"))
    }

    fn local_metadata(&self) -> std::result::Result<Vec<u8>, Failure> {
        self.agent.get_local_md().map_err(during("give its metadata"))
    }

    /// Same metadata: nothing happens. Memory added: NIXL adds it to what it has. Anything else changed: the
    /// connection is closed and made anew, which is refused while transfers to the peer are in flight.
    fn load_metadata(&self, metadata: &[u8]) -> std::result::Result<String, Failure> {
        let Some(parsed) = Metadata::parse(metadata) else {
            return Err(refused(FailureStatus::InvalidParam, "the metadata is not NIXL's"));
        };
        if self.metadata_is_known && !parsed.is_known() {
            return Err(refused(FailureStatus::InvalidParam, format!("the metadata of {} is broken", parsed.agent)));
        }
        let name = parsed.agent.clone();
        let mut peers = lock(&self.peers);
        let mut in_flight = Arc::default();
        if let Some(peer) = peers.get_mut(&name) {
            peer.resting = None;
            in_flight = Arc::clone(&peer.in_flight);
            // NIXL forgets a peer by itself when a transfer finds it gone.
            let known = self.agent.check_remote_metadata(&name, None);
            if known && parsed == peer.metadata && parsed.extends(&peer.metadata) {
                return Ok(name);
            }
            if !known || !parsed.extends(&peer.metadata) {
                let moving = in_flight.load(Ordering::Acquire);
                if moving > 0 {
                    let text = format!("the metadata of {name} changed while {moving} transfers to it are in flight");
                    return Err(refused(FailureStatus::Other, text));
                }
                peers.remove(&name);
                self.agent.invalidate_remote_md(&name).map_err(during("drop the peer's old metadata"))?;
            }
        }
        let loaded = self.agent.load_remote_md(metadata).map_err(during("load the peer's metadata"));
        match loaded {
            Ok(loaded) if loaded == name => {
                peers.insert(name.clone(), Peer { metadata: parsed, in_flight, resting: None });
                Ok(name)
            }
            other => {
                peers.remove(&name);
                let _ = self.agent.invalidate_remote_md(&name);
                Err(other.err().unwrap_or_else(|| refused(FailureStatus::Other, "NIXL read another agent's name")))
            }
        }
    }

    /// Refused while transfers to the peer are in flight: NIXL would close the connection only after they have moved
    /// all their bytes, and could not say when.
    fn forget(&self, peer: &str) -> std::result::Result<(), Failure> {
        self.forget_one(&mut lock(&self.peers), peer)
    }

    fn rest(&self, peer: &str) {
        let mut peers = lock(&self.peers);
        if let Some(peer) = peers.get_mut(peer) {
            peer.resting = Some(self.next_token.fetch_add(1, Ordering::Relaxed));
        }
        let resting = peers.iter().filter_map(|(name, peer)| Some((peer.resting?, name)));
        if resting.clone().count() <= MAX_RESTING {
            return;
        }
        let Some((_, oldest)) = resting.min() else { return };
        let oldest = oldest.clone();
        if let Err(failure) = self.forget_one(&mut peers, &oldest) {
            log::debug!("closing a kept connection: {failure}");
        }
    }

    fn is_resting(&self, peer: &str) -> bool {
        lock(&self.peers).get(peer).is_some_and(|peer| peer.resting.is_some())
    }

    fn notify(&self, peer: &str, message: &[u8]) -> std::result::Result<(), Failure> {
        self.agent.send_notification(peer, message, None).map_err(during("send a notification"))
    }

    fn notifications(&self, sink: &mut dyn FnMut(&str, &[u8])) -> std::result::Result<(), Failure> {
        let mut map = NotificationMap::new().map_err(during("create a notification map"))?;
        let called = self.agent.get_notifications(&mut map, None).map_err(during("get notifications"));
        // Whatever has come is in the map even when a backend failed.
        if !map.is_empty().unwrap_or(true) {
            deliver(&map, sink);
        }
        called
    }

    fn write(&self, write: &Write<'_>) -> std::result::Result<Posted, Failure> {
        check_spans(write.spans)?;
        // Counted before anything can move, and under the lock under which peers are forgotten.
        let flight = match lock(&self.peers).get(write.peer) {
            Some(peer) => Flight::begin(&peer.in_flight),
            None => return Err(not_loaded(write.peer)),
        };
        let request = self.create_request(write)?;
        // No arguments: the request carries its notification itself, and other arguments would take it away.
        let moving = self.agent.post_xfer_req(&request, None).map_err(during("post a write"))?;
        if !moving {
            return Ok(Posted::Done);
        }
        let going = Some((request, flight));
        Ok(Posted::Pending(Box::new(NixlTransfer { agent: self.agent.clone(), going, end: TransferStatus::Done })))
    }

    fn plugins(&self) -> &[String] {
        &self.plugins
    }

    fn backend_params(&self) -> &[(String, String)] {
        &self.backend_params
    }
}

impl NixlAgent {
    fn forget_one(&self, peers: &mut HashMap<String, Peer>, peer: &str) -> std::result::Result<(), Failure> {
        let Some(known) = peers.get(peer) else {
            return Err(refused(FailureStatus::NotFound, format!("no metadata of {peer} is loaded")));
        };
        let moving = known.in_flight.load(Ordering::Acquire);
        if moving > 0 {
            return Err(refused(FailureStatus::Other, format!("{moving} transfers to {peer} are in flight")));
        }
        peers.remove(peer);
        self.agent.invalidate_remote_md(peer).map_err(during("forget the peer"))
    }

    fn create_request(&self, write: &Write<'_>) -> std::result::Result<XferRequest, Failure> {
        let mut local = XferDescList::new(mem_type(write.source_kind)).map_err(during("create a descriptor list"))?;
        let mut remote =
            XferDescList::new(mem_type(write.destination_kind)).map_err(during("create a descriptor list"))?;
        for span in write.spans {
            local.add_desc(span.source as usize, span.len as usize, span.source_device);
            remote.add_desc(span.destination as usize, span.len as usize, span.destination_device);
        }
        let mut arguments = OptArgs::new().map_err(during("create arguments"))?;
        arguments.add_backend(&self.backend).map_err(during("choose the backend"))?;
        if !write.notification.is_empty() {
            arguments.set_has_notification(true).map_err(during("attach a notification"))?;
            arguments.set_notification_message(write.notification).map_err(during("attach a notification"))?;
        }
        self.agent.create_xfer_req(XferOp::Write, &local, &remote, write.peer, Some(&arguments)).map_err(|error| {
            // The C API has one status for all reasons here; this one can be told apart.
            if self.agent.check_remote_metadata(write.peer, None) {
                failure("create a write", &error)
            } else {
                not_loaded(write.peer)
            }
        })
    }
}

fn not_loaded(peer: &str) -> Failure {
    refused(FailureStatus::NotFound, format!("no metadata of {peer} is loaded, or NIXL dropped it with the connection"))
}

/// NIXL takes empty spans and spans past the end of the address space, and the latter kill one of the two processes.
fn check_spans(spans: &[Span]) -> std::result::Result<(), Failure> {
    if spans.is_empty() {
        return Err(refused(FailureStatus::InvalidParam, "a write without spans"));
    }
    let whole = |start: u64, len: u64| len > 0 && start.checked_add(len).is_some();
    match spans.iter().find(|span| !whole(span.source, span.len) || !whole(span.destination, span.len)) {
        Some(span) => Err(refused(FailureStatus::InvalidParam, format!("a span is empty or wraps: {span:?}"))),
        None => Ok(()),
    }
}

fn deliver(map: &NotificationMap, sink: &mut dyn FnMut(&str, &[u8])) {
    for name in map.agents() {
        // A name that is not UTF-8, or has a NUL in it, is nobody's we know. Nothing is lost without being counted.
        let Ok((name, count)) = name.and_then(|name| Ok((name, map.get_notifications_size(name)?))) else {
            sink("", &[]);
            continue;
        };
        for index in 0..count {
            let bytes = map.get_notification_bytes(name, index).unwrap_or_default();
            sink(name, &bytes[..bytes.len().min(MAX_NOTIFICATION)]);
        }
    }
}

/// Counts a transfer as in flight while it exists.
struct Flight(Arc<AtomicUsize>);

impl Flight {
    fn begin(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(count))
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

struct NixlTransfer {
    agent: nixl_sys::Agent,
    /// Until it settles. The request is released before the flight ends.
    going: Option<(XferRequest, Flight)>,
    end: TransferStatus,
}

impl Drop for NixlTransfer {
    fn drop(&mut self) {
        if let Some((request, flight)) = self.going.take() {
            // Released, but not stopped: the bytes still move, so the peer's connection must stay until the agent goes.
            log::warn!(target: "nixlkv", "a transfer was dropped before it settled");
            std::mem::forget(flight);
            drop(request);
        }
    }
}

impl Transfer for NixlTransfer {
    fn status(&mut self) -> TransferStatus {
        let Some((request, _)) = &self.going else { return self.end.clone() };
        self.end = match self.agent.get_xfer_status(request) {
            Ok(XferStatus::InProgress) => return TransferStatus::InProgress,
            Ok(XferStatus::Success) => TransferStatus::Done,
            Err(error) => TransferStatus::Failed(failure("complete a write", &error)),
        };
        self.going = None;
        self.end.clone()
    }
}
