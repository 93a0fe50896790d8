"""Changes on top of an engine that takes none: they stay in memory and go with the overlay.

A store moves records as time goes by, also while it is only being read: what was delayed becomes
available. On an overlay it can do so without writing to the database below.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from sortedcontainers import SortedDict

from penstock.engines import NeverAway
from penstock.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from penstock.engines import Batch, Table
    from penstock.errors import PenstockError

__all__ = ["MISSING", "Below", "Changes", "Overlay", "OverlayTable", "OverlayView"]

Changes: TypeAlias = "dict[bytes, bytes | None]"
"""Rows by key; None for one that is gone."""

MISSING: Final[Any] = object()
"""For a key that nobody has changed."""


class Below(Protocol):
    """Tables that do not change."""

    def table(self, name: str) -> Table:
        """Return a table."""

    def close(self) -> None:
        """Let go of them."""


class OverlayTable:
    """A table below, with changes over it. It is its own family handle."""

    def __init__(self, below: Table, above: Any) -> None:
        self.family: OverlayTable = self
        self._below = below
        self.above = above

    def get(self, key: bytes) -> bytes | None:
        """Read one value."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[bytes]) -> list[bytes | None]:
        """Read many values."""
        found = {key: self.above.get(key, MISSING) for key in keys}
        left = [key for key, value in found.items() if value is MISSING]
        if left:
            found.update(zip(left, self._below.multi_get(left), strict=True))
        return [found[key] for key in keys]

    def changes(self, begin: bytes = b"", end: bytes | None = None) -> Changes:
        """Return the changes to keys of [begin, end); of an overlay over another, of both."""
        below = self._below
        found = below.changes(begin, end) if isinstance(below, OverlayTable) else {}
        keys = self.above.irange(begin, end, inclusive=(True, False))
        found.update((key, self.above[key]) for key in keys)
        return found

    def changed_before(self, begin: bytes, end: bytes) -> bytes | None:
        """Return the last key of [begin, end) that was changed and is there."""
        keys = self.above.irange(begin, end, inclusive=(True, False), reverse=True)
        last: bytes | None = next((key for key in keys if self.above[key] is not None), None)
        if isinstance(self._below, OverlayTable):
            other = self._below.changed_before(begin, end)
            while other is not None and self.above.get(other, MISSING) is None:
                other = self._below.changed_before(begin, other)
            last = max(filter(None, (last, other)), default=None)
        return last

    def copy(self) -> OverlayTable:
        """Return the table as it is now: the changes are copied, what is below does not change."""
        return OverlayTable(self._below, self.above.copy())

    def scan(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), ascending."""
        found: list[tuple[bytes, bytes]] = []
        while len(found) < limit and begin < end:
            wanted = limit - len(found)
            rows = self._below.scan(begin, end, wanted)
            # Rows below end here for now: changes beyond are for the next round.
            until = rows[-1][0] + b"\0" if len(rows) == wanted else end
            keys = self.above.irange(begin, until, inclusive=(True, False))
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
            keys = self.above.irange(until, end, inclusive=(True, False), reverse=True)
            found += islice(self._merged(rows, keys, back=True), wanted)
            end = until
        return found

    def _merged(
        self, rows: Sequence[tuple[bytes, bytes]], keys: Iterator[bytes], *, back: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Put changes over rows, both in the same order; a change to a row takes its place."""
        changes = self.above
        key = next(keys, None)
        for row in rows:
            while key is not None and (key > row[0] if back else key < row[0]):
                value = changes[key]
                if value is not None:
                    yield key, value
                key = next(keys, None)
            if key != row[0]:
                yield row
        while key is not None:
            value = changes[key]
            if value is not None:
                yield key, value
            key = next(keys, None)


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
    """All tables as they were."""

    def __init__(self, tables: Mapping[str, OverlayTable]) -> None:
        self._tables = {name: table.copy() for name, table in tables.items()}

    def table(self, name: str) -> OverlayTable:
        """Return a table as it was."""
        return self._tables[name]

    def close(self) -> None:
        """Drop the copies."""
        self._tables.clear()


class Overlay(NeverAway):
    """An engine over tables that do not change while it is there. Closing it closes them.

    ``changes`` are there from the beginning, by table and key; None for a row that is gone. Those
    of a table that are a SortedDict are not copied.
    """

    def __init__(
        self,
        below: Below,
        tables: Iterable[str],
        changes: Mapping[str, Mapping[bytes, bytes | None]] | None = None,
    ) -> None:
        self._below = below
        self._tables = {}
        for name in tables:
            rows = (changes or {}).get(name, {})
            above = rows if isinstance(rows, SortedDict) else SortedDict(rows)
            self._tables[name] = OverlayTable(below.table(name), above)

    def table(self, name: str) -> OverlayTable:
        """Return a table named at open."""
        return self._tables[name]

    def batch(self, *, growth: int = 0) -> OverlayBatch:  # noqa: ARG002
        """Begin a batch; there is no reserve."""
        return OverlayBatch()

    def commit(self, batch: Batch) -> None:
        """Apply a batch, in memory."""
        assert isinstance(batch, OverlayBatch)
        for table, key, value, end in batch.changes:
            if end is None:
                table.above[key] = value
                continue
            while rows := table.scan(key, end, 1_000):
                for doomed, _ in rows:
                    table.above[doomed] = None

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
