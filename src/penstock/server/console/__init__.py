"""The web console: pages at ``/console/`` of the HTTP listener, or at an address of its own.

Here is everything that pages share: routes, permissions, templates, static files and live numbers.
``visits`` are logins and requests for pages, ``figures`` the numbers that are shown;
``overview``, ``queues`` and ``messages`` are the pages.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import mimetypes
from contextlib import suppress
from hmac import compare_digest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import unquote

import jinja2
import msgspec

import penstock
from penstock import errors, limits
from penstock.clock import loop_seconds
from penstock.server.audit import Actor, audited
from penstock.server.console import messages, overview, queues, visits
from penstock.server.console.figures import FILTERS, Figures
from penstock.server.console.visits import HEADERS, HTML, OPEN, PREFIX, Visit
from penstock.server.http import Response
from penstock.server.security import told
from penstock.server.shares import Shares
from penstock.store.sql.location import without_password

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from penstock.broker.broker import Broker
    from penstock.server.console.visits import Route
    from penstock.server.http import Answering, Handler, Request
    from penstock.server.served_store import Server

log = logging.getLogger(__name__)

T = TypeVar("T")

HERE: Final = Path(__file__).parent
# The documentation site: in the wheel beside this package, in a checkout where `make docs` puts it.
SITES: Final = (HERE / "site", HERE.parents[3] / "build" / "site")
_LIVE_SECONDS, _COMPILE_SECONDS = 2.0, 2.0
# Error: status and heading of its page. The first that fits counts.
_FAULTS: Final = (
    (visits.NoSuchPage, 404, "No such page"),
    (errors.QueueNotFound, 404, "No such queue"),
    (errors.NotAllowed, 403, "Not allowed"),
    (errors.BrokerClosed, 503, "The server is stopping"),
    (errors.StorageFailed, 503, "The store can't be used"),
    (errors.ServerBusy, 503, "The server is busy"),
    (TimeoutError, 503, "The store did not answer in time: a change may have been made"),
    (errors.PenstockError, 400, "That can't be done"),
)


class Console:
    """Answers the requests below ``/console/``."""

    prefix = PREFIX

    def __init__(self, server: Server) -> None:
        self.server = server
        self.info = server.broker.info()
        self.sessions = visits.Sessions(server.keys, server.clock, self.info.store_id)
        self.version = penstock.__version__
        self.site = next((each for each in SITES if (each / "index.html").is_file()), None)
        self.figures = Figures(server.broker, server.clock.seconds)
        self.began = server.clock.seconds()
        self.streams = Shares("live pages", limits.CONSOLE_MAX_STREAMS)
        self._routes = [*overview.ROUTES, *queues.ROUTES, *messages.ROUTES]
        self._static = {path.name: path.read_bytes() for path in (HERE / "static").iterdir()}
        # The address of an asset names its content, so that browsers may keep it.
        assets = {
            name: f"{PREFIX}static/{name}?{hashlib.sha256(body).hexdigest()[:12]}"
            for name, body in self._static.items()
        }
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            auto_reload=False,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._compiled: Future[Any] | None = None
        self._templates.filters.update(FILTERS)
        shared = {"link": visits.link, "reason_key": queues.reason_key}
        self._templates.globals.update(console=self, asset=assets.__getitem__, **shared)

    def start(self) -> None:
        """Begin to sample figures; templates are compiled soon, or for the first visitor."""
        self.figures.start()
        timer = asyncio.get_running_loop().call_later(_COMPILE_SECONDS, self._compile)
        self.server.closing += [self.figures.stop, timer.cancel]

    def _compile(self) -> Future[Any]:
        """Compile the templates on a thread, which takes too long for the loop."""
        if self._compiled is None:
            load = map(self._templates.get_template, self._templates.list_templates())
            self._compiled = asyncio.ensure_future(asyncio.to_thread(list, load))
        return self._compiled

    # --- for the pages -------------------------------------------------------------------------

    def look(self, visit: Visit, work: Callable[[Broker], T]) -> Future[T]:
        """Read from the store for a visitor, on a thread."""
        return self.server.batcher.call(work, holder=visit.holder)

    def change(self, visit: Visit, work: Callable[[Broker], T]) -> Future[T]:
        """Change the store for a visitor, on a thread for work that may take its time."""
        batcher, request = self.server.batcher, visit.request
        actor = Actor("console", visit.principal.key_id, request.peer)
        work = audited(batcher.audit, actor, work)
        return batcher.call(work, long=True, holder=visit.holder)

    def render(self, template: str, visit: Visit, *, status: int = 200, **values: Any) -> Response:
        """Make a page of a template; for a request of htmx only the block of its target."""
        values = {"visit": visit, **values}
        found = self._templates.get_template(template)
        # The block that is named as the element of the page that it replaces.
        target = visit.request.headers.get("hx-target", "")
        block = found.blocks.get(target) or found.blocks.get("main")
        if visit.partial and block is not None:
            context = found.new_context(values)
            # Its macros, and the blocks of the pages that it extends, are known when it begins.
            next(iter(found.root_render_func(context)), None)
            text = "".join(block(context))
        else:
            text = found.render(values)
        return Response(status, text.encode(), HTML, HEADERS)

    def live(self, visit: Visit, read: Callable[[], Awaitable[dict[str, str]]]) -> Response:
        """Answer with a stream of server-sent events: what has changed of what ``read`` gives.

        Its keys are the ``data-live`` of elements of the page, its values their text, or the
        points of a line.
        """
        if not self.streams.fits(visit.holder):
            return Response(503, f"{self.streams.refusal(visit.holder)}\n".encode())
        kind = "text/event-stream"
        return Response(200, b"", kind, HEADERS, stream=self._events(visit, read))

    async def _events(
        self, visit: Visit, read: Callable[[], Awaitable[dict[str, str]]]
    ) -> AsyncGenerator[bytes, None]:
        known: dict[str, str] = {}
        # Others of the holder may have come since it was looked at.
        if not self.streams.fits(visit.holder):
            return
        self.streams.take(visit.holder)
        try:
            while self.sessions.lasts(visit.session):
                visit.check()
                found = {}
                with suppress(errors.PenstockError, TimeoutError):
                    found = await read()
                changed = {key: text for key, text in found.items() if known.get(key) != text}
                known |= changed
                # A comment if there is nothing: so a connection that is gone is found.
                yield b"data: %b\n\n" % msgspec.json.encode(changed) if changed else b":\n\n"
                await asyncio.sleep(_LIVE_SECONDS)
        except errors.NotAllowed:
            # The key has lost the permission.
            return
        finally:
            self.streams.give(visit.holder)

    def beside(self, sqs: Handler | None) -> Handler:
        """Return the handler of ``GET /``: SQS clients, if there are any, name an action."""

        def handle(request: Request) -> Answering:
            if sqs is not None and "Action=" in request.query:
                return sqs(request)
            return Response(303, headers=(("location", PREFIX),))

        return handle

    # --- requests ------------------------------------------------------------------------------

    async def handle(self, request: Request) -> Response:
        """Answer a request below /console/."""
        begin = self.server.clock.seconds()
        operation, outcome = "unknown", "ok"
        visit = Visit(request, self.sessions.of(request) or visits.STRANGER)
        request.due = loop_seconds() + limits.CONSOLE_MAX_ANSWER_MS / 1000
        try:
            if visit.session is not visits.STRANGER:
                request.trust()
            path = request.path.removeprefix(PREFIX.rstrip("/"))
            found = visits.find_route(self._routes, request.method, path)
            if found is None:
                return await asyncio.to_thread(self._file, request.method, path)
            await asyncio.shield(self._compile())
            route, visit.names = found
            operation = route.page.__name__
            return await self._page(route, visit)
        except asyncio.CancelledError:
            if not request.late:
                raise
            outcome = TimeoutError.__name__
            return self._failed(TimeoutError(), visit)
        except Exception as error:
            outcome = type(error).__name__
            return self._failed(error, visit)
        finally:
            seconds = self.server.clock.seconds() - begin
            about = ("console", operation, seconds, outcome, visit.principal.key_id)
            self.server.metrics.request(*about, request.peer, visit.names.get("queue"))

    async def _page(self, route: Route, visit: Visit) -> Response:
        request, session = visit.request, visit.session
        visit.query, visit.actions = dict(visits.read_fields(request.query)), route.actions
        if route.actions is not OPEN:
            if session is visits.STRANGER:
                return visits.log_in_first(visit)
            visit.check()
        if route.method == "POST":
            visit.fields = visits.read_form(request)
            visit.form = dict(visit.fields)
            host = request.headers.get("host", "")
            here = request.headers.get("origin", host).rpartition("/")[2] == host
            given = visit.form.get("csrf") or request.headers.get("x-csrf-token", "")
            # A form of a page of this session carries the session's token.
            token = given.encode("utf-8", "replace")
            own = session is not visits.STRANGER and compare_digest(token, session.csrf.encode())
            # A login has no session yet: for it the origin must do.
            if not here or not (own or route.actions is OPEN):
                raise errors.NotAllowed(
                    "this form is not of a page of this console, or is old: load the page again"
                )
        return await route.page(self, visit)

    def _failed(self, error: Exception, visit: Visit) -> Response:
        """Make the page of an error."""
        status, heading, text = 500, "Something went wrong", "The server's log says more."
        for kind, code, title in _FAULTS:
            if isinstance(error, kind):
                text = without_password(str(told(error, visit.principal)))
                status, heading = code, title
                break
        else:
            log.error("a page of the console failed", exc_info=error)
        return self.render("error.html", visit, status=status, heading=heading, text=text)

    def _file(self, method: str, path: str) -> Response:
        """Answer with a static file, or a file of the documentation."""
        name = path.removeprefix("/static/")
        if method not in {"GET", "HEAD"}:
            raise visits.NoSuchPage(f"nothing can be sent to {PREFIX}{path[1:200]}")
        if path.startswith("/static/") and name in self._static:
            fresh = ("cache-control", "public, max-age=31536000, immutable")
            return Response(200, self._static[name], _kind_of(name), (*HEADERS[1:], fresh))
        if path.startswith("/docs/") and self.site is not None:
            found = _file_of(self.site, unquote(path.removeprefix("/docs/")))
            if found is not None:
                return Response(200, found.read_bytes(), _kind_of(found.name), visits.SITE_HEADERS)
        raise visits.NoSuchPage(f"there is nothing at {PREFIX}{path[1:200]}")


def _kind_of(name: str) -> str:
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return f"{kind}; charset=utf-8" if kind.startswith("text/") else kind


def _file_of(site: Path, name: str) -> Path | None:
    """Return a file of the site; neither dots nor a symbolic link lead out of it."""
    root = site.resolve()
    try:
        place = (root / name).resolve()
        place = place / "index.html" if place.is_dir() else place
        inside = place.is_relative_to(root) and place.is_file()
    except (OSError, ValueError):
        # The name is none of a file.
        return None
    return place if inside else None
