"""Numbers that never repeat, handed out in blocks: RFC 0002's SeqBlock.

A block record says which numbers may have been used. Opening a store starts after the recorded
block, so a crash leaves a gap and never a repetition. The record of a new block goes into the
batch that first uses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.store.codec.encodings import decode_seq_block, encode_seq_block

if TYPE_CHECKING:
    from penstock.engines import Batch, Table

__all__ = ["Sequence"]

BLOCK_SIZE: Final = 4096


class Sequence:
    """One counter, kept under ``key`` of ``table``. ``end`` is that of the block on record."""

    def __init__(self, table: Table, key: bytes, *, first: int) -> None:
        self._table = table
        self._key = key
        # It starts after the block on record.
        record = table.get(key)
        base, size = (first, 0) if record is None else decode_seq_block(record)
        self._next = self.end = base + size

    @property
    def next(self) -> int:
        """The number that is handed out next."""
        return self._next

    def allocate(self, batch: Batch, count: int) -> int:
        """Return the first of ``count`` consecutive fresh numbers."""
        first = self._next
        if first + count > self.end:
            size = max(first + count - self.end, BLOCK_SIZE)
            batch.put(self._key, encode_seq_block(self.end, size), self._table.family)
            self.end += size
        self._next = first + count
        return first
