"""RocksDB's MANIFEST: which files of a database count.

A file of records (:mod:`penstock.engines.rocksdb.wal`), each a change to the list of files: tag,
then numbers (varint) and strings (length, bytes) as the tag has them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from penstock.engines.rocksdb.wal import read_records

__all__ = ["Manifest", "TableFile"]

_COMPARATOR, _LOG_NUMBER, _NEXT_FILE, _LAST_SEQUENCE, _CURSOR, _DELETED = range(1, 7)
_PREVIOUS_LOG, _KEEP_LOG, _NEW_FILE, _FAMILY, _ADD_FAMILY, _DROP_FAMILY = 9, 10, 103, 200, 201, 202
_MAX_FAMILY, _IN_GROUP = 203, 300
# The numbers and strings behind each tag.
_SHAPES: Final = {
    _COMPARATOR: "s",
    _LOG_NUMBER: "n",
    _NEXT_FILE: "n",
    _LAST_SEQUENCE: "n",
    _CURSOR: "ns",
    _DELETED: "nn",  # level, number
    _PREVIOUS_LOG: "n",
    _KEEP_LOG: "n",
    _NEW_FILE: "nnnssnn",  # level, number, size, smallest and largest key, sequences; then extras
    _FAMILY: "n",
    _ADD_FAMILY: "s",
    _DROP_FAMILY: "",
    _MAX_FAMILY: "n",
    _IN_GROUP: "n",
}
# A tag with this bit stands before one string, which a reader that does not know the tag skips.
_SKIPPABLE: Final = 1 << 13
# Behind a new file come tags of its own, each with a string, up to this one.
_NO_MORE_EXTRAS: Final = 1

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

    ValueError if a whole record says something that is not known.
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
        family = next((numbers[0] for tag, numbers, _ in edit if tag == _FAMILY), 0)
        for tag, numbers, strings in edit:
            if tag == _LOG_NUMBER:
                self._logs[family] = numbers[0]
            elif tag == _KEEP_LOG:
                self._keep_log = numbers[0]
            elif tag == _NEXT_FILE:
                self.next_file = numbers[0]
            elif tag == _LAST_SEQUENCE:
                self.last_sequence = max(self.last_sequence, numbers[0])
            elif tag == _DELETED:
                self.files.pop(numbers[1], None)
            elif tag == _NEW_FILE:
                _, number, size, *_ = numbers
                self.files[number] = TableFile(number, size, family, *strings)
            elif tag == _ADD_FAMILY:
                self.families[family] = strings[0].decode()
                self._logs.setdefault(family, 0)
            elif tag == _DROP_FAMILY:
                self.families.pop(family, None)
                self._logs.pop(family, None)
                self.files = {n: file for n, file in self.files.items() if file.family != family}


def _fields(record: bytes) -> list[_Field]:
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
        numbers: list[int] = []
        strings: list[bytes] = []
        for kind in _SHAPES[tag]:
            if kind == "n":
                numbers.append(number())
            else:
                strings.append(string())
        while tag == _NEW_FILE and number() != _NO_MORE_EXTRAS:
            string()
        fields.append((tag, numbers, strings))
    return fields
