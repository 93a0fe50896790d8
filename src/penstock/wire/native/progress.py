"""How much of what was written to a connection the other side has taken, as far as is known.

Linux tells which bytes of a TCP connection were acknowledged, whatever lies between (TLS).
Elsewhere what the transport has handed on counts as taken.
"""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from asyncio import Transport

__all__ = ["Progress", "progress_of"]

# Of Linux's struct tcp_info: segments under way, bytes acknowledged, bytes that were not sent yet.
_TCP_INFO: Final = getattr(socket, "TCP_INFO", None)
_FIELDS: Final = struct.Struct("=24xI92xQ16xI")


class Progress(NamedTuple):
    """``taken`` grows as the other side takes bytes; ``all``: there is nothing that it has not."""

    taken: int
    all: bool


def progress_of(transport: Transport) -> Progress:
    """Say how far what was written to a transport has come."""
    unwritten = transport.get_write_buffer_size()
    made = transport.get_extra_info("socket")
    try:
        info = made.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _FIELDS.size)
        under_way, acked, unsent = _FIELDS.unpack(info)
    except (AttributeError, TypeError, OSError, struct.error):
        return Progress(-unwritten, not unwritten)
    return Progress(acked, not (unwritten or under_way or unsent))
