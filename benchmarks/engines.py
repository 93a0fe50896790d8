"""Both designs on RocksDB and on SlateDB: life cycles per second, and what they write.

The same verbs of one thread on every store, in turns. Bytes are those that the process has handed
to the operating system (log, tables, compaction), or to the object store. Then the requests that a
broker with an even load makes, and what they cost at a public list price.

    python benchmarks/engines.py [--messages 2000] [--s3 slatedb+s3://BUCKET/PREFIX]

Without ``--s3`` SlateDB writes to a directory, which counts the same requests and none of the time.
"""

from __future__ import annotations

import argparse
import os
import threading
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from common import describe, directory, show

import penstock
from penstock.broker.broker import Broker
from penstock.clock import SystemClock
from penstock.engines.rocksdb import RocksEngine
from penstock.engines.slatedb import SlateEngine
from penstock.engines.slatedb.binding import SlateLocation, parse_location
from penstock.urls import DESIGNS, make_store

PAYLOAD = b"x" * 1000
ATTRIBUTES: dict[str, str | float] = {"queue": "orders", "kind": "book", "price": 12.5}
# Amazon S3 Standard, us-east-1, dollars for one request.
WRITE_PRICE = 0.005 / 1_000
READ_PRICE = 0.0004 / 1_000
# The even load: who publishes, how many messages at a time, and who works.
CLIENTS = 20
BURST = 5
WORKERS = 4


class Result(NamedTuple):
    """One run of one store."""

    seconds: float
    written: int
    requests: int


def written() -> int:
    """Return what this process has written so far, in bytes."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("wchar:"):
            return int(line.split()[1])
    return 0


def open_broker(
    engine: RocksEngine | SlateEngine, design: str, *, relaxed: bool, background: bool = False
) -> Broker:
    clock = SystemClock()
    store = make_store(engine, design, clock)
    return Broker(store, clock=clock, relaxed=relaxed, background=background)


def life(name: str, path: Path, design: str, batch: int, messages: int, *, relaxed: bool) -> Result:
    """Publish, claim and ack messages, a batch at a time."""
    tables = DESIGNS[design]
    engine: RocksEngine | SlateEngine
    if name == "RocksDB":
        engine = RocksEngine(path, tables)
    else:
        engine = SlateEngine(SlateLocation("file", str(path), ""), tables)
    broker = open_broker(engine, design, relaxed=relaxed)
    broker.create_queue("orders", bucket_exponent=3 if batch >= 1000 else 2)
    before, start = written(), perf_counter()
    for _ in range(messages // batch):
        broker.publish([penstock.Message(PAYLOAD, dict(ATTRIBUTES)) for _ in range(batch)])
        deliveries = broker.claim("orders", limit=batch, consumer="bench")
        outcomes = broker.ack([delivery.receipt for delivery in deliveries])
        assert len(outcomes) == batch
        assert all(outcomes)
    seconds = perf_counter() - start
    requests = 0
    if isinstance(engine, SlateEngine):
        requests = sum(engine.requests().values())
    broker.close()
    return Result(seconds, written() - before, requests)


def bytes_written(engine: SlateEngine) -> int:
    """Count the bytes of log, flushed tables and compactions so far."""
    names = ("wal.wal_flush_bytes", "db.l0_flush_bytes", "compactor.bytes_compacted")
    recorder = engine._metrics  # noqa: SLF001
    found = [recorder.metrics_by_name(f"slatedb.{name}") for name in names]
    values: list[Any] = [metric.value for metrics in found for metric in metrics]
    return sum(value[0] for value in values)


def even_load(place: SlateLocation, design: str, rate: int, seconds: int) -> list[object]:
    """Publish evenly from many threads and work in others; return a row of the table."""
    engine = SlateEngine(place, DESIGNS[design])
    broker = open_broker(engine, design, relaxed=False, background=True)
    broker.create_queue("orders")
    before, bytes_before = engine.requests(), bytes_written(engine)
    each = rate * seconds // CLIENTS
    total, done, acked = each * CLIENTS, threading.Event(), [0] * WORKERS
    start = perf_counter()

    def publish() -> None:
        pause = threading.Event()
        for number in range(0, each, BURST):
            broker.publish([penstock.Message(PAYLOAD, dict(ATTRIBUTES)) for _ in range(BURST)])
            pause.wait(max(0.0, start + (number + BURST) * CLIENTS / rate - perf_counter()))

    def work(name: int) -> None:
        while not (done.is_set() and sum(acked) >= total):
            taken = broker.claim("orders", limit=100, wait_ms=100, consumer="bench")
            acked[name] += sum(map(bool, broker.ack([one.receipt for one in taken])))

    clients = [threading.Thread(target=publish) for _ in range(CLIENTS)]
    workers = [threading.Thread(target=work, args=(name,)) for name in range(WORKERS)]
    for thread in (*clients, *workers):
        thread.start()
    for thread in clients:
        thread.join()
    done.set()
    for thread in workers:
        thread.join()
    spent = perf_counter() - start
    after = engine.requests()
    counts = {name: count - before.get(name, 0) for name, count in after.items()}
    size = bytes_written(engine) - bytes_before
    broker.close()
    reads = counts.get("get", 0) + counts.get("head", 0)
    # Deleting costs nothing.
    writes = sum(counts.values()) - reads - counts.get("delete", 0)
    price = (writes * WRITE_PRICE + reads * READ_PRICE) / total * 1e6
    return [
        design,
        f"{total / spent:,.0f}",
        f"{writes / total:.3f}",
        f"{reads / total:.3f}",
        f"{size / total:,.0f}",
        f"${price:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=2_000)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--rate", type=int, default=1_000, help="messages/s of the even load")
    parser.add_argument("--seconds", type=int, default=10, help="how long the even load lasts")
    parser.add_argument("--s3", help="slatedb+s3://BUCKET/PREFIX, for the even load")
    options = parser.parse_args()
    describe()
    for relaxed in (True, False):
        rows = []
        for batch in options.batches:
            messages = max(batch, min(options.messages, 500 * batch) // batch * batch)
            for name in ("RocksDB", "SlateDB"):
                for design in DESIGNS:
                    with directory() as path:
                        run = life(name, path / "db", design, batch, messages, relaxed=relaxed)
                    rows.append(
                        (
                            f"{name}, {design}, batch {batch}",
                            f"{messages / run.seconds:,.0f}",
                            f"{run.written / messages:,.0f}",
                            f"{run.requests / messages:.3f}" if run.requests else "",
                        )
                    )
        show(
            f"durability={'relaxed' if relaxed else 'fsync'}: 1 KB payloads, one thread",
            ("", "life cycles/s", "bytes written/message", "requests/message"),
            rows,
        )
    loads = []
    for design in DESIGNS:
        with directory() as path:
            place = SlateLocation("file", str(path / "db"), "")
            if options.s3:
                scheme, _, rest = options.s3.partition(":")
                place = parse_location(scheme, f"{rest}/{design}-{os.getpid()}", os.environ)
            loads.append(even_load(place, design, options.rate, options.seconds))
    show(
        f"SlateDB on {'S3' if options.s3 else 'a directory'}, an even load, durable",
        ("", "messages/s", "PUT, LIST/message", "GET/message", "bytes/message", "per million"),
        loads,
    )


if __name__ == "__main__":
    main()
