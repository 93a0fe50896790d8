"""The buckets of all queues in memory: each queue's directory, and some open buckets.

A directory has for each bucket how many messages it has in each state, its oldest waiting message
and its first delayed one; and for each lane in it, the rank of the lane's first message there. So a
claim reads only the buckets that it takes from. Directories grow with the number of buckets, and
with the number of (lane, bucket) pairs where groups or priorities are many, never with the number
of messages as such.

An open bucket is changed in place and written whole, so that several changes in one batch add up.
It stays open until a later batch shows that this one has ended: before that, the disk is behind it.
Otherwise the longest unused is closed when open buckets take too much memory.

A directory is rebuilt from the summaries of buckets alone. They are trusted when they add up to the
queue's counters, which are committed with them. If they don't, every bucket of the queue is read
once and wrong summaries are made anew. An unreadable bucket is put into the quarantine, and the
queue goes on without it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from sortedcontainers import SortedDict

from penstock.engines import rows_of
from penstock.errors import CorruptRecord, StoreDamaged
from penstock.model import State
from penstock.store.codec import opendata
from penstock.store.codec.buckets import decode_summary
from penstock.store.kv.tables import DueHeap
from penstock.store.live import ActiveSet, group_of, lane_of
from penstock.store.live.bucket import RANK_BITS, OpenBucket, Tally, rank_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock.engines import Batch, Table
    from penstock.store.codec.buckets import Summary
    from penstock.store.kv.queues import Queue
    from penstock.store.live import Quarantine

log = logging.getLogger(__name__)

# About 50,000 messages of ordinary size.
OPEN_BUCKETS_BYTES: Final = 48 * 1024 * 1024
# Buckets may be large, so a full check reads few at a time.
_CHECK_PAGE: Final = 64
# Behind a prefix: after every key of a bucket.
_AFTER: Final = b"\xff" * 9
_TALLY_FIELDS: Final = {State.AVAILABLE: 0, State.DELAYED: 1, State.IN_FLIGHT: 2}


class BucketDirectory:
    """The buckets of one queue, and its groups in turn.

    A group is in the ring while it has something to claim. On a FIFO queue it is there while it
    has anything waiting, unless it is ``held`` (messages in flight, by bucket) or ``blocked`` (a
    claim found its head not visible).
    """

    def __init__(self) -> None:
        # bucket id -> Tally, in the order of ids
        self.buckets: Any = SortedDict()
        # By group and lane: the rank of the lane's first message in each bucket.
        self.lanes: dict[bytes, dict[bytes, DueHeap[int]]] = {}
        # The first group is next in turn.
        self.ring: OrderedDict[bytes, None] = OrderedDict()
        self.held: dict[bytes, dict[int, int]] = {}
        self.blocked: set[bytes] = set()
        # By bucket: the rank by time of its first delayed message; its oldest waiting message.
        self.late: DueHeap[int] = DueHeap()
        self.oldest: DueHeap[int] = DueHeap()

    def adopt(self, bucket_id: int, summary: Summary) -> None:
        """Add a bucket by its summary. Turns begin with :meth:`start_turns`."""
        self.buckets[bucket_id] = Tally(summary.ready, summary.delayed, summary.in_flight)
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
        rows = self.buckets.values()
        return Tally(*(sum(row[field] for row in rows) for field in range(3)))

    def holding(self, state: State, at_least: int) -> Iterator[int]:
        """Yield the buckets from an id on that have messages in a state."""
        field = _TALLY_FIELDS[state]
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
        if not ranking.ranks:
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
        """Remove a bucket, if it is there, whatever it held; return its tally."""
        for lane in [lane for lanes in self.lanes.values() for lane in lanes]:
            self.set_head(lane, bucket_id, None)
        for group, counts in list(self.held.items()):
            self.unhold(group, bucket_id, counts.get(bucket_id, 0))
        self.late.set(bucket_id, None)
        self.oldest.set(bucket_id, None)
        row: Tally = self.buckets.pop(bucket_id, Tally(0, 0, 0))
        return row

    def _ranking(self, lane: bytes) -> DueHeap[int]:
        lanes = self.lanes.setdefault(group_of(lane), {})
        ranking = lanes.get(lane)
        if ranking is None:
            ranking = lanes[lane] = DueHeap()
        return ranking


class BucketCache(ActiveSet[BucketDirectory]):
    """Reads and writes buckets, and keeps the directories right.

    ``healed`` counts the summaries that were wrong, or had no bucket.
    """

    def __init__(self, table: Table, quarantine: Quarantine) -> None:
        super().__init__(quarantine)
        self._table = table
        # (queue number, bucket id) -> bucket, the longest unused first
        self._open: OrderedDict[tuple[int, int], OpenBucket] = OrderedDict()
        self._open_bytes = 0
        # Open buckets that may be ahead of the last commit: touched in the latest batch.
        self._touched: set[tuple[int, int]] = set()
        self._batch: Batch | None = None
        # Summaries to write (None: delete) with the next batch, if none was at hand.
        self._mending: dict[bytes, bytes | None] = {}

    # --- directories -----------------------------------------------------------------------

    def load(self, queue: Queue) -> None:
        """Rebuild a queue's directory from the summaries of its buckets."""
        self.forget(queue)
        try:
            directory = self._directories[queue.number] = BucketDirectory()
            self._queues[queue.number] = queue
            prefix, counts = opendata.SUMMARY.prefix(queue.id), queue.counts
            told = counts.available, counts.delayed, counts.in_flight
            damaged = []
            for key, value in rows_of(self._table, prefix, prefix + _AFTER):
                bucket_id = int.from_bytes(key[-8:], "big")
                try:
                    directory.adopt(bucket_id, decode_summary(value))
                except CorruptRecord as error:
                    damaged.append((bucket_id, str(error)))
            for bucket_id, why in damaged:
                record = self._table.get(opendata.ACTIVE.key(queue.id, bucket_id))
                self._rebuild(queue, bucket_id, record, why)
            if directory.totals() != told:
                self._check_all(queue)
            counts.available, counts.delayed, counts.in_flight = directory.totals()
        except StoreDamaged as error:
            # A bucket that the directory does not know would be written over.
            log.error("queue %s: its buckets are not known: %s", queue.name, str(error))  # noqa: TRY400
            self.forget(queue)
            self.damage[queue.number] = error.anew()
        else:
            directory.start_turns()
            self._set_due(queue)

    def forget(self, queue: Queue) -> None:
        """Drop a queue's directory and close its buckets."""
        super().forget(queue)
        self._batch = None
        for key in [key for key in self._open if key[0] == queue.number]:
            self._close(key)

    def _set_due(self, queue: Queue) -> None:
        """Work out when the first delayed message of a queue comes due."""
        first = self._directories[queue.number].late.first()
        self._due.set(queue.number, None if first is None else first[0] >> RANK_BITS)

    # --- open buckets ----------------------------------------------------------------------

    def _bucket(self, queue: Queue, bucket_id: int) -> OpenBucket | None:
        """Open a bucket; None if there is none, or none that can be read."""
        key = (queue.number, bucket_id)
        bucket = self._open.get(key)
        if bucket is not None:
            self._open.move_to_end(key)
            return bucket
        known: Tally | None = self._directories[queue.number].buckets.get(bucket_id)
        if known is None:
            return None
        record = self._table.get(opendata.ACTIVE.key(queue.id, bucket_id))
        if record is None:
            self._mend(queue, bucket_id, None, "its bucket is gone")
            return None
        bucket = self._decode(queue, bucket_id, record, self._lateness(queue, bucket_id))
        if bucket is None:
            self._mend(queue, bucket_id, None, None)
            return None
        if bucket.tally() != known:
            self._mend(queue, bucket_id, bucket, "it did not agree")
        self._keep(queue, bucket)
        if queue.number in self.passed:
            self._hide(queue, bucket)
        return bucket

    def _hide(self, queue: Queue, bucket: OpenBucket) -> None:
        """Make claims pass over the marked messages of a bucket."""
        directory, passed = self._directories[queue.number], self.passed[queue.number]
        for claim_id, item in bucket.waiting.items():
            if claim_id in passed:
                bucket.hide(claim_id)
                directory.set_head(item.lane, bucket.id, bucket.head(item.lane))

    def _lateness(self, queue: Queue, bucket_id: int) -> Callable[[int, int], bool] | None:
        """Return a test for delayed messages of a bucket; None if it has none."""
        known: Tally = self._directories[queue.number].buckets[bucket_id]
        if not known.delayed:
            return None
        raw = self._table.get(opendata.SUMMARY.key(queue.id, bucket_id))
        try:
            offsets = decode_summary(raw or b"").late
        except CorruptRecord:
            return _by_time(queue)
        late = frozenset(bucket_id + offset for offset in offsets)
        return lambda claim_id, _: claim_id in late

    def _keep(self, queue: Queue, bucket: OpenBucket) -> OpenBucket:
        self._open[queue.number, bucket.id] = bucket
        self._open_bytes += bucket.cost
        self._close_unused()
        return bucket

    def _close_unused(self) -> None:
        spared = 0
        while self._open_bytes > OPEN_BUCKETS_BYTES and spared <= len(self._touched):
            key = next(iter(self._open))
            if key in self._touched:
                self._open.move_to_end(key)
                spared += 1
            elif len(self._open) > 1:
                self._close(key)
            else:
                break

    def _close(self, key: tuple[int, int]) -> None:
        self._open_bytes -= self._open.pop(key).cost

    # --- writing ---------------------------------------------------------------------------

    def _begin(self, batch: Batch) -> None:
        """Start a change; a batch not seen before means that the one before has ended."""
        if batch is not self._batch:
            self._batch = batch
            self._touched.clear()
            self._close_unused()
        if self._mending:
            for key, value in self._mending.items():
                if value is None:
                    batch.delete(key, self._table.family)
                else:
                    batch.put(key, value, self._table.family)
            self._mending.clear()

    def _touch(self, queue: Queue, bucket_id: int) -> OpenBucket | None:
        """Open a bucket to change it."""
        self._touched.add((queue.number, bucket_id))
        return self._bucket(queue, bucket_id)

    def _write(self, batch: Batch, queue: Queue, buckets: Iterable[OpenBucket]) -> None:
        """Write buckets back with their summaries; delete the empty ones."""
        for bucket in buckets:
            if not len(bucket):
                batch.delete(bucket.key, self._table.family)
                batch.delete(bucket.summary_key, self._table.family)
                directory = self._directories[queue.number]
                directory.buckets.pop(bucket.id, None)
                directory.oldest.set(bucket.id, None)
                self._close((queue.number, bucket.id))
                continue
            before = bucket.cost
            batch.put(bucket.key, bucket.encode(), self._table.family)
            self._open_bytes += bucket.cost - before
            self._write_summary(batch, queue, bucket)

    def _write_summary(self, batch: Batch, queue: Queue, bucket: OpenBucket) -> None:
        batch.put(bucket.summary_key, bucket.summary(), self._table.family)
        directory = self._directories[queue.number]
        directory.buckets[bucket.id] = bucket.tally()
        directory.oldest.set(bucket.id, bucket.oldest())

    # --- healing ---------------------------------------------------------------------------

    def _check_all(self, queue: Queue) -> None:
        """Read every bucket, and make the directory agree with them."""
        directory = self._directories[queue.number]
        log.warning("queue %s: summaries and counters differ, checking all buckets", queue.name)
        prefix = opendata.ACTIVE.prefix(queue.id)
        unseen = set(directory.buckets)
        for key, record in rows_of(self._table, prefix, prefix + _AFTER, page=_CHECK_PAGE):
            bucket_id = int.from_bytes(key[-8:], "big")
            unseen.discard(bucket_id)
            known, why = directory.buckets.get(bucket_id), "there was none"
            if known is not None:
                is_late = self._lateness(queue, bucket_id)
                try:
                    bucket = OpenBucket.decode(queue, bucket_id, record, is_late)
                except CorruptRecord:
                    # It is put aside when it is opened.
                    continue
                if bucket.tally() == known:
                    continue
                why = "it did not agree"
            self._rebuild(queue, bucket_id, record, why)
        for bucket_id in unseen:
            self._rebuild(queue, bucket_id, None, "its bucket is gone")

    def _rebuild(self, queue: Queue, bucket_id: int, record: bytes | None, why: str) -> None:
        """Make a summary anew from its bucket, by the latest time that the queue has seen."""
        is_late = _by_time(queue)
        bucket = None if record is None else self._decode(queue, bucket_id, record, is_late)
        self._mend(queue, bucket_id, bucket, why)

    def _mend(
        self, queue: Queue, bucket_id: int, bucket: OpenBucket | None, why: str | None
    ) -> None:
        """Make directory and counters agree with a bucket; None: go on without it.

        Its summary is written with the next batch. ``why`` tells of a summary that was wrong.
        """
        directory = self._directories[queue.number]
        self._mending[opendata.SUMMARY.key(queue.id, bucket_id)] = None
        self._add_to_counts(queue, directory.drop(bucket_id), -1)
        if bucket is not None:
            summary = self._mending[bucket.summary_key] = bucket.summary()
            directory.adopt(bucket_id, decode_summary(summary))
            for lane in bucket.lanes:
                directory.set_head(lane, bucket_id, bucket.head(lane))
            self._add_to_counts(queue, bucket.tally(), 1)
        if why is not None:
            self.healed += 1
            log.warning("queue %s: summary of bucket %#x mended: %s", queue.name, bucket_id, why)

    def _add_to_counts(self, queue: Queue, tally: Tally, sign: int) -> None:
        queue.counts.available += sign * tally.ready
        queue.counts.delayed += sign * tally.delayed
        queue.counts.in_flight += sign * tally.in_flight
        self._set_due(queue)

    def _decode(
        self, queue: Queue, bucket_id: int, record: bytes,
        is_late: Callable[[int, int], bool] | None,
    ) -> OpenBucket | None:  # fmt: skip
        """Decode a bucket, or put its record into the quarantine."""
        try:
            return OpenBucket.decode(queue, bucket_id, record, is_late)
        except CorruptRecord as error:
            key = opendata.ACTIVE.key(queue.id, bucket_id)
            self._quarantine("buckets", key, record, str(error))
            # Its key is deleted with a later commit: nothing may be written there again.
            exponent, number = opendata.split_id(bucket_id)
            end = number + opendata.capacity(exponent)
            queue.counts.next_claim = max(queue.counts.next_claim, end)
            return None


def _by_time(queue: Queue) -> Callable[[int, int], bool]:
    """Return a test for delayed messages by the latest time that the queue has seen."""
    floor_ms = queue.counts.time_floor_ms
    return lambda _, visible_at_ms: visible_at_ms > floor_ms
