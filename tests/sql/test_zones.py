"""Pointers: when they are made, moved, left alone and collected; tokens; compare and set."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from tests.sql.test_connections import holding
from tests.waiting import wait_until

import penstock
from penstock import ManualClock, Message, StorageFailed
from penstock.model import LeaseRequest
from penstock.store.sql.claim import LOOK_EVERY, LOST_MAX, PATIENCE, PAUSE_MAX_MS, ClaimPace
from penstock.store.sql.connection import PLANS_MS
from penstock.store.sql.location import Tunables
from penstock.store.sql.store import SqlStore
from penstock.store.sql.zones import NEVER_MS, choose, token_of, walk
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sql.postgres import PostgresServer

    from penstock import Broker

MIN_INACTIVE_MS = Tunables().min_inactive_ms


def core_of(broker: Broker) -> SqlStore:
    store = broker._store
    assert isinstance(store, SqlStore)
    return store


class Store:
    """A broker on a manual clock, and a look into its tables."""

    def __init__(self, url: str, seed: int = 0, **options: Any) -> None:
        self.clock = ManualClock(seed=seed)
        self.broker = penstock.open(url, clock=self.clock, background=False, **options)
        self.core = core_of(self.broker)

    def query(self, text: str) -> list[tuple[Any, ...]]:
        return self.core.database.execute(text)

    def pointers(self) -> dict[str, tuple[int, int]]:
        """Return token and vesting time of each pointer, which is ahead of now or not."""
        now_ms = self.clock.now_ms()
        rows = self.query("SELECT zone, token, vesting_ms FROM pointers")
        return {bytes(zone).decode(): (token, vesting - now_ms) for zone, token, vesting in rows}

    def zones(self) -> set[str]:
        return {bytes(row[0]).decode() for row in self.query("SELECT zone FROM pointer_index")}

    def put(self, *groups: str, queue: str = "q", **fields: Any) -> list[int]:
        return self.broker.publish(
            [Message(b"x", {"queue": queue}, group=group, **fields) for group in groups]
        )

    def work_off(self, queue: str = "q") -> int:
        done = 0
        while deliveries := self.broker.claim(queue, limit=100):
            done += len(self.broker.ack([d.receipt for d in deliveries]))
        return done


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    made = Store(url)
    made.broker.create_queue("q")
    yield made
    assert_clean(made.broker)
    made.broker.close()


# --- enqueue --------------------------------------------------------------------------------------


def test_a_pointer_is_made_with_the_first_message_and_left_alone_after(store: Store) -> None:
    store.put("a")
    before = store.query("SELECT *, xmin::text FROM pointers")
    index = store.query("SELECT *, xmin::text FROM pointer_index")
    store.put("a", "a", "a")
    store.clock.advance(1_000)
    store.put("a")
    assert store.query("SELECT *, xmin::text FROM pointers") == before
    assert store.query("SELECT *, xmin::text FROM pointer_index") == index
    store.put("b")
    assert set(store.pointers()) == {"a", "b"}


def test_a_pointer_that_is_too_late_is_lowered(store: Store) -> None:
    store.put("a", delay_ms=10_000)
    assert store.pointers() == {"a": (0, 10_000)}
    store.put("a", delay_ms=9_900)
    assert store.pointers() == {"a": (0, 10_000)}
    store.put("a", delay_ms=9_000)
    assert store.pointers() == {"a": (0, 9_000)}
    store.put("a")
    assert store.pointers() == {"a": (0, 0)}
    assert len(store.broker.claim("q", limit=9)) == 1


def test_what_is_visible_now_is_never_held_back_by_the_threshold(store: Store) -> None:
    store.put("a", delay_ms=100)
    store.put("a")
    assert len(store.broker.claim("q", limit=9)) == 1


def test_memory_spares_the_look_at_the_index(store: Store) -> None:
    zones, now_ms = store.core.zones, store.clock.now_ms()
    key = (store.core.queue("q").number, b"a")
    assert zones.not_known_vested({key: now_ms}, now_ms) == {key: now_ms}
    store.put("a")
    assert zones.not_known_vested({key: now_ms}, now_ms) == {}
    later_ms = now_ms + store.core.tunables.trust_ms
    assert zones.not_known_vested({key: later_ms}, later_ms) == {}
    assert zones.not_known_vested({key: later_ms + 1}, later_ms + 1) == {key: later_ms + 1}
    store.work_off()
    assert zones.not_known_vested({key: now_ms}, now_ms) == {key: now_ms}


def test_a_delayed_message_is_not_remembered_as_visible(store: Store) -> None:
    store.put("a", delay_ms=1_000)
    store.put("a")
    assert len(store.broker.claim("q", limit=9)) == 1


# --- deep zones -----------------------------------------------------------------------------------


def test_a_claim_goes_on_where_the_last_one_of_a_deep_zone_ended(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others of an earlier lane come first all the same, at once; late ones after a few claims."""
    store.put(*"a" * 200, priority=5)
    run, froms = store.core.database.run, []

    def noting(name: str, /, **parameters: Any) -> list[tuple[Any, ...]]:
        if name == "take_one":
            froms.append((parameters["rank"], parameters["from_ms"]))
        return run(name, **parameters)

    monkeypatch.setattr(store.core.database, "run", noting)
    now_ms = store.clock.now_ms()
    for n in range(5):
        assert [each.message_id for each in store.broker.claim("q", limit=2)] == [
            2 * n + 1,
            2 * n + 2,
        ]
    assert froms == [(None, -1), *[(255 - 5, now_ms)] * 3]
    (urgent,) = store.put("a", priority=9)
    (delivery,) = store.broker.claim("q")
    assert delivery.message_id == urgent
    store.broker.ack([delivery.receipt])
    for _ in range(2):
        assert store.broker.claim("q", limit=2)
    # By a clock that is behind.
    (late,) = store.put("a", priority=5)
    store.query(f"UPDATE items SET vesting_ms = {now_ms - 1} WHERE message_id = {late}")
    claims = 1
    while late not in [each.message_id for each in store.broker.claim("q", limit=2)]:
        claims += 1
    assert 1 < claims <= LOOK_EVERY + 1


# --- raising --------------------------------------------------------------------------------------


def test_an_emptied_zone_is_looked_at_once_more(store: Store) -> None:
    cool_ms = store.core.tunables.cool_ms
    store.put("a")
    (delivery,) = store.broker.claim("q", lease_ms=60_000)
    assert store.pointers() == {"a": (0, cool_ms)}
    assert store.query("SELECT vesting_ms FROM pointer_index") == [(delivery.lease_deadline_ms,)]
    store.clock.advance(cool_ms)
    assert store.broker.claim("q") == []
    assert store.pointers() == {"a": (0, 60_000 - cool_ms)}
    store.broker.ack([delivery.receipt])
    for ahead_ms in (60_000, cool_ms):
        store.clock.advance(ahead_ms)
        assert store.broker.claim("q") == []
    assert store.query("SELECT vesting_ms FROM pointers") == [(NEVER_MS,)]


def test_who_trusted_its_memory_is_found_at_the_second_look(url: str, store: Store) -> None:
    other = Store(url, seed=1)
    store.put("a")
    assert len(other.broker.claim("q")) == 1
    # This one has seen the pointer vested, and does not know that it was raised.
    store.put("a")
    assert other.broker.claim("q") == []
    for clock in (store.clock, other.clock):
        clock.advance(store.core.tunables.cool_ms)
    assert len(other.broker.claim("q")) == 1
    other.broker.close()


@pytest.mark.parametrize("answer", ["late", "lost"])
def test_a_visit_that_took_long_lets_no_message_wait_for_a_lease(
    url: str,
    store: Store,
    postgres: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
) -> None:
    """It waits for a row of counters, and is committed after the time of the second look."""
    other = Store(url, seed=1)
    visitor = Store(f"{url}?connections=1", seed=2)
    zones = visitor.core.zones
    look_again = zones.look_again
    step_ms = store.core.tunables.cool_ms + 50

    def look_after_another(*told: Any) -> None:
        assert other.broker.claim("q") == []
        look_again(*told)

    monkeypatch.setattr(zones, "look_again", look_after_another)
    store.put("a")
    with ThreadPoolExecutor(1) as pool:
        with holding(postgres, url, "queue_counts") as has_waiter:
            claiming = pool.submit(visitor.broker.claim, "q", lease_ms=600_000)
            wait_until(has_waiter)
            for each in (store, other, visitor):
                each.clock.advance(step_ms)
            versions = store.core.zones.versions
            key = (store.core.queue("q").number, b"a")
            store.core.zones.saw_vested([key], store.clock.now_ms(), versions)
            if answer == "lost":
                # The server goes on with the statement.
                with socket.socket(fileno=os.dup(visitor.core.database.connect().fileno())) as line:
                    line.shutdown(socket.SHUT_RDWR)
        if answer == "late":
            assert len(claiming.result(60)) == 1
        else:
            with pytest.raises(StorageFailed):
                claiming.result(60)
            wait_until(lambda: store.broker.stats("q").in_flight == 1)
            visitor.put("b", delay_ms=600_000)
    assert other.broker.claim("q") == []
    # It trusts what it has read of the pointer.
    (second,) = store.put("a")
    other.clock.advance(store.core.tunables.cool_ms)
    assert second in [each.message_id for each in other.broker.claim("q", limit=9)]
    other.broker.close()
    visitor.broker.close()


def test_after_the_second_look_nobody_trusts_its_memory(url: str, store: Store) -> None:
    other = Store(url, seed=1)
    store.put("a")
    assert len(other.broker.claim("q", lease_ms=60_000)) == 1
    for clock in (store.clock, other.clock):
        clock.advance(store.core.tunables.cool_ms)
    assert other.broker.claim("q") == []
    store.put("a")
    assert len(other.broker.claim("q")) == 1
    other.broker.close()


def test_a_shortened_lease_brings_the_pointer_forward(store: Store) -> None:
    store.put("a")
    (delivery,) = store.broker.claim("q", lease_ms=60_000)
    store.clock.advance(1_000)
    store.broker.claim("q")
    store.broker.extend([delivery.receipt], lease_ms=100)
    assert store.pointers() == {"a": (0, 100)}
    store.clock.advance(100)
    (again,) = store.broker.claim("q")
    assert again.attempts == 2


# --- collecting -----------------------------------------------------------------------------------


def empty(store: Store, *groups: str) -> None:
    """Have zones that were found empty."""
    store.put(*groups)
    assert store.work_off() == len(groups)
    for _ in range(2):
        store.clock.advance(1_000)
        assert store.broker.claim("q") == []


def test_an_empty_zone_is_collected_after_a_while(store: Store) -> None:
    empty(store, "a", "b")
    store.put("b")
    store.clock.advance(MIN_INACTIVE_MS - 1_001)
    store.broker.sweep()
    assert store.zones() == {"a", "b"}
    store.clock.advance(1_001)
    store.broker.sweep()
    assert store.zones() == set(store.pointers()) == {"b"}
    assert store.core.zones.collected == 1
    store.put("a")
    assert len(store.broker.claim("q", limit=9)) == 2


def test_zones_that_nobody_visits_are_collected_as_well(store: Store) -> None:
    store.put(*(f"{n}" for n in range(20)))
    store.broker.purge("q")
    store.clock.advance(5_001)
    store.broker.sweep()
    store.clock.advance(MIN_INACTIVE_MS)
    store.broker.sweep()
    assert store.zones() == set()


def test_a_publish_that_trusts_its_memory_loses_nothing(url: str, store: Store) -> None:
    other = Store(url, seed=1)
    empty(store, "a")
    store.clock.advance(MIN_INACTIVE_MS)
    key = (store.core.queue("q").number, b"a")
    other.broker.queues()
    versions = other.core.zones.versions
    assert set(versions) == {1}
    other.core.zones.saw_vested([key], other.clock.now_ms(), versions)
    store.broker.sweep()
    assert store.zones() == set()
    other.put("a")
    assert store.zones() == {"a"}
    assert len(store.broker.claim("q")) == 1
    other.broker.close()


def test_a_zone_that_is_being_filled_is_not_collected(url: str, store: Store) -> None:
    other = Store(url, seed=1)
    empty(store, "a")
    store.clock.advance(MIN_INACTIVE_MS)
    queue = store.core.queue("q").number
    with other.core.database.transaction():
        other.core.zones.ensure({(queue, b"a"): other.clock.now_ms()}, other.clock.now_ms())
        assert store.core.zones.collect(store.clock.now_ms()) == 0
    assert store.core.zones.collect(store.clock.now_ms()) == 0
    other.broker.close()


def test_a_zone_that_is_collected_meanwhile_is_made_again(url: str, store: Store) -> None:
    """Whoever wants to put something into a zone that is being collected waits, and makes it."""
    store.broker.create_queue("r", filter="queue = 'q'", max_attempts=1)
    other = Store(url, seed=1)
    other.broker.queues()
    (id_,) = store.put("a")
    held = store.broker.claim("r")
    store.broker.release([held[0].receipt])
    assert store.work_off() == 1
    for _ in range(2):
        store.clock.advance(1_000)
        assert store.broker.claim("q") == store.broker.claim("r") == []
    store.clock.advance(MIN_INACTIVE_MS)
    core, now_ms = store.core, store.clock.now_ms()
    with ThreadPoolExecutor(1) as pool:
        with core.database.transaction():
            found = core.database.run("idle_zones", before_ms=now_ms, count=10)
            assert len(core.zones._collect(core.zones._log_of(b"a"), found, now_ms)) == 2
            redriving = pool.submit(other.broker.redrive, "r")
            threading.Event().wait(0.2)
            assert not redriving.done()
        assert redriving.result(timeout=30) == 1
    assert [d.message_id for d in store.broker.claim("r")] == [id_]
    other.broker.close()


def test_collections_race_with_publishes(url: str) -> None:
    """Zones come and go as fast as they can, and nothing is left behind."""
    tunables = Tunables(min_inactive_ms=0, cool_ms=1, trust_ms=1)
    brokers = [penstock.open(url, background=False) for _ in range(3)]
    for broker in brokers:
        core_of(broker).tunables = tunables
    brokers[0].create_queue("q")
    over = threading.Event()

    def publish(broker: Broker) -> int:
        for n in range(150):
            broker.publish([Message(b"", {"queue": "q"}, group=f"{n % 3}")])
        return 150

    def work(broker: Broker) -> int:
        done = 0
        while True:
            last = over.is_set()
            deliveries = broker.claim("q", limit=5)
            done += sum(map(bool, broker.ack([d.receipt for d in deliveries])))
            broker.sweep()
            if last and not deliveries and not broker.stats("q").available:
                return done

    try:
        with ThreadPoolExecutor(3) as pool:
            working = pool.submit(work, brokers[2])
            sent = sum(pool.map(publish, brokers[:2]))
            over.set()
            assert working.result(timeout=120) == sent == 300
        zones = core_of(brokers[2]).zones
        for _ in range(1_000):
            if zones.collected:
                break
            brokers[2].claim("q", wait_ms=2)
            brokers[2].sweep()
        assert zones.collected > 0
        assert sum(core_of(broker).zones.orphans for broker in brokers) == 0
        assert_clean(brokers[0])
    finally:
        for broker in brokers:
            broker.close()


def test_the_net_finds_what_should_not_be(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.put("a")
    store.query("DELETE FROM pointers; DELETE FROM pointer_index")
    store.core.zones._vested.clear()
    assert store.broker.claim("q") == []
    store.clock.advance(5_001)
    store.broker.sweep()
    assert store.core.zones.orphans == store.broker.store_stats().healed_total == 1
    assert any("no pointer" in record.message for record in caplog.records)
    assert len(store.broker.claim("q")) == 1


# --- tokens ---------------------------------------------------------------------------------------


def test_zones_keep_their_token_until_they_are_collected(url: str) -> None:
    store = Store(f"{url}?ring_size=8")
    other = Store(url, seed=1)
    store.broker.create_queue("q")
    groups = [f"g{n}" for n in range(40)]
    store.put(*groups)
    queue = store.core.queue("q").number
    of_eight = {group: token_of(queue, group.encode(), 8) for group in groups}
    assert {zone: token for zone, (token, _) in store.pointers().items()} == of_eight
    assert len(set(of_eight.values())) == 8
    assert isinstance(other.broker._store, SqlStore)
    other.broker._store.set_ring_size(3, other.clock.now_ms())
    store.put(*groups, "new")
    tokens = {zone: token for zone, (token, _) in store.pointers().items()}
    assert tokens.pop("new") == token_of(queue, b"new", 3)
    assert tokens == of_eight
    assert store.core.ring_high == 8
    taken = [d for _ in range(20) for d in other.broker.claim("q", limit=20)]
    assert len(taken) == 81
    other.broker.ack([d.receipt for d in taken])
    for _ in range(6):
        for clock in (store.clock, other.clock):
            clock.advance(MIN_INACTIVE_MS)
        while store.broker.claim("q"):
            pass
        store.broker.sweep()
    assert store.zones() == set()
    store.put(*groups)
    tokens = {zone: token for zone, (token, _) in store.pointers().items()}
    assert tokens == {group: token_of(queue, group.encode(), 3) for group in groups}
    other.broker._store.set_ring_size(1, other.clock.now_ms())
    assert sum(len(store.broker.claim("q", limit=20)) for _ in range(5)) == 40
    assert_clean(store.broker)
    store.broker.close()
    other.broker.close()


def test_walking_and_choosing() -> None:
    assert walk(1, lambda: 0.9) == [0]
    assert walk(4, lambda: 0.5) == [2, 3, 0, 1]
    assert list(choose(5, 2, lambda: 0.0)) == [0, 1]
    drawn = choose(100, 10, ManualClock(seed=3).random)
    assert len(set(drawn)) == 10
    assert set(drawn) < set(range(100))
    assert len({tuple(choose(100, 10, ManualClock(seed=n).random)) for n in range(9)}) > 5
    assert {token_of(7, b"%d" % n, 5) for n in range(50)} == set(range(5))


def test_many_zones_are_all_served(store: Store) -> None:
    groups = [f"{n:03}" for n in range(150)]
    store.put(*groups)
    seen: list[str] = []
    while deliveries := store.broker.claim("q", limit=7):
        seen += [d.group for d in deliveries]
    assert sorted(seen) == groups


def test_a_zone_with_many_gives_few_while_others_wait(store: Store) -> None:
    store.put(*["big"] * 200, *(f"{n}" for n in range(50)))
    seen = [d.group for d in store.broker.claim("q", limit=100)]
    assert len(seen) == 100
    assert len(set(seen)) > 10


# --- compare and set ------------------------------------------------------------------------------


def visit_parameters(store: Store, *zones: bytes, width: int = 1) -> dict[str, Any]:
    """Return the parameters of a visit that wants one message of each zone."""
    core, now_ms = store.core, store.clock.now_ms()
    return {
        "queue": core.queue("q").number,
        "zones": list(zones),
        "tokens": [0] * len(zones),
        "width": width,
        "room": width,
        "quota_max": 1,
        "leases": [store.clock.lease_id()],
        "deadlines": [now_ms + 1_000],
        "consumers": [b""],
        "lows": [0],
        "highs": [width],
        "room_bytes": [1 << 20],
        "slot": core.slot,
        "turn": 0,
        "stamp": core.stamp(),
        "cool_ms": 0,
        "clock_ms": now_ms,
        "never_ms": NEVER_MS,
        "now_ms": now_ms,
    }


def visit(store: Store) -> int:
    """Visit zone a; return how many messages that gives."""
    rows = store.core.database.run("visit", **visit_parameters(store, b"a"))
    return sum(row[3] is not None for row in rows)


def test_a_fresh_pointer_can_be_won_and_what_happened_before_is_no_loss(store: Store) -> None:
    store.put("a", "a", "a")
    assert store.query("SELECT lease_id FROM pointers") == [(None,)]
    assert visit(store) == 1
    ((lease,),) = store.query("SELECT lease_id FROM pointers")
    assert lease is not None
    assert visit(store) == 1
    assert store.query("SELECT lease_id FROM pointers") != [(lease,)]
    assert visit(store) == 1
    assert visit(store) == 0
    store.clock.advance(1_000)
    assert len(store.broker.claim("q", limit=9)) == 3


@pytest.mark.parametrize("fifo", [False, True])
def test_a_pointer_that_changes_while_the_visit_begins_is_passed_by(
    url: str, store: Store, fifo: bool
) -> None:
    """The visit has read the pointer and not locked it yet when another one is there and gone."""
    store.broker.create_queue("r", filter="queue = 'q'", ordering="fifo" if fifo else "standard")
    name = "visit_fifo" if fifo else "visit"
    other, third = Store(url, seed=1), Store(url, seed=2)
    store.put("a", "a")
    store.query("CREATE TABLE gate (one integer); INSERT INTO gate VALUES (1)")
    told = visit_parameters(store, b"a") | {"queue": store.core.queue("r").number}
    statement = store.core.database._statements[name]
    gated = statement.text.replace(
        b"WHERE q.vesting_ms <=",
        b"WHERE (SELECT max(one) FROM (SELECT one FROM gate FOR UPDATE) g) = 1 AND q.vesting_ms <=",
        1,
    )
    assert gated != statement.text

    waiting = """
        SELECT 1 FROM pg_stat_activity
        WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE 'WITH%'
    """
    with ThreadPoolExecutor(1) as pool:
        with other.core.database.transaction():
            other.query("SELECT one FROM gate FOR UPDATE")
            visiting = pool.submit(store.core.database.execute, gated, statement.values(told))
            wait_until(lambda: third.query(waiting), why="the visit does not wait at the gate")
            third.query("UPDATE pointers SET lease_id = 'somebody'")
        assert visiting.result(timeout=60) == []
    assert len(store.core.database.run(name, **told)) == 1
    store.query("DROP TABLE gate")
    store.clock.advance(1_000)
    assert len(store.broker.claim("q", limit=9)) == 2
    for each in (other, third):
        each.broker.close()


def test_zones_that_others_are_at_are_passed_by(url: str, store: Store) -> None:
    other = Store(url, seed=1)
    store.put("a", "b", "b", "c")
    before = store.core.database.statements
    with other.core.database.transaction():
        other.query("SELECT 1 FROM pointers WHERE zone = 'a' FOR UPDATE")
        assert [d.group for d in store.broker.claim("q")] == ["b"]
        assert store.core.database.statements - before == 2
        assert store.core.zones.collisions == 1
        # What it has room for is shared between those that are free.
        assert [d.group for d in store.broker.claim("q", limit=2)] == ["c", "b"]
    assert [d.group for d in store.broker.claim("q")] == ["a"]
    other.broker.close()


def test_a_claim_that_finds_no_zone_free_waits_a_little_and_gives_up(
    url: str, store: Store
) -> None:
    other = Store(url, seed=1)
    paused: list[float] = []
    claiming = store.broker._store
    assert isinstance(claiming, SqlStore)
    claiming._pause = paused.append
    store.put("a")
    wants = [LeaseRequest(1, 1_000, "", store.clock.lease_id())]
    with other.core.database.transaction():
        other.query("SELECT 1 FROM pointers FOR UPDATE")
        (claimed,) = claiming.claim("q", wants, store.clock.now_ms())
        assert not claimed
    assert len(paused) == LOST_MAX
    assert 0 < paused[0] < paused[-1] < 0.1
    assert len(claiming.claim("q", wants, store.clock.now_ms())[0]) == 1
    other.broker.close()


def test_where_zones_are_scarce_fewer_are_taken_at_a_time() -> None:
    pace = ClaimPace(10)

    def note(wanted: int, won: int, passed: int) -> int:
        pace.note(wanted=wanted, won=won, passed=passed)
        return pace.width

    assert note(10, 10, 5) == 10
    assert note(10, 8, 9) == 4
    assert note(4, 2, 9) == 1
    pauses = [pace.pause_ms]
    for _ in range(9):
        assert note(1, 0, 4) == 1
        pauses.append(pace.pause_ms)
    assert pauses == sorted(pauses)
    assert pauses[0] < pauses[-1] == pauses[-2] == PAUSE_MAX_MS
    # Not while others are met.
    assert {note(1, 1, 3) for _ in range(99)} == {1}
    widths = [note(1, 1, 0) for _ in range(9 * PATIENCE)]
    assert widths == sorted(widths)
    assert set(widths) == set(range(1, 11))
    assert widths[PATIENCE - 2] == 1
    assert pace.pause_ms == ClaimPace(10).pause_ms


def test_collisions_are_counted_and_refusals_too(url: str, store: Store) -> None:
    other = Store(url, seed=1)
    store.put("a", "a")
    with other.core.database.transaction():
        other.query("SELECT 1 FROM pointers FOR UPDATE")
        assert store.broker.claim("q") == []
        assert store.core.zones.collisions > 0
    (delivery,) = store.broker.claim("q")
    store.broker.ack([delivery.receipt])
    assert not any(other.broker.ack([delivery.receipt]))
    assert other.broker.store_stats().stale_receipts_total == 1
    other.broker.close()


# --- what verbs cost ------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 100])
def test_statements_of_each_verb(store: Store, count: int) -> None:
    database = store.core.database

    def cost(act: Any) -> tuple[Any, int]:
        before = database.statements
        result = act()
        return result, database.statements - before

    messages = [Message(b"x", {"queue": "q"})] * count
    store.broker.publish(messages)
    store.work_off()
    _, publishing = cost(lambda: store.broker.publish(messages))
    deliveries, claiming = cost(lambda: store.broker.claim("q", limit=count))
    assert len(deliveries) == count
    receipts = [delivery.receipt for delivery in deliveries]
    _, extending = cost(lambda: store.broker.extend(receipts, lease_ms=5_000))
    _, acking = cost(lambda: store.broker.ack(receipts))
    assert (publishing, claiming, extending, acking) == (1, 2, 1, 1)
    store.broker.publish(messages * 3)
    store.broker.claim("q", limit=count)
    deliveries, claiming = cost(lambda: store.broker.claim("q", limit=count))
    _, releasing = cost(lambda: store.broker.release([d.receipt for d in deliveries]))
    assert (len(deliveries), claiming, releasing) == (count, 1, 1)


def test_statements_of_a_claim_from_many_zones(store: Store) -> None:
    database = store.core.database
    store.put(*(f"{n}" for n in range(40)))
    before = database.statements
    assert len({d.group for d in store.broker.claim("q", limit=10)}) == 10
    assert database.statements - before == 2
    # One that takes all there is does not look again.
    store.broker.create_queue("r")
    store.put("a", "b", "c", queue="r")
    store.broker.claim("r", limit=1)
    before = database.statements
    assert len(store.broker.claim("r", limit=10)) == 2
    assert database.statements - before == 2


@pytest.mark.parametrize("ordering", ["standard", "fifo"])
def test_a_visit_finds_pointers_by_their_zone(store: Store, ordering: str) -> None:
    """Also by a plan that was made when there was one pointer, and the planner knew that."""
    store.broker.create_queue("r", ordering=ordering)
    database = store.core.database
    store.put("a", queue="r")
    store.query("ANALYZE; SET plan_cache_mode = force_generic_plan")
    name = "visit_fifo" if ordering == "fifo" else "visit"
    told = visit_parameters(store, b"a") | {"queue": store.core.queue("r").number}
    statement = database._statements[name]
    text = b"EXPLAIN (FORMAT JSON) " + statement.text
    todo = [database.execute(text, statement.values(told))[0][0][0]["Plan"]]
    looked = 0
    while todo:
        node = todo.pop()
        todo += node.get("Plans", [])
        if node.get("Relation Name", "").startswith("pointer") and "Scan" in node["Node Type"]:
            looked += 1
            assert "zone =" in node.get("Index Cond", ""), node
    assert looked == 5


def test_plans_are_kept_for_a_while(store: Store) -> None:
    """Those of an empty table would read all of a full one."""
    database = store.core.database

    def plans() -> int:
        text = "SELECT sum(generic_plans) FROM pg_prepared_statements WHERE statement ~ 'picked'"
        ((number,),) = store.query(text)
        return int(number)

    def cost() -> int:
        before = database.statements
        store.broker.ack([d.receipt for d in store.broker.claim("q")])
        return database.statements - before

    store.put(*["a"] * 60)
    # Every few claims look at the pointers, too.
    assert {cost() for _ in range(40)} == {2, 3}
    assert plans() > 0
    store.clock.advance(PLANS_MS)
    # It is asked as well whether queues have changed.
    assert cost() in {4, 5}
    assert cost() in {2, 3}
