"""The deep module: everything between a caller and a store.

A broker checks what comes in, routes it by the queues' filters, lets one caller at a time change
the store, waits until the change is durable, lets claims wait for messages, and runs the sweeper.
The store below knows nothing of threads or clocks; nothing above needs to know of either.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import msgspec

from penstock import limits
from penstock.clock import TimeGuard
from penstock.committer import Committer
from penstock.errors import (
    BrokerClosed,
    InvalidInput,
    InvalidMessage,
    InvalidQueue,
    QueueExists,
)
from penstock.filters import Matcher, Row, default_filter, parse
from penstock.model import Backfilled, Message, Ordering, QueueSpec, State
from penstock.stores.plans import Collected, Filled
from penstock.validation import (
    check_assignments,
    check_count,
    check_duration,
    check_ids,
    check_messages,
    check_queue_name,
    check_receipts,
    check_spec,
    check_state,
    check_text,
    cut_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from penstock.clock import Clock
    from penstock.codec.metadata import Metadata
    from penstock.model import (
        Assigned,
        Attempt,
        Cursor,
        Delivery,
        LogPage,
        LogStats,
        Outcome,
        Page,
        QueueStats,
        StoreStats,
        SweepCounts,
        Value,
    )
    from penstock.stores.audit import AuditReport
    from penstock.stores.contract import Store
    from penstock.stores.pinned import Pinned
    from penstock.stores.plans import BackfillPlan, LiveFilters, RoutePlan, StoreInfo

__all__ = ["Broker"]

log = logging.getLogger(__name__)

SWEEP_BUDGET: Final = 1_000
# How long the sweeper sleeps at most: what has no exact alarm (dedup windows) is seen to by then.
IDLE_SWEEP_MS: Final = 60_000


class Broker:
    """An open store. Thread-safe; close it, or use it as a context manager."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        relaxed: bool = False,
        dedup_window_ms: int = 300_000,
        background: bool = True,
    ) -> None:
        """Take a store over: use :func:`penstock.open`."""
        self._dedup_window_ms = check_duration(
            dedup_window_ms, "dedup_window_ms", low=1, high=limits.MAX_DEDUP_WINDOW_MS
        )
        self._store = store
        self._clock = clock
        self._guard = TimeGuard(store.time_floor_ms())
        self._lock = threading.Lock()
        self._waiters: dict[str, threading.Condition] = {}
        self._alarm = threading.Condition(self._lock)
        self._alarm_at_ms: int | None = None
        self._closed = False
        self._inline = store.routing() == "inline"
        self._matcher = _matcher(store)
        self._committer = Committer(store.sync, lambda: store.commits, relaxed=relaxed)
        self._sweeper: threading.Thread | None = None
        if background:
            self._sweeper = threading.Thread(
                target=self._sweep_loop, name="penstock-sweeper", daemon=True
            )
            self._sweeper.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Make everything durable and let go of the store. A claim that waits raises."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._alarm.notify_all()
            for waiting in self._waiters.values():
                waiting.notify_all()
        if self._sweeper is not None:
            self._sweeper.join()
        self._committer.close()
        with self._lock:
            self._store.close()

    # --- queues --------------------------------------------------------------------------

    def create_queue(
        self,
        name: str,
        *,
        filter: str | None = None,  # noqa: A002 - the word that users know
        ordering: Ordering | str = Ordering.STANDARD,
        **settings: Any,
    ) -> QueueSpec:
        """Make a queue and return its spec; the settings are the fields of :class:`QueueSpec`.

        Without a filter the queue takes what names it in the attribute ``queue``. Making a queue
        that is there with the same settings changes nothing.
        """
        check_queue_name(name)
        compiled = parse(default_filter(name) if filter is None else filter)
        spec = _make_spec(name, compiled.text, _ordering(ordering), settings)
        with self._lock:
            now_ms = self._now_ms()
            present = next((known for known in self._store.specs() if known.name == name), None)
            if present is not None:
                if self._store.draining(name):
                    raise QueueExists(f"queue {name!r} is draining: it is not gone yet")
                if _settings_of(present) != _settings_of(spec):
                    raise QueueExists(
                        f"queue {name!r} exists with other settings: use update_queue()"
                    )
                return present
            spec = msgspec.structs.replace(spec, created_at_ms=now_ms)
            self._store.create_queue(spec, now_ms)
            self._matcher = self._matcher.with_filter(name, compiled)
            number = self._store.commits
        self._committer.wait(number)
        return spec

    def update_queue(
        self, name: str, *, from_offset: int | None = None, **changes: Any
    ) -> QueueSpec:
        """Change settings of a queue; messages that are in it stay. Ordering can't change.

        Another filter counts from the end of the log on, or from an earlier ``from_offset`` that
        has not been routed yet.
        """
        compiled = parse(changes["filter"]) if "filter" in changes else None
        if from_offset is not None:
            check_count(from_offset, "from_offset", 0, limits.MAX_OFFSET)
        with self._lock:
            now_ms = self._now_ms()
            present = self._store.spec(name)
            if "ordering" in changes and _ordering(changes["ordering"]) is not present.ordering:
                raise InvalidQueue(f"the ordering of queue {name!r} can't be changed")
            text = present.filter if compiled is None else compiled.text
            settings = {**_settings_of(present), **changes}
            for fixed in ("name", "filter", "ordering"):
                settings.pop(fixed, None)
            spec = _make_spec(name, text, present.ordering, settings)
            spec = msgspec.structs.replace(
                spec, created_at_ms=present.created_at_ms, version=present.version + 1
            )
            self._store.update_queue(spec, now_ms, from_offset=from_offset)
            if compiled is not None:
                self._matcher = self._matcher.with_filter(name, compiled)
            self._after_change()
            number = self._store.commits
        self._committer.wait(number)
        return spec

    def delete_queue(self, name: str, *, drain: bool = False) -> int:
        """Remove a queue with every message in it, in whatever state; return how many.

        With ``drain`` the queue takes no more messages, workers may finish what is in it, and
        it is removed once nothing waits and nothing is in flight.
        """
        with self._lock:
            now_ms, removed = self._now_ms(), 0
            if drain:
                self._store.drain_queue(name, now_ms)
            else:
                removed = self._store.delete_queue(name, now_ms)
            if name in self._matcher:
                self._matcher = self._matcher.without(name)
            self._after_change()
            number = self._store.commits
        self._committer.wait(number)
        return removed

    def queues(self) -> list[QueueSpec]:
        """Return the specs of all queues, by name."""
        with self._lock:
            self._check_open()
            return self._store.specs()

    def queue(self, name: str) -> QueueSpec:
        """Return the spec of a queue."""
        with self._lock:
            self._check_open()
            return self._store.spec(name)

    # --- messages in ---------------------------------------------------------------------

    def publish(self, messages: Iterable[Message]) -> list[int]:
        """Store messages, each into every queue whose filter it satisfies; return their ids.

        All or none. A message whose dedup id was published within the window is not stored
        again: its id is that of the first.
        """
        batch = check_messages(messages)
        return self._publish(batch, None)

    def send(self, queue: str, payload: bytes, /, **attributes: Value) -> int:
        """Publish one message straight to a queue; keyword arguments are its attributes."""
        batch = check_messages([Message(payload, {**attributes, "queue": queue})])
        return self._publish(batch, queue)[0]

    def _publish(self, batch: list[Message], target: str | None) -> list[int]:
        with self._lock:
            now_ms = self._now_ms()
            if not batch:
                return []
            routes: list[list[str]] = []
            if self._inline or target is not None:
                routes = self._matcher.match(
                    [(m.attributes, m.group, m.priority, now_ms, len(m.payload)) for m in batch]
                )
            if target is not None:
                spec = self._store.spec(target)
                if target not in routes[0]:
                    raise InvalidMessage(
                        f"queue {target!r} takes messages where {spec.filter}; this one does not "
                        "match"
                    )
            ids = self._store.publish(
                batch,
                routes if self._inline else None,
                dedup_window_ms=self._dedup_window_ms,
                now_ms=now_ms,
            )
            self._after_change()
            number = self._store.commits
        self._committer.wait(number)
        return ids

    # --- messages out --------------------------------------------------------------------

    def claim(
        self,
        queue: str,
        *,
        limit: int = 1,
        lease_ms: int | None = None,
        wait_ms: int = 0,
        consumer: str = "",
    ) -> list[Delivery]:
        """Take up to ``limit`` messages under one lease, waiting up to ``wait_ms`` for the first.

        A message that is not acked, released or extended before its lease's deadline is given
        out again.
        """
        check_count(limit, "limit", 1, limits.MAX_CLAIM_LIMIT)
        check_duration(wait_ms, "wait_ms", high=limits.MAX_WAIT_MS)
        check_text(consumer, "consumer", limits.MAX_CONSUMER_BYTES)
        if lease_ms is not None:
            check_duration(lease_ms, "lease_ms", low=1, high=limits.MAX_LEASE_MS)
        with self._lock:
            now_ms = self._now_ms()
            until_ms = now_ms + wait_ms
            while True:
                spec = self._store.spec(queue)
                deliveries = self._store.claim(
                    queue,
                    limit=limit,
                    lease_ms=spec.lease_ms if lease_ms is None else lease_ms,
                    consumer=consumer,
                    lease=self._clock.lease_id(),
                    now_ms=now_ms,
                )
                self._after_change()
                if deliveries or now_ms >= until_ms:
                    break
                self._wait_for(queue, until_ms - now_ms, now_ms)
                now_ms = self._now_ms()
            number = self._store.commits
        self._committer.wait(number)
        return deliveries

    def ack(self, receipts: Iterable[str], *, queue: str | None = None) -> list[Outcome]:
        """Settle messages as done. ``queue`` makes receipts of another queue an error."""
        batch = check_receipts(receipts)
        with self._lock:
            now_ms = self._now_ms()
            outcomes = self._store.ack(batch, queue_name=queue, now_ms=now_ms)
            self._after_change()
            number = self._store.commits
        self._committer.wait(number)
        return outcomes

    def release(
        self,
        receipts: Iterable[str],
        *,
        delay_ms: int | None = None,
        reason: str = "",
        queue: str | None = None,
    ) -> list[Outcome]:
        """Give messages back: they are tried again, or fail if they are out of attempts.

        Without ``delay_ms`` they wait for the queue's back-off. A ``reason`` that is too long is
        cut.
        """
        batch = check_receipts(receipts)
        if delay_ms is not None:
            check_duration(delay_ms, "delay_ms")
        reason = cut_text(reason, limits.MAX_REASON_BYTES)
        with self._lock:
            now_ms = self._now_ms()
            outcomes = self._store.release(
                batch,
                delay_ms=delay_ms,
                reason=reason,
                random=self._clock.random,
                queue_name=queue,
                now_ms=now_ms,
            )
            self._after_change()
            number = self._store.commits
        self._committer.wait(number)
        return outcomes

    def extend(
        self, receipts: Iterable[str] | str, *, lease_ms: int, queue: str | None = None
    ) -> list[Outcome]:
        """Move the deadline to now + ``lease_ms`` (which may be sooner than it was).

        Takes receipts, or the token of a whole lease (:attr:`Delivery.lease`) for everything
        that is still held under it.
        """
        check_duration(lease_ms, "lease_ms", low=1, high=limits.MAX_LEASE_MS)
        batch = receipts if isinstance(receipts, str) else check_receipts(receipts)
        with self._lock:
            now_ms = self._now_ms()
            verb: Callable[..., list[Outcome]] = (
                self._store.extend_lease if isinstance(batch, str) else self._store.extend
            )
            outcomes = verb(batch, lease_ms=lease_ms, queue_name=queue, now_ms=now_ms)
            self._after_change()
            number = self._store.commits
        self._committer.wait(number)
        return outcomes

    # --- the metadata log ------------------------------------------------------------------

    def read_log(self, log: int = 0, *, begin: int | None = None, limit: int = 1_000) -> LogPage:
        """Read a page of a metadata log, from an offset or (None) from the log's cursor on."""
        check_count(log, "log", 0, limits.MAX_LOGS)
        check_count(limit, "limit", 1, limits.MAX_LOG_LIMIT)
        if begin is not None:
            check_count(begin, "begin", 0, limits.MAX_OFFSET)
        with self._lock:
            self._check_open()
            return self._store.read_log(log, begin, limit)

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
        if self._inline:
            raise InvalidInput("this store routes inline: there is nothing to assign")
        check_count(log, "log", 0, limits.MAX_LOGS)
        check_assignments(cursor, assignments)
        with self._lock:
            answer = self._store.assign(log, cursor, assignments, self._now_ms(), epoch=epoch)
            self._after_change()
            number = self._store.commits
        self._committer.wait(number)
        return answer

    def take_epoch(self) -> int:
        """Fence every pipeline that took an epoch before; name the new one in ``assign``."""
        with self._lock:
            epoch = self._store.take_epoch(self._now_ms())
            number = self._store.commits
        self._committer.wait(number)
        return epoch

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
        with self._lock:
            self._now_ms()
            self._store.spec(queue)
            log = self._store.log_stats()
            begin = log.earliest if from_ == "earliest" else self._offset(from_, "from_")
            end = log.routed_up_to if to is None else min(self._offset(to, "to"), log.routed_up_to)
        total = Backfilled(scanned=0, added=0, missing=0, next=max(begin, log.earliest))
        while total.next < end:
            with self._lock:
                step = self._store.backfill(queue, total.next, end, self._now_ms())
                self._after_change()
                number = self._store.commits
            self._committer.wait(number)
            total = Backfilled(
                scanned=total.scanned + step.scanned,
                added=total.added + step.added,
                missing=total.missing + step.missing,
                next=step.next,
            )
            if progress is not None:
                progress(total, end)
        return total

    def _offset(self, place: int | datetime | str, name: str) -> int:
        if isinstance(place, datetime):
            return self._store.offset_at(int(place.timestamp() * 1000))
        if isinstance(place, str):
            raise InvalidInput(f"{name} is an offset, a datetime or 'earliest', not {place!r:.100}")
        return check_count(place, name, 0, limits.MAX_OFFSET)

    # --- for a pipeline --------------------------------------------------------------------

    def info(self) -> StoreInfo:
        """Say which store this is: id, design, routing."""
        with self._lock:
            self._check_open()
            return self._store.info()

    def view(self, *, stats: bool = False) -> Pinned:
        """Pin the present state, to be read in bulk while others go on; close it soon.

        Only making it holds the broker up. ``stats`` adds the stats of every queue.
        """
        with self._lock:
            pinned = self._store.pin(self._now_ms(), stats=stats)
            self._after_change()
        return pinned

    def route_plan(self, *, max_offsets: int | None = None) -> RoutePlan:
        """Say which stretches of the logs a router may match next, and by whose epoch."""
        if self._inline:
            raise InvalidInput("this store routes inline: there is nothing to route")
        if max_offsets is not None:
            check_count(max_offsets, "max_offsets", 1, limits.MAX_OFFSET)
        with self._lock:
            self._check_open()
            return self._store.route_plan(max_offsets)

    def filters_at(self, offset: int) -> LiveFilters:
        """Return the filters that are live at an offset of the log, and until where."""
        check_count(offset, "offset", 0, limits.MAX_OFFSET)
        with self._lock:
            self._check_open()
            return self._store.filters_at(offset)

    def backfill_plan(
        self,
        queue: str,
        *,
        from_: int | datetime | Literal["earliest"] = "earliest",
        to: int | datetime | None = None,
    ) -> BackfillPlan:
        """Return the stretches of the log that a backfill of a queue has still to do."""
        with self._lock:
            self._now_ms()
            begin = 0 if from_ == "earliest" else self._offset(from_, "from_")
            end = limits.MAX_OFFSET if to is None else self._offset(to, "to")
            return self._store.backfill_plan(queue, begin, end)

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
        check_count(begin, "begin", 0, limits.MAX_OFFSET)
        check_count(end, "end", begin, limits.MAX_OFFSET)
        if any(not begin <= each < end for each in offsets) or any(
            first >= second for first, second in pairwise(offsets)
        ):
            raise InvalidInput(f"the offsets to fill must ascend and lie in [{begin}, {end})")
        with self._lock:
            self._now_ms()
            text = self._store.spec(queue).filter if filter is None else filter
            routed_up_to = self._store.log_stats().routed_up_to
            if end > routed_up_to:
                raise InvalidInput(
                    f"the log is routed up to offset {routed_up_to}: a fill can't go to {end}"
                )
        total = Filled(0, 0, 0, begin)
        while total.next < end:
            rest = offsets[bisect_left(offsets, total.next) :]
            with self._lock:
                step = self._store.fill(queue, total.next, end, rest, text, self._now_ms())
                self._after_change()
                number = self._store.commits
            self._committer.wait(number)
            total = Filled(
                total.added + step.added,
                total.already + step.already,
                total.missing + step.missing,
                step.next,
            )
        return total

    def collect(self, message_ids: Iterable[int], *, dry_run: bool = True) -> Collected:
        """Delete payloads that the log has let go of and no queue holds; by default only count.

        Every queue is read for it, from a view: others go on meanwhile.
        """
        ids = check_ids(list(message_ids))
        with self._lock:
            now_ms = self._now_ms()
            candidates = self._store.collectable(ids)
            pinned = self._store.pin(now_ms) if candidates else None
            self._after_change()
        if pinned is None:
            return Collected(0, 0)
        # Nothing can come to hold a candidate that nothing holds now, so that the view is enough.
        with pinned:
            free = sorted(candidates - pinned.referenced(candidates))
        total = Collected(0, 0)
        for start in range(0, len(free), limits.MAX_COLLECT_CHUNK):
            chunk = free[start : start + limits.MAX_COLLECT_CHUNK]
            with self._lock:
                freed = self._store.drop_payloads(chunk, self._now_ms(), dry_run=dry_run)
                number = self._store.commits
            self._committer.wait(number)
            total = Collected(
                total.freed_messages + freed.freed_messages, total.freed_bytes + freed.freed_bytes
            )
        return total

    def configure_log(
        self, *, logs: int | None = None, retention_ms: int | None = None
    ) -> LogStats:
        """Change the number of metadata logs, or how long they are kept (0: for ever)."""
        if logs is not None:
            check_count(logs, "logs", 1, limits.MAX_LOGS)
        if retention_ms is not None:
            check_duration(retention_ms, "retention_ms")
        with self._lock:
            self._store.configure_log(logs, retention_ms, self._now_ms())
            stats = self._store.log_stats()
            number = self._store.commits
        self._committer.wait(number)
        return stats

    def log_stats(self) -> LogStats:
        """Describe the metadata log: offsets, logs, cursors, retention."""
        with self._lock:
            self._check_open()
            return self._store.log_stats()

    # --- looking and mass moves ------------------------------------------------------------

    def browse(
        self,
        queue: str,
        *,
        state: State | str = State.AVAILABLE,
        limit: int = 100,
        cursor: str | None = None,
        payloads: bool = True,
    ) -> Page:
        """Look at messages without leasing them; go on with ``cursor=page.next_cursor``."""
        check_count(limit, "limit", 1, limits.MAX_BROWSE_LIMIT)
        checked = check_state(state)
        if cursor is not None:
            check_text(cursor, "cursor", limits.MAX_CURSOR_BYTES)
        with self._lock:
            page = self._store.browse(
                queue,
                checked,
                limit=limit,
                cursor=cursor,
                payloads=payloads,
                now_ms=self._now_ms(),
            )
            self._after_change()
        return page

    def attempts(self, queue: str, message_id: int) -> list[Attempt]:
        """Return every attempt at a message of a queue, the running one last."""
        check_ids([message_id])
        with self._lock:
            found = self._store.attempts(queue, message_id, self._now_ms())
            self._after_change()
        return found

    def stats(self, queue: str) -> QueueStats:
        """Return a queue's depth by state, oldest age and totals."""
        with self._lock:
            stats = self._store.queue_stats(queue, self._now_ms())
            self._after_change()
        return stats

    def store_stats(self) -> StoreStats:
        """Return the totals of the whole store."""
        with self._lock:
            self._check_open()
            return self._store.store_stats()

    def redrive(
        self,
        queue: str,
        *,
        message_ids: Iterable[int] | None = None,
        where: str | Callable[[Mapping[str, Value]], bool] | None = None,
    ) -> int:
        """Make failed messages available again, with a full set of attempts; return how many.

        All of them, or those of ``message_ids``, or those that ``where`` selects: a filter, or a
        function of the attributes.
        """
        ids = None if message_ids is None else check_ids(list(message_ids))
        chosen = None if where is None else _predicate(where)
        with self._lock:
            redriven = self._store.redrive(
                queue, message_ids=ids, where=chosen, now_ms=self._now_ms()
            )
            self._after_change()
            number = self._store.commits
        self._committer.wait(number)
        return redriven

    def purge(
        self,
        queue: str,
        *,
        states: Sequence[State | str] = (State.AVAILABLE, State.DELAYED),
    ) -> int:
        """Remove the messages of a queue that are in one of the states; return how many.

        In flight ones are removed only if asked for; their receipts become stale.
        """
        checked = [check_state(state) for state in states]
        with self._lock:
            removed = self._store.purge(queue, checked, self._now_ms())
            self._after_change()
            number = self._store.commits
        self._committer.wait(number)
        return removed

    def trim(self, queue: str, *, state: State | str, before: int) -> int:
        """Remove done or failed messages whose sequence number is below ``before``.

        For who has copied them elsewhere: the sequence is that of the history tables.
        """
        checked = check_state(state)
        if checked not in {State.DONE, State.FAILED}:
            raise InvalidInput(f"only done and failed messages can be trimmed, not {checked}")
        check_count(before, "before", 0, limits.MAX_OFFSET)
        with self._lock:
            removed = self._store.trim(queue, checked, before, self._now_ms())
            number = self._store.commits
        self._committer.wait(number)
        return removed

    def check(self, *, repair: bool = False) -> AuditReport:
        """Hold the store to its invariants; with ``repair``, mend what can be mended.

        Nobody else is let in meanwhile. A store that is sound is not written to.
        """
        with self._lock:
            report = self._store.audit(repair=repair, now_ms=self._now_ms())
            if repair and report.found:
                self._matcher = _matcher(self._store)
            self._after_change()
            number = self._store.commits
        self._committer.wait(number)
        return report

    # --- time ------------------------------------------------------------------------------

    def sweep(self, *, budget: int = SWEEP_BUDGET) -> SweepCounts:
        """Do what is due: lease expiry, delays, retention, dedup windows. The sweeper does it."""
        check_count(budget, "budget", 1, 1_000_000)
        with self._lock:
            counts = self._store.sweep(self._now_ms(), budget)
            self._after_change()
            number = self._store.commits
        self._committer.wait(number)
        return counts

    def _sweep_loop(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                try:
                    now_ms = self._now_ms()
                    counts = self._store.sweep(now_ms, SWEEP_BUDGET)
                    self._after_change()
                except Exception:
                    # Whatever it was, leases must go on expiring.
                    log.exception("the sweep failed; it will be tried again")
                    wait_ms = 1_000
                else:
                    due_ms = counts.next_due_ms
                    wait_ms = IDLE_SWEEP_MS if due_ms is None else due_ms - now_ms
                    wait_ms = min(wait_ms, IDLE_SWEEP_MS)
                if wait_ms > 0:
                    self._alarm_at_ms = now_ms + wait_ms
                    self._clock.wait(self._alarm, wait_ms)
                self._alarm_at_ms = None

    def _after_change(self) -> None:
        """Wake who waits for what has just happened; called with the lock held."""
        for name in self._store.take_woken():
            waiting = self._waiters.get(name)
            if waiting is None:
                continue
            available = self._store.available(name)
            if available is None:
                # The queue is gone: they are to find that out.
                waiting.notify_all()
                del self._waiters[name]
            else:
                waiting.notify(max(1, available))
        if self._alarm_at_ms is not None:
            soonest_ms = self._store.soonest_ms()
            if soonest_ms is not None and soonest_ms < self._alarm_at_ms:
                self._alarm.notify()

    def _wait_for(self, queue: str, wait_ms: int, now_ms: int) -> None:
        waiting = self._waiters.get(queue)
        if waiting is None:
            waiting = self._waiters[queue] = threading.Condition(self._lock)
        if self._sweeper is None:
            # Nobody else watches the time for us.
            soonest_ms = self._store.soonest_ms()
            if soonest_ms is not None:
                wait_ms = min(wait_ms, max(1, soonest_ms - now_ms))
        self._clock.wait(waiting, wait_ms)

    def _now_ms(self) -> int:
        """Return the store's time; called with the lock held, at the start of every verb."""
        self._check_open()
        return self._guard.now_ms(self._clock.now_ms())

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerClosed("the broker is closed")


def _matcher(store: Store) -> Matcher[str]:
    return Matcher({name: parse(text) for name, text in sorted(store.live_filters().items())})


def _ordering(ordering: Ordering | str) -> Ordering:
    try:
        return Ordering(ordering)
    except ValueError:
        raise InvalidQueue(f"ordering {ordering!r:.100}: 'standard' or 'fifo'") from None


_SETTINGS: Final = frozenset(QueueSpec.__struct_fields__) - {"created_at_ms", "version"}


def _settings_of(spec: QueueSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in _SETTINGS}


def _make_spec(
    name: str, filter_text: str, ordering: Ordering, settings: dict[str, Any]
) -> QueueSpec:
    unknown = sorted(set(settings) - _SETTINGS)
    if unknown:
        known = ", ".join(sorted(_SETTINGS - {"name"}))
        raise InvalidQueue(f"unknown setting {unknown[0]!r}; there are {known}")
    return check_spec(QueueSpec(name=name, filter=filter_text, ordering=ordering, **settings))


def _predicate(
    where: str | Callable[[Mapping[str, Value]], bool],
) -> Callable[[Metadata], bool]:
    if isinstance(where, str):
        compiled = parse(where)
        return lambda m: compiled.matches(
            Row(m.attributes, m.group, m.priority, m.published_at_ms, m.size)
        )
    return lambda m: where(m.attributes)
