"""Serves native clients: where they connect, and what bounds all of them together.

Each has a :class:`~penstock.server.native_connection.Connection`. The verbs themselves, and who
may use them, are in :mod:`penstock.server.native_verbs`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

from penstock import limits
from penstock.errors import InvalidInput
from penstock.gateways.native import wire
from penstock.server.native_connection import Connection
from penstock.server.native_room import Sizes
from penstock.server.security import ANYONE

if TYPE_CHECKING:
    import ssl
    from asyncio import AbstractEventLoop

    from penstock.clock import Clock
    from penstock.server.desk import Desk
    from penstock.server.security import Keys, Principal

__all__ = ["Metrics", "NativeListener"]

JANITOR_SECONDS: Final = 1.0
# The window that clients take for granted; a shorter one is told.
DEDUP_WINDOW_MS: Final = 300_000


class Metrics(Protocol):
    """Who counts requests."""

    def request(self, protocol: str, operation: str, seconds: float, outcome: str) -> None:
        """Count a request that was answered."""


class NativeListener:
    """Listens for native clients and serves them from a desk."""

    def __init__(
        self,
        desk: Desk,
        host: str,
        port: int,
        *,
        clock: Clock,
        keys: Keys | None = None,
        tls: ssl.SSLContext | None = None,
        metrics: Metrics | None = None,
        server: str = "penstock",
        max_connections: int = limits.MAX_NATIVE_CONNECTIONS,
    ) -> None:
        self.desk = desk
        self.clock = clock
        self.keys = keys
        self.metrics = metrics
        self.max_connections = max_connections
        self.connections: set[Connection] = set()
        self.encoder = wire.Encoder()
        self.sizes = Sizes()
        # Bytes that all connections together have sent and nobody has begun with.
        self.buffered = 0
        self._host, self._port, self._tls = host, port, tls
        self._name = server
        self._server: asyncio.Server | None = None
        self._janitor: asyncio.TimerHandle | None = None
        self.store_id = ""
        self.loop: AbstractEventLoop = asyncio.get_running_loop()

    async def start(self) -> None:
        """Bind, and accept connections from now on."""
        self.store_id = (await self.desk.call(lambda broker: broker.info())).store_id
        try:
            self._server = await self.loop.create_server(
                lambda: Connection(self), self._host, self._port, ssl=self._tls, backlog=1024
            )
        except OSError as error:
            raise InvalidInput(f"can't listen on {self._host}:{self._port}: {error}") from error
        self._janitor = self.loop.call_later(JANITOR_SECONDS, self._tidy)

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        assert self._server is not None, "start() comes first"
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def stop(self, grace_ms: int) -> None:
        """Accept nobody, finish and answer what is in hand, then close every connection."""
        if self._server is None:
            return
        self._server.close()
        if self._janitor is not None:
            self._janitor.cancel()
        until = self.loop.time() + grace_ms / 1000
        for connection in list(self.connections):
            connection.leave()
        while any(each.busy for each in self.connections) and self.loop.time() < until:
            await asyncio.sleep(0.002)
        for connection in list(self.connections):
            connection.close()
        until = max(until, self.loop.time() + 0.1)
        while self.connections and self.loop.time() < until:
            await asyncio.sleep(0.002)
        for connection in list(self.connections):
            connection.abort()
        self._server = None

    def welcome(self, version: int) -> wire.Welcome:
        """Make the answer to a greeting."""
        bounds = {
            "frame_bytes": limits.MAX_FRAME_BYTES,
            "requests_at_work": limits.MAX_REQUESTS_AT_WORK,
            "waiting_claims": limits.MAX_WAITING_CLAIMS,
            "idle_ms": limits.MAX_IDLE_MS,
        }
        window_ms = self.desk.broker.dedup_window_ms
        if window_ms < DEDUP_WINDOW_MS:
            bounds["dedup_window_ms"] = window_ms
        return wire.Welcome(min(version, wire.VERSION), self._name, self.store_id, bounds)

    def who(self, token: str) -> Principal | None:
        """Return whose token this is; None: nobody's."""
        return ANYONE if self.keys is None else self.keys.by_token(token)

    def _tidy(self) -> None:
        """Look at every connection: one timer for all of them."""
        self._janitor = self.loop.call_later(JANITOR_SECONDS, self._tidy)
        now = self.loop.time()
        for connection in list(self.connections):
            connection.tidy(now)
