//! The backend's plugin, looked at before NIXL does: NIXL's plugin manager scans its folder once in the life of the
//! process, and only says "backend error" when it finds nothing there.
#![allow(unsafe_code)]

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};

use super::elf;
use super::library::{Library, cause};
use crate::error::{Result, fail};

/// The variable that NIXL prefers to its own folder.
const VARIABLE: &str = "NIXL_PLUGIN_DIR";

/// The folder that NIXL's plugin manager has scanned, once it has.
static SCANNED: Mutex<Option<PathBuf>> = Mutex::new(None);

/// Checks that NIXL will find and can load the backend's plugin. After success NIXL may be asked for it, and its
/// folder is settled for the life of the process.
pub(super) fn check(library: &Library, backend: &str) -> Result<()> {
    let mut scanned = SCANNED.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = match &*scanned {
        Some(directory) => directory.clone(),
        None => match std::env::var_os(VARIABLE) {
            Some(directory) => PathBuf::from(directory),
            None => library.nixl_path().with_file_name("plugins"),
        },
    };
    if !is_built_in(library.nixl_path(), backend) {
        check_file(&directory, backend)?;
    }
    *scanned = Some(directory);
    Ok(())
}

fn check_file(directory: &Path, backend: &str) -> Result<()> {
    let file = directory.join(format!("libplugin_{backend}.so"));
    if !file.exists() {
        let found = plugins_in(directory);
        let found = if found.is_empty() { "none".into() } else { found.join(", ") };
        let hint = if std::env::var_os(VARIABLE).is_some() { " (set by NIXL_PLUGIN_DIR)" } else { "" };
        fail!(
            NIXL_ERR_PLUGIN_NOT_FOUND,
            "no libplugin_{backend}.so in {}{hint}; plugins there: {found}",
            directory.display()
        );
    }
    if let Err((bad, fault)) = elf::check_tree(&file) {
        fail!(NIXL_ERR_PLUGIN_INVALID, "{}: {fault}", bad.display());
    }
    // With this variable NIXL opens the plugin in another mode, and the first opening decides.
    if std::env::var_os("NIXL_UCX_DEEPBIND").is_some() {
        return Ok(());
    }
    // SAFETY: loading runs the initialisers of the plugin and UCX, as NIXL would do next. RTLD_NODELETE is how NIXL
    // opens plugins: they must not lose their code.
    match unsafe { Handle::open(Some(&file), RTLD_NOW | RTLD_LOCAL | libc::RTLD_NODELETE) } {
        // SAFETY: the symbol is only looked up.
        Ok(handle) => match unsafe { handle.get::<*const ()>(b"nixl_plugin_init") } {
            Ok(_) => Ok(()),
            Err(error) => fail!(NIXL_ERR_PLUGIN_INVALID, "{} is no NIXL plugin: {}", file.display(), cause(&error)),
        },
        Err(error) => fail!(NIXL_ERR_PLUGIN_INVALID, "{}", cause(&error)),
    }
}

/// Some builds of NIXL link backends in instead.
fn is_built_in(nixl: &Path, backend: &str) -> bool {
    let name = format!("createStatic{backend}Plugin");
    elf::exports(nixl).is_ok_and(|exports| exports.iter().any(|export| export.contains(&name)))
}

fn plugins_in(directory: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let backend = |name: String| Some(name.strip_prefix("libplugin_")?.strip_suffix(".so")?.to_string());
    let mut found: Vec<String> = names.filter_map(backend).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::*;

    #[test]
    fn a_missing_plugin_names_the_folder_and_what_is_there() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("libplugin_POSIX.so"), "").unwrap();
        std::fs::write(folder.path().join("libtelemetry_exporter_x.so"), "").unwrap();
        let error = check_file(folder.path(), "UCX").unwrap_err();
        assert_eq!(error.code, NIXL_ERR_PLUGIN_NOT_FOUND);
        assert!(error.text.contains(folder.path().to_str().unwrap()), "{error}");
        assert!(error.text.ends_with("plugins there: POSIX"), "{error}");
        let error = check_file(Path::new("/nonexistent"), "UCX").unwrap_err();
        assert!(error.text.ends_with("plugins there: none"), "{error}");
    }

    #[test]
    fn a_bad_plugin_is_not_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("libplugin_UCX.so");
        std::fs::write(&file, b"\x7fELF but not for long enough").unwrap();
        let error = check_file(folder.path(), "UCX").unwrap_err();
        assert_eq!(error.code, NIXL_ERR_PLUGIN_INVALID);
        assert!(error.text.contains(file.to_str().unwrap()), "{error}");

        let source = folder.path().join("empty.c");
        std::fs::write(&source, "int nothing;").unwrap();
        let built = std::process::Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&file).arg(&source).status();
        assert!(built.unwrap().success());
        let error = check_file(folder.path(), "UCX").unwrap_err();
        assert_eq!(error.code, NIXL_ERR_PLUGIN_INVALID);
        assert!(error.text.contains("nixl_plugin_init"), "{error}");
    }
}
