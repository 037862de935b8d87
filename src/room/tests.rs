//! A sender's and receivers' machines against each other over a simulated network: control messages are delayed and
//! reordered between peers, data lands at random moments, and either side gives up at random.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use proptest::prelude::*;

use super::*;
use crate::error::*;

/// A small deterministic generator: the whole run follows from its seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % sides
    }
}

const ROOM: u64 = 7;
/// The receiver is peer 100 to the senders; senders are peers 0.. to the receiver.
const RECEIVER: PeerId = 100;

struct InFlight {
    sender: usize,
    job: Job,
}

/// One receiver, several senders, one room.
struct World {
    dice: Dice,
    receiver: Receiver,
    senders: Vec<Sender>,
    /// Messages on their way, in order for each direction of each pair.
    to_sender: Vec<VecDeque<Message>>,
    to_receiver: Vec<VecDeque<Message>>,
    in_flight: Vec<InFlight>,
    /// (sender, page position) that has landed, how often.
    landed: Vec<Vec<u32>>,
    now: Millis,
}

impl World {
    fn new(seed: u64, num_senders: usize, num_pages: usize) -> Self {
        let mut out = Vec::new();
        let expectations = (0..num_senders)
            .map(|i| Expectation {
                peer: i as PeerId,
                ready: true,
                grant: Arc::new(GrantBody {
                    pages: (0..num_pages as i32).collect(),
                    aux: Some(3),
                    aux_owner: i == 0,
                    states: vec![],
                    num_receivers: 1,
                }),
                num_state_groups: 0,
            })
            .collect();
        let receiver = Receiver::new(ROOM, 42, expectations, 1_000_000, 1_000_000, 0, &mut out);
        let limits = SenderLimits { grant_timeout: 1_000_000, room_timeout: 1_000_000, has_aux: true };
        let mut world = Self {
            dice: Dice(seed),
            receiver,
            senders: (0..num_senders).map(|_| Sender::new(ROOM, limits, 0)).collect(),
            to_sender: (0..num_senders).map(|_| VecDeque::new()).collect(),
            to_receiver: (0..num_senders).map(|_| VecDeque::new()).collect(),
            in_flight: Vec::new(),
            landed: vec![vec![0; num_pages]; num_senders],
            now: 0,
        };
        world.carry_out_receiver(out);
        world
    }

    fn carry_out_receiver(&mut self, out: Vec<Action>) {
        for action in out {
            match action {
                Action::Tell(peer, message) => self.to_sender[peer as usize].push_back(message),
                Action::Grant { peer, room, generation, body } => {
                    for message in crate::protocol::split_grant(room, generation, 1, &body) {
                        self.to_sender[peer as usize].push_back(message);
                    }
                }
                Action::Transfer(_) => panic!("a receiver sends no chunks"),
            }
        }
    }

    fn carry_out_sender(&mut self, sender: usize, out: Vec<Action>) {
        for action in out {
            match action {
                Action::Tell(peer, message) => {
                    assert_eq!(peer, RECEIVER);
                    self.to_receiver[sender].push_back(message);
                }
                Action::Transfer(job) => self.in_flight.push(InFlight { sender, job }),
                Action::Grant { .. } => panic!("a sender grants nothing"),
            }
        }
    }

    /// Lets one message, or one transfer, or nothing, happen. False: everything is quiet.
    fn step(&mut self) -> bool {
        self.now += 1;
        let mut choices: Vec<(u8, usize)> = Vec::new();
        choices.extend((0..self.in_flight.len()).map(|i| (0, i)));
        choices.extend((0..self.senders.len()).filter(|&i| !self.to_sender[i].is_empty()).map(|i| (1, i)));
        choices.extend((0..self.senders.len()).filter(|&i| !self.to_receiver[i].is_empty()).map(|i| (2, i)));
        if choices.is_empty() {
            return false;
        }
        match choices[self.dice.roll(choices.len() as u64) as usize] {
            (0, i) => self.settle(i),
            (1, i) => self.deliver_to_sender(i),
            (_, i) => self.deliver_to_receiver(i),
        }
        true
    }

    /// A transfer ends: cancelled before it was posted, or landed with its notification behind it.
    fn settle(&mut self, i: usize) {
        let InFlight { sender, job } = self.in_flight.swap_remove(i);
        let cancelled = job.cancelled.load(Ordering::Acquire) && self.dice.roll(2) == 0;
        let mut out = Vec::new();
        if !cancelled {
            // The receiver must not have said that its pages are free.
            assert!(!self.receiver.quiesced(), "bytes land in pages that were reported free");
            for position in job.page_offset..job.page_offset + job.pages.len() as u64 {
                self.landed[sender][position as usize] += 1;
            }
            self.to_receiver[sender].push_back(Message::Landed {
                room: ROOM,
                generation: job.generation,
                chunk: job.chunk,
                slice: 0,
                num_slices: 1,
                page_offset: job.page_offset,
                num_pages: job.pages.len() as u64,
                num_bytes: 64 * job.pages.len() as u64,
                last: job.last,
            });
        }
        let settled =
            Settled { peer: RECEIVER, chunk: job.chunk, result: Ok(!cancelled), num_bytes: 0, num_descriptors: 1 };
        self.senders[sender].settled(settled, self.now, &mut out);
        self.carry_out_sender(sender, out);
    }

    fn deliver_to_sender(&mut self, i: usize) {
        let Some(message) = self.to_sender[i].pop_front() else { return };
        let mut out = Vec::new();
        match message {
            Message::Grant { generation, fragment, num_fragments, payload, .. } => {
                assert_eq!((fragment, num_fragments), (0, 1), "small grants fit into one message");
                let body = crate::protocol::GrantAssembly::default()
                    .add(fragment, num_fragments, &payload, 1 << 20)
                    .unwrap()
                    .unwrap();
                self.senders[i].grant(RECEIVER, generation, Arc::new(body), Arc::default(), self.now, &mut out);
            }
            Message::Done { generation, .. } => {
                assert!(self.senders[i].done(RECEIVER, generation, self.now));
            }
            Message::Abort { generation, code, text, .. } => {
                self.senders[i].aborted(RECEIVER, generation, Error::new(code, text), &mut out);
            }
            other => panic!("unexpected {other:?}"),
        }
        self.carry_out_sender(i, out);
    }

    fn deliver_to_receiver(&mut self, i: usize) {
        let Some(message) = self.to_receiver[i].pop_front() else { return };
        let mut out = Vec::new();
        let peer = i as PeerId;
        match message {
            Message::Landed {
                generation, chunk, slice, num_slices, page_offset, num_pages, num_bytes, last, ..
            } => {
                for _ in 0..1 + self.dice.roll(2) {
                    // Now and then the same message twice.
                    self.receiver.landed(
                        peer,
                        generation,
                        chunk,
                        slice,
                        num_slices,
                        page_offset,
                        num_pages,
                        num_bytes,
                        last,
                        self.now,
                        &mut out,
                    );
                }
            }
            Message::Failed { generation, code, drained, text, .. } => {
                self.receiver.failed(peer, generation, Error::new(code, text), drained, &mut out);
            }
            Message::Drained { generation, .. } => {
                self.receiver.drained(peer, generation);
            }
            other => panic!("unexpected {other:?}"),
        }
        self.carry_out_receiver(out);
        self.check();
    }

    /// What holds at every moment.
    fn check(&self) {
        if self.receiver.state() == State::Success {
            for landed in &self.landed {
                assert!(landed.iter().all(|&times| times == 1), "success with pages that landed {landed:?} times");
            }
        }
    }
}

fn chunk(range: std::ops::Range<u64>, last: bool, aux: bool) -> Chunk {
    Chunk {
        pages: range.clone().map(|page| page as i32).collect(),
        page_offset: range.start,
        last,
        aux: (last && aux).then_some(1),
        no_aux: !aux,
        states: Arc::default(),
    }
}

/// Cuts `0..num_pages` into chunks and sends them at random moments between everything else.
fn run(seed: u64, num_senders: usize, num_pages: usize, abort: Option<(usize, u64)>) -> World {
    let mut world = World::new(seed, num_senders, num_pages);
    let mut left: Vec<VecDeque<Chunk>> = (0..num_senders)
        .map(|i| {
            let mut chunks = VecDeque::new();
            let mut start = 0;
            while start < num_pages as u64 {
                let end = (start + 1 + world.dice.roll(4)).min(num_pages as u64);
                chunks.push_back(chunk(start..end, false, i == 0));
                start = end;
            }
            match chunks.pop_back() {
                Some(last) => chunks.push_back(Chunk { last: true, aux: (i == 0).then_some(1), ..last }),
                None => chunks.push_back(chunk(0..0, true, i == 0)),
            }
            chunks
        })
        .collect();
    let mut steps = 0;
    loop {
        steps += 1;
        if let Some((who, when)) = abort
            && steps == when
        {
            let cause = Error::new(NIXL_ERR_ABORTED, "given up");
            let mut out = Vec::new();
            match who {
                0 => {
                    world.receiver.abort(cause, &mut out);
                    world.carry_out_receiver(out);
                }
                i => {
                    let i = (i - 1) % num_senders;
                    world.senders[i].abort(cause, &mut out);
                    world.carry_out_sender(i, out);
                }
            }
        }
        let sender = world.dice.roll(num_senders as u64) as usize;
        if world.dice.roll(3) == 0
            && let Some(chunk) = left[sender].pop_front()
        {
            let mut out = Vec::new();
            let ended = world.senders[sender].state().ended();
            let result = world.senders[sender].chunk(chunk, world.now, &mut out);
            assert_eq!(result.is_err(), ended, "{result:?}");
            world.carry_out_sender(sender, out);
        } else if !world.step() && left.iter().all(VecDeque::is_empty) && abort.is_none_or(|(_, when)| steps > when) {
            return world;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn b4_a1_every_order_of_events_ends_in_success(seed: u64, senders in 1usize..5, pages in 0usize..20) {
        let world = run(seed, senders, pages, None);
        prop_assert_eq!(world.receiver.state(), State::Success);
        prop_assert!(world.receiver.quiesced());
        for sender in &world.senders {
            prop_assert_eq!(sender.state(), State::Success);
            prop_assert!(sender.quiesced());
        }
    }

    #[test]
    fn f1_f3_f4_an_abort_at_any_moment_ends_and_quiesces_both_sides(
        seed: u64, senders in 1usize..4, pages in 0usize..20, who in 0usize..4, when in 1u64..80,
    ) {
        let world = run(seed, senders, pages, Some((who, when)));
        prop_assert!(world.receiver.state().ended());
        prop_assert!(world.receiver.quiesced());
        for sender in &world.senders {
            prop_assert!(sender.state().ended(), "{:?}", sender.state());
            prop_assert!(sender.quiesced());
            // First cause wins, and it has travelled. Only a sender that gives up while its receiver's confirmation is
            // on the way fails alone: then everything has landed, and the receiver's success is true.
            let (ours, theirs) = (sender.view().cause, world.receiver.view().cause);
            match (&ours, &theirs) {
                (Some(ours), Some(theirs)) => prop_assert_eq!(ours.code, theirs.code),
                (Some(_), None) => prop_assert!(who > 0),
                (None, Some(_)) => prop_assert!(false, "a sender counts as delivered what the receiver gave up"),
                (None, None) => {}
            }
        }
    }
}

fn granted_sender(num_pages: usize, owner: bool) -> Sender {
    let limits = SenderLimits { grant_timeout: 100, room_timeout: 1000, has_aux: true };
    let mut sender = Sender::new(ROOM, limits, 0);
    let body = GrantBody {
        pages: (0..num_pages as i32).collect(),
        aux: Some(0),
        aux_owner: owner,
        states: vec![],
        num_receivers: 1,
    };
    sender.grant(RECEIVER, 42, Arc::new(body), Arc::default(), 0, &mut Vec::new());
    sender
}

fn refused(sender: &mut Sender, chunk: Chunk) -> i32 {
    let before = format!("{sender:?}");
    let mut out = Vec::new();
    let code = sender.chunk(chunk, 1, &mut out).unwrap_err().code;
    assert!(out.is_empty());
    assert_eq!(before, format!("{sender:?}"), "a refused chunk changes nothing");
    code
}

#[test]
fn a10_the_last_chunk_must_leave_no_page_unsent() {
    let mut sender = granted_sender(64, true);
    sender.chunk(chunk(0..48, false, true), 1, &mut Vec::new()).unwrap();
    assert_eq!(refused(&mut sender, chunk(48..48, true, true)), NIXL_ERR_PAGES_INCOMPLETE);
    assert_eq!(refused(&mut sender, chunk(40..64, true, true)), NIXL_ERR_PAGE_OVERLAP);
    assert_eq!(refused(&mut sender, chunk(48..65, true, true)), NIXL_ERR_PAGE_COUNT);
    sender.chunk(chunk(48..64, true, true), 1, &mut Vec::new()).unwrap();
    assert_eq!(refused(&mut sender, chunk(64..65, false, true)), NIXL_ERR_CHUNK_AFTER_LAST);
}

#[test]
fn a5_aux_belongs_to_one_sender() {
    let mut owner = granted_sender(1, true);
    let mut other = granted_sender(1, false);
    let without = Chunk { aux: None, no_aux: false, ..chunk(0..1, true, true) };
    assert_eq!(refused(&mut owner, without.clone()), NIXL_ERR_AUX_MISSING);
    assert_eq!(refused(&mut other, chunk(0..1, true, true)), NIXL_ERR_AUX_NOT_OWNER);
    other.chunk(without, 1, &mut Vec::new()).unwrap();
    owner.chunk(chunk(0..1, true, true), 1, &mut Vec::new()).unwrap();
}

#[test]
fn an_aux_missing_call_is_refused_before_the_grant_too() {
    let limits = SenderLimits { grant_timeout: 100, room_timeout: 1000, has_aux: true };
    let mut sender = Sender::new(ROOM, limits, 0);
    let without = Chunk { aux: None, no_aux: false, ..chunk(0..1, true, true) };
    assert_eq!(refused(&mut sender, without), NIXL_ERR_AUX_MISSING);
    sender.chunk(chunk(0..1, true, true), 1, &mut Vec::new()).unwrap();
    let mut out = Vec::new();
    sender.tick(100, &mut out);
    assert_eq!(sender.state(), State::Bootstrapping, "the wait counts from the last progress");
    sender.tick(101, &mut out);
    assert_eq!(sender.view().cause.unwrap().code, NIXL_ERR_GRANT_TIMEOUT);
}

#[test]
fn f7_a_late_success_does_not_overwrite_a_failure() {
    let mut sender = granted_sender(1, true);
    let mut out = Vec::new();
    sender.chunk(chunk(0..1, true, true), 1, &mut out).unwrap();
    sender.tick(5000, &mut out);
    assert_eq!(sender.state(), State::Failed);
    assert!(!sender.quiesced(), "the transfer has not settled");
    sender.done(RECEIVER, 42, 5001);
    let settled = Settled { peer: RECEIVER, chunk: 0, result: Ok(true), num_bytes: 1, num_descriptors: 1 };
    sender.settled(settled, 5002, &mut out);
    assert_eq!(sender.state(), State::Failed);
    assert!(sender.quiesced());
    assert_eq!(sender.view().cause.unwrap().code, NIXL_ERR_ROOM_TIMEOUT);
}

#[test]
fn d3_a_landed_message_that_contradicts_the_grant_fails_the_room() {
    for (chunk, slice, num_slices, offset, pages) in [
        (0, 0, 0, 0, 1),
        (0, 1, 1, 0, 1),
        (9, 0, 1, 0, 1),
        (0, 0, 1, 8, 1),
        (0, 0, 1, u64::MAX, 1),
        (0, u32::MAX - 1, u32::MAX, 0, 1),
        (0, 0, 1, 0, 0),
    ] {
        let mut world = World::new(1, 1, 8);
        let mut out = Vec::new();
        let landing = world.receiver.landed(0, 42, chunk, slice, num_slices, offset, pages, 1, None, 1, &mut out);
        assert_eq!(landing, Landing::Counted);
        assert_eq!(world.receiver.view().cause.unwrap().code, NIXL_ERR_PROTOCOL);
        assert!(matches!(out[..], [Action::Tell(0, Message::Abort { .. })]));
    }
    let mut world = World::new(1, 1, 8);
    let landing = world.receiver.landed(0, 41, 0, 0, 1, 0, 1, 1, None, 1, &mut Vec::new());
    assert_eq!(landing, Landing::Stale, "an earlier generation");
    assert_eq!(world.receiver.landed(5, 42, 0, 0, 1, 0, 1, 1, None, 1, &mut Vec::new()), Landing::Stale);
}
