//! Which positions of a room's page list have been covered, as disjoint ranges.

/// Disjoint ranges `start -> end`, neighbours merged. In order of arrival this is one entry.
#[derive(Debug, Default, Clone, Hash)]
pub struct Positions {
    ranges: std::collections::BTreeMap<u64, u64>,
}

impl Positions {
    /// Adds `[start, start + len)`. `Err` gives the start of the range it overlaps, or that it wraps; nothing changes
    /// then. An empty range is always fine.
    pub fn add(&mut self, start: u64, len: u64) -> Result<(), u64> {
        let Some(end) = start.checked_add(len) else { return Err(start) };
        if len == 0 {
            return Ok(());
        }
        if let Some(found) = self.overlaps(start, end) {
            return Err(found);
        }
        let mut merged = (start, end);
        if let Some((&before, &before_end)) = self.ranges.range(..start).next_back()
            && before_end == start
        {
            merged.0 = before;
        }
        if let Some(&after_end) = self.ranges.get(&end) {
            self.ranges.remove(&end);
            merged.1 = after_end;
        }
        self.ranges.insert(merged.0, merged.1);
        Ok(())
    }

    /// The start of a range that `[start, end)` overlaps.
    pub fn overlaps(&self, start: u64, end: u64) -> Option<u64> {
        if start >= end {
            return None;
        }
        let (&found, &found_end) = self.ranges.range(..end).next_back()?;
        (found_end > start).then_some(found)
    }

    /// The first position below `len` that is not covered.
    pub fn first_gap(&self, len: u64) -> Option<u64> {
        let covered = self.ranges.get(&0).copied().unwrap_or(0);
        (covered < len).then_some(covered)
    }

    /// One past the highest covered position.
    pub fn end(&self) -> u64 {
        self.ranges.values().next_back().copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn agrees_with_a_bitmap(ranges in prop::collection::vec((0u64..60, 0u64..9), 0..40)) {
            let mut positions = Positions::default();
            let mut bits = [false; 80];
            for (start, len) in ranges {
                let range = start as usize..(start + len) as usize;
                let free = range.clone().all(|i| !bits[i]);
                prop_assert_eq!(positions.add(start, len).is_ok(), free);
                if free {
                    bits[range].fill(true);
                }
                let gap = bits.iter().position(|bit| !bit).map(|i| i as u64);
                prop_assert_eq!(positions.first_gap(80), gap);
                let end = bits.iter().rposition(|bit| *bit).map_or(0, |i| i as u64 + 1);
                prop_assert_eq!(positions.end(), end);
            }
        }
    }

    #[test]
    fn a_wrapping_range_is_refused() {
        assert!(Positions::default().add(u64::MAX, 2).is_err());
    }
}
