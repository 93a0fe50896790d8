"""Live numbers: server-sent events that are bounded, end with the server, and harm nobody."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.console.visiting import Visitor
from tests.sqs.serving import serving
from tests.waiting import wait_until

import penstock
from penstock import limits
from penstock.server import running
from penstock.server.http import HttpBounds, Request, Response
from penstock.server.keys import add_key, read_keys, write_keys

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator
    from pathlib import Path

    from penstock.server import Server


@contextmanager
def stream(visitor: Visitor, path: str = "live") -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(*visitor.address, timeout=60)
    connection.request("GET", f"/console/{path}", headers={"cookie": visitor.cookie})
    answer = connection.getresponse()
    try:
        yield answer
    finally:
        answer.close()
        connection.close()


def next_event(answer: http.client.HTTPResponse) -> dict[str, Any]:
    while not (line := answer.readline()).startswith(b"data: "):
        assert line, "the stream has ended"
    found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    return found


def streams(server: Server) -> int:
    assert server.console is not None
    return server.console.streams.total


def test_a_change_is_sent_and_nothing_else(server: Server, visitor: Visitor) -> None:
    assert 'data-stream="/console/live' in visitor.get().text
    with stream(visitor) as answer:
        assert answer.getheader("content-type") == "text/event-stream"
        assert answer.getheader("cache-control") == "no-store"
        assert answer.getheader("content-length") is None
        first = next_event(answer)
        assert first["emails:available"] == "1"
        server.broker.publish([penstock.Message(b"x", {"queue": "emails"})])
        changed: dict[str, Any] = {}
        while "emails:available" not in changed:
            changed |= next_event(answer)
        assert changed["emails:available"] == "2"
        assert "orders:available" not in changed
        assert streams(server) == 1
    wait_until(lambda: streams(server) == 0)


@pytest.mark.parametrize("path", ["health/live", "pipeline/live"])
def test_other_pages_are_live_too(visitor: Visitor, path: str) -> None:
    with stream(visitor, path) as answer:
        assert next_event(answer)


def test_streams_are_bounded(server: Server, visitor: Visitor) -> None:
    assert server.console is not None
    server.console.streams.most = 4
    with stream(visitor) as first, stream(visitor) as second:
        next_event(first)
        next_event(second)
        refused = visitor.get("live")
        assert refused.status == 503
        assert "client at 127.0.0.1 has 2 of the server's 4 live pages" in refused.text
        assert visitor.get().status == 200
    wait_until(lambda: streams(server) == 0)
    with stream(visitor) as again:
        assert next_event(again)


def test_streams_that_come_at_once_are_bounded(
    server: Server, visitor: Visitor, caplog: pytest.LogCaptureFixture
) -> None:
    assert server.console is not None
    server.console.streams.most = 4
    ask = f"GET /console/live HTTP/1.1\r\nHost: localhost\r\ncookie: {visitor.cookie}\r\n\r\n"
    with ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(visitor.address, timeout=60))
            for _ in range(40)
        ]
        for each in clients:
            each.sendall(ask.encode())
        assert all(each.recv(1) for each in clients)
        # Of those that are refused nothing is left.
        connections = server.listeners["http"].connections
        wait_until(lambda: sum(each._streaming for each in connections) == 2)
        assert streams(server) == 2
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


def test_a_key_sees_only_its_queues_live(
    guarded: Server, stranger: Visitor, tokens: dict[str, str]
) -> None:
    stranger.log_in(tokens["root"])
    stranger.get()
    stranger.log_in(tokens["worker"])
    with stream(stranger) as answer:
        seen = next_event(answer)
    assert {key.partition(":")[0] for key in seen} == {"orders", "all"}
    assert "all:published" not in seen


@pytest.mark.parametrize("kept", [[], ["consume:orders"]])
def test_a_stream_ends_with_its_permission(tmp_path: Path, kept: list[str]) -> None:
    path = tmp_path / "keys.toml"
    token = f"one:{add_key(path, 'one', ['consume:*'])}"
    add_key(path, "two", ["all"])
    with running("memory:", http="127.0.0.1:0", keys=path) as server:
        visitor = Visitor(server)
        visitor.log_in(token)
        with stream(visitor, "health/live") as answer:
            next_event(answer)
            keys = read_keys(path)
            narrowed = msgspec.structs.replace(keys.pop("one"), permissions=kept)
            write_keys(path, {**keys, "one": narrowed} if kept else keys)
            assert server.keys is not None
            server.keys.refresh()
            # To its end.
            answer.read()
        wait_until(lambda: streams(server) == 0)


def test_a_stop_does_not_wait_for_streams() -> None:
    with running("memory:", http="127.0.0.1:0", grace="10m") as server:
        visitor = Visitor(server)
        manager = stream(visitor)
        answer = manager.__enter__()
        next_event(answer)
    # The server is down, long before its time of grace is over.
    assert streams(server) == 0
    answer.read()
    manager.__exit__(None, None, None)


def test_a_stranger_gets_no_stream(stranger: Visitor) -> None:
    assert stranger.get("live").status == 303


def test_a_stream_that_fails_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def parts() -> AsyncGenerator[bytes, None]:
        yield b"one"
        raise RuntimeError("two")

    async def failing(_: Request) -> Response:
        return Response(stream=parts())

    with serving(wrap=lambda _: failing) as server, socket.socket() as client:
        client.settimeout(60)
        client.connect((server.host, server.port))
        client.sendall(b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with client.makefile("rb") as answer:
            assert answer.read().endswith(b"one")
    assert "a stream failed for GET /stream" in caplog.text


def test_a_client_that_reads_nothing_is_let_go() -> None:
    ended = threading.Event()
    most: list[int] = [0]
    part = b"x" * 65_536

    async def parts() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield part
                size = max(
                    each._transport.get_write_buffer_size() for each in server.http.connections
                )
                most.append(size)
                await asyncio.sleep(0)
        finally:
            ended.set()

    async def endless(_: Request) -> Response:
        return Response(stream=parts())

    bounds = HttpBounds(stalled_write_ms=200)
    with serving(wrap=lambda _: endless, bounds=bounds) as server, socket.socket() as slow:
        slow.connect((server.host, server.port))
        slow.sendall(b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(ended.is_set)
    assert max(most) <= limits.HTTP_WRITE_HIGH_WATER_BYTES + len(part) + 1_000
