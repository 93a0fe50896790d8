"""A thread that waits, and locks that an exception out of a signal handler leaves alone.

Python runs the handlers of signals between any two steps of the main thread, and an exception that
one raises (a time limit, KeyboardInterrupt) comes out there. Up to Python 3.13 ``with lock`` of a
``threading.Lock`` has no step between taking the lock and being bound to release it.
``lock.acquire()`` before ``try`` has one, and so have ``threading.Condition`` and ``Event``, which
are Python code: they may leave a lock held for ever, or release that of another thread. So what a
user's thread calls holds locks by ``with`` alone, waits while it holds none, and waits here.

Python 3.14 calls ``__enter__`` as any other function, and runs handlers between that call and the
block. Above all a thread that had to wait for a lock meets them there. So the locks that threads
wait for are an ``RLock``, which knows its owner, and an error in a block lets go of it.
"""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading


def let_go(lock: threading.RLock) -> None:
    """Release a lock as often as the calling thread holds it, which may be not at all."""
    with suppress(RuntimeError):
        while True:
            lock.release()


class Waiter:
    """One thread that waits until others wake it; a wake that comes before the wait counts."""

    def __init__(self) -> None:
        # Of C, as all it does: it is done or not done when an exception comes.
        self._wakes: SimpleQueue[None] = SimpleQueue()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until woken, or for so long."""
        with suppress(Empty):
            self._wakes.get(timeout=timeout_s)

    def wake(self) -> None:
        """End the wait, or the next one; of many wakes at a time, one counts."""
        if self._wakes.empty():
            self._wakes.put(None)

    def clear(self) -> None:
        """Forget a wake."""
        with suppress(Empty):
            self._wakes.get_nowait()
