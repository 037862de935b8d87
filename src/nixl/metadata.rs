//! A careful look into NIXL's metadata before NIXL takes it. NIXL can add memory to a peer it knows. But when memory
//! it knows has changed, or when it gets stuck in a bad list, it drops the peer and keeps the connection, so that the
//! peer can never be loaded again. And `nixl_sys` panics on an agent name that is not UTF-8.

use std::collections::{BTreeMap, btree_map};

/// A block's address, length and device, as NIXL serialises them.
const BLOCK_LEN: usize = 24;

/// The parts of a metadata blob that decide how it can be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Metadata {
    /// The agent's name.
    pub agent: String,
    /// The rest, when its form is the one known here.
    body: Option<Body>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Body {
    /// Backend and address, in the blob's order.
    connections: Vec<(Vec<u8>, Vec<u8>)>,
    /// The keys to each block.
    blocks: BTreeMap<BlockId, Vec<u8>>,
}

/// Backend, kind of memory, and the block itself, all as NIXL serialises them.
type BlockId = (Vec<u8>, Vec<u8>, Vec<u8>);

impl Metadata {
    /// Reads a blob. `None` when even the agent's name can't be read.
    pub(super) fn parse(blob: &[u8]) -> Option<Self> {
        let mut reader = Reader { rest: blob.strip_prefix(b"nixlSerDes|")? };
        let agent = String::from_utf8(reader.field(b"Agent")?.to_vec()).ok()?;
        if agent.is_empty() || agent.contains('\0') {
            return None;
        }
        Some(Self { agent, body: Body::parse(&mut reader) })
    }

    /// Whether all of it could be read. If not, it is broken or of another version.
    pub(super) fn is_known(&self) -> bool {
        self.body.is_some()
    }

    /// Whether this is `older` with memory added to it, or the same.
    pub(super) fn extends(&self, older: &Self) -> bool {
        match (&self.body, &older.body) {
            (Some(new), Some(old)) => {
                self.agent == older.agent
                    && new.connections == old.connections
                    && old.blocks.iter().all(|(block, keys)| new.blocks.get(block) == Some(keys))
            }
            _ => false,
        }
    }
}

impl Body {
    fn parse(reader: &mut Reader<'_>) -> Option<Self> {
        let mut body = Body { connections: Vec::new(), blocks: BTreeMap::new() };
        for _ in 0..reader.count(b"Conns")? {
            body.connections.push((reader.field(b"t")?.to_vec(), reader.field(b"c")?.to_vec()));
        }
        if reader.field(b"")? != b"MemSection" {
            return None;
        }
        for _ in 0..reader.count(b"nixlSecElms")? {
            let backend = reader.field(b"bknd")?.to_vec();
            if reader.field(b"nixlDList")? != b"nixlSDList" {
                return None;
            }
            let kind = reader.field(b"t")?.to_vec();
            let num_blocks = reader.count(b"n")?;
            if num_blocks == 0 {
                return None;
            }
            for _ in 0..num_blocks {
                let (block, keys) = reader.field(b"")?.split_at_checked(BLOCK_LEN)?;
                match body.blocks.entry((backend.clone(), kind.clone(), block.to_vec())) {
                    btree_map::Entry::Vacant(entry) => entry.insert(keys.to_vec()),
                    btree_map::Entry::Occupied(entry) if entry.get() == keys => continue,
                    btree_map::Entry::Occupied(_) => return None,
                };
            }
        }
        reader.rest.is_empty().then_some(body)
    }
}

/// NIXL's serialised form: tag, length in 8 bytes, bytes, a bar.
struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn field(&mut self, tag: &[u8]) -> Option<&'a [u8]> {
        let rest = self.rest.strip_prefix(tag)?;
        let (len, rest) = rest.split_first_chunk::<8>()?;
        let len = usize::try_from(u64::from_ne_bytes(*len)).ok()?;
        if rest.get(len) != Some(&b'|') {
            return None;
        }
        self.rest = rest.get(len + 1..)?;
        rest.get(..len)
    }

    fn count(&mut self, tag: &[u8]) -> Option<u64> {
        Some(u64::from_ne_bytes(self.field(tag)?.try_into().ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(blob: &mut Vec<u8>, tag: &str, bytes: &[u8]) {
        blob.extend(tag.as_bytes());
        blob.extend((bytes.len() as u64).to_ne_bytes());
        blob.extend(bytes);
        blob.push(b'|');
    }

    fn blob(agent: &[u8], address: &[u8], blocks: &[&str]) -> Vec<u8> {
        let mut blob = b"nixlSerDes|".to_vec();
        put(&mut blob, "Agent", agent);
        put(&mut blob, "Conns", &1u64.to_ne_bytes());
        put(&mut blob, "t", b"UCX");
        put(&mut blob, "c", address);
        put(&mut blob, "", b"MemSection");
        put(&mut blob, "nixlSecElms", &1u64.to_ne_bytes());
        put(&mut blob, "bknd", b"UCX");
        put(&mut blob, "nixlDList", b"nixlSDList");
        put(&mut blob, "t", &0u32.to_ne_bytes());
        put(&mut blob, "n", &(blocks.len() as u64).to_ne_bytes());
        for block in blocks {
            put(&mut blob, "", block.as_bytes());
        }
        blob
    }

    const A: &str = "address, length, deviceAkeys";
    const A_CHANGED: &str = "address, length, deviceAother keys";
    const B: &str = "address, length, deviceBkeys";
    const C: &str = "address, length, deviceC";

    fn parse(agent: &[u8], address: &[u8], blocks: &[&str]) -> Metadata {
        Metadata::parse(&blob(agent, address, blocks)).unwrap()
    }

    #[test]
    fn only_added_memory_extends() {
        let old = parse(b"peer", b"1|2", &[A, B]);
        assert_eq!(old.agent, "peer");
        assert!(old.extends(&old) && old.is_known());
        assert!(parse(b"peer", b"1|2", &[C, B, A]).extends(&old));
        assert!(!parse(b"peer", b"1|2", &[A]).extends(&old));
        assert!(!parse(b"peer", b"1|2", &[A_CHANGED, B]).extends(&old));
        assert!(!parse(b"peer", b"1|3", &[A, B]).extends(&old));
        assert!(!parse(b"other", b"1|2", &[A, B]).extends(&old));
    }

    #[test]
    fn bad_blobs_are_refused_or_known_to_be_odd() {
        let whole = blob(b"peer", b"address", &[A, B]);
        let good = Metadata::parse(&whole).unwrap();
        for len in 0..whole.len() {
            if let Some(short) = Metadata::parse(&whole[..len]) {
                assert!(short.body.is_none() && !good.extends(&short) && !short.extends(&good), "{len}");
            }
        }
        assert!(Metadata::parse(&blob(b"p\xffr", b"x", &[])).is_none());
        assert!(Metadata::parse(&blob(b"", b"x", &[])).is_none());
        assert!(Metadata::parse(&blob(b"p\0r", b"x", &[])).is_none());
        for odd in [&[A, A_CHANGED][..], &["too short"], &[]] {
            assert!(!parse(b"peer", b"x", odd).is_known(), "{odd:?}");
        }
        assert!(parse(b"peer", b"x", &[A, A]).is_known());
        let mut huge = b"nixlSerDes|Agent".to_vec();
        huge.extend(u64::MAX.to_ne_bytes());
        assert!(Metadata::parse(&huge).is_none());
    }
}
