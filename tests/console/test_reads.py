"""Reads for the pages of queues and messages, on each kind of store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import penstock
from penstock import Message, QueueNotFound
from penstock.broker.explain import row_of
from penstock.clock import ManualClock
from penstock.filters import parse
from penstock.limits import CONSOLE_LOG_SAMPLE, CONSOLE_MAX_SCAN, MAX_PLACES
from penstock.model import State
from penstock.server.console.messages import find_message
from penstock.server.console.queues import grouped, reason_key, scan, shares, try_filter
from penstock.server.console.visits import NoSuchPage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.sql.postgres import PostgresServer

    from penstock import Broker
    from penstock.model import Entry

URLS = ["memory:", "memory:?design=buckets", "rocksdb:{place}/store", "postgresql"]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=URLS)
def broker(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Broker]:
    url = request.param.format(place=tmp_path)
    postgres: PostgresServer | None = None
    if url == "postgresql":
        postgres = request.getfixturevalue("postgres")
        url = postgres.emptied(str(tmp_path))
    with penstock.open(url, clock=clock, background=False) as broker:
        yield broker
    if postgres is not None:
        postgres.forget_places()


def book(number: int, group: str = "") -> Message:
    return Message(b"x" * number, {"kind": "book", "number": number}, group=group)


def everywhere(_: str | None) -> bool:
    return True


def test_a_search_goes_on_where_it_stopped(broker: Broker) -> None:
    broker.create_queue("books", filter="kind = 'book'")
    ids = broker.publish([book(number) for number in range(2_500)])
    where = parse("number >= 990 AND number < 1_010 OR size = 2400".replace("_", ""))

    def wanted(entry: Entry) -> bool:
        return where.matches(row_of(entry))

    found: list[int] = []
    cursor, looked = None, 0
    while True:
        page = scan(broker, "books", State.AVAILABLE, cursor=cursor, where=wanted, count=7)
        assert len(page.entries) <= 7
        assert all(entry.payload is None for entry in page.entries)
        found += [entry.message_id for entry in page.entries]
        cursor, looked = page.next_cursor, looked + page.looked
        if cursor is None:
            break
    assert sorted(found) == [*ids[990:1_010], ids[2_400]]
    assert looked == 2_500


def test_a_scan_is_bounded_and_says_where_to_go_on(broker: Broker) -> None:
    broker.create_queue("books", filter="kind = 'book'")
    for _ in range(3):
        broker.publish([book(1)] * 4_000)
    first = scan(broker, "books", State.AVAILABLE, where=lambda _: False)
    assert (first.entries, first.looked) == ([], CONSOLE_MAX_SCAN)
    rest = scan(broker, "books", State.AVAILABLE, cursor=first.next_cursor)
    assert (len(rest.entries), rest.looked, rest.next_cursor) == (2_000, 2_000, None)


def test_failed_messages_by_reason(broker: Broker, clock: ManualClock) -> None:
    broker.create_queue("q", max_attempts=1)
    began_ms = clock.now_ms()
    for reason in ("no", "never", "no", "", "no"):
        broker.send("q", b"x")
        broker.release([each.receipt for each in broker.claim("q")], reason=reason)
        clock.advance(1_000)
    found = grouped(scan(broker, "q", State.FAILED).entries, lambda entry: entry.reason)
    counts = [(text, len(entries)) for text, entries in found]
    assert counts == [("no", 3), ("never", 1), ("released 1 times", 1)]
    ended_ms = [entry.ended_at_ms or 0 for entry in found[0][1]]
    assert (min(ended_ms), max(ended_ms)) == (began_ms, began_ms + 4_000)
    assert len({reason_key(text) for text, _ in found}) == 3


def test_groups_that_wait_and_consumers_that_hold(broker: Broker, clock: ManualClock) -> None:
    broker.create_queue("books", filter="kind = 'book'", lease_ms=60_000)
    began_ms = clock.now_ms()
    broker.publish([book(1, "busy")] * 3)
    broker.claim("books", limit=3, consumer="ann", lease_ms=30_000)
    clock.advance(1_000)
    broker.publish([book(1, "late"), book(1, "busy")])
    clock.advance(1_000)
    broker.publish([book(1, "late")])
    held = scan(broker, "books", State.IN_FLIGHT).entries
    waiting = scan(broker, "books", State.AVAILABLE).entries
    late, busy = sorted(shares([*held, *waiting], lambda e: e.group), key=lambda s: -s.waiting)
    assert (late.name, late.waiting, late.since_ms) == ("late", 2, began_ms + 1_000)
    assert (busy.name, busy.waiting, busy.in_flight) == ("busy", 1, 3)
    (ann,) = shares(held, lambda entry: entry.consumer or "")
    assert (ann.name, ann.in_flight, ann.waiting, ann.since_ms) == ("ann", 3, 0, None)
    assert (ann.soonest_ms, ann.latest_ms) == (began_ms + 30_000, began_ms + 30_000)


def test_a_message_in_all_its_queues(broker: Broker, clock: ManualClock) -> None:
    broker.create_queue("dead", filter="FALSE")
    broker.create_queue("a", filter="kind = 'book'", max_attempts=1, dead_letter="dead")
    broker.create_queue("b", filter="kind = 'book' AND number > 3")
    broker.create_queue("c", filter="kind = 'film'")
    (message_id,) = broker.publish([book(5)])
    broker.release([each.receipt for each in broker.claim("a", consumer="ann")], reason="no")
    clock.advance(1)
    broker.sweep()
    broker.ack([each.receipt for each in broker.claim("b", consumer="bob")])
    found = find_message(broker, "b", message_id, everywhere)
    assert found.here is not None
    assert (found.here.payload, found.here.state) == (b"xxxxx", State.DONE)
    states = {place.entry.queue: place.entry.state for place in found.places}
    assert states == {"b": State.DONE, "dead": State.AVAILABLE}
    tried = {
        place.entry.queue: [each.consumer for each in place.attempts] for place in found.places
    }
    assert tried == {"b": ["bob"], "dead": ["ann"]}
    assert found.takers == ["a", "b"]
    assert (found.why.looked, found.why.queues) == (4, 4)

    found = find_message(broker, "c", message_id, lambda name: name in {"c", "b"})
    assert found.here is None
    assert [place.entry.queue for place in found.places] == ["b"]
    assert found.takers == ["b"]
    # A visitor who may not see the log learns nothing of a message that its queues do not have.
    with pytest.raises(NoSuchPage):
        find_message(broker, "c", message_id, lambda name: name == "c")
    for unknown in (message_id + 1, (1 << 64) - 1):
        with pytest.raises(NoSuchPage):
            find_message(broker, "a", unknown, everywhere)
    with pytest.raises(QueueNotFound):
        find_message(broker, "z", message_id, everywhere)
    # The log alone has a message that no queue takes.
    (untaken,) = broker.publish([Message(b"x", {"kind": "song"})])
    found = find_message(broker, "a", untaken, everywhere)
    assert (found.row.attributes, found.places) == ({"kind": "song"}, [])
    with pytest.raises(NoSuchPage):
        find_message(broker, "a", untaken, lambda name: name is not None)


def test_a_filter_is_tried_on_the_newest_messages(broker: Broker) -> None:
    broker.create_queue("q", filter="TRUE")
    broker.configure_log(logs=3)
    for begin in range(0, 1_500, 500):
        broker.publish([book(number) for number in range(begin, begin + 500)])
        # The filters change within the last thousand messages.
        broker.create_queue(f"q{begin}", filter="kind = 'film'")
    looked, matches = try_filter(broker, parse("number >= 400 AND number < 510"))
    assert looked == CONSOLE_LOG_SAMPLE
    assert [record.attributes["number"] for record in matches] == list(range(509, 499, -1))


def test_a_message_among_many_queues() -> None:
    with penstock.open("memory:", background=False) as broker:
        for number in range(1_000):
            broker.create_queue(f"q{number}", filter=f"kind = 'book' AND number = {number % 500}")
        (message_id,) = broker.publish([book(321)])
        found = find_message(broker, "q7", message_id, everywhere)
    assert found.here is None
    assert [place.entry.queue for place in found.places] == ["q321", "q821"]
    assert (found.why.looked, found.why.queues) == (MAX_PLACES, 1_000)
