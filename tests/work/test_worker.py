"""Workers on threads and on a loop: what becomes of messages, leases, limits and stops."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.work.helping import Gate, Spied, fill, reasons, wait_until

import penstock
from penstock import (
    BrokerClosed,
    InvalidInput,
    InvalidQueue,
    ManualClock,
    Message,
    QueueNotFound,
    Retry,
    Settled,
    Worker,
)
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock import Broker, Delivery

MINUTE_MS = 60_000
LONG_MS = 10 * MINUTE_MS


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with penstock.open(f"rocksdb:{tmp_path}/store", durability="relaxed") as made:
        made.create_queue("q", backoff_base_ms=1, backoff_cap_ms=1, max_attempts=50)
        yield made
        assert_clean(made)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def still(clock: ManualClock) -> Iterator[Broker]:
    """Give a broker whose leases end when the test says so."""
    with penstock.open("memory:", clock=clock) as made:
        made.create_queue("q", lease_ms=MINUTE_MS, backoff_base_ms=1, backoff_cap_ms=1)
        yield made


def spied(broker: Broker) -> tuple[Spied, Broker]:
    spy = Spied(broker)
    return spy, cast("Broker", spy)


# --- what becomes of messages ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_returning_acks_and_raising_releases(broker: Broker, kind: str) -> None:
    def decide(delivery: Delivery) -> str:
        if delivery.attempts == 1 and delivery.attributes["n"] == 1:
            raise ValueError("not today")
        if delivery.attempts == 1 and delivery.attributes["n"] == 2:
            raise Retry("busy", delay_ms=3)
        if delivery.attributes["n"] == 3:
            broker.ack([delivery.receipt])
            raise Settled
        return "done"

    async def decide_async(delivery: Delivery) -> str:
        await asyncio.sleep(0)
        return decide(delivery)

    messages = [Message(b"x", {"queue": "q", "n": n}) for n in range(20)]
    ids = broker.publish(messages)
    handler = decide if kind == "plain" else decide_async
    with Worker(broker, "q", handler, consumer="me", wait_ms=20) as worker:
        wait_until(lambda: broker.stats("q").done == 20)
        wait_until(lambda: worker.stats().processed == 19)
    stats = worker.stats()
    assert (stats.failed, stats.released, stats.claimed) == (2, 2, 22)
    assert stats.failed_by_attempt.count == 2
    assert (stats.in_progress, stats.prefetched, stats.unsettled) == (0, 0, 0)
    assert stats.lag_seconds.count == 20
    assert reasons(broker, "q", ids[1])[0] == "ValueError: not today"
    assert reasons(broker, "q", ids[2])[0] == "busy"
    assert [a.consumer for a in broker.attempts("q", ids[3])] == ["me"]


def test_out_of_attempts(broker: Broker) -> None:
    broker.create_queue("once", max_attempts=2, backoff_base_ms=1, backoff_cap_ms=1)
    fill(broker, "once", 3)

    def fails(_: Delivery) -> None:
        raise ValueError("never")

    with Worker(broker, "once", fails, wait_ms=20) as worker:
        wait_until(lambda: worker.stats().exhausted == 3)
    assert worker.stats().released == 6
    assert broker.stats("once").failed == 3


def test_several_queues(broker: Broker) -> None:
    for name in ("a", "b", "c"):
        broker.create_queue(name)
        fill(broker, name, 30)
    seen: dict[str, int] = defaultdict(int)
    lock = threading.Lock()

    def count(delivery: Delivery) -> None:
        with lock:
            seen[delivery.queue] += 1

    with Worker(broker, ["a", "b", "c", "a"], count, wait_ms=20) as worker:
        wait_until(lambda: worker.stats().processed == 90)
    assert seen == {"a": 30, "b": 30, "c": 30}


def test_a_fifo_group_is_worked_on_in_order(broker: Broker) -> None:
    broker.create_queue("f", ordering="fifo", backoff_base_ms=1, backoff_cap_ms=1, max_attempts=100)
    for group in "abc":
        fill(broker, "f", 12, group=group)
    seen: dict[str, list[int]] = defaultdict(list)
    running: dict[str, int] = defaultdict(int)
    most = 0

    def handle(delivery: Delivery) -> None:
        nonlocal most
        running[delivery.group] += 1
        most = max(most, running[delivery.group])
        try:
            if delivery.attempts == 1 and int(delivery.payload) % 4 == 1:
                raise ValueError("once more")
            seen[delivery.group].append(int(delivery.payload))
        finally:
            running[delivery.group] -= 1

    with Worker(broker, "f", handle, concurrency=6, prefetch=20, wait_ms=20) as worker:
        wait_until(lambda: worker.stats().processed == 36)
    assert seen == {group: list(range(12)) for group in "abc"}
    assert most == 1


def test_many_ends_are_one_ack_and_none_comes_early(broker: Broker) -> None:
    gate = Gate()
    spy, watched = spied(broker)
    fill(broker, "q", 40)
    with Worker(watched, "q", gate, concurrency=20, prefetch=20, wait_ms=20) as worker:
        wait_until(lambda: worker.stats().in_progress == 20)
        assert spy.calls.get("ack") is None
        spy.held = {"ack"}
        gate.open.set()
        # The rest gathers while the first ack is under way.
        wait_until(lambda: worker.stats().unsettled == 40)
        spy.held = set()
        wait_until(lambda: worker.stats().processed == 40)
    acks = spy.calls["ack"]
    assert sum(acks) == 40
    assert len(acks) <= 2


def test_middleware_and_results(broker: Broker) -> None:
    notes: list[object] = []

    class Around:
        def after(self, delivery: Delivery, result: object) -> None:
            notes.append(result)

        def on_error(self, delivery: Delivery, error: BaseException) -> None:
            notes.append(type(error))

    def handle(delivery: Delivery) -> int:
        if delivery.attempts == 1:
            raise ValueError("first")
        return 7

    broker.send("q", b"x")
    with Worker(broker, "q", handle, middleware=[Around()], wait_ms=20) as worker:
        wait_until(lambda: worker.stats().processed)
    assert notes == [ValueError, 7]


# --- leases ---------------------------------------------------------------------------------------


def all_until(broker: Broker, deadline_ms: int) -> bool:
    held = broker.browse("q", state="in_flight")
    return all(entry.lease_deadline_ms == deadline_ms for entry in held)


def test_leases_are_kept_while_a_handler_runs_and_while_messages_wait(
    still: Broker, clock: ManualClock
) -> None:
    gate = Gate()
    fill(still, "q", 4)
    with Worker(still, "q", gate, concurrency=1, prefetch=3, clock=clock, wait_ms=0) as worker:
        wait_until(lambda: worker.stats().claimed == 4 and len(gate.begun) == 1)
        for _ in range(9):
            # A third of the lease each time: three whole leases in all.
            now_ms = clock.advance(MINUTE_MS // 3)
            wait_until(partial(all_until, still, now_ms + MINUTE_MS))
        gate.open.set()
        wait_until(lambda: worker.stats().processed == 4)
        stats = worker.stats()
    assert (stats.lost, stats.stale, stats.claimed) == (0, 0, 4)
    assert still.stats("q").lease_expired_total == 0


def test_a_lost_lease(still: Broker, clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    told: list[bool] = []

    def handle(delivery: Delivery) -> None:
        gate(delivery)
        told.append(worker.is_lost(delivery))

    fill(still, "q", 3)
    worker = Worker(still, "q", handle, concurrency=1, prefetch=2, clock=clock, wait_ms=0)
    with worker:
        wait_until(lambda: worker.stats().claimed == 3 and len(gate.begun) == 1)
        still.purge("q", states=["in_flight"])
        clock.advance(MINUTE_MS // 3)
        wait_until(lambda: worker.stats().lost == 3)
        gate.open.set()
        wait_until(lambda: told == [True])
        still.send("q", b"next")
        wait_until(lambda: (clock.advance(100), worker.stats().processed == 1)[1])
    # Neither what was lost while it ran was acked, nor was begun what was lost before.
    assert gate.begun == [b"0", b"next"]
    assert told == [True, False]
    assert worker.stats().stale == 0
    assert "the lease of message" in caplog.text


def test_what_nobody_could_extend_is_not_begun(still: Broker, clock: ManualClock) -> None:
    gate = Gate()
    spy, watched = spied(still)
    fill(still, "q", 2)
    with Worker(watched, "q", gate, concurrency=1, prefetch=2, clock=clock, wait_ms=0) as worker:
        wait_until(lambda: worker.stats().claimed == 2 and len(gate.begun) == 1)
        spy.failing = {"extend", "claim"}
        clock.advance(MINUTE_MS)
        wait_until(lambda: worker.stats().lost == 2)
        gate.open.set()
        wait_until(lambda: worker.stats().in_progress == 0)
        assert len(gate.begun) == 1
        spy.failing = set()
        clock.advance(MINUTE_MS)
        wait_until(lambda: (clock.advance(100), worker.stats().processed == 2)[1])
    assert still.stats("q").done == 2


def test_what_may_be_lost_is_not_begun_while_nobody_knows(
    still: Broker, clock: ManualClock
) -> None:
    gate = Gate()
    spy, watched = spied(still)
    fill(still, "q", 2)
    with Worker(watched, "q", gate, concurrency=1, prefetch=1, clock=clock, wait_ms=0) as worker:
        wait_until(lambda: worker.stats().claimed == 2 and gate.begun)
        spy.held = {"extend", "claim"}
        clock.advance(MINUTE_MS // 3)
        wait_until(lambda: "extend" in spy.calls)
        clock.advance(MINUTE_MS)
        gate.open.set()
        wait_until(lambda: worker.stats().lost == 1)
        assert gate.begun == [b"0"]
        spy.held = set()
        wait_until(lambda: (clock.advance(100), worker.stats().processed == 2)[1])
    assert worker.stats().stale == 1


def test_an_ack_that_comes_too_late_is_refused(still: Broker, clock: ManualClock) -> None:
    spy, watched = spied(still)
    still.send("q", b"x")
    spy.failing = {"ack", "extend"}
    seen: list[int] = []
    with Worker(watched, "q", lambda d: seen.append(d.attempts), clock=clock, wait_ms=0) as worker:
        wait_until(lambda: "ack" in spy.calls)
        clock.advance(2 * MINUTE_MS)
        spy.failing = set()
        wait_until(lambda: (clock.advance(1_000), worker.stats().processed == 1)[1])
    assert (worker.stats().stale, seen) == (1, [1, 2])


# --- time limits ----------------------------------------------------------------------------------


def test_a_thread_over_its_limit_loses_its_message(still: Broker, clock: ManualClock) -> None:
    gate = Gate()

    def handle(delivery: Delivery) -> None:
        if delivery.attempts == 1:
            gate(delivery)

    (message_id,) = fill(still, "q", 1)
    options: dict[str, Any] = {
        "concurrency": 2,
        "time_limit_ms": 10_000,
        "clock": clock,
        "wait_ms": 0,
    }
    with Worker(still, "q", handle, **options) as worker:
        wait_until(lambda: gate.begun)
        clock.advance(10_000)
        wait_until(lambda: (clock.advance(1), worker.stats().processed == 1)[1])
        assert worker.stats().in_progress == 1
        gate.open.set()
        wait_until(lambda: worker.stats().late == 1)
        assert worker.stats().in_progress == 0
    assert reasons(still, "q", message_id) == ["over the time limit of 10000 ms", ""]
    stats = worker.stats()
    assert (stats.failed, stats.released, stats.stale) == (1, 1, 0)


def test_a_coroutine_over_its_limit_is_cancelled(broker: Broker) -> None:
    ended: list[int] = []

    async def handle(delivery: Delivery) -> None:
        try:
            if delivery.attempts == 1:
                await asyncio.Event().wait()
        finally:
            ended.append(delivery.attempts)

    (message_id,) = fill(broker, "q", 1)
    with Worker(broker, "q", handle, time_limit_ms=200, wait_ms=20) as worker:
        wait_until(lambda: worker.stats().processed == 1)
    assert ended[0] == 1
    assert reasons(broker, "q", message_id)[0] == "over the time limit of 200 ms"
    assert worker.stats().late == 0


# --- stopping -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_stop_finishes_what_runs_and_gives_back_the_rest(broker: Broker, kind: str) -> None:
    gate = Gate()

    async def wait(delivery: Delivery) -> None:
        gate.begun.append(delivery.payload)
        await asyncio.to_thread(gate.open.wait)

    ids = fill(broker, "q", 6)
    handler = gate if kind == "plain" else wait
    with Worker(broker, "q", handler, concurrency=1, prefetch=5, wait_ms=20) as worker:
        wait_until(lambda: worker.stats().claimed == 6 and gate.begun)
        worker.stop()
        worker.stop()
        # What has not begun is back before what runs has ended.
        wait_until(lambda: broker.stats("q").available == 5)
        assert not worker.join(0)
        gate.open.set()
    assert broker.stats("q").done == 1
    assert gate.begun == [b"0"]
    # Nobody has seen it, and so that was no attempt.
    assert reasons(broker, "q", ids[1]) == []
    assert (worker.stats().processed, worker.stats().released) == (1, 5)


def test_a_stop_uses_up_no_attempt_of_what_has_not_begun(broker: Broker) -> None:
    gate = Gate()
    broker.create_queue("once", max_attempts=1)
    fill(broker, "once", 3)
    with Worker(broker, "once", gate, concurrency=1, prefetch=2, wait_ms=20) as worker:
        wait_until(lambda: worker.stats().claimed == 3 and gate.begun)
        worker.stop()
        wait_until(lambda: broker.stats("once").available == 2)
        gate.open.set()
    stats = broker.stats("once")
    assert (stats.done, stats.available, stats.failed) == (1, 2, 0)
    assert {each.attempts for each in broker.claim("once", limit=2)} == {1}


@pytest.mark.parametrize("how", ["drain", "at once"])
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_what_does_not_end_is_cut_off(broker: Broker, kind: str, how: str) -> None:
    gate = Gate()
    cancelled: list[bool] = []

    async def wait(delivery: Delivery) -> None:
        gate.begun.append(delivery.payload)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    ids = fill(broker, "q", 2)
    handler = gate if kind == "plain" else wait
    drain_ms = 10 if how == "drain" else 3_600_000
    worker = Worker(
        broker, "q", handler, concurrency=1, prefetch=1, wait_ms=20, drain_ms=drain_ms
    ).start()
    wait_until(lambda: worker.stats().claimed == 2 and gate.begun)
    worker.stop()
    if how == "at once":
        worker.stop(at_once=True)
    wait_until(lambda: worker.join(100))
    assert reasons(broker, "q", ids[0]) == ["cut off: the worker was stopped"]
    wait_until(lambda: broker.stats("q").available == 2)
    assert cancelled == ([True] if kind == "async" else [])
    assert worker.stats().failed == 1
    # A thread that returns now has nothing to say any more.
    gate.open.set()
    wait_until(lambda: worker.stats().in_progress == 0)
    assert broker.stats("q").done == 0


@pytest.mark.parametrize("clocks", ["real", "store's manual", "both manual"])
def test_a_stop_ends_the_claim_that_waits(
    broker: Broker, still: Broker, clock: ManualClock, clocks: str
) -> None:
    store = broker if clocks == "real" else still
    own = clock if clocks == "both manual" else None
    fill(store, "q", 1)
    worker = Worker(store, "q", lambda _: None, wait_ms=LONG_MS, clock=own).start()
    wait_until(lambda: worker.stats().processed == 1)
    # Another that waits goes on.
    others: list[Delivery] = []
    other = threading.Thread(
        target=lambda: others.extend(store.claim("q", wait_ms=LONG_MS)), daemon=True
    )
    other.start()
    wait_until(lambda: store._runner._waiters)
    worker.stop()
    wait_until(lambda: worker.join(100))
    fill(store, "q", 1)
    other.join()
    assert len(others) == 1


def test_a_worker_stops_itself_from_a_handler(broker: Broker) -> None:
    fill(broker, "q", 1)
    worker = Worker(broker, "q", lambda _: worker.stop(), wait_ms=20)
    worker.run()
    assert broker.stats("q").done == 1
    with pytest.raises(InvalidInput, match="runs once"):
        worker.start()


def test_a_worker_of_its_own_store_closes_it(tmp_path: Path) -> None:
    url = f"rocksdb:{tmp_path}/store"
    with penstock.open(url) as broker:
        broker.create_queue("q")
        fill(broker, "q", 5)
    with Worker(url, "q", lambda _: None, wait_ms=20) as worker:
        wait_until(lambda: worker.stats().processed == 5)
    with penstock.open(url) as broker:
        assert broker.stats("q").done == 5


# --- trouble --------------------------------------------------------------------------------------


def test_a_store_that_does_not_answer_for_a_while(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    spy, watched = spied(broker)
    fill(broker, "q", 10)
    spy.failing = {"ack"}
    with Worker(watched, "q", lambda _: None, wait_ms=20) as worker:
        wait_until(lambda: len(spy.calls.get("ack", [])) >= 3)
        spy.failing = {"ack", "claim"}
        tried = len(spy.calls["claim"])
        wait_until(lambda: len(spy.calls["claim"]) >= tried + 3)
        assert set(worker.stats().troubles) == {"settling", "claiming from q"}
        spy.failing = set()
        wait_until(lambda: worker.stats().processed == 10)
        wait_until(lambda: not worker.stats().troubles)
    assert worker.stats().stale == 0
    said = [record.getMessage() for record in caplog.records]
    for activity in ("settling", "claiming from q"):
        about = [line for line in said if line.startswith(f"{activity} ")]
        assert len(about) == 2, about
        assert "does not work" in about[0]
        assert "works again" in about[1]


def test_no_more_is_claimed_than_can_be_settled(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.limits.MAX_UNSETTLED", 5)
    spy, watched = spied(broker)
    fill(broker, "q", 100)
    spy.held = {"ack"}
    with Worker(watched, "q", lambda _: None, wait_ms=20) as worker:
        wait_until(lambda: worker.stats().unsettled == worker.stats().claimed >= 5)
        threading.Event().wait(0.1)
        assert worker.stats().claimed < 5 + 8
        spy.held = set()
        wait_until(lambda: worker.stats().processed == 100)


def test_a_broker_that_was_closed_ends_the_worker(tmp_path: Path) -> None:
    with penstock.open("memory:") as broker:
        broker.create_queue("q")
        worker = Worker(broker, "q", lambda _: None, wait_ms=20).start()
    with pytest.raises(BrokerClosed):
        wait_until(lambda: worker.join(100))


def test_what_is_wrong_is_said_at_the_start(broker: Broker) -> None:
    with pytest.raises(QueueNotFound, match="nowhere"):
        Worker(broker, ["q", "nowhere"], lambda _: None).start()
    with pytest.raises(InvalidInput, match="at least one queue"):
        Worker(broker, [], lambda _: None)
    with pytest.raises(InvalidQueue):
        Worker(broker, "no such/name", lambda _: None)
    with pytest.raises(InvalidInput, match="concurrency"):
        Worker(broker, "q", lambda _: None, concurrency=0)
    with pytest.raises(InvalidInput, match="MODULE:FUNCTION"):
        Worker(broker, "q", "nothing")
    idle = Worker(broker, "q", lambda _: None)
    assert idle.stats().claimed == 0
    with pytest.raises(InvalidInput, match="not been started"):
        idle.is_lost(cast("Delivery", None))


def test_a_claim_asks_for_dequeue_max_at_the_most(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    real = broker.claim

    def claim(queue: str, *, limit: int, **options: Any) -> list[Delivery]:
        asked.append(limit)
        return real(queue, limit=limit, **options)

    monkeypatch.setattr(broker, "claim", claim)
    fill(broker, "q", 30)
    with Worker(broker, "q", lambda _: None, dequeue_max=3, wait_ms=20) as worker:
        wait_until(lambda: worker.stats().processed == 30)
    assert set(asked) <= {1, 2, 3}
    assert 3 in asked
