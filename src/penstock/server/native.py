"""Serves native clients: connections, what bounds them, and how they end.

A connection is read only while what it has asked for is within bounds and it takes its answers;
answers that are ready in one turn of the loop are written together. What is claimed for who takes
no answers goes back, and is claimed anew once it does. The verbs themselves, and who
may use them, are in :mod:`penstock.server.native_verbs`.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from penstock import limits
from penstock.errors import InvalidInput, NotAllowed, PenstockError
from penstock.gateways.native import wire
from penstock.gateways.native.failures import failure_of
from penstock.gateways.native.frames import FrameReader
from penstock.server.native_verbs import VERBS
from penstock.server.security import ANYONE

if TYPE_CHECKING:
    import ssl
    from asyncio import AbstractEventLoop, Future

    from penstock.clock import Clock
    from penstock.server.desk import Desk
    from penstock.server.security import Keys, Principal

__all__ = ["Metrics", "NativeListener"]

log = logging.getLogger(__name__)

JANITOR_SECONDS: Final = 1.0
# How long the other side has to read a farewell before the connection is closed under it.
LINGER_SECONDS: Final = 1.0
WANTS_A_KEY: Final = "this server wants a key: token='KEY:SECRET'"
# Answers to these hold messages, of which nobody knows the size before.
WITH_MESSAGES: Final = frozenset({wire.Claim, wire.Browse})
# The window that clients take for granted; a shorter one is told.
DEDUP_WINDOW_MS: Final = 300_000
# What every connection may have waiting, however much others have.
OWN_BUFFERED_BYTES: Final = 1024 * 1024
# What a message of an answer is taken to weigh while none has been seen.
UNKNOWN_MESSAGE_BYTES: Final = 64 * 1024


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
        max_connections: int = limits.MAX_NATIVE_CONNECTIONS,
    ) -> None:
        self.desk = desk
        self.clock = clock
        self.keys = keys
        self.metrics = metrics
        self.max_connections = max_connections
        self.connections: set[Connection] = set()
        self.encoder = wire.Encoder()
        # Bytes that all connections together have sent and nobody has begun with.
        self.buffered = 0
        self._host, self._port, self._tls = host, port, tls
        self._name = server
        self._server: asyncio.Server | None = None
        self._janitor: asyncio.TimerHandle | None = None
        self.store_id = ""
        self.loop: AbstractEventLoop = asyncio.get_running_loop()

    async def start(self) -> None:
        """Bind, and accept connections from now on."""
        self.store_id = (await self.desk.call(lambda broker: broker.info())).store_id
        try:
            self._server = await self.loop.create_server(
                lambda: Connection(self), self._host, self._port, ssl=self._tls, backlog=1024
            )
        except OSError as error:
            raise InvalidInput(f"can't listen on {self._host}:{self._port}: {error}") from error
        self._janitor = self.loop.call_later(JANITOR_SECONDS, self._tidy)

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        assert self._server is not None, "start() comes first"
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def stop(self, grace_ms: int) -> None:
        """Accept nobody, finish and answer what is in hand, then close every connection."""
        if self._server is None:
            return
        self._server.close()
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
        self._server = None

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

    def _tidy(self) -> None:
        """Look at every connection: one timer for all of them."""
        self._janitor = self.loop.call_later(JANITOR_SECONDS, self._tidy)
        now = self.loop.time()
        for connection in list(self.connections):
            connection.tidy(now)


class Connection(asyncio.Protocol):
    """One client: bytes in, requests at work, answers out."""

    def __init__(self, listener: NativeListener) -> None:
        self._listener = listener
        self._loop = listener.loop
        self._desk = listener.desk
        self._encoder = listener.encoder
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(limits.MAX_HELLO_BYTES)
        self._token = ""
        self._principal: Principal | None = None
        self._at_work = 0
        self._bytes_at_work = 0
        # Claims that may wait, by the id of their request.
        self._claims: dict[int, Future[Any]] = {}
        # Claims that were taken back from the desk, and requests to begin again, for want of room.
        self._recalled: set[int] = set()
        self._held: list[wire.Request] = []
        # What was not begun yet when the connection ends, nobody needs.
        self._calls: set[Future[Any]] = set()
        self._message_bytes = UNKNOWN_MESSAGE_BYTES
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._flushing = False
        self._buffered = 0
        self._reading = True
        self._stuck_since: float | None = None
        self._leaving = False
        self._deaf = False
        self._made = self._heard = self._loop.time()

    @property
    def busy(self) -> bool:
        """Whether something is in hand or unsent."""
        in_hand = self._at_work or self._claims or self._held or self._out
        return bool(in_hand) or self._stuck_since is not None

    # --- called by the loop --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for a greeting."""
        # A loop's transports need not be of asyncio's classes.
        made = cast(asyncio.Transport, transport)
        self._transport = made
        made.set_write_buffer_limits(high=limits.MAX_UNSENT_BYTES)
        listener = self._listener
        listener.connections.add(self)
        if len(listener.connections) > listener.max_connections:
            self._farewell(PenstockError("too many connections"), final=False)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - whatever it was
        """Forget the claims that wait: what comes for them goes to somebody else."""
        self._transport = None
        self._listener.connections.discard(self)
        self._reader = FrameReader(1)
        self._account()
        self._out.clear()
        for future in list(self._calls):
            future.cancel()
        self._let_claims_go()

    def data_received(self, data: bytes) -> None:
        """Take bytes in whatever pieces."""
        self._heard = self._loop.time()
        if not self._deaf:
            self._reader.feed(data)
            self._work()
            self._account()

    def eof_received(self) -> bool:
        """Close: who sends nothing more is not answered either."""
        return False

    def pause_writing(self) -> None:
        """Read nothing from who does not read."""
        self._stuck_since = self._loop.time()

    def resume_writing(self) -> None:
        """Go on where it stopped."""
        self._stuck_since = None
        held, self._held = self._held, []
        for request in held:
            self._start(request, 1)
        self._work()
        self._account()

    def _account(self) -> None:
        """Count what waits here; who makes it too much for all is the one to go."""
        pending = self._reader.pending
        if pending != self._buffered:
            self._listener.buffered += pending - self._buffered
            self._buffered = pending
            if self._listener.buffered > limits.MAX_BUFFERED_BYTES and pending > OWN_BUFFERED_BYTES:
                self._farewell(PenstockError("the server has too much in hand"), final=False)
                self._account()

    # --- requests ------------------------------------------------------------------------------

    def _may_go_on(self) -> bool:
        return (
            self._at_work < limits.MAX_REQUESTS_AT_WORK
            and self._bytes_at_work < limits.MAX_BYTES_AT_WORK
            and self._stuck_since is None
            and not self._deaf
        )

    def _work(self) -> None:
        """Begin what has come, as far as bounds allow; read on only if they do."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        try:
            while self._may_go_on() and (frame := self._reader.take()) is not None:
                if self._principal is None:
                    self._greet(frame)
                else:
                    self._begin(frame)
        except InvalidInput as error:
            self._farewell(error, final=self._principal is None)
            return
        wanted = self._may_go_on()
        if wanted is not self._reading:
            self._reading = wanted
            (transport.resume_reading if wanted else transport.pause_reading)()

    def _greet(self, frame: memoryview) -> None:
        hello = wire.read_hello(frame)
        principal = self._listener.who(hello.token)
        if principal is None:
            log.warning("a native client was refused: no such key")
            text = "the key is not known, or its secret is another" if hello.token else WANTS_A_KEY
            self._farewell(NotAllowed(text), final=True)
            return
        self._principal, self._token = principal, hello.token
        self._reader.max_frame_bytes = limits.MAX_FRAME_BYTES
        self._write(self._encoder.frame(self._listener.welcome(hello.version)))

    def _begin(self, frame: memoryview) -> None:
        request = wire.read_request(frame)
        if type(request) not in VERBS or self._leaving or isinstance(request, wire.Failure):
            self._answer_at_once(request)
        else:
            self._start(request, len(frame))

    def _start(self, request: wire.Request, size: int) -> None:
        verb = VERBS[type(request)]
        began = self._loop.time()
        waits = type(request) is wire.Claim and request.wait_ms > 0
        try:
            if self._principal is not ANYONE:
                verb.check(self._principal, request)
            if waits:
                self._check_room(request.id)
            future = verb.run(self._desk, request)
        except Exception as error:
            self._fail(request, error, began)
            return
        weight = 0
        if waits:
            self._claims[request.id] = future
        else:
            weight = verb.weight(request, self._message_bytes) + size
            self._at_work += 1
            self._bytes_at_work += weight
            if not verb.at_the_desk:
                self._calls.add(future)
        future.add_done_callback(partial(self._answer, request, weight, began))

    def _answer_at_once(self, request: wire.Request | wire.Failure) -> None:
        """Answer what needs no broker."""
        answer: object = request
        if isinstance(request, wire.Failure):
            pass
        elif self._leaving:
            answer = wire.Undone(request.id)
        elif isinstance(request, wire.Cancel):
            waiting = self._claims.get(request.claim)
            answer = (1, request.id, waiting is not None and waiting.cancel())
        else:
            assert isinstance(request, wire.Ping)
            answer = (1, request.id, self._listener.clock.now_ms())
        self._write(self._encoder.frame(answer))

    def _check_room(self, request_id: int) -> None:
        if len(self._claims) >= limits.MAX_WAITING_CLAIMS:
            raise InvalidInput(
                f"{limits.MAX_WAITING_CLAIMS} claims of this connection wait already"
            )
        if request_id in self._claims:
            raise InvalidInput(f"a claim waits under the id {request_id} already")

    def _answer(
        self, request: wire.Request, weight: int, began: float, future: Future[Any]
    ) -> None:
        """Write what came of a request, and go on with those that had to wait for room."""
        if weight:
            self._at_work -= 1
            self._bytes_at_work -= weight
            self._calls.discard(future)
        else:
            self._claims.pop(request.id, None)
        if self._transport is None or self._deaf:
            self._nobody_there(request, future, "the consumer has gone")
            return
        if self._holds_back(request, began, future):
            return
        error = None if future.cancelled() else future.exception()
        if error is None:
            result = [] if future.cancelled() else future.result()
            try:
                self._write_result(request, result)
            except Exception as unwritable:
                error = unwritable
        if error is not None:
            self._fail(request, error, began)
        elif self._listener.metrics is not None:
            self._count(request, began, "ok")
        if self._stuck_since is not None and not weight:
            self._recall()
        if not self._reading:
            self._work()
            self._account()

    def _holds_back(self, request: wire.Request, began: float, future: Future[Any]) -> bool:
        """Put off a request whose answer finds no room; say whether it was."""
        recalled = request.id in self._recalled and future.cancelled()
        self._recalled.discard(request.id)
        if not recalled:
            full = self._stuck_since is not None and self._unsent > limits.MAX_BYTES_AT_WORK
            if not full or type(request) not in WITH_MESSAGES:
                return False
            if future.cancelled() or future.exception() is not None:
                return False
            self._nobody_there(request, future, "the consumer does not take its answers")
        if isinstance(request, wire.Claim):
            waited_ms = int((self._loop.time() - began) * 1000)
            request.wait_ms = max(0, request.wait_ms - waited_ms)
        if self._leaving:
            self._write(self._encoder.frame(wire.Undone(request.id)))
        elif self._stuck_since is None:
            self._start(request, 1)
        else:
            self._held.append(request)
        return True

    def _recall(self) -> None:
        """Have nothing more claimed for who does not read; what waits begins again afterwards."""
        for request_id, future in list(self._claims.items()):
            if future.cancel():
                self._recalled.add(request_id)

    def _let_claims_go(self) -> None:
        """Forget claims for good: what comes for them goes to somebody else."""
        self._held.clear()
        self._recalled.clear()
        claims, self._claims = self._claims, {}
        for future in claims.values():
            future.cancel()

    def _write_result(self, request: wire.Request, result: Any) -> None:
        frames = self._encoder.result(request.id, result)
        for frame in frames:
            self._write(frame)
        if type(request) in WITH_MESSAGES and result:
            # Up at once, down by and by: the next answer may be as large as the largest.
            seen = sum(map(len, frames)) // max(1, len(result))
            self._message_bytes = max(seen, (self._message_bytes + seen) // 2)

    def _nobody_there(self, request: wire.Request, future: Future[Any], reason: str) -> None:
        """Give back at once what was claimed for who can't be told."""
        if future.cancelled() or future.exception() is not None:
            return
        if isinstance(request, wire.Claim) and future.result():
            receipts = [each.receipt for each in future.result()]
            back = self._desk.release(receipts, delay_ms=0, reason=reason)
            back.add_done_callback(lambda done: done.exception())

    def _fail(self, request: wire.Request, error: BaseException, began: float) -> None:
        if not isinstance(error, PenstockError):
            log.error("%s failed", type(request).__name__, exc_info=error)
        self._write(self._encoder.frame(failure_of(request.id, error)))
        self._count(request, began, type(error).__name__)

    def _count(self, request: wire.Request, began: float, outcome: str) -> None:
        metrics = self._listener.metrics
        if metrics is not None:
            seconds = self._loop.time() - began
            metrics.request("native", type(request).__name__, seconds, outcome)

    # --- writing -------------------------------------------------------------------------------

    @property
    def _unsent(self) -> int:
        waiting = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return self._out_bytes + waiting

    def _write(self, frame: bytes) -> None:
        if self._deaf:
            return
        self._out.append(frame)
        self._out_bytes += len(frame)
        if self._out_bytes > limits.MAX_UNSENT_BYTES:
            # At once, so that what comes next knows whether there is room for it.
            self._flush()
        elif not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        out, self._out, self._out_bytes = self._out, [], 0
        if self._transport is not None and out:
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))

    # --- the end -------------------------------------------------------------------------------

    def leave(self) -> None:
        """Begin nothing new; claims that wait are answered with nothing."""
        self._leaving = True
        self._write(
            self._encoder.frame(wire.Bye("BrokerClosed", "the server is stopping", final=False))
        )
        for future in list(self._claims.values()):
            future.cancel()
        held, self._held = self._held, []
        for request in held:
            self._write(self._encoder.frame(wire.Undone(request.id)))

    def close(self) -> None:
        """Send what is ready, then close."""
        self._flush()
        self._deaf = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def _farewell(self, error: PenstockError, *, final: bool) -> None:
        """Say why, and give the other side a moment to read it."""
        if self._deaf:
            return
        failure = failure_of(0, error)
        self._write(self._encoder.frame(wire.Bye(failure.name, failure.message, final)))
        self._flush()
        # What still comes is read and dropped: closing over unread bytes would take the farewell
        # back before it is read.
        self._deaf = True
        self._let_claims_go()
        self._reader = FrameReader(1)
        if self._transport is not None:
            if self._transport.can_write_eof():
                self._transport.write_eof()
            if not self._reading:
                self._reading = True
                self._transport.resume_reading()
        self._loop.call_later(LINGER_SECONDS, self.abort)

    def tidy(self, now: float) -> None:
        """Close what has stalled, is idle, or whose key is gone."""
        silent_ms = (now - self._heard) * 1000
        if self._stuck_since is not None:
            if (now - self._stuck_since) * 1000 > limits.MAX_STALL_MS:
                log.warning("a native client that does not read its answers was cut off")
                self.abort()
            return
        if self._principal is None:
            # Since it was made: a greeting that dribbles in must not hold a connection.
            if (now - self._made) * 1000 > limits.MAX_GREETING_MS:
                self.abort()
            return
        if self._reader.pending and self._reading and silent_ms > limits.MAX_STALL_MS:
            self._farewell(InvalidInput("a frame was begun and not ended"), final=False)
        elif silent_ms > limits.MAX_IDLE_MS and not self.busy:
            self._farewell(PenstockError("the connection was idle"), final=False)
        elif self._listener.keys is not None:
            # Keys are looked up again, so that one that was taken away is of no use any more.
            self._principal = self._listener.who(self._token)
            if self._principal is None:
                self._farewell(NotAllowed("this key is not known any more"), final=True)
