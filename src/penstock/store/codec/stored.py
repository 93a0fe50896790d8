"""The two Cap'n Proto records of the indexed store, encoded and decoded by hand.

The schema is ``queueber.capnp``. A general Cap'n Proto library costs several microseconds for a
record; these records have one layout each, so a fixed ``struct`` does. The bytes are those that
pycapnp writes into one segment when the fields are set in schema order, so any Cap'n Proto
reader reads them. Words are 8 bytes, little-endian; pointers are relative to their own end::

    StoredItem                                  LeaseEntry, n ids
    -1  u32 0 | u32 words that follow           -1  u32 0 | u32 words that follow
     0  root: struct, 2 data, 4 pointers         0  root: struct, 4 data, 3 pointers
     1  attempts u16, forgiven u16, 0 u32        1  expiryTsSecs u64
     2  visibleAtMs u64                          2  expiryTsMs u64
     3  -> contents                              3  claimedAtMs u64
     4  -> visibilityTsIndexKey                  4  queue u32, 0 u32
     5  -> id                                    5  -> ids
     6  -> lease                                 6  -> expiryTsIndexKey
     7  contents, padded with zeros              7  -> consumer
        visibilityTsIndexKey, padded             8  n times -> the id n words on: all the same
        id, 8 bytes                                 n ids, 8 bytes each
        lease, 16 bytes, zeros if waiting           expiryTsIndexKey, padded
                                                    consumer, a NUL, padded

The lease comes last, so that claiming a message replaces the tail of its record.

Versions: Cap'n Proto's own rule is the upgrade recipe (fields are only added, at the end). The
decoders here take our layout alone. To add a field: add it to the schema, let the decoder tell
the layouts apart by the root word, and give the old layout the field's default.
Records that Queueber wrote are read with pycapnp, by the importer.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from struct import error as struct_error
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.errors import CorruptRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

# A list pointer is u32 `offset in words << 2 | 1`, u32 `count << 3 | size of an element`.
_FIRST: Final = 2 << 2 | 1  # from the first of three pointers over the other two
_FIRST_OF_FOUR: Final = 3 << 2 | 1
_BYTES: Final = 2
_POINTERS: Final = 6
_ID_SIZE: Final = 8 << 3 | _BYTES
_LEASE_SIZE: Final = 16 << 3 | _BYTES
_ITEM_ROOT: Final = 4 << 16 | 2
_LEASE_ROOT: Final = 3 << 16 | 4
_UNUSED: Final = bytes(4)
_ZEROS: Final = tuple(b"\0" * n for n in range(8))

# `x` packs zeros, and skips on unpacking: decoders unpack only fields they can't compute.
_ITEM_FIELDS: Final = Struct("<HH4xQ")
_pack_fields: Final = _ITEM_FIELDS.pack
_unpack_item: Final = Struct("<16xHH4xQ4xI4xI16x").unpack_from
_ITEM_HEAD: Final = 64
_ITEM_TAIL: Final = 24
LEASE_BYTES: Final = 16
_pack_lease: Final = Struct("<4xI4xIQQQI4xIIIIII").pack
_unpack_lease: Final = Struct("<24xQQI8xI4xI4xI").unpack_from
_LEASE_HEAD: Final = 72
_pack_pointer: Final = Struct("<II").pack
# One call for many ids is five times as fast as one slice each; chunks bound the table.
_ID_CHUNK: Final = 64
_unpack_ids: Final = tuple(Struct("8s" * n).unpack_from for n in range(_ID_CHUNK + 1))


class _Layout(NamedTuple):
    """The bytes and positions that items share if their contents and keys have equal sizes."""

    start: bytes  # words -1 and 0
    pointers: bytes  # words 3 to 6
    contents_pad: bytes
    key_pad: bytes
    contents_end: int
    key_start: int
    key_end: int
    id_start: int
    total: int


@lru_cache(maxsize=4096)
def _layout(size: int, key_size: int) -> _Layout:
    words = (size + 7) >> 3
    both = words + ((key_size + 7) >> 3)
    pointers = (
        _pack_pointer(_FIRST_OF_FOUR, size << 3 | _BYTES)
        + _pack_pointer((words << 2) + 9, key_size << 3 | _BYTES)
        + _pack_pointer((both << 2) + 5, _ID_SIZE)
        + _pack_pointer((both << 2) + 5, _LEASE_SIZE)
    )
    key_start = _ITEM_HEAD + (words << 3)
    id_start = _ITEM_HEAD + (both << 3)
    return _Layout(
        _pack_pointer(0, both + 10) + _pack_pointer(0, _ITEM_ROOT),
        pointers,
        _ZEROS[-size & 7],
        _ZEROS[-key_size & 7],
        _ITEM_HEAD + size,
        key_start,
        key_start + key_size,
        id_start,
        id_start + _ITEM_TAIL,
    )


class LeaseRecord(NamedTuple):
    """A lease: its messages, its deadline and its consumer."""

    ids: list[bytes]
    expiry_ms: int
    index_key: bytes
    claimed_at_ms: int
    queue: int
    consumer: str


def encode_stored_item(
    contents: bytes,
    index_key: bytes,
    id8: bytes,
    attempts: int,
    forgiven: int,
    visible_at_ms: int,
    lease: bytes,
) -> bytes:
    """Encode a StoredItem; ``id8`` is 8 bytes, ``lease`` 16."""
    assert len(id8) == 8, "an id is 8 bytes"
    assert len(lease) == LEASE_BYTES, "a lease is 16 bytes"
    layout = _layout(len(contents), len(index_key))
    return b"".join(
        (
            layout[0],
            _pack_fields(attempts, forgiven, visible_at_ms),
            layout[1],
            contents,
            layout[2],
            index_key,
            layout[3],
            id8,
            lease,
        )
    )


def with_lease(buf: bytes, lease: bytes) -> bytes:
    """Give an encoded StoredItem another lease."""
    assert len(lease) == LEASE_BYTES, "a lease is 16 bytes"
    return buf[:-LEASE_BYTES] + lease


def decode_stored_item(buf: bytes) -> tuple[bytes, bytes, bytes, int, int, int, bytes]:
    """Give contents, index key, id, attempts, forgiven, visible_at_ms and lease."""
    try:
        attempts, forgiven, visible_at_ms, size, key_size = _unpack_item(buf)
    except struct_error:
        raise CorruptRecord(f"StoredItem: {len(buf)} bytes, shorter than its head") from None
    # The length bounds both sizes, and so the layouts that are cached.
    if (size >> 3) + (key_size >> 3) <= len(buf):
        start, pointers, pad, key_pad, contents_end, key_start, key_end, id_start, total = _layout(
            size >> 3, key_size >> 3
        )
        if (
            len(buf) == total
            and buf[:16] == start
            and buf[32:_ITEM_HEAD] == pointers
            and buf[contents_end:key_start] == pad
            and buf[key_end:id_start] == key_pad
            and buf[20:24] == _UNUSED
        ):
            return (
                buf[_ITEM_HEAD:contents_end],
                buf[key_start:key_end],
                buf[id_start : id_start + 8],
                attempts,
                forgiven,
                visible_at_ms,
                buf[id_start + 8 :],
            )
    raise CorruptRecord(f"StoredItem: {len(buf)} bytes that are not laid out as one")


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
        ids, index_key = _split_ids(buf, first_id, n), buf[key_start : key_start + key_size]
        lease = LeaseRecord(ids, expiry_ms, index_key, claimed_at_ms, queue, consumer)
        if encode_lease(*lease) == buf:
            return lease
    raise CorruptRecord(f"LeaseEntry: {len(buf)} bytes that are not laid out as one")


def _split_ids(buf: bytes, pos: int, n: int) -> list[bytes]:
    ids: list[bytes] = []
    while n > _ID_CHUNK:
        ids += _unpack_ids[_ID_CHUNK](buf, pos)
        pos += _ID_CHUNK << 3
        n -= _ID_CHUNK
    ids += _unpack_ids[n](buf, pos)
    return ids
