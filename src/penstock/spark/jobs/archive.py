"""Archive: done, failed and their attempts into Parquet, verified, then out of the store.

::

    pin rows ─▶ write Parquet ─▶ read back, compare ─▶ record the run ─▶ trim the store
                └──── a crash here leaves files that nobody counts ────┘ └─ the next run trims ─┘

What is archived already is known by the sequence numbers that recorded runs reach to, so a run that
is repeated after a crash at any point neither loses nor doubles a row. Attempts have no such
numbers: those of a message that was archived as failed, and redriven before it was trimmed, are
looked for in the archive.

The option ``includeArchive`` of the data source (``penstock.spark.archived``) reads it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import msgspec
from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it
from pyspark.sql.types import DateType, StringType, StructField, StructType

from penstock.clock import SystemClock
from penstock.errors import InvalidInput, QueueNotFound, StorageFailed
from penstock.flight.client import FlightStore
from penstock.spark.archived import Part, Reach, Run, Runs
from penstock.spark.options import read_options
from penstock.spark.reader import spark_schema
from penstock.spark.sessions import pinned, read

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import Column, DataFrame, SparkSession

_ENDED: Final = {"done": "done_at", "failed": "failed_at", "attempts": "ended_at"}
_STATES: Final = ("done", "failed")
_MESSAGE: Final = ("queue", "message_id")
_ATTEMPT: Final = ("queue", "message_id", "attempt", "claimed_at")


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
    tell = progress or (lambda _: None)
    runs = Runs(path)
    client = FlightStore(location)
    runs.check_store(client.info().store_id)
    if dry_run:
        tables, _ = _choose(spark, location, runs, queues, states, keep_ms, payload=False)
        rows = {table: frame.count() for table, frame in tables.items()}
        return Archived(run=None, rows=rows, partitions=0, trimmed=0, dry_run=True)
    with runs.locked():
        runs.remove_leftovers()
        tell("chosen")
        tables, born = _choose(spark, location, runs, queues, states, keep_ms, payload=payload)
        run = _write(spark, runs, tables, born, client.info().store_id, payload=payload, tell=tell)
        trimmed = _trim(location, runs, queues, states, tell) if trim else 0
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


def _load(spark: SparkSession, runs: Runs, table: str, folders: Sequence[str]) -> DataFrame:
    """Read archived files with the columns that the table has, whatever their run left out."""
    options = {"table": table, "location": "grpc://localhost:1"}
    if table != "attempts":
        options["payload"] = "true"
    schema = spark_schema(read_options(options))
    fields = [StructField(field.name, field.dataType) for field in schema.fields]
    fields += [StructField("date", DateType()), StructField("run", StringType())]
    reader = spark.read.schema(StructType(fields)).option("basePath", str(runs.place / table))
    return reader.parquet(*folders)


# --- choosing -------------------------------------------------------------------------------------


def _fresh(spark: SparkSession, frame: DataFrame, ends: Mapping[str, int]) -> DataFrame:
    """Leave out what is archived."""
    if not ends:
        return frame
    reached = spark.createDataFrame(list(ends.items()), "queue string, _end bigint")
    joined = frame.join(F.broadcast(reached), "queue", "left")
    kept = joined.where(F.col("_end").isNull() | (F.col("sequence") >= F.col("_end")))
    return kept.select(*frame.columns)


def _reach(
    spark: SparkSession, location: str, state: str, queues: Sequence[str] | None, until_ms: int
) -> DataFrame:
    """Return up to which sequence nothing ended later than a time, by queue.

    What is archived is told by sequence numbers, and so is what may be trimmed. Processes that
    share a store give them out in no order of time: what is old can be beyond what is young.
    """
    ended = _ENDED[state]
    rows = read(spark, location, state, queues=queues, columns=("queue", "sequence", ended))
    young = F.when(F.col(ended) > F.timestamp_millis(F.lit(until_ms)), F.col("sequence"))
    end = F.coalesce(F.min(young), F.max("sequence") + 1)
    return pinned(rows.groupBy("queue").agg(end.alias("_until")))


def _older(rows: DataFrame, reach: DataFrame, state: str, until_ms: int) -> DataFrame:
    """Leave out what ended later than a time, and what is beyond it."""
    old = rows.where(F.col(_ENDED[state]) <= F.timestamp_millis(F.lit(until_ms)))
    joined = old.join(F.broadcast(reach), "queue")
    return joined.where(F.col("sequence") < F.col("_until")).select(*rows.columns)


def _choose(
    spark: SparkSession,
    location: str,
    runs: Runs,
    queues: Sequence[str] | None,
    states: Sequence[str],
    keep_ms: int,
    *,
    payload: bool,
) -> tuple[dict[str, DataFrame], dict[str, int]]:
    """Pin what is to be archived: ended messages first, then the attempts at them."""
    at_ms, born = FlightStore(location).queues(queues)
    until_ms = at_ms - keep_ms
    options = {"payload": "true"} if payload else {}
    tables = {}
    for state in states:
        rows = read(spark, location, state, queues=queues, **options)
        if keep_ms:
            rows = _older(rows, _reach(spark, location, state, queues, until_ms), state, until_ms)
        tables[state] = pinned(_fresh(spark, rows, runs.ends(state, born)))
    now = FlightStore(location).queues().created_at_ms
    # A queue that was made anew meanwhile has rows here that nobody can tell apart.
    unsure = [queue for queue, made in born.items() if now.get(queue) != made]
    for state, rows in tables.items():
        sure = rows.where(F.col("queue").isin([q for q in born if q not in unsure]))
        tables[state] = sure if unsure or set(now) - set(born) else rows
    ended = [rows.select("queue", "message_id") for rows in tables.values()]
    chosen = (ended[0] if len(ended) == 1 else ended[0].union(ended[1])).distinct()
    attempts = read(spark, location, "attempts", queues=queues).where("ended_at IS NOT NULL")
    attempts = pinned(attempts.join(chosen, ["queue", "message_id"], "left_semi"))
    tables["attempts"] = _new_attempts(spark, runs, chosen, attempts)
    return tables, born


def _new_attempts(
    spark: SparkSession, runs: Runs, chosen: DataFrame, attempts: DataFrame
) -> DataFrame:
    """Leave out attempts that are archived: with a failure that was redriven before its trim."""
    folders = runs.folders("failed")
    if not folders:
        return attempts
    failed = _load(spark, runs, "failed", [str(folder) for folder in folders])
    twice = pinned(chosen.join(failed.select(*_MESSAGE), list(_MESSAGE), "left_semi"))
    folders = runs.folders("attempts")
    if not folders or twice.isEmpty():
        return attempts
    known = _load(spark, runs, "attempts", [str(folder) for folder in folders])
    known = known.select(*_ATTEMPT).join(twice, list(_MESSAGE), "left_semi")
    return pinned(attempts.join(known, list(_ATTEMPT), "left_anti").select(*attempts.columns))


# --- writing --------------------------------------------------------------------------------------


def _write(
    spark: SparkSession,
    runs: Runs,
    tables: Mapping[str, DataFrame],
    born: Mapping[str, int],
    store_id: str,
    *,
    payload: bool,
    tell: Callable[[str], None],
) -> Run | None:
    """Write, verify and record one run; None if there is nothing to archive."""
    reaches = [
        Reach(
            queue=row["queue"],
            created_at_ms=born[row["queue"]],
            state=state,
            begin=row["low"],
            end=row["high"] + 1,
            rows=row["rows"],
        )
        for state in _STATES
        if state in tables
        for row in tables[state]
        .groupBy("queue")
        .agg(
            F.min("sequence").alias("low"),
            F.max("sequence").alias("high"),
            F.count("*").alias("rows"),
        )
        .collect()
    ]
    if not reaches:
        return None
    number = runs.next_number()
    expected: list[Part] = []
    for table, frame in tables.items():
        dated = frame.withColumn("date", _date(table))
        parts = _checked(dated, table)
        if parts:
            writer = dated.repartition("queue", "date").write.partitionBy("queue", "date")
            writer.parquet(str(runs.folder(table, number)))
        expected += parts
    tell("written")
    for table in tables:
        wanted = [part for part in expected if part.table == table]
        found: list[Part] = []
        if wanted:
            written = _load(spark, runs, table, [str(runs.folder(table, number))])
            found = _checked(written.select(*tables[table].columns, "date"), table)
        _compare(wanted, found)
    tell("verified")
    run = Run(
        version=1,
        store_id=store_id,
        number=number,
        at_ms=SystemClock().now_ms(),
        payload=payload,
        reaches=reaches,
        parts=expected,
    )
    runs.record(run)
    tell("recorded")
    return run


def _date(table: str) -> Column:
    """Return the UTC day, whatever zone the session is in."""
    return F.expr(
        f"date_from_unix_date(CAST(floor(unix_micros({_ENDED[table]}) / 86400000000) AS INT))"
    )


def _checked(frame: DataFrame, table: str) -> list[Part]:
    """Count each partition's rows and sum up their hashes, which no order of rows changes."""
    values = [
        # A map can't be hashed; its entries can.
        F.map_entries(name) if name == "attributes" else F.col(name)
        for name in sorted(frame.columns)
    ]
    digest = F.xxhash64(*values).cast("decimal(38,0)")
    grouped = frame.groupBy("queue", "date").agg(
        F.count("*").alias("rows"), F.sum(digest).cast("string").alias("checksum")
    )
    return sorted(
        (
            Part(
                table=table,
                queue=row["queue"],
                date=row["date"].isoformat(),
                rows=row["rows"],
                checksum=row["checksum"],
            )
            for row in grouped.collect()
        ),
        key=lambda part: (part.queue, part.date),
    )


def _compare(wanted: Sequence[Part], found: Sequence[Part]) -> None:
    for part in wanted:
        if part not in found:
            raise StorageFailed(
                f"archived {part.table} of queue {part.queue} on {part.date} do not read back as "
                "written; nothing was removed from the store, and the next run writes them again"
            )
    if len(found) != len(wanted):
        raise StorageFailed("the archive has partitions that were not written by this run")


def _trim(
    location: str,
    runs: Runs,
    queues: Sequence[str] | None,
    states: Sequence[str],
    tell: Callable[[str], None],
) -> int:
    """Remove from the store what recorded runs hold, of this run and of any before it."""
    client = FlightStore(location)
    removed = 0
    for (queue, created_at_ms, state), end in sorted(runs.reached().items()):
        if state not in states or (queues is not None and queue not in queues):
            continue
        tell(f"trimming {state} of {queue}")
        # A queue that is gone has nothing to trim, and one that was made anew is another.
        with contextlib.suppress(QueueNotFound):
            removed += client.trim(queue, state=state, before=end, created_at_ms=created_at_ms)
    return removed
