"""Verbs of a broker that are about the metadata log.

Tailers, backfills, pipelines and bulk readers use the verbs of the log.
"""

from __future__ import annotations

from bisect import bisect_left
from datetime import datetime
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from penstock import limits
from penstock.broker.inspect import StoreReader
from penstock.errors import InvalidInput
from penstock.model import Backfilled, BackfillPlan, Collected, StoreInfo
from penstock.validation import (
    check_archived,
    check_assignments,
    check_count,
    check_ids,
    check_optional,
    check_routing,
)

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.broker.runner import Runner
    from penstock.model import (
        Assigned,
        Cursor,
        LiveFilters,
        LogRecord,
        LogStats,
        RoutePlan,
    )
    from penstock.store.filling import Filled
    from penstock.store.snapshot import PinnedStore

T = TypeVar("T")


class RoutedBatch(NamedTuple):
    """A stretch of a log that was assigned: when, which, and what came of it."""

    at_ms: int
    log: int
    cursor: Cursor
    assigned: Assigned


class LogBroker(StoreReader):
    """The verbs of the log: the base of :class:`~penstock.Broker`, which has those of messages."""

    _runner: Runner
    # Messages restored since each collection that is under way has looked.
    _restored: list[set[int]]
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
            done = self._store.fill(queue, at, end, now_ms, filter_text=text, records=rest)
            for restored in self._restored:
                restored.update(each.message_id for each, _ in rest if each.message_id < done.next)
            return done

        return self._fill(begin, end, step)

    def collect(self, message_ids: Iterable[int], *, dry_run: bool = True) -> Collected:
        """Delete payloads that the log has let go of and no queue holds; by default only count.

        Every queue is read for it, from a snapshot: others go on meanwhile.
        """
        ids = check_ids(list(message_ids))
        # Only a restore can make a queue hold a candidate that nothing holds now: with the messages
        # restored since, the snapshot is enough.
        restored: set[int] = set()

        def pin(now_ms: int) -> tuple[set[int], PinnedStore | None]:
            log = self._store.log_stats()
            # A message that no queue holds now never will be held: it would come from the log.
            gone = min(log.earliest, log.routed_up_to)
            candidates = {message_id for message_id in ids if message_id < gone}
            if candidates:
                self._restored.append(restored)
            return candidates, self._store.pin(now_ms, marks=False) if candidates else None

        def drop(now_ms: int) -> Collected:
            unheld = [each for each in chunk if each not in restored]
            return self._store.collect(unheld, now_ms, dry_run=dry_run)

        def forget(_: int) -> None:
            # Sets that are equal are not the same.
            self._restored = [each for each in self._restored if each is not restored]

        candidates, pinned = self._look(pin)
        messages = size = 0
        if pinned is None:
            return Collected(0, 0)
        try:
            with pinned:
                free = sorted(candidates - pinned.referenced(candidates))
            for start in range(0, len(free), limits.MAX_COLLECT_CHUNK):
                chunk = free[start : start + limits.MAX_COLLECT_CHUNK]
                freed = self._runner.apply_step(drop)
                messages, size = messages + freed.freed_messages, size + freed.freed_bytes
        finally:
            self._look(forget)
        return Collected(messages, size)
