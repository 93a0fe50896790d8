"""Requests for pages of the console: routes, the permission that each needs, and visits."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, quote, unquote, urlencode

import msgspec

from penstock import limits
from penstock.errors import InvalidInput
from penstock.server.http import Request, Response
from penstock.server.security import Principal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from penstock.server.console import Console

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


class NoSuchPage(Exception):
    """There is no such page, file or message."""


class Need(NamedTuple):
    """The permission for a page: one of several actions, on the queue of its path or on all."""

    actions: tuple[str, ...]
    of_queue: bool = False


# A page for everybody, such as the login.
OPEN: Final = None
# A page for every key, which shows each key what it may see.
ANY_KEY: Final = Need(())
SEE_QUEUE: Final = Need(("consume", "admin"), of_queue=True)
SEE_ALL: Final = Need(("consume", "admin"))
CHANGE_QUEUE: Final = Need(("admin",), of_queue=True)


class Visit(msgspec.Struct):
    """A request for a page: its principal, names of the path, query, and form if it is a POST."""

    request: Request
    principal: Principal
    # The token that the forms of this visitor's pages carry.
    csrf: str = ""
    need: Need | None = None
    names: dict[str, str] = {}
    query: dict[str, str] = {}
    form: dict[str, str] = {}
    fields: list[tuple[str, str]] = []

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

    def values(self, name: str) -> list[str]:
        """Return every value of a form's field, such as of check boxes."""
        return [value for field, value in self.fields if field == name]

    def may_see(self, queue: str | None = None) -> bool:
        """Whether the visitor may look into a queue; None: into all."""
        return any(self.principal.may(action, queue) for action in SEE_ALL.actions)

    def may_change(self, queue: str | None = None) -> bool:
        """Whether the visitor may change a queue and its messages; None: all."""
        return self.principal.may("admin", queue)

    def check(self) -> None:
        """Raise NotAllowed if the visitor may not have the page."""
        if self.need is not None and self.need.actions:
            self.principal.check_any(self.need.actions, self.queue if self.need.of_queue else None)

    def number(self, name: str, default: int, low: int = 0, high: int = limits.MAX_OFFSET) -> int:
        """Return a number of the query, within bounds; the default if it is none."""
        text = self.query.get(name, "")
        return min(max(int(text), low), high) if text.isdecimal() and len(text) < 20 else default


Page: TypeAlias = "Callable[[Console, Visit], Awaitable[Response]]"


class Route(NamedTuple):
    """A page: method, path below /console such as ``/queues/{queue}``, permission, handler."""

    method: str
    path: str
    need: Need | None
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
