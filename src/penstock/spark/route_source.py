"""The stream that the route job reads: what is still to be routed, matched on the executors.

The store's cursors say what has been routed, and they alone. Spark's checkpoint only says when to
look: a micro-batch goes from the cursors, whatever its start offset, up to its end offset. So a
replayed micro-batch finds nothing left to do, and one that did not take (its filters were
outdated, its stages were lost with the server) is simply still there to be done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from penstock.errors import InvalidInput
from penstock.spark.columns import Shape, check_columns, spark_schema
from penstock.spark.matching import COLUMNS, match_batch, matcher_of
from penstock.spark.offsets import Offset, Stretch, check_store, cut, logs_of
from penstock.spark.reading import LogPartition
from penstock.spark.stores import fenced, store
from penstock.spark.streaming import most_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql.types import StructType

    from penstock.spark.options import Options

__all__ = ["Bounds", "RouteStreamReader"]

MOST_AGAIN: Final = 50
"""Micro-batches in a row that may fail to take before something must be wrong."""


class Bounds(msgspec.Struct, frozen=True):
    """What opens a stretch among the matches: its bounds, and the filters it is matched with."""

    begin: int
    end: int
    filters_version: int


class RouteStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans what is to be routed, and yields it as matches or as bare stretches.

    The table ``matches`` has a row (log, offset, queue) for every match. A stretch without
    matches must be assigned too, or the cursor would stay before it for ever; so every stretch
    begins with a row of its own, whose offset is null and whose queue is its :class:`Bounds`.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        check_columns(schema, spark_schema(options), options.table)
        self._options = options
        self._shape = Shape(schema)
        self._until: int | None = None

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name, as all below
        """Return the store's cursors."""
        client = store(self._options.location)
        cursors = client.watermarks().cursors
        return {**{str(log): cursors[log] for log in sorted(cursors)}, "store": client.store_id}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit that maxOffsetsPerTrigger sets."""
        most = self._options.max_offsets
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Return how far the next micro-batch routes; ``start`` if there is nothing to do."""
        client = store(self._options.location)
        check_store(start, client.store_id)
        plan = client.route_plan(max_offsets=most_rows(limit))
        if self._options.epoch is not None and plan.epoch != self._options.epoch:
            raise fenced(self._options.epoch, plan.epoch)
        todo = {
            stretch.log: self._capped(stretch.end)
            for stretch in plan.stretches
            if stretch.begin < self._capped(stretch.end)
        }
        if not todo:
            return start
        end = _logs(start)
        end.update({str(log): offset for log, offset in todo.items()})
        again = int(start.get("again", 0)) + 1 if end == _logs(start) else 0
        if again > MOST_AGAIN:
            raise InvalidInput(
                f"routing stands still: the stretch up to {todo} was matched {again} times, and "
                "never taken; the log of this job says why"
            )
        end |= {"store": client.store_id, "filters": plan.filters_version}
        return end | {"again": again} if again else end

    def reportLatestOffset(self) -> Offset:  # noqa: N802
        """Return how far the log goes, for the query's progress."""
        client = store(self._options.location)
        marks = client.watermarks()
        return {str(log): marks.end for log in sorted(marks.cursors)}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Note how far the log goes: what comes later is for the next run."""
        self._until = store(self._options.location).watermarks().end

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Cut what lies between the cursors and ``end`` into tasks."""
        client = store(self._options.location)
        check_store(start, client.store_id)
        marks = client.watermarks()
        todo = [
            Stretch(log, max(marks.cursors[log], marks.earliest), min(until, marks.end))
            for log, until in sorted(logs_of(end).items())
            if log in marks.cursors
        ]
        todo = [stretch for stretch in todo if stretch.begin < stretch.end]
        if self._options.table == "matches":
            todo = cut(todo, self._options.partitions)
        return [LogPartition(stretch) for stretch in todo]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Match one part of a micro-batch, with the filters that are live for it now."""
        assert isinstance(partition, LogPartition)
        log, begin, end = partition.stretch
        if self._options.table == "stretches":
            columns = [pa.array([value]) for value in (log, begin, end)]
            yield self._shape.fit(pa.record_batch(columns, names=["log", "begin", "end"]))
            return
        client = store(self._options.location)
        while begin < end:
            live = client.filters(begin)
            until = end if live.until is None else min(end, live.until)
            matcher = matcher_of(live.filters)
            bounds = msgspec.json.encode(Bounds(begin, until, live.filters_version)).decode()
            yield self._matches(log, pa.array([None], pa.int64()), pa.array([bounds]))
            for batch in client.read_log(log, begin, until, columns=COLUMNS):
                found = match_batch(matcher, batch)
                if found.num_rows:
                    yield self._matches(log, found.column("offset"), found.column("queue"))
            begin = until

    def _matches(self, log: int, offsets: pa.Array, queues: pa.Array) -> pa.RecordBatch:
        logs = pa.repeat(pa.scalar(log, pa.int32()), len(offsets))
        return self._shape.fit(
            pa.record_batch([logs, offsets, queues], names=["log", "offset", "queue"])
        )

    def _capped(self, end: int) -> int:
        return end if self._until is None else min(end, self._until)


def _logs(offset: Offset) -> Offset:
    return {name: value for name, value in offset.items() if name.isdigit()}
