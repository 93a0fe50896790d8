"""Reading tables in a batch: schemas, parts, snapshots, and stretches of the log.

Batches have exactly the columns and types that Spark expects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from penstock import limits
from penstock.clock import SystemClock
from penstock.errors import InvalidInput
from penstock.flight.client import FlightStore
from penstock.flight.conditions import Span, parse_condition
from penstock.flight.protocol import ActionTicket, ReadCommand, SnapshotTicket
from penstock.flight.tables import TABLES, make_schema, schema_of
from penstock.spark import archive
from penstock.spark.log import Stretch, between, check_kept, cut, offsets_at, resolve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql.types import StructType

    from penstock.model import LogStats
    from penstock.spark.source import Options


ROUTING: Final = {
    # A row is the name of a stage: the matches of a stretch, which the broker holds already.
    "matches": from_arrow_schema(make_schema("stage string?")),
    "stretches": from_arrow_schema(
        make_schema("log int?, begin long?, end long?, filters_version long?")
    ),
}
# Tables that have few rows.
_SMALL: Final = {"queues", "stats"}


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
class TablePartition(InputPartition):
    """A part of a table: of a snapshot that the user keeps, or as of when an action reads it.

    Spark plans a DataFrame only once. Its tasks add the action to the ticket.
    """

    ticket: SnapshotTicket | ActionTicket


@dataclass
class LogPartition(InputPartition):
    """A stretch of a log. It needs no snapshot, as a log only grows.

    With ``begins`` its begin moves up with the log's, with ``ends`` its end is the log's, as far as
    offsets up to ``high`` are wanted.
    """

    stretch: Stretch
    begins: bool = False
    ends: bool = False
    high: int = limits.MAX_OFFSET


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
        held = None if options.snapshot is None else client.hold_snapshot(options.snapshot)
        archived = None
        if options.include_archive is not None:
            archived = archive.plan(client, options, held)
        command = ReadCommand(
            options.table,
            queue=options.queues if archived is None else archived.queues,
            payload=options.payload,
            columns=self._shape.names,
            filter=options.filter,
            where=options.where,
            partitions=1 if options.table in _SMALL else options.partitions,
        )
        run = client.check_read(**msgspec.structs.asdict(command))
        parts = range(command.partitions)
        frame = SystemClock().lease_id().hex()
        tickets = [
            ActionTicket(frame, "", part, command, run)
            if held is None
            else SnapshotTicket(held.snapshot, part, command)
            for part in parts
        ]
        if archived is None or held is not None:
            live = [TablePartition(ticket) for ticket in tickets]
            return [*live, *(archived.parts if archived is not None else ())]
        shares = min(len(tickets), archive.SHARES)
        present = [
            archive.PresentPartition(archived.archive, ticket, share, shares, archived.version)
            for share, ticket in enumerate(tickets[:shares])
        ]
        return [*present, *archived.parts]

    def _of_log(self, client: FlightStore) -> list[InputPartition]:
        options = self._options
        if options.stretches is not None:
            # From a plan of the broker, which refuses to read what is not there.
            wanted = [Stretch(*bounds) for bounds in options.stretches]
            return [LogPartition(each) for each in cut(wanted, options.partitions)]
        stats = client.log_stats()
        if options.snapshot is not None:
            held = client.hold_snapshot(options.snapshot)
            stats = msgspec.structs.replace(stats, end=held.log_end)
        possible = Span()
        start = starting(options, client, stats, "earliest")
        if options.ending_ms is None:
            end = resolve(options.ending, stats, "endingOffsets")
        else:
            times = offsets_at(client, options.ending_ms, stats, "endingTimestamp")
            # A snapshot ends before the log does.
            end = {log: min(at, stats.end) for log, at in times.items()}
        if options.where is not None:
            # Only where rows can be; the broker looks at each of them.
            possible = _offsets_of(options.where, client, stats)
            start = {log: max(at, possible.low) for log, at in start.items()}
            end = {log: min(at, possible.high + 1) for log, at in end.items()}
        planned = tasks(options, between(start, end), stats)
        if options.snapshot is not None:
            return [*planned]
        if options.ending == "latest" and options.ending_ms is None:
            last = {each.stretch.log: each for each in planned}
            for log, at in start.items():
                if log not in last:
                    last[log] = LogPartition(Stretch(log, at, at))
                    planned.append(last[log])
                last[log].ends = True
        for each in planned:
            each.high = possible.high
            each.begins = options.starting_ms is None and options.starting in (None, "earliest")
        return [*planned]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one part."""
        if isinstance(partition, TablePartition):
            batches = FlightStore(self._options.location).read(_of_action(partition.ticket))
        elif isinstance(partition, LogPartition):
            batches = read_stretch(self._options, self._shape, partition)
        elif isinstance(partition, archive.ArchivedPartition):
            batches = archive.read_archived(self._options, self._shape.names, partition)
        else:
            assert isinstance(partition, archive.PresentPartition)
            ticket = _of_action(partition.ticket)
            batches = archive.read_present(self._options, self._shape.names, partition, ticket)
        yield from map(self._shape.fit, batches)


def _of_action(ticket: SnapshotTicket | ActionTicket) -> SnapshotTicket | ActionTicket:
    """Add the action that this task belongs to: its tasks have its number in common."""
    context = TaskContext.get()
    if isinstance(ticket, SnapshotTicket) or context is None:
        # Outside of a task, as in tests, all parts are read as by one action.
        return ticket
    number = context.getLocalProperty("spark.sql.execution.id")
    action = f"stage {context.stageId()}" if number is None else number
    return msgspec.structs.replace(ticket, action=action, again=context.attemptNumber() > 0)


def starting(
    options: Options, client: FlightStore, stats: LogStats, default: str
) -> dict[int, int]:
    """Return where a read of the log begins: at a time, at offsets, or where it does by default."""
    if options.starting_ms is not None:
        return offsets_at(client, options.starting_ms, stats, "startingTimestamp")
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
        end = min(stats.end, partition.high + 1) if partition.ends else end
    if begin >= end:
        return iter(())
    return client.read_log(
        log,
        begin,
        end,
        payload=options.payload,
        columns=shape.names,
        filter=options.filter,
        where=options.where,
    )


def _offsets_of(where: str, client: FlightStore, stats: LogStats) -> Span:
    """Return the offsets that rows can have that a condition is true of."""
    condition = parse_condition(where, TABLES["log"])
    low, high = condition.span("offset")
    since_us, until_us = condition.span("published_at")
    # Brokers that share a database have a clock each: there time and offsets need not agree.
    if "published_at" in condition.spans and client.info().design != "sql":
        if since_us > 0:
            low = max(low, client.offset_at(-(-since_us // 1000)))
        end = client.offset_at(max(0, until_us // 1000 + 1))
        # At the end of the log later messages may still come in time.
        high = min(high, end - 1) if end < stats.end else high
    return Span(low, high)
