"""``consume`` of an embedded broker: claims in batches, and a thread that settles.

A batch is as large as its caller is fast: messages that have waited for half of their lease are
given back without an attempt, and the next batch is smaller.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock import limits
from penstock.broker.durability import start_thread
from penstock.consuming import Consumer, HeldDelivery, How, Settlement, Settlements
from penstock.errors import PenstockError
from penstock.validation import check_count, check_optional
from penstock.waiter import Waiter

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.broker.broker import Broker
    from penstock.clock import Clock
    from penstock.model import Delivery, Outcome

# Messages of the first batch.
FIRST_BATCH: Final = 16
# How long a settlement waits for others, and how long a claim waits before it is made again.
LINGER_MS: Final = 2
CLAIM_MS: Final = 1_000


class Settler:
    """The thread that settles for a consumer; it ends with it."""

    def __init__(
        self, broker: Broker, clock: Clock, on_refused: Callable[[Outcome], None] | None
    ) -> None:
        self._broker = broker
        self._clock = clock
        self.settlements = Settlements(on_refused)
        self._lock = threading.Lock()
        # The thread waits here: asleep until there is work, or for others to settle as well.
        self._work = Waiter()
        self._asleep = self._hurried = self._closed = False
        self._thread: threading.Thread | None = None
        # Callers that wait until everything is settled.
        self._flushing: deque[Waiter] = deque()
        # Messages of a consumer that has ended, which nobody has begun.
        self._untaken: deque[HeldDelivery] = deque()

    def settle(self, delivery: HeldDelivery, how: How) -> Settlement:
        """Settle a message soon."""
        settlement = Settlement(delivery.receipt, self.hurry)
        failure = self._broker.failure
        if failure is not None:
            self.settlements.finish([settlement], None, failure)
            return settlement
        with self._lock:
            self.settlements.add(settlement, how)
        self.start()
        if self._asleep:
            self._work.wake()
        return settlement

    def start(self) -> None:
        """Start the thread, if it does not run."""
        if self._thread is None:
            start_thread("penstock-consumer", self._run)

    @property
    def _is_orphan(self) -> bool:
        """Whether this is a fork, which has no thread that would answer."""
        thread = self._thread
        return self._broker.failure is not None and not (thread is None or thread.is_alive())

    def extend(self, delivery: HeldDelivery, lease_ms: int) -> Settlement:
        """Extend the lease of a message now."""
        settlement = Settlement(delivery.receipt, self.hurry)
        outcomes = self._broker.extend([delivery.receipt], lease_ms=lease_ms)
        delivery.until_ms = self.now_ms() + lease_ms
        self.settlements.finish([settlement], outcomes, None)
        return settlement

    def now_ms(self) -> int:
        """Time that never steps, for durations alone."""
        return int(self._clock.seconds() * 1000)

    def hurry(self) -> None:
        """Settle now: somebody waits."""
        if self._is_orphan:
            assert self._broker.failure is not None
            raise self._broker.failure
        self.start()
        self._hurried = True
        self._work.wake()

    def flush(self) -> list[Outcome]:
        """Wait until everything is settled; return the refusals since the last time."""
        waiter = Waiter()
        mine = self._thread is threading.current_thread()
        if not mine and not self._is_orphan and (self._has_work or self._thread is not None):
            with self._lock:
                # Not while the thread ends.
                self._flushing.append(waiter)
            self.hurry()
            waiter.wait()
        return self.settlements.take_refused()

    def close(self, ready: deque[HeldDelivery]) -> None:
        """End the thread after what is gathered; it gives back what was not taken.

        It takes no lock, calls no broker and starts no thread: the garbage collector may call it,
        on a thread that holds the locks of those.
        """
        self._untaken = ready
        self._closed = True
        self._work.wake()

    @property
    def _has_work(self) -> bool:
        return bool(len(self.settlements) or self._untaken)

    def _run(self) -> None:
        with self._lock:
            if self._thread is not None:
                # Another one was started as well.
                return
            self._thread = threading.current_thread()
        while True:
            self._asleep = True
            with self._lock:
                if not self._has_work:
                    self._hurried = False
                    while self._flushing:
                        self._flushing.popleft().wake()
                    if self._closed:
                        self._thread = None
                        return
            if not self._has_work:
                self._clock.wait(self._work, None)
                continue
            self._asleep = False
            if not (self._hurried or self._closed):
                self._clock.wait(self._work, LINGER_MS)
            self._hurried = False
            for how, batch in self.settlements.take():
                outcomes, error = None, None
                try:
                    outcomes = self._call([each.receipt for each in batch], how)
                except Exception as failure:
                    # Whatever it was: those that wait get it, and the thread goes on.
                    error = failure
                self.settlements.finish(batch, outcomes, error)
            give_back(self._broker, self._untaken)

    def _call(self, receipts: list[str], how: How) -> list[Outcome]:
        if how is None:
            return self._broker.ack(receipts)
        delay_ms, reason, unseen = how
        return self._broker.release(receipts, delay_ms=delay_ms, reason=reason, unseen=unseen)


class BrokerConsumer(Consumer):
    """Messages of a queue of an embedded broker."""

    def __init__(
        self,
        broker: Broker,
        clock: Clock,
        queue: str,
        *,
        prefetch: int,
        prefetch_bytes: int,
        wait_ms: int | None,
        on_refused: Callable[[Outcome], None] | None,
        **options: Any,
    ) -> None:
        """Claim from a queue: use ``Broker.consume``."""
        self._most = check_count(prefetch, "prefetch", 1, limits.MAX_CREDIT)
        check_optional(wait_ms, "wait_ms", 0, limits.MAX_WAIT_MS)
        self._wait_ms = wait_ms
        self._most_bytes = check_count(prefetch_bytes, "prefetch_bytes", 1, limits.MAX_CREDIT_BYTES)
        # The mean size of the messages of the last batch.
        self._size = 1
        self._broker = broker
        self._queue = queue
        self._options = options
        self.settler = settler = Settler(broker, clock, on_refused)
        self._ready: deque[HeldDelivery] = deque()
        self._left_ms = 0
        self._batch = min(self._most, FIRST_BATCH)
        self._closed = False
        # Held by the thread that claims.
        self._claiming = threading.Lock()
        self._end = weakref.finalize(self, settler.close, self._ready)
        # A broker that is closed at the end of the process has its own ways.
        self._end.atexit = False

    def __next__(self) -> HeldDelivery:
        until_ms: int | None = None
        while True:
            try:
                delivery = self._ready.popleft()
            except IndexError:
                if until_ms is None and self._wait_ms is not None:
                    until_ms = self.settler.now_ms() + self._wait_ms
                self._claim(until_ms)
                continue
            if delivery.until_ms - self.settler.now_ms() > self._left_ms // 2:
                return delivery
            self._batch = max(1, self._batch // 4)
            self._ready.appendleft(delivery)
            give_back(self._broker, self._ready)

    def _claim(self, until_ms: int | None) -> None:
        """Claim the next batch, and twice as many as the last time; end when it is too late."""
        # Before the lock: in a fork, a thread that is not there may have it.
        self._check()
        with self._claiming:
            if self._ready:
                return
            self._check()
            if len(self.settler.settlements) > limits.MAX_UNSETTLED:
                self.settler.flush()
            # In short waits: a broker that hangs does not hear of close().
            wait_ms = CLAIM_MS
            if until_ms is not None:
                wait_ms = min(CLAIM_MS, max(0, until_ms - self.settler.now_ms()))
            limit = min(self._batch, max(1, self._most_bytes // self._size))
            with self._broker.claiming_until(lambda: self._closed):
                claimed = self._broker.claim(
                    self._queue, limit=limit, wait_ms=wait_ms, **self._options
                )
            if claimed:
                self._batch = min(self._most, self._batch * 2)
                self._keep(claimed)
            elif until_ms is not None and self.settler.now_ms() >= until_ms:
                raise StopIteration
            if self._closed:
                # Another thread has closed it meanwhile.
                give_back(self._broker, self._ready)
                raise StopIteration

    def _check(self) -> None:
        """Raise if no more messages will come."""
        if self._closed:
            raise StopIteration
        failure = self._broker.failure
        if failure is not None:
            raise failure

    def _keep(self, claimed: list[Delivery]) -> None:
        self.settler.start()
        left_ms = self._options["lease_ms"] or self._broker.queue(self._queue).lease_ms
        until_ms = self.settler.now_ms() + left_ms
        self._left_ms = left_ms
        self._size = max(1, sum([len(each.payload) for each in claimed]) // len(claimed))
        for each in claimed:
            held = HeldDelivery(*msgspec.structs.astuple(each))
            held.holder, held.until_ms = self.settler, until_ms
            self._ready.append(held)

    def flush(self) -> list[Outcome]:
        """Wait for the outcomes of all settlements so far; return those refused since the last."""
        return self.settler.flush()

    def close(self) -> None:
        """End it: messages that were not taken are given back."""
        self._closed = True
        if self._broker.failure is None:
            self._broker.rouse(self._queue)
            self.settler.flush()
            give_back(self._broker, self._ready)
        self._end()


def give_back(broker: Broker, ready: deque[HeldDelivery]) -> None:
    """Release messages that nobody has begun; if that fails, their lease ends in time."""
    receipts = []
    # Taken one by one before they are released: other threads take from them too.
    with suppress(IndexError):
        while True:
            receipts.append(ready.popleft().receipt)
    if receipts:
        with suppress(PenstockError):
            broker.release(receipts, unseen=True)
