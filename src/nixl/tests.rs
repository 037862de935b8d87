//! Against the real NIXL, which must be there. Each scenario runs in a process of its own: the library, its plugins,
//! UCX's log and the environment belong to the process.
#![allow(unsafe_code)]

use std::io::Read;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::*;
use crate::error::*;

const SCENARIO: &str = "NIXLKV_TEST_SCENARIO";

/// The library under test; there is no skipping without it. Never loads it: that is for the scenarios' processes.
fn nixl_library() -> String {
    let named = std::env::var("NIXLKV_TEST_NIXL_LIBRARY").or_else(|_| std::env::var("NIXLKV_NIXL_LIBRARY"));
    named.expect("NIXLKV_TEST_NIXL_LIBRARY or NIXLKV_NIXL_LIBRARY names libnixl_capi.so")
}

/// Runs this test again, alone in a process with these variables. Its body is `scenario`; nothing of it may reach
/// stdout or stderr.
fn in_process(name: &str, variables: &[(&str, &str)], scenario: impl FnOnce()) {
    if std::env::var(SCENARIO).is_ok_and(|running| running == name) {
        let quiet = Quiet::begin();
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(scenario));
        let printed = quiet.end();
        if let Err(panic) = result {
            eprintln!("{printed}");
            std::panic::resume_unwind(panic);
        }
        assert_eq!(printed, "", "printed by NIXL or UCX");
        return;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &format!("nixl::tests::{name}"), "--nocapture", "--test-threads=1"]);
    for ambient in ["UCX_TLS", "UCX_NET_DEVICES", "NIXL_PLUGIN_DIR", "NIXL_LOG_LEVEL"] {
        command.env_remove(ambient);
    }
    command.env("NIXLKV_TEST_NIXL_LIBRARY", nixl_library()).env_remove("NIXLKV_NIXL_LIBRARY").env(SCENARIO, name);
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{name}: {}\n{text}", output.status);
}

/// Sends the process's stdout and stderr to a file.
struct Quiet {
    file: tempfile::NamedTempFile,
    saved: [i32; 2],
}

impl Quiet {
    fn begin() -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        // SAFETY: plain descriptor calls on descriptors that exist.
        let saved = [1, 2].map(|fd| unsafe {
            let saved = libc::dup(fd);
            libc::dup2(file.as_raw_fd(), fd);
            saved
        });
        Self { file, saved }
    }

    fn end(self) -> String {
        for (fd, saved) in [1, 2].into_iter().zip(self.saved) {
            // SAFETY: `saved` came from dup.
            unsafe { libc::dup2(saved, fd) };
        }
        let mut text = String::new();
        std::fs::File::open(self.file.path()).unwrap().read_to_string(&mut text).unwrap();
        text
    }
}

fn library() -> Arc<Library> {
    find_library(Some(&nixl_library())).unwrap()
}

fn options(name: &str, params: &[(&str, &str)]) -> AgentOptions {
    let params = params.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
    AgentOptions { name: name.into(), backend: "UCX".into(), params }
}

fn block(memory: &[u8]) -> Block {
    Block { address: memory.as_ptr() as u64, len: memory.len() as u64, kind: MemoryKind::Dram, device: 0 }
}

fn span(source: &[u8], destination: &[u8]) -> Span {
    let (source, len) = (source.as_ptr() as u64, source.len() as u64);
    Span { source, source_device: 0, destination: destination.as_ptr() as u64, destination_device: 0, len }
}

fn received(agent: &dyn Agent) -> Vec<(String, Vec<u8>)> {
    let mut all = Vec::new();
    agent.notifications(&mut |name, bytes| all.push((name.to_string(), bytes.to_vec()))).unwrap();
    all
}

/// Polls both agents until `from` reports the end and `to` has got a message.
fn settle(from: &dyn Agent, to: &dyn Agent, posted: Posted) -> (TransferStatus, Vec<(String, Vec<u8>)>) {
    let end = Instant::now() + Duration::from_secs(20);
    let mut transfer = match posted {
        Posted::Done => None,
        Posted::Pending(transfer) => Some(transfer),
    };
    let mut status = if transfer.is_some() { TransferStatus::InProgress } else { TransferStatus::Done };
    let mut messages = Vec::new();
    while Instant::now() < end && (status == TransferStatus::InProgress || messages.is_empty()) {
        if let Some(transfer) = &mut transfer {
            status = transfer.status();
        }
        assert!(received(from).is_empty());
        messages.extend(received(to));
    }
    (status, messages)
}

fn write<'a>(peer: &'a str, spans: &'a [Span], notification: &'a [u8]) -> Write<'a> {
    Write { peer, source_kind: MemoryKind::Dram, destination_kind: MemoryKind::Dram, spans, notification }
}

/// Two fresh agents move 64 KiB with a message.
fn moves_bytes(tag: &str, params: &[(&str, &str)]) {
    let library = library();
    let (a, b) = (format!("{tag}-a"), format!("{tag}-b"));
    let source = open(&library, &options(&a, params)).unwrap();
    let sink = open(&library, &options(&b, params)).unwrap();
    let from: Vec<u8> = (0..65536u32).map(|i| (i * 7 + i / 256) as u8).collect();
    let to = vec![0xA5u8; from.len()];
    let token = source.register(&block(&from)).unwrap();
    let sink_token = sink.register(&block(&to)).unwrap();
    assert_eq!(source.load_metadata(&sink.local_metadata().unwrap()).unwrap(), b);
    assert_eq!(sink.load_metadata(&source.local_metadata().unwrap()).unwrap(), a);

    // Uneven pieces, some of them out of order.
    let cuts = [(8192, 65536), (0, 1), (1, 4096), (4096, 8192)];
    let spans: Vec<Span> = cuts.iter().map(|&(start, end)| span(&from[start..end], &to[start..end])).collect();
    let message = b"landed\0\xff";
    let posted = source.write(&write(&b, &spans, message)).unwrap();
    let (status, messages) = settle(&*source, &*sink, posted);
    assert_eq!(status, TransferStatus::Done);
    assert_eq!(messages, [(a.clone(), message.to_vec())]);
    // SAFETY: reads memory that another owner writes; volatile so that the compiler can't know it unchanged.
    let seen: Vec<u8> = (0..to.len()).map(|i| unsafe { to.as_ptr().add(i).read_volatile() }).collect();
    assert!(seen == from, "wrong bytes");

    sink.notify(&a, b"").unwrap();
    sink.notify(&a, &[0, 255, 7]).unwrap();
    let end = Instant::now() + Duration::from_secs(10);
    let mut got = Vec::new();
    while got.len() < 2 && Instant::now() < end {
        received(&*sink);
        got.extend(received(&*source));
    }
    assert_eq!(got, [(b.clone(), vec![]), (b.clone(), vec![0, 255, 7])]);

    assert!(source.plugins().iter().any(|plugin| plugin == "UCX"));
    assert!(!source.backend_params().is_empty());
    source.forget(&b).unwrap();
    assert_eq!(source.forget(&b).unwrap_err().status, FailureStatus::NotFound);
    let Err(gone) = source.write(&write(&b, &spans, b"x")) else { panic!("wrote to a forgotten peer") };
    assert_eq!(gone.status, FailureStatus::NotFound);
    source.deregister(token).unwrap();
    assert_eq!(source.deregister(token).unwrap_err().status, FailureStatus::NotFound);
    sink.deregister(sink_token).unwrap();
}

#[test]
fn bytes_and_a_message_arrive() {
    in_process("bytes_and_a_message_arrive", &[], || {
        moves_bytes("one", &[]);
        moves_bytes("two", &[]);
    });
}

#[test]
fn ucx_settings_take_effect_commas_and_all() {
    in_process("ucx_settings_take_effect_commas_and_all", &[], || {
        moves_bytes("tcp", &[("UCX_TLS", "tcp,self")]);
        // Without tcp there is no backend: cut at its first comma, this list would be refused.
        moves_bytes("posix-tcp", &[("UCX_TLS", "posix,tcp,self")]);
        refused_with(&[("UCX_TLS", "posix")], NIXL_ERR_BACKEND_FAILED, &["UCX"]);
        refused_with(&[("UCX_TLS", "posix,self")], NIXL_ERR_BACKEND_FAILED, &["UCX"]);
        let error = refused_with(&[("UCX_NET_DEVICES", "nosuch1,nosuch2")], NIXL_ERR_BACKEND_FAILED, &["nosuch1"]);
        assert!(error.text.contains("nosuch2"), "{error}");
        refused_with(&[("UCX_NO_SUCH_SETTING", "1")], NIXL_ERR_BACKEND_FAILED, &["UCX_NO_SUCH_SETTING=1"]);
        refused_with(&[("UCX_MAX_RMA_RAILS", "many")], NIXL_ERR_BACKEND_FAILED, &["UCX_MAX_RMA_RAILS=many"]);
        let agent = open(&library(), &options("report", &[("UCX_TLS", "tcp,self")])).unwrap();
        let expected = ("UCX_TLS".to_string(), "tcp,self".to_string());
        assert!(agent.backend_params().contains(&expected), "{:?}", agent.backend_params());
        moves_bytes("default", &[]);
    });
}

#[test]
fn the_library_is_found_in_a_virtual_environment_once_nothing_else_is_named() {
    let name = "the_library_is_found_in_a_virtual_environment_once_nothing_else_is_named";
    let real = PathBuf::from(nixl_library());
    let wheel = real.parent().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let packages = folder.path().join("venv/lib/python3.11/site-packages");
    std::fs::create_dir_all(&packages).unwrap();
    std::os::unix::fs::symlink(wheel, packages.join(".nixl_cu12.mesonpy.libs")).unwrap();
    // The C API's library whole, the one under it cut in half.
    let cut = folder.path().join("cut");
    std::fs::create_dir(&cut).unwrap();
    std::fs::copy(&real, cut.join("libnixl_capi.so")).unwrap();
    let bytes = std::fs::read(real.with_file_name("libnixl.so")).unwrap();
    std::fs::write(cut.join("libnixl.so"), &bytes[..bytes.len() / 2]).unwrap();

    let variables = [
        ("VIRTUAL_ENV", folder.path().join("venv")),
        ("NIXLKV_NIXL_LIBRARY", folder.path().join("absent.so")),
        ("CUT", cut.join("libnixl_capi.so")),
    ];
    let variables: Vec<_> = variables.iter().map(|(key, path)| (*key, path.to_str().unwrap())).collect();
    in_process(name, &variables, || {
        let error = find_library(None).unwrap_err();
        assert_eq!(error.code, NIXL_ERR_LIBRARY_NOT_FOUND);
        assert!(error.text.contains("absent.so"), "{error}");
        let error = find_library(Some(&std::env::var("CUT").unwrap())).unwrap_err();
        assert_eq!(error.code, NIXL_ERR_LIBRARY_INVALID);
        assert!(error.text.contains("libnixl.so") && error.text.contains("truncated"), "{error}");
        // SAFETY: no other thread of this process reads the environment now.
        unsafe { std::env::remove_var("NIXLKV_NIXL_LIBRARY") };
        let found = find_library(None).unwrap();
        let venv = std::env::var("VIRTUAL_ENV").unwrap();
        assert!(found.path().starts_with(&venv), "{found:?}");
        // The same file by another name is the same library; another file is refused.
        assert!(Arc::ptr_eq(&find_library(Some(&nixl_library())).unwrap(), &found));
        let error = find_library(Some(&std::env::var("CUT").unwrap())).unwrap_err();
        assert_eq!(error.code, NIXL_ERR_LIBRARY_INVALID);
        assert!(error.text.contains("/cut/") && error.text.contains(&venv), "{error}");
        moves_bytes("found", &[]);
    });
}

fn refused_with(params: &[(&str, &str)], code: i32, words: &[&str]) -> Error {
    let error = open(&library(), &options("refused", params)).err().unwrap();
    assert_eq!(error.code, code, "{error}");
    for word in words {
        assert!(error.text.contains(word), "{word}: {error}");
    }
    error
}

/// What the `log` crate was given.
struct Lines(std::sync::Mutex<Vec<String>>);

static LINES: Lines = Lines(std::sync::Mutex::new(Vec::new()));

impl log::Log for Lines {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if record.target() == "nixlkv::ucx" {
            self.0.lock().unwrap().push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

#[test]
fn a_backend_that_cannot_start_is_an_error_and_leaves_the_process_well() {
    let name = "a_backend_that_cannot_start_is_an_error_and_leaves_the_process_well";
    in_process(name, &[("UCX_NET_DEVICES", "nosuch0")], || {
        log::set_logger(&LINES).unwrap();
        log::set_max_level(log::LevelFilter::Warn);
        refused_with(&[], NIXL_ERR_BACKEND_FAILED, &["UCX", "nosuch0"]);
        assert!(LINES.0.lock().unwrap().iter().any(|line| line.contains("nosuch0")), "UCX's lines come to the log");
        // SAFETY: no other thread of this process reads the environment now.
        unsafe { std::env::remove_var("UCX_NET_DEVICES") };
        moves_bytes("after-device", &[]);
        // SAFETY: as above.
        unsafe { std::env::set_var("UCX_TLS", "posix,self") };
        refused_with(&[], NIXL_ERR_BACKEND_FAILED, &["UCX"]);
        // SAFETY: as above.
        unsafe { std::env::remove_var("UCX_TLS") };
        moves_bytes("after-tls", &[]);
    });
}

#[test]
fn a_missing_or_bad_plugin_is_an_error_until_it_is_mended() {
    let name = "a_missing_or_bad_plugin_is_an_error_until_it_is_mended";
    let folder = tempfile::tempdir().unwrap();
    in_process(name, &[("NIXL_PLUGIN_DIR", folder.path().to_str().unwrap())], || {
        let folder = PathBuf::from(std::env::var("NIXL_PLUGIN_DIR").unwrap());
        refused_with(&[], NIXL_ERR_PLUGIN_NOT_FOUND, &["libplugin_UCX.so", folder.to_str().unwrap()]);
        let file = folder.join("libplugin_UCX.so");
        let real = Path::new(&nixl_library()).with_file_name("plugins").join("libplugin_UCX.so");
        let mut bytes = std::fs::read(&real).unwrap();
        std::fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
        refused_with(&[], NIXL_ERR_PLUGIN_INVALID, &["truncated", file.to_str().unwrap()]);
        bytes[18] ^= 0x80;
        std::fs::write(&file, &bytes).unwrap();
        refused_with(&[], NIXL_ERR_PLUGIN_INVALID, &["machine", file.to_str().unwrap()]);
        // SAFETY: no other thread of this process reads the environment now.
        unsafe { std::env::remove_var("NIXL_PLUGIN_DIR") };
        moves_bytes("mended", &[]);
    });
}

#[test]
fn signals_and_environment_stay_as_they_were() {
    in_process("signals_and_environment_stay_as_they_were", &[], || {
        let signals = || -> Vec<(usize, i32)> {
            let read = |signal| {
                let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
                // SAFETY: only reads the disposition; zeroed bytes are a valid sigaction.
                let action = unsafe {
                    libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
                    action.assume_init()
                };
                // glibc's own flag, which it adds whenever a disposition is set.
                const SA_RESTORER: i32 = 0x0400_0000;
                (action.sa_sigaction, action.sa_flags & !SA_RESTORER)
            };
            (1..=31).map(read).collect()
        };
        let variables = || -> Vec<_> { std::env::vars_os().collect() };
        let before = (signals(), variables());
        let agent = open(&library(), &options("guest", &[])).unwrap();
        assert_eq!((signals(), variables()), before);
        drop(agent);
        assert_eq!((signals(), variables()), before);
    });
}

/// A peer that a test writes to.
struct Target {
    agent: Arc<dyn Agent>,
    name: String,
    memory: Vec<u8>,
}

impl Target {
    fn open(name: &str, len: usize) -> Self {
        let agent = open(&library(), &options(name, &[("UCX_TLS", "tcp,self")])).unwrap();
        Self { agent, name: name.into(), memory: vec![0xA5; len] }
    }

    fn register(&self, start: usize, end: usize) -> u64 {
        self.agent.register(&block(&self.memory[start..end])).unwrap()
    }

    fn metadata(&self) -> Vec<u8> {
        self.agent.local_metadata().unwrap()
    }

    /// Writes a stamp into a range and checks that it and its message arrive.
    fn takes(&self, from: &dyn Agent, source: &mut [u8], start: usize, end: usize, stamp: u8) {
        source[..end - start].fill(stamp);
        let spans = [span(&source[..end - start], &self.memory[start..end])];
        let posted = from.write(&write(&self.name, &spans, &[stamp])).unwrap();
        let (status, messages) = settle(from, &*self.agent, posted);
        assert_eq!(status, TransferStatus::Done);
        assert_eq!(messages.len(), 1);
        assert_eq!(messages[0].1, [stamp]);
        // SAFETY: reads memory that another owner writes; volatile so that the compiler can't know it unchanged.
        assert!((start..end).all(|i| unsafe { self.memory.as_ptr().add(i).read_volatile() } == stamp));
    }
}

#[test]
fn metadata_grows_changes_and_is_refused_while_transfers_move() {
    in_process("metadata_grows_changes_and_is_refused_while_transfers_move", &[], || {
        const MIB: usize = 1 << 20;
        let from = open(&library(), &options("s", &[("UCX_TLS", "tcp,self")])).unwrap();
        let mut source = vec![0u8; 64 * MIB];
        from.register(&block(&source)).unwrap();
        let to = Target::open("r", 65 * MIB);
        let first = to.register(0, 64 * MIB);
        let early = to.metadata();
        assert_eq!(from.load_metadata(&early).unwrap(), "r");
        assert_eq!(from.load_metadata(&early).unwrap(), "r");
        to.takes(&*from, &mut source, 0, 4096, 1);

        // More memory, while a transfer to the peer is in flight.
        let spans = [span(&source, &to.memory[..64 * MIB])];
        let big = from.write(&write("r", &spans, b"big")).unwrap();
        assert!(matches!(big, Posted::Pending(_)));
        let second = to.register(64 * MIB, 65 * MIB);
        let grown = to.metadata();
        from.load_metadata(&grown).unwrap();
        assert_eq!(settle(&*from, &*to.agent, big).0, TransferStatus::Done);
        to.takes(&*from, &mut source, 64 * MIB, 65 * MIB, 2);

        // Less memory: a changed peer. Not while something moves.
        let big = from.write(&write("r", &spans, b"big")).unwrap();
        assert!(matches!(big, Posted::Pending(_)));
        for refused in [from.load_metadata(&early).unwrap_err(), from.forget("r").unwrap_err()] {
            assert!(refused.status == FailureStatus::Other && refused.text.contains("1 transfers"), "{refused}");
        }
        assert_eq!(settle(&*from, &*to.agent, big).0, TransferStatus::Done);
        to.agent.deregister(second).unwrap();
        from.load_metadata(&to.metadata()).unwrap();
        to.takes(&*from, &mut source, 0, 4096, 3);

        // The same address registered anew with another length.
        to.agent.deregister(first).unwrap();
        to.register(0, 32 * MIB);
        from.load_metadata(&to.metadata()).unwrap();
        to.takes(&*from, &mut source, 32 * MIB - 4096, 32 * MIB, 4);
        let outside = [span(&source[..4096], &to.memory[32 * MIB..32 * MIB + 4096])];
        assert!(from.write(&write("r", &outside, b"")).is_err());

        // Another life of the same name.
        drop(to);
        let to = Target::open("r", MIB);
        to.register(0, MIB);
        from.load_metadata(&to.metadata()).unwrap();
        to.takes(&*from, &mut source, 0, MIB, 5);
    });
}

#[test]
fn hostile_input_is_refused() {
    in_process("hostile_input_is_refused", &[], || {
        let from = open(&library(), &options("s", &[])).unwrap();
        let to = Target::open("r", 8192);
        to.register(0, 8192);
        let metadata = to.metadata();
        let source = vec![9u8; 8192];
        from.register(&block(&source)).unwrap();
        for len in 0..metadata.len() {
            assert!(from.load_metadata(&metadata[..len]).is_err(), "{len} bytes");
        }
        let mut alien = metadata.clone();
        let name = alien.windows(5).position(|window| window == b"Agent").unwrap() + 5 + 8;
        alien[name] = 0xFF;
        assert_eq!(from.load_metadata(&alien).unwrap_err().status, FailureStatus::InvalidParam);
        assert_eq!(
            from.load_metadata(&from.local_metadata().unwrap()).unwrap_err().status,
            FailureStatus::InvalidParam
        );

        from.load_metadata(&metadata).unwrap();
        let good = span(&source, &to.memory);
        let bad = [
            Span { len: 0, ..good },
            Span { destination: u64::MAX - 2047, len: 4096, ..good },
            Span { len: u64::MAX - 4095, ..good },
            Span { len: 8193, ..good },
            Span { source: good.source + 1, ..good },
            Span { destination: good.destination + 1, ..good },
        ];
        for span in bad {
            assert!(from.write(&write("r", &[good, span], b"")).is_err(), "{span:?}");
        }
        assert!(from.write(&write("r", &[], b"")).is_err());
        assert!(from.write(&write("nobody", &[good], b"")).is_err());
        assert!(from.notify("nobody", b"").is_err());
        assert!(from.notify("no\0body", b"").is_err());

        // Larger than any message of ours: cut, so that it can be counted, and the ones around it come through.
        from.notify("r", b"before").unwrap();
        from.notify("r", &vec![1; 65_537]).unwrap();
        from.notify("r", &vec![2; 65_536]).unwrap();
        let end = Instant::now() + Duration::from_secs(10);
        let mut got = Vec::new();
        while got.len() < 3 && Instant::now() < end {
            received(&*from);
            got.extend(received(&*to.agent));
        }
        let sent = [b"before".to_vec(), vec![1; 65_536], vec![2; 65_536]];
        assert!(got.iter().map(|(from, bytes)| (from.as_str(), bytes)).eq(sent.iter().map(|bytes| ("s", bytes))));
    });
}

/// The stubs abort when a function is missing, so [`library::SYMBOLS`] must hold all that this crate can reach. The
/// linker drops the others from this very program.
#[test]
fn every_function_that_the_linker_kept_is_checked_for() {
    use object::{Object, ObjectSymbol};
    let bytes = std::fs::read("/proc/self/exe").unwrap();
    let program = object::File::parse(&*bytes).unwrap();
    let mut kept: Vec<&str> =
        program.symbols().filter(|symbol| symbol.is_definition()).filter_map(|symbol| symbol.name().ok()).collect();
    kept.retain(|name| name.starts_with("nixl_capi_"));
    kept.sort();
    assert!(kept.contains(&"nixl_capi_create_xfer_req"), "this program has no symbol table");
    let missing: Vec<_> = kept.iter().filter(|name| !library::SYMBOLS.contains(name)).collect();
    assert!(missing.is_empty(), "not checked for: {missing:?}");
}

#[test]
fn threads_share_an_agent() {
    in_process("threads_share_an_agent", &[], || {
        const THREADS: usize = 4;
        const LEN: usize = 64 << 10;
        let from = open(&library(), &options("s", &[("UCX_TLS", "tcp,self")])).unwrap();
        let to = Target::open("r", THREADS * LEN);
        to.register(0, THREADS * LEN);
        from.load_metadata(&to.metadata()).unwrap();
        let source: Vec<u8> = (0..THREADS * LEN).map(|i| (i / LEN) as u8 + 1).collect();
        from.register(&block(&source)).unwrap();
        let rounds = 200;
        let mut got = 0;
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS)
                .map(|i| {
                    let (from, source, memory) = (&from, &source, &to.memory);
                    scope.spawn(move || {
                        let range = i * LEN..(i + 1) * LEN;
                        let spans = [span(&source[range.clone()], &memory[range])];
                        for _ in 0..rounds {
                            from.notify("r", b"n").unwrap();
                            let Posted::Pending(mut transfer) = from.write(&write("r", &spans, b"w")).unwrap() else {
                                continue;
                            };
                            while transfer.status() == TransferStatus::InProgress {
                                std::thread::yield_now();
                            }
                            assert_eq!(transfer.status(), TransferStatus::Done);
                            received(&**from);
                        }
                    })
                })
                .collect();
            let end = Instant::now() + Duration::from_secs(30);
            while got < 2 * THREADS * rounds && Instant::now() < end {
                got += received(&*to.agent).len();
                // A thread that failed posts no more.
                if threads.iter().all(|thread| thread.is_finished()) {
                    received(&*from);
                }
            }
        });
        assert_eq!(got, 2 * THREADS * rounds);
        // SAFETY: reads memory that another owner writes; volatile so that the compiler can't know it unchanged.
        assert!((0..source.len()).all(|i| unsafe { to.memory.as_ptr().add(i).read_volatile() } == source[i]));
    });
}
