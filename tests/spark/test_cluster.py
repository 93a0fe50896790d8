"""Routing on a cluster of its own: a master and two workers, each in its own process."""

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
from penstock.spark.route import status

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.xdist_group("spark")]

SOURCE = str(Path(penstock.__file__).parents[1])
ROUTE = """
import sys
from penstock.spark import session
from penstock.spark.route import route
spark = session(sys.argv[3], conf={"spark.log.level": "OFF", "spark.executor.memory": "600m",
                                   "spark.driver.host": "127.0.0.1",
                                   "spark.executorEnv.PYTHONPATH": sys.argv[4]})
assert spark.sparkContext.master == sys.argv[3]
query = route(sys.argv[1], spark=spark, checkpoint=sys.argv[2], trigger="available now",
              max_offsets=20_000)
query.awaitTermination()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def spark_class(place: Path, *arguments: str) -> subprocess.Popen[bytes]:
    home = Path(pyspark.__file__).parent
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_WORKER_DIR": str(place / "work"),
        "SPARK_LOCAL_DIRS": str(place / "local"),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_DAEMON_MEMORY": "300m",
    }
    return subprocess.Popen(
        [str(home / "bin" / "spark-class"), *arguments],
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.fixture
def master(java: None, tmp_path: Path) -> Iterator[str]:
    """Give the address of a cluster with two workers."""
    port = free_port()
    deploy = "org.apache.spark.deploy"
    here = ["--host", "127.0.0.1"]
    place = tmp_path / "cluster"
    running = [
        spark_class(
            place, f"{deploy}.master.Master", *here, "--port", str(port), "--webui-port", "0"
        )
    ]
    address = f"spark://127.0.0.1:{port}"
    for _ in range(100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        threading.Event().wait(0.2)
    sizes = ["--cores", "1", "--memory", "700m", "--webui-port", "0"]
    running += [
        spark_class(place, f"{deploy}.worker.Worker", *here, *sizes, address) for _ in range(2)
    ]
    yield address
    for process in running:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_routing_on_a_cluster(master: str, world: Any, tmp_path: Path) -> None:
    world.make_queues()
    world.publish(50_000)
    run = subprocess.run(
        [sys.executable, "-c", ROUTE, world.location, str(tmp_path / "ckpt"), master, SOURCE],
        timeout=180,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
    )
    assert run.returncode == 0, run.stderr[-2_000:]
    assert status(world.location).behind == 0
    assert world.content() == world.naive()
