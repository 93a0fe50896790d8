"""Group commit over syncs that fail: who waits is told the truth, and it goes on."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest
from tests.waiting import wait_until

import penstock
from penstock.broker.durability import Committer, start_thread
from penstock.broker.requests import Joint
from penstock.errors import BrokerClosed, PenstockError, StorageFailed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock import Broker


class Disk:
    """Counts syncs, and refuses them while it is told to."""

    def __init__(self) -> None:
        self.commits = 0
        self.syncs = 0
        self.failing = False
        self.entered = threading.Event()
        self.may_go = threading.Event()
        self.may_go.set()

    def sync(self) -> None:
        self.entered.set()
        self.may_go.wait()
        self.syncs += 1
        if self.failing:
            raise StorageFailed("Input/output error")


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def committer(disk: Disk) -> Iterator[Committer]:
    made = Committer(disk.sync, lambda: disk.commits, relaxed=False)
    yield made
    made.close()


def test_a_failed_sync_fails_its_commits_for_good_and_no_others(
    disk: Disk, committer: Committer
) -> None:
    disk.commits = 3
    committer.wait(3)
    disk.commits, disk.failing = 5, True
    told: list[PenstockError | None] = []
    committer.tell(4, told.append)
    with pytest.raises(StorageFailed, match=r"may or may not have been made.*Input/output"):
        committer.wait(5)
    # Who comes late for one of them is told the same, though later ones are durable by then.
    disk.commits, disk.failing = 6, False
    committer.wait(6)
    for number in (4, 5):
        with pytest.raises(StorageFailed, match="may or may not"):
            committer.wait(number)
    committer.tell(5, told.append)
    committer.tell(3, told.append)
    committer.tell(6, told.append)
    assert [type(each) for each in told] == [StorageFailed, StorageFailed, type(None), type(None)]
    assert disk.syncs == 3


def test_what_is_failed_from_outside_is_not_saved_by_a_sync_that_ends_later(
    disk: Disk, committer: Committer
) -> None:
    disk.may_go.clear()
    disk.commits = 2
    told: list[PenstockError | None] = []
    committer.tell(2, told.append)
    assert disk.entered.wait(60)
    committer.fail(2, StorageFailed("the store was reopened"))
    disk.may_go.set()
    disk.commits = 3
    committer.wait(3)
    assert [str(each) for each in told] == ["the store was reopened"]
    with pytest.raises(StorageFailed, match="reopened"):
        committer.wait(2)


def test_a_closed_committer_tells_everybody(disk: Disk) -> None:
    committer = Committer(disk.sync, lambda: disk.commits, relaxed=False)
    disk.commits, disk.failing = 1, True
    told: list[PenstockError | None] = []
    committer.tell(1, told.append)
    committer.tell(9, told.append)
    committer.close()
    assert [type(each) for each in told] == [StorageFailed, BrokerClosed]
    with pytest.raises(BrokerClosed):
        committer.wait(9)


# --- over a real database, whose fsync is refused -------------------------------------------------


class RefusedSync:
    """A database of the binding whose log is not synced, as if the disk had refused it."""

    def __init__(self, database: object) -> None:
        self._database = database

    def __getattr__(self, name: str) -> object:
        return getattr(self._database, name)

    @property
    def flush_wal(self) -> object:
        """Something that raises as the binding does: without a frame of Python."""
        loop = asyncio.new_event_loop()
        loop.close()
        refusal: asyncio.Future[None] = asyncio.Future(loop=loop)
        refusal.set_exception(Exception("IO error: While fdatasync: Input/output error"))
        return partial(next, iter(refusal))


def refuse_syncs(broker: Broker) -> None:
    engine = broker._store.engine  # type: ignore[attr-defined]
    engine._db = RefusedSync(engine._db)


@pytest.mark.parametrize("durability", ["fsync", "relaxed"])
def test_a_failed_fsync_is_not_repeated_the_store_is_reopened(
    tmp_path: Path, durability: str
) -> None:
    url = f"rocksdb:{tmp_path}/store"
    with penstock.open(url, durability=durability) as broker:  # type: ignore[arg-type]
        broker.create_queue("q")
        broker.create_queue("empty")
        broker.send("q", b"before")
        loads = broker._store.progress.filter_changes
        refuse_syncs(broker)
        if durability == "fsync":
            with pytest.raises(StorageFailed, match="may or may not have been made"):
                broker.send("q", b"in doubt")
        else:
            broker.send("q", b"in doubt")
        # The reopened database has a log of its own: nothing has to be done for that.
        wait_until(
            lambda: (
                broker._store.progress.filter_changes > loads
                and broker._store.health().away is None
            )
        )
        # A claim that finds nothing waits for what it has seen, which is durable by now.
        assert broker.claim("empty") == []
        broker.send("q", b"after")
        claimed = broker.claim("q", limit=10)
        assert [each.payload for each in claimed] == [b"before", b"in doubt", b"after"]
        assert all(broker.ack([each.receipt for each in claimed]))
        assert broker.check().ok
    # What can't be written says nothing of what can be read.
    assert not (tmp_path / "store" / "PENSTOCK-DAMAGED").exists()
    with penstock.open(url) as broker:
        assert broker.stats("q").done == 3


def test_a_queue_that_is_gone_after_reopening_gets_no_messages(tmp_path: Path) -> None:
    """What was made and not durable may be gone: routing follows what is there."""
    with penstock.open(f"rocksdb:{tmp_path}/store") as broker:
        broker.create_queue("q")
        store = broker._store
        loaded = store.load  # type: ignore[attr-defined]
        loads: list[None] = []

        def lose_one() -> None:
            # As if the log had ended before this queue.
            loaded()
            store.by_name.pop("doubtful", None)  # type: ignore[attr-defined]
            loads.append(None)

        store.load = lose_one  # type: ignore[attr-defined]
        refuse_syncs(broker)
        with pytest.raises(StorageFailed, match="may or may not"):
            broker.create_queue("doubtful", filter="x = 1")
        wait_until(lambda: loads and broker._store.health().away is None)
        broker.publish([penstock.Message(b"", {"x": 1})])
        assert broker.store_stats().unrouted_total == 1


def test_a_close_that_can_not_sync_lets_go_and_says_so(tmp_path: Path) -> None:
    url = f"rocksdb:{tmp_path}/store"
    broker = penstock.open(url, durability="relaxed", background=False)
    broker.create_queue("q")
    refuse_syncs(broker)
    broker.send("q", b"in doubt")
    with pytest.raises(StorageFailed, match="the last changes may not be durable"):
        broker.close()
    broker.close()
    with penstock.open(url) as again:
        assert again.stats("q").available == 1


def test_a_recovery_that_fails_in_a_way_nobody_thought_of_is_tried_again(tmp_path: Path) -> None:
    with penstock.open(f"rocksdb:{tmp_path}/store") as broker:
        broker.create_queue("q")
        engine = broker._store.engine  # type: ignore[attr-defined]
        recover = engine.recover
        tried: list[None] = []

        def fail_once(*args: object) -> None:
            tried.append(None)
            if len(tried) == 1:
                raise RuntimeError("nobody thought of this")
            recover(*args)

        engine.recover = fail_once
        refuse_syncs(broker)
        with pytest.raises(StorageFailed, match="may or may not"):
            broker.send("q", b"in doubt")
        wait_until(lambda: broker._store.health().away is None)
        assert broker.send("q", b"after")


def test_a_store_is_recovered_by_one_at_a_time(tmp_path: Path) -> None:
    with penstock.open(f"rocksdb:{tmp_path}/store", background=False) as broker:
        broker.create_queue("q")
        engine = broker._store.engine  # type: ignore[attr-defined]
        probe = engine._free_space.probe
        refuse_syncs(broker)
        with pytest.raises(StorageFailed, match="may or may not"):
            broker.send("q", b"in doubt")

        def probe_beside_another() -> None:
            # If it got the store back, this one would put changes that came after into doubt.
            engine._free_space.probe = probe
            broker._runner.recover()
            if broker._store.health().away is None:
                made.append(broker.begin(Joint()))
            probe()

        made: list[int] = []
        engine._free_space.probe = probe_beside_another
        broker.sweep()
        assert broker._store.health().away is None
        assert made == []


def test_a_thread_that_can_not_be_had_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **_more: object) -> None:
        raise RuntimeError("can't start new thread")

    # As Python's own start() has it, at the limit of the process or of the machine.
    joinable = hasattr(threading, "_start_joinable_thread")
    step = "_start_joinable_thread" if joinable else "_start_new_thread"
    monkeypatch.setattr(threading, step, refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        start_thread("one", lambda: None)
