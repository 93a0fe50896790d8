"""Every derived row is recomputed: whichever is deleted or garbled, a repair writes it again."""

from __future__ import annotations

import random  # noqa: TID251 - a seed replays it
from typing import Any

import pytest
from tests.audit.conftest import check

from penstock.store.codec.opendata import terminated

# Tables and prefixes of the rows that follow from others, in a store as the fixture fills it.
DERIVED = {
    "indexed": [("visibility_index", b""), ("groups", b"")],
    "buckets": [("buckets", b"\x02\x09")],
    "both": [
        ("lease_expiry", b""),
        ("history", b"\x02\x0a" + terminated(b"shared")),
        ("payloads", b"\x02\x0d"),
        ("queues", b"\x02\x06"),
        ("queues", b"\x02\x0b"),
        ("queues", b"\x02\x13"),
        ("default", b"meta"),
        ("default", b"\x02\x0e"),
        ("log", b"\x02\x10"),
        ("log", b"\x03\x01\x00\x00\x00\x00\x30"),
        ("log", b"\x03\x01\x00\x00\x00\x01\x40"),
    ],
}
# A count of none says that a message is unrouted; nothing else does.
UNROUTED = (0).to_bytes(4, "big")


def derived_rows(hand: Any) -> list[tuple[str, bytes, bytes]]:
    return [
        (table, key, value)
        for table, prefix in [*DERIVED[hand.design], *DERIVED["both"]]
        for key, value in hand.rows(table, prefix)
        if key.startswith(prefix) and (table != "payloads" or value != UNROUTED)
    ]


def without_quarantine(hand: Any) -> dict[str, dict[bytes, bytes]]:
    found = {table: dict(rows) for table, rows in hand.contents().items()}
    for key in [key for key in found["default"] if key[:2] in {b"\x02\x0f", b"\x02\x0e"}]:
        del found["default"][key]
    return found


@pytest.mark.parametrize("how", ["delete", "garble"])
@pytest.mark.parametrize("design", ["indexed", "buckets"])
@pytest.mark.parametrize("seed", range(2))
def test_a_repair_writes_the_same_row(make_hand: Any, design: str, how: str, seed: int) -> None:
    hand = make_hand("memory", design, "inline")
    chance = random.Random(seed)
    rows = derived_rows(hand)
    assert len(rows) > 25
    before = without_quarantine(hand)
    for table, key, value in chance.sample(rows, 15):
        if how == "delete":
            hand.delete(table, key)
        else:
            hand.put(table, key, value + b"?")
        report = check(hand)
        assert report.left, (table, key)
        assert check(hand, repair=True).ok
        assert without_quarantine(hand) == before, (table, key.hex(), report.violations)
