"""Queues as a store knows them: spec, number, counters; and where both are kept.

::

    table queues
    02 06 | name                 queue spec, version 2 (codec/records.py)
    02 0b | name                 counters, little-endian: 02 version, then u64 each in the order
                                 of Counts' fields
    02 16 | name                 while waiting messages are being listed to expire, because their
                                 retention has changed: 00 delayed or 01 available ones, and the
                                 cursor of the first page that is not listed

Upgrade recipe for the counters: append fields, raise the version byte; a shorter record reads
with zeros for what it lacks. Version 1 had neither ``moved_in_total`` nor ``moved_out_total``.
"""

from __future__ import annotations

import logging
from struct import Struct
from struct import error as struct_error
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.errors import CorruptRecord
from penstock.model import Ordering, QueueSpec, State
from penstock.store.codec import opendata, records

if TYPE_CHECKING:
    from penstock.engines import Batch, Table

__all__ = ["Counts", "Queue", "QueueTable", "decode_counts", "encode_counts"]

log = logging.getLogger(__name__)

_SPECS: Final = b"\x02\x06"
_COUNTS: Final = b"\x02\x0b"
_LISTING: Final = b"\x02\x16"
# Delayed ones first: what comes due meanwhile is listed with the available ones then.
_LISTED: Final = (State.DELAYED, State.AVAILABLE)
_COUNTS_VERSION: Final = b"\x02"
_COUNTS_VERSIONS: Final = {b"\x01": 17, b"\x02": 19}


class Counts(msgspec.Struct):
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


_pack_counts: Final = Struct(f"<{len(Counts.__struct_fields__)}Q")


class Queue:
    """A queue while its store is open. ``id`` is its name as bytes, for the RFC's keys."""

    __slots__ = ("counts", "fifo", "id", "name", "number", "spec")

    def __init__(self, spec: QueueSpec, number: int, counts: Counts) -> None:
        self.name = spec.name
        self.id = spec.name.encode()
        self.number = number
        self.counts = counts
        self.spec = spec
        self.fifo = spec.ordering is Ordering.FIFO

    def respec(self, spec: QueueSpec) -> None:
        """Take a changed spec. Name and ordering never change."""
        assert spec.name == self.name
        assert spec.ordering is self.spec.ordering
        self.spec = spec


class QueueTable:
    """Reads and writes specs and counters."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def load(self) -> list[Queue]:
        """Read every queue."""
        queues = []
        begin, end = _SPECS, b"\x02\x07"
        while rows := self._table.scan(begin, end, 1000):
            counted = self._table.multi_get([_COUNTS + key[2:] for key, _ in rows])
            for (key, record), count_record in zip(rows, counted, strict=True):
                spec, number = _decode_spec(_name(key[2:]), record)
                counts = Counts() if count_record is None else decode_counts(count_record)
                queues.append(Queue(spec, number, counts))
            begin = rows[-1][0] + b"\0"
        return queues

    def put_spec(self, batch: Batch, queue: Queue) -> None:
        """Write a spec."""
        batch.put(_SPECS + queue.id, _encode_spec(queue.spec, queue.number), self._table.family)

    def put_counts(self, batch: Batch, queue: Queue) -> None:
        """Write a queue's counters."""
        try:
            record = encode_counts(queue.counts)
        except struct_error:
            # A wrong counter must not stop its queue; an audit sets it right.
            log.exception("queue %s: a counter is below zero: %s", queue.name, queue.counts)
            values = msgspec.structs.astuple(queue.counts)
            record = encode_counts(Counts(*(max(0, value) for value in values)))
        batch.put(_COUNTS + queue.id, record, self._table.family)

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
        batch.delete(_LISTING + queue.id, self._table.family)
        batch.delete(_SPECS + queue.id, self._table.family)
        batch.delete(_COUNTS + queue.id, self._table.family)


def _name(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise CorruptRecord(f"a queue's name does not decode: {raw.hex()}") from error


def encode_counts(counts: Counts) -> bytes:
    """Encode a queue's counters; ``struct.error`` if one is below zero."""
    return _COUNTS_VERSION + _pack_counts.pack(*msgspec.structs.astuple(counts))


def decode_counts(record: bytes) -> Counts:
    """Decode a queue's counters, of this version or an earlier one."""
    fields = _COUNTS_VERSIONS.get(record[:1])
    if fields is None:
        raise CorruptRecord(f"queue counters: version {record[:1].hex()} is unknown")
    if len(record) != 1 + 8 * fields:
        raise CorruptRecord(f"queue counters: {len(record)} bytes, not {1 + 8 * fields}")
    return Counts(*_pack_counts.unpack(record[1:].ljust(_pack_counts.size, b"\0")))


def _encode_spec(spec: QueueSpec, number: int) -> bytes:
    return records.encode_queue_spec(
        records.QueueSpecV2(
            filter=spec.filter,
            max_attempts=spec.max_attempts,
            bucket_exponent=spec.bucket_exponent,
            description=spec.description,
            ordering=1 if spec.ordering is Ordering.FIFO else 0,
            lease_ms=spec.lease_ms,
            backoff_base_ms=spec.backoff_base_ms,
            backoff_cap_ms=spec.backoff_cap_ms,
            delay_ms=spec.delay_ms,
            done_retention_ms=spec.done_retention_ms,
            failed_retention_ms=spec.failed_retention_ms,
            unclaimed_retention_ms=spec.unclaimed_retention_ms,
            created_at_ms=spec.created_at_ms,
            spec_version=spec.version,
            number=number,
            dead_letter=spec.dead_letter,
            labels=tuple(sorted(spec.labels.items())),
        )
    )


def _decode_spec(name: str, record: bytes) -> tuple[QueueSpec, int]:
    stored = records.decode_queue_spec(2, record)
    spec = QueueSpec(
        name=name,
        filter=stored.filter,
        ordering=Ordering.FIFO if stored.ordering else Ordering.STANDARD,
        lease_ms=stored.lease_ms,
        max_attempts=stored.max_attempts,
        backoff_base_ms=stored.backoff_base_ms,
        backoff_cap_ms=stored.backoff_cap_ms,
        delay_ms=stored.delay_ms,
        done_retention_ms=stored.done_retention_ms,
        failed_retention_ms=stored.failed_retention_ms,
        unclaimed_retention_ms=stored.unclaimed_retention_ms,
        bucket_exponent=stored.bucket_exponent,
        description=stored.description,
        dead_letter=stored.dead_letter,
        labels=dict(stored.labels),
        created_at_ms=stored.created_at_ms,
        version=stored.spec_version,
    )
    return spec, stored.number


assert _SPECS[1] == opendata.RecordType.QUEUE_SPEC
