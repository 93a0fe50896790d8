"""Backfill: messages that a queue wants of the log or of an archive, and has not had.

::

    broker: plan ─▶ executors: read the log, match ─▶ broker: fill, a window at a time ─▶ …
    below the log:
    executors: archive and store, filtered ─▶ each message once ─▶ in order, a window at a time ─▶
    broker: fill

The broker notes which offsets a queue has been filled from in the same change as the messages, so
a backfill that is stopped goes on where it was, and nothing comes in twice.

Below the log, messages are looked for in the order that they move in: waiting ones first, then
those that have ended, then the archive. If some go the other way meanwhile (redriven, or moved to
another queue), the job notices and looks again.
"""

from __future__ import annotations

from itertools import chain, pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

from penstock.errors import InvalidInput, StorageFailed
from penstock.flight.client import FlightStore
from penstock.flight.protocol import ARCHIVED, OFFSETS
from penstock.spark.delta import Archive, ArchiveTable
from penstock.spark.log import COLUMNS, match_batch, matcher_of
from penstock.spark.sessions import located, parallelism, pinned, read, translated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

_WINDOW: Final = 200_000
_MATCHED: Final = "offset bigint, scanned bigint"
_TRIES: Final = 3
# The most of one restore: neither broker nor executor holds more at a time.
_MESSAGES: Final = 1_000
_BYTES: Final = 16 << 20
_ABOUT: Final = tuple(name for name in ARCHIVED.names if name != "offset")
_COUNTS: Final = ("added", "already", "missing")
_DONE: Final = "begin bigint, end bigint, added bigint, already bigint, missing bigint"
_ENDED: Final = ("done", "failed")


class Backfill(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a backfill; of a dry run, what it would look at.

    ``already``: matched, but the queue has had them. ``missing``: their payload is gone.
    """

    queue: str
    filter: str
    offsets: int
    scanned: int
    matched: int
    added: int
    already: int
    missing: int
    dry_run: bool


def backfill(
    spark: SparkSession,
    location: str,
    queue: str,
    *,
    from_: int | str | None = None,
    from_time_ms: int | None = None,
    to: int | None = None,
    archive: str | Path | None = None,
    window: int = _WINDOW,
    dry_run: bool = False,
    token: str | None = None,
    ca: str | Path | None = None,
    retry_for: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Backfill:
    """Fill a queue from the log, from an offset or a time on; by default all that is kept.

    With ``archive``, the place that the archive job was given, messages that the log has dropped
    come from there, and from other queues that still hold them.

    ``window`` is how many offsets are matched between two commits. ``progress`` is told offsets:
    done, and in all. With ``dry_run`` matches are counted, and the queue stays as it is; those
    that it has had already are counted too.

    >>> backfill(spark, "grpc://127.0.0.1:8815", "audit").added           # doctest: +SKIP
    """
    if window < 1:
        raise InvalidInput(f"window is at least 1, not {window}")
    client = FlightStore(located(location, token=token, ca=ca, retry_for=retry_for))
    location = client.location
    past = None
    if archive is not None:
        tables = Archive.at(archive).tables(client.info().store_id)
        past = _Past(spark, location, client, str(archive), tables)
    if from_time_ms is not None:
        if from_ is not None:
            raise InvalidInput("give 'from' or 'from_time_ms', not both")
        low = None if past is None else past.lowest_since(from_time_ms)
        logged = client.offset_at(from_time_ms)
        from_ = logged if low is None else min(low, logged)
    plan = client.backfill_plan(
        queue, from_="earliest" if from_ is None else from_, to=to, archived=archive is not None
    )
    # Stretches are cut where the log begins.
    first = plan.earliest
    below = [(begin, min(end, first)) for begin, end in plan.stretches if begin < first]
    kept = [(max(begin, first), end) for begin, end in plan.stretches if end > first]
    total = sum(end - begin for begin, end in plan.stretches)
    tell = progress or (lambda _, __: None)
    steps: Iterator[tuple[int, dict[str, int]]] = iter(())
    if below and past is not None:
        steps = past.fill(queue, plan.filter, below, dry_run=dry_run)
    windows = [
        (at, min(at + window, end)) for begin, end in kept for at in range(begin, end, window)
    ]
    filled = (
        (end - begin, _fill(spark, location, queue, plan.filter, begin, end, dry_run=dry_run))
        for begin, end in windows
    )
    done = 0
    sums = dict.fromkeys(("scanned", "matched", *_COUNTS), 0)
    for offsets, counts in chain(steps, filled):
        for name, count in counts.items():
            sums[name] += count
        done += offsets
        if offsets:
            tell(done, total)
    return Backfill(queue=queue, filter=plan.filter, offsets=total, dry_run=dry_run, **sums)


def _fill(
    spark: SparkSession,
    location: str,
    queue: str,
    filter_: str,
    begin: int,
    end: int,
    *,
    dry_run: bool,
) -> dict[str, int]:
    """Match the messages of one window on the executors, and fill the queue with them."""
    tasks = max(1, min(parallelism(spark), end - begin))
    borders = [begin + (end - begin) * number // tasks for number in range(tasks + 1)]
    parts = spark.createDataFrame(list(pairwise(borders)), "begin bigint, end bigint")

    def match(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        client = FlightStore(location)
        matcher = matcher_of({queue: filter_})
        for row in (row for batch in batches for row in batch.to_pylist()):
            for log in client.log_stats().cursors:
                for batch in client.read_log(log, row["begin"], row["end"], columns=COLUMNS):
                    found = match_batch(matcher, batch).column("offset")
                    # The first row counts: it has no offset of its own.
                    scanned = pa.array([batch.num_rows] + [0] * len(found))
                    offsets = pa.concat_arrays([pa.nulls(1, pa.int64()), found])
                    yield pa.record_batch([offsets, scanned], names=["offset", "scanned"])

    with translated():
        rows = parts.repartition(tasks).mapInArrow(match, _MATCHED).toArrow()
    offsets = rows.column("offset").drop_null().sort()
    counts = {"scanned": pc.sum(rows.column("scanned")).as_py() or 0, "matched": len(offsets)}
    if dry_run:
        return counts
    matched = pa.table([offsets], schema=OFFSETS).to_batches()
    filled = FlightStore(location).fill(matched, queue=queue, begin=begin, end=end, filter=filter_)
    return {**counts, **{name: getattr(filled, name) for name in _COUNTS}}


# --- below the log --------------------------------------------------------------------------------


class _Past(NamedTuple):
    """Messages that the log has dropped: those of an archive, and those that queues still hold."""

    spark: SparkSession
    location: str
    client: FlightStore
    place: str
    archived: Mapping[str, ArchiveTable]

    def lowest_since(self, time_ms: int) -> int | None:
        """Return the lowest message that was published then or later."""
        # Time never goes back in a store, so neither does it along the ids.
        since = F.col("published_at") >= F.timestamp_millis(F.lit(time_ms))
        tables = self._tables(("message_id", "published_at"))
        with translated():
            lows = [each.where(since).agg(F.min("message_id")).collect()[0][0] for each in tables]
        return min((low for low in lows if low is not None), default=None)

    def fill(
        self, queue: str, filter_: str, stretches: Sequence[tuple[int, int]], *, dry_run: bool
    ) -> Iterator[tuple[int, dict[str, int]]]:
        """Fill a queue from stretches; yield, of each step, how many offsets it did, and counts."""
        archived = (self.archived[name] for name in _ENDED if name in self.archived)
        scanned = sum(file.rows for table in archived for file in table.files())
        for each in self.client.stats().queues:
            scanned += each.available + each.delayed + each.in_flight + each.done + each.failed
        found = self._wanted(filter_, stretches)
        matched = found.count()
        total = sum(end - begin for begin, end in stretches)
        yield total if dry_run else 0, {"scanned": scanned, "matched": matched}
        if dry_run:
            return
        done, at, last = 0, stretches[0][0], stretches[-1][1]
        for row in _restored(found, self.location, queue, filter_, -(-matched // _MESSAGES)):
            if row["begin"] > at:
                self.client.fill(
                    [], ARCHIVED, queue=queue, begin=at, end=row["begin"], filter=filter_
                )
            at = row["end"]
            before, done = done, sum(max(0, min(end, at) - begin) for begin, end in stretches)
            yield done - before, {name: row[name] for name in _COUNTS}
        if at < last:
            # That there is nothing more is worth noting too.
            self.client.fill([], ARCHIVED, queue=queue, begin=at, end=last, filter=filter_)
            yield total - done, {}

    def _tables(self, columns: Sequence[str], **options: str) -> Iterator[DataFrame]:
        yield read(self.spark, self.location, "active", columns=columns, **options)
        options["includeArchive"] = self.place
        for table in _ENDED:
            yield read(self.spark, self.location, table, columns=columns, **options)

    def _wanted(self, filter_: str, stretches: Sequence[tuple[int, int]]) -> DataFrame:
        """Find every message that the filter wants, once, with its payload if anybody has it."""
        inside = F.lit(False)  # noqa: FBT003 - Spark's signature
        for begin, end in stretches:
            inside |= (F.col("message_id") >= begin) & (F.col("message_id") < end)
        for _ in range(_TRIES):
            before = self._returned()
            tables = self._tables(("message_id", *_ABOUT), payload="true", filter=filter_)
            found = pinned(next(tables).where(inside))
            for each in tables:
                found = found.unionByName(each.where(inside))
            best = F.max_by(F.struct(*_ABOUT), F.col("payload").isNotNull()).alias("m")
            once = pinned(found.groupBy("message_id").agg(best).select("message_id", "m.*"))
            if self._returned() == before:
                return once
        raise StorageFailed(
            "messages are redriven or moved all the time, so that some might be overlooked: run "
            "the backfill again when that has ended"
        )

    def _returned(self) -> dict[str, tuple[int, int]]:
        queues = self.client.stats().queues
        return {each.queue: (each.redriven_total, each.moved_in_total) for each in queues}


def _restored(
    found: DataFrame, location: str, queue: str, filter_: str, windows: int
) -> Iterator[dict[str, int]]:
    """Restore messages in the order of their ids, one task after the other."""
    if not windows:
        return

    def restore(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        client = FlightStore(location)
        at: int | None = None
        for begin, end, rows in _windows(batches):
            first = begin if at is None else at
            at = end
            done = client.fill([rows], ARCHIVED, queue=queue, begin=first, end=end, filter=filter_)
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
        renamed = batch.select(["message_id", *_ABOUT]).rename_columns(ARCHIVED.names)
        ids = batch.column("message_id").to_pylist()
        sizes = pc.add(
            pc.fill_null(pc.binary_length(batch.column("payload")), 0),
            pc.binary_length(batch.column("attributes_json")),
        ).to_pylist()
        start = size = 0
        for at, bytes_ in enumerate([*sizes, None]):
            over = bytes_ is None or at - start >= _MESSAGES or size + bytes_ > _BYTES
            if over and at > start:
                rows = renamed.slice(start, at - start).cast(ARCHIVED)
                yield ids[start], ids[at - 1] + 1, rows
                start, size = at, 0
            size += bytes_ or 0
