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

None of these carries a version: the first byte of a record's key does. A ``read_`` function takes
the position to read at and gives the position after; ``record`` names the record in an error.
"""

from __future__ import annotations

from struct import Struct
from struct import error as struct_error
from typing import Final

from penstock.errors import CorruptRecord, InvalidInput

MAX_U16: Final = 0xFFFF
MAX_U32: Final = 0xFFFF_FFFF
MAX_U64: Final = 0xFFFF_FFFF_FFFF_FFFF

_U16: Final = Struct("<H")
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


def encode_seq_block(base: int, size: int) -> bytes:
    """Encode a SeqBlock: the ids [base, base + size) are taken."""
    return _SEQ_BLOCK.pack(base, size)


def decode_seq_block(buf: bytes) -> tuple[int, int]:
    """Give base and size of a SeqBlock."""
    if len(buf) != _SEQ_BLOCK.size:
        raise CorruptRecord(f"SeqBlock: {len(buf)} bytes, not {_SEQ_BLOCK.size}")
    base, size = _SEQ_BLOCK.unpack(buf)
    return base, size
