# ruff: noqa: FBT003 - rocksdict's setters take their one flag by position
"""The RocksDB engine, through rocksdict.

One column family per table, each tuned for how it is used (:class:`Shape`). Commits go to the
write-ahead log without fsync; :meth:`RocksEngine.sync` flushes the log for everyone at once.
``flush_wal`` is the one call of the binding that lets other threads run while the disk works, so
group commit is built on it and nothing else waits for the disk.

A write that fails is the last one: what RocksDB would make of later ones is not known. The engine
is *away* then, which leaves reads as they are, until :meth:`RocksEngine.recover` has let go of the
database and opened it anew. Never is a sync repeated that has failed: the operating system may have
dropped what it could not write. RocksDB writes everything that it finds in its log into new files
when it opens, and syncs those.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import shutil
import socket
import threading
import traceback
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

import msgspec
import rocksdict as rocks

from penstock import limits
from penstock.clock import SystemClock
from penstock.engines import Shape
from penstock.engines.free_space import DiskRoom
from penstock.engines.rocksdb.files import (
    SyncedLog,
    check_files,
    creation,
    damaged,
    make_directory,
    mark_at,
    reading,
    unowned,
)
from penstock.engines.rocksdb.tables import RocksTable, RocksView, is_full, translate
from penstock.errors import DiskFull, PenstockError, StorageFailed, StoreDamaged, StoreLocked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from collections.abc import Set as AbstractSet
    from contextlib import AbstractContextManager
    from pathlib import Path

    from penstock.engines import Batch

__all__ = ["RocksEngine", "RocksReader", "kept_closed"]

log = logging.getLogger(__name__)

_OWNER_FILE = "PENSTOCK-OWNER"
_DAMAGED_FILE = "PENSTOCK-DAMAGED"
# What RocksDB says of a directory that is open already, here or in another process.
_LOCKED = ("lock hold by current process", "While lock file")
# Directories that this process has open, or is opening: looking at RocksDB's lock would end it.
_open_here: dict[tuple[int, int], object] = {}


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


class RocksReader:
    """A store that no process has open, to be read; not one byte of the directory changes."""

    def __init__(self, path: Path, tables: Mapping[str, Shape]) -> None:
        cache = rocks.Cache(64 << 20)
        columns = {name: _family_options(shape, cache) for name, shape in tables.items()}
        with _reserved(path) as self._place:
            _look_at(path, tables, is_copy=True)
            self._db = _open(path, columns, access=rocks.AccessType.read_only())
        self._tables = {name: RocksTable(self._db, name, lambda _name: None) for name in tables}

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

    def __init__(
        self,
        path: Path,
        tables: Mapping[str, Shape],
        *,
        mark: str = "tables",
        min_free_bytes: int | None = None,
    ) -> None:
        """Open the store at ``path``; where nothing is, make one with the given mark."""
        self.path = path
        # Why no more writes are taken for now: the very error of the first one that failed.
        self.away: StorageFailed | None = None
        self._shapes = tables
        self._syncing = threading.Lock()
        self._views: WeakSet[RocksView] = WeakSet()
        self._seconds = SystemClock().seconds
        self._away_since = 0.0
        # Whether something was committed since the last sync, and whether a sync has failed.
        self._unsynced = self._sync_failed = False
        self._uncompacted = _damaged_tables(path)
        create = mark_at(path, {}) is None
        if create:
            make_directory(path)
        self._tables: dict[str, RocksTable] = {}
        with _reserved(path) as self._place, contextlib.ExitStack() as undoing:
            with creation(path, mark) if create else contextlib.nullcontext():
                self._db = self._open(create=create)
                undoing.callback(self._close_database)
            with reading(path):
                self._synced = SyncedLog(path)
            undoing.callback(self._synced.close)
            for name in tables:
                self._tables[name] = RocksTable(self._db, name, self._note_damage)
            self._room = DiskRoom(path, self._unflushed_bytes, min_free_bytes)
            undoing.pop_all()

    def _open(self, *, create: bool = False) -> rocks.Rdict:
        # One cache for all families: what is hot gets the room, and memory has one bound.
        cache = rocks.Cache(64 << 20)
        columns = {name: _family_options(shape, cache) for name, shape in self._shapes.items()}
        for name in self._uncompacted & columns.keys():
            columns[name].set_disable_auto_compactions(True)
        if not create:
            _look_at(self.path, self._shapes)
        database = _open(self.path, columns, create=create)
        owner = _Owner(pid=os.getpid(), host=socket.gethostname())
        # It tells others whose the directory is; the lock keeps them out without it.
        with contextlib.suppress(OSError):
            (self.path / _OWNER_FILE).write_bytes(msgspec.json.encode(owner))
        return database

    def table(self, name: str) -> RocksTable:
        """Return a table named at open."""
        return self._tables[name]

    def batch(self, *, growth: int = 0) -> Batch:
        """Begin a batch: the library's own, so that hot loops pay for no wrapper."""
        # Refused here, while nobody's memory has run ahead of the disk.
        if self.away is not None:
            self._check()
        if growth:
            self._room.check(growth)
        batch: Any = rocks.WriteBatch(raw_mode=True)
        return batch  # type: ignore[no-any-return]

    def commit(self, batch: Batch) -> None:
        """Apply a batch; a crash of this process can't undo it, a crash of the machine may."""
        if self.away is not None:
            self._check()
        rows: Any = batch
        try:
            self._db.write(rows)
        except Exception as error:
            self._fail(error)
        self._unsynced = True

    def view(self) -> RocksView:
        """Pin the present state for reading."""
        try:
            view = RocksView(self._tables)
        except Exception as error:
            translate(error)
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
            # RocksDB leaves this out, and would make it when the copy is opened.
            shutil.copyfile(self.path / "IDENTITY", path / "IDENTITY")
        except Exception as error:
            translate(error)

    def on_lost(self, told: Callable[[PenstockError], None]) -> None:
        """Do nothing: the lock of the directory keeps others out."""

    def close(self) -> None:
        """Sync and let go of the directory, also if that fails."""
        try:
            if self._unsynced:
                self.sync()
        except StorageFailed as error:
            raise type(error)(f"the last changes may not be durable: {error}") from error
        finally:
            self._let_go()
            _open_here.pop(self._place, None)

    # --- blocks that can't be read ---------------------------------------------------------

    def _note_damage(self, table: str) -> None:
        self._stop_compacting({table})

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

    # --- a disk that takes no writes -------------------------------------------------------

    def free_bytes(self) -> int | None:
        """Return how much of the disk is free."""
        return self._room.free_bytes()

    def recover(self, alone: AbstractContextManager[None], load: Callable[[], None]) -> None:
        """Open the database anew, if the disk has room for what that has to write."""
        self._room.probe()
        with alone, self._syncing:
            if self.away is None:
                return
            self._let_go()
            try:
                self._db = self._open()
                with reading(self.path):
                    self._synced = SyncedLog(self.path)
                for table in self._tables.values():
                    table.bind(self._db)
                load()
            except PenstockError as error:
                self.away = StorageFailed(f"{self.path} can't be opened again: {error}")
                raise self.away from error
            self._sync_failed, self.away = False, None

    def _let_go(self) -> None:
        """Close the database. What could not be flushed is in its log."""
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
            (self.path / _OWNER_FILE).unlink()

    def _unflushed_bytes(self) -> int:
        """Return what opening the database would write: what is in its log and in no other file."""
        logged = 0
        for path in self.path.glob("*.log"):
            # It may go at any moment.
            with contextlib.suppress(FileNotFoundError):
                logged += path.stat().st_size
        try:
            sizes = [
                table.column.property_int_value("rocksdb.cur-size-all-mem-tables")
                for table in self._tables.values()
            ]
        except Exception:
            # It is not open.
            return logged
        return min(logged, sum(size or 0 for size in sizes))

    def _check(self) -> None:
        """Raise if no writes are taken."""
        if self.away is not None:
            raise type(self.away)(
                f"the store has taken no writes for {self._away_s():.0f} s, and tries again every "
                f"second: {self.away}"
            )

    def _away_s(self) -> float:
        return self._seconds() - self._away_since

    def _fail(self, error: Exception) -> NoReturn:
        """Take no more writes after this one, and say why."""
        self._check()
        try:
            translate(error)
        except StorageFailed as ours:
            if isinstance(ours, StoreDamaged):
                # A compaction has come upon it. Which table that was of is not said.
                self._stop_compacting(self._tables.keys())
            self.away, self._away_since = ours, self._seconds()
            raise


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
        for begun in set(path.glob("LOG.old.*")) - logs:
            begun.replace(path / "LOG")
        if is_full(error):
            raise DiskFull(f"RocksDB can't open {path}: {text}") from error
        if "Corruption: " in text:
            # Whatever is damaged, RocksDB adds that the MANIFEST may be; that has been read before.
            raise damaged(path, text.partition("  The file ")[0]) from error
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
