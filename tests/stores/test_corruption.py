"""Records that rot on disk: put aside and counted, and everything else goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from penstock import Broker, ManualClock, Message, PenstockError, State
from penstock.engines.memory import MemoryEngine
from penstock.engines.rocksdb import RocksEngine
from penstock.urls import DESIGNS, make_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock import Delivery
    from penstock.engines import Engine

GARBAGE = b"\xff\x00garbage"


class Store:
    """A store that can be damaged: closed, changed underneath, opened again."""

    def __init__(self, design: str, path: Path | None) -> None:
        self.clock = ManualClock()
        self._design = design
        self._path = path
        self._memory = MemoryEngine(DESIGNS[design])
        self.broker = self._open()

    def _engine(self) -> Engine:
        if self._path is None:
            return self._memory
        return RocksEngine(self._path, DESIGNS[self._design])

    def _open(self) -> Broker:
        store = make_store(self._engine(), self._design, self.clock)
        return Broker(store, clock=self.clock, background=False)

    def rows(self, table: str) -> list[tuple[bytes, bytes]]:
        """Close the store and read a table."""
        self.broker.close()
        engine = self._engine()
        rows = list(engine.table(table).scan(b"", b"\xff" * 40, 10_000))
        engine.close()
        return rows

    def damage(
        self,
        table: str,
        value: bytes | None = GARBAGE,
        *,
        which: Callable[[bytes], bool] = lambda key: True,
        at: int = 0,
    ) -> Broker:
        """Overwrite (or delete) a row underneath the store, and open it again."""
        keys = [key for key, _ in self.rows(table) if which(key)]
        engine = self._engine()
        batch = engine.batch()
        if value is None:
            batch.delete(keys[at], engine.table(table).family)
        else:
            batch.put(keys[at], value, engine.table(table).family)
        engine.commit(batch)
        engine.close()
        self.broker = self._open()
        return self.broker

    def put(self, count: int, *, queue: str = "q", **fields: Any) -> list[int]:
        return self.broker.publish(
            [Message(b"%d" % n, {"queue": queue}, **fields) for n in range(count)]
        )

    def take(self, limit: int = 99, queue: str = "q") -> list[Delivery]:
        return self.broker.claim(queue, limit=limit)

    def depth(self, queue: str = "q") -> tuple[int, ...]:
        """Look several times: looking must not count anything twice."""
        for _ in range(3):
            stats = self.broker.stats(queue)
        return stats.available, stats.delayed, stats.in_flight, stats.done, stats.failed

    def put_aside(self) -> int:
        return self.broker.store_stats().quarantined_total


@pytest.fixture(params=["memory", "rocksdb"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return None if request.param == "memory" else tmp_path / "store"


@pytest.fixture
def indexed(place: Path | None) -> Iterator[Store]:
    store = Store("indexed", place)
    yield store
    store.broker.close()


@pytest.fixture(params=["indexed", "buckets"])
def store(request: pytest.FixtureRequest, place: Path | None) -> Iterator[Store]:
    store = Store(request.param, place)
    yield store
    store.broker.close()


# --- the indexed design ----------------------------------------------------------------------


def test_garbage_in_available(indexed: Store) -> None:
    indexed.broker.create_queue("q")
    ids = indexed.put(3)
    indexed.damage("available")
    assert indexed.depth()[0] == 2
    assert [d.message_id for d in indexed.take()] == ids[1:]
    assert indexed.depth() == (0, 0, 2, 0, 0)
    # The record, and the index entry that led to it.
    assert indexed.put_aside() == 2


def test_garbage_in_available_is_met_by_a_claim(indexed: Store) -> None:
    indexed.broker.create_queue("q")
    ids = indexed.put(3)
    indexed.damage("available", at=1)
    assert [d.message_id for d in indexed.take(2)] == [ids[0], ids[2]]
    assert indexed.depth() == (0, 0, 2, 0, 0)
    assert indexed.put_aside() == 1


def test_garbage_in_available_does_not_hold_a_fifo_group(indexed: Store) -> None:
    indexed.broker.create_queue("q", ordering="fifo")
    ids = indexed.put(3, group="g")
    indexed.damage("available")
    (delivery,) = indexed.take(1)
    assert delivery.message_id == ids[1]
    indexed.broker.ack([delivery.receipt])
    assert [d.message_id for d in indexed.take(1)] == [ids[2]]


def test_garbage_in_progress(indexed: Store) -> None:
    indexed.broker.create_queue("q")
    indexed.put(3)
    receipts = [d.receipt for d in indexed.take()]
    broker = indexed.damage("in_progress")
    assert not any(broker.ack(receipts[:1]))
    assert not any(broker.ack(receipts[:1]))
    assert [bool(outcome) for outcome in broker.ack(receipts)] == [False, True, True]
    assert indexed.depth() == (0, 0, 0, 2, 0)
    assert indexed.put_aside() == 1


@pytest.mark.parametrize("acked", [False, True])
def test_garbage_in_progress_does_not_hold_a_fifo_group(indexed: Store, acked: bool) -> None:
    indexed.broker.create_queue("q", ordering="fifo", lease_ms=1000)
    ids = indexed.put(3, group="g")
    (delivery,) = indexed.take(1)
    broker = indexed.damage("in_progress")
    if acked:
        broker.ack([delivery.receipt])
    else:
        indexed.clock.advance(1000)
    assert [d.message_id for d in indexed.take(1)] == [ids[1]]


def test_an_orphaned_index_entry(indexed: Store) -> None:
    indexed.broker.create_queue("q")
    ids = indexed.put(3)
    broker = indexed.damage("available", None)
    assert [d.message_id for d in indexed.take()] == ids[1:]
    assert broker.store_stats().healed_total == 1
    assert indexed.depth() == (0, 0, 2, 0, 0)


# --- the bucket design -----------------------------------------------------------------------


@pytest.mark.parametrize("record", [b"\x02", b"\x09"])
def test_garbage_in_a_bucket(place: Path | None, record: bytes) -> None:
    store = Store("buckets", place)
    store.broker.create_queue("q", bucket_exponent=1)
    store.broker.create_queue("other")
    ids = store.put(25)
    store.put(3, queue="other")
    store.damage("buckets", which=lambda key: key[1:2] == record and b"q" in key)
    taken = [d.message_id for d in store.take()]
    # A summary can be made anew from its bucket; a bucket is ten messages gone.
    assert taken == (ids if record == b"\x09" else ids[10:])
    assert store.depth() == (0, 0, len(taken), 0, 0)
    assert len(store.take(queue="other")) == 3
    totals = store.broker.store_stats()
    assert totals.quarantined_total + totals.healed_total >= 1
    store.broker.close()


# --- what both share -------------------------------------------------------------------------


@pytest.mark.parametrize("value", [GARBAGE, None])
def test_a_lost_lease_gives_its_messages_back(store: Store, value: bytes | None) -> None:
    store.broker.create_queue("q", lease_ms=1000)
    store.put(4)
    lost = store.take(2)
    kept = store.take(2)
    store.damage("leases", value, which=lambda key: key.hex() in lost[0].receipt)
    assert not any(store.broker.ack([lost[0].receipt]))
    assert all(store.broker.ack([d.receipt for d in kept]))
    store.clock.advance(1000)
    assert sorted(d.message_id for d in store.take()) == [d.message_id for d in lost]
    assert store.depth() == (0, 0, 2, 2, 0)
    assert store.put_aside() == (value is not None)


@pytest.mark.parametrize("state", [State.DONE, State.FAILED])
def test_garbage_in_history(store: Store, state: State) -> None:
    broker = store.broker
    broker.create_queue("q", max_attempts=1, done_retention_ms=1000, failed_retention_ms=1000)
    store.put(3)
    for delivery in [store.take(1)[0] for _ in range(3)]:
        if state is State.DONE:
            broker.ack([delivery.receipt])
        else:
            broker.release([delivery.receipt])
    kind = b"\x02\x03" if state is State.DONE else b"\x02\x04"
    broker = store.damage("history", which=lambda key: key[:2] == kind)
    assert len(broker.browse("q", state=state)) == 2
    assert sum(store.depth()) == 2
    assert store.put_aside() == 1
    store.clock.advance(1000)
    assert broker.sweep().removed == 2
    assert sum(store.depth()) == 0


def test_garbage_in_attempts(store: Store) -> None:
    store.broker.create_queue("q", backoff_base_ms=0)
    (message_id,) = store.put(1)
    for _ in range(3):
        store.broker.release([store.take(1)[0].receipt])
    broker = store.damage("history", which=lambda key: key[:2] == b"\x02\x05", at=1)
    for _ in range(3):
        assert [a.number for a in broker.attempts("q", message_id)] == [1, 3]
    assert store.put_aside() == 1
    assert store.take(1)[0].attempts == 4


def test_a_missing_payload(store: Store) -> None:
    store.broker.create_queue("q", lease_ms=1000)
    ids = store.put(3)
    broker = store.damage("payloads", None)
    assert [d.message_id for d in store.take(1)] == [ids[1]]
    assert [d.message_id for d in store.take(9)] == [ids[2]]
    assert store.depth() == (0, 0, 2, 0, 0)
    assert store.put_aside() == 1
    store.clock.advance(1000)
    broker.sweep()
    assert store.depth() == (2, 0, 0, 0, 0)


def test_a_missing_payload_does_not_hold_a_fifo_group(store: Store) -> None:
    store.broker.create_queue("q", ordering="fifo")
    ids = store.put(2, group="g")
    store.damage("payloads", None)
    assert [d.message_id for d in store.take(1)] == [ids[1]]


# --- any record at all -----------------------------------------------------------------------


def fill(store: Store) -> None:
    """Have something of everything, in two queues."""
    for name, ordering in (("q", "standard"), ("other", "fifo")):
        broker = store.broker
        broker.create_queue(
            name, ordering=ordering, max_attempts=1, unclaimed_retention_ms=9_000, lease_ms=5_000
        )
        store.put(5, queue=name, dedup_id=None)
        store.put(1, queue=name, dedup_id="x")
        broker.ack([store.take(1, name)[0].receipt])
        broker.release([store.take(1, name)[0].receipt])
        store.put(2, queue=name, delay_ms=500)
        broker.extend([store.take(2, name)[0].receipt], lease_ms=6_000)


def use(store: Store, *, exactly: bool) -> None:
    """Do a little of everything. A record that is gone, unlike one that rots, may be missed."""
    broker = store.broker
    for step in range(2):
        for spec in broker.queues():
            for state in State:
                for entry in broker.browse(spec.name, state=state):
                    broker.attempts(spec.name, entry.message_id)
            broker.stats(spec.name)
            broker.redrive(spec.name)
            store.put(1, queue=spec.name, dedup_id="x")
            deliveries = store.take(2, spec.name)
            broker.ack([d.receipt for d in deliveries[:1]])
            broker.release([d.receipt for d in deliveries[1:]])
        broker.sweep()
        store.clock.advance(5_000 + 90_000_000 * step)
        broker.sweep()
    for spec in broker.queues():
        broker.purge(spec.name, states=list(State))
        assert not exactly or store.depth(spec.name) == (0, 0, 0, 0, 0)
    store.put(2)
    assert len(store.take()) == 2


DAMAGE = {"garbage": GARBAGE, "empty": b"", "zeros": bytes(64), "gone": None}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("design", ["indexed", "buckets"])
def test_any_record(design: str, kind: str) -> None:
    """Whatever one record becomes, a store works on, or says on opening that it can't."""
    tried, wrong = 0, []
    # A queue whose settings are gone is gone; the others of its records are read with them.
    tables = set(DESIGNS[design]) - ({"queues"} if kind == "gone" else set())
    for table in sorted(tables):
        store = Store(design, None)
        fill(store)
        for at, (key, _) in enumerate(store.rows(table)):
            store = Store(design, None)
            fill(store)
            tried += 1
            try:
                store.damage(table, DAMAGE[kind], at=at)
            except PenstockError:
                # Without its identity, its next id or a queue's settings there is no going on.
                if table not in {"default", "log", "queues"}:
                    wrong.append(f"{table} {key.hex()} stops an opening")
                continue
            except Exception as error:
                wrong.append(f"{table} {key.hex()}: opening raises {error!r}")
                continue
            try:
                use(store, exactly=kind != "gone")
                assert store.broker.store_stats().quarantined_total <= 3
            except Exception as error:
                wrong.append(f"{table} {key.hex()}: {error!r:.200}")
    assert not wrong, "\n".join(wrong)
    assert tried > 30
