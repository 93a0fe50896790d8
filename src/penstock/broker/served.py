"""Verbs of a broker that are for a server, and routing by filters."""

from __future__ import annotations

from functools import cached_property, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from penstock import limits
from penstock.broker.verbs import LogBroker
from penstock.errors import InvalidMessage
from penstock.filters import Matcher, parse
from penstock.store.contract import FiltersChanged
from penstock.validation import (
    check_count,
    check_ids,
    check_optional,
    check_receipts,
    cut_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from threading import Lock

    from penstock.broker.durability import Durability, OnDurable
    from penstock.broker.requests import Check, Joint, RequestRunner
    from penstock.broker.runner import OnWoken, Outage
    from penstock.clock import Clock
    from penstock.errors import PenstockError
    from penstock.filters import RowTuple
    from penstock.histogram import Histogram
    from penstock.model import MessageExplanation, Outcome
    from penstock.packing import PackedMessage
    from penstock.store.contract import Contention

_envelope_of: Final = attrgetter("envelope")


class ServedBroker(LogBroker):
    """The verbs for a server, and routing by filters: the base of :class:`~penstock.Broker`."""

    dedup_window_ms: int
    _clock: Clock
    _inline: bool
    # The filters that the matcher was made from, and the store's count of their changes.
    _matcher: Matcher[str]
    _live: dict[str, str]
    _matched: int
    # Whether a filter may read the size of payloads, by its text.
    _reads_payloads: bool
    # Held while the matcher matches or is changed.
    _routing: Lock

    @cached_property
    def _requests(self) -> RequestRunner:
        # Loaded when used: only a server does many requests as one.
        from penstock.broker.requests import RequestRunner  # noqa: PLC0415

        runner = self._runner
        return RequestRunner(
            self._store,
            self._clock,
            self._routes,
            self._check_target,
            self._put,
            runner.note_error,
            runner.take_woken,
        )

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

    # --- routing by filters ------------------------------------------------------------------

    def _routes(
        self, messages: Sequence[PackedMessage], now_ms: int, *, targeted: bool
    ) -> list[list[str]]:
        """Return the queues of each message; a pipeline needs them only if they are to be checked.

        ``targeted``: some must go to a queue.
        """
        if self._matched != self._store.progress.filter_changes:
            self._follow_filters()
        if not self._inline and not targeted:
            return []
        with self._routing:
            if self._reads_payloads:
                return self._matcher.match(
                    [
                        (it.attributes, it.group, it.priority, now_ms, len(message.payload))
                        for message in messages
                        for it in (message.envelope,)
                    ]
                )
            # Messages with the same envelope go the same way: most of a producer's do.
            envelopes = list(map(_envelope_of, messages))
            numbers = list(map(id, envelopes))
            different = dict(zip(numbers, envelopes, strict=True))
            found = self._matcher.match(
                [(it.attributes, it.group, it.priority, now_ms, 0) for it in different.values()]
            )
        routes = dict(zip(different, found, strict=True))
        return list(map(routes.__getitem__, numbers))

    def _check_target(self, target: str, routes: Sequence[Sequence[str]]) -> None:
        """Refuse messages that must go to a queue if one of them does not."""
        spec = self._store.spec(target)
        if self._matched != self._store.progress.filter_changes:
            # Another process has made the queue, and the routes do not know it.
            raise FiltersChanged
        if any(target not in names for names in routes):
            raise InvalidMessage(
                f"queue {target!r} takes messages where {spec.filter}; this one does not match"
            )

    def takers(self, row: RowTuple) -> list[str]:
        """Return the queues whose filters would take a message now."""

        def match(_: int) -> list[str]:
            if self._matched != self._store.progress.filter_changes:
                self._follow_filters()
            with self._routing:
                return self._matcher.match([row])[0]

        return self._look(match)

    # Quicker than matching every filter anew.
    _takers = takers

    def explain_to(
        self, may_see: Callable[[str | None], bool], queue: str, message_id: int
    ) -> MessageExplanation:
        """Explain as :meth:`explain` does, by the queues and (None) the log that may be seen."""
        from penstock.broker.explain import explain_message  # noqa: PLC0415

        check_ids([message_id])
        return explain_message(self._look, self._store, self.takers, queue, message_id, may_see)

    def _follow_filters(self) -> None:
        """Follow the live filters and the routing, whichever process has changed them."""
        # Before the look: another thread may find them changed meanwhile.
        changes = self._store.progress.filter_changes
        queues = self._store.queues()
        live = {queue.spec.name: queue.filter for queue in queues if queue.filter is not None}
        with self._routing:
            if changes >= self._matched:
                # After the queues, which a store reads again if another process has changed them.
                self._inline = self._store.info().routing == "inline"
                self._match_by(live)
                self._matched = changes

    def _match_by(self, live: dict[str, str]) -> None:
        """Change the matcher so that it has these filters."""
        changed = dict(live.items() - self._live.items())
        gone = self._live.keys() - live.keys()
        if len(changed) + len(gone) > len(live) // 2:
            self._matcher = Matcher({name: parse(text) for name, text in sorted(live.items())})
        else:
            for name in sorted(gone):
                self._matcher.remove(name)
            for name, text in sorted(changed.items()):
                self._matcher.put(name, parse(text))
        self._live = live
        self._reads_payloads = any("size" in text for text in live.values())

    def _put(
        self,
        messages: Sequence[PackedMessage],
        routes: list[list[str]],
        now_ms: int,
        routed_at: int,
    ) -> list[int]:
        """Store messages by their routes; return their ids.

        ``routed_at``: the store's count of changed filters, before the routes were made.
        """
        if not messages:
            return []
        return self._store.publish(
            messages,
            routes if self._inline else None,
            dedup_window_ms=self.dedup_window_ms,
            now_ms=now_ms,
            routed_at=routed_at,
        )
