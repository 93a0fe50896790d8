"""The client for asyncio."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

from penstock.client.calls import Awaiting, Call, Verbs
from penstock.client.connection import Options
from penstock.client.transport import Transport, target_of
from penstock.clock import Clock, SystemClock

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable


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
    transport = Transport(target_of(url, tls), options, clock or SystemClock(), loop)
    await transport.open()
    return AsyncClient(transport)


class AsyncClient(Verbs, Awaiting):
    """A broker at the other end of a connection; await its verbs. Use it on one event loop."""

    def __init__(self, transport: Transport) -> None:
        """Take a transport that is connected: use :func:`penstock.connect_async`."""
        self._transport = transport

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. Calls that are under way raise."""
        await self._transport.close()

    async def _run(self, verb: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        made = verb(*args, **options)
        if type(made) is Call:
            return await self._transport.call(made)
        try:
            step = next(made)
            while True:
                try:
                    result = await self._transport.call(step)
                except Exception as error:
                    step = made.throw(error)
                else:
                    step = made.send(result)
        except StopIteration as end:
            return end.value
