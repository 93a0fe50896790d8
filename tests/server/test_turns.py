"""Whoever floods a listener with one connection waits itself, and holds nobody up."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import capnp
import pytest
from tests.clients.sockets import HELLO, connect, frame, read_all, status
from tests.waiting import wait_until

import penstock
from penstock import Message, limits
from penstock.clock import loop_seconds
from penstock.server import queueber, running
from penstock.server.connections import Connections
from penstock.server.http_connection import Http, HttpConnection
from penstock.server.keys import add_key
from penstock.server.native.connection import NativeConnection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from tests.server.conftest import Process

log = logging.getLogger(__name__)

BURST_BYTES = 250_000
# What the loop reads at a time, at most.
READ_BYTES = 256 * 1024
LISTENERS: dict[str, Any] = dict.fromkeys(("native", "http", "capnp", "ops_address"), "127.0.0.1:0")
SCHEMA: Any = capnp.load(str(Path(queueber.__file__).with_suffix(".capnp")))
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"


def of_burst(request: bytes) -> bytes:
    return request * (BURST_BYTES // len(request))


def capnp_calls() -> bytes:
    """Return what a client sends that makes calls and waits for no answer."""
    said = bytearray()

    def record(listening: socket.socket) -> None:
        with listening.accept()[0] as connection:
            connection.settimeout(0.3)
            with suppress(TimeoutError):
                while data := connection.recv(READ_BYTES):
                    said.extend(data)

    async def call(address: tuple[str, int], recording: Future[None]) -> None:
        async with capnp.kj_loop():
            client = capnp.TwoPartyClient(await capnp.AsyncIoStream.create_connection(*address))
            queue = client.bootstrap().cast_as(SCHEMA.Queue)
            request = {"lease": b"nobody's", "leaseValiditySecs": 1}
            calls = [queue.extend(request) for _ in range(1_000)]
            await asyncio.wrap_future(recording)
            del calls
            client.close()

    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as thread:
        asyncio.run(call(listening.getsockname(), thread.submit(record, listening)))
    return bytes(said)


class Flood(NamedTuple):
    """What a connection to a listener sends, over and over."""

    port: str
    data: bytes


def flood_of(name: str) -> Flood:
    request, _, listener = name.partition(" to ")
    match request:
        case "pings":
            return Flood("native", HELLO + of_burst(frame([25, 1])))
        case "calls":
            return Flood("capnp", capnp_calls())
        case "requests":
            return Flood(listener, of_burst(HEALTH + b"\r\n"))
        case "trailers":
            return Flood(listener, CHUNKED + b"a:\r\n" * 1_000_000)
    wrong = HEALTH.replace(b"health", b"metrics") + b"Authorization: Bearer root:wrong\r\n\r\n"
    return Flood(listener, of_burst(wrong))


# --- counts ---------------------------------------------------------------------------------------


class Counted:
    """How often one object did something in each turn, and the most bytes that all held."""

    def __init__(self) -> None:
        self.turns: list[int] = []
        self.held_bytes = 0
        self._now: Counter[int] = Counter()

    def note(self, doer: object) -> None:
        if not self._now:
            asyncio.get_running_loop().call_soon(self._end_turn)
        self._now[id(doer)] += 1

    def _end_turn(self) -> None:
        self.turns.append(max(self._now.values()))
        self._now.clear()


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], Counted]:
    """Count the calls of a method, which does what it did."""
    counted = Counted()

    def count(place: Any, name: str) -> Counted:
        method, hold = getattr(place, name), Connections.hold

        def called(self: Any, *given: Any) -> Any:
            # Of Cap'n Proto, the end of a call is told too.
            if given != (-1,):
                counted.note(self)
            return method(self, *given)

        def held(self: Connections, *given: Any) -> None:
            hold(self, *given)
            counted.held_bytes = max(counted.held_bytes, self.held_bytes)

        monkeypatch.setattr(place, name, called)
        monkeypatch.setattr(Connections, "hold", held)
        return counted

    return count


def port_of(server: Any, name: str) -> int:
    return int(server.addresses["ops" if name == "ops_address" else name][1])


@pytest.mark.parametrize(
    ("name", "place", "method"),
    [
        ("pings", NativeConnection, "_begin"),
        ("calls", queueber.QueueberConnection, "count_call"),
        ("requests to http", Http, "handle"),
        ("requests to ops_address", Http, "handle"),
    ],
)
def test_a_connection_does_so_much_in_a_turn(
    counting: Callable[[Any, str], Counted], name: str, place: Any, method: str
) -> None:
    flood = flood_of(name)
    counted = counting(place, method)
    with running("memory:", **LISTENERS) as server:
        with connect(port_of(server, flood.port)) as flooder:
            flooder.sendall(flood.data)
            wait_until(lambda: sum(counted.turns) >= min(1_000, BURST_BYTES // 60))
            with penstock.connect(server.location("native")) as client:
                client.create_queue("q")
                client.publish([Message(b"x", {"queue": "q"})])
        assert max(counted.turns) <= limits.MAX_TURN_ANSWERS
        # Bytes that are read and wait, and those behind a request that is being answered.
        assert counted.held_bytes <= 2 * READ_BYTES + limits.HTTP_MAX_AHEAD_BYTES


@pytest.mark.parametrize("listener", ["http", "ops_address"])
def test_trailers_are_bounded(counting: Callable[[Any, str], Counted], listener: str) -> None:
    flood = flood_of(f"trailers to {listener}")
    counted = counting(HttpConnection, "on_header")
    with running("memory:", **LISTENERS) as server:
        with connect(port_of(server, flood.port)) as flooder:
            flooder.sendall(flood.data)
            assert status(read_all(flooder)) == 431
        # A million were sent. What is parsed at a time may have so many.
        assert sum(counted.turns) < 16 * 1024 // len(b"a:\r\n") + 100
        assert counted.held_bytes <= 2 * READ_BYTES


def test_a_connection_that_fails_in_its_turn_is_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And those behind it have their turn."""
    begun: Counter[Any] = Counter()
    usual = NativeConnection._begin

    def begin(connection: NativeConnection, data: memoryview) -> None:
        begun[connection] += 1
        if begun[connection] > limits.MAX_TURN_ANSWERS and next(iter(begun)) is connection:
            raise RuntimeError("spoilt")
        usual(connection, data)

    monkeypatch.setattr(NativeConnection, "_begin", begin)
    pings = HELLO + frame([25, 1]) * 1_000
    with running("memory:", native="127.0.0.1:0") as server:
        port = server.addresses["native"][1]
        with connect(port) as spoilt, connect(port) as other:
            spoilt.sendall(pings)
            other.sendall(pings)
            read_all(spoilt)
            wait_until(lambda: max(begun.values()) == 1_000)
    assert "spoilt" in caplog.text


# --- time -----------------------------------------------------------------------------------------

CONNECTIONS = 20
SECONDS = 5
FLOODER = """
import pathlib, selectors, socket, sys
port, path, count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
data, looked = pathlib.Path(path).read_bytes(), selectors.DefaultSelector()
def begin():
    made = socket.create_connection(("127.0.0.1", port))
    made.setblocking(False)
    looked.register(made, selectors.EVENT_READ | selectors.EVENT_WRITE, [0])
for _ in range(count):
    begin()
print("begun", flush=True)
while True:
    for key, mask in looked.select():
        made, at = key.fileobj, key.data
        try:
            if mask & selectors.EVENT_READ and not made.recv(1 << 20):
                raise ConnectionError
            if mask & selectors.EVENT_WRITE:
                at[0] += made.send(memoryview(data)[at[0]:])
                if at[0] == len(data):
                    made.shutdown(socket.SHUT_WR)
                    looked.modify(made, selectors.EVENT_READ, at)
        except BlockingIOError:
            pass
        except OSError:
            looked.unregister(made)
            made.close()
            begin()
"""


@pytest.fixture
def flooding(tmp_path: Path) -> Iterator[Callable[[int, bytes], None]]:
    """Flood a port from a process of its own until the test is over."""
    begun: list[subprocess.Popen[str]] = []

    def flood(port: int, data: bytes) -> None:
        (tmp_path / "flood").write_bytes(data)
        arguments = [str(port), str(tmp_path / "flood"), str(CONNECTIONS)]
        command = [sys.executable, "-c", FLOODER, *arguments]
        begun.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert begun[-1].stdout is not None
        assert begun[-1].stdout.readline() == "begun\n"

    yield flood
    for each in begun:
        os.kill(each.pid, signal.SIGKILL)
        each.communicate()


@pytest.mark.soak
@pytest.mark.parametrize(
    "name",
    [
        "pings",
        "calls",
        "requests to http",
        "requests to ops",
        "trailers to http",
        "trailers to ops",
        "wrong tokens to http",
    ],
)
def test_an_honest_client_does_not_wait(
    serve: Callable[..., Process],
    flooding: Callable[[int, bytes], None],
    tmp_path: Path,
    name: str,
) -> None:
    flood, options, token = flood_of(name), ["--ops-address", "127.0.0.1:0"], ""
    if " to " in name:
        token = f"root:{add_key(tmp_path / 'keys.toml', 'root', ['all'])}"
        options += ["--keys", str(tmp_path / "keys.toml")]
    else:
        options += ["--capnp", "127.0.0.1:0"]
    server = serve(*options, native=True)
    waits = []
    url = f"penstock://127.0.0.1:{server.ports['native']}"
    with penstock.connect(url, token=token) as client:
        client.create_queue("q")
        flooding(server.ports[flood.port], flood.data)
        until = loop_seconds() + SECONDS
        while (began := loop_seconds()) < until:
            client.publish([Message(b"x", {"queue": "q"})])
            waits.append(loop_seconds() - began)
    waits.sort()
    p50, p99 = waits[len(waits) // 2], waits[len(waits) * 99 // 100]
    log.info("%d publishes, p50 %.4f, p99 %.4f, at most %.4f s", len(waits), p50, p99, waits[-1])
    assert p99 <= 0.5
