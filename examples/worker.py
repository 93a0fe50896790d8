"""A worker: a function that is run for every message, on as many threads as it likes.

Orders are to be charged. The bank is busy now and then, which is worth another try soon; a card
that was stolen is worth none, so that order gives up its attempts and ends among the failed ones.
The worker claims, extends leases, acks and releases; the function only does its work.

    python examples/worker.py

The same from a shell, with a server in between: ``penstock work worker:charge --queue orders
--store penstock://HOST:PORT``.
"""

from __future__ import annotations

import tempfile
import threading

import penstock
from penstock import Broker, Delivery, Message, Retry, Worker

ORDERS = 200
charged: list[int] = []
lock = threading.Lock()


class StolenCard(Exception):
    """No bank will ever charge it."""


def charge(delivery: Delivery) -> None:
    """Charge one order."""
    order = int(delivery.payload)
    if order % 10 == 3 and delivery.attempts == 1:
        raise Retry("the bank is busy", delay_ms=20)
    if order == 66:
        raise StolenCard(f"the card of order {order}")
    with lock:
        charged.append(order)


class Counting:
    """Middleware: it sees every order that did not work out."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def on_error(self, _: Delivery, error: BaseException) -> None:
        """Count errors by their kind."""
        kind = type(error).__name__
        with lock:
            self.seen[kind] = self.seen.get(kind, 0) + 1


def work(broker: Broker) -> None:
    """Have every order charged, or given up."""
    counting = Counting()
    with Worker(broker, "orders", charge, concurrency=8, middleware=[counting]) as worker:
        while broker.stats("orders").done + broker.stats("orders").failed < ORDERS:
            worker.join(50)
    stats = worker.stats()
    print(f"{len(charged)} of {ORDERS} orders were charged, each once: {len(set(charged))}")
    for kind, count in sorted(counting.seen.items()):
        print(f"{kind}: {count} times")
    print(f"handlers ran {stats.handler_seconds.count} times; given back: {stats.released}")


def main() -> None:
    charged.clear()
    with (
        tempfile.TemporaryDirectory() as directory,
        penstock.open(f"rocksdb:{directory}") as broker,
    ):
        broker.create_queue("orders", max_attempts=3, backoff_base_ms=10)
        broker.publish([Message(b"%d" % n, {"queue": "orders"}) for n in range(ORDERS)])
        work(broker)
        for entry in broker.browse("orders", state="failed"):
            print(f"given up: order {(entry.payload or b'').decode()}, {entry.reason}")


if __name__ == "__main__":
    main()
