"""Helpers of the jobs: reading tables, reporting progress of Spark, translating its errors."""

from __future__ import annotations

import re
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from penstock import errors
from penstock.clock import SystemClock
from penstock.errors import PenstockError
from penstock.spark.sessions import is_connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.connect.shell.progress import ProgressHandler

FROM_SPARK: Final = (PySparkException, Py4JJavaError)
"""The errors that Spark raises for anything that went wrong on its side."""

_POLL_MS: Final = 250
_OURS: Final = re.compile(r"\bpenstock\.errors\.(\w+): (.*)")


def revived(error: BaseException) -> PenstockError | None:
    """Return the error of Penstock inside an error of Spark, if there is one.

    Spark gives back the error of a task or of the source as a text within a text.
    """
    found = _OURS.search(str(error))
    kind = getattr(errors, found[1], None) if found else None
    if found is None or not (isinstance(kind, type) and issubclass(kind, PenstockError)):
        return None
    return kind(found[2].strip())


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
    elif is_connect(spark):
        with _connect_progress(spark, progress):
            yield
    else:
        with _polled_progress(spark, progress):
            yield


@contextmanager
def _connect_progress(spark: SparkSession, progress: Callable[[int, int], None]) -> Iterator[None]:
    def tell(stages: Any, **_: Any) -> None:
        known = list(stages or ())
        done, total = (
            sum(getattr(each, name) for each in known)
            for name in ("num_completed_tasks", "num_tasks")
        )
        progress(done, total)

    handler = cast("ProgressHandler", tell)
    spark.registerProgressHandler(handler)
    try:
        yield
    finally:
        spark.removeProgressHandler(handler)


@contextmanager
def _polled_progress(spark: SparkSession, progress: Callable[[int, int], None]) -> Iterator[None]:
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
