"""Summary of an active bucket: what a claim must know of it without reading it.

Key ``02 09 | queue | bucket u64`` (``opendata.bucket_summary_key``). The value is little-endian,
times are milliseconds since the epoch::

    ready u16, delayed u16, in flight u16      how many messages are in each state
    oldest u64                                 lowest id of a waiting message; 0 if none waits
    Array<late u16>                            which messages count as delayed:
                                               claim number - bucket number
    due i64, message u64                       the first of those to come due; absent without any
    Array<head>                                the first message in turn of each lane
      group Utf8, priority u8, visible at i64, message u64
    Array<held>                                FIFO groups with messages in flight
      group Utf8, in flight u16

A lane's head is its first *ready* message. On a FIFO queue it is its first *waiting* one, whose
time does not decide its turn: its ``visible at`` is 0.

Whether a message counts as delayed is written down, not told from its time: one whose time has
come is delayed until the sweep has counted it over.

Upgrade recipe: the version is the first byte of the key, 2 so far. Everything here is told from
the bucket, so a version 3 needs no upgrade of values: delete the summaries of version 2, and the
store makes new ones when it opens.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from struct import error as struct_error
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.errors import CorruptRecord
from penstock.store.codec.encodings import read_utf8, utf8
from penstock.store.codec.records_v1 import check_end, pack_count, read_count

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = [
    "Due",
    "Head",
    "Held",
    "Summary",
    "decode_summary",
    "encode_head",
    "encode_held",
    "pack_summary",
]

_RECORD: Final = "summary v2"
_COUNTS: Final = Struct("<HHHQ")
_DUE: Final = Struct("<qQ")
_HEAD: Final = Struct("<BqQ")
_HELD: Final = Struct("<H")


class Due(NamedTuple):
    """The delayed message that comes due first."""

    visible_at: int
    message_id: int


class Head(NamedTuple):
    """The first message in turn of a lane."""

    group: str
    priority: int
    visible_at: int
    message_id: int


class Held(NamedTuple):
    """A FIFO group and how many messages of the bucket it has in flight."""

    group: str
    in_flight: int


class Summary(NamedTuple):
    """What a bucket holds, in short."""

    ready: int
    delayed: int
    in_flight: int
    oldest: int
    late: tuple[int, ...]
    due: Due | None
    heads: list[Head]
    held: list[Held]


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
    """Join encoded elements to a summary; what is ``late`` is delayed."""
    assert bool(late) == (due is not None), "what is delayed comes due"
    return b"".join(
        (
            _COUNTS.pack(ready, len(late), in_flight, oldest),
            Struct(f"<{1 + len(late)}H").pack(len(late), *late) if late else b"\0\0",
            b"" if due is None else _DUE.pack(*due),
            pack_count(len(heads_encoded), "summary v2, heads"),
            *heads_encoded,
            pack_count(len(held_encoded), "summary v2, held"),
            *held_encoded,
        )
    )


def decode_summary(buf: bytes) -> Summary:
    """Decode a summary."""
    try:
        ready, delayed, in_flight, oldest = _COUNTS.unpack_from(buf)
        pos = _COUNTS.size
        count = read_count(buf, pos, _RECORD)
        late = Struct(f"<{count}H").unpack_from(buf, pos + 2)
        pos += 2 + 2 * count
        due = None
        if count:
            due = Due._make(_DUE.unpack_from(buf, pos))
            pos += _DUE.size
        heads: list[Head] = []
        count = read_count(buf, pos, _RECORD)
        pos += 2
        for _ in range(count):
            group, pos = read_utf8(buf, pos, _RECORD)
            heads.append(Head(group, *_HEAD.unpack_from(buf, pos)))
            pos += _HEAD.size
        held: list[Held] = []
        count = read_count(buf, pos, _RECORD)
        pos += 2
        for _ in range(count):
            group, pos = read_utf8(buf, pos, _RECORD)
            held.append(Held(group, *_HELD.unpack_from(buf, pos)))
            pos += _HELD.size
    except struct_error:
        raise CorruptRecord(f"{_RECORD}: ends early, after {len(buf)} bytes") from None
    check_end(buf, pos, _RECORD)
    if delayed != len(late):
        raise CorruptRecord(f"{_RECORD}: {delayed} delayed messages, but {len(late)} are named")
    return Summary(ready, delayed, in_flight, oldest, late, due, heads, held)
