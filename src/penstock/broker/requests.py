"""Many callers' requests as one change: for a server, which gathers them while the disk is busy.

Requests of the same kind share a scan and a commit; each keeps its own lease, its own answer and
its own errors. Answers count once the number that :meth:`~penstock.Broker.begin` returns is
durable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from penstock import limits
from penstock.broker.log import LogBroker
from penstock.errors import InvalidMessage, PenstockError
from penstock.filters import Matcher, parse
from penstock.model import Delivery, Message, Outcome, Want
from penstock.store.contract import FiltersChanged
from penstock.validation import check_duration, check_receipts, cut_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.broker.durability import Durability, Told
    from penstock.broker.runner import Outage, Woken
    from penstock.clock import Clock
    from penstock.model import Contention

Check: TypeAlias = Callable[[str], None]


class Publish(msgspec.Struct, eq=False):
    """Messages that were checked; if ``queue`` is given, all of them must go there."""

    messages: list[Message]
    queue: str | None
    error: Exception | None = None
    answer: list[int] = []


class Claim(msgspec.Struct, eq=False):
    """A claim whose bounds were checked; ``lease_ms`` None: as the queue has it."""

    queue: str
    limit: int
    lease_ms: int | None
    consumer: str
    error: Exception | None = None
    answer: list[Delivery] = []


class Ack(msgspec.Struct, eq=False):
    """Receipts to settle as done; ``check`` gets their queues first, and may raise."""

    receipts: list[str]
    queue: str | None
    check: Check | None = None
    error: Exception | None = None
    answer: list[Outcome] = []


class Change(msgspec.Struct, eq=False):
    """Any other change; it gets the time."""

    work: Callable[[int], Any]
    error: Exception | None = None
    answer: Any = None


Request: TypeAlias = Publish | Claim | Ack | Change


class Joint(msgspec.Struct):
    """Requests that are done together: those that end leases first, claims last."""

    acks: list[Ack] = []
    changes: list[Change] = []
    publishes: list[Publish] = []
    claims: list[Claim] = []

    def requests(self) -> list[Request]:
        """Return all requests."""
        return [*self.acks, *self.changes, *self.publishes, *self.claims]


class RequestBroker(LogBroker):
    """Requests of many callers: the base of :class:`~penstock.Broker` that a server uses."""

    _clock: Clock
    _dedup_window_ms: int
    # The filters that the matcher was made from, and the store's count of their changes.
    _matcher: Matcher[str]
    _live: dict[str, str]
    _matched: int

    def begin(self, joint: Joint) -> int:
        """Do many requests as one, fill in the answers, and return the number for :meth:`tell`."""
        return self._runner.begin(lambda now_ms: self._run(joint, now_ms))

    def tell(self, number: int, told: Told) -> None:
        """Call ``told`` when everything up to this number is durable, or never will be.

        It is called at once, or from a thread that others wait for: it must only pass it on.
        """
        self._runner.tell(number, told)

    def listen(self, woken: Woken | None) -> None:
        """Call ``woken`` with a queue that may have got something to claim; None: no more.

        It is called with the broker's lock held: it must only pass it on.
        """
        self._runner.listen(woken)

    def durability(self) -> Durability:
        """Return how often, for how many commits and how long the store was synced."""
        return self._runner.durability

    def contention(self) -> Contention | None:
        """Return the cost of sharing the store with other processes; None if it has one owner."""
        return self._store.health().contention

    @property
    def away(self) -> str | None:
        """Why the store does not answer at present; known at once, whatever is under way."""
        return self._store.health().away

    def free_bytes(self) -> int | None:
        """Return how many bytes the disk of the store has left; None: not known."""
        return self._store.health(disk=True).free_bytes

    @property
    def outage(self) -> Outage | None:
        """Why the store can't be used at present, and since when; known at once, as the next is."""
        return self._runner.outage

    @property
    def failure(self) -> PenstockError | None:
        """The error that ended the store for this process, if one did."""
        return self._runner.failure

    @property
    def dedup_window_ms(self) -> int:
        """For how long a dedup id is remembered."""
        return self._dedup_window_ms

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
        if delay_ms is not None:
            check_duration(delay_ms, "delay_ms")
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
        check_duration(lease_ms, "lease_ms", low=1, high=limits.MAX_LEASE_MS)
        batch = receipts if isinstance(receipts, str) else check_receipts(receipts)

        def work(now_ms: int) -> list[Outcome]:
            self._check_queues(batch, check)
            return self._store.extend(batch, lease_ms=lease_ms, queue_name=queue, now_ms=now_ms)

        return work

    def acking_held(self, lease: str, message_id: int, queue: str) -> Callable[[int], bool]:
        """Return the change that acks a message by its id, if it is held under the lease."""

        def work(now_ms: int) -> bool:
            receipt = self._store.held(lease).get(message_id)
            if receipt is None:
                return False
            return self._store.ack([receipt], queue_name=queue, now_ms=now_ms)[0].ok

        return work

    # --- many requests as one ---------------------------------------------------------------

    def _run(self, joint: Joint, now_ms: int) -> None:
        """Do what is asked for; one request's error is not its neighbours'."""
        self._ack_together(joint.acks, now_ms)
        for change in joint.changes:
            try:
                change.answer = change.work(now_ms)
            except Exception as error:
                # One that fails in an unforeseen way must not fail its neighbours.
                self._fail(change, error)
        if joint.publishes:
            self._publish_together(joint.publishes, now_ms)
        by_queue: dict[str, list[Claim]] = {}
        for claim in joint.claims:
            by_queue.setdefault(claim.queue, []).append(claim)
        for queue, claims in by_queue.items():
            self._claim_together(queue, claims, now_ms)

    def _fail(self, request: Request, error: Exception) -> None:
        """Give a request its error, and note at once if the store is away."""
        request.error = error
        self._runner.note_error()

    def _check_queues(self, receipts: list[str] | str, check: Check | None) -> None:
        """Ask the caller of a verb whether it may settle messages of these queues."""
        if check is not None:
            for queue in self._store.queues_of(receipts):
                check(queue)

    def _ack_together(self, acks: Sequence[Ack], now_ms: int) -> None:
        by_queue: dict[str | None, list[Ack]] = {}
        for ack in acks:
            try:
                self._check_queues(ack.receipts, ack.check)
            except PenstockError as error:
                self._fail(ack, error)
                continue
            by_queue.setdefault(ack.queue, []).append(ack)
        for queue, group in by_queue.items():
            try:
                self._ack(queue, group, now_ms)
            except PenstockError:
                # A receipt that is none refuses its own request alone.
                for ack in group:
                    try:
                        self._ack(queue, [ack], now_ms)
                    except PenstockError as error:
                        self._fail(ack, error)

    def _ack(self, queue: str | None, acks: Sequence[Ack], now_ms: int) -> None:
        receipts = [receipt for ack in acks for receipt in ack.receipts]
        outcomes = self._store.ack(receipts, queue_name=queue, now_ms=now_ms)
        begin = 0
        for ack in acks:
            end = begin + len(ack.receipts)
            ack.answer = outcomes[begin:end]
            begin = end

    def _publish_together(self, publishes: Sequence[Publish], now_ms: int) -> None:
        while True:
            good: list[Publish] = []
            messages: list[Message] = []
            routes: list[list[str]] = []
            for publish in publishes:
                try:
                    routes += self._routes(publish.messages, publish.queue, now_ms)
                except PenstockError as error:
                    self._fail(publish, error)
                    continue
                good.append(publish)
                messages += publish.messages
            if not messages:
                return
            try:
                ids = self._put(messages, routes, now_ms)
            except FiltersChanged:
                continue
            except PenstockError as error:
                for publish in good:
                    self._fail(publish, error)
                return
            begin = 0
            for publish in good:
                end = begin + len(publish.messages)
                publish.answer = ids[begin:end]
                begin = end
            return

    def _claim_together(self, queue: str, claims: Sequence[Claim], now_ms: int) -> None:
        try:
            lease_ms = self._store.spec(queue).lease_ms
            wants = [
                Want(
                    claim.limit,
                    lease_ms if claim.lease_ms is None else claim.lease_ms,
                    claim.consumer,
                    self._clock.lease_id(),
                )
                for claim in claims
            ]
            answers = self._store.claim(queue, wants, now_ms)
        except Exception as error:
            for claim in claims:
                self._fail(claim, error)
            return
        for claim, answer in zip(claims, answers, strict=True):
            claim.answer = answer

    # --- routing by filters ------------------------------------------------------------------

    def _routes(
        self, messages: Sequence[Message], target: str | None, now_ms: int
    ) -> list[list[str]]:
        """Return the queues of each message; all must go to ``target`` if there is one."""
        if not self._inline and target is None:
            return []
        spec = None if target is None else self._store.spec(target)
        if self._matched != self._store.progress.filter_changes:
            self._follow_filters()
        routes = self._matcher.match(
            [(m.attributes, m.group, m.priority, now_ms, len(m.payload)) for m in messages]
        )
        if spec is not None and any(target not in names for names in routes):
            raise InvalidMessage(
                f"queue {target!r} takes messages where {spec.filter}; this one does not match"
            )
        return routes if self._inline else []

    def _put(self, messages: Sequence[Message], routes: list[list[str]], now_ms: int) -> list[int]:
        """Store messages by their routes; return their ids."""
        if not messages:
            return []
        return self._store.publish(
            messages,
            routes if self._inline else None,
            dedup_window_ms=self._dedup_window_ms,
            now_ms=now_ms,
        )

    def _follow_filters(self) -> None:
        """Bring the matcher up to the live filters, whichever process has changed them."""
        queues = self._store.queues()
        live = {queue.spec.name: queue.filter for queue in queues if queue.filter is not None}
        self._matched = self._store.progress.filter_changes
        changed = dict(live.items() - self._live.items())
        gone = self._live.keys() - live.keys()
        if len(changed) + len(gone) > len(live) // 2:
            self._matcher = Matcher({name: parse(text) for name, text in sorted(live.items())})
        else:
            for name in sorted(gone):
                self._matcher = self._matcher.without(name)
            for name, text in sorted(changed.items()):
                self._matcher = self._matcher.with_filter(name, parse(text))
        self._live = live
