"""Redrive: failed messages that a SQL condition selects, back to their queue."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pyspark.errors import AnalysisException, ParseException

from penstock.errors import InvalidInput
from penstock.spark.broker_client import store
from penstock.spark.jobs.common import known, pinned, read

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

__all__ = ["RedriveReport", "redrive"]

_CHUNK: Final = 5_000
_SAMPLE: Final = 10


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
    client = store(location)
    known(location, [queue])
    columns = ("message_id", "failed_at", "attempts", "reason", "group", "attributes_json")
    rows = pinned(
        _selected(read(spark, location, "failed", queues=[queue]), where).select(*columns)
    )
    selected = rows.count()
    sample = [row.asDict() for row in rows.orderBy("message_id").limit(_SAMPLE).collect()]
    redriven = 0
    if not dry_run:
        ids = (row["message_id"] for row in rows.select("message_id").toLocalIterator())
        tried = 0
        while chunk := list(islice(ids, _CHUNK)):
            redriven += client.redrive(queue, message_ids=chunk)
            tried += len(chunk)
            if progress is not None:
                progress(tried, selected)
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
