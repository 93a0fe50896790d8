"""Queues: made, changed, listed; and the calls that are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from penstock import limits
from penstock.errors import (
    BrokerClosed,
    InvalidFilter,
    InvalidInput,
    InvalidMessage,
    InvalidQueue,
    QueueExists,
    QueueNotFound,
)
from penstock.model import Message, Ordering, State
from penstock.testing.suite.base import Suite, message

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.broker.broker import Broker

__all__ = ["QueuesSuite"]

HUGE = 10**5000

BAD_NAMES: list[Any] = [
    "",
    ".a",
    "a b",
    "a/b",
    "a\0",
    "a\n",
    "ü",
    "x" * 81,
    None,
    5,
    b"q",
]

BAD_SETTINGS: list[dict[str, Any]] = [
    {"lease_ms": 0},
    {"lease_ms": -1},
    {"lease_ms": limits.MAX_LEASE_MS + 1},
    {"lease_ms": "1000"},
    {"lease_ms": 1.5},
    {"lease_ms": True},
    {"max_attempts": 0},
    {"max_attempts": limits.MAX_ATTEMPTS + 1},
    {"backoff_base_ms": -1},
    {"backoff_cap_ms": HUGE},
    {"delay_ms": -1},
    {"delay_ms": limits.MAX_DURATION_MS + 1},
    {"done_retention_ms": -1},
    {"failed_retention_ms": None},
    {"unclaimed_retention_ms": float("inf")},
    {"bucket_exponent": -1},
    {"bucket_exponent": limits.MAX_BUCKET_EXPONENT + 1},
    {"description": 7},
    {"description": "x" * (limits.MAX_DESCRIPTION_BYTES + 1)},
    {"ordering": "lifo"},
    {"nonsense": 1},
    {"version": 2},
    {"created_at_ms": 2},
]

BAD_MESSAGES: list[dict[str, Any]] = [
    {"payload": "text"},
    {"payload": None},
    {"payload": bytearray(b"x")},
    {"attributes": {"a": {}}},
    {"attributes": {"a": [1]}},
    {"attributes": {"a": b"bytes"}},
    {"attributes": {"a": object()}},
    {"attributes": {1: "a"}},
    {"attributes": {"": "a"}},
    {"attributes": {"a" * 257: 1}},
    {"attributes": {"a": float("nan")}},
    {"attributes": {"a": float("inf")}},
    {"attributes": {"a": 1 << 63}},
    {"attributes": {"a": -(1 << 63) - 1}},
    {"attributes": {"a": HUGE}},
    {"attributes": {"a": "\ud800"}},
    {"attributes": {"\ud800": 1}},
    {"attributes": {"a": "x" * (limits.MAX_ATTRIBUTES_BYTES + 1)}},
    {"attributes": {f"a{n}": n for n in range(limits.MAX_ATTRIBUTES + 1)}},
    {"attributes": "queue"},
    {"attributes": []},
    {"attributes": None},
    {"attributes": [("queue", "q")]},
    {"group": None},
    {"group": 5},
    {"group": b"g"},
    {"group": "\ud800"},
    {"group": "g" * (limits.MAX_GROUP_BYTES + 1)},
    {"priority": -1},
    {"priority": 256},
    {"priority": HUGE},
    {"priority": 1.0},
    {"priority": 0.0},
    {"priority": True},
    {"priority": None},
    {"delay_ms": -1},
    {"delay_ms": 0.0},
    {"delay_ms": 0.5},
    {"delay_ms": "1"},
    {"delay_ms": limits.MAX_DURATION_MS + 1},
    {"delay_ms": HUGE},
    {"dedup_id": ""},
    {"dedup_id": 5},
    {"dedup_id": "\ud800"},
    {"dedup_id": "x" * (limits.MAX_DEDUP_ID_BYTES + 1)},
]

BAD_CALLS: dict[str, Callable[[Broker], object]] = {
    "claim limit 0": lambda b: b.claim("q", limit=0),
    "claim limit -1": lambda b: b.claim("q", limit=-1),
    "claim limit too high": lambda b: b.claim("q", limit=limits.MAX_CLAIM_LIMIT + 1),
    "claim limit huge": lambda b: b.claim("q", limit=HUGE),
    "claim limit float": lambda b: b.claim("q", limit=1.0),  # type: ignore[arg-type]
    "claim lease 0": lambda b: b.claim("q", lease_ms=0),
    "claim lease too long": lambda b: b.claim("q", lease_ms=limits.MAX_LEASE_MS + 1),
    "claim wait negative": lambda b: b.claim("q", wait_ms=-1),
    "claim wait too long": lambda b: b.claim("q", wait_ms=limits.MAX_WAIT_MS + 1),
    "claim consumer too long": lambda b: b.claim("q", consumer="c" * 257),
    "claim consumer no text": lambda b: b.claim("q", consumer=5),  # type: ignore[arg-type]
    "claim consumer surrogate": lambda b: b.claim("q", consumer="\ud800"),
    "release delay negative": lambda b: b.release([], delay_ms=-1),
    "release delay absurd": lambda b: b.release([], delay_ms=limits.MAX_DURATION_MS + 1),
    "extend lease 0": lambda b: b.extend([], lease_ms=0),
    "extend lease absurd": lambda b: b.extend([], lease_ms=limits.MAX_LEASE_MS + 1),
    "ack of one string": lambda b: b.ack("ps1-"),
    "ack of too many": lambda b: b.ack([""] * (limits.MAX_RECEIPTS + 1)),
    "browse limit 0": lambda b: b.browse("q", limit=0),
    "browse limit too high": lambda b: b.browse("q", limit=limits.MAX_BROWSE_LIMIT + 1),
    "browse state": lambda b: b.browse("q", state="lost"),
    "browse cursor": lambda b: b.browse("q", cursor="nonsense"),
    "browse cursor of no text": lambda b: b.browse("q", cursor=5),  # type: ignore[arg-type]
    "browse cursor of a state": lambda b: b.browse("q", cursor="done:00000000"),
    "purge state": lambda b: b.purge("q", states=["lost"]),
    "purge of one string": lambda b: b.purge("q", states="available"),
    "redrive id negative": lambda b: b.redrive("q", message_ids=[-1]),
    "redrive id of text": lambda b: b.redrive("q", message_ids=["1"]),  # type: ignore[list-item]
    "attempts id absurd": lambda b: b.attempts("q", 1 << 64),
    "sweep budget 0": lambda b: b.sweep(budget=0),
    "publish too many": lambda b: b.publish([message()] * (limits.MAX_PUBLISH_MESSAGES + 1)),
}

QUEUE_CALLS: dict[str, Callable[[Broker], object]] = {
    "claim": lambda b: b.claim("nowhere"),
    "send": lambda b: b.send("nowhere", b""),
    "browse": lambda b: b.browse("nowhere"),
    "attempts": lambda b: b.attempts("nowhere", 1),
    "stats": lambda b: b.stats("nowhere"),
    "redrive": lambda b: b.redrive("nowhere"),
    "redrive ids": lambda b: b.redrive("nowhere", message_ids=[1]),
    "purge": lambda b: b.purge("nowhere"),
    "queue": lambda b: b.queue("nowhere"),
    "update": lambda b: b.update_queue("nowhere", lease_ms=5),
    "delete": lambda b: b.delete_queue("nowhere"),
    "ack": lambda b: b.ack([], queue="nowhere"),
}

CLOSED_CALLS: dict[str, Callable[[Broker], object]] = {
    "publish": lambda b: b.publish([message()]),
    "publish nothing": lambda b: b.publish([]),
    "send": lambda b: b.send("q", b""),
    "claim": lambda b: b.claim("q"),
    "ack": lambda b: b.ack([]),
    "release": lambda b: b.release([]),
    "extend": lambda b: b.extend([], lease_ms=1),
    "browse": lambda b: b.browse("q"),
    "attempts": lambda b: b.attempts("q", 1),
    "stats": lambda b: b.stats("q"),
    "store_stats": lambda b: b.store_stats(),
    "redrive": lambda b: b.redrive("q"),
    "purge": lambda b: b.purge("q"),
    "sweep": lambda b: b.sweep(),
    "queues": lambda b: b.queues(),
    "queue": lambda b: b.queue("q"),
    "create": lambda b: b.create_queue("r"),
    "update": lambda b: b.update_queue("q", lease_ms=5),
    "delete": lambda b: b.delete_queue("q"),
}


class QueuesSuite(Suite):
    """Queues and refusals."""

    def test_create_with_every_setting(self) -> None:
        broker = self.start(queue=None)
        settings = {
            "lease_ms": 1,
            "max_attempts": 65_535,
            "backoff_base_ms": 0,
            "backoff_cap_ms": 7,
            "delay_ms": 8,
            "done_retention_ms": 9,
            "failed_retention_ms": 10,
            "unclaimed_retention_ms": limits.MAX_DURATION_MS,
            "bucket_exponent": 4,
            "description": "für alle",
        }
        made = broker.create_queue("q", filter="a = 1", ordering="fifo", **settings)
        assert {name: getattr(made, name) for name in settings} == settings
        assert made.ordering is Ordering.FIFO
        assert made.created_at_ms == self.clock.now_ms()
        assert made.version == 1
        assert broker.queue("q") == made
        assert self.again().queue("q") == made

    def test_create_is_idempotent(self) -> None:
        broker = self.start(lease_ms=5)
        made = broker.queue("q")
        self.clock.advance(1000)
        with self.unchanged():
            assert broker.create_queue("q", lease_ms=5) == made

    def test_create_with_other_settings_is_refused(self) -> None:
        broker = self.start(lease_ms=5)
        for other in ({"lease_ms": 6}, {"lease_ms": 5, "filter": "a = 1"}, {"ordering": "fifo"}):
            with self.refused(QueueExists):
                broker.create_queue("q", **other)

    def test_queues_are_listed_by_name(self) -> None:
        broker = self.start(queue=None)
        for name in ("b", "a", "c", "A.1_-"):
            broker.create_queue(name)
        assert [spec.name for spec in broker.queues()] == ["A.1_-", "a", "b", "c"]

    def test_update(self) -> None:
        broker = self.start(lease_ms=1000, max_attempts=5)
        made = broker.queue("q")
        self.put(b"1")
        changed = broker.update_queue("q", lease_ms=50, max_attempts=1)
        assert (changed.lease_ms, changed.max_attempts, changed.version) == (50, 1, 2)
        assert changed.created_at_ms == made.created_at_ms
        assert self.take_one().lease_deadline_ms == self.clock.now_ms() + 50
        self.clock.advance(50)
        assert self.depth() == (0, 0, 0, 0, 1)

    def test_update_of_the_filter_is_for_what_comes(self) -> None:
        broker = self.start(filter="a = 1")
        broker.publish([Message(b"old", {"a": 1})])
        broker.update_queue("q", filter="a = 2")
        broker.publish([Message(b"not", {"a": 1}), Message(b"new", {"a": 2})])
        assert self.taken(9) == [b"old", b"new"]

    def test_ordering_can_not_change(self) -> None:
        broker = self.start()
        with self.refused(InvalidQueue):
            broker.update_queue("q", ordering="fifo")
        assert broker.update_queue("q", ordering="standard").version == 2

    def test_queue_names(self) -> None:
        broker = self.start()
        for name in BAD_NAMES:
            with self.refused(InvalidQueue, name):
                broker.create_queue(name)

    @pytest.mark.parametrize("name", ["-0", "A-b_c.d", "_" * 80])
    def test_good_queue_names(self, name: str) -> None:
        broker = self.start(queue=name)
        broker.send(name, b"x")
        assert self.taken(queue=name) == [b"x"]

    def test_bad_settings(self) -> None:
        broker = self.start()
        for settings in BAD_SETTINGS:
            with self.refused(InvalidQueue, settings):
                broker.create_queue("other", **settings)
            with self.refused(InvalidQueue, settings):
                broker.update_queue("q", **settings)

    def test_a_bad_filter(self) -> None:
        broker = self.start()
        for bad in ("", "a =", "DROP TABLE x", "a = (SELECT 1)", "x" * 20_000):
            with self.refused(InvalidFilter):
                broker.create_queue("other", filter=bad)
            with self.refused(InvalidFilter):
                broker.update_queue("q", filter=bad)
            with self.refused(InvalidFilter):
                broker.redrive("q", where=bad)
        for none in (None, b"a = 1", 1, ["a = 1"]):
            with self.refused(InvalidFilter, none):
                broker.update_queue("q", filter=none)

    def test_bad_messages(self) -> None:
        broker = self.start()
        for fields in BAD_MESSAGES:
            bad = Message(**{"payload": b"x", "attributes": {"queue": "q"}, **fields})
            with self.refused(InvalidMessage, fields):
                broker.publish([message(b"good"), bad])

    def test_a_payload_over_the_limit(self) -> None:
        broker = self.start()
        largest = bytes(limits.MAX_PAYLOAD_BYTES)
        with self.refused(InvalidMessage):
            broker.publish([message(largest + b"x")])
        broker.publish([message(largest)])
        assert self.take_one().payload == largest

    def test_what_is_no_message(self) -> None:
        broker = self.start()
        for bad in (b"payload", {"payload": b"x"}, None, 5):
            with self.refused(InvalidMessage):
                broker.publish([message(), bad])  # type: ignore[list-item]

    def test_send_to_a_queue_whose_filter_refuses(self) -> None:
        broker = self.start(filter="queue = 'q' AND shape = 'big'")
        with self.refused(InvalidMessage):
            broker.send("q", b"x", shape="small")
        broker.send("q", b"x", shape="big")

    def test_bad_calls(self) -> None:
        broker = self.start()
        self.put(b"1")
        for name, call in BAD_CALLS.items():
            with self.refused(InvalidInput, name):
                call(broker)

    def test_a_cursor_of_another_queue(self) -> None:
        broker = self.start()
        broker.create_queue("r")
        for queue in ("q", "r"):
            self.put(*[b"x"] * 6, queue=queue)
            deliveries = self.take(3, queue=queue)
            broker.ack([delivery.receipt for delivery in deliveries])
        for state in (State.AVAILABLE, State.DONE):
            for own, other in (("q", "r"), ("r", "q")):
                cursor = broker.browse(own, state=state, limit=1).next_cursor
                with self.refused(InvalidInput):
                    broker.browse(other, state=state, cursor=cursor)

    def test_a_queue_that_is_not_there(self) -> None:
        broker = self.start()
        self.put(b"1")
        for name, call in QUEUE_CALLS.items():
            with self.refused(QueueNotFound, name):
                call(broker)

    def test_a_closed_broker(self) -> None:
        broker = self.start()
        broker.close()
        for name, call in CLOSED_CALLS.items():
            with pytest.raises(BrokerClosed):
                call(broker)
                pytest.fail(f"{name} works on a closed broker")
        broker.close()
