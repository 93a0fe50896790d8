"""Runs handlers on threads, as tasks of an event loop, or in child processes.

A thread can't be ended from outside: a handler that is over its time limit has its message
released, and keeps its thread until it returns. A coroutine over its time limit is cancelled; one
that goes on in spite of it keeps its message, and its slot, until it returns, and has failed all
the same. A task that calls ``sys.exit`` ends asyncio's loop; here the loop goes on.

Each child process has a thread here that sends it messages, one at a time, through a pipe; it
answers with a settlement. The parent claims, extends and settles. A child that dies, or is killed
for being over the time limit, takes nothing with it: its message is released with a reason, and a
new child takes its place. Children are started afresh, not forked, since the store's threads and
files must not be copied into them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import threading
from abc import ABC, abstractmethod
from functools import partial
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.errors import InvalidInput, PenstockError
from penstock.validation import check_optional
from penstock.worker.leases import Ticker
from penstock.worker.outcome import (
    CUT_OFF,
    Action,
    Settlement,
    handle,
    handle_async,
    is_async,
    over_limit,
    resolve,
    settlement_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from penstock.model import Delivery
    from penstock.worker.outcome import Handler
    from penstock.worker.state import Task, WorkerSettings, WorkerState

log = logging.getLogger("penstock.worker")

SPAWN: Final = multiprocessing.get_context("spawn")
READY: Final = "ready"
# How long a child that is told to go may take for it.
LEAVE_MS: Final = 1_000
# How often to look whether a child is alive whose pipes say nothing.
LOOK_MS: Final = 1_000


class Pool(ABC):
    """Threads that take messages from the worker's state, run the handler, and report back."""

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
    def cut(self) -> bool:
        """End handlers that run, and take no more messages; say whether that can be done."""

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

    def cut(self) -> bool:
        """Leave the handlers alone: a thread can't be ended."""
        return False

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
        # Guards _ended: the last steps of the loop are not to be stopped.
        self._guard, self._ended = threading.Lock(), False
        self._take_watched = partial(self._watch, self._take)
        self._state.on_ready = partial(self._call, self._take_watched)
        self._start_threads(1)

    def cut(self) -> bool:
        """Cancel every handler."""
        self._cutting = True
        self._call(self._cancel)
        return True

    def join(self, within_ms: int) -> None:
        """Stop the loop; a handler that would not be cancelled is left where it is."""
        self._stopping = True
        self._call(self._loop.stop)
        super().join(within_ms)

    def _call(self, function: Callable[[], object]) -> None:
        """Call a function on the loop; called by other threads."""
        with self._guard:
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
            with self._guard:
                self._ended = True
            self._cutting = True
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


# --- child processes ------------------------------------------------------------------------------


def check_children_possible() -> None:
    """Refuse to begin in a process that can't have children."""
    here = multiprocessing.current_process()
    # Set by multiprocessing while a child imports the module that its parent was started with.
    if getattr(here, "_inheriting", False):
        raise InvalidInput(
            "a child process has come upon a worker of its own, since children import the script "
            'of their parent: put the worker below if __name__ == "__main__":'
        )
    if here.daemon:
        raise InvalidInput("a daemonic process can't have child processes: use mode='threads'")


def check_child_options(settings: WorkerSettings) -> None:
    """Refuse a handler that can't be sent to a child, and bounds that can't be measured."""
    try:
        pickle.dumps((settings.handler, settings.middleware))
    except Exception as error:
        raise InvalidInput(
            f"it can't be sent to another process ({error}): name the handler MODULE:FUNCTION, "
            "and make middleware of classes of a module"
        ) from error
    check_optional(settings.child_messages, "child_messages", 1)
    check_optional(settings.child_memory_bytes, "child_memory_bytes", 1)
    if settings.child_memory_bytes is not None and not memory_bytes(os.getpid()):
        raise InvalidInput("child_memory_bytes needs /proc, which this system has not")


def memory_bytes(pid: int | None) -> int:
    """Return the resident memory of a process; 0: it is gone, or the system does not tell."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def child_main(pipe: Connection, handler: Handler | str, middleware: Sequence[object]) -> None:
    """Answer deliveries until the pipe ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # Signals are for the parent. Not SIG_IGN, which programs of the handler would inherit.
        signal.signal(number, lambda *_: None)
    # A program that a handler starts must not keep the pipe open when this process has died.
    os.set_inheritable(pipe.fileno(), False)  # noqa: FBT003 - no name for it
    threading.Thread(target=_exit_with_parent, name="penstock-parent", daemon=True).start()
    try:
        function = resolve(handler)
    except InvalidInput as error:
        pipe.send(str(error))
        return
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner()) if is_async(function) else None
        # The parent closes the pipe to end a child.
        with contextlib.suppress(EOFError, OSError):
            pipe.send(READY)
            while True:
                delivery = pipe.recv()
                if runner is None:
                    pipe.send(handle(function, middleware, delivery))
                else:
                    pipe.send(runner.run(handle_async(function, middleware, delivery)))


def _exit_with_parent() -> None:
    """End this process when its parent ends: another worker gets the handler's message next."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


class Child:
    """A child process and this end of its pipe."""

    def __init__(self, handler: Handler | str, middleware: Sequence[object]) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        # Whether it must not be given another message, and how many it has done.
        self.spent = False
        self.messages = 0
        self.process: SpawnProcess = SPAWN.Process(
            target=child_main, args=(theirs, handler, middleware), daemon=True, name="penstock-work"
        )
        try:
            self.process.start()
        except BaseException:
            self._pipe.close()
            raise
        finally:
            theirs.close()

    def wait_until_ready(self) -> str:
        """Return an empty text, or why this child is of no use."""
        answer = ""
        with contextlib.suppress(EOFError, OSError):
            self._wait(None)
            answer = self._pipe.recv() if self._pipe.poll() else ""
        if answer == READY:
            return ""
        return answer or f"a child process {self.how_it_died()} before it was ready"

    def run(self, delivery: Delivery, limit_ms: int | None) -> Settlement:
        """Return how to settle a message; the child is ``spent`` if it died over it."""
        try:
            self._pipe.send(delivery)
            if not self._wait(limit_ms) and limit_ms is not None:
                self.spent = True
                self.process.kill()
                return over_limit(limit_ms)
            if self._pipe.poll():
                settlement: Settlement = self._pipe.recv()
                self.messages += 1
                return settlement
        except Exception as error:  # an answer that can't be read is none
            log.debug("a child process does not answer: %r", error)
            self.process.kill()
        self.spent = True
        reason = f"the child process {self.how_it_died()}"
        return Settlement(Action.RELEASE, reason=reason, failed=True)

    def _wait(self, limit_ms: int | None) -> bool:
        """Wait until it has answered or died, for so long at the most; say whether it has.

        Processes that the child has forked keep both pipes open, even when it is dead.
        """
        left_ms = limit_ms
        while left_ms is None or left_ms > 0:
            step_ms = LOOK_MS if left_ms is None else min(left_ms, LOOK_MS)
            if connection.wait([self._pipe, self.process.sentinel], step_ms / 1000):
                return True
            if not self.process.is_alive():
                return True
            if left_ms is not None:
                left_ms -= step_ms
        return False

    def how_it_died(self) -> str:
        """Say what ended the process, in words."""
        self.process.join(LEAVE_MS / 1000)
        code = self.process.exitcode
        if code is None or code >= 0:
            return f"ended with exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"was ended by {name}"

    def end(self) -> None:
        """Tell it to go, and see to it that it does."""
        self._pipe.close()
        self.process.join(LEAVE_MS / 1000)
        self.process.kill()
        self.process.join()


class ProcessPool(Pool):
    """Child processes that run a handler."""

    def start(self) -> None:
        """Start the children, each by its thread."""
        self._activity = self._state.counters.activity("starting child processes")
        self._lock = threading.Lock()
        self._children: set[Child] = set()
        # Without it the interpreter would wait for children that leave signals to their parent.
        atexit.register(self.cut)
        super().start()

    def cut(self) -> bool:
        """Kill the children."""
        with self._lock:
            self._cutting = True
            for child in self._children:
                child.process.kill()
        return True

    def join(self, within_ms: int) -> None:
        """Wait until the children have gone."""
        super().join(within_ms + LEAVE_MS * self._settings.concurrency)
        self.cut()
        super().join(LEAVE_MS)
        atexit.unregister(self.cut)

    def _run(self) -> None:
        child = self._new_child(has_slot=False)
        while child is not None and (task := self._state.take()) is not None:
            settlement = child.run(task.delivery, self._settings.time_limit_ms)
            if child.spent and self._cutting:
                settlement = CUT_OFF
            elif child.spent:
                self._state.counters.add("replaced")
                died = child.how_it_died()
                log.warning("the child process %s; a new one takes its place", died)
            self._state.finish(task, settlement)
            if not child.spent and (why := self._worn(child)):
                self._state.counters.add("recycled")
                log.info("a child process %s; a new one takes its place", why)
                child.spent = True
            if child.spent:
                self._end(child)
                child = self._new_child(has_slot=True)
        if child is not None:
            self._end(child)

    def _worn(self, child: Child) -> str:
        """Return why a child is to be replaced after a message; empty: it is not."""
        most, most_bytes = self._settings.child_messages, self._settings.child_memory_bytes
        if most is not None and child.messages >= most:
            return f"has done {child.messages} messages"
        if most_bytes is not None and (size := memory_bytes(child.process.pid)) > most_bytes:
            return f"takes {size:,} bytes of memory"
        return ""

    def _new_child(self, *, has_slot: bool) -> Child | None:
        """Start a child that can work, however often that must be tried.

        Its slot stays open while a child is replaced, and is shut if that can't be done.
        """
        while not self._cutting:
            child = self._start_child()
            if isinstance(child, Child):
                self._activity.worked()
                if not has_slot:
                    self._state.open_slot()
                return child
            if has_slot:
                has_slot = False
                self._state.shut_slot()
            if self._state.closing:
                return None
            self._state.pause(self._activity.failed(PenstockError(child)))
        return None

    def _start_child(self) -> Child | str:
        """Return a child that is ready, or why there is none."""
        with self._lock:
            if self._cutting or (self._state.closing and self._state.idle):
                return "no child process is needed"
            try:
                child = Child(self._settings.handler, self._settings.middleware)
            except Exception as error:
                return f"no child process can be started: {error}"
            self._children.add(child)
        why = child.wait_until_ready()
        if not why:
            return child
        self._end(child)
        return why

    def _end(self, child: Child) -> None:
        child.end()
        with self._lock:
            # Until here a cut could still kill it.
            self._children.discard(child)
            child.process.close()
