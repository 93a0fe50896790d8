"""Engines in memory: one of sorted dictionaries, and one over a database that takes no changes.

The first is real code, for tests of ours and of users. A store moves records as time goes by, also
while it is only read: delayed messages become available. On an :class:`Overlay` it does so without
writing to the database below.
"""

from __future__ import annotations

from contextlib import suppress
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from sortedcontainers import SortedDict

from penstock.engines import Engine, View

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.engines import Batch, Table

_UNCHANGED: Final[Any] = object()
_PAGE: Final = 1_000
# So often a commit is begun anew that signal handlers interrupt.
_TRIES: Final = 100


class MemoryTable:
    """One sorted dictionary. It is its own family handle."""

    def __init__(self, rows: Any = None) -> None:
        self.family: MemoryTable = self
        self.rows: Any = SortedDict() if rows is None else rows

    def copy(self) -> MemoryTable:
        """Return the table as it is now."""
        return MemoryTable(self.rows.copy())

    def get(self, key: bytes) -> bytes | None:
        """Read one value."""
        value: bytes | None = self.rows.get(key)
        return value

    def multi_get(self, keys: list[bytes]) -> list[bytes | None]:
        """Read many values."""
        return list(map(self.rows.get, keys))

    def scan(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), ascending."""
        keys = self.rows.irange(begin, end, inclusive=(True, False))
        return [(key, self.rows[key]) for key in islice(keys, limit)]

    def scan_back(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), descending."""
        keys = self.rows.irange(begin, end, inclusive=(True, False), reverse=True)
        return [(key, self.rows[key]) for key in islice(keys, limit)]


class MemoryBatch:
    """Changes in the order they were made."""

    def __init__(self) -> None:
        self.changes: list[tuple[MemoryTable, bytes, bytes | None, bytes | None]] = []

    def put(self, key: bytes, value: bytes, family: MemoryTable, /) -> None:
        """Set a value."""
        self.changes.append((family, key, value, None))

    def delete(self, key: bytes, family: MemoryTable, /) -> None:
        """Remove a key, if it is there."""
        self.changes.append((family, key, None, None))

    def delete_range(self, begin: bytes, end: bytes, family: MemoryTable, /) -> None:
        """Remove every key of [begin, end)."""
        self.changes.append((family, begin, None, end))

    def __len__(self) -> int:
        return len(self.changes)


class MemoryEngine(Engine):
    """Tables that live as long as the object: reopening a store on it finds everything."""

    durable_on_commit = True

    def __init__(self, tables: Iterable[str]) -> None:
        self._tables: dict[str, MemoryTable] = {name: MemoryTable() for name in tables}

    def table(self, name: str) -> MemoryTable:
        """Return a table named at open."""
        return self._tables[name]

    def batch(self, *, growth: int = 0) -> MemoryBatch:  # noqa: ARG002
        """Begin a batch; there is no reserve."""
        return MemoryBatch()

    def commit(self, batch: Batch) -> None:
        """Apply a batch, whole also if a signal handler raises in the middle of it."""
        assert isinstance(batch, MemoryBatch)
        try:
            self._apply(batch)
        except BaseException:
            for _ in range(_TRIES):
                with suppress(BaseException):
                    # Their keys may be in disorder, their dictionaries never.
                    for table in {change[0] for change in batch.changes}:
                        table.rows = SortedDict(dict(dict.items(table.rows)))
                    self._apply(batch)
                    break
            raise

    def _apply(self, batch: MemoryBatch) -> None:
        """Apply a batch; once more does no harm."""
        for table, key, value, end in batch.changes:
            if value is not None:
                table.rows[key] = value
            elif end is None:
                table.rows.pop(key, None)
            else:
                for doomed in list(table.rows.irange(key, end, inclusive=(True, False))):
                    del table.rows[doomed]

    def view(self) -> View:
        """Copy the present state."""
        copies = {name: table.copy() for name, table in self._tables.items()}
        return View(copies, copies.clear)


# --- over a database that takes no changes --------------------------------------------------------


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
        return self._scan(begin, end, limit, back=False)

    def scan_back(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), descending."""
        return self._scan(begin, end, limit, back=True)

    def _scan(
        self, begin: bytes, end: bytes, limit: int, *, back: bool
    ) -> Sequence[tuple[bytes, bytes]]:
        found: list[tuple[bytes, bytes]] = []
        while len(found) < limit and begin < end:
            wanted = limit - len(found)
            scan = self._below.scan_back if back else self._below.scan
            below = scan(begin, end, wanted)
            # This round merges as far as the rows below go; the next one begins there.
            first, last = begin, end
            if len(below) == wanted:
                first, last = (below[-1][0], end) if back else (begin, below[-1][0] + b"\0")
            keys = self.rows.irange(first, last, inclusive=(True, False), reverse=back)
            changed = ((key, self.rows[key]) for key in keys)
            latest = None
            # The change of a row comes before the row.
            for key, value in merge(changed, below, key=itemgetter(0), reverse=back):
                if len(found) == limit:
                    break
                if key != latest and value is not None:
                    found.append((key, value))
                latest = key
            begin, end = (begin, first) if back else (last, end)
        return found


class Overlay(MemoryEngine):
    """An engine over a database that does not change. Closing it closes the database."""

    def __init__(self, below: View, tables: Iterable[str]) -> None:
        self._below = below
        self._tables = {name: OverlayTable(below.table(name)) for name in tables}

    def _apply(self, batch: MemoryBatch) -> None:
        """Apply a batch, in memory."""
        for table, key, value, end in batch.changes:
            if end is None:
                table.rows[key] = value
                continue
            while found := table.scan(key, end, _PAGE):
                table.rows.update((doomed, None) for doomed, _ in found)

    def close(self) -> None:
        """Close the database below."""
        self._below.close()
