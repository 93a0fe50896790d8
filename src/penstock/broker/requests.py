"""Many callers' requests as one change: for a server, which gathers them while the disk is busy.

Requests of the same kind share a scan and a commit; each keeps its own lease, its own answer and
its own errors. Answers count once the number that :meth:`~penstock.Broker.begin` returns is
durable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from penstock.errors import InvalidInput, LimitReached, PenstockError
from penstock.model import LeaseRequest, Outcome
from penstock.packing import PackedMessage
from penstock.store.codec.claimed import ClaimedMessages
from penstock.store.contract import FiltersChanged

if TYPE_CHECKING:
    from penstock.broker.router import Router
    from penstock.broker.runner import Runner
    from penstock.clock import Clock
    from penstock.store.contract import FullStore

Check: TypeAlias = Callable[[str], None]
Standing: TypeAlias = "Callable[[str, int | None], Sequence[Claim]]"


class Publish(msgspec.Struct, eq=False):
    """Messages that were checked; if ``queue`` is given, all of them must go there."""

    messages: list[PackedMessage]
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
    answer: ClaimedMessages = msgspec.field(default_factory=ClaimedMessages)


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
    """Requests that are done together: those that end leases first, claims last.

    ``standing`` gives the claims to add for a queue that has got about so many messages by the
    other requests; None: the queue is gone.
    """

    acks: list[Ack] = []
    changes: list[Change] = []
    publishes: list[Publish] = []
    claims: list[Claim] = []
    standing: Standing | None = None

    def requests(self) -> list[Request]:
        """Return all requests."""
        return [*self.acks, *self.changes, *self.publishes, *self.claims]


class RequestRunner(NamedTuple):
    """Does joint requests on a broker's store; called as a change of the runner."""

    store: FullStore
    clock: Clock
    router: Router
    runner: Runner

    def run(self, joint: Joint, now_ms: int) -> int:
        """Do the requests and fill in their answers; one request's error is not its neighbours'.

        Returns the number of the last commit.
        """
        if joint.acks:
            self._ack_together(joint.acks, now_ms)
        for change in joint.changes:
            try:
                change.answer = change.work(now_ms)
            except Exception as error:
                # One that fails in an unforeseen way must not fail its neighbours.
                self._fail(change, error)
        if joint.publishes:
            self._publish_together(joint.publishes, now_ms)
        if joint.standing is not None:
            for queue, available in self.runner.take_woken().items():
                joint.claims += joint.standing(queue, available)
        by_queue: dict[str, list[Claim]] = {}
        for claim in joint.claims:
            by_queue.setdefault(claim.queue, []).append(claim)
        for queue, claims in by_queue.items():
            self._claim_together(queue, claims, now_ms)
        return self.store.progress.commits

    def _fail(self, request: Request, error: Exception) -> None:
        """Give a request its error, and note at once if the store is away."""
        request.error = error
        self.runner.note_error()

    def _ack_together(self, acks: Sequence[Ack], now_ms: int) -> None:
        by_queue: dict[str | None, list[Ack]] = {}
        for ack in acks:
            try:
                if ack.check is not None:
                    for name in self.store.queues_of(ack.receipts):
                        ack.check(name)
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
        outcomes = self.store.ack(receipts, queue_name=queue, now_ms=now_ms)
        begin = 0
        for ack in acks:
            end = begin + len(ack.receipts)
            ack.answer = outcomes[begin:end]
            begin = end

    def _publish_together(self, publishes: Sequence[Publish], now_ms: int) -> None:
        while publishes:
            routed_at = self.store.progress.filter_changes
            messages: list[PackedMessage] = []
            targeted = False
            for publish in publishes:
                messages += publish.messages
                targeted = targeted or publish.queue is not None
            try:
                routes = self.router.route(messages, now_ms, targeted=targeted)
                if targeted and self._fail_untaken(publishes, routes):
                    publishes = [publish for publish in publishes if publish.error is None]
                    continue
                ids = self.router.put(messages, routes, now_ms, routed_at)
            except FiltersChanged:
                continue
            except (InvalidInput, LimitReached) as error:
                # Nothing was stored. One by one, so that it is only the bad one that fails.
                for publish in publishes if len(publishes) > 1 else ():
                    self._publish_together([publish], now_ms)
                if len(publishes) == 1:
                    self._fail(publishes[0], error)
                return
            except Exception as error:
                # It may have been stored: no publish is tried again. Others have their answers.
                for publish in publishes:
                    self._fail(publish, error)
                return
            begin = 0
            for publish in publishes:
                end = begin + len(publish.messages)
                publish.answer = ids[begin:end]
                begin = end
            return

    def _fail_untaken(self, publishes: Sequence[Publish], routes: Sequence[Sequence[str]]) -> bool:
        """Fail publishes to queues that do not take all of their messages; whether there are."""
        failed = False
        begin = 0
        for publish in publishes:
            end = begin + len(publish.messages)
            try:
                if publish.queue is not None:
                    self.router.check_target(publish.queue, routes[begin:end])
            except FiltersChanged:
                raise
            except PenstockError as error:
                self._fail(publish, error)
                failed = True
            begin = end
        return failed

    def _claim_together(self, queue: str, claims: Sequence[Claim], now_ms: int) -> None:
        try:
            lease_ms = self.store.spec(queue).lease_ms
            wants = [
                LeaseRequest(
                    claim.limit,
                    lease_ms if claim.lease_ms is None else claim.lease_ms,
                    claim.consumer,
                    self.clock.lease_id(),
                )
                for claim in claims
            ]
            answers = self.store.claim(queue, wants, now_ms)
        except Exception as error:
            for claim in claims:
                self._fail(claim, error)
            return
        for claim, answer in zip(claims, answers, strict=True):
            claim.answer = answer
