"""A store at one moment, for reading in bulk: a view of its tables and what memory knew then.

Everything is read from the view, so writers go on meanwhile. Several threads may read one
:class:`Pinned`: a lock lets them take turns, a page at a time. A record that does not decode is
left out and named in the process's log; the store's own readers put it aside.
"""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import CorruptRecord, InvalidInput
from penstock.limits import MAX_ATTEMPTS, MAX_BUCKET_EXPONENT, MAX_OFFSET
from penstock.model import State
from penstock.store.codec import buckets, opendata, records
from penstock.store.codec.records import NO_LEASE, decode_stored_item
from penstock.store.kv.history import History, sequence_of
from penstock.store.kv.log import MetadataLog
from penstock.store.kv.queues import QueueTable
from penstock.store.kv.tables import REFERENCES, Leases, pages_of
from penstock.store.live.indexed_directory import past
from penstock.store.snapshot import Depths, GroupDepths, Keys, LeaseHolder, count_groups, cut_range

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.engines import Table, View
    from penstock.model import LogStats, QueueSpec, QueueStats, StoreStats
    from penstock.store.kv.queues import Queue
    from penstock.store.kv.state import Identity
    from penstock.store.policy import Coverage, LogSettings
    from penstock.store.snapshot import LiveRow

log_ = logging.getLogger(__name__)

LIVE_ROWS: Final = 1_024
_AVAILABLE: Final = State.AVAILABLE.value
_DELAYED: Final = State.DELAYED.value
_IN_FLIGHT: Final = State.IN_FLIGHT.value
# A bucket's number: its size in the highest bits, then what counts.
_NUMBER_BITS: Final = 60


class Pinned(AbstractContextManager["Pinned"]):
    """A store as it was at ``at_ms``. Close it soon: it keeps deleted data on disk."""

    ordered = True

    def __init__(
        self,
        view: View,
        identity: Identity,
        *,
        at_ms: int,
        log: LogStats,
        totals: StoreStats,
        stats: Sequence[QueueStats],
    ) -> None:
        self._view = view
        self._lock = threading.Lock()
        self._closed = False
        self.left_out = 0
        self.identity = identity
        self.at_ms = at_ms
        self.log_stats = log
        self.next_offset: int = log.end
        self.totals = totals
        self.stats = stats
        self._payloads = self.table("payloads")
        self._leases = Leases(self.table("leases"), self.table("lease_expiry"))

    # Read when they are first asked for: while a store is pinned, its other callers wait.

    @cached_property
    def _queues(self) -> dict[str, Queue]:
        found = QueueTable(self.table("queues")).load()
        return {queue.name: queue for queue in sorted(found, key=lambda queue: queue.name)}

    @cached_property
    def queues(self) -> dict[str, QueueSpec]:
        """Every queue's settings, by name."""
        return {name: queue.spec for name, queue in self._queues.items()}

    @cached_property
    def draining(self) -> set[str]:
        """The names of queues that take no more messages."""
        return {name for name in self._queues if self.coverage(name).draining}

    def coverage(self, queue: str) -> Coverage:
        """Return which offsets of the log a queue was filled from."""
        return QueueTable(self.table("queues")).coverage(self._queues[queue])

    @property
    def log_settings(self) -> LogSettings:
        """How the log is spread and kept."""
        return self._log.settings

    @property
    def store_id(self) -> str:
        """Which store it is."""
        return f"{self.identity.store_id:08x}"

    def depths(self, queue: str) -> Depths:
        """Count a queue's messages."""
        counts = self._queues[queue].counts
        return Depths(
            counts.available, counts.delayed, counts.in_flight, counts.done, counts.failed
        )

    def number(self, queue: str) -> int:
        """Return the number that a queue got when it was made."""
        return self._queues[queue].number

    def sequence_ends(self, queue: str) -> dict[State, int]:
        """Return the sequence numbers that done and failed messages of a queue get next."""
        counts = self._queues[queue].counts
        return {State.DONE: counts.next_done, State.FAILED: counts.next_failed}

    def first_ended(self, state: State, queue: str, since_ms: int) -> tuple[int, int] | None:
        """Return sequence and time of the first message that ended at a time or later."""
        found = self._queues[queue]
        runs = (
            next(self._history.since(found, state, exponent, since_ms), None)
            for exponent in range(MAX_BUCKET_EXPONENT + 1)
        )
        return min(((run[0], run[1].ended_at_ms) for run in runs if run), default=None)

    def groups(self, queue: str) -> Iterator[GroupDepths]:
        """Count the live messages of each group of a queue."""
        ranges = self.cut("active", queue, 1)
        return count_groups(page for keys in ranges for page in self.live_rows(keys))

    @cached_property
    def _history(self) -> History:
        return History(self.table("history"), self._leave_out)

    @cached_property
    def _log(self) -> MetadataLog:
        return MetadataLog(self.table("log"), self.store_id, self._leave_out)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the view; a reader that goes on gets an error."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._view.close()

    def table(self, name: str) -> _SharedTable:
        """Return a table as it was, for any number of threads."""
        return _SharedTable(self, name)

    def _leave_out(self, table: str, key: bytes, value: bytes, why: str) -> bool:  # noqa: ARG002
        log_.warning("left out a record of %s, key %s: %s", table, key.hex(), why)
        self.left_out += 1
        return False

    # --- ranges of keys --------------------------------------------------------------------

    def about(self, table: str, queue: str) -> int:
        """Return about how many rows a queue has in active, attempts, done or failed."""
        counts = self._queues[queue].counts
        if table == "active":
            return counts.available + counts.delayed + counts.in_flight
        if table == "attempts":
            return counts.acked_total + counts.released_total + counts.lease_expired_total
        return counts.done if table == "done" else counts.failed

    def cut(
        self, table: str, queue: str, count: int, low: int = 0, high: int = MAX_OFFSET
    ) -> Iterator[Keys]:
        """Cut a queue's rows of one of these into about ``count`` ranges for each of its runs.

        Keys are cut by the u64 after the queue. In a bucket's number the highest bits are its size,
        so that numbers lie in a few dense runs. ``low`` may lie in the first range of each. Numbers
        of live messages are not those that ``low`` and ``high`` count.
        """
        for name, prefix, width in _ranges(self.identity.design, table, self._queues[queue]):
            source = self.table(name)
            least, most = (low, high) if name == "history" else (0, MAX_OFFSET)
            for run in range(MAX_BUCKET_EXPONENT + 1):
                start = least - least % opendata.capacity(run)
                if start >> _NUMBER_BITS:
                    break
                first_key = prefix + (run << _NUMBER_BITS | start).to_bytes(8, "big")
                if most >> _NUMBER_BITS:
                    # One byte longer than any key of the run.
                    last = ((run + 1 << _NUMBER_BITS) - 1).to_bytes(8, "big")
                    last_key = prefix + last + b"\xff" * (width + 1)
                else:
                    last_key = prefix + (run << _NUMBER_BITS | most).to_bytes(8, "big")
                bounds = _ends(source, first_key, last_key)
                if bounds is None:
                    continue
                at = len(prefix)
                first, last_number = (int.from_bytes(key[at : at + 8], "big") for key in bounds)
                for begin, end in cut_range(first, last_number + 1, count):
                    keys = [prefix + each.to_bytes(8, "big") for each in (begin, end)]
                    yield Keys(name, keys[0], keys[1], name != "history")

    def message_ends(self, begin: int, end: int) -> tuple[int, int] | None:
        """Return the first and the last id in [begin, end) whose payload is kept, if any is."""
        bounds = _ends(self._payloads, opendata.payload_key(begin), opendata.payload_key(end))
        if bounds is None:
            return None
        first, last = (int.from_bytes(key[2:], "big") for key in bounds)
        return first, last

    # --- the log -------------------------------------------------------------------------

    def log_rows(self, log: int, begin: int, end: int) -> Iterator[list[tuple[int, bytes]]]:
        """Read messages (id, metadata) of [begin, end) of a log, one stored entry at a time."""
        yield from self._log.entries(log, begin, min(end, self.log_stats.end))

    # --- payloads ------------------------------------------------------------------------

    def payloads(self, message_ids: Sequence[int]) -> list[bytes | None]:
        """Read payloads; None for those that are gone."""
        return self._payloads.multi_get([opendata.payload_key(each) for each in message_ids])

    def payload_rows(self, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Read every kept payload (message id, payload) of ids in [begin, end)."""
        first, last = opendata.payload_key(begin), opendata.payload_key(end)
        # Sixteen at once may be 256 MB, which each reader that is slow would keep.
        for key, payload in pages_of(self._payloads, first, last, page=1):
            yield int.from_bytes(key[2:], "big"), payload

    def payload_sizes(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Read how large every kept payload of ids in [begin, end) is."""
        for message_id, payload in self.payload_rows(begin, end):
            yield message_id, len(payload)

    # --- messages of queues --------------------------------------------------------------

    def live_rows(self, keys: Keys) -> Iterator[list[LiveRow]]:
        """Read live messages of a range of keys."""
        decode = {
            "available": self._waiting_row,
            "in_progress": _flying_row,
            "buckets": self._bucket_rows,
        }[keys.table]
        rows: list[LiveRow] = []
        for key, record in pages_of(self.table(keys.table), keys.begin, keys.end):
            try:
                rows += decode(key, record)
            except CorruptRecord as error:
                self._leave_out(keys.table, key, record, str(error))
            if len(rows) >= LIVE_ROWS:
                yield rows
                rows = []
        if rows:
            yield rows

    def _waiting(self, visible_at_ms: int) -> str:
        # The pin moved messages that had come due, so that time alone tells.
        return _DELAYED if visible_at_ms > self.at_ms else _AVAILABLE

    def _waiting_row(self, key: bytes, record: bytes) -> tuple[LiveRow]:
        metadata, _, attempts, forgiven, visible_at_ms, _ = decode_stored_item(record)
        state = self._waiting(visible_at_ms)
        message_id = int.from_bytes(key[4:], "big")
        return ((message_id, state, attempts, visible_at_ms, NO_LEASE, metadata, forgiven),)

    def _bucket_rows(self, _key: bytes, record: bytes) -> list[LiveRow]:
        available, flying = buckets.decode_active(record)
        found: list[tuple[buckets.Available | buckets.InFlight, str, bytes]] = [
            *((each, self._waiting(each.visible_at), NO_LEASE) for each, _ in available),
            *((each, _IN_FLIGHT, each.lease) for each, _ in flying),
        ]
        return [
            (e.message_id, state, e.attempts, e.visible_at, lease, e.metadata, e.forgiven)
            for e, state, lease in found
        ]

    def leases(self, rows: Sequence[LiveRow]) -> list[LeaseHolder | None]:
        """Return the lease of each live message; None: no lease holds it, or it can't be read."""
        names = sorted({row[4] for row in rows if row[1] == _IN_FLIGHT})
        found = {
            name: LeaseHolder(lease.consumer, lease.claimed_at_ms, lease.expiry_ms)
            for name, lease in self._leases.read(names, self._leave_out).items()
        }
        return [found.get(row[4]) for row in rows]

    def first_claims(self, queue: str, rows: Sequence[LiveRow]) -> list[int | None]:
        """Return when the first attempt at each live message began: a lease or a record tells."""
        found: list[int | None] = [None] * len(rows)
        running = [at for at, row in enumerate(rows) if row[1] == _IN_FLIGHT and row[2] == 1]
        for at, lease in zip(running, self.leases([rows[at] for at in running]), strict=True):
            found[at] = lease.claimed_at_ms or None if lease else None
        ended = [at for at, row in enumerate(rows) if row[2] > (row[1] == _IN_FLIGHT)]
        ids = [rows[at][0] for at in ended]
        told = self._history.first_attempts(self._queues[queue], ids) if ids else ()
        for at, claimed_ms in zip(ended, told, strict=True):
            found[at] = claimed_ms
        return found

    def ended_rows(
        self, state: State, keys: Keys, low: int = 0, high: int = MAX_OFFSET
    ) -> Iterator[tuple[Sequence[int], Sequence[tuple[Any, ...]]]]:
        """Read done or failed messages whose sequence is in [low, high), with their sequences.

        Of each: message id, key, when it ended, attempts, metadata, reason, and first claim.
        """
        failed = state is State.FAILED
        history, begin = self.table("history"), keys.begin
        if low:
            # The part that has this number may begin before it.
            holder = history.scan_back(begin, _part_key(keys, low) + b"\0", 1)
            begin = holder[0][0] if holder else begin
        for key, record in pages_of(history, begin, keys.end):
            first = sequence_of(key)
            if first >= high:
                # Keys are of one run, in which numbers only grow.
                return
            try:
                rows = records.ended_fields(record, failed=failed)
            except CorruptRecord as error:
                self._leave_out("history", key, record, str(error))
                continue
            if first < low or first + len(rows) > high:
                rows = rows[max(0, low - first) : high - first]
                first = max(first, low)
            if rows:
                yield range(first, first + len(rows)), rows

    def attempt_rows(self, keys: Keys) -> Iterator[tuple[int, int, records.AttemptRecord]]:
        """Read ended attempts: message id, attempt, record."""
        last = b""
        for key, record in pages_of(self.table("history"), keys.begin, keys.end):
            # Attempts that began in one claim and ended in one call have equal records.
            if record != last:
                try:
                    stored = records.decode_attempt(record)
                except CorruptRecord as error:
                    self._leave_out("history", key, record, str(error))
                    continue
                last = record
            number = int.from_bytes(key[-10:], "big")
            yield number >> 16, number & 0xFFFF, stored

    def attempts_at(
        self, queue: str, messages: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[int, int, records.AttemptRecord]]:
        """Read the ended attempts at messages (message id, attempts)."""
        id_, history = self._queues[queue].id, self.table("history")
        numbers = ((message, each) for message, count in messages for each in range(1, count + 1))
        while some := list(islice(numbers, LIVE_ROWS)):
            keys = [opendata.ATTEMPTS.key(id_, *number) for number in some]
            for number, key, record in zip(some, keys, history.multi_get(keys), strict=True):
                if record is None:
                    continue
                try:
                    yield *number, records.decode_attempt(record)
                except CorruptRecord as error:
                    self._leave_out("history", key, record, str(error))

    # --- references ----------------------------------------------------------------------

    def referenced(self, message_ids: set[int]) -> set[int]:
        """Return which of the messages any queue still holds, in whatever state.

        Raises CorruptRecord if a record does not decode: what it holds can't be known.
        """
        held: set[int] = set()
        before = self.left_out
        for queue in self._queues:
            for keys in self.cut("active", queue, 1):
                for live in self.live_rows(keys):
                    held.update(message_ids.intersection(row[0] for row in live))
            for state in (State.DONE, State.FAILED):
                for keys in self.cut(state.value, queue, 1):
                    for _, ended in self.ended_rows(state, keys):
                        held.update(message_ids.intersection(row[0] for row in ended))
        if self.left_out > before:
            raise CorruptRecord(
                f"{self.left_out - before} records can't be read (the log names them), so that "
                "nobody knows which messages they hold"
            )
        return held

    def unheld(self) -> Iterator[int]:
        """Give the messages that no queue took and the log still has."""
        for key, record in pages_of(self._payloads, REFERENCES, past(REFERENCES)):
            if not any(record):
                yield int.from_bytes(key[2:], "big")


class _SharedTable:
    """A table of a view that several threads may read."""

    def __init__(self, pinned: Pinned, name: str) -> None:
        self.family = None
        self._pinned = pinned
        self._name = name

    def _table(self) -> Table:
        if self._pinned._closed:  # noqa: SLF001 - one thing in two classes
            raise InvalidInput("the snapshot was closed while it was being read")
        return self._pinned._view.table(self._name)  # noqa: SLF001

    def get(self, key: bytes) -> bytes | None:
        with self._pinned._lock:  # noqa: SLF001
            return self._table().get(key)

    def multi_get(self, keys: list[bytes]) -> list[bytes | None]:
        with self._pinned._lock:  # noqa: SLF001
            return self._table().multi_get(keys)

    def scan(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        with self._pinned._lock:  # noqa: SLF001
            return self._table().scan(begin, end, limit)

    def scan_back(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        with self._pinned._lock:  # noqa: SLF001
            return self._table().scan_back(begin, end, limit)


def _flying_row(key: bytes, record: bytes) -> tuple[LiveRow]:
    metadata, _, attempts, forgiven, visible_at_ms, lease = decode_stored_item(record)
    message_id = int.from_bytes(key[4:], "big")
    # The record counts the claims that have ended.
    attempts = min(attempts + 1, MAX_ATTEMPTS)
    return ((message_id, _IN_FLIGHT, attempts, visible_at_ms, lease, metadata, forgiven),)


def _part_key(keys: Keys, number: int) -> bytes:
    """Return the key that a part of this number has, in the run that the keys are of."""
    prefix, first = keys.end[:-8], int.from_bytes(keys.end[-8:], "big") - 1
    size = first >> _NUMBER_BITS
    bucket = size << _NUMBER_BITS | number - number % opendata.capacity(size)
    return prefix + bucket.to_bytes(8, "big") + number.to_bytes(8, "big")


def _ranges(design: str, table: str, queue: Queue) -> list[tuple[str, bytes, int]]:
    """Return tables, prefixes, and how many bytes follow the eight that are counted by."""
    if table == "done":
        return [("history", opendata.DONE.prefix(queue.id), 8)]
    if table == "failed":
        return [("history", opendata.FAILED.prefix(queue.id), 8)]
    if design == "buckets":
        live = [("buckets", opendata.ACTIVE.prefix(queue.id), 0)]
    else:
        number = queue.number.to_bytes(4, "big")
        live = [(name, number, 0) for name in ("available", "in_progress")]
    if table == "active":
        return live
    # Running attempts are made from the messages in flight.
    running = [each for each in live if each[0] != "available"]
    return [("history", opendata.ATTEMPTS.prefix(queue.id), 2), *running]


def _ends(table: Table, begin: bytes, end: bytes) -> tuple[bytes, bytes] | None:
    first = table.scan(begin, end, 1)
    if not first:
        return None
    return first[0][0], table.scan_back(begin, end, 1)[0][0]
