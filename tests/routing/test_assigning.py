"""Assigning a page: what may be handed over, and what queues take of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from penstock import Broker, InvalidInput, ManualClock, Message, State
from penstock.engines.memory import MemoryEngine
from penstock.packing import Envelope
from penstock.urls import DESIGNS, make_store

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_000_000)


@pytest.fixture(params=sorted(DESIGNS))
def broker(request: Any, clock: ManualClock) -> Iterator[Broker]:
    engine = MemoryEngine(DESIGNS[request.param])
    store = make_store(engine, request.param, clock, "pipeline")
    with Broker(store, clock=clock, background=False) as made:
        yield made


def held(broker: Broker, queue: str, state: State = State.AVAILABLE) -> list[int]:
    return sorted(entry.message_id for entry in broker.browse(queue, state=state, limit=100))


def test_names_may_come_as_any_collection(broker: Broker) -> None:
    broker.create_queue("a", filter="TRUE")
    broker.create_queue("b", filter="TRUE")
    broker.publish([Message(b"x", {})] * 6)
    page = broker.read_log()
    given: dict[int, Any] = {
        1: ["a"],
        2: ("b",),
        3: {"a"},
        4: ["a", "a"],
        5: frozenset({"a", "b"}),
    }
    assert broker.assign(0, page.cursor, given).placed == 6
    assert (held(broker, "a"), held(broker, "b")) == ([1, 3, 4, 5], [2, 5])
    assert broker.store_stats().unrouted_total == 1


def test_a_queue_takes_nothing_from_before_it_was_made(broker: Broker) -> None:
    broker.create_queue("old", filter="TRUE")
    broker.publish([Message(b"x", {})] * 3)
    broker.create_queue("new", filter="TRUE")
    broker.publish([Message(b"x", {})] * 3)
    first = broker.read_log()
    cursor = first.cursor.__class__(1, 7)
    names = ["new", "old", "never"]
    assert broker.assign(0, cursor, dict.fromkeys(range(1, 7), names)).placed == 9
    assert (held(broker, "old"), held(broker, "new")) == ([1, 2, 3, 4, 5, 6], [4, 5, 6])
    with pytest.raises(InvalidInput, match="message 9 is not in the page"):
        broker.assign(0, cursor.__class__(7, 9), {9: ["old"]})


def test_times_of_what_is_routed_late(broker: Broker, clock: ManualClock) -> None:
    broker.create_queue("plain", filter="TRUE")
    broker.create_queue("slow", filter="TRUE", delay_ms=5_000)
    broker.publish([Message(b"x", {}), Message(b"x", {}, delay_ms=9_000)])
    clock.advance(2_000)
    page = broker.read_log()
    broker.assign(0, page.cursor, dict.fromkeys((1, 2), ("plain", "slow")))
    assert (held(broker, "plain"), held(broker, "plain", State.DELAYED)) == ([1], [2])
    assert (held(broker, "slow"), held(broker, "slow", State.DELAYED)) == ([], [1, 2])
    due = {e.message_id: e.visible_at_ms for e in broker.browse("slow", state=State.DELAYED)}
    assert due == {1: 1_005_000, 2: 1_009_000}
    assert broker.browse("plain")[0].visible_at_ms == 1_002_000


def test_attributes_that_do_not_decode(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    broker.create_queue("slow", filter="TRUE", delay_ms=5_000)

    lay_out = Envelope.metadata

    def damaged(envelope: Envelope, head: bytes, size: int) -> bytes:
        record = lay_out(envelope, head, size)
        return record[:-1] + b"\x07" if envelope.priority == 1 else record

    monkeypatch.setattr(Envelope, "metadata", damaged)
    broker.publish([Message(b"x", {}, priority=n % 2) for n in range(4)])
    page = broker.read_log()
    assert [record.message_id for record in page.records] == [1, 3]
    # Who assigns one all the same is told nothing; a claim puts it aside.
    answer = broker.assign(0, page.cursor, {1: ["slow"], 2: ["slow"], 3: ["slow"]})
    assert answer.cursor == 5
    assert broker.store_stats().unrouted_total == 0
    assert held(broker, "slow", State.DELAYED) == [1, 3]
