"""HTTP/1.1, a thin protocol on httptools, and its listener: SQS, console and operators share it.

A connection answers one request at a time; requests that are pipelined behind it wait, bounded, and
are answered in order. Bad input is answered once, and the connection closed. One timer for all
connections checks their deadlines, so that an idle one costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import aclosing
from functools import lru_cache, partial
from math import inf
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from penstock import limits
from penstock.clock import loop_seconds
from penstock.server.connections import Listener
from penstock.server.http import HttpBounds, Request, Response, Steps, begin, response_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping
    from ssl import SSLContext

    from penstock.server.connections import Connections, Slot
    from penstock.server.http import Answering, Handler

log = logging.getLogger(__name__)

# Parsed at a time: of a body, and of what may be many requests.
_SLICE_BYTES: Final = 16 * 1024
_HEAD_SLICE_BYTES: Final = 2 * 1024
_TURN_SECONDS: Final = limits.MAX_TURN_MS / 1000
_LINGER_MS: Final = 2_000
_MAX_HEAD_BYTES: Final = limits.HTTP_MAX_HEADERS_BYTES + limits.HTTP_MAX_REQUEST_LINE_BYTES
# Of a header's line beside name and value.
_FIELD_BYTES: Final = len(": \r\n")
# Bytes that a header takes in memory beside its own.
_HEADER_BYTES: Final = 200
_FAILED: Final = Response(500, b"internal error\n")


@lru_cache(maxsize=200)
def _header_name(written: bytes) -> str:
    """Return a header's name in lower case; clients send the same few over and over."""
    return written.decode("latin-1").lower()


class HttpConnection(asyncio.Protocol):
    """One client. The callbacks that start with ``on_`` are the parser's."""

    def __init__(self, http: Http, loop: asyncio.AbstractEventLoop, slot: Slot) -> None:
        self._http = http
        self._loop = loop
        self._slot = slot
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        # Requests that have come in whole.
        self._pending: deque[Request] = deque()
        # Bytes that have come and are not answered; and those of the request that comes in.
        self._held_bytes = 0
        self._request_bytes = 0
        # Of an answer that its client does not take.
        self._unsent_bytes = 0
        self._answering: asyncio.Task[None] | Steps[Response] | None = None
        # The request that is being answered.
        self._asked: Request | None = None
        self._unfed = b""
        # The rest of a body that the parser does not read, and the method of its request.
        self._unparsed = 0
        self._unparsed_method = b""
        self._url = b""
        self._headers: dict[str, str] = {}
        # By its head: whether it is of HTTP/1.0, and whether it offers another protocol.
        self._old = self._upgrade = False
        # Bytes fed since the request began, or since the last part of its body.
        self._fed_bytes = 0
        # Header and trailer fields of the request, and their bytes.
        self._fields = self._fields_bytes = 0
        self._body = bytearray()
        self._in_request = False
        self._in_head = True
        self._refusal: tuple[int, str] | None = None
        self._close_after = False
        # No more requests are read: it was refused, or is being closed.
        self._shut = False
        self._read_paused = False
        self._write_paused = False
        self._streaming = False
        # Answers that may still begin before other connections have their turn; whether they have.
        self._answers_left = limits.MAX_TURN_ANSWERS
        self._yielded = False
        self.deadline = inf

    # --- the transport's callbacks -----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a connection, unless there are too many."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=limits.HTTP_WRITE_HIGH_WATER_BYTES)
        self._slot.hold_for(self, transport)
        self._http.connections.add(self)
        self._due_in(self._http.bounds.first_byte_ms)
        if self._slot.full or self._http.stopping:
            self._refuse(503, "too many connections")

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        """Stop working for a client that has gone."""
        self._http.connections.discard(self)
        self._http.slots.leave(self._slot)
        self._shut = True
        self._drop_input()
        # The parser knows this connection, and a task that was cancelled does: neither must keep
        # it, since the garbage collector comes late.
        del self._parser
        answering, self._answering = self._answering, None
        if answering is not None:
            answering.cancel()

    def _drop_input(self) -> None:
        """Drop everything that has come."""
        self._pending.clear()
        self._unfed = self._url = b""
        self._body, self._headers = bytearray(), {}
        self._held(-self._held_bytes)

    def _held(self, more: int) -> bool:
        """Count more or fewer bytes that are held; False: they were too many, and refused."""
        # Not below zero: they may have been dropped since.
        self._held_bytes = max(0, self._held_bytes + more)
        self._http.slots.hold(self._slot, self._held_bytes)
        return not self._shut

    @property
    def idle(self) -> bool:
        """Whether no request that has come is unanswered."""
        return self._answering is None and not self._pending and not self._unfed

    def refuse(self, why: str) -> None:
        """Make way for others: they have more in hand than there may be."""
        if self._shut or self._write_paused or not self.idle:
            self.abort()
        else:
            self._refuse(503, why)

    def data_received(self, data: bytes) -> None:
        """Parse the bytes."""
        if self._shut or self._refusal is not None:
            return
        self._held_bytes += len(data)
        if self._unfed:
            data = self._unfed + data
            self._unfed = b""
        first = not self._in_request
        self._in_request = True
        self._feed(data)
        at_rest = self._answering is None and not self._write_paused and not self._shut
        if first and self._in_request and at_rest:
            # It has not come whole.
            self._due_in(self._http.bounds.request_ms)
        # Requests that have come whole are noted already.
        if self._held_bytes != self._slot.held_bytes:
            self._held(0)

    def eof_received(self) -> bool:
        """Answer the request at work, if that does not take long: the client sends no more."""
        if self._http.secure or self.idle or self._streaming:
            return False
        self._close_after = True
        if self._asked is not None:
            self._asked.left = True
            if self._asked.on_left is not None:
                self._asked.on_left()
        self._due_in(limits.HTTP_HALF_CLOSED_MS)
        return True

    def pause_writing(self) -> None:
        """Take no more from a client that does not read."""
        self._write_paused = True
        self._due_in(self._http.bounds.stalled_write_ms)
        self._hold_reading()
        self._unsent_bytes = self._transport.get_write_buffer_size()
        self._held(self._unsent_bytes)

    def resume_writing(self) -> None:
        """Go on with a client that reads again."""
        self._write_paused = False
        self._held(-self._unsent_bytes)
        self._rest()
        self._go_on()

    # --- the parser's callbacks --------------------------------------------------------------

    def on_url(self, part: bytes) -> None:
        """Take a part of the target, with which a request begins."""
        self._in_request = True
        self._url += part
        if len(self._url) > limits.HTTP_MAX_REQUEST_LINE_BYTES:
            self._refuse_later(431, "the request line is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; of one that comes twice, the values are joined. Trailers are dropped."""
        self._fields += 1
        self._fields_bytes += len(name) + len(value) + _FIELD_BYTES
        if self._fields > limits.HTTP_MAX_HEADERS:
            self._refuse_later(431, "too many headers")
        elif self._fields_bytes > limits.HTTP_MAX_HEADERS_BYTES:
            self._refuse_later(431, "the headers are too long")
        if self._refusal is not None or not self._in_head:
            return
        headers = self._headers
        key = _header_name(name)
        text = value.decode("latin-1")
        headers[key] = f"{headers[key]},{text}" if key in headers else text

    def on_headers_complete(self) -> None:
        """Decide by the headers whether the body is wanted."""
        self._in_head = False
        headers = self._headers
        # Without a header that says so, connections of HTTP/1.1 alone are kept; to ask for the
        # version costs as much as to parse a request.
        kept = self._parser.should_keep_alive() and "connection" not in headers
        version = "1.1" if kept else self._parser.get_http_version()
        self._old = version == "1.0"
        self._upgrade = self._parser.should_upgrade()
        if not self._old and version != "1.1":
            self._refuse_later(505, "HTTP/1.1 is spoken here")
        elif not self._old and "host" not in headers:
            self._refuse_later(400, "a Host header is required")
        elif self._upgrade and (
            self._parser.get_method() == b"CONNECT" or "transfer-encoding" in headers
        ):
            self._refuse_later(400, "no other protocol is spoken here")
        elif headers.get("transfer-encoding", "chunked").lower() != "chunked":
            self._refuse_later(501, "the one transfer encoding here is chunked")
        length = headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > self._http.bounds.body_bytes:
            self._refuse_later(413, f"a body has at most {self._http.bounds.body_bytes} bytes")
        if "expect" in headers and headers["expect"].lower() == "100-continue":
            busy = self._refusal is not None or self._answering is not None or self._pending
            if not busy:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, part: bytes) -> None:
        """Take a part of the body."""
        self._fed_bytes = 0
        if len(self._body) + len(part) > self._http.bounds.body_bytes:
            self._refuse_later(413, f"a body has at most {self._http.bounds.body_bytes} bytes")
        elif self._refusal is None:
            self._body += part

    def on_message_complete(self) -> None:
        """Take a request that is whole, but for a body that the parser leaves to others."""
        self._in_head = True
        self._fed_bytes = self._fields = self._fields_bytes = 0
        length = self._headers.get("content-length", "0") if self._upgrade else "0"
        if self._refusal is None and length != "0":
            self._unparsed = int(length)
            self._unparsed_method = self._parser.get_method()
            return
        keep = self._upgrade or self._parser.should_keep_alive()
        self._take(self._parser.get_method(), keep=keep)

    def _refuse_later(self, status: int, reason: str) -> None:
        """Refuse the request when those before it are answered; the first reason counts."""
        if self._refusal is None:
            self._refusal = (status, reason)

    # --- reading -----------------------------------------------------------------------------

    def _take(self, method: bytes, *, keep: bool) -> None:
        self._in_request = False
        if self._refusal is not None or self._shut:
            return
        target = self._url.decode("latin-1")
        if not target.startswith("/"):
            split = urlsplit(target)
            target = (split.path or "/") + (f"?{split.query}" if split.query else "")
        path, _, query = target.partition("?")
        request = Request(
            method.decode("latin-1"),
            path,
            query,
            self._headers,
            bytes(self._body),
            self._slot.address,
            self._http.secure,
            trust=partial(self._http.slots.trust, self._slot),
            old=self._old,
            keep=keep,
            size=self._request_bytes + _HEADER_BYTES * len(self._headers),
        )
        if not self._held(request.size - self._request_bytes):
            return
        self._request_bytes = 0
        self._pending.append(request)
        self._body, self._headers, self._url = bytearray(), {}, b""

    def _feed(self, data: bytes) -> None:
        at, size = 0, len(data)
        while at < size and not self._shut:
            if self._refusal is not None:
                self._held(at - size)
                return
            if self._yielded or len(self._pending) >= limits.HTTP_MAX_PIPELINED:
                self._unfed = data[at:]
                self._hold_reading()
                return
            most = _HEAD_SLICE_BYTES if self._in_head else _SLICE_BYTES
            part = data[at : at + most] if at or size > most else data
            if self._unparsed:
                part = part[: self._unparsed]
            fed = len(part)
            at += fed
            self._request_bytes += fed
            if self._unparsed:
                # The body of a request that offered another protocol.
                self._unparsed -= fed
                self.on_body(part)
                if not self._unparsed:
                    self._take(self._unparsed_method, keep=True)
                    self._next()
                continue
            self._fed_bytes += fed
            try:
                self._parser.feed_data(part)
            except httptools.HttpParserUpgrade as upgrade:
                # Some clients offer HTTP/2 with every request. The offer is not taken; the parser,
                # which thinks that it was, is done with its work.
                at -= fed - upgrade.args[0]
                self._request_bytes -= fed - upgrade.args[0]
                self._parser = httptools.HttpRequestParser(self)
            except httptools.HttpParserError as error:
                status = 505 if "version" in str(error).lower() else 400
                self._refuse_later(status, "this is not HTTP")
            except ValueError:
                self._refuse_later(400, "this is not HTTP")
            if self._in_request and self._fed_bytes > _MAX_HEAD_BYTES:
                self._refuse_later(431, "the headers are too long")
            self._next()

    def _hold_reading(self) -> None:
        if not self._read_paused and not self._transport.is_closing():
            self._read_paused = True
            self._transport.pause_reading()

    def _go_on(self) -> None:
        """Answer what waits, then read on."""
        if self._pending or self._refusal is not None:
            self._next()
        if self._unfed and not self._write_paused:
            data, self._unfed = self._unfed, b""
            self._feed(data)
        stopped = self._write_paused or self._yielded or self._shut or self._unfed
        if self._read_paused and not stopped and len(self._pending) < limits.HTTP_MAX_PIPELINED:
            self._read_paused = False
            self._transport.resume_reading()
        if self._close_after and self.idle and not self._shut:
            self._shut = True
            self._transport.close()

    def _begin_turn(self) -> None:
        """Go on after other connections have had their turn."""
        self._yielded = False
        self._answers_left = limits.MAX_TURN_ANSWERS
        if not self._shut:
            self._go_on()

    # --- answering ---------------------------------------------------------------------------

    def _next(self) -> None:
        """Answer the requests that wait, up to the first that takes its time."""
        began = loop_seconds()
        while self._pending and self._answering is None and not self._write_paused:
            if self._yielded:
                return
            self._answers_left -= 1
            if not self._answers_left or loop_seconds() - began > _TURN_SECONDS:
                self._yielded = True
                self._loop.call_soon(self._begin_turn)
            request = self._pending.popleft()
            self.deadline = inf
            request.left = self._close_after
            try:
                answering = self._http.handle(request)
                result = answering if isinstance(answering, Response) else begin(answering)
            except Exception:
                log.exception("a handler failed for %s %s", request.method, request.path[:100])
                result = _FAILED
            if isinstance(result, Response):
                self._answer(request, result)
            else:
                self._asked = request
                self.deadline = request.due
                result.on_end = self._end
                self._answering = result
        if self._refusal is not None and self._answering is None and not self._pending:
            self._refuse(*self._refusal)

    def _end(self, response: Response | None, error: BaseException | None) -> None:
        """Answer the request at work, and go on."""
        request = self._asked
        assert request is not None, "it is there until its answer is"
        self._answering = self._asked = None
        if isinstance(error, asyncio.CancelledError):
            self.abort()
            return
        if error is not None:
            what = request.method, request.path[:100]
            log.error("a handler failed for %s %s", *what, exc_info=error)
        self._answer(request, response or _FAILED)
        self._go_on()

    async def _send_stream(
        self, request: Request, response: Response, stream: AsyncGenerator[bytes, None]
    ) -> None:
        """Send the parts of a stream as they come, until it ends or the connection does."""
        self._transport.write(response_bytes(response, request, last=True))
        self._held(-request.size)
        async with aclosing(stream):
            if request.method != "HEAD" and not self._http.stopping:
                async for part in stream:
                    if self._transport.is_closing():
                        break
                    if not self._write_paused:
                        self._transport.write(part)
        self._shut = True
        self._transport.close()

    def _answer(self, request: Request, response: Response) -> None:
        if response.stream is not None:
            # A stream has no end to be late for, also if its handler had awaited something.
            self.deadline = request.due = inf
            self._asked, self._streaming = request, True
            sending = self._send_stream(request, response, response.stream)
            self._answering = self._loop.create_task(sending)
            return
        if not self._transport.is_closing():
            # A client that has closed its side still gets the answers to its requests.
            more = self._pending or self._unfed
            stop = self._http.stopping or (self._close_after and not more)
            last = stop or not request.keep
            self._transport.write(response_bytes(response, request, last=last))
            if last:
                self._shut = True
                self._pending.clear()
                self._transport.close()
            else:
                self._rest()
        self._held(-request.size)

    def _rest(self) -> None:
        """Set the deadline of a connection that has nothing in hand."""
        if self._write_paused:
            self._due_in(self._http.bounds.stalled_write_ms)
        elif self._asked is not None:
            self.deadline = self._asked.due
        elif self._pending:
            self.deadline = inf
        elif self._in_request:
            self._due_in(self._http.bounds.request_ms)
        else:
            self._due_in(self._http.bounds.idle_ms)

    # --- ending ------------------------------------------------------------------------------

    def _refuse(self, status: int, reason: str) -> None:
        """Answer bad input and close; what still comes is read and dropped for a moment.

        Closing with unread input would have the system reset the connection, and the client
        might never see the answer.
        """
        if self._shut or self._transport.is_closing():
            return
        self._shut = True
        self._drop_input()
        refusal = Response(status, f"{reason}\n".encode())
        self._transport.write(response_bytes(refusal, None, last=True))
        if not self._http.secure and self._transport.can_write_eof():
            self._transport.write_eof()
            if self._read_paused:
                self._read_paused = False
                self._transport.resume_reading()
            self._due_in(_LINGER_MS)
        else:
            self._transport.close()

    def overdue(self) -> None:
        """End a connection whose deadline has passed, or a request that takes too long."""
        self.deadline = inf
        answering, asked = self._answering, self._asked
        late = asked is not None and asked.due <= self._loop.time()
        if asked is not None and answering is not None and late and not self._close_after:
            asked.late = True
            answering.cancel()
            return
        waiting = answering is None and not self._write_paused and not self._shut
        if self._in_request and waiting:
            self._refuse(408, "the request took too long")
        else:
            self.abort()

    def finish(self) -> None:
        """Close when the requests that have come are answered; a stream ends at once."""
        if self._streaming or (self._answering is None and not self._pending):
            self._shut = True
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._shut = True
        self._drop_input()
        self._transport.abort()

    def _due_in(self, ms: int) -> None:
        self.deadline = self._loop.time() + ms / 1000


class Http(Listener):
    """A listener: hands requests to the handler of their method and path, or to the fallback.

    ``tree`` is a prefix of paths, and the handler of all requests below it. A ``guard`` is given
    the headers of any request before that, and may say why it is refused.
    """

    protocol = "http"

    def __init__(
        self,
        routes: Mapping[tuple[str, str], Handler],
        fallback: Handler,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: SSLContext | None = None,
        bounds: HttpBounds | None = None,
        slots: Connections | None = None,
        guard: Callable[[Mapping[str, str]], str | None] | None = None,
        tree: tuple[str, Handler] | None = None,
    ) -> None:
        super().__init__(host, port, tls=tls, slots=slots)
        self.bounds = bounds or HttpBounds()
        self.handshake_seconds = self.bounds.first_byte_ms / 1000
        _, *deadlines_ms = msgspec.structs.astuple(self.bounds)
        self._check_seconds = min(0.5, min(deadlines_ms) / 4000)
        self.secure = tls is not None
        self._routes = routes
        self._fallback = fallback
        self._guard = guard
        self._tree = tree
        self._timer: asyncio.TimerHandle | None = None
        self.stopping = False

    def make_connection(self, slot: Slot) -> HttpConnection:
        """Make the connection that has a slot."""
        return HttpConnection(self, asyncio.get_running_loop(), slot)

    async def start(self) -> None:
        """Bind, and accept connections from now on."""
        await super().start()
        self._check()

    async def stop(self, grace_ms: int) -> None:
        """Accept no more, answer requests for up to ``grace_ms``, then close."""
        self.stopping = True
        self.close()
        for connection in list(self.connections):
            connection.finish()
        loop = asyncio.get_running_loop()
        until = loop.time() + grace_ms / 1000
        while self.connections and loop.time() < until:
            await asyncio.sleep(0.002)
        for connection in list(self.connections):
            connection.abort()
        if self._timer is not None:
            self._timer.cancel()

    def handle(self, request: Request) -> Answering:
        """Answer a request; the handler of GET answers HEAD too."""
        why = None if self._guard is None else self._guard(request.headers)
        if why is not None:
            return Response(403, f"{why}\n".encode())
        if self._tree is not None and request.path.startswith(self._tree[0]):
            return self._tree[1](request)
        key = ("GET" if request.method == "HEAD" else request.method, request.path)
        return self._routes.get(key, self._fallback)(request)

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self.connections):
            if connection.deadline <= now:
                connection.overdue()
        self._timer = loop.call_later(self._check_seconds, self._check)
