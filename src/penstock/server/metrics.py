"""The counters of a server, for Prometheus, and its access log.

Requests and connections are counted as they happen. A page never waits for the store:
:meth:`Metrics.read_store` reads the store's figures apart, and the page shows their age. The number
of series is bounded: the deepest queues have series of their own, the rest are summed under
``queue="(others)"``.
"""

from __future__ import annotations

import heapq
import logging
import threading
from bisect import bisect_left
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from penstock import limits
from penstock.errors import PenstockError, QueueNotFound, StoreDamaged, needs_extra
from penstock.model import QueueStats

with needs_extra("server", "the server"):
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.core import Metric

    from penstock.broker.broker import Broker

# Logs the client, its key, the queue, the outcome and the duration of a request: never a payload,
# an attribute or a secret.
access: Final = logging.getLogger("penstock.access")
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OTHERS: Final = "(others)"
BOUNDS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
_BUCKETS: Final = [*map(str, BOUNDS), "+Inf"]
# Clients name operations in some protocols: no client may grow the table by inventing some.
_MAX_SERIES: Final = 1_000
_STATES: Final = ("available", "delayed", "in_flight", "done", "failed")
_TOTALS: Final = {
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
_STORE: Final = {
    "published_total": "Messages published.",
    "duplicates_total": "Messages published again within the dedup window.",
    "unrouted_total": "Messages that no queue wanted.",
    "quarantined_total": "Records that did not decode.",
    "healed_total": "Records mended since the store was opened.",
    "stale_receipts_total": "Receipts refused since the store was opened.",
    "unreadable_total": "Unreadable messages that claims passed over since the store was opened.",
}
# Of stores that processes share, of which others have no series.
CONTENTION: Final = {
    "collisions": ("collisions", "Zones that another process came to before a claim did."),
    "collected": ("pointers_collected", "Pointers of empty zones that were removed."),
    "repeated": ("transactions_repeated", "Transactions that the database had undone."),
    "reconnected": ("reconnects", "Tries made again because the database did not answer."),
    "statements": ("statements", "Statements sent to the database."),
}

# When the last backup of this process's store was made, in seconds since the epoch; 0: not known.
_last_backup: float = 0.0


# A gauge of the server: name, meaning and value; with a label, a value for each of the label's.
Gauge: TypeAlias = tuple[str, str, float] | tuple[str, str, dict[str, int], str]


class _Series:
    """A histogram: plain numbers, so that counting costs next to nothing."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * len(_BUCKETS)
        self.seconds = 0.0

    def cumulated(self) -> list[tuple[str, float]]:
        total, pairs = 0, []
        for bound, count in zip(_BUCKETS, self.counts, strict=True):
            total += count
            pairs.append((bound, float(total)))
        return pairs


class Metrics:
    """The counters of one server, and the page that shows them."""

    def __init__(
        self, *, queues: int = limits.MAX_METRIC_QUEUES, access_level: int = logging.DEBUG
    ) -> None:
        """``access_level``: the level at which every request is logged."""
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        self._queues = queues
        self._access_level = access_level
        self._lock = threading.Lock()
        self._requests: dict[tuple[str, str, str], _Series] = {}
        self._refused: dict[str, int] = {}
        self._gauges: Callable[[], Iterable[Gauge]] = list
        self._broker: Broker | None = None
        self._seconds: Callable[[], float] = lambda: 0.0
        # The store's last figures, and when it gave them; nothing while it can't be asked.
        self._figures: tuple[list[Metric], float] | None = None

    # --- counting, from any thread -----------------------------------------------------------

    def request(
        self,
        protocol: str,
        operation: str,
        seconds: float,
        outcome: str,
        key_id: str = "",
        address: str = "",
        queue: object = "",
    ) -> None:
        """Count a request, and log it; the outcome is ``ok`` or the name of an error.

        ``queue`` is a name, the URL of a queue, or a native request that may name one.
        """
        key = (protocol, operation, outcome)
        with self._lock:
            series = self._requests.get(key)
            if series is None:
                if len(self._requests) >= _MAX_SERIES:
                    key = (protocol, OTHERS, OTHERS)
                series = self._requests.setdefault(key, _Series())
            series.counts[bisect_left(BOUNDS, seconds)] += 1
            series.seconds += seconds
        if access.isEnabledFor(self._access_level):
            fields = {
                "protocol": protocol,
                "operation": operation,
                "queue": _queue_named(queue),
                "key": key_id,
                "address": address,
                "status": outcome,
                "us": round(seconds * 1_000_000),
            }
            access.log(self._access_level, "request", extra={"fields": fields})

    def refused(self, protocol: str) -> None:
        """Count a connection that was turned away: there were too many, or it was too slow."""
        with self._lock:
            self._refused[protocol] = self._refused.get(protocol, 0) + 1

    # --- showing -----------------------------------------------------------------------------

    def watch(
        self,
        broker: Broker,
        *,
        seconds: Callable[[], float],
        gauges: Callable[[], Iterable[Gauge]] = list,
    ) -> None:
        """Show the state of a broker too, and the gauges that a server gives when it is asked."""
        self._broker, self._seconds, self._gauges = broker, seconds, gauges

    def read_store(self) -> None:
        """Ask the store about every queue, for the pages to come; call it from a thread."""
        if self._broker is None:
            return
        try:
            figures = [*_store(self._broker), *_by_queue(self._broker, self._queues)]
        except PenstockError:
            self._figures = None
        else:
            self._figures = figures, self._seconds()

    def page(self) -> bytes:
        """Write the page; call it from a thread, since that takes a while."""
        page: bytes = generate_latest(self.registry)
        return page

    def collect(self) -> Iterator[Metric]:
        """Give every series, as prometheus-client asks for them."""
        with self._lock:
            requests = [
                (key, each.cumulated(), each.seconds) for key, each in self._requests.items()
            ]
            refused = dict(self._refused)
        histogram = HistogramMetricFamily(
            "penstock_request_seconds",
            "Requests, by how long they took until they were answered.",
            labels=("protocol", "operation", "outcome"),
        )
        for key, buckets, seconds in sorted(requests):
            histogram.add_metric(key, buckets, seconds)
        yield histogram
        about = "Connections refused, or closed to make room."
        yield _counter("connections_refused", about, refused, "protocol")
        for gauge in self._gauges():
            yield _gauge(*gauge)
        if _last_backup:
            about = "When the last backup was made, in seconds since the epoch."
            yield _gauge("last_backup_timestamp_seconds", about, _last_backup)
        if self._broker is not None:
            yield from self._collect_store(self._broker)

    def _collect_store(self, broker: Broker) -> Iterator[Metric]:
        sound, figures = healthy(broker), self._figures
        contention, free = broker.contention(), broker.free_bytes()
        if contention is not None:
            for field, (name, about) in CONTENTION.items():
                yield _counter(name, about, getattr(contention, field))
        if free is not None:
            yield _gauge("store_free_bytes", "Free bytes on the disk of a RocksDB store.", free)
        yield _gauge("store_healthy", "1 if the store answers and syncing works.", sound)
        # Of a store that can't be asked old figures would pass for present ones.
        if sound and figures is not None:
            yield from figures[0]
            age = max(0.0, self._seconds() - figures[1])
            about = "How long ago the store was asked for its figures."
            yield _gauge("store_figures_age_seconds", about, age)


def _queue_named(queue: object) -> str:
    """Return the name of a request's queue; cut, since clients send what they like."""
    if not isinstance(queue, str):
        of_queue = type(queue).__name__.endswith("Queue")
        queue = getattr(queue, "name" if of_queue else "queue", None)
    return str(queue or "").rstrip("/").rpartition("/")[2][: limits.MAX_QUEUE_NAME_CHARS]


def _family(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    about: str,
    value: Any,
    label: str = "",
) -> Metric:
    """Make a family of one number; with ``label``, of a number for each of the label's values."""
    if not label:
        return kind(f"penstock_{name}", about, value)
    family = kind(f"penstock_{name}", about, labels=[label])
    for each, number in value.items():
        family.add_metric([each], number)
    return family


_gauge: Final = partial(_family, GaugeMetricFamily)
_counter: Final = partial(_family, CounterMetricFamily)


def _by_queue(broker: Broker, most: int) -> Iterator[Metric]:
    """Give the series of queues: of the deepest each, of the rest their sum."""
    counted: list[QueueStats] = []
    unreadable = 0
    # Queue by queue, so that others get in between.
    for spec in broker.queues():
        try:
            counted.append(broker.stats(spec.name))
        except QueueNotFound:
            continue
        except StoreDamaged:
            unreadable += 1
    yield _gauge("queues", "Queues of the store.", len(counted) + unreadable)
    yield _gauge("queues_unreadable", "Queues whose figures can't be read.", unreadable)
    shown = _deepest(counted, most)
    depth = GaugeMetricFamily(
        "penstock_queue_depth", "Messages in a queue by state.", labels=["queue", "state"]
    )
    for stats in shown:
        for state in _STATES:
            depth.add_metric([stats.queue, state], getattr(stats, state))
    yield depth
    ages = {stats.queue: (stats.oldest_age_ms or 0) / 1000 for stats in shown}
    yield _gauge("queue_oldest_seconds", "Age of the oldest waiting message.", ages, "queue")
    for field, about in _TOTALS.items():
        totals = {stats.queue: getattr(stats, field) for stats in shown}
        yield _counter(f"queue_{field}", about, totals, "queue")


def _deepest(stats: list[QueueStats], most: int) -> list[QueueStats]:
    """Return the deepest queues by name, and behind them the sum of the rest."""
    if len(stats) <= most:
        return stats
    deepest = heapq.nlargest(most, stats, key=lambda s: (s.available + s.in_flight, s.queue))
    named = {each.queue for each in deepest}
    rest = [each for each in stats if each.queue not in named]
    sums = {
        field: sum(getattr(each, field) or 0 for each in rest)
        for field in QueueStats.__struct_fields__
        if field not in {"queue", "oldest_age_ms"}
    }
    oldest = max(each.oldest_age_ms or 0 for each in rest)
    others = QueueStats(queue=OTHERS, oldest_age_ms=oldest, **sums)
    return [*sorted(deepest, key=lambda each: each.queue), others]


def _store(broker: Broker) -> Iterator[Metric]:
    stats = broker.store_stats()
    for field, about in _STORE.items():
        yield _counter(field, about, getattr(stats, field))
    log = broker.log_stats()
    behind = {
        str(number): max(0, log.end - cursor) if log.routing == "pipeline" else 0
        for number, cursor in sorted(log.cursors.items())
    }
    yield _gauge("routing_lag", "Messages of a log that are not routed yet.", behind, "log")
    yield _gauge("log_messages", "Messages in the metadata log.", log.kept)
    cost = broker.durability()
    yield _counter("syncs", "Calls of fsync.", cost.syncs)
    yield _counter("synced_commits", "Commits that syncs have covered.", cost.commits)
    yield _counter("sync_seconds", "Seconds spent in syncs.", cost.seconds)


def note_backup(at_seconds: float) -> None:
    """Note that a backup of this process's store was made, at so many seconds since the epoch."""
    global _last_backup  # noqa: PLW0603 - a process serves one store, and backups know no server
    _last_backup = max(_last_backup, at_seconds)


def healthy(broker: Broker) -> bool:
    """Whether the store is open, answers, and makes commits durable; never waits."""
    return broker.outage is None and broker.failure is None
