"""Accepts connections at an address, as many as there is room for.

The loop's own servers accept whatever comes and tell of it when a TLS handshake is over, which a
stranger need never begin. Here every connection has its slot from the moment that it is accepted.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from penstock.server.connections import Connections, Slot

__all__ = ["Acceptor"]

log = logging.getLogger(__name__)

_BACKLOG: Final = 1024
# Accepted in one turn of the loop: those that make way for them are closed in the next.
_AT_ONCE: Final = 8
# Until it is tried again where nothing could be accepted.
_PAUSE_SECONDS: Final = 0.5


class _Arriving:
    """Holds the slot of a connection until its protocol does: with TLS, after the handshake."""

    idle = True

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None

    def abort(self) -> None:
        """Close it."""
        if self.task is not None:
            self.task.cancel()

    def refuse(self, why: str) -> None:  # noqa: ARG002 - nobody could read it
        """Close it."""
        self.abort()


class Acceptor:
    """Accepts, and has ``serve`` make a connection of each socket and its slot."""

    def __init__(
        self,
        connections: Connections,
        protocol: str,
        serve: Callable[[socket.socket, Slot], Awaitable[Any]],
    ) -> None:
        self._connections = connections
        self._protocol = protocol
        self._serve = serve
        self._sockets: list[socket.socket] = []
        self._bound = ("", 0)
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed = False

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on."""
        return self._bound

    async def listen(self, host: str, port: int) -> None:
        """Bind, and accept from now on; InvalidInput names an address that can't be had."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            for family, _, _, _, address in dict.fromkeys(found):
                made = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
                made.setblocking(False)  # noqa: FBT003
                self._sockets.append(made)
        except OSError as error:
            self.close()
            raise InvalidInput(
                f"can't listen on {host}:{port}: {error.strerror or error}"
            ) from None
        self._bound = self._sockets[0].getsockname()[:2]
        for made in self._sockets:
            loop.add_reader(made, self._accept, made)

    def close(self) -> None:
        """Accept nobody any more, and let go of those that have not arrived."""
        while self._sockets:
            listening = self._sockets.pop()
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        for task in list(self._tasks):
            task.cancel()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                taken, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Above all where there are no descriptors left.
                self._rest(listening, error)
                return
            self._failed = False
            taken.setblocking(False)  # noqa: FBT003
            arriving = _Arriving()
            slot = self._connections.enter(arriving, self._protocol)
            arriving.task = asyncio.get_running_loop().create_task(self._arrive(taken, slot))
            self._tasks.add(arriving.task)
            arriving.task.add_done_callback(partial(self._arrived, taken, slot))

    async def _arrive(self, taken: socket.socket, slot: Slot) -> None:
        # Some loops set it only for sockets of their own.
        taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await self._serve(taken, slot)

    def _arrived(self, taken: socket.socket, slot: Slot, task: asyncio.Task[None]) -> None:
        """Let go of one that came to nothing; a task may be cancelled before it runs."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            return
        self._connections.leave(slot)
        taken.close()
        if isinstance(error, OSError):
            log.debug("a connection came to nothing: %s", error)
        elif error is not None:
            log.error("a connection could not be served", exc_info=error)

    def _rest(self, listening: socket.socket, error: OSError) -> None:
        """Accept nothing for a moment: what waits would be tried over and over."""
        if not self._failed:
            self._failed = True
            log.error("no connection can be accepted: %s", error)
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening)
        loop.call_later(_PAUSE_SECONDS, self._accept_again, listening)

    def _accept_again(self, listening: socket.socket) -> None:
        if listening.fileno() != -1:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)
