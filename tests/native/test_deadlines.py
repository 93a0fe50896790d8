"""Requests that a server can't answer in the time that their clients have: a store that hangs."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError
from tests.native.serving import Raw, Served
from tests.sqs.serving import client_of, serving
from tests.waiting import wait_until

import penstock
from penstock import Message, ServerUnreachable
from penstock.broker.requests import Publish
from penstock.server.batcher import LOOK_THREADS, Batcher
from penstock.wire import native as wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock import Broker
    from penstock.client import Client


class Hanging:
    """Publishes of a broker that hang until they are let go on."""

    def __init__(self, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
        publish = broker._store.publish
        self.going_on, self.begun = threading.Event(), 0

        def hang(*arguments: Any, **options: Any) -> list[int]:
            self.begun += 1
            assert self.going_on.wait(60)
            return publish(*arguments, **options)

        monkeypatch.setattr(broker._store, "publish", hang)


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have changes made on a thread, as those of a store on another machine are."""
    monkeypatch.setattr("penstock.server.batcher.FAR", frozenset({"indexed", "buckets"}))


@pytest.fixture
def broker(far: None) -> Iterator[Broker]:
    with penstock.open("memory:") as opened:
        opened.create_queue("q")
        yield opened


def hasty(served: Served, monkeypatch: pytest.MonkeyPatch) -> Client:
    """Return a client that wants answers within 0.3 s, though it waits for longer itself."""
    monkeypatch.setattr("penstock.client.connection.ANSWER_SHARE", 0.005)
    return penstock.connect(served.url, patience_ms=60_000)


def test_a_request_is_answered_in_its_clients_time(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = Hanging(broker, monkeypatch)
    with Served(broker) as served, hasty(served, monkeypatch) as client:
        try:
            with pytest.raises(ServerUnreachable, match=r"Publish was .* it may or may not have"):
                client.send("q", b"begun")
            with pytest.raises(ServerUnreachable, match=r"within 0\.3 s: it was not begun"):
                client.send("q", b"not begun")
            # What a thread has begun waits there for its turn; the last ones have none.
            said = set()
            for _ in range(6):
                with pytest.raises(ServerUnreachable) as failed:
                    client.stats("q")
                said.add(str(failed.value).rpartition(": ")[2])
            assert said == {"it may or may not have been done", "it was not begun"}
            assert client.ping()
        finally:
            hanging.going_on.set()
        broker.send("q", b"after")
        assert hanging.begun == 2
        assert [each.payload for each in broker.claim("q", limit=9)] == [b"begun", b"after"]


def test_nothing_is_kept_of_requests_whose_clients_wait_no_longer(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = Hanging(broker, monkeypatch)

    async def story() -> None:
        batcher = Batcher(broker, asyncio.get_running_loop())
        begun = batcher.publish([Message(b"begun", {"queue": "q"})])
        await asyncio.to_thread(wait_until, lambda: hanging.begun)
        late = [batcher.publish([Message(b"x" * 1_000, {"queue": "q"})]) for _ in range(100)]
        looks = [lambda broker: broker.stats("q") for _ in range(50)]
        known = [weakref.ref(each) for each in looks]
        for each in [batcher.call(look) for look in looks]:
            batcher.withdraw(each)
        looks.clear()
        for each in late[:50]:
            assert batcher.withdraw(each)
        for each in late[50:]:
            each.cancel()
        await asyncio.sleep(0)
        # Neither counted nor held, long before the store has its turn at them.
        assert batcher._under_way == 1
        assert not [each for each in gc.get_objects() if type(each) is Publish and not each.answer
                    and each.messages[0].payload != b"begun"]  # fmt: skip
        assert sum(each() is not None for each in known) <= LOOK_THREADS
        hanging.going_on.set()
        assert len(await begun) == 1
        await batcher.close()

    asyncio.run(story())
    assert hanging.begun == 1


def test_what_was_claimed_for_who_waits_no_longer_is_given_back(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.send("q", b"x")
    hanging = Hanging(broker, monkeypatch)
    claim = broker._store.claim
    monkeypatch.setattr(
        broker._store, "claim", lambda *each: hanging.going_on.wait(60) and claim(*each)
    )
    with Served(broker) as served, hasty(served, monkeypatch) as client:
        try:
            with pytest.raises(ServerUnreachable, match="Claim"):
                client.claim("q")
        finally:
            hanging.going_on.set()
        wait_until(lambda: broker.stats("q").available == 1)
        assert [each.payload for each in broker.claim("q")] == [b"x"]


def test_sqs_answers_in_time(far: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as served:
        sqs = client_of(served)
        address = sqs.create_queue(QueueName="q")["QueueUrl"]
        monkeypatch.setattr("penstock.server.sqs._MOST_SECONDS", 0.5)
        hanging = Hanging(served.broker, monkeypatch)
        try:
            with pytest.raises(ClientError, match="not answered in time") as refused:
                sqs.send_message(QueueUrl=address, MessageBody="x")
            assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503
        finally:
            hanging.going_on.set()
        monkeypatch.undo()
        sqs.send_message(QueueUrl=address, MessageBody="y")


def test_a_claim_that_is_late_in_the_turn_of_its_answer_gives_its_messages_back(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.send("q", b"x")
    with Served(broker) as served, Raw(served) as raw:
        raw.read()
        (connection,) = served.listener.connections
        answer = served.batcher._answer

        def answer_late(made: Any, failure: Exception | None) -> None:
            answer(made, failure)
            # Less than nothing: the loop's time may be a little behind that of the request.
            connection._patience_s = -1
            connection._fail_late()

        monkeypatch.setattr(served.batcher, "_answer", answer_late)
        failure = raw.ask([2, 7, "q", 1, 3_600_000])
        assert isinstance(failure, wire.Failure)
        assert failure.name == "ServerUnreachable"
        wait_until(lambda: broker.stats("q").available == 1)
