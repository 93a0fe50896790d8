"""Routing on a cluster of its own: master, worker and two executors, each in its own process."""

from __future__ import annotations

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

import pyspark

import penstock
from penstock.clock import SystemClock
from penstock.flight.writes import Stages
from penstock.spark.route import status
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.xdist_group("spark")]

clock = SystemClock()
SOURCE = str(Path(penstock.__file__).parents[1])
ROUTE = """
import sys
from penstock.spark import session
from penstock.spark.route import route
spark = session(sys.argv[3], conf={"spark.log.level": "OFF", "spark.executor.memory": "600m",
                                   "spark.executor.cores": "1",
                                   "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
                                   "spark.driver.host": "127.0.0.1",
                                   "spark.executorEnv.PYTHONPATH": sys.argv[4]})
assert spark.sparkContext.master == sys.argv[3]
query = route(sys.argv[1], spark=spark, checkpoint=sys.argv[2], trigger=sys.argv[5],
              max_offsets=int(sys.argv[6]))
query.awaitTermination()
"""


def spark_class(place: Path, *arguments: str) -> subprocess.Popen[bytes]:
    home = Path(pyspark.__file__).parent
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_WORKER_DIR": str(place / "work"),
        "SPARK_LOCAL_DIRS": str(place / "local"),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_DAEMON_MEMORY": "300m",
        "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    return subprocess.Popen(
        [str(home / "bin" / "spark-class"), *arguments],
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.fixture(scope="module")
def cluster(
    java: None, new_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, int]]:
    """Give the address of a cluster of two executors, and the group that these are of."""
    port = new_port()
    deploy = "org.apache.spark.deploy"
    here = ["--host", "127.0.0.1"]
    place = tmp_path_factory.mktemp("cluster")
    running = [
        spark_class(
            place, f"{deploy}.master.Master", *here, "--port", str(port), "--webui-port", "0"
        )
    ]
    address = f"spark://127.0.0.1:{port}"
    try:
        wait_for(lambda: listens(port))
        sizes = ["--cores", "2", "--memory", "1400m", "--webui-port", "0"]
        running.append(spark_class(place, f"{deploy}.worker.Worker", *here, *sizes, address))
        yield address, running[-1].pid
    finally:
        for process in running:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def driver(
    master: str, location: str, checkpoint: Path, trigger: str, max_offsets: int
) -> list[str]:
    settings = [location, str(checkpoint), master, SOURCE, trigger, str(max_offsets)]
    return [sys.executable, "-c", ROUTE, *settings]


def executors(group: int) -> list[int]:
    """Return the executors of a group of processes."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            command = place.joinpath("cmdline").read_bytes()
            if b"CoarseGrainedExecutorBackend" in command and os.getpgid(int(place.name)) == group:
                found.append(int(place.name))
        except OSError:
            continue
    return found


def wait_for(what: Callable[[], bool], seconds: int = 600) -> None:
    deadline_ms = clock.now_ms() + seconds * 1000
    while not what():
        assert clock.now_ms() < deadline_ms, "it did not happen in time"
        threading.Event().wait(0.05)


@pytest.mark.soak
def test_routing_on_a_cluster(cluster: Any, world: Any, tmp_path: Path) -> None:
    world.make_queues()
    world.publish(50_000)
    run = subprocess.run(
        driver(cluster[0], world.location, tmp_path / "ckpt", "available now", 20_000),
        timeout=600,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
    )
    assert run.returncode == 0, run.stderr[-2_000:]
    assert status(world.location).behind == 0
    assert world.content() == world.naive()


def test_executors_that_are_killed(
    cluster: tuple[str, int], world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master, group = cluster
    world.make_queues()
    world.publish(1_000)
    add = Stages.add
    killed: list[int] = []
    armed = threading.Event()
    one_by_one = threading.Lock()

    def killing(self: Any, stage: Any) -> None:
        # A task waits for this answer: whichever of them has it dies in the middle of it.
        with one_by_one:
            if armed.is_set() and not killed:
                killed.extend(executors(group))
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)
        add(self, stage)

    monkeypatch.setattr(Stages, "add", killing)
    child = subprocess.Popen(
        driver(master, world.location, tmp_path / "ckpt", "0 seconds", 1_000),
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def routed() -> bool:
        assert child.poll() is None, "the query has ended"
        return bool(status(world.location).behind == 0)

    try:
        wait_for(routed)
        wait_for(lambda: len(executors(group)) == 2)
        armed.set()
        world.publish(2_000)
        wait_for(routed)
        assert len(killed) == 2
        # The worker starts others in their place.
        wait_for(lambda: len(set(executors(group)) - set(killed)) == 2)
        world.publish(1_000)
        wait_for(routed)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    assert world.content() == world.naive()
    assert_clean(world.broker)
