"""Spark on a store that is in a SQL database, which other processes work at."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

import penstock
from penstock import ManualClock
from penstock.spark.jobs import archive
from penstock.spark.route import AVAILABLE_NOW, route, status
from penstock.spark.source import TABLES
from penstock.store.sql.session import EACH_MS
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession
    from tests.sql.postgres import PostgresServer

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

SECONDS = 120
SOURCE = str(Path(penstock.__file__).parents[1])


@pytest.fixture
def make_sql(
    make_world: Callable[..., Any], postgres: PostgresServer
) -> Iterator[Callable[..., Any]]:
    """Give a way to make brokers, all of them on one database."""
    name = postgres.create()
    made: list[Any] = []

    def make(**settings: Any) -> Any:
        made.append(make_world(url=postgres.url(name), **settings))
        return made[-1]

    yield make
    for world in made:
        world.close()
    postgres.drop(name)


def test_every_table(spark: SparkSession, make_sql: Callable[..., Any]) -> None:
    world = make_sql(routing="inline")
    broker = world.broker
    broker.create_queue("books", filter="n >= 0", max_attempts=1)
    broker.create_queue("later", filter="n >= 90", delay_ms=600_000)
    world.publish(100)
    held = broker.claim("books", limit=10, consumer="ada", lease_ms=3_600_000)
    broker.ack([delivery.receipt for delivery in held[:5]])
    broker.release([delivery.receipt for delivery in held[5:8]], reason="torn")
    found = {table: world.reader(spark, table).collect() for table in TABLES}
    assert sorted(row["offset"] for row in found["log"]) == list(range(1, 101))
    assert sorted(row["message_id"] for row in found["messages"]) == list(range(1, 101))
    active = Counter((row["queue"], row["state"]) for row in found["active"])
    assert active == {
        ("books", "available"): 90,
        ("books", "in_flight"): 2,
        ("later", "delayed"): 10,
    }
    for state in ("done", "failed"):
        expected = sorted(entry.message_id for entry in broker.browse("books", state=state))
        assert sorted(row["message_id"] for row in found[state]) == expected
    assert {row["reason"] for row in found["failed"]} == {"torn"}
    ends = Counter(row["outcome"] for row in found["attempts"])
    assert ends == {"acked": 5, "released": 3, "running": 2}
    assert {row["name"]: row["done"] for row in found["queues"]} == {"books": 5, "later": 0}
    assert sum(row["available"] for row in found["groups"]) == 90
    values = {(row["queue"], row["metric"]): row["value"] for row in found["stats"]}
    assert values["books", "acked_total"] == 5
    assert values[None, "published_total"] == 100
    bodies = world.reader(spark, "messages", payload="true").collect()
    assert {row["message_id"]: len(row["payload"]) for row in bodies} == {
        message_id: size for message_id, (_, _, _, size) in world.published.items()
    }


def test_the_log_as_a_stream(
    spark: SparkSession, make_sql: Callable[..., Any], tmp_path: Path
) -> None:
    first, second = make_sql(), make_sql()
    ids = []
    for count in (40, 30):
        # Whoever publishes: the stream is of one server.
        for world in (first, second):
            ids += world.broker.publish([penstock.Message(b"", {"n": n}) for n in range(count)])
        reader = spark.readStream.format("penstock").options(location=first.location, table="log")
        frame = reader.options(startingOffsets="earliest", maxOffsetsPerTrigger="50").load()
        writer = frame.writeStream.format("parquet")
        writer = writer.option("checkpointLocation", str(tmp_path / "ckpt"))
        query = writer.trigger(availableNow=True).start(str(tmp_path / "out"))
        assert query.awaitTermination(SECONDS)
    rows = spark.read.parquet(str(tmp_path / "out")).select("offset").collect()
    assert sorted(row["offset"] for row in rows) == ids == list(range(1, 141))


def test_everything_is_routed_once(
    spark: SparkSession, make_sql: Callable[..., Any], tmp_path: Path
) -> None:
    world = make_sql()
    world.make_queues()
    world.broker.configure_log(logs=2)
    for checkpoint in ("one", "new"):
        # A new checkpoint begins where the store says, not where the old one did.
        world.publish(700)
        query = route(
            world.location,
            spark=spark,
            checkpoint=tmp_path / checkpoint,
            max_offsets=500,
            trigger=AVAILABLE_NOW,
        )
        assert query.awaitTermination(SECONDS)
        assert status(world.location).behind == 0
    assert world.content() == world.naive()
    assert_clean(world.broker)


def test_archive_and_trim_while_another_process_settles(
    spark: SparkSession, make_sql: Callable[..., Any], tmp_path: Path
) -> None:
    """Each message that anybody has settled is archived once, and none is removed unseen."""
    world = make_sql(routing="inline")
    broker, place = world.broker, tmp_path / "archive"
    broker.create_queue("q", filter="n >= 0")
    world.publish(3_000)
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "sql_child.py"), world.url, "q"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )
    with child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "working\n"
            settled: list[int] = []
            trimmed = 0

            def work(step: str) -> None:
                """Settle more at every step, so that numbers here are ahead of the other's."""
                held = broker.claim("q", limit=40)
                assert all(broker.ack([each.receipt for each in held]))
                settled.extend(each.message_id for each in held)
                if step == "committed attempts":
                    # The other goes on between what is archived and what is removed.
                    threading.Event().wait(0.3)

            # The first run has something to archive.
            work("before")
            for _ in range(2):
                made = archive(spark, world.location, place, progress=work)
                trimmed += made.trimmed
                assert made.trimmed == made.rows["done"] > 0
            others, _ = child.communicate(timeout=SECONDS)
        finally:
            child.kill()
    settled += map(int, others.split())
    last = archive(spark, world.location, place)
    assert trimmed + last.trimmed == len(settled)
    assert broker.stats("q").done == 0
    rows = world.reader(spark, "done", includeArchive=str(place)).select("message_id").collect()
    assert sorted(row["message_id"] for row in rows) == sorted(settled)
    assert len(others.split()) > 20, "the other was to work meanwhile"
    assert_clean(broker)


def test_what_is_young_is_kept_though_its_number_is_low(
    spark: SparkSession, make_sql: Callable[..., Any], tmp_path: Path
) -> None:
    """Numbers begin with the time, by clocks that differ: what is young may come before."""
    clock = ManualClock()
    world = make_sql(routing="inline", clock=clock)
    broker, place = world.broker, tmp_path / "archive"
    broker.create_queue("q", filter="n >= 0")
    world.publish(12)
    store: Any = broker._store

    def finish(slot: int, count: int) -> list[int]:
        # That of the first connection; the others have the next three.
        store.first_slot = slot
        held = broker.claim("q", limit=count)
        assert all(broker.ack([each.receipt for each in held]))
        return [each.message_id for each in held]

    # As a process has left it whose clock was a minute ahead.
    ahead = (clock.now_ms() + 60_000) * EACH_MS
    store.database.execute(
        f"UPDATE queue_counts SET next_sequence = {ahead} WHERE slot > 4 AND slot < 9"
    )
    old = finish(5, 6)
    clock.advance(10_000)
    young = finish(1, 3)
    made = archive(spark, world.location, place, keep_ms=5_000)
    assert (made.rows["done"], made.trimmed) == (0, 0)
    clock.advance(10_000)
    # Rows of another process, which has begun where all had got to.
    newest = finish(9, 3)
    made = archive(spark, world.location, place, keep_ms=5_000)
    assert (made.rows["done"], made.trimmed) == (9, 9)
    rows = world.reader(spark, "done", includeArchive=str(place)).select("message_id").collect()
    assert sorted(row["message_id"] for row in rows) == sorted([*old, *young, *newest])
    assert {entry.message_id for entry in broker.browse("q", state="done")} == set(newest)
