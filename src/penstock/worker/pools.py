"""Runs handlers on threads, or as tasks of an event loop.

A thread can't be ended from outside: a handler that is over its time limit has its message
released, and keeps its thread until it returns. A coroutine over its time limit is cancelled; one
that goes on in spite of it keeps its message, and its slot, until it returns, and has failed all
the same. A task that calls ``sys.exit`` ends asyncio's loop; here the loop goes on.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING

from penstock.worker.leases import Ticker
from penstock.worker.outcome import (
    CUT_OFF,
    handle,
    handle_async,
    over_limit,
    resolve,
    settlement_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.worker.state import Task, WorkerState

log = logging.getLogger("penstock.worker")


class Pool(ABC):
    """Threads that take messages from the worker's state, run the handler, and report back."""

    can_cut = True
    """Whether :meth:`cut` ends handlers that run."""

    def __init__(self, state: WorkerState, on_broken: Callable[[BaseException], None]) -> None:
        """``on_broken`` is called if a thread of the pool ends by an error."""
        self._state = state
        self._settings = state.settings
        self._on_broken = on_broken
        self._cutting = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads."""
        self._start_threads(self._settings.concurrency)

    @abstractmethod
    def cut(self) -> None:
        """End handlers that run, as far as that can be done, and take no more messages."""

    def join(self, within_ms: int) -> None:
        """Wait for so long until the threads have ended; called after the state has ended."""
        for thread in self._threads:
            thread.join(within_ms / 1000 / len(self._threads))

    def _start_threads(self, count: int) -> None:
        for n in range(count):
            thread = threading.Thread(
                target=self._watch, args=(self._run,), name=f"penstock-work-{n}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def _watch(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._on_broken(error)

    @abstractmethod
    def _run(self) -> None:
        """Work until the state has no more messages to take; on a thread of the pool."""


class ThreadPool(Pool):
    """Threads that run a plain function, each for one message at a time."""

    can_cut = False
    _limits: Ticker | None = None

    def start(self) -> None:
        """Start the threads."""
        self._function = resolve(self._settings.handler)
        if self._settings.time_limit_ms is not None:
            tick = partial(self._state.release_overdue, self._settings.time_limit_ms)
            self._limits = Ticker("penstock-limits", tick, self._state.clock)
            self._state.on_begun = self._limits.wake_idle
        super().start()
        if self._limits is not None:
            self._limits.start()

    def cut(self) -> None:
        """Leave the handlers alone: a thread can't be ended."""

    def join(self, within_ms: int) -> None:
        """Wait for threads that have nothing to do; others end with their handler."""
        if self._limits is not None:
            self._limits.stop()
        super().join(within_ms)

    def _run(self) -> None:
        while (task := self._state.take()) is not None:
            self._state.finish(
                task, handle(self._function, self._settings.middleware, task.delivery)
            )


class AsyncPool(Pool):
    """Tasks that await a coroutine function, on the event loop of one thread."""

    def start(self) -> None:
        """Start the loop."""
        self._function = resolve(self._settings.handler)
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        # Guards _ended: the loop can't be called once it is closed.
        self._calling = threading.Lock()
        self._ended = False
        self._take_watched = partial(self._watch, self._take)
        self._state.on_ready = partial(self._call, self._take_watched)
        self._start_threads(1)

    def cut(self) -> None:
        """Cancel every handler."""
        self._cutting = True
        self._call(self._cancel)

    def join(self, within_ms: int) -> None:
        """Stop the loop; a handler that would not be cancelled is left where it is."""
        self._stopping = True
        self._call(self._loop.stop)
        super().join(within_ms)

    def _call(self, function: Callable[[], object]) -> None:
        """Call a function on the loop; called by other threads."""
        with self._calling:
            if not self._ended:
                self._loop.call_soon_threadsafe(function)

    # --- on the loop ---------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while not self._stopping:
                try:
                    self._loop.run_forever()
                except (SystemExit, KeyboardInterrupt):
                    log.exception("a task of a handler would have ended the loop")
        finally:
            with self._calling:
                self._ended = True
            self._cancel()
            if self._tasks:
                # One turn, for tasks that end when they are cancelled.
                self._loop.run_until_complete(asyncio.wait(self._tasks, timeout=0.1))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _take(self) -> None:
        """Begin messages until all slots are taken."""
        while not self._cutting and len(self._tasks) < self._settings.concurrency:
            task = self._state.take(wait=False)
            if task is None:
                return
            running = self._loop.create_task(self._work(task))
            self._tasks.add(running)
            running.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_broken(error)
        self._take_watched()

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _work(self, task: Task) -> None:
        limit_ms = self._settings.time_limit_ms
        limit = asyncio.timeout(None if limit_ms is None else limit_ms / 1000)
        try:
            async with limit:
                settlement = await handle_async(
                    self._function, self._settings.middleware, task.delivery
                )
        except (TimeoutError, asyncio.CancelledError):
            settlement = CUT_OFF
        except BaseException as error:
            settlement = settlement_of(error)
        if limit.expired() and limit_ms is not None:
            settlement = over_limit(limit_ms)
        elif self._cutting and settlement.failed:
            settlement = CUT_OFF
        self._state.finish(task, settlement)
