"""Values of the OpenData-Queue records: active buckets, done and failed messages, attempts, specs.

Values are little-endian; every time is milliseconds since the epoch. A record has the RFC's fields
first, in their order, then Penstock's, here after a bar. The keys are in ``opendata``::

    active    Array<available>, Array<in flight>
      available  message u64, claim u64, attempts u16, metadata VarBytes
                 | visible at i64, forgiven u16, priority u8, group Utf8
      in flight  message u64, claim u64, claimed at i64, lease deadline i64, attempts u16,
                 metadata VarBytes
                 | visible at i64, forgiven u16, priority u8, group Utf8, lease 16 bytes
    done      Array<message u64, claim u64, done at i64, attempts u16, metadata VarBytes>
    failed    Array<message u64, claim u64, failed at i64, attempts u16, metadata VarBytes
                    | reason Utf8>
    attempt   claimed at i64, consumer Utf8
              | ended at i64, outcome u8, reason Utf8
    spec      01, then MessagePack: [number of the queue, map of QueueSpec's fields]

Upgrade recipe: a changed record gets another first byte of its key; a spec has a version byte of
its own. Add the fields behind those that are there, keep the decoder, and let it give the new
fields their defaults.

``decode_active`` gives every element with its own bytes, so that a bucket whose other elements
did not change is rewritten by joining them.
"""

from __future__ import annotations

from struct import Struct
from struct import error as struct_error
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec

from penstock.errors import CorruptRecord
from penstock.limits import MAX_BUCKET_EXPONENT
from penstock.model import QueueSpec
from penstock.store.codec.encodings import (
    MAX_U32,
    check_end,
    pack_count,
    read_count,
    read_utf8,
    utf8,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

LEASE_BYTES: Final = 16


class Available(NamedTuple):
    """A message that can be claimed from ``visible_at`` on."""

    message_id: int
    claim_id: int
    attempts: int
    metadata: bytes
    visible_at: int
    forgiven: int
    priority: int
    group: str


class InFlight(NamedTuple):
    """A message that a consumer holds under ``lease`` until ``lease_deadline``."""

    message_id: int
    claim_id: int
    claimed_at: int
    lease_deadline: int
    attempts: int
    metadata: bytes
    visible_at: int
    forgiven: int
    priority: int
    group: str
    lease: bytes


class Done(NamedTuple):
    """A message that a consumer acknowledged."""

    message_id: int
    claim_id: int
    done_at: int
    attempts: int
    metadata: bytes


class Failed(NamedTuple):
    """A message that ran out of attempts, and the reason of the last one."""

    message_id: int
    claim_id: int
    failed_at: int
    attempts: int
    metadata: bytes
    reason: str


class AttemptRecord(NamedTuple):
    """One claim of a message, and how it ended."""

    claimed_at: int
    consumer: str
    ended_at: int
    outcome: int
    reason: str


_AVAILABLE: Final = Struct("<QQHI")
_IN_FLIGHT: Final = Struct("<QQqqHI")
_ADDED: Final = Struct("<qHBH")
_SETTLED: Final = Struct("<QQqHI")
_LENGTH: Final = Struct("<H")
_CLAIMED: Final = Struct("<qH")
_ENDED: Final = Struct("<qBH")

_pack_available: Final = _AVAILABLE.pack
_pack_in_flight: Final = _IN_FLIGHT.pack
_pack_added: Final = _ADDED.pack
_pack_settled: Final = _SETTLED.pack
# Skips the argument checks of a NamedTuple's own constructor: half the time of a decoder.
_new: Final = tuple.__new__


# --- active ---------------------------------------------------------------------------------


def encode_available(entry: Available) -> bytes:
    """Encode one element of the available Array."""
    message_id, claim_id, attempts, metadata, visible_at, forgiven, priority, group = entry
    raw = group.encode()
    return (
        _pack_available(message_id, claim_id, attempts, len(metadata))
        + metadata
        + _pack_added(visible_at, forgiven, priority, len(raw))
        + raw
    )


def encode_in_flight(entry: InFlight) -> bytes:
    """Encode one element of the in-flight Array."""
    (
        message_id,
        claim_id,
        claimed_at,
        lease_deadline,
        attempts,
        metadata,
        visible_at,
        forgiven,
        priority,
        group,
        lease,
    ) = entry
    assert len(lease) == LEASE_BYTES, "a lease is 16 bytes"
    raw = group.encode()
    return (
        _pack_in_flight(message_id, claim_id, claimed_at, lease_deadline, attempts, len(metadata))
        + metadata
        + _pack_added(visible_at, forgiven, priority, len(raw))
        + raw
        + lease
    )


def pack_active(available_encoded: Sequence[bytes], in_flight_encoded: Sequence[bytes]) -> bytes:
    """Join encoded elements to the value of an active bucket."""
    return b"".join(
        (
            pack_count(len(available_encoded), "active, available"),
            *available_encoded,
            pack_count(len(in_flight_encoded), "active, in flight"),
            *in_flight_encoded,
        )
    )


def decode_active(
    buf: bytes,
) -> tuple[list[tuple[Available, bytes]], list[tuple[InFlight, bytes]]]:
    """Give the available and the in-flight messages of a bucket, each with its own bytes."""
    # A length that reaches past the end is met by the next read, or by the check of the end.
    available, pos = _read_available(buf)
    in_flight, pos = _read_in_flight(buf, pos)
    check_end(buf, pos, "active")
    return available, in_flight


def _read_available(buf: bytes) -> tuple[list[tuple[Available, bytes]], int]:
    count = read_count(buf, 0, "active, available")
    pos = 2
    found: list[tuple[Available, bytes]] = []
    unpack_head = _AVAILABLE.unpack_from
    unpack_added = _ADDED.unpack_from
    try:
        for _ in range(count):
            start = pos
            message_id, claim_id, attempts, length = unpack_head(buf, pos)
            pos += 22
            metadata = buf[pos : pos + length]
            pos += length
            visible_at, forgiven, priority, length = unpack_added(buf, pos)
            pos += 13
            group = str(buf[pos : pos + length], "utf-8") if length else ""
            pos += length
            fields = (
                message_id,
                claim_id,
                attempts,
                metadata,
                visible_at,
                forgiven,
                priority,
                group,
            )
            found.append((_new(Available, fields), buf[start:pos]))
    except (struct_error, UnicodeDecodeError) as error:
        raise _broken("active, available", len(found), count, error) from None
    return found, pos


def _read_in_flight(buf: bytes, pos: int) -> tuple[list[tuple[InFlight, bytes]], int]:
    count = read_count(buf, pos, "active, in flight")
    pos += 2
    found: list[tuple[InFlight, bytes]] = []
    unpack_head = _IN_FLIGHT.unpack_from
    unpack_added = _ADDED.unpack_from
    try:
        for _ in range(count):
            start = pos
            message_id, claim_id, claimed_at, deadline, attempts, length = unpack_head(buf, pos)
            pos += 38
            metadata = buf[pos : pos + length]
            pos += length
            visible_at, forgiven, priority, length = unpack_added(buf, pos)
            pos += 13
            group = str(buf[pos : pos + length], "utf-8") if length else ""
            pos += length + LEASE_BYTES
            fields = (
                message_id,
                claim_id,
                claimed_at,
                deadline,
                attempts,
                metadata,
                visible_at,
                forgiven,
                priority,
                group,
                buf[pos - LEASE_BYTES : pos],
            )
            found.append((_new(InFlight, fields), buf[start:pos]))
    except (struct_error, UnicodeDecodeError) as error:
        raise _broken("active, in flight", len(found), count, error) from None
    return found, pos


def _broken(record: str, index: int, count: int, error: Exception) -> CorruptRecord:
    why = "text that is not UTF-8" if isinstance(error, UnicodeDecodeError) else "ends early"
    return CorruptRecord(f"{record}: element {index} of {count}: {why}")


# --- done, failed, attempts -----------------------------------------------------------------


def encode_done(entries: Sequence[tuple[int, int, int, int, bytes]]) -> bytes:
    """Encode done messages."""
    parts = [pack_count(len(entries), "done")]
    for message_id, claim_id, done_at, attempts, metadata in entries:
        parts += (_pack_settled(message_id, claim_id, done_at, attempts, len(metadata)), metadata)
    return b"".join(parts)


def decode_done(buf: bytes) -> list[Done]:
    """Decode done messages."""
    count = read_count(buf, 0, "done")
    pos = 2
    found: list[Done] = []
    try:
        for _ in range(count):
            *fields, length = _SETTLED.unpack_from(buf, pos)
            pos += 30
            found.append(_new(Done, (*fields, buf[pos : pos + length])))
            pos += length
    except struct_error as error:
        raise _broken("done", len(found), count, error) from None
    check_end(buf, pos, "done")
    return found


def encode_failed(entries: Sequence[Failed]) -> bytes:
    """Encode failed messages."""
    parts = [pack_count(len(entries), "failed")]
    for message_id, claim_id, failed_at, attempts, metadata, reason in entries:
        parts += (_pack_settled(message_id, claim_id, failed_at, attempts, len(metadata)), metadata)
        parts.append(utf8(reason))
    return b"".join(parts)


def decode_failed(buf: bytes) -> list[Failed]:
    """Decode failed messages."""
    count = read_count(buf, 0, "failed")
    pos = 2
    found: list[Failed] = []
    try:
        for _ in range(count):
            message_id, claim_id, failed_at, attempts, length = _SETTLED.unpack_from(buf, pos)
            pos += 30
            metadata = buf[pos : pos + length]
            pos += length
            (length,) = _LENGTH.unpack_from(buf, pos)
            pos += 2
            reason = str(buf[pos : pos + length], "utf-8")
            pos += length
            found.append(
                _new(Failed, (message_id, claim_id, failed_at, attempts, metadata, reason))
            )
    except (struct_error, UnicodeDecodeError) as error:
        raise _broken("failed", len(found), count, error) from None
    check_end(buf, pos, "failed")
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
        claimed_at, _ = _CLAIMED.unpack_from(buf)
        consumer, pos = read_utf8(buf, 8, "attempt")
        ended_at, outcome, _ = _ENDED.unpack_from(buf, pos)
    except struct_error:
        raise CorruptRecord(f"attempt: ends early, after {len(buf)} bytes") from None
    reason, pos = read_utf8(buf, pos + 9, "attempt")
    check_end(buf, pos, "attempt")
    return AttemptRecord(claimed_at, consumer, ended_at, outcome, reason)


# --- specs ----------------------------------------------------------------------------------

_SPEC_VERSION: Final = b"\x01"
_U32 = Annotated[int, msgspec.Meta(ge=0, le=MAX_U32)]
_decode_spec: Final = msgspec.msgpack.Decoder(tuple[_U32, QueueSpec]).decode


def encode_queue_spec(spec: QueueSpec, number: int) -> bytes:
    """Encode a queue's settings and its number; equal settings are equal bytes."""
    ordered = msgspec.structs.replace(spec, labels=dict(sorted(spec.labels.items())))
    return _SPEC_VERSION + msgspec.msgpack.encode((number, ordered))


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
