"""Bytes written for a message that is done soon: log, flushes and compactions, by column family.

Messages of 1 KB are published, claimed a while later and acked, in batches. The bytes of the
write-ahead log are counted as batches are committed, those of flushes and compactions are read from
RocksDB's own log of events, and their sum is compared with what the process has written. The store
is closed before the count, so that everything that closing flushes is in it.

    python benchmarks/disk.py [--messages 200000] [--batches 1 10 100] [--designs indexed buckets]

``text`` is JSON with values of its own in each message, ``random`` are bytes that nothing can
compress. ``--done-retention-ms`` keeps the history for so long; without, for a day.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

from common import console, describe, directory, show
from engines import open_broker, written

import penstock
from penstock.engines.rocksdb import RocksEngine
from penstock.urls import DESIGNS

# Messages that wait at any time, and the bytes of a payload.
WAITING = 1_000
PAYLOAD_BYTES = 1_000
ATTRIBUTES: dict[str, str | float] = {"queue": "orders", "kind": "book", "price": 12.5}
# What the log has for a row beside key and value: operation, family and two lengths.
ROW_BYTES = 4
# What the log has for a batch: the head of a record, a sequence number and a count.
BATCH_BYTES = 7 + 12
EVENT = re.compile(r"EVENT_LOG_v1 (\{.*\})$")


class Written(NamedTuple):
    """Bytes by column family."""

    log: dict[str, float]
    flush: dict[str, float]
    compaction: dict[str, float]
    process: float


class CountingBatch:
    """A batch that counts the bytes of its rows by the column family."""

    def __init__(self, engine: CountingEngine, inner: Any) -> None:
        self.inner = inner
        self._logged, self._names = engine.logged, engine.names

    def put(self, key: bytes, value: bytes, family: Any) -> None:
        long = len(value) > 127
        self._logged[self._names[id(family)]] += ROW_BYTES + long + len(key) + len(value)
        self.inner.put(key, value, family)

    def delete(self, key: bytes, family: Any) -> None:
        self._logged[self._names[id(family)]] += ROW_BYTES - 1 + len(key)
        self.inner.delete(key, family)

    def delete_range(self, begin: bytes, end: bytes, family: Any) -> None:
        self._logged[self._names[id(family)]] += ROW_BYTES + len(begin) + len(end)
        self.inner.delete_range(begin, end, family)

    def __len__(self) -> int:
        return len(self.inner)


class CountingEngine(RocksEngine):
    """The engine, with what its batches add to the log."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.logged: collections.Counter[str] = collections.Counter()
        self.names = {id(table.family): name for name, table in self._tables.items()}

    def batch(self, *, growth: int = 0) -> Any:
        return CountingBatch(self, super().batch(growth=growth))

    def commit(self, batch: Any) -> None:
        self.logged["each batch"] += BATCH_BYTES
        super().commit(batch.inner)


def noise(number: int, size: int = PAYLOAD_BYTES) -> bytes:
    """Make bytes that nothing can compress, the same for the same number."""
    return hashlib.shake_128(number.to_bytes(8, "big")).digest(size)


def text(number: int) -> bytes:
    """Make a JSON document, the same for the same number."""
    source = noise(number)
    lines = [
        {
            "sku": f"{int.from_bytes(source[at : at + 4], 'big') % 10**8:08d}",
            "title": f"item {'abcdefgh'[source[at + 4] % 8]}{source[at + 5]}",
            "quantity": source[at + 6] % 9,
            "price": int.from_bytes(source[at + 7 : at + 9], "big") / 100,
        }
        for at in range(0, 12 * 10, 10)
    ]
    order = {"order": number, "customer": source[-8:].hex(), "lines": lines}
    return json.dumps(order).encode().ljust(PAYLOAD_BYTES)[:PAYLOAD_BYTES]


def settle_down(engine: RocksEngine) -> None:
    """Wait until no compaction is due."""
    pause = threading.Event()
    names = ("rocksdb.compaction-pending", "rocksdb.num-running-compactions")
    while any(
        table.column.property_int_value(name)
        for table in engine._tables.values()  # noqa: SLF001
        for name in names
    ):
        pause.wait(0.05)


def files_written(path: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Read the sizes of files that flushes and compactions made, by family, from RocksDB's log."""
    flushed: collections.Counter[str] = collections.Counter()
    compacted: collections.Counter[str] = collections.Counter()
    compactions: set[int] = set()
    for log in sorted(path.glob("LOG*")):
        for line in log.read_text(errors="replace").splitlines():
            found = EVENT.search(line)
            if found is None:
                continue
            event = json.loads(found[1])
            if event["event"] == "compaction_started":
                compactions.add(event["job"])
            elif event["event"] == "table_file_creation":
                kind = compacted if event["job"] in compactions else flushed
                kind[event["cf_name"]] += event["file_size"]
            elif event["event"] == "blob_file_creation":
                kind = compacted if event["job"] in compactions else flushed
                kind[event["cf_name"]] += event["total_blob_bytes"]
    return dict(flushed), dict(compacted)


def life(
    path: Path, design: str, batch: int, messages: int, body: str, retention_ms: int | None
) -> Written:
    """Publish, claim and ack messages; return the bytes written for each."""
    make = {"text": text, "random": noise}[body]
    engine = CountingEngine(path, DESIGNS[design])
    before = written()
    broker = open_broker(engine, design, relaxed=True, background=retention_ms is not None)
    settings: dict[str, Any] = {} if retention_ms is None else {"done_retention_ms": retention_ms}
    broker.create_queue("orders", **settings)
    for number in range(0, messages + WAITING, batch):
        if number < messages:
            outgoing = [
                penstock.Message(make(number + at), dict(ATTRIBUTES)) for at in range(batch)
            ]
            broker.publish(outgoing)
        if number >= WAITING:
            deliveries = broker.claim("orders", limit=batch, consumer="bench")
            outcomes = broker.ack([delivery.receipt for delivery in deliveries])
            assert len(outcomes) == batch
            assert all(outcomes)
    settle_down(engine)
    logged = dict[str, float](engine.logged)
    broker.close()
    process = written() - before
    flushed, compacted = files_written(path)

    def each(sizes: dict[str, float]) -> dict[str, float]:
        return {name: size / messages for name, size in sizes.items()}

    return Written(each(logged), each(flushed), each(compacted), process / messages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--designs", nargs="+", default=[*DESIGNS])
    parser.add_argument("--bodies", nargs="+", default=["text", "random"])
    parser.add_argument("--done-retention-ms", type=int)
    parser.add_argument("--families", action="store_true", help="a table by family for each case")
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        place, design, batch, body = options.case
        found = life(
            Path(place), design, int(batch), options.messages, body, options.done_retention_ms
        )
        print(json.dumps(found))
        return
    describe()
    rows = []
    for design in options.designs:
        for batch in options.batches:
            for body in options.bodies:
                with directory() as path:
                    command = [sys.executable, __file__, *sys.argv[1:], "--case"]
                    answer = subprocess.run(
                        [*command, str(path / "db"), design, str(batch), body],
                        check=True,
                        capture_output=True,
                    )
                found = Written(*json.loads(answer.stdout))
                label = f"{design}, {body}, batch {batch}"
                sums = [sum(part.values()) for part in found[:3]]
                rows.append(
                    (label, *(f"{size:,.0f}" for size in (*sums, sum(sums), found.process)))
                )
                if options.families:
                    show_families(label, found)
    show(
        f"bytes written for a message of {PAYLOAD_BYTES} bytes, of {options.messages:,}",
        ("", "log", "flush", "compaction", "together", "of the process"),
        rows,
    )


def show_families(label: str, found: Written) -> None:
    """Print the bytes by column family."""
    names = sorted({name for part in found[:3] for name in part})
    table = [(name, *(f"{part.get(name, 0):,.0f}" for part in found[:3])) for name in names]
    show(label, ("family", "log", "flush", "compaction"), table)
    console.print()


if __name__ == "__main__":
    main()
