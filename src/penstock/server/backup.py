"""Copies of a RocksDB store that can be opened, whole or not there at all.

:mod:`penstock.server.incremental` makes incremental backups.

::

    DEST.part-ID    checkpoint, mark, fsync of everything   ── rename ──▶   DEST

A crash leaves at most a ``.part-`` directory, which can be removed.
"""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.clock import SystemClock
from penstock.engines.disk import sync_path
from penstock.errors import InvalidInput, PenstockError, StorageFailed, StoreMismatch
from penstock.readers import open_copy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.broker.broker import Broker
    from penstock.broker.reader import Reader
    from penstock.store.kv.check import AuditReport

MARK: Final = "PENSTOCK"
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# The folders of incremental backups in the same directory.
_RESERVED: Final = frozenset({"backups", "files", "working"})


def backup(broker: Broker, target: Path) -> int:
    """Copy an open store to a directory that is not there yet; return the size in bytes."""
    if target.exists():
        raise _taken(target)
    with arriving(target) as partial:
        broker.checkpoint(partial)
        # Without its mark a directory is not taken for a store.
        (partial / MARK).write_text(broker.info().design)
        return sync_tree(partial)


def backup_into(broker: Broker, directory: str, name: str) -> tuple[Path, int]:
    """Make the backup that a client asks a server for: by name, in the configured directory."""
    if not directory:
        raise InvalidInput("this server makes no backups: set backup.directory to allow it")
    if not NAME.fullmatch(name) or name in _RESERVED:
        raise InvalidInput(f"{name!r:.100} is not a backup's name: up to 128 of A-Z a-z 0-9 _ . -")
    target = Path(directory) / name
    return target, backup(broker, target)


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
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidInput(f"{target} is not empty: a store is restored to where nothing is")
    verify(source)
    with arriving(target) as partial:
        shutil.copytree(source, partial)
        # RocksDB writes it; backups that older versions made are without.
        (partial / "IDENTITY").touch()
        size = sync_tree(partial)
        if target.exists():
            target.rmdir()
    return size


@contextlib.contextmanager
def arriving(target: Path) -> Iterator[Path]:
    """Give a place beside the target, which becomes the target if all goes well."""
    # A name of its own: others may be about to write the same target, from any process.
    partial = target.with_name(f"{target.name}.part-{SystemClock().lease_id().hex()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            _place(partial, target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync_path(target.parent)
    except PenstockError:
        raise
    except OSError as error:
        raise StorageFailed(f"can't write {target}: {error}") from error


def _place(partial: Path, target: Path) -> None:
    try:
        partial.rename(target)
    except OSError as error:
        if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
            raise _taken(target) from None
        raise


def _taken(target: Path) -> InvalidInput:
    return InvalidInput(f"{target} is there already: name a directory that is not")


def sync_tree(directory: Path) -> int:
    """Fsync everything below a directory; return the size of the files."""
    size = 0
    for path in sorted(directory.rglob("*")):
        sync_path(path)
        size += path.stat().st_size if path.is_file() else 0
    sync_path(directory)
    return size
