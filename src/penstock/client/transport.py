"""Runs a client's connection on an event loop, and connects again whenever it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

from penstock.addresses import (
    Address,
    closed_after_handshake,
    environment_files,
    parse_servers,
    tls_failure,
)
from penstock.client.connection import ClientConnection, Options, Phase
from penstock.errors import BrokerClosed, InvalidUrl, ServerUnreachable
from penstock.wire.frames import progress_of
from penstock.wire.native import DEFAULT_PORT

if TYPE_CHECKING:
    from penstock.addresses import ServerUrl
    from penstock.client.calls import Call
    from penstock.client.connection import Callback
    from penstock.clock import Clock
    from penstock.errors import PenstockError

log = logging.getLogger(__name__)

R = TypeVar("R")

TICK_SECONDS: Final = 0.25
CONNECT_SECONDS: Final = 10.0
PROBE_SECONDS: Final = 2.0
CLOSE_SECONDS: Final = 1.0
WRITE_HIGH_BYTES: Final = 4 * 1024 * 1024


# Answers of resolvers for a name that does not exist; not EAI_AGAIN, for that may pass.
_NO_SUCH_HOST: Final = frozenset(
    getattr(socket, name) for name in ("EAI_NONAME", "EAI_NODATA") if hasattr(socket, name)
)
# Errors of TLS that say no more than that the other side has gone.
_CUT_OFF: Final = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)


# How often in a row a server may end TLS without a word before that counts as its answer.
_SILENT_ENDS: Final = 3


class Target(NamedTuple):
    """The addresses of servers, the TLS context for them, and the key that their URL names."""

    addresses: tuple[Address, ...]
    tls: ssl.SSLContext | None
    token: str = ""


def servers_of(url: str) -> ServerUrl:
    """Take the URL of native servers apart."""
    return parse_servers(url, ("penstock", "penstocks"), DEFAULT_PORT)


def target_of(url: str, tls: bool | ssl.SSLContext) -> Target:  # noqa: FBT001 - a union
    """Read ``penstock://[KEY:SECRET@]HOST[:PORT],…``; ``penstocks`` is the same over TLS.

    Files of TLS are those of the URL, or of the environment; a context has its own.
    """
    named = servers_of(url)
    context = None
    if isinstance(tls, ssl.SSLContext):
        context = tls
    elif tls or named.scheme == "penstocks":
        context = named.files.otherwise(environment_files()).context()
    return Target(named.addresses, context, named.token)


async def open_transport(target: Target, options: Options, clock: Clock) -> Transport:
    """Connect to a server; return when it has said welcome."""
    transport = Transport(target, options, clock, asyncio.get_running_loop())
    await transport.open()
    return transport


class Transport(asyncio.Protocol):
    """The state of a client and its socket. Everything here happens on the loop's thread."""

    def __init__(
        self, target: Target, options: Options, clock: Clock, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.target = target
        self.loop = loop
        self._pid = os.getpid()
        self.thread_id = threading.get_ident()
        self.connection = ClientConnection(
            options,
            now_ms=self.now_ms(),
            random=clock.random,
            fresh=clock.lease_id(),
            addresses=[str(each) for each in target.addresses],
        )
        self._transport: asyncio.Transport | None = None
        self._flushing = False
        self._ready = loop.create_future()
        self._gone = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        # The address of a server that ended a greeting, and may speak TLS; and how many did so
        # one after the other although TLS was spoken.
        self._suspect: int | None = None
        self._silent_ends = 0

    def now_ms(self) -> int:
        """Time that never steps, for durations alone."""
        return int(self.loop.time() * 1000)

    # --- calls -----------------------------------------------------------------------------

    def forget(self, pending: Any) -> None:
        """Withdraw a call whose caller has gone."""
        if pending is not None:
            self.connection.withdraw(pending, self.now_ms())
            self.flush_soon()

    def submit(self, call: Call[Any], callback: Callback | None) -> None:
        """Run a call, and call back when it is over."""
        self.connection.submit(call, callback, self.now_ms())
        self.flush_soon()

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that the connection belongs to."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Refuse what would wait for ever: a child has no loop."""
        if self.forked:
            raise BrokerClosed("the client was made before fork(): connect anew in the child")

    async def call(self, call: Call[R]) -> R:
        """Run a call to its end."""
        self.check_process()
        future: asyncio.Future[R] = self.loop.create_future()
        pending = self.connection.submit(call, partial(self._resolve, future, call), self.now_ms())
        self.flush_soon()
        try:
            return await future
        except asyncio.CancelledError:
            if not future.done() or future.cancelled():
                self.forget(pending)
            elif future.exception() is None:
                # The answer came in the same turn of the loop, and the caller will not see it.
                self.give_back(call, future.result())
            raise

    def _resolve(
        self, future: asyncio.Future[Any], call: Call[Any], result: Any, error: BaseException | None
    ) -> None:
        if future.done():
            # Cancelled, and the caller does not know it yet.
            self.give_back(call, result)
        elif error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def give_back(self, call: Call[Any], result: Any) -> None:
        """Release what a claim has brought, if it is one: its caller has gone."""
        self.connection.give_back(call, result, self.now_ms())
        self.flush_soon()

    async def open(self) -> None:
        """Connect, and return when the server has said welcome."""
        self._run_on()
        try:
            await self._ready
        except BaseException:
            await self.close()
            raise

    def _run_on(self) -> None:
        self._runner = self.loop.create_task(self._run())
        self._runner.add_done_callback(self._ended)

    async def close(self) -> None:
        """End the connection; calls that are under way raise."""
        if self.forked:
            return
        # Settlements that were handed to the loop before are sent first.
        await asyncio.sleep(0)
        self.connection.abandon(BrokerClosed("the client was closed"), self.now_ms())
        self.flush()
        until = self.loop.time() + CLOSE_SECONDS
        while (
            self._transport is not None and self.connection.giving_back and self.loop.time() < until
        ):
            self.flush()
            await asyncio.sleep(0.005)
        self.connection.close(self.connection.failure)
        self.flush()
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait({self._runner})
        if self._transport is not None:
            self._transport.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), CLOSE_SECONDS)
            if self._transport is not None:
                self._transport.abort()

    # --- the connection --------------------------------------------------------------------

    async def _run(self) -> None:
        """Connect whenever there is no connection, and tell the core how time goes by."""
        connection = self.connection
        begun_ms = self.now_ms()
        connecting: asyncio.Task[None] | None = None
        try:
            while connection.phase is not Phase.CLOSED:
                now_ms = self.now_ms()
                if connecting is not None and connecting.done():
                    connecting.result()
                    connecting = None
                if (
                    connecting is None
                    and connection.phase is Phase.AWAY
                    and now_ms >= connection.connect_at_ms
                ):
                    connecting = self.loop.create_task(self._connect())
                if self._transport is not None:
                    connection.progressed(progress_of(self._transport), now_ms)
                connection.tick(now_ms)
                self.flush()
                pause_ms = TICK_SECONDS * 1000
                if not self._ready.done():
                    left_ms = begun_ms + self.connection.options.patience_ms - now_ms
                    if left_ms <= 0:
                        where = "any address" if connection.turns.several else self._where
                        text = f"no server at {where}: {connection.turns.why}"
                        self._fail(ServerUnreachable(f"{text}; is 'penstock serve' running there?"))
                        return
                    pause_ms = min(pause_ms, left_ms)
                if connecting is not None:
                    await asyncio.wait({connecting}, timeout=pause_ms / 1000)
                    continue
                if connection.phase is Phase.AWAY:
                    pause_ms = min(pause_ms, connection.connect_at_ms - now_ms)
                self._gone.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._gone.wait(), max(pause_ms, 1) / 1000)
        finally:
            if connecting is not None:
                connecting.cancel()
                await asyncio.wait({connecting})

    def _ended(self, runner: asyncio.Task[None]) -> None:
        """Fail the calls that wait for a connection: none is made any more."""
        failure = None if runner.cancelled() else runner.exception()
        if failure is not None:
            log.error("the client's connection can't be run any more", exc_info=failure)
            self._fail(ServerUnreachable(f"the client failed: {failure!r}"))
        elif self.connection.phase is not Phase.CLOSED:
            self._fail(BrokerClosed("the client was closed"))

    def _fail(self, error: PenstockError) -> None:
        """End for good."""
        self.connection.close(error)
        if not self._ready.done():
            self._ready.set_exception(error)
        self.flush()

    def _refuse(self, error: PenstockError, at: int | None = None) -> None:
        """Leave an address for good; the client fails if there is no other."""
        self.connection.refuse(error, self.now_ms(), at)
        if self.connection.phase is Phase.CLOSED:
            self._fail(self.connection.failure or error)

    @property
    def _address(self) -> Address:
        return self.target.addresses[self.connection.turns.at]

    @property
    def _where(self) -> str:
        return str(self._address)

    async def _connect(self) -> None:
        connection, new = self.connection, not self._ready.done()
        suspect, self._suspect = self._suspect, None
        if new and suspect is not None and await self._speaks_tls(self.target.addresses[suspect]):
            where = self.target.addresses[suspect]
            text = f"{where} speaks TLS: connect to penstocks://{where}, or with tls="
            self._refuse(ServerUnreachable(text), suspect)
            if connection.phase is Phase.CLOSED:
                return
        seconds = connection.turn_ms / 1000 if connection.turns.several else CONNECT_SECONDS
        try:
            await asyncio.wait_for(
                self.loop.create_connection(lambda: self, *self._address, ssl=self.target.tls),
                seconds,
            )
        except Exception as error:
            why = str(error) or type(error).__name__
            if isinstance(error, TimeoutError):
                why = f"no connection within {seconds:g} s"
            if (refusal := _refusal(self._address, error)) is None:
                connection.lost(why, self.now_ms())
            elif not new:
                # A key and a certificate that were right once may be so again.
                connection.lost(str(refusal), self.now_ms())
            else:
                self._refuse(refusal)
                connection.lost(str(refusal), self.now_ms())

    async def _speaks_tls(self, address: Address) -> bool:
        """Try whether a server that ended a greeting without a word answers to that of TLS."""
        hello = ssl.MemoryBIO()
        tried = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), hello, server_hostname="x")
        with contextlib.suppress(ssl.SSLWantReadError):
            tried.do_handshake()
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                reader, writer = await asyncio.open_connection(*address)
                try:
                    writer.write(hello.read())
                    # A handshake or an alert: only TLS begins with these.
                    return await reader.read(1) in {b"\x16", b"\x15"}
                finally:
                    writer.transport.abort()
        except (OSError, TimeoutError):
            return False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin with a greeting."""
        # A loop's transports need not be of asyncio's classes.
        made = cast(asyncio.Transport, transport)
        made.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        self._transport = made
        self.connection.connected(self.now_ms())
        self.flush()

    def data_received(self, data: bytes) -> None:
        """Hand bytes to the core and results to their callers."""
        self.connection.received(data, int(self.loop.time() * 1000))
        if not self._ready.done():
            if self.connection.phase is Phase.READY:
                self._ready.set_result(None)
            elif self.connection.foreign:
                self._refuse(ServerUnreachable(f"{self._where} {self.connection.foreign}"))
            elif self.connection.phase is Phase.CLOSED:
                failure = self.connection.failure or BrokerClosed("the client was closed")
                self._ready.set_exception(failure)
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """Repeat or fail the calls under way; the runner connects again."""
        self._transport = None
        connection = self.connection
        why = connection.turns.reason if connection.hang_up else str(exc or "the server closed it")
        if connection.phase is Phase.GREETING and not connection.hang_up:
            why = self._ended_greeting(exc)
        else:
            self._silent_ends = 0
        connection.lost(why, self.now_ms())
        self._gone.set()
        self.flush()

    def _ended_greeting(self, exc: Exception | None) -> str:
        """Return why a server may have ended the connection at the greeting."""
        if self.target.tls is None:
            self._suspect = self.connection.turns.at
            return str(exc or "it closed the connection at the greeting: is this its native port?")
        if isinstance(exc, ssl.SSLError) and not isinstance(exc, _CUT_OFF):
            return tls_failure(self._where, exc)
        # With TLS 1.3 a server looks at the client's certificate when TLS is agreed on for the
        # client; few servers tell why they end it then.
        self._silent_ends += 1
        text = closed_after_handshake(self._where)
        if not self._ready.done() and self._silent_ends >= _SILENT_ENDS:
            self._refuse(ServerUnreachable(text))
        return text

    def pause_writing(self) -> None:
        """Keep calls until the server reads again."""
        self.connection.paused = True

    def resume_writing(self) -> None:
        """Send the calls that were kept."""
        self.connection.resume(self.now_ms())
        self.flush()

    def flush_soon(self) -> None:
        """Write at the end of this turn of the loop, together with what else comes in it."""
        if not self._flushing:
            self._flushing = True
            self.loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write the bytes that are to be sent, and call back the callers whose calls are over."""
        self._flushing = False
        connection = self.connection
        output, connection.output = connection.output, []
        if self._transport is not None:
            if output:
                self._transport.write(output[0] if len(output) == 1 else b"".join(output))
            if connection.hang_up:
                self._transport.abort()
        if connection.done:
            done, connection.done = connection.done, []
            for callback, result, error in done:
                callback(result, error)
        if connection.phase is Phase.AWAY and self._runner is not None and self._runner.done():
            # It had been refused, and a call has come since.
            self._run_on()


def _refusal(address: Address, error: Exception) -> PenstockError | None:
    """Return the error of an address that waiting can't help; None: it may come by itself."""
    if isinstance(error, UnicodeError):
        return InvalidUrl(f"{address.host!r:.200} can't be the name of a host: {error}")
    if isinstance(error, socket.gaierror) and error.errno in _NO_SUCH_HOST:
        # A host that has been there may come back; one that never was is an error at once.
        return ServerUnreachable(f"there is no host named {address.host!r:.200}: {error}")
    if isinstance(error, ssl.SSLError) and not isinstance(error, _CUT_OFF):
        # A server that came back with a wrong certificate may yet be mended; one that was never
        # right is an error at once.
        return ServerUnreachable(tls_failure(str(address), error))
    return None
