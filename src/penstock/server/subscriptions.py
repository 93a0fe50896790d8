"""The subscribers of each queue, which take turns, and the queues that may have messages for them.

A queue is ready until a claim has found less there than it asked for, and again when the broker
says that it has got something. A ready queue is due when one of its subscribers may have room: the
next joint change claims for them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from penstock.broker.requests import Claim

if TYPE_CHECKING:
    from collections.abc import Iterable

# The most messages that are claimed for subscribers of a queue in one joint change, and for one of
# several while it is not known how many messages there are. A joint change has room for the former
# at least, however many requests it has.
MAX_CLAIMED: Final = 1_000
SLICE: Final = 50


class Subscriber(Protocol):
    """A client that messages of a queue are claimed for."""

    queue: str
    lease_ms: int | None
    consumer: str

    def reserve(self, most: int) -> tuple[int, int]:
        """Reserve room for up to so many messages; return for how many, and their likely bytes."""

    def deliver(self, claim: PushClaim) -> None:
        """Take the messages of a claim that is durable, and the room that was reserved for it."""

    def fail(self, error: Exception) -> None:
        """End: a claim for it has failed."""


class PushClaim(Claim, eq=False, kw_only=True):
    """A claim that is made for a subscriber, with the bytes that were reserved for it."""

    subscriber: Subscriber
    reserved_bytes: int


class Subscriptions:
    """The subscribers of all queues. For the loop's thread."""

    def __init__(self) -> None:
        self.by_queue: dict[str, deque[Subscriber]] = {}
        self.due: dict[str, None] = {}
        self._ready: set[str] = set()
        # How many messages more the joint change that is being made may claim for subscribers.
        self.room = 0

    def add(self, subscriber: Subscriber) -> None:
        """Claim for a subscriber from now on."""
        self.by_queue.setdefault(subscriber.queue, deque()).append(subscriber)
        self.mark_ready(subscriber.queue)

    def remove(self, subscriber: Subscriber) -> None:
        """Claim for a subscriber no more."""
        others = self.by_queue[subscriber.queue]
        others.remove(subscriber)
        if not others:
            del self.by_queue[subscriber.queue]
            self._ready.discard(subscriber.queue)
            self.due.pop(subscriber.queue, None)

    def mark_ready(self, queue: str) -> None:
        """Note that a queue may have messages."""
        if queue in self.by_queue:
            self._ready.add(queue)
            self.due[queue] = None

    def mark_due(self, queue: str) -> None:
        """Note that a subscriber of a queue may have room again."""
        if queue in self._ready:
            self.due[queue] = None

    def take_due(self) -> list[PushClaim]:
        """Make the claims for queues that are due, as far as there is room; the rest stay due."""
        claims = []
        while self.due and self.room > 0:
            queue = next(iter(self.due))
            del self.due[queue]
            claims += self.claims_of(queue)
        return claims

    def claims_of(self, queue: str, available: int | None = None) -> list[PushClaim]:
        """Make claims for the subscribers of a queue that have room, in turns.

        With ``available`` messages each gets the same share of them, as far as it has room.
        """
        subscribers = self.by_queue.get(queue)
        if subscribers is None:
            return []
        if self.room <= 0:
            self.mark_ready(queue)
            return []
        most = min(self.room, MAX_CLAIMED)
        if available is not None:
            most = min(available, most)
        share = left = most
        if len(subscribers) > 1:
            share = SLICE if available is None else -(-most // len(subscribers))
        claims = []
        for _ in range(len(subscribers)):
            if not left:
                break
            each = subscribers[0]
            subscribers.rotate(-1)
            limit, size = each.reserve(min(share, left))
            if limit:
                left -= limit
                claims.append(_claim_for(each, limit, size))
        self.room -= most - left
        if available is not None:
            # If all of them are claimed, a claim more would find nothing.
            (self._ready.add if most - left < available else self._ready.discard)(queue)
        return claims

    def note_found(self, claims: Iterable[PushClaim]) -> None:
        """Note by the claims of a change which queues have no more messages, and which may have."""
        short = {claim.queue for claim in claims if len(claim.answer) < claim.limit}
        self._ready -= short
        for claim in claims:
            if claim.queue not in short:
                self.mark_due(claim.queue)


def _claim_for(subscriber: Subscriber, limit: int, size: int) -> PushClaim:
    queue, lease_ms, consumer = subscriber.queue, subscriber.lease_ms, subscriber.consumer
    return PushClaim(queue, limit, lease_ms, consumer, subscriber=subscriber, reserved_bytes=size)
