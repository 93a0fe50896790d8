"""Group commit: one thread makes everybody's commits durable.

A verb applies its change, gets the number of its commit, and waits here until that number is on
stable storage. While one sync runs, others gather and share the next.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from penstock.errors import BrokerClosed, PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Committer"]

log = logging.getLogger(__name__)

# With relaxed durability nobody waits, but the disk is never further behind than this.
RELAXED_SYNC_SECONDS: Final = 0.1


class Committer:
    """Calls ``sync`` for whoever waits; ``committed`` tells the number of the latest commit."""

    def __init__(
        self, sync: Callable[[], None], committed: Callable[[], int], *, relaxed: bool
    ) -> None:
        self._sync = sync
        self._committed = committed
        self._relaxed = relaxed
        lock = threading.Lock()
        self._condition = threading.Condition(lock)
        # The committer waits here, apart from those who wait for it.
        self._work = threading.Condition(lock)
        self._wanted = 0
        self._durable = 0
        self._failure: PenstockError | None = None
        self._closed = False
        self.syncs = 0
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
                try:
                    self._sync()
                except PenstockError as error:
                    log.exception("the store could not be synced")
                    with self._condition:
                        self._failure = error
                        self._closed = True
                        self._condition.notify_all()
                    return
                self.syncs += 1
            with self._condition:
                self._durable = max(self._durable, number)
                self._condition.notify_all()
            if closed:
                return
