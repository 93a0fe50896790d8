"""The stream that the route job reads: what is still to be routed, matched on the executors.

The store's cursors say what has been routed, and they alone. Spark's checkpoint only says when to
look: a micro-batch goes from the cursors, whatever its start offset, up to its end offset. So a
replayed micro-batch finds nothing left to do, and one that did not take (its filters were
outdated, its stages were lost with the server) is simply still there to be done.

Matches do not travel through Spark: the task that makes them stages them with the broker, and
what it gives to Spark are the names of the stages.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from penstock.clock import SystemClock
from penstock.errors import InvalidInput, PenstockError
from penstock.spark.broker_client import fenced, store
from penstock.spark.columns import Shape, check_columns, spark_schema
from penstock.spark.matching import PACKED_COLUMNS, match_packed, matcher_of, settle_in
from penstock.spark.offsets import Offset, Stretch, check_store, cut, logs_of
from penstock.spark.reader import LogPartition
from penstock.spark.stream import most_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql.types import StructType

    from penstock.spark.options import Options

__all__ = ["RouteStreamReader", "new_stage"]

MOST_AGAIN: Final = 50
"""Micro-batches in a row that may fail to take before something must be wrong."""


def new_stage() -> str:
    """Return a name that no other stage has."""
    return SystemClock().lease_id().hex()


class RouteStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans what is to be routed, and yields it as stages or as bare stretches.

    The table ``matches`` has a row for every stage. A stretch without matches is staged too, or
    the cursor would stay before it for ever.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        check_columns(schema, spark_schema(options), options.table)
        self._options = options
        self._shape = Shape(schema)
        self._until: int | None = None
        # What latestOffset planned last, so that nobody has to ask the broker again: the offset
        # it returned, the stretches up to there, and how far the log went.
        self._planned: tuple[Offset, list[Stretch], Offset] | None = None

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
        store_id = client.store_id
        check_store(start, store_id)
        plan = client.route_plan(max_offsets=most_rows(limit))
        if self._options.epoch is not None and plan.epoch != self._options.epoch:
            raise fenced(self._options.epoch, plan.epoch)
        todo = [
            Stretch(stretch.log, stretch.begin, self._capped(stretch.end))
            for stretch in plan.stretches
            if stretch.begin < self._capped(stretch.end)
        ]
        if not todo:
            self._planned = None
            return start
        end = _logs(start)
        end.update({str(stretch.log): stretch.end for stretch in todo})
        again = int(start.get("again", 0)) + 1 if end == _logs(start) else 0
        if again > MOST_AGAIN:
            raise InvalidInput(
                f"routing stands still: {todo} was matched {again} times, and never taken; the "
                "log of this job says why"
            )
        end |= {"store": store_id, "filters": plan.filters_version}
        if again:
            end["again"] = again
        known = todo[0].begin + plan.lag[todo[0].log]
        self._planned = (end, todo, {str(log): known for log in sorted(plan.lag)})
        return end

    def reportLatestOffset(self) -> Offset:  # noqa: N802
        """Return how far the log went when it was last looked at, for the query's progress."""
        if self._planned is not None:
            return self._planned[2]
        marks = store(self._options.location).watermarks()
        return {str(log): marks.end for log in sorted(marks.cursors)}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Note how far the log goes: what comes later is for the next run."""
        self._until = store(self._options.location).watermarks().end

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Cut what lies between the cursors and ``end`` into tasks."""
        if self._planned is not None and self._planned[0] == end:
            todo = self._planned[1]
        else:
            todo = self._left(start, end)
        if self._options.table == "matches":
            todo = cut(todo, self._options.partitions)
        return [LogPartition(stretch) for stretch in todo]

    def _left(self, start: Offset, end: Offset) -> list[Stretch]:
        """Return what is left of a micro-batch that was planned before this job started."""
        client = store(self._options.location)
        check_store(start, client.store_id)
        marks = client.watermarks()
        todo = [
            Stretch(log, max(marks.cursors[log], marks.earliest), min(until, marks.end))
            for log, until in sorted(logs_of(end).items())
            if log in marks.cursors
        ]
        return [stretch for stretch in todo if stretch.begin < stretch.end]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Match one part of a micro-batch, with the filters that are live for it now."""
        assert isinstance(partition, LogPartition)
        log, begin, end = partition.stretch
        if self._options.table == "stretches":
            columns = [pa.array([value]) for value in (log, begin, end)]
            yield self._shape.fit(pa.record_batch(columns, names=["log", "begin", "end"]))
            return
        settle_in()
        stages = self._staged(partition.stretch)
        yield self._shape.fit(pa.record_batch([pa.array(stages)], names=["stage"]))

    def _staged(self, stretch: Stretch) -> list[str]:
        """Stage the matches of a stretch, in parts if filters change within it."""
        client = store(self._options.location)
        log, begin, end = stretch
        stages: list[str] = []
        try:
            while begin < end:
                live = client.filters(begin)
                until = end if live.until is None else min(end, live.until)
                matcher = matcher_of(live.filters)
                batches = client.read_log(log, begin, until, columns=PACKED_COLUMNS)
                found = [match_packed(matcher, batch) for batch in batches]
                stages.append(new_stage())
                client.put_stage(
                    stages[-1],
                    [batch for batch in found if batch.num_rows],
                    log=log,
                    begin=begin,
                    end=until,
                    filters_version=live.filters_version,
                    epoch=self._options.epoch,
                )
                begin = until
        except BaseException:
            with contextlib.suppress(PenstockError):
                client.drop_stages(stages)
            raise
        return stages

    def _capped(self, end: int) -> int:
        return end if self._until is None else min(end, self._until)


def _logs(offset: Offset) -> Offset:
    return {name: value for name, value in offset.items() if name.isdigit()}
