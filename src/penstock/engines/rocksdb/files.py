"""The files of a store on RocksDB: how they are made, who owns them, checks before RocksDB opens.

::

    PENSTOCK-CREATING ── RocksDB makes its files ── renamed ──▶ PENSTOCK      (a store from here on)

RocksDB makes an empty database where it finds no ``CURRENT``, removes files that it can't account
for, and takes a log to end wherever it can't read on. So a directory is a store if it has the mark
``PENSTOCK``; a directory without it is used only if it is empty, or if a creation in it was broken
off; and before RocksDB opens a store, Penstock looks for all its files and reads its logs. A
directory that is refused is left as it was, to the last byte.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import socket
from struct import Struct
from typing import TYPE_CHECKING, Final

import google_crc32c
import msgspec

from penstock.engines.disk import sync_path
from penstock.engines.rocksdb.records import LogCheck, Manifest, check_log, find_behind
from penstock.errors import StorageFailed, StoreDamaged, StoreLocked, StoreMismatch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

_MARK: Final = "PENSTOCK"
_CREATING: Final = "PENSTOCK-CREATING"
OWNER: Final = "PENSTOCK-OWNER"
_SYNCED: Final = "PENSTOCK-SYNCED"
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
# The number of a log, and how many of its bytes are on disk. The CRC-32C of both follows.
_SYNCED_NUMBERS: Final = Struct("<QQ")
# An error names no more files than this.
_NAMED: Final = 10
# Directories that this process has open, or is opening: to look at RocksDB's lock would end it.
_open_here: dict[tuple[int, int], object] = {}


def damaged_store(path: Path, wrong: object) -> StoreDamaged:
    """Make the error of a store that is not opened; it says how to go on."""
    return StoreDamaged(
        f"{path} holds a damaged store: {wrong}. Nothing was changed. Restore a backup, or read "
        f"what is left into a new store: penstock salvage rocksdb:{path} TARGET"
    )


@contextlib.contextmanager
def os_errors_as(text: str) -> Iterator[None]:
    """Raise StorageFailed with this text for an error of the operating system."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(f"{text}: {error}") from error


def _names(path: Path) -> set[str]:
    return {each.name for each in path.iterdir()}


# --- creation -------------------------------------------------------------------------------------


def read_mark(path: Path, marks: Mapping[str, Collection[str]]) -> str | None:
    """Return the mark of the store at a path; None if there is no store and one may be made.

    ``marks`` has the tables of each kind of store, to recognise a store that has lost its mark.
    """
    with os_errors_as(f"can't read the store at {path}"):
        if not path.exists():
            return None
        if not path.is_dir():
            raise StoreMismatch(f"{path} is no directory")
        # Listed before the mark is read, which another process may be about to write.
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
            raise damaged_store(path, f"{_MARK} is missing or empty, and {_CURRENT} is missing")
        families = set(_read_manifest(path).families.values())
    for mark, tables in marks.items():
        if set(tables) == families:
            raise damaged_store(path, f"{_MARK} is missing or empty, and should say {mark!r}")
    raise StoreMismatch(
        f"{path} holds a RocksDB database that is not a Penstock store (its column families: "
        f"{', '.join(sorted(families))}); to bring a Queueber database in, use 'penstock import "
        "queueber'"
    )


def _holds_rows(path: Path) -> bool:
    """Whether anything was ever written to the database."""
    logs = path.glob("*.log")
    return any(path.glob("*.sst")) or any(each.stat().st_size for each in logs)


@contextlib.contextmanager
def creation(path: Path, mark: str) -> Iterator[None]:
    """Make a store in an empty directory; RocksDB makes its files within the block.

    Files of a creation that was broken off are removed first: they never held a row.
    """
    with (
        os_errors_as(f"can't make a store in the directory {path}"),
        (path / _CREATING).open("a+b") as creating,
    ):
        # Other processes must not take this creation for one that was broken off.
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
            sync_path(path / name)
        (path / _CREATING).rename(path / _MARK)
        sync_path(path)
        sync_path(path.resolve().parent)


# --- owners ---------------------------------------------------------------------------------------


class _Owner(msgspec.Struct):
    pid: int
    host: str


def write_owner(path: Path) -> None:
    """Note this process as the owner, for error messages; RocksDB's lock keeps others out."""
    owner = _Owner(pid=os.getpid(), host=socket.gethostname())
    with contextlib.suppress(OSError):
        (path / OWNER).write_bytes(msgspec.json.encode(owner))


def locked(path: Path) -> StoreLocked:
    """Make the error of a directory that is open already; it names the owner if one is noted."""
    text = "open in another process"
    with contextlib.suppress(OSError, msgspec.DecodeError):
        owner = msgspec.json.decode((path / OWNER).read_bytes(), type=_Owner)
        if owner.pid == os.getpid() and owner.host == socket.gethostname():
            text = f"already open in this process (pid {owner.pid}): share one broker"
        else:
            text = f"open in process {owner.pid} on {owner.host}: one process owns a store"
    return StoreLocked(f"{path} is {text}")


@contextlib.contextmanager
def reserved(path: Path) -> Iterator[tuple[int, int]]:
    """Keep the rest of this process from opening a directory, for good if the block ends well."""
    found = path.stat()
    inode = found.st_dev, found.st_ino
    mine = object()
    if _open_here.setdefault(inode, mine) is not mine:
        raise locked(path)
    try:
        yield inode
    except BaseException:
        release(inode)
        raise


def release(inode: tuple[int, int]) -> None:
    """Let this process open a directory again."""
    _open_here.pop(inode, None)


@contextlib.contextmanager
def unowned(path: Path) -> Iterator[None]:
    """Keep other processes from opening the database; raise StoreLocked if one has it open.

    Not for a database that this process has open: closing the file would end RocksDB's own lock.
    """
    with contextlib.ExitStack() as held:
        try:
            lock = held.enter_context((path / _LOCK).open("rb"))
            fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            pass
        except BlockingIOError:
            raise locked(path) from None
        yield


# --- checks before opening ------------------------------------------------------------------------


def check_files(path: Path, tables: Collection[str], *, is_copy: bool = False) -> None:
    """Raise StoreDamaged if a file of a closed store is missing, or its log is damaged.

    Raise StoreLocked if the store is open. A copy made by RocksDB may have no identity of its own.
    """
    with os_errors_as(f"can't read the store at {path}"), unowned(path):
        names = _names(path)
        missing = [name for name in _ALWAYS if name not in names]
        if is_copy and _IDENTITY in missing:
            missing.remove(_IDENTITY)
        if not any(name.startswith("OPTIONS-") for name in names):
            missing.append("OPTIONS-*")
        if _CURRENT in missing:
            raise damaged_store(path, f"{_listed(missing)} missing")
        manifest = _read_manifest(path)
        lost = sorted(set(tables) - set(manifest.families.values()))
        if lost:
            raise damaged_store(path, f"its MANIFEST has nothing of the tables {', '.join(lost)}")
        for file in manifest.files.values():
            if file.name not in names:
                missing.append(file.name)
            elif (size := (path / file.name).stat().st_size) != file.size:
                raise damaged_store(path, f"{file.name} has {size} bytes instead of {file.size}")
        # The logs with changes that may not be in files of rows.
        logs = [number for number in _log_numbers(path) if number >= manifest.oldest_log]
        synced, synced_size = read_synced(path)
        # RocksDB was writing one of them when it wrote the MANIFEST.
        if not any(number < manifest.next_file for number in logs):
            numbers = f"{manifest.oldest_log} to {manifest.next_file - 1}"
            missing.append(f"a write-ahead log (*.log, one of the numbers {numbers})")
        elif synced and synced >= manifest.oldest_log and synced not in logs:
            missing.append(_log_name(synced))
        if missing:
            raise damaged_store(path, f"{_listed(missing)} missing")
        checks = {number: _check_log(path / _log_name(number)) for number in logs}
        wrong = _log_damage(checks, manifest.last_sequence, synced, synced_size)
        if wrong is not None:
            raise damaged_store(path, f"{wrong} (with --drop-after, salvage leaves that out)")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more} {'is' if len(names) == 1 else 'are'}"


def _read_manifest(path: Path) -> Manifest:
    current = (path / _CURRENT).read_bytes()
    if not _MANIFEST_NAME.fullmatch(current):
        raise damaged_store(path, f"{_CURRENT} names no MANIFEST but {current[:100]!r}")
    name = current.decode().strip()
    try:
        data = (path / name).read_bytes()
        manifest = Manifest(data)
    except FileNotFoundError:
        raise damaged_store(path, f"{name} is missing") from None
    except ValueError as error:
        raise StoreMismatch(f"{path / name} can't be read: {error}") from None
    # A tail torn by a crash names no file that a confirmed change is in.
    resumes, behind = find_behind(data, manifest.end)
    if resumes is not None:
        wrong = f"{name} is damaged at byte {manifest.end}, with {behind} records behind that"
        raise damaged_store(path, wrong)
    return manifest


def _log_name(number: int) -> str:
    return f"{number:06}.log"


def _log_numbers(path: Path) -> list[int]:
    return sorted(int(name[:-4]) for name in _names(path) if _LOG_NAME.fullmatch(name))


def _check_log(log: Path) -> LogCheck:
    with log.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return check_log(b"")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return check_log(data)


def _log_damage(
    logs: Mapping[int, LogCheck], last_sequence: int, synced: int, synced_size: int
) -> str | None:
    """Describe the first damage of the logs that is more than a tail torn by a crash.

    A log may have such a tail though another follows, if that one counts on from the last whole
    batch. The first begins no later than where the files of rows end, at ``last_sequence``. Of the
    log number ``synced``, ``synced_size`` bytes were on disk once: none of them is a torn tail.
    """
    lowest, highest = 0, last_sequence + 1
    before, whole, lost = 0, (min(logs, default=0), 0), 0
    checks = list(logs.items())
    for at, (number, log) in enumerate(checks):
        later = [each for _, each in checks[at + 1 :]]
        batches = log.batches_behind + sum(each.batches + each.batches_behind for each in later)
        size = log.bytes_behind + sum(each.size for each in later)
        if log.sequence is not None and not lowest <= log.sequence <= highest:
            batches, size, lost = batches + log.batches, size + log.size - log.bytes_behind, 0
            break
        before += log.batches
        if log.next_sequence is not None:
            lowest = highest = log.next_sequence
        whole = number, log.end
        lost = max(synced_size - log.end, 0) if number == synced else 0
        if log.resumes is not None or lost:
            break
    else:
        return None
    confirmed = f"; {lost} bytes from there on were confirmed" if lost else ""
    return (
        f"the write-ahead log is damaged at byte {whole[1]} of {_log_name(whole[0])}: {before} "
        f"batches before that are whole, and {batches} behind it, in {size} bytes{confirmed}"
    )


# --- how much of the log is synced ----------------------------------------------------------------


class SyncedLog:
    """Notes how much of which log is synced, so that a shorter log is known to be damaged.

    The note itself is not synced: after a crash of the machine it may be old, and is true still.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._directory = os.fspath(path)
        (path / _SYNCED).touch()
        self._file = (path / _SYNCED).open("r+b", buffering=0)
        self._changed_ns = 0
        self._number = 0
        self._log = ""

    def measure(self) -> tuple[int, int] | None:
        """Return the number and size of the log that RocksDB writes to. Nobody may commit now."""
        try:
            changed_ns = os.stat(self._directory).st_mtime_ns  # noqa: PTH116 - a third of Path's cost
            if changed_ns != self._changed_ns:
                self._number = max(_log_numbers(self._path))
                self._log = f"{self._directory}/{_log_name(self._number)}"
                self._changed_ns = changed_ns
            return self._number, os.stat(self._log).st_size  # noqa: PTH116
        except (OSError, ValueError):
            # RocksDB may have removed the log just now: the next sync measures again.
            self._changed_ns = 0
            return None

    def keep(self, measured: tuple[int, int]) -> None:
        """Note the measure that was taken before a sync, after it."""
        numbers = _SYNCED_NUMBERS.pack(*measured)
        with contextlib.suppress(OSError):
            os.pwrite(self._file.fileno(), numbers + _checksum(numbers), 0)

    def close(self) -> None:
        """Close the note."""
        self._file.close()


def read_synced(path: Path) -> tuple[int, int]:
    """Return the number of a log and how much of it was synced; zeros if that is not known."""
    try:
        record = (path / _SYNCED).read_bytes()
    except FileNotFoundError:
        return 0, 0
    numbers, checksum = record[: _SYNCED_NUMBERS.size], record[_SYNCED_NUMBERS.size :]
    if checksum != _checksum(numbers):
        return 0, 0
    number, size = _SYNCED_NUMBERS.unpack(numbers)
    return number, size


def _checksum(data: bytes) -> bytes:
    crc: int = google_crc32c.value(data)
    return crc.to_bytes(4, "little")
