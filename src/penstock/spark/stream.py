"""The log as a stream, rate-limited, that goes on from its checkpoint."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import msgspec
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from penstock.clock import SystemClock
from penstock.errors import PenstockError
from penstock.flight.client import FlightStore
from penstock.spark.offsets import (
    Offset,
    between,
    check_store,
    lag_of,
    limited,
    logs_of,
    offset_of,
    resolve,
)
from penstock.spark.reader import Shape, read_stretch, starting, tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import StructType

    from penstock.model import LogStats
    from penstock.spark.options import Options

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """Make Spark tell errors of Penstock in one line, as those of a batch.

    Of a stream it tells all calls of Python, whatever the session says, unless this process, which
    ends with the error, has this variable.
    """
    try:
        yield
    except PenstockError:
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise


def in_one_line(method: Callable[P, T]) -> Callable[P, T]:
    """Return a method whose errors of Penstock Spark tells in one line."""

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with told_in_one_line():
            return method(*args, **kwargs)

    return run


class Progress(NamedTuple):
    """A micro-batch: its number, its rows, and how many offsets it left, by log or queue."""

    batch: int
    rows: int
    lag: dict[str, int]

    @property
    def behind(self) -> int:
        """Offsets that the slowest log or queue has still to be read."""
        return max(self.lag.values(), default=0)


def progress(query: StreamingQuery) -> Progress | None:
    """Return the progress of a query that reads one table of a broker, or routes; None: none yet.

    Of the route job ``rows`` counts messages: Spark's ``numInputRows`` counts stages there.

    >>> progress(query)                                # doctest: +SKIP
    Progress(batch=7, rows=10000, lag={'0': 250})
    """
    last = query.lastProgress
    if last is None:
        return None
    told = msgspec.json.decode(last.sources[0].latestOffset or "{}", type=dict[str, Any])
    return Progress(last.batchId, told.get("routed", last.numInputRows), told.get("lag", {}))


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Tails the log."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._shape = Shape(options, schema)
        self._delay = TriggerDelay(options)
        self._until: dict[int, int] | None = None
        self._latest: dict[str, Any] | None = None

    def _known(self, start: Offset | None = None) -> tuple[FlightStore, str, LogStats]:
        """Ask the broker for its store and its log; ``start`` must be of the same store."""
        client = FlightStore(self._options.location)
        store_id = client.info().store_id
        check_store(start or {}, store_id)
        return client, store_id, client.log_stats()

    @in_one_line
    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name, as all below
        """Return where a stream without a checkpoint begins."""
        client, store_id, stats = self._known()
        return offset_of(starting(self._options, client, stats, "latest"), store_id)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit that maxOffsetsPerTrigger sets."""
        most = self._options.max_offsets
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    @in_one_line
    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Return where the next micro-batch ends; ``start`` if there is nothing."""
        _, store_id, stats = self._known(start)
        latest = resolve("latest", stats, "")
        ends = self._until or latest
        begin = logs_of(start)
        reached = limited(begin, ends, most_rows(limit))
        # Ids are shared by the logs: none has more messages than the one that is behind most.
        waiting = max((each.end - each.begin for each in between(begin, ends)), default=0)
        if self._until is None and self._delay.holds(waiting):
            reached = begin
        self._latest = {**offset_of(latest, store_id), "lag": lag_of(reached, latest)}
        return start if reached == begin else offset_of(reached, store_id)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return how far the log went when the micro-batch was planned, and the lag after it."""
        return self._latest

    @in_one_line
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Note how far the log goes: later messages are for the next run."""
        self._until = resolve("latest", FlightStore(self._options.location).log_stats(), "")

    @in_one_line
    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Cut a micro-batch into tasks."""
        _, _, stats = self._known(start)
        return [*tasks(self._options, between(logs_of(start), logs_of(end)), stats)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one part of a micro-batch."""
        with told_in_one_line():
            yield from map(self._shape.fit, read_stretch(self._options, self._shape, partition))

    def stop(self) -> None:
        """Leave without a word when Spark has closed the connection."""
        leave_quietly()


class TriggerDelay:
    """Holds a micro-batch back until enough waits for it, or has waited for long enough."""

    def __init__(self, options: Options) -> None:
        self._least = options.min_offsets or 0
        self._longest_ms = options.trigger_delay_ms
        # The first micro-batch does not wait, as Kafka's does not.
        self._last_ms = 0

    def holds(self, waiting: int) -> bool:
        """Whether a micro-batch of that many offsets has to wait."""
        now_ms = SystemClock().now_ms()
        if 0 < waiting < self._least and now_ms - self._last_ms < self._longest_ms:
            return True
        if waiting:
            self._last_ms = now_ms
        return False


def leave_quietly() -> None:
    """End this process if Spark has closed the connection, as it does to end a query."""
    if isinstance(sys.exception(), EOFError):
        # Spark's loop would fail to tell Spark, and print both errors.
        os._exit(0)


def most_rows(limit: ReadLimit) -> int | None:
    """Return how many messages a limit allows."""
    return limit.max_rows if isinstance(limit, ReadMaxRows) else None
