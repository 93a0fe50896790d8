"""The program that tests kill: ``child.py URL NOTES MODE ROUND`` publishes and works for ever.

What the worker asks of its store, and what came of it, is noted for the auditor. A note is written
straight to the file: what was noted outlives a kill.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))

import penstock
from penstock import Message, SystemClock, Worker
from penstock.testing.auditor import Kind, Note

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock import Broker, Delivery, Outcome

CLOCK = SystemClock()
ENDS = {"done": Kind.ACKED, "retrying": Kind.RELEASED, "failed": Kind.FAILED}


class Noting:
    """A broker for a worker, which notes every call."""

    def __init__(self, broker: Broker, path: str) -> None:
        self._broker = broker
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def note(self, kind: Kind, began_at_ms: int = 0, **fields: Any) -> None:
        note = Note(kind=kind, at_ms=CLOCK.now_ms(), began_at_ms=began_at_ms, **fields)
        os.write(self._file, msgspec.json.encode(note) + b"\n")

    def publish(self, bodies: list[str]) -> None:
        for body in bodies:
            self.note(Kind.PUBLISHING, body=body)
        began = CLOCK.now_ms()
        ids = self._broker.publish([Message(body.encode(), {"queue": "q"}) for body in bodies])
        for body, message_id in zip(bodies, ids, strict=True):
            self.note(Kind.PUBLISHED, began, body=body, message_id=message_id)

    def claim(self, queue: str, **options: Any) -> list[Delivery]:
        began = CLOCK.now_ms()
        deliveries = self._broker.claim(queue, **options)
        for d in deliveries:
            self.note(
                Kind.DELIVERED,
                began,
                body=d.payload.decode(),
                message_id=d.message_id,
                receipt=d.receipt,
                deadline_ms=d.lease_deadline_ms,
                attempts=d.attempts,
            )
        return deliveries

    def extend(self, receipts: Sequence[str], *, lease_ms: int) -> list[Outcome]:
        for receipt in receipts:
            self.note(Kind.EXTENDING, receipt=receipt)
        outcomes = self._broker.extend(receipts, lease_ms=lease_ms)
        for outcome in outcomes:
            if outcome:
                deadline_ms = outcome.lease_deadline_ms
                self.note(Kind.EXTENDED, receipt=outcome.receipt, deadline_ms=deadline_ms)
        return outcomes

    def ack(self, receipts: Sequence[str]) -> list[Outcome]:
        return self._settle(receipts, "ack")

    def release(self, receipts: Sequence[str], **options: Any) -> list[Outcome]:
        return self._settle(receipts, "release", **options)

    def _settle(self, receipts: Sequence[str], verb: str, **options: Any) -> list[Outcome]:
        for receipt in receipts:
            self.note(Kind.SETTLING, receipt=receipt)
        began = CLOCK.now_ms()
        outcomes: list[Outcome] = getattr(self._broker, verb)(receipts, **options)
        for outcome in outcomes:
            kind = ENDS.get(outcome.status.value, Kind.REFUSED)
            self.note(kind, began, receipt=outcome.receipt)
        return outcomes


def main(url: str, notes: str, mode: str, round_: str) -> None:
    broker = penstock.open(url)
    broker.create_queue(
        "q", lease_ms=1_000, max_attempts=1_000, backoff_base_ms=10, backoff_cap_ms=50
    )
    noting = Noting(broker, notes)
    worker = Worker(
        cast("Broker", noting),
        "q",
        "tests.work.handlers:dies_often",
        concurrency=4 if mode == "threads" else 2,
        prefetch=20,
        mode="threads" if mode == "threads" else "processes",
    ).start()
    said = False
    for number in range(100_000):
        noting.publish([f"{round_}-{number}-{n}" for n in range(5)])
        threading.Event().wait(0.01)
        stats = worker.stats()
        enough = stats.processed > 10 and stats.released > 2
        if enough and not said and (mode == "threads" or stats.replaced):
            said = True
            children = [each.pid for each in multiprocessing.active_children()]
            sys.stdout.write(f"working {' '.join(map(str, children))}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
