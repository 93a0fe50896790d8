"""Transformations between log and queues."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from penstock.spark import pipeline
from penstock.spark.route import AVAILABLE_NOW, status

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

SECONDS = 300
EXAMPLE = Path(__file__).parents[2] / "examples" / "spark_enrich.py"


def run(made: Any, checkpoint: Path, *, max_offsets: int = 1_000) -> None:
    query = made.start(checkpoint=checkpoint, trigger=AVAILABLE_NOW, max_offsets=max_offsets)
    assert query.awaitTermination(SECONDS)


def with_tier(spark: SparkSession) -> Any:
    rows = [(f"k{number}", f"tier{number % 2}") for number in range(4)]
    tiers = spark.createDataFrame(rows, "kind string, tier string")

    def enrich(log: DataFrame) -> DataFrame:
        # A join with a shuffle, so that rows come in no order.
        named = log.withColumn("kind", F.col("attributes")["kind"])
        return named.join(tiers.hint("merge"), "kind", "left").withColumn(
            "half", F.expr("size / 2")
        )

    return enrich


def test_routing_by_what_was_joined(spark: SparkSession, world: Any, tmp_path: Path) -> None:
    world.broker.create_queue("tier1", filter="tier = 'tier1'")
    world.broker.create_queue("none", filter="tier IS NULL AND half >= 1")
    world.broker.create_queue("plain", filter="price > 45")
    world.broker.configure_log(logs=2)
    world.publish(1_500)
    made = pipeline(spark, world.location).transform(with_tier(spark))
    run(made, tmp_path / "ckpt", max_offsets=600)
    run(made, tmp_path / "other")
    for message_id, (attributes, group, priority, size) in world.published.items():
        number = int(str(attributes["kind"])[1:])
        added = {"tier": f"tier{number % 2}" if number < 4 else None, "half": size / 2}
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


def test_a_worker_that_is_killed(spark: SparkSession, world: Any, tmp_path: Path) -> None:
    world.make_queues()
    world.publish(500)
    flag = str(tmp_path / "killed-once")

    def kill_once(batches: Any) -> Any:
        for batch in batches:
            if not Path(flag).exists():
                Path(flag).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    made = pipeline(spark, world.location).transform(
        lambda log: log.mapInArrow(kill_once, log.schema)
    )
    run(made, tmp_path / "ckpt")
    assert (tmp_path / "killed-once").exists()
    assert world.content() == world.naive()


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
        answer = assign(*given, **settings)
        statuses.append(answer.status.value)
        return answer

    monkeypatch.setattr(world.broker, "assign", changing)
    run(pipeline(spark, world.location), tmp_path / "ckpt")
    assert statuses[0] == "outdated"
    assert world.content() == world.naive()


def test_transformations_that_can_not_be(spark: SparkSession, world: Any, tmp_path: Path) -> None:
    world.publish(5)
    for number, (step, says) in enumerate(
        [
            (lambda log: log.drop("offset"), "offset is gone"),
            (lambda log: log.withColumn("where", F.array(F.lit(1))), "'where' is list"),
        ]
    ):
        made = pipeline(spark, world.location).transform(step)
        query = made.start(checkpoint=tmp_path / f"ckpt{number}", trigger=AVAILABLE_NOW)
        with pytest.raises(StreamingQueryException, match=says):
            query.awaitTermination(SECONDS)


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
