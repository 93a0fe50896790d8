"""Reading: offsets of the log, snapshots of tables, stretches of the log, and the log as a stream.

Message ids are offsets, given out over all logs together: log 0 may hold 1, 4, 5 and log 1 the
rest. A stretch is [begin, end) of one log. A stream's offset is one JSON object: where each log is
read next, and the store that it was read from::

    {"0": 905, "1": 900, "store": "0c2f9a11"}                the table log
    {"0": 905, "1": 900, "store": "0c2f9a11", "filters": 3}  the tables of the route job

A stream is rate-limited and goes on from its checkpoint. Batches have exactly the columns and types
that Spark expects.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple, ParamSpec, TypeAlias, TypeVar

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from penstock.clock import SystemClock
from penstock.errors import InvalidInput, PenstockError, StoreMismatch
from penstock.flight.client import FlightStore
from penstock.flight.protocol import ReadCommand
from penstock.flight.tables import make_schema, schema_of
from penstock.spark import archive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pyspark.sql.types import StructType

    from penstock.model import LogStats
    from penstock.spark.options import Options, Place

P = ParamSpec("P")
T = TypeVar("T")

LEAST_PIECE: Final = 20_000
"""Offsets below which a stretch is not worth a second task."""

FIRST: Final = 1
"""The offset that the first message of a store gets."""

ROUTING: Final = {
    # A row is the name of a stage: the matches of a stretch, which the broker holds already.
    "matches": from_arrow_schema(make_schema("stage string?")),
    "stretches": from_arrow_schema(make_schema("log int?, begin long?, end long?")),
}
# Tables that have few rows.
_SMALL: Final = {"queues", "stats"}
_EARLIEST: Final = -2
_LATEST: Final = -1
_PROBE: Final = 256

Offset: TypeAlias = dict[str, int | str]
"""A stream's offset, as Spark writes it into the checkpoint."""


class Stretch(NamedTuple):
    """[begin, end) of one log."""

    log: int
    begin: int
    end: int


def resolve(place: Place, stats: LogStats, name: str) -> dict[int, int]:
    """Turn ``earliest``, ``latest`` or offsets by log into an offset for every log."""
    if place == "earliest":
        return dict.fromkeys(stats.cursors, stats.earliest)
    if place == "latest":
        return dict.fromkeys(stats.cursors, stats.end)
    assert isinstance(place, dict)
    strangers = sorted(set(place) - set(stats.cursors))
    if strangers:
        known = ", ".join(map(str, sorted(stats.cursors)))
        raise InvalidInput(f"{name} names log {strangers[0]}; the store has {known}")
    missing = sorted(set(stats.cursors) - set(place))
    if missing:
        raise InvalidInput(f"{name} must name every log; {missing[0]} is missing")
    found = {}
    for log, offset in place.items():
        if offset < _EARLIEST or offset > stats.end:
            raise InvalidInput(
                f"{name} of log {log} is {offset}; there are offsets up to {stats.end}"
            )
        found[log] = {_EARLIEST: stats.earliest, _LATEST: stats.end}.get(offset, offset)
    return found


def logs_of(offset: Mapping[str, int | str]) -> dict[int, int]:
    """Return the offsets by log of a stream's offset."""
    return {int(name): int(value) for name, value in offset.items() if name.isdigit()}


def limited(start: Mapping[int, int], ends: Mapping[int, int], most: int | None) -> dict[int, int]:
    """Return where a micro-batch ends that takes at most ``most`` messages."""
    begins = {log: _begin(start, log, ends[log]) for log in ends}
    if most is None:
        return {log: max(begins[log], end) for log, end in ends.items()}
    # Ids are shared by the logs: one bound for all of them holds for their sum.
    behind = min((begins[log] for log, end in ends.items() if begins[log] < end), default=0)
    return {log: max(begins[log], min(end, behind + most)) for log, end in ends.items()}


def between(start: Mapping[int, int], end: Mapping[int, int]) -> list[Stretch]:
    """Return the stretches between two offsets, log by log."""
    found = [Stretch(log, _begin(start, log, until), until) for log, until in sorted(end.items())]
    return [stretch for stretch in found if stretch.begin < stretch.end]


def _begin(start: Mapping[int, int], log: int, end: int) -> int:
    # A log that was added since holds nothing older than where the others stood.
    return start[log] if log in start else min(start.values(), default=end)


def cut(stretches: Iterable[Stretch], pieces: int, least: int = LEAST_PIECE) -> list[Stretch]:
    """Cut stretches into about ``pieces`` of like width, but none for the sake of a few offsets."""
    whole = list(stretches)
    width = sum(stretch.end - stretch.begin for stretch in whole)
    step = max(least, -(-width // max(1, pieces)))
    parts: list[Stretch] = []
    for log, begin, end in whole:
        count = -(-(end - begin) // step)
        borders = [begin + (end - begin) * number // count for number in range(count + 1)]
        parts += [Stretch(log, *pair) for pair in pairwise(borders)]
    return parts


def check_kept(stretches: Sequence[Stretch], stats: LogStats, *, fail: bool) -> list[Stretch]:
    """Refuse (or, if not ``fail``, leave out) offsets that the log's retention has removed."""
    kept = []
    for log, begin, end in stretches:
        earliest = stats.earliest
        if max(begin, FIRST) < earliest and fail:
            raise InvalidInput(
                f"data loss: offsets {begin} to {min(end, earliest)} of log {log} are asked for, "
                f"but the log begins at {earliest}: its retention has removed them. Set "
                "failOnDataLoss to false to go on without them"
            )
        if max(begin, earliest) < end:
            kept.append(Stretch(log, max(begin, earliest), end))
    return kept


def check_store(offset: Mapping[str, int | str], store_id: str) -> None:
    """Refuse a checkpoint that was made over another store."""
    if offset.get("store", store_id) != store_id:
        raise StoreMismatch(
            f"the checkpoint belongs to store {offset['store']}, the broker serves store "
            f"{store_id}: use another checkpoint directory, or the broker that it was made with"
        )


def offset_at(client: FlightStore, at_ms: int) -> int:
    """Return the first offset that was published at a time or later."""
    stats = client.log_stats()
    logs, low, high = list(stats.cursors), stats.earliest, stats.end
    # Time in a store never goes back, so neither does it along the offsets.
    while low < high:
        middle = (low + high) // 2
        found = _first(client, logs, middle, high)
        if found is None:
            high = middle
        elif found[1] < at_ms:
            low = found[0] + 1
        else:
            high = middle
    return low


def _first(client: FlightStore, logs: list[int], begin: int, end: int) -> tuple[int, int] | None:
    """Return offset and time of the first message at an offset or after it."""
    width = _PROBE
    while begin < end:
        until = min(end, begin + width)
        found = []
        for log in logs:
            for batch in client.read_log(log, begin, until, columns=("offset", "published_at")):
                row = batch.slice(0, 1).to_pylist()[0]
                found.append((row["offset"], int(row["published_at"].timestamp() * 1000)))
                break
        if found:
            return min(found)
        begin, width = until, width * 2
    return None


# --- reading --------------------------------------------------------------------------------------


def spark_schema(options: Options) -> StructType:
    """Return the schema of a table, with the payload and the chosen columns."""
    if options.table in ROUTING:
        return ROUTING[options.table]
    schema = schema_of(options.table, payload=options.payload, columns=options.columns)
    return from_arrow_schema(schema)


def check_columns(given: StructType, actual: StructType, table: str) -> None:
    """Compare a schema that the user gave with the table's; name every column that differs."""
    wrong = [
        f"{field.name} is {actual[field.name].dataType.simpleString()}, "
        f"not {field.dataType.simpleString()}"
        if field.name in actual.names
        else f"{field.name} is not there"
        for field in given.fields
        if field.name not in actual.names or actual[field.name].dataType != field.dataType
    ]
    if wrong:
        raise InvalidInput(f"the schema does not fit table {table!r}: {'; '.join(wrong)}")


class Shape:
    """The exact Arrow schema that Spark expects of a reader; picklable."""

    def __init__(self, options: Options, schema: StructType) -> None:
        check_columns(schema, spark_schema(options), options.table)
        self.names = schema.names
        self._arrow = to_arrow_schema(schema, timezone="UTC")

    def fit(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the batch with these columns, in this order, of these types."""
        if batch.schema.equals(self._arrow):
            return batch
        columns = [batch.column(field.name).cast(field.type) for field in self._arrow]
        return pa.RecordBatch.from_arrays(columns, schema=self._arrow)


@dataclass
class SnapshotPartition(InputPartition):
    """A part of a table of a snapshot that the user keeps."""

    snapshot: str
    part: int
    command: ReadCommand


@dataclass
class ActionPartition(InputPartition):
    """A part of a table, as of when an action reads it; Spark plans a DataFrame only once.

    ``frame`` names the DataFrame, and ``run`` is the run of the server that it was planned with.
    """

    frame: str
    run: str
    part: int
    command: ReadCommand


@dataclass
class LogPartition(InputPartition):
    """A stretch of a log. It needs no snapshot, as a log only grows.

    With ``begins`` its begin moves up with the log's, with ``ends`` its end is the log's.
    """

    stretch: Stretch
    begins: bool = False
    ends: bool = False


class TableReader(DataSourceReader):
    """Reads one table, in as many tasks as there are partitions.

    Each action reads the table anew, and all of its tasks the same snapshot.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._shape = Shape(options, schema)

    def partitions(self) -> list[InputPartition]:
        """Plan the read: check it, and cut it into parts."""
        options = self._options
        client = FlightStore(options.location)
        if options.table == "log":
            return self._of_log(client)
        if options.include_archive is not None:
            return archive.plan(options, self._shape.names)
        command = ReadCommand(
            options.table,
            queue=options.queues,
            payload=options.payload,
            columns=self._shape.names,
            filter=options.filter,
            partitions=1 if options.table in _SMALL else options.partitions,
        )
        run = client.check_read(**msgspec.structs.asdict(command))
        parts = range(command.partitions)
        if options.snapshot is not None:
            client.hold_snapshot(options.snapshot)
            return [SnapshotPartition(options.snapshot, part, command) for part in parts]
        frame = SystemClock().lease_id().hex()
        return [ActionPartition(frame, run, part, command) for part in parts]

    def _of_log(self, client: FlightStore) -> list[InputPartition]:
        options = self._options
        stats = client.log_stats()
        if options.stretches is not None:
            return [*tasks(options, [Stretch(*bounds) for bounds in options.stretches], stats)]
        if options.snapshot is not None:
            held = client.hold_snapshot(options.snapshot)
            stats = msgspec.structs.replace(stats, end=held.log_end)
        start = starting(options, client, stats, "earliest")
        end = resolve(options.ending, stats, "endingOffsets")
        planned = tasks(options, between(start, end), stats)
        if options.snapshot is not None:
            return [*planned]
        if options.ending == "latest":
            last = {each.stretch.log: each for each in planned}
            for log, at in start.items():
                if log not in last:
                    last[log] = LogPartition(Stretch(log, at, at))
                    planned.append(last[log])
                last[log].ends = True
        for each in planned:
            each.begins = options.starting_ms is None and options.starting in (None, "earliest")
        return [*planned]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one part."""
        if isinstance(partition, SnapshotPartition | ActionPartition):
            batches = FlightStore(self._options.location).read(_ticket(partition))
        elif isinstance(partition, LogPartition):
            batches = read_stretch(self._options, self._shape, partition)
        else:
            batches = archive.read_part(self._options, self._shape.names, partition)
        yield from map(self._shape.fit, batches)


def _ticket(partition: SnapshotPartition | ActionPartition) -> bytes:
    """Return the ticket of a part; the tasks of an action have its number in common."""
    if isinstance(partition, SnapshotPartition):
        return FlightStore.snapshot_ticket(partition.snapshot, partition.part, partition.command)
    context = TaskContext.get()
    # Outside of a task, as in tests, all parts are read as by one action.
    action = "none"
    if context is not None:
        number = context.getLocalProperty("spark.sql.execution.id")
        action = f"stage {context.stageId()}" if number is None else number
    return FlightStore.action_ticket(
        partition.frame,
        action,
        partition.part,
        command=partition.command,
        run=partition.run,
        again=context is not None and context.attemptNumber() > 0,
    )


def starting(
    options: Options, client: FlightStore, stats: LogStats, default: str
) -> dict[int, int]:
    """Return where a read of the log begins: at a time, at offsets, or where it does by default."""
    if options.starting_ms is not None:
        return dict.fromkeys(stats.cursors, offset_at(client, options.starting_ms))
    return resolve(options.starting or default, stats, "startingOffsets")


def tasks(options: Options, wanted: list[Stretch], stats: LogStats) -> list[LogPartition]:
    """Cut stretches that the log still has into tasks."""
    kept = check_kept(wanted, stats, fail=options.fail_on_data_loss)
    return [LogPartition(each) for each in cut(kept, options.partitions)]


def read_stretch(
    options: Options, shape: Shape, partition: InputPartition
) -> Iterator[pa.RecordBatch]:
    """Read a stretch of a log; the broker refuses one that is no longer there whole."""
    assert isinstance(partition, LogPartition)
    client = FlightStore(options.location)
    log, begin, end = partition.stretch
    if partition.begins or partition.ends:
        stats = client.log_stats()
        begin = max(begin, stats.earliest) if partition.begins else begin
        end = stats.end if partition.ends else end
    if begin >= end:
        return iter(())
    return client.read_log(
        log, begin, end, payload=options.payload, columns=shape.names, filter=options.filter
    )


def in_one_line(method: Callable[P, T]) -> Callable[P, T]:
    """Return a method whose errors of Penstock Spark tells in one line, as those of a batch.

    Of a stream it tells all calls of Python, whatever the session says, unless this process, which
    ends with the error, has this variable.
    """

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except PenstockError:
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
            raise

    return run


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Tails the log."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._shape = Shape(options, schema)
        self._until: dict[int, int] | None = None

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
        ends = self._until or resolve("latest", stats, "")
        return offset_of(limited(logs_of(start), ends, most_rows(limit)), store_id)

    @in_one_line
    def reportLatestOffset(self) -> Offset:  # noqa: N802
        """Return how far the log goes, for the query's progress."""
        _, store_id, stats = self._known()
        return offset_of(resolve("latest", stats, ""), store_id)

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
        yield from map(self._shape.fit, read_stretch(self._options, self._shape, partition))

    def stop(self) -> None:
        """Leave without a word when Spark has closed the connection, as it does to end a query."""
        if isinstance(sys.exception(), EOFError):
            # Spark's loop would fail to tell Spark, and print both errors.
            os._exit(0)


def most_rows(limit: ReadLimit) -> int | None:
    """Return how many messages a limit allows."""
    return limit.max_rows if isinstance(limit, ReadMaxRows) else None


def offset_of(by_log: dict[int, int], store_id: str) -> Offset:
    """Return the offset of a stream."""
    return {**{str(log): offset for log, offset in sorted(by_log.items())}, "store": store_id}
