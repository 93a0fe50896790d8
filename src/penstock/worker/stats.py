"""Counts and logs the work of a worker, and serves the counters as a Prometheus page."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import msgspec

from penstock.errors import PenstockError, StoreDamaged, needs_extra
from penstock.histogram import Histogram
from penstock.model import OutcomeStatus, QueueSpec
from penstock.store.policy import backoff_ms
from penstock.worker.outcome import Action

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from prometheus_client.core import Metric

    from penstock.clock import Clock
    from penstock.model import Delivery, Outcome
    from penstock.worker.outcome import Settlement

log = logging.getLogger("penstock.worker")

SECONDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1_800.0, 3_600.0),
)
ATTEMPTS: Final = (1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0, 20.0, 50.0, 100.0)
# The pause between two tries of an activity, in the terms that queues have for theirs.
PAUSES: Final = QueueSpec(name="worker", filter="", backoff_base_ms=250, backoff_cap_ms=10_000)
# The same while the store can't read some messages: others may come that it can.
DAMAGED_PAUSE_MS: Final = 1_000
# Receipts of one queue begin alike: with the store and the queue.
RECEIPT_QUEUE_CHARS: Final = 21
# Kinds of handler failures that the log tells apart; later kinds are logged at debug alone.
MAX_FAILURE_KINDS: Final = 1_000
_BY_ATTEMPT: Any = msgspec.field(default_factory=partial(Histogram.over, ATTEMPTS))
_BY_SECONDS: Any = msgspec.field(default_factory=partial(Histogram.over, SECONDS))


class QueueWork(msgspec.Struct, kw_only=True):
    """The work on one queue since the start of the worker, and the messages held now.

    The Prometheus page has each field with its text.
    """

    claimed: Annotated[int, "Messages claimed."] = 0
    processed: Annotated[int, "Messages acked."] = 0
    failed: Annotated[int, "Handlers that raised, were cut off or died."] = 0
    released: Annotated[int, "Messages given back."] = 0
    exhausted: Annotated[int, "Messages given back that were out of attempts."] = 0
    lost: Annotated[int, "Leases that ended while this worker held the message."] = 0
    stale: Annotated[int, "Acks and releases that the store refused."] = 0
    late: Annotated[int, "Handlers that returned after their message was given back."] = 0
    in_progress: Annotated[int, "Messages that are being worked on."] = 0
    prefetched: Annotated[int, "Messages that wait for a free slot."] = 0
    longest_seconds: Annotated[float, "How long the handler has run by now that began first."] = 0.0
    failed_by_attempt: Annotated[Histogram, "Failures, by the number of the attempt."] = _BY_ATTEMPT
    lag_seconds: Annotated[Histogram, "Age of a message when it was first claimed."] = _BY_SECONDS
    handler_seconds: Annotated[Histogram, "How long handlers took."] = _BY_SECONDS

    def add_all(self, other: QueueWork) -> None:
        """Count the work on another queue too."""
        for name in QueueWork.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, Histogram):
                mine.add_all(theirs)
            elif name == "longest_seconds":
                self.longest_seconds = max(mine, theirs)
            else:
                setattr(self, name, mine + theirs)


class WorkerStats(QueueWork, kw_only=True):
    """The work of a worker since its start on all queues, and on each of ``queues``.

    ``troubles`` names the activities that do not work at present.
    """

    collisions: Annotated[int, "Visits that another process forestalled."] = 0
    replaced: Annotated[int, "Child processes that died or were killed."] = 0
    recycled: Annotated[int, "Child processes replaced for their messages or their memory."] = 0
    unsettled: Annotated[int, "Messages whose end the store has not confirmed yet."] = 0
    troubles: Annotated[tuple[str, ...], "Activities that do not work."] = ()
    queues: dict[str, QueueWork] = {}


# Fields that go down too; the others are counters and histograms.
GAUGES: Final = {"in_progress", "prefetched", "longest_seconds", "unsettled", "troubles"}


class WorkerCounters:
    """The counters of one worker, and its activities that may be in trouble. Thread-safe."""

    def __init__(
        self, clock: Clock, on_error: Callable[[Exception], None], queues: Sequence[str] = ()
    ) -> None:
        """``on_error`` is called with the error of each try of an activity that failed."""
        self._clock = clock
        self._on_error = on_error
        self._activities: list[Activity] = []
        self._lock = threading.Lock()
        # Counters of the worker as a whole.
        self._counts: Counter[str] = Counter()
        self._queues = {queue: QueueWork() for queue in queues}
        # By what all receipts of a queue begin with.
        self._by_receipt: dict[str, QueueWork] = {}
        self._failure_kinds: set[str] = set()

    def activity(self, name: str) -> Activity:
        """Return a new activity of the worker."""
        self._activities.append(Activity(name, self._clock, self._on_error))
        return self._activities[-1]

    def add(self, name: str, count: int = 1, *, queue: str | None = None) -> None:
        """Raise a counter of the worker, or of a queue."""
        with self._lock:
            if queue is None:
                self._counts[name] += count
            else:
                work = self._of(queue)
                setattr(work, name, getattr(work, name) + count)

    def reach(self, name: str, count: int) -> None:
        """Raise a counter to a count that is kept elsewhere; several threads may read it there."""
        with self._lock:
            self._counts[name] = max(self._counts[name], count)

    def add_claimed(self, deliveries: Sequence[Delivery], *, lease_ms: int) -> None:
        """Count messages of a claim with this lease; the lag of a first attempt is its age."""
        if not deliveries:
            return
        with self._lock:
            work = self._of(deliveries[0].queue)
            self._by_receipt[deliveries[0].receipt[:RECEIPT_QUEUE_CHARS]] = work
            work.claimed += len(deliveries)
            for each in deliveries:
                if each.attempts == 1:
                    # By the store's clock, which has both times, and not by this machine's.
                    claimed_at_ms = each.lease_deadline_ms - lease_ms
                    lag_ms = max(0, claimed_at_ms - each.published_at_ms)
                    work.lag_seconds.add(lag_ms / 1000)

    def add_handled(self, delivery: Delivery, settlement: Settlement, seconds: float) -> None:
        """Count a handler's end; log its failure, the first of each kind with its traceback."""
        with self._lock:
            work = self._of(delivery.queue)
            work.handler_seconds.add(seconds)
            if not settlement.failed:
                return
            work.failed += 1
            work.failed_by_attempt.add(delivery.attempts)
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
        refused = 0
        with self._lock:
            for each in outcomes:
                work = self._by_receipt.get(each.receipt[:RECEIPT_QUEUE_CHARS]) or self._of("")
                if not each.ok:
                    refused += 1
                    work.stale += 1
                elif action is Action.ACK:
                    work.processed += 1
                else:
                    work.released += 1
                    work.exhausted += each.status is OutcomeStatus.FAILED
        return refused

    def _of(self, queue: str) -> QueueWork:
        work = self._queues.get(queue)
        if work is None:
            work = self._queues[queue] = QueueWork()
        return work

    def snapshot(
        self,
        running: Iterable[tuple[str, float]] = (),
        waiting: Iterable[str] = (),
        *,
        unsettled: int = 0,
    ) -> WorkerStats:
        """Return the counters, with the messages held now.

        ``running`` has the queue of each handler that runs, and for how many seconds it has.
        ``waiting`` has the queue of each message that has not begun.
        """
        queues: dict[str, QueueWork] = {}
        with self._lock:
            for queue, work in self._queues.items():
                queues[queue] = QueueWork()
                queues[queue].add_all(work)
            stats = WorkerStats(unsettled=unsettled, queues=queues)
            for name, count in self._counts.items():
                setattr(stats, name, count)
        for queue in waiting:
            queues.setdefault(queue, QueueWork()).prefetched += 1
        for queue, seconds in running:
            work = queues.setdefault(queue, QueueWork())
            work.in_progress += 1
            work.longest_seconds = max(work.longest_seconds, seconds)
        stats.troubles = tuple(each.name for each in self._activities if each.in_trouble)
        for work in queues.values():
            stats.add_all(work)
        return stats


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
        pause_ms = backoff_ms(PAUSES, self._failures, self._clock.random)
        return min(pause_ms, DAMAGED_PAUSE_MS) if isinstance(error, StoreDamaged) else pause_ms


@contextmanager
def serve_metrics(stats: Callable[[], WorkerStats], host: str, port: int) -> Iterator[int]:
    """Serve the Prometheus page inside ``with``; give the port: a free one if 0 was asked for."""
    with needs_extra("server", "a worker's page of metrics"):
        import prometheus_client as prometheus  # noqa: PLC0415

    registry = prometheus.CollectorRegistry(auto_describe=False)
    registry.register(WorkerCollector(stats))
    prometheus.ProcessCollector(registry=registry)
    server, thread = prometheus.start_http_server(port, addr=host, registry=registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class WorkerCollector:
    """Gives prometheus-client the series of a worker."""

    def __init__(self, stats: Callable[[], WorkerStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """Give every series."""
        from prometheus_client import core  # noqa: PLC0415 - an extra

        stats = self._stats()
        for name, hint in get_type_hints(WorkerStats, include_extras=True).items():
            if name == "queues":
                continue
            by_queue = name in QueueWork.__struct_fields__
            kind: Any = core.GaugeMetricFamily if name in GAUGES else core.CounterMetricFamily
            if isinstance(getattr(stats, name), Histogram):
                kind = core.HistogramMetricFamily
            labels = ["queue"] if by_queue else []
            family = kind(f"penstock_worker_{name}", hint.__metadata__[0], labels=labels)
            for queue, work in stats.queues.items() if by_queue else [("", stats)]:
                found = getattr(work, name)
                if isinstance(found, Histogram):
                    family.add_metric([queue], found.cumulated(), found.sum)
                else:
                    count = len(found) if isinstance(found, tuple) else found
                    family.add_metric([queue] if by_queue else [], count)
            yield family
