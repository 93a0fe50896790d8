"""What moves leave behind, and damage to it: found, and repaired."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from penstock.errors import CorruptRecord
from penstock.model import State
from penstock.store.codec.opendata import terminated
from penstock.store.kv.check import Kind
from penstock.store.kv.queues import decode_counts, encode_counts
from penstock.store.live import Item
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Callable

MARKS = b"\x02\x15" + terminated(b"moved")
COUNTS = b"\x02\x0bmoved"
DESIGN = pytest.mark.parametrize("design", ["indexed", "buckets"])


def move(hand: Any) -> list[int]:
    """Have a queue whose messages have all come from others, in every state but failed."""
    broker = hand.broker
    broker.create_queue("moved", max_attempts=1)
    assert broker.move("shared", "moved") == 1
    assert broker.move("plain", "moved", state="available") > 5
    assert broker.move("plain", "moved", state="delayed") == 2
    broker.ack([broker.claim("moved")[0].receipt])
    broker.claim("moved", limit=2)
    ids = [int.from_bytes(key[-8:], "big") for key, _ in hand.rows("history", MARKS)]
    stats = broker.stats("moved")
    assert len(ids) == stats.moved_in_total > 8
    assert_clean(broker)
    return ids


def a_mark_without_a_message(hand: Any) -> set[Any]:
    move(hand)
    key = MARKS + (1 << 40).to_bytes(8, "big")
    hand.put("history", key, bytes(8))
    return {(Kind.ORPHAN_ENTRY, "history", key)}


def a_mark_without_a_key(hand: Any) -> set[Any]:
    key = MARKS + move(hand)[0].to_bytes(8, "big")
    hand.put("history", key, b"junk")
    return {(Kind.WRONG_FIELD, "history", key)}


def a_mark_of_a_stranger(hand: Any) -> set[Any]:
    move(hand)
    key = b"\x02\x15" + terminated(b"nobody") + bytes(8)
    hand.put("history", key, bytes(8))
    return {(Kind.STRANGER, "history", key)}


def alter(hand: Any, **changes: int) -> set[Any]:
    move(hand)
    known = decode_counts(hand.get("queues", COUNTS))
    hand.put("queues", COUNTS, encode_counts(msgspec.structs.replace(known, **changes)))
    return {(Kind.COUNTER, "queues", COUNTS)}


def more_came_in_than_did(hand: Any) -> set[Any]:
    return alter(hand, moved_in_total=1_000)


def fewer_came_in_than_did(hand: Any) -> set[Any]:
    return alter(hand, moved_in_total=1)


def more_went_out_than_did(hand: Any) -> set[Any]:
    return alter(hand, moved_out_total=1_000)


DAMAGE = [
    a_mark_without_a_message,
    a_mark_without_a_key,
    a_mark_of_a_stranger,
    more_came_in_than_did,
    fewer_came_in_than_did,
    more_went_out_than_did,
]


@DESIGN
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage(
    make_hand: Any, examine: Any, design: str, damage: Callable[[Any], set[Any]]
) -> None:
    examine(make_hand("memory", design, "inline"), damage)


@DESIGN
@pytest.mark.parametrize("engine", ["memory", "rocksdb"])
def test_nothing_is_left_of_what_has_gone(make_hand: Any, engine: str, design: str) -> None:
    hand = make_hand(engine, design, "pipeline")
    move(hand)
    hand.clock.advance(60_000)
    hand.broker.move("moved", "fifo", state="available", limit=3)
    assert_clean(hand.broker)
    hand.broker.purge("moved", states=["available", "delayed", "in_flight", "done", "failed"])
    assert hand.rows("history", MARKS) == []
    assert_clean(hand.broker)
    move_back = hand.broker.move("fifo", "moved", state="available")
    assert move_back > 3
    hand.broker.delete_queue("moved")
    assert hand.rows("history", MARKS) == []
    assert_clean(hand.broker)


@pytest.mark.parametrize("record", [b"", b"\x01", b"\x02" + bytes(152), b"\x01" + bytes(151)])
def test_counters_that_do_not_decode(record: bytes) -> None:
    with pytest.raises(CorruptRecord):
        decode_counts(record)


@DESIGN
def test_a_message_that_can_not_be_read_stays(
    make_hand: Any, design: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    hand = make_hand("memory", design, "inline")
    hand.broker.create_queue("moved")
    history = hand.core.history
    (entry,) = history.find_failed(hand.queue("shared"), hand.ids["failed"])
    batch = hand.engine.batch()
    queue = hand.queue("shared")
    history.take(batch, queue, State.FAILED, [entry])
    hand.engine.commit(batch)
    batch = hand.engine.batch()
    item = Item(entry.key, entry.message_id, b"", entry.attempts, 0, 0, b"\xff\xff")
    history.add(batch, queue, State.FAILED, [([item], None)], "no", hand.clock.now_ms())
    hand.engine.commit(batch)
    assert hand.broker.move("shared", "moved") == 0
    assert hand.broker.stats("shared").failed == 1
