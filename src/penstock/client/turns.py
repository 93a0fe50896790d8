"""Which of several addresses a client connects to next, when, and why there is no connection.

Each address has its turn at once; after all of them have failed there is a pause, which grows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.errors import ServerUnreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.errors import PenstockError

BACKOFF_BASE_MS: Final = 50
BACKOFF_CAP_MS: Final = 5_000
# How long one of several addresses has for the connection, and again for the greeting.
TURN_MS: Final = 3_000
# A connection that lasted so long was a good one: all addresses have a turn before the next pause.
GOOD_MS: Final = 1_000


class Turns:
    """The addresses of one client. ``tries`` counts pauses since a server has said welcome."""

    def __init__(self, addresses: Sequence[str], random: Callable[[], float]) -> None:
        self._addresses = addresses
        self._random = random
        self.at = 0
        self.tries = 0
        # Why the last connection ended, or was not made.
        self.reason = "no connection yet"
        # By address: why there is no connection, and errors that waiting can't help.
        self._reasons: dict[int, str] = {}
        self._refusals: dict[int, PenstockError] = {}
        # Addresses that failed since the last good connection, or the last pause.
        self._failed = 0
        self._ready_ms = 0

    @property
    def several(self) -> bool:
        """Whether there is another address to go to."""
        return len(self._addresses) > 1

    @property
    def why(self) -> str:
        """Why there is no connection: of several addresses, the reason of each."""
        if not self.several:
            return self.reason
        told = []
        for at, address in enumerate(self._addresses):
            why = self._reasons.get(at, "no answer yet" if at == self.at else "not tried yet")
            told.append(why if address in why else f"{address}: {why}")
        return "; ".join(told)

    def turn_ms(self, alone_ms: int, patience_ms: int) -> int:
        """Return how long a server has: ``alone_ms``, or one of several no longer than its turn."""
        if not self.several:
            return alone_ms
        return max(100, min(TURN_MS, patience_ms // len(self._addresses)))

    def welcomed(self, now_ms: int) -> None:
        """Note that a server has said welcome."""
        self.tries = 0
        self._ready_ms = now_ms
        self._reasons.clear()
        self._refusals.clear()

    def lost(self, why: str, now_ms: int, *, ready: bool) -> int:
        """Turn to the next address; return when to connect to it.

        ``ready``: the server had said welcome.
        """
        if ready and now_ms - self._ready_ms >= GOOD_MS:
            self._failed = 0
        self.reason = self._reasons[self.at] = why
        if str(self._refusals.get(self.at)) != why:
            self._refusals.pop(self.at, None)
        self.at = (self.at + 1) % len(self._addresses)
        self._failed += 1
        if self._failed < len(self._addresses):
            return now_ms
        self._failed = 0
        backoff_ms = min(BACKOFF_CAP_MS, BACKOFF_BASE_MS << min(self.tries, 16))
        self.tries += 1
        return now_ms + int(backoff_ms * (0.5 + self._random() / 2))

    def refuse(self, error: PenstockError, at: int) -> PenstockError | None:
        """Note that an address is of no use as it is; return the error once no address is."""
        self._refusals[at], self._reasons[at] = error, str(error)
        if len(self._refusals) < len(self._addresses):
            return None
        if not self.several:
            return error
        alike = {type(each) for each in self._refusals.values()} == {type(error)}
        return (type(error) if alike else ServerUnreachable)(self.why)
