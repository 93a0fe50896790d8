"""The deep module: everything between a caller and a store.

A broker checks what comes in, routes it by the queues' filters and hands it to the store through
the :mod:`~penstock.shell`, which knows of threads, time and durability. The verbs of the metadata
log are in :mod:`~penstock.broker_log`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from penstock import limits
from penstock.broker_log import LogVerbs
from penstock.errors import InvalidInput, InvalidMessage, InvalidQueue, QueueExists
from penstock.filters import Matcher, Row, default_filter, parse
from penstock.model import Message, Ordering, QueueSpec, State
from penstock.shell import SWEEP_BUDGET, Shell
from penstock.validation import (
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
        Attempt,
        Delivery,
        Outcome,
        Page,
        QueueStats,
        StoreStats,
        SweepCounts,
        Value,
    )
    from penstock.stores.audit import AuditReport
    from penstock.stores.contract import Store

__all__ = ["Broker"]


class Broker(LogVerbs):
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
        self._inline = store.routing() == "inline"
        self._matcher = _matcher(store)
        self._shell = Shell(store, clock, relaxed=relaxed, background=background)

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
        self._shell.close()

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

        def create(now_ms: int) -> QueueSpec:
            present = next((known for known in self._store.specs() if known.name == name), None)
            if present is not None:
                if self._store.draining(name):
                    raise QueueExists(f"queue {name!r} is draining: it is not gone yet")
                if _settings_of(present) != _settings_of(spec):
                    raise QueueExists(
                        f"queue {name!r} exists with other settings: use update_queue()"
                    )
                return present
            fresh = msgspec.structs.replace(spec, created_at_ms=now_ms)
            self._store.create_queue(fresh, now_ms)
            self._matcher = self._matcher.with_filter(name, compiled)
            return fresh

        return self._shell.apply(create)

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

        def update(now_ms: int) -> QueueSpec:
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
            return spec

        return self._shell.apply(update)

    def delete_queue(self, name: str, *, drain: bool = False) -> int:
        """Remove a queue with every message in it, in whatever state; return how many.

        With ``drain`` the queue takes no more messages, workers may finish what is in it, and
        it is removed once nothing waits and nothing is in flight.
        """

        def delete(now_ms: int) -> int:
            removed = 0
            if drain:
                self._store.drain_queue(name, now_ms)
            else:
                removed = self._store.delete_queue(name, now_ms)
            if name in self._matcher:
                self._matcher = self._matcher.without(name)
            return removed

        return self._shell.apply(delete)

    def queues(self) -> list[QueueSpec]:
        """Return the specs of all queues, by name."""
        return self._shell.look(lambda _: self._store.specs())

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

        def publish(now_ms: int) -> list[int]:
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
            return self._store.publish(
                batch,
                routes if self._inline else None,
                dedup_window_ms=self._dedup_window_ms,
                now_ms=now_ms,
            )

        return self._shell.apply(publish)

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

        def take(now_ms: int) -> list[Delivery]:
            spec = self._store.spec(queue)
            return self._store.claim(
                queue,
                limit=limit,
                lease_ms=spec.lease_ms if lease_ms is None else lease_ms,
                consumer=consumer,
                lease=self._clock.lease_id(),
                now_ms=now_ms,
            )

        return self._shell.apply_when_ready(queue, wait_ms, take)

    def ack(self, receipts: Iterable[str], *, queue: str | None = None) -> list[Outcome]:
        """Settle messages as done. ``queue`` makes receipts of another queue an error."""
        batch = check_receipts(receipts)
        return self._shell.apply(
            lambda now_ms: self._store.ack(batch, queue_name=queue, now_ms=now_ms)
        )

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
        return self._shell.apply(
            lambda now_ms: self._store.release(
                batch,
                delay_ms=delay_ms,
                reason=reason,
                random=self._clock.random,
                queue_name=queue,
                now_ms=now_ms,
            )
        )

    def extend(
        self, receipts: Iterable[str] | str, *, lease_ms: int, queue: str | None = None
    ) -> list[Outcome]:
        """Move the deadline to now + ``lease_ms`` (which may be sooner than it was).

        Takes receipts, or the token of a whole lease (:attr:`Delivery.lease`) for everything
        that is still held under it.
        """
        check_duration(lease_ms, "lease_ms", low=1, high=limits.MAX_LEASE_MS)
        batch = receipts if isinstance(receipts, str) else check_receipts(receipts)
        verb: Callable[..., list[Outcome]] = (
            self._store.extend_lease if isinstance(batch, str) else self._store.extend
        )
        return self._shell.apply(
            lambda now_ms: verb(batch, lease_ms=lease_ms, queue_name=queue, now_ms=now_ms)
        )

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
        return self._shell.look(
            lambda now_ms: self._store.browse(
                queue,
                checked,
                limit=limit,
                cursor=cursor,
                payloads=payloads,
                now_ms=now_ms,
            )
        )

    def attempts(self, queue: str, message_id: int) -> list[Attempt]:
        """Return every attempt at a message of a queue, the running one last."""
        check_ids([message_id])
        return self._shell.look(lambda now_ms: self._store.attempts(queue, message_id, now_ms))

    def stats(self, queue: str) -> QueueStats:
        """Return a queue's depth by state, oldest age and totals."""
        return self._shell.look(lambda now_ms: self._store.queue_stats(queue, now_ms))

    def store_stats(self) -> StoreStats:
        """Return the totals of the whole store."""
        return self._shell.look(lambda _: self._store.store_stats())

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
        return self._shell.apply(
            lambda now_ms: self._store.redrive(queue, message_ids=ids, where=chosen, now_ms=now_ms)
        )

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
        return self._shell.apply(lambda now_ms: self._store.purge(queue, checked, now_ms))

    def trim(self, queue: str, *, state: State | str, before: int) -> int:
        """Remove done or failed messages whose sequence number is below ``before``.

        For who has copied them elsewhere: the sequence is that of the history tables.
        """
        checked = check_state(state)
        if checked not in {State.DONE, State.FAILED}:
            raise InvalidInput(f"only done and failed messages can be trimmed, not {checked}")
        check_count(before, "before", 0, limits.MAX_OFFSET)
        return self._shell.apply(lambda now_ms: self._store.trim(queue, checked, before, now_ms))

    def check(self, *, repair: bool = False) -> AuditReport:
        """Hold the store to its invariants; with ``repair``, mend what can be mended.

        Nobody else is let in meanwhile. A store that is sound is not written to.
        """

        def check(now_ms: int) -> AuditReport:
            report = self._store.audit(repair=repair, now_ms=now_ms)
            if repair and report.found:
                self._matcher = _matcher(self._store)
            return report

        return self._shell.apply(check)

    # --- time ------------------------------------------------------------------------------

    def sweep(self, *, budget: int = SWEEP_BUDGET) -> SweepCounts:
        """Do what is due: lease expiry, delays, retention, dedup windows. The sweeper does it."""
        check_count(budget, "budget", 1, 1_000_000)
        return self._shell.apply(lambda now_ms: self._store.sweep(now_ms, budget))


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
