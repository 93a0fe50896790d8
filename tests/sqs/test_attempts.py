"""What receives got is remembered within bounds; what nobody took is given back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock import Message, limits
from penstock.clock import SystemClock
from penstock.server.batcher import Batcher
from penstock.server.http import Request
from penstock.server.security import ANYONE
from penstock.server.sqs import OPERATIONS, ReceiveAttempts, SqsCall, SqsService
from penstock.server.sqs.messages import receive
from penstock.wire.sqs.protocol import SqsEntry, SqsRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.broker.broker import Broker
    from penstock.model import Delivery

HTTP = Request("POST", "/", "", {}, b"", "")


@pytest.fixture
def broker() -> Iterator[Broker]:
    with penstock.open("memory:") as opened:
        opened.create_queue("q.fifo", ordering="fifo", lease_ms=600_000)
        yield opened


def put(broker: Broker, group: str, payload: bytes = b"x") -> None:
    broker.publish([Message(payload, {"queue": "q.fifo"}, group=group)])


def claimed(broker: Broker, count: int, size: int = 10) -> list[Delivery]:
    for number in range(count):
        put(broker, f"{size} {number}", b"x" * size)
    return broker.claim("q.fifo", limit=count)


def service_of(broker: Broker) -> SqsService:
    return SqsService(Batcher(broker, asyncio.get_running_loop()), clock=SystemClock())


def call_of(service: SqsService) -> SqsCall:
    return SqsCall(service, ANYONE, HTTP)


# --- what is remembered ---------------------------------------------------------------------------


def test_bytes_are_bounded_and_the_oldest_go_first(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A key alone has half of it.
    monkeypatch.setattr(limits, "SQS_MAX_RECEIVE_ATTEMPT_BYTES", 60_000)
    attempts = ReceiveAttempts()
    for number, each in enumerate(claimed(broker, 5, size=8_000)):
        attempts.remember("q.fifo", str(number), [each], 0)
        assert attempts.bytes <= 30_000
    assert [len(attempts.find("q.fifo", str(n), 1)) for n in range(5)] == [0, 0, 1, 1, 1]
    attempts.remember("q.fifo", "huge", claimed(broker, 1, size=80_000), 0)
    assert (len(attempts), attempts.bytes) == (0, 0)


def test_number_and_time_are_bounded(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SQS_MAX_RECEIVE_ATTEMPTS", 3)
    attempts = ReceiveAttempts()
    first, second, third, fourth = claimed(broker, 4)
    for name, each in (("a", first), ("b", second), ("c", third)):
        attempts.remember("q.fifo", name, [each], 1_000)
    assert attempts.find("q.fifo", "a", 1_000) == []
    assert attempts.find("q.fifo", "b", 1_000) == [second]
    late_ms = 1_000 + limits.SQS_RECEIVE_ATTEMPT_MS
    assert attempts.find("q.fifo", "c", late_ms) == [third]
    assert attempts.find("q.fifo", "c", late_ms + 1) == []
    attempts.remember("q.fifo", "d", [fourth], late_ms + 1)
    assert len(attempts) == 1


def test_each_key_has_its_own_oldest(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SQS_MAX_RECEIVE_ATTEMPTS", 4)
    attempts = ReceiveAttempts()
    mine, *others = claimed(broker, 9)
    attempts.remember("q.fifo", "mine", [mine], 0, "honest")
    for number, each in enumerate(others):
        attempts.remember("q.fifo", str(number), [each], 0, "hog")
    assert attempts.find("q.fifo", "mine", 0) == [mine]
    assert len(attempts) == 3


def test_an_attempt_that_is_made_anew_replaces_the_other(broker: Broker) -> None:
    attempts = ReceiveAttempts()
    first, second = claimed(broker, 2)
    attempts.remember("q.fifo", "a", [first], 0)
    once = attempts.bytes
    attempts.remember("q.fifo", "a", [second], 0)
    assert attempts.find("q.fifo", "a", 0) == [second]
    assert attempts.bytes == once


async def _received(service: SqsService, attempt: str | None = None, **options: Any) -> list[Any]:
    request = SqsRequest(
        queue_url="q.fifo",
        max_number_of_messages=10,
        receive_request_attempt_id=attempt,
        **options,
    )
    answer = await receive(call_of(service), request)
    return list(answer.get("Messages", []))


def test_what_is_deleted_is_not_received_again(broker: Broker) -> None:
    async def main() -> None:
        service = service_of(broker)
        for number in range(3):
            put(broker, str(number))
        first, *others = [each["ReceiptHandle"] for each in await _received(service, "try")]
        call = call_of(service)
        one = SqsRequest(queue_url="q.fifo", receipt_handle=first)
        await OPERATIONS["DeleteMessage"](call, one)
        assert [each["ReceiptHandle"] for each in await _received(service, "try")] == others
        entries = [SqsEntry(id=str(n), receipt_handle=each) for n, each in enumerate(others)]
        batch = SqsRequest(queue_url="q.fifo", entries=entries)
        await OPERATIONS["DeleteMessageBatch"](call, batch)
        assert await _received(service, "try") == []
        await service.batcher.close()

    asyncio.run(main())


# --- who goes away --------------------------------------------------------------------------------


def test_a_client_that_leaves_in_the_turn_of_its_answer_keeps_nothing(broker: Broker) -> None:
    async def main() -> None:
        service = service_of(broker)
        task = asyncio.create_task(_received(service, "try", wait_time_seconds=20))
        while not service.batcher.parked:
            await asyncio.sleep(0.01)
        answer = service.batcher._answer

        def leave(made: Any, failure: Any) -> None:
            answer(made, failure)
            task.cancel()

        service.batcher._answer = leave  # type: ignore[method-assign]
        await asyncio.to_thread(put, broker, "g")
        with pytest.raises(asyncio.CancelledError):
            await task
        service.batcher._answer = answer  # type: ignore[method-assign]
        await service.batcher.close()

    asyncio.run(main())
    assert broker.stats("q.fifo").available == 1
    assert broker.stats("q.fifo").in_flight == 0


def test_a_client_that_leaves_while_the_past_is_looked_up_keeps_nothing(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        service = service_of(broker)
        put(broker, "g")
        broker.release([broker.claim("q.fifo")[0].receipt], delay_ms=0)
        looking = asyncio.Event()
        never: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def call(_: Any) -> asyncio.Future[Any]:
            looking.set()
            return never

        await service.queues.view("q.fifo", "")
        monkeypatch.setattr(service.batcher, "call", call)
        task = asyncio.create_task(
            _received(service, "try", attribute_names=["ApproximateFirstReceiveTimestamp"])
        )
        await looking.wait()
        assert broker.stats("q.fifo").in_flight == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(service.attempts) == 0
        await service.batcher.close()

    asyncio.run(main())
    assert broker.stats("q.fifo").available == 1
