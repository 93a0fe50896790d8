"""Every table, read through Spark, against what the broker itself says."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

from pyspark.errors import AnalysisException

import penstock
import penstock.spark
from penstock.flight.tables import WITH_PAYLOAD
from penstock.spark.source import TABLES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

HOUR_MS = 3_600_000


@pytest.fixture
def full(make_world: Callable[..., Any]) -> Any:
    """Give a store with something in every table."""
    return filled(make_world(routing="inline"))


def filled(world: Any) -> Any:
    broker = world.broker
    # Leases and delays that no test is slow enough to see the end of.
    broker.create_queue("books", filter="kind = 'book'", max_attempts=1, lease_ms=HOUR_MS)
    broker.create_queue("later", filter="kind = 'book' AND price > 90", delay_ms=HOUR_MS)
    broker.publish(
        penstock.Message(
            f"payload {number}".encode(),
            {"kind": "book", "price": number, "new": number % 2 == 0, "none": None},
            group=f"g{number % 2}",
            priority=number % 3,
        )
        for number in range(1, 101)
    )
    held = broker.claim("books", limit=10, consumer="ada")
    broker.ack([delivery.receipt for delivery in held[:5]])
    broker.release([delivery.receipt for delivery in held[5:8]], reason="torn")
    return world


def test_a_store_on_slatedb_is_read_through_its_server(
    spark: SparkSession, make_world: Callable[..., Any], full: Any, tmp_path: Path
) -> None:
    pytest.importorskip("slatedb", reason="slatedb is not installed")
    other = filled(make_world(routing="inline", url=f"slatedb+file://{tmp_path}/slatedb"))
    for table, columns in {
        "log": ("offset", "group", "attributes_json"),
        "active": ("queue", "message_id", "state", "attempts"),
        "done": ("queue", "message_id", "payload"),
        "attempts": ("queue", "message_id", "attempt", "outcome", "reason"),
    }.items():
        options = {"columns": ",".join(columns)}
        if "payload" in columns:
            options["payload"] = "true"
        found, expected = (
            sorted(world.reader(spark, table, **options).collect()) for world in (other, full)
        )
        assert found == expected, table
        assert found, table


@pytest.mark.parametrize("table", TABLES)
def test_every_table(spark: SparkSession, full: Any, table: str) -> None:
    broker = full.broker
    rows = full.reader(spark, table).collect()
    stats = broker.stats("books")
    if table in {"log", "messages"}:
        key = "offset" if table == "log" else "message_id"
        assert sorted(row[key] for row in rows) == list(range(1, 101))
        assert {row["group"] for row in rows} == {"g0", "g1"}
        first = next(row for row in rows if row[key] == 4)
        assert first["attributes"] == {"kind": "book", "price": "4", "new": "true", "none": None}
        assert first["attributes_json"] == '{"kind":"book","price":4,"new":true,"none":null}'
        assert first["size"] == len(b"payload 4")
    elif table == "active":
        books = [row for row in rows if row["queue"] == "books"]
        assert len(books) == stats.available + stats.in_flight == 92
        held = [row for row in books if row["state"] == "in_flight"]
        assert {(row["consumer"], row["attempts"]) for row in held} == {("ada", 1)}
        assert all(row["lease_deadline"] is not None for row in held)
        later = [row["state"] for row in rows if row["queue"] == "later"]
        assert later == ["delayed"] * 10
    elif table in {"done", "failed"}:
        assert len(rows) == (5 if table == "done" else 3)
        assert {row["queue"] for row in rows} == {"books"}
        expected = broker.browse("books", state=table)
        assert sorted(row["message_id"] for row in rows) == sorted(e.message_id for e in expected)
        if table == "failed":
            assert {row["reason"] for row in rows} == {"torn"}
    elif table == "attempts":
        ends = sorted(row["outcome"] for row in rows)
        assert ends == ["acked"] * 5 + ["released"] * 3 + ["running"] * 2
        assert {row["consumer"] for row in rows} == {"ada"}
    elif table == "queues":
        (row,) = [row for row in rows if row["name"] == "books"]
        assert (row["available"], row["in_flight"], row["done"], row["failed"]) == (
            stats.available,
            2,
            5,
            3,
        )
        assert row["filter"] == broker.queue("books").filter
    elif table == "groups":
        waiting = {row["group"]: row["available"] for row in rows if row["queue"] == "books"}
        assert sum(waiting.values()) == stats.available
    else:
        found = {row["metric"]: row["value"] for row in rows if row["queue"] == "books"}
        assert found["acked_total"] == 5
        assert next(r["value"] for r in rows if r["metric"] == "published_total") == 100


@pytest.mark.parametrize("table", sorted(WITH_PAYLOAD))
def test_payloads_when_asked_for(spark: SparkSession, full: Any, table: str) -> None:
    frame = full.reader(spark, table, payload="true")
    assert "payload" not in full.reader(spark, table).columns
    rows = frame.selectExpr("attributes['price'] AS price", "string(payload) AS payload").collect()
    assert rows
    assert all(row["payload"] == f"payload {row['price']}" for row in rows)


def test_queues_filters_and_columns(spark: SparkSession, full: Any) -> None:
    frame = full.reader(
        spark,
        "active",
        queue="books,later",
        filter='price > 95 AND "new"',
        columns="message_id,queue",
        partitions="2",
    )
    assert frame.columns == ["message_id", "queue"]
    assert sorted(map(tuple, frame.collect())) == [
        (96, "books"),
        (96, "later"),
        (98, "books"),
        (98, "later"),
        (100, "books"),
        (100, "later"),
    ]


def test_attributes_with_their_types(spark: SparkSession, full: Any) -> None:
    found = (
        full.reader(spark, "log")
        .selectExpr("variant_get(parse_json(attributes_json), '$.price', 'double') AS price")
        .agg({"price": "sum"})
        .collect()
    )
    assert found[0][0] == sum(range(1, 101))


def test_a_schema_of_ones_own(spark: SparkSession, full: Any) -> None:
    reader = spark.read.format("penstock").options(location=full.location, table="done")
    chosen = reader.schema("queue STRING NOT NULL, message_id BIGINT NOT NULL").load()
    assert len(chosen.collect()) == 5
    with pytest.raises(AnalysisException) as error:
        reader.schema("queue INT, message_id BIGINT, sender STRING").load().collect()
    assert "queue is string, not int; sender is not there" in str(error.value)


def settle(world: Any, count: int) -> None:
    held = world.broker.claim("books", limit=count)
    world.broker.ack([delivery.receipt for delivery in held])


def test_each_action_reads_the_present(spark: SparkSession, full: Any) -> None:
    done, log = full.reader(spark, "done"), full.reader(spark, "log")
    cached = full.reader(spark, "done").persist()
    shown = len(cached.take(1))
    assert (done.count(), log.count(), shown) == (5, 100, 1)
    settle(full, 4)
    full.broker.publish([penstock.Message(b"", {"kind": "book"})])
    assert (done.count(), log.count()) == (9, 101)
    # One action sees one moment, however often the table is in it; a cached one stays as it was.
    twice = done.select("message_id").join(done.select("message_id"), "message_id")
    assert (twice.count(), cached.count()) == (9, 5)
    # The broker has dropped every snapshot meanwhile.
    full._serving.service.snapshots._close(lambda _: True)
    settle(full, 1)
    assert (done.count(), len(done.tail(20)), cached.count()) == (10, 10, 5)
    cached.unpersist()
    # Another run of the broker.
    full.close()
    full.open()
    assert (done.count(), log.count()) == (10, 101)


def test_tables_of_one_moment(spark: SparkSession, full: Any) -> None:
    ids = ("queue", "message_id")
    with penstock.spark.snapshot(full.location) as then:
        settle(full, 10)
        full.broker.publish([penstock.Message(b"", {"kind": "book"})])
        every = (
            then.table("active", queue="books")
            .select(*ids)
            .union(then.table("done").select(*ids))
            .union(then.table("failed").select(*ids))
        )
        assert every.count() == every.distinct().count() == 100
        assert then.table("log").count() == 100
        reader = spark.read.format("penstock").options(**then.options, table="done")
        assert (reader.load().count(), then.table("done", columns=["queue"]).columns) == (
            5,
            ["queue"],
        )
        # Nothing but the open block keeps it.
        snapshots = full._serving.service.snapshots
        assert [each.held for each in snapshots._live.values()].count(True) == 1
    assert not any(each.held for each in snapshots._live.values())
    with pytest.raises(Exception, match="has expired"):
        reader.load().count()


def test_an_empty_store(spark: SparkSession, world: Any) -> None:
    for table in TABLES:
        if table != "stats":
            assert world.reader(spark, table).count() == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"table": "orders"}, "no table 'orders'; there are log"),
        ({"table": "done", "colums": "x"}, "unknown option 'colums'"),
        ({"table": "done", "columns": "queue,age"}, "has no column 'age'"),
        ({"table": "queues", "payload": "true"}, "has no payloads"),
        ({"table": "done", "filter": "price >"}, "InvalidFilter"),
        ({"table": "done", "queue": "nobody"}, "QueueNotFound.*nobody"),
        ({"table": "log", "startingOffsets": '{"7": 1}'}, "must name every log"),
    ],
)
def test_errors_say_what_is_wrong(
    spark: SparkSession, full: Any, options: dict[str, str], says: str
) -> None:
    reader = spark.read.format("penstock").options(location=full.location, **options)
    with pytest.raises(Exception, match=re.compile(says, re.DOTALL)):
        reader.load().collect()


def test_no_broker_there(spark: SparkSession, impatient: None) -> None:
    reader = spark.read.format("penstock").options(location="grpc://127.0.0.1:1", table="queues")
    with pytest.raises(Exception, match=r"no broker answers at grpc://127\.0\.0\.1:1"):
        reader.load().collect()
