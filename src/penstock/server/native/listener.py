"""Serves native clients: where they connect, and what bounds all of them together.

Each has a :class:`~penstock.server.native.connection.Connection`. The verbs themselves, and who
may use them, are in :mod:`penstock.server.native.verbs`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock import limits
from penstock.server.acceptor import Acceptor
from penstock.server.connections import Connections
from penstock.server.native.backpressure import Sizes
from penstock.server.native.connection import Connection
from penstock.server.security import ANYONE
from penstock.wire.native import messages as wire

if TYPE_CHECKING:
    import socket
    import ssl
    from asyncio import AbstractEventLoop
    from collections.abc import Awaitable

    from penstock.clock import Clock
    from penstock.server.batcher import Desk
    from penstock.server.connections import Slot
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
        connections: Connections | None = None,
    ) -> None:
        self.desk = desk
        self.clock = clock
        self.keys = keys
        self.metrics = metrics
        self.all = Connections() if connections is None else connections
        self.connections: set[Connection] = set()
        self.encoder = wire.Encoder()
        self.sizes = Sizes()
        # Bytes of requests that are at work, of all connections; and who waits for them to be less.
        self.bytes_at_work = 0
        self.waiting: set[Connection] = set()
        self._host, self._port, self._tls = host, port, tls
        self._name = server
        self._acceptor: Acceptor | None = None
        self._janitor: asyncio.TimerHandle | None = None
        self.store_id = ""
        self.loop: AbstractEventLoop = asyncio.get_running_loop()

    async def start(self) -> None:
        """Bind, and accept connections from now on."""
        self.store_id = (await self.desk.call(lambda broker: broker.info())).store_id
        acceptor = Acceptor(self.all, "native", self._serve)
        await acceptor.listen(self._host, self._port)
        self._acceptor = acceptor
        self._janitor = self.loop.call_later(JANITOR_SECONDS, self._tidy)

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        assert self._acceptor is not None, "start() comes first"
        return self._acceptor.address

    def _serve(self, taken: socket.socket, slot: Slot) -> Awaitable[Any]:
        return self.loop.connect_accepted_socket(
            lambda: Connection(self, slot), taken, ssl=self._tls
        )

    async def stop(self, grace_ms: int) -> None:
        """Accept nobody, finish and answer what is in hand, then close every connection."""
        if self._acceptor is None:
            return
        self._acceptor.close()
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
        self._acceptor = None

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

    def work_of(self, more: int) -> None:
        """Count bytes of requests that are at work; those that wait go on when there is room."""
        self.bytes_at_work += more
        if self.waiting and self.bytes_at_work < limits.MAX_ALL_BYTES_AT_WORK:
            waiting, self.waiting = self.waiting, set()
            for connection in waiting:
                self.loop.call_soon(connection.go_on)

    def _tidy(self) -> None:
        """Look at every connection: one timer for all of them."""
        self._janitor = self.loop.call_later(JANITOR_SECONDS, self._tidy)
        now = self.loop.time()
        for connection in list(self.connections):
            connection.tidy(now)
