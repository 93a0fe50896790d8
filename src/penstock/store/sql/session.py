"""What a process knows of the store: its identity, its queues, the versions of what it knows.

Nothing here is the truth, which is in the database. Queues are read again when ``specs_version``
has moved, when a name is not known, and at least every second; a publish finds out under the lock
of ``log_head`` whether what it knows is out of date.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec

from penstock.errors import QueueNotFound, StoreDamaged, StoreMismatch
from penstock.model import Ordering, QueueSpec
from penstock.store.contract import Progress
from penstock.store.coverage import Coverage
from penstock.store.kv.log import LogSettings
from penstock.store.sql.zones import Zones

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from penstock.store.sql.database import Database
    from penstock.store.sql.tunables import Tunables

__all__ = ["SLOTS", "Core", "Head", "Identity", "Queue"]

log = logging.getLogger(__name__)

T = TypeVar("T")

# Rows that a queue's counters are spread over.
SLOTS: Final = 16
# How old what is known of queues may become.
REFRESH_MS: Final = 1_000
# Changes of filters that are remembered, by which a page that was read before is judged.
FILTER_CHANGES: Final = 1_000


class Identity(NamedTuple):
    """What the store says about itself."""

    store_id: int
    routing: str


class Head(NamedTuple):
    """The row ``log_head``."""

    next_offset: int
    specs_version: int
    zones_version: int
    filters_version: int
    segment_ms: int
    time_ms: int
    published: int
    duplicates: int
    unrouted: int


class Queue:
    """A queue as this process knows it."""

    __slots__ = ("coverage", "fifo", "name", "number", "spec")

    def __init__(self, number: int, spec: QueueSpec, coverage: Coverage) -> None:
        self.number = number
        self.name = spec.name
        self.spec = spec
        self.coverage = coverage
        self.fifo = spec.ordering is Ordering.FIFO


class Core:
    """The parts of an open store that its verbs share."""

    def __init__(
        self,
        database: Database,
        tunables: Tunables,
        *,
        store_id: int,
        routing: str | None,
        ring_size: int | None,
        random: Callable[[], float],
        now_ms: int,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self.database = database
        self.tunables = tunables
        self.random = random
        # What time it is when something has taken its time; without a clock nothing takes any.
        self.clock = clock or (lambda: now_ms)
        self.process_id: bytes = database.run("fresh_id")[0][0]
        self.slot = self.process_id[-1] % SLOTS
        self._stamps = 0
        self.turns = 0
        self.stale_receipts = 0
        self.progress = Progress()
        # Queues that may have got something to claim, and about how much.
        self.woken: dict[str, int] = {}
        self._due_ms: int | None = None
        # When the retention of done and failed messages next has something to do.
        self.retention_ms: int | None = None
        self.identity = self._identify(store_id, routing, ring_size, now_ms)
        self.zones = Zones(self)
        self.queues: dict[str, Queue] = {}
        self.by_number: dict[int, Queue] = {}
        self.settings = LogSettings()
        self.filter_changes: list[tuple[int, int]] = []
        self.head = self.read_head()
        self.ring_size = self.ring_high = 1
        self._loaded_ms = now_ms
        self._stale = False
        self._reload()

    def _identify(
        self, store_id: int, routing: str | None, ring_size: int | None, now_ms: int
    ) -> Identity:
        database = self.database
        # First: what another process is just making has both.
        remains = database.run("find_remains")[0][0]
        rows = database.run("load_instance")
        if remains and not rows:
            raise _row_lost("instance")
        if not rows:
            with database.transaction():
                database.run(
                    "make_instance",
                    store_id=store_id,
                    now_ms=now_ms,
                    routing=routing or "inline",
                    ring_size=ring_size or self.tunables.ring_size,
                    log_settings=msgspec.msgpack.encode(LogSettings()),
                    filter_changes=msgspec.msgpack.encode([]),
                )
                database.run("make_head", segment_ms=-(1 << 62))
            rows = database.run("load_instance")
        found_id, found_routing, *_ = rows[0]
        if found_routing not in {"inline", "pipeline"}:
            raise StoreMismatch(f"the store routes {found_routing!r:.100}, which is not known")
        if routing is not None and found_routing != routing:
            raise StoreMismatch(
                f"the store routes {found_routing}, it was opened with routing={routing!r}"
            )
        return Identity(found_id, found_routing)

    # --- fresh names -----------------------------------------------------------------------

    def stamp(self) -> bytes:
        """Return sixteen bytes that nothing else was named by."""
        self._stamps += 1
        return self.process_id[:10] + self._stamps.to_bytes(6, "big")

    def take_turns(self, count: int) -> int:
        """Return where pointers that are put back now stand among others of the same time."""
        self.turns += count
        return self.turns - count

    # --- queues ----------------------------------------------------------------------------

    def read_head(self) -> Head:
        """Read the end of the log and the versions."""
        rows = self.database.do(lambda: self.database.run("read_head"), again=True)
        if not rows:
            raise _row_lost("log_head")
        return Head(*rows[0])

    def lock_head(self) -> Head:
        """Lock it until the commit; what this process knows is brought up to date."""
        head = Head(*self.database.run("lock_head")[0])
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
        """Read everything again, as of one moment."""
        self.database.do(self._reload, again=True)

    def _reload(self) -> None:
        while True:
            before = self.read_head()
            self._load(before)
            # The version and the queues must be of the same moment.
            if self.read_head().specs_version == before.specs_version:
                self._stale = False
                return

    def _load(self, head: Head) -> None:
        before = self.live_filters()
        instance = self.database.run("load_instance")[0]
        _, _, self.ring_size, self.ring_high, _, settings, changes = instance
        self.settings = msgspec.msgpack.decode(settings, type=LogSettings)
        self.filter_changes = msgspec.msgpack.decode(changes, type=list[tuple[int, int]])
        gone = dict(self.queues)
        self.queues, self.by_number = {}, {}
        for number, name, spec, coverage in self.database.run("load_queues"):
            self.adopt(_queue(number, spec, coverage))
            gone.pop(name, None)
        self.head = head
        for name in gone:
            # Whoever waits for it is to find out.
            self.woken.setdefault(name, 0)
        if before != self.live_filters():
            self.progress.filter_changes += 1

    def live_filters(self) -> dict[str, str]:
        """Return the filters that new messages are routed by, as far as is known."""
        return {
            name: text
            for name, queue in self.queues.items()
            # At the end of the log, which is beyond every offset that a filter was changed at.
            if (text := queue.coverage.filter_at((1 << 63) - 1)) is not None
        }

    def queue(self, name: str) -> Queue:
        """Look a queue up by name."""
        queue = self.queues.get(name)
        if queue is None:
            self.refresh()
            queue = self.queues.get(name)
        if queue is None:
            raise QueueNotFound(f"no queue named {name!r}")
        return queue

    def numbered(self, number: int) -> Queue | None:
        """Look a queue up by its number."""
        if number not in self.by_number:
            self.refresh()
        return self.by_number.get(number)

    def lock_queue(self, name: str) -> Queue:
        """Hold a queue until the commit, as it is now."""
        number = self.queue(name).number
        rows = self.database.run("lock_queue", number=number)
        if not rows:
            raise QueueNotFound(f"no queue named {name!r}")
        spec, coverage = rows[0]
        return _queue(number, spec, coverage)

    def adopt(self, queue: Queue) -> None:
        """Take a queue that was made or changed here into memory."""
        self.queues[queue.name] = self.by_number[queue.number] = queue

    def changed(self, now_ms: int, *, filters_from: int | None = None) -> None:
        """Note a change of queues or settings, under the lock of ``log_head``."""
        filters = filters_from is not None
        row = self.database.run("bump_head", filters=int(filters), now_ms=now_ms)[0]
        self.head = self.head._replace(specs_version=row[0], filters_version=row[1])
        if filters_from is not None:
            self.progress.filter_changes += 1
            self.filter_changes = [*self.filter_changes, (int(row[1]), filters_from)]
            self.filter_changes = self.filter_changes[-FILTER_CHANGES:]
            self.database.run(
                "put_filter_changes", filter_changes=msgspec.msgpack.encode(self.filter_changes)
            )

    # --- transactions, waking, alarms --------------------------------------------------------

    def change(
        self,
        work: Callable[[], T],
        *,
        again: bool = False,
        noting: AbstractContextManager[None] | None = None,
    ) -> T:
        """Do something in one transaction; if it fails, what is known is read again.

        ``noting`` is around each attempt, with its commit.
        """

        def attempt() -> T:
            try:
                with noting or nullcontext(), self.database.transaction():
                    return work()
            except BaseException:
                # Memory may have run ahead of what is committed, and so would the next attempt.
                self._stale = True
                self.head = self.head._replace(specs_version=-1)
                raise

        # Around all attempts: what comes after the commit must not have it done once more.
        with self.zones.sure():
            result = self.database.do(attempt, again=again)
        self.progress.commits += 1
        return result

    def wake(self, queue: Queue, count: int = 1) -> None:
        """Note that a queue may have something to claim."""
        self.woken[queue.name] = self.woken.get(queue.name, 0) + count

    def add_counts(self, queue: int, now_ms: int, **added: int) -> int:
        """Add to a queue's counters; return the first sequence number, if any were taken."""
        names = (
            *("live", "in_flight", "done", "failed", "enqueued", "released", "lease_expired"),
            *("failed_total", "redriven", "removed", "moved_in", "moved_out", "sequences"),
        )
        numbers = {name: added.pop(name, 0) for name in names}
        assert not added, added
        rows = self.database.run(
            "add_to_counts", queue=queue, slot=self.slot, now_ms=now_ms, **numbers
        )
        return int(rows[0][0]) if rows else 0

    def due_for_retention(self, at_ms: int) -> None:
        """Note that the retention of an ended message is over at a time."""
        self.retention_ms = at_ms if self.retention_ms is None else min(self.retention_ms, at_ms)
        self.due(at_ms)

    def due(self, at_ms: int) -> None:
        """Note that something is due at a time."""
        if self._due_ms is None or at_ms < self._due_ms:
            self._due_ms = at_ms

    @property
    def due_ms(self) -> int | None:
        """The soonest time that something is known to be due at."""
        return self._due_ms

    def set_due(self, at_ms: int | None) -> None:
        """Forget what was noted: a sweep has looked."""
        self._due_ms = at_ms


def _row_lost(table: str) -> StoreDamaged:
    return StoreDamaged(
        f"the table {table} of the store has lost its row; nothing was changed: bring it back from "
        "a backup of the database"
    )


def _queue(number: int, spec: bytes, coverage: bytes) -> Queue:
    return Queue(
        number,
        msgspec.msgpack.decode(spec, type=QueueSpec),
        msgspec.msgpack.decode(coverage, type=Coverage),
    )
