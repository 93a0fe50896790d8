"""The metadata of a message: everything but its payload, as queues and log carry it.

One byte of version, then a MessagePack array::

    01 | [published_at_ms, group, priority, size, delay_ms, attributes]

A publish lays it out of bytes that are encoded already (:class:`penstock.packing.Envelope`).
MessagePack keeps integers, floats, booleans and null apart, which the filters' typing needs.
Upgrade recipe: append fields at the end of the array and raise the version byte; a reader of
version n fills the fields that an older record lacks with defaults.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.errors import CorruptRecord
from penstock.model import Value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

VERSION: Final = 1


class Metadata(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Fields of a metadata record."""

    published_at_ms: int
    group: str
    priority: int
    size: int
    delay_ms: int
    attributes: dict[str, Value]


class Head(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Fields before the attributes; the decoder skips the attributes unread."""

    published_at_ms: int
    group: str
    priority: int
    size: int
    delay_ms: int


_PREFIX: Final = bytes([VERSION])
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final[Callable[[memoryview | bytes], Metadata]] = msgspec.msgpack.Decoder(Metadata).decode
_decode_many: Final = msgspec.msgpack.Decoder(list[int | Metadata]).decode
_decode_head: Final = msgspec.msgpack.Decoder(Head).decode
_decode_heads: Final = msgspec.msgpack.Decoder(list[int | Head]).decode


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


def read_metadata(record: bytes) -> Metadata | None:
    """Read a metadata record; None if it does not decode."""
    try:
        return decode_metadata(record)
    except CorruptRecord:
        return None


def decode_many(records: Sequence[bytes]) -> Sequence[Metadata | None]:
    """Read metadata records in one call; None for those that do not decode."""
    found = _all_of(records, _decode_many)
    return [read_metadata(record) for record in records] if found is None else found


def decode_heads(records: Sequence[bytes]) -> Sequence[Head | Metadata | None]:
    """Read the fields before the attributes, at a third of the cost; None if that fails too."""
    if len(records) == 1 and records[0][:1] == _PREFIX:
        with suppress(msgspec.MsgspecError, ValueError):
            return [_decode_head(records[0][1:])]
    found = _all_of(records, _decode_heads)
    return [read_metadata(record) for record in records] if found is None else found


def _all_of(records: Sequence[bytes], decode: Callable[[bytes], Any]) -> list[Any] | None:
    # A record is its version, which reads as a MessagePack number, and an array. So all of them
    # end to end are one array of twice their number: one call instead of one for each.
    whole = b"\xdd" + (2 * len(records)).to_bytes(4, "big") + b"".join(records)
    try:
        found: list[Any] = decode(whole)
    except (msgspec.MsgspecError, ValueError):
        return None
    decoded = found[1::2]
    if set(found[::2]) - {VERSION} or int in set(map(type, decoded)):
        return None
    return decoded
