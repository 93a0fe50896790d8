"""A DataFrame transformation between the log and the queues, still exactly once.

The stream carries only the stretches that are to be routed. For each micro-batch the log is read
as an ordinary DataFrame, the transformation is applied to it, and its rows are matched. The
cursor commits with the assignments, as in :mod:`penstock.spark.route`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InvalidInput, PenstockError
from penstock.flight.client import FlightStore
from penstock.spark.matching import COLUMNS, MATCHES, match_batch, matcher_of
from penstock.spark.reader import Stretch
from penstock.spark.route import (
    DEFAULT_MAX_OFFSETS,
    commit,
    new_stage,
    route_stream,
    take_over,
    triggered,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_NEEDED: Final = ("log", *COLUMNS)
_LOG_COLUMNS: Final = (*_NEEDED, "delay_ms", "attributes", "payload")


def pipeline(spark: SparkSession, location: str) -> Pipeline:
    """Return a pipeline from the log of the broker at ``location`` to its queues."""
    return Pipeline(spark, location)


class Pipeline:
    """Routes by columns that a transformation adds to the messages.

    The transformation gets the table ``log`` (of the micro-batch) and returns it with more
    columns; each column that it adds counts as an attribute of that name. Say the queue ``vip``
    has the filter ``tier = 'gold'``, and messages only name their customer::

        >>> customers = spark.read.parquet("customers")        # customer, tier
        >>> def enrich(log):
        ...     named = log.withColumn("customer", log.attributes["customer"])
        ...     return named.join(broadcast(customers), "customer", "left")
        >>> query = (penstock.spark.pipeline(spark, "grpc://127.0.0.1:8815")
        ...          .transform(enrich).start(checkpoint="ckpt"))

    What it may do: anything that keeps ``log`` and ``offset`` of a row. Columns of the log that
    it changes are matched as changed (not ``attributes``, which is a view of ``attributes_json``).
    A message whose rows are all dropped goes to no queue; one that a join has multiplied goes to
    every queue that one of its rows matches, once. Payload and attributes of the message itself
    are never changed: the enrichment is for routing.

    What it may not do: put rows off to a later micro-batch (state, watermarks).
    """

    def __init__(self, spark: SparkSession, location: str) -> None:
        self._spark = spark
        self._location = location
        self._steps: tuple[Callable[[DataFrame], DataFrame], ...] = ()
        self._payload = False

    def transform(
        self, step: Callable[[DataFrame], DataFrame], *, payload: bool = False
    ) -> Pipeline:
        """Return a pipeline with one step more; ``payload`` asks for that column of the log."""
        added = Pipeline(self._spark, self._location)
        added._steps = (*self._steps, step)
        added._payload = self._payload or payload
        return added

    def start(
        self,
        *,
        checkpoint: str | Path,
        trigger: str = "0 seconds",
        max_offsets: int = DEFAULT_MAX_OFFSETS,
        name: str = "penstock-pipeline",
    ) -> StreamingQuery:
        """Start routing; takes over from any other pipeline, as ``route`` does."""
        epoch = take_over(self._location)
        stretches = route_stream(self._spark, self._location, "stretches", epoch, max_offsets)

        def run(batch: DataFrame, _: int) -> None:
            todo = [Stretch(row["log"], row["begin"], row["end"]) for row in batch.collect()]
            self._route(todo, epoch)

        writer = stretches.writeStream.queryName(name).foreachBatch(run)
        return triggered(writer, checkpoint, trigger).start()

    def _route(self, todo: list[Stretch], epoch: int) -> None:
        client = FlightStore(self._location)
        filters: dict[int, Mapping[str, str]] = {}
        versions: dict[int, int] = {}
        bounds: list[Stretch] = []
        for log, begin, end in todo:
            live = client.filters(begin)
            filters[log], versions[log] = live.filters, live.filters_version
            # Offsets with other live filters are left to the next micro-batch.
            until = end if live.until is None else min(end, live.until)
            bounds.append(Stretch(log, begin, until))
        if not bounds:
            return
        matches = self._matches(bounds, filters)
        stages = []
        try:
            for stretch in bounds:
                mine = matches.filter(pc.equal(matches["log"], stretch.log))
                rows = mine.select(MATCHES.names).cast(MATCHES).to_batches()
                stage = new_stage()
                version = versions[stretch.log]
                client.stage(stage, rows, **stretch._asdict(), filters_version=version, epoch=epoch)
                stages.append(stage)
            commit(self._location, stages, epoch)
        except BaseException:
            with contextlib.suppress(PenstockError):
                client.drop_stages(stages)
            raise

    def _matches(self, bounds: list[Stretch], filters: Mapping[int, Mapping[str, str]]) -> pa.Table:
        log = (
            self._spark.read.format("penstock")
            .options(
                location=self._location,
                table="log",
                payload=str(self._payload).lower(),
                stretches=msgspec.json.encode(bounds).decode(),
            )
            .load()
        )
        for step in self._steps:
            log = log.transform(step)
        _check(log)
        extra = [name for name in log.columns if name not in _LOG_COLUMNS]
        rows = log.select(*_NEEDED, *extra)
        matched = rows.mapInArrow(_matching(filters, extra), "log int, offset bigint, queue string")
        return matched.toArrow()


def _check(log: DataFrame) -> None:
    missing = [name for name in _NEEDED if name not in log.columns]
    if missing:
        raise InvalidInput(
            f"the transformation must keep the columns of the log; {', '.join(missing)} is gone"
        )
    twice = {name for name in log.columns if log.columns.count(name) > 1}
    if twice:
        raise InvalidInput(f"the transformation has column {min(twice)!r} twice: rename one")


def _matching(
    filters: Mapping[int, Mapping[str, str]], extra: list[str]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function that matches on the executors."""

    def match(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            logs = batch.column("log")
            for log in pc.unique(logs).to_pylist():
                part = batch.filter(pc.equal(logs, log))
                added = {name: _values(part.column(name), name) for name in extra}
                found = match_batch(matcher_of(filters[log]), part, added)
                numbers = pa.repeat(pa.scalar(log, pa.int32()), found.num_rows)
                yield pa.record_batch([numbers, *found.columns], names=["log", "offset", "queue"])

    return match


def _values(column: pa.Array, name: str) -> list[Any]:
    kind = column.type
    plain = (pa.types.is_string, pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    if pa.types.is_decimal(kind):
        column = column.cast(pa.float64())
    elif not any(test(kind) for test in plain) and not pa.types.is_null(kind):
        raise InvalidInput(
            f"column {name!r} is {kind}: an attribute is text, a number or true or false"
        )
    values: list[Any] = column.to_pylist()
    return values
