"""The pages for operators: /health, /ready and /metrics, and /admin/backup on the HTTP listener.

The first two tell nothing but a line and are open to everybody. The others want a key where there
are keys: one that may consume or admin all queues to look, and admin all queues to act. On a
listener for operations (``ops.address``) the first three need neither a key nor TLS.

No page waits for a store: one thread reads its figures, however many clients ask.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from penstock.clock import SystemClock
from penstock.errors import InvalidInput, NotAllowed, PenstockError, ServerBusy
from penstock.server.access import Access
from penstock.server.audit import Actor
from penstock.server.http import Response
from penstock.server.metrics import CONTENT_TYPE, Metrics
from penstock.server.security import ANYONE, token_of
from penstock.store.sql.location import without_password

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from penstock.server.config import Config
    from penstock.server.http import Handler, Request
    from penstock.server.security import Principal
    from penstock.server.served_store import Server

# For how long figures of the store pass for new, and how long a page waits for newer ones while the
# store answers; then it shows the last ones.
_FRESH_SECONDS: Final = 1.0


class _Backup(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    incremental: bool = False


def routes(server: Server) -> dict[tuple[str, str], Handler]:
    """Return the handlers of the HTTP listener by method and path."""
    pages = server.pages
    found = ops_routes(server)
    found["POST", "/admin/backup"] = partial(pages.check, ("admin",), pages.backup)
    if server.config.metrics_enabled:
        found["GET", "/metrics"] = partial(pages.check, ("consume", "admin"), pages.metrics)
    return found


def ops_routes(server: Server) -> dict[tuple[str, str], Handler]:
    """Return the handlers of pages that need no key, for the listener for operations."""
    found: dict[tuple[str, str], Handler] = {
        ("GET", "/health"): _alive,
        ("GET", "/ready"): server.pages.ready,
    }
    if server.config.metrics_enabled:
        found["GET", "/metrics"] = server.pages.metrics
    return found


def _alive(_: Request) -> Response:
    return Response(body=b"alive\n")


class Standby(Access):
    """A process that stands by, as far as its pages need it: it has no store."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.clock = SystemClock()
        self.metrics = Metrics()
        self.metrics.role, self.metrics.gauges = "standby", self.gauges
        self._has_metrics = config.metrics_enabled
        self._pages = Pages(cast("Server", self))

    def routes(self, *, keyless: bool) -> dict[tuple[str, str], Handler]:
        """Return the handlers of a listener; without ``keyless``, /metrics wants a key."""
        found: dict[tuple[str, str], Handler] = {("GET", "/health"): _alive}
        if self._has_metrics:
            page = self._pages.own_metrics
            checked = partial(self._pages.check, ("consume", "admin"), page)
            found["GET", "/metrics"] = page if keyless else checked
        return found


class Pages:
    """The pages of one server."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._reading: asyncio.Future[None] | None = None
        self._page: asyncio.Future[bytes] | None = None
        self._fresh_until = 0.0

    async def check(
        self,
        actions: tuple[str, ...],
        page: Callable[[Request], Awaitable[Response]],
        request: Request,
    ) -> Response:
        """Check the key, answer with a page, and count the request under the page's name."""
        server = self._server
        begin = server.clock.seconds()
        key_id, outcome = "", "ok"
        try:
            principal = await self._principal(request)
            if principal is None:
                outcome = NotAllowed.__name__
                token = token_of(request.headers.get("authorization"))
                server.metrics.refusals.token("admin", request.peer, token)
                text = "this page wants authorization: Bearer ID:SECRET"
                return _json(401, {"error": outcome, "message": text}, _CHALLENGE)
            key_id = principal.key_id
            request.trust()
            principal.check_any(actions)
            return await page(request)
        except PenstockError as error:
            outcome = type(error).__name__
            busy = 503 if isinstance(error, ServerBusy) else 400
            status = 403 if isinstance(error, NotAllowed) else busy
            return _json(status, {"error": outcome, "message": str(error)})
        finally:
            seconds = server.clock.seconds() - begin
            # Under the address of the page, also that of a standby.
            name, peer = request.path.rpartition("/")[2], request.peer
            server.metrics.request("admin", name, seconds, outcome, key_id, peer)

    async def _principal(self, request: Request) -> Principal | None:
        """Return the principal of a request; None: it needs a key and has none that is known."""
        keys = self._server.keys
        if keys is None:
            return ANYONE
        token = token_of(request.headers.get("authorization"))
        found = keys.find(token) if token else None
        return await found if isinstance(found, asyncio.Future) else found

    async def ready(self, _: Request) -> Response:
        """Say whether requests are welcome, and if not, why."""
        why = self._server.unready
        if why is None:
            return Response(body=b"ready\n")
        return Response(503, f"{without_password(why)}\n".encode())

    async def own_metrics(self, _: Request) -> Response:
        """Show the counters of this process."""
        # On a thread, and one page at a time for all: with many queues it takes the loop too long.
        if self._page is None or self._page.done():
            self._page = asyncio.ensure_future(asyncio.to_thread(self._server.metrics.page))
        return Response(body=await asyncio.shield(self._page), content_type=CONTENT_TYPE)

    async def metrics(self, request: Request) -> Response:
        """Show the counters, with new figures of the store if it gives them soon."""
        # Requests at the same time share one look at the store, which asks about every queue.
        loop, metrics = asyncio.get_running_loop(), self._server.metrics
        if self._reading is None or (self._reading.done() and loop.time() > self._fresh_until):
            self._reading = asyncio.ensure_future(asyncio.to_thread(metrics.read_store))
            self._fresh_until = loop.time() + _FRESH_SECONDS
        if self._server.broker.outage is None:
            await asyncio.wait({self._reading}, timeout=_FRESH_SECONDS)
        return await self.own_metrics(request)

    async def backup(self, request: Request) -> Response:
        """Make a backup in the directory that is set for it."""
        try:
            asked = msgspec.json.decode(request.body, type=_Backup)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidInput(str(error)) from None
        actor = Actor("admin", (await self._principal(request) or ANYONE).key_id, request.peer)
        path, size = await self._server.batcher.back_up(
            asked.name, actor, incremental=asked.incremental
        )
        return _json(200, {"path": path, "bytes": size})


_CHALLENGE = (("www-authenticate", 'Bearer realm="penstock"'),)


def _json(status: int, body: Any, headers: tuple[tuple[str, str], ...] = ()) -> Response:
    return Response(status, msgspec.json.encode(body), "application/json", headers)
