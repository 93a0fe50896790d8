"""The figures of all queues, read by one thread and shared by everybody who looks.

While somebody looks, the thread asks about queue after queue, over and over, and works a twentieth
of the time: between two questions the others get in. While nobody does, it samples the store once a
minute, and of the queues as many as it can within 20 ms; those are the lines of the last hour.
Below are the filters of the templates: how numbers, times and lines are written.
"""

from __future__ import annotations

import logging
import math
import threading
from array import array
from datetime import UTC, datetime
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Final

import msgspec
from jinja2.filters import do_filesizeformat

from penstock import limits
from penstock.errors import PenstockError, QueueNotFound, StoreDamaged
from penstock.model import QueueStats
from penstock.server.batcher import FAR
from penstock.server.metrics import healthy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.broker.broker import Broker

log = logging.getLogger(__name__)

MINUTES: Final = 60
COUNTS: Final = ("available", "delayed", "in_flight", "failed")
# How long a look counts, and the pause between two passes over all queues meanwhile.
_WATCHED_SECONDS, _PASS_SECONDS = 60.0, 2.0
_IDLE_SECONDS, _IDLE_WORK_SECONDS = 60.0, 0.02
# The first pass after a while is not held back for so long, since somebody waits for it.
_EAGER_SECONDS, _SLICE_SECONDS = 0.1, 0.0005
# For each second of work: so long a pause, and so long until the queues are listed again.
_FIRST_PAUSE, _PAUSE = 1, 19
_LIST_PAUSE, _IDLE_LIST_PAUSE = 100, 10_000
# Rates are those of the last 10 to 20 seconds while somebody looks, otherwise of minutes.
_RATE_SECONDS, _OLD_SECONDS = 10.0, 150.0


class History:
    """A number for each minute of the last hour; minutes that nobody has noted are left out."""

    __slots__ = ("_minute", "_values")

    def __init__(self) -> None:
        self._values = array("f", [math.nan] * MINUTES)
        self._minute = 0

    def put(self, minute: int, value: float) -> None:
        """Note the number of a minute."""
        for passed in range(max(self._minute + 1, minute - MINUTES + 1), minute):
            self._values[passed % MINUTES] = math.nan
        self._minute = max(self._minute, minute)
        self._values[minute % MINUTES] = value

    def values(self, minute: int) -> list[float]:
        """Return the numbers up to a minute, the oldest first; NaN: none is known."""
        known = range(self._minute - MINUTES + 1, self._minute + 1)
        wanted = range(minute - MINUTES + 1, minute + 1)
        return [self._values[at % MINUTES] if at in known else math.nan for at in wanted]


class QueueFigures(msgspec.Struct, eq=False):
    """The last figures of a queue; rates are messages in a second, None while not known."""

    stats: QueueStats
    came: float | None = None
    done: float | None = None
    history: History | None = None
    # Up to two samples that rates are counted from: seconds, messages that came, and done ones.
    samples: list[tuple[float, int, int]] = []


def totals_of(figures: Iterable[QueueFigures]) -> dict[str, float]:
    """Sum the figures of some queues."""
    known = list(figures)
    return {
        "queues": len(known),
        **{name: sum(getattr(each.stats, name) for each in known) for name in COUNTS},
        "came": sum(each.came or 0 for each in known),
        "done": sum(each.done or 0 for each in known),
    }


class Figures:
    """The last figures of every queue, and the thread that reads them."""

    def __init__(self, broker: Broker, seconds: Callable[[], float]) -> None:
        self._broker = broker
        self._seconds = seconds
        self._far = broker.info().design in FAR
        self.queues: dict[str, QueueFigures] = {}
        # Names of all queues; more than there are figures of, until a pass is complete.
        self.names: list[str] = []
        self.complete = False
        # Of all queues, since the last pass.
        self.totals = totals_of([])
        # Messages published in a second, and messages in all queues.
        self.published, self.waiting = History(), History()
        # Of a store that a pipeline routes: messages routed in a second, and those still to route.
        self.routed, self.lag = History(), History()
        self.routed_rate: float | None = None
        # By what is counted: when it was looked at, and how many there were.
        self._samples: dict[str, tuple[float, int]] = {}
        self._looked = self._list_at = -math.inf
        self._next = 0
        self._read, self._wake, self._stopped = (threading.Event() for _ in range(3))

    def start(self) -> None:
        """Begin to sample."""
        threading.Thread(target=self._run, name="penstock-figures", daemon=True).start()

    def stop(self) -> None:
        """Ask the broker no more."""
        self._stopped.set()
        self._wake.set()

    @property
    def minute(self) -> int:
        """The present minute of histories."""
        return int(self._seconds() // 60)

    @property
    def _watched(self) -> bool:
        return self._seconds() < self._looked + _WATCHED_SECONDS

    def look(self, seconds: float = 0.0) -> None:
        """Note that somebody looks; from a thread, wait so long if there are no fresh figures."""
        before, self._looked = self._watched, self._seconds()
        if not before:
            self._read.clear()
            self._wake.set()
        self._read.wait(seconds)

    def note(self, stats: QueueStats) -> QueueFigures:
        """Take figures of a queue that were just read, and return what is known of it."""
        now, came = self._seconds(), stats.enqueued_total + stats.moved_in_total
        figures = self.queues.setdefault(stats.queue, QueueFigures(stats))
        figures.stats = stats
        if figures.history is None and len(self.queues) <= limits.CONSOLE_MAX_HISTORIES:
            figures.history = History()
        if figures.history is not None:
            figures.history.put(self.minute, stats.available + stats.delayed + stats.in_flight)
        samples = figures.samples
        if samples and now > samples[-1][0] + _OLD_SECONDS:
            samples.clear()
        if not samples or now >= samples[-1][0] + _RATE_SECONDS:
            samples.append((now, came, stats.acked_total))
            del samples[:-2]
        since, came_then, done_then = samples[0]
        known = now > since + 1
        figures.came = max(0, came - came_then) / (now - since) if known else None
        figures.done = max(0, stats.acked_total - done_then) / (now - since) if known else None
        return figures

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped.is_set():
            watched = self._watched
            try:
                if healthy(self._broker):
                    self._sample_store()
                    if watched or not self._far:
                        self._read_queues(watched=watched)
            except PenstockError as error:
                log.debug("no figures: %s", error)
            except Exception:
                log.exception("figures could not be read")
            self._wake.wait(_PASS_SECONDS if watched else _IDLE_SECONDS)
            self._wake.clear()

    def _list(self, pause: int) -> None:
        begin = self._seconds()
        if begin < self._list_at and self.names:
            return
        self.names = [spec.name for spec in self._broker.queues()]
        now = self._seconds()
        self._list_at = now + pause * (now - begin)
        for gone in self.queues.keys() - set(self.names):
            self.queues.pop(gone, None)

    def _ask(self, name: str) -> None:
        try:
            self.note(self._broker.stats(name))
        except (QueueNotFound, StoreDamaged):
            self.queues.pop(name, None)

    def _read_queues(self, *, watched: bool) -> None:
        """Ask about every queue, a slice of them at a time.

        While nobody looks, about as many as there is time for, and about the next ones next time.
        """
        first = watched and not self._read.is_set()
        eager_until = self._seconds() + (_EAGER_SECONDS if first else 0)
        self._list(_LIST_PAUSE if watched else _IDLE_LIST_PAUSE)
        begin, count = self._seconds(), len(self.names)
        for at in range(count):
            self._ask(self.names[(self._next + at) % count])
            now = self._seconds()
            if not watched and now > begin + _IDLE_WORK_SECONDS:
                self._next = (self._next + at + 1) % count
                return
            if watched and now >= max(begin + _SLICE_SECONDS, eager_until):
                worked = now - max(begin, eager_until)
                if self._stopped.wait(worked * (_FIRST_PAUSE if first else _PAUSE)):
                    return
                begin = self._seconds()
        self.complete, self.totals = True, totals_of(list(self.queues.values()))
        depth = sum(self.totals[name] for name in ("available", "delayed", "in_flight"))
        self.waiting.put(self.minute, depth)
        if watched:
            self._read.set()

    def _sample_store(self) -> None:
        self._rate("published", self._broker.store_stats().published_total, self.published)
        log = self._broker.log_stats()
        if log.routing == "pipeline":
            self.routed_rate = self._rate("routed", log.routed_up_to, self.routed)
            self.lag.put(self.minute, max(0, log.end - log.routed_up_to))

    def _rate(self, name: str, count: int, history: History) -> float | None:
        """Note a count; return how fast it has grown since a look some time ago, if known."""
        now = self._seconds()
        since, before = self._samples.get(name, (now, count))
        rate = (count - before) / (now - since) if now > since + 1 else None
        if rate is not None:
            history.put(self.minute, rate)
        if name not in self._samples or now >= since + _RATE_SECONDS:
            self._samples[name] = now, count
        return rate


# --- how figures are written ----------------------------------------------------------------------

NOTHING: Final = "–"
SPARK_WIDTH, SPARK_HEIGHT = 120, 28
_STEPS: Final = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s"))


def number(value: float | None) -> str:
    """Write a count in full, with commas."""
    return NOTHING if value is None else f"{value:,.0f}"


def rate(value: float | None) -> str:
    """Write a number per second: three digits are enough."""
    if value is None:
        return NOTHING
    if value == 0 or value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 0.1 else "< 0.1"


def duration(ms: float | None) -> str:
    """Write a time span in its largest unit, and the next one below it."""
    if ms is None:
        return NOTHING
    if ms < 1_000:
        return f"{ms:.0f} ms"
    for (unit_ms, name), (small_ms, small) in pairwise((*_STEPS, (1_000, ""))):
        if ms >= unit_ms:
            count, rest = divmod(int(ms), unit_ms)
            below = rest // small_ms
            return f"{count} {name} {below} {small}" if below else f"{count} {name}"
    return NOTHING


def size(count: float | None) -> str:
    """Write a number of bytes."""
    return NOTHING if count is None else do_filesizeformat(count, binary=True)


def moment(time_ms: int | None) -> str:
    """Write a time of the clock, in UTC."""
    if time_ms is None:
        return NOTHING
    return f"{datetime.fromtimestamp(time_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"


def spark(values: Sequence[float]) -> str:
    """Return the points of an area below values, for a spark line; NaN: none is known."""
    known = [(at, value) for at, value in enumerate(values) if not math.isnan(value)]
    if len(known) < 2:
        return ""
    top = max(1.0, *(value for _, value in known))
    step = SPARK_WIDTH / max(1, len(values) - 1)
    pairs = [
        (at * step, SPARK_HEIGHT - 2 - (SPARK_HEIGHT - 4) * value / top) for at, value in known
    ]
    # The area is closed outside of the drawing, where nobody sees its border.
    right, below = SPARK_WIDTH + 2, SPARK_HEIGHT + 2
    pairs = [(pairs[0][0] - 2, below), *pairs, (right, pairs[-1][1]), (right, below)]
    return " ".join(f"{x:.0f},{y:.1f}" for x, y in pairs)


def json(value: object) -> str:
    """Write a value of an attribute as JSON does: a text in quotes, and no value as null."""
    return msgspec.json.encode(value).decode()


def attributes(values: Mapping[str, object]) -> str:
    """Write the first attributes of a message in a line."""
    pairs = [f"{name}={str(value)[:60]}" for name, value in islice(values.items(), 8)]
    return "  ".join(pairs)


FILTERS: Final[dict[str, Callable[..., str]]] = {
    each.__name__: each for each in (number, rate, duration, size, moment, spark, json, attributes)
}
