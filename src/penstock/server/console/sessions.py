"""Logins of the console: who is logged in, for how long, and the tokens against forged forms.

The browser holds a random token in a cookie, never a key. The server keeps sessions in memory, a
bounded number of them; a session ends with its key.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import ssl
from typing import TYPE_CHECKING, Final

import msgspec

from penstock import limits
from penstock.server.security import ANYONE, Principal

if TYPE_CHECKING:
    from penstock.clock import Clock
    from penstock.server.http import Request
    from penstock.server.keys import Keys

_TOKEN_BYTES: Final = 32
# How long a login takes at least that fails: it also hides what was wrong with it.
_FAILED_SECONDS: Final = 1.0


class Session(msgspec.Struct, eq=False):
    """A visitor who is logged in."""

    token: str
    principal: Principal
    csrf: str
    began: float
    seen: float

    def has_made(self, csrf: str) -> bool:
        """Whether a form was sent by a page of this session: it carries the session's token."""
        return hmac.compare_digest(csrf.encode("utf-8", "replace"), self.csrf.encode())


class Sessions:
    """The sessions of one server. Without keys everybody shares one that never ends."""

    def __init__(self, keys: Keys | None, clock: Clock, store_id: str) -> None:
        self._keys = keys
        self._clock = clock
        # Cookies are by host, whatever the port: each store has a name of its own.
        self.cookie = f"penstock_{store_id[-12:]}"
        self._sessions: dict[str, Session] = {}
        self._checking = asyncio.Semaphore(limits.CONSOLE_MAX_LOGINS)
        self._shared = Session("", ANYONE, _token(), 0.0, 0.0)

    def __len__(self) -> int:
        return len(self._sessions)

    async def log_in(self, token: str) -> Session | None:
        """Begin a session for the holder of a key, ``ID:SECRET``; None: it is not one."""
        if self._keys is None:
            return None
        loop = asyncio.get_running_loop()
        until = loop.time() + _FAILED_SECONDS
        async with self._checking:
            principal = await asyncio.to_thread(self._keys.by_token, token)
        if principal is None:
            await asyncio.sleep(until - loop.time())
            return None
        now = self._clock.seconds()
        session = Session(_token(), principal, _token(), now, now)
        self._sessions[session.token] = session
        if len(self._sessions) > limits.CONSOLE_MAX_SESSIONS:
            oldest = min(self._sessions.values(), key=lambda each: each.seen)
            del self._sessions[oldest.token]
        return session

    def of(self, request: Request) -> Session | None:
        """Return the session of a request, and note that its visitor is there."""
        if self._keys is None:
            return self._shared
        session = self._sessions.get(_cookie(request, self.cookie))
        if session is None or not self.lasts(session):
            return None
        session.seen = self._clock.seconds()
        return session

    def lasts(self, session: Session) -> bool:
        """Whether a session goes on; one that does not is forgotten."""
        if session is self._shared:
            return True
        now = self._clock.seconds()
        until = session.seen + limits.CONSOLE_SESSION_IDLE_MS / 1000
        end = session.began + limits.CONSOLE_SESSION_MS / 1000
        if session.token in self._sessions and now < min(until, end) and session.principal.grants:
            return True
        self.end(session)
        return False

    def end(self, session: Session) -> None:
        """Forget a session."""
        self._sessions.pop(session.token, None)

    def set_cookie(self, request: Request, session: Session | None) -> tuple[str, str]:
        """Return the header that gives a browser its cookie; None: that takes it away."""
        token, seconds = (session.token, limits.CONSOLE_SESSION_MS // 1000) if session else ("", 0)
        value = f"{self.cookie}={token}; Max-Age={seconds}; Path=/console/; HttpOnly"
        return "set-cookie", f"{value}; SameSite=Strict{'; Secure' if request.secure else ''}"


def _token() -> str:
    return base64.urlsafe_b64encode(ssl.RAND_bytes(_TOKEN_BYTES)).decode().rstrip("=")


def _cookie(request: Request, name: str) -> str:
    for pair in request.headers.get("cookie", "").split(";"):
        key, _, value = pair.strip().partition("=")
        if key == name:
            return value
    return ""
