"""What the tests of workers share: waiting for conditions, brokers that fail, filled queues."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests import waiting

from penstock import Message, SystemClock
from penstock.errors import StorageFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock import Broker

PATIENCE_SECONDS = 120.0


def wait_until(condition: Callable[[], object], what: str = "") -> None:
    """Wait for something that must happen, however slow the machine is."""
    waiting.wait_until(condition, PATIENCE_SECONDS, f"it did not happen: {what or condition}")


def fill(broker: Broker, queue: str, count: int, **options: Any) -> list[int]:
    return broker.publish([Message(b"%d" % n, {"queue": queue}, **options) for n in range(count)])


def reasons(broker: Broker, queue: str, message_id: int) -> list[str]:
    return [attempt.reason for attempt in broker.attempts(queue, message_id)]


def alive(pid: int) -> bool:
    """Whether a process runs; one that waits to be reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


class Spied:
    """A broker whose calls are counted, and fail while told to."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._clock = SystemClock()
        self.calls: dict[str, list[int]] = {}
        self.failing: set[str] = set()
        self.error: Exception = StorageFailed("it does not work today")
        # Calls of these wait until they are taken out.
        self.held: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._broker, name)
        if name not in {"claim", "ack", "release", "extend"}:
            return verb

        def called(first: Any, **options: Any) -> Any:
            self.calls.setdefault(name, []).append(0 if name == "claim" else len(first))
            until = self._clock.seconds() + PATIENCE_SECONDS
            while name in self.held and self._clock.seconds() < until:
                threading.Event().wait(0.005)
            if name in self.failing:
                raise self.error
            return verb(first, **options)

        return called


class Gate:
    """A handler that waits until it is let go, and notes what it was given."""

    def __init__(self) -> None:
        self.begun: list[bytes] = []
        self.open = threading.Event()

    def __call__(self, delivery: Any) -> None:
        self.begun.append(delivery.payload)
        self.open.wait()
