"""Cost of a sweep over messages that were acked one at a time, at first and after many have gone.

An LSM tree steps over what was deleted at the head of a range. Compare the ratios: a sweep of 1,000
messages and a look at the stats are to cost as much in the end as at first, and a sweep with a
budget of one next to nothing, however many rows are due.

    python benchmarks/retention.py [--messages 80000] [--designs indexed buckets]
"""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import TYPE_CHECKING

from common import describe, directory, show

import penstock
from penstock.clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable

SWEPT = 1_000
HOUR_MS = 3_600_000


def timed(work: Callable[[], object]) -> float:
    """Do something and return its milliseconds."""
    start = perf_counter()
    work()
    return (perf_counter() - start) * 1e3


def case(url: str, messages: int) -> list[tuple[str, float]]:
    """Publish and ack, then sweep; return what was measured, in milliseconds."""
    clock = ManualClock()
    with penstock.open(url, durability="relaxed", background=False, clock=clock) as broker:
        broker.create_queue("q", done_retention_ms=HOUR_MS, unclaimed_retention_ms=HOUR_MS // 2)
        broker.configure_log(retention_ms=0)
        stats_first = timed(lambda: broker.stats("q"))
        for _ in range(0, messages, 100):
            for _ in range(100):
                broker.send("q", b"x" * 100)
            for delivery in broker.claim("q", limit=100, lease_ms=12 * HOUR_MS):
                broker.ack([delivery.receipt])
            clock.advance(1)
        stats_last = timed(lambda: broker.stats("q"))
        clock.advance(HOUR_MS // 2)
        one = timed(lambda: broker.sweep(budget=1))
        while (broker.sweep().next_due_ms or 0) <= clock.now_ms():
            pass
        clock.advance(HOUR_MS)
        sweeps = [timed(lambda: broker.sweep(budget=SWEPT)) for _ in range(messages // SWEPT)]
        assert broker.stats("q").done == 0
    third = max(1, len(sweeps) // 3)
    first, last = sorted(sweeps[:third])[third // 2], sorted(sweeps[-third:])[third // 2]
    return [
        ("stats, nothing passed", stats_first),
        ("stats, all have passed", stats_last),
        ("sweep(budget=1), unclaimed rows of done messages", one),
        (f"sweep of {SWEPT:,}, the first third", first),
        (f"sweep of {SWEPT:,}, the last third", last),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=80_000)
    parser.add_argument("--designs", nargs="+", default=["indexed", "buckets"])
    options = parser.parse_args()
    describe()
    for design in options.designs:
        with directory() as path:
            rows = case(f"rocksdb:{path / 'db'}?design={design}", options.messages)
        show(
            f"{design} on RocksDB, {options.messages:,} messages acked one at a time",
            ("", "ms"),
            [(label, f"{ms:.2f}") for label, ms in rows],
        )


if __name__ == "__main__":
    main()
