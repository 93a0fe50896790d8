"""The in-memory engine: sorted dictionaries. Real code, for tests of ours and of users."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from sortedcontainers import SortedDict

from penstock.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from penstock.engines import Batch
    from penstock.errors import PenstockError


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


class MemoryView:
    """Copies of all tables."""

    def __init__(self, tables: Mapping[str, MemoryTable]) -> None:
        self._tables = {name: table.copy() for name, table in tables.items()}

    def table(self, name: str) -> MemoryTable:
        """Return a table as it was."""
        return self._tables[name]

    def close(self) -> None:
        """Drop the copies."""
        self._tables.clear()


class MemoryEngine:
    """Tables that live as long as the object: reopening a store on it finds everything."""

    away: None = None
    durable_on_commit = True

    def __init__(self, tables: Iterable[str]) -> None:
        self._tables: dict[str, MemoryTable] = {name: MemoryTable() for name in tables}

    def table(self, name: str) -> MemoryTable:
        """Return a table named at open."""
        return self._tables[name]

    def recover(self, alone: AbstractContextManager[None], load: Callable[[], None]) -> None:
        """Do nothing: memory always takes writes."""

    def free_bytes(self) -> None:
        """Return None: there is no disk."""

    def batch(self, *, growth: int = 0) -> MemoryBatch:  # noqa: ARG002
        """Begin a batch; there is no reserve."""
        return MemoryBatch()

    def commit(self, batch: Batch) -> None:
        """Apply a batch."""
        assert isinstance(batch, MemoryBatch)
        for table, key, value, end in batch.changes:
            if value is not None:
                table.rows[key] = value
            elif end is None:
                table.rows.pop(key, None)
            else:
                for doomed in list(table.rows.irange(key, end, inclusive=(True, False))):
                    del table.rows[doomed]

    def view(self) -> MemoryView:
        """Copy the present state."""
        return MemoryView(self._tables)

    def sync(self) -> None:
        """Do nothing: memory is as durable as it gets."""

    def checkpoint(self, path: Path) -> None:
        """Refuse: what is in memory alone has no files."""
        raise InvalidInput(f"a store in memory can't be copied to {path}")

    def on_lost(self, told: Callable[[PenstockError], None]) -> None:
        """Do nothing: nobody else can take it over."""

    def close(self) -> None:
        """Do nothing: the tables stay for a reopening."""
