"""The log as a stream: rate-limited, resumable from a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from penstock.spark.broker_client import offset_at, store
from penstock.spark.columns import Shape, check_columns, spark_schema
from penstock.spark.offsets import (
    Offset,
    between,
    check_kept,
    check_store,
    cut,
    limited,
    logs_of,
    resolve,
)
from penstock.spark.reader import LogPartition, read_stretch

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from penstock.spark.options import Options

__all__ = ["LogStreamReader", "most_rows"]


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Tails the log.

    The offset of a stream is where each log is read next, and the store that it was read from::

        {"0": 905, "store": "0c2f9a11"}
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        check_columns(schema, spark_schema(options), options.table)
        self._options = options
        self._shape = Shape(schema)
        self._until: dict[int, int] | None = None

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name, as all below
        """Return where a stream without a checkpoint begins."""
        client = store(self._options.location)
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
        client = store(self._options.location)
        check_store(start, client.store_id)
        stats = client.log_stats()
        ends = self._until or resolve("latest", stats, "")
        until = limited(logs_of(start), ends, most_rows(limit))
        return _offset(until, client.store_id)

    def reportLatestOffset(self) -> Offset:  # noqa: N802
        """Return how far the log goes, for the query's progress."""
        client = store(self._options.location)
        return _offset(resolve("latest", client.log_stats(), ""), client.store_id)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Note how far the log goes: what comes later is for the next run."""
        self._until = resolve("latest", store(self._options.location).log_stats(), "")

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Cut a micro-batch into tasks."""
        client = store(self._options.location)
        check_store(start, client.store_id)
        stats = client.log_stats()
        kept = check_kept(
            between(logs_of(start), logs_of(end)), stats, fail=self._options.fail_on_data_loss
        )
        return [LogPartition(each) for each in cut(kept, self._options.partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one part of a micro-batch."""
        assert isinstance(partition, LogPartition)
        yield from read_stretch(self._options, self._shape, partition)


def most_rows(limit: ReadLimit) -> int | None:
    """Return how many messages a limit allows."""
    return limit.max_rows if isinstance(limit, ReadMaxRows) else None


def _offset(by_log: dict[int, int], store_id: str) -> Offset:
    return {**{str(log): offset for log, offset in sorted(by_log.items())}, "store": store_id}
