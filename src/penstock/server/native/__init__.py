"""Serves native clients: the listener, and the bounds of all its connections together.

``connection`` serves one client; ``requests`` has a row for each verb, and bounds the messages that
are claimed for one connection.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from penstock import limits
from penstock.server.connections import Listener
from penstock.server.native.connection import NativeConnection
from penstock.server.native.requests import MessageSizes
from penstock.server.security import ANYONE
from penstock.server.shares import Shares
from penstock.wire import native as wire

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable

    from penstock.server.connections import Slot
    from penstock.server.security import Principal
    from penstock.server.served_store import Server

# The dedup window that clients assume; the welcome tells of a shorter one.
DEDUP_WINDOW_MS: Final = 300_000


class NativeListener(Listener):
    """Accepts native clients; their requests go to a batcher."""

    protocol = "native"
    connections: set[NativeConnection]

    def __init__(self, server: Server, host: str, port: int) -> None:
        super().__init__(host, port, tls=server.tls.context("native"), slots=server.connections)
        self.batcher = server.batcher
        self.clock = server.clock
        self.keys = server.keys
        self.metrics = server.metrics
        self.encoder = wire.Encoder()
        self.sizes = MessageSizes()
        # Bytes of requests at work, of all connections; and the connections that wait for fewer, by
        # the holder of their share.
        self.at_work = Shares("bytes of requests at work", limits.MAX_ALL_BYTES_AT_WORK)
        self.waiting: dict[str, set[NativeConnection]] = {}
        self.store_id = ""
        self.loop: AbstractEventLoop = asyncio.get_running_loop()

    def make_connection(self, slot: Slot) -> NativeConnection:
        """Make the connection that has a slot."""
        return NativeConnection(self, slot)

    async def start(self) -> None:
        """Bind, and accept connections from now on."""
        self.store_id = (await self.batcher.call(lambda broker: broker.info())).store_id
        await super().start()

    def welcome(self, version: int) -> wire.Welcome:
        """Make the answer to a greeting."""
        bounds = {
            "frame_bytes": limits.MAX_FRAME_BYTES,
            "requests_at_work": limits.MAX_REQUESTS_AT_WORK,
            "waiting_claims": limits.MAX_WAITING_CLAIMS,
            "idle_ms": limits.MAX_IDLE_MS,
        }
        window_ms = self.batcher.broker.dedup_window_ms
        if window_ms < DEDUP_WINDOW_MS:
            bounds["dedup_window_ms"] = window_ms
        return wire.Welcome(min(version, wire.VERSION), "penstock", self.store_id, bounds)

    def log_in(
        self, token: str, tell: Callable[[Principal | None], None]
    ) -> asyncio.Future[Principal | None] | None:
        """Tell whose a token is, at once or later; the future is done before it is told later."""
        found = ANYONE if self.keys is None else self.keys.find(token)
        if not isinstance(found, asyncio.Future):
            tell(found)
            return None

        def told(login: asyncio.Future[Principal | None]) -> None:
            if not login.cancelled():
                tell(login.result())

        found.add_done_callback(told)
        return found

    def wake_waiting(self) -> None:
        """Let the connections go on that waited for fewer bytes of requests at work."""
        for holder in [each for each in self.waiting if self.at_work.fits(each)]:
            for connection in self.waiting.pop(holder):
                self.loop.call_soon(connection.go_on)
