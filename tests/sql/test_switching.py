"""The routing is switched while other processes publish to the same database."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from tests.routing.test_kill import held
from tests.routing.test_switching import kill_while_switching
from tests.routing.test_tailer import Following, switch_to_inline
from tests.waiting import wait_until

import penstock
from penstock import Broker, InvalidInput, Message
from penstock.store.contract import Progress
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Iterator


def wait_until_held(broker: Broker, ids: list[int]) -> None:
    """Wait: processes set their clocks by the database's, to within a millisecond or two."""
    wait_until(lambda: held(broker, "all") == ids)


@pytest.fixture
def brokers(url: str) -> Iterator[tuple[Broker, Broker]]:
    """Open a store twice: two processes could not know less of each other."""
    with penstock.open(url) as first, penstock.open(url) as second:
        first.create_queue("all", filter="TRUE")
        yield first, second


def test_another_process_learns_of_a_switch_as_it_publishes(
    brokers: tuple[Broker, Broker],
) -> None:
    first, second = brokers
    ids = second.publish([Message(b"")])
    first.configure_log(routing="pipeline")
    waiting = second.publish([Message(b"")])
    wait_until_held(first, ids)
    penstock.route_once(second)
    ids += waiting
    wait_until_held(first, ids)
    second.configure_log(routing="inline")
    ids += first.publish([Message(b"")])
    wait_until_held(second, ids)
    with pytest.raises(InvalidInput, match="routes inline"):
        first.assign(0, penstock.Cursor(ids[-1], ids[-1] + 1), {ids[-1]: ["all"]})
    assert first.stats("all").enqueued_total == 3


def test_the_routing_is_known_before_its_change_is_counted(
    brokers: tuple[Broker, Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that publishes by the count must not meet the routing from before."""
    first, second = brokers
    second.queue("all")
    store: Any = second._store
    seen: list[str] = []

    class Watched(Progress):
        def __setattr__(self, name: str, value: int) -> None:
            if name == "filter_changes":
                seen.append(store.routing)
            super().__setattr__(name, value)

    monkeypatch.setattr(store, "progress", Watched(filter_changes=store.progress.filter_changes))
    seen.clear()
    first.configure_log(routing="pipeline")
    second.publish([Message(b"")])
    first.configure_log(routing="inline")
    second.publish([Message(b"")])
    assert seen == ["pipeline", "inline"]


def test_killed_processes_leave_a_store_that_goes_on(url: str) -> None:
    kill_while_switching(url, rounds=2)


def test_messages_that_processes_publish_through_switches_come_once(
    brokers: tuple[Broker, Broker], url: str
) -> None:
    ids: list[int] = []
    enough = threading.Event()

    def produce(broker: Broker, group: str) -> None:
        while not enough.is_set():
            ids.extend(broker.publish([Message(b"", group=group), Message(b"")]))

    producers = [
        threading.Thread(target=produce, args=[broker, name])
        for broker, name in zip(brokers, "ab", strict=True)
    ]
    with penstock.open(url) as third:
        for producer in producers:
            producer.start()
        try:
            for _ in range(4):
                third.configure_log(routing="pipeline")
                following = Following(brokers[0], limit=50)
                wait_until(partial(lambda at: len(ids) > at, len(ids) + 40))
                switch_to_inline(third)
                assert "this store routes inline" in str(following.ended())
        finally:
            enough.set()
            for producer in producers:
                producer.join()
        wait_until_held(third, sorted(ids))
        assert third.stats("all").enqueued_total == len(ids)
        assert_clean(third)
