"""Messages per second of a worker with a handler that does nothing, next to a plain loop.

The loop claims and acks by itself, in batches of 100 and one by one. Each round begins with a queue
that is full, on a RocksDB of its own; in one process, in turns, so that figures of one run can be
compared with each other. The last rows are of workers on a server in a process of its own.

    python benchmarks/worker.py [--messages 20000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import functools
from time import perf_counter
from typing import TYPE_CHECKING, Any

from common import describe, directory, show

import penstock
from server import server

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock import Broker, Delivery

PAYLOAD = b"x" * 1000
LIMITED = 2_000


def nothing(delivery: Delivery) -> None:
    """Handle a message."""


async def nothing_async(delivery: Delivery) -> None:
    """Handle a message."""


def loop(broker: Broker, messages: int, *, batch: int) -> float:
    """Time the verbs alone."""
    start = perf_counter()
    left = messages
    while left:
        deliveries = broker.claim("jobs", limit=min(batch, left))
        broker.ack([delivery.receipt for delivery in deliveries])
        left -= len(deliveries)
    return perf_counter() - start


def worker(broker: Broker | str, messages: int, *, handler: Any, **options: Any) -> float:
    """Time a worker from its first end to its last: child processes take a while to start."""
    with penstock.Worker(broker, "jobs", handler, **options) as running:
        while not (first := running.stats().processed):
            running.join(1)
        start = perf_counter()
        while running.stats().processed < messages:
            running.join(1)
        seconds = perf_counter() - start
    return seconds * messages / max(1, messages - first)


def measure(path: Path, messages: int, run: Callable[[Broker, int], float]) -> float:
    with penstock.open(f"rocksdb:{path}") as broker:
        broker.create_queue("jobs")
        for at in range(0, messages, 1000):
            count = min(1000, messages - at)
            broker.publish([penstock.Message(PAYLOAD, {"queue": "jobs"})] * count)
        return run(broker, messages)


def measure_served(path: Path, messages: int) -> float:
    """Time a worker with its defaults on a server."""
    with server(f"rocksdb:{path}") as (port, _):
        url = f"penstock://127.0.0.1:{port}"
        with penstock.connect(url) as client:
            client.create_queue("jobs")
            for _ in range(0, messages, 1000):
                client.publish([penstock.Message(PAYLOAD, {"queue": "jobs"})] * 1000)
        return worker(url, messages, handler=nothing)


def runs() -> dict[str, tuple[bool, Callable[[Broker, int], float]]]:
    """Name what is measured, whether it is slow, and how it is run."""
    made: dict[str, tuple[bool, Callable[[Broker, int], float]]] = {
        "plain loop, batches of 100": (False, functools.partial(loop, batch=100)),
        "plain loop, one by one": (True, functools.partial(loop, batch=1)),
    }
    made["threads, concurrency 4, prefetch as it adapts"] = (
        False,
        functools.partial(worker, handler=nothing),
    )
    for count, ahead in ((1, 1), (4, 4), (4, 200), (16, 200)):
        made[f"threads, concurrency {count}, prefetch {ahead}"] = (
            ahead < 100,
            functools.partial(worker, handler=nothing, concurrency=count, prefetch=ahead),
        )
    for count, ahead in ((4, 4), (100, 200)):
        made[f"async, concurrency {count}, prefetch {ahead}"] = (
            ahead < 100,
            functools.partial(worker, handler=nothing_async, concurrency=count, prefetch=ahead),
        )
    for count, ahead in ((1, 200), (2, 200)):
        made[f"processes, concurrency {count}, prefetch {ahead}"] = (
            False,
            functools.partial(
                worker, handler=nothing, concurrency=count, prefetch=ahead, mode="processes"
            ),
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    describe()
    rows = []
    for name, (slow, run) in runs().items():
        messages = min(options.messages, LIMITED) if slow else options.messages
        times = []
        for _ in range(options.rounds):
            with directory() as path:
                times.append(measure(path / "db", messages, run))
        rows.append((name, f"{messages / min(times):,.0f}"))
    times = []
    for _ in range(options.rounds):
        with directory() as path:
            times.append(measure_served(path / "db", options.messages))
    rows.append(("threads, on a server", f"{options.messages / min(times):,.0f}"))
    show("messages per second, 1 KB payloads, fsync", ("", "messages/s"), rows)


if __name__ == "__main__":
    main()
