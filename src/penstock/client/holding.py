"""Extends leases in the background, and fetches ahead, on the loop of a link.

A :class:`Holder` extends what it holds three times within a lease, until it is settled through the
same client or the holder is stopped. A :class:`Fetcher` is one that also claims ahead: what it
has fetched is extended like the rest, and dropped unseen once its lease is lost, so that nobody
is given a message that somebody else may have by now.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from penstock import limits
from penstock.client import calls
from penstock.client.lease_keeper import Keeper
from penstock.errors import BrokerClosed, PenstockError, StorageFailed, StoreDamaged
from penstock.validation import check_count, check_duration

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence

    from penstock.client.transport import Link
    from penstock.model import Delivery

__all__ = ["Fetcher", "Holder", "OnLost"]

log = logging.getLogger(__name__)

OnLost: TypeAlias = Callable[["Delivery"], object]
"""Called with a delivery whose lease was lost: by a thread for this alone, or on asyncio's loop."""

RETRY_SECONDS: Final = 0.2
POLL_MS: Final = 20_000


class Holder:
    """Keeps the leases of deliveries alive."""

    def __init__(self, link: Link, on_lost: OnLost | None) -> None:
        self._link = link
        self._on_lost = on_lost
        self._keeper = Keeper()
        self._held: dict[str, Delivery] = {}
        self._moved = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.lost: set[str] = set()

    def check_process(self) -> None:
        """Refuse to be used in a fork of the client's process."""
        self._link.check_process()

    def is_live(self, delivery: Delivery) -> bool:
        """Whether a delivery's lease is held still; callable from any thread."""
        return self._keeper.live(delivery.receipt, self._link.now_ms())

    async def hold(self, deliveries: Sequence[Delivery], lease_ms: int | None) -> None:
        """Extend these at once, and from now on."""
        if lease_ms is not None:
            check_duration(lease_ms, "lease_ms", low=1, high=limits.MAX_LEASE_MS)
        for queue in {each.queue for each in deliveries}:
            batch = [each for each in deliveries if each.queue == queue]
            for_ms = await self._lease_ms(batch) if lease_ms is None else lease_ms
            self._take(batch, for_ms)
            await self._extend([each.receipt for each in batch], for_ms)

    async def _lease_ms(self, batch: Sequence[Delivery]) -> int:
        """Return the queue's lease, or what is left of a longer one that was asked for."""
        spec = await self._link.call(calls.queue(batch[0].queue))
        server_ms = await self._link.call(calls.ping())
        left_ms = max(each.lease_deadline_ms for each in batch) - server_ms
        return max(spec.lease_ms, min(left_ms, limits.MAX_LEASE_MS))

    def start(self) -> None:
        """Begin to work in the background."""
        self._link.holders.add(self)
        self._spawn(self._beat())

    async def stop(self) -> None:
        """Extend nothing any more."""
        if not self._link.is_ours:
            return
        self._link.holders.discard(self)
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks.clear()

    def forget(self, receipts: Iterable[str]) -> None:
        """Extend these no more: they are being settled."""
        known = [each for each in receipts if self._held.pop(each, None) is not None]
        self._keeper.forget(known)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(self._link.loop.create_task(work))

    def _take(self, deliveries: Sequence[Delivery], lease_ms: int) -> None:
        self._held.update((each.receipt, each) for each in deliveries)
        self._keeper.hold(
            [each.receipt for each in deliveries], lease_ms=lease_ms, now_ms=self._link.now_ms()
        )
        self._moved.set()

    async def _beat(self) -> None:
        while True:
            now_ms = self._link.now_ms()
            self._lose(self._keeper.lapsed(now_ms))
            for receipts, lease_ms in self._keeper.due(now_ms):
                self._spawn(self._extend(receipts, lease_ms))
            next_ms = self._keeper.next_ms()
            pause = None if next_ms is None else max(0.001, (next_ms - now_ms) / 1000)
            self._moved.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._moved.wait(), pause)

    async def _extend(self, receipts: list[str], lease_ms: int) -> None:
        asked_ms = self._link.now_ms()
        for at in range(0, len(receipts), limits.MAX_RECEIPTS):
            batch = receipts[at : at + limits.MAX_RECEIPTS]
            try:
                outcomes = await self._link.call(calls.extend(batch, lease_ms=lease_ms))
            except (StorageFailed, BrokerClosed) as error:
                # Tried again at the next beat, until the deadline says that they are lost.
                log.warning("%d leases could not be extended: %s", len(batch), error)
                return
            except PenstockError:
                log.exception("%d leases can't be extended", len(batch))
                self._lose([each for each in batch if each in self._held])
                continue
            self._lose(self._keeper.extended(outcomes, lease_ms=lease_ms, asked_ms=asked_ms))
        self._moved.set()

    def _lose(self, receipts: Iterable[str]) -> None:
        for receipt in receipts:
            self._keeper.forget([receipt])
            delivery = self._held.pop(receipt, None)
            if delivery is None:
                continue
            if len(self.lost) < limits.MAX_RECEIPTS:
                self.lost.add(receipt)
            self._tell(delivery)

    def _tell(self, delivery: Delivery) -> None:
        log.warning("the lease of message %d was lost", delivery.message_id)
        if self._on_lost is not None:
            try:
                self._on_lost(delivery)
            except Exception:
                log.exception("on_lost failed")


class Fetcher(Holder):
    """Claims ahead of who works, and keeps what it has fetched."""

    def __init__(
        self,
        link: Link,
        queue: str,
        *,
        prefetch: int,
        lease_ms: int | None,
        consumer: str,
        on_lost: OnLost | None,
    ) -> None:
        super().__init__(link, on_lost)
        self._queue = queue
        self._prefetch = check_count(prefetch, "prefetch", 1, limits.MAX_CLAIM_LIMIT)
        self._lease = lease_ms
        self._consumer = consumer
        self._buffer: deque[Delivery] = deque()
        # Taken from the buffer, and not in the hands of who asked yet.
        self._handing: Delivery | None = None
        self._popping = threading.Lock()
        self._room = asyncio.Event()
        self._arrived = asyncio.Event()
        self._failure: PenstockError | None = None

    async def open(self) -> None:
        """Find out how long a lease is, and begin to claim."""
        if self._lease is None:
            self._lease = (await self._link.call(calls.queue(self._queue))).lease_ms
        if not self._tasks:
            self.start()
            self._spawn(self._fetch(self._lease))

    def pop(self) -> Delivery | None:
        """Return one whose lease is alive, without waiting; callable from any thread.

        Who has got it says :meth:`handed`. Until then the same one is returned: if something came
        between, its lease must not be kept for nobody.
        """
        with self._popping:
            while True:
                delivery = self._handing
                if delivery is None:
                    if not self._buffer:
                        return None
                    delivery = self._handing = self._buffer.popleft()
                if self.is_live(delivery):
                    return delivery
                self._handing = None

    def handed(self) -> None:
        """Note that the last one has come to who asked for it."""
        self._handing = None

    @property
    def wants_more(self) -> bool:
        """Whether half of the buffer is free."""
        return len(self._buffer) <= self._prefetch // 2

    def wake(self) -> None:
        """There is room again."""
        self._room.set()

    async def get(self) -> Delivery:
        """Return the next one, waiting for it."""
        while True:
            delivery = self.pop()
            if self.wants_more:
                self._room.set()
            if delivery is not None:
                return delivery
            if self._failure is not None:
                raise self._failure
            self._arrived.clear()
            await self._arrived.wait()

    async def stop(self) -> None:
        """Stop claiming and extending; give back what nobody has seen."""
        await super().stop()
        self._failure = self._failure or BrokerClosed("the consumer was closed")
        self._arrived.set()
        with self._popping:
            unseen = [each.receipt for each in self._buffer]
            self._buffer.clear()
            if self._handing is not None:
                unseen.append(self._handing.receipt)
                self._handing = None
        if unseen:
            with contextlib.suppress(PenstockError):
                await self._link.call(calls.release(unseen, reason="not begun", unseen=True))

    def _fail(self, error: PenstockError) -> None:
        self._failure = error
        self._arrived.set()

    async def _fetch(self, lease_ms: int) -> None:
        while True:
            room = self._prefetch - len(self._buffer)
            if not self.wants_more:
                self._room.clear()
                await self._room.wait()
                continue
            call = calls.claim(
                self._queue,
                limit=room,
                lease_ms=lease_ms,
                wait_ms=min(POLL_MS, lease_ms),
                consumer=self._consumer,
            )
            try:
                deliveries = await self._link.call(call)
            except StorageFailed as error:
                if isinstance(error, StoreDamaged):
                    self._fail(error)
                    return
                log.warning("fetching from %s goes on: %s", self._queue, error)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            except PenstockError as error:
                self._fail(error)
                return
            self._take(deliveries, lease_ms)
            self._buffer.extend(deliveries)
            self._arrived.set()
