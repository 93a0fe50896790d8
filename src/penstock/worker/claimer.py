"""Claims messages for a worker: a thread for each queue.

It claims when half of the prefetch is free, up to ``dequeue_max`` messages in a call. The store
waits for the first message inside the claim. After a claim that found nothing the thread pauses
for the rest of the scan interval, which varies by a fifth so that workers that were started
together drift apart.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from penstock.errors import InvalidInput
from penstock.model import Ordering

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.broker.broker import Broker
    from penstock.model import Contention, Delivery
    from penstock.worker.state import WorkerState

JITTER: Final = 0.2
# How often the settings of a queue are read; they are as well after a claim that failed.
READ_SETTINGS_MS: Final = 10_000


class Claimer:
    """The thread that claims from one queue."""

    def __init__(
        self,
        broker: Broker,
        queue: str,
        state: WorkerState,
        *,
        lease_ms: int | None,
        consumer: str,
        fifo: bool,
        dequeue_max: int,
        wait_ms: int,
        scan_interval_ms: int,
        on_end: Callable[[], None],
    ) -> None:
        """Read the queue's settings; a FIFO queue is refused without ``fifo``."""
        self._broker = broker
        self._queue = queue
        self._state = state
        self._clock = state.clock
        self._activity = state.counters.activity(f"claiming from {queue}")
        self._own_lease_ms = lease_ms
        self._consumer = consumer
        self._fifo = fifo
        self._dequeue_max = dequeue_max
        self._wait_ms = wait_ms
        self._scan_interval_ms = scan_interval_ms
        # A client has no such verb: its server counts collisions, for all its clients.
        self._contention: Callable[[], Contention | None] = getattr(
            broker, "contention", lambda: None
        )
        self._old_collisions = self._collisions()
        self._on_end = on_end
        # Whether its last claim has been answered.
        self.ended = False
        self._thread = threading.Thread(
            target=self._run, name=f"penstock-claimer-{queue}", daemon=True
        )
        self._read_settings_at: float | None = None
        self._read_settings()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, within_ms: int | None) -> None:
        """Wait until the last claim has been answered."""
        self._thread.join(None if within_ms is None else within_ms / 1000)

    def _run(self) -> None:
        while room := self._state.wait_for_room():
            began = self._clock.seconds()
            try:
                deliveries = self.claim(min(room, self._dequeue_max))
                if deliveries:
                    self._state.add(deliveries, lease_ms=self.lease_ms)
                collisions = self._collisions() - self._old_collisions
                self._state.counters.reach("collisions", collisions)
            except Exception as error:  # the thread must outlive every error
                self._state.pause(self._activity.failed(error))
                continue
            self._activity.worked()
            if not deliveries:
                jitter = 1 + JITTER * (2 * self._clock.random() - 1)
                took_ms = (self._clock.seconds() - began) * 1000
                self._state.pause(int(self._scan_interval_ms * jitter - took_ms))
        self.ended = True
        self._on_end()

    def _collisions(self) -> int:
        """Return how often other processes took messages first, in all claims of this broker."""
        found = self._contention()
        return 0 if found is None else found.collisions

    def claim(self, limit: int) -> list[Delivery]:
        """Claim once, after reading the queue's settings if that is due."""
        if self._read_settings_at is None or self._clock.seconds() >= self._read_settings_at:
            self._read_settings()
        # Until the claim has worked: the queue may be another when it can be claimed from again.
        read_settings_at, self._read_settings_at = self._read_settings_at, None
        deliveries = self._broker.claim(
            self._queue,
            limit=1 if self._in_order else limit,
            lease_ms=self.lease_ms,
            wait_ms=self._wait_ms,
            consumer=self._consumer,
        )
        self._read_settings_at = read_settings_at
        return deliveries

    def _read_settings(self) -> None:
        spec = self._broker.queue(self._queue)
        # Several messages of one group would be given out together, to handlers that run side by
        # side; and those behind one that fails would have to be given back, an attempt poorer.
        self._in_order = spec.ordering is Ordering.FIFO
        if self._in_order and not self._fifo:
            raise InvalidInput(
                f"queue {self._queue!r} is FIFO: a thread that is over its time limit can't be "
                "ended, and the next message of its group would run beside it. Use "
                "mode='processes' or an async function, or no time limit"
            )
        self.lease_ms = spec.lease_ms if self._own_lease_ms is None else self._own_lease_ms
        self._read_settings_at = self._clock.seconds() + READ_SETTINGS_MS / 1000
