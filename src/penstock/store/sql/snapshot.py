"""The store at one moment, for reading in bulk, and for trimming up to what was read.

A :class:`SqlPinned` holds one REPEATABLE READ transaction open on a connection of its own: writers
go on meanwhile, and the database keeps the rows that they delete until it is closed. Pages go on
after the last row of the one before, so that neither side holds more than a page. Whether a message
is visible or its lease is over is judged by the time of the snapshot.

Why what was read may be trimmed
--------------------------------
An archive reads done and failed messages and then trims all up to the highest sequence number that
it has seen. That is sound if no row with a lower number appears later. Sixteen rows of
``queue_counts`` give out numbers, each in order, but one may be far behind another, and a
transaction that has its numbers need not have committed. So, with ``marks``, before the snapshot
the store locks all rows and, still locked, raises them to the highest number of their queue,
the mark:

* a transaction that had taken a number had updated such a row, and the lock waited for it: it has
  ended, and if it was committed, the snapshot sees its rows;
* a transaction that takes one later waits until the locks are released, and gets one from the mark
  on;
* the snapshot is taken in between, so that every row in it is below the mark.

The snapshot itself shows that nothing came in between: a queue that was made meanwhile had no rows
to lock, and a database may order its transactions otherwise than it lets them wait. If a number
from a mark on was given out, all of it is done again; the locks see to it that this ends.
"""

from __future__ import annotations

import threading
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from penstock.errors import InvalidInput, PenstockError, StorageFailed
from penstock.limits import MAX_OFFSET, MAX_VIEW_IDLE_MS
from penstock.model import QueueSpec, QueueStats, State
from penstock.store.codec.records import AttemptRecord
from penstock.store.policy import LogSettings
from penstock.store.snapshot import (
    Depths,
    GroupDepths,
    Keys,
    LeaseHolder,
    count_groups,
    cut_range,
)
from penstock.store.sql.failures import Aborted
from penstock.store.sql.inspect import queue_stats_of, store_stats_of
from penstock.store.sql.move import ALL, ANY_STATE, STATES, SqlMove
from penstock.store.sql.routing import describe_log
from penstock.store.sql.session import (
    SLOTS,
    LogHead,
    SqlQueue,
    decode_queue,
    head_of,
    sequence_at,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.store.policy import Coverage
    from penstock.store.snapshot import LiveRow
    from penstock.store.sql.database import Database
    from penstock.store.sql.session import SqlSession

# Connections that are kept for the next snapshot: to make one takes tens of milliseconds.
SPARE: Final = 4
# A server closes a snapshot that no client reads; this is for servers that hang.
IDLE_MS: Final = MAX_VIEW_IDLE_MS + 60_000
_BEGIN: Final = (
    "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY; "
    f"SET LOCAL idle_in_transaction_session_timeout = {IDLE_MS}"
)
# The size of a page that a read aims at: pages are counted in rows, and rows differ in size.
PAGE_BYTES: Final = 4 << 20
PAGE_ROWS: Final = 1_024
FIRST_ROWS: Final = 64
SIZE_ROWS: Final = 8_192
# Ids of one search in a queue.
ASKED: Final = 10_000
_AVAILABLE: Final = State.AVAILABLE.value
_DELAYED: Final = State.DELAYED.value
_IN_FLIGHT: Final = State.IN_FLIGHT.value


class SqlPinned:
    """A store as it was at ``at_ms``; see :class:`~penstock.store.snapshot.PinnedStore`."""

    # Processes give out numbers side by side, to done and failed messages together.
    ordered = False
    left_out = 0

    def __init__(
        self,
        database: Database,
        session: SqlSession,
        head: LogHead,
        at_ms: int,
        let_go: Callable[..., None],
        *,
        stats: bool,
    ) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._let_go = let_go
        self._closed = ""
        self.at_ms = at_ms
        self.store_id = f"{session.store_id:08x}"
        encoded = self._run("load_instance")[0][5]
        self.log_settings = msgspec.msgpack.decode(encoded, type=LogSettings)
        self.next_offset: int = head.next_id
        self.log_stats = describe_log(self._run, head, self._run("load_segments"))
        self.totals = store_stats_of(session, head)
        self.stats: Sequence[QueueStats] = []
        if stats:
            own = self._queues.values()
            self.stats = [queue_stats_of(self._run, queue, at_ms) for queue in own]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the transaction; a later read fails."""
        with self._lock:
            if not self._closed:
                self._closed = "the snapshot was closed while it was being read"
                self._end()

    def _end(self) -> None:
        whole = True
        try:
            self._database.execute("ROLLBACK")
        except PenstockError:
            whole = False
        self._let_go(self, self._database, whole=whole)

    def _run(self, name: str, /, **parameters: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            if self._closed:
                raise InvalidInput(self._closed)
            try:
                return self._database.run(name, **parameters)
            except StorageFailed as error:
                # Another transaction would see another moment: this one can't begin again.
                self._closed = f"the database has ended the snapshot: {error}; ask for a new one"
                self._end()
                raise
            except BaseException:
                # An answer may yet come, and must not be read as another one's.
                self._closed = "a read of the snapshot was interrupted; ask for a new one"
                self._end()
                raise

    # --- what there is -------------------------------------------------------------------

    @cached_property
    def _queues(self) -> dict[str, SqlQueue]:
        rows = sorted(self._run("load_queues"), key=lambda row: str(row[1]))
        return {name: decode_queue(number, *records) for number, name, *records in rows}

    @cached_property
    def queues(self) -> dict[str, QueueSpec]:
        """Every queue's settings, by name."""
        return {name: queue.spec for name, queue in self._queues.items()}

    @cached_property
    def draining(self) -> set[str]:
        """The names of queues that take no more messages."""
        return {name for name, queue in self._queues.items() if queue.coverage.draining}

    def coverage(self, queue: str) -> Coverage:
        """Return which offsets of the log a queue was filled from."""
        return self._queues[queue].coverage

    @cached_property
    def _counts(self) -> dict[int, Sequence[int]]:
        """The depths and totals of each queue by its number, as the statement orders them."""
        return {number: counts for number, *counts in self._run("sum_counts", queue=None)}

    def depths(self, queue: str) -> Depths:
        """Count a queue's messages."""
        number = self._queues[queue].number
        live, in_flight, done, failed = self._counts.get(number, (0,) * 14)[:4]
        delayed = self._run("count_delayed", queue=number, now_ms=self.at_ms)[0][0]
        return Depths(max(0, live - in_flight - delayed), delayed, in_flight, done, failed)

    @cached_property
    def _sequences(self) -> dict[int, int]:
        return dict(self._run("read_sequences"))

    def number(self, queue: str) -> int:
        """Return the number that a queue got when it was made."""
        return self._queues[queue].number

    def sequence_ends(self, queue: str) -> dict[State, int]:
        """Return the sequence numbers that done and failed messages of a queue get next."""
        mark = self._sequences.get(self._queues[queue].number, 0) * SLOTS
        return {State.DONE: mark, State.FAILED: mark}

    def first_ended(self, state: State, queue: str, since_ms: int) -> tuple[int, int] | None:
        """Return sequence and time of the first message that ended at a time or later."""
        wanted = {"queue": self._queues[queue].number, "failed": state is State.FAILED}
        since = {"since_ms": since_ms, "since": sequence_at(since_ms)}
        rows = self._run("first_ended", **wanted, **since)
        return (rows[0][0], rows[0][1]) if rows else None

    def groups(self, queue: str) -> Iterator[GroupDepths]:
        """Count the live messages of each group of a queue."""
        keys = self.cut("active", queue, 1)
        return count_groups(page for each in keys for page in self.live_rows(each))

    # --- ranges --------------------------------------------------------------------------

    def about(self, table: str, queue: str) -> int:
        """Return about how many rows a queue has in active, attempts, done or failed."""
        counts = self._counts.get(self._queues[queue].number, (0,) * 14)
        # An attempt ends by an ack, a release or the end of its lease.
        rows = {"active": counts[0], "done": counts[2], "failed": counts[3]}
        return sum(counts[6:9]) if table == "attempts" else rows[table]

    def cut(
        self, table: str, queue: str, count: int, low: int = 0, high: int = MAX_OFFSET
    ) -> Iterator[Keys]:
        """Cut a queue's rows into at most ``count`` ranges, and those in flight by themselves."""
        number = self._queues[queue].number
        within = {"queue": number, "low": low, "high": high}
        if table in {"done", "failed"}:
            ends = self._run("ended_ends", failed=table == "failed", **within)
            yield from _cut(table, number, ends, count, live=False)
            return
        if table == "attempts":
            ends = self._run("attempts_ends", **within)
            yield from _cut("attempts", number, ends, count, live=False)
        ends = self._run("items_ends", queue=number)
        yield from _cut("held" if table == "attempts" else "items", number, ends, count, live=True)

    def message_ends(self, begin: int, end: int) -> tuple[int, int] | None:
        """Return the first and the last id in [begin, end) whose payload is kept, if any is."""
        first, last = self._run("message_ends", begin=begin, end=end)[0]
        return None if first is None else (first, last)

    # --- rows ----------------------------------------------------------------------------

    def _pages(
        self, name: str, begin: int, end: int, heavy: int, **parameters: Any
    ) -> Iterator[list[tuple[Any, ...]]]:
        """Read [begin, end) in pages of about the same size; ``heavy`` is the largest column."""
        count = FIRST_ROWS
        while begin < end:
            rows = self._run(name, begin=begin, end=end, count=count, **parameters)
            if rows:
                yield rows
            if len(rows) < count:
                return
            begin = rows[-1][0] + 1
            size = sum(len(row[heavy] or b"") for row in rows) // len(rows)
            count = max(1, min(PAGE_ROWS, PAGE_BYTES // (size + 64)))

    def log_rows(self, log: int, begin: int, end: int) -> Iterator[list[tuple[int, bytes]]]:
        """Read messages (id, metadata) of [begin, end) of a log."""
        # Rows below the log are removed step by step.
        begin, end = max(begin, self.log_stats.earliest), min(end, self.next_offset)
        for rows in self._pages("read_log", begin, end, 1, log=log):
            yield [(row[0], row[1]) for row in rows]

    def payloads(self, message_ids: Sequence[int]) -> list[bytes | None]:
        """Read payloads; None for those that are gone."""
        found: dict[int, bytes] = dict(self._run("payload_of", message_ids=list(message_ids)))
        return [found.get(message_id) for message_id in message_ids]

    def payload_sizes(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Read how large every kept payload of ids in [begin, end) is."""
        while rows := self._run("payload_sizes", begin=begin, end=end, count=SIZE_ROWS):
            yield from ((row[0], row[1]) for row in rows)
            begin = rows[-1][0] + 1

    def payload_rows(self, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Read every kept payload (message id, payload) of ids in [begin, end)."""
        bounds = {"end": end, "count": PAGE_ROWS, "most_bytes": PAGE_BYTES}
        while rows := self._run("page_payloads", begin=begin, **bounds):
            yield from ((row[0], row[1]) for row in rows)
            begin = rows[-1][0] + 1

    def live_rows(self, keys: Keys) -> Iterator[list[LiveRow]]:
        """Read live messages; of keys that were cut for attempts, those in flight."""
        number, begin, end = _numbers(keys)
        state = STATES[State.IN_FLIGHT] if keys.table == "held" else ANY_STATE
        now = {"state": state, "now_ms": self.at_ms}
        for rows in self._pages("page_items", begin, end, 9, queue=number, **now):
            yield [self._live_row(row) for row in rows]

    def _live_row(self, row: tuple[Any, ...]) -> LiveRow:
        message_id, attempts, visible_at_ms, vesting_ms, leased, consumer, claimed_at_ms = row[:7]
        # An empty record can't be decoded either.
        forgiven, first_claimed_ms, about = row[7], row[8] or None, row[9] or b""
        state, held = _AVAILABLE, None
        if vesting_ms > self.at_ms:
            state = _IN_FLIGHT if leased else _DELAYED
        if state == _IN_FLIGHT:
            held = LeaseHolder(consumer.decode(), claimed_at_ms, vesting_ms)
        elif leased:
            # A lease that is over, but not ended yet: the message waits since then.
            visible_at_ms = vesting_ms
        told = held, first_claimed_ms
        return message_id, state, attempts, visible_at_ms, told, about, forgiven

    def leases(self, rows: Sequence[LiveRow]) -> list[LeaseHolder | None]:
        """Return the holder of each of some live messages."""
        return [row[4][0] for row in rows]

    def first_claims(self, queue: str, rows: Sequence[LiveRow]) -> list[int | None]:  # noqa: ARG002
        """Return when the first attempt at each live message began."""
        return [row[4][1] for row in rows]

    def ended_rows(
        self, state: State, keys: Keys, low: int = 0, high: int = MAX_OFFSET
    ) -> Iterator[tuple[Sequence[int], Sequence[tuple[Any, ...]]]]:
        """Read done or failed messages whose sequence is in [low, high), with their sequences.

        Of each: message id, nothing, when it ended, attempts, metadata, reason, and first claim.
        """
        number, begin, end = _numbers(keys)
        begin, end = max(begin, low), min(end, high)
        failed = state is State.FAILED
        for rows in self._pages("page_ended", begin, end, 6, queue=number, failed=failed):
            yield [row[0] for row in rows], [_ended_row(row) for row in rows]

    def attempt_rows(self, keys: Keys) -> Iterator[tuple[int, int, AttemptRecord]]:
        """Read ended attempts: message id, attempt, record."""
        number, begin, end = _numbers(keys)
        after = (begin, -1)
        while rows := self._run(
            "page_attempts",
            queue=number,
            after=after[0],
            after_number=after[1],
            end=end,
            count=PAGE_ROWS,
        ):
            yield from map(_attempt, rows)
            after = rows[-1][:2]

    def attempts_at(
        self, queue: str, messages: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[int, int, AttemptRecord]]:
        """Read the ended attempts at messages (message id, attempts)."""
        number = self._queues[queue].number
        for at in range(0, len(messages), ASKED):
            ids = [message_id for message_id, _ in messages[at : at + ASKED]]
            yield from map(_attempt, self._run("attempts_at", queue=number, message_ids=ids))

    def referenced(self, message_ids: set[int]) -> set[int]:
        """Return which of the messages any queue still holds, in whatever state."""
        held: set[int] = set()
        ids = sorted(message_ids)
        for queue in self._queues.values():
            for at in range(0, len(ids), ASKED):
                rows = self._run(
                    "find_present", queue=queue.number, message_ids=ids[at : at + ASKED]
                )
                held.update(row[0] for row in rows)
        return held

    def unheld(self) -> Iterator[int]:
        """Give the messages that no queue took and the log still has."""
        after = 0
        while rows := self._run("page_unheld", after=after, count=SIZE_ROWS):
            yield from (row[0] for row in rows)
            after = rows[-1][0]


def _ended_row(row: tuple[Any, ...]) -> tuple[Any, ...]:
    _, message_id, attempts, ended_at_ms, reason, claimed_ms, about = row
    why = reason.decode(errors="replace")
    return message_id, None, ended_at_ms, attempts, about or b"", why, claimed_ms or None


def _attempt(row: tuple[Any, ...]) -> tuple[int, int, AttemptRecord]:
    message_id, attempt, claimed_at_ms, consumer, ended_at_ms, ending, reason = row
    texts = consumer.decode(), reason.decode(errors="replace")
    record = AttemptRecord(claimed_at_ms, texts[0], ended_at_ms, ending, texts[1])
    return message_id, attempt, record


def _cut(
    table: str, number: int, ends: list[tuple[Any, ...]], count: int, *, live: bool
) -> Iterator[Keys]:
    first, last = ends[0]
    if first is None:
        return
    prefix = number.to_bytes(4, "big")
    for begin, end in cut_range(first, last + 1, count):
        low, high = (prefix + each.to_bytes(8, "big") for each in (begin, end))
        yield Keys(table, low, high, live)


def _numbers(keys: Keys) -> tuple[int, int, int]:
    """Return the queue's number, and the range of message ids or sequence numbers."""
    number = int.from_bytes(keys.begin[:4], "big")
    return number, int.from_bytes(keys.begin[4:], "big"), int.from_bytes(keys.end[4:], "big")


class SqlSnapshots(SqlMove):
    """Makes snapshots, and keeps the connections that they are read on."""

    def __init__(self, database: Database, random: Callable[[], float]) -> None:
        super().__init__(database, random)
        self._pins_lock = threading.Lock()
        self._spare: list[Database] = []
        self._pinned: set[SqlPinned] = set()
        self._closed = False

    def pin(self, now_ms: int, *, stats: bool = False, marks: bool = True) -> SqlPinned:
        """Make a snapshot; leases that are over are ended before, as before browse."""
        self.reach_end()
        self.catch_up(now_ms, ALL)
        with self._pins_lock:
            database = self._spare.pop() if self._spare else self.database.another()
        try:
            # Here, and not inside the repeated part: waiting for a connection holds up other calls.
            database.connect()
            head = self.database.do(lambda: self._try_snapshot(database, marks=marks), again=True)
            pinned = SqlPinned(database, self, head, now_ms, self._unpin, stats=stats)
        except BaseException:
            database.close()
            raise
        with self._pins_lock:
            self._pinned.add(pinned)
        return pinned

    def close(self) -> None:
        """Close every snapshot and every connection; a later read of a snapshot fails."""
        with self._pins_lock:
            self._closed = True
            pinned = list(self._pinned)
        for each in pinned:
            each.close()
        for database in self._spare:
            database.close()
        self.database.close()

    def _unpin(self, pinned: SqlPinned, database: Database, *, whole: bool) -> None:
        """Take a connection back, whose transaction has ended."""
        with self._pins_lock:
            self._pinned.discard(pinned)
            if whole and not self._closed and len(self._spare) < SPARE:
                self._spare.append(database)
                return
        database.close()

    def _try_snapshot(self, database: Database, *, marks: bool) -> LogHead:
        try:
            return self._begin_snapshot(database, marks=marks)
        except BaseException:
            # With the transaction, if there is one: the next attempt begins another. A ROLLBACK
            # without a transaction is an error for CockroachDB.
            database.close()
            raise

    def _begin_snapshot(self, database: Database, *, marks: bool) -> LogHead:
        if not marks:
            return _snapshot(database)
        own = self.database
        with own.transaction():
            known: dict[int, int] = dict(own.run("lock_sequences", slots=SLOTS))
            raised = {"queues": list(known), "marks": list(known.values())}
            own.run("raise_sequences", **raised, slots=SLOTS)
            head = _snapshot(database)
        if any(given > known.get(queue, 0) for queue, given in database.run("read_sequences")):
            raise Aborted("messages have ended while the store was being pinned")
        return head


def _snapshot(database: Database) -> LogHead:
    """Begin a transaction. It sees what is committed when its first statement begins."""
    database.execute(_BEGIN)
    return head_of(database.run("read_heads"))
