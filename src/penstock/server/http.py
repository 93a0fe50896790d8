"""The HTTP listener that SQS, the pages for operators and the console share.

One timer for all connections checks their deadlines, so that an idle one costs nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from penstock.server.connections import Listener
from penstock.server.http_connection import (
    Answering,
    Handler,
    HttpBounds,
    HttpConnection,
    Request,
    Response,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from ssl import SSLContext

    from penstock.server.connections import Connections, Slot

__all__ = ["Answering", "Handler", "Http", "HttpBounds", "HttpConnection", "Request", "Response"]


class Http(Listener):
    """A listener: hands requests to the handler of their method and path, or to the fallback.

    ``tree`` is a prefix of paths, and the handler of all requests below it. A ``guard`` is given
    the headers of any request before that, and may say why it is refused.
    """

    protocol = "http"

    def __init__(
        self,
        routes: Mapping[tuple[str, str], Handler],
        fallback: Handler,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: SSLContext | None = None,
        bounds: HttpBounds | None = None,
        slots: Connections | None = None,
        guard: Callable[[Mapping[str, str]], str | None] | None = None,
        tree: tuple[str, Handler] | None = None,
    ) -> None:
        super().__init__(host, port, tls=tls, slots=slots)
        self.bounds = bounds or HttpBounds()
        self.handshake_seconds = self.bounds.first_byte_ms / 1000
        _, *deadlines_ms = msgspec.structs.astuple(self.bounds)
        self._check_seconds = min(0.5, min(deadlines_ms) / 4000)
        self.secure = tls is not None
        self._routes = routes
        self._fallback = fallback
        self._guard = guard
        self._tree = tree
        self._timer: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self.stopping = False

    def make_connection(self, slot: Slot) -> HttpConnection:
        """Make the connection that has a slot."""
        return HttpConnection(self, asyncio.get_running_loop(), slot)

    async def start(self) -> None:
        """Bind, and accept connections from now on."""
        await super().start()
        self._check()

    async def stop(self, grace_ms: int) -> None:
        """Accept no more, answer requests for up to ``grace_ms``, then close."""
        self.stopping = True
        self.close()
        for connection in list(self.connections):
            connection.finish()
        if self.connections:
            self._empty.clear()
            try:
                await asyncio.wait_for(self._empty.wait(), grace_ms / 1000)
            except TimeoutError:
                for connection in list(self.connections):
                    connection.abort()
        if self._timer is not None:
            self._timer.cancel()

    def handle(self, request: Request) -> Answering:
        """Answer a request; the handler of GET answers HEAD too."""
        why = None if self._guard is None else self._guard(request.headers)
        if why is not None:
            return Response(403, f"{why}\n".encode())
        if self._tree is not None and request.path.startswith(self._tree[0]):
            return self._tree[1](request)
        key = ("GET" if request.method == "HEAD" else request.method, request.path)
        return self._routes.get(key, self._fallback)(request)

    def forget(self, connection: HttpConnection) -> None:
        """Remove a connection that has ended."""
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self.connections):
            if connection.deadline <= now:
                connection.overdue()
        self._timer = loop.call_later(self._check_seconds, self._check)
