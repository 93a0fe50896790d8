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


def publish(frame: DataFrame, world: Any, **options: str) -> None:
    writer = frame.write.format("penstock").options(location=world.location, **options)
    writer.mode("append").save()


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
        (
            "'x' AS payload, map(1, 2) AS attributes",
            "attributes has names of text, not map<int,int>",
        ),
        ("'x' AS body", "body is not a column of messages; payload is missing"),
        ("'x' AS payload, 'y' AS priority", "priority is an int, not string"),
        ("'x' AS payload, 1 AS attributes", "attributes is a map, a struct or"),
        ("'x' AS payload, struct(double('NaN') AS price) AS attributes", "'price' is nan.*NaN"),
    ],
)
def test_what_can_not_be_published(
    spark: SparkSession, world: Any, columns: str, says: str
) -> None:
    with pytest.raises(Exception, match=re.compile(says, re.DOTALL)):
        publish(spark.sql(f"SELECT {columns}"), world)
    assert records(world) == []


def with_bad_rows(spark: SparkSession, *bad: int) -> DataFrame:
    """Make 20,000 rows of which some have a priority that no message may have."""
    numbers = ", ".join(map(str, bad))
    return spark.range(20_000, numPartitions=3).selectExpr(
        "concat('row ', id) AS payload",
        f"if(id IN ({numbers}), 300, 1) AS priority",
        "struct(id) AS attributes",
    )


def test_one_bad_row_and_nothing_is_published(spark: SparkSession, world: Any) -> None:
    with pytest.raises(Exception, match=r'priority .*"payload": "row 19999".*onBadRow'):
        publish(with_bad_rows(spark, 19_999), world)
    assert records(world) == []
    publish(with_bad_rows(spark, -1), world)
    # The order is that of the partitions.
    assert [each.attributes["id"] for each in records(world)] == list(range(20_000))


def test_bad_rows_are_left_out(spark: SparkSession, world: Any, tmp_path: Path) -> None:
    publish(with_bad_rows(spark, 5, 15_000), world, onBadRow="skip")
    assert len(records(world)) == 19_998
    place = tmp_path / "bad rows"
    kept = {"onBadRow": "quarantine", "quarantinePath": str(place)}
    publish(with_bad_rows(spark, 7, 19_999), world, **kept)
    assert len(records(world)) == 2 * 19_998
    found = spark.read.parquet(str(place)).orderBy("payload").collect()
    assert [(each.payload, each.attributes.id, each.priority) for each in found] == [
        ("row 19999", 19_999, 300),
        ("row 7", 7, 300),
    ]
    assert all("priority" in each.reason for each in found)
    assert [each.name for each in place.iterdir() if each.suffix != ".parquet"] == []


def test_a_stream_with_a_bad_row(spark: SparkSession, world: Any, tmp_path: Path) -> None:
    source, bad = tmp_path / "in", tmp_path / "bad"
    with_bad_rows(spark, 12_345).write.parquet(str(source))

    def run(**options: str) -> None:
        frame = spark.readStream.schema(
            "payload string, priority int, attributes struct<id bigint>"
        ).parquet(str(source))
        writer = frame.writeStream.format("penstock").options(location=world.location, **options)
        writer = writer.option("checkpointLocation", str(tmp_path / "ckpt"))
        writer.trigger(availableNow=True).start().awaitTermination()

    with pytest.raises(Exception, match=r'priority .*"payload": "row 12345"'):
        run()
    assert records(world) == []
    for _ in range(2):
        run(onBadRow="quarantine", quarantinePath=f"file://{bad}")
        for name in ("0", ".0.crc"):
            (tmp_path / "ckpt" / "commits" / name).unlink(missing_ok=True)
    assert len(records(world)) == 19_999
    # The second time the same rows came, and the same file.
    assert [row.payload for row in spark.read.parquet(str(bad)).collect()] == ["row 12345"]


def test_only_appending(spark: SparkSession, world: Any) -> None:
    writer = spark.sql("SELECT 'x' AS payload").write.format("penstock")
    with pytest.raises(Exception, match="can only be added"):
        writer.option("location", world.location).mode("overwrite").save()
