"""A damaged database as salvage reads it: rows, and notes of everything that can't be read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.errors import StorageFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Row = tuple[bytes, bytes]
_PAGE: Final = 500
# How many places between two readable rows are tried for more of them.
_SAMPLES: Final = 64


class Damage(NamedTuple):
    """Unreadable rows: of a table in [begin, end), or of an unknown one.

    ``end`` is None if there is no key after it.
    """

    file: str
    table: str | None
    begin: bytes
    end: bytes | None
    text: str


class SalvageSource(ABC):
    """A database of which files may be missing or damaged. A source never changes it.

    Reasons name the directory ``original`` where the library names ``scratch``.

    ``damage`` lists unreadable rows, and grows while rows are read; ``notes`` tell of faults that
    have cost nothing, or whose cost is unknown.
    """

    def __init__(self, scratch: str = "", original: str = "") -> None:
        self._scratch_root, self._original_root = scratch, original
        self.damage: list[Damage] = []
        self.notes: list[str] = []

    @property
    @abstractmethod
    def tables(self) -> list[str]:
        """The names of the known tables."""

    @abstractmethod
    def rows(self, table: str) -> Iterator[Row]:
        """Read every readable row of a table."""

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    def add_damage(
        self, file: str, text: str, table: str | None = None, begin: bytes = b"",
        end: bytes | None = None,
    ) -> None:  # fmt: skip
        """Note unreadable rows."""
        text = text.replace(self._scratch_root, self._original_root)
        self.damage.append(Damage(file, table, begin, end, text))


def walk(
    scan: Callable[[bytes, int], Sequence[Row]], begin: bytes, end: bytes,
    pass_over: Callable[[bytes, bytes, StorageFailed], Iterator[Row]],
) -> Iterator[Row]:  # fmt: skip
    """Read every readable row of [begin, end).

    ``scan`` reads up to so many rows from a key on. ``pass_over`` notes the unreadable rows of a
    range, and gives the rows that stand for them.
    """
    limit = _PAGE
    while begin != end:
        try:
            rows = scan(begin, limit)
        except StorageFailed as error:
            if limit > 1:
                # One by one, up to the damage.
                limit = 1
                continue
            resume = _next_readable(scan, begin, end)
            yield from pass_over(begin, resume, error)
            begin, limit = resume, _PAGE
            continue
        yield from rows
        begin = rows[-1][0] + b"\0" if len(rows) == limit else end


def _next_readable(scan: Callable[[bytes, int], Sequence[Row]], begin: bytes, end: bytes) -> bytes:
    """Find the first key of [begin, end) from which on rows can be read again; else ``end``.

    Keys are taken for numbers: the distance is doubled until a place can be read, and then halved
    to where that begins. In between some places are tried for readable rows; a few rows between two
    unreadable blocks may still be missed.
    """
    width = len(begin) + 8
    low = int.from_bytes(begin.ljust(width, b"\0"), "big")
    top = int.from_bytes(end[:width].ljust(width, b"\0"), "big")

    def readable(position: int) -> bool:
        try:
            scan(position.to_bytes(width, "big"), 1)
        except StorageFailed:
            return False
        return True

    def border(bad: int, good: int) -> int:
        while good - bad > 1:
            middle = (bad + good) // 2
            bad, good = (bad, middle) if readable(middle) else (middle, good)
        return good

    step = 1
    while low + step < top and not readable(low + step):
        step *= 2
    if low + step >= top and not readable(top):
        return end
    good = border(low, min(low + step, top))
    while stride := (good - low) // _SAMPLES:
        sooner = next((at for at in range(low + stride, good, stride) if readable(at)), None)
        if sooner is None:
            break
        good = border(sooner - stride, sooner)
    rows = scan(good.to_bytes(width, "big"), 1)
    return rows[0][0] if rows else end
