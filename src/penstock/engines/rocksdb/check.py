"""The check of a closed store before RocksDB opens it, by its MANIFEST and its logs.

Nothing here writes. RocksDB's files of records, the write-ahead log and the MANIFEST, are::

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

import os
import re
from mmap import ACCESS_READ, mmap
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

import google_crc32c

from penstock.engines.rocksdb.files import (
    CURRENT,
    IDENTITY,
    file_names,
    keep_others_out,
    log_name,
    log_numbers,
    os_errors_as,
    read_synced,
    unusable_store,
)
from penstock.errors import StoreMismatch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

# A database has these, besides its OPTIONS, a MANIFEST, and the files which that names.
_ALWAYS: Final = (CURRENT, IDENTITY, "rocksdict-config.json")
_MANIFEST_NAME: Final = re.compile(rb"MANIFEST-\d+\n")
# An error names no more files than this.
_NAMED: Final = 10
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


# --- the check before opening ---------------------------------------------------------------------


def check_files(path: Path, tables: Collection[str], *, is_copy: bool = False) -> None:
    """Raise StoreDamaged if a file of a closed store is missing, or its log is damaged.

    Raise StoreLocked if the store is open. A copy made by RocksDB may have no identity of its own.
    """
    with os_errors_as(f"can't read the store at {path}"), keep_others_out(path):
        names = file_names(path)
        missing = [name for name in _ALWAYS if name not in names]
        if is_copy and IDENTITY in missing:
            missing.remove(IDENTITY)
        if not any(name.startswith("OPTIONS-") for name in names):
            missing.append("OPTIONS-*")
        if CURRENT in missing:
            raise unusable_store(path, f"{_join_names(missing)} missing")
        manifest = read_manifest(path)
        lost = sorted(set(tables) - set(manifest.families.values()))
        if lost:
            raise unusable_store(path, f"its MANIFEST has nothing of the tables {', '.join(lost)}")
        for file in manifest.files.values():
            if file.name not in names:
                missing.append(file.name)
            elif (size := (path / file.name).stat().st_size) != file.size:
                raise unusable_store(path, f"{file.name} has {size} bytes instead of {file.size}")
        # The logs with changes that may not be in files of rows.
        logs = [number for number in log_numbers(path) if number >= manifest.oldest_log]
        synced, synced_size = read_synced(path)
        # RocksDB was writing one of them when it wrote the MANIFEST.
        if not any(number < manifest.next_file for number in logs):
            numbers = f"{manifest.oldest_log} to {manifest.next_file - 1}"
            missing.append(f"a write-ahead log (*.log, one of the numbers {numbers})")
        elif synced and synced >= manifest.oldest_log and synced not in logs:
            missing.append(log_name(synced))
        if missing:
            raise unusable_store(path, f"{_join_names(missing)} missing")
        checks = {number: _check_log(path / log_name(number)) for number in logs}
        wrong = _log_damage(checks, manifest.last_sequence, synced, synced_size)
        if wrong is not None:
            raise unusable_store(path, f"{wrong} (with --drop-after, salvage leaves that out)")


def _join_names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more} {'is' if len(names) == 1 else 'are'}"


def read_manifest(path: Path) -> Manifest:
    """Read the MANIFEST of a closed store; raise StoreDamaged if it is damaged."""
    current = (path / CURRENT).read_bytes()
    if not _MANIFEST_NAME.fullmatch(current):
        raise unusable_store(path, f"{CURRENT} names no MANIFEST but {current[:100]!r}")
    name = current.decode().strip()
    try:
        data = (path / name).read_bytes()
        manifest = Manifest(data)
    except FileNotFoundError:
        raise unusable_store(path, f"{name} is missing") from None
    except ValueError as error:
        raise StoreMismatch(f"{path / name} can't be read: {error}") from None
    # A tail torn by a crash names no file that a confirmed change is in.
    resumes, behind = find_behind(data, manifest.end)
    if resumes is not None:
        wrong = f"{name} is damaged at byte {manifest.end}, with {behind} records behind that"
        raise unusable_store(path, wrong)
    return manifest


def _check_log(log: Path) -> LogCheck:
    with log.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return check_log(b"")
        with mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            return check_log(data)


def _log_damage(
    logs: Mapping[int, LogCheck], last_sequence: int, synced: int, synced_size: int
) -> str | None:
    """Describe the first damage of the logs that is more than a tail torn by a crash.

    A log may have such a tail though another follows, if that one counts on from the last whole
    batch. The first begins no later than where the files of rows end, at ``last_sequence``. Of the
    log number ``synced``, ``synced_size`` bytes were on disk once: none of them is a torn tail.
    """
    lowest, highest = 0, last_sequence + 1
    before, whole, lost = 0, (min(logs, default=0), 0), 0
    checks = list(logs.items())
    for at, (number, log) in enumerate(checks):
        later = [each for _, each in checks[at + 1 :]]
        batches = log.batches_behind + sum(each.batches + each.batches_behind for each in later)
        size = log.bytes_behind + sum(each.size for each in later)
        if log.sequence is not None and not lowest <= log.sequence <= highest:
            batches, size, lost = batches + log.batches, size + log.size - log.bytes_behind, 0
            break
        before += log.batches
        if log.next_sequence is not None:
            lowest = highest = log.next_sequence
        whole = number, log.end
        lost = max(synced_size - log.end, 0) if number == synced else 0
        if log.resumes is not None or lost:
            break
    else:
        return None
    confirmed = f"; {lost} bytes from there on were confirmed" if lost else ""
    return (
        f"the write-ahead log is damaged at byte {whole[1]} of {log_name(whole[0])}: {before} "
        f"batches before that are whole, and {batches} behind it, in {size} bytes{confirmed}"
    )
