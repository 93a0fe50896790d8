"""Coroutine handlers: tasks of one event loop, on a thread of its own.

A handler that is over its time limit is cancelled. One that goes on in spite of it keeps its
message, and its slot, until it returns; then it has failed all the same. A task that calls
``sys.exit`` takes asyncio's loop with it; here the loop goes on.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, cast

from penstock.worker.handling import handle_async
from penstock.worker.outcome import over_limit, verdict_of
from penstock.worker.pool_threads import watched
from penstock.worker.state import CUT_OFF

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from penstock.model import Delivery
    from penstock.worker.handling import Handler
    from penstock.worker.hands import Task
    from penstock.worker.outcome import Verdict
    from penstock.worker.state import Floor

__all__ = ["AsyncPool"]

log = logging.getLogger("penstock.worker")


class AsyncPool:
    """Tasks that await a coroutine function."""

    can_cut = True

    def __init__(
        self,
        floor: Floor,
        handler: Handler,
        middleware: Sequence[object],
        *,
        concurrency: int,
        time_limit_ms: int | None,
        on_broken: Callable[[BaseException], None],
    ) -> None:
        self._floor = floor
        self._handler = cast("Callable[[Delivery], Awaitable[object]]", handler)
        self._middleware = middleware
        self._concurrency = concurrency
        self._limit_s = None if time_limit_ms is None else time_limit_ms / 1000
        self._over_limit = over_limit(time_limit_ms or 0)
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_broken = on_broken
        self._cutting = False
        self._stopping = False
        self._ended = False
        self._pumping = threading.Lock()
        self._thread = threading.Thread(
            target=watched, args=(self._run, on_broken), name="penstock-work-loop", daemon=True
        )
        floor.on_ready = self._wake

    def start(self) -> None:
        """Start the loop."""
        self._thread.start()
        self._wake()

    def cut(self) -> None:
        """Cancel every handler."""
        self._cutting = True
        self._call(self._cancel)

    def join(self, within_ms: int) -> None:
        """Stop the loop; a handler that would not be cancelled is left where it is."""
        self._stopping = True
        self._call(self._loop.stop)
        if self._thread.ident is not None:
            self._thread.join(within_ms / 1000)

    # --- from other threads ------------------------------------------------------------------

    def _call(self, act: Callable[[], object]) -> None:
        with self._pumping:
            # After this thread's last breath there is no loop to call.
            if not self._ended:
                self._loop.call_soon_threadsafe(act)

    def _wake(self) -> None:
        self._call(self._watched_pump)

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
            with self._pumping:
                self._ended = True
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                # One turn, for those that end when they are told to.
                self._loop.run_until_complete(asyncio.wait(self._tasks, timeout=0.1))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _watched_pump(self) -> None:
        watched(self._pump, self._on_broken)

    def _pump(self) -> None:
        while not self._cutting and len(self._tasks) < self._concurrency:
            task = self._floor.take(wait=False)
            if task is None:
                return
            made = self._loop.create_task(self._work(task))
            self._tasks.add(made)
            made.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_broken(error)
        self._watched_pump()

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _work(self, task: Task) -> None:
        limit = asyncio.timeout(self._limit_s)
        verdict: Verdict
        try:
            async with limit:
                verdict = await handle_async(self._handler, self._middleware, task.delivery)
        except (TimeoutError, asyncio.CancelledError):
            verdict = CUT_OFF
        except BaseException as error:
            verdict = verdict_of(error)
        if limit.expired():
            verdict = self._over_limit
        elif self._cutting and verdict.failed:
            verdict = CUT_OFF
        self._floor.done(task, verdict)
