//! Senders' and receivers' machines against each other over a simulated network: control messages are delayed and
//! reordered between peers, data lands at random moments, and either side gives up at random.

use std::collections::VecDeque;
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::error::*;
use crate::protocol::LandedChunk;

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
/// Receivers are peers 100, 101.. to the senders; senders are peers 0, 1.. to the receivers.
const RECEIVER: PeerId = 100;
/// Generation of the first receiver's life of the room; the next ones follow.
const GENERATION: u64 = 42;

struct InFlight {
    sender: usize,
    receiver: usize,
    job: Job,
}

/// How a network treats control messages. Between two engines it keeps their order.
#[derive(Clone, Copy, PartialEq)]
enum Network {
    /// Every message arrives once.
    Sound,
    /// Some are lost and some arrive twice.
    Lossy,
}

/// One room, with its senders and receivers.
struct World {
    dice: Dice,
    network: Network,
    receivers: Vec<Receiver>,
    senders: Vec<Sender>,
    /// Messages on their way, by sender and receiver.
    to_sender: Vec<Vec<VecDeque<Message>>>,
    to_receiver: Vec<Vec<VecDeque<Message>>>,
    in_flight: Vec<InFlight>,
    /// How often each position of the page list has landed, by receiver and sender.
    landed: Vec<Vec<Vec<u32>>>,
    now: Millis,
}

impl World {
    fn new(seed: u64, num_senders: usize, num_receivers: usize, num_pages: usize) -> Self {
        Self::on(Network::Sound, seed, num_senders, num_receivers, num_pages)
    }

    fn on(network: Network, seed: u64, num_senders: usize, num_receivers: usize, num_pages: usize) -> Self {
        let limits = SenderLimits { grant_timeout: 1_000_000, room_timeout: 1_000_000, has_aux: true };
        let queues = || vec![vec![VecDeque::new(); num_receivers]; num_senders];
        let mut world = Self {
            dice: Dice(seed),
            network,
            receivers: Vec::new(),
            senders: (0..num_senders).map(|_| Sender::new(ROOM, limits, 0)).collect(),
            to_sender: queues(),
            to_receiver: queues(),
            in_flight: Vec::new(),
            landed: vec![vec![vec![0; num_pages]; num_senders]; num_receivers],
            now: 0,
        };
        for receiver in 0..num_receivers {
            let mut out = Vec::new();
            let expectations = (0..num_senders)
                .map(|i| Expectation {
                    peer: i as PeerId,
                    ready: true,
                    grant: Arc::new(grant_body(num_pages, i == 0, num_receivers as u32)),
                    num_state_groups: 0,
                })
                .collect();
            let generation = GENERATION + receiver as u64;
            world.receivers.push(Receiver::new(ROOM, generation, expectations, 1_000_000, 1_000_000, 0, &mut out));
            world.carry_out_receiver(receiver, out);
        }
        world
    }

    /// How often a message arrives.
    fn arrivals(&mut self) -> usize {
        match self.network {
            Network::Sound => 1,
            Network::Lossy => [0, 1, 1, 1, 2][self.dice.roll(5) as usize],
        }
    }

    fn send_to_sender(&mut self, sender: usize, receiver: usize, message: Message) {
        for _ in 0..self.arrivals() {
            self.to_sender[sender][receiver].push_back(message.clone());
        }
    }

    fn send_to_receiver(&mut self, sender: usize, receiver: usize, message: Message) {
        for _ in 0..self.arrivals() {
            self.to_receiver[sender][receiver].push_back(message.clone());
        }
    }

    fn carry_out_receiver(&mut self, receiver: usize, out: Vec<Action>) {
        for action in out {
            match action {
                Action::Tell(peer, message) => self.send_to_sender(peer as usize, receiver, message),
                Action::Grant { peer, room, generation, body } => {
                    for message in crate::protocol::split_grant(room, generation, (1, 1), &body) {
                        self.send_to_sender(peer as usize, receiver, message);
                    }
                }
                Action::Transfer(_) => panic!("a receiver sends no chunks"),
            }
        }
    }

    fn carry_out_sender(&mut self, sender: usize, out: Vec<Action>) {
        for action in out {
            match action {
                Action::Tell(peer, message) => self.send_to_receiver(sender, (peer - RECEIVER) as usize, message),
                Action::Transfer(job) => {
                    let receiver = (job.peer - RECEIVER) as usize;
                    self.in_flight.push(InFlight { sender, receiver, job });
                }
                Action::Grant { .. } => panic!("a sender grants nothing"),
            }
        }
    }

    fn pairs(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let num_receivers = self.receivers.len();
        (0..self.senders.len()).flat_map(move |s| (0..num_receivers).map(move |r| (s, r)))
    }

    /// Lets one message, or one transfer, or nothing, happen. False: everything is quiet.
    fn step(&mut self) -> bool {
        self.now += 1;
        let mut choices: Vec<(u8, usize, usize)> = (0..self.in_flight.len()).map(|i| (0, i, 0)).collect();
        choices.extend(self.pairs().filter(|&(s, r)| !self.to_sender[s][r].is_empty()).map(|(s, r)| (1, s, r)));
        choices.extend(self.pairs().filter(|&(s, r)| !self.to_receiver[s][r].is_empty()).map(|(s, r)| (2, s, r)));
        if choices.is_empty() {
            return false;
        }
        match choices[self.dice.roll(choices.len() as u64) as usize] {
            (0, i, _) => self.settle(i, false),
            (1, s, r) => self.deliver_to_sender(s, r),
            (_, s, r) => self.deliver_to_receiver(s, r),
        }
        self.check();
        true
    }

    /// A transfer ends: cancelled before it was posted, landed with its notification behind it, or broken off.
    fn settle(&mut self, i: usize, broken: bool) {
        let InFlight { sender, receiver, job } = self.in_flight.swap_remove(i);
        let cancelled = self.senders[sender].state() == State::Failed && self.dice.roll(2) == 0;
        let mut out = Vec::new();
        if !cancelled {
            // The receiver must not have said that its pages are free.
            assert!(!self.receivers[receiver].quiesced(), "bytes land in pages that were reported free");
        }
        if !cancelled && !broken {
            for position in job.page_offset..job.page_offset + job.pages.len() as u64 {
                self.landed[receiver][sender][position as usize] += 1;
            }
            let message = Message::Landed {
                room: ROOM,
                generation: job.generation,
                slice: 0,
                num_slices: 1,
                chunk: LandedChunk {
                    chunk: job.chunk,
                    page_offset: job.page_offset,
                    num_pages: job.pages.len() as u64,
                    num_bytes: 64 * job.pages.len() as u64,
                    last: job.last,
                },
            };
            self.send_to_receiver(sender, receiver, message);
        }
        let result = if broken { Err(Error::new(NIXL_ERR_XFER_FAILED, "broken off")) } else { Ok(!cancelled) };
        let settled = Settled { peer: job.peer, chunk: job.chunk, result, num_bytes: 0, num_descriptors: 1 };
        self.senders[sender].settled(settled, self.now, &mut out);
        self.carry_out_sender(sender, out);
    }

    /// A connection breaks: what was on its way settles or is lost, then both sides hear that it is closed.
    fn cut(&mut self, sender: usize, receiver: usize) {
        while let Some(i) = self.in_flight.iter().position(|it| (it.sender, it.receiver) == (sender, receiver)) {
            self.settle(i, true);
        }
        let cause = Error::new(NIXL_ERR_PEER_LOST, "gone");
        let mut out = Vec::new();
        self.senders[sender].peer_gone(RECEIVER + receiver as PeerId, &cause, true, &mut out);
        self.carry_out_sender(sender, out);
        let mut out = Vec::new();
        self.receivers[receiver].peer_gone(sender as PeerId, &cause, true, &mut out);
        self.carry_out_receiver(receiver, out);
        self.to_sender[sender][receiver].clear();
        self.to_receiver[sender][receiver].clear();
        self.check();
    }

    fn deliver_to_sender(&mut self, sender: usize, receiver: usize) {
        let Some(message) = self.to_sender[sender][receiver].pop_front() else { return };
        let mut out = Vec::new();
        let (machine, peer) = (&mut self.senders[sender], RECEIVER + receiver as PeerId);
        match message {
            Message::Grant { generation, fragment, num_fragments, payload, .. } => {
                assert_eq!((fragment, num_fragments), (0, 1), "small grants fit into one message");
                let body = crate::protocol::GrantAssembly::default()
                    .add(fragment, num_fragments, &payload, 1 << 20)
                    .unwrap()
                    .unwrap();
                let _ = machine.grant(peer, generation, Arc::new(body), Arc::default(), self.now, &mut out);
            }
            Message::Done { generation, .. } => assert!(machine.done(peer, generation, self.now)),
            Message::Abort { generation, num_receivers, code, text, .. } => {
                machine.aborted(peer, generation, num_receivers, Error::new(code, text), &mut out);
            }
            other => panic!("unexpected {other:?}"),
        }
        self.carry_out_sender(sender, out);
    }

    fn deliver_to_receiver(&mut self, sender: usize, receiver: usize) {
        let Some(message) = self.to_receiver[sender][receiver].pop_front() else { return };
        let mut out = Vec::new();
        let peer = sender as PeerId;
        match message {
            Message::Landed { .. } => {
                for _ in 0..1 + self.dice.roll(2) {
                    // Now and then the same message twice.
                    landed(&mut self.receivers[receiver], peer, &message, self.now, &mut out);
                }
            }
            Message::Failed { generation, code, drained, text, .. } => {
                self.receivers[receiver].failed(peer, generation, Error::new(code, text), drained, &mut out);
            }
            Message::Drained { generation, .. } => {
                self.receivers[receiver].drained(peer, generation);
            }
            other => panic!("unexpected {other:?}"),
        }
        self.carry_out_receiver(receiver, out);
    }

    /// What holds at every moment.
    fn check(&self) {
        for (receiver, landed) in self.receivers.iter().zip(&self.landed) {
            if receiver.state() == State::Success {
                let once = landed.iter().flatten().all(|&times| times == 1);
                assert!(once, "success with pages that landed {landed:?} times");
            }
        }
        for sender in self.senders.iter().filter(|sender| sender.state() == State::Success) {
            assert!(sender.quiesced());
            assert!(self.receivers.iter().all(|receiver| receiver.state() == State::Success));
        }
    }

    /// The caller gives the room up: at a receiver, or after them at a sender.
    fn give_up(&mut self, who: usize) {
        let cause = Error::new(NIXL_ERR_ABORTED, "given up");
        let mut out = Vec::new();
        match who.checked_sub(self.receivers.len()) {
            None => {
                self.receivers[who].abort(cause, &mut out);
                self.carry_out_receiver(who, out);
            }
            Some(sender) => {
                let sender = sender % self.senders.len();
                self.senders[sender].abort(cause, &mut out);
                self.carry_out_sender(sender, out);
            }
        }
    }
}

/// Gives a landed message to a receiver.
fn landed(receiver: &mut Receiver, peer: PeerId, message: &Message, now: Millis, out: &mut Vec<Action>) -> Landing {
    let Message::Landed { generation, slice, num_slices, chunk, .. } = *message else { panic!("{message:?}") };
    receiver.landed(peer, generation, (slice, num_slices), chunk, now, out)
}

fn piece(chunk: u32, page_offset: u64, num_pages: u64) -> LandedChunk {
    LandedChunk { chunk, page_offset, num_pages, num_bytes: 1, last: None }
}

fn grant_body(num_pages: usize, aux_owner: bool, num_receivers: u32) -> GrantBody {
    GrantBody { pages: (0..num_pages as i32).collect(), aux: Some(3), aux_owner, states: vec![], num_receivers }
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

/// What happens to the room from outside, and at which step.
enum Event {
    GiveUp(usize),
    Cut(usize),
}

/// Cuts the page list into chunks and sends them at random moments between everything else.
fn run(mut world: World, event: Option<(Event, u64)>) -> World {
    let (num_senders, num_receivers) = (world.senders.len(), world.receivers.len());
    let num_pages = world.landed[0][0].len();
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
        match &event {
            Some((Event::GiveUp(who), when)) if steps == *when => world.give_up(*who),
            Some((Event::Cut(which), when)) if steps == *when => {
                world.cut(which % num_senders, which / num_senders % num_receivers);
            }
            _ => {}
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
        } else if !world.step()
            && left.iter().all(VecDeque::is_empty)
            && event.as_ref().is_none_or(|(_, when)| steps > *when)
        {
            return world;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn b4_a1_every_order_of_events_ends_in_success(
        seed: u64, senders in 1usize..5, receivers in 1usize..4, pages in 0usize..20,
    ) {
        let world = run(World::new(seed, senders, receivers, pages), None);
        for receiver in &world.receivers {
            prop_assert_eq!(receiver.state(), State::Success);
            prop_assert!(receiver.quiesced());
        }
        for sender in &world.senders {
            prop_assert_eq!(sender.state(), State::Success);
            prop_assert!(sender.quiesced());
        }
    }

    #[test]
    fn f1_f3_f4_an_abort_at_any_moment_ends_and_quiesces_both_sides(
        seed: u64, senders in 1usize..4, receivers in 1usize..3, pages in 0usize..20, who in 0usize..5, when in 1u64..80,
    ) {
        let world = run(World::new(seed, senders, receivers, pages), Some((Event::GiveUp(who), when)));
        for (r, receiver) in world.receivers.iter().enumerate() {
            prop_assert!(receiver.state().ended(), "{:?}", receiver.state());
            prop_assert!(receiver.quiesced());
            for sender in &world.senders {
                prop_assert!(sender.state().ended(), "{:?}", sender.state());
                prop_assert!(sender.quiesced());
                // First cause wins, and it has travelled. Only a sender that gives up, or that another receiver gave up
                // on, while this receiver's confirmation is on the way fails alone: then everything has landed, and the
                // receiver's success is true.
                let (ours, theirs) = (sender.view().cause, receiver.view().cause);
                match (&ours, &theirs) {
                    (Some(ours), Some(theirs)) => prop_assert_eq!(ours.code, theirs.code),
                    (Some(_), None) => prop_assert!(who != r),
                    (None, Some(_)) => prop_assert!(false, "a sender counts as delivered what the receiver gave up"),
                    (None, None) => {}
                }
            }
        }
    }

    /// Nothing is promised of what ends when, but that nothing untrue is ever shown; and that all is quiesced once
    /// every connection is closed.
    #[test]
    fn b1_c1_lost_and_repeated_messages_and_cut_connections_show_nothing_untrue(
        seed: u64, senders in 1usize..4, receivers in 1usize..3, pages in 0usize..20, what in 0usize..12, when in 1u64..80,
    ) {
        let event = if what < 6 { Event::GiveUp(what) } else { Event::Cut(what - 6) };
        let mut world = run(World::on(Network::Lossy, seed, senders, receivers, pages), Some((event, when)));
        for (sender, receiver) in world.pairs() {
            world.cut(sender, receiver);
        }
        for sender in &mut world.senders {
            sender.tick(10_000_000, &mut Vec::new());
            prop_assert!(sender.state().ended() && sender.quiesced(), "{:?}", sender);
        }
        for receiver in &world.receivers {
            prop_assert!(receiver.state().ended() && receiver.quiesced(), "{:?}", receiver);
        }
    }
}

fn granted_sender(num_pages: usize, owner: bool) -> Sender {
    let limits = SenderLimits { grant_timeout: 100, room_timeout: 1000, has_aux: true };
    let mut sender = Sender::new(ROOM, limits, 0);
    let body = grant_body(num_pages, owner, 1);
    let _ = sender.grant(RECEIVER, GENERATION, Arc::new(body), Arc::default(), 0, &mut Vec::new());
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
        let mut world = World::new(1, 1, 1, 8);
        let mut out = Vec::new();
        let chunk = piece(chunk, offset, pages);
        let landing = world.receivers[0].landed(0, 42, (slice, num_slices), chunk, 1, &mut out);
        assert_eq!(landing, Landing::Counted);
        assert_eq!(world.receivers[0].view().cause.unwrap().code, NIXL_ERR_PROTOCOL);
        assert!(matches!(out[..], [Action::Tell(0, Message::Abort { .. })]));
    }
    let mut world = World::new(1, 1, 1, 8);
    let landing = world.receivers[0].landed(0, 41, (0, 1), piece(0, 0, 1), 1, &mut Vec::new());
    assert_eq!(landing, Landing::Stale, "an earlier generation");
    assert_eq!(world.receivers[0].landed(5, 42, (0, 1), piece(0, 0, 1), 1, &mut Vec::new()), Landing::Stale);
}

/// A sender that two receivers have granted `num_pages` pages each.
fn sender_to_two(num_pages: usize) -> Sender {
    let mut sender = Sender::new(ROOM, SenderLimits { grant_timeout: 100, room_timeout: 1000, has_aux: true }, 0);
    for i in 0..2 {
        let body = Arc::new(grant_body(num_pages, true, 2));
        let _ = sender.grant(RECEIVER + i, GENERATION + i, body, Arc::default(), 0, &mut Vec::new());
    }
    sender
}

fn settle(sender: &mut Sender, peer: PeerId, chunk: u32, result: Result<bool>, out: &mut Vec<Action>) {
    sender.settled(Settled { peer, chunk, result, num_bytes: 64, num_descriptors: 1 }, 2, out);
}

/// Failed messages among the actions: to whom, of which generation, with which code, drained or not.
fn told_failed(out: &[Action]) -> Vec<(PeerId, u64, i32, bool)> {
    let failed = out.iter().filter_map(|action| match action {
        Action::Tell(peer, Message::Failed { generation, code, drained, .. }) => {
            Some((*peer, *generation, *code, *drained))
        }
        _ => None,
    });
    failed.collect()
}

fn told_drained(out: &[Action]) -> Vec<(PeerId, u64)> {
    let drained = out.iter().filter_map(|action| match action {
        Action::Tell(peer, Message::Drained { generation, .. }) => Some((*peer, *generation)),
        _ => None,
    });
    drained.collect()
}

fn num_jobs(out: &[Action]) -> usize {
    out.iter().filter(|action| matches!(action, Action::Transfer(_))).count()
}

#[test]
fn nothing_moves_before_every_receiver_has_granted() {
    let mut sender = Sender::new(ROOM, SenderLimits { grant_timeout: 100, room_timeout: 1000, has_aux: true }, 0);
    let mut out = Vec::new();
    let body = Arc::new(grant_body(4, true, 2));
    sender.chunk(chunk(0..2, false, true), 1, &mut out).unwrap();
    // The same grant three times is one receiver, not three.
    for _ in 0..3 {
        let _ = sender.grant(RECEIVER, GENERATION, body.clone(), Arc::default(), 2, &mut out);
    }
    assert_eq!(sender.state(), State::Bootstrapping);
    assert!(out.is_empty());
    let _ = sender.grant(RECEIVER + 1, GENERATION + 1, body.clone(), Arc::default(), 3, &mut out);
    assert_eq!(num_jobs(&out), 2);
    let _ = sender.grant(RECEIVER + 1, GENERATION + 1, body.clone(), Arc::default(), 3, &mut out);
    assert_eq!(num_jobs(&out), 2, "a repeated grant sends nothing twice");
    // One more than were announced is turned away and harms nobody.
    out.clear();
    let _ = sender.grant(RECEIVER + 2, GENERATION + 2, body, Arc::default(), 4, &mut out);
    assert_eq!(told_failed(&out), [(RECEIVER + 2, GENERATION + 2, NIXL_ERR_PROTOCOL, true)]);
    assert_eq!(out.len(), 1);
    out.clear();
    sender.chunk(chunk(2..4, true, true), 5, &mut out).unwrap();
    assert_eq!(num_jobs(&out), 2);
    for (peer, number) in [(0, 0), (1, 0), (1, 1), (0, 1)] {
        settle(&mut sender, RECEIVER + peer, number, Ok(true), &mut out);
    }
    assert_eq!(sender.view().num_chunks, 2);
    assert!(sender.done(RECEIVER, GENERATION, 6));
    assert_eq!(sender.state(), State::Transferring, "one of two has confirmed");
    assert!(sender.done(RECEIVER + 1, GENERATION + 1, 6));
    assert_eq!(sender.state(), State::Success);
}

#[test]
fn receivers_that_differ_are_both_told() {
    for (pages, receivers) in [(5, 2), (4, 3)] {
        let mut sender = Sender::new(ROOM, SenderLimits { grant_timeout: 100, room_timeout: 1000, has_aux: true }, 0);
        let mut out = Vec::new();
        let _ = sender.grant(RECEIVER, 1, Arc::new(grant_body(4, true, 2)), Arc::default(), 0, &mut out);
        let _ =
            sender.grant(RECEIVER + 1, 2, Arc::new(grant_body(pages, true, receivers)), Arc::default(), 0, &mut out);
        let code = NIXL_ERR_PAGE_COUNT;
        assert_eq!(told_failed(&out), [(RECEIVER, 1, code, true), (RECEIVER + 1, 2, code, true)]);
        assert!(sender.quiesced());
        // A third that comes late hears of it too.
        out.clear();
        let _ = sender.grant(RECEIVER + 2, 3, Arc::new(grant_body(4, true, 2)), Arc::default(), 0, &mut out);
        assert_eq!(told_failed(&out), [(RECEIVER + 2, 3, code, true)]);
    }
}

#[test]
fn an_abort_by_one_of_two_receivers_drains_both() {
    let mut sender = sender_to_two(2);
    let mut out = Vec::new();
    sender.chunk(chunk(0..2, true, true), 1, &mut out).unwrap();
    out.clear();
    // From another life of the room: it has nothing in flight, and the room goes on.
    sender.aborted(RECEIVER, GENERATION - 1, 2, Error::new(NIXL_ERR_ABORTED, ""), &mut out);
    assert_eq!(told_drained(&out), [(RECEIVER, GENERATION - 1)]);
    assert_eq!(sender.state(), State::Transferring);
    out.clear();
    sender.aborted(RECEIVER, GENERATION, 2, Error::new(NIXL_ERR_ABORTED, ""), &mut out);
    assert_eq!(told_failed(&out), [(RECEIVER + 1, GENERATION + 1, NIXL_ERR_ABORTED, false)]);
    assert_eq!(told_drained(&out), [], "both transfers are in flight");
    out.clear();
    settle(&mut sender, RECEIVER + 1, 0, Ok(true), &mut out);
    assert_eq!(told_drained(&out), [(RECEIVER + 1, GENERATION + 1)]);
    assert!(!sender.quiesced());
    out.clear();
    settle(&mut sender, RECEIVER, 0, Err(Error::new(NIXL_ERR_XFER_FAILED, "")), &mut out);
    assert_eq!(told_drained(&out), [(RECEIVER, GENERATION)]);
    assert!(sender.quiesced());
    assert_eq!(sender.view().cause.unwrap().code, NIXL_ERR_ABORTED, "the first cause");
    // It missed the answer and asks again.
    out.clear();
    sender.aborted(RECEIVER, GENERATION, 2, Error::new(NIXL_ERR_ABORTED, ""), &mut out);
    assert_eq!(told_drained(&out), [(RECEIVER, GENERATION)]);
    assert_eq!(out.len(), 1);
}

#[test]
fn an_abort_that_comes_before_the_grant_is_answered_and_ends_the_wait() {
    let mut sender = Sender::new(ROOM, SenderLimits { grant_timeout: 100, room_timeout: 1000, has_aux: true }, 0);
    let mut out = Vec::new();
    sender.chunk(chunk(0..2, true, true), 1, &mut out).unwrap();
    assert!(!sender.aborted(RECEIVER, GENERATION, 1, Error::new(NIXL_ERR_ABORTED, ""), &mut out));
    assert_eq!(told_drained(&out), [(RECEIVER, GENERATION)]);
    assert_eq!(sender.view().cause.unwrap().code, NIXL_ERR_ABORTED);
    assert!(sender.owes_an_answer().is_none(), "the only receiver knows");
    out.clear();
    let body = Arc::new(grant_body(2, true, 1));
    assert!(sender.grant(RECEIVER, GENERATION + 1, body, Arc::default(), 2, &mut out).is_err());
    assert_eq!(told_failed(&out), [(RECEIVER, GENERATION + 1, NIXL_ERR_ABORTED, true)]);
}

#[test]
fn a_sender_that_connects_back_too_late_hears_why() {
    let expected = |ready| {
        let grant = Arc::new(grant_body(2, true, 1));
        vec![Expectation { peer: 0, ready, grant, num_state_groups: 0 }]
    };
    let mut out = Vec::new();
    let mut receiver = Receiver::new(ROOM, GENERATION, expected(false), 1000, 1000, 0, &mut out);
    receiver.abort(Error::new(NIXL_ERR_ABORTED, ""), &mut out);
    assert!(out.is_empty() && receiver.quiesced());
    for _ in 0..2 {
        receiver.peer_ready(0, 1, &mut out);
        assert!(matches!(out[..], [Action::Tell(0, Message::Abort { .. })]), "once: {out:?}");
    }
}

#[test]
fn a_confirmation_before_the_transfers_settle_is_no_success_yet() {
    let mut sender = sender_to_two(2);
    let mut out = Vec::new();
    sender.chunk(chunk(0..1, false, true), 1, &mut out).unwrap();
    assert!(!sender.done(RECEIVER, GENERATION, 2), "the last chunk has not been sent");
    sender.chunk(chunk(1..2, true, true), 1, &mut out).unwrap();
    for i in 0..2 {
        assert!(!sender.done(RECEIVER + i, GENERATION + 9, 2), "another life");
        assert!(sender.done(RECEIVER + i, GENERATION + i, 2));
    }
    for (peer, number) in [(1, 1), (0, 0), (1, 0), (0, 1)] {
        assert_eq!(sender.state(), State::Transferring, "our pages are still read");
        assert!(!sender.quiesced());
        settle(&mut sender, RECEIVER + peer, number, Ok(true), &mut out);
    }
    assert_eq!(sender.state(), State::Success);
    assert!(sender.quiesced());
}

#[test]
fn a_receiver_that_opens_the_room_again_ends_its_earlier_life_only_when_that_is_drained() {
    let mut sender = sender_to_two(2);
    let mut out = Vec::new();
    sender.chunk(chunk(0..2, true, true), 1, &mut out).unwrap();
    out.clear();
    let _ = sender.grant(RECEIVER, GENERATION + 9, Arc::new(grant_body(2, true, 2)), Arc::default(), 2, &mut out);
    let code = NIXL_ERR_PROTOCOL;
    assert_eq!(
        told_failed(&out),
        [
            (RECEIVER, GENERATION, code, false),
            (RECEIVER + 1, GENERATION + 1, code, false),
            (RECEIVER, GENERATION + 9, code, true)
        ]
    );
    out.clear();
    for i in 0..2 {
        settle(&mut sender, RECEIVER + i, 0, Ok(false), &mut out);
    }
    assert_eq!(told_drained(&out), [(RECEIVER, GENERATION), (RECEIVER + 1, GENERATION + 1)]);
}

#[test]
fn a_drained_message_frees_pages_only_after_a_failure() {
    let mut world = World::new(1, 2, 1, 4);
    let receiver = &mut world.receivers[0];
    let mut out = Vec::new();
    let mut early = receiver.clone();
    assert!(early.drained(0, GENERATION) && !early.quiesced(), "nobody has failed");
    early.failed(0, GENERATION, Error::new(NIXL_ERR_XFER_FAILED, ""), false, &mut out);
    assert!(early.drained(1, GENERATION) && early.quiesced(), "it may overtake the reason");
    out.clear();
    let cause = Error::new(NIXL_ERR_XFER_FAILED, "");
    assert!(!receiver.failed(0, GENERATION + 1, cause.clone(), true, &mut out), "another life");
    assert!(receiver.failed(0, GENERATION, cause, false, &mut out));
    assert!(matches!(out[..], [Action::Tell(1, Message::Abort { .. })]), "the other sender is told to drain: {out:?}");
    assert!(!receiver.quiesced());
    assert!(!receiver.drained(0, GENERATION - 1) && !receiver.drained(9, GENERATION));
    assert!(receiver.drained(1, GENERATION));
    assert!(!receiver.quiesced(), "one of two has drained");
    assert_eq!(receiver.view().num_pending_senders, 1);
    // What is already in flight may land, and counts for nothing.
    let landing = receiver.landed(0, GENERATION, (0, 1), piece(0, 0, 4), 2, &mut out);
    assert_eq!(landing, Landing::Stale);
    assert!(receiver.drained(0, GENERATION));
    assert!(receiver.quiesced());
    assert_eq!(out.len(), 1);
}

#[test]
fn a_silent_sender_that_returns_is_asked_once_more() {
    let mut world = World::new(1, 2, 1, 4);
    let receiver = &mut world.receivers[0];
    let mut out = Vec::new();
    receiver.peer_gone(0, &Error::new(NIXL_ERR_PEER_LOST, ""), false, &mut out);
    assert!(matches!(out[..], [Action::Tell(0, Message::Abort { .. }), Action::Tell(1, Message::Abort { .. })]));
    out.clear();
    receiver.drained(1, GENERATION);
    receiver.ask_again(1, &mut out);
    assert!(out.is_empty(), "it has answered");
    receiver.ask_again(0, &mut out);
    assert!(matches!(out[..], [Action::Tell(0, Message::Abort { .. })]));
    assert!(!receiver.quiesced());
    receiver.peer_gone(0, &Error::new(NIXL_ERR_PEER_LOST, ""), true, &mut out);
    assert!(receiver.quiesced(), "a closed connection can write no more");
}

/// 100,000 messages, arbitrary or altered, to both machines: whatever they lead to, nothing panics, and what has ended
/// stays ended.
#[test]
fn d7_hostile_messages_never_panic() {
    use crate::protocol::{DecodeError, GrantAssembly, MAX_MESSAGE_BYTES, decode, encode};
    let mut dice = Dice(7);
    let mut counts = [0u32; 3];
    for _ in 0..1000 {
        let mut world = World::new(dice.roll(u64::MAX), 2, 2, 6);
        let mut assembly = GrantAssembly::default();
        let mut jobs: Vec<Job> = Vec::new();
        for step in 0..100u64 {
            let edge = |dice: &mut Dice| match dice.roll(8) {
                0 => u64::MAX,
                1 => 1 << 32,
                2 => dice.roll(u64::MAX),
                _ => dice.roll(8),
            };
            let room = ROOM;
            let generation = if dice.roll(8) == 0 { edge(&mut dice) } else { GENERATION + dice.roll(2) };
            let (code, text) = (-(dice.roll(600) as i32), "t".repeat(dice.roll(300) as usize));
            let last = |dice: &mut Dice| Last {
                num_chunks: edge(dice) as u32,
                has_aux: dice.roll(2) == 0,
                num_state_groups: dice.roll(2) as u32,
            };
            let message = match dice.roll(6) {
                0 => Message::Grant {
                    room,
                    generation,
                    revision: 1,
                    connection: 1,
                    fragment: dice.roll(2) as u32,
                    num_fragments: dice.roll(3) as u32,
                    payload: (0..dice.roll(140)).map(|_| dice.roll(5) as u8).collect(),
                },
                1 => Message::Landed {
                    room,
                    generation,
                    slice: edge(&mut dice) as u32,
                    num_slices: edge(&mut dice) as u32,
                    chunk: LandedChunk {
                        chunk: edge(&mut dice) as u32,
                        page_offset: edge(&mut dice),
                        num_pages: edge(&mut dice),
                        num_bytes: edge(&mut dice),
                        last: (dice.roll(2) == 0).then(|| last(&mut dice)),
                    },
                },
                2 => Message::Done { room, generation },
                3 => Message::Failed { room, generation, code, drained: dice.roll(2) == 0, text },
                4 => Message::Abort { room, generation, num_receivers: edge(&mut dice) as u32, code, text },
                _ => Message::Drained { room, generation },
            };
            let mut frame = encode(&message);
            assert!(frame.len() <= MAX_MESSAGE_BYTES);
            if dice.roll(4) == 0 {
                let at = 8 + dice.roll(frame.len() as u64 - 8) as usize;
                frame[at] ^= 1 << dice.roll(8);
                assert_eq!(decode(&frame), Err(DecodeError::Checksum));
                let checksum = crc32fast::hash(&frame[8..]).to_le_bytes();
                frame[4..8].copy_from_slice(&checksum);
            }
            let Ok(message) = decode(&frame) else {
                counts[0] += 1;
                continue;
            };
            counts[1] += 1;
            let before = (world.receivers[0].state(), world.senders[0].state());
            let mut out = Vec::new();
            let (receiver, sender) = (&mut world.receivers[0], &mut world.senders[0]);
            let peer = dice.roll(3);
            match message {
                Message::Grant { generation, fragment, num_fragments, payload, .. } => {
                    if dice.roll(3) == 0 {
                        let body = grant_body(dice.roll(8) as usize, dice.roll(2) == 0, dice.roll(4) as u32);
                        let _ =
                            sender.grant(RECEIVER + peer, generation, Arc::new(body), Arc::default(), step, &mut out);
                    } else if let Ok(Some(body)) = assembly.add(fragment, num_fragments, &payload, 1000) {
                        let _ =
                            sender.grant(RECEIVER + peer, generation, Arc::new(body), Arc::default(), step, &mut out);
                        assembly = GrantAssembly::default();
                    }
                }
                message @ Message::Landed { .. } => {
                    landed(receiver, peer, &message, step, &mut out);
                }
                Message::Done { generation, .. } => {
                    sender.done(RECEIVER + peer, generation, step);
                }
                Message::Failed { generation, code, drained, text, .. } => {
                    receiver.failed(peer, generation, Error::new(code, text), drained, &mut out);
                }
                Message::Abort { generation, num_receivers, code, text, .. } => {
                    sender.aborted(RECEIVER + peer, generation, num_receivers, Error::new(code, text), &mut out);
                }
                Message::Drained { generation, .. } => {
                    receiver.drained(peer, generation);
                }
                // An altered kind.
                _ => {}
            }
            if dice.roll(4) == 0 {
                let (start, len) = (dice.roll(7), dice.roll(4));
                let _ = sender.chunk(chunk(start..start + len, dice.roll(3) == 0, true), step, &mut out);
            }
            jobs.extend(out.into_iter().filter_map(|action| match action {
                Action::Transfer(job) => Some(job),
                _ => None,
            }));
            if dice.roll(2) == 0
                && let Some(job) = jobs.pop()
            {
                settle(sender, job.peer, job.chunk, Ok(sender.state() != State::Failed), &mut Vec::new());
            }
            let after = (receiver.state(), sender.state());
            assert!(!before.0.ended() || before.0 == after.0, "{before:?} became {after:?}");
            assert!(!before.1.ended() || before.1 == after.1, "{before:?} became {after:?}");
            assert!(!sender.quiesced() || jobs.is_empty(), "quiesced with {} transfers in flight", jobs.len());
        }
        counts[2] += u32::from(world.senders[0].view().num_chunks > 0);
    }
    assert!(counts.iter().all(|&count| count > 50), "refused, decoded, rooms that moved something: {counts:?}");
}

#[test]
fn a_room_opened_again_before_the_sender_released_it_is_refused_with_a_reason() {
    let mut sender = granted_sender(1, true);
    let mut out = Vec::new();
    sender.chunk(chunk(0..1, true, true), 1, &mut out).unwrap();
    settle(&mut sender, RECEIVER, 0, Ok(true), &mut out);
    assert!(sender.done(RECEIVER, GENERATION, 2));
    assert_eq!(sender.state(), State::Success);
    out.clear();
    let _ = sender.grant(RECEIVER, GENERATION + 1, Arc::new(grant_body(1, true, 1)), Arc::default(), 3, &mut out);
    assert_eq!(told_failed(&out), [(RECEIVER, GENERATION + 1, NIXL_ERR_ROOM_IN_USE, true)]);
    assert_eq!(sender.state(), State::Success);
}

#[test]
fn a_transfer_that_fails_after_its_receiver_confirmed_everything_has_landed() {
    // The receiver hears of the landed data before NIXL tells us that the transfer is complete, confirms, and exits:
    // then the transfer's status is an error of the connection. The other receiver must not suffer for it.
    let mut sender = sender_to_two(1);
    let mut out = Vec::new();
    sender.chunk(chunk(0..1, true, true), 1, &mut out).unwrap();
    out.clear();
    assert!(sender.done(RECEIVER, GENERATION, 2));
    sender.peer_gone(RECEIVER, &Error::new(NIXL_ERR_PEER_LOST, ""), true, &mut out);
    settle(&mut sender, RECEIVER, 0, Err(Error::new(NIXL_ERR_XFER_FAILED, "")), &mut out);
    assert_eq!(sender.state(), State::Transferring);
    settle(&mut sender, RECEIVER + 1, 0, Ok(true), &mut out);
    assert!(sender.done(RECEIVER + 1, GENERATION + 1, 3));
    assert_eq!(sender.state(), State::Success);
    assert_eq!(sender.view().num_chunks, 1);
    assert!(out.is_empty(), "{out:?}");
}

#[test]
fn b1_a_lost_abort_is_repeated_until_the_sender_has_drained() {
    let mut world = World::new(1, 1, 1, 8);
    let mut out = Vec::new();
    world.receivers[0].abort(Error::new(NIXL_ERR_ABORTED, "given up"), &mut out);
    out.clear();
    world.receivers[0].tick(500, &mut out);
    assert!(out.is_empty());
    for now in [1000, 3000] {
        world.receivers[0].tick(now, &mut out);
        assert!(matches!(out[..], [Action::Tell(0, Message::Abort { .. })]), "at {now}: {out:?}");
        out.clear();
        world.receivers[0].tick(now + 500, &mut out);
        assert!(out.is_empty());
    }
    assert!(world.receivers[0].drained(0, GENERATION));
    world.receivers[0].tick(1_000_000, &mut out);
    assert!(out.is_empty() && world.receivers[0].quiesced());
}
