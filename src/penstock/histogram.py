"""How often a number was how large: what Prometheus calls a histogram."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final, Self

import msgspec

# Durations in seconds, from what a call in memory takes up to what nobody waits for.
SECONDS: Final = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)


class Histogram(msgspec.Struct):
    """How many values were at most ``bounds[i]``, and above the bound before; then the rest.

    Only one thread at a time may add values.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def over(cls, bounds: tuple[float, ...] = SECONDS) -> Self:
        """Make an empty histogram."""
        return cls(bounds, [0] * (len(bounds) + 1))

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add_all(self, other: Histogram) -> None:
        """Count all values of another one, which has the same bounds."""
        for at, count in enumerate(other.counts):
            self.counts[at] += count
        self.sum += other.sum

    def copy(self) -> Self:
        """Return the histogram as it is now."""
        return type(self)(self.bounds, list(self.counts), self.sum)

    def cumulated(self) -> list[tuple[str, float]]:
        """Return how many values were at most each bound, as Prometheus wants it."""
        total, pairs = 0, []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            pairs.append((bound, float(total)))
        return pairs
