"""An engine that keeps changes in memory, over a database that takes none.

A store moves records as time goes by, also while it is only read: delayed messages become
available. On an overlay it does so without writing to the database below.
"""

from __future__ import annotations

from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Protocol

from sortedcontainers import SortedDict

from penstock.engines.memory import MemoryBatch, MemoryEngine, MemoryTable
from penstock.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from penstock.engines import Batch, Table

_UNCHANGED: Final[Any] = object()
_PAGE: Final = 1_000


class ReadOnlyTables(Protocol):
    """The database below: tables that do not change."""

    def table(self, name: str) -> Table:
        """Return a table."""

    def close(self) -> None:
        """Close the database."""


class OverlayTable(MemoryTable):
    """A table below, and over it ``rows``: the changed ones, None for a deleted one."""

    def __init__(self, below: Table, rows: Any = None) -> None:
        super().__init__(rows)
        self._below = below

    def get(self, key: bytes) -> bytes | None:
        """Read one value."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[bytes]) -> list[bytes | None]:
        """Read many values."""
        found = {key: self.rows.get(key, _UNCHANGED) for key in keys}
        left = [key for key, value in found.items() if value is _UNCHANGED]
        if left:
            found.update(zip(left, self._below.multi_get(left), strict=True))
        return [found[key] for key in keys]

    def copy(self) -> OverlayTable:
        """Return the table as it is now."""
        return OverlayTable(self._below, self.rows.copy())

    def scan(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), ascending."""
        found: list[tuple[bytes, bytes]] = []
        while len(found) < limit and begin < end:
            wanted = limit - len(found)
            rows = self._below.scan(begin, end, wanted)
            # This round merges as far as the rows below go; the next one begins there.
            until = rows[-1][0] + b"\0" if len(rows) == wanted else end
            keys = self.rows.irange(begin, until, inclusive=(True, False))
            found += islice(self._merged(rows, keys), wanted)
            begin = until
        return found

    def scan_back(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), descending."""
        found: list[tuple[bytes, bytes]] = []
        while len(found) < limit and begin < end:
            wanted = limit - len(found)
            rows = self._below.scan_back(begin, end, wanted)
            until = rows[-1][0] if len(rows) == wanted else begin
            keys = self.rows.irange(until, end, inclusive=(True, False), reverse=True)
            found += islice(self._merged(rows, keys, back=True), wanted)
            end = until
        return found

    def _merged(
        self, rows: Sequence[tuple[bytes, bytes]], keys: Iterator[bytes], *, back: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Merge the rows below with the changed keys, both in the same order."""
        changed = ((key, self.rows[key]) for key in keys)
        last = None
        # The change of a row comes before the row.
        for key, value in merge(changed, rows, key=itemgetter(0), reverse=back):
            if key != last and value is not None:
                yield key, value
            last = key


class Overlay(MemoryEngine):
    """An engine over a database that does not change. Closing it closes the database."""

    def __init__(self, below: ReadOnlyTables, tables: Iterable[str]) -> None:
        self._below = below
        self._tables = {name: OverlayTable(below.table(name), SortedDict()) for name in tables}

    def commit(self, batch: Batch) -> None:
        """Apply a batch, in memory."""
        assert isinstance(batch, MemoryBatch)
        for table, key, value, end in batch.changes:
            if end is None:
                table.rows[key] = value
                continue
            while found := table.scan(key, end, _PAGE):
                table.rows.update((doomed, None) for doomed, _ in found)

    def checkpoint(self, path: Path) -> None:
        """Refuse: an overlay is for reading."""
        raise InvalidInput(f"a store that is open for reading only can't be copied to {path}")

    def close(self) -> None:
        """Close the database below."""
        self._below.close()
