//! Messages of a connected hostile peer to an engine that also serves a good one.
//!
//! The input is a list of steps, see [`Step`]. After every step the tables are within their bounds, and nothing that is
//! to be moved leaves the regions of the peer that it goes to; at the end the good peer's rooms are as they would be
//! without the other.
#![no_main]

use std::sync::Arc;
use std::sync::OnceLock;

use nixlkv::engine::{Config, Identity, Parked, RecvRequest, Tables, check_card};
use nixlkv::error::{Error, NIXL_ERR_ABORTED, NIXL_ERR_PEER_LOST};
use nixlkv::layout::{Part, Region, RegionKey, RegionTable};
use nixlkv::memory::Published;
use nixlkv::metrics::Counters;
use nixlkv::nixl::MemoryKind;
use nixlkv::protocol::{
    Card, GrantBody, Hello, LandedChunk, Last, MAX_GRANT_INDICES, MAX_MESSAGE_BYTES, Message, decode, encode,
    split_grant,
};
use nixlkv::room::{Chunk, PeerId, Settled, State};
use nixlkv_fuzz::{Input, frame, heap};

/// Pages of our regions, and of the good peer's.
const PAGES: u64 = 16;
/// Slots of aux and state, at everybody's.
const SLOTS: u64 = 8;
const ITEM: u64 = 64;
const MAX_ROOMS: usize = 12;
/// Indices that grants for rooms to come may have in all.
const MAX_PARKED_INDICES: usize = 1 << 24;
/// Rooms of the good peer: one to it, one from it. The others that we open are `ROOMS..ROOMS + 4`.
const TO_GOOD: u64 = 1;
const FROM_GOOD: u64 = 2;
const ROOMS: u64 = 10;
const HOSTILE: [u8; 16] = *b"hostile instance";
const GOOD: [u8; 16] = *b"a good instance.";
const OURS: [u8; 16] = *b"our own instance";

fn regions(base: u64, num_pages: u64) -> RegionTable {
    let region = |i: u64, key, num_items: u64| Region {
        key,
        address: base + (i << 44),
        len: ITEM * num_items,
        item_len: ITEM,
        kind: MemoryKind::Dram,
        device: 0,
        local: false,
    };
    RegionTable::new(vec![
        region(1, RegionKey::Kv { layer: 0, part: Part::K }, num_pages),
        region(2, RegionKey::Kv { layer: 0, part: Part::V }, num_pages),
        region(3, RegionKey::Aux { array: 0 }, SLOTS),
        region(4, RegionKey::State { group: 0, tensor: 0 }, SLOTS),
    ])
    .unwrap()
}

fn agent(instance: &[u8; 16]) -> String {
    String::from_utf8_lossy(instance).into_owned()
}

fn card(instance: [u8; 16], base: u64, num_pages: u64) -> Card {
    Card {
        instance,
        name: agent(&instance),
        agent: agent(&instance),
        revision: 1,
        role: 3,
        cache_dtype: String::new(),
        regions: regions(base, num_pages),
        metadata: Vec::new(),
    }
}

fn config() -> Arc<Config> {
    static CONFIG: OnceLock<Arc<Config>> = OnceLock::new();
    let config = || {
        Arc::new(Config {
            role: 3,
            name: None,
            nixl_library: None,
            backend: "UCX".into(),
            backend_params: Vec::new(),
            cache_dtype: String::new(),
            num_workers: 1,
            queue_depth: 64,
            max_rooms: MAX_ROOMS,
            log: None,
            create_timeout: 1000,
            connect_timeout: 10_000,
            grant_timeout: 60_000,
            room_timeout: 1 << 40,
            heartbeat_interval: 1000,
            liveness_limit: 5000,
            stall_timeout: 60_000,
        })
    };
    CONFIG.get_or_init(config).clone()
}

struct World {
    tables: Tables,
    published: Published,
    hostile: PeerId,
    good: PeerId,
    now: u64,
    /// Pages that the hostile peer claims to have.
    claimed: u64,
}

impl World {
    fn new(claimed: u64) -> Self {
        let identity = Identity { name: "ours".into(), instance: OURS };
        let mut tables = Tables::new(identity, config(), Arc::new(Counters::default()), 1);
        tables.revision = 1;
        let published = Published { table: Arc::new(regions(0, PAGES)), revision: 1 };
        let mut world = Self { tables, published, hostile: 0, good: 0, now: 1000, claimed };
        world.good = world.connect(card(GOOD, 1 << 60, PAGES));
        world.hostile = world.connect(card(HOSTILE, 1 << 61, claimed));
        for (instance, peer) in [(GOOD, world.good), (HOSTILE, world.hostile)] {
            let hello = world.hello(peer, 1);
            world.receive(&instance, hello);
        }
        world.open_for_good();
        world
    }

    fn connect(&mut self, card: Card) -> PeerId {
        let mappings = check_card(&card, 3, "", &self.published.table).unwrap();
        self.tables.connected(card, mappings, self.published.revision, self.now)
    }

    /// What a peer says when it has heard our hello.
    fn hello(&self, peer: PeerId, connection: u64) -> Message {
        Message::Hello(Hello {
            revision: 1,
            known_revision: 1,
            known_instance: OURS,
            connection,
            known_connection: self.tables.peers.get(peer).map_or(0, |peer| peer.connection),
            reply: false,
            oldest_generation: 0,
        })
    }

    fn receive(&mut self, instance: &[u8; 16], message: Message) {
        self.tables.receive(&agent(instance), message, self.now);
    }

    /// The good peer's rooms: what it granted and what we granted it, half of each on its way.
    fn open_for_good(&mut self) {
        let pages: Vec<i32> = (0..8).collect();
        let grant = GrantBody { pages: pages.clone(), aux: None, aux_owner: false, states: vec![], num_receivers: 1 };
        for message in split_grant(TO_GOOD, 70, (1, 1), &grant) {
            self.receive(&GOOD, message);
        }
        self.send(TO_GOOD, 0, 4, false).unwrap();
        self.recv(FROM_GOOD, self.good, pages).unwrap();
        self.receive(&GOOD, good_landed(0, 0, 4, None));
    }

    fn send(&mut self, room: u64, offset: u64, num_pages: u64, last: bool) -> Result<(), Error> {
        let pages: Vec<i32> = (offset..offset + num_pages).map(|page| page as i32).collect();
        let chunk =
            Chunk { pages: pages.into(), page_offset: offset, last, aux: None, no_aux: true, states: Arc::default() };
        self.tables.send_chunk(room, chunk, &self.published, self.now)
    }

    fn recv(&mut self, room: u64, sender: PeerId, pages: Vec<i32>) -> Result<(), Error> {
        let request = RecvRequest {
            room,
            senders: vec![sender],
            pages,
            aux: None,
            aux_sender: None,
            states: Vec::new(),
            num_receivers: 1,
            timeout: None,
        };
        self.tables.recv(request, &self.published, self.now)
    }

    /// A job comes to its end: in success, in failure, or given up.
    fn settle(&mut self, how: u8) {
        let Some(queued) = self.tables.jobs[0].pop_front() else { return };
        // The good peer's transfers work.
        let how = if queued.job.room == TO_GOOD { 0 } else { how };
        let result = match how % 3 {
            0 => Ok(true),
            1 => Ok(false),
            _ => Err(Error::new(NIXL_ERR_PEER_LOST, "a transfer failed")),
        };
        let num_bytes = queued.job.pages.len() as u64 * 2 * ITEM;
        let settled = Settled { peer: queued.job.peer, chunk: queued.job.chunk, result, num_bytes, num_descriptors: 2 };
        self.tables.with_room(queued.job.room, self.now, |room, out| match room {
            nixlkv::room::Room::Sender(sender) => sender.settled(settled, self.now, out),
            nixlkv::room::Room::Receiver(_) => panic!("a job of a room that we receive"),
        });
    }

    fn drain_outbox(&mut self) {
        let mut sending = Vec::new();
        self.tables.outbox.take(usize::MAX, &mut sending);
        for outgoing in sending {
            let frame = encode(&outgoing.message);
            assert!(frame.len() <= MAX_MESSAGE_BYTES);
            assert!(decode(&frame).is_ok());
        }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let room = |input: &mut Input<'_>| ROOMS + u64::from(input.u8() % 4);
        match input.u8() % 16 {
            0..=5 => {
                let len = usize::from(input.u8());
                if let Ok(message) = decode(&frame(input.bytes(len))) {
                    self.receive(&HOSTILE, message);
                }
            }
            6 => {
                let len = usize::from(input.u8());
                match decode(input.bytes(len)) {
                    Ok(message) => self.receive(&HOSTILE, message),
                    Err(e) => self.tables.malformed(&agent(&HOSTILE), len, &e, self.now),
                }
            }
            7 => {
                // Time passes; the good peer and the other are heard.
                self.now += u64::from(input.u16() % 900);
                self.receive(&GOOD, Message::Pong { sequence: 0 });
                self.tables.tick(self.now, 20);
                self.drain_outbox();
            }
            8 => {
                let (room, how) = (room(input), input.u8());
                let _ = self.send(room, u64::from(how & 7), u64::from(how >> 4 & 7), how & 8 != 0);
            }
            9 => {
                let (room, first, num) = (room(input), input.u8() % 16, input.u8() % 8);
                let pages = (0..num).map(|i| i32::from(first + i) % 16).collect();
                let _ = self.recv(room, self.hostile, pages);
            }
            10 => {
                let room = room(input);
                let _ = self.tables.abort(room, Error::new(NIXL_ERR_ABORTED, "given up"), &self.published, self.now);
            }
            11 => {
                let _ = self.tables.release(room(input), self.now);
            }
            12 => self.settle(input.u8()),
            13 => self.drain_outbox(),
            14 => {
                // Its connection breaks, and it connects again.
                self.tables.broke(self.hostile, Error::new(NIXL_ERR_PEER_LOST, "it broke"), self.now);
                self.drain_outbox();
                let closed = self.tables.ready_to_close();
                self.tables.closed(&closed, self.now);
                self.hostile = self.connect(card(HOSTILE, 1 << 61, self.claimed));
            }
            _ => {
                // The right hello, which a random one does not find.
                let hello = self.hello(self.hostile, u64::from(input.u8()));
                self.receive(&HOSTILE, hello);
            }
        }
    }

    /// What must hold at any time.
    fn check(&self) {
        let tables = &self.tables;
        let parked = tables.parking.len();
        assert!(parked <= MAX_ROOMS, "{parked} parked");
        assert!(tables.assemblies.len() <= 2 * 64, "{} incomplete grants", tables.assemblies.len());
        assert!(tables.tombstones.len() <= MAX_ROOMS && tables.rooms.len() <= MAX_ROOMS);
        assert!(tables.num_active <= tables.rooms.len() && tables.num_unquiesced <= tables.rooms.len());
        for queued in &tables.jobs[0] {
            let (claimed, mapping) = if queued.job.peer == self.good { (PAGES, true) } else { (self.claimed, false) };
            let grant = &queued.job.grant;
            check_grant(grant, claimed);
            assert!(!mapping || queued.mapping.is_some());
            let end = queued.job.page_offset as usize + queued.job.pages.len();
            assert!(end <= grant.pages.len(), "pages that were not granted");
        }
        for item in (0..2 * ROOMS).flat_map(|room| tables.parking.get(room)) {
            // The good peer grants nothing early.
            if let Parked::Grant { body: grant, .. } = &item.item {
                check_grant(grant, self.claimed);
            }
        }
        for room in [TO_GOOD, FROM_GOOD] {
            let view = tables.poll(room).unwrap();
            assert!(view.cause.is_none() && view.state != State::Success, "room {room}: {view:?}");
        }
        for room in ROOMS..ROOMS + 4 {
            let _ = tables.poll(room);
        }
    }

    /// The good peer's rooms come to their good end.
    fn finish(&mut self) {
        self.send(TO_GOOD, 4, 4, true).unwrap();
        while !self.tables.jobs[0].is_empty() {
            self.settle(0);
        }
        self.receive(&GOOD, Message::Done { room: TO_GOOD, generation: 70 });
        let last = Last { num_chunks: 2, has_aux: false, num_state_groups: 0 };
        self.receive(&GOOD, good_landed(1, 4, 4, Some(last)));
        for room in [TO_GOOD, FROM_GOOD] {
            let view = self.tables.poll(room).unwrap();
            assert!(view.state == State::Success && view.quiesced && view.num_pages == 8, "room {room}: {view:?}");
            self.tables.release(room, self.now).unwrap();
        }
    }
}

/// A grant that we took names nothing outside the regions that its peer claims.
fn check_grant(grant: &GrantBody, claimed: u64) {
    let outside = |index: &i32, len: u64| u64::try_from(*index).map_or(true, |index| index >= len);
    assert!(!grant.pages.iter().any(|page| outside(page, claimed)), "a page outside the receiver's regions");
    assert!(!grant.aux.is_some_and(|aux| outside(&aux, SLOTS)), "an aux slot outside");
    for (group, slots) in &grant.states {
        assert!(slots.is_empty() || (*group == 0 && !slots.iter().any(|slot| outside(slot, SLOTS))), "a state slot");
    }
}

/// A chunk of the good peer's, in one slice, for our first life of a room.
fn good_landed(chunk: u32, page_offset: u64, num_pages: u64, last: Option<Last>) -> Message {
    let chunk = LandedChunk { chunk, page_offset, num_pages, num_bytes: num_pages * 2 * ITEM, last };
    Message::Landed { room: FROM_GOOD, generation: 1, slice: 0, num_slices: 1, chunk }
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    // As many pages as ours, fewer, more, or more than there is memory in the world.
    let claimed = [PAGES, 4, 64, 1 << 12, 1 << 20, 1 << 38][usize::from(input.u8()) % 6];
    let len = data.len();
    let (mut world, _, held) = heap(|| {
        let mut world = World::new(claimed);
        while !input.is_over() {
            world.step(&mut input);
            world.check();
        }
        world
    });
    // What a peer makes us keep is bounded, whatever a few of its bytes stand for: grants for rooms to come, a grant
    // for each room of ours that it may be a receiver of, and little else. A list may have twice the place it needs.
    let grant = 8 * (claimed + SLOTS).min(MAX_GRANT_INDICES) as usize;
    let parked = (MAX_ROOMS * grant).min(8 * MAX_PARKED_INDICES);
    let most = parked + 4 * grant + (256 << 10) + 256 * len;
    assert!(held <= most, "{held} bytes of heap after {len} of input that claims {claimed} pages");
    world.finish();
});
