"""Reads of a RocksDB database by column family, and the meaning of RocksDB's errors.

rocksdict's generators end at an unreadable block as they do at the end of a range. So reads that
may end early use an iterator, whose status tells the two apart.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right, insort
from itertools import islice
from operator import lt
from typing import TYPE_CHECKING, Any, Final, NoReturn

import rocksdict as rocks

from penstock.engines import damage_error, damage_text
from penstock.errors import DiskFull, StorageFailed, StoreDamaged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Words of the operating system when there is no room, as RocksDB passes them on.
_NO_SPACE: Final = ("No space left", "File too large", "Disk quota exceeded")
# Words of RocksDB for a block with a wrong checksum, and of the operating system for a file that is
# gone or that its disk can't read.
_DAMAGED: Final = ("Corruption", "Input/output error", "No such file or directory")
# Words of RocksDB to a writer when a compaction could not read a file.
_NOT_READ: Final = ("Corruption", "While pread", "for random read")
# Up to this many rows, a scan is faster without the binding's generator.
_FEW_ROWS: Final = 16
# After every key of every table.
AFTER_ALL: Final = b"\xff" * 64


class RocksTable:
    """One column family. The table calls ``on_damage`` with its name when it can't be read."""

    def __init__(self, database: rocks.Rdict, name: str, on_damage: Callable[[str], None]) -> None:
        self.name = name
        self._on_damage = on_damage
        self.bind(database)

    def bind(self, database: rocks.Rdict) -> None:
        """Read from this database from now on."""
        self.column = database.get_column_family(self.name)
        self._get: Any = self.column.get
        self.family: rocks.ColumnFamily | None = database.get_column_family_handle(self.name)

    def close(self) -> None:
        """Drop the handles: the database stays open for as long as any of them is alive."""
        self.family = None
        # Its rows are in the log, whether or not they could be flushed.
        with contextlib.suppress(Exception):
            self.column.close()

    def get(self, key: bytes) -> bytes | None:
        """Read one value."""
        try:
            value: bytes | None = self._get(key)
        except Exception as error:
            self.fail(error, key, key + b"\0")
        return value

    def multi_get(self, keys: list[bytes]) -> list[bytes | None]:
        """Read many values in one call."""
        if len(keys) == 1:
            # The binding's way for one key takes a third of the time.
            return [self.get(keys[0])]
        if len(keys) > _FEW_ROWS and _is_run(keys):
            # An unreadable block may be one that no key of these is in.
            with contextlib.suppress(StoreDamaged):
                rows = self.scan(keys[0], keys[-1] + b"\0", len(keys))
                # Keys that are longer may lie between them, and take the place of the last ones.
                if len(rows) < len(keys) or rows[-1][0] == keys[-1]:
                    found = dict(rows)
                    return [found.get(key) for key in keys]
        try:
            values: list[bytes | None] = self._get(keys)
        except Exception as error:
            self.fail(error, min(keys, default=b""), max(keys, default=b"") + b"\0")
        return values

    def scan(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), ascending."""
        bound = rocks.ReadOptions()
        bound.set_iterate_upper_bound(end)
        found: list[tuple[bytes, bytes]] = []
        try:
            if limit > _FEW_ROWS:
                rows: Any = self.column.items(from_key=begin, read_opt=bound)
                found = list(islice(rows, limit))
                del rows
                if len(found) == limit:
                    return found
            # The generator hides why it has ended: an iterator goes on from there, and tells.
            after = found[-1][0] + b"\0" if found else begin
            found += _ascending(self.column.iter(bound), self, after, end, limit - len(found))
        except StorageFailed:
            raise
        except Exception as error:
            self.fail(error, begin, end)
        return found

    def scan_back(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), descending."""
        bound = rocks.ReadOptions()
        bound.set_iterate_upper_bound(end)
        return _descending(self.column.iter(bound), self, begin, end, limit)

    def fail(self, error: Exception, begin: bytes, end: bytes) -> NoReturn:
        """Raise our error for keys of [begin, end) that could not be read."""
        try:
            translate(error, self.name, begin, end)
        except StoreDamaged:
            self._on_damage(self.name)
            raise


class RocksViewTable:
    """A column family as it was: an iterator pins the moment it was made at.

    rocksdict's own snapshots pin point reads only; they iterate over the present.

    The iterator has no upper bound, so a scan that ends early has stepped over every deleted key up
    to the next living one, of whatever queue. No later scan does it again: the view remembers these
    gaps.
    """

    family = None

    def __init__(self, table: RocksTable) -> None:
        self._table = table
        self._iterator: Any = table.column.iter()
        # Ranges without a living key: the keys that they end at, ascending, and their beginnings.
        self._gap_ends: list[bytes] = []
        self._gap_begins: dict[bytes, bytes] = {}

    def close(self) -> None:
        """Drop the iterator, and with it the pinned files."""
        self._iterator = None

    def _open(self) -> Any:
        if self._iterator is None:
            raise StorageFailed("the store was closed, or opened again, while it was being read")
        return self._iterator

    def get(self, key: bytes) -> bytes | None:
        """Read one value."""
        found = _ascending(self._open(), self._table, key, key + b"\0", 1)
        return found[0][1] if found else None

    def multi_get(self, keys: list[bytes]) -> list[bytes | None]:
        """Read many values."""
        return [self.get(key) for key in keys]

    def scan(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), ascending."""
        self._open()
        ends = self._gap_ends
        place = bisect_right(ends, begin)
        if place < len(ends) and self._gap_begins[ends[place]] <= begin:
            begin = ends[place]
        if begin >= end:
            return []
        found = _ascending(self._iterator, self._table, begin, end, limit)
        if len(found) < limit:
            # The iterator is at the first key after them.
            after = found[-1][0] + b"\0" if found else begin
            gap_end = self._iterator.key() or AFTER_ALL
            if gap_end not in self._gap_begins:
                insort(ends, gap_end)
            self._gap_begins[gap_end] = min(after, self._gap_begins.get(gap_end, after))
        return found

    def scan_back(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), descending."""
        return _descending(self._open(), self._table, begin, end, limit)


def _is_run(keys: list[bytes]) -> bool:
    """Whether numbered keys follow each other without a gap: one scan reads those in less time."""
    first, last = keys[0], keys[-1]
    return (
        first[:-8] == last[:-8]
        and int.from_bytes(last[-8:], "big") - int.from_bytes(first[-8:], "big") < len(keys)
        and all(map(lt, keys, islice(keys, 1, None)))
    )


def _ascending(
    rows: Any, table: RocksTable, begin: bytes, end: bytes, limit: int
) -> list[tuple[bytes, bytes]]:
    """Read up to ``limit`` pairs of [begin, end); an end that is not the end of the range raises.

    No step goes beyond the last wanted pair: it could meet a block that nobody needs.
    """
    found: list[tuple[bytes, bytes]] = []
    key_at, value_at, step = rows.key, rows.value, rows.next
    try:
        rows.seek(begin)
        for left in range(limit, 0, -1):
            key = key_at()
            if key is None or key >= end:
                break
            found.append((key, value_at()))
            if left > 1:
                step()
        rows.status()
    except Exception as error:
        _reset(rows)
        # A kept error keeps this frame, and the iterator would keep the database open.
        del rows, key_at, value_at, step
        table.fail(error, found[-1][0] + b"\0" if found else begin, end)
    return found


def _descending(
    rows: Any, table: RocksTable, begin: bytes, end: bytes, limit: int
) -> list[tuple[bytes, bytes]]:
    """Read up to ``limit`` pairs of [begin, end), last first, in the same way."""
    found: list[tuple[bytes, bytes]] = []
    try:
        rows.seek_for_prev(end)
        if rows.key() == end:
            rows.prev()
        while len(found) < limit and (key := rows.key()) is not None and key >= begin:
            found.append((key, rows.value()))
            if len(found) < limit:
                rows.prev()
        rows.status()
    except Exception as error:
        pass_on(error)
        end = found[-1][0] if found else end
        _reset(rows)
        # The binding knows no lower bound, so the block may be below the range; and to give a row,
        # RocksDB looks at the one before. Forward, no more than that row can be left of the range.
        try:
            rest = _ascending(rows, table, begin, end, 2)
        finally:
            del rows
        if len(rest) > 1:
            table.fail(error, begin, end)
        found += rest
    return found


def _reset(rows: Any) -> None:
    """Make an iterator that has failed read intact blocks again.

    RocksDB may repeat its error for intact blocks until the iterator has been at the end.
    """
    with contextlib.suppress(Exception):
        rows.seek(AFTER_ALL)


def pass_on(error: Exception) -> None:
    """Raise an error again that is not the binding's: a signal handler may have raised it."""
    trace = error.__traceback__
    is_direct = trace is None or trace.tb_next is None
    if not (is_direct and (type(error) is Exception or isinstance(error, rocks.DbClosedError))):
        raise error


def is_full(error: Exception) -> bool:
    """Whether the disk had no room for a write."""
    return any(sign in str(error) for sign in _NO_SPACE)


def translate(error: Exception, table: str = "", begin: bytes = b"", end: bytes = b"") -> NoReturn:
    """Raise our error for the binding's bare exception; of a read, with its table and range."""
    pass_on(error)
    text = str(error)
    if isinstance(error, rocks.DbClosedError):
        raise StorageFailed("the store is closed, or could not be opened again") from error
    if is_full(error):
        raise DiskFull(f"no space left for the store: {text}") from error
    if table and any(sign in text for sign in _DAMAGED):
        raise damage_error(table, begin, end, text) from error
    if any(sign in text for sign in _NOT_READ):
        raise StoreDamaged(damage_text(text)) from error
    raise StorageFailed(f"RocksDB failed: {text}") from error
