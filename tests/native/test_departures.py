"""Storms of callers that go away before their answer: nothing is held for nobody, nor used up."""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from tests.native.serving import SLOW_SECONDS, Raw, Served, encoder
from tests.waiting import wait_until as eventually

import penstock
from penstock.clock import ManualClock
from penstock.errors import PenstockError
from penstock.model import Message
from penstock.wire import native as wire

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.broker.broker import Broker
    from penstock.client import AsyncClient
    from penstock.clock import Clock

MESSAGES = 400
# What a departure would use up at once.
ONE_ATTEMPT: dict[str, Any] = {"max_attempts": 1, "lease_ms": 3_600_000}


@contextmanager
def serving(store: str, ordering: str) -> Iterator[Served]:
    with penstock.open(store) as broker, Served(broker) as server:
        broker.create_queue("q", ordering=ordering, **ONE_ATTEMPT)
        broker.publish(
            [
                Message(b"%d" % n, {"queue": "q"}, group=f"g{n % 40}" if n % 2 else "")
                for n in range(MESSAGES)
            ]
        )
        yield server


@pytest.fixture(params=["standard", "fifo"])
def stormed(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving("memory:", request.param) as server:
        yield server


@pytest.fixture(params=["standard", "fifo"])
def synced(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    """Serve a store whose answers wait for a sync."""
    with serving(f"rocksdb:{tmp_path}/db", request.param) as server:
        yield server


def check_all_are_there(broker: Broker, done: int) -> None:
    """Claim whatever was not acked, in the order of its group, at its first attempt."""
    eventually(lambda: broker.stats("q").in_flight == 0)
    stats = broker.stats("q")
    assert (stats.done, stats.failed, stats.available) == (done, 0, MESSAGES - done)
    while deliveries := broker.claim("q", limit=1_000):
        assert {each.attempts for each in deliveries} == {1}
        for group in {each.group for each in deliveries}:
            ids = [each.message_id for each in deliveries if each.group == group]
            assert ids == sorted(ids)
        done += len(broker.ack([each.receipt for each in deliveries]))
    assert done == MESSAGES


def holds(broker: Broker, more_than: int) -> bool:
    return broker.stats("q").in_flight > more_than


async def claim_and_go(client: AsyncClient, chance: Clock) -> int:
    """Claim, and be cancelled at some moment around the answer; say how many were acked."""
    task = asyncio.create_task(client.claim("q", limit=1 + int(chance.random() * 3), wait_ms=20))
    turns = int(chance.random() * 12)
    for _ in range(turns):
        await asyncio.sleep(0 if turns < 8 else 0.001)
    task.cancel()
    try:
        deliveries = await task
    except asyncio.CancelledError:
        return 0
    return sum(map(bool, await client.ack([each.receipt for each in deliveries])))


def test_a_storm_of_cancelled_claims_leaves_everything_claimable(stormed: Served) -> None:
    async def main() -> int:
        chance = ManualClock(seed=4)
        async with await penstock.connect_async(stormed.url) as client:
            done = 0
            for _ in range(40):
                done += sum(
                    await asyncio.gather(*(claim_and_go(client, chance) for _ in range(20)))
                )
            return done

    done = asyncio.run(main())
    check_all_are_there(stormed.broker, done)


def test_a_storm_of_timeouts_leaves_everything_claimable(stormed: Served) -> None:
    async def claim(client: AsyncClient, chance: Clock) -> int:
        try:
            deliveries = await asyncio.wait_for(
                client.claim("q", limit=2, wait_ms=20), chance.random() * 0.004
            )
        except TimeoutError:
            return 0
        return sum(map(bool, await client.ack([each.receipt for each in deliveries])))

    async def main() -> int:
        chance = ManualClock(seed=5)
        async with await penstock.connect_async(stormed.url) as client:
            done = 0
            for _ in range(40):
                done += sum(await asyncio.gather(*(claim(client, chance) for _ in range(20))))
            return done

    check_all_are_there(stormed.broker, asyncio.run(main()))


def test_a_client_that_is_closed_leaves_nothing_behind(stormed: Served) -> None:
    async def main() -> None:
        for turns in range(12):
            client = await penstock.connect_async(stormed.url)
            tasks = [asyncio.create_task(client.claim("q", wait_ms=600_000)) for _ in range(5)]
            for _ in range(turns):
                await asyncio.sleep(0.0002)
            await client.close()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                # What came before the end is the caller's.
                if isinstance(result, list):
                    stormed.broker.release([each.receipt for each in result], unseen=True)
                else:
                    assert isinstance(result, PenstockError)

    asyncio.run(main())
    check_all_are_there(stormed.broker, 0)


@pytest.mark.parametrize("gently", [False, True])
def test_connections_that_end_before_their_answer_use_up_nothing(
    synced: Served, monkeypatch: pytest.MonkeyPatch, gently: bool
) -> None:
    claim = encoder.frame(wire.Claim(1, "q", 3, None, 0, ""))
    go_on = threading.Event()
    sync = synced.broker._store.sync

    def slow_sync() -> None:
        assert go_on.wait(SLOW_SECONDS)
        sync()

    monkeypatch.setattr(synced.broker._store, "sync", slow_sync)
    for n in range(5):
        with Raw(synced) as raw:
            assert isinstance(raw.read(), wire.Welcome)
            raw.send(claim)
            eventually(partial(holds, synced.broker, more_than=3 * n))
            if gently:
                raw.socket.shutdown(socket.SHUT_WR)
            else:
                # A reset, not a farewell.
                now = struct.pack("ii", 1, 0)
                raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
    eventually(lambda: not synced.listener.connections)
    go_on.set()
    check_all_are_there(synced.broker, 0)


def test_a_claim_cancelled_before_its_caller_knows_is_given_back(
    stormed: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes between ``cancel()`` and the turn in which the caller is told."""
    monkeypatch.setattr("penstock.client.transport.CLOSE_SECONDS", SLOW_SECONDS)

    async def main() -> None:
        async with await penstock.connect_async(stormed.url) as client:
            task = asyncio.create_task(client.claim("q", limit=MESSAGES))
            received = client._transport.data_received

            def cancel_and_receive(data: bytes) -> None:
                task.cancel()
                received(data)

            client._transport.data_received = cancel_and_receive  # type: ignore[method-assign]
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    check_all_are_there(stormed.broker, 0)


FORKS = """
import asyncio, os, sys, penstock


async def refused(client):
    count = 0
    for act in (client.ping, lambda: client.claim("q")):
        try:
            await act()
        except penstock.BrokerClosed as error:
            count += "fork()" in str(error)
    await client.close()
    return count


async def main():
    async with await penstock.connect_async(sys.argv[1]) as client:
        await client.claim("q")
        child = os.fork()
        if not child:
            asyncio.events._set_running_loop(None)
            os._exit(40 + asyncio.run(refused(client)))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 42, status
        await client.claim("q")
        assert await client.ping() > 0


asyncio.run(main())
"""


def test_an_async_client_is_not_for_the_children_of_its_process(served: Served) -> None:
    served.broker.publish([Message(b"", {"queue": "q"}) for _ in range(9)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS, served.url],
        timeout=120,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    # The parent claimed two, the child none.
    assert served.broker.stats("q").in_flight == 2
