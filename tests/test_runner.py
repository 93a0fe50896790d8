"""The runner of a store that another process has taken over; a sweep that gets nowhere."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from tests.waiting import wait_until

import penstock
from penstock.broker.runner import _Waiters
from penstock.clock import ManualClock
from penstock.errors import InvalidInput, StoreFenced
from penstock.store.kv.maintain import IDLE_MS
from penstock.waiter import Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock import Broker


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with penstock.open(f"rocksdb:{tmp_path / 'store'}") as opened:
        opened.create_queue("q")
        yield opened


def refuse(*_: object, **__: object) -> None:
    raise StoreFenced("another broker has opened it")


@pytest.mark.parametrize(
    ("part", "verb"),
    [
        ("sync", lambda broker: broker.send("q", b"")),
        ("publish", lambda broker: broker.send("q", b"")),
        ("claim", lambda broker: broker.claim("q")),
        ("queue_stats", lambda broker: broker.stats("q")),
    ],
)
def test_who_is_refused_is_the_one_that_notices(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, part: str, verb: Callable[[Broker], object]
) -> None:
    told: list[tuple[str | None, int | None]] = []
    broker.listen(lambda queue, available: told.append((queue, available)))
    with monkeypatch.context() as patched:
        patched.setattr(broker._store, part, refuse)
        with pytest.raises(StoreFenced) as first:
            verb(broker)
        # Nobody else has told it so, and nothing can be looked at any more.
        with pytest.raises(StoreFenced):
            broker.queues()
    assert broker._runner.lost is first.value
    broker._runner._lose(StoreFenced("told again, by who watches the store"))
    assert broker._runner.lost is first.value
    assert told.count((None, None)) == 1


def test_a_refused_sync_ends_claims_that_wait(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[StoreFenced] = []

    def wait() -> None:
        try:
            broker.claim("q", wait_ms=600_000)
        except StoreFenced as error:
            failures.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(lambda: broker._runner._waiters)
    with monkeypatch.context() as patched:
        patched.setattr(broker._store, "sync", refuse)
        with pytest.raises(StoreFenced):
            broker.create_queue("other")
        waiting.join(60)
    assert len(failures) == 1


def test_a_listener_that_fails_keeps_nobody_waiting(broker: Broker) -> None:
    failures: list[StoreFenced] = []

    def wait() -> None:
        try:
            broker.claim("q", wait_ms=600_000)
        except StoreFenced as error:
            failures.append(error)

    def fail(*_: object) -> None:
        raise RuntimeError("the loop is closed")

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(lambda: broker._runner._waiters)
    broker.listen(fail)
    with pytest.raises(RuntimeError):
        broker._runner._lose(StoreFenced("another broker has opened it"))
    waiting.join(60)
    assert len(failures) == 1


@pytest.mark.parametrize("verb", ["claim", "rouse", "close"])
def test_a_signal_handler_calls_nothing_in_the_middle_of_a_change(
    broker: Broker, verb: str
) -> None:
    def change(_: int) -> None:
        signal.raise_signal(signal.SIGUSR1)

    call = partial(getattr(broker, verb), *([] if verb == "close" else ["q"]))
    before = signal.signal(signal.SIGUSR1, lambda *_: call())
    try:
        with pytest.raises(InvalidInput, match="in the middle"):
            broker._runner.apply(change)
    finally:
        signal.signal(signal.SIGUSR1, before)
    # The lock is free, for others as well.
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(broker.send, "q", b"").result(60)
    call()


def test_a_wake_that_is_interrupted_loses_no_claim() -> None:
    class Interrupted(Waiter):
        def wake(self) -> None:
            raise KeyboardInterrupt

    waiters, waiter = _Waiters(), Interrupted()
    waiters.waiting.append(waiter)
    with pytest.raises(KeyboardInterrupt):
        waiters.wake(1)
    # Whoever tells all of them next finds it.
    assert list(waiters.waiting) == [waiter]


def test_a_refused_sweep_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    with penstock.open("memory:") as broker, monkeypatch.context() as patched:
        broker.create_queue("q", lease_ms=1)
        broker.send("q", b"")
        patched.setattr(broker._store, "sweep", refuse)
        broker.claim("q")
        wait_until(lambda: broker._runner.lost is not None)
        with pytest.raises(StoreFenced):
            broker.queues()


def test_a_sweep_that_can_not_do_what_is_due_tells_it_once_and_waits(
    monkeypatch: pytest.MonkeyPatch, idle_sweeps: list[str]
) -> None:
    clock = ManualClock()
    with penstock.open("memory:", clock=clock, background=False) as broker:
        broker.create_queue("q", done_retention_ms=60_000)
        broker.send("q", b"x")
        broker.ack([broker.claim("q")[0].receipt])
        store: Any = broker._store
        monkeypatch.setattr(store.history, "first_ended_at_ms", lambda *_: 0)
        store.schedule_retention(store.queue("q"))
        commits = store.progress.commits
        for _ in range(3):
            counts = broker.sweep()
            assert (counts.total, counts.next_due_ms) == (0, clock.now_ms() + IDLE_MS)
        assert store.progress.commits == commits
        assert len(idle_sweeps) == 1
        idle_sweeps.clear()
        monkeypatch.undo()
        store.schedule_retention(store.queue("q"))
        clock.advance(60_000)
        assert broker.sweep().removed == 1
