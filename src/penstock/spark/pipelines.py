"""Pipelines of your own: a DataFrame transformation between the log and the queues, exactly once.

::

    route_plan ──▶ stretches ──▶ foreachBatch: log as a DataFrame ──▶ transformation
                                                                           │ executors: match, stage
                                  driver: commit the stages' names ◀───────┘

The stream carries only the stretches that are to be routed: for each micro-batch the log is read
as an ordinary DataFrame, and the transformation is applied to it. The tasks that it ends in match
their rows and stage the matches with the broker as *parts* of the stretches, whatever rows of them
they have; the driver gets the names of these stages. Spark takes the answer of one attempt at each
task, so that the names are of all rows, each once; the commit has them all, and drops stages that
other attempts have left.

A part says the version of the filters that the plan has said. If they change meanwhile for a
message of the stretch, the commit is outdated, and the next micro-batch does it again.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import types as T  # noqa: N812 - as everybody calls it

from penstock import limits
from penstock.clock import SystemClock
from penstock.errors import InvalidInput, PenstockError
from penstock.flight.client import FlightStore
from penstock.spark.log import COLUMNS, LiveAt, Stretch, freeze_imports, match_batch, matcher_of
from penstock.spark.route import commit, route_stream, started, take_over
from penstock.spark.sessions import located, parallelism, place_of
from penstock.spark.writer import task_numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from penstock.flight.location import Location

    Step = Callable[[DataFrame], DataFrame]

# The types of the columns that a transformation must keep, and how to say them.
_NEEDED: Final[dict[str, tuple[tuple[type[T.DataType], ...], str]]] = {
    "log": ((T.IntegralType,), "an int"),
    "offset": ((T.IntegralType,), "a bigint"),
    "attributes_json": ((T.StringType,), "a string"),
    "group": ((T.StringType,), "a string"),
    "priority": ((T.NumericType,), "an int"),
    "published_at": ((T.TimestampType,), "a timestamp"),
    "size": ((T.NumericType,), "a bigint"),
}
assert set(_NEEDED) == {"log", *COLUMNS}
_LOG_COLUMNS: Final = (*_NEEDED, "delay_ms", "attributes", "payload")
# The types that an attribute can be made of.
_PLAIN: Final = (T.StringType, T.NumericType, T.BooleanType, T.NullType)


def pipeline(
    spark: SparkSession,
    location: str,
    *,
    token: str | None = None,
    ca: str | Path | None = None,
    retry_for: str | None = None,
) -> Pipeline:
    """Return a pipeline from the log of the broker at ``location`` to its queues."""
    return Pipeline(spark, located(location, token=token, ca=ca, retry_for=retry_for))


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

    It may do anything that keeps ``log`` and ``offset`` of a row, but not put rows off to a later
    micro-batch (state, watermarks). Columns of the log that it changes are matched as changed (not
    ``attributes``, which is a view of ``attributes_json``). A message whose rows are all dropped
    goes to no queue; one that a join has multiplied goes to every queue that one of its rows
    matches, once. The message itself is never changed: the enrichment is for routing.
    """

    def __init__(self, spark: SparkSession, location: Location) -> None:
        self._spark = spark
        self._location = location
        self._steps: tuple[Step, ...] = ()
        self._payload = False

    def transform(self, step: Step, *, payload: bool = False) -> Pipeline:
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
        max_offsets: int | None = None,
        name: str = "penstock-pipeline",
    ) -> StreamingQuery:
        """Start routing; takes over from any other pipeline, as ``route`` does."""
        epoch = take_over(self._location)
        stretches = route_stream(self._spark, self._location, "stretches", epoch, max_offsets)
        tasks = min(limits.MAX_PARTITIONS, parallelism(self._spark))
        run = _Batches(
            self._spark, self._location, self._steps, epoch, payload=self._payload, tasks=tasks
        )
        return started(
            self._spark, name, stretches.writeStream.foreachBatch(run), checkpoint, trigger
        )


@dataclass
class _Staging:
    """The facts that tasks of a micro-batch need to know: they travel to the executors."""

    location: Location
    epoch: int
    filters_version: int
    # The stages of this micro-batch, and of no other, begin so.
    prefix: str
    bounds: dict[int, Stretch]
    added: tuple[str, ...] = ()

    def stage(self, log: int, number: str, matches: Sequence[pa.RecordBatch]) -> str:
        """Stage matches as a part of the stretch of a log; return the stage's name."""
        name = f"{self.prefix}{number}-{log}"
        FlightStore(self.location).stage(
            name,
            matches,
            **self.bounds[log]._asdict(),
            filters_version=self.filters_version,
            epoch=self.epoch,
            part=True,
        )
        return name

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Match and stage the rows of a task; yield the names of its stages."""
        freeze_imports()
        filters = LiveAt(FlightStore(self.location))
        found: dict[int, list[pa.RecordBatch]] = {log: [] for log in self.bounds}
        for batch in batches:
            logs = batch.column("log")
            for log in pc.unique(logs).to_pylist():
                part = batch.filter(pc.equal(logs, log))
                if log not in found or part.column("offset").null_count:
                    raise InvalidInput(
                        "the transformation has a row that is no message of its micro-batch: log "
                        f"is {log}, or offset is null. An outer join may add such rows: leave them "
                        "out"
                    )
                live = filters.at(self.bounds[log].begin)
                columns = (_values(part.column(str(at))) for at in range(len(self.added)))
                added = dict(zip(self.added, columns, strict=True))
                found[log].append(match_batch(matcher_of(live.filters), part, added))
        number = "-".join(map(str, task_numbers()))
        stages = [
            self.stage(log, number, matches)
            for log, some in found.items()
            if (matches := [each for each in some if each.num_rows])
        ]
        yield pa.record_batch([pa.array(stages, pa.string())], names=["stage"])


@dataclass
class _Batches:
    """Routes micro-batches. Through Spark Connect it travels to the server, and runs there."""

    spark: SparkSession
    location: Location
    steps: tuple[Step, ...]
    epoch: int
    payload: bool
    tasks: int

    def __call__(self, batch: DataFrame, _: int) -> None:
        """Route the stretches of one micro-batch."""
        rows = batch.collect()
        if not rows:
            return
        bounds = {row["log"]: Stretch(row["log"], row["begin"], row["end"]) for row in rows}
        prefix = f"{SystemClock().lease_id().hex()}-"
        staging = _Staging(self.location, self.epoch, rows[0]["filters_version"], prefix, bounds)
        try:
            log = self._transformed(list(bounds.values()))
            extra = tuple(name for name in log.columns if name not in _LOG_COLUMNS)
            # By their numbers: to Spark a dot in a name means a field of a struct.
            quoted = (name.replace("`", "``") for name in extra)
            numbered = (f"`{name}` AS `{at}`" for at, name in enumerate(quoted))
            wanted = log.selectExpr(*(f"`{name}`" for name in _NEEDED), *numbered)
            if len(bounds) > 1:
                # A task has a stage for each log, and the broker keeps so many at a time.
                wanted = wanted.coalesce(max(1, limits.MAX_STAGES // 2 // len(bounds)))
            done = wanted.mapInArrow(replace(staging, added=extra), "stage string")
            # A stretch that no row has matched is one too.
            stages = [staging.stage(log, "none", []) for log in bounds]
            stages += [row["stage"] for row in done.collect()]
            commit(self.location, stages, self.epoch, others=prefix)
        except BaseException:
            with contextlib.suppress(PenstockError):
                FlightStore(self.location).briefly().drop_stages([], others=prefix)
            raise

    def _transformed(self, bounds: list[Stretch]) -> DataFrame:
        """Return the transformed log of some stretches; its columns are what they must be."""
        log = (
            self.spark.read.format("penstock")
            .options(
                **place_of(self.location),
                table="log",
                payload=str(self.payload).lower(),
                minPartitions=str(self.tasks),
                stretches=msgspec.json.encode(bounds).decode(),
            )
            .load()
        )
        for step in self.steps:
            log = step(log)
            if not isinstance(log, DataFrame):
                raise InvalidInput(
                    f"a transformation returns a DataFrame, not {type(log).__name__}"
                )
        check_transformed(log.schema)
        return log


def check_transformed(schema: T.StructType) -> None:
    """Refuse columns that can't be matched, each with what would be right."""
    names = schema.names
    missing = [name for name in _NEEDED if name not in names]
    if missing:
        raise InvalidInput(
            f"the transformation must keep the columns of the log; {', '.join(missing)} is gone"
        )
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise InvalidInput(f"the transformation has column {min(twice)!r} twice: rename one")
    for field in schema.fields:
        kinds, says = _NEEDED.get(
            field.name, (_PLAIN, "text, a number or true or false, as an attribute is")
        )
        ignored = field.name in _LOG_COLUMNS and field.name not in _NEEDED
        if not ignored and not isinstance(field.dataType, kinds):
            raise InvalidInput(
                f"the transformation makes column {field.name!r} {field.dataType.simpleString()}: "
                f"it must be {says}"
            )


def _values(column: pa.Array) -> list[Any]:
    values: list[Any] = (
        column.cast(pa.float64()) if pa.types.is_decimal(column.type) else column
    ).to_pylist()
    return values
