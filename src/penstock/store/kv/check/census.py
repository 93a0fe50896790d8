"""The messages of one queue as an audit has met them, so that stages can compare notes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.limits import MAX_DURATION_MS

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.store.kv.queues import Queue

__all__ = ["ActiveAudit", "Census", "Loser"]


class Loser(NamedTuple):
    """A live copy of a message that has to go, because the queue has the message twice."""

    key: int
    in_flight: bool


class Census:
    """Which message is where in a queue.

    ``waiting`` and ``flight`` map message ids to keys, ``leases`` the keys in flight to their
    leases, ``attempts`` the ids of all messages of the queue to their attempts; ``due`` says when
    the keys that wait expire, if they do. This is what bounds the memory of an audit: a few
    integers for each message, one queue at a time.
    """

    def __init__(self, queue: Queue, floor_ms: int) -> None:
        self.queue = queue
        self.floor_ms = floor_ms
        self.waiting: dict[int, int] = {}
        self.delayed: set[int] = set()
        self.flight: dict[int, int] = {}
        self.leases: dict[int, bytes] = {}
        self.done: set[int] = set()
        self.failed: set[int] = set()
        self.attempts: dict[int, int] = {}
        self.due: dict[int, int] = {}
        # The lowest values that the queue's sequences may have.
        self.next_done = 0
        self.next_failed = 0
        self.next_claim = 0

    @property
    def latest_ms(self) -> int:
        """A time after every time at which a message of this queue can become visible."""
        return self.floor_ms + 2 * MAX_DURATION_MS

    def meet_waiting(
        self, message_id: int, key: int, *, attempts: int, visible_at_ms: int, delayed: bool
    ) -> Loser | None:
        """Take in a waiting message; one that is there twice loses to what is met already."""
        if message_id in self.flight or message_id in self.waiting:
            return Loser(key, in_flight=False)
        self.waiting[message_id] = key
        self.attempts[message_id] = attempts
        if delayed:
            self.delayed.add(message_id)
        retention_ms = self.queue.spec.unclaimed_retention_ms
        if retention_ms:
            self.due[key] = visible_at_ms + retention_ms
        return None

    def meet_in_flight(
        self, message_id: int, key: int, *, attempts: int, lease: bytes
    ) -> Loser | None:
        """Take in a message in flight; a waiting copy loses to it."""
        if message_id in self.flight:
            return Loser(key, in_flight=True)
        loser = self.forget(message_id)
        self.flight[message_id] = key
        self.leases[key] = lease
        self.attempts[message_id] = attempts
        return loser

    def forget(self, message_id: int) -> Loser | None:
        """Take a live message out; give what it was."""
        self.attempts.pop(message_id, None)
        key = self.flight.pop(message_id, None)
        if key is not None:
            self.leases.pop(key, None)
            return Loser(key, in_flight=True)
        key = self.waiting.pop(message_id, None)
        if key is None:
            return None
        self.delayed.discard(message_id)
        self.due.pop(key, None)
        return Loser(key, in_flight=False)


class ActiveAudit(Protocol):
    """The audit of one design's tables of live messages.

    ``scan`` checks a queue and fills the census. The others repair: ``drop`` removes copies,
    ``put_back`` makes messages in flight available, ``expel`` moves messages to the quarantine.
    """

    def scan(self, census: Census) -> None:
        """Check the live messages of a queue."""

    def strangers(self) -> None:
        """Check for records of queues that are not there."""

    def place(self, queue: Queue, key: int, *, in_flight: bool) -> tuple[str, bytes]:
        """Give table and key of the record that holds a message."""

    def drop(self, census: Census, losers: Collection[Loser]) -> None:
        """Remove live copies of messages."""

    def put_back(self, queue: Queue, floor_ms: int, keys: Collection[int]) -> None:
        """Make messages in flight available, as of the time that the queue has last seen."""

    def expel(self, queue: Queue, message_ids: Collection[int], why: str) -> None:
        """Move live messages to the quarantine."""
