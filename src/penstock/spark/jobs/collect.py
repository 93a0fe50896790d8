"""Collect: payloads that nobody refers to any more.

The broker drops a payload with its last reference; this finds what a crash or an older version
has left. Spark proposes, the broker decides: it looks at every queue again before it deletes.
"""

from __future__ import annotations

from functools import reduce
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec
from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

from penstock.spark.broker_client import store
from penstock.spark.jobs.common import pinned, read

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

__all__ = ["CollectReport", "collect"]

_CHUNK: Final = 10_000
_HOLDERS: Final = ("active", "done", "failed")


class CollectReport(msgspec.Struct, frozen=True, kw_only=True):
    """What no queue refers to, and what of it the broker has freed (or would free)."""

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
    client = store(location)
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
    ids = (row["message_id"] for row in free.toLocalIterator())
    tried = messages = size = 0
    while chunk := list(islice(ids, _CHUNK)):
        freed = client.collect(chunk, dry_run=dry_run)
        messages += freed.freed_messages
        size += freed.freed_bytes
        tried += len(chunk)
        if progress is not None:
            progress(tried, sums["rows"])
    return CollectReport(
        candidates=sums["rows"],
        candidate_bytes=sums["bytes"] or 0,
        freed_messages=messages,
        freed_bytes=size,
        dry_run=dry_run,
    )
