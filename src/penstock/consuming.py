"""Deliveries of a consumer, which know how to settle themselves, and outcomes that are to come."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

from penstock import limits
from penstock.model import Delivery, Outcome, OutcomeStatus
from penstock.validation import check_optional, cut_text
from penstock.waiter import Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

log = logging.getLogger("penstock.consumer")

# Messages that a consumer holds at a time, and their bytes, unless it is told otherwise.
PREFETCH: Final = 200
PREFETCH_BYTES: Final = 16 * 1024 * 1024
# Refusals that are kept for the next flush().
MAX_REFUSALS: Final = 10_000


# Not frozen: its holder is known only after it was decoded.
class HeldDelivery(Delivery, frozen=False, eq=False, gc=True):  # type: ignore[misc]
    """A delivery of ``consume()``. Its verbs return at once; see :class:`Settlement`."""

    holder: Any = None
    until_ms: int = 0

    def ack(self) -> Settlement:
        """Settle the message as done."""
        settlement: Settlement = self.holder.settle(self, None)
        return settlement

    def release(
        self, *, delay_ms: int | None = None, reason: str = "", unseen: bool = False
    ) -> Settlement:
        """Give the message back: it is tried again, or fails if it is out of attempts."""
        # Checked here: an error in a batch would be that of others too.
        check_optional(delay_ms, "delay_ms")
        how = (delay_ms, cut_text(reason, limits.MAX_REASON_BYTES), bool(unseen))
        settlement: Settlement = self.holder.settle(self, how)
        return settlement

    def extend(self, *, lease_ms: int) -> Settlement:
        """Move the deadline of the message to now + ``lease_ms``."""
        settlement: Settlement = self.holder.extend(self, lease_ms)
        return settlement


class Settlement:
    """The outcome that a verb of a delivery will have, once that is durable.

    ``result()`` waits for it on a thread, ``await`` on an event loop. Neither needs to be used: the
    consumer reports refusals.
    """

    __slots__ = ("_answer", "_hurry", "_waiters", "receipt")

    def __init__(self, receipt: str, hurry: Callable[[], None]) -> None:
        """``hurry`` is called before somebody waits."""
        self.receipt = receipt
        self._hurry = hurry
        self._answer: Outcome | BaseException | None = None
        self._waiters: list[Callable[[], object]] | None = None

    @property
    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._answer is not None

    def result(self) -> Outcome:
        """Wait for the outcome, and return it or raise its error."""
        if self._answer is None:
            waiter = Waiter()
            self._wait(waiter.wake)
            waiter.wait()
        return self._get()

    def __await__(self) -> Generator[Any, None, Outcome]:
        if self._answer is None:
            loop = asyncio.get_running_loop()
            future = loop.create_future()

            def wake() -> None:
                if not future.done():
                    future.set_result(None)

            def wake_loop() -> None:
                # A loop that is closed has nobody who waits.
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(wake)

            self._wait(wake_loop)
            yield from future
        return self._get()

    def finish(self, answer: Outcome | BaseException) -> None:
        """Set the outcome or the error, on whatever thread, and wake those that wait."""
        self._answer = answer
        waiters = self._waiters
        if waiters is not None:
            for wake in waiters:
                wake()

    def _wait(self, wake: Callable[[], object]) -> None:
        waiters = self._waiters
        if waiters is None:
            waiters = self._waiters = []
        waiters.append(wake)
        if self._answer is None:
            self._hurry()
        else:
            # It came meanwhile, and may have missed this waiter.
            wake()

    def _get(self) -> Outcome:
        answer = self._answer
        if isinstance(answer, BaseException):
            raise answer
        assert answer is not None, "called when it is done"
        return answer


class Consumer(ABC):
    """Messages of a queue: iterate over it, on any number of threads.

    Close it, use ``with``, or let go of it: messages that were not taken are given back at once,
    without an attempt. Messages that were taken are settled by their own verbs.
    """

    def __iter__(self) -> Self:
        return self

    @abstractmethod
    def __next__(self) -> HeldDelivery:
        """Return the next message, once there is one."""

    @abstractmethod
    def flush(self) -> list[Outcome]:
        """Wait for the outcomes of all settlements so far; return those refused since the last."""

    @abstractmethod
    def close(self) -> None:
        """End it: messages that were not taken are given back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Delay, reason, and whether nobody has begun to work on the message; None: it is done.
How: TypeAlias = "tuple[int | None, str, bool] | None"


class Settlements:
    """The settlements of a consumer that are to be made: few calls for many of them.

    Refusals are told to ``on_refused``, or logged, and kept for ``flush()``. Threads share it.
    """

    def __init__(self, on_refused: Callable[[Outcome], None] | None) -> None:
        self._on_refused = on_refused
        self._refused: deque[Outcome] = deque(maxlen=MAX_REFUSALS)
        self._gathered: deque[tuple[Settlement, How]] = deque()

    def __len__(self) -> int:
        return len(self._gathered)

    def add(self, settlement: Settlement, how: How) -> None:
        """Gather a settlement."""
        self._gathered.append((settlement, how))

    def take(self) -> Iterator[tuple[How, list[Settlement]]]:
        """Remove what is gathered, in batches that are settled alike and name a receipt once."""
        while self._gathered:
            groups: dict[How, list[Settlement]] = {}
            receipts: set[str] = set()
            while self._gathered:
                settlement, how = self._gathered.popleft()
                if settlement.receipt in receipts:
                    # It has an outcome of its own, after that of the first.
                    self._gathered.appendleft((settlement, how))
                    break
                receipts.add(settlement.receipt)
                groups.setdefault(how, []).append(settlement)
            for how, found in groups.items():
                for at in range(0, len(found), limits.MAX_RECEIPTS):
                    yield how, found[at : at + limits.MAX_RECEIPTS]

    def finish(
        self, batch: list[Settlement], result: Iterable[Outcome] | None, error: BaseException | None
    ) -> None:
        """Tell those that wait for a batch. Receipts that have no outcome are done."""
        if error is not None:
            for each in batch:
                each.finish(error)
            if batch:
                log.warning(
                    "%d messages may not have been settled or extended: %s", len(batch), error
                )
            return
        by_receipt = {each.receipt: each for each in result or ()}
        for each in batch:
            outcome = by_receipt.get(each.receipt)
            if outcome is None:
                outcome = Outcome(each.receipt, OutcomeStatus.DONE)
            elif not outcome.ok:
                self._refuse(outcome)
            each.finish(outcome)

    def _refuse(self, outcome: Outcome) -> None:
        self._refused.append(outcome)
        if self._on_refused is None:
            log.warning("a receipt was refused: %s is %s", outcome.receipt, outcome.status)
            return
        try:
            self._on_refused(outcome)
        except Exception:
            # The others of its batch are to be told all the same.
            log.exception("on_refused failed for %s", outcome.receipt)

    def take_refused(self) -> list[Outcome]:
        """Return the refusals since the last call."""
        return [self._refused.popleft() for _ in range(len(self._refused))]
