"""Reading: a snapshot of a table, stretches of the log, and the log as a stream.

A stream is rate-limited and goes on from its checkpoint. Batches have exactly the columns and types
that Spark expects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from penstock.errors import InvalidInput
from penstock.flight.tables import schema_of
from penstock.spark import archived
from penstock.spark.broker_client import Store, offset_at
from penstock.spark.offsets import (
    Offset,
    Stretch,
    between,
    check_kept,
    check_store,
    cut,
    limited,
    logs_of,
    resolve,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.spark.options import Options

ROUTING: Final = {
    # A row is the name of a stage: the matches of a stretch, which the broker holds already.
    "matches": StructType([StructField("stage", StringType())]),
    "stretches": StructType(
        [
            StructField("log", IntegerType()),
            StructField("begin", LongType()),
            StructField("end", LongType()),
        ]
    ),
}


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


class TicketPartition(InputPartition):
    """A part of a snapshot that the broker holds for a while."""

    def __init__(self, ticket: bytes) -> None:
        self.ticket = ticket


class LogPartition(InputPartition):
    """A stretch of a log. It needs no snapshot, as a log only grows."""

    def __init__(self, stretch: Stretch) -> None:
        self.stretch = stretch


class TableReader(DataSourceReader):
    """Reads one table, in as many tasks as there are partitions."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._shape = Shape(options, schema)

    def partitions(self) -> list[InputPartition]:
        """Plan the read: take a snapshot, or cut up the log."""
        options = self._options
        client = Store(options.location)
        if options.table == "log":
            return [LogPartition(each) for each in self._stretches(client)]
        if options.include_archive is not None:
            return archived.plan(options, self._shape.names)
        plan = client.plan_read(
            options.table,
            queue=options.queues,
            payload=options.payload,
            columns=self._shape.names,
            filter=options.filter,
            partitions=options.partitions,
        )
        return [TicketPartition(ticket) for ticket in plan.tickets]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one part."""
        if isinstance(partition, TicketPartition):
            batches = Store(self._options.location).read(partition.ticket)
        elif isinstance(partition, LogPartition):
            batches = read_stretch(self._options, self._shape, partition)
        else:
            batches = archived.read_part(self._options, self._shape.names, partition)
        yield from map(self._shape.fit, batches)

    def _stretches(self, client: Store) -> list[Stretch]:
        options = self._options
        stats = client.log_stats()
        if options.stretches is not None:
            wanted = [Stretch(*bounds) for bounds in options.stretches]
        else:
            start = resolve(options.starting or "earliest", stats, "startingOffsets")
            if options.starting_ms is not None:
                start = dict.fromkeys(stats.cursors, offset_at(client, options.starting_ms))
            wanted = between(start, resolve(options.ending, stats, "endingOffsets"))
        kept = check_kept(wanted, stats, fail=options.fail_on_data_loss)
        return cut(kept, options.partitions)


def read_stretch(
    options: Options, shape: Shape, partition: InputPartition
) -> Iterator[pa.RecordBatch]:
    """Read a stretch of a log; the broker refuses one that is no longer there whole."""
    assert isinstance(partition, LogPartition)
    return Store(options.location).read_log(
        *partition.stretch, payload=options.payload, columns=shape.names, filter=options.filter
    )


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Tails the log.

    The offset of a stream is where each log is read next, and the store that it was read from::

        {"0": 905, "store": "0c2f9a11"}
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._shape = Shape(options, schema)
        self._until: dict[int, int] | None = None

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name, as all below
        """Return where a stream without a checkpoint begins."""
        client = Store(self._options.location)
        stats = client.log_stats()
        start = resolve(self._options.starting or "latest", stats, "startingOffsets")
        if self._options.starting_ms is not None:
            start = dict.fromkeys(stats.cursors, offset_at(client, self._options.starting_ms))
        return _offset(start, client.store_id)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit that maxOffsetsPerTrigger sets."""
        most = self._options.max_offsets
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Return where the next micro-batch ends; ``start`` if there is nothing."""
        client = Store(self._options.location)
        check_store(start, client.store_id)
        stats = client.log_stats()
        ends = self._until or resolve("latest", stats, "")
        until = limited(logs_of(start), ends, most_rows(limit))
        return _offset(until, client.store_id)

    def reportLatestOffset(self) -> Offset:  # noqa: N802
        """Return how far the log goes, for the query's progress."""
        client = Store(self._options.location)
        return _offset(resolve("latest", client.log_stats(), ""), client.store_id)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Note how far the log goes: later messages are for the next run."""
        self._until = resolve("latest", Store(self._options.location).log_stats(), "")

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Cut a micro-batch into tasks."""
        client = Store(self._options.location)
        check_store(start, client.store_id)
        stats = client.log_stats()
        wanted = between(logs_of(start), logs_of(end))
        kept = check_kept(wanted, stats, fail=self._options.fail_on_data_loss)
        return [LogPartition(each) for each in cut(kept, self._options.partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one part of a micro-batch."""
        yield from map(self._shape.fit, read_stretch(self._options, self._shape, partition))


def most_rows(limit: ReadLimit) -> int | None:
    """Return how many messages a limit allows."""
    return limit.max_rows if isinstance(limit, ReadMaxRows) else None


def _offset(by_log: dict[int, int], store_id: str) -> Offset:
    return {**{str(log): offset for log, offset in sorted(by_log.items())}, "store": store_id}
