"""Verbs of a broker beside those of messages: verbs that only look, of the log, and for a server.

Readers beside a store's owner have the verbs that only look. Tailers, backfills, pipelines and bulk
readers use the verbs of the log.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from penstock import limits
from penstock.errors import InvalidInput
from penstock.filters import Matcher, parse
from penstock.model import Backfilled, BackfillPlan, Collected, State, StoreInfo
from penstock.validation import (
    check_archived,
    check_assignments,
    check_count,
    check_ids,
    check_optional,
    check_receipts,
    check_routing,
    check_state,
    check_text,
    cut_text,
)

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from threading import Lock, local

    from penstock.broker.durability import Durability, OnDurable
    from penstock.broker.requests import Check, Joint, RequestRunner
    from penstock.broker.router import Router
    from penstock.broker.runner import OnWoken, Outage, Runner
    from penstock.clock import Clock
    from penstock.errors import PenstockError
    from penstock.filters import RowTuple
    from penstock.histogram import Histogram
    from penstock.model import (
        Assigned,
        Attempt,
        Cursor,
        LiveFilters,
        LogPage,
        LogRecord,
        LogStats,
        MessageExplanation,
        Outcome,
        Page,
        QueueSpec,
        QueueStats,
        RoutePlan,
        StoreStats,
    )
    from penstock.store.contract import Contention, FullStore
    from penstock.store.filling import Filled
    from penstock.store.snapshot import PinnedStore

T = TypeVar("T")


class StoreReader(ABC):
    """The verbs that only look: the base of :class:`~penstock.Broker` and of readers."""

    _store: FullStore

    @abstractmethod
    def _look(self, read: Callable[[int], T]) -> T:
        """Read, told the time, while nobody else is let in."""

    def queues(self) -> list[QueueSpec]:
        """Return the specs of all queues, by name."""
        return self._look(lambda _: [queue.spec for queue in self._store.queues()])

    def queue(self, name: str) -> QueueSpec:
        """Return the spec of a queue."""
        return self._look(lambda _: self._store.spec(name))

    def browse(
        self,
        queue: str,
        *,
        state: State | str = State.AVAILABLE,
        limit: int = 100,
        cursor: str | None = None,
        payloads: bool = True,
        message_id: int | None = None,
    ) -> Page:
        """Look at messages without leasing them; go on with ``cursor=page.next_cursor``.

        With ``message_id`` the page has that message alone, in whatever state it is, if the queue
        has it.
        """
        check_count(limit, "limit", 1, limits.MAX_BROWSE_LIMIT)
        checked = check_state(state)
        if cursor is not None:
            check_text(cursor, "cursor", limits.MAX_CURSOR_BYTES)
        if message_id is not None:
            check_ids([message_id])
        return self._look(
            lambda now_ms: self._store.browse(
                queue,
                checked,
                limit=limit,
                cursor=cursor,
                payloads=payloads,
                now_ms=now_ms,
                message_id=message_id,
            )
        )

    def attempts(self, queue: str, message_id: int) -> list[Attempt]:
        """Return every attempt at a message of a queue, the running one last."""
        check_ids([message_id])
        return self._look(lambda now_ms: self._store.attempts(queue, message_id, now_ms))

    def explain(self, queue: str, message_id: int) -> MessageExplanation:
        """Explain why a message is, or is not, in a queue, and say where it is."""
        # Loaded when used: most programs never ask.
        from penstock.broker.explain import explain_message  # noqa: PLC0415

        check_ids([message_id])
        return explain_message(self._look, self._store, self._takers, queue, message_id)

    def _takers(self, row: RowTuple) -> list[str]:
        """Return the queues whose filters would take a message now."""
        live = self._look(lambda _: self._store.queues())
        filters = {each.spec.name: parse(each.filter) for each in live if each.filter is not None}
        return Matcher(filters).match([row])[0]

    def stats(self, queue: str) -> QueueStats:
        """Return a queue's depth by state, oldest age and totals."""
        return self._look(lambda now_ms: self._store.queue_stats(queue, now_ms))

    def store_stats(self) -> StoreStats:
        """Return the totals of the whole store."""
        return self._look(lambda _: self._store.store_stats())

    def read_log(self, log: int = 0, *, begin: int | None = None, limit: int = 1_000) -> LogPage:
        """Read a page of a metadata log, from an offset or (None) from the log's cursor on."""
        check_count(log, "log", 0, limits.MAX_LOGS)
        check_count(limit, "limit", 1, limits.MAX_LOG_LIMIT)
        check_optional(begin, "begin", 0, limits.MAX_OFFSET)
        return self._look(lambda _: self._store.read_log(log, begin, limit))

    def log_stats(self) -> LogStats:
        """Describe the metadata log: offsets, logs, cursors, retention."""
        return self._look(lambda _: self._store.log_stats())


class RoutedBatch(NamedTuple):
    """A stretch of a log that was assigned: when, which, and what came of it."""

    at_ms: int
    log: int
    cursor: Cursor
    assigned: Assigned


class BrokerBase(StoreReader):
    """Verbs of the log, and verbs for a server: the base of :class:`~penstock.Broker`."""

    _clock: Clock
    _router: Router
    _runner: Runner
    # Of each thread: when its claims wait no longer.
    _waits: local
    # Held by a restore, and by a collection.
    _restoring: Lock
    # The last batches that a pipeline has assigned through this broker, the newest first.
    routed_batches: deque[RoutedBatch]

    def _look(self, read: Callable[[int], T]) -> T:
        return self._runner.apply(read, durable=False)

    def assign(
        self,
        log: int,
        cursor: Cursor,
        assignments: Mapping[int, Sequence[str]],
        *,
        epoch: int | None = None,
    ) -> Assigned:
        """Put the messages of a page into queues: message id to queue names.

        ``cursor`` is the page's. What has been assigned before is left alone, and the answer
        says so. ``epoch`` is what :meth:`take_epoch` gave.
        """
        check_count(log, "log", 0, limits.MAX_LOGS)
        check_assignments(cursor, assignments)

        def change(now_ms: int) -> Assigned:
            done = self._store.assign(log, cursor, assignments, now_ms, epoch=epoch)
            self.routed_batches.appendleft(RoutedBatch(now_ms, log, cursor, done))
            return done

        return self._runner.apply(change)

    def take_epoch(self) -> int:
        """Fence every pipeline that took an epoch before; name the new one in ``assign``."""
        return self._runner.apply(self._store.take_epoch)

    def backfill(
        self,
        queue: str,
        *,
        from_: int | datetime | Literal["earliest"] = "earliest",
        to: int | datetime | None = None,
        progress: Callable[[Backfilled, int], None] | None = None,
    ) -> Backfilled:
        """Fill a queue from the retained log: what its filter wants and it has not had.

        ``from_`` and ``to`` are offsets or times; by default everything that is kept. It goes in
        steps, each durable: ``progress`` is called after each with the sums so far and the
        offset to reach, and a backfill that was interrupted goes on where it stopped.
        """
        self.queue(queue)
        log = self.log_stats()
        begin, end = self._bounds(from_, to)
        begin, end = max(begin, log.earliest), min(end, log.routed_up_to)
        total = Backfilled(scanned=0, added=0, missing=0, next=begin)
        while total.next < end:
            step = self._runner.apply_step(partial(self._store.fill, queue, total.next, end))
            total = Backfilled(
                scanned=total.scanned + step.added + step.already + step.missing,
                added=total.added + step.added,
                missing=total.missing + step.missing,
                next=step.next,
            )
            if progress is not None:
                progress(total, end)
        return total

    def _bounds(self, from_: int | datetime | str, to: int | datetime | None) -> tuple[int, int]:
        begin = 0 if from_ == "earliest" else self.offset_at(from_, "from_")
        return begin, limits.MAX_OFFSET if to is None else self.offset_at(to, "to")

    def offset_at(self, place: int | datetime | str, name: str = "place") -> int:
        """Return the offset of a place: itself, or one not after the first message of a time."""
        if isinstance(place, datetime):
            time_ms = round(place.timestamp() * 1000)
            return self._look(lambda _: self._store.offset_at(time_ms))
        if isinstance(place, str):
            allowed = "an offset, a datetime or 'earliest'"
            raise InvalidInput(f"{name} is {allowed}, not {place!r:.100}")
        return check_count(place, name, 0, limits.MAX_OFFSET)

    def configure_log(
        self,
        *,
        logs: int | None = None,
        retention_ms: int | None = None,
        routing: Literal["inline", "pipeline"] | None = None,
    ) -> LogStats:
        """Change the number of metadata logs, how long they are kept (0: for ever), or routing."""
        check_optional(logs, "logs", 1, limits.MAX_LOGS)
        check_optional(retention_ms, "retention_ms")
        check_routing(routing)
        self._runner.apply(partial(self._store.configure_log, logs, retention_ms, routing=routing))
        return self.log_stats()

    # --- for a pipeline --------------------------------------------------------------------

    def info(self) -> StoreInfo:
        """Return which store this is: id, design, routing."""
        found = self._look(lambda _: self._store.info())
        return StoreInfo(found.store_id, found.design, found.routing)

    def view(self, *, stats: bool = False, marks: bool = True) -> PinnedStore:
        """Make a snapshot, to be read in bulk while others go on; close it soon.

        Only making it holds the broker up. ``stats`` adds the stats of every queue. A reader of
        done and failed messages may trim up to the highest sequence number that it has read:
        nothing comes below it later. A reader that does not says ``marks=False``, which is cheaper.
        """
        return self._look(lambda now_ms: self._store.pin(now_ms, stats=stats, marks=marks))

    @property
    def max_views(self) -> int:
        """How many snapshots a server may hold at a time."""
        return self._store.info().max_views

    def route_plan(self, *, max_offsets: int | None = None) -> RoutePlan:
        """Say which stretches of the logs a router may match next, and by whose epoch."""
        check_optional(max_offsets, "max_offsets", 1, limits.MAX_OFFSET)
        return self._look(lambda _: self._store.route_plan(max_offsets))

    def filters_at(self, offset: int) -> LiveFilters:
        """Return the filters that are live at an offset of the log, and until where."""
        check_count(offset, "offset", 0, limits.MAX_OFFSET)
        return self._look(lambda _: self._store.filters_at(offset))

    def backfill_plan(
        self,
        queue: str,
        *,
        from_: int | datetime | Literal["earliest"] = "earliest",
        to: int | datetime | None = None,
        archived: bool = False,
    ) -> BackfillPlan:
        """Return the stretches of the log that a backfill of a queue has still to do.

        With ``archived`` also those below the log, which an archive may hold.
        """
        begin, end = self._bounds(from_, to)
        return self._look(lambda _: self._store.backfill_plan(queue, begin, end, archived=archived))

    def fill(
        self,
        queue: str,
        begin: int,
        end: int,
        offsets: Sequence[int],
        *,
        filter: str | None = None,  # noqa: A002 - the word that users know
    ) -> Filled:
        """Fill a queue from [begin, end) of the log with messages that were matched elsewhere.

        ``offsets`` are all of them that the queue's filter wants, ascending. What the queue has
        had is left alone, so that it may be called again. It goes in steps, each durable.
        ``filter`` is what they were matched by: another one by now is an error.
        """
        text = self._check_fill(queue, begin, end, filter)
        if any(not begin <= each < end for each in offsets) or any(
            first >= second for first, second in pairwise(offsets)
        ):
            raise InvalidInput(f"the offsets to fill must ascend and lie in [{begin}, {end})")
        routed_up_to = self.log_stats().routed_up_to
        if end > routed_up_to:
            raise InvalidInput(
                f"the log is routed up to offset {routed_up_to}: a fill can't go to {end}"
            )

        def step(at: int, now_ms: int) -> Filled:
            rest = offsets[bisect_left(offsets, at) :]
            return self._store.fill(queue, at, end, now_ms, filter_text=text, offsets=rest)

        return self._fill(begin, end, step)

    def _check_fill(self, queue: str, begin: int, end: int, filter_text: str | None) -> str:
        """Check the bounds of a fill, and return the filter that its messages were matched by."""
        check_count(begin, "begin", 0, limits.MAX_OFFSET)
        check_count(end, "end", begin, limits.MAX_OFFSET)
        spec = self.queue(queue)
        return spec.filter if filter_text is None else filter_text

    def _fill(self, begin: int, end: int, step: Callable[[int, int], Filled]) -> Filled:
        """Fill a queue step by step; a step is told where it begins, and the time."""
        from penstock.store.filling import Filled  # noqa: PLC0415 - loaded when used

        added = already = missing = 0
        while begin < end:
            one = self._runner.apply_step(partial(step, begin))
            added, already, begin = added + one.added, already + one.already, one.next
            missing += one.missing
        return Filled(added, already, missing, begin)

    def restore(
        self,
        queue: str,
        begin: int,
        end: int,
        records: Sequence[tuple[LogRecord, bytes | None]],
        *,
        filter: str | None = None,  # noqa: A002
    ) -> Filled:
        """Fill a queue from [begin, end), below the log, with messages that were archived.

        ``records`` are all of them that the queue's filter wants, ascending, each with its
        payload, or None: then it must be in the store still. Steps, repetition and ``filter`` are
        as for :meth:`fill`.
        """
        text = self._check_fill(queue, begin, end, filter)
        check_archived(begin, end, records)

        def step(at: int, now_ms: int) -> Filled:
            rest = [each for each in records if each[0].message_id >= at]
            return self._store.fill(queue, at, end, now_ms, filter_text=text, records=rest)

        with self._restoring:
            return self._fill(begin, end, step)

    def collect(self, message_ids: Iterable[int], *, dry_run: bool = True) -> Collected:
        """Delete payloads that the log has let go of and no queue holds; by default only count.

        Every queue is read for it, from a snapshot: others go on meanwhile, but for restores.
        """
        ids = check_ids(list(message_ids))
        messages = size = 0
        # Only a restore can make a queue hold a message that nothing holds now: it would have to
        # come from the log.
        with self._restoring:
            log = self.log_stats()
            gone = {each for each in ids if each < min(log.earliest, log.routed_up_to)}
            if gone:
                with self.view(marks=False) as pinned:
                    gone -= pinned.referenced(gone)
            free = sorted(gone)
            for start in range(0, len(free), limits.MAX_COLLECT_CHUNK):
                chunk = free[start : start + limits.MAX_COLLECT_CHUNK]
                freed = self._runner.apply_step(
                    partial(self._store.collect, chunk, dry_run=dry_run)
                )
                messages, size = messages + freed.freed_messages, size + freed.freed_bytes
        return Collected(messages, size)

    # --- for a server ---------------------------------------------------------------------

    @cached_property
    def _requests(self) -> RequestRunner:
        # Loaded when used: only a server does many requests as one.
        from penstock.broker.requests import RequestRunner  # noqa: PLC0415

        return RequestRunner(self._store, self._clock, self._router, self._runner)

    def begin(self, joint: Joint) -> int:
        """Do many requests as one, fill in the answers, and return the number for :meth:`tell`."""
        return self._runner.apply(partial(self._requests.run, joint), durable=False)

    def tell(self, number: int, on_durable: OnDurable) -> None:
        """Call back when everything up to this number is durable, or never will be.

        It is called at once, or from a thread that others wait for: it must only pass it on.
        """
        self._runner.tell(number, on_durable)

    def listen(self, on_woken: OnWoken | None) -> None:
        """Call back with a queue that may have got something to claim; None: no more.

        It is called with the broker's lock held: it must only pass it on.
        """
        self._runner.listen(on_woken)

    @contextmanager
    def claiming_until(self, given_up: Callable[[], bool]) -> Iterator[None]:
        """Let claims that this thread makes inside wait no longer than until a condition holds.

        Whoever makes it hold calls :meth:`rouse`.
        """
        self._waits.given_up = given_up
        try:
            yield
        finally:
            del self._waits.given_up

    def rouse(self, queue: str) -> None:
        """Let all claims that wait for messages of a queue look whether they go on waiting."""
        self._runner.rouse(queue)

    def releasing(
        self,
        receipts: Iterable[str],
        delay_ms: int | None,
        reason: str,
        queue: str | None,
        *,
        unseen: bool = False,
        check: Check | None = None,
    ) -> Callable[[int], list[Outcome]]:
        """Check a release, and return the change that does it."""
        batch = check_receipts(receipts)
        check_optional(delay_ms, "delay_ms")
        reason = cut_text(reason, limits.MAX_REASON_BYTES)

        def work(now_ms: int) -> list[Outcome]:
            self._check_queues(batch, check)
            return self._store.release(
                batch,
                delay_ms=delay_ms,
                reason=reason,
                random=self._clock.random,
                queue_name=queue,
                now_ms=now_ms,
                unseen=unseen,
            )

        return work

    def extending(
        self,
        receipts: Iterable[str] | str,
        lease_ms: int,
        queue: str | None,
        check: Check | None = None,
    ) -> Callable[[int], list[Outcome]]:
        """Check an extension, and return the change that makes it."""
        check_count(lease_ms, "lease_ms", 1, limits.MAX_LEASE_MS)
        batch = receipts if isinstance(receipts, str) else check_receipts(receipts)

        def work(now_ms: int) -> list[Outcome]:
            self._check_queues(batch, check)
            return self._store.extend(batch, lease_ms=lease_ms, queue_name=queue, now_ms=now_ms)

        return work

    def _check_queues(self, receipts: list[str] | str, check: Check | None) -> None:
        """Ask the caller of a verb whether it may settle messages of these queues."""
        if check is not None:
            for queue in self._store.queues_of(receipts):
                check(queue)

    def acking_held(self, lease: str, message_id: int, queue: str) -> Callable[[int], bool]:
        """Return the change that acks a message by its id, if it is held under the lease."""

        def work(now_ms: int) -> bool:
            receipt = self._store.held(lease).get(message_id)
            if receipt is None:
                return False
            return self._store.ack([receipt], queue_name=queue, now_ms=now_ms)[0].ok

        return work

    def acking_late(
        self, receipts: Iterable[str], attempts: Sequence[int], queue: str
    ) -> Callable[[int], list[Outcome]]:
        """Return the change that acks what waits again, if nobody has claimed it since.

        ``attempts``: which attempt at its message each receipt was given for.
        """
        batch = check_receipts(receipts)
        return lambda now_ms: self._store.ack_late(batch, attempts, queue_name=queue, now_ms=now_ms)

    def durability(self) -> Durability:
        """Return how often, for how many commits and how long the store was synced."""
        return self._runner.durability

    def lock_waits(self) -> Histogram:
        """Return how long callers waited that did not have the store at once."""
        return self._runner.lock_waits.copy()

    def contention(self) -> Contention | None:
        """Return the cost of sharing the store with other processes; None if it has one owner."""
        return self._store.health().contention

    def used_bytes(self) -> dict[str, int]:
        """Return how many bytes each table of the store takes on its disk; empty: not known."""
        return self._store.health(disk=True).used_bytes

    def free_bytes(self) -> int | None:
        """Return how many bytes the disk of the store has left; None: not known."""
        return self._store.health(disk=True).free_bytes

    # These are known at once, whatever is under way.

    @property
    def away(self) -> str | None:
        """Why the store does not answer at present."""
        return self._store.health().away

    @property
    def outage(self) -> Outage | None:
        """Why the store can't be used at present, and since when."""
        return self._runner.outage

    @property
    def failure(self) -> PenstockError | None:
        """The error that ended the store for this process, if one did."""
        return self._runner.failure

    def takers(self, row: RowTuple) -> list[str]:
        """Return the queues whose filters would take a message now."""
        return self._look(lambda _: self._router.takers(row))

    # Quicker than matching every filter anew.
    _takers = takers

    def explain_to(
        self, may_see: Callable[[str | None], bool], queue: str, message_id: int
    ) -> MessageExplanation:
        """Explain as :meth:`explain` does, by the queues and (None) the log that may be seen."""
        from penstock.broker.explain import explain_message  # noqa: PLC0415

        check_ids([message_id])
        return explain_message(self._look, self._store, self.takers, queue, message_id, may_see)
