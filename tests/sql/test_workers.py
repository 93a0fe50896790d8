"""Worker runtimes on a database: processes that share it, and what they count."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from tests.waiting import wait_until
from tests.work.helping import Gate
from tests.work.test_process import Running, metrics_of, started

import penstock
from penstock import ManualClock, Message, SystemClock, Worker
from penstock.store.sql.store import SqlStore
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.sql.postgres import PostgresServer

    from penstock import Broker

GROUPS = ("a", "b", "c", "d", "e", "f")
EACH = 5
SLOTS = 2
PATIENCE_S = 120
HOUR_MS = 3_600_000


@pytest.fixture
def broker(url: str) -> Iterator[Broker]:
    with penstock.open(url) as opened:
        opened.create_queue("q", lease_ms=HOUR_MS)
        yield opened
        assert_clean(opened)


# --- processes that share a database --------------------------------------------------------------


def work(url: str, handler: str, *options: object) -> tuple[object, ...]:
    queues = ("--queue", "standard", "--queue", "fifo", "--lease", "1h")
    # No more than there are slots for, so that every process must have some.
    slots = ("--concurrency", SLOTS, "--prefetch", 0)
    command = ("-m", "penstock", "work", f"tests.work.handlers:{handler}", "--store", url)
    return (*command, *queues, *slots, *options)


def lines_of(place: Path) -> list[list[str]]:
    path = place / "lines"
    return [each.split() for each in path.read_text().splitlines()] if path.exists() else []


def check_order(lines: list[list[str]]) -> None:
    """Hold a FIFO queue to it: in a group one after the other, in the order of publishing."""
    groups: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for word, queue, group, number, _ in lines:
        if queue == "fifo":
            groups[group].append((word, int(number)))
    expected = [(word, number) for number in range(EACH) for word in ("begin", "end")]
    assert groups == dict.fromkeys(GROUPS, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("handler", "options"),
    [
        ("writes_down", ("--metrics", "127.0.0.1:0")),
        ("writes_down_async", ()),
        ("writes_down", ("--processes",)),
    ],
    ids=["threads", "coroutines", "processes"],
)
def test_workers_of_several_processes(
    postgres: PostgresServer,
    tmp_path: Path,
    handler: str,
    options: tuple[object, ...],
) -> None:
    url = postgres.url(postgres.create())
    with penstock.open(url, background=False) as broker:
        for queue in ("standard", "fifo"):
            broker.create_queue(queue, ordering=queue)
        broker.publish(
            [
                Message(b"%d" % n, {"queue": queue, "place": str(tmp_path)}, group)
                for queue in ("standard", "fifo")
                for n in range(EACH)
                for group in GROUPS
            ]
        )
    total = 2 * EACH * len(GROUPS)
    with ExitStack() as stack:
        workers: list[Running] = [
            stack.enter_context(started(*work(url, handler, *options))) for _ in range(2)
        ]

        def begun() -> bool:
            return len(lines_of(tmp_path)) >= SLOTS * len(workers)

        wait_until(begun, PATIENCE_S, "every slot of every process has a message")
        (tmp_path / "go").touch()
        wait_until(lambda: len(lines_of(tmp_path)) == 2 * total, PATIENCE_S, "all are worked on")
        if "--metrics" in options:
            assert "penstock_worker_collisions_total" in metrics_of(workers[0])
        for each in workers:
            each.process.terminate()
        assert [each.end() for each in workers] == [0, 0], [each.lines for each in workers]
    lines = lines_of(tmp_path)
    check_order(lines)
    ended = Counter((queue, group, n) for word, queue, group, n, _ in lines if word == "end")
    assert len(ended) == total
    assert set(ended.values()) == {1}
    with penstock.open(url, background=False) as broker:
        for queue in ("standard", "fifo"):
            stats = broker.stats(queue)
            assert (stats.done, stats.lease_expired_total) == (EACH * len(GROUPS), 0)
        assert_clean(broker)


def test_a_worker_opens_a_database_by_itself(broker: Broker, url: str) -> None:
    seen: list[bytes] = []
    with Worker(url, "q", lambda each: seen.append(each.payload)) as worker:
        broker.send("q", b"x")
        wait_until(lambda: worker.stats().processed == 1)
    assert seen == [b"x"]
    assert broker.stats("q").done == 1


# --- what it counts -------------------------------------------------------------------------------


class Rival:
    """Takes what a worker's broker has just looked at, before it can visit it."""

    def __init__(self, broker: Broker, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        store = broker._store
        assert isinstance(store, SqlStore)
        self.database = store.database
        self._run = self.database.run
        self._url = url
        self.taken: list[bytes] = []
        monkeypatch.setattr(self.database, "run", self.run)

    def run(self, name: str, /, **parameters: Any) -> list[tuple[Any, ...]]:
        rows = self._run(name, **parameters)
        if name == "peek" and rows and not self.taken:
            with penstock.open(self._url, background=False) as other:
                got = other.claim("q")
                self.taken += [each.payload for each in got]
                other.ack([each.receipt for each in got])
        return rows


def test_collisions_are_counted_once_whatever_the_queues(
    broker: Broker, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.create_queue("other")
    seen: list[bytes] = []
    rival = Rival(broker, url, monkeypatch)
    with Worker(broker, ["q", "other"], lambda each: seen.append(each.payload)) as worker:
        broker.send("q", b"x")
        wait_until(lambda: rival.taken, why="the other has come")
        broker.send("q", b"y")
        wait_until(lambda: worker.stats().processed == 1)
    assert (rival.taken, seen) == ([b"x"], [b"y"])
    contention = broker.contention()
    assert contention is not None
    assert worker.stats().collisions == contention.collisions == 1
    assert contention.statements > 10


def test_an_ack_that_comes_after_the_lease_is_refused_and_counted(broker: Broker, url: str) -> None:
    gate = Gate()
    with Worker(broker, "q", gate, wait_ms=20) as worker:
        broker.send("q", b"x")
        wait_until(lambda: gate.begun)
        # By the clock of another the lease is over; it takes the message, and is done with it.
        later = ManualClock(SystemClock().now_ms() + 2 * HOUR_MS)
        with penstock.open(url, background=False, clock=later) as other:
            (delivery,) = other.claim("q", lease_ms=HOUR_MS)
            assert delivery.attempts == 2
            assert other.ack([delivery.receipt])[0].status == "done"
        gate.open.set()
        wait_until(lambda: worker.stats().stale == 1)
    stats = broker.stats("q")
    assert (worker.stats().processed, stats.done, stats.acked_total) == (0, 1, 1)
    assert broker.store_stats().stale_receipts_total == 1


class Behind(SystemClock):
    """The clock of a store that is an hour behind the machine of a worker."""

    def now_ms(self) -> int:
        return super().now_ms() - HOUR_MS


def test_lag_is_by_the_clock_of_the_store(url: str) -> None:
    with penstock.open(url, clock=Behind()) as broker:
        broker.create_queue("q")
        broker.send("q", b"x")
        with Worker(broker, "q", lambda _: None) as worker:
            wait_until(lambda: worker.stats().processed == 1)
    assert worker.stats().lag_seconds.sum < HOUR_MS / 2_000
