"""The SlateDB engine: an LSM tree whose files are objects in a bucket, or files of a directory.

::

    00 | "layout"      MessagePack [version, names of the tables]: a table's byte is its place + 1
    00 | "beat"        nothing; written so that the log goes on, as a sign of life
    nn | key           a row of table nn

Commits go to the library's memory, where reads find them; :meth:`SlateEngine.sync` writes the
write-ahead log to the store, one object for everything since the last. The library never does so
by itself, so that each write of the log is paid for by a verb that waits for it.

One writer owns a database. A second that opens it fences the first: whatever that one then writes
is refused by the store, by a conditional PUT, and it finds out at its next sync or poll. An owner
that has nothing to write writes a *beat* now and then: who watches its log
(:mod:`~penstock.engines.slatedb.heartbeat`) can tell that it is there.

The library repeats for ever what an object store refuses or does not answer. A sync waits for it.
Once that takes long the engine is *away*; a sync that has waited too long fails, and no more writes
are taken until the library has got through with what it has.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from slatedb.uniffi import (
    CloseOptions,
    CloseReason,
    DbBuilder,
    DbCache,
    DefaultMetricsRecorder,
    Error,
    FlushOptions,
    FlushType,
    MokaCacheOptions,
    Settings,
)

from penstock.clock import SystemClock
from penstock.engines.slatedb.binding import CallTimeout, call, filled
from penstock.engines.slatedb.cache import ReadCache
from penstock.engines.slatedb.location import WalFiles, fenced, translate, translate_open
from penstock.engines.slatedb.tables import SILENCE_S, Rows, SlateBatch, SlateTable, SlateView
from penstock.errors import InvalidInput, PenstockError, StorageFailed, StoreMismatch
from penstock.limits import HEARTBEAT_MS, READ_CACHE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from slatedb.uniffi import Db

    from penstock.engines import Batch
    from penstock.engines.slatedb.location import Place

__all__ = ["FLUSH_MS", "LAYOUT_KEY", "SlateEngine", "families_of", "read_layout"]

T = TypeVar("T")

# The least time from one write of the log to the next: under load, what one object costs is shared
# by all that gathers meanwhile. A directory has no price for each file.
FLUSH_MS: Final[Mapping[str, int]] = {"file": 0, "s3": 20}
LAYOUT_KEY: Final = b"\0layout"
_LAYOUT: Final = 1
_BEAT_KEY: Final = b"\0beat"
_WATCH_S: Final = 0.25
_BLOCK_CACHE_BYTES: Final = 64 << 20
_RANGE_PAGE: Final = 256
# A restart reads every object of the log that is not in a file of rows yet: so many may be left by
# a broker that is killed, and so many by one that is closed.
_LONG_LOG: Final = 256
_LEFT_AT_CLOSE: Final = 32
# How often objects that no manifest needs are looked for, and how old they have to be: under a
# steady load as many are left as come in both times together. A file of rows is written before the
# manifest that names it, so its age must be beyond the longest compaction.
_COLLECT_EVERY: Final = "30s"
_COLLECT_AFTER: Final[Mapping[str, str]] = {
    "wal": "60s",
    "manifest": "300s",
    "compacted": "300s",
    "compactions": "300s",
}
_TO_LOG: Final = FlushOptions(flush_type=FlushType.WAL)
# From here on a sync that waits is no longer taken for one that is slow.
_AWAY_S: Final = 5.0
_TO_ROWS: Final = FlushOptions(flush_type=FlushType.MEM_TABLE)


def _settings(place_kind: str) -> Settings:
    settings = Settings.default()
    # The committer says when.
    settings.set("flush_interval", "null")
    # What may wait in memory while the object store is slow; commits wait from there on.
    settings.set("max_unflushed_bytes", str(256 << 20))
    settings.set("l0_sst_size_bytes", str(32 << 20))
    for kind, age in _COLLECT_AFTER.items():
        settings.set(f"garbage_collector_options.{kind}_options.interval", f'"{_COLLECT_EVERY}"')
        settings.set(f"garbage_collector_options.{kind}_options.min_age", f'"{age}"')
    if place_kind == "file":
        # The library keeps in files how far it has collected, and can't replace a file of a
        # directory under a condition: it would collect manifests once and never again.
        settings.set("garbage_collector_options.boundary_files_enabled", "false")
    return settings


def families_of(rows: Rows, place: Place) -> dict[str, bytes]:
    """Read which tables a database has, and their bytes; none if it is empty."""
    record = rows.get(LAYOUT_KEY)
    if record is None:
        if rows.scan(b"\0", b"\xff" * 8, 1):
            raise StoreMismatch(f"{place} holds a SlateDB database that is not a Penstock store")
        return {}
    return read_layout(record, place)


def read_layout(record: bytes, place: Place) -> dict[str, bytes]:
    """Decode which tables a database has, and their bytes."""
    try:
        version, names = msgspec.msgpack.decode(record, type=tuple[int, list[str]])
    except (msgspec.MsgspecError, ValueError) as error:
        raise StoreMismatch(f"{place}: the list of its tables does not decode: {error}") from error
    if version > _LAYOUT:
        raise StoreMismatch(
            f"{place} has layout {version}; this version of Penstock reads up to {_LAYOUT}: "
            "use a newer one"
        )
    return {name: bytes([at]) for at, name in enumerate(names, 1)}


class SlateEngine:
    """A SlateDB database, owned by this process until it is closed or somebody else opens it."""

    def __init__(self, place: Place, tables: Iterable[str], *, flush_ms: int | None = None) -> None:
        self.place = place
        self._failure: PenstockError | None = None
        self._stop = threading.Event()
        self._syncing = threading.Lock()
        self._seconds = SystemClock().seconds
        self._flush_s = (FLUSH_MS[place.kind] if flush_ms is None else flush_ms) / 1000
        self._flushed_at = 0.0
        self._beat_at = self._seconds()
        # Objects of the log since the last file of rows.
        self._log_objects = 0
        self._lost: Callable[[PenstockError], None] | None = None
        self._look = threading.Event()
        # Since when a sync waits; and why no writes are taken, once one has waited for too long.
        self._waiting_since: float | None = None
        self._silent: StorageFailed | None = None
        self._metrics = DefaultMetricsRecorder()
        self._db = self._build()
        self._log_objects = self.requests().get("get", 0) // 2
        self._cache = ReadCache(READ_CACHE_BYTES)
        self._rows = Rows(self._db, place, self.check)
        self._wal = WalFiles(place.root) if place.kind == "file" else None
        try:
            self._families = self._lay_out(tables)
        except BaseException:
            self._shut_down(FlushType.WAL)
            raise
        self._tables = {
            name: SlateTable(self._rows, name, family, self._cache)
            for name, family in self._families.items()
            if name in set(tables)
        }
        self._watcher = threading.Thread(target=self._watch, name="penstock-slatedb", daemon=True)
        self._watcher.start()

    def _build(self) -> Db:
        builder = DbBuilder(self.place.path, self.place.store())
        builder.with_settings(_settings(self.place.kind))
        builder.with_metrics_recorder(self._metrics)
        cache = MokaCacheOptions(
            max_capacity=_BLOCK_CACHE_BYTES, time_to_live=None, time_to_idle=None
        )
        builder.with_db_cache(DbCache.new_moka_cache(cache), 0)
        try:
            return call(builder.build(), SILENCE_S)
        except (Error, CallTimeout) as error:
            translate_open(error, self.place)

    def _lay_out(self, tables: Iterable[str]) -> dict[str, bytes]:
        """Give every table its byte, for good."""
        families = families_of(self._rows, self.place)
        new = [name for name in tables if name not in families]
        if new:
            names = [*families, *new]
            record = msgspec.msgpack.encode((_LAYOUT, names))
            self._run(self._db.write(filled([(LAYOUT_KEY, record)])))
            self.sync()
            families = {name: bytes([at]) for at, name in enumerate(names, 1)}
        return families

    # --- what the interface asks for -------------------------------------------------------

    def table(self, name: str) -> SlateTable:
        """Return a table named at open."""
        return self._tables[name]

    @property
    def away(self) -> StorageFailed | None:
        """Why nothing becomes durable at present."""
        since = self._waiting_since
        waited_s = 0.0 if since is None else self._seconds() - since
        if self._silent is None and waited_s >= _AWAY_S:
            return StorageFailed(f"{self.place} has taken no write for {waited_s:.0f} s")
        return self._silent

    def recover(self, alone: AbstractContextManager[None], load: Callable[[], None]) -> None:
        """Wait until the library has got through with what it has; then take writes again."""
        if self._silent is None:
            return
        with self._syncing:
            self._run(self._db.flush_with_options(_TO_LOG), _AWAY_S)
            self._sync_files()
        with alone:
            # A commit that was given up may have been made after all.
            self._cache.clear()
            load()
            self._silent = None

    def free_bytes(self) -> None:
        """Return None: an object store does not tell."""

    def batch(self, *, growth: int = 0) -> SlateBatch:  # noqa: ARG002 - there is no reserve
        """Begin a batch."""
        self._check_writable()
        return SlateBatch()

    def commit(self, batch: Batch) -> None:
        """Apply a batch: to the library's memory, until the next sync."""
        assert isinstance(batch, SlateBatch)
        self._check_writable()
        for begin, end in batch.ranges:
            self._fill_range(batch, begin, end)
        rows = batch.rows
        if rows:
            self._cache.begin()
            self._run(self._db.write(filled(rows.items())))
            self._cache.put_committed(rows.items())

    def view(self) -> SlateView:
        """Pin the present state for reading."""
        self.check()
        snapshot = self._run(self._db.snapshot())
        return SlateView(snapshot, self.place, self._families, self.check)

    def sync(self) -> None:
        """Write the log, unless the last write of it was a moment ago: then after that moment."""
        with self._syncing:
            self._check_writable()
            pause_s = self._flushed_at + self._flush_s - self._seconds()
            if pause_s > 0:
                self._stop.wait(pause_s)
            self._flushed_at = self._waiting_since = self._seconds()
            try:
                self._run(self._db.flush_with_options(_TO_LOG))
            finally:
                self._waiting_since = None
            self._log_objects += 1
            self._sync_files()

    def checkpoint(self, path: Path) -> None:
        """Refuse: a copy of an object store is made by the object store."""
        raise InvalidInput(
            f"{self.place} can't be copied to {path}: copy the objects while no broker has it open"
        )

    def close(self) -> None:
        """Sync and let go of the database."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._look.set()
        try:
            if self._failure is None:
                self.sync()
        except StorageFailed as error:
            raise type(error)(f"the last changes may not be durable: {error}") from error
        finally:
            long_log = self._log_objects > _LEFT_AT_CLOSE
            self._shut_down(FlushType.MEM_TABLE if long_log else FlushType.WAL)
            self._rows.close()

    # --- what only this engine has ---------------------------------------------------------

    def check(self) -> None:
        """Raise if this engine is known to be of no more use: fenced, or not able to write."""
        if self._failure is not None:
            # The same error for every caller, without the way that it has come up before.
            raise self._failure.with_traceback(None)

    def _check_writable(self) -> None:
        self.check()
        if self._silent is not None:
            raise StorageFailed(f"the store takes no writes, and tries again: {self._silent}")

    def on_lost(self, told: Callable[[PenstockError], None]) -> None:
        """Call back, from the thread that watches, when :meth:`check` begins to raise."""
        self._lost = told

    def requests(self) -> dict[str, int]:
        """Count the requests to the object store so far: get, list, put, delete."""
        counts: dict[str, int] = {}
        for metric in self._metrics.metrics_by_name("slatedb.object_store.request_count"):
            labels = {label.key: label.value for label in metric.labels}
            value: Any = metric.value
            name = labels.get("api", "other")
            counts[name] = counts.get(name, 0) + value[0]
        return counts

    def bytes_written(self) -> int:
        """Count the bytes of log, flushed tables and compactions so far."""
        total = 0
        for name in (
            "slatedb.wal.wal_flush_bytes",
            "slatedb.db.l0_flush_bytes",
            "slatedb.compactor.bytes_compacted",
        ):
            for metric in self._metrics.metrics_by_name(name):
                value: Any = metric.value
                total += value[0]
        return total

    # --- inside ----------------------------------------------------------------------------

    def _fill_range(self, batch: SlateBatch, begin: bytes, end: bytes) -> None:
        while rows := self._rows.scan(begin, end, _RANGE_PAGE):
            for key, _ in rows:
                batch.rows.setdefault(key, None)
            if len(rows) < _RANGE_PAGE:
                return
            begin = rows[-1][0] + b"\0"

    def _run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a write. If it fails, what the store has is not known: nothing more is done.

        If it has no end, the library goes on with it.
        """
        try:
            return call(work, timeout_s or SILENCE_S)
        except CallTimeout as error:
            if self._silent is None:
                self._silent = StorageFailed(f"{self.place} has taken no write: {error}")
            raise self._silent.with_traceback(None) from error
        except Error as error:
            try:
                translate(error, self.place)
            except PenstockError as ours:
                self._lose(ours)
                raise

    def _sync_files(self) -> None:
        if self._wal is not None:
            try:
                self._wal.sync()
            except OSError as error:
                self._lose(StorageFailed(f"{self.place}: fsync failed: {error}"))
                self.check()

    def _lose(self, failure: PenstockError) -> None:
        if self._failure is None:
            self._failure = failure
            # Whoever is told takes a lock that this thread may have.
            self._look.set()

    def _watch(self) -> None:
        """Look whether another writer has been noticed; the library polls for one."""
        while self._failure is None:
            self._look.wait(_WATCH_S)
            if self._stop.is_set():
                return
            reason = self._db.status().close_reason
            if reason is CloseReason.FENCED:
                self._lose(fenced(self.place))
            elif reason is not None:
                self._lose(StorageFailed(f"{self.place}: SlateDB has stopped: {reason.name}"))
            elif self._log_objects >= _LONG_LOG:
                self._shorten_log()
            else:
                self._beat()
        if self._lost is not None:
            self._lost(self._failure)

    def _beat(self) -> None:
        """Give a sign of life, unless the log has been written of late or is being written."""
        now = self._seconds()
        if now - max(self._flushed_at, self._beat_at) < HEARTBEAT_MS / 1000:
            return
        self._beat_at = now
        if self._syncing.locked():
            return
        # Nobody is promised anything by it: if it fails, nothing is in doubt, and this thread has
        # other things to see. Not by sync(), for whose lock a verb would have to wait.
        with contextlib.suppress(Error, CallTimeout):
            call(self._db.write(filled([(_BEAT_KEY, b"\1")])), _AWAY_S)
            call(self._db.flush_with_options(_TO_LOG), _AWAY_S)
            self._log_objects += 1

    def _shorten_log(self) -> None:
        """Have what is in memory written to a file of rows, while commits go on."""
        objects = self._log_objects
        # If it fails, the next sync has the same trouble and tells of it.
        with contextlib.suppress(Error, CallTimeout):
            call(self._db.flush_with_options(_TO_ROWS), SILENCE_S)
        self._log_objects -= objects

    def _shut_down(self, flush: FlushType) -> None:
        failed = self._failure is not None or self._silent is not None
        options = CloseOptions(flush_type=None if failed else flush)
        with contextlib.suppress(Error, CallTimeout):
            call(self._db.shutdown_with_options(options), SILENCE_S)
