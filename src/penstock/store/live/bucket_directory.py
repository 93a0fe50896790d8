"""What memory keeps about the buckets of a queue, so that a claim reads only what it takes.

For each bucket: how many messages it has in each state, its oldest waiting message and its first
delayed one; and for each lane in it, the rank of the lane's first message there. So memory grows
with the number of buckets, and with the number of (lane, bucket) pairs where groups or priorities
are many, never with the number of messages as such.

A *rank* is a message's place in its lane as one number, ``visible_at << 64 | message id``. On a
FIFO queue it is the message id alone, and delayed messages have their place as well.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sortedcontainers import SortedDict

from penstock.model import State
from penstock.store.live import Beliefs, group_of, lane_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.store.codec.summaries import Summary

__all__ = ["RANK_BITS", "Directory", "Ranking", "Tally", "rank_of", "tally"]

RANK_BITS: Final = 64


class Tally(NamedTuple):
    """How many messages of a bucket are in each state."""

    ready: int
    delayed: int
    in_flight: int


@lru_cache(maxsize=4096)
def tally(ready: int, delayed: int, in_flight: int) -> Tally:
    """Make a tally. Most buckets are full of one state: they share one object."""
    return Tally(ready, delayed, in_flight)


def rank_of(visible_at_ms: int, message_id: int) -> int:
    """Give the rank of a message on a standard queue."""
    return visible_at_ms << RANK_BITS | message_id


class Ranking:
    """One rank per bucket; the lowest is at hand, at a cost that hardly grows with their number."""

    __slots__ = ("_heap", "ranks")

    def __init__(self) -> None:
        # bucket id -> rank
        self.ranks: dict[int, int] = {}
        # Entries that `ranks` no longer agrees with are dropped when they come up.
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.ranks)

    def set(self, bucket_id: int, rank: int | None) -> None:
        """Set or (None) clear the rank of a bucket."""
        ranks = self.ranks
        if rank is None:
            ranks.pop(bucket_id, None)
            if not ranks:
                self._heap.clear()
        elif ranks.get(bucket_id) != rank:
            ranks[bucket_id] = rank
            heappush(self._heap, (rank, bucket_id))
            if len(self._heap) > 8 + 2 * len(ranks):
                self._heap = [(rank, bucket_id) for bucket_id, rank in ranks.items()]
                heapify(self._heap)

    def get(self, bucket_id: int) -> int | None:
        """Give the rank of a bucket."""
        return self.ranks.get(bucket_id)

    def first(self) -> tuple[int, int] | None:
        """Give the lowest rank and its bucket."""
        heap, ranks = self._heap, self.ranks
        while heap:
            rank, bucket_id = heap[0]
            if ranks.get(bucket_id) == rank:
                return rank, bucket_id
            heappop(heap)
        return None

    def pop(self) -> tuple[int, int, int | None]:
        """Remove the lowest; give its rank and bucket, and the lowest rank of the others."""
        first = self.first()
        assert first is not None, "nothing is ranked"
        rank, bucket_id = first
        del self.ranks[bucket_id]
        heappop(self._heap)
        following = self.first()
        return rank, bucket_id, None if following is None else following[0]


class Directory:
    """The buckets of one queue, and its groups in turn.

    A group is in the ring while it has something to claim. On a FIFO queue it is there while it
    has anything waiting, unless it is ``held`` (messages in flight, by bucket) or ``blocked`` (a
    claim found its head not visible).
    """

    __slots__ = ("blocked", "buckets", "fifo", "held", "lanes", "late", "oldest", "ring")

    def __init__(self, *, fifo: bool) -> None:
        self.fifo = fifo
        # bucket id -> Tally, in the order of ids
        self.buckets: Any = SortedDict()
        self.lanes: dict[bytes, dict[bytes, Ranking]] = {}
        # The first group is next in turn.
        self.ring: OrderedDict[bytes, None] = OrderedDict()
        self.held: dict[bytes, dict[int, int]] = {}
        self.blocked: set[bytes] = set()
        self.late = Ranking()
        self.oldest = Ranking()

    def adopt(self, bucket_id: int, summary: Summary) -> None:
        """Take in a bucket by its summary. Turns begin with :meth:`start_turns`."""
        self.buckets[bucket_id] = tally(summary.ready, summary.delayed, summary.in_flight)
        if summary.ready or summary.delayed:
            self.oldest.set(bucket_id, summary.oldest)
        if summary.due is not None:
            self.late.set(bucket_id, rank_of(*summary.due))
        for group, priority, visible_at_ms, message_id in summary.heads:
            lane = lane_of(group, priority)
            self._ranking(lane).set(bucket_id, rank_of(visible_at_ms, message_id))
        for group, in_flight in summary.held:
            self.held.setdefault(group_of(lane_of(group, 0)), {})[bucket_id] = in_flight

    def start_turns(self) -> None:
        """Line the groups up, in the order of their names."""
        self.ring = OrderedDict.fromkeys(
            group for group in sorted(self.lanes) if group not in self.held
        )

    def totals(self) -> Tally:
        """Add up all buckets."""
        ready = delayed = in_flight = 0
        for row in self.buckets.values():
            ready += row[0]
            delayed += row[1]
            in_flight += row[2]
        return Tally(ready, delayed, in_flight)

    def holding(self, state: State, at_least: int) -> Iterator[int]:
        """Give the buckets from an id on that have messages in a state."""
        field = _FIELDS[state]
        for bucket_id in self.buckets.irange(minimum=at_least):
            if self.buckets[bucket_id][field]:
                yield bucket_id

    def set_head(self, lane: bytes, bucket_id: int, rank: int | None) -> None:
        """Note the first message of a lane in a bucket; None: it has no more of that lane."""
        group = group_of(lane)
        if rank is not None:
            self._ranking(lane).set(bucket_id, rank)
            if group not in self.ring and group not in self.held and group not in self.blocked:
                self.ring[group] = None
            return
        lanes = self.lanes.get(group)
        ranking = None if lanes is None else lanes.get(lane)
        if lanes is None or ranking is None:
            return
        ranking.set(bucket_id, None)
        if not ranking:
            del lanes[lane]
            if not lanes:
                del self.lanes[group]
                self.ring.pop(group, None)
                self.blocked.discard(group)

    def hold(self, group: bytes, bucket_id: int, count: int) -> None:
        """Count FIFO messages of a group as in flight: the group is out of turn."""
        counts = self.held.setdefault(group, {})
        counts[bucket_id] = counts.get(bucket_id, 0) + count
        self.ring.pop(group, None)

    def unhold(self, group: bytes, bucket_id: int, count: int) -> None:
        """Count FIFO messages as no longer in flight; with the last, the group has its turn."""
        counts = self.held.get(group)
        if counts is None or bucket_id not in counts:
            return
        counts[bucket_id] -= count
        if counts[bucket_id] <= 0:
            del counts[bucket_id]
        if not counts:
            del self.held[group]
            if group in self.lanes:
                self.ring[group] = None

    def block(self, group: bytes) -> None:
        """Take a FIFO group out of turn, whose head is not visible."""
        self.ring.pop(group, None)
        self.blocked.add(group)

    def unblock(self, group: bytes) -> None:
        """Let a claim look again at a FIFO group whose head was not visible."""
        if group in self.blocked:
            self.blocked.discard(group)
            if group in self.lanes:
                self.ring[group] = None

    def drop(self, bucket_id: int) -> Tally:
        """Forget a bucket that can't be read, whatever it held; give its tally."""
        for lane in [lane for lanes in self.lanes.values() for lane in lanes]:
            self.set_head(lane, bucket_id, None)
        for group, counts in list(self.held.items()):
            self.unhold(group, bucket_id, counts.get(bucket_id, 0))
        self.late.set(bucket_id, None)
        self.oldest.set(bucket_id, None)
        row: Tally = self.buckets.pop(bucket_id)
        return row

    def beliefs(self) -> Beliefs:
        """Tell what is in which bucket, and which groups have a turn, now or later."""
        facts: dict[tuple[Any, ...], Any] = {
            ("in flight", group): counts for group, counts in self.held.items()
        }
        for bucket_id, row in self.buckets.items():
            first = (self.late.get(bucket_id), self.oldest.get(bucket_id))
            facts["bucket", bucket_id] = (row, *first)
        for lanes in self.lanes.values():
            facts.update((("lane", lane), ranking.ranks) for lane, ranking in lanes.items())
        facts.update((("turn", group), True) for group in (*self.ring, *self.blocked))
        return Beliefs(facts, {})

    def _ranking(self, lane: bytes) -> Ranking:
        lanes = self.lanes.setdefault(group_of(lane), {})
        ranking = lanes.get(lane)
        if ranking is None:
            ranking = lanes[lane] = Ranking()
        return ranking


_FIELDS: Final = {State.AVAILABLE: 0, State.DELAYED: 1, State.IN_FLIGHT: 2}
