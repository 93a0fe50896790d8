"""A Spark session with defaults that suit Penstock's jobs on one machine."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

from penstock import limits

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULTS: Final[Mapping[str, str]] = {
    # Times of the tables are UTC; so are those that Spark shows.
    "spark.sql.session.timeZone": "UTC",
    # A micro-batch has few groups: two hundred shuffle partitions would be two hundred empty tasks.
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "50000",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # Renames instead of a FileContext: a tenth of a second less for every micro-batch.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.streaming.minBatchesToRetain": "20",
    # An error of the source is then one line that says what is wrong, not a stack of Python's.
    "spark.sql.execution.pyspark.udf.hideTraceback.enabled": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "1g",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}
"""The settings of :func:`session`; on a cluster Spark chooses the last two."""

# The JVM starts in half the time; long analytics want the second compiler: session(quick=False).
_QUICK_JVM: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"


def session(
    master: str | None = None,
    *,
    name: str = "penstock",
    quick: bool = True,
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return the running session, or start one (``local[*]`` unless ``master`` says where).

    >>> spark = session("local[2]")                                     # doctest: +SKIP
    >>> spark.read.format("penstock").option("table", "queues").load()  # doctest: +SKIP

    ``local[2,4]`` tries a task up to four times, as a cluster does; ``local[2]`` fails at once.
    ``sc://HOST:PORT`` is a Spark Connect server, whose own settings stay as they are. ``conf`` adds
    settings, or replaces those of :data:`DEFAULTS`.
    """
    master = master or "local[*]"
    if master.startswith("sc://"):
        # Only what belongs to a session can be set from here.
        own = {key: value for key, value in DEFAULTS.items() if key.startswith("spark.sql.")}
        return _made(SparkSession.builder.remote(master), {**own, **(conf or {})})
    settings = dict(DEFAULTS)
    if quick:
        settings["spark.driver.extraJavaOptions"] = _QUICK_JVM
    if master.startswith("local"):
        # Spark would take the first python3 of the path for its workers, which need not be the
        # one that this package is installed for.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    else:
        del settings["spark.driver.bindAddress"], settings["spark.driver.host"]
    settings.update(conf or {})
    return _made(SparkSession.builder.master(master).appName(name), settings)


def _made(builder: SparkSession.Builder, settings: Mapping[str, str]) -> SparkSession:
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def is_connect(spark: SparkSession) -> bool:
    """Say whether a session talks to a Spark Connect server, and has no JVM at hand."""
    return getattr(spark, "sparkContext", None) is None


def parallelism(spark: SparkSession) -> int:
    """Return how many tasks Spark would make of a read by default."""
    if not is_connect(spark):
        return int(spark.sparkContext.defaultParallelism)
    # Nobody can be asked, so it is seen from how many parts a range is cut into.
    parts = spark.range(limits.MAX_PARTITIONS).select(F.spark_partition_id().alias("part"))
    return int(parts.agg(F.max("part")).collect()[0][0]) + 1
