"""The series of queues at /metrics: which queues have their own, and the sums of the others.

A queue gets series of its own while there is room for them, the deepest first, and keeps them until
it is deleted: a series that comes and goes would make ``rate()`` wrong. The other queues are summed
as ``queue="(others)"``. Their counters add up what has happened since the first look of this
process, so that they never go down, whichever queues come, go or get series of their own.
"""

from __future__ import annotations

import heapq
import threading
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import QueueNotFound, StoreDamaged, needs_extra
from penstock.histogram import Histogram
from penstock.model import QueueStats

with needs_extra("server", "the server"):
    from prometheus_client import core

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.core import Metric

    from penstock.broker.broker import Broker

OTHERS: Final = "(others)"
STATES: Final = ("available", "delayed", "in_flight", "done", "failed")
TOTALS: Final = {
    "enqueued_total": "Messages that came into the queue.",
    "claimed_total": "Messages given out under a lease.",
    "acked_total": "Messages settled as done.",
    "released_total": "Messages given back.",
    "lease_expired_total": "Leases that ran out.",
    "failed_total": "Messages that ran out of attempts.",
    "redriven_total": "Failed messages made available again.",
    "removed_total": "Messages removed by retention or purge.",
    "moved_in_total": "Messages that came from another queue.",
    "moved_out_total": "Messages that went to another queue.",
}
AGES: Final = {
    "oldest_age_ms": ("oldest_seconds", "How long the oldest available message can be claimed."),
    "oldest_in_flight_ms": (
        "oldest_in_flight_seconds",
        "How long ago the oldest claim of a message in flight was made.",
    ),
}
# Bounds of waits: few, since each queue has all of them.
WAITS: Final = (0.001, 0.01, 0.1, 1.0, 10.0, 60.0, 600.0, 3_600.0)
_totals_of: Final = attrgetter(*TOTALS)


class QueueSeries:
    """The queues that have series of their own, and the counters of the others. Thread-safe."""

    def __init__(self, most: int) -> None:
        """``most`` queues have series of their own."""
        self._most = most
        self._lock = threading.Lock()
        # The waits of each queue with series of its own, and of the others.
        self._waits: dict[str, Histogram] = {}
        self._other_waits = Histogram.over(WAITS)
        # The totals of the other queues at the last look, and what all of them have added up to.
        self._seen: dict[str, tuple[int, ...]] | None = None
        self._other_totals = [0] * len(TOTALS)
        # Whether there ever were others: then they are shown, also when there are none.
        self._has_others = False

    def note_claimed(self, queue: str, waited_ms: int) -> None:
        """Count a claim, by how long the first of its messages could have been claimed."""
        with self._lock:
            waits = self._waits.get(queue)
            if waits is None:
                waits = self._other_waits
                # A queue that others were summed with keeps to that until the next look.
                if len(self._waits) < self._most and queue not in (self._seen or ()):
                    waits = self._waits[queue] = Histogram.over(WAITS)
            waits.add(waited_ms / 1000)

    def grouped(self, by_queue: Mapping[str, float]) -> dict[str, float]:
        """Give the number of each queue with series, 0 if there is none, and sum the others."""
        found: dict[str, float] = dict.fromkeys(list(self._waits), 0)
        for queue, number in by_queue.items():
            name = queue if queue in self._waits else OTHERS
            found[name] = found.get(name, 0) + number
        return found

    def look(self, broker: Broker) -> Iterator[Metric]:
        """Ask about every queue, one after the other, so that others get in between."""
        counted: list[QueueStats] = []
        unreadable: set[str] = set()
        for spec in broker.queues():
            try:
                counted.append(broker.stats(spec.name))
            except QueueNotFound:
                continue
            except StoreDamaged:
                unreadable.add(spec.name)
        count = len(counted) + len(unreadable)
        yield core.GaugeMetricFamily("penstock_queues", "Queues of the store.", count)
        about = "Queues whose figures can't be read."
        yield core.GaugeMetricFamily("penstock_queues_unreadable", about, len(unreadable))
        yield from _families(self._choose(counted, unreadable))

    def waits(self) -> Metric:
        """Give the histograms of waits."""
        family = core.HistogramMetricFamily(
            "penstock_queue_wait_seconds",
            "How long a message could have been claimed before it was: the first of each claim.",
            labels=["queue"],
        )
        with self._lock:
            shown = [*sorted(self._waits.items())]
            if self._other_waits.count:
                shown.append((OTHERS, self._other_waits))
            for queue, waits in shown:
                family.add_metric([queue], waits.cumulated(), waits.sum)
        return family

    def _choose(self, counted: list[QueueStats], unreadable: set[str]) -> list[QueueStats]:
        """Return the queues that have series of their own, and behind them the sum of the rest."""
        with self._lock:
            present = unreadable.union(each.queue for each in counted)
            for name in self._waits.keys() - present:
                del self._waits[name]
            rest = [each for each in counted if each.queue not in self._waits]
            room = self._most - len(self._waits)
            for each in heapq.nlargest(room, rest, key=_depth):
                self._waits[each.queue] = Histogram.over(WAITS)
            shown = [each for each in counted if each.queue in self._waits]
            rest = [each for each in rest if each.queue not in self._waits]
            self._add_others(rest, present)
            self._has_others = self._has_others or bool(rest)
            if self._has_others:
                shown.append(self._sum(rest))
        return shown

    def _add_others(self, rest: list[QueueStats], present: set[str]) -> None:
        """Add what has happened to the other queues since the last look."""
        # Queues of the first look have a past that this process does not know.
        first, before = self._seen is None, self._seen or {}
        nothing = (0,) * len(TOTALS)
        # A queue that can't be read now may be again.
        seen = {queue: totals for queue, totals in before.items() if queue in present}
        for each in rest:
            totals = seen[each.queue] = _totals_of(each)
            known = before.get(each.queue, totals if first else nothing)
            if totals != known:
                for at, (now, then) in enumerate(zip(totals, known, strict=True)):
                    # Less than before: it was deleted and made again.
                    self._other_totals[at] += now - then if now >= then else now
        for queue in self._waits:
            seen.pop(queue, None)
        self._seen = seen

    def _sum(self, rest: list[QueueStats]) -> QueueStats:
        sums: dict[str, Any] = {
            field: sum(getattr(each, field) for each in rest) for field in (*STATES, "groups_ready")
        }
        sums |= {field: max((getattr(each, field) or 0 for each in rest), default=0)
                 for field in AGES}  # fmt: skip
        return QueueStats(
            queue=OTHERS, **sums, **dict(zip(TOTALS, self._other_totals, strict=True))
        )


def _depth(stats: QueueStats) -> tuple[int, str]:
    return stats.available + stats.in_flight, stats.queue


def _families(shown: list[QueueStats]) -> Iterator[Metric]:
    about = "Messages in a queue by state."
    depth = core.GaugeMetricFamily("penstock_queue_depth", about, labels=["queue", "state"])
    for stats in shown:
        for state in STATES:
            depth.add_metric([stats.queue, state], getattr(stats, state))
    yield depth
    for field, (name, about) in AGES.items():
        ages = core.GaugeMetricFamily(f"penstock_queue_{name}", about, labels=["queue"])
        for stats in shown:
            ages.add_metric([stats.queue], (getattr(stats, field) or 0) / 1000)
        yield ages
    for field, about in TOTALS.items():
        totals = core.CounterMetricFamily(f"penstock_queue_{field}", about, labels=["queue"])
        for stats in shown:
            totals.add_metric([stats.queue], getattr(stats, field))
        yield totals
