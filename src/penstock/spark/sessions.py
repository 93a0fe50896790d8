"""Sessions of Spark with defaults that suit Penstock, and the help that jobs need of a session.

Jobs read tables, report the progress of Spark's tasks, and translate its errors.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

from penstock import limits
from penstock.clock import SystemClock
from penstock.flight.protocol import error_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame
    from pyspark.sql.connect.shell.progress import ProgressHandler

    from penstock.errors import PenstockError

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
        return _started(SparkSession.builder.remote(master), {**own, **(conf or {})})
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
    return _started(SparkSession.builder.master(master).appName(name), settings)


def _started(builder: SparkSession.Builder, settings: Mapping[str, str]) -> SparkSession:
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


# --- jobs -----------------------------------------------------------------------------------------

FROM_SPARK: Final = (PySparkException, Py4JJavaError)
"""The errors that Spark raises for anything that went wrong on its side."""

_POLL_MS: Final = 250
_OURS: Final = re.compile(r"\bpenstock\.errors\.(\w+): (.*)")


def revived(error: BaseException) -> PenstockError | None:
    """Return the error of Penstock inside an error of Spark, if there is one.

    Spark gives back the error of a task or of the source as a text within a text.
    """
    found = _OURS.search(str(error))
    return error_named(found[1], found[2].strip()) if found else None


@contextmanager
def translated() -> Iterator[None]:
    """Raise errors of Penstock that went through Spark with their own types."""
    try:
        yield
    except FROM_SPARK as error:
        ours = revived(error)
        if ours is None:
            raise
        raise ours from None


def read(
    spark: SparkSession,
    location: str,
    table: str,
    *,
    queues: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    **options: Any,
) -> DataFrame:
    """Read a table of a broker; the snapshot is taken when a query is planned."""
    reader = spark.read.format("penstock").options(table=table, location=location, **options)
    if queues is not None:
        reader = reader.option("queue", ",".join(queues))
    if columns is not None:
        reader = reader.option("columns", ",".join(columns))
    with translated():
        return reader.load()


def pinned(frame: DataFrame) -> DataFrame:
    """Take the snapshot now and keep its rows: every later use sees the same ones.

    A lost executor then fails the job, where a recomputation would read another moment.
    """
    with translated():
        return frame.localCheckpoint(eager=True)


@contextmanager
def reporting(spark: SparkSession, progress: Callable[[int, int], None] | None) -> Iterator[None]:
    """Tell ``progress`` how many tasks of the Spark jobs within are done, of how many known."""
    if progress is None:
        yield
        return
    if not is_connect(spark):
        with _polled(spark, progress):
            yield
        return

    def tell(stages: Any, **_: Any) -> None:
        known = list(stages or ())
        done = sum(each.num_completed_tasks for each in known)
        progress(done, sum(each.num_tasks for each in known))

    handler = cast("ProgressHandler", tell)
    spark.registerProgressHandler(handler)
    try:
        yield
    finally:
        spark.removeProgressHandler(handler)


@contextmanager
def _polled(spark: SparkSession, progress: Callable[[int, int], None]) -> Iterator[None]:
    """Ask Spark every now and then: without Spark Connect it calls nobody."""
    clock = SystemClock()
    context = spark.sparkContext
    group = f"penstock-{clock.lease_id().hex()}"
    context.setJobGroup(group, "penstock")
    ended = threading.Condition()
    stopped = False

    def poll() -> None:
        tracker = context.statusTracker()
        with ended:
            while not stopped:
                clock.wait(ended, _POLL_MS)
                done = total = 0
                for job in tracker.getJobIdsForGroup(group):
                    info = tracker.getJobInfo(job)
                    for stage in info.stageIds if info else ():
                        known = tracker.getStageInfo(stage)
                        if known:
                            done += known.numCompletedTasks
                            total += known.numTasks
                progress(done, total)

    watcher = threading.Thread(target=poll, name="penstock-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        with ended:
            stopped = True
            ended.notify()
        watcher.join()
        context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
