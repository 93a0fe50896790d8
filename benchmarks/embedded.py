"""Publish, claim, ack and life cycles per second, next to a floor.

The floor is the bare RocksDB work of the same life cycle: the same number of puts, deletes, reads
and scans with values of the same size, in the same batches, on the same column families, and no
queue logic at all. Everything runs in this one process, in one thread, in turns, so that figures
of one run can be compared with each other.

    python benchmarks/embedded.py [--messages 20000] [--rounds 3]
"""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import TYPE_CHECKING, Literal

from common import describe, directory, show

import penstock
from penstock.engines.rocksdb import RocksEngine
from penstock.urls import DESIGNS

if TYPE_CHECKING:
    from pathlib import Path

PAYLOAD = b"x" * 1000
ATTRIBUTES: dict[str, str | float] = {"queue": "orders", "kind": "book", "price": 12.5}
RECORD = b"r" * 200
ATTEMPT = b"a" * 40
Times = dict[str, float]
Durability = Literal["fsync", "relaxed"]
DURABILITIES: tuple[Durability, ...] = ("relaxed", "fsync")


def broker_round(
    path: Path, design: str, batch: int, messages: int, durability: Durability
) -> Times:
    """Time the verbs of a broker."""
    times = {"publish": 0.0, "claim": 0.0, "ack": 0.0}
    url = f"rocksdb:{path}?design={design}"
    exponent = 3 if batch >= 1000 else 2
    with penstock.open(url, durability=durability, background=False) as broker:
        broker.create_queue("orders", bucket_exponent=exponent)
        for _ in range(max(1, messages // batch)):
            outgoing = [penstock.Message(PAYLOAD, dict(ATTRIBUTES)) for _ in range(batch)]
            start = perf_counter()
            broker.publish(outgoing)
            published = perf_counter()
            deliveries = broker.claim("orders", limit=batch, consumer="bench")
            claimed = perf_counter()
            outcomes = broker.ack([delivery.receipt for delivery in deliveries])
            times["ack"] += perf_counter() - claimed
            times["claim"] += claimed - published
            times["publish"] += published - start
            assert len(outcomes) == batch
            assert all(outcomes)
    return times


def floor_round(path: Path, batch: int, messages: int, durability: Durability) -> Times:
    """Time the engine alone, doing what the indexed design does to it."""
    times = {"publish": 0.0, "claim": 0.0, "ack": 0.0}
    engine = RocksEngine(path, DESIGNS["indexed"])
    table = engine.table
    payloads, available, index = table("payloads"), table("available"), table("visibility_index")
    running, leases, expiry = table("in_progress"), table("leases"), table("lease_expiry")
    history, queues = table("history"), table("queues")
    log, system = table("log"), table("default")

    def commit(rows: object) -> None:
        engine.commit(rows)  # type: ignore[arg-type]
        if durability == "fsync":
            engine.sync()

    first = 0
    for _ in range(max(1, messages // batch)):
        numbers = range(first, first + batch)
        keys = [number.to_bytes(12, "big") for number in numbers]
        index_keys = [b"\x01" + number.to_bytes(25, "big") for number in numbers]
        attempt_keys = [b"\x02\x05orders\x00" + number.to_bytes(10, "big") for number in numbers]
        lease = first.to_bytes(16, "big")
        first += batch

        start = perf_counter()
        rows = engine.batch()
        for key, index_key in zip(keys, index_keys, strict=True):
            rows.put(key, PAYLOAD, payloads.family)
            rows.put(key, RECORD, available.family)
            rows.put(index_key, key, index.family)
        rows.put(b"entry" + lease, b"l" * 85 * batch, log.family)
        rows.put(b"totals", ATTEMPT, system.family)
        rows.put(b"counts", ATTEMPT, queues.family)
        commit(rows)
        published = perf_counter()

        rows = engine.batch()
        found = [value for _, value in index.scan(index_keys[0], b"\x02", batch)]
        available.multi_get(found)
        payloads.multi_get(found)
        for key, index_key in zip(keys, index_keys, strict=True):
            rows.delete(index_key, index.family)
            rows.delete(key, available.family)
            rows.put(key, RECORD, running.family)
        rows.put(lease, b"".join(keys), leases.family)
        rows.put(lease, lease, expiry.family)
        rows.put(b"counts", ATTEMPT, queues.family)
        commit(rows)
        claimed = perf_counter()

        rows = engine.batch()
        leases.get(lease)
        running.multi_get(keys)
        for key, attempt_key in zip(keys, attempt_keys, strict=True):
            rows.delete(key, running.family)
            rows.put(attempt_key, ATTEMPT, history.family)
        rows.put(b"done" + lease, b"d" * 90 * batch, history.family)
        rows.delete(lease, leases.family)
        rows.delete(lease, expiry.family)
        rows.put(b"counts", ATTEMPT, queues.family)
        commit(rows)
        times["ack"] += perf_counter() - claimed
        times["claim"] += claimed - published
        times["publish"] += published - start
    engine.close()
    return times


def best(rounds: list[Times], messages: int) -> dict[str, float]:
    """Return rates of the fastest round."""
    fastest = min(rounds, key=lambda times: sum(times.values()))
    rates = {verb: messages / seconds for verb, seconds in fastest.items()}
    rates["life"] = messages / sum(fastest.values())
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 10, 100, 1000])
    options = parser.parse_args()
    describe()
    for durability in DURABILITIES:
        rows = []
        for batch in options.batches:
            # Small batches with fsync are slow; fewer messages measure them as well.
            messages = options.messages if durability == "relaxed" else options.messages // 4
            messages = max(batch, min(messages, 1_000 * batch))
            results: dict[str, list[Times]] = {"floor": [], "indexed": [], "buckets": []}
            for _ in range(options.rounds):
                for name, done in results.items():
                    with directory() as path:
                        if name == "floor":
                            done.append(floor_round(path / "db", batch, messages, durability))
                        else:
                            done.append(
                                broker_round(path / "db", name, batch, messages, durability)
                            )
            count = messages // batch * batch
            floor = best(results["floor"], count)["life"]
            for name, done in results.items():
                rates = best(done, count)
                rows.append(
                    (
                        f"{name}, batch {batch}",
                        *(f"{rates[verb]:,.0f}" for verb in ("publish", "claim", "ack", "life")),
                        f"{rates['life'] / floor:.2f}",
                    )
                )
        show(
            f"durability={durability}: messages per second, 1 KB payloads, one thread",
            ("", "publish", "claim", "ack", "life cycles", "of the floor"),
            rows,
        )


if __name__ == "__main__":
    main()
