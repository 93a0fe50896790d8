"""The record of a queue's settings, version 2, and the upgrade from version 1.

It has the fields of version 1 first, in their order (``records_v1``), then its own::

    spec      filter Utf8, max attempts u16, retention of done in s u32, bucket exponent u8,
              description Utf8
              | ordering u8, lease, back-off base, back-off cap, delay, retention of done, of
              failed, of unclaimed, created at: u64 each, in ms; spec version u64, number u32
              | dead letter queue Utf8, count u16, so many labels: name Utf8, value VarBytes

The last line is there only if the queue has a dead letter queue or labels. Labels are in the order
of their names, so that the same settings are the same bytes.
"""

from __future__ import annotations

from itertools import pairwise
from struct import Struct
from struct import error as struct_error
from typing import Final, NamedTuple

from penstock.errors import CorruptRecord
from penstock.store.codec.encodings import (
    MAX_U32,
    read_utf8,
    read_var_bytes,
    utf8,
    var_bytes,
)
from penstock.store.codec.records_v1 import (
    QueueSpecV1,
    check_end,
    decode_queue_spec_v1,
    encode_queue_spec_v1,
    pack_count,
    read_count,
    read_queue_spec_v1,
)

__all__ = ["QueueSpecV2", "decode_queue_spec", "encode_queue_spec", "upgrade_queue_spec_v1"]

_SPEC: Final = Struct("<B9QI")
_RECORD: Final = "queue spec v2"


class QueueSpecV2(NamedTuple):
    """A queue's settings. Every duration is in milliseconds; 0 keeps for ever."""

    filter: str
    max_attempts: int
    bucket_exponent: int
    description: str
    ordering: int
    lease_ms: int
    backoff_base_ms: int
    backoff_cap_ms: int
    delay_ms: int
    done_retention_ms: int
    failed_retention_ms: int
    unclaimed_retention_ms: int
    created_at_ms: int
    spec_version: int
    number: int
    dead_letter: str = ""
    labels: tuple[tuple[str, str], ...] = ()


def _whole_seconds(ms: int) -> int:
    """Give version 1's retention: rounded up, so that a short one does not become 0, for ever."""
    return min(-(-ms // 1000), MAX_U32)


def encode_queue_spec(spec: QueueSpecV2) -> bytes:
    """Encode a queue's settings; its labels are in the order of their names."""
    first = QueueSpecV1(
        spec.filter,
        spec.max_attempts,
        _whole_seconds(spec.done_retention_ms),
        spec.bucket_exponent,
        spec.description,
    )
    whole = encode_queue_spec_v1(first) + _SPEC.pack(
        spec.ordering,
        spec.lease_ms,
        spec.backoff_base_ms,
        spec.backoff_cap_ms,
        spec.delay_ms,
        spec.done_retention_ms,
        spec.failed_retention_ms,
        spec.unclaimed_retention_ms,
        spec.created_at_ms,
        spec.spec_version,
        spec.number,
    )
    if spec.dead_letter or spec.labels:
        whole += utf8(spec.dead_letter) + pack_count(len(spec.labels), _RECORD)
        for name, value in spec.labels:
            whole += utf8(name) + var_bytes(value.encode())
    return whole


def decode_queue_spec(version: int, buf: bytes) -> QueueSpecV2:
    """Decode a queue's settings; those of version 1 get the defaults of the fields it lacks."""
    if version == 1:
        old = decode_queue_spec_v1(buf)
        return QueueSpecV2(
            filter=old.filter,
            max_attempts=old.max_attempts,
            bucket_exponent=old.bucket_exponent,
            description=old.description,
            ordering=0,
            lease_ms=30_000,
            backoff_base_ms=1_000,
            backoff_cap_ms=300_000,
            delay_ms=0,
            done_retention_ms=old.done_retention_secs * 1000,
            failed_retention_ms=0,
            unclaimed_retention_ms=0,
            created_at_ms=0,
            spec_version=1,
            number=0,
        )
    if version != 2:
        raise CorruptRecord(f"queue spec: version {version} is unknown, 1 and 2 are known")
    first, pos = read_queue_spec_v1(buf, _RECORD)
    try:
        added = _SPEC.unpack_from(buf, pos)
    except struct_error:
        rest = len(buf) - pos
        raise CorruptRecord(
            f"{_RECORD}: {rest} bytes after the description, not {_SPEC.size}"
        ) from None
    dead_letter, labels = _read_tail(buf, pos + _SPEC.size)
    spec = QueueSpecV2(
        first.filter,
        first.max_attempts,
        first.bucket_exponent,
        first.description,
        *added,
    )._replace(dead_letter=dead_letter, labels=labels)
    if first.done_retention_secs != _whole_seconds(spec.done_retention_ms):
        raise CorruptRecord(
            f"{_RECORD}: retention of done is {first.done_retention_secs} s "
            f"and {spec.done_retention_ms} ms"
        )
    return spec


def _read_tail(buf: bytes, pos: int) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Read what only some queues have."""
    if pos == len(buf):
        return "", ()
    dead_letter, pos = read_utf8(buf, pos, _RECORD)
    count = read_count(buf, pos, _RECORD)
    pos += 2
    labels = []
    for _ in range(count):
        name, pos = read_utf8(buf, pos, _RECORD)
        value, pos = read_var_bytes(buf, pos, _RECORD)
        try:
            labels.append((name, value.decode()))
        except UnicodeDecodeError as error:
            raise CorruptRecord(f"{_RECORD}: label {name!r:.100}: {error.reason}") from None
    check_end(buf, pos, _RECORD)
    if any(name >= following for (name, _), (following, _) in pairwise(labels)):
        raise CorruptRecord(f"{_RECORD}: labels that are not in order")
    if not dead_letter and not labels:
        raise CorruptRecord(f"{_RECORD}: {len(buf)} bytes, the last of which say nothing")
    return dead_letter, tuple(labels)


def upgrade_queue_spec_v1(buf: bytes) -> bytes:
    """Write out the defaults that ``decode_queue_spec`` gives to version 1."""
    return encode_queue_spec(decode_queue_spec(1, buf))
