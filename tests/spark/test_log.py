"""The log in batches and as a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

import msgspec
from pyspark.errors import AnalysisException, StreamingQueryException

from penstock import ManualClock
from penstock.spark import Progress, progress, snapshot
from penstock.spark.log import LEAST_PIECE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


def offsets(frame: DataFrame) -> list[int]:
    return sorted(row["offset"] for row in frame.select("offset").collect())


def stream(spark: SparkSession, world: Any, **options: str) -> DataFrame:
    reader = spark.readStream.format("penstock").options(location=world.location, table="log")
    return reader.options(**options).load()


def to_parquet(frame: DataFrame, place: Path, **trigger: Any) -> StreamingQuery:
    writer = frame.writeStream.format("parquet").option("checkpointLocation", str(place / "ckpt"))
    return writer.trigger(**(trigger or {"availableNow": True})).start(str(place / "out"))


def test_batches_between_offsets(spark: SparkSession, world: Any) -> None:
    ids = world.publish(50)
    assert offsets(world.reader(spark, "log")) == ids
    part = world.reader(spark, "log", startingOffsets='{"0": 10}', endingOffsets='{"0": 20}')
    assert offsets(part) == list(range(10, 20))
    assert offsets(world.reader(spark, "log", startingOffsets='{"0": -1}')) == []
    assert offsets(world.reader(spark, "log", startingOffsets="latest")) == []
    assert offsets(world.reader(spark, "log", filter="price = 7")) == [ids[7]]
    pieces = world.reader(spark, "log", stretches="[[0, 3, 5], [0, 40, 42]]")
    assert offsets(pieces) == [3, 4, 40, 41]


def test_many_tasks_read_each_row_once(spark: SparkSession, world: Any) -> None:
    ids = world.publish(LEAST_PIECE + 5_000)
    frame = world.reader(spark, "log", columns="offset", minPartitions="3")
    assert frame.rdd.getNumPartitions() == 2
    assert offsets(frame) == ids


def test_a_starting_time(spark: SparkSession, make_world: Callable[..., Any]) -> None:
    clock = ManualClock()
    world = make_world(clock=clock)
    ids = world.publish(20)
    clock.advance(1_000)
    ids += world.publish(30)
    for after_ms, expected in ((0, ids), (1, ids[20:]), (1_000, ids[20:]), (1_001, [])):
        text = str(clock.now_ms() - 1_000 + after_ms)
        assert offsets(world.reader(spark, "log", startingTimestamp=text)) == expected
    assert offsets(world.reader(spark, "log", startingTimestamp="2001-01-01T00:00:00Z")) == ids
    begin, end = str(clock.now_ms() - 1_000), str(clock.now_ms())
    between = world.reader(spark, "log", startingTimestamp=begin, endingTimestamp=end)
    assert offsets(between) == ids[:20]
    by_log = world.reader(spark, "log", startingTimestamp=f'{{"0": {end}}}')
    assert offsets(by_log) == ids[20:]
    with pytest.raises(AnalysisException, match="endingTimestamp must name every log"):
        offsets(world.reader(spark, "log", endingTimestamp='{"1": 5}'))
    with snapshot(world.location, spark=spark) as then:
        world.publish(3)
        tomorrow = str(clock.now_ms() + 86_400_000)
        assert offsets(then.table("log", endingTimestamp=tomorrow)) == ids


def test_a_stream_is_limited_and_ends_where_the_log_ended(
    spark: SparkSession, world: Any, tmp_path: Path
) -> None:
    ids = world.publish(25)
    frame = stream(spark, world, startingOffsets="earliest", maxOffsetsPerTrigger="10")
    query = to_parquet(frame, tmp_path)
    query.awaitTermination()
    told = [each for each in query.recentProgress if each.numInputRows]
    assert [each.numInputRows for each in told] == [10, 10, 5]
    lags = [msgspec.json.decode(each.sources[0].latestOffset)["lag"] for each in told]
    assert lags == [{"0": 15}, {"0": 5}, {"0": 0}]
    assert offsets(spark.read.parquet(str(tmp_path / "out"))) == ids


def test_a_micro_batch_waits_until_it_is_worth_it(
    spark: SparkSession, world: Any, tmp_path: Path
) -> None:
    world.publish(3)
    options = {"minOffsetsPerTrigger": "10", "maxTriggerDelay": "1h"}
    frame = stream(spark, world, startingOffsets="earliest", **options)
    query = to_parquet(frame, tmp_path, processingTime="0 seconds")
    # The first micro-batch does not wait.
    for published, rows in ((0, 3), (6, None), (4, 10)):
        world.publish(published)
        while rows is not None and ((told := progress(query)) is None or told.rows != rows):
            assert query.isActive
            query.awaitTermination(1)
    query.stop()
    assert [each.numInputRows for each in query.recentProgress if each.numInputRows] == [3, 10]
    assert progress(query) == Progress(batch=1, rows=10, lag={"0": 0})


def test_a_stream_goes_on_from_its_checkpoint(
    spark: SparkSession, world: Any, tmp_path: Path
) -> None:
    ids = []
    for count in (30, 20, 0, 5):
        ids += world.publish(count)
        # Start options count only the first time.
        frame = stream(spark, world, startingOffsets="earliest" if count == 30 else "latest")
        to_parquet(frame, tmp_path).awaitTermination()
        assert offsets(spark.read.parquet(str(tmp_path / "out"))) == ids


def test_a_lost_commit_replays_the_same_rows(
    spark: SparkSession, world: Any, tmp_path: Path
) -> None:
    world.publish(30)
    options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "20"}
    seen: list[tuple[int, list[int]]] = []

    def note(batch: DataFrame, number: int) -> None:
        seen.append((number, offsets(batch)))

    def run() -> None:
        writer = stream(spark, world, **options).writeStream.foreachBatch(note)
        writer = writer.option("checkpointLocation", str(tmp_path / "ckpt"))
        writer.trigger(availableNow=True).start().awaitTermination()

    run()
    (tmp_path / "ckpt" / "commits" / "1").unlink()
    (tmp_path / "ckpt" / "commits" / ".1.crc").unlink(missing_ok=True)
    world.publish(10)
    run()
    assert seen == [
        (0, list(range(1, 21))),
        (1, list(range(21, 31))),
        (1, list(range(21, 31))),
        (2, list(range(31, 41))),
    ]


def test_several_logs(spark: SparkSession, world: Any, tmp_path: Path) -> None:
    ids = world.publish(40)
    to_parquet(stream(spark, world, startingOffsets="earliest"), tmp_path).awaitTermination()
    world.broker.configure_log(logs=3)
    ids += world.publish(60)
    frame = stream(spark, world, maxOffsetsPerTrigger="25")
    query = to_parquet(frame, tmp_path)
    query.awaitTermination()
    found = spark.read.parquet(str(tmp_path / "out"))
    assert offsets(found) == ids
    assert len({row["log"] for row in found.select("log").distinct().collect()}) == 3
    assert max(progress.numInputRows for progress in query.recentProgress) <= 25


def test_a_checkpoint_of_another_store_is_refused(
    spark: SparkSession, make_world: Callable[..., Any], tmp_path: Path
) -> None:
    first, second = make_world(), make_world()
    first.publish(5)
    second.publish(9)
    to_parquet(stream(spark, first, startingOffsets="earliest"), tmp_path).awaitTermination()
    query = to_parquet(stream(spark, second), tmp_path)
    with pytest.raises(StreamingQueryException, match="the checkpoint belongs to store") as told:
        query.awaitTermination()
    assert "Traceback" not in str(told.value)


def test_what_retention_took_is_told(
    spark: SparkSession, make_world: Callable[..., Any], tmp_path: Path
) -> None:
    clock = ManualClock()
    world = make_world(routing="inline", clock=clock)
    world.publish(10)
    frame = stream(spark, world, startingOffsets="earliest")
    to_parquet(frame, tmp_path).awaitTermination()
    earliest = lose_the_beginning(world, clock)
    with pytest.raises(AnalysisException, match=f"data loss: offsets 1 to {earliest} of log 0"):
        world.reader(spark, "log", startingOffsets='{"0": 1}').collect()
    end = world.broker.log_stats().end
    kept = world.reader(spark, "log", startingOffsets='{"0": 1}', failOnDataLoss="false")
    assert offsets(kept) == list(range(earliest, end))
    query = to_parquet(stream(spark, world), tmp_path)
    with pytest.raises(StreamingQueryException, match="data loss: offsets 11 to"):
        query.awaitTermination()
    query = to_parquet(stream(spark, world, failOnDataLoss="false"), tmp_path)
    query.awaitTermination()
    assert offsets(spark.read.parquet(str(tmp_path / "out"))) == [
        *range(1, 11),
        *range(earliest, end),
    ]


def lose_the_beginning(world: Any, clock: ManualClock) -> int:
    """Let the log's retention remove segments; return where the log begins then."""
    hour_ms = 3_600_000
    world.broker.configure_log(retention_ms=hour_ms)
    for _ in range(5):
        world.publish(10)
        clock.advance(2 * hour_ms)
    world.broker.sweep()
    earliest: int = world.broker.log_stats().earliest
    assert earliest > 10
    return earliest
