"""Programs that the crash tests run in a process of their own, and kill.

``child.py work URL NOTES ROUND`` has threads use a store and note what they do;
``child.py fill URL NOTES BYTES`` publishes until files can't grow; ``child.py hold URL`` opens a
store and waits; ``child.py move URL`` moves messages to and fro and says how many so far.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.noting import CLOCK, Notebook, Noting

import penstock
from penstock import Broker, Message
from penstock.stores import moving

if TYPE_CHECKING:
    from collections.abc import Callable

QUEUES = ("standard", "fifo")
SHORT_MS, LONG_MS = 200, 10_000


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def draw(count: int) -> int:
    return int(CLOCK.random() * count)


def publisher(broker: Broker, book: Notebook, queue: str, name: str) -> None:
    noting = Noting(broker, book)
    for number in range(1_000_000):
        group = "abc"[draw(3)]
        bodies = [f"{name}-{number}-{n}" for n in range(1 + draw(4))]
        noting.publish(
            [
                Message(body.encode(), {"queue": queue}, group, draw(3), draw(2) * draw(30))
                for body in bodies
            ]
        )
        threading.Event().wait(0.002)


def worker(broker: Broker, book: Notebook, queue: str) -> None:
    # Leases are short, so that some run out. How short depends on the machine: on one that takes
    # longer than that to settle, all of them would.
    noting = Noting(broker, book)
    longest_ms = SHORT_MS
    while True:
        choice = draw(10)
        lease_ms = 40 + draw(longest_ms if choice else SHORT_MS)
        deliveries = noting.claim(queue, limit=1 + draw(5), lease_ms=lease_ms, wait_ms=50)
        if choice == 0:
            continue
        receipts = [d.receipt for d in deliveries]
        if choice == 1:
            noting.extend(receipts, lease_ms=100 + longest_ms)
        if choice < 4:
            outcomes = noting.release(receipts, delay_ms=draw(20))
        else:
            outcomes = noting.ack(receipts)
        if not all(outcomes):
            longest_ms = min(2 * longest_ms, LONG_MS)
        elif outcomes:
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
