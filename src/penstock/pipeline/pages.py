"""The operations address of a pipeline: /health, /ready, /status and /metrics.

None wants a key: an address for operations is for those who may look. No page waits for Spark or
the broker: a thread asks the broker every few seconds how far routing is.
"""

from __future__ import annotations

import threading
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.errors import PenstockError, needs_extra
from penstock.flight.client import route_status
from penstock.pipeline.supervisor import unready
from penstock.server.http import Response
from penstock.server.http_connection import Http
from penstock.server.metrics import CONTENT_TYPE
from penstock.server.security import PageGuard

with needs_extra("server", "the operations address of a pipeline"):
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from prometheus_client.core import Metric

    from penstock.clock import Clock
    from penstock.flight.client import RouteStatus
    from penstock.flight.location import Location
    from penstock.pipeline.supervisor import Part
    from penstock.server.http import Handler, Request

_LOOK_SECONDS: Final = 5.0
# Counter of a part: its field, and its meaning.
_COUNTERS: Final = {
    "runs": "Runs of a part that succeeded; of routing, its micro-batches.",
    "failures": "Runs of a part that failed.",
    "restarts": "Starts of a part after a failure.",
    "rows": "Rows that a part has worked on: of the archive, those of all its tables.",
}


class RoutingWatch:
    """Asks the broker how far routing is, as long as the process runs."""

    def __init__(self, location: Location, back: Callable[[], None] = lambda: None) -> None:
        """``back`` is called when a broker answers again that did not."""
        self._location, self._back = location, back
        self._over = threading.Event()
        self.last: RouteStatus | None = None
        # Offsets that routing has passed since the first look.
        self.routed = 0
        self._routed_up_to: int | None = None

    def start(self) -> None:
        """Begin to ask."""
        threading.Thread(target=self._run, name="penstock-lag", daemon=True).start()

    def stop(self) -> None:
        """Ask no more."""
        self._over.set()

    def note(self, found: RouteStatus | None) -> None:
        """Take an answer; None: there was none, and an old one would pass for the present."""
        before, self.last = self.last, found
        if found is not None:
            if before is None:
                self._back()
            known = self._routed_up_to
            self.routed += max(0, found.routed_up_to - known) if known is not None else 0
            self._routed_up_to = found.routed_up_to

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self.note(route_status(self._location))
            except PenstockError:
                self.note(None)
            self._over.wait(_LOOK_SECONDS)


class Pages:
    """The pages of one process; parts come when Spark runs."""

    def __init__(self, clock: Clock) -> None:
        self.parts: Sequence[Part] = ()
        self.watch: RoutingWatch | None = None
        # Why nothing is ready, whatever the parts say.
        self.why = "Spark is starting"
        self._clock = clock
        self._began_ms = clock.now_ms()
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def listener(self, host: str, port: int) -> Http:
        """Return the listener of the pages, to be started on a loop."""
        routes: dict[tuple[str, str], Handler] = {
            ("GET", path): page
            for path, page in {
                "/health": _alive,
                # Kubernetes calls the page so.
                "/healthz": _alive,
                "/ready": self._ready,
                "/status": self._status,
                "/metrics": self._metrics,
            }.items()
        }
        missing = Response(404, b"/health, /ready, /status and /metrics are here\n")
        return Http(routes, lambda _: missing, host=host, port=port, guard=PageGuard(host))

    def _ready(self, _: Request) -> Response:
        lines = [self.why] if self.why else unready(self.parts)
        if not lines and self.watch is not None and self.watch.last is None:
            # The query waits for the broker, for minutes, before it fails.
            lines = ["the broker does not answer"]
        if lines:
            return Response(503, "".join(f"{each}\n" for each in lines).encode())
        return Response(body=b"ready\n")

    def _status(self, _: Request) -> Response:
        behind = self.watch.last.behind if self.watch is not None and self.watch.last else None
        body = {"parts": [part.status for part in self.parts], "routing_lag": behind}
        return Response(200, msgspec.json.encode(body), "application/json")

    def _metrics(self, _: Request) -> Response:
        return Response(body=generate_latest(self.registry), content_type=CONTENT_TYPE)

    def collect(self) -> Iterator[Metric]:
        """Give every series, as prometheus-client asks for them."""
        now_ms = self._clock.now_ms()
        for field, about in _COUNTERS.items():
            read = attrgetter(f"status.{field}")
            yield self._family(CounterMetricFamily, field, about, read)
        about = "Whether a part runs now: 1, or 0 while it waits."
        gauge = partial(self._family, GaugeMetricFamily)
        yield gauge("running", about, lambda part: part.status.state == "running")
        about = "Failures of a part since it last worked."
        yield gauge("failures_in_a_row", about, lambda part: part.tries)
        about = "How long ago a part last worked; before that, since the process began."
        yield gauge("last_success_age_seconds", about, lambda part: self._age(
            part.status.last_success_at, now_ms))  # fmt: skip
        family = HistogramMetricFamily(
            "penstock_pipeline_run_seconds",
            "Runs of a part, by how long they took; of routing, one micro-batch of each second.",
            labels=["part"],
        )
        for part in self.parts:
            family.add_metric([part.name], part.seconds.cumulated(), part.seconds.sum)
        yield family
        yield from self._of_broker(now_ms)

    def _of_broker(self, now_ms: int) -> Iterator[Metric]:
        watch = self.watch
        if watch is not None:
            about = "Offsets of the log that routing has passed since the process began."
            yield CounterMetricFamily("penstock_pipeline_routed", about, watch.routed)
            if watch.last is not None:
                about = "Messages that the pipeline has still to route."
                lag = watch.last.behind
                yield GaugeMetricFamily("penstock_pipeline_routing_lag", about, lag)
        for part in self.parts:
            if part.name == "archive":
                about = (
                    "How long ago the last run of the archive that succeeded began: what ended "
                    "before that, and is not to be kept, is archived."
                )
                age = self._age(part.succeeded_from_ms, now_ms)
                yield GaugeMetricFamily("penstock_pipeline_archive_lag_seconds", about, age)

    def _age(self, at_ms: int | None, now_ms: int) -> float:
        return max(0, now_ms - (self._began_ms if at_ms is None else at_ms)) / 1000

    def _family(self, kind: Any, name: str, about: str, value: Callable[[Part], float]) -> Metric:
        family = kind(f"penstock_pipeline_{name}", about, labels=["part"])
        for part in self.parts:
            family.add_metric([part.name], float(value(part)))
        made: Metric = family
        return made


def _alive(_: Request) -> Response:
    return Response(body=b"alive\n")
