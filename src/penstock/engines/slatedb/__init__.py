"""The SlateDB engine: an LSM tree whose files are objects in a bucket, or files of a directory.

::

    00 | "layout"      MessagePack [version, names of the tables]: a table's byte is its place + 1
    00 | "beat"        01: so that the log goes on, as a sign of life; 00: its owner has closed it
    nn | key           a row of table nn

Commits go to the library's memory, where reads find them; :meth:`SlateEngine.sync` writes the
write-ahead log to the store, one object for everything since the last. The library never does so
by itself, so that each write of the log is paid for by a verb that waits for it.

One writer owns a database. A second that opens it fences the first: the store refuses whatever the
first then writes, by a conditional PUT, and the first finds out at its next sync or poll. An owner
that has nothing to write writes a *beat* now and then, so that a standby that watches its log
(:class:`~penstock.engines.slatedb.objects.OwnerHeartbeat`) can tell that it is there. An owner that
closes the database writes a last beat, which hands the database over to the standby.

The library repeats for ever what an object store refuses or does not answer. A sync waits for it.
Once that takes long the engine is *away*; a sync that has waited too long fails, and the engine
takes no more writes until the library has written everything that it has.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from slatedb import uniffi as slate
from slatedb.uniffi import Error

from penstock.clock import SystemClock
from penstock.engines import Engine, View, keep_in_forks, rows_of
from penstock.engines.slatedb.binding import (
    CallTimeout,
    call,
    fence_error,
    make_batch,
    translate,
    translate_open,
)
from penstock.engines.slatedb.objects import LogFiles
from penstock.engines.slatedb.tables import (
    BEAT_KEY,
    CLOSED,
    LAYOUT,
    LAYOUT_KEY,
    SILENCE_S,
    ReadCache,
    Rows,
    SlateBatch,
    SlateTable,
    families_of,
    make_tables,
)
from penstock.errors import InvalidInput, PenstockError, StorageFailed
from penstock.limits import HEARTBEAT_MS, READ_CACHE_BYTES
from penstock.waiter import Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from penstock.engines import Batch
    from penstock.engines.slatedb.binding import SlateLocation

T = TypeVar("T")

# The least time from one write of the log to the next: under load, all commits that gather
# meanwhile share the cost of one object. A directory has no price for each file.
FLUSH_MS: Final[Mapping[str, int]] = {"file": 0, "s3": 20}
_WATCH_S: Final = 0.25
_BLOCK_CACHE_BYTES: Final = 64 << 20
# A restart reads every object of the log that is not in a file of rows yet: so many may be left by
# a broker that is killed, and so many by one that is closed.
_LONG_LOG: Final = 256
_LEFT_AT_CLOSE: Final = 32
# How often the library looks for objects that no manifest needs, and how old they have to be: under
# a steady load as many are left as come in both times together. A file of rows is written before
# the manifest that names it, so its age must be beyond the longest compaction.
_COLLECT_EVERY: Final = "30s"
_COLLECT_AFTER: Final[Mapping[str, str]] = {
    "wal": "60s",
    **dict.fromkeys(("manifest", "compacted", "compactions"), "300s"),
}
_TO_LOG: Final = slate.FlushOptions(flush_type=slate.FlushType.WAL)
_TO_ROWS: Final = slate.FlushOptions(flush_type=slate.FlushType.MEM_TABLE)
# A sync that waits longer is no longer taken for a slow one.
_AWAY_S: Final = 5.0


def _settings(kind: str) -> slate.Settings:
    settings = slate.Settings.default()
    # Group commit says when.
    settings.set("flush_interval", "null")
    # The bytes that may wait in memory while the object store is slow; from there on commits wait.
    settings.set("max_unflushed_bytes", str(256 << 20))
    settings.set("l0_sst_size_bytes", str(32 << 20))
    for objects, age in _COLLECT_AFTER.items():
        options = f"garbage_collector_options.{objects}_options"
        settings.set(f"{options}.interval", f'"{_COLLECT_EVERY}"')
        settings.set(f"{options}.min_age", f'"{age}"')
    if kind == "file":
        # The library notes in files how far it has collected, and can't replace a file of a
        # directory under a condition: it would collect manifests once and never again.
        settings.set("garbage_collector_options.boundary_files_enabled", "false")
    return settings


class SlateEngine(Engine):
    """A SlateDB database, owned by this process until it is closed or another one opens it."""

    durable_on_commit = False

    def __init__(
        self, location: SlateLocation, tables: Iterable[str], *, flush_ms: int | None = None
    ) -> None:
        keep_in_forks(self)
        self.location = location
        # Why the database is lost to this process; and why it takes no writes for now.
        self._failure: PenstockError | None = None
        self._unanswered: StorageFailed | None = None
        self._on_lost: Callable[[PenstockError], None] | None = None
        self._stop = False
        # The watcher waits here.
        self._pause = Waiter()
        self._syncing = threading.Lock()
        self._seconds = SystemClock().seconds
        self._flush_s = (FLUSH_MS[location.kind] if flush_ms is None else flush_ms) / 1000
        self._flushed_at = 0.0
        self._beat_at = self._seconds()
        # Since when a sync waits.
        self._waiting_since: float | None = None
        self._metrics = slate.DefaultMetricsRecorder()
        self._db = self._build()
        # Objects of the log since the last file of rows.
        self._log_objects = self.requests().get("get", 0) // 2
        self._cache = ReadCache(READ_CACHE_BYTES)
        self._rows = Rows(self._db, location, self.check)
        self._log_files = LogFiles(location.root) if location.kind == "file" else None
        try:
            self._families = self._lay_out(tables)
        except BaseException:
            self._shut_down(slate.FlushType.WAL)
            raise
        self._tables = {
            name: SlateTable(self._rows, name, self._families[name], self._cache) for name in tables
        }
        self._watcher = threading.Thread(target=self._watch, name="penstock-slatedb", daemon=True)
        self._watcher.start()

    def _build(self) -> slate.Db:
        builder = slate.DbBuilder(self.location.path, self.location.store())
        builder.with_settings(_settings(self.location.kind))
        builder.with_metrics_recorder(self._metrics)
        cache = slate.MokaCacheOptions(
            max_capacity=_BLOCK_CACHE_BYTES, time_to_live=None, time_to_idle=None
        )
        builder.with_db_cache(slate.DbCache.new_moka_cache(cache), 0)
        try:
            return call(builder.build(), SILENCE_S)
        except (Error, CallTimeout) as error:
            translate_open(error, self.location)

    def _lay_out(self, tables: Iterable[str]) -> dict[str, bytes]:
        """Give every table its byte, for good."""
        families = families_of(self._rows, self.location)
        names = list(dict.fromkeys([*families, *tables]))
        if len(names) > len(families):
            record = msgspec.msgpack.encode((LAYOUT, names))
            self._run(self._db.write(make_batch([(LAYOUT_KEY, record)])))
            self.sync()
        return {name: bytes([at]) for at, name in enumerate(names, 1)}

    def table(self, name: str) -> SlateTable:
        """Return a table named at open."""
        return self._tables[name]

    @property
    def away(self) -> StorageFailed | None:  # type: ignore[override]
        """Why nothing becomes durable at present."""
        since = self._waiting_since
        waited_s = 0.0 if since is None else self._seconds() - since
        if self._unanswered is None and waited_s >= _AWAY_S:
            return StorageFailed(f"{self.location} has taken no write for {waited_s:.0f} s")
        return self._unanswered

    def recover(self, alone: AbstractContextManager[None], load: Callable[[], None]) -> None:
        """Wait until the library has written everything that it has; then take writes again."""
        if self._unanswered is None:
            return
        with self._syncing:
            self._run(self._db.flush_with_options(_TO_LOG), _AWAY_S)
            self._sync_files()
        with alone:
            # A commit that was given up may have been made after all.
            self._cache.clear()
            load()
            self._unanswered = None

    def batch(self, *, growth: int = 0) -> SlateBatch:  # noqa: ARG002 - there is no reserve
        """Begin a batch."""
        self._check_writable()
        return SlateBatch()

    def commit(self, batch: Batch) -> None:
        """Apply a batch: to the library's memory, until the next sync."""
        assert isinstance(batch, SlateBatch)
        self._check_writable()
        rows = batch.rows
        for begin, end in batch.ranges:
            source: Any = self._rows
            for key, _ in rows_of(source, begin, end):
                rows.setdefault(key, None)
        if rows:
            self._cache.begin()
            try:
                self._run(self._db.write(make_batch(rows.items())))
                self._cache.put(rows.items())
            except PenstockError:
                raise
            except BaseException:
                # Out of a signal handler. Once another write is made, this one has been, or never
                # will be: writes keep their order.
                try:
                    self._run(self._db.write(make_batch([(BEAT_KEY, b"\1")])))
                finally:
                    self._cache.clear()
                raise

    def view(self) -> View:
        """Pin the present state for reading."""
        self.check()
        snapshot = self._run(self._db.snapshot())
        rows = Rows(snapshot, self.location, self.check)
        return View(make_tables(rows, self._families), rows.close)

    def sync(self) -> None:
        """Write the log; if the last write of it was less than ``flush_ms`` ago, wait for that."""
        with self._syncing:
            self._check_writable()
            pause_s = self._flushed_at + self._flush_s - self._seconds()
            if pause_s > 0 and not self._stop:
                Waiter().wait(pause_s)
            self._flushed_at = self._waiting_since = self._seconds()
            try:
                self._run(self._db.flush_with_options(_TO_LOG))
            finally:
                self._waiting_since = None
            self._log_objects += 1
            self._sync_files()

    def _sync_files(self) -> None:
        if self._log_files is not None:
            try:
                self._log_files.sync()
            except OSError as error:
                self._lose(StorageFailed(f"{self.location}: fsync failed: {error}"))
                self.check()

    def checkpoint(self, path: Path) -> None:
        """Refuse: a copy that is not incremental would read the whole bucket each time."""
        raise InvalidInput(
            f"{self.location} can't be copied to {path} as a directory: penstock backup create "
            f"PLACE --url {self.location}"
        )

    def on_lost(self, told: Callable[[PenstockError], None]) -> None:
        """Call back, from the thread that watches, when :meth:`check` begins to raise."""
        self._on_lost = told

    def close(self) -> None:
        """Sync and close the database."""
        if self._stop:
            return
        self._stop = True
        self._pause.wake()
        try:
            if self._failure is None:
                self.sync()
                self._hand_over()
        except StorageFailed as error:
            raise type(error)(f"the last changes may not be durable: {error}") from error
        finally:
            long_log = self._log_objects > _LEFT_AT_CLOSE
            self._shut_down(slate.FlushType.MEM_TABLE if long_log else slate.FlushType.WAL)
            self._rows.close()

    def _hand_over(self) -> None:
        """Tell a standby that nobody owns the database any more, by the last object of the log."""
        # A beat of the watcher must not come after it.
        self._watcher.join(_AWAY_S)
        # If it fails, the standby finds out by waiting: so it need not be synced either.
        self._write_beat(CLOSED)

    def requests(self) -> dict[str, int]:
        """Count the requests to the object store so far: get, list, put, delete."""
        counts: dict[str, int] = {}
        for metric in self._metrics.metrics_by_name("slatedb.object_store.request_count"):
            name = next((each.value for each in metric.labels if each.key == "api"), "other")
            value: Any = metric.value
            counts[name] = counts.get(name, 0) + value[0]
        return counts

    # --- writes that fail ------------------------------------------------------------------

    def check(self) -> None:
        """Raise if this engine is known to be of no more use: fenced, or not able to write."""
        if self._failure is not None:
            # The same error for every caller, without its earlier traceback.
            raise self._failure.with_traceback(None)

    def _check_writable(self) -> None:
        self.check()
        if self._unanswered is not None:
            raise StorageFailed(f"the store takes no writes, and tries again: {self._unanswered}")

    def _run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a write. If it fails, the state of the store is unknown, and the engine is lost.

        If it takes too long, the library goes on with it.
        """
        try:
            return call(work, timeout_s or SILENCE_S)
        except CallTimeout as error:
            if self._unanswered is None:
                self._unanswered = StorageFailed(f"{self.location} has taken no write: {error}")
            raise self._unanswered.with_traceback(None) from error
        except Error as error:
            try:
                translate(error, self.location)
            except PenstockError as ours:
                self._lose(ours)
                raise

    def _lose(self, failure: PenstockError) -> None:
        if self._failure is None:
            self._failure = failure
            # The watcher calls back: the callback takes a lock that this thread may have.
            self._pause.wake()

    def _shut_down(self, flush: slate.FlushType) -> None:
        failed = self._failure is not None or self._unanswered is not None
        options = slate.CloseOptions(flush_type=None if failed else flush)
        with contextlib.suppress(Error, CallTimeout):
            call(self._db.shutdown_with_options(options), SILENCE_S)

    # --- the thread that watches -----------------------------------------------------------

    def _watch(self) -> None:
        """Notice that another writer has fenced this one; keep the log short and alive."""
        while self._failure is None:
            self._pause.wait(_WATCH_S)
            if self._stop:
                return
            reason = self._db.status().close_reason
            if reason is slate.CloseReason.FENCED:
                self._lose(fence_error(self.location))
            elif reason is not None:
                self._lose(StorageFailed(f"{self.location}: SlateDB has stopped: {reason.name}"))
            elif self._log_objects >= _LONG_LOG:
                self._shorten_log()
            else:
                self._beat()
        if self._on_lost is not None:
            self._on_lost(self._failure)

    def _beat(self) -> None:
        """Write a sign of life, unless the log was written of late or is being written."""
        now = self._seconds()
        if now - max(self._flushed_at, self._beat_at) < HEARTBEAT_MS / 1000:
            return
        self._beat_at = now
        if self._syncing.locked():
            return
        self._write_beat(b"\1")

    def _write_beat(self, value: bytes) -> None:
        # It promises nothing to anybody: if it fails, nothing is in doubt. Not by sync(), for whose
        # lock a verb would have to wait.
        with contextlib.suppress(Error, CallTimeout):
            call(self._db.write(make_batch([(BEAT_KEY, value)])), _AWAY_S)
            call(self._db.flush_with_options(_TO_LOG), _AWAY_S)
            self._log_objects += 1

    def _shorten_log(self) -> None:
        """Write the rows in memory to a file of rows, while commits go on."""
        objects = self._log_objects
        # If it fails, the next sync has the same trouble and tells of it.
        with contextlib.suppress(Error, CallTimeout):
            call(self._db.flush_with_options(_TO_ROWS), SILENCE_S)
        self._log_objects -= objects
