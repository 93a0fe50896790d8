"""The route job puts every message exactly once where its filters say, whatever happens."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

import msgspec
import pyarrow as pa
from pyspark.errors import StreamingQueryException
from tests.spark.conftest import python_workers

import penstock
from penstock.clock import SystemClock
from penstock.errors import InvalidInput
from penstock.flight.client import FlightStore
from penstock.flight.writes import Stages
from penstock.spark.log import LEAST_PIECE, Stretch
from penstock.spark.route import (
    AVAILABLE_NOW,
    MOST_PIECES,
    RoutePartition,
    dealt,
    default_max_offsets,
    route,
    status,
)
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

SECONDS = 300
SOURCE = str(Path(penstock.__file__).parents[1])
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


def test_tasks_take_pieces_in_turn() -> None:
    assert dealt([], 4) == []
    assert dealt([Stretch(0, 5, 6)], 4) == [RoutePartition([Stretch(0, 5, 6)])]
    for width, tasks, most in ((50_000, 2, 6), (45_000, 1, 6), (10**8, 2, MOST_PIECES)):
        whole = [Stretch(0, 7, 7 + width), Stretch(1, 3, 4)]
        parts = [part.pieces for part in dealt(whole, tasks) if isinstance(part, RoutePartition)]
        # Turn by turn they are all of it, in order.
        pieces = [piece for turn in zip_longest(*parts) for piece in turn if piece]
        assert len(pieces) <= most + 1
        assert pieces[-1] == whole[1]
        assert [piece.begin for piece in pieces[:-1]] == [7, *(p.end for p in pieces[:-2])]
        assert pieces[-2].end == 7 + width


@pytest.mark.parametrize(("cores", "tasks"), [(1, 1), (2, 2), (5, 5), (100, 100), (1_000, 1_000)])
def test_a_micro_batch_has_a_task_for_each_core(cores: int, tasks: int) -> None:
    most = default_max_offsets(cores)
    assert most >= 100_000
    assert len(dealt([Stretch(0, 1, 1 + most)], cores)) == tasks


def test_every_message_goes_where_its_filters_say(
    spark: SparkSession, world: Any, tmp_path: Path, actions: list[str]
) -> None:
    world.make_queues()
    world.publish(3_500)
    assert status(world.location).behind >= 3_500
    actions.clear()
    query = run(spark, world, tmp_path / "ckpt")
    # A plan and a commit for each micro-batch. Spark asks twice where to start, and once more when
    # nothing is left; tasks ask for filters.
    asked = Counter(actions)
    assert asked.pop("filters") >= 4
    assert asked == {
        "info": 1,
        "take_epoch": 1,
        "log_stats": 1,
        "route_plan": 2 + 4 + 1,
        "commit_stages": 4,
    }
    batches = [progress for progress in query.recentProgress if progress.numInputRows]
    assert len(batches) == 4
    told = [msgspec.json.decode(each.sources[0].latestOffset) for each in batches]
    assert [each["routed"] for each in told] == [1_000, 1_000, 1_000, 500]
    assert [each["lag"] for each in told] == [{"0": left} for left in (2_500, 1_500, 500, 0)]
    assert world.content() == world.naive()
    assert status(world.location).behind == 0
    assert status(world.location).cursors == {0: world.broker.log_stats().end}


def test_many_tasks_and_several_logs(spark: SparkSession, world: Any, tmp_path: Path) -> None:
    world.make_queues()
    # Enough of one log for two tasks, then a task for each log.
    world.publish(LEAST_PIECE + 2_000)
    world.broker.configure_log(logs=3)
    world.publish(3_000)
    world.broker.configure_log(logs=2)
    world.publish(2_000)
    run(spark, world, tmp_path / "ckpt", max_offsets=LEAST_PIECE + 1_000)
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
    get, assign = Stages.get, Stages.assign
    lost: list[str] = []

    def forgetful(self: Any, names: Any) -> Any:
        if not lost:
            lost.extend(names)
            self.drop(names)
        return get(self, names)

    def idle_at_first(self: Any, broker: Any) -> None:
        if lost:
            assign(self, broker)

    monkeypatch.setattr(Stages, "get", forgetful)
    monkeypatch.setattr(Stages, "assign", idle_at_first)
    run(spark, world, tmp_path / "ckpt")
    assert lost
    assert world.content() == world.naive()


def test_a_server_that_restarts_under_the_running_query(
    spark: SparkSession,
    make_world: Callable[..., Any],
    new_port: Callable[[], int],
    tmp_path: Path,
) -> None:
    world = make_world(port=new_port())
    world.make_queues()
    query = start(spark, world, tmp_path / "ckpt", max_offsets=500)
    for turn in range(3):
        world.publish(1_000)
        if turn == 1:
            # The first time nothing need have begun; now there is work under way.
            wait_for(lambda: not query.isActive or status(world.location).routed_up_to > 500)
        pause(200)
        world.close()
        world.open()
    world.publish(500)
    wait_for(lambda: not query.isActive or routed(world))
    query.stop()
    assert query.exception() is None
    assert world.content() == world.naive()


CHILD = """
import sys
from penstock.spark import session
from penstock.spark.route import route
spark = session("local[2]", conf={"spark.log.level": "OFF",
                                  "spark.sql.codegen.wholeStage": "false",
                                  "spark.sql.codegen.factoryMode": "NO_CODEGEN"})
route(sys.argv[1], spark=spark, checkpoint=sys.argv[2], max_offsets=150).awaitTermination()
"""


def test_a_driver_that_is_killed(
    spark: SparkSession, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.make_queues()
    world.publish(1_500)
    assign = world.broker.assign
    taken: list[Any] = []

    def killing(*given: Any, **settings: Any) -> Any:
        answer = assign(*given, **settings)
        taken.append(answer)
        if len(taken) == 2:
            # It waits for this answer. The JVM and the Python workers are of its group: all of
            # them die at once.
            os.killpg(child.pid, signal.SIGKILL)
        return answer

    monkeypatch.setattr(world.broker, "assign", killing)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, world.location, str(tmp_path / "ckpt")],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        # Another JVM has to start first.
        assert child.wait(3 * SECONDS) == -signal.SIGKILL
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    assert len(taken) == 2
    monkeypatch.undo()
    assert not routed(world)
    assert status(world.location).routed_up_to > 150
    world.publish(500)
    run(spark, world, tmp_path / "ckpt")
    assert world.content() == world.naive()


@pytest.mark.slow
def test_python_workers_that_are_killed_while_they_match_stage_and_answer(
    spark: SparkSession, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.make_queues()
    ids = world.publish(2_000)
    query = start(spark, world, tmp_path / "ckpt", max_offsets=500)
    add, filters_at = Stages.add, world.broker.filters_at
    killed: list[str] = []
    one_by_one = threading.Lock()

    def kill(phase: str, begin: int, at: int) -> None:
        # Who waits for this answer dies in the middle of its task. Only once: a task has four
        # tries, and may get a worker that is dead already for the next.
        with one_by_one:
            if begin == at and phase not in killed and (victims := python_workers(spark)):
                killed.append(phase)
                for pid in victims:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def matching(offset: int) -> Any:
        kill("matching", offset, ids[500])
        return filters_at(offset)

    def staging(self: Any, stage: Any) -> None:
        begin = stage.command.begin
        kill("staging", begin, ids[1_000])
        add(self, stage)
        kill("staged", begin, ids[1_500])

    monkeypatch.setattr(world.broker, "filters_at", matching)
    monkeypatch.setattr(Stages, "add", staging)
    wait_for(lambda: not query.isActive or routed(world))
    query.stop()
    assert query.exception() is None
    assert killed == ["matching", "staging", "staged"]
    assert world.content() == world.naive()
    assert_clean(world.broker)


class Served:
    """A store behind ``penstock serve``, in a process that can be killed."""

    def __init__(self, path: Path, port: int) -> None:
        self.path, self.port = path, port
        self.process = self.serve()

    def serve(self) -> subprocess.Popen[bytes]:
        note = self.path.with_suffix(".port")
        note.unlink(missing_ok=True)
        command = [sys.executable, "-m", "penstock", "serve", "--port-file", str(note)]
        flags = ["--store", f"rocksdb:{self.path}", "--flight", f"127.0.0.1:{self.port}"]
        process = subprocess.Popen(
            [*command, *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": SOURCE},
        )
        wait_for(lambda: note.exists() or process.poll() is not None)
        assert process.poll() is None
        assert int(note.read_text()) == self.port
        return process

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def publish(self, first: int, count: int) -> None:
        numbers = range(first, first + count)
        rows = pa.record_batch(
            [
                pa.array([b"x"] * count),
                pa.array([f'{{"kind": "k{n % 7}", "n": {n}}}' for n in numbers]),
                pa.array([f"id-{n}" for n in numbers]),
            ],
            names=["payload", "attributes_json", "dedup_id"],
        )
        FlightStore(f"grpc://127.0.0.1:{self.port}").publish([rows], again=True)


@pytest.mark.slow
def test_a_served_store_whose_process_is_killed_under_the_running_query(
    spark: SparkSession, new_port: Callable[[], int], tmp_path: Path
) -> None:
    path = tmp_path / "served"
    wanted = {"k1": "kind = 'k1'", "some": "n >= 500", "all": "n >= 0"}
    with penstock.open(f"rocksdb:{path}?design=buckets", routing="pipeline") as broker:
        for name, text in wanted.items():
            broker.create_queue(name, filter=text)
    served = Served(path, new_port())
    location = f"grpc://127.0.0.1:{served.port}"
    query = route(location, spark=spark, checkpoint=tmp_path / "ckpt", max_offsets=300)
    try:
        for turn in range(3):
            served.publish(1_000 * turn, 1_000)
            if turn == 1:
                wait_for(lambda: not query.isActive or status(location).routed_up_to > 300)
            pause(200)
            served.kill()
            served.process = served.serve()
        wait_for(lambda: not query.isActive or status(location).behind == 0)
        assert query.exception() is None
    finally:
        query.stop()
        served.kill()
    with penstock.open(f"rocksdb:{path}") as broker:
        numbers = range(3_000)
        expected = {
            "k1": [n for n in numbers if n % 7 == 1],
            "some": [n for n in numbers if n >= 500],
            "all": list(numbers),
        }
        for name, these in expected.items():
            found = broker.browse(name, limit=10_000, payloads=False)
            assert sorted(int(str(entry.attributes["n"])) for entry in found) == these
            counts = broker._store.by_name[name].counts  # type: ignore[attr-defined]
            assert counts.next_claim == len(these)
        assert_clean(broker)


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
    advice = "routes inline: .* switch it: penstock log configure --routing pipeline$"
    with pytest.raises(InvalidInput, match=advice):
        start(spark, world, tmp_path / "ckpt")
    world.publish(30)
    now = status(world.location)
    assert (now.routing, now.behind, now.lag) == ("inline", 0, {0: 0})
    assert now.cursors == {0: now.end} == {0: world.broker.log_stats().end}
    assert now.routed_up_to == now.end


def test_a_store_that_is_switched_under_the_running_query(
    spark: SparkSession, world: Any, tmp_path: Path
) -> None:
    world.make_queues()
    world.publish(500)
    first = start(spark, world, tmp_path / "ckpt")
    wait_for(lambda: routed(world))
    world.publish(300)
    world.broker.configure_log(routing="inline")
    world.publish(200)
    # Said by the next micro-batch, or by the one that was under way.
    told = "routes inline|routing was switched meanwhile"
    with pytest.raises(StreamingQueryException, match=told):
        first.awaitTermination(SECONDS)
    assert world.content() == world.naive()
    world.broker.configure_log(routing="pipeline")
    world.publish(400)
    # Its checkpoint is behind the cursors, which a switch has moved.
    run(spark, world, tmp_path / "ckpt")
    assert world.content() == world.naive()
    assert routed(world)


def test_a_store_that_is_switched_away_and_back_between_stage_and_commit(
    spark: SparkSession, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.make_queues()
    world.publish(500)
    assign = world.broker.assign

    def switched_before(*given: Any, **settings: Any) -> Any:
        monkeypatch.undo()
        world.broker.configure_log(routing="inline")
        world.broker.configure_log(routing="pipeline")
        return assign(*given, **settings)

    monkeypatch.setattr(world.broker, "assign", switched_before)
    query = start(spark, world, tmp_path / "ckpt", trigger=AVAILABLE_NOW)
    with pytest.raises(StreamingQueryException, match="another pipeline has taken over"):
        query.awaitTermination(SECONDS)
    assert world.content() == world.naive()
    world.publish(500)
    run(spark, world, tmp_path / "ckpt")
    assert world.content() == world.naive()
