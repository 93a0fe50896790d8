"""Values of the OpenData-Queue records that both designs have: done and failed, attempts, specs.

Values are little-endian; every time is milliseconds since the epoch. A record has the RFC's fields
first, in their order, then Penstock's, here after a bar. The keys are in ``opendata``::

    done      Array<message u64, claim u64, done at i64, attempts u16, metadata VarBytes>
    failed    Array<message u64, claim u64, failed at i64, attempts u16, metadata VarBytes
                    | reason Utf8>
    attempt   claimed at i64, consumer Utf8
              | ended at i64, outcome u8, reason Utf8
    spec      01, then MessagePack: [number of the queue, map of QueueSpec's fields]; without
              limits that are not set

Upgrade recipe: a changed record gets another first byte of its key; a spec has a version byte of
its own. Add the fields behind those that are there, keep the decoder, and let it give the new
fields their defaults.
"""

from __future__ import annotations

from struct import Struct
from struct import error as struct_error
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec

from penstock.errors import CorruptRecord
from penstock.limits import MAX_BUCKET_EXPONENT
from penstock.model import Overflow, QueueSpec
from penstock.store.codec.opendata import (
    MAX_U32,
    broken,
    check_end,
    pack_count,
    read_count,
    utf8,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


class EndedRecord(NamedTuple):
    """A done or a failed message; a failed one has the reason of its last attempt."""

    message_id: int
    claim_id: int
    ended_at: int
    attempts: int
    metadata: bytes
    reason: str = ""


class AttemptRecord(NamedTuple):
    """One claim of a message, and how it ended."""

    claimed_at: int
    consumer: str
    ended_at: int
    outcome: int
    reason: str


_SETTLED: Final = Struct("<QQqHI")
_LENGTH: Final = Struct("<H")
_CLAIMED: Final = Struct("<qH")
_ENDED: Final = Struct("<qBH")
_SPEC_VERSION: Final = b"\x01"
# Only queues with limits have these in their records.
_LIMITS: Final = {"max_messages": 0, "max_bytes": 0, "overflow": Overflow.REFUSE}
_U32 = Annotated[int, msgspec.Meta(ge=0, le=MAX_U32)]
_decode_spec: Final = msgspec.msgpack.Decoder(tuple[_U32, QueueSpec]).decode
# Skips the argument checks of a NamedTuple's own constructor: half the time of a decoder.
_new: Final = tuple.__new__


def encode_ended(
    entries: Sequence[tuple[int, int, int, int, bytes, str]], *, failed: bool
) -> bytes:
    """Encode done messages, or failed ones, which have reasons."""
    parts = [pack_count(len(entries), "failed" if failed else "done")]
    for message_id, claim_id, ended_at, attempts, metadata, reason in entries:
        parts += (_SETTLED.pack(message_id, claim_id, ended_at, attempts, len(metadata)), metadata)
        if failed:
            parts.append(utf8(reason))
    return b"".join(parts)


def decode_ended(buf: bytes, *, failed: bool) -> list[EndedRecord]:
    """Decode done messages, or failed ones."""
    return [_new(EndedRecord, fields) for fields in ended_fields(buf, failed=failed)]


def ended_fields(buf: bytes, *, failed: bool) -> list[tuple[int, int, int, int, bytes, str]]:
    """Decode them as plain tuples, which the garbage collector lets go of: for many of them."""
    record = "failed" if failed else "done"
    count = read_count(buf, 0, record)
    pos = 2
    found: list[tuple[int, int, int, int, bytes, str]] = []
    reason = ""
    try:
        for _ in range(count):
            message_id, claim_id, ended_at, attempts, length = _SETTLED.unpack_from(buf, pos)
            pos += 30
            metadata = buf[pos : pos + length]
            pos += length
            if failed:
                (length,) = _LENGTH.unpack_from(buf, pos)
                pos += 2
                reason = str(buf[pos : pos + length], "utf-8")
                pos += length
            found.append((message_id, claim_id, ended_at, attempts, metadata, reason))
    except (struct_error, UnicodeDecodeError) as error:
        raise broken(record, len(found), count, error) from None
    check_end(buf, pos, record)
    return found


def encode_attempt(attempt: AttemptRecord) -> bytes:
    """Encode one attempt."""
    claimed_at, consumer, ended_at, outcome, reason = attempt
    name, why = consumer.encode(), reason.encode()
    return (
        _CLAIMED.pack(claimed_at, len(name)) + name + _ENDED.pack(ended_at, outcome, len(why)) + why
    )


def decode_attempt(buf: bytes) -> AttemptRecord:
    """Decode one attempt."""
    try:
        claimed_at, size = _CLAIMED.unpack_from(buf)
        at = 10 + size
        ended_at, outcome, length = _ENDED.unpack_from(buf, at)
        consumer, reason = str(buf[10:at], "utf-8"), str(buf[at + 11 : at + 11 + length], "utf-8")
    except struct_error:
        raise CorruptRecord(f"attempt: ends early, after {len(buf)} bytes") from None
    except UnicodeDecodeError as error:
        raise CorruptRecord(f"attempt: a text is not UTF-8: {error.reason}") from None
    check_end(buf, at + 11 + length, "attempt")
    return _new(AttemptRecord, (claimed_at, consumer, ended_at, outcome, reason))


def encode_queue_spec(spec: QueueSpec, number: int) -> bytes:
    """Encode a queue's settings and its number; equal settings are equal bytes."""
    fields = msgspec.structs.asdict(spec)
    fields["labels"] = dict(sorted(spec.labels.items()))
    for name, default in _LIMITS.items():
        if fields[name] == default:
            del fields[name]
    return _SPEC_VERSION + msgspec.msgpack.encode((number, fields))


def decode_queue_spec(record: bytes) -> tuple[QueueSpec, int]:
    """Give a queue's settings and its number."""
    if record[:1] != _SPEC_VERSION:
        raise CorruptRecord(f"queue spec: version {record[:1].hex() or 'missing'}, 01 is known")
    try:
        number, spec = _decode_spec(record[1:])
    except (msgspec.MsgspecError, ValueError) as error:
        raise CorruptRecord(f"queue spec: {error}") from error
    if not 0 <= spec.bucket_exponent <= MAX_BUCKET_EXPONENT:
        exponent = spec.bucket_exponent
        raise CorruptRecord(f"queue spec: bucket exponent {exponent} is not 0 to 4")
    if encode_queue_spec(spec, number) != record:
        raise CorruptRecord(f"queue spec: {len(record)} bytes that are not laid out as one")
    return spec, number
