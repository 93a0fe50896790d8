"""The pages for operators, on the HTTP listener: /health, /ready, /metrics, /admin/backup.

The first two tell nothing but a word and are open to everybody. The others want a key where there
are keys: one that may consume or admin all queues to look, and admin all queues to act.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.errors import NotAllowed, PenstockError
from penstock.server.backup import backup_into
from penstock.server.http import Response
from penstock.server.metrics import CONTENT_TYPE
from penstock.server.security import ANYONE, token_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from penstock.server.http import Handler, Request
    from penstock.server.security import Principal
    from penstock.server.serving import Server

__all__ = ["routes"]

_READY_SECONDS: Final = 0.1
# How often it is looked, while the answer is waited for, whether the store has gone away.
_AWAY_SECONDS: Final = 0.1


class _Backup(msgspec.Struct, forbid_unknown_fields=True):
    name: str


def routes(server: Server) -> dict[tuple[str, str], Handler]:
    """Return the handlers by method and path."""
    pages = _Pages(server)
    found: dict[tuple[str, str], Handler] = {
        ("GET", "/health"): lambda _: Response(body=b"alive\n"),
        ("GET", "/ready"): pages.ready,
        ("POST", "/admin/backup"): pages.backup,
    }
    if server.config.metrics_enabled:
        found["GET", "/metrics"] = pages.metrics
    return found


class _Pages:
    def __init__(self, server: Server) -> None:
        self._server = server
        self._page: asyncio.Future[bytes] | None = None
        self._page_until = 0.0
        self._probe: asyncio.Future[bool] | None = None
        self._probe_until = 0.0

    async def ready(self, _: Request) -> Response:
        """Say whether requests are welcome."""
        # That a database is away is known at once, while a verb that waits for it has the store.
        while self._server.broker.away is None:
            probe = self._look()
            await asyncio.wait({probe}, timeout=_AWAY_SECONDS)
            if probe.done():
                if probe.result():
                    return Response(body=b"ready\n")
                break
        return Response(503, b"not ready\n")

    def _look(self) -> asyncio.Future[bool]:
        # Asked on a thread, since the store may be busy for a moment; those who ask meanwhile share
        # the answer, so that they never keep more than one thread waiting.
        loop = asyncio.get_running_loop()
        if self._probe is None or (self._probe.done() and loop.time() > self._probe_until):
            self._probe = asyncio.ensure_future(asyncio.to_thread(lambda: self._server.ready))
            self._probe.add_done_callback(self._probed)
        return self._probe

    def _probed(self, probe: asyncio.Future[bool]) -> None:
        self._probe_until = asyncio.get_running_loop().time() + _READY_SECONDS
        if not probe.cancelled():
            probe.exception()

    async def metrics(self, request: Request) -> Response:
        """Show what is counted."""
        return await self._counted("metrics", request, ("consume", "admin"), self._metrics)

    async def _metrics(self, _: Request) -> Response:
        # Those who ask at the same time share one page: each asks the broker about every queue.
        loop = asyncio.get_running_loop()
        if self._page is None or (self._page.done() and loop.time() > self._page_until):
            self._page = asyncio.ensure_future(asyncio.to_thread(self._server.metrics.page))
            self._page_until = loop.time() + 1.0
        body = await asyncio.shield(self._page)
        return Response(body=body, content_type=CONTENT_TYPE)

    async def backup(self, request: Request) -> Response:
        """Make a backup in the directory that is set for it."""
        return await self._counted("backup", request, ("admin",), self._backup)

    async def _backup(self, request: Request) -> Response:
        try:
            asked = msgspec.json.decode(request.body, type=_Backup)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _json(400, {"error": "InvalidInput", "message": str(error)})
        directory = self._server.config.backup_directory
        path, size = await asyncio.to_thread(
            backup_into, self._server.broker, directory, asked.name
        )
        return _json(200, {"path": str(path), "bytes": size})

    async def _counted(
        self,
        operation: str,
        request: Request,
        actions: tuple[str, ...],
        answer: Callable[[Request], Awaitable[Response]],
    ) -> Response:
        """Answer who may ask, and count it."""
        clock = self._server.clock
        begin = clock.seconds()
        key_id, outcome = "", "ok"
        try:
            principal = self._principal(request)
            if principal is None:
                outcome = NotAllowed.__name__
                text = "this page wants authorization: Bearer ID:SECRET"
                return _json(401, {"error": outcome, "message": text}, _CHALLENGE)
            key_id = principal.key_id
            principal.check_any(actions)
            return await answer(request)
        except PenstockError as error:
            outcome = type(error).__name__
            status = 403 if isinstance(error, NotAllowed) else 400
            return _json(status, {"error": outcome, "message": str(error)})
        finally:
            self._server.metrics.request(
                "admin", operation, clock.seconds() - begin, outcome, key_id
            )

    def _principal(self, request: Request) -> Principal | None:
        if self._server.keys is None:
            return ANYONE
        token = token_of(request.headers.get("authorization"))
        return self._server.keys.by_token(token) if token else None


_CHALLENGE = (("www-authenticate", 'Bearer realm="penstock"'),)


def _json(status: int, body: Any, headers: tuple[tuple[str, str], ...] = ()) -> Response:
    return Response(status, msgspec.json.encode(body), "application/json", headers)
