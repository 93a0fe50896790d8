"""Values of the OpenData-Queue records in version 2, and the upgrade from version 1.

The version byte is the first byte of the key (``opendata``). Values are little-endian; every
time is milliseconds since the epoch. Version 2 has the fields of version 1 first, in their
order (``records_v1``), then its own::

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
    spec      in ``specs``

Upgrade recipe, 1 to 2: one ``upgrade_`` function for each record says which values the new
fields get. To make a version 3: add its fields behind those of version 2, keep the decoder of
version 2, and write the function that fills in the new fields.

``decode_active`` gives every element with its own bytes, so that a bucket whose other elements
did not change is rewritten by joining them.
"""

from __future__ import annotations

from struct import Struct
from struct import error as struct_error
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.errors import CorruptRecord
from penstock.store.codec.encodings import read_utf8, utf8
from penstock.store.codec.records_v1 import (
    AttemptV1,
    AvailableV1,
    DoneV1,
    FailedV1,
    InFlightV1,
    QueueSpecV1,
    check_end,
    decode_active_v1,
    decode_attempts_v1,
    decode_done_v1,
    decode_failed_v1,
    decode_queue_spec_v1,
    encode_active_v1,
    encode_attempts_v1,
    encode_done_v1,
    encode_failed_v1,
    encode_queue_spec_v1,
    pack_count,
    read_count,
)
from penstock.store.codec.specs import (
    QueueSpecV2,
    decode_queue_spec,
    encode_queue_spec,
    upgrade_queue_spec_v1,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "LEASE_BYTES",
    "AttemptRecord",
    "AttemptV1",
    "Available",
    "AvailableV1",
    "Done",
    "DoneV1",
    "Failed",
    "FailedV1",
    "InFlight",
    "InFlightV1",
    "QueueSpecV1",
    "QueueSpecV2",
    "decode_active",
    "decode_active_v1",
    "decode_attempt",
    "decode_attempts_v1",
    "decode_done",
    "decode_done_v1",
    "decode_failed",
    "decode_failed_v1",
    "decode_queue_spec",
    "decode_queue_spec_v1",
    "encode_active_v1",
    "encode_attempt",
    "encode_attempts_v1",
    "encode_available",
    "encode_done",
    "encode_done_v1",
    "encode_failed",
    "encode_failed_v1",
    "encode_in_flight",
    "encode_queue_spec",
    "encode_queue_spec_v1",
    "pack_active",
    "upgrade_active_v1",
    "upgrade_attempts_v1",
    "upgrade_done_v1",
    "upgrade_failed_v1",
    "upgrade_queue_spec_v1",
]

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


# Nothing was added to a done message, so its two versions are one.
Done = DoneV1


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
_FAILED: Final = Struct("<QQqHI")
_LENGTH: Final = Struct("<H")
_TIME: Final = Struct("<q")
_ENDED: Final = Struct("<qB")

_pack_available: Final = _AVAILABLE.pack
_pack_in_flight: Final = _IN_FLIGHT.pack
_pack_added: Final = _ADDED.pack
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
            pack_count(len(available_encoded), "active v2, available"),
            *available_encoded,
            pack_count(len(in_flight_encoded), "active v2, in flight"),
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
    check_end(buf, pos, "active v2")
    return available, in_flight


def _read_available(buf: bytes) -> tuple[list[tuple[Available, bytes]], int]:
    count = read_count(buf, 0, "active v2, available")
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
        raise _broken("active v2, available", len(found), count, error) from None
    return found, pos


def _read_in_flight(buf: bytes, pos: int) -> tuple[list[tuple[InFlight, bytes]], int]:
    count = read_count(buf, pos, "active v2, in flight")
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
        raise _broken("active v2, in flight", len(found), count, error) from None
    return found, pos


def _broken(record: str, index: int, count: int, error: Exception) -> CorruptRecord:
    why = "text that is not UTF-8" if isinstance(error, UnicodeDecodeError) else "ends early"
    return CorruptRecord(f"{record}: element {index} of {count}: {why}")


# --- done, failed, attempts -----------------------------------------------------------------

encode_done = encode_done_v1
decode_done = decode_done_v1


def encode_failed(entries: Sequence[Failed]) -> bytes:
    """Encode failed messages."""
    parts = [pack_count(len(entries), "failed v2")]
    for message_id, claim_id, failed_at, attempts, metadata, reason in entries:
        parts += (
            _FAILED.pack(message_id, claim_id, failed_at, attempts, len(metadata)),
            metadata,
            utf8(reason),
        )
    return b"".join(parts)


def decode_failed(buf: bytes) -> list[Failed]:
    """Decode failed messages."""
    count = read_count(buf, 0, "failed v2")
    pos = 2
    found: list[Failed] = []
    try:
        for _ in range(count):
            message_id, claim_id, failed_at, attempts, length = _FAILED.unpack_from(buf, pos)
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
        raise _broken("failed v2", len(found), count, error) from None
    check_end(buf, pos, "failed v2")
    return found


def encode_attempt(attempt: AttemptRecord) -> bytes:
    """Encode one attempt."""
    claimed_at, consumer, ended_at, outcome, reason = attempt
    return _TIME.pack(claimed_at) + utf8(consumer) + _ENDED.pack(ended_at, outcome) + utf8(reason)


def decode_attempt(buf: bytes) -> AttemptRecord:
    """Decode one attempt."""
    try:
        (claimed_at,) = _TIME.unpack_from(buf)
        consumer, pos = read_utf8(buf, 8, "attempt v2")
        ended_at, outcome = _ENDED.unpack_from(buf, pos)
    except struct_error:
        raise CorruptRecord(f"attempt v2: ends early, after {len(buf)} bytes") from None
    reason, pos = read_utf8(buf, pos + _ENDED.size, "attempt v2")
    check_end(buf, pos, "attempt v2")
    return AttemptRecord(claimed_at, consumer, ended_at, outcome, reason)


# --- from version 1 to 2 --------------------------------------------------------------------


def upgrade_active_v1(buf: bytes) -> bytes:
    """Make all visible, forgive nothing, priority 0, no group; in flight: a lease of zeros.

    Nobody holds a receipt for a lease of zeros: such a message comes back at its deadline.
    """
    available, in_flight = decode_active_v1(buf)
    return pack_active(
        [encode_available(Available(*entry, 0, 0, 0, "")) for entry in available],
        [
            encode_in_flight(InFlight(*entry, 0, 0, 0, "", bytes(LEASE_BYTES)))
            for entry in in_flight
        ],
    )


def upgrade_done_v1(buf: bytes) -> bytes:
    """Keep the value as it is, once it has been checked; the key gets part 0."""
    decode_done_v1(buf)
    return buf


def upgrade_failed_v1(buf: bytes) -> bytes:
    """Give every message an empty reason; the key gets part 0."""
    return encode_failed([Failed(*entry, "") for entry in decode_failed_v1(buf)])


def upgrade_attempts_v1(buf: bytes) -> list[bytes]:
    """Give one value for each attempt, from attempt 1 on; how they ended is not known: zeros."""
    return [encode_attempt(AttemptRecord(*old, 0, 0, "")) for old in decode_attempts_v1(buf)]
