"""The audit finds every kind of damage, and mends it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock import ManualClock, Message
from penstock.store.sql.maintain import CHECKS
from penstock.store.sql.store import SqlStore
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock import Broker

# What is done to a sound store, and which kinds of damage that is.
DAMAGE: dict[str, tuple[str, set[str]]] = {
    "a counter": ("UPDATE queue_counts SET done = done + 1 WHERE slot = 3", {"counter"}),
    "a zone without a pointer": (
        "DELETE FROM pointers; DELETE FROM pointer_index",
        {"missing_entry"},
    ),
    "a pointer without its index": (
        "DELETE FROM pointer_index WHERE zone = 'gone'",
        {"orphan_entry"},
    ),
    "an index without its pointer": ("DELETE FROM pointers WHERE zone = 'b'", {"orphan_entry"}),
    "a late pointer": ("UPDATE pointers SET vesting_ms = 4611686018427387904", {"early"}),
    "too many references": ("UPDATE messages SET refs = refs + 1", {"references"}),
    "too few references": (
        "UPDATE messages SET refs = 0 WHERE message_id = 1",
        {"references"},
    ),
    "a message that is gone": (
        "DELETE FROM messages WHERE message_id = 1",
        {"payload_missing"},
    ),
    "live and done": (
        "INSERT INTO ended SELECT queue, false, 999999, message_id, 0, 0, '' FROM items LIMIT 1",
        {"twice", "counter", "references"},
    ),
    "a queue that is gone": (
        "DELETE FROM queues WHERE name = 'second'",
        {"stranger"},
    ),
    "attempts at nothing": (
        "INSERT INTO attempts VALUES (1, 77777, 1, '', 0, 0, 0, '', '')",
        {"orphan_attempt"},
    ),
    "a message that nobody knows": (
        (
            "DELETE FROM log WHERE message_id = 3; DELETE FROM items WHERE message_id = 3; "
            "UPDATE messages SET refs = 0 WHERE message_id = 3"
        ),
        {"garbage", "counter"},
    ),
    "ids that come again": ("SELECT setval('message_ids', 2)", {"sequence"}),
    "leased and delayed": (
        "UPDATE items SET delayed = true WHERE lease_id IS NOT NULL",
        {"wrong_field"},
    ),
}


@pytest.fixture
def broker(url: str) -> Iterator[Broker]:
    with penstock.open(url, background=False, clock=ManualClock()) as opened:
        opened.create_queue("q", max_attempts=1)
        opened.create_queue("second", filter="queue = 'q'")
        for group in ("a", "b", "gone"):
            opened.publish([Message(b"x", {"queue": "q"}, group=group)] * 2)
        (held,) = opened.claim("q")
        opened.ack([held.receipt])
        (held,) = opened.claim("q")
        opened.release([held.receipt])
        opened.claim("q")
        opened.publish([Message(b"later", {"queue": "q"}, delay_ms=1_000), Message(b"nobody's")])
        gone = [d for d in opened.claim("q", limit=9) if d.group == "gone"]
        opened.ack([d.receipt for d in gone])
        yield opened


def damage(broker: Broker, text: str) -> None:
    store = broker._store
    assert isinstance(store, SqlStore)
    store.database.execute(text)


def test_a_sound_store_is_clean_and_not_written_to(broker: Broker) -> None:
    report = broker.check(repair=True)
    assert report.clean
    assert report.ok
    assert report.checked["queues"] == 2
    assert report.checked["messages"] == 8
    assert report.rounds == 1


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found_and_mended(broker: Broker, what: str) -> None:
    text, kinds = DAMAGE[what]
    damage(broker, text)
    report = broker.check()
    assert set(report.found) >= kinds, report.violations
    assert not report.ok
    mended = broker.check(repair=True)
    assert set(mended.found) == set(report.found)
    assert mended.ok, mended.violations
    assert all(each.repaired for each in mended.violations)
    assert_clean(broker)
    broker.publish([Message(b"after", {"queue": "q"}, group="new")])
    clock = broker._clock
    assert isinstance(clock, ManualClock)
    clock.advance(60_000)
    while deliveries := broker.claim("q", limit=50):
        assert all(broker.ack([delivery.receipt for delivery in deliveries]))
    assert_clean(broker)


def test_every_check_has_its_damage() -> None:
    tried = {kind for _, kinds in DAMAGE.values() for kind in kinds}
    assert tried == {kind.value for kind, *_ in CHECKS}


def test_a_store_that_others_work_on_is_not_called_damaged(url: str) -> None:
    with penstock.open(url) as first, penstock.open(url) as second:
        first.create_queue("q")
        for _ in range(30):
            first.publish([Message(b"", {"queue": "q"}, group=f"{n}") for n in range(3)])
            assert_clean(second)
            first.ack([delivery.receipt for delivery in first.claim("q", limit=2)])


@pytest.mark.parametrize("verb", ["extend", "release"])
def test_an_index_that_is_late_is_no_damage_and_does_none(url: str, verb: str) -> None:
    """As a visit leaves it that has seen a zone a moment before a message came into it."""
    clock = ManualClock()
    with penstock.open(url, background=False, clock=clock) as broker:
        broker.create_queue("q", lease_ms=60_000)
        broker.send("q", b"held")
        (held,) = broker.claim("q")
        broker.send("q", b"waits")
        damage(broker, "UPDATE pointer_index SET vesting_ms = 4611686018427387904")
        damage(broker, f"UPDATE pointers SET vesting_ms = {clock.now_ms() + 300}")
        assert_clean(broker)
        if verb == "extend":
            broker.extend([held.receipt], lease_ms=30_000)
        else:
            broker.release([held.receipt], delay_ms=30_000)
        clock.advance(300)
        assert [each.payload for each in broker.claim("q", limit=9)] == [b"waits"]
        assert_clean(broker)


def test_nobody_waits_for_a_check(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others publish, claim, ack and change queues between its statements; it finds nothing."""
    short = f"{url}?lock_timeout_ms=1000&verb_timeout_ms=1000"
    with (
        penstock.open(url, background=False) as broker,
        penstock.open(short, background=False) as other,
    ):
        broker.create_queue("q", max_attempts=1)
        broker.publish([Message(b"", {"queue": "q"}, group=group) for group in "aab"])
        store = broker._store
        assert isinstance(store, SqlStore)
        run, looks = store._run_check, []

        def run_beside(statement: str, now_ms: int) -> list[Any]:
            looks.append(statement)
            other.publish([Message(b"", {"queue": "q"}, group=f"{len(looks)}")] * 2)
            other.ack([each.receipt for each in other.claim("q", limit=2)])
            other.release([each.receipt for each in other.claim("q")])
            other.update_queue("q", lease_ms=1_000 + len(looks))
            return run(statement, now_ms)

        monkeypatch.setattr(store, "_run_check", run_beside)
        report = broker.check()
        assert (report.found, report.violations) == ({}, [])
        # It has looked once.
        assert len(looks) == len(CHECKS)
        monkeypatch.undo()
        assert_clean(broker)
