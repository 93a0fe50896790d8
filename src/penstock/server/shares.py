"""Shares of the server's bounds, so that no key, and no client without one, can take a whole bound.

The holder of a share is a key; of a client without one, the host that it comes from, or its network
of IPv6. Each may have half of what the other holders have left: alone half of the bound, beside one
that has its half a quarter. So there is something left for the next, however much the others have
taken. Of a bound that is wide, and which users set, it may be more than half.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from ipaddress import IPv6Address, IPv6Network
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.clock import SystemClock
from penstock.errors import ServerBusy

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.clock import Clock

T = TypeVar("T")

# When a client that was refused may try again.
RETRY_MS: Final = 1_000


def holder_of(key_id: str, address: str = "") -> str:
    """Name the holder of a share, as a refusal does: a key, or the host of ``HOST:PORT``."""
    if key_id:
        return f"key {key_id!r}"
    return f"the client at {_network_of(address.rpartition(':')[0] or address)}"


@lru_cache(maxsize=4_096)
def _network_of(host: str) -> str:
    """Return a host; of IPv6 its network of 64 bits, since it may have every address of that."""
    begin, bracket, rest = host.partition("[")
    try:
        address = IPv6Address(rest.removesuffix("]"))
    except ValueError:
        return host
    if address.ipv4_mapped is not None or address.is_loopback:
        return host
    network = IPv6Network((int(address) >> 64 << 64, 64))
    return f"{begin}{bracket}{network}]"


class Shares:
    """One bound of the server, and how much of it each holder has. For calls from any thread."""

    def __init__(
        self,
        what: str,
        most: int,
        clock: Clock | None = None,
        *,
        hint: str = "Try again later",
        times: int = 1,
    ) -> None:
        """Name what is bounded, as a refusal does, and in ``hint`` what to do then.

        A holder may have so many ``times`` what is free: once, it has half of what others leave.
        """
        self.what = what
        self.most = most
        self.hint = hint
        self.times = times
        self.total = 0
        self._clock = clock or SystemClock()
        self._held: dict[str, int] = {}
        self._free = threading.Condition()

    def held(self, holder: str) -> int:
        """Return how much a holder has."""
        return self._held.get(holder, 0)

    def fits(self, holder: str, size: int = 1) -> bool:
        """Whether a holder may have so much more."""
        free = self.most - self.total
        return size <= free and self.held(holder) + size <= self.times * free

    def take(self, holder: str, size: int = 1, *, wait_ms: int = 0) -> None:
        """Give a holder so much more, once it fits; ServerBusy if it does not in time."""
        with self._free:
            until_ms = self._clock.now_ms() + wait_ms if wait_ms else 0
            while not self.fits(holder, size):
                left_ms = until_ms - self._clock.now_ms() if wait_ms else 0
                if left_ms <= 0:
                    raise self.refusal(holder)
                self._clock.wait(self._free, left_ms)
            self.add(holder, size)

    def add(self, holder: str, size: int) -> None:
        """Give a holder so much more, which may be beyond its share."""
        with self._free:
            self._held[holder] = self._held.get(holder, 0) + size
            self.total += size

    def give(self, holder: str, size: int = 1) -> None:
        """Take so much back from a holder."""
        with self._free:
            self.total -= size
            self._held[holder] = left = self._held.get(holder, 0) - size
            if not left:
                del self._held[holder]
            self._free.notify_all()

    def who_makes_way(self, holder: str, size: int = 1) -> str | None:
        """Return the holder of which something has to go before this one gets more; None: it fits.

        Its own, if it has any; else of the one that has the most.
        """
        with self._free:
            if self.fits(holder, size) or not self._held:
                return None
            return holder if holder in self._held else max(self._held, key=self._held.__getitem__)

    def refusal(self, holder: str) -> ServerBusy:
        """Make the error for a holder that has its share."""
        free = self.most - self.total
        return ServerBusy(
            f"{holder} has {self.held(holder)} of the server's {self.most} {self.what}, of which "
            f"{free} are free: each may have {self.times}/{self.times + 1} of what the others "
            f"leave. {self.hint}",
            retry_after_ms=RETRY_MS,
        )


class Turns:
    """Threads that work for several holders, one job of each in turn; of any holder, in order."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._running = Shares("threads", threads)
        # In the order of their turns.
        self._lines: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        self._lock = threading.Lock()

    def submit(self, holder: str, work: Callable[[], T]) -> Future[T]:
        """Do a job when it is the holder's turn."""
        job: Future[T] = Future()
        with self._lock:
            self._lines.setdefault(holder, deque()).append((job, work))
        self._pool.submit(self._work)
        return job

    def shutdown(self) -> None:
        """Wait for all jobs."""
        self._pool.shutdown()

    def _work(self) -> None:
        """Do jobs as long as there are any that may be begun."""
        while (taken := self._next()) is not None:
            holder, job, work = taken
            try:
                if job.set_running_or_notify_cancel():
                    job.set_result(work())
            except BaseException as error:
                job.set_exception(error)
            finally:
                self._running.give(holder)
            # A thread that waits for the next job must not keep this one.
            del taken, job, work

    def _next(self) -> tuple[str, Future[Any], Callable[[], Any]] | None:
        with self._lock:
            holder = next(filter(self._running.fits, self._lines), None)
            if holder is None:
                return None
            self._running.take(holder)
            line = self._lines.pop(holder)
            job, work = line.popleft()
            if line:
                # Behind the others.
                self._lines[holder] = line
            if any(map(self._running.fits, self._lines)):
                # Where one has ended, two holders may have got room. Once it shuts down, the
                # threads that are at work do all that is left.
                with suppress(RuntimeError):
                    self._pool.submit(self._work)
            return holder, job, work
