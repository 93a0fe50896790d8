"""How long clients wait when a server is killed and its standby takes over.

A server on object storage, a standby beside it at the same port, and clients that publish one
message after the other. The server is killed; the gap ends when a publish that was begun after
that is confirmed. Round by round the standby is the next one to be killed.

    python benchmarks/standby.py [--rounds 5] [--after 3s 6s] [--s3 slatedb+s3://BUCKET/PREFIX]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import socket
import statistics
import subprocess
import sys
import threading
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from common import describe, directory, show

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CLIENTS = 8
PAYLOAD = b"x" * 1000
WARM_S = 3.0
PAUSE = threading.Event()


class Served:
    """`penstock serve` as a process; what it says goes to a file."""

    def __init__(self, url: str, port: int, said: Path, after: str) -> None:
        self._said = said
        command = [sys.executable, "-c", "from penstock.cli.main import main; main()", "serve"]
        command += ["--store", url, "--native", f"127.0.0.1:{port}"]
        command += ["--standby", "--standby-after", after]
        with said.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)

    def wait_for(self, words: str) -> float:
        """Wait until it has said something; return when."""
        while words not in self._said.read_text():
            assert self.process.poll() is None, self._said.read_text()
            PAUSE.wait(0.01)
        return perf_counter()


class Load:
    """Clients that publish; knows when the last publishes were confirmed and when they began."""

    def __init__(self, port: int) -> None:
        self._stop = threading.Event()
        self._client = penstock.connect(f"penstock://127.0.0.1:{port}", patience_ms=120_000)
        self._client.create_queue("q")
        self.confirmed: list[tuple[float, float]] = [(0.0, 0.0)] * CLIENTS
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        while not self._stop.is_set():
            began = perf_counter()
            with contextlib.suppress(penstock.PenstockError):
                self._client.send("q", PAYLOAD)
                self.confirmed[number] = began, perf_counter()

    def first_after(self, moment: float) -> float:
        """Wait for a publish that was begun after a moment; return when it was confirmed."""
        while not (ends := [end for began, end in self.confirmed if began > moment]):
            PAUSE.wait(0.002)
        return min(ends)

    def close(self) -> None:
        """End all of them."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._client.close()


class Gap(NamedTuple):
    """Seconds from a kill until it was noticed, the standby served, and clients had gone on."""

    noticed: float
    served: float
    went_on: float


def gaps(url: str, after: str, rounds: int, place: Path) -> Iterator[Gap]:
    """Kill the owner again and again, its standby being the next one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    names = itertools.count()
    owner = Served(url, port, place / f"{next(names)}", after)
    load = None
    try:
        owner.wait_for("serving ")
        load = Load(port)
        for _ in range(rounds):
            standby = Served(url, port, place / f"{next(names)}", after)
            try:
                standby.wait_for("standing by")
                PAUSE.wait(WARM_S)
                owner.process.kill()
                killed = perf_counter()
                noticed = standby.wait_for("taking over") - killed
                served = standby.wait_for("serving ") - killed
                yield Gap(noticed, served, load.first_after(killed) - killed)
            finally:
                owner.process.kill()
                owner.process.wait()
                owner = standby
    finally:
        if load is not None:
            load.close()
        owner.process.kill()
        owner.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--after", nargs="+", default=["3s", "6s"])
    parser.add_argument("--s3", help="slatedb+s3://BUCKET/PREFIX")
    options = parser.parse_args()
    describe()
    rows = []
    for after in options.after:
        with directory() as place:
            url = f"slatedb+file://{place}/store"
            if options.s3:
                url = f"{options.s3}/{os.getpid()}-{after}"
            found = list(gaps(url, after, options.rounds, place))
        noticed, served, whole = zip(*found, strict=True)
        rows.append(
            (
                after,
                f"{statistics.median(noticed):.1f}",
                f"{statistics.median(served):.1f}",
                f"{min(whole):.1f}",
                f"{statistics.median(whole):.1f}",
                f"{max(whole):.1f}",
            )
        )
    show(
        f"{'S3' if options.s3 else 'A directory'}: seconds after the kill, {options.rounds} kills",
        ("standby_after", "noticed", "served", "clients went on: least", "median", "most"),
        rows,
    )


if __name__ == "__main__":
    main()
