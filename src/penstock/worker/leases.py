"""The threads that call the store for a worker: they claim, extend leases, and settle.

A :class:`Claimer` claims from one queue when half of the prefetch is free, up to ``dequeue_max``
messages in a call. The store waits for the first message inside the claim. After a claim that found
nothing the thread pauses for the rest of the scan interval, which varies by a fifth so that workers
that were started together drift apart.

The :class:`Heartbeat` extends the leases of all messages that the worker holds, each at every third
of its length. Deadlines are on this process's own clock and counted from when a claim was answered
or an extension asked for, so that no two clocks need agree; a tenth of the lease is set aside for
the way of the answer. Receipts that are about to be settled are extended like the rest. Whether
those were lost is for the store to say when it settles them, since the answers to an ack and to an
extension may cross: the state does not know them any more when they are reported.

The :class:`Settler` settles in batches: many handlers' ends become one ack. A handler's end waits a
few milliseconds for others, or until nothing else is being worked on; while one call is under way
the next batch gathers. Acks go first: releases are a call for each reason, and only a few of them
are made before the thread looks for acks again. A batch that the store does not answer is tried
again. Its leases are extended meanwhile; if that fails as well, the store refuses the batch in the
end and has given the messages out again by then.
"""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock import limits
from penstock.errors import InvalidInput, InvalidUrl
from penstock.model import Ordering
from penstock.worker.outcome import Action

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.broker.broker import Broker
    from penstock.clock import Clock
    from penstock.model import Delivery
    from penstock.worker.outcome import Settlement
    from penstock.worker.state import WorkerState
    from penstock.worker.stats import WorkerCounters

log = logging.getLogger("penstock.worker")

JITTER: Final = 0.2
# How often the settings of a queue are read; they are as well after a claim that failed.
READ_SETTINGS_MS: Final = 10_000
# An extension is asked for this many times within a lease.
EXTENSIONS_PER_LEASE: Final = 3
# The part of a lease that is set aside for the way of an answer: one in so many.
MARGIN: Final = 10
# How long a handler's end waits for others to share its call.
LINGER_MS: Final = 2
# Releases that are made before the thread looks for acks again.
MAX_RELEASES: Final = 10
# The longest pause after a failure once the worker is stopping.
LAST_PAUSE_MS: Final = 250


class Claimer(threading.Thread):
    """The thread that claims from one queue."""

    def __init__(self, broker: Broker, queue: str, state: WorkerState, *, fifo: bool) -> None:
        """Read the queue's settings; a FIFO queue is refused without ``fifo``."""
        super().__init__(name=f"penstock-claimer-{queue}", daemon=True)
        self._broker = broker
        self._queue = queue
        self._state = state
        self._clock = state.clock
        self._activity = state.counters.activity(f"claiming from {queue}")
        self._settings = state.settings
        self._fifo = fifo
        # A client has no such verb: its server counts collisions, for all its clients.
        self._contention: Callable[[], Any] = getattr(broker, "contention", lambda: None)
        # Nor these: its claims wait at the server.
        self._until: Callable[..., Any] = getattr(broker, "claiming_until", nullcontext)
        self._rouse: Callable[[str], None] | None = getattr(broker, "rouse", None)
        self._old_collisions = self._collisions()
        # Whether its last claim has been answered.
        self.ended = False
        self._read_settings_at: float | None = None
        self._read_settings()

    def run(self) -> None:
        """Claim until the worker is closing; its last claim is answered when the thread ends."""
        while room := self._state.wait_for_room(self._queue):
            began = self._clock.seconds()
            try:
                deliveries = self.claim(min(room, self._settings.dequeue_max))
                if deliveries:
                    self._state.add(deliveries, lease_ms=self.lease_ms)
                collisions = self._collisions() - self._old_collisions
                self._state.counters.reach("collisions", collisions)
            except Exception as error:  # the thread must outlive every error
                self._state.pause(self._activity.failed(error))
                continue
            self._activity.worked()
            if not deliveries:
                jitter = 1 + JITTER * (2 * self._clock.random() - 1)
                took_ms = (self._clock.seconds() - began) * 1000
                self._state.pause(int(self._settings.scan_interval_ms * jitter - took_ms))
        self.ended = True
        self._state.on_change()

    def stop(self) -> None:
        """End a claim that waits: the worker is closing."""
        if self._rouse is not None:
            # Not here: the call of another thread that hangs may have the store.
            threading.Thread(target=self._rouse, args=(self._queue,), daemon=True).start()

    def _collisions(self) -> int:
        """Return how often other processes took messages first, in all claims of this broker."""
        found = self._contention()
        return 0 if found is None else found.collisions

    def claim(self, limit: int) -> list[Delivery]:
        """Claim once, after reading the queue's settings if that is due."""
        if self._read_settings_at is None or self._clock.seconds() >= self._read_settings_at:
            self._read_settings()
        # Until the claim has worked: the queue may be another when it can be claimed from again.
        read_settings_at, self._read_settings_at = self._read_settings_at, None
        with self._until(lambda: self._state.closing):
            deliveries = self._broker.claim(
                self._queue,
                limit=1 if self._in_order else limit,
                lease_ms=self.lease_ms,
                wait_ms=self._settings.wait_ms,
                consumer=self._settings.consumer,
            )
        self._read_settings_at = read_settings_at
        return deliveries

    def _read_settings(self) -> None:
        spec = self._broker.queue(self._queue)
        # Several messages of one group would be given out together, to handlers that run side by
        # side; and those behind one that fails would have to be given back, an attempt poorer.
        self._in_order = spec.ordering is Ordering.FIFO
        if self._in_order and not self._fifo:
            raise InvalidInput(
                f"queue {self._queue!r} is FIFO: a thread that is over its time limit can't be "
                "ended, and the next message of its group would run beside it. Use "
                "mode='processes' or an async function, or no time limit"
            )
        lease_ms = self._settings.lease_ms
        self.lease_ms = spec.lease_ms if lease_ms is None else lease_ms
        self._read_settings_at = self._clock.seconds() + READ_SETTINGS_MS / 1000


class Ticker(threading.Thread):
    """A thread that calls ``tick``, sleeps until the next call is due, and calls it again."""

    def __init__(self, name: str, tick: Callable[[], int | None], clock: Clock) -> None:
        """``tick`` returns in how many ms it is due again; None: only after :meth:`wake`."""
        super().__init__(name=name, daemon=True)
        self._tick = tick
        self._clock = clock
        self._wake = threading.Condition()
        self._woken = False
        self._stopped = False
        # Whether the last tick has seen nothing that comes due, or a tick is under way.
        self._idle = True

    def wake(self) -> None:
        """Call ``tick`` now: something may be due earlier than it said."""
        with self._wake:
            self._woken = True
            self._wake.notify_all()

    def wake_idle(self) -> None:
        """Call ``tick`` now if it saw nothing that comes due; else that comes due before this."""
        if self._idle:
            self.wake()

    def stop(self, *, within_ms: int | None = None) -> None:
        """End after the call that is under way, if one is, and wait for it, for so long at most."""
        self._stopped = True
        self.wake()
        if self.is_alive():
            self.join(None if within_ms is None else within_ms / 1000)

    def run(self) -> None:
        """Call ``tick`` until :meth:`stop`."""
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


class _Lease:
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
        # Called with receipts whose lease was lost; often with none.
        self.on_lost: Callable[[list[str]], None] = lambda _: None
        self._lock = threading.Lock()
        self._lease_of: dict[str, _Lease] = {}
        self._leases: dict[_Lease, None] = {}
        self._next_ms: int | None = None

    def now_ms(self) -> int:
        """Time that never steps, for durations alone."""
        return int(self._clock.seconds() * 1000)

    def hold(self, receipts: Iterable[str], *, lease_ms: int) -> None:
        """Extend these from now on: their claim has just been answered."""
        with self._lock:
            lease = self._hold(receipts, lease_ms, self.now_ms())
            sooner = self._next_ms is None or lease.next_ms < self._next_ms
            if sooner:
                self._next_ms = lease.next_ms
        if sooner:
            self.wake()

    def _hold(self, receipts: Iterable[str], lease_ms: int, now_ms: int) -> _Lease:
        lease = _Lease(receipts, lease_ms, now_ms)
        self._forget(lease.receipts)
        if lease.receipts:
            self._leases[lease] = None
            self._lease_of.update(dict.fromkeys(lease.receipts, lease))
        return lease

    def forget(self, receipts: Iterable[str]) -> None:
        """Extend these no more."""
        with self._lock:
            self._forget(receipts)

    def _forget(self, receipts: Iterable[str]) -> None:
        for receipt in receipts:
            lease = self._lease_of.pop(receipt, None)
            if lease is not None:
                del lease.receipts[receipt]
                if not lease.receipts:
                    self._leases.pop(lease, None)

    def is_live(self, receipt: str) -> bool:
        """Whether a receipt is held, and surely not past its deadline."""
        with self._lock:
            lease = self._lease_of.get(receipt)
            return lease is not None and self.now_ms() < lease.deadline_ms

    def tick(self) -> int | None:
        """Extend the leases that are due, report lost ones; return in how many ms more are due."""
        now_ms = self.now_ms()
        due: dict[int, list[str]] = {}
        with self._lock:
            past = [lease for lease in self._leases if lease.deadline_ms <= now_ms]
            lapsed = [receipt for lease in past for receipt in lease.receipts]
            self._forget(lapsed)
            for lease in self._leases:
                if lease.next_ms <= now_ms:
                    lease.next_ms = now_ms + max(1, lease.lease_ms // EXTENSIONS_PER_LEASE)
                    due.setdefault(lease.lease_ms, []).extend(lease.receipts)
        self.on_lost(lapsed)
        for lease_ms, receipts in due.items():
            for at in range(0, len(receipts), limits.MAX_RECEIPTS):
                self._extend(receipts[at : at + limits.MAX_RECEIPTS], lease_ms)
        now_ms = self.now_ms()
        with self._lock:
            moments = (min(lease.next_ms, lease.deadline_ms) for lease in self._leases)
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
            held = [each for each in outcomes if each.receipt in self._lease_of]
            refused = [each.receipt for each in held if not each.ok]
            self._forget(refused)
            self._hold([each.receipt for each in held if each.ok], lease_ms, asked_ms)
        self.on_lost(refused)


class Batch(NamedTuple):
    """Receipts that are settled by one call."""

    action: Action
    delay_ms: int | None
    reason: str
    receipts: list[str]


class Settler(Ticker):
    """The receipts to settle, grouped by how, and the thread that settles them. Thread-safe."""

    def __init__(
        self, broker: Broker, clock: Clock, counters: WorkerCounters, heartbeat: Heartbeat
    ) -> None:
        super().__init__("penstock-settler", self.tick, clock)
        self._broker = broker
        self._heartbeat = heartbeat
        self._counters = counters
        self._activity = counters.activity("settling")
        # Called when the state may have room for more messages.
        self.on_settled: Callable[[], None] = lambda: None
        self._groups: dict[tuple[Action, int | None, str], list[str]] = {}
        self.unsettled = 0
        # Whether the receipts wait for others to share their call.
        self._lingers = False
        # When a store that failed may be called again.
        self._resume_ms = 0
        self._stopping = False

    def put(self, settlement: Settlement, receipts: list[str], *, hurry: bool) -> None:
        """Settle these receipts soon; ``hurry``: no others could share their call."""
        if not receipts:
            return
        with self._wake:
            first = not self._groups
            how = (settlement.action, settlement.delay_ms, settlement.reason)
            self._groups.setdefault(how, []).extend(receipts)
            self.unsettled += len(receipts)
            if first or hurry:
                self._lingers = not hurry
                self.wake()

    def take(self) -> list[Batch]:
        """Remove and return all acks and then some releases, in as few calls as possible."""
        acks = [how for how in self._groups if how[0] is Action.ACK]
        releases = [how for how in self._groups if how[0] is not Action.ACK]
        size = limits.MAX_RECEIPTS
        return [
            Batch(*how, receipts[at : at + size])
            for how in (*acks, *releases[:MAX_RELEASES])
            for receipts in [self._groups.pop(how)]
            for at in range(0, len(receipts), size)
        ]

    def finish(self, within_ms: int) -> int:
        """Settle all receipts, for so long if the store does not answer; return how many remain."""
        until_ms = self._heartbeat.now_ms() + within_ms
        with self._wake:
            self._stopping = True
            self._lingers = False
            self._resume_ms = min(self._resume_ms, self._heartbeat.now_ms() + LAST_PAUSE_MS)
            self.wake()
            while self.unsettled and (left_ms := until_ms - self._heartbeat.now_ms()) > 0:
                self._clock.wait(self._wake, left_ms)
        self.stop(within_ms=0 if self.unsettled else None)
        return self.unsettled

    def tick(self) -> int | None:
        """Settle the receipts that are due; return in how many ms more are."""
        with self._wake:
            if not self._groups:
                return None
            pause_ms = self._resume_ms - self._heartbeat.now_ms()
            if pause_ms > 0 or self._lingers:
                self._lingers = False
                return max(LINGER_MS, pause_ms)
            batches = self.take()
        for batch in batches:
            settled = self._settle(batch)
            with self._wake:
                if settled:
                    self.unsettled -= len(batch.receipts)
                    self._wake.notify_all()
                else:
                    self._groups.setdefault(batch[:3], []).extend(batch.receipts)
        self.on_settled()
        return 0

    def _settle(self, batch: Batch) -> bool:
        """Settle a batch; say whether that is done with, one way or the other."""
        try:
            if batch.action is Action.ACK:
                outcomes = self._broker.ack(batch.receipts)
            else:
                outcomes = self._broker.release(
                    batch.receipts,
                    delay_ms=batch.delay_ms,
                    reason=batch.reason,
                    unseen=batch.action is Action.GIVE_BACK,
                )
        except Exception as error:  # the thread must outlive every error
            if isinstance(error, InvalidInput) and not isinstance(error, InvalidUrl):
                # The store would refuse the batch for ever; the leases end by themselves.
                log.exception("%d messages can't be settled", len(batch.receipts))
                self._heartbeat.forget(batch.receipts)
                return True
            pause_ms = self._activity.failed(error)
            with self._wake:
                if self._stopping:
                    pause_ms = min(pause_ms, LAST_PAUSE_MS)
                self._resume_ms = max(self._resume_ms, self._heartbeat.now_ms() + pause_ms)
            return False
        else:
            self._activity.worked()
            refused = self._counters.add_settled(batch.action, outcomes)
            if refused:
                text = "%d of %d messages were not settled: their lease had ended"
                log.warning(text, refused, len(outcomes))
        self._heartbeat.forget(batch.receipts)
        return True
