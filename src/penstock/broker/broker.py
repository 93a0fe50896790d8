"""The broker: every verb on messages and queues, in the order of a message's life.

A broker checks its arguments, routes messages by the queues' filters
(:mod:`~penstock.broker.router`) and hands them to the store through the
:mod:`~penstock.broker.runner`, which knows of threads, time and durability. The verbs that only
look, of the metadata log and for a server are in :mod:`~penstock.broker.verbs`;
:mod:`~penstock.broker.settings` checks the settings of queues.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar
from weakref import WeakSet

import msgspec

from penstock import limits
from penstock.broker.router import Router
from penstock.broker.runner import SWEEP_BUDGET, Runner
from penstock.broker.settings import (
    check_dead_letter,
    check_no_circle,
    check_same_settings,
    find_queue,
    make_spec,
    settings_of,
)
from penstock.broker.verbs import BrokerBase
from penstock.errors import (
    InvalidInput,
    InvalidQueue,
    QueueExists,
    QueueNotFound,
    StorageFailed,
)
from penstock.filters import Row, default_filter, parse
from penstock.model import LeaseRequest, Message, Ordering, QueueSpec, State
from penstock.packing import pack_messages
from penstock.store.contract import FiltersChanged
from penstock.validation import (
    attributes_to,
    check_count,
    check_ids,
    check_optional,
    check_queue_name,
    check_receipts,
    check_state,
    check_states,
    check_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from prometheus_client import CollectorRegistry

    from penstock.broker.consumer import Settler
    from penstock.broker.metrics import VerbMetrics, VerbTimes
    from penstock.clock import Clock
    from penstock.consuming import Consumer
    from penstock.model import Delivery, Entry, Outcome, SweepCounts, Value
    from penstock.packing import PackedMessage
    from penstock.store.check_report import AuditReport
    from penstock.store.codec.metadata import Metadata
    from penstock.store.contract import FullStore

log = logging.getLogger(__name__)

T = TypeVar("T")

# Batches of routing that are remembered, for a look.
SHOWN_BATCHES: Final = 10
# Messages that a verb over many takes before it lets others in: those of one commit.
MASS_STEP: Final = 1_000
# Held while a broker begins to measure its verbs.
_MEASURING: Final = threading.Lock()


class Broker(BrokerBase):
    """An open store. Thread-safe; close it, or use it as a context manager."""

    _verb_times: VerbTimes | None = None

    def __init__(
        self,
        store: FullStore,
        *,
        clock: Clock,
        relaxed: bool = False,
        dedup_window_ms: int = 300_000,
        background: bool = True,
        checkpoint: Callable[[Path], None] | None = None,
    ) -> None:
        """Take a store over: use :func:`penstock.open`."""
        self.dedup_window_ms = check_count(
            dedup_window_ms, "dedup_window_ms", 1, limits.MAX_DEDUP_WINDOW_MS
        )
        self._store = store
        self._clock = clock
        self._checkpoint = checkpoint
        self._restoring = threading.Lock()
        self.routed_batches = deque(maxlen=SHOWN_BATCHES)
        self._waits = threading.local()
        self._router = Router(store, dedup_window_ms)
        self._consumers: WeakSet[Consumer] = WeakSet()
        self._settlers: WeakSet[Settler] = WeakSet()
        self._runner = Runner(store, clock, relaxed=relaxed, background=background)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            self.close()
        except StorageFailed as failure:
            if error is None:
                raise
            # The caller is to see the first error.
            log.error("the store was not closed in order: %s", failure)  # noqa: TRY400

    def close(self) -> None:
        """Make everything durable and let go of the store. A claim that waits raises."""
        self._runner.refuse_handler()
        for consumer in list(self._consumers):
            consumer.close()
        # Of consumers that had been closed before, too: their messages may be settled later.
        for settler in list(self._settlers):
            settler.flush()
        self._runner.close()

    def _apply(self, change: Callable[[int], T]) -> T:
        """Make a change, again if another process has changed the queues that it counted on."""
        while True:
            try:
                return self._runner.apply(change)
            except FiltersChanged:
                continue

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
        spec = make_spec({**settings, "filter": compiled.text, "ordering": ordering}, name)

        def create(now_ms: int) -> QueueSpec:
            known = find_queue(self._store, name)
            if known is not None:
                if known.draining:
                    raise QueueExists(f"queue {name!r} is draining: it is not gone yet")
                check_same_settings(known.spec, spec)
                return known.spec
            check_dead_letter(self._store, spec)
            check_no_circle(self._store, spec)
            fresh = msgspec.structs.replace(spec, created_at_ms=now_ms)
            self._store.create_queue(fresh, now_ms)
            return fresh

        return self._apply(create)

    def update_queue(
        self, name: str, *, from_offset: int | None = None, **changes: Any
    ) -> QueueSpec:
        """Change settings of a queue; messages that are in it stay. Ordering can't change.

        Another filter counts from the end of the log on, or from an earlier ``from_offset`` that
        has not been routed yet.
        """
        compiled = parse(changes["filter"]) if "filter" in changes else None
        check_optional(from_offset, "from_offset", 0, limits.MAX_OFFSET)

        def update(now_ms: int) -> QueueSpec:
            present = self._store.spec(name)
            text = present.filter if compiled is None else compiled.text
            spec = make_spec({**settings_of(present), **changes, "filter": text}, name)
            if spec.ordering is not present.ordering:
                raise InvalidQueue(f"the ordering of queue {name!r} can't be changed")
            spec = msgspec.structs.replace(
                spec, created_at_ms=present.created_at_ms, version=present.version + 1
            )
            # One that was deleted since does not stand in the way of other changes.
            if spec.dead_letter != present.dead_letter:
                check_dead_letter(self._store, spec)
            check_no_circle(self._store, spec)
            self._store.update_queue(spec, now_ms, from_offset=from_offset)
            return spec

        return self._apply(update)

    def delete_queue(self, name: str, *, drain: bool = False) -> int:
        """Remove a queue with every message in it, in whatever state; return how many.

        With ``drain`` the queue takes no more messages, workers may finish what is in it, and
        it is removed once nothing waits and nothing is in flight.
        """
        # Most messages in steps: only those that have come meanwhile are left to the last one.
        removed = 0 if drain else self.purge(name, states=list(State))
        # A sweep may have removed one that drains, as soon as it was empty.
        with suppress(*([QueueNotFound] if removed else [])):
            removed += self._runner.apply(partial(self._store.delete_queue, name, drain=drain))
        return removed

    # --- messages in ---------------------------------------------------------------------

    def publish(self, messages: Iterable[Message]) -> list[int]:
        """Store messages, each into every queue whose filter it satisfies; return their ids.

        All or none. A message whose dedup id was published within the window is not stored
        again: its id is that of the first.
        """
        return self._publish(pack_messages(messages), None)

    def send(
        self,
        queue: str,
        payload: bytes,
        /,
        *,
        delay_ms: int = 0,
        priority: int = 0,
        group: str = "",
        dedup_id: str | None = None,
        attributes: Mapping[str, Value] | None = None,
        **more: Value,
    ) -> int:
        """Publish one message straight to a queue: the parameters are the fields of Message.

        Other keyword arguments are attributes, too.
        """
        given = attributes_to(queue, attributes, more)
        batch = pack_messages([Message(payload, given, group, priority, delay_ms, dedup_id)])
        return self._publish(batch, queue)[0]

    def _publish(self, batch: list[PackedMessage], target: str | None) -> list[int]:
        return self._apply(partial(self._router.publish, batch, target))

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
        check_count(wait_ms, "wait_ms", 0, limits.MAX_WAIT_MS)
        check_text(consumer, "consumer", limits.MAX_CONSUMER_BYTES)
        if lease_ms is not None:
            check_count(lease_ms, "lease_ms", 1, limits.MAX_LEASE_MS)
        taken: list[Delivery] = []

        def take(now_ms: int) -> list[Delivery] | bool:
            given_up = getattr(self._waits, "given_up", None)
            if given_up is not None and given_up():
                # Anything ends the wait.
                return True
            held_ms = self._store.spec(queue).lease_ms if lease_ms is None else lease_ms
            want = LeaseRequest(limit, held_ms, consumer, self._clock.lease_id())
            nonlocal taken
            taken = self._store.claim(queue, (want,), now_ms)[0].deliveries()
            return taken

        try:
            self._runner.apply(take, queue=queue, wait_ms=wait_ms)
        except BaseException:
            # An interrupt, or a store that could not be synced: nobody gets to see the messages.
            if taken:
                with suppress(Exception):
                    self.release([each.receipt for each in taken], unseen=True)
            raise
        return taken

    def consume(
        self,
        queue: str,
        *,
        prefetch: int = 200,
        prefetch_bytes: int = 16_777_216,
        lease_ms: int | None = None,
        consumer: str = "",
        wait_ms: int | None = None,
        on_refused: Callable[[Outcome], None] | None = None,
    ) -> Consumer:
        """Iterate over the messages of a queue, and settle each by its own verbs.

        They are claimed in batches, of up to ``prefetch`` messages and about ``prefetch_bytes`` if
        the caller is fast. The iteration ends
        when nothing has come for ``wait_ms``; None: never. ``on_refused`` is called with the
        outcome of each receipt that is refused, which is logged otherwise.
        """
        # Loaded when used.
        from penstock.broker.consumer import BrokerConsumer  # noqa: PLC0415

        made = BrokerConsumer(
            self,
            self._clock,
            queue,
            prefetch=prefetch,
            prefetch_bytes=prefetch_bytes,
            wait_ms=wait_ms,
            on_refused=on_refused,
            lease_ms=lease_ms,
            consumer=consumer,
        )
        self._consumers.add(made)
        self._settlers.add(made.settler)
        return made

    def ack(self, receipts: Iterable[str], *, queue: str | None = None) -> list[Outcome]:
        """Settle messages as done. ``queue`` makes receipts of another queue an error."""
        batch = check_receipts(receipts)
        return self._runner.apply(
            lambda now_ms: self._store.ack(batch, queue_name=queue, now_ms=now_ms)
        )

    def release(
        self,
        receipts: Iterable[str],
        *,
        delay_ms: int | None = None,
        reason: str = "",
        queue: str | None = None,
        unseen: bool = False,
    ) -> list[Outcome]:
        """Give messages back: they are tried again, or fail if they are out of attempts.

        Without ``delay_ms`` they wait for the queue's back-off. A ``reason`` that is too long is
        cut. ``unseen`` is for messages that nobody has begun to work on: they take their old place
        at once, and the claim counts as no attempt; delay and reason mean nothing then.
        """
        return self._runner.apply(self.releasing(receipts, delay_ms, reason, queue, unseen=unseen))

    def extend(
        self, receipts: Iterable[str] | str, *, lease_ms: int, queue: str | None = None
    ) -> list[Outcome]:
        """Move the deadline to now + ``lease_ms`` (which may be sooner than it was).

        Takes receipts, or the token of a whole lease (:attr:`Delivery.lease`) for everything
        that is still held under it.
        """
        return self._runner.apply(self.extending(receipts, lease_ms, queue))

    # --- looking and mass moves ------------------------------------------------------------

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
        if callable(where):
            return self._redrive_by(where, queue, ids)
        chosen = None if where is None else _predicate(where)
        # Messages that fail meanwhile, be it again, must not keep this going for ever.
        depth = self.stats(queue).failed if ids is None else len(ids)
        parts: list[list[int] | None] = [None]
        if ids is not None:
            self.queue(queue)
            parts = [*_steps(ids)]

        def step(part: list[int] | None, after: bytes, now_ms: int) -> tuple[int, bytes | None]:
            return self._store.redrive(
                queue, message_ids=part, where=chosen, after=after, now_ms=now_ms
            )

        redriven = 0
        for part in parts:
            after: bytes | None = b""
            while after is not None and redriven < depth:
                one, after = self._runner.apply_step(partial(step, part, after))
                redriven += one
        return redriven

    def _redrive_by(
        self, where: Callable[[Mapping[str, Value]], bool], queue: str, ids: list[int] | None
    ) -> int:
        """Redrive what a function selects, which may take long, or call the broker itself."""
        redriven = 0
        for page in self._failed_pages(queue, ids):
            some = [entry.message_id for entry in page if where(entry.attributes)]
            redriven += self.redrive(queue, message_ids=some) if some else 0
        return redriven

    def _failed_pages(self, queue: str, ids: list[int] | None) -> Iterator[Sequence[Entry]]:
        """Read failed messages: those of these ids, or as many as there are at first."""
        left = self.stats(queue).failed
        if ids is not None:
            for message_id in ids:
                found = self.browse(queue, message_id=message_id, payloads=False)
                yield [entry for entry in found if entry.state is State.FAILED]
            return
        cursor: str | None = None
        while left > 0:
            page = self.browse(
                queue, state=State.FAILED, limit=MASS_STEP, cursor=cursor, payloads=False
            )
            yield page[:left]
            left, cursor = left - len(page), page.next_cursor
            if cursor is None:
                return

    def move(
        self,
        queue: str,
        to: str,
        *,
        state: State | str = State.FAILED,
        message_ids: Iterable[int] | None = None,
        limit: int | None = None,
    ) -> int:
        """Move messages of a queue that are failed, available or delayed into another queue.

        All of them, or those of ``message_ids``, up to ``limit``; return how many. They keep what
        they are and what was tried, and have a full set of attempts there. A message that the
        other queue has waiting or in flight is merged with it; one in its history is live again.
        In steps, each of which is stored whole: a move that is interrupted can be called again.
        """
        checked = check_state(state)
        if checked not in {State.FAILED, State.AVAILABLE, State.DELAYED}:
            raise InvalidInput(
                f"only failed, available and delayed messages can be moved, not {checked}"
            )
        ids = None if message_ids is None else sorted(set(check_ids(list(message_ids))))
        check_optional(limit, "limit", 1, limits.MAX_OFFSET)

        def step(now_ms: int) -> int:
            chosen = None if ids is None else ids[at : at + MASS_STEP]
            count = MASS_STEP if limit is None else min(MASS_STEP, limit - moved)
            return self._store.move(
                queue, to, state=checked, message_ids=chosen, limit=count, now_ms=now_ms
            )

        # Messages that come into the queue meanwhile must not keep this going for ever.
        depth = getattr(self.stats(queue), checked.value) if ids is None else len(ids)
        moved = at = 0
        while True:
            one = self._runner.apply_step(step)
            moved, at = moved + one, at + MASS_STEP
            if moved == limit or at >= depth or (ids is None and one < MASS_STEP):
                return moved

    def purge(
        self,
        queue: str,
        *,
        states: Sequence[State | str] = (State.AVAILABLE, State.DELAYED),
        message_ids: Iterable[int] | None = None,
        limit: int | None = None,
    ) -> int:
        """Remove the messages of a queue that are in one of the states; return how many.

        In flight ones are removed only if asked for; their receipts become stale. Failed ones can
        be removed by ``message_ids``. With ``limit`` so many at most: a caller that shows how far
        it is calls again until fewer are removed. It goes in steps, others are let in between.
        """
        checked = check_states(states)
        check_optional(limit, "limit", 1, limits.MAX_OFFSET)
        if message_ids is not None:
            if checked != [State.FAILED]:
                problem = "only failed messages can be purged by their ids: states=['failed']"
                raise InvalidInput(problem)
            ids = check_ids(list(message_ids))
            self.queue(queue)
            remove = partial(self._store.purge, queue, checked)
            steps = [partial(remove, message_ids=part) for part in _steps(ids)]
            return sum(map(self._runner.apply_step, steps))
        stats = self.stats(queue)
        # Messages that come into the queue meanwhile must not keep this going for ever.
        depth = sum(getattr(stats, state.value) for state in set(checked))
        most = depth if limit is None else limit
        removed = 0
        while True:
            room = MASS_STEP if limit is None else min(MASS_STEP, limit - removed)
            one = self._runner.apply_step(partial(self._store.purge, queue, checked, limit=room))
            removed += one
            if one < room or removed >= most:
                return removed

    def trim(
        self, queue: str, *, state: State | str, before: int, created_at_ms: int | None = None
    ) -> int:
        """Remove done or failed messages whose sequence number is below ``before``.

        For a reader that has copied them elsewhere: the sequence is that of the history tables.
        With ``created_at_ms`` nothing is removed if the queue was deleted and made anew since.
        """
        checked = check_state(state)
        if checked not in {State.DONE, State.FAILED}:
            raise InvalidInput(f"only done and failed messages can be trimmed, not {checked}")
        check_count(before, "before", 0, limits.MAX_OFFSET)
        check_optional(created_at_ms, "created_at_ms", 0, limits.MAX_OFFSET)
        step = partial(self._store.purge, queue, [checked], limit=MASS_STEP, before=before)
        removed = 0
        while one := self._runner.apply_step(partial(step, created_at_ms=created_at_ms)):
            removed += one
        return removed

    def check(self, *, repair: bool = False) -> AuditReport:
        """Hold the store to its invariants; with ``repair``, mend what can be mended.

        Nobody else is let in meanwhile. A store that is sound is not written to.
        """
        return self._runner.apply(
            lambda now_ms: self._store.audit(repair=repair, now_ms=now_ms), durable=repair
        )

    def checkpoint(self, path: Path) -> None:
        """Copy the store as it is into a directory that is not there yet; see ``penstock backup``.

        Nobody else is let in meanwhile, which is short: most files are shared, not copied.
        """
        copy = self._checkpoint
        if copy is None:
            raise InvalidInput(f"this store can't be copied to {path}")
        self._look(lambda _: copy(path))

    def metrics(self, registry: CollectorRegistry | None = None) -> dict[str, VerbMetrics]:
        """Return counts and latencies of the verbs that were called since the first ``metrics()``.

        A ``registry`` of prometheus-client shows them from then on as ``penstock_verb_seconds``.
        """
        # Loaded when used: nothing is measured for programs that never ask.
        from penstock.broker.metrics import VerbTimes  # noqa: PLC0415

        with _MEASURING:
            if self._verb_times is None:
                self._verb_times = VerbTimes(self, self._clock.seconds)
        if registry is not None:
            self._verb_times.register(registry)
        return self._verb_times.read()

    # --- time ------------------------------------------------------------------------------

    def sweep(self, *, budget: int = SWEEP_BUDGET) -> SweepCounts:
        """Do what is due: lease expiry, delays, retention, dedup windows. The sweeper does it."""
        check_count(budget, "budget", 1, 1_000_000)
        self._runner.recover()
        return self._runner.apply(lambda now_ms: self._store.sweep(now_ms, budget))


def _steps(ids: list[int]) -> list[list[int]]:
    """Cut ids into parts that a verb over many takes one at a time."""
    return [ids[at : at + MASS_STEP] for at in range(0, len(ids), MASS_STEP)]


def _predicate(where: str) -> Callable[[Metadata], bool]:
    compiled = parse(where)
    return lambda m: compiled.matches(
        Row(m.attributes, m.group, m.priority, m.published_at_ms, m.size)
    )
