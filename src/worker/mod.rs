//! The transfer threads: thread 0 also carries the control messages and watches the time limits.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::engine::Shared;

mod control;
mod transfer;

use control::Control;
use transfer::Transfers;

/// How a thread waits when it finds nothing to do: it yields, then sleeps longer and longer, up to a bound that
/// depends on whether somebody waits for it.
struct Backoff {
    idle_rounds: u32,
}

/// Rounds without work that only yield. A transfer in progress needs its thread to drive NIXL's progress.
const YIELDS: u32 = 50;
/// The shortest sleep.
const MIN_SLEEP_US: u64 = 20;
/// The longest sleep while a transfer is in progress, a room waits, or nothing is open.
const MAX_SLEEP_US: [u64; 3] = [50, 200, 1000];

impl Backoff {
    fn wait(&mut self, class: usize) {
        self.idle_rounds = self.idle_rounds.saturating_add(1);
        if self.idle_rounds <= YIELDS {
            std::thread::yield_now();
            return;
        }
        let doublings = ((self.idle_rounds - YIELDS) / 16).min(8);
        let sleep = (MIN_SLEEP_US << doublings).min(MAX_SLEEP_US[class]);
        std::thread::park_timeout(Duration::from_micros(sleep));
    }
}

/// The body of transfer thread `index`. Returns when the engine stops.
pub fn run(shared: &Arc<Shared>, index: usize) {
    precise_sleep();
    let mut control = (index == 0).then(|| Control::new(shared.clone()));
    let mut transfers = Transfers::new(shared.clone(), index);
    let mut backoff = Backoff { idle_rounds: 0 };
    loop {
        // Read before the work: what was queued before the stop is still sent.
        let stop = shared.stop.load(Ordering::Acquire);
        let round = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let busy = control.as_mut().is_some_and(Control::step);
            busy | transfers.step()
        }));
        let busy = round.unwrap_or_else(|_| {
            // The panic hook has logged it. One bad round must not end the thread that all rooms depend on.
            std::thread::sleep(Duration::from_millis(10));
            false
        });
        if stop && !busy {
            break;
        }
        if busy {
            backoff.idle_rounds = 0;
            continue;
        }
        let class = if transfers.in_flight() {
            0
        } else if shared.tables().num_active > 0 {
            1
        } else {
            2
        };
        backoff.wait(class);
    }
    transfers.finish();
    if let Some(control) = control {
        control.finish();
    }
}

/// Asks the kernel for sleeps that end when they should: its default slack of 50 us is as long as our sleeps.
fn precise_sleep() {
    // SAFETY: changes only this thread's timer slack, in nanoseconds.
    #[allow(unsafe_code)]
    unsafe {
        libc::prctl(libc::PR_SET_TIMERSLACK, 1000 as libc::c_ulong, 0, 0, 0);
    }
}
