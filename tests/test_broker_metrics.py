"""``broker.metrics()``: counts and latencies of the verbs that a program calls."""

from __future__ import annotations

import threading

import pytest
from prometheus_client import CollectorRegistry

import penstock
from penstock import Broker, InvalidInput, ManualClock, Message, QueueNotFound
from penstock.broker.metrics import OTHERS, VERBS


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def broker(clock: ManualClock) -> Broker:
    return penstock.open("memory:", clock=clock, background=False)


def test_verbs_are_counted_from_the_first_question_on(broker: Broker) -> None:
    broker.create_queue("q")
    assert broker.metrics() == {}
    broker.send("q", b"x")
    with pytest.raises(QueueNotFound):
        broker.claim("none")
    (delivery,) = broker.claim("q")
    broker.ack([delivery.receipt])
    with pytest.raises(InvalidInput):
        broker.claim("q", limit=0)
    found = broker.metrics()
    assert {verb: each.calls for verb, each in found.items()} == {"send": 1, "claim": 3, "ack": 1}
    assert found["claim"].errors == {"QueueNotFound": 1, "InvalidInput": 1}
    assert found["ack"].errors == {}
    assert found["claim"].buckets[float("inf")] == 3


def test_what_a_verb_takes_is_measured(broker: Broker, clock: ManualClock) -> None:
    broker.metrics()
    broker.create_queue("q", max_attempts=1)
    broker.send("q", b"")
    (delivery,) = broker.claim("q")
    broker.release([delivery.receipt])

    def fail_late(_: object) -> bool:
        clock.advance(3_000)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broker.redrive("q", where=fail_late)
    found = broker.metrics()["redrive"]
    assert (found.calls, found.errors, found.seconds) == (1, {OTHERS: 1}, 3.0)
    assert (found.buckets[2.5], found.buckets[5.0]) == (0, 1)


def test_a_verb_that_another_verb_calls_is_not_counted(broker: Broker) -> None:
    broker.metrics()
    broker.create_queue("q")
    broker.purge("q")
    broker.delete_queue("q")
    assert list(broker.metrics()) == ["create_queue", "delete_queue", "purge"]


def test_consume_counts_as_what_it_calls(broker: Broker) -> None:
    broker.create_queue("q")
    broker.metrics()
    broker.publish([Message(b"", {"queue": "q"})] * 5)
    with broker.consume("q", wait_ms=0) as consumer:
        for message in consumer:
            message.ack()
    assert {"publish", "claim", "ack"} <= broker.metrics().keys()


def test_calls_of_many_threads_are_counted(broker: Broker) -> None:
    broker.create_queue("q")
    asked = [threading.Thread(target=broker.metrics) for _ in range(4)]
    for thread in asked:
        thread.start()
    for thread in asked:
        thread.join()

    def send() -> None:
        for _ in range(50):
            broker.send("q", b"")

    senders = [threading.Thread(target=send) for _ in range(4)]
    for thread in senders:
        thread.start()
    for thread in senders:
        thread.join()
    assert broker.metrics()["send"].calls == 200


def test_a_registry_shows_them(broker: Broker) -> None:
    registry = CollectorRegistry(auto_describe=True)
    broker.metrics(registry)
    broker.create_queue("q")
    with pytest.raises(QueueNotFound):
        broker.stats("none")

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"penstock_verb_seconds_{name}", labels)

    assert value("count", verb="create_queue", outcome="ok") == 1
    assert value("count", verb="stats", outcome="QueueNotFound") == 1
    assert value("bucket", verb="stats", outcome="QueueNotFound", le="+Inf") == 1
    assert value("count", verb="claim", outcome="ok") is None
    for again in (broker, penstock.open("memory:", background=False)):
        with pytest.raises(InvalidInput, match="a registry of its own"):
            again.metrics(registry)


def test_the_verbs_are_the_public_ones() -> None:
    """Whoever adds a verb decides whether it is counted."""
    others = {
        *("claiming_until", "close", "collect", "consume", "contention", "durability", "metrics"),
        *("restore", "rouse"),
    }
    served = {
        *(
            "acking_held",
            "acking_late",
            "backfill_plan",
            "begin",
            "explain_to",
            "extending",
            "fill",
        ),
        *("filters_at", "free_bytes", "listen", "lock_waits", "offset_at", "releasing"),
        *("route_plan", "takers", "tell", "used_bytes", "view"),
    }
    public = {
        name for name in dir(Broker) if not name.startswith("_") and callable(getattr(Broker, name))
    }
    assert public == {*VERBS, *others, *served}
