"""Many callers' requests as one change: for a server, which gathers them while the disk is busy.

Requests of the same kind share a scan and a commit; each keeps its own lease, its own answer and
its own errors. Answers count once the number that :meth:`~penstock.Broker.begin` returns is
durable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from penstock.errors import PenstockError
from penstock.model import Delivery, Message, Outcome, Want
from penstock.store.contract import FiltersChanged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.broker.broker import Broker
    from penstock.clock import Clock
    from penstock.store.contract import Store

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


def run_joint(joint: Joint, broker: Broker, store: Store, clock: Clock, now_ms: int) -> None:
    """Do what is asked for and fill in the answers; one request's error is not its neighbours'."""
    _ack_together(store, joint.acks, now_ms)
    for change in joint.changes:
        try:
            change.answer = change.work(now_ms)
        except Exception as error:
            # One that fails in an unforeseen way must not fail its neighbours.
            change.error = error
    if joint.publishes:
        _publish_together(broker, joint.publishes, now_ms)
    by_queue: dict[str, list[Claim]] = {}
    for claim in joint.claims:
        by_queue.setdefault(claim.queue, []).append(claim)
    for queue, claims in by_queue.items():
        _claim_together(store, clock, queue, claims, now_ms)


def check_queues(store: Store, receipts: list[str] | str, check: Check | None) -> None:
    """Ask the caller of a verb whether it may settle messages of these queues."""
    if check is not None:
        for queue in store.queues_of(receipts):
            check(queue)


def _ack_together(store: Store, acks: Sequence[Ack], now_ms: int) -> None:
    by_queue: dict[str | None, list[Ack]] = {}
    for ack in acks:
        try:
            check_queues(store, ack.receipts, ack.check)
        except PenstockError as error:
            ack.error = error
            continue
        by_queue.setdefault(ack.queue, []).append(ack)
    for queue, group in by_queue.items():
        try:
            _ack(store, queue, group, now_ms)
        except PenstockError:
            # A receipt that is none refuses its own request alone.
            for ack in group:
                try:
                    _ack(store, queue, [ack], now_ms)
                except PenstockError as error:
                    ack.error = error


def _ack(store: Store, queue: str | None, acks: Sequence[Ack], now_ms: int) -> None:
    receipts = [receipt for ack in acks for receipt in ack.receipts]
    outcomes = store.ack(receipts, queue_name=queue, now_ms=now_ms)
    begin = 0
    for ack in acks:
        end = begin + len(ack.receipts)
        ack.answer = outcomes[begin:end]
        begin = end


def _publish_together(broker: Broker, publishes: Sequence[Publish], now_ms: int) -> None:
    while True:
        good: list[Publish] = []
        messages: list[Message] = []
        routes: list[list[str]] = []
        for publish in publishes:
            try:
                routes += broker.routes(publish.messages, publish.queue, now_ms)
            except PenstockError as error:
                publish.error = error
                continue
            good.append(publish)
            messages += publish.messages
        if not messages:
            return
        try:
            ids = broker.put(messages, routes, now_ms)
        except FiltersChanged:
            continue
        except PenstockError as error:
            for publish in good:
                publish.error = error
            return
        begin = 0
        for publish in good:
            end = begin + len(publish.messages)
            publish.answer = ids[begin:end]
            begin = end
        return


def _claim_together(
    store: Store, clock: Clock, queue: str, claims: Sequence[Claim], now_ms: int
) -> None:
    try:
        lease_ms = store.spec(queue).lease_ms
        wants = [
            Want(
                claim.limit,
                lease_ms if claim.lease_ms is None else claim.lease_ms,
                claim.consumer,
                clock.lease_id(),
            )
            for claim in claims
        ]
        answers = store.claim(queue, wants, now_ms)
    except Exception as error:
        for claim in claims:
            claim.error = error
        return
    for claim, answer in zip(claims, answers, strict=True):
        claim.answer = answer
