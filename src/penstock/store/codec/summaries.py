"""Summary of an active bucket: the counts and first messages that a claim needs of it.

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

A summary lists the messages that count as delayed. Their times do not tell: a message whose time
has come counts as delayed until the sweep has counted it over.

Upgrade recipe: change the first byte of the key and delete the summaries under the old one. The
store makes new summaries from the buckets when it opens.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from struct import error as struct_error
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.errors import CorruptRecord
from penstock.store.codec.encodings import check_end, pack_count, read_count, read_utf8, utf8

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_RECORD: Final = "summary"
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
    """Counts and first messages of a bucket."""

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
    """Join encoded elements to a summary; ``late`` messages are the delayed ones."""
    assert bool(late) == (due is not None), "a delayed message comes due"
    return b"".join(
        (
            _COUNTS.pack(ready, len(late), in_flight, oldest),
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
