"""HTTP/1.1, a thin protocol on httptools, and its listener: SQS, console and operators share it.

A connection answers one request at a time; requests that are pipelined behind it wait, bounded, and
are answered in order. Bad input is answered once, and the connection closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import aclosing
from functools import lru_cache, partial
from math import inf
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import httptools
import msgspec

from penstock import limits
from penstock.clock import loop_seconds
from penstock.server.connections import Listener
from penstock.server.framed import TURN_SECONDS, FramedConnection
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


class HttpConnection(FramedConnection):
    """One client. The callbacks that start with ``on_`` are the parser's."""

    unsent_bytes = limits.HTTP_WRITE_HIGH_WATER_BYTES
    _listener: Http

    def __init__(self, http: Http, loop: asyncio.AbstractEventLoop, slot: Slot) -> None:
        super().__init__(http, loop, slot)
        self._parser = httptools.HttpRequestParser(self)
        # Bytes that the parser has not seen, and requests that it has seen whole.
        self._unfed = b""
        self._pending: deque[Request] = deque()
        # Of the request that comes in.
        self._request_bytes = 0
        self._answering: asyncio.Task[None] | Steps[Response] | None = None
        # The request that is being answered.
        self._asked: Request | None = None
        # The rest of a body that the parser does not read, and the method of its request.
        self._unparsed = 0
        self._unparsed_method = b""
        self._url = b""
        self._headers: dict[str, str] = {}
        # By its head: whether it is of HTTP/1.0, and whether it offers another protocol.
        self._old = self._upgrade = False
        # Bytes fed since the request began, or since the last part of its body.
        self._fed_bytes = 0
        # Bytes that headers and trailers of the request may have yet, and how many of them were
        # trailers, or of a name that was there.
        self._fields_room = limits.HTTP_MAX_HEADERS_BYTES
        self._more_fields = 0
        self._body = bytearray()
        self._in_request = False
        self._in_head = True
        self._refusal: tuple[int, str] | None = None
        self._close_after = False
        self._streaming = False

    # --- the transport's callbacks -----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first byte."""
        self._due_in(self._listener.bounds.first_byte_ms)
        super().connection_made(transport)

    def _lost(self) -> None:
        """Stop working for a client that has gone."""
        # The parser knows this connection, and a task that was cancelled does: neither must keep
        # it, since the garbage collector comes late.
        del self._parser
        answering, self._answering = self._answering, None
        if answering is not None:
            answering.cancel()

    def _drop(self) -> None:
        """Drop everything that has come."""
        self._pending.clear()
        self._unfed = self._url = b""
        self._body, self._headers = bytearray(), {}
        super()._drop()

    @property
    def idle(self) -> bool:
        """Whether no request that has come is unanswered."""
        return self._answering is None and not self._pending and not self._unfed

    @property
    def stall_ms(self) -> int:
        """How long a client may take nothing of its answer."""
        return self._listener.bounds.stalled_write_ms

    def refuse(self, why: str) -> None:
        """Make way for others: they have more in hand than there may be."""
        if self._shut or self._stuck_since is not None or self._answering is not None:
            self.abort()
        else:
            self._refuse(503, why)

    def pause_writing(self) -> None:
        """Wait for a client that does not read; it has the time for that instead of another."""
        super().pause_writing()
        if self._answering is None and not self._shut:
            self.deadline = inf

    def eof_received(self) -> bool:
        """Answer the request at work, if that does not take long: the client sends no more."""
        if self._listener.secure or self.idle or self._streaming:
            self.close()
            return False
        self._close_after = True
        if self._asked is not None:
            self._asked.left = True
            if self._asked.on_left is not None:
                self._asked.on_left()
        self._due_in(limits.HTTP_HALF_CLOSED_MS)
        return True

    # --- the parser's callbacks --------------------------------------------------------------

    def on_url(self, part: bytes) -> None:
        """Take a part of the target, with which a request begins."""
        self._in_request = True
        self._url += part
        if len(self._url) > limits.HTTP_MAX_REQUEST_LINE_BYTES:
            self._refuse_later(431, "the request line is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; of one that comes twice, the values are joined. Trailers are dropped."""
        self._fields_room -= len(name) + len(value) + _FIELD_BYTES
        headers = self._headers
        key = _header_name(name)
        text = value.decode("latin-1")
        if self._fields_room < 0:
            self._refuse_later(431, "the headers are too long")
        elif self._in_head and key not in headers:
            headers[key] = text
            return
        self._more_fields += 1
        self._check_fields()
        if self._in_head and self._refusal is None:
            headers[key] = f"{headers[key]},{text}"

    def _check_fields(self) -> None:
        if len(self._headers) + self._more_fields > limits.HTTP_MAX_HEADERS:
            self._refuse_later(431, "too many headers")

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
        self._check_fields()
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
        if length.isdigit() and int(length[:20]) > self._listener.bounds.body_bytes:
            self._refuse_later(413, f"a body has at most {self._listener.bounds.body_bytes} bytes")
        if "expect" in headers and headers["expect"].lower() == "100-continue":
            busy = self._refusal is not None or not self.idle
            if not busy:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, part: bytes) -> None:
        """Take a part of the body."""
        self._fed_bytes = 0
        if len(self._body) + len(part) > self._listener.bounds.body_bytes:
            self._refuse_later(413, f"a body has at most {self._listener.bounds.body_bytes} bytes")
        elif self._refusal is None:
            self._body += part

    def on_message_complete(self) -> None:
        """Take a request that is whole, but for a body that the parser leaves to others."""
        self._in_head = True
        self._fed_bytes = self._more_fields = 0
        self._fields_room = limits.HTTP_MAX_HEADERS_BYTES
        length = self._headers.get("content-length", "0") if self._upgrade else "0"
        if self._refusal is None and length != "0":
            self._unparsed = int(length)
            self._unparsed_method = self._parser.get_method()
            return
        keep = self._upgrade or self._parser.should_keep_alive()
        self._add_request(self._parser.get_method(), keep=keep)

    def _refuse_later(self, status: int, reason: str) -> None:
        """Refuse the request when those before it are answered; the first reason counts."""
        if self._refusal is None:
            self._refusal = (status, reason)

    # --- reading -----------------------------------------------------------------------------

    def _add_request(self, method: bytes, *, keep: bool) -> None:
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
            self._listener.secure,
            trust=partial(self._listener.slots.trust, self._slot),
            old=self._old,
            keep=keep,
            size=self._request_bytes + _HEADER_BYTES * len(self._headers),
        )
        self._in_hand += request.size - self._request_bytes
        self._request_bytes = 0
        self._pending.append(request)
        self._body, self._headers, self._url = bytearray(), {}, b""

    def _work(self, data: bytes = b"") -> None:
        """Answer what has come, up to a request that takes its time; then parse no further."""
        if data and self._refusal is None:
            self._in_hand += len(data)
            if not self._in_request and self._answering is None:
                self.deadline = inf
            # Or there may be one.
            self._in_request = True
            self._unfed = self._unfed + data if self._unfed else data
        if self._waits_for_turn:
            return
        data, at, self._unfed = self._unfed, 0, b""
        ends = loop_seconds() + TURN_SECONDS
        while self._answering is None and self._stuck_since is None and not self._shut:
            if self._pending:
                if self._share <= 0 or loop_seconds() > ends:
                    self._yield_turn()
                    break
                self._share -= 1
                self._answer_next(self._pending.popleft())
            elif self._refusal is not None:
                self._refuse(*self._refusal)
            elif at < len(data):
                if self._share <= 0:
                    self._yield_turn()
                    break
                at += self._feed(data, at)
            elif self._close_after:
                self.close()
            else:
                break
        if self._shut:
            return
        self._unfed = data[at:] if at else data
        if self._stuck_since is None:
            at_work = self._answering is not None
            ahead = len(self._unfed) > limits.HTTP_MAX_AHEAD_BYTES
            self._read(wanted=not (ahead if at_work else self._waits_for_turn))
            if self.deadline == inf and not at_work and not self._waits_for_turn:
                bounds = self._listener.bounds
                self._due_in(bounds.request_ms if self._in_request else bounds.idle_ms)

    def _feed(self, data: bytes, at: int) -> int:
        """Parse the next bytes; return how many they were."""
        most = _HEAD_SLICE_BYTES if self._in_head else _SLICE_BYTES
        part = data[at : at + most] if at or len(data) > most else data
        if self._unparsed:
            part = part[: self._unparsed]
        fed = len(part)
        self._request_bytes += fed
        if self._unparsed:
            # The body of a request that offered another protocol.
            self._unparsed -= fed
            self.on_body(part)
            if not self._unparsed:
                self._add_request(self._unparsed_method, keep=True)
            return fed
        self._fed_bytes += fed
        try:
            self._parser.feed_data(part)
        except httptools.HttpParserUpgrade as upgrade:
            # Some clients offer HTTP/2 with every request. The offer is not taken; the parser,
            # which thinks that it was, is done with its work.
            self._request_bytes -= fed - upgrade.args[0]
            self._parser = httptools.HttpRequestParser(self)
            return int(upgrade.args[0])
        except httptools.HttpParserError as error:
            status = 505 if "version" in str(error).lower() else 400
            self._refuse_later(status, "this is not HTTP")
        except ValueError:
            self._refuse_later(400, "this is not HTTP")
        if self._in_request and self._fed_bytes > _MAX_HEAD_BYTES:
            self._refuse_later(431, "the headers are too long")
        return fed

    # --- answering ---------------------------------------------------------------------------

    def _answer_next(self, request: Request) -> None:
        """Answer a request, or begin to."""
        self.deadline = inf
        request.left = self._close_after
        try:
            answering = self._listener.handle(request)
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

    def _end(self, response: Response | None, error: BaseException | None) -> None:
        """Answer the request at work, and go on."""
        request = self._asked
        assert request is not None, "it is there until its answer is"
        self._answering = self._asked = None
        self.deadline = inf
        if isinstance(error, asyncio.CancelledError):
            self.abort()
            return
        if error is not None:
            what = request.method, request.path[:100]
            log.error("a handler failed for %s %s", *what, exc_info=error)
        self._answer(request, response or _FAILED)
        if not self._shut:
            self._work()
        self._account()

    async def _send_stream(
        self, request: Request, response: Response, stream: AsyncGenerator[bytes, None]
    ) -> None:
        """Send the parts of a stream as they come, until it ends or the connection does."""
        self._transport.write(response_bytes(response, request, last=True))
        self._in_hand = max(0, self._in_hand - request.size)
        self._account()
        try:
            async with aclosing(stream):
                if request.method != "HEAD" and not self._listener.stopping:
                    async for part in stream:
                        if self._transport.is_closing():
                            break
                        if self._stuck_since is None:
                            self._transport.write(part)
        except Exception:
            log.exception("a stream failed for %s %s", request.method, request.path[:100])
        self.close()

    def _answer(self, request: Request, response: Response) -> None:
        if response.stream is not None:
            # A stream has no end to be late for, also if its handler had awaited something.
            self.deadline = request.due = inf
            self._asked, self._streaming = request, True
            sending = self._send_stream(request, response, response.stream)
            self._answering = self._loop.create_task(sending)
            return
        if not self._transport.is_closing():
            last = self._listener.stopping or not request.keep
            self._transport.write(response_bytes(response, request, last=last))
            if last:
                self._pending.clear()
                self.close()
        # It may have been dropped.
        self._in_hand = max(0, self._in_hand - request.size)

    # --- ending ------------------------------------------------------------------------------

    def _refuse(self, status: int, reason: str) -> None:
        """Answer bad input and close."""
        if not self._shut and not self._transport.is_closing():
            refusal = Response(status, f"{reason}\n".encode())
            self._end_with(response_bytes(refusal, None, last=True))

    def overdue(self) -> None:
        """End a connection whose deadline has passed, or a request that takes too long."""
        answering, asked = self._answering, self._asked
        late = asked is not None and asked.due <= self._loop.time()
        if asked is not None and answering is not None and late and not self._close_after:
            asked.late = True
            answering.cancel()
        elif self._in_request and answering is None and not self._shut:
            self._refuse(408, "the request took too long")
        else:
            self.abort()

    def leave(self) -> None:
        """Close when the requests that have come are answered; a stream ends at once."""
        if self._streaming or self.idle:
            self.close()


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
        self.check_seconds = min(0.5, min(deadlines_ms) / 4000)
        self.secure = tls is not None
        self._routes = routes
        self._fallback = fallback
        self._guard = guard
        self._tree = tree

    def make_connection(self, slot: Slot) -> HttpConnection:
        """Make the connection that has a slot."""
        return HttpConnection(self, asyncio.get_running_loop(), slot)

    def handle(self, request: Request) -> Answering:
        """Answer a request; the handler of GET answers HEAD too."""
        why = None if self._guard is None else self._guard(request.headers)
        if why is not None:
            return Response(403, f"{why}\n".encode())
        if self._tree is not None and request.path.startswith(self._tree[0]):
            return self._tree[1](request)
        key = ("GET" if request.method == "HEAD" else request.method, request.path)
        return self._routes.get(key, self._fallback)(request)
