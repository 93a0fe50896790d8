"""Claims that wait for messages: who admits them, and how long they have waited."""

from __future__ import annotations

from asyncio import TimerHandle  # noqa: TC003 - msgspec reads the types of fields
from typing import Protocol

from penstock.broker.requests import Claim
from penstock.clock import loop_seconds


class Admission(Protocol):
    """Back-pressure hook of a claim that waits."""

    # How long the claim was parked: that is no work of the server.
    waited_s: float

    def admit(self) -> bool:
        """Whether the claim may be retried now; if not, its future is cancelled."""

    def leave(self) -> None:
        """Take note that the claim found nothing and is parked, until it is admitted again."""


class ClaimWait:
    """Admits a claim at any time, and tells how long it was parked."""

    def __init__(self) -> None:
        self.waited_s = 0.0

    def admit(self) -> bool:
        """Admit it."""
        return True

    def leave(self) -> None:
        """Do nothing: it takes no room."""


class WaitingClaim(Claim, eq=False, kw_only=True):
    """A claim that may wait: until when, and the alarm that ends it while it is parked."""

    until: float
    admission: Admission | None
    alarm: TimerHandle | None = None
    parked_at: float = 0.0

    def park(self, alarm: TimerHandle) -> None:
        """Note that it is parked from now on."""
        self.alarm, self.parked_at = alarm, loop_seconds()
        if self.admission is not None:
            self.admission.leave()

    def unpark(self) -> bool:
        """Note that it is parked no more; return whether it was."""
        if self.alarm is None:
            return False
        self.alarm.cancel()
        self.alarm = None
        if self.admission is not None:
            self.admission.waited_s += loop_seconds() - self.parked_at
        return True
