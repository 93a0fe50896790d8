"""Going on behind rows that can't be read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["next_readable"]

# How many places between two readable rows are tried for more of them.
_SAMPLES: Final = 64


def next_readable(
    look: Callable[[bytes], tuple[bool, bytes | None]], begin: bytes, end: bytes | None
) -> bytes | None:
    """Find the first key of [begin, end) from which on rows can be read again; else ``end``.

    ``look`` tells whether the first row at or after a key can be read, and its key if there is
    one. Keys are taken for numbers: the distance is doubled until a place can be read, and then
    halved to where that begins. In between some places are tried for readable rows; a few rows
    between two blocks that can't be read may still be missed.
    """
    width = len(begin) + 8
    low = int.from_bytes(begin.ljust(width, b"\0"), "big")
    top = (1 << 8 * width) - 1
    if end is not None:
        top = min(top, int.from_bytes(end[:width].ljust(width, b"\0"), "big"))

    def readable(place: int) -> bool:
        return look(place.to_bytes(width, "big"))[0]

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
        places = range(low + stride, good, stride)
        sooner = next((place for place in places if readable(place)), None)
        if sooner is None:
            break
        good = border(sooner - stride, sooner)
    key = look(good.to_bytes(width, "big"))[1]
    return end if key is None or (end is not None and key >= end) else key
