"""Consumers of a client: messages that a server pushes, up to a credit that the client gives.

A :class:`Subscription` is a request that lasts: the connection sends it again when it had to
connect anew. A consumer on top of it keeps the messages until its caller takes them, gathers
settlements into few requests, and gives the server credit for each message that is settled, given
back or whose lease has ended. Messages that have waited for half of their lease are given back
without an attempt, so that nobody begins a message whose lease ends soon.

Subscriptions are for the loop's thread; callers of :class:`Consumer` may be on any.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

import msgspec

from penstock import limits
from penstock.client.calls import Call, ack, extend, release
from penstock.consuming import (
    PREFETCH,
    PREFETCH_BYTES,
    Consumer,
    HeldDelivery,
    How,
    Settlement,
    Settlements,
)
from penstock.errors import BrokerClosed, PenstockError, StoreDamaged
from penstock.model import Delivery, Outcome, OutcomeStatus
from penstock.validation import check_count, check_optional, check_text
from penstock.waiter import Waiter
from penstock.wire import native as wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.client.transport import Transport

# How long settlements of threads wait for others, unless their caller waits.
LINGER_SECONDS: Final = 0.001

_CLOSED: Final = BrokerClosed("the client is closed")
_FLUSHED: Final = Outcome("", OutcomeStatus.DONE)


class Subscription(ABC):
    """A request to be pushed messages of a queue."""

    delivery: type[Delivery] = Delivery

    def __init__(
        self,
        transport: Transport,
        queue: str,
        *,
        credit: int,
        credit_bytes: int = PREFETCH_BYTES,
        lease_ms: int | None = None,
        consumer: str = "",
    ) -> None:
        check_optional(lease_ms, "lease_ms", 1, limits.MAX_LEASE_MS)
        check_text(consumer, "consumer", limits.MAX_CONSUMER_BYTES)
        self.queue = queue
        self.transport = transport
        self._request = wire.Consume(0, queue, credit, credit_bytes, lease_ms, consumer)
        self._pending: Any = None
        # By receipt, the messages that are held: the bytes of the payload, and until when.
        self._unsettled: dict[str, tuple[int, int]] = {}

    def open(self) -> None:
        """Subscribe."""
        transport = self.transport
        call: Call[None] = Call(self._request, None, on_push=self._pushed)
        transport.connection.subscriptions.add(self)
        self._pending = transport.connection.submit(call, self._ended, transport.now_ms())
        transport.flush_soon()

    def grant(self, credit: int, credit_bytes: int) -> None:
        """Give the server more credit."""
        self.transport.connection.grant(self._pending, credit, credit_bytes)
        self.transport.flush_soon()

    def close(self) -> None:
        """End it at the server; what the server has pushed by then is given back."""
        self.transport.connection.subscriptions.discard(self)
        self.transport.forget(self._pending)

    def _pushed(self, frame: wire.Deliveries) -> None:
        deliveries = frame.claimed.deliveries(self.delivery)
        until_ms = self.transport.now_ms() + frame.left_ms
        size = 0
        for each in deliveries:
            self._unsettled[each.receipt] = (len(each.payload), until_ms)
            size += len(each.payload)
        unread = frame.claimed.unread
        for receipt, payload_bytes in unread.items():
            # Held until they are given back, and with them their credit.
            self._unsettled[receipt] = (payload_bytes, until_ms)
            size += payload_bytes
        self._request.credit -= len(deliveries) + len(unread)
        self._request.credit_bytes -= size
        self.pushed(deliveries, frame.left_ms)

    def _ended(self, _: Any, error: BaseException | None) -> None:
        self.transport.connection.subscriptions.discard(self)
        self.ended(error or BrokerClosed("the server has ended the consumer"))

    @abstractmethod
    def pushed(self, deliveries: list[Any], left_ms: int) -> None:
        """Take messages whose lease has so much left."""

    @abstractmethod
    def ended(self, error: BaseException) -> None:
        """Take note that no more messages come, and why."""

    @abstractmethod
    def freed(self, count: int, size: int) -> None:
        """Take note that so many messages, of so many bytes, are held no more."""

    # --- messages that are held ----------------------------------------------------------------

    def settling(self, receipts: list[str]) -> None:
        """Hold messages no more that are about to be settled, by whatever call of the client."""
        gone = [held for each in receipts if (held := self._unsettled.pop(each, None))]
        if gone:
            self.freed(len(gone), sum([size for size, _ in gone]))

    def extending(self, receipts: list[str] | str, lease_ms: int) -> None:
        """Note until when messages are held, of receipts or of a lease."""
        if isinstance(receipts, str):
            receipts = [each for each in self._unsettled if each.startswith(receipts)]
        until_ms = self.transport.now_ms() + lease_ms
        for each in receipts:
            if (held := self._unsettled.get(each)) is not None:
                self._unsettled[each] = (held[0], until_ms)

    def tick(self, now_ms: int) -> None:
        """Hold messages no more whose lease has ended."""
        held = self._unsettled.items()
        self.settling([each for each, (_, until_ms) in held if until_ms <= now_ms])


class HeldMessages(Subscription):
    """The messages of a consumer, and their settlements; threads share it with the loop."""

    delivery = HeldDelivery

    def __init__(
        self,
        transport: Transport,
        queue: str,
        *,
        prefetch: int = PREFETCH,
        prefetch_bytes: int = PREFETCH_BYTES,
        on_refused: Callable[[Outcome], None] | None = None,
        linger: bool,
        **options: Any,
    ) -> None:
        """``linger``: settlements wait for others."""
        check_count(prefetch, "prefetch", 1, limits.MAX_CREDIT)
        check_count(prefetch_bytes, "prefetch_bytes", 1, limits.MAX_CREDIT_BYTES)
        super().__init__(transport, queue, credit=prefetch, credit_bytes=prefetch_bytes, **options)
        self._linger = linger
        # Messages that nobody has begun, in the order in which they came.
        self.ready: deque[HeldDelivery] = deque()
        self._left_ms = 0
        self.settlements = Settlements(on_refused)
        self._scheduled = False
        # Calls that settle, and were not answered yet.
        self._under_way = 0
        # Callers that wait until all are answered.
        self._flushes: list[Settlement] = []
        # Why there are no more messages.
        self.error: BaseException | None = None
        # Called when there are messages, or there will be no more.
        self.wake: Callable[[], None] = lambda: None

    # --- messages ----------------------------------------------------------------------------

    def pushed(self, deliveries: list[HeldDelivery], left_ms: int) -> None:
        """Keep messages for the caller."""
        until_ms = self.transport.now_ms() + left_ms
        for each in deliveries:
            each.holder = self
            each.until_ms = until_ms
        self._left_ms = left_ms
        self.ready.extend(deliveries)
        self.wake()

    def ended(self, error: BaseException) -> None:
        """Give back what nobody has begun, unless all is well but for other messages."""
        self.error = error
        self.send()
        if isinstance(error, StoreDamaged):
            # The caller gets what could be read before the error; ticks go on until then.
            self.transport.connection.subscriptions.add(self)
        else:
            self._give_back(len(self.ready))
        self.wake()

    @property
    def over(self) -> bool:
        """Whether its caller has all that comes."""
        return self.error is not None and not self.ready

    def close(self) -> None:
        """End it, and give back what nobody has begun."""
        super().close()
        self.ended(_ConsumerClosed("the consumer is closed"))

    def let_go(self) -> None:
        """Close it if it is not: nobody takes its messages any more. On whatever thread."""
        if not (self.over or self.transport.forked):
            # A loop that is closed has ended everything.
            with suppress(RuntimeError):
                self.transport.loop.call_soon_threadsafe(self.close)

    def _give_back(self, most: int) -> None:
        """Give back up to so many of the messages that have waited for longest."""
        receipts = []
        for _ in range(most):
            try:
                receipts.append(self.ready.popleft().receipt)
            except IndexError:
                # A caller has taken it.
                break
        for at in range(0, len(receipts), limits.MAX_RECEIPTS):
            batch = receipts[at : at + limits.MAX_RECEIPTS]
            self._submit(release(batch, queue=self.queue, unseen=True), [])

    def freed(self, count: int, size: int) -> None:
        """Give the server credit for as many."""
        if self.error is None:
            self.grant(count, size)

    def tick(self, now_ms: int) -> None:
        """Give back messages that have waited for half of their lease."""
        old = 0
        for each in list(self.ready):
            if each.until_ms - now_ms > self._left_ms // 2:
                break
            old += 1
        if old:
            self._give_back(old)
        super().tick(now_ms)
        if self.over:
            self.transport.connection.subscriptions.discard(self)

    # --- settlements -------------------------------------------------------------------------

    def settle(self, delivery: HeldDelivery, how: How) -> Settlement:
        """Gather a settlement; called on any thread."""
        settlement = Settlement(delivery.receipt, self.hurry)
        self.settlements.add(settlement, how)
        if not self._scheduled:
            self._scheduled = True
            # After the end the client may be closed at any moment.
            linger = self._linger and self.error is None
            self.call_loop(self._send_soon if linger else self.send)
        return settlement

    def extend(self, delivery: HeldDelivery, lease_ms: int) -> Settlement:
        """Extend a lease; called on any thread."""
        settlement = Settlement(delivery.receipt, self.hurry)
        call = extend([delivery.receipt], lease_ms=lease_ms, queue=self.queue)
        if not self.call_loop(lambda: self._submit(call, [settlement])):
            settlement.finish(_CLOSED)
        return settlement

    def hurry(self) -> None:
        """Send what is gathered now; called on any thread."""
        self.transport.check_process()
        if len(self.settlements):
            self.call_loop(self.send)

    def flush(self) -> Settlement:
        """Return a settlement that is done once all those before are; called on any thread."""
        flush = Settlement("", self.hurry)
        if not self.call_loop(lambda: self._flush(flush)):
            flush.finish(_FLUSHED)
        return flush

    def confirm(self) -> Settlement:
        """Return a settlement that is done once the server has pushed what there is; like flush().

        An ack of nothing waits for the same change as the messages that are claimed by then, and
        its answer comes behind them.
        """
        confirmed = Settlement("", self.hurry)

        def ask() -> None:
            self.send()
            nothing = ack([], queue=self.queue)
            self.transport.submit(nothing, lambda *_: confirmed.finish(_FLUSHED))

        if not self.call_loop(ask):
            confirmed.finish(_FLUSHED)
        return confirmed

    def _flush(self, flush: Settlement) -> None:
        self.send()
        if self._under_way:
            self._flushes.append(flush)
        else:
            flush.finish(_FLUSHED)

    def call_loop(self, function: Callable[[], None]) -> bool:
        """Call a function on the loop, from any thread; False: the loop is closed."""
        transport = self.transport
        transport.check_process()
        here = threading.get_ident() == transport.thread_id
        try:
            (transport.loop.call_soon if here else transport.loop.call_soon_threadsafe)(function)
        except RuntimeError:
            for _, batch in self.settlements.take():
                self.settlements.finish(batch, None, _CLOSED)
            return False
        return True

    def _send_soon(self) -> None:
        self.transport.loop.call_later(LINGER_SECONDS, self.send)

    def send(self) -> None:
        """Send the settlements that were gathered, in few requests."""
        self._scheduled = False
        for how, batch in self.settlements.take():
            receipts = [each.receipt for each in batch]
            try:
                self._submit(_settling(receipts, how, self.queue), batch)
            except PenstockError as error:
                self.settlements.finish(batch, None, error)

    def _submit(self, call: Call[list[Outcome]], batch: list[Settlement]) -> None:
        self._under_way += 1
        self.transport.submit(call, lambda result, error: self._answered(batch, result, error))

    def _answered(
        self, batch: list[Settlement], result: list[Outcome] | None, error: BaseException | None
    ) -> None:
        self.settlements.finish(batch, result, error)
        self._under_way -= 1
        if not self._under_way:
            flushes, self._flushes = self._flushes, []
            for each in flushes:
                each.finish(_FLUSHED)


def _settling(receipts: list[str], how: How, queue: str) -> Call[list[Outcome]]:
    if how is None:
        # Refusals alone are told: the other outcomes are of no use here.
        return msgspec.structs.replace(ack(receipts, queue=queue), finish=None)
    delay_ms, reason, unseen = how
    return release(receipts, delay_ms=delay_ms, reason=reason, queue=queue, unseen=unseen)


class ClientConsumer(Consumer):
    """Messages of a queue, as a server pushes them."""

    def __init__(self, held: HeldMessages, wait_ms: int | None) -> None:
        """Take messages of a subscription: use ``Client.consume``."""
        self._held = held
        check_optional(wait_ms, "wait_ms", 0, limits.MAX_WAIT_MS)
        self._wait_s = None if wait_ms is None else wait_ms / 1000
        # Threads that wait are woken one by one: each wakes the next.
        self._woken = Waiter()
        # Not a method of its own: the subscription must not keep its consumer.
        self._wake = held.wake = self._woken.wake

    def __next__(self) -> HeldDelivery:
        held = self._held
        held.transport.check_process()
        ready = held.ready
        while True:
            try:
                delivery = ready.popleft()
            except IndexError:
                if held.error is not None:
                    self._wake()
                    raise_end(held.error)
                held.hurry()
            else:
                if ready:
                    self._wake()
                return delivery
            if not self._woken.wait(self._wait_s):
                if not ready:
                    held.confirm().result()
                if not ready and held.error is None:
                    raise StopIteration from None

    def flush(self) -> list[Outcome]:
        """Wait for the outcomes of all settlements so far; return those refused since the last."""
        self._held.flush().result()
        return self._held.settlements.take_refused()

    def close(self) -> None:
        """End it: messages that were not taken are given back."""
        if not self._held.transport.forked:
            self._held.let_go()
            self._held.flush().result()

    def __del__(self) -> None:
        self._held.let_go()


class AsyncConsumer:
    """The same for asyncio: ``async for``, ``async with``, and ``await`` for its verbs."""

    def __init__(self, held: HeldMessages, wait_ms: int | None) -> None:
        """Take messages of a subscription: use ``AsyncClient.consume``."""
        self._held = held
        check_optional(wait_ms, "wait_ms", 0, limits.MAX_WAIT_MS)
        self._wait_s = None if wait_ms is None else wait_ms / 1000
        self._woken = asyncio.Event()
        held.wake = self._woken.set

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> HeldDelivery:
        held = self._held
        held.transport.check_process()
        while not held.ready:
            if held.error is not None:
                raise_end(held.error, asynchronous=True)
            self._woken.clear()
            try:
                await asyncio.wait_for(self._woken.wait(), self._wait_s)
            except TimeoutError:
                if not held.ready:
                    await held.confirm()
                if not held.ready and held.error is None:
                    raise StopAsyncIteration from None
        return held.ready.popleft()

    async def flush(self) -> list[Outcome]:
        """Wait for the outcomes of all settlements so far; return those refused since the last."""
        await self._held.flush()
        return self._held.settlements.take_refused()

    async def close(self) -> None:
        """End it: messages that were not taken are given back."""
        if self._held.transport.forked:
            return
        if not self._held.over:
            self._held.close()
        await self._held.flush()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __del__(self) -> None:
        self._held.let_go()


class _ConsumerClosed(BrokerClosed):
    """The end of a consumer whose caller has closed it: the iteration ends without an error."""


def raise_end(error: BaseException, *, asynchronous: bool = False) -> NoReturn:
    """End an iteration, with the error that has ended it unless its caller has."""
    if isinstance(error, _ConsumerClosed):
        raise (StopAsyncIteration if asynchronous else StopIteration)
    raise error
