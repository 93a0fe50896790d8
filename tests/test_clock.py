# ruff: noqa: TID251 - the clock is checked against what it is made of
"""Time, as the store sees it; and the clocks that tests and programs bring."""

from __future__ import annotations

import threading
import time
import uuid
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.clock import Clock, ManualClock, SystemClock, TimeGuard, uuid7

TIME_MS = 1_700_000_000_000


# --- ids ------------------------------------------------------------------------------------------


@given(now_ms=st.integers(0, (1 << 48) - 1), bits=st.integers(0, (1 << 74) - 1))
def test_a_lease_id_is_a_uuid_of_version_7(now_ms: int, bits: int) -> None:
    made = uuid.UUID(bytes=uuid7(now_ms, bits))
    assert made.version == 7
    assert made.variant == uuid.RFC_4122
    assert made.int >> 80 == now_ms
    rest = (made.int >> 64 & 0xFFF) << 62 | made.int & ((1 << 62) - 1)
    assert rest == bits


def test_lease_ids_of_later_times_sort_later() -> None:
    assert uuid7(TIME_MS, (1 << 74) - 1) < uuid7(TIME_MS + 1, 0)


@pytest.mark.parametrize("clock", [SystemClock(), ManualClock()])
def test_lease_ids_do_not_repeat(clock: Clock) -> None:
    ids = [clock.lease_id() for _ in range(10_000)]
    assert len(set(ids)) == len(ids)
    # Leases are told apart by their first 14 bytes: the rest counts splits.
    assert len({made[:14] for made in ids}) == len(ids)


@pytest.mark.parametrize("clock", [SystemClock(), ManualClock()])
def test_random_numbers_are_fractions(clock: Clock) -> None:
    drawn = [clock.random() for _ in range(1_000)]
    assert all(0 <= number < 1 for number in drawn)
    assert len(set(drawn)) > 900


# --- the machine's clock --------------------------------------------------------------------------


def test_the_system_clock_tells_the_time() -> None:
    before = time.time_ns() // 1_000_000
    now_ms = SystemClock().now_ms()
    assert before <= now_ms <= time.time_ns() // 1_000_000


def test_two_system_clocks_are_not_seeded_alike() -> None:
    assert [SystemClock().random() for _ in range(4)] != [SystemClock().random() for _ in range(4)]


def test_waiting_ends_with_the_timeout() -> None:
    condition = threading.Condition()
    begun = time.monotonic()
    with condition:
        SystemClock().wait(condition, 20)
    assert 0.01 < time.monotonic() - begun < 60


def test_waiting_ends_when_notified() -> None:
    condition = threading.Condition()
    woken = threading.Event()

    def sleeper() -> None:
        with condition:
            ready.set()
            SystemClock().wait(condition, None)
        woken.set()

    ready = threading.Event()
    thread = threading.Thread(target=sleeper)
    thread.start()
    assert ready.wait(60)
    with condition:
        condition.notify()
    assert woken.wait(60)
    thread.join()


# --- the clock of tests ---------------------------------------------------------------------------


def test_a_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(TIME_MS)
    assert clock.now_ms() == TIME_MS
    assert clock.advance(5) == TIME_MS + 5
    assert clock.advance(-10) == clock.now_ms() == TIME_MS - 5


def test_one_seed_replays_and_another_does_not() -> None:
    def drawn(seed: int) -> list[object]:
        clock = ManualClock(seed=seed)
        return [clock.random(), clock.lease_id(), clock.random()]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_waiting_on_a_manual_clock_takes_a_moment_at_most() -> None:
    condition = threading.Condition()
    begun = time.monotonic()
    with condition:
        ManualClock().wait(condition, 365 * 86_400_000)
        ManualClock().wait(condition, None)
        ManualClock().wait(condition, 0)
    assert time.monotonic() - begun < 60


# --- time inside a store --------------------------------------------------------------------------


def test_time_is_the_wall_clocks_while_that_goes_on() -> None:
    guard = TimeGuard()
    assert [guard.now_ms(ms) for ms in (TIME_MS, TIME_MS, TIME_MS + 7)] == [
        TIME_MS,
        TIME_MS,
        TIME_MS + 7,
    ]


def test_a_clock_that_steps_back_is_waited_for_at_half_speed() -> None:
    guard = TimeGuard()
    guard.now_ms(TIME_MS)
    back = TIME_MS - 1_000
    assert guard.now_ms(back) == TIME_MS
    assert guard.now_ms(back + 100) == TIME_MS + 50
    assert guard.now_ms(back + 1_000) == TIME_MS + 500
    # The two meet after twice the step, and are one again from there on.
    assert guard.now_ms(back + 2_000) == TIME_MS + 1_000 == back + 2_000
    assert guard.now_ms(back + 2_001) == back + 2_001


def test_a_second_step_back_loses_nothing() -> None:
    guard = TimeGuard()
    guard.now_ms(TIME_MS)
    guard.now_ms(TIME_MS - 1_000)
    assert guard.now_ms(TIME_MS - 900) == TIME_MS + 50
    assert guard.now_ms(TIME_MS - 5_000) == TIME_MS + 50
    assert guard.now_ms(TIME_MS - 4_980) == TIME_MS + 60


def test_a_store_that_has_seen_later_times_begins_there() -> None:
    guard = TimeGuard(floor_ms=TIME_MS)
    assert guard.now_ms(TIME_MS - 1_000) == TIME_MS
    assert guard.now_ms(TIME_MS - 900) == TIME_MS + 50
    assert TimeGuard(floor_ms=TIME_MS).now_ms(TIME_MS + 1) == TIME_MS + 1


def test_a_jump_ahead_and_back_holds_what_was_seen() -> None:
    guard = TimeGuard()
    guard.now_ms(TIME_MS)
    ahead = guard.now_ms(TIME_MS + 3_600_000)
    assert guard.now_ms(TIME_MS + 1) == ahead
    assert guard.now_ms(TIME_MS + 1 + 1_800_000) == ahead + 900_000


@given(
    floor_ms=st.integers(0, 2_000),
    readings=st.lists(st.integers(0, 4_000), min_size=1, max_size=50),
)
def test_time_never_goes_back_and_never_runs_away(floor_ms: int, readings: list[int]) -> None:
    guard = TimeGuard(floor_ms)
    seen = [guard.now_ms(wall_ms) for wall_ms in readings]
    assert seen[0] >= floor_ms
    for earlier, later in pairwise(seen):
        assert earlier <= later
    highest = floor_ms
    for (before, now), (wall_before, wall) in zip(pairwise(seen), pairwise(readings), strict=True):
        assert now >= wall
        highest = max(highest, before)
        if wall < highest:
            # Behind, it gains at most half of what the wall clock gained.
            assert now - before <= max(0, wall - wall_before + 1) // 2
