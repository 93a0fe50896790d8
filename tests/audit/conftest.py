"""A store with a message in every state, a hand that damages it, and the examination after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

import penstock
from penstock import Message
from penstock.clock import ManualClock
from penstock.store.codec.records import decode_lease
from penstock.testing.checking import assert_clean
from penstock.urls import DESIGNS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.broker.broker import Broker
    from penstock.store.kv.check import AuditReport
    from penstock.store.kv.queues import Queue
    from penstock.store.kv.store import KvStore

LAST = b"\xff" * 32


class Hand:
    """Reads and damages the records of an open store."""

    def __init__(self, broker: Broker, clock: ManualClock) -> None:
        self.broker = broker
        self.clock = clock
        self.store = cast("KvStore", broker._store)
        self.core: Any = self.store
        self.engine = self.core.engine
        self.design = self.core.identity.design
        self.routing = self.core.identity.routing
        # Messages by what became of them, and the receipts that are good.
        self.ids: dict[str, list[int]] = {}
        self.receipts: dict[str, list[str]] = {}

    def queue(self, name: str) -> Queue:
        queue: Queue = self.core.by_name[name]
        return queue

    def number(self, name: str) -> bytes:
        return self.queue(name).number.to_bytes(4, "big")

    def get(self, table: str, key: bytes) -> bytes:
        value: Any = self.engine.table(table).get(key)
        return value  # type: ignore[no-any-return]

    def rows(self, table: str, prefix: bytes = b"") -> list[tuple[bytes, bytes]]:
        return list(self.engine.table(table).scan(prefix, prefix + LAST, 10_000))

    def put(self, table: str, key: bytes, value: bytes) -> None:
        batch = self.engine.batch()
        batch.put(key, value, self.engine.table(table).family)
        self.engine.commit(batch)

    def delete(self, table: str, key: bytes) -> None:
        batch = self.engine.batch()
        batch.delete(key, self.engine.table(table).family)
        self.engine.commit(batch)

    def leases_of(self, name: str) -> list[bytes]:
        number = self.queue(name).number
        return [key for key, value in self.rows("leases") if decode_lease(value).queue == number]

    def contents(self) -> dict[str, list[tuple[bytes, bytes]]]:
        return {name: self.rows(name) for name in DESIGNS[self.design]}


def check(hand: Hand, *, repair: bool = False) -> AuditReport:
    """Audit the store as the broker does."""
    return hand.broker.check(repair=repair)


def fill(hand: Hand) -> None:
    """Bring messages into every state."""
    broker, clock = hand.broker, hand.clock
    settings: dict[str, Any] = {"bucket_exponent": 1, "max_attempts": 2}
    broker.create_queue("plain", unclaimed_retention_ms=86_400_000, **settings)
    broker.create_queue("fifo", ordering="fifo", **settings)
    broker.create_queue("shared", filter="shared = 1", bucket_exponent=1, max_attempts=1)
    broker.configure_log(logs=2)

    def send(count: int, queue: str, **fields: Any) -> list[int]:
        attributes = {"queue": queue, "shared": fields.pop("shared", 0)}
        made = [Message(b"%d" % each, attributes, **fields) for each in range(count)]
        clock.advance(10)
        return broker.publish(made)

    ids = hand.ids
    ids["plain"] = send(6, "plain", group="a") + send(2, "plain", group="b", priority=3)
    ids["both"] = send(4, "plain", shared=1, group="s")
    ids["shared"] = send(3, "nowhere", shared=1)
    ids["fifo"] = send(3, "fifo", group="g") + send(2, "fifo", group="h")
    ids["unrouted"] = send(2, "nowhere")
    ids["delayed"] = send(2, "plain", delay_ms=60_000)
    ids["delayed fifo"] = send(1, "fifo", group="h", delay_ms=60_000)
    send(1, "plain", dedup_id="once")
    send(1, "plain", dedup_id="twice")
    if hand.routing == "pipeline":
        while penstock.route_once(broker):
            pass
    clock.advance(10)
    plain = broker.claim("plain", limit=6, consumer="ann")
    broker.ack([each.receipt for each in plain[:2]])
    ids["done"] = [each.message_id for each in plain[:2]]
    broker.release([plain[2].receipt], delay_ms=0, reason="later")
    ids["retried"] = [plain[2].message_id]
    clock.advance(10)
    broker.extend([plain[3].receipt], lease_ms=90_000)
    hand.receipts["plain"] = [each.receipt for each in plain[3:]]
    ids["plain in flight"] = [each.message_id for each in plain[3:]]
    shared = broker.claim("shared", limit=3)
    broker.release([shared[0].receipt], reason="no")
    broker.ack([shared[1].receipt])
    ids["failed"] = [shared[0].message_id]
    fifo = broker.claim("fifo", limit=2)
    hand.receipts["fifo"] = [each.receipt for each in fifo]
    ids["fifo in flight"] = [each.message_id for each in fifo]
    ids["late"] = send(3, "plain", group="z")


@pytest.fixture
def make_hand(tmp_path: Path) -> Iterator[Callable[[str, str, str], Hand]]:
    """Open a store of an engine, design and routing, filled."""
    opened: list[Broker] = []

    def make(engine: str, design: str, routing: str) -> Hand:
        place = "" if engine == "memory" else str(tmp_path / "store")
        clock = ManualClock()
        broker = penstock.open(
            f"{engine}:{place}?design={design}",
            clock=clock,
            background=False,
            durability="relaxed",
            routing=routing,  # type: ignore[arg-type]
        )
        opened.append(broker)
        hand = Hand(broker, clock)
        fill(hand)
        assert_clean(broker)
        return hand

    yield make
    for broker in opened:
        broker.close()


@pytest.fixture
def examine() -> Callable[[Hand, Callable[[Any], set[Any]]], None]:
    """Damage a store, see that exactly the damage is found, repair it, and use the store."""

    def run(hand: Hand, damage: Callable[[Any], set[Any]]) -> None:
        expected = {
            (kind, table, key if isinstance(key, str) else key.hex())
            for kind, table, key in damage(hand)
        }
        broken = hand.contents()
        report = check(hand)
        found = {(each.kind, each.table, each.key) for each in report.violations}
        assert found == expected
        assert all(each.text and not each.repaired for each in report.violations)
        assert not report.ok
        assert report.left == sum(report.found.values()) == len(report.violations)
        assert hand.contents() == broken, "a check without repair has written"

        repaired = check(hand, repair=True)
        assert repaired.found == report.found
        assert repaired.ok, repaired.violations
        assert all(each.repaired for each in repaired.violations)
        after = hand.contents()
        assert_clean(hand.broker)
        assert check(hand, repair=True).clean
        assert hand.contents() == after, "the repair of a clean store has written"
        use(hand)

    return run


def use(hand: Hand) -> None:
    """Work the store to its end: everything is delivered, and its payload with it."""
    broker, clock = hand.broker, hand.clock
    sent = [Message(b"after", {"queue": name}) for name in ("plain", "fifo")]
    fresh = set(broker.publish(sent))
    if hand.routing == "pipeline":
        while penstock.route_once(broker):
            pass
    clock.advance(3_600_000)
    broker.sweep()
    seen = set()
    for name in ("plain", "fifo", "shared"):
        while deliveries := broker.claim(name, limit=100):
            seen |= {each.message_id for each in deliveries}
            assert all(broker.ack([each.receipt for each in deliveries]))
        stats = broker.stats(name)
        assert (stats.available, stats.delayed, stats.in_flight) == (0, 0, 0)
    assert fresh <= seen
    assert_clean(broker)
    broker.purge("plain", states=list(penstock.State))
    broker.delete_queue("shared")
    assert_clean(broker)
