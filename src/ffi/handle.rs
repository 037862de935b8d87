//! Handles: what C holds is a number that is looked up, never a pointer that is followed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Once, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use crate::engine::Engine;
use crate::error::*;

use super::engine::{InfoStrings, nixlkv_engine_t};

/// What a handle names.
pub(super) struct Handle {
    engine: Engine,
    /// Made when nixlkv_nixl_info is first called.
    pub(super) info: OnceLock<InfoStrings>,
}

impl std::ops::Deref for Handle {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.engine
    }
}

#[derive(Default)]
struct Registry {
    engines: HashMap<usize, Arc<Handle>>,
    last: usize,
}

static REGISTRY: LazyLock<RwLock<Registry>> = LazyLock::new(Default::default);
static FORKED: AtomicBool = AtomicBool::new(false);

/// Handles are this far apart and never given out twice, so that a destroyed one stays unknown.
const STEP: usize = 16;

/// Refuses the child of a fork: threads, sockets and registrations stayed with the parent.
pub(super) fn check_process() -> Result<()> {
    if FORKED.load(Ordering::Relaxed) {
        fail!(NIXL_ERR_FORKED, "this process ({}) was forked from one that had an engine", std::process::id());
    }
    Ok(())
}

/// Gives an engine a handle.
pub(super) fn insert(engine: Engine) -> *mut nixlkv_engine_t {
    let mut registry = REGISTRY.write().unwrap_or_else(PoisonError::into_inner);
    registry.last += STEP;
    let handle = registry.last;
    registry.engines.insert(handle, Arc::new(Handle { engine, info: OnceLock::new() }));
    std::ptr::without_provenance_mut(handle)
}

/// The engine behind a handle.
pub(super) fn get(handle: *const nixlkv_engine_t) -> Result<Arc<Handle>> {
    check_process()?;
    let registry = REGISTRY.read().unwrap_or_else(PoisonError::into_inner);
    match registry.engines.get(&handle.addr()) {
        Some(engine) => Ok(engine.clone()),
        None if handle.is_null() => fail!(NIXL_ERR_INVALID_HANDLE, "engine is NULL"),
        None => fail!(NIXL_ERR_INVALID_HANDLE, "engine {:#x} was destroyed or never given out", handle.addr()),
    }
}

/// Takes an engine out.
pub(super) fn remove(handle: *mut nixlkv_engine_t) -> Option<Arc<Handle>> {
    REGISTRY.write().unwrap_or_else(PoisonError::into_inner).engines.remove(&handle.addr())
}

/// Watches for fork and for the process's exit, from the first engine on. NIXL is loaded then, so our exit handler runs
/// before its static objects are destroyed.
pub(super) fn watch_process() {
    extern "C" fn in_child() {
        FORKED.store(true, Ordering::Relaxed);
    }
    extern "C" fn at_exit() {
        if FORKED.load(Ordering::Relaxed) {
            return;
        }
        // A thread that called exit while it held the lock must not wait for itself.
        if let Ok(registry) = REGISTRY.try_read() {
            for engine in registry.engines.values() {
                engine.stop_threads(Duration::from_secs(1));
            }
        }
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: both handlers are functions of this library, which is never unloaded (-z nodelete).
        unsafe {
            libc::pthread_atfork(None, None, Some(in_child));
            libc::atexit(at_exit);
        }
    });
}
