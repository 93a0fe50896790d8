"""Changes on top of an engine that takes none: they stay in memory and go with the overlay.

A store moves records as time goes by, also while it is only being read: what was delayed becomes
available. On an overlay it can do so without writing to the database below.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Protocol, TypeAlias

from penstock.errors import InvalidInput
from penstock.kv.memory import MemoryEngine, MemoryTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from penstock.errors import PenstockError
    from penstock.kv import Batch, Table

__all__ = ["Below", "Changes", "Overlay", "OverlayView"]

Changes: TypeAlias = "dict[bytes, bytes | None]"
"""Rows by key; None for one that is gone."""

# A value of the overlay begins with one of these.
_GONE = b"\0"
_KEPT = b"\1"


class Below(Protocol):
    """Tables that do not change."""

    def table(self, name: str) -> Table:
        """Return a table."""

    def close(self) -> None:
        """Let go of them."""


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
        found: list[tuple[bytes, bytes]] = []
        while len(found) < limit and begin < end:
            wanted = limit - len(found)
            rows = self._below.scan(begin, end, wanted)
            # Rows below end here for now: changes beyond are for the next round.
            until = rows[-1][0] + b"\0" if len(rows) == wanted else end
            keys = self.above.rows.irange(begin, until, inclusive=(True, False))
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
            keys = self.above.rows.irange(until, end, inclusive=(True, False), reverse=True)
            found += islice(self._merged(rows, keys, back=True), wanted)
            end = until
        return found

    def _merged(
        self, rows: Sequence[tuple[bytes, bytes]], keys: Iterator[bytes], *, back: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Put changes over rows, both in the same order; a change to a row takes its place."""
        changes = self.above.rows
        key = next(keys, None)
        for row in rows:
            while key is not None and (key > row[0] if back else key < row[0]):
                value = _value(changes[key])
                if value is not None:
                    yield key, value
                key = next(keys, None)
            if key != row[0]:
                yield row
        while key is not None:
            value = _value(changes[key])
            if value is not None:
                yield key, value
            key = next(keys, None)


def _value(changed: bytes) -> bytes | None:
    return None if changed == _GONE else changed[1:]


def _mark(value: bytes | None) -> bytes:
    return _GONE if value is None else _KEPT + value


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

    def changes(self, name: str, begin: bytes = b"", end: bytes | None = None) -> Changes:
        """Return the changes to keys of [begin, end) of a table; None for a row that is gone."""
        rows = self._tables[name].above.rows
        keys = rows.irange(begin, end, inclusive=(True, False))
        return {key: _value(rows[key]) for key in keys}

    def changed_before(self, name: str, begin: bytes, end: bytes) -> bytes | None:
        """Return the last key of [begin, end) of a table that was changed and is there."""
        rows = self._tables[name].above.rows
        keys = rows.irange(begin, end, inclusive=(True, False), reverse=True)
        return next((key for key in keys if rows[key] != _GONE), None)

    def close(self) -> None:
        """Drop the copies."""
        self._tables.clear()


class Overlay:
    """An engine over tables that do not change while it is there. Closing it closes them.

    ``changes`` are there from the beginning, by table and key; None for a row that is gone.
    """

    def __init__(
        self,
        below: Below,
        tables: Iterable[str],
        changes: Mapping[str, Mapping[bytes, bytes | None]] | None = None,
    ) -> None:
        self._below = below
        above = MemoryEngine(tables)
        self._tables = {name: OverlayTable(below.table(name), above.table(name)) for name in tables}
        for name, rows in (changes or {}).items():
            if name in self._tables:
                above.table(name).rows.update((key, _mark(rows[key])) for key in rows)

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
                table.above.rows[key] = _mark(value)
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
