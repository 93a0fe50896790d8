"""Programs that the crash tests run in a process of their own, and kill.

``child.py work URL NOTES ROUND`` has threads use a store and note what they do;
``child.py fill URL NOTES BYTES`` publishes until files can't grow; ``child.py hold URL`` opens a
store and waits; ``child.py move URL`` moves messages to and fro and says how many so far. A note
is written straight to the file: what was noted outlives a kill.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from typing import TYPE_CHECKING

import msgspec

import penstock
from penstock import Broker, Message, SystemClock
from penstock.stores import moving
from penstock.testing.auditor import Kind, Note

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CLOCK = SystemClock()
QUEUES = ("standard", "fifo")
SHORT_MS, LONG_MS = 200, 10_000


def notes_of(path: Path) -> list[Note]:
    """Read notes; a kill may have cut the last line of a process short."""
    notes = []
    for line in path.read_bytes().splitlines():
        try:
            notes.append(msgspec.json.decode(line, type=Note))
        except msgspec.DecodeError:
            continue
    return notes


class Notebook:
    def __init__(self, path: str, queue: str) -> None:
        self._file = os.open(f"{path}.{queue}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def write(self, kind: Kind, began_at_ms: int = 0, **fields: object) -> int:
        at_ms = CLOCK.now_ms()
        note = Note(kind=kind, at_ms=at_ms, began_at_ms=began_at_ms, **fields)  # type: ignore[arg-type]
        os.write(self._file, msgspec.json.encode(note) + b"\n")
        return at_ms


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def draw(count: int) -> int:
    return int(CLOCK.random() * count)


def publisher(broker: Broker, book: Notebook, queue: str, name: str) -> None:
    for number in range(1_000_000):
        group = "abc"[draw(3)]
        bodies = [f"{name}-{number}-{n}" for n in range(1 + draw(4))]
        for body in bodies:
            book.write(Kind.PUBLISHING, body=body, group=group)
        began = CLOCK.now_ms()
        ids = broker.publish(
            [
                Message(body.encode(), {"queue": queue}, group, draw(3), draw(2) * draw(30))
                for body in bodies
            ]
        )
        for body, message_id in zip(bodies, ids, strict=True):
            book.write(Kind.PUBLISHED, began, body=body, message_id=message_id, group=group)
        threading.Event().wait(0.002)


def worker(broker: Broker, book: Notebook, queue: str) -> None:
    # Leases are short, so that some run out. How short depends on the machine: on one that takes
    # longer than that to settle, all of them would.
    longest_ms = SHORT_MS
    while True:
        began = CLOCK.now_ms()
        choice = draw(10)
        lease_ms = 40 + draw(longest_ms if choice else SHORT_MS)
        deliveries = broker.claim(queue, limit=1 + draw(5), lease_ms=lease_ms, wait_ms=50)
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
        if choice == 0:
            continue
        receipts = [d.receipt for d in deliveries]
        if choice == 1:
            for receipt in receipts:
                book.write(Kind.EXTENDING, receipt=receipt)
            for outcome in broker.extend(receipts, lease_ms=100 + longest_ms):
                if outcome:
                    deadline_ms = outcome.lease_deadline_ms
                    book.write(Kind.EXTENDED, receipt=outcome.receipt, deadline_ms=deadline_ms)
        for receipt in receipts:
            book.write(Kind.SETTLING, receipt=receipt)
        began = CLOCK.now_ms()
        if choice < 4:
            outcomes = broker.release(receipts, delay_ms=draw(20))
        else:
            outcomes = broker.ack(receipts)
        kinds = {"done": Kind.ACKED, "retrying": Kind.RELEASED, "failed": Kind.FAILED}
        ends = [kinds.get(outcome.status.value, Kind.REFUSED) for outcome in outcomes]
        for kind, outcome in zip(ends, outcomes, strict=True):
            book.write(kind, began, receipt=outcome.receipt)
        if Kind.REFUSED in ends:
            longest_ms = min(2 * longest_ms, LONG_MS)
        elif ends:
            longest_ms = max(longest_ms // 2, SHORT_MS)


def work(url: str, notes: str, round_: str) -> None:
    broker = penstock.open(url)
    for queue in QUEUES:
        ordering = "fifo" if queue == "fifo" else "standard"
        broker.create_queue(queue, ordering=ordering, max_attempts=1000, bucket_exponent=1)
        book = Notebook(notes, queue)
        for n in range(2):
            name = f"{queue}-{round_}-{n}"
            threading.Thread(target=publisher, args=(broker, book, queue, name)).start()
            threading.Thread(target=worker, args=(broker, book, queue)).start()
    say("working")


def fill(url: str, notes: str, size: str) -> None:
    broker = penstock.open(url)
    broker.create_queue("a", filter="x = 1")
    broker.create_queue("b", filter="x = 1")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = int(size)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    confirmed = []
    raised = "nothing"
    try:
        for number in range(10_000):
            body = b"%06d" % number * 1000
            confirmed.append(broker.publish([Message(body, {"x": 1})] * 3))
    except Exception as error:
        raised = type(error).__name__
    again = "nothing"
    try:
        broker.publish([Message(b"x" * limit, {"x": 1})])
    except Exception as error:
        again = type(error).__name__
    say(msgspec.json.encode([raised, again, confirmed]).decode())
    os._exit(0)


def hold(url: str) -> None:
    with penstock.open(url):
        say("holding")
        sys.stdin.read()


def move(url: str) -> None:
    # Many commits for each move, so that a kill comes between two of them.
    moving.STEP_MESSAGES = 7  # type: ignore[misc]
    broker = penstock.open(url)
    say("moving")
    moved = 0
    while True:
        for queue, to in (("a", "b"), ("b", "c"), ("c", "a")):
            for state in ("available", "failed"):
                moved += broker.move(queue, to, state=state)
            held = [delivery.receipt for delivery in broker.claim(to, limit=50)]
            broker.release(held, delay_ms=0, reason="again")
            say(str(moved))


PROGRAMS: dict[str, Callable[..., None]] = {
    "work": work,
    "fill": fill,
    "hold": hold,
    "move": move,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
