"""The console with many queues: time of the overview, and its cost to publishers.

A server on a RocksDB store with 10,000 queues and a million messages. First its overview is asked
for: when nobody has looked before, and then again and again. Then a client
publishes for some seconds with nobody looking and with a viewer of live numbers, in turns: compare
the ratio, which is of one run.

    python benchmarks/console.py [--queues 10000] [--messages 1000000]
"""

from __future__ import annotations

import argparse
import http.client
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from common import describe, directory, show

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BATCH = 10
# Longer than a look counts.
FORGET_SECONDS = 65


def fill(url: str, queues: int, messages: int) -> None:
    with penstock.open(url, durability="relaxed") as broker:
        for number in range(queues):
            broker.create_queue(f"queue-{number:05}")
        for begin in range(0, messages, 1_000):
            broker.publish(
                penstock.Message(b"x" * 100, {"queue": f"queue-{each % queues:05}"})
                for each in range(begin, begin + 1_000)
            )


@contextmanager
def serving(url: str, place: Path) -> Iterator[tuple[tuple[str, int], str]]:
    """Run a server on a store; give the address of HTTP and the location for native clients."""
    ports = place / "ports"
    command = [sys.executable, "-m", "penstock", "serve", "--store", url, "--durability", "relaxed"]
    command += ["--http", "127.0.0.1:0", "--native", "127.0.0.1:0", "--port-file", str(ports)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not ports.exists():
            threading.Event().wait(0.1)
        found = dict(line.split() for line in ports.read_text().splitlines())
        yield ("127.0.0.1", int(found["http"])), f"penstock://127.0.0.1:{found['native']}"
    finally:
        process.terminate()
        process.wait()


def overview_ms(address: tuple[str, int]) -> float:
    """Ask for the overview on a connection of its own."""
    connection = http.client.HTTPConnection(*address)
    begin = perf_counter()
    connection.request("GET", "/console/")
    body = connection.getresponse().read()
    spent = perf_counter() - begin
    assert body.count(b"<tr>") > 1
    connection.close()
    return spent * 1000


@contextmanager
def viewer(address: tuple[str, int]) -> Iterator[None]:
    """Read live numbers, as an open page does."""
    connection = http.client.HTTPConnection(*address)
    connection.request("GET", "/console/live")
    answer = connection.getresponse()
    stopped = threading.Event()

    def read() -> None:
        while not stopped.is_set() and answer.readline():
            pass

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    yield
    stopped.set()
    reader.join(10)
    connection.close()


def publish_rate(location: str, seconds: float) -> float:
    """Publish batches one after the other; return messages in a second."""
    with penstock.connect(location) as client:
        count, begin = 0, perf_counter()
        while (spent := perf_counter() - begin) < seconds:
            client.publish(
                [penstock.Message(b"x" * 100, {"queue": f"queue-{count % 100:05}"})] * BATCH
            )
            count += BATCH
    return count / spent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--queues", type=int, default=10_000)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    describe()
    pause = threading.Event()
    with directory() as place, ExitStack() as stack:
        url = f"rocksdb:{place}/store"
        fill(url, options.queues, options.messages)
        address, location = stack.enter_context(serving(url, place))
        # Until the server has compiled the templates.
        pause.wait(10)
        first = overview_ms(address)
        pause.wait(10)
        later = [overview_ms(address) for _ in range(20)]
        alone, watched = [], []
        for _ in range(options.rounds):
            pause.wait(FORGET_SECONDS)
            alone.append(publish_rate(location, options.seconds))
            with viewer(address):
                watched.append(publish_rate(location, options.seconds))
    ratios = sorted(b / a for a, b in zip(alone, watched, strict=True))
    show(
        f"console: {options.queues:,} queues, {options.messages:,} messages",
        ("what", "figure"),
        [
            ("overview, when nobody looked before", f"{first:.0f} ms"),
            ("overview, median of 20", f"{median(later):.0f} ms"),
            ("overview, slowest of 20", f"{max(later):.0f} ms"),
            ("published /s, nobody looks", f"{median(alone):,.0f}"),
            ("published /s, with a viewer", f"{median(watched):,.0f}"),
            ("ratio, median", f"{median(ratios):.2f}"),
            ("ratios of the rounds", " ".join(f"{each:.2f}" for each in ratios)),
        ],
    )


if __name__ == "__main__":
    main()
