"""Backups of a store: plain copies of a RocksDB store, and incremental backups in a place.

A plain copy can be opened. It is there whole or not at all; a crash leaves at most a ``.part-``
directory, which can be removed::

    DEST.part-ID    checkpoint, mark, fsync of everything   ── rename ──▶   DEST

Incremental backups keep every file once, by its checksum, in a directory or a bucket::

    files/SHA256                    the bytes of a file of a store, however many backups have it
    backups/TIME-NAME.json          a backup: its files, by name, size and checksum; written last
    working/create-TIME-ID          somebody is making a backup
    working/prune-TIME-ID           somebody is removing files that no backup has

A backup that is broken off has no ``backups/`` file, and so is not listed; the next backup finds
its files, the next prune removes them. A prune and a backup exclude each other, since a backup
counts on files that are there: each writes its mark, and then looks for the other's.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import re
import shutil
import tempfile
import threading
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from penstock.clock import SystemClock
from penstock.engines.disk import sync_path
from penstock.engines.places import Directory, place_at
from penstock.errors import (
    BrokerClosed,
    InvalidInput,
    StorageFailed,
    StoreMismatch,
)
from penstock.limits import MAX_BACKUP_MS, MAX_PRUNE_MS
from penstock.readers import (
    TAKEN,
    fill_directory,
    fill_objects,
    held_objects,
    locate,
    open_copy,
    open_reader,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.broker.broker import Broker
    from penstock.broker.reader import Reader
    from penstock.engines.places import Place
    from penstock.store.check_report import AuditReport

log = logging.getLogger(__name__)

MARK: Final = "PENSTOCK"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# The folders of incremental backups in the same directory.
_RESERVED: Final = frozenset({"backups", "files", "working"})
FORMAT: Final = 1
# A RocksDB checkpoint shares files with the store, so it is made inside of the store's directory.
_CHECKPOINT: Final = "PENSTOCK-BACKUP"
_MOST_MS: Final = {"create": MAX_BACKUP_MS, "prune": MAX_PRUNE_MS}
_ROWS: Final = "compacted/"
# An owner of a store on object storage may remove objects of its log before they are copied.
_ATTEMPTS: Final = 5
# The most bytes of a file on its way that are held in memory.
_SPOOL_BYTES: Final = 16 << 20

_checkpointing = threading.Lock()


# --- plain copies -------------------------------------------------------------------------------


def backup(broker: Broker, target: Path) -> int:
    """Copy an open store to a directory that is not there yet; return the size in bytes."""
    if target.exists():
        raise InvalidInput(TAKEN.format(target))
    with fill_directory(target) as partial:
        broker.checkpoint(partial)
        # Without its mark a directory is not taken for a store.
        (partial / MARK).write_text(broker.info().design)
        return sync_tree(partial)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name in _RESERVED:
        raise InvalidInput(f"{name!r:.100} is not a backup's name: up to 128 of A-Z a-z 0-9 _ . -")


def verify(source: Path) -> AuditReport:
    """Open a backup, which is only read, and hold it to the invariants of a store."""
    if not (source / MARK).is_file():
        raise StoreMismatch(f"{source} is not a backup of a store")
    with open_copy(source) as copy:
        return check_copy(
            copy,
            str(source),
            f", or read what is left of this one into a new store: penstock salvage "
            f"rocksdb:{source} TARGET",
        )


def check_copy(copy: Reader, where: str, instead: str = "") -> AuditReport:
    """Hold a copy to the invariants of a store; StorageFailed names the first that it breaks."""
    report = copy.check()
    if not report.ok:
        first = report.violations[0]
        raise StorageFailed(
            f"{where} breaks {report.left} invariants of a store, the first in the table "
            f"{first.table}, key {first.key}: {first.text}. Use another backup{instead}"
        )
    return report


def restore(source: Path, target: Path) -> int:
    """Copy a backup that is sound to where a store is to be; return the size in bytes.

    The backup is only read, so that it can be restored again.
    """
    _check_empty(target)
    verify(source)
    with fill_directory(target) as partial:
        shutil.copytree(source, partial)
        # RocksDB writes it; backups that older versions made are without.
        (partial / "IDENTITY").touch()
        return sync_tree(partial)


def _check_empty(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidInput(f"{target} is not empty: a store is restored to where nothing is")


def sync_tree(directory: Path) -> int:
    """Fsync everything below a directory; return the size of the files."""
    size = 0
    for path in sorted(directory.rglob("*")):
        sync_path(path)
        size += path.stat().st_size if path.is_file() else 0
    sync_path(directory)
    return size


# --- incremental backups ------------------------------------------------------------------------


class BackupFile(msgspec.Struct, frozen=True):
    """A file of a store: its name, size and checksum, and when RocksDB wrote it."""

    path: str
    size: int
    sha256: str
    mtime_ns: int = 0


class Backup(msgspec.Struct, frozen=True):
    """A backup that is whole."""

    name: str
    made_at_ms: int
    engine: Literal["rocksdb", "slatedb"]
    store_id: str
    files: list[BackupFile]
    format: int = FORMAT

    @property
    def size(self) -> int:
        """The bytes of all its files."""
        return sum(each.size for each in self.files)


class Made(NamedTuple):
    """A backup, and the bytes of it that were not there before."""

    backup: Backup
    new_bytes: int


class Pruned(NamedTuple):
    """The names of the backups that were removed and kept, and the bytes that were freed."""

    removed: list[str]
    kept: list[str]
    freed_bytes: int


def backups_at(place: Place) -> list[Backup]:
    """Return the backups of a place, the oldest first."""
    found = [_read(place, name) for name in sorted(place.sizes("backups"))]
    return sorted(found, key=lambda each: each.made_at_ms)


def last_backup_ms(place: Place) -> int | None:
    """Return when the newest backup of a place was made, by the name of its file alone."""
    times = [_time_of(name) for name in place.sizes("backups")]
    return max(times, default=None)


def find(place: Place, name: str | None) -> Backup:
    """Return the newest backup of a name, or of all."""
    found = [each for each in backups_at(place) if name in {None, each.name}]
    if not found:
        which = "backup" if name is None else f"backup {name!r:.130}"
        raise InvalidInput(f"there is no {which} at {place}: see penstock backup list {place}")
    return found[-1]


def _read(place: Place, name: str) -> Backup:
    try:
        backup = msgspec.json.decode(b"".join(place.read(name)), type=Backup)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StorageFailed(f"{place}/{name} is not a backup's list of files: {error}") from None
    if backup.format != FORMAT:
        raise StorageFailed(f"{place}/{name} has format {backup.format}: use a newer Penstock")
    return backup


def _time_of(name: str) -> int:
    """Return the time in the name of a file of ``backups/`` or ``working/``; 0: there is none."""
    digits = [part for part in Path(name).name.split("-")[:2] if part.isdecimal()]
    return int(digits[0]) if digits else 0


@contextlib.contextmanager
def _working(place: Place, what: str, unless: str) -> Iterator[int]:
    """Leave a mark while the block runs, unless somebody does what it must not meet."""
    clock = SystemClock()
    began_ms = clock.now_ms()
    mark = f"working/{what}-{began_ms:015}-{clock.lease_id().hex()}"
    place.write(mark, io.BytesIO())
    try:
        for name in place.sizes("working"):
            other = name.removeprefix("working/").partition("-")[0]
            if other not in _MOST_MS or began_ms - _time_of(name) > _MOST_MS[other]:
                place.delete(name)
            elif other == unless:
                raise InvalidInput(
                    f"{place} is in use: {name} tells of a {unless} of backups; try again when it "
                    "is done, or remove that file if its process is gone"
                )
        yield began_ms
    finally:
        place.delete(mark)


# --- create ---------------------------------------------------------------------------------------


def create(
    place: Place,
    url: str,
    name: str = "",
    broker: Broker | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> Made:
    """Back a store up; ``broker`` has it open, which a store on object storage does not need.

    Once ``stopping`` says so it is broken off, with BrokerClosed.
    """
    if name:
        _check_name(name)
    with _working(place, "create", unless="prune") as began_ms:
        earlier = backups_at(place)
        names = {each.name for each in earlier}
        if not name:
            second = f"{datetime.fromtimestamp(began_ms / 1000, UTC):%Y%m%dT%H%M%SZ}"
            others = (f"{second}-{number}" for number in count(2))
            name = next(each for each in chain([second], others) if each not in names)
        if name in names:
            raise InvalidInput(f"there is a backup {name} at {place} already: choose another name")
        copier = _Copier(place, began_ms, stopping)
        if url.startswith("slatedb"):
            backup = copier.objects(url, name, earlier)
        else:
            backup = copier.checkpoint(url, name, earlier, broker)
        text = msgspec.json.encode(backup)
        place.write(f"backups/{began_ms:015}-{name}.json", io.BytesIO(text))
    seconds = round((SystemClock().now_ms() - began_ms) / 1000, 1)
    fields = {"backup": name, "place": str(place), "bytes": backup.size}
    fields |= {"new_bytes": copier.new_bytes, "seconds": seconds}
    log.info("a backup was made", extra={"fields": fields})
    return Made(backup, copier.new_bytes)


class _ObjectGoneError(StorageFailed):
    """An owner has written an object's rows to a file of rows, and removed the object."""


class _Copier:
    """Copies files of a store to a place, those that are not there yet."""

    def __init__(self, place: Place, began_ms: int, stopping: Callable[[], bool]) -> None:
        self._place = place
        self._stopping = stopping
        self._began_ms = began_ms
        self._now_ms = SystemClock().now_ms
        self._there = place.sizes("files")
        self.new_bytes = 0

    def objects(self, url: str, name: str, earlier: list[Backup]) -> Backup:
        for _ in range(_ATTEMPTS - 1):
            with contextlib.suppress(_ObjectGoneError):
                return self._objects(url, name, earlier)
        return self._objects(url, name, earlier)

    def _objects(self, url: str, name: str, earlier: list[Backup]) -> Backup:
        with held_objects(url) as held:
            known = self._known(earlier, held.store_id)
            copied: dict[str, BackupFile] = {}
            # Objects of the log first: they are not held.
            for path in sorted(held.names, key=lambda path: path.startswith(_ROWS)):
                # Files of rows have names of their own for ever; numbers of the log may come again
                # in a store that was restored.
                same = known.get((path, 0)) if path.startswith(_ROWS) else None
                try:
                    copied[path] = same or self._copy(path, held.place.read(path))
                except StorageFailed as error:
                    if isinstance(error.__cause__, FileNotFoundError):
                        raise _ObjectGoneError(str(error)) from error
                    raise
            files = [copied[path] for path in held.names]
            return Backup(name, self._began_ms, "slatedb", held.store_id, files)

    def checkpoint(
        self, url: str, name: str, earlier: list[Backup], broker: Broker | None
    ) -> Backup:
        if broker is None or not url.startswith("rocksdb:"):
            raise InvalidInput(
                f"{url!r:.100} is not backed up here: RocksDB and object storage are; a SQL "
                "database has its own backup"
            )
        info = broker.info()
        directory = locate(url)
        assert isinstance(directory, Path)
        folder = directory / _CHECKPOINT
        if not _checkpointing.acquire(blocking=False):
            raise InvalidInput("another backup of a store of this process is being made")
        try:
            # One process has the store open: what is there, a kill has left.
            shutil.rmtree(folder, ignore_errors=True)
            broker.checkpoint(folder)
            (folder / MARK).write_text(info.design)
            known = self._known(earlier, info.store_id)
            files = []
            for path in sorted(each for each in folder.iterdir() if each.is_file()):
                mtime_ns = path.stat().st_mtime_ns
                # RocksDB does not change a file of rows once it is written.
                same = known.get((path.name, mtime_ns)) if path.suffix == ".sst" else None
                if same is None or same.size != path.stat().st_size:
                    same = self._copy(path.name, Directory(folder).read(path.name), mtime_ns)
                files.append(same)
            return Backup(name, self._began_ms, "rocksdb", info.store_id, files)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            _checkpointing.release()

    def _known(self, earlier: list[Backup], store_id: str) -> dict[tuple[str, int], BackupFile]:
        """Return the files of earlier backups of the store that are at the place for certain."""
        return {
            (each.path, each.mtime_ns): each
            for backup in earlier
            if backup.store_id == store_id
            for each in backup.files
            if self._there.get(f"files/{each.sha256}") == each.size
        }

    def _copy(self, path: str, pieces: Iterator[bytes], mtime_ns: int = 0) -> BackupFile:
        if self._now_ms() - self._began_ms > MAX_BACKUP_MS:
            raise StorageFailed(f"the backup took more than {MAX_BACKUP_MS // 3_600_000} hours")
        digest, size = hashlib.sha256(), 0
        with tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as spool:
            for piece in pieces:
                if self._stopping():
                    raise BrokerClosed("the server is stopping: the backup was broken off")
                digest.update(piece)
                size += len(piece)
                spool.write(piece)
            found = BackupFile(path, size, digest.hexdigest(), mtime_ns)
            name = f"files/{found.sha256}"
            # One of another size was broken off.
            if self._there.get(name) != size:
                spool.seek(0)
                self._place.write(name, spool)  # type: ignore[arg-type]
                self._there[name] = size
                self.new_bytes += size
        return found


# --- verify and restore ---------------------------------------------------------------------------


def verify_backup(place: Place, name: str | None, scratch: Path | None = None) -> tuple[str, int]:
    """Read a backup, compare every checksum, open the copy and check it; return name and records.

    The copy is in a temporary directory, and goes.
    """
    backup = find(place, name)
    with tempfile.TemporaryDirectory(dir=scratch, prefix="penstock-verify-") as folder:
        return backup.name, _fetch(place, backup, Path(folder) / "store")


def restore_backup(place: Place, name: str | None, target: str) -> tuple[str, str, int]:
    """Make a store of a backup; return the backup's name, the store's URL, and the bytes."""
    backup = find(place, name)
    if target.startswith("slatedb+s3:") and backup.engine == "slatedb":
        with tempfile.TemporaryDirectory(prefix="penstock-restore-") as folder:
            with fill_objects(target) as objects:
                _fetch(place, backup, Path(folder) / "store")
                for each in backup.files:
                    with (Path(folder) / "store" / each.path).open("rb") as file:
                        objects.write(each.path, file)
            return backup.name, target, backup.size
    path = Path(_target_path(backup, target))
    _check_empty(path)
    with fill_directory(path) as partial:
        _fetch(place, backup, partial)
        sync_tree(partial)
    url = f"rocksdb:{path}" if backup.engine == "rocksdb" else f"slatedb+file://{path.absolute()}"
    return backup.name, url, backup.size


def _target_path(backup: Backup, target: str) -> str:
    """Return the directory that a path or URL names, if a store of that kind can be there."""
    prefix = {"rocksdb": "rocksdb:", "slatedb": "slatedb+file://"}[backup.engine]
    scheme, colon, _ = target.partition(":")
    if colon and "/" not in scheme and not target.startswith(prefix):
        raise InvalidInput(
            f"{backup.name} is of a {backup.engine} store: restore it to a directory, or to "
            f"{prefix}DIRECTORY{' or slatedb+s3://BUCKET/PREFIX' * (backup.engine == 'slatedb')}"
        )
    return target.removeprefix(prefix)


def _fetch(place: Place, backup: Backup, folder: Path) -> int:
    """Copy the files of a backup to a directory, check them, and the store; return its records."""
    for each in backup.files:
        path = folder / each.path
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        try:
            with path.open("wb") as file:
                for piece in place.read(f"files/{each.sha256}"):
                    digest.update(piece)
                    file.write(piece)
        except OSError as error:
            raise StorageFailed(f"can't write {path}: {error}") from error
        if digest.hexdigest() != each.sha256:
            raise StorageFailed(
                f"the backup {backup.name} is damaged: {place}/files/{each.sha256}, its file "
                f"{each.path}, has other bytes than were written. Use another backup; and remove "
                "that file, so that the next backup writes it again"
            )
    if backup.engine == "rocksdb":
        return sum(verify(folder).checked.values())
    # In a folder of links: a reader writes a checkpoint beside the manifest.
    looked_at = folder.with_name(f"{folder.name}.check")
    shutil.copytree(folder, looked_at, copy_function=lambda a, b: Path(b).hardlink_to(a))
    try:
        with open_reader(f"slatedb+file://{looked_at.absolute()}") as reader:
            return sum(check_copy(reader, str(place)).checked.values())
    finally:
        shutil.rmtree(looked_at, ignore_errors=True)


# --- prune ----------------------------------------------------------------------------------------


def prune(place: Place, *, keep: int | None = None, keep_ms: int | None = None) -> Pruned:
    """Remove backups that are neither among the newest ``keep`` nor younger than ``keep_ms``.

    The newest is always kept. Then files go that no backup has.
    """
    if keep is None and keep_ms is None:
        raise InvalidInput("say which backups to keep: --keep N, --keep-for DURATION, or both")
    with _working(place, "prune", unless="create") as began_ms:
        found = backups_at(place)
        oldest_ms = began_ms if keep_ms is None else began_ms - keep_ms
        old = [each for each in found[: -max(keep or 0, 1)] if each.made_at_ms <= oldest_ms]
        removed = {(each.made_at_ms, each.name) for each in old}
        kept = [each for each in found if (each.made_at_ms, each.name) not in removed]
        for made_at_ms, name in removed:
            place.delete(f"backups/{made_at_ms:015}-{name}.json")
        needed = {f"files/{file.sha256}" for backup in kept for file in backup.files}
        freed = _remove(place, needed, began_ms + MAX_PRUNE_MS)
    return Pruned([each.name for each in old], [each.name for each in kept], freed)


def _remove(place: Place, needed: set[str], until_ms: int) -> int:
    """Remove files that no backup needs, until the mark of this prune would count no more."""
    freed = 0
    for name, size in place.sizes("files").items():
        if name not in needed:
            # The last minute is left for the request that is under way.
            if SystemClock().now_ms() > until_ms - 60_000:
                break
            place.delete(name)
            freed += size
    return freed


# --- of a server ----------------------------------------------------------------------------------


class ServerBackups:
    """The backups that a server makes for its clients, and when it made the last."""

    def __init__(self, store: str, directory: str) -> None:
        self.store = store
        self.directory = directory
        # When the newest backup was made, by whomever; 0: there is none, None: not known yet.
        self.last_ms: int | None = None
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Break off the incremental backup that is being made; the next one goes on from there."""
        self._stopping.set()

    def make(self, broker: Broker, name: str, *, incremental: bool) -> tuple[str, int]:
        """Make a backup in ``backup.directory``.

        Return the name and new bytes of an incremental one, path and bytes of a plain copy.
        """
        if incremental:
            made = create(self._place(), self.store, name, broker, self._stopping.is_set)
            self._note(made.backup.made_at_ms)
            return made.backup.name, made.new_bytes
        if not isinstance(self._place(), Directory):
            raise InvalidInput(
                f"a copy is made in a directory, and backup.directory is {self.directory}: "
                "penstock backup create makes an incremental backup there"
            )
        _check_name(name)
        path = Path(self.directory) / name
        size = backup(broker, path)
        self._note(SystemClock().now_ms())
        fields = {"backup": name, "place": self.directory, "bytes": size}
        log.info("a backup was made", extra={"fields": fields})
        return str(path), size

    def _note(self, made_at_ms: int) -> None:
        self.last_ms = max(made_at_ms, self.last_ms or 0)

    def look(self) -> None:
        """Note the newest backup that is there; none, if that can't be seen."""
        times = [0]
        try:
            place = self._place()
            times.append(last_backup_ms(place) or 0)
            if isinstance(place, Directory):
                for mark in place.root.glob(f"*/{MARK}"):
                    # Somebody may remove it at any moment.
                    with contextlib.suppress(OSError):
                        times.append(int(mark.stat().st_mtime * 1000))
        finally:
            self._note(max(times))

    def _place(self) -> Place:
        if not self.directory:
            raise InvalidInput("this server makes no backups: set backup.directory to allow it")
        return place_at(self.directory)
