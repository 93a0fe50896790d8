"""Plain sockets: requests as bytes, so that they can be cut, dribbled and spoilt."""

from __future__ import annotations

import json
import resource
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from penstock.wire import native as wire
from penstock.wire.frames import FrameReader

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "HELLO",
    "Bye",
    "connect",
    "frame",
    "frames",
    "last_frame",
    "post",
    "read_all",
    "room_for_files",
    "status",
]

Bye = wire.Bye


def frame(value: object) -> bytes:
    """Write a native frame."""
    body = msgspec.msgpack.encode(value)
    return len(body).to_bytes(4, "big") + body


HELLO = frame(wire.Hello(wire.MAGIC, wire.VERSION))


def post(operation: str, arguments: dict[str, object], *, more: str = "") -> bytes:
    """Write an SQS request."""
    body = json.dumps(arguments).encode()
    head = (
        f"POST / HTTP/1.1\r\nHost: localhost\r\nX-Amz-Target: AmazonSQS.{operation}\r\n"
        f"Content-Type: application/x-amz-json-1.0\r\n{more}Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def connect(port: int) -> socket.socket:
    """Connect to a port of this machine."""
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def read_all(connection: socket.socket) -> bytes:
    """Read until the other side closes, in whatever way."""
    parts = []
    try:
        while part := connection.recv(65_536):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def status(answer: bytes) -> int:
    """Return the status of an HTTP answer."""
    assert answer.startswith(b"HTTP/1.1 "), answer[:100]
    return int(answer[9:12])


def frames(connection: socket.socket, count: int) -> list[wire.ServerFrame]:
    """Read as many frames of a native server."""
    reader = FrameReader()
    found: list[wire.ServerFrame] = []
    while len(found) < count:
        data = connection.recv(65_536)
        assert data, found
        reader.feed(data)
        while (body := reader.take()) is not None:
            found.append(wire.decode_answer(bytes(body)))
    return found


def last_frame(data: bytes) -> wire.ServerFrame:
    """Return the last of the frames that a native server sent."""
    reader = FrameReader()
    reader.feed(data)
    found = None
    while (body := reader.take()) is not None:
        found = wire.decode_answer(body)
    assert found is not None
    return found


@contextmanager
def room_for_files(wanted: int) -> Iterator[int]:
    """Let this process and its children have as many files open; give how many they may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if most <= soft or soft == resource.RLIM_INFINITY:
        yield wanted
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
