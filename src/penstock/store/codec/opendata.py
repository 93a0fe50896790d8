"""Ids and keys of the OpenData-Queue records; their values are in ``records``.

Key map. A key is a version byte, a type byte and fields, big-endian; ``queue`` is the queue's
name as TerminatedBytes, except in the spec's key, where it is raw and last::

    01 01  message u64                         payload       the payload's bytes
    01 02  queue, bucket u64                   active v1     available and in-flight messages
    02 02  queue, bucket u64                   active v2
    01 03  queue, bucket u64                   done v1       done messages
    02 03  queue, bucket u64, part u64         done v2       ... of one batch
    01 04  queue, bucket u64                   failed v1     failed messages
    02 04  queue, bucket u64, part u64         failed v2     ... of one batch
    01 05  queue, message u64                  attempts v1   every attempt of the message
    02 05  queue, message u64, attempt u16     attempts v2   one attempt
    01 06  name                                spec v1       the queue's settings
    02 06  name                                spec v2
    02 09  queue, bucket u64                   summary v2    what a bucket holds, in short

Version 1 is the RFC's. It appends to done, failed and attempts with a merge operator; our
engines have none, so version 2 has one key for each append, under the prefix that was the key
in version 1, and a reader folds what it finds there.

Upgrade recipe of the keys, 1 to 2: active, spec: the same fields under the new version byte.
Done, failed: the old value, upgraded, becomes part 0. Attempts: the element at index i becomes
attempt i + 1. The payload has one version.

Bucket ids and claim ids are 4 bits of exponent e and 60 bits of number; a bucket of exponent e
holds 10^e claims, and its number is the first of them. An Array's count is u16, so 10^4 is the
largest bucket that can be encoded and exponents above 4 are refused.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from struct import error as struct_error
from typing import Final

from penstock.errors import CorruptRecord, InvalidInput
from penstock.limits import MAX_BUCKET_EXPONENT
from penstock.store.codec.encodings import read_terminated, terminated

__all__ = [
    "RecordType",
    "active_key",
    "active_prefix",
    "attempts_key",
    "attempts_prefix",
    "bucket_of",
    "bucket_summary_key",
    "bucket_summary_prefix",
    "capacity",
    "done_key",
    "done_prefix",
    "failed_key",
    "failed_prefix",
    "make_id",
    "parse_active_key",
    "parse_attempts_key",
    "parse_bucket_summary_key",
    "parse_done_key",
    "parse_failed_key",
    "parse_payload_key",
    "parse_queue_spec_key",
    "payload_key",
    "payload_prefix",
    "queue_spec_key",
    "queue_spec_prefix",
    "split_id",
]


class RecordType(IntEnum):
    """The second byte of every key."""

    PAYLOAD = 1
    ACTIVE = 2
    DONE = 3
    FAILED = 4
    ATTEMPTS = 5
    QUEUE_SPEC = 6
    BUCKET_SUMMARY = 9


_ID: Final = Struct(">Q")
_ID_PART: Final = Struct(">QQ")
_ID_ATTEMPT: Final = Struct(">QH")

_CAPACITY: Final[tuple[int, ...]] = tuple(
    10**exponent for exponent in range(MAX_BUCKET_EXPONENT + 1)
)
_NUMBER_BITS: Final = 60
_MAX_NUMBER: Final = (1 << _NUMBER_BITS) - 1

_PAYLOAD: Final = b"\x01\x01"
_SUMMARY: Final = b"\x02\x09"
# By version. Plain bytes at hand: making them from the enum would double the time of a key.
_ACTIVE: Final = {1: b"\x01\x02", 2: b"\x02\x02"}
_DONE: Final = {1: b"\x01\x03", 2: b"\x02\x03"}
_FAILED: Final = {1: b"\x01\x04", 2: b"\x02\x04"}
_ATTEMPTS: Final = {1: b"\x01\x05", 2: b"\x02\x05"}
_SPEC: Final = {1: b"\x01\x06", 2: b"\x02\x06"}


# --- ids ------------------------------------------------------------------------------------


def capacity(exponent: int) -> int:
    """Give how many messages a bucket of this exponent holds."""
    if not 0 <= exponent <= MAX_BUCKET_EXPONENT:
        raise InvalidInput(f"bucket exponent {exponent}: allowed are 0 to {MAX_BUCKET_EXPONENT}")
    return _CAPACITY[exponent]


def make_id(exponent: int, number: int) -> int:
    """Make a bucket id or a claim id."""
    if not 0 <= exponent <= MAX_BUCKET_EXPONENT:
        raise InvalidInput(f"bucket exponent {exponent}: allowed are 0 to {MAX_BUCKET_EXPONENT}")
    if not 0 <= number <= _MAX_NUMBER:
        raise InvalidInput(f"number {number}: allowed are 0 to 2^60 - 1")
    return exponent << _NUMBER_BITS | number


def split_id(id_: int) -> tuple[int, int]:
    """Give exponent and number of a bucket id or a claim id."""
    exponent = id_ >> _NUMBER_BITS
    if not 0 <= exponent <= MAX_BUCKET_EXPONENT:
        raise CorruptRecord(f"id {id_:#018x}: exponent {exponent} is above {MAX_BUCKET_EXPONENT}")
    return exponent, id_ & _MAX_NUMBER


def bucket_of(claim_id: int) -> int:
    """Give the id of the bucket that holds a claim."""
    exponent, number = split_id(claim_id)
    return claim_id - number % _CAPACITY[exponent]


# --- keys -----------------------------------------------------------------------------------


def payload_key(message_id: int) -> bytes:
    """Key of a message's payload."""
    return _PAYLOAD + _ID.pack(message_id)


def payload_prefix() -> bytes:
    """Prefix of every payload's key."""
    return _PAYLOAD


def parse_payload_key(key: bytes) -> tuple[int, int]:
    """Give version and message id."""
    if len(key) != 10 or key[:2] != _PAYLOAD:
        raise CorruptRecord(f"payload key: {key.hex(' ')} is none")
    return 1, int.from_bytes(key[2:], "big")


def active_key(queue: bytes, bucket_id: int, version: int = 2) -> bytes:
    """Key of a bucket of active messages."""
    return active_prefix(queue, version) + _ID.pack(bucket_id)


def active_prefix(queue: bytes, version: int = 2) -> bytes:
    """Prefix of the keys of a queue's active buckets."""
    return _head(_ACTIVE, version) + terminated(queue)


def parse_active_key(key: bytes) -> tuple[int, bytes, int]:
    """Give version, queue and bucket id."""
    version, queue, pos = _read_head(key, RecordType.ACTIVE, "active key")
    (bucket_id,) = _read_fields(_ID, key, pos, "active key")
    return version, queue, bucket_id


def done_key(queue: bytes, bucket_id: int, part: int | None = None) -> bytes:
    """Key of a batch of done messages; without ``part`` the RFC's, of the whole bucket."""
    return _part_key(_DONE, queue, bucket_id, part)


def done_prefix(queue: bytes, bucket_id: int | None = None, version: int = 2) -> bytes:
    """Prefix of the done keys of a queue, or of one of its buckets."""
    return _queue_prefix(_DONE, queue, bucket_id, version)


def parse_done_key(key: bytes) -> tuple[int, bytes, int, int | None]:
    """Give version, queue, bucket id and part; version 1 has no part."""
    return _parse_pair(key, RecordType.DONE, _ID_PART, "done key")


def failed_key(queue: bytes, bucket_id: int, part: int | None = None) -> bytes:
    """Key of a batch of failed messages; without ``part`` the RFC's, of the whole bucket."""
    return _part_key(_FAILED, queue, bucket_id, part)


def failed_prefix(queue: bytes, bucket_id: int | None = None, version: int = 2) -> bytes:
    """Prefix of the failed keys of a queue, or of one of its buckets."""
    return _queue_prefix(_FAILED, queue, bucket_id, version)


def parse_failed_key(key: bytes) -> tuple[int, bytes, int, int | None]:
    """Give version, queue, bucket id and part; version 1 has no part."""
    return _parse_pair(key, RecordType.FAILED, _ID_PART, "failed key")


def attempts_key(queue: bytes, message_id: int, attempt: int | None = None) -> bytes:
    """Key of one attempt at a message; without ``attempt`` the RFC's, of all of them."""
    if attempt is None:
        return _ATTEMPTS[1] + terminated(queue) + _ID.pack(message_id)
    return _ATTEMPTS[2] + terminated(queue) + _ID_ATTEMPT.pack(message_id, attempt)


def attempts_prefix(queue: bytes, message_id: int | None = None, version: int = 2) -> bytes:
    """Prefix of the attempts at a queue's messages, or at one of them."""
    return _queue_prefix(_ATTEMPTS, queue, message_id, version)


def parse_attempts_key(key: bytes) -> tuple[int, bytes, int, int | None]:
    """Give version, queue, message id and attempt; version 1 has no attempt."""
    return _parse_pair(key, RecordType.ATTEMPTS, _ID_ATTEMPT, "attempts key")


def queue_spec_key(queue: bytes, version: int = 2) -> bytes:
    """Key of a queue's spec: the name raw, so that the keys sort by name as they are read."""
    return _head(_SPEC, version) + queue


def queue_spec_prefix(version: int = 2) -> bytes:
    """Prefix of every queue's spec."""
    return _head(_SPEC, version)


def parse_queue_spec_key(key: bytes) -> tuple[int, bytes]:
    """Give version and queue."""
    return _read_version(key, RecordType.QUEUE_SPEC, "queue spec key"), key[2:]


def bucket_summary_key(queue: bytes, bucket_id: int) -> bytes:
    """Key of the summary of an active bucket."""
    return _SUMMARY + terminated(queue) + _ID.pack(bucket_id)


def bucket_summary_prefix(queue: bytes) -> bytes:
    """Prefix of the summaries of a queue's active buckets."""
    return _SUMMARY + terminated(queue)


def parse_bucket_summary_key(key: bytes) -> tuple[int, bytes, int]:
    """Give version, queue and bucket id."""
    version, queue, pos = _read_head(key, RecordType.BUCKET_SUMMARY, "bucket summary key")
    if version != 2:
        raise CorruptRecord(f"bucket summary key: version {version} is unknown, 2 is known")
    (bucket_id,) = _read_fields(_ID, key, pos, "bucket summary key")
    return version, queue, bucket_id


# --- parts of keys --------------------------------------------------------------------------


def _head(heads: dict[int, bytes], version: int) -> bytes:
    if version not in heads:
        raise InvalidInput(f"record version {version}: known are 1 and 2")
    return heads[version]


def _queue_prefix(heads: dict[int, bytes], queue: bytes, id_: int | None, version: int) -> bytes:
    prefix = _head(heads, version) + terminated(queue)
    return prefix if id_ is None else prefix + _ID.pack(id_)


def _part_key(heads: dict[int, bytes], queue: bytes, bucket_id: int, part: int | None) -> bytes:
    if part is None:
        return heads[1] + terminated(queue) + _ID.pack(bucket_id)
    return heads[2] + terminated(queue) + _ID_PART.pack(bucket_id, part)


def _read_version(key: bytes, record_type: RecordType, record: str) -> int:
    if len(key) < 2 or key[1] != record_type:
        raise CorruptRecord(f"{record}: {key.hex(' ')} is none")
    version = key[0]
    if version not in {1, 2}:
        raise CorruptRecord(f"{record}: version {version} is unknown, 1 and 2 are known")
    return version


def _read_head(key: bytes, record_type: RecordType, record: str) -> tuple[int, bytes, int]:
    version = _read_version(key, record_type, record)
    queue, pos = read_terminated(key, 2, record)
    return version, queue, pos


def _read_fields(fields: Struct, key: bytes, pos: int, record: str) -> tuple[int, ...]:
    try:
        return fields.unpack(key[pos:])
    except struct_error:
        rest = len(key) - pos
        raise CorruptRecord(f"{record}: {rest} bytes after the queue, not {fields.size}") from None


def _parse_pair(
    key: bytes, record_type: RecordType, fields: Struct, record: str
) -> tuple[int, bytes, int, int | None]:
    version, queue, pos = _read_head(key, record_type, record)
    if version == 1:
        (id_,) = _read_fields(_ID, key, pos, record)
        return version, queue, id_, None
    id_, part = _read_fields(fields, key, pos, record)
    return version, queue, id_, part
