"""The network between Spark and the broker fails; nothing is lost, nothing comes twice."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

import pyarrow as pa

import penstock
from penstock import limits
from penstock.clock import SystemClock
from penstock.errors import ServerUnreachable
from penstock.flight_client import FlightStore, Published
from penstock.spark.route import route, status
from penstock.spark.stores import Store
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.xdist_group("spark")]

SECONDS = 120
CUTS = 3
AWAY_MS = 1_500
SOURCE = str(Path(penstock.__file__).parents[1])
clock = SystemClock()


class Link:
    """One connection through the proxy, and its two pumps."""

    def __init__(self, proxy: Proxy, near: socket.socket, far: socket.socket) -> None:
        self.proxy, self.ends, self.silent = proxy, (near, far), False
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=self.pump, args=(source, target), daemon=True).start()

    def pump(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65_536):
                self.proxy.flowing.wait()
                if not self.silent:
                    target.sendall(data)
        except OSError:
            pass
        if not self.silent:
            self.close()

    def close(self) -> None:
        for end in self.ends:
            try:
                # A reset, as a cable that is pulled gives in the end: no polite goodbye.
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            end.close()


class Proxy:
    """Stands between Spark and a server on this machine, and misbehaves when told."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.links: list[Link] = []
        self.flowing = threading.Event()
        self.flowing.set()
        self.listener: socket.socket | None = None
        self.port = 0
        self.listen()
        self.location = f"grpc://127.0.0.1:{self.port}"

    def listen(self) -> None:
        """Take connections, at the port of the last time if there was one."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(100)
        self.port = listener.getsockname()[1]
        self.listener = listener
        threading.Thread(target=self.accept, args=(listener,), daemon=True).start()

    def accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                near.close()
                continue
            self.links.append(Link(self, near, far))

    def cut(self) -> None:
        """Break every connection and refuse new ones, until ``listen``."""
        if self.listener is not None:
            with contextlib.suppress(OSError):
                # Only this wakes a thread that waits in accept.
                self.listener.shutdown(socket.SHUT_RDWR)
            self.listener.close()
            self.listener = None
        for link in self.links:
            link.close()
        self.links.clear()

    def silence(self) -> None:
        """Let nothing through the connections of now any more; new ones are well."""
        for link in self.links:
            link.silent = True

    def close(self) -> None:
        self.flowing.set()
        self.cut()


@pytest.fixture
def proxied() -> Iterator[Callable[[int], Proxy]]:
    """Give a way to put a proxy before a port."""
    made: list[Proxy] = []

    def make(port: int) -> Proxy:
        made.append(Proxy(port))
        return made[-1]

    yield make
    for proxy in made:
        proxy.close()


@pytest.fixture
def world(make_world: Callable[..., Any], tmp_path: Path) -> Any:
    """Give a broker of the bucket design, whose claim numbers show every double assignment."""
    url = f"rocksdb:{tmp_path / 'store0'}?design=buckets"
    penstock.open(url, routing="pipeline", background=False).close()
    world = make_world()
    world.make_queues()
    return world


def pause(ms: int) -> None:
    threading.Event().wait(ms / 1000)


def wait_for(what: Callable[[], bool], seconds: int = SECONDS) -> None:
    deadline_ms = clock.now_ms() + seconds * 1000
    while not what():
        assert clock.now_ms() < deadline_ms, "it did not happen in time"
        pause(50)


def settled(query: StreamingQuery, what: Callable[[], bool]) -> None:
    """Wait for something that a running query does, then stop it."""
    wait_for(lambda: not query.isActive or what())
    assert query.exception() is None
    query.stop()


def audit(world: Any) -> None:
    """Compare every queue with what its filter selects, and look at every record."""
    content = world.content()
    assert content == world.naive()
    for name, ids in content.items():
        assert world.broker._store.core.queues[name].counts.next_claim == len(ids)
    assert_clean(world.broker)


def cut_often(proxy: Proxy, meanwhile: Callable[[], object]) -> None:
    for _ in range(CUTS):
        meanwhile()
        pause(500)
        proxy.cut()
        meanwhile()
        pause(AWAY_MS)
        proxy.listen()
        pause(300)


# --- cut ------------------------------------------------------------------------------------------


def test_the_route_job_goes_on_after_cuts(
    spark: SparkSession, world: Any, proxied: Callable[[int], Proxy], tmp_path: Path
) -> None:
    proxy = proxied(world.port)
    query = route(proxy.location, spark=spark, checkpoint=tmp_path / "ckpt", max_offsets=400)
    cut_often(proxy, lambda: world.publish(1_200))
    settled(query, lambda: status(world.location).behind == 0)
    audit(world)


def test_a_stream_that_publishes_goes_on_after_cuts(
    spark: SparkSession, world: Any, proxied: Callable[[int], Proxy], tmp_path: Path
) -> None:
    proxy = proxied(world.port)
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 300).load()
    writer = rows.selectExpr("string(value) AS payload", "struct(value AS n) AS attributes")
    query = (
        writer.writeStream.format("penstock")
        .option("location", proxy.location)
        .option("checkpointLocation", str(tmp_path / "ckpt"))
        .start()
    )
    wait_for(lambda: world.broker.log_stats().end > 1)
    cut_often(proxy, lambda: None)
    before = world.broker.log_stats().end
    settled(query, lambda: world.broker.log_stats().end > before + 600)
    found: list[Any] = []
    while page := world.broker.read_log(0, begin=found[-1][0] + 1 if found else 0).records:
        found += [(record.message_id, record.attributes["n"]) for record in page]
    assert sorted(n for _, n in found) == list(range(len(found)))
    assert_clean(world.broker)


def test_a_stream_that_reads_the_log_goes_on_after_cuts(
    spark: SparkSession, world: Any, proxied: Callable[[int], Proxy], tmp_path: Path
) -> None:
    proxy = proxied(world.port)
    log = spark.readStream.format("penstock").options(
        location=proxy.location, table="log", startingOffsets="earliest", maxOffsetsPerTrigger="500"
    )
    query = (
        log.load()
        .select("offset")
        .writeStream.format("memory")
        .queryName("copied")
        .option("checkpointLocation", str(tmp_path / "ckpt"))
        .start()
    )
    cut_often(proxy, lambda: world.publish(1_000))
    settled(query, lambda: spark.table("copied").count() >= len(world.published))
    offsets = sorted(row["offset"] for row in spark.table("copied").collect())
    assert offsets == sorted(world.published)


# --- silence --------------------------------------------------------------------------------------


def test_no_call_waits_for_a_silent_server_for_ever(
    world: Any, proxied: Callable[[int], Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MAX_CALL_MS", "MAX_WORK_CALL_MS", "MAX_BULK_CALL_MS", "MAX_READ_IDLE_MS"):
        monkeypatch.setattr(limits, name, 400)
    monkeypatch.setattr(limits, "MAX_UNREACHABLE_MS", 600)
    world.publish(20)
    proxy = proxied(world.port)
    store = Store(proxy.location)
    row = pa.record_batch([pa.array([b"x"]), pa.array(["once"])], names=["payload", "dedup_id"])
    calls: dict[str, Callable[[], object]] = {
        "ask": store.info,
        "work": lambda: store.commit_stages([]),
        "bulk": store.sweep,
        "plan": lambda: store.plan_read("queues"),
        "schema": lambda: store.schema("log"),
        "read": lambda: list(store.read_log(0, 1, 21, columns=("offset",))),
        "stage": lambda: store.stage("s", [], log=0, begin=1, end=2),
        "publish": lambda: store.publish([row], row.schema, again=True),
    }
    # A new connection is as good as ever: who may ask again gets an answer.
    for call in calls.values():
        store.info()
        proxy.silence()
        call()
    assert store.publish([row], row.schema, again=True) == Published(1, 1)
    store.info()
    # And where every connection is silent, each of them says so, and where.
    proxy.flowing.clear()
    for name, call in calls.items():
        started_ms = clock.now_ms()
        with pytest.raises(ServerUnreachable, match=proxy.location):
            call()
        assert clock.now_ms() - started_ms < 20_000, name
    with pytest.raises(ServerUnreachable):
        store.publish([row], row.schema)


def test_a_read_that_falls_silent_half_way(
    world: Any, proxied: Callable[[int], Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_READ_IDLE_MS", 1_500)
    world.publish(60_000)
    proxy = proxied(world.port)
    columns = ("offset", "attributes_json")
    batches = Store(proxy.location).read_log(0, 1, 60_001, columns=columns)
    offsets = next(batches).column("offset").to_pylist()
    proxy.silence()
    for batch in batches:
        offsets += batch.column("offset").to_pylist()
    assert offsets == list(range(1, 60_001))
    assert len(proxy.links) > 1, "it all came at once"
    # A reader that takes its time is not silent.
    slow = Store(proxy.location).read_log(0, 1, 60_001, columns=columns)
    count = next(slow).num_rows
    pause(1_800)
    assert count + sum(batch.num_rows for batch in slow) == 60_000


def test_a_place_where_nobody_is() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        location = f"grpc://127.0.0.1:{probe.getsockname()[1]}"
    started_ms = clock.now_ms()
    with pytest.raises(ServerUnreachable, match=f"no broker answers at {location}") as caught:
        FlightStore(location).info()
    assert isinstance(caught.value, ConnectionError)
    assert 5_000 < clock.now_ms() - started_ms < 16_000


# The bounds that a streaming query has by default would make a long test of it.
PATIENCE = """
from penstock import limits
limits.MAX_CALL_MS = limits.MAX_WORK_CALL_MS = limits.MAX_READ_IDLE_MS = 1_500
"""
CHILD = """
import sys
from penstock.spark import session
from penstock.spark.route import route
spark = session("local[2,4]", conf={"spark.log.level": "OFF"})
route(sys.argv[1], spark=spark, checkpoint=sys.argv[2], max_offsets=400).awaitTermination()
"""


@pytest.mark.soak
def test_a_query_over_connections_that_fall_silent(
    java: None, world: Any, proxied: Callable[[int], Proxy], tmp_path: Path
) -> None:
    proxy = proxied(world.port)
    # Read by every Python that Spark starts.
    (tmp_path / "sitecustomize.py").write_text(PATIENCE)
    world.publish(1_000)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, proxy.location, str(tmp_path / "ckpt")],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{SOURCE}"},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def routed() -> bool:
        assert child.poll() is None, "the query has ended"
        return status(world.location).behind == 0

    try:
        wait_for(routed, 2 * SECONDS)
        for _ in range(2):
            world.publish(1_500)
            pause(200)
            proxy.silence()
            world.publish(500)
            wait_for(routed)
        # All stands still for a while, then goes on as if nothing had been.
        proxy.flowing.clear()
        world.publish(500)
        pause(1_000)
        proxy.flowing.set()
        wait_for(routed)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    audit(world)
