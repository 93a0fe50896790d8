"""The transport and its channels, as kombu calls them: on the application's threads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import ssl
import threading
import weakref
from collections import deque
from queue import Empty
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from amqp.exceptions import ConsumerCancelled
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments

from penstock import __version__
from penstock.addresses import TlsFiles
from penstock.client.connection import Options
from penstock.client.transport import target_of
from penstock.clock import SystemClock
from penstock.errors import (
    BrokerClosed,
    InvalidInput,
    InvalidUrl,
    NotAllowed,
    PenstockError,
    QueueExists,
    QueueNotFound,
    ServerUnreachable,
    StorageFailed,
)
from penstock.integrations.kombu.claims import NAME, Claimed, Claims, Consumer, LoopClient
from penstock.integrations.kombu.messages import (
    binding_of,
    is_expired,
    message_of,
    queue_name,
    raw_of,
    with_binding,
    without_binding,
)
from penstock.waiter import Inbox
from penstock.wire.native import DEFAULT_PORT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from concurrent.futures import Future

    from penstock.model import Delivery, QueueSpec, Value

log = logging.getLogger(__name__)

VISIBILITY_S: Final = 60
PATIENCE_MS: Final = 10_000
# As many as RabbitMQ's quorum queues give a message.
MAX_ATTEMPTS: Final = 20
# A temporary queue that no connection has used for so long is deleted by the next that comes.
TEMPORARY_MS: Final = 3_600_000
TEMPORARY_TTL_MS: Final = 300_000
EXPIRES_LABEL: Final = "kombu.expires_at_ms"
# The delivery mode of messages for those alone who are there.
TRANSIENT: Final = 1
TRANSIENT_QUEUE: Final = "kombu.transient"
CLOSE_S: Final = 5.0


class Temporary(NamedTuple):
    """A queue that ends with its connection, if it is exclusive, or when nobody has used it."""

    exclusive: bool
    expires_ms: int

    def labels(self, now_ms: int, others: Mapping[str, str] = {}) -> dict[str, str]:
        """Return the labels of a queue that a connection uses now, by the server's clock."""
        return {**others, EXPIRES_LABEL: str(now_ms + self.expires_ms)}


class Channel(virtual.Channel):  # type: ignore[misc] # kombu has no types
    """A channel. Its verbs are those of AMQP, as far as kombu's virtual transports have them."""

    supports_fanout = True

    def __init__(self, connection: Transport, **options: Any) -> None:
        super().__init__(connection, **options)
        self._claims = Claims(connection.broker.on_loop, connection.put, connection.lease_ms)

    def close(self) -> None:
        """Cancel all consumers; messages that are not settled go back unseen."""
        if not self.closed:
            self._transport.end(self._claims)
        super().close()

    @property
    def _transport(self) -> Transport:
        if self.connection is None:
            raise BrokerClosed("the channel is closed")
        transport: Transport = self.connection
        return transport

    # --- queues and exchanges --------------------------------------------------------------

    def prepare_queue_arguments(self, arguments: Any, **options: Any) -> Any:
        """Return a queue's arguments by the names that AMQP has for them."""
        return to_rabbitmq_queue_arguments(arguments, **options)

    def _has_queue(self, queue: str, **_: Any) -> bool:
        try:
            self._transport.broker.queue(self._transport.name_of(queue))
        except QueueNotFound:
            return False
        return True

    def _new_queue(self, queue: str, **options: Any) -> None:
        self._transport.declare(self._transport.name_of(queue), **options)

    def _size(self, queue: str) -> int:
        return self._transport.broker.stats(self._transport.name_of(queue)).available

    def _purge(self, queue: str) -> int:
        return self._transport.broker.purge(self._transport.name_of(queue))

    def queue_delete(self, queue: str, *, if_empty: bool = False, **_: Any) -> None:
        """Delete a queue with its messages; one that is not there is no error."""
        if not (if_empty and self._size(queue)):
            self._transport.delete_queues([self._transport.name_of(queue)])

    def exchange_delete(self, exchange: str, **_: Any) -> None:
        """Forget the type of an exchange; queues stay bound until they are unbound or deleted."""
        self.state.exchanges.pop(exchange, None)

    def queue_bind(
        self, queue: str, exchange: str = "", routing_key: str = "", *_: Any, **__: Any
    ) -> None:
        """Let a queue take what is published to an exchange with a matching routing key."""
        kind, binding = self._binding(exchange, routing_key)
        try:
            self._rebind(queue, lambda text: with_binding(text, binding))
        except NotAllowed as error:
            # Such a key can publish to no exchange either. Celery sends tasks to queues by name.
            if kind != "direct":
                raise
            log.info("queue %s takes only what is sent to it by name: %s", queue, error)

    def queue_unbind(
        self, queue: str, exchange: str = "", routing_key: str = "", *_: Any, **__: Any
    ) -> None:
        """Let a queue take it no longer."""
        _kind, binding = self._binding(exchange, routing_key)
        self._rebind(queue, lambda text: without_binding(text, binding))

    def _binding(self, exchange: str, routing_key: str) -> tuple[str, str]:
        exchange = exchange or "amq.direct"
        kind = self.state.exchanges.get(exchange, {}).get("type", "direct")
        return kind, binding_of(self._transport.prefix + exchange, kind, routing_key or "")

    def _rebind(self, queue: str, change: Callable[[str], str]) -> None:
        """Change the filter of a queue; look again, since others may do so at the same time."""
        broker, name = self._transport.broker, self._transport.name_of(queue)
        text = broker.queue(name).filter
        while (changed := change(text)) != text:
            broker.update_queue(name, filter=changed)
            text = broker.queue(name).filter

    # --- messages --------------------------------------------------------------------------

    def encode_body(self, body: Any, _encoding: str | None = None) -> tuple[Any, str | None]:
        """Leave text as it is, for people who look at a queue; bytes are in base64."""
        return (body, None) if isinstance(body, str) else super().encode_body(body, "base64")

    def basic_publish(
        self, message: dict[str, Any], exchange: str, routing_key: str, **_: Any
    ) -> None:
        """Publish a message; return when the server has stored it."""
        transport = self._transport
        self._inplace_augment_message(message, exchange, routing_key)
        address: dict[str, Value] = {"queue": transport.name_of(routing_key or "")}
        if exchange:
            address = {"exchange": transport.prefix + exchange, "routing_key": routing_key or ""}
            if message["properties"].get("delivery_mode") == TRANSIENT:
                address["transient"] = True
                transport.make_transient_queue()
        transport.broker.publish([message_of(message, address, transport.clock.now_ms())])

    def basic_get(self, queue: str, *, no_ack: bool = False, **_: Any) -> Any:
        """Return a message if the queue has one now."""
        name, broker = self._transport.name_of(queue), self._transport.broker
        message = None
        while message is None and (delivery := broker.run(self._claims.get, name)):
            message = self._receive(delivery, queue, no_ack=no_ack)
        return message

    def _receive(self, delivery: Delivery, queue: str, *, no_ack: bool) -> Any:
        """Make kombu's message; None if it has expired."""
        raw = raw_of(delivery, queue)
        # The deadline tells when it was claimed by the server's clock, as the publish is told.
        claimed_at_ms = delivery.lease_deadline_ms - self._claims.lease_ms
        expired = is_expired(raw, claimed_at_ms - delivery.published_at_ms)
        if expired or no_ack:
            self.basic_ack(delivery.receipt)
        return None if expired else self.Message(raw, channel=self)

    def basic_consume(
        self,
        queue: str,
        *,
        no_ack: bool,
        callback: Callable[[Any], object],
        consumer_tag: str,
        **_: Any,
    ) -> None:
        """Claim messages of a queue for a callback, which ``drain_events`` calls."""

        def receive(delivery: Delivery) -> bool:
            message = self._receive(delivery, queue, no_ack=no_ack)
            if message is not None:
                callback(message)
            return message is not None

        consumer = Consumer(self._transport.name_of(queue), receive)
        self._transport.broker.run(self._claims.consume, consumer_tag, consumer)

    def basic_cancel(self, consumer_tag: str) -> None:
        """End a consumer; messages that it was not given go back unseen."""
        self._transport.broker.run(self._claims.cancel, consumer_tag)

    def basic_qos(self, _size: int = 0, prefetch_count: int = 0, *_: Any, **__: Any) -> None:
        """Bound the messages that the channel holds; 0 is no bound."""
        self._transport.broker.run(self._claims.set_prefetch, prefetch_count)

    def basic_ack(self, delivery_tag: str, *, multiple: bool = False) -> None:
        """Settle a message as done; with ``multiple``, all that were delivered up to it."""
        receipts = [delivery_tag]
        if multiple:
            given = [key for key, owner in list(self._claims.held.items()) if owner is None]
            receipts = [*given[: given.index(delivery_tag)], delivery_tag]
        self._transport.broker.begin(self._claims.ack, receipts)

    def basic_reject(self, delivery_tag: str, *, requeue: bool = False) -> None:
        """Give a message back; without ``requeue`` it is done."""
        if requeue:
            self._transport.broker.run(self._claims.requeue, [delivery_tag])
        else:
            self.basic_ack(delivery_tag)

    def basic_recover(self, *, requeue: bool = False) -> None:
        """Give back every message that is not settled."""
        if not requeue:
            raise NotImplementedError("recover(requeue=False) is not supported")
        self._transport.broker.run(self._claims.recover)


class Transport(virtual.Transport):  # type: ignore[misc] # kombu has no types
    """A connection of kombu to a server.

    ``transport_options`` may have ``visibility_timeout`` (seconds of a lease; leases are extended
    while their messages are held), ``queue_name_prefix`` (of queues and exchanges),
    ``queue_settings`` (of queues that are made: fields of :class:`penstock.QueueSpec`), and
    ``patience_ms`` (for how long a call waits for a server that is away).
    """

    Channel = Channel
    default_port = DEFAULT_PORT
    driver_type = driver_name = "penstock"
    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(["direct", "topic", "fanout"])
    )
    connection_errors = (*virtual.Transport.connection_errors, StorageFailed, BrokerClosed)
    recoverable_connection_errors = connection_errors
    channel_errors = (*virtual.Transport.channel_errors, InvalidInput, QueueNotFound, NotAllowed)
    recoverable_channel_errors = ()
    scheme = "penstock"

    broker: LoopClient

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)
        settings = client.transport_options
        self.clock = SystemClock()
        self.prefix = str(settings.get("queue_name_prefix", ""))
        self.lease_ms = int(float(settings.get("visibility_timeout", VISIBILITY_S)) * 1000)
        self._queue_settings = dict(settings.get("queue_settings", {}))
        self._patience_ms = int(settings.get("patience_ms", PATIENCE_MS))
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Know of no connection: in a forked child, everything here is the parent's."""
        self.channels.clear()
        self._avail_channels.clear()
        self._temporary: dict[str, Temporary] = {}
        self._is_away = False
        self._inbox: Inbox[Claimed | PenstockError] = Inbox()
        self._ready: deque[tuple[Claims, Consumer, Delivery]] = deque()
        self._hub: Any = None
        self._wakeup: tuple[socket.socket, socket.socket] | None = None
        self._tending: Future[None] | None = None
        self._has_transient_queue = False

    def driver_version(self) -> str:
        """Return the version of Penstock."""
        return __version__

    # --- the connection --------------------------------------------------------------------

    def establish_connection(self) -> Transport:
        """Connect to the server."""
        asked = self.client
        if (asked.virtual_host or "/") != "/":
            raise InvalidUrl(
                f"a server has no virtual hosts such as {asked.virtual_host!r:.100}: the transport "
                "option queue_name_prefix keeps applications apart"
            )
        host, port = asked.hostname or "localhost", int(asked.port or DEFAULT_PORT)
        try:
            # The client would go on trying; kombu does that by itself, and may know other hosts.
            socket.create_connection((host, port), asked.connect_timeout or None).close()
        except OSError as error:
            raise ServerUnreachable(f"no server at {host}:{port}: {error}") from error
        self._begin_anew()
        url = f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        token = f"{asked.userid}:{asked.password or ''}" if asked.userid else ""
        options = Options(token=token, name=NAME, patience_ms=self._patience_ms, dedup=True)
        self.broker = LoopClient(target_of(url, _tls(asked.ssl)), options, self.clock)
        # For connections that nobody closes. On a thread: a garbage collection must not wait.
        closer = threading.Thread(target=self.broker.close, daemon=True)
        self._finalizer = weakref.finalize(self, closer.start)
        self._finalizer.atexit = False
        connection: Transport = super().establish_connection()
        return connection

    def verify_connection(self, _connection: Transport) -> bool:
        """Whether the connection can be used; a forked child makes its own."""
        return self.broker.usable

    def close_connection(self, connection: Transport) -> None:
        """Close all channels and the connection; exclusive queues go with it."""
        if self._hub is not None and self._wakeup is not None:
            self._hub.remove_reader(self._wakeup[0])
        super().close_connection(connection)
        if self._tending is not None and self.broker.usable:
            self._tending.cancel()
            self._delete_own_queues()
        self._finalizer.detach()
        self.broker.close()
        self._ready.clear()
        for end in self._wakeup or ():
            end.close()
        self._hub = self._wakeup = None

    def end(self, claims: Claims) -> None:
        """End the claims of a channel."""
        if self.broker.usable:
            self._is_away |= not self.broker.run(claims.close, 0 if self._is_away else CLOSE_S)

    def _delete_own_queues(self) -> None:
        """Delete exclusive queues; if the server is away, another connection does it later."""
        own = [name for name, queue in self._temporary.items() if queue.exclusive]
        try:
            if not self._is_away:
                self.delete_queues(own)
        except PenstockError as error:
            log.warning("temporary queues are left behind: %s", error)

    # --- events ----------------------------------------------------------------------------

    def put(self, item: Claimed | PenstockError) -> None:
        """Hand messages, or the reason why there are none, to the application's thread."""
        self._is_away = self._is_away or isinstance(item, ServerUnreachable)
        self._inbox.put(item)
        if self._wakeup is not None:
            # If no more bytes fit, the other end is readable anyway.
            with contextlib.suppress(OSError):
                self._wakeup[1].send(b"\0")

    def drain_events(self, _connection: Transport, timeout: float | None = None) -> None:
        """Call consumers with the messages of one claim; wait up to ``timeout`` seconds for one."""
        given = False
        while not given:
            if not self._receive(timeout):
                raise TimeoutError("no message has come")
            given = self._deliver()

    def _receive(self, timeout: float | None) -> bool:
        """Wait for the messages of a claim; raise the error of one that failed."""
        if not self._ready:
            try:
                item = self._inbox.take(timeout)
            except Empty:
                return False
            if isinstance(item, QueueNotFound):
                # An error of the connection: the application connects anew and makes the queue.
                raise ConsumerCancelled(str(item)) from item
            if isinstance(item, PenstockError):
                raise item
            self._ready.extend((item.claims, item.consumer, each) for each in item.deliveries)
        return True

    def _deliver(self) -> bool:
        """Call consumers with the messages that are ready; say whether there were any to give."""
        given = False
        while self._ready:
            claims, consumer, delivery = self._ready.popleft()
            self.broker.begin(claims.hand_over)
            # Otherwise it was given back meanwhile.
            if claims.held.get(delivery.receipt) is consumer:
                claims.held[delivery.receipt] = None
                given |= consumer.callback(delivery)
        return given

    def register_with_event_loop(self, _connection: Transport, loop: Any) -> None:
        """Let kombu's event loop call the consumers."""
        if self._wakeup is None:
            self._wakeup = socket.socketpair()
            for end in self._wakeup:
                end.settimeout(0)
        self._hub = loop
        loop.add_reader(self._wakeup[0], self._on_readable)
        # Messages may have come before.
        self._wakeup[1].send(b"\0")

    def _on_readable(self) -> None:
        if self._wakeup is not None:
            with contextlib.suppress(BlockingIOError):
                self._wakeup[0].recv(4096)
        while self._receive(timeout=0):
            self._deliver()

    # --- queues ----------------------------------------------------------------------------

    def name_of(self, queue: str) -> str:
        """Return the name of the Penstock queue for one of kombu."""
        return queue_name(self.prefix + queue)

    def declare(
        self,
        name: str,
        *,
        exclusive: bool = False,
        auto_delete: bool = False,
        arguments: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Make a queue, unless one of that name is there with whatever settings."""
        arguments = arguments or {}
        settings = {"lease_ms": self.lease_ms, "max_attempts": MAX_ATTEMPTS, **self._queue_settings}
        ttl_ms = int(arguments.get("x-message-ttl") or 0)
        if exclusive or auto_delete:
            ttl_ms = ttl_ms or TEMPORARY_TTL_MS
            settings.update(done_retention_ms=1, failed_retention_ms=1)
        if ttl_ms:
            settings["unclaimed_retention_ms"] = ttl_ms
        if exclusive or auto_delete or "x-expires" in arguments:
            # Consumers of other connections can't be seen: a queue that is not exclusive stays on.
            expires_ms = max(TEMPORARY_MS, int(arguments.get("x-expires") or 0))
            self._temporary[name] = Temporary(exclusive, expires_ms)
            if self._tending is None:
                self._tending = self.broker.begin(self._tend_temporary_queues)
        used = self._temporary.get(name)
        try:
            spec = self.broker.queue(name)
            if used is not None:
                labels = used.labels(self.broker.ping(), spec.labels)
                self.broker.update_queue(name, labels=labels)
        except QueueNotFound:
            if used is not None:
                settings["labels"] = used.labels(self.broker.ping())
            with contextlib.suppress(QueueExists):
                self.broker.create_queue(name, **settings)

    def delete_queues(self, names: Iterable[str]) -> None:
        """Delete queues, if they are there."""
        for name in names:
            self._temporary.pop(name, None)
            with contextlib.suppress(QueueNotFound):
                self.broker.delete_queue(name)

    def make_transient_queue(self) -> None:
        """Make the queue that lets go of transient messages after a second.

        The log keeps a message that no queue takes for its whole retention, with its payload; a
        worker of Celery sends an event every two seconds, and often nobody listens.
        """
        if not self._has_transient_queue:
            self._has_transient_queue = True
            with contextlib.suppress(QueueExists, NotAllowed):
                self.broker.create_queue(
                    TRANSIENT_QUEUE, filter="transient", unclaimed_retention_ms=1_000
                )

    async def _tend_temporary_queues(self) -> None:
        """Delete the temporary queues of connections that have died, and renew those of this."""
        broker = self.broker.on_loop
        while True:
            try:
                now_ms = await broker.ping()
                for spec in await broker.queues():
                    with contextlib.suppress(QueueNotFound):
                        if used := self._temporary.get(spec.name):
                            labels = used.labels(now_ms, spec.labels)
                            await broker.update_queue(spec.name, labels=labels)
                        elif spec.name.startswith(self.prefix) and _expires_ms(spec) < now_ms:
                            await broker.delete_queue(spec.name)
            except PenstockError as error:
                log.warning("temporary queues were not tended: %s", error)
            await asyncio.sleep(TEMPORARY_MS / 3000)


class SecureTransport(Transport):
    """The same over TLS, for ``penstocks://``."""

    scheme = "penstocks"


def _expires_ms(spec: QueueSpec) -> float:
    text = spec.labels.get(EXPIRES_LABEL, "")
    return int(text) if text.isascii() and text.isdigit() else math.inf


def _tls(asked: Any) -> bool | ssl.SSLContext:
    """Read kombu's ``ssl``, which is Celery's ``broker_use_ssl``: a flag, a context, or files."""
    if not isinstance(asked, dict):
        return asked if isinstance(asked, ssl.SSLContext) else bool(asked)
    names = ("ca_certs", "certfile", "keyfile")
    return TlsFiles(*(asked.get(name) or "" for name in names)).context()
