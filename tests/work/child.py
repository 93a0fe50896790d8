"""The program that tests kill: ``child.py URL NOTES MODE ROUND QUEUE…`` publishes and works.

It does so for ever; a queue is FIFO if that is its name. What its workers ask of their store, and
what came of it, is noted for the auditor. It says ``working`` with the ids of its child processes,
and ``refused`` once a worker has lost a lease.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.crash.child import say
from tests.noting import CLOCK, Notebook, Noting

import penstock
from penstock import Message, StorageFailed, Worker

if TYPE_CHECKING:
    from penstock import Broker


def started(noting: Noting, queue: str, mode: str) -> Worker:
    noting.create_queue(
        queue,
        ordering="fifo" if queue == "fifo" else "standard",
        lease_ms=1_000,
        max_attempts=1_000,
        backoff_base_ms=10,
        backoff_cap_ms=50,
    )
    return Worker(
        cast("Broker", noting),
        queue,
        "tests.work.handlers:dies_often",
        concurrency=4 if mode == "threads" else 2,
        prefetch=20,
        mode="threads" if mode == "threads" else "processes",
    ).start()


def works(worker: Worker, mode: str) -> bool:
    stats = worker.stats()
    return stats.processed > 10 and stats.released > 2 and (mode == "threads" or stats.replaced > 0)


def main(url: str, notes: str, mode: str, round_: str, *queues: str) -> None:
    broker = penstock.open(url, clock=CLOCK)
    notings = {queue: Noting(broker, Notebook(notes, queue)) for queue in queues}
    workers = [started(noting, queue, mode) for queue, noting in notings.items()]
    said: set[str] = set()
    for number in range(100_000):
        for queue, noting in notings.items():
            name = f"{queue}-{round_}-{number}"
            # A database that is away fails it.
            with suppress(StorageFailed):
                noting.publish(
                    [Message(f"{name}-{g}".encode(), {"queue": queue}, g) for g in "abcde"]
                )
        threading.Event().wait(0.01)
        if "working" not in said and all(works(worker, mode) for worker in workers):
            said.add("working")
            children = [str(each.pid) for each in multiprocessing.active_children()]
            say(" ".join(["working", *children]))
        if "refused" not in said and any(w.stats().lost + w.stats().stale for w in workers):
            said.add("refused")
            say("refused")


if __name__ == "__main__":
    main(*sys.argv[1:])
