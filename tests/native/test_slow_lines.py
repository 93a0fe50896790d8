"""Lines on which a large message takes longer than a server may be silent."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import pytest
from tests.native.serving import SLOW_SECONDS, Served, tls_contexts
from tests.waiting import wait_until as eventually

import penstock
from penstock import limits
from penstock.model import Message

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

PING_MS, SILENCE_MS = 100, 900
RATE = 512 * 1024
# Longer than it takes the client to take a silent server for dead.
BODY = b"x" * (RATE * 5 * (PING_MS + SILENCE_MS) // 1000 // 3)
STEP_SECONDS = 0.02


class SlowLine:
    """Carries so many bytes each second, in each direction, until it is cut."""

    def __init__(self, port: int, rate: int = RATE) -> None:
        self._port = port
        self._rate = rate
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.made = 0
        self.carried = 0
        self.dead = False
        self._server = self._do(self._serve())
        self.port = self._server.sockets[0].getsockname()[1]

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(SLOW_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self) -> asyncio.Server:
        listening = socket.create_server(("127.0.0.1", 0))
        # Small, so that the line and not the system holds what is on its way.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
        return await asyncio.start_server(self._accept, sock=listening, limit=16 * 1024)

    async def _accept(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        self.made += 1
        far, on = await asyncio.open_connection("127.0.0.1", self._port, limit=16 * 1024)
        try:
            await asyncio.gather(self._carry(near, on), self._carry(far, back))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            on.transport.abort()
            back.transport.abort()

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        sink.transport.set_write_buffer_limits(high=16 * 1024)
        while data := await source.read(int(self._rate * STEP_SECONDS)):
            while self.dead:
                await asyncio.sleep(STEP_SECONDS)
            self.carried += len(data)
            sink.write(data)
            await sink.drain()
            await asyncio.sleep(STEP_SECONDS)
        raise ConnectionResetError


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.client.connection.PING_MS", PING_MS)
    monkeypatch.setattr("penstock.client.connection.SILENCE_MS", SILENCE_MS)


def url_of(line: SlowLine) -> str:
    return f"penstock://localhost:{line.port}"


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("secure", [False, True])
def test_an_upload_takes_as_long_as_it_takes(secure: bool, tmp_path: Path) -> None:
    ours, theirs = tls_contexts(tmp_path) if secure else (None, False)
    with (
        penstock.open("memory:") as broker,
        Served(broker, tls=ours) as served,
        SlowLine(served.port) as line,
        penstock.connect(url_of(line), tls=theirs) as client,
    ):
        broker.create_queue("q")
        client.publish([Message(BODY, {"queue": "q"})])
        # Once, and not from the start again and again.
        assert line.made == 1
        assert line.carried < 1.1 * len(BODY)
        (delivery,) = broker.claim("q")
        assert delivery.payload == BODY


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_large_answer_takes_as_long_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_STALL_MS", SILENCE_MS)
    monkeypatch.setattr(limits, "MAX_UNSENT_BYTES", 64 * 1024)
    ours, theirs = tls_contexts(tmp_path)
    with (
        penstock.open("memory:") as broker,
        Served(broker, tls=ours) as served,
        SlowLine(served.port) as line,
        penstock.connect(url_of(line), tls=theirs) as client,
    ):
        broker.create_queue("q")
        broker.send("q", BODY)
        (delivery,) = client.claim("q")
        assert delivery.payload == BODY
        assert line.made == 1


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_line_that_dies_in_the_middle_of_an_upload_is_noticed(served: Served) -> None:
    with (
        ThreadPoolExecutor() as pool,
        SlowLine(served.port) as line,
        penstock.connect(url_of(line), patience_ms=60_000) as client,
    ):
        sent = pool.submit(client.publish, [Message(BODY, {"queue": "q"})])
        eventually(lambda: line.carried > len(BODY) // 8)
        line.dead = True
        eventually(lambda: line.made == 2)
        line.dead = False
        assert sent.result(SLOW_SECONDS)
    assert len(served.broker.claim("q", limit=5)) == 1
