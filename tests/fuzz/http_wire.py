"""HTTP on one connection: whatever comes is answered or dropped, however it is cut."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

from penstock.server.connections import Connections
from penstock.server.http import HttpBounds, Request, Response
from penstock.server.http_connection import HttpConnection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["SEEDS", "one"]

_POST = b"POST /a?b=c HTTP/1.1\r\nHost: x\r\n"
SEEDS = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    _POST + b"Content-Length: 5\r\n\r\nhello" + b"GET / HTTP/1.0\r\n\r\n",
    _POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nA: b\r\n\r\n",
    _POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
    _POST + b"Upgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 2\r\n\r\n{}GET / HTTP/1.1\r\n",
    _POST + b"Content-Length: 999\r\n\r\n",
    b"HEAD http://x/y HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"GET / HTTP/2.0\r\n\r\n",
    b"POST / HTTP/1.1\r\n\r\nPOST /a\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00",
)
_STATUS = re.compile(rb"HTTP/1\.1 (\d\d\d) [A-Za-z -]*\r\n")


class _Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.out = bytearray()
        self.closed = False
        self.ended = False

    def write(self, data: bytes) -> None:
        assert not self.ended, "written after the end"
        self.out += data

    def write_eof(self) -> None:
        self.ended = True

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = self.ended = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, _: str) -> tuple[str, int]:
        return "127.0.0.1", 1

    def set_write_buffer_limits(self, **_: int) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


class _Loop:
    """Has the time, and runs what is due soon when it is told to."""

    def __init__(self) -> None:
        self._soon: list[tuple[Callable[..., object], tuple[object, ...]]] = []

    def call_soon(self, callback: Callable[..., object], *arguments: object) -> None:
        self._soon.append((callback, arguments))

    def turn(self) -> None:
        while self._soon:
            callback, arguments = self._soon.pop()
            callback(*arguments)

    def time(self) -> float:
        return 0.0


class _Home:
    """A listener with one handler, which says what it was asked."""

    bounds = HttpBounds(body_bytes=1_000)
    secure = False
    stopping = False

    def __init__(self) -> None:
        self.slots = Connections()
        self.connections: set[HttpConnection] = set()

    def handle(self, request: Request) -> Response:
        assert request.method
        assert len(request.body) <= self.bounds.body_bytes
        assert all(name == name.lower() for name in request.headers)
        said = f"{request.method} {request.path} {request.query} {request.headers}"
        return Response(200, said.encode("utf-8", "replace") + request.body)


def answers(pieces: Iterable[bytes]) -> bytes:
    """Return all that a connection writes that gets these pieces."""
    home, transport = _Home(), _Transport()
    loop = _Loop()
    connection = HttpConnection(
        cast(Any, home), cast(Any, loop), home.slots.enter(cast(Any, None), "http")
    )
    connection.connection_made(cast(Any, transport))
    for piece in pieces:
        if transport.closed:
            break
        connection.data_received(piece)
        loop.turn()
    # How it ends may depend on when the last piece came; the answers may not.
    out = bytes(transport.out)
    connection.overdue()
    connection.connection_lost(None)
    assert not home.connections
    assert (len(home.slots), home.slots.held_bytes) == (0, 0)
    # Who sends on before the answer is there needs no leave to go on, and may get none.
    return out.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")


def one(data: bytes) -> None:
    """Feed a stream whole and byte by byte: the answers must be the same."""
    whole = answers([data] if data else [])
    bytewise = answers(data[at : at + 1] for at in range(len(data)))
    assert whole == bytewise, f"{whole!r} and, byte by byte, {bytewise!r}"
    if whole:
        assert _STATUS.match(whole), whole[:100]
