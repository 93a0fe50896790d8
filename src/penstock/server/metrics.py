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
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from penstock import limits
from penstock.errors import PenstockError, QueueNotFound, StoreDamaged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client.core import Metric

    from penstock.broker.broker import Broker
    from penstock.model import QueueStats
    from penstock.server.connections import Connections

# Logs protocol, operation, key, outcome and duration of a request: never a payload, an attribute
# or a secret.
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
    "unreadable_total": "Messages passed over by claims since then: the disk can't read them.",
}
# Of stores that processes share, of which others have no series.
_CONTENTION: Final = {
    "collisions": ("collisions", "Zones that another process came to before a claim did."),
    "collected": ("pointers_collected", "Pointers of empty zones that were removed."),
    "repeated": ("transactions_repeated", "Transactions that the database had undone."),
    "reconnected": ("reconnects", "Tries made again because the database did not answer."),
    "statements": ("statements", "Statements sent to the database."),
}


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
        self._connections: Callable[[], dict[str, int]] = dict
        self._refused: dict[str, int] = {}
        self._parked: Callable[[], int] = lambda: 0
        self._held: Connections | None = None
        self._broker: Broker | None = None
        self._seconds: Callable[[], float] = lambda: 0.0
        # The store's last figures, and when it gave them; nothing while it can't be asked.
        self._figures: tuple[list[Metric], float] | None = None

    # --- counting, from any thread -----------------------------------------------------------

    def request(
        self, protocol: str, operation: str, seconds: float, outcome: str, key_id: str = ""
    ) -> None:
        """Count a request; the outcome is ``ok`` or the name of an error."""
        key = (protocol, operation, outcome)
        with self._lock:
            series = self._requests.get(key)
            if series is None:
                if len(self._requests) >= _MAX_SERIES:
                    key = (protocol, "(others)", "(others)")
                series = self._requests.setdefault(key, _Series())
            series.counts[bisect_left(BOUNDS, seconds)] += 1
            series.seconds += seconds
        if access.isEnabledFor(self._access_level):
            fields = {
                "protocol": protocol,
                "operation": operation,
                "key": key_id,
                "status": outcome,
                "ms": round(seconds * 1000, 3),
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
        parked: Callable[[], int],
        connections: Callable[[], dict[str, int]],
        seconds: Callable[[], float],
        held: Connections | None = None,
    ) -> None:
        """Show the state of a broker too, how many claims wait, and connections by protocol.

        And of all connections how many there may be and what they hold.
        """
        self._broker, self._parked, self._connections = broker, parked, connections
        self._seconds, self._held = seconds, held

    def read_store(self) -> None:
        """Ask the store about every queue, for the pages to come; call it from a thread."""
        if self._broker is None:
            return
        try:
            figures = [*_store(self._broker), *self._by_queue(self._broker)]
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
        yield from self._edge()
        broker = self._broker
        if broker is None:
            return
        sound, figures = healthy(broker), self._figures
        contention, free = broker.contention(), broker.free_bytes()
        if contention is not None:
            for field, (name, about) in _CONTENTION.items():
                yield CounterMetricFamily(f"penstock_{name}", about, getattr(contention, field))
        if free is not None:
            yield GaugeMetricFamily("penstock_store_free_bytes", "Free on the store's disk.", free)
        yield GaugeMetricFamily(
            "penstock_store_healthy", "1 if the store answers and syncing works.", sound
        )
        # Of a store that can't be asked old figures would pass for present ones.
        if sound and figures is not None:
            yield from figures[0]
            yield GaugeMetricFamily(
                "penstock_store_figures_age_seconds",
                "How long ago the store was asked for its figures.",
                max(0.0, self._seconds() - figures[1]),
            )

    def _edge(self) -> Iterator[Metric]:
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
        yield _by_label(
            GaugeMetricFamily, "connections", "Open connections.", "protocol", self._connections()
        )
        yield _by_label(
            CounterMetricFamily,
            "connections_refused",
            "Connections turned away.",
            "protocol",
            refused,
        )
        yield GaugeMetricFamily("penstock_parked_claims", "Claims that wait.", self._parked())
        if self._held is not None:
            yield GaugeMetricFamily(
                "penstock_connections_max", "Connections that there may be.", self._held.most
            )
            yield GaugeMetricFamily(
                "penstock_buffered_bytes", "Sent by clients, and not done.", self._held.held_bytes
            )

    def _by_queue(self, broker: Broker) -> Iterator[Metric]:
        counted, unreadable = _stats(broker)
        largest, others = _ranked(counted, self._queues)
        yield GaugeMetricFamily("penstock_queues", "Queues.", len(counted) + unreadable)
        yield GaugeMetricFamily(
            "penstock_queues_unreadable", "Queues whose figures can't be read.", unreadable
        )
        shown = {each.queue: each for each in largest}
        if others is not None:
            shown[OTHERS] = others
        depth = GaugeMetricFamily(
            "penstock_queue_depth", "Messages in a queue by state.", labels=["queue", "state"]
        )
        for name, stats in shown.items():
            for state in _STATES:
                depth.add_metric([name, state], getattr(stats, state))
        yield depth
        ages = {name: (stats.oldest_age_ms or 0) / 1000 for name, stats in shown.items()}
        about = "Age of the oldest message that waits."
        yield _by_label(GaugeMetricFamily, "queue_oldest_seconds", about, "queue", ages)
        for field, about in _TOTALS.items():
            totals = {name: getattr(stats, field) for name, stats in shown.items()}
            yield _by_label(CounterMetricFamily, f"queue_{field}", about, "queue", totals)


def _by_label(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    about: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    """Make a family with a series for each value of one label."""
    family = kind(f"penstock_{name}", about, labels=[label])
    for each, value in values.items():
        family.add_metric([each], value)
    return family


def _stats(broker: Broker) -> tuple[list[QueueStats], int]:
    """Count the messages of each queue, and the queues of which that can't be done."""
    stats = []
    unreadable = 0
    # Queue by queue, so that others get in between.
    for spec in broker.queues():
        try:
            stats.append(broker.stats(spec.name))
        except QueueNotFound:
            continue
        except StoreDamaged:
            unreadable += 1
    return stats, unreadable


def _ranked(stats: list[QueueStats], most: int) -> tuple[list[QueueStats], QueueStats | None]:
    """Split into the deepest, by name, and the sum of the rest."""
    if len(stats) <= most:
        return stats, None
    deepest = heapq.nlargest(most, stats, key=lambda s: (s.available + s.in_flight, s.queue))
    named = {each.queue for each in deepest}
    rest = [each for each in stats if each.queue not in named]
    kind = type(rest[0])
    sums = {
        field: sum(getattr(each, field) or 0 for each in rest)
        for field in kind.__struct_fields__
        if field not in {"queue", "oldest_age_ms"}
    }
    oldest = max(each.oldest_age_ms or 0 for each in rest)
    others = kind(queue=OTHERS, oldest_age_ms=oldest, **sums)
    return sorted(deepest, key=lambda each: each.queue), others


def _store(broker: Broker) -> Iterator[Metric]:
    stats = broker.store_stats()
    for field, about in _STORE.items():
        yield CounterMetricFamily(f"penstock_{field}", about, getattr(stats, field))
    log = broker.log_stats()
    behind = {
        str(number): max(0, log.end - cursor) if log.routing == "pipeline" else 0
        for number, cursor in sorted(log.cursors.items())
    }
    about = "Messages of a log that are not routed yet."
    yield _by_label(GaugeMetricFamily, "routing_lag", about, "log", behind)
    yield GaugeMetricFamily("penstock_log_messages", "Offsets kept.", log.kept)
    cost = broker.durability()
    yield CounterMetricFamily("penstock_syncs", "Syncs of the store.", cost.syncs)
    yield CounterMetricFamily(
        "penstock_synced_commits", "Commits made durable; over syncs: the group.", cost.commits
    )
    yield CounterMetricFamily("penstock_sync_seconds", "Time spent in syncs.", cost.seconds)


def healthy(broker: Broker) -> bool:
    """Whether the store is open, answers, and makes commits durable; never waits."""
    return broker.outage is None and broker.failure is None
