"""Waiting for what is bound to come, however slow the machine is."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from penstock.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable

PAUSE_S = 0.02


def wait_until(
    condition: Callable[[], object], seconds: float = 60, why: str = "waited too long"
) -> None:
    """Return once a condition holds; fail, saying why, if it does not come to that."""
    clock = SystemClock()
    until = clock.seconds() + seconds
    while not condition():
        assert clock.seconds() < until, why
        threading.Event().wait(PAUSE_S)
