"""Callers that go away in the middle: what had come for them is there for others."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from tests.native.serving import SLOW_SECONDS
from tests.waiting import wait_until as eventually

import penstock
from penstock.client import clients as threads
from penstock.errors import BrokerClosed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.native.serving import Served

    from penstock.client import AsyncClient, Client


class AlarmError(Exception):
    """What the test's handler of signals raises."""


def ring(*_: object) -> None:
    raise AlarmError


@contextmanager
def alarm(served: Served) -> Iterator[None]:
    """Interrupt the test's thread, once a claim of it waits at the server."""
    over = threading.Event()

    def wake() -> None:
        while not served.batcher.parked:
            if over.wait(0.01):
                return
        # By now it waits for its answer, too.
        if not over.wait(0.1):
            signal.pthread_kill(here, signal.SIGALRM)

    here = threading.get_ident()
    before = signal.signal(signal.SIGALRM, ring)
    thread = threading.Thread(target=wake)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGALRM, before)


def test_a_claim_cancelled_in_the_turn_of_its_answer_gives_back(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.client.transport.CLOSE_SECONDS", SLOW_SECONDS)

    async def main() -> None:
        async with await penstock.connect_async(served.url) as client:
            task = asyncio.create_task(client.claim("q", wait_ms=600_000))
            while not served.batcher.parked:
                await asyncio.sleep(0.01)
            cancel_with_the_answer(client, task)
            await asyncio.to_thread(served.broker.send, "q", b"x")
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    # By the time that the client is closed, the server knows.
    (delivery,) = served.broker.claim("q")
    assert delivery.attempts == 1


def cancel_with_the_answer(client: AsyncClient, task: asyncio.Task[Any]) -> None:
    transport = client._transport
    flush = transport.flush

    def flush_and_cancel() -> None:
        answered = bool(transport.connection.done)
        flush()
        if answered:
            task.cancel()

    transport.flush = flush_and_cancel  # type: ignore[method-assign]


def test_an_interrupted_claim_is_withdrawn(served: Served, client: Client) -> None:
    with pytest.raises(AlarmError), alarm(served):
        client.claim("q", wait_ms=600_000)
    eventually(lambda: not served.batcher.parked)
    served.broker.send("q", b"x")
    assert served.broker.stats("q").in_flight == 0
    assert len(client.claim("q")) == 1


def test_an_interrupt_behind_the_answer_gives_back(
    served: Served, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = threads._Waiter.wait

    def interrupted(waiter: threads._Waiter) -> Any:
        wait(waiter)
        raise KeyboardInterrupt

    served.broker.send("q", b"x")
    with monkeypatch.context() as patch:
        patch.setattr(threads._Waiter, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.claim("q")
    (delivery,) = client.claim("q", wait_ms=60_000)
    assert delivery.attempts == 1


def test_calls_on_the_clients_own_thread_are_refused(client: Client) -> None:
    errors: list[BaseException] = []

    def call() -> None:
        for act in (client.ping, client.close):
            try:
                act()
            except BrokerClosed as error:
                errors.append(error)

    client._loop.call_soon_threadsafe(call)
    eventually(lambda: len(errors) == 2)
    assert client.ping() > 0


FORKS = """
import os, sys, penstock

client = penstock.connect(sys.argv[1])
client.claim("q")
child = os.fork()
if not child:
    refused = 0
    for act in (client.ping, lambda: client.claim("q")):
        try:
            act()
        except penstock.BrokerClosed as error:
            refused += "fork" in str(error)
    client.close()
    with penstock.connect(sys.argv[1]) as own:
        own.send("q", b"from the child")
    os._exit(40 + refused)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 42, status
assert [each.payload for each in client.claim("q")] == [b"from the child"]
client.close()
"""


def test_a_client_is_not_for_the_children_of_its_process(served: Served) -> None:
    served.broker.send("q", b"first")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS, served.url],
        timeout=120,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
