"""A worker's counters as a Prometheus page, for ``penstock work --metrics``."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

    from penstock.worker.stats import Histogram, WorkerStats

__all__ = ["exposed"]

_COUNTERS: Final = {
    "claimed": "Messages claimed.",
    "processed": "Messages acked.",
    "failed": "Handlers that raised, were cut off or died.",
    "released": "Messages given back.",
    "exhausted": "Messages given back that were out of attempts.",
    "lost": "Leases that ended in this worker's hands.",
    "stale": "Acks and releases that the store refused.",
    "late": "Handlers that returned after their message was given back.",
    "collisions": "Visits that another process forestalled.",
    "replaced": "Child processes that died or were killed.",
}
_GAUGES: Final = {
    "in_progress": "Messages that are being worked on.",
    "prefetched": "Messages that wait for a free slot.",
    "unsettled": "Messages whose end the store has not confirmed yet.",
}
_HISTOGRAMS: Final = {
    "failed_by_attempt": "Failures, by the number of the attempt.",
    "lag_seconds": "Age of a message when it was first claimed.",
    "handler_seconds": "How long handlers took.",
}


class _Page:
    """What prometheus-client asks for the series."""

    def __init__(self, stats: Callable[[], WorkerStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, about in _COUNTERS.items():
            yield CounterMetricFamily(f"penstock_worker_{name}", about, getattr(stats, name))
        for name, about in _GAUGES.items():
            yield GaugeMetricFamily(f"penstock_worker_{name}", about, getattr(stats, name))
        yield GaugeMetricFamily(
            "penstock_worker_troubles", "Activities that do not work.", len(stats.troubles)
        )
        for name, about in _HISTOGRAMS.items():
            yield _histogram(f"penstock_worker_{name}", about, getattr(stats, name))


def _histogram(name: str, about: str, shown: Histogram) -> Metric:
    total, buckets = 0, []
    for bound, count in zip([*map(str, shown.bounds), "+Inf"], shown.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return HistogramMetricFamily(name, about, buckets=buckets, sum_value=shown.sum)


@contextmanager
def exposed(stats: Callable[[], WorkerStats], host: str, port: int) -> Iterator[int]:
    """Serve the page while inside; give the port, which is a free one if 0 was asked for."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(stats))
    server, thread = start_http_server(port, addr=host, registry=registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
