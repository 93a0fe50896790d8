# ruff: noqa: FBT003 - rocksdict's setters take their one flag by position
"""The RocksDB engine, through rocksdict.

One column family per table, each tuned for how it is used (:class:`Shape`). Commits go to the
write-ahead log without fsync; :meth:`RocksEngine.sync` flushes the log for everyone at once.
``flush_wal`` is the one call of the binding that lets other threads run while the disk works, so
group commit is built on it and nothing else waits for the disk.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import shutil
import socket
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import msgspec
import rocksdict as rocks

from penstock import limits
from penstock.errors import DiskFull, StorageFailed, StoreDamaged, StoreLocked
from penstock.kv import Shape, damaged
from penstock.kv.rocksdb_files import (
    SyncedLog,
    check_files,
    creation,
    make_directory,
    mark_at,
    reading,
    unowned,
)
from penstock.kv.rocksdb_files import damaged as damaged_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet
    from pathlib import Path

    from penstock.errors import PenstockError
    from penstock.kv import Batch

__all__ = ["RocksEngine", "RocksReader", "kept_closed"]

log = logging.getLogger(__name__)

_OWNER_FILE = "PENSTOCK-OWNER"
_DAMAGED_FILE = "PENSTOCK-DAMAGED"
# What RocksDB says of a directory that is open already, here or in another process.
_LOCKED = ("lock hold by current process", "While lock file")
# Directories that this process has open, or is opening: looking at RocksDB's lock would end it.
_open_here: dict[tuple[int, int], object] = {}
# What the operating system says when there is no room, as RocksDB passes it on.
_NO_SPACE = ("No space left", "File too large", "Disk quota exceeded")
# What RocksDB says when a block has the wrong checksum, and the operating system when a file is
# gone or its disk can't read it.
_DAMAGED = ("Corruption", "Input/output error", "No such file or directory")
# Up to this many rows, a scan is faster without the binding's generator.
_FEW_ROWS: Final = 16


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


def _database_options(*, create: bool) -> rocks.Options:
    cores = os.cpu_count() or 2
    options = rocks.Options(raw_mode=True)
    options.create_if_missing(create)
    options.create_missing_column_families(create)
    # Ends the log where it can't be read on, which has been found to be its torn tail.
    options.set_wal_recovery_mode(rocks.DBRecoveryMode.point_in_time())
    options.set_atomic_flush(True)
    options.increase_parallelism(cores)
    options.set_max_background_jobs(2 * cores)
    options.set_bytes_per_sync(1 << 20)
    options.set_wal_bytes_per_sync(1 << 20)
    options.set_max_total_wal_size(256 << 20)
    options.set_db_write_buffer_size(64 << 20)
    options.set_max_open_files(_max_open_files())
    options.set_keep_log_file_num(4)
    options.set_max_log_file_size(4 << 20)
    return options


def _max_open_files() -> int:
    """Return how many files it may keep open: not all that the process may, if that is little."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY:
        return limits.MAX_STORE_FILES
    return min(limits.MAX_STORE_FILES, allowed // limits.STORE_FILES_SHARE)


class RocksTable:
    """One column family. ``on_damage`` is told its name when a part of it can't be read."""

    def __init__(
        self,
        name: str,
        column: rocks.Rdict,
        handle: rocks.ColumnFamily,
        on_damage: Callable[[str], None],
    ) -> None:
        self.name = name
        self.column = column
        self._on_damage = on_damage
        self._get: Any = column.get
        self.family: rocks.ColumnFamily | None = handle

    def close(self) -> None:
        """Let go of the database: it stays open for as long as any handle to it is alive."""
        self.family = None
        # Its rows are in the log, whether or not they could be flushed.
        with contextlib.suppress(Exception):
            self.column.close()

    def get(self, key: bytes) -> bytes | None:
        """Read one value."""
        try:
            value: bytes | None = self._get(key)
        except Exception as error:
            self.fail(error, key, key + b"\0")
        return value

    def multi_get(self, keys: list[bytes]) -> list[bytes | None]:
        """Read many values in one call."""
        try:
            values: list[bytes | None] = self._get(keys)
        except Exception as error:
            self.fail(error, min(keys), max(keys) + b"\0")
        return values

    def scan(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), ascending."""
        bound = rocks.ReadOptions()
        bound.set_iterate_upper_bound(end)
        found: list[tuple[bytes, bytes]] = []
        try:
            if limit > _FEW_ROWS:
                rows: Any = self.column.items(from_key=begin, read_opt=bound)
                found = list(islice(rows, limit))
                del rows
                if len(found) == limit:
                    return found
            # The generator hides why it has ended: an iterator goes on from there, and tells.
            after = found[-1][0] + b"\0" if found else begin
            found += _ascending(self.column.iter(bound), self.fail, after, end, limit - len(found))
        except StorageFailed:
            raise
        except Exception as error:
            self.fail(error, begin, end)
        return found

    def scan_back(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), descending."""
        bound = rocks.ReadOptions()
        bound.set_iterate_upper_bound(end)
        return _descending(self.column.iter(bound), self.fail, begin, end, limit)

    def fail(self, error: Exception, begin: bytes, end: bytes) -> NoReturn:
        """Say what could not be read."""
        try:
            _translate(error, self.name, begin, end)
        except StoreDamaged:
            self._on_damage(self.name)
            raise


def _tables_of(
    database: rocks.Rdict, names: Iterable[str], on_damage: Callable[[str], None]
) -> dict[str, RocksTable]:
    return {
        name: RocksTable(
            name,
            database.get_column_family(name),
            database.get_column_family_handle(name),
            on_damage,
        )
        for name in names
    }


class RocksViewTable:
    """A column family as it was: an iterator pins the moment it was made at.

    rocksdict's own snapshots pin point reads only; what they iterate over is the present.
    """

    def __init__(self, table: RocksTable) -> None:
        self.family: rocks.ColumnFamily | None = None
        self._fail = table.fail
        self._rows: Any = table.column.iter()

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
        return _ascending(self._rows, self._fail, begin, end, limit)

    def scan_back(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), descending."""
        return _descending(self._rows, self._fail, begin, end, limit)


_Fail: TypeAlias = "Callable[[Exception, bytes, bytes], NoReturn]"


def _ascending(
    rows: Any, fail: _Fail, begin: bytes, end: bytes, limit: int
) -> list[tuple[bytes, bytes]]:
    """Read up to ``limit`` pairs of [begin, end); an end that is not the end of the range raises.

    No step is taken beyond the last pair that is wanted: it could meet a block that nobody needs.
    """
    found: list[tuple[bytes, bytes]] = []
    try:
        rows.seek(begin)
        while len(found) < limit and (key := rows.key()) is not None and key < end:
            found.append((key, rows.value()))
            if len(found) < limit:
                rows.next()
        rows.status()
    except Exception as error:
        # Whoever keeps the error keeps this frame, and the database stays open for the iterator.
        del rows
        fail(error, found[-1][0] + b"\0" if found else begin, end)
    return found


def _descending(
    rows: Any, fail: _Fail, begin: bytes, end: bytes, limit: int
) -> list[tuple[bytes, bytes]]:
    """Read up to ``limit`` pairs of [begin, end), last first, in the same way."""
    found: list[tuple[bytes, bytes]] = []
    try:
        rows.seek_for_prev(end)
        if rows.key() == end:
            rows.prev()
        while len(found) < limit and (key := rows.key()) is not None and key >= begin:
            found.append((key, rows.value()))
            if len(found) < limit:
                rows.prev()
        rows.status()
    except Exception as error:
        end = found[-1][0] if found else end
        # The binding knows no lower bound, so the block may be below the range; and to give a row,
        # RocksDB looks at the one before. Forward, no more than that row can be left of the range.
        try:
            rest = _ascending(rows, fail, begin, end, 2)
        finally:
            del rows
        if len(rest) > 1:
            fail(error, begin, end)
        found += rest
    return found


class RocksView:
    """All column families as they were at one moment."""

    def __init__(self, tables: Mapping[str, RocksTable]) -> None:
        self._tables = {name: RocksViewTable(table) for name, table in tables.items()}

    def table(self, name: str) -> RocksViewTable:
        """Return a table as it was."""
        return self._tables[name]

    def close(self) -> None:
        """Let go of the pinned files."""
        for table in self._tables.values():
            table.close()


class RocksReader:
    """A store that no process has open, to be read; not one byte of the directory changes."""

    def __init__(self, path: Path, tables: Mapping[str, Shape]) -> None:
        cache = rocks.Cache(64 << 20)
        columns = {name: _family_options(shape, cache) for name, shape in tables.items()}
        with _reserved(path) as self._place:
            _look_at(path, tables, is_copy=True)
            self._db = _open(path, columns, access=rocks.AccessType.read_only())
        self._tables = _tables_of(self._db, tables, lambda _name: None)

    def table(self, name: str) -> RocksTable:
        """Return a table."""
        return self._tables[name]

    def close(self) -> None:
        """Let go of the files."""
        for table in self._tables.values():
            table.close()
        self._db.close()
        _open_here.pop(self._place, None)


class RocksEngine:
    """A RocksDB directory, owned by this process until closed."""

    def __init__(self, path: Path, tables: Mapping[str, Shape], *, mark: str = "tables") -> None:
        """Open the store at ``path``; where nothing is, make one with the given mark."""
        self.path = path
        # One cache for all families: what is hot gets the room, and memory has one bound.
        cache = rocks.Cache(64 << 20)
        columns = {name: _family_options(shape, cache) for name, shape in tables.items()}
        self._uncompacted = _damaged_tables(path)
        for name in self._uncompacted & tables.keys():
            columns[name].set_disable_auto_compactions(True)
        create = mark_at(path, {}) is None
        if create:
            make_directory(path)
        with _reserved(path) as self._place:
            if create:
                with creation(path, mark):
                    self._db = _open(path, columns, create=True)
            else:
                _look_at(path, tables)
                self._db = _open(path, columns)
            with reading(path):
                self._synced = SyncedLog(path)
        self._tables = _tables_of(self._db, tables, lambda name: self._stop_compacting({name}))
        owner = _Owner(pid=os.getpid(), host=socket.gethostname())
        # Nobody needs it to open the store, so a disk without room for it is for writes to find.
        with contextlib.suppress(OSError):
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
            try:
                _translate(error)
            except StoreDamaged:
                # A compaction has come upon it. Which table that was of is not said.
                self._stop_compacting(self._tables.keys())
                raise

    def _stop_compacting(self, tables: AbstractSet[str]) -> None:
        """Compact damaged tables no more, in this process and in later ones.

        A compaction that comes upon a block that can't be read makes RocksDB refuse all writes.
        """
        new = tables - self._uncompacted
        if not new:
            return
        self._uncompacted |= new
        log.error("%s is damaged: tables that are not compacted any more: %s", self.path, new)
        with contextlib.suppress(Exception):
            for name in new:
                self._tables[name].column.set_options({"disable_auto_compactions": "true"})
        with contextlib.suppress(OSError):
            (self.path / _DAMAGED_FILE).write_bytes(msgspec.json.encode(sorted(self._uncompacted)))

    def view(self) -> RocksView:
        """Pin the present state for reading."""
        return RocksView(self._tables)

    def sync(self) -> None:
        """Fsync the write-ahead log, letting other threads run meanwhile."""
        # No commit is half done here, since the binding lets no other thread run until it is.
        measured = self._synced.measure()
        try:
            self._db.flush_wal(True)
        except Exception as error:
            _translate(error)
        if measured is not None:
            self._synced.keep(measured)

    def checkpoint(self, path: Path) -> None:
        """Make a RocksDB checkpoint. The binding lets no other thread run until it is made."""
        try:
            rocks.Checkpoint(self._db).create_checkpoint(str(path))
            # RocksDB leaves this out, and would make it when the copy is opened.
            shutil.copyfile(self.path / "IDENTITY", path / "IDENTITY")
        except Exception as error:
            _translate(error)

    def on_lost(self, told: Callable[[PenstockError], None]) -> None:
        """Do nothing: the lock of the directory keeps others out."""

    def close(self) -> None:
        """Sync and let go of the directory."""
        with contextlib.suppress(StorageFailed):
            self.sync()
        if self._uncompacted:
            # Errors that were raised have kept the frames that they came through, with handles.
            gc.collect()
        for table in self._tables.values():
            table.close()
        try:
            self._db.close()
        except Exception as error:
            _translate(error)
        finally:
            # A database that failed is let go of when its last reference is.
            del self._db
            self._synced.close()
            _open_here.pop(self._place, None)
            with contextlib.suppress(FileNotFoundError):
                (self.path / _OWNER_FILE).unlink()


@contextlib.contextmanager
def _reserved(path: Path) -> Iterator[tuple[int, int]]:
    """Let nobody else in this process open a directory, for good if the block ends well."""
    found = path.stat()
    place = found.st_dev, found.st_ino
    mine = object()
    if _open_here.setdefault(place, mine) is not mine:
        raise StoreLocked(_describe_owner(path))
    try:
        yield place
    except BaseException:
        del _open_here[place]
        raise


@contextlib.contextmanager
def kept_closed(path: Path) -> Iterator[None]:
    """Let nobody open a directory meanwhile; raise if somebody has it open."""
    with _reserved(path) as place, unowned(path) as free:
        if not free:
            raise StoreLocked(_describe_owner(path))
        yield
    del _open_here[place]


def _look_at(path: Path, tables: Mapping[str, Shape], *, is_copy: bool = False) -> None:
    """Refuse a store that others have open, or that is damaged."""
    with reading(path), unowned(path) as free:
        if not free:
            raise StoreLocked(_describe_owner(path))
        check_files(path, tables, is_copy=is_copy)


def _open(
    path: Path,
    columns: dict[str, rocks.Options],
    *,
    create: bool = False,
    access: rocks.AccessType | None = None,
) -> rocks.Rdict:
    logs = set(path.glob("LOG.old.*"))
    access = access or rocks.AccessType.read_write()
    try:
        return rocks.Rdict(str(path), _database_options(create=create), columns, access)
    except Exception as error:
        text = str(error)
        if any(sign in text for sign in _LOCKED):
            raise StoreLocked(_describe_owner(path)) from error
        # RocksDB begins a new log of its own doings before anything else.
        for log in set(path.glob("LOG.old.*")) - logs:
            log.replace(path / "LOG")
        if "Corruption: " in text:
            raise damaged_store(path, text) from error
        raise StorageFailed(f"RocksDB can't open {path}: {text}") from error


def _damaged_tables(path: Path) -> set[str]:
    """Read which tables were found to be damaged."""
    try:
        return set(msgspec.json.decode((path / _DAMAGED_FILE).read_bytes(), type=list[str]))
    except (OSError, msgspec.DecodeError):
        return set()


def _describe_owner(path: Path) -> str:
    try:
        owner = msgspec.json.decode((path / _OWNER_FILE).read_bytes(), type=_Owner)
    except (OSError, msgspec.DecodeError):
        return f"{path} is open in another process"
    if owner.pid == os.getpid() and owner.host == socket.gethostname():
        return f"{path} is already open in this process (pid {owner.pid}): share one broker"
    return f"{path} is open in process {owner.pid} on {owner.host}: one process owns a store"


def _translate(error: Exception, table: str = "", begin: bytes = b"", end: bytes = b"") -> NoReturn:
    """Turn the binding's bare exceptions into ours; ``table``: one that was read, from where on."""
    text = str(error)
    if any(sign in text for sign in _NO_SPACE):
        raise DiskFull(f"no space left for the store: {text}") from error
    if any(sign in text for sign in _DAMAGED):
        if table:
            raise damaged(table, begin, end, text) from error
        raise StoreDamaged(f"files of the store can't be read: {text}") from error
    raise StorageFailed(f"RocksDB failed: {text}") from error
