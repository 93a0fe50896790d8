"""A store with messages in every state, and verbs that are ready to be called on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.stores.failing import make_engine, open_on

import penstock
from penstock import Message, State
from penstock.clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DAY_MS = 86_400_000


class Scene:
    """A broker with messages in every state, and receipts that are good."""

    def __init__(self, kind: str, design: str, routing: str, path: Path) -> None:
        self.clock = ManualClock()
        self.engine = make_engine(kind, design, path)
        self.design, self.routing = design, routing
        self.broker = open_on(self.engine, design, self.clock, routing)
        self.number = 0
        settings: dict[str, Any] = {"bucket_exponent": 1, "max_attempts": 2, "backoff_base_ms": 500}
        settings |= {"done_retention_ms": DAY_MS, "failed_retention_ms": DAY_MS}
        self.broker.create_queue("dead", **settings)
        self.broker.create_queue("q", unclaimed_retention_ms=DAY_MS, dead_letter="dead", **settings)
        self.broker.create_queue("f", ordering="fifo", **settings)
        self.broker.create_queue("kept", filter="kept = 1", **settings)
        self.refill()

    def refill(self) -> None:
        """Bring in some more of everything."""
        self.send("q", 12, group="a")
        self.send("q", 3, group="b", priority=2)
        self.send("q", 2, delay_ms=1_000)
        self.send("f", 4, group="a")
        self.send("f", 2, group="b", delay_ms=1_000)
        self.send("nowhere", 2)
        if self.routing == "pipeline":
            while penstock.route_once(self.broker):
                pass

    def send(self, queue: str, count: int, **fields: Any) -> None:
        self.number += 1
        attributes: dict[str, Any] = {"queue": queue, "kept": self.number % 2}
        self.broker.publish([Message(b"x" * 40, attributes, **fields) for _ in range(count)])

    def receipts(self, queue: str, count: int) -> list[str]:
        found = [each.receipt for each in self.broker.claim(queue, limit=count, lease_ms=5_000)]
        if len(found) < count:
            self.refill()
            found += [each.receipt for each in self.broker.claim(queue, limit=count)]
        return found

    def fail_some(self, queue: str) -> None:
        """Have messages fail for good."""
        for _ in range(2):
            self.broker.release(self.receipts(queue, 3), delay_ms=0, reason="no")
            self.clock.advance(1)


def publish(scene: Scene) -> Callable[[], object]:
    attributes: dict[str, Any] = {"queue": "q", "kept": 1}
    batch = [Message(b"1", attributes, dedup_id=f"d{scene.number}"), Message(b"2", {"queue": "f"})]
    batch += [Message(b"3", {"queue": "none"}), Message(b"4", attributes, delay_ms=3_000)]
    return lambda: scene.broker.publish(batch)


def claim(scene: Scene) -> Callable[[], object]:
    scene.refill()
    scene.receipts("q", 2)
    # Leases and delays that are over by then are seen to by the claim.
    scene.clock.advance(6_000)
    return lambda: scene.broker.claim("q", limit=5)


def claim_fifo(scene: Scene) -> Callable[[], object]:
    scene.refill()
    scene.clock.advance(1_500)
    return lambda: scene.broker.claim("f", limit=5)


def ack(scene: Scene) -> Callable[[], object]:
    receipts = scene.receipts("q", 3) + scene.receipts("f", 1)
    return lambda: scene.broker.ack(receipts)


def release(scene: Scene) -> Callable[[], object]:
    receipts = scene.receipts("q", 3) + scene.receipts("f", 1)
    return lambda: scene.broker.release(receipts, reason="no")


def extend(scene: Scene) -> Callable[[], object]:
    receipts = scene.receipts("q", 3)[:2]
    return lambda: scene.broker.extend(receipts, lease_ms=9_000)


def sweep(scene: Scene) -> Callable[[], object]:
    scene.fail_some("q")
    scene.broker.ack(scene.receipts("q", 2))
    scene.receipts("f", 2)
    scene.clock.advance(2 * DAY_MS)
    scene.broker.configure_log(retention_ms=DAY_MS)
    return lambda: scene.broker.sweep(budget=5)


def redrive(scene: Scene) -> Callable[[], object]:
    scene.fail_some("f")
    return lambda: scene.broker.redrive("f")


def move(scene: Scene) -> Callable[[], object]:
    scene.refill()
    scene.broker.ack(scene.receipts("kept", 1))
    return lambda: scene.broker.move("q", "kept", state="available", limit=4)


def purge(scene: Scene) -> Callable[[], object]:
    scene.refill()
    scene.receipts("f", 1)
    return lambda: scene.broker.purge("f", states=list(State))


def create_queue(scene: Scene) -> Callable[[], object]:
    scene.number += 1
    return lambda: scene.broker.create_queue(f"n{scene.number}", filter="kept = 1")


def update_queue(scene: Scene) -> Callable[[], object]:
    scene.number += 1
    text, retention_ms = f"kept = {scene.number}", DAY_MS + scene.number
    return lambda: scene.broker.update_queue(
        "kept", filter=text, unclaimed_retention_ms=retention_ms
    )


def delete_queue(scene: Scene) -> Callable[[], object]:
    scene.broker.create_queue("gone", filter="queue = 'gone' OR kept = 1")
    scene.send("gone", 5)
    scene.broker.ack([each.receipt for each in scene.broker.claim("gone", limit=2)])

    def delete() -> None:
        if any(spec.name == "gone" for spec in scene.broker.queues()):
            scene.broker.delete_queue("gone")

    return delete


def drain_queue(scene: Scene) -> Callable[[], object]:
    scene.broker.create_queue("gone", filter="queue = 'gone'")
    scene.send("gone", 2)
    scene.broker.ack([each.receipt for each in scene.broker.claim("gone", limit=2)])

    def delete() -> None:
        if any(spec.name == "gone" for spec in scene.broker.queues()):
            scene.broker.delete_queue("gone", drain=True)

    return delete


def backfill(scene: Scene) -> Callable[[], object]:
    scene.number += 1
    scene.broker.update_queue("kept", filter=f"kept IN (0, {scene.number})")
    return lambda: scene.broker.backfill("kept")


def trim(scene: Scene) -> Callable[[], object]:
    scene.broker.ack(scene.receipts("q", 3))
    return lambda: scene.broker.trim("q", state="done", before=1_000)


def configure_log(scene: Scene) -> Callable[[], object]:
    scene.number += 1
    return lambda: scene.broker.configure_log(logs=1 + scene.number % 3)


def look(scene: Scene) -> Callable[[], object]:
    scene.refill()
    scene.clock.advance(1_500)

    def read() -> None:
        for state in State:
            page = scene.broker.browse("q", state=state, limit=5)
            for entry in page[:1]:
                scene.broker.attempts("q", entry.message_id)
        scene.broker.stats("f")
        scene.broker.log_stats()
        scene.broker.view(stats=True).close()

    return read


def route(scene: Scene) -> Callable[[], object]:
    scene.send("q", 3)
    return lambda: penstock.route_once(scene.broker)


VERBS = [
    *(publish, claim, claim_fifo, ack, release, extend, sweep, redrive, move, purge, trim, look),
    *(create_queue, update_queue, delete_queue, drain_queue, backfill, configure_log),
]
