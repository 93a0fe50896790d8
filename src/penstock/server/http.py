"""Requests and answers of HTTP, and how a handler runs.

A handler is a coroutine that is run from one future to the next, without a task. A task begins in
the next turn of the loop, is registered by a weak reference, and copies a context: more work than
most of a short request's own. A coroutine that is run here begins at once, and must not ask for the
current task, as :func:`asyncio.timeout` does. The listener is in
:mod:`penstock.server.http_connection`.
"""

from __future__ import annotations

from asyncio import CancelledError, get_running_loop
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import lru_cache
from http import HTTPStatus
from math import inf
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import msgspec

from penstock import limits

if TYPE_CHECKING:
    from asyncio import Future

T = TypeVar("T")


class Request(msgspec.Struct, gc=False):
    """A request that has come in whole. Header names are in lower case.

    ``left``: the client sends nothing more and may be gone, so that nothing is to be taken from a
    queue for it. A handler that waits sets ``on_left`` as a callback, and must set it back.
    ``due``: when the handler wants to be cancelled, by the loop's time, set before it first waits;
    then ``late`` is set.
    ``waited_s``: how long it has waited for messages.
    """

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes
    peer: str
    secure: bool = False
    left: bool = False
    on_left: Callable[[], object] | None = None
    due: float = inf
    late: bool = False
    waited_s: float = 0.0
    # The service calls it once it knows the sender: by a key, or since there are none.
    trust: Callable[[], None] = lambda: None
    # For the connection: whether it is of HTTP/1.0, whether the connection outlives it, and the
    # bytes that it takes.
    old: bool = False
    keep: bool = True
    size: int = 0


class Response(msgspec.Struct):
    """An answer. Content-Length and Connection are seen to by the protocol.

    Parts of a ``stream`` follow the body until it ends, which ends the connection. A client that
    reads too slowly misses parts.
    """

    status: int = 200
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()
    stream: AsyncGenerator[bytes, None] | None = None


Answering: TypeAlias = Response | Coroutine[Any, Any, Response]
Handler: TypeAlias = Callable[[Request], Answering]


@lru_cache(maxsize=100)
def _first_lines(status: int, content_type: str) -> str:
    """Return the lines of an answer's head that most answers share."""
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {content_type}\r\n"


def response_bytes(response: Response, request: Request | None, *, last: bool) -> bytes:
    """Write an answer; ``last``: the connection ends with it."""
    head = _first_lines(response.status, response.content_type)
    for name, value in response.headers:
        head += f"{name}: {value}\r\n"
    if last:
        head += "Connection: close\r\n"
    elif request is not None and request.old:
        head += "Connection: keep-alive\r\n"
    if response.stream is None:
        head += f"Content-Length: {len(response.body)}\r\n"
    data = f"{head}\r\n".encode("latin-1", "replace")
    head_only = request is not None and request.method == "HEAD"
    return data if head_only else data + response.body


class HttpBounds(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of a listener."""

    body_bytes: int = limits.HTTP_MAX_BODY_BYTES
    first_byte_ms: int = limits.HTTP_FIRST_BYTE_MS
    request_ms: int = limits.HTTP_REQUEST_MS
    idle_ms: int = limits.HTTP_IDLE_MS
    stalled_write_ms: int = limits.HTTP_STALLED_WRITE_MS


class Steps(Generic[T]):
    """A coroutine that waits for a future; ``on_end`` gets its result, or the error."""

    __slots__ = ("_coroutine", "_error", "_future", "on_end")

    def __init__(self, coroutine: Coroutine[Any, Any, T], waited_for: Any) -> None:
        """``waited_for``: what the coroutine waits for first."""
        self._coroutine = coroutine
        # Raised in the coroutine by its next step.
        self._error: BaseException | None = None
        self.on_end: Callable[[T | None, BaseException | None], None] = lambda *_: None
        self._wait(waited_for)

    def cancel(self) -> None:
        """Cancel the future that the coroutine waits for; if it is done, raise in its place."""
        if not self._future.cancel():
            self._error = CancelledError()

    def _wait(self, waited_for: Any) -> None:
        # A future says so once, as it does to a task.
        if getattr(waited_for, "_asyncio_future_blocking", False):
            waited_for._asyncio_future_blocking = False  # noqa: SLF001
        else:
            if waited_for is not None:
                text = f"a coroutine waits for {waited_for!r:.100}, which is no future"
                self._error = RuntimeError(text)
            # For nothing: asyncio.sleep(0) lets others go first.
            waited_for = get_running_loop().create_future()
            waited_for.set_result(None)
        self._future: Future[Any] = waited_for
        waited_for.add_done_callback(self._go_on)

    def _go_on(self, _: Future[Any]) -> None:
        try:
            if self._error is not None:
                error, self._error = self._error, None
                waited_for = self._coroutine.throw(error)
            else:
                waited_for = self._coroutine.send(None)
        except StopIteration as end:
            self.on_end(end.value, None)
        except BaseException as error:
            self.on_end(None, error)
        else:
            self._wait(waited_for)


def begin(coroutine: Coroutine[Any, Any, T]) -> T | Steps[T]:
    """Run a coroutine until it waits for a future; return its result if it need not wait."""
    try:
        waited_for = coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    return Steps(coroutine, waited_for)
