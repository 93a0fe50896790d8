"""A damaged database as salvage reads it: rows, and notes of everything that can't be read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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

    ``damage`` lists unreadable rows, and grows while rows are read; ``notes`` tell of faults that
    have cost nothing, or whose cost is unknown.
    """

    def __init__(self) -> None:
        self.damage: list[Damage] = []
        self.notes: list[str] = []

    @property
    @abstractmethod
    def tables(self) -> list[str]:
        """The names of the known tables."""

    @abstractmethod
    def rows(self, table: str) -> Iterator[tuple[bytes, bytes]]:
        """Read every readable row of a table."""

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    def add_damage(
        self,
        file: str,
        text: str,
        table: str | None = None,
        begin: bytes = b"",
        end: bytes | None = None,
    ) -> None:
        """Note unreadable rows."""
        self.damage.append(Damage(file, table, begin, end, text))


def next_readable(
    look: Callable[[bytes], tuple[bool, bytes | None]], begin: bytes, end: bytes | None
) -> bytes | None:
    """Find the first key of [begin, end) from which on rows can be read again; else ``end``.

    ``look`` tells whether the first row at or after a key can be read, and its key if there is
    one. Keys are taken for numbers: the distance is doubled until a place can be read, and then
    halved to where that begins. In between some places are tried for readable rows; a few rows
    between two unreadable blocks may still be missed.
    """
    width = len(begin) + 8
    low = int.from_bytes(begin.ljust(width, b"\0"), "big")
    top = (1 << 8 * width) - 1
    if end is not None:
        top = min(top, int.from_bytes(end[:width].ljust(width, b"\0"), "big"))

    def readable(position: int) -> bool:
        return look(position.to_bytes(width, "big"))[0]

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
    key = look(good.to_bytes(width, "big"))[1]
    return end if key is None or (end is not None and key >= end) else key
