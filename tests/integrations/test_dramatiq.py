"""Dramatiq's messages in Penstock: real workers, in threads and in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dramatiq
import pytest
from dramatiq.errors import ConnectionClosed, QueueJoinTimeout
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend
from tests.waiting import wait_until

import penstock
from penstock.integrations.dramatiq import PenstockBroker
from penstock.server import running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.client import Client

APP, DEAD = "tests.integrations.dramatiq_app", "app-default.XQ"
pytestmark = pytest.mark.xdist_group("dramatiq")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running("memory:", native="127.0.0.1:0") as server:
        yield server.location("native")


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with penstock.connect(url) as connected:
        yield connected


@pytest.fixture
def broker(url: str, request: pytest.FixtureRequest) -> Iterator[PenstockBroker]:
    """Open a broker whose queues are the test's own."""
    made = PenstockBroker(url, prefix=f"{request.node.name}-", lease_ms=600, backoff_base_ms=1)
    yield made
    made.close()


def queue_of(request: pytest.FixtureRequest) -> str:
    return f"{request.node.name}-default"


@contextmanager
def working(broker: PenstockBroker, threads: int = 2) -> Iterator[dramatiq.Worker]:
    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=threads)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


def test_a_worker_process_runs_delays_retries_and_buries(
    url: str, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACTORS_URL", url)
    app = import_module(APP)  # it reads the environment
    notes, tries = tmp_path / "notes", tmp_path / "tries"
    app.note.send_with_options(args=(str(notes), "later"), delay=300)
    app.note.send(str(notes), "now")
    app.fail.send(str(tries))
    app.stay.send()
    command = [sys.executable, "-m", "dramatiq", APP, "-p", "1", "-t", "2"]
    path = f"{Path(penstock.__file__).parents[1]}:{Path(__file__).parents[2]}"
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, env=environment) as worker:
        try:
            wait_until(lambda: worker.poll() is not None or client.stats("app-default").done == 6)
        finally:
            worker.terminate()
    assert worker.returncode == 0
    assert notes.read_text() == "now\nlater\n"
    assert tries.read_text() == "tried\n" * 3
    dead = {each.attributes["actor"]: each.payload or b"" for each in client.browse(DEAD)}
    assert b"ZeroDivisionError: on purpose" in dead["fail"]
    assert b"TimeLimitExceeded" in dead["stay"]
    app.broker.close()


def test_results_and_pipelines_are_dramatiqs(broker: PenstockBroker) -> None:
    results: Any = Results
    broker.add_middleware(results(backend=StubBackend(), store_results=True))

    @dramatiq.actor(broker=broker)
    def double(number: int) -> int:
        return 2 * number

    with working(broker):
        steps = [double.message(1), double.message_with_options(delay=10)]
        line: Any = dramatiq.pipeline(steps, broker=broker)
        assert line.run().get_result(block=True) == 4


def test_leases_are_extended_while_an_actor_works(
    broker: PenstockBroker, client: Client, request: pytest.FixtureRequest
) -> None:
    runs = []

    @dramatiq.actor(broker=broker)
    def stay() -> None:
        runs.append(1)
        threading.Event().wait(1.5)  # more than two leases

    stay.send()
    with working(broker), working(broker):
        broker.join("default", timeout=30_000)
    assert len(runs) == 1
    [done] = client.browse(queue_of(request), state="done")
    assert done.attempts == 1


def test_a_consumer_claims_ahead_and_a_stop_gives_back(
    broker: PenstockBroker, client: Client, request: pytest.FixtureRequest
) -> None:
    begun, told = threading.Event(), threading.Event()

    @dramatiq.actor(broker=broker)
    def stay() -> None:
        begun.set()
        told.wait(30)

    for number in range(6):
        stay.send_with_options(broker_priority=number, penstock_group="shop")
    queue = queue_of(request)
    with working(broker, threads=1):
        wait_until(lambda: client.stats(queue).in_flight == 2)  # twice as many as threads
        assert begun.wait(30)
        told.set()
    left = client.stats(queue)
    assert (left.in_flight, left.done + left.available) == (0, 6)
    assert all(each.attempts == 0 for each in client.browse(queue))
    assert client.browse(queue, state="done")[0].priority == 5


def test_flush_and_join(broker: PenstockBroker) -> None:
    @dramatiq.actor(broker=broker)
    def rest() -> None: ...

    rest.send()
    rest.send_with_options(delay=1_000_000)
    with pytest.raises(QueueJoinTimeout):
        broker.join("default", timeout=1, interval=1)
    broker.flush_all()
    broker.join("default", timeout=1, interval=1)


def test_what_can_not_be_decoded_or_has_no_actor_is_dead(
    broker: PenstockBroker, client: Client, request: pytest.FixtureRequest
) -> None:
    broker.declare_queue("default")
    queue = broker.prepare("default")
    client.send(queue, b"\xff")
    broker.enqueue(dramatiq.Message("default", "unknown", (), {}, {}))
    with working(broker):
        wait_until(lambda: client.stats(f"{queue}.XQ").available == 2)
    payloads = {each.attributes.get("actor"): each for each in client.browse(f"{queue}.XQ")}
    assert payloads[None].payload == b"\xff"
    assert "unknown" in payloads


def test_a_store_of_this_process_will_do(tmp_path: Path) -> None:
    broker = PenstockBroker(f"rocksdb:{tmp_path}/store")
    told = threading.Event()

    @dramatiq.actor(broker=broker)
    def tell() -> None:
        told.set()

    tell.send()
    broker.close()
    with working(broker):
        assert told.wait(30)
    broker.close()


def test_a_server_that_is_away_is_a_connection_error() -> None:
    broker = PenstockBroker("penstock://nowhere.invalid")
    with pytest.raises(ConnectionClosed):
        broker.consume("default")


def test_a_dead_letter_is_there_once(
    broker: PenstockBroker, client: Client, request: pytest.FixtureRequest
) -> None:
    broker.enqueue(dramatiq.Message("default", "unknown", (), {}, {}))
    consumer = broker.consume("default", timeout=10_000)
    message: Any = next(consumer)
    assert message is not None
    for _ in range(2):  # as after an answer that was lost
        consumer.nack(message)
    queue = queue_of(request)
    assert client.move(f"{queue}.XQ", queue, state="available") == 1
    again = next(consumer)
    assert again is not None
    assert again.message_id == message.message_id
