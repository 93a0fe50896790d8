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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import capnp

from penstock import limits
from penstock.clock import loop_seconds
from penstock.errors import InvalidInput, InvalidReceipt, PenstockError, QueueNotFound
from penstock.model import Message
from penstock.server.connections import Listener
from penstock.server.framed import TURN_SECONDS, FramedConnection
from penstock.server.shares import Shares, holder_of
from penstock.server.waiting import ClaimWait
from penstock.validation import check_count

if TYPE_CHECKING:
    from collections.abc import Iterator

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
# The library's buffer for messages that fit into it; and as many bytes in it count as a request in
# a connection's share of a turn. The library begins the calls after the turn, so that its time is
# not measured, and each call takes as long as a dozen requests of other protocols.
_BUFFER_BYTES: Final = 64 * 1024
_BYTES_OF_A_REQUEST: Final = 8
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
        self.places = Shares("connections", limits.MAX_QUEUEBER_CONNECTIONS, times=4)
        self._stack = contextlib.AsyncExitStack()

    def make_connection(self, slot: Slot) -> QueueberConnection:
        """Make the connection that has a slot."""
        return QueueberConnection(self, slot)

    async def start(self) -> None:
        """Listen; the queue is there afterwards."""
        await self.batcher.call(self._make_queue)
        await self._stack.enter_async_context(capnp.kj_loop())
        try:
            await super().start()
        except InvalidInput:
            await self._stack.aclose()
            raise

    async def stop(self, grace_ms: int) -> None:
        """Accept no more connections, answer calls at work, and close the open ones."""
        await super().stop(grace_ms)
        await self._stack.aclose()

    def _make_queue(self, broker: Broker) -> None:
        try:
            broker.queue(self.queue)
        except QueueNotFound:
            broker.create_queue(self.queue)


class QueueberConnection(FramedConnection):
    """A connection: the library's protocol, which is given the bytes that it asks for, in turns.

    The library would have the loop read into its own memory, and stops the reading when it is asked
    where to: that ends the process, if the loop is uvloop's. After an EOF it reads once more,
    through a pointer that leads nowhere. And it takes all messages that have come in one turn of
    the loop. So this is its transport as well: it says there when it reads, and hears of a lost
    connection only.
    """

    _listener: QueueberListener

    def __init__(self, listener: QueueberListener, slot: Slot) -> None:
        super().__init__(listener, asyncio.get_running_loop(), slot)
        self._inner = capnp.AsyncIoStream._connect(self._serve)  # noqa: SLF001 - there is no other
        # Bytes that the library has not asked for yet.
        self._unfed = b""
        # Of the read under way: the bytes that are still wanted, and those that have come.
        self._wanted_bytes = self._read_bytes = 0
        self._calls = 0

    async def _serve(self, stream: Any) -> None:
        places, holder = self._listener.places, holder_of("", self._slot.address)
        if not places.fits(holder):
            log.warning("a client is not taken: %s", places.refusal(holder))
        elif not self._shut:
            places.take(holder)
            try:
                service = _Service(self._listener, self, self._slot)
                server = capnp.TwoPartyServer(
                    stream, bootstrap=service, traversal_limit_in_words=_TRAVERSAL_WORDS
                )
                await server.on_disconnect()
            finally:
                places.give(holder)
        self.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a client."""
        super().connection_made(transport)
        self._inner.connection_made(self)

    def _lost(self) -> None:
        self._inner.connection_lost(None)

    @property
    def idle(self) -> bool:
        """Whether no call is at work."""
        return not self._calls

    def eof_received(self) -> bool:
        """Close: a client that sends no more gets no answer either."""
        self.abort()
        return True

    def _drop(self) -> None:
        self._unfed = b""
        self._wanted_bytes = 0
        super()._drop()

    def _work(self, data: bytes = b"") -> None:
        """Give the library what it asks for: the length of a message, then its rest."""
        self._unfed = self._unfed + data if self._unfed else data
        if self._waits_for_turn:
            return
        view, at = memoryview(self._unfed), 0
        ends = loop_seconds() + TURN_SECONDS
        while at < len(view) and self._stuck_since is None and not self._shut:
            if self._calls >= limits.MAX_REQUESTS_AT_WORK:
                break
            buffer = self._inner.get_buffer(1)
            # Otherwise nothing is read: the library is at work, and says when it reads again.
            if not isinstance(buffer, memoryview):
                break
            if self._share <= 0 or loop_seconds() > ends:
                self._yield_turn()
                break
            # Its buffer holds many short messages; a larger one is of a single message.
            short = len(buffer) <= _BUFFER_BYTES
            room = self._share * _BYTES_OF_A_REQUEST if short else len(buffer)
            part = view[at : at + min(room, len(buffer))]
            self._share -= len(part) // _BYTES_OF_A_REQUEST + 1
            buffer[: len(part)] = part
            begun = len(buffer) > self._wanted_bytes
            self._wanted_bytes = len(buffer) - len(part)
            self._read_bytes = len(part) + (0 if begun else self._read_bytes)
            at += len(part)
            self._inner.buffer_updated(len(part))
        if self._shut:
            return
        self._unfed = bytes(view[at:]) if at else self._unfed
        self._in_hand = len(self._unfed) + (self._read_bytes if self._wanted_bytes else 0)
        self._read(wanted=not self._unfed and self._stuck_since is None)

    def pause_writing(self) -> None:
        """Write no more for now."""
        self._inner.pause_writing()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Write on."""
        self._inner.resume_writing()
        super().resume_writing()

    def leave(self) -> None:
        """Read no more calls."""
        self._shut = True

    def count_call(self, more: int) -> None:
        """Count a call that is at work, or is no more."""
        self._calls += more
        if more < 0 and self._unfed:
            self._work()
            self._account()

    # --- called by the library, as its transport ------------------------------------------------

    def resume_reading(self) -> None:
        """Give it what has come: it reads."""
        if self._unfed:
            self._work()
            self._account()

    def pause_reading(self) -> None:
        """Do nothing: it is asked whether it reads."""

    def write(self, data: bytes) -> None:
        """Write an answer."""
        self._transport.write(data)

    def is_closing(self) -> bool:
        """Whether nothing more can be written."""
        return self._transport.is_closing()

    def can_write_eof(self) -> bool:
        """Whether one direction can be ended: that is never wanted."""
        return False


class _Refusal(Exception):
    """An error for a client, to which the library writes name, text and traceback of it."""

    __module__, __qualname__ = "builtins", "Error"
    __traceback__ = property(lambda _: None)


class _Service(_SCHEMA.Queue.Server):  # type: ignore[misc, name-defined]
    """The interface that one client calls; after an error the connection stays."""

    def __init__(
        self, listener: QueueberListener, connection: QueueberConnection, slot: Slot
    ) -> None:
        self._listener = listener
        self._connection = connection
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
        self._connection.count_call(1)
        try:
            # A client that asks for something is no stranger here.
            listener.slots.trust(self._slot)
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
            self._connection.count_call(-1)
            if listener.metrics is not None:
                about = ("capnp", operation, loop_seconds() - began, outcome)
                waited_s = 0.0 if wait is None else wait.waited_s
                listener.metrics.request(*about, "", self._slot.address, self._queue, waited_s)
