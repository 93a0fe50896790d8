"""A broker's process: ``child.py URL NOTES NAME`` publishes, claims and settles until it is killed.

What it does is noted. A database that is away for a while fails verbs, and the process goes on.
"""

from __future__ import annotations

import sys
import threading
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.crash.child import QUEUES, publisher, say, worker
from tests.noting import CLOCK, Notebook

import penstock
from penstock import StorageFailed

if TYPE_CHECKING:
    from collections.abc import Callable


def keep_on(task: Callable[[int], None]) -> None:
    """Begin anew, under another number, whenever the database has failed a verb."""
    for number in count():
        try:
            task(number)
        except StorageFailed:
            continue


def main(url: str, notes: str, name: str) -> None:
    broker = penstock.open(url, clock=CLOCK)
    for queue in QUEUES:
        broker.create_queue(
            queue, ordering="fifo" if queue == "fifo" else "standard", max_attempts=1_000
        )
        book = Notebook(notes, queue)

        def publish(number: int, queue: str = queue, book: Notebook = book) -> None:
            publisher(broker, book, queue, f"{queue}-{name}-{number}")

        def work(_: int, queue: str = queue, book: Notebook = book) -> None:
            worker(broker, book, queue)

        for task in (publish, work, work):
            threading.Thread(target=keep_on, args=(task,)).start()
    say("working")


if __name__ == "__main__":
    main(*sys.argv[1:])
