"""The encodings that OpenData's keys and values are made of.

Keys are big-endian, because they sort; values are little-endian. SeqBlock's value is the one
exception: big-endian.

::

    TerminatedBytes  keys    00 -> 01 01, 01 -> 01 02, then 00 as the end; sorts as the raw bytes
    var_u64          keys    [L: 4 bits][data: 4 bits] and L bytes, smallest L; sorts as the number
    Utf8             values  length u16, bytes
    VarBytes         values  length u32, bytes
    Array<T>         values  count u16, packed elements
    SeqBlock         value   base u64 BE, size u64 BE: the ids [base, base + size)

None of these carries a version: the version byte is in the key of the record that uses them.
The ``read_`` functions take the position to read at and give the position after; ``record``
names, for the error, what is being read.
"""

from __future__ import annotations

from struct import Struct
from struct import error as struct_error
from typing import Final

from penstock.errors import CorruptRecord, InvalidInput

__all__ = [
    "MAX_U16",
    "MAX_U32",
    "MAX_U64",
    "decode_seq_block",
    "encode_seq_block",
    "increment",
    "prefix_range",
    "read_terminated",
    "read_utf8",
    "read_var_bytes",
    "read_var_u64",
    "terminated",
    "utf8",
    "var_bytes",
    "var_u64",
]

MAX_U16: Final = 0xFFFF
MAX_U32: Final = 0xFFFF_FFFF
MAX_U64: Final = 0xFFFF_FFFF_FFFF_FFFF

_U16: Final = Struct("<H")
_U32: Final = Struct("<I")
_SEQ_BLOCK: Final = Struct(">QQ")


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


def prefix_range(prefix: bytes) -> tuple[bytes, bytes | None]:
    """Give the range [start, end) of the TerminatedBytes whose raw bytes start with ``prefix``.

    An end of None is open: inside a longer key, ``increment`` of what stands before ends it.
    """
    if not prefix:
        return b"", None
    after = increment(prefix)
    return terminated(prefix), None if after is None else terminated(after)


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


def var_bytes(raw: bytes) -> bytes:
    """Encode ``raw`` as VarBytes."""
    if len(raw) > MAX_U32:
        raise InvalidInput(f"{len(raw)} bytes: a record holds at most {MAX_U32}")
    return _U32.pack(len(raw)) + raw


def read_var_bytes(buf: bytes, pos: int, record: str = "VarBytes") -> tuple[bytes, int]:
    """Read VarBytes at ``pos``: the bytes, and the position after them."""
    try:
        (size,) = _U32.unpack_from(buf, pos)
    except struct_error:
        raise CorruptRecord(f"{record}: ends before the length of bytes at byte {pos}") from None
    start = pos + 4
    end = start + size
    if end > len(buf):
        raise CorruptRecord(f"{record}: {size} bytes at byte {pos} go past the end")
    return buf[start:end], end


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


def encode_seq_block(base: int, size: int) -> bytes:
    """Encode a SeqBlock: the ids [base, base + size) are taken."""
    return _SEQ_BLOCK.pack(base, size)


def decode_seq_block(buf: bytes) -> tuple[int, int]:
    """Give base and size of a SeqBlock."""
    if len(buf) != _SEQ_BLOCK.size:
        raise CorruptRecord(f"SeqBlock: {len(buf)} bytes, not {_SEQ_BLOCK.size}")
    base, size = _SEQ_BLOCK.unpack(buf)
    return base, size
