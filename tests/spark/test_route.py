"""The route job puts every message exactly once where its filters say, whatever happens."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

from pyspark.errors import StreamingQueryException

from penstock.clock import SystemClock
from penstock.errors import InvalidInput
from penstock.server.stages import Stages
from penstock.spark.route import AVAILABLE_NOW, route, status

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

SECONDS = 60
clock = SystemClock()


def run(spark: SparkSession, world: Any, checkpoint: Path, *, max_offsets: int = 1000) -> Any:
    query = start(spark, world, checkpoint, max_offsets=max_offsets, trigger=AVAILABLE_NOW)
    assert query.awaitTermination(SECONDS)
    return query


def start(
    spark: SparkSession,
    world: Any,
    checkpoint: Path,
    *,
    max_offsets: int = 1000,
    trigger: str = "0 seconds",
) -> StreamingQuery:
    return route(
        world.location,
        spark=spark,
        checkpoint=checkpoint,
        max_offsets=max_offsets,
        trigger=trigger,
    )


def wait_for(what: Callable[[], bool], seconds: int = SECONDS) -> None:
    deadline_ms = clock.now_ms() + seconds * 1000
    while not what():
        assert clock.now_ms() < deadline_ms, "it did not happen in time"
        pause(50)


def pause(ms: int) -> None:
    threading.Event().wait(ms / 1000)


def routed(world: Any) -> bool:
    return bool(status(world.location).behind == 0)


def test_every_message_goes_where_its_filters_say(
    spark: SparkSession, world: Any, tmp_path: Path
) -> None:
    world.make_queues()
    world.publish(3_500)
    assert status(world.location).behind >= 3_500
    query = run(spark, world, tmp_path / "ckpt")
    batches = [progress for progress in query.recentProgress if progress.numInputRows]
    assert len(batches) == 4
    assert world.content() == world.naive()
    assert status(world.location).behind == 0
    assert status(world.location).cursors == {0: world.broker.log_stats().end}


def test_many_tasks_and_several_logs(spark: SparkSession, world: Any, tmp_path: Path) -> None:
    world.make_queues()
    world.publish(100)
    world.broker.configure_log(logs=3)
    world.publish(50_000)
    world.broker.configure_log(logs=2)
    world.publish(20_000)
    run(spark, world, tmp_path / "ckpt", max_offsets=45_000)
    assert world.content() == world.naive()
    assert routed(world)


def test_stretches_without_matches_are_passed(
    spark: SparkSession, world: Any, tmp_path: Path
) -> None:
    world.broker.create_queue("one", filter="n = 2500")
    world.publish(3_000)
    run(spark, world, tmp_path / "ckpt", max_offsets=500)
    assert routed(world)
    assert world.content() == world.naive()


def test_replays_and_new_checkpoints_change_nothing(
    spark: SparkSession, world: Any, tmp_path: Path
) -> None:
    world.make_queues()
    world.publish(2_000)
    checkpoint = tmp_path / "ckpt"
    run(spark, world, checkpoint)
    shutil.copytree(checkpoint, tmp_path / "old")
    for commit in (checkpoint / "commits").glob("*[0-9]"):
        if commit.name == "1":
            commit.unlink()
            (checkpoint / "commits" / ".1.crc").unlink(missing_ok=True)
    run(spark, world, checkpoint)
    assert world.content() == world.naive()
    world.publish(1_500)
    run(spark, world, tmp_path / "new")
    assert world.content() == world.naive()
    world.publish(1_500)
    run(spark, world, tmp_path / "old")
    assert world.content() == world.naive()
    assert routed(world)


def test_the_later_pipeline_fences_the_earlier(
    spark: SparkSession, world: Any, tmp_path: Path
) -> None:
    world.make_queues()
    world.publish(500)
    first = start(spark, world, tmp_path / "first")
    wait_for(lambda: routed(world))
    run(spark, world, tmp_path / "second")
    with pytest.raises(StreamingQueryException, match="another pipeline has taken over"):
        first.awaitTermination(SECONDS)
    world.publish(500)
    run(spark, world, tmp_path / "second")
    assert world.content() == world.naive()


def test_a_pipeline_that_was_fenced_between_stage_and_commit(
    spark: SparkSession, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.make_queues()
    world.publish(500)
    assign = world.broker.assign

    def fenced_before(*given: Any, **settings: Any) -> Any:
        monkeypatch.undo()
        world.broker.take_epoch()
        return assign(*given, **settings)

    monkeypatch.setattr(world.broker, "assign", fenced_before)
    query = start(spark, world, tmp_path / "ckpt", trigger=AVAILABLE_NOW)
    with pytest.raises(StreamingQueryException, match="another pipeline has taken over"):
        query.awaitTermination(SECONDS)
    assert all(ids == [] for ids in world.content().values())
    run(spark, world, tmp_path / "ckpt")
    assert world.content() == world.naive()


def test_filters_that_change_on_the_way(
    spark: SparkSession, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.make_queues()
    ids = world.publish(2_000)
    assign = world.broker.assign
    statuses: list[str] = []

    def changing(*given: Any, **settings: Any) -> Any:
        if not statuses:
            world.broker.update_queue("k1", filter="kind = 'k5'", from_offset=ids[700])
        answer = assign(*given, **settings)
        statuses.append(answer.status.value)
        return answer

    monkeypatch.setattr(world.broker, "assign", changing)
    run(spark, world, tmp_path / "ckpt")
    assert statuses[0] == "outdated"
    expected = world.naive()
    before = world.naive({"k1": "kind = 'k1'"})["k1"]
    expected["k1"] = [i for i in before if i < ids[700]] + [
        i for i in expected["k1"] if i >= ids[700]
    ]
    assert world.content() == expected
    assert routed(world)


def test_queues_come_and_go_while_it_runs(spark: SparkSession, world: Any, tmp_path: Path) -> None:
    world.make_queues()
    query = start(spark, world, tmp_path / "ckpt")
    live: dict[str, list[int]] = {}
    for number in range(4):
        world.publish(300)
        name = f"from{number}"
        world.broker.create_queue(name, filter=f"kind = 'k{number}'")
        live[name] = world.publish(300)
    world.broker.delete_queue("from0")
    wait_for(lambda: not query.isActive or routed(world))
    query.stop()
    assert query.exception() is None
    expected = world.naive()
    for name, ids in live.items():
        if name in expected:
            expected[name] = [i for i in expected[name] if i >= ids[0]]
    assert world.content() == expected


def test_a_task_that_fails_is_tried_again(
    spark: SparkSession, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.make_queues()
    world.publish(1_500)
    add = Stages.add
    flag = tmp_path / "failed-once"

    def failing(self: Any, stage: Any) -> None:
        if not flag.exists():
            flag.touch()
            raise InvalidInput("the disk of stages is on fire")
        add(self, stage)

    monkeypatch.setattr(Stages, "add", failing)
    run(spark, world, tmp_path / "ckpt")
    assert flag.exists()
    assert world.content() == world.naive()


def test_stages_that_were_lost_are_matched_again(
    spark: SparkSession, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.make_queues()
    world.publish(1_500)
    get = Stages.get
    lost: list[str] = []

    def forgetful(self: Any, names: Any) -> Any:
        if not lost:
            lost.extend(names)
            self.drop(names)
        return get(self, names)

    monkeypatch.setattr(Stages, "get", forgetful)
    run(spark, world, tmp_path / "ckpt")
    assert lost
    assert world.content() == world.naive()


def test_a_server_that_restarts_under_the_running_query(
    spark: SparkSession, world: Any, tmp_path: Path
) -> None:
    world.make_queues()
    query = start(spark, world, tmp_path / "ckpt", max_offsets=500)
    for _ in range(3):
        world.publish(1_000)
        pause(300)
        world.close()
        world.open()
    world.publish(1_000)
    wait_for(lambda: not query.isActive or routed(world))
    query.stop()
    assert query.exception() is None
    assert world.content() == world.naive()


CHILD = """
import sys
from penstock.spark import session
from penstock.spark.route import route
spark = session("local[2]", conf={"spark.log.level": "OFF"})
route(sys.argv[1], spark=spark, checkpoint=sys.argv[2], max_offsets=150).awaitTermination()
"""


def test_a_driver_that_is_killed(spark: SparkSession, world: Any, tmp_path: Path) -> None:
    world.make_queues()
    world.publish(3_000)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, world.location, str(tmp_path / "ckpt")],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        # Another JVM has to start first.
        wait_for(
            lambda: status(world.location).routed_up_to > 150 or child.poll() is not None,
            seconds=3 * SECONDS,
        )
        assert child.poll() is None
    finally:
        # The JVM and the Python workers are of its group: all of them die at once.
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    assert not routed(world)
    world.publish(500)
    run(spark, world, tmp_path / "ckpt")
    assert world.content() == world.naive()


def test_two_that_run_at_once(spark: SparkSession, world: Any, tmp_path: Path) -> None:
    world.make_queues()
    world.publish(800)
    queries = [
        route(
            world.location,
            spark=spark,
            checkpoint=tmp_path / f"ckpt{number}",
            max_offsets=100,
            name=f"route{number}",
        )
        for number in range(2)
    ]
    wait_for(lambda: routed(world) and sum(query.isActive for query in queries) == 1)
    errors = [str(query.exception()) for query in queries if not query.isActive]
    assert len(errors) == 1
    assert "another pipeline has taken over" in errors[0]
    for query in queries:
        query.stop()
    assert world.content() == world.naive()


def test_a_store_that_routes_inline_is_refused(
    spark: SparkSession, make_world: Callable[..., Any], tmp_path: Path
) -> None:
    world = make_world(routing="inline")
    with pytest.raises(InvalidInput, match="routes inline"):
        start(spark, world, tmp_path / "ckpt")
