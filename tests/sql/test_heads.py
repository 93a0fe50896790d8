"""A head for each log: publishes of different logs side by side, and readers that miss nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest
from tests.waiting import wait_until

import penstock
from penstock import ManualClock, Message
from penstock.broker.requests import Joint, Publish
from penstock.errors import InvalidInput
from penstock.packing import pack_messages
from penstock.store.sql.store import SqlStore
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg
    from tests.sql.postgres import PostgresServer

    from penstock import Broker

CHILD = Path(__file__).with_name("publishing_child.py")
LOGS = 16


def to_q(group: str = "", **fields: Any) -> Message:
    return Message(b"x", {"queue": "q"}, group=group, **fields)


def group_of(log: int, logs: int = LOGS) -> str:
    """Name a group whose messages go into a log."""
    return next(f"g{n}" for n in range(10_000) if crc32(f"g{n}".encode()) % logs == log)


def core_of(broker: Broker) -> SqlStore:
    store = broker._store
    assert isinstance(store, SqlStore)
    return store


class Place:
    """A database, and locks that nobody in particular holds there."""

    def __init__(self, server: PostgresServer, url: str) -> None:
        self._server, self.url = server, url
        self._name = url.rpartition("/")[2]

    @contextmanager
    def session(self) -> Iterator[psycopg.Connection[Any]]:
        """Have a transaction, which is undone at the end."""
        with self._server.connect(self._name) as connection:
            connection.execute("SET search_path = penstock")
            connection.execute("BEGIN")
            yield connection
            connection.execute("ROLLBACK")

    @contextmanager
    def holding(self, condition: str, table: str = "log_heads") -> Iterator[None]:
        with self.session() as connection:
            connection.execute(f"SELECT 1 FROM {table} WHERE {condition} FOR UPDATE")
            yield

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with self.session() as connection:
            return connection.execute(query).fetchall()

    def waiting(self) -> int:
        """Count the sessions that wait for a lock."""
        found = self.rows(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        return int(found[0][0])

    def until_waiting(self, sessions: int = 1) -> None:
        wait_until(lambda: self.waiting() == sessions)

    def log_of(self, message_id: int) -> int:
        return int(self.rows(f"SELECT log FROM log WHERE message_id = {message_id}")[0][0])


@pytest.fixture
def place(postgres: PostgresServer, url: str) -> Place:
    return Place(postgres, url)


@pytest.fixture
def broker(url: str) -> Iterator[Broker]:
    with penstock.open(url, background=False, clock=ManualClock()) as opened:
        opened.create_queue("q")
        # The first publish of all begins a segment of the log.
        opened.publish([to_q()])
        yield opened
        assert_clean(opened)


# --- publishing -----------------------------------------------------------------------------------


def test_a_publish_waits_for_no_other_log(broker: Broker, place: Place) -> None:
    with ThreadPoolExecutor(1) as pool:
        with place.holding("log = 3"):
            others = [log for log in range(LOGS) if log != 3]
            ids = [broker.publish([to_q(group_of(log))])[0] for log in others]
            late = pool.submit(broker.publish, [to_q(group_of(3))])
            place.until_waiting()
        (last,) = late.result(timeout=60)
    assert list(map(place.log_of, [*ids, last])) == [*others, 3]


def test_messages_without_a_group_go_where_nobody_publishes(broker: Broker, place: Place) -> None:
    with place.holding("log < 15"):
        ids = [each for _ in range(5) for each in broker.publish([to_q(), to_q()])]
    assert {place.log_of(each) for each in ids} == {15}
    with ThreadPoolExecutor(1) as pool:
        with place.holding("true"):
            waits = pool.submit(broker.publish, [to_q()])
            place.until_waiting()
        (last,) = waits.result(timeout=60)
    assert last > ids[-1]
    assert len(broker.claim("q", limit=100)) == 12


def test_publishes_take_turns_at_the_logs(broker: Broker, place: Place) -> None:
    ids = [broker.publish([to_q()])[0] for _ in range(2 * LOGS)]
    assert Counter(map(place.log_of, ids)) == dict.fromkeys(range(LOGS), 2)


def test_a_fifo_queue_orders_publishes_that_follow_one_another(url: str) -> None:
    clock = ManualClock()
    with (
        penstock.open(url, background=False, clock=clock) as first,
        penstock.open(url, background=False, clock=clock) as second,
    ):
        first.create_queue("f", ordering="fifo")
        ids = []
        for _ in range(10):
            for broker in (first, second):
                ids += broker.publish([Message(b"", {"queue": "f"})])
        assert ids == sorted(ids)
        assert [each.message_id for each in first.claim("f", limit=99)] == ids


def test_publishes_count_where_no_other_process_does(broker: Broker, place: Place) -> None:
    with place.holding("slot < 16", "queue_counts"):
        broker.publish([to_q(), to_q("a")])
    assert broker.stats("q").enqueued_total == broker.stats("q").available == 3
    slots = {row[0] for row in place.rows("SELECT slot FROM queue_counts WHERE enqueued_total > 0")}
    assert min(slots) >= 16


def test_a_batch_of_many_groups_is_whole_though_queues_change(url: str) -> None:
    """Publishes that lock several heads meet changes that lock all of them."""
    with penstock.open(url) as first, penstock.open(url) as second, ThreadPoolExecutor(2) as pool:
        first.create_queue("q")
        batch = [to_q(f"{n}") for n in range(20)]

        def publish(broker: Broker) -> list[int]:
            return [each for _ in range(15) for each in broker.publish(batch)]

        publishing = [pool.submit(publish, broker) for broker in (first, second)]
        for n in range(10):
            second.create_queue(f"other{n}")
            first.configure_log(logs=LOGS + n)
        ids = [each for done in publishing for each in done.result(120)]
        assert len(set(ids)) == len(ids) == 2 * 15 * 20
        assert first.stats("q").available == len(ids)
        assert first.log_stats().logs == LOGS + 9
        assert_clean(second)


# --- reading --------------------------------------------------------------------------------------


def test_the_end_passes_logs_that_nothing_is_published_into(broker: Broker, place: Place) -> None:
    (last,) = broker.publish([to_q("only")])
    with penstock.open(place.url, background=False) as other:
        assert other.log_stats().end == last + 1
    before = place.rows("SELECT log, xmin, xmax FROM log_heads ORDER BY log")
    assert broker.log_stats().end == last + 1
    assert place.rows("SELECT log, xmin, xmax FROM log_heads ORDER BY log") == before


def test_nothing_is_read_beyond_a_publish_that_is_under_way(url: str, place: Place) -> None:
    """One log is slow: no other is read, routed or planned past the ids that it has taken."""
    with (
        penstock.open(url, routing="pipeline", background=False) as broker,
        penstock.open(url, background=False) as slow,
        ThreadPoolExecutor(1) as pool,
    ):
        broker.create_queue("q")
        broker.publish([to_q()])
        penstock.route_once(broker)
        with place.session() as holder:
            # The publish has its ids when it comes to wait for this dedup id.
            holder.execute("INSERT INTO dedup VALUES ('q', 'once', 1, 0)")
            late = pool.submit(slow.publish, [to_q(group_of(2), dedup_id="once")])
            place.until_waiting()
            end = broker.log_stats().end
            ids = broker.publish([to_q(group_of(log)) for log in range(LOGS) if log != 2])
            assert broker.log_stats().end == end <= ids[0]
            assert all(not broker.read_log(log).records for log in range(LOGS))
            assert all(stretch.end <= end for stretch in broker.route_plan().stretches)
            with broker.view() as view:
                assert view.log_stats.end == end
            penstock.route_once(broker)
        ids += late.result(timeout=60)
        assert broker.log_stats().end > max(ids)
        penstock.route_once(broker)
        assert sorted(each.message_id for each in broker.claim("q", limit=99)) == [1, *sorted(ids)]
        assert_clean(broker)


def test_processes_publish_while_a_tailer_routes(url: str, place: Place) -> None:
    """Every message is assigned once and none is passed by, though a log is held up at times."""
    with ExitStack() as stack:
        broker = stack.enter_context(penstock.open(url, routing="pipeline", background=False))
        broker.create_queue("q")
        children = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(CHILD), url, f"{n}", "60"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for n in range(3)
        ]
        for child in children:
            assert child.stdout is not None
            assert child.stdin is not None
            assert child.stdout.readline() == "ready\n"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        seen: Counter[int] = Counter()
        rounds = 0
        while True:
            over = all(child.poll() is not None for child in children)
            rounds += 1
            if rounds % 5 == 0 and not over:
                with place.holding(f"log = {rounds % LOGS}"):
                    penstock.route_once(broker)
            penstock.route_once(broker)
            seen.update(each.message_id for each in broker.claim("q", limit=1_000))
            if over and broker.log_stats().routed_up_to == broker.log_stats().end:
                break
        seen.update(each.message_id for each in broker.claim("q", limit=1_000))
        ids = [each for child in children for each in json.loads(child.communicate()[0])]
        assert len(ids) == 3 * 15 * 8
        assert seen == Counter(ids)
        assert_clean(broker)


def test_a_reader_does_not_take_another_for_a_publish(url: str, place: Place) -> None:
    """It waits while somebody else looks at all heads, and sees what its process has published."""
    with penstock.open(url, background=False) as broker, ThreadPoolExecutor(1) as pool:
        broker.create_queue("q")
        broker.publish([to_q()])
        (last,) = broker.publish([to_q("only")])
        with place.holding("true"):
            reading = pool.submit(broker.log_stats)
            place.until_waiting()
        assert reading.result(timeout=60).end == last + 1


# --- hostile input --------------------------------------------------------------------------------


def test_a_reader_of_an_empty_log_misses_no_first_publish(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread publishes, and knows the new end, right after the segments were read."""
    with penstock.open(url, background=False, clock=ManualClock()) as broker:
        broker.create_queue("q")
        store = core_of(broker)
        read = store._segments
        published: list[int] = []

        def reading() -> Any:
            found = read()
            if not published:
                published.extend(broker.publish([to_q(group_of(0))]))
                store.reach_end()
            return found

        monkeypatch.setattr(store, "_segments", reading)
        first = broker.read_log(0, begin=0)
        then = broker.read_log(0, begin=first.cursor.end)
        seen = [record.message_id for page in (first, then) for record in page.records]
        assert seen == published


def test_long_scopes_and_dedup_ids_are_told_apart(url: str) -> None:
    with penstock.open(url, background=False) as broker:
        scopes = [
            "",
            "s" * 3_000,
            "s" * 2_999 + "t",
            "\N{LATIN SMALL LETTER Y WITH DIAERESIS}" * 150,
        ]
        messages = [
            Message(b"", {"queue": scope}, dedup_id=dedup_id)
            for scope in scopes
            for dedup_id in ("d", "d" * 256, "d" * 255 + "e")
        ]
        ids = broker.publish(messages)
        assert len(set(ids)) == len(messages)
        assert broker.publish(messages) == ids


def test_one_bad_publish_of_many_fails_alone(broker: Broker) -> None:
    """An index that an operator has made can't hold long payloads."""
    core_of(broker).database.execute("CREATE INDEX one_more ON messages (payload)")
    noise = b"".join(sha256(bytes([n])).digest() for n in range(250))
    publishes = [
        Publish(pack_messages([Message(payload, {"queue": "q"})]), None)
        for payload in (b"1", noise, b"3")
    ]
    broker.begin(Joint(publishes=publishes))
    assert [type(each.error) for each in publishes] == [type(None), InvalidInput, type(None)]
    assert "nothing was changed" in str(publishes[1].error)
    assert [each.payload for each in broker.claim("q", limit=9)] == [b"x", b"1", b"3"]
