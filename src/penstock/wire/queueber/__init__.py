"""Queueber's wire: its interface is ``rpc.capnp``; here are the ids and leases that clients see.

An item's id is laid out as a UUID of version 8, and sorts in the order of publishing::

    message id, bits 63-16 | 8 | bits 15-4 | 10 | bits 3-0, then 58 bits of 0
"""

from __future__ import annotations

import re
from typing import Final

_ID_BYTES: Final = 16
_SET: Final = 0x8 << 76 | 0b10 << 62
_TOKEN: Final = re.compile(rb"[0-9A-Za-z_-]{1,128}")


def item_id(message_id: int) -> bytes:
    """Return the id of a message as clients see it."""
    value = message_id >> 16 << 80 | (message_id >> 4 & 0xFFF) << 64 | (message_id & 0xF) << 58
    return (value | _SET).to_bytes(_ID_BYTES, "big")


def message_of(data: bytes) -> int | None:
    """Return the message that an id names; None if it is no id of ours."""
    if len(data) != _ID_BYTES:
        return None
    value = int.from_bytes(data, "big")
    message_id = value >> 80 << 16 | (value >> 64 & 0xFFF) << 4 | value >> 58 & 0xF
    return message_id if item_id(message_id) == data else None


def lease_data(token: str) -> bytes:
    """Return a lease as clients see it."""
    return token.encode()


def lease_of(data: bytes) -> str | None:
    """Return the token of a lease; None if it is no lease of ours."""
    return data.decode() if _TOKEN.fullmatch(data) else None
