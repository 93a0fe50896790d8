"""Streams that go on from their checkpoints: the log, and the change feed.

The change feed is the tables done, failed and attempts, by the sequence numbers of each queue. Its
offset says of every queue which number comes next, when the queue was made, and a time before which
no message has ended that is still to be read::

    {"store": "0c2f9a11", "at": 1893456000000,
     "queues": {"orders": {"created": 1893450000000, "since": 1893456000000, "done": 905}}}

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
    EARLIEST,
    LATEST,
    LEAST_PIECE,
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
from penstock.spark.reader import Shape, read_stretch, starting, tasks
from penstock.waiter import Waiter

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import StructType

    from penstock.flight.protocol import QueueHistory
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


class Position(msgspec.Struct, omit_defaults=True):
    """Where a queue is read next: when it was made, and the next number by state.

    No message that is still to be read has ended before ``since``.
    """

    created: int
    since: int
    done: int = -1
    failed: int = -1


class FeedOffset(msgspec.Struct):
    """The offset of a stream: the time of the broker, and the position in each queue."""

    store: str
    at: int
    queues: dict[str, Position]


@dataclass
class FeedPartition(InputPartition):
    """Stretches of history that one task reads."""

    stretches: list[HistoryStretch]


class FeedStreamReader(StreamReader):
    """Follows the history of queues."""

    _until: HistoryEnds | None = None

    @property
    def _states(self) -> tuple[str, ...]:
        return _STATES[self._options.table]

    def _ends(self, **since: int) -> HistoryEnds:
        """Ask the broker how far history goes; queues that are not there are left out."""
        return FlightStore(self._options.location).history_ends(self._options.queues, **since)

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
        return _plain(FeedOffset(ends.store_id, ends.at_ms, positions))

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
        begin = _offset(start)
        ends = self._until or self._ends()
        check_store(start, ends.store_id)
        whole = starting_positions(ends, self._states, "latest")
        latest = FeedOffset(ends.store_id, ends.at_ms, whole)
        waiting = sum(self._lag(begin, latest).values())
        positions = next_positions(begin, ends, self._states, most_rows(limit))
        end = FeedOffset(ends.store_id, ends.at_ms, positions)
        if not waiting or (self._until is None and self._delay.holds(waiting)):
            end = begin
            if self._until is None:
                SystemClock().wait(Waiter(), IDLE_MS)
        self._latest = {**_plain(latest), "lag": self._lag(end, latest)}
        return start if end is begin else _plain(end)

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
        stretches = stretches_between(_offset(start), _offset(end), self._states)
        if not stretches:
            return []
        if not self._options.fail_on_data_loss:
            stretches = [msgspec.structs.replace(each, since_ms=None) for each in stretches]
        check_store(start, FlightStore(self._options.location).info().store_id)
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


def _offset(offset: Mapping[str, Any]) -> FeedOffset:
    return msgspec.convert(offset, FeedOffset)


def _plain(offset: FeedOffset) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(offset)
    return plain


# --- positions ------------------------------------------------------------------------------------


def starting_positions(
    ends: HistoryEnds, states: Sequence[str], place: str | Mapping[str, Any]
) -> dict[str, Position]:
    """Turn ``earliest``, ``latest`` or numbers by queue into a position for every queue.

    ``earliest`` is where the history begins that the broker was asked for.
    """
    wanted: Mapping[str, Any]
    if isinstance(place, str):
        wanted = dict.fromkeys(ends.queues, EARLIEST if place == "earliest" else LATEST)
    else:
        wanted = place
        check_names("startingOffsets", "queue", wanted, ends.queues)
    return {
        queue: _starting(queue, found, ends.at_ms, states, wanted[queue])
        for queue, found in ends.queues.items()
    }


def _starting(
    queue: str, found: QueueHistory, at_ms: int, states: Sequence[str], wanted: Any
) -> Position:
    position = Position(found.created_at_ms, at_ms)
    if isinstance(wanted, int) and (len(states) == 1 or wanted < 0):
        wanted = dict.fromkeys(states, wanted)
    if not isinstance(wanted, dict) or set(wanted) != set(states):
        raise InvalidInput(
            f"startingOffsets of queue {queue} must say where done and failed begin, like "
            '{"done": 5, "failed": 3}'
        )
    for state, number in wanted.items():
        end = found.ends[state]
        if not EARLIEST <= number <= end:
            raise InvalidInput(
                f"startingOffsets of queue {queue} is {number}; {state} has numbers up to {end}"
            )
        places = {EARLIEST: found.firsts.get(state, (end, at_ms)), LATEST: (end, at_ms)}
        begin, since_ms = places.get(number, (number, found.created_at_ms))
        setattr(position, state, begin)
        position.since = min(position.since, since_ms)
    return position


def next_positions(
    start: FeedOffset, ends: HistoryEnds, states: Sequence[str], most: int | None
) -> dict[str, Position]:
    """Return where a micro-batch ends that takes at most ``most`` numbers, shared by what waits."""
    positions = {
        queue: _begin(start, queue, found.created_at_ms, states)
        for queue, found in ends.queues.items()
    }
    waits = sorted(
        (width, queue, state)
        for queue, position in positions.items()
        for state in states
        if (width := ends.queues[queue].ends[state] - getattr(position, state)) > 0
    )
    left, total = most, sum(width for width, _, _ in waits)
    behind = set()
    # The short ones first: each gets its share, and at least one number while there are any.
    for width, queue, state in waits:
        share = width if left is None else min(width, -(-width * left // total))
        setattr(positions[queue], state, getattr(positions[queue], state) + share)
        total -= width
        if left is not None:
            left -= share
        if share < width:
            behind.add(queue)
    for queue in positions.keys() - behind:
        positions[queue].since = ends.at_ms
    return positions


def _begin(start: FeedOffset, queue: str, created_at_ms: int, states: Sequence[str]) -> Position:
    """Return where a queue is read from; one that is new, or was made again, from its first."""
    known = start.queues.get(queue)
    if known is not None and known.created == created_at_ms:
        return msgspec.structs.replace(known)
    return Position(created_at_ms, created_at_ms, **dict.fromkeys(states, 0))


def stretches_between(
    start: FeedOffset, end: FeedOffset, states: Sequence[str]
) -> list[HistoryStretch]:
    """Return the stretches between two offsets.

    A queue that the stream has not read before, and that is older than it, is read from what is
    left of its history.
    """
    found = []
    for queue, until in end.queues.items():
        begin = _begin(start, queue, until.created, states)
        is_chosen_late = queue not in start.queues and until.created < start.at
        since_ms = None if is_chosen_late else begin.since
        for state in states:
            numbers = getattr(begin, state), getattr(until, state)
            if numbers[0] < numbers[1]:
                found.append(HistoryStretch(queue, until.created, state, *numbers, since_ms))
    return found


def deal(
    stretches: Iterable[HistoryStretch], pieces: int, least: int = LEAST_PIECE
) -> list[list[HistoryStretch]]:
    """Deal stretches out to about ``pieces`` tasks of like width; a task may have many queues."""
    whole = list(stretches)
    step = max(least, -(-sum(each.end - each.begin for each in whole) // max(1, pieces)))
    tasks: list[list[HistoryStretch]] = []
    room = 0
    for stretch in whole:
        begin = stretch.begin
        while begin < stretch.end:
            if not room:
                tasks.append([])
                room = step
            end = min(stretch.end, begin + room)
            tasks[-1].append(msgspec.structs.replace(stretch, begin=begin, end=end))
            room -= end - begin
            begin = end
    return tasks
