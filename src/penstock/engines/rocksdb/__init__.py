# ruff: noqa: FBT003 - rocksdict's setters take their one flag by position
"""The RocksDB engine, through rocksdict.

One column family per table, each tuned for how it is used (:class:`Shape`). Commits go to the
write-ahead log without fsync; :meth:`RocksEngine.sync` flushes the log for everyone at once.
``flush_wal`` is the one call of the binding that lets other threads run while the disk works, so
group commit is built on it and nothing else waits for the disk.

After a write that fails the engine takes no more, since RocksDB does not say what it would do with
them. The engine is *away* then, and still reads, until :meth:`RocksEngine.recover` has closed the
database and opened it anew. The engine never repeats a failed sync: the operating system may have
dropped the bytes that it could not write. When RocksDB opens, it writes everything that it finds in
its log into new files, and syncs those.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import shutil
import threading
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn
from weakref import WeakSet

import msgspec
import rocksdict as rocks

from penstock import limits
from penstock.clock import SystemClock
from penstock.engines import Engine, Shape, View, enter_library, keep_in_forks
from penstock.engines.disk import FreeSpace
from penstock.engines.rocksdb import files
from penstock.engines.rocksdb.tables import RocksTable, RocksViewTable, is_full, pass_on, translate
from penstock.errors import DiskFull, PenstockError, StorageFailed, StoreDamaged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Set as AbstractSet
    from contextlib import AbstractContextManager
    from pathlib import Path

    from penstock.engines import Batch

log = logging.getLogger(__name__)

_DAMAGED_FILE: Final = "PENSTOCK-DAMAGED"
# Words of RocksDB for a directory that is open already, here or in another process.
_LOCKED: Final = ("lock hold by current process", "While lock file")
# For each shape: KiB of a block, whether it has a Bloom filter, whether files are compressed.
_TUNING: Final[Mapping[Shape, tuple[int, bool, bool]]] = {
    Shape.SYSTEM: (4, True, False),
    Shape.VALUES: (32, True, True),
    Shape.SHORT_LIVED: (8, True, False),
    Shape.TIME_INDEX: (4, False, False),
    Shape.APPEND: (32, False, True),
}
# Bits of the window, level, strategy and dictionary: the lowest level is fast enough to flush with.
_ZSTD: Final = (-14, 1, 0, 0)
# A family takes memory for its write buffer in steps of this size.
_ARENA_BYTES: Final = 256 << 10


def _family_options(
    tables: Mapping[str, Shape], write_buffer_mb: int, block_cache_mb: int
) -> dict[str, rocks.Options]:
    # One cache for all families: the hottest tables get most of it, and memory has one bound.
    cache = rocks.Cache(block_cache_mb << 20)
    columns = {}
    for name, shape in tables.items():
        block_kib, bloom, compressed = _TUNING[shape]
        block = rocks.BlockBasedOptions()
        block.set_block_size(block_kib << 10)
        block.set_block_cache(cache)
        # Without this, index and filter blocks stay in memory for every open file, so memory would
        # grow with the depth of the queues.
        block.set_cache_index_and_filter_blocks(True)
        block.set_pin_l0_filter_and_index_blocks_in_cache(True)
        if bloom:
            block.set_bloom_filter(10, False)
        options = columns[name] = rocks.Options(raw_mode=True)
        options.set_block_based_table_factory(block)
        # A flush takes all families, and what was deleted before it is not written. So no family
        # of its own causes one: the buffers of all together do.
        options.set_write_buffer_size(write_buffer_mb << 20)
        options.set_arena_block_size(_ARENA_BYTES)
        options.set_level_compaction_dynamic_level_bytes(True)
        # The same on all levels: RocksDB moves a file down as it is then, unless it overlaps
        # others. Payloads and the log are written in the order of their keys.
        kind = rocks.DBCompressionType.zstd() if compressed else rocks.DBCompressionType.none()
        options.set_compression_type(kind)
        options.set_compression_options(*_ZSTD)
        if shape is Shape.TIME_INDEX:
            # A queue deletes at its head: files that are mostly tombstones are compacted early.
            options.add_compact_on_deletion_collector_factory(4096, 1024, 0.3)
    return columns


def _database_options(write_buffer_mb: int, *, create: bool) -> rocks.Options:
    cores = os.cpu_count() or 2
    options = rocks.Options(raw_mode=True)
    options.create_if_missing(create)
    options.create_missing_column_families(create)
    # Ends the log at its first damage; the check before opening has found that to be a torn tail.
    options.set_wal_recovery_mode(rocks.DBRecoveryMode.point_in_time())
    options.set_atomic_flush(True)
    options.increase_parallelism(cores)
    options.set_max_background_jobs(2 * cores)
    options.set_bytes_per_sync(1 << 20)
    options.set_wal_bytes_per_sync(1 << 20)
    # More than the buffers hold: full buffers cause a flush, not a long log.
    options.set_max_total_wal_size(4 * write_buffer_mb << 20)
    options.set_db_write_buffer_size(write_buffer_mb << 20)
    # Not all the files that the process may open, if those are few.
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = 0 < allowed < limits.STORE_FILES_SHARE * limits.MAX_STORE_FILES
    options.set_max_open_files(
        allowed // limits.STORE_FILES_SHARE if few else limits.MAX_STORE_FILES
    )
    options.set_keep_log_file_num(4)
    options.set_max_log_file_size(4 << 20)
    return options


def _open(
    path: Path,
    tables: Mapping[str, Shape],
    *,
    write_buffer_mb: int = limits.STORE_MEMORY_MB,
    block_cache_mb: int = limits.STORE_MEMORY_MB,
    uncompacted: AbstractSet[str] = frozenset(),
    create: bool = False,
    is_copy: bool = False,
) -> rocks.Rdict:
    """Check and open a database; ``is_copy``: for reading only."""
    enter_library("RocksDB")
    columns = _family_options(tables, write_buffer_mb, block_cache_mb)
    for name in uncompacted & columns.keys():
        columns[name].set_disable_auto_compactions(True)
    if not create:
        # Imported here: a store that is just made has nothing to check.
        from penstock.engines.rocksdb.check import check_files  # noqa: PLC0415

        check_files(path, columns, is_copy=is_copy)
    logs = set(path.glob("LOG.old.*"))
    options = _database_options(write_buffer_mb, create=create)
    access = rocks.AccessType.read_only() if is_copy else rocks.AccessType.read_write()
    try:
        return rocks.Rdict(str(path), options, columns, access)
    except Exception as error:
        pass_on(error)
        text = str(error)
        if any(sign in text for sign in _LOCKED):
            raise files.lock_error(path) from error
        # RocksDB begins a new log of its own doings before anything else.
        for begun in set(path.glob("LOG.old.*")) - logs:
            begun.replace(path / "LOG")
        if is_full(error):
            raise DiskFull(f"RocksDB can't open {path}: {text}") from error
        if "Corruption: " in text:
            # RocksDB adds to any damage that the MANIFEST may be damaged, which was checked before.
            raise files.unusable_store(path, text.partition("  The file ")[0]) from error
        raise StorageFailed(f"RocksDB can't open {path}: {text}") from error


def open_for_reading(path: Path, tables: Mapping[str, Shape]) -> View:
    """Open a store that no process has open; not one byte of the directory changes."""
    with files.reserve(path) as inode:
        database = _open(path, tables, is_copy=True)
    found = {name: RocksTable(database, name, lambda _name: None) for name in tables}

    def close() -> None:
        for table in found.values():
            table.close()
        database.close()
        files.release(inode)

    return View(found, close)


class RocksEngine(Engine):
    """A RocksDB directory, owned by this process until closed."""

    durable_on_commit = False

    def __init__(
        self,
        path: Path,
        tables: Mapping[str, Shape],
        *,
        mark: str = "tables",
        min_free_bytes: int | None = None,
        write_buffer_mb: int = limits.STORE_MEMORY_MB,
        block_cache_mb: int = limits.STORE_MEMORY_MB,
    ) -> None:
        """Open the store at ``path``; if there is none, make one with the given mark."""
        keep_in_forks(self)
        self.path = path
        # Why the engine takes no writes: the very error of the first write that failed.
        self.away: StorageFailed | None = None
        self._syncing = threading.Lock()
        self._views: WeakSet[View] = WeakSet()
        self._seconds = SystemClock().seconds
        self._away_since = 0.0
        # Whether something was committed since the last sync, and whether a sync has failed.
        self._unsynced = self._sync_failed = False
        self._uncompacted = _damaged_tables(path)
        self._open_with = partial(
            _open, path, tables, write_buffer_mb=write_buffer_mb, block_cache_mb=block_cache_mb
        )
        create = files.read_mark(path, {}) is None
        if create:
            with files.os_errors_as(f"can't make the directory {path}"):
                path.mkdir(parents=True, exist_ok=True)
        self._tables: dict[str, RocksTable] = {}
        with files.reserve(path) as self._inode, contextlib.ExitStack() as undoing:
            with files.creation(path, mark) if create else contextlib.nullcontext():
                self._db = self._open(create=create)
                undoing.callback(self._close_database)
            with files.os_errors_as(f"can't read the store at {path}"):
                self._synced = files.SyncedLog(path)
            undoing.callback(self._synced.close)
            for name in tables:
                self._tables[name] = RocksTable(
                    self._db, name, lambda damaged: self._stop_compacting({damaged})
                )
            self._free_space = FreeSpace(path, self._unflushed_bytes, min_free_bytes)
            undoing.pop_all()

    def _open(self, *, create: bool = False) -> rocks.Rdict:
        database = self._open_with(uncompacted=self._uncompacted, create=create)
        files.write_owner(self.path)
        return database

    def table(self, name: str) -> RocksTable:
        """Return a table named at open."""
        return self._tables[name]

    def batch(self, *, growth: int = 0) -> Batch:
        """Begin a batch: the library's own, so that hot loops pay for no wrapper."""
        # Refused here, while no caller's memory is ahead of the disk.
        if self.away is not None:
            self._check()
        if growth:
            self._free_space.check(growth)
        batch: Any = rocks.WriteBatch(raw_mode=True)
        return batch  # type: ignore[no-any-return]

    def commit(self, batch: Batch) -> None:
        """Apply a batch; a crash of this process can't undo it, a crash of the machine may."""
        if self.away is not None:
            self._check()
        rows: Any = batch
        # Before the write: an exception out of a signal handler may come right behind it.
        was_unsynced, self._unsynced = self._unsynced, True
        try:
            self._db.write(rows)
        except Exception as error:
            pass_on(error)
            # Nothing was written that a close would have to sync.
            self._unsynced = was_unsynced
            self._fail(error)

    def view(self) -> View:
        """Pin the present state for reading."""
        try:
            tables = {name: RocksViewTable(table) for name, table in self._tables.items()}
        except Exception as error:
            translate(error)

        def close() -> None:
            for table in tables.values():
                table.close()

        view = View(tables, close)
        self._views.add(view)
        return view

    def sync(self) -> None:
        """Fsync the write-ahead log, letting other threads run meanwhile."""
        with self._syncing:
            if self._sync_failed:
                self._check()
            self._unsynced = False
            # No commit is half done here, since the binding lets no other thread run until it is.
            measured = self._synced.measure()
            try:
                self._db.flush_wal(True)
            except Exception as error:
                self._unsynced = self._sync_failed = True
                self._fail(error)
            if measured is not None:
                self._synced.keep(measured)

    def checkpoint(self, path: Path) -> None:
        """Make a RocksDB checkpoint. The binding lets no other thread run until it is made."""
        try:
            rocks.Checkpoint(self._db).create_checkpoint(str(path))
        except Exception as error:
            translate(error)
        with files.os_errors_as(f"can't copy the store at {self.path}"):
            # RocksDB leaves this out, and would make it when the copy is opened.
            shutil.copyfile(self.path / "IDENTITY", path / "IDENTITY")

    def free_bytes(self) -> int | None:
        """Return how much of the disk is free."""
        return self._free_space.free_bytes()

    def used_bytes(self) -> dict[str, int]:
        """Ask RocksDB, which knows the sizes of its files; nothing while it is not open."""
        try:
            sizes = {
                name: table.column.property_int_value("rocksdb.total-sst-files-size") or 0
                for name, table in self._tables.items()
            }
        except Exception as error:
            pass_on(error)
            return {}
        return sizes | {"wal": self._logged_bytes()}

    def close(self) -> None:
        """Sync and close the database; close it also if the sync fails."""
        try:
            if self._unsynced:
                self.sync()
        except StorageFailed as error:
            raise type(error)(f"the last changes may not be durable: {error}") from error
        finally:
            self._let_go()
            files.release(self._inode)

    def _let_go(self) -> None:
        """Close the database and every handle to it. Rows that were not flushed are in its log."""
        if self.away is not None:
            # An error that somebody has kept keeps the frames that it came through, with handles.
            traceback.clear_frames(self.away.__traceback__)
        if self.away is not None or self._uncompacted:
            gc.collect()
        for view in list(self._views):
            view.close()
        self._close_database()
        self._synced.close()

    def _close_database(self) -> None:
        for table in self._tables.values():
            table.close()
        with contextlib.suppress(Exception):
            self._db.close()
        with contextlib.suppress(OSError):
            (self.path / files.OWNER).unlink()

    # --- a disk that can't be read or written ----------------------------------------------

    def _stop_compacting(self, tables: AbstractSet[str]) -> None:
        """Compact damaged tables no more, in this process and in later ones.

        A compaction that comes upon an unreadable block makes RocksDB refuse all writes.
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

    def recover(self, alone: AbstractContextManager[None], load: Callable[[], None]) -> None:
        """Open the database anew, if the disk has room for what that has to write."""
        self._free_space.probe()
        with alone, self._syncing:
            if self.away is None:
                return
            self._let_go()
            try:
                self._db = self._open()
                with files.os_errors_as(f"can't read the store at {self.path}"):
                    self._synced = files.SyncedLog(self.path)
                for table in self._tables.values():
                    table.bind(self._db)
                load()
            except PenstockError as error:
                self.away = StorageFailed(f"{self.path} can't be opened again: {error}")
                raise self.away from error
            self._sync_failed, self.away = False, None

    def _unflushed_bytes(self) -> int:
        """Return what opening the database would write: the rows that only its log has."""
        logged = self._logged_bytes()
        try:
            sizes = [
                table.column.property_int_value("rocksdb.cur-size-all-mem-tables")
                for table in self._tables.values()
            ]
        except Exception as error:
            # The database is not open.
            pass_on(error)
            return logged
        return min(logged, sum(size or 0 for size in sizes))

    def _logged_bytes(self) -> int:
        """Return the size of RocksDB's own log."""
        logged = 0
        for path in self.path.glob("*.log"):
            # RocksDB may remove it at any moment.
            with contextlib.suppress(FileNotFoundError):
                logged += path.stat().st_size
        return logged

    def _check(self) -> None:
        """Raise if the engine takes no writes."""
        if self.away is not None:
            away_s = self._seconds() - self._away_since
            raise type(self.away)(
                f"the store has taken no writes for {away_s:.0f} s, and tries again every "
                f"second: {self.away}"
            )

    def _fail(self, error: Exception) -> NoReturn:
        """Take no more writes after this one, and raise why."""
        pass_on(error)
        self._check()
        try:
            translate(error)
        except StorageFailed as ours:
            if isinstance(ours, StoreDamaged):
                # A compaction has met an unreadable block. RocksDB does not name the table.
                self._stop_compacting(self._tables.keys())
            self.away, self._away_since = ours, self._seconds()
            raise


def _damaged_tables(path: Path) -> set[str]:
    """Read which tables were found to be damaged."""
    try:
        return set(msgspec.json.decode((path / _DAMAGED_FILE).read_bytes(), type=list[str]))
    except (OSError, msgspec.DecodeError):
        return set()
