"""Ids and keys of the OpenData-Queue records; their values are in ``records`` and ``summaries``.

Key map. The first byte says whose layout a record has: 01 the RFC's own, 02 Penstock's. The second
is the type. Fields are big-endian; ``queue`` is the queue's name as TerminatedBytes, except in the
spec's key, where the name is raw and last::

    01 01  message u64                         payload    the payload's bytes
    02 02  queue, bucket u64                   active     available and in-flight messages
    02 03  queue, bucket u64, part u64         done       done messages of one commit
    02 04  queue, bucket u64, part u64         failed     failed messages of one commit
    02 05  queue, message u64, attempt u16     attempts   one attempt
    02 06  name                                spec       the queue's settings (``kv/queues.py``)
    02 09  queue, bucket u64                   summary    counts and first messages of a bucket

The RFC appends to done, failed and attempts with a merge operator. Our engines have none, so every
append has a key of its own, under the prefix that is the RFC's key, and a reader folds them.

Upgrade recipe: another first byte. The store then reads records of both until it has rewritten the
older ones.

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


class RecordType(IntEnum):
    """The second byte of every key."""

    PAYLOAD = 1
    ACTIVE = 2
    DONE = 3
    FAILED = 4
    ATTEMPTS = 5
    QUEUE_SPEC = 6
    BUCKET_SUMMARY = 9


_PAYLOAD: Final = b"\x01\x01"
_ACTIVE: Final = b"\x02\x02"
_DONE: Final = b"\x02\x03"
_FAILED: Final = b"\x02\x04"
_ATTEMPTS: Final = b"\x02\x05"
_SUMMARY: Final = b"\x02\x09"

_ID: Final = Struct(">Q")
_ID_PART: Final = Struct(">QQ")
_ID_ATTEMPT: Final = Struct(">QH")

_CAPACITY: Final[tuple[int, ...]] = tuple(
    10**exponent for exponent in range(MAX_BUCKET_EXPONENT + 1)
)
_NUMBER_BITS: Final = 60
_MAX_NUMBER: Final = (1 << _NUMBER_BITS) - 1


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


def active_key(queue: bytes, bucket_id: int) -> bytes:
    """Key of a bucket of active messages."""
    return _ACTIVE + terminated(queue) + _ID.pack(bucket_id)


def active_prefix(queue: bytes) -> bytes:
    """Prefix of the keys of a queue's active buckets."""
    return _ACTIVE + terminated(queue)


def parse_active_key(key: bytes) -> tuple[int, bytes, int]:
    """Give the first byte, queue and bucket id."""
    queue, (bucket_id,) = _parse(key, _ACTIVE, _ID, "active key")
    return key[0], queue, bucket_id


def bucket_summary_key(queue: bytes, bucket_id: int) -> bytes:
    """Key of the summary of an active bucket."""
    return _SUMMARY + terminated(queue) + _ID.pack(bucket_id)


def bucket_summary_prefix(queue: bytes) -> bytes:
    """Prefix of the summaries of a queue's active buckets."""
    return _SUMMARY + terminated(queue)


def done_key(queue: bytes, bucket_id: int, part: int) -> bytes:
    """Key of the done messages of one commit."""
    return _DONE + terminated(queue) + _ID_PART.pack(bucket_id, part)


def done_prefix(queue: bytes, bucket_id: int | None = None) -> bytes:
    """Prefix of the done keys of a queue, or of one of its buckets."""
    return _prefix(_DONE, queue, bucket_id)


def parse_done_key(key: bytes) -> tuple[int, bytes, int, int]:
    """Give the first byte, queue, bucket id and part."""
    queue, (bucket_id, part) = _parse(key, _DONE, _ID_PART, "done key")
    return key[0], queue, bucket_id, part


def failed_key(queue: bytes, bucket_id: int, part: int) -> bytes:
    """Key of the failed messages of one commit."""
    return _FAILED + terminated(queue) + _ID_PART.pack(bucket_id, part)


def failed_prefix(queue: bytes, bucket_id: int | None = None) -> bytes:
    """Prefix of the failed keys of a queue, or of one of its buckets."""
    return _prefix(_FAILED, queue, bucket_id)


def parse_failed_key(key: bytes) -> tuple[int, bytes, int, int]:
    """Give the first byte, queue, bucket id and part."""
    queue, (bucket_id, part) = _parse(key, _FAILED, _ID_PART, "failed key")
    return key[0], queue, bucket_id, part


def attempts_key(queue: bytes, message_id: int, attempt: int) -> bytes:
    """Key of one attempt at a message."""
    return _ATTEMPTS + terminated(queue) + _ID_ATTEMPT.pack(message_id, attempt)


def attempts_prefix(queue: bytes, message_id: int | None = None) -> bytes:
    """Prefix of the attempts at a queue's messages, or at one of them."""
    return _prefix(_ATTEMPTS, queue, message_id)


def parse_attempts_key(key: bytes) -> tuple[int, bytes, int, int]:
    """Give the first byte, queue, message id and the attempt's number."""
    queue, (message_id, attempt) = _parse(key, _ATTEMPTS, _ID_ATTEMPT, "attempts key")
    return key[0], queue, message_id, attempt


def _prefix(head: bytes, queue: bytes, id_: int | None) -> bytes:
    prefix = head + terminated(queue)
    return prefix if id_ is None else prefix + _ID.pack(id_)


def _parse(key: bytes, head: bytes, fields: Struct, record: str) -> tuple[bytes, tuple[int, ...]]:
    if key[:2] != head:
        raise CorruptRecord(f"{record}: {key.hex(' ')} is none")
    queue, pos = read_terminated(key, 2, record)
    try:
        return queue, fields.unpack(key[pos:])
    except struct_error:
        rest = len(key) - pos
        raise CorruptRecord(f"{record}: {rest} bytes after the queue, not {fields.size}") from None
