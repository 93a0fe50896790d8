"""Archived messages come back through Flight: whole, bounded, and no more than once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import penstock
from penstock import InvalidInput, Message, QueueNotFound, limits
from penstock.errors import ServerBusy
from penstock.flight import protocol as wire
from penstock.flight.writes import Filler
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from penstock.clock import ManualClock
    from penstock.flight.client import FlightStore

HOUR_MS = 3_600_000
COLUMNS = [name for name in wire.ARCHIVED.names if name != "offset"]


def archived(store: FlightStore, table: str = "done") -> pa.RecordBatch:
    """Read a table as an archive would keep it, in the order and shape that a restore wants."""
    found = store.read_table(table, columns=["message_id", *COLUMNS], payload=True)
    found = found.rename_columns(["offset", *COLUMNS]).sort_by("offset").cast(wire.ARCHIVED)
    return found.combine_chunks().to_batches()[0]


@pytest.fixture
def kept(broker: penstock.Broker, store: FlightStore, clock: ManualClock) -> pa.RecordBatch:
    """Give what an archive has of messages that log and store have let go of."""
    broker.configure_log(retention_ms=1)
    broker.create_queue("first", filter="n >= 0")
    broker.publish(
        Message(b"p%d" % n, {"n": n, "f": n / 2, "é": "ü", "none": None, "yes": True}, f"g{n % 2}")
        for n in range(20)
    )
    broker.ack([each.receipt for each in broker.claim("first", limit=20)])
    batch = archived(store)
    broker.trim("first", state="done", before=limits.MAX_OFFSET)
    for _ in range(2):
        clock.advance(2 * HOUR_MS)
        broker.sweep()
    assert broker.log_stats().earliest == broker.log_stats().end == 21
    return batch


def test_messages_come_back_as_they_were(
    broker: penstock.Broker, store: FlightStore, kept: pa.RecordBatch
) -> None:
    broker.create_queue("late", filter="n >= 5")
    plan = store.backfill_plan("late", archived=True)
    assert (plan.stretches, plan.earliest) == ([(1, 21)], 21)
    assert store.backfill_plan("late").stretches == []
    for expected in ((15, 5, 0), (0, 20, 0)):
        done = store.fill([kept], kept.schema, queue="late", begin=1, end=21, filter=plan.filter)
        assert (done.added, done.already, done.missing) == expected
    assert store.backfill_plan("late", archived=True).stretches == []
    assert_clean(broker)
    broker.ack([each.receipt for each in broker.claim("late", limit=20)])
    assert archived(store).equals(kept.slice(5))


def test_nothing_wanted_is_noted_too(
    broker: penstock.Broker, store: FlightStore, kept: pa.RecordBatch
) -> None:
    broker.create_queue("none", filter="n < 0")
    assert store.fill([], wire.ARCHIVED, queue="none", begin=1, end=11).added == 0
    assert store.backfill_plan("none", archived=True).stretches == [(11, 21)]


def replaced(batch: pa.RecordBatch, name: str, values: Any) -> pa.RecordBatch:
    at = batch.schema.names.index(name)
    return batch.set_column(at, name, pa.array(values, batch.schema.field(name).type))


def test_what_is_refused(
    broker: penstock.Broker,
    store: FlightStore,
    kept: pa.RecordBatch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker.create_queue("q", filter="n >= 0")

    def refused(batch: pa.RecordBatch, says: str) -> None:
        with pytest.raises(penstock.PenstockError, match=says):
            store.fill([batch], batch.schema, queue="q", begin=1, end=21)

    refused(replaced(kept, "attributes_json", ["[]"] * 20), "message 1: attributes_json")
    refused(replaced(kept, "group", [None] * 20), "group of a row is null")
    refused(replaced(kept, "size", [1] * 20), "payload of 2 bytes, not of 1")
    refused(kept.take(pa.array([1, 0])), "must ascend")
    with pytest.raises(QueueNotFound):
        store.fill([kept], kept.schema, queue="nobody", begin=1, end=21)
    with pytest.raises(InvalidInput, match="plan the backfill again"):
        store.fill([kept], kept.schema, queue="q", begin=1, end=21, filter="n > 7")
    with monkeypatch.context() as patch:
        patch.setattr(wire, "ARCHIVED", kept.schema.remove(0))
        refused(
            kept.drop_columns(["offset"]),
            "a fill of archived messages has the columns offset, published_at",
        )
    for name, value in (("MAX_RESTORE_MESSAGES", 19), ("MAX_RESTORE_BYTES", 100)):
        with monkeypatch.context() as patch:
            patch.setattr(limits, name, value)
            refused(kept, "fill less at a time")
    with monkeypatch.context() as patch:
        patch.setattr(limits, "MAX_RESTORES", 1)
        patch.setattr(limits, "MAX_CALL_MS", 10)
        filler = Filler(broker)
        with filler._place(), pytest.raises(ServerBusy, match="under way"), filler._place():
            pass
        with filler._place():
            pass
    assert broker.stats("q").available == 0
    assert store.fill([kept], kept.schema, queue="q", begin=1, end=21).added == 20


def narrowed(ticket: bytes, queues: list[str]) -> wire.SnapshotTicket:
    known: wire.SnapshotTicket = wire.decode(ticket, wire.SnapshotTicket, "ticket")
    known.queues = queues
    return known


def test_a_ticket_for_some_queues(life: penstock.Broker, store: FlightStore) -> None:
    for table in ("active", "attempts", "done"):
        plan = store.plan_read(table, partitions=3)
        whole = [row for each in plan.tickets for b in store.read(each) for row in b.to_pylist()]
        for queues in (["q"], ["big", "empty"], []):
            found = [
                row
                for each in plan.tickets
                for batch in store.read(narrowed(each, queues))
                for row in batch.to_pylist()
            ]
            assert found == [row for row in whole if row["queue"] in queues]
    (ticket,) = store.plan_read("messages").tickets
    with pytest.raises(InvalidInput, match="no queues to choose from"):
        list(store.read(narrowed(ticket, ["q"])))


def test_a_guarded_trim(life: penstock.Broker, store: FlightStore) -> None:
    made_at_ms = life.queue("q").created_at_ms
    for guard, removed in ((made_at_ms + 1, 0), (made_at_ms, 10)):
        trimmed = store.trim("q", state="done", before=limits.MAX_OFFSET, created_at_ms=guard)
        assert trimmed == removed
