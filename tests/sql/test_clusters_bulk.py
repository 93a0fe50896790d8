"""A store of several databases, read in bulk, trimmed, and filled from its past."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.sql.test_clusters import FIRST, SECOND, put, store_of
from tests.sql.test_pinned import finish, open_transactions, rows_of

import penstock
from penstock import InvalidInput, ManualClock, Message, ServerUnreachable, State, StorageFailed
from penstock.flight import TABLES, partition
from penstock.flight.partitions import Numbers
from penstock.model import LogSpan
from penstock.store.plans import Want
from penstock.store.sql import pinned_together
from penstock.store.sql.pinned_together import PinnedTogether
from penstock.store.sql.tokens import cluster_of_id, first_offset
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.sql.postgres import PostgresServer

    from penstock import Broker

BASE = first_offset(1)


@pytest.fixture
def urls(postgres: PostgresServer, tmp_path: Path) -> Iterator[list[str]]:
    """Name two databases that are empty."""
    yield [postgres.emptied(f"{tmp_path}/{number}") for number in range(2)]
    postgres.forget_places()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def broker(urls: list[str], clock: ManualClock) -> Iterator[Broker]:
    with penstock.open(urls, background=False, clock=clock) as opened:
        yield opened
        assert_clean(opened)


@pytest.fixture
def other(urls: list[str], broker: Broker) -> Iterator[Broker]:
    """Give another process's broker of the same store."""
    with penstock.open(urls, background=False, clock=ManualClock(seed=1)) as opened:
        yield opened


@pytest.fixture
def life(broker: Broker, clock: ManualClock) -> Broker:
    """Give a store in which everything has happened, in both databases."""
    broker.create_queue("q", max_attempts=2, backoff_base_ms=0)
    broker.create_queue("fifo", filter="n >= 20", ordering="fifo")
    broker.create_queue("empty")
    broker.publish(
        Message(
            b"p%d" % n,
            {"queue": "q", "n": n},
            group=(FIRST, SECOND)[n % 2],
            priority=n % 4,
            delay_ms=5_000 if n % 10 > 7 else 0,
        )
        for n in range(60)
    )
    for _ in range(2):
        held = broker.claim("q", limit=16, consumer="w")
        assert {each.group for each in held} == {FIRST, SECOND}
        clock.advance(10)
        by_group = sorted(held, key=lambda each: each.group)
        broker.ack([each.receipt for each in by_group[::2]])
        broker.release([each.receipt for each in by_group[1::4]], reason="no good")
    broker.claim("fifo", limit=4, consumer="v")
    return broker


# --- every table ----------------------------------------------------------------------------------


def members_of(rows: list[dict[str, Any]], name: str = "message_id") -> Counter[int]:
    return Counter(cluster_of_id(row[name]) for row in rows)


def test_every_table_has_what_both_have(life: Broker) -> None:
    with life.view(stats=True) as view:
        whole = {table: rows_of(view, table, 1) for table in TABLES}
        for count in (2, 7):
            for table in TABLES:
                cut = rows_of(view, table, count)
                assert sorted(map(repr, cut)) == sorted(map(repr, whole[table])), table
    for table in ("active", "done", "failed", "attempts", "messages"):
        assert set(members_of(whole[table])) == {0, 1}, table
    assert members_of(whole["log"], "offset") == {0: 30, 1: 30}
    assert members_of(whole["messages"]) == {0: 30, 1: 30}
    by_state = Counter((row["queue"], row["state"]) for row in whole["active"])
    for row in whole["queues"]:
        queue, stats = row["name"], life.stats(row["name"])
        for state in State:
            depth = getattr(stats, state.value)
            assert row[state.value] == depth
            if state in {State.DONE, State.FAILED}:
                rows = [each for each in whole[state.value] if each["queue"] == queue]
                listed = [entry.message_id for entry in life.browse(queue, state=state, limit=100)]
                assert sorted(each["message_id"] for each in rows) == sorted(listed)
                assert len(rows) == depth
            else:
                assert by_state[queue, state.value] == depth
    told = {(row["queue"], row["metric"]): row["value"] for row in whole["stats"]}
    assert told["q", "acked_total"] == life.stats("q").acked_total == 16
    assert told[None, "published_total"] == 60
    assert (told[None, "end.0"], told[None, "earliest.1"]) == (31, BASE)
    held = {row["message_id"] for row in whole["active"] if row["consumer"] == "v"}
    assert {cluster_of_id(each) for each in held} == {0, 1}
    groups = {(row["queue"], row["group"]) for row in whole["groups"]}
    assert {("fifo", FIRST), ("fifo", SECOND)} <= groups
    assert {row["outcome"] for row in whole["attempts"]} == {"acked", "released", "running"}


def test_pieces_are_cut_where_ids_are(life: Broker) -> None:
    life.configure_log(logs=4)
    with life.view() as view:
        assert view.log_stats.span(1) == view.log_stats.span(3) == LogSpan(BASE, BASE, BASE + 30)
        assert view.log_stats.kept == 60
        for table, count in (("log", 8), ("messages", 8)):
            pieces = [piece for part in partition(view, table, count) for piece in part]
            assert len(pieces) == count
            for piece in pieces:
                assert isinstance(piece, Numbers)
                assert piece.end - piece.begin < 16
        (pieces,) = partition(view, "log", 1, begin=25, end=BASE + 5, logs=[0, 1])
        assert pieces == [Numbers(0, 25, 31), Numbers(1, BASE, BASE + 5)]
        assert partition(view, "messages", 4, begin=100, end=BASE) == [[]]
        ids = [row["message_id"] for row in rows_of(view, "messages", 3, begin=30, end=BASE + 2)]
        assert ids == [30, BASE, BASE + 1]
        assert dict(view.payload_rows(30, BASE + 1)) == {30: b"p58", BASE: b"p1"}
        assert view.payloads([BASE, 1, BASE + 99, 5 << 48]) == [b"p1", b"p0", None, None]
        assert view.referenced({1, BASE, BASE + 99, 5 << 48}) == {1, BASE}


def test_logs_keep_their_numbers_when_there_are_more(broker: Broker) -> None:
    put(broker, FIRST, SECOND)
    before = broker.log_stats().cursors
    broker.configure_log(logs=6)
    put(broker, FIRST, SECOND)
    stats = broker.log_stats()
    assert sorted(stats.cursors) == [0, 1, 2, 3, 4, 5]
    assert {log: stats.cursors[log] // BASE for log in before} == {0: 0, 1: 1}
    for log in stats.cursors:
        page = broker.read_log(log, begin=stats.span(log).earliest)
        assert {record.group for record in page.records} <= {(FIRST, SECOND)[log % 2]}
    with pytest.raises(InvalidInput, match="no log 6: there are 6"):
        broker.read_log(6)


def test_a_view_is_of_the_queues_that_the_first_has(
    life: Broker, other: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queues that come and go between the two moments."""
    second = store_of(life).members[1].store
    pin = second.pins.pin

    def later(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        other.delete_queue("q")
        other.create_queue("q")
        other.create_queue("new")
        return pin(*arguments, **options)

    monkeypatch.setattr(second.pins, "pin", later)
    with life.view(stats=True, marks=False) as view:
        assert list(view.queues) == ["empty", "fifo", "q"]
        assert members_of(rows_of(view, "done")) == {0: 8}
        assert view.depths("q").done == 8
        assert [each.done for each in view.stats] == [0, 0, 8]


# --- what was read may be trimmed -----------------------------------------------------------------


def test_later_ends_are_beyond_in_every_database(broker: Broker) -> None:
    broker.create_queue("q")
    put(broker, *[FIRST] * 20, *[SECOND] * 8)
    # The numbers of the first are far ahead of those of the second.
    while finish(broker, 1) < [BASE] and broker.stats("q").done < 12:
        pass
    for _ in range(3):
        with broker.view() as view:
            seen = rows_of(view, "done")
        before = max(row["sequence"] for row in seen) + 1
        late = finish(broker, 3)
        assert broker.trim("q", state="done", before=before) == len(seen)
        assert sorted(entry.message_id for entry in broker.browse("q", state="done")) == sorted(
            late
        )
    assert broker.trim("q", state="done", before=1 << 60, created_at_ms=5) == 0
    assert broker.trim("q", state="done", before=1 << 60) == 3


def test_numbers_that_are_given_out_meanwhile(
    broker: Broker, other: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.create_queue("q")
    put(broker, *[FIRST] * 9, *[SECOND] * 9)
    first, second = (member.store for member in store_of(broker).members)
    marks, asked = second.pins.marks, list(range(3))
    held = broker.claim("q", limit=18)

    def ack(group: str) -> None:
        receipts = [each.receipt for each in held if each.group == group]
        assert all(other.ack(receipts[3 * asked[0] : 3 * asked[0] + 3]))

    def later() -> dict[int, int]:
        found = marks()
        if asked:
            # After both were asked, and before either is pinned.
            ack(FIRST)
            ack(SECOND)
            asked.pop(0)
        return found

    monkeypatch.setattr(second.pins, "marks", later)
    pinned: list[object] = []
    pin = first.pins.pin

    def counted(*arguments: Any, **options: Any) -> Any:
        pinned.append(options)
        return pin(*arguments, **options)

    monkeypatch.setattr(first.pins, "pin", counted)
    with broker.view() as view:
        rows = rows_of(view, "done")
    # The second attempt had marks that were far enough ahead.
    assert len(pinned) == 2
    assert members_of(rows) == {0: 6, 1: 6}
    asked.clear()
    broker.ack([each.receipt for each in held])
    assert broker.trim("q", state="done", before=max(r["sequence"] for r in rows) + 1) == 12
    assert broker.stats("q").done == 6


def test_marks_that_are_always_overtaken(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    broker.create_queue("q")
    monkeypatch.setattr(pinned_together, "_marks", lambda *_: {})
    with pytest.raises(StorageFailed, match="faster than the databases can be pinned"):
        broker.view()
    with broker.view(marks=False) as view:
        assert rows_of(view, "done") == []


def test_nothing_is_trimmed_unseen_while_many_settle(urls: list[str]) -> None:
    """Copy and trim, again and again, while others settle: each message is copied once."""
    count = 600
    brokers = [penstock.open(urls) for _ in range(3)]
    first = brokers[0]
    first.create_queue("q")
    # Two thirds are in one of them.
    first.publish(
        Message(b"", {"queue": "q"}, group=(FIRST, SECOND, SECOND)[n % 3]) for n in range(count)
    )

    def work(broker: Broker) -> list[int]:
        size = 1 + 4 * brokers.index(broker)
        found: list[int] = []
        while some := finish(broker, size):
            found += some
        return found

    copied: list[int] = []
    try:
        with ThreadPoolExecutor(2) as pool:
            working = [pool.submit(work, broker) for broker in brokers[1:]]
            while True:
                last = all(each.done() for each in working)
                with first.view() as view:
                    seen = rows_of(view, "done")
                if seen:
                    copied += [row["message_id"] for row in seen]
                    before = max(row["sequence"] for row in seen) + 1
                    assert first.trim("q", state="done", before=before) == len(seen)
                if last:
                    break
            finished = [each for ended in working for each in ended.result()]
        assert sorted(finished) == sorted(copied)
        assert len(set(copied)) == count
        assert_clean(first)
    finally:
        for broker in brokers:
            broker.close()


def test_a_queue_that_only_the_first_has_yet(
    broker: Broker, other: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers would begin again in the second, below what was read from the first."""
    broker.create_queue("q")
    first, second = (member.store for member in store_of(broker).members)
    elsewhere = store_of(other).members[0].store
    spec = msgspec.structs.replace(broker.queue("q"), name="new", filter="queue = 'new'")
    pin = first.pins.pin

    def meanwhile(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        # By another process, which has not come to the second yet.
        now_ms = clock.now_ms()
        elsewhere.create_queue(spec, now_ms)
        message = Message(b"", {"queue": "new"}, FIRST)
        elsewhere.publish([message] * 5, [["new"]] * 5, dedup_window_ms=0, now_ms=now_ms)
        (held,) = elsewhere.claim("new", [Want(5, 1_000, "", bytes(16))], now_ms)
        assert all(elsewhere.ack([d.receipt for d in held], queue_name=None, now_ms=now_ms))
        return pin(*arguments, **options)

    monkeypatch.setattr(first.pins, "pin", meanwhile)
    with broker.view() as view:
        seen = [row["sequence"] for row in rows_of(view, "done", queues=["new"])]
        assert len(seen) == 5
        assert "new" in second.core.queues
    put(broker, *[SECOND] * 2, queue="new")
    finish(broker, 2, "new")
    assert broker.trim("new", state="done", before=max(seen) + 1) == 5


# --- one fails ------------------------------------------------------------------------------------


def test_one_that_fails_leaves_nothing_pinned(
    life: Broker, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = store_of(life).members[1]

    def full(*_: object, **__: object) -> None:
        raise ServerUnreachable("too many clients already")

    monkeypatch.setattr(member.store.pins, "pin", full)
    with pytest.raises(StorageFailed, match=r"cluster 1 \(.*too many clients"):
        life.view()
    monkeypatch.undo()
    assert open_transactions(postgres) == 0
    # It has no room for another connection, but is not away.
    assert member.up
    member._lose("its cable was cut")
    with pytest.raises(ServerUnreachable, match=r"cluster 1 .*nothing was changed"):
        life.view()
    assert open_transactions(postgres) == 0
    assert member._probe is not None
    member._probe.join(60)
    with life.view() as view:
        assert len(rows_of(view, "log")) == 60
        assert open_transactions(postgres) == 2


def test_who_reads_is_told_which_database_failed(life: Broker) -> None:
    with life.view() as view:
        assert isinstance(view, PinnedTogether)
        view._parts[1].close()
        asks: list[Callable[[], object]] = [
            lambda: list(view.log_rows(1, 0, 1 << 60)),
            lambda: list(view.payload_rows(0, 1 << 60)),
            lambda: view.payloads([BASE]),
            lambda: rows_of(view, "done"),
            lambda: view.depths("q"),
            lambda: view.referenced({BASE}),
        ]
        for ask in asks:
            with pytest.raises(InvalidInput, match=r"cluster 1 \(.*was closed"):
                ask()
        assert len(list(view.log_rows(0, 0, 1 << 60))) == 1


def test_an_archive_of_one_is_not_one_of_all(broker: Broker, urls: list[str]) -> None:
    """Their sequence numbers are not the same."""
    told = {broker.info().store_id}
    for number, url in enumerate(urls):
        with penstock.open(f"{url}?cluster={number}", background=False) as one, one.view() as view:
            assert one.info().store_id == view.store_id
            told.add(view.store_id)
    assert len(told) == 3


# --- the past -------------------------------------------------------------------------------------


def test_backfill_by_time(broker: Broker, clock: ManualClock) -> None:
    ids = []
    for _ in range(3):
        ids += put(broker, FIRST, SECOND, SECOND)
        clock.advance(60_000)
    middle = datetime.fromtimestamp((clock.now_ms() - 120_000) / 1000, UTC)
    last = datetime.fromtimestamp((clock.now_ms() - 60_000) / 1000, UTC)
    broker.create_queue("late", filter="TRUE")
    plan = broker.backfill_plan("late", from_=middle, to=last)
    assert plan.stretches == [(2, 3), (BASE + 2, BASE + 4)]
    assert broker.backfill("late", from_=middle, to=last).added == 3
    assert sorted(entry.message_id for entry in broker.browse("late")) == sorted(ids[3:6])
    assert broker.backfill("late", from_=last).added == 3
    assert broker.backfill("late").added == 3
    assert broker.backfill_plan("late").stretches == []


def test_fill_goes_to_the_database_of_each_message(broker: Broker) -> None:
    ids = sorted(put(broker, *[FIRST] * 4, *[SECOND] * 4))
    broker.create_queue("late", filter="TRUE")
    plan = broker.backfill_plan("late")
    assert plan.stretches == [(1, 5), (BASE, BASE + 4)]
    wanted = [ids[0], ids[2], ids[5]]
    filled = broker.fill("late", 1, BASE + 4, wanted)
    assert (filled.added, filled.already, filled.missing, filled.next) == (3, 0, 0, BASE + 4)
    assert [entry.message_id for entry in broker.browse("late")] == wanted
    assert broker.fill("late", 1, BASE + 4, ids).added == 0
    # Between the databases there is nothing to be had, now or later.
    strange = broker.fill("late", 1, BASE + 4, [*ids[:4], 77, ids[4]])
    assert (strange.added, strange.already, strange.missing) == (0, 5, 1)
    put(broker, FIRST, queue="none")
    broker.update_queue("late", filter="queue IS NOT NULL")
    assert broker.backfill_plan("late").stretches == [(1, 6), (BASE, BASE + 4)]


def test_restore_and_collect_below_every_log(broker: Broker, clock: ManualClock) -> None:
    broker.configure_log(retention_ms=1_000)
    broker.create_queue("old")
    put(broker, *[FIRST] * 3, *[SECOND] * 3, queue="old")
    records = [
        (record, b"x%d" % (record.message_id % BASE))
        for log in (0, 1)
        for record in broker.read_log(log, begin=broker.log_stats().span(log).earliest).records
    ]
    broker.purge("old")
    clock.advance(4_000_000)
    put(broker, FIRST, SECOND, queue="none")
    clock.advance(2_000)
    broker.sweep()
    spans = broker.log_stats().all_spans()
    assert spans == [LogSpan(1, 4, 5), LogSpan(BASE, BASE + 3, BASE + 4)]
    broker.create_queue("late", filter="queue = 'old'")
    plan = broker.backfill_plan("late", archived=True)
    assert plan.stretches == [(1, 5), (BASE, BASE + 4)]
    with pytest.raises(InvalidInput, match=f"kept from offset {BASE + 3} on"):
        broker.restore("late", 1, BASE + 4, records)
    filled = broker.restore("late", 1, BASE + 3, records)
    # What the refused one had done stays.
    assert (filled.added + filled.already, filled.next) == (6, BASE + 3)
    assert [each.payload for each in broker.claim("late", limit=9)] == [
        payload for _, payload in records
    ]
    assert broker.restore("late", 1, BASE + 3, records).added == 0
    ids = [record.message_id for record, _ in records]
    assert broker.collect(ids, dry_run=False).freed_messages == 0
    assert broker.purge("late", states=list(State)) == 6
