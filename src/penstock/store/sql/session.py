"""The state of one process on a store: its queues, settings and versions, as last read.

The truth is in the database. The process reads queues again when ``specs_version`` has changed,
when a name is not known, and at least every second. A publish finds out under the locks of the
heads of its logs (``log_heads``) whether the queues that it routed by have changed.

Verbs of several threads share it. What they read is replaced, and never changed in place; what they
count and note is changed under ``memory``, a lock that no statement is sent under. Queues, settings
and the version that goes with them are replaced together, by what is committed: a change that fails
has changed nothing here. What is older than what is known is not taken over: a thread may come late
with what it has read.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec

from penstock.errors import PenstockError, QueueNotFound, StoreDamaged
from penstock.model import Ordering, QueueSpec
from penstock.store import policy
from penstock.store.contract import Progress
from penstock.store.life import life, log_step
from penstock.store.policy import Coverage, LogSettings
from penstock.store.sql.zones import Zones

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from penstock.store.sql.database import Database

T = TypeVar("T")
# The messages of a queue that wait or are in flight, and the bytes of their payloads.
Load = tuple[int, int]

log = logging.getLogger(__name__)

# Rows that a queue's counters are spread over, by connection; those of publishes follow, by log.
SLOTS: Final = 16
# Sequence numbers that a row of counters has for each millisecond: a sequence begins with the time.
EACH_MS: Final = 1 << 16
# The age at which queues are read again.
REFRESH_MS: Final = 1_000
# Messages that one transaction drops.
DROP_MESSAGES: Final = 1_000
# Changes of filters on record, by which a page that was read before is judged.
FILTER_CHANGES: Final = 1_000


class LogHead(NamedTuple):
    """The rows of ``log_heads`` at one moment.

    ``end``: every message below it is committed, in all logs. ``next_id``: the id that the next
    message gets, or a later one has got. ``zones_versions`` begins with the row that is no log's.
    """

    end: int
    next_id: int
    logs: int
    specs_version: int
    zones_versions: list[int]
    filters_version: int
    segment_ms: int
    published: int
    duplicates: int
    unrouted: int

    def is_later(self, known: LogHead) -> bool:
        """Whether no version in it is older than in another; versions only grow."""
        # A store may have got more logs, and there is none if the versions are in doubt.
        zones = zip(self.zones_versions, known.zones_versions, strict=False)
        return self.specs_version >= known.specs_version and all(
            mine >= other for mine, other in zones
        )

    def beside(self, known: LogHead) -> LogHead:
        """Return it with the ids of another, if those are higher: they stay given and committed."""
        return self._replace(end=max(self.end, known.end), next_id=max(self.next_id, known.next_id))


class SqlQueue:
    """A queue as this process knows it."""

    __slots__ = ("coverage", "fifo", "name", "number", "records", "spec")

    def __init__(
        self,
        number: int,
        spec: QueueSpec,
        coverage: Coverage,
        records: list[bytes] | None = None,
    ) -> None:
        self.number = number
        # Spec and coverage as they were read, if both are as they were read.
        self.records = records
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
        [spec, coverage],
    )


def filters_of(queues: Mapping[str, SqlQueue]) -> dict[str, str]:
    """Return the filters that new messages are routed by."""
    return {
        name: text
        for name, queue in queues.items()
        # At the end of the log, which is beyond every offset that a filter was changed at.
        if (text := queue.coverage.filter_at((1 << 63) - 1)) is not None
    }


class SqlSession:
    """The state that the verbs share. Each module of this package adds the verbs of one kind."""

    def __init__(self, database: Database, random: Callable[[], float]) -> None:
        self.database = database
        self.tunables = database.tunables
        self.random = random
        self.process_id: bytes = database.run("fresh_id")[0][0]
        self.first_slot = self.process_id[-1] % SLOTS
        self.memory = threading.Lock()
        self._stamps = count(1)
        self.turns = 0
        # The log that is next to get messages without a group. Processes begin at different ones.
        self.log_turns = count(int.from_bytes(self.process_id[:2], "big"))
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
        # The names of FIFO queues, and of those with limits: a publish asks for them.
        self.fifo: frozenset[str] = frozenset()
        self.limited: frozenset[str] = frozenset()
        self.store_id: int = database.run("load_instance")[0][0]
        self.routing = ""
        self.settings = LogSettings()
        self.filter_changes: list[tuple[int, int]] = []
        self.head = self.read_head()
        self.ring_size = self.ring_high = 1
        self._loaded_ms = database.clock()
        # Grows whenever memory is replaced: what was read meanwhile may be older.
        self._replaced = 0
        self._reload()

    # --- fresh names -----------------------------------------------------------------------

    def stamp(self) -> bytes:
        """Return sixteen bytes that no process has used before."""
        return self.process_id[:10] + next(self._stamps).to_bytes(6, "big")

    def take_turns(self, count: int) -> int:
        """Return the turn of pointers that are written now, among others of the same time."""
        with self.memory:
            self.turns += count
            return self.turns - count

    @property
    def slot(self) -> int:
        """The row of each queue's counters that this thread's connection adds to.

        Connections of one process have different ones, so that they do not wait for each other.
        """
        slot: int = (self.first_slot + self.database.number) % SLOTS
        return slot

    # --- queues ----------------------------------------------------------------------------

    def read_head(self) -> LogHead:
        """Read the end of the log and the versions."""
        return head_of(self.database.ask("read_heads"))

    def lock_heads(self, logs: list[int] | None = None) -> LogHead:
        """Lock the heads of all logs, or of some, until the commit, and read what has changed.

        With all heads locked, no id is given out, and every one that was is committed.
        """
        self.database.run("lock_heads", logs=logs)
        head = self.read_head()
        if logs is None:
            head = head._replace(end=head.next_id)
        if head.specs_version != self.head.specs_version:
            # Nobody can have later ones now.
            self._take_over(head, self._read_queues())
        self.note_head(head)
        return head

    def note_head(self, head: LogHead, replaced: int | None = None) -> None:
        """Take a head over that was read, unless a later one is known.

        ``replaced``: how often memory had been replaced before that; None: nobody can have a later.
        """
        with self.memory:
            if replaced in {None, self._replaced} or head.is_later(self.head):
                self.head = head.beside(self.head)
                self._replaced += 1

    def reach_end(self) -> None:
        """Refresh, and know the end of the log beyond all that this process has published.

        Unless something is being published into a log: then nobody knows yet what follows there.
        """
        replaced, head = self._replaced, self.read_head()
        if head.end < head.next_id:
            self.database.ask("advance_heads", next_id=head.next_id)
            replaced, head = self._replaced, self.read_head()
        self._follow(head, replaced)

    def refresh(self, now_ms: int | None = None) -> None:
        """Read queues again if they have changed; with ``now_ms``, look at most every second."""
        if now_ms is not None and self._loaded_ms <= now_ms < self._loaded_ms + REFRESH_MS:
            return
        if now_ms is not None:
            # At once: other threads need not look as well.
            self._loaded_ms = now_ms
        replaced = self._replaced
        self._follow(self.read_head(), replaced)

    def _follow(self, head: LogHead, replaced: int) -> None:
        """Read queues again if a head says that they have changed."""
        if head.specs_version != self.head.specs_version:
            self.reload()
        else:
            self.note_head(head, replaced)

    def reload(self) -> None:
        """Read queues and settings again."""
        self.database.do(self._reload, again=True)

    def _reload(self) -> None:
        while True:
            replaced, head = self._replaced, self.read_head()
            read = self._read_queues()
            # The version and the queues must be of the same moment.
            if self.read_head().specs_version == head.specs_version:
                self._take_over(head, read, replaced)
                return

    def _read_queues(self) -> tuple[tuple[Any, ...], list[SqlQueue]]:
        """Read the row of the store, and its queues."""
        instance = self.database.run("load_instance")[0]
        queues, known = [], self.by_number
        for number, _, *records in self.database.run("load_queues"):
            queue = known.get(number)
            # Most are as they were.
            if queue is None or queue.records != records:
                queue = decode_queue(number, *records)
            queues.append(queue)
        return instance, queues

    def _take_over(
        self,
        head: LogHead,
        read: tuple[tuple[Any, ...], list[SqlQueue]],
        replaced: int | None = None,
    ) -> None:
        """Replace queues and settings by those that were read, unless later ones are known.

        ``replaced``: how often memory had been replaced before that; None: nobody can have later
        ones.
        """
        (_, routing, ring_size, ring_high, _, encoded, changes), queues = read
        settings = msgspec.msgpack.decode(encoded, type=LogSettings)
        if head.logs < max(logs for _, logs in settings.changes):
            raise row_lost("log_heads")
        with self.memory:
            if replaced not in {None, self._replaced} and not head.is_later(self.head):
                return
            known, before = self.by_name, filters_of(self.by_name)
            by_name = {queue.name: queue for queue in queues}
            by_number = {queue.number: queue for queue in queues}
            fifo = frozenset(queue.name for queue in queues if queue.fifo)
            limited = frozenset(queue.name for queue in queues if policy.is_limited(queue.spec))
            filter_changes = msgspec.msgpack.decode(changes, type=list[tuple[int, int]])
            is_changed = before != filters_of(by_name) or routing != self.routing
            head, progress = head.beside(self.head), self.progress
            for name in known.keys() - by_name.keys():
                # Claims that wait for the queue are to find out.
                self.woken.setdefault(name, 0)
            # From here on nothing is called: an exception out of a signal handler comes before it,
            # or after it.
            self.ring_size, self.ring_high = ring_size, ring_high
            self.settings, self.filter_changes = settings, filter_changes
            self.by_name, self.by_number = by_name, by_number
            self.fifo, self.limited = fifo, limited
            self.routing, self.head = routing, head
            self._replaced += 1
            # Last: who finds the count changed, without the lock, must find the rest changed.
            progress.filter_changes += is_changed

    def live_filters(self) -> dict[str, str]:
        """Return the filters that new messages are routed by, as last read."""
        return filters_of(self.by_name)

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

    def hold_instance(self) -> tuple[int, str]:
        """Keep the row of the store from changes until the commit; return epoch and routing.

        Before pointers and messages are locked, and after queues, as every transaction does.
        """
        row = self.database.run("hold_instance")[0]
        self.ring_size, self.ring_high, epoch, routing = row
        return int(epoch), str(routing)

    def changed(self, now_ms: int, *, filters_from: int | None = None) -> None:
        """Record a change of queues or settings, with all heads locked.

        It writes to the row of the store, which is locked after queues and before all else.
        """
        filters = int(filters_from is not None)
        row = self.database.run("bump_heads", filters=filters, now_ms=now_ms)[0]
        if filters_from is not None:
            changes = [*self.filter_changes, (int(row[1]), filters_from)][-FILTER_CHANGES:]
            self.database.run("put_filter_changes", value=msgspec.msgpack.encode(changes))

    # --- transactions, waking, alarms --------------------------------------------------------

    def change(self, work: Callable[[], T], *, again: bool = False) -> T:
        """Call ``work`` in one transaction."""

        def attempt() -> T:
            with self.database.transaction():
                return work()

        # Around all attempts: a failure after the commit must not repeat it.
        with self.zones.recheck_if_slow():
            result = self.database.do(attempt, again=again)
        self.progress.commits += 1
        return result

    def change_queues(self, work: Callable[[], T], *, again: bool = False) -> T:
        """Change queues or settings in one transaction, and read them again."""
        result = self.change(work, again=again)
        try:
            self.reload()
        except PenstockError as error:
            # The change is committed: the next verb finds out by the version.
            log.warning("queues are read again with the next call: %s", error)
            self._loaded_ms = 0
        return result

    def once(self, work: Callable[[], T], now_ms: int) -> Callable[[], T]:
        """Return ``work``, a transaction, as one that may be repeated and is done once.

        It leaves a note. If a COMMIT gets no answer, the next attempt waits until the database has
        ended the one before, and finds the note if that was committed.
        """
        token = self.stamp()
        results: list[T] = []

        def attempt() -> T:
            if self.database.run("note_change", token=token, now_ms=now_ms):
                results.append(work())
            return results[-1]

        return attempt

    def wake(self, queue: SqlQueue, count: int = 1) -> None:
        """Note that a queue may have messages to claim."""
        with self.memory:
            self.woken[queue.name] = self.woken.get(queue.name, 0) + count

    def add_counts(self, queue: int, now_ms: int, **added: int) -> None:
        """Add to a queue's counters."""
        given = {"queue": queue, "slot": self.slot, "now_ms": now_ms, **added}
        names = self.database.parameters("add_to_counts")
        assert given.keys() <= names, given.keys() - names
        self.database.run("add_to_counts", **{name: given.get(name, 0) for name in names})

    def due_for_retention(self, at_ms: int) -> None:
        """Note that the retention of an ended message is over at a time."""
        with self.memory:
            if self.retention_ms is None or at_ms < self.retention_ms:
                self.retention_ms = at_ms
        self.due(at_ms)

    def due(self, at_ms: int) -> None:
        """Note that a sweep has work at a time."""
        with self.memory:
            if self.due_ms is None or at_ms < self.due_ms:
                self.due_ms = at_ms


class SqlOverflow(SqlSession):
    """Queues with limits: room for messages, and the fall of the oldest from a queue that is full.

    The counters of a queue are in many rows, and no verb locks all of them: publishes under way at
    one moment do not see each other, and may together pass a limit. A process that drops messages
    locks the queue first, so that two of them do not drop twice as many.
    """

    def _loads(self, queues: Iterable[SqlQueue]) -> dict[int, Load]:
        loads = {queue.number: (0, 0) for queue in queues}
        if loads:
            rows = self.database.ask("sum_load", queues=list(loads))
            loads |= {number: (live, size) for number, live, size in rows}
        return loads

    def check_room(
        self,
        added: dict[SqlQueue, int],
        added_bytes: dict[SqlQueue, int],
        largest: Mapping[SqlQueue, int] = {},
        *,
        older: bool = False,
    ) -> None:
        """Refuse messages if one of the queues that they come into has no room for them."""
        limited = [queue for queue in added if queue.name in self.limited]
        loads = self._loads(limited)
        for queue in limited:
            bytes_, most = added_bytes[queue], largest.get(queue, 0)
            load = loads[queue.number]
            policy.check_room(queue.spec, *load, added[queue], bytes_, largest=most, older=older)

    def drop_excess(
        self, now_ms: int, budget: int, queues: Iterable[SqlQueue] | None = None
    ) -> int:
        """Let the oldest waiting messages of queues fail that are over a limit; return how many."""
        if not self.limited:
            return 0
        if queues is None:
            queues = [self.by_name[name] for name in self.limited if name in self.by_name]
        dropping = {queue.number: queue for queue in queues if policy.drops_oldest(queue.spec)}
        dropped = 0
        for number, load in self._loads(dropping.values()).items():
            queue = dropping[number]
            while dropped < budget and policy.is_over(queue.spec, *load):
                some = min(DROP_MESSAGES, budget - dropped)
                ids, load = self.change(partial(self._drop, queue, some, now_ms))  # noqa: PLW2901
                if life.level:
                    log_step("fail", queue.name, ids, reason=policy.drop_reason(queue.spec))
                dropped += len(ids)
                if not ids:
                    # The messages left are in flight.
                    break
        return dropped

    def _drop(self, queue: SqlQueue, limit: int, now_ms: int) -> tuple[list[int], Load]:
        """Drop the oldest messages of a queue, up to a limit; return which, and what is left."""
        database, spec = self.database, queue.spec
        if not database.run("lock_queue", number=queue.number):
            return [], (0, 0)
        load = self._loads([queue])[queue.number]
        count = min(limit, policy.guess_excess(spec, *load))
        rows = database.run("oldest_waiting", queue=queue.number, count=count)
        ids = [row[0] for row in rows]
        ids = ids[: policy.count_excess(spec, *load, [row[1] for row in rows])]
        if not ids:
            return [], load
        own = {"queue": queue.number, "message_ids": ids}
        if queue.fifo:
            # Before the items, as every transaction locks them.
            database.run("lock_pointers_of_items", **own)
        gone = database.run(
            "drop_items",
            **own,
            why=policy.drop_reason(spec).encode(),
            slots=SLOTS,
            slot=self.slot,
            each_ms=EACH_MS,
            now_ms=now_ms,
        )
        if queue.fifo:
            self.zones.lower({(queue.number, row[1]): now_ms for row in gone}, now_ms)
        self._note_failed(queue, len(gone), now_ms)
        left = load[0] - len(gone), load[1] - sum(row[2] for row in gone)
        return [row[0] for row in gone], left

    def _note_failed(self, queue: SqlQueue, count: int, now_ms: int) -> None:
        """Note that messages of a queue have failed: claims, retention, dead letters."""
        self.wake(queue, count)
        if queue.spec.failed_retention_ms:
            self.due_for_retention(now_ms + queue.spec.failed_retention_ms)
        if queue.spec.dead_letter:
            self.due(now_ms)


def sequence_at(time_ms: int) -> int:
    """Return the first sequence of messages that end at a time."""
    return time_ms * EACH_MS * SLOTS


def head_of(rows: list[tuple[Any, ...]]) -> LogHead:
    """Return what the statement ``read_heads`` has read."""
    head = LogHead(*rows[0])
    # The row -1 alone, or not even that.
    if head.logs < 1:
        raise row_lost("log_heads")
    return head


def row_lost(table: str) -> StoreDamaged:
    """Return the error of a table that has lost a row which is never deleted."""
    return StoreDamaged(
        f"the table {table} of the store has lost a row; nothing was changed: bring it back from "
        "a backup of the database"
    )
