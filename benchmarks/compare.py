"""The cost of a life cycle on RocksDB in two checkouts, measured in turns on one machine.

A life cycle is publish, claim and ack in one thread, relaxed. Each round runs both checkouts, one
after the other, in a process of its own; what is compared is the CPU time of the process for one
message, by the median of the rounds.

    git worktree add ../before COMMIT
    python benchmarks/compare.py ../before . [--rounds 7]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from common import describe, show

WORK = """
import sys, tempfile
from time import process_time
import penstock

batch, messages = int(sys.argv[1]), int(sys.argv[2])
attributes = {"queue": "orders", "kind": "book", "price": 12.5}

def life_cycles(broker, count):
    for _ in range(count // batch):
        broker.publish([penstock.Message(b"x" * 1000, attributes) for _ in range(batch)])
        deliveries = broker.claim("orders", limit=batch, consumer="bench")
        assert len(broker.ack([each.receipt for each in deliveries])) == batch

with tempfile.TemporaryDirectory() as place:
    url = f"rocksdb:{place}/store?design={sys.argv[3]}"
    with penstock.open(url, durability="relaxed", background=False) as broker:
        broker.create_queue("orders")
        life_cycles(broker, messages // 5)
        begin = process_time()
        life_cycles(broker, messages)
        print((process_time() - begin) / messages * 1e6)
"""


def cost_us(checkout: Path, batch: int, messages: int, design: str) -> float:
    """Measure the CPU time of one message's life cycle, in microseconds."""
    run = subprocess.run(
        [sys.executable, "-c", WORK, str(batch), str(messages), design],
        env={**os.environ, "PYTHONPATH": str(checkout.resolve() / "src")},
        check=True,
        capture_output=True,
        text=True,
    )
    return float(run.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    describe()
    rows = []
    for design in ("indexed", "buckets"):
        for batch, messages in ((1, 4_000), (100, 40_000)):
            costs: dict[Path, list[float]] = {options.before: [], options.after: []}
            for _ in range(options.rounds):
                for checkout, found in costs.items():
                    found.append(cost_us(checkout, batch, messages, design))
            before, after = (statistics.median(found) for found in costs.values())
            ratios = [new / old for old, new in zip(*costs.values(), strict=True)]
            spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
            ratio = f"{after / before:.2f}"
            rows.append((design, batch, f"{before:.1f}", f"{after:.1f}", ratio, spread))
    header = ("design", "batch", "before µs", "after µs", "ratio", "of each round")
    show("CPU time of a life cycle, relaxed", header, rows)


if __name__ == "__main__":
    main()
