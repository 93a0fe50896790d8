"""The contract over an ordered key-value engine, whichever way live messages are kept.

Nothing here waits, reads a clock or takes a lock: the broker does. Each verb is a method in the
module of its kind, in a subclass of :class:`~penstock.store.kv.state.Core`::

    publish   publish; from routes to places in queues
    claim     claim
    settle    ack, release, extend; leases that expire
    move      move, redrive; messages that come due; dead letters
    routing   the metadata log: read, assign, fill
    maintain  sweep, purge, collect; create, change and delete queues
    here      browse, attempts, stats; snapshots, audit; the store itself
"""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from penstock import limits
from penstock.errors import InvalidInput
from penstock.model import Attempt, AttemptEnd, Entry, Page, QueueStats, State, StoreStats
from penstock.store.codec.metadata import decode_heads, read_metadata
from penstock.store.codec.records import NO_LEASE
from penstock.store.contract import Health, LiveQueue, StoreDetails
from penstock.store.kv.claim import ClaimVerbs
from penstock.store.kv.move import ALL
from penstock.store.kv.queues import Counts
from penstock.store.kv.state import verb
from penstock.store.live import Item

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from penstock.errors import PenstockError
    from penstock.model import QueueSpec
    from penstock.store.check_report import AuditReport
    from penstock.store.codec.records import Ended, LeaseRecord
    from penstock.store.kv.queues import Queue
    from penstock.store.kv.snapshot import Pinned

# Buckets that one message is looked for in: others wait meanwhile.
MOST_BUCKETS: Final = 64
# Messages in flight, those that were published first, among which stats look for the oldest claim.
MOST_IN_FLIGHT: Final = 32
# Counters of a queue that its stats have under the same name.
_COUNTED: Final = [n for n in QueueStats.__struct_fields__ if n in Counts.__struct_fields__]


class KvStore(ClaimVerbs):
    """A store on a key-value engine."""

    # One writer: verbs of several threads would only wait for each other.
    parallel = False
    # Its verbs wait for no other machine, or have bounds of their own.
    patience_s: float | None = None

    # --- queues ----------------------------------------------------------------------------

    @verb
    def queues(self) -> list[LiveQueue]:
        """Return all queues, by name."""
        end = self.log.end
        return [
            LiveQueue(queue.spec, cover.filter_at(end), cover.draining, cover)
            for _, queue in sorted(self.by_name.items())
            for cover in (queue.coverage,)
        ]

    @verb
    def spec(self, queue_name: str) -> QueueSpec:
        """Return the settings of a queue."""
        return (self.by_name.get(queue_name) or self.queue(queue_name)).spec

    # --- looking ---------------------------------------------------------------------------

    @verb
    def browse(
        self,
        queue_name: str,
        state: State,
        *,
        limit: int,
        cursor: str | None,
        payloads: bool,
        now_ms: int,
        message_id: int | None = None,
    ) -> Page:
        """Read a page of messages in a state, or one message in whatever state it is."""
        queue = self.queue(queue_name)
        after = _parse_cursor(cursor, queue, state)
        self.catch_up(now_ms, ALL)
        found: Sequence[Item | Ended]
        following: bytes | None = None
        if message_id is None:
            found, following = self.page(queue, state, after, limit)
        else:
            state, found = self._find(queue, message_id, now_ms)
        if payloads and (fitting := _fitting(found)) < len(found):
            found, following = self.page(queue, state, after, fitting)
        bodies: list[bytes | None] = [None] * len(found)
        if payloads and found:
            bodies = self.payloads.get([row.message_id for row in found])
        leases = self._leases_of(found) if state is State.IN_FLIGHT else {}
        claims = self._first_claims(queue, found, leases)
        entries = [
            entry
            for row, body, claimed_ms in zip(found, bodies, claims, strict=True)
            if (entry := _entry(queue, state, row, body, leases, claimed_ms)) is not None
        ]
        self.settle_quarantine(now_ms)
        head = f"{state.value}:{queue.number:x}:"
        return Page(entries, None if following is None else head + following.hex())

    def _first_claims(
        self, queue: Queue, rows: Sequence[Item | Ended], leases: dict[bytes, LeaseRecord]
    ) -> Iterator[int | None]:
        yield from (row.first_claimed_ms for row in rows if not isinstance(row, Item))
        live = (row for row in rows if isinstance(row, Item))
        for name, same in groupby(live, attrgetter("lease")):
            lost_ms = None if name == NO_LEASE else 0
            claimed_at_ms = leases[name].claimed_at_ms if name in leases else lost_ms
            yield from self.history.first_claims(queue, list(same), claimed_at_ms)

    def _find(
        self, queue: Queue, message_id: int, now_ms: int
    ) -> tuple[State, Sequence[Item | Ended]]:
        """Look a message up, and say in which state it is."""
        if failed := self.history.find_failed(queue, [message_id]):
            return State.FAILED, failed
        if done := self.history.find_acked(queue, message_id):
            return State.DONE, done
        live = self.active.live(queue, [message_id], MOST_BUCKETS)
        if live and live[0].lease != NO_LEASE:
            return State.IN_FLIGHT, live
        delayed = bool(live) and live[0].visible_at_ms > now_ms
        return State.DELAYED if delayed else State.AVAILABLE, live

    @verb
    def attempts(self, queue_name: str, message_id: int, now_ms: int) -> list[Attempt]:
        """Return every attempt at a message, the running one last."""
        queue = self.queue(queue_name)
        self.catch_up(now_ms, ALL)
        found = self.history.attempts(queue, message_id)
        running = self.active.in_flight_by_message(queue, message_id)
        if running is not None:
            lease = self._leases_of([running]).get(running.lease)
            if lease is not None:
                found.append(
                    Attempt(
                        running.attempts,
                        lease.consumer,
                        lease.claimed_at_ms,
                        None,
                        AttemptEnd.RUNNING,
                    )
                )
        self.settle_quarantine(now_ms)
        return found

    @verb
    def queue_stats(self, queue_name: str, now_ms: int) -> QueueStats:
        """Return a queue's depths and totals."""
        queue = self.queue(queue_name)
        self.catch_up(now_ms, ALL)
        if queue.number in self.active.damage:
            raise self.active.damage[queue.number].anew()
        counts, since_ms, claimed_ms = queue.counts, None, None
        if counts.available:
            since_ms = self.active.oldest_ms(queue, now_ms)
        if counts.in_flight:
            flying, _ = self.active.page(queue, State.IN_FLIGHT, b"", MOST_IN_FLIGHT)
            times = [lease.claimed_at_ms for lease in self._leases_of(flying).values()]
            claimed_ms = min(times, default=None)
        self.settle_quarantine(now_ms)
        return QueueStats(
            queue=queue.name,
            oldest_age_ms=None if since_ms is None else max(0, now_ms - since_ms),
            oldest_in_flight_ms=None if claimed_ms is None else max(0, now_ms - claimed_ms),
            groups_ready=self.active.ready_groups(queue),
            **{name: getattr(counts, name) for name in _COUNTED},
        )

    @verb
    def store_stats(self) -> StoreStats:
        """Return what concerns the whole store."""
        return StoreStats(
            published_total=self.totals.published,
            duplicates_total=self.totals.duplicates,
            unrouted_total=self.totals.unrouted,
            quarantined_total=self.totals.quarantined,
            unreadable_total=self.unreadable,
            healed_total=self.active.healed,
            stale_receipts_total=self.stale_receipts,
        )

    def _leases_of(self, rows: Sequence[Item | Ended]) -> dict[bytes, LeaseRecord]:
        names = list({row.lease for row in rows if isinstance(row, Item)})
        # A verb that needs such a lease puts it aside.
        return self.leases.read(names, lambda *_: False)

    # --- reading in bulk ---------------------------------------------------------------------

    @verb
    def pin(
        self,
        now_ms: int,
        *,
        stats: bool = False,
        marks: bool = True,  # noqa: ARG002 - one process gives out all numbers, in order
    ) -> Pinned:
        """Make a snapshot for reading; ``stats``: with the stats of every queue."""
        # Loaded when it is wanted: programs that do not read in bulk need none of it.
        from penstock.store.kv.snapshot import Pinned  # noqa: PLC0415

        # The rows do not say whether a delay is over: due messages must have been moved.
        self.catch_up(now_ms, ALL)
        return Pinned(
            self.engine.view(),
            self.identity,
            at_ms=now_ms,
            log=self.log_stats(),
            totals=self.store_stats(),
            stats=[self.queue_stats(name, now_ms) for name in sorted(self.by_name)]
            if stats
            else [],
        )

    @verb
    def audit(self, *, repair: bool, now_ms: int) -> AuditReport:
        """Hold the store to its invariants."""
        # Loaded when it is wanted: it is as large as the rest of the store.
        from penstock.store.kv.check import audit  # noqa: PLC0415

        return audit(self, repair=repair, now_ms=now_ms)

    # --- the store -----------------------------------------------------------------------------

    def info(self) -> StoreDetails:
        """Return which store this is. Each snapshot keeps deleted data on disk."""
        identity = self.identity
        return StoreDetails(
            f"{identity.store_id:08x}",
            identity.design,
            identity.routing,
            limits.MAX_VIEWS,
            self.time_floor_ms(),
        )

    def health(self, *, disk: bool = False) -> Health:
        """Return whether the engine takes writes, and how much room its disk has."""
        engine = self.engine
        away = None if engine.away is None else str(engine.away)
        if not disk:
            return Health(away)
        return Health(away, engine.free_bytes(), used_bytes=engine.used_bytes())

    def recover(self, alone: AbstractContextManager[None]) -> None:
        """Make an engine that is away take writes again, or raise why it does not."""
        self.engine.recover(alone, self._read_anew)

    def _read_anew(self) -> None:
        self.load()
        # Nobody doubts any more what is there now.
        self.progress.commits += 1
        for queue in self.by_name.values():
            self.wake(queue)

    def limit(self, seconds: float) -> None:
        """Do nothing: its verbs wait for nobody."""

    def sync(self) -> None:
        """Make every commit so far durable."""
        self.engine.sync()

    def on_lost(self, told: Callable[[PenstockError], None]) -> None:
        """Call back if the engine is lost to this process."""
        self.engine.on_lost(told)

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()


def _entry(
    queue: Queue,
    state: State,
    row: Item | Ended,
    body: bytes | None,
    leases: dict[bytes, LeaseRecord],
    first_claimed_ms: int | None,
) -> Entry | None:
    metadata = read_metadata(row.metadata)
    if metadata is None:
        return None
    live, ended = (row, None) if isinstance(row, Item) else (None, row)
    lease = leases.get(live.lease) if live else None
    return Entry(
        message_id=row.message_id,
        queue=queue.name,
        state=state,
        payload=body,
        attributes=metadata.attributes,
        group=metadata.group,
        priority=metadata.priority,
        attempts=row.attempts,
        published_at_ms=metadata.published_at_ms,
        visible_at_ms=live.visible_at_ms if live else None,
        lease_deadline_ms=lease.expiry_ms if lease else None,
        consumer=lease.consumer if lease else None,
        ended_at_ms=ended.ended_at_ms if ended else None,
        reason=ended.reason if ended else "",
        size=metadata.size,
        first_claimed_ms=first_claimed_ms,
    )


def _fitting(found: Sequence[Item | Ended]) -> int:
    """Return how many messages, and at least one, have payloads that fit into a page."""
    size = 0
    for count, head in enumerate(decode_heads([row.metadata for row in found])):
        size += 0 if head is None else head.size
        if size > limits.MAX_PAGE_BYTES:
            return max(1, count)
    return len(found)


def _parse_cursor(cursor: str | None, queue: Queue, state: State) -> bytes:
    if cursor is None:
        return b""
    head = f"{state.value}:{queue.number:x}:"
    try:
        after = bytes.fromhex(cursor.removeprefix(head)) if cursor.startswith(head) else b""
    except ValueError:
        after = b""
    if len(after) < 4:
        raise InvalidInput(
            f"not a cursor of {state.value} messages of {queue.name}: {cursor[:80]!r}; "
            "pass a page's next_cursor"
        )
    return after
