"""Explanations beyond those of the shared suite: pipelines, readers, keys, forgotten coverage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import penstock
from penstock import Cause, Message, State
from penstock.clock import ManualClock
from penstock.limits import MAX_COVERAGE_STRETCHES, MAX_PLACES
from penstock.server import running
from penstock.server.keys import add_key
from penstock.testing.stores import OnUrl
from penstock.testing.suite.explaining import ExplainingSuite, book

if TYPE_CHECKING:
    from pathlib import Path

    from penstock import Broker


class TestMemoryBuckets(OnUrl, ExplainingSuite):
    url = "memory:?design=buckets"


class TestRocksBuckets(OnUrl, ExplainingSuite):
    url = "rocksdb:{place}/store?design=buckets"


class TestSlateIndexed(OnUrl, ExplainingSuite):
    url = "slatedb+file://{place}/store?design=indexed"


def test_a_message_that_no_pipeline_has_come_to() -> None:
    with penstock.open("memory:", routing="pipeline", background=False) as broker:
        broker.create_queue("q", filter="price > 10")
        broker.configure_log(logs=3)
        groups = [f"group {number}" for number in range(9)]
        ids = broker.publish([book(12, group=group) for group in groups])
        (cheap,) = broker.publish([book(1)])
        for message_id in ids:
            found = broker.explain("q", message_id)
            assert (found.cause, found.state) == (Cause.NOT_ROUTED, None)
            assert "does not have it yet: its filter takes it" in found.text
        assert broker.explain("q", cheap).cause is Cause.NOT_TAKEN
        penstock.route_once(broker)
        assert {broker.explain("q", each).cause for each in ids} == {Cause.TAKEN}
        broker.purge("q")
        assert "unless its pipeline has left it out" in broker.explain("q", ids[0]).text
        # A pipeline's assignments are not checked against the filter.
        (other,) = broker.publish([book(1)])
        for log in range(3):
            page = broker.read_log(log)
            broker.assign(log, page.cursor, {each.message_id: ["q"] for each in page.records})
        found = broker.explain("q", other)
        assert found.cause is Cause.MOVED_IN
        assert "or a pipeline has assigned it" in found.text


def test_a_gap_between_ids_and_a_message_that_is_held_up(tmp_path: Path) -> None:
    url = f"rocksdb:{tmp_path}/store"
    with penstock.open(url, routing="pipeline", background=False) as broker:
        broker.create_queue("q", filter="price > 10")
        (first,) = broker.publish([book(12)])
    with penstock.open(url, background=False) as broker:
        # Ids were set aside for the process before, and not all of them used.
        (second,) = broker.publish([book(12)])
        assert second > first + 1
        for message_id, cause in (
            (first, Cause.NOT_ROUTED),
            (first + 1, Cause.NO_MESSAGE),
            (second - 1, Cause.NO_MESSAGE),
            (second, Cause.NOT_ROUTED),
        ):
            assert broker.explain("q", message_id).cause is cause
        broker.configure_log(logs=3)
        (third,) = broker.publish([book(12)])
        # The log is not read there before all logs are routed up to the change.
        assert broker.explain("q", third).cause is Cause.NOT_ROUTED
        while penstock.route_once(broker):
            pass
        assert broker.explain("q", third).cause is Cause.TAKEN


def test_a_reader_explains_beside_the_owner(tmp_path: Path) -> None:
    url = f"slatedb+file://{tmp_path}/store"
    with penstock.open(url) as broker:
        broker.create_queue("q", filter="price > 10")
        broker.create_queue("all", filter="TRUE")
        large, small = broker.publish([book(12), book(1)])
        with penstock.open_reader(url) as reader:
            found = reader.explain("q", large)
            assert (found.state, found.elsewhere) == (State.AVAILABLE, {"all": State.AVAILABLE})
            assert reader.explain("q", small).cause is Cause.NOT_TAKEN
            assert reader.explain("q", small + 1).cause is Cause.NO_MESSAGE


def test_a_key_is_told_only_of_what_it_may_see(tmp_path: Path) -> None:
    tokens = {
        name: f"{name}:{add_key(tmp_path / 'keys.toml', name, grants)}"
        for name, grants in {"one": ["consume:q"], "all": ["consume:*"]}.items()
    }
    with (
        penstock.open("memory:") as broker,
        running(broker, native="127.0.0.1:0", keys=tmp_path / "keys.toml") as server,
    ):
        broker.create_queue("q", filter="price > 10")
        broker.create_queue("other", filter="TRUE")
        large, small = broker.publish([book(12), book(1)])
        place = server.location("native")
        with penstock.connect(place, token=tokens["one"]) as client:
            found = client.explain("q", large)
            assert (found.cause, found.elsewhere, found.queues) == (Cause.TAKEN, {}, 1)
            found = client.explain("q", small)
            assert (found.cause, found.filter) == (Cause.HIDDEN, None)
            assert "price" not in found.text
            # Nor how far the log goes.
            assert client.explain("q", 1 << 40).text == found.text
            with pytest.raises(penstock.NotAllowed):
                client.explain("other", small)
        with penstock.connect(place, token=tokens["all"]) as client:
            assert client.explain("q", small) == broker.explain("q", small)
            assert client.explain("q", small).elsewhere == {"other": State.AVAILABLE}


def forgetful(broker: Broker, clock: ManualClock) -> int:
    """Change a queue's filter more often than it remembers; return a message from before."""
    broker.configure_log(retention_ms=1)
    broker.create_queue("q", filter="price > 10")
    broker.create_queue("keep", filter="TRUE")
    (first,) = broker.publish([book(12)])
    for number in range(MAX_COVERAGE_STRETCHES + 10):
        broker.update_queue("q", filter=f"price > {number + 100}")
        broker.publish([book(1)])
    for _ in range(3):
        clock.advance(3_600_000)
        broker.publish([book(1)])
        while broker.sweep().total:
            pass
    assert broker.log_stats().earliest > first
    broker.update_queue("q", filter="price > 1000")
    return first


def test_a_queue_that_no_longer_knows_what_it_has_had() -> None:
    clock = ManualClock()
    with penstock.open("memory:", clock=clock, background=False) as broker:
        first = forgetful(broker, clock)
        found = broker.explain("q", first)
        assert (found.cause, found.state) == (Cause.FORGOTTEN, State.AVAILABLE)
        assert "The queue knows what it has had from offset" in found.text
        broker.purge("q")
        found = broker.explain("q", first)
        assert (found.cause, found.state) == (Cause.FORGOTTEN, None)
        assert found.filter is not None
        assert "Whether it had it is not known" in found.text
        broker.purge("keep")
        found = broker.explain("q", first)
        assert (found.cause, found.filter) == (Cause.FORGOTTEN, None)
        assert "its attributes are not known any more" in found.text


def test_not_all_of_many_queues_and_buckets_are_looked_at() -> None:
    with penstock.open("memory:?design=buckets", background=False) as broker:
        for number in range(2 * MAX_PLACES):
            broker.create_queue(f"q{number:03}", filter=f"price = {number}")
        broker.create_queue("all", filter="TRUE")
        (message_id,) = broker.publish([book(2 * MAX_PLACES - 1)])
        broker.publish([book(999) for _ in range(100)])
        found = broker.explain("all", message_id)
        assert found.elsewhere == {f"q{2 * MAX_PLACES - 1:03}": State.AVAILABLE}
        assert (found.looked, found.queues) == (MAX_PLACES, 2 * MAX_PLACES + 1)
        broker.claim("all", limit=1)
        broker.purge("all", states=["in_flight"])
        found = broker.explain("all", message_id)
        assert found.cause is Cause.REMOVED
        assert "Only 64 buckets of the queue were looked at" in found.text


def test_hostile_values_are_only_told() -> None:
    with penstock.open("memory:", background=False) as broker:
        broker.create_queue("q", filter="\"<b>\" = 'x'")
        (message_id,) = broker.publish([Message(b"", {"<b>": "\x1b[31m{}%s"})])
        found = broker.explain("q", message_id)
        assert found.filter is not None
        assert found.filter.values == (('"<b>"', "\x1b[31m{}%s"),)
        assert found.text == "Queue q does not have it: its filter does not take it."


def test_a_store_whose_routing_is_switched() -> None:
    with penstock.open("memory:", background=False) as broker:
        broker.create_queue("q", filter="price > 10")
        (before,) = broker.publish([book(12)])
        broker.configure_log(routing="pipeline")
        (meanwhile,) = broker.publish([book(12)])
        causes = [broker.explain("q", each).cause for each in (before, meanwhile)]
        assert causes == [Cause.TAKEN, Cause.NOT_ROUTED]
        penstock.route_once(broker)
        broker.configure_log(routing="inline")
        (after,) = broker.publish([book(12)])
        ids = (before, meanwhile, after)
        assert {broker.explain("q", each).cause for each in ids} == {Cause.TAKEN}
        broker.purge("q")
        assert {broker.explain("q", each).cause for each in ids} == {Cause.REMOVED}
