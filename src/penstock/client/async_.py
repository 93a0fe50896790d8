"""The client for asyncio."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

from penstock.client.calls import Call
from penstock.client.connection import Options
from penstock.client.holding import Fetcher, Holder
from penstock.client.transport import Link, target_of
from penstock.client.verbs import Awaiting, Verbs
from penstock.clock import Clock, SystemClock

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from penstock.client.holding import OnLost
    from penstock.model import Delivery

__all__ = ["AsyncClient", "AsyncConsumer", "AsyncKeep", "connect_async"]


async def connect_async(
    url: str,
    *,
    token: str = "",
    tls: bool | ssl.SSLContext = False,
    dedup: bool = True,
    patience_ms: int = 10_000,
    name: str = "",
    clock: Clock | None = None,
) -> AsyncClient:
    """Connect to a server from asyncio; the parameters are those of :func:`penstock.connect`."""
    options = Options(token=token, name=name, patience_ms=patience_ms, dedup=dedup)
    loop = asyncio.get_running_loop()
    link = Link(target_of(url, tls), options, clock or SystemClock(), loop)
    await link.open()
    return AsyncClient(link)


class AsyncClient(Verbs, Awaiting):
    """A broker at the other end of a connection; await its verbs. Use it on one event loop."""

    def __init__(self, link: Link) -> None:
        """Take over a link that stands: use :func:`penstock.connect_async`."""
        self._link = link

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Let go of the connection. Calls that are under way raise."""
        await self._link.close()

    async def _run(self, verb: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        made = verb(*args, **options)
        if type(made) is Call:
            return await self._link.call(made)
        try:
            step = next(made)
            while True:
                try:
                    result = await self._link.call(step)
                except Exception as error:
                    step = made.throw(error)
                else:
                    step = made.send(result)
        except StopIteration as end:
            return end.value

    def keep(
        self,
        deliveries: Sequence[Delivery],
        *,
        lease_ms: int | None = None,
        on_lost: OnLost | None = None,
    ) -> AsyncKeep:
        """Extend leases in the background, inside ``async with``, until they are settled.

        ``on_lost`` is called on the loop with a delivery whose lease was lost in spite of it.
        """
        return AsyncKeep(Holder(self._link, on_lost), deliveries, lease_ms)

    def consume(
        self,
        queue: str,
        *,
        prefetch: int = 10,
        lease_ms: int | None = None,
        consumer: str = "",
        on_lost: OnLost | None = None,
    ) -> AsyncConsumer:
        """Iterate over the messages of a queue for ever, claiming ahead; settle each yourself."""
        return AsyncConsumer(
            Fetcher(
                self._link,
                queue,
                prefetch=prefetch,
                lease_ms=lease_ms,
                consumer=consumer,
                on_lost=on_lost,
            )
        )


class AsyncKeep:
    """Leases that are kept alive; see :meth:`AsyncClient.keep`."""

    def __init__(
        self, holder: Holder, deliveries: Sequence[Delivery], lease_ms: int | None
    ) -> None:
        self._holder = holder
        self._deliveries = deliveries
        self._lease_ms = lease_ms

    @property
    def lost(self) -> frozenset[str]:
        """The receipts whose lease was lost."""
        return frozenset(self._holder.lost)

    async def __aenter__(self) -> Self:
        self._holder.start()
        try:
            await self._holder.hold(self._deliveries, self._lease_ms)
        except BaseException:
            await self._holder.stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._holder.stop()


class AsyncConsumer:
    """An endless iterator of deliveries; see :meth:`AsyncClient.consume`."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self._open = False

    @property
    def lost(self) -> frozenset[str]:
        """The receipts whose lease was lost."""
        return frozenset(self._fetcher.lost)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        self._fetcher.check_process()
        if not self._open:
            await self._fetcher.open()
            self._open = True
        delivery = await self._fetcher.get()
        self._fetcher.handed()
        return delivery

    async def aclose(self) -> None:
        """Stop fetching; what was fetched and not handed out goes back to the queue."""
        await self._fetcher.stop()
