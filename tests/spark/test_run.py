"""``penstock pipeline run``: what is killed comes back, and no message is lost or doubled.

A server, the pipeline and this test are processes of their own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from tests.ports import free_ports
from tests.processes import processes
from tests.waiting import wait_until

pytest.importorskip("pyspark", reason="pyspark is not installed")
pytest.importorskip("deltalake", reason="deltalake is not installed")

from deltalake import DeltaTable

import penstock
from penstock.flight.client import FlightStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.xdist_group("spark")]

SECONDS = 300
FILE = """
[spark]
master = "local[2]"
quick = true
[spark.conf]
"spark.local.dir" = "{place}/spark"
"spark.sql.codegen.wholeStage" = "false"
"spark.sql.codegen.factoryMode" = "NO_CODEGEN"
[operations]
address = "127.0.0.1:{port}"
[route]
checkpoint = "checkpoint"
steps = "steps:enrich"
max_offsets = 100
[archive]
place = "archive"
every = "1s"
[optimize]
every = "1h"
[report]
place = "reports"
every = "2s"
keep = 2
"""
STEPS = """
from pyspark.sql import functions as F

def enrich(log):
    even = F.udf(lambda n: int(n) % 2 == 0, "boolean")
    return log.withColumn("even", even(log.attributes["n"]))
"""


def filled(client: Any, queue: str, count: int) -> bool:
    return bool(client.stats(queue).enqueued_total >= count)


class Machine:
    """A server and a pipeline, each in a process that can be killed."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.native, self.flight, self.port = free_ports(3)
        (place / "pipeline.toml").write_text(FILE.format(place=place, port=self.port))
        (place / "steps.py").write_text(STEPS)
        self.running: list[subprocess.Popen[bytes]] = []
        self.published = 0
        self.acked: Counter[str] = Counter()

    def _start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        with (self.place / f"{name}.log").open("ab") as output:
            command = [sys.executable, "-m", "penstock", *words]
            process = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True, env=os.environ
            )
        self.running.append(process)
        return process

    def serve(self) -> subprocess.Popen[bytes]:
        server = self._start(
            *("server", "serve", "--store", f"rocksdb:{self.place}/store"),
            *("--routing", "pipeline", "--native", f"127.0.0.1:{self.native}"),
            *("--flight", f"127.0.0.1:{self.flight}"),
        )
        wait_until(self.answers, seconds=SECONDS)
        return server

    def answers(self) -> bool:
        try:
            self.connect().close()
        except penstock.PenstockError:
            return False
        return True

    def connect(self) -> Any:
        return penstock.connect(f"penstock://127.0.0.1:{self.native}", patience_ms=500)

    def run(self) -> subprocess.Popen[bytes]:
        location = f"grpc://127.0.0.1:{self.flight}"
        file = str(self.place / "pipeline.toml")
        return self._start("pipeline", "pipeline", "run", file, "--location", location)

    def page(self, name: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{name}", timeout=60) as page:
                return page.status, page.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def wait_ready(self) -> None:
        wait_until(lambda: self.page("ready")[0] == 200, seconds=SECONDS, why=self.log())

    def part(self, name: str) -> dict[str, Any]:
        found = json.loads(self.page("status")[1])["parts"]
        return next(each for each in found if each["part"] == name)

    def log(self) -> str:
        return (self.place / "pipeline.log").read_text()

    def publish(self, count: int) -> None:
        with self.connect() as client:
            numbers = range(self.published, self.published + count)
            client.publish([penstock.Message(b"x", {"n": number}) for number in numbers])
        self.published += count

    def work_off(self) -> None:
        """Wait until everything that was published is in its queues, and settle all of it."""
        with self.connect() as client:
            wanted = {"all": self.published, "even": self.published // 2}
            for queue, count in wanted.items():
                wait_until(
                    partial(filled, client, queue, count),
                    seconds=SECONDS,
                    why=self.log(),
                )
                assert client.stats(queue).enqueued_total == count
                while batch := client.claim(queue, limit=1_000):
                    client.ack([each.receipt for each in batch])
                    self.acked.update(f"{queue} {each.message_id}" for each in batch)

    def archived(self) -> Counter[str]:
        place = self.place / "archive" / "done"
        if not DeltaTable.is_deltatable(str(place)):
            # Nothing has been archived yet.
            return Counter()
        table = DeltaTable(place).to_pyarrow_table(columns=["queue", "message_id"])
        return Counter(f"{row['queue']} {row['message_id']}" for row in table.to_pylist())

    def javas(self) -> list[int]:
        """Return the JVMs of the pipeline, by the directory in their arguments."""
        return [
            pid
            for pid, each in processes().items()
            if "java" in each.command and f"{self.place}/spark" in each.command
        ]

    def workers(self) -> list[int]:
        """Return the Python processes that Spark has started."""
        first = set(self.javas())
        found, running = set(first), processes()
        while more := {pid for pid, each in running.items() if each.parent in found} - found:
            found |= more
        return sorted(found - first)


@pytest.fixture
def machine(tmp_path: Path, java: None) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    for process in machine.running:
        if process.poll() is None:
            process.kill()
            process.wait()
    wait_until(lambda: not machine.javas(), why="a JVM has outlived its pipeline")


def test_each_message_once_if_the_pipeline_is_killed(machine: Machine) -> None:
    _, pipeline = begin(machine)
    end(machine, pipeline)


@pytest.mark.soak
def test_each_message_once_whatever_is_killed(machine: Machine) -> None:
    server, pipeline = begin(machine)
    # The Python processes that plan the query, match and archive: the query fails.
    for pid in machine.workers():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: machine.part("route")["failures"] > 0, seconds=SECONDS, why=machine.log())
    machine.publish(200)
    machine.work_off()
    assert machine.part("route")["restarts"] > 0
    assert "route failed, it is started again in 1 s: " in machine.log()

    machine.wait_ready()
    server.kill()
    server.wait()
    # It stays away until somebody has noticed.
    wait_until(lambda: machine.page("ready")[0] == 503, seconds=SECONDS)
    machine.serve()
    machine.publish(200)
    machine.work_off()
    machine.wait_ready()
    wait_until(lambda: machine.part("report")["runs"] > 2, seconds=SECONDS, why=machine.log())
    assert len(list((machine.place / "reports").glob("report-*/report.html"))) == 2
    check_metrics(machine)
    end(machine, pipeline)


def begin(machine: Machine) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
    """Start a server and a pipeline, and have it route."""
    server = machine.serve()
    with machine.connect() as client:
        client.create_queue("all", filter="n >= 0")
        client.create_queue("even", filter="even = TRUE")
    pipeline = machine.run()
    assert machine.page("health")[0] in {0, 200}
    machine.wait_ready()
    machine.publish(200)
    machine.work_off()
    return server, pipeline


def end(machine: Machine, pipeline: subprocess.Popen[bytes]) -> None:
    """Kill the pipeline, start it again, and have another one take over."""
    # Lines alone: no stacks of Java and Python, and nothing of Spark's start.
    lines = machine.log().splitlines()
    assert lines[0].startswith("operations at http://127.0.0.1:")
    assert all(" penstock.pipeline " in line for line in lines[1:]), machine.log()
    # In the midst of its work.
    machine.publish(400)
    pipeline.kill()
    assert pipeline.wait() == -signal.SIGKILL
    wait_until(lambda: not machine.javas(), why="a JVM has outlived its pipeline")

    pipeline = machine.run()
    machine.work_off()
    wait_until(
        lambda: sum(machine.archived().values()) >= machine.acked.total(),
        seconds=SECONDS,
        why=machine.log(),
    )
    assert machine.acked.total() == machine.published * 3 // 2
    assert set(machine.acked.values()) == {1}
    assert machine.archived() == machine.acked

    # Another pipeline takes over: this one leaves it alone.
    FlightStore(f"grpc://127.0.0.1:{machine.flight}").take_epoch()
    machine.publish(2)
    assert pipeline.wait(SECONDS) == 4
    assert " error penstock.pipeline route: another pipeline has taken over" in machine.log()
    assert machine.log().endswith(" info penstock.pipeline stopped\n")
    assert not machine.javas()


def check_metrics(machine: Machine) -> None:
    """Look for what alerts and the dashboard need."""
    page = machine.page("metrics")[1]
    lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    for part in ("route", "archive", "report"):
        assert float(lines[f'penstock_pipeline_runs_total{{part="{part}"}}']) > 0
    assert float(lines['penstock_pipeline_restarts_total{part="route"}']) > 0
    assert float(lines['penstock_pipeline_failures_in_a_row{part="route"}']) == 0
    assert float(lines['penstock_pipeline_run_seconds_count{part="route"}']) > 0
    assert float(lines['penstock_pipeline_rows_total{part="archive"}']) > 0
    assert float(lines["penstock_pipeline_archive_lag_seconds"]) >= 0
    assert "penstock_pipeline_routed_total" in lines
