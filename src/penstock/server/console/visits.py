"""Requests for pages of the console: logins, routes, the permission that each needs, and visits.

The browser holds a random token in a cookie, never a key. The server keeps sessions in memory, a
bounded number of them; a session ends with its key.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, quote, unquote, urlencode

import msgspec

from penstock import limits
from penstock.errors import InvalidInput
from penstock.server.http import Request, Response
from penstock.server.security import ANYONE, Principal
from penstock.server.shares import Shares, holder_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from penstock.clock import Clock
    from penstock.server.console import Console
    from penstock.server.keys import Keys

PREFIX: Final = "/console/"
HTML: Final = "text/html; charset=utf-8"
POLICY: Final = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
# The headers of every page; the first may be replaced.
HEADERS: Final = (
    ("cache-control", "no-store"),
    ("content-security-policy", POLICY),
    ("x-frame-options", "DENY"),
    ("x-content-type-options", "nosniff"),
    # With no-referrer browsers would send forms without their origin.
    ("referrer-policy", "same-origin"),
)
# The site of the documentation has scripts and styles of its own inside its pages.
_SITE_POLICY: Final = (
    f"{POLICY}; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:"
)
SITE_HEADERS: Final = (("content-security-policy", _SITE_POLICY), *HEADERS[2:])
_FORM: Final = "application/x-www-form-urlencoded"
_TOKEN_BYTES: Final = 32
# How long a login takes at least that fails: it also hides what was wrong with it.
_FAILED_SECONDS: Final = 1.0


class NoSuchPage(Exception):
    """There is no such page, file or message."""


# --- logins ---------------------------------------------------------------------------------------


class Session(msgspec.Struct, eq=False):
    """A visitor who is logged in; ``csrf`` is the token that forms of its pages carry."""

    token: str
    principal: Principal
    csrf: str
    began: float
    seen: float


# The session of a request without one.
STRANGER: Final = Session("", Principal(""), "", 0.0, 0.0)


class Sessions:
    """The sessions of one server. Without keys everybody shares one that never ends."""

    def __init__(self, keys: Keys | None, clock: Clock, store_id: str) -> None:
        self._keys = keys
        self._clock = clock
        # Cookies are by host, whatever the port: each store has a name of its own.
        self.cookie = f"penstock_{store_id[-12:]}"
        self._sessions: dict[str, Session] = {}
        self._places = Shares("sessions", limits.CONSOLE_MAX_SESSIONS)
        self._shared = Session("", ANYONE, _token(), 0.0, 0.0)

    def __len__(self) -> int:
        return len(self._sessions)

    async def log_in(self, token: str) -> Session | None:
        """Begin a session for the holder of a key, ``ID:SECRET``; None: it is not one."""
        if self._keys is None:
            return None
        loop = asyncio.get_running_loop()
        until = loop.time() + _FAILED_SECONDS
        found = self._keys.find(token)
        principal = await found if isinstance(found, asyncio.Future) else found
        if principal is None:
            await asyncio.sleep(until - loop.time())
            return None
        now = self._clock.seconds()
        session = Session(_token(), principal, _token(), now, now)
        holder = holder_of(principal.key_id)
        while (leaves := self._places.who_makes_way(holder)) is not None:
            theirs = (s for s in self._sessions.values() if holder_of(s.principal.key_id) == leaves)
            self.end(min(theirs, key=lambda each: each.seen))
        self._places.take(holder)
        self._sessions[session.token] = session
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
        if self._sessions.pop(session.token, None) is not None:
            self._places.give(holder_of(session.principal.key_id))

    def set_cookie(self, request: Request, session: Session | None) -> tuple[str, str]:
        """Return the header that gives a browser its cookie; None: that takes it away."""
        token, seconds = (session.token, limits.CONSOLE_SESSION_MS // 1000) if session else ("", 0)
        value = f"{self.cookie}={token}; Max-Age={seconds}; Path=/console/; HttpOnly"
        return "set-cookie", f"{value}; SameSite=Strict{'; Secure' if request.secure else ''}"


def _token() -> str:
    return ssl.RAND_bytes(_TOKEN_BYTES).hex()


def _cookie(request: Request, name: str) -> str:
    for pair in request.headers.get("cookie", "").split(";"):
        key, _, value = pair.strip().partition("=")
        if key == name:
            return value
    return ""


# --- visits ---------------------------------------------------------------------------------------


# The actions of which a page needs one: on the queue of its path, or on all queues.
# A page for everybody, such as the login.
OPEN: Final = None
# A page for every key, which shows each key what it may see.
ANY_KEY: Final = ()
SEE: Final = ("consume", "admin")
CHANGE: Final = ("admin",)


class Visit(msgspec.Struct):
    """A request for a page: its principal, names of the path, query, and form if it is a POST."""

    request: Request
    session: Session
    actions: tuple[str, ...] | None = None
    names: dict[str, str] = {}
    query: dict[str, str] = {}
    form: dict[str, str] = {}
    fields: list[tuple[str, str]] = []

    @property
    def principal(self) -> Principal:
        """The visitor."""
        return self.session.principal

    @property
    def holder(self) -> str:
        """The holder of the shares that the visit takes."""
        return holder_of(self.principal.key_id, self.request.peer)

    @property
    def queue(self) -> str:
        """The queue of the path."""
        return self.names["queue"]

    @property
    def page(self) -> str:
        """The first part of the path, by which the header marks a page as the present one."""
        return self.request.path.removeprefix(PREFIX).partition("/")[0]

    @property
    def partial(self) -> bool:
        """Whether htmx asks for a part of a page; the page itself if its history is gone."""
        headers = self.request.headers
        return "hx-request" in headers and "hx-history-restore-request" not in headers

    def may_see(self, queue: str | None = None) -> bool:
        """Whether the visitor may look into a queue; None: into all."""
        return any(self.principal.may(action, queue) for action in SEE)

    def may_change(self, queue: str | None = None) -> bool:
        """Whether the visitor may change a queue and its messages; None: all."""
        return self.principal.may("admin", queue)

    def check(self) -> None:
        """Raise NotAllowed if the visitor may not have the page."""
        if self.actions:
            self.principal.check_any(self.actions, self.names.get("queue"))

    def number(self, name: str, default: int, low: int = 0, high: int = limits.MAX_OFFSET) -> int:
        """Return a number of the query, within bounds; the default if it is none."""
        text = self.query.get(name, "")
        return min(max(int(text), low), high) if text.isdecimal() and len(text) < 20 else default


Page: TypeAlias = "Callable[[Console, Visit], Awaitable[Response]]"


class Route(NamedTuple):
    """A page: method, path below /console such as ``/queues/{queue}``, actions, handler."""

    method: str
    path: str
    actions: tuple[str, ...] | None
    page: Page


def find_route(
    routes: Iterable[Route], method: str, path: str
) -> tuple[Route, dict[str, str]] | None:
    """Return the route of a path below /console, and the names in it."""
    wanted = "GET" if method == "HEAD" else method
    for route in routes:
        found = _pattern(route.path).fullmatch(path) if route.method == wanted else None
        if found is not None:
            return route, {name: unquote(part) for name, part in found.groupdict().items()}
    return None


@cache
def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path))


def read_form(request: Request) -> list[tuple[str, str]]:
    """Return the fields of a form that was posted."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.body and kind != _FORM:
        raise InvalidInput(f"a form comes as {_FORM}")
    if len(request.body) > limits.CONSOLE_MAX_FORM_BYTES:
        raise InvalidInput(f"a form has at most {limits.CONSOLE_MAX_FORM_BYTES} bytes")
    return read_fields(request.body.decode("latin-1"))


def read_fields(text: str) -> list[tuple[str, str]]:
    """Return the fields of a form, or of the query of an address."""
    most = limits.CONSOLE_MAX_FORM_FIELDS
    try:
        return parse_qsl(text, keep_blank_values=True, max_num_fields=most)
    except ValueError:
        raise InvalidInput(f"a form has at most {most} fields") from None


def link(*parts: object, **query: object) -> str:
    """Return the address of a page of the console; fields of the query that are empty go."""
    path = PREFIX + "/".join(quote(str(part), safe="") for part in parts)
    fields = {name: value for name, value in query.items() if value not in {None, ""}}
    return f"{path}?{urlencode(fields)}" if fields else path


def redirect(visit: Visit, address: str, *headers: tuple[str, str]) -> Response:
    """Send a visitor to another page of the console."""
    if visit.partial:
        return Response(200, b"", HTML, (*HEADERS, *headers, ("hx-redirect", address)))
    return Response(303, b"", HTML, (*HEADERS, *headers, ("location", address)))


def log_in_first(visit: Visit) -> Response:
    """Send a visitor to the login, and from there to the page that was asked for."""
    request = visit.request
    asked = "" if request.method == "POST" else request.path.removeprefix(PREFIX)
    if asked and request.query:
        asked += f"?{request.query}"
    return redirect(visit, link("login", next=asked))
