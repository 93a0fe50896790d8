"""The claims of one channel, and the messages that it holds. All of it runs on one event loop.

A consumer whose queue may have messages claims without waiting, and its claim takes room of the
prefetch count before it is answered. A consumer whose queue was empty waits at the server. Waiting
claims take no room: when the last room is taken they are withdrawn, and messages that come
nevertheless are given back unseen. A consumer that was given messages is the last in turn for the
next room.

Leases are extended at every third of their length, from the claim until the ack is answered. Acks
gather while one call is under way.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from penstock import limits
from penstock.client import AsyncClient, Client, Uncertain
from penstock.errors import BrokerClosed, PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from concurrent.futures import Future

    from penstock.model import Delivery

R = TypeVar("R")

log = logging.getLogger(__name__)

# How long a claim waits at the server before it is made again.
WAIT_MS: Final = 60_000
# Messages of a channel that wait for the application, if the prefetch count is no bound.
MAX_BUFFERED: Final = 100
# Claims of a consumer that fail in a row before the application is told. The second waits until
# the client has connected again.
MAX_FAILURES: Final = 2
NAME: Final = f"kombu at {socket.gethostname()}"


class LoopClient(Client):
    """A client whose loop, on a thread of its own, also runs coroutines of others."""

    @property
    def on_loop(self) -> AsyncClient:
        """The same connection for coroutines on its loop."""
        return AsyncClient(self._transport)

    @property
    def usable(self) -> bool:
        """Whether calls can be answered: not once it is closed, and not in a forked child."""
        return os.getpid() == self._pid and not self.closed

    def begin(self, work: Callable[..., Coroutine[Any, Any, R]], *given: Any) -> Future[R]:
        """Run a coroutine function on the loop."""
        if not self.usable:
            raise BrokerClosed("the connection was closed, or made before fork(): connect anew")
        return asyncio.run_coroutine_threadsafe(work(*given), self._loop)

    def run(self, work: Callable[..., Coroutine[Any, Any, R]], *given: Any) -> R:
        """Run a coroutine function on the loop, and wait for its result."""
        future = self.begin(work, *given)
        try:
            return future.result()
        except BaseException:
            # After an interrupt nobody wants the result.
            future.cancel()
            raise


class Consumer:
    """A consumer of one queue; ``callback`` says whether the message was still wanted."""

    __slots__ = ("callback", "claim", "failures", "limit", "queue", "ready")

    def __init__(self, queue: str, callback: Callable[[Delivery], bool]) -> None:
        self.queue = queue
        self.callback = callback
        # Whether the queue may have messages: the last claim brought some, or there was none yet.
        self.ready = True
        self.failures = 0
        self.claim: asyncio.Task[None] | None = None
        self.limit = 0


class Claimed(NamedTuple):
    """Messages for a consumer, as the application's thread gets them."""

    claims: Claims
    consumer: Consumer
    deliveries: list[Delivery]


class Claims:
    """The claims of one channel. Only ``held`` is also read on the application's thread."""

    def __init__(
        self, client: AsyncClient, put: Callable[[Claimed | PenstockError], None], lease_ms: int
    ) -> None:
        self._client = client
        self._put = put
        self.lease_ms = lease_ms
        self._prefetch = 0
        self.consumers: dict[str, Consumer] = {}
        # Receipts of messages that are not settled, each with the consumer that is still to get it.
        self.held: dict[str, Consumer | None] = {}
        self._buffered = 0
        self._to_ack: dict[str, None] = {}
        self._closed = False
        self._acking = self._extending = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def set_prefetch(self, count: int) -> None:
        """Take another prefetch count; 0 is no bound."""
        self._prefetch = count
        self._balance()

    async def consume(self, tag: str, consumer: Consumer) -> None:
        """Claim for a consumer from now on."""
        self.consumers[tag] = consumer
        self._balance()

    async def cancel(self, tag: str) -> None:
        """End a consumer; messages that it was not given go back as if they were not claimed."""
        consumer = self.consumers.pop(tag, None)
        if consumer is not None and consumer.claim is not None:
            consumer.claim.cancel()
            await asyncio.wait({consumer.claim})
        held = list(self.held.items())
        await self._give_back([key for key, owner in held if owner and owner is consumer])

    async def get(self, queue: str) -> Delivery | None:
        """Claim one message, if there is one now."""
        found = await self._client.claim(queue, lease_ms=self.lease_ms, consumer=NAME)
        self._hold(found, None)
        return found[0] if found else None

    async def hand_over(self) -> None:
        """Make room: the application's thread has taken a message out of the inbox."""
        self._buffered -= 1
        self._balance()

    async def ack(self, receipts: list[str]) -> None:
        """Settle messages as done; return before that is stored."""
        self._forget(receipts)
        self._to_ack.update(dict.fromkeys(receipts))
        if not self._acking:
            self._acking = True
            self._begin(self._ack_all())
        self._balance()

    async def requeue(self, receipts: list[str]) -> None:
        """Give messages back at once; the attempt counts."""
        self._forget(receipts)
        await self._client.release(receipts, delay_ms=0, reason="rejected")
        self._balance()

    async def recover(self) -> None:
        """Give back every message that is not settled, as if it had not been claimed."""
        await self._give_back(list(self.held))
        self._balance()

    async def close(self, within_s: float) -> bool:
        """End all claims, give back the rest, and finish acking; say if there was time for it."""
        self._closed = True
        try:
            async with asyncio.timeout(within_s):
                for tag in list(self.consumers):
                    await self.cancel(tag)
                await self._give_back(list(self.held))
                while self._acking:
                    await asyncio.sleep(0.005)
        except TimeoutError:
            return False
        finally:
            for task in self._tasks:
                task.cancel()
        return True

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- claiming --------------------------------------------------------------------------

    def _room(self) -> int:
        room = MAX_BUFFERED - self._buffered
        return min(room, self._prefetch - len(self.held)) if self._prefetch else room

    def _balance(self) -> None:
        """Begin the claims that there is room for; withdraw those that wait if there is none."""
        if self._closed:
            return
        room = self._room()
        consumers = [each for each in self.consumers.values() if each.failures < MAX_FAILURES]
        if room <= 0:
            for consumer in consumers:
                if consumer.claim is not None and not consumer.ready:
                    consumer.claim.cancel()
            return
        free = room - sum(each.limit for each in consumers if each.claim and each.ready)
        share = max(1, free // max(1, len(consumers)))
        for consumer in consumers:
            if consumer.claim is None and free > 0:
                consumer.limit = share
                free -= share if consumer.ready else 0
                consumer.claim = self._begin(self._claim(consumer))

    async def _claim(self, consumer: Consumer) -> None:
        try:
            found = await self._client.claim(
                consumer.queue,
                limit=consumer.limit,
                lease_ms=self.lease_ms,
                wait_ms=0 if consumer.ready else WAIT_MS,
                consumer=NAME,
            )
        except PenstockError as error:
            consumer.failures += 1
            if consumer.failures == MAX_FAILURES:
                self._put(error)
        else:
            consumer.failures = 0
            consumer.ready = bool(found)
            self._take(consumer, found)
        finally:
            consumer.claim = None
            self._balance()

    def _take(self, consumer: Consumer, found: list[Delivery]) -> None:
        """Put messages into the inbox, as many as there is room for."""
        room = max(0, self._room())
        kept, rest = found[:room], found[room:]
        if kept:
            self._hold(kept, consumer)
            self._buffered += len(kept)
            self._put(Claimed(self, consumer, kept))
            for tag in [tag for tag, each in self.consumers.items() if each is consumer]:
                self.consumers[tag] = self.consumers.pop(tag)
        if rest:
            self._begin(self._give_back([each.receipt for each in rest]))

    async def _give_back(self, receipts: list[str]) -> None:
        self._forget(receipts)
        for batch in _batches(receipts):
            try:
                await self._client.release(batch, unseen=True)
            except PenstockError as error:
                log.warning("%d messages come back when their lease ends: %s", len(batch), error)

    # --- holding ---------------------------------------------------------------------------

    def _hold(self, deliveries: list[Delivery], consumer: Consumer | None) -> None:
        self.held.update((each.receipt, consumer) for each in deliveries)
        if not self._extending:
            self._extending = True
            self._begin(self._extend())

    def _forget(self, receipts: list[str]) -> None:
        for receipt in receipts:
            self.held.pop(receipt, None)

    async def _extend(self) -> None:
        while self.held or self._to_ack:
            await asyncio.sleep(self.lease_ms / 3000)
            for batch in _batches([*self.held, *self._to_ack]):
                try:
                    outcomes = await self._client.extend(batch, lease_ms=self.lease_ms)
                except PenstockError as error:
                    log.warning("%d leases can't be extended: %s", len(batch), error)
                    continue
                lost = [each.receipt for each in outcomes if not each and each.receipt in self.held]
                if lost:
                    log.warning("%d messages have lost their lease, and come again", len(lost))
                    self._forget(lost)
                    self._balance()
        self._extending = False

    async def _ack_all(self) -> None:
        while self._to_ack:
            batch = next(_batches(list(self._to_ack)))
            try:
                outcomes = await self._client.ack(batch)
            except PenstockError as error:
                log.warning("%d messages can't be acked: %s", len(batch), error)
                if self._closed:
                    break
                await asyncio.sleep(1)
                continue
            for receipt in batch:
                self._to_ack.pop(receipt, None)
            lost = sum(not each and not isinstance(each, Uncertain) for each in outcomes)
            if lost:
                log.warning("%d messages were acked after their lease, and come again", lost)
        self._acking = False


def _batches(receipts: list[str]) -> Iterator[list[str]]:
    for begin in range(0, len(receipts), limits.MAX_RECEIPTS):
        yield receipts[begin : begin + limits.MAX_RECEIPTS]
