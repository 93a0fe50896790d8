"""Settles messages in batches: many handlers' ends become one ack.

A handler's end waits a few milliseconds for others, or until nothing else is being worked on;
while one call is under way the next batch gathers. Acks go first: releases are a call for each
reason, and only a few of them are made before the thread looks for acks again. A batch that the
store does not answer is tried again. Its leases are extended meanwhile; if that fails as well, the
store refuses the batch in the end and has given the messages out again by then.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock import limits
from penstock.errors import InvalidInput
from penstock.worker.outcome import Action

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.broker.broker import Broker
    from penstock.clock import Clock
    from penstock.worker.heartbeat import Heartbeat
    from penstock.worker.outcome import Settlement
    from penstock.worker.stats import WorkerCounters

log = logging.getLogger("penstock.worker")

# How long a handler's end waits for others to share its call.
LINGER_MS: Final = 2
# Releases that are made before the thread looks for acks again.
MAX_RELEASES: Final = 10
# The longest pause after a failure once the worker is stopping.
LAST_PAUSE_MS: Final = 250


class Batch(NamedTuple):
    """Receipts that are settled by one call."""

    action: Action
    delay_ms: int | None
    reason: str
    receipts: list[str]


class UnsettledReceipts:
    """The receipts to settle, grouped by how. Pure bookkeeping."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Action, int | None, str], list[str]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, batch: Batch) -> None:
        """Add receipts that are settled alike."""
        self._groups.setdefault(batch[:3], []).extend(batch.receipts)
        self._count += len(batch.receipts)

    def take(self) -> list[Batch]:
        """Remove and return all acks and then some releases, in as few calls as possible."""
        acks = [how for how in self._groups if how[0] is Action.ACK]
        releases = [how for how in self._groups if how[0] is not Action.ACK]
        size = limits.MAX_RECEIPTS
        batches = []
        for how in (*acks, *releases[:MAX_RELEASES]):
            receipts = self._groups.pop(how)
            self._count -= len(receipts)
            batches += [
                Batch(*how, receipts[at : at + size]) for at in range(0, len(receipts), size)
            ]
        return batches


class Settler:
    """The thread that settles."""

    def __init__(
        self, broker: Broker, clock: Clock, counters: WorkerCounters, heartbeat: Heartbeat
    ) -> None:
        self._broker = broker
        self._clock = clock
        self._heartbeat = heartbeat
        self._counters = counters
        self._activity = counters.activity("settling")
        # Called when the state may have room for more messages.
        self.on_settled: Callable[[], None] | None = None
        self._changed = threading.Condition()
        self._receipts = UnsettledReceipts()
        self._under_way = 0
        self._hurry = False
        self._stopping = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="penstock-settler", daemon=True)

    @property
    def unsettled(self) -> int:
        """How many receipts the store has not confirmed yet."""
        return len(self._receipts) + self._under_way

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, settlement: Settlement, receipts: list[str], *, hurry: bool) -> None:
        """Settle these receipts soon; ``hurry``: no others could share their call."""
        if not receipts:
            return
        self._heartbeat.mark_settling(receipts)
        with self._changed:
            first = not len(self._receipts)
            how = (settlement.action, settlement.delay_ms, settlement.reason)
            self._receipts.put(Batch(*how, receipts))
            if hurry:
                self._hurry = True
            if first or hurry:
                self._changed.notify_all()

    def stop(self, within_ms: int) -> int:
        """Settle all receipts, for so long if the store does not answer; return how many remain."""
        until_ms = self._heartbeat.now_ms() + within_ms
        with self._changed:
            self._hurry = True
            self._stopping = True
            self._changed.notify_all()
            while self.unsettled and (left_ms := until_ms - self._heartbeat.now_ms()) > 0:
                self._clock.wait(self._changed, left_ms)
            self._stopped = True
            self._changed.notify_all()
        if not self.unsettled and self._thread.is_alive():
            self._thread.join()
        return self.unsettled

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (len(self._receipts) or self._stopped):
                    self._clock.wait(self._changed, None)
                if not (self._hurry or self._stopping or self._stopped):
                    self._clock.wait(self._changed, LINGER_MS)
                if self._stopped:
                    return
                self._hurry = False
                batches = self._receipts.take()
                self._under_way = sum(len(batch.receipts) for batch in batches)
            pause_ms = 0
            for batch in batches:
                pause_ms = max(pause_ms, self._settle(batch))
                with self._changed:
                    self._under_way -= len(batch.receipts)
                    self._changed.notify_all()
            if self.on_settled is not None:
                self.on_settled()
            self._pause(pause_ms)

    def _pause(self, pause_ms: int) -> None:
        began_ms = self._heartbeat.now_ms()
        with self._changed:
            while not self._stopped:
                longest_ms = min(pause_ms, LAST_PAUSE_MS) if self._stopping else pause_ms
                left_ms = began_ms + longest_ms - self._heartbeat.now_ms()
                if left_ms <= 0:
                    return
                self._clock.wait(self._changed, left_ms)

    def _settle(self, batch: Batch) -> int:
        """Settle a batch, or put it back; return how many ms to wait before the next."""
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
        except InvalidInput:
            # The store would refuse the batch for ever; the leases end by themselves.
            log.exception("%d messages can't be settled", len(batch.receipts))
            self._heartbeat.forget(batch.receipts)
            return 0
        except Exception as error:  # the thread must outlive every error
            pause_ms = self._activity.failed(error)
            with self._changed:
                self._receipts.put(batch)
            return pause_ms
        self._activity.worked()
        self._heartbeat.forget(batch.receipts)
        refused = self._counters.add_settled(batch.action, outcomes)
        if refused:
            text = "%d of %d messages were not settled: their lease had ended"
            log.warning(text, refused, len(outcomes))
        return 0
