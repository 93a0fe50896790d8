"""How a process behaves at a queue that others claim from as well.

A zone is one claimer's at a time. Where zones are scarce a claim does not take all that are free,
and one that has found none free waits for a moment before it looks again. How many it takes, and
how long it waits, is learned from what came of its visits. Nothing here waits or draws: that is
the caller's.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Crowding"]

# Visits that met nobody, between two steps up to more zones at a time.
PATIENCE: Final = 4
# A visit that was in vain doubles the wait, one that was not makes it a little shorter: so the wait
# settles where about one visit in ten is in vain, however fast the database is. The broker lets
# nobody else in while a claim waits, therefore the limit.
PAUSE_MIN_MS: Final = 4.0
PAUSE_MAX_MS: Final = 40.0
SHORTER: Final = 0.93


class Crowding:
    """What was learned of each queue that others were met at."""

    def __init__(self) -> None:
        self._crowds: dict[int, _Crowd] = {}

    def width(self, queue: int, most: int) -> int:
        """Return how many zones of a queue to take at a time: ``most`` if nobody was met."""
        crowd = self._crowds.get(queue)
        return most if crowd is None else min(most, crowd.width)

    def pause_ms(self, queue: int) -> float:
        """Return how long to wait after a visit in vain."""
        crowd = self._crowds.get(queue)
        return PAUSE_MIN_MS if crowd is None else crowd.pause_ms

    def note(self, queue: int, most: int, *, wanted: int, won: int, passed: int) -> None:
        """Note how many zones a visit wanted, how many it won, and how many it passed by."""
        crowd = self._crowds.get(queue)
        if crowd is None:
            if won == wanted:
                return
            crowd = self._crowds[queue] = _Crowd(most)
        crowd.note(wanted, won, passed)
        if crowd.width >= most and crowd.pause_ms <= PAUSE_MIN_MS:
            del self._crowds[queue]


class _Crowd:
    """What was learned of one queue."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.pause_ms = PAUSE_MIN_MS
        self._calm = 0

    def note(self, wanted: int, won: int, passed: int) -> None:
        if won:
            self.pause_ms = max(PAUSE_MIN_MS, self.pause_ms * SHORTER)
        else:
            self.pause_ms = min(PAUSE_MAX_MS, self.pause_ms * 2)
        if won < wanted:
            self.width, self._calm = max(1, won // 2), 0
        elif not passed:
            self._calm += 1
            if self._calm == PATIENCE:
                self.width, self._calm = self.width + 1, 0
