"""The connections of one process: its verbs go on side by side, and none waits for another."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from tests.crash.child import QUEUES, publisher, worker
from tests.noting import CLOCK, Notebook
from tests.sql.test_faults import judge, wait_for_acks
from tests.waiting import wait_until

import penstock
from penstock import (
    BrokerClosed,
    InvalidInput,
    InvalidUrl,
    ManualClock,
    Message,
    PenstockError,
    ServerUnreachable,
)
from penstock.server import running
from penstock.store.sql import connection
from penstock.store.sql.database import Database
from penstock.store.sql.store import SqlStore
from penstock.testing.auditor import Kind
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.sql.postgres import PostgresServer

    from penstock import Broker

# However slow the machine is: nothing here takes as long.
LONG_S = 60


def store_of(broker: Broker) -> SqlStore:
    store = broker._store
    assert isinstance(store, SqlStore)
    return store


@contextmanager
def holding(server: PostgresServer, url: str, table: str) -> Iterator[Callable[[], bool]]:
    """Hold every row of a table; gives a look at whether somebody waits for one."""
    name = url.partition("?")[0].rpartition("/")[2]
    with server.connect(name) as admin, server.connect() as looker, admin.transaction():
        admin.execute(f"SELECT 1 FROM penstock.{table} FOR UPDATE")

        def has_waiter() -> bool:
            return bool(
                looker.execute(
                    "SELECT 1 FROM pg_stat_activity "
                    "WHERE datname = %s AND wait_event_type = 'Lock'",
                    [name],
                ).fetchall()
            )

        yield has_waiter


def test_a_publish_that_waits_keeps_no_other_verb_waiting(
    postgres: PostgresServer, url: str
) -> None:
    with penstock.open(url, background=False) as broker, ThreadPoolExecutor(2) as threads:
        broker.create_queue("q", lease_ms=600_000)
        broker.publish([Message(b"", {"queue": "q"})] * 3)
        with holding(postgres, url, "log_heads") as has_waiter:
            publishing = threads.submit(broker.send, "q", b"late")
            wait_until(has_waiter)

            def verbs() -> list[Any]:
                (first,), (second,) = broker.claim("q"), broker.claim("q")
                return [
                    *broker.extend([first.receipt], lease_ms=1_000_000),
                    *broker.ack([first.receipt]),
                    *broker.release([second.receipt], delay_ms=0),
                    broker.stats("q").available == 2,
                    broker.sweep() is not None,
                ]

            assert all(threads.submit(verbs).result(LONG_S))
            assert not publishing.done()
        assert publishing.result(LONG_S) == 4
        assert_clean(broker)


def test_a_claim_that_finds_zones_busy_holds_no_connection(
    postgres: PostgresServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = f"{url}?connections=1"
    with penstock.open(one, background=False) as broker, ThreadPoolExecutor(1) as threads:
        broker.create_queue("q", lease_ms=600_000)
        # Zones that are not known to have more to give: those would be taken from all the same.
        broker.publish([Message(b"", {"queue": "q"}, group=group) for group in "ab"])
        (held,) = broker.claim("q")
        acked: list[Any] = []

        def pause(_: float) -> None:
            if not acked:
                acked.extend(threads.submit(broker.ack, [held.receipt]).result(LONG_S))

        monkeypatch.setattr(store_of(broker), "_pause", pause)
        with holding(postgres, url, "pointers"):
            assert broker.claim("q") == []
        assert all(acked)
        assert acked
        assert len(broker.claim("q")) == 1


def test_a_verb_waits_for_a_connection_as_long_as_it_may(url: str) -> None:
    short = f"{url}?connections=1&verb_timeout_ms=300"
    with penstock.open(short, background=False) as broker, ThreadPoolExecutor(1) as threads:
        broker.create_queue("q")
        with store_of(broker).database.transaction():
            waiting = threads.submit(broker.stats, "q")
            with pytest.raises(ServerUnreachable, match=r"was free for .*connections="):
                waiting.result(LONG_S)
        assert threads.submit(broker.stats, "q").result(LONG_S).available == 0


def test_as_many_connections_as_the_url_says(url: str, postgres: PostgresServer) -> None:
    for wrong in ("0", "101", "many"):
        with pytest.raises(InvalidUrl, match="connections is"):
            penstock.open(f"{url}?connections={wrong}")
    name = url.rpartition("/")[2]
    with penstock.open(f"{url}?connections=3", background=False) as broker:
        broker.create_queue("q")
        database = store_of(broker).database
        everybody = threading.Barrier(3)
        slots: set[int] = set()

        def use(_: int) -> None:
            with database.transaction():
                slots.add(store_of(broker).slot)
                everybody.wait(LONG_S)

        with ThreadPoolExecutor(3) as threads:
            list(threads.map(use, range(3)))
        # Counters of a queue are spread over rows: no two connections wait for the same.
        assert len(slots) == 3
        text = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND application_name = %s"
        with postgres.connect() as admin:
            assert admin.execute(text, [name, "penstock"]).fetchone() == (3,)


def test_every_connection_is_made_again(url: str, postgres: PostgresServer) -> None:
    with penstock.open(url, background=False) as broker, ThreadPoolExecutor(4) as threads:
        broker.create_queue("q")
        everybody = threading.Barrier(4)

        def send(_: int) -> int:
            everybody.wait(LONG_S)
            return broker.send("q", b"")

        assert len(set(threads.map(send, range(4)))) == 4
        assert postgres.cut() >= 1
        assert len(set(threads.map(send, range(4)))) == 4
        assert broker.stats("q").available == 8
        assert broker._store.health().away is None
        assert_clean(broker)


def test_many_threads_of_one_broker_and_a_close_in_their_midst(url: str, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    broker = penstock.open(f"{url}?connections=3", clock=CLOCK)
    with broker, ThreadPoolExecutor(20) as threads:
        for queue in QUEUES:
            ordering = "fifo" if queue == "fifo" else "standard"
            broker.create_queue(queue, ordering=ordering, max_attempts=1_000)
        tasks = []
        for queue in QUEUES:
            book = Notebook(str(notes), queue)
            for number in range(2):
                name = f"{queue}-{number}"
                tasks.append(threads.submit(publisher, broker, book, queue, name))
            tasks += [threads.submit(worker, broker, book, queue) for _ in range(3)]

        def change_queues() -> None:
            while True:
                broker.create_queue("other", filter="FALSE")
                broker.update_queue("other", max_attempts=3)
                broker.delete_queue("other")

        tasks.append(threads.submit(change_queues))
        wait_for_acks(notes, 60)
        broker.close()
        failures = [task.exception(LONG_S) for task in tasks]
        assert {type(each) for each in failures} == {BrokerClosed}, failures
    assert judge(url, notes)[Kind.ACKED] >= 60


def test_a_close_waits_for_the_verb_that_is_under_way(postgres: PostgresServer, url: str) -> None:
    broker = penstock.open(url)
    with ThreadPoolExecutor(3) as threads:
        broker.create_queue("q")
        broker.create_queue("empty")
        waiting = threads.submit(broker.claim, "empty", wait_ms=600_000)
        with holding(postgres, url, "log_heads") as has_waiter:
            publishing = threads.submit(broker.send, "q", b"")
            wait_until(has_waiter)
            closing = threads.submit(broker.close)
            with pytest.raises(BrokerClosed):
                waiting.result(LONG_S)
            with pytest.raises(BrokerClosed):
                broker.queues()
            assert not closing.done()
        assert publishing.result(LONG_S) == 1
        closing.result(LONG_S)


@pytest.mark.parametrize("meanwhile", ["send", "rouse", "close"])
def test_a_claim_hears_of_what_comes_while_it_looks_for_the_first_time(
    url: str, meanwhile: str
) -> None:
    """A call of another thread, which ends before the claim has begun to wait."""
    broker = penstock.open(url)
    looks = 0

    def look(now_ms: int) -> bool:
        nonlocal looks
        looks += 1
        if looks == 1 and meanwhile == "close":
            threads.submit(broker.close)
            wait_until(lambda: broker.failure)
        elif looks == 1:
            threads.submit(getattr(broker, meanwhile), "q", *messages).result(LONG_S)
        return looks > 1

    messages = [b""] if meanwhile == "send" else []
    with ThreadPoolExecutor(2) as threads, broker:
        broker.create_queue("q")
        wait_ms = 2 * LONG_S * 1000
        waiting = threads.submit(broker._runner.apply, look, queue="q", wait_ms=wait_ms)
        if meanwhile == "close":
            with pytest.raises(BrokerClosed):
                waiting.result(LONG_S)
        else:
            assert waiting.result(LONG_S)


def test_a_fork_leaves_the_connections_to_its_parent(url: str) -> None:
    with penstock.open(url) as broker, ThreadPoolExecutor(4) as threads:
        broker.create_queue("q")
        list(threads.map(lambda _: broker.send("q", b""), range(8)))
        child = os.fork()
        if child == 0:
            with suppress(BrokerClosed):
                broker.send("q", b"of a child")
                os._exit(1)
            broker.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        list(threads.map(lambda _: broker.send("q", b""), range(8)))
        assert broker.stats("q").available == 16
        assert store_of(broker).database.reconnected == 0


def test_a_queue_that_is_made_while_others_publish_misses_nothing(url: str) -> None:
    """Whoever publishes after a queue was made is routed by its filter, whichever thread it is."""
    with penstock.open(url, background=False) as broker, ThreadPoolExecutor(5) as threads:
        over = threading.Event()
        made: list[str] = []
        missed: list[tuple[int, str]] = []
        rounds: list[int] = []

        def publish() -> None:
            while not over.is_set():
                known = list(made)
                (message_id,) = broker.publish([Message(b"")])
                missed.extend(
                    (message_id, name)
                    for name in known
                    if not list(broker.browse(name, message_id=message_id))
                )
                rounds.append(message_id)

        publishing = [threads.submit(publish) for _ in range(4)]
        for number in range(8):
            broker.create_queue(f"q{number}", filter="TRUE")
            made.append(f"q{number}")
            enough = len(rounds) + 6
            wait_until(lambda: len(rounds) >= enough)  # noqa: B023
        over.set()
        for each in publishing:
            each.result(LONG_S)
        assert not missed
        assert_clean(broker)


# --- failures that are met half way ---------------------------------------------------------------


class Losing:
    """Loses connections at statements: after one was committed, before others are sent."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, server: PostgresServer, broker: Broker, *names: str
    ) -> None:
        database = store_of(broker).database
        self.left = list(names)
        run = database.run

        def lose(name: str, /, **parameters: Any) -> list[tuple[Any, ...]]:
            if not self.left or name != self.left[0]:
                return run(name, **parameters)
            self.left.pop(0)
            rows = run(name, **parameters)
            server.cut()
            # The next use of the connection finds out.
            database.execute("SELECT 1")
            return rows

        monkeypatch.setattr(database, "run", lose)


@pytest.fixture
def still(url: str) -> Iterator[Broker]:
    with penstock.open(url, background=False, clock=ManualClock()) as broker:
        broker.create_queue("q")
        yield broker
        assert_clean(broker)


def test_the_look_after_a_lost_answer_is_repeated(
    still: Broker, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    still.send("q", b"")
    (delivery,) = still.claim("q")
    losing = Losing(monkeypatch, postgres, still, "ack_lease", "find_ended")
    (outcome,) = still.ack([delivery.receipt])
    assert outcome.status == "done"
    assert not losing.left
    losing.left = ["publish_free", "find_request"]
    assert still.send("q", b"") == 2
    assert not losing.left
    assert still.stats("q").available == 1


@pytest.mark.parametrize(
    ("name", "verb"),
    [
        ("read_log", lambda broker: broker._store.read_log(0, None, 10).end),
        ("metadata_of", lambda broker: broker.redrive("q", message_ids=[1])),
        ("page_ended", lambda broker: broker.redrive("q")),
        ("sum_counts", lambda broker: broker.stats("q").failed),
        ("page_ended", lambda broker: len(list(broker.browse("q", state="failed")))),
    ],
)
def test_a_read_is_repeated(
    still: Broker,
    postgres: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    verb: Callable[[Broker], int],
) -> None:
    still.update_queue("q", max_attempts=1)
    still.send("q", b"")
    still.release([still.claim("q")[0].receipt])
    database = store_of(still).database
    execute, text = database.execute, database._statements[name].text
    cuts: list[int] = []

    def cutting(sent: Any, *arguments: Any, **options: Any) -> Any:
        if sent == text and not cuts:
            cuts.append(postgres.cut())
        return execute(sent, *arguments, **options)

    monkeypatch.setattr(database, "execute", cutting)
    assert verb(still) >= 1
    assert len(cuts) == 1


def test_a_queue_is_made_once_though_the_answer_of_its_commit_is_lost(
    still: Broker, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = store_of(still).database
    execute = database.execute
    cuts: list[int] = []

    def cutting(sent: Any, *arguments: Any, **options: Any) -> Any:
        rows = execute(sent, *arguments, **options)
        if sent == "COMMIT" and not cuts:
            cuts.append(postgres.cut())
            # The next use of the connection finds out.
            return execute("SELECT 1")
        return rows

    monkeypatch.setattr(database, "execute", cutting)
    made = still.create_queue("made", lease_ms=7)
    assert len(cuts) == 1
    assert still.queue("made") == made


def test_a_statement_that_is_interrupted_leaves_no_name_behind(
    still: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may have prepared it, and its answer may yet come."""
    wait, times = connection._result, iter([True])

    def interrupted(*arguments: Any) -> Any:
        result = wait(*arguments)
        # It was prepared, and has no columns yet.
        if not result.nfields and next(times, False):
            raise KeyboardInterrupt
        return result

    still.send("q", b"1")
    monkeypatch.setattr(connection, "_result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        still.claim("q")
    still.send("q", b"2")
    assert [each.payload for each in still.claim("q", limit=9)] == [b"1", b"2"]


class LateError(Exception):
    """Raised by the handler of a signal, as soft time limits are."""


def test_an_exception_of_a_signal_handler_in_a_statement(url: str) -> None:
    def late(*_: object) -> None:
        raise LateError

    before = signal.signal(signal.SIGALRM, late)
    try:
        with penstock.open(f"{url}?connections=1", background=False) as broker:
            broker.create_queue("q")
            broker.send("q", b"")
            database = store_of(broker).database

            def sleep() -> None:
                database.execute("SELECT pg_sleep(60)")

            def delete() -> None:
                with database.transaction():
                    database.execute("DELETE FROM items")
                    sleep()

            for interrupted in (sleep, delete):
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                with pytest.raises(LateError):
                    interrupted()
                broker.send("q", b"")
                with ThreadPoolExecutor(1) as threads:
                    assert threads.submit(broker.claim, "q").result(LONG_S)
            assert database.reconnected == 0
            assert broker.stats("q").in_flight == 2
            assert broker.stats("q").available == 1
            assert_clean(broker)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("step", ["take", "give"])
def test_a_thread_that_was_interrupted_between_two_steps_finds_its_connection(
    url: str, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    with penstock.open(f"{url}?connections=1", background=False) as broker:
        broker.create_queue("q")
        pool = store_of(broker).database._pool
        moved = getattr(pool, step)
        times = iter([True])

        def interrupted(thread: int) -> Any:
            if step == "take":
                # It has one, and nobody is told.
                moved(thread)
            if next(times, False):
                raise LateError
            return moved(thread)

        monkeypatch.setattr(pool, step, interrupted)
        with pytest.raises(LateError):
            broker.send("q", b"1")
        broker.send("q", b"2")
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(broker.claim, "q").result(LONG_S)


def test_a_connection_that_can_not_be_made_for_an_exception_of_a_signal_handler(
    still: Broker, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver takes it for a wrong value of the URL."""
    postgres.cut()

    def interrupted(_: object) -> int:
        raise LateError

    with monkeypatch.context() as late:
        late.setattr(psycopg.conninfo, "float", interrupted, raising=False)
        with pytest.raises(LateError):
            still.send("q", b"")
    assert still.send("q", b"")


def test_a_sweep_goes_on_without_a_queue_that_another_has_removed(
    still: Broker, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("drained", "other"):
        still.create_queue(name, done_retention_ms=1)
    still.send("drained", b"")
    still.delete_queue("drained", drain=True)
    still.ack([each.receipt for each in still.claim("drained")])
    database = store_of(still).database
    run = database.run
    met: list[str] = []

    def remove(name: str, /, **parameters: Any) -> list[tuple[Any, ...]]:
        rows = run(name, **parameters)
        if name == "pick_items" and not met:
            met.append(name)
            with penstock.open(url, background=False, clock=ManualClock()) as other:
                other.delete_queue("drained")
        return rows

    monkeypatch.setattr(database, "run", remove)
    still.sweep()
    assert met
    assert [each.name for each in still.queues()] == ["other", "q"]


def test_a_lost_connection_does_not_keep_the_clock_from_following(
    url: str, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with penstock.open(url, background=False) as broker:
        broker.create_queue("q", lease_ms=1)
        broker.send("q", b"")
        (held,) = broker.claim("q")
        wait_until(lambda: CLOCK.now_ms() > held.lease_deadline_ms)
        losing = Losing(monkeypatch, postgres, broker, "server_time")
        # The first sweep of a broker looks at the clock as well.
        assert broker.sweep().leases_expired == 1
        assert not losing.left


# --- prepared statements --------------------------------------------------------------------------


def test_a_rollback_takes_no_prepared_statement_away(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often plans were discarded before it: the driver keeps no names of its own."""
    monkeypatch.setattr(connection, "PLANS_MS", 0)
    with penstock.open(f"{url}?connections=1", background=False) as broker:
        broker.create_queue("q")
        for turn in range(2):
            for _ in range(10):
                broker.send("q", b"")
                assert all(broker.ack([each.receipt for each in broker.claim("q")]))
            with pytest.raises(InvalidInput):
                broker.update_queue("q", from_offset=10**9)
            assert store_of(broker).database.reconnected == 0, turn
        assert_clean(broker)


def test_a_refused_client_of_a_server_is_no_harm_to_others(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PLANS_MS", 0)
    with (
        running(f"{url}?connections=1", native="127.0.0.1:0") as server,
        penstock.connect(server.location("native")) as client,
        penstock.connect(server.location("native")) as other,
    ):
        client.create_queue("q")
        for _ in range(20):
            client.send("q", b"")
            assert all(client.ack([each.receipt for each in client.claim("q")]))
        with pytest.raises(InvalidInput):
            other.update_queue("q", from_offset=10**9)
        client.send("q", b"")
        assert all(client.ack([each.receipt for each in client.claim("q")]))


@pytest.mark.parametrize("taken", ["DEALLOCATE ALL", "PREPARE penstock_{} AS SELECT 1"])
def test_a_session_whose_names_are_not_those_expected_is_dropped(still: Broker, taken: str) -> None:
    still.send("q", b"1")
    (held,) = still.claim("q")
    database = store_of(still).database
    names = len(database._connections[0]._names)
    database.connect().execute(taken.format(names))
    # Statements that it has prepared, and one that it has not.
    still.send("q", b"2")
    assert all(still.ack([held.receipt]))
    assert [each.payload for each in still.claim("q", limit=9)] == [b"2"]
    assert database.reconnected == 1
    assert database.away is None


def test_a_store_whose_statements_fail_is_not_ready(url: str, postgres: PostgresServer) -> None:
    with (
        penstock.open(url, background=False, clock=ManualClock()) as broker,
        postgres.connect(url.rpartition("/")[2]) as admin,
    ):
        broker.create_queue("q")
        admin.execute("ALTER TABLE penstock.items RENAME TO hidden")
        with pytest.raises(PenstockError, match="items"):
            broker.send("q", b"")
        assert "items" in str(broker.away)
        # Other statements are answered.
        broker.queues()
        assert "items" in str(broker.away)
        admin.execute("ALTER TABLE penstock.hidden RENAME TO items")
        broker.send("q", b"")
        assert broker.away is None


# --- refusals -------------------------------------------------------------------------------------

REFUSALS = {
    "too many": ("ALTER ROLE {0} CONNECTION LIMIT 0", "ALTER ROLE {0} CONNECTION LIMIT -1"),
    "a role": ("ALTER ROLE {0} NOLOGIN", "ALTER ROLE {0} LOGIN"),
    "a database": ("ALTER DATABASE {1} RENAME TO away", "ALTER DATABASE away RENAME TO {1}"),
}


@pytest.mark.parametrize(("refuse", "allow"), REFUSALS.values(), ids=REFUSALS)
def test_who_was_let_in_before_is_no_wrong_url(
    url: str, postgres: PostgresServer, refuse: str, allow: str
) -> None:
    name = url.rpartition("/")[2]
    role = f"app_{name}"
    app = postgres.url(name, role)
    with postgres.connect() as admin:
        admin.execute(f"CREATE ROLE {role} LOGIN; GRANT CREATE ON DATABASE {name} TO {role}")
    with penstock.open(app, background=False) as broker, ThreadPoolExecutor(1) as threads:
        broker.create_queue("q")
        (sent,) = broker.publish([Message(b"x", {"queue": "q"})])
        (held,) = broker.claim("q")
        database = store_of(broker).database
        postgres.cut()
        with postgres.connect() as admin:
            admin.execute(refuse.format(role, name))
            acking = threads.submit(broker.ack, [held.receipt])
            wait_until(lambda: database.reconnected >= 3)
            assert not acking.done()
            with pytest.raises((InvalidUrl, ServerUnreachable)) as first:
                penstock.open(app)
            assert isinstance(first.value, InvalidUrl) == ("LIMIT" not in refuse)
            # One that reads in bulk, and has not been connected before.
            with pytest.raises(ServerUnreachable, match=r"it could be before|too many"):
                database.another().execute("SELECT 1")
            admin.execute(allow.format(role, name))
        assert all(acking.result(LONG_S))
        assert [each.message_id for each in broker.browse("q", state="done")] == [sent]
        assert_clean(broker)
    with postgres.connect(name) as admin:
        admin.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


# --- poolers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("statement", ["load_instance", "load_queues"])
def test_an_open_goes_on_when_its_connection_is_lost(
    url: str, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    run = Database.run
    cut: list[int] = []

    def cutting(database: Database, name: str, /, **parameters: Any) -> Any:
        if name == statement and not cut:
            cut.append(postgres.cut())
        return run(database, name, **parameters)

    monkeypatch.setattr(Database, "run", cutting)
    with penstock.open(url, background=False) as broker:
        broker.create_queue("q")
        broker.send("q", b"")
        assert len(broker.claim("q")) == 1
    assert len(cut) == 1


def test_nothing_is_prepared_if_the_url_says_so(url: str, postgres: PostgresServer) -> None:
    off = url.replace("postgres@", "pooled@") + "?prepare=off"
    with pytest.raises(InvalidUrl, match="prepare is 'maybe'; it must be on or off"):
        penstock.open(f"{url}?prepare=maybe")
    name = url.rpartition("/")[2]
    with postgres.connect(name) as admin:
        admin.execute("CREATE ROLE pooled LOGIN")
        admin.execute(f"GRANT CREATE ON DATABASE {name} TO pooled")
    try:
        with pytest.raises(InvalidUrl, match="ALTER ROLE CURRENT_USER SET") as refused:
            penstock.open(off)
        with postgres.connect(name) as admin:
            admin.execute("SET ROLE pooled")
            admin.execute(str(refused.value).partition("connect again: ")[2])
        with penstock.open(off, background=False) as broker:
            broker.create_queue("q")
            for _ in range(8):
                broker.send("q", b"")
                assert all(broker.ack([each.receipt for each in broker.claim("q")]))
            with broker.view() as view:
                assert view.depths("q").done == 8
            assert_clean(broker)
            text = "SELECT count(*) FROM pg_prepared_statements"
            assert store_of(broker).database.execute(text) == [(0,)]
        with penstock.open(off.replace("=off", "=on"), background=False) as broker:
            broker.send("q", b"")
            assert broker.claim("q")
            assert store_of(broker).database.execute(text) > [(0,)]
    finally:
        with postgres.connect(name) as admin:
            admin.execute("DROP OWNED BY pooled")
            admin.execute("DROP ROLE pooled")
