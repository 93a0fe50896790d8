"""Queueber's clients: its one interface in Cap'n Proto RPC, over one queue of the store.

Their protocol names no queue and knows no login, so the listener is given a queue, and is only
for where everybody may use it. Times are whole seconds there. Every answer is durable.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import capnp

from penstock import limits
from penstock.errors import InvalidInput, InvalidReceipt, PenstockError, QueueNotFound
from penstock.gateways.queueber import item_id, lease_data, lease_of, message_of
from penstock.model import Message
from penstock.validation import check_count

if TYPE_CHECKING:
    from asyncio import Server
    from collections.abc import Iterator

    from penstock.broker import Broker
    from penstock.model import Delivery
    from penstock.server.desk import Desk

__all__ = ["QueueberListener"]

log = logging.getLogger(__name__)

_SCHEMA: Final = capnp.load(str(Path(__file__).parent.parent / "gateways/queueber/rpc.capnp"))
# What a message from a client may hold, in words of eight bytes: a publish, and some room.
_TRAVERSAL_WORDS: Final = limits.MAX_PUBLISH_BYTES // 8 + (1 << 20)
_CONSUMER: Final = "queueber"


class QueueberListener:
    """Serves one queue to Queueber's clients; made with its defaults if it is not there."""

    def __init__(self, desk: Desk, host: str, port: int, *, queue: str) -> None:
        self._desk = desk
        self._host = host
        self._port = port
        self._queue = queue
        self._server: Server | None = None
        self._stack = contextlib.AsyncExitStack()
        self._connections: set[Any] = set()
        self.address = (host, port)

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._connections)

    async def start(self) -> None:
        """Listen; the queue is there afterwards."""
        await self._desk.call(self._make_queue)
        await self._stack.enter_async_context(capnp.kj_loop())
        try:
            self._server = await capnp.AsyncIoStream.create_server(
                self._connected, self._host, self._port
            )
        except OSError as error:
            await self._stack.aclose()
            raise InvalidInput(f"can't listen on {self._host}:{self._port}: {error}") from error
        self.address = self._server.sockets[0].getsockname()[:2]

    async def stop(self, grace_ms: int) -> None:  # noqa: ARG002 - what waits was handed back
        """Take no more connections, and end those that are there."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._connections):
            connection.close()
        await self._stack.aclose()
        self._server = None

    def _make_queue(self, broker: Broker) -> None:
        try:
            broker.queue(self._queue)
        except QueueNotFound:
            broker.create_queue(self._queue)

    async def _connected(self, stream: Any) -> None:
        if len(self._connections) >= limits.MAX_QUEUEBER_CONNECTIONS:
            log.warning("%d clients are connected: no more are taken", len(self._connections))
            stream.close()
            return
        service = _Service(self._desk, self._queue)
        server = capnp.TwoPartyServer(
            stream, bootstrap=service, traversal_limit_in_words=_TRAVERSAL_WORDS
        )
        self._connections.add(server)
        try:
            await server.on_disconnect()
        finally:
            self._connections.discard(server)


class _Service(_SCHEMA.Queue.Server):  # type: ignore[misc, name-defined]
    """What one client calls; an error is the call's, and the connection stays."""

    def __init__(self, desk: Desk, queue: str) -> None:
        self._desk = desk
        self._queue = queue

    async def add_context(self, context: Any) -> None:
        """Publish items; ``visibilityTimeoutSecs`` is their delay."""
        with _errors():
            items = context.params.req.items
            check_count(len(items), "items", 0, limits.MAX_PUBLISH_MESSAGES)
            # Whatever is too long is refused with the rest of the message.
            longest = limits.MAX_DURATION_MS // 1000 + 1
            messages = [
                Message(
                    bytes(item.contents),
                    {"queue": self._queue},
                    delay_ms=min(item.visibilityTimeoutSecs, longest) * 1000,
                )
                for item in items
            ]
            ids = await self._desk.publish(messages, queue=self._queue)
        answer = context.results.init("resp").init("ids", len(ids))
        for index, message_id in enumerate(ids):
            answer[index] = item_id(message_id)

    async def remove_context(self, context: Any) -> None:
        """Settle one item as done; false for whatever is not held under that lease."""
        request = context.params.req
        message_id, lease = message_of(bytes(request.id)), lease_of(bytes(request.lease))
        removed = False
        if message_id is not None and lease is not None:
            work = self._desk.broker.acking_held(lease, message_id, self._queue)
            # A lease that is none of this store's is only one that is not there.
            with _errors(), contextlib.suppress(InvalidReceipt):
                removed = await self._desk.change(work)
        context.results.init("resp").removed = removed

    async def poll_context(self, context: Any) -> None:
        """Claim; without a timeout wait until there is something."""
        request = context.params.req
        lease_ms = request.leaseValiditySecs * 1000
        limit = request.numItems or 1
        # Their 0 waits for ever: as long as a wait may be, and again.
        wait_ms = request.timeoutSecs * 1000
        with _errors():
            deliveries: list[Delivery] = []
            while not deliveries:
                claiming = self._desk.claim(
                    self._queue,
                    limit=min(limit, limits.MAX_CLAIM_LIMIT),
                    lease_ms=lease_ms,
                    wait_ms=min(wait_ms or limits.MAX_WAIT_MS, limits.MAX_WAIT_MS),
                    consumer=_CONSUMER,
                )
                deliveries = await self._desk.claimed(claiming)
                if wait_ms or not self._desk.is_open:
                    break
        answer = context.results.init("resp")
        items = answer.init("items", len(deliveries))
        for item, delivery in zip(items, deliveries, strict=True):
            item.contents = delivery.payload
            item.id = item_id(delivery.message_id)
        answer.lease = lease_data(deliveries[0].lease) if deliveries else b""

    async def extend_context(self, context: Any) -> None:
        """Move the deadline of a whole lease; false if nothing is held under it."""
        request = context.params.req
        lease = lease_of(bytes(request.lease))
        extended = False
        if lease is not None:
            with _errors(), contextlib.suppress(InvalidReceipt):
                outcomes = await self._desk.extend(
                    lease, lease_ms=request.leaseValiditySecs * 1000, queue=self._queue
                )
                extended = any(outcomes)
        context.results.init("resp").extended = extended


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Have errors reach the client as what they say, without a traceback."""
    try:
        yield
    except InvalidReceipt:
        raise
    except PenstockError as error:
        raise capnp.KjException(f"{type(error).__name__}: {error}") from None
