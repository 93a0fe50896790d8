"""The HTTP listener that SQS and the admin pages share, and the guard of a server without keys.

:mod:`~penstock.server.http.protocol` serves one connection. One timer for all connections checks
their deadlines, so that an idle one costs nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from penstock.server.connections import Listener
from penstock.server.http.protocol import Handler, HttpBounds, HttpConnection, Request, Response
from penstock.server.security import is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from ssl import SSLContext

    from penstock.server.connections import Connections, Slot

__all__ = ["Handler", "Http", "HttpBounds", "PageGuard", "Request", "Response"]

_WAY_OUT: Final = "This server asks for no keys, so it takes no requests that "


class Http(Listener):
    """A listener: hands requests to the handler of their method and path, or to the fallback.

    A ``guard`` may refuse any request before that, by giving an answer.
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
        guard: Callable[[Request], Response | None] | None = None,
    ) -> None:
        super().__init__(host, port, tls=tls, slots=slots)
        self.bounds = bounds or HttpBounds()
        self.handshake_seconds = self.bounds.first_byte_ms / 1000
        self.secure = tls is not None
        self._routes = dict(routes)
        self._fallback = fallback
        if guard is not None:
            self._routes = {key: _guarded(guard, each) for key, each in routes.items()}
            self._fallback = _guarded(guard, fallback)
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

    def handler_of(self, method: str, path: str) -> Handler:
        """Return the handler of a request; HEAD has that of GET."""
        key = ("GET" if method == "HEAD" else method, path)
        return self._routes.get(key, self._fallback)

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
        bounds = self.bounds
        shortest_ms = min(
            bounds.first_byte_ms, bounds.request_ms, bounds.idle_ms, bounds.stalled_write_ms
        )
        self._timer = loop.call_later(min(0.5, shortest_ms / 4000), self._check)


def _guarded(guard: Callable[[Request], Response | None], handler: Handler) -> Handler:
    return lambda request: guard(request) or handler(request)


# --- web pages ------------------------------------------------------------------------------------
#
# A server without keys trusts every client that can connect. A browser on the same machine can, and
# does so for any page: by a form that posts to the server, or under a name of the page's own that
# resolves to this machine. Browsers send headers that tell their requests from those of clients.


class PageGuard:
    """Says why a request is refused.

    ``host`` is the listener's: where only this machine can reach it, a request must name this
    machine, or the host of ``url``, which is the address that the server is known by.
    """

    def __init__(self, host: str, url: str = "") -> None:
        self._local = is_loopback(host)
        self._known = _authority_of(url)
        self._known_host = _host_of(self._known)

    def __call__(self, request: Request) -> Response | None:
        """Return a refusal, or None."""
        headers = request.headers
        authority = headers.get("host", "").strip().lower()
        if headers.get("sec-fetch-site", "").strip().lower() == "cross-site":
            return _refused("come from web pages of other sites (Sec-Fetch-Site: cross-site).")
        origin = headers.get("origin")
        if origin is not None and _authority_of(origin) not in {authority, self._known} - {""}:
            return _refused("come from web pages of other sites (Origin).")
        if self._local and authority and not self._is_here(_host_of(authority)):
            return _refused(
                "name another host than this machine (Host): connect to localhost, set sqs.url to "
                "the address that the server is known by, or use keys."
            )
        return None

    def _is_here(self, host: str) -> bool:
        return (
            is_loopback(host)
            or host.endswith(".localhost")
            or bool(self._known_host and host == self._known_host)
        )


def _refused(why: str) -> Response:
    return Response(403, f"{_WAY_OUT}{why}\n".encode())


def _authority_of(url: str) -> str:
    try:
        return urlsplit(url.strip().lower()).netloc
    except ValueError:
        return ""


def _host_of(authority: str) -> str:
    """Return the host of ``host:port``; the brackets of an IPv6 address go."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.rpartition(":")[0] if ":" in authority else authority
