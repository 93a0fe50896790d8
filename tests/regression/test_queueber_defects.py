"""The known defects of Queueber, one test each: none of them may come to us."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from sortedcontainers import SortedDict, SortedSet

from penstock import Broker, ManualClock, Message, SystemClock
from penstock.engines.memory import MemoryEngine, MemoryTable
from penstock.testing.stores import Reopenable
from penstock.urls import DESIGNS, make_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from penstock import Delivery

MEMORY = [f"memory:?design={design}" for design in DESIGNS]
HOUR_MS = 3_600_000
STORES = [*MEMORY, *(f"rocksdb:{{place}}/store?design={design}" for design in DESIGNS)]


@pytest.fixture
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    """A broker on the machine's clock, with its sweeper."""
    store = Reopenable(request.param.format(place=tmp_path))
    yield store.open(SystemClock())
    store.close()


every_store = pytest.mark.parametrize("opened", STORES, indirect=True)


def publish(broker: Broker, count: int, **fields: Any) -> list[int]:
    return broker.publish([Message(b"%d" % n, {"queue": "q"}, **fields) for n in range(count)])


def at_once(work: Callable[[int], None], threads: int) -> None:
    """Run ``work`` in threads that begin together; raise what any of them raised."""
    errors: list[BaseException] = []
    gate = threading.Barrier(threads)

    def run(number: int) -> None:
        try:
            gate.wait(60)
            work(number)
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=run, args=(n,)) for n in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(300)
    assert not any(thread.is_alive() for thread in running)
    if errors:
        raise errors[0]


# --- 1 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("verb", ["ack", "release", "extend and ack", "purge", "delete"])
def test_1_the_last_message_takes_the_expiry_entry_with_it(design: str, verb: str) -> None:
    engine = MemoryEngine(DESIGNS[design])
    clock = ManualClock()
    broker = Broker(make_store(engine, design, clock), clock=clock, background=False)
    broker.create_queue("q", lease_ms=1000)
    publish(broker, 3)
    receipts = [delivery.receipt for delivery in broker.claim("q", limit=3)]
    leases, expiry = engine.table("leases").rows, engine.table("lease_expiry").rows
    assert (len(leases), len(expiry)) == (1, 1)
    if verb == "extend and ack":
        broker.extend(receipts[1:2], lease_ms=5000)
        assert (len(leases), len(expiry)) == (2, 2)
        broker.extend(receipts, lease_ms=7000)
        assert (len(leases), len(expiry)) == (2, 2)
    if verb == "purge":
        broker.purge("q", states=["in_flight"])
    elif verb == "delete":
        broker.delete_queue("q")
    else:
        for receipt in receipts:
            assert len(leases) == len(expiry) >= 1
            (broker.release if verb == "release" else broker.ack)([receipt])
    assert (len(leases), len(expiry)) == (0, 0)
    clock.advance(10_000)
    assert broker.sweep().leases_expired == 0
    broker.close()


# --- 2, 4, 5 ---------------------------------------------------------------------------------


@every_store
def test_2_concurrent_claims_never_share_a_message(opened: Broker) -> None:
    opened.create_queue("q", lease_ms=HOUR_MS)
    ids = publish(opened, 600)
    taken: list[Delivery] = []

    def claim(_: int) -> None:
        while batch := opened.claim("q", limit=7):
            taken.extend(batch)

    at_once(claim, 6)
    assert sorted(delivery.message_id for delivery in taken) == ids
    owners = Counter(delivery.lease for delivery in taken)
    assert max(owners.values()) <= 7


@every_store
def test_4_many_workers_find_every_record(opened: Broker) -> None:
    opened.create_queue("q", max_attempts=1000, bucket_exponent=1, lease_ms=HOUR_MS)
    done: list[int] = []
    ids: list[int] = []

    def work(number: int) -> None:
        if number < 2:
            for _ in range(20):
                ids.extend(publish(opened, 5, group=str(number)))
            return
        misses = 0
        while misses < 3:
            batch = opened.claim("q", limit=4, wait_ms=100)
            misses = 0 if batch else misses + 1
            back = [delivery for delivery in batch[:1] if delivery.attempts < 3]
            receipts = [delivery.receipt for delivery in back]
            assert all(opened.extend(receipts, lease_ms=2 * HOUR_MS))
            assert all(opened.release(receipts, delay_ms=number % 2))
            rest = batch[len(back) :]
            assert all(opened.ack([delivery.receipt for delivery in rest]))
            done.extend(delivery.message_id for delivery in rest)

    at_once(work, 6)
    # What was released a moment ago may still be delayed.
    while len(done) < len(ids) and (batch := opened.claim("q", limit=100, wait_ms=60_000)):
        assert all(opened.ack([delivery.receipt for delivery in batch]))
        done.extend(delivery.message_id for delivery in batch)
    assert sorted(done) == sorted(ids)
    assert not opened.claim("q")
    totals = opened.store_stats()
    assert (totals.healed_total, totals.quarantined_total) == (0, 0)


@every_store
def test_5_of_two_claims_at_once_one_gets_the_message(opened: Broker) -> None:
    opened.create_queue("q", lease_ms=HOUR_MS)
    for _ in range(25):
        (message_id,) = publish(opened, 1)
        taken: list[int] = []
        at_once(lambda _: taken.extend(d.message_id for d in opened.claim("q")), 2)  # noqa: B023
        assert taken == [message_id]


# --- 3 ---------------------------------------------------------------------------------------


@every_store
def test_3_a_waiting_claim_sees_the_moment_a_delay_is_over(opened: Broker) -> None:
    clock = SystemClock()
    opened.create_queue("q")
    late_ms: list[int] = []
    # A machine may stall, but not each time: a claim that looks again only now and then is late
    # each time.
    while len(late_ms) < 10 and (not late_ms or late_ms[-1] >= 1_750):
        publish(opened, 1, delay_ms=250)
        (delivery,) = opened.claim("q", wait_ms=60_000)
        late_ms.append(clock.now_ms() - delivery.published_at_ms - 250)
        assert late_ms[-1] >= 0
    assert late_ms[-1] < 1_750, late_ms


@every_store
def test_3_a_waiting_claim_is_not_ended_by_what_is_not_visible(opened: Broker) -> None:
    clock = SystemClock()
    opened.create_queue("q")
    results: list[tuple[int, int]] = []

    def run(number: int) -> None:
        if number == 0:
            began = clock.now_ms()
            batch = opened.claim("q", wait_ms=400)
            results.append((len(batch), clock.now_ms() - began))
        else:
            threading.Event().wait(0.1)
            publish(opened, 1, delay_ms=60_000)

    at_once(run, 2)
    ((count, took_ms),) = results
    assert count == 0
    assert took_ms >= 390


# --- 6 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", MEMORY)
def test_6_a_refused_receipt_does_not_look_like_a_success(url: str) -> None:
    clock = ManualClock()
    store = Reopenable(url)
    broker = store.open(clock, background=False)
    broker.create_queue("q", lease_ms=1000)
    publish(broker, 2)
    one, two = (delivery.receipt for delivery in broker.claim("q", limit=2))
    assert all(broker.ack([one]))
    clock.advance(1000)
    stale, expired = broker.ack([one, two])
    assert not stale
    assert not expired
    assert not any(broker.release([one, two]))
    assert not any(broker.extend([one, two], lease_ms=1000))
    assert not any(broker.extend(one[:-17], lease_ms=1000))
    assert sum(map(bool, broker.ack([one, two, one]))) == 0
    store.close()


# --- 7 ---------------------------------------------------------------------------------------


class Graves(SortedDict):  # type: ignore[misc]
    """Rows that leave a tombstone when they go, as in an LSM tree before compaction."""

    def __init__(self) -> None:
        super().__init__()
        self.dead: Any = SortedSet()

    def pop(self, key: bytes, *default: Any) -> Any:
        if key in self:
            self.dead.add(key)
        return super().pop(key, *default)

    def __delitem__(self, key: bytes) -> None:
        self.dead.add(key)
        super().__delitem__(key)

    def __setitem__(self, key: bytes, value: bytes) -> None:
        self.dead.discard(key)
        super().__setitem__(key, value)


class CountingTable(MemoryTable):
    """Counts the tombstones that scans step over."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = Graves()
        self.steps = 0

    def scan(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        rows = super().scan(begin, end, limit)
        last = rows[-1][0] if len(rows) == limit else end
        dead = self.rows.dead
        self.steps += dead.bisect_left(last) - dead.bisect_left(begin)
        return rows


class CountingEngine(MemoryEngine):
    def __init__(self, tables: Any) -> None:
        super().__init__(tables)
        self._tables = {name: CountingTable() for name in tables}

    def steps(self, *names: str) -> int:
        return sum(self._tables[name].steps for name in names)  # type: ignore[attr-defined]


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("ordering", ["standard", "fifo"])
def test_7_claims_do_not_step_over_what_has_passed(design: str, ordering: str) -> None:
    engine = CountingEngine(DESIGNS[design])
    clock = ManualClock()
    broker = Broker(make_store(engine, design, clock), clock=clock, background=False)
    broker.create_queue("q", ordering=ordering, bucket_exponent=1, done_retention_ms=0)
    live = [name for name in DESIGNS[design] if name not in {"leases", "lease_expiry"}]

    def pass_through(rounds: int) -> int:
        before = engine.steps(*live)
        for n in range(rounds):
            publish(broker, 5, group="ab"[n % 2], priority=n % 2)
            clock.advance(1)
            receipts = [delivery.receipt for delivery in broker.claim("q", limit=5)]
            # A FIFO group is visited once per claim, so two of them may fill four places of five.
            assert len(receipts) >= 4
            broker.ack(receipts)
        return engine.steps(*live) - before

    publish(broker, 20, group="a")
    early = pass_through(20)
    pass_through(300)
    late = pass_through(20)
    assert late <= early + 200, f"{early} tombstones at first, {late} after 1500 messages"
    broker.close()
