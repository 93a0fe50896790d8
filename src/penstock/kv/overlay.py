"""Changes on top of an engine that takes none: they stay in memory and go with the overlay.

A store moves records as time goes by, also while it is only being read: what was delayed becomes
available. On an overlay it can do so without writing to the database below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from penstock.errors import InvalidInput
from penstock.kv.memory import MemoryEngine, MemoryTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from penstock.errors import PenstockError
    from penstock.kv import Batch, Table

__all__ = ["Overlay"]

# A value of the overlay begins with one of these.
_GONE = b"\0"
_KEPT = b"\1"


class _Below(Protocol):
    def table(self, name: str) -> Table: ...

    def close(self) -> None: ...


class OverlayTable:
    """A table below, with changes over it. It is its own family handle."""

    def __init__(self, below: Table, above: MemoryTable) -> None:
        self.family: OverlayTable = self
        self._below = below
        self.above = above

    def get(self, key: bytes) -> bytes | None:
        """Read one value."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[bytes]) -> list[bytes | None]:
        """Read many values."""
        changed = dict(zip(keys, self.above.multi_get(keys), strict=True))
        left = [key for key, value in changed.items() if value is None]
        below = dict(zip(left, self._below.multi_get(left), strict=True)) if left else {}
        return [below[key] if (value := changed[key]) is None else _value(value) for key in keys]

    def scan(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), ascending."""
        changed = dict(self.above.scan(begin, end, len(self.above.rows)))
        # So many at most are covered by changes.
        rows = self._below.scan(begin, end, limit + len(changed)) if limit > 0 else ()
        return _merged(rows, changed)[:limit]

    def scan_back(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), descending."""
        changed = dict(self.above.scan(begin, end, len(self.above.rows)))
        rows = self._below.scan_back(begin, end, limit + len(changed)) if limit > 0 else ()
        return _merged(rows, changed)[::-1][:limit]


def _value(changed: bytes) -> bytes | None:
    return None if changed == _GONE else changed[1:]


def _merged(
    rows: Iterable[tuple[bytes, bytes]], changed: Mapping[bytes, bytes]
) -> list[tuple[bytes, bytes]]:
    both = {**dict(rows), **{key: _value(value) for key, value in changed.items()}}
    return [(key, value) for key, value in sorted(both.items()) if value is not None]


class OverlayBatch:
    """Changes in the order they were made."""

    def __init__(self) -> None:
        self.changes: list[tuple[OverlayTable, bytes, bytes | None, bytes | None]] = []

    def put(self, key: bytes, value: bytes, family: OverlayTable, /) -> None:
        """Set a value."""
        self.changes.append((family, key, value, None))

    def delete(self, key: bytes, family: OverlayTable, /) -> None:
        """Remove a key, if it is there."""
        self.changes.append((family, key, None, None))

    def delete_range(self, begin: bytes, end: bytes, family: OverlayTable, /) -> None:
        """Remove every key of [begin, end)."""
        self.changes.append((family, begin, None, end))

    def __len__(self) -> int:
        return len(self.changes)


class OverlayView:
    """All tables as they were: the changes are copied, what is below does not change."""

    def __init__(self, tables: Mapping[str, OverlayTable]) -> None:
        self._tables = {
            name: OverlayTable(table._below, MemoryTable(table.above.rows.copy()))  # noqa: SLF001
            for name, table in tables.items()
        }

    def table(self, name: str) -> OverlayTable:
        """Return a table as it was."""
        return self._tables[name]

    def close(self) -> None:
        """Drop the copies."""
        self._tables.clear()


class Overlay:
    """An engine over tables that do not change while it is there. Closing it closes them."""

    def __init__(self, below: _Below, tables: Iterable[str]) -> None:
        self._below = below
        above = MemoryEngine(tables)
        self._tables = {name: OverlayTable(below.table(name), above.table(name)) for name in tables}

    def table(self, name: str) -> OverlayTable:
        """Return a table named at open."""
        return self._tables[name]

    def batch(self) -> OverlayBatch:
        """Begin a batch."""
        return OverlayBatch()

    def commit(self, batch: Batch) -> None:
        """Apply a batch, in memory."""
        assert isinstance(batch, OverlayBatch)
        for table, key, value, end in batch.changes:
            if end is None:
                table.above.rows[key] = _GONE if value is None else _KEPT + value
                continue
            while rows := table.scan(key, end, 1_000):
                for doomed, _ in rows:
                    table.above.rows[doomed] = _GONE

    def view(self) -> OverlayView:
        """Copy the changes."""
        return OverlayView(self._tables)

    def sync(self) -> None:
        """Do nothing: nothing is kept."""

    def checkpoint(self, path: Path) -> None:
        """Refuse: this is for reading."""
        raise InvalidInput(f"a store that is open for reading only can't be copied to {path}")

    def on_lost(self, told: Callable[[PenstockError], None]) -> None:
        """Do nothing: reading does not depend on who owns the database."""

    def close(self) -> None:
        """Close what is below."""
        self._below.close()
