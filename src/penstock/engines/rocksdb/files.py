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
import os
import re
import socket
from struct import Struct
from typing import TYPE_CHECKING, Final

import google_crc32c
import msgspec

from penstock.engines.disk import sync_path
from penstock.errors import StorageFailed, StoreDamaged, StoreLocked, StoreMismatch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

_MARK: Final = "PENSTOCK"
_CREATING: Final = "PENSTOCK-CREATING"
OWNER: Final = "PENSTOCK-OWNER"
_SYNCED: Final = "PENSTOCK-SYNCED"
CURRENT: Final = "CURRENT"
# Closing this file ends every lock that the process has on it, RocksDB's among them.
_LOCK: Final = "LOCK"
IDENTITY: Final = "IDENTITY"
_ROCKSDB_FILE: Final = re.compile(
    r"CURRENT|IDENTITY|LOCK|LOG|LOG\.old\.\d+|(MANIFEST|OPTIONS)-\d+|\d+\.(sst|log|dbtmp)"
    r"|rocksdict-config\.json"
)
_LOG_NAME: Final = re.compile(r"\d{6,}\.log")
# The number of a log, and how many of its bytes are on disk. The CRC-32C of both follows.
_SYNCED_NUMBERS: Final = Struct("<QQ")
# Directories that this process has open, or is opening: to look at RocksDB's lock would end it.
_open_here: dict[tuple[int, int], object] = {}


def unusable_store(path: Path, wrong: object) -> StoreDamaged:
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


def file_names(path: Path) -> set[str]:
    """Return the names of the files in a directory."""
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
        names = file_names(path)
        unfinished = not names or (_CREATING in names and not _holds_rows(path))
        with contextlib.suppress(FileNotFoundError):
            if mark := (path / _MARK).read_text(errors="replace").strip():
                return mark
        if unfinished:
            return None
        if not any(map(_ROCKSDB_FILE.fullmatch, names)):
            inside = sorted(each.parent for each in path.glob(f"*/{_MARK}"))
            other = f"did you mean {inside[0]}?" if inside else "name another directory"
            raise StoreMismatch(f"{path} is not empty and holds no RocksDB database: {other}")
        if CURRENT not in names:
            raise unusable_store(path, f"{_MARK} is missing or empty, and {CURRENT} is missing")
        # Imported here, and by the engine: a store that is just made has nothing to check.
        from penstock.engines.rocksdb.check import read_manifest  # noqa: PLC0415

        families = set(read_manifest(path).families.values())
    for mark, tables in marks.items():
        if set(tables) == families:
            raise unusable_store(path, f"{_MARK} is missing or empty, and should say {mark!r}")
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
        for name in filter(_ROCKSDB_FILE.fullmatch, file_names(path)):
            (path / name).unlink()
        creating.truncate(0)
        creating.write(mark.encode())
        creating.flush()
        yield
        for name in file_names(path) - {_LOCK}:
            sync_path(path / name)
        (path / _CREATING).rename(path / _MARK)
        sync_path(path)
        sync_path(path.resolve().parent)


# --- owners ---------------------------------------------------------------------------------------


class _Owner(msgspec.Struct):
    pid: int
    host: str
    served_at: str = ""


def write_owner(path: Path, served_at: str = "") -> None:
    """Note this process as the owner, for error messages; RocksDB's lock keeps others out.

    ``served_at`` is the URL of the server that it is, if it is one.
    """
    owner = _Owner(pid=os.getpid(), host=socket.gethostname(), served_at=served_at)
    with contextlib.suppress(OSError):
        (path / OWNER).write_bytes(msgspec.json.encode(owner))


def lock_error(path: Path) -> StoreLocked:
    """Make the error of a directory that is open already; it names the owner if one is noted."""
    text = "open in another process"
    with contextlib.suppress(OSError, msgspec.DecodeError):
        owner = msgspec.json.decode((path / OWNER).read_bytes(), type=_Owner)
        if owner.pid == os.getpid() and owner.host == socket.gethostname():
            text = f"already open in this process (pid {owner.pid}): share one broker"
        else:
            text = f"open in process {owner.pid} on {owner.host}: one process owns a store"
            if owner.served_at:
                text += f", and this one serves it at {owner.served_at}"
    return StoreLocked(f"{path} is {text}")


@contextlib.contextmanager
def reserve(path: Path) -> Iterator[tuple[int, int]]:
    """Keep the rest of this process from opening a directory, for good if the block ends well."""
    found = path.stat()
    inode = found.st_dev, found.st_ino
    mine = object()
    if _open_here.setdefault(inode, mine) is not mine:
        raise lock_error(path)
    try:
        yield inode
    except BaseException:
        release(inode)
        raise


def release(inode: tuple[int, int]) -> None:
    """Let this process open a directory again."""
    _open_here.pop(inode, None)


@contextlib.contextmanager
def keep_others_out(path: Path) -> Iterator[None]:
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
            raise lock_error(path) from None
        yield


# --- how much of the log is synced ----------------------------------------------------------------


def log_name(number: int) -> str:
    """Return the name of a write-ahead log."""
    return f"{number:06}.log"


def log_numbers(path: Path) -> list[int]:
    """List the numbers of the write-ahead logs in a directory."""
    return sorted(int(name[:-4]) for name in file_names(path) if _LOG_NAME.fullmatch(name))


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
                self._number = max(log_numbers(self._path))
                self._log = f"{self._directory}/{log_name(self._number)}"
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
