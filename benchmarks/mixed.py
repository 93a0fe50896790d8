"""Publishers, claimers and an acker at once, with a history behind them that is being trimmed.

Messages of 1 KB come in at an even rate, in batches of 10, from two threads; two threads claim and
one acks. Every verb is synced to the disk. The store has a history of messages that are done, whose
retention ends while the load runs: as many leave it as come in, as in a store that keeps a day.
Latencies are those of single calls. Stalls are the times at which RocksDB held writes up.

    python benchmarks/mixed.py [--history 200000] [--rate 2000] [--seconds 30] [--variants ...]

A variant changes how the engine is made, so that one setting can be measured against the others:
``one family`` keeps all tables in one column family, told apart by a first byte of the key.
"""

# ruff: noqa: SLF001, FBT003 - it makes the engine otherwise than its settings allow
from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import threading
from pathlib import Path
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

import rocksdict as rocks
from common import describe, directory, show
from disk import ATTRIBUTES, text
from engines import open_broker, written

import penstock
from penstock.engines import Shape, rocksdb
from penstock.engines.rocksdb import RocksEngine
from penstock.limits import STORE_MEMORY_MB
from penstock.urls import DESIGNS

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 10
PUBLISHERS = 2
CLAIMERS = 2


class PrefixedTable:
    """A table that is a part of another."""

    def __init__(self, table: Any, prefix: bytes) -> None:
        self._table = table
        self._prefix = prefix
        self.family = (prefix, table.family)

    def get(self, key: bytes) -> bytes | None:
        found: bytes | None = self._table.get(self._prefix + key)
        return found

    def multi_get(self, keys: list[bytes]) -> list[bytes | None]:
        found: list[bytes | None] = self._table.multi_get([self._prefix + key for key in keys])
        return found

    def scan(self, begin: bytes, end: bytes, limit: int) -> Any:
        rows = self._table.scan(self._prefix + begin, self._prefix + end, limit)
        cut = len(self._prefix)
        return [(key[cut:], value) for key, value in rows] if cut else rows

    def scan_back(self, begin: bytes, end: bytes, limit: int) -> Any:
        rows = self._table.scan_back(self._prefix + begin, self._prefix + end, limit)
        cut = len(self._prefix)
        return [(key[cut:], value) for key, value in rows] if cut else rows


class PrefixedBatch:
    """A batch for tables that are parts of others."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def put(self, key: bytes, value: bytes, family: Any) -> None:
        self.inner.put(family[0] + key, value, family[1])

    def delete(self, key: bytes, family: Any) -> None:
        self.inner.delete(family[0] + key, family[1])

    def delete_range(self, begin: bytes, end: bytes, family: Any) -> None:
        self.inner.delete_range(family[0] + begin, family[0] + end, family[1])

    def __len__(self) -> int:
        return len(self.inner)


class PrefixedEngine(RocksEngine):
    """The engine, with all tables in one family or in one each: both at the price of a wrapper."""

    def __init__(self, path: Path, tables: Any, *, one_family: bool, buffer_mb: int) -> None:
        own = {"default": Shape.VALUES} if one_family else tables
        super().__init__(path, own, write_buffer_mb=buffer_mb)
        self._parts = {
            name: PrefixedTable(self._tables["default"], bytes([number]))
            if one_family
            else PrefixedTable(self._tables[name], b"")
            for number, name in enumerate(tables)
        }

    def table(self, name: str) -> Any:
        return self._parts[name]

    def batch(self, *, growth: int = 0) -> Any:
        return PrefixedBatch(super().batch(growth=growth))

    def commit(self, batch: Any) -> None:
        super().commit(batch.inner)


def change_families(change: Callable[[str, Shape, rocks.Options], None]) -> None:
    """Make the engine's families with other options."""
    make = rocksdb._family_options

    def changed(tables: Any, write_buffer_mb: int, block_cache_mb: int) -> Any:
        columns = make(tables, write_buffer_mb, block_cache_mb)
        for name, options in columns.items():
            change(name, tables[name], options)
        return columns

    rocksdb._family_options = changed


def prefix_bloom(name: str, shape: Shape, options: rocks.Options) -> None:
    """Give index families a prefix extractor and Bloom filters of prefixes, in memory too."""
    if shape is Shape.TIME_INDEX:
        # Ready or delayed, and the queue's number; the first bytes of a time.
        length = 5 if name == "visibility_index" else 4
        options.set_prefix_extractor(rocks.SliceTransform.create_max_len_prefix(length))
        options.set_memtable_prefix_bloom_ratio(0.1)
        block = _blocks(4)
        block.set_bloom_filter(10, False)
        options.set_block_based_table_factory(block)


def own_caches(_name: str, shape: Shape, options: rocks.Options) -> None:
    """Give each family a cache of its own, all together as large as the shared one."""
    block = _blocks({Shape.VALUES: 32, Shape.APPEND: 32}.get(shape, 8))
    block.set_block_cache(rocks.Cache(5 << 20))
    if shape is not Shape.APPEND:
        block.set_bloom_filter(10, False)
    options.set_block_based_table_factory(block)


def blob_files(name: str, _shape: Shape, options: rocks.Options) -> None:
    """Keep payloads in files of their own, which compactions leave alone."""
    if name == "payloads":
        options.set_enable_blob_files(True)
        options.set_min_blob_size(256)
        options.set_blob_compression_type(rocks.DBCompressionType.zstd())
        options.set_enable_blob_gc(True)


def late_compression(_name: str, shape: Shape, options: rocks.Options) -> None:
    """Compress the last level alone."""
    options.set_compression_type(rocks.DBCompressionType.none())
    if shape in {Shape.VALUES, Shape.APPEND}:
        options.set_bottommost_compression_type(rocks.DBCompressionType.lz4())


def lz4(_name: str, shape: Shape, options: rocks.Options) -> None:
    """Compress with LZ4."""
    if shape in {Shape.VALUES, Shape.APPEND}:
        options.set_compression_type(rocks.DBCompressionType.lz4())


def _blocks(kib: int) -> rocks.BlockBasedOptions:
    block = rocks.BlockBasedOptions()
    block.set_block_size(kib << 10)
    block.set_cache_index_and_filter_blocks(True)
    block.set_pin_l0_filter_and_index_blocks_in_cache(True)
    return block


CHANGES = {
    "prefix Bloom": prefix_bloom,
    "a cache each": own_caches,
    "blob files": blob_files,
    "last level compressed": late_compression,
    "LZ4": lz4,
}
BUFFERS_MB = {"buffers of 16 MiB": 16, "buffers of 256 MiB": 256}
VARIANTS = ("as it is", "one family", *CHANGES, *BUFFERS_MB)


class Load:
    """Threads that publish, claim and ack, and how long their calls took."""

    def __init__(self, broker: penstock.Broker, rate: int, seconds: int) -> None:
        self._broker = broker
        self._each = rate * seconds // PUBLISHERS // BATCH * BATCH
        self._rate = rate
        self.total = self._each * PUBLISHERS
        self.acked = 0
        self.seconds: dict[str, list[float]] = {"publish": [], "claim": [], "ack": []}
        self._claimed: queue.SimpleQueue[list[str]] = queue.SimpleQueue()

    def run(self) -> None:
        threads = [threading.Thread(target=self._publish, args=(n,)) for n in range(PUBLISHERS)]
        threads += [threading.Thread(target=self._claim) for _ in range(CLAIMERS)]
        threads.append(threading.Thread(target=self._ack))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _publish(self, name: int) -> None:
        pause, start = threading.Event(), perf_counter()
        for number in range(0, self._each, BATCH):
            first = name * self._each + number
            outgoing = [penstock.Message(text(first + at), dict(ATTRIBUTES)) for at in range(BATCH)]
            begun = perf_counter()
            self._broker.publish(outgoing)
            self.seconds["publish"].append(perf_counter() - begun)
            due = start + (number + BATCH) * PUBLISHERS / self._rate
            pause.wait(max(0.0, due - perf_counter()))

    def _claim(self) -> None:
        while self.acked < self.total:
            begun = perf_counter()
            taken = self._broker.claim("orders", limit=BATCH, consumer="bench")
            if taken:
                self.seconds["claim"].append(perf_counter() - begun)
                self._claimed.put([delivery.receipt for delivery in taken])
            else:
                threading.Event().wait(0.002)

    def _ack(self) -> None:
        while self.acked < self.total:
            receipts = self._claimed.get()
            begun = perf_counter()
            outcomes = self._broker.ack(receipts)
            self.seconds["ack"].append(perf_counter() - begun)
            assert all(outcomes)
            self.acked += len(outcomes)


def stalls(path: Path) -> int:
    """Count how often RocksDB says that it held writes up."""
    logs = [log.read_text(errors="replace") for log in path.glob("LOG*")]
    return sum(text.count("Stalling writes") + text.count("Stopping writes") for text in logs)


def case(path: Path, variant: str, history: int, rate: int, seconds: int) -> dict[str, float]:
    """Measure one variant."""
    if variant in CHANGES:
        change_families(CHANGES[variant])
    buffer_mb = BUFFERS_MB.get(variant, STORE_MEMORY_MB)
    tables = DESIGNS["indexed"]
    engine = PrefixedEngine(path, tables, one_family=variant == "one family", buffer_mb=buffer_mb)
    broker = open_broker(engine, "indexed", relaxed=False, background=True)
    retention_ms = int(history / rate * 1000)
    broker.create_queue("orders", done_retention_ms=max(10_000, retention_ms))
    for number in range(0, history, 1_000):
        broker.publish(
            [penstock.Message(text(number + at), dict(ATTRIBUTES)) for at in range(1_000)]
        )
        broker.ack([one.receipt for one in broker.claim("orders", limit=1_000)])
    load = Load(broker, rate, seconds)
    before, begun, cpu = written(), perf_counter(), process_time()
    load.run()
    spent = perf_counter() - begun
    found = {
        "rate": load.total / spent,
        "cpu": (process_time() - cpu) / load.total * 1e6,
        "written": (written() - before) / load.total,
        "stalls": stalls(path),
        "done": broker.stats("orders").done,
    }
    for verb, times in load.seconds.items():
        times.sort()
        found[f"{verb} p50"] = times[len(times) // 2] * 1e3
        found[f"{verb} p99"] = times[len(times) * 99 // 100] * 1e3
        found[f"{verb} most"] = times[-1] * 1e3
    broker.close()
    found["size"] = sum(each.stat().st_size for each in path.iterdir()) / 1e6
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--history", type=int, default=200_000)
    parser.add_argument("--rate", type=int, default=2_000, help="messages a second")
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        place, variant = options.case
        sizes = (options.history, options.rate, options.seconds)
        print(json.dumps(case(Path(place), variant, *sizes)))
        return
    describe()
    rows = []
    for variant in options.variants:
        with directory() as path:
            command = [sys.executable, __file__, *sys.argv[1:], "--case", str(path / "db"), variant]
            answer = subprocess.run(command, check=True, capture_output=True)
        found = json.loads(answer.stdout)
        verbs = [
            f"{found[f'{verb} p50']:.1f} / {found[f'{verb} p99']:.0f} / {found[f'{verb} most']:.0f}"
            for verb in ("publish", "claim", "ack")
        ]
        numbers = [f"{found[name]:,.0f}" for name in ("rate", "cpu", "written", "size", "stalls")]
        rows.append((variant, *verbs, *numbers))
    show(
        f"indexed, {options.rate:,} messages/s, {options.history:,} in the history, fsync; "
        "p50 / p99 / most in ms",
        ("", "publish", "claim", "ack", "done/s", "CPU µs", "bytes written", "MB", "stalls"),
        rows,
    )


if __name__ == "__main__":
    main()
