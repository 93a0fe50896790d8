"""The only module that reads time, randomness and fresh ids.

Everything else is told ``now_ms``, which is what lets a test or the simulator run years in
seconds and replay a run from one seed.
"""

from __future__ import annotations

import random
import time
from functools import partial
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Waitable(Protocol):
    """A held ``threading.Condition``, or a :class:`~penstock.waiter.Waiter`."""

    def wait(self, timeout: float | None = None, /) -> object:
        """Wait until woken, or for so many seconds."""


class Clock(Protocol):
    """Where the broker gets time, waiting, jitter and lease ids from."""

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""

    def seconds(self) -> float:
        """Return a reading to measure with: only the difference of two means something."""

    def wait(self, condition: Waitable, timeout_ms: int | None) -> None:
        """Wait on a condition until woken or until ``timeout_ms`` of this clock passed."""

    def random(self) -> float:
        """Return a number in [0, 1), for jitter."""

    def lease_id(self) -> bytes:
        """Return sixteen fresh bytes that no other lease has."""


def uuid7(now_ms: int, random_bits: int) -> bytes:
    """Lay out a version 7 UUID: 48 bits of time, then version, variant and 74 random bits."""
    rand_a = (random_bits >> 62) & 0xFFF
    rand_b = random_bits & ((1 << 62) - 1)
    value = (now_ms & ((1 << 48) - 1)) << 80 | 0x7 << 76 | rand_a << 64 | 0b10 << 62 | rand_b
    return value.to_bytes(16, "big")


# The clock of event loops itself: uvloop's own reading of it is of whole milliseconds, and as old
# as the turn of the loop.
loop_seconds = time.monotonic


class SystemClock:
    """The machine's clock."""

    def __init__(self) -> None:
        # Seeded by the system once: asking it each time would cost more than the claim itself.
        self._random = random.Random(random.SystemRandom().getrandbits(128))  # noqa: S311

    # The performance counter itself: every verb reads it.
    seconds = staticmethod(time.perf_counter)

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""
        return time.time_ns() // 1_000_000

    def wait(self, condition: Waitable, timeout_ms: int | None) -> None:
        """Wait until woken or until the timeout; both may come early, callers look again."""
        condition.wait(None if timeout_ms is None else timeout_ms / 1000)

    def random(self) -> float:
        """Return a number in [0, 1)."""
        return self._random.random()

    def lease_id(self) -> bytes:
        """Return a version 7 UUID."""
        return uuid7(self.now_ms(), self._random.getrandbits(74))


# How often a clock looks at the one that it follows, to set itself once.
_LOOKS = 3


# Time since the machine was started: setting its clock does not change it, and it goes on while the
# machine sleeps, as far as the system can tell.
_steady_ns: Callable[[], int] = time.monotonic_ns
if hasattr(time, "CLOCK_BOOTTIME"):
    _steady_ns = partial(time.clock_gettime_ns, time.CLOCK_BOOTTIME)


class FollowingClock(SystemClock):
    """A clock that is set by another one, so that processes on many machines agree.

    Between two looks at the other clock it goes on by itself: somebody who sets the clock of this
    machine must neither end the leases of others, nor date what this process publishes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ahead_ms = super().now_ms() - _steady_ns() // 1_000_000

    def now_ms(self) -> int:
        """Milliseconds since the epoch, as the other clock has it."""
        return _steady_ns() // 1_000_000 + self._ahead_ms

    def follow(self, read_ms: Callable[[], int]) -> None:
        """Look at the other clock a few times; what it said when it was quickest counts."""
        looks = []
        for _ in range(_LOOKS):
            before_ms = _steady_ns() // 1_000_000
            told_ms = read_ms()
            after_ms = _steady_ns() // 1_000_000
            looks.append((after_ms - before_ms, told_ms - (before_ms + after_ms) // 2))
        self._ahead_ms = min(looks)[1]


class ManualClock:
    """A clock that moves only when told, with seeded randomness: for tests and simulation."""

    def __init__(self, now_ms: int = 1_700_000_000_000, *, seed: int = 0) -> None:
        self._now_ms = now_ms
        self._random = random.Random(seed)  # noqa: S311 - replayable on purpose

    def now_ms(self) -> int:
        """Return the time that the test has set."""
        return self._now_ms

    def seconds(self) -> float:
        """Return the same time in seconds."""
        return self._now_ms / 1000

    def advance(self, ms: int) -> int:
        """Move the clock (back as well, if negative) and return the new time."""
        self._now_ms += ms
        return self._now_ms

    def wait(self, condition: Waitable, timeout_ms: int | None) -> None:
        """Wait until woken, or for a moment of real time: the clock may have been moved."""
        if timeout_ms is None or timeout_ms > 0:
            condition.wait(0.01)

    def random(self) -> float:
        """Return the next number of the seeded sequence."""
        return self._random.random()

    def lease_id(self) -> bytes:
        """Return a version 7 UUID from the seeded sequence."""
        return uuid7(self._now_ms, self._random.getrandbits(74))


class TimeGuard:
    """Time inside a store never goes backwards.

    While the wall clock is behind what the store has already seen (it was stepped back, before or
    after a restart), the store's time goes on at half speed until the wall clock has caught up:
    leases still expire, and the two meet again.
    """

    def __init__(self, floor_ms: int = 0) -> None:
        self._now_ms = floor_ms
        self._wall_ms = 0
        # Where wall and store time stood when the wall clock was last seen to be behind.
        self._anchor_wall_ms: int | None = None
        self._anchor_now_ms = floor_ms

    def now_ms(self, wall_ms: int) -> int:
        """Turn a reading of the wall clock into the store's time."""
        if wall_ms >= self._now_ms:
            self._anchor_wall_ms = None
            self._now_ms = wall_ms
        else:
            if self._anchor_wall_ms is None or wall_ms < self._wall_ms:
                self._anchor_wall_ms, self._anchor_now_ms = wall_ms, self._now_ms
            self._now_ms = max(
                self._now_ms, self._anchor_now_ms + (wall_ms - self._anchor_wall_ms) // 2
            )
        self._wall_ms = wall_ms
        return self._now_ms
