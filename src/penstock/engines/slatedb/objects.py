"""The objects of a SlateDB database: checks before it is opened, readers beside its owner.

::

    manifest/N     the newest names the files of rows and the last object of the log in them
    compacted/ID   files of rows
    wal/N          objects of the log, numbered without gaps

The library begins with the first object of the log that it finds, takes the next missing one for
the log's end, one of no bytes for the mark of a new writer, and a location without a manifest for
an empty one: it would go on there, and objects behind would be lost. In a directory the check looks
for every file. The library can't list a bucket: there the check asks for the log object by object
and probes beyond its end; a missing file of rows is met when it is read.

Nothing here writes rows, and nothing disturbs the owner. A reader that is to keep to one moment
makes the library write a *checkpoint* into the manifest, so that files which the owner has replaced
are kept meanwhile; :func:`peek` does not even do that.
"""

from __future__ import annotations

import contextlib
import threading
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

from slatedb.uniffi import (
    AdminBuilder,
    DbReaderBuilder,
    Error,
    ReaderMode,
    ReaderOptions,
    SlateDbWalReader,
)

from penstock.clock import SystemClock
from penstock.engines import View
from penstock.engines.disk import sync_path
from penstock.engines.slatedb.binding import (
    NO_DATABASE,
    CallTimeout,
    call,
    call_all,
    translate_open,
)
from penstock.engines.slatedb.tables import (
    BEAT_KEY,
    CLOSED,
    SILENCE_S,
    Rows,
    families_of,
    make_tables,
)
from penstock.errors import StorageFailed, StoreDamaged, StoreMismatch
from penstock.limits import MAX_READER_SNAPSHOT_MS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slatedb.uniffi import DbReader, ObjectStore, VersionedManifest

    from penstock.engines import Table
    from penstock.engines.slatedb.binding import SlateLocation

_ANSWER_S: Final = 60.0
# A store that takes longer says nothing about the owner.
_HEARTBEAT_ANSWER_S: Final = 10.0
# How far beyond the log's end in a bucket it is probed for objects that a gap hides.
_PROBES: Final = [1 << n for n in range(17)]
# Words of the library for an object of the log that is not there.
TRUNCATED: Final = "WAL was truncated"
_SHOWN: Final = 5
# Objects of the log in a bucket that are asked for at the same time.
_AT_ONCE: Final = 32
# Few: wrong credentials and missing buckets are reported soon.
_RETRIES: Final = 2
_MEMORY_BYTES: Final = 64 << 20
# Missing objects of the log that are looked for.
_MISSING_MAX: Final = 1_000
# The library polls once right after it has opened a reader, and then only after the interval.
_SETTLE_S: Final = 0.05


def log_object(number: int) -> str:
    """Return the name of an object of the log."""
    return f"wal/{number:020}.sst"


def _read_manifest(
    location: SlateLocation, store: ObjectStore, answer_s: float = _ANSWER_S
) -> VersionedManifest | None:
    return call(AdminBuilder(location.path, store).build().read_manifest(None), answer_s)


# --- checks before opening ------------------------------------------------------------------------


def check_objects(location: SlateLocation) -> None:
    """Raise StoreDamaged if objects are missing; do nothing if there is no database at all."""
    if location.kind == "file" and not Path(location.root).is_dir():
        return
    store = location.store()
    find_missing = _missing_files if location.kind == "file" else _missing_log
    try:
        manifest = _read_manifest(location, store)
        while missing := find_missing(location, store, manifest):
            # An owner may have written a new manifest, and removed objects that it needs no more.
            before, manifest = manifest, _read_manifest(location, store)
            if (before and before.id) == (manifest and manifest.id):
                shown = ", ".join(missing[:_SHOWN]) + (" …" if len(missing) > _SHOWN else "")
                raise StoreDamaged(
                    f"{location} holds a damaged store: objects are missing or empty ({shown}). "
                    "Nothing was changed. Restore a copy of its objects, or read what is left into "
                    f"a new store: penstock salvage {location} TARGET"
                )
    except (Error, CallTimeout) as error:
        translate_open(error, location)


def _missing_files(
    location: SlateLocation, store: ObjectStore, manifest: VersionedManifest | None
) -> list[str]:
    """Name the missing files of a directory, by the manifest and the numbers of the log."""
    root = Path(location.root)
    log: dict[int, int] = {}
    for each in (root / "wal").glob("*.sst"):
        # An owner may remove some meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if each.stem.isdigit():
                log[int(each.stem)] = each.stat().st_size
    rows = {each.stem for each in (root / "compacted").glob("*.sst")}
    if manifest is None:
        return ["manifest/*"] if log or rows else []
    trees = [manifest, *manifest.segments]
    views = [view for tree in trees for view in tree.l0]
    views += [view for tree in trees for run in tree.compacted for view in run.sst_views]
    needed = {view.sst.id.value for view in views}
    numbers = range(manifest.replay_after_wal_id + 1, max([manifest.next_wal_sst_id - 1, *log]) + 1)
    missing = [f"compacted/{name}.sst" for name in sorted(needed - rows)]
    # A damaged manifest may have any number.
    missing += [log_object(n) for n in islice((n for n in numbers if n not in log), _MISSING_MAX)]
    # An owner may have written some while the directory was listed.
    missing = [name for name in missing if not (root / name).exists()]
    return missing or _empty_objects(SlateDbWalReader(location.path, store), manifest, log)


def _empty_objects(
    logs: SlateDbWalReader, manifest: VersionedManifest, sizes: dict[int, int]
) -> list[str]:
    """Name the empty objects between which changes are missing: these were no marks of writers."""
    flushed = manifest.replay_after_wal_id
    whole = sorted(number for number, size in sizes.items() if size and number > flushed)
    for before, after in pairwise([flushed, *whole]):
        if after - before > 1:
            ended = [manifest.last_l0_seq] if before == flushed else _sequences(logs, [before])
            begun = _sequences(logs, [after])
            if ended and begun and begun[0] > ended[-1] + 1:
                return [log_object(n) for n in islice(range(before + 1, after), _MISSING_MAX)]
    return []


def _missing_log(
    location: SlateLocation, store: ObjectStore, manifest: VersionedManifest | None
) -> list[str]:
    """Name the first object of the log in a bucket that is missing before others."""
    if manifest is None:
        # The library reads no log without a manifest; but every owner has a list of compactions.
        admin = AdminBuilder(location.path, store).build()
        found = call(admin.read_compactions(None), _ANSWER_S) is not None
        return ["manifest/*"] if found else []
    reader = SlateDbWalReader(location.path, store)
    first = manifest.replay_after_wal_id + 1
    # The library looks for the end in steps that grow: it may step over a gap.
    end: int = call(reader.last_wal_file_id(first - 1), _ANSWER_S)
    for begin in range(first, end, _AT_ONCE):
        numbers = range(begin, min(begin + _AT_ONCE, end))
        if _sequences(reader, numbers) is None:
            return [log_object(n) for n in numbers if _sequences(reader, [n]) is None]
    hidden = end + 1 < manifest.next_wal_sst_id or any(
        call(reader.last_wal_file_id(end + probe), _ANSWER_S) > end + probe for probe in _PROBES
    )
    # An owner may have written it meanwhile, and others after it.
    is_missing = hidden and _sequences(reader, [end + 1]) is None
    return [log_object(end + 1)] if is_missing else []


def _sequences(logs: SlateDbWalReader, numbers: Sequence[int]) -> list[int] | None:
    """Return the sequence numbers in objects of the log, in order; None if one is not there."""
    try:
        begun = call_all([logs.iterator(number) for number in numbers], _ANSWER_S)
        found = call_all([each.next() for each in begun], _ANSWER_S)
    except Error.Data as error:
        if TRUNCATED not in error.message:
            raise
        return None
    return sorted(row.seq for each in found if each is not None for row in each.rows)


# --- readers --------------------------------------------------------------------------------------


class ReaderMoved(StorageFailed):
    """The library has moved a reader on to a later moment: rows read before are of another."""


class NoDatabase(StoreMismatch):
    """There is no database at the location yet."""


class SlateReader(View):
    """A database as it was when the reader was opened.

    It keeps to that moment for :data:`~penstock.limits.MAX_READER_SNAPSHOT_MS`, then refuses. A
    reader that is not ``pinned`` is for a single record, of whatever moment.
    """

    def __init__(
        self, location: SlateLocation, *, pinned: bool = True, replay: bool = True
    ) -> None:
        self.location = location
        self._pinned = pinned
        self._seconds = SystemClock().seconds
        self._until_s = self._seconds() + MAX_READER_SNAPSHOT_MS / 1000
        mode = ReaderMode.MANAGED_CHECKPOINT() if pinned else ReaderMode.FOLLOW_LATEST()
        self._reader = build(location, mode, replay=replay)
        self._moment = 0
        self.settle()
        try:
            self._rows = Rows(self._reader, location, self.check)
            families = families_of(self._rows, location)
        except BaseException:
            self._shut_down()
            raise
        super().__init__(make_tables(self._rows, families), self._close)

    def settle(self) -> None:
        """Take the present state of the library's reader for the moment to keep to."""
        if self._pinned:
            threading.Event().wait(_SETTLE_S)
        self._moment = self._reader.status().durable_seq

    def check(self) -> None:
        """Raise if the library's reader has moved on, or if its moment is too long ago."""
        if self._pinned and self._reader.status().durable_seq != self._moment:
            raise ReaderMoved(f"{self.location}: the reader has moved on; open it again")
        if self._seconds() > self._until_s:
            raise StorageFailed(
                f"{self.location} was opened for reading more than "
                f"{MAX_READER_SNAPSHOT_MS // 60_000} minutes ago: open it again"
            )

    def table(self, name: str) -> Table:
        """Return a table of the database."""
        if name not in self.tables:
            raise StoreMismatch(f"{self.location} has no table {name!r}: use another version")
        return self.tables[name]

    def _close(self) -> None:
        """Drop the checkpoint."""
        self._shut_down()
        self._rows.close()

    def _shut_down(self) -> None:
        with contextlib.suppress(Error, CallTimeout):
            call(self._reader.shutdown(), SILENCE_S)


def build(location: SlateLocation, mode: ReaderMode, *, replay: bool) -> DbReader:
    """Open the library's reader; with ``replay``, it reads the log too."""
    builder = DbReaderBuilder(location.path, location.store())
    builder.with_reader_mode(mode)
    builder.with_options(
        ReaderOptions(
            # A poll would move the reader on; it would also renew the checkpoint.
            manifest_poll_interval_ms=MAX_READER_SNAPSHOT_MS,
            checkpoint_lifetime_ms=3 * MAX_READER_SNAPSHOT_MS,
            max_memtable_bytes=_MEMORY_BYTES,
            skip_wal_replay=not replay,
            object_store_max_retries=_RETRIES,
        )
    )
    try:
        return call(builder.build(), SILENCE_S)
    except (Error, CallTimeout) as error:
        if isinstance(error, Error.Data) and NO_DATABASE in error.message:
            raise NoDatabase(f"{location} holds no store") from error
        translate_open(error, location)


def peek(location: SlateLocation, table: str, key: bytes) -> bytes | None:
    """Read one record without writing anything: empty if it is missing; None: no database.

    Raises every reason not to open the database: a bucket that is not there, refused credentials,
    files of something else, missing objects.
    """
    if location.holds_something_else():
        raise StoreMismatch(f"{location.root} is not empty and holds no SlateDB database")
    if location.kind == "file":
        check_objects(location)
    record = None
    # A record that was written long ago is in a file of rows; otherwise the log is read too.
    for replay in (False, True):
        try:
            reader = SlateReader(location, pinned=False, replay=replay)
        except NoDatabase:
            check_objects(location)
            return None
        with contextlib.closing(reader):
            if table in reader.tables:
                record = reader.table(table).get(key)
        if record is not None:
            break
    if location.kind == "s3":
        # After the reader has got through: of a wrong bucket or key the library never tires here.
        check_objects(location)
    return record or b""


# --- the log while somebody writes it -------------------------------------------------------------


class LogFiles:
    """Fsyncs the log of a database in a directory, which the library does not do."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)
        folder = self._root / "wal"
        folder.mkdir(parents=True, exist_ok=True)
        numbers = [int(each.stem) for each in folder.glob("*.sst") if each.stem.isdigit()]
        self._next = max(numbers, default=0) + 1

    def sync(self) -> None:
        """Fsync every file that was written since the last call."""
        first = self._next
        with contextlib.suppress(FileNotFoundError):
            while True:
                sync_path(self._root / log_object(self._next))
                self._next += 1
        if self._next > first:
            sync_path(self._root / "wal")


class OwnerHeartbeat:
    """The number of the last object of a database's log: it grows while somebody owns the database.

    Every write of an owner is one more object of its log, and an owner with nothing to write writes
    one now and then. Nothing is written here, and of the log only the last object is read, once.
    """

    def __init__(self, location: SlateLocation) -> None:
        self.location = location
        self._store = location.store()
        self._last = 0
        # The last object that was read, and whether an owner closed the database with it.
        self._read: tuple[int, bool] = 0, True

    def look(self) -> int:
        """Return the number now; 0 if there is no database yet. About ten HEAD requests."""
        try:
            after = self._last or self._first_kept()
            reader = SlateDbWalReader(self.location.path, self._store)
            self._last = call(reader.last_wal_file_id(after), _HEARTBEAT_ANSWER_S)
        except Error.Data as error:
            if NO_DATABASE not in error.message:
                translate_open(error, self.location)
        except (Error, CallTimeout) as error:
            translate_open(error, self.location)
        return self._last

    def look_again(self) -> int:
        """Return the number now, found without the number of the last look.

        The objects after that one may have been removed meanwhile, if the look was long ago.
        """
        before, self._last = self._last, 0
        self._last = max(before, self.look())
        return self._last

    def closed(self) -> bool:
        """Whether nobody owns the database: its owner has closed it, or there is none yet.

        As of the last look.
        """
        number = self._last
        if number != self._read[0]:
            logs = SlateDbWalReader(self.location.path, self._store)
            try:
                iterator = call(logs.iterator(number), _HEARTBEAT_ANSWER_S)
                found = call(iterator.next(), _HEARTBEAT_ANSWER_S)
            except (Error, CallTimeout) as error:
                # An object that an owner has removed since is not its last one.
                if isinstance(error, Error.Data) and TRUNCATED in error.message:
                    return False
                translate_open(error, self.location)
            rows = () if found is None else found.rows
            self._read = number, any((row.key, row.value) == (BEAT_KEY, CLOSED) for row in rows)
        return self._read[1]

    def _first_kept(self) -> int:
        """Return the number after which no object of the log has been removed."""
        manifest = _read_manifest(self.location, self._store, _HEARTBEAT_ANSWER_S)
        return 0 if manifest is None else manifest.replay_after_wal_id
