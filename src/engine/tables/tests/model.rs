//! Small worlds, explored to the end: every order in which messages and transfers can arrive, every place at which one of
//! them can be lost or come twice, every moment at which a caller can give up. The engines' own tables run in them; what
//! is modelled is the network, the memory and the callers.
//!
//! `NIXLKV_MODEL=all` explores the large configurations too, `NIXLKV_MODEL=` with the name of one only that.

use std::hash::{Hash, Hasher};

use stateright::{Checker, Model, Property};

use super::*;
use crate::protocol::LandedChunk;
use crate::room::{Chunk, Settled, State};

/// A configuration.
#[derive(Clone, Copy)]
struct Small {
    senders: usize,
    receivers: usize,
    rooms: u64,
    /// How often each room id is used, one life after the other.
    lives: u8,
    /// Chunks of one page from each sender.
    chunks: u64,
    /// How many messages may be lost, and how many may come twice.
    lose: u8,
    repeat: u8,
    /// How often a caller may give up.
    abort: u8,
    /// How many transfers may fail.
    fail: u8,
    /// Messages between two engines keep their order.
    ordered: bool,
}

/// What a caller does next with a room.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Side {
    /// Of which life of the room; past the last: nothing more.
    life: u8,
    /// Receiver: 1 once it is open. Sender: chunks sent.
    step: u8,
    /// How it ended, as poll showed it first.
    ended: Option<(State, i32)>,
    /// Receiver: the generation.
    generation: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Flight {
    from: usize,
    to: usize,
    job: Job,
    /// What the sender's caller means by it: the life of its room.
    life: u8,
    landed: bool,
}

#[derive(Clone)]
struct World {
    nodes: Vec<Node>,
    /// From, to, message. Ordered as sent.
    packets: Vec<(usize, usize, Message)>,
    flights: Vec<Flight>,
    /// By node and room.
    sides: Vec<Vec<Side>>,
    /// By receiver: each page's last writer, as sender and life + 1.
    memory: Vec<Vec<(u8, u8)>>,
    left: [u8; 4],
    ticks: u8,
    now: Millis,
    broken: Option<String>,
}

impl World {
    /// What tells two worlds apart.
    fn key(&self) -> u64 {
        let mut hasher = std::hash::DefaultHasher::new();
        for node in &self.nodes {
            let tables = &node.tables;
            for (id, entry) in &tables.rooms {
                (id, &entry.room).hash(&mut hasher);
            }
            tables.parking.rooms.hash(&mut hasher);
            tables.tombstones.hash(&mut hasher);
            tables.unsaid.hash(&mut hasher);
            for peer in tables.peers.iter() {
                peer.ended.hash(&mut hasher);
            }
            let mut delivered: Vec<&u64> = tables.delivered.iter().collect();
            delivered.sort_unstable();
            (tables.next_generation, delivered).hash(&mut hasher);
        }
        let mut packets = self.packets.clone();
        packets.sort_by_key(|(from, to, _)| (*from, *to));
        packets.hash(&mut hasher);
        let mut flights: Vec<u64> = self.flights.iter().map(key_of).collect();
        flights.sort_unstable();
        flights.hash(&mut hasher);
        (&self.sides, &self.memory, self.left, self.ticks, &self.broken).hash(&mut hasher);
        hasher.finish()
    }
}

fn key_of(value: &impl Hash) -> u64 {
    let mut hasher = std::hash::DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

impl Hash for World {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.key());
    }
}

impl PartialEq for World {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} {:?} {:?} {:?} {:?}", self.sides, self.packets, self.flights, self.memory, self.broken)
    }
}

#[derive(Clone, Debug, PartialEq)]
enum Event {
    /// A caller's next call.
    Call(usize, u64),
    /// A caller gives up.
    Abort(usize, u64),
    Deliver(usize),
    Lose(usize),
    /// Delivered, and it comes once more.
    Repeat(usize),
    Land(usize),
    Settle(usize),
    /// The transfer thread sees that the room has failed before it posts.
    Skip(usize),
    Fail(usize),
    /// Nothing is on its way, and some seconds pass.
    Tick,
}

const LOSE: usize = 0;
const REPEAT: usize = 1;
const ABORT: usize = 2;
const FAIL: usize = 3;

impl Small {
    fn is_sender(&self, node: usize) -> bool {
        node < self.senders
    }

    /// Moves what the engines have queued to the network.
    fn pump(&self, world: &mut World) {
        for from in 0..world.nodes.len() {
            let mut sending = Vec::new();
            world.nodes[from].tables.outbox.take(usize::MAX, &mut sending);
            for Outgoing { link, message } in sending {
                world.packets.push((from, node_of(&link.agent), message));
            }
            let jobs: Vec<QueuedJob> = world.nodes[from].tables.jobs[0].drain(..).collect();
            for QueuedJob { job, link, .. } in jobs {
                let life = world.sides[from][job.room as usize - 1].life;
                world.flights.push(Flight { from, to: node_of(&link.agent), job, life, landed: false });
            }
        }
    }

    fn call(&self, world: &mut World, node: usize, room: u64) {
        let now = world.now;
        let side = world.sides[node][room as usize - 1].clone();
        if side.ended.is_some() {
            if world.nodes[node].tables.release(room, now).is_ok() {
                let next = Side { life: side.life + 1, step: 0, ended: None, generation: 0 };
                world.sides[node][room as usize - 1] = next;
                if !self.is_sender(node) {
                    for page in self.pages(room) {
                        world.memory[node - self.senders][page as usize] = (0, 0);
                    }
                }
            }
            return;
        }
        if self.is_sender(node) {
            let number = u64::from(side.step);
            let last = number + 1 == self.chunks;
            let chunk = Chunk {
                pages: [number as i32].into(),
                page_offset: number,
                last,
                aux: None,
                no_aux: true,
                states: Arc::default(),
            };
            let Node { tables, published, .. } = &mut world.nodes[node];
            match tables.send_chunk(room, chunk, published, now) {
                Ok(()) => {}
                // It has failed: poll says why.
                Err(e) if e.code == NIXL_ERR_ROOM_ENDED => {}
                Err(e) => world.broken = Some(format!("send_chunk gave {e}")),
            }
            world.sides[node][room as usize - 1].step += 1;
        } else {
            let senders: Vec<PeerId> = (0..self.senders)
                .filter_map(|sender| {
                    let card = world.nodes[sender].card.clone();
                    world.nodes[node].peer(&card)
                })
                .collect();
            let request = RecvRequest {
                room,
                senders,
                pages: self.pages(room),
                aux: None,
                aux_sender: None,
                states: Vec::new(),
                num_receivers: self.receivers as u32,
                timeout: None,
            };
            let Node { tables, published, .. } = &mut world.nodes[node];
            match tables.recv(request, published, now) {
                Ok(()) => {
                    let side = &mut world.sides[node][room as usize - 1];
                    (side.step, side.generation) = (1, world.nodes[node].tables.next_generation - 1);
                }
                Err(e) => world.broken = Some(format!("recv gave {e}")),
            }
        }
    }

    /// The pages of a room at every receiver.
    fn pages(&self, room: u64) -> Vec<i32> {
        let first = (room - 1) * self.chunks;
        (first..first + self.chunks).map(|page| page as i32).collect()
    }

    fn settle(&self, world: &mut World, flight: &Flight, result: Result<bool>) {
        let num_bytes = u64::from(matches!(result, Ok(true))) * ITEM;
        let settled = Settled { peer: flight.job.peer, chunk: flight.job.chunk, result, num_bytes, num_descriptors: 1 };
        let now = world.now;
        world.nodes[flight.from].tables.with_room(flight.job.room, now, |machine, out| {
            if let Room::Sender(sender) = machine {
                sender.settled(settled, now, out);
            }
        });
    }

    fn land(&self, world: &mut World, i: usize) {
        world.flights[i].landed = true;
        let Flight { from, to, job, life, .. } = world.flights[i].clone();
        let receiver = world.nodes[to].tables.rooms.get(&job.room).map(|entry| &entry.room);
        let promised = matches!(receiver, Some(Room::Receiver(receiver))
            if receiver.generation() == job.generation && !receiver.quiesced());
        if !promised {
            world.broken = Some(format!("bytes of {job:?} land in free pages"));
        }
        let page = job.grant.pages[job.page_offset as usize];
        world.memory[to - self.senders][page as usize] = (from as u8, life + 1);
        let message = Message::Landed {
            room: job.room,
            generation: job.generation,
            slice: 0,
            num_slices: 1,
            chunk: LandedChunk {
                chunk: job.chunk,
                page_offset: job.page_offset,
                num_pages: 1,
                num_bytes: ITEM,
                last: job.last,
            },
        };
        world.packets.push((from, to, message));
    }

    /// What poll shows, and whether it may.
    fn look(&self, world: &mut World) {
        for node in 0..world.nodes.len() {
            for room in 1..=self.rooms {
                let side = world.sides[node][room as usize - 1].clone();
                if side.step == 0 {
                    continue;
                }
                let Ok(view) = world.nodes[node].tables.poll(room) else {
                    world.broken = Some(format!("room {room} is gone at {node}"));
                    continue;
                };
                let seen = (view.state, view.cause.as_ref().map_or(0, |cause| cause.code));
                match side.ended {
                    Some(ended) if ended != seen => {
                        world.broken = Some(format!("room {room} had ended as {ended:?} at {node}, and is {seen:?}"));
                    }
                    None if view.state.ended() => world.sides[node][room as usize - 1].ended = Some(seen),
                    _ => {}
                }
                if view.state == State::Success && self.is_sender(node) {
                    let delivered = (0..self.receivers).all(|receiver| {
                        let side = &world.sides[self.senders + receiver][room as usize - 1];
                        let tables = &world.nodes[self.senders + receiver].tables;
                        // It may have gone on to the next life; then its generation was delivered before that.
                        side.life > world.sides[node][room as usize - 1].life
                            || tables.delivered.contains(&side.generation)
                    });
                    if !delivered {
                        world.broken = Some(format!("room {room} is delivered, says sender {node}"));
                    }
                }
                // With several senders, each has a layer of its own; the last writer's life tells them apart enough.
                if view.state == State::Success && !self.is_sender(node) && self.senders == 1 {
                    for page in self.pages(room) {
                        let (from, life) = world.memory[node - self.senders][page as usize];
                        if (from, life) != (0, side.life + 1) {
                            world.broken = Some(format!("room {room} succeeded at {node} with bytes of life {life}"));
                        }
                    }
                }
            }
        }
    }
}

fn node_of(agent: &str) -> usize {
    agent.strip_prefix("agent ").and_then(|life| life.parse().ok()).unwrap_or(usize::MAX)
}

impl Model for Small {
    type State = World;
    type Action = Event;

    fn init_states(&self) -> Vec<World> {
        let limits = Limits { heartbeat: 1000, liveness: 5000, room: 1 << 40, grant: 1 << 40, max_rooms: 64 };
        let num_nodes = self.senders + self.receivers;
        let num_pages = self.rooms * self.chunks;
        let nodes = (0..num_nodes).map(|i| {
            let (role, layers) = match self.is_sender(i) {
                true => (ROLE_PREFILL, i as u32..i as u32 + 1),
                false => (ROLE_DECODE, 0..self.senders as u32),
            };
            Node::new(&format!("engine {i}"), i as u64, role, layers, num_pages, limits)
        });
        let mut world = World {
            nodes: nodes.collect(),
            packets: Vec::new(),
            flights: Vec::new(),
            sides: vec![vec![Side { life: 0, step: 0, ended: None, generation: 0 }; self.rooms as usize]; num_nodes],
            memory: vec![vec![(0, 0); num_pages as usize]; self.receivers],
            left: [self.lose, self.repeat, self.abort, self.fail],
            // Each loss is mended by asking; so is each answer that is lost.
            ticks: 2 * self.lose,
            now: 0,
            broken: None,
        };
        for i in 0..num_nodes {
            for j in 0..num_nodes {
                if self.is_sender(i) != self.is_sender(j) {
                    let card = world.nodes[j].card.clone();
                    world.nodes[i].connect(&card, 0).unwrap();
                }
            }
        }
        self.pump(&mut world);
        while !world.packets.is_empty() {
            let (from, to, message) = world.packets.remove(0);
            world.nodes[to].tables.receive(&agent(from as u64), message, 0);
            self.pump(&mut world);
        }
        vec![world]
    }

    fn actions(&self, world: &World, events: &mut Vec<Event>) {
        if world.broken.is_some() {
            return;
        }
        for node in 0..world.nodes.len() {
            for room in 1..=self.rooms {
                let side = &world.sides[node][room as usize - 1];
                if side.life >= self.lives {
                    continue;
                }
                let most = if self.is_sender(node) { self.chunks } else { 1 };
                let can_release = side.ended.is_some()
                    && world.nodes[node].tables.rooms.get(&room).is_some_and(|entry| entry.room.quiesced());
                // A router uses a room's id again when both sides have released it.
                let all_here = world.sides.iter().all(|sides| sides[room as usize - 1].life >= side.life);
                if can_release || (side.ended.is_none() && u64::from(side.step) < most && all_here) {
                    events.push(Event::Call(node, room));
                }
                if world.left[ABORT] > 0 && side.step > 0 && side.ended.is_none() {
                    events.push(Event::Abort(node, room));
                }
            }
        }
        for (i, packet) in world.packets.iter().enumerate() {
            let (from, to, _) = packet;
            let first = !world.packets[..i].iter().any(|before| (before.0, before.1) == (*from, *to));
            // Of equal ones any will do.
            if (self.ordered && !first) || world.packets[..i].contains(packet) {
                continue;
            }
            events.push(Event::Deliver(i));
            if world.left[LOSE] > 0 {
                events.push(Event::Lose(i));
            }
            if world.left[REPEAT] > 0 {
                events.push(Event::Repeat(i));
            }
        }
        for (i, flight) in world.flights.iter().enumerate() {
            if flight.landed {
                events.push(Event::Settle(i));
                continue;
            }
            let room = world.nodes[flight.from].tables.rooms.get(&flight.job.room);
            events.push(Event::Land(i));
            if room.is_some_and(|entry| entry.room.state() == State::Failed) {
                events.push(Event::Skip(i));
            }
            if world.left[FAIL] > 0 {
                events.push(Event::Fail(i));
            }
        }
        if world.packets.is_empty() && world.flights.is_empty() && world.ticks > 0 {
            events.push(Event::Tick);
        }
    }

    fn next_state(&self, world: &World, event: Event) -> Option<World> {
        let mut world = world.clone();
        match event {
            Event::Call(node, room) => self.call(&mut world, node, room),
            Event::Abort(node, room) => {
                world.left[ABORT] -= 1;
                let now = world.now;
                let Node { tables, published, .. } = &mut world.nodes[node];
                let cause = Error::new(NIXL_ERR_ABORTED, "given up");
                if let Err(e) = tables.abort(room, cause, published, now) {
                    world.broken = Some(format!("abort gave {e}"));
                }
            }
            Event::Lose(i) => {
                world.left[LOSE] -= 1;
                world.packets.remove(i);
            }
            Event::Deliver(i) | Event::Repeat(i) => {
                let (from, to, message) = world.packets[i].clone();
                if event == Event::Deliver(i) {
                    world.packets.remove(i);
                } else {
                    world.left[REPEAT] -= 1;
                }
                world.nodes[to].tables.receive(&agent(from as u64), message, world.now);
            }
            Event::Land(i) => self.land(&mut world, i),
            Event::Settle(i) => {
                let flight = world.flights.remove(i);
                self.settle(&mut world, &flight, Ok(true));
            }
            Event::Skip(i) => {
                let flight = world.flights.remove(i);
                self.settle(&mut world, &flight, Ok(false));
            }
            Event::Fail(i) => {
                world.left[FAIL] -= 1;
                let flight = world.flights.remove(i);
                self.settle(&mut world, &flight, Err(Error::new(NIXL_ERR_XFER_FAILED, "it failed")));
            }
            Event::Tick => {
                world.ticks -= 1;
                world.now += 20_000;
                let now = world.now;
                for node in &mut world.nodes {
                    node.tables.with_rooms(now, |room| !room.quiesced(), |room, out| room.tick(now, out));
                }
            }
        }
        self.pump(&mut world);
        self.look(&mut world);
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("nothing untrue is ever shown", |_, world: &World| {
                if let Some(broken) = &world.broken {
                    println!("{broken}");
                }
                world.broken.is_none()
            }),
            Property::always("every room ends, and everything is given back", |model: &Small, world: &World| {
                let mut events = Vec::new();
                model.actions(world, &mut events);
                let over = |sides: &Vec<Side>| sides.iter().all(|side| side.life >= model.lives);
                let given_back = |node: &Node| {
                    let tables = &node.tables;
                    tables.in_use.is_empty() && tables.num_pending == 0 && tables.num_unquiesced == 0
                };
                // With no time left to ask once more a lost answer may leave somebody waiting for its time limit.
                !events.is_empty()
                    || (model.lose > 0 && world.ticks == 0)
                    || (world.sides.iter().all(over) && world.nodes.iter().all(given_back))
            }),
            Property::sometimes("a room succeeds everywhere", |_, world: &World| {
                let succeeded = |sides: &Vec<Side>| sides[0].ended.is_some_and(|(state, _)| state == State::Success);
                world.sides.iter().all(succeeded)
            }),
        ]
    }
}

fn explore(name: &str, model: Small) {
    let start = std::time::Instant::now();
    let checker = model.checker().threads(2).spawn_dfs().join();
    let states = checker.unique_state_count();
    println!("{name}: {states} states, {} generated, {:.1?}", checker.state_count(), start.elapsed());
    for (name, path) in checker.discoveries() {
        if !name.starts_with("a room succeeds") {
            println!("not always: {name}");
            for (world, event) in path.into_vec() {
                println!("{event:?} of {world:?}");
            }
        }
    }
    checker.assert_properties();
    assert!(checker.is_done());
}

const ONE: Small = Small {
    senders: 1,
    receivers: 1,
    rooms: 1,
    lives: 1,
    chunks: 1,
    lose: 0,
    repeat: 0,
    abort: 0,
    fail: 0,
    ordered: false,
};

#[test]
fn b4_f1_f7_small_worlds_hold_in_every_order() {
    explore("one room, all faults", Small { lose: 1, repeat: 1, abort: 1, fail: 1, ..ONE });
    explore("one room id used three times", Small { lives: 3, repeat: 1, abort: 2, ..ONE });
    explore("two senders", Small { senders: 2, abort: 1, ..ONE });
    explore("two receivers", Small { receivers: 2, abort: 1, ..ONE });
    let Ok(which) = std::env::var("NIXLKV_MODEL") else { return };
    let (senders, receivers) = (Small { senders: 2, ..ONE }, Small { receivers: 2, ..ONE });
    let (rooms, two) = (Small { rooms: 2, ..ONE }, Small { senders: 2, receivers: 2, ..ONE });
    let large = [
        ("two chunks, all faults", Small { chunks: 2, lose: 1, repeat: 1, abort: 1, fail: 1, ..ONE }),
        ("one room id used twice, all faults", Small { lives: 2, lose: 1, repeat: 1, abort: 1, fail: 1, ..ONE }),
        ("two rooms, in order", Small { lives: 2, abort: 1, ordered: true, ..rooms }),
        ("two rooms, abort", Small { abort: 1, ..rooms }),
        ("two rooms, loss", Small { lose: 1, ..rooms }),
        ("two senders, loss", Small { lose: 1, ..senders }),
        ("two senders, loss and abort", Small { lose: 1, abort: 1, ..senders }),
        ("two senders, repetition and abort", Small { repeat: 1, abort: 1, ..senders }),
        ("two senders, failure and abort", Small { fail: 1, abort: 1, ..senders }),
        ("two senders, id used twice", Small { lives: 2, abort: 1, ..senders }),
        ("two receivers, loss", Small { lose: 1, ..receivers }),
        ("two receivers, repetition and abort", Small { repeat: 1, abort: 1, ..receivers }),
        ("two receivers, failure and abort", Small { fail: 1, abort: 1, ..receivers }),
        ("two receivers, id used twice", Small { lives: 2, abort: 1, ..receivers }),
        ("one room id used twice, two abort, loss", Small { lives: 2, abort: 2, lose: 1, ..ONE }),
        ("two senders, id used twice, two abort", Small { lives: 2, abort: 2, ..senders }),
        ("two receivers, id used twice, two abort", Small { lives: 2, abort: 2, ..receivers }),
        ("two by two", Small { ordered: true, ..two }),
        ("two by two, abort", Small { abort: 1, ordered: true, ..two }),
    ];
    for (name, model) in large {
        if which == "all" || which == name {
            explore(name, model);
        }
    }
}
