//! A look into a shared library before it is loaded: `dlopen` maps what the headers promise, and a truncated file
//! then kills the process with SIGBUS instead of returning an error.

use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};

use object::elf::{self, FileHeader64};
use object::read::ReadCache;
use object::read::elf::{Dyn, FileHeader, ProgramHeader, Sym};
use object::{Endianness, ReadRef};

type Header = FileHeader64<Endianness>;

/// The ELF machine that this build can load.
#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = elf::EM_X86_64;
/// The ELF machine that this build can load.
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = elf::EM_AARCH64;

/// Why a file is not a shared library that this process can load.
#[derive(Debug)]
pub(super) enum Fault {
    /// A sound library, but of another word size, byte order or machine: the dynamic linker skips those.
    Foreign(String),
    /// Unreadable, truncated, or not a shared library at all.
    Broken(String),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Foreign(text) | Fault::Broken(text) => f.write_str(text),
        }
    }
}

/// What the loader would do next with a library.
#[derive(Debug, Default)]
struct Dependencies {
    needed: Vec<String>,
    directories: Vec<PathBuf>,
}

fn broken(error: impl fmt::Display) -> Fault {
    Fault::Broken(error.to_string())
}

/// Checks one file: ELF, this build's class and machine, a shared object, every loaded segment inside the file.
pub(super) fn check(path: &Path) -> Result<(), Fault> {
    inspect(path).map(|_| ())
}

/// Checks a file and, recursively, those of its needed libraries that its own search path leads to.
pub(super) fn check_tree(path: &Path) -> Result<(), (PathBuf, Fault)> {
    let mut seen = HashSet::new();
    let mut open = vec![path.to_path_buf()];
    while let Some(path) = open.pop() {
        if !seen.insert(path.canonicalize().unwrap_or_else(|_| path.clone())) {
            continue;
        }
        let dependencies = inspect(&path).map_err(|fault| (path.clone(), fault))?;
        for name in &dependencies.needed {
            let found =
                dependencies.directories.iter().map(|directory| directory.join(name)).find(|file| file.exists());
            open.extend(found);
        }
    }
    Ok(())
}

fn inspect(path: &Path) -> Result<Dependencies, Fault> {
    let file = File::open(path).map_err(broken)?;
    let metadata = file.metadata().map_err(broken)?;
    if !metadata.is_file() {
        return Err(Fault::Broken("not a regular file".into()));
    }
    let len = metadata.len();
    let cache = ReadCache::new(file);
    let data = &cache;

    let ident = data.read_bytes_at(0, 20).map_err(|()| Fault::Broken(format!("only {len} bytes long")))?;
    if ident[..4] != elf::ELFMAG {
        return Err(Fault::Broken("not an ELF file".into()));
    }
    let little = cfg!(target_endian = "little");
    if ident[4] != elf::ELFCLASS64 || (ident[5] == elf::ELFDATA2LSB) != little {
        return Err(Fault::Foreign("an ELF file of another word size or byte order".into()));
    }
    let machine = u16::from_ne_bytes([ident[18], ident[19]]);
    if machine != MACHINE {
        return Err(Fault::Foreign(format!("built for ELF machine {machine}, this process needs {MACHINE}")));
    }

    let header = Header::parse(data).map_err(broken)?;
    let endian = header.endian().map_err(broken)?;
    if header.e_type(endian) != elf::ET_DYN {
        return Err(Fault::Broken("not a shared object".into()));
    }
    let segments = header.program_headers(endian, data).map_err(|_| Fault::Broken(truncated(len, None)))?;
    let mut num_loaded = 0;
    for segment in segments.iter().filter(|segment| segment.p_type(endian) == elf::PT_LOAD) {
        num_loaded += 1;
        let end = segment.p_offset(endian).checked_add(segment.p_filesz(endian));
        if end.is_none_or(|end| end > len) {
            return Err(Fault::Broken(truncated(len, end)));
        }
    }
    if num_loaded == 0 {
        return Err(Fault::Broken("no loadable segment".into()));
    }
    Ok(dependencies(path, header, endian, data).unwrap_or_default())
}

fn truncated(len: u64, end: Option<u64>) -> String {
    match end {
        Some(end) => format!("truncated: {len} bytes long, its segments need {end}"),
        None => format!("truncated: its {len} bytes end before its headers do"),
    }
}

/// DT_NEEDED and DT_RPATH or DT_RUNPATH; `None` where the section table is missing or odd, which is no fault.
fn dependencies(path: &Path, header: &Header, endian: Endianness, data: &ReadCache<File>) -> Option<Dependencies> {
    let directory = path.parent()?;
    let sections = header.sections(endian, data).ok()?;
    let (entries, strings) = sections.dynamic(endian, data).ok()??;
    let strings = sections.strings(endian, data, strings).ok()?;
    let mut found = Dependencies { needed: Vec::new(), directories: vec![directory.to_path_buf()] };
    for entry in entries {
        let Some(text) = entry.val32(endian).and_then(|offset| strings.get(offset).ok()) else { continue };
        let text = String::from_utf8_lossy(text);
        match entry.tag32(endian) {
            Some(elf::DT_NEEDED) => found.needed.push(text.into_owned()),
            Some(elf::DT_RPATH | elf::DT_RUNPATH) => {
                let origin = directory.to_string_lossy();
                let expand = |part: &str| part.replace("$ORIGIN", &origin).replace("${ORIGIN}", &origin);
                found
                    .directories
                    .extend(text.split(':').filter(|part| !part.is_empty()).map(expand).map(PathBuf::from));
            }
            _ => {}
        }
    }
    Some(found)
}

/// The names that a library defines for others. Empty where its section table is missing.
pub(super) fn exports(path: &Path) -> Result<HashSet<String>, Fault> {
    let cache = ReadCache::new(File::open(path).map_err(broken)?);
    let data = &cache;
    let header = Header::parse(data).map_err(broken)?;
    let endian = header.endian().map_err(broken)?;
    let sections = header.sections(endian, data).map_err(broken)?;
    let symbols = sections.symbols(endian, data, elf::SHT_DYNSYM).map_err(broken)?;
    let mut names = HashSet::new();
    for symbol in symbols.iter().filter(|symbol| symbol.st_shndx(endian) != elf::SHN_UNDEF) {
        if let Ok(name) = symbols.symbol_name(endian, symbol) {
            names.insert(String::from_utf8_lossy(name).into_owned());
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// A shared library that every test process has.
    fn libc_path() -> PathBuf {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let line = maps.lines().find(|line| line.contains("/libc.so") || line.contains("/libc-")).unwrap();
        PathBuf::from(line.split_whitespace().last().unwrap())
    }

    fn copy(bytes: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    #[test]
    fn a_sound_library_passes_and_names_what_it_exports() {
        check(&libc_path()).unwrap();
        check_tree(&libc_path()).unwrap();
        let names = exports(&libc_path()).unwrap();
        assert!(names.contains("malloc") && !names.contains("nixl_capi_create_agent"));
    }

    #[test]
    fn every_truncation_is_seen() {
        let whole = std::fs::read(libc_path()).unwrap();
        let header = Header::parse(&*whole).unwrap();
        let endian = header.endian().unwrap();
        let segments = header.program_headers(endian, &*whole).unwrap();
        let loads = segments.iter().filter(|segment| segment.p_type(endian) == elf::PT_LOAD);
        let end = loads.map(|segment| segment.p_offset(endian) + segment.p_filesz(endian)).max().unwrap();
        for len in [0, 1, 4, 15, 20, 63, 64, 100, 4096, 40_000, end / 2, end - 1] {
            let file = copy(&whole[..usize::try_from(len).unwrap()]);
            assert!(matches!(check(file.path()), Err(Fault::Broken(_))), "{len} bytes of {}", whole.len());
        }
        // What lies behind the last segment is never mapped.
        check(copy(&whole[..usize::try_from(end).unwrap()]).path()).unwrap();
    }

    #[test]
    fn foreign_and_false_files_are_told_apart() {
        let whole = std::fs::read(libc_path()).unwrap();
        let mut other = whole.clone();
        other[18..20].copy_from_slice(&elf::EM_S390.to_ne_bytes());
        assert!(matches!(check(copy(&other).path()), Err(Fault::Foreign(_))));
        let mut other = whole.clone();
        other[4] = elf::ELFCLASS32;
        assert!(matches!(check(copy(&other).path()), Err(Fault::Foreign(_))));
        let mut other = whole;
        other[16] = elf::ET_EXEC.to_ne_bytes()[0];
        assert!(matches!(check(copy(&other).path()), Err(Fault::Broken(_))));
        assert!(matches!(check(copy(b"#!/bin/sh\nexit 0 # more than twenty bytes").path()), Err(Fault::Broken(_))));
        assert!(matches!(check(Path::new("/nonexistent/lib.so")), Err(Fault::Broken(_))));
        assert!(matches!(check(Path::new("/")), Err(Fault::Broken(_))));
    }
}
