"""The life-cycle log: each store writes the same records, and none while the log is off."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock import ManualClock, Message
from penstock.store import life

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

URLS = ["memory:", "rocksdb:{place}/store?design=indexed", "rocksdb:{place}/store?design=buckets"]


@pytest.fixture(params=[*URLS, "postgresql"])
def opened(request: Any, tmp_path: Path) -> Iterator[tuple[penstock.Broker, ManualClock]]:
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres").emptied(str(tmp_path))
    else:
        url = request.param.format(place=tmp_path)
    clock = ManualClock()
    with penstock.open(url, clock=clock, background=False) as broker:
        yield broker, clock


@pytest.fixture
def records(caplog: pytest.LogCaptureFixture) -> Iterator[list[dict[str, Any]]]:
    """Turn the log on, and collect the fields of its records."""
    found: list[dict[str, Any]] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.__dict__["fields"])

    handler = Collector()
    life.life.addHandler(handler)
    with caplog.at_level("INFO", "penstock.life"):
        yield found
    life.life.removeHandler(handler)


def live(broker: penstock.Broker, clock: ManualClock) -> tuple[list[int], list[str]]:
    """Lead two messages through everything that is logged; return their ids and the leases."""
    broker.create_queue("q", max_attempts=2, lease_ms=1_000)
    ids = broker.publish([Message(b"x", {"queue": "q"}), Message(b"y", {"queue": "q"})])
    first = broker.claim("q", limit=2, consumer="w 1")
    broker.extend([each.receipt for each in first], lease_ms=2_000)
    broker.release([first[0].receipt], delay_ms=0, reason="later")
    clock.advance(2_000)
    broker.sweep()
    second = broker.claim("q", limit=2)
    broker.ack([second[0].receipt])
    broker.release([second[1].receipt], reason="broken\nline")
    broker.redrive("q")
    third = broker.claim("q", lease_ms=10)
    clock.advance(10)
    broker.sweep()
    fourth = broker.claim("q", lease_ms=10)
    clock.advance(10)
    broker.sweep()
    return ids, [each[0].lease for each in (first, second, third, fourth)]


def test_a_life_gives_exactly_these_records(
    opened: tuple[penstock.Broker, ManualClock],
    records: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    ids, leases = live(*opened)
    x, y = ids

    def step(event: str, *messages: int, lease: str = "", **more: str) -> dict[str, Any]:
        told = {"lease": lease, **more} if lease else more
        head = {"event": event, "queue": "q", "count": len(messages)}
        return {**head, "messages": list(messages), **told}

    first, second, third, fourth = leases
    # The two of the second claim may come in either order.
    done = next(each["messages"][0] for each in records if each["event"] == "ack")
    rest = y if done == x else x
    assert [{**each, "messages": sorted(each["messages"])} for each in records] == [
        step("publish", x, y),
        step("claim", x, y, lease=first, consumer="w 1"),
        step("extend", x, y, lease=first, consumer="w 1"),
        step("release", x, lease=first, consumer="w 1", reason="later"),
        step("expire", y, lease=first, consumer="w 1"),
        step("claim", x, y, lease=second),
        step("ack", done, lease=second),
        step("release", rest, lease=second, reason="broken\nline"),
        step("fail", rest, lease=second, reason="broken\nline"),
        step("redrive", rest),
        step("claim", rest, lease=third),
        step("expire", rest, lease=third),
        step("claim", rest, lease=fourth),
        step("expire", rest, lease=fourth),
        step("fail", rest, lease=fourth, reason="lease expired"),
    ]
    lines = [each.getMessage() for each in caplog.records if each.name == "penstock.life"]
    assert lines[0] == f"publish queue=q count=2 messages=[{x},{y}]"
    assert lines[3] == (
        f"release queue=q count=1 messages=[{x}] lease={first} consumer='w 1' reason=later"
    )
    assert lines[7].endswith(r"reason='broken\nline'")


def test_a_record_has_the_first_ids_and_the_count(records: list[dict[str, Any]]) -> None:
    with penstock.open("memory:", background=False) as broker:
        for name in ("a", "b"):
            broker.create_queue(name, filter="true")
        ids = broker.publish([Message(b"x")] * 30)
        (each,) = broker.claim("a", limit=1)
        broker.release([each.receipt], unseen=True)
    claimed = {"queue": "a", "count": 1, "messages": ids[:1], "lease": each.lease}
    assert records == [
        {"event": "publish", "queue": "a", "count": 30, "messages": ids[: life.MOST_IDS]},
        {"event": "publish", "queue": "b", "count": 30, "messages": ids[: life.MOST_IDS]},
        {"event": "claim", **claimed},
        {"event": "release", **claimed, "reason": "unseen"},
    ]


def test_the_log_is_off_unless_its_logger_has_a_level(
    opened: tuple[penstock.Broker, ManualClock],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Whatever is called of the module would fail: while the log is off nothing is.
    for store in ("kv", "sql"):
        for module in ("publish", "claim", "settle", "move"):
            for name in ("log_step", "log_publish"):
                target = f"penstock.store.{store}.{module}.{name}"
                monkeypatch.setattr(target, None, raising=False)
    with caplog.at_level("DEBUG"):
        live(*opened)
    assert [each for each in caplog.records if each.name == "penstock.life"] == []
