"""Queues as a store knows them: spec, number, counters, pending dead letters; and their records.

::

    table queues
    02 06 | name                 queue spec (codec/records.py)
    02 0b | name                 counters: 01 version, then a MessagePack array of the fields of
                                 Counts: mostly small numbers, written with every commit
    02 13 | name                 Coverage, MessagePack
    02 16 | name                 while waiting messages are being listed to expire, because their
                                 retention has changed: 00 delayed or 01 available ones, and the
                                 cursor of the first page that is not listed

Upgrade recipe for the counters: append fields, raise the version byte; a shorter record reads
with zeros for what it lacks.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.engines import rows_of
from penstock.errors import CorruptRecord
from penstock.model import Ordering, QueueSpec, State
from penstock.store.codec import opendata, records
from penstock.store.policy import Coverage

if TYPE_CHECKING:
    from penstock.engines import Batch, Table

log = logging.getLogger(__name__)

_SPECS: Final = b"\x02\x06"
_COUNTS: Final = b"\x02\x0b"
_COVERAGE: Final = b"\x02\x13"
_LISTING: Final = b"\x02\x16"
# Delayed ones first: what comes due meanwhile is listed with the available ones then.
_LISTED: Final = (State.DELAYED, State.AVAILABLE)
_COUNTS_VERSION: Final = b"\x01"


class Counts(msgspec.Struct, array_like=True):
    """Depths, totals and positions of one queue; written with every commit that changes them."""

    available: int = 0
    delayed: int = 0
    in_flight: int = 0
    done: int = 0
    failed: int = 0
    enqueued_total: int = 0
    claimed_total: int = 0
    acked_total: int = 0
    released_total: int = 0
    lease_expired_total: int = 0
    failed_total: int = 0
    redriven_total: int = 0
    removed_total: int = 0
    # Next numbers of the done and failed sequences, and of the bucket design's claim numbers.
    next_done: int = 0
    next_failed: int = 0
    next_claim: int = 0
    # The latest time at which anything happened here: the store's time never goes below it.
    time_floor_ms: int = 0
    moved_in_total: int = 0
    moved_out_total: int = 0
    # Payload bytes of live messages, if the queue has max_bytes: else 0, as nobody counts.
    live_bytes: int = 0

    @property
    def load(self) -> tuple[int, int]:
        """The messages that wait or are in flight, and the bytes of their payloads."""
        return self.available + self.delayed + self.in_flight, self.live_bytes


_encode: Final = msgspec.msgpack.Encoder().encode


class Queue:
    """A queue while its store is open. ``id`` is its name as bytes, for the RFC's keys."""

    def __init__(self, spec: QueueSpec, number: int, counts: Counts) -> None:
        self.name = spec.name
        self.id = spec.name.encode()
        self.number = number
        self.counts = counts
        self.spec = spec
        # Which offsets it has been filled from; its store reads them when it takes the queue in.
        self.coverage = Coverage([])
        self.fifo = spec.ordering is Ordering.FIFO
        # Every claim and every ack needs these beginnings of keys.
        self.number4 = number.to_bytes(4, "big")
        self.counts_key = _COUNTS + self.id
        self.attempts_prefix = opendata.ATTEMPTS.prefix(self.id)

    def respec(self, spec: QueueSpec) -> None:
        """Take a changed spec. Name and ordering never change."""
        assert spec.name == self.name
        assert spec.ordering is self.spec.ordering
        self.spec = spec


class DeadLetters:
    """The queues whose failed messages another queue is to get, in memory alone.

    The queues' settings and counters tell it when a store is opened. A queue without failed
    messages, or without a dead letter queue, costs nothing here.
    """

    def __init__(self) -> None:
        # Numbers of queues, in the order in which they came.
        self.pending: dict[int, None] = {}
        # Number of a queue -> name of the queue that it waits for, which is not there, or drains
        self._parked: dict[int, str] = {}

    def knows(self, queue: Queue) -> bool:
        """Whether failed messages of a queue will be moved, now or when their target is there."""
        return queue.number in self.pending or queue.number in self._parked

    def note(self, queue: Queue) -> None:
        """Note that a message of a queue has failed."""
        if queue.spec.dead_letter:
            self.pending[queue.number] = None

    def adopt(self, queue: Queue) -> None:
        """Take in a queue that is new, or whose settings have changed; others may wait for it."""
        self.forget(queue)
        if queue.counts.failed:
            self.note(queue)
        waiting = [number for number, name in self._parked.items() if name == queue.name]
        for number in sorted(waiting):
            del self._parked[number]
            self.pending[number] = None

    def forget(self, queue: Queue) -> None:
        """Forget a queue that is gone, or that another dead letter queue was given to."""
        self.pending.pop(queue.number, None)
        self._parked.pop(queue.number, None)

    def park(self, queue: Queue) -> None:
        """Let a queue wait until its dead letter queue is there; say so once."""
        self.pending.pop(queue.number, None)
        name = queue.spec.dead_letter
        if self._parked.get(queue.number) != name:
            self._parked[queue.number] = name
            text = "queue %s: its dead letter queue %s is not there; what fails stays until it is"
            log.warning(text, queue.name, name)


class QueueTable:
    """Reads and writes specs and counters."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def load(self) -> list[Queue]:
        """Read every queue."""
        queues = []
        rows = list(rows_of(self._table, _SPECS, b"\x02\x07"))
        counted = self._table.multi_get([_COUNTS + key[2:] for key, _ in rows])
        for (key, record), count_record in zip(rows, counted, strict=True):
            spec, number = records.decode_queue_spec(record)
            if spec.name.encode() != key[2:]:
                raise CorruptRecord(f"queue spec: of {spec.name!r}, under the key {key.hex()}")
            counts = Counts() if count_record is None else decode_counts(count_record)
            queues.append(Queue(spec, number, counts))
        return queues

    def put_spec(self, batch: Batch, queue: Queue) -> None:
        """Write a spec."""
        record = records.encode_queue_spec(queue.spec, queue.number)
        batch.put(_SPECS + queue.id, record, self._table.family)

    def put_counts(self, batch: Batch, queue: Queue) -> None:
        """Write a queue's counters."""
        counts, values = queue.counts, msgspec.structs.astuple(queue.counts)
        if min(values) < 0:
            # A wrong counter must not stop its queue; a check sets it right.
            log.error("queue %s: a counter is below zero: %s", queue.name, counts)
            counts = Counts(*(max(0, value) for value in values))
        batch.put(queue.counts_key, encode_counts(counts), self._table.family)

    def coverage(self, queue: Queue) -> Coverage:
        """Read which offsets a queue has been filled from."""
        record = self._table.get(_COVERAGE + queue.id)
        if record is None:
            return Coverage([])
        return records.unpack(record, Coverage, f"coverage of queue {queue.name}")

    def put_coverage(self, batch: Batch, queue: Queue, coverage: Coverage) -> None:
        """Write which offsets a queue has been filled from."""
        batch.put(_COVERAGE + queue.id, msgspec.msgpack.encode(coverage), self._table.family)

    def listing(self, queue: Queue) -> tuple[State, bytes] | None:
        """Read how far the waiting messages of a queue are listed to expire; None: all are."""
        record = self._table.get(_LISTING + queue.id)
        return None if record is None else (_LISTED[record[:1] == b"\x01"], record[1:])

    def put_listing(self, batch: Batch, queue: Queue, listing: tuple[State, bytes] | None) -> None:
        """Write how far they are."""
        if listing is None:
            batch.delete(_LISTING + queue.id, self._table.family)
        else:
            record = bytes([_LISTED.index(listing[0])]) + listing[1]
            batch.put(_LISTING + queue.id, record, self._table.family)

    def remove(self, batch: Batch, queue: Queue) -> None:
        """Delete a queue's records."""
        for head in (_COVERAGE, _LISTING, _SPECS, _COUNTS):
            batch.delete(head + queue.id, self._table.family)


def encode_counts(counts: Counts) -> bytes:
    """Encode a queue's counters."""
    return _COUNTS_VERSION + _encode(counts)


def decode_counts(record: bytes) -> Counts:
    """Decode a queue's counters."""
    counts = records.unpack(record, Counts, "queue counters", _COUNTS_VERSION)
    if min(msgspec.structs.astuple(counts)) < 0:
        raise CorruptRecord("queue counters: one is below zero")
    return counts
