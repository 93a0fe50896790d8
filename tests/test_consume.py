"""Consumers of an embedded broker."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.waiting import wait_until

import penstock
from penstock import BrokerClosed, ManualClock, Message, OutcomeStatus, QueueNotFound
from penstock.consuming import Settlement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock import Broker


@pytest.fixture
def broker() -> Iterator[Broker]:
    with penstock.open("memory:") as made:
        made.create_queue("q")
        yield made


def fill(broker: Broker, count: int) -> list[int]:
    return broker.publish([Message(b"%d" % n, {"queue": "q"}) for n in range(count)])


def test_messages_come_in_order_and_are_acked(broker: Broker) -> None:
    ids = fill(broker, 500)
    got = []
    with broker.consume("q", wait_ms=0) as consumer:
        for delivery in consumer:
            assert isinstance(delivery, penstock.Delivery)
            got.append(delivery.message_id)
            delivery.ack()
    assert got == ids
    assert broker.stats("q").done == 500


def test_acks_are_durable_when_the_broker_is_closed_after_the_loop(tmp_path: Path) -> None:
    with penstock.open(f"rocksdb:{tmp_path}/store") as broker:
        broker.create_queue("q")
        fill(broker, 50)
        for delivery in broker.consume("q", wait_ms=0):
            delivery.ack()
    with penstock.open(f"rocksdb:{tmp_path}/store") as broker:
        assert broker.stats("q").done == 50


def test_a_broker_that_is_closed_ends_its_consumers(broker: Broker) -> None:
    fill(broker, 3)
    consumer = broker.consume("q")
    settlement = next(consumer).ack()
    broker.close()
    assert settlement.result().status is OutcomeStatus.DONE
    with pytest.raises((BrokerClosed, StopIteration)):
        next(consumer)


def test_messages_that_were_not_taken_are_given_back(broker: Broker) -> None:
    fill(broker, 10)
    for delivery in broker.consume("q"):
        assert delivery.ack().result()
        break
    wait_until(lambda: broker.stats("q").available == 9)
    stats = broker.stats("q")
    assert (stats.in_flight, stats.done) == (0, 1)
    assert {each.attempts for each in broker.claim("q", limit=10)} == {1}


def test_a_consumer_waits_for_messages(broker: Broker) -> None:
    consumer = broker.consume("q")
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(next(consumer).payload))
    thread.start()
    broker.send("q", b"late")
    thread.join()
    assert got == [b"late"]


def test_a_consumer_that_is_closed_ends_threads_that_wait(broker: Broker) -> None:
    consumer = broker.consume("q")
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.extend(consumer))
    thread.start()
    consumer.close()
    thread.join()
    assert got == []


def test_releases_refusals_and_extensions(broker: Broker) -> None:
    told: list[penstock.Outcome] = []
    fill(broker, 3)
    with broker.consume("q", wait_ms=0, on_refused=told.append) as consumer:
        held = [next(consumer) for _ in range(3)]
        assert held[0].release(delay_ms=60_000, reason="later").result()
        assert held[1].extend(lease_ms=60_000).result().status is OutcomeStatus.EXTENDED
        broker.ack([held[2].receipt])
        held[2].ack()
        assert [each.receipt for each in consumer.flush()] == [held[2].receipt]
        assert len(told) == 1
    assert broker.stats("q").delayed == 1


def test_messages_that_waited_for_half_of_their_lease_are_given_back() -> None:
    clock = ManualClock()
    with penstock.open("memory:", clock=clock) as broker:
        broker.create_queue("q", lease_ms=10_000)
        fill(broker, 16)
        consumer = broker.consume("q", wait_ms=0)
        next(consumer)
        clock.advance(6_000)
        # Claimed again, and without an attempt.
        assert next(consumer).attempts == 1
        assert broker.stats("q").released_total == 15
        assert broker.stats("q").in_flight == 1 + 8


def test_threads_share_a_consumer(broker: Broker) -> None:
    fill(broker, 300)
    consumer = broker.consume("q", wait_ms=0)
    got: list[int] = []

    def work() -> None:
        for delivery in consumer:
            got.append(delivery.message_id)
            delivery.ack()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == len(set(got)) == 300
    wait_until(lambda: broker.stats("q").done == 300)


def test_an_unknown_queue_is_an_error(broker: Broker) -> None:
    with pytest.raises(QueueNotFound):
        next(broker.consume("nope"))
    with pytest.raises(penstock.InvalidInput):
        broker.consume("q", prefetch=0)


# --- threads and the end --------------------------------------------------------------------------


def on_a_thread(work: Callable[[], object]) -> None:
    """Do something on another thread, and wait for it."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def then_once(broker: Broker, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    """Let another thread do something just after the next release is durable."""
    release = broker.release

    def release_then(*args: Any, **options: Any) -> list[penstock.Outcome]:
        monkeypatch.setattr(broker, "release", release)
        outcomes = release(*args, **options)
        on_a_thread(work)
        return outcomes

    monkeypatch.setattr(broker, "release", release_then)


def test_a_consumer_hands_out_nothing_that_it_gives_back(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(broker, 16)
    consumer = broker.consume("q")
    next(consumer)
    got: list[object] = []
    then_once(broker, monkeypatch, lambda: got.extend(consumer))
    consumer.close()
    assert got == []
    assert broker.stats("q").available == 15


def test_a_batch_that_another_thread_has_claimed_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock()
    with penstock.open("memory:", clock=clock) as broker:
        broker.create_queue("q", lease_ms=10_000)
        ids = fill(broker, 40)
        consumer = broker.consume("q", wait_ms=0)
        got = [next(consumer).message_id]
        clock.advance(6_000)
        then_once(broker, monkeypatch, lambda: got.append(next(consumer).message_id))
        got += [each.message_id for each in consumer]
        assert sorted(got) == ids


def test_the_garbage_collector_may_end_a_consumer_while_the_broker_is_locked(
    broker: Broker,
) -> None:
    fill(broker, 16)
    holder = SimpleNamespace(consumer=broker.consume("q"))
    holder.holder = holder
    next(holder.consumer).ack()
    del holder
    collected = threading.Event()

    def collect() -> None:
        with broker._runner._lock:
            gc.collect()
            collected.set()

    threading.Thread(target=collect, daemon=True).start()
    assert collected.wait(30), "the collector waits for the broker that its thread has locked"
    wait_until(lambda: (broker.stats("q").available, broker.stats("q").done) == (15, 1))


def test_a_consumer_that_is_closed_ends_the_wait_for_a_clock_that_stands_still() -> None:
    with penstock.open("memory:", clock=ManualClock()) as still:
        still.create_queue("q")
        consumer = still.consume("q")
        thread = threading.Thread(target=lambda: list(consumer), daemon=True)
        thread.start()
        wait_until(lambda: still._runner._waiters)
        consumer.close()
        wait_until(lambda: not thread.is_alive())


def test_a_consumer_that_is_closed_ends_long_waits(broker: Broker) -> None:
    consumer = broker.consume("q", wait_ms=penstock.limits.MAX_WAIT_MS)
    thread = threading.Thread(target=lambda: list(consumer), daemon=True)
    thread.start()
    consumer.close()
    thread.join(30)
    assert not thread.is_alive()


def test_messages_of_a_closed_consumer_are_settled_before_the_broker_is_closed(
    tmp_path: Path,
) -> None:
    with penstock.open(f"rocksdb:{tmp_path}/store") as broker:
        broker.create_queue("q")
        fill(broker, 5)
        with broker.consume("q") as consumer:
            held = [next(consumer) for _ in range(5)]
        settlements = [each.ack() for each in held]
    assert [each.result().status for each in settlements] == [OutcomeStatus.DONE] * 5


# --- settlements ----------------------------------------------------------------------------------


def test_wrong_arguments_are_errors_of_their_own_caller(broker: Broker) -> None:
    fill(broker, 4)
    consumer = broker.consume("q", wait_ms=0)
    held = [next(consumer) for _ in range(4)]
    settlement = held[0].ack()
    with pytest.raises(penstock.InvalidInput, match="delay_ms"):
        held[1].release(delay_ms=-5)
    with pytest.raises(penstock.InvalidInput, match="lease_ms"):
        held[1].extend(lease_ms=None)  # type: ignore[arg-type]
    # Any object may be a reason, as for the broker's own release.
    assert held[2].release(reason=["x"]).result()  # type: ignore[arg-type]
    assert settlement.result()
    assert broker.attempts("q", held[2].message_id)[0].reason == "['x']"


def test_each_ack_of_a_message_has_its_own_outcome(broker: Broker) -> None:
    fill(broker, 2)
    consumer = broker.consume("q", wait_ms=0)
    first, second = next(consumer), next(consumer)
    settlements = [first.ack(), first.ack(), second.ack()]
    statuses = [each.result().status for each in settlements]
    assert statuses == [OutcomeStatus.DONE, OutcomeStatus.STALE, OutcomeStatus.DONE]


def test_refused_extensions_are_told(broker: Broker) -> None:
    told: list[penstock.Outcome] = []
    fill(broker, 1)
    with broker.consume("q", wait_ms=0, on_refused=told.append) as consumer:
        delivery = next(consumer)
        broker.ack([delivery.receipt])
        outcome = delivery.extend(lease_ms=1_000).result()
        assert outcome.status is OutcomeStatus.STALE
        assert told == consumer.flush() == [outcome]


def test_a_flush_while_the_thread_ends_is_answered(broker: Broker) -> None:
    consumer: Any = broker.consume("q", wait_ms=0)
    settler = consumer.settler

    class Flushing(deque[Any]):
        def __bool__(self) -> bool:
            """Begin one more flush, when the thread has answered all others."""
            has_some = len(self) > 0
            if settler._closed and not has_some and not flush.ident:
                flush.start()
                # As far as it comes meanwhile.
                flush.join(0.1)
            return has_some

    flush = threading.Thread(target=settler.flush, daemon=True)
    settler._flushing = Flushing()
    settler.start()
    settler.close(deque())
    wait_until(lambda: flush.ident)
    flush.join(60)
    assert not flush.is_alive()


def test_a_settlement_may_outlive_the_loop_that_waited_for_it() -> None:
    settlement = Settlement("r", lambda: None)

    async def give_up() -> None:
        async def wait() -> None:
            await settlement

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait(), 0.001)

    asyncio.run(give_up())
    settlement.finish(penstock.Outcome("r", OutcomeStatus.DONE))
    assert settlement.result()
