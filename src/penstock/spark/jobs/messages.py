"""Collect: payloads that nobody refers to any more. Redrive: failed messages back to their queue.

The broker drops a payload with its last reference; collect finds those that a crash or an older
version has left. Spark proposes, the broker decides: it looks at every queue again before it
deletes.
"""

from __future__ import annotations

from functools import reduce
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

from penstock.errors import InvalidInput
from penstock.flight.client import FlightStore
from penstock.spark.sessions import pinned, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame, SparkSession

_COLLECTED: Final = 10_000
_REDRIVEN: Final = 5_000
_SAMPLE: Final = 10
_HOLDERS: Final = ("active", "done", "failed")


def _chunks(
    rows: DataFrame, size: int, total: int, progress: Callable[[int, int], None] | None
) -> Iterator[list[int]]:
    """Yield message ids, some at a time; tell ``progress`` after each."""
    ids = (row["message_id"] for row in rows.select("message_id").toLocalIterator())
    tried = 0
    while chunk := list(islice(ids, size)):
        yield chunk
        tried += len(chunk)
        if progress is not None:
            progress(tried, total)


class CollectReport(msgspec.Struct, frozen=True, kw_only=True):
    """Payloads that no queue refers to, and those that the broker has freed (or would free)."""

    candidates: int
    candidate_bytes: int
    freed_messages: int
    freed_bytes: int
    dry_run: bool


def collect(
    spark: SparkSession,
    location: str,
    *,
    dry_run: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> CollectReport:
    """Free payloads that no queue refers to, below all that is still in the log.

    >>> collect(spark, "grpc://127.0.0.1:8815").freed_bytes               # doctest: +SKIP
    >>> collect(spark, "grpc://127.0.0.1:8815", dry_run=False)            # doctest: +SKIP
    """
    client = FlightStore(location)
    log = client.log_stats()
    below = F.col("message_id") < min(log.earliest, log.routed_up_to)
    kept = read(spark, location, "messages", columns=("message_id", "size"))
    # Payloads first: one whose reference goes meanwhile is at worst left to the next run, and one
    # whose reference is made later than this is above the watermark.
    kept = pinned(kept.where(below))
    held = reduce(
        lambda first, second: first.union(second),
        (read(spark, location, table, columns=("message_id",)) for table in _HOLDERS),
    )
    free = pinned(kept.join(held, "message_id", "left_anti").orderBy("message_id"))
    sums = free.agg(F.count("*").alias("rows"), F.sum("size").alias("bytes")).collect()[0]
    messages = size = 0
    for chunk in _chunks(free, _COLLECTED, sums["rows"], progress):
        freed = client.collect(chunk, dry_run=dry_run)
        messages += freed.freed_messages
        size += freed.freed_bytes
    return CollectReport(
        candidates=sums["rows"],
        candidate_bytes=sums["bytes"] or 0,
        freed_messages=messages,
        freed_bytes=size,
        dry_run=dry_run,
    )


class RedriveReport(msgspec.Struct, frozen=True, kw_only=True):
    """How many messages were selected and redriven, and a few of them."""

    queue: str
    selected: int
    redriven: int
    sample: list[dict[str, Any]]
    dry_run: bool


def redrive(
    spark: SparkSession,
    location: str,
    queue: str,
    *,
    where: str | None = None,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> RedriveReport:
    """Make failed messages of a queue available again: all, or those that ``where`` selects.

    ``where`` is SQL over the table ``failed``; with ``dry_run`` they are only counted and shown.
    Selected messages that are no longer failed when their turn comes are left alone.

    >>> redrive(spark, "grpc://127.0.0.1:8815", "orders",
    ...         where="reason LIKE '%timed out%' AND attributes['country'] = 'NO'",
    ...         dry_run=True).selected                              # doctest: +SKIP
    17
    """
    client = FlightStore(location)
    client.queues([queue])
    columns = ("message_id", "failed_at", "attempts", "reason", "group", "attributes_json")
    rows = pinned(
        _selected(read(spark, location, "failed", queues=[queue]), where).select(*columns)
    )
    selected = rows.count()
    sample = [row.asDict() for row in rows.orderBy("message_id").limit(_SAMPLE).collect()]
    redriven = 0
    if not dry_run:
        for chunk in _chunks(rows, _REDRIVEN, selected, progress):
            redriven += client.redrive(queue, message_ids=chunk)
    return RedriveReport(
        queue=queue, selected=selected, redriven=redriven, sample=sample, dry_run=dry_run
    )


def _selected(frame: DataFrame, where: str | None) -> DataFrame:
    if where is None:
        return frame
    try:
        return frame.where(where)
    except (AnalysisException, ParseException) as error:
        said = str(error).strip().splitlines()[0]
        raise InvalidInput(
            f"the condition can't be asked of failed messages: {said} (columns: "
            f"{', '.join(frame.columns)})"
        ) from None
