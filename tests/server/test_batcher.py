"""The batcher: joint changes, each request its own answer; claims that wait without a thread."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, cast

import pytest

import penstock
from penstock import Message
from penstock.broker.requests import Ack, Claim, Joint, Publish
from penstock.errors import (
    BrokerClosed,
    InvalidInput,
    InvalidMessage,
    InvalidReceipt,
    QueueNotFound,
    StoreFenced,
)
from penstock.packing import PackedMessage, pack_messages
from penstock.server import batcher as batcher_module
from penstock.server.batcher import Batcher
from penstock.store.codec.claimed import ClaimedMessages
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from penstock import Broker


@pytest.fixture(params=["indexed", "buckets"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    with penstock.open(f"rocksdb:{tmp_path / 'store'}?design={request.param}") as opened:
        opened.create_queue("q", lease_ms=60_000)
        yield opened
        assert_clean(opened)


def run(broker: Broker, story: Callable[[Batcher], Awaitable[None]]) -> None:
    async def whole() -> None:
        batcher = Batcher(broker, asyncio.get_running_loop())
        try:
            await asyncio.wait_for(story(batcher), 120)
        finally:
            await batcher.close()

    asyncio.run(whole())


def to(queue: str, number: int = 0, **settings: Any) -> Message:
    return Message(b"%d" % number, {"queue": queue, "n": number}, **settings)


def test_what_comes_together_is_one_change(broker: Broker) -> None:
    async def story(batcher: Batcher) -> None:
        before = broker.durability().commits
        ids = await asyncio.gather(*(batcher.publish([to("q", n)]) for n in range(50)))
        assert broker.durability().commits - before <= 2
        assert len({one for each in ids for one in each}) == 50
        claims = await asyncio.gather(*(batcher.claim("q", limit=2) for _ in range(20)))
        assert [len(each) for each in claims] == [2] * 20
        # Each claim has a lease of its own.
        assert len({each[0].lease for each in claims}) == 20
        assert all(len({one.lease for one in each}) == 1 for each in claims)
        outcomes = await asyncio.gather(
            *(batcher.ack([one.receipt for one in each]) for each in claims)
        )
        assert all(outcome for each in outcomes for outcome in each)

    run(broker, story)
    stats = broker.stats("q")
    assert (stats.done, stats.available, stats.in_flight) == (40, 10, 0)


def test_a_subscriber_that_fails_keeps_no_answer_from_others(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        queue = "q"
        lease_ms: int | None = None
        consumer = ""

        def reserve(self, most: int) -> tuple[int, int]:
            return most, 0

        def deliver(self, _: object) -> None:
            raise LookupError("a subscriber that fails")

        fail = deliver

    async def story(batcher: Batcher) -> None:
        await batcher.publish([to("q")])
        subscriber = cast("Any", Failing())
        batcher.subscribe(subscriber)
        ids = await asyncio.gather(batcher.publish([to("q")]), batcher.claim("q"))
        batcher.unsubscribe(subscriber)
        assert len(ids[0]) == 1

    run(broker, story)
    assert "an answer could not be told" in caplog.text


def test_one_request_fails_alone(broker: Broker) -> None:
    broker.create_queue("even", filter="n = 2")

    async def story(batcher: Batcher) -> None:
        kept, wrong, nowhere, good = await asyncio.gather(
            batcher.publish([to("q", 1)], queue="q"),
            batcher.publish([to("q", 1)], queue="even"),
            batcher.publish([to("q", 1)], queue="missing"),
            batcher.publish([to("q", 2)], queue="even"),
            return_exceptions=True,
        )
        assert isinstance(kept, list)
        assert isinstance(good, list)
        assert isinstance(wrong, InvalidMessage)
        assert isinstance(nowhere, QueueNotFound)
        with pytest.raises(InvalidInput, match="limit"):
            batcher.claim("q", limit=0)
        first, gone = await asyncio.gather(
            batcher.claim("q", limit=1), batcher.claim("missing"), return_exceptions=True
        )
        assert isinstance(first, ClaimedMessages)
        assert isinstance(gone, QueueNotFound)
        (delivery,) = first
        bad, elsewhere, done = await asyncio.gather(
            batcher.ack(["nonsense"]),
            batcher.ack([delivery.receipt], queue="even"),
            batcher.ack([delivery.receipt]),
            return_exceptions=True,
        )
        assert isinstance(bad, InvalidReceipt)
        assert isinstance(elsewhere, InvalidReceipt)
        assert isinstance(done, list)
        assert done[0]

    run(broker, story)
    assert broker.stats("q").done == 1


@pytest.mark.parametrize("place", ["memory:", "rocksdb:{}/store"])
def test_a_publish_that_the_store_refuses_fails_alone(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those beside it are stored once, whether the error was foreseen or not."""
    with penstock.open(place.format(tmp_path), background=False) as broker:
        broker.create_queue("q", lease_ms=60_000)
        publish = broker._store.publish
        broker.publish([to("q")])
        (delivery,) = broker.claim("q")

        def refuse(messages: list[PackedMessage], *told: Any, **more: Any) -> list[int]:
            if any(message.payload == b"13" for message in messages):
                raise error
            return publish(messages, *told, **more)

        monkeypatch.setattr(broker._store, "publish", refuse)
        publishes = [Publish(pack_messages([to("q", n)]), None) for n in (1, 13, 3)]
        error: Exception = InvalidInput("it can't be held")
        broker.begin(Joint(publishes=publishes))
        assert [each.error for each in publishes] == [None, error, None]
        assert [each.payload for each in broker.claim("q", limit=9)] == [b"1", b"3"]
        # Whether anything was stored is not known: neither is it tried again.
        error = ZeroDivisionError("unforeseen")
        ack, publishes = (
            Ack([delivery.receipt], None),
            [Publish(pack_messages([to("q", 13)]), None)],
        )
        broker.begin(Joint(acks=[ack], publishes=publishes))
        assert ack.answer[0]
        assert [each.error for each in publishes] == [error]


def test_the_same_receipt_twice_in_one_change(broker: Broker) -> None:
    broker.publish([to("q")])
    (delivery,) = broker.claim("q")
    acks = [Ack([delivery.receipt], None), Ack([delivery.receipt], None)]
    broker.begin(Joint(acks=acks))
    assert [bool(ack.answer[0]) for ack in acks] == [True, False]


def test_claims_see_what_is_published_beside_them(broker: Broker) -> None:
    claim = Claim("q", 5, None, "w")
    publish = Publish(pack_messages([to("q", n) for n in range(3)]), None)
    broker.begin(Joint(publishes=[publish], claims=[claim]))
    assert [each.message_id for each in claim.answer] == publish.answer


def test_groups_of_a_fifo_queue_stay_in_one_lease(broker: Broker) -> None:
    broker.create_queue("ordered", ordering="fifo", lease_ms=60_000)
    broker.publish([to("ordered", n, group=f"g{n % 2}") for n in range(10)])
    claims = [Claim("ordered", 3, None, f"w{n}") for n in range(4)]
    broker.begin(Joint(claims=claims))
    groups: dict[str, set[str]] = {}
    for claim in claims:
        for delivery in claim.answer:
            groups.setdefault(delivery.group, set()).add(delivery.lease)
    assert sorted(groups) == ["g0", "g1"]
    assert all(len(leases) == 1 for leases in groups.values())


def test_a_claim_waits_for_what_any_thread_publishes(broker: Broker) -> None:
    before = threading.active_count()

    async def story(batcher: Batcher) -> None:
        waiting = [batcher.claim("q", wait_ms=600_000) for _ in range(200)]
        while batcher.parked < 200:
            await asyncio.sleep(0.001)
        assert threading.active_count() < before + 20
        publisher = threading.Thread(
            target=lambda: [
                broker.publish([to("q", n + each) for each in range(10)]) for n in range(0, 200, 10)
            ]
        )
        publisher.start()
        answers = await asyncio.gather(*waiting)
        assert sorted(int(each[0].payload) for each in answers) == list(range(200))
        assert not batcher.parked
        publisher.join()

    run(broker, story)


def test_what_a_far_store_tells_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with penstock.open("memory:", background=False) as broker:
        broker.create_queue("q")
        monkeypatch.setattr(batcher_module, "FAR", {broker.info().design})

        async def story(batcher: Batcher) -> None:
            waiting = [batcher.claim("q", wait_ms=600_000) for _ in range(2)]
            while batcher.parked < 2:
                await asyncio.sleep(0.001)
            # It counts what has come since it was asked last.
            broker.listen(lambda queue, _: batcher._wake_queue(queue, 1))
            batcher._claims.changing = True
            broker.publish([to("q")])
            broker.publish([to("q")])
            broker.listen(None)
            await asyncio.sleep(0)
            batcher._claims.changing = False
            batcher._retry()
            assert [len(each) for each in await asyncio.gather(*waiting)] == [1, 1]

        run(broker, story)


def test_a_claim_waits_for_what_comes_due(broker: Broker) -> None:
    async def story(batcher: Batcher) -> None:
        await batcher.publish([to("q", delay_ms=300)])
        (delivery,) = await batcher.claim("q", wait_ms=60_000, lease_ms=200)
        # Its lease ends without anybody's doing.
        (again,) = await batcher.claim("q", wait_ms=60_000)
        assert (again.message_id, again.attempts) == (delivery.message_id, 2)
        first, second = broker.attempts("q", delivery.message_id)
        assert first.claimed_at_ms >= delivery.published_at_ms + 300
        assert second.claimed_at_ms >= first.claimed_at_ms + 200

    run(broker, story)


def test_a_wait_ends_in_time(broker: Broker) -> None:
    async def story(batcher: Batcher) -> None:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        assert not await batcher.claim("q", wait_ms=100)
        assert loop.time() - begin >= 0.09

    run(broker, story)


def test_a_cancelled_wait_takes_nothing(broker: Broker) -> None:
    async def story(batcher: Batcher) -> None:
        gone = batcher.claim("q", wait_ms=600_000)
        stays = batcher.claim("q", wait_ms=600_000)
        while batcher.parked < 2:
            await asyncio.sleep(0.001)
        gone.cancel()
        await asyncio.sleep(0)
        assert batcher.parked == 1
        await batcher.publish([to("q")])
        assert len(await stays) == 1

    run(broker, story)


def test_what_was_claimed_for_one_who_left_goes_to_others(broker: Broker) -> None:
    async def story(batcher: Batcher) -> None:
        await batcher.publish([to("q")])
        gone = batcher.claim("q")
        # Now it has been made, and waits for the disk.
        await asyncio.sleep(0)
        gone.cancel()
        (delivery,) = await batcher.claim("q", wait_ms=60_000)
        assert delivery.attempts == 1

    run(broker, story)
    (entry,) = broker.browse("q", state="in_flight")
    assert [each.end for each in broker.attempts("q", entry.message_id)] == ["running"]


def test_a_queue_that_goes_ends_the_wait(broker: Broker) -> None:
    broker.create_queue("short")

    async def story(batcher: Batcher) -> None:
        waiting = [batcher.claim("short", wait_ms=600_000) for _ in range(3)]
        while batcher.parked < 3:
            await asyncio.sleep(0.001)
        await batcher.call(lambda used: used.delete_queue("short"))
        for each in waiting:
            with pytest.raises(QueueNotFound):
                await each

    run(broker, story)


def test_a_store_that_is_lost_ends_every_wait() -> None:
    async def story() -> None:
        broker = penstock.open("memory:")
        broker.create_queue("q")
        broker.create_queue("other")
        batcher = Batcher(broker, asyncio.get_running_loop())
        waiting = [batcher.claim(name, wait_ms=600_000) for name in ("q", "q", "other")]
        while batcher.parked < 3:
            await asyncio.sleep(0.001)
        # What an engine says when another process has taken its store over.
        threading.Thread(target=broker._runner._lose, args=(StoreFenced("gone"),)).start()
        for each in waiting:
            with pytest.raises(StoreFenced):
                await asyncio.wait_for(each, 60)
        with pytest.raises(StoreFenced):
            await batcher.publish([to("q")])
        await batcher.close()
        broker.close()

    asyncio.run(story())


def test_stopping_hands_claims_back(broker: Broker) -> None:
    async def story(batcher: Batcher) -> None:
        waiting = batcher.claim("q", wait_ms=600_000)
        late = batcher.publish([to("q")])
        await asyncio.sleep(0)
        batcher.end_waits()
        assert await late
        assert len(await waiting) <= 1
        assert await batcher.claim("q", wait_ms=600_000, limit=9) is not None
        with pytest.raises(BrokerClosed):
            batcher.call(lambda used: used.queues())

    run(broker, story)


def test_a_closed_broker_is_told_to_all(tmp_path: Path) -> None:
    async def story() -> None:
        broker = penstock.open(f"rocksdb:{tmp_path / 'store'}")
        broker.create_queue("q")
        batcher = Batcher(broker, asyncio.get_running_loop())
        broker.close()
        answers = await asyncio.gather(
            batcher.publish([to("q")]), batcher.claim("q", wait_ms=1_000), return_exceptions=True
        )
        assert all(isinstance(each, BrokerClosed) for each in answers)

    asyncio.run(story())


def test_release_and_extend(broker: Broker) -> None:
    async def story(batcher: Batcher) -> None:
        await batcher.publish([to("q", 1), to("q", 2)])
        one, two = await batcher.claim("q", limit=2)
        (extended,) = await batcher.extend([one.receipt], lease_ms=500_000)
        assert extended.lease_deadline_ms is not None
        assert extended.lease_deadline_ms > one.lease_deadline_ms
        assert all(await batcher.extend(two.lease, lease_ms=400_000))
        (released,) = await batcher.release([two.receipt], delay_ms=0, reason="not now")
        assert released
        (again,) = await batcher.claim("q", limit=2)
        assert (again.message_id, again.attempts) == (two.message_id, 2)

    run(broker, story)
