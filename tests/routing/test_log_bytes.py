"""The metadata log lies on disk as the OpenData-Log has it: written out by hand, byte for byte."""

from __future__ import annotations

from struct import pack
from typing import TYPE_CHECKING

import pytest

from penstock import Broker, ManualClock, Message
from penstock.engines.memory import MemoryEngine
from penstock.urls import DESIGNS, make_store

if TYPE_CHECKING:
    from collections.abc import Iterator

NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000


class Opened:
    """A broker on an engine that can be looked into."""

    def __init__(self, design: str, routing: str) -> None:
        self.clock = ManualClock(NOW_MS)
        self._engine = MemoryEngine(DESIGNS[design])
        self._store = make_store(self._engine, design, self.clock, routing)
        self.broker = Broker(self._store, clock=self.clock, background=False)

    @property
    def instance(self) -> bytes:
        return b"%08x" % self._store.identity.store_id

    def rows(self) -> dict[bytes, bytes]:
        """Return what the log's table holds of the Log, without what is Penstock's own."""
        rows = self._engine.table("log").rows
        return {key: value for key, value in rows.items() if key.startswith(b"\x03")}

    def log_key(self, log: int = 0) -> bytes:
        return b"opendata-queue/" + self.instance + b"/messages/metadata/%d" % log

    def entry_keys(self, log: int = 0) -> list[bytes]:
        """Return the keys of the first segment's entries, without their common beginning."""
        prefix = b"\x03\x01\x00\x00\x00\x01\x10" + self.log_key(log) + b"\x00"
        return [key[len(prefix) :] for key in self.rows() if key.startswith(prefix)]


@pytest.fixture(params=[(d, r) for d in ("indexed", "buckets") for r in ("inline", "pipeline")])
def opened(request: pytest.FixtureRequest) -> Iterator[Opened]:
    found = Opened(*request.param)
    yield found
    found.broker.close()


def element(message_id: int, metadata: bytes) -> bytes:
    return pack("<QI", message_id, len(metadata)) + metadata


def metadata(group: bytes, priority: int, size: int, attributes: bytes, now_ms: int) -> bytes:
    """Lay out 01 and the MessagePack array; every text and number here is a short one."""
    return (
        b"\x01\x96\xcf"
        + pack(">Q", now_ms)
        + bytes([0xA0 | len(group)])
        + group
        + bytes([priority, size, 0])
        + attributes
    )


def test_two_publishes(opened: Opened) -> None:
    opened.broker.publish([Message(b"one", {"n": 1}, "g", 7), Message(b"", {})])
    opened.clock.advance(1)
    opened.broker.publish([Message(b"three", {"b": True})])
    first = metadata(b"g", 7, 3, b"\x81\xa1n\x01", NOW_MS)
    second = metadata(b"", 0, 0, b"\x80", NOW_MS)
    third = metadata(b"", 0, 5, b"\x81\xa1b\xc3", NOW_MS + 1)
    key = opened.log_key()
    assert opened.rows() == {
        bytes.fromhex("0301 00000000 20"): pack(">QQ", 1, 4096),
        bytes.fromhex("0301 00000000 30 00000001"): pack(">Qq", 1, NOW_MS),
        bytes.fromhex("0301 00000001 10") + key + b"\x00" + b"\x00": (
            pack("<H", 2) + element(1, first) + element(2, second)
        ),
        bytes.fromhex("0301 00000001 10") + key + b"\x00" + b"\x02": (
            pack("<H", 1) + element(3, third)
        ),
        bytes.fromhex("0301 00000001 40") + key: b"",
    }


def test_the_next_hour_is_the_next_segment(opened: Opened) -> None:
    opened.broker.publish([Message(b"")] * 3)
    opened.clock.advance(HOUR_MS)
    opened.broker.publish([Message(b"")] * 2)
    rows = opened.rows()
    key = opened.log_key()
    later = metadata(b"", 0, 0, b"\x80", NOW_MS + HOUR_MS)
    assert rows[bytes.fromhex("0301 00000000 30 00000001")] == pack(">Qq", 1, NOW_MS)
    assert rows[bytes.fromhex("0301 00000000 30 00000002")] == pack(">Qq", 4, NOW_MS + HOUR_MS)
    assert rows[bytes.fromhex("0301 00000002 40") + key] == b""
    # The sequence in the key counts from the segment's start.
    entry = rows[bytes.fromhex("0301 00000002 10") + key + b"\x00\x00"]
    assert entry == pack("<H", 2) + element(4, later) + element(5, later)


def test_a_dropped_segment_leaves_nothing(opened: Opened) -> None:
    opened.broker.configure_log(retention_ms=1_000)
    opened.broker.publish([Message(b"")] * 3)
    page = opened.broker.read_log()
    if opened.broker.log_stats().routing == "pipeline":
        opened.broker.assign(0, page.cursor, {})
    opened.clock.advance(HOUR_MS)
    opened.broker.publish([Message(b"")])
    opened.clock.advance(1_000)
    opened.broker.sweep()
    rows = opened.rows()
    assert not [key for key in rows if key.startswith(bytes.fromhex("0301 00000001"))]
    assert bytes.fromhex("0301 00000000 30 00000001") not in rows
    assert bytes.fromhex("0301 00000000 30 00000002") in rows


def test_each_log_has_a_key_of_its_own(opened: Opened) -> None:
    opened.broker.configure_log(logs=12)
    opened.broker.publish([Message(b"", group=f"{number}") for number in range(200)])
    rows = opened.rows()
    listing = bytes.fromhex("0301 00000001 40")
    listed = [key.removeprefix(listing) for key in rows if key.startswith(listing)]
    assert sorted(listed) == sorted(opened.log_key(log) for log in range(12))
    assert all(len(opened.entry_keys(log)) == 1 for log in range(12))


def test_entries_are_cut_by_count(opened: Opened) -> None:
    opened.broker.publish([Message(b"")] * 10_000)
    # Sequences 0, 4096 and 8192 as var_u64: the first four bits say how many bytes follow.
    assert opened.entry_keys() == [b"\x00", b"\x20\x10\x00", b"\x20\x20\x00"]
    assert [len(page) for page in pages(opened.broker)] == [10_000]


def test_entries_are_cut_by_size(opened: Opened) -> None:
    big = {"text": "x" * 60_000}
    opened.broker.publish([Message(b"", big)] * 40)
    sizes = [len(value) for key, value in opened.rows().items() if key[6:7] == b"\x10"]
    assert len(sizes) == 3
    assert max(sizes) <= 1 << 20
    assert [len(page) for page in pages(opened.broker)] == [40]


def pages(broker: Broker) -> Iterator[list[int]]:
    at = 0
    while (page := broker.read_log(begin=at, limit=100_000)).records:
        yield [record.message_id for record in page.records]
        at = page.cursor.end
