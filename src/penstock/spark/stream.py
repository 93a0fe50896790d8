"""Streams that go on from their checkpoints: the log, and the change feed.

The change feed is the tables done, failed and attempts, by the sequence numbers of each queue. Its
offset says of every queue which number comes next, and a time before which no message has ended
that is still to be read; :mod:`penstock.spark.positions` packs them::

    {"store": "0c2f9a11", "at": 1893456000000, "packed": "AXicY2BkYGRgZmBh…"}

Attempts come with the messages that they were made at, when those are done or have failed: they
have both numbers. Numbers never move, and no later message gets a lower one than the broker has
told, so that a stretch that is read again has the same rows, as long as they are in history.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from penstock.clock import SystemClock
from penstock.errors import InvalidInput, PenstockError, QueueNotFound
from penstock.flight.client import FlightStore
from penstock.flight.protocol import HistoryEnds, HistoryStretch, HistoryTicket
from penstock.spark.log import (
    Offset,
    between,
    check_names,
    check_store,
    lag_of,
    limited,
    logs_of,
    offset_of,
    resolve,
)
from penstock.spark.positions import (
    FeedOffset,
    deal,
    gone,
    next_positions,
    packed,
    starting_positions,
    stretches_between,
    unpacked,
)
from penstock.spark.reader import Shape, read_stretch, starting, tasks
from penstock.waiter import Waiter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import StructType

    from penstock.model import LogStats
    from penstock.spark.source import Options

IDLE_MS: Final = 100
"""How long a change feed that found nothing waits before it lets Spark ask again."""

# By table, the states whose sequence numbers it is read by.
_STATES: Final = {"done": ("done",), "failed": ("failed",), "attempts": ("done", "failed")}


@contextmanager
def in_one_line() -> Iterator[None]:
    """Make Spark tell errors of Penstock in one line, as those of a batch.

    Of a stream it tells all calls of Python, whatever the session says, unless this process, which
    ends with the error, has this variable.
    """
    try:
        yield
    except PenstockError:
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise


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


def most_rows(limit: ReadLimit) -> int | None:
    """Return how many messages a limit allows."""
    return limit.max_rows if isinstance(limit, ReadMaxRows) else None


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The common part of the readers of streams."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._shape = Shape(options, schema)
        self._delay = TriggerDelay(options)
        self._latest: dict[str, Any] | None = None

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name, as all below
        """Return the limit that maxOffsetsPerTrigger sets."""
        most = self._options.max_offsets
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return how far the source went when the micro-batch was planned, and the lag after it."""
        return self._latest

    def stop(self) -> None:
        """End this process if Spark has closed the connection, as it does to end a query."""
        if isinstance(sys.exception(), EOFError):
            # Spark's loop would fail to tell Spark, and print both errors.
            os._exit(0)


class LogStreamReader(StreamReader):
    """Tails the log."""

    _until: dict[int, int] | None = None

    def _known(self, start: Offset | None = None) -> tuple[FlightStore, str, LogStats]:
        """Ask the broker for its store and its log; ``start`` must be of the same store."""
        client = FlightStore(self._options.location)
        store_id = client.info().store_id
        check_store(start or {}, store_id)
        return client, store_id, client.log_stats()

    @in_one_line()
    def initialOffset(self) -> Offset:  # noqa: N802
        """Return where a stream without a checkpoint begins."""
        client, store_id, stats = self._known()
        return offset_of(starting(self._options, client, stats, "latest"), store_id)

    @in_one_line()
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

    @in_one_line()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Note how far the log goes: later messages are for the next run."""
        self._until = resolve("latest", FlightStore(self._options.location).log_stats(), "")

    @in_one_line()
    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Cut a micro-batch into tasks."""
        _, _, stats = self._known(start)
        return [*tasks(self._options, between(logs_of(start), logs_of(end)), stats)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one part of a micro-batch."""
        with in_one_line():
            yield from map(self._shape.fit, read_stretch(self._options, self._shape, partition))


# --- the change feed ------------------------------------------------------------------------------


@dataclass
class FeedPartition(InputPartition):
    """Stretches of history that one task reads."""

    stretches: list[HistoryStretch]


class FeedStreamReader(StreamReader):
    """Follows the history of queues."""

    _until: HistoryEnds | None = None
    # The latest answer of the broker: queues by their numbers.
    _known: HistoryEnds | None = None

    @property
    def _states(self) -> tuple[str, ...]:
        return _STATES[self._options.table]

    def _ends(self, **since: int) -> HistoryEnds:
        """Ask the broker how far history goes; queues that are not there are left out."""
        ends = FlightStore(self._options.location).history_ends(self._options.queues, **since)
        self._known = ends
        return ends

    def _unpacked(
        self, start: Mapping[str, Any], end: Mapping[str, Any]
    ) -> tuple[FeedOffset, FeedOffset]:
        """Return offsets with the names of their queues."""
        known = self._known
        if known is None or gone(start, end, known):
            known = self._ends()
        check_store(start, known.store_id)
        lost = gone(start, end, known)
        # Queues that the option leaves out are not asked for.
        if lost and self._options.queues is None and self._options.fail_on_data_loss:
            raise InvalidInput(
                f"data loss: messages of the queue with number {lost[0]} are asked for, but the "
                "queue was deleted before they were read. Set failOnDataLoss to false to go on "
                "without them"
            )
        return unpacked(start, known), unpacked(end, known)

    @in_one_line()
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return where a stream without a checkpoint begins."""
        options = self._options
        times = options.starting_ms
        ends = self._ends(since_ms=times if isinstance(times, int) else 0)
        if isinstance(times, dict):
            ends = self._at_times(ends, times)
        for queue in options.queues or ():
            if queue not in ends.queues:
                raise QueueNotFound.among(queue, ends.queues)
        place = "earliest" if times is not None else options.starting or "latest"
        positions = starting_positions(ends, self._states, place)
        return packed(FeedOffset(ends.store_id, ends.at_ms, positions), ends)

    def _at_times(self, ends: HistoryEnds, times: Mapping[str, int]) -> HistoryEnds:
        """Ask where the history of each queue begins at its own time."""
        check_names("startingTimestamp", "queue", times, ends.queues)
        client = FlightStore(self._options.location)
        found = {
            queue: client.history_ends(queue, since_ms=at_ms).queues.get(queue, ends.queues[queue])
            for queue, at_ms in times.items()
        }
        return msgspec.structs.replace(ends, queues=found)

    @in_one_line()
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return where the next micro-batch ends; ``start`` if there is nothing."""
        ends = self._until or self._ends()
        check_store(start, ends.store_id)
        begin = unpacked(start, ends)
        whole = starting_positions(ends, self._states, "latest")
        latest = FeedOffset(ends.store_id, ends.at_ms, whole)
        waiting = sum(self._lag(begin, latest).values())
        positions = next_positions(begin, ends, self._states, most_rows(limit))
        end = FeedOffset(ends.store_id, ends.at_ms, positions)
        if not waiting or (self._until is None and self._delay.holds(waiting)):
            end = begin
            if self._until is None:
                SystemClock().wait(Waiter(), IDLE_MS)
        self._latest = {**packed(latest, ends), "lag": self._lag(end, latest)}
        return start if end is begin else packed(end, ends)

    def _lag(self, reached: FeedOffset, latest: FeedOffset) -> dict[str, int]:
        """Return how many numbers are left, by queue."""
        lag = dict.fromkeys(latest.queues, 0)
        for each in stretches_between(reached, latest, self._states):
            lag[each.queue] += each.end - each.begin
        return lag

    @in_one_line()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Note how far history goes: later messages are for the next run."""
        self._until = self._ends()

    @in_one_line()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Cut a micro-batch into tasks."""
        stretches = stretches_between(*self._unpacked(start, end), self._states)
        if not self._options.fail_on_data_loss:
            stretches = [msgspec.structs.replace(each, since_ms=None) for each in stretches]
        return [FeedPartition(each) for each in deal(stretches, self._options.partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one part of a micro-batch."""
        assert isinstance(partition, FeedPartition)
        options = self._options
        with in_one_line():
            ticket = HistoryTicket(
                options.table,
                partition.stretches,
                options.payload,
                self._shape.names,
                options.filter,
                options.where,
            )
            yield from map(self._shape.fit, FlightStore(options.location).read(ticket))
