"""Frames of the native protocol: a length of four bytes, big-endian, and as many bytes."""

from __future__ import annotations

from typing import Final

from penstock import limits
from penstock.errors import InvalidInput

HEADER_BYTES: Final = 4


class FrameReader:
    """Cuts a stream, in whatever pieces it comes, into frames.

    It refuses a length that is not allowed before it keeps anything for it. ``max_frame_bytes``
    may be raised on the way; ``pending`` is the number of bytes that were fed and not taken.
    """

    __slots__ = ("_at", "_later", "_now", "max_frame_bytes", "pending")

    def __init__(self, max_frame_bytes: int = limits.MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        self.pending = 0
        # Frames are views of ``_now``, which therefore never changes; the bytes after it are
        # gathered in ``_later`` until a frame needs them.
        self._now = b""
        self._at = 0
        self._later = bytearray()

    def feed(self, data: bytes) -> None:
        """Add the next bytes of the stream."""
        if self.pending:
            self._later += data
        else:
            self._now, self._at = data, 0
        self.pending += len(data)

    def take(self) -> memoryview | None:
        """Return the next whole frame without its length, or None until there is one."""
        if self.pending < HEADER_BYTES:
            return None
        if self._at + HEADER_BYTES > len(self._now):
            self._join()
        begin = self._at + HEADER_BYTES
        size = int.from_bytes(self._now[self._at : begin], "big")
        if not 0 < size <= self.max_frame_bytes:
            raise InvalidInput(f"a frame of {size} bytes; allowed are 1 to {self.max_frame_bytes}")
        if self.pending < HEADER_BYTES + size:
            return None
        if begin + size > len(self._now):
            self._join()
            begin = HEADER_BYTES
        self._at = begin + size
        self.pending -= HEADER_BYTES + size
        return memoryview(self._now)[begin : self._at]

    @property
    def next_bytes(self) -> bytes:
        """The first bytes that were not taken: the length of a frame, if they are of one."""
        return self._now[self._at : self._at + HEADER_BYTES]

    def _join(self) -> None:
        """Move the bytes of ``_later`` behind those of ``_now`` that were not taken."""
        self._now = b"".join((memoryview(self._now)[self._at :], self._later))
        self._at = 0
        self._later = bytearray()
