//! UCX's settings, given per engine.
//!
//! NIXL passes them on in one parameter, `engine_config`, a list of `KEY=VALUE` parted by commas. Three things get
//! lost on that way: a value with a comma in it, as most lists of UCX are; any refusal by UCX, which NIXL only notes
//! in its debug log; and any setting that the environment has as well, where NIXL prefers the environment. Changing
//! the host's environment instead is out of the question. So the plugin's own call of `ucp_config_modify` is led
//! through this module, which unpacks the values that [`Settings`] packed, passes all others on untouched, and notes
//! what UCX says.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use libloading::os::unix::{Library as Handle, RTLD_NOW};

use super::process::{is_writable, loaded_files};
use crate::error::{Result, fail};

/// NIXL's parameter that carries UCX's settings.
const ENGINE_CONFIG: &str = "engine_config";
/// Begins a packed value.
const PACKED: char = '\u{1}';
/// Stands for a comma in a packed value.
const COMMA: char = '\u{2}';

/// One engine's settings for UCX and parameters for NIXL.
#[derive(Debug)]
pub(super) struct Settings {
    /// Without `UCX_`.
    ucx: Vec<(String, String)>,
    nixl: Vec<(String, String)>,
}

impl Settings {
    /// Parts the two kinds, and refuses what can't be passed on.
    pub(super) fn new(params: &[(String, String)]) -> Result<Self> {
        let mut settings = Self { ucx: Vec::new(), nixl: Vec::new() };
        for (key, value) in params {
            if key.is_empty() || key.contains(|c: char| c.is_control() || c == '=' || c == ',') {
                fail!(NIXL_ERR_INVALID_ARGUMENT, "no backend parameter can be called {key:?}");
            }
            if value.contains('\0') || (key.starts_with("UCX_") && value.contains(char::is_control)) {
                fail!(NIXL_ERR_INVALID_ARGUMENT, "the backend parameter {key} contains a control character: {value:?}");
            }
            match key.strip_prefix("UCX_") {
                Some(setting) => settings.ucx.push((setting.to_string(), value.clone())),
                None => settings.nixl.push((key.clone(), value.clone())),
            }
        }
        let given = |wanted: &str| settings.nixl.iter().any(|(key, _)| key == wanted);
        if !settings.ucx.is_empty() && given(ENGINE_CONFIG) {
            fail!(NIXL_ERR_INVALID_ARGUMENT, "backend parameters hold both {ENGINE_CONFIG} and UCX_ settings");
        }
        Ok(settings)
    }

    /// NIXL's parameters for this backend. When they hold UCX settings, the plugin must be loaded.
    pub(super) fn for_nixl(&self, backend: &str) -> std::result::Result<Vec<(String, String)>, String> {
        let mut params = self.nixl.clone();
        if self.ucx.is_empty() {
            return Ok(params);
        }
        let led = lead_modify(backend);
        if let Err(reason) = &led
            && let Some((key, value)) = self.ucx.iter().find(|(_, value)| value.contains(','))
        {
            return Err(format!("UCX_{key}={value}: this NIXL can't pass a comma on ({reason})"));
        }
        let pack = |value: &str| match &led {
            Ok(()) => format!("{PACKED}{}", value.replace(',', &COMMA.to_string())),
            Err(_) => value.to_string(),
        };
        let list: Vec<String> = self.ucx.iter().map(|(key, value)| format!("{key}={}", pack(value))).collect();
        params.push((ENGINE_CONFIG.to_string(), list.join(",")));
        lock(&ANSWERS).clear();
        Ok(params)
    }

    /// After the backend was created: what UCX refused. Warns of what the environment overrode.
    pub(super) fn refusals(&self) -> Vec<String> {
        if REAL.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        let answers = lock(&ANSWERS);
        let mut refused = Vec::new();
        for (key, value) in &self.ucx {
            match answers.get(key) {
                Some(None) => {}
                Some(Some(reason)) => refused.push(format!("UCX refused UCX_{key}={value}: {reason}")),
                None => {
                    log::warn!(target: "nixlkv", "UCX_{key} of the environment overrides the engine's own UCX_{key}={value}");
                }
            }
        }
        refused
    }

    /// What the backend reports, in the form in which it was configured.
    pub(super) fn report(
        &self,
        defaults: Vec<(String, String)>,
        actual: Vec<(String, String)>,
    ) -> Vec<(String, String)> {
        let mut params: Vec<_> =
            defaults.into_iter().filter(|(key, _)| actual.iter().all(|(other, _)| other != key)).collect();
        params.extend(actual.into_iter().filter(|(key, _)| self.ucx.is_empty() || key != ENGINE_CONFIG));
        params.extend(self.ucx.iter().map(|(key, value)| (format!("UCX_{key}"), value.clone())));
        params.sort();
        params
    }
}

/// `ucs_status_t` is a packed enumeration.
type Modify = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> i8;

/// UCX's own function, once the plugin's call is led through here.
static REAL: AtomicUsize = AtomicUsize::new(0);
/// What UCX said to each packed setting of the engine that is being opened: `None` is yes.
static ANSWERS: Mutex<BTreeMap<String, Option<String>>> = Mutex::new(BTreeMap::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

unsafe extern "C" fn modify(config: *mut c_void, name: *const c_char, value: *const c_char) -> i8 {
    // SAFETY: the slot leads here only after REAL was set to a function of this type.
    let real: Modify = unsafe { std::mem::transmute(REAL.load(Ordering::Acquire)) };
    // SAFETY: UCX takes C strings, so the plugin passes C strings.
    let text = unsafe { CStr::from_ptr(value) }.to_bytes();
    let Some(packed) = text.strip_prefix(&[PACKED as u8]) else {
        // SAFETY: the caller's own arguments.
        return unsafe { real(config, name, value) };
    };
    let plain: Vec<u8> = packed.iter().map(|&byte| if byte == COMMA as u8 { b',' } else { byte }).collect();
    let Ok(plain) = CString::new(plain) else { return -1 };
    // SAFETY: as above, with another C string that lives through the call.
    let status = unsafe { real(config, name, plain.as_ptr()) };
    // SAFETY: as for `value`.
    let key = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    const INVALID_PARAM: i8 = -5;
    let reason = (status != 0).then(|| match status {
        INVALID_PARAM => "no such setting, or no such value of it".to_string(),
        other => format!("ucs_status_t {other}"),
    });
    lock(&ANSWERS).insert(key, reason);
    status
}

/// The start of glibc's `struct link_map`.
#[repr(C)]
struct LinkMap {
    base: usize,
    name: *const c_char,
    dynamic: *const [u64; 2],
}

#[repr(C)]
struct Relocation {
    offset: u64,
    info: u64,
    addend: i64,
}

#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: u64,
    size: u64,
}

/// The relocation types of a slot that holds a function's address.
#[cfg(target_arch = "x86_64")]
const SLOT_TYPES: [u64; 2] = [object::elf::R_X86_64_JUMP_SLOT as u64, object::elf::R_X86_64_GLOB_DAT as u64];
/// The relocation types of a slot that holds a function's address.
#[cfg(target_arch = "aarch64")]
const SLOT_TYPES: [u64; 2] = [object::elf::R_AARCH64_JUMP_SLOT as u64, object::elf::R_AARCH64_GLOB_DAT as u64];

const FUNCTION: &CStr = c"ucp_config_modify";

/// Makes the plugin's slot for `ucp_config_modify` point to [`modify`]. It stays so: plugins are never unloaded.
fn lead_modify(backend: &str) -> std::result::Result<(), String> {
    static DONE: Mutex<Option<PathBuf>> = Mutex::new(None);
    let mut done = lock(&DONE);
    let name = format!("libplugin_{backend}.so");
    let path = loaded_files().into_iter().find(|file| file.ends_with(&name)).ok_or(format!("{name} is not loaded"))?;
    if done.as_ref() == Some(&path) {
        return Ok(());
    }
    // SAFETY: RTLD_NOLOAD finds the loaded plugin; nothing new is run.
    let handle = unsafe { Handle::open(Some(&path), RTLD_NOW | libc::RTLD_NOLOAD) };
    let handle = handle.map_err(|error| super::library::cause(&error))?;
    // SAFETY: the symbol's address is only compared and called with its own type.
    let real = unsafe { handle.get::<*const c_void>(FUNCTION.to_bytes_with_nul()) };
    let real = real.map_err(|error| super::library::cause(&error))?.into_raw() as usize;
    let raw = handle.into_raw();
    // SAFETY: `raw` came from `into_raw`; the handle is dropped after its use below.
    let _handle = unsafe { Handle::from_raw(raw) };
    let mut map: *const LinkMap = std::ptr::null();
    // SAFETY: RTLD_DI_LINKMAP stores a pointer to the object's link map, which lives as long as the object.
    let result = unsafe { libc::dlinfo(raw, libc::RTLD_DI_LINKMAP, (&raw mut map).cast()) };
    if result != 0 || map.is_null() {
        return Err("the dynamic linker does not tell where it is loaded".into());
    }
    // SAFETY: see above.
    let slots = unsafe { slots(&*map) };
    let slots: Vec<_> = slots.into_iter().filter(|slot| slot.load(Ordering::Acquire) as usize == real).collect();
    if slots.is_empty() {
        return Err(format!("{name} has no slot for {}", FUNCTION.to_string_lossy()));
    }
    REAL.store(real, Ordering::Release);
    for slot in slots {
        write_slot(slot, modify as Modify as usize)?;
    }
    *done = Some(path);
    Ok(())
}

/// The slots of a loaded object that were resolved to [`FUNCTION`].
///
/// # Safety
/// `map` is the link map of a loaded object that is never unloaded.
unsafe fn slots(map: &LinkMap) -> Vec<&'static AtomicPtr<c_void>> {
    let mut entries = BTreeMap::new();
    let mut entry = map.dynamic;
    loop {
        // SAFETY: the dynamic section ends with a null entry.
        let [tag, value] = unsafe { *entry };
        if tag == u64::from(object::elf::DT_NULL) {
            break;
        }
        entries.insert(tag, value as usize);
        // SAFETY: not the last entry.
        entry = unsafe { entry.add(1) };
    }
    let get = |tag: u32| entries.get(&u64::from(tag)).copied();
    // glibc has turned these into addresses; other loaders leave offsets.
    let address = |tag: u32| get(tag).map(|value| if value < map.base { value + map.base } else { value });
    let (Some(symbols), Some(strings)) = (address(object::elf::DT_SYMTAB), address(object::elf::DT_STRTAB)) else {
        return Vec::new();
    };
    let tables = [
        (address(object::elf::DT_JMPREL), get(object::elf::DT_PLTRELSZ)),
        (address(object::elf::DT_RELA), get(object::elf::DT_RELASZ)),
    ];
    let mut found = Vec::new();
    for (table, len) in tables.into_iter().filter_map(|(table, len)| Some((table?, len?))) {
        // SAFETY: the loader has read the same table of the same length.
        let table =
            unsafe { std::slice::from_raw_parts(table as *const Relocation, len / std::mem::size_of::<Relocation>()) };
        for relocation in table.iter().filter(|relocation| SLOT_TYPES.contains(&(relocation.info & 0xFFFF_FFFF))) {
            // SAFETY: a relocation's symbol index lies inside the symbol table, its name inside the string table.
            let name = unsafe {
                let symbol = &*(symbols as *const Symbol).add((relocation.info >> 32) as usize);
                CStr::from_ptr((strings + symbol.name as usize) as *const c_char)
            };
            if name == FUNCTION {
                let slot = (map.base + relocation.offset as usize) as *const AtomicPtr<c_void>;
                // SAFETY: an aligned pointer inside the object's data, which is never unloaded.
                found.push(unsafe { &*slot });
            }
        }
    }
    found
}

/// Writes a slot, which may lie in pages that the loader has made read-only.
fn write_slot(slot: &AtomicPtr<c_void>, value: usize) -> std::result::Result<(), String> {
    let address = std::ptr::from_ref(slot) as usize;
    let protect = |protection: c_int| {
        // SAFETY: sysconf only reads.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
        let start = address / page * page;
        // SAFETY: the page belongs to the plugin's data; adding and removing write access changes nothing else.
        unsafe { libc::mprotect(start as *mut c_void, page, protection) }
    };
    let writable = is_writable(address);
    if !writable && protect(libc::PROT_READ | libc::PROT_WRITE) != 0 {
        return Err(format!("its slot can't be written: {}", std::io::Error::last_os_error()));
    }
    slot.store(value as *mut c_void, Ordering::Release);
    if !writable {
        protect(libc::PROT_READ);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::*;

    fn params(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect()
    }

    #[test]
    fn the_two_kinds_are_parted() {
        let settings = Settings::new(&params(&[("num_workers", "2"), ("UCX_TLS", "tcp,self"), ("x", "a,b")])).unwrap();
        assert_eq!(settings.ucx, params(&[("TLS", "tcp,self")]));
        assert_eq!(settings.nixl, params(&[("num_workers", "2"), ("x", "a,b")]));
        let report = settings.report(
            params(&[("num_workers", "1"), ("ucx_devices", "")]),
            params(&[("num_workers", "2"), ("engine_config", "TLS=\u{1}tcp\u{2}self")]),
        );
        assert_eq!(report, params(&[("UCX_TLS", "tcp,self"), ("num_workers", "2"), ("ucx_devices", "")]));
    }

    #[test]
    fn what_cannot_be_passed_on_is_refused() {
        let bad = [("", "x"), ("a=b", "x"), ("UCX_A,B", "x"), ("UCX_TLS", "a\u{1}"), ("k", "a\0b")];
        for (key, value) in bad {
            let error = Settings::new(&params(&[(key, value)])).unwrap_err();
            assert_eq!(error.code, NIXL_ERR_INVALID_ARGUMENT, "{key:?}");
        }
        assert!(Settings::new(&params(&[("UCX_TLS", "tcp"), ("engine_config", "TLS=tcp")])).is_err());
        assert!(Settings::new(&params(&[("engine_config", "TLS=tcp")])).is_ok());
    }

    #[test]
    fn without_the_plugin_a_comma_is_an_error_and_the_rest_passes() {
        let settings = |value| Settings::new(&params(&[("UCX_TLS", value)])).unwrap();
        let error = settings("tcp,self").for_nixl("NO_SUCH").unwrap_err();
        assert!(error.contains("UCX_TLS=tcp,self"), "{error}");
        assert_eq!(settings("tcp").for_nixl("NO_SUCH").unwrap(), params(&[("engine_config", "TLS=tcp")]));
    }
}
