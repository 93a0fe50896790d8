"""A store on object storage, read by Spark without its broker: as the broker would show it."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")
pytest.importorskip("slatedb", reason="slatedb is not installed")

from click.testing import CliRunner
from pyspark.errors import AnalysisException, StreamingQueryException
from tests.objectstore.test_moments import collect_garbage, marks, to_files

import penstock
from penstock import InvalidInput, InvalidUrl, ManualClock, Message, moments
from penstock.cli.main import cli
from penstock.server import in_process_server
from penstock.spark import direct
from penstock.spark.columns import spark_schema
from penstock.spark.jobs import archive, collect, report
from penstock.spark.options import TABLES, read_options, write_options
from penstock.spark.reader import TableReader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


class Site:
    """A broker on a store that can be read beside it; its clock stands still."""

    def __init__(self, place: Path) -> None:
        self.url = f"slatedb+file://{place}/store"
        self.clock = ManualClock(penstock.SystemClock().now_ms() + 3_600_000)
        self.broker = penstock.open(self.url, clock=self.clock, background=False)
        self.broker.create_queue("all", filter="n >= 0", max_attempts=1)
        self.broker.create_queue("few", filter="price < 10")
        self.serving = in_process_server(self.broker, port=0)

    def publish(self, count: int) -> list[int]:
        made = [
            Message(b"%d" % n, {"n": n, "price": n % 50}, group=f"g{n % 3}") for n in range(count)
        ]
        return self.broker.publish(made)

    def work(self, count: int) -> None:
        """Publish and settle: done, failed, released, delayed, in flight."""
        self.publish(count)
        for queue in ("all", "few"):
            held = [each.receipt for each in self.broker.claim(queue, limit=count, consumer="w")]
            self.broker.ack(held[: count // 2])
            self.broker.release(held[count // 2 : -3], reason="no")
        self.broker.publish([Message(b"later", {"n": 1}, delay_ms=60_000)])

    def reopen(self) -> None:
        """Have the store taken over by another owner; the one before is fenced."""
        self.serving.close()
        before = self.broker
        self.broker = penstock.open(self.url, clock=self.clock, background=False)
        # It may learn of it only now.
        with suppress(penstock.StoreFenced):
            before.close()
        self.serving = in_process_server(self.broker, port=0)

    def rows(self, table: str, **options: str) -> list[Any]:
        """Read a table with the data source, without a Spark job."""
        return self.rows_at({"store": self.url}, table, **options)

    def rows_at(self, where: dict[str, str], table: str, **options: str) -> list[Any]:
        checked = read_options({**where, "table": table, **options}, streaming=False)
        reader = TableReader(checked, spark_schema(checked))
        found = [
            row
            for part in reader.partitions()
            for batch in reader.read(part)
            for row in batch.to_pylist()
        ]
        return sorted(found, key=repr)

    def frame(self, spark: SparkSession, table: str, **options: str) -> DataFrame:
        return spark.read.format("penstock").options(store=self.url, table=table, **options).load()

    def stream(self, spark: SparkSession, **options: str) -> DataFrame:
        reader = spark.readStream.format("penstock").options(store=self.url, table="log")
        return reader.options(**options).load()

    def close(self) -> None:
        self.serving.close()
        self.broker.close()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = Site(tmp_path)
    # What is read in this process is to be looked at with the clock of the broker.
    looking = moments.Looking
    monkeypatch.setattr(
        moments,
        "Looking",
        lambda url, following: looking(url, clock=made.clock, following=following),
    )
    yield made
    made.close()


def to_parquet(frame: DataFrame, place: Path, **trigger: Any) -> StreamingQuery:
    writer = frame.writeStream.format("parquet").option("checkpointLocation", str(place / "ckpt"))
    return writer.trigger(**(trigger or {"availableNow": True})).start(str(place / "out"))


def offsets(frame: DataFrame) -> list[int]:
    return sorted(row["offset"] for row in frame.select("offset").collect())


# --- batches --------------------------------------------------------------------------------------


def test_every_table_is_as_the_broker_shows_it(site: Site) -> None:
    site.work(200)
    to_files(site.broker)
    site.work(100)
    payload = {"active", "done", "failed", "messages", "log"}
    choices: list[dict[str, str]] = [{}, {"partitions": "3"}]
    for table in TABLES:
        chosen = [{**each, "payload": "true"} if table in payload else each for each in choices]
        if table in payload - {"messages"}:
            chosen.append({"filter": "n > 0 AND n < 290", "columns": "group,size"})
        if table not in {"log", "messages"}:
            chosen.append({"queue": "all"})
        for options in chosen:
            broker = {"location": site.serving.location}
            expected = site.rows_at(broker, table, **options)
            assert site.rows(table, **options) == expected, (table, options)
            assert expected, (table, options)
    part = {"startingOffsets": '{"0": 10}', "endingOffsets": '{"0": 20}'}
    assert [row["offset"] for row in site.rows("log", **part)] == list(range(10, 20))
    site.clock.advance(5_000)
    later = site.publish(7)
    since = {"startingTimestamp": str(site.clock.now_ms())}
    assert [row["offset"] for row in site.rows("log", **since)] == later


def test_executors_read_the_moment_of_the_planner(spark: SparkSession, site: Site) -> None:
    site.work(300)
    to_files(site.broker)
    site.work(300)
    expected = site.rows("done", columns="queue,message_id,payload", payload="true")
    frame = site.frame(spark, "done", columns="queue,message_id,payload", payload="true")
    planned = frame.rdd
    assert planned.getNumPartitions() > 1
    # Much happens between the plan and its tasks: rows come and go, files too, and the owner.
    site.work(500)
    site.broker.delete_queue("few")
    to_files(site.broker)
    site.reopen()
    site.publish(100)
    to_files(site.broker)
    collect_garbage(site.url)
    rows = planned.map(tuple).collect()
    wanted = [(row["queue"], row["message_id"], bytes(row["payload"])) for row in expected]
    assert sorted((queue, number, bytes(body)) for queue, number, body in rows) == sorted(wanted)
    assert len(site.rows("done")) != len(wanted)


def test_archived_rows_come_once(spark: SparkSession, site: Site, tmp_path: Path) -> None:
    site.work(60)
    before = {table: site.rows(table) for table in ("done", "failed", "attempts")}
    archive(spark, site.serving.location, tmp_path / "archive")
    site.work(20)
    for table, rows in before.items():
        together = site.rows(table, includeArchive=str(tmp_path / "archive"))
        key = ("queue", "message_id", "attempt" if table == "attempts" else "attempts")
        keys = [tuple(row[name] for name in key) for row in together]
        assert len(set(keys)) == len(keys) > len(rows)
        assert {tuple(row[name] for name in key) for row in rows} <= set(keys)
        assert len(site.rows(table)) < len(rows) + 20


def test_live_attempts_travel_once_beside_archived_ones(
    spark: SparkSession, site: Site, tmp_path: Path
) -> None:
    site.work(30)
    archive(spark, site.serving.location, tmp_path / "archive")
    site.work(20)
    options = {"store": site.url, "table": "attempts", "includeArchive": str(tmp_path / "archive")}
    checked = read_options(options, streaming=False)
    parts = TableReader(checked, spark_schema(checked)).partitions()
    assert len(parts) == 2
    tickets = [moments.Ticket.unpacked(part.ticket) for part in parts]  # type: ignore[attr-defined]
    for table in ("history", "leases"):
        keys = [key for ticket in tickets for key in ticket.rows.get(table, {})]
        assert len(keys) == len(set(keys)) >= 2, table


def test_a_report_without_the_broker(spark: SparkSession, site: Site, tmp_path: Path) -> None:
    site.work(80)
    expected = report(spark, site.serving.location)
    words = ["pipeline", "report", "--store", site.url, "--queue", "all", "--queue", "few"]
    words += ["--json", "--save", str(tmp_path / "r")]
    result = CliRunner().invoke(cli, words, env={"PENSTOCK_FLIGHT": "grpc://127.0.0.1:1"})
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    for name in ("queues", "groups", "reasons", "attempts", "routing"):
        # The clocks of the two differ.
        frame = expected[name].drop("oldest_wait_ms", "first_ended_at", "last_ended_at")
        rows = [row.asDict() for row in frame.collect()]
        seen = [{column: row[column] for column in frame.columns} for row in found[name]]
        assert sorted(seen, key=repr) == sorted(rows, key=repr), name
        assert rows, name
    assert (tmp_path / "r" / "report.html").exists()


def test_where_a_report_is_made_from() -> None:
    store = ["pipeline", "report", "--store", "slatedb+s3://bucket/store"]
    both = CliRunner().invoke(cli, [*store, "--location", "grpc://127.0.0.1:1"])
    assert both.exit_code == 2
    assert "exclude each other" in both.output
    other = CliRunner().invoke(cli, ["pipeline", "report", "--store", "rocksdb:data"])
    assert other.exit_code == 2
    assert "is read by its broker" in other.output
    neither = CliRunner().invoke(cli, ["pipeline", "report"], env={"PENSTOCK_FLIGHT": None})
    assert neither.exit_code == 2
    assert "give --location" in neither.output


# --- streams --------------------------------------------------------------------------------------


def test_a_stream_has_every_message_once_whoever_owns_the_store(
    spark: SparkSession, site: Site, tmp_path: Path
) -> None:
    ids = site.publish(25)
    options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "10", "payload": "true"}
    query = to_parquet(site.stream(spark, **options), tmp_path)
    query.awaitTermination()
    counts = [progress.numInputRows for progress in query.recentProgress]
    assert [count for count in counts if count] == [10, 10, 5]
    del options["maxOffsetsPerTrigger"]
    query = to_parquet(site.stream(spark, **options), tmp_path, processingTime="100 milliseconds")
    try:
        for turn in range(4):
            ids += site.publish(10)
            if turn == 1:
                to_files(site.broker)
                collect_garbage(site.url)
            if turn == 2:
                site.reopen()
            query.processAllAvailable()
            read = spark.read.parquet(str(tmp_path / "out"))
            assert offsets(read) == ids
    finally:
        query.stop()
    assert read.where("payload IS NULL OR length(payload) = 0").count() == 0
    # Two at most of each query.
    assert len(marks(site.url)) <= 4


def test_a_stream_that_the_log_has_left_behind(
    spark: SparkSession, site: Site, tmp_path: Path
) -> None:
    site.broker.configure_log(retention_ms=1_000)
    site.publish(5)
    to_parquet(site.stream(spark, startingOffsets="earliest"), tmp_path).awaitTermination()
    site.publish(5)
    for _ in range(3):
        site.clock.advance(2 * 3_600_000)
        last = site.publish(1)
        site.broker.sweep()
    assert site.broker.log_stats().earliest > 10
    with pytest.raises(StreamingQueryException, match="data loss"):
        to_parquet(site.stream(spark), tmp_path).awaitTermination()
    to_parquet(site.stream(spark, failOnDataLoss="false"), tmp_path).awaitTermination()
    assert offsets(spark.read.parquet(str(tmp_path / "out")))[-1:] == last


def test_a_busy_store_is_streamed_without_a_gap(
    spark: SparkSession, site: Site, tmp_path: Path
) -> None:
    stop = threading.Event()
    ids: list[int] = []

    def work() -> None:
        while not stop.is_set():
            ids.extend(site.publish(20))
            site.broker.ack([each.receipt for each in site.broker.claim("all", limit=20)])

    frame = site.stream(spark, startingOffsets="earliest")
    query = to_parquet(frame, tmp_path, processingTime="0 seconds")
    worker = threading.Thread(target=work)
    worker.start()
    try:
        while len([each for each in query.recentProgress if each.numInputRows]) < 4:
            assert query.exception() is None
            stop.wait(0.1)
    finally:
        stop.set()
        worker.join()
    query.processAllAvailable()
    query.stop()
    assert offsets(spark.read.parquet(str(tmp_path / "out"))) == ids


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"location": "grpc://127.0.0.1:1"}, "exclude each other"),
        ({"token": "secret"}, "token are for a broker"),
        ({"ca": "ca.pem"}, "ca are for a broker"),
        ({"epoch": "3"}, "epoch are for a broker"),
        ({"table": "matches"}, "takes a broker"),
        ({"store": "rocksdb:data"}, "read from its broker"),
        ({"store": "memory:"}, "slatedb"),
        ({"startingOffsets": "latest"}, "are for the table 'log'"),
    ],
)
def test_options_that_need_a_broker(options: dict[str, str], words: str) -> None:
    given = {"store": "slatedb+s3://bucket/store", "table": "done", **options}
    with pytest.raises(InvalidInput, match=words):
        read_options(given)


def test_a_store_is_not_written(spark: SparkSession, site: Site) -> None:
    with pytest.raises(InvalidInput, match="by the broker that owns it"):
        write_options({"store": site.url})
    with pytest.raises(InvalidUrl, match="no Flight server"):
        collect(spark, site.url)


def test_errors_are_one_line(spark: SparkSession, site: Site, tmp_path: Path) -> None:
    def said(store: str, **options: str) -> str:
        reader = spark.read.format("penstock").options(store=store, table="done", **options)
        with pytest.raises(AnalysisException) as raised:
            reader.load().collect()
        assert "Traceback" not in str(raised.value)
        return str(raised.value)

    nothing = f"slatedb+file://{tmp_path}/nothing"
    assert f"penstock.errors.StoreMismatch: {nothing} holds no store" in said(nothing)
    assert "QueueNotFound: no queue named 'never'" in said(site.url, queue="never")
    assert "holds a store of the buckets design" in said(f"{site.url}?design=indexed")


def test_what_a_process_has_open_is_bounded(tmp_path: Path) -> None:
    closed = []

    class Thing:
        def __init__(self, name: int) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)

    opened: direct._Open[Thing] = direct._Open()
    with opened.using((0,), lambda: Thing(0)):
        for name in range(1, 8):
            with opened.using((name,), lambda name=name: Thing(name)) as found:  # type: ignore[misc]
                assert found.name == name
        with opened.using((7,), lambda: Thing(99)) as found:
            assert found.name == 7
    assert closed == [1, 2, 3, 4]
