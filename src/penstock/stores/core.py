"""What every key-value store is made of, and how its changes commit.

::

    table default
    "meta"                    identity of the store, MessagePack (Identity)
    02 0c | "queue"           SeqBlock of queue numbers
    02 0e                     store-wide totals, MessagePack (Totals)
    02 0f | table, NUL, key   a record that did not decode: MessagePack [why, value]

    table unclaimed           queue u32 | due_ms u64 | first key u64 | CRC-32 of the value:
                              packed u64 keys of messages that expire then

One lock, held by the broker, covers everything here. A verb reads what was committed, fills one
batch, and commits it whole; if a commit fails, memory is rebuilt from disk.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Final
from zlib import crc32

import msgspec

from penstock.errors import CorruptRecord, PenstockError, QueueNotFound, StoreMismatch
from penstock.kv import Shape
from penstock.model import State
from penstock.stores.coverage import Coverage, CoverageTable, Stretch
from penstock.stores.dead_letters import DeadLetters
from penstock.stores.dedup import Dedup
from penstock.stores.due import DueHeap
from penstock.stores.history import History
from penstock.stores.leases import Leases
from penstock.stores.metadata_log import MetadataLog
from penstock.stores.payloads import Payloads
from penstock.stores.queues import Queue, QueueTable
from penstock.stores.sequences import Sequence as SeqBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.kv import Batch, Engine
    from penstock.stores.active import ActiveSet, Item, Quarantine

__all__ = ["SHARED_TABLES", "Core", "Identity"]

log = logging.getLogger(__name__)

FORMAT: Final = 1
SHARED_TABLES: Final[Mapping[str, Shape]] = {
    "default": Shape.SYSTEM,
    "leases": Shape.SHORT_LIVED,
    "lease_expiry": Shape.TIME_INDEX,
    "payloads": Shape.VALUES,
    "log": Shape.APPEND,
    "history": Shape.APPEND,
    "queues": Shape.SYSTEM,
    "dedup": Shape.SHORT_LIVED,
    "unclaimed": Shape.TIME_INDEX,
}
_META: Final = b"meta"
_TOTALS: Final = b"\x02\x0e"
_QUARANTINE: Final = b"\x02\x0f"


class Identity(msgspec.Struct):
    """What a store says about itself."""

    format: int
    design: str
    store_id: int
    created_at_ms: int
    routing: str


class Totals(msgspec.Struct):
    """Counters of the whole store."""

    published: int = 0
    duplicates: int = 0
    unrouted: int = 0
    quarantined: int = 0
    time_floor_ms: int = 0
    # Raised whenever the set of live filters changes.
    filters_version: int = 0


class Core:
    """The parts of a store, its queues, and the one way to commit."""

    def __init__(
        self,
        engine: Engine,
        design: str,
        make_active: Callable[[Engine, Quarantine], ActiveSet],
        *,
        store_id: int,
        routing: str | None,
        now_ms: int,
    ) -> None:
        self.engine = engine
        self.system = engine.table("default")
        self._aside: dict[tuple[str, bytes], tuple[bytes, str, bool]] = {}
        self.identity = self._identify(design, store_id, routing, now_ms)
        self.payloads = Payloads(engine.table("payloads"))
        self.dedup = Dedup(engine.table("dedup"))
        self.leases = Leases(engine.table("leases"), engine.table("lease_expiry"))
        self.history = History(engine.table("history"), self.quarantine)
        self.active = make_active(engine, self.quarantine)
        self._unclaimed = engine.table("unclaimed")
        self._queue_table = QueueTable(engine.table("queues"))
        self._coverage_table = CoverageTable(engine.table("queues"))
        self.log = MetadataLog(
            engine.table("log"), f"{self.identity.store_id:08x}", self.quarantine
        )
        self.queue_numbers = SeqBlocks(self.system, b"\x02\x0cqueue", first=1)
        # (version, from which offset on), of late: a page that was read before is judged by them.
        self.filter_changes: deque[tuple[int, int]] = deque(maxlen=10_000)
        self.commits = 0
        self.stale_receipts = 0
        self.woken: set[str] = set()
        self.load()

    def _identify(self, design: str, store_id: int, routing: str | None, now_ms: int) -> Identity:
        record = self.system.get(_META)
        if record is None:
            identity = Identity(FORMAT, design, store_id, now_ms, routing or "inline")
            batch = self.engine.batch()
            batch.put(_META, msgspec.msgpack.encode(identity), self.system.family)
            self.engine.commit(batch)
            self.engine.sync()
            return identity
        try:
            identity = msgspec.msgpack.decode(record, type=Identity)
        except (msgspec.MsgspecError, ValueError) as error:
            raise StoreMismatch(f"the store's identity record does not decode: {error}") from error
        if identity.format > FORMAT:
            raise StoreMismatch(
                f"the store has format {identity.format}; this version of Penstock reads up to "
                f"{FORMAT}: use a newer one"
            )
        if identity.design != design:
            raise StoreMismatch(
                f"the store has the {identity.design} design, it was opened as {design}"
            )
        if identity.routing not in {"inline", "pipeline"}:
            raise StoreMismatch(f"the store routes {identity.routing!r:.100}, which is not known")
        if routing is not None and identity.routing != routing:
            raise StoreMismatch(
                f"the store routes {identity.routing}, it was opened with routing={routing!r}"
            )
        return identity

    # --- memory --------------------------------------------------------------------------

    def load(self) -> None:
        """Rebuild everything that memory keeps from what is on disk."""
        record = self.system.get(_TOTALS)
        try:
            self.totals = Totals()
            if record is not None:
                self.totals = msgspec.msgpack.decode(record, type=Totals)
        except (msgspec.MsgspecError, ValueError) as error:
            self.quarantine("default", _TOTALS, record or b"", str(error))
        self.log.reload()
        self.queue_numbers.reload()
        self.leases.reload()
        self.queues: dict[str, Queue] = {}
        self.by_number: dict[int, Queue] = {}
        self.coverage: dict[str, Coverage] = {}
        # Named apart, so that a sweep need not look at every queue.
        self.draining: set[str] = set()
        # (queue number, what) -> when its retention next has something to do
        self.retention: DueHeap[tuple[int, str]] = DueHeap()
        self.dead_letters = DeadLetters()
        for queue in self._queue_table.load():
            self.adopt(queue)

    def adopt(self, queue: Queue) -> None:
        """Take a queue into memory."""
        try:
            self.coverage[queue.name] = self._coverage_table.get(queue)
        except CorruptRecord as error:
            self.quarantine("queues", self._coverage_table.key(queue), b"", str(error))
            # What it has had is forgotten; what it wants from here on is not.
            live = Stretch(self.log.end, None, queue.spec.filter)
            self.coverage[queue.name] = Coverage([live], known_from=self.log.end)
        known = self.coverage[queue.name]
        if known.known_from is None:
            told = known.live or known.backfilled
            known.known_from = self.log.earliest if told else self.log.end
        if self.coverage[queue.name].draining:
            self.draining.add(queue.name)
        self.queues[queue.name] = queue
        self.by_number[queue.number] = queue
        self.active.load(queue)
        self.history.load(queue)
        self.schedule_retention(queue)
        self.dead_letters.adopt(queue)

    def drop(self, queue: Queue) -> None:
        """Let go of a deleted queue."""
        self.wake(queue)
        del self.queues[queue.name], self.by_number[queue.number], self.coverage[queue.name]
        self.draining.discard(queue.name)
        self.active.forget(queue)
        self.dead_letters.forget(queue)
        for what in (State.DONE.value, State.FAILED.value, "unclaimed"):
            self.retention.set((queue.number, what), None)

    def queue(self, name: str) -> Queue:
        """Look a queue up by name."""
        queue = self.queues.get(name)
        if queue is None:
            raise QueueNotFound(f"no queue named {name!r}")
        return queue

    def time_floor_ms(self) -> int:
        """Return the latest time that this store has seen."""
        floors = [queue.counts.time_floor_ms for queue in self.queues.values()]
        return max([self.totals.time_floor_ms, *floors])

    # --- commit --------------------------------------------------------------------------

    def commit(self, batch: Batch, touched: Iterable[Queue], now_ms: int) -> None:
        """Commit a batch with the counters of the queues that it touched."""
        for queue in touched:
            queue.counts.time_floor_ms = now_ms
            self._queue_table.put_counts(batch, queue)
        if self._aside:
            self._put_aside(batch)
        try:
            self.engine.commit(batch)
        except PenstockError:
            # Memory has run ahead of what is on disk.
            self.load()
            raise
        self.commits += 1

    def put_totals(self, batch: Batch, now_ms: int) -> None:
        """Write the store's totals."""
        self.totals.time_floor_ms = now_ms
        batch.put(_TOTALS, msgspec.msgpack.encode(self.totals), self.system.family)

    def put_spec(self, batch: Batch, queue: Queue) -> None:
        """Write a queue's spec."""
        self._queue_table.put_spec(batch, queue)

    def put_coverage(self, batch: Batch, queue: Queue, coverage: Coverage) -> None:
        """Write what a queue has been filled from."""
        coverage.bound(self.log.earliest)
        self.coverage[queue.name] = coverage
        if coverage.draining:
            self.draining.add(queue.name)
        self._coverage_table.put(batch, queue, coverage)

    def filters_changed(self, batch: Batch, from_offset: int, now_ms: int) -> None:
        """Note that the live filters have changed from an offset on."""
        self.totals.filters_version += 1
        self.filter_changes.append((self.totals.filters_version, from_offset))
        self.put_totals(batch, now_ms)

    def remove_queue(self, batch: Batch, queue: Queue) -> None:
        """Delete a queue's own records."""
        self._queue_table.remove(batch, queue)
        self._coverage_table.remove(batch, queue)

    def wake(self, queue: Queue) -> None:
        """Note that a queue may have something to claim."""
        self.woken.add(queue.name)

    # --- quarantine ----------------------------------------------------------------------

    def quarantine(
        self, table: str, key: bytes, value: bytes, why: str, *, remove: bool = True
    ) -> bool:
        """Have a record that does not decode put aside with the next commit.

        False if it was met before since the last commit: then its counters are right already.
        Without ``remove`` a copy is kept under the name ``table``, and nothing is removed.
        """
        if (table, key) in self._aside:
            return False
        log.error("quarantined a record of %s, key %s: %s", table, key.hex(), why)
        self._aside[table, key] = (value, why, remove)
        self.totals.quarantined += 1
        return True

    @property
    def has_aside(self) -> bool:
        """Whether records wait to be put aside."""
        return bool(self._aside)

    def settle_quarantine(self, now_ms: int) -> None:
        """Commit what reads have put aside."""
        if self._aside:
            self.commit(self.engine.batch(), list(self.queues.values()), now_ms)

    def _put_aside(self, batch: Batch) -> None:
        for (table, key), (value, why, remove) in self._aside.items():
            if remove:
                batch.delete(key, self.engine.table(table).family)
            batch.put(
                _QUARANTINE + table.encode() + b"\0" + key,
                msgspec.msgpack.encode((why, value)),
                self.system.family,
            )
        self._aside.clear()
        batch.put(_TOTALS, msgspec.msgpack.encode(self.totals), self.system.family)

    # --- retention of unclaimed messages ---------------------------------------------------

    def note_unclaimed(
        self, batch: Batch, queue: Queue, items: Sequence[Item], since_ms: Sequence[int]
    ) -> None:
        """Remember when waiting messages expire, one row for those that expire together."""
        retention_ms = queue.spec.unclaimed_retention_ms
        if not retention_ms:
            return
        by_due: dict[int, list[int]] = {}
        for item, since in zip(items, since_ms, strict=True):
            by_due.setdefault(since + retention_ms, []).append(item.key)
        for due_ms, keys in by_due.items():
            packed = b"".join(key.to_bytes(8, "big") for key in keys)
            row = _unclaimed_key(queue, due_ms) + packed[:8] + crc32(packed).to_bytes(4, "big")
            batch.put(row, packed, self._unclaimed.family)
            self.retention.lower((queue.number, "unclaimed"), due_ms)

    def take_unclaimed(self, batch: Batch, queue: Queue, now_ms: int, limit: int) -> list[int]:
        """Remove the rows that are due and return their keys."""
        prefix = queue.number.to_bytes(4, "big")
        keys: list[int] = []
        for row, packed in self._unclaimed.scan(prefix, _unclaimed_key(queue, now_ms + 1), limit):
            if len(keys) >= limit:
                break
            batch.delete(row, self._unclaimed.family)
            keys += [int.from_bytes(packed[at : at + 8], "big") for at in range(0, len(packed), 8)]
        return keys

    def clear_unclaimed(self, batch: Batch, queue: Queue) -> None:
        """Remove every row of a queue."""
        prefix = queue.number.to_bytes(4, "big")
        batch.delete_range(prefix, prefix + b"\xff" * 17, self._unclaimed.family)

    def schedule_retention(self, queue: Queue) -> None:
        """Work out when each retention of a queue next has something to do."""
        spec = queue.spec
        for state, retention_ms in (
            (State.DONE, spec.done_retention_ms),
            (State.FAILED, spec.failed_retention_ms),
        ):
            first = self.history.first_ended_at_ms(queue, state) if retention_ms else None
            due_ms = None if first is None else first + retention_ms
            self.retention.set((queue.number, state.value), due_ms)
        prefix = queue.number.to_bytes(4, "big")
        rows = self._unclaimed.scan(prefix, prefix + b"\xff" * 17, 1)
        due_ms = int.from_bytes(rows[0][0][4:12], "big") if rows else None
        self.retention.set((queue.number, "unclaimed"), due_ms)


def _unclaimed_key(queue: Queue, due_ms: int) -> bytes:
    return queue.number.to_bytes(4, "big") + due_ms.to_bytes(8, "big")
