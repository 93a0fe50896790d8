"""Pages of a queue: its messages by state, groups, consumers, settings; create, change, delete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.broker.explain import row_of
from penstock.errors import InvalidFilter, InvalidInput, NotAllowed, QueueExists
from penstock.filters import default_filter, parse
from penstock.model import QueueSpec, State
from penstock.server.config import UNITS_MS, amount
from penstock.server.console import reads
from penstock.server.console.overview import queue_cells
from penstock.server.console.shown import number
from penstock.server.console.visits import ANY_KEY, CHANGE_QUEUE, SEE_QUEUE, Route, link, redirect
from penstock.server.security import check_settings
from penstock.validation import check_queue_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.broker.broker import Broker
    from penstock.model import Entry, QueueStats
    from penstock.server.console import Console
    from penstock.server.console.visits import Visit
    from penstock.server.http import Response

# Messages, and rows of other tables, that a page shows.
PAGE: Final = 50
MAX_ROWS: Final = 200
# The matches of a filter that are shown, of all that are counted.
MATCHES_SHOWN: Final = 20


class Field(NamedTuple):
    """A setting of a queue in a form."""

    name: str
    label: str
    hint: str
    is_duration: bool = True


FIELDS: Final = (
    Field("lease_ms", "Lease", "How long a claim holds a message."),
    Field("max_attempts", "Attempts", "Claims before a message fails.", is_duration=False),
    Field("backoff_base_ms", "First back-off", "Wait before the second attempt."),
    Field("backoff_cap_ms", "Longest back-off", "Longest wait between two attempts."),
    Field("delay_ms", "Delay", "Wait before a new message can be claimed."),
    Field("done_retention_ms", "Keep done messages", "0: for ever."),
    Field("failed_retention_ms", "Keep failed messages", "0: for ever."),
    Field("unclaimed_retention_ms", "Keep unclaimed messages", "0: for ever."),
    Field("max_messages", "Most messages", "Waiting or in flight; 0: any.", is_duration=False),
    Field("max_bytes", "Most bytes", "Of their payloads; 0: any.", is_duration=False),
    Field("bucket_exponent", "Bucket exponent", "For the design of buckets.", is_duration=False),
)
TEXTS: Final = ("filter", "description", "dead_letter")
# Errors that a form shows.
REFUSALS: Final = (InvalidInput, NotAllowed, QueueExists)


# --- looking --------------------------------------------------------------------------------------


def figures(console: Console, stats: QueueStats) -> dict[str, str]:
    """Write the figures of a queue; what is known of its last hour is among them."""
    return {**queue_cells(console, console.figures.note(stats)), "acked": number(stats.done)}


async def _page(
    console: Console,
    visit: Visit,
    template: str,
    read: Callable[[Broker], dict[str, Any]] = lambda _: {},
    **values: Any,
) -> Response:
    """Show a page of a queue: its settings and figures, and what ``read`` gives."""
    spec, stats, found = await console.look(
        lambda broker: (broker.queue(visit.queue), broker.stats(visit.queue), read(broker))
    )
    values |= {"spec": spec, "figures": figures(console, stats), "max_rows": MAX_ROWS, **found}
    return console.render(template, visit, now_ms=console.server.clock.now_ms(), **values)


class Search(NamedTuple):
    """The messages that a visitor looks for: by a filter's text, and by a reason of failure."""

    where: str
    reason: str
    test: Callable[[Entry], bool] | None
    error: InvalidFilter | None = None


def read_search(fields: dict[str, str]) -> Search:
    """Read a search from a query or a form; one with an error finds nothing."""
    where, reason = fields.get("where", "").strip(), fields.get("reason", "")
    try:
        compiled = parse(where) if where else None
    except InvalidFilter as error:
        return Search(where, reason, lambda _: False, error)

    def test(entry: Entry) -> bool:
        if reason and reads.reason_key(entry.reason) != reason:
            return False
        return compiled is None or compiled.matches(row_of(entry))

    return Search(where, reason, test if where or reason else None)


def read_state(fields: dict[str, str]) -> State:
    """Read a state from a query or a form."""
    text = fields.get("state", State.AVAILABLE.value)
    if text not in {state.value for state in State}:
        raise InvalidInput(f"{text!r:.100} is not a state of messages")
    return State(text)


async def queue_page(console: Console, visit: Visit) -> Response:
    """Show the messages of a queue in a state, or those that a search finds."""
    queue, query = visit.queue, visit.query
    state, search = read_state(query), read_search(query)
    if search.where.isdecimal():
        return redirect(visit, link("queues", queue, "messages", search.where))

    def read(broker: Broker) -> dict[str, Any]:
        found = reads.Scan([], 0, None)
        if search.error is None:
            cursor = query.get("cursor") or None
            found = reads.scan(broker, queue, state, cursor=cursor, where=search.test, count=PAGE)
        failed = reads.scan(broker, queue, state) if state is State.FAILED else None
        reasons = reads.reasons(failed.entries) if failed else []
        return {"found": found, "failed": failed, "reasons": reasons}

    did = query.get("did", ""), visit.number("count", 0)
    values = {"tab": state.value, "state": state, "search": search, "did": did}
    return await _page(console, visit, "queue.html", read, **values)


async def queue_live(console: Console, visit: Visit) -> Response:
    """Stream the figures of a queue."""

    async def read() -> dict[str, str]:
        return figures(console, await console.look(lambda broker: broker.stats(visit.queue)))

    return console.live(visit, read)


async def groups(console: Console, visit: Visit) -> Response:
    """Show which groups wait, since when, and which have messages in flight."""

    def read(broker: Broker) -> dict[str, Any]:
        cursor = visit.query.get("cursor") or None
        waiting = reads.scan(broker, visit.queue, State.AVAILABLE, cursor=cursor)
        held = reads.scan(broker, visit.queue, State.IN_FLIGHT)
        found = reads.shares([*waiting.entries, *held.entries], lambda entry: entry.group)
        return {"shares": found, "waiting": waiting, "held": held}

    return await _page(console, visit, "shares.html", read, tab="groups")


async def consumers(console: Console, visit: Visit) -> Response:
    """Show who holds messages, and until when."""

    def read(broker: Broker) -> dict[str, Any]:
        held = reads.scan(broker, visit.queue, State.IN_FLIGHT)
        found = reads.shares(held.entries, lambda entry: entry.consumer or "")
        return {"shares": found, "waiting": reads.Scan([], 0, None), "held": held}

    return await _page(console, visit, "shares.html", read, tab="consumers")


# --- settings -------------------------------------------------------------------------------------


def write_settings(spec: QueueSpec) -> dict[str, str]:
    """Write the settings of a queue as a form has them."""
    texts = {name: getattr(spec, name) for name in TEXTS}
    for field in FIELDS:
        value = getattr(spec, field.name)
        texts[field.name] = _write_duration(value) if field.is_duration else str(value)
    texts["overflow"] = spec.overflow.value
    texts |= {"name": spec.name, "ordering": spec.ordering.value, "version": str(spec.version)}
    return texts


def _write_duration(ms: int) -> str:
    for unit, unit_ms in sorted(UNITS_MS.items(), key=lambda each: -each[1]):
        if unit and ms and ms % unit_ms == 0:
            return f"{ms // unit_ms}{unit}"
    return "0"


def read_settings(form: dict[str, str]) -> dict[str, Any]:
    """Read the settings of a form; InvalidInput names the field that is wrong."""
    settings: dict[str, Any] = {}
    for field in FIELDS:
        text = form.get(field.name, "").strip().replace(" ", "")
        kind = "a duration such as 250ms, 30s, 5m, 2h or 7d" if field.is_duration else "a number"
        try:
            settings[field.name] = amount(text, UNITS_MS, kind) if field.is_duration else int(text)
        except ValueError:
            raise InvalidInput(f"{field.label}: {text!r:.100} is not {kind}") from None
    # Browsers send line ends as CR LF.
    texts = {name: form.get(name, "").replace("\r\n", "\n").strip() for name in TEXTS}
    if form.get("overflow"):
        settings["overflow"] = form["overflow"]
    return {**settings, **texts}


async def _form_page(
    console: Console, visit: Visit, form: dict[str, str], error: Exception | None = None
) -> Response:
    """Show a form of settings, with the error that kept them from being stored."""
    text = form["filter"].strip() or _default_of(form["name"])
    values: dict[str, Any] = {"form": form, "error": error, "fields": FIELDS, "tab": "settings"}
    values["status"] = 200 if error is None else 403 if isinstance(error, NotAllowed) else 400
    values |= await _check_filter(console, visit, text)
    if "queue" in visit.names:
        return await _page(console, visit, "settings.html", **values)
    return console.render("settings.html", visit, spec=None, **values)


def _default_of(name: str) -> str:
    """Return the filter of a queue without one; nothing while its name can't be one."""
    try:
        return default_filter(check_queue_name(name.strip()))
    except InvalidInput:
        return ""


async def create_page(console: Console, visit: Visit) -> Response:
    """Show the form for a new queue."""
    _check_may_create(visit)
    return await _form_page(console, visit, write_settings(QueueSpec(name="", filter="")))


def _check_may_create(visit: Visit) -> None:
    if not any(action == "admin" for action, _ in visit.principal.grants):
        visit.principal.check("admin")


async def create(console: Console, visit: Visit) -> Response:
    """Make a queue, or show what is wrong with it."""
    _check_may_create(visit)
    form = {**write_settings(QueueSpec(name="", filter="")), **visit.form}
    if "check" in form:
        return await _form_page(console, visit, form)
    name = form["name"].strip()
    try:
        settings = {**read_settings(form), "ordering": form["ordering"]}
        settings["filter"] = settings["filter"] or None
        check_settings(visit.principal, name, settings)
        await console.change(visit, lambda broker: broker.create_queue(name, **settings))
    except REFUSALS as error:
        return await _form_page(console, visit, form, error)
    return redirect(visit, link("queues", name, did="created"))


async def settings_page(console: Console, visit: Visit) -> Response:
    """Show the settings of a queue, in a form for those who may change them."""
    spec = await console.look(lambda broker: broker.queue(visit.queue))
    return await _form_page(console, visit, write_settings(spec))


async def change_settings(console: Console, visit: Visit) -> Response:
    """Change settings of a queue, or show what is wrong with them."""
    spec = await console.look(lambda broker: broker.queue(visit.queue))
    form = {**write_settings(spec), **visit.form, "name": spec.name}
    if "check" in form:
        return await _form_page(console, visit, form)
    try:
        given = read_settings(form)
        if form["version"] != str(spec.version):
            raise InvalidInput("somebody has changed the settings meanwhile: load the page again")
        # Only what is different: a key may lack the permission for the rest.
        changes = {name: new for name, new in given.items() if new != getattr(spec, name)}
        check_settings(visit.principal, spec.name, changes)
        if changes:
            await console.change(visit, lambda broker: broker.update_queue(spec.name, **changes))
    except REFUSALS as error:
        return await _form_page(console, visit, form, error)
    return redirect(visit, link("queues", spec.name, did="changed", count=len(changes)))


async def check_filter(console: Console, visit: Visit) -> Response:
    """Check a filter while it is written: what is wrong with it, or which messages it takes."""
    text = visit.form.get("filter", "").strip() or _default_of(visit.form.get("name", ""))
    return console.render("filter_check.html", visit, **await _check_filter(console, visit, text))


async def _check_filter(console: Console, visit: Visit, text: str) -> dict[str, Any]:
    """Return what the check of a filter shows; an empty one is not checked."""
    if not text:
        return {"checked": ""}
    try:
        compiled = parse(text)
    except InvalidFilter as error:
        lines = text.split("\n")
        line = lines[min(error.line, len(lines)) - 1]
        at, end = error.column - 1, error.column - 1 + max(1, len(error.fragment))
        parts = line[max(0, at - 200) : at], line[at:end], line[end : end + 200]
        return {"checked": text, "wrong": error, "parts": parts}
    looked, matches = 0, None
    # The log has messages of all queues.
    if visit.may_see():
        looked, matches = await console.look(lambda broker: reads.try_filter(broker, compiled))
    values = {"looked": looked, "matches": matches, "shown": MATCHES_SHOWN}
    return {"checked": text, "wrong": None, **values}


async def delete(console: Console, visit: Visit) -> Response:
    """Delete a queue whose name was typed; or drain it, and it goes once it is empty."""
    queue, drain = visit.queue, "drain" in visit.form
    if visit.form.get("name", "").strip() != queue:
        spec = await console.look(lambda broker: broker.queue(queue))
        error = InvalidInput("that is not the name of this queue: it was not deleted")
        return await _form_page(console, visit, write_settings(spec), error)
    await console.change(visit, lambda broker: broker.delete_queue(queue, drain=drain))
    return redirect(visit, link(""))


ROUTES: Final = [
    Route("GET", "/create", ANY_KEY, create_page),
    Route("POST", "/create", ANY_KEY, create),
    Route("POST", "/filter", ANY_KEY, check_filter),
    Route("GET", "/queues/{queue}", SEE_QUEUE, queue_page),
    Route("GET", "/queues/{queue}/live", SEE_QUEUE, queue_live),
    Route("GET", "/queues/{queue}/groups", SEE_QUEUE, groups),
    Route("GET", "/queues/{queue}/consumers", SEE_QUEUE, consumers),
    Route("GET", "/queues/{queue}/settings", SEE_QUEUE, settings_page),
    Route("POST", "/queues/{queue}/settings", CHANGE_QUEUE, change_settings),
    Route("POST", "/queues/{queue}/delete", CHANGE_QUEUE, delete),
]
