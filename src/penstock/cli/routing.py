"""The metadata log: look at it, route from it, fill a queue from it."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Final

import click

from penstock.broker.router import route_once
from penstock.cli.common import (
    duration,
    emit_json,
    open_store,
    open_to_look,
    plain,
    progress_bar,
    show_table,
    store_option,
    when,
)

if TYPE_CHECKING:
    from penstock.model import LogStats

__all__ = ["commands"]


@click.group("log")
def log_group() -> None:
    """Look at the metadata log, or change how it is kept."""


@log_group.command("stats")
@store_option
def log_stats(store: str, *, as_json: bool) -> None:
    """Show offsets, logs, cursors and retention."""
    with open_to_look(store) as broker:
        stats = broker.log_stats()
    _show_stats(stats, as_json=as_json)


@log_group.command("configure")
@click.option("--logs", type=int, help="Spread messages over so many logs from here on.")
@click.option("--retention", type=duration, help="Keep the log for so long; 0: for ever.")
@store_option
def configure(store: str, logs: int | None, retention: int | None, *, as_json: bool) -> None:
    """Change the number of logs, or how long they are kept."""
    with open_store(store) as broker:
        stats = broker.configure_log(logs=logs, retention_ms=retention)
    _show_stats(stats, as_json=as_json)


@log_group.command("read")
@click.option("--log", "number", type=int, default=0, show_default=True, help="Which log.")
@click.option("--begin", type=int, default=0, show_default=True, help="First offset.")
@click.option("--limit", type=int, default=20, show_default=True, help="Messages at the most.")
@store_option
def read(store: str, number: int, begin: int, limit: int, *, as_json: bool) -> None:
    """Show what was published, in order."""
    with open_to_look(store) as broker:
        page = broker.read_log(number, begin=begin, limit=limit)
    if as_json:
        emit_json(page.records)
        return
    show_table(
        (":offset", "published", "group", ":priority", ":size", "attributes"),
        [
            (
                r.message_id,
                when(r.published_at_ms),
                r.group,
                r.priority,
                r.size,
                r.attributes,
            )
            for r in page.records
        ],
        empty="nothing there",
    )


def _show_stats(stats: LogStats, *, as_json: bool) -> None:
    if as_json:
        emit_json(stats)
        return
    show_table(("log", ":value"), list(plain(stats).items()), empty="")


@click.command("route")
@click.option("--limit", type=int, default=100_000, show_default=True,
              help="Messages of each log at the most.")  # fmt: skip
@store_option
def route(store: str, limit: int, *, as_json: bool) -> None:
    """Put what the logs hold into the queues.

    For a store whose routing is pipeline, where no pipeline does it.
    """
    with open_store(store) as broker:
        read_count = route_once(broker, limit=limit)
        stats = broker.log_stats()
    if as_json:
        emit_json({"read": read_count, "routed_up_to": stats.routed_up_to, "end": stats.end})
    else:
        click.echo(
            f"read {read_count} messages; routed up to offset {stats.routed_up_to} of {stats.end}"
        )


def _place(value: str | None) -> int | datetime | None:
    """Turn an offset or a time into what the broker takes."""
    if value is None:
        return None
    if value.isdecimal():
        return int(value)
    try:
        return datetime.fromisoformat(value).astimezone()
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is neither an offset nor a time such as 2030-01-31T08:00:00+00:00"
        ) from None


@click.command("backfill")
@click.argument("queue")
@click.option("--from", "begin", metavar="OFFSET|TIME", help="By default all that is kept.")
@click.option("--to", "end", metavar="OFFSET|TIME", help="By default all that has been routed.")
@store_option
def backfill(store: str, queue: str, begin: str | None, end: str | None, *, as_json: bool) -> None:
    """Fill a queue from the log with what it wants and has not had.

    A backfill that was interrupted goes on where it stopped; nothing comes in twice.
    """
    first = _place(begin)
    with open_store(store) as broker, progress_bar(f"filling {queue}") as bar:
        done = broker.backfill(
            queue,
            from_="earliest" if first is None else first,
            to=_place(end),
            progress=None if bar is None else lambda sums, last: bar(sums.next, last),
        )
    if as_json:
        emit_json(done)
    else:
        click.echo(
            f"looked at {done.scanned} messages, added {done.added} to {queue}"
            + (f"; {done.missing} have no payload any more" if done.missing else "")
        )


commands: Final = {"log": log_group, "route": route, "backfill": backfill}
