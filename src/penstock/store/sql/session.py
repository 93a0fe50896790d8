"""The state of one process on a store: its queues, settings and versions, as last read.

The truth is in the database. The process reads queues again when ``specs_version`` has changed,
when a name is not known, and at least every second. A publish finds out under the lock of
``log_head`` whether the queues that it routed by have changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec

from penstock.errors import QueueNotFound, StoreDamaged
from penstock.model import Ordering, QueueSpec
from penstock.store.contract import Progress
from penstock.store.policy import Coverage, LogSettings
from penstock.store.sql.zones import Zones

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.store.sql.database import Database

T = TypeVar("T")

# Rows that a queue's counters are spread over.
SLOTS: Final = 16
# The age at which queues are read again.
REFRESH_MS: Final = 1_000
# Changes of filters on record, by which a page that was read before is judged.
FILTER_CHANGES: Final = 1_000


class LogHead(NamedTuple):
    """The row of ``log_head``."""

    next_offset: int
    specs_version: int
    zones_version: int
    filters_version: int
    segment_ms: int
    published: int
    duplicates: int
    unrouted: int


class SqlQueue:
    """A queue as this process knows it."""

    __slots__ = ("coverage", "fifo", "name", "number", "spec")

    def __init__(self, number: int, spec: QueueSpec, coverage: Coverage) -> None:
        self.number = number
        self.name = spec.name
        self.spec = spec
        self.coverage = coverage
        self.fifo = spec.ordering is Ordering.FIFO


def decode_queue(number: int, spec: bytes, coverage: bytes) -> SqlQueue:
    """Read a row of ``queues``."""
    return SqlQueue(
        number,
        msgspec.msgpack.decode(spec, type=QueueSpec),
        msgspec.msgpack.decode(coverage, type=Coverage),
    )


class SqlSession:
    """The state that the verbs share. Each module of this package adds the verbs of one kind."""

    def __init__(self, database: Database, random: Callable[[], float]) -> None:
        self.database = database
        self.tunables = database.tunables
        self.random = random
        self.process_id: bytes = database.run("fresh_id")[0][0]
        self.slot = self.process_id[-1] % SLOTS
        self._stamps = 0
        self.turns = 0
        self.stale_receipts = 0
        self.progress = Progress()
        # Queues that may have messages to claim, and about how many.
        self.woken: dict[str, int] = {}
        # The soonest time that a sweep is known to have work at.
        self.due_ms: int | None = None
        # When the retention of done and failed messages next has work.
        self.retention_ms: int | None = None
        self.zones = Zones(self)
        self.by_name: dict[str, SqlQueue] = {}
        self.by_number: dict[int, SqlQueue] = {}
        self.store_id, self.routing = database.run("load_instance")[0][:2]
        self.settings = LogSettings()
        self.filter_changes: list[tuple[int, int]] = []
        self.head = self.read_head()
        self.ring_size = self.ring_high = 1
        self._loaded_ms = database.clock()
        self._stale = False
        self._reload()

    # --- fresh names -----------------------------------------------------------------------

    def stamp(self) -> bytes:
        """Return sixteen bytes that no process has used before."""
        self._stamps += 1
        return self.process_id[:10] + self._stamps.to_bytes(6, "big")

    def take_turns(self, count: int) -> int:
        """Return the turn of pointers that are written now, among others of the same time."""
        self.turns += count
        return self.turns - count

    # --- queues ----------------------------------------------------------------------------

    def read_head(self) -> LogHead:
        """Read the end of the log and the versions."""
        rows = self.database.ask("read_head")
        if not rows:
            raise row_lost("log_head")
        return LogHead(*rows[0])

    def lock_head(self) -> LogHead:
        """Lock ``log_head`` until the commit, and read what has changed."""
        head = LogHead(*self.database.run("lock_head")[0])
        if head.specs_version != self.head.specs_version:
            self._load(head)
        self.head = head
        return head

    def refresh(self, now_ms: int | None = None) -> None:
        """Read queues again if they have changed; with ``now_ms``, look at most every second."""
        fresh = now_ms is not None and self._loaded_ms <= now_ms < self._loaded_ms + REFRESH_MS
        if fresh and not self._stale:
            return
        head = self.read_head()
        if now_ms is not None:
            self._loaded_ms = now_ms
        if head.specs_version != self.head.specs_version or self._stale:
            self.reload()
        else:
            self.head = head

    def reload(self) -> None:
        """Read queues and settings again."""
        self.database.do(self._reload, again=True)

    def _reload(self) -> None:
        while True:
            before = self.read_head()
            self._load(before)
            # The version and the queues must be of the same moment.
            if self.read_head().specs_version == before.specs_version:
                self._stale = False
                return

    def _load(self, head: LogHead) -> None:
        before = self.live_filters()
        instance = self.database.run("load_instance")[0]
        _, _, self.ring_size, self.ring_high, _, settings, changes = instance
        self.settings = msgspec.msgpack.decode(settings, type=LogSettings)
        self.filter_changes = msgspec.msgpack.decode(changes, type=list[tuple[int, int]])
        gone = dict(self.by_name)
        self.by_name, self.by_number = {}, {}
        for number, name, spec, coverage in self.database.run("load_queues"):
            self.adopt(decode_queue(number, spec, coverage))
            gone.pop(name, None)
        self.head = head
        for name in gone:
            # Claims that wait for the queue are to find out.
            self.woken.setdefault(name, 0)
        if before != self.live_filters():
            self.progress.filter_changes += 1

    def live_filters(self) -> dict[str, str]:
        """Return the filters that new messages are routed by, as last read."""
        return {
            name: text
            for name, queue in self.by_name.items()
            # At the end of the log, which is beyond every offset that a filter was changed at.
            if (text := queue.coverage.filter_at((1 << 63) - 1)) is not None
        }

    def queue(self, name: str) -> SqlQueue:
        """Look a queue up by name."""
        if name not in self.by_name:
            self.refresh()
        queue = self.by_name.get(name)
        if queue is None:
            raise QueueNotFound.among(name, self.by_name)
        return queue

    def numbered(self, number: int) -> SqlQueue | None:
        """Look a queue up by its number."""
        if number not in self.by_number:
            self.refresh()
        return self.by_number.get(number)

    def lock_queue(self, name: str) -> SqlQueue:
        """Lock the row of a queue until the commit, and return it as it is now."""
        number = self.queue(name).number
        rows = self.database.run("lock_queue", number=number)
        if not rows:
            raise QueueNotFound.among(name, self.by_name)
        return decode_queue(number, *rows[0])

    def adopt(self, queue: SqlQueue) -> None:
        """Remember a queue that was made, changed or read."""
        self.by_name[queue.name] = self.by_number[queue.number] = queue

    def changed(self, now_ms: int, *, filters_from: int | None = None) -> None:
        """Record a change of queues or settings, under the lock of ``log_head``."""
        filters = filters_from is not None
        row = self.database.run("bump_head", filters=int(filters), now_ms=now_ms)[0]
        self.head = self.head._replace(specs_version=row[0], filters_version=row[1])
        if filters_from is not None:
            self.progress.filter_changes += 1
            self.filter_changes = [*self.filter_changes, (int(row[1]), filters_from)]
            self.filter_changes = self.filter_changes[-FILTER_CHANGES:]
            changes = msgspec.msgpack.encode(self.filter_changes)
            self.database.run("put_filter_changes", value=changes)

    # --- transactions, waking, alarms --------------------------------------------------------

    def change(self, work: Callable[[], T], *, again: bool = False) -> T:
        """Call ``work`` in one transaction; if it fails, queues are read again."""

        def attempt() -> T:
            try:
                with self.database.transaction():
                    return work()
            except BaseException:
                # Memory may be ahead of what is committed, and so would the next attempt be.
                self._stale = True
                self.head = self.head._replace(specs_version=-1)
                raise

        # Around all attempts: a failure after the commit must not repeat it.
        with self.zones.recheck_if_slow():
            result = self.database.do(attempt, again=again)
        self.progress.commits += 1
        return result

    def wake(self, queue: SqlQueue, count: int = 1) -> None:
        """Note that a queue may have messages to claim."""
        self.woken[queue.name] = self.woken.get(queue.name, 0) + count

    def add_counts(self, queue: int, now_ms: int, **added: int) -> int:
        """Add to a queue's counters; return the first sequence number, if any were taken."""
        given = {"queue": queue, "slot": self.slot, "now_ms": now_ms, **added}
        names = self.database.parameters("add_to_counts")
        assert given.keys() <= names, given.keys() - names
        rows = self.database.run("add_to_counts", **{name: given.get(name, 0) for name in names})
        return int(rows[0][0]) if rows else 0

    def due_for_retention(self, at_ms: int) -> None:
        """Note that the retention of an ended message is over at a time."""
        self.retention_ms = at_ms if self.retention_ms is None else min(self.retention_ms, at_ms)
        self.due(at_ms)

    def due(self, at_ms: int) -> None:
        """Note that a sweep has work at a time."""
        if self.due_ms is None or at_ms < self.due_ms:
            self.due_ms = at_ms


def row_lost(table: str) -> StoreDamaged:
    """Return the error of a table that has lost its one row."""
    return StoreDamaged(
        f"the table {table} of the store has lost its row; nothing was changed: bring it back from "
        "a backup of the database"
    )
