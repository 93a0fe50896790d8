"""What to do when the store does not answer: how long to wait, and what to say about it.

Everything that a worker does is tried again for ever, since messages that it can't settle come
back by themselves when their lease ends. The log tells of a change, not of every try. Only a
broker of this very process that is closed, or has lost its store to another, and a client that was
closed or refused for good, end the worker: they can't get better.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from penstock.broker.broker import Broker
from penstock.errors import BrokerClosed, PenstockError, StoreFenced
from penstock.model import QueueSpec
from penstock.store.policy import backoff_ms

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.clock import Clock
    from penstock.worker.outcome import Verdict

__all__ = ["Failures", "Standing", "Ticker", "is_final"]

log = logging.getLogger("penstock.worker")

# The pause between two tries, in the terms that queues have for theirs.
PAUSES: Final = QueueSpec(name="worker", filter="", backoff_base_ms=250, backoff_cap_ms=10_000)
# Kinds of failures that are told apart; beyond that a new one is not told of.
MOST_KINDS: Final = 1_000


def is_final(error: BaseException, broker: object) -> bool:
    """Whether trying again can't help."""
    if isinstance(broker, Broker):
        return isinstance(error, BrokerClosed | StoreFenced)
    # Not by the error: a server that is stopping says that it is closed, and the next one may be on
    # its way; a client that was refused for good raises what it was refused with.
    return bool(getattr(broker, "closed", False))


class Standing:
    """Whether one of a worker's activities works at present."""

    def __init__(self, activity: str, clock: Clock, on_error: Callable[[Exception], None]):
        self.activity = activity
        self._clock = clock
        self._on_error = on_error
        self._failures = 0
        self._since = 0.0
        self._last = ""

    @property
    def in_trouble(self) -> bool:
        """Whether the last try failed."""
        return self._failures > 0

    def worked(self) -> None:
        """Note a success."""
        if self._failures:
            seconds = self._clock.seconds() - self._since
            log.info(
                "%s works again after %.1f s and %d failures",
                self.activity,
                seconds,
                self._failures,
            )
            self._failures = 0
            self._last = ""

    def failed(self, error: Exception) -> int:
        """Note a failure; return how long to wait before the next try."""
        if not self._failures:
            self._since = self._clock.seconds()
        self._failures += 1
        kind = type(error).__name__
        if kind != self._last:
            self._last = kind
            # What Penstock does not raise on purpose is a defect: where it came from matters.
            trace = None if isinstance(error, PenstockError) else error
            log.warning(
                "%s does not work, it is tried again: %s", self.activity, error, exc_info=trace
            )
        self._on_error(error)
        return backoff_ms(PAUSES, self._failures, self._clock.random)


class Failures:
    """Tells of a handler's failures: the first of each kind with its traceback."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def tell(self, verdict: Verdict, queue: str, message_id: int) -> None:
        """Tell of one failure, if it is of a new kind."""
        kind = verdict.place or verdict.reason
        new = kind not in self._seen and len(self._seen) < MOST_KINDS
        level = logging.WARNING if new else logging.DEBUG
        if new:
            self._seen.add(kind)
        if log.isEnabledFor(level):
            log.log(
                level,
                "message %d of %s failed: %s%s",
                message_id,
                queue,
                verdict.reason,
                f"\n{verdict.trace}" if verdict.trace else "",
            )


class Ticker:
    """A thread that does what is due, and sleeps until the next thing is."""

    def __init__(self, name: str, tick: Callable[[], int | None], clock: Clock) -> None:
        """``tick`` does what is due and returns in how many ms it wants to be called again."""
        self._tick = tick
        self._clock = clock
        self._moved = threading.Condition()
        self._woken = False
        self._stopped = False
        # Whether it may go to sleep, or has, with nothing to wake it by itself.
        self._resting = True
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wake(self) -> None:
        """Call ``tick`` now: something may be due earlier than it said."""
        with self._moved:
            self._woken = True
            self._moved.notify()

    def nudge(self) -> None:
        """Call ``tick`` now if it saw nothing to come: what it did see comes earlier than this."""
        if self._resting:
            self.wake()

    def stop(self) -> None:
        """End after the call that is under way, if one is."""
        with self._moved:
            self._stopped = True
            self._moved.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._moved:
                if self._stopped:
                    return
                self._woken = False
            self._resting = True
            pause_ms = self._tick()
            self._resting = pause_ms is None
            with self._moved:
                if self._quiet() and (pause_ms is None or pause_ms > 0):
                    self._clock.wait(self._moved, pause_ms)

    def _quiet(self) -> bool:
        return not (self._stopped or self._woken)
