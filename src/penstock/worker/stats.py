"""What a worker counts. Plain numbers under one lock; a snapshot is a struct."""

from __future__ import annotations

import threading
from bisect import bisect_left
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.model import OutcomeStatus
from penstock.worker.outcome import Act

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.model import Delivery, Outcome

__all__ = ["Histogram", "Meters", "WorkerStats"]

SECONDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1_800.0, 3_600.0),
)
ATTEMPTS: Final = (1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0, 20.0, 50.0, 100.0)


class Histogram(msgspec.Struct, frozen=True):
    """How often values were at most ``bounds[i]`` (and above the bound before); then the rest."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker has done since it was started, and what it has in its hands.

    ``processed`` were acked, ``failed`` are handlers that raised, were cut off or died, and
    ``released`` what the store took back for any reason, of which ``exhausted`` were out of
    attempts. ``lost`` are leases that ended in a worker's hands, ``stale`` acks and releases that
    the store refused, ``late`` handlers that returned after their message was given back,
    ``collisions`` visits that another process forestalled, ``replaced`` child processes that died
    or were killed. ``troubles`` names what does not work at present.
    """

    claimed: int
    processed: int
    failed: int
    released: int
    exhausted: int
    lost: int
    stale: int
    late: int
    collisions: int
    replaced: int
    in_progress: int
    prefetched: int
    unsettled: int
    troubles: tuple[str, ...]
    failed_by_attempt: Histogram
    lag_seconds: Histogram
    handler_seconds: Histogram


class _Counted:
    """A histogram that is being filled."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def shown(self) -> Histogram:
        return Histogram(self._bounds, tuple(self._counts), self._sum)


class Meters:
    """The counters of one worker. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(
            (
                *("claimed", "processed", "failed", "released", "exhausted", "lost", "stale"),
                *("late", "collisions", "replaced"),
            ),
            0,
        )
        self._failed_by_attempt = _Counted(ATTEMPTS)
        self._lag = _Counted(SECONDS)
        self._handler = _Counted(SECONDS)

    def add(self, name: str, count: int = 1) -> None:
        """Count something that has nothing to it but its number."""
        with self._lock:
            self._counts[name] += count

    def claimed(self, deliveries: Sequence[Delivery], *, lease_ms: int) -> None:
        """Count messages that came in under such a lease; the lag of a first attempt is its age."""
        with self._lock:
            self._counts["claimed"] += len(deliveries)
            for each in deliveries:
                if each.attempts == 1:
                    # By the store's clock, which has both times, and not by this machine's.
                    claimed_at_ms = each.lease_deadline_ms - lease_ms
                    self._lag.add(max(0, claimed_at_ms - each.published_at_ms) / 1000)

    def handled(self, seconds: float, *, failed: bool, attempts: int) -> None:
        """Count a handler's end."""
        with self._lock:
            self._handler.add(seconds)
            if failed:
                self._counts["failed"] += 1
                self._failed_by_attempt.add(attempts)

    def settled(self, act: Act, outcomes: Sequence[Outcome]) -> int:
        """Count what the store has confirmed; return how many it refused."""
        accepted = sum(outcome.ok for outcome in outcomes)
        exhausted = sum(outcome.status is OutcomeStatus.FAILED for outcome in outcomes)
        refused = len(outcomes) - accepted
        with self._lock:
            self._counts["processed" if act is Act.ACK else "released"] += accepted
            self._counts["exhausted"] += exhausted
            self._counts["stale"] += refused
        return refused

    def shown(
        self, *, in_progress: int, prefetched: int, unsettled: int, troubles: tuple[str, ...]
    ) -> WorkerStats:
        """Return a snapshot."""
        with self._lock:
            return WorkerStats(
                **self._counts,
                in_progress=in_progress,
                prefetched=prefetched,
                unsettled=unsettled,
                troubles=troubles,
                failed_by_attempt=self._failed_by_attempt.shown(),
                lag_seconds=self._lag.shown(),
                handler_seconds=self._handler.shown(),
            )
