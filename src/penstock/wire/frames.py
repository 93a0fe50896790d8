"""The stream of a native connection: its frames, other protocols at a wrong port, and progress.

A frame is a length of four bytes, big-endian, and as many bytes.
"""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock import limits
from penstock.errors import InvalidInput

if TYPE_CHECKING:
    from asyncio import Transport

HEADER_BYTES: Final = 4


class FrameReader:
    """Cuts a stream, in whatever pieces it comes, into frames.

    It refuses a length that is not allowed before it keeps anything for it. ``max_frame_bytes``
    may be raised on the way; ``pending`` is the number of bytes that were fed and not taken.
    """

    __slots__ = ("_at", "_later", "_now", "max_frame_bytes", "pending")

    def __init__(self, max_frame_bytes: int = limits.MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        self.pending = 0
        # Frames are views of ``_now``, which therefore never changes; the bytes after it are
        # gathered in ``_later`` until a frame needs them.
        self._now = b""
        self._at = 0
        self._later = bytearray()

    def feed(self, data: bytes) -> None:
        """Add the next bytes of the stream."""
        if self.pending:
            self._later += data
        else:
            self._now, self._at = data, 0
        self.pending += len(data)

    def take(self) -> memoryview | None:
        """Return the next whole frame without its length, or None until there is one."""
        if self.pending < HEADER_BYTES:
            return None
        if self._at + HEADER_BYTES > len(self._now):
            self._join()
        begin = self._at + HEADER_BYTES
        size = int.from_bytes(self._now[self._at : begin], "big")
        if not 0 < size <= self.max_frame_bytes:
            raise InvalidInput(f"a frame of {size} bytes; allowed are 1 to {self.max_frame_bytes}")
        if self.pending < HEADER_BYTES + size:
            return None
        if begin + size > len(self._now):
            self._join()
            begin = HEADER_BYTES
        self._at = begin + size
        self.pending -= HEADER_BYTES + size
        return memoryview(self._now)[begin : self._at]

    @property
    def next_bytes(self) -> bytes:
        """The first bytes that were not taken: the length of a frame, if they are of one."""
        return self._now[self._at : self._at + HEADER_BYTES]

    def _join(self) -> None:
        """Move the bytes of ``_later`` behind those of ``_now`` that were not taken."""
        self._now = b"".join((memoryview(self._now)[self._at :], self._later))
        self._at = 0
        self._later = bytearray()


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

# Of Linux's struct tcp_info: segments under way, bytes acknowledged, bytes that were not sent yet;
# and bytes that were sent, those that were sent again included, and how many these were.
_TCP_INFO: Final = getattr(socket, "TCP_INFO", None)
_FIELDS: Final = struct.Struct("=24xI92xQ16xI")
_SENT: Final = struct.Struct("=200xQQ")


class Progress(NamedTuple):
    """``taken`` grows as the other side takes bytes; ``all``: there is nothing that it has not."""

    taken: int
    all: bool


def progress_of(transport: Transport) -> Progress:
    """Return how many of a transport's written bytes the other side has taken."""
    unwritten = transport.get_write_buffer_size()
    if (info := _tcp_info(transport, _FIELDS)) is None:
        return Progress(-unwritten, not unwritten)
    under_way, acked, unsent = info
    return Progress(acked, not (unwritten or under_way or unsent))


def sent_bytes(transport: Transport) -> int | None:
    """Return how many bytes of a connection have been on the line; None where nobody knows."""
    info = _tcp_info(transport, _SENT)
    return None if info is None else info[0] - info[1]


def _tcp_info(transport: Transport, fields: struct.Struct) -> tuple[int, ...] | None:
    try:
        made = transport.get_extra_info("socket")
        return fields.unpack(made.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, fields.size))
    except (AttributeError, TypeError, OSError, struct.error):
        return None
