//! Where a NIXL library can be: the directories of the dynamic linker and the Python environments. Pure but for
//! looking at files; no subprocess is run.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};

/// The file that `nixl_sys` opens.
pub(super) const FILE_NAME: &str = "libnixl_capi.so";

/// The wheels' private library folders beside their packages in `site-packages`.
const WHEEL_FOLDERS: [&str; 2] = [".nixl_cu12.mesonpy.libs", ".nixl_cu13.mesonpy.libs"];

/// An environment: a variable's value by its name.
pub(super) type Variables = Box<dyn Fn(&str) -> Option<OsString>>;

/// What the search looks at besides files.
pub(super) struct Surroundings {
    /// The environment.
    pub variable: Variables,
    /// The file of this process.
    pub executable: Option<PathBuf>,
    /// The name by which this process was started: unlike its file, it may lie inside a virtual environment.
    pub started_as: Option<PathBuf>,
}

impl Surroundings {
    /// Those of this process.
    pub(super) fn of_this_process() -> Self {
        Self {
            variable: Box::new(|name| std::env::var_os(name)),
            executable: fs::read_link("/proc/self/exe").ok(),
            started_as: std::env::args_os().next().map(PathBuf::from),
        }
    }

    fn variable(&self, name: &str) -> Option<OsString> {
        (self.variable)(name).filter(|value| !value.is_empty())
    }

    /// Directories that the dynamic linker looks into, as far as they can be known without asking it.
    pub(super) fn linker_directories(&self) -> Vec<PathBuf> {
        let mut found: Vec<PathBuf> = match self.variable("LD_LIBRARY_PATH") {
            Some(list) => std::env::split_paths(&list).filter(|path| path.is_absolute()).collect(),
            None => Vec::new(),
        };
        let triple = format!("{}-linux-gnu", std::env::consts::ARCH);
        for root in ["/lib", "/usr/lib", "/usr/local/lib"] {
            found.push(Path::new(root).join(&triple));
        }
        found.extend(["/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/lib"].map(PathBuf::from));
        found
    }

    /// Every wheel's library folder in the active Python environment, best first, whether it holds the file or not.
    /// `tried` gets the places that were looked into.
    pub(super) fn wheel_libraries(&self, tried: &mut Vec<String>) -> Vec<PathBuf> {
        let mut packages = Vec::new();
        for prefix in self.python_prefixes() {
            tried.push(format!("{}/lib*/python3*/{{site,dist}}-packages/.nixl_cu1[23].mesonpy.libs", prefix.display()));
            package_folders(&prefix, &mut packages);
        }
        let mut found: Vec<PathBuf> = Vec::new();
        for folder in packages.iter().flat_map(|package| WHEEL_FOLDERS.map(|name| package.join(name))) {
            let file = folder.join(FILE_NAME);
            if file.exists() && !found.contains(&file) {
                found.push(file);
            }
        }
        found
    }

    /// Prefixes of Python installations: the virtual environment, then this process, then `python3` of PATH, then
    /// pyenv's versions, then the user's own packages.
    fn python_prefixes(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut add = |prefix: PathBuf| {
            if !found.contains(&prefix) {
                found.push(prefix);
            }
        };
        for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
            self.variable(name).map(PathBuf::from).into_iter().for_each(&mut add);
        }
        for program in [&self.started_as, &self.executable].into_iter().flatten() {
            if is_python(program) && program.is_absolute() {
                prefixes_of(program).into_iter().for_each(&mut add);
            }
        }
        let path = self.variable("PATH").unwrap_or_default();
        for folder in std::env::split_paths(&path).filter(|folder| folder.is_absolute()) {
            let program = folder.join("python3");
            if program.is_file() {
                prefixes_of(&program).into_iter().for_each(&mut add);
                break;
            }
        }
        self.pyenv_versions().into_iter().for_each(&mut add);
        match self.variable("PYTHONUSERBASE") {
            Some(base) => add(PathBuf::from(base)),
            None => self.variable("HOME").map(|home| PathBuf::from(home).join(".local")).into_iter().for_each(&mut add),
        }
        found
    }

    /// pyenv puts a script in PATH, so its versions are listed: the chosen one first.
    fn pyenv_versions(&self) -> Vec<PathBuf> {
        let root = self.variable("PYENV_ROOT").map(PathBuf::from);
        let Some(root) = root.or_else(|| Some(PathBuf::from(self.variable("HOME")?).join(".pyenv"))) else {
            return Vec::new();
        };
        let chosen = self.variable("PYENV_VERSION").map(|name| name.to_string_lossy().into_owned());
        let chosen = chosen.or_else(|| fs::read_to_string(root.join("version")).ok()).unwrap_or_default();
        let versions = root.join("versions");
        let mut found: Vec<PathBuf> = chosen
            .split([':', '\n'])
            .map(str::trim)
            .filter(|name| !name.is_empty())
            .map(|name| versions.join(name))
            .collect();
        found.retain(|path| path.is_dir());
        let mut others = subfolders(&versions, |_| true);
        others.reverse();
        found.extend(others);
        found
    }
}

fn is_python(program: &Path) -> bool {
    program.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python"))
}

/// `<prefix>/bin/python3` to `<prefix>`: as named (a virtual environment links to its base) and resolved.
fn prefixes_of(program: &Path) -> Vec<PathBuf> {
    let resolved = program.canonicalize().ok().filter(|file| is_python(file));
    let named = Some(program.to_path_buf());
    [named, resolved].into_iter().flatten().filter_map(|file| Some(file.parent()?.parent()?.to_path_buf())).collect()
}

/// `<prefix>/lib*/python3*/{site,dist}-packages`.
fn package_folders(prefix: &Path, found: &mut Vec<PathBuf>) {
    for lib in subfolders(prefix, |name| name.starts_with("lib")) {
        let mut pythons = subfolders(&lib, |name| name.starts_with("python3"));
        pythons.reverse();
        for python in pythons {
            for name in ["site-packages", "dist-packages"] {
                let packages = python.join(name);
                if packages.is_dir() && !found.contains(&packages) {
                    found.push(packages);
                }
            }
        }
    }
}

/// Folders inside `parent` in the order of their names.
fn subfolders(parent: &Path, wanted: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(parent) else { return Vec::new() };
    let names = entries.flatten().map(|entry| entry.file_name());
    let mut names: Vec<OsString> = names.filter(|name: &OsString| wanted(&OsStr::to_string_lossy(name))).collect();
    names.sort();
    names.into_iter().map(|name| parent.join(name)).filter(|path| path.is_dir()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;
    use std::os::unix::fs::symlink;

    fn surroundings(variables: &[(&str, &Path)]) -> Surroundings {
        let variables: HashMap<String, OsString> =
            variables.iter().map(|(name, value)| (name.to_string(), value.as_os_str().to_owned())).collect();
        Surroundings {
            variable: Box::new(move |name| variables.get(name).cloned()),
            executable: None,
            started_as: None,
        }
    }

    /// A Python installation with a wheel in it; returns the library's path.
    fn install(prefix: &Path, lib: &str, packages: &str, wheel: usize) -> PathBuf {
        let folder = prefix.join(lib).join("python3.11").join(packages).join(WHEEL_FOLDERS[wheel]);
        fs::create_dir_all(&folder).unwrap();
        fs::create_dir_all(prefix.join("bin")).unwrap();
        fs::write(prefix.join("bin/python3.11"), "").unwrap();
        let _ = symlink("python3.11", prefix.join("bin/python3"));
        let file = folder.join(FILE_NAME);
        fs::write(&file, "").unwrap();
        file
    }

    fn search(surroundings: &Surroundings) -> Vec<PathBuf> {
        surroundings.wheel_libraries(&mut Vec::new())
    }

    #[test]
    fn each_kind_of_environment_is_searched_in_order() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let at = |name: &str| root.join(name);
        let venv = install(&at("venv"), "lib", "site-packages", 0);
        let conda = install(&at("conda"), "lib", "site-packages", 1);
        let path = install(&at("usr"), "lib64", "dist-packages", 0);
        let pyenv_old = install(&at("pyenv/versions/3.10.1"), "lib", "site-packages", 0);
        let pyenv_new = install(&at("pyenv/versions/3.12.3"), "lib", "site-packages", 0);
        let user = install(&at("home/.local"), "lib", "site-packages", 0);
        let bin = at("usr/bin");
        let found = search(&surroundings(&[
            ("VIRTUAL_ENV", &at("venv")),
            ("CONDA_PREFIX", &at("conda")),
            ("PATH", &bin),
            ("PYENV_ROOT", &at("pyenv")),
            ("HOME", &at("home")),
        ]));
        assert_eq!(found, [venv, conda, path, pyenv_new.clone(), pyenv_old.clone(), user]);

        fs::write(at("pyenv/version"), "3.10.1\n").unwrap();
        assert_eq!(search(&surroundings(&[("PYENV_ROOT", &at("pyenv"))])), [pyenv_old, pyenv_new]);
    }

    #[test]
    fn the_python_that_runs_us_counts_by_its_name_and_by_its_file() {
        let root = tempfile::tempdir().unwrap();
        let base = root.path().join("base");
        let venv = root.path().join("venv");
        let in_base = install(&base, "lib", "site-packages", 0);
        fs::create_dir_all(venv.join("bin")).unwrap();
        symlink(base.join("bin/python3.11"), venv.join("bin/python3")).unwrap();
        let folder = venv.join("lib/python3.11/site-packages").join(WHEEL_FOLDERS[1]);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(FILE_NAME), "").unwrap();

        let mut place = surroundings(&[]);
        assert!(search(&place).is_empty());
        place.executable = Some(base.join("bin/python3.11"));
        assert_eq!(search(&place), std::slice::from_ref(&in_base));
        place.started_as = Some(venv.join("bin/python3"));
        assert_eq!(search(&place), [folder.join(FILE_NAME), in_base]);
        place.executable = Some(PathBuf::from("/usr/bin/some-engine"));
        place.started_as = None;
        assert!(search(&place).is_empty());
    }

    #[test]
    fn every_place_is_named() {
        let mut tried = Vec::new();
        let nowhere = Path::new("/nonexistent/venv");
        assert!(surroundings(&[("VIRTUAL_ENV", nowhere)]).wheel_libraries(&mut tried).is_empty());
        assert!(tried.iter().any(|place| place.starts_with("/nonexistent/venv/lib")), "{tried:?}");
    }
}
