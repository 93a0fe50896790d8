"""Processes that are killed and paused, a database that restarts, connections that are cut.

Judged by what the processes have noted, against what is in the store at the end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest
from tests.judging import judge_queue
from tests.noting import notes_of
from tests.waiting import wait_until
from tests.work.helping import alive
from tests.work.test_process import CHILD as WORKER
from tests.work.test_process import Running, started

import penstock
from penstock import ManualClock, Message, StorageFailed, SystemClock
from penstock.errors import DiskFull
from penstock.store.sql.failures import Lost
from penstock.store.sql.store import SqlStore
from penstock.testing.auditor import Kind
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sql.postgres import PostgresServer

    from penstock import Broker

CHILD = Path(__file__).with_name("child.py")
QUEUES = ("standard", "fifo")
PATIENCE_S = 120
# How often a process is stopped until it held something.
ROUNDS = 30


@contextmanager
def worker(url: str, notes: Path, name: object) -> Iterator[subprocess.Popen[str]]:
    """Have a process publish, claim and settle, and note what it does."""
    process = subprocess.Popen(
        [sys.executable, str(CHILD), url, str(notes), str(name)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n", process.communicate()[1]
        yield process
    finally:
        process.kill()
        _, said = process.communicate()
    # A sweep may have failed, which is logged; none of its threads may have ended.
    assert "Exception in thread" not in said, said


def acked(notes: Path) -> int:
    return sum(
        note.kind is Kind.ACKED
        for queue in QUEUES
        for note in notes_of(notes.with_name(f"{notes.name}.{queue}"))
    )


def wait_for_acks(notes: Path, more: int) -> None:
    """Wait until so many more messages have been acked."""
    wanted = acked(notes) + more
    wait_until(lambda: acked(notes) >= wanted, PATIENCE_S, "the processes come no further")


def judge(url: str, notes: Path) -> Counter[Kind]:
    """Hold what all processes have noted against what is there; count the notes."""
    seen: Counter[Kind] = Counter()
    still = ManualClock(SystemClock().now_ms())
    with penstock.open(url, background=False, clock=still) as broker:
        assert_clean(broker)
        for queue in QUEUES:
            written = notes_of(notes.with_name(f"{notes.name}.{queue}"))
            judge_queue(broker, queue, written, fifo=queue == "fifo")
            stats = broker.stats(queue)
            published = sum(note.kind is Kind.PUBLISHED for note in written)
            assert stats.enqueued_total >= published > 0
            seen.update(note.kind for note in written)
    return seen


@pytest.mark.slow
def test_killed_at_any_moment(postgres: PostgresServer, tmp_path: Path) -> None:
    url, notes = postgres.url(postgres.create()), tmp_path / "notes"
    clock = SystemClock()
    with worker(url, notes, "stays"):
        for round_ in range(3):
            with worker(url, notes, round_):
                wait_for_acks(notes, 20)
                threading.Event().wait(clock.random() / 4)
        wait_for_acks(notes, 20)
    judge(url, notes)


@pytest.mark.slow
def test_paused_for_longer_than_its_leases(postgres: PostgresServer, tmp_path: Path) -> None:
    url, notes = postgres.url(postgres.create()), tmp_path / "notes"
    with worker(url, notes, "first") as first, worker(url, notes, "second"):
        for _ in range(3):
            wait_for_acks(notes, 20)
            first.send_signal(signal.SIGSTOP)
            threading.Event().wait(0.5)
            # What it held comes back, and the other goes on, whatever was under way.
            wait_for_acks(notes, 40)
            first.send_signal(signal.SIGCONT)
        wait_for_acks(notes, 20)
    judge(url, notes)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["stopped", "crashed"])
def test_a_database_that_restarts(
    own_postgres: PostgresServer, tmp_path: Path, how: signal.Signals
) -> None:
    url, notes = own_postgres.url(own_postgres.create()), tmp_path / "notes"
    with ExitStack() as stack:
        for name in ("first", "second"):
            stack.enter_context(worker(url, notes, name))
        for _ in range(2):
            wait_for_acks(notes, 20)
            own_postgres.stop(how)
            threading.Event().wait(0.3)
            own_postgres.start()
        wait_for_acks(notes, 20)
    judge(url, notes)


@pytest.mark.slow
def test_connections_that_are_cut(postgres: PostgresServer, tmp_path: Path) -> None:
    url, notes = postgres.url(postgres.create()), tmp_path / "notes"
    cut = 0
    with ExitStack() as stack:
        for name in ("first", "second"):
            stack.enter_context(worker(url, notes, name))
        for _ in range(15):
            wait_for_acks(notes, 5)
            cut += postgres.cut()
        wait_for_acks(notes, 20)
    assert cut >= 15
    judge(url, notes)


# --- worker runtimes ------------------------------------------------------------------------------


def running_worker(stack: ExitStack, url: str, notes: Path, name: str, *queues: str) -> Running:
    """Have a process with a worker for each queue; those whose name says so have children."""
    mode = "processes" if name == "processes" else "threads"
    running = stack.enter_context(started(WORKER, url, notes, mode, name, *queues))
    running.wait_for("working")
    return running


@pytest.mark.slow
def test_workers_that_are_killed(postgres: PostgresServer, tmp_path: Path) -> None:
    url, notes = postgres.url(postgres.create()), tmp_path / "notes"
    clock = SystemClock()
    with ExitStack() as stays:
        other = running_worker(stays, url, notes, "stays", *QUEUES)
        with ExitStack() as dies:
            worker = running_worker(dies, url, notes, "processes", "fifo")
            line = next(line for line in worker.lines if line.startswith("working"))
            children = [int(pid) for pid in line.split()[1:]]
            # One that has died meanwhile, of the handler, has been replaced.
            for child in filter(alive, children):
                os.kill(child, signal.SIGKILL)
            wait_for_acks(notes, 20)
            assert worker.process.poll() is None, worker.lines
        with ExitStack() as dies:
            running_worker(dies, url, notes, "threads", *QUEUES)
            threading.Event().wait(clock.random() / 4)
        wait_for_acks(notes, 40)
        assert other.process.poll() is None, other.lines
    seen = judge(url, notes)
    assert min(seen[Kind.ACKED], seen[Kind.RELEASED]) > 20, seen
    wait_until(lambda: not any(map(alive, children)), PATIENCE_S, "orphans end")


@pytest.mark.slow
def test_a_worker_that_is_paused_for_longer_than_its_leases(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    url, notes = postgres.url(postgres.create()), tmp_path / "notes"
    with ExitStack() as stack:
        paused = running_worker(stack, url, notes, "paused", *QUEUES)
        running_worker(stack, url, notes, "goes-on", *QUEUES)
        # It may have nothing in its hands when it is stopped: then once more.
        for _ in range(ROUNDS):
            paused.process.send_signal(signal.SIGSTOP)
            threading.Event().wait(1.2)
            wait_for_acks(notes, 20)
            paused.process.send_signal(signal.SIGCONT)
            wait_for_acks(notes, 20)
            if any("refused" in line for line in paused.lines):
                break
        # What it held is not its own any more, and it knows.
        paused.wait_for("refused")
        assert paused.process.poll() is None, paused.lines
    judge(url, notes)


@pytest.mark.slow
def test_a_database_that_crashes_under_workers(
    own_postgres: PostgresServer, tmp_path: Path
) -> None:
    url, notes = own_postgres.url(own_postgres.create()), tmp_path / "notes"
    with ExitStack() as stack:
        workers = [running_worker(stack, url, notes, name, *QUEUES) for name in ("one", "two")]
        own_postgres.stop(signal.SIGQUIT)
        threading.Event().wait(0.3)
        own_postgres.start()
        wait_for_acks(notes, 40)
        assert [each.process.poll() for each in workers] == [None, None]
    judge(url, notes)


# --- one verb at a time ---------------------------------------------------------------------------


class Cut:
    """Cuts a broker's connection after a statement has been committed, before it is answered."""

    def __init__(self, broker: Broker, server: PostgresServer, statement: str) -> None:
        store = broker._store
        assert isinstance(store, SqlStore)
        self._database = store.database
        self._server, self._statement = server, statement
        self._run = self._database.run
        self.times = 0

    def __enter__(self) -> Self:
        setattr(self._database, "run", self._lose)  # noqa: B010
        return self

    def __exit__(self, *_: object) -> None:
        delattr(self._database, "run")

    def _lose(self, name: str, /, **parameters: Any) -> list[tuple[Any, ...]]:
        rows = self._run(name, **parameters)
        if name == self._statement and not self.times:
            self.times += 1
            self._server.cut()
            # The next use of the connection finds out.
            self._database.execute("SELECT 1")
        return rows


@pytest.fixture
def broker(url: str) -> Iterator[Broker]:
    with penstock.open(url, background=False, clock=ManualClock()) as opened:
        opened.create_queue("q")
        opened.send("q", b"before")
        yield opened
        assert_clean(opened)


def test_a_publish_whose_answer_is_lost_is_there_once(
    broker: Broker, postgres: PostgresServer
) -> None:
    messages = [
        Message(b"1", {"queue": "q"}),
        Message(b"2", {"queue": "q"}, dedup_id="x"),
        Message(b"3", {"queue": "q"}, dedup_id="x"),
        Message(b"4", {"queue": "q"}),
    ]
    with Cut(broker, postgres, "publish_free") as cut:
        ids = broker.publish(messages)
    assert cut.times == 1
    assert ids == [2, 3, 3, 4]
    assert [d.payload for d in broker.claim("q", limit=9)] == [b"before", b"1", b"2", b"4"]


def test_a_publish_whose_answer_is_lost_while_queues_change(
    broker: Broker, postgres: PostgresServer, url: str
) -> None:
    with penstock.open(url, background=False, clock=ManualClock(seed=1)) as other:
        other.queues()
        cut = Cut(broker, postgres, "publish_one")
        lose = cut._lose

        def changed(name: str, /, **parameters: Any) -> list[tuple[Any, ...]]:
            if name == "publish_one" and not cut.times:
                try:
                    return lose(name, **parameters)
                finally:
                    other.create_queue("r", filter="queue = 'q'")
            return lose(name, **parameters)

        setattr(cut, "_lose", changed)  # noqa: B010
        with cut:
            assert broker.publish([Message(b"1", {"queue": "q"})]) == [2]
        assert other.stats("q").available == 2
        assert other.stats("r").available == 0


def test_a_publish_that_is_repeated_does_not_trust_what_it_knew(
    broker: Broker, postgres: PostgresServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = broker._store
    assert isinstance(store, SqlStore)
    database, run = store.database, store.database.run
    tries: list[str] = []

    def late(name: str, /, **parameters: Any) -> list[tuple[Any, ...]]:
        if name == "publish_one" and not tries:
            # Somebody else empties the zone while the connection is lost, and looks at it again.
            tries.append(name)
            clock = ManualClock(seed=1)
            with penstock.open(url, background=False, clock=clock) as other:
                other.ack([each.receipt for each in other.claim("q", limit=9)])
                for _ in range(2):
                    assert other.claim("q") == []
                    clock.advance(1_000)
            postgres.cut()
        return run(name, **parameters)

    monkeypatch.setattr(database, "run", late)
    broker.send("q", b"after")
    assert tries
    assert [each.payload for each in broker.claim("q")] == [b"after"]


def test_a_drain_that_fails_half_way_takes_nothing_more(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = broker._store
    assert isinstance(store, SqlStore)
    run = store.database.run

    def full(name: str, /, **parameters: Any) -> list[tuple[Any, ...]]:
        if name == "pick_items":
            raise DiskFull("no room")
        return run(name, **parameters)

    with monkeypatch.context() as patch:
        patch.setattr(store.database, "run", full)
        with pytest.raises(DiskFull):
            broker.delete_queue("q", drain=True)
    broker.publish([Message(b"late", {"queue": "q"})])
    (delivery,) = broker.claim("q", limit=9)
    assert delivery.payload == b"before"
    broker.ack([delivery.receipt])
    broker.sweep()
    assert broker.queues() == []


def test_an_ack_whose_answer_is_lost_was_an_ack(broker: Broker, postgres: PostgresServer) -> None:
    (delivery,) = broker.claim("q")
    with Cut(broker, postgres, "ack_lease") as cut:
        (outcome,) = broker.ack([delivery.receipt])
    assert cut.times == 1
    assert outcome.status == "done"
    assert broker.ack([delivery.receipt])[0].status == "stale"
    assert broker.stats("q").acked_total == 1


def test_an_extension_whose_answer_is_lost(broker: Broker, postgres: PostgresServer) -> None:
    (delivery,) = broker.claim("q")
    with Cut(broker, postgres, "extend"):
        assert broker.extend([delivery.receipt], lease_ms=5)[0].status == "extended"


@pytest.mark.parametrize("last", [False, True])
def test_a_release_whose_answer_is_lost(url: str, postgres: PostgresServer, last: bool) -> None:
    with penstock.open(url, background=False, clock=ManualClock()) as broker:
        broker.create_queue("q", max_attempts=1 if last else 5)
        broker.send("q", b"x")
        (delivery,) = broker.claim("q")
        with Cut(broker, postgres, "fail" if last else "release"):
            (outcome,) = broker.release([delivery.receipt], delay_ms=0)
        assert outcome.status == ("failed" if last else "retrying")
        assert broker.stats("q").released_total == 1
        assert_clean(broker)


def test_a_claim_whose_answer_is_lost_is_not_made_again(
    broker: Broker, postgres: PostgresServer
) -> None:
    with Cut(broker, postgres, "visit"), pytest.raises(StorageFailed, match="lost"):
        broker.claim("q", lease_ms=1_000)
    assert broker.claim("q") == []
    clock = broker._clock
    assert isinstance(clock, ManualClock)
    clock.advance(1_000)
    (delivery,) = broker.claim("q")
    assert delivery.attempts == 2


# --- changes of several statements, whose COMMIT gets no answer -----------------------------------


class LostCommit:
    """Has a broker lose the answer to its first COMMIT.

    The COMMIT was ``made``, was ``not made``, or is ``under way`` until the next attempt waits.
    """

    def __init__(self, broker: Broker, server: PostgresServer, how: str) -> None:
        store = broker._store
        assert isinstance(store, SqlStore)
        self._database, self._server, self._how = store.database, server, how
        self._execute = self._database.execute
        self._late = threading.Thread()
        self.times = 0

    def __enter__(self) -> Self:
        setattr(self._database, "execute", self._lose)  # noqa: B010
        return self

    def __exit__(self, *_: object) -> None:
        delattr(self._database, "execute")
        if self._how == "under way":
            self._late.join()

    def _lose(self, text: Any, *others: Any, **more: Any) -> list[tuple[Any, ...]]:
        if text != "COMMIT" or self.times:
            return self._execute(text, *others, **more)
        self.times += 1
        if self._how == "under way":
            connection = self._database._verb.connection
            assert connection is not None
            session, connection._made = connection._made, None
            self._late = threading.Thread(target=self._commit, args=(session,))
            self._late.start()
            raise Lost("the test has lost the connection")
        if self._how == "made":
            self._execute(text)
        self._server.cut()
        return self._execute("COMMIT")

    def _commit(self, session: Any) -> None:
        wait_until(self._is_awaited, PATIENCE_S, "nobody waits for the transaction")
        with session:
            session.execute("COMMIT")

    def _is_awaited(self) -> bool:
        with self._server.connect() as admin:
            text = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            return bool(admin.execute(text).fetchall())


@pytest.mark.parametrize("how", ["made", "not made", "under way"])
def test_changes_of_queues_whose_commit_gets_no_answer_are_made_once(
    broker: Broker, postgres: PostgresServer, how: str
) -> None:
    def lost() -> LostCommit:
        return LostCommit(broker, postgres, how)

    with lost() as update:
        assert broker.update_queue("q", max_attempts=7, filter="queue = 'r'").version == 2
    (spec,) = broker.queues()
    assert (spec.version, spec.max_attempts) == (2, 7)
    with lost() as purge:
        assert broker.purge("q", states=["available"]) == 1
    assert broker.stats("q").removed_total == 1
    with lost() as drain:
        broker.delete_queue("q", drain=True)
    broker.sweep()
    assert broker.queues() == []
    broker.create_queue("q")
    with lost() as delete:
        assert broker.delete_queue("q") == 0
    assert broker.queues() == []
    assert [each.times for each in (update, purge, drain, delete)] == [1, 1, 1, 1]


@pytest.mark.parametrize("how", ["made", "not made", "under way"])
def test_changes_of_messages_whose_commit_gets_no_answer_are_made_once(
    broker: Broker, postgres: PostgresServer, how: str
) -> None:
    def lost() -> LostCommit:
        return LostCommit(broker, postgres, how)

    broker.create_queue("r", max_attempts=1)
    for _ in range(3):
        broker.send("q", b"x")
    with lost() as move:
        assert broker.move("q", "r", state="available", limit=1) == 1
    (held,) = broker.claim("r", limit=9)
    broker.release([held.receipt])
    with lost() as redrive:
        assert broker.redrive("r") == 1
    assert broker.stats("r").redriven_total == 1
    broker.ack([each.receipt for each in broker.claim("q", limit=9)])
    with lost() as purge:
        assert broker.purge("q", states=["done"], limit=2) == 2
    assert broker.stats("q").done == 1
    with lost() as log:
        broker.configure_log(logs=20)
    assert broker.log_stats().logs == 20
    assert [each.times for each in (move, redrive, purge, log)] == [1, 1, 1, 1]


@pytest.mark.slow
def test_a_database_that_is_away_fails_the_verb_and_comes_back(
    own_postgres: PostgresServer,
) -> None:
    url = own_postgres.url(own_postgres.create())
    with penstock.open(url, background=False) as broker:
        broker.create_queue("q")
        assert isinstance(broker._store, SqlStore)
        broker._store.database.patience = 3
        own_postgres.stop()
        with pytest.raises(StorageFailed):
            broker.send("q", b"x")
        away = [broker._store.health().away]
        own_postgres.start()
        broker.send("q", b"y")
        away.append(broker._store.health().away)
        assert [why is None for why in away] == [False, True]
        assert [d.payload for d in broker.claim("q", limit=9)] == [b"y"]


def test_a_publish_whose_answer_is_lost_and_whose_duplicates_are_forgotten(
    broker: Broker, postgres: PostgresServer, url: str
) -> None:
    """The repeat comes after the window of a dedup id that the publish had found."""
    clock = ManualClock()
    with penstock.open(url, background=False, clock=clock) as sender:
        (known,) = sender.publish([Message(b"1", {"queue": "q"}, dedup_id="x")])
        clock.advance(299_999)
        cut = Cut(sender, postgres, "publish_free")
        lose = cut._lose

        def forgets(name: str, /, **parameters: Any) -> list[tuple[Any, ...]]:
            if name == "publish_free" and cut.times:
                with postgres.connect(url.rpartition("/")[2]) as admin:
                    admin.execute("DELETE FROM penstock.dedup")
            return lose(name, **parameters)

        setattr(cut, "_lose", forgets)  # noqa: B010
        with cut:
            ids = sender.publish(
                [
                    Message(b"2", {"queue": "q"}, dedup_id="x"),
                    Message(b"3", {"queue": "q"}),
                    Message(b"4", {"queue": "q"}),
                ]
            )
        assert cut.times == 1
        assert ids == [known, known + 1, known + 2]
