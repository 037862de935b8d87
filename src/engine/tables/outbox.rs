//! Control messages that wait to be sent, to each peer in turn.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::protocol::Message;
use crate::room::PeerId;

use super::super::peers::Link;

/// A control message on its way out.
#[derive(Debug, Clone)]
pub struct Outgoing {
    /// To whom.
    pub link: Arc<Link>,
    /// What.
    pub message: Message,
}

/// The messages, by peer: whoever has much to be told keeps nobody else waiting.
#[derive(Debug, Clone, Default)]
pub struct Outbox {
    queues: BTreeMap<PeerId, VecDeque<Outgoing>>,
    /// Whose turn it was last.
    last: PeerId,
}

impl Outbox {
    /// Queues a message behind the others to its peer.
    pub fn push(&mut self, outgoing: Outgoing) {
        self.queues.entry(outgoing.link.peer).or_default().push_back(outgoing);
    }

    /// How many messages to this peer wait.
    pub fn len_to(&self, peer: PeerId) -> usize {
        self.queues.get(&peer).map_or(0, VecDeque::len)
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.queues.is_empty()
    }

    /// Takes the next messages, at most `most`: one to each peer in turn.
    pub fn take(&mut self, most: usize, into: &mut Vec<Outgoing>) {
        for _ in 0..most {
            let next = self.queues.range(self.last.saturating_add(1)..).next().or_else(|| self.queues.iter().next());
            let Some((&peer, _)) = next else { return };
            self.last = peer;
            if let Some(queue) = self.queues.get_mut(&peer) {
                into.extend(queue.pop_front());
                if queue.is_empty() {
                    self.queues.remove(&peer);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn h11_a_peer_that_is_told_much_keeps_nobody_waiting() {
        let mut outbox = Outbox::default();
        let mut say = |peer, sequence| {
            let link = Link::new(peer, String::new());
            outbox.push(Outgoing { link, message: Message::Ping { sequence } });
        };
        (0..1000).for_each(|sequence| say(2, sequence));
        (0..3).for_each(|sequence| say(1, sequence));
        say(3, 0);
        let mut taken = Vec::new();
        outbox.take(8, &mut taken);
        let to: Vec<PeerId> = taken.iter().map(|outgoing| outgoing.link.peer).collect();
        assert_eq!(to, [1, 2, 3, 1, 2, 1, 2, 2]);
        outbox.take(usize::MAX >> 1, &mut taken);
        assert!(outbox.is_empty() && outbox.len_to(2) == 0);
        let sequences = taken.iter().filter(|outgoing| outgoing.link.peer == 2).map(|outgoing| &outgoing.message);
        assert!(sequences.eq(&(0..1000).map(|sequence| Message::Ping { sequence }).collect::<Vec<_>>()), "in order");
    }
}
