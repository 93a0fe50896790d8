"""Flight over a store of two databases: ids and offsets of each count from a number of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from tests.sql.test_clusters import FIRST, SECOND

import penstock
from penstock import InvalidInput, Message
from penstock.flight import TABLES, partition, read, select

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.sql.postgres import PostgresServer

    from penstock.clock import ManualClock
    from penstock.flight.client import FlightStore

BASE = (1 << 48) + 1


@pytest.fixture
def url(postgres: PostgresServer, tmp_path: Path) -> Iterator[str]:
    yield ";".join(postgres.emptied(f"{tmp_path}/{number}") for number in range(2))
    postgres.forget_places()


def offsets(store: FlightStore, log: int, begin: int, end: int) -> list[int]:
    batches = store.read(store.log_ticket(log, begin, end, columns=["offset"]))
    return [row["offset"] for batch in batches for row in batch.to_pylist()]


def test_tables_are_those_of_the_broker(life: penstock.Broker, store: FlightStore) -> None:
    with life.view(stats=True) as view:
        for table in TABLES:
            parts = partition(view, table, 5)
            chosen = select(table)
            expected = [r for p in parts for b in read(view, p, chosen) for r in b.to_pylist()]
            plan = store.plan_read(table, partitions=3)
            found = [r for t in plan.tickets for b in store.read(t) for r in b.to_pylist()]
            assert sorted(map(repr, found)) == sorted(map(repr, expected)), table
            assert found or table == "groups"


def test_the_log_and_what_is_new(broker: penstock.Broker, store: FlightStore) -> None:
    rows = pa.record_batch(
        {
            "payload": [b"1", b"2", b"3", b"4"],
            "group": [FIRST, SECOND, SECOND, FIRST],
            "dedup_id": ["a", "b", "b", "c"],
        }
    )
    assert store.publish([rows], rows.schema).duplicates == 1
    assert store.publish([rows], rows.schema).duplicates == 4
    assert offsets(store, 0, 0, 3) == [1, 2]
    assert offsets(store, 1, BASE, BASE + 1) == [BASE]
    # What is asked for as if both counted alike is refused, not left out.
    with pytest.raises(InvalidInput, match="log 0 ends at 3"):
        offsets(store, 0, 1, BASE + 1)
    assert broker.log_stats().kept == 3


def test_a_fill_of_both(broker: penstock.Broker, store: FlightStore, clock: ManualClock) -> None:
    for _ in range(2):
        broker.publish(Message(b"", {"n": n}, group) for n, group in enumerate((FIRST, SECOND)))
        clock.advance(60_000)
    broker.create_queue("late", filter="n >= 0")
    plan = store.backfill_plan("late", from_time_ms=clock.now_ms() - 60_000)
    assert plan.stretches == [(2, 3), (BASE + 1, BASE + 2)]
    for log, (begin, end) in enumerate(plan.stretches):
        wanted = pa.record_batch({"offset": pa.array(offsets(store, log, begin, end))})
        store.fill_stage(f"stage{log}", [wanted], queue="late", begin=begin, end=end)
        filled = store.commit_fill([f"stage{log}"], queue="late", begin=begin, end=end)
        assert filled.added == 1
    assert [entry.message_id for entry in broker.browse("late")] == [2, BASE + 1]
