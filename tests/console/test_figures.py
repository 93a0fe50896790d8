"""Histories and rates, the reader of figures, and how numbers are written."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from tests.waiting import wait_until

import penstock
from penstock import limits
from penstock.clock import ManualClock
from penstock.server.console import figures as shown
from penstock.server.console.figures import MINUTES, Figures, History

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.broker.broker import Broker


def test_a_history_is_of_the_last_hour() -> None:
    history = History()
    for minute in range(100, 100 + MINUTES + 5):
        history.put(minute, minute)
    assert history.values(164) == [float(each) for each in range(105, 165)]
    later = history.values(174)
    assert later[:50] == [float(each) for each in range(115, 165)]
    assert all(map(math.isnan, later[50:]))
    assert all(map(math.isnan, history.values(10_000)))


def test_minutes_that_nobody_noted_are_left_out() -> None:
    history = History()
    history.put(100, 1)
    history.put(103, 4)
    assert [each for each in history.values(104) if not math.isnan(each)] == [1, 4]
    history.put(103 + MINUTES, 7)
    assert [each for each in history.values(163) if not math.isnan(each)] == [7]


def test_spark_lines_are_inside_of_their_drawing() -> None:
    assert shown.spark([]) == shown.spark([math.nan] * 60) == shown.spark([1.0]) == ""
    for values in ([0.0] * 2, [5.0] * 60, [math.nan] * 58 + [3.0, 4.0], [0.0, 1e12]):
        points = [tuple(map(float, pair.split(","))) for pair in shown.spark(values).split()]
        inner = [y for x, y in points if 0 <= x <= shown.SPARK_WIDTH][1:]
        assert all(0 <= y <= shown.SPARK_HEIGHT for y in inner)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (shown.number(1_234_567), "1,234,567"),
        (shown.number(None), "–"),
        (shown.rate(0), "0"),
        (shown.rate(0.01), "< 0.1"),
        (shown.rate(12.34), "12.3"),
        (shown.rate(12_345.6), "12,346"),
        (shown.duration(None), "–"),
        (shown.duration(12), "12 ms"),
        (shown.duration(59_999), "59 s"),
        (shown.duration(61_000), "1 min 1 s"),
        (shown.duration(3_600_000), "1 h"),
        (shown.duration(90_000_000), "1 d 1 h"),
        (shown.size(None), "–"),
        (shown.size(512), "512 Bytes"),
        (shown.size(3 << 30), "3.0 GiB"),
        (shown.size(5 << 40), "5.0 TiB"),
        (shown.moment(0), "1970-01-01 00:00:00 UTC"),
    ],
)
def test_numbers_are_written_short(written: str, text: str) -> None:
    assert written == text


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def broker(clock: ManualClock) -> Iterator[Broker]:
    with penstock.open("memory:", clock=clock) as opened:
        for name in ("a", "b"):
            opened.create_queue(name)
        yield opened


def test_rates_are_those_of_the_last_seconds(broker: Broker, clock: ManualClock) -> None:
    figures = Figures(broker, clock.seconds)
    assert figures.note(broker.stats("a")).came is None
    for _ in range(10):
        clock.advance(2_000)
        broker.publish([penstock.Message(b"x", {"queue": "a"})] * 20)
        broker.ack([each.receipt for each in broker.claim("a", limit=10)])
        found = figures.note(broker.stats("a"))
    assert (found.came, found.done) == (10, 5)
    for _ in range(12):
        clock.advance(2_000)
        found = figures.note(broker.stats("a"))
    assert (found.came, found.done) == (0, 0)
    # After a pause nothing is known.
    clock.advance(600_000)
    assert figures.note(broker.stats("a")).came is None


def test_all_queues_are_read_while_somebody_looks(broker: Broker, clock: ManualClock) -> None:
    figures = Figures(broker, clock.seconds)
    broker.publish([penstock.Message(b"x", {"queue": "a"})] * 3)
    figures.start()
    try:
        figures.look(60)
        assert figures.complete
        assert (figures.totals["queues"], figures.totals["available"]) == (2, 3)
        broker.delete_queue("b")
        broker.create_queue("c")
        wait_until(lambda: set(figures.queues) == {"a", "c"})
    finally:
        figures.stop()


def test_the_store_is_left_alone_while_nobody_looks(
    broker: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    stats = broker.stats

    def count(name: str) -> object:
        asked.append(name)
        return stats(name)

    monkeypatch.setattr(broker, "stats", count)
    figures = Figures(broker, clock.seconds)
    figures.start()
    try:
        # One sample of each queue; the next is due in a minute.
        wait_until(lambda: figures.complete)
        assert asked == ["a", "b"]
        figures.look(60)
        assert asked[:4] == ["a", "b", "a", "b"]
    finally:
        figures.stop()


def test_histories_are_bounded(
    broker: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CONSOLE_MAX_HISTORIES", 1)
    figures = Figures(broker, clock.seconds)
    assert figures.note(broker.stats("a")).history is not None
    assert figures.note(broker.stats("b")).history is None
