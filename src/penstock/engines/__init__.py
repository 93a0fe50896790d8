"""Ordered bytes with atomic commit. Engines know nothing of queues.

An engine holds named *tables* (column families) of sorted keys. Reads see every committed batch;
a :class:`Batch` commits whole or not at all; ``sync`` makes everything committed before it
durable. One process owns an engine, and the layer above lets one thread at a time commit.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakSet

from penstock.errors import InvalidInput, StorageFailed, StoreDamaged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from penstock.errors import PenstockError

# Names a table to a batch. The RocksDB engine hands out the library's own handles and batches, so
# that a put costs one call and no wrapper; hence an opaque type.
Family = Any
# Objects that hold parts of libraries with threads; the names of these; of those of the parent.
_open: Final[WeakSet[object]] = WeakSet()
_used: Final[set[str]] = set()
_left: Final[set[str]] = set()
# So many letters in a row are a name, fewer are chance.
_READABLE = 4


def enter_library(name: str) -> None:
    """Note that this process uses a library with threads; raise in a fork, which lacks them."""
    if name in _left:
        raise StorageFailed(
            f"{name} can't be used in a fork() of a process that has used it, since its threads "
            "are the parent's: connect to a server, or start the process with 'spawn'"
        )
    _used.add(name)


def keep_in_forks(holder: object) -> None:
    """Let forks of this process never let go of an object that has parts of a library.

    Those parts wait, when they go, for threads of the library.
    """
    _open.add(holder)


def _leave_to_parent() -> None:
    _left.update(_used)
    if not _used:
        return
    # Loaded when it is wanted.
    import ctypes  # noqa: PLC0415

    for each in _open:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    # RocksDB joins its threads when a process ends in order. So the last thing before that, which
    # is the first to be called, writes what C has in its buffers, and ends the process.
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        libc.on_exit(libc._exit, None)  # noqa: SLF001 - a function of C
        libc.on_exit(libc.fcloseall, None)


os.register_at_fork(after_in_child=_leave_to_parent)


class Shape(Enum):
    """How a table is used, which decides its options."""

    SYSTEM = "a few small records"
    VALUES = "larger values, point reads, written once or twice"
    SHORT_LIVED = "small values that come and go, point reads"
    TIME_INDEX = "tiny values in key order, scanned forward to a bound, deleted at the head"
    APPEND = "written at the end, read in ranges, dropped in ranges"


class Batch(Protocol):
    """Changes that commit together. ``delete_range`` is half open: begin in, end out."""

    def put(self, key: bytes, value: bytes, family: Family, /) -> None:
        """Set a value."""

    def delete(self, key: bytes, family: Family, /) -> None:
        """Remove a key, if it is there."""

    def delete_range(self, begin: bytes, end: bytes, family: Family, /) -> None:
        """Remove every key of [begin, end)."""

    def __len__(self) -> int: ...


class Table(Protocol):
    """One sorted key space.

    ``family`` names it to a batch. Read it anew for each call: a handle that outlives the engine
    would keep the database open.
    """

    family: Family

    def get(self, key: bytes) -> bytes | None:
        """Read one value."""

    def multi_get(self, keys: list[bytes]) -> list[bytes | None]:
        """Read many values in one call, in the order asked."""

    def scan(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), ascending."""

    def scan_back(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), descending."""


class View:
    """All tables as they were at one moment. Reading it blocks nobody; close it soon.

    ``close`` drops the files that it pins. One thread at a time may use a view.
    """

    def __init__(self, tables: Mapping[str, Table], close: Callable[[], None]) -> None:
        self.tables = tables
        self.close = close
        keep_in_forks(self)

    def table(self, name: str) -> Table:
        """Return a table as it was."""
        return self.tables[name]


class Engine(ABC):
    """An open database. An engine overrides what it has beyond the abstract methods.

    ``durable_on_commit``: a commit is as durable as it ever gets, without ``sync``. ``away``: why
    the engine takes no writes at present; any thread may ask, without I/O.
    """

    durable_on_commit: bool
    away: PenstockError | None = None

    @abstractmethod
    def table(self, name: str) -> Table:
        """Return a table named at open."""

    def recover(self, alone: AbstractContextManager[None], load: Callable[[], None]) -> None:  # noqa: B027
        """Make an engine that is away take writes again, or raise why it does not.

        It enters ``alone`` for as long as no other thread may use it. Changes that were not durable
        may be gone then: it calls ``load``, with which the caller rebuilds its memory.
        """

    def free_bytes(self) -> int | None:
        """Return how many bytes its disk has left; None if that is unknown."""
        return None

    def used_bytes(self) -> dict[str, int]:
        """Return the bytes on disk of each table, and as ``wal`` of the log; empty if unknown."""
        return {}

    @abstractmethod
    def batch(self, *, growth: int = 0) -> Batch:
        """Begin a batch; raise if the engine is away, before anything has been changed.

        ``growth``: the bytes of new messages. The engine refuses a batch with DiskFull if those
        would leave less than the reserve, which is for batches without new messages.
        """

    @abstractmethod
    def commit(self, batch: Batch) -> None:
        """Apply a batch whole, visible to reads at once, durable after the next ``sync``.

        If it raises, nothing was applied.
        """

    @abstractmethod
    def view(self) -> View:
        """Pin the present state for reading. Call it while nobody commits."""

    def sync(self) -> None:  # noqa: B027
        """Make everything committed before this call durable. May be called from any thread."""

    def checkpoint(self, path: Path) -> None:
        """Copy the present state into a new directory, ready to be opened.

        Hard links share files that do not change, where the file system can.
        """
        raise InvalidInput(f"a store in memory can't be copied to {path}")

    def on_lost(self, told: Callable[[PenstockError], None]) -> None:  # noqa: B027
        """Call back, once and from a thread of its own, if the database is lost to this process.

        Another process may have taken it over, or it can't be written any more.
        """

    def close(self) -> None:  # noqa: B027
        """Sync and close the database."""


def rows_of(
    table: Table, begin: bytes, end: bytes, *, page: int = 1000
) -> Iterator[tuple[bytes, bytes]]:
    """Read every pair of [begin, end), a page at a time."""
    while rows := table.scan(begin, end, page):
        yield from rows
        if len(rows) < page:
            return
        begin = rows[-1][0] + b"\0"


def get_each(table: Table, keys: list[bytes]) -> Sequence[bytes | StoreDamaged | None]:
    """Read many values; for an unreadable one, return the error."""
    try:
        return table.multi_get(keys)
    except StoreDamaged:
        return [_get(table, key) for key in keys]


def _get(table: Table, key: bytes) -> bytes | StoreDamaged | None:
    try:
        return table.get(key)
    except StoreDamaged as error:
        return error


def scan_readable(
    table: Table, begin: bytes, end: bytes, limit: int
) -> tuple[Sequence[tuple[bytes, bytes]], StoreDamaged | None]:
    """Read up to ``limit`` readable pairs of [begin, end); return why no more could be read."""
    found: list[tuple[bytes, bytes]] = []
    try:
        return table.scan(begin, end, limit), None
    except StoreDamaged:
        pass
    try:
        # One at a time: no step goes beyond the readable pairs.
        while len(found) < limit and (rows := table.scan(begin, end, 1)):
            found += rows
            begin = rows[0][0] + b"\0"
    except StoreDamaged as error:
        return found, error
    return found, None


def damage_error(table: str, begin: bytes, end: bytes, why: str) -> StoreDamaged:
    """Make the error of an unreadable range of keys: part of [begin, end), or all of it."""
    text = damage_text(describe_range(table, begin, end, why))
    return StoreDamaged(text, table=table, begin=begin, end=end)


def describe_range(table: str, begin: bytes, end: bytes, why: str) -> str:
    """Describe an unreadable range of keys to an operator."""
    return f"table {table!r} can't be read between {_show_key(begin)} and {_show_key(end)}: {why}"


def damage_text(why: str) -> str:
    """Say what damage means to a user and what to do; the engine's own words come last."""
    return (
        "a part of the store can't be read, because its files are damaged; nothing was changed. "
        "'penstock check' shows how much it is; restore a backup, or bring what can be read into a "
        f"new store with 'penstock salvage' ({why})"
    )


def _show_key(key: bytes) -> str:
    """Show a key to an operator: in hex, and as text if there is any in it."""
    text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in key)
    readable = max(map(len, text.split("."))) >= _READABLE
    return f"{key.hex() or 'the first key'}{f' ({text})' if readable else ''}"
