"""Rows of a SlateDB database, by table: reads, batches, and the cache of recent rows.

SlateDB has no column families: a table is one byte before the key. It has no deletes of ranges
either: a batch remembers them, and its commit reads their keys and deletes each.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import msgspec
from slatedb.uniffi import DurabilityLevel, Error, IterationOrder, KeyRange, ScanOptions

from penstock.engines import damage_error
from penstock.engines.slatedb.binding import CallTimeout, call_all, translate
from penstock.errors import StorageFailed, StoreDamaged, StoreMismatch
from penstock.limits import MAX_OBJECT_STORE_SILENCE_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence

    from slatedb.uniffi import Db, DbReader, DbSnapshot, KeyValue

    from penstock.engines.slatedb.binding import SlateLocation

T = TypeVar("T")
RowSource: TypeAlias = "Db | DbSnapshot | DbReader"

SILENCE_S: Final = MAX_OBJECT_STORE_SILENCE_MS / 1000
LAYOUT_KEY: Final = b"\0layout"
LAYOUT: Final = 1
BEAT_KEY: Final = b"\0beat"
# The value of the last beat, by an owner that closes the database.
CLOSED: Final = b"\0"
# From this many keys on, keys that lie close together are read by one scan.
_SCAN_FROM: Final = 4
# The cost of an entry of the cache beside its bytes.
_ENTRY_BYTES: Final = 120


class Rows:
    """Reads of a source, whatever the table. ``check`` raises once the source is of no more use."""

    def __init__(
        self, source: RowSource, location: SlateLocation, check: Callable[[], None]
    ) -> None:
        self._source: RowSource | None = source
        self._location = location
        self.check = check

    def close(self) -> None:
        """Drop the source."""
        self._source = None

    @property
    def _open(self) -> RowSource:
        self.check()
        if self._source is None:
            raise StorageFailed(f"{self._location} was closed while it was being read")
        return self._source

    def get(self, key: bytes) -> bytes | None:
        """Read one value."""
        return self.get_all([key])[0]

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
        values = self._run([source.get(key) for key in left])
        found.update(zip(left, values, strict=True))
        return [found[key] for key in keys]

    def scan(
        self, begin: bytes, end: bytes, limit: int, order: IterationOrder | None = None
    ) -> list[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end)."""
        source = self._open
        if limit <= 0 or begin >= end:
            return []
        keys = KeyRange(start=begin, start_inclusive=True, end=end, end_inclusive=False)

        async def read_page(*, ahead: bool) -> list[KeyValue]:
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

        try:
            rows = self._run([read_page(ahead=limit > 1)])[0]
        except StoreDamaged:
            # It may be beyond the wanted rows.
            rows = self._run([read_page(ahead=False)])[0]
        return [(row.key, row.value) for row in rows]

    def _run(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        try:
            results = call_all(work, SILENCE_S)
        except (Error, CallTimeout) as error:
            translate(error, self._location)
        # Rows count only if the source was still good after they were read.
        self.check()
        return results


def _dense(keys: list[bytes]) -> tuple[bytes, bytes] | None:
    """Return the range that holds the keys, if not many others can be in it."""
    first, last = min(keys), max(keys)
    if len(first) != len(last) or len(first) < 8 or first[:-8] != last[:-8]:
        return None
    span = int.from_bytes(last[-8:], "big") - int.from_bytes(first[-8:], "big")
    return (first, last + b"\0") if span < 2 * len(keys) + 16 else None


def families_of(rows: Rows, location: SlateLocation) -> dict[str, bytes]:
    """Read which tables a database has, and their bytes; none if it is empty."""
    record = rows.get(LAYOUT_KEY)
    if record is None:
        if rows.scan(b"\0", b"\xff" * 8, 1):
            raise StoreMismatch(f"{location} holds a SlateDB database that is not a Penstock store")
        return {}
    return read_layout(record, location)


def read_layout(record: bytes, location: SlateLocation) -> dict[str, bytes]:
    """Decode which tables a database has, and their bytes."""
    try:
        version, names = msgspec.msgpack.decode(record, type=tuple[int, list[str]])
    except (msgspec.MsgspecError, ValueError) as error:
        raise StoreMismatch(
            f"{location}: the list of its tables does not decode: {error}"
        ) from error
    if version > LAYOUT:
        raise StoreMismatch(
            f"{location} has layout {version}; this version of Penstock reads up to {LAYOUT}: "
            "use a newer one"
        )
    return {name: bytes([at]) for at, name in enumerate(names, 1)}


# The answer of the cache for a key that it does not know.
UNKNOWN: Final[Any] = object()


class ReadCache:
    """Recently written or read values by key, bounded in bytes; the longest unwritten go first.

    A call into the library costs tens of microseconds, and a round trip to the object store if the
    library has not cached the block. The process that writes a message also reads it, within
    moments: its payload and its lease are found here.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._values: dict[bytes, bytes | None] = {}
        self._lock = threading.Lock()
        # Another thread may read while one commits: the rows that it reads may be old by then.
        self.commits = 0

    def get_all(self, keys: Sequence[bytes]) -> list[Any]:
        """Look keys up: the value, None for a key known to be absent, or UNKNOWN."""
        known = self._values
        return [known.get(key, UNKNOWN) for key in keys]

    def begin(self) -> None:
        """Note that a commit begins: rows read before it ends must not be cached."""
        with self._lock:
            self.commits += 1

    def put(self, rows: Iterable[tuple[bytes, bytes | None]], commits: int | None = None) -> None:
        """Cache committed rows; None for a key that was deleted.

        Or rows that were read when the number of commits was ``commits``, if it still is.
        """
        with self._lock:
            if commits is None:
                self.commits += 1
            elif commits != self.commits:
                return
            for key, value in rows:
                self._forget(key)
                size = len(key) + _ENTRY_BYTES + len(value or b"")
                if size <= self._max_bytes // 8:
                    self._values[key] = value
                    self._bytes += size
            while self._bytes > self._max_bytes:
                self._forget(next(iter(self._values)))

    def clear(self) -> None:
        """Forget everything: which of the rows hold is unknown."""
        with self._lock:
            self.commits += 1
            self._values.clear()
            self._bytes = 0

    def _forget(self, key: bytes) -> None:
        value = self._values.get(key, UNKNOWN)
        if value is not UNKNOWN:
            # No step between the two at which a signal handler could raise.
            self._bytes -= len(key) + _ENTRY_BYTES + len(value or b"")
            del self._values[key]


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
        """Read many values, from the cache if it has them."""
        family, cache = self.family, self._cache
        wanted = [family + key for key in keys]
        if cache is None:
            return self._get_all(wanted)
        self._rows.check()
        known = cache.get_all(wanted)
        if UNKNOWN not in known:
            return known
        commits = cache.commits
        pairs = list(zip(wanted, known, strict=True))
        missing = list({key: None for key, value in pairs if value is UNKNOWN})
        found = dict(zip(missing, self._get_all(missing), strict=True))
        cache.put(found.items(), commits)
        return [found[key] if value is UNKNOWN else value for key, value in pairs]

    def scan(
        self, begin: bytes, end: bytes, limit: int, order: IterationOrder | None = None
    ) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), ascending."""
        with self._naming(begin, end):
            rows = self._rows.scan(self.family + begin, self.family + end, limit, order)
        return [(key[1:], value) for key, value in rows]

    def scan_back(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), descending."""
        return self.scan(begin, end, limit, IterationOrder.DESCENDING)

    def _get_all(self, keys: list[bytes]) -> list[bytes | None]:
        with self._naming(min(keys, default=b"")[1:], max(keys, default=b"")[1:] + b"\0"):
            return self._rows.get_all(keys)

    @contextlib.contextmanager
    def _naming(self, begin: bytes, end: bytes) -> Iterator[None]:
        """Name the table and keys in an error of reading."""
        try:
            yield
        except StoreDamaged as error:
            raise damage_error(self._name, begin, end, str(error.__cause__ or error)) from error


class SlateBatch:
    """Changes by key: the last of a key counts. Ranges are read when the batch commits."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes | None] = {}
        self.ranges: list[tuple[bytes, bytes]] = []

    def put(self, key: bytes, value: bytes, family: bytes, /) -> None:
        """Set a value."""
        self.rows[family + key] = value

    def delete(self, key: bytes, family: bytes, /) -> None:
        """Remove a key, if it is there."""
        self.rows[family + key] = None

    def delete_range(self, begin: bytes, end: bytes, family: bytes, /) -> None:
        """Remove every key of [begin, end)."""
        begin, end = family + begin, family + end
        for key in self.rows:
            if begin <= key < end:
                self.rows[key] = None
        self.ranges.append((begin, end))

    def __len__(self) -> int:
        return len(self.rows) + len(self.ranges)


def make_tables(rows: Rows, families: Mapping[str, bytes]) -> dict[str, SlateTable]:
    """Make the tables of a source that does not change, such as a snapshot of the library."""
    return {name: SlateTable(rows, name, family, None) for name, family in families.items()}
