"""The client for threads: any number of them share one connection, on a loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue as queues
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from penstock.client.calls import Call
from penstock.client.connection import Options, Phase
from penstock.client.holding import Fetcher, Holder
from penstock.client.transport import Link, target_of
from penstock.client.verbs import Verbs, Waiting
from penstock.clock import Clock, SystemClock
from penstock.errors import BrokerClosed

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Coroutine, Sequence
    from types import TracebackType

    from penstock.client.holding import OnLost
    from penstock.client.transport import Target
    from penstock.model import Delivery

__all__ = ["Client", "Consumer", "Keep", "connect"]

log = logging.getLogger(__name__)

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
) -> Client:
    """Connect to a server: ``penstock://HOST:PORT``. Its verbs are those of a broker.

    ``token`` is ``KEY:SECRET``, if the server wants one; ``tls`` True, or a context of your own.
    A connection that is lost is made again; a call waits ``patience_ms`` for that, and as long for
    its answer once it is sent, beside the ``wait_ms`` of a claim: then it raises ServerUnreachable,
    and the server begins nothing of it any more. ``dedup`` gives every message that has none a
    dedup id, so that a publish whose answer was lost is sent again and not doubled. ``name`` tells
    the server who this is, for its log.
    """
    options = Options(token=token, name=name, patience_ms=patience_ms, dedup=dedup)
    return Client(target_of(url, tls), options, clock or SystemClock())


class _Waiter:
    """Where a thread waits for one result."""

    __slots__ = ("_lock", "error", "over", "pending", "result")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.result: Any = None
        self.error: BaseException | None = None
        self.pending: Any = None
        self.over = False

    def told(self, result: Any, error: BaseException | None) -> None:
        self.result, self.error = result, error
        self.over = True
        self._lock.release()

    def wait(self) -> Any:
        self._lock.acquire()
        if self.error is not None:
            raise self.error
        return self.result


class _Teller:
    """Calls callbacks one after the other, on a thread that is made for the first of them."""

    def __init__(self) -> None:
        self._told: queues.SimpleQueue[tuple[OnLost, Delivery] | None] = queues.SimpleQueue()
        self._thread: threading.Thread | None = None

    def tell(self, on_lost: OnLost, delivery: Delivery) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="penstock-told", daemon=True)
            self._thread.start()
        self._told.put((on_lost, delivery))

    def stop(self) -> None:
        """End once everything has been told."""
        self._told.put(None)

    def _run(self) -> None:
        while (each := self._told.get()) is not None:
            on_lost, delivery = each
            try:
                on_lost(delivery)
            except Exception:
                log.exception("on_lost failed")


class Client(Verbs, Waiting):
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
        self._teller = _Teller()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="penstock-client", daemon=True
        )
        self._thread.start()
        try:
            self._link = self._do(_make(target, options, clock))
            self._do(self._link.open())
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether it makes no more connections: it was closed, or refused for good."""
        return self._closed or self._link.core.phase is Phase.CLOSED

    def close(self) -> None:
        """Let go of the connection. Calls that are under way raise."""
        if os.getpid() != self._pid:
            # The connection is the parent's.
            return
        self._check_here()
        with self._guard:
            if self._closed:
                return
            self._closed = True
        self._do(self._link.close(), closing=True)
        self._stop()

    def _stop(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._teller.stop()

    # --- between the threads -----------------------------------------------------------------

    def _run(self, verb: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        made = verb(*args, **options)
        if type(made) is Call:
            return self._wait(made)
        try:
            step = next(made)
            while True:
                try:
                    result = self._wait(step)
                except Exception as error:
                    step = made.throw(error)
                else:
                    step = made.send(result)
        except StopIteration as end:
            return end.value

    def _check_here(self) -> None:
        """Refuse what would wait for ever: there is no loop to answer, or it is this thread's."""
        if os.getpid() != self._pid:
            raise BrokerClosed("the client was made before fork(): connect anew in the child")
        if threading.get_ident() == self._thread.ident:
            raise BrokerClosed("the client can't be called on the thread of its own loop")

    def _wait(self, call: Call[R]) -> R:
        """Hand a call over to the loop's thread, and wait for its result."""
        self._check_here()
        waiter = _Waiter()
        with self._guard:
            if self._closed:
                raise BrokerClosed("the client is closed")
            first = not self._inbox
            self._inbox.append((call, waiter))
            if first:
                # One wake-up for all calls that are handed over before the loop gets to them.
                self._loop.call_soon_threadsafe(self._drain)
        try:
            result: R = waiter.wait()
        except BaseException as error:
            if error is not waiter.error:
                # An interrupt, or whatever a handler of signals raises.
                self._tell_loop(self._abandon, call, waiter)
            raise
        return result

    def _drain(self) -> None:
        with self._guard:
            inbox, self._inbox = self._inbox, []
        for call, waiter in inbox:
            waiter.pending = self._link.start(call, waiter.told)

    def _abandon(self, call: Call[Any], waiter: _Waiter) -> None:
        if waiter.over:
            self._link.give_back(call, waiter.result)
        else:
            self._link.forget(waiter.pending)

    def _tell_loop(self, act: Callable[..., None], *args: Any) -> None:
        """Have something done on the loop's thread; a loop that is closed has no use for it."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(act, *args)

    def _do(self, work: Coroutine[Any, Any, R], *, closing: bool = False) -> R:
        """Run a coroutine on the loop's thread."""
        try:
            self._check_here()
        except BrokerClosed:
            work.close()
            raise
        if self._closed and not closing:
            work.close()
            raise BrokerClosed("the client is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            # Of an interrupt: nobody waits for it any more.
            future.cancel()
            raise

    # --- leases ------------------------------------------------------------------------------

    def keep(
        self,
        deliveries: Sequence[Delivery],
        *,
        lease_ms: int | None = None,
        on_lost: OnLost | None = None,
    ) -> Keep:
        """Extend leases in the background, inside ``with``, until they are settled.

        ``lease_ms`` is what each extension gives, by default the queue's lease. ``on_lost`` is
        called, one at a time on a thread for this alone, with a delivery whose lease was lost in
        spite of it.
        """
        told = self._told_apart(on_lost)
        return Keep(self, self._do(_holder(self._link, told)), deliveries, lease_ms)

    def consume(
        self,
        queue: str,
        *,
        prefetch: int = 10,
        lease_ms: int | None = None,
        consumer: str = "",
        on_lost: OnLost | None = None,
    ) -> Consumer:
        """Iterate over the messages of a queue for ever, claiming ahead; settle each yourself.

        Leases are extended until a message is settled through this client. One that is fetched
        ahead and loses its lease is never handed out.
        """
        fetcher = self._do(
            _fetcher(
                self._link,
                queue,
                prefetch=prefetch,
                lease_ms=lease_ms,
                consumer=consumer,
                on_lost=self._told_apart(on_lost),
            )
        )
        return Consumer(self, fetcher)

    def _told_apart(self, on_lost: OnLost | None) -> OnLost | None:
        """Keep callbacks off the loop's thread: there they could neither call nor wait."""
        return None if on_lost is None else partial(self._teller.tell, on_lost)


class Keep:
    """Leases that are kept alive; see :meth:`Client.keep`."""

    def __init__(
        self,
        client: Client,
        holder: Holder,
        deliveries: Sequence[Delivery],
        lease_ms: int | None,
    ) -> None:
        self._client = client
        self._holder = holder
        self._deliveries = deliveries
        self._lease_ms = lease_ms

    @property
    def lost(self) -> frozenset[str]:
        """The receipts whose lease was lost."""
        return frozenset(self._holder.lost)

    def __enter__(self) -> Self:
        self._client._loop.call_soon_threadsafe(self._holder.start)  # noqa: SLF001
        try:
            self._client._do(self._holder.hold(self._deliveries, self._lease_ms))  # noqa: SLF001
        except BaseException:
            self._client._do(self._holder.stop())  # noqa: SLF001
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A client that is closed has stopped it.
        with contextlib.suppress(BrokerClosed):
            self._client._do(self._holder.stop())  # noqa: SLF001


class Consumer:
    """An endless iterator of deliveries; see :meth:`Client.consume`. For one thread."""

    def __init__(self, client: Client, fetcher: Fetcher) -> None:
        self._client = client
        self._fetcher = fetcher
        self._open = False

    @property
    def lost(self) -> frozenset[str]:
        """The receipts whose lease was lost."""
        return frozenset(self._fetcher.lost)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delivery:
        client, fetcher = self._client, self._fetcher
        client._check_here()  # noqa: SLF001
        if not self._open:
            client._do(fetcher.open())  # noqa: SLF001
            self._open = True
        delivery = fetcher.pop()
        if delivery is None:
            delivery = client._do(fetcher.get())  # noqa: SLF001
        elif fetcher.wants_more:
            client._loop.call_soon_threadsafe(fetcher.wake)  # noqa: SLF001
        fetcher.handed()
        return delivery

    def close(self) -> None:
        """Stop fetching; what was fetched and not handed out goes back to the queue."""
        with contextlib.suppress(BrokerClosed):
            self._client._do(self._fetcher.stop())  # noqa: SLF001


# Their events belong to the loop's thread, and so they are made there.


async def _make(target: Target, options: Options, clock: Clock) -> Link:
    return Link(target, options, clock, asyncio.get_running_loop())


async def _holder(link: Link, on_lost: OnLost | None) -> Holder:
    return Holder(link, on_lost)


async def _fetcher(link: Link, queue: str, **options: Any) -> Fetcher:
    return Fetcher(link, queue, **options)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop  # noqa: PLC0415 - faster if it is there
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
