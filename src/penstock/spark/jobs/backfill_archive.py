"""Backfill below the log: what a queue wants of an archive, and of what other queues still hold.

::

    executors: archive and store, filtered ─▶ each message once ─▶ in order, a window at a time ─▶
    broker: restore

Messages are looked for in the order that they move in: waiting ones first, then those that have
ended, then the archive. What goes the other way meanwhile (redriven, or moved to another queue) is
noticed, and they are looked for again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

from penstock.errors import InvalidInput, StorageFailed
from penstock.flight.protocol import RESTORED
from penstock.spark.archive_runs import Runs
from penstock.spark.broker_client import store
from penstock.spark.jobs.common import pinned, read, translated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from pyspark.sql import Column, DataFrame, SparkSession

    from penstock.spark.broker_client import Store

__all__ = ["fill_archived", "lowest_since", "open_archive"]

# What one restore brings: neither broker nor executor holds more at a time.
_MESSAGES: Final = 1_000
_BYTES: Final = 16 << 20
_TRIES: Final = 3
_ABOUT: Final = tuple(name for name in RESTORED.names if name != "offset")
_COUNTS: Final = ("added", "already", "missing")
_DONE: Final = "begin bigint, end bigint, added bigint, already bigint, missing bigint"
_ENDED: Final = ("done", "failed")


def open_archive(location: str, path: str | Path) -> Runs:
    """Read the manifest of an archive, which must be one of this store."""
    runs = Runs(path)
    if not runs.exists():
        raise InvalidInput(f"there is no archive at {path!s:.200}: archive it there first")
    runs.check_store(store(location).store_id)
    return runs


def lowest_since(spark: SparkSession, location: str, path: str | Path, time_ms: int) -> int | None:
    """Return the lowest message of archive and store that was published then or later."""
    # Time never goes back in a store, so neither does it along the ids.
    rows = _tables(spark, location, path, ("message_id", "published_at"))
    since = F.col("published_at") >= F.timestamp_millis(F.lit(time_ms))
    with translated():
        lows = [each.where(since).agg(F.min("message_id")).collect()[0][0] for each in rows]
    return min((low for low in lows if low is not None), default=None)


def fill_archived(
    spark: SparkSession,
    location: str,
    path: str | Path,
    queue: str,
    filter_: str,
    stretches: Sequence[tuple[int, int]],
    *,
    dry_run: bool,
    progress: Callable[[int], None],
) -> dict[str, int]:
    """Fill a queue from stretches below the log; ``progress`` is told how many offsets are done."""
    client = store(location)
    runs = open_archive(location, path)
    scanned = sum(part.rows for run in runs.runs for part in run.parts if part.table in _ENDED)
    for each in client.stats().queues:
        scanned += each.available + each.delayed + each.in_flight + each.done + each.failed
    found = _wanted(spark, location, path, filter_, stretches)
    matched = found.count()
    sums = {"scanned": scanned, "matched": matched, **dict.fromkeys(_COUNTS, 0)}
    if dry_run:
        progress(sum(end - begin for begin, end in stretches))
        return sums
    at, last = stretches[0][0], stretches[-1][1]
    for row in _restored(found, location, queue, filter_, -(-matched // _MESSAGES)):
        if row["begin"] > at:
            client.restore([], queue=queue, begin=at, end=row["begin"], filter=filter_)
        at = row["end"]
        for name in _COUNTS:
            sums[name] += row[name]
        progress(sum(max(0, min(end, at) - begin) for begin, end in stretches))
    if at < last:
        # That there is nothing more is worth noting too.
        client.restore([], queue=queue, begin=at, end=last, filter=filter_)
        progress(sum(end - begin for begin, end in stretches))
    return sums


def _tables(
    spark: SparkSession,
    location: str,
    path: str | Path,
    columns: Sequence[str],
    **options: str,
) -> Iterator[DataFrame]:
    yield read(spark, location, "active", columns=columns, **options)
    for table in _ENDED:
        yield read(spark, location, table, columns=columns, includeArchive=str(path), **options)


def _wanted(
    spark: SparkSession,
    location: str,
    path: str | Path,
    filter_: str,
    stretches: Sequence[tuple[int, int]],
) -> DataFrame:
    """Find every message that the filter wants, once, with its payload if anybody has it."""
    client = store(location)
    inside = _inside(stretches)
    columns = ("message_id", *_ABOUT)
    for _ in range(_TRIES):
        before = _gone_back(client)
        tables = _tables(spark, location, path, columns, payload="true", filter=filter_)
        found = pinned(next(tables).where(inside))
        for each in tables:
            found = found.unionByName(each.where(inside))
        best = F.max_by(F.struct(*_ABOUT), F.col("payload").isNotNull())
        once = pinned(found.groupBy("message_id").agg(best.alias("m")).select("message_id", "m.*"))
        if _gone_back(client) == before:
            return once
    raise StorageFailed(
        "messages are redriven or moved all the time, so that some might be overlooked: run the "
        "backfill again when that has ended"
    )


def _inside(stretches: Sequence[tuple[int, int]]) -> Column:
    inside = F.lit(False)  # noqa: FBT003 - Spark's signature
    for begin, end in stretches:
        inside |= (F.col("message_id") >= begin) & (F.col("message_id") < end)
    return inside


def _gone_back(client: Store) -> dict[str, tuple[int, int]]:
    return {
        each.queue: (each.redriven_total, each.moved_in_total) for each in client.stats().queues
    }


def _restored(
    found: DataFrame, location: str, queue: str, filter_: str, windows: int
) -> Iterator[dict[str, int]]:
    """Restore messages in the order of their ids, one task after the other."""
    if not windows:
        return

    def restore(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        client = store(location)
        at: int | None = None
        for begin, end, rows in _windows(batches):
            first = begin if at is None else at
            at = end
            done = client.restore([rows], queue=queue, begin=first, end=end, filter=filter_)
            counts = (first, end, done.added, done.already, done.missing)
            names = ["begin", "end", *_COUNTS]
            yield pa.record_batch([pa.array([each], pa.int64()) for each in counts], names=names)

    ordered = found.repartitionByRange(windows, "message_id").sortWithinPartitions("message_id")
    with translated():
        for row in ordered.mapInArrow(restore, _DONE).toLocalIterator():
            yield row.asDict()


def _windows(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, int, pa.RecordBatch]]:
    """Cut batches into rows of bounded number and size: first id, id after the last, rows."""
    for batch in batches:
        ids = batch.column("message_id").to_pylist()
        sizes = pc.add(
            pc.fill_null(pc.binary_length(batch.column("payload")), 0),
            pc.binary_length(batch.column("attributes_json")),
        ).to_pylist()
        start = size = 0
        for at, bytes_ in enumerate([*sizes, None]):
            over = bytes_ is None or at - start >= _MESSAGES or size + bytes_ > _BYTES
            if over and at > start:
                yield ids[start], ids[at - 1] + 1, _shaped(batch.slice(start, at - start))
                start, size = at, 0
            size += bytes_ or 0


def _shaped(batch: pa.RecordBatch) -> pa.RecordBatch:
    columns = [batch.column("message_id"), *(batch.column(name) for name in _ABOUT)]
    cast = [column.cast(field.type) for column, field in zip(columns, RESTORED, strict=True)]
    return pa.RecordBatch.from_arrays(cast, schema=RESTORED)
