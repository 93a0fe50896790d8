"""The disk of a store: fsync, free bytes, the reserve, and whether files can grow again.

A database writes the rows of its log once more, into files of rows, before the log goes. So free
space of that size is taken already. New messages leave the reserve alone, so that messages already
stored can still be claimed, settled and removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import TYPE_CHECKING, Final

from penstock.clock import SystemClock
from penstock.errors import DiskFull, StorageFailed
from penstock.limits import MIN_FREE_BYTES, MIN_FREE_PERCENT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)

_MEASURE_EVERY_S: Final = 0.1
# A payload is written to the log and to a file of rows; a message has some rows beside it.
_TIMES_WRITTEN: Final = 2
_AMPLE: Final = 1.25
_PROBE_FILE: Final = "PENSTOCK-PROBE"
# A database that opens also writes a manifest, options and a log of its own.
_PROBE_BYTES: Final = 1 << 20


def sync_path(path: Path) -> None:
    """Fsync a file, or the entries of a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FreeSpace:
    """The free bytes of a directory's file system, measured ten times a second at the most."""

    def __init__(
        self, path: Path, unflushed_bytes: Callable[[], int], min_free_bytes: int | None
    ) -> None:
        self._path = path
        self._unflushed_bytes = unflushed_bytes
        self._seconds = SystemClock().seconds
        self._measured_at = float("-inf")
        # Free, and free for new messages; None: the file system does not tell.
        self._free: int | None = None
        self._left = 0
        self._refusing = False
        size = self._measure()
        if min_free_bytes is None:
            min_free_bytes = min(MIN_FREE_BYTES, size * MIN_FREE_PERCENT // 100)
        self._reserve = min_free_bytes

    def free_bytes(self) -> int | None:
        """Return how many bytes are free; None if the file system does not tell."""
        if self._seconds() - self._measured_at >= _MEASURE_EVERY_S:
            self._measure()
        return self._free

    def check(self, size: int) -> None:
        """Refuse new messages of this size if they would leave less than the reserve."""
        if not self._reserve:
            return
        self._left -= _TIMES_WRITTEN * size
        if self._left < self._reserve or self._seconds() - self._measured_at >= _MEASURE_EVERY_S:
            self._measure()
            self._left -= _TIMES_WRITTEN * size
        if self._free is None or self._left >= self._reserve:
            # Not when the first one fits again: at the edge there would be a line for each.
            if self._refusing and self._left > _AMPLE * self._reserve:
                self._refusing = False
                log.warning("there is room for new messages again: %s", self._describe())
            return
        # Refused bytes are not written.
        self._left += _TIMES_WRITTEN * size
        if not self._refusing:
            self._refusing = True
            log.warning("new messages are refused: %s", self._describe())
        raise DiskFull(
            f"no room for {size} bytes of new messages: {self._describe()}; nothing was stored"
        )

    def probe(self) -> None:
        """Raise unless a file can be written that is as large as what opening has to write."""
        path = self._path / _PROBE_FILE
        size = self._unflushed_bytes() + _PROBE_BYTES
        try:
            handle = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
            try:
                path.unlink()
                os.posix_fallocate(handle, 0, size)
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise StorageFailed(f"{size} bytes can't be written to {self._path}: {error}") from None

    def _describe(self) -> str:
        return (
            f"{self._path} has {self._free} bytes free, {self._unflushed_bytes()} of them for what "
            f"is still to be flushed, and min_free_bytes is {self._reserve}"
        )

    def _measure(self) -> int:
        """Measure the free bytes; return the size of the file system."""
        self._measured_at = self._seconds()
        try:
            found = os.statvfs(self._path)
        except OSError:
            self._free = None
            return 0
        size = found.f_blocks * found.f_frsize
        self._free = found.f_bavail * found.f_frsize if size else None
        if self._free is not None:
            # While no descriptor is left to list the log's files with, the last figure counts.
            with contextlib.suppress(OSError):
                self._left = self._free - self._unflushed_bytes()
        return size
