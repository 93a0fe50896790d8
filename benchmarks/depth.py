"""Cost of a life cycle with many or millions of messages waiting, and after millions passed.

Each case runs in a process of its own, with two stores: a deep one, and a shallow one with 1,000
messages waiting. Life cycles (publish, claim, ack) in batches run on top of what waits, on the two
stores in turns, so that a ratio is of one run. CPU time is that of the thread that calls the
broker: flushes and compactions have threads of their own. Memory is what the process gained by
filling the queue.

    python benchmarks/depth.py [--deep 3000000] [--designs indexed buckets] [--batch 500]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter, thread_time

from common import console, describe, directory, resident_mb, show

import penstock

SHALLOW = 1_000
ROUNDS = 12
# Messages of one round.
MEASURED = 5_000
PAYLOAD = b"x" * 100


def messages(count: int) -> list[penstock.Message]:
    return [penstock.Message(PAYLOAD, {"queue": "q", "kind": "book"}) for _ in range(count)]


def cycle(broker: penstock.Broker, count: int, batch: int) -> tuple[float, float]:
    """Run life cycles; return the microseconds of one, of the clock and of this thread."""
    wall = cpu = 0.0
    for _ in range(count // batch):
        outgoing = messages(batch)
        start, begun = perf_counter(), thread_time()
        broker.publish(outgoing)
        deliveries = broker.claim("q", limit=batch)
        outcomes = broker.ack([delivery.receipt for delivery in deliveries])
        cpu += thread_time() - begun
        wall += perf_counter() - start
        assert len(outcomes) == batch
    return wall / count * 1e6, cpu / count * 1e6


def fill(path: Path, design: str, batch: int, waiting: int) -> tuple[penstock.Broker, float]:
    """Open a store and let messages wait in it; return it with the memory that this took."""
    broker = penstock.open(f"rocksdb:{path}?design={design}", durability="relaxed")
    # History stays: trimming it is work of its own, done by a thread of its own.
    broker.create_queue("q")
    cycle(broker, 10_000, batch)
    before_mb = resident_mb()
    for _ in range(0, waiting, 1_000):
        broker.publish(messages(1_000))
    return broker, resident_mb() - before_mb


def case(path: Path, design: str, batch: int, waiting: int, passed: int) -> dict[str, float]:
    """Measure one case."""
    shallow, _ = fill(path / "shallow", design, batch, SHALLOW)
    deep, grown_mb = fill(path / "deep", design, batch, waiting)
    with shallow, deep:
        if passed:
            cycle(deep, passed, batch)
        rounds = [
            (cycle(shallow, MEASURED, batch), cycle(deep, MEASURED, batch)) for _ in range(ROUNDS)
        ]
        assert deep.stats("q").available == waiting, deep.stats("q")
    return {
        "shallow": statistics.median(one[1] for one, _ in rounds),
        "deep": statistics.median(two[1] for _, two in rounds),
        # Of the ratios of rounds: a shared machine is as busy for one half as for the other.
        "cpu": statistics.median(two[1] / one[1] for one, two in rounds),
        "wall": statistics.median(two[0] / one[0] for one, two in rounds),
        "grown_mb": grown_mb,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deep", type=int, default=3_000_000)
    parser.add_argument("--designs", nargs="+", default=["indexed", "buckets"])
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        path, design, waiting, passed = options.case
        found = case(Path(path), design, options.batch, int(waiting), int(passed))
        print(json.dumps(found))
        return
    describe()
    cases = [(200_000, 0), (options.deep, 0), (SHALLOW, options.deep)]
    for design in options.designs:
        rows = []
        for waiting, passed in cases:
            with directory() as path:
                command = [sys.executable, __file__, "--batch", str(options.batch), "--case"]
                answer = subprocess.run(
                    [*command, str(path), design, str(waiting), str(passed)],
                    check=True,
                    capture_output=True,
                )
            found = json.loads(answer.stdout)
            label = f"{waiting:,} waiting" + (f", {passed:,} passed before" if passed else "")
            rows.append(
                (
                    label,
                    f"{found['shallow']:.1f}",
                    f"{found['deep']:.1f}",
                    f"{found['cpu']:.2f}",
                    f"{found['wall']:.2f}",
                    f"{found['grown_mb']:+.0f}",
                )
            )
            console.print(f"{design}: {label}: done")
        show(
            f"{design} on RocksDB, batches of {options.batch}, relaxed; CPU µs per life cycle",
            ("", "1,000 waiting", "deep", "ratio", "ratio of the clock", "memory, MB"),
            rows,
        )


if __name__ == "__main__":
    main()
