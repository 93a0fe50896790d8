"""Workers on a server, which pushes their messages."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from tests.native.serving import Served
from tests.waiting import wait_until

import penstock
from penstock import Message, Worker
from penstock.server.batcher import Batcher
from penstock.worker.state import MAX_AHEAD

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def served() -> Iterator[Served]:
    with penstock.open("memory:") as broker, Served(broker) as server:
        broker.create_queue("q")
        yield server


def fill(served: Served, count: int, queue: str = "q", **fields: Any) -> None:
    broker = served.batcher.broker
    broker.publish([Message(b"%d" % n, {"queue": queue}, **fields) for n in range(count)])


def test_a_worker_is_pushed_its_messages(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batcher, "claim", None)
    done: list[bytes] = []
    with Worker(served.url, "q", lambda each: done.append(each.payload)) as worker:
        fill(served, 3_000)
        wait_until(lambda: worker.stats().processed == 3_000)
        assert served.batcher._subscriptions.by_queue
    assert len(set(done)) == 3_000
    assert served.batcher.broker.stats("q").done == 3_000
    assert not served.batcher._subscriptions.by_queue


def test_messages_that_have_not_begun_are_given_back(served: Served) -> None:
    begun, gate = threading.Event(), threading.Event()

    def handle(_: object) -> None:
        begun.set()
        gate.wait(60)

    fill(served, 50)
    with Worker(served.url, "q", handle, concurrency=1, prefetch=20) as worker:
        begun.wait(60)
        wait_until(lambda: worker.stats().prefetched == 20)
        worker.stop()
        wait_until(lambda: worker._state.closing)
        gate.set()
    stats = served.batcher.broker.stats("q")
    assert (stats.available, stats.in_flight, stats.done) == (49, 0, 1)
    claimed = served.batcher.broker.claim("q", limit=50)
    assert {each.attempts for each in claimed} == {1}


def test_a_slow_handler_holds_few_messages_ahead_and_a_fast_one_many(served: Served) -> None:
    fill(served, 2_000)
    with Worker(served.url, "q", lambda _: None) as worker:
        wait_until(lambda: worker.stats().processed == 2_000)
        assert worker._state._ahead == MAX_AHEAD
    gate = threading.Event()
    fill(served, 100)
    with Worker(served.url, "q", lambda _: gate.wait(60), concurrency=2) as worker:
        wait_until(lambda: worker.stats().in_progress == 2)
        wait_until(lambda: worker.stats().prefetched == 2)
        gate.set()


def test_several_queues_and_one_of_them_fifo(served: Served) -> None:
    broker = served.batcher.broker
    broker.create_queue("f", ordering="fifo", filter="queue = 'f'")
    order: list[bytes] = []
    done: list[bytes] = []

    def handle(delivery: penstock.Delivery) -> None:
        (order if delivery.queue == "f" else done).append(delivery.payload)

    fill(served, 100)
    fill(served, 20, "f", group="g")
    with Worker(served.url, ["q", "f"], handle) as worker:
        wait_until(lambda: worker.stats().processed == 120)
    assert order == [b"%d" % n for n in range(20)]
    assert len(done) == 100


def test_a_worker_goes_on_after_a_lost_connection_and_a_queue_made_anew(served: Served) -> None:
    broker = served.batcher.broker
    with Worker(served.url, "q", lambda _: None) as worker:
        fill(served, 10)
        wait_until(lambda: worker.stats().processed == 10)
        served.cut()
        fill(served, 10)
        wait_until(lambda: worker.stats().processed == 20)
        broker.delete_queue("q")
        wait_until(lambda: not served.batcher._subscriptions.by_queue)
        broker.create_queue("q")
        fill(served, 10)
        wait_until(lambda: worker.stats().processed == 30)


def test_without_prefetch_no_message_of_another_queue_waits_for_a_slot(served: Served) -> None:
    served.broker.create_queue("z")
    begun, gate = threading.Event(), threading.Event()

    def handle(_: object) -> None:
        begun.set()
        gate.wait(60)

    with (
        penstock.connect(served.url) as client,
        Worker(client, ["q", "z"], handle, concurrency=1, prefetch=0, wait_ms=100) as worker,
    ):
        client.send("q", b"")
        assert begun.wait(60)
        # Claims that were under way meanwhile have ended.
        wait_until(lambda: not served.batcher._waiting)
        client.send("z", b"")
        stats = client.stats("z")
        gate.set()
        assert (stats.available, stats.in_flight) == (1, 0)
        wait_until(lambda: worker.stats().processed == 2)
