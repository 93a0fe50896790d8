"""A pinned state is one moment, read in pages; and what was read of it may be trimmed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock import InvalidInput, ManualClock, Message, State, StorageFailed
from penstock.flight import TABLES, partition, read, select
from penstock.store.sql import snapshot as pinned
from penstock.store.sql.store import SqlStore
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.sql.postgres import PostgresServer

    from penstock import Broker
    from penstock.store.snapshot import PinnedStore

SECONDS = 60


class Pair:
    """Two processes' brokers on one store, whose numbers come from different rows."""

    def __init__(self, url: str) -> None:
        self.clocks = [ManualClock(seed=1), ManualClock(seed=2)]
        self.brokers = [penstock.open(url, clock=clock, background=False) for clock in self.clocks]
        for slot, broker in zip((3, 11), self.brokers, strict=True):
            store_of(broker).first_slot = slot

    def advance(self, ms: int) -> None:
        for clock in self.clocks:
            clock.advance(ms)


@pytest.fixture
def pair(url: str) -> Iterator[Pair]:
    made = Pair(url)
    yield made
    assert_clean(made.brokers[0])
    for broker in made.brokers:
        broker.close()


def store_of(broker: Broker) -> SqlStore:
    assert isinstance(broker._store, SqlStore)
    return broker._store


def rows_of(view: PinnedStore, table: str, count: int = 3, **options: Any) -> list[dict[str, Any]]:
    chosen = select(table)
    parts = partition(view, table, count, **options)
    return [
        row for part in parts for batch in read(view, part, chosen) for row in batch.to_pylist()
    ]


def finish(broker: Broker, limit: int, queue: str = "q") -> list[int]:
    """Claim messages and settle them as done."""
    held = broker.claim(queue, limit=limit)
    assert all(broker.ack([each.receipt for each in held]))
    return [each.message_id for each in held]


def done(broker: Broker, *, marks: bool = True) -> dict[int, int]:
    """Return the done messages of a pinned state, by sequence."""
    with broker.view(marks=marks) as view:
        return {row["sequence"]: row["message_id"] for row in rows_of(view, "done")}


# --- what was read may be trimmed -----------------------------------------------------------------


@contextmanager
def settling(broker: Broker, receipts: list[str]) -> Iterator[None]:
    """Settle messages in a transaction that is not committed yet."""
    store = store_of(broker)
    with store.database.transaction():
        # The server would end it after a while, which may be too soon on a busy machine.
        store.database.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        outcomes = store.ack(receipts, queue_name=None, now_ms=ManualClock().now_ms())
        assert all(outcomes)
        yield


def test_what_has_its_number_and_is_not_committed_is_waited_for(pair: Pair) -> None:
    first, second = pair.brokers
    first.create_queue("q")
    first.publish([Message(b"", {"queue": "q"})] * 12)
    # The other process's numbers are far ahead.
    ahead = finish(first, 10)
    (late,) = second.claim("q")
    with ThreadPoolExecutor(1) as pool:
        with settling(second, [late.receipt]):
            # Without marks nobody is waited for: the row is not there, and would be below.
            assert late.message_id not in done(first, marks=False).values()
            looking = pool.submit(done, first)
            with pytest.raises(TimeoutError):
                looking.result(timeout=0.5)
        found = looking.result(timeout=SECONDS)
    numbers = {message_id: sequence for sequence, message_id in found.items()}
    assert sorted(numbers) == sorted([*ahead, late.message_id])
    assert numbers[late.message_id] < max(numbers.values())
    assert first.trim("q", state="done", before=max(found) + 1) == 11


def test_what_comes_later_is_beyond_what_was_read(pair: Pair) -> None:
    first, second = pair.brokers
    first.create_queue("q", max_attempts=1)
    first.publish([Message(b"", {"queue": "q"})] * 30)
    finish(first, 10)
    for broker in (second, first):
        before = done(first)
        late = finish(broker, 2)
        broker.release([each.receipt for each in broker.claim("q", limit=2)])
        assert first.trim("q", state="done", before=max(before) + 1) == len(before)
        after = done(second)
        assert sorted(after.values()) == sorted(late)
        assert min(after) > max(before)
        assert first.trim("q", state="failed", before=max(before) + 1) == 0


def test_nothing_is_trimmed_unseen_while_many_settle(url: str) -> None:
    """Copy and trim, again and again, while others settle: each message is copied once."""
    count = 1_200
    brokers = [penstock.open(url) for _ in range(4)]
    for slot, broker in enumerate(brokers):
        store_of(broker).first_slot = 15 - slot
    first = brokers[0]
    first.create_queue("q")
    first.publish(Message(b"", {"queue": "q"}, group=f"{n % 9}") for n in range(count))

    def work(broker: Broker) -> list[int]:
        # Their own pace, so that numbers of one are behind those of another.
        size = 1 + 5 * (brokers.index(broker) - 1)
        found: list[int] = []
        while some := finish(broker, size):
            found += some
        return found

    copied: list[int] = []
    rounds = 0
    try:
        with ThreadPoolExecutor(3) as pool:
            working = [pool.submit(work, broker) for broker in brokers[1:]]
            while True:
                last = all(each.done() for each in working)
                if seen := done(first):
                    copied += seen.values()
                    rounds += 1
                    # Others go on between what is read and what is removed.
                    threading.Event().wait(0.02)
                    assert first.trim("q", state="done", before=max(seen) + 1) == len(seen)
                if last:
                    break
            finished = [each for work_done in working for each in work_done.result()]
        assert rounds > 2
        assert sorted(finished) == sorted(copied)
        assert len(set(copied)) == count
        assert_clean(first)
    finally:
        for broker in brokers:
            broker.close()


def test_a_queue_that_is_made_meanwhile_is_looked_at_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair.brokers
    first.create_queue("q")
    begun: list[object] = []
    begin = pinned._snapshot

    def meanwhile(database: Any) -> Any:
        begun.append(database)
        if len(begun) == 1:
            second.create_queue("new")
            second.publish([Message(b"", {"queue": "new"})] * 3)
            finish(second, 3, "new")
        return begin(database)

    monkeypatch.setattr(pinned, "_snapshot", meanwhile)
    assert len(done(first)) == 3
    assert len(begun) == 2


# --- one moment -----------------------------------------------------------------------------------


@pytest.fixture
def life(pair: Pair) -> Broker:
    """Give a store in which everything has happened."""
    first, second = pair.brokers
    first.create_queue("q", max_attempts=2, backoff_base_ms=0)
    first.create_queue("fifo", filter="n >= 20", ordering="fifo")
    first.create_queue("empty")
    first.publish(
        Message(
            b"p%d" % n,
            {"queue": "q", "n": n},
            group=f"g{n % 3}",
            priority=n % 4,
            delay_ms=5_000 if n % 10 == 9 else 0,
        )
        for n in range(60)
    )
    for broker in (first, second):
        held = broker.claim("q", limit=15, consumer="w")
        broker.ack([each.receipt for each in held[:6]])
        broker.release([each.receipt for each in held[6:10]], reason="no good")
    held = first.claim("q", limit=8)
    second.release([each.receipt for each in held[:5]], reason="again")
    return first


def test_every_table_is_of_the_same_moment(pair: Pair, life: Broker) -> None:
    _, second = pair.brokers
    with life.view(stats=True) as view:
        before = {table: rows_of(view, table) for table in TABLES}
        assert all(before.values())
        second.publish([Message(b"new", {"queue": "q", "n": 99})] * 5)
        finish(second, 20)
        pair.advance(20_000)
        second.sweep()
        second.purge("q", states=["failed"])
        second.delete_queue("fifo")
        second.create_queue("another")
        assert {table: rows_of(view, table) for table in TABLES} == before
        assert view.log_stats.end == 61
    with life.view(stats=True) as view:
        for table in TABLES:
            assert rows_of(view, table) != before[table], table


def test_pages_are_small_and_nothing_is_left_out(
    life: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with life.view(stats=True) as view:
        whole = {table: rows_of(view, table) for table in TABLES}
    most: dict[str, int] = {}
    for name, rows in (("FIRST_ROWS", 2), ("PAGE_ROWS", 3), ("SIZE_ROWS", 4), ("PAGE_BYTES", 500)):
        monkeypatch.setattr(pinned, name, rows)
    ran = pinned.SqlPinned._run

    def counted(self: pinned.SqlPinned, name: str, /, **parameters: Any) -> Any:
        found = ran(self, name, **parameters)
        most[name] = max(most.get(name, 0), len(found))
        return found

    monkeypatch.setattr(pinned.SqlPinned, "_run", counted)
    with life.view(stats=True) as view:
        for table in TABLES:
            for count in (1, 4):
                found = rows_of(view, table, count)
                assert sorted(map(repr, found)) == sorted(map(repr, whole[table])), table
        bodies = dict(view.payload_rows(0, 1_000))
    assert bodies == {n + 1: b"p%d" % n for n in range(60)}
    paged = {"read_log", "page_items", "page_ended", "page_attempts", "payload_sizes"}
    assert paged <= most.keys()
    assert max(most[name] for name in paged) <= 4


def test_what_is_due_is_told_by_the_time(pair: Pair, postgres: PostgresServer, url: str) -> None:
    first, _ = pair.brokers
    first.create_queue("q", lease_ms=1_000)
    first.publish(Message(b"", {"queue": "q"}, delay_ms=500 * n) for n in range(4))
    (held,) = first.claim("q")
    with postgres.connect(url.rpartition("/")[2]) as other, other.transaction():
        # Somebody else is at the item, so that nobody can write down that its lease is over.
        other.execute("SELECT 1 FROM penstock.items WHERE message_id = 1 FOR UPDATE")
        pair.advance(1_000)
        with first.view() as view:
            found = {row["message_id"]: row["state"] for row in rows_of(view, "active")}
            assert rows_of(view, "attempts") == []
        written = other.execute("SELECT count(*) FROM penstock.items WHERE delayed").fetchone()
    assert found == {1: "available", 2: "available", 3: "available", 4: "delayed"}
    assert written == (3,)
    # Nobody is at it any more.
    with first.view() as view:
        (attempt,) = rows_of(view, "attempts")
    assert (attempt["message_id"], attempt["outcome"]) == (held.message_id, "expired")


def test_references_and_collect(pair: Pair, life: Broker) -> None:
    with life.view(marks=False) as view:
        assert view.referenced({1, 2, 60, 61, 1_000}) == {1, 2, 60}
    life.purge("q", states=list(State))
    life.purge("fifo", states=list(State))
    with life.view(marks=False) as view:
        assert view.referenced(set(range(100))) == set()
    assert life.collect(range(1, 61)).freed_messages == 0


# --- connections ----------------------------------------------------------------------------------


def open_transactions(postgres: PostgresServer) -> int:
    with postgres.connect() as admin:
        row = admin.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'"
        ).fetchone()
    assert row is not None
    return int(str(row[0]))


def test_closing_ends_the_transaction_and_keeps_a_few_connections(
    life: Broker, postgres: PostgresServer
) -> None:
    views = [life.view() for _ in range(pinned.SPARE + 2)]
    assert open_transactions(postgres) == len(views)
    for view in views:
        view.close()
        view.close()
        with pytest.raises(InvalidInput, match="was closed"):
            list(view.log_rows(0, 0, 100))
    assert open_transactions(postgres) == 0
    spare = store_of(life)._spare
    assert len(spare) == pinned.SPARE
    with life.view():
        assert len(spare) == pinned.SPARE - 1
    assert len(spare) == pinned.SPARE


def test_an_idle_one_does_not_live_for_ever(life: Broker) -> None:
    with life.view() as view:
        assert isinstance(view, pinned.SqlPinned)
        ((told,),) = view._database.execute("SHOW idle_in_transaction_session_timeout")
        ((level,),) = view._database.execute("SHOW transaction_isolation")
        ((only,),) = view._database.execute("SHOW transaction_read_only")
    assert (told, level, only) == (f"{pinned.IDLE_MS // 60_000}min", "repeatable read", "on")


def test_closing_the_store_closes_what_is_pinned(url: str, postgres: PostgresServer) -> None:
    with penstock.open(f"{url}?logs=1", background=False) as broker:
        broker.publish([Message(b"")] * 3)
        view = broker.view()
        rows = view.log_rows(0, 1, 4)
        assert len(next(rows)) == 3
    with pytest.raises(InvalidInput, match="was closed"):
        list(view.log_rows(0, 1, 4))
    view.close()
    assert open_transactions(postgres) == 0


def test_a_lost_connection_is_not_another_moment(life: Broker, postgres: PostgresServer) -> None:
    with life.view():
        pass
    view = life.view()
    postgres.cut()
    with pytest.raises(StorageFailed, match="lost"):
        list(view.log_rows(0, 0, 100))
    with pytest.raises(InvalidInput, match="ended the snapshot"):
        list(view.log_rows(0, 0, 100))
    view.close()
    # The connection that was kept is gone as well.
    with life.view() as again:
        assert len(rows_of(again, "log")) == 60


def test_threads_take_turns(life: Broker) -> None:
    with life.view() as view:
        whole = rows_of(view, "active", 1)
        parts = partition(view, "active", 8)

        def part(at: int) -> list[Any]:
            chosen = select("active", payload=True)
            return [row for batch in read(view, parts[at], chosen) for row in batch.to_pylist()]

        with ThreadPoolExecutor(8) as pool:
            for _ in range(3):
                found = [row for some in pool.map(part, range(len(parts))) for row in some]
                assert len(found) == len(whole)
        assert {row["payload"] for row in found} <= {b"p%d" % n for n in range(60)}


def test_room_is_made_for_what_fails(life: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: object) -> object:
        raise StorageFailed("the database is on fire")

    begin: Callable[..., Any] = pinned._snapshot
    monkeypatch.setattr(pinned, "_snapshot", failing)
    for _ in range(3):
        with pytest.raises(StorageFailed, match="on fire"):
            life.view()
    monkeypatch.setattr(pinned, "_snapshot", begin)
    finish(life, 1)
    with life.view() as view:
        assert rows_of(view, "queues")
