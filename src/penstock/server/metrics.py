"""The counters of a server, for Prometheus, and its access log.

Requests and connections are counted as they happen. A page never waits for the store:
:meth:`Metrics.read_store` reads the store's figures apart, and the page shows their age. The number
of series is bounded: :mod:`penstock.server.queue_series` has those of queues.
"""

from __future__ import annotations

import logging
import platform
import threading
from bisect import bisect_left
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import penstock
from penstock import limits
from penstock.errors import PenstockError, needs_extra
from penstock.histogram import SECONDS, Histogram
from penstock.server.queue_series import OTHERS, QueueSeries
from penstock.server.refusals import Refusals

with needs_extra("server", "the server"):
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
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
# Clients name operations in some protocols: no client may grow the table by inventing some.
_MAX_SERIES: Final = 1_000
_STORE: Final = {
    "published_total": "Messages published.",
    "duplicates_total": "Messages published again within the dedup window.",
    "unrouted_total": "Messages that no queue wanted.",
    "quarantined_total": "Records that did not decode.",
    "healed_total": "Records mended since the store was opened.",
    "stale_receipts_total": "Receipts refused since the store was opened.",
    "unreadable_total": "Unreadable messages that claims passed over since the store was opened.",
}
_REFUSED: Final = {
    "connections_refused": "Connections refused, or closed to make room.",
    "handshakes_failed": "TLS handshakes that failed; those of Flight are not known.",
    "logins_refused": "Logins and signatures that were refused.",
}
# Of stores that processes share, of which others have no series.
CONTENTION: Final = {
    "collisions": ("collisions", "Zones that another process came to before a claim did."),
    "collected": ("pointers_collected", "Pointers of empty zones that were removed."),
    "repeated": ("transactions_repeated", "Transactions that the database had undone."),
    "reconnected": ("reconnects", "Tries made again because the database did not answer."),
    "statements": ("statements", "Statements sent to the database."),
}

# A gauge of the server: name, meaning and value; with a label, a value for each of the label's.
# Of the label ``queue`` only some have series of their own.
Gauge: TypeAlias = tuple[str, str, float] | tuple[str, str, dict[str, int], str]
ROLES: Final = ("owner", "standby")


class Metrics:
    """The counters of one server, and the page that shows them."""

    def __init__(
        self, *, queues: int = limits.MAX_METRIC_QUEUES, access_level: int = logging.DEBUG
    ) -> None:
        """``access_level``: the level at which every request is logged."""
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        self.queues = QueueSeries(queues)
        # Whether this process owns the store, shares it with others, or stands by for it.
        self.role = "owner"
        # How late timers of the event loop are; whoever watches the loop adds to it.
        self.loop_lag = Histogram.over()
        self._access_level = access_level
        self._lock = threading.Lock()
        self._requests: dict[tuple[str, str, str], Histogram] = {}
        self._claim_waits: dict[str, Histogram] = {}
        self._refused: dict[str, dict[str, int]] = {name: {} for name in _REFUSED}
        self.refusals = Refusals(self.refused)
        # Gives the gauges of the process when a page is made.
        self.gauges: Callable[[], Iterable[Gauge]] = list
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
        waited_s: float = 0.0,
    ) -> None:
        """Count a request, and log it; the outcome is ``ok`` or the name of an error.

        ``queue`` is a name, the URL of a queue, or a native request that may name one. For
        ``waited_s`` of the seconds a claim was parked: those are counted apart.
        """
        key = (protocol, operation, outcome)
        with self._lock:
            series = self._requests.get(key)
            if series is None:
                if len(self._requests) >= _MAX_SERIES:
                    key = (protocol, OTHERS, OTHERS)
                series = self._requests.setdefault(key, Histogram.over())
            # Every request comes here: without a call.
            worked_s = seconds - waited_s
            series.counts[bisect_left(SECONDS, worked_s)] += 1
            series.sum += worked_s
            if waited_s:
                self._claim_waits.setdefault(protocol, Histogram.over()).add(waited_s)
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

    def refused(self, protocol: str, what: str = "connections_refused") -> None:
        """Count what was refused: a connection, since there were too many, or another series."""
        with self._lock:
            counts = self._refused[what]
            counts[protocol] = counts.get(protocol, 0) + 1

    # --- showing -----------------------------------------------------------------------------

    def watch(self, broker: Broker, *, seconds: Callable[[], float]) -> None:
        """Show the state of a broker too."""
        self._broker, self._seconds = broker, seconds

    def read_store(self) -> None:
        """Ask the store about every queue, for the pages to come; call it from a thread."""
        if self._broker is None:
            return
        try:
            figures = [*_store(self._broker), *self.queues.look(self._broker)]
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
            requests = {key: each.copy() for key, each in sorted(self._requests.items())}
            waits = {(key,): each.copy() for key, each in sorted(self._claim_waits.items())}
            refused = {name: dict(counts) for name, counts in self._refused.items()}
        about = "Requests, by how long they took; without the time for which claims were parked."
        yield _histogram("request", about, requests, "protocol", "operation", "outcome")
        about = "Claims that were parked until there were messages, by how long they were."
        yield _histogram("claim_wait", about, waits, "protocol")
        yield self.queues.waits()
        about = "How late timers of the event loop are."
        yield _histogram("event_loop_lag", about, {(): self.loop_lag.copy()})
        yield _build_info()
        roles = {role: int(role == self.role) for role in ROLES}
        yield _gauge("role", "1 for the role of this server, 0 for the others.", roles, "role")
        for name, about in _REFUSED.items():
            yield _counter(name, about, refused[name], "protocol")
        for name, about, value, *label in self.gauges():
            if label == ["queue"] and isinstance(value, dict):
                yield _gauge(name, about, self.queues.grouped(value), *label)
            else:
                yield _gauge(name, about, value, *label)
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
            about = "Bytes of each table of a RocksDB store, and of its write-ahead log."
            yield _gauge("store_used_bytes", about, broker.used_bytes(), "table")
        about = "How long calls waited for the store that did not have it at once."
        yield _histogram("store_lock_wait", about, {(): broker.lock_waits()})
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


def _histogram(
    name: str, about: str, found: dict[Any, Histogram], *labels: str
) -> HistogramMetricFamily:
    """Make a family of durations: a histogram for each tuple of the labels' values."""
    family = HistogramMetricFamily(f"penstock_{name}_seconds", about, labels=labels)
    for key, each in found.items():
        family.add_metric(key, each.cumulated(), each.sum)
    return family


def _build_info() -> Metric:
    labels = {"version": penstock.__version__, "python": platform.python_version()}
    about = "1; its labels tell the versions."
    family = GaugeMetricFamily("penstock_build_info", about, labels=[*labels])
    family.add_metric([*labels.values()], 1)
    return family


_gauge: Final = partial(_family, GaugeMetricFamily)
_counter: Final = partial(_family, CounterMetricFamily)


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
    yield _counter("log_appended", "Offsets of the metadata log that were given.", log.end)
    yield _counter("log_trimmed", "Offsets of the log that retention has removed.", log.earliest)
    cost = broker.durability()
    yield _histogram("sync", "Syncs of the store, by how long they took.", {(): cost.times})
    yield _counter("synced_commits", "Commits that syncs have covered.", cost.commits)


def healthy(broker: Broker) -> bool:
    """Whether the store is open, answers, and makes commits durable; never waits."""
    return broker.outage is None and broker.failure is None
