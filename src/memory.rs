//! Registration: the checks on a batch of regions, and the table of what is registered.

use std::sync::Arc;

use procfs::process::{LimitValue, MMPermissions, MemoryMap, Process};

use crate::cuda;
use crate::error::*;
use crate::fault;
use crate::layout::{Part, Region, RegionKey, RegionTable};
use crate::nixl::{Agent, Block, MemoryKind};

/// A region as the caller describes it.
#[derive(Debug, Clone)]
pub struct NewRegion {
    /// What it is.
    pub key: RegionKey,
    /// First byte.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// Bytes per page or slot.
    pub item_len: u64,
    /// Kind of memory; `None`: ask the CUDA driver.
    pub kind: Option<MemoryKind>,
    /// CUDA device.
    pub device: u64,
    /// No peer sends it.
    pub local: bool,
}

struct Registered {
    id: u64,
    region: Region,
    token: u64,
}

/// What is registered with NIXL.
#[derive(Default)]
pub struct Memory {
    registered: Vec<Registered>,
    next_id: u64,
    revision: u64,
}

/// How our memory is used: a sender's must be readable, a receiver's writable too.
#[derive(Debug, Clone, Copy)]
pub struct Access {
    /// Peers write into it.
    pub write: bool,
}

impl Memory {
    /// Counts the changes of the table.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// The table as peers see it.
    pub fn table(&self) -> Result<RegionTable> {
        RegionTable::new(self.registered.iter().map(|entry| entry.region).collect())
    }

    /// Registers a batch: all of it, or nothing. Returns the ids in the batch's order.
    pub fn register(&mut self, agent: &dyn Agent, batch: &[NewRegion], access: Access) -> Result<Vec<u64>> {
        let regions = self.check(batch, access)?;
        let mut done: Vec<Registered> = Vec::with_capacity(regions.len());
        for (i, region) in regions.into_iter().enumerate() {
            let block = Block { address: region.address, len: region.len, kind: region.kind, device: region.device };
            let result = if fault::hit(register_point(&region.key)) {
                Err(crate::nixl::Failure {
                    status: crate::nixl::FailureStatus::Backend,
                    text: "registration refused by an armed fault point".into(),
                })
            } else {
                agent.register(&block)
            };
            match result {
                Ok(token) => {
                    self.next_id += 1;
                    done.push(Registered { id: self.next_id, region, token });
                }
                Err(failure) => {
                    for entry in done {
                        let _ = agent.deregister(entry.token);
                    }
                    let code = match region.key {
                        RegionKey::Kv { .. } => NIXL_ERR_REGISTER_KV,
                        RegionKey::Aux { .. } => NIXL_ERR_REGISTER_AUX,
                        RegionKey::State { .. } => NIXL_ERR_REGISTER_STATE,
                    };
                    let limit = locked_memory_note(region.len);
                    fail_with!(code, "region {i} ({}, {} bytes): {failure}{limit}", region.key, region.len);
                }
            }
        }
        let ids = done.iter().map(|entry| entry.id).collect();
        self.registered.extend(done);
        self.revision += 1;
        Ok(ids)
    }

    /// Takes regions out of the table by id: all of them, or none when one is unknown or listed twice. Their NIXL
    /// registrations are the caller's to drop.
    pub fn take(&mut self, ids: &[u64]) -> Result<Vec<u64>> {
        for (i, id) in ids.iter().enumerate() {
            if ids[..i].contains(id) || !self.registered.iter().any(|entry| entry.id == *id) {
                fail!(NIXL_ERR_REGION_UNKNOWN, "region_ids[{i}] = {id} is not registered, or listed twice");
            }
        }
        let (taken, kept) = std::mem::take(&mut self.registered).into_iter().partition(|entry| ids.contains(&entry.id));
        self.registered = kept;
        self.revision += 1;
        let taken: Vec<Registered> = taken;
        Ok(taken.iter().map(|entry| entry.token).collect())
    }

    /// Drops NIXL registrations that [`Memory::take`] gave.
    pub fn drop_registrations(&mut self, agent: &dyn Agent, tokens: Vec<u64>) -> Result<()> {
        let failures: Vec<String> =
            tokens.into_iter().filter_map(|token| agent.deregister(token).err()).map(|f| f.to_string()).collect();
        if !failures.is_empty() {
            fail!(NIXL_ERR_INTERNAL, "NIXL could not deregister: {}", failures.join("; "));
        }
        Ok(())
    }

    /// Checks a whole batch and resolves the memory kinds. Registers nothing.
    fn check(&self, batch: &[NewRegion], access: Access) -> Result<Vec<Region>> {
        let mut regions: Vec<Region> = Vec::with_capacity(batch.len());
        let maps = Maps::read();
        for (i, new) in batch.iter().enumerate() {
            check_numbers(i, new)?;
            let (kind, device) = match new.kind {
                None => cuda::detect(new.address),
                Some(MemoryKind::Vram) => {
                    cuda::check_device(new.device)
                        .map_err(|e| Error::new(e.code, format!("region {i}: {}", e.text)))?;
                    (MemoryKind::Vram, new.device)
                }
                Some(MemoryKind::Dram) => (MemoryKind::Dram, 0),
            };
            if kind == MemoryKind::Dram {
                maps.check(i, new, access)?;
            }
            regions.push(Region {
                key: new.key,
                address: new.address,
                len: new.len,
                item_len: new.item_len,
                kind,
                device,
                local: new.local,
            });
        }
        self.check_conflicts(&regions)?;
        Ok(regions)
    }

    /// Refuses overlaps and double keys, within the batch and with what is registered, in n log n.
    fn check_conflicts(&self, regions: &[Region]) -> Result<()> {
        let name = |i: usize| match i.checked_sub(regions.len()) {
            None => format!("region {i}"),
            Some(j) => format!("the registered region {}", self.registered[j].id),
        };
        let all: Vec<&Region> = regions.iter().chain(self.registered.iter().map(|entry| &entry.region)).collect();
        let mut order: Vec<usize> = (0..all.len()).collect();
        order.sort_unstable_by_key(|&i| (all[i].key, std::cmp::Reverse(i)));
        for pair in order.windows(2) {
            let (a, b) = (pair[1].min(pair[0]), pair[1].max(pair[0]));
            if all[a].key == all[b].key {
                fail!(NIXL_ERR_REGION_DUPLICATE, "{} and {} are both {}", name(a), name(b), all[a].key);
            }
        }
        let mut fused = std::collections::HashMap::new();
        for (i, region) in all.iter().enumerate() {
            if let RegionKey::Kv { layer, part } = region.key {
                let (first, is_fused) = *fused.entry(layer).or_insert((i, part == Part::Fused));
                if is_fused != (part == Part::Fused) {
                    fail!(
                        NIXL_ERR_REGION_DUPLICATE,
                        "{} is {} and {} is {}: a layer is either fused or K and V",
                        name(first),
                        all[first].key,
                        name(i),
                        region.key
                    );
                }
            }
        }
        order.sort_unstable_by_key(|&i| all[i].address);
        for pair in order.windows(2) {
            let (low, high) = (all[pair[0]], all[pair[1]]);
            if high.address - low.address < low.len {
                fail!(
                    NIXL_ERR_REGION_OVERLAP,
                    "{} [{:#x}, +{:#x}) and {} [{:#x}, +{:#x}) overlap",
                    name(pair[0]),
                    low.address,
                    low.len,
                    name(pair[1]),
                    high.address,
                    high.len
                );
            }
        }
        Ok(())
    }
}

/// What can be said of an entry from its numbers alone.
fn check_numbers(i: usize, new: &NewRegion) -> Result<()> {
    let NewRegion { address, len, item_len, .. } = *new;
    if address == 0 || len == 0 || item_len == 0 {
        fail!(NIXL_ERR_REGION_EMPTY, "region {i}: address {address:#x}, len {len}, item_len {item_len}");
    }
    if !len.is_multiple_of(item_len) {
        fail!(NIXL_ERR_REGION_ITEM, "region {i}: len {len} is not a multiple of item_len {item_len}");
    }
    if address.checked_add(len).is_none() {
        fail!(NIXL_ERR_REGION_WRAPS, "region {i}: address {address:#x} plus len {len:#x} passes 2^64");
    }
    Ok(())
}

fn register_point(key: &RegionKey) -> &'static str {
    match key {
        RegionKey::Kv { .. } => "register_kv",
        RegionKey::Aux { .. } => "register_aux",
        RegionKey::State { .. } => "register_state",
    }
}

/// The process's mappings at one moment; `None` where the kernel does not tell.
struct Maps(Option<Vec<MemoryMap>>);

impl Maps {
    fn read() -> Self {
        Self(Process::myself().and_then(|process| process.maps()).ok().map(|maps| maps.0))
    }

    /// Refuses a DRAM region of which a byte is not mapped, or not with the access it needs.
    fn check(&self, i: usize, new: &NewRegion, access: Access) -> Result<()> {
        let Some(maps) = &self.0 else { return Ok(()) };
        let end = new.address.saturating_add(new.len);
        let mut at = new.address;
        let first = maps.partition_point(|map| map.address.1 <= at);
        for map in &maps[first..] {
            if at >= end || map.address.0 > at {
                break;
            }
            let perms = map.perms;
            if !perms.contains(MMPermissions::READ) || (access.write && !perms.contains(MMPermissions::WRITE)) {
                let what = if perms.contains(MMPermissions::READ) { "not writable" } else { "not readable" };
                fail!(NIXL_ERR_REGION_UNMAPPED, "region {i}: the memory at {at:#x} is {what}");
            }
            at = map.address.1;
        }
        if at < end {
            fail!(
                NIXL_ERR_REGION_UNMAPPED,
                "region {i} [{:#x}, +{:#x}): the memory at {at:#x} is not mapped",
                new.address,
                new.len
            );
        }
        Ok(())
    }
}

/// Where the locked-memory limit can be the cause of a refusal: the limit and the need.
fn locked_memory_note(need: u64) -> String {
    let limit =
        Process::myself().and_then(|process| process.limits()).map(|limits| limits.max_locked_memory.soft_limit);
    match limit {
        Ok(LimitValue::Value(limit)) if limit < need => {
            format!("; the locked-memory limit is {limit} bytes and the region needs {need}: raise it with ulimit -l")
        }
        _ => String::new(),
    }
}

/// The table and its revision as the rest of the engine shares it.
#[derive(Debug, Clone)]
pub struct Published {
    /// The regions.
    pub table: Arc<RegionTable>,
    /// Counts the changes.
    pub revision: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(key: RegionKey, address: u64, len: u64, item_len: u64) -> NewRegion {
        NewRegion { key, address, len, item_len, kind: Some(MemoryKind::Dram), device: 0, local: false }
    }

    fn kv(layer: u32, address: u64, len: u64) -> NewRegion {
        region(RegionKey::Kv { layer, part: Part::Fused }, address, len, 64)
    }

    fn check(batch: &[NewRegion]) -> i32 {
        Memory::default().check(batch, Access { write: true }).map_or_else(|e| e.code, |_| 0)
    }

    #[test]
    fn d2_overlap_within_the_batch_is_refused_and_adjacent_is_fine() {
        let buffer = vec![0u8; 4096];
        let base = buffer.as_ptr() as u64;
        assert_eq!(check(&[kv(0, base, 128), kv(1, base + 64, 128)]), NIXL_ERR_REGION_OVERLAP);
        assert_eq!(check(&[kv(0, base, 128), kv(1, base + 128, 128)]), 0);
        assert_eq!(check(&[kv(0, base, 128), kv(0, base + 128, 128)]), NIXL_ERR_REGION_DUPLICATE);
    }

    #[test]
    fn c6_numbers_are_checked_and_the_index_is_named() {
        let buffer = vec![0u8; 4096];
        let base = buffer.as_ptr() as u64;
        let mut batch: Vec<_> = (0..10).map(|i| kv(i, base + u64::from(i) * 64, 64)).collect();
        batch[4].len = 0;
        let error = Memory::default().check(&batch, Access { write: true }).unwrap_err();
        assert_eq!(error.code, NIXL_ERR_REGION_EMPTY);
        assert!(error.text.contains("region 4"), "{error}");
        assert_eq!(check(&[kv(0, base, 100)]), NIXL_ERR_REGION_ITEM);
        assert_eq!(check(&[kv(0, u64::MAX - 63, 128)]), NIXL_ERR_REGION_WRAPS);
        assert_eq!(check(&[kv(0, 0, 128)]), NIXL_ERR_REGION_EMPTY);
    }

    #[test]
    fn d2_unmapped_memory_is_refused() {
        assert_eq!(check(&[kv(0, 64, 64)]), NIXL_ERR_REGION_UNMAPPED);
        // Text of this very test binary: readable, not writable.
        let code = d2_unmapped_memory_is_refused as fn() as usize as u64 & !63;
        assert_eq!(check(&[kv(0, code, 64)]), NIXL_ERR_REGION_UNMAPPED);
    }

    #[test]
    fn a_layer_is_fused_or_split() {
        let buffer = vec![0u8; 4096];
        let base = buffer.as_ptr() as u64;
        let k = region(RegionKey::Kv { layer: 0, part: Part::K }, base + 64, 64, 64);
        assert_eq!(check(&[kv(0, base, 64), k]), NIXL_ERR_REGION_DUPLICATE);
    }
}
