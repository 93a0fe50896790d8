"""A broker's process: ``child.py URL NOTES NAME`` publishes, claims and settles until it is killed.

What it does is noted, straight to a file: what was noted outlives a kill. A database that is away
for a while fails verbs, and the process goes on.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

import msgspec

import penstock
from penstock import Message, StorageFailed, SystemClock
from penstock.testing.auditor import Kind, Note

if TYPE_CHECKING:
    from penstock import Broker, Outcome

QUEUES = ("standard", "fifo")
KINDS = {"done": Kind.ACKED, "retrying": Kind.RELEASED, "failed": Kind.FAILED}


class MachineClock(SystemClock):
    """The machine's own clock, which all processes of the test share and notes are written by."""


CLOCK = MachineClock()


class Notebook:
    def __init__(self, path: str, queue: str) -> None:
        self._file = os.open(f"{path}.{queue}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def write(self, kind: Kind, began_at_ms: int = 0, **fields: object) -> None:
        note = Note(kind=kind, at_ms=CLOCK.now_ms(), began_at_ms=began_at_ms, **fields)  # type: ignore[arg-type]
        os.write(self._file, msgspec.json.encode(note) + b"\n")


def draw(count: int) -> int:
    return int(CLOCK.random() * count)


def publish(broker: Broker, book: Notebook, queue: str, name: str) -> None:
    for number in range(1_000_000):
        group = "abc"[draw(3)]
        bodies = [f"{name}-{number}-{n}" for n in range(1 + draw(4))]
        for body in bodies:
            book.write(Kind.PUBLISHING, body=body, group=group)
        began = CLOCK.now_ms()
        try:
            ids = broker.publish(
                [
                    Message(body.encode(), {"queue": queue}, group, draw(3), draw(2) * draw(30))
                    for body in bodies
                ]
            )
        except StorageFailed:
            continue
        for body, message_id in zip(bodies, ids, strict=True):
            book.write(Kind.PUBLISHED, began, body=body, message_id=message_id, group=group)
        threading.Event().wait(0.005)


def settle(broker: Broker, book: Notebook, receipts: list[str]) -> list[Outcome]:
    choice = draw(10)
    if choice == 0:
        return []
    if choice == 1:
        for receipt in receipts:
            book.write(Kind.EXTENDING, receipt=receipt)
        for outcome in broker.extend(receipts, lease_ms=400):
            if outcome:
                deadline_ms = outcome.lease_deadline_ms
                book.write(Kind.EXTENDED, receipt=outcome.receipt, deadline_ms=deadline_ms)
    for receipt in receipts:
        book.write(Kind.SETTLING, receipt=receipt)
    if choice < 4:
        return broker.release(receipts, delay_ms=draw(20))
    return broker.ack(receipts)


def work(broker: Broker, book: Notebook, queue: str) -> None:
    while True:
        began = CLOCK.now_ms()
        try:
            deliveries = broker.claim(queue, limit=1 + draw(5), lease_ms=60 + draw(300), wait_ms=50)
            for d in deliveries:
                book.write(
                    Kind.DELIVERED,
                    began,
                    body=d.payload.decode(),
                    message_id=d.message_id,
                    receipt=d.receipt,
                    deadline_ms=d.lease_deadline_ms,
                    attempts=d.attempts,
                    group=d.group,
                )
            began = CLOCK.now_ms()
            for outcome in settle(broker, book, [d.receipt for d in deliveries]):
                kind = KINDS.get(outcome.status.value, Kind.REFUSED)
                book.write(kind, began, receipt=outcome.receipt)
        except StorageFailed:
            continue


def main(url: str, notes: str, name: str) -> None:
    broker = penstock.open(url, clock=CLOCK)
    for queue in QUEUES:
        broker.create_queue(
            queue, ordering="fifo" if queue == "fifo" else "standard", max_attempts=1_000
        )
        book = Notebook(notes, queue)
        threading.Thread(target=publish, args=(broker, book, queue, f"{queue}-{name}")).start()
        for _ in range(2):
            threading.Thread(target=work, args=(broker, book, queue)).start()
    sys.stdout.write("working\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
