"""Values of the OpenData-Queue records in version 1, as the RFC has them.

Penstock writes version 2 (``records``), whose values begin with these fields; version 1 is
read from databases that others wrote, and upgraded. Values are little-endian; a timestamp is
milliseconds since the epoch, which the RFC leaves open::

    active    Array<available>, Array<in flight>
      available  message u64, claim u64, attempts u16, metadata VarBytes
      in flight  message u64, claim u64, claimed at i64, lease deadline i64, attempts u16,
                 metadata VarBytes
    done      Array<message u64, claim u64, done at i64, attempts u16, metadata VarBytes>
    failed    Array<message u64, claim u64, failed at i64, attempts u16, metadata VarBytes>
    attempts  Array<claimed at i64, consumer Utf8>
    spec      filter Utf8, max attempts u16, retention of done in s u32, bucket exponent u8,
              description Utf8

The upgrade recipes are the ``upgrade_`` functions of ``records``.
"""

from __future__ import annotations

from struct import Struct
from struct import error as struct_error
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from penstock.errors import CorruptRecord, InvalidInput
from penstock.limits import MAX_BUCKET_EXPONENT
from penstock.store.codec.encodings import MAX_U16, read_utf8, utf8

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "AttemptV1",
    "AvailableV1",
    "DoneV1",
    "FailedV1",
    "InFlightV1",
    "QueueSpecV1",
    "check_end",
    "decode_active_v1",
    "decode_attempts_v1",
    "decode_done_v1",
    "decode_failed_v1",
    "decode_queue_spec_v1",
    "encode_active_v1",
    "encode_attempts_v1",
    "encode_done_v1",
    "encode_failed_v1",
    "encode_queue_spec_v1",
    "pack_count",
    "read_count",
    "read_queue_spec_v1",
]


class AvailableV1(NamedTuple):
    """A message that can be claimed."""

    message_id: int
    claim_id: int
    attempts: int
    metadata: bytes


class InFlightV1(NamedTuple):
    """A claimed message."""

    message_id: int
    claim_id: int
    claimed_at: int
    lease_deadline: int
    attempts: int
    metadata: bytes


class DoneV1(NamedTuple):
    """A message that a consumer acknowledged."""

    message_id: int
    claim_id: int
    done_at: int
    attempts: int
    metadata: bytes


class FailedV1(NamedTuple):
    """A message that ran out of attempts."""

    message_id: int
    claim_id: int
    failed_at: int
    attempts: int
    metadata: bytes


class AttemptV1(NamedTuple):
    """One claim of a message."""

    claimed_at: int
    consumer: str


class QueueSpecV1(NamedTuple):
    """A queue's settings."""

    filter: str
    max_attempts: int
    done_retention_secs: int
    bucket_exponent: int
    description: str


_COUNT: Final = Struct("<H")
_AVAILABLE: Final = Struct("<QQHI")
_IN_FLIGHT: Final = Struct("<QQqqHI")
_SETTLED: Final = Struct("<QQqHI")
_TIME: Final = Struct("<q")
_SPEC: Final = Struct("<HIB")

_Entry = TypeVar("_Entry", AvailableV1, InFlightV1, DoneV1, FailedV1)


def pack_count(count: int, record: str) -> bytes:
    """Encode the count of an Array."""
    if count > MAX_U16:
        raise InvalidInput(f"{record}: {count} elements, an Array holds at most {MAX_U16}")
    return _COUNT.pack(count)


def read_count(buf: bytes, pos: int, record: str) -> int:
    """Read the count of an Array, which takes two bytes at ``pos``."""
    try:
        (count,) = _COUNT.unpack_from(buf, pos)
    except struct_error:
        raise CorruptRecord(f"{record}: ends before the count at byte {pos}") from None
    return int(count)


def encode_active_v1(available: Sequence[AvailableV1], in_flight: Sequence[InFlightV1]) -> bytes:
    """Encode a bucket of active messages."""
    return _pack_array(_AVAILABLE, available, "active v1, available") + _pack_array(
        _IN_FLIGHT, in_flight, "active v1, in flight"
    )


def decode_active_v1(buf: bytes) -> tuple[list[AvailableV1], list[InFlightV1]]:
    """Give the available and the in-flight messages of a bucket."""
    available, pos = _read_array(_AVAILABLE, AvailableV1, buf, 0, "active v1, available")
    in_flight, pos = _read_array(_IN_FLIGHT, InFlightV1, buf, pos, "active v1, in flight")
    check_end(buf, pos, "active v1")
    return available, in_flight


def encode_done_v1(entries: Sequence[tuple[int, int, int, int, bytes]]) -> bytes:
    """Encode done messages."""
    return _pack_array(_SETTLED, entries, "done v1")


def decode_done_v1(buf: bytes) -> list[DoneV1]:
    """Decode done messages."""
    entries, pos = _read_array(_SETTLED, DoneV1, buf, 0, "done v1")
    check_end(buf, pos, "done v1")
    return entries


def encode_failed_v1(entries: Sequence[FailedV1]) -> bytes:
    """Encode failed messages."""
    return _pack_array(_SETTLED, entries, "failed v1")


def decode_failed_v1(buf: bytes) -> list[FailedV1]:
    """Decode failed messages."""
    entries, pos = _read_array(_SETTLED, FailedV1, buf, 0, "failed v1")
    check_end(buf, pos, "failed v1")
    return entries


def encode_attempts_v1(attempts: Sequence[AttemptV1]) -> bytes:
    """Encode every attempt at one message."""
    parts = [pack_count(len(attempts), "attempts v1")]
    for claimed_at, consumer in attempts:
        parts += (_TIME.pack(claimed_at), utf8(consumer))
    return b"".join(parts)


def decode_attempts_v1(buf: bytes) -> list[AttemptV1]:
    """Decode every attempt at one message."""
    attempts: list[AttemptV1] = []
    pos = 2
    for i in range(read_count(buf, 0, "attempts v1")):
        try:
            (claimed_at,) = _TIME.unpack_from(buf, pos)
        except struct_error:
            raise CorruptRecord(f"attempts v1: ends before attempt {i}, at byte {pos}") from None
        consumer, pos = read_utf8(buf, pos + 8, "attempts v1")
        attempts.append(AttemptV1(claimed_at, consumer))
    check_end(buf, pos, "attempts v1")
    return attempts


def encode_queue_spec_v1(spec: QueueSpecV1) -> bytes:
    """Encode a queue's settings."""
    return b"".join(
        (
            utf8(spec.filter),
            _SPEC.pack(spec.max_attempts, spec.done_retention_secs, spec.bucket_exponent),
            utf8(spec.description),
        )
    )


def decode_queue_spec_v1(buf: bytes) -> QueueSpecV1:
    """Decode a queue's settings."""
    spec, pos = read_queue_spec_v1(buf, "queue spec v1")
    check_end(buf, pos, "queue spec v1")
    return spec


def read_queue_spec_v1(buf: bytes, record: str) -> tuple[QueueSpecV1, int]:
    """Read the fields of version 1, with which every later version begins."""
    filter_, pos = read_utf8(buf, 0, record)
    try:
        max_attempts, secs, exponent = _SPEC.unpack_from(buf, pos)
    except struct_error:
        raise CorruptRecord(f"{record}: ends before the settings at byte {pos}") from None
    if exponent > MAX_BUCKET_EXPONENT:
        raise CorruptRecord(f"{record}: bucket exponent {exponent} is above {MAX_BUCKET_EXPONENT}")
    description, pos = read_utf8(buf, pos + _SPEC.size, record)
    return QueueSpecV1(filter_, max_attempts, secs, exponent, description), pos


def _pack_array(head: Struct, entries: Sequence[tuple[int | bytes, ...]], record: str) -> bytes:
    parts = [pack_count(len(entries), record)]
    pack = head.pack
    for entry in entries:
        metadata = entry[-1]
        assert isinstance(metadata, bytes)
        parts += (pack(*entry[:-1], len(metadata)), metadata)
    return b"".join(parts)


def _read_array(
    head: Struct, kind: type[_Entry], buf: bytes, pos: int, record: str
) -> tuple[list[_Entry], int]:
    count = read_count(buf, pos, record)
    pos += 2
    size = head.size
    unpack = head.unpack_from
    entries: list[_Entry] = []
    for i in range(count):
        try:
            fields: tuple[int, ...] = unpack(buf, pos)
        except struct_error:
            raise CorruptRecord(f"{record}: ends in element {i} of {count}") from None
        start = pos + size
        pos = start + fields[-1]
        entries.append(tuple.__new__(kind, (*fields[:-1], buf[start:pos])))
    return entries, pos


def check_end(buf: bytes, pos: int, record: str) -> None:
    """Refuse bytes after the last field, and a last field that reaches past the bytes."""
    if pos != len(buf):
        raise CorruptRecord(f"{record}: {len(buf)} bytes, but its fields take {pos}")
