"""The route job: the log into the queues, by Structured Streaming.

::

    log ──stretches──▶ executors: filters by index ──matches──▶ executors: stage ──▶ driver: commit
     ▲                                                              │                    │
     └── cursor, in the same change as the assignments ◀────────────┴────────────────────┘

**Exactly once**, and why: assignments and cursor are one change of the store, and every
micro-batch goes from the cursor, whatever its start offset, up to its end offset. A replay finds
nothing left to do. One that did not take (its filters were outdated, its stages were lost with the
server, driver or executor were killed) is simply still there to be done. Two pipelines can't both
assign: each takes an epoch when it starts, and the older one is refused. Spark's checkpoint only
says when to look: it may be deleted, kept or taken from a backup.

Matches do not travel through Spark: the task that makes them stages them with the broker, and gives
Spark the names of the stages. The broker assigns a stage as soon as the cursor has come to it,
while the tasks match what follows; the commit is for what is left. So tasks take pieces of the log
in turn. The broker drops a stage that is never committed after a while.

A micro-batch asks the broker twice: for the plan, which says all that there is to know, and for the
commit. :mod:`penstock.spark.pipelines` has a transformation between the log and the queues.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow as pa
from pyspark.errors import StreamingQueryException
from pyspark.sql.datasource import (
    DataSourceStreamArrowWriter,
    InputPartition,
    WriterCommitMessage,
)

from penstock import limits
from penstock.clock import SystemClock
from penstock.errors import InvalidInput, PenstockError
from penstock.flight.client import FlightStore, route_status
from penstock.model import AssignStatus
from penstock.spark.log import (
    LEAST_PIECE,
    PACKED_COLUMNS,
    LiveAt,
    Offset,
    Stretch,
    check_store,
    cut,
    freeze_imports,
    logs_of,
    match_batch,
    matcher_of,
    offset_of,
)
from penstock.spark.reader import ROUTING, check_columns
from penstock.spark.sessions import located, parallelism, place_of, session, settings_for_query
from penstock.spark.stream import LogStreamReader, in_one_line, most_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.datasource import ReadLimit
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter
    from pyspark.sql.types import StructType

    from penstock.model import RoutePlan
    from penstock.spark.source import Options

logger = logging.getLogger(__name__)

LEAST_MAX_OFFSETS: Final = 100_000
"""Messages in a micro-batch by default, where Spark has too few cores for more."""
PIECE: Final = 10_000
"""Offsets that a task matches before it stages them, about; more in a very large micro-batch."""
MOST_PIECES: Final = 1_000
AVAILABLE_NOW: Final = "available now"
MOST_AGAIN: Final = 50
"""Micro-batches in a row that may fail to take before something must be wrong."""

_SETTINGS: Final = {
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    "spark.sql.streaming.minBatchesToRetain": "20",
}
# Renames instead of a FileContext: a tenth of a second less for every micro-batch.
_ON_A_DISK: Final = {
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    )
}
# How long the next pipeline of a session waits for the end of one that it has fenced.
_FENCED_SECONDS: Final = 60

status = route_status


def route(
    location: str,
    *,
    spark: SparkSession | None = None,
    checkpoint: str | Path,
    trigger: str = "0 seconds",
    max_offsets: int | None = None,
    name: str = "penstock-route",
    token: str | None = None,
    ca: str | Path | None = None,
    retry_for: str | None = None,
) -> StreamingQuery:
    """Start routing, and return the running query: ``awaitTermination()`` or ``stop()`` it.

    ``trigger`` is how often to look (``"0 seconds"``: again at once), or ``"available now"``: route
    what there is and end. ``max_offsets`` bounds a micro-batch: by default 20,000 messages for
    each core that Spark has, and at least 100,000. Starting fences every pipeline that was started
    before, here or elsewhere: it ends with an error that says so. ``token`` and ``ca`` are the
    access to the broker; without them PENSTOCK_TOKEN and PENSTOCK_CA of this process are. A broker
    that is away is waited for, by default ``retry_for="5m"``.

    >>> query = route("grpc://127.0.0.1:8815", checkpoint="/var/lib/penstock/route")
    ...                                                # doctest: +SKIP
    >>> query.awaitTermination()                       # doctest: +SKIP
    """
    location = located(location, token=token, ca=ca, retry_for=retry_for)
    spark = spark or session(name=name)
    epoch = take_over(location)
    matches = route_stream(spark, location, "matches", epoch, max_offsets)
    writer = matches.writeStream.format("penstock").outputMode("append")
    writer = writer.options(**place_of(location), table="assignments", epoch=str(epoch))
    return started(spark, name, writer, checkpoint, trigger)


def take_over(location: str) -> int:
    """Fence every pipeline that was started before; return the epoch of this one."""
    client = FlightStore(location)
    routing = client.info().routing
    if routing != "pipeline":
        raise InvalidInput(
            f"the store at {location} routes {routing}: messages are in their queues when publish "
            "returns, and there is nothing to route; to have Spark route it, switch it: penstock "
            "log configure --routing pipeline"
        )
    return client.take_epoch()


def route_stream(
    spark: SparkSession, location: str, table: str, epoch: int, max_offsets: int | None
) -> DataFrame:
    """Return a stream of the messages to route: as matches, or as bare stretches."""
    cores = parallelism(spark)
    options = {
        **place_of(location),
        "table": table,
        "epoch": str(epoch),
        "maxOffsetsPerTrigger": str(max_offsets or default_max_offsets(cores)),
        "minPartitions": str(min(limits.MAX_PARTITIONS, cores)),
    }
    return spark.readStream.format("penstock").options(**options).load()


def default_max_offsets(cores: int) -> int:
    """Return so many messages for a micro-batch that each core gets a task."""
    return max(LEAST_MAX_OFFSETS, cores * LEAST_PIECE)


_TAKEN_OVER: Final = "another pipeline has taken over"


def is_fenced(error: BaseException) -> bool:
    """Whether an error, also one that went through Spark, is that of :func:`fenced`."""
    return _TAKEN_OVER in str(error)


def fenced(mine: int | None, now: int) -> InvalidInput:
    """Return the error of a pipeline that another one has taken the place of."""
    return InvalidInput(
        f"{_TAKEN_OVER}, or the routing was switched meanwhile: the epoch is "
        f"{now}, this one has {mine}. Only the one that was started last routes; everything that "
        "this one had routed stays as it is"
    )


def started(
    spark: SparkSession, name: str, writer: DataStreamWriter, checkpoint: str | Path, trigger: str
) -> StreamingQuery:
    """Start a query that routes, with the settings that it alone needs."""
    writer = writer.queryName(name).option("checkpointLocation", str(checkpoint))
    if trigger == AVAILABLE_NOW:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime=trigger)
    on_disk = {} if "://" in str(checkpoint) else _ON_A_DISK
    for earlier in spark.streams.active:
        if earlier.name == name:
            # It has just been fenced, and ends with an error that its own caller is told. Spark has
            # one query of a name at a time.
            with contextlib.suppress(StreamingQueryException):
                earlier.awaitTermination(_FENCED_SECONDS)
    with settings_for_query(spark, {**_SETTINGS, **on_disk}):
        return writer.start()


# --- the source: stretches that are still to be routed -------------------------------------------


@contextlib.contextmanager
def dropped_on_failure(client: FlightStore) -> Iterator[list[str]]:
    """Give a list for the names of stages, which are dropped if something fails."""
    stages: list[str] = []
    try:
        yield stages
    except BaseException:
        with contextlib.suppress(PenstockError):
            client.briefly().drop_stages(stages)
        raise


@dataclass
class RoutePartition(InputPartition):
    """Pieces of the log that one task matches and stages, one after the other."""

    pieces: list[Stretch]


@dataclass
class StretchesPartition(InputPartition):
    """The stretches of a micro-batch, and the version of the filters that they were planned by."""

    stretches: list[Stretch]
    filters_version: int


def dealt(todo: Sequence[Stretch], most: int) -> list[InputPartition]:
    """Deal pieces of stretches out to up to ``most`` tasks in turn.

    So the broker assigns the first pieces while the tasks match the others.
    """
    tasks = len(cut(todo, most))
    if not tasks:
        return []
    width = sum(stretch.end - stretch.begin for stretch in todo)
    rounds = min(-(-width // (PIECE * tasks)), max(1, MOST_PIECES // tasks))
    pieces = cut(todo, rounds * tasks, least=1)
    return [RoutePartition(pieces[task::tasks]) for task in range(tasks)]


class RouteStreamReader(LogStreamReader):
    """Plans stretches to route, and yields them as stages or bare.

    The table ``matches`` has a row for every stage. A stretch without matches is staged too, or
    the cursor would stay before it for ever.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        self._end: int | None = None
        self._planned: tuple[Offset, RoutePlan] | None = None

    def _plan(self, start: Offset, most: int | None) -> RoutePlan:
        """Ask the broker for a plan, which has all that a micro-batch needs to know."""
        plan = FlightStore(self._options.location).route_plan(max_offsets=most)
        check_store(start, plan.store_id)
        return plan

    @in_one_line()
    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Return the store's cursors."""
        plan = self._plan({}, 1)
        return offset_of(plan.cursors, plan.store_id)

    @in_one_line()
    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Return how far the next micro-batch routes; ``start`` if there is nothing to do."""
        plan = self._plan(start, most_rows(limit))
        if self._options.epoch is not None and plan.epoch != self._options.epoch:
            raise fenced(self._options.epoch, plan.epoch)
        last = limits.MAX_OFFSET if self._end is None else self._end
        todo = [
            Stretch(stretch.log, stretch.begin, min(stretch.end, last))
            for stretch in plan.stretches
            if stretch.begin < min(stretch.end, last)
        ]
        routed = {log: end - begin for log, begin, end in todo}
        lag = {str(log): behind - routed.get(log, 0) for log, behind in sorted(plan.lag.items())}
        # Ids are shared by the logs, which are mostly routed up to the same one.
        self._latest = {"lag": lag, "routed": max(routed.values(), default=0)}
        if not todo:
            return start
        end = _logs(start)
        end.update({str(stretch.log): stretch.end for stretch in todo})
        again = int(start.get("again", 0)) + 1 if end == _logs(start) else 0
        if again > MOST_AGAIN:
            raise InvalidInput(
                f"routing stands still: {todo} was matched {again} times, and never taken; the "
                "log of this job says why"
            )
        end |= {"store": plan.store_id, "filters": plan.filters_version}
        if again:
            end["again"] = again
        self._latest |= {str(log): plan.end for log in sorted(plan.lag)}
        self._planned = end, plan
        return end

    @in_one_line()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Note how far the log goes: later messages are for the next run."""
        self._end = FlightStore(self._options.location).log_stats().end

    @in_one_line()
    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Cut the stretches between the cursors and ``end`` into tasks."""
        # The plan that latestOffset has just made for this end still holds; a replay asks again.
        planned, self._planned = self._planned, None
        plan = planned[1] if planned and planned[0] == end else self._plan(start, None)
        ends = logs_of(end)
        todo = [
            Stretch(log, max(begin, plan.earliest), min(until, ends.get(log, 0)))
            for log, begin, until in sorted(map(msgspec.structs.astuple, plan.stretches))
        ]
        todo = [stretch for stretch in todo if stretch.begin < stretch.end]
        if self._options.table == "matches":
            return dealt(todo, self._options.partitions)
        return [StretchesPartition(todo, plan.filters_version)] if todo else []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Match one part of a micro-batch, with the filters that are live for it now."""
        if isinstance(partition, StretchesPartition):
            rows = [(*stretch, partition.filters_version) for stretch in partition.stretches]
            columns = [pa.array(values) for values in zip(*rows, strict=True)]
            yield self._shape.fit(pa.record_batch(columns, names=self._shape.names))
            return
        assert isinstance(partition, RoutePartition)
        freeze_imports()
        stages = self._staged(partition.pieces)
        yield self._shape.fit(pa.record_batch([pa.array(stages)], names=["stage"]))

    def _staged(self, pieces: Sequence[Stretch]) -> list[str]:
        """Stage the matches of each piece, in parts if filters change within it."""
        client = FlightStore(self._options.location)
        filters = LiveAt(client)
        with dropped_on_failure(client) as stages:
            for log, first, end in pieces:
                begin = first
                while begin < end:
                    live = filters.at(begin)
                    until = end if live.until is None else min(end, live.until)
                    matcher = matcher_of(live.filters)
                    batches = client.read_log(log, begin, until, columns=PACKED_COLUMNS)
                    found = [match_batch(matcher, batch) for batch in batches]
                    stages.append(SystemClock().lease_id().hex())
                    client.stage(
                        stages[-1],
                        [batch for batch in found if batch.num_rows],
                        log=log,
                        begin=begin,
                        end=until,
                        filters_version=live.filters_version,
                        epoch=self._options.epoch,
                        assign=True,
                    )
                    begin = until
        return stages


def _logs(offset: Offset) -> Offset:
    return {name: value for name, value in offset.items() if name.isdigit()}


# --- the sink: executors have staged, the driver commits -----------------------------------------


@dataclass
class Staged(WriterCommitMessage):
    """The stages that one task has handed on."""

    stages: list[str]


def commit(
    location: str, stages: Sequence[str], epoch: int | None, others: str | None = None
) -> int:
    """Commit stages; return how many assignments that placed, beyond stages assigned before.

    Stages whose names begin as ``others`` does are of tasks that came too late, and are dropped.
    Stages that did not take are left to the next micro-batch, which begins at the cursor; that
    another pipeline has taken over is an error.
    """
    if not stages:
        return 0
    client = FlightStore(location)
    try:
        results = client.commit_stages(list(stages), epoch=epoch, others=others)
    except InvalidInput as error:
        if "is not here" not in str(error):
            raise
        logger.warning("routed again in the next micro-batch: %s", error)
        return 0
    for result in results:
        if result.status == AssignStatus.FENCED:
            raise fenced(epoch, client.log_stats().epoch)
        if result.status in {AssignStatus.OUTDATED, AssignStatus.AHEAD}:
            logger.warning(
                "log %d is routed again from offset %d: the micro-batch was %s",
                result.log,
                result.cursor,
                result.status,
            )
            # The broker keeps stages that are not committed for an hour.
            with contextlib.suppress(PenstockError):
                client.drop_stages(list(stages))
    return sum(result.placed for result in results)


class AssignmentWriter(DataSourceStreamArrowWriter):
    """Gathers the stages of all tasks, and commits them all at once."""

    def __init__(self, options: Options, schema: StructType) -> None:
        check_columns(schema, ROUTING["matches"], "assignments")
        self._location = options.location
        self._epoch = options.epoch

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Hand on the stages of one task."""
        freeze_imports()
        return Staged([stage for batch in iterator for stage in batch.column("stage").to_pylist()])

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        """Hand the whole micro-batch over; Spark may call this again for the same one."""
        freeze_imports()
        commit(self._location, _stages(messages), self._epoch)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        """Drop the stages. Assignments that a commit may have made stay."""
        with contextlib.suppress(PenstockError):
            FlightStore(self._location).briefly().drop_stages(_stages(messages))


def _stages(messages: list[WriterCommitMessage | None]) -> list[str]:
    return [stage for one in messages if isinstance(one, Staged) for stage in one.stages]
