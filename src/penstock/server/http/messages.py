"""What HTTP handlers are given and give back, and the bounds of a listener."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import msgspec

from penstock import limits

__all__ = ["Handler", "HttpBounds", "Request", "Response"]


class Request(msgspec.Struct, gc=False):
    """A request that has come in whole. Header names are in lower case.

    ``left``: the client sends nothing more and may be gone, so that nothing is to be taken from a
    queue for it. A handler that waits sets ``on_left`` to be told, and must set it back.
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
    # Called by who has found that its sender is known: by a key, or since there are none.
    trust: Callable[[], None] = lambda: None

    def leave(self) -> None:
        """Note that the client has closed its side."""
        self.left = True
        if self.on_left is not None:
            self.on_left()


class Response(msgspec.Struct):
    """An answer. Content-Length and Connection are seen to by the protocol."""

    status: int = 200
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


Handler: TypeAlias = Callable[[Request], Response | Awaitable[Response]]


class HttpBounds(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of a listener."""

    body_bytes: int = limits.HTTP_MAX_BODY_BYTES
    first_byte_ms: int = limits.HTTP_FIRST_BYTE_MS
    request_ms: int = limits.HTTP_REQUEST_MS
    idle_ms: int = limits.HTTP_IDLE_MS
    stalled_write_ms: int = limits.HTTP_STALLED_WRITE_MS
