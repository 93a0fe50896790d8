"""The order in which transactions lock rows, zones come to their turns, and memory follows commits.

Each test brings one interleaving about, as those of ``test_races`` do.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from tests.sql.test_races import Race, before
from tests.waiting import wait_until

import penstock
from penstock import Message
from penstock.model import LeaseRequest
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from tests.sql.postgres import PostgresServer

LONG_S = 60


@pytest.fixture
def race(postgres: PostgresServer, url: str) -> Iterator[Race]:
    made = Race(postgres, url)
    made.first.broker.create_queue("q")
    made.second.broker.queues()
    yield made
    made.close()


@pytest.fixture
def has_waiter(postgres: PostgresServer, url: str) -> Callable[[], bool]:
    """Look whether a session of the database waits for a lock."""
    text = "SELECT 1 FROM pg_stat_activity WHERE datname = %s AND wait_event_type = 'Lock'"

    def look() -> bool:
        with postgres.connect() as admin:
            return bool(admin.execute(text, [url.rpartition("/")[2]]).fetchall())

    return look


# --- locks ----------------------------------------------------------------------------------------


def test_an_assignment_and_a_change_of_its_queue(postgres: PostgresServer, url: str) -> None:
    race = Race(postgres, f"{url}?logs=1", routing="pipeline")
    first, second = race.first, race.second
    first.broker.create_queue("q", filter="n = 1")
    penstock.route_once(first.broker)
    (message_id,) = first.broker.publish([Message(b"", {"n": 1})])
    page = second.broker.read_log()
    with ThreadPoolExecutor(2) as pool:
        with race.holding("SELECT 1 FROM queues"):
            change = pool.submit(first.broker.update_queue, "q", filter="n = 2")
            race.until_waiting(first)
            assign = pool.submit(second.broker.assign, 0, page.cursor, {message_id: ["q"]})
            race.until_waiting(second)
        change.result(LONG_S)
        # The filter was changed from the end on, behind the message.
        assert assign.result(LONG_S).status == "applied"
    assert first.database.repeated == second.database.repeated == 0
    race.close()


def test_a_deletion_and_a_move_of_the_same_messages(race: Race) -> None:
    """A message of three queues; the move finds it in both of its own, and another in one."""
    first, second = race.first, race.second
    for name in ("r", "s"):
        first.broker.create_queue(name, filter="n > 0")
    first.broker.create_queue("t", filter="n = 1")
    first.broker.publish([Message(b"", {"n": n}) for n in (1, 2)])
    second.broker.queues()
    with ThreadPoolExecutor(1) as pool:
        moving: list[Future[int]] = []

        def move() -> None:
            moving.append(pool.submit(second.broker.move, "s", "t", state="available"))
            wait_until(lambda: moving[0].done() or race.waits(second))

        # Not by way of a purge, which would have removed the messages before.
        with before(first.database, "put_filter_changes", move):
            assert first.core._delete("r", race.clock.now_ms()) == 2
        assert moving[0].result(LONG_S) == 2
    assert first.database.repeated == second.database.repeated == 0
    assert_clean(first.broker)


def test_a_change_of_logs_and_an_assignment(postgres: PostgresServer, url: str) -> None:
    race = Race(postgres, f"{url}?logs=1", routing="pipeline")
    first, second = race.first, race.second
    first.broker.create_queue("q", filter="n = 1")
    penstock.route_once(first.broker)
    first.broker.publish([Message(b"", {"n": 1})])
    with ThreadPoolExecutor(2) as pool:
        with race.holding("SELECT 1 FROM log_cursors"):
            switch = pool.submit(first.broker.configure_log, routing="inline", logs=2)
            race.until_waiting(first)
            route = pool.submit(penstock.route_once, second.broker)
            race.until_waiting(second)
        switch.result(LONG_S)
        assert route.exception(LONG_S) is not None
    assert first.database.repeated == second.database.repeated == 0
    assert len(second.claimed()) == 1
    race.close()


def test_a_visit_locks_items_as_receipts_do(race: Race) -> None:
    """Items that it sees wait, while another process leases them, and settles them at once."""
    first = race.first
    # So many that the items of a visit are looked up one by one.
    first.broker.create_queue("others")
    first.put(*["a"] * 3_000, queue="others")
    ids = first.put("a", priority=0) + first.put("a", priority=9)
    one = "SELECT 1 FROM items WHERE message_id = %s FOR UPDATE"
    with (
        ThreadPoolExecutor(2) as pool,
        race.holding("SELECT 1 FROM items WHERE false") as settling,
    ):
        with race.holding("SELECT 1 FROM items WHERE false") as leasing:
            leased = "SET lease_id = 'x', vesting_ms = vesting_ms + 60000"
            leasing.execute(f"UPDATE items {leased} WHERE message_id >= {ids[0]}")
            number = first.core.queue("q").number
            counted = f"WHERE queue = {number} AND slot = 0"
            leasing.execute(f"UPDATE queue_counts SET in_flight = 2 {counted}")
            settle = pool.submit(settling.execute, one, [ids[0]])
            wait_until(lambda: race.blocks(leasing) == 1)
            claim = pool.submit(first.broker.claim, "q", limit=2)
            race.until_waiting(first)
        settle.result(LONG_S)
        # The other one, by which it would wait for the claim, and the claim for it.
        settling.execute(one, [ids[1]])
        assert not claim.done()
    assert claim.result(LONG_S) == []
    assert first.database.repeated == 0


# --- zones ----------------------------------------------------------------------------------------


def test_a_backlog_does_not_delay_a_zone_that_another_process_fills(race: Race) -> None:
    first, second = race.first, race.second
    first.put(*["big"] * 50)
    groups = [each.group for _ in range(3) for each in second.broker.claim("q")]
    assert groups == ["big"] * 3
    for n in range(5):
        first.put(f"small {n}")
        groups = [each.group for _ in range(2) for each in second.broker.claim("q")]
        assert f"small {n}" in groups
        race.clock.advance(1)


def test_a_backlog_does_not_delay_a_message_that_comes_due(race: Race) -> None:
    first, second = race.first, race.second
    first.put(*["big"] * 50)
    first.put("late", delay_ms=5_000)
    assert len([second.broker.claim("q") for _ in range(3)]) == 3
    race.clock.advance(5_000)
    assert "late" in [each.group for _ in range(2) for each in second.broker.claim("q")]


def test_a_claim_that_has_waited_leaves_publishes_their_time(race: Race) -> None:
    """For a connection. A publish trusts what it has read of a pointer, as of now."""
    first, second = race.first, race.second
    began_ms = race.clock.now_ms()
    first.put("a")
    race.clock.advance(1_000)
    want = LeaseRequest(1, 60_000, "", b"x" * 16)
    (claimed,) = second.core.claim("q", [want], began_ms)
    assert len(claimed) == 1
    ((vesting_ms,),) = first.database.execute("SELECT vesting_ms FROM pointers")
    assert vesting_ms == race.clock.now_ms() + first.core.tunables.cool_ms


def test_a_claim_ends_though_others_are_at_all_that_is_left(race: Race) -> None:
    """The zone is known to have more; its leases are over, and another process is at them."""
    first = race.first
    first.put(*["a"] * 4)
    assert all(first.broker.claim("q", lease_ms=1_000) for _ in range(4))
    race.clock.advance(1_000)
    with ThreadPoolExecutor(1) as pool, race.holding("SELECT 1 FROM items"):
        assert pool.submit(first.broker.claim, "q").result(LONG_S) == []
    assert len(first.claimed()) == 4


def test_leases_whose_messages_fail_are_counted_by_who_ends_them(race: Race) -> None:
    race.first.broker.create_queue("f", max_attempts=1, lease_ms=1_000)
    race.first.put("a", "b", queue="f")
    assert len(race.first.claimed("f")) == 2
    race.clock.advance(1_000)
    counts: list[Any] = []
    with before(race.second.database, "fail", lambda: counts.append(race.first.broker.sweep())):
        counts.append(race.second.broker.sweep())
    assert [each.leases_expired for each in counts] == [1, 0]
    assert [each.failed for each in counts] == [2, 0]


def test_a_check_that_takes_long_judges_pointers_by_the_time(race: Race) -> None:
    """While it waits, another process puts a pointer back that has more to give: at its time."""
    race.first.put(*["a"] * 5)

    def work() -> None:
        race.clock.advance(1_000)
        assert len(race.second.broker.claim("q")) == 1

    with before(race.first.database, "pointers_late", work):
        assert race.first.broker.check().found == {}


# --- memory ---------------------------------------------------------------------------------------


def test_a_ring_that_fails_to_grow_gives_no_tokens(
    race: Race, has_waiter: Callable[[], bool]
) -> None:
    first = race.first
    with ThreadPoolExecutor(1) as pool:
        sending: list[Future[list[int]]] = []

        def fail() -> None:
            sending.append(pool.submit(first.put, *"abcdefgh"))
            wait_until(has_waiter)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), before(first.database, "bump_heads", fail):
            first.core.set_ring_size(1_000, race.clock.now_ms())
        assert len(sending[0].result(LONG_S)) == 8
    assert len(race.second.claimed()) == 8


def test_a_queue_that_fails_to_be_made_takes_nothing(race: Race) -> None:
    """Another process makes a queue under the same number, and the same version."""
    first, second = race.first, race.second

    def fail() -> None:
        assert "r" not in first.core.by_name
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), before(first.database, "put_filter_changes", fail):
        first.broker.create_queue("r", filter="queue = 'q'")
    second.broker.create_queue("s", filter="queue = 's'")
    first.put("a")
    assert [queue.name for queue in first.broker.queues()] == ["q", "s"]
    assert second.broker.stats("q").available == 1
    assert second.broker.stats("s").available == 0
