"""Handlers in child processes: each has a thread here that hands it messages, one at a time.

A child that dies, or is killed for being over the time limit, takes nothing with it: its message
is released with a reason, and a new child takes its place. Children are started afresh, not
forked, since the store's threads and files must not be copied into them.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import pickle
import signal
import threading
from multiprocessing import connection
from typing import TYPE_CHECKING, Final

from penstock.errors import InvalidInput, PenstockError
from penstock.worker.child import READY, serve
from penstock.worker.outcome import Verdict, over_limit, released
from penstock.worker.pool_threads import watched
from penstock.worker.state import CUT_OFF

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.context import SpawnProcess

    from penstock.model import Delivery
    from penstock.worker.handling import Handler
    from penstock.worker.retry import Standing
    from penstock.worker.state import Floor
    from penstock.worker.stats import Meters

__all__ = ["ProcessPool", "check_possible", "check_sendable"]

log = logging.getLogger("penstock.worker")

_SPAWN: Final = multiprocessing.get_context("spawn")
# How long a child that is told to go may take for it.
LEAVE_SECONDS: Final = 1.0
# How often to look whether a child is alive whose pipes say nothing.
LOOK_MS: Final = 1_000


def check_possible() -> None:
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


def check_sendable(handler: Handler | str, middleware: Sequence[object]) -> None:
    """Refuse what can't be sent to a child."""
    try:
        pickle.dumps((handler, middleware))
    except Exception as error:
        raise InvalidInput(
            f"it can't be sent to another process ({error}): name the handler MODULE:FUNCTION, "
            "and make middleware of classes of a module"
        ) from error


class _Child:
    """A child process and this end of its pipe."""

    def __init__(self, handler: Handler | str, middleware: Sequence[object]) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        # Nobody is to give it another message.
        self.spent = False
        self.process: SpawnProcess = _SPAWN.Process(
            target=serve, args=(theirs, handler, middleware), daemon=True, name="penstock-work"
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
        try:
            self._wait(None)
            said = self._pipe.recv() if self._pipe.poll() else ""
        except (EOFError, OSError):
            said = ""
        if said == READY:
            return ""
        return said or f"a child process {self.how_it_died()} before it was ready"

    def run(self, delivery: Delivery, limit_ms: int | None) -> Verdict | None:
        """Return what came of a message; None if the child has died over it."""
        try:
            self._pipe.send(delivery)
            if not self._wait(limit_ms) and limit_ms is not None:
                self.kill()
                self.spent = True
                return over_limit(limit_ms)
            if self._pipe.poll():
                verdict: Verdict = self._pipe.recv()
                return verdict
        except Exception as error:  # an answer that can't be read is none
            log.debug("a child process does not answer: %r", error)
            self.kill()
        self.spent = True
        return None

    def _wait(self, limit_ms: int | None) -> bool:
        """Wait until it has answered or died, for so long at the most; say whether it has.

        Both pipes stay open while anybody has them whom the child has forked, dead or not.
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
        self.process.join(LEAVE_SECONDS)
        code = self.process.exitcode
        if code is None or code >= 0:
            return f"ended with exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"was ended by {name}"

    def kill(self) -> None:
        """End it now."""
        self.process.kill()

    def leave(self) -> None:
        """Tell it to go, and see to it that it does."""
        self._pipe.close()
        self.process.join(LEAVE_SECONDS)
        self.process.kill()
        self.process.join()
        self.process.close()


class ProcessPool:
    """Child processes that run a handler."""

    can_cut = True

    def __init__(
        self,
        floor: Floor,
        handler: Handler | str,
        middleware: Sequence[object],
        *,
        concurrency: int,
        time_limit_ms: int | None,
        meters: Meters,
        standing: Standing,
        on_broken: Callable[[BaseException], None],
    ) -> None:
        self._floor = floor
        self._handler = handler
        self._middleware = middleware
        self._time_limit_ms = time_limit_ms
        self._meters = meters
        self._standing = standing
        self._lock = threading.Lock()
        self._children: set[_Child] = set()
        self._cutting = False
        self._threads = [
            threading.Thread(
                target=watched,
                args=(self._work, on_broken),
                name=f"penstock-child-{n}",
                daemon=True,
            )
            for n in range(concurrency)
        ]

    def start(self) -> None:
        """Start the children, each by its thread."""
        # Without it the interpreter would wait for children that leave signals to their parent.
        atexit.register(self.cut)
        for thread in self._threads:
            thread.start()

    def cut(self) -> None:
        """Kill the children."""
        with self._lock:
            self._cutting = True
            for child in self._children:
                child.kill()

    def join(self, within_ms: int) -> None:
        """Wait until the children have gone."""
        for thread in self._threads:
            thread.join(within_ms / 1000 / len(self._threads) + LEAVE_SECONDS)
        self.cut()
        atexit.unregister(self.cut)

    @property
    def pids(self) -> list[int]:
        """The process ids of the children."""
        with self._lock:
            return sorted(child.process.pid or 0 for child in self._children)

    def _work(self) -> None:
        child = self._new_child(is_open=False)
        while child is not None:
            task = self._floor.take()
            if task is None:
                break
            verdict = child.run(task.delivery, self._time_limit_ms)
            if verdict is not None and not child.spent:
                self._floor.done(task, verdict)
                continue
            died = f"the child process {child.how_it_died()}"
            if self._cutting:
                verdict = CUT_OFF
            elif verdict is None:
                verdict = released(died, failed=True)
            if not self._cutting:
                self._meters.add("replaced")
                log.warning("%s; a new one takes its place", died)
            self._floor.done(task, verdict)
            self._gone(child)
            child = self._new_child(is_open=True)
        if child is not None:
            self._gone(child)

    def _new_child(self, *, is_open: bool) -> _Child | None:
        """Start a child that can work, however often that must be tried.

        Its slot stays open while a child is replaced, and is shut if that can't be done.
        """
        while not self._cutting:
            made = self._start_child()
            if isinstance(made, _Child):
                self._standing.worked()
                if not is_open:
                    self._floor.open_slot()
                return made
            if is_open:
                is_open = False
                self._floor.shut_slot()
            if self._floor.closing:
                return None
            self._floor.pause(self._standing.failed(PenstockError(made)))
        return None

    def _start_child(self) -> _Child | str:
        """Return a child that is ready, or why there is none."""
        with self._lock:
            if self._cutting or (self._floor.closing and self._floor.idle):
                return "no child process is needed"
            try:
                child = _Child(self._handler, self._middleware)
            except Exception as error:
                return f"no child process can be started: {error}"
            self._children.add(child)
        why = child.wait_until_ready()
        if not why:
            return child
        self._gone(child)
        return why

    def _gone(self, child: _Child) -> None:
        with self._lock:
            self._children.discard(child)
        child.leave()
