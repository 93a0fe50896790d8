"""A bucket while it is open in memory: its messages decoded, beside the bytes they are kept as.

It knows nothing of tables, batches or other buckets. Every change keeps the encoded elements up
to date, so that writing the bucket back is joining them.

The *rank* of a message is its place in its lane as one number, ``visible_at << 64 | message id``.
On a FIFO queue it is the message id alone, and delayed messages have their place as well.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.errors import CorruptRecord
from penstock.store.codec import buckets, opendata
from penstock.store.codec.buckets import encode_head, encode_held, pack_summary
from penstock.store.codec.records import NO_LEASE
from penstock.store.live import Item, count_attempt, group_of, lane_of, split_lane

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.store.kv.queues import Queue
    from penstock.store.live import Grant

RANK_BITS: Final = 64
_ID_MASK: Final = (1 << RANK_BITS) - 1
# The memory that Python adds to the encoded bytes of a message, roughly.
_MESSAGE_OVERHEAD_BYTES: Final = 700

_split = lru_cache(maxsize=8192)(split_lane)
# Skip the argument checks of a NamedTuple's own constructor.
_new: Final = tuple.__new__

# A message in its lane's order: rank, claim id.
Position = tuple[int, int]


class Tally(NamedTuple):
    """How many messages of a bucket are in each state."""

    ready: int
    delayed: int
    in_flight: int


def rank_of(visible_at_ms: int, message_id: int) -> int:
    """Return the rank of a message on a standard queue."""
    return visible_at_ms << RANK_BITS | message_id


class OpenBucket:
    """The messages of a bucket.

    ``waiting`` and ``flight`` are keyed by claim id. ``lanes`` has the positions of claimable
    messages, in order; on a FIFO queue, of all waiting ones. ``late`` has the positions (by due
    time) of delayed messages.
    """

    def __init__(self, queue: Queue, bucket_id: int) -> None:
        self.id = bucket_id
        self.key = opendata.ACTIVE.key(queue.id, bucket_id)
        self.summary_key = opendata.SUMMARY.key(queue.id, bucket_id)
        self.fifo = queue.fifo
        self.waiting: dict[int, Item] = {}
        self.flight: dict[int, Item] = {}
        self.lanes: dict[bytes, list[Position]] = {}
        self.late: list[Position] = []
        self.late_claims: set[int] = set()
        # Waiting messages that can't be claimed. On a FIFO queue they have a position all the same.
        self.hidden: set[int] = set()
        # FIFO: group -> how many of its messages are in flight
        self.held: dict[bytes, int] = {}
        self._oldest: int | None = None
        self._oldest_is_gone = False
        # Estimated bytes in memory, for the cache, which is bounded in bytes.
        self.cost = 0
        self._waiting_bytes: dict[int, bytes] = {}
        self._flight_bytes: dict[int, bytes] = {}
        self._heads: dict[bytes, bytes] = {}

    # --- record ----------------------------------------------------------------------------

    @classmethod
    def decode(
        cls, queue: Queue, bucket_id: int, value: bytes, is_late: Callable[[int, int], bool] | None
    ) -> OpenBucket:
        """Open a bucket; ``is_late`` tells by claim id and time whether a message is delayed."""
        bucket = cls(queue, bucket_id)
        available, in_flight = buckets.decode_active(value)
        for entry, raw in available:
            message_id, claim_id, attempts, metadata, visible_at, forgiven, priority, group = entry
            lane = lane_of(group, priority)
            item = Item(claim_id, message_id, lane, attempts, forgiven, visible_at, metadata)
            bucket.waiting[claim_id] = item
            bucket._waiting_bytes[claim_id] = raw
            late = is_late is not None and is_late(claim_id, visible_at)
            if late:
                bucket.late.append((rank_of(visible_at, message_id), claim_id))
                bucket.late_claims.add(claim_id)
            if bucket.fifo or not late:
                bucket.lanes.setdefault(lane, []).append((bucket._rank(item), claim_id))
        for flying, raw in in_flight:
            message_id, claim_id, _, _, attempts, metadata, visible_at, forgiven = flying[:8]
            priority, group, lease = flying[8:]
            lane = lane_of(group, priority)
            item = Item(claim_id, message_id, lane, attempts, forgiven, visible_at, metadata, lease)
            bucket.flight[claim_id] = item
            bucket._flight_bytes[claim_id] = raw
            bucket._hold(lane, 1)
        exponent, number = opendata.split_id(bucket_id)
        end = bucket_id + opendata.capacity(exponent)
        claims = bucket.waiting.keys() | bucket.flight.keys()
        for claim_id in claims:
            if not bucket_id <= claim_id < end:
                raise CorruptRecord(f"active bucket: claim {claim_id:#x} is not of bucket {number}")
        if len(claims) != len(available) + len(in_flight):
            raise CorruptRecord("active bucket: a claim stands twice in its bucket")
        bucket.late.sort()
        for lane, positions in bucket.lanes.items():
            positions.sort()
            bucket._heads[lane] = _encode_head(lane, positions[0][0])
        bucket._oldest_is_gone = True
        bucket.cost = len(value) * 2 + _MESSAGE_OVERHEAD_BYTES * len(bucket)
        return bucket

    def record(self) -> bytes:
        """Join the bucket's record."""
        return buckets.pack_active(
            list(self._waiting_bytes.values()), list(self._flight_bytes.values())
        )

    def encode(self) -> bytes:
        """Join the bucket's record to be written, and estimate the bucket's memory anew."""
        value = self.record()
        self.cost = len(value) * 2 + _MESSAGE_OVERHEAD_BYTES * len(self)
        return value

    def summary(self) -> bytes:
        """Encode the summary of this bucket for the directory."""
        heads = self._heads
        if self.hidden:
            # The summary has the heads of lanes as they are with the hidden messages.
            ranks = {lane: positions[0][0] for lane, positions in self.lanes.items()}
            for item in map(self.waiting.__getitem__, self.hidden):
                rank = self._rank(item)
                ranks[item.lane] = min(rank, ranks.get(item.lane, rank))
            heads = {lane: _encode_head(lane, rank) for lane, rank in ranks.items()}
        first = self.late[0][0] if self.late else 0
        return pack_summary(
            ready=len(self.waiting) - len(self.late),
            in_flight=len(self.flight),
            oldest=self.oldest() or 0,
            late=[claim_id - self.id for _, claim_id in self.late],
            due=(first >> RANK_BITS, first & _ID_MASK) if self.late else None,
            heads_encoded=heads.values(),
            held_encoded=[
                encode_held(_split(group + b"\xff")[0], count) for group, count in self.held.items()
            ],
        )

    # --- reading ---------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.waiting) + len(self.flight)

    def tally(self) -> Tally:
        """Count the messages by state."""
        late = len(self.late)
        return Tally(len(self.waiting) - late, late, len(self.flight))

    def head(self, lane: bytes) -> int | None:
        """Return the rank of the first message of a lane."""
        return self.lanes[lane][0][0] if lane in self.lanes else None

    def due_rank(self) -> int | None:
        """Return the rank, by time, of the first delayed message."""
        return self.late[0][0] if self.late else None

    def oldest(self) -> int | None:
        """Return the lowest id of a waiting message."""
        if self._oldest_is_gone:
            self._oldest = min([item.message_id for item in self.waiting.values()], default=None)
            self._oldest_is_gone = False
        return self._oldest

    def takeable(self, lane: bytes, limit: int, below: int | None) -> int:
        """Count the first messages of a lane that can be taken: ranked below, and visible."""
        positions = self.lanes[lane]
        count = len(positions) if below is None else bisect_left(positions, (below,))
        count = min(count, limit)
        if self.fifo and (self.late_claims or self.hidden):
            for index in range(count):
                if positions[index][1] in self.late_claims or positions[index][1] in self.hidden:
                    return index
        return count

    def _rank(self, item: Item) -> int:
        return item.message_id if self.fifo else rank_of(item.visible_at_ms, item.message_id)

    # --- changes ---------------------------------------------------------------------------

    def put_waiting(self, item: Item, *, late: bool) -> bool:
        """Put a message in, or back, as waiting; say whether its lane has a new head."""
        claim_id, message_id = item.key, item.message_id
        visible_at_ms, lane = item.visible_at_ms, item.lane
        group, priority = _split(lane)
        item.lease = NO_LEASE
        self.waiting[claim_id] = item
        shared = (item.attempts, item.metadata, visible_at_ms, item.forgiven, priority, group)
        entry = _new(buckets.Available, (message_id, claim_id, *shared))
        self._waiting_bytes[claim_id] = buckets.encode_available(entry)
        if self._oldest is None or message_id < self._oldest:
            self._oldest = message_id
        if late:
            insort(self.late, (rank_of(visible_at_ms, message_id), claim_id))
            self.late_claims.add(claim_id)
            if not self.fifo:
                return False
        rank = message_id if self.fifo else visible_at_ms << RANK_BITS | message_id
        return self._insert(lane, (rank, claim_id))

    def _insert(self, lane: bytes, position: Position) -> bool:
        positions = self.lanes.get(lane)
        if positions is None:
            self.lanes[lane] = [position]
        elif position > positions[-1]:
            positions.append(position)
            return False
        else:
            insort(positions, position)
            if positions[0] is not position:
                return False
        self._heads[lane] = _encode_head(lane, position[0])
        return True

    def come_due(self) -> tuple[Item, bool]:
        """Count the first delayed message as ready; return it, and whether it heads its lane."""
        rank, claim_id = self.late.pop(0)
        self.late_claims.discard(claim_id)
        item = self.waiting[claim_id]
        return item, not self.fifo and self._insert(item.lane, (rank, claim_id))

    def hide(self, claim_id: int) -> None:
        """Make claims pass over a claimable message."""
        if claim_id not in self.hidden:
            self.hidden.add(claim_id)
            if not self.fifo:
                self._remove_position(self.waiting[claim_id])

    def take(self, lane: bytes, count: int, grants: Iterator[Grant], now_ms: int) -> list[Item]:
        """Move the first ``count`` messages of a lane to in flight."""
        positions = self.lanes[lane]
        group, priority = _split(lane)
        waiting, waiting_bytes = self.waiting, self._waiting_bytes
        flight, flight_bytes = self.flight, self._flight_bytes
        taken = []
        for _, claim_id in positions[:count]:
            item = waiting.pop(claim_id)
            del waiting_bytes[claim_id]
            count_attempt(item)
            lease, deadline_ms = next(grants)
            item.lease = lease
            self._oldest_is_gone |= item.message_id == self._oldest
            flight[claim_id] = item
            times = (item.message_id, claim_id, now_ms, deadline_ms, item.attempts)
            shared = (item.metadata, item.visible_at_ms, item.forgiven, priority, group)
            entry = _new(buckets.InFlight, (*times, *shared, lease))
            flight_bytes[claim_id] = buckets.encode_in_flight(entry)
            taken.append(item)
        self._cut(lane, 0, count)
        self._hold(lane, count)
        return taken

    def land(self, claim_id: int) -> Item | None:
        """Take a message out of flight."""
        item = self.flight.pop(claim_id, None)
        if item is not None:
            del self._flight_bytes[claim_id]
            self._hold(item.lane, -1)
        return item

    def remove_waiting(self, claim_id: int) -> tuple[bytes, bool] | None:
        """Take a waiting message out; return its lane, and whether it was delayed."""
        item = self.waiting.pop(claim_id, None)
        if item is None:
            return None
        hidden = claim_id in self.hidden
        self.hidden.discard(claim_id)
        del self._waiting_bytes[claim_id]
        late = claim_id in self.late_claims
        if late:
            self.late_claims.discard(claim_id)
            by_time = rank_of(item.visible_at_ms, item.message_id)
            del self.late[bisect_left(self.late, (by_time, claim_id))]
        if self.fifo or not (late or hidden):
            self._remove_position(item)
        self._oldest_is_gone |= item.message_id == self._oldest
        return item.lane, late

    def relabel(self, claim_id: int, lease: bytes) -> None:
        """Note a message in flight as held under another split of its lease."""
        item = self.flight.get(claim_id)
        if item is not None:
            item.lease = lease
            # The lease is the last field of an element.
            raw = self._flight_bytes[claim_id]
            self._flight_bytes[claim_id] = raw[: -buckets.LEASE_BYTES] + lease

    # --- parts -----------------------------------------------------------------------------

    def _remove_position(self, item: Item) -> None:
        index = bisect_left(self.lanes[item.lane], (self._rank(item), item.key))
        self._cut(item.lane, index, index + 1)

    def _cut(self, lane: bytes, begin: int, end: int) -> None:
        positions = self.lanes[lane]
        del positions[begin:end]
        if not positions:
            del self.lanes[lane], self._heads[lane]
        elif begin == 0 < end:
            self._heads[lane] = _encode_head(lane, positions[0][0])

    def _hold(self, lane: bytes, count: int) -> None:
        if self.fifo:
            group = group_of(lane)
            left = self.held.get(group, 0) + count
            if left:
                self.held[group] = left
            else:
                self.held.pop(group, None)


def _encode_head(lane: bytes, rank: int) -> bytes:
    return encode_head(*_split(lane), rank >> RANK_BITS, rank & _ID_MASK)
