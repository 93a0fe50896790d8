"""The contract: what every store does, whatever it is made of.

Verbs are batch first and are told ``now_ms``. A verb returns when its change is applied and
visible; the change is durable once ``sync`` was called after ``commits`` had reached its number.
The caller lets one thread at a time in, except for ``sync``. Arguments were checked by the
caller; ``penstock.testing.conformance`` is this page as a test suite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from penstock.model import (
        Assigned,
        Attempt,
        Backfilled,
        Contention,
        Cursor,
        Delivery,
        LogPage,
        LogRecord,
        LogStats,
        Message,
        Outcome,
        Page,
        QueueSpec,
        QueueStats,
        State,
        StoreStats,
        SweepCounts,
    )
    from penstock.store.codec.metadata import Metadata
    from penstock.store.kv.check import AuditReport
    from penstock.store.plans import (
        BackfillPlan,
        Collected,
        Filled,
        LiveFilters,
        RoutePlan,
        StoreInfo,
        Want,
    )
    from penstock.store.snapshot import PinnedStore

__all__ = ["FiltersChanged", "Store"]


class FiltersChanged(PenstockError):
    """Another process has changed queues that a verb counted on; nothing was changed.

    The broker looks again and tries again: nobody else sees this error.
    """


class Store(Protocol):
    """A store, as the broker uses it."""

    # --- queues
    def create_queue(self, spec: QueueSpec, now_ms: int) -> None:
        """Add a queue whose name is free."""

    def update_queue(self, spec: QueueSpec, now_ms: int, *, from_offset: int | None = None) -> None:
        """Change settings; name and ordering stay. A filter counts from an offset on."""

    def delete_queue(self, queue_name: str, now_ms: int) -> int:
        """Remove a queue with everything in it; return how many messages went."""

    def drain_queue(self, queue_name: str, now_ms: int) -> None:
        """Let no more messages in; the sweep removes the queue once nothing waits in it."""

    def draining(self, queue_name: str) -> bool:
        """Whether a queue takes no more messages and is about to go."""

    def live_filters(self) -> dict[str, str]:
        """Return the filters that new messages are routed by."""

    @property
    def filter_changes(self) -> int:
        """How often the live filters were found changed, by this process or by another one.

        A change that fails half way counts as well, if it has changed them.
        """

    def spec(self, queue_name: str) -> QueueSpec:
        """Return a queue's settings, or raise QueueNotFound, as every verb that names one."""

    def specs(self) -> list[QueueSpec]:
        """Return all queues' settings, by name."""

    # --- messages
    def publish(
        self,
        messages: Sequence[Message],
        routes: Sequence[Sequence[str]] | None,
        *,
        dedup_window_ms: int,
        now_ms: int,
    ) -> list[int]:
        """Store messages, each into the queues of its route; return their ids.

        Without routes (a store whose routing is ``pipeline``) they go into the log alone. With
        routes that were made by filters which no longer count, it raises FiltersChanged.
        """

    def claim(self, queue_name: str, wants: Sequence[Want], now_ms: int) -> list[list[Delivery]]:
        """Take messages for several claims at once, each under a new lease of its own."""

    def ack(self, receipts: Sequence[str], *, queue_name: str | None, now_ms: int) -> list[Outcome]:
        """Settle messages as done."""

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
        self, receipts: Sequence[str], *, lease_ms: int, queue_name: str | None, now_ms: int
    ) -> list[Outcome]:
        """Move the deadline of receipts."""

    def extend_lease(
        self, token: str, *, lease_ms: int, queue_name: str | None, now_ms: int
    ) -> list[Outcome]:
        """Move the deadline of everything held under a lease."""

    def held(self, token: str) -> dict[int, str]:
        """Return the receipts of what is held under a lease, by message id."""

    def queues_of(self, receipts: Sequence[str] | str) -> set[str]:
        """Name the queues of receipts, or of a lease token; those that are gone are left out."""

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

    def purge(
        self, queue_name: str, states: Iterable[State], now_ms: int, *, limit: int | None = None
    ) -> int:
        """Remove messages by state, up to a limit."""

    # --- the metadata log
    def routing(self) -> str:
        """Return how the store routes: ``inline`` or ``pipeline``."""

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

    def info(self) -> StoreInfo:
        """Say which store this is."""

    def route_plan(self, max_offsets: int | None) -> RoutePlan:
        """Say which stretches of the logs may be matched next."""

    def filters_at(self, offset: int) -> LiveFilters:
        """Return the filters that are live at an offset."""

    def backfill_plan(
        self, queue_name: str, begin: int, end: int, *, archived: bool = False
    ) -> BackfillPlan:
        """Return what of [begin, end) a queue has not been filled from by its filter.

        With ``archived`` also what the log has let go of, as far as coverage is known.
        """

    def fill(
        self,
        queue_name: str,
        begin: int,
        end: int,
        offsets: Sequence[int],
        filter_text: str,
        now_ms: int,
    ) -> Filled:
        """Do one bounded step of filling a queue with messages that were matched elsewhere."""

    def restore(
        self,
        queue_name: str,
        begin: int,
        end: int,
        records: Sequence[tuple[LogRecord, bytes | None]],
        filter_text: str,
        now_ms: int,
    ) -> Filled:
        """Do one bounded step of filling a queue with archived messages, below the log."""

    def collectable(self, message_ids: Sequence[int]) -> set[int]:
        """Return those messages that no queue can come to hold any more."""

    def drop_payloads(self, message_ids: Sequence[int], now_ms: int, *, dry_run: bool) -> Collected:
        """Delete payloads that nothing refers to."""

    def pin(self, now_ms: int, *, stats: bool = False, marks: bool = True) -> PinnedStore:
        """Pin the present state for reading in bulk; ``stats``: with the stats of every queue.

        No done or failed message that comes later has a lower sequence number than any that is
        there, so that who has read them may trim up to the highest. ``marks=False``: it may, which
        is cheaper where processes share a store.
        """

    @property
    def max_views(self) -> int:
        """How many states a server may have pinned at a time."""

    def trim(
        self,
        queue_name: str,
        state: State,
        before: int,
        now_ms: int,
        *,
        limit: int,
        created_at_ms: int | None = None,
    ) -> int:
        """Remove done or failed messages whose sequence number is below ``before``.

        None if the queue was not made at ``created_at_ms``.
        """

    def backfill(self, queue_name: str, begin: int, end: int, now_ms: int) -> Backfilled:
        """Do one bounded step of filling a queue from the log."""

    def offset_at(self, time_ms: int) -> int:
        """Return an offset at or before the first message of that time."""

    def configure_log(self, logs: int | None, retention_ms: int | None, now_ms: int) -> None:
        """Change the number of logs, or how long they are kept."""

    def log_stats(self) -> LogStats:
        """Describe the metadata log."""

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
    ) -> Page:
        """Read a page of messages in a state."""

    def attempts(self, queue_name: str, message_id: int, now_ms: int) -> list[Attempt]:
        """Return every attempt at a message."""

    def queue_stats(self, queue_name: str, now_ms: int) -> QueueStats:
        """Return a queue's depths and totals."""

    def store_stats(self) -> StoreStats:
        """Return what concerns the whole store."""

    def contention(self) -> Contention | None:
        """Say what sharing the store has cost, from memory; None: it has one owner."""

    @property
    def away(self) -> str | None:
        """Why the store does not answer at present, from memory alone and from any thread.

        It may still answer what needs no write.
        """

    def recover(self, alone: AbstractContextManager[None]) -> None:
        """Make a store that is away take writes again, or raise why it does not.

        Called by who does not have the store to himself; ``alone`` gives it to him. Changes that
        were not durable may be gone then. Nothing to do for a store that tries by itself.
        """

    def free_bytes(self) -> int | None:
        """Return how many bytes the store's disk has left, from any thread; None: not known."""

    @property
    def patience_s(self) -> float | None:
        """How long a verb waits for the store, and for its turn; None: as long as it takes."""

    def limit(self, seconds: float) -> None:
        """Let what is asked for from here on wait for so long in all, if it waits for anybody."""

    def available(self, queue_name: str) -> int | None:
        """Return how many messages of a queue are available, as last counted; None: it is gone."""

    def audit(self, *, repair: bool, now_ms: int) -> AuditReport:
        """Hold the store to its invariants; mend what can be mended if asked to."""

    # --- time and durability
    def sweep(self, now_ms: int, budget: int) -> SweepCounts:
        """Do what is due."""

    def soonest_ms(self) -> int | None:
        """Return a time before which nothing is due, from memory alone."""

    def time_floor_ms(self) -> int:
        """Return the latest time that the store has seen."""

    @property
    def commits(self) -> int:
        """How many commits were made."""

    def take_woken(self) -> set[str]:
        """Return the queues that may have got something to claim since the last call."""

    def sync(self) -> None:
        """Make every commit so far durable; from any thread."""

    def checkpoint(self, path: Path) -> None:
        """Copy the present state into a directory that is not there yet."""

    def on_lost(self, told: Callable[[PenstockError], None]) -> None:
        """Call back, from a thread of its own, if the store is lost to this process."""

    def close(self) -> None:
        """Sync and let go."""
