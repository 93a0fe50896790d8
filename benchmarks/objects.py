"""How many objects a store on object storage keeps under a steady load.

Publishes, claims and acks at an even rate, in a directory; history and log are kept for a minute.
Counts the files of each kind and their bytes once a minute: after the first minutes they must go
up and down around one figure, however long it runs.

    python benchmarks/objects.py [--minutes 60] [--rate 20]
"""

from __future__ import annotations

import argparse
import threading
from time import perf_counter
from typing import TYPE_CHECKING

from common import describe, directory, show

import penstock
from penstock import Message

if TYPE_CHECKING:
    from pathlib import Path

KINDS = ("wal", "manifest", "compacted", "compactions")
BATCH = 10
PAYLOAD = b"x" * 1000
KEPT_MS = 60_000
PAUSE = threading.Event()


def counted(store: Path) -> list[int]:
    """Count the files of each kind, and the megabytes of all."""
    files = {kind: [each for each in (store / kind).rglob("*") if each.is_file()] for kind in KINDS}
    size = 0
    for found in files.values():
        for each in found:
            try:
                size += each.stat().st_size
            except FileNotFoundError:
                continue
    return [*(len(files[kind]) for kind in KINDS), size // 1_000_000]


def work(broker: penstock.Broker, stopped: threading.Event, rate: float) -> None:
    """Pass batches through the queue at an even rate, each verb durable."""
    begin, rounds = perf_counter(), 0
    while not stopped.is_set():
        broker.publish([Message(PAYLOAD, {"queue": "q"}) for _ in range(BATCH)])
        taken = broker.claim("q", limit=BATCH)
        broker.ack([each.receipt for each in taken])
        rounds += 1
        PAUSE.wait(max(0.0, begin + rounds / rate - perf_counter()))


def main() -> None:
    """Run it."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--minutes", type=int, default=60)
    arguments.add_argument("--rate", type=float, default=20.0, help="batches of 10 a second")
    asked = arguments.parse_args()
    describe()
    rows: list[list[int]] = []
    with directory() as place, penstock.open(f"slatedb+file://{place}/store") as broker:
        broker.create_queue("q", done_retention_ms=KEPT_MS)
        broker.configure_log(retention_ms=KEPT_MS)
        stopped = threading.Event()
        worker = threading.Thread(target=work, args=(broker, stopped, asked.rate))
        worker.start()
        try:
            for minute in range(1, asked.minutes + 1):
                PAUSE.wait(60)
                row = [minute, broker.store_stats().published_total, *counted(place / "store")]
                rows.append(row)
                print(*row, flush=True)
        finally:
            stopped.set()
            worker.join()
    show("Objects under a steady load", ["minute", "published", *KINDS, "MB"], rows[::5])
    early, late = rows[len(rows) // 6 : len(rows) // 2], rows[len(rows) // 2 :]
    for at, kind in enumerate((*KINDS, "MB"), 2):
        before, after = (max(row[at] for row in part) for part in (early, late))
        print(f"{kind}: at most {after} in the second half, {before} in the first after a sixth")


if __name__ == "__main__":
    main()
