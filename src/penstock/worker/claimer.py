"""Claims messages for a worker: a thread for each queue, which draws from its source.

It claims when there is room for more than half of the prefetch, up to ``dequeue_max`` at a visit.
A source that finds nothing and can't wait for more is looked at again after the scan interval,
which varies by a fifth so that workers that were started together drift apart.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.clock import Clock
    from penstock.worker.retry import Standing
    from penstock.worker.source import Source
    from penstock.worker.state import Floor
    from penstock.worker.stats import Meters

__all__ = ["Feeder"]

JITTER: Final = 0.2


class Feeder:
    """The thread that claims from one queue."""

    def __init__(
        self,
        source: Source,
        floor: Floor,
        *,
        clock: Clock,
        meters: Meters,
        standing: Standing,
        dequeue_max: int,
        wait_ms: int,
        scan_interval_ms: int,
        on_end: Callable[[], None],
    ) -> None:
        self._source = source
        self._floor = floor
        self._clock = clock
        self._meters = meters
        self._standing = standing
        self._dequeue_max = dequeue_max
        self._wait_ms = wait_ms
        self._scan_interval_ms = scan_interval_ms
        self._on_end = on_end
        # Whether its last claim has been answered.
        self.ended = False
        self._thread = threading.Thread(
            target=self._run, name=f"penstock-feeder-{source.queue}", daemon=True
        )

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(self, within_ms: int | None) -> None:
        """Wait until the last claim has been answered."""
        self._thread.join(None if within_ms is None else within_ms / 1000)

    def _run(self) -> None:
        while self._floor.wait_for_room():
            begun = self._clock.seconds()
            try:
                found = self._visit()
            except Exception as error:  # the thread must outlive whatever it meets
                self._floor.pause(self._standing.failed(error))
                continue
            self._standing.worked()
            if not found:
                jitter = 1 + JITTER * (2 * self._clock.random() - 1)
                took_ms = (self._clock.seconds() - begun) * 1000
                self._floor.pause(int(self._scan_interval_ms * jitter - took_ms))
        self.ended = True
        self._on_end()

    def _visit(self) -> int:
        """Make one round of the zones; return how many messages it gave."""
        zones = self._source.peek()
        found = 0
        for zone in zones:
            room = self._floor.wait_for_room()
            if not room:
                break
            claimed = self._source.claim(
                zone,
                limit=min(room, self._dequeue_max),
                wait_ms=self._wait_ms if len(zones) == 1 else 0,
            )
            self._meters.add("collisions", claimed.collisions)
            if claimed.deliveries:
                found += len(claimed.deliveries)
                self._floor.bring(self._source, claimed.deliveries)
        return found
