"""The metadata of a message: everything but its payload, as queues and log carry it.

One byte of version, then a MessagePack array::

    01 | [published_at_ms, group, priority, size, delay_ms, attributes]

MessagePack keeps integers, floats, booleans and null apart, which the filters' typing needs.
Upgrade recipe: append fields at the end of the array and raise the version byte; a reader of
version n fills what an older record lacks with the defaults below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.errors import CorruptRecord
from penstock.model import Value

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Metadata", "decode_metadata", "encode_metadata"]

VERSION: Final = 1


class Metadata(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a record says about its message."""

    published_at_ms: int
    group: str
    priority: int
    size: int
    delay_ms: int
    attributes: dict[str, Value]


_PREFIX: Final = bytes([VERSION])
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final[Callable[[memoryview | bytes], Metadata]] = msgspec.msgpack.Decoder(Metadata).decode


def encode_metadata(metadata: Metadata) -> bytes:
    """Lay out a metadata record."""
    return _PREFIX + _encode(metadata)


def decode_metadata(record: bytes) -> Metadata:
    """Read a metadata record."""
    if record[:1] != _PREFIX:
        raise CorruptRecord(f"metadata: version {record[:1].hex() or 'missing'}, 01 is known")
    try:
        return _decode(record[1:])
    except (msgspec.MsgspecError, ValueError) as error:
        raise CorruptRecord(f"metadata: {error}") from error
