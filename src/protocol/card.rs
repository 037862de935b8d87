//! The card: what `nixlkv_export` gives and `nixlkv_connect` takes.
//!
//! Magic `NIXLKV` and two zero bytes (8), wire version (u16), zero (u16), length of the body (u64), CRC-32 of the body
//! (u32), CRC-32 of the 24 bytes before (u32), body; integers little-endian, the body in postcard's format.

use serde::{Deserialize, Serialize};

use crate::error::*;
use crate::layout::{Region, RegionKey, RegionTable};
use crate::nixl::MemoryKind;

use super::WIRE_VERSION;

const MAGIC: [u8; 8] = *b"NIXLKV\0\0";
const HEADER: usize = 28;
/// No card is longer: NIXL's metadata grows by some hundred bytes a region.
const MAX_CARD: usize = 256 << 20;
const MAX_TEXT: usize = 255;

/// An engine as its peers see it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Card {
    /// This life of the engine.
    pub instance: [u8; 16],
    /// The engine's name.
    pub name: String,
    /// Its NIXL agent's name.
    pub agent: String,
    /// Counts the changes of its regions.
    pub revision: u64,
    /// 1 prefill, 2 decode, 3 both.
    pub role: u32,
    /// Element type of its cache.
    pub cache_dtype: String,
    /// Its regions.
    pub regions: RegionTable,
    /// NIXL's own metadata, opaque.
    pub metadata: Vec<u8>,
}

#[derive(Serialize, Deserialize)]
struct CodedRegion {
    key: RegionKey,
    address: u64,
    len: u64,
    item_len: u64,
    vram: bool,
    device: u64,
    local: bool,
}

#[derive(Serialize, Deserialize)]
struct Coded {
    instance: [u8; 16],
    name: String,
    agent: String,
    revision: u64,
    role: u32,
    cache_dtype: String,
    regions: Vec<CodedRegion>,
    metadata: Vec<u8>,
}

/// Encodes a card.
pub fn encode_card(card: &Card) -> Vec<u8> {
    let regions = card.regions.regions().iter().map(|region| CodedRegion {
        key: region.key,
        address: region.address,
        len: region.len,
        item_len: region.item_len,
        vram: region.kind == MemoryKind::Vram,
        device: region.device,
        local: region.local,
    });
    let coded = Coded {
        instance: card.instance,
        name: card.name.clone(),
        agent: card.agent.clone(),
        revision: card.revision,
        role: card.role,
        cache_dtype: card.cache_dtype.clone(),
        regions: regions.collect(),
        metadata: card.metadata.clone(),
    };
    // Serialising into memory cannot fail for these types.
    let body = postcard::to_stdvec(&coded).unwrap_or_default();
    let mut out = Vec::with_capacity(HEADER + body.len());
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&u16::from(WIRE_VERSION).to_le_bytes());
    out.extend_from_slice(&[0, 0]);
    out.extend_from_slice(&(body.len() as u64).to_le_bytes());
    out.extend_from_slice(&crc32fast::hash(&body).to_le_bytes());
    let header = crc32fast::hash(&out);
    out.extend_from_slice(&header.to_le_bytes());
    out.extend_from_slice(&body);
    out
}

/// Decodes a card. The version is looked at before anything that it could have changed.
pub fn decode_card(bytes: &[u8]) -> Result<Card> {
    let invalid =
        |what: &str| Error::new(NIXL_ERR_METADATA_INVALID, format!("the blob ({} bytes) {what}", bytes.len()));
    let Some((magic, rest)) = bytes.split_first_chunk::<8>() else { return Err(invalid("is too short")) };
    if *magic != MAGIC {
        return Err(invalid("does not begin like one of nixlkv"));
    }
    let Some((version, _)) = rest.split_first_chunk::<2>() else { return Err(invalid("is too short")) };
    let version = u16::from_le_bytes(*version);
    if version != u16::from(WIRE_VERSION) {
        fail!(NIXL_ERR_WIRE_VERSION, "wire version: ours is {WIRE_VERSION}, the blob's is {version}");
    }
    let Some((header, body)) = bytes.split_first_chunk::<HEADER>() else { return Err(invalid("is too short")) };
    if header[24..] != crc32fast::hash(&header[..24]).to_le_bytes() {
        return Err(invalid("has an altered header"));
    }
    if header[10..12] != [0, 0] || body.len() > MAX_CARD {
        return Err(invalid("has a header that cannot be read, or is too long"));
    }
    let len = u64::from_le_bytes([
        header[12], header[13], header[14], header[15], header[16], header[17], header[18], header[19],
    ]);
    if len != body.len() as u64 {
        return Err(invalid(&format!("should have a body of {len} bytes and has {}", body.len())));
    }
    if header[20..24] != crc32fast::hash(body).to_le_bytes() {
        return Err(invalid("has been altered: its checksum does not fit"));
    }
    let coded: Coded = match postcard::take_from_bytes(body) {
        Ok((coded, [])) => coded,
        _ => return Err(invalid("has a body that cannot be read")),
    };
    if coded.name.len() > MAX_TEXT || coded.agent.len() > MAX_TEXT || coded.cache_dtype.len() > MAX_TEXT {
        return Err(invalid("has a name that is too long"));
    }
    if !(1..=3).contains(&coded.role) {
        return Err(invalid(&format!("has role {}", coded.role)));
    }
    let regions = coded.regions.iter().map(|region| Region {
        key: region.key,
        address: region.address,
        len: region.len,
        item_len: region.item_len,
        kind: if region.vram { MemoryKind::Vram } else { MemoryKind::Dram },
        device: region.device,
        local: region.local,
    });
    let regions = RegionTable::new(regions.collect()).map_err(|e| invalid(&format!("has a bad region: {}", e.text)))?;
    Ok(Card {
        instance: coded.instance,
        name: coded.name,
        agent: coded.agent,
        revision: coded.revision,
        role: coded.role,
        cache_dtype: coded.cache_dtype,
        regions,
        metadata: coded.metadata,
    })
}
