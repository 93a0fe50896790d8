"""The metrics of a server: counters that only go up, ages, waits, and the names of series."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.config import Config as BotoConfig
from tests.server.test_operations import at, series, watching
from tests.test_committer import refuse_syncs

import penstock
from penstock import ManualClock, Message, StorageFailed, SystemClock, Worker
from penstock.server import running
from penstock.server.metrics import OTHERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.server.metrics import Metrics

UNITS = {"seconds", "bytes", "total", "info", "max", "fds"}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def broker(clock: ManualClock) -> Iterator[penstock.Broker]:
    with penstock.open("memory:", clock=clock, background=False) as opened:
        yield opened


def fill(broker: Any, queue: str, count: int) -> None:
    broker.publish([Message(b"x", {"queue": queue})] * count)


def drain(broker: Any, queue: str) -> None:
    while deliveries := broker.claim(queue, limit=100):
        broker.ack([each.receipt for each in deliveries])


class Watched:
    """The page of a broker, compared with the one before."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.page: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}

    def look(self) -> None:
        """Read the page anew; no counter may have gone down, nor that of a queue be gone."""
        self._metrics.read_store()
        before, self.page = self.page, series(self._metrics.page())
        present = {dict(labels).get("queue") for _, labels in self.page}
        for (name, labels), value in before.items():
            is_counter = name.startswith("penstock_") and name.endswith(
                ("_total", "_count", "_bucket", "_sum")
            )
            if is_counter and dict(labels).get("queue") in present:
                assert self.page[name, labels] >= value, (name, labels)

    def total(self, name: str, queue: str) -> float:
        return self.page[f"penstock_queue_{name}_total", frozenset({("queue", queue)})]


# --- counters of queues ---------------------------------------------------------------------------


def test_no_counter_goes_down_whatever_becomes_of_queues(broker: penstock.Broker) -> None:
    for name, count in [("a", 30), ("b", 20), ("c", 10), ("d", 0)]:
        broker.create_queue(name)
        fill(broker, name, count)
    watched = Watched(watching(broker, queues=2))
    watched.look()
    # What other queues had done before the first look is not known to belong to this process.
    assert watched.total("enqueued", OTHERS) == 0
    for name in ("a", "c"):
        drain(broker, name)
        watched.look()
    assert (watched.total("acked", "a"), watched.total("acked", OTHERS)) == (30, 10)
    # Deeper than those that have series: they keep theirs.
    fill(broker, "d", 100)
    watched.look()
    assert (watched.total("enqueued", OTHERS), watched.total("enqueued", "b")) == (100, 20)
    broker.delete_queue("d")
    watched.look()
    broker.create_queue("d")
    fill(broker, "d", 5)
    watched.look()
    assert watched.total("enqueued", OTHERS) == 105
    broker.delete_queue("b")
    fill(broker, "d", 1)
    watched.look()
    # The deepest of the others has got the place; what it did before stays with the others.
    assert (watched.total("enqueued", "d"), watched.total("enqueued", OTHERS)) == (6, 105)
    broker.delete_queue("c")
    broker.create_queue("late")
    fill(broker, "late", 7)
    watched.look()
    assert watched.total("enqueued", OTHERS) == 112


def test_a_queue_that_was_made_again_within_one_look(broker: penstock.Broker) -> None:
    watched = Watched(watching(broker, queues=0))
    broker.create_queue("q")
    watched.look()
    fill(broker, "q", 10)
    watched.look()
    broker.delete_queue("q")
    broker.create_queue("q")
    fill(broker, "q", 3)
    watched.look()
    assert watched.total("enqueued", OTHERS) == 13


def test_the_others_stay_when_there_are_none(broker: penstock.Broker) -> None:
    watched = Watched(watching(broker, queues=1))
    watched.look()
    for name in ("a", "b"):
        broker.create_queue(name)
        fill(broker, name, 3)
    watched.look()
    broker.delete_queue("a")
    broker.delete_queue("b")
    watched.look()
    assert watched.total("enqueued", OTHERS) == 3


def test_waits_of_claims_by_queue(broker: penstock.Broker) -> None:
    metrics = watching(broker, queues=1)
    watched = Watched(metrics)
    for name in ("a", "b"):
        broker.create_queue(name)
    metrics.queues.note_claimed("a", 5_000)
    metrics.queues.note_claimed("b", 20)
    watched.look()
    metrics.queues.note_claimed("b", 0)
    watched.look()
    page = metrics.page()
    name = "penstock_queue_wait_seconds"
    assert at(page, f"{name}_sum", queue="a") == 5
    assert at(page, f"{name}_bucket", queue="a", le="1.0") == 0
    assert at(page, f"{name}_count", queue=OTHERS) == 2
    broker.delete_queue("a")
    watched.look()
    metrics.queues.note_claimed("b", 0)
    assert at(metrics.page(), f"{name}_count", queue="b") == 1


# --- ages -----------------------------------------------------------------------------------------


def test_ages_of_delayed_and_stuck_messages(broker: penstock.Broker, clock: ManualClock) -> None:
    broker.create_queue("q", lease_ms=60_000)
    metrics = watching(broker)

    def ages() -> tuple[float, float]:
        metrics.read_store()
        page = metrics.page()
        return (
            at(page, "penstock_queue_oldest_seconds", queue="q"),
            at(page, "penstock_queue_oldest_in_flight_seconds", queue="q"),
        )

    broker.publish([Message(b"x", {"queue": "q"}, delay_ms=86_400_000)])
    clock.advance(3_600_000)
    assert ages() == (0, 0)
    broker.send("q", b"y")
    (stuck,) = broker.claim("q")
    for _ in range(100):
        clock.advance(50_000)
        broker.extend([stuck.receipt], lease_ms=60_000)
    assert ages() == (0, 5_000)
    broker.ack([stuck.receipt])
    clock.advance(86_400_000 - 3_600_000 - 5_000_000 + 7_000)
    assert ages() == (7, 0)


# --- the store ------------------------------------------------------------------------------------


def test_calls_that_wait_for_the_store_are_counted(broker: penstock.Broker) -> None:
    metrics = watching(broker)
    assert at(metrics.page(), "penstock_store_lock_wait_seconds_count") == 0
    inside, go_on = threading.Event(), threading.Event()

    def stay(_: int) -> bool:
        inside.set()
        return go_on.wait(60)

    holder = threading.Thread(target=lambda: broker._look(stay))
    waiter = threading.Thread(target=broker.queues)
    holder.start()
    assert inside.wait(60)
    waiter.start()
    waiter.join(0.1)
    go_on.set()
    for thread in (holder, waiter):
        thread.join(60)
    assert at(metrics.page(), "penstock_store_lock_wait_seconds_count") == 1


def test_syncs_that_fail_are_timed_too(tmp_path: Path) -> None:
    broker = penstock.open(f"rocksdb:{tmp_path}/store", background=False)
    broker.create_queue("q")
    before = broker.durability()
    refuse_syncs(broker)
    with pytest.raises(StorageFailed):
        broker.send("q", b"x")
    after = broker.durability()
    assert (before.syncs, before.times.count) == (1, 1)
    assert (after.syncs, after.times.count) == (1, 2)
    with pytest.raises(StorageFailed):
        broker.close()


def test_the_disk_of_rocksdb_by_table(tmp_path: Path) -> None:
    with penstock.open(f"rocksdb:{tmp_path}/store") as broker:
        broker.create_queue("q")
        fill(broker, "q", 100)
        page = watching(broker).page()
        assert at(page, "penstock_store_used_bytes", table="wal") > 0
        assert at(page, "penstock_store_used_bytes", table="log") >= 0
        assert at(page, "penstock_store_free_bytes") > 0


# --- a process ------------------------------------------------------------------------------------


def test_a_server_process(serve: Callable[..., Any], wait_until: Any, tmp_path: Path) -> None:
    backups = tmp_path / "backups"
    server = serve("--backup-directory", str(backups), native=True)
    url = f"penstock://127.0.0.1:{server.ports['native']}"

    def page() -> bytes:
        body: bytes = server.ask("GET", "/metrics").body
        return body

    wait_until(lambda: b"penstock_last_backup_timestamp_seconds 0.0" in page())
    with penstock.connect(url) as client:
        client.create_queue("q")
        clock, begin = SystemClock(), SystemClock().seconds()
        assert client.claim("q", wait_ms=300) == []
        sqs = boto3.client(
            "sqs",
            endpoint_url=f"http://127.0.0.1:{server.ports['http']}",
            region_name="us-east-1",
            aws_access_key_id="x",
            aws_secret_access_key="x",
            config=BotoConfig(retries={"max_attempts": 0}),
        )
        queue_url = sqs.get_queue_url(QueueName="q")["QueueUrl"]
        sqs.receive_message(QueueUrl=queue_url, WaitTimeSeconds=1)
        took = clock.seconds() - begin
        now = page()
        waited = worked = 0.0
        for protocol, operation in (("native", "Claim"), ("sqs", "ReceiveMessage")):
            waited += at(now, "penstock_claim_wait_seconds_sum", protocol=protocol)
            labels = {"protocol": protocol, "operation": operation, "outcome": "ok"}
            worked += at(now, "penstock_request_seconds_sum", **labels)
        assert waited > 1.2
        # Were the waits part of the work too, both together would be more than there was.
        assert waited + worked <= took
        client.send("q", b"x")
        with Worker(url, "q", lambda _: None):
            wait_until(lambda: at(page(), "penstock_queue_consumers", queue="q") == 1)
            wait_until(lambda: at(page(), "penstock_queue_wait_seconds_count", queue="q") == 1)
        client.backup("first")
        assert at(page(), "penstock_last_backup_timestamp_seconds") > 1e9
    assert at(page(), "penstock_role", role="owner") == 1
    assert at(page(), "penstock_role", role="standby") == 0
    version = frozenset({"version": penstock.__version__}.items())
    infos = [labels for name, labels in series(page()) if name == "penstock_build_info"]
    assert infos[0] >= version
    assert at(page(), "process_resident_memory_bytes") > 1e6
    wait_until(lambda: at(page(), "penstock_event_loop_lag_seconds_count") > 0)
    assert_conventions(page().decode())
    server.stop()
    # One that is started again knows the backup by its directory.
    server = serve("--backup-directory", str(backups))
    wait_until(lambda: b"penstock_last_backup_timestamp_seconds 1." in page())


def assert_conventions(text: str) -> None:
    """Hold a page to what ``promtool check metrics`` asks for."""
    helps = dict(re.findall(r"^# HELP (\w+) (.+)$", text, re.MULTILINE))
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    assert kinds.keys() == helps.keys()
    for name, kind in kinds.items():
        assert re.fullmatch(r"(penstock|process)_[a-z_]+", name)
        assert name.endswith("_total") == (kind == "counter"), name
        assert not name.endswith(("_count", "_sum", "_bucket")), name
        assert not re.search(r"_(ms|milliseconds|minutes|hours|kilobytes|percent)(_|$)", name)
        if kind == "histogram":
            assert name.endswith("_seconds"), name
    labels = set(re.findall(r"[{,](\w+)=\"", text))
    assert labels.isdisjoint({"instance", "job", "type"})


def test_what_a_subscription_and_a_claim_that_waits_count(wait_until: Any) -> None:
    with (
        penstock.open("memory:") as broker,
        running(broker, native="127.0.0.1:0", metrics_queues=1) as server,
        penstock.connect(server.location("native")) as client,
    ):
        for name in ("a", "b"):
            client.create_queue(name)
        fill(client, "a", 1)
        server.metrics.read_store()
        waiting = threading.Thread(target=lambda: client.claim("b", wait_ms=600_000), daemon=True)
        waiting.start()
        wait_until(lambda: server.batcher.consumers() == {"b": 1})
        with Worker(server.location("native"), ["a", "b"], lambda _: None):
            wait_until(lambda: server.batcher.consumers() == {"a": 1, "b": 2})
            page = server.metrics.page()
            assert at(page, "penstock_queue_consumers", queue="a") == 1
            assert at(page, "penstock_queue_consumers", queue=OTHERS) == 2
        client.send("b", b"x")
        waiting.join(60)
        assert server.batcher.consumers() == {}
