"""Values of the OpenData-Queue records: active buckets and their summaries, history, specs.

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
    summary   ready u16, delayed u16, in flight u16      how many messages are in each state
              oldest u64                                 lowest id of a waiting message; 0 if none
              Array<late u16>                            which messages count as delayed:
                                                         claim number - bucket number
              due i64, message u64                       the first of those to come due; absent
                                                         without any
              Array<head>                                the first message in turn of each lane
      head       group Utf8, priority u8, visible at i64, message u64
              Array<held>                                FIFO groups with messages in flight
      held       group Utf8, in flight u16

A lane's head is its first *ready* message. On a FIFO queue it is its first *waiting* one, whose
time does not decide its turn: its ``visible at`` is 0. A summary lists the messages that count as
delayed. Their times do not tell: a message whose time has come counts as delayed until the sweep
has counted it over.

Upgrade recipe: a changed record gets another first byte of its key; a spec has a version byte of
its own. Add the fields behind those that are there, keep the decoder, and let it give the new
fields their defaults. Summaries under an old key are deleted: the store makes new ones from the
buckets when it opens.

``decode_active`` gives every element with its own bytes, so that a bucket whose other elements
did not change is rewritten by joining them.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from struct import error as struct_error
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeVar

import msgspec

from penstock.errors import CorruptRecord
from penstock.limits import MAX_BUCKET_EXPONENT
from penstock.model import QueueSpec
from penstock.store.codec.opendata import (
    MAX_U32,
    check_end,
    pack_count,
    read_count,
    read_utf8,
    utf8,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

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


class Due(NamedTuple):
    """The delayed message that comes due first."""

    visible_at: int
    message_id: int


class LaneHead(NamedTuple):
    """The first message in turn of a lane."""

    group: str
    priority: int
    visible_at: int
    message_id: int


class HeldGroup(NamedTuple):
    """A FIFO group and how many messages of the bucket it has in flight."""

    group: str
    in_flight: int


class Summary(NamedTuple):
    """Counts and first messages of a bucket."""

    ready: int
    delayed: int
    in_flight: int
    oldest: int
    late: tuple[int, ...]
    due: Due | None
    heads: list[LaneHead]
    held: list[HeldGroup]


_AVAILABLE: Final = Struct("<QQHI")
_IN_FLIGHT: Final = Struct("<QQqqHI")
_ADDED: Final = Struct("<qHBH")
_SETTLED: Final = Struct("<QQqHI")
_LENGTH: Final = Struct("<H")
_CLAIMED: Final = Struct("<qH")
_ENDED: Final = Struct("<qBH")
_SUMMARY: Final = Struct("<HHHQ")
_DUE: Final = Struct("<qQ")
_HEAD: Final = Struct("<BqQ")
_HELD: Final = Struct("<H")

# Skips the argument checks of a NamedTuple's own constructor: half the time of a decoder.
_new: Final = tuple.__new__
_Entry = TypeVar("_Entry", Available, InFlight)
_Group = TypeVar("_Group", LaneHead, HeldGroup)


# --- active ---------------------------------------------------------------------------------


def encode_available(entry: Available) -> bytes:
    """Encode one element of the available Array."""
    return _encode_entry(entry, _AVAILABLE, 3)


def encode_in_flight(entry: InFlight) -> bytes:
    """Encode one element of the in-flight Array."""
    assert len(entry.lease) == LEASE_BYTES, "a lease is 16 bytes"
    return _encode_entry(entry, _IN_FLIGHT, 5) + entry.lease


def _encode_entry(entry: tuple[Any, ...], head: Struct, at: int) -> bytes:
    """Encode the fields that both Arrays have; ``at`` is the position of the metadata."""
    metadata, group = entry[at], entry[at + 4].encode()
    return b"".join(
        (
            head.pack(*entry[:at], len(metadata)),
            metadata,
            _ADDED.pack(*entry[at + 1 : at + 4], len(group)),
            group,
        )
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
    available, pos = _read_entries(buf, 0, Available, _AVAILABLE, 0)
    in_flight, pos = _read_entries(buf, pos, InFlight, _IN_FLIGHT, LEASE_BYTES)
    check_end(buf, pos, "active")
    return available, in_flight


def _read_entries(
    buf: bytes, pos: int, kind: type[_Entry], head: Struct, lease_bytes: int
) -> tuple[list[tuple[_Entry, bytes]], int]:
    """Read one of the two Arrays; only messages in flight have a lease, behind the other fields."""
    count = read_count(buf, pos, "active")
    pos += 2
    found: list[tuple[_Entry, bytes]] = []
    unpack_head, head_size, unpack_added = head.unpack_from, head.size, _ADDED.unpack_from
    try:
        for _ in range(count):
            start = pos
            *fields, length = unpack_head(buf, pos)
            pos += head_size
            fields.append(buf[pos : pos + length])
            pos += length
            visible_at, forgiven, priority, length = unpack_added(buf, pos)
            pos += 13
            group = str(buf[pos : pos + length], "utf-8") if length else ""
            fields += (visible_at, forgiven, priority, group)
            pos += length
            if lease_bytes:
                fields.append(buf[pos : pos + lease_bytes])
                pos += lease_bytes
            found.append((_new(kind, fields), buf[start:pos]))
    except (struct_error, UnicodeDecodeError) as error:
        raise _broken("active", len(found), count, error) from None
    return found, pos


def _broken(record: str, index: int, count: int, error: Exception) -> CorruptRecord:
    why = "text that is not UTF-8" if isinstance(error, UnicodeDecodeError) else "ends early"
    return CorruptRecord(f"{record}: element {index} of {count}: {why}")


# --- done, failed, attempts -----------------------------------------------------------------


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
    record = "failed" if failed else "done"
    count = read_count(buf, 0, record)
    pos = 2
    found: list[EndedRecord] = []
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
            fields = (message_id, claim_id, ended_at, attempts, metadata, reason)
            found.append(_new(EndedRecord, fields))
    except (struct_error, UnicodeDecodeError) as error:
        raise _broken(record, len(found), count, error) from None
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


# --- summaries ------------------------------------------------------------------------------


@lru_cache(maxsize=8192)
def _group(group: str) -> bytes:
    return utf8(group)


def encode_head(group: str, priority: int, visible_at: int, message_id: int) -> bytes:
    """Encode one element of the Array of heads."""
    return _group(group) + _HEAD.pack(priority, visible_at, message_id)


def encode_held(group: str, in_flight: int) -> bytes:
    """Encode one element of the Array of held groups."""
    return _group(group) + _HELD.pack(in_flight)


def pack_summary(
    *,
    ready: int,
    in_flight: int,
    oldest: int,
    late: Sequence[int],
    due: Due | None,
    heads_encoded: Collection[bytes],
    held_encoded: Collection[bytes],
) -> bytes:
    """Join encoded elements to a summary; ``late`` messages are the delayed ones."""
    assert bool(late) == (due is not None), "a delayed message comes due"
    return b"".join(
        (
            _SUMMARY.pack(ready, len(late), in_flight, oldest),
            Struct(f"<{1 + len(late)}H").pack(len(late), *late) if late else b"\0\0",
            b"" if due is None else _DUE.pack(*due),
            pack_count(len(heads_encoded), "summary, heads"),
            *heads_encoded,
            pack_count(len(held_encoded), "summary, held"),
            *held_encoded,
        )
    )


def decode_summary(buf: bytes) -> Summary:
    """Decode a summary."""
    try:
        ready, delayed, in_flight, oldest = _SUMMARY.unpack_from(buf)
        pos = _SUMMARY.size
        count = read_count(buf, pos, "summary")
        late = Struct(f"<{count}H").unpack_from(buf, pos + 2)
        pos += 2 + 2 * count
        due = None
        if count:
            due = Due._make(_DUE.unpack_from(buf, pos))
            pos += _DUE.size
        heads, pos = _read_groups(buf, pos, LaneHead, _HEAD)
        held, pos = _read_groups(buf, pos, HeldGroup, _HELD)
    except struct_error:
        raise CorruptRecord(f"summary: ends early, after {len(buf)} bytes") from None
    check_end(buf, pos, "summary")
    if delayed != len(late):
        raise CorruptRecord(f"summary: {delayed} delayed messages, but {len(late)} are named")
    return Summary(ready, delayed, in_flight, oldest, late, due, heads, held)


def _read_groups(
    buf: bytes, pos: int, kind: type[_Group], fields: Struct
) -> tuple[list[_Group], int]:
    count = read_count(buf, pos, "summary")
    pos += 2
    found: list[_Group] = []
    for _ in range(count):
        group, pos = read_utf8(buf, pos, "summary")
        found.append(kind(group, *fields.unpack_from(buf, pos)))
        pos += fields.size
    return found, pos
