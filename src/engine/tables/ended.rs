//! Which lives of rooms at a receiver are over for us.

use std::collections::BTreeMap;

use crate::error::Error;

/// Most lives remembered one by one. On top of that the oldest are taken together: a grant that comes later than so many
/// newer ones is void.
const MAX_REMEMBERED: usize = 1 << 14;

/// The lives of rooms at one receiver that will never be sent anything again. Its generations grow.
#[derive(Debug, Clone, Default, Hash)]
pub struct Ended {
    /// All lower generations are over.
    below: u64,
    /// Of the others, these, with why they failed.
    lives: BTreeMap<u64, Option<Error>>,
}

impl Ended {
    /// This life is over. The first cause stays.
    pub fn insert(&mut self, generation: u64, cause: Option<&Error>) {
        if generation < self.below {
            return;
        }
        self.lives.entry(generation).or_insert_with(|| cause.cloned());
        while self.lives.len() > MAX_REMEMBERED
            && let Some((oldest, _)) = self.lives.pop_first()
        {
            self.below = oldest.saturating_add(1);
        }
    }

    /// The receiver says that all lives of lower generations are over.
    pub fn raise(&mut self, below: u64) {
        if below > self.below {
            self.below = below;
            self.lives = self.lives.split_off(&below);
        }
    }

    /// Whether this life is over.
    pub fn contains(&self, generation: u64) -> bool {
        generation < self.below || self.lives.contains_key(&generation)
    }

    /// Why it failed, when that is known.
    pub fn cause(&self, generation: u64) -> Option<&Error> {
        self.lives.get(&generation)?.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_over_stays_over_within_bounds() {
        let mut ended = Ended::default();
        let cause = Error::new(crate::error::NIXL_ERR_ABORTED, "first");
        ended.insert(7, Some(&cause));
        ended.insert(7, None);
        assert!(ended.contains(7) && !ended.contains(6) && !ended.contains(8));
        assert_eq!(ended.cause(7), Some(&cause));
        for generation in 10..10 + 3 * MAX_REMEMBERED as u64 {
            ended.insert(generation, None);
            assert!(ended.lives.len() <= MAX_REMEMBERED);
        }
        assert!((0..10 + 3 * MAX_REMEMBERED as u64).all(|generation| generation == 8 || ended.contains(generation)));
        ended.raise(u64::MAX);
        ended.raise(3);
        assert!(ended.contains(u64::MAX - 1) && !ended.contains(u64::MAX) && ended.lives.is_empty());
    }
}
