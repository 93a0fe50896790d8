"""The life-cycle log: each store writes the same records, and none while the log is off."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock import ManualClock, Message
from penstock.store import life
from penstock.store.codec.opendata import payload_key
from penstock.store.sql.store import SqlStore
from penstock.testing.suite.recording import WAYS, LifeLogSuite

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def test_a_release_of_what_nobody_saw_says_so(records: list[dict[str, Any]]) -> None:
    with penstock.open("memory:", background=False) as broker:
        broker.create_queue("a")
        broker.send("a", b"x")
        (each,) = broker.claim("a", limit=1)
        broker.release([each.receipt], unseen=True)
    claimed = {"queue": "a", "count": 1, "messages": [each.message_id], "lease": each.lease}
    assert records[1:] == [
        {"event": "claim", **claimed},
        {"event": "release", **claimed, "reason": "unseen"},
    ]


def test_a_message_that_no_queue_takes_has_a_record(records: list[dict[str, Any]]) -> None:
    with penstock.open("memory:", background=False, routing="pipeline") as broker:
        (id_,) = broker.publish([Message(b"x")])
        penstock.route_once(broker)
    told = {"queue": "", "count": 1, "messages": [id_]}
    assert records == [{"event": "publish", **told}, {"event": "assign", **told}]


def test_a_message_without_a_payload_is_told_of_before_the_others(
    opened: tuple[penstock.Broker, ManualClock], records: list[dict[str, Any]]
) -> None:
    broker, _ = opened
    store: Any = broker._store
    broker.create_queue("q")
    lost, kept = broker.publish([Message(b"x", {"queue": "q"}), Message(b"y", {"queue": "q"})])
    if isinstance(store, SqlStore):
        store.database.execute(f"DELETE FROM messages WHERE message_id = {lost}")
    else:
        batch = store.engine.batch()
        batch.delete(payload_key(lost), store.payloads.table.family)
        store.engine.commit(batch)
    assert [each.message_id for each in broker.claim("q", limit=2)] == [kept]
    told = [(each["event"], each["messages"], each.get("reason")) for each in records[1:]]
    assert told == [("remove", [lost], "broken"), ("claim", [kept], None)]


def test_the_page_has_every_record_with_its_transitions() -> None:
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    table = page.partition("**The life-cycle log.**")[2].partition("\n**")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE)
    found: dict[str, set[str]] = {event: set(re.findall(r"`(\w+)`", told)) for event, told in rows}
    expected: dict[str, set[str]] = {"extend": set()}
    for way in WAYS:
        # Of two records the second is that of the message's end.
        (event, *_) = way.records[-1]
        expected.setdefault(event, set()).add(way.event.value)
    assert found == expected


class _Acts(LifeLogSuite):
    """The acts of the suite, on a broker that is given."""

    def __init__(self, broker: penstock.Broker, clock: ManualClock) -> None:
        self.broker, self.clock = broker, clock


def test_the_log_is_off_unless_its_logger_has_a_level(
    opened: tuple[penstock.Broker, ManualClock],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Whatever is called of the module would fail: while the log is off nothing is.
    writers = [name for name in vars(life) if name.startswith("log_")]
    users = {
        name: module
        for name, module in sys.modules.items()
        if name.startswith("penstock.store.") and "life" in vars(module) and module is not life
    }
    assert len(users) >= 6
    for module in users.values():
        for name in writers:
            monkeypatch.setattr(module, name, None, raising=False)
    with caplog.at_level("DEBUG"):
        live(*opened)
        acts = _Acts(*opened)
        for way in WAYS:
            queue, _, held = acts.bring(way)
            acts.act(queue, way, held)
    assert [each for each in caplog.records if each.name == "penstock.life"] == []
