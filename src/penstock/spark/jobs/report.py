"""Report: throughput, waiting, attempts, failures and lag, per queue and per group."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow.parquet as pq
from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

from penstock.flight.client import FlightStore
from penstock.spark.jobs.common import pinned, read
from penstock.spark.jobs.report_page import page

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

SLOWEST: Final = 20
_SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_ACCURACY: Final = 10_000
_SECONDS: Final = (1, 5, 15, 60, 300, 900, 3_600, 21_600, 86_400)
_BARS: Final = 120


def report(
    spark: SparkSession, location: str, *, queues: Sequence[str] | None = None
) -> dict[str, DataFrame]:
    """Return statistics of the store's history, as DataFrames by name.

    ``queues``: a row for each queue. ``groups``: for each group of a queue. ``reasons``: why
    attempts did not succeed. ``attempts``: how many messages took how many. ``slowest``: groups
    by the time to done. ``starving``: groups whose oldest message has waited longest. ``timeline``:
    done and failed by time. ``routing``: how far the logs are routed. Times are in milliseconds,
    of messages whose history is kept; retention and archived runs are not in it.

    >>> report(spark, "grpc://127.0.0.1:8815")["slowest"].show()          # doctest: +SKIP
    """
    at_ms = FlightStore(location).queues(queues).at_ms
    ended = pinned(_ended(spark, location, queues))
    tried = pinned(
        read(spark, location, "attempts", queues=queues)
        .drop("consumer")
        .withColumnRenamed("reason", "said")
    )
    messages = pinned(_messages(spark, location, queues, ended, tried))
    waiting = pinned(_waiting(spark, location, queues, at_ms))
    per_queue = _per(messages, ["queue"]).join(_depths(spark, location, queues), "queue", "full")
    oldest = waiting.groupBy("queue").agg(F.max("oldest_wait_ms").alias("oldest_wait_ms"))
    groups = _per(messages, ["queue", "group"]).join(waiting, ["queue", "group"], "full")
    groups = pinned(groups.orderBy("queue", "group"))
    return {
        "queues": pinned(per_queue.join(oldest, "queue", "left").orderBy("queue")),
        "groups": groups,
        "reasons": _reasons(tried),
        "attempts": ended.groupBy("queue", "state", "attempts")
        .agg(F.count("*").alias("messages"))
        .orderBy("queue", "state", "attempts"),
        "slowest": groups.where("done_p99_ms IS NOT NULL")
        .orderBy(F.desc("done_p99_ms"), "queue", "group")
        .limit(SLOWEST),
        "starving": groups.where("oldest_wait_ms IS NOT NULL")
        .select("queue", "group", "available", "delayed", "in_flight", "done", "oldest_wait_ms")
        .orderBy(F.desc("oldest_wait_ms"), "queue", "group")
        .limit(SLOWEST),
        "timeline": _timeline(ended),
        "routing": _routing(spark, location),
    }


def save_report(frames: Mapping[str, DataFrame], directory: str | Path) -> Path:
    """Write each DataFrame as Parquet, and one HTML page with plots; return the page's path.

    Files of an earlier report are replaced.
    """
    place = Path(directory).absolute()
    place.mkdir(parents=True, exist_ok=True)
    rows = {}
    for name, frame in frames.items():
        table = frame.toArrow()
        pq.write_table(table, place / f"{name}.parquet")
        rows[name] = table.to_pylist()
    written = place / "report.html"
    written.write_text(page(rows), encoding="utf-8")
    return written


# --- messages -------------------------------------------------------------------------------------


def _ended(spark: SparkSession, location: str, queues: Sequence[str] | None) -> DataFrame:
    def one(state: str) -> DataFrame:
        time = f"{state}_at"
        columns = ("queue", "message_id", "group", "attempts", "published_at", time)
        rows = read(spark, location, state, queues=queues, columns=columns)
        return rows.withColumnRenamed(time, "ended_at").withColumn("state", F.lit(state))

    return one("done").unionByName(one("failed"))


def _messages(
    spark: SparkSession,
    location: str,
    queues: Sequence[str] | None,
    ended: DataFrame,
    tried: DataFrame,
) -> DataFrame:
    """Return a row for each message in a queue that was ever claimed or has ended."""
    columns = ("queue", "message_id", "group", "attempts", "published_at")
    active = read(spark, location, "active", queues=queues, columns=columns)
    active = active.withColumn("ended_at", F.lit(None).cast("timestamp"))
    every = ended.unionByName(active.withColumn("state", F.lit("active")))
    # Tables are snapshots of slightly different moments: a message may be in two of them.
    latest = every.groupBy("queue", "message_id").agg(
        F.max_by(F.struct("group", "published_at", "ended_at", "state", "attempts"), _rank()).alias(
            "one"
        )
    )
    first = tried.groupBy("queue", "message_id").agg(F.min("claimed_at").alias("claimed_at"))
    joined = latest.select("queue", "message_id", "one.*").join(
        first, ["queue", "message_id"], "left"
    )
    return joined.select(
        "queue",
        "group",
        "state",
        "attempts",
        "ended_at",
        _ms("claimed_at", "published_at").alias("first_claim_ms"),
        F.when(F.col("state") == "done", _ms("ended_at", "published_at")).alias("done_ms"),
    )


def _rank() -> Column:
    return F.when(F.col("state") == "active", 0).otherwise(1)


def _ms(later: str, earlier: str) -> Column:
    micros = F.unix_micros(F.col(later)) - F.unix_micros(F.col(earlier))
    return (micros / 1000).cast("bigint")


def _per(messages: DataFrame, keys: Sequence[str]) -> DataFrame:
    done, failed = (F.sum((F.col("state") == s).cast("bigint")) for s in ("done", "failed"))
    counts = [
        done.alias("done"),
        failed.alias("failed"),
        F.min("ended_at").alias("first_ended_at"),
        F.max("ended_at").alias("last_ended_at"),
        F.round(F.avg(F.when(F.col("state") != "active", F.col("attempts"))), 3).alias(
            "attempts_mean"
        ),
        F.max("attempts").alias("attempts_max"),
    ]
    shares = [
        F.percentile_approx(f"{what}_ms", share, _ACCURACY).alias(f"{what}_{name}_ms")
        for what in ("first_claim", "done")
        for name, share in _SHARES.items()
    ]
    made = messages.groupBy(*keys).agg(*counts, *shares)
    seconds = _ms("last_ended_at", "first_ended_at") / 1000
    rate = F.round(F.col("done") / F.greatest(seconds, F.lit(1.0)), 2)
    return made.withColumn("done_per_second", rate)


def _depths(spark: SparkSession, location: str, queues: Sequence[str] | None) -> DataFrame:
    depths = ("available", "delayed", "in_flight", "draining")
    found = read(spark, location, "queues", columns=("name", *depths))
    if queues is not None:
        found = found.where(F.col("name").isin(list(queues)))
    return found.withColumnRenamed("name", "queue")


def _waiting(
    spark: SparkSession, location: str, queues: Sequence[str] | None, at_ms: int
) -> DataFrame:
    groups = read(spark, location, "groups", queues=queues)
    since = F.unix_millis("oldest_published_at")
    wait = F.when(since.isNotNull(), F.greatest(F.lit(at_ms) - since, F.lit(0)))
    return groups.withColumn("oldest_wait_ms", wait).drop("oldest_published_at")


def _reasons(tried: DataFrame) -> DataFrame:
    unfinished = tried.where("outcome IN ('released', 'expired')")
    return (
        unfinished.groupBy("queue", "outcome", F.col("said").alias("reason"))
        .agg(F.count("*").alias("attempts"), F.countDistinct("message_id").alias("messages"))
        .orderBy(F.desc("attempts"), "queue", "reason")
    )


def _timeline(ended: DataFrame) -> DataFrame:
    bounds = ended.agg(
        F.unix_seconds(F.min("ended_at")).alias("low"),
        F.unix_seconds(F.max("ended_at")).alias("high"),
    ).collect()[0]
    width = 0 if bounds["low"] is None else bounds["high"] - bounds["low"]
    step = next((each for each in _SECONDS if width / each <= _BARS), _SECONDS[-1])
    slot = F.timestamp_seconds(F.floor(F.unix_seconds("ended_at") / step) * step)
    return (
        ended.groupBy("queue", slot.alias("at"))
        .agg(*(F.sum((F.col("state") == s).cast("bigint")).alias(s) for s in ("done", "failed")))
        .withColumn("seconds", F.lit(step))
        .orderBy("queue", "at")
    )


def _routing(spark: SparkSession, location: str) -> DataFrame:
    client = FlightStore(location)
    marks = client.watermarks()
    # A store that routes inline has no use for cursors.
    piped = client.info().routing == "pipeline"
    rows = [
        (log, at, marks.end, max(0, marks.end - at) if piped else 0)
        for log, at in marks.cursors.items()
    ]
    return spark.createDataFrame(rows, "log int, cursor bigint, end bigint, lag bigint")
