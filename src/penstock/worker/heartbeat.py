"""Extends the leases of all messages that a worker holds, whatever the store.

A lease is extended at each third of its length. Deadlines are on this process's own clock and
counted from when a claim was answered or an extension asked for, so that no two clocks need agree;
a tenth of the lease is set aside for the way of the answer. Receipts that are about to be settled
are extended like the rest, but whether they were lost is for the store to say when it settles
them: the answers to an ack and to an extension may cross.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from penstock import limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.broker.broker import Broker
    from penstock.clock import Clock
    from penstock.worker.stats import WorkerCounters

# An extension is asked for this many times within a lease.
EXTENSIONS_PER_LEASE: Final = 3
MARGIN: Final = 10


class Ticker:
    """A thread that calls ``tick``, sleeps until the next call is due, and calls it again."""

    def __init__(self, name: str, tick: Callable[[], int | None], clock: Clock) -> None:
        """``tick`` returns in how many ms it is due again; None: only after :meth:`wake`."""
        self._tick = tick
        self._clock = clock
        self._wake = threading.Condition()
        self._woken = False
        self._stopped = False
        # Whether the last tick has seen nothing that comes due, or a tick is under way.
        self._idle = True
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Call ``tick`` now: something may be due earlier than it said."""
        with self._wake:
            self._woken = True
            self._wake.notify()

    def wake_idle(self) -> None:
        """Call ``tick`` now if it saw nothing that comes due; else that comes due before this."""
        if self._idle:
            self.wake()

    def stop(self) -> None:
        """End after the call that is under way, if one is."""
        self._stopped = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                # Both under the lock: a stop must not lose its wake to this.
                if self._stopped:
                    return
                self._woken = False
            self._idle = True
            pause_ms = self._tick()
            self._idle = pause_ms is None
            with self._wake:
                if not self._woken and (pause_ms is None or pause_ms > 0):
                    self._clock.wait(self._wake, pause_ms)


class _Group:
    """Receipts that were claimed or extended together."""

    __slots__ = ("deadline_ms", "lease_ms", "next_ms", "receipts")

    def __init__(self, receipts: Iterable[str], lease_ms: int, now_ms: int) -> None:
        self.receipts = dict.fromkeys(receipts)
        self.lease_ms = lease_ms
        self.deadline_ms = now_ms + lease_ms - lease_ms // MARGIN
        self.next_ms = now_ms + lease_ms // EXTENSIONS_PER_LEASE


class Heartbeat(Ticker):
    """The leases of a worker, and the thread that extends them. Thread-safe."""

    def __init__(self, broker: Broker, clock: Clock, counters: WorkerCounters) -> None:
        super().__init__("penstock-heartbeat", self.tick, clock)
        self._broker = broker
        self._activity = counters.activity("extending leases")
        # Called with receipts whose lease was lost.
        self.on_lost: Callable[[list[str]], None] | None = None
        self._lock = threading.Lock()
        self._group_of: dict[str, _Group] = {}
        self._groups: dict[_Group, None] = {}
        self._settling: set[str] = set()
        self._next_ms: int | None = None

    def now_ms(self) -> int:
        """Time that never steps, for durations alone."""
        return int(self._clock.seconds() * 1000)

    def hold(self, receipts: Iterable[str], *, lease_ms: int) -> None:
        """Extend these from now on: their claim has just been answered."""
        with self._lock:
            group = self._hold(receipts, lease_ms, self.now_ms())
            sooner = self._next_ms is None or group.next_ms < self._next_ms
            if sooner:
                self._next_ms = group.next_ms
        if sooner:
            self.wake()

    def _hold(self, receipts: Iterable[str], lease_ms: int, now_ms: int) -> _Group:
        group = _Group(receipts, lease_ms, now_ms)
        self._forget(group.receipts)
        if group.receipts:
            self._groups[group] = None
            self._group_of.update(dict.fromkeys(group.receipts, group))
        return group

    def mark_settling(self, receipts: Iterable[str]) -> None:
        """Go on extending these, but leave it to the store whether they were lost."""
        with self._lock:
            self._settling.update(receipts)

    def forget(self, receipts: Iterable[str]) -> None:
        """Extend these no more."""
        gone = list(receipts)
        with self._lock:
            self._forget(gone)
            self._settling.difference_update(gone)

    def _forget(self, receipts: Iterable[str]) -> None:
        for receipt in receipts:
            group = self._group_of.pop(receipt, None)
            if group is not None:
                del group.receipts[receipt]
                if not group.receipts:
                    self._groups.pop(group, None)

    def is_live(self, receipt: str) -> bool:
        """Whether a receipt is held, and surely not past its deadline."""
        with self._lock:
            group = self._group_of.get(receipt)
            return group is not None and self.now_ms() < group.deadline_ms

    def tick(self) -> int | None:
        """Extend the leases that are due, report lost ones; return in how many ms more are due."""
        now_ms = self.now_ms()
        due: dict[int, list[str]] = {}
        with self._lock:
            past = [group for group in self._groups if group.deadline_ms <= now_ms]
            lapsed = [receipt for group in past for receipt in group.receipts]
            self._forget(lapsed)
            for group in self._groups:
                if group.next_ms <= now_ms:
                    group.next_ms = now_ms + max(1, group.lease_ms // EXTENSIONS_PER_LEASE)
                    due.setdefault(group.lease_ms, []).extend(group.receipts)
        self._report_lost(lapsed)
        for lease_ms, receipts in due.items():
            for at in range(0, len(receipts), limits.MAX_RECEIPTS):
                self._extend(receipts[at : at + limits.MAX_RECEIPTS], lease_ms)
        now_ms = self.now_ms()
        with self._lock:
            moments = (min(group.next_ms, group.deadline_ms) for group in self._groups)
            self._next_ms = min(moments, default=None)
            return None if self._next_ms is None else max(0, self._next_ms - now_ms)

    def _extend(self, receipts: list[str], lease_ms: int) -> None:
        asked_ms = self.now_ms()
        try:
            outcomes = self._broker.extend(receipts, lease_ms=lease_ms)
        except Exception as error:
            # Tried again when it is due next, until the deadline says that they are lost.
            self._activity.failed(error)
            return
        self._activity.worked()
        with self._lock:
            held = [each for each in outcomes if each.receipt in self._group_of]
            refused = [each.receipt for each in held if not each.ok]
            self._forget(refused)
            self._hold([each.receipt for each in held if each.ok], lease_ms, asked_ms)
        self._report_lost(refused)

    def _report_lost(self, receipts: list[str]) -> None:
        with self._lock:
            lost = [receipt for receipt in receipts if receipt not in self._settling]
        if lost and self.on_lost is not None:
            self.on_lost(lost)
