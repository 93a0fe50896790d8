"""What one caller asks for must not cost the others: bytes of answers, and verbs over many."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock import Message, limits
from penstock.broker.durability import Committer
from penstock.errors import ServerBusy, StorageFailed
from penstock.server.batcher import Batcher
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock import Broker

MEGABYTE = 1024 * 1024


@pytest.fixture(params=["indexed", "buckets"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    url = f"rocksdb:{tmp_path / 'store'}?design={request.param}"
    with penstock.open(url, durability="relaxed") as opened:
        opened.create_queue("q")
        yield opened
        assert_clean(opened)


def fill(broker: Broker, count: int, size: int) -> None:
    for _ in range(count):
        broker.publish([Message(b"x" * size, {"queue": "q"})])


def test_a_claim_ends_at_its_bytes(broker: Broker) -> None:
    fill(broker, 20, 8 * MEGABYTE)
    sizes = []
    while taken := broker.claim("q", limit=10_000):
        sizes.append(sum(len(each.payload) for each in taken))
    # With the first that reaches the bound it ends; a portion of unknown size may come before.
    assert max(sizes) <= limits.MAX_CLAIM_BYTES + 8 * MEGABYTE
    assert sum(sizes) == 160 * MEGABYTE


def test_claims_made_together_share_a_bound(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_JOINT_CLAIM_BYTES", 4 * MEGABYTE)
    fill(broker, 12, MEGABYTE)

    async def story() -> None:
        batcher = Batcher(broker, asyncio.get_running_loop())
        # Those that the bound leaves out look again by themselves.
        claims = [batcher.claim("q", wait_ms=60_000) for _ in range(12)]
        answers = await asyncio.gather(*claims)
        assert [len(each) for each in answers] == [1] * 12
        await batcher.close()

    asyncio.run(story())


def test_a_page_ends_at_its_bytes(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PAGE_BYTES", 2 * MEGABYTE)
    fill(broker, 7, MEGABYTE)
    seen, cursor, pages = [], None, 0
    while True:
        page = broker.browse("q", limit=100, cursor=cursor)
        assert len(page) <= 2
        seen += [entry.message_id for entry in page]
        pages, cursor = pages + 1, page.next_cursor
        if cursor is None:
            break
    assert (len(seen), len(set(seen))) == (7, 7)
    assert pages >= 4
    assert len(broker.browse("q", limit=100, payloads=False)) == 7


@pytest.mark.parametrize("verb", ["purge", "delete", "redrive", "trim"])
def test_a_verb_over_many_lets_others_in(broker: Broker, verb: str) -> None:
    broker.create_queue("other")
    broker.create_queue("once", max_attempts=1, filter="queue = 'q'")
    for _ in range(6):
        broker.publish([Message(b"", {"queue": "q"})] * 1_000)
    if verb in {"redrive", "trim"}:
        while taken := broker.claim("once", limit=1_000):
            broker.release([each.receipt for each in taken])
    let_in = threading.Event()
    steps = 0
    take_turns = broker._runner.apply

    def look() -> None:
        broker.stats("other")
        let_in.set()

    def counted(change: object, **how: Any) -> object:
        nonlocal steps
        is_change = how.get("durable", True)
        steps += is_change
        if is_change and steps == 2:
            # Between two steps of it, on another thread: what would wait if it held the lock.
            other = threading.Thread(target=look)
            other.start()
            other.join(60)
        return take_turns(change, **how)  # type: ignore[arg-type]

    broker._runner.apply = counted  # type: ignore[method-assign, assignment]
    if verb == "purge":
        assert broker.purge("q") == 6_000
    elif verb == "delete":
        assert broker.delete_queue("q") == 6_000
    elif verb == "redrive":
        assert broker.redrive("once") == 6_000
    else:
        assert broker.trim("once", state="failed", before=1 << 40) == 6_000
    assert let_in.is_set()
    broker._runner.apply = take_turns  # type: ignore[method-assign]


def test_a_wake_up_is_not_lost_with_who_left() -> None:
    async def story() -> None:
        with penstock.open("memory:") as broker:
            broker.create_queue("q")
            batcher = Batcher(broker, asyncio.get_running_loop())
            gone = batcher.claim("q", wait_ms=600_000)
            stays = batcher.claim("q", wait_ms=600_000)
            while batcher.parked < 2:
                await asyncio.sleep(0)
            broker.publish([Message(b"", {"queue": "q"})])
            # The first has been told to look again; before it does, its client leaves.
            batcher._retry()
            gone.cancel()
            assert len(await asyncio.wait_for(stays, 60)) == 1
            await batcher.close()

    asyncio.run(story())


def test_claims_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ALL_WAITING_CLAIMS", 4)

    async def story() -> None:
        with penstock.open("memory:") as broker:
            broker.create_queue("q")
            batcher = Batcher(broker, asyncio.get_running_loop())
            waiting = [batcher.claim("q", wait_ms=600_000) for _ in range(2)]
            with pytest.raises(ServerBusy, match="has 2 of the server's 4 waiting claims"):
                batcher.claim("q", wait_ms=1)
            assert not await batcher.claim("q", wait_ms=1, holder="another")
            assert not await batcher.claim("q")
            waiting[0].cancel()
            await asyncio.sleep(0)
            assert not await batcher.claim("q", wait_ms=1)
            await batcher.close()

    asyncio.run(story())


def test_whoever_waits_hears_of_a_sync_that_went_wrong() -> None:
    def broken() -> None:
        raise RuntimeError("out of the blue")

    heard: list[object] = []
    committer = Committer(broken, lambda: 1, relaxed=False)

    def deaf(error: object) -> None:
        raise ValueError("a callback that fails")

    committer.tell(1, deaf)
    with pytest.raises(StorageFailed, match="out of the blue"):
        committer.wait(1)
    committer.tell(1, heard.append)
    assert isinstance(heard[0], StorageFailed)
    committer.close()
