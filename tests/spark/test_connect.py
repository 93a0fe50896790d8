"""The data source and the jobs through Spark Connect: a client without a JVM.

A process has either a classic session or Connect ones, and the other tests have the classic one;
so the server is a process of its own, and every client too.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")
pytest.importorskip("grpc_status", reason="Spark Connect needs penstock[connect]")

import pyspark

import penstock
from penstock.clock import SystemClock
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.xdist_group("spark")]

SECONDS = 300
clock = SystemClock()
SOURCE = str(Path(penstock.__file__).parents[1])


@pytest.fixture(scope="module")
def server(
    java: None, new_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Start a Connect server; give its address."""
    port = new_port()
    place = tmp_path_factory.mktemp("connect")
    home = Path(pyspark.__file__).parent
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.ui.enabled": "false",
        "spark.local.dir": str(place / "local"),
        "spark.sql.warehouse.dir": str(place / "warehouse"),
    }
    flags = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    running = subprocess.Popen(
        [
            str(home / "bin" / "spark-submit"),
            *("--master", "local[2,4]", "--driver-memory", "800m", *flags),
            *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer"),
            "spark-internal",
        ],
        env={
            **os.environ,
            "SPARK_HOME": str(home),
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": SOURCE,
        },
        cwd=place,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline_ms = clock.now_ms() + 1000 * SECONDS
        while not listens(port):
            assert running.poll() is None
            assert clock.now_ms() < deadline_ms, "the server does not listen"
            threading.Event().wait(0.1)
        yield f"sc://127.0.0.1:{port}"
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


OPENING = """
import json, sys
from pathlib import Path
from penstock.spark import session
from penstock.spark.sessions import is_connect, parallelism
spark = session(sys.argv[1])
location, place = sys.argv[2], Path(sys.argv[3])
assert is_connect(spark)
answers = {}
"""
CLOSING = """
print(json.dumps(answers))
"""


@pytest.fixture
def client(server: str, tmp_path: Path) -> Callable[[str, str], dict[str, Any]]:
    """Give a way to run a program with a Connect session, and to get its ``answers``."""

    def run(location: str, program: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-c", OPENING + program + CLOSING, server, location, str(tmp_path)],
            timeout=2 * SECONDS,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": SOURCE},
        )
        assert done.returncode == 0, done.stderr[:3_000]
        answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answers

    return run


SOURCES = """
answers["parallelism"] = parallelism(spark)
reader = spark.read.format("penstock").option("location", location)
answers["queues"] = [row["name"] for row in reader.option("table", "queues").load().collect()]
log = reader.option("table", "log")
answers["dear"] = log.option("filter", "price > 45").load().count()
rows = spark.range(7).selectExpr("string(id) AS payload", "struct(id AS n) AS attributes")
rows.write.format("penstock").option("location", location).mode("append").save()
stream = spark.readStream.format("penstock").options(
    location=location, table="log", startingOffsets="earliest", maxOffsetsPerTrigger="40")
query = (stream.load().select("offset").writeStream.format("memory").queryName("seen")
         .option("checkpointLocation", str(place / "seen")).trigger(availableNow=True).start())
assert query.awaitTermination(300)
answers["streamed"] = sorted(row["offset"] for row in spark.table("seen").collect())
try:
    reader.option("table", "done").option("queue", "never").load().count()
except Exception as error:
    answers["error"] = str(error).splitlines()[0]
"""


def test_tables_publishing_and_the_log(
    client: Callable[[str, str], dict[str, Any]], make_world: Callable[..., Any]
) -> None:
    world = make_world(routing="inline")
    world.make_queues()
    world.publish(100)
    answers = client(world.location, SOURCES)
    assert answers["parallelism"] == 2
    assert sorted(answers["queues"]) == sorted(queue.name for queue in world.broker.queues())
    prices = [attributes["price"] for attributes, *_ in world.published.values()]
    assert answers["dear"] == sum(price > 45 for price in prices)
    records = world.broker.read_log(0, limit=1_000).records
    assert answers["streamed"] == [record.message_id for record in records]
    assert sorted(record.attributes["n"] for record in records[100:]) == list(range(7))
    assert answers["error"].endswith("penstock.errors.QueueNotFound: no queue named 'never'")


PIPELINE = """
from penstock.spark import pipeline
from penstock.spark.route import status
rows = [(f"k{number}", f"tier{number % 2}") for number in range(4)]
tiers = spark.createDataFrame(rows, "kind string, tier string")

def enrich(log):
    named = log.withColumn("kind", log.attributes["kind"])
    here = log.sparkSession.createDataFrame([("k1", 7), ("k2", 8)], "kind string, number int")
    return named.join(tiers, "kind", "left").join(here, "kind", "left")

def run(step, name):
    query = pipeline(spark, location).transform(step).start(
        checkpoint=place / name, trigger="available now", max_offsets=400)
    assert query.awaitTermination(300)

run(enrich, "own")
answers["behind"] = status(location).behind
spark.sql("SELECT 'x' AS payload").write.format("penstock").option(
    "server", location).mode("append").save()
try:
    run(lambda log: log.drop("offset"), "wrong")
except Exception as error:
    answers["refused"] = str(error)
"""


def test_a_pipeline_of_your_own(client: Callable[[str, str], dict[str, Any]], world: Any) -> None:
    world.broker.create_queue("odd", filter="tier = 'tier1' OR number = 8")
    world.broker.create_queue("none", filter="tier IS NULL AND number IS NULL")
    world.publish(1_000)
    answers = client(world.location, PIPELINE)
    assert answers["behind"] == 0
    kinds = {number: attributes["kind"] for number, (attributes, *_) in world.published.items()}
    assert world.content() == {
        "odd": [number for number, kind in kinds.items() if kind in {"k1", "k2", "k3"}],
        "none": [number for number, kind in kinds.items() if kind in {"k4", "k5", "k6"}],
    }
    assert_clean(world.broker)
    assert "keep the columns of the log; offset is gone" in answers["refused"]


JOBS = """
from penstock.errors import QueueNotFound
from penstock.spark import jobs
from penstock.spark.route import route, status
query = route(location, spark=spark, checkpoint=place / "route", trigger="available now",
              max_offsets=300)
assert query.awaitTermination(300)
answers["behind"] = status(location).behind
answers["late"] = jobs.backfill(spark, location, "late").added
told = []
sent = jobs.publish(spark, location, query="SELECT 'x' AS payload, 'once' AS dedup_id",
                    progress=lambda *now: told.append(now))
again = jobs.publish(spark, location, query="SELECT 'x' AS payload, 'once' AS dedup_id")
answers["sent"] = [sent.published, sent.duplicates, again.published, again.duplicates]
answers["told"] = bool(told)
answers["page"] = jobs.save_report(jobs.report(spark, location), place / "report").name
try:
    jobs.redrive(spark, location, "never")
except QueueNotFound as error:
    answers["unknown"] = str(error)
"""


# Through Connect or not, a job is the same code beyond the session.
@pytest.mark.soak
def test_routing_and_jobs(client: Callable[[str, str], dict[str, Any]], world: Any) -> None:
    world.make_queues()
    world.publish(1_000)
    while penstock.route_once(world.broker):
        pass
    world.broker.create_queue("late", filter="kind = 'k2'")
    old = world.naive()["late"]
    world.publish(500)
    answers = client(world.location, JOBS)
    assert answers["behind"] == 0
    assert answers["late"] == len(old)
    assert world.content() == world.naive()
    assert_clean(world.broker)
    assert answers["sent"] == [1, 0, 0, 1]
    assert answers["told"]
    assert answers["page"] == "report.html"
    assert answers["unknown"] == "no queue named 'never'"
