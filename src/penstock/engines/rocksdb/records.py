"""RocksDB's files of records: the write-ahead log and the MANIFEST. Nothing here writes.

::

    block of 32 KiB     fragments, and at its end fewer than 7 bytes that hold nothing
    fragment            checksum (u32) | length (u16) | kind (u8) | that many bytes
    record              one FULL fragment, or FIRST, any number of MIDDLE, LAST
    record of a log     sequence (u64) | number of changes (u32) | changes: one committed batch
    record of MANIFEST  changes to the list of files: tag, then the numbers (varint) and strings
                        (length, bytes) of that tag

The checksum is the CRC-32C of kind and bytes, rotated. Batches are numbered: the sequence of one
plus its number of changes is the sequence of the next.
"""

from __future__ import annotations

import re
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

import google_crc32c

if TYPE_CHECKING:
    from collections.abc import Iterator
    from mmap import mmap

BLOCK_BYTES: Final = 32_768
FRAGMENT: Final = Struct("<IHB")
BATCH: Final = Struct("<QI")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
# Where the kind of a fragment that begins a record may stand.
_BEGINS: Final = re.compile(rb"[\x01\x02]")


def fragment_checksum(fragment: bytes) -> int:
    """Return the checksum that RocksDB writes for the kind and bytes of a fragment."""
    crc: int = google_crc32c.value(fragment)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def read_records(data: bytes | mmap, position: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield each whole record with the position behind it; end at the first that is not whole."""
    parts: list[bytes] = []
    while position + FRAGMENT.size <= len(data):
        room = BLOCK_BYTES - position % BLOCK_BYTES
        if room < FRAGMENT.size:
            position += room
            continue
        fragment = _fragment_at(data, position, room)
        if fragment is None or bool(parts) is (fragment[0] in {FULL, FIRST}):
            return
        position += FRAGMENT.size - 1 + len(fragment)
        parts.append(fragment[1:])
        if fragment[0] in {FULL, LAST}:
            yield position, b"".join(parts)
            parts.clear()


def _fragment_at(data: bytes | mmap, position: int, room: int) -> bytes | None:
    """Return kind and bytes of the fragment at a position; None if it is not intact."""
    checksum, length, kind = FRAGMENT.unpack_from(data, position)
    end = position + FRAGMENT.size + length
    if not FULL <= kind <= LAST or FRAGMENT.size + length > room or end > len(data):
        return None
    fragment = data[position + FRAGMENT.size - 1 : end]
    return fragment if fragment_checksum(fragment) == checksum else None


def _next_beginning(data: bytes | mmap, position: int) -> int | None:
    """Find the next fragment at or behind a position that is intact and begins a record."""
    while position < len(data):
        room = BLOCK_BYTES - position % BLOCK_BYTES
        kinds = data[position + FRAGMENT.size - 1 : position + room]
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
    # The damage begins here, or in the next block.
    room = BLOCK_BYTES - end % BLOCK_BYTES
    damage = end + room if room < FRAGMENT.size else end
    resumes = _next_beginning(data, damage + 1)
    return resumes, sum(1 for _ in read_behind(data, resumes))


def read_behind(data: bytes | mmap, position: int | None) -> Iterator[bytes]:
    """Yield each whole record from a position on, stepping over further damage."""
    while position is not None:
        for behind, record in read_records(data, position):
            yield record
            position = behind
        position = _next_beginning(data, position + 1)


# --- a write-ahead log ----------------------------------------------------------------------------


class LogCheck(NamedTuple):
    """The result of reading a log file: its whole batches, and the bytes behind them."""

    size: int
    batches: int
    #: The sequence of the first batch, and the one that the batch after the last would have.
    sequence: int | None
    next_sequence: int | None
    #: Where the whole batches end: at the end of the file, at a torn tail, or at damage.
    end: int
    #: Where a record begins again behind the damage. None: nowhere. Then this is the tail that a
    #: crash has torn, and no confirmed change can have been in it.
    resumes: int | None
    batches_behind: int

    @property
    def bytes_behind(self) -> int:
        """The bytes of the file behind the damage."""
        return 0 if self.resumes is None else self.size - self.resumes


def check_log(data: bytes | mmap) -> LogCheck:
    """Read a log file and tell a torn tail from damage with something behind it."""
    sequence = next_sequence = None
    batches = end = 0
    for behind, record in read_records(data):
        if len(record) < BATCH.size:
            break
        begins, changes = BATCH.unpack_from(record)
        sequence = begins if sequence is None else sequence
        next_sequence = begins + changes
        batches += 1
        end = behind
    resumes, batches_behind = find_behind(data, end)
    return LogCheck(len(data), batches, sequence, next_sequence, end, resumes, batches_behind)


# --- the MANIFEST ---------------------------------------------------------------------------------

COMPARATOR, LOG_NUMBER, NEXT_FILE, LAST_SEQUENCE, _CURSOR, _DELETED = range(1, 7)
_PREVIOUS_LOG, _KEEP_LOG, NEW_FILE, FAMILY, ADD_FAMILY, _DROP_FAMILY = 9, 10, 103, 200, 201, 202
_MAX_FAMILY, _IN_GROUP = 203, 300
# The numbers and strings behind each tag.
_SHAPES: Final = {
    **dict.fromkeys((LOG_NUMBER, NEXT_FILE, LAST_SEQUENCE, _PREVIOUS_LOG, _KEEP_LOG), "n"),
    **dict.fromkeys((FAMILY, _MAX_FAMILY, _IN_GROUP), "n"),
    **dict.fromkeys((COMPARATOR, ADD_FAMILY), "s"),
    _CURSOR: "ns",
    _DELETED: "nn",  # level, number
    NEW_FILE: "nnnssnn",  # level, number, size, smallest and largest key, sequences; then extras
    _DROP_FAMILY: "",
}
# A tag with this bit stands before one string, which a reader that does not know the tag skips.
_SKIPPABLE: Final = 1 << 13
# Behind a new file come tags of its own, each with a string, up to this one.
NO_MORE_EXTRAS: Final = 1

_Field = tuple[int, list[int], list[bytes]]


class TableFile(NamedTuple):
    """A file of rows: its size, the number of its table, and its first and last internal key."""

    number: int
    size: int
    family: int
    smallest: bytes
    largest: bytes

    @property
    def name(self) -> str:
        """The name in the directory."""
        return f"{self.number:06}.sst"


class Manifest:
    """The sum of the whole records of a MANIFEST; ``end`` is where they end.

    Raises ValueError if a whole record has an unknown tag or ends too early.
    """

    def __init__(self, data: bytes) -> None:
        self.families = {0: "default"}
        self.files: dict[int, TableFile] = {}
        #: Every file that is made after the last record has this number or a higher one.
        self.next_file = 0
        #: The highest sequence in use when the last record was written.
        self.last_sequence = 0
        self.end = 0
        self._logs = {0: 0}
        self._keep_log = 0
        group: list[list[_Field]] = []
        for end, record in read_records(data):
            try:
                edit = _fields(record)
            except IndexError:
                raise ValueError(f"its record before byte {end} ends too early") from None
            group.append(edit)
            # Records of a group count together or not at all; the last has 0 to come.
            if not any(tag == _IN_GROUP and numbers[0] for tag, numbers, _ in edit):
                for each in group:
                    self._apply(each)
                group.clear()
            self.end = end

    @property
    def oldest_log(self) -> int:
        """The number of the first log with changes that are not in files of rows."""
        return max(self._keep_log, min(self._logs.values()))

    def _apply(self, edit: list[_Field]) -> None:
        family = next((numbers[0] for tag, numbers, _ in edit if tag == FAMILY), 0)
        for tag, numbers, strings in edit:
            if tag == LOG_NUMBER:
                self._logs[family] = numbers[0]
            elif tag == _KEEP_LOG:
                self._keep_log = numbers[0]
            elif tag == NEXT_FILE:
                self.next_file = numbers[0]
            elif tag == LAST_SEQUENCE:
                self.last_sequence = max(self.last_sequence, numbers[0])
            elif tag == _DELETED:
                self.files.pop(numbers[1], None)
            elif tag == NEW_FILE:
                self.files[numbers[1]] = TableFile(numbers[1], numbers[2], family, *strings)
            elif tag == ADD_FAMILY:
                self.families[family] = strings[0].decode()
                self._logs.setdefault(family, 0)
            elif tag == _DROP_FAMILY:
                self.families.pop(family, None)
                self._logs.pop(family, None)
                self.files = {n: file for n, file in self.files.items() if file.family != family}


def _fields(record: bytes) -> list[_Field]:
    """Split a record of a MANIFEST into its tags with their numbers and strings."""
    fields: list[_Field] = []
    position = 0

    def number() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = record[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def string() -> bytes:
        nonlocal position
        length = number()
        position += length
        if position > len(record):
            raise IndexError
        return record[position - length : position]

    while position < len(record):
        tag = number()
        if tag & _SKIPPABLE:
            string()
            continue
        if tag not in _SHAPES:
            raise ValueError(f"this version of Penstock does not know its tag {tag}")
        values = [number() if kind == "n" else string() for kind in _SHAPES[tag]]
        while tag == NEW_FILE and number() != NO_MORE_EXTRAS:
            string()
        numbers = [value for value in values if isinstance(value, int)]
        fields.append((tag, numbers, [value for value in values if isinstance(value, bytes)]))
    return fields
