"""Counts and logs the work of a worker, and serves the counters as a Prometheus page."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.errors import PenstockError, needs_extra
from penstock.model import OutcomeStatus, QueueSpec
from penstock.store.policy import backoff_ms
from penstock.worker.outcome import Action

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from prometheus_client.core import Metric

    from penstock.clock import Clock
    from penstock.model import Delivery, Outcome
    from penstock.worker.outcome import Settlement

log = logging.getLogger("penstock.worker")

# The fields of WorkerStats and their help texts on the Prometheus page.
COUNTERS: Final = {
    "claimed": "Messages claimed.",
    "processed": "Messages acked.",
    "failed": "Handlers that raised, were cut off or died.",
    "released": "Messages given back.",
    "exhausted": "Messages given back that were out of attempts.",
    "lost": "Leases that ended while this worker held the message.",
    "stale": "Acks and releases that the store refused.",
    "late": "Handlers that returned after their message was given back.",
    "collisions": "Visits that another process forestalled.",
    "replaced": "Child processes that died or were killed.",
}
GAUGES: Final = {
    "in_progress": "Messages that are being worked on.",
    "prefetched": "Messages that wait for a free slot.",
    "unsettled": "Messages whose end the store has not confirmed yet.",
}
HISTOGRAMS: Final = {
    "failed_by_attempt": "Failures, by the number of the attempt.",
    "lag_seconds": "Age of a message when it was first claimed.",
    "handler_seconds": "How long handlers took.",
}
SECONDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1_800.0, 3_600.0),
)
ATTEMPTS: Final = (1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0, 20.0, 50.0, 100.0)
# The pause between two tries of an activity, in the terms that queues have for theirs.
PAUSES: Final = QueueSpec(name="worker", filter="", backoff_base_ms=250, backoff_cap_ms=10_000)
# Kinds of handler failures that the log tells apart; later kinds are logged at debug alone.
MAX_FAILURE_KINDS: Final = 1_000


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
    """The work of a worker since its start, and the messages that it holds.

    ``processed`` were acked, ``failed`` are handlers that raised, were cut off or died, and
    ``released`` messages that the store took back for any reason, of which ``exhausted`` were out
    of attempts. ``lost`` are leases that ended while the worker had the message, ``stale`` acks and
    releases that the store refused, ``late`` handlers that returned after their message was given
    back, ``collisions`` visits that another process forestalled, ``replaced`` child processes that
    died or were killed. ``troubles`` names the activities that do not work at present.
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


class WorkerCounters:
    """The counters of one worker, and its activities that may be in trouble. Thread-safe."""

    def __init__(self, clock: Clock, on_error: Callable[[Exception], None]) -> None:
        """``on_error`` is called with the error of each try of an activity that failed."""
        self._clock = clock
        self._on_error = on_error
        self._activities: list[Activity] = []
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._bounds = dict.fromkeys(HISTOGRAMS, SECONDS) | {"failed_by_attempt": ATTEMPTS}
        self._buckets = {name: [0] * (len(each) + 1) for name, each in self._bounds.items()}
        self._sums = dict.fromkeys(HISTOGRAMS, 0.0)
        self._failure_kinds: set[str] = set()

    def activity(self, name: str) -> Activity:
        """Return a new activity of the worker."""
        self._activities.append(Activity(name, self._clock, self._on_error))
        return self._activities[-1]

    def add(self, name: str, count: int = 1) -> None:
        """Raise a counter."""
        with self._lock:
            self._counts[name] += count

    def reach(self, name: str, count: int) -> None:
        """Raise a counter to a count that is kept elsewhere; several threads may read it there."""
        with self._lock:
            self._counts[name] = max(self._counts[name], count)

    def add_claimed(self, deliveries: Sequence[Delivery], *, lease_ms: int) -> None:
        """Count messages claimed with this lease; the lag of a first attempt is its age."""
        with self._lock:
            self._counts["claimed"] += len(deliveries)
            for each in deliveries:
                if each.attempts == 1:
                    # By the store's clock, which has both times, and not by this machine's.
                    claimed_at_ms = each.lease_deadline_ms - lease_ms
                    lag_ms = max(0, claimed_at_ms - each.published_at_ms)
                    self._observe("lag_seconds", lag_ms / 1000)

    def add_handled(self, delivery: Delivery, settlement: Settlement, seconds: float) -> None:
        """Count a handler's end; log its failure, the first of each kind with its traceback."""
        with self._lock:
            self._observe("handler_seconds", seconds)
            if not settlement.failed:
                return
            self._counts["failed"] += 1
            self._observe("failed_by_attempt", delivery.attempts)
            kind = settlement.place or settlement.reason
            level = logging.DEBUG
            if kind not in self._failure_kinds and len(self._failure_kinds) < MAX_FAILURE_KINDS:
                self._failure_kinds.add(kind)
                level = logging.WARNING
        trace = f"\n{settlement.trace}" if settlement.trace else ""
        text = "message %d of %s failed: %s%s"
        log.log(level, text, delivery.message_id, delivery.queue, settlement.reason, trace)

    def add_settled(self, action: Action, outcomes: Sequence[Outcome]) -> int:
        """Count the store's answers to an ack or a release; return how many it refused."""
        accepted = sum(outcome.ok for outcome in outcomes)
        exhausted = sum(outcome.status is OutcomeStatus.FAILED for outcome in outcomes)
        refused = len(outcomes) - accepted
        with self._lock:
            self._counts["processed" if action is Action.ACK else "released"] += accepted
            self._counts["exhausted"] += exhausted
            self._counts["stale"] += refused
        return refused

    def snapshot(self, *, in_progress: int, prefetched: int, unsettled: int) -> WorkerStats:
        """Return the counters and these gauges."""
        with self._lock:
            fields: dict[str, Any] = {**self._counts}
            for name, bounds in self._bounds.items():
                fields[name] = Histogram(bounds, tuple(self._buckets[name]), self._sums[name])
            return WorkerStats(
                **fields,
                in_progress=in_progress,
                prefetched=prefetched,
                unsettled=unsettled,
                troubles=tuple(each.name for each in self._activities if each.in_trouble),
            )

    def _observe(self, name: str, value: float) -> None:
        self._buckets[name][bisect_left(self._bounds[name], value)] += 1
        self._sums[name] += value


class Activity:
    """One activity of a worker, such as claiming: whether it works now, and when to try again.

    A worker tries everything again for ever, since messages that it can't settle come back by
    themselves when their lease ends. The log tells of a change, not of every try.
    """

    def __init__(self, name: str, clock: Clock, on_error: Callable[[Exception], None]) -> None:
        self.name = name
        self._clock = clock
        self._on_error = on_error
        self._failures = 0
        self._since = 0.0
        self._last = ""

    @property
    def in_trouble(self) -> bool:
        """Whether the last try failed."""
        return self._failures > 0

    def worked(self) -> None:
        """Note a success."""
        if self._failures:
            seconds = self._clock.seconds() - self._since
            text = "%s works again after %.1f s and %d failures"
            log.info(text, self.name, seconds, self._failures)
            self._failures = 0
            self._last = ""

    def failed(self, error: Exception) -> int:
        """Note a failure; return how many ms to wait before the next try."""
        if not self._failures:
            self._since = self._clock.seconds()
        self._failures += 1
        kind = type(error).__name__
        if kind != self._last:
            self._last = kind
            # An error that Penstock does not raise on purpose is a defect: log where it came from.
            trace = None if isinstance(error, PenstockError) else error
            text = "%s does not work, it is tried again: %s"
            log.warning(text, self.name, error, exc_info=trace)
        self._on_error(error)
        return backoff_ms(PAUSES, self._failures, self._clock.random)


@contextmanager
def serve_metrics(stats: Callable[[], WorkerStats], host: str, port: int) -> Iterator[int]:
    """Serve the Prometheus page inside ``with``; give the port: a free one if 0 was asked for."""
    with needs_extra("server", "a worker's page of metrics"):
        from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(stats))
    server, thread = start_http_server(port, addr=host, registry=registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Collector:
    """Gives prometheus-client the series of a worker."""

    def __init__(self, stats: Callable[[], WorkerStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        from prometheus_client import core  # noqa: PLC0415 - an extra

        stats = self._stats()
        for name, text in COUNTERS.items():
            yield core.CounterMetricFamily(f"penstock_worker_{name}", text, getattr(stats, name))
        for name, text in GAUGES.items():
            yield core.GaugeMetricFamily(f"penstock_worker_{name}", text, getattr(stats, name))
        text = "Activities that do not work."
        yield core.GaugeMetricFamily("penstock_worker_troubles", text, len(stats.troubles))
        for name, text in HISTOGRAMS.items():
            found: Histogram = getattr(stats, name)
            total, buckets = 0, []
            for bound, count in zip([*map(str, found.bounds), "+Inf"], found.counts, strict=True):
                total += count
                buckets.append((bound, float(total)))
            yield core.HistogramMetricFamily(
                f"penstock_worker_{name}", text, buckets=buckets, sum_value=found.sum
            )
