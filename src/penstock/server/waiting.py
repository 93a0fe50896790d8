"""Clients that wait for messages: claims that are parked, and subscribers, who take turns.

A queue with subscribers is ready until a claim has found less there than it asked for, and again
when the broker says that it has got something. A ready queue is due when one of its subscribers may
have room: the next joint change claims for them.
"""

from __future__ import annotations

from asyncio import TimerHandle  # noqa: TC003 - msgspec reads the types of fields
from collections import deque
from typing import TYPE_CHECKING, Final

from penstock.broker.requests import Claim
from penstock.clock import loop_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.server.native.consumers import Consumer
    from penstock.server.native.requests import PendingRequest

# The most messages that are claimed for subscribers of a queue in one joint change, and for one of
# several while it is not known how many messages there are. A joint change has room for the former
# at least, however many requests it has.
MAX_CLAIMED: Final = 1_000
SLICE: Final = 50


class ClaimWait:
    """Tells how long a claim was parked, which is no work of the server; it may go on at any time.

    A native request (:class:`PendingRequest`) in its place lets its claim go on only if the
    connection has room.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0

    def admit(self) -> bool:
        """Whether the claim may be retried now; if not, its future is cancelled."""
        return True

    def leave(self) -> None:
        """Take note that the claim found nothing and is parked, until it is admitted again."""


class WaitingClaim(Claim, eq=False, kw_only=True):
    """A claim that may wait: until when, and the alarm that ends it while it is parked."""

    until: float
    admission: ClaimWait | PendingRequest | None
    alarm: TimerHandle | None = None
    parked_at: float = 0.0

    def park(self, alarm: TimerHandle) -> None:
        """Note that it is parked from now on."""
        self.alarm, self.parked_at = alarm, loop_seconds()
        if self.admission is not None:
            self.admission.leave()

    def unpark(self) -> bool:
        """Note that it is parked no more; return whether it was."""
        if self.alarm is None:
            return False
        self.alarm.cancel()
        self.alarm = None
        if self.admission is not None:
            self.admission.waited_s += loop_seconds() - self.parked_at
        return True


class PushClaim(Claim, eq=False, kw_only=True):
    """A claim that is made for a subscriber, with the bytes that were reserved for it."""

    subscriber: Consumer
    reserved_bytes: int


class Subscriptions:
    """The subscribers of all queues. For the loop's thread."""

    def __init__(self) -> None:
        self.by_queue: dict[str, deque[Consumer]] = {}
        self.due: dict[str, None] = {}
        self._ready: set[str] = set()
        # How many messages more the joint change that is being made may claim for subscribers.
        self.room = 0

    def add(self, subscriber: Consumer) -> None:
        """Claim for a subscriber from now on."""
        self.by_queue.setdefault(subscriber.queue, deque()).append(subscriber)
        self.mark_ready(subscriber.queue)

    def remove(self, subscriber: Consumer) -> None:
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
                claim = PushClaim(
                    queue, limit, each.lease_ms, each.consumer, subscriber=each, reserved_bytes=size
                )
                claims.append(claim)
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
