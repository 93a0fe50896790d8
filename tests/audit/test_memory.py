"""Memory that believes something else than the disk says is found, and rebuilt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from penstock.store.kv.check import Kind
from penstock.store.live.indexed_directory import HeldGroup

if TYPE_CHECKING:
    from collections.abc import Callable


def one_less(hand: Any) -> None:
    hand.queue("plain").counts.available -= 1


def no_retention(hand: Any) -> None:
    hand.core.retention.set((hand.queue("plain").number, "unclaimed"), None)


def late_leases(hand: Any) -> None:
    hand.core.leases.none_before_ms = 1 << 63


def high_front(hand: Any) -> None:
    first_keys = hand.core.leases.first_keys
    first_keys.scan(b"", b"\xff", 1)
    first_keys[b""] = b"\xff"


def other_filter(hand: Any) -> None:
    hand.queue("plain").coverage.live[-1].filter = "x = 1"


def no_delays(hand: Any) -> None:
    active = hand.core.active
    heap = active._due
    heap.set(hand.queue("fifo").number, None)


def lost_group(hand: Any) -> None:
    active, number = hand.core.active, hand.queue("plain").number
    directories = active._directories
    directories[number].ring.popitem()


def held_by_nothing(hand: Any) -> None:
    active, number = hand.core.active, hand.queue("plain").number
    if hand.design == "indexed":
        directory = active._directories[number]
        group, lanes = directory.ring.popitem()
        directory.held[group] = HeldGroup(0, lanes)
    else:
        directory = active._directories[number]
        directory.block(next(iter(directory.ring)))


def half_claimed(hand: Any) -> None:
    if hand.design == "indexed":
        next(iter(hand.core.active._claimed.values())).attempts += 1
    else:
        bucket = next(each for each in hand.core.active._open.values() if each.waiting)
        bucket._waiting_bytes.popitem()


WRONG = [
    *(one_less, no_retention, late_leases, high_front, other_filter, no_delays, lost_group),
    *(held_by_nothing, half_claimed),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
@pytest.mark.parametrize("design", ["indexed", "buckets"])
def test_memory_is_held_against_the_disk(
    make_hand: Callable[[str, str, str], Any], design: str, wrong: Callable[[Any], None]
) -> None:
    hand = make_hand("memory", design, "inline")
    before = hand.contents()
    wrong(hand)
    report = hand.broker.check()
    assert set(report.found) == {Kind.MEMORY}
    assert all(each.text for each in report.violations)
    repaired = hand.broker.check(repair=True)
    assert repaired.ok
    assert not repaired.clean
    assert hand.broker.check().clean
    assert hand.contents() == before, "memory was wrong, and the disk was written to"
