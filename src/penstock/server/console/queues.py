"""Pages of a queue: its messages by state, groups, consumers, settings; create, change, delete.

Reads of the broker run on a thread, and let others in between two pages of a browse. Each is
bounded, and says if it was cut.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from penstock import limits
from penstock.broker.explain import row_of
from penstock.errors import InvalidFilter, InvalidInput, NotAllowed, QueueExists
from penstock.filters import default_filter, parse
from penstock.model import Entry, QueueSpec, State
from penstock.server.config import UNITS_MS, amount
from penstock.server.console.figures import number
from penstock.server.console.overview import queue_cells
from penstock.server.console.visits import ANY_KEY, CHANGE, SEE, Route, link, redirect
from penstock.server.security import check_settings
from penstock.validation import check_queue_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.broker.broker import Broker
    from penstock.filters import Filter
    from penstock.model import LogRecord, QueueStats
    from penstock.server.console import Console
    from penstock.server.console.visits import Visit
    from penstock.server.http import Response

# Messages that a browse reads before it lets others in.
STEP: Final = 1_000
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


# --- messages in a state --------------------------------------------------------------------------


class Scan(msgspec.Struct):
    """Messages that were found, how many were looked at, and where to go on (None: the end)."""

    entries: list[Entry]
    looked: int
    next_cursor: str | None


def scan(
    broker: Broker,
    queue: str,
    state: State,
    *,
    cursor: str | None = None,
    where: Callable[[Entry], bool] | None = None,
    count: int = limits.CONSOLE_MAX_SCAN,
) -> Scan:
    """Look for messages in a state, up to a count, among a bounded number of them."""
    found = Scan([], 0, cursor)
    while True:
        room = count - len(found.entries)
        limit = min(STEP, limits.CONSOLE_MAX_SCAN - found.looked, room if where is None else STEP)
        cursor = found.next_cursor
        page = broker.browse(queue, state=state, limit=limit, cursor=cursor, payloads=False)
        if where is not None:
            places = [at for at, entry in enumerate(page) if where(entry)]
            if len(places) > room:
                # Read again up to the last that there is room for: for the cursor behind it.
                limit = places[room - 1] + 1
                page = broker.browse(queue, state=state, limit=limit, cursor=cursor, payloads=False)
        found.entries += [entry for entry in page if where is None or where(entry)]
        found.looked += len(page)
        found.next_cursor = page.next_cursor
        full = len(found.entries) >= count or found.looked >= limits.CONSOLE_MAX_SCAN
        if page.next_cursor is None or full:
            return found


def reason_key(text: str) -> str:
    """Return a short name for a reason, for addresses."""
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()


def grouped(
    entries: Iterable[Entry], name_of: Callable[[Entry], str]
) -> list[tuple[str, list[Entry]]]:
    """Group messages by a name, the most frequent first."""
    found: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        found[name_of(entry)].append(entry)
    return sorted(found.items(), key=lambda each: -len(each[1]))


class Share(NamedTuple):
    """The part of a queue that one group or one consumer has.

    Its oldest message waits since ``since_ms``; ``soonest_ms`` and ``latest_ms`` are deadlines of
    its leases.
    """

    name: str
    waiting: int
    since_ms: int | None
    in_flight: int
    soonest_ms: int | None
    latest_ms: int | None
    attempts: int


def shares(entries: Iterable[Entry], name_of: Callable[[Entry], str]) -> list[Share]:
    """Sum messages up by a name: the longest wait first, then the most in flight."""
    found = []
    for name, own in grouped(entries, name_of):
        ends = [each.lease_deadline_ms or 0 for each in own if each.state is State.IN_FLIGHT]
        waits = [
            max(each.visible_at_ms or 0, each.published_at_ms)
            for each in own
            if each.state is not State.IN_FLIGHT
        ]
        share = Share(
            name=name,
            waiting=len(waits),
            since_ms=min(waits, default=None),
            in_flight=len(ends),
            soonest_ms=min(ends, default=None),
            latest_ms=max(ends, default=None),
            attempts=max(each.attempts for each in own),
        )
        found.append(share)
    return sorted(found, key=lambda each: (each.since_ms or limits.MAX_OFFSET, -each.in_flight))


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
        visit, lambda broker: (broker.queue(visit.queue), broker.stats(visit.queue), read(broker))
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
    """Read a search from a query or a form, on a thread; one with an error finds nothing."""
    where, reason = fields.get("where", "").strip(), fields.get("reason", "")
    try:
        compiled = parse(where) if where else None
    except InvalidFilter as error:
        return Search(where, reason, lambda _: False, error)

    def test(entry: Entry) -> bool:
        if reason and reason_key(entry.reason) != reason:
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
    state, where = read_state(query), query.get("where", "").strip()
    if where.isdecimal():
        return redirect(visit, link("queues", queue, "messages", where))

    def read(broker: Broker) -> dict[str, Any]:
        found, search = Scan([], 0, None), read_search(query)
        if search.error is None:
            cursor = query.get("cursor") or None
            found = scan(broker, queue, state, cursor=cursor, where=search.test, count=PAGE)
        failed = scan(broker, queue, state) if state is State.FAILED else None
        reasons = grouped(failed.entries, lambda entry: entry.reason) if failed else []
        return {"search": search, "found": found, "failed": failed, "reasons": reasons}

    did = query.get("did", ""), visit.number("count", 0)
    values = {"tab": state.value, "state": state, "did": did}
    return await _page(console, visit, "queue.html", read, **values)


async def queue_live(console: Console, visit: Visit) -> Response:
    """Stream the figures of a queue."""

    async def read() -> dict[str, str]:
        return figures(console, await console.look(visit, lambda broker: broker.stats(visit.queue)))

    return console.live(visit, read)


async def shares_page(console: Console, visit: Visit) -> Response:
    """Show which groups wait and since when, or which consumers hold messages and until when."""
    tab = visit.request.path.rpartition("/")[2]

    def read(broker: Broker) -> dict[str, Any]:
        waiting, held = Scan([], 0, None), scan(broker, visit.queue, State.IN_FLIGHT)
        if tab == "consumers":
            found = shares(held.entries, lambda entry: entry.consumer or "")
        else:
            cursor = visit.query.get("cursor") or None
            waiting = scan(broker, visit.queue, State.AVAILABLE, cursor=cursor)
            found = shares([*waiting.entries, *held.entries], lambda entry: entry.group)
        return {"shares": found, "waiting": waiting, "held": held}

    return await _page(console, visit, "shares.html", read, tab=tab)


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


async def _spec_of(console: Console, visit: Visit) -> QueueSpec:
    """Return the settings of the page's queue; without one they are those of a new queue."""
    if "queue" in visit.names:
        return await console.look(visit, lambda broker: broker.queue(visit.queue))
    if not any(action == "admin" for action, _ in visit.principal.grants):
        visit.principal.check("admin")
    return QueueSpec(name="", filter="")


async def settings_page(console: Console, visit: Visit) -> Response:
    """Show the settings of a queue, or of a new one, in a form for those who may change them."""
    return await _form_page(console, visit, write_settings(await _spec_of(console, visit)))


async def create(console: Console, visit: Visit) -> Response:
    """Make a queue, or show what is wrong with it."""
    form = {**write_settings(await _spec_of(console, visit)), **visit.form}
    if "check" in form:
        return await _form_page(console, visit, form)
    name = form["name"].strip()
    try:
        settings = {**read_settings(form), "ordering": form["ordering"]}
        settings["filter"] = settings["filter"] or None
        await _set(console, visit, name, settings, lambda each: each.create_queue)
    except REFUSALS as error:
        return await _form_page(console, visit, form, error)
    return redirect(visit, link("queues", name, did="created"))


async def change_settings(console: Console, visit: Visit) -> Response:
    """Change settings of a queue, or show what is wrong with them."""
    spec = await _spec_of(console, visit)
    form = {**write_settings(spec), **visit.form, "name": spec.name}
    if "check" in form:
        return await _form_page(console, visit, form)
    try:
        given = read_settings(form)
        if form["version"] != str(spec.version):
            raise InvalidInput("somebody has changed the settings meanwhile: load the page again")
        # Only what is different: a key may lack the permission for the rest.
        changes = {name: new for name, new in given.items() if new != getattr(spec, name)}
        if changes:
            await _set(console, visit, spec.name, changes, lambda each: each.update_queue)
    except REFUSALS as error:
        return await _form_page(console, visit, form, error)
    return redirect(visit, link("queues", spec.name, did="changed", count=len(changes)))


async def _set(
    console: Console,
    visit: Visit,
    name: str,
    settings: dict[str, Any],
    verb: Callable[[Broker], Callable[..., QueueSpec]],
) -> None:
    """Make or change a queue, if the visitor may give it these settings."""

    def work(broker: Broker) -> QueueSpec:
        check_settings(visit.principal, name, settings)
        return verb(broker)(name, **settings)

    await console.change(visit, work)


def try_filter(broker: Broker, where: Filter) -> tuple[int, list[LogRecord]]:
    """Try a filter on the newest messages of the log: how many there are, and those it takes."""
    stats = broker.log_stats()
    newest: list[LogRecord] = []
    for log in range(stats.logs):
        begin = max(stats.earliest, stats.end - limits.CONSOLE_LOG_SAMPLE)
        while begin < stats.end:
            # A page ends where filters have changed.
            page = broker.read_log(log, begin=begin, limit=limits.CONSOLE_LOG_SAMPLE)
            newest += page.records
            if page.cursor.end <= begin:
                break
            begin = page.cursor.end
    newest.sort(key=lambda record: -record.message_id)
    return len(newest), [record for record in newest if where.matches(row_of(record))]


async def check_filter(console: Console, visit: Visit) -> Response:
    """Check a filter while it is written: what is wrong with it, or which messages it takes."""
    text = visit.form.get("filter", "").strip() or _default_of(visit.form.get("name", ""))
    return console.render("filter_check.html", visit, **await _check_filter(console, visit, text))


async def _check_filter(console: Console, visit: Visit, text: str) -> dict[str, Any]:
    """Return what the check of a filter shows; an empty one is not checked."""
    if not text:
        return {"checked": ""}
    try:
        compiled = await console.look(visit, lambda _: parse(text))
    except InvalidFilter as error:
        lines = text.split("\n")
        line = lines[min(error.line, len(lines)) - 1]
        at, end = error.column - 1, error.column - 1 + max(1, len(error.fragment))
        parts = line[max(0, at - 200) : at], line[at:end], line[end : end + 200]
        return {"checked": text, "wrong": error, "parts": parts}
    looked, matches = 0, None
    # The log has messages of all queues.
    if visit.may_see():
        looked, matches = await console.look(visit, lambda broker: try_filter(broker, compiled))
    values = {"looked": looked, "matches": matches, "shown": MATCHES_SHOWN}
    return {"checked": text, "wrong": None, **values}


async def delete(console: Console, visit: Visit) -> Response:
    """Delete a queue whose name was typed; or drain it, and it goes once it is empty."""
    queue, drain = visit.queue, "drain" in visit.form
    if visit.form.get("name", "").strip() != queue:
        form = write_settings(await _spec_of(console, visit))
        error = InvalidInput("that is not the name of this queue: it was not deleted")
        return await _form_page(console, visit, form, error)
    await console.change(visit, lambda broker: broker.delete_queue(queue, drain=drain))
    return redirect(visit, link(""))


ROUTES: Final = [
    Route("GET", "/create", ANY_KEY, settings_page),
    Route("POST", "/create", ANY_KEY, create),
    Route("POST", "/filter", ANY_KEY, check_filter),
    Route("GET", "/queues/{queue}", SEE, queue_page),
    Route("GET", "/queues/{queue}/live", SEE, queue_live),
    Route("GET", "/queues/{queue}/groups", SEE, shares_page),
    Route("GET", "/queues/{queue}/consumers", SEE, shares_page),
    Route("GET", "/queues/{queue}/settings", SEE, settings_page),
    Route("POST", "/queues/{queue}/settings", CHANGE, change_settings),
    Route("POST", "/queues/{queue}/delete", CHANGE, delete),
]
