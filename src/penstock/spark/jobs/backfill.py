"""Backfill: what a queue wants of the retained log and has not had, matched on the executors.

::

    broker: plan ─▶ executors: read the log, match, stage ─▶ broker: fill, a window at a time ─▶ …

The broker notes which offsets a queue has been filled from in the same change as the messages, so
a backfill that is stopped goes on where it was, and nothing comes in twice. What lies below the log
comes from an archive, if one is named.
"""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow as pa

from penstock.clock import SystemClock
from penstock.errors import InvalidInput, PenstockError
from penstock.spark.broker_client import offset_at, store
from penstock.spark.jobs.backfill_archive import fill_archived, lowest_since, open_archive
from penstock.spark.matching import COLUMNS, match_batch, matcher_of
from penstock.spark.sessions import parallelism

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession


__all__ = ["Backfill", "backfill"]

_WINDOW: Final = 200_000
_STAGED: Final = "stage string, matched bigint, scanned bigint"
_TRIES: Final = 3


class Backfill(msgspec.Struct, frozen=True, kw_only=True):
    """What a backfill did; in a dry run, what there is to look at.

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
    progress: Callable[[int, int], None] | None = None,
) -> Backfill:
    """Fill a queue from the log, from an offset or a time on; by default all that is kept.

    With ``archive``, a directory that the archive job was given, what the log has let go of comes
    from there, and from what other queues still hold.

    ``window`` is how many offsets are matched between two commits. ``progress`` is told offsets:
    done, and in all. With ``dry_run`` matches are counted, and the queue stays as it is; those
    that it has had already are counted too.

    >>> backfill(spark, "grpc://127.0.0.1:8815", "audit").added           # doctest: +SKIP
    """
    if window < 1:
        raise InvalidInput(f"window is at least 1, not {window}")
    if archive is not None:
        open_archive(location, archive)
        if from_time_ms is not None and from_ is None:
            logged = offset_at(store(location), from_time_ms)
            low = lowest_since(spark, location, archive, from_time_ms)
            from_, from_time_ms = (logged if low is None else min(low, logged)), None
    plan = store(location).backfill_plan(
        queue, from_=from_, from_time_ms=from_time_ms, to=to, archived=archive is not None
    )
    below, kept = _split(plan.stretches, plan.earliest)
    windows = [
        (at, min(at + window, end)) for begin, end in kept for at in range(begin, end, window)
    ]
    total = sum(end - begin for begin, end in plan.stretches)
    sums = dict.fromkeys(("scanned", "matched", "added", "already", "missing"), 0)
    if below and archive is not None:
        sums = fill_archived(
            spark,
            location,
            archive,
            queue,
            plan.filter,
            below,
            dry_run=dry_run,
            progress=lambda done: None if progress is None else progress(done, total),
        )
    done = sum(end - begin for begin, end in below)
    for begin, end in windows:
        one = _fill(spark, location, queue, plan.filter, begin, end, dry_run=dry_run)
        for name, count in one.items():
            sums[name] += count
        done += end - begin
        if progress is not None:
            progress(done, total)
    return Backfill(queue=queue, filter=plan.filter, offsets=total, dry_run=dry_run, **sums)


def _split(
    stretches: Sequence[tuple[int, int]], earliest: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Cut stretches where the log begins: what lies below it, and what is kept."""
    below = [(begin, min(end, earliest)) for begin, end in stretches if begin < earliest]
    kept = [(max(begin, earliest), end) for begin, end in stretches if end > earliest]
    return below, kept


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
    """Match and commit one window; again if the broker was restarted between the two."""
    for left in reversed(range(_TRIES)):
        staged = _stage(spark, location, queue, filter_, begin, end, dry_run=dry_run)
        counts = {
            "scanned": sum(scanned for _, _, scanned in staged),
            "matched": sum(matched for _, matched, _ in staged),
        }
        if dry_run:
            return counts
        stages = [stage for stage, _, _ in staged]
        client = store(location)
        try:
            filled = client.commit_fill(stages, queue=queue, begin=begin, end=end, filter=filter_)
        except InvalidInput as error:
            if "is not here" not in str(error) or not left:
                raise
            continue
        finally:
            with contextlib.suppress(PenstockError):
                client.drop_stages(stages)
        return {**counts, **msgspec.structs.asdict(filled)}
    raise AssertionError("unreachable")


def _stage(
    spark: SparkSession,
    location: str,
    queue: str,
    filter_: str,
    begin: int,
    end: int,
    *,
    dry_run: bool,
) -> list[tuple[str, int, int]]:
    tasks = max(1, min(parallelism(spark), end - begin))
    borders = [begin + (end - begin) * number // tasks for number in range(tasks + 1)]
    parts = spark.createDataFrame(list(pairwise(borders)), "begin bigint, end bigint").repartition(
        tasks
    )

    def match(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            bounds = batch.to_pylist()
            made = [
                _stage_part(location, queue, filter_, each["begin"], each["end"], dry_run=dry_run)
                for each in bounds
            ]
            yield _answers(made)

    found = parts.mapInArrow(match, _STAGED).collect()
    return [(row["stage"], row["matched"], row["scanned"]) for row in found]


def _stage_part(
    location: str, queue: str, filter_: str, begin: int, end: int, *, dry_run: bool
) -> tuple[str, int, int]:
    """Match offsets [begin, end) of all logs and stage them, on an executor."""
    client = store(location)
    matcher = matcher_of({queue: filter_})
    rows: list[pa.RecordBatch] = []
    scanned = 0
    for log in client.log_stats().cursors:
        for batch in client.read_log(log, begin, end, columns=COLUMNS):
            scanned += batch.num_rows
            rows.append(match_batch(matcher, batch).select(["offset"]))
    stage = SystemClock().lease_id().hex()
    if not dry_run:
        client.fill_stage(stage, rows, queue=queue, begin=begin, end=end)
    return stage, sum(each.num_rows for each in rows), scanned


def _answers(made: Sequence[tuple[str, int, int]]) -> pa.RecordBatch:
    return pa.record_batch(
        [
            pa.array([each[0] for each in made], pa.string()),
            pa.array([each[1] for each in made], pa.int64()),
            pa.array([each[2] for each in made], pa.int64()),
        ],
        names=["stage", "matched", "scanned"],
    )
