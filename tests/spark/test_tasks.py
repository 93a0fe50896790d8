"""Tasks of the route job without Spark: run in any order, twice, not at all, after a take-over.

The broker assigns what tasks stage before anybody commits it, so the store must be right whatever
becomes of the micro-batch.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

from pyspark.sql.streaming.datasource import ReadMaxRows

from penstock.errors import InvalidInput
from penstock.spark import route
from penstock.spark.reader import ROUTING
from penstock.spark.route import AssignmentWriter, RouteStreamReader, status, take_over
from penstock.spark.source import read_options, write_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import InputPartition

MOST = ReadMaxRows(700)


@pytest.fixture
def routed_world(world: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    # Many pieces, and a task for each of three logs.
    monkeypatch.setattr(route, "PIECE", 50)
    world.broker.configure_log(logs=3)
    world.make_queues()
    world.publish(1_500)
    return world


class Job:
    """One start of the route job."""

    def __init__(self, world: Any) -> None:
        epoch = str(take_over(world.location))
        given = {"server": world.location, "epoch": epoch}
        schema = ROUTING["matches"]
        reading = read_options({**given, "table": "matches"}, streaming=True)
        self._reader = RouteStreamReader(reading, schema)
        self._writer = AssignmentWriter(write_options({**given, "table": "assignments"}), schema)
        self._at = self._reader.initialOffset()

    def plan(self) -> list[InputPartition]:
        begin, self._at = self._at, self._reader.latestOffset(self._at, MOST)
        return self._reader.partitions(begin, self._at)

    def match(self, tasks: Sequence[InputPartition]) -> list[pa.RecordBatch]:
        with ThreadPoolExecutor(4) as threads:
            found = threads.map(lambda task: list(self._reader.read(task)), tasks)
            return [batch for batches in found for batch in batches]

    def commit(self, batches: Sequence[pa.RecordBatch]) -> None:
        self._writer.commit([self._writer.write(iter([batch])) for batch in batches], 0)


def test_tasks_that_run_once_or_twice(routed_world: Any) -> None:
    job = Job(routed_world)
    for times in (1, 2, 2):
        tasks = job.plan()
        assert len(tasks) == 3
        job.commit(job.match(tasks[::-1] * times))
    assert not status(routed_world.location).behind
    assert routed_world.content() == routed_world.naive()


def test_micro_batches_that_nobody_commits(routed_world: Any) -> None:
    for _ in range(3):
        job = Job(routed_world)
        job.match(job.plan())
    # All there is was assigned as it was staged.
    assert routed_world.content() == routed_world.naive()


def test_tasks_that_are_killed(routed_world: Any) -> None:
    job = Job(routed_world)
    tasks = job.plan()
    for lost in range(3):
        job.match([*tasks[:lost], *tasks[lost + 1 :]])
        tasks = Job(routed_world).plan()
    job = Job(routed_world)
    for _ in range(4):
        job.commit(job.match(job.plan()))
    assert routed_world.content() == routed_world.naive()


def test_tasks_of_a_job_that_another_has_taken_over_from(routed_world: Any) -> None:
    old = Job(routed_world)
    tasks = old.plan()
    new = Job(routed_world)
    staged = old.match(tasks)
    assert all(ids == [] for ids in routed_world.content().values())
    with pytest.raises(InvalidInput, match="another pipeline has taken over"):
        old.commit(staged)
    new.commit(new.match(new.plan()))
    old.match(tasks)
    for _ in range(4):
        new.commit(new.match(new.plan()))
    assert routed_world.content() == routed_world.naive()


def test_filters_that_change_between_plan_and_match(routed_world: Any) -> None:
    job = Job(routed_world)
    tasks = job.plan()
    staged = job.match(tasks[:1])
    routed_world.broker.create_queue("late", filter="price >= 0")
    routed_world.publish(300)
    job.commit([*staged, *job.match(tasks[1:])])
    for _ in range(4):
        job.commit(job.match(job.plan()))
    expected = routed_world.naive()
    assert expected["late"]
    expected["late"] = [each for each in expected["late"] if each > 1_500]
    assert routed_world.content() == expected


def test_a_plan_holds_for_its_micro_batch_and_a_replay_asks_again(
    routed_world: Any, actions: list[str]
) -> None:
    job = Job(routed_world)
    actions.clear()
    begin = job._at
    tasks = job.plan()
    assert actions == ["route_plan"]
    # Nothing was routed yet: the same pieces, planned anew.
    assert job._reader.partitions(begin, job._at) == tasks
    assert actions == ["route_plan"] * 2
    # After the commit a replay finds the cursors where the micro-batch ended.
    job.commit(job.match(tasks))
    assert job._reader.partitions(begin, job._at) == []
    # A later plan is not taken for the one that a replay is about.
    end = job._at
    job._at = job._reader.latestOffset(end, MOST)
    assert job._reader.partitions(begin, end) == []
    later: list[Any] = job._reader.partitions(end, job._at)
    assert sum(piece.end - piece.begin for task in later for piece in task.pieces) > 700
