"""Report, redrive, publish, backfill and collect, against what the broker itself says."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

import pyarrow as pa
from click.testing import CliRunner
from pyspark.errors import AnalysisException
from pyspark.sql.types import StringType, StructField, StructType

import penstock
from penstock.cli.main import cli
from penstock.errors import InvalidInput, InvalidMessage, QueueNotFound
from penstock.flight.client import FlightStore
from penstock.spark.jobs import backfill, collect, publish, redrive, report, save_report
from penstock.spark.sessions import pinned, read, revived, translated
from penstock.spark.source import Options
from penstock.spark.writer import BatchPublisher

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


# --- report ---------------------------------------------------------------------------------------


def test_the_report_says_what_the_broker_says(
    spark: SparkSession, shop: Any, tmp_path: Path
) -> None:
    frames = report(spark, shop.location)
    queues = {row["queue"]: row for row in frames["queues"].collect()}
    for name in ("all", "dear"):
        stats = shop.broker.stats(name)
        row = queues[name]
        assert (row["done"], row["failed"], row["available"], row["in_flight"]) == (
            stats.done,
            stats.failed,
            stats.available,
            0,
        )
        assert row["attempts_max"] == 2
        assert 0 <= row["first_claim_p50_ms"] <= row["done_p50_ms"] <= row["done_p99_ms"]
        assert row["oldest_wait_ms"] > 0
    groups = frames["groups"].where("queue = 'all'").collect()
    assert {row["group"] for row in groups} == {"g0", "g1", "g2"}
    assert sum(row["done"] for row in groups) == queues["all"]["done"]
    reasons = {row["queue"]: row for row in frames["reasons"].collect()}
    failed = queues["all"]["failed"]
    assert reasons["all"]["reason"] == "out of stock"
    assert (reasons["all"]["messages"], reasons["all"]["attempts"]) == (failed, 2 * failed)
    timeline = frames["timeline"].collect()
    assert sum(row["done"] + row["failed"] for row in timeline if row["queue"] == "all") == 400
    assert frames["starving"].count() == 6
    assert frames["routing"].collect()[0]["lag"] == 0

    html = save_report(frames, tmp_path / "report").read_text()
    assert html.count("<svg") == 4
    assert "out of stock" in html
    assert f"<dt>done</dt><dd>{sum(row['done'] for row in queues.values())}</dd>" in html
    saved = spark.read.parquet(str(tmp_path / "report" / "queues.parquet"))
    assert {row["queue"]: row["done"] for row in saved.collect()} == {
        name: row["done"] for name, row in queues.items()
    }


def test_a_report_of_an_empty_store(
    spark: SparkSession, make_world: Callable[..., Any], tmp_path: Path
) -> None:
    world = make_world(routing="inline")
    world.broker.create_queue("idle", filter="n = 1")
    frames = report(spark, world.location)
    assert [(row["queue"], row["done"]) for row in frames["queues"].collect()] == [("idle", 0)]
    assert "nothing to show" in save_report(frames, tmp_path).read_text()


# --- redrive --------------------------------------------------------------------------------------


def test_redrive_takes_what_the_condition_selects(spark: SparkSession, shop: Any) -> None:
    where = "reason = 'out of stock' AND attributes['price'] = '41' AND attempts = 2"
    failed = shop.broker.browse("all", state="failed", limit=10_000)
    wanted = {entry.message_id for entry in failed if entry.attributes["price"] == 41}
    dry = redrive(spark, shop.location, "all", where=where, dry_run=True)
    assert (dry.selected, dry.redriven) == (len(wanted), 0)
    assert {row["message_id"] for row in dry.sample} <= wanted
    assert len(shop.broker.browse("all", state="failed", limit=10_000)) == len(failed)

    told: list[tuple[int, int]] = []
    done = redrive(spark, shop.location, "all", where=where, progress=lambda *now: told.append(now))
    assert done.redriven == len(wanted) > 0
    assert told == [(len(wanted), len(wanted))]
    left = shop.broker.browse("all", state="failed", limit=10_000)
    assert {e.message_id for e in left} == {e.message_id for e in failed} - wanted
    with pytest.raises(InvalidInput, match="colour"):
        redrive(spark, shop.location, "all", where="colour = 'red'")


# --- publish --------------------------------------------------------------------------------------


def test_files_become_messages(
    spark: SparkSession, make_world: Callable[..., Any], tmp_path: Path
) -> None:
    broker = (world := make_world(routing="inline")).broker
    broker.create_queue("dear", filter="price > 10 AND kind = 'book'")
    (tmp_path / "orders.csv").write_text(
        "kind,price,tenant\n" + "".join(f"book,{n},t{n % 3}\n" for n in range(40))
    )
    columns = {"attributes": "struct(kind, price)", "group": "tenant", "priority": "price % 2"}
    dry = publish(spark, world.location, str(tmp_path / "*.csv"), columns=columns, dry_run=True)
    assert (dry.rows, dry.published) == (40, 0)
    assert broker.log_stats().end == broker.log_stats().earliest
    told: list[tuple[int, int]] = []
    made = publish(
        spark,
        world.location,
        str(tmp_path / "*.csv"),
        columns=columns,
        progress=lambda *now: told.append(now),
    )
    assert (made.rows, made.published, made.duplicates) == (40, 40, 0)
    assert told[-1] == (40, 40)
    entries = broker.browse("dear", limit=100)
    assert sorted(entry.attributes["price"] for entry in entries) == list(range(11, 40))
    assert Counter(entry.group for entry in entries)["t1"] == 9
    first = min(entries, key=lambda entry: entry.attributes["price"])
    assert json.loads(first.payload or b"") == {"kind": "book", "price": 11, "tenant": "t2"}
    assert first.priority == 1

    spark.range(5).createOrReplaceTempView("numbers")
    sent = publish(
        spark,
        world.location,
        query="SELECT string(id) AS payload, id FROM numbers",
        columns={"queue": "'direct'"},
    )
    assert sent.rows == 5
    log = broker.read_log(0, limit=100).records
    assert sum(record.attributes == {"queue": "direct"} for record in log) == 5


def test_publishing_counts_what_had_been_published(
    spark: SparkSession, make_world: Callable[..., Any]
) -> None:
    world = make_world(routing="inline")

    def send(rows: int) -> tuple[int, int, int]:
        query = f"SELECT string(id) AS payload, concat('id-', id) AS dedup_id FROM range({rows})"
        sent = publish(spark, world.location, query=query)
        return sent.rows, sent.published, sent.duplicates

    assert send(30) == (30, 30, 0)
    assert send(45) == (45, 15, 30)
    assert len(world.broker.read_log(0, limit=100).records) == 45


def test_a_write_says_how_much_it_has_published(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    schema = StructType([StructField("payload", StringType())])
    writer = BatchPublisher(Options(location=world.location, table="messages"), schema)
    rows = pa.record_batch([pa.array(["a", "b"])], names=["payload"])
    with caplog.at_level("INFO", logger="penstock.spark.writer"):
        for _ in range(2):
            writer.commit([writer.write(iter([rows])), None])
    assert caplog.messages == [
        "this write: 2 published, 0 of them duplicates",
        "this write: 2 published, 2 of them duplicates",
    ]


def test_errors_come_back_through_spark_as_what_they_were(
    spark: SparkSession, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = read(spark, world.location, "done", queues=["never"])
    with pytest.raises(AnalysisException) as caught:
        frame.count()
    first = str(caught.value).splitlines()[0]
    assert first.endswith("penstock.errors.QueueNotFound: no queue named 'never'")
    with pytest.raises(QueueNotFound, match=r"^no queue named 'never'$"):
        pinned(frame)
    with pytest.raises(InvalidInput, match=r"^no table 'never'"):
        read(spark, world.location, "never")
    with pytest.raises(AnalysisException, match="colour"), translated():
        spark.sql("SELECT colour")
    assert revived(ValueError("penstock.errors.NeverHeardOf: something")) is None

    def asking(*_: Any, **__: Any) -> None:
        frame.count()

    monkeypatch.setattr("penstock.spark.jobs.collect", asking)
    said = CliRunner().invoke(cli, ["pipeline", "collect", "--location", world.location])
    assert (said.exit_code, said.stderr) == (1, "Error: no queue named 'never'\n")


def test_a_bad_row_names_itself_and_nothing_is_published(
    spark: SparkSession, make_world: Callable[..., Any], tmp_path: Path
) -> None:
    world = make_world(routing="inline")
    rows = [{"payload": "x", "group": "g", "code": n} for n in range(10)]
    rows[7]["group"] = "g" * 300
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(InvalidMessage, match=r'rows.json: group.*"code":7'):
        publish(spark, world.location, str(tmp_path / "rows.json"))
    (tmp_path / "rows.json").write_text('{"payload": "x"}\n{"payload": \n')
    with pytest.raises(InvalidInput, match="can't be read"):
        publish(spark, world.location, str(tmp_path / "rows.json"))
    for paths, query in ((None, None), ("a.xml", None), ("a", "b")):
        with pytest.raises(InvalidInput):
            publish(spark, world.location, paths, query=query)
    with pytest.raises(InvalidInput, match="colour"):
        publish(spark, world.location, query="SELECT 1 AS payload", columns={"colour": "1"})
    assert world.broker.log_stats().end == world.broker.log_stats().earliest


# --- backfill -------------------------------------------------------------------------------------


def test_a_backfill_goes_on_where_it_was_stopped(spark: SparkSession, world: Any) -> None:
    world.broker.configure_log(logs=3)
    world.broker.create_queue("first", filter="n >= 0")
    world.publish(1000)
    while penstock.route_once(world.broker):
        pass
    world.broker.create_queue("late", filter="kind = 'k1' AND price > 20")
    dry = backfill(spark, world.location, "late", dry_run=True)
    wanted = world.naive()["late"]
    assert (dry.matched, dry.added) == (len(wanted), 0)
    assert world.content()["late"] == []

    told: list[tuple[int, int]] = []

    def stop(done: int, total: int) -> None:
        told.append((done, total))
        raise InterruptedError

    with pytest.raises(InterruptedError):
        backfill(spark, world.location, "late", window=400, progress=stop)
    assert told == [(400, dry.offsets)]
    some = world.content()["late"]
    assert 0 < len(some) < len(wanted)

    rest = backfill(spark, world.location, "late", window=400)
    assert rest.offsets == dry.offsets - 400
    assert rest.added == len(wanted) - len(some)
    assert world.content()["late"] == wanted
    assert backfill(spark, world.location, "late").offsets == 0
    with pytest.raises(QueueNotFound):
        backfill(spark, world.location, "never")


# --- collect --------------------------------------------------------------------------------------


def orphan(broker: penstock.Broker, message_ids: list[int]) -> None:
    """Make payloads that nobody holds, as a fault might."""
    core: Any = broker._store
    batch = core.engine.batch()
    for message_id in message_ids:
        batch.put(b"\x01\x01" + message_id.to_bytes(8, "big"), b"lost", core.payloads.table.family)
    core.engine.commit(batch)


def test_collect_takes_only_what_nobody_refers_to(
    spark: SparkSession, make_world: Callable[..., Any]
) -> None:
    clock = penstock.ManualClock()
    world = make_world(routing="inline", clock=clock)
    world.broker.create_queue("late", filter="n >= 5", done_retention_ms=0)
    ids = world.publish(10)
    orphan(world.broker, ids[:1])
    assert collect(spark, world.location).candidates == 0, "the log still has it"
    world.broker.configure_log(retention_ms=1)
    for _ in range(2):
        clock.advance(7_200_000)
        world.broker.sweep()
    orphan(world.broker, ids[1:3])
    dry = collect(spark, world.location)
    assert (dry.candidates, dry.candidate_bytes) == (2, 8)
    assert (dry.freed_messages, dry.freed_bytes, dry.dry_run) == (2, 8, True)
    assert world.reader(spark, "messages").count() == 5 + 2
    freed = collect(spark, world.location, dry_run=False)
    assert (freed.freed_messages, freed.freed_bytes) == (2, 8)
    kept = {row["message_id"] for row in world.reader(spark, "messages").collect()}
    assert kept == set(ids[5:]) == set(world.content()["late"])
    # The broker looks again: what a queue refers to stays, whoever asks.
    assert FlightStore(world.location).collect(ids, dry_run=False).freed_messages == 0
