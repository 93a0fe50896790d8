"""The page of a report, from rows as a report has them: no Spark is started."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

from penstock.spark.jobs.report import _cut, _duration, _round_up, page

START = datetime(2030, 1, 31, 12, tzinfo=UTC)
NASTY = "<script>alert('x')</script> & \"more\""


class Reader(HTMLParser):
    """Collects the text of a page, its tags, and every address that it would load."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.addresses: list[str | None] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in {"meta", "rect", "line", "polyline"}:
            self.open.append(tag)
        self.addresses += [value for name, value in attrs if name in {"src", "href", "action"}]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text.append(data)


def figures(number: int) -> dict[str, Any]:
    times = {
        f"{what}_{share}_ms": (number + 1) * size
        for what in ("first_claim", "done")
        for share, size in (("p50", 5), ("p90", 900), ("p99", 61_000))
    }
    return {
        "done": 1_000 + number,
        "failed": number % 3,
        "first_ended_at": START,
        "last_ended_at": START + timedelta(seconds=90),
        "attempts_mean": 1.02,
        "attempts_max": 3,
        **times,
        "done_per_second": 12.5,
        "available": number,
        "delayed": 1,
        "in_flight": 0,
        "oldest_wait_ms": None if number else 150_000,
        "first_claim_unknown": 0,
    }


def frames(queues: list[str], groups: int, reason: str = "timed out") -> dict[str, Any]:
    by_group = [
        {"queue": queues[number % len(queues)], "group": f"g{number}", **figures(number)}
        for number in range(groups)
    ]
    waiting = ("queue", "group", "available", "delayed", "in_flight", "done", "oldest_wait_ms")
    return {
        "queues": [{"queue": name, **figures(number)} for number, name in enumerate(queues)],
        "groups": by_group,
        "reasons": [
            {"queue": name, "outcome": "released", "reason": reason, "attempts": 4, "messages": 2}
            for name in queues
        ],
        "attempts": [
            {"queue": name, "state": "done", "attempts": 1, "messages": 9} for name in queues
        ],
        "slowest": by_group[:20],
        "starving": [{name: row[name] for name in waiting} for row in by_group[:20]],
        "timeline": [
            {"queue": name, "at": START + timedelta(seconds=5 * slot), "done": 40 + slot,
             "failed": 0, "seconds": 5}
            for name in queues for slot in range(10)
        ],
        "routing": [{"log": 0, "cursor": 90, "end": 95, "lag": 5}],
    }  # fmt: skip


def test_text_is_never_taken_for_markup() -> None:
    html = page(frames([NASTY, "plain"], 3, reason=NASTY))
    read = Reader(html)
    assert read.open == []
    assert "script" not in read.tags
    assert read.text.count(NASTY) >= 2
    assert NASTY not in html


def test_nothing_is_loaded_from_anywhere() -> None:
    html = page(frames(["a"], 2))
    assert Reader(html).addresses == []
    assert not re.search(r"https?:|url\(|@import", html)


def test_figures_have_units_and_labels_are_words() -> None:
    text = Reader(page(frames(["orders", "late"], 3))).text
    assert {"5 ms", "900 ms", "61.0 s", "2.5 min", "to be routed", "median", "–"} <= set(text)
    assert not any("_ms" in part or "attempts_mean" in part for part in text)
    assert any("2030-01-31 12:00:00 to 2030-01-31 12:01:30 UTC" in part for part in text)


def test_many_queues_and_groups_stay_readable() -> None:
    queues = [f"tenant-queue-with-a-long-name-{number:02}" for number in range(50)]
    html = page(frames(queues, 200))
    plots = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(plots) == 4
    for plot in plots:
        width, height = map(int, re.findall(r'<svg width="(\d+)" height="(\d+)"', plot)[0])
        assert height < 800
        assert all(0 <= float(x) <= width for x in re.findall(r' x="([\d.-]+)"', plot))
    # The highest ones are plotted, under names that can be told apart; the tables have them all.
    assert "the 12 highest of 50 queues" in html
    assert len({_cut(name) for name in queues}) == 50
    assert all(len(_cut(name, 17)) == 17 for name in queues)
    assert "show 200 rows" in html
    assert all(f'<td class="t">g{number}</td>' in html for number in range(200))
    assert html.count("<details>") == 4


def test_columns_that_are_empty_are_left_out_and_times_are_not_broken() -> None:
    given = frames(["a"], 3)
    for row in given["slowest"]:
        row.update(dict.fromkeys(("available", "delayed", "in_flight")))
    html = page(given)
    slowest = html.partition("Slowest groups")[2].partition("<h2>")[0]
    assert "<th>available</th>" not in slowest
    assert "<th>done</th>" in slowest
    # A cell that is empty in some rows is shown as such.
    assert "<th>oldest wait</th>" in slowest
    assert slowest.count('<td class="n">–</td>') == 2
    assert "td.n { white-space: nowrap; }" in html
    assert '<td class="n">2030-01-31 12:00:00</td>' in slowest


def test_rows_that_the_page_does_not_get_are_counted() -> None:
    given = frames(["a", "b"], 3)
    given["queues"][0]["first_claim_unknown"] = 1_234
    html = page(given, {"groups": 70_000})
    assert "show 70,000 rows" in html
    assert "and 69,500 more, in groups.parquet" in html
    assert "the first claim of 1,234 messages is not known" in html
    assert "is not known" not in page(frames(["a"], 3))


def test_a_report_of_nothing_says_so() -> None:
    empty: dict[str, Any] = {name: [] for name in frames(["a"], 1)}
    text = Reader(page(empty)).text
    assert "no message has ended yet" in text
    assert text.count("nothing to show yet: no queue has such messages") == 3
    assert text.count("nothing to show") == 7
    idle = {**empty, "queues": [{**dict.fromkeys(figures(0)), "queue": "idle"}]}
    assert "idle" in Reader(page(idle)).text


@pytest.mark.parametrize(
    ("ms", "shown"),
    [
        (None, "–"),
        (0, "0 ms"),
        (999, "999 ms"),
        (1_000, "1.0 s"),
        (99_900, "99.9 s"),
        (120_000, "2.0 min"),
        (7_200_000, "2.0 h"),
        (172_800_000, "2.0 d"),
    ],
)
def test_times_have_the_unit_that_suits_them(ms: int | None, shown: str) -> None:
    assert _duration(ms) == shown


@pytest.mark.parametrize("value", [0, 1, 4, 5, 39, 41, 229, 1_234, 999_999])
def test_the_axis_ends_above_the_highest_value(value: int) -> None:
    top = _round_up(value)
    assert value <= top <= max(4, value * 2)
