"""Records of the bucket design: active buckets and their summaries.

Values are little-endian; every time is milliseconds since the epoch. An active bucket has the RFC's
fields first, in their order, then Penstock's, here after a bar. The keys are in ``opendata``::

    active    Array<available>, Array<in flight>
      available  message u64, claim u64, attempts u16, metadata VarBytes
                 | visible at i64, forgiven u16, priority u8, group Utf8
      in flight  message u64, claim u64, claimed at i64, lease deadline i64, attempts u16,
                 metadata VarBytes
                 | visible at i64, forgiven u16, priority u8, group Utf8, lease 16 bytes
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

``decode_active`` gives every element with its own bytes, so that a bucket whose other elements
did not change is rewritten by joining them.

Upgrade recipe: a changed record gets another first byte of its key. Keep the decoder of active
buckets, and let it give new fields their defaults. Delete the summaries under the old key: the
store makes new ones from the buckets when it opens.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from struct import error as struct_error
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from penstock.errors import CorruptRecord
from penstock.store.codec.opendata import broken, check_end, pack_count, read_count, read_utf8, utf8

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


class Summary(NamedTuple):
    """Counts and first messages of a bucket."""

    ready: int
    delayed: int
    in_flight: int
    oldest: int
    late: tuple[int, ...]
    # Time and message id; group, priority, time and message id; group and count.
    due: tuple[int, int] | None
    heads: list[tuple[str, int, int, int]]
    held: list[tuple[str, int]]


_AVAILABLE: Final = Struct("<QQHI")
_IN_FLIGHT: Final = Struct("<QQqqHI")
_ADDED: Final = Struct("<qHBH")
_SUMMARY: Final = Struct("<HHHQ")
_DUE: Final = Struct("<qQ")
_HEAD: Final = Struct("<BqQ")
_HELD: Final = Struct("<H")
# Skips the argument checks of a NamedTuple's own constructor: half the time of a decoder.
_new: Final = tuple.__new__
_Entry = TypeVar("_Entry", Available, InFlight)


# --- active buckets -----------------------------------------------------------------------------


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
    added = _ADDED.pack(*entry[at + 1 : at + 4], len(group))
    return b"".join((head.pack(*entry[:at], len(metadata)), metadata, added, group))


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


def decode_active(buf: bytes) -> tuple[list[tuple[Available, bytes]], list[tuple[InFlight, bytes]]]:
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
        raise broken("active", len(found), count, error) from None
    return found, pos


# --- summaries ----------------------------------------------------------------------------------


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
    due: tuple[int, int] | None,
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
            due = _DUE.unpack_from(buf, pos)
            pos += _DUE.size
        heads, pos = _read_groups(buf, pos, _HEAD)
        held, pos = _read_groups(buf, pos, _HELD)
    except struct_error:
        raise CorruptRecord(f"summary: ends early, after {len(buf)} bytes") from None
    check_end(buf, pos, "summary")
    if delayed != len(late):
        raise CorruptRecord(f"summary: {delayed} delayed messages, but {len(late)} are named")
    return Summary(ready, delayed, in_flight, oldest, late, due, heads, held)


def _read_groups(buf: bytes, pos: int, fields: Struct) -> tuple[list[Any], int]:
    count = read_count(buf, pos, "summary")
    pos += 2
    found = []
    for _ in range(count):
        group, pos = read_utf8(buf, pos, "summary")
        found.append((group, *fields.unpack_from(buf, pos)))
        pos += fields.size
    return found, pos
