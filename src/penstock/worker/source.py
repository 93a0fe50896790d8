"""Where a worker's messages come from: the seam between the runtime and a store.

A source is visited in two steps, as a scanner and a manager would: :meth:`Source.peek` names the
zones that are worth a visit now, :meth:`Source.claim` takes messages of one of them. All stores see
to fairness between groups by themselves: they have one zone, the whole queue, and can wait for a
message inside the claim. A store that processes share scans its zones within the claim, and counts
how often another was there first.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from penstock.errors import InvalidInput
from penstock.model import Ordering

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.broker.broker import Broker
    from penstock.clock import Clock
    from penstock.model import Contention, Delivery

__all__ = ["BrokerSource", "Claimed", "Collisions", "Source", "source_of"]

WHOLE_QUEUE: Final = ("",)
# How often the settings of a queue are read; they are as well after a claim that failed.
LOOK_AGAIN_MS: Final = 10_000


class Claimed(NamedTuple):
    """What one visit gave, and how often somebody else was there first."""

    deliveries: list[Delivery]
    collisions: int = 0


class Source(Protocol):
    """One queue to draw from. Used by one thread."""

    queue: str
    lease_ms: int

    def peek(self) -> Sequence[str]:
        """Name the zones to visit now, in the order of the visits; none if all are empty."""

    def claim(self, zone: str, *, limit: int, wait_ms: int) -> Claimed:
        """Take up to ``limit`` messages of a zone; a store that can, waits for the first."""


class Collisions:
    """The collisions of a broker, which all sources of a worker share. Thread-safe."""

    def __init__(self, broker: Broker) -> None:
        # A client has no such verb: its server counts them, for all its clients.
        self._contention: Callable[[], Contention | None] = getattr(
            broker, "contention", lambda: None
        )
        self._lock = threading.Lock()
        self._told = 0
        self.take()

    def take(self) -> int:
        """Return how many there were since the last call, whoever made it."""
        with self._lock:
            found = self._contention()
            before, self._told = self._told, 0 if found is None else found.collisions
            return self._told - before


class BrokerSource:
    """A queue of a broker or of a client: one zone, and claims that wait."""

    def __init__(
        self,
        broker: Broker,
        queue: str,
        *,
        clock: Clock,
        lease_ms: int | None,
        consumer: str,
        fifo: bool,
        collisions: Collisions | None = None,
    ) -> None:
        self.queue = queue
        self._collisions = collisions or Collisions(broker)
        self._broker = broker
        self._clock = clock
        self._own_lease_ms = lease_ms
        self._consumer = consumer
        self._fifo = fifo
        self._look_at: float | None = None
        self._look()

    def peek(self) -> Sequence[str]:
        """Name the whole queue: a claim that finds nothing costs no more than a look."""
        return WHOLE_QUEUE

    def claim(self, zone: str, *, limit: int, wait_ms: int) -> Claimed:  # noqa: ARG002
        """Claim, waiting for the first message."""
        if self._look_at is None or self._clock.seconds() >= self._look_at:
            self._look()
        # Until it has worked: the queue may be another when it can be claimed from again.
        look_at, self._look_at = self._look_at, None
        deliveries = self._broker.claim(
            self.queue,
            limit=self._most or limit,
            lease_ms=self.lease_ms,
            wait_ms=wait_ms,
            consumer=self._consumer,
        )
        self._look_at = look_at
        return Claimed(deliveries, self._collisions.take())

    def _look(self) -> None:
        """Read the queue's settings."""
        spec = self._broker.queue(self.queue)
        in_order = spec.ordering is Ordering.FIFO
        if in_order and not self._fifo:
            raise InvalidInput(
                f"queue {self.queue!r} is FIFO: a thread that is over its time limit can't be "
                "ended, and the next message of its group would run beside it. Use "
                "mode='processes' or an async function, or no time limit"
            )
        self.lease_ms = spec.lease_ms if self._own_lease_ms is None else self._own_lease_ms
        # Several messages of one group would be given out together, to handlers that run side by
        # side; and those behind one that fails would have to be given back, an attempt poorer.
        self._most = 1 if in_order else None
        self._look_at = self._clock.seconds() + LOOK_AGAIN_MS / 1000


def source_of(
    broker: Broker,
    queue: str,
    *,
    clock: Clock,
    lease_ms: int | None,
    consumer: str,
    fifo: bool,
    collisions: Collisions | None = None,
) -> Source:
    """Return the source that fits a store; FIFO queues are refused without ``fifo``."""
    return BrokerSource(
        broker,
        queue,
        clock=clock,
        lease_ms=lease_ms,
        consumer=consumer,
        fifo=fifo,
        collisions=collisions,
    )
