//! The tools that look over the C programs' shoulders: how a program is compiled, linked and started under each.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::root;

/// What the programs run under: `NIXLKV_TEST_UNDER`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Under {
    Nothing,
    /// AddressSanitizer, with its leak checker, and UBSan. They see the library's own accesses too where the library has
    /// been built for it, otherwise what it hands to libc.
    Asan,
    /// ThreadSanitizer. The library must have been built for it.
    Tsan,
    /// Valgrind's memcheck.
    Valgrind,
}

impl Under {
    pub fn from_env() -> Result<Self, String> {
        match std::env::var("NIXLKV_TEST_UNDER").as_deref() {
            Err(_) | Ok("") => Ok(Self::Nothing),
            Ok("asan") => Ok(Self::Asan),
            Ok("tsan") => Ok(Self::Tsan),
            Ok("valgrind") => Ok(Self::Valgrind),
            Ok(other) => Err(format!("NIXLKV_TEST_UNDER={other}: not asan, tsan or valgrind")),
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Asan => "asan",
            Self::Tsan => "tsan",
            Self::Valgrind => "valgrind",
        }
    }

    /// By how much a program's time limits grow.
    pub fn slowdown(self) -> u32 {
        match self {
            Self::Nothing => 1,
            Self::Asan => 3,
            Self::Tsan => 5,
            Self::Valgrind => 10,
        }
    }

    pub fn compiler_flags(self) -> &'static [&'static str] {
        match self {
            Self::Nothing | Self::Valgrind => &[],
            Self::Asan => &["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"],
            Self::Tsan => &["-fsanitize=thread"],
        }
    }

    pub fn linker_flags(self) -> Result<Vec<String>, String> {
        let flags = match self {
            Self::Nothing | Self::Valgrind => Vec::new(),
            Self::Asan => vec!["-fsanitize=address,undefined".to_owned()],
            // The C compiler's own runtime is older than what rustc's code calls; rustc's serves both.
            Self::Tsan => {
                let runtime = tsan_runtime()?.display().to_string();
                let around = ["-Wl,--whole-archive", &runtime, "-Wl,--no-whole-archive", "-Wl,--export-dynamic"];
                around.into_iter().chain(["-ldl", "-lrt", "-lresolv", "-lm", "-lgcc_s"]).map(str::to_owned).collect()
            }
        };
        Ok(flags)
    }

    /// The program, started so that each of its processes writes what the tool has to say into a file in `reports`.
    pub fn command(self, program: &Path, reports: &Path, leaks: bool) -> Command {
        let report = reports.join("report").display().to_string();
        let file = |name: &str| root().join("tests/sanitizers").join(name).display().to_string();
        let mut command = Command::new(program);
        match self {
            Self::Nothing => return command,
            Self::Asan => {
                command
                    .env("ASAN_OPTIONS", format!("log_path={report}:detect_leaks={}:exitcode=98", u32::from(leaks)))
                    .env("UBSAN_OPTIONS", format!("log_path={report}:print_stacktrace=1"))
                    .env("LSAN_OPTIONS", format!("suppressions={}:print_suppressions=0", file("lsan.supp")));
            }
            Self::Tsan => {
                let options = "second_deadlock_stack=1:history_size=4:ignore_noninstrumented_modules=1:exitcode=98";
                command.env("TSAN_OPTIONS", format!("log_path={report}:suppressions={}:{options}", file("tsan.supp")));
            }
            Self::Valgrind => {
                command = Command::new("valgrind");
                command
                    .args(["-q", "--error-exitcode=98", "--trace-children=yes", "--fair-sched=yes", "--num-callers=30"])
                    .args([
                        if leaks { "--leak-check=full" } else { "--leak-check=no" },
                        "--show-leak-kinds=definite",
                        "--errors-for-leak-kinds=definite",
                    ])
                    // Not the shell and the compiler that some programs start.
                    .arg("--trace-children-skip=/bin/*,/usr/*")
                    .arg(format!("--log-file={report}.%p"))
                    .arg(format!("--suppressions={}", file("valgrind.supp")))
                    .arg(program);
            }
        }
        command.env("NIXLKV_TEST_SLOWDOWN", self.slowdown().to_string());
        command
    }

    /// The programs that this tool can't run, and those in whose processes it must not look for leaks.
    pub fn left_out(self) -> Result<(Vec<String>, Vec<String>), String> {
        Ok((listed(self.name())?, listed("leaks")?))
    }
}

/// The programs of one tool in `tests/sanitizers/left_out`: lines of tool, program and reason.
fn listed(tool: &str) -> Result<Vec<String>, String> {
    let path = root().join("tests/sanitizers/left_out");
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let mut names = Vec::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let mut words = line.split_whitespace();
        match (words.next(), words.next(), words.next()) {
            (Some(of @ ("asan" | "leaks" | "tsan" | "valgrind")), Some(program), Some(_reason)) => {
                if !root().join(format!("tests/c/{program}.c")).exists() {
                    return Err(format!("{}: there is no program {program}", path.display()));
                }
                if of == tool {
                    names.push(program.to_owned());
                }
            }
            _ => return Err(format!("{}: not a tool, a program and a reason: {line}", path.display())),
        }
    }
    Ok(names)
}

/// Whether the library's own accesses are checked.
pub fn built_for_asan(libraries: &Path) -> bool {
    let library = std::fs::read(libraries.join("libnixlkv.so")).unwrap_or_default();
    library.windows(b"__asan_init".len()).any(|bytes| bytes == b"__asan_init")
}

/// What the tool's files say.
pub fn read_reports(reports: &Path) -> Result<String, String> {
    let mut text = String::new();
    for entry in std::fs::read_dir(reports).map_err(|e| e.to_string())? {
        let path = entry.map_err(|e| e.to_string())?.path();
        text += &String::from_utf8_lossy(&std::fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?);
    }
    Ok(text)
}

/// The archive in the toolchain that built this.
fn tsan_runtime() -> Result<PathBuf, String> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc).args(["--print", "target-libdir"]).output().map_err(|e| format!("rustc: {e}"))?;
    let folder = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    let entries = std::fs::read_dir(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.to_string_lossy().ends_with("_rt.tsan.a"))
        .ok_or_else(|| format!("no ThreadSanitizer runtime in {}", folder.display()))
}
