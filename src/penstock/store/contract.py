"""The contract: the verbs of every store, on whatever engine.

:class:`Store` has the life of a message, :class:`LogStore` the metadata log and routing,
:class:`BulkStore` the verbs that read or remove many messages; a broker works on all three
(:class:`FullStore`).

Verbs are batch first and get ``now_ms``. A verb returns when its change is applied and
visible; the change is durable once ``sync`` was called after ``progress.commits`` had reached its
number, or at once if the store is ``durable_on_commit``. The caller lets one thread at a time in,
except for ``sync``, ``health`` and ``recover``, and unless the store is ``parallel``. The caller
has checked the arguments. A verb that names a queue raises QueueNotFound if there is none.
``penstock.testing.conformance`` is this page as a test suite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock.errors import PenstockError
from penstock.model import QueueSpec, StoreInfo
from penstock.store.policy import Coverage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from penstock.model import (
        Assigned,
        Attempt,
        BackfillPlan,
        Collected,
        Cursor,
        LeaseRequest,
        LiveFilters,
        LogPage,
        LogRecord,
        LogStats,
        Outcome,
        Page,
        QueueStats,
        RoutePlan,
        State,
        StoreStats,
        SweepCounts,
    )
    from penstock.packing import PackedMessage
    from penstock.store.check_report import AuditReport
    from penstock.store.codec.claimed import ClaimedMessages
    from penstock.store.codec.metadata import Metadata
    from penstock.store.filling import Filled
    from penstock.store.snapshot import PinnedStore


class FiltersChanged(PenstockError):
    """Another process has changed queues that a verb counted on; nothing was changed.

    The broker looks again and tries again: nobody else sees this error.
    """


class Progress(msgspec.Struct):
    """Counters of a store in this process; they only grow.

    ``commits`` were made. ``filter_changes`` counts how often the live filters were found changed,
    by this process or by another one; a change that fails half way counts as well.
    """

    commits: int = 0
    filter_changes: int = 0


class LiveQueue(msgspec.Struct, frozen=True):
    """A queue: its settings, the filter that routes new messages (None: none), draining or not.

    ``coverage`` is the store's own: to be read, and only before the next verb.
    """

    spec: QueueSpec
    filter: str | None
    draining: bool
    coverage: Coverage


class StoreDetails(StoreInfo, frozen=True):
    """Which store this is; how many snapshots a server may hold; the latest time it has seen."""

    max_views: int
    time_floor_ms: int


class Contention(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of sharing a store with other processes, since this one opened it.

    ``collisions``: zones that somebody else came to between the look and the visit of a claim;
    ``collected``: pointers of empty zones that were removed; ``repeated``: transactions that the
    database had undone; ``reconnected``: those that were tried again because it did not answer;
    ``statements``: all that the database was asked.
    """

    collisions: int
    collected: int
    repeated: int
    reconnected: int
    statements: int


class Health(msgspec.Struct, frozen=True):
    """The state of a store, from any thread; all but the disk from memory.

    ``away``: why the store does not answer at present; it may still answer what needs no write.
    ``free_bytes``: room on its disk, if it was measured and is known; ``used_bytes``: what each of
    its tables takes there, as far as that is known. ``contention``: the cost of sharing the store
    with other processes; None: it has one owner.
    """

    away: str | None
    free_bytes: int | None = None
    contention: Contention | None = None
    used_bytes: dict[str, int] = {}


class Store(Protocol):
    """The life of a message, and of the store."""

    progress: Progress
    # Whether a commit is durable as soon as it was made: then nobody needs to call ``sync``.
    durable_on_commit: bool
    # Whether several threads may call verbs at once; ``limit`` counts for its thread alone then.
    parallel: bool
    # How long a verb waits for the store; None: as long as it takes.
    patience_s: float | None

    # --- queues
    def create_queue(self, spec: QueueSpec, now_ms: int) -> None:
        """Add a queue whose name is free."""

    def update_queue(self, spec: QueueSpec, now_ms: int, *, from_offset: int | None = None) -> None:
        """Change settings; name and ordering stay. A filter counts from an offset on."""

    def delete_queue(self, queue_name: str, now_ms: int, *, drain: bool = False) -> int:
        """Remove a queue with everything in it; return how many messages were removed.

        ``drain``: let no more messages in; the sweep removes the queue once nothing waits in it.
        """

    def queues(self) -> list[LiveQueue]:
        """Return all queues, by name."""

    def spec(self, queue_name: str) -> QueueSpec:
        """Return a queue's settings."""

    # --- messages
    def publish(
        self,
        messages: Sequence[PackedMessage],
        routes: Sequence[Sequence[str]] | None,
        *,
        dedup_window_ms: int,
        now_ms: int,
        routed_at: int | None = None,
    ) -> list[int]:
        """Store messages, each into the queues of its route; return their ids.

        Without routes (a store whose routing is ``pipeline``) they go into the log alone. With
        routes that were made by filters which no longer count, it raises FiltersChanged; a
        ``parallel`` store knows that by ``progress.filter_changes`` before they were made.
        """

    def claim(
        self, queue_name: str, wants: Sequence[LeaseRequest], now_ms: int
    ) -> list[ClaimedMessages]:
        """Take messages for several claims at once, each under a new lease of its own."""

    def ack(self, receipts: Sequence[str], *, queue_name: str | None, now_ms: int) -> list[Outcome]:
        """Settle messages as done."""

    def ack_late(
        self,
        receipts: Sequence[str],
        attempts: Sequence[int],
        *,
        queue_name: str,
        now_ms: int,
    ) -> list[Outcome]:
        """Settle messages as done that wait again, if nobody has claimed them since.

        ``attempts``: which attempt at its message each receipt was given for; it must be the last.
        That attempt becomes one that was acked now. On a FIFO queue every receipt is stale:
        messages behind it may be done.
        """

    def release(
        self,
        receipts: Sequence[str],
        *,
        delay_ms: int | None,
        reason: str,
        random: Callable[[], float],
        queue_name: str | None,
        now_ms: int,
        unseen: bool = False,
    ) -> list[Outcome]:
        """Give messages back to be tried again, or to fail.

        ``unseen``: as if they had not been claimed, at their old place and with no attempt more;
        delay and reason mean nothing then.
        """

    def extend(
        self, receipts: Sequence[str] | str, *, lease_ms: int, queue_name: str | None, now_ms: int
    ) -> list[Outcome]:
        """Move the deadline of receipts, or of everything held under a lease token."""

    def held(self, token: str) -> dict[int, str]:
        """Return the receipts of the messages held under a lease, by message id."""

    def queues_of(self, receipts: Sequence[str] | str) -> set[str]:
        """Name the queues of receipts, or of a lease token; deleted queues are left out."""

    def redrive(
        self,
        queue_name: str,
        *,
        message_ids: Sequence[int] | None,
        where: Callable[[Metadata], bool] | None,
        after: bytes,
        now_ms: int,
    ) -> tuple[int, bytes | None]:
        """Make failed messages available again, by ids or a page; say where the next begins."""

    def move(
        self,
        queue_name: str,
        to_name: str,
        *,
        state: State,
        message_ids: Sequence[int] | None,
        limit: int | None,
        now_ms: int,
    ) -> int:
        """Move failed, available or delayed messages into another queue."""

    # --- looking
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
        """Read a page of messages in a state.

        ``message_id``: read that message alone, in whatever state it is. State, limit and cursor
        mean nothing then. A done message is found by the attempt that acked it, and one that waits
        in a large queue of buckets only where messages of its age mostly are.
        """

    def attempts(self, queue_name: str, message_id: int, now_ms: int) -> list[Attempt]:
        """Return every attempt at a message."""

    def queue_stats(self, queue_name: str, now_ms: int) -> QueueStats:
        """Return a queue's depths and totals."""

    def store_stats(self) -> StoreStats:
        """Return the totals of the whole store."""

    # --- time
    def sweep(self, now_ms: int, budget: int) -> SweepCounts:
        """Do what is due."""

    def soonest_ms(self) -> int | None:
        """Return a time before which nothing is due, from memory alone."""

    def take_woken(self) -> dict[str, int | None]:
        """Return the queues that may have got something to claim since the last call.

        With each, about how many messages are available; None: the queue is gone.
        """

    # --- the store
    def info(self) -> StoreDetails:
        """Return which store this is."""

    def health(self, *, disk: bool = False) -> Health:
        """Return whether the store answers, the cost of sharing it, and (``disk``) the room."""

    def recover(self, alone: AbstractContextManager[None]) -> None:
        """Make a store that is away take writes again, or raise why it does not.

        The caller does not hold the store; entering ``alone`` gives it to this verb alone. Changes
        that were not durable may be gone then. A store that tries by itself does nothing.
        """

    def limit(self, seconds: float) -> None:
        """Bound how long the statements of the coming verb may wait in all."""

    def sync(self) -> None:
        """Make every commit so far durable; from any thread."""

    def on_lost(self, told: Callable[[PenstockError], None]) -> None:
        """Call back, from a thread of its own, if the store is lost to this process."""

    def close(self) -> None:
        """Sync and let go."""


class LogStore(Protocol):
    """The metadata log: reading, routing, filling queues from the past."""

    def read_log(self, log: int, begin: int | None, limit: int) -> LogPage:
        """Read a page of a log from an offset, or from its cursor, on."""

    def assign(
        self,
        log: int,
        cursor: Cursor,
        assignments: Mapping[int, Sequence[str]],
        now_ms: int,
        *,
        epoch: int | None = None,
    ) -> Assigned:
        """Put a page's messages into queues and move the log's cursor, together."""

    def take_epoch(self, now_ms: int) -> int:
        """Fence every pipeline that took an epoch before; return the new one."""

    def route_plan(self, max_offsets: int | None) -> RoutePlan:
        """Return which stretches of the logs may be matched next."""

    def filters_at(self, offset: int) -> LiveFilters:
        """Return the filters that are live at an offset."""

    def backfill_plan(
        self, queue_name: str, begin: int, end: int, *, archived: bool = False
    ) -> BackfillPlan:
        """Return what of [begin, end) a queue has not been filled from by its filter.

        With ``archived`` also what lies below the log, as far as coverage is known.
        """

    def fill(
        self,
        queue_name: str,
        begin: int,
        end: int,
        now_ms: int,
        *,
        filter_text: str | None = None,
        offsets: Sequence[int] | None = None,
        records: Sequence[tuple[LogRecord, bytes | None]] | None = None,
    ) -> Filled:
        """Do one bounded step of filling a queue from [begin, end).

        ``offsets`` are all messages of it in the log that ``filter_text`` has matched elsewhere;
        ``records`` are all such messages below the log, from an archive, with their payloads.
        Without either the store matches the log itself.
        """

    def offset_at(self, time_ms: int) -> int:
        """Return an offset at or before the first message of that time."""

    def configure_log(
        self, logs: int | None, retention_ms: int | None, now_ms: int, *, routing: str | None = None
    ) -> None:
        """Change the number of logs, how long they are kept, or who routes from here on.

        A switch of the routing fences every pipeline. One to ``inline`` routes the last messages
        itself; it is refused if there are too many of them. It counts as a change of the filters.
        """

    def log_stats(self) -> LogStats:
        """Describe the metadata log."""


class BulkStore(Protocol):
    """Verbs that read, check or remove many messages."""

    def pin(self, now_ms: int, *, stats: bool = False, marks: bool = True) -> PinnedStore:
        """Make a snapshot for reading in bulk; ``stats``: with the stats of every queue.

        Done and failed messages that come later have higher sequence numbers than those in the
        snapshot, so that its reader may trim up to the highest. ``marks=False``: they may have
        lower ones, which is cheaper where processes share a store.
        """

    def purge(
        self,
        queue_name: str,
        states: Iterable[State],
        now_ms: int,
        *,
        limit: int | None = None,
        before: int | None = None,
        created_at_ms: int | None = None,
        message_ids: Sequence[int] | None = None,
    ) -> int:
        """Remove messages by state, up to a limit; return how many.

        ``before``: only done or failed messages whose sequence number is below it, and none if the
        queue was not made at ``created_at_ms``. ``message_ids``: only those, which have failed.
        """

    def collect(self, message_ids: Sequence[int], now_ms: int, *, dry_run: bool) -> Collected:
        """Delete payloads that no queue holds and the log has let go of."""

    def audit(self, *, repair: bool, now_ms: int) -> AuditReport:
        """Hold the store to its invariants; repair what can be repaired if asked to."""


class FullStore(Store, LogStore, BulkStore, Protocol):
    """Everything that a broker uses."""
