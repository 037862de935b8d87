//! Finding `libnixl_capi.so`, and proving that it can be used before anything calls it.
//!
//! `nixl_sys` is built with stubs that open the library by its bare name at the first call and abort the process when
//! the library or a function is missing. So the library is found here, checked, and loaded by its path; the stubs'
//! `dlopen` then finds the loaded one by its name. No function of `nixl_sys` may run before [`find_library`] succeeded.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};

use super::elf::{self, Fault};
use super::search::{FILE_NAME, Surroundings};
use crate::error::{Error, NIXL_ERR_LIBRARY_INVALID, NIXL_ERR_SYMBOL_MISSING, Result, fail};

/// The environment variable that names the library.
const VARIABLE: &str = "NIXLKV_NIXL_LIBRARY";

/// Every function of `nixl_sys` that this crate reaches. A test compares the list with what the linker kept.
#[rustfmt::skip]
pub(super) const SYMBOLS: &[&str] = &[
    "nixl_capi_check_remote_md", "nixl_capi_create_backend", "nixl_capi_create_configured_agent",
    "nixl_capi_create_notif_map", "nixl_capi_create_opt_args", "nixl_capi_create_params",
    "nixl_capi_create_reg_dlist", "nixl_capi_create_xfer_dlist", "nixl_capi_create_xfer_req",
    "nixl_capi_deregister_mem", "nixl_capi_destroy_agent", "nixl_capi_destroy_backend",
    "nixl_capi_destroy_mem_list", "nixl_capi_destroy_notif_map", "nixl_capi_destroy_opt_args",
    "nixl_capi_destroy_params", "nixl_capi_destroy_reg_dlist", "nixl_capi_destroy_string_list",
    "nixl_capi_destroy_xfer_dlist", "nixl_capi_destroy_xfer_req", "nixl_capi_gen_notif",
    "nixl_capi_get_available_plugins", "nixl_capi_get_backend_params", "nixl_capi_get_local_md",
    "nixl_capi_get_notifs", "nixl_capi_get_plugin_params", "nixl_capi_get_xfer_status", "nixl_capi_invalidate_remote_md",
    "nixl_capi_load_remote_md", "nixl_capi_notif_map_get_agent_at", "nixl_capi_notif_map_get_notif",
    "nixl_capi_notif_map_get_notifs_size", "nixl_capi_notif_map_size", "nixl_capi_opt_args_add_backend",
    "nixl_capi_opt_args_set_has_notif", "nixl_capi_opt_args_set_notif_msg", "nixl_capi_params_add",
    "nixl_capi_params_create_iterator", "nixl_capi_params_destroy_iterator", "nixl_capi_params_iterator_next",
    "nixl_capi_post_xfer_req", "nixl_capi_reg_dlist_add_desc", "nixl_capi_reg_dlist_clear",
    "nixl_capi_register_mem", "nixl_capi_release_xfer_req", "nixl_capi_string_list_get",
    "nixl_capi_string_list_size", "nixl_capi_xfer_dlist_add_desc", "nixl_capi_xfer_dlist_clear",
];

/// The loaded NIXL library. It stays loaded until the process ends: NIXL and UCX leave threads, thread-local data and
/// hooks behind that must not lose their code.
pub struct Library {
    path: PathBuf,
    nixl_path: PathBuf,
    _handle: ManuallyDrop<Handle>,
}

impl Library {
    /// The file that was loaded.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The `libnixl.so` under it: NIXL looks for plugins beside this one.
    pub(super) fn nixl_path(&self) -> &Path {
        &self.nixl_path
    }
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Library").field(&self.path).finish()
    }
}

/// The one library of this process. Failures aren't kept.
static LOADED: Mutex<Option<Arc<Library>>> = Mutex::new(None);

/// Finds and loads NIXL, or returns the one loaded before: `config_path`, then the environment variable
/// `NIXLKV_NIXL_LIBRARY`, then the dynamic linker's places, then the wheels of the active Python environment.
///
/// A path that somebody named is the only one tried.
pub fn find_library(config_path: Option<&str>) -> Result<Arc<Library>> {
    let surroundings = Surroundings::of_this_process();
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let named = named_path(config_path, &surroundings)?;
    if let Some(library) = &*loaded {
        if let Some((path, source)) = named
            && !same_file(&path, &library.path)
        {
            fail!(
                NIXL_ERR_LIBRARY_INVALID,
                "{source} names {}, and this process has loaded {} already",
                path.display(),
                library.path.display()
            );
        }
        return Ok(Arc::clone(library));
    }
    let library = Arc::new(match named {
        Some((path, _)) => load(&path)?,
        None => search(&surroundings)?,
    });
    log::info!(target: "nixlkv", "loaded NIXL from {}", library.path.display());
    *loaded = Some(Arc::clone(&library));
    Ok(library)
}

/// The path that the configuration or the environment names, and which of them did.
fn named_path(config_path: Option<&str>, surroundings: &Surroundings) -> Result<Option<(PathBuf, &'static str)>> {
    let config = config_path.filter(|path| !path.is_empty()).map(|path| (PathBuf::from(path), "the configuration"));
    let variable = (surroundings.variable)(VARIABLE).filter(|path| !path.is_empty());
    let named = config.or_else(|| variable.map(|path| (PathBuf::from(path), VARIABLE)));
    let Some((path, source)) = named else { return Ok(None) };
    if !path.exists() {
        fail!(NIXL_ERR_LIBRARY_NOT_FOUND, "{source} names {}, which does not exist", path.display());
    }
    let absolute = std::path::absolute(&path).unwrap_or(path);
    Ok(Some((absolute, source)))
}

fn search(surroundings: &Surroundings) -> Result<Library> {
    let mut tried = vec![format!("the configuration and {VARIABLE} (neither names one)")];
    // Somebody else in this process may use NIXL already: then it is this one or none.
    if let Some(handle) = already_loaded()
        && let Some(path) = path_of(&handle)
    {
        return load(&path);
    }
    for file in surroundings.linker_directories().into_iter().map(|directory| directory.join(FILE_NAME)) {
        if !file.exists() {
            continue;
        }
        match elf::check(&file) {
            Ok(()) => return load(&file),
            Err(Fault::Foreign(reason)) => tried.push(format!("{} ({reason})", file.display())),
            Err(fault) => return Err(unusable(&file, &fault)),
        }
    }
    if let Some(library) = ask_linker(&mut tried)? {
        return Ok(library);
    }
    let mut first_fault = None;
    for file in surroundings.wheel_libraries(&mut tried) {
        match load(&file) {
            Ok(library) => return Ok(library),
            Err(error) => {
                log::warn!(target: "nixlkv", "{error}");
                first_fault.get_or_insert(error);
            }
        }
    }
    match first_fault {
        Some(error) => Err(error),
        None => fail!(
            NIXL_ERR_LIBRARY_NOT_FOUND,
            "{FILE_NAME} was found nowhere: set {VARIABLE} to its path, or install NIXL's wheel (nixl-cu12) in the active \
             Python environment; tried: {}",
            tried.join("; ")
        ),
    }
}

/// The dynamic linker's cache and the program's own search path, which only it knows.
fn ask_linker(tried: &mut Vec<String>) -> Result<Option<Library>> {
    // SAFETY: loading runs the initialisers of NIXL's libraries, which is what this function is for.
    match unsafe { Handle::open(Some(FILE_NAME), RTLD_NOW | RTLD_LOCAL) } {
        Ok(handle) => match path_of(&handle) {
            Some(path) => load(&path).map(Some),
            None => fail!(NIXL_ERR_LIBRARY_INVALID, "the dynamic linker's {FILE_NAME} is not NIXL's"),
        },
        Err(error) => {
            let text = cause(&error);
            // The linker names another file when it found ours and could not load what ours needs.
            let absent = text.starts_with(&format!("{FILE_NAME}: cannot open shared object file: No such file"));
            if !absent {
                fail!(NIXL_ERR_LIBRARY_INVALID, "the dynamic linker found {FILE_NAME} and cannot load it: {text}");
            }
            tried.push(format!("the dynamic linker ({text})"));
            Ok(None)
        }
    }
}

/// Checks the file, loads it, and checks that it is what the stubs will find.
fn load(path: &Path) -> Result<Library> {
    elf::check_tree(path).map_err(|(file, fault)| unusable(&file, &fault))?;
    let exports = elf::exports(path).map_err(|fault| unusable(path, &fault))?;
    if let Some(missing) = SYMBOLS.iter().find(|name| !exports.contains(**name)) {
        return Err(symbol_missing(path, missing));
    }
    if let Some(other) = already_loaded().and_then(|handle| path_of(&handle))
        && !same_file(&other, path)
    {
        fail!(
            NIXL_ERR_LIBRARY_INVALID,
            "{} was to be loaded, and this process has loaded another one: {}",
            path.display(),
            other.display()
        );
    }
    // SAFETY: loading runs the initialisers of NIXL's libraries, which is what this function is for.
    let opened = unsafe { Handle::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
    let handle = opened.map_err(|error| unusable(path, &cause(&error)))?;
    for name in SYMBOLS {
        // SAFETY: the symbol is only looked up.
        if unsafe { handle.get::<*const c_void>(name.as_bytes()) }.is_err() {
            return Err(symbol_missing(path, name));
        }
    }
    let mine = handle.into_raw();
    // SAFETY: `mine` came from `into_raw` just now.
    let handle = unsafe { Handle::from_raw(mine) };
    let by_name = already_loaded().map(Handle::into_raw);
    if by_name != Some(mine) {
        let found = if by_name.is_some() { "finds another one" } else { "does not find it: another DT_SONAME?" };
        return Err(unusable(path, &format!("loaded, but opening {FILE_NAME} by its name {found}")));
    }
    let nixl_path = nixl_path(&handle).unwrap_or_else(|| path.with_file_name("libnixl.so"));
    Ok(Library { path: path.to_path_buf(), nixl_path, _handle: ManuallyDrop::new(handle) })
}

/// What the stubs will find by the bare name. Never loads anything.
fn already_loaded() -> Option<Handle> {
    // SAFETY: RTLD_NOLOAD only looks among what is loaded.
    unsafe { Handle::open(Some(FILE_NAME), RTLD_NOW | RTLD_LOCAL | libc::RTLD_NOLOAD) }.ok()
}

fn path_of(handle: &Handle) -> Option<PathBuf> {
    file_of_symbol(handle, SYMBOLS[0].as_bytes())
}

/// The file of `libnixl.so`: NIXL itself finds its plugins by asking which file its code came from.
fn nixl_path(handle: &Handle) -> Option<PathBuf> {
    // nixlAgent's destructor: a lookup through the C API's library also searches what that one needs.
    file_of_symbol(handle, b"_ZN9nixlAgentD1Ev")
        .or_else(|| super::process::loaded_files().into_iter().find(|file| file.ends_with("libnixl.so")))
}

/// The file that a symbol was loaded from.
fn file_of_symbol(handle: &Handle, name: &[u8]) -> Option<PathBuf> {
    // SAFETY: only the symbol's address is used.
    let address = unsafe { handle.get::<*const c_void>(name) }.ok()?.into_raw();
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: dladdr takes any address and fills `info` when it returns non-zero.
    let found = unsafe { libc::dladdr(address.cast_const(), info.as_mut_ptr()) } != 0;
    // SAFETY: zeroed bytes are a valid Dl_info, filled or not.
    let info = unsafe { info.assume_init() };
    if !found || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dli_fname is the loader's string for an object that stays loaded while `handle` is open.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    std::path::absolute(Path::new(name.to_str().ok()?)).ok()
}

fn same_file(a: &Path, b: &Path) -> bool {
    match (a.canonicalize(), b.canonicalize()) {
        (Ok(a), Ok(b)) => a == b,
        _ => a == b,
    }
}

fn unusable(path: &Path, reason: &dyn std::fmt::Display) -> Error {
    Error::new(NIXL_ERR_LIBRARY_INVALID, format!("{}: {reason}", path.display()))
}

fn symbol_missing(path: &Path, name: &str) -> Error {
    Error::new(NIXL_ERR_SYMBOL_MISSING, format!("{} lacks {name}", path.display()))
}

/// The loader's own words.
pub(super) fn cause(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => source.to_string(),
        None => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::*;
    use std::process::Command;

    fn named(path: &Path) -> Error {
        find_library(Some(path.to_str().unwrap())).unwrap_err()
    }

    /// A library from a line of C.
    fn build(folder: &Path, soname: &str, source: &str) -> PathBuf {
        let (c, so) = (folder.join("fake.c"), folder.join(FILE_NAME));
        std::fs::write(&c, source).unwrap();
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-o"]).arg(&so).arg(&c).arg(format!("-Wl,-soname,{soname}"));
        assert!(cc.status().unwrap().success());
        so
    }

    #[test]
    fn a_named_path_is_the_only_one_tried() {
        let error = named(Path::new("/nonexistent/libnixl_capi.so"));
        assert_eq!(error.code, NIXL_ERR_LIBRARY_NOT_FOUND);
        assert!(error.text.contains("/nonexistent/libnixl_capi.so"), "{error}");
        let surroundings = Surroundings {
            variable: Box::new(|name| (name == VARIABLE).then(|| "/nonexistent/from_env.so".into())),
            executable: None,
            started_as: None,
        };
        let error = named_path(None, &surroundings).unwrap_err();
        assert!(error.text.contains(VARIABLE) && error.text.contains("/nonexistent/from_env.so"), "{error}");
        let error = named_path(Some("/nonexistent/config.so"), &surroundings).unwrap_err();
        assert!(error.text.contains("/nonexistent/config.so"), "{error}");
    }

    #[test]
    fn nothing_found_names_every_place() {
        let surroundings = Surroundings {
            variable: Box::new(|name| match name {
                "LD_LIBRARY_PATH" => Some("/nonexistent/ld".into()),
                "VIRTUAL_ENV" => Some("/nonexistent/venv".into()),
                _ => None,
            }),
            executable: None,
            started_as: None,
        };
        let error = search(&surroundings).unwrap_err();
        assert_eq!(error.code, NIXL_ERR_LIBRARY_NOT_FOUND, "{error}");
        for place in [VARIABLE, "dynamic linker", "/nonexistent/venv"] {
            assert!(error.text.contains(place), "{place}: {error}");
        }
    }

    #[test]
    fn bad_files_are_refused_before_they_are_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let fake = folder.path().join(FILE_NAME);
        std::fs::write(&fake, "not a library").unwrap();
        let error = load(&fake).unwrap_err();
        assert_eq!(error.code, NIXL_ERR_LIBRARY_INVALID);
        assert!(error.text.contains(fake.to_str().unwrap()), "{error}");

        let whole = build(folder.path(), FILE_NAME, "int nixl_capi_is_stub(void) { return 0; }");
        let error = load(&whole).unwrap_err();
        assert_eq!(error.code, NIXL_ERR_SYMBOL_MISSING);
        assert!(error.text.contains(SYMBOLS[0]) && error.text.contains(whole.to_str().unwrap()), "{error}");

        let bytes = std::fs::read(&whole).unwrap();
        std::fs::write(&whole, &bytes[..bytes.len() / 4]).unwrap();
        let error = load(&whole).unwrap_err();
        assert_eq!(error.code, NIXL_ERR_LIBRARY_INVALID);
        assert!(error.text.contains("truncated"), "{error}");
    }

    #[test]
    fn another_soname_is_refused_and_leaves_nothing_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let source: String = SYMBOLS.iter().map(|name| format!("void {name}(void) {{}}\n")).collect();
        let odd = build(folder.path(), "libother.so", &source);
        let error = load(&odd).unwrap_err();
        assert_eq!(error.code, NIXL_ERR_LIBRARY_INVALID, "{error}");
        let loaded = crate::nixl::process::loaded_files();
        assert!(!loaded.iter().any(|file| file == &odd), "{loaded:?}");
    }

    #[test]
    fn the_list_is_sorted_and_has_no_duplicates() {
        assert!(SYMBOLS.windows(2).all(|pair| pair[0] < pair[1]));
    }
}
