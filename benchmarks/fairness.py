"""A small tenant beside a large one: how many claims until its message is served.

One group has a million messages waiting; then a thousand groups get one message each. Workers
claim and ack; for every small group the number of claims until it was served is counted. The
same is done with no large group: an empty neighbour. Counts, not times: a shared machine does
not matter.

    python benchmarks/fairness.py [--large 1000000] [--small 1000]
"""

from __future__ import annotations

import argparse

from common import console, describe, directory, show

import penstock


def claims_until_served(
    broker: penstock.Broker, queue: str, large: int, small: int, limit: int
) -> list[int]:
    """Count the claims that each small group waits for."""
    broker.create_queue(queue, done_retention_ms=1)
    attributes = {"queue": queue}
    for first in range(0, large, 1_000):
        size = min(1_000, large - first)
        broker.publish([penstock.Message(b"x", attributes, group="large")] * size)
    # The large group is being served before the small ones come.
    for _ in range(5):
        broker.ack([d.receipt for d in broker.claim(queue, limit=limit)])
    broker.publish(
        [penstock.Message(b"x", attributes, group=f"small-{number}") for number in range(small)]
    )
    waited: list[int] = []
    claims = 0
    while len(waited) < small:
        claims += 1
        deliveries = broker.claim(queue, limit=limit)
        waited += [claims for d in deliveries if d.group != "large"]
        broker.ack([d.receipt for d in deliveries])
        assert claims <= 10 * (small + 10), "small groups starve"
    broker.purge(queue)
    return sorted(waited)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large", type=int, default=1_000_000)
    parser.add_argument("--small", type=int, default=1_000)
    parser.add_argument("--limits", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--designs", nargs="+", default=["indexed", "buckets"])
    options = parser.parse_args()
    describe()
    rows = []
    for design in options.designs:
        for limit in options.limits:
            counts = {}
            for name, large in (("alone", 0), ("beside", options.large)):
                with (
                    directory() as path,
                    penstock.open(
                        f"rocksdb:{path / 'db'}?design={design}", durability="relaxed"
                    ) as broker,
                ):
                    counts[name] = claims_until_served(broker, "q", large, options.small, limit)
            p99 = {name: waited[int(len(waited) * 0.99)] for name, waited in counts.items()}
            p50 = {name: waited[len(waited) // 2] for name, waited in counts.items()}
            rows.append(
                (
                    f"{design}, {limit} per claim",
                    p50["alone"],
                    p50["beside"],
                    p99["alone"],
                    p99["beside"],
                    f"{p99['beside'] / p99['alone']:.2f}",
                )
            )
            console.print(f"{design}, {limit} per claim: done")
    show(
        f"claims until served: {options.small:,} groups of one message, alone and beside a group "
        f"of {options.large:,}",
        ("", "p50 alone", "p50 beside", "p99 alone", "p99 beside", "p99 ratio"),
        rows,
    )


if __name__ == "__main__":
    main()
