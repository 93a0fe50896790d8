"""Counts and latencies of a broker's verbs, for a program that embeds the broker.

Nothing is measured until a program asks for the first time: then each verb of that broker gets a
function around it that counts and times its calls. A server counts requests itself.
"""

from __future__ import annotations

import threading
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.errors import InvalidInput, PenstockError
from penstock.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

VERBS: Final = (
    *("publish", "send", "claim", "ack", "release", "extend"),
    *("redrive", "move", "purge", "trim", "sweep", "check", "checkpoint"),
    *("create_queue", "update_queue", "delete_queue", "queue", "queues"),
    *("browse", "attempts", "explain", "stats", "store_stats", "info"),
    *("log_stats", "read_log", "configure_log", "assign", "take_epoch", "backfill"),
)
# The outcome of calls that raised an error of another library, or of a caller's own function.
OTHERS: Final = "(others)"


class VerbMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of a verb since they are counted.

    ``errors`` has the number of calls that raised, by the name of the error; ``buckets`` how many
    calls took up to so many seconds. The wait of a claim counts.
    """

    calls: int
    errors: dict[str, int]
    seconds: float
    buckets: dict[float, int]


class VerbTimes:
    """Times the calls of a broker's verbs, from when it is made."""

    def __init__(self, broker: object, seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        # By verb and outcome, which is "ok" or the name of an error.
        self._times: dict[tuple[str, str], Histogram] = {}
        # A verb that another verb calls is no call of the program.
        self._inside = threading.local()
        for verb in VERBS:
            setattr(broker, verb, self._timed(verb, getattr(broker, verb)))

    def _timed(self, verb: str, call: Callable[..., Any]) -> Callable[..., Any]:
        inside, seconds = self._inside, self._seconds

        @wraps(call)
        def timed(*values: Any, **named: Any) -> Any:
            if getattr(inside, "verb", False):
                return call(*values, **named)
            outcome, begin = "ok", seconds()
            try:
                inside.verb = True
                return call(*values, **named)
            except BaseException as error:
                outcome = type(error).__name__ if isinstance(error, PenstockError) else OTHERS
                raise
            finally:
                inside.verb = False
                self._note((verb, outcome), seconds() - begin)

        return timed

    def _note(self, key: tuple[str, str], seconds: float) -> None:
        with self._lock:
            times = self._times.get(key)
            if times is None:
                times = self._times[key] = Histogram.over()
            times.add(seconds)

    def _copied(self) -> dict[tuple[str, str], Histogram]:
        with self._lock:
            return {key: self._times[key].copy() for key in sorted(self._times)}

    def read(self) -> dict[str, VerbMetrics]:
        """Return the metrics of each verb that was called."""
        totals: dict[str, Histogram] = {}
        errors: dict[str, dict[str, int]] = {}
        for (verb, outcome), times in self._copied().items():
            totals.setdefault(verb, Histogram.over()).add_all(times)
            counts = errors.setdefault(verb, {})
            if outcome != "ok":
                counts[outcome] = times.count
        return {
            verb: VerbMetrics(
                calls=total.count,
                errors=errors[verb],
                seconds=total.sum,
                buckets={float(bound): int(count) for bound, count in total.cumulated()},
            )
            for verb, total in totals.items()
        }

    def register(self, registry: CollectorRegistry) -> None:
        """Let a registry of Prometheus show the metrics."""
        try:
            registry.register(self)
        except ValueError:
            raise InvalidInput(
                "this registry shows the verbs of a broker already: give each broker a registry "
                "of its own, and each registry to metrics() once"
            ) from None

    def describe(self) -> list[Metric]:
        """Name the metrics, as prometheus-client asks for them."""
        return [_family()]

    def collect(self) -> Iterator[Metric]:
        """Give every series, as prometheus-client asks for them."""
        family = _family()
        for key, times in self._copied().items():
            family.add_metric(key, times.cumulated(), times.sum)
        yield family


def _family() -> Any:
    # The caller that has a registry has the library.
    from prometheus_client.core import HistogramMetricFamily  # noqa: PLC0415 - of an extra

    about = "Calls of the broker's verbs, by how long they took."
    return HistogramMetricFamily("penstock_verb_seconds", about, labels=("verb", "outcome"))
