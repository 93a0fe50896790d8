"""Transformations between log and queues."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql import types as T  # noqa: N812 - as everybody calls it
from tests.spark.conftest import python_workers

from penstock.errors import InvalidInput
from penstock.flight.writes import Stages
from penstock.spark import pipeline
from penstock.spark.pipelines import check_transformed
from penstock.spark.route import AVAILABLE_NOW, status

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

SECONDS = 300
LOG = (
    "log int, offset bigint, attributes_json string, group string, priority int, "
    "published_at timestamp, size bigint"
)
EXAMPLE = Path(__file__).parents[2] / "examples" / "spark_enrich.py"


def run(made: Any, checkpoint: Path, *, max_offsets: int = 1_000) -> Any:
    query = made.start(checkpoint=checkpoint, trigger=AVAILABLE_NOW, max_offsets=max_offsets)
    assert query.awaitTermination(SECONDS)
    return query


def with_tier(spark: SparkSession) -> Any:
    rows = [(f"k{number}", f"tier{number % 2}") for number in range(4)]
    tiers = spark.createDataFrame(rows, "kind string, tier string")

    def enrich(log: DataFrame) -> DataFrame:
        # A join with a shuffle, so that rows come in no order.
        named = log.withColumn("kind", F.col("attributes")["kind"])
        return named.join(tiers.hint("merge"), "kind", "left").withColumn(
            "size.half", F.expr("size / 2")
        )

    return enrich


def test_routing_by_what_was_joined(
    spark: SparkSession,
    world: Any,
    tmp_path: Path,
    actions: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world.broker.create_queue("tier1", filter="tier = 'tier1'")
    world.broker.create_queue("none", filter='tier IS NULL AND "size.half" >= 1')
    world.broker.create_queue("plain", filter="price > 45")
    world.broker.configure_log(logs=2)
    world.publish(1_500)
    made = pipeline(spark, world.location).transform(with_tier(spark))
    get = Stages.get
    committed: list[int] = []

    def noting(self: Any, names: Any) -> Any:
        committed.append(len(names))
        return get(self, names)

    monkeypatch.setattr(Stages, "get", noting)
    actions.clear()
    query = run(made, tmp_path / "ckpt", max_offsets=600)
    # A plan and a commit for each micro-batch, as of routing without a transformation.
    asked = Counter(actions)
    assert asked.pop("filters") >= 3
    assert asked == {
        "info": 1, "take_epoch": 1, "log_stats": 1, "route_plan": 2 + 3 + 1, "commit_stages": 3,
    }  # fmt: skip
    # Two tasks match and stage. The driver gets the names of their stages, two logs each, however
    # many messages there are; its own are those of stretches without matches.
    tracker = spark.sparkContext.statusTracker()
    jobs = map(tracker.getJobInfo, tracker.getJobIdsForGroup(query.runId))
    stages = [tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds]
    assert sum(stage.numTasks == 2 for stage in stages if stage) >= 3
    assert max(committed) <= 2 * 2 + 2
    run(made, tmp_path / "other")
    for message_id, (attributes, group, priority, size) in world.published.items():
        number = int(str(attributes["kind"])[1:])
        added = {"tier": f"tier{number % 2}" if number < 4 else None, "size.half": size / 2}
        world.published[message_id] = ({**attributes, **added}, group, priority, size)
    assert world.content() == world.naive()
    assert status(world.location).behind == 0


def test_rows_that_are_dropped_or_doubled(spark: SparkSession, world: Any, tmp_path: Path) -> None:
    world.make_queues()
    ids = world.publish(100)

    def keep_some(log: DataFrame) -> DataFrame:
        return log.where("offset % 2 = 0").union(log.where("offset % 2 = 0"))

    run(pipeline(spark, world.location).transform(keep_some), tmp_path / "ckpt")
    kept = {i for i in ids if i % 2 == 0}
    assert world.content() == {
        name: [i for i in found if i in kept] for name, found in world.naive().items()
    }
    assert status(world.location).behind == 0


def test_workers_that_are_killed_while_they_match_stage_and_answer(
    spark: SparkSession, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.make_queues()
    ids = world.publish(600)
    flag = str(tmp_path / "killed-once")

    def kill_once(batches: Any) -> Any:
        for batch in batches:
            if not Path(flag).exists():
                Path(flag).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    add = Stages.add
    killed: list[str] = []
    there: list[Any] = []

    def killing(self: Any, stage: Any) -> None:
        """Kill who stages the second micro-batch before it has, and the third one once it has."""
        there[:] = [self]
        phase = {ids[200]: "staging", ids[400]: "staged"}.get(stage.command.begin)
        now = stage.rows and phase not in killed
        if phase == "staged":
            add(self, stage)
        if phase and now:
            killed.append(phase)
            for pid in python_workers(spark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if phase != "staged":
            add(self, stage)

    monkeypatch.setattr(Stages, "add", killing)
    made = pipeline(spark, world.location).transform(
        lambda log: log.mapInArrow(kill_once, log.schema)
    )
    run(made, tmp_path / "ckpt", max_offsets=200)
    assert Path(flag).exists()
    assert killed == ["staging", "staged"]
    assert world.content() == world.naive()
    # What an attempt has left that died is gone with the commit.
    assert [each for each in there[0]._staged.values() if not each.committed] == []


def test_filters_that_change_on_the_way(
    spark: SparkSession, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.make_queues()
    ids = world.publish(1_000)
    assign = world.broker.assign
    statuses: list[str] = []

    def changing(*given: Any, **settings: Any) -> Any:
        if not statuses:
            world.broker.update_queue("k1", filter="kind = 'k5'", from_offset=ids[0])
            world.broker.delete_queue("dear")
        answer = assign(*given, **settings)
        statuses.append(answer.status.value)
        return answer

    monkeypatch.setattr(world.broker, "assign", changing)
    run(pipeline(spark, world.location), tmp_path / "ckpt")
    assert statuses[0] == "outdated"
    assert world.content() == world.naive()


def test_transformations_that_can_not_be(spark: SparkSession, world: Any, tmp_path: Path) -> None:
    world.publish(5)
    more = spark.createDataFrame([("k9",)], "kind string")
    for number, (step, says) in enumerate(
        [
            (lambda log: log.withColumn("where", F.array(F.lit(1))), "'where' array<int>: it must"),
            (
                lambda log: log.withColumn("kind", log.attributes["kind"]).join(
                    more, "kind", "full"
                ),
                "has a row that is no message of its micro-batch",
            ),
        ]
    ):
        made = pipeline(spark, world.location).transform(step)
        query = made.start(checkpoint=tmp_path / f"ckpt{number}", trigger=AVAILABLE_NOW)
        with pytest.raises(StreamingQueryException, match=says):
            query.awaitTermination(SECONDS)


def table(columns: str) -> T.StructType:
    made = T.StructType.fromDDL(columns)
    assert isinstance(made, T.StructType)
    return made


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ("log int, offset bigint", "keep the columns of the log; attributes_json, group, priority"),
        (f"{LOG}, x int, y int, x int", "has column 'x' twice: rename one"),
        (LOG.replace("offset bigint", "offset string"), "'offset' string: it must be a bigint"),
        (f"{LOG}, at timestamp", "'at' timestamp: it must be text, a number or true or false"),
        (f"{LOG}, more map<string,int>", "'more' map<string,int>: it must be"),
    ],
)
def test_columns_that_can_not_be(columns: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(says)):
        check_transformed(table(columns))


def test_columns_that_can_be() -> None:
    given = "delay_ms bigint, attributes map<string,string>, payload binary, a string, b void"
    check_transformed(table(f"{LOG}, {given}, c decimal(5,2), d boolean"))


def test_the_example(spark: SparkSession) -> None:
    spec = importlib.util.spec_from_file_location("spark_enrich", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.main(spark) == {
        "all": [f"order {number}" for number in range(5)],
        "unknown": ["order 3"],
        "vip": ["order 0", "order 2", "order 4"],
    }
