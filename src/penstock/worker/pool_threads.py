"""Handlers on threads: one for each message that is worked on at a time.

A thread can't be ended from outside. A handler that is over its time limit has its message taken
away, and keeps its thread until it returns.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Protocol

from penstock.worker.handling import handle
from penstock.worker.outcome import verdict_of
from penstock.worker.retry import Ticker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.clock import Clock
    from penstock.worker.handling import Handler
    from penstock.worker.state import Floor

__all__ = ["Pool", "ThreadPool", "watched"]


def watched(work: Callable[[], None], on_broken: Callable[[BaseException], None]) -> None:
    """Do what a thread of a pool does, and tell if it ends by an error: it would be missed."""
    try:
        work()
    except BaseException as error:
        on_broken(error)


class Pool(Protocol):
    """What runs handlers: it takes messages from the floor, and says there what came of them."""

    can_cut: bool
    """Whether :meth:`cut` ends handlers that run."""

    def start(self) -> None:
        """Begin."""

    def cut(self) -> None:
        """End handlers that run, as far as that can be done, and take no more messages."""

    def join(self, within_ms: int) -> None:
        """Wait for so long until everything has ended; called after the floor has ended."""


class ThreadPool:
    """Threads that run a plain function."""

    can_cut = False

    def __init__(
        self,
        floor: Floor,
        handler: Handler,
        middleware: Sequence[object],
        *,
        concurrency: int,
        time_limit_ms: int | None,
        clock: Clock,
        on_broken: Callable[[BaseException], None],
    ) -> None:
        self._floor = floor
        self._run = partial(handle, handler, middleware)
        self._threads = [
            threading.Thread(
                target=watched, args=(self._work, on_broken), name=f"penstock-work-{n}", daemon=True
            )
            for n in range(concurrency)
        ]
        self._limits: Ticker | None = None
        if time_limit_ms is not None:
            tick = partial(floor.give_back_overdue, time_limit_ms)
            self._limits = Ticker("penstock-limits", tick, clock)
            floor.on_begun = self._limits.nudge

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()
        if self._limits is not None:
            self._limits.start()

    def cut(self) -> None:
        """Do nothing: a thread can't be ended."""

    def join(self, within_ms: int) -> None:
        """Wait for threads that have nothing to do; others end with their handler."""
        if self._limits is not None:
            self._limits.stop()
        share = within_ms / 1000 / len(self._threads)
        for thread in self._threads:
            thread.join(share)

    def _work(self) -> None:
        while (task := self._floor.take()) is not None:
            try:
                verdict = self._run(task.delivery)
            except BaseException as error:
                verdict = verdict_of(error)
            self._floor.done(task, verdict)
