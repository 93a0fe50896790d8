"""Which queues have failed messages that another queue is to get.

Kept in memory alone: the queues' settings and counters tell it when a store is opened. A queue
without failed messages, or without a dead letter queue, costs nothing here.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.store.kv.queues import Queue

__all__ = ["DeadLetters"]

log = logging.getLogger(__name__)


class DeadLetters:
    """Queues that have something to move, and those that wait for their dead letter queue."""

    def __init__(self) -> None:
        # Numbers of queues, in the order in which they came.
        self._pending: dict[int, None] = {}
        # Name of a queue that is not there (or drains) -> numbers of those who wait for it
        self._parked: dict[str, set[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._pending)

    def __contains__(self, queue: Queue) -> bool:
        return queue.number in self._pending

    def knows(self, queue: Queue) -> bool:
        """Whether what has failed in a queue will be moved, now or when its target is there."""
        return queue in self or any(queue.number in waiting for waiting in self._parked.values())

    def first(self) -> int | None:
        """Return the number of the queue that is next."""
        return next(iter(self._pending), None)

    def note(self, queue: Queue) -> None:
        """Note that a message of a queue has failed."""
        if queue.spec.dead_letter:
            self._pending[queue.number] = None

    def adopt(self, queue: Queue) -> None:
        """Take in a queue that is new, or whose settings have changed; others may wait for it."""
        self.forget(queue)
        if queue.counts.failed:
            self.note(queue)
        self._pending.update(dict.fromkeys(sorted(self._parked.pop(queue.name, ()))))

    def forget(self, queue: Queue) -> None:
        """Forget a queue that is gone, or that another dead letter queue was given to."""
        self.settle(queue)
        for waiting in self._parked.values():
            waiting.discard(queue.number)

    def settle(self, queue: Queue) -> None:
        """Note that a queue has nothing more to move."""
        self._pending.pop(queue.number, None)

    def park(self, queue: Queue) -> None:
        """Let a queue wait until its dead letter queue is there; say so once."""
        self.settle(queue)
        name = queue.spec.dead_letter
        waiting = self._parked.setdefault(name, set())
        if queue.number not in waiting:
            waiting.add(queue.number)
            log.warning(
                "queue %s: its dead letter queue %s is not there; what fails stays until it is",
                queue.name,
                name,
            )
