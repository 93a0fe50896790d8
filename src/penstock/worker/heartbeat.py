"""Keeps the leases of everything in a worker's hands, whatever the store.

The bookkeeping is :class:`penstock.client.lease_keeper.Keeper`, which the native client uses too:
an extension at a third of the lease, and a deadline on this process's own clock. What is about to
be settled is extended like the rest, but whether it was lost is for the store to say when it is
settled: the answers to an ack and to an extension may cross.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from penstock import limits
from penstock.client.lease_keeper import BEATS, Keeper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.broker.broker import Broker
    from penstock.clock import Clock
    from penstock.worker.retry import Standing

__all__ = ["Leases"]


class Leases:
    """The leases that a worker holds. Thread-safe."""

    def __init__(self, broker: Broker, clock: Clock, standing: Standing) -> None:
        self._broker = broker
        self._clock = clock
        self._standing = standing
        # Told of receipts that were lost, and when :meth:`tick` is wanted sooner than it said.
        self.on_lost: Callable[[list[str]], None] | None = None
        self.on_moved: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._keeper = Keeper()
        self._settling: set[str] = set()
        self._next_ms: int | None = None

    def now_ms(self) -> int:
        """Time that never steps, for durations alone."""
        return int(self._clock.seconds() * 1000)

    def hold(self, receipts: Iterable[str], *, lease_ms: int) -> None:
        """Keep these from now on: their claim has just been answered."""
        now_ms = self.now_ms()
        due_ms = now_ms + lease_ms // BEATS
        with self._lock:
            self._keeper.hold(receipts, lease_ms=lease_ms, now_ms=now_ms)
            sooner = self._next_ms is None or due_ms < self._next_ms
            if sooner:
                self._next_ms = due_ms
        if sooner and self.on_moved is not None:
            self.on_moved()

    def settling(self, receipts: Iterable[str]) -> None:
        """Keep these, but leave it to the store whether they were lost."""
        with self._lock:
            self._settling.update(receipts)

    def forget(self, receipts: Iterable[str]) -> None:
        """Keep these no more."""
        gone = list(receipts)
        with self._lock:
            self._keeper.forget(gone)
            self._settling.difference_update(gone)

    def live(self, receipt: str) -> bool:
        """Whether a lease is held still."""
        now_ms = self.now_ms()
        with self._lock:
            return self._keeper.live(receipt, now_ms)

    def tick(self) -> int | None:
        """Extend what is due, tell what is lost; return in how many ms there is more to do."""
        now_ms = self.now_ms()
        with self._lock:
            lost = self._lost(self._keeper.lapsed(now_ms))
            by_lease: dict[int, list[str]] = {}
            for receipts, lease_ms in self._keeper.due(now_ms):
                by_lease.setdefault(lease_ms, []).extend(receipts)
        self._tell(lost)
        for lease_ms, receipts in by_lease.items():
            for at in range(0, len(receipts), limits.MAX_RECEIPTS):
                self._extend(receipts[at : at + limits.MAX_RECEIPTS], lease_ms)
        now_ms = self.now_ms()
        with self._lock:
            self._next_ms = self._keeper.next_ms()
            return None if self._next_ms is None else max(0, self._next_ms - now_ms)

    def _extend(self, receipts: list[str], lease_ms: int) -> None:
        asked_ms = self.now_ms()
        try:
            outcomes = self._broker.extend(receipts, lease_ms=lease_ms)
        except Exception as error:
            # Tried again at the next beat, until the deadline says that they are lost.
            self._standing.failed(error)
            return
        self._standing.worked()
        with self._lock:
            lost = self._lost(self._keeper.extended(outcomes, lease_ms=lease_ms, asked_ms=asked_ms))
        self._tell(lost)

    def _tell(self, lost: list[str]) -> None:
        if lost and self.on_lost is not None:
            self.on_lost(lost)

    def _lost(self, receipts: list[str]) -> list[str]:
        return [receipt for receipt in receipts if receipt not in self._settling]
