"""The network between Spark and the broker fails; nothing is lost, nothing comes twice."""

from __future__ import annotations

import contextlib
import os
import pickle
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
import pyarrow.flight as fl

import penstock
from penstock import limits
from penstock.clock import SystemClock
from penstock.errors import ServerUnreachable
from penstock.flight import client as flight_client
from penstock.flight import location as places
from penstock.flight import tables as reading
from penstock.flight.client import FlightStore
from penstock.flight.location import Location, locate
from penstock.flight.protocol import Published
from penstock.spark.route import dropped_on_failure, route, status
from penstock.spark.writer import drop_spools
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from penstock.clock import Waitable

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.xdist_group("spark")]

SECONDS = 300
CUTS = 2
AWAY_MS = 1_000
SOURCE = str(Path(penstock.__file__).parents[1])
clock = SystemClock()


class Link:
    """One connection through the proxy, and its two pumps."""

    def __init__(self, proxy: Proxy, near: socket.socket, far: socket.socket) -> None:
        self.proxy, self.ends, self.silent = proxy, (near, far), False
        self.carried, self.most = 0, 1 << 40
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=self.pump, args=(source, target), daemon=True).start()

    def pump(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65_536):
                self.proxy.flowing.wait()
                if source is self.ends[1]:
                    self.carried += len(data)
                    self.silent = self.silent or self.carried > self.most
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

    def __init__(self, target: int, port: int) -> None:
        self.target, self.port = target, port
        self.links: list[Link] = []
        self.flowing = threading.Event()
        self.flowing.set()
        self.listener: socket.socket | None = None
        self.listen()
        self.location = f"grpc://127.0.0.1:{self.port}"

    def listen(self) -> None:
        """Take connections."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(100)
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
def proxied(new_port: Callable[[], int]) -> Iterator[Callable[[int], Proxy]]:
    """Give a way to put a proxy before a port."""
    made: list[Proxy] = []

    def make(port: int) -> Proxy:
        made.append(Proxy(port, new_port()))
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
        assert world.broker._store.by_name[name].counts.next_claim == len(ids)
    assert_clean(world.broker)


def batches(query: StreamingQuery) -> int:
    """Return how many micro-batches a query has ended."""
    last = query.lastProgress
    return 0 if last is None else last.batchId + 1


def cut_often(
    proxy: Proxy, query: StreamingQuery, meanwhile: Callable[[], object] = lambda: None
) -> None:
    """Cut where a query is at work: it has ended a micro-batch, and has more to do."""

    def cut() -> None:
        before = batches(query)
        meanwhile()
        wait_for(lambda: not query.isActive or batches(query) > before)
        proxy.cut()
        meanwhile()
        pause(AWAY_MS)
        proxy.listen()

    for _ in range(CUTS):
        cut()


# --- cut ------------------------------------------------------------------------------------------


def test_the_route_job_goes_on_after_cuts(
    spark: SparkSession, world: Any, proxied: Callable[[int], Proxy], tmp_path: Path
) -> None:
    proxy = proxied(world.port)
    query = route(proxy.location, spark=spark, checkpoint=tmp_path / "ckpt", max_offsets=400)
    cut_often(proxy, query, lambda: world.publish(1_000))
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
    cut_often(proxy, query)
    before = batches(query)
    settled(query, lambda: batches(query) > before + 1)
    found: list[Any] = []
    while page := world.broker.read_log(0, begin=found[-1][0] + 1 if found else 0).records:
        found += [(record.message_id, record.attributes["n"]) for record in page]
    numbers = sorted(n for _, n in found)
    assert len(set(numbers)) == len(numbers)
    # The last micro-batch may have been stopped when only one of its tasks had published.
    whole = 300 * batches(query)
    assert whole > 300 * CUTS
    assert numbers[:whole] == list(range(whole))
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
    cut_often(proxy, query, lambda: world.publish(1_000))
    settled(query, lambda: spark.table("copied").count() >= len(world.published))
    offsets = sorted(row["offset"] for row in spark.table("copied").collect())
    assert offsets == sorted(world.published)


def test_a_call_that_a_closing_server_cancels_is_made_again(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = world.broker.log_stats
    cancelled: list[str] = []

    def closing() -> Any:
        if not cancelled:
            cancelled.append("once")
            raise fl.FlightCancelledError("the server closes")
        return ask()

    monkeypatch.setattr(world.broker, "log_stats", closing)
    assert FlightStore(world.location).log_stats() == ask()
    assert cancelled


# --- silence --------------------------------------------------------------------------------------


def test_no_call_waits_for_a_silent_server_for_ever(
    world: Any, proxied: Callable[[int], Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MAX_CALL_MS", "MAX_WORK_CALL_MS", "MAX_BULK_CALL_MS", "MAX_READ_IDLE_MS"):
        monkeypatch.setattr(limits, name, 400)
    # As long as anybody answers, a slow machine gets as many tries as it needs.
    monkeypatch.setattr(limits, "MAX_UNREACHABLE_MS", 60_000)
    monkeypatch.setattr(flight_client, "BACKOFF_MS", (100,))
    # How long a handshake that may explain the silence takes.
    monkeypatch.setattr(places, "TURN_SECONDS", 0.4)
    world.publish(20)
    proxy = proxied(world.port)
    store = FlightStore(proxy.location)
    row = pa.record_batch([pa.array([b"x"]), pa.array(["once"])], names=["payload", "dedup_id"])
    calls: dict[str, Callable[[], object]] = {
        "ask": store.info,
        "work": lambda: store.commit_stages([]),
        "bulk": store.sweep,
        "plan": lambda: store.plan_read("queues"),
        "schema": lambda: store.schema("log"),
        "read": lambda: list(store.read_log(0, 1, 21, columns=("offset",))),
        "stage": lambda: store.stage("s", [], log=0, begin=1, end=2),
        "publish": lambda: store.publish([row], again=True),
    }
    # A new connection is as good as ever: who may ask again gets an answer.
    for call in calls.values():
        store.info()
        proxy.silence()
        call()
    assert store.publish([row], again=True) == Published(1, 1)
    store.info()
    # And where every connection is silent, each of them says so, and where.
    monkeypatch.setattr(limits, "MAX_UNREACHABLE_MS", 600)
    proxy.flowing.clear()
    for name, call in calls.items():
        started_ms = clock.now_ms()
        with pytest.raises(ServerUnreachable, match=proxy.location):
            call()
        assert clock.now_ms() - started_ms < 120_000, name
    with pytest.raises(ServerUnreachable):
        store.publish([row])


def test_a_read_that_falls_silent_half_way(
    world: Any, proxied: Callable[[int], Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BATCH_ROWS", 1_000)
    monkeypatch.setattr(flight_client, "BACKOFF_MS", (100,))
    monkeypatch.setattr(limits, "MAX_UNREACHABLE_MS", 60_000)
    for _ in range(10):
        world.publish(1_000)
    proxy = proxied(world.port)
    columns = ("offset", "attributes_json")
    # A reader that takes its time is not silent.
    monkeypatch.setattr(limits, "MAX_READ_IDLE_MS", 1_500)
    monkeypatch.setattr(limits, "MAX_CALL_MS", 1_500)
    slow = FlightStore(proxy.location).read_log(0, 1, 10_001, columns=columns)
    count = next(slow).num_rows
    pause(1_800)
    assert count + sum(batch.num_rows for batch in slow) == 10_000
    before = len(proxy.links)
    (link,) = proxy.links[-1:]
    link.most = link.carried + link.carried // (2 * before)
    found = FlightStore(proxy.location).read_log(0, 1, 10_001, columns=columns)
    offsets = [offset for batch in found for offset in batch.column("offset").to_pylist()]
    assert offsets == list(range(1, 10_001))
    assert link.silent
    assert len(proxy.links) > before


class Leap(penstock.ManualClock):
    """Does not wait: it is later at once."""

    def wait(self, condition: Waitable, timeout_ms: int | None) -> None:
        self.advance(timeout_ms or 0)


def test_a_place_where_nobody_is(monkeypatch: pytest.MonkeyPatch) -> None:
    leap = Leap()
    monkeypatch.setattr(flight_client, "_clock", leap)
    started_ms = leap.now_ms()
    with socket.socket() as bound:
        # Nobody else gets this port, and nobody listens at it.
        bound.bind(("127.0.0.1", 0))
        location = f"grpc://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(ServerUnreachable, match=f"no broker answers at {location}") as caught:
            FlightStore(location).info()
        assert isinstance(caught.value, ConnectionError)
        assert 5_000 < leap.now_ms() - started_ms < 16_000

        def waited_ms(place: Location) -> int:
            before_ms = leap.now_ms()
            with pytest.raises(ServerUnreachable):
                FlightStore(place).info()
            return leap.now_ms() - before_ms

        # One that was never reached is told soon, however long a broker that was there is waited
        # for; who was sent the place need not have been there himself.
        place = locate(location, retry_ms=120_000)
        assert waited_ms(place) < 16_000
        assert waited_ms(locate(location, retry_ms=2_000)) < 2_500
        for known in (pickle.loads(pickle.dumps(place)), locate(pickle.loads(pickle.dumps(place)))):
            assert 110_000 < waited_ms(known) < 130_000
        monkeypatch.setattr(places, "reached", {location})
        assert 110_000 < waited_ms(place) < 130_000
        # Whoever has waited for a broker in vain does not wait as long again to tidy up.
        before_ms = leap.now_ms()
        with contextlib.suppress(ServerUnreachable), dropped_on_failure(FlightStore(place)):
            raise ServerUnreachable(location)
        drop_spools(FlightStore(place), ["w"])
        assert leap.now_ms() - before_ms < 32_000


def test_a_broker_that_is_away_is_waited_for_as_long_as_told(
    spark: SparkSession,
    world: Any,
    proxied: Callable[[int], Proxy],
    tmp_path: Path,
    as_patient_as_told: None,
) -> None:
    proxy = proxied(world.port)

    def start(retry_for: str) -> list[StreamingQuery]:
        given = {"server": proxy.location, "retryFor": retry_for}
        place = tmp_path / "ckpt"
        log = spark.readStream.format("penstock").options(
            **given, table="log", columns="offset", startingOffsets="earliest"
        )
        copying = log.load().writeStream.format("parquet").option("path", str(tmp_path / "copied"))
        rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 20).load()
        made = rows.selectExpr("string(value) AS payload", "struct(value AS number) AS attributes")
        writing = made.writeStream.format("penstock").options(**given)
        return [
            route(proxy.location, spark=spark, checkpoint=place / "route", retry_for=retry_for),
            copying.option("checkpointLocation", str(place / "log")).start(),
            writing.option("checkpointLocation", str(place / "made")).start(),
        ]

    def under_way(queries: list[StreamingQuery]) -> None:
        before = [batches(query) for query in queries]
        world.publish(100)
        wait_for(lambda: all(batches(q) > n for q, n in zip(queries, before, strict=True)))
        proxy.cut()

    brief = start("1s")
    under_way(brief)
    wait_for(lambda: not any(query.isActive for query in brief))
    assert all("no broker answers at grpc" in str(query.exception()) for query in brief)
    proxy.listen()
    long = start("2m")
    under_way(long)
    pause(3_000)
    proxy.listen()
    world.publish(100)
    before = [batches(query) for query in long]
    wait_for(lambda: all(batches(query) > n for query, n in zip(long, before, strict=True)))
    # Whoever writes is stopped first, so that the others come to an end.
    routing, log, writing = long
    writing.stop()
    log.processAllAvailable()
    wait_for(lambda: status(world.location).behind == 0)
    assert [query.exception() for query in long] == [None] * 3
    routing.stop()
    log.stop()
    records: list[Any] = []
    while page := world.broker.read_log(0, begin=records[-1].message_id + 1 if records else 0):
        if not page.records:
            break
        records += page.records
    numbers = sorted(r.attributes["number"] for r in records if "number" in r.attributes)
    assert len(set(numbers)) == len(numbers)
    assert numbers[: 20 * batches(writing)] == list(range(20 * batches(writing)))
    copied = sorted(row["offset"] for row in spark.read.parquet(str(tmp_path / "copied")).collect())
    assert copied == [record.message_id for record in records]
    audit(world)


# The bounds that a streaming query has by default would make a long test of it.
PATIENCE = """
from penstock import limits
limits.MAX_CALL_MS = limits.MAX_WORK_CALL_MS = limits.MAX_READ_IDLE_MS = 3_000
limits.MAX_UNREACHABLE_MS = 60_000
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
