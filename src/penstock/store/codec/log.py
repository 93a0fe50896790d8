"""Keys and values of the OpenData-Log; the metadata log is an instance of it.

Key map. Every key begins with ``03 01`` (the Log, version 1) and a segment, u32 big-endian;
segment 0 is the system's, the user's begin at 1::

    03 01  segment, 10, TerminatedBytes(key), var_u64    entry          the record's bytes
    03 01  00000000, 20                                  SeqBlock       base u64 BE, size u64 BE
    03 01  00000000, 30, described segment u32           segment meta   start sequence u64 BE,
                                                                        start time i64 BE, in ms
    03 01  segment, 40, key                              listing        empty

The number in an entry's key is its sequence less its segment's start sequence. One sequence
runs over all keys, so that of one key has gaps. The metadata log's key is
``opendata-queue/{instance}/messages/metadata/{log}``; the value of its entries is
``Array<message id u64, metadata VarBytes>``, little-endian.

Upgrade recipe: there is one version. A second gets its own version byte; segments of both are
then read side by side until retention has dropped the older ones.
"""

from __future__ import annotations

from struct import Struct
from struct import error as struct_error
from typing import TYPE_CHECKING, Final

from penstock.errors import CorruptRecord, InvalidInput
from penstock.store.codec.encodings import (
    MAX_U16,
    read_terminated,
    read_var_u64,
    terminated,
    var_u64,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_PREFIX: Final = b"\x03\x01"
_ENTRY: Final = 0x10
_LISTING: Final = 0x40
_HEAD: Final = Struct(">2sIB")
_META: Final = Struct(">Qq")
_COUNT: Final = Struct("<H")
_ELEMENT: Final = Struct("<QI")

SEQ_BLOCK_KEY: Final = b"\x03\x01\x00\x00\x00\x00\x20"
SEGMENT_META_PREFIX: Final = b"\x03\x01\x00\x00\x00\x00\x30"


def entry_key(segment: int, key: bytes, relative_seq: int) -> bytes:
    """Key of an entry; ``relative_seq`` counts from the segment's start sequence."""
    return entry_prefix(segment, key) + var_u64(relative_seq)


def entry_prefix(segment: int, key: bytes) -> bytes:
    """Prefix of the entries of one key in one segment."""
    return _HEAD.pack(_PREFIX, segment, _ENTRY) + terminated(key)


def parse_entry_key(key: bytes) -> tuple[int, bytes, int]:
    """Give segment, the log's key and the relative sequence."""
    segment = _read_head(key, _ENTRY, "log entry key")
    log_key, pos = read_terminated(key, _HEAD.size, "log entry key")
    relative_seq, pos = read_var_u64(key, pos, "log entry key")
    if pos != len(key):
        raise CorruptRecord(f"log entry key: {len(key) - pos} bytes after its end at byte {pos}")
    return segment, log_key, relative_seq


def segment_meta_key(segment: int) -> bytes:
    """Key of the description of a segment."""
    return SEGMENT_META_PREFIX + segment.to_bytes(4, "big")


def parse_segment_meta_key(key: bytes) -> int:
    """Give the segment that the record describes."""
    if len(key) != 11 or not key.startswith(SEGMENT_META_PREFIX):
        raise CorruptRecord(f"segment meta key: {key.hex(' ')} is none")
    return int.from_bytes(key[7:], "big")


def encode_segment_meta(start_seq: int, start_time_ms: int) -> bytes:
    """Encode where in the sequence, and when, a segment starts."""
    return _META.pack(start_seq, start_time_ms)


def decode_segment_meta(buf: bytes) -> tuple[int, int]:
    """Give start sequence and start time of a segment."""
    if len(buf) != _META.size:
        raise CorruptRecord(f"segment meta: {len(buf)} bytes, not {_META.size}")
    start_seq, start_time_ms = _META.unpack(buf)
    return start_seq, start_time_ms


def listing_key(segment: int, key: bytes) -> bytes:
    """Key that says that a segment holds entries of ``key``."""
    return listing_prefix(segment) + key


def listing_prefix(segment: int) -> bytes:
    """Prefix of the listing of a segment's keys."""
    return _HEAD.pack(_PREFIX, segment, _LISTING)


def parse_listing_key(key: bytes) -> tuple[int, bytes]:
    """Give segment and the log's key."""
    return _read_head(key, _LISTING, "listing key"), key[_HEAD.size :]


def metadata_log_key(instance_id: str, log_id: str) -> bytes:
    """Key, inside the Log, of one metadata log of one instance."""
    return f"opendata-queue/{instance_id}/messages/metadata/{log_id}".encode()


def encode_metadata_batch(items: Sequence[tuple[int, bytes]]) -> bytes:
    """Encode message ids and their metadata as the value of one entry."""
    if len(items) > MAX_U16:
        raise InvalidInput(f"{len(items)} messages: a metadata record holds at most {MAX_U16}")
    pack = _ELEMENT.pack
    parts = [_COUNT.pack(len(items))]
    for message_id, metadata in items:
        parts += (pack(message_id, len(metadata)), metadata)
    return b"".join(parts)


def decode_metadata_batch(buf: bytes) -> list[tuple[int, bytes]]:
    """Give message ids and their metadata."""
    unpack = _ELEMENT.unpack_from
    items: list[tuple[int, bytes]] = []
    pos = 2
    try:
        (count,) = _COUNT.unpack_from(buf)
        for _ in range(count):
            message_id, length = unpack(buf, pos)
            pos += 12
            items.append((message_id, buf[pos : pos + length]))
            pos += length
    except struct_error:
        raise CorruptRecord(f"metadata record: ends early, in element {len(items)}") from None
    # Only the last element can reach past the end: another one would have no head after it.
    if pos != len(buf):
        raise CorruptRecord(f"metadata record: {len(buf)} bytes, its elements take {pos}")
    return items


def _read_head(key: bytes, tag: int, record: str) -> int:
    try:
        prefix, segment, found = _HEAD.unpack_from(key)
    except struct_error:
        raise CorruptRecord(f"{record}: {key.hex(' ')} is none") from None
    if prefix != _PREFIX or found != tag:
        raise CorruptRecord(f"{record}: {key.hex(' ')} is none")
    return int(segment)
