"""The parts of a key-value store, its memory, and the one way to commit.

::

    table default
    "meta"                    identity of the store, MessagePack (Identity)
    02 0c | "queue"           SeqBlock of queue numbers
    02 0e                     store-wide totals, MessagePack array (Totals)
    02 0f | table, NUL, key   a record that did not decode: MessagePack [why, value]

    table unclaimed           queue u32 | due_ms u64 | first key u64 | CRC-32 of the value:
                              packed u64 keys of messages that expire then

One lock, held by the broker, covers everything here. A verb reads what was committed, fills a
batch, and commits it whole. Memory runs ahead of the disk meanwhile: if a verb raises, memory is
rebuilt from disk (:func:`verb`).
"""

from __future__ import annotations

import logging
from collections import deque
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, Final, ParamSpec, TypeVar
from zlib import crc32

import msgspec

from penstock.engines import Shape
from penstock.errors import (
    CorruptRecord,
    InvalidInput,
    LimitReached,
    QueueNotFound,
    StorageFailed,
    StoreDamaged,
    StoreMismatch,
)
from penstock.model import State
from penstock.store import policy
from penstock.store.codec.records import unpack
from penstock.store.contract import Progress
from penstock.store.kv.history import History
from penstock.store.kv.log import MetadataLog, SeqBlocks
from penstock.store.kv.queues import DeadLetters, Queue, QueueTable
from penstock.store.kv.tables import Dedup, DueHeap, FirstKeys, Leases, Payloads
from penstock.store.live import make_active_set

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.engines import Batch, Engine
    from penstock.store.codec.records import Ended
    from penstock.store.live import Item

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# Since format 3 done and failed messages have their first claims (codec/records.py).
FORMAT: Final = 3
# A store of these formats is upgraded by its identity alone: all their records are decoded.
UPGRADED: Final = (2,)
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
_encode: Final = msgspec.msgpack.Encoder().encode
# Bytes that a message needs beside its payload, roughly: rows of log, index and metadata.
_ROWS_BYTES: Final = 256
_TOTALS: Final = b"\x02\x0e"
_QUARANTINE: Final = b"\x02\x0f"
# Errors by which a verb refuses its caller: memory is as it was unless a change had begun.
_REFUSALS: Final = (InvalidInput, LimitReached, QueueNotFound, StorageFailed)


class Identity(msgspec.Struct):
    """The identity of a store, as it is written in it."""

    format: int
    design: str
    store_id: int
    created_at_ms: int
    routing: str


def can_open(found: int) -> bool:
    """Whether this version opens a store of a format."""
    return found == FORMAT or found in UPGRADED


def describe_format(found: int) -> str:
    """Say of a store that can't be opened which version of Penstock opens it."""
    which = "a newer one" if found > FORMAT else "the one that made it"
    known = " and ".join(map(str, (*UPGRADED, FORMAT)))
    return f"format {found}; this version of Penstock reads formats {known}: use {which}"


def _decode_identity(record: bytes) -> Identity:
    try:
        return unpack(record, Identity, "identity")
    except CorruptRecord as error:
        raise StoreMismatch(f"the store's identity record does not decode: {error}") from error


class Totals(msgspec.Struct, array_like=True):
    """Counters of the whole store."""

    published: int = 0
    duplicates: int = 0
    unrouted: int = 0
    quarantined: int = 0
    time_floor_ms: int = 0
    # Raised whenever the set of live filters changes.
    filters_version: int = 0


S = TypeVar("S", bound="Core")


def verb(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Wrap a verb of a store: memory is as the disk says it is, however the verb ends."""

    @wraps(method)
    def run(store: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if store.is_stale:
            store.load()
        store.is_ahead = False
        try:
            result = method(store, *args, **kwargs)
        except BaseException as error:
            store.load_after(error)
            raise
        # A batch that was begun and not needed has changed nothing, whatever is raised later on.
        store.is_ahead = False
        return result

    return run


class Core:
    """The parts of a store, its queues, and the one way to commit. Subclasses add the verbs."""

    def __init__(
        self, engine: Engine, design: str, *, store_id: int, routing: str | None, now_ms: int
    ) -> None:
        self.engine = engine
        self.durable_on_commit = engine.durable_on_commit
        self.system = engine.table("default")
        self.queue_table = QueueTable(engine.table("queues"))
        self.progress = Progress()
        self.stale_receipts = 0
        # Messages that claims have passed over.
        self.unreadable = 0
        self.woken: set[str] = set()
        # Whether records were put aside since the bytes of queues were counted.
        self.has_lost = False
        # Parts of a sweep that have met unreadable rows, and when a sweep looks at those again.
        self.stuck: dict[Callable[[int, int], object], StoreDamaged] = {}
        self.look_again_ms = 0
        # Whether the last sweep could not do what was due.
        self.was_idle = False
        # The filters last asked for: valid from, until, in which version.
        self.filters_asked: tuple[int, int | None, int, dict[str, str]] = (0, 0, -1, {})
        try:
            self.identity = self._identify(design, store_id, routing, now_ms)
            self.active = make_active_set(self.identity.design, engine, self.quarantine)
            self.load()
            self._upgrade()
        except StoreDamaged as error:
            raise StoreDamaged(
                f"the store can't be opened: {error}",
                table=error.table,
                begin=error.begin,
                end=error.end,
            ) from error

    def _identify(self, design: str, store_id: int, routing: str | None, now_ms: int) -> Identity:
        record = self.system.get(_META)
        if record is None:
            identity = Identity(FORMAT, design, store_id, now_ms, routing or "inline")
            batch = self.engine.batch()
            batch.put(_META, msgspec.msgpack.encode(identity), self.system.family)
            self.engine.commit(batch)
            self.engine.sync()
            return identity
        identity = _decode_identity(record)
        if not can_open(identity.format):
            raise StoreMismatch(f"the store has {describe_format(identity.format)}")
        if identity.design != design:
            raise StoreMismatch(
                f"the store has the {identity.design} design: it can't be opened as {design}"
            )
        policy.check_routing("the store", identity.routing, routing)
        return identity

    def _upgrade(self) -> None:
        """Refuse the store to the versions before, which can't read what is written from now on."""
        if self.identity.format != FORMAT:
            self.identity = msgspec.structs.replace(self.identity, format=FORMAT)
            batch = self.engine.batch()
            batch.put(_META, msgspec.msgpack.encode(self.identity), self.system.family)
            self.engine.commit(batch)
            # A commit that is lost would leave what was written behind it to such a version.
            self.engine.sync()

    def put_routing(self, batch: Batch, routing: str) -> None:
        """Change who routes messages: publish, or a tailer."""
        self.identity = msgspec.structs.replace(self.identity, routing=routing)
        batch.put(_META, msgspec.msgpack.encode(self.identity), self.system.family)
        # Brokers look who routes when they look at the filters.
        self.progress.filter_changes += 1

    # --- memory --------------------------------------------------------------------------

    def load(self) -> None:
        """Rebuild everything that memory keeps from what is on disk."""
        # Until this has come to its end; if it does not, the next verb tries again.
        self.is_stale = True
        # Whether a batch has been begun and not committed.
        self.is_ahead = False
        # The filters may be others than memory knew.
        self.progress.filter_changes += 1
        engine = self.engine
        # A switch of the routing may have failed, or not.
        self.identity = _decode_identity(self.system.get(_META) or b"")
        self._aside: dict[tuple[str, bytes], tuple[bytes, str, bool]] = {}
        record = self.system.get(_TOTALS)
        try:
            self.totals = Totals() if record is None else unpack(record, Totals, "totals")
        except CorruptRecord as error:
            self.totals = Totals()
            self.quarantine("default", _TOTALS, record or b"", str(error))
        # All of these know something by heart: they are made anew, so that nothing is left of it.
        before = self.active
        self.active = make_active_set(self.identity.design, engine, self.quarantine)
        self.active.healed, self.active.passed = before.healed, before.passed
        self.payloads = Payloads(engine.table("payloads"))
        self.dedup = Dedup(engine.table("dedup"))
        self.leases = Leases(engine.table("leases"), engine.table("lease_expiry"))
        self.history = History(engine.table("history"), self.quarantine)
        self.log = MetadataLog(
            engine.table("log"), f"{self.identity.store_id:08x}", self.quarantine
        )
        self.queue_numbers = SeqBlocks(self.system, b"\x02\x0cqueue")
        self._unclaimed = engine.table("unclaimed")
        self.first_unclaimed = FirstKeys(self._unclaimed)
        # The last changes as (version, offset from which on): a page that was read before is judged
        # by them.
        self.filter_history: deque[tuple[int, int]] = deque(maxlen=10_000)
        self.by_name: dict[str, Queue] = {}
        self.by_number: dict[int, Queue] = {}
        # Named apart, so that a sweep need not look at every queue.
        self.draining: set[str] = set()
        # The FIFO queues, and those with limits: a publish asks for them.
        self.fifo: set[str] = set()
        self.limited: set[str] = set()
        # The numbers of queues that have more than they may, and drop their oldest messages.
        self.overfull: set[int] = set()
        # (queue number, what) -> when its retention next has something to do
        self.retention: DueHeap[tuple[int, str]] = DueHeap()
        # ... or why that is not known.
        self.unscheduled: dict[tuple[int, str], StoreDamaged] = {}
        self.dead_letters = DeadLetters()
        # Queues whose waiting messages are being listed to expire: in which state, and from where
        # on there are some that are not.
        self.listing: dict[str, tuple[State, bytes]] = {}
        for queue in self.queue_table.load():
            self.adopt(queue)
        self.is_stale = False

    def load_after(self, error: BaseException) -> None:
        """Rebuild memory after a verb has failed, unless the verb has changed nothing."""
        if not self.is_ahead and isinstance(error, _REFUSALS):
            return
        self.is_stale = True
        try:
            self.load()
        except Exception as failure:
            # The caller is to know why the verb has failed, not why this has.
            log.warning(
                "after %r: memory can't be rebuilt, the next verb tries again: %r", error, failure
            )

    def adopt(self, queue: Queue) -> None:
        """Take a queue into memory."""
        try:
            coverage = self.queue_table.coverage(queue)
        except CorruptRecord as error:
            self.quarantine("queues", b"\x02\x13" + queue.id, b"", str(error))
            # The queue has lost which messages it has had; it takes messages from here on.
            live = policy.Stretch(self.log.end, None, queue.spec.filter)
            coverage = policy.Coverage([live], known_from=self.log.end)
        if coverage.known_from is None:
            is_filled = coverage.live or coverage.backfilled
            coverage.known_from = self.log.earliest if is_filled else self.log.end
        queue.coverage = coverage
        if coverage.draining:
            self.draining.add(queue.name)
        if queue.fifo:
            self.fifo.add(queue.name)
        self.note_limits(queue)
        listing = self.queue_table.listing(queue)
        if listing is not None:
            self.listing[queue.name] = listing
        self.by_name[queue.name] = queue
        self.by_number[queue.number] = queue
        self.active.load(queue)
        self.history.load(queue)
        self.schedule_retention(queue)
        self.dead_letters.adopt(queue)

    def drop(self, queue: Queue) -> None:
        """Let go of a deleted queue."""
        self.wake(queue)
        del self.by_name[queue.name], self.by_number[queue.number]
        self.draining.discard(queue.name)
        self.fifo.discard(queue.name)
        self.limited.discard(queue.name)
        self.overfull.discard(queue.number)
        self.listing.pop(queue.name, None)
        self.active.drop(queue)
        self.history.forget(queue)
        self.first_unclaimed.forget(queue.number4)
        self.dead_letters.forget(queue)
        for what in (State.DONE.value, State.FAILED.value, "unclaimed"):
            self.retention.set((queue.number, what), None)
            self.unscheduled.pop((queue.number, what), None)

    def queue(self, name: str) -> Queue:
        """Look a queue up by name."""
        queue = self.by_name.get(name)
        if queue is None:
            raise QueueNotFound.among(name, self.by_name)
        return queue

    def page(
        self, queue: Queue, state: State, after: bytes, limit: int, *, whole_parts: bool = False
    ) -> tuple[Sequence[Item | Ended], bytes | None]:
        """Read a page of messages in a state, and where the next begins."""
        if state in {State.DONE, State.FAILED}:
            return self.history.page(queue, state, after, limit, whole_parts=whole_parts)
        return self.active.page(queue, state, after, limit)

    def live_pages(self, queue: Queue, state: State) -> Iterator[list[Item]]:
        """Read all messages of a queue that wait or are in flight, a page at a time."""
        after: bytes | None = b""
        while after is not None:
            items, after = self.active.page(queue, state, after, 1_000)
            yield items

    def time_floor_ms(self) -> int:
        """Return the latest time that this store has seen."""
        floors = [queue.counts.time_floor_ms for queue in self.by_name.values()]
        return max([self.totals.time_floor_ms, *floors])

    # --- commit --------------------------------------------------------------------------

    def begin(self, messages: int = 0, payload_bytes: int = 0) -> Batch:
        """Begin a batch. Memory may be changed from here on, and not before.

        A batch that brings messages into queues is refused if the disk has no room for them.
        """
        batch = self.engine.batch(growth=messages * _ROWS_BYTES + payload_bytes)
        self.is_ahead = True
        return batch

    def commit(self, batch: Batch, touched: Iterable[Queue], now_ms: int) -> None:
        """Commit a batch with the counters of the queues that it touched."""
        for queue in touched:
            queue.counts.time_floor_ms = now_ms
            self.queue_table.put_counts(batch, queue)
            if queue.name in self.limited:
                self.note_limits(queue)
        if self._aside:
            self._put_aside(batch)
        self.engine.commit(batch)
        self.is_ahead = False
        self.progress.commits += 1

    def note_limits(self, queue: Queue) -> None:
        """Note whether a queue has limits, and whether it is over one and has messages to drop."""
        spec, counts = queue.spec, queue.counts
        self.limited.discard(queue.name)
        self.overfull.discard(queue.number)
        if policy.is_limited(spec):
            self.limited.add(queue.name)
            waits = counts.available or counts.delayed
            if policy.drops_oldest(spec) and waits and policy.is_over(spec, *counts.load):
                self.overfull.add(queue.number)

    def put_totals(self, batch: Batch, now_ms: int) -> None:
        """Write the store's totals."""
        self.totals.time_floor_ms = now_ms
        batch.put(_TOTALS, _encode(self.totals), self.system.family)

    def put_coverage(self, batch: Batch, queue: Queue, coverage: policy.Coverage) -> None:
        """Write what a queue has been filled from."""
        coverage.bound(self.log.earliest)
        queue.coverage = coverage
        if coverage.draining:
            self.draining.add(queue.name)
        self.queue_table.put_coverage(batch, queue, coverage)

    def filters_changed(self, batch: Batch, from_offset: int, now_ms: int) -> None:
        """Note that the live filters have changed from an offset on."""
        self.totals.filters_version += 1
        self.progress.filter_changes += 1
        self.filter_history.append((self.totals.filters_version, from_offset))
        self.put_totals(batch, now_ms)

    def fail(
        self,
        batch: Batch,
        queue: Queue,
        items: Sequence[Item],
        reason: str,
        now_ms: int,
        claimed_at_ms: int | None = None,
    ) -> None:
        """Put messages that have left the live ones among the failed ones.

        ``claimed_at_ms``: when the claim was made that they were in flight under, if they were.
        """
        held = [(items, claimed_at_ms)]
        self.history.add(batch, queue, State.FAILED, held, reason, now_ms)
        if queue.spec.failed_retention_ms:
            due_ms = now_ms + queue.spec.failed_retention_ms
            self.retention.lower((queue.number, State.FAILED.value), due_ms)
        self.dead_letters.note(queue)
        self.wake(queue)

    def wake(self, queue: Queue) -> None:
        """Note that a queue may have something to claim."""
        self.woken.add(queue.name)

    # --- quarantine ----------------------------------------------------------------------

    def take_unread(self, queue: Queue) -> list[StoreDamaged]:
        """Log the messages that a claim has just passed over, and return the reasons."""
        met, self.active.unread = self.active.unread, []
        for error in met:
            log.error("queue %s: passed over a message that can't be read: %s", queue.name, error)
        self.unreadable += len(met)
        return met

    def quarantine(
        self, table: str, key: bytes, value: bytes, why: str, *, remove: bool = True
    ) -> bool:
        """Put a record that does not decode aside with the next commit.

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
        """Commit what reads have put aside, if anything can be written."""
        if self._aside and self.engine.away is None:
            self.commit(self.begin(), list(self.by_name.values()), now_ms)

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
        self.has_lost = bool(self.limited)
        batch.put(_TOTALS, msgspec.msgpack.encode(self.totals), self.system.family)

    # --- retention of unclaimed messages ---------------------------------------------------

    def note_unclaimed(self, batch: Batch, queue: Queue, items: Sequence[Item]) -> None:
        """Remember when waiting messages expire, one row for those that expire together."""
        retention_ms = queue.spec.unclaimed_retention_ms
        if not retention_ms:
            return
        by_due: dict[int, list[int]] = {}
        for item in items:
            by_due.setdefault(item.visible_at_ms + retention_ms, []).append(item.key)
        for due_ms, keys in by_due.items():
            packed = b"".join(key.to_bytes(8, "big") for key in keys)
            row = _unclaimed_key(queue, due_ms) + packed[:8] + crc32(packed).to_bytes(4, "big")
            batch.put(row, packed, self._unclaimed.family)
            self.first_unclaimed.note(queue.number4, row)
            self.retention.lower((queue.number, "unclaimed"), due_ms)

    def take_unclaimed(self, batch: Batch, queue: Queue, now_ms: int, limit: int) -> list[int]:
        """Remove rows that are due, with up to about ``limit`` keys, and return those."""
        begin, end = queue.number4, _unclaimed_key(queue, now_ms + 1)
        keys: list[int] = []
        for row, packed in self.first_unclaimed.scan(begin, end, limit):
            if len(keys) >= limit:
                break
            batch.delete(row, self._unclaimed.family)
            keys += [int.from_bytes(packed[at : at + 8], "big") for at in range(0, len(packed), 8)]
        return keys

    def clear_unclaimed(self, batch: Batch, queue: Queue) -> None:
        """Remove every row of a queue."""
        prefix = queue.number4
        batch.delete_range(prefix, prefix + b"\xff" * 17, self._unclaimed.family)

    def put_listing(self, batch: Batch, queue: Queue, listing: tuple[State, bytes] | None) -> None:
        """Note how far the waiting messages of a queue are listed to expire; None: all are."""
        self.queue_table.put_listing(batch, queue, listing)
        if listing is None:
            self.listing.pop(queue.name, None)
        else:
            self.listing[queue.name] = listing

    def schedule_retention(self, queue: Queue) -> None:
        """Work out when each retention of a queue next has something to do."""
        spec, prefix = queue.spec, queue.number4
        for what, retention_ms in (
            (State.DONE.value, spec.done_retention_ms),
            (State.FAILED.value, spec.failed_retention_ms),
            ("unclaimed", 0),
        ):
            self.unscheduled.pop((queue.number, what), None)
            due_ms = None
            try:
                if what == "unclaimed":
                    if rows := self.first_unclaimed.scan(prefix, prefix + b"\xff" * 17, 1):
                        due_ms = int.from_bytes(rows[0][0][4:12], "big")
                elif retention_ms:
                    first_ms = self.history.first_ended_at_ms(queue, State(what))
                    due_ms = None if first_ms is None else first_ms + retention_ms
            except StoreDamaged as error:
                self.unscheduled[queue.number, what] = error.anew()
            self.retention.set((queue.number, what), due_ms)


def _unclaimed_key(queue: Queue, due_ms: int) -> bytes:
    return queue.number4 + due_ms.to_bytes(8, "big")
