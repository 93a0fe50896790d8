"""Group commit: one thread makes everybody's commits durable.

A verb applies its change, gets the number of its commit, and waits here until that number is on
stable storage: a thread in :meth:`Committer.wait`, a server by being called back. While one sync
runs, others gather and share the next.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from penstock.errors import BrokerClosed, PenstockError, StorageFailed

__all__ = ["Committer", "Durability", "Told"]

log = logging.getLogger(__name__)

# With relaxed durability nobody waits, but the disk is never further behind than this.
RELAXED_SYNC_SECONDS: Final = 0.1


Told: TypeAlias = Callable[[PenstockError | None], object]
"""Called when a commit is durable, or with the reason why it never will be."""


class Durability(NamedTuple):
    """What syncing has cost so far; commits over syncs is the size of a group."""

    syncs: int
    commits: int
    seconds: float


class Committer:
    """Calls ``sync`` for whoever waits; ``committed`` tells the number of the latest commit."""

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
        lock = threading.Lock()
        self._condition = threading.Condition(lock)
        # The committer waits here, apart from those who wait for it.
        self._work = threading.Condition(lock)
        self._wanted = 0
        self._durable = 0
        self._failure: PenstockError | None = None
        self._closed = False
        self._told: list[tuple[int, Told]] = []
        self.durability = Durability(0, 0, 0.0)
        self._thread = threading.Thread(target=self._run, name="penstock-committer", daemon=True)
        self._thread.start()

    def wait(self, number: int) -> None:
        """Return when commit ``number`` is durable (at once if durability is relaxed)."""
        if number <= self._durable:
            return
        if self._relaxed:
            if self._failure is not None:
                raise self._failure
            return
        with self._condition:
            if number > self._wanted:
                self._wanted = number
                self._work.notify()
            while number > self._durable:
                if self._failure is not None:
                    raise self._failure
                if self._closed:
                    raise BrokerClosed("the broker was closed before the change was durable")
                self._condition.wait()

    def tell(self, number: int, told: Told) -> None:
        """Call back when commit ``number`` is durable: at once, or from the committer's thread."""
        with self._condition:
            waits = number > self._durable and not self._relaxed
            failure = self._failure
            if failure is None and waits and self._closed:
                failure = BrokerClosed("the broker was closed before the change was durable")
            if failure is None and waits:
                self._told.append((number, told))
                if number > self._wanted:
                    self._wanted = number
                    self._work.notify()
                return
        told(failure)

    def close(self) -> None:
        """Finish what is wanted and stop the thread."""
        with self._condition:
            self._closed = True
            self._work.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                if self._relaxed and not self._closed:
                    self._work.wait(RELAXED_SYNC_SECONDS)
                while not self._relaxed and self._wanted <= self._durable and not self._closed:
                    self._work.wait()
                closed = self._closed
            # Everything committed by now is covered, whoever asked for it.
            number = self._committed()
            if number > self._durable:
                begin = self._seconds()
                try:
                    self._sync()
                except Exception as error:
                    # Whatever it was: those who wait must be told, or they would for ever.
                    log.exception("the store could not be synced")
                    if not isinstance(error, PenstockError):
                        error = StorageFailed(f"the store could not be synced: {error!r}")
                    self._fail(error)
                    return
                syncs, commits, spent = self.durability
                self.durability = Durability(
                    syncs + 1, commits + number - self._durable, spent + self._seconds() - begin
                )
            with self._condition:
                self._durable = max(self._durable, number)
                self._condition.notify_all()
                ready = [told for wanted, told in self._told if wanted <= self._durable]
                self._told = [each for each in self._told if each[0] > self._durable]
            for told in ready:
                _say(told, None)
            if closed:
                self._fail(BrokerClosed("the broker was closed before the change was durable"))
                return

    def _fail(self, error: PenstockError) -> None:
        """Let everybody who waits know that it will not be."""
        with self._condition:
            self._failure = error
            self._closed = True
            self._condition.notify_all()
            left, self._told = self._told, []
        for _, told in left:
            _say(told, error)


def _say(told: Told, error: PenstockError | None) -> None:
    """Call back; who can't be told must not keep others from it."""
    try:
        told(error)
    except Exception:
        log.exception("a commit's end could not be told")
