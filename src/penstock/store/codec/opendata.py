"""Encodings and keys of OpenData's Queue and Log, and the values of the Log.

Keys are big-endian, because they sort; values are little-endian. SeqBlock's value is the one
exception: big-endian.

::

    TerminatedBytes  keys    00 -> 01 01, 01 -> 01 02, then 00 as the end; sorts as the raw bytes
    var_u64          keys    [L: 4 bits][data: 4 bits] and L bytes, smallest L; sorts as the number
    Utf8             values  length u16, bytes
    VarBytes         values  length u32, bytes
    Array<T>         values  count u16, packed elements
    SeqBlock         value   base u64 BE, size u64 BE: the ids [base, base + size)

None of these carries a version: the first byte of a record's key does. A ``read_`` function takes
the position to read at and gives the position after; ``record`` names the record in an error.

Keys of the Queue. The first byte says whose layout a record has: 01 the RFC's own, 02 Penstock's.
The second is the type. ``queue`` is the queue's name as TerminatedBytes, except in the spec's key,
where the name is raw and last. The values are in ``records``::

    01 01  message u64                         payload    the payload's bytes
    02 02  queue, bucket u64                   active     available and in-flight messages
    02 03  queue, bucket u64, part u64         done       done messages of one commit
    02 04  queue, bucket u64, part u64         failed     failed messages of one commit
    02 05  queue, message u64, attempt u16     attempts   one attempt
    02 06  name                                spec       the queue's settings (``kv/queues.py``)
    02 09  queue, bucket u64                   summary    counts and first messages of a bucket

The RFC appends to done, failed and attempts with a merge operator. Our engines have none, so every
append has a key of its own, under the prefix that is the RFC's key, and a reader folds them.

Bucket ids and claim ids are 4 bits of exponent e and 60 bits of number; a bucket of exponent e
holds 10^e claims, and its number is the first of them. An Array's count is u16, so 10^4 is the
largest bucket that can be encoded and exponents above 4 are refused.

Keys of the Log. Every key begins with ``03 01`` (the Log, version 1) and a segment, u32; segment 0
is the system's, the user's begin at 1::

    03 01  segment, 10, TerminatedBytes(key), var_u64    entry          the record's bytes
    03 01  00000000, 20                                  SeqBlock       base u64 BE, size u64 BE
    03 01  00000000, 30, described segment u32           segment meta   start sequence u64 BE,
                                                                        start time i64 BE, in ms
    03 01  segment, 40, key                              listing        empty

The number in an entry's key is its sequence less its segment's start sequence. One sequence
runs over all keys, so that of one key has gaps. The metadata log's key is
``opendata-queue/{instance}/messages/metadata/{log}``; the value of its entries is
``Array<message id u64, metadata VarBytes>``, little-endian.

Upgrade recipe: another first byte of the Queue's keys, another version byte of the Log's. The store
then reads both until it has rewritten the older records, or retention has dropped their segments.
"""

from __future__ import annotations

from struct import Struct
from struct import error as struct_error
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import CorruptRecord, InvalidInput
from penstock.limits import MAX_BUCKET_EXPONENT

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_U16: Final = 0xFFFF
MAX_U32: Final = 0xFFFF_FFFF
MAX_U64: Final = 0xFFFF_FFFF_FFFF_FFFF

_U16: Final = Struct("<H")
_SEQ_BLOCK: Final = Struct(">QQ")
_SEGMENT: Final = Struct(">Qq")
# SeqBlock of base and size; description of a segment: its start sequence, and its start time in ms.
encode_seq_block, encode_segment_meta = _SEQ_BLOCK.pack, _SEGMENT.pack
_ELEMENT: Final = Struct("<QI")
_LOG_HEAD: Final = Struct(">2sIB")
_LOG: Final = b"\x03\x01"
_ENTRY: Final = 0x10
_LISTING: Final = 0x40

PAYLOAD: Final = b"\x01\x01"
SEQ_BLOCK_KEY: Final = b"\x03\x01\x00\x00\x00\x00\x20"
SEGMENT_META_PREFIX: Final = b"\x03\x01\x00\x00\x00\x00\x30"

_NUMBER_BITS: Final = 60
_MAX_NUMBER: Final = (1 << _NUMBER_BITS) - 1
_CAPACITY: Final[tuple[int, ...]] = tuple(10**e for e in range(MAX_BUCKET_EXPONENT + 1))


def terminated(raw: bytes) -> bytes:
    """Encode ``raw`` as TerminatedBytes."""
    return raw.replace(b"\x01", b"\x01\x02").replace(b"\x00", b"\x01\x01") + b"\x00"


def read_terminated(buf: bytes, pos: int, record: str = "TerminatedBytes") -> tuple[bytes, int]:
    """Read TerminatedBytes at ``pos``: the raw bytes, and the position after the end byte."""
    end = buf.find(0, pos)
    if end < 0:
        raise CorruptRecord(f"{record}: no end byte after byte {pos}")
    raw = buf[pos:end]
    if b"\x01" in raw:
        escaped = raw
        raw = raw.replace(b"\x01\x01", b"\x00").replace(b"\x01\x02", b"\x01")
        if terminated(raw)[:-1] != escaped:
            raise CorruptRecord(f"{record}: wrong escape between bytes {pos} and {end}")
    return raw, end + 1


def increment(raw: bytes) -> bytes | None:
    """Give the smallest bytes greater than every extension of ``raw``; None if there are none."""
    head = raw.rstrip(b"\xff")
    if not head:
        return None
    return head[:-1] + bytes((head[-1] + 1,))


def utf8(text: str) -> bytes:
    """Encode ``text`` as Utf8: at most 65,535 bytes."""
    raw = text.encode()
    if len(raw) > MAX_U16:
        raise InvalidInput(f"text of {len(raw)} bytes: a record holds at most {MAX_U16}")
    return _U16.pack(len(raw)) + raw


def read_utf8(buf: bytes, pos: int, record: str = "Utf8") -> tuple[str, int]:
    """Read Utf8 at ``pos``: the text, and the position after it."""
    try:
        (size,) = _U16.unpack_from(buf, pos)
    except struct_error:
        raise CorruptRecord(f"{record}: ends before the length of a text at byte {pos}") from None
    start = pos + 2
    end = start + size
    if end > len(buf):
        raise CorruptRecord(f"{record}: text of {size} bytes at byte {pos} goes past the end")
    try:
        return str(buf[start:end], "utf-8"), end
    except UnicodeDecodeError as error:
        raise CorruptRecord(f"{record}: not UTF-8 at byte {pos}: {error.reason}") from None


def pack_count(count: int, record: str) -> bytes:
    """Encode the count of an Array."""
    if count > MAX_U16:
        raise InvalidInput(f"{record}: {count} elements, an Array holds at most {MAX_U16}")
    return _U16.pack(count)


def read_count(buf: bytes, pos: int, record: str) -> int:
    """Read the count of an Array, which takes two bytes at ``pos``."""
    try:
        (count,) = _U16.unpack_from(buf, pos)
    except struct_error:
        raise CorruptRecord(f"{record}: ends before the count at byte {pos}") from None
    return int(count)


def broken(record: str, index: int, count: int, error: Exception) -> CorruptRecord:
    """Make the error of an element of an Array that can't be read."""
    why = "text that is not UTF-8" if isinstance(error, UnicodeDecodeError) else "ends early"
    return CorruptRecord(f"{record}: element {index} of {count}: {why}")


def check_end(buf: bytes, pos: int, record: str) -> None:
    """Refuse bytes after the last field, and a last field that reaches past the bytes."""
    if pos != len(buf):
        raise CorruptRecord(f"{record}: {len(buf)} bytes, but its fields take {pos}")


def var_u64(x: int) -> bytes:
    """Encode ``x`` in as few bytes as keep the order of numbers."""
    if not 0 <= x <= MAX_U64:
        raise InvalidInput(f"{x} is not an unsigned 64-bit number")
    extra = (x.bit_length() + 3) >> 3
    return (extra << (4 + 8 * extra) | x).to_bytes(extra + 1, "big")


def read_var_u64(buf: bytes, pos: int, record: str = "var_u64") -> tuple[int, int]:
    """Read a var_u64 at ``pos``: the number, and the position after it."""
    if pos >= len(buf):
        raise CorruptRecord(f"{record}: ends before the number at byte {pos}")
    extra = buf[pos] >> 4
    end = pos + 1 + extra
    if end > len(buf):
        raise CorruptRecord(f"{record}: number of {extra + 1} bytes at byte {pos} past the end")
    x = int.from_bytes(buf[pos:end], "big") & ((1 << (4 + 8 * extra)) - 1)
    if x > MAX_U64:
        raise CorruptRecord(f"{record}: number at byte {pos} exceeds 64 bits")
    # Two encodings of one number would be two keys for one entry.
    if extra != (x.bit_length() + 3) >> 3:
        raise CorruptRecord(f"{record}: number at byte {pos} is longer than it needs to be")
    return x, end


def _decode_two(fields: Struct, buf: bytes, record: str) -> tuple[int, int]:
    if len(buf) != fields.size:
        raise CorruptRecord(f"{record}: {len(buf)} bytes, not {fields.size}")
    first, second = fields.unpack(buf)
    return first, second


def decode_seq_block(buf: bytes) -> tuple[int, int]:
    """Give base and size of a SeqBlock."""
    return _decode_two(_SEQ_BLOCK, buf, "SeqBlock")


# --- ids of buckets and claims ----------------------------------------------------------------


def capacity(exponent: int) -> int:
    """Give how many messages a bucket of this exponent holds."""
    if not 0 <= exponent <= MAX_BUCKET_EXPONENT:
        raise InvalidInput(f"bucket exponent {exponent}: allowed are 0 to {MAX_BUCKET_EXPONENT}")
    return _CAPACITY[exponent]


def make_id(exponent: int, number: int) -> int:
    """Make a bucket id or a claim id."""
    # Refuses exponents that are not allowed.
    capacity(exponent)
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


# --- keys of the Queue ------------------------------------------------------------------------


def payload_key(message_id: int) -> bytes:
    """Key of a message's payload."""
    return PAYLOAD + message_id.to_bytes(8, "big")


class QueueKeys:
    """Keys of the records of one type that belong to queues: ``head``, the queue, numbers."""

    def __init__(self, head: bytes, fields: str, record: str) -> None:
        self.head = head
        self._fields = Struct(fields)
        self.record = record

    def key(self, queue: bytes, *numbers: int) -> bytes:
        """Key of one record."""
        return self.head + terminated(queue) + self._fields.pack(*numbers)

    def prefix(self, queue: bytes) -> bytes:
        """Prefix of the keys of a queue."""
        return self.head + terminated(queue)

    def parse(self, key: bytes) -> tuple[Any, ...]:
        """Give the queue and the numbers of a key."""
        if key[:2] != self.head:
            raise CorruptRecord(f"{self.record}: {key.hex(' ')} is none")
        queue, pos = read_terminated(key, 2, self.record)
        try:
            return queue, *self._fields.unpack(key[pos:])
        except struct_error:
            raise CorruptRecord(
                f"{self.record}: {len(key) - pos} bytes after the queue, not {self._fields.size}"
            ) from None


# Each with the numbers of its keys.
ACTIVE: Final = QueueKeys(b"\x02\x02", ">Q", "active key")
DONE: Final = QueueKeys(b"\x02\x03", ">QQ", "done key")
FAILED: Final = QueueKeys(b"\x02\x04", ">QQ", "failed key")
ATTEMPTS: Final = QueueKeys(b"\x02\x05", ">QH", "attempts key")
SUMMARY: Final = QueueKeys(b"\x02\x09", ">Q", "summary key")


# --- the Log ----------------------------------------------------------------------------------


def entry_key(segment: int, key: bytes, relative_seq: int) -> bytes:
    """Key of an entry; ``relative_seq`` counts from the segment's start sequence."""
    return entry_prefix(segment, key) + var_u64(relative_seq)


def entry_prefix(segment: int, key: bytes) -> bytes:
    """Prefix of the entries of one key in one segment."""
    return _LOG_HEAD.pack(_LOG, segment, _ENTRY) + terminated(key)


def parse_entry_key(key: bytes) -> tuple[int, bytes, int]:
    """Give segment, the log's key and the relative sequence."""
    segment = _read_head(key, _ENTRY, "log entry key")
    log_key, pos = read_terminated(key, _LOG_HEAD.size, "log entry key")
    relative_seq, pos = read_var_u64(key, pos, "log entry key")
    if pos != len(key):
        raise CorruptRecord(f"log entry key: {len(key) - pos} bytes after its end at byte {pos}")
    return segment, log_key, relative_seq


def segment_meta_key(segment: int) -> bytes:
    """Key of the description of a segment."""
    return SEGMENT_META_PREFIX + segment.to_bytes(4, "big")


def parse_segment_meta_key(key: bytes) -> int:
    """Give the segment that the record describes."""
    if len(key) != 11 or not key.startswith(SEGMENT_META_PREFIX):
        raise CorruptRecord(f"segment meta key: {key.hex(' ')} is none")
    return int.from_bytes(key[7:], "big")


def decode_segment_meta(buf: bytes) -> tuple[int, int]:
    """Give start sequence and start time of a segment."""
    return _decode_two(_SEGMENT, buf, "segment meta")


def listing_key(segment: int, key: bytes) -> bytes:
    """Key that says that a segment holds entries of ``key``."""
    return _LOG_HEAD.pack(_LOG, segment, _LISTING) + key


def parse_listing_key(key: bytes) -> tuple[int, bytes]:
    """Give segment and the log's key."""
    return _read_head(key, _LISTING, "listing key"), key[_LOG_HEAD.size :]


def metadata_log_key(instance_id: str, log_id: str) -> bytes:
    """Key, inside the Log, of one metadata log of one instance."""
    return f"opendata-queue/{instance_id}/messages/metadata/{log_id}".encode()


def encode_metadata_batch(items: Sequence[tuple[int, bytes]]) -> bytes:
    """Encode message ids and their metadata as the value of one entry."""
    pack = _ELEMENT.pack
    parts = [pack_count(len(items), "metadata record")]
    for message_id, metadata in items:
        parts += (pack(message_id, len(metadata)), metadata)
    return b"".join(parts)


def decode_metadata_batch(buf: bytes) -> list[tuple[int, bytes]]:
    """Give message ids and their metadata."""
    unpack = _ELEMENT.unpack_from
    items: list[tuple[int, bytes]] = []
    count, pos = read_count(buf, 0, "metadata record"), 2
    try:
        for _ in range(count):
            message_id, length = unpack(buf, pos)
            pos += 12
            items.append((message_id, buf[pos : pos + length]))
            pos += length
    except struct_error as error:
        raise broken("metadata record", len(items), count, error) from None
    # Only the last element can reach past the end: another one would have no head after it.
    check_end(buf, pos, "metadata record")
    return items


def _read_head(key: bytes, tag: int, record: str) -> int:
    try:
        prefix, segment, found = _LOG_HEAD.unpack_from(key)
    except struct_error:
        raise CorruptRecord(f"{record}: {key.hex(' ')} is none") from None
    if prefix != _LOG or found != tag:
        raise CorruptRecord(f"{record}: {key.hex(' ')} is none")
    return int(segment)
