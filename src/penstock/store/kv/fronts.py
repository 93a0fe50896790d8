"""Small memories beside the tables: where ranges of keys begin, and when something is due.

An LSM tree steps over deleted keys until it is compacted. A range that is deleted at its head, as a
queue is, would cost a scan from its beginning as much as everything that has ever passed through
it. :class:`Fronts` remembers where such a range begins. :class:`DueHeap` finds the next due time.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from penstock.engines import rows_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.engines import Table

K = TypeVar("K")

# A range that nobody reads is looked at after this many deletions.
LOOK_AFTER: Final = 1_000


class Fronts(dict[bytes, bytes]):
    """The lowest key that may be alive in each range of a table, by the range's beginning.

    A writer that puts a key into a range notes it here. A writer that deletes keys need not, if the
    range is read as often as keys are deleted from it.
    """

    def __init__(self, table: Table) -> None:
        super().__init__()
        self._table = table
        self._gone: dict[bytes, int] = {}

    def note(self, begin: bytes, key: bytes) -> None:
        """Note that a key is put into a range."""
        if key < self.get(begin, begin):
            self[begin] = key

    def note_gone(self, begin: bytes, end: bytes, count: int) -> None:
        """Note that keys of a rarely read range are deleted, so that its front moves on."""
        gone = self._gone.get(begin, 0) + count
        self._gone[begin] = gone % LOOK_AFTER
        if gone >= LOOK_AFTER:
            self.scan(begin, end, 1)

    def scan(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), ascending; the end may differ each time."""
        front = self.get(begin, begin)
        if front >= end:
            return []
        rows = self._table.scan(front, end, limit)
        self[begin] = rows[0][0] if rows else end
        return rows

    def page(
        self, begin: bytes, end: bytes, after: bytes, limit: int
    ) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), from a key on or from the front."""
        return self._table.scan(after, end, limit) if after else self.scan(begin, end, limit)

    def rows(self, begin: bytes, end: bytes, *, page: int) -> Iterator[tuple[bytes, bytes]]:
        """Read every pair of [begin, end), a page at a time."""
        rows = self.scan(begin, end, page)
        yield from rows
        if len(rows) == page:
            yield from rows_of(self._table, rows[-1][0] + b"\0", end, page=page)

    def overrun(self) -> Iterator[bytes]:
        """Give the first live key of each range that lies before its front: there must be none."""
        for begin, front in self.items():
            for key, _ in self._table.scan(begin, front, 1):
                yield key


class DueHeap(Generic[K]):
    """A due time, or another rank, per key; finding the lowest costs little, however many."""

    __slots__ = ("_heap", "ranks")

    def __init__(self) -> None:
        self.ranks: dict[K, int] = {}
        # Entries that `ranks` no longer agrees with are dropped when they come up.
        self._heap: list[tuple[int, K]] = []

    def set(self, key: K, rank: int | None) -> None:
        """Set or (None) clear the rank of a key."""
        ranks = self.ranks
        if rank is None:
            ranks.pop(key, None)
            if not ranks:
                self._heap.clear()
        elif ranks.get(key) != rank:
            ranks[key] = rank
            heappush(self._heap, (rank, key))
            if len(self._heap) > 8 + 2 * len(ranks):
                self._heap = [(rank, key) for key, rank in ranks.items()]
                heapify(self._heap)

    def lower(self, key: K, rank: int) -> None:
        """Bring the rank of a key down, never up."""
        present = self.ranks.get(key)
        if present is None or rank < present:
            self.set(key, rank)

    def get(self, key: K) -> int | None:
        """Return the rank of a key."""
        return self.ranks.get(key)

    def items(self) -> Iterable[tuple[K, int]]:
        """Return every key with its rank."""
        return self.ranks.items()

    def first(self) -> tuple[int, K] | None:
        """Return the lowest rank and its key."""
        heap, ranks = self._heap, self.ranks
        while heap:
            rank, key = heap[0]
            if ranks.get(key) == rank:
                return rank, key
            heappop(heap)
        return None
