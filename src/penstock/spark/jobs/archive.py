"""Archive: done, failed and their attempts into Parquet, verified, then out of the store.

::

    pin rows ─▶ write Parquet ─▶ read back, compare ─▶ record the run ─▶ trim the store
                └──── a crash here leaves files that nobody counts ────┘ └─ the next run trims ─┘

What is archived already is known by the sequence numbers that recorded runs reach to, so a run that
is repeated after a crash at any point neither loses nor doubles a row. Attempts have no such
numbers: those of a message that was archived as failed, and redriven before it was trimmed, are
looked for in the archive.

The option ``includeArchive`` of the data source (``penstock.spark.archive``) reads it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import DateType, StringType, StructField, StructType

from penstock.clock import SystemClock
from penstock.errors import InvalidInput, QueueNotFound, StorageFailed
from penstock.flight.client import FlightStore
from penstock.flight.tables import schema_of
from penstock.spark.archive import Part, Reach, Run, Runs
from penstock.spark.sessions import pinned, read

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

_ENDED: Final = {"done": "done_at", "failed": "failed_at", "attempts": "ended_at"}
_STATES: Final = ("done", "failed")
_MESSAGE: Final = ["queue", "message_id"]
_ATTEMPT: Final = ["queue", "message_id", "attempt", "claimed_at"]


class Archived(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run: rows by table, partitions written, messages trimmed from the store."""

    run: int | None
    rows: dict[str, int]
    partitions: int
    trimmed: int
    dry_run: bool


def archive(
    spark: SparkSession,
    location: str,
    path: str | Path,
    *,
    queues: Sequence[str] | None = None,
    states: Sequence[str] = _STATES,
    keep_ms: int = 0,
    payload: bool = True,
    trim: bool = True,
    dry_run: bool = False,
    token: str | None = None,
    ca: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Archived:
    """Move the history of queues to ``path``, partitioned by queue and (UTC) date.

    ``path`` is a directory that driver and executors share. What ended less than ``keep_ms`` ago
    stays. ``payload=False`` leaves payloads out: the store drops those that nothing else needs.
    Failed messages that are archived can't be redriven any more; ``states=["done"]`` leaves them.
    ``trim=False`` only copies; a later run trims. ``progress`` is told each step by name.

    >>> archive(spark, "grpc://127.0.0.1:8815", "/srv/archive", keep_ms=86_400_000)
    ...                                                        # doctest: +SKIP
    """
    if not states or not set(states) <= set(_STATES) or len(set(states)) < len(states):
        raise InvalidInput(f"states to archive are done and failed, not {list(states)!r:.100}")
    runs = Runs(path)
    client = FlightStore(location, token=token, ca=ca)
    location = client.location
    store_id = client.info().store_id
    runs.check_store(store_id)
    tell = progress or (lambda _: None)
    job = _Job(spark, location, client, store_id, runs, queues, states, tell)
    if dry_run:
        tables, _ = job.choose(keep_ms, payload=False)
        rows = {table: frame.count() for table, frame in tables.items()}
        return Archived(run=None, rows=rows, partitions=0, trimmed=0, dry_run=True)
    with runs.locked():
        runs.remove_leftovers()
        tell("chosen")
        tables, made_at = job.choose(keep_ms, payload=payload)
        run = job.write(tables, made_at, payload=payload)
        trimmed = job.trim() if trim else 0
        tell("trimmed")
    counts = dict.fromkeys(tables, 0)
    for part in run.parts if run else ():
        counts[part.table] += part.rows
    return Archived(
        run=run.number if run else None,
        rows=counts,
        partitions=len(run.parts) if run else 0,
        trimmed=trimmed,
        dry_run=False,
    )


class _Job(NamedTuple):
    spark: SparkSession
    location: str
    client: FlightStore
    store_id: str
    runs: Runs
    queues: Sequence[str] | None
    states: Sequence[str]
    tell: Callable[[str], None]

    def choose(self, keep_ms: int, *, payload: bool) -> tuple[dict[str, DataFrame], dict[str, int]]:
        """Pin what is to be archived: ended messages first, then the attempts at them."""
        at_ms, made_at = self.client.queues(self.queues)
        options = {"payload": "true"} if payload else {}
        tables = {}
        for state in self.states:
            rows = read(self.spark, self.location, state, queues=self.queues, **options)
            if keep_ms:
                rows = self._older(rows, state, at_ms - keep_ms)
            tables[state] = pinned(self._fresh(rows, self.runs.ends(state, made_at)))
        now = self.client.queues().created_at_ms
        if now != made_at:
            # A queue that was made anew meanwhile has rows here that nobody can tell apart.
            sure = [queue for queue, time_ms in made_at.items() if now.get(queue) == time_ms]
            of_these = F.col("queue").isin(sure)
            tables = {state: rows.where(of_these) for state, rows in tables.items()}
        ended = [rows.select(*_MESSAGE) for rows in tables.values()]
        chosen = (ended[0] if len(ended) == 1 else ended[0].union(ended[1])).distinct()
        attempts = read(self.spark, self.location, "attempts", queues=self.queues)
        attempts = attempts.where("ended_at IS NOT NULL").join(chosen, _MESSAGE, "left_semi")
        tables["attempts"] = self._new_attempts(chosen, pinned(attempts))
        return tables, made_at

    def _fresh(self, rows: DataFrame, ends: Mapping[str, int]) -> DataFrame:
        """Leave out rows that are archived."""
        if not ends:
            return rows
        reached = self.spark.createDataFrame(list(ends.items()), "queue string, _end bigint")
        joined = rows.join(F.broadcast(reached), "queue", "left")
        return joined.where("_end IS NULL OR sequence >= _end").select(*rows.columns)

    def _older(self, rows: DataFrame, state: str, until_ms: int) -> DataFrame:
        """Leave out rows that ended later than a time, and all that are beyond such a row.

        What is archived is told by sequence numbers, and so is what may be trimmed. Processes that
        share a store give them out in no order of time: what is old can be beyond what is young.
        """
        ended = _ENDED[state]
        columns = ("queue", "sequence", ended)
        every = read(self.spark, self.location, state, queues=self.queues, columns=columns)
        young = F.col(ended) > F.timestamp_millis(F.lit(until_ms))
        end = F.coalesce(F.min(F.when(young, F.col("sequence"))), F.max("sequence") + 1)
        reach = pinned(every.groupBy("queue").agg(end.alias("_until")))
        joined = rows.where(~young).join(F.broadcast(reach), "queue")
        return joined.where("sequence < _until").select(*rows.columns)

    def _new_attempts(self, chosen: DataFrame, attempts: DataFrame) -> DataFrame:
        """Leave out attempts that are archived: with a failure that was redriven before a trim."""
        failed, known = self.runs.folders("failed"), self.runs.folders("attempts")
        if not failed or not known:
            return attempts
        archived = self._load("failed", failed).select(*_MESSAGE)
        twice = pinned(chosen.join(archived, _MESSAGE, "left_semi"))
        if twice.isEmpty():
            return attempts
        there = self._load("attempts", known).select(*_ATTEMPT).join(twice, _MESSAGE, "left_semi")
        return pinned(attempts.join(there, _ATTEMPT, "left_anti").select(*attempts.columns))

    def _load(self, table: str, folders: Sequence[Path]) -> DataFrame:
        """Read archived files with the columns that the table has, whatever their run left out."""
        schema = from_arrow_schema(schema_of(table, payload=table != "attempts"))
        fields = [StructField(field.name, field.dataType) for field in schema.fields]
        fields += [StructField("date", DateType()), StructField("run", StringType())]
        reader = self.spark.read.schema(StructType(fields))
        reader = reader.option("basePath", str(self.runs.place / table))
        return reader.parquet(*map(str, folders))

    def write(
        self, tables: Mapping[str, DataFrame], made_at: Mapping[str, int], *, payload: bool
    ) -> Run | None:
        """Write, verify and record one run; None if there is nothing to archive."""
        bounds = (F.min("sequence"), F.max("sequence") + 1, F.count("*"))
        reaches = [
            Reach(
                queue=queue,
                created_at_ms=made_at[queue],
                state=state,
                begin=begin,
                end=end,
                rows=rows,
            )
            for state in self.states
            for queue, begin, end, rows in tables[state].groupBy("queue").agg(*bounds).collect()
        ]
        if not reaches:
            return None
        number = max((run.number for run in self.runs.runs), default=0) + 1
        expected: dict[str, list[Part]] = {}
        for table, frame in tables.items():
            dated = frame.withColumn("date", F.expr(_DATE.format(_ENDED[table])))
            expected[table] = _parts(dated, table)
            if expected[table]:
                writer = dated.repartition("queue", "date").write.partitionBy("queue", "date")
                writer.parquet(str(self.runs.folder(table, number)))
        self.tell("written")
        for table, parts in expected.items():
            if parts:
                written = self._load(table, [self.runs.folder(table, number)])
                _compare(parts, _parts(written.select(*tables[table].columns, "date"), table))
        self.tell("verified")
        run = Run(
            version=1,
            store_id=self.store_id,
            number=number,
            at_ms=SystemClock().now_ms(),
            payload=payload,
            reaches=reaches,
            parts=[part for parts in expected.values() for part in parts],
        )
        self.runs.record(run)
        self.tell("recorded")
        return run

    def trim(self) -> int:
        """Remove from the store what recorded runs hold, of this run and of any before it."""
        removed = 0
        for (queue, made_at_ms, state), end in sorted(self.runs.reached().items()):
            if state in self.states and (self.queues is None or queue in self.queues):
                self.tell(f"trimming {state} of {queue}")
                # A queue that is gone has nothing to trim, and one that was made anew is another.
                with contextlib.suppress(QueueNotFound):
                    removed += self.client.trim(
                        queue, state=state, before=end, created_at_ms=made_at_ms
                    )
        return removed


# The UTC day, whatever zone the session is in.
_DATE: Final = "date_from_unix_date(CAST(floor(unix_micros({}) / 86400000000) AS INT))"


def _parts(frame: DataFrame, table: str) -> list[Part]:
    """Count each partition's rows and sum up their hashes, which no order of rows changes."""
    values = [
        # A map can't be hashed; its entries can.
        F.map_entries(name) if name == "attributes" else F.col(name)
        for name in sorted(frame.columns)
    ]
    digest = F.sum(F.xxhash64(*values).cast("decimal(38,0)")).cast("string")
    found = frame.groupBy("queue", "date").agg(F.count("*"), digest).collect()
    return [
        Part(table=table, queue=queue, date=date.isoformat(), rows=rows, checksum=checksum)
        for queue, date, rows, checksum in sorted(found)
    ]


def _compare(wanted: Sequence[Part], found: Sequence[Part]) -> None:
    for part in wanted:
        if part not in found:
            raise StorageFailed(
                f"archived {part.table} of queue {part.queue} on {part.date} do not read back as "
                "written; nothing was removed from the store, and the next run writes them again"
            )
    if len(found) != len(wanted):
        raise StorageFailed("the archive has partitions that were not written by this run")
