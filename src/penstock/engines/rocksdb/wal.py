"""Files of records as RocksDB writes them: its write-ahead log, and its MANIFEST.

::

    block of 32 KiB     fragments, and at its end fewer than 7 bytes that hold nothing
    fragment            checksum (u32) | length (u16) | kind (u8) | that many bytes
    record              one FULL fragment, or FIRST, any number of MIDDLE, LAST
    record of a log     sequence (u64) | number of changes (u32) | changes: one committed batch

The checksum is the CRC-32C of kind and bytes, rotated. Batches count on: the sequence of one, and
its number of changes, give the sequence of the next.

Everything here is told bytes and changes nothing.
"""

from __future__ import annotations

import re
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

import google_crc32c

if TYPE_CHECKING:
    from collections.abc import Iterator
    from mmap import mmap

__all__ = ["LogCheck", "check_log", "find_behind", "read_behind", "read_records"]

_BLOCK: Final = 32_768
_FRAGMENT: Final = Struct("<IHB")
_BATCH: Final = Struct("<QI")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
# Where the kind of a fragment that begins a record may stand.
_BEGINS: Final = re.compile(rb"[\x01\x02]")


class LogCheck(NamedTuple):
    """A log file as it was read: whole batches from its beginning on, and what is behind them."""

    size: int
    batches: int
    #: The sequence of the first batch, and the one that the batch after the last would have.
    sequence: int | None
    next_sequence: int | None
    #: Where the whole batches end. Behind that nothing is to be found, or what damage has left.
    end: int
    #: Where a record begins again behind the damage; None: nowhere, so that this is the tail that a
    #: crash has torn, and no confirmed change can have been in it.
    resumes: int | None
    batches_behind: int

    @property
    def bytes_behind(self) -> int:
        """How much of the file is behind the damage."""
        return 0 if self.resumes is None else self.size - self.resumes


def read_records(data: bytes | mmap, position: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield each whole record with the position behind it; end at the first that is not whole."""
    size = len(data)
    parts: list[bytes] = []
    while position + _FRAGMENT.size <= size:
        room = _BLOCK - position % _BLOCK
        if room < _FRAGMENT.size:
            position += room
            continue
        fragment = _fragment_at(data, position, room)
        if fragment is None:
            return
        position += _FRAGMENT.size - 1 + len(fragment)
        kind = fragment[0]
        if bool(parts) is (kind in {_FULL, _FIRST}):
            return
        parts.append(fragment[1:])
        if kind in {_FULL, _LAST}:
            yield position, b"".join(parts)
            parts.clear()


def _fragment_at(data: bytes | mmap, position: int, room: int) -> bytes | None:
    """Return kind and bytes of the fragment at a position, if it is intact."""
    checksum, length, kind = _FRAGMENT.unpack_from(data, position)
    end = position + _FRAGMENT.size + length
    if not _FULL <= kind <= _LAST or _FRAGMENT.size + length > room or end > len(data):
        return None
    fragment = data[position + _FRAGMENT.size - 1 : end]
    found = google_crc32c.value(fragment)
    rotated = ((found >> 15 | found << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return fragment if rotated == checksum else None


def _next_beginning(data: bytes | mmap, position: int) -> int | None:
    """Find the next fragment at or behind a position that is intact and begins a record."""
    while position < len(data):
        room = _BLOCK - position % _BLOCK
        kinds = data[position + _FRAGMENT.size - 1 : position + room]
        for found in _BEGINS.finditer(kinds):
            start = position + found.start()
            if _fragment_at(data, start, room - found.start()) is not None:
                return start
        position += room
    return None


def find_behind(data: bytes | mmap, end: int) -> tuple[int | None, int]:
    """Look for records behind the place where the whole ones end.

    Return where one begins again, if anywhere, and how many are whole.
    """
    # What is not whole begins here, or in the next block.
    room = _BLOCK - end % _BLOCK
    damage = end + room if room < _FRAGMENT.size else end
    resumes = _next_beginning(data, damage + 1)
    return resumes, sum(1 for _ in read_behind(data, resumes))


def read_behind(data: bytes | mmap, position: int | None) -> Iterator[bytes]:
    """Yield each whole record from a position on, with more damage in between or not."""
    while position is not None:
        for behind, record in read_records(data, position):
            yield record
            position = behind
        position = _next_beginning(data, position + 1)


def check_log(data: bytes | mmap) -> LogCheck:
    """Read a log file and tell a torn tail from damage with something behind it."""
    sequence = next_sequence = None
    batches = end = 0
    for behind, record in read_records(data):
        if len(record) < _BATCH.size:
            break
        begins, changes = _BATCH.unpack_from(record)
        if sequence is None:
            sequence = begins
        next_sequence = begins + changes
        batches += 1
        end = behind
    resumes, batches_behind = find_behind(data, end)
    return LogCheck(len(data), batches, sequence, next_sequence, end, resumes, batches_behind)
