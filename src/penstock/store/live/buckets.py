"""The bucket design: few large records, and a directory of what is in which.

This is OpenData-Queue's layout. All of a queue's live messages are in its active buckets::

    table buckets
    02 02 | queue | bucket u64      active bucket v2: available and in-flight messages
    02 09 | queue | bucket u64      its summary (codec/summaries.py), written whenever it changes

A message's key is its claim id: four bits of exponent, the queue's at the time, and a number from
one sequence per queue. It places the message in a bucket, where it stays while it lives, retries
included. A changed exponent opens buckets of another size beside the old ones; the directory
covers them all, so claims and scans walk every exponent in use.

Memory has a directory (``bucket_directory``) that grows with the number of buckets, and with the
number of (lane, bucket) pairs where groups or priorities are many, never with the depth as such;
and a bounded amount of open buckets (``bucket_shelf``, ``open_bucket``).
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from penstock.engines import Shape
from penstock.errors import CorruptRecord, InvalidInput, StoreDamaged
from penstock.model import State
from penstock.store.codec import opendata
from penstock.store.live import Item, group_of
from penstock.store.live.bucket_cache import BucketShelf
from penstock.store.live.bucket_directory import RANK_BITS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.engines import Batch, Engine
    from penstock.store.kv.fronts import Fronts
    from penstock.store.kv.queues import Queue
    from penstock.store.live import Beliefs, Grant, Quarantine
    from penstock.store.live.bucket import OpenBucket
    from penstock.store.live.bucket_directory import Directory

__all__ = ["TABLES", "BucketActive"]

TABLES: Final[Mapping[str, Shape]] = {"buckets": Shape.SHORT_LIVED}

_NO_PRIORITY: Final = b"\xff"
_CURSOR_BYTES: Final = 8


class BucketActive:
    """The active set of the bucket design."""

    def __init__(self, engine: Engine, quarantine: Quarantine) -> None:
        self._shelf = BucketShelf(engine.table("buckets"), quarantine, self._note_healed)
        self.damage = self._shelf.directories.damage
        self.unread: list[StoreDamaged] = []
        self.healed = 0
        self.fronts: Sequence[Fronts] = ()

    @property
    def passed(self) -> set[tuple[int, int]]:
        """Messages (queue number, key) that claims pass over."""
        return self._shelf.passed

    @passed.setter
    def passed(self, passed: set[tuple[int, int]]) -> None:
        self._shelf.passed = passed

    def _note_healed(self) -> None:
        self.healed += 1

    def load(self, queue: Queue) -> None:
        """Rebuild the directory of a queue from the summaries of its buckets."""
        self._shelf.load(queue)

    def forget(self, queue: Queue) -> None:
        """Drop a queue's directory."""
        self._shelf.forget(queue)

    def ready_groups(self, queue: Queue) -> int:
        """Return how many groups have something to claim; FIFO: something waiting."""
        return len(self._directory(queue).ring)

    def _directory(self, queue: Queue) -> Directory:
        return self._shelf.directories[queue.number]

    def _touch(self, queue: Queue, touched: dict[int, OpenBucket], key: int) -> OpenBucket | None:
        """Open the bucket of a claim to change it, and remember it among those to be written."""
        bucket_id = _bucket_of(key)
        if bucket_id is None:
            return None
        bucket = touched.get(bucket_id)
        if bucket is None:
            bucket = self._shelf.touch(queue, bucket_id)
            if bucket is not None:
                touched[bucket_id] = bucket
        return bucket

    # --- in ------------------------------------------------------------------------------

    def add(self, batch: Batch, queue: Queue, items: Sequence[Item], now_ms: int) -> None:
        """Give each message the next claim id, and append it to that id's bucket."""
        self._shelf.begin(batch)
        counts, fifo, exponent = queue.counts, queue.fifo, queue.spec.bucket_exponent
        base, size = opendata.make_id(exponent, 0), opendata.capacity(exponent)
        filled: list[OpenBucket] = []
        delayed = 0
        end = -1
        for item in items:
            if counts.next_claim >= end:
                bucket = self._tail(queue, base, size)
                filled.append(bucket)
                end = counts.next_claim - counts.next_claim % size + size
            item.key = base | counts.next_claim
            counts.next_claim += 1
            if fifo:
                item.lane = item.lane[:-1] + _NO_PRIORITY
            delayed += self._put_waiting(queue, bucket, item, now_ms)
        counts.delayed += delayed
        counts.available += len(items) - delayed
        self._shelf.write(batch, queue, filled)

    def _tail(self, queue: Queue, base: int, size: int) -> OpenBucket:
        """Open the bucket of the next claim id, or make it."""
        directory = self._directory(queue)
        while True:
            number = queue.counts.next_claim
            bucket_id = base | (number - number % size)
            if bucket_id not in directory.buckets:
                return self._shelf.make(queue, bucket_id)
            try:
                bucket = self._shelf.touch(queue, bucket_id)
            except StoreDamaged as error:
                self.damage[queue.number] = error.anew()
                queue.counts.next_claim = number - number % size + size
                continue
            if bucket is not None:
                return bucket

    def _put_waiting(self, queue: Queue, bucket: OpenBucket, item: Item, now_ms: int) -> bool:
        """Put a message into a bucket; say whether it is delayed."""
        late = item.visible_at_ms > now_ms
        directory = self._directory(queue)
        if bucket.put_waiting(item, late=late):
            directory.set_head(item.lane, bucket.id, bucket.head(item.lane))
        if late:
            directory.late.set(bucket.id, bucket.due_rank())
            self._shelf.due.lower(queue.number, item.visible_at_ms)
        elif directory.blocked:
            # On a FIFO queue it may stand before the head that its group waits for.
            directory.unblock(group_of(item.lane))
        return late

    def come_due(self, batch: Batch, now_ms: int, budget: int) -> list[tuple[Queue, int]]:
        """Count delayed messages as ready in the order of their times; only summaries change."""
        self._shelf.begin(batch)
        moved: list[tuple[Queue, int]] = []
        while budget > 0 and (first := self._shelf.due.first()) and first[0] <= now_ms:
            queue = self._shelf.queues[first[1]]
            count = self._count_over(batch, queue, now_ms, budget)
            queue.counts.delayed -= count
            queue.counts.available += count
            self._shelf.set_due(queue)
            budget -= count
            moved.append((queue, count))
        return moved

    def _count_over(self, batch: Batch, queue: Queue, now_ms: int, budget: int) -> int:
        directory = self._directory(queue)
        touched: dict[int, OpenBucket] = {}
        count = 0
        while count < budget and (first := directory.late.first()):
            rank, bucket_id = first
            if rank >> RANK_BITS > now_ms:
                break
            try:
                bucket = self._touch(queue, touched, bucket_id)
            except StoreDamaged as error:
                self.damage[queue.number] = error.anew()
                bucket = None
            if bucket is None:
                directory.late.set(bucket_id, None)
                continue
            lane, heads = bucket.come_due()
            directory.late.set(bucket_id, bucket.due_rank())
            if heads:
                directory.set_head(lane, bucket_id, bucket.head(lane))
            if queue.fifo:
                directory.unblock(group_of(lane))
            count += 1
        for bucket in touched.values():
            self._shelf.write_summary(batch, queue, bucket)
        return count

    def next_due_ms(self) -> int | None:
        """Return when the next delayed message comes due."""
        first = self._shelf.due.first()
        return first[0] if first else None

    # --- claim ---------------------------------------------------------------------------

    def take(
        self,
        batch: Batch,
        queue: Queue,
        limit: int,
        grants: Iterator[Grant],
        now_ms: int,
    ) -> list[Item]:
        """Visit groups in turn until the limit is reached or no group has more."""
        self._shelf.begin(batch)
        directory = self._directory(queue)
        ring = directory.ring
        changed: dict[int, OpenBucket] = {}
        taken: list[Item] = []
        while ring and len(taken) < limit:
            want = limit - len(taken)
            visits = min(len(ring), want)
            for visit in range(visits):
                # A bucket that can't be read may have taken other groups with it.
                if not ring or len(taken) >= limit:
                    break
                group = next(iter(ring))
                # What one group does not use is shared among those after it.
                room = (limit - len(taken)) // (visits - visit)
                found = self._visit(queue, group, changed, room, grants, now_ms)
                taken += found
                if group in ring:
                    if found:
                        ring.move_to_end(group)
                    elif queue.fifo:
                        directory.block(group)
                    else:
                        # Whatever the directory says: what gives nothing has no further turn.
                        del ring[group]
        queue.counts.available -= len(taken)
        queue.counts.in_flight += len(taken)
        self._shelf.write(batch, queue, changed.values())
        return taken

    def _visit(
        self,
        queue: Queue,
        group: bytes,
        changed: dict[int, OpenBucket],
        limit: int,
        grants: Iterator[Grant],
        now_ms: int,
    ) -> list[Item]:
        """Take up to ``limit`` messages of a group: lane after lane, each in order of rank."""
        directory = self._directory(queue)
        taken: list[Item] = []
        for lane in sorted(directory.lanes[group]):
            while len(taken) < limit:
                ranking = directory.lanes.get(group, {}).get(lane)
                first = None if ranking is None else ranking.first()
                if ranking is None or first is None:
                    break
                try:
                    bucket = self._shelf.touch(queue, first[1])
                except StoreDamaged as error:
                    self.damage[queue.number] = error.anew()
                    if queue.fifo:
                        # The messages behind it wait for it.
                        return taken
                    bucket = None
                if bucket is None:
                    directory.set_head(lane, first[1], None)
                    continue
                if first != ranking.first():
                    # Opening it has shown that the directory was wrong about it.
                    continue
                _, bucket_id, below = ranking.pop()
                count = bucket.takeable(lane, limit - len(taken), below)
                if count:
                    changed[bucket_id] = bucket
                    taken += bucket.take(lane, count, grants, now_ms)
                directory.set_head(lane, bucket_id, bucket.head(lane))
                if not count:
                    # The head of a FIFO group is not visible.
                    return taken
                if queue.fifo:
                    directory.hold(group, bucket_id, count)
        return taken

    # --- in flight -----------------------------------------------------------------------

    def find(self, queue: Queue, keys: Sequence[int]) -> list[Item | None]:
        """Look messages up in flight."""
        return [
            None if bucket is None else _copy(bucket.flight.get(key))
            for key, bucket in self._look_up(queue, keys)
        ]

    def _look_up(
        self, queue: Queue, keys: Sequence[int]
    ) -> Iterator[tuple[int, OpenBucket | None]]:
        """Give each key with its bucket; keys come from receipts and may be anything."""
        last_id: int | None = None
        bucket: OpenBucket | None = None
        for key in keys:
            bucket_id = _bucket_of(key)
            if bucket_id != last_id:
                last_id = bucket_id
                bucket = None if bucket_id is None else self._shelf.bucket(queue, bucket_id)
            yield key, bucket

    def live(self, queue: Queue, message_ids: Sequence[int]) -> list[Item]:
        """Look messages up by their ids, in every bucket that may have one of them."""
        wanted, highest = set(message_ids), max(message_ids, default=0)
        directory = self._directory(queue)
        found = []
        for bucket_id in list(directory.buckets):
            # Opening a bucket may remove it, or another.
            known = directory.buckets.get(bucket_id)
            oldest = directory.oldest.get(bucket_id)
            is_late = oldest is None or oldest > highest
            if known is None or (is_late and not known.in_flight):
                continue
            bucket = self._shelf.bucket(queue, bucket_id)
            if bucket is not None:
                items = (*bucket.waiting.values(), *bucket.flight.values())
                found += [replace(item) for item in items if item.message_id in wanted]
        return found

    def in_flight_by_message(self, queue: Queue, message_id: int) -> Item | None:
        """Look a message up in flight, in every bucket that has something in flight."""
        for bucket in self._holding(queue, State.IN_FLIGHT, 0):
            for item in bucket.flight.values():
                if item.message_id == message_id:
                    return _copy(item)
        return None

    def settle(self, batch: Batch, queue: Queue, items: Sequence[Item]) -> None:
        """Take messages out of their buckets, and let go of FIFO groups."""
        self._land(batch, queue, items, None)

    def put_back(self, batch: Batch, queue: Queue, items: Sequence[Item], now_ms: int) -> None:
        """Move messages from in flight to waiting, inside their buckets."""
        self._land(batch, queue, items, now_ms)

    def pass_over(self, queue: Queue, items: Sequence[Item]) -> None:
        """Make claims pass messages over, in the buckets that they are in."""
        self.passed.update((queue.number, item.key) for item in items)
        for bucket_id in {opendata.bucket_of(item.key) for item in items}:
            bucket = self._shelf.bucket(queue, bucket_id)
            if bucket is not None:
                self._shelf.hide(queue, bucket)

    def _land(
        self, batch: Batch, queue: Queue, items: Sequence[Item], back_at_ms: int | None
    ) -> None:
        self._shelf.begin(batch)
        counts = queue.counts
        touched: dict[int, OpenBucket] = {}
        freed: dict[bytes, list[int]] = {}
        for item in items:
            bucket = self._touch(queue, touched, item.key)
            if bucket is None or bucket.land(item.key) is None:
                continue
            counts.in_flight -= 1
            if back_at_ms is not None:
                if self._put_waiting(queue, bucket, item, back_at_ms):
                    counts.delayed += 1
                else:
                    counts.available += 1
            if queue.fifo:
                freed.setdefault(group_of(item.lane), []).append(bucket.id)
        self._shelf.write(batch, queue, touched.values())
        directory = self._directory(queue)
        # Groups take their turns in the order in which the items name them.
        for group, bucket_ids in freed.items():
            for bucket_id in bucket_ids:
                directory.unhold(group, bucket_id, 1)

    def relabel(self, batch: Batch, queue: Queue, items: Sequence[Item], lease: bytes) -> None:
        """Write another split of the lease into in-flight messages."""
        self._shelf.begin(batch)
        touched: dict[int, OpenBucket] = {}
        for item in items:
            bucket = self._touch(queue, touched, item.key)
            if bucket is not None:
                bucket.relabel(item.key, lease)
        self._shelf.write(batch, queue, touched.values())

    # --- waiting -------------------------------------------------------------------------

    def waiting(self, queue: Queue, keys: Sequence[int]) -> list[Item | None]:
        """Look messages up among available and delayed."""
        return [
            None if bucket is None else _copy(bucket.waiting.get(key))
            for key, bucket in self._look_up(queue, keys)
        ]

    def remove(self, batch: Batch, queue: Queue, items: Sequence[Item]) -> None:
        """Take waiting messages out of their buckets."""
        self._shelf.begin(batch)
        directory = self._directory(queue)
        touched: dict[int, OpenBucket] = {}
        for item in items:
            bucket = self._touch(queue, touched, item.key)
            removed = None if bucket is None else bucket.remove_waiting(item.key)
            if bucket is None or removed is None:
                continue
            lane = removed[0].lane
            directory.set_head(lane, bucket.id, bucket.head(lane))
            if removed[1]:
                queue.counts.delayed -= 1
                directory.late.set(bucket.id, bucket.due_rank())
            else:
                queue.counts.available -= 1
            if queue.fifo:
                directory.unblock(group_of(lane))
        self._shelf.set_due(queue)
        self._shelf.write(batch, queue, touched.values())

    def page(
        self, queue: Queue, state: State, after: bytes, limit: int
    ) -> tuple[list[Item], bytes | None]:
        """Read a page in the order of claim ids, which is that of buckets."""
        start = int.from_bytes(after, "big")
        first_id = _bucket_of(start) if len(after) in {0, _CURSOR_BYTES} else None
        if first_id is None:
            raise InvalidInput(f"not a cursor: {after.hex()[:80]}; pass a page's next_cursor")
        found: list[Item] = []
        for bucket in self._holding(queue, state, first_id):
            flying = state is State.IN_FLIGHT
            items = bucket.flight if flying else bucket.waiting
            delayed = state is State.DELAYED
            found += [
                items[key]
                for key in sorted(items)
                if key >= start and (flying or (key in bucket.late_claims) == delayed)
            ]
            if len(found) > limit:
                break
        following = found[limit].key.to_bytes(_CURSOR_BYTES, "big") if len(found) > limit else None
        return [replace(item) for item in islice(found, limit)], following

    def _holding(self, queue: Queue, state: State, at_least: int) -> Iterator[OpenBucket]:
        """Open, one after the other, the buckets from an id on that have messages in a state."""
        directory = self._directory(queue)
        # Looked up anew each time: opening a bucket may remove it from the directory.
        while (bucket_id := next(directory.holding(state, at_least), None)) is not None:
            bucket = self._shelf.bucket(queue, bucket_id)
            if bucket is not None:
                yield bucket
            at_least = bucket_id + 1

    def oldest(self, queue: Queue) -> Item | None:
        """Return the waiting message with the lowest id."""
        directory = self._directory(queue)
        while (first := directory.oldest.first()) is not None:
            bucket = self._shelf.bucket(queue, first[1])
            if bucket is not None and bucket.waiting:
                return replace(min(bucket.waiting.values(), key=lambda item: item.message_id))
            directory.oldest.set(first[1], None)
        return None

    def beliefs(self, queue: Queue) -> Beliefs:
        """Tell what the directory says; open buckets must be as the table has them."""
        directory = self._directory(queue)
        found = directory.beliefs()
        for group in directory.blocked & directory.lanes.keys():
            lane, ranking = next(iter(directory.lanes[group].items()))
            first = ranking.first()
            bucket = None if first is None else self._shelf.bucket(queue, first[1])
            if bucket is None or bucket.takeable(lane, 1, None):
                found.facts["waits for nothing", group] = True
        for bucket_id in self._shelf.differing(queue):
            found.facts["open bucket", bucket_id] = True
        due_ms = self._shelf.due.get(queue.number)
        if due_ms is not None:
            found.bounds["delays",] = due_ms
        return found


def _bucket_of(key: int) -> int | None:
    """Give the bucket of a claim id; None for a number that is none."""
    try:
        return opendata.bucket_of(key)
    except CorruptRecord:
        return None


def _copy(item: Item | None) -> Item | None:
    """Callers change what they look up; an open bucket must not change with it."""
    return None if item is None else replace(item)
