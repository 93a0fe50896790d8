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

A :class:`Pipeline` has a DataFrame transformation between the log and the queues, still exactly
once. Its stream carries only the stretches that are to be routed: for each micro-batch the log is
read as an ordinary DataFrame, the transformation is applied to it, and its rows are matched.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import StreamingQueryException
from pyspark.sql.datasource import (
    DataSourceStreamArrowWriter,
    InputPartition,
    WriterCommitMessage,
)

from penstock import limits
from penstock.clock import SystemClock
from penstock.errors import InvalidInput, PenstockError
from penstock.flight.client import FlightStore, locate, route_status
from penstock.flight.protocol import MATCHES
from penstock.model import AssignStatus
from penstock.spark.log import (
    COLUMNS,
    PACKED_COLUMNS,
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
from penstock.spark.reader import ROUTING, LogPartition, check_columns
from penstock.spark.sessions import (
    is_connect,
    parallelism,
    place_of,
    session,
    settings_for_query,
)
from penstock.spark.stream import LogStreamReader, in_one_line, most_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.datasource import ReadLimit
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter
    from pyspark.sql.types import StructType

    from penstock.model import LiveFilters
    from penstock.spark.source import Options

logger = logging.getLogger(__name__)

DEFAULT_MAX_OFFSETS: Final = 100_000
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
# The columns that a transformation must keep, and all that the log has.
_NEEDED: Final = ("log", *COLUMNS)
_LOG_COLUMNS: Final = (*_NEEDED, "delay_ms", "attributes", "payload")

status = route_status


def route(
    location: str,
    *,
    spark: SparkSession | None = None,
    checkpoint: str | Path,
    trigger: str = "0 seconds",
    max_offsets: int = DEFAULT_MAX_OFFSETS,
    name: str = "penstock-route",
    token: str | None = None,
    ca: str | Path | None = None,
) -> StreamingQuery:
    """Start routing, and return the running query: ``awaitTermination()`` or ``stop()`` it.

    ``trigger`` is how often to look (``"0 seconds"``: again at once), or ``"available now"``: route
    what there is and end. Starting fences every pipeline that was started before, here or
    elsewhere: it ends with an error that says so. ``token`` and ``ca`` are the access to the
    broker; without them PENSTOCK_TOKEN and PENSTOCK_CA of this process are.

    >>> query = route("grpc://127.0.0.1:8815", checkpoint="/var/lib/penstock/route")
    ...                                                # doctest: +SKIP
    >>> query.awaitTermination()                       # doctest: +SKIP
    """
    location = locate(location, token=token, ca=ca)
    spark = spark or session(name=name)
    epoch = take_over(location)
    matches = route_stream(spark, location, "matches", epoch, max_offsets)
    writer = matches.writeStream.format("penstock").outputMode("append")
    writer = writer.options(**place_of(location), table="assignments", epoch=str(epoch))
    return _started(spark, name, writer, checkpoint, trigger)


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
    spark: SparkSession, location: str, table: str, epoch: int, max_offsets: int
) -> DataFrame:
    """Return a stream of the messages to route: as matches, or as bare stretches."""
    if table == "stretches" and is_connect(spark):
        raise InvalidInput(
            "a pipeline with a transformation runs in Spark's driver, and Spark Connect has none "
            "here: use a session of its own (penstock.spark.session('spark://…')), or route() "
            "without a transformation"
        )
    options = {
        **place_of(location),
        "table": table,
        "epoch": str(epoch),
        "maxOffsetsPerTrigger": str(max_offsets),
        "minPartitions": str(min(limits.MAX_PARTITIONS, parallelism(spark))),
    }
    return spark.readStream.format("penstock").options(**options).load()


def fenced(mine: int | None, now: int) -> InvalidInput:
    """Return the error of a pipeline that another one has taken the place of."""
    return InvalidInput(
        "another pipeline has taken over, or the routing was switched meanwhile: the epoch is "
        f"{now}, this one has {mine}. Only the one that was started last routes; everything that "
        "this one had routed stays as it is"
    )


def _started(
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
            client.drop_stages(stages)
        raise


@dataclass
class RoutePartition(InputPartition):
    """Pieces of the log that one task matches and stages, one after the other."""

    pieces: list[Stretch]


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

    @in_one_line()
    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Return the store's cursors."""
        client = FlightStore(self._options.location)
        return offset_of(client.log_stats().cursors, client.info().store_id)

    @in_one_line()
    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Return how far the next micro-batch routes; ``start`` if there is nothing to do."""
        client = FlightStore(self._options.location)
        store_id = client.info().store_id
        check_store(start, store_id)
        plan = client.route_plan(max_offsets=most_rows(limit))
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
        end |= {"store": store_id, "filters": plan.filters_version}
        if again:
            end["again"] = again
        known = todo[0].begin + plan.lag[todo[0].log]
        self._latest |= {str(log): known for log in sorted(plan.lag)}
        return end

    @in_one_line()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Note how far the log goes: later messages are for the next run."""
        self._end = FlightStore(self._options.location).log_stats().end

    @in_one_line()
    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Cut the stretches between the cursors and ``end`` into tasks."""
        client = FlightStore(self._options.location)
        check_store(start, client.info().store_id)
        log_stats = client.log_stats()
        todo = [
            Stretch(log, max(log_stats.cursors[log], log_stats.earliest), min(until, log_stats.end))
            for log, until in sorted(logs_of(end).items())
            if log in log_stats.cursors
        ]
        todo = [stretch for stretch in todo if stretch.begin < stretch.end]
        if self._options.table == "matches":
            return dealt(todo, self._options.partitions)
        return [LogPartition(stretch) for stretch in todo]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Match one part of a micro-batch, with the filters that are live for it now."""
        if isinstance(partition, LogPartition):
            columns = [pa.array([value]) for value in partition.stretch]
            yield self._shape.fit(pa.record_batch(columns, names=["log", "begin", "end"]))
            return
        assert isinstance(partition, RoutePartition)
        freeze_imports()
        stages = self._staged(partition.pieces)
        yield self._shape.fit(pa.record_batch([pa.array(stages)], names=["stage"]))

    def _staged(self, pieces: Sequence[Stretch]) -> list[str]:
        """Stage the matches of each piece, in parts if filters change within it."""
        client = FlightStore(self._options.location)
        live, live_from = None, 0
        with dropped_on_failure(client) as stages:
            for log, first, end in pieces:
                begin = first
                while begin < end:
                    if live is None or not live_from <= begin < (live.until or end):
                        live, live_from = client.filters(begin), begin
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


def commit(location: str, stages: Sequence[str], epoch: int | None) -> int:
    """Commit stages; return how many assignments that placed, beyond stages assigned before.

    Stages that did not take are left to the next micro-batch, which begins at the cursor; that
    another pipeline has taken over is an error.
    """
    if not stages:
        return 0
    client = FlightStore(location)
    try:
        results = client.commit_stages(list(stages), epoch=epoch)
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
            FlightStore(self._location).drop_stages(_stages(messages))


def _stages(messages: list[WriterCommitMessage | None]) -> list[str]:
    return [stage for one in messages if isinstance(one, Staged) for stage in one.stages]


# --- pipelines ------------------------------------------------------------------------------------


def pipeline(
    spark: SparkSession,
    location: str,
    *,
    token: str | None = None,
    ca: str | Path | None = None,
) -> Pipeline:
    """Return a pipeline from the log of the broker at ``location`` to its queues."""
    return Pipeline(spark, locate(location, token=token, ca=ca))


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

        writer = stretches.writeStream.foreachBatch(run)
        return _started(self._spark, name, writer, checkpoint, trigger)

    def _route(self, todo: list[Stretch], epoch: int) -> None:
        if not todo:
            return
        client = FlightStore(self._location)
        live = {log: client.filters(begin) for log, begin, _ in todo}
        # Offsets with other live filters are left to the next micro-batch.
        bounds = [Stretch(log, begin, min(end, live[log].until or end)) for log, begin, end in todo]
        matches = self._matches(bounds, live)
        with dropped_on_failure(client) as stages:
            for stretch in bounds:
                mine = matches.filter(pc.equal(matches["log"], stretch.log))
                stages.append(SystemClock().lease_id().hex())
                client.stage(
                    stages[-1],
                    mine.select(MATCHES.names).cast(MATCHES).to_batches(),
                    **stretch._asdict(),
                    filters_version=live[stretch.log].filters_version,
                    epoch=epoch,
                )
            commit(self._location, stages, epoch)

    def _matches(self, bounds: list[Stretch], live: Mapping[int, LiveFilters]) -> pa.Table:
        log = (
            self._spark.read.format("penstock")
            .options(
                **place_of(self._location),
                table="log",
                payload=str(self._payload).lower(),
                stretches=msgspec.json.encode(bounds).decode(),
            )
            .load()
        )
        for step in self._steps:
            log = log.transform(step)
        missing = [name for name in _NEEDED if name not in log.columns]
        if missing:
            raise InvalidInput(
                f"the transformation must keep the columns of the log; {', '.join(missing)} is gone"
            )
        twice = {name for name in log.columns if log.columns.count(name) > 1}
        if twice:
            raise InvalidInput(f"the transformation has column {min(twice)!r} twice: rename one")
        extra = [name for name in log.columns if name not in _LOG_COLUMNS]
        filters = {number: each.filters for number, each in live.items()}
        match = _matching(filters, extra)
        rows = log.select(*_NEEDED, *extra)
        return rows.mapInArrow(match, "log int, offset bigint, queue string").toArrow()


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
