"""Pages of a message: payload, attributes, attempts, queues; and changes of many messages."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from penstock.broker.explain import row_of
from penstock.errors import InvalidInput, QueueNotFound
from penstock.filters import Row
from penstock.limits import CONSOLE_PREVIEW_BYTES, CONSOLE_PREVIEW_DEPTH
from penstock.model import Attempt, Entry, MessageExplanation, State
from penstock.server.console.queues import read_search, read_state, scan
from penstock.server.console.visits import CHANGE, HEADERS, SEE, NoSuchPage, Route, link, redirect
from penstock.server.http import Response
from penstock.server.security import check_target

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.broker.broker import Broker
    from penstock.model import LogRecord
    from penstock.server.console import Console
    from penstock.server.console.visits import Visit

VIEWS: Final = ("json", "text", "hex")
_HEX_BYTES: Final = 4 * 1024
_HEX_LINE: Final = 16
# Text of JSON without brackets; a bracket in a string counts as text.
_NOT_BRACKETS: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[^\[\]{}"]++', re.DOTALL)
_Decoder: Final = getincrementaldecoder("utf-8")


# --- payloads -------------------------------------------------------------------------------------


class Preview(NamedTuple):
    """A payload as text: how it is written, and whether it was cut."""

    view: str
    text: str
    is_cut: bool


def preview(payload: bytes, view: str = "") -> Preview:
    """Write a payload as JSON, as text or in hexadecimal; by default as the first that fits."""
    pretty = _pretty(payload)
    if view not in VIEWS:
        view = "json" if pretty else "text" if _is_text(payload) else "hex"
    if view == "hex":
        lines = [
            f"{at:08x}  {part.hex(' '):{_HEX_LINE * 3 - 1}}  {_ascii(part)}"
            for at in range(0, min(len(payload), _HEX_BYTES), _HEX_LINE)
            if (part := payload[at : at + _HEX_LINE])
        ]
        return Preview(view, "\n".join(lines), len(payload) > _HEX_BYTES)
    if view == "json" and pretty:
        return Preview(view, *_cut(pretty))
    return Preview("text", *_cut(payload))


def _pretty(payload: bytes) -> bytes:
    """Indent JSON; nothing if it is none, too long, or too deep: each line is indented so far."""
    if (
        not payload
        or len(payload) > CONSOLE_PREVIEW_BYTES
        or _depth(payload) > CONSOLE_PREVIEW_DEPTH
    ):
        return b""
    try:
        msgspec.json.decode(payload)
        return msgspec.json.format(payload, indent=2)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return b""


def _depth(payload: bytes) -> int:
    """Return how deep JSON nests."""
    steps = (1 if each in b"[{" else -1 for each in _NOT_BRACKETS.sub(b"", payload))
    return max(accumulate(steps), default=0)


def _is_text(payload: bytes) -> bool:
    whole = len(payload) <= CONSOLE_PREVIEW_BYTES
    try:
        # A character at the cut may lack its end.
        return "\0" not in _Decoder().decode(payload[:CONSOLE_PREVIEW_BYTES], final=whole)
    except UnicodeDecodeError:
        return False


def _cut(body: bytes) -> tuple[str, bool]:
    text = body[:CONSOLE_PREVIEW_BYTES].decode(errors="replace")
    # Characters that can't be seen, or turn the direction of others, are named.
    named = (c if c.isprintable() or c in "\n\t" else f"\\u{ord(c):04x}" for c in text)
    return "".join(named), len(body) > CONSOLE_PREVIEW_BYTES


def _ascii(part: bytes) -> str:
    return "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)


# --- one message ----------------------------------------------------------------------------------


class Place(msgspec.Struct):
    """A message in one queue, with its attempts."""

    entry: Entry
    attempts: list[Attempt]


class Whereabouts(msgspec.Struct):
    """A message in the queue of the page, with its payload, and in all queues that have it.

    ``takers`` are the queues whose filters would take it now.
    """

    here: Entry | None
    row: Row
    places: list[Place]
    takers: list[str]
    why: MessageExplanation


def find_message(
    broker: Broker,
    queue: str,
    message_id: int,
    may_see: Callable[[str | None], bool],
    asked: str = "",
) -> Whereabouts:
    """Find a message, and explain why it is, or is not, in a queue (the page's)."""
    here = next(iter(broker.browse(queue, message_id=message_id)), None)
    why = broker.explain_to(may_see, asked or queue, message_id)
    places = []
    for name in dict.fromkeys([queue, why.queue, *why.elsewhere]):
        # One that was deleted since has no place.
        with suppress(QueueNotFound):
            page = broker.browse(name, message_id=message_id, payloads=False)
            places += [Place(entry, broker.attempts(name, message_id)) for entry in page]
    found = places[0].entry if places else None
    # The log has messages of all queues.
    record = found or (log_record(broker, message_id) if may_see(None) else None)
    if record is None:
        raise NoSuchPage(why.text)
    row = row_of(record)
    takers = [name for name in broker.takers(row) if may_see(name)]
    return Whereabouts(here, row, places, takers, why)


def log_record(broker: Broker, message_id: int) -> LogRecord | None:
    """Read a message from the log, if that still has it."""
    stats = broker.log_stats()
    if stats.earliest <= message_id < stats.end:
        for log in range(stats.logs):
            for record in broker.read_log(log, begin=message_id, limit=1).records:
                if record.message_id == message_id:
                    return record
    return None


def span(found: Whereabouts, now_ms: int) -> tuple[int, int]:
    """Return when the life of a message began, and when it ended in its queues, or now."""
    begin_ms = found.row.published_at_ms
    ends = [place.entry.ended_at_ms or now_ms for place in found.places]
    return begin_ms, max([begin_ms + 1, *ends])


def _message_id(visit: Visit) -> int:
    text = visit.names["message"]
    if not text.isdecimal() or len(text) > 20 or int(text) >= 1 << 64:
        raise NoSuchPage(f"{text[:100]!r} is not the id of a message: that is a number.")
    return int(text)


async def message_page(console: Console, visit: Visit) -> Response:
    """Show a message: its payload, and its life in all its queues."""
    queue, message_id = visit.queue, _message_id(visit)
    asked = visit.query.get("why", "").strip()
    if asked:
        visit.principal.check_any(SEE, asked)
    now_ms = console.server.clock.now_ms()

    def read(broker: Broker) -> tuple[Whereabouts, Preview | None]:
        found = find_message(broker, queue, message_id, visit.may_see, asked)
        body = None if found.here is None else found.here.payload
        return found, None if body is None else preview(body, visit.query.get("view", ""))

    found, shown = await console.look(visit, read)
    values: dict[str, Any] = {"found": found, "span": span(found, now_ms), "now_ms": now_ms}
    values |= {"message_id": message_id, "preview": shown, "views": VIEWS}
    return console.render("message.html", visit, **values)


async def payload(console: Console, visit: Visit) -> Response:
    """Send a payload as a file, which no browser shows as a page."""
    queue, message_id = visit.queue, _message_id(visit)
    page = await console.look(visit, lambda broker: broker.browse(queue, message_id=message_id))
    if not page or page[0].payload is None:
        raise NoSuchPage(f"Queue {queue} does not have message {message_id}.")
    disposition = ("content-disposition", f'attachment; filename="message-{message_id}.bin"')
    return Response(200, page[0].payload, "application/octet-stream", (*HEADERS, disposition))


# --- many messages --------------------------------------------------------------------------------

ACTIONS: Final = {
    "redrive": frozenset({State.FAILED}),
    "move": frozenset({State.FAILED, State.AVAILABLE, State.DELAYED}),
    "purge": frozenset(State),
}


class Wish(msgspec.Struct):
    """A change that a visitor wants: of the messages of some ids, or (None) of all in a state."""

    action: str
    state: State
    to: str
    message_ids: list[int] | None
    count: int = 0
    is_cut: bool = False


def _read_wish(broker: Broker, visit: Visit) -> Wish:
    """Read a change from a form, and find the messages that it is about."""
    form = visit.form
    action, state, scope = form.get("action", ""), read_state(form), form.get("scope", "")
    if state not in ACTIONS.get(action, ()):
        raise InvalidInput(f"{state.value} messages can't be changed by {action!r:.40}")
    wish = Wish(action, state, form.get("to", "").strip() if action == "move" else "", None)
    if wish.action == "move":
        check_target(visit.principal, wish.to)
        broker.queue(wish.to)
    search = read_search(form)
    if scope == "chosen":
        wish.message_ids = _read_ids(visit)
        wish.count = len(wish.message_ids)
    elif scope == "found" and search.test is not None:
        if search.error is not None:
            raise search.error
        found = scan(broker, visit.queue, state, where=search.test)
        wish.message_ids = [entry.message_id for entry in found.entries]
        wish.count, wish.is_cut = len(wish.message_ids), found.next_cursor is not None
    elif scope in {"found", "all"}:
        wish.count = getattr(broker.stats(visit.queue), state.value)
    else:
        raise InvalidInput("say which messages: the selected ones, those found, or all")
    if wish.message_ids is not None and action == "purge" and state is not State.FAILED:
        raise InvalidInput(f"{state.value} messages can only be purged all together")
    return wish


def _read_ids(visit: Visit) -> list[int]:
    texts = ",".join(value for name, value in visit.fields if name == "ids").split(",")
    if not all(text.isdecimal() and len(text) <= 20 for text in texts):
        raise InvalidInput("no messages are selected")
    return sorted({int(text) for text in texts})


def _do(broker: Broker, queue: str, wish: Wish) -> int:
    if wish.action == "redrive":
        return broker.redrive(queue, message_ids=wish.message_ids)
    if wish.action == "move":
        return broker.move(queue, wish.to, state=wish.state, message_ids=wish.message_ids)
    return broker.purge(queue, states=[wish.state], message_ids=wish.message_ids)


async def act(console: Console, visit: Visit) -> Response:
    """Ask whether messages are to be redriven, moved or purged; do it once that is confirmed."""
    wish = await console.look(visit, lambda broker: _read_wish(broker, visit))
    if "confirmed" not in visit.form:
        return console.render("confirm.html", visit, queue=visit.queue, wish=wish)
    count = await console.change(visit, lambda broker: _do(broker, visit.queue, wish))
    query = {"state": wish.state.value, "did": wish.action, "count": count}
    return redirect(visit, link("queues", visit.queue, **query))


ROUTES: Final = [
    Route("GET", "/queues/{queue}/messages/{message}", SEE, message_page),
    Route("GET", "/queues/{queue}/messages/{message}/payload", SEE, payload),
    Route("POST", "/queues/{queue}/act", CHANGE, act),
]
