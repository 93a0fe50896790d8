"""Frames of the native protocol: read, answered or refused, however they are cut."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from penstock.errors import InvalidInput
from penstock.packing import write_envelope
from penstock.wire import native as wire
from penstock.wire.frames import HEADER_BYTES, FrameReader

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["SEEDS", "one"]


def _frame(value: object) -> bytes:
    body = msgspec.msgpack.encode(value)
    return len(body).to_bytes(4, "big") + body


ATTRIBUTES = {"queue": "orders", "n": 1, "f": 1.5, "t": True}
SEEDS = (
    _frame(wire.Hello(wire.MAGIC, wire.VERSION)) + _frame([25, 1]),
    _frame([2, 7, "orders", 10, 30_000, 5_000, "me"]) + _frame([3, 8, ["receipt"], None]),
    _frame([1, 9, [[b"payload", msgspec.msgpack.encode(["", 0, 0, ATTRIBUTES])]], "orders"]),
    _frame([12, 3, {"name": "q", "filter": "a = 1"}]) + b"\x00\x00\x00\x02\x91",
    _frame([99, 1]) + bytes(4),
    # A name that is not UTF-8.
    _frame([8, 1, "name"]).replace(b"name", b"n\xe5me"),
    _frame(wire.Hello(wire.MAGIC, wire.VERSION)).replace(b"p", b"\xe5"),
    (2**31).to_bytes(4, "big"),
)


def events(pieces: Iterable[bytes]) -> list[str]:
    """Return what a server makes of a stream: its requests, or why it ends."""
    reader = FrameReader(4_096)
    found: list[str] = []
    try:
        for piece in pieces:
            reader.feed(piece)
            while (frame := reader.take()) is not None:
                found.append(_read(bytes(frame), first=not found))
    except InvalidInput as error:
        found.append(f"ended: {error}")
    return found


def _read(frame: bytes, *, first: bool) -> str:
    if first:
        try:
            return repr(wire.read_hello(frame))
        except InvalidInput:
            # A client would be told and let go; here the frame is read on as a request.
            pass
    request = wire.read_request(frame)
    if not isinstance(request, wire.Failure):
        # A publish is stored in the bytes that came: they must be those of its fields.
        again = wire.Encoder().frame(request)[HEADER_BYTES:]
        assert msgspec.msgpack.encode(wire.read_request(again), enc_hook=write_envelope) == again
    # Whatever can be read can be answered.
    wire.Encoder().frame(wire.Failure(request.id, "InvalidInput", "no"))
    return repr(request)


def one(data: bytes) -> None:
    """Feed a stream whole and byte by byte; read it as a client would, too."""
    whole = events([data])
    assert whole == events(data[at : at + 1] for at in range(len(data)))
    with contextlib.suppress(*wire.UNREADABLE):
        wire.decode_answer(data)
