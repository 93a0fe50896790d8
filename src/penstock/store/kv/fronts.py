"""Where ranges of keys begin that are deleted at their head.

An LSM tree steps over what was deleted until it is compacted. A scan from the beginning of such a
range would cost as much as everything that has ever passed through it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.engines import rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.engines import Table

__all__ = ["Fronts"]

# Keys that go before somebody looks where a range begins that nobody reads.
LOOK_AFTER: Final = 1_000


class Fronts:
    """The lowest key that may be alive in each range of a table, named by the range's beginning.

    Whoever puts a key into a range notes it here; whoever deletes need not, if the range is read
    as often as keys go from it.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._fronts: dict[bytes, bytes] = {}
        self._gone: dict[bytes, int] = {}

    def note(self, begin: bytes, key: bytes) -> None:
        """Note that a key is put into a range."""
        if key < self._fronts.get(begin, begin):
            self._fronts[begin] = key

    def note_gone(self, begin: bytes, end: bytes, count: int) -> None:
        """Note that keys go from a range that is rarely read, so that its front moves on."""
        gone = self._gone.get(begin, 0) + count
        self._gone[begin] = gone % LOOK_AFTER
        if gone >= LOOK_AFTER:
            self.scan(begin, end, 1)

    def scan(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), ascending; the end may differ each time."""
        front = self._fronts.get(begin, begin)
        if front >= end:
            return []
        rows = self._table.scan(front, end, limit)
        self._fronts[begin] = rows[0][0] if rows else end
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
        for begin, front in self._fronts.items():
            for key, _ in self._table.scan(begin, front, 1):
                yield key
