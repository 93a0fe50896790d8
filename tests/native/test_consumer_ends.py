"""Consumers of a client: short waits, the last settlements, wrong calls, and fork()."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from tests.native.serving import Served
from tests.native.test_consume import fill
from tests.waiting import wait_until

import penstock
from penstock import InvalidInput, Message, OutcomeStatus
from penstock.wire import native as wire

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.client import Client


# --- waits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [1, 7, 200])
def test_without_a_wait_all_that_is_there_comes(client: Client, prefetch: int) -> None:
    ids = fill(client, 30)
    got = []
    for delivery in client.consume("q", prefetch=prefetch, wait_ms=0):
        got.append(delivery.message_id)
        delivery.ack()
    assert got == ids
    assert list(client.consume("q", wait_ms=0)) == []


def test_without_a_wait_all_that_is_in_a_file_comes(tmp_path: Path) -> None:
    with penstock.open(f"rocksdb:{tmp_path}/store") as broker, Served(broker) as served:
        broker.create_queue("q")
        with penstock.connect(served.url) as client:
            ids = fill(client, 30)
            got = [each.message_id for each in client.consume("q", wait_ms=0)]
    assert got == ids


def test_asyncio_without_a_wait(served: Served) -> None:
    async def work() -> None:
        async with penstock.connect_async(served.url) as client:
            await client.publish([Message(b"x", {"queue": "q"})] * 30)
            got = [each.ack() async for each in client.consume("q", prefetch=7, wait_ms=0)]
            assert len(got) == 30

    asyncio.run(work())


def test_pushes_that_nobody_waits_for_leave_nothing_behind(client: Client) -> None:
    consumer = client.consume("q")
    for _ in range(20):
        fill(client, 1)
        wait_until(lambda: consumer._held.ready)  # type: ignore[attr-defined]
        next(consumer).ack()
    woken = consumer._woken  # type: ignore[attr-defined]
    assert [woken.wait(0), woken.wait(0)].count(True) <= 1


# --- the last settlements -------------------------------------------------------------------------


def test_messages_of_a_closed_consumer_are_settled_before_the_client_is_closed(
    served: Served,
) -> None:
    with penstock.connect(served.url) as client:
        fill(client, 5)
        with client.consume("q") as consumer:
            held = [next(consumer) for _ in range(5)]
        # By now the server has nothing else to answer that close() would wait for.
        client.ping()
        settlements = [each.ack() for each in held]
    assert [each.result().status for each in settlements] == [OutcomeStatus.DONE] * 5


def test_asyncio_settles_messages_of_a_closed_consumer_too(served: Served) -> None:
    async def work() -> None:
        async with penstock.connect_async(served.url) as client:
            await client.publish([Message(b"x", {"queue": "q"})] * 5)
            async with client.consume("q") as consumer:
                held = [await anext(consumer) for _ in range(5)]
            await client.ping()
            for each in held:
                each.ack()

    asyncio.run(work())
    assert served.batcher.broker.stats("q").done == 5


def test_threads_may_settle_messages_of_asyncio(served: Served) -> None:
    async def work() -> None:
        # Other threads may not call a loop otherwise, and in this mode it says so.
        asyncio.get_running_loop().set_debug(True)
        async with penstock.connect_async(served.url) as client:
            await client.publish([Message(b"x", {"queue": "q"})])
            async with client.consume("q") as consumer:
                settlement = await asyncio.to_thread((await anext(consumer)).ack)
                assert (await settlement).status is OutcomeStatus.DONE

    asyncio.run(work())


def test_each_ack_of_a_message_has_its_own_outcome(client: Client) -> None:
    fill(client, 1)
    delivery = next(client.consume("q"))
    statuses = [each.result().status for each in (delivery.ack(), delivery.ack())]
    assert statuses == [OutcomeStatus.DONE, OutcomeStatus.STALE]


# --- wrong calls ----------------------------------------------------------------------------------


def together(client: Client, calls: list[Callable[[], Any]]) -> list[Any]:
    """Make calls on threads of their own that the client's loop gets at once."""
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go.wait(60)

    client.transport.loop.call_soon_threadsafe(hold)
    held.wait()
    results: list[Any] = [None] * len(calls)

    def run(at: int) -> None:
        try:
            results[at] = calls[at]()
        except Exception as error:
            results[at] = error

    threads = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(len(calls))]
    for count, thread in enumerate(threads, 1):
        thread.start()
        wait_until(lambda: len(client._inbox) >= count or not thread.is_alive())  # noqa: B023
    go.set()
    for thread in threads:
        thread.join(60)
    return results


def test_a_call_that_fails_on_the_loop_fails_alone(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = client.transport.connection
    submit = connection.submit

    def submit_no_ping(call: Any, *rest: Any) -> Any:
        if isinstance(call.request, wire.Ping):
            raise TypeError("a call that can't be taken")
        return submit(call, *rest)

    monkeypatch.setattr(connection, "submit", submit_no_ping)
    failed, stats = together(client, [client.ping, lambda: client.stats("q")])
    assert isinstance(failed, TypeError)
    assert stats.available == 0


def test_wrong_arguments_are_errors_of_their_own_caller(client: Client) -> None:
    fill(client, 3)
    consumer = client.consume("q")
    held = [next(consumer) for _ in range(3)]
    settlement = held[0].ack()
    wrong: Any = None
    with pytest.raises(InvalidInput, match="lease_ms"):
        client.extend([held[1].receipt], lease_ms=wrong)
    with pytest.raises(InvalidInput, match="lease_ms"):
        held[1].extend(lease_ms=wrong)
    with pytest.raises(InvalidInput, match="delay_ms"):
        held[1].release(delay_ms=-5)
    wrong = ["x"]
    assert held[2].release(reason=wrong).result()
    assert settlement.result()


# --- fork() ---------------------------------------------------------------------------------------

FORKS = """
import os, signal, sys, penstock

client = penstock.connect(sys.argv[1])
with client.consume("q", wait_ms=60_000) as consumer:
    delivery = next(consumer)
    settlement = delivery.ack()
    settlement.result()
    child = os.fork()
    if not child:
        signal.alarm(30)
        refused = 0
        for act in (consumer.__next__, consumer.flush, delivery.ack):
            try:
                act()
            except penstock.BrokerClosed as error:
                refused += "fork()" in str(error)
        consumer.close()
        del consumer
        os._exit(40 + refused)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 43, status
    assert next(consumer).ack().result()
client.close()
"""


def test_a_consumer_is_not_for_the_children_of_its_process(served: Served, client: Client) -> None:
    fill(client, 3)
    made = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS, served.url],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert served.batcher.broker.stats("q").done == 2
