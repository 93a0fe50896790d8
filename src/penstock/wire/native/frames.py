"""Frames: a length of four bytes, big-endian, and as many bytes of msgpack.

The reader takes bytes in whatever pieces they come and gives whole frames. A length that is not
allowed is refused as soon as its four bytes are there, before anything is kept for it.
"""

from __future__ import annotations

from typing import Final

from penstock import limits
from penstock.errors import InvalidInput

__all__ = ["HEADER_BYTES", "FrameReader"]

HEADER_BYTES: Final = 4


class FrameReader:
    """Cuts a stream into frames; ``max_frame_bytes`` may be raised on the way."""

    __slots__ = ("_at", "_later", "_now", "max_frame_bytes")

    def __init__(self, max_frame_bytes: int = limits.MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        # Frames are views of ``_now``, which therefore never changes; what comes after it is
        # gathered in ``_later`` until a frame needs it.
        self._now = b""
        self._at = 0
        self._later = bytearray()

    @property
    def pending(self) -> int:
        """How many bytes wait to be taken."""
        return len(self._now) - self._at + len(self._later)

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        if self._at == len(self._now) and not self._later:
            self._now, self._at = data, 0
        else:
            self._later += data

    def take(self) -> memoryview | None:
        """Return the next whole frame without its length, or None until there is one."""
        begin = self._at + HEADER_BYTES
        if begin > len(self._now):
            if not self._reach(HEADER_BYTES):
                return None
            begin = self._at + HEADER_BYTES
        size = int.from_bytes(self._now[self._at : begin], "big")
        if not 0 < size <= self.max_frame_bytes:
            raise InvalidInput(f"a frame of {size} bytes; allowed are 1 to {self.max_frame_bytes}")
        if begin + size > len(self._now):
            if not self._reach(HEADER_BYTES + size):
                return None
            begin = self._at + HEADER_BYTES
        self._at = begin + size
        return memoryview(self._now)[begin : self._at]

    def _reach(self, wanted: int) -> bool:
        """Bring the next ``wanted`` bytes together, if they are there."""
        here = len(self._now) - self._at
        if here + len(self._later) < wanted:
            return False
        self._now = b"".join((memoryview(self._now)[self._at :], self._later))
        self._at = 0
        self._later = bytearray()
        return True
