"""The counters of a server, for Prometheus, its access log, and the log of clients turned away.

Requests and connections are counted as they happen. A page never waits for the store:
:meth:`Metrics.read_store` reads the store's figures apart, and the page shows their age. The number
of series is bounded, whatever clients send and however many queues there are.
"""

from __future__ import annotations

import heapq
import logging
import platform
import threading
from bisect import bisect_left
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import penstock
from penstock import limits
from penstock.clock import SystemClock
from penstock.errors import PenstockError, QueueNotFound, StoreDamaged, needs_extra
from penstock.histogram import SECONDS, Histogram
from penstock.model import QueueStats
from penstock.server.shares import Shares

with needs_extra("server", "the server"):
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client.core import Metric

    from penstock.broker.broker import Broker

log = logging.getLogger(__name__)
# Logs the client, its key, the queue, the outcome and the duration of a request: never a payload,
# an attribute or a secret.
access: Final = logging.getLogger("penstock.access")
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OTHERS: Final = "(others)"
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
        versions = {(penstock.__version__, platform.python_version()): 1}
        yield _gauge(
            "build_info", "1; its labels tell the versions.", versions, "version", "python"
        )
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
    *labels: str,
) -> Metric:
    """Make a family of one number; with labels, of a number for each of their values."""
    if not labels:
        return kind(f"penstock_{name}", about, value)
    family = kind(f"penstock_{name}", about, labels=labels)
    for each, number in value.items():
        family.add_metric([each] if isinstance(each, str) else each, number)
    return family


def _histogram(
    name: str, about: str, found: dict[Any, Histogram], *labels: str
) -> HistogramMetricFamily:
    """Make a family of durations: a histogram for each tuple of the labels' values."""
    family = HistogramMetricFamily(f"penstock_{name}_seconds", about, labels=labels)
    for key, each in found.items():
        family.add_metric(key, each.cumulated(), each.sum)
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


# --- the series of queues -------------------------------------------------------------------------
#
# A queue gets series of its own while there is room for them, the deepest first, and keeps them
# until it is deleted: a series that comes and goes would make ``rate()`` wrong. The other queues
# are summed as ``queue="(others)"``. Their counters add up what has happened since the first look
# of this process, so that they never go down, whichever queues come, go or get series of their own.

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
        yield _gauge("queues", "Queues of the store.", count)
        yield _gauge("queues_unreadable", "Queues whose figures can't be read.", len(unreadable))
        shown = self._choose(counted, unreadable)
        depths = {(each.queue, state): getattr(each, state) for each in shown for state in STATES}
        yield _gauge("queue_depth", "Messages in a queue by state.", depths, "queue", "state")
        for field, (name, about) in AGES.items():
            ages = {each.queue: (getattr(each, field) or 0) / 1000 for each in shown}
            yield _gauge(f"queue_{name}", about, ages, "queue")
        for field, about in TOTALS.items():
            totals = {each.queue: getattr(each, field) for each in shown}
            yield _counter(f"queue_{field}", about, totals, "queue")

    def waits(self) -> Metric:
        """Give the histograms of waits."""
        about = "How long a message could have been claimed before it was: the first of each claim."
        with self._lock:
            shown = {(queue,): waits for queue, waits in sorted(self._waits.items())}
            if self._other_waits.count:
                shown[OTHERS,] = self._other_waits
            return _histogram("queue_wait", about, shown, "queue")

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


# --- clients that are turned away -----------------------------------------------------------------
#
# TLS handshakes that fail, and logins that are refused, are counted. Each is logged too, with the
# client's address and the id of its key, but the same line only once in a while, and only so many
# lines: strangers decide how many there are, and the counters tell it.

# Within so many seconds the same line is logged once.
WINDOW_SECONDS: Final = 60.0
# A secret is at least so long: an unknown id that is, may be one that was mistaken for an id.
_SECRET_CHARS: Final = 40


class Refusals:
    """The clients turned away; ``count`` is told protocol and series. Thread-safe."""

    def __init__(
        self, count: Callable[[str, str], None], seconds: Callable[[], float] | None = None
    ) -> None:
        self._count = count
        self._seconds = seconds or SystemClock().seconds
        self._lock = threading.Lock()
        self._logged: set[tuple[str, ...]] = set()
        self._lines = Shares("lines", limits.MAX_REFUSAL_LINES)
        self._until = 0.0

    def handshake(self, protocol: str, address: str, why: str) -> None:
        """Note a TLS handshake that failed."""
        self._count(protocol, "handshakes_failed")
        self._note("a TLS handshake failed", protocol=protocol, address=address, why=why)

    def login(self, protocol: str, address: str, key_id: str, why: str) -> None:
        """Note a login that was refused."""
        self._count(protocol, "logins_refused")
        shown = key_id if len(key_id) < _SECRET_CHARS else f"({len(key_id)} characters)"
        self._note("a login was refused", protocol=protocol, key=shown, address=address, why=why)

    def token(self, protocol: str, address: str, token: str | None) -> str:
        """Note a token that is not known, or that there was none; return why it was refused."""
        why = "the key is not known, or its secret is another" if token else "no key"
        self.login(protocol, address, id_of(token), why)
        return why

    def _note(self, message: str, **fields: str) -> None:
        fields = {name: value for name, value in fields.items() if value}
        # A client has another port each time.
        host = fields.get("address", "").rpartition(":")[0]
        line = (message, *({**fields, "address": host}).values())
        with self._lock:
            if self._seconds() >= self._until:
                self._until = self._seconds() + WINDOW_SECONDS
                self._logged.clear()
                self._lines = Shares("lines", limits.MAX_REFUSAL_LINES)
            if line in self._logged or not self._lines.fits(host):
                return
            self._logged.add(line)
            self._lines.take(host)
        log.warning(message, extra={"fields": fields})


def id_of(token: str | None) -> str:
    """Return the id of a token, ``ID:SECRET``, as far as it may be shown."""
    key_id, colon, _ = (token or "").partition(":")
    return "".join(each if each.isprintable() else "?" for each in key_id[:64]) if colon else ""
