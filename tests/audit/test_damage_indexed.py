"""Damage to the indexed design: records, index entries, counts of groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from penstock.store.codec.opendata import payload_key
from penstock.store.codec.records import (
    decode_lease,
    decode_stored_item,
    encode_stored_item,
    with_lease,
)
from penstock.store.kv.check import Kind
from penstock.store.live import lane_of

if TYPE_CHECKING:
    from collections.abc import Callable

JUNK = b"\xffjunk"


def main_of(hand: Any, name: str, message_id: int) -> bytes:
    main: bytes = hand.number(name) + message_id.to_bytes(8, "big")
    return main


def counters(name: str) -> tuple[Kind, str, bytes]:
    return Kind.COUNTER, "queues", b"\x02\x0b" + name.encode()


def ready_entry(hand: Any, name: str, message_id: int) -> bytes:
    (key,) = [
        key
        for key, _ in hand.rows("visibility_index", b"\x01" + hand.number(name))
        if key[-8:] == message_id.to_bytes(8, "big")
    ]
    found: bytes = key
    return found


def timer_entry(hand: Any, name: str, message_id: int) -> bytes:
    (key,) = [
        key
        for key, _ in hand.rows("visibility_index", b"\x00" + hand.number(name))
        if key[-8:] == message_id.to_bytes(8, "big")
    ]
    found: bytes = key
    return found


def waiting(hand: Any) -> int:
    """Give a message that waits in one queue only and was never claimed."""
    claimed = [*hand.ids["done"], *hand.ids["retried"], *hand.ids["plain in flight"]]
    found: int = next(each for each in hand.ids["plain"] if each not in claimed)
    return found


def lease_of(hand: Any, name: str, message_id: int) -> bytes:
    id8 = message_id.to_bytes(8, "big")
    found: bytes = next(
        lease
        for lease in hand.leases_of(name)
        if id8 in decode_lease(hand.get("leases", lease)).ids
    )
    return found


def ready_key(main: bytes, fields: Any) -> bytes:
    """Return the index entry that a message of these fields has while it can be claimed."""
    key: bytes = b"\x01" + main[:4] + fields[1] + fields[4].to_bytes(8, "big") + main[4:]
    return key


# --- records ------------------------------------------------------------------------------


def record_is_junk(hand: Any) -> set[Any]:
    message_id = waiting(hand)
    main = main_of(hand, "plain", message_id)
    hand.put("available", main, JUNK)
    return {
        (Kind.UNDECODABLE, "available", main),
        (Kind.ORPHAN_ENTRY, "visibility_index", ready_entry(hand, "plain", message_id)),
        counters("plain"),
    }


def metadata_is_junk(hand: Any) -> set[Any]:
    message_id = waiting(hand)
    main = main_of(hand, "plain", message_id)
    fields: list[Any] = list(decode_stored_item(hand.get("available", main)))
    fields[0] = JUNK
    hand.put("available", main, encode_stored_item(*fields[:5]))
    return {
        (Kind.UNDECODABLE, "available", main),
        (Kind.ORPHAN_ENTRY, "visibility_index", ready_entry(hand, "plain", message_id)),
        counters("plain"),
    }


def record_is_gone(hand: Any) -> set[Any]:
    message_id = waiting(hand)
    hand.delete("available", main_of(hand, "plain", message_id))
    return {
        (Kind.ORPHAN_ENTRY, "visibility_index", ready_entry(hand, "plain", message_id)),
        (Kind.GARBAGE, "payloads", payload_key(message_id)),
        counters("plain"),
    }


def record_in_flight_is_gone(hand: Any) -> set[Any]:
    message_id = hand.ids["fifo in flight"][0]
    lease = lease_of(hand, "fifo", message_id)
    hand.delete("in_progress", main_of(hand, "fifo", message_id))
    return {
        (Kind.NOT_HELD, "leases", lease),
        (Kind.GARBAGE, "payloads", payload_key(message_id)),
        (Kind.ORPHAN_ENTRY, "groups", group_key(hand, "g")),
        counters("fifo"),
    }


def record_in_flight_is_junk(hand: Any) -> set[Any]:
    message_id = hand.ids["fifo in flight"][0]
    lease = lease_of(hand, "fifo", message_id)
    main = main_of(hand, "fifo", message_id)
    hand.put("in_progress", main, JUNK)
    return {
        (Kind.UNDECODABLE, "in_progress", main),
        (Kind.NOT_HELD, "leases", lease),
        (Kind.ORPHAN_ENTRY, "groups", group_key(hand, "g")),
        counters("fifo"),
    }


def record_names_another_lane(hand: Any) -> set[Any]:
    main = main_of(hand, "plain", waiting(hand))
    fields: list[Any] = list(decode_stored_item(hand.get("available", main)))
    fields[1] = b"?"
    hand.put("available", main, with_lease(encode_stored_item(*fields[:5]), b"L" * 16))
    return {(Kind.WRONG_FIELD, "available", main)}


def waits_and_is_in_flight(hand: Any) -> set[Any]:
    message_id = hand.ids["plain in flight"][0]
    main = main_of(hand, "plain", message_id)
    fields: list[Any] = list(decode_stored_item(hand.get("in_progress", main)))
    hand.put("available", main, encode_stored_item(*fields[:5]))
    hand.put("visibility_index", ready_key(main, fields), b"")
    return {(Kind.TWICE, "available", main)}


# --- index ----------------------------------------------------------------------------------


def entry_is_gone(hand: Any) -> set[Any]:
    key = ready_entry(hand, "plain", waiting(hand))
    hand.delete("visibility_index", key)
    return {(Kind.MISSING_ENTRY, "visibility_index", key)}


def delayed_entry_is_gone(hand: Any) -> set[Any]:
    key = timer_entry(hand, "plain", hand.ids["delayed"][0])
    hand.delete("visibility_index", key)
    return {(Kind.MISSING_ENTRY, "visibility_index", key)}


def fifo_entry_is_gone(hand: Any) -> set[Any]:
    key = ready_entry(hand, "fifo", hand.ids["delayed fifo"][0])
    hand.delete("visibility_index", key)
    return {(Kind.MISSING_ENTRY, "visibility_index", key)}


def entry_names_another(hand: Any) -> set[Any]:
    key = ready_entry(hand, "plain", waiting(hand))
    hand.put("visibility_index", key, bytes(12))
    return {(Kind.WRONG_FIELD, "visibility_index", key)}


def entry_of_nobody(hand: Any) -> set[Any]:
    number = hand.number("plain")
    ready = b"\x01" + number + lane_of("a", 0) + bytes(8) + (4_000).to_bytes(8, "big")
    timer = b"\x00" + number + bytes(8) + (4_000).to_bytes(8, "big")
    hand.put("visibility_index", ready, b"")
    hand.put("visibility_index", timer, number + timer[-8:] + lane_of("a", 0))
    return {(Kind.ORPHAN_ENTRY, "visibility_index", key) for key in (ready, timer)}


def available_and_delayed(hand: Any) -> set[Any]:
    message_id = hand.ids["delayed"][0]
    main = main_of(hand, "plain", message_id)
    key = ready_key(main, decode_stored_item(hand.get("available", main)))
    hand.put("visibility_index", key, b"")
    return {(Kind.ORPHAN_ENTRY, "visibility_index", key)}


def available_too_early(hand: Any) -> set[Any]:
    message_id = hand.ids["delayed"][1]
    main = main_of(hand, "plain", message_id)
    key = ready_key(main, decode_stored_item(hand.get("available", main)))
    timer = timer_entry(hand, "plain", message_id)
    hand.delete("visibility_index", timer)
    hand.put("visibility_index", key, b"")
    return {
        (Kind.ORPHAN_ENTRY, "visibility_index", key),
        (Kind.MISSING_ENTRY, "visibility_index", timer),
    }


def fifo_available_too_early(hand: Any) -> set[Any]:
    message_id = hand.ids["delayed fifo"][0]
    timer = timer_entry(hand, "fifo", message_id)
    hand.delete("visibility_index", timer)
    return {(Kind.MISSING_ENTRY, "visibility_index", timer)}


# --- groups and strangers ---------------------------------------------------------------------


def group_key(hand: Any, group: str) -> bytes:
    key: bytes = hand.number("fifo") + lane_of(group, 0)[:-1]
    return key


def group_count_is_wrong(hand: Any) -> set[Any]:
    key = group_key(hand, "g")
    hand.put("groups", key, (7).to_bytes(4, "big"))
    return {(Kind.WRONG_FIELD, "groups", key)}


def group_count_is_gone(hand: Any) -> set[Any]:
    key = group_key(hand, "g")
    assert hand.get("groups", key)
    hand.delete("groups", key)
    return {(Kind.MISSING_ENTRY, "groups", key)}


def group_of_nobody_is_held(hand: Any) -> set[Any]:
    key = group_key(hand, "nobody")
    hand.put("groups", key, (1).to_bytes(4, "big"))
    return {(Kind.ORPHAN_ENTRY, "groups", key)}


def records_of_no_queue(hand: Any) -> set[Any]:
    ghost = (99).to_bytes(4, "big")
    keys = {
        "available": ghost + bytes(8),
        "in_progress": ghost + bytes(8),
        "visibility_index": b"\x01" + ghost + bytes(18),
        "groups": ghost + b"\x00",
    }
    for table, key in keys.items():
        hand.put(table, key, b"?")
    return {(Kind.STRANGER, table, key) for table, key in keys.items()}


DAMAGES = [
    record_is_junk, metadata_is_junk, record_is_gone, record_in_flight_is_gone,
    record_in_flight_is_junk, record_names_another_lane, waits_and_is_in_flight, entry_is_gone,
    delayed_entry_is_gone, fifo_entry_is_gone, entry_names_another, entry_of_nobody,
    available_and_delayed, available_too_early, fifo_available_too_early, group_count_is_wrong,
    group_count_is_gone, group_of_nobody_is_held, records_of_no_queue,
]  # fmt: skip


def name_of(damage: Callable[[Any], set[Any]]) -> str:
    return damage.__name__


@pytest.mark.parametrize("routing", ["inline", "pipeline"])
@pytest.mark.parametrize("damage", DAMAGES, ids=name_of)
def test_memory(make_hand: Any, examine: Any, routing: str, damage: Any) -> None:
    examine(make_hand("memory", "indexed", routing), damage)


@pytest.mark.parametrize("damage", DAMAGES[::3], ids=name_of)
def test_rocksdb(make_hand: Any, examine: Any, damage: Any) -> None:
    examine(make_hand("rocksdb", "indexed", "inline"), damage)
