"""The runner of a store's verbs: one caller at a time, time, durability, waiting, the sweeper.

The store below knows nothing of threads or clocks; the verbs above say what to do and nothing of
when. Nobody waits with the lock held, and it is taken by ``with`` alone: an exception out of a
signal handler may come at any step of a caller (:mod:`penstock.waiter`). A change is applied under
the lock, and its caller waits outside of it until the change is durable, so that others go on
meanwhile and share the next sync. A store whose commits are durable at once has no committer, and
nobody waits.

A store that is ``parallel`` is called without the lock, by as many threads as call: the lock is for
what the runner itself keeps, and no call of the store is made under it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn, TypeAlias, TypeVar

from penstock.broker.durability import Committer, Durability, start_thread
from penstock.clock import TimeGuard
from penstock.errors import (
    BrokerClosed,
    InvalidInput,
    PenstockError,
    QueueNotFound,
    StorageFailed,
    StoreDamaged,
    StoreFenced,
)
from penstock.histogram import Histogram
from penstock.waiter import Waiter, is_held, let_go

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.broker.durability import OnDurable
    from penstock.clock import Clock
    from penstock.model import SweepCounts
    from penstock.store.contract import Store

log = logging.getLogger(__name__)

T = TypeVar("T")

OnWoken: TypeAlias = Callable[[str | None, int | None], None]
"""Takes a queue and how much there is to claim; (name, None): it is gone; (None, None): all are."""

SWEEP_BUDGET: Final = 1_000
# How long the sweeper sleeps at most: work without an exact alarm (dedup windows) waits so long.
IDLE_SWEEP_MS: Final = 60_000
# The pause after a sweep that failed, and between attempts to recover a store that is away. After
# an attempt that kept others out for long, they have the store for so many times as long.
RETRY_MS: Final = 1_000
# The least pause of the sweeper of a parallel store for what other calls have noted meanwhile: it
# may be something that only another process can do.
BREATH_MS: Final = 20
# How long the sweeper, and a verb over many messages, stay away from the store between two steps: a
# thread that lets go of a lock and wants it back at once gets it, and others starve.
GIVE_WAY_SECONDS: Final = 0.001
_HELD_SHARE: Final = 4
# A fork has neither the threads of a store, nor a right to its files and connections.
_NOT_OURS: Final = BrokerClosed(
    "the store was opened before fork(), and is the parent's: open one in the child, or connect to "
    "a server"
)
_RUNNERS: Final[weakref.WeakSet[Runner]] = weakref.WeakSet()

# How often the watcher looks whether the store is away, and how long one call may have the store
# before it counts as away.
WATCH_SECONDS: Final = 0.25
BUSY_SECONDS: Final = 10.0


class Outage(NamedTuple):
    """Why the store can't be used, and since when, as the clock counts seconds."""

    why: str
    since: float


class _Waiters:
    """Claims that wait for messages of one queue; ``wakes`` counts how often it has got some."""

    def __init__(self) -> None:
        self.wakes = 0
        # The one that has waited longest comes first.
        self.waiting: deque[Waiter] = deque()

    def wake(self, count: int) -> None:
        """Wake so many claims."""
        self.wakes += 1
        for _ in range(min(count, len(self.waiting))):
            # In this order: one that was not woken, for an exception, is found again.
            self.waiting[0].wake()
            self.waiting.popleft()


class Runner:
    """Runs changes and looks against a store, and the work that time asks for."""

    def __init__(self, store: Store, clock: Clock, *, relaxed: bool, background: bool) -> None:
        self._store = store
        self._progress = store.progress
        self._clock = clock
        self._guard = TimeGuard(store.info().time_floor_ms)
        self._lock = threading.RLock()
        # The seconds of callers that had to wait for the lock; changed with the lock held.
        self.lock_waits = Histogram.over()
        self._parallel = store.parallel
        # Calls of a parallel store that are under way, and the wait for their end.
        self._under_way: set[object] = set()
        self._call_ended = Waiter()
        # Since when a call has the store, if one has it to itself.
        self._busy_since: float | None = None
        self._waiters: dict[str, _Waiters] = {}
        self._listener: OnWoken | None = None
        # The sweeper waits here, until the time of its alarm.
        self._alarm = Waiter()
        self._alarm_at_ms: int | None = None
        self._closed = self._ended = False
        self._recovering = threading.Lock()
        self._recover_at = float("-inf")
        # Why the last sweep could not do everything, if so.
        self._damage = ""
        # Why the store is lost to this process, if it is.
        self.lost: PenstockError | None = None
        self._outage: Outage | None = None
        self._outage_lock = threading.Lock()
        store.on_lost(self._lose)
        self._committer: Committer | None = None
        if not store.durable_on_commit:
            self._committer = Committer(
                self._sync, lambda: self._progress.commits, relaxed=relaxed, seconds=clock.seconds
            )
        _RUNNERS.add(self)
        # The watcher waits here.
        self._pause = Waiter()
        self._sweeper: threading.Thread | None = None
        self._watcher: threading.Thread | None = None
        if background:
            self._sweeper = start_thread("penstock-sweeper", self._sweep_loop)
            self._watcher = start_thread("penstock-watcher", self._watch_loop)

    def apply(
        self, change: Callable[[int], T], *, queue: str = "", wait_ms: int = 0, durable: bool = True
    ) -> T:
        """Make a change, told the time, and return when it is durable.

        ``wait_ms``: while the change gives nothing, wait so long for messages of a queue, and make
        it again. ``durable=False``: return at once, as a call that only reads may, or one that
        :meth:`tell` calls back.
        """
        if self._busy_since is not None:
            self.refuse_handler()
        try:
            if wait_ms:
                result, number = self._wait_for(queue, wait_ms, change)
            else:
                result, number = self._turn(change)
        except BaseException as error:
            self._note_failed(error)
            raise
        if durable and self._committer is not None:
            self._committer.wait(number)
        return result

    def refuse_handler(self) -> None:
        """Refuse what a signal handler calls in the middle of a change of its own thread.

        The lock lets that in, and memory is not what the disk says.
        """
        if self._busy_since is not None and is_held(self._lock):
            raise InvalidInput(
                "a call of the broker in the middle of another one of the same thread: a signal "
                "handler may set a flag or raise, and the program may call when that one has ended"
            )

    def _turn(
        self, change: Callable[[int], T], after: Callable[[T, int], None] | None = None
    ) -> tuple[T, int]:
        """Make a change; return what it gives, and the number of its commit.

        ``after``: called with what it gives and the time, before anybody else is let in.
        """
        if self._parallel:
            return self._turn_beside(change, after)
        begin = None if self._busy_since is None else self._clock.seconds()
        with self._lock:
            self._busy_since = now = self._clock.seconds()
            try:
                if begin is not None:
                    self.lock_waits.add(now - begin)
                if self._closed or self.lost is not None:
                    self._refuse()
                now_ms = self._guard.now_ms(self._clock.now_ms())
                result = change(now_ms)
                return result, self._end_turn(result, now_ms, after)
            finally:
                self._busy_since = None

    def _turn_beside(
        self, change: Callable[[int], T], after: Callable[[T, int], None] | None
    ) -> tuple[T, int]:
        """Make a change of a parallel store, beside those of others."""
        call = object()
        try:
            with self._lock:
                now_ms = self._now_ms()
                self._under_way.add(call)
            if self._store.patience_s is not None:
                self._store.limit(self._store.patience_s)
            result = change(now_ms)
            with self._lock:
                return result, self._end_turn(result, now_ms, after)
        finally:
            self._under_way.discard(call)
            if self._closed:
                self._call_ended.wake()

    def _end_turn(self, result: T, now_ms: int, after: Callable[[T, int], None] | None) -> int:
        """Wake those for whom a change has something; called with the lock held."""
        woken = self._store.take_woken()
        if (woken and (self._waiters or self._listener)) or self._alarm_at_ms is not None:
            self._wake(woken, self._listener)
        if after is not None:
            after(result, now_ms)
        return self._progress.commits

    def _note_failed(self, error: BaseException) -> None:
        """Tell others what the error of a change means for them."""
        let_go(self._lock)
        with self._lock:
            if isinstance(error, StoreFenced):
                self._note_loss(error)
            elif isinstance(error, QueueNotFound) and self._listener is None:
                # No server is in between, whose clients may not see every queue.
                error.suggest()
            elif not isinstance(error, PenstockError):
                # It may have come after the commit, before others were woken for it.
                self._wake_all()
            self._note_error()

    def apply_step(self, change: Callable[[int], T]) -> T:
        """Make a change that is one of many steps; let others have the store before the next."""
        result = self.apply(change)
        self._give_way()
        return result

    def _give_way(self) -> None:
        if not self._parallel:
            Waiter().wait(GIVE_WAY_SECONDS)

    def tell(self, number: int, on_durable: OnDurable) -> None:
        """Call back when a change is durable, from here or from another thread."""
        if self._committer is None:
            on_durable(None)
        else:
            self._committer.tell(number, on_durable)

    def listen(self, on_woken: OnWoken | None) -> None:
        """Call back, under the lock, when a queue has something to claim."""
        with self._lock:
            self._listener = on_woken

    @property
    def durability(self) -> Durability:
        """The cost of syncing so far."""
        if self._committer is None:
            return Durability(0, 0, 0.0, Histogram.over())
        return self._committer.durability

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
        """Try to recover a store that is away; the sweeper does it."""
        if self._recovering.locked():
            return
        with self._recovering:
            if self._store.health().away is None or self._clock.seconds() < self._recover_at:
                return
            self._recover_at = self._clock.seconds() + RETRY_MS / 1000
            try:
                self._store.recover(self._alone())
            except PenstockError as error:
                log.debug("the store is still away: %s", error)
            except Exception:
                # Whatever it was, it is tried again, and the sweeper goes on.
                log.exception("the store could not be had back")
        self._note_outage()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let nobody else in; changes that are not durable by then will never be."""
        with self._lock:
            self._now_ms()
            begin, number = self._clock.seconds(), self._progress.commits
            try:
                yield
            finally:
                end = self._clock.seconds()
                self._recover_at = end + max(RETRY_MS / 1000, _HELD_SHARE * (end - begin))
            why = "the change may or may not have been made: the store could not write for a while"
            if self._committer is not None:
                self._committer.fail(number, StorageFailed(why))
            self._wake(self._store.take_woken(), self._listener)

    def close(self) -> None:
        """Make everything durable and let go of the store. A caller that waits gets an error.

        One that was interrupted can be called again.
        """
        let_go(self._lock)
        with self._lock:
            if self._ended or self.lost is _NOT_OURS:
                return
            self._closed = True
            self._wake_all()
        if self._sweeper is not None:
            self._sweeper.join()
        if self._watcher is not None:
            self._pause.wake()
            self._watcher.join()
        if self._committer is not None:
            self._committer.close()
        while self._under_way:
            self._call_ended.wait(WATCH_SECONDS)
        with self._lock:
            if not self._ended:
                self._ended = True
                self._store.close()

    def disown(self) -> None:
        """Refuse every verb from here on: this process is a fork of the one that has the store."""
        # A thread that is not here may have held the locks.
        self._lock, self._outage_lock = threading.RLock(), threading.Lock()
        self._recovering, self.lost = threading.Lock(), _NOT_OURS

    def _now_ms(self) -> int:
        """Return the store's time; called with the lock held, at the start of every verb."""
        if self._closed or self.lost is not None:
            self._refuse()
        return self._guard.now_ms(self._clock.now_ms())

    def _refuse(self) -> NoReturn:
        assert self.failure is not None
        raise self.failure.with_traceback(None)

    def note_error(self) -> None:
        """Look whether the store is away, after an error; called inside a change."""
        with self._lock if self._parallel else nullcontext():
            self._note_error()

    def _note_error(self) -> None:
        """Log it if the store is away, and wake the sweeper for it; called with the lock held."""
        if self._closed or self.lost is not None or self._store.health().away is None:
            return
        self._note_outage()
        now_ms = self._guard.now_ms(self._clock.now_ms())
        if self._alarm_at_ms is not None and self._alarm_at_ms > now_ms + RETRY_MS:
            self._alarm.wake()

    def _sync(self) -> None:
        try:
            self._store.sync()
        except StoreFenced as error:
            # Before waiting callers are told, so that their next read fails.
            self._lose(error)
            raise
        except StorageFailed:
            with self._lock:
                self._note_error()
            raise

    def _lose(self, why: PenstockError) -> None:
        """Make every verb fail from here on, also claims that wait for messages."""
        with self._lock:
            self._note_loss(why)

    def _note_loss(self, why: PenstockError) -> None:
        """Note that the store is lost, once or more often; called with the lock held."""
        if self.lost is not None:
            return
        self.lost = why
        self._wake_all()
        # Last: whatever the listener does, waiting claims are woken.
        if self._listener is not None:
            self._listener(None, None)

    def _wake_all(self) -> None:
        """Wake the sweeper and all claims that wait: they are to find out that it is over."""
        self._alarm.wake()
        for waiters in self._waiters.values():
            waiters.wake(len(waiters.waiting))

    def take_woken(self) -> Mapping[str, int | None]:
        """Wake claims that wait; return the queues to the listener. Called inside a change.

        Not for a store that is parallel: another call may have taken what this one has woken.
        """
        woken = self._store.take_woken()
        if woken and self._waiters:
            self._wake(woken, None)
        return woken

    def _wake(self, woken: Mapping[str, int | None], listener: OnWoken | None) -> None:
        """Wake claims that wait for these queues, and the sweeper; called with the lock held."""
        for name, available in woken.items():
            if listener is not None:
                listener(name, available)
            waiters = self._waiters.get(name)
            if waiters is None:
                continue
            if available is None:
                # The queue is gone: the claims are to find that out.
                waiters.wake(len(waiters.waiting))
                del self._waiters[name]
            else:
                waiters.wake(max(1, available))
        if self._alarm_at_ms is not None:
            soonest_ms = self._store.soonest_ms()
            if soonest_ms is not None and soonest_ms < self._alarm_at_ms:
                self._alarm.wake()

    def rouse(self, queue: str) -> None:
        """Let all claims that wait for messages of a queue look again."""
        self.refuse_handler()
        with self._lock:
            self._wake({queue: sys.maxsize}, None)

    def _wakes(self, queue: str) -> tuple[_Waiters | None, int]:
        """Return a mark that differs once the queue is woken again."""
        waiters = self._waiters.get(queue)
        return waiters, 0 if waiters is None else waiters.wakes

    def _wait_for(self, queue: str, wait_ms: int, change: Callable[[int], T]) -> tuple[T, int]:
        """Make a change until it gives something, and wait for messages of a queue in between."""
        waiter, waiters = Waiter(), _Waiters()
        until_ms: int | None = None
        pause_ms: int | None = None

        def enter(result: T, now_ms: int) -> None:
            """Wait for a wake from now on, unless there is nothing to wait for."""
            nonlocal waiters, until_ms, pause_ms
            until_ms = until_ms or now_ms + wait_ms
            pause_ms = until_ms - now_ms
            if result or pause_ms <= 0:
                pause_ms = None
                return
            waiters = self._waiters.setdefault(queue, _Waiters())
            is_over = self._closed or self.lost is not None
            if self._parallel and (is_over or wakes != self._wakes(queue)):
                # It was woken before this claim could wait, or nobody could tell.
                pause_ms = 0
                return
            if self._sweeper is None and (soonest_ms := self._store.soonest_ms()) is not None:
                # Nobody else watches the time for this claim.
                pause_ms = min(pause_ms, max(1, soonest_ms - now_ms))
            waiters.waiting.append(waiter)

        while True:
            wakes = self._wakes(queue)
            result, number = self._turn(change, enter)
            if pause_ms is None:
                return result, number
            if pause_ms:
                self._clock.wait(waiter, pause_ms)
                with self._lock, suppress(ValueError):
                    waiters.waiting.remove(waiter)
                waiter.clear()

    def _watch_loop(self) -> None:
        while not self._closed:
            self._pause.wait(WATCH_SECONDS)
            self._note_outage()
            # A call that has the store for long does not stop the watcher.
            if self._outage is not None and self._lock.acquire(blocking=False):
                try:
                    self._note_error()
                finally:
                    self._lock.release()

    def _note_outage(self) -> None:
        """Look whether the store can be used, and log when that begins and when it ends."""
        with self._outage_lock:
            now, turn, known = self._clock.seconds(), self._busy_since, self._outage
            why = self._store.health().away
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
            pause_ms = self._sweep()
            if pause_ms is None:
                return
            if pause_ms > 0:
                self._clock.wait(self._alarm, pause_ms)
            else:
                self._give_way()

    def _sweep(self) -> int | None:
        """Do what is due; return the pause before the next time, None if there is none."""
        pause_ms, failed = RETRY_MS, True

        def sweep(now_ms: int) -> SweepCounts:
            return self._store.sweep(now_ms, budget=SWEEP_BUDGET)

        def set_alarm(counts: SweepCounts | None, now_ms: int) -> None:
            nonlocal pause_ms
            if counts is not None:
                due_ms = counts.next_due_ms
                pause_ms = IDLE_SWEEP_MS if due_ms is None else due_ms - now_ms
            # Other calls may have gone on meanwhile.
            soonest_ms = self._store.soonest_ms() if self._parallel else None
            if soonest_ms is not None:
                pause_ms = min(pause_ms, max(BREATH_MS, soonest_ms - now_ms))
            pause_ms = min(pause_ms, IDLE_SWEEP_MS)
            self._alarm_at_ms = now_ms + pause_ms if pause_ms > 0 else None

        with self._lock:
            self._alarm_at_ms = None
            self._alarm.clear()
        try:
            self._turn(sweep, set_alarm)
            failed = False
        except StoreFenced as error:
            self._lose(error)
        except StoreDamaged as error:
            # Logged once: it stays as it is until somebody repairs it.
            if str(error) != self._damage:
                log.error("a sweep could not see to everything: %s", error)  # noqa: TRY400
            self._damage = str(error)
        except PenstockError as error:
            # That a store is away is logged when it begins and ends, not each time.
            if self.failure is None and self._store.health().away is None:
                log.warning("the sweep failed; it will be tried again: %s", error)
        except Exception:
            # Whatever it was, leases must go on expiring.
            log.exception("the sweep failed; it will be tried again")
        with self._lock:
            if self._closed or self.lost is not None:
                return None
            if failed:
                set_alarm(None, self._now_ms())
        return pause_ms


def _disown_all() -> None:
    for runner in _RUNNERS:
        runner.disown()


os.register_at_fork(after_in_child=_disown_all)
