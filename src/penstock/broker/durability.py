"""Group commit: one thread makes the commits of all callers durable.

A verb applies its change, gets the number of its commit, and waits here until that number is on
stable storage: a thread in :meth:`Committer.wait`, a server by being called back. While one sync
runs, others gather and share the next.

Once a sync has failed, nobody knows which of the commits since the last one are on stable storage.
All of them *fail*: each caller that waits for one gets the error, also one that comes to wait
later. Later commits are synced as ever: whether the store takes any is its own affair.
"""

from __future__ import annotations

import logging
import threading
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, NamedTuple, TypeAlias

from penstock.errors import BrokerClosed, PenstockError, StorageFailed, StoreFenced
from penstock.histogram import Histogram
from penstock.waiter import Waiter, let_go

log = logging.getLogger(__name__)

# With relaxed durability nobody waits, but the disk is never further behind than this.
RELAXED_SYNC_SECONDS: Final = 0.1
# Failures that are remembered for a caller that has made a change and does not wait for it yet,
# which is a matter of microseconds.
FAILURES_KEPT: Final = 100

OnDurable: TypeAlias = Callable[[PenstockError | None], object]
"""Called when a commit is durable, or with the reason why it never will be."""


class Durability(NamedTuple):
    """The cost of syncing so far; commits over syncs is the size of a group.

    ``times`` has the seconds of each sync, also of those that failed.
    """

    syncs: int
    commits: int
    seconds: float
    times: Histogram


class Committer:
    """Calls ``sync`` for callers that wait; ``committed`` gives the number of the latest commit."""

    def __init__(
        self,
        sync: Callable[[], None],
        committed: Callable[[], int],
        *,
        relaxed: bool,
        seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._sync = sync
        self._committed = committed
        self._seconds = seconds
        self._relaxed = relaxed
        self._lock = threading.RLock()
        # The committer waits here for what callers want.
        self._work = Waiter()
        self._wanted = 0
        # Commits up to here are durable, but for those in between the numbers of a failure.
        self._settled = 0
        self._failures: deque[tuple[int, int, PenstockError]] = deque(maxlen=FAILURES_KEPT)
        self._closed = self._ended = False
        self._callbacks: list[tuple[int, OnDurable]] = []
        # Of syncs that went well, and the seconds of all.
        self._syncs = self._synced_commits = 0
        self._times = Histogram.over()
        self._thread = start_thread("penstock-committer", self._run)

    @property
    def durability(self) -> Durability:
        """The cost of syncing so far."""
        times = self._times.copy()
        return Durability(self._syncs, self._synced_commits, times.sum, times)

    def wait(self, number: int) -> None:
        """Return when commit ``number`` is durable (at once if durability is relaxed)."""
        if self._relaxed or (number <= self._settled and not self._failures):
            return
        answer: SimpleQueue[PenstockError | None] = SimpleQueue()
        try:
            self.tell(number, answer.put)
        except BaseException:
            let_go(self._lock)
            raise
        failure = answer.get()
        if failure is not None:
            raise failure.with_traceback(None)

    def tell(self, number: int, on_durable: OnDurable) -> None:
        """Call back when commit ``number`` is durable: at once, or from the committer's thread."""
        failure = None
        if not self._relaxed:
            with self._lock:
                if number > self._settled and not self._ended:
                    self._callbacks.append((number, on_durable))
                    self._wanted = max(self._wanted, number)
                    self._work.wake()
                    return
                failure = self._failure_of(number)
        on_durable(failure)

    def fail(self, number: int, error: PenstockError) -> None:
        """Fail every commit up to ``number`` that is not durable yet."""
        with self._lock:
            if number > self._settled:
                self._failures.append((self._settled, number, error))
        self._settle(number)

    def close(self) -> None:
        """Finish what is wanted and stop the thread."""
        with self._lock:
            self._closed = True
            self._work.wake()
        self._thread.join()

    def _run(self) -> None:
        while True:
            if self._relaxed and not self._closed:
                self._work.wait(RELAXED_SYNC_SECONDS)
            while not self._relaxed and self._wanted <= self._settled and not self._closed:
                self._work.wait()
            closed = self._closed
            # Everything committed by now is covered, also changes that nobody waits for.
            number = self._committed()
            if number > self._settled:
                self._sync_up_to(number)
            if closed:
                break
        with self._lock:
            self._ended = True
        self._settle(0)

    def _sync_up_to(self, number: int) -> None:
        begin, commits = self._seconds(), number - self._settled
        try:
            try:
                self._sync()
            finally:
                self._times.add(self._seconds() - begin)
        except StoreFenced as error:
            self.fail(number, error)
        except Exception as error:
            # Whatever it was: callers that wait must get it, or they would wait for ever.
            log.error(  # noqa: TRY400 - what is known has no need of a traceback
                "%d commits may or may not be durable: the store could not be synced: %s",
                commits,
                error,
                exc_info=not isinstance(error, PenstockError),
            )
            self.fail(
                number,
                StorageFailed(
                    f"the change may or may not have been made: syncing the store failed: {error}"
                ),
            )
        else:
            self._syncs += 1
            self._synced_commits += commits
            self._settle(number)

    def _settle(self, number: int) -> None:
        """Let everybody go whose commit is settled; at the end, all."""
        with self._lock:
            self._settled = max(self._settled, number)
            ready = [each for each in self._callbacks if each[0] <= self._settled or self._ended]
            self._callbacks = (
                [] if self._ended else [e for e in self._callbacks if e[0] > self._settled]
            )
            answers = [(call, self._failure_of(wanted)) for wanted, call in ready]
        for call, failure in answers:
            try:
                call(failure)
            except Exception:
                # One that fails must not keep the others waiting.
                log.exception("a caller could not be told that its commit is durable")

    def _failure_of(self, number: int) -> PenstockError | None:
        """Return why a commit is not durable; None if it is."""
        if number > self._settled:
            return BrokerClosed("the broker was closed before the change was durable")
        for after, up_to, error in self._failures:
            if after < number <= up_to:
                return error
        return None


def start_thread(name: str, work: Callable[[], None]) -> threading.Thread:
    """Start a thread that does not keep the process from ending.

    On another thread: ``start()`` is Python code, and an exception out of a signal handler would
    leave the thread unable to begin.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    answer: SimpleQueue[Exception | None] = SimpleQueue()

    def start() -> None:
        try:
            thread.start()
        except Exception as error:
            # The machine lets this process have no more threads.
            answer.put(error)
        else:
            answer.put(None)

    start_new_thread(start, ())
    failure = answer.get()
    if failure is not None:
        raise failure
    return thread
