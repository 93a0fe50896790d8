"""What is deleted at the head of a range is not stepped over again and again.

The engine here is the real one in memory, which also remembers which keys were deleted: those that
a scan passes are what an LSM tree would have to step over.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from sortedcontainers import SortedSet
from tests.stores.failing import FailingEngine, open_on

from penstock import Message, State
from penstock.clock import ManualClock
from penstock.engines.memory import MemoryEngine, MemoryTable
from penstock.store.kv import tables
from penstock.testing.checking import assert_clean
from penstock.urls import DESIGNS

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.broker.broker import Broker

HOUR_MS = 3_600_000
COUNT = 200
BUDGET = 20


class TombTable(MemoryTable):
    """A table that remembers deleted keys, and counts those that scans pass."""

    def __init__(self) -> None:
        super().__init__()
        self.tombs: Any = SortedSet()
        self.passed = 0

    def scan(self, begin: bytes, end: bytes, limit: int) -> Any:
        rows = super().scan(begin, end, limit)
        until = rows[-1][0] if len(rows) == limit else end
        self.passed += sum(1 for _ in self.tombs.irange(begin, until))
        return rows


class TombEngine(MemoryEngine):
    """Tables in memory that remember what was deleted one by one."""

    def __init__(self, tables: Any) -> None:
        super().__init__(())
        self._tables = {name: TombTable() for name in tables}

    def commit(self, batch: Any) -> None:
        for table, key, value, end in batch.changes:
            if value is not None:
                table.tombs.discard(key)
            elif end is None and key in table.rows:
                table.tombs.add(key)
        super().commit(batch)

    def passed(self) -> int:
        """Say how many deleted keys scans have passed since the last time."""
        passed = sum(table.passed for table in self._tables.values())  # type: ignore[attr-defined]
        for table in self._tables.values():
            table.passed = 0  # type: ignore[attr-defined]
        return passed


class Work:
    """A broker, and how much its engine had to look at."""

    def __init__(self, design: str, **settings: Any) -> None:
        self.clock = ManualClock()
        self.tombs = TombEngine(DESIGNS[design])
        self.engine = FailingEngine(self.tombs)
        self.broker: Broker = open_on(self.engine, design, self.clock)
        self.broker.configure_log(retention_ms=0)
        self.broker.create_queue("q", **settings)

    def looked(self, work: Callable[[], object]) -> int:
        """Do something, and say how many rows and deleted keys were looked at."""
        self.tombs.passed()
        before = self.engine.rows
        work()
        return self.engine.rows - before + self.tombs.passed()

    def pass_through(self, count: int, **fields: Any) -> None:
        """Publish, claim and ack messages one at a time."""
        for _ in range(count):
            self.clock.advance(1)
            self.broker.publish([Message(b"1", {"queue": "q"}, **fields)])
            self.broker.ack([self.broker.claim("q", lease_ms=HOUR_MS)[0].receipt])


DESIGN = pytest.mark.parametrize("design", ["indexed", "buckets"])


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "LOOK_AFTER", BUDGET)


@DESIGN
def test_retention_costs_the_same_in_the_end_as_at_first(design: str) -> None:
    work = Work(design, done_retention_ms=HOUR_MS)
    work.pass_through(COUNT)
    work.clock.advance(HOUR_MS)
    looked = [work.looked(lambda: work.broker.sweep(budget=BUDGET)) for _ in range(COUNT // BUDGET)]
    assert work.broker.stats("q").done == 0
    assert max(looked[1:]) <= 8 * BUDGET
    assert looked[-1] <= 2 * looked[1]
    assert_clean(work.broker)


@DESIGN
def test_rows_of_messages_long_done_count(design: str) -> None:
    work = Work(design, unclaimed_retention_ms=HOUR_MS)
    work.pass_through(COUNT)
    work.clock.advance(HOUR_MS)
    assert work.looked(lambda: work.broker.sweep(budget=1)) <= 2 * BUDGET
    looked = []
    while (work.broker.sweep(budget=1).next_due_ms or HOUR_MS * 9) <= work.clock.now_ms():
        looked.append(work.looked(lambda: work.broker.sweep(budget=BUDGET)))
    assert len(looked) >= COUNT // BUDGET - 1
    assert max(looked) <= 8 * BUDGET
    assert_clean(work.broker)


@DESIGN
def test_stats_and_claims_do_not_pay_for_what_has_passed(design: str) -> None:
    work = Work(design)
    work.pass_through(COUNT)
    assert work.looked(lambda: work.broker.stats("q")) <= 2 * BUDGET
    assert work.looked(lambda: work.broker.stats("q")) < 10
    assert work.looked(lambda: work.pass_through(1)) < 30
    assert_clean(work.broker)


@DESIGN
@pytest.mark.parametrize("state", [State.AVAILABLE, State.DELAYED, State.IN_FLIGHT, State.DONE])
def test_a_purge_in_steps(design: str, state: State) -> None:
    work = Work(design)
    for at in range(COUNT // BUDGET):
        delay_ms = HOUR_MS + at if state is State.DELAYED else 0
        work.broker.publish([Message(b"1", {"queue": "q"}, delay_ms=delay_ms)] * BUDGET)
        if state in {State.IN_FLIGHT, State.DONE}:
            taken = work.broker.claim("q", limit=BUDGET, lease_ms=HOUR_MS)
            if state is State.DONE:
                work.broker.ack([each.receipt for each in taken])
    store: Any = work.broker._store
    now_ms = work.clock.now_ms()
    looked = [
        work.looked(lambda: store.purge("q", [state], now_ms, limit=BUDGET))
        for _ in range(COUNT // BUDGET)
    ]
    assert store.purge("q", [state], now_ms, limit=BUDGET) == 0
    assert max(looked) <= 12 * BUDGET
    assert_clean(work.broker)


@DESIGN
def test_leases_dedup_ids_and_dead_letters_one_at_a_time(design: str) -> None:
    work = Work(design)
    broker = work.broker
    broker.create_queue("dead")
    broker.update_queue("q", max_attempts=1, dead_letter="dead")

    def one(number: int) -> None:
        broker.publish([Message(b"1", {"queue": "q"}, dedup_id=str(number))])
        broker.claim("q", lease_ms=1_000)
        work.clock.advance(600_000)
        counts = broker.sweep()
        assert (counts.leases_expired, counts.failed, counts.moved) == (1, 1, 1)

    looked = [work.looked(partial(one, number)) for number in range(200)]
    assert max(looked[100:]) <= 60
    assert_clean(broker)


@DESIGN
def test_a_dead_letter_that_is_done_in_its_target_is_found_without_a_search(design: str) -> None:
    work = Work(design, max_attempts=1)
    work.broker.create_queue("dead", filter="queue = 'q'")
    work.pass_through(COUNT)
    work.broker.publish([Message(b"1", {"queue": "q"})])
    for delivery in work.broker.claim("dead", limit=COUNT + 1):
        work.clock.advance(1)
        work.broker.ack([delivery.receipt])
    work.broker.release([work.broker.claim("q")[0].receipt])
    work.broker.sweep()
    work.broker.update_queue("q", dead_letter="dead")
    assert work.looked(work.broker.sweep) <= 4 * BUDGET
    assert work.broker.stats("dead").available == 1
    assert_clean(work.broker)


@DESIGN
def test_a_deleted_queue_leaves_nothing_in_memory(design: str) -> None:
    work = Work(design)
    store: Any = work.broker._store

    def held() -> list[int]:
        keys = [store.history.first_keys, store.first_unclaimed, *store.active.first_keys]
        more = [each._gone for each in keys] + [store.history._marked, store.active._due.ranks]
        return [len(each) for each in (*keys, *more, store.retention.ranks, store.by_number)]

    before = held()
    settings: dict[str, Any] = {"max_attempts": 1, "unclaimed_retention_ms": HOUR_MS}
    for name in ("a", "b"):
        work.broker.create_queue(name, done_retention_ms=HOUR_MS, **settings)
        work.broker.publish([Message(b"1", {"queue": name}) for _ in range(3 * BUDGET)])
        work.broker.publish([Message(b"1", {"queue": name}, delay_ms=HOUR_MS)])
        taken = [each.receipt for each in work.broker.claim(name, limit=2 * BUDGET)]
        work.broker.ack(taken[:BUDGET])
        work.broker.release(taken[BUDGET:])
        work.broker.browse(name, state=State.DELAYED)
        work.broker.sweep()
    work.broker.move("a", "b", state="failed")
    assert held() != before
    for name in ("a", "b"):
        work.broker.delete_queue(name)
    assert held() == before
    assert_clean(work.broker)
