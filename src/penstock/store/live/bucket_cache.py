"""The buckets of all queues: on disk, open in memory, and in each queue's directory.

An open bucket is changed in place and written whole, so that several changes in one batch add up.
It stays open until a later batch shows that this one has ended: before that, what is on disk is
behind it. Otherwise the longest unused is closed when open buckets take too much memory.

A directory is rebuilt from the summaries alone. They are trusted when they add up to the queue's
counters, which are committed with them. If they don't, every bucket of the queue is read once and
the summaries that are wrong are made anew. A bucket that can't be read is put aside, and the queue
goes on without it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from penstock.engines import rows_of
from penstock.errors import CorruptRecord, StoreDamaged
from penstock.store.codec import opendata
from penstock.store.codec.summaries import decode_summary
from penstock.store.kv.fronts import DueHeap
from penstock.store.live import Directories
from penstock.store.live.bucket import OpenBucket
from penstock.store.live.bucket_directory import RANK_BITS, Directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock.engines import Batch, Table
    from penstock.store.kv.queues import Queue
    from penstock.store.live import Quarantine
    from penstock.store.live.bucket_directory import Tally

__all__ = ["BucketShelf"]

log = logging.getLogger(__name__)

# About 50,000 messages of ordinary size.
OPEN_BUCKETS_BYTES: Final = 48 * 1024 * 1024
# Buckets may be large, so a full check reads few at a time.
_CHECK_PAGE: Final = 64


class BucketShelf:
    """Reads and writes buckets, and keeps the directories right.

    ``on_heal`` is called for every summary that was wrong, or had no bucket.
    """

    def __init__(self, table: Table, quarantine: Quarantine, on_heal: Callable[[], None]) -> None:
        self._table = table
        self._quarantine = quarantine
        self.directories: Directories[Directory] = Directories()
        # Messages (queue number, claim id) that claims pass over.
        self.passed: set[tuple[int, int]] = set()
        self.queues: dict[int, Queue] = {}
        # queue number -> when its first delayed message comes due
        self.due: DueHeap[int] = DueHeap()
        # (queue number, bucket id) -> bucket, the longest unused first
        self._open: OrderedDict[tuple[int, int], OpenBucket] = OrderedDict()
        self._open_bytes = 0
        # Open buckets that may be ahead of what is committed: touched in the latest batch.
        self._touched: set[tuple[int, int]] = set()
        self._batch: Batch | None = None
        # Summaries to write (None: delete) with the next batch, where none was at hand.
        self._mending: dict[bytes, bytes | None] = {}
        self._on_heal = on_heal

    # --- directories -----------------------------------------------------------------------

    def load(self, queue: Queue) -> None:
        """Rebuild a queue's directory from the summaries."""
        self.forget(queue)
        try:
            self._load(queue)
        except StoreDamaged as error:
            # A bucket that is not known of would be written over.
            log.error("queue %s: its buckets are not known: %s", queue.name, str(error))  # noqa: TRY400
            self.forget(queue)
            self.directories.damage[queue.number] = error.anew()

    def _load(self, queue: Queue) -> None:
        directory = self.directories[queue.number] = Directory(fifo=queue.fifo)
        self.queues[queue.number] = queue
        prefix = opendata.bucket_summary_prefix(queue.id)
        damaged = []
        for key, value in rows_of(self._table, prefix, _after(prefix)):
            bucket_id = int.from_bytes(key[-8:], "big")
            try:
                directory.adopt(bucket_id, decode_summary(value))
            except CorruptRecord as error:
                damaged.append((bucket_id, str(error)))
        for bucket_id, why in damaged:
            record = self._table.get(opendata.active_key(queue.id, bucket_id))
            self._rebuild(queue, directory, bucket_id, record, why)
        counts = queue.counts
        if directory.totals() != (counts.available, counts.delayed, counts.in_flight):
            self._check_all(queue, directory)
            counts.available, counts.delayed, counts.in_flight = directory.totals()
        directory.start_turns()
        self.set_due(queue)

    def forget(self, queue: Queue) -> None:
        """Drop a queue's directory and close its buckets."""
        self.directories.pop(queue.number, None)
        self.directories.damage.pop(queue.number, None)
        self.queues.pop(queue.number, None)
        self.due.set(queue.number, None)
        self._batch = None
        for key in [key for key in self._open if key[0] == queue.number]:
            self._close(key)

    def set_due(self, queue: Queue) -> None:
        """Work out when the first delayed message of a queue comes due."""
        first = self.directories[queue.number].late.first()
        self.due.set(queue.number, None if first is None else first[0] >> RANK_BITS)

    # --- reading ---------------------------------------------------------------------------

    def bucket(self, queue: Queue, bucket_id: int) -> OpenBucket | None:
        """Open a bucket; None if there is none, or none that can be read."""
        key = (queue.number, bucket_id)
        bucket = self._open.get(key)
        if bucket is not None:
            self._open.move_to_end(key)
            return bucket
        directory = self.directories[queue.number]
        known: Tally | None = directory.buckets.get(bucket_id)
        if known is None:
            return None
        record = self._table.get(opendata.active_key(queue.id, bucket_id))
        if record is None:
            self._lose(queue, directory, bucket_id)
            self._healed(queue, bucket_id, "its bucket is gone")
            return None
        try:
            bucket = OpenBucket.decode(queue, bucket_id, record, self._lateness(queue, bucket_id))
        except CorruptRecord as error:
            self._lose(queue, directory, bucket_id)
            self._put_aside(queue, bucket_id, record, str(error))
            return None
        if bucket.tally() != known:
            self._lose(queue, directory, bucket_id)
            self._regain(queue, directory, bucket)
        self._keep(key, bucket)
        if self.passed:
            self.hide(queue, bucket)
        return bucket

    def hide(self, queue: Queue, bucket: OpenBucket) -> None:
        """Make claims pass over the marked messages of a bucket."""
        directory = self.directories[queue.number]
        for claim_id, item in bucket.waiting.items():
            if (queue.number, claim_id) in self.passed:
                bucket.hide(claim_id)
                directory.set_head(item.lane, bucket.id, bucket.head(item.lane))

    def _lateness(self, queue: Queue, bucket_id: int) -> Callable[[int, int], bool] | None:
        """Tell how to know what counts as delayed in a bucket."""
        known: Tally = self.directories[queue.number].buckets[bucket_id]
        if not known.delayed:
            return None
        raw = self._table.get(opendata.bucket_summary_key(queue.id, bucket_id))
        try:
            offsets = decode_summary(raw or b"").late
        except CorruptRecord:
            return _by_time(queue)
        late = frozenset(bucket_id + offset for offset in offsets)
        return lambda claim_id, _: claim_id in late

    # --- writing ---------------------------------------------------------------------------

    def begin(self, batch: Batch) -> None:
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

    def touch(self, queue: Queue, bucket_id: int) -> OpenBucket | None:
        """Open a bucket to change it."""
        self._touched.add((queue.number, bucket_id))
        return self.bucket(queue, bucket_id)

    def make(self, queue: Queue, bucket_id: int) -> OpenBucket:
        """Make a bucket that is not there."""
        assert bucket_id not in self.directories[queue.number].buckets, "the bucket is there"
        key = (queue.number, bucket_id)
        self._touched.add(key)
        bucket = OpenBucket(queue, bucket_id)
        self._keep(key, bucket)
        return bucket

    def write(self, batch: Batch, queue: Queue, buckets: Iterable[OpenBucket]) -> None:
        """Write buckets back with their summaries; delete the empty ones."""
        for bucket in buckets:
            if not len(bucket):
                batch.delete(bucket.key, self._table.family)
                batch.delete(bucket.summary_key, self._table.family)
                directory = self.directories[queue.number]
                directory.buckets.pop(bucket.id, None)
                directory.oldest.set(bucket.id, None)
                self._close((queue.number, bucket.id))
                continue
            before = bucket.cost
            batch.put(bucket.key, bucket.encode(), self._table.family)
            self._open_bytes += bucket.cost - before
            self.write_summary(batch, queue, bucket)

    def write_summary(self, batch: Batch, queue: Queue, bucket: OpenBucket) -> None:
        """Write a summary, when nothing in the bucket itself has changed."""
        batch.put(bucket.summary_key, bucket.summary(), self._table.family)
        directory = self.directories[queue.number]
        directory.buckets[bucket.id] = bucket.tally()
        directory.oldest.set(bucket.id, bucket.oldest())

    # --- what is open ------------------------------------------------------------------------

    def _keep(self, key: tuple[int, int], bucket: OpenBucket) -> None:
        self._open[key] = bucket
        self._open_bytes += bucket.cost
        self._close_unused()

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

    def differing(self, queue: Queue) -> Iterator[int]:
        """Give the open buckets of a queue that are not as the table has them."""
        for (number, bucket_id), bucket in self._open.items():
            if number == queue.number:
                record, summary = self._table.multi_get([bucket.key, bucket.summary_key])
                late = {bucket_id + offset for offset in decode_summary(summary or b"").late}
                if record != bucket.record() or late != bucket.late_claims:
                    yield bucket_id

    # --- healing -----------------------------------------------------------------------------

    def _check_all(self, queue: Queue, directory: Directory) -> None:
        """Read every bucket, and make the directory agree with what is there."""
        log.warning("queue %s: summaries and counters differ, checking all buckets", queue.name)
        prefix = opendata.active_prefix(queue.id)
        unseen = set(directory.buckets)
        for key, record in rows_of(self._table, prefix, _after(prefix), page=_CHECK_PAGE):
            bucket_id = int.from_bytes(key[-8:], "big")
            unseen.discard(bucket_id)
            known = directory.buckets.get(bucket_id)
            if known is None:
                self._rebuild(queue, directory, bucket_id, record, "there was none")
                continue
            try:
                bucket = OpenBucket.decode(
                    queue, bucket_id, record, self._lateness(queue, bucket_id)
                )
            except CorruptRecord:
                # It is put aside when it is opened.
                continue
            if bucket.tally() != known:
                directory.drop(bucket_id)
                self._rebuild(queue, directory, bucket_id, record, "it did not agree")
        for bucket_id in unseen:
            directory.drop(bucket_id)
            self._rebuild(queue, directory, bucket_id, None, "its bucket is gone")

    def _rebuild(
        self, queue: Queue, directory: Directory, bucket_id: int, record: bytes | None, why: str
    ) -> None:
        """Make a summary anew from its bucket, while the directory is being made."""
        self._healed(queue, bucket_id, why)
        summary_key = opendata.bucket_summary_key(queue.id, bucket_id)
        self._mending[summary_key] = None
        if record is None:
            return
        try:
            bucket = OpenBucket.decode(queue, bucket_id, record, _by_time(queue))
        except CorruptRecord as error:
            self._put_aside(queue, bucket_id, record, str(error))
            return
        summary = bucket.summary()
        self._mending[summary_key] = summary
        directory.adopt(bucket_id, decode_summary(summary))

    def _lose(self, queue: Queue, directory: Directory, bucket_id: int) -> None:
        """Go on without a bucket."""
        lost = directory.drop(bucket_id)
        self._mending[opendata.bucket_summary_key(queue.id, bucket_id)] = None
        queue.counts.available -= lost.ready
        queue.counts.delayed -= lost.delayed
        queue.counts.in_flight -= lost.in_flight
        self.set_due(queue)

    def _regain(self, queue: Queue, directory: Directory, bucket: OpenBucket) -> None:
        """Take a bucket in as it is, whose summary said otherwise."""
        self._healed(queue, bucket.id, "it did not agree")
        summary = bucket.summary()
        self._mending[bucket.summary_key] = summary
        directory.adopt(bucket.id, decode_summary(summary))
        for lane in bucket.lanes:
            directory.set_head(lane, bucket.id, bucket.head(lane))
        found = bucket.tally()
        queue.counts.available += found.ready
        queue.counts.delayed += found.delayed
        queue.counts.in_flight += found.in_flight
        self.set_due(queue)

    def _put_aside(self, queue: Queue, bucket_id: int, record: bytes, why: str) -> None:
        self._quarantine("buckets", opendata.active_key(queue.id, bucket_id), record, why)
        # Its key is deleted with a later commit: nothing may be written there again.
        exponent, number = opendata.split_id(bucket_id)
        end = number + opendata.capacity(exponent)
        queue.counts.next_claim = max(queue.counts.next_claim, end)

    def _healed(self, queue: Queue, bucket_id: int, why: str) -> None:
        self._on_heal()
        log.warning("queue %s: summary of bucket %#x mended: %s", queue.name, bucket_id, why)


def _by_time(queue: Queue) -> Callable[[int, int], bool]:
    """Tell what counts as delayed by the latest time that the queue has seen."""
    floor_ms = queue.counts.time_floor_ms
    return lambda _, visible_at_ms: visible_at_ms > floor_ms


def _after(prefix: bytes) -> bytes:
    """Return the first key after every key of a bucket with this prefix."""
    return prefix + b"\xff" * 9
