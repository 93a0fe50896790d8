"""DataFrames and streams into messages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

from penstock.model import State

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


def publish(frame: DataFrame, world: Any) -> None:
    frame.write.format("penstock").option("location", world.location).mode("append").save()


def records(world: Any) -> list[Any]:
    return list(world.broker.read_log(0, begin=0, limit=100_000).records)


def test_every_column(spark: SparkSession, world: Any) -> None:
    frame = spark.sql(
        """SELECT CAST('hello' AS BINARY) AS payload,
                  struct('book' AS kind, 12 AS price, 1.5D AS weight, true AS new,
                         CAST(NULL AS STRING) AS none, CAST(2.25 AS DECIMAL(5, 2)) AS tax)
                    AS attributes,
                  'tenant' AS group, 7 AS priority, 60000L AS delay_ms, 'id-1' AS dedup_id,
                  'books' AS queue"""
    )
    publish(frame, world)
    (record,) = records(world)
    assert record.attributes == {
        "kind": "book",
        "price": 12,
        "weight": 1.5,
        "new": True,
        "none": None,
        "tax": 2.25,
        "queue": "books",
    }
    assert (record.group, record.priority, record.delay_ms, record.size) == ("tenant", 7, 60_000, 5)
    publish(frame, world)
    assert len(records(world)) == 1


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("map('kind', 'book')", {"kind": "book"}),
        ("map('price', 5, 'size', 6)", {"price": 5, "size": 6}),
        ('\'{"price": 5, "new": false}\'', {"price": 5, "new": False}),
        ("CAST(NULL AS MAP<STRING, STRING>)", {}),
        ("struct(DATE'2026-01-31' AS day)", {"day": "2026-01-31"}),
    ],
)
def test_attributes_of_every_sort(
    spark: SparkSession, world: Any, expression: str, expected: dict[str, Any]
) -> None:
    publish(spark.sql(f"SELECT 'text' AS payload, {expression} AS attributes"), world)
    assert [record.attributes for record in records(world)] == [expected]


def test_equal_rows_are_messages_of_their_own(spark: SparkSession, world: Any) -> None:
    frame = spark.range(100, numPartitions=3).selectExpr("'same' AS payload")
    publish(frame, world)
    assert len(records(world)) == 100
    # Another write is another: only a dedup id of one's own says that it is the same.
    publish(frame, world)
    assert len(records(world)) == 200


def test_a_task_that_fails_publishes_nothing_twice(
    spark: SparkSession, world: Any, tmp_path: Path
) -> None:
    flag = str(tmp_path / "failed-once")

    def fail_once(batches: Any) -> Any:
        for number, batch in enumerate(batches):
            if number == 2 and not Path(flag).exists():
                Path(flag).touch()
                raise RuntimeError("once")
            yield batch

    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
    try:
        frame = spark.range(1_000, numPartitions=2).selectExpr("string(id % 10) AS payload")
        publish(frame.mapInArrow(fail_once, "payload string"), world)
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert (tmp_path / "failed-once").exists()
    assert len(records(world)) == 1_000


def test_streams_replay_without_publishing_twice(
    spark: SparkSession, world: Any, tmp_path: Path
) -> None:
    source = tmp_path / "in"
    spark.range(40).selectExpr("string(id % 7) AS payload").write.parquet(str(source))

    def run() -> None:
        frame = spark.readStream.schema("payload string").parquet(str(source))
        shuffled = frame.repartition(2, "payload")
        writer = shuffled.writeStream.format("penstock").option("location", world.location)
        writer = writer.option("checkpointLocation", str(tmp_path / "ckpt"))
        writer.trigger(availableNow=True).start().awaitTermination()

    run()
    assert len(records(world)) == 40
    for name in ("0", ".0.crc"):
        (tmp_path / "ckpt" / "commits" / name).unlink(missing_ok=True)
    run()
    assert len(records(world)) == 40
    assert world.broker.store_stats().duplicates_total == 40
    spark.range(5).selectExpr("string(id % 7) AS payload").write.mode("append").parquet(str(source))
    run()
    assert len(records(world)) == 45


def test_from_log_to_log(spark: SparkSession, make_world: Any, tmp_path: Path) -> None:
    here, there = make_world(), make_world(routing="inline")
    there.broker.create_queue("copies", filter="price >= 0")
    here.publish(200)
    log = spark.readStream.format("penstock").options(
        location=here.location, table="log", startingOffsets="earliest", payload="true"
    )
    frame = log.load().selectExpr(
        "payload", "attributes_json", "group", "priority", "concat('copy-', offset) AS dedup_id"
    )
    writer = frame.writeStream.format("penstock").option("location", there.location)
    writer = writer.option("checkpointLocation", str(tmp_path / "ckpt"))
    writer.trigger(availableNow=True).start().awaitTermination()
    copies = there.broker.browse("copies", state=State.AVAILABLE, limit=1_000)
    assert sorted((e.attributes["n"], e.group, e.priority, len(e.payload)) for e in copies) == [
        (attributes["n"], group, priority, size)
        for attributes, group, priority, size in here.published.values()
    ]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ("1 AS payload", "payload is binary or string, not int"),
        ("'x' AS body", "body is not a column of messages; payload is missing"),
        ("'x' AS payload, 'y' AS priority", "priority is an int, not string"),
        ("'x' AS payload, 1 AS attributes", "attributes is a map, a struct or"),
        ("'x' AS payload, '[1]' AS attributes", "InvalidMessage.*row 0"),
        ("'x' AS payload, 300 AS priority", "InvalidMessage.*row 0.*priority"),
    ],
)
def test_what_can_not_be_published(
    spark: SparkSession, world: Any, columns: str, says: str
) -> None:
    with pytest.raises(Exception, match=re.compile(says, re.DOTALL)):
        publish(spark.sql(f"SELECT {columns}"), world)
    assert records(world) == []


def test_only_appending(spark: SparkSession, world: Any) -> None:
    writer = spark.sql("SELECT 'x' AS payload").write.format("penstock")
    with pytest.raises(Exception, match="can only be added"):
        writer.option("location", world.location).mode("overwrite").save()
