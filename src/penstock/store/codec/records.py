"""Values of records: done and failed messages, attempts, specs; items and leases.

Every time is milliseconds since the epoch. Values are little-endian. Done, failed, attempt and spec
are OpenData's, which both designs have: the RFC's fields first, in their order, then Penstock's,
here after a bar. The keys are in ``opendata``::

    done      Array<message u64, claim u64, done at i64, attempts u16, metadata VarBytes>
    failed    Array<message u64, claim u64, failed at i64, attempts u16, metadata VarBytes
                    | reason Utf8>
              The count has 8000 added if any first claim is known; then before the elements, for
              each run of elements that have theirs in common: how many they are, var_u64, and the
              first claim as var_u64: 0 unknown, else 1 + zigzag(end of the first element - claim)
    attempt   claimed at i64, consumer Utf8
              | ended at i64, outcome u8, reason Utf8
    spec      01, then MessagePack: [number of the queue, map of QueueSpec's fields]; without
              limits that are not set

Upgrade recipe: a changed record gets another first byte of its key; a spec has a version byte of
its own, and done and failed have what is added to their count: no Array has more than 7fff of
them, so that c000 is free. Add the fields behind those that are there, keep the decoder, and let it
give the new fields their defaults.

StoredItem, a live message of the indexed design, is written twice in the life of a message, so it
is small. It has no id and no index key: its own key, its time and its lane tell both::

    u8      1 waiting, 2 in flight
    u16     attempts that have ended
    u16     forgiven: attempts that don't count towards the queue's maximum
    u64     visible at, in milliseconds
    u16     bytes of the lane
            lane
            metadata
            in flight: lease, 16 bytes

The lease comes last, so that claiming a message adds a tail to its record. Upgrade recipe: give the
new layout the next two numbers of the first byte, and decode all of them.

LeaseEntry is the Cap'n Proto record of ``queueber.capnp``. A general Cap'n Proto library costs
several microseconds for a record; this one has one layout, so a fixed ``struct`` does. The bytes
are those that pycapnp writes into one segment when the fields are set in schema order, so any Cap'n
Proto reader reads them. Words are 8 bytes, little-endian; pointers are relative to their own end.
With n ids::

    -1  u32 0 | u32 words that follow
     0  root: struct, 4 data, 3 pointers
     1  expiryTsSecs u64
     2  expiryTsMs u64
     3  claimedAtMs u64
     4  queue u32, 0 u32
     5  -> ids
     6  -> expiryTsIndexKey
     7  -> consumer
     8  n times -> the id n words on: all the same
        n ids, 8 bytes each
        expiryTsIndexKey, padded
        consumer, a NUL, padded

Its upgrade recipe is Cap'n Proto's own rule: fields are only added, at the end. The decoder takes
our layout alone: let it tell the layouts apart by the root word, and give the old layout the
field's default. Records that Queueber wrote are read with pycapnp, by the importer.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from struct import Struct, unpack_from
from struct import error as struct_error
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec

from penstock.errors import CorruptRecord, InvalidInput
from penstock.limits import MAX_BUCKET_EXPONENT
from penstock.model import Overflow, QueueSpec
from penstock.store.codec.opendata import (
    MAX_U32,
    broken,
    check_end,
    read_count,
    read_var_u64,
    utf8,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of an ended message: id, key, when it ended, attempts, metadata, reason, and the first claim.
EndedFields: TypeAlias = tuple[int, int, int, int, bytes, str, int | None]
T = TypeVar("T")


class Ended(NamedTuple):
    """A done or a failed message; ``reason``: of the last attempt, if it has failed.

    ``first_claimed_ms`` is when its first attempt began; None: it had none, or nobody knows.
    """

    message_id: int
    key: int
    ended_at_ms: int
    attempts: int
    metadata: bytes
    reason: str = ""
    first_claimed_ms: int | None = None
    part: bytes = b""


class AttemptRecord(NamedTuple):
    """One claim of a message, and how it ended."""

    claimed_at: int
    consumer: str
    ended_at: int
    outcome: int
    reason: str


class LeaseRecord(NamedTuple):
    """A lease: its messages, its deadline and its consumer."""

    ids: list[bytes]
    expiry_ms: int
    index_key: bytes
    claimed_at_ms: int
    queue: int
    consumer: str


_SETTLED: Final = Struct("<QQqHI")
_pack_settled: Final = _SETTLED.pack
_LENGTH: Final = Struct("<H")
_TIME: Final = Struct("<q")
_pack_length: Final = _LENGTH.pack
# In the count of done or failed messages: the first claim of one of them at least is known.
_HAS_CLAIMS: Final = 0x8000
_CLAIMED: Final = Struct("<qH")
_ENDED: Final = Struct("<qBH")
_SPEC_VERSION: Final = b"\x01"
# Only queues with limits have these in their records.
_LIMITS: Final = {"max_messages": 0, "max_bytes": 0, "overflow": Overflow.REFUSE}
_U32 = Annotated[int, msgspec.Meta(ge=0, le=MAX_U32)]
_first_claimed: Final = itemgetter(6)
# Skips the argument checks of a NamedTuple's own constructor: half the time of a decoder.
_new: Final = tuple.__new__

# A list pointer is u32 `offset in words << 2 | 1`, u32 `count << 3 | size of an element`.
_FIRST: Final = 2 << 2 | 1  # from the first of three pointers over the other two
_BYTES: Final = 2
_POINTERS: Final = 6
_ID_SIZE: Final = 8 << 3 | _BYTES
_LEASE_ROOT: Final = 3 << 16 | 4
_ZEROS: Final = tuple(b"\0" * n for n in range(8))

_ITEM: Final = Struct("<BHHQH")
_pack_item, _unpack_item, _ITEM_HEAD = _ITEM.pack, _ITEM.unpack_from, _ITEM.size
_WAITING: Final = 1
_IN_FLIGHT: Final = 2
# The lease of a message that has none.
NO_LEASE: Final = bytes(16)
LEASE_BYTES: Final = len(NO_LEASE)

# `x` packs zeros, and skips on unpacking: decoders unpack only fields they can't compute.
_pack_lease: Final = Struct("<4xI4xIQQQI4xIIIIII").pack
_unpack_lease: Final = Struct("<24xQQI8xI4xI4xI").unpack_from
_LEASE_HEAD: Final = 72
_pack_pointer: Final = Struct("<II").pack


def unpack(record: bytes, kind: type[T], name: str, version: bytes = b"") -> T:
    """Decode a MessagePack record, behind its version byte if it has one."""
    if not record.startswith(version):
        raise CorruptRecord(f"{name}: version {record[:1].hex() or 'missing'} is not known")
    try:
        return msgspec.msgpack.decode(record[len(version) :], type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CorruptRecord(f"{name}: {error}") from error


# --- history and specs ------------------------------------------------------------------------


def encode_ended(
    entries: Sequence[tuple[Any, ...]], *, failed: bool, claimed_ms: int | None = None
) -> bytes:
    """Encode done messages, or failed ones, which have reasons.

    ``claimed_ms``: the first claim of all of them, for a caller who knows that it is one; then
    they are plain :data:`EndedFields`.
    """
    count, rows = len(entries), entries
    if count >= _HAS_CLAIMS:
        raise InvalidInput(f"history: {count} messages, a part has at most {_HAS_CLAIMS - 1}")
    if claimed_ms is None:
        parts = _claims_of(entries)
        rows = [entry[:7] for entry in entries]
    else:
        age_ms = entries[0][2] - claimed_ms
        parts = [_pack_length(count | _HAS_CLAIMS), _claims_run(count, age_ms)]
    for message_id, key, ended_at_ms, attempts, metadata, reason, _ in rows:
        parts += (_pack_settled(message_id, key, ended_at_ms, attempts, len(metadata)), metadata)
        if failed:
            parts.append(utf8(reason))
    return b"".join(parts)


def _claims_of(entries: Sequence[tuple[Any, ...]]) -> list[bytes]:
    """Encode the count and the first claims of ended messages."""
    claims = list(map(_first_claimed, entries))
    if claims.count(None) == len(claims):
        return [_pack_length(len(claims))]
    parts = [_pack_length(len(claims) | _HAS_CLAIMS)]
    for claimed_ms, same in groupby(claims):
        age_ms = None if claimed_ms is None else entries[0][2] - claimed_ms
        parts.append(_claims_run(len(list(same)), age_ms))
    return parts


def _claims_run(many: int, age_ms: int | None) -> bytes:
    """Encode a run, as two var_u64: written out, since each single ack has one."""
    coded = 0 if age_ms is None else 1 + (age_ms << 1 ^ -(age_ms < 0))
    extra, more = (many.bit_length() + 3) >> 3, (coded.bit_length() + 3) >> 3
    size = 4 + 8 * more
    both = (extra << (4 + 8 * extra) | many) << (size + 4) | more << size | coded
    return both.to_bytes(2 + extra + more, "big")


def decode_ended(buf: bytes, *, failed: bool, part: bytes = b"") -> list[Ended]:
    """Decode done messages, or failed ones, of a part."""
    return [_new(Ended, (*fields, part)) for fields in ended_fields(buf, failed=failed)]


def ended_fields(buf: bytes, *, failed: bool) -> list[EndedFields]:
    """Decode them as plain tuples, which the garbage collector lets go of: for many of them."""
    record = "failed" if failed else "done"
    count = read_count(buf, 0, record)
    pos, first_ms, reason = 2, 0, ""
    runs: Sequence[tuple[int, int | None]] = ((count, None),)
    found: list[EndedFields] = []
    try:
        if count & _HAS_CLAIMS:
            count -= _HAS_CLAIMS
            runs, pos = _read_claims(buf, count, record)
            # Behind the ids of the first element.
            (first_ms,) = _TIME.unpack_from(buf, pos + 16)
        for many, age_ms in runs:
            claimed_ms = None if age_ms is None else first_ms - age_ms
            for _ in range(many):
                message_id, claim_id, ended_at, attempts, length = _SETTLED.unpack_from(buf, pos)
                pos += 30
                metadata = buf[pos : pos + length]
                pos += length
                if failed:
                    (length,) = _LENGTH.unpack_from(buf, pos)
                    pos += 2
                    reason = str(buf[pos : pos + length], "utf-8")
                    pos += length
                found.append(
                    (message_id, claim_id, ended_at, attempts, metadata, reason, claimed_ms)
                )
    except (struct_error, UnicodeDecodeError) as error:
        raise broken(record, len(found), count, error) from None
    check_end(buf, pos, record)
    return found


def _read_claims(
    buf: bytes, count: int, record: str
) -> tuple[Sequence[tuple[int, int | None]], int]:
    """Read how long before the end runs of elements were first claimed; refuse another spelling."""
    runs: list[tuple[int, int | None]] = []
    pos, left = 2, count
    try:
        while left > 0:
            at = pos + 1 + (buf[pos] >> 4)
            end = at + 1 + (buf[at] >> 4)
            many, age_ms = run = _run_of(buf[pos:end])
            # It would be one with that before it.
            if runs and runs[-1][1] == age_ms:
                break
            runs.append(run)
            left, pos = left - many, end
    except (IndexError, CorruptRecord):
        left = -1
    if left or not runs or (age_ms is None and len(runs) == 1):
        raise CorruptRecord(f"{record}: its first claims are not those of {count} elements")
    return runs, pos


@lru_cache(maxsize=1 << 14)
def _run_of(encoded: bytes) -> tuple[int, int | None]:
    """Decode a run; of messages that were acked one by one many are alike."""
    many, at = read_var_u64(encoded, 0)
    coded, _ = read_var_u64(encoded, at)
    if not many:
        raise CorruptRecord("a run of no elements")
    return many, (coded - 1 >> 1) ^ -(coded - 1 & 1) if coded else None


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


def claimed_at_of(buf: bytes) -> int | None:
    """Return when an encoded attempt began; None: it does not decode, or its lease was lost."""
    try:
        return decode_attempt(buf).claimed_at or None
    except CorruptRecord:
        return None


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
    number, spec = unpack(record, tuple[_U32, QueueSpec], "queue spec", _SPEC_VERSION)
    if not 0 <= spec.bucket_exponent <= MAX_BUCKET_EXPONENT:
        exponent = spec.bucket_exponent
        raise CorruptRecord(f"queue spec: bucket exponent {exponent} is not 0 to 4")
    if encode_queue_spec(spec, number) != record:
        raise CorruptRecord(f"queue spec: {len(record)} bytes that are not laid out as one")
    return spec, number


# --- items and leases -------------------------------------------------------------------------


def item_head(lane: bytes, attempts: int, forgiven: int, visible_at_ms: int) -> bytes:
    """Return what the StoredItems of waiting messages with these fields begin with.

    The metadata is the rest.
    """
    return _pack_item(_WAITING, attempts, forgiven, visible_at_ms, len(lane)) + lane


def encode_stored_item(
    metadata: bytes, lane: bytes, attempts: int, forgiven: int, visible_at_ms: int
) -> bytes:
    """Encode the StoredItem of a message that waits."""
    return item_head(lane, attempts, forgiven, visible_at_ms) + metadata


def with_lease(record: bytes, lease: bytes) -> bytes:
    """Give an encoded StoredItem a lease, or another one."""
    assert len(lease) == LEASE_BYTES, "a lease is 16 bytes"
    if record[0] == _WAITING:
        return b"\x02" + record[1:] + lease
    return record[:-LEASE_BYTES] + lease


def decode_stored_item(record: bytes) -> tuple[bytes, bytes, int, int, int, bytes]:
    """Give metadata, lane, attempts, forgiven, visible_at_ms and lease."""
    try:
        kind, attempts, forgiven, visible_at_ms, size = _unpack_item(record)
    except struct_error:
        raise CorruptRecord(f"StoredItem: {len(record)} bytes, shorter than its head") from None
    end, lease = len(record), NO_LEASE
    if kind == _IN_FLIGHT:
        end -= LEASE_BYTES
        lease = record[end:]
    lane_end = _ITEM_HEAD + size
    if lane_end > end or kind != (_WAITING if lease == NO_LEASE else _IN_FLIGHT):
        raise CorruptRecord(f"StoredItem: {len(record)} bytes that are not laid out as one")
    lane = record[_ITEM_HEAD:lane_end]
    return record[lane_end:end], lane, attempts, forgiven, visible_at_ms, lease


def encode_lease(
    ids: Sequence[bytes],
    expiry_ms: int,
    index_key: bytes,
    claimed_at_ms: int,
    queue: int,
    consumer: str,
) -> bytes:
    """Encode a LeaseEntry; every id is 8 bytes."""
    n = len(ids)
    packed_ids = b"".join(ids)
    assert len(packed_ids) == n << 3, "an id is 8 bytes"
    name = consumer.encode()
    key_size = len(index_key)
    name_size = len(name) + 1
    before_name = (n << 1) + ((key_size + 7) >> 3)
    head = _pack_lease(
        before_name + 8 + ((name_size + 7) >> 3),
        _LEASE_ROOT,
        -(-expiry_ms // 1000),
        expiry_ms,
        claimed_at_ms,
        queue,
        _FIRST,
        n << 3 | _POINTERS,
        (n << 3) + 5,
        key_size << 3 | _BYTES,
        (before_name << 2) + 1,
        name_size << 3 | _BYTES,
    )
    return b"".join(
        (
            head,
            _pack_pointer((n << 2) - 3, _ID_SIZE) * n if n else b"",
            packed_ids,
            index_key,
            _ZEROS[-key_size & 7],
            name,
            b"\0",
            _ZEROS[-name_size & 7],
        )
    )


def decode_lease(buf: bytes) -> LeaseRecord:
    """Decode a LeaseEntry."""
    try:
        expiry_ms, claimed_at_ms, queue, n, key_size, name_size = _unpack_lease(buf)
    except struct_error:
        raise CorruptRecord(f"LeaseEntry: {len(buf)} bytes, shorter than its head") from None
    n, key_size, name_size = n >> 3, key_size >> 3, name_size >> 3
    first_id = _LEASE_HEAD + (n << 3)
    key_start = first_id + (n << 3)
    name_start = key_start + ((key_size + 7) >> 3 << 3)
    # The length first: it bounds the bytes that the comparison builds.
    total = name_start + ((name_size + 7) >> 3 << 3)
    if len(buf) == total and name_size and not max(expiry_ms, claimed_at_ms) >> 63:
        try:
            consumer = str(buf[name_start : name_start + name_size - 1], "utf-8")
        except UnicodeDecodeError as error:
            raise CorruptRecord(f"LeaseEntry: consumer is not UTF-8: {error.reason}") from None
        # One call for many ids is five times as fast as one slice each.
        ids, index_key = [*unpack_from("8s" * n, buf, first_id)], buf[key_start:][:key_size]
        lease = LeaseRecord(ids, expiry_ms, index_key, claimed_at_ms, queue, consumer)
        if encode_lease(*lease) == buf:
            return lease
    raise CorruptRecord(f"LeaseEntry: {len(buf)} bytes that are not laid out as one")
