"""The metadata log: look at it, route from it, fill a queue from it."""

from __future__ import annotations

from datetime import datetime

import click

from penstock.broker.reader import route_once
from penstock.cli.common import (
    answer,
    duration,
    open_store,
    open_to_look,
    progress_bar,
    show,
    show_fields,
    store_option,
)


@click.group("log")
def log_group() -> None:
    """Look at the metadata log, or change how it is kept."""


@log_group.command("stats")
@store_option
def log_stats(store: str, *, as_json: bool) -> None:
    """Show offsets, logs, cursors and retention."""
    with open_to_look(store) as broker:
        stats = broker.log_stats()
    show_fields(stats, "log", ":value", as_json=as_json)


@log_group.command("configure")
@click.option("--logs", type=int, help="Spread messages over so many logs from here on.")
@click.option("--retention", type=duration, help="Keep the log for so long; 0: for ever.")
@store_option
def configure(store: str, logs: int | None, retention: int | None, *, as_json: bool) -> None:
    """Change the number of logs, or how long they are kept."""
    with open_store(store) as broker:
        stats = broker.configure_log(logs=logs, retention_ms=retention)
    show_fields(stats, "log", ":value", as_json=as_json)


@log_group.command("read")
@click.option("--log", "number", type=int, default=0, show_default=True, help="Which log.")
@click.option("--begin", type=int, default=0, show_default=True, help="First offset.")
@click.option("--limit", type=int, default=20, show_default=True, help="Messages at the most.")
@store_option
def read(store: str, number: int, begin: int, limit: int, *, as_json: bool) -> None:
    """Show what was published, in order."""
    with open_to_look(store) as broker:
        page = broker.read_log(number, begin=begin, limit=limit)
    about = (":offset=message_id", "published=published_at_ms", "group")
    columns = (*about, ":priority", ":size", "attributes")
    show(page.records, columns, as_json=as_json, empty="nothing there")


@click.command("route")
@click.option(
    "--limit",
    type=int,
    default=100_000,
    show_default=True,
    help="Messages of each log at the most.",
)
@store_option
def route(store: str, limit: int, *, as_json: bool) -> None:
    """Put what the logs hold into the queues.

    For a store whose routing is pipeline, where no pipeline does it.
    """
    with open_store(store) as broker:
        count = route_once(broker, limit=limit)
        stats = broker.log_stats()
    answer(
        {"read": count, "routed_up_to": stats.routed_up_to, "end": stats.end},
        f"read {count} messages; routed up to offset {stats.routed_up_to} of {stats.end}",
        as_json=as_json,
    )


def _offset_or_time(value: str | None) -> int | datetime | None:
    """Read an offset or a time of an option."""
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
    first = _offset_or_time(begin)
    with open_store(store) as broker, progress_bar(f"filling {queue}") as bar:
        done = broker.backfill(
            queue,
            from_="earliest" if first is None else first,
            to=_offset_or_time(end),
            progress=None if bar is None else lambda sums, last: bar(sums.next, last),
        )
    text = f"looked at {done.scanned} messages, added {done.added} to {queue}"
    if done.missing:
        text += f"; {done.missing} have no payload any more"
    answer(done, text, as_json=as_json)
