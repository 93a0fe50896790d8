# ruff: noqa: FBT003 - rocksdict's setters take their one flag by position
"""The RocksDB engine, through rocksdict.

One column family per table, each tuned for how it is used (:class:`Shape`). Commits go to the
write-ahead log without fsync; :meth:`RocksEngine.sync` flushes the log for everyone at once.
``flush_wal`` is the one call of the binding that lets other threads run while the disk works, so
group commit is built on it and nothing else waits for the disk.
"""

from __future__ import annotations

import contextlib
import os
import socket
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import rocksdict as rocks

from penstock.errors import DiskFull, StorageFailed, StoreLocked, StoreMismatch
from penstock.kv import Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from penstock.errors import PenstockError
    from penstock.kv import Batch

__all__ = ["RocksEngine", "tables_at"]

_OWNER_FILE = "PENSTOCK-OWNER"
# What RocksDB says of a directory that is open already, here or in another process.
_LOCKED = ("lock hold by current process", "While lock file")
# What the operating system says when there is no room, as RocksDB passes it on.
_NO_SPACE = ("No space left", "File too large", "Disk quota exceeded")


class _Owner(msgspec.Struct):
    pid: int
    host: str


def _block(size_kib: int, cache: rocks.Cache, *, bloom: bool) -> rocks.BlockBasedOptions:
    block = rocks.BlockBasedOptions()
    block.set_block_size(size_kib * 1024)
    block.set_block_cache(cache)
    # Without this, index and filter blocks stay in memory for every open file, so memory would
    # grow with the depth of the queues.
    block.set_cache_index_and_filter_blocks(True)
    block.set_pin_l0_filter_and_index_blocks_in_cache(True)
    if bloom:
        block.set_bloom_filter(10, False)
    return block


def _family_options(shape: Shape, cache: rocks.Cache) -> rocks.Options:
    options = rocks.Options(raw_mode=True)
    options.set_write_buffer_size(16 << 20)
    options.set_level_compaction_dynamic_level_bytes(True)
    options.set_compression_type(rocks.DBCompressionType.none())
    if shape is Shape.VALUES:
        options.set_block_based_table_factory(_block(32, cache, bloom=True))
        options.set_bottommost_compression_type(rocks.DBCompressionType.lz4())
        options.set_write_buffer_size(32 << 20)
    elif shape is Shape.SHORT_LIVED:
        options.set_block_based_table_factory(_block(8, cache, bloom=True))
    elif shape is Shape.TIME_INDEX:
        options.set_block_based_table_factory(_block(4, cache, bloom=False))
        # A queue deletes at its head: files that are mostly tombstones are compacted early.
        options.add_compact_on_deletion_collector_factory(4096, 1024, 0.3)
    elif shape is Shape.APPEND:
        options.set_block_based_table_factory(_block(32, cache, bloom=False))
        options.set_bottommost_compression_type(rocks.DBCompressionType.lz4())
    else:
        options.set_block_based_table_factory(_block(4, cache, bloom=True))
        options.set_write_buffer_size(4 << 20)
    return options


def _database_options() -> rocks.Options:
    cores = os.cpu_count() or 2
    options = rocks.Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_atomic_flush(True)
    options.increase_parallelism(cores)
    options.set_max_background_jobs(2 * cores)
    options.set_bytes_per_sync(1 << 20)
    options.set_wal_bytes_per_sync(1 << 20)
    options.set_max_total_wal_size(256 << 20)
    options.set_db_write_buffer_size(64 << 20)
    options.set_max_open_files(512)
    options.set_keep_log_file_num(4)
    options.set_max_log_file_size(4 << 20)
    return options


def tables_at(path: Path) -> list[str]:
    """Name the tables of the database at ``path``."""
    if not (path / "CURRENT").exists():
        raise StoreMismatch(f"{path} is not empty and holds no RocksDB database")
    try:
        return rocks.Rdict.list_cf(str(path), rocks.Options(raw_mode=True))
    except Exception as error:
        raise StoreMismatch(
            f"{path} is not a RocksDB database that can be read: {error}"
        ) from error


class RocksTable:
    """One column family."""

    def __init__(self, column: rocks.Rdict, handle: rocks.ColumnFamily) -> None:
        self.column = column
        self._get: Any = column.get
        self.family: rocks.ColumnFamily | None = handle

    def close(self) -> None:
        """Let go of the database: it stays open for as long as any handle to it is alive."""
        self.column.close()
        self.family = None

    def get(self, key: bytes) -> bytes | None:
        """Read one value."""
        try:
            value: bytes | None = self._get(key)
        except Exception as error:
            _translate(error)
        return value

    def multi_get(self, keys: list[bytes]) -> list[bytes | None]:
        """Read many values in one call."""
        try:
            values: list[bytes | None] = self._get(keys)
        except Exception as error:
            _translate(error)
        return values

    def scan(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), ascending."""
        bound = rocks.ReadOptions()
        bound.set_iterate_upper_bound(end)
        try:
            rows: Any = self.column.items(from_key=begin, read_opt=bound)
            return list(islice(rows, limit))
        except Exception as error:
            _translate(error)

    def scan_back(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), descending."""
        bound = rocks.ReadOptions()
        bound.set_iterate_upper_bound(end)
        try:
            rows: Any = self.column.items(backwards=True, from_key=end, read_opt=bound)
            # The binding does not heed a lower bound when it goes backwards.
            return list(takewhile(lambda row: row[0] >= begin, islice(rows, limit)))
        except Exception as error:
            _translate(error)


class RocksViewTable:
    """A column family as it was: an iterator pins the moment it was made at.

    rocksdict's own snapshots pin point reads only; what they iterate over is the present.
    """

    def __init__(self, column: rocks.Rdict) -> None:
        self.family: rocks.ColumnFamily | None = None
        self._rows: Any = column.iter()

    def close(self) -> None:
        """Let go of the pinned files."""
        self._rows = None

    def get(self, key: bytes) -> bytes | None:
        """Read one value."""
        found = self.scan(key, key + b"\0", 1)
        return found[0][1] if found else None

    def multi_get(self, keys: list[bytes]) -> list[bytes | None]:
        """Read many values."""
        return [self.get(key) for key in keys]

    def scan(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), ascending."""
        rows = self._rows
        found: list[tuple[bytes, bytes]] = []
        try:
            rows.seek(begin)
            while len(found) < limit and rows.valid() and (key := rows.key()) < end:
                found.append((key, rows.value()))
                rows.next()
            rows.status()
        except Exception as error:
            _translate(error)
        return found

    def scan_back(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), descending."""
        rows = self._rows
        found: list[tuple[bytes, bytes]] = []
        try:
            rows.seek_for_prev(end)
            if rows.valid() and rows.key() == end:
                rows.prev()
            while len(found) < limit and rows.valid() and (key := rows.key()) >= begin:
                found.append((key, rows.value()))
                rows.prev()
            rows.status()
        except Exception as error:
            _translate(error)
        return found


class RocksView:
    """All column families as they were at one moment."""

    def __init__(self, columns: Mapping[str, rocks.Rdict]) -> None:
        self._tables = {name: RocksViewTable(column) for name, column in columns.items()}

    def table(self, name: str) -> RocksViewTable:
        """Return a table as it was."""
        return self._tables[name]

    def close(self) -> None:
        """Let go of the pinned files."""
        for table in self._tables.values():
            table.close()


class RocksEngine:
    """A RocksDB directory, owned by this process until closed."""

    def __init__(self, path: Path, tables: Mapping[str, Shape]) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageFailed(f"can't make the directory {path}: {error}") from error
        # One cache for all families: what is hot gets the room, and memory has one bound.
        cache = rocks.Cache(64 << 20)
        columns = {name: _family_options(shape, cache) for name, shape in tables.items()}
        try:
            self._db = rocks.Rdict(str(path), _database_options(), columns)
        except Exception as error:
            if any(sign in str(error) for sign in _LOCKED):
                raise StoreLocked(_describe_owner(path)) from error
            raise StorageFailed(f"RocksDB can't open {path}: {error}") from error
        self._tables = {
            name: RocksTable(
                self._db.get_column_family(name), self._db.get_column_family_handle(name)
            )
            for name in tables
        }
        owner = _Owner(pid=os.getpid(), host=socket.gethostname())
        (path / _OWNER_FILE).write_bytes(msgspec.json.encode(owner))

    def table(self, name: str) -> RocksTable:
        """Return a table named at open."""
        return self._tables[name]

    def batch(self) -> Batch:
        """Begin a batch: the library's own, so that hot loops pay for no wrapper."""
        batch: Any = rocks.WriteBatch(raw_mode=True)
        return batch  # type: ignore[no-any-return]

    def commit(self, batch: Batch) -> None:
        """Apply a batch; a crash of this process can't undo it, a crash of the machine may."""
        rows: Any = batch
        try:
            self._db.write(rows)
        except Exception as error:
            _translate(error)

    def view(self) -> RocksView:
        """Pin the present state for reading."""
        return RocksView({name: table.column for name, table in self._tables.items()})

    def sync(self) -> None:
        """Fsync the write-ahead log, letting other threads run meanwhile."""
        try:
            self._db.flush_wal(True)
        except Exception as error:
            _translate(error)

    def checkpoint(self, path: Path) -> None:
        """Make a RocksDB checkpoint. The binding lets no other thread run until it is made."""
        try:
            rocks.Checkpoint(self._db).create_checkpoint(str(path))
        except Exception as error:
            _translate(error)

    def on_lost(self, told: Callable[[PenstockError], None]) -> None:
        """Do nothing: the lock of the directory keeps others out."""

    def close(self) -> None:
        """Sync and let go of the directory."""
        with contextlib.suppress(StorageFailed):
            self.sync()
        for table in self._tables.values():
            table.close()
        try:
            self._db.close()
        except Exception as error:
            _translate(error)
        finally:
            # A database that failed is let go of when its last reference is.
            del self._db
            with contextlib.suppress(FileNotFoundError):
                (self.path / _OWNER_FILE).unlink()


def _describe_owner(path: Path) -> str:
    try:
        owner = msgspec.json.decode((path / _OWNER_FILE).read_bytes(), type=_Owner)
    except (OSError, msgspec.DecodeError):
        return f"{path} is open in another process"
    if owner.pid == os.getpid() and owner.host == socket.gethostname():
        return f"{path} is already open in this process (pid {owner.pid}): share one broker"
    return f"{path} is open in process {owner.pid} on {owner.host}: one process owns a store"


def _translate(error: Exception) -> NoReturn:
    """Turn the binding's bare exceptions into ours."""
    text = str(error)
    if any(sign in text for sign in _NO_SPACE):
        raise DiskFull(f"no space left for the store: {text}") from error
    raise StorageFailed(f"RocksDB failed: {text}") from error
