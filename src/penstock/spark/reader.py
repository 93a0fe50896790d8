"""Batch reads: a snapshot of a table, or stretches of the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from penstock.spark import archived
from penstock.spark.broker_client import offset_at, store
from penstock.spark.columns import Shape, check_columns, spark_schema
from penstock.spark.offsets import Stretch, between, check_kept, cut, resolve

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from penstock.spark.broker_client import Store
    from penstock.spark.options import Options

__all__ = ["LogPartition", "TableReader", "TicketPartition", "read_stretch"]


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
        check_columns(schema, spark_schema(options), options.table)
        self._options = options
        self._shape = Shape(schema)

    def partitions(self) -> list[InputPartition]:
        """Plan the read: take a snapshot, or cut up the log."""
        options = self._options
        if options.table == "log":
            return [LogPartition(each) for each in self._stretches(store(options.location))]
        if options.include_archive is not None:
            return archived.plan(options, self._shape.names)
        plan = store(options.location).plan_read(
            options.table,
            queue=options.queues,
            payload=options.payload,
            columns=tuple(self._shape.names),
            filter=options.filter,
            partitions=options.partitions,
        )
        return [TicketPartition(ticket) for ticket in plan.tickets]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one part."""
        if isinstance(partition, TicketPartition):
            for batch in store(self._options.location).read(partition.ticket):
                yield self._shape.fit(batch)
        elif isinstance(partition, LogPartition):
            yield from read_stretch(self._options, self._shape, partition)
        else:
            for batch in archived.read_part(self._options, self._shape.names, partition):
                yield self._shape.fit(batch)

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
    options: Options, shape: Shape, partition: LogPartition
) -> Iterator[pa.RecordBatch]:
    """Read a stretch of a log; one that is no longer there whole is refused."""
    batches = store(options.location).read_log(
        *partition.stretch,
        payload=options.payload,
        columns=tuple(shape.names),
        filter=options.filter,
    )
    for batch in batches:
        yield shape.fit(batch)
