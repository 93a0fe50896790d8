"""What was written or read of late, so that reading it again does not cross into the library.

A crossing costs tens of microseconds, and a round trip to the object store where the library has
not cached the block. A message is read within moments of being written, by the process that wrote
it: this is where its payload and its lease are found.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["UNKNOWN", "ReadCache"]

# What an entry costs beside its bytes.
_OVERHEAD: Final = 120


class _Unknown:
    """What is returned for a key of which nothing is known."""


UNKNOWN: Final = _Unknown()


class ReadCache:
    """Values by key, bounded in bytes; the longest unwritten go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._values: dict[bytes, bytes | None] = {}
        self._lock = threading.Lock()
        # Another thread may read while one commits: what it has read may be old by then.
        self.commits = 0

    def get(self, key: bytes) -> bytes | _Unknown | None:
        """Return a value, None if the key is known to be absent, UNKNOWN if nothing is known."""
        return self._values.get(key, UNKNOWN)

    def get_all(self, keys: Sequence[bytes]) -> list[bytes | _Unknown | None]:
        """Look many keys up."""
        known = self._values
        return [known.get(key, UNKNOWN) for key in keys]

    def begin(self) -> None:
        """Say that a commit begins: what is read from here on may be old when it is told."""
        with self._lock:
            self.commits += 1

    def put_read(self, rows: Iterable[tuple[bytes, bytes | None]], commits: int) -> None:
        """Remember rows that were read when ``commits`` was what it is still, else forget them."""
        self._put(rows, commits)

    def put_committed(self, rows: Iterable[tuple[bytes, bytes | None]]) -> None:
        """Remember rows that were committed; None for a key that was deleted."""
        self._put(rows, None)

    def clear(self) -> None:
        """Forget everything: it is not known which of the rows hold."""
        with self._lock:
            self.commits += 1
            self._values.clear()
            self._bytes = 0

    def _put(self, rows: Iterable[tuple[bytes, bytes | None]], commits: int | None) -> None:
        values, largest = self._values, self._max_bytes // 8
        with self._lock:
            if commits is None:
                self.commits += 1
            elif commits != self.commits:
                return
            for key, value in rows:
                self._forget(key)
                size = len(key) + _OVERHEAD + (len(value) if value is not None else 0)
                if size <= largest:
                    values[key] = value
                    self._bytes += size
            while self._bytes > self._max_bytes:
                self._forget(next(iter(values)))

    def _forget(self, key: bytes) -> None:
        if key in self._values:
            value = self._values.pop(key)
            self._bytes -= len(key) + _OVERHEAD + (len(value) if value is not None else 0)
