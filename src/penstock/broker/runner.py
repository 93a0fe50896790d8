"""The thin shell around a store: one caller at a time, time, durability, waiting, the sweeper.

The store below knows nothing of threads or clocks; the verbs above say what to do and nothing of
when. A change is applied under the lock, and its caller waits outside of it until the change is
durable, so that others go on meanwhile and share the next sync.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, TypeVar

from penstock.broker.durability import Committer
from penstock.clock import TimeGuard
from penstock.errors import (
    BrokerClosed,
    PenstockError,
    ServerUnreachable,
    StorageFailed,
    StoreDamaged,
    StoreFenced,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.broker.durability import Durability, Told
    from penstock.clock import Clock
    from penstock.store.contract import Store

__all__ = ["SWEEP_BUDGET", "Outage", "Shell", "Woken"]

log = logging.getLogger(__name__)

T = TypeVar("T")

Woken: TypeAlias = "Callable[[str | None, int | None], None]"
"""Told a queue and how much there is to claim; (name, None): it is gone; (None, None): all are."""

SWEEP_BUDGET: Final = 1_000
# How long the sweeper sleeps at most: what has no exact alarm (dedup windows) is seen to by then.
IDLE_SWEEP_MS: Final = 60_000
# After a sweep that failed, and from one attempt to have a store that is away back to the next. An
# attempt that kept others out for long is followed by so many times as long for them.
RETRY_MS: Final = 1_000
_HELD_SHARE: Final = 4
# A fork has neither the threads of a store, nor a right to its files and connections.
_NOT_OURS: Final = BrokerClosed(
    "the store was opened before fork(), and is the parent's: open one in the child, or connect to "
    "a server"
)
_SHELLS: Final[weakref.WeakSet[Shell]] = weakref.WeakSet()

# How often it is looked whether the store is away, and how long one call may have it before it is.
WATCH_SECONDS: Final = 0.25
BUSY_SECONDS: Final = 10.0
# A call may take this long once it has its turn, however long it has waited for that.
LEAST_SECONDS: Final = 1.0


class Outage(NamedTuple):
    """Why the store can't be used, and since when, as the clock counts seconds."""

    why: str
    since: float


class _Turn:
    """Has the store alone; who waits for that longer than the store has patience, fails.

    What is done then has the rest of that time, so that a store that hangs fails each of those who
    wait for it in its own time, and not one after the other.
    """

    def __init__(self, store: Store, clock: Clock, lock: threading.Lock) -> None:
        self._store = store
        self._clock = clock
        self._lock = lock
        # Since when a call has the store, if one has.
        self.since: float | None = None

    def __enter__(self) -> None:
        patience_s = self._store.patience_s
        if patience_s is None:
            self._lock.acquire()
        else:
            begin = self._clock.seconds()
            if not self._lock.acquire(timeout=patience_s):
                why = self._store.away or "another call has it"
                raise ServerUnreachable(
                    f"the store was not free for {patience_s:g} s ({why}); nothing was changed"
                )
            self.limit(begin)
        self.since = self._clock.seconds()

    def __exit__(self, *_: object) -> None:
        self.since = None
        self._lock.release()

    def limit(self, since: float) -> None:
        """Give the store what is left of its patience with a call; called with the lock held."""
        patience_s = self._store.patience_s
        if patience_s is not None:
            waited_s = max(0.0, self._clock.seconds() - since)
            self._store.limit(max(LEAST_SECONDS, patience_s - waited_s))


class Shell:
    """Runs changes and looks against a store, and whatever the clock asks for."""

    def __init__(self, store: Store, clock: Clock, *, relaxed: bool, background: bool) -> None:
        self._store = store
        self._clock = clock
        self._guard = TimeGuard(store.time_floor_ms())
        self._lock = threading.Lock()
        self._waiters: dict[str, threading.Condition] = {}
        self._listener: Woken | None = None
        self._alarm = threading.Condition(self._lock)
        self._alarm_at_ms: int | None = None
        self._closed = False
        self._recovering = threading.Lock()
        self._recover_at = float("-inf")
        # Why the last sweep could not see to everything, if so.
        self._damage = ""
        # Why the store is lost to this process, if it is.
        self.lost: PenstockError | None = None
        self._turn = _Turn(store, clock, self._lock)
        self._outage: Outage | None = None
        self._outage_lock = threading.Lock()
        store.on_lost(self._lose)
        self._committer = Committer(
            self._sync, lambda: store.commits, relaxed=relaxed, seconds=clock.seconds
        )
        _SHELLS.add(self)
        self._sweeper: threading.Thread | None = None
        self._watcher: threading.Thread | None = None
        self._ending = threading.Event()
        if background:
            self._sweeper = threading.Thread(
                target=self._sweep_loop, name="penstock-sweeper", daemon=True
            )
            self._sweeper.start()
            self._watcher = threading.Thread(
                target=self._watch_loop, name="penstock-watcher", daemon=True
            )
            self._watcher.start()

    def apply(self, change: Callable[[int], T]) -> T:
        """Make a change, told the time, and return when it is durable."""
        with self._turn:
            result = self._do(change, self._now_ms())
            number = self._store.commits
        self._committer.wait(number)
        return result

    def begin(self, change: Callable[[int], T]) -> tuple[T, int]:
        """Make a change and return at once; its number is what :meth:`tell` wants."""
        with self._turn:
            result = self._do(change, self._now_ms())
            return result, self._store.commits

    def tell(self, number: int, told: Told) -> None:
        """Call back when a change is durable, from here or from another thread."""
        self._committer.tell(number, told)

    def listen(self, woken: Woken | None) -> None:
        """Call back, under the lock, when a queue has something to claim."""
        with self._lock:
            self._listener = woken

    @property
    def durability(self) -> Durability:
        """What syncing has cost so far."""
        return self._committer.durability

    def look(self, read: Callable[[int], T]) -> T:
        """Read, told the time; what comes due on the way need not be durable."""
        with self._turn:
            return self._do(read, self._now_ms())

    def apply_when_ready(
        self, queue: str, wait_ms: int, change: Callable[[int], list[T]]
    ) -> list[T]:
        """Make a change until it gives something, waiting for messages of a queue in between."""
        with self._turn:
            now_ms = self._now_ms()
            until_ms = now_ms + wait_ms
            while True:
                result = self._do(change, now_ms)
                if result or now_ms >= until_ms:
                    break
                self._wait_for(queue, until_ms - now_ms, now_ms)
                now_ms = self._now_ms()
            number = self._store.commits
        self._committer.wait(number)
        return result

    @property
    def outage(self) -> Outage | None:
        """Why the store can't be used at present; from any thread, at once."""
        self._note_outage()
        return self._outage

    @property
    def failure(self) -> PenstockError | None:
        """The error that ended the store for this process, if one did; from any thread, at once."""
        if self._closed:
            return BrokerClosed("the broker is closed")
        return self.lost

    def recover(self) -> None:
        """Try to have a store that is away back; the sweeper does it."""
        if not self._recovering.acquire(blocking=False):
            return
        try:
            if self._store.away is None or self._clock.seconds() < self._recover_at:
                return
            self._recover_at = self._clock.seconds() + RETRY_MS / 1000
            self._store.recover(self._alone())
        except PenstockError as error:
            log.debug("the store is still away: %s", error)
        except Exception:
            # Whatever it was, it is tried again, and the sweeper goes on.
            log.exception("the store could not be had back")
        finally:
            self._recovering.release()
        self._note_outage()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let nobody else in; what is not durable by then is not going to be."""
        with self._lock:
            self._now_ms()
            begin, number = self._clock.seconds(), self._store.commits
            try:
                yield
            finally:
                end = self._clock.seconds()
                self._recover_at = end + max(RETRY_MS / 1000, _HELD_SHARE * (end - begin))
            why = "the change may or may not have been made: the store could not write for a while"
            self._committer.fail(number, StorageFailed(why))
            self._after_change()

    def close(self) -> None:
        """Make everything durable and let go of the store. Whoever waits raises."""
        with self._lock:
            if self._closed or self.lost is _NOT_OURS:
                return
            self._closed = True
            self._alarm.notify_all()
            for waiting in self._waiters.values():
                waiting.notify_all()
        if self._sweeper is not None:
            self._sweeper.join()
        self._ending.set()
        if self._watcher is not None:
            self._watcher.join()
        self._committer.close()
        with self._lock:
            self._store.close()

    def disown(self) -> None:
        """Refuse every verb from here on: this process is a fork of the one that has the store."""
        # A thread that is not here may have held it.
        self._lock = threading.Lock()
        self._turn = _Turn(self._store, self._clock, self._lock)
        self.lost = _NOT_OURS

    def _now_ms(self) -> int:
        """Return the store's time; called with the lock held, at the start of every verb."""
        if self._closed:
            raise BrokerClosed("the broker is closed")
        if self.lost is not None:
            raise self.lost.with_traceback(None)
        return self._guard.now_ms(self._clock.now_ms())

    def _do(self, work: Callable[[int], T], now_ms: int) -> T:
        """Do something with the store, told the time; called with the lock held."""
        try:
            result = work(now_ms)
            self._after_change()
        except StoreFenced as error:
            self._note_loss(error)
            raise
        finally:
            if self._store.away is not None:
                self._hurry(now_ms)
        return result

    def _hurry(self, now_ms: int) -> None:
        """Tell of a store that is away, and have the sweeper see to it; with the lock held."""
        self._note_outage()
        if self._alarm_at_ms is not None and self._alarm_at_ms > now_ms + RETRY_MS:
            self._alarm.notify()

    def _sync(self) -> None:
        try:
            self._store.sync()
        except StoreFenced as error:
            # Before those who wait for it are told: what they then look at is not theirs any more.
            self._lose(error)
            raise
        except StorageFailed:
            with self._lock:
                self._hurry(self._guard.now_ms(self._clock.now_ms()))
            raise

    def _lose(self, why: PenstockError) -> None:
        """Have every verb fail from here on, also those that wait for messages."""
        with self._lock:
            self._note_loss(why)

    def _note_loss(self, why: PenstockError) -> None:
        """Be told that the store is lost, once or more often; called with the lock held."""
        if self.lost is not None:
            return
        self.lost = why
        self._alarm.notify_all()
        for waiting in self._waiters.values():
            waiting.notify_all()
        # Last: whatever becomes of that, who waits here is woken.
        if self._listener is not None:
            self._listener(None, None)

    def _after_change(self) -> None:
        """Wake who waits for what has just happened; called with the lock held."""
        listener = self._listener
        for name in self._store.take_woken():
            waiting = self._waiters.get(name)
            if waiting is None and listener is None:
                continue
            available = self._store.available(name)
            if listener is not None:
                listener(name, available)
            if waiting is None:
                continue
            if available is None:
                # The queue is gone: they are to find that out.
                waiting.notify_all()
                del self._waiters[name]
            else:
                waiting.notify(max(1, available))
        if self._alarm_at_ms is not None:
            soonest_ms = self._store.soonest_ms()
            if soonest_ms is not None and soonest_ms < self._alarm_at_ms:
                self._alarm.notify()

    def _wait_for(self, queue: str, wait_ms: int, now_ms: int) -> None:
        waiting = self._waiters.get(queue)
        if waiting is None:
            waiting = self._waiters[queue] = threading.Condition(self._lock)
        if self._sweeper is None:
            # Nobody else watches the time for us.
            soonest_ms = self._store.soonest_ms()
            if soonest_ms is not None:
                wait_ms = min(wait_ms, max(1, soonest_ms - now_ms))
        until = self._clock.seconds() + wait_ms / 1000
        self._turn.since = None
        self._clock.wait(waiting, wait_ms)
        self._turn.since = self._clock.seconds()
        # Whoever had the store at the end of the wait may have had it for long.
        self._turn.limit(until)

    def _watch_loop(self) -> None:
        while not self._ending.wait(WATCH_SECONDS):
            self._note_outage()

    def _note_outage(self) -> None:
        """Look whether the store can be used, and log when that begins and when it ends."""
        with self._outage_lock:
            now, turn, known = self._clock.seconds(), self._turn.since, self._outage
            why = self._store.away
            if why is None and turn is not None and now - turn > BUSY_SECONDS:
                why = f"one call has had it for more than {BUSY_SECONDS:g} s"
            if why is not None:
                self._outage = Outage(why, now if known is None else known.since)
            else:
                self._outage = None
        if why is not None and known is None:
            log.warning("the store can't be used: %s", why)
        elif why is None and known is not None:
            length_s = now - known.since
            log.warning("the store can be used again, after %.1f s: %s", length_s, known.why)

    def _sweep_loop(self) -> None:
        while True:
            self.recover()
            with self._lock:
                if self._closed or self.lost is not None:
                    return
                wait_ms = RETRY_MS
                now_ms = self._now_ms()
                self._turn.since = begin = self._clock.seconds()
                self._turn.limit(begin)
                try:
                    counts = self._store.sweep(now_ms, SWEEP_BUDGET)
                    self._after_change()
                    due_ms = counts.next_due_ms
                    wait_ms = IDLE_SWEEP_MS if due_ms is None else due_ms - now_ms
                except StoreFenced as error:
                    self._note_loss(error)
                    return
                except StoreDamaged as error:
                    # Said once: it stays as it is until somebody sees to it.
                    if str(error) != self._damage:
                        log.error("a sweep could not see to everything: %s", error)  # noqa: TRY400
                    self._damage = str(error)
                except PenstockError as error:
                    # Of a store that is away it is told when that begins and ends, not each time.
                    if self._store.away is None:
                        log.warning("the sweep failed; it will be tried again: %s", error)
                except Exception:
                    # Whatever it was, leases must go on expiring.
                    log.exception("the sweep failed; it will be tried again")
                self._turn.since = None
                if wait_ms > 0:
                    wait_ms = min(wait_ms, IDLE_SWEEP_MS)
                    self._alarm_at_ms = now_ms + wait_ms
                    self._clock.wait(self._alarm, wait_ms)
                self._alarm_at_ms = None


def _disown_all() -> None:
    for shell in _SHELLS:
        shell.disown()


os.register_at_fork(after_in_child=_disown_all)
