//! Engines' tables against each other over a simulated network: messages are delayed, lost, repeated and overtake each
//! other; engines stop, die and come back; connections break; rooms are given up, and their ids used again.
//!
//! A world follows from its seed. `NIXLKV_SIM_ROOMS` asks for more rooms, `NIXLKV_SIM_SEED` replays one world.

use std::collections::HashMap;

use super::super::super::peers::Standing;
use super::*;
use crate::protocol::LandedChunk;
use crate::room::{Chunk, Settled, State};

/// A small deterministic generator (SplitMix64, Steele and others 2014).
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % sides
    }

    /// True once in `times`; never for 0.
    fn once_in(&mut self, times: u64) -> bool {
        times != 0 && self.roll(times) == 0
    }
}

/// What a world does to its engines. Each number is "once in so many", 0 is never.
#[derive(Clone, Copy, Debug, Default)]
struct Faults {
    /// A message is lost.
    lose: u64,
    /// A message comes twice.
    repeat: u64,
    /// A message takes up to 400 ms.
    delay: u64,
    /// Per step: an engine stops for a while.
    stop: u64,
    /// Per step: an engine dies, and is started anew after a while.
    kill: u64,
    /// Per step: a connection breaks.
    cut: u64,
    /// Per step: a room is given up on one side.
    abort: u64,
    /// Per step: one side disconnects the other.
    disconnect: u64,
    /// A chunk's transfer fails.
    fail: u64,
    /// A request is never made on one of its sides.
    absent: u64,
}

const KINDS: [Faults; 8] = [
    Faults { lose: 0, repeat: 0, delay: 0, stop: 0, kill: 0, cut: 0, abort: 0, disconnect: 0, fail: 0, absent: 0 },
    Faults { lose: 10, repeat: 10, delay: 5, stop: 0, kill: 0, cut: 0, abort: 0, disconnect: 0, fail: 0, absent: 0 },
    Faults { lose: 0, repeat: 10, delay: 5, stop: 0, kill: 0, cut: 0, abort: 10, disconnect: 0, fail: 50, absent: 30 },
    Faults { lose: 10, repeat: 10, delay: 5, stop: 0, kill: 0, cut: 0, abort: 10, disconnect: 0, fail: 50, absent: 30 },
    Faults { lose: 30, repeat: 30, delay: 9, stop: 99, kill: 0, cut: 0, abort: 20, disconnect: 0, fail: 90, absent: 0 },
    Faults { lose: 0, repeat: 0, delay: 9, stop: 200, kill: 150, cut: 0, abort: 50, disconnect: 0, fail: 0, absent: 0 },
    Faults { lose: 0, repeat: 9, delay: 9, stop: 200, kill: 0, cut: 90, abort: 50, disconnect: 99, fail: 0, absent: 0 },
    Faults {
        lose: 9,
        repeat: 9,
        delay: 5,
        stop: 99,
        kill: 199,
        cut: 99,
        abort: 9,
        disconnect: 199,
        fail: 50,
        absent: 9,
    },
];

const STEP: Millis = 5;
const LIMITS: Limits = Limits { heartbeat: 200, liveness: 1000, room: 6000, grant: 4000, max_rooms: 64 };
const NUM_PAGES: u64 = 256;

/// A process: one life of an engine. It keeps its place in the list when it dies.
struct Process {
    node: Node,
    dead: bool,
    stopped_until: Millis,
    last_tick: Millis,
    /// What each page of each layer holds, then what each aux slot holds; 0: nothing.
    memory: Vec<Vec<u64>>,
    /// Pages that the caller may use.
    free: Vec<i32>,
}

/// An end of a connection.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    /// Breaks then, as far as this side can see.
    BreaksAt(Millis),
    Broken,
}

struct Packet {
    from: usize,
    to: usize,
    due: Millis,
    message: Message,
}

/// A slice of a chunk that NIXL is moving.
struct Flight {
    from: usize,
    to: usize,
    job: Job,
    cancelled: Arc<AtomicBool>,
    stamp: u64,
    slice: u32,
    num_slices: u32,
    due: Millis,
    /// It has landed and is about to settle; the result.
    landed: Option<bool>,
}

/// One side of a request.
struct Side {
    process: usize,
    opens: Millis,
    opened: bool,
    finished: bool,
    /// What poll showed when the room had ended.
    ended: Option<(State, i32)>,
    /// Sender: what has still to be sent.
    chunks: Vec<Chunk>,
    /// Receiver: its pages, and the generation.
    pages: Vec<i32>,
    generation: u64,
}

struct Request {
    room: u64,
    stamp: u64,
    senders: Vec<Side>,
    receivers: Vec<Side>,
}

struct World {
    seed: u64,
    dice: Dice,
    faults: Faults,
    limits: Limits,
    now: Millis,
    processes: Vec<Process>,
    /// By place (prefill engines, then decode engines): the process that lives there, or when one is started.
    places: Vec<std::result::Result<usize, Millis>>,
    num_prefill: usize,
    num_decode: usize,
    packets: Vec<Packet>,
    flights: Vec<Flight>,
    ends: BTreeMap<(usize, usize), End>,
    requests: Vec<Request>,
    num_requests: u64,
    /// Whether receivers succeeded, by generation.
    succeeded: HashMap<u64, bool>,
    ordered: bool,
    traced: bool,
    tally: Tally,
}

#[derive(Default, Debug, Clone, Copy)]
struct Tally {
    rooms: u64,
    succeeded: u64,
    failed: u64,
    /// Chunks that met the grant of an earlier request for the room, of a receiver that was already gone.
    too_early: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut dice = Dice(seed.wrapping_mul(0x2545_f491_4f6c_dd1d));
        let kind = (seed % KINDS.len() as u64) as usize;
        let faults = KINDS[kind];
        let mut limits = LIMITS;
        if kind < 2 {
            // Nothing but the network is at fault: with enough patience everything must succeed.
            (limits.liveness, limits.room, limits.grant) = (60_000, 600_000, 600_000);
        }
        let num_prefill = 1 + dice.roll(2) as usize;
        let num_decode = 1 + dice.roll(2) as usize;
        let ordered = dice.roll(3) == 0;
        let places = (0..num_prefill + num_decode).map(|_| Err(0)).collect();
        let mut world = Self {
            seed,
            dice,
            faults,
            limits,
            now: 1000,
            processes: Vec::new(),
            places,
            num_prefill,
            num_decode,
            packets: Vec::new(),
            flights: Vec::new(),
            ends: BTreeMap::new(),
            requests: Vec::new(),
            num_requests: 0,
            succeeded: HashMap::new(),
            ordered,
            traced: std::env::var_os("NIXLKV_SIM_SEED").is_some(),
            tally: Tally::default(),
        };
        world.start_processes();
        world.introduce();
        world
    }

    /// Starts a process in every place that waits for one.
    fn start_processes(&mut self) {
        for place in 0..self.places.len() {
            if !self.places[place].is_err_and(|when| when <= self.now) {
                continue;
            }
            let life = self.processes.len() as u64;
            let num_layers = self.num_prefill as u32;
            // Prefill engines are pipeline stages of one layer each; decode engines have them all.
            let (role, layers) = match place.checked_sub(self.num_prefill) {
                None => (ROLE_PREFILL, place as u32..place as u32 + 1),
                Some(_) => (ROLE_DECODE, 0..num_layers),
            };
            let node = Node::new(&format!("engine {place}"), life, role, layers, NUM_PAGES, self.limits);
            let memory = vec![vec![0; NUM_PAGES as usize]; num_layers as usize + 1];
            let free = (0..NUM_PAGES as i32).collect();
            let (stopped_until, last_tick) = (0, self.now);
            self.processes.push(Process { node, dead: false, stopped_until, last_tick, memory, free });
            self.places[place] = Ok(self.processes.len() - 1);
        }
    }

    fn alive(&self, place: usize) -> Option<usize> {
        self.places[place].ok()
    }

    fn is_stopped(&self, process: usize) -> bool {
        self.processes[process].stopped_until > self.now
    }

    /// Which process an agent's name belongs to.
    fn process_of(&self, agent: &str) -> usize {
        agent.strip_prefix("agent ").and_then(|life| life.parse().ok()).unwrap_or(usize::MAX)
    }

    /// What the router does: whoever does not know a living peer of the other role is given its blob.
    fn introduce(&mut self) {
        for i in 0..self.places.len() {
            for j in 0..self.places.len() {
                let (Some(from), Some(to)) = (self.alive(i), self.alive(j)) else { continue };
                if (i < self.num_prefill) == (j < self.num_prefill) || self.is_stopped(from) {
                    continue;
                }
                let card = self.processes[to].node.card.clone();
                let node = &mut self.processes[from].node;
                let known = node.tables.peers.same_instance(&card).and_then(|id| node.tables.peers.get(id).ok());
                if known.is_some_and(|peer| peer.standing != Standing::Closed || peer.retry.is_some()) {
                    continue;
                }
                if node.connect(&card, self.now).is_ok() {
                    self.new_end(from, to);
                }
            }
        }
    }

    /// One side makes its end of a connection anew.
    fn new_end(&mut self, from: usize, to: usize) {
        self.trace(|| format!("{from} connects {to}"));
        self.ends.remove(&(from, to));
        if self.processes[to].dead && self.dice.once_in(2) {
            // Refused; otherwise nobody answers.
            self.ends.insert((from, to), End::BreaksAt(self.now + self.dice.roll(50)));
        }
    }

    /// Whether `from` sees its connection to `to` broken now.
    fn is_broken(&mut self, from: usize, to: usize) -> bool {
        match self.ends.get(&(from, to)) {
            Some(End::Broken) => true,
            Some(End::BreaksAt(when)) if *when <= self.now => {
                self.ends.insert((from, to), End::Broken);
                true
            }
            _ => false,
        }
    }

    fn send(&mut self, from: usize, to: usize, message: Message, sent: Millis) {
        // On a connection that has broken nothing moves, seen or not.
        if self.ends.contains_key(&(from, to)) || self.dice.once_in(self.faults.lose) {
            return;
        }
        let times = 1 + u64::from(self.dice.once_in(self.faults.repeat));
        for _ in 0..times {
            let most = if self.dice.once_in(self.faults.delay) { 400 } else { 15 };
            let mut due = sent + self.dice.roll(most);
            if self.ordered {
                let before = self.packets.iter().filter(|p| (p.from, p.to) == (from, to)).map(|p| p.due).max();
                due = due.max(before.unwrap_or(0));
            }
            self.packets.push(Packet { from, to, due, message: message.clone() });
        }
    }

    /// One step of every process, then of the network.
    fn step(&mut self) {
        self.now += STEP;
        self.start_processes();
        for process in 0..self.processes.len() {
            if !self.processes[process].dead && !self.is_stopped(process) {
                self.work(process);
            }
        }
        self.deliver();
        self.fly();
    }

    /// What an engine's threads do.
    fn work(&mut self, process: usize) {
        let mut sending = Vec::new();
        self.processes[process].node.tables.outbox.take(64, &mut sending);
        let mut broken: Vec<PeerId> = Vec::new();
        for Outgoing { link, message } in sending {
            if link.agent.is_empty() || (link.is_closed() && !matches!(message, Message::Goodbye { .. })) {
                continue;
            }
            let to = self.process_of(&link.agent);
            if self.is_broken(process, to) {
                broken.push(link.peer);
            } else {
                self.send(process, to, message, self.now);
            }
        }
        let now = self.now;
        let tables = &mut self.processes[process].node.tables;
        for peer in broken {
            tables.broke(peer, Error::new(NIXL_ERR_PEER_LOST, "the connection broke"), now);
        }
        let gap = now - self.processes[process].last_tick;
        if gap >= 20 {
            self.processes[process].last_tick = now;
            let tables = &mut self.processes[process].node.tables;
            let closed = tables.ready_to_close();
            for (link, cause) in &closed {
                self.trace(|| format!("{process} closes {}: {cause}", link.agent));
            }
            let tables = &mut self.processes[process].node.tables;
            tables.closed(&closed, now);
            tables.tick(now, gap);
            for card in tables.due_retries(now) {
                if self.processes[process].node.connect(&card, now).is_ok() {
                    self.new_end(process, self.process_of(&card.agent));
                }
            }
        }
        let jobs: Vec<QueuedJob> = self.processes[process].node.tables.jobs[0].drain(..).collect();
        for QueuedJob { job, link, cancelled, .. } in jobs {
            let to = self.process_of(&link.agent);
            if cancelled.load(Ordering::Acquire) {
                self.settle(process, &job, Ok(false));
            } else if link.is_closed() || self.is_broken(process, to) || self.dice.once_in(self.faults.fail) {
                self.settle(process, &job, Err(Error::new(NIXL_ERR_XFER_FAILED, "the post failed")));
            } else {
                link.in_flight.fetch_add(1, Ordering::AcqRel);
                let num_slices = 1 + self.dice.roll(2) as u32;
                let due = now + 1 + self.dice.roll(if self.dice.0 & 15 == 0 { 300 } else { 20 });
                let stamp = self.requests.iter().rev().find(|r| r.room == job.room).map_or(0, |r| r.stamp);
                let (from, slice, landed) = (process, 0, None);
                self.flights.push(Flight { from, to, job, cancelled, stamp, slice, num_slices, due, landed });
            }
        }
    }

    fn settle(&mut self, process: usize, job: &Job, result: Result<bool>) {
        let num_bytes = if matches!(result, Ok(true)) { ITEM * job.pages.len() as u64 } else { 0 };
        let settled = Settled { peer: job.peer, chunk: job.chunk, result, num_bytes, num_descriptors: 1 };
        let now = self.now;
        self.processes[process].node.tables.with_room(job.room, now, |machine, out| match machine {
            Room::Sender(sender) => sender.settled(settled, now, out),
            Room::Receiver(_) => panic!("a receiver's job"),
        });
    }

    fn deliver(&mut self) {
        let mut i = 0;
        let mut due = Vec::new();
        while i < self.packets.len() {
            let Packet { to, due: when, .. } = self.packets[i];
            if self.processes[to].dead {
                self.packets.swap_remove(i);
            } else if when <= self.now && !self.is_stopped(to) {
                due.push(self.packets.swap_remove(i));
            } else {
                i += 1;
            }
        }
        if self.ordered {
            due.sort_by_key(|packet| packet.due);
        }
        for Packet { from, to, message, .. } in due {
            self.trace(|| format!("{from} to {to}: {message:?}"));
            self.processes[to].node.tables.receive(&agent(from as u64), message, self.now);
        }
    }

    fn fly(&mut self) {
        let mut i = 0;
        while i < self.flights.len() {
            let Flight { from, to, due, landed, .. } = self.flights[i];
            let (from_dead, to_dead) = (self.processes[from].dead, self.processes[to].dead);
            if from_dead && (to_dead || self.is_broken(to, from)) {
                // What had not landed when the connection broke never lands.
                self.flights.swap_remove(i);
                continue;
            }
            if due > self.now {
                i += 1;
                continue;
            }
            if landed.is_none() && (to_dead || self.ends.contains_key(&(from, to))) {
                if from_dead {
                    self.flights.swap_remove(i);
                    continue;
                }
                if self.is_broken(from, to) {
                    self.flights[i].landed = Some(false);
                }
            } else if landed.is_none() {
                // Whether bytes land while one side is stopped depends on what the kernel holds already.
                let held = (self.is_stopped(to) || self.is_stopped(from)) && self.dice.roll(20) != 0;
                if !held {
                    self.land(i);
                }
            } else if from_dead {
                self.flights.swap_remove(i);
                continue;
            } else if !self.is_stopped(from) {
                let mut flight = self.flights.swap_remove(i);
                let landed = flight.landed == Some(true);
                let more = flight.slice + 1 < flight.num_slices;
                let link_closed = |tables: &Tables| {
                    tables
                        .peers
                        .get(flight.job.peer)
                        .map_or(true, |peer| peer.standing == Standing::Closed || peer.link.is_closed())
                };
                let stopped =
                    flight.cancelled.load(Ordering::Acquire) || link_closed(&self.processes[from].node.tables);
                if landed && more && !stopped {
                    flight.slice += 1;
                    flight.landed = None;
                    flight.due = self.now + self.dice.roll(20);
                    self.flights.push(flight);
                    continue;
                }
                self.take_off_link(&flight);
                let result = match (landed, more) {
                    (false, _) => Err(Error::new(NIXL_ERR_XFER_FAILED, "the connection broke")),
                    (true, false) => Ok(true),
                    (true, true) if flight.cancelled.load(Ordering::Acquire) => Ok(false),
                    (true, true) => Err(Error::new(NIXL_ERR_PEER_LOST, "the link was closed")),
                };
                self.settle(from, &flight.job, result);
                continue;
            }
            i += 1;
        }
    }

    /// The transfer threads count what is in flight on the link, which outlives the peer's entry.
    fn take_off_link(&self, flight: &Flight) {
        let tables = &self.processes[flight.from].node.tables;
        let agent = &self.processes[flight.to].node.card.agent;
        let closing = tables.closing.iter().map(|(link, _)| link).find(|link| link.agent == *agent);
        let open = tables.peers.iter().map(|peer| &peer.link).find(|link| link.agent == *agent);
        // A link that is closing is older than one that is open.
        if let Some(link) = closing.or(open) {
            link.in_flight.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// A slice's bytes land, and its notification is sent.
    fn land(&mut self, i: usize) {
        let flight = &self.flights[i];
        let (from, to, job) = (flight.from, flight.to, flight.job.clone());
        let (slice, num_slices, stamp) = (flight.slice, flight.num_slices, flight.stamp);
        let receiver = self.processes[to].node.tables.rooms.get(&job.room).map(|entry| &entry.room);
        self.trace(|| format!("{from} to {to}: slice {slice} of {num_slices} of {job:?} lands"));
        let promised = matches!(receiver, Some(Room::Receiver(receiver))
            if receiver.generation() == job.generation && !receiver.quiesced());
        assert!(
            promised,
            "seed {}: bytes of room {} generation {} land in pages that process {to} has reported free",
            self.seed, job.room, job.generation
        );
        let layer = self.places_of(from);
        let half = job.pages.len() / num_slices as usize;
        let range = if slice + 1 == num_slices { slice as usize * half..job.pages.len() } else { 0..half };
        for k in range {
            let position = job.page_offset as usize + k;
            let page = job.grant.pages[position];
            // The source page's stamp: what the caller wrote there, or scribbled after it was told that it is free.
            let value = self.processes[from].memory[0][job.pages[k] as usize];
            assert!(value == mix(stamp, position as u64), "seed {}: a source page was reused too early", self.seed);
            self.processes[to].memory[layer][page as usize] = value;
        }
        if let (Some(_), Some(slot), true) = (job.aux, job.grant.aux, slice + 1 == num_slices) {
            let aux = self.num_prefill;
            self.processes[to].memory[aux][slot as usize] = mix(stamp, u64::MAX);
        }
        let message = Message::Landed {
            room: job.room,
            generation: job.generation,
            slice,
            num_slices,
            chunk: LandedChunk {
                chunk: job.chunk,
                page_offset: job.page_offset,
                num_pages: job.pages.len() as u64,
                num_bytes: ITEM * job.pages.len() as u64,
                last: job.last,
            },
        };
        if !self.processes[from].dead {
            let sent = self.now.max(self.processes[from].stopped_until);
            self.send(from, to, message, sent);
        }
        self.flights[i].landed = Some(true);
        self.flights[i].due = self.now + self.dice.roll(10);
    }

    /// Tells what happens in a world that is replayed.
    fn trace(&self, what: impl FnOnce() -> String) {
        if self.traced {
            println!("{} ms: {}", self.now, what());
        }
    }

    /// The layer that a prefill process holds.
    fn places_of(&self, process: usize) -> usize {
        let name = &self.processes[process].node.card.name;
        name.strip_prefix("engine ").and_then(|place| place.parse().ok()).unwrap_or(0)
    }
}

/// What the callers do.
impl World {
    fn begin_request(&mut self) {
        let room = 1 + self.dice.roll(40);
        if self.requests.iter().any(|request| request.room == room) {
            return;
        }
        let num_receivers = 1 + self.dice.roll(self.num_decode as u64) as usize;
        let first = self.dice.roll(self.num_decode as u64) as usize;
        let receivers: Vec<usize> =
            (0..num_receivers).map(|i| self.num_prefill + (first + i) % self.num_decode).collect();
        let places: Vec<usize> = (0..self.num_prefill).chain(receivers).collect();
        let processes: Vec<usize> = places.iter().filter_map(|place| self.alive(*place)).collect();
        if processes.len() < places.len() {
            return;
        }
        let total = self.dice.roll(12) as usize;
        if processes.iter().any(|process| self.processes[*process].free.len() < total + 1) {
            return;
        }
        self.num_requests += 1;
        self.tally.rooms += 1;
        let stamp = mix(self.num_requests, room);
        let mut sides: Vec<Side> = Vec::new();
        for (i, &process) in processes.iter().enumerate() {
            let most = if self.dice.once_in(4) { 300 } else { 30 };
            let opens = self.now + self.dice.roll(most);
            let absent = self.dice.once_in(self.faults.absent);
            let free = &mut self.processes[process].free;
            // Pages in no order, then the aux slot, which has a page's number.
            let mut pages = Vec::new();
            for _ in 0..=total {
                let at = self.dice.roll(free.len() as u64) as usize;
                pages.push(free.swap_remove(at));
            }
            if absent {
                free.extend(&pages);
            }
            let mut chunks = Vec::new();
            if i < self.num_prefill && !absent {
                chunks = self.cut_into_chunks(process, &pages, total, stamp);
            }
            sides.push(Side {
                process,
                opens,
                opened: false,
                finished: absent,
                ended: None,
                chunks,
                pages,
                generation: 0,
            });
        }
        let receivers = sides.split_off(self.num_prefill);
        self.requests.push(Request { room, stamp, senders: sides, receivers });
    }

    /// Stamps the source pages and cuts the page list into chunks, now and then in another order.
    fn cut_into_chunks(&mut self, process: usize, pages: &[i32], total: usize, stamp: u64) -> Vec<Chunk> {
        for (position, page) in pages[..total].iter().enumerate() {
            self.processes[process].memory[0][*page as usize] = mix(stamp, position as u64);
        }
        let is_owner = self.places_of(process) == 0;
        let mut chunks = Vec::new();
        let mut start = 0;
        while start < total {
            let end = (start + 1 + self.dice.roll(6) as usize).min(total);
            chunks.push(Chunk {
                pages: pages[start..end].into(),
                page_offset: start as u64,
                last: false,
                aux: None,
                no_aux: false,
                states: Arc::default(),
            });
            start = end;
        }
        if chunks.len() > 1 && self.dice.once_in(3) {
            let (a, b) = (self.dice.roll(chunks.len() as u64), self.dice.roll(chunks.len() as u64));
            chunks.swap(a as usize, b as usize);
        }
        let mut last = chunks.pop().unwrap_or(Chunk {
            pages: Arc::default(),
            page_offset: 0,
            last: false,
            aux: None,
            no_aux: false,
            states: Arc::default(),
        });
        (last.last, last.aux, last.no_aux) = (true, is_owner.then_some(pages[total]), !is_owner);
        chunks.push(last);
        chunks.reverse();
        chunks
    }

    /// Every caller looks at its rooms.
    fn call(&mut self) {
        let mut requests = std::mem::take(&mut self.requests);
        for request in &mut requests {
            let (room, stamp) = (request.room, request.stamp);
            for i in 0..request.receivers.len() {
                let (senders, num_receivers) = (&request.senders, request.receivers.len());
                let cards: Vec<&Card> =
                    senders.iter().map(|sender| &self.processes[sender.process].node.card).collect();
                let cards: Vec<Card> = cards.into_iter().cloned().collect();
                self.call_receiver(room, stamp, &mut request.receivers[i], &cards, num_receivers as u32);
            }
            let generations: Vec<(u64, bool)> = request
                .receivers
                .iter()
                .map(|receiver| (receiver.generation, self.processes[receiver.process].dead))
                .collect();
            for sender in &mut request.senders {
                self.call_sender(room, sender, &generations);
            }
            if self.dice.once_in(self.faults.abort.saturating_mul(4)) {
                let sides = request.senders.len() + request.receivers.len();
                let side = self.dice.roll(sides as u64) as usize;
                let side = request.senders.iter_mut().chain(&mut request.receivers).nth(side);
                if let Some(side) = side
                    && side.opened
                    && !side.finished
                    && !self.is_stopped(side.process)
                    && !self.processes[side.process].dead
                {
                    let now = self.now;
                    let Node { tables, published, .. } = &mut self.processes[side.process].node;
                    tables.abort(room, Error::new(NIXL_ERR_ABORTED, "given up"), published, now).unwrap();
                    self.trace(|| format!("{}: room {room}: abort", side.process));
                }
            }
        }
        requests.retain(|request| !request.senders.iter().chain(&request.receivers).all(|side| side.finished));
        self.requests = requests;
    }

    /// True when the caller can do nothing with this side any more, or not now.
    fn is_out_of_reach(&self, side: &mut Side) -> bool {
        if self.processes[side.process].dead {
            side.finished = true;
        }
        side.finished || self.is_stopped(side.process) || side.opens > self.now
    }

    fn call_receiver(&mut self, room: u64, stamp: u64, side: &mut Side, senders: &[Card], num_receivers: u32) {
        if self.is_out_of_reach(side) {
            return;
        }
        let (now, seed) = (self.now, self.seed);
        let process = &mut self.processes[side.process];
        if !side.opened {
            let ids: Vec<PeerId> = senders.iter().filter_map(|card| process.node.peer(card)).collect();
            let (aux, pages) = side.pages.split_last().map_or((0, &[][..]), |(aux, pages)| (*aux, pages));
            let request = RecvRequest {
                room,
                senders: ids.clone(),
                pages: pages.to_vec(),
                aux: Some(aux),
                aux_sender: ids.first().copied(),
                states: Vec::new(),
                num_receivers,
                timeout: None,
            };
            let Node { tables, published, .. } = &mut process.node;
            let opened = if ids.len() < senders.len() {
                Err(Error::new(NIXL_ERR_PEER_UNKNOWN, ""))
            } else {
                tables.recv(request, published, now)
            };
            if opened.is_ok() {
                side.opened = true;
                side.generation = tables.next_generation - 1;
            }
            self.trace(|| format!("{}: room {room}: recv as {}: {opened:?}", side.process, side.generation));
            let process = &mut self.processes[side.process];
            match opened {
                Ok(()) => {}
                Err(e) => {
                    let known = [
                        NIXL_ERR_PEER_UNKNOWN,
                        NIXL_ERR_PEER_LOST,
                        NIXL_ERR_PEER_DISCONNECTED,
                        NIXL_ERR_PEER_STALE,
                        NIXL_ERR_TOO_MANY_ROOMS,
                    ];
                    assert!(known.contains(&e.code), "seed {seed}: recv gave {e}");
                    side.finished = true;
                    process.free.extend(side.pages.iter());
                }
            }
            return;
        }
        let view = process.node.tables.poll(room).unwrap();
        if !self.check_end(room, side, &view) {
            return;
        }
        let process = &mut self.processes[side.process];
        let (aux, pages) = side.pages.split_last().map_or((0, &[][..]), |(aux, pages)| (*aux, pages));
        if view.state == State::Success {
            for (layer, memory) in process.memory[..self.num_prefill].iter().enumerate() {
                for (position, page) in pages.iter().enumerate() {
                    let right = mix(stamp, position as u64);
                    assert!(
                        memory[*page as usize] == right,
                        "seed {seed}: room {room} succeeded with a wrong page {page} in layer {layer}"
                    );
                }
            }
            let right = process.memory[self.num_prefill][aux as usize] == mix(stamp, u64::MAX);
            assert!(right, "seed {seed}: room {room} succeeded with a wrong aux slot");
            self.succeeded.insert(side.generation, true);
        }
        if view.quiesced {
            process.node.tables.release(room, now).unwrap();
            // What lands from now on shows.
            for page in &side.pages {
                for memory in &mut process.memory {
                    memory[*page as usize] = 0;
                }
            }
            process.free.extend(side.pages.iter());
            side.finished = true;
            self.trace(|| format!("{}: room {room}: release", side.process));
        }
    }

    fn call_sender(&mut self, room: u64, side: &mut Side, receivers: &[(u64, bool)]) {
        if self.is_out_of_reach(side) {
            return;
        }
        let (now, seed) = (self.now, self.seed);
        let Node { tables, published, .. } = &mut self.processes[side.process].node;
        if let Some(chunk) = side.chunks.last()
            && side.ended.is_none()
        {
            let sent = tables.send_chunk(room, chunk.clone(), published, now);
            let range = chunk.page_offset..chunk.page_offset + chunk.pages.len() as u64;
            self.trace(|| format!("{}: room {room}: send {range:?}: {sent:?}", side.process));
            match sent {
                Ok(()) => {
                    side.opened = true;
                    side.chunks.pop();
                    side.opens = now + self.dice.roll(40);
                }
                Err(e) if e.code == NIXL_ERR_ROOM_ENDED => {
                    side.opened = true;
                    side.chunks.clear();
                }
                Err(e)
                    if [NIXL_ERR_PAGE_COUNT, NIXL_ERR_PAGES_INCOMPLETE].contains(&e.code)
                        && self.faults.kill + self.faults.cut != 0 =>
                {
                    // The grant is that of an earlier request whose receiver has died or was cut off, which this side
                    // has yet to see: the id was used again too early.
                    self.tally.too_early += 1;
                    if side.opened {
                        side.chunks.clear();
                        let Node { tables, published, .. } = &mut self.processes[side.process].node;
                        tables.abort(room, Error::new(NIXL_ERR_ABORTED, e.text), published, now).unwrap();
                    } else {
                        side.finished = true;
                        self.processes[side.process].free.extend(side.pages.iter());
                    }
                }
                Err(e) => {
                    let known = [NIXL_ERR_TOO_MANY_ROOMS, NIXL_ERR_QUEUE_FULL];
                    assert!(known.contains(&e.code), "seed {seed}: send_chunk gave {e}");
                    side.opens = now + 50;
                }
            }
            return;
        }
        let view = tables.poll(room).unwrap();
        if !self.check_end(room, side, &view) {
            return;
        }
        if view.state == State::Success {
            for (generation, dead) in receivers {
                let delivered = self.processes.iter().any(|p| p.node.tables.delivered.contains(generation));
                assert!(*dead || delivered, "seed {seed}: room {room} is delivered, says its sender, and it is not");
            }
        }
        if view.quiesced {
            let process = &mut self.processes[side.process];
            process.node.tables.release(room, now).unwrap();
            for page in &side.pages {
                process.memory[0][*page as usize] = 0;
            }
            process.free.extend(side.pages.iter());
            side.finished = true;
            self.trace(|| format!("{}: room {room}: release", side.process));
        }
    }

    /// Whether the room has ended. What has ended stays so.
    fn check_end(&mut self, room: u64, side: &mut Side, view: &crate::room::View) -> bool {
        let seen = (view.state, view.cause.as_ref().map_or(0, |cause| cause.code));
        if let Some(ended) = side.ended {
            assert!(ended == seen, "seed {}: room {room} had ended as {ended:?} and is {seen:?} now", self.seed);
        } else if view.state.ended() {
            side.ended = Some(seen);
            self.trace(|| format!("{}: room {room}: ended: {:?} {:?}", side.process, view.state, view.cause));
            match view.state {
                State::Success => self.tally.succeeded += 1,
                _ => self.tally.failed += 1,
            }
        }
        view.state.ended()
    }

    /// What goes wrong in the world around.
    fn misfortune(&mut self) {
        let num_places = self.places.len() as u64;
        let place = self.dice.roll(num_places) as usize;
        let Some(process) = self.alive(place) else { return };
        if self.dice.once_in(self.faults.stop) {
            let until = self.now + self.dice.roll(2 * self.limits.liveness);
            self.processes[process].stopped_until = until;
            self.trace(|| format!("{process} stops until {until}"));
        }
        if self.dice.once_in(self.faults.kill) {
            self.kill(place);
            return;
        }
        let other =
            (place < self.num_prefill).then(|| self.num_prefill + self.dice.roll(self.num_decode as u64) as usize);
        let other = other.unwrap_or_else(|| self.dice.roll(self.num_prefill as u64) as usize);
        let Some(other) = self.alive(other) else { return };
        if self.dice.once_in(self.faults.cut) {
            self.trace(|| format!("{process} and {other} are cut off"));
            self.cut(process, other);
        }
        if self.dice.once_in(self.faults.disconnect) && !self.is_stopped(process) {
            let (card, now) = (self.processes[other].node.card.clone(), self.now);
            let node = &mut self.processes[process].node;
            if let Some(peer) = node.peer(&card) {
                let _ = node.tables.disconnect(peer, now);
            }
        }
    }

    fn kill(&mut self, place: usize) {
        let Some(process) = self.alive(place) else { return };
        self.processes[process].dead = true;
        self.trace(|| format!("{process} dies"));
        self.places[place] = Err(self.now + self.dice.roll(3000));
        self.packets.retain(|packet| packet.from != process || packet.due > self.now);
        for other in 0..self.processes.len() {
            // Most deaths show at once, by the transport's error; a machine that vanishes shows late.
            let late = if self.dice.once_in(10) { 5000 } else { 100 };
            let when = self.now + self.dice.roll(late);
            self.ends.insert((other, process), End::BreaksAt(when));
        }
    }

    /// The connection between two engines breaks: what is on its way is lost.
    fn cut(&mut self, a: usize, b: usize) {
        self.trace(|| format!("{a} and {b}: the connection breaks"));
        self.packets.retain(|packet| (packet.from, packet.to) != (a, b) && (packet.from, packet.to) != (b, a));
        for (from, to) in [(a, b), (b, a)] {
            // Bytes stop moving at once, whichever side sees it first.
            let when = self.now + self.dice.roll(300);
            self.ends.insert((from, to), End::BreaksAt(when));
            for flight in self.flights.iter_mut().filter(|flight| (flight.from, flight.to) == (from, to)) {
                if flight.landed.is_none() {
                    flight.landed = Some(false);
                    flight.due = when;
                }
            }
        }
    }

    /// Lets everything come to its end without further faults, and looks for what is left.
    fn wind_down(&mut self) {
        self.faults = Faults::default();
        let start = self.now;
        // Rooms have their time limits; a peer that vanished shows within 5 s.
        let most = 2 * (self.limits.room + self.limits.grant) + 20_000;
        while !self.requests.is_empty() {
            self.introduce();
            self.step();
            self.call();
            assert!(self.now - start < most, "seed {}: rooms do not end: {}", self.seed, self.describe());
        }
        // Grants that nobody takes up, tombstones and the like have time limits too.
        for _ in 0..(self.limits.room + self.limits.grant) / 1000 + 1 {
            self.now += 1000;
            for _ in 0..20 {
                self.introduce();
                self.step();
            }
        }
        for process in self.processes.iter().filter(|process| !process.dead) {
            let tables = &process.node.tables;
            let left = [
                tables.rooms.len(),
                tables.parking.len(),
                tables.tombstones.len(),
                tables.unsaid.len(),
                tables.assemblies.len(),
                tables.closing.len(),
                tables.num_pending as usize,
                tables.num_active,
                tables.num_unquiesced,
                NUM_PAGES as usize - process.free.len(),
            ];
            assert!(left.iter().all(|number| *number == 0), "seed {}: left behind: {left:?}", self.seed);
            assert!(tables.in_use.is_empty(), "seed {}: memory is still in use", self.seed);
        }
    }

    fn describe(&self) -> String {
        let side = |side: &Side| {
            let tables = &self.processes[side.process].node.tables;
            format!("{}{}: {:?}", side.process, if side.opened { "" } else { " not open" }, side.ended.is_some())
                + &self
                    .requests
                    .iter()
                    .map(|r| format!("{:?}", tables.rooms.get(&r.room).map(|e| &e.room)))
                    .collect::<String>()
        };
        let request = |request: &Request| {
            let sides: Vec<String> = request.senders.iter().chain(&request.receivers).map(side).collect();
            format!("room {}: {}", request.room, sides.join("; "))
        };
        self.requests.iter().map(request).collect::<Vec<String>>().join("\n")
    }
}

/// A stamp of a request and a position.
fn mix(a: u64, b: u64) -> u64 {
    Dice(a ^ b.rotate_left(32)).roll(u64::MAX) | 1
}

/// One world with about `num_requests` requests.
fn run(seed: u64, num_requests: u64) -> Tally {
    let mut world = World::new(seed);
    let crowd = 1 + world.dice.roll(16) as usize;
    while world.num_requests < num_requests {
        if world.requests.len() < crowd {
            world.begin_request();
        }
        world.introduce();
        world.step();
        world.call();
        world.misfortune();
    }
    world.wind_down();
    // And the world still works: whatever happened, a fresh request between any two succeeds.
    let before = world.tally;
    let fresh = 4;
    for _ in 0..fresh {
        while world.requests.is_empty() {
            world.begin_request();
        }
        world.wind_down();
    }
    let after = world.tally;
    assert_eq!(after.failed, before.failed, "seed {seed}: a fresh request failed");
    assert!(after.succeeded > before.succeeded, "seed {seed}: no fresh request succeeded");
    if seed % (KINDS.len() as u64) < 2 {
        assert_eq!(after.failed, 0, "seed {seed}: a room failed, with no fault but the network's");
    }
    after
}

#[test]
fn b1_c1_e1_f1_nothing_untrue_in_random_worlds() {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let per_world = 200;
    if let Some(seed) = number("NIXLKV_SIM_SEED") {
        println!("seed {seed}: {:?}", run(seed, per_world));
        return;
    }
    let rooms = number("NIXLKV_SIM_ROOMS").unwrap_or(5_000);
    let first = number("NIXLKV_SIM_FIRST").unwrap_or(0);
    let mut total = Tally::default();
    let mut seed = first;
    while total.rooms < rooms {
        let tally = run(seed, per_world);
        total.rooms += tally.rooms;
        total.succeeded += tally.succeeded;
        total.failed += tally.failed;
        total.too_early += tally.too_early;
        seed += 1;
    }
    println!("{} worlds: {total:?}", seed - first);
    // It must have seen both.
    assert!(total.succeeded > total.rooms / 2 && total.failed > total.rooms / 50, "{total:?}");
    assert!(total.too_early <= total.rooms / 1000, "{total:?}");
}
