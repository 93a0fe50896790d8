"""Programs that the crash tests run in a process of their own, and kill.

``child.py work URL NOTES ROUND`` has threads use a store and note what they do;
``child.py endure URL NOTES`` does the same through failures of the store, and says when it is away
and back;
``child.py fill URL NOTES BYTES`` publishes until files can't grow, and again when they can;
``child.py hold URL`` opens a store and waits; ``child.py move URL`` moves messages to and fro and
says how many so far.
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
from penstock import Broker, BrokerClosed, Message, StorageFailed
from penstock.store.kv import move as moving

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


def enduring(task: Callable[..., None], *arguments: object) -> None:
    """Do a task, and begin it again when the store fails, until the broker is closed."""
    tries = 0
    while True:
        tries += 1
        try:
            task(
                *arguments[:-1], f"{arguments[-1]}-{tries}" if task is publisher else arguments[-1]
            )
        except StorageFailed:
            threading.Event().wait(0.02)
        except BrokerClosed:
            return


def begin_enduring(broker: Broker, notes: str) -> list[threading.Thread]:
    threads = []
    for queue in QUEUES:
        ordering = "fifo" if queue == "fifo" else "standard"
        broker.create_queue(queue, ordering=ordering, max_attempts=1000, bucket_exponent=1)
        book = Notebook(notes, queue)
        publishing = (publisher, broker, book, queue, queue)
        for arguments in (publishing, (worker, broker, book, queue)):
            threads.append(threading.Thread(target=enduring, args=arguments, daemon=True))
            threads[-1].start()
    return threads


def endure(url: str, notes: str) -> None:
    broker = penstock.open(url)
    begin_enduring(broker, notes)
    say("working")
    was_away = False
    while True:
        threading.Event().wait(0.02)
        if (broker._store.health().away is not None) != was_away:
            was_away = not was_away
            say("away" if was_away else "back")


def fill(url: str, notes: str, size: str) -> None:
    broker = penstock.open(url)
    broker.create_queue("a", filter="x = 1")
    broker.create_queue("b", filter="x = 1")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = int(size)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    confirmed = []
    # Kept, with the frames that they came through, as a program may.
    raised: list[Exception] = []
    try:
        for number in range(10_000):
            body = b"%06d" % number * 1000
            confirmed.append(broker.publish([Message(body, {"x": 1})] * 3))
    except Exception as error:
        raised.append(error)
    try:
        broker.publish([Message(b"x" * limit, {"x": 1})])
    except Exception as error:
        raised.append(error)
    seen = [broker.stats("a").available, len(broker.browse("b", limit=10_000)), broker.check().ok]
    say(msgspec.json.encode([[type(e).__name__ for e in raised], seen, confirmed]).decode())
    if sys.stdin.readline() == "go on\n":
        say(str(broker._store.health().away))
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        while broker._store.health().away is not None:
            threading.Event().wait(0.02)
        say(str(broker.publish([Message(b"room again", {"x": 1})])[0]))
        broker.close()
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
    "endure": endure,
    "fill": fill,
    "hold": hold,
    "move": move,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
