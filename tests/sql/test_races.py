"""Verbs of two processes that come between each other's statements, one interleaving at a time.

A statement sees what was committed when it began, so that two processes can disturb each other only
between two statements, or while one waits for a lock. Both are brought about here, not waited for.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from tests.waiting import wait_until

import penstock
from penstock import ManualClock, Message, ServerUnreachable
from penstock.store.policy import SEGMENT_MS
from penstock.store.sql import zones
from penstock.store.sql.failures import Aborted
from penstock.store.sql.location import Tunables
from penstock.store.sql.store import SqlStore
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg
    from tests.sql.postgres import PostgresServer

    from penstock.store.sql.database import Database

TUNABLES = Tunables()


class Process:
    """A broker as one process has it, and a look behind it."""

    def __init__(self, url: str, clock: ManualClock, **options: Any) -> None:
        self.clock = clock
        self.broker = penstock.open(url, clock=clock, background=False, **options)
        store = self.broker._store
        assert isinstance(store, SqlStore)
        self.core = store
        self.database = store.database

    def put(self, *groups: str, queue: str = "q", **fields: Any) -> list[int]:
        return self.broker.publish(
            [Message(b"x", {"queue": queue}, group=group, **fields) for group in groups]
        )

    def claimed(self, queue: str = "q") -> list[int]:
        return sorted(d.message_id for d in self.broker.claim(queue, limit=100))

    def work_off(self, queue: str = "q") -> None:
        while deliveries := self.broker.claim(queue, limit=100):
            assert all(self.broker.ack([d.receipt for d in deliveries]))


class Race:
    """Two processes with one clock, and a connection of nobody's that can hold locks."""

    def __init__(self, server: PostgresServer, url: str, **options: Any) -> None:
        self.clock = ManualClock()
        self.first = Process(url, self.clock, **options)
        self.second = Process(url, self.clock, **options)
        # The first publish of all begins a segment of the log.
        self.first.broker.publish([Message(b"", {"queue": "nobody's"})])
        self._server, self._name = server, url.partition("?")[0].rpartition("/")[2]

    @contextmanager
    def holding(self, query: str) -> Iterator[psycopg.Connection[Any]]:
        """Hold the rows that a query names, until the end."""
        with self._server.connect(self._name) as connection, connection.transaction():
            connection.execute("SET LOCAL search_path = penstock")
            connection.execute(f"{query} FOR UPDATE")
            yield connection

    def waits(self, process: Process) -> bool:
        """Whether a process waits for a lock."""
        connection = process.database.connect()
        with self._server.connect() as admin:
            rows = admin.execute(
                "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'",
                [connection.info.backend_pid],
            ).fetchall()
        return bool(rows)

    def blocks(self, connection: psycopg.Connection[Any]) -> int:
        """Count the sessions that wait for a lock of a connection."""
        text = "SELECT count(*) FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))"
        with self._server.connect() as admin:
            row = admin.execute(text, [connection.info.backend_pid]).fetchone()
        assert row is not None
        return int(str(row[0]))

    def until_waiting(self, process: Process) -> None:
        wait_until(lambda: self.waits(process))

    def cut(self) -> int:
        """Have the server end the connections of both; return how many."""
        with self._server.connect() as admin:
            row = admin.execute(
                "SELECT count(pg_terminate_backend(pid, 60000)) FROM pg_stat_activity "
                "WHERE datname = %s",
                [self._name],
            ).fetchone()
        assert row is not None
        return int(str(row[0]))

    def close(self) -> None:
        assert_clean(self.first.broker)
        assert self.second.broker.store_stats().healed_total == 0
        for process in (self.first, self.second):
            process.broker.close()


@pytest.fixture
def race(postgres: PostgresServer, url: str) -> Iterator[Race]:
    made = Race(postgres, url)
    made.first.broker.create_queue("q")
    made.second.broker.queues()
    yield made
    made.close()


@contextmanager
def before(
    database: Database, name: str, act: Callable[[], object], nth: int = 1
) -> Iterator[None]:
    """Have something done just before a statement is run for the nth time."""
    run, seen = database.run, [0]

    def instead(called: str, /, **parameters: Any) -> Any:
        if called == name:
            seen[0] += 1
            if seen[0] == nth:
                act()
        return run(called, **parameters)

    database.run = instead  # type: ignore[method-assign]
    try:
        yield
    finally:
        database.run = run  # type: ignore[method-assign]
    assert seen[0] >= nth, f"{name} was not run"


def fail_with(error: Exception) -> None:
    raise error


# --- pointers -------------------------------------------------------------------------------------


def test_a_zone_that_another_makes_for_later_meanwhile(race: Race) -> None:
    """Two publishes wait for a head; the second has not seen the pointer that the first makes."""
    first, second = race.first, race.second
    with ThreadPoolExecutor(2) as pool:
        with race.holding("SELECT 1 FROM log_heads"):
            later = pool.submit(first.put, "a", delay_ms=3_600_000)
            race.until_waiting(first)
            now = pool.submit(second.put, "a")
            race.until_waiting(second)
        assert later.result(timeout=60) < now.result(timeout=60)
    assert first.claimed() == now.result()


@pytest.mark.parametrize("held", [True, False])
def test_a_publish_that_takes_long_is_not_passed_by(race: Race, *, held: bool) -> None:
    """It has seen a pointer that had vested, or trusts that it has, and commits long after."""
    first, second = race.first, race.second
    second.put("a")
    if held:
        # Whose lease is long: the pointer would be looked at when that is over.
        second.put("a")
        first.broker.claim("q", limit=1, lease_ms=3_600_000)
    with ThreadPoolExecutor(1) as pool:
        with race.holding("SELECT 1 FROM log_heads"):
            publish = pool.submit(second.put, "a")
            race.until_waiting(second)
            (delivery,) = first.broker.claim("q", limit=9)
            assert first.broker.ack([delivery.receipt])
            for _ in range(2):
                race.clock.advance(TUNABLES.cool_ms)
                assert first.broker.claim("q") == []
        (late,) = publish.result(timeout=60)
    assert first.claimed() == [late]


def test_who_dies_after_a_publish_that_took_long_has_lost_nothing(race: Race) -> None:
    first, second = race.first, race.second
    second.put("a")
    with ThreadPoolExecutor(1) as pool:
        with race.holding("SELECT 1 FROM log_heads"):
            # As if it was killed before it could look again.
            second.core.zones.look_again = lambda *_: None  # type: ignore[method-assign]
            publish = pool.submit(second.put, "a")
            race.until_waiting(second)
            first.work_off()
            for _ in range(2):
                race.clock.advance(TUNABLES.cool_ms)
                assert first.broker.claim("q") == []
        (late,) = publish.result(timeout=60)
    assert first.claimed() == []
    race.clock.advance(TUNABLES.min_inactive_ms)
    first.broker.sweep()
    assert first.claimed() == [late]


def test_a_publish_that_takes_long_and_gets_no_answer_is_not_passed_by(race: Race) -> None:
    """It is recognised by its request, and nobody knows when it was committed."""
    first, second = race.first, race.second
    second.put("a")
    run = second.database.run
    lost: list[int] = []

    def lose(name: str, /, **parameters: Any) -> Any:
        rows = run(name, **parameters)
        if name == "publish" and not lost:
            lost.append(race.cut())
            return run("read_heads")
        return rows

    with ThreadPoolExecutor(1) as pool:
        with race.holding("SELECT 1 FROM log_heads"):
            second.database.run = lose  # type: ignore[method-assign]
            publish = pool.submit(second.put, "a")
            race.until_waiting(second)
            first.work_off()
            for _ in range(2):
                race.clock.advance(TUNABLES.cool_ms)
                assert first.broker.claim("q") == []
        (late,) = publish.result(timeout=60)
    assert lost
    assert first.claimed() == [late]


def failed_beside_waiting(process: Process) -> int:
    """Have a failed message in a zone where another one waits."""
    process.broker.create_queue("r", max_attempts=1)
    (failed,) = process.put("a", queue="r")
    (delivery,) = process.broker.claim("r")
    process.broker.release([delivery.receipt])
    process.put("a", queue="r")
    return failed


def test_a_redrive_that_takes_long_is_not_passed_by(race: Race) -> None:
    first, second = race.first, race.second
    failed = failed_beside_waiting(first)

    def empty() -> None:
        first.work_off("r")
        for _ in range(2):
            race.clock.advance(TUNABLES.cool_ms)
            assert first.broker.claim("r") == []

    with before(second.database, "add_items", empty):
        assert second.broker.redrive("r") == 1
    assert first.claimed("r") == [failed]


def test_a_move_keeps_zones_from_being_raised_until_it_is_committed(race: Race) -> None:
    first, second = race.first, race.second
    first.broker.create_queue("from")
    (moved,) = first.put("a", queue="from")
    (there,) = first.put("a")

    with before(second.database, "add_items", lambda: first.broker.claim("q")):
        assert second.broker.move("from", "q", state="available") == 1
    assert first.claimed() == [moved, there]


def stalled(race: Race, act: Callable[[], object], queue: str) -> list[int]:
    """Have the second wait for its counters while the first claims, until that looks no more."""
    first, second = race.first, race.second
    first.core.first_slot, second.core.first_slot = 0, 1
    with ThreadPoolExecutor(1) as pool:
        with race.holding("SELECT 1 FROM queue_counts WHERE slot = 1"):
            acting = pool.submit(act)
            race.until_waiting(second)
            taken = first.broker.claim(queue, limit=9, lease_ms=3_600_000)
            for _ in range(2):
                race.clock.advance(TUNABLES.cool_ms)
                assert first.broker.claim(queue) == []
        acting.result(timeout=60)
    return [d.message_id for d in taken]


def test_a_release_that_takes_long_is_not_passed_by(race: Race) -> None:
    """The pointer has vested for another message, which is taken before the first is back."""
    first, second = race.first, race.second
    (id_,) = second.put("a")
    (held,) = second.broker.claim("q")
    other = second.put("a")
    release = lambda: second.broker.release([held.receipt], delay_ms=0)  # noqa: E731
    assert stalled(race, release, "q") == other
    assert first.claimed() == [id_]


@pytest.mark.parametrize("verb", ["ack", "release", "purge"])
def test_the_next_of_a_group_is_not_passed_by(race: Race, verb: str) -> None:
    """The last that is held of a group goes, or fails; others look at the group meanwhile."""
    first, second = race.first, race.second
    second.broker.create_queue("f", ordering="fifo", lease_ms=3_600_000, max_attempts=1)
    ids = second.put("a", "a", "a", queue="f")
    held = second.broker.claim("f", limit=2)
    # Has the pointer vest, though the group is not free yet.
    second.broker.ack([held[0].receipt])
    acts: dict[str, Callable[[], object]] = {
        "ack": lambda: second.broker.ack([held[1].receipt]),
        "release": lambda: second.broker.release([held[1].receipt]),
        "purge": lambda: second.broker.purge("f", states=["in_flight"]),
    }
    assert stalled(race, acts[verb], "f") == []
    assert first.claimed("f") == ids[2:]


def test_a_deadline_that_is_moved_slowly_is_not_passed_by(race: Race) -> None:
    first, second = race.first, race.second
    second.put("a")
    (held,) = second.broker.claim("q", lease_ms=3_600_000)
    other = second.put("a")
    extend = lambda: second.broker.extend([held.receipt], lease_ms=10_000)  # noqa: E731
    assert stalled(race, extend, "q") == other
    with race.holding("SELECT 1 FROM instance") as connection:
        rows = connection.execute("SELECT vesting_ms FROM pointers").fetchall()
    assert rows == [(race.clock.now_ms() - 2 * TUNABLES.cool_ms + 10_000,)]
    assert first.claimed() == []


def test_a_publish_that_has_waited_before_it_began_to_write(race: Race) -> None:
    """It trusts what it knew when the verb began, and looks for dedup ids first."""
    first, second = race.first, race.second
    second.put("a")

    def empty() -> None:
        first.work_off()
        for _ in range(2):
            race.clock.advance(TUNABLES.cool_ms)
            assert first.broker.claim("q") == []

    with before(second.database, "find_dedup", empty):
        (late,) = second.put("a", dedup_id="once")
    assert first.claimed() == [late]


def test_a_second_look_that_fails_does_not_repeat_the_work(
    race: Race, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes after the commit: the verb has succeeded, and the look is made up for."""
    first, second = race.first, race.second
    failed = failed_beside_waiting(first)

    def empty() -> None:
        first.work_off("r")
        for _ in range(2):
            race.clock.advance(TUNABLES.cool_ms)
            assert first.broker.claim("r") == []

    second.database.patience = 0
    away = lambda: fail_with(ServerUnreachable("away"))  # noqa: E731
    with (
        before(second.database, "add_items", empty),
        before(second.database, "lower_zones", away, nth=2),
    ):
        assert second.broker.redrive("r") == 1
    assert "looked at again" in caplog.text
    assert first.broker.stats("r").redriven_total == 1
    assert first.claimed("r") == []
    second.put("b")
    assert failed in first.claimed("r")


def test_zones_that_only_seem_empty_do_not_keep_others(
    race: Race, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody claims; zones are found empty, then filled; each is looked at once, not for ever."""
    first = race.first
    groups = [f"{n}" for n in range(100)]
    monkeypatch.setattr(zones, "COLLECT_MAX", len(groups))
    first.put(*groups, "empty")
    first.broker.purge("q")
    race.clock.advance(5_001)
    first.broker.sweep()
    first.put(*groups)
    for _ in range(2):
        race.clock.advance(TUNABLES.min_inactive_ms)
        first.broker.sweep()
    assert first.core.zones.collected == 1
    before_ = first.database.statements
    first.core.zones.collect(race.clock.now_ms())
    assert first.database.statements == before_ + 1


def test_a_zone_that_is_made_while_the_ring_shrinks(race: Race) -> None:
    """Nobody looks at tokens beyond the ring but for zones that have one."""
    first, second = race.first, race.second
    store = first.broker._store
    assert isinstance(store, SqlStore)
    store.set_ring_size(16, race.clock.now_ms())
    second.broker.queues()
    zone = (second.core.queue("q").number, b"a")
    token = second.core.zones.token(zone)
    assert token > 0
    with ThreadPoolExecutor(1) as pool:
        with second.database.transaction():
            second.core.hold_instance()
            second.core.zones.ensure({zone: race.clock.now_ms()}, race.clock.now_ms())
            shrinking = pool.submit(store.set_ring_size, 1, race.clock.now_ms())
            race.until_waiting(first)
        shrinking.result(timeout=60)
    assert first.core.ring_high > token
    (id_,) = second.put("a")
    assert first.claimed() == [id_]


def test_a_ring_that_was_larger_is_forgotten(race: Race) -> None:
    """Claims look at the tokens of the zones that are there, and at no more when those are gone."""
    first, second = race.first, race.second
    store = first.broker._store
    assert isinstance(store, SqlStore)
    store.set_ring_size(64, race.clock.now_ms())
    number = first.core.queue("q").number
    token = {n: first.core.zones.token((number, b"%d" % n)) for n in range(40)}
    low = next(n for n in token if 0 < token[n] < 16)
    first.put(*map(str, token))
    store.set_ring_size(1, race.clock.now_ms())
    assert first.core.ring_high == max(token.values()) + 1 > 32

    def collect() -> None:
        race.clock.advance(TUNABLES.cool_ms)
        assert first.broker.claim("q", limit=100) == []
        race.clock.advance(TUNABLES.min_inactive_ms)
        first.broker.sweep()

    kept = first.broker.claim("q", limit=100, lease_ms=3_600_000)
    assert len(kept) == len(token)
    (last,) = (d for d in kept if d.group == str(low))
    first.broker.ack([d.receipt for d in kept if d is not last])
    collect()
    assert first.core.zones.collected == len(token) - 1
    assert first.core.ring_high == token[low] + 1
    # The other follows, and misses nothing.
    first.broker.release([last.receipt], delay_ms=0)
    assert second.claimed() == [last.message_id]
    assert second.core.ring_high == token[low] + 1
    race.clock.advance(3_600_000)
    first.broker.sweep()
    first.work_off()
    collect()
    assert first.core.ring_high == 1
    race.clock.advance(1_000)
    (id_,) = first.put(str(low))
    assert second.claimed() == [id_]
    assert second.core.ring_high == 1


# --- queues ---------------------------------------------------------------------------------------


def test_a_change_that_is_repeated_knows_what_came_between(race: Race) -> None:
    """The first attempt is undone after it has counted versions up; another process is next."""
    first, second = race.first, race.second

    def abort() -> None:
        raise Aborted("as in a deadlock")

    def change() -> None:
        second.broker.create_queue("of_second", filter="TRUE")

    with (
        before(first.database, "put_filter_changes", abort),
        before(first.database, "lock_heads", change, nth=2),
    ):
        first.broker.create_queue("of_first", filter="TRUE")
    (id_,) = first.broker.publish([Message(b"")])
    assert first.claimed("of_first") == second.claimed("of_second") == [id_]
    assert first.broker.queues() == second.broker.queues()
    assert first.core.filter_changes == second.core.filter_changes
    assert len(first.core.filter_changes) == 3


def test_a_queue_deleted_that_was_made_again(race: Race) -> None:
    """Who deletes a queue deletes what has that name, whatever it knew."""
    first, second = race.first, race.second
    second.put("a")
    first.broker.delete_queue("q")
    first.broker.create_queue("q")
    first.put("b", "b")
    assert second.broker.purge("q") == 2
    first.put("b")
    assert second.broker.delete_queue("q") == 1
    assert first.broker.queues() == second.broker.queues() == []


def test_a_queue_made_again_while_it_is_deleted(race: Race) -> None:
    first, second = race.first, race.second

    def again() -> None:
        first.broker.delete_queue("q")
        first.broker.create_queue("q")

    with before(second.database, "lock_heads", again):
        second.broker.delete_queue("q")
    assert first.broker.queues() == second.broker.queues() == []
    first.broker.create_queue("q")
    (id_,) = second.put("a")
    assert second.claimed() == [id_]


def test_an_ack_while_its_queue_is_deleted(race: Race) -> None:
    first, second = race.first, race.second
    first.put("a")
    (delivery,) = first.broker.claim("q")
    # Nothing is in flight for who purges: it comes after.
    second.broker._store.purge = lambda *_, **__: 0  # type: ignore[method-assign]
    second.broker.purge = lambda *_, **__: 0  # type: ignore[method-assign]
    with before(second.database, "clear_queue", lambda: first.broker.ack([delivery.receipt])):
        assert second.broker.delete_queue("q") == 1


@pytest.mark.parametrize("by", ["move", "redrive"])
def test_what_comes_into_a_drained_queue_just_before_it_goes(race: Race, by: str) -> None:
    first, second = race.first, race.second
    first.broker.create_queue("from", max_attempts=1)
    target = "q" if by == "move" else "from"
    (id_,) = first.put("a", queue="from")
    if by == "redrive":
        (delivery,) = first.broker.claim("from")
        first.broker.release([delivery.receipt])
    second.broker.queues()
    begun, goes_on = threading.Event(), threading.Event()

    def pause() -> None:
        begun.set()
        assert goes_on.wait(60)

    def bring() -> int:
        if by == "move":
            return first.broker.move("from", "q", state="available")
        return first.broker.redrive("from")

    with ThreadPoolExecutor(1) as pool, before(first.database, "share_queues", pause):
        bringing = pool.submit(bring)
        assert begun.wait(60)

        def go_on() -> None:
            goes_on.set()
            assert bringing.result(timeout=60) == 1

        with before(second.database, "trim_ended", go_on):
            second.broker.delete_queue(target, drain=True)
    assert first.claimed(target) == [id_]


# --- leases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["ack", "release", "extend"])
def test_a_receipt_that_is_used_while_its_lease_is_ended(race: Race, verb: str) -> None:
    """Who comes second finds what the first has left, and nothing is counted twice."""
    first, second = race.first, race.second
    first.put("a")
    (delivery,) = first.broker.claim("q", lease_ms=1_000)
    late = race.clock.now_ms() + 1_000
    sweeping = second.broker._store
    assert isinstance(sweeping, SqlStore)

    def use() -> list[penstock.Outcome]:
        if verb == "extend":
            return first.broker.extend([delivery.receipt], lease_ms=5_000)
        return getattr(first.broker, verb)([delivery.receipt])  # type: ignore[no-any-return]

    with ThreadPoolExecutor(2) as pool:
        with race.holding(f"SELECT 1 FROM queue_counts WHERE slot = {second.core.slot}"):
            # The item is locked by who ends the lease; the receipt is good by the other's clock.
            ending = pool.submit(sweeping.expire, late, 100)
            race.until_waiting(second)
            using = pool.submit(use)
            race.until_waiting(first)
        assert ending.result(timeout=60) == (1, 0)
        assert using.result(timeout=60)[0].status == "stale"
    stats = first.broker.stats("q")
    assert (stats.lease_expired_total, stats.acked_total, stats.released_total) == (1, 0, 0)
    assert (stats.available, stats.in_flight) == (1, 0)


def test_a_lease_that_is_extended_while_it_is_looked_for(race: Race) -> None:
    first, second = race.first, race.second
    first.put("a")
    (delivery,) = first.broker.claim("q", lease_ms=1_000)
    sweeping = second.broker._store
    assert isinstance(sweeping, SqlStore)
    with before(
        second.database,
        "expire",
        lambda: first.broker.extend([delivery.receipt], lease_ms=60_000),
    ):
        assert sweeping.sweep(race.clock.now_ms() + 1_000, 100).leases_expired == 0
    assert first.broker.ack([delivery.receipt])[0].status == "done"


# --- one message, several queues ------------------------------------------------------------------


@pytest.mark.parametrize("state", ["available", "failed"])
def test_a_message_that_two_processes_move_into_one_queue(race: Race, state: str) -> None:
    first, second = race.first, race.second
    for name in ("left", "right"):
        first.broker.create_queue(name, filter="queue = 'other'", max_attempts=1)
    # Its zone is there, so that nobody waits for who makes it.
    (there,) = first.put("a")
    (id_,) = first.put("a", queue="other")
    for name in ("left", "right") if state == "failed" else ():
        (delivery,) = first.broker.claim(name)
        first.broker.release([delivery.receipt])

    def other() -> None:
        assert first.broker.move("left", "q", state=state) == 1

    with before(second.database, "lock_pointers", other):
        assert second.broker.move("right", "q", state=state) == 1
    assert second.database.repeated == 0
    assert first.claimed() == [there, id_]


@pytest.mark.parametrize("ordering", ["standard", "fifo"])
def test_moves_purges_and_claims_of_the_same_queues_do_not_deadlock(
    race: Race, ordering: str
) -> None:
    """All lock pointers, items, counters and messages in the same order."""
    first, second = race.first, race.second
    for name in ("left", "right"):
        first.broker.create_queue(name, filter="queue = 'both'", ordering=ordering)
    second.broker.queues()

    def move() -> None:
        for n in range(6):
            second.put(*(f"{n % 7}" for n in range(40)), queue="both")
            queues = ("left", "right") if n % 2 else ("right", "left")
            second.broker.move(*queues, state="available")

    def purge() -> None:
        for n in range(6):
            first.broker.claim("left", limit=9, lease_ms=3_600_000)
            first.broker.purge("right" if n % 2 else "left", states=["available", "in_flight"])

    with ThreadPoolExecutor(2) as pool:
        for each in (pool.submit(move), pool.submit(purge)):
            each.result(timeout=120)
    assert first.database.repeated == second.database.repeated == 0


# --- the log --------------------------------------------------------------------------------------


def test_assigning_does_not_stand_in_the_way_of_changes(postgres: PostgresServer, url: str) -> None:
    """A page with messages that no queue takes is assigned while another process makes a queue."""
    race = Race(postgres, f"{url}?logs=1", routing="pipeline")
    first, second = race.first, race.second
    first.broker.create_queue("q", filter="n = 1")
    penstock.route_once(first.broker)
    ids = first.broker.publish([Message(b"", {"n": n}) for n in (1, 2)])
    page = second.broker.read_log()
    with ThreadPoolExecutor(1) as pool:
        making: list[Any] = []

        def make() -> None:
            making.append(pool.submit(first.broker.create_queue, "r", filter="n = 2"))
            race.until_waiting(first)

        with before(second.database, "refer", make):
            assert second.broker.assign(0, page.cursor, {ids[0]: ["q"]}).status == "applied"
        making[0].result(timeout=60)
    assert first.database.repeated == second.database.repeated == 0
    assert first.broker.store_stats().unrouted_total == 2
    assert first.claimed() == ids[:1]
    race.close()


def test_retention_comes_by_while_the_log_is_read(postgres: PostgresServer, url: str) -> None:
    """Whoever reads from an offset that is gone is told where the log begins."""
    race = Race(postgres, f"{url}?logs=1")
    first, second = race.first, race.second
    first.broker.configure_log(retention_ms=1)
    race.clock.advance(SEGMENT_MS)
    (later,) = first.put("a")

    def retain() -> None:
        race.clock.advance(10_000)
        first.broker.sweep()

    with before(second.database, "read_log", retain):
        page = second.broker.read_log(begin=1)
    assert page.earliest == page.cursor.begin == later
    assert [record.message_id for record in page.records] == [later]
    race.close()


# --- locks ----------------------------------------------------------------------------------------


def test_zones_are_locked_in_one_order(postgres: PostgresServer, url: str) -> None:
    """Of two that want the same pointers, one waits; they do not wait for each other."""
    race = Race(postgres, url)
    first, second = race.first, race.second
    first.broker.create_queue("f", ordering="fifo")
    for zone in ("a", "c", "b"):
        first.put(zone, queue="f")
    got = {d.group: d.receipt for d in first.broker.claim("f", limit=9)}
    race.clock.advance(TUNABLES.cool_ms)
    assert first.broker.claim("f") == []
    with ThreadPoolExecutor(2) as pool:
        with race.holding("SELECT 1 FROM pointers WHERE zone = 'c'"):
            ack = pool.submit(first.broker.ack, [got[zone] for zone in ("a", "c", "b")])
            race.until_waiting(first)
            publish = pool.submit(second.put, "b", "a", queue="f")
            race.until_waiting(second)
        assert all(ack.result(timeout=60))
        assert len(publish.result(timeout=60)) == 2
    assert first.database.repeated == second.database.repeated == 0
    race.close()


@pytest.mark.parametrize("verb", ["ack", "extend", "release", "sweep"])
def test_counters_are_locked_after_pointers(race: Race, verb: str) -> None:
    """A claim and a receipt of one zone, of processes that count in the same row."""
    first, second = race.first, race.second
    first.broker.create_queue(
        "f", ordering="fifo", max_attempts=1, unclaimed_retention_ms=TUNABLES.cool_ms
    )
    second.core.first_slot = first.core.first_slot
    first.put("a", "a", queue="f")
    (held,) = first.broker.claim("f", limit=1, lease_ms=60_000)
    race.clock.advance(TUNABLES.cool_ms)
    (id_,) = first.put("b", queue="f")
    with ThreadPoolExecutor(2) as pool:
        with race.holding(f"SELECT 1 FROM items WHERE message_id = {id_}"):
            # It holds both pointers: the zone that is held is looked at once more.
            claim = pool.submit(second.claimed, "f")
            race.until_waiting(second)
            acts: dict[str, Callable[[], object]] = {
                "ack": lambda: first.broker.ack([held.receipt]),
                "extend": lambda: first.broker.extend([held.receipt], lease_ms=1_000),
                # It fails: there is no other attempt.
                "release": lambda: first.broker.release([held.receipt]),
                # Nobody has claimed the next of the group in time.
                "sweep": first.broker.sweep,
            }
            use = pool.submit(acts[verb])
            race.until_waiting(first)
        assert claim.result(timeout=60) == [id_]
        assert use.result(timeout=60)
    assert first.database.repeated == second.database.repeated == 0


# --- connections ----------------------------------------------------------------------------------


def test_a_release_gives_up_as_soon_as_other_verbs(race: Race) -> None:
    first = race.first
    first.put("a")
    (delivery,) = first.broker.claim("q")
    database, tries = first.database, [0]
    database.patience = 3

    def lose(*_: object, **__: object) -> Any:
        tries[0] += 1
        raise ServerUnreachable("away")

    execute = database.execute
    database.execute = lose  # type: ignore[method-assign]
    try:
        with pytest.raises(ServerUnreachable):
            first.broker.release([delivery.receipt])
    finally:
        database.execute = execute  # type: ignore[method-assign]
    assert tries[0] == 4
    assert first.broker.release([delivery.receipt])[0].status == "retrying"


def test_a_connection_that_was_cut_between_two_verbs(race: Race) -> None:
    """Nothing had been begun: what could not be repeated later is done on another connection."""
    first = race.first
    first.put("a")
    (delivery,) = first.broker.claim("q")
    first.broker.create_queue("r")
    acts: list[Callable[[], object]] = [
        lambda: first.broker.create_queue("s"),
        lambda: first.broker.update_queue("s", lease_ms=5),
        lambda: first.broker.release([delivery.receipt]),
        lambda: first.broker.move("q", "r"),
        lambda: first.broker.purge("r"),
        first.broker.sweep,
        lambda: first.broker.delete_queue("s"),
        first.broker.check,
    ]
    for act in acts:
        assert race.cut() >= 1
        act()


def test_a_sweep_goes_on_after_statements_that_were_aborted(race: Race) -> None:
    """Each by itself is tried again, and what the others do is done."""
    first = race.first
    names = ("come_due", "forget_dedup", "forget_requests", "idle_zones", "find_idle", "mark_idle")
    first.put("a", delay_ms=1_000)
    first.put("b", dedup_id="once")
    first.broker.purge("q", states=["available"])
    race.clock.advance(86_400_000)
    with ExitStack() as stack:
        for name in names:
            abort = lambda: fail_with(Aborted("as in a deadlock"))  # noqa: E731
            stack.enter_context(before(first.database, name, abort))
        counts = first.broker.sweep()
    assert (counts.came_due, counts.dedup_forgotten) == (1, 1)
    assert first.database.repeated == len(names)
