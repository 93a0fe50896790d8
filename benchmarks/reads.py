"""What a bulk read costs publishers, and how long reads of parts of a store take.

python benchmarks/reads.py [--messages 300000] [--rounds 5] [--seconds 4] [--against OTHER/src]

publish
    One client publishes messages of 100 bytes, one after the other and each durable: alone, and
    while four readers in another process read the table ``log`` with all its columns over and over.
    Server, publisher and readers share this machine. Rounds alternate; a figure is the median of
    those of its rounds. ``--against`` has rounds of a server of other sources in between.
reads
    Tables through Flight, without Spark: rows, seconds, and CPU seconds of the server.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from common import describe, directory, show

import penstock
from penstock.clock import SystemClock
from penstock.flight.client import FlightStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.synchronize import Event

    from penstock.client import Client

CHUNK = 5_000
READERS = 4
READS: dict[str, tuple[str, str | None]] = {
    "log": ("log", None),
    "log, the last 1,000": ("log", "offset > {last}"),
    "active": ("active", None),
    "active, in flight": ("active", "state = 'in_flight'"),
    "groups": ("groups", None),
}


class Server(NamedTuple):
    """A server's process, and where it listens."""

    pid: int
    native: str
    flight: str

    def cpu_s(self) -> float:
        """Return the CPU seconds that it has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def serving(store: Path, source: str | None = None) -> Iterator[Server]:
    """Run ``penstock serve``, of these or of other sources."""
    ports = store.with_suffix(".ports")
    ports.unlink(missing_ok=True)
    program = [sys.executable, "-c", "from penstock.cli.main import main; main()", "serve"]
    settings = ["--native", "127.0.0.1:0", "--flight", "127.0.0.1:0", "--log-level", "error"]
    with subprocess.Popen(
        [*program, "--store", f"rocksdb:{store}", *settings, "--port-file", str(ports)],
        stdout=subprocess.DEVNULL,
        env=os.environ if source is None else {**os.environ, "PYTHONPATH": source},
    ) as process:
        waiting = threading.Condition()
        while not ports.exists() or "flight" not in ports.read_text():
            assert process.poll() is None, "the server did not start"
            with waiting:
                SystemClock().wait(waiting, 50)
        port = dict(line.split() for line in ports.read_text().splitlines())
        try:
            yield Server(
                process.pid,
                f"penstock://127.0.0.1:{port['native']}",
                f"grpc://127.0.0.1:{port['flight']}",
            )
        finally:
            process.terminate()
            process.wait(60)


def fill(store: Path, count: int) -> None:
    """Publish messages to ten queues, in 85 groups each."""
    with penstock.open(f"rocksdb:{store}", durability="relaxed") as broker:
        for number in range(10):
            broker.create_queue(f"q{number}", filter=f"kind = 'k{number}'")
        for start in range(0, count, CHUNK):
            broker.publish(
                penstock.Message(
                    b"x" * 100, {"kind": f"k{n % 10}", "n": n}, group=f"g{n // 10 % 85}"
                )
                for n in range(start, start + CHUNK)
            )


# --- publishers -----------------------------------------------------------------------------------


def read_on(flight: str, over: Event, begun: Event) -> None:
    """Read the log in four threads until it is over."""
    client = FlightStore(flight)

    def read(part: int) -> None:
        while not over.is_set():
            for _ in client.read(client.plan_read("log", partitions=READERS).tickets[part]):
                begun.set()
                if over.is_set():
                    return

    threads = [threading.Thread(target=read, args=(part,)) for part in range(READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def reading(flight: str) -> Iterator[None]:
    """Have readers read meanwhile."""
    context = multiprocessing.get_context("spawn")
    over, begun = context.Event(), context.Event()
    readers = context.Process(target=read_on, args=(flight, over, begun))
    readers.start()
    begun.wait(60)
    try:
        yield
    finally:
        over.set()
        readers.join(60)


def publish(client: Client, seconds: float) -> tuple[float, float]:
    """Return the median and the 99 % of the time that a publish took, in milliseconds."""
    took = []
    end = time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        client.publish([penstock.Message(b"x" * 100, {"kind": "none"})])
        took.append((time.perf_counter() - begin) * 1000)
    took.sort()
    return took[len(took) // 2], took[len(took) * 99 // 100]


def publishers(store: Path, rounds: int, seconds: float, against: str | None) -> list[list[str]]:
    """Measure publishers with and without readers."""
    sources: dict[str, str | None] = {"this": None}
    if against is not None:
        sources["other"] = against
    found: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for name, source in sources.items():
            with serving(store, source) as server, penstock.connect(server.native) as client:
                publish(client, 0.5)
                alone = publish(client, seconds)
                with reading(server.flight):
                    disturbed = publish(client, seconds)
                found.setdefault((name, False), []).append(alone)
                found.setdefault((name, True), []).append(disturbed)
    return [
        [
            name,
            "during a read" if busy else "alone",
            *(f"{statistics.median(column):.1f} ms" for column in zip(*each, strict=True)),
        ]
        for (name, busy), each in found.items()
    ]


# --- reads ----------------------------------------------------------------------------------------


def reads(store: Path, count: int) -> list[list[str]]:
    """Read tables, and parts of them."""
    rows = []
    with serving(store) as server:
        client = FlightStore(server.flight)
        last = max(client.read_table("log", columns=["offset"]).column(0).to_pylist())
        with penstock.connect(server.native) as worker:
            worker.claim("q0", limit=100, lease_ms=3_600_000)
        for title, (table, where) in READS.items():
            chosen = None if where is None else where.format(last=last - 1_000)
            begin, spent = time.perf_counter(), server.cpu_s()
            found = client.read_table(table, where=chosen).num_rows
            took, cpu = time.perf_counter() - begin, server.cpu_s() - spent
            rows.append([title, f"{found:,}", f"{took:.2f} s", f"{cpu:.2f} s"])
    assert count <= last
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description="What a bulk read costs.")
    options.add_argument("--messages", type=int, default=300_000)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=4.0)
    options.add_argument("--against", help="the directory src of another version")
    chosen = options.parse_args()
    describe()
    with directory() as place:
        store = place / "store"
        fill(store, chosen.messages)
        title = f"Publish, {chosen.messages:,} messages in the store"
        rows = publishers(store, chosen.rounds, chosen.seconds, chosen.against)
        show(title, ["server", "", "p50", "p99"], rows)
        show("Reads", ["table", "rows", "time", "CPU"], reads(store, chosen.messages))


if __name__ == "__main__":
    main()
