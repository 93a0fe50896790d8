"""Each job works on the executors: its tasks are counted, and the bytes that the driver gets."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

import pyarrow.parquet as pq
from tests.processes import processes

import penstock
from penstock.flight.snapshots import Snapshots
from penstock.spark.jobs import archive, backfill, collect, redrive, report, save_report
from penstock.spark.route import AVAILABLE_NOW, route

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


class Ran(NamedTuple):
    """A Spark job: the tasks of its largest stage, and the bytes of all results of tasks."""

    tasks: int
    driver_bytes: int


class Watch:
    """Asks Spark's own status store which jobs have run since."""

    def __init__(self, spark: SparkSession) -> None:
        self._context = spark.sparkContext._jsc.sc()
        self._seen = {each.jobId() for each in self._jobs()}

    def _jobs(self) -> list[Any]:
        self._context.listenerBus().waitUntilEmpty()
        found = self._context.statusStore().jobsList(None)
        return [found.apply(at) for at in range(found.size())]

    def ran(self) -> list[Ran]:
        """Return the jobs since the last call."""
        jobs = []
        for each in self._jobs():
            if each.jobId() not in self._seen:
                self._seen.add(each.jobId())
                ids = [each.stageIds().apply(at) for at in range(each.stageIds().size())]
                stages = [self._context.statusStore().lastStageAttempt(stage) for stage in ids]
                most = max(stage.numCompleteTasks() for stage in stages)
                jobs.append(Ran(most, sum(stage.resultSize() for stage in stages)))
        return jobs


def rows_of(frames: dict[str, DataFrame]) -> dict[str, list[dict[str, Any]]]:
    """Read a report, without how long messages have waited."""
    found = {name: [row.asDict() for row in frame.collect()] for name, frame in frames.items()}
    for row in (row for rows in found.values() for row in rows):
        row.pop("oldest_wait_ms", None)
    return found


def test_a_report_is_made_by_executors_and_the_driver_gets_no_more_of_more_rows(
    spark: SparkSession,
    make_world: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = penstock.ManualClock()
    world = make_world(routing="inline", clock=clock)
    world.broker.create_queue("big", filter="n >= 0", max_attempts=3)
    world.broker.create_queue("small", filter="n < 5")

    def work(count: int) -> None:
        """Publish, claim and end messages; one of ten is tried twice."""
        world.publish(count)
        for queue in ("big", "small"):
            while batch := world.broker.claim(queue, limit=500, consumer="w"):
                clock.advance(7)
                again = [d.receipt for d in batch if d.attempts == 1 and d.message_id % 10 == 0]
                late = set(again)
                world.broker.ack([d.receipt for d in batch if d.receipt not in late])
                world.broker.release(again, delay_ms=0, reason="torn")

    told, spent, read = [], [], []
    for count in (1_000, 9_000):
        work(count)
        watch = Watch(spark)
        frames = report(spark, world.location)
        page = save_report(frames, tmp_path / str(count))
        jobs = watch.ran()
        assert max(each.tasks for each in jobs) >= 2
        spent.append(sum(each.driver_bytes for each in jobs))
        read.append(len(jobs))
        told.append(rows_of(frames))
        assert "torn" in page.read_text()
    assert read[0] == read[1]
    # Figures have a few digits more.
    assert spent[1] < spent[0] * 1.05
    queues = {row["queue"]: row for row in told[1]["queues"]}
    assert (queues["big"]["done"], queues["small"]["done"]) == (10_000, 5)
    big = next(row for row in told[1]["reasons"] if row["queue"] == "big")
    assert (big["reason"], big["attempts"], big["messages"]) == ("torn", 1_000, 1_000)
    # Nothing is another in an archive, nor in tables that reach their files a piece at a time.
    place = tmp_path / "archive"
    archive(spark, world.location, place, queues=["big"])
    monkeypatch.setattr(sys.modules[report.__module__], "_FEW", 2)
    frames = report(spark, world.location, archive=place)
    assert rows_of(frames) == told[1]
    assert save_report(frames, tmp_path / "long").read_text() == page.read_text()
    for name in told[1]:
        files = [pq.read_table(tmp_path / each / f"{name}.parquet") for each in ("9000", "long")]
        assert files[0] == files[1], name


def workers(program: str) -> list[int]:
    """Return the Pythons that execute tasks, of this process alone."""
    running = processes()
    found = {pid for pid, each in running.items() if program in each.command}

    def above(pid: int) -> Iterator[int]:
        while pid := running[pid].parent if pid in running else 0:
            yield pid

    # The daemon forks them: they have its command line.
    return [pid for pid in found if running[pid].parent in found and os.getpid() in above(pid)]


def test_tasks_that_are_killed_in_the_middle_of_a_report(
    spark: SparkSession, shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rows_of(report(spark, shop.location))
    killed: list[int] = []
    read = Snapshots.read

    def killing(self: Any, name: str, rows: Any, table: Any = None, part: int = 0) -> Any:
        batches = read(self, name, rows, table, part)
        if not killed and table is not None and table.selection.table == "attempts":
            yield from batches
            # Both tasks read, or have just begun.
            killed.extend(workers("pyspark.daemon"))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        else:
            yield from batches

    monkeypatch.setattr(Snapshots, "read", killing)
    assert rows_of(report(spark, shop.location)) == whole
    assert killed


def test_jobs_have_several_tasks(
    spark: SparkSession, make_world: Callable[..., Any], tmp_path: Path
) -> None:
    world = make_world()
    for name in ("one", "two"):
        world.broker.create_queue(
            name, filter="n >= 0", max_attempts=1, backoff_base_ms=0, backoff_cap_ms=0
        )
    world.broker.configure_log(logs=2)
    world.publish(400)

    def routing() -> None:
        settings: dict[str, Any] = {"checkpoint": tmp_path / "route", "trigger": AVAILABLE_NOW}
        route(world.location, spark=spark, **settings).awaitTermination()

    def redriving() -> None:
        held = world.broker.claim("one", limit=400)
        world.broker.release([each.receipt for each in held], delay_ms=0, reason="no")
        assert redrive(spark, world.location, "one").redriven == 400

    def archiving() -> None:
        while held := world.broker.claim("two", limit=400):
            world.broker.ack([each.receipt for each in held])
        archive(spark, world.location, tmp_path / "archive")

    def collecting() -> None:
        collect(spark, world.location)

    def filling() -> None:
        world.broker.create_queue("late", filter="n >= 0")
        backfill(spark, world.location, "late")

    watch = Watch(spark)
    for job in (routing, redriving, archiving, collecting, filling):
        job()
        assert max((each.tasks for each in watch.ran()), default=0) >= 2, job.__name__
    assert len(world.content()["late"]) == 400
