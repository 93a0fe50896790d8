"""What a worker holds, and for how long: nothing is kept from others that it can't work on."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, cast

import pytest
from tests.work.helping import Gate, Spied, fill, reasons, wait_until

import penstock
from penstock import (
    BrokerClosed,
    Delivery,
    InvalidInput,
    InvalidUrl,
    ManualClock,
    NotAllowed,
    QueueNotFound,
    Worker,
)
from penstock.server import running
from penstock.wire.native import Bye, Encoder
from penstock.worker.leases import (
    MAX_RELEASES,
    READ_SETTINGS_MS,
    Batch,
    Claimer,
    Heartbeat,
    Settler,
)
from penstock.worker.outcome import ACK, Action, Settlement
from penstock.worker.state import WorkerSettings, WorkerState
from penstock.worker.stats import WorkerCounters
from penstock.worker.worker import is_final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock import Broker

MINUTE_MS = 60_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def broker(clock: ManualClock) -> Iterator[Broker]:
    with penstock.open("memory:", clock=clock) as made:
        made.create_queue("q", lease_ms=MINUTE_MS, backoff_base_ms=1, backoff_cap_ms=1)
        yield made


def delivery(number: int, attempts: int = 1) -> Delivery:
    return Delivery(number, "q", b"x", {}, "", 0, attempts, 1_000, f"receipt-{number}", 0)


# --- leases ---------------------------------------------------------------------------------------


def test_what_was_lost_is_kept_no_more_by_an_answer_that_comes_late(
    broker: Broker, clock: ManualClock
) -> None:
    gate = Gate()
    spy = Spied(broker)
    fill(broker, "q", 2)
    watched = cast("Broker", spy)
    with Worker(watched, "q", gate, concurrency=1, prefetch=1, clock=clock, wait_ms=0) as worker:
        wait_until(lambda: worker.stats().claimed == 2 and gate.begun)
        spy.held = {"extend", "claim"}
        clock.advance(MINUTE_MS // 3)
        wait_until(lambda: "extend" in spy.calls)
        # The worker gives up on them a little earlier than the store does.
        clock.advance(MINUTE_MS // 3 * 2 - MINUTE_MS // 20)
        gate.open.set()
        wait_until(lambda: worker.stats().lost == 1)
        spy.held = {"claim"}
        wait_until(lambda: not worker._heartbeat._lease_of)
        spy.held = set()
        wait_until(lambda: (clock.advance(1_000), worker.stats().processed == 2)[1])
    assert broker.stats("q").done == 2


# --- messages that no slot can take ---------------------------------------------------------------


def test_threads_that_hang_do_not_hold_what_waits(
    broker: Broker, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    ids = fill(broker, "q", 3)
    worker = Worker(
        broker,
        "q",
        gate,
        concurrency=1,
        prefetch=2,
        time_limit_ms=10_000,
        clock=clock,
        wait_ms=0,
    )
    with worker:
        wait_until(lambda: worker.stats().claimed == 3 and gate.begun)
        clock.advance(10_000)
        wait_until(lambda: worker.stats().released == 3)
        assert worker.stats().prefetched == 0
        assert reasons(broker, "q", ids[1]) == []
        assert "no handler is free" in caplog.text
        claimed = worker.stats().claimed
        for _ in range(20):
            clock.advance(1_000)
            threading.Event().wait(0.005)
        assert worker.stats().claimed == claimed
        wait_until(lambda: broker.stats("q").available == 3)
        gate.open.set()
        wait_until(lambda: (clock.advance(100), worker.stats().processed == 3)[1])
    assert worker.stats().late == 1


# --- settling -------------------------------------------------------------------------------------


def settler_of(broker: Broker, clock: ManualClock) -> Settler:
    counters = WorkerCounters(clock, lambda _: None)
    return Settler(broker, clock, counters, Heartbeat(broker, clock, counters))


def test_a_stop_does_not_wait_for_a_pause_to_end(broker: Broker, clock: ManualClock) -> None:
    spy = Spied(broker)
    spy.failing = {"ack"}
    fill(broker, "q", 1)
    (claimed,) = broker.claim("q")
    settler = settler_of(cast("Broker", spy), clock)
    settler.start()
    settler.put(ACK, [claimed.receipt], hurry=True)
    # After so many failures a pause is longer than what a stop has for settling.
    wait_until(lambda: (clock.advance(1_000), len(spy.calls.get("ack", [])) >= 8)[1])
    tried = len(spy.calls["ack"])
    left: list[int] = []
    stopping = threading.Thread(target=lambda: left.append(settler.finish(5_000)))
    stopping.start()
    wait_until(lambda: settler._stopping)
    # Tried again every now and then, not just once.
    wait_until(lambda: (clock.advance(1), len(spy.calls["ack"]) >= tried + 2)[1])
    spy.failing = set()
    for _ in range(300):
        clock.advance(1)
    wait_until(lambda: not stopping.is_alive())
    assert left == [0]
    assert broker.stats("q").done == 1


def test_a_connection_that_can_not_be_made_drops_no_settlement(
    broker: Broker, clock: ManualClock
) -> None:
    spy = Spied(broker)
    spy.failing, spy.error = (
        {"ack"},
        InvalidUrl("too many connections"),
    )
    fill(broker, "q", 1)
    (claimed,) = broker.claim("q")
    settler = settler_of(cast("Broker", spy), clock)
    settler.start()
    settler.put(ACK, [claimed.receipt], hurry=True)
    wait_until(lambda: (clock.advance(1_000), len(spy.calls.get("ack", [])) >= 3)[1])
    spy.failing = set()
    wait_until(lambda: (clock.advance(1_000), broker.stats("q").done)[1])
    assert settler.finish(5_000) == 0


def test_acks_do_not_wait_for_releases_of_many_kinds(broker: Broker, clock: ManualClock) -> None:
    settler = settler_of(broker, clock)
    for n in range(MAX_RELEASES + 3):
        release = Settlement(Action.RELEASE, reason=f"reason {n}")
        settler.put(release, [f"r{n}"], hurry=False)
    settler.put(ACK, ["a"], hurry=False)
    first = settler.take()
    assert first[0] == Batch(Action.ACK, None, "", ["a"])
    assert [batch.reason for batch in first[1:]] == [f"reason {n}" for n in range(MAX_RELEASES)]
    settler.put(ACK, ["b"], hurry=False)
    second = settler.take()
    assert [batch.receipts[0] for batch in second] == [
        "b",
        *(f"r{MAX_RELEASES + n}" for n in range(3)),
    ]
    assert settler.take() == []


# --- clients --------------------------------------------------------------------------------------


def test_a_client_that_was_refused_for_good_ends_the_worker() -> None:
    with running("memory:", native="127.0.0.1:0") as server:
        with penstock.connect(server.location("native")) as client:
            client.create_queue("q")
            worker = Worker(client, "q", lambda _: None, wait_ms=20).start()
            assert not client.closed
            bye = Encoder().frame(Bye("NotAllowed", "the key was removed", final=True))
            client._loop.call_soon_threadsafe(client._transport.data_received, bye)
            with pytest.raises(NotAllowed, match="the key was removed"):
                wait_until(lambda: worker.join(100))
            assert is_final(NotAllowed("x"), client)
        with pytest.raises(BrokerClosed):
            client.queue("q")


# --- FIFO queues ----------------------------------------------------------------------------------


def test_a_time_limit_of_threads_is_refused_on_a_fifo_queue(broker: Broker) -> None:
    async def waits(_: Delivery) -> None:
        await asyncio.sleep(0)

    broker.create_queue("ordered", ordering="fifo")
    queues = ["q", "ordered"]
    with pytest.raises(InvalidInput, match=r"'ordered' is FIFO.*time limit"):
        Worker(broker, queues, lambda _: None, time_limit_ms=1_000).start()
    with Worker(broker, queues, waits, time_limit_ms=1_000, wait_ms=0):
        pass
    with Worker(broker, "q", lambda _: None, time_limit_ms=1_000, wait_ms=0):
        pass


# --- beginning and ending -------------------------------------------------------------------------


def test_join_of_a_worker_that_does_not_run(broker: Broker) -> None:
    worker = Worker(broker, "later", lambda _: None, wait_ms=0)
    with pytest.raises(InvalidInput, match="not been started"):
        worker.join(0)
    with pytest.raises(QueueNotFound):
        worker.start()
    assert worker.join(0)
    broker.create_queue("later")
    with worker:
        assert not worker.join(0)
    assert worker.join(0)


def test_threads_that_can_not_be_started(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(broker, "q", lambda _: None, wait_ms=0)

    def full(_: object) -> None:
        raise RuntimeError("can't start new thread")

    before = set(threading.enumerate())
    monkeypatch.setattr("penstock.worker.leases.Claimer.start", full)
    with pytest.raises(RuntimeError, match="new thread"):
        worker.start()
    assert worker.join(0)
    wait_until(lambda: not any("work" in t.name for t in set(threading.enumerate()) - before))


def test_a_queue_is_looked_at_again(
    broker: Broker, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    counters = WorkerCounters(clock, lambda _: None)
    heartbeat = Heartbeat(broker, clock, counters)

    def made(lease_ms: int | None = None, *, fifo: bool = True) -> Claimer:
        state = WorkerState(
            WorkerSettings(print, lease_ms=lease_ms),
            1,
            clock=clock,
            counters=counters,
            heartbeat=heartbeat,
            settler=Settler(broker, clock, counters, heartbeat),
            on_change=lambda: None,
        )
        return Claimer(broker, "q", state, fifo=fifo)

    claimer = made()
    assert claimer.lease_ms == MINUTE_MS
    broker.update_queue("q", lease_ms=1_000)
    claimer.claim(1)
    assert claimer.lease_ms == MINUTE_MS
    clock.advance(READ_SETTINGS_MS)
    claimer.claim(1)
    assert claimer.lease_ms == 1_000
    kept = made(lease_ms=7_000)
    strict = made(fifo=False)
    broker.delete_queue("q")
    for each in (claimer, kept, strict):
        with pytest.raises(QueueNotFound):
            each.claim(1)
    broker.create_queue("q", ordering="fifo")
    fill(broker, "q", 3)
    assert len(claimer.claim(10)) == 1
    assert kept.lease_ms == 7_000
    with pytest.raises(InvalidInput, match="is FIFO"):
        strict.claim(10)
