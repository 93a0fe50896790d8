"""Consumers: messages that a server pushes to its clients, within their credit."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
from tests.native.serving import SLOW_SECONDS, Raw, Served, encoder
from tests.waiting import wait_until as eventually

import penstock
from penstock import Message, OutcomeStatus, QueueNotFound
from penstock.consuming import HeldDelivery
from penstock.server.batcher import MAX_JOINT_MESSAGES
from penstock.wire import native as wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.client import Client


def fill(client: Any, count: int, **fields: Any) -> list[int]:
    ids: list[int] = client.publish(
        [Message(b"%d" % n, {"queue": "q"}, **fields) for n in range(count)]
    )
    return ids


def pushed(raw: Raw) -> list[dict[str, Any]]:
    frame = raw.read()
    assert isinstance(frame, wire.Deliveries), frame
    return [msgspec.structs.asdict(each) for each in frame.claimed.deliveries()]


@pytest.fixture
def consuming(client: Client) -> Iterator[Any]:
    with client.consume("q", prefetch=10, wait_ms=SLOW_SECONDS * 1000) as consumer:
        yield consumer


# --- the client for threads -----------------------------------------------------------------------


def test_messages_come_in_order_and_are_acked(client: Client) -> None:
    ids = fill(client, 500)
    got = []
    for delivery in client.consume("q", prefetch=50, wait_ms=100):
        assert isinstance(delivery, penstock.Delivery)
        got.append(delivery.message_id)
        delivery.ack()
    assert got == ids
    eventually(lambda: client.stats("q").done == 500)
    assert client.stats("q").in_flight == 0


def test_messages_come_as_they_are_published(client: Client, consuming: Any) -> None:
    for n in range(5):
        client.send("q", b"%d" % n)
        delivery = next(consuming)
        assert delivery.payload == b"%d" % n
        assert delivery.ack().result().status is OutcomeStatus.DONE


def test_the_change_that_stores_a_message_claims_it(
    served: Served, client: Client, consuming: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = served.batcher.broker
    client.send("q", b"first")
    next(consuming).ack().result()
    begun: list[Any] = []
    begin = broker.begin

    def note(joint: Any) -> int:
        begun.append(joint)
        return begin(joint)

    monkeypatch.setattr(broker, "begin", note)
    client.send("q", b"second")
    assert next(consuming).payload == b"second"
    assert len(begun) == 1
    assert (len(begun[0].publishes), len(begun[0].claims)) == (1, 1)


def test_no_more_are_held_than_the_prefetch(client: Client, consuming: Any) -> None:
    fill(client, 30)
    first = [next(consuming) for _ in range(10)]
    assert client.stats("q").in_flight == 10
    first[0].ack().result()
    eventually(lambda: client.stats("q").in_flight == 10)
    assert next(consuming).payload == b"10"


def test_receipts_that_the_client_settles_give_credit_too(client: Client) -> None:
    fill(client, 25)
    got = 0
    for delivery in client.consume("q", prefetch=5, wait_ms=100):
        got += 1
        client.ack([delivery.receipt])
    assert got == 25


def test_bytes_are_bounded(client: Client) -> None:
    client.publish([Message(b"x" * 100_000, {"queue": "q"})] * 40)
    # One claim shows how large messages are.
    client.release([each.receipt for each in client.claim("q")], unseen=True)
    consumer = client.consume("q", prefetch=40, prefetch_bytes=500_000, wait_ms=100)
    taken = [next(consumer) for _ in range(4)]
    assert client.stats("q").in_flight <= 6
    for each in taken:
        each.ack()
    for each in consumer:
        each.ack()
    eventually(lambda: client.stats("q").done == 40)


def test_bytes_that_messages_did_not_need_are_used_for_others(client: Client) -> None:
    """Until one has come, each may be as large as a message can be."""
    fill(client, 100)
    with client.consume("q", prefetch=50, prefetch_bytes=1_000_000, wait_ms=10_000) as consumer:
        assert [next(consumer).payload for _ in range(50)] == [b"%d" % n for n in range(50)]


def test_releases_go_with_their_delay_and_reason(client: Client, consuming: Any) -> None:
    fill(client, 1)
    delivery = next(consuming)
    assert delivery.release(delay_ms=0, reason="busy").result().status is OutcomeStatus.RETRYING
    again = next(consuming)
    assert (again.message_id, again.attempts) == (delivery.message_id, 2)
    assert client.attempts("q", again.message_id)[0].reason == "busy"
    assert again.extend(lease_ms=60_000).result().status is OutcomeStatus.EXTENDED
    assert consuming.flush() == []


def test_refusals_are_told_and_collected(client: Client) -> None:
    told: list[penstock.Outcome] = []
    fill(client, 3)
    with client.consume("q", wait_ms=100, on_refused=told.append) as consumer:
        held = [next(consumer) for _ in range(3)]
        client.ack([held[1].receipt])
        settlements = [each.ack() for each in held]
        refused = consumer.flush()
        assert [each.receipt for each in refused] == [held[1].receipt]
        assert told == refused
        assert [bool(each.result()) for each in settlements] == [True, False, True]
        assert consumer.flush() == []


def test_messages_that_were_not_taken_are_given_back(client: Client) -> None:
    fill(client, 20)
    with client.consume("q", prefetch=10) as consumer:
        first = next(consumer)
    eventually(lambda: client.stats("q").available == 19)
    # The one that was taken is its caller's still.
    assert first.ack().result()
    assert {each.attempts for each in client.claim("q", limit=20)} == {1}


def test_a_consumer_that_is_let_go_of_gives_back(client: Client) -> None:
    fill(client, 20)
    for delivery in client.consume("q"):
        delivery.ack()
        break
    eventually(lambda: client.stats("q").available == 19)


def test_closing_the_client_gives_back_and_sends_the_last_acks(served: Served) -> None:
    with penstock.connect(served.url) as client:
        fill(client, 20)
        consumer = client.consume("q", wait_ms=100)
        for _ in range(5):
            next(consumer).ack()
    stats = served.batcher.broker.stats("q")
    assert (stats.available, stats.done, stats.in_flight) == (15, 5, 0)
    with pytest.raises(penstock.BrokerClosed):
        next(consumer)
    # Nothing waits for a loop that is closed.
    consumer.close()
    assert consumer.flush() == []


def test_an_unknown_queue_is_an_error(client: Client) -> None:
    with pytest.raises(QueueNotFound):
        next(client.consume("nope"))


def test_a_queue_that_is_deleted_ends_its_consumers(client: Client) -> None:
    consumer = client.consume("q")
    fill(client, 1)
    next(consumer).ack().result()
    client.delete_queue("q")
    with pytest.raises(QueueNotFound):
        next(consumer)


def test_threads_share_a_consumer(client: Client) -> None:
    fill(client, 300)
    consumer = client.consume("q", wait_ms=200)
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


def test_consumers_share_a_queue(client: Client) -> None:
    fill(client, 1)
    # One claim shows how large messages are.
    client.ack([each.receipt for each in client.claim("q")])
    first, second = client.consume("q", prefetch=50), client.consume("q", prefetch=50)
    # By the answer to this, both have found nothing.
    client.ping()
    fill(client, 40)
    taken = [[next(each) for _ in range(20)] for each in (first, second)]
    assert client.stats("q").in_flight == 40
    assert not {d.message_id for d in taken[0]} & {d.message_id for d in taken[1]}


def test_a_fifo_queue_gives_a_group_to_one_consumer(client: Client) -> None:
    client.create_queue("f", ordering="fifo", filter="queue = 'f'")
    client.publish([Message(b"%d" % n, {"queue": "f"}, group=f"g{n % 2}") for n in range(8)])
    with client.consume("f", wait_ms=200) as one, client.consume("f", wait_ms=200) as two:
        by_group: dict[str, list[bytes]] = {"g0": [], "g1": []}
        for consumer in (one, two):
            for delivery in consumer:
                by_group[delivery.group].append(delivery.payload)
                delivery.ack()
    assert by_group == {"g0": [b"0", b"2", b"4", b"6"], "g1": [b"1", b"3", b"5", b"7"]}


def test_a_lost_connection_is_made_again(served: Served, client: Client) -> None:
    fill(client, 30)
    consumer = client.consume("q", prefetch=10, wait_ms=500)
    held = [next(consumer) for _ in range(5)]
    served.cut()
    seen = {each.message_id for each in held}
    for each in held:
        assert each.ack().result()
    for delivery in consumer:
        assert delivery.attempts == 1
        seen.add(delivery.message_id)
        delivery.ack()
    assert len(seen) == 30
    eventually(lambda: client.stats("q").done == 30)


def test_messages_that_wait_too_long_are_given_back_without_an_attempt(
    served: Served, client: Client
) -> None:
    served.batcher.broker.update_queue("q", lease_ms=2_000)
    fill(client, 6)
    consumer = client.consume("q", wait_ms=500)
    first = next(consumer)
    eventually(lambda: served.batcher.broker.stats("q").released_total >= 5)
    first.ack()
    rest = list(consumer)
    assert [each.attempts for each in rest] == [1] * 5


def test_messages_whose_lease_has_ended_give_credit(served: Served, client: Client) -> None:
    served.batcher.broker.update_queue("q", lease_ms=300, backoff_base_ms=0)
    fill(client, 1)
    consumer = client.consume("q", prefetch=1, wait_ms=SLOW_SECONDS * 1000)
    assert next(consumer).attempts == 1
    assert next(consumer).attempts == 2


# --- asyncio --------------------------------------------------------------------------------------


def test_asyncio_has_the_same(served: Served) -> None:
    async def work() -> None:
        async with penstock.connect_async(served.url) as client:
            await client.publish([Message(b"x", {"queue": "q"})] * 100)
            consumer = client.consume("q", prefetch=20, wait_ms=100)
            settlements = []
            async for delivery in consumer:
                assert isinstance(delivery, HeldDelivery)
                settlements.append(delivery.ack())
            assert await settlements[-1]
            assert await consumer.flush() == []
            assert all(each.done for each in settlements)
            assert (await client.stats("q")).done == 100
            async with client.consume("q", wait_ms=1) as empty:
                assert [each async for each in empty] == []

    asyncio.run(work())


def test_a_client_is_awaited_or_entered(served: Served) -> None:
    async def awaited() -> int:
        client = await asyncio.create_task(penstock.connect_async(served.url))
        async with client:
            return await client.ping()

    assert asyncio.run(awaited())
    with pytest.raises(penstock.InvalidUrl):
        asyncio.run(penstock.connect_async("http://x"))


def test_a_task_that_is_cancelled_gives_back(served: Served) -> None:
    async def work() -> None:
        async with penstock.connect_async(served.url) as client:
            await client.publish([Message(b"x", {"queue": "q"})] * 10)
            begun = asyncio.Event()

            async def consume() -> None:
                async for _ in client.consume("q"):
                    begun.set()
                    await asyncio.sleep(SLOW_SECONDS)

            task = asyncio.create_task(consume())
            await begun.wait()
            task.cancel()
            await asyncio.wait({task})
            del task
            while (await client.stats("q")).available < 9:
                await asyncio.sleep(0.002)

    asyncio.run(work())


# --- the wire -------------------------------------------------------------------------------------


def test_credit_is_used_up_and_given(served: Served, client: Client) -> None:
    fill(client, 10)
    with Raw(served) as raw:
        assert isinstance(raw.read(), wire.Welcome)
        raw.send(encoder.frame(wire.Consume(7, "q", 3, 1 << 24)))
        assert len(pushed(raw)) == 3
        raw.send(encoder.frame(wire.Credit(7, 2, 0)))
        assert len(pushed(raw)) == 2
        raw.send(encoder.frame(wire.Cancel(8, 7)))
        assert msgspec.msgpack.decode(raw.read().value) is True  # type: ignore[union-attr]
        end = raw.read()
        assert isinstance(end, wire.Result)
        assert (end.id, msgspec.msgpack.decode(end.value)) == (7, None)
        # Credit for a consumer that has ended is nothing to anybody.
        raw.send(encoder.frame(wire.Credit(7, 2, 0)))
        assert isinstance(raw.ask(wire.Ping(9)), wire.Result)
    assert client.stats("q").in_flight == 5


@pytest.mark.parametrize(
    "request_",
    [
        wire.Consume(7, "q", -1, 10),
        wire.Consume(7, "q", 10_001, 10),
        wire.Consume(7, "q", 1, 1 << 40),
        wire.Consume(7, "q", 1, 10, 0),
        wire.Consume(7, "q", 1, 10, None, "x" * 1000),
    ],
)
def test_a_wrong_consume_is_refused(served: Served, request_: wire.Consume) -> None:
    with Raw(served) as raw:
        raw.read()
        answer = raw.ask(request_)
        assert isinstance(answer, wire.Failure)
        assert answer.name == "InvalidInput"
        assert isinstance(raw.ask(wire.Ping(9)), wire.Result)


def test_a_server_that_stops_ends_consumers_and_holds_nothing(
    served: Served, client: Client
) -> None:
    fill(client, 5)
    with Raw(served) as raw:
        raw.read()
        raw.send(encoder.frame(wire.Consume(7, "q", 3, 1 << 24)))
        pushed(raw)
        served.stop()
        frames = [raw.read(), raw.read()]
    assert isinstance(frames[0], wire.Bye)
    assert frames[1] == wire.Undone(7)
    assert served.batcher.broker.stats("q").available == 2


# --- the joint changes of the server ------------------------------------------------------------


class Reader:
    """A subscriber with room for so many messages, which counts those that it gets."""

    lease_ms: int | None = None
    consumer = ""

    def __init__(self, queue: str, room: int) -> None:
        self.queue = queue
        self.room = room
        self.got = 0

    def reserve(self, most: int) -> tuple[int, int]:
        limit = min(most, self.room)
        self.room -= limit
        return limit, 0

    def deliver(self, claim: Any) -> None:
        self.got += len(claim.answer)

    def fail(self, error: Exception) -> None:
        raise error


@pytest.fixture
def joints(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many messages each joint change has published and claimed."""
    made = []
    begin = served.broker.begin

    def note(joint: Any) -> int:
        number = begin(joint)
        published = sum(len(each.messages) for each in joint.publishes)
        made.append((published, sum(len(each.answer) for each in joint.claims)))
        return number

    monkeypatch.setattr(served.broker, "begin", note)
    return made


def test_a_joint_change_full_of_messages_claims_for_subscribers_too(
    served: Served, client: Client, joints: list[tuple[int, int]]
) -> None:
    client.create_queue("other")
    fill(client, 20)
    joints.clear()

    async def subscribe_and_publish() -> None:
        served.batcher.subscribe(cast("Any", Reader("q", 20)))
        await served.batcher.publish([Message(b"", {"queue": "other"})] * MAX_JOINT_MESSAGES)

    served.do(subscribe_and_publish())
    assert joints[0] == (MAX_JOINT_MESSAGES, 20)


def test_subscribers_of_many_queues_do_not_fill_a_joint_change_beyond_its_bound(
    served: Served, client: Client, joints: list[tuple[int, int]]
) -> None:
    readers = [Reader(f"q{n}", 600) for n in range(10)]
    for each in readers:
        client.create_queue(each.queue)
        client.publish([Message(b"", {"queue": each.queue})] * 700)
    joints.clear()

    async def subscribe() -> None:
        for each in readers:
            served.batcher.subscribe(cast("Any", each))

    served.do(subscribe())
    eventually(lambda: all(each.got == 600 for each in readers))
    assert max(claimed for _, claimed in joints) == MAX_JOINT_MESSAGES

    # Nor when one publish makes messages of all of them available.
    for each in readers:
        each.room = 600
    joints.clear()
    client.publish([Message(b"", {"queue": each.queue}) for each in readers])
    eventually(lambda: all(each.got == 701 for each in readers))
    assert max(claimed for _, claimed in joints) <= MAX_JOINT_MESSAGES
