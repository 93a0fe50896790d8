"""A bucket while it is open in memory: its messages decoded, beside the bytes they are kept as.

It knows nothing of tables, batches or other buckets. Every change keeps the encoded elements up
to date, so that writing the bucket back is joining them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from penstock.errors import CorruptRecord
from penstock.store.codec import opendata, records
from penstock.store.codec.summaries import Due, encode_head, encode_held, pack_summary
from penstock.store.live import (
    NO_LEASE,
    Item,
    count_attempt,
    group_of,
    lane_of,
    split_lane,
)
from penstock.store.live.bucket_directory import RANK_BITS, Tally, rank_of, tally

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from penstock.store.kv.queues import Queue
    from penstock.store.live import Grant

__all__ = ["OpenBucket"]

_ID_MASK: Final = (1 << RANK_BITS) - 1
# What Python adds to the encoded bytes of a message, roughly.
_MESSAGE_OVERHEAD_BYTES: Final = 700

_split = lru_cache(maxsize=8192)(split_lane)
# Skip the argument checks of a NamedTuple's own constructor.
_new: Final = tuple.__new__

# A message in its lane's order: rank, claim id.
Place = tuple[int, int]


class OpenBucket:
    """The messages of a bucket.

    ``waiting`` and ``flight`` are keyed by claim id. ``lanes`` has the places of what can be
    claimed, in order; on a FIFO queue, of all that waits. ``late`` has the places (by due time)
    of what counts as delayed.
    """

    __slots__ = (
        "_flight_bytes",
        "_heads",
        "_oldest",
        "_oldest_is_gone",
        "_waiting_bytes",
        "cost",
        "fifo",
        "flight",
        "held",
        "hidden",
        "id",
        "key",
        "lanes",
        "late",
        "late_claims",
        "summary_key",
        "waiting",
    )

    def __init__(self, queue: Queue, bucket_id: int) -> None:
        self.id = bucket_id
        self.key = opendata.active_key(queue.id, bucket_id)
        self.summary_key = opendata.bucket_summary_key(queue.id, bucket_id)
        self.fifo = queue.fifo
        self.waiting: dict[int, Item] = {}
        self.flight: dict[int, Item] = {}
        self.lanes: dict[bytes, list[Place]] = {}
        self.late: list[Place] = []
        self.late_claims: set[int] = set()
        # What waits and can't be claimed. On a FIFO queue it has its place all the same.
        self.hidden: set[int] = set()
        # FIFO: group -> how many of its messages are in flight
        self.held: dict[bytes, int] = {}
        self._oldest: int | None = None
        self._oldest_is_gone = False
        # Estimated bytes in memory, for whoever bounds a cache.
        self.cost = 0
        self._waiting_bytes: dict[int, bytes] = {}
        self._flight_bytes: dict[int, bytes] = {}
        self._heads: dict[bytes, bytes] = {}

    # --- record ----------------------------------------------------------------------------

    @classmethod
    def decode(
        cls,
        queue: Queue,
        bucket_id: int,
        value: bytes,
        is_late: Callable[[int, int], bool] | None,
    ) -> OpenBucket:
        """Open a bucket; ``is_late`` tells by claim id and time what counts as delayed."""
        bucket = cls(queue, bucket_id)
        available, in_flight = records.decode_active(value)
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
                rank = message_id if bucket.fifo else rank_of(visible_at, message_id)
                bucket.lanes.setdefault(lane, []).append((rank, claim_id))
        for flying, raw in in_flight:
            claim_id = flying.claim_id
            lane = lane_of(flying.group, flying.priority)
            bucket.flight[claim_id] = Item(
                claim_id,
                flying.message_id,
                lane,
                flying.attempts,
                flying.forgiven,
                flying.visible_at,
                flying.metadata,
                flying.lease,
            )
            bucket._flight_bytes[claim_id] = raw
            bucket._hold(lane, 1)
        bucket._check(len(available) + len(in_flight))
        bucket.late.sort()
        for lane, places in bucket.lanes.items():
            places.sort()
            bucket._note_head(lane, places[0][0])
        bucket._oldest_is_gone = True
        bucket.cost = len(value) * 2 + _MESSAGE_OVERHEAD_BYTES * len(bucket)
        return bucket

    def _check(self, elements: int) -> None:
        exponent, number = opendata.split_id(self.id)
        end = self.id + opendata.capacity(exponent)
        for claim_id in (*self.waiting, *self.flight):
            if not self.id <= claim_id < end:
                raise CorruptRecord(f"active v2: claim {claim_id:#x} is not of bucket {number}")
        if len(self.waiting.keys() | self.flight.keys()) != elements:
            raise CorruptRecord("active v2: a claim stands twice in its bucket")

    def record(self) -> bytes:
        """Join the bucket's record."""
        return records.pack_active(
            list(self._waiting_bytes.values()), list(self._flight_bytes.values())
        )

    def encode(self) -> bytes:
        """Join the bucket's record to be written, and estimate anew what the bucket costs."""
        value = self.record()
        self.cost = len(value) * 2 + _MESSAGE_OVERHEAD_BYTES * len(self)
        return value

    def summary(self) -> bytes:
        """Encode what the directory must know of this bucket."""
        due = None
        if self.late:
            due = Due(self.late[0][0] >> RANK_BITS, self.late[0][0] & _ID_MASK)
        return pack_summary(
            ready=len(self.waiting) - len(self.late),
            in_flight=len(self.flight),
            oldest=self.oldest() or 0,
            late=[claim_id - self.id for _, claim_id in self.late],
            due=due,
            heads_encoded=self._all_heads() if self.hidden else self._heads.values(),
            held_encoded=self._held_rows(),
        )

    def _all_heads(self) -> Collection[bytes]:
        """Encode the heads of lanes as they are with what is hidden."""
        heads = {lane: places[0][0] for lane, places in self.lanes.items()}
        for claim_id in self.hidden:
            rank, lane = self._rank(claim_id), self.waiting[claim_id].lane
            heads[lane] = min(rank, heads.get(lane, rank))
        return [
            encode_head(*_split(lane), rank >> RANK_BITS, rank & _ID_MASK)
            for lane, rank in heads.items()
        ]

    def _rank(self, claim_id: int) -> int:
        item = self.waiting[claim_id]
        return item.message_id if self.fifo else rank_of(item.visible_at_ms, item.message_id)

    def _held_rows(self) -> Collection[bytes]:
        return [
            encode_held(_split(group + b"\xff")[0], count) for group, count in self.held.items()
        ]

    # --- reading ---------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.waiting) + len(self.flight)

    def tally(self) -> Tally:
        """Count the messages by state."""
        late = len(self.late)
        return tally(len(self.waiting) - late, late, len(self.flight))

    def head(self, lane: bytes) -> int | None:
        """Give the rank of the first message of a lane."""
        places = self.lanes.get(lane)
        return places[0][0] if places else None

    def due_rank(self) -> int | None:
        """Give the rank, by time, of the first delayed message."""
        return self.late[0][0] if self.late else None

    def oldest(self) -> int | None:
        """Give the lowest id of a waiting message."""
        if self._oldest_is_gone:
            self._oldest = min([item.message_id for item in self.waiting.values()], default=None)
            self._oldest_is_gone = False
        return self._oldest

    # --- changes ---------------------------------------------------------------------------

    def put_waiting(self, item: Item, *, late: bool) -> bool:
        """Put a message in, or back, as waiting; say whether its lane has a new head."""
        claim_id, message_id = item.key, item.message_id
        visible_at_ms, lane = item.visible_at_ms, item.lane
        group, priority = _split(lane)
        item.lease = NO_LEASE
        self.waiting[claim_id] = item
        fields = (
            message_id,
            claim_id,
            item.attempts,
            item.metadata,
            visible_at_ms,
            item.forgiven,
            priority,
            group,
        )
        self._waiting_bytes[claim_id] = records.encode_available(_new(records.Available, fields))
        if self._oldest is None or message_id < self._oldest:
            self._oldest = message_id
        if late:
            insort(self.late, (rank_of(visible_at_ms, message_id), claim_id))
            self.late_claims.add(claim_id)
            if not self.fifo:
                return False
        rank = message_id if self.fifo else visible_at_ms << RANK_BITS | message_id
        return self._place(lane, (rank, claim_id))

    def _place(self, lane: bytes, place: Place) -> bool:
        places = self.lanes.get(lane)
        if places is None:
            self.lanes[lane] = [place]
        elif place > places[-1]:
            places.append(place)
            return False
        else:
            insort(places, place)
            if places[0] is not place:
                return False
        self._note_head(lane, place[0])
        return True

    def come_due(self) -> tuple[bytes, bool]:
        """Count the first delayed message as ready; give its lane, and whether it heads it."""
        rank, claim_id = self.late.pop(0)
        self.late_claims.discard(claim_id)
        lane = self.waiting[claim_id].lane
        return lane, not self.fifo and self._place(lane, (rank, claim_id))

    def takeable(self, lane: bytes, limit: int, below: int | None) -> int:
        """Count the first messages of a lane that can be taken: ranked below, and visible."""
        places = self.lanes[lane]
        count = len(places) if below is None else bisect_left(places, (below,))
        count = min(count, limit)
        if self.fifo and (self.late_claims or self.hidden):
            for index in range(count):
                if places[index][1] in self.late_claims or places[index][1] in self.hidden:
                    return index
        return count

    def hide(self, claim_id: int) -> None:
        """Make claims pass over a message that could be claimed."""
        if claim_id not in self.hidden:
            self.hidden.add(claim_id)
            if not self.fifo:
                lane = self.waiting[claim_id].lane
                places = self.lanes[lane]
                index = bisect_left(places, (self._rank(claim_id), claim_id))
                self._cut(lane, places, index, index + 1)

    def take(self, lane: bytes, count: int, grants: Iterator[Grant], now_ms: int) -> list[Item]:
        """Move the first ``count`` messages of a lane to in flight."""
        places = self.lanes[lane]
        group, priority = _split(lane)
        waiting, waiting_bytes = self.waiting, self._waiting_bytes
        flight, flight_bytes = self.flight, self._flight_bytes
        taken = []
        for _, claim_id in places[:count]:
            item = waiting.pop(claim_id)
            del waiting_bytes[claim_id]
            count_attempt(item)
            lease, deadline_ms = next(grants)
            item.lease = lease
            self._oldest_is_gone |= item.message_id == self._oldest
            flight[claim_id] = item
            fields = (
                item.message_id,
                claim_id,
                now_ms,
                deadline_ms,
                item.attempts,
                item.metadata,
                item.visible_at_ms,
                item.forgiven,
                priority,
                group,
                lease,
            )
            flight_bytes[claim_id] = records.encode_in_flight(_new(records.InFlight, fields))
            taken.append(item)
        self._cut(lane, places, 0, count)
        self._hold(lane, count)
        return taken

    def land(self, claim_id: int) -> Item | None:
        """Take a message out of flight."""
        item = self.flight.pop(claim_id, None)
        if item is not None:
            del self._flight_bytes[claim_id]
            self._hold(item.lane, -1)
        return item

    def remove_waiting(self, claim_id: int) -> tuple[Item, bool] | None:
        """Take a message out that waits; say whether it counted as delayed."""
        item = self.waiting.pop(claim_id, None)
        if item is None:
            return None
        hidden = claim_id in self.hidden
        self.hidden.discard(claim_id)
        del self._waiting_bytes[claim_id]
        late = claim_id in self.late_claims
        by_time = rank_of(item.visible_at_ms, item.message_id)
        if late:
            self.late_claims.discard(claim_id)
            del self.late[bisect_left(self.late, (by_time, claim_id))]
        if self.fifo or not (late or hidden):
            places = self.lanes[item.lane]
            rank = item.message_id if self.fifo else by_time
            index = bisect_left(places, (rank, claim_id))
            self._cut(item.lane, places, index, index + 1)
        self._oldest_is_gone |= item.message_id == self._oldest
        return item, late

    def relabel(self, claim_id: int, lease: bytes) -> None:
        """Note a message in flight as held under another split of its lease."""
        item = self.flight.get(claim_id)
        if item is not None:
            item.lease = lease
            # The lease is the last field of an element.
            raw = self._flight_bytes[claim_id]
            self._flight_bytes[claim_id] = raw[: -records.LEASE_BYTES] + lease

    # --- parts -----------------------------------------------------------------------------

    def _cut(self, lane: bytes, places: list[Place], begin: int, end: int) -> None:
        del places[begin:end]
        if not places:
            del self.lanes[lane], self._heads[lane]
        elif begin == 0 < end:
            self._note_head(lane, places[0][0])

    def _note_head(self, lane: bytes, rank: int) -> None:
        self._heads[lane] = encode_head(*_split(lane), rank >> RANK_BITS, rank & _ID_MASK)

    def _hold(self, lane: bytes, count: int) -> None:
        if self.fifo:
            group = group_of(lane)
            left = self.held.get(group, 0) + count
            if left:
                self.held[group] = left
            else:
                self.held.pop(group, None)
