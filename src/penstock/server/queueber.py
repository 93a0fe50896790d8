"""Queueber's clients: its one interface in Cap'n Proto RPC, over one queue of the store.

Their protocol, ``queueber.capnp``, names no queue and knows no login, so the listener is given a
queue, and is only for where everybody may use it. Times are whole seconds there. Every answer is
durable. An item's id is laid out as a UUID of version 8, and sorts in the order of publishing::

    message id, bits 63-16 | 8 | bits 15-4 | 10 | bits 3-0, then 58 bits of 0
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import capnp

from penstock import limits
from penstock.clock import loop_seconds
from penstock.errors import InvalidInput, InvalidReceipt, PenstockError, QueueNotFound
from penstock.model import Message
from penstock.server.connections import Listener
from penstock.server.shares import holder_of
from penstock.server.waiting import ClaimWait
from penstock.validation import check_count

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from penstock.broker.broker import Broker
    from penstock.model import Delivery
    from penstock.server.batcher import Batcher
    from penstock.server.connections import Connections, Slot
    from penstock.server.metrics import Metrics

log = logging.getLogger(__name__)

_SCHEMA: Final = capnp.load(str(Path(__file__).with_suffix(".capnp")))
# The most words of eight bytes in a message from a client: a publish, and some room.
_TRAVERSAL_WORDS: Final = limits.MAX_PUBLISH_BYTES // 8 + (1 << 20)
_CONSUMER: Final = "queueber"
_ID_BYTES: Final = 16
_ID_BITS: Final = 0x8 << 76 | 0b10 << 62
_LEASE: Final = re.compile(rb"[0-9A-Za-z_-]{1,128}")


def item_id(message_id: int) -> bytes:
    """Return the id of a message as clients see it."""
    value = message_id >> 16 << 80 | (message_id >> 4 & 0xFFF) << 64 | (message_id & 0xF) << 58
    return (value | _ID_BITS).to_bytes(_ID_BYTES, "big")


def message_of(data: bytes) -> int | None:
    """Return the message that an id names; None if it is no id of ours."""
    if len(data) != _ID_BYTES:
        return None
    value = int.from_bytes(data, "big")
    message_id = value >> 80 << 16 | (value >> 64 & 0xFFF) << 4 | value >> 58 & 0xF
    return message_id if item_id(message_id) == data else None


def lease_of(data: bytes) -> str | None:
    """Return the token of a lease; None if it is no lease of ours."""
    return data.decode() if _LEASE.fullmatch(data) else None


class QueueberListener(Listener):
    """Serves one queue to Queueber's clients; made with its defaults if it is not there."""

    protocol = "capnp"

    def __init__(
        self,
        batcher: Batcher,
        host: str,
        port: int,
        *,
        queue: str,
        slots: Connections | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        super().__init__(host, port, slots=slots)
        self.metrics = metrics
        self.batcher = batcher
        self.queue = queue
        self._stack = contextlib.AsyncExitStack()

    def make_connection(self, slot: Slot) -> QueueberConnection:
        """Make the connection that has a slot."""
        return QueueberConnection(self.slots, slot, partial(self._connected, slot))

    async def start(self) -> None:
        """Listen; the queue is there afterwards."""
        await self.batcher.call(self._make_queue)
        await self._stack.enter_async_context(capnp.kj_loop())
        try:
            await super().start()
        except InvalidInput:
            await self._stack.aclose()
            raise

    async def stop(self, grace_ms: int) -> None:  # noqa: ARG002 - claims that wait were handed back
        """Accept no more connections, and close the open ones."""
        self.close()
        for connection in list(self.connections):
            connection.close()
        await self._stack.aclose()

    def _make_queue(self, broker: Broker) -> None:
        try:
            broker.queue(self.queue)
        except QueueNotFound:
            broker.create_queue(self.queue)

    async def _connected(self, slot: Slot, stream: Any) -> None:
        if slot.full or len(self.connections) >= limits.MAX_QUEUEBER_CONNECTIONS:
            log.warning("%d clients are connected: no more are taken", len(self.connections))
            slot.holder.abort()
            return
        server = capnp.TwoPartyServer(
            stream, bootstrap=_Service(self, slot), traversal_limit_in_words=_TRAVERSAL_WORDS
        )
        self.connections.add(server)
        try:
            await server.on_disconnect()
        finally:
            self.connections.discard(server)


class QueueberConnection(asyncio.Protocol):
    """A connection: the library's protocol, with a bound, and kept from what it does not survive.

    It lets the loop read into its own memory, and stops the reading when it is asked where to: that
    ends the process, if the loop is uvloop's. After an EOF it reads once more, through a pointer
    that leads nowhere. So it gets the bytes that were read, and hears of a lost connection only.
    """

    idle = True

    def __init__(
        self, connections: Connections, slot: Slot, connected: Callable[[Any], Awaitable[None]]
    ) -> None:
        self._slots = connections
        self._slot = slot
        self._inner = capnp.AsyncIoStream._connect(connected)  # noqa: SLF001 - there is no other
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        # Of the read under way: the bytes that are still wanted, and those that have come.
        self._wanted_bytes = self._held_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a client."""
        self._transport = cast(asyncio.Transport, transport)
        self._slot.hold_for(self, transport)
        self._inner.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        """Forget it."""
        self._slots.leave(self._slot)
        self._inner.connection_lost(error)

    def eof_received(self) -> bool:
        """Close: a client that sends no more gets no answer either."""
        self._transport.abort()
        return True

    def data_received(self, data: bytes) -> None:
        """Pass the bytes on, and count those of a message until it is whole."""
        left = memoryview(data)
        while left:
            buffer = self._inner.get_buffer(len(left))
            part = left[: len(buffer)]
            buffer[: len(part)] = part
            if isinstance(buffer, memoryview):
                begun = len(buffer) > self._wanted_bytes
                self._wanted_bytes = len(buffer) - len(part)
                self._held_bytes = len(part) + (0 if begun else self._held_bytes)
            self._inner.buffer_updated(len(part))
            left = left[len(part) :]
        self._slots.hold(self._slot, self._held_bytes if self._wanted_bytes else 0)

    def pause_writing(self) -> None:
        """Write no more for now."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Write on."""
        self._inner.resume_writing()

    def abort(self) -> None:
        """Close it."""
        self._transport.abort()

    def refuse(self, why: str) -> None:  # noqa: ARG002 - the protocol has no way to say it
        """Close it."""
        self.abort()


class _Refusal(Exception):
    """An error for a client, to which the library writes name, text and traceback of it."""

    __module__, __qualname__ = "builtins", "Error"
    __traceback__ = property(lambda _: None)


class _Service(_SCHEMA.Queue.Server):  # type: ignore[misc, name-defined]
    """The interface that one client calls; after an error the connection stays."""

    def __init__(self, listener: QueueberListener, slot: Slot) -> None:
        self._listener = listener
        self._slot = slot
        self._batcher = listener.batcher
        self._queue = listener.queue

    async def add_context(self, context: Any) -> None:
        """Publish items; ``visibilityTimeoutSecs`` is their delay."""
        with self._call("add"):
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
            ids = await self._batcher.publish(messages, queue=self._queue)
        answer = context.results.init("resp").init("ids", len(ids))
        for index, message_id in enumerate(ids):
            answer[index] = item_id(message_id)

    async def remove_context(self, context: Any) -> None:
        """Settle one item as done; false for whatever is not held under that lease."""
        removed = False
        # A lease that is none of this store's is only one that is not there.
        with self._call("remove"), contextlib.suppress(InvalidReceipt):
            request = context.params.req
            message_id, lease = message_of(bytes(request.id)), lease_of(bytes(request.lease))
            if message_id is not None and lease is not None:
                work = self._batcher.broker.acking_held(lease, message_id, self._queue)
                removed = await self._batcher.change(work)
        context.results.init("resp").removed = removed

    async def poll_context(self, context: Any) -> None:
        """Claim; without a timeout wait until there is something."""
        wait = ClaimWait()
        with self._call("poll", wait):
            request = context.params.req
            lease_ms = request.leaseValiditySecs * 1000
            limit = request.numItems or 1
            # Their 0 waits for ever: as long as a wait may be, and again.
            wait_ms = request.timeoutSecs * 1000
            deliveries: list[Delivery] = []
            while not deliveries:
                claiming = self._batcher.claim(
                    self._queue,
                    limit=min(limit, limits.MAX_CLAIM_LIMIT),
                    lease_ms=lease_ms,
                    wait_ms=min(wait_ms or limits.MAX_WAIT_MS, limits.MAX_WAIT_MS),
                    consumer=_CONSUMER,
                    admission=wait,
                    holder=holder_of("", self._slot.address),
                )
                deliveries = await self._batcher.claimed(claiming)
                if wait_ms or not self._batcher.is_open:
                    break
        answer = context.results.init("resp")
        items = answer.init("items", len(deliveries))
        for item, delivery in zip(items, deliveries, strict=True):
            item.contents = delivery.payload
            item.id = item_id(delivery.message_id)
        answer.lease = deliveries[0].lease.encode() if deliveries else b""

    async def extend_context(self, context: Any) -> None:
        """Move the deadline of a whole lease; false if nothing is held under it."""
        extended = False
        with self._call("extend"), contextlib.suppress(InvalidReceipt):
            request = context.params.req
            lease = lease_of(bytes(request.lease))
            if lease is not None:
                outcomes = await self._batcher.extend(
                    lease, lease_ms=request.leaseValiditySecs * 1000, queue=self._queue
                )
                extended = any(outcomes)
        context.results.init("resp").extended = extended

    @contextlib.contextmanager
    def _call(self, operation: str, wait: ClaimWait | None = None) -> Iterator[None]:
        """Count a call and its wait; turn errors into exceptions of the protocol."""
        listener, began, outcome = self._listener, loop_seconds(), "ok"
        # A client that asks for something is no stranger here.
        listener.slots.trust(self._slot)
        try:
            yield
        except BaseException as error:
            outcome = type(error).__name__
            if not isinstance(error, Exception):
                raise
            if isinstance(error, PenstockError | capnp.KjException):
                raise _Refusal(f"{outcome}: {error}") from None
            log.exception("%s failed", operation)
            raise _Refusal(f"the server failed ({outcome}); its log says why") from None
        finally:
            if listener.metrics is not None:
                about = ("capnp", operation, loop_seconds() - began, outcome)
                waited_s = 0.0 if wait is None else wait.waited_s
                listener.metrics.request(*about, "", self._slot.address, self._queue, waited_s)
