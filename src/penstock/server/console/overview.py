"""Pages about the whole server: the overview of queues, its health and pipeline; and the login."""

from __future__ import annotations

import asyncio
import platform
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from penstock import limits
from penstock.server.console.figures import (
    COUNTS,
    NOTHING,
    duration,
    moment,
    number,
    rate,
    size,
    spark,
    totals_of,
)
from penstock.server.console.visits import ANY_KEY, OPEN, SEE, Route, link, redirect
from penstock.server.metrics import healthy
from penstock.store.sql.location import without_password

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.broker.broker import Broker
    from penstock.server.console import Console
    from penstock.server.console.figures import QueueFigures
    from penstock.server.console.visits import Visit
    from penstock.server.http import Response

# Facts by title and name.
Facts: TypeAlias = "dict[str, dict[str, str]]"
# How long the overview waits for figures when nobody has looked for a while.
_WAIT_SECONDS: Final = 0.1
# Messages that wait for longer than this to be routed, while no batch comes, are worth a word.
_STANDS_MS: Final = 60_000
# Column: title, meaning, and the number that it is sorted by.
_COLUMNS: Final[dict[str, tuple[str, str, Callable[[QueueFigures], Any]]]] = {
    "name": ("Queue", "By name", lambda each: each.stats.queue),
    "available": ("Waiting", "Messages that can be claimed", attrgetter("stats.available")),
    "delayed": ("Delayed", "Messages whose time has not come", attrgetter("stats.delayed")),
    "in_flight": ("In flight", "Messages under a lease", attrgetter("stats.in_flight")),
    "failed": ("Failed", "Messages that ran out of attempts", attrgetter("stats.failed")),
    "came": ("In /s", "Messages that come in, each second", lambda each: each.came or 0),
    "done": ("Done /s", "Messages settled as done, each second", lambda each: each.done or 0),
    "oldest": ("Oldest", "Age of the oldest that waits", lambda e: e.stats.oldest_age_ms or 0),
}


# --- the overview ---------------------------------------------------------------------------------


def _visible(console: Console, visit: Visit) -> tuple[list[QueueFigures], dict[str, float]]:
    """Return the figures of the queues that the visitor may see, and their sums."""
    figures = console.figures
    if visit.may_see() and figures.complete:
        return list(figures.queues.values()), figures.totals
    seen = [each for each in list(figures.queues.values()) if visit.may_see(each.stats.queue)]
    return seen, totals_of(seen)


def _found(console: Console, visit: Visit) -> tuple[list[QueueFigures], dict[str, Any]]:
    """Return the queues that a page shows, and what it says about its order and place."""
    part = visit.query.get("filter", "").strip()
    found = [e for e in _visible(console, visit)[0] if part.lower() in e.stats.queue.lower()]
    sort = visit.query.get("sort", "")
    sort = sort if sort in _COLUMNS else "available"
    up = visit.query.get("up") == "1"
    found.sort(key=_COLUMNS["name"][2])
    found.sort(key=_COLUMNS[sort][2], reverse=(sort == "name") == up)
    size = limits.CONSOLE_PAGE_QUEUES
    page = visit.number("page", 1, 1, max(1, -(-len(found) // size)))
    place = {"filter": part, "sort": sort, "up": "1" if up else "", "page": page}
    place |= {"size": size, "found": len(found)}
    return found[(page - 1) * size : page * size], place


def queue_cells(console: Console, figures: QueueFigures) -> dict[str, str]:
    """Write the figures of a queue, by column."""
    history = figures.history
    return {
        **{name: number(getattr(figures.stats, name)) for name in COUNTS},
        "came": rate(figures.came),
        "done": rate(figures.done),
        "oldest": duration(figures.stats.oldest_age_ms),
        "line": spark(history.values(console.figures.minute)) if history else "",
    }


def _total_cells(console: Console, visit: Visit) -> dict[str, str]:
    """Write the sums, and draw the lines of the whole store if the visitor may see all of it."""
    figures, sums = console.figures, _visible(console, visit)[1]
    cells = {name: number(sums[name]) for name in ("queues", *COUNTS)}
    cells |= {name: rate(sums[name]) for name in ("came", "done")}
    if visit.may_see():
        cells["waiting"] = spark(figures.waiting.values(figures.minute))
        cells["published"] = spark(figures.published.values(figures.minute))
    return cells


async def overview(console: Console, visit: Visit) -> Response:
    """Show the queues that the visitor may see, the deepest first."""
    figures = console.figures
    await asyncio.to_thread(figures.look, _WAIT_SECONDS)
    shown, place = await asyncio.to_thread(_found, console, visit)
    return console.render(
        "overview.html",
        visit,
        rows=[(each.stats.queue, queue_cells(console, each)) for each in shown],
        totals=_total_cells(console, visit),
        columns=[(name, title, about) for name, (title, about, _) in _COLUMNS.items()],
        complete=figures.complete or not visit.may_see(),
        names=number(len(figures.names)),
        unready=without_password(console.server.unready or ""),
        **place,
    )


async def overview_live(console: Console, visit: Visit) -> Response:
    """Send the numbers of the overview as they change."""
    figures = console.figures
    names = [each.stats.queue for each in (await asyncio.to_thread(_found, console, visit))[0]]
    partial = not figures.complete

    async def read() -> dict[str, str]:
        figures.look()
        cells = {f"all:{name}": text for name, text in _total_cells(console, visit).items()}
        for name in names:
            found = figures.queues.get(name)
            if found is not None and visit.may_see(name):
                texts = queue_cells(console, found)
                cells |= {f"{name}:{column}": text for column, text in texts.items()}
        # The page has the figures of some queues only: it is loaded again.
        return cells | {"reload": ""} if partial and figures.complete else cells

    return console.live(visit, read)


# --- health and pipeline: pages of facts ----------------------------------------------------------


def _title(name: str) -> str:
    plain = name.removesuffix("_total").replace("_", " ")
    return plain.upper() if name == "http" else plain.capitalize()


def _health(console: Console, broker: Broker) -> Facts:
    server, config = console.server, console.server.config
    connections: Any = next(iter(server.gauges()))[2]
    keys = "not needed" if server.keys is None else number(len(server.keys))
    up_ms = (server.clock.seconds() - console.began) * 1000
    syncs, commits, seconds, _ = broker.durability()
    facts = {
        "Server": {
            "Version": f"Penstock {console.version}, Python {platform.python_version()}",
            "Up for": duration(up_ms),
            "Keys": keys,
            "TLS": "on" if server.tls else "off",
            **{_title(name): server.location(name) for name in server.addresses},
        },
        "Store": {
            "Store": without_password(config.store),
            "Id": console.info.store_id,
            "Design": console.info.design,
        },
        "Disk": {
            "Durability": config.durability,
            "Syncs": number(syncs),
            "Commits per sync": rate(commits / syncs if syncs else None),
            "Time per sync": f"{seconds / syncs * 1000:.1f} ms" if syncs else NOTHING,
        },
        "Connections": {
            **{_title(name): number(count) for name, count in connections.items()},
            "Room for": number(server.connections.most),
            "Bytes in hand": size(server.connections.held_bytes),
            "Claims that wait": number(server.batcher.parked),
            "Console logins": number(len(console.sessions)),
            "Pages shown live": number(console.streams.total),
        },
    }
    if healthy(broker):
        facts["Store"]["Routing"] = broker.info().routing
        facts["Disk"]["Free on disk"] = size(broker.free_bytes())
        facts["Counts"] = {
            _title(name): number(getattr(counts, name))
            for counts in (broker.store_stats(), broker.contention())
            for name in (() if counts is None else counts.__struct_fields__)
        }
    return facts


def _pipeline(console: Console, broker: Broker) -> Facts:
    log, figures = broker.log_stats(), console.figures
    figures.look()
    facts: Facts = {}
    if log.routing == "pipeline":
        plan, batches = broker.route_plan(max_offsets=1), list(broker.routed_batches)
        now_ms = console.server.clock.now_ms()
        moved = batches[0].at_ms if batches else None
        behind = max(0, log.end - log.routed_up_to)
        # Shown as tiles.
        facts["Now"] = {
            "Behind": number(behind),
            "Routed": rate(figures.routed_rate),
            "Last batch": NOTHING if moved is None else f"{duration(now_ms - moved)} ago",
            "Starts of routers": number(plan.epoch),
            "lag": spark(figures.lag.values(figures.minute)),
            "routed": spark(figures.routed.values(figures.minute)),
            "stands": "yes" if behind and now_ms - (moved or 0) > _STANDS_MS else "",
        }
    facts["The metadata log"] = {
        "Routing": log.routing,
        "Messages kept": number(log.kept),
        "Offsets": f"{number(log.earliest)} to {number(log.end)}",
        "Segments": number(log.segments),
        "Kept for": duration(log.retention_ms) if log.retention_ms else "ever",
    }
    if log.routing == "inline":
        return facts
    facts["Routing"] = {
        "Routed up to": number(log.routed_up_to),
        "Epoch of the router": number(plan.epoch) if plan.epoch else "no router has come yet",
        "Version of the filters": number(plan.filters_version),
    }
    for each, at in sorted(log.cursors.items()):
        lag = number(max(0, log.end - at))
        facts[f"Log {each}"] = {"Routed up to": number(at), "Behind": lag}
    facts["Last batches of this server"] = {
        f"Log {batch.log}, {number(batch.cursor.begin)} to {number(batch.cursor.end)}": (
            f"{batch.assigned.status.value}, put {number(batch.assigned.placed)} times "
            f"into queues, {moment(batch.at_ms)}"
        )
        for batch in batches
    } or {"None": "nobody has routed through this server since it was started"}
    return facts


_FACTS: Final = {"health": _health, "pipeline": _pipeline}


async def facts(console: Console, visit: Visit) -> Response:
    """Show how the server and its store are, or how far the log is routed."""
    read = _FACTS[visit.page]
    parts = await console.look(visit, lambda broker: read(console, broker))
    why = without_password(console.server.unready or "")
    return console.render("facts.html", visit, parts=parts, unready=why)


async def facts_live(console: Console, visit: Visit) -> Response:
    """Send the facts of a page as they change."""
    read = _FACTS[visit.page]

    async def cells() -> dict[str, str]:
        parts = await console.look(visit, lambda broker: read(console, broker))
        return {
            f"{title}:{name}": each for title, part in parts.items() for name, each in part.items()
        }

    return console.live(visit, cells)


# --- login ----------------------------------------------------------------------------------------


async def login_page(console: Console, visit: Visit) -> Response:
    """Show the login; there is none where there are no keys."""
    if console.server.keys is None:
        return redirect(visit, link(""))
    return console.render("login.html", visit, next=visit.query.get("next", ""), failed=False)


async def log_in(console: Console, visit: Visit) -> Response:
    """Begin a session."""
    form = visit.form
    token, key_id = form.get("secret", "").strip(), form.get("key", "").strip()
    if key_id:
        token = f"{key_id}:{token}"
    session = await console.sessions.log_in(token)
    asked = form.get("next", "")
    if session is None:
        console.server.metrics.refusals.token("console", visit.request.peer, token)
        return console.render("login.html", visit, status=403, next=asked, failed=True)
    console.sessions.end(visit.session)
    # Behind the console's prefix, nothing can lead elsewhere.
    address = link("") + asked if asked.isascii() and asked.isprintable() else link("")
    return redirect(visit, address, console.sessions.set_cookie(visit.request, session))


async def log_out(console: Console, visit: Visit) -> Response:
    """End the session."""
    console.sessions.end(visit.session)
    return redirect(visit, link("login"), console.sessions.set_cookie(visit.request, None))


ROUTES: Final = [
    Route("GET", "/", ANY_KEY, overview),
    Route("GET", "/live", ANY_KEY, overview_live),
    *(Route("GET", f"/{name}", SEE, facts) for name in _FACTS),
    *(Route("GET", f"/{name}/live", SEE, facts_live) for name in _FACTS),
    Route("GET", "/login", OPEN, login_page),
    Route("POST", "/login", OPEN, log_in),
    Route("POST", "/logout", ANY_KEY, log_out),
]
