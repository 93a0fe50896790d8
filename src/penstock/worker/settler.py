"""Settles messages in batches: many handlers' ends become one ack.

A handler's end waits a few milliseconds for others, or until nothing else is being worked on;
while one call is under way the next batch gathers. Acks go first: releases are a call for each
reason, and only a few of them are made before it looks for acks again. What can't be settled
because the store does not answer is tried again; its lease is kept meanwhile, and if that can't be
done either, the store refuses it in the end and has given the message out again by then.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock import limits
from penstock.errors import InvalidInput
from penstock.worker.outcome import Act

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.broker.broker import Broker
    from penstock.clock import Clock
    from penstock.model import Outcome
    from penstock.worker.heartbeat import Leases
    from penstock.worker.outcome import Verdict
    from penstock.worker.retry import Standing
    from penstock.worker.stats import Meters

__all__ = ["Batch", "Ends", "Settler"]

log = logging.getLogger("penstock.worker")

# How long an end waits for others to share its call.
LINGER_MS: Final = 2
# Releases that are made before it looks for acks again.
MOST_RELEASES: Final = 10
# How long to wait after a failure while there is not much time left.
LAST_PAUSE_MS: Final = 250


class Batch(NamedTuple):
    """Receipts that are settled by one call."""

    act: Act
    delay_ms: int | None
    reason: str
    receipts: list[str]


class Ends:
    """Handlers' ends that are not settled yet. Pure bookkeeping."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[Act, int | None, str], list[str]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, batch: Batch) -> None:
        """Add receipts that end alike."""
        self._kinds.setdefault(batch[:3], []).extend(batch.receipts)
        self._count += len(batch.receipts)

    def take(self) -> list[Batch]:
        """Return all acks and then some releases, in as few calls as it takes."""
        acks = [kind for kind in self._kinds if kind[0] is Act.ACK]
        releases = [kind for kind in self._kinds if kind[0] is not Act.ACK]
        most = limits.MAX_RECEIPTS
        batches = []
        for kind in (*acks, *releases[:MOST_RELEASES]):
            receipts = self._kinds.pop(kind)
            self._count -= len(receipts)
            batches += [
                Batch(*kind, receipts[at : at + most]) for at in range(0, len(receipts), most)
            ]
        return batches


class Settler:
    """The thread that settles."""

    def __init__(
        self,
        broker: Broker,
        clock: Clock,
        leases: Leases,
        meters: Meters,
        standing: Standing,
    ) -> None:
        self._broker = broker
        self._clock = clock
        self._leases = leases
        self._meters = meters
        self._standing = standing
        # Told when there may be room for more.
        self.on_settled: Callable[[], None] | None = None
        self._moved = threading.Condition()
        self._ends = Ends()
        self._under_way = 0
        self._hurry = False
        self._stopping = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="penstock-settler", daemon=True)

    @property
    def unsettled(self) -> int:
        """How many handlers' ends the store has not confirmed yet."""
        return len(self._ends) + self._under_way

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def put(self, verdict: Verdict, receipts: list[str], *, hurry: bool) -> None:
        """Have receipts settled; ``hurry``: there is nothing that could join them."""
        if not receipts:
            return
        self._leases.settling(receipts)
        with self._moved:
            first = not len(self._ends)
            self._ends.put(Batch(verdict.act, verdict.delay_ms, verdict.reason, receipts))
            if hurry:
                self._hurry = True
            if first or hurry:
                self._moved.notify_all()

    def stop(self, within_ms: int) -> int:
        """Settle what there is, for so long if the store does not answer; return what is left."""
        until_ms = self._leases.now_ms() + within_ms
        with self._moved:
            self._hurry = True
            self._stopping = True
            self._moved.notify_all()
            while self.unsettled and (left_ms := until_ms - self._leases.now_ms()) > 0:
                self._clock.wait(self._moved, left_ms)
            self._stopped = True
            self._moved.notify_all()
        if not self.unsettled and self._thread.is_alive():
            self._thread.join()
        return self.unsettled

    def _run(self) -> None:
        while True:
            with self._moved:
                while not (len(self._ends) or self._stopped):
                    self._clock.wait(self._moved, None)
                if not (self._hurry or self._stopping or self._stopped):
                    self._clock.wait(self._moved, LINGER_MS)
                if self._stopped:
                    return
                self._hurry = False
                batches = self._ends.take()
                self._under_way = sum(len(batch.receipts) for batch in batches)
            wait_ms = 0
            for batch in batches:
                wait_ms = max(wait_ms, self._settle(batch))
                with self._moved:
                    self._under_way -= len(batch.receipts)
                    self._moved.notify_all()
            if self.on_settled is not None:
                self.on_settled()
            if wait_ms:
                self._pause(wait_ms)

    def _pause(self, wait_ms: int) -> None:
        begun_ms = self._leases.now_ms()
        with self._moved:
            while not self._stopped:
                most_ms = min(wait_ms, LAST_PAUSE_MS) if self._stopping else wait_ms
                left_ms = begun_ms + most_ms - self._leases.now_ms()
                if left_ms <= 0:
                    return
                self._clock.wait(self._moved, left_ms)

    def _settle(self, batch: Batch) -> int:
        """Settle a batch, or put it back; return how long to wait before the next."""
        try:
            if batch.act is Act.ACK:
                outcomes = self._broker.ack(batch.receipts)
            else:
                outcomes = self._broker.release(
                    batch.receipts,
                    delay_ms=batch.delay_ms,
                    reason=batch.reason,
                    unseen=batch.act is Act.GIVE_BACK,
                )
        except InvalidInput:
            # It would be refused for ever; their leases end by themselves.
            log.exception("%d messages can't be settled", len(batch.receipts))
            self._leases.forget(batch.receipts)
            return 0
        except Exception as error:  # the thread must outlive whatever it meets
            pause_ms = self._standing.failed(error)
            with self._moved:
                self._ends.put(batch)
            return pause_ms
        self._standing.worked()
        self._leases.forget(batch.receipts)
        self._count(batch, outcomes)
        return 0

    def _count(self, batch: Batch, outcomes: list[Outcome]) -> None:
        refused = self._meters.settled(batch.act, outcomes)
        if refused:
            log.warning(
                "%d of %d messages were not settled: their lease had ended",
                refused,
                len(outcomes),
            )
