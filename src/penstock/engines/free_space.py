"""Room on the disk of a store: how much is free, the reserve, and whether files can grow again.

What a database has in its log is written once more, into files of rows, before the log goes: so
much of what is free is spoken for. New messages leave the reserve alone, so that those which are
there can still be claimed, settled and removed.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final

from penstock.clock import SystemClock
from penstock.errors import DiskFull, StorageFailed
from penstock.limits import MIN_FREE_BYTES, MIN_FREE_PERCENT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["DiskRoom"]

log = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
# A payload is written to the log and to a file of rows; a message has some rows beside it.
_TIMES_WRITTEN: Final = 2
_AMPLE: Final = 1.25
_PROBE_FILE: Final = "PENSTOCK-PROBE"
# A database that opens also writes a manifest, options and a log of its own.
_PROBE_BYTES: Final = 1 << 20


class DiskRoom:
    """The free bytes of a directory's file system, looked at once a second at the most."""

    def __init__(
        self, path: Path, unflushed_bytes: Callable[[], int], min_free_bytes: int | None
    ) -> None:
        self._path = path
        self._unflushed_bytes = unflushed_bytes
        self._seconds = SystemClock().seconds
        self._looked_at = float("-inf")
        # Free, and free for new messages; None: the file system does not tell.
        self._free: int | None = None
        self._left = 0
        self._refusing = False
        self._look()
        if min_free_bytes is None:
            min_free_bytes = min(MIN_FREE_BYTES, self._disk()[1] * MIN_FREE_PERCENT // 100)
        self._reserve = min_free_bytes

    def free_bytes(self) -> int | None:
        """Return how much is free; None if the file system does not tell."""
        if self._seconds() - self._looked_at >= _LOOK_S:
            self._look()
        return self._free

    def check(self, size: int) -> None:
        """Refuse so many bytes of new messages if they would leave less than the reserve."""
        if not self._reserve:
            return
        self._left -= _TIMES_WRITTEN * size
        if self._left < self._reserve or self._seconds() - self._looked_at >= _LOOK_S:
            self._look()
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
        """Raise unless a file can be written that is as large as what has to be written first."""
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

    def _look(self) -> None:
        self._looked_at = self._seconds()
        free, _ = self._disk()
        self._free = free
        if free is not None:
            self._left = free - self._unflushed_bytes()

    def _disk(self) -> tuple[int | None, int]:
        """Return what is free, if that is known, and the size of all."""
        try:
            found = os.statvfs(self._path)
        except OSError:
            return None, 0
        size = found.f_blocks * found.f_frsize
        return found.f_bavail * found.f_frsize if size else None, size
