"""A cluster of its own: master, worker and two executors, each in its own process.

Its workers share no directory with the driver: they have another working directory and HOME,
and Spark's Python packages, but not Penstock. The code comes to them from a wheel.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

import pyspark
from deltalake import DeltaTable
from tests.objectstore.conftest import PREFIXES, bucket, seaweed
from tests.processes import processes

import penstock
from penstock.clock import SystemClock
from penstock.flight.client import FlightStore
from penstock.flight.snapshots import Snapshots
from penstock.flight.writes import Stages
from penstock.spark.delta import Archive
from penstock.spark.route import status
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.xdist_group("spark")]

# Fixtures of the object storage.
__all__ = ["bucket", "seaweed"]

clock = SystemClock()
ROOT = Path(penstock.__file__).parents[2]
SPARK_HOME = Path(pyspark.__file__).parent
SETTINGS = {
    "spark.log.level": "OFF",
    "spark.executor.memory": "600m",
    "spark.executor.cores": "1",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    "spark.driver.host": "127.0.0.1",
}
ROUTE = """
import sys
from penstock.spark import session
from penstock.spark.route import route
spark = session()
query = route(sys.argv[1], spark=spark, checkpoint=sys.argv[2], trigger=sys.argv[3],
              max_offsets=int(sys.argv[4]))
query.awaitTermination()
"""
PIPELINE = """
import sys
from penstock.spark import pipeline, session
made = pipeline(session(), sys.argv[1]).transform(
    lambda log: log.withColumn("kind", log.attributes["kind"]).repartition(2))
query = made.start(checkpoint=sys.argv[2], trigger=sys.argv[3], max_offsets=int(sys.argv[4]))
query.awaitTermination()
"""
WRITE_AND_READ = """
import json, sys
from penstock.spark import session
spark = session()
rows = spark.range(1000, numPartitions=4).selectExpr("string(id) AS payload", "'books' AS queue")
rows.write.format("penstock").option("server", sys.argv[1]).mode("append").save()
log = spark.read.format("penstock").options(server=sys.argv[1], table="log", columns="offset")

def places(_):
    import os, penstock
    yield penstock.__file__, os.environ["HOME"]

found = spark.sparkContext.parallelize(range(2), 2).mapPartitions(places).collect()
print(json.dumps({"count": log.load().count(), "places": found}))
"""

ARCHIVE = """
import json, sys
from penstock.spark import session
from penstock.spark.jobs import archive
done = archive(session(), sys.argv[1], sys.argv[2])
print(json.dumps({"rows": done.rows, "trimmed": done.trimmed}))
"""

REPORT = """
import json, sys
from penstock.spark import session
from penstock.spark.jobs import report, save_report
told = []
for _ in range(2):
    frames = report(session(), sys.argv[1])
    found = {name: [row.asDict() for row in frame.collect()] for name, frame in frames.items()}
    for row in (row for rows in found.values() for row in rows):
        row.pop("oldest_wait_ms", None)
    told.append(found)
page = save_report(frames, sys.argv[2]).read_text()
done = {row["queue"]: row["done"] for row in told[0]["queues"]}
print(json.dumps({"same": told[0] == told[1], "done": done, "page": "out of stock" in page}))
"""


class Machine:
    """A directory that stands for the machine of a worker: HOME, working directory and Python."""

    def __init__(self, place: Path) -> None:
        self.place = place
        for name in ("home", "work", "site", "archive/bin", "archive/lib"):
            (place / name).mkdir(parents=True)
        for package in Path(pyspark.__file__).parents[1].iterdir():
            # An installation of Penstock is a file *.pth, which is not read here.
            if not package.name.startswith("penstock") and package.suffix != ".pth":
                (place / "site" / package.name).symlink_to(package)
        self.python = self._interpreter(place / "python", str(place / "site"))

    @staticmethod
    def _interpreter(path: Path, packages: str) -> Path:
        path.write_text(
            f'#!/bin/sh\nPYTHONPATH="{packages}:$PYTHONPATH" exec {sys._base_executable} "$@"\n'  # type: ignore[attr-defined]
        )
        path.chmod(0o755)
        return path

    def packed(self) -> Path:
        """Return an archive with an environment that has Penstock.

        As venv-pack would make it, but with links to the packages that are large.
        """
        archive = self.place / "archive"
        self._interpreter(archive / "bin" / "python", '$(dirname "$0")/../lib')
        for package in (self.place / "site").iterdir():
            (archive / "lib" / package.name).symlink_to(package.readlink())
        for name in ("penstock", "pyspark_penstock"):
            shutil.copytree(ROOT / "src" / name, archive / "lib" / name)
        return Path(shutil.make_archive(str(self.place / "environment"), "gztar", archive))

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of a process on this machine."""
        java = Path(shutil.which("java") or f"{os.environ['JAVA_HOME']}/bin/java").parent
        return {
            "PATH": f"{java}:/usr/bin:/bin",
            "HOME": str(self.place / "home"),
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_WORKER_DIR": str(self.place / "work"),
            "SPARK_LOCAL_DIRS": str(self.place / "local"),
            "SPARK_DAEMON_MEMORY": "300m",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            **more,
        }

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a class of Spark."""
        return subprocess.Popen(
            [str(SPARK_HOME / "bin" / "spark-class"), *arguments],
            env=self.environment(),
            cwd=self.place / "work",
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


class Cluster(NamedTuple):
    """A running cluster; its executors are of the group of the worker's process."""

    master: str
    group: int
    machine: Machine
    wheel: Path

    def submit(
        self, program: Path, *arguments: object, packed: Path | None = None
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command and the environment of a driver that brings Penstock along."""
        given = [part for pair in SETTINGS.items() for part in ("--conf", "=".join(pair))]
        if packed is None:
            given += ["--py-files", str(self.wheel)]
            more = {"PYSPARK_PYTHON": str(self.machine.python)}
        else:
            given += ["--archives", f"{packed}#environment"]
            more = {
                "PYSPARK_PYTHON": "./environment/bin/python",
                "PYSPARK_DRIVER_PYTHON": sys.executable,
                "PYTHONPATH": str(ROOT / "src"),
            }
        command = [SPARK_HOME / "bin" / "spark-submit", "--master", self.master, *given]
        return [str(part) for part in (*command, program, *arguments)], self.machine.environment(
            HOME=os.environ["HOME"], **more
        )


@pytest.fixture(scope="module")
def cluster(
    java: None, new_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Give a cluster of two executors."""
    place = tmp_path_factory.mktemp("cluster")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (place / "dist").iterdir()
    port = new_port()
    deploy = "org.apache.spark.deploy"
    here = ["--host", "127.0.0.1"]
    machine = Machine(place / "machine")
    master = ["--port", str(port), "--webui-port", "0"]
    running = [machine.start(f"{deploy}.master.Master", *here, *master)]
    address = f"spark://127.0.0.1:{port}"
    try:
        wait_for(lambda: listens(port))
        sizes = ["--cores", "2", "--memory", "1400m", "--webui-port", "0"]
        running.append(machine.start(f"{deploy}.worker.Worker", *here, *sizes, address))
        yield Cluster(address, running[-1].pid, machine, wheel)
    finally:
        for process in running:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def executors(group: int) -> list[int]:
    """Return the executors of a group of processes."""
    found = []
    for pid, each in processes().items():
        with contextlib.suppress(OSError):
            if "CoarseGrainedExecutorBackend" in each.command and os.getpgid(pid) == group:
                found.append(pid)
    return found


def wait_for(what: Callable[[], bool], seconds: int = 600) -> None:
    deadline_ms = clock.now_ms() + seconds * 1000
    while not what():
        assert clock.now_ms() < deadline_ms, "it did not happen in time"
        threading.Event().wait(0.05)


@pytest.fixture
def route_program(tmp_path: Path) -> Path:
    program = tmp_path / "route.py"
    program.write_text(ROUTE)
    return program


@pytest.mark.soak
def test_routing_on_a_cluster(
    cluster: Cluster, world: Any, route_program: Path, tmp_path: Path
) -> None:
    world.make_queues()
    world.publish(50_000)
    arguments = (world.location, tmp_path / "ckpt", "available now", 20_000)
    command, environment = cluster.submit(route_program, *arguments)
    run = subprocess.run(
        command, env=environment, timeout=600, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2_000:]
    assert status(world.location).behind == 0
    assert world.content() == world.naive()


@pytest.mark.soak
def test_an_environment_that_is_packed(cluster: Cluster, world: Any, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(WRITE_AND_READ)
    packed = cluster.machine.packed()
    command, environment = cluster.submit(program, world.location, packed=packed)
    run = subprocess.run(
        command, env=environment, timeout=600, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2_000:]
    told = json.loads(run.stdout.splitlines()[-1])
    assert told["count"] == 1_000
    for file, home in told["places"]:
        assert Path(file).is_relative_to(cluster.machine.place / "work")
        assert home == str(cluster.machine.place / "home")


def test_an_archive_on_s3_from_workers_that_share_nothing_with_the_driver(
    cluster: Cluster, shop: Any, bucket: str, tmp_path: Path
) -> None:
    place = f"s3://{bucket}/lake/cluster-{next(PREFIXES)}"
    program = tmp_path / "program.py"
    program.write_text(ARCHIVE)
    command, environment = cluster.submit(program, shop.location, place)
    # Of the access to S3 the workers know only what the driver sends them.
    access = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    before = {name: read_table(shop.location, name) for name in ("done", "failed", "attempts")}
    run = subprocess.run(
        command,
        env=environment | access,
        timeout=600,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2_000:]
    told = json.loads(run.stdout.splitlines()[-1])
    assert told["rows"] == {name: len(ids) for name, ids in before.items()}
    assert told["trimmed"] == len(before["done"]) + len(before["failed"])
    for name, ids in before.items():
        table = DeltaTable(f"{place}/{name}", storage_options=Archive.at(place).storage)
        archived = table.to_pyarrow_table(columns=["queue", "message_id"])
        assert sorted(map(tuple, map(dict.values, archived.to_pylist()))) == ids


@pytest.mark.soak
def test_executors_that_are_killed_in_a_report(
    cluster: Cluster, shop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Snapshots.read
    killed: list[int] = []

    def killing(self: Any, name: str, rows: Any, table: Any = None, part: int = 0) -> Any:
        batches = read(self, name, rows, table, part)
        yield from batches
        if not killed and table is not None and table.selection.table == "attempts":
            # A task waits for the end of this answer.
            killed.extend(executors(cluster.group))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(Snapshots, "read", killing)
    program = tmp_path / "program.py"
    program.write_text(REPORT)
    command, environment = cluster.submit(program, shop.location, tmp_path / "report")
    run = subprocess.run(
        command, env=environment, timeout=600, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2_000:]
    assert killed
    done = {queue: shop.broker.stats(queue).done for queue in ("all", "dear")}
    told = json.loads(run.stdout.splitlines()[-1])
    assert told == {"same": True, "done": done, "page": True}
    # The driver writes: workers need not see its directory.
    assert {path.name for path in (tmp_path / "report").iterdir()} >= {"groups.parquet"}


def read_table(location: str, name: str) -> list[tuple[Any, ...]]:
    """Return queue and message id of each row of a table."""
    found = FlightStore(location).read_table(name, columns=["queue", "message_id"])
    return sorted(map(tuple, map(dict.values, found.to_pylist())))


@pytest.mark.parametrize(
    "code",
    [pytest.param(ROUTE, id="route"), pytest.param(PIPELINE, id="own", marks=pytest.mark.soak)],
)
def test_executors_that_are_killed(
    cluster: Cluster, world: Any, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text(code)
    group = cluster.group
    world.make_queues()
    world.publish(1_000)
    add = Stages.add
    killed: list[int] = []
    armed = threading.Event()
    one_by_one = threading.Lock()

    def killing(self: Any, stage: Any) -> None:
        # A task waits for this answer: whichever of them has it dies in the middle of it.
        with one_by_one:
            if armed.is_set() and stage.rows and not killed:
                killed.extend(executors(group))
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)
        add(self, stage)

    monkeypatch.setattr(Stages, "add", killing)
    arguments = (world.location, tmp_path / "ckpt", "0 seconds", 1_000)
    command, environment = cluster.submit(program, *arguments)
    said = tmp_path / "output"
    with said.open("wb") as output:
        child = subprocess.Popen(
            command,
            env=environment,
            start_new_session=True,
            stdout=output,
            stderr=output,
        )

    def routed() -> bool:
        assert child.poll() is None, said.read_text()[-2_000:]
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
