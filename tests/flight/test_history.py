"""Stretches of history by sequence number: every row once, whatever is redriven or removed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from penstock import InvalidInput, Message
from penstock.flight.protocol import HistoryStretch, HistoryTicket
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    import penstock
    from penstock.clock import ManualClock
    from penstock.flight.client import FlightStore

HOUR_MS = 3_600_000


@pytest.fixture
def queue(broker: penstock.Broker) -> str:
    """Give a queue with messages whose first failure is their last."""
    kept = {"done_retention_ms": HOUR_MS, "failed_retention_ms": HOUR_MS}
    broker.create_queue("q", filter=None, ordering="standard", max_attempts=1, **kept)
    broker.publish([Message(b"x", {"queue": "q"}) for _ in range(40)])
    return "q"


def settle(broker: penstock.Broker, count: int, *, fail: bool = False) -> list[int]:
    """End messages in one call; return their ids."""
    taken = broker.claim("q", limit=count, consumer="w")
    receipts = [each.receipt for each in taken]
    broker.release(receipts, reason="no") if fail else broker.ack(receipts)
    assert len(taken) == count
    return [each.message_id for each in taken]


def stretch(store: FlightStore, state: str, begin: int, end: int, **more: int) -> HistoryStretch:
    made_at = store.queues()["q"]
    return HistoryStretch("q", made_at, state, begin, end, **more)


def end_of(store: FlightStore, state: str) -> int:
    return store.history_ends("q").queues["q"].ends[state]


def rows_of(store: FlightStore, of: str, *stretches: HistoryStretch) -> list[dict[str, Any]]:
    batches = store.read(HistoryTicket(of, stretches))
    return [row for batch in batches for row in batch.to_pylist()]


def ids_of(store: FlightStore, state: str, begin: int, end: int) -> list[int]:
    return [row["message_id"] for row in rows_of(store, state, stretch(store, state, begin, end))]


def test_what_comes_later_has_higher_numbers(
    broker: penstock.Broker, store: FlightStore, queue: str
) -> None:
    begin, seen, ids = 0, [], []
    for count in (5, 0, 1, 7):
        ids += settle(broker, count) if count else []
        end = end_of(store, "done")
        seen += ids_of(store, "done", begin, end)
        assert seen == ids
        begin = end
    # A stretch can be read again, and cut anywhere.
    middle = begin // 2
    assert ids_of(store, "done", 0, middle) + ids_of(store, "done", middle, begin) == ids
    assert store.history_ends(["none", queue]).queues.keys() == {queue}


def test_numbers_stay_when_others_are_redriven(
    broker: penstock.Broker, store: FlightStore, queue: str
) -> None:
    ids = settle(broker, 12, fail=True)
    rows = rows_of(store, "failed", stretch(store, "failed", 0, end_of(store, "failed")))
    numbers = {row["message_id"]: row["sequence"] for row in rows}
    gone = [ids[0], ids[4], ids[5], ids[11]]
    for message_id in gone:
        assert broker.redrive(queue, message_ids=[message_id]) == 1
    end = end_of(store, "failed")
    rows = rows_of(store, "failed", stretch(store, "failed", 0, end))
    assert {row["message_id"]: row["sequence"] for row in rows} == {
        message_id: number for message_id, number in numbers.items() if message_id not in gone
    }
    # A failure that comes again is another row.
    again = settle(broker, 4, fail=True)
    assert ids_of(store, "failed", end, end_of(store, "failed")) == again
    # Whoever looks for the others by id or page by page finds them.
    assert broker.redrive(queue, message_ids=ids[6:8]) == 2
    page = broker.browse(queue, state="failed", limit=3)
    kept = [entry.message_id for entry in page]
    broker.redrive(queue, message_ids=kept)
    while page.next_cursor is not None:
        page = broker.browse(queue, state="failed", limit=3, cursor=page.next_cursor)
        kept += [entry.message_id for entry in page]
    assert sorted(kept) == sorted({*ids[1:4], *ids[8:11], *again})
    assert_clean(broker)


def test_attempts_come_with_their_messages(
    broker: penstock.Broker, store: FlightStore, queue: str
) -> None:
    done, failed = settle(broker, 3), settle(broker, 2, fail=True)
    ends = store.history_ends(queue).queues[queue].ends
    stretches = [stretch(store, state, 0, end) for state, end in ends.items()]
    rows = rows_of(store, "attempts", *stretches)
    expected = [(id_, "acked") for id_ in done] + [(id_, "released") for id_ in failed]
    assert [(row["message_id"], row["outcome"]) for row in rows] == expected
    assert all(row["attempt"] == 1 and row["consumer"] == "w" for row in rows)


def test_a_stretch_begins_at_a_time(
    broker: penstock.Broker, store: FlightStore, queue: str, clock: ManualClock
) -> None:
    ids = []
    for _ in range(6):
        ids.append(settle(broker, 3))
        clock.advance(1_000)
    now_ms, end = clock.now_ms(), end_of(store, "done")
    for late in range(7):
        found = store.history_ends(queue, since_ms=now_ms - 1_000 * late - 500).queues[queue]
        first = found.firsts.get("done", (end, 0))[0]
        assert ids_of(store, "done", first, end) == [
            each for some in ids[6 - late :] for each in some
        ]
    assert found.firsts["done"][1] == now_ms - 6_000
    assert "failed" not in found.firsts


def test_removed_rows_are_not_missed_without_a_word(
    broker: penstock.Broker, store: FlightStore, queue: str, clock: ManualClock
) -> None:
    since_ms = clock.now_ms()
    settle(broker, 5)
    settle(broker, 5, fail=True)
    middle = store.history_ends(queue).queues[queue].ends
    clock.advance(HOUR_MS // 2)
    later, failed = settle(broker, 5), settle(broker, 5, fail=True)
    broker.redrive(queue, message_ids=failed[:2])
    ends = store.history_ends(queue).queues[queue].ends
    clock.advance(HOUR_MS // 2)
    broker.sweep()
    for state, left in (("done", later), ("failed", failed[2:])):
        lost = stretch(store, state, 0, ends[state], since_ms=since_ms)
        with pytest.raises(InvalidInput, match=f"data loss: {state} messages of queue q from seq"):
            rows_of(store, state, lost)
        assert ids_of(store, state, 0, ends[state]) == left
        # What was redriven is no loss, nor is what was read before.
        since = since_ms + HOUR_MS // 2
        kept = stretch(store, state, middle[state], ends[state], since_ms=since)
        assert len(rows_of(store, state, kept)) == len(left)


def test_a_done_message_that_is_live_again_is_no_loss(
    broker: penstock.Broker, store: FlightStore, clock: ManualClock
) -> None:
    broker.create_queue("q")
    broker.create_queue("other", filter="both = 1")
    broker.publish([Message(b"x", {"queue": "q", "both": 1})])
    settle(broker, 1)
    assert broker.move("other", "q", state="available") == 1
    end = end_of(store, "done")
    assert rows_of(store, "done", stretch(store, "done", 0, end, since_ms=clock.now_ms())) == []


def test_a_message_that_ended_later_hides_no_loss(
    broker: penstock.Broker, store: FlightStore, queue: str, clock: ManualClock, *, on_sql: bool
) -> None:
    ends = store.history_ends(queue)
    begin = ends.queues[queue].ends["done"]
    clock.advance(1)
    for slot in (5, 0):
        if on_sql:
            # The first number after a mark is that of slot 0, whenever it is given out.
            cast("Any", broker)._store.first_slot = slot
        broker.sweep()
        settle(broker, 3)
        clock.advance(HOUR_MS)
    lost = stretch(store, "done", begin, end_of(store, "done"), since_ms=ends.at_ms)
    with pytest.raises(InvalidInput, match="data loss"):
        rows_of(store, "done", lost)


def test_a_queue_that_was_made_again_has_another_history(
    broker: penstock.Broker, store: FlightStore, queue: str, clock: ManualClock
) -> None:
    settle(broker, 5)
    old = stretch(store, "done", 0, end_of(store, "done"), since_ms=clock.now_ms())
    broker.delete_queue(queue)
    clock.advance(1)
    broker.create_queue(queue)
    assert end_of(store, "done") == 0
    with pytest.raises(InvalidInput, match="the queue was deleted before they were read"):
        rows_of(store, "done", old)
    old.since_ms = None
    assert rows_of(store, "done", old) == []
    with pytest.raises(InvalidInput, match="they end at 0: was an older copy"):
        rows_of(store, "done", stretch(store, "done", 0, 1))


def test_stretches_are_checked(store: FlightStore, queue: str) -> None:
    for wrong, says in (
        (stretch(store, "active", 0, 0), "done or failed messages, not 'active'"),
        (stretch(store, "done", -1, 0), "begin"),
        (stretch(store, "done", 2, 1), "end"),
    ):
        with pytest.raises(InvalidInput, match=says):
            rows_of(store, "attempts", wrong)
    with pytest.raises(InvalidInput, match="of failed messages, not 'done'"):
        rows_of(store, "failed", stretch(store, "done", 0, 0))
