"""After every single commit, payloads and their counts agree with what queues hold.

A store is copied after each commit and opened as if the process had died there: that is how a
payload that outlives its last reference by one commit, or goes one too early, is seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from penstock import Broker, ManualClock, Message, State, route_once
from penstock.engines.memory import MemoryEngine
from penstock.urls import DESIGNS, make_store

if TYPE_CHECKING:
    from penstock.engines import Batch

RETENTION_MS = 60_000


class RecordingEngine(MemoryEngine):
    """Keeps a copy of every table after every commit, with the time."""

    def __init__(self, design: str, clock: ManualClock) -> None:
        super().__init__(DESIGNS[design])
        self._clock = clock
        self.copies: list[tuple[int, dict[str, Any]]] = []

    def commit(self, batch: Batch) -> None:
        super().commit(batch)
        rows = {name: table.rows.copy() for name, table in self._tables.items()}
        self.copies.append((self._clock.now_ms(), rows))


def check_copy(design: str, now_ms: int, rows: dict[str, Any]) -> int:
    engine = MemoryEngine(DESIGNS[design])
    for name, copied in rows.items():
        engine.table(name).rows = copied.copy()
    clock = ManualClock(now_ms)
    store = make_store(engine, design, clock)
    payloads = {
        int.from_bytes(key[2:], "big") for key in rows["payloads"] if key[:2] == b"\x01\x01"
    }
    counts = {
        int.from_bytes(key[2:], "big"): int.from_bytes(value, "big")
        for key, value in rows["payloads"].items()
        if key[:2] == b"\x02\x0d"
    }
    with Broker(store, clock=clock, background=False) as broker:
        holders: dict[int, int] = {}
        for spec in broker.queues():
            for state in State:
                for entry in broker.browse(spec.name, state=state, limit=1_000):
                    holders[entry.message_id] = holders.get(entry.message_id, 0) + 1
        routed_up_to = broker.log_stats().routed_up_to
    assert set(holders) <= payloads
    for message_id in payloads:
        held = holders.get(message_id, 0)
        if message_id < routed_up_to:
            assert counts.get(message_id, 1) == held, f"message {message_id}"
        else:
            assert (held, counts.get(message_id)) == (0, None)
    assert set(counts) <= payloads
    return len(holders)


@pytest.mark.parametrize("design", ["indexed", "buckets"])
@pytest.mark.parametrize("routing", ["inline", "pipeline"])
def test_payloads_go_with_their_last_reference(design: str, routing: str) -> None:
    clock = ManualClock()
    engine = RecordingEngine(design, clock)
    store = make_store(engine, design, clock, routing)
    broker = Broker(store, clock=clock, background=False)

    def publish(count: int) -> None:
        broker.publish([Message(b"%d" % n, {"n": n}, group=f"{n % 3}") for n in range(count)])
        if routing == "pipeline":
            route_once(broker, limit=4)
            route_once(broker)

    def work(queue: str, *, ack: int, fail: int) -> None:
        receipts = [delivery.receipt for delivery in broker.claim(queue, limit=ack + fail)]
        broker.ack(receipts[:ack])
        broker.release(receipts[ack:])

    settings: dict[str, Any] = {
        "max_attempts": 1,
        "done_retention_ms": RETENTION_MS,
        "failed_retention_ms": 2 * RETENTION_MS,
    }
    broker.configure_log(retention_ms=3 * RETENTION_MS)
    broker.create_queue("low", filter="n < 4", **settings)
    broker.create_queue("even", filter="n IN (0, 2, 4, 6)", **settings)
    broker.create_queue("old", filter="n > 4", unclaimed_retention_ms=RETENTION_MS, **settings)
    publish(9)
    work("low", ack=2, fail=1)
    work("even", ack=1, fail=2)
    broker.create_queue("late", filter="TRUE", **settings)
    broker.backfill("late")
    publish(3)
    for _ in range(4):
        clock.advance(RETENTION_MS)
        broker.sweep()
    broker.delete_queue("even", drain=True)
    broker.redrive("low")
    work("even", ack=9, fail=0)
    broker.sweep()
    broker.purge("late", states=["available"])
    publish(7)
    work("late", ack=2, fail=2)
    broker.purge("late", states=["failed", "done"])
    broker.delete_queue("late")
    clock.advance(3_600_000)
    broker.sweep()
    clock.advance(3 * RETENTION_MS)
    broker.sweep()
    broker.delete_queue("low")
    broker.close()
    most = max(check_copy(design, now_ms, rows) for now_ms, rows in engine.copies)
    assert most >= 9
    assert len(engine.copies) > 20
