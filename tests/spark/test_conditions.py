"""The option ``where``: the broker reads and sends only what a condition on columns wants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

from pyspark.errors import AnalysisException

import penstock
import penstock.spark
from penstock.clock import ManualClock
from penstock.spark.reader import LogPartition, TableReader, spark_schema
from penstock.spark.source import read_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

HOUR_MS = 3_600_000


@pytest.fixture
def ten(make_world: Callable[..., Any]) -> Any:
    """Give a store with ten messages, an hour apart."""
    clock = ManualClock()
    begin_ms = clock.now_ms()
    world = make_world(routing="inline", clock=clock)
    world.broker.create_queue("q", filter="TRUE", lease_ms=100 * HOUR_MS)
    for number in range(10):
        world.broker.publish([penstock.Message(b"p", {"n": number}, group=f"g{number % 2}")])
        clock.advance(HOUR_MS)
    world.clock, world.begin_ms = clock, begin_ms
    taken = world.broker.claim("q", limit=4, consumer="ada")
    world.broker.ack([each.receipt for each in taken[:3]])
    return world


def planned(world: Any, where: str) -> list[tuple[int, int]]:
    """Return the offsets that the tasks of a read are to ask for."""
    options = read_options(
        {"server": world.location, "table": "log", "where": where}, streaming=False
    )
    parts = TableReader(options, spark_schema(options)).partitions()
    assert all(isinstance(part, LogPartition) for part in parts)
    return [part.stretch[1:] for part in parts]  # type: ignore[attr-defined]


def test_a_read_of_the_log_asks_for_no_other_offsets(ten: Any) -> None:
    begin_ms = ten.begin_ms
    assert planned(ten, "offset > 8") == [(9, 11)]
    assert planned(ten, f"published_at >= {begin_ms + 7 * HOUR_MS}") == [(8, 11)]
    since, until = begin_ms + 2 * HOUR_MS, begin_ms + 4 * HOUR_MS
    assert planned(ten, f"published_at > {since} AND published_at < {until}") == [(4, 5)]


def test_every_action_reads_the_present(spark: SparkSession, ten: Any) -> None:
    read = penstock.spark.read
    begin_ms = ten.begin_ms
    late = read(spark, ten.location, "log", where="offset > 9", columns=["offset"])
    later = read(spark, ten.location, "log", where="offset BETWEEN 12 AND 13")
    until = read(spark, ten.location, "log", where=f"published_at <= {begin_ms + 11 * HOUR_MS}")
    assert (late.count(), later.count(), until.count()) == (1, 0, 10)
    for _ in range(4):
        ten.broker.publish([penstock.Message(b"p", {})])
        ten.clock.advance(HOUR_MS)
    assert (late.count(), later.count(), until.count()) == (5, 2, 12)
    assert late.columns == ["offset"]


def test_tables_snapshots_and_statements(spark: SparkSession, ten: Any) -> None:
    read = penstock.spark.read
    held = read(spark, ten.location, "active", where="state = 'in_flight' AND queue = 'q'")
    assert [(row["consumer"], row["attempts"]) for row in held.collect()] == [("ada", 1)]
    first = read(spark, ten.location, "done", where="sequence < 2", payload=True)
    assert [bytes(row["payload"]) for row in first.collect()] == [b"p", b"p"]
    assert read(spark, ten.location, "log", where="offset > 4", filter="n < 6").count() == 2
    with penstock.spark.snapshot(ten.location, spark=spark) as then:
        table = then.table("log", where="\"group\" = 'g1'")
        ten.broker.publish([penstock.Message(b"p", {}, group="g1")])
        assert table.count() == 5
    spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW late USING penstock OPTIONS "
        f"(server '{ten.location}', table 'log', where '`group` = ''g1'' AND offset > 5')".replace(
            "`", '"'
        )
    )
    assert spark.sql("SELECT count(*) FROM late WHERE priority = 0").collect()[0][0] == 4
    spark.catalog.dropTempView("late")


def test_where_of_spark_is_exact_for_every_query_of_a_dataframe(
    spark: SparkSession, ten: Any
) -> None:
    whole = penstock.spark.read(spark, ten.location, "log", columns=["offset"])
    assert [whole.count(), whole.where("offset > 7").count(), whole.count()] == [10, 3, 10]
    both = whole.where("offset = 1").union(whole.where("offset = 2"))
    assert sorted(row[0] for row in both.collect()) == [1, 2]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"where": "offsett > 5"}, "did you mean 'offset'"),
        ({"where": "offset >"}, "something is missing"),
        ({"table": "done", "where": "done_at > 'soon'"}, "a time with its zone"),
        ({"table": "done", "where": "n = 1"}, "has no column 'n'"),
        ({"table": "done", "where": "TRUE", "includeArchive": "/"}, "use where\\(\\) of Spark"),
    ],
)
def test_a_wrong_condition_is_an_error(
    spark: SparkSession, ten: Any, options: dict[str, str], says: str
) -> None:
    reader = spark.read.format("penstock").options(
        **{"server": ten.location, "table": "log", **options}
    )
    with pytest.raises(AnalysisException, match=says):
        reader.load().count()
