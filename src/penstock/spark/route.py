"""The route job: the log into the queues, by Structured Streaming.

::

    log ──stretches──▶ executors: filters by index ──matches──▶ executors: stage ──▶ driver: commit
     ▲                                                                                   │
     └─────────────────────── cursor, in the same change as the assignments ◀────────────┘

**Exactly once**, and why: assignments and cursor are one change of the store, and every
micro-batch begins at the cursor. A replay finds the cursor past it. A killed driver or executor
leaves stages behind that nobody sees. Two pipelines can't both assign: each takes an epoch when
it starts, and the older one is refused. Filters that change while a micro-batch is under way make
it outdated, and it is matched again. The checkpoint may be deleted, kept or taken from a
backup: it holds nothing that the store does not know better.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock import limits
from penstock.errors import InvalidInput
from penstock.spark.broker_client import store
from penstock.spark.sessions import is_connect, parallelism, session

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

__all__ = ["AVAILABLE_NOW", "DEFAULT_MAX_OFFSETS", "RouteStatus", "route", "status"]

DEFAULT_MAX_OFFSETS: Final = 100_000
AVAILABLE_NOW: Final = "available now"


class RouteStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How far the log is routed; ``lag`` is what is left to do, in offsets, by log."""

    routing: str
    epoch: int
    cursors: dict[int, int]
    routed_up_to: int
    end: int
    lag: dict[int, int]

    @property
    def behind(self) -> int:
        """Offsets that the slowest log has still to be routed."""
        return max(self.lag.values(), default=0)


def status(location: str) -> RouteStatus:
    """Return progress and lag of whatever routes the store; asks the broker, not Spark.

    A store that routes inline is never behind: its cursors are where its log ends.

    >>> status("grpc://127.0.0.1:8815").behind    # doctest: +SKIP
    0
    """
    client = store(location)
    routing = client.info().routing
    marks = client.watermarks()
    cursors, routed_up_to, epoch = dict(marks.cursors), marks.routed_up_to, 0
    if routing == "inline":
        cursors, routed_up_to = dict.fromkeys(cursors, marks.end), marks.end
    else:
        epoch = client.route_plan(max_offsets=1).epoch
    return RouteStatus(
        routing=routing,
        epoch=epoch,
        cursors=cursors,
        routed_up_to=routed_up_to,
        end=marks.end,
        lag={log: max(0, marks.end - cursor) for log, cursor in cursors.items()},
    )


def route(
    location: str,
    *,
    spark: SparkSession | None = None,
    checkpoint: str | Path,
    trigger: str = "0 seconds",
    max_offsets: int = DEFAULT_MAX_OFFSETS,
    name: str = "penstock-route",
) -> StreamingQuery:
    """Start routing, and return the running query: ``awaitTermination()`` or ``stop()`` it.

    ``trigger`` is how often to look (``"0 seconds"``: again at once), or ``"available now"``: route
    what there is and end. Starting fences every pipeline that was started before, here or
    elsewhere: it ends with an error that says so.

    >>> query = route("grpc://127.0.0.1:8815", checkpoint="/var/lib/penstock/route")
    ...                                                # doctest: +SKIP
    >>> query.awaitTermination()                       # doctest: +SKIP
    """
    spark = spark or session(name=name)
    epoch = take_over(location)
    matches = route_stream(spark, location, "matches", epoch, max_offsets)
    writer = matches.writeStream.format("penstock").outputMode("append").queryName(name)
    writer = writer.options(location=location, table="assignments", epoch=str(epoch))
    return triggered(writer, checkpoint, trigger).start()


def take_over(location: str) -> int:
    """Fence every pipeline that was started before; return the epoch of this one."""
    client = store(location)
    routing = client.info().routing
    if routing != "pipeline":
        raise InvalidInput(
            f"the store at {location} routes {routing}: messages are in their queues when publish "
            "returns, and there is nothing to route. Only a store that was made with "
            "routing='pipeline' is routed by Spark"
        )
    return client.take_epoch()


def route_stream(
    spark: SparkSession, location: str, table: str, epoch: int, max_offsets: int
) -> DataFrame:
    """Return what is to be routed as a stream: of matches, or of bare stretches."""
    if table == "stretches" and is_connect(spark):
        raise InvalidInput(
            "a pipeline with a transformation runs in Spark's driver, and Spark Connect has none "
            "here: use a session of its own (penstock.spark.session('spark://…')), or route() "
            "without a transformation"
        )
    options: Mapping[str, str] = {
        "location": location,
        "table": table,
        "epoch": str(epoch),
        "maxOffsetsPerTrigger": str(max_offsets),
        "minPartitions": str(min(limits.MAX_PARTITIONS, parallelism(spark))),
    }
    return spark.readStream.format("penstock").options(**options).load()


def triggered(writer: DataStreamWriter, checkpoint: str | Path, trigger: str) -> DataStreamWriter:
    """Set checkpoint and trigger."""
    writer = writer.option("checkpointLocation", str(checkpoint))
    if trigger == AVAILABLE_NOW:
        return writer.trigger(availableNow=True)
    return writer.trigger(processingTime=trigger)
