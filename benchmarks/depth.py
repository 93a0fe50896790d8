"""Cost of a life cycle with few, many and millions of messages waiting, and after millions passed.

Each case runs in a process of its own: fill the queue, then time life cycles (publish, claim,
ack) in batches of 100 on top of what waits. Compare the ratios, which are to the shallow queue of
the same run. Memory is what the process gained by filling the queue.

    python benchmarks/depth.py [--deep 3000000] [--designs indexed buckets]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from time import perf_counter

from common import console, describe, directory, resident_mb, show

import penstock

BATCH = 100
MEASURED = 20_000
PAYLOAD = b"x" * 100


def messages(count: int) -> list[penstock.Message]:
    return [penstock.Message(PAYLOAD, {"queue": "q", "kind": "book"}) for _ in range(count)]


def cycle(broker: penstock.Broker, count: int) -> float:
    """Run life cycles and return the microseconds of one."""
    spent = 0.0
    for _ in range(count // BATCH):
        batch = messages(BATCH)
        start = perf_counter()
        broker.publish(batch)
        deliveries = broker.claim("q", limit=BATCH)
        outcomes = broker.ack([delivery.receipt for delivery in deliveries])
        spent += perf_counter() - start
        assert len(outcomes) == BATCH
    return spent / count * 1e6


def case(path: str, design: str, waiting: int, passed: int) -> None:
    """Measure one case and print it as JSON: for a process of its own."""
    url = f"rocksdb:{path}?design={design}"
    with penstock.open(url, durability="relaxed") as broker:
        # History stays: trimming it is work of its own, done by a thread of its own.
        broker.create_queue("q")
        cycle(broker, 10_000)
        before_mb = resident_mb()
        for _ in range(0, waiting, 1_000):
            broker.publish(messages(1_000))
        filled_mb = resident_mb()
        if passed:
            cycle(broker, passed)
        # The best of three keeps what a shared machine does at the same time out.
        micros = min(cycle(broker, MEASURED) for _ in range(3))
        stats = broker.stats("q")
        assert stats.available == waiting, stats
    print(json.dumps({"micros": micros, "grown_mb": filled_mb - before_mb}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deep", type=int, default=3_000_000)
    parser.add_argument("--designs", nargs="+", default=["indexed", "buckets"])
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        path, design, waiting, passed = options.case
        case(path, design, int(waiting), int(passed))
        return
    describe()
    cases = [(1_000, 0), (100_000, 0), (options.deep, 0), (1_000, options.deep)]
    for design in options.designs:
        rows = []
        shallow = 0.0
        for waiting, passed in cases:
            with directory() as path:
                command = [sys.executable, __file__, "--case", str(path / "db"), design]
                answer = subprocess.run(
                    [*command, str(waiting), str(passed)], check=True, capture_output=True
                )
            result = json.loads(answer.stdout)
            shallow = shallow or result["micros"]
            label = f"{waiting:,} waiting" + (f", {passed:,} passed before" if passed else "")
            micros, grown = result["micros"], result["grown_mb"]
            rows.append((label, f"{micros:.1f}", f"{micros / shallow:.2f}", f"{grown:+.0f}"))
            console.print(f"{design}: {label}: done")
        show(
            f"{design} on RocksDB, batches of {BATCH}, relaxed",
            ("", "µs per life cycle", "ratio", "memory, MB"),
            rows,
        )


if __name__ == "__main__":
    main()
