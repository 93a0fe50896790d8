"""The other side of a connection: which protocol it speaks, and how many bytes it has taken."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from asyncio import Transport

# --- other protocols, which the other side speaks at a wrong port -------------------------------

_METHODS: Final = (b"GET ", b"HEAD", b"POST", b"PUT ", b"DELE", b"OPTI", b"PATC", b"CONN", b"TRAC")
_BEGINNINGS: Final = {
    **dict.fromkeys((b"HTTP", *_METHODS), "HTTP"),
    b"PRI ": "gRPC",
    **{bytes((kind, 3, minor)): "TLS" for kind in (0x15, 0x16) for minor in range(5)},
}
# The first frame of an HTTP/2 server behind its length: settings, no flags, stream 0.
_SETTINGS: Final = b"\x04\0\0\0\0\0"


def protocol_of(begin: bytes) -> str:
    """Return which protocol the first bytes of a connection are of; "" for one that is unknown."""
    if begin[3:9] == _SETTINGS:
        return "gRPC"
    return _BEGINNINGS.get(begin[:4]) or _BEGINNINGS.get(begin[:3], "")


# The answer to HTTP clients that came to the native port. SQS clients read JSON.
_NOT_HTTP_BODY: Final = (
    b'{"__type": "InvalidAddress", "message": "this is the native port, for clients that connect to'
    b' penstock://; HTTP and SQS have another port of this server (8816 unless it was set)"}\n'
)
NOT_HTTP: Final = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_NOT_HTTP_BODY), _NOT_HTTP_BODY)
)


# --- progress: how many of the written bytes the other side has taken, as far as is known ---------
#
# Linux tells which bytes of a TCP connection were acknowledged, whatever lies between (TLS).
# Elsewhere bytes count as taken once the transport has handed them on.

# Of Linux's struct tcp_info: segments under way, bytes acknowledged, bytes that were not sent yet.
_TCP_INFO: Final = getattr(socket, "TCP_INFO", None)
_FIELDS: Final = struct.Struct("=24xI92xQ16xI")


class Progress(NamedTuple):
    """``taken`` grows as the other side takes bytes; ``all``: there is nothing that it has not."""

    taken: int
    all: bool


def progress_of(transport: Transport) -> Progress:
    """Return how many of a transport's written bytes the other side has taken."""
    unwritten = transport.get_write_buffer_size()
    made = transport.get_extra_info("socket")
    try:
        info = made.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _FIELDS.size)
        under_way, acked, unsent = _FIELDS.unpack(info)
    except (AttributeError, TypeError, OSError, struct.error):
        return Progress(-unwritten, not unwritten)
    return Progress(acked, not (unwritten or under_way or unsent))
