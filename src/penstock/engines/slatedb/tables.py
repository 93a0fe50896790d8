"""Rows of a SlateDB database, by table: what reads and batches look like, whoever the source is.

SlateDB has no column families: a table is one byte before the key. It has no deletes of ranges
either: a batch remembers them, and its commit reads their keys and deletes each.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from slatedb.uniffi import DurabilityLevel, Error, IterationOrder, KeyRange, ScanOptions

from penstock.engines import damaged
from penstock.engines.slatedb.binding import CallTimeout, call, call_all
from penstock.engines.slatedb.cache import UNKNOWN, ReadCache
from penstock.engines.slatedb.location import translate
from penstock.errors import StorageFailed, StoreDamaged
from penstock.limits import MAX_OBJECT_STORE_SILENCE_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence

    from slatedb.uniffi import DbIterator, KeyValue

    from penstock.engines.slatedb.location import Place

__all__ = ["SILENCE_S", "Rows", "SlateBatch", "SlateTable", "SlateView", "Source"]

T = TypeVar("T")

SILENCE_S: Final = MAX_OBJECT_STORE_SILENCE_MS / 1000
# From this many keys on, keys that lie close together are read by one scan.
_SCAN_FROM: Final = 4


class Source(Protocol):
    """What rows are read from: the database, a snapshot of it, a reader in another process."""

    def get(self, key: bytes) -> Coroutine[Any, Any, bytes | None]:
        """Read one value."""

    def scan_with_options(
        self,
        range: KeyRange,  # noqa: A002 - the binding's name
        options: ScanOptions,
    ) -> Coroutine[Any, Any, DbIterator]:
        """Begin to read a range."""


class Rows:
    """Reads of a source, whatever the table."""

    def __init__(self, source: Source, place: Place, check: Callable[[], None]) -> None:
        self._source: Source | None = source
        self._place = place
        self.check = check

    def close(self) -> None:
        """Let go of the source."""
        self._source = None

    @property
    def _open(self) -> Source:
        self.check()
        if self._source is None:
            raise StorageFailed(f"{self._place} was closed while it was being read")
        return self._source

    def get(self, key: bytes) -> bytes | None:
        """Read one value."""
        return self._run(self._open.get(key))

    def get_all(self, keys: list[bytes]) -> list[bytes | None]:
        """Read many values: by one scan if they lie close together."""
        source = self._open
        found: dict[bytes, bytes | None] = {}
        if len(keys) >= _SCAN_FROM and (bounds := _dense(keys)):
            limit = 2 * len(keys) + 16
            rows = self.scan(*bounds, limit)
            found.update(rows)
            read_up_to = rows[-1][0] if len(rows) == limit else bounds[1]
            found.update((key, found.get(key)) for key in keys if key <= read_up_to)
        left = [key for key in keys if key not in found]
        try:
            values = call_all([source.get(key) for key in left], SILENCE_S)
        except (Error, CallTimeout) as error:
            translate(error, self._place)
        # What was read counts only if the source was still good when it had been.
        self.check()
        found.update(zip(left, values, strict=True))
        return [found[key] for key in keys]

    def scan(
        self, begin: bytes, end: bytes, limit: int, order: IterationOrder | None = None
    ) -> list[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end)."""
        source = self._open
        if limit <= 0 or begin >= end:
            return []
        try:
            rows = self._run(_page(source, begin, end, limit, order, ahead=limit > 1))
        except StoreDamaged:
            # It may be beyond the rows that are wanted.
            rows = self._run(_page(source, begin, end, limit, order, ahead=False))
        return [(row.key, row.value) for row in rows]

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            result = call(work, SILENCE_S)
        except (Error, CallTimeout) as error:
            translate(error, self._place)
        self.check()
        return result


async def _page(
    source: Source,
    begin: bytes,
    end: bytes,
    limit: int,
    order: IterationOrder | None,
    *,
    ahead: bool,
) -> list[KeyValue]:
    keys = KeyRange(start=begin, start_inclusive=True, end=end, end_inclusive=False)
    options = ScanOptions(
        durability_filter=DurabilityLevel.MEMORY,
        dirty=False,
        read_ahead_bytes=1 << 20 if ahead else 1,
        cache_blocks=True,
        max_fetch_tasks=2 if ahead else 1,
        order=order,
    )
    rows = await source.scan_with_options(keys, options)
    page: list[KeyValue] = await rows.next_batch(limit)
    return page


def _dense(keys: list[bytes]) -> tuple[bytes, bytes] | None:
    """Return the range that holds the keys, if not many others can be in it."""
    first, last = min(keys), max(keys)
    if len(first) != len(last) or len(first) < 8 or first[:-8] != last[:-8]:
        return None
    span = int.from_bytes(last[-8:], "big") - int.from_bytes(first[-8:], "big")
    return (first, last + b"\0") if span < 2 * len(keys) + 16 else None


class SlateTable:
    """The rows that begin with one byte."""

    def __init__(self, rows: Rows, name: str, family: bytes, cache: ReadCache | None) -> None:
        self._rows = rows
        self._name = name
        self._cache = cache
        self.family: bytes = family

    def get(self, key: bytes) -> bytes | None:
        """Read one value."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[bytes]) -> list[bytes | None]:
        """Read many values, from memory if they were written of late."""
        family, cache = self.family, self._cache
        wanted = [family + key for key in keys]
        if cache is None:
            return self._get_all(wanted)
        self._rows.check()
        known = cache.get_all(wanted)
        if UNKNOWN not in known:
            return known  # type: ignore[return-value]
        commits = cache.commits
        missing = list(
            {key: None for key, value in zip(wanted, known, strict=True) if value is UNKNOWN}
        )
        found = dict(zip(missing, self._get_all(missing), strict=True))
        cache.put_read(found.items(), commits)
        return [
            found[key] if value is UNKNOWN else value  # type: ignore[misc]
            for key, value in zip(wanted, known, strict=True)
        ]

    def scan(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), ascending."""
        with self._naming(begin, end):
            rows = self._rows.scan(self.family + begin, self.family + end, limit)
        return [(key[1:], value) for key, value in rows]

    def scan_back(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), descending."""
        with self._naming(begin, end):
            rows = self._rows.scan(
                self.family + begin, self.family + end, limit, IterationOrder.DESCENDING
            )
        return [(key[1:], value) for key, value in rows]

    def _get_all(self, keys: list[bytes]) -> list[bytes | None]:
        with self._naming(min(keys, default=b"")[1:], max(keys, default=b"")[1:] + b"\0"):
            return self._rows.get_all(keys)

    @contextlib.contextmanager
    def _naming(self, begin: bytes, end: bytes) -> Iterator[None]:
        """Name the table and keys that were read in an error of reading."""
        try:
            yield
        except StoreDamaged as error:
            raise damaged(self._name, begin, end, str(error)) from error


class SlateBatch:
    """Changes by key: the last of a key counts. Ranges are read when the batch commits."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes | None] = {}
        self.ranges: list[tuple[bytes, bytes]] = []
        self._count = 0

    def put(self, key: bytes, value: bytes, family: bytes, /) -> None:
        """Set a value."""
        self.rows[family + key] = value
        self._count += 1

    def delete(self, key: bytes, family: bytes, /) -> None:
        """Remove a key, if it is there."""
        self.rows[family + key] = None
        self._count += 1

    def delete_range(self, begin: bytes, end: bytes, family: bytes, /) -> None:
        """Remove every key of [begin, end)."""
        begin, end = family + begin, family + end
        for key in self.rows:
            if begin <= key < end:
                self.rows[key] = None
        self.ranges.append((begin, end))
        self._count += 1

    def __len__(self) -> int:
        return self._count


class SlateView:
    """All tables as they were at one moment: a snapshot of the library."""

    def __init__(
        self, source: Source, place: Place, families: Mapping[str, bytes], check: Callable[[], None]
    ) -> None:
        self._rows = Rows(source, place, check)
        self._tables = {
            name: SlateTable(self._rows, name, family, None) for name, family in families.items()
        }

    def table(self, name: str) -> SlateTable:
        """Return a table as it was."""
        return self._tables[name]

    def close(self) -> None:
        """Let go of the snapshot."""
        self._rows.close()
