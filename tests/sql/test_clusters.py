"""Several databases as one store."""

from __future__ import annotations

import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pytest
from tests.sql.test_faults import judge, wait_for_acks, worker
from tests.waiting import wait_until

import penstock
from penstock import (
    DiskFull,
    InvalidInput,
    InvalidUrl,
    ManualClock,
    Message,
    PenstockError,
    QueueNotFound,
    ServerUnreachable,
    StorageFailed,
    StoreMismatch,
)
from penstock.broker.requests import Joint, Publish
from penstock.server.metrics import Metrics
from penstock.store.sql.clusters import ClusterStore
from penstock.store.sql.tokens import cluster_of_group, cluster_of_id
from penstock.testing.checking import assert_clean
from penstock.testing.conformance import BrokerConformance
from penstock.testing.stores import Reopenable
from penstock.testing.suite.base import Suite
from penstock.testing.suite.delivery import DeliverySuite
from penstock.testing.suite.fifo import FifoSuite

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sql.postgres import PostgresServer

    from penstock.broker.broker import Broker
    from penstock.clock import Clock


class OnDatabases(Suite):
    """Opens the store of a test: some databases for each of its places."""

    databases: ClassVar[int] = 2

    @pytest.fixture(autouse=True)
    def _with_postgres(self, postgres: PostgresServer) -> Iterator[None]:
        self.postgres = postgres
        yield
        postgres.forget_places()

    def open(self, clock: Clock, **options: Any) -> Broker:
        urls = [self.postgres.emptied(f"{self.place}/{number}") for number in range(self.databases)]
        self._opened = Reopenable(";".join(urls))
        return self._opened.open(clock, **options)

    def reopen(self) -> Broker:
        return self._opened.reopen()

    def payload_kept(self, message_id: int) -> bool | None:
        store = self.broker._store
        assert isinstance(store, ClusterStore)
        database = store.members[cluster_of_id(message_id)].core.database
        return bool(database.run("payloads", message_ids=[message_id]))


class TestTwoDatabases(OnDatabases, BrokerConformance):
    """What every store does, over two databases."""


@pytest.mark.soak
class TestThreeDatabases(OnDatabases, DeliverySuite, FifoSuite):
    """Turns and order where some databases have nothing."""

    databases = 3


# --- one store over two databases -----------------------------------------------------------------

# Groups of the first and of the second of two databases.
FIRST, SECOND = "b", "a"


def test_these_groups_are_apart() -> None:
    assert [cluster_of_group(group, 2) for group in (FIRST, SECOND, "")] == [0, 1, 0]
    spread = Counter(cluster_of_group(f"tenant-{n}", 3) for n in range(3_000))
    assert all(800 < count < 1_200 for count in spread.values())
    assert len(spread) == 3


def put(broker: Broker, *groups: str, queue: str = "q", **fields: Any) -> list[int]:
    return broker.publish(
        [
            Message(b"%s%d" % (group.encode(), n), {"queue": queue}, group, **fields)
            for n, group in enumerate(groups)
        ]
    )


@pytest.fixture
def urls(postgres: PostgresServer) -> Iterator[list[str]]:
    """Name two databases that are empty."""
    names = [postgres.create() for _ in range(2)]
    yield [postgres.url(name) for name in names]
    for name in names:
        postgres.drop(name)


@pytest.fixture
def broker(urls: list[str]) -> Iterator[Broker]:
    with penstock.open(urls, background=False, clock=ManualClock()) as opened:
        opened.create_queue("q")
        yield opened
        assert_clean(opened)


def store_of(broker: Broker) -> ClusterStore:
    store = broker._store
    assert isinstance(store, ClusterStore)
    return store


def test_a_message_is_where_its_group_belongs(broker: Broker) -> None:
    ids = put(broker, FIRST, SECOND, SECOND, FIRST)
    assert ids == [1, (1 << 48) + 1, (1 << 48) + 2, 2]
    for number, member in enumerate(store_of(broker).members):
        rows = member.core.database.execute("SELECT message_id FROM messages ORDER BY 1")
        assert [cluster_of_id(row[0]) for row in rows] == [number] * 2
    assert broker.stats("q").available == 4
    assert [entry.message_id for entry in broker.browse("q")] == sorted(ids)
    assert broker.store_stats().published_total == 4


def test_a_claim_of_both_is_one_lease(broker: Broker) -> None:
    put(broker, *[FIRST, SECOND] * 3)
    deliveries = broker.claim("q", limit=6)
    assert Counter(d.group for d in deliveries) == {FIRST: 3, SECOND: 3}
    (lease,) = {d.lease for d in deliveries}
    assert [o.status for o in broker.extend(lease, lease_ms=50_000)] == ["extended"] * 6
    receipts = [d.receipt for d in deliveries]
    assert [o.receipt for o in broker.ack(receipts[:4])] == receipts[:4]
    assert all(broker.release(receipts[4:], delay_ms=0))
    assert not any(broker.ack(receipts))
    stats = broker.stats("q")
    assert (stats.done, stats.available, stats.in_flight) == (4, 2, 0)


def test_a_claim_is_filled_by_whoever_has_something(broker: Broker) -> None:
    put(broker, *[SECOND] * 20, FIRST)
    assert Counter(d.group for d in broker.claim("q", limit=10)) == {SECOND: 9, FIRST: 1}
    assert len(broker.claim("q", limit=20)) == 11
    assert broker.claim("q", limit=5) == []


def test_a_claim_is_bounded_whatever_it_is_from(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.store.sql.spreading.MAX_CLAIM_BYTES", 100)
    for group in (FIRST, SECOND):
        broker.publish([Message(b"x" * 40, {"queue": "q"}, group) for _ in range(5)])
    # It ends with the message that brings it there.
    assert len(broker.claim("q", limit=10)) == 3


def test_claims_of_one_take_turns(broker: Broker) -> None:
    broker.create_queue("r")
    put(broker, *[FIRST, SECOND] * 4)
    put(broker, *[FIRST, SECOND] * 4, queue="r")
    turns: dict[str, list[str]] = {"q": [], "r": []}
    for _ in range(8):
        for queue, taken in turns.items():
            taken += [d.group for d in broker.claim(queue)]
    for taken in turns.values():
        assert taken in ([FIRST, SECOND] * 4, [SECOND, FIRST] * 4)


def test_a_page_goes_on_in_the_next_database(broker: Broker) -> None:
    ids = put(broker, *[FIRST] * 3, *[SECOND] * 3)
    for limit in (1, 2, 3, 4, 5, 6):
        found: list[int] = []
        cursor: str | None = None
        while True:
            page = broker.browse("q", limit=limit, cursor=cursor)
            found += [entry.message_id for entry in page]
            cursor = page.next_cursor
            if cursor is None:
                break
        assert found == ids
    for bad in ("2/", "0", "x/", "0/nonsense", "-1/", "999999999/"):
        with pytest.raises(InvalidInput, match="cursor"):
            broker.browse("q", cursor=bad)


def test_a_receipt_that_no_database_can_have_given_is_stale(broker: Broker) -> None:
    put(broker, FIRST)
    (delivery,) = broker.claim("q")
    beyond = f"{delivery.lease}-{7 << 48:016x}"
    assert [o.status for o in broker.ack([beyond, delivery.receipt])] == ["stale", "done"]
    assert broker.attempts("q", 7 << 48) == []
    assert broker.redrive("q", message_ids=[7 << 48]) == 0


def test_mass_moves_reach_both(broker: Broker) -> None:
    broker.update_queue("q", max_attempts=1)
    broker.create_queue("to")
    ids = put(broker, *[FIRST, SECOND] * 4)
    broker.release([d.receipt for d in broker.claim("q", limit=8)])
    assert broker.redrive("q", message_ids=ids[:2]) == 2
    assert broker.redrive("q", where="group = 'a'") == 3
    assert broker.stats("q").failed == 3
    assert broker.move("q", "to", limit=2) == 2
    assert broker.move("q", "to", message_ids=ids) == 1
    assert broker.move("q", "to", state="available", message_ids=[ids[0]]) == 1
    assert broker.stats("to").available == 4
    assert broker.purge("to") == 4
    assert broker.purge("q") == 4


def test_dead_letters_stay_in_their_database(broker: Broker) -> None:
    broker.create_queue("dead")
    broker.update_queue("q", max_attempts=1, dead_letter="dead")
    put(broker, FIRST, SECOND)
    broker.release([d.receipt for d in broker.claim("q", limit=2)], reason="no")
    broker.sweep()
    assert sorted(d.group for d in broker.claim("dead", limit=9)) == [SECOND, FIRST]


def test_the_log_of_all(broker: Broker) -> None:
    assert broker.configure_log(logs=4).logs == 4
    broker.publish([Message(b"old", {"kind": "x"}, group) for group in (FIRST, SECOND, SECOND)])
    stats = broker.log_stats()
    pages = [broker.read_log(log) for log in range(stats.logs)]
    assert [page.log for page in pages] == [0, 1, 2, 3]
    assert [record.group for page in pages[::2] for record in page.records] == [FIRST]
    assert [record.group for page in pages[1::2] for record in page.records] == [SECOND] * 2
    assert (stats.end, sorted(stats.cursors)) == ((1 << 48) + 3, [0, 1, 2, 3])
    broker.create_queue("late", filter="kind = 'x'")
    assert broker.backfill("late").added == 3
    assert broker.backfill("late").added == 0
    assert broker.stats("late").available == 3
    with pytest.raises(InvalidInput, match="multiple of 2"):
        broker.configure_log(logs=3)
    with pytest.raises(InvalidInput, match="no log 4"):
        broker.read_log(4)


def test_what_several_databases_do_not_do(broker: Broker, urls: list[str]) -> None:
    put(broker, FIRST)
    for refused in (
        broker.take_epoch,
        lambda: broker.update_queue("q", filter="a = 1", from_offset=1),
    ):
        with pytest.raises(InvalidInput, match="2 databases"):
            refused()
    with pytest.raises(PenstockError, match="backup"):
        broker.checkpoint(Path("nowhere"))
    with pytest.raises(InvalidInput, match="inline"):
        penstock.open(urls, routing="pipeline")


def test_an_audit_says_whose_it_is(broker: Broker) -> None:
    put(broker, FIRST, SECOND)
    second = store_of(broker).members[1]
    second.core.database.execute("UPDATE messages SET refs = 5")
    report = broker.check()
    assert report.found == {"references": 1}
    assert "cluster 1" in report.violations[0].text
    assert broker.check(repair=True).ok


def test_two_brokers_and_a_queue_that_changes(broker: Broker, urls: list[str]) -> None:
    # In whatever order they are named.
    with penstock.open(urls[::-1], background=False, clock=ManualClock(seed=1)) as other:
        put(other, FIRST, SECOND)
        broker.create_queue("also", filter="queue = 'q'")
        put(other, SECOND, FIRST)
        assert broker.stats("also").available == 2
        other.update_queue("also", filter="queue = 'r'")
        put(broker, SECOND, FIRST)
        assert broker.stats("also").available == 2
        broker.delete_queue("also")
        assert len(put(other, SECOND, FIRST)) == 2
        with pytest.raises(QueueNotFound):
            other.claim("also")
        assert other.stats("q").available == 8


def test_a_publish_that_finds_queues_changed_after_a_part_was_stored(
    broker: Broker, urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(broker, FIRST, SECOND)
    second = store_of(broker).members[1].store
    publish = second.publish
    with penstock.open(urls, background=False, clock=ManualClock(seed=1)) as other:

        def later(*arguments: Any, **options: Any) -> list[int]:
            monkeypatch.undo()
            other.create_queue("new", filter="queue = 'q'")
            return publish(*arguments, **options)

        monkeypatch.setattr(second, "publish", later)
        ids = put(broker, FIRST, SECOND)
    assert broker.stats("q").available == 4
    # What was routed before the queue was made is not in it, what comes after is.
    assert [entry.message_id for entry in broker.browse("new")] == [ids[1]]


def test_a_drained_queue_goes_when_nothing_waits_anywhere(broker: Broker) -> None:
    put(broker, FIRST, SECOND)
    broker.delete_queue("q", drain=True)
    for _ in range(2):
        (delivery,) = broker.claim("q")
        broker.sweep()
        assert [spec.name for spec in broker.queues()] == ["q"]
        assert broker.ack([delivery.receipt])[0]
    broker.sweep()
    assert broker.queues() == []


# --- opening --------------------------------------------------------------------------------------


def rows_of(postgres: PostgresServer, url: str) -> list[tuple[object, ...]]:
    with postgres.connect(url.rpartition("/")[2]) as connection:
        return connection.execute(
            "SELECT store_id, cluster, clusters FROM penstock.instance"
        ).fetchall()


def is_empty(postgres: PostgresServer, url: str) -> bool:
    with postgres.connect(url.rpartition("/")[2]) as connection:
        found = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = 'penstock'")
        return found.fetchall() == []


def test_the_databases_know_each_other(postgres: PostgresServer, urls: list[str]) -> None:
    with penstock.open(";".join(urls), background=False) as broker:
        broker.create_queue("q")
        put(broker, FIRST, SECOND)
        told = broker.info().store_id
    (first,), (second,) = (rows_of(postgres, url) for url in urls)
    assert (first[1:], second[1:]) == ((0, 2), (1, 2))
    assert first[0] == second[0] == int(told, 16)
    with penstock.open(urls[::-1], background=False) as broker:
        assert broker.info().store_id == told
        assert len(broker.claim("q", limit=5)) == 2


def test_mistakes_write_nothing(postgres: PostgresServer, urls: list[str]) -> None:
    penstock.open(urls, background=False).close()
    other, empty = postgres.create(), postgres.url(postgres.create())
    others = [postgres.url(other), postgres.url(postgres.create())]
    penstock.open(others, background=False).close()
    alone = postgres.url(postgres.create())
    penstock.open(alone, background=False).close()
    for named, said in (
        ([urls[0], others[1]], "another store"),
        ([urls[0], empty], "empty, and not number 1"),
        ([empty, urls[1]], "empty, and not number 0"),
        ([*urls, empty], "number can't be changed"),
        ([alone, empty], "store of its own"),
        ([empty, alone], "store of its own"),
        ([urls[0], f"{urls[0]}?application_name=x"], "the same database"),
        ([urls[0]], "name all"),
        ([f"{urls[0]}?cluster=1"], "name all"),
        ([f"{alone}?cluster=0"], "of its own"),
    ):
        with pytest.raises(StoreMismatch, match=said):
            penstock.open(named, background=False)
        assert is_empty(postgres, empty), said
    for named, said in (
        ([*urls, "memory:"], "SQL databases"),
        ([], "SQL databases"),
        ([urls[0], urls[0]], "twice"),
        ([f"{url}?cluster=0" for url in urls], "by itself"),
        ([f"{urls[0]}?cluster=32"], "from 0 to 31"),
        ([f"{urls[0]}{n}" for n in range(33)], "up to 32"),
    ):
        with pytest.raises(InvalidUrl, match=said):
            penstock.open(named, background=False)


@pytest.mark.parametrize("made", [1, 2])
def test_a_store_that_was_half_made_is_finished(
    postgres: PostgresServer, urls: list[str], made: int
) -> None:
    penstock.open(urls, background=False).close()
    for number, url in enumerate(urls):
        with postgres.connect(url.rpartition("/")[2]) as connection:
            if number < made:
                connection.execute("UPDATE penstock.instance SET clusters = -2")
            else:
                connection.execute("DROP SCHEMA penstock CASCADE")
    with penstock.open(urls[::-1], background=False) as broker:
        broker.create_queue("q")
        assert put(broker, FIRST, SECOND) == [1, (1 << 48) + 1]
    assert [rows_of(postgres, url)[0][1:] for url in urls] == [(0, 2), (1, 2)]


def test_many_processes_may_make_it_at_once(urls: list[str]) -> None:
    with ThreadPoolExecutor(4) as pool:
        opened = list(pool.map(lambda _: penstock.open(urls, background=False), range(4)))
    assert len({broker.info().store_id for broker in opened}) == 1
    for broker in opened:
        broker.close()


def test_one_of_them_by_itself_is_for_reading(urls: list[str]) -> None:
    with penstock.open(urls, background=False) as broker:
        broker.create_queue("q")
        put(broker, FIRST, SECOND)
        broker.delete_queue("q", drain=True)
        broker.ack([d.receipt for d in broker.claim("q", limit=1)])
    held = 0
    for number, url in enumerate(urls):
        with penstock.open(f"{url}?cluster={number}", background=False) as one:
            with one.view() as view:
                held += sum(view.depths("q")[:3])
            for refused in (
                lambda: one.create_queue("r"),
                lambda: one.send("q", b"x"),
                lambda: one.delete_queue("q"),
            ):
                with pytest.raises(PenstockError):
                    refused()
            one.sweep()
    assert held == 1
    with penstock.open(urls, background=False) as broker:
        assert (broker.stats("q").available, broker.stats("q").done) == (1, 1)


# --- a crash between two databases ----------------------------------------------------------------


def test_what_a_crash_has_left_apart_is_mended(broker: Broker, urls: list[str]) -> None:
    broker.create_queue("gone")
    broker.create_queue("anew")
    put(broker, FIRST, SECOND, queue="gone")
    put(broker, FIRST, SECOND, queue="anew")
    first = store_of(broker).members[0].store
    now_ms = broker._clock.now_ms()
    # As if this process had died each time before it came to the second one.
    spec = msgspec.structs.replace(broker.queue("q"), name="new", filter="queue = 'new'")
    first.create_queue(spec, now_ms)
    changed = msgspec.structs.replace(broker.queue("q"), version=2, lease_ms=7)
    first.update_queue(changed, now_ms)
    first.update_queue(msgspec.structs.replace(changed, version=3, lease_ms=8), now_ms)
    first.delete_queue("gone", now_ms)
    first.delete_queue("anew", now_ms)
    first.create_queue(msgspec.structs.replace(spec, name="anew", filter="kind = 1"), now_ms)
    first.configure_log(2, 5_000, now_ms)
    with penstock.open(urls, background=False, clock=ManualClock(seed=1)) as other:
        known = [
            {
                queue.name: (queue.number, queue.spec, queue.coverage.draining)
                for queue in member.core.queues.values()
            }
            for member in store_of(other).members
        ]
        assert known[0] == known[1]
        assert sorted(known[0]) == ["anew", "new", "q"]
        assert known[0]["q"][1].lease_ms == 8
        assert other.stats("anew").available == 0
        assert other.log_stats().logs == 4
        put(other, FIRST, SECOND, queue="new")
        assert other.stats("new").available == 2
        assert_clean(other)


def test_a_broker_that_runs_mends_it_too(broker: Broker, urls: list[str]) -> None:
    clock = ManualClock(seed=1)
    with penstock.open(urls, background=False, clock=clock) as other:
        first = store_of(broker).members[0].store
        spec = msgspec.structs.replace(broker.queue("q"), name="new", filter="queue = 'new'")
        first.create_queue(spec, 0)
        # A message of the second database, by filters that only the first one has.
        other.queues()
        assert put(other, SECOND, queue="new") == [(1 << 48) + 1]
        assert [d.group for d in other.claim("new")] == [SECOND]
        first.drain_queue("new", 0)
        clock.advance(2_000)
        other.sweep()
        assert all("new" in member.core.queues for member in store_of(other).members)
        assert other.purge("new", states=["in_flight"]) == 1
        other.sweep()
        assert [queue.name for queue in other.queues()] == ["q"]


@pytest.mark.parametrize("what", ["delete", "update", "drain"])
def test_who_was_held_up_leaves_a_queue_made_anew_alone(
    broker: Broker, urls: list[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with penstock.open(urls, background=False, clock=ManualClock(seed=1)) as other:
        store = store_of(other)
        first, second = (member.store for member in store.members)
        old = broker.queue("q")
        if what == "delete":
            first.delete_queue("q", 0)
        elif what == "update":
            first.update_queue(msgspec.structs.replace(old, version=2, lease_ms=7), 0)
        else:
            first.drain_queue("q", 0)
        verb = f"{what}_queue"
        behind = getattr(second, verb)

        def late(*arguments: Any, **options: Any) -> Any:
            # Somebody else has brought it into line, and made a queue of that name again.
            monkeypatch.undo()
            if what != "delete":
                broker.delete_queue("q")
            broker.create_queue("q", lease_ms=9_000)
            put(broker, FIRST, SECOND)
            return behind(*arguments, **options)

        monkeypatch.setattr(second, verb, late)
        store._agreement.settle(store.members[1], 0)
        for member in store.members:
            member.core.reload()
            (queue,) = member.core.queues.values()
            assert (queue.spec.lease_ms, queue.coverage.draining) == (9_000, False)
    stats = broker.stats("q")
    assert (stats.available, stats.enqueued_total) == (2, 2)
    put(broker, SECOND)
    assert len(broker.claim("q", limit=5)) == 3


def test_a_claim_that_waits_looks_at_every_database(urls: list[str]) -> None:
    with penstock.open(urls) as broker, penstock.open(urls) as other:
        broker.create_queue("q")
        for group in (SECOND, FIRST):
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(broker.claim, "q", wait_ms=60_000)
                put(other, group)
                assert [d.group for d in waiting.result(timeout=60)] == [group]


def test_errors_of_opening_say_which_database(urls: list[str]) -> None:
    with pytest.raises(PenstockError, match=r"postgresql://postgres.*/nothing: ") as caught:
        penstock.open([urls[0], urls[1].rpartition("/")[0] + "/nothing"])
    assert isinstance(caught.value, InvalidUrl)
    secret = urls[1].replace("postgres@", "nobody:hush@")
    with pytest.raises(PenstockError, match="nobody") as caught:
        penstock.open([urls[0], secret])
    assert "hush" not in str(caught.value)


# --- one of them is away --------------------------------------------------------------------------


@pytest.fixture
def apart(postgres: PostgresServer, own_postgres: PostgresServer) -> list[str]:
    """Name two databases, of which the second is on a server that can be stopped."""
    return [postgres.url(postgres.create()), own_postgres.url(own_postgres.create())]


def fails(*_: object, **__: object) -> None:
    raise ServerUnreachable("the database does not answer")


def test_one_that_goes_away_is_the_only_one(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = store_of(broker).members
    ids = put(broker, FIRST, SECOND)
    held = broker.claim("q", limit=2)
    broker.delete_queue("q", drain=True)
    monkeypatch.setattr(second.store, "held", fails)
    # What is held in the other is extended.
    assert [o.receipt for o in broker.extend(held[0].lease, lease_ms=9_000)] == [
        d.receipt for d in held if d.message_id == ids[0]
    ]
    monkeypatch.undo()
    assert not second.up
    assert second._probe is not None
    second._probe.join(60)
    assert all(broker.ack([d.receipt for d in held]))
    # Asked by the first whether the drained queue may go.
    monkeypatch.setattr(second.core, "refresh", fails)
    assert first.store.remove_drained(0) == 0
    assert (first.up, second.up) == (True, False)
    monkeypatch.undo()
    second._probe.join(60)


def test_other_failures_say_whose_they_are(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise DiskFull("the database has no room left")

    monkeypatch.setattr(store_of(broker).members[1].store, "publish", full)
    with pytest.raises(DiskFull, match=r"cluster 1 \(postgresql:.*no room left"):
        put(broker, SECOND)
    monkeypatch.undo()
    assert store_of(broker).members[1].up


@pytest.mark.slow
def test_the_others_go_on_without_one(
    apart: list[str], own_postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    with penstock.open(apart) as broker:
        broker.create_queue("q", lease_ms=600_000)
        put(broker, *[FIRST, SECOND] * 3)
        held = broker.claim("q", limit=2)
        assert {d.group for d in held} == {FIRST, SECOND}
        own_postgres.stop()
        # The first one of these finds out.
        taken = [d.group for _ in range(4) for d in broker.claim("q")]
        assert taken == [FIRST, FIRST]
        assert broker.away is None
        metrics = Metrics()
        metrics.watch(broker, parked=lambda: 0, connections=dict, seconds=lambda: 0.0)
        metrics.read_store()
        page = metrics.page()
        assert b"penstock_store_healthy 1.0" in page
        assert b"penstock_collisions_total" in page
        assert b"penstock_queues" not in page
        put(broker, FIRST)
        with pytest.raises(ServerUnreachable, match="cluster 1"):
            put(broker, SECOND)
        with pytest.raises(ServerUnreachable, match="nothing was changed"):
            put(broker, FIRST, SECOND)
        for ask in (
            lambda: broker.stats("q"),
            lambda: broker.browse("q"),
            broker.store_stats,
            lambda: broker.ack([d.receipt for d in held]),
        ):
            with pytest.raises(ServerUnreachable, match="cluster 1"):
                ask()
        assert broker.ack([d.receipt for d in held if d.group == FIRST])[0].ok
        assert len(broker.extend(held[0].lease, lease_ms=500_000)) == 0
        broker.create_queue("meanwhile")
        assert caplog.text.count("is away") == 1
        # Many at once, as a server has them: only those that need it fail.
        joint = Joint(
            publishes=[
                Publish([Message(b"x", {"queue": "q"}, group)], None)
                for group in (FIRST, SECOND, FIRST)
            ]
        )
        broker.begin(joint)
        assert [bool(each.answer) for each in joint.publishes] == [True, False, True]
        assert isinstance(joint.publishes[1].error, ServerUnreachable)
        assert [d.group for d in broker.claim("q", limit=9)] == [FIRST] * 3
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(broker.claim, "q", wait_ms=60_000)
            own_postgres.start()
            assert [d.group for d in waiting.result(timeout=60)] == [SECOND]
        put(broker, SECOND, queue="meanwhile")
        assert broker.stats("meanwhile").available == 1
        assert broker.ack([d.receipt for d in held if d.group == SECOND])[0].ok


@pytest.mark.slow
def test_a_publish_of_which_a_part_is_stored(
    apart: list[str], own_postgres: PostgresServer
) -> None:
    with penstock.open(apart, background=False) as broker:
        broker.create_queue("q")
        messages = [
            Message(b"%d" % n, {"queue": "q"}, group, dedup_id=str(n))
            for n, group in enumerate((SECOND, FIRST, SECOND))
        ]
        own_postgres.stop()
        with pytest.raises(StorageFailed, match=r"1 of 3 messages are stored.*cluster 1"):
            broker.publish(messages)
        own_postgres.start()
        wait_until(lambda: store_of(broker).members[1].up, why="the second database")
        assert broker.publish(messages) == [(1 << 48) + 1, 1, (1 << 48) + 2]
        assert broker.stats("q").available == 3


@pytest.mark.slow
def test_a_database_in_whose_place_another_one_is(
    apart: list[str], own_postgres: PostgresServer
) -> None:
    name = apart[1].rpartition("/")[2]
    with penstock.open(apart, background=False) as broker:
        broker.create_queue("q")
        own_postgres.stop()
        with pytest.raises(ServerUnreachable):
            put(broker, SECOND)
        own_postgres.start()
        member = store_of(broker).members[1]
        wait_until(lambda: member.up, why="the second database")
        with own_postgres.connect(name) as connection:
            connection.execute("UPDATE penstock.instance SET store_id = store_id + 1")
        own_postgres.stop()
        with pytest.raises(ServerUnreachable):
            put(broker, SECOND)
        own_postgres.start()
        wait_until(lambda: "another database" in str(member._away), why="a look at it")
        with pytest.raises(ServerUnreachable, match="another database"):
            put(broker, SECOND)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["stopped", "crashed"])
def test_restarts_under_load(
    apart: list[str], own_postgres: PostgresServer, tmp_path: Path, how: signal.Signals
) -> None:
    url, notes = ";".join(apart), tmp_path / "notes"
    with ExitStack() as stack:
        for name in ("first", "second"):
            stack.enter_context(worker(url, notes, name))
        for _ in range(2):
            wait_for_acks(notes, 20)
            own_postgres.stop(how)
            # The other database goes on meanwhile.
            wait_for_acks(notes, 20)
            own_postgres.start()
            wait_for_acks(notes, 20)
    judge(url, notes)
