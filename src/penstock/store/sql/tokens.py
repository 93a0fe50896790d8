"""Hash tokens: which part of Q_C a zone's pointer is in, and in which order a claim looks.

Pointers of one token lie together, and a claim walks the tokens from one that it draws, so that
claims on many machines begin at different places. A zone keeps the token that it was given until
its pointer is collected: the ring may grow or shrink at any time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["choose", "token_of", "walk"]


def token_of(queue: int, zone: bytes, ring_size: int) -> int:
    """Return the token of a zone that is made now."""
    return crc32(zone, crc32(queue.to_bytes(4, "big"))) % ring_size


def walk(ring_high: int, random: Callable[[], float]) -> list[int]:
    """Return every token that may be in use, in order, from a random one on."""
    if ring_high == 1:
        return [0]
    start = int(random() * ring_high)
    return [(start + step) % ring_high for step in range(ring_high)]


def choose(count: int, wanted: int, random: Callable[[], float]) -> Sequence[int]:
    """Choose which of ``count`` pointers to visit, at random."""
    places = list(range(count))
    # The first steps of a shuffle.
    for at in range(wanted):
        other = at + int(random() * (count - at))
        places[at], places[other] = places[other], places[at]
    return places[:wanted]
