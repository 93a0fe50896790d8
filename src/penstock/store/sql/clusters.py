"""Several databases as one store, each a cluster in QuiCK's sense.

A message belongs wholly to one of them, which a token of its group names: the payload, its place
in every queue, its row of the log and its dedup id are in one database and change in one
transaction. Its id says which: database k numbers its messages from ``k << 48`` on. All have the
same store id and the same numbers for queues, so that what is claimed from several of them is
under one lease, and the message id in a receipt says where to go.

What each verb promises holds within a database. Between them: a publish of messages that go to
several may be stored in part (it says so), order and dedup ids are those of groups that share a
database, and what is read in bulk is of one moment for each of them. Queues: see ``agreeing``.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from penstock.errors import InvalidInput, PenstockError, QueueNotFound, StorageFailed
from penstock.limits import MAX_DATABASE_VIEWS, MAX_LOGS, MAX_PAGE_BYTES
from penstock.model import Page, SweepCounts
from penstock.store.plans import Collected, StoreInfo
from penstock.store.sql import joining
from penstock.store.sql.agreeing import Agreement
from penstock.store.sql.logs_together import Logs
from penstock.store.sql.pinned_together import pin_together
from penstock.store.sql.spreading import Spreading
from penstock.store.sql.tokens import cluster_of_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import Any, NoReturn

    from penstock.model import (
        Attempt,
        Contention,
        QueueSpec,
        QueueStats,
        State,
        StoreStats,
    )
    from penstock.store.codec.metadata import Metadata
    from penstock.store.kv.check import AuditReport
    from penstock.store.sql.members import Member
    from penstock.store.sql.pinned_together import PinnedTogether

__all__ = ["ClusterStore"]

T = TypeVar("T")


class ClusterStore:
    """A store on several databases."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = list(members)
        self._truth = self.members[0]
        self._agreement = Agreement(self.members)
        self._sweeps = 0
        spreading = Spreading(self.members, self._agreement, self.live_filters)
        self.publish = spreading.publish
        self.claim = spreading.claim
        self.ack = spreading.ack
        self.release = spreading.release
        self.extend = spreading.extend
        self.extend_lease = spreading.extend_lease
        self.held = spreading.held
        self._welcome = spreading.welcome
        logs = Logs(self.members, self._agreement)
        self.read_log = logs.read_log
        self.filters_at = logs.filters_at
        self.offsets_at = logs.offsets_at
        self.log_stats = logs.log_stats
        self.backfill = logs.backfill
        self.backfill_plan = logs.backfill_plan
        self.fill = logs.fill
        self.restore = logs.restore

    def begin(self, now_ms: int) -> None:
        """Bring the databases into line: somebody may have died over a change."""
        for member in self.members[1:]:
            self._agreement.settle(member, now_ms)

    # --- whom to ask -------------------------------------------------------------------------

    def _all(self, ask: Callable[[Any], T]) -> list[T]:
        """Ask every database; one that is away fails it."""
        for member in self.members:
            member.check()
        answers = []
        for member in self.members:
            with member.use() as store:
                answers.append(ask(store))
        return answers

    def _holders(self, queue_name: str, now_ms: int) -> list[Member]:
        """Return the databases that have a queue: a drained one may be gone from some."""
        for member in self.members:
            member.check()
        with self._truth.use() as truth:
            truth.core.refresh(now_ms)
            truth.core.queue(queue_name)
        self._agreement.check(now_ms)
        return [member for member in self.members if queue_name in member.core.queues]

    def _member_of(self, message_id: int) -> Member:
        """Return the database of a message; the first one knows as little of others as any."""
        number = cluster_of_id(message_id)
        return self.members[number if number < len(self.members) else 0]

    def _by_member(self, message_ids: Sequence[int]) -> dict[Member, list[int]]:
        found: dict[Member, list[int]] = {}
        for message_id in message_ids:
            found.setdefault(self._member_of(message_id), []).append(message_id)
        return found

    # --- queues ----------------------------------------------------------------------------

    def create_queue(self, spec: QueueSpec, now_ms: int) -> None:
        """Add a queue whose name is free."""
        with self._truth.use() as truth:
            truth.create_queue(spec, now_ms)
        self._spread(now_ms)

    def update_queue(self, spec: QueueSpec, now_ms: int, *, from_offset: int | None = None) -> None:
        """Change settings; another filter counts from here on."""
        if from_offset is not None:
            self._refuse("a filter that counts from an offset on")
        with self._truth.use() as truth:
            truth.update_queue(spec, now_ms)
        self._spread(now_ms)

    def delete_queue(self, queue_name: str, now_ms: int) -> int:
        """Remove a queue with everything in it; say how many messages went."""
        with self._truth.use() as truth:
            removed = truth.delete_queue(queue_name, now_ms)
        return removed + self._spread(now_ms)

    def drain_queue(self, queue_name: str, now_ms: int) -> None:
        """Let no more messages in; the sweep removes the queue once nothing waits anywhere."""
        with self._truth.use() as truth:
            truth.drain_queue(queue_name, now_ms)
        self._spread(now_ms)
        with self._truth.use() as truth:
            truth.remove_drained(now_ms)

    def _spread(self, now_ms: int) -> int:
        """Have the other databases follow; one that is away does when it is back."""
        removed = 0
        for member in self.members[1:]:
            try:
                removed += self._agreement.settle(member, now_ms)
            except StorageFailed:
                if member.up:
                    raise
        return removed

    def draining(self, queue_name: str) -> bool:
        """Whether a queue takes no more messages and is about to go."""
        return self._truth.queue(queue_name).coverage.draining

    def live_filters(self) -> dict[str, str]:
        """Return the filters that new messages are routed by, as last known if need be."""
        try:
            with self._truth.use() as truth:
                return truth.live_filters()
        except StorageFailed:
            return self._truth.core.live_filters()

    @property
    def filter_changes(self) -> int:
        """How often the live filters were found changed, by whichever process."""
        return sum(member.core.live_changes for member in self.members)

    def spec(self, queue_name: str) -> QueueSpec:
        """Return the settings of a queue."""
        return self._truth.queue(queue_name).spec

    def queues_of(self, receipts: Sequence[str] | str) -> set[str]:
        """Name the queues of receipts; known ones also while the database is away."""
        return self._truth.store.queues_of(receipts)

    def specs(self) -> list[QueueSpec]:
        """Return the settings of every queue, by name."""
        with self._truth.use() as truth:
            return truth.specs()

    # --- messages ----------------------------------------------------------------------------

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
        holders = self._holders(queue_name, now_ms)
        if message_ids is not None:
            redriven = 0
            for member, ids in self._by_member(message_ids).items():
                if member in holders:
                    with member.use() as store:
                        redriven += store.redrive(
                            queue_name, message_ids=ids, where=where, after=b"", now_ms=now_ms
                        )[0]
            return redriven, None
        number = after[0] if after else 0
        redriven, further = 0, None
        if self.members[number] in holders:
            with self.members[number].use() as store:
                redriven, further = store.redrive(
                    queue_name, message_ids=None, where=where, after=after[1:], now_ms=now_ms
                )
        if further is not None:
            return redriven, bytes([number]) + further
        return redriven, bytes([number + 1]) if number + 1 < len(self.members) else None

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
        """Move messages into another queue; they stay in their database."""
        by_member = None if message_ids is None else self._by_member(message_ids)
        moved = 0
        for member in self._holders(queue_name, now_ms):
            left = None if limit is None else limit - moved
            ids = None if by_member is None else by_member.get(member, [])
            if left != 0:
                with member.use() as store:
                    moved += store.move(
                        queue_name, to_name, state=state, message_ids=ids, limit=left,
                        now_ms=now_ms,
                    )  # fmt: skip
        return moved

    def purge(
        self, queue_name: str, states: Iterable[State], now_ms: int, *, limit: int | None = None
    ) -> int:
        """Remove messages by state, up to a limit."""
        wanted, removed = list(states), 0
        for member in self._holders(queue_name, now_ms):
            left = None if limit is None else limit - removed
            if left != 0:
                with member.use() as store:
                    removed += store.purge(queue_name, wanted, now_ms, limit=left)
        return removed

    def collectable(self, message_ids: Sequence[int]) -> set[int]:
        """Return those messages that no queue can come to hold any more."""
        found: set[int] = set()
        for member, ids in self._by_member(message_ids).items():
            with member.use() as store:
                found |= store.collectable(ids)
        return found

    def drop_payloads(self, message_ids: Sequence[int], now_ms: int, *, dry_run: bool) -> Collected:
        """Delete payloads that nothing refers to."""
        messages = size = 0
        for member, ids in self._by_member(message_ids).items():
            with member.use() as store:
                one = store.drop_payloads(ids, now_ms, dry_run=dry_run)
            messages, size = messages + one.freed_messages, size + one.freed_bytes
        return Collected(messages, size)

    # --- the metadata log ----------------------------------------------------------------------

    def routing(self) -> str:
        """Return how the store routes: inline."""
        return self._truth.store.routing()

    def contention(self) -> Contention:
        """Say what sharing the databases has cost this process."""
        return joining.join_contention([member.store.contention() for member in self.members])

    @property
    def away(self) -> str | None:
        """Why nothing can be done: none of the databases answers."""
        if any(member.up for member in self.members):
            return None
        return f"none of the {len(self.members)} databases answers"

    @property
    def patience_s(self) -> float:
        """How long a verb waits for a database, and for others of this process."""
        return max(member.store.patience_s for member in self.members)

    def limit(self, seconds: float) -> None:
        """Let what is asked for from here on wait for each database for so long."""
        for member in self.members:
            member.store.limit(seconds)

    def recover(self, alone: AbstractContextManager[None]) -> None:
        """Do nothing: every verb tries to connect."""

    def free_bytes(self) -> None:
        """Return None: the disk is the database's."""

    def info(self) -> StoreInfo:
        """Say which store this is."""
        return self._truth.store.info()

    def configure_log(self, logs: int | None, retention_ms: int | None, now_ms: int) -> None:
        """Change the number of logs, of which each database has the same, or how long they last."""
        count = len(self.members)
        if logs is not None and (logs % count or logs > MAX_LOGS):
            raise InvalidInput(
                f"logs {logs}: they are spread over {count} databases, so that it must be a "
                f"multiple of {count}, up to {MAX_LOGS}"
            )
        with self._truth.use() as truth:
            truth.configure_log(None if logs is None else logs // count, retention_ms, now_ms)
        self._spread(now_ms)

    def _refuse(self, what: str) -> NoReturn:
        raise InvalidInput(f"{what} is not there for a store of {len(self.members)} databases")

    def assign(self, *_: object, **__: object) -> NoReturn:
        """Refuse: several databases route inline."""
        self._refuse("routing by a pipeline")

    take_epoch = route_plan = assign

    # --- reading in bulk -----------------------------------------------------------------------

    def pin(self, now_ms: int, *, stats: bool = False, marks: bool = True) -> PinnedTogether:
        """Pin every database for reading in bulk, one after the other."""
        self._welcome(now_ms)
        self._agreement.check(now_ms)
        return pin_together(
            self.members,
            now_ms,
            stats=stats,
            marks=marks,
            settle=lambda member: self._agreement.settle(member, now_ms),
        )

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
        """Remove done or failed messages whose sequence number is below ``before``, up to a limit.

        What was read from a pinned state may be: see ``pinned_together``.
        """
        removed = 0
        for member in self._holders(queue_name, now_ms):
            if removed < limit:
                with member.use() as store:
                    removed += store.trim(
                        queue_name, state, before, now_ms, limit=limit - removed,
                        created_at_ms=created_at_ms,
                    )  # fmt: skip
        return removed

    @property
    def max_views(self) -> int:
        """How many states a server may have pinned at a time."""
        # Each is a connection to every database, and some may be on one server.
        servers = Counter(member.core.database.server for member in self.members)
        return max(1, MAX_DATABASE_VIEWS // max(servers.values()))

    # --- looking -------------------------------------------------------------------------------

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
        """Read a page of messages in a state, from one database after the other."""
        holders = self._holders(queue_name, now_ms)
        number, inner = _parse_cursor(cursor, len(self.members))
        entries: list[Any] = []
        size = 0
        for member in self.members[number:]:
            if len(entries) == limit or size > MAX_PAGE_BYTES // 2:
                return Page(entries, f"{member.number}/")
            if member not in holders:
                continue
            with member.use() as store:
                page = store.browse(
                    queue_name, state, limit=limit - len(entries), cursor=inner,
                    payloads=payloads, now_ms=now_ms,
                )  # fmt: skip
            inner = None
            entries += page
            size += sum(len(entry.payload or b"") for entry in page)
            if page.next_cursor is not None:
                return Page(entries, f"{member.number}/{page.next_cursor}")
        return Page(entries, None)

    def attempts(self, queue_name: str, message_id: int, now_ms: int) -> list[Attempt]:
        """Return every attempt at a message."""
        self._truth.queue(queue_name)
        with self._member_of(message_id).use() as store:
            try:
                return store.attempts(queue_name, message_id, now_ms)
            except QueueNotFound:
                return []

    def queue_stats(self, queue_name: str, now_ms: int) -> QueueStats:
        """Return a queue's depths and totals, of all databases."""
        parts = []
        for member in self._holders(queue_name, now_ms):
            with member.use() as store:
                parts.append(store.queue_stats(queue_name, now_ms))
        return joining.join_queue_stats(parts)

    def store_stats(self) -> StoreStats:
        """Return what concerns the whole store."""
        return joining.join_store_stats(self._all(lambda store: store.store_stats()))

    def available(self, queue_name: str) -> int | None:
        """Return about how much a queue has got since it was last asked; None: it is gone."""
        if self._truth.store.available(queue_name) is None:
            return None
        return sum(member.store.available(queue_name) or 0 for member in self.members)

    def audit(self, *, repair: bool, now_ms: int) -> AuditReport:
        """Hold every database to its invariants."""
        reports = self._all(lambda store: store.audit(repair=repair, now_ms=now_ms))
        names = [member.name for member in self.members]
        return joining.join_audits(dict(zip(names, reports, strict=True)))

    # --- time and durability ---------------------------------------------------------------

    def sweep(self, now_ms: int, budget: int) -> SweepCounts:
        """Do what is due, in each database in turn; those that are away are left out."""
        self._welcome(now_ms)
        parts = [SweepCounts()]
        self._sweeps += 1
        for step in range(len(self.members)):
            member = self.members[(self._sweeps + step) % len(self.members)]
            left = budget - sum(part.total for part in parts)
            if left <= 0:
                parts.append(SweepCounts(next_due_ms=now_ms))
                continue
            try:
                with member.use() as store:
                    parts.append(store.sweep(now_ms, left))
            except StorageFailed:
                if member.up:
                    raise
        try:
            self._agreement.check(now_ms)
            if self._truth.up:
                # What the others have just removed need not be kept here any longer.
                with self._truth.use() as truth:
                    parts.append(SweepCounts(removed=truth.remove_drained(now_ms)))
        except StorageFailed:
            if all(member.up for member in self.members):
                raise
        return joining.join_sweeps(parts)

    def soonest_ms(self) -> int | None:
        """Return a time before which nothing is due, from memory alone."""
        return joining.soonest([member.store.soonest_ms() for member in self.members if member.up])

    def time_floor_ms(self) -> int:
        """Return the latest time that any database has seen."""
        floors: list[int] = self._all(lambda store: store.time_floor_ms())
        return max(floors)

    def server_ms(self) -> int:
        """Return what time the first database's server has."""
        return self._truth.store.server_ms()

    def follow(self, look: Callable[[], None]) -> None:
        """Have something called about every minute: a clock looks at the first database's."""
        self._truth.store.follow(look)

    @property
    def commits(self) -> int:
        """How many commits were made; each is durable when it has been made."""
        return sum(member.store.commits for member in self.members)

    def take_woken(self) -> set[str]:
        """Return the queues that may have got something to claim since the last call."""
        return set().union(*(member.store.take_woken() for member in self.members))

    def set_ring_size(self, ring_size: int, now_ms: int) -> None:
        """Give zones that come from here on a token of another ring, in every database."""
        self._all(lambda store: store.set_ring_size(ring_size, now_ms))

    def sync(self) -> None:
        """Do nothing: a commit is durable when its database has answered it."""

    def checkpoint(self, path: Path) -> None:
        """Refuse: databases have their own ways to be backed up."""
        self._truth.store.checkpoint(path)

    def on_lost(self, told: Callable[[PenstockError], None]) -> None:
        """Do nothing: a database is never lost to one process alone."""

    def close(self) -> None:
        """Let go of the connections."""
        for member in self.members:
            member.close()


def _parse_cursor(cursor: str | None, clusters: int) -> tuple[int, str | None]:
    """Return the database that a page begins in, and its own cursor."""
    if cursor is None:
        return 0, None
    number, slash, inner = cursor.partition("/")
    if not (slash and len(number) < 4 and number.isascii() and number.isdigit()):
        raise InvalidInput(f"not a cursor: {cursor[:80]!r}; pass a page's next_cursor")
    if int(number) >= clusters:
        raise InvalidInput(f"not a cursor of {clusters} databases: {cursor[:80]!r}")
    return int(number), inner or None
