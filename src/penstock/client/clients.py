"""The two clients: one for threads, which share a connection on a loop of its own, one for asyncio.

Both have the verbs of :mod:`penstock.client.calls`; here is how each runs one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue as queues
import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from penstock.client.calls import Call, Verbs
from penstock.client.connection import Options, Phase
from penstock.client.consumers import AsyncConsumer, ClientConsumer, HeldMessages
from penstock.client.transport import open_transport, target_of
from penstock.clock import Clock, SystemClock
from penstock.consuming import PREFETCH, PREFETCH_BYTES
from penstock.errors import BrokerClosed
from penstock.tracing import traced

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Generator

    from penstock.client.consumers import Subscription
    from penstock.client.transport import Target, Transport
    from penstock.consuming import Consumer
    from penstock.model import Outcome

R = TypeVar("R")


def connect(
    url: str,
    *,
    token: str = "",
    tls: bool | ssl.SSLContext = False,
    dedup: bool = True,
    patience_ms: int = 10_000,
    name: str = "",
    clock: Clock | None = None,
    tracing: bool = False,
) -> Client:
    """Connect to a server: ``penstock://HOST:PORT``. Its verbs are those of a broker.

    The URL may name several servers of one store, ``penstock://A:PORT,B:PORT``: the client uses one
    and goes to the next when that one does not answer. ``token`` is ``KEY:SECRET``, if the server
    wants one; the URL may have it instead: ``penstock://KEY:SECRET@HOST:PORT``. ``tls`` is True,
    like ``penstocks://HOST:PORT?ca=FILE&cert=FILE&key=FILE``, or a context of your own.
    A connection that is lost is made again; a call waits ``patience_ms`` for that, and as long for
    its answer once it is sent, beside the ``wait_ms`` of a claim: then it raises ServerUnreachable,
    and the server begins nothing of it any more. ``dedup`` gives every message that has none a
    dedup id, so that a publish whose answer was lost is sent again and not doubled. ``name`` tells
    the server who this is, for its log. ``tracing`` makes OpenTelemetry spans of what is published,
    and puts their context into the messages (:mod:`penstock.tracing`).
    """
    target, options = _resolved(url, tls, token, name=name, patience_ms=patience_ms, dedup=dedup)
    kind = traced(Client) if tracing else Client
    return kind(target, options, clock or SystemClock())


def connect_async(
    url: str,
    *,
    token: str = "",
    tls: bool | ssl.SSLContext = False,
    dedup: bool = True,
    patience_ms: int = 10_000,
    name: str = "",
    clock: Clock | None = None,
    tracing: bool = False,
) -> Connecting:
    """Connect to a server from asyncio; the parameters are those of :func:`penstock.connect`.

    Await it for a client, or use it itself in ``async with``.
    """

    async def open_client() -> AsyncClient:
        target, options = _resolved(
            url, tls, token, name=name, patience_ms=patience_ms, dedup=dedup
        )
        kind = traced(AsyncClient, awaited=True) if tracing else AsyncClient
        return kind(await open_transport(target, options, clock or SystemClock()))

    return Connecting(open_client())


class Connecting(Coroutine[Any, Any, "AsyncClient"]):
    """A client that is about to be connected: awaited, or entered by ``async with``."""

    def __init__(self, opening: Coroutine[Any, Any, AsyncClient]) -> None:
        self._opening = opening

    def __await__(self) -> Generator[Any, None, AsyncClient]:
        return self._opening.__await__()

    # A coroutine, so that asyncio.run() and create_task() take it.

    def send(self, value: Any) -> Any:
        """Go on with a value."""
        return self._opening.send(value)

    def throw(self, *error: Any) -> Any:
        """Go on with an error."""
        return self._opening.throw(*error)

    def close(self) -> None:
        """Give up."""
        self._opening.close()

    async def __aenter__(self) -> AsyncClient:
        self._client = await self._opening
        return self._client

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()


def _resolved(
    url: str,
    tls: bool | ssl.SSLContext,  # noqa: FBT001 - a union
    token: str,
    **options: Any,
) -> tuple[Target, Options]:
    """Read the URL; its key is that of the connection, unless another is given."""
    target = target_of(url, tls)
    return target, Options(token=token or target.token, **options)


class AsyncClient(Verbs):
    """A broker at the other end of a connection; await its verbs. Use it on one event loop."""

    def __init__(self, transport: Transport) -> None:
        """Take a transport that is connected: use :func:`penstock.connect_async`."""
        self._transport = transport

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. Calls that are under way raise."""
        await self._transport.close()

    def consume(
        self,
        queue: str,
        *,
        prefetch: int = PREFETCH,
        prefetch_bytes: int = PREFETCH_BYTES,
        lease_ms: int | None = None,
        consumer: str = "",
        wait_ms: int | None = None,
        on_refused: Callable[[Outcome], None] | None = None,
    ) -> AsyncConsumer:
        """Be pushed the messages of a queue; see :meth:`Client.consume`."""
        held = HeldMessages(
            self._transport,
            queue,
            prefetch=prefetch,
            prefetch_bytes=prefetch_bytes,
            lease_ms=lease_ms,
            consumer=consumer,
            on_refused=on_refused,
            linger=False,
        )
        made = AsyncConsumer(held, wait_ms)
        held.open()
        return made

    async def _run(self, verb: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        made = verb(*args, **options)
        if type(made) is Call:
            return await self._transport.call(made)
        try:
            step = next(made)
            while True:
                step = made.send(await self._transport.call(step))
        except StopIteration as end:
            return end.value


class _Waiter(msgspec.Struct, eq=False):
    """A thread that waits for its call; ``pending`` is for the transport."""

    answered: queues.SimpleQueue[None] = msgspec.field(default_factory=queues.SimpleQueue)
    pending: Any = None
    # The result and the error; None: the call is not over.
    outcome: tuple[Any, BaseException | None] | None = None

    def finish(self, result: Any, error: BaseException | None) -> None:
        """Wake the thread; called on the loop's thread."""
        self.outcome = (result, error)
        self.answered.put(None)

    def wait(self) -> tuple[Any, BaseException | None]:
        """Return the result and the error, once the call is over."""
        self.answered.get()
        assert self.outcome is not None
        return self.outcome


class Client(Verbs):
    """A broker at the other end of a connection. Thread-safe; close it, or use ``with``.

    It belongs to the process that made it: after ``fork()`` the child must connect anew.
    """

    def __init__(self, target: Target, options: Options, clock: Clock) -> None:
        """Connect: use :func:`penstock.connect`."""
        self._loop = _new_loop()
        self._inbox: list[tuple[Call[Any], _Waiter]] = []
        self._guard = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="penstock-client", daemon=True
        )
        self._thread.start()
        try:
            self._transport = self._do(open_transport(target, options, clock))
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether it makes no more connections: it was closed, or refused for good."""
        return self._closed or self._transport.connection.phase is Phase.CLOSED

    def close(self) -> None:
        """Close the connection. Calls that are under way raise."""
        if os.getpid() != self._pid:
            # The connection is the parent's.
            return
        self._check_here()
        with self._guard:
            if self._closed:
                return
            self._closed = True
        self._do(self._transport.close())
        self._stop()

    def consume(
        self,
        queue: str,
        *,
        prefetch: int = PREFETCH,
        prefetch_bytes: int = PREFETCH_BYTES,
        lease_ms: int | None = None,
        consumer: str = "",
        wait_ms: int | None = None,
        on_refused: Callable[[Outcome], None] | None = None,
    ) -> Consumer:
        """Be pushed the messages of a queue: iterate over them, and settle each by its own verbs.

        At most ``prefetch`` messages, of about ``prefetch_bytes``, are held and not settled at a
        time. The iteration ends when nothing has come for ``wait_ms``; None: never. ``on_refused``
        is called with the outcome of each receipt that is refused, which is logged otherwise; it is
        called on the client's own thread, and must only take note.
        """
        self._check_here()
        held = HeldMessages(
            self._transport,
            queue,
            prefetch=prefetch,
            prefetch_bytes=prefetch_bytes,
            lease_ms=lease_ms,
            consumer=consumer,
            on_refused=on_refused,
            linger=True,
        )
        made = ClientConsumer(held, wait_ms)
        self.subscribe(held)
        return made

    @property
    def transport(self) -> Transport:
        """The connection, for subscriptions of your own; its methods are the loop's."""
        return self._transport

    def subscribe(self, subscription: Subscription) -> None:
        """Open a subscription on the loop's thread."""
        with self._guard:
            if self._closed:
                raise BrokerClosed("the client is closed")
            self._loop.call_soon_threadsafe(subscription.open)

    def _stop(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        # A last turn, for callers that came just before: they would wait for ever.
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine on the loop's thread."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            # After an interrupt its result is not wanted.
            future.cancel()
            raise

    # --- between the threads -----------------------------------------------------------------

    def _run(self, verb: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        made = verb(*args, **options)
        if type(made) is Call:
            return self._wait(made)
        try:
            step = next(made)
            while True:
                step = made.send(self._wait(step))
        except StopIteration as end:
            return end.value

    def _check_here(self) -> None:
        """Refuse what would wait for ever: there is no loop to answer, or it is this thread's."""
        self._transport.check_process()
        if threading.get_ident() == self._thread.ident:
            raise BrokerClosed("the client can't be called on the thread of its own loop")

    def _wait(self, call: Call[Any]) -> Any:
        """Hand a call over to the loop's thread, and wait for its result."""
        if os.getpid() != self._pid or threading.get_ident() == self._thread.ident:
            self._check_here()
        waiter = _Waiter()
        with self._guard:
            if self._closed:
                raise BrokerClosed("the client is closed")
            if not self._inbox:
                # One wake-up for all calls that are handed over before the loop gets to them. It
                # comes first: a call without one, after an interrupt, would keep all from theirs.
                self._loop.call_soon_threadsafe(self._drain)
            self._inbox.append((call, waiter))
        try:
            result, error = waiter.wait()
        except BaseException:
            # An interrupt, or an error that a handler of signals raised. A loop that is closed has
            # no use for it.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._abandon, call, waiter)
            raise
        if error is not None:
            raise error
        return result

    def _drain(self) -> None:
        with self._guard:
            inbox, self._inbox = self._inbox, []
        submit, now_ms = self._transport.connection.submit, int(self._loop.time() * 1000)
        for call, waiter in inbox:
            try:
                waiter.pending = submit(call, waiter.finish, now_ms)
            except Exception as error:
                # The other threads' calls are not to be lost with it.
                waiter.finish(None, error)
        self._transport.flush()

    def _abandon(self, call: Call[Any], waiter: _Waiter) -> None:
        if waiter.outcome is None:
            self._transport.forget(waiter.pending)
        else:
            self._transport.give_back(call, waiter.outcome[0])


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop  # noqa: PLC0415 - faster if it is there
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
