//! What lies outside this library in its process and must stay as it was: signal dispositions, and what is loaded.
#![allow(unsafe_code)]

use std::path::PathBuf;

/// The files mapped into this process, each once.
pub(super) fn loaded_files() -> Vec<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut files: Vec<PathBuf> = Vec::new();
    for line in maps.lines() {
        if let Some(start) = line.find('/') {
            let path = PathBuf::from(&line[start..]);
            if files.last() != Some(&path) && !files.contains(&path) {
                files.push(path);
            }
        }
    }
    files
}

/// The loaded file whose name begins with `stem`, such as `libucs`.
pub(super) fn loaded_file(stem: &str) -> Option<PathBuf> {
    let is_it =
        |name: &str| name.strip_prefix(stem).is_some_and(|rest| rest.starts_with(['.', '-']) && rest.contains(".so"));
    loaded_files().into_iter().find(|file| file.file_name().and_then(|name| name.to_str()).is_some_and(is_it))
}

/// Whether the page at an address can be written.
pub(super) fn is_writable(address: usize) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines().any(|line| {
        let mut words = line.split_whitespace();
        let range = words.next().and_then(|range| range.split_once('-'));
        let number = |text: &str| usize::from_str_radix(text, 16).unwrap_or(0);
        range.is_some_and(|(start, end)| (number(start)..number(end)).contains(&address))
            && words.next().is_some_and(|flags| flags.contains('w'))
    })
}

/// The dispositions of the signals 1 to 31. Those that changed meanwhile are put back when it is dropped: UCX takes
/// over SIGHUP as soon as it is loaded.
pub(super) struct Signals {
    saved: Vec<(i32, libc::sigaction)>,
}

impl Signals {
    /// Notes every disposition.
    pub(super) fn save() -> Self {
        Self { saved: (1..=31).filter_map(|signal| Some((signal, disposition(signal)?))).collect() }
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for (signal, before) in &self.saved {
            let changed = disposition(*signal)
                .is_some_and(|now| now.sa_sigaction != before.sa_sigaction || now.sa_flags != before.sa_flags);
            if changed {
                // SAFETY: `before` is what the kernel reported for this signal.
                unsafe { libc::sigaction(*signal, before, std::ptr::null_mut()) };
            }
        }
    }
}

fn disposition(signal: i32) -> Option<libc::sigaction> {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: a null new action only reads; `action` is valid for writes.
    let result = unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) };
    // SAFETY: zeroed bytes are a valid sigaction, and the kernel has filled them when the call succeeded.
    (result == 0).then(|| unsafe { action.assume_init() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_disposition_is_put_back() {
        let before = disposition(libc::SIGUSR2).unwrap().sa_sigaction;
        let signals = Signals::save();
        // SAFETY: SIG_IGN is a valid disposition, and nothing here sends SIGUSR2.
        unsafe { libc::signal(libc::SIGUSR2, libc::SIG_IGN) };
        assert_ne!(disposition(libc::SIGUSR2).unwrap().sa_sigaction, before);
        drop(signals);
        assert_eq!(disposition(libc::SIGUSR2).unwrap().sa_sigaction, before);
    }

    #[test]
    fn writable_pages_are_told_from_others() {
        let here = 0u8;
        assert!(is_writable(std::ptr::from_ref(&here) as usize));
        assert!(!is_writable(is_writable as fn(usize) -> bool as usize));
        assert!(!is_writable(0));
    }

    #[test]
    fn loaded_files_are_found_by_their_stem() {
        assert!(loaded_file("libc").is_some());
        assert!(loaded_file("lib").is_none());
        assert!(loaded_file("libnosuch").is_none());
    }
}
