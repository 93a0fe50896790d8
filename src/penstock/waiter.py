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

import threading
from collections import deque
from contextlib import suppress
from queue import Empty
from typing import Generic, TypeVar

T = TypeVar("T")


def let_go(lock: threading.RLock) -> None:
    """Release a lock as often as the calling thread holds it, which may be not at all."""
    with suppress(RuntimeError):
        while True:
            lock.release()


def is_held(lock: threading.RLock) -> bool:
    """Whether the calling thread holds a lock."""
    return bool(lock._is_owned())  # type: ignore[attr-defined]  # noqa: SLF001 - all versions have it


class Waiter:
    """One thread that waits until others wake it; a wake that comes before the wait counts."""

    def __init__(self) -> None:
        # Held until there is a wake. Of C: taken or not when an exception comes. Waiting with a
        # timeout for a SimpleQueue is no choice: a thread that is held up until the time is over
        # before it waits, as on a busy machine, waits for ever.
        self._asleep = threading.Lock()
        self._asleep.acquire()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until woken, or for so long; say whether it was woken."""
        return self._asleep.acquire(timeout=-1 if timeout_s is None else timeout_s)

    def wake(self) -> None:
        """End the wait, or the next one; of many wakes at a time, one counts."""
        with suppress(RuntimeError):
            self._asleep.release()

    def clear(self) -> None:
        """Forget a wake."""
        self._asleep.acquire(blocking=False)


class Inbox(Generic[T]):
    """Things that other threads, or handlers of signals, put there for one that takes them."""

    def __init__(self) -> None:
        self._things: deque[T] = deque()
        self._waiter = Waiter()

    def put(self, thing: T) -> None:
        """Put something behind the others."""
        self._things.append(thing)
        self._waiter.wake()

    def take(self, timeout_s: float | None = None) -> T:
        """Take the first one, wait for it if need be; ``queue.Empty`` if none comes in time."""
        woken = True
        while woken and not self._things:
            # A wake may be for something that was taken without a wait.
            woken = self._waiter.wait(timeout_s)
        if not self._things:
            raise Empty
        return self._things.popleft()
