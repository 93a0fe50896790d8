"""Where reads begin and end, and how they are cut."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

from hypothesis import given
from hypothesis import strategies as st

from penstock import ManualClock
from penstock.errors import InvalidInput, StoreMismatch
from penstock.model import LogStats
from penstock.spark.log import (
    Stretch,
    between,
    check_kept,
    check_store,
    cut,
    lag_of,
    limited,
    logs_of,
    resolve,
)
from penstock.spark.source import read_options
from penstock.spark.stream import TriggerDelay

STATS = LogStats(
    routing="pipeline",
    logs=2,
    earliest=10,
    end=100,
    routed_up_to=0,
    segments=1,
    retention_ms=0,
    cursors={0: 20, 1: 30},
)


def test_places() -> None:
    assert resolve("earliest", STATS, "x") == {0: 10, 1: 10}
    assert resolve("latest", STATS, "x") == {0: 100, 1: 100}
    assert resolve({0: -2, 1: -1}, STATS, "x") == {0: 10, 1: 100}
    assert resolve({0: 3, 1: 50}, STATS, "x") == {0: 3, 1: 50}


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ({0: 5}, "must name every log that is read, and no other: 0, 1"),
        ({0: 5, 1: 5, 2: 5}, "must name every log that is read, and no other: 0, 1"),
        ({0: 5, 1: 101}, "log 1 is 101; there are offsets up to 100"),
        ({0: -3, 1: 5}, "log 0 is -3"),
    ],
)
def test_places_that_are_not_there(place: dict[int, int], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        resolve(place, STATS, "startingOffsets")


def test_a_limit_counts_messages_of_all_logs_together() -> None:
    assert limited({0: 0, 1: 40}, {0: 100, 1: 100}, 10) == {0: 10, 1: 40}
    assert limited({0: 95, 1: 95}, {0: 100, 1: 100}, 10) == {0: 100, 1: 100}
    assert limited({0: 5, 1: 5}, {0: 100, 1: 100}, None) == {0: 100, 1: 100}
    # A log that has been read to its end does not hold the others back.
    assert limited({0: 100, 1: 200}, {0: 100, 1: 300}, 10) == {0: 100, 1: 210}


def test_a_store_that_went_back_gives_nothing() -> None:
    assert limited({0: 90}, {0: 50}, 10) == {0: 90}
    assert between({0: 90}, {0: 90}) == []


def test_a_new_log_begins_where_the_others_stand() -> None:
    assert between({0: 40, 1: 50}, {0: 60, 1: 50, 2: 60}) == [
        Stretch(0, 40, 60),
        Stretch(2, 40, 60),
    ]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 500), st.integers(1, 500)), max_size=4),
    st.integers(1, 9),
    st.integers(1, 50),
)
def test_pieces_cover_their_stretches(
    given_stretches: list[tuple[int, int, int]], pieces: int, least: int
) -> None:
    whole = [Stretch(log, begin, begin + width) for log, begin, width in given_stretches]
    parts = cut(whole, pieces, least)
    assert all(part.begin < part.end for part in parts)
    assert [(part.log, at) for part in parts for at in range(part.begin, part.end)] == [
        (stretch.log, at) for stretch in whole for at in range(stretch.begin, stretch.end)
    ]
    assert len(parts) <= pieces + len(whole)


def test_data_loss_is_told_or_left_out() -> None:
    with pytest.raises(InvalidInput, match=r"data loss: offsets 5 to 10 of log 0.*failOnDataLoss"):
        check_kept([Stretch(0, 5, 50)], STATS, fail=True)
    assert check_kept([Stretch(0, 5, 50), Stretch(1, 2, 9)], STATS, fail=False) == [
        Stretch(0, 10, 50)
    ]


def test_offsets_of_another_store_are_refused() -> None:
    check_store({"0": 5, "store": "7"}, "7")
    check_store({"0": 5}, "7")
    with pytest.raises(StoreMismatch, match="belongs to store 7, the broker serves store 8"):
        check_store({"0": 5, "store": "7"}, "8")
    assert logs_of({"0": 5, "11": 6, "store": "7", "filters": 1}) == {0: 5, 11: 6}


def test_a_micro_batch_waits_for_enough_or_for_long_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock()
    monkeypatch.setattr("penstock.spark.stream.SystemClock", lambda: clock)
    given = {"location": "grpc://h:1", "table": "log"}
    always = TriggerDelay(read_options(given, streaming=True))
    assert not always.holds(1)
    given |= {"minOffsetsPerTrigger": "10", "maxTriggerDelay": "30s"}
    delay = TriggerDelay(read_options(given, streaming=True))
    assert not delay.holds(1), "the first does not wait"
    assert delay.holds(9)
    assert not delay.holds(10)
    clock.advance(29_999)
    assert delay.holds(1)
    clock.advance(1)
    assert not delay.holds(1)
    assert delay.holds(1)
    assert not delay.holds(0)


def test_lag_counts_what_is_left() -> None:
    assert lag_of({0: 40, 1: 120}, {0: 100, 1: 100, 2: 100}) == {"0": 60, "1": 0, "2": 0}
