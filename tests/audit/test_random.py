"""Random verbs leave a clean store; random damage is repaired, whatever it hits."""

from __future__ import annotations

import random  # noqa: TID251 - a seed replays it
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant, run_state_machine_as_test

import penstock
from penstock.store.kv.check import audit
from penstock.testing.checking import assert_clean
from penstock.testing.machine import StoreMachine
from penstock.urls import DESIGNS

DESIGN = pytest.mark.parametrize("design", ["indexed", "buckets"])


@pytest.mark.slow
@DESIGN
def test_random_verbs(design: str) -> None:
    class Machine(StoreMachine):
        url = f"memory:?design={design}"

        @invariant()
        def store_is_clean(self) -> None:
            assert_clean(self.broker)

    run_state_machine_as_test(Machine, settings=settings(max_examples=15, stateful_step_count=40))


def damage(hand: Any, chance: random.Random) -> None:
    """Delete, move or garble a few records."""
    for _ in range(chance.randrange(1, 4)):
        table = chance.choice(sorted(DESIGNS[hand.design]))
        rows = hand.rows(table)
        if not rows:
            continue
        key, value = chance.choice(rows)
        how = chance.choice(["delete", "flip", "flip", "cut", "move", "swap"])
        if how == "delete":
            hand.delete(table, key)
        elif how == "flip" and value:
            at = chance.randrange(len(value))
            garbled = value[:at] + bytes([value[at] ^ 1 << chance.randrange(8)]) + value[at + 1 :]
            hand.put(table, key, garbled)
        elif how == "cut":
            hand.put(table, key, value[: chance.randrange(len(value) + 1)])
        elif how == "move":
            hand.delete(table, key)
            hand.put(table, key[:-1] + bytes([chance.randrange(256)]), value)
        else:
            hand.put(table, key, chance.choice(rows)[1])


def repair_and_use(hand: Any) -> None:
    report = audit(hand.store, repair=True, now_ms=hand.clock.now_ms())
    assert report.ok, report.violations
    assert_clean(hand.broker)
    broker, clock = hand.broker, hand.clock
    if hand.routing == "pipeline":
        while penstock.route_once(broker):
            pass
    clock.advance(90_000_000)
    for name in ("plain", "fifo", "shared"):
        while deliveries := broker.claim(name, limit=100):
            assert all(broker.ack([each.receipt for each in deliveries]))
    assert_clean(broker)
    assert broker.publish([penstock.Message(b"", {"queue": "plain"})])
    while broker.sweep(budget=1_000_000).total:
        pass
    assert_clean(broker)


@DESIGN
@pytest.mark.parametrize("routing", ["inline", "pipeline"])
@pytest.mark.parametrize("seed", range(12))
def test_random_damage(make_hand: Any, design: str, routing: str, seed: int) -> None:
    hand = make_hand("memory", design, routing)
    damage(hand, random.Random(seed))
    repair_and_use(hand)
