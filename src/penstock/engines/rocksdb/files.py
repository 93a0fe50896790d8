"""The files of a store on RocksDB: made once, and looked at before RocksDB is let at them.

::

    PENSTOCK-CREATING ── RocksDB makes its files ── renamed ──▶ PENSTOCK      (a store from here on)

RocksDB makes an empty database where it finds no ``CURRENT``, removes files that it can't account
for, and takes a log to end wherever it can't read on. So a directory is a store if it has the mark;
one without is taken only if it is empty, or if making a store in it was broken off; and before
RocksDB opens a store, all its files are looked for and its logs are read. What is refused is left
as it was, to the last byte.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import struct
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

import google_crc32c

from penstock.engines.rocksdb.manifest import Manifest
from penstock.engines.rocksdb.wal import check_log, find_behind
from penstock.errors import StorageFailed, StoreDamaged, StoreLocked, StoreMismatch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from penstock.engines.rocksdb.wal import LogCheck

__all__ = [
    "LogDamage",
    "SyncedLog",
    "check_files",
    "creation",
    "damaged",
    "find_log_damage",
    "make_directory",
    "mark_at",
    "read_synced",
    "reading",
    "unowned",
]

_MARK: Final = "PENSTOCK"
_CREATING: Final = "PENSTOCK-CREATING"
_CURRENT: Final = "CURRENT"
# Closing this file ends every lock that the process has on it, RocksDB's among them.
_LOCK: Final = "LOCK"
_IDENTITY: Final = "IDENTITY"
# A database has these, besides its OPTIONS, a MANIFEST, and the files which that names.
_ALWAYS: Final = (_CURRENT, _IDENTITY, "rocksdict-config.json")
_ROCKSDB_FILE: Final = re.compile(
    r"CURRENT|IDENTITY|LOCK|LOG|LOG\.old\.\d+|(MANIFEST|OPTIONS)-\d+|\d+\.(sst|log|dbtmp)"
    r"|rocksdict-config\.json"
)
_MANIFEST_NAME: Final = re.compile(rb"MANIFEST-\d+\n")
_LOG_NAME: Final = re.compile(r"\d{6,}\.log")
_SYNCED: Final = "PENSTOCK-SYNCED"
# The number of a log, how many of its bytes are on disk, and the CRC-32C of both.
_SYNCED_RECORD: Final = Struct("<QQI")
# An error names no more files than this.
_NAMED: Final = 10


class LogDamage(NamedTuple):
    """Where the write-ahead log is damaged, though changes follow."""

    log: str
    position: int
    batches_before: int
    batches_behind: int
    bytes_behind: int
    #: How much of the log from there on was on disk once: none of it is a torn tail.
    bytes_synced: int

    def __str__(self) -> str:
        synced = f"; {self.bytes_synced} bytes from there on were confirmed"
        return (
            f"the write-ahead log is damaged at byte {self.position} of {self.log}: "
            f"{self.batches_before} batches before that are whole, and {self.batches_behind} "
            f"behind it, in {self.bytes_behind} bytes{synced if self.bytes_synced else ''}"
        )


def damaged(path: Path, wrong: object) -> StoreDamaged:
    """Make the error of a store that is not opened, with what can be done."""
    return StoreDamaged(
        f"{path} holds a damaged store: {wrong}. Nothing was changed. Restore a backup, or read "
        f"what is left into a new store: penstock salvage rocksdb:{path} TARGET"
    )


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what the operating system says into our error."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(f"can't read the store at {path}: {error}") from error


# --- creation -------------------------------------------------------------------------------------


def make_directory(path: Path) -> None:
    """Make the directory of a store, if it is not there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageFailed(f"can't make the directory {path}: {error}") from error


def mark_at(path: Path, marks: Mapping[str, Collection[str]]) -> str | None:
    """Return the mark of the store at a path; None if there is none, and one may be made.

    ``marks`` names the tables of each kind of store, by which one that has lost its mark is known.
    """
    with reading(path):
        if not path.exists():
            return None
        if not path.is_dir():
            raise StoreMismatch(f"{path} is no directory")
        # Looked at before the mark, which another process may be about to write.
        names = _names(path)
        unfinished = not names or (_CREATING in names and not _holds_rows(path))
        with contextlib.suppress(FileNotFoundError):
            if mark := (path / _MARK).read_text(errors="replace").strip():
                return mark
        if unfinished:
            return None
        if not any(map(_ROCKSDB_FILE.fullmatch, names)):
            raise StoreMismatch(f"{path} is not empty and holds no RocksDB database")
        if _CURRENT not in names:
            raise damaged(path, f"{_MARK} is missing or empty, and {_CURRENT} is missing")
        families = set(_read_manifest(path).families.values())
    for mark, tables in marks.items():
        if set(tables) == families:
            raise damaged(path, f"{_MARK} is missing or empty, and should say {mark!r}")
    raise StoreMismatch(
        f"{path} holds a RocksDB database that is not a Penstock store (its column families: "
        f"{', '.join(sorted(families))}); to bring a Queueber database in, use 'penstock import "
        "queueber'"
    )


def _names(path: Path) -> set[str]:
    return {each.name for each in path.iterdir()}


def _holds_rows(path: Path) -> bool:
    """Whether anything was ever written to the database."""
    logs = path.glob("*.log")
    return any(path.glob("*.sst")) or any(each.stat().st_size for each in logs)


@contextlib.contextmanager
def creation(path: Path, mark: str) -> Iterator[None]:
    """Make a store in a directory that is empty; it is one when the block has ended.

    What a creation that was broken off has left is removed first: nothing was ever in it.
    """
    try:
        with (path / _CREATING).open("a+b") as creating:
            # Others that come now must not take this for one that was broken off.
            try:
                fcntl.flock(creating, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreLocked(f"another process is making a store at {path}") from None
            if (path / _MARK).exists():
                (path / _CREATING).unlink(missing_ok=True)
                raise StoreLocked(f"another process has made a store at {path}: open that")
            for name in filter(_ROCKSDB_FILE.fullmatch, _names(path)):
                (path / name).unlink()
            creating.truncate(0)
            creating.write(mark.encode())
            creating.flush()
            yield
            for name in _names(path) - {_LOCK}:
                _sync(path / name)
            (path / _CREATING).rename(path / _MARK)
            _sync(path)
            _sync(path.resolve().parent)
    except OSError as error:
        raise StorageFailed(f"can't make a store in the directory {path}: {error}") from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- before opening -------------------------------------------------------------------------------


@contextlib.contextmanager
def unowned(path: Path) -> Iterator[bool]:
    """Tell whether no process has the database open, and let none open it meanwhile.

    Not for a database that this process has open: closing the file would end RocksDB's own lock.
    """
    with contextlib.ExitStack() as held:
        try:
            lock = held.enter_context((path / _LOCK).open("rb"))
            fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            pass
        except BlockingIOError:
            yield False
            return
        yield True


def check_files(path: Path, tables: Collection[str], *, is_copy: bool = False) -> None:
    """Raise StoreDamaged if a file of a closed store is missing, or its log is damaged.

    A copy that RocksDB made of it may have no identity of its own.
    """
    names = _names(path)
    missing = [name for name in _ALWAYS if name not in names]
    if is_copy and _IDENTITY in missing:
        missing.remove(_IDENTITY)
    if not any(name.startswith("OPTIONS-") for name in names):
        missing.append("OPTIONS-*")
    if _CURRENT in missing:
        raise damaged(path, f"{_listed(missing)} missing")
    manifest = _read_manifest(path)
    lost = sorted(set(tables) - set(manifest.families.values()))
    if lost:
        raise damaged(path, f"its MANIFEST has nothing of the tables {', '.join(lost)}")
    for file in manifest.files.values():
        if file.name not in names:
            missing.append(file.name)
        elif (size := (path / file.name).stat().st_size) != file.size:
            raise damaged(path, f"{file.name} has {size} bytes instead of {file.size}")
    logs = _live_logs(path, manifest)
    synced, _ = read_synced(path)
    # One was being written when the MANIFEST was.
    if not any(number < manifest.next_file for number in logs):
        numbers = f"{manifest.oldest_log} to {manifest.next_file - 1}"
        missing.append(f"a write-ahead log (*.log, one of the numbers {numbers})")
    elif synced and synced >= manifest.oldest_log and synced not in logs:
        missing.append(f"{synced:06}.log")
    if missing:
        raise damaged(path, f"{_listed(missing)} missing")
    if (wrong := find_log_damage(path, manifest)) is not None:
        raise damaged(path, f"{wrong} (with --drop-after, salvage leaves that out)")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more} {'is' if len(names) == 1 else 'are'}"


def _read_manifest(path: Path) -> Manifest:
    current = (path / _CURRENT).read_bytes()
    if not _MANIFEST_NAME.fullmatch(current):
        raise damaged(path, f"{_CURRENT} names no MANIFEST but {current[:100]!r}")
    name = current.decode().strip()
    try:
        data = (path / name).read_bytes()
        manifest = Manifest(data)
    except FileNotFoundError:
        raise damaged(path, f"{name} is missing") from None
    except ValueError as error:
        raise StoreMismatch(f"{path / name} can't be read: {error}") from None
    # A tail that a crash has torn names nothing that anybody was told of.
    resumes, behind = find_behind(data, manifest.end)
    if resumes is not None:
        wrong = f"{name} is damaged at byte {manifest.end}, with {behind} records behind that"
        raise damaged(path, wrong)
    return manifest


def _log_numbers(path: Path) -> list[int]:
    return sorted(int(name[:-4]) for name in _names(path) if _LOG_NAME.fullmatch(name))


def _live_logs(path: Path, manifest: Manifest) -> dict[int, Path]:
    """Return the logs with changes that may not be in files of rows, the oldest first."""
    numbers = [number for number in _log_numbers(path) if number >= manifest.oldest_log]
    return {number: path / f"{number:06}.log" for number in numbers}


def find_log_damage(path: Path, manifest: Manifest) -> LogDamage | None:
    """Read the logs; return the first damage that is more than a tail which a crash has torn.

    A log may have such a tail though another follows, if that one counts on from the last whole
    batch. The first begins no later than where the files of rows end.
    """
    logs = [(log, _check_log(log)) for log in _live_logs(path, manifest).values()]
    synced, synced_size = read_synced(path)
    lowest, highest = 0, manifest.last_sequence + 1
    before, whole = 0, (logs[0][0].name, 0) if logs else ("", 0)
    for at, (file, log) in enumerate(logs):
        later = [each for _, each in logs[at + 1 :]]
        batches = log.batches_behind + sum(each.batches + each.batches_behind for each in later)
        size = log.bytes_behind + sum(each.size for each in later)
        if log.sequence is not None and not lowest <= log.sequence <= highest:
            batches, size = batches + log.batches, size + log.size - log.bytes_behind
            return LogDamage(*whole, before, batches, size, 0)
        before += log.batches
        if log.next_sequence is not None:
            lowest = highest = log.next_sequence
        whole = file.name, log.end
        lost = synced_size - log.end if int(file.stem) == synced else 0
        if log.resumes is not None or lost > 0:
            return LogDamage(*whole, before, batches, size, max(lost, 0))
    return None


def _check_log(log: Path) -> LogCheck:
    with log.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return check_log(b"")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return check_log(data)


# --- how much of the log was synced ---------------------------------------------------------------


class SyncedLog:
    """Keeps how much of which log is on disk, so that less of it is known to be a loss.

    It is not synced itself: what a crash of the machine leaves may be old, and is true still.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        (path / _SYNCED).touch()
        self._file = (path / _SYNCED).open("r+b", buffering=0)
        self._changed_ns = 0
        self._number = 0
        self._log = path

    def measure(self) -> tuple[int, int] | None:
        """Return the number of the log that is written to and its size, while nobody commits."""
        try:
            changed_ns = self._path.stat().st_mtime_ns
            if changed_ns != self._changed_ns:
                self._number = max(_log_numbers(self._path))
                self._log = self._path / f"{self._number:06}.log"
                self._changed_ns = changed_ns
            return self._number, self._log.stat().st_size
        except (OSError, ValueError):
            # Files come and go: the next time will do.
            self._changed_ns = 0
            return None

    def keep(self, measured: tuple[int, int]) -> None:
        """Write down what was measured before a sync, after it."""
        checksum = google_crc32c.value(_SYNCED_RECORD.pack(*measured, 0)[:-4])
        with contextlib.suppress(OSError):
            os.pwrite(self._file.fileno(), _SYNCED_RECORD.pack(*measured, checksum), 0)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def read_synced(path: Path) -> tuple[int, int]:
    """Return the number of a log and how much of it was synced; zeros if that is not known."""
    try:
        record = (path / _SYNCED).read_bytes()
        number, size, checksum = _SYNCED_RECORD.unpack(record)
    except (FileNotFoundError, struct.error):
        return 0, 0
    return (number, size) if checksum == google_crc32c.value(record[:-4]) else (0, 0)
