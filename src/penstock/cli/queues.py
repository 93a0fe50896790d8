"""Queues: list, make, change, remove, count, watch; and trying out their filters."""

from __future__ import annotations

import os
import sys
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from penstock.cli import common
from penstock.cli.common import duration, open_store
from penstock.client import Client
from penstock.clock import SystemClock
from penstock.errors import QueueExists, QueueNotFound, StoreDamaged
from penstock.filters import Row, explain, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.table import Table

    from penstock.broker.broker import Broker
    from penstock.broker.reader import Reader
    from penstock.model import QueueStats

_SETTINGS: Final = (
    ("--filter", "filter", str, "Which messages it takes, such as \"kind = 'book'\"."),
    ("--lease", "lease_ms", duration, "How long a claim holds a message."),
    ("--max-attempts", "max_attempts", int, "Claims before a message fails."),
    ("--backoff-base", "backoff_base_ms", duration, "Wait before the second attempt."),
    ("--backoff-cap", "backoff_cap_ms", duration, "Longest wait between attempts."),
    ("--delay", "delay_ms", duration, "Wait before a message can be claimed."),
    ("--done-retention", "done_retention_ms", duration, "Keep done messages; 0: for ever."),
    ("--failed-retention", "failed_retention_ms", duration, "Keep failed ones; 0: for ever."),
    ("--unclaimed-retention", "unclaimed_retention_ms", duration, "Keep unclaimed ones."),
    ("--bucket-exponent", "bucket_exponent", int, "Bucket size 10^n, in the buckets design."),
    ("--description", "description", str, "Words for people."),
    ("--max-messages", "max_messages", int, "Messages that may wait or be in flight; 0: any."),
    ("--max-bytes", "max_bytes", int, "Bytes of their payloads; 0: any."),
    (
        "--overflow",
        "overflow",
        click.Choice(["refuse", "drop_oldest"]),
        "What happens to more: refuse them, or let the oldest fail.",
    ),
    ("--dead-letter", "dead_letter", str, "The queue that what fails is moved to; '': none."),
)

# Rows where there is no screen that decides.
ROWS: Final = 50
# Lines of a screen that are not rows.
_FRAME_LINES: Final = 6
# The orders of top: by a figure, its largest values first, or by name.
SORTS: Final = {
    "queue": "queue",
    "available": "available",
    "in_flight": "in_flight",
    "failed": "failed",
    "oldest": "oldest_age_ms",
    "in": "in_per_second",
    "done": "done_per_second",
}
_DEPTHS: Final = ("available", "delayed", "in_flight", "done", "failed")
_HEADINGS: Final = [f":{name.replace('_', ' ')}" for name in _DEPTHS]

_settings = common.options(
    *(click.option(flag, name, type=kind, help=text) for flag, name, kind, text in _SETTINGS),
    click.option(
        "--label",
        "labels",
        metavar="NAME=VALUE",
        multiple=True,
        callback=lambda _ctx, _parameter, given: common.pairs_of(given),
        help="Text to keep with the queue; can be repeated.",
    ),
)


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


@click.command("queues")
@common.reads_store
def list_queues(broker: Broker | Reader) -> None:
    """List the queues."""
    specs = broker.queues()
    if common.wants_json():
        common.emit_json(specs)
        return
    counted, damage = count(broker, [spec.name for spec in specs])
    rows = []
    for spec in specs:
        depths = [getattr(counted.get(spec.name), depth, "?") for depth in _DEPTHS]
        rows.append((spec.name, spec.ordering.value, spec.filter, *depths))
    common.show_table(("queue", "ordering", "filter", *_HEADINGS), rows, empty="no queues")
    if damage is not None:
        raise damage


def count(
    broker: Broker | Reader, names: list[str]
) -> tuple[dict[str, QueueStats], StoreDamaged | None]:
    """Count the messages of each queue that can be read; return the damage of the others."""
    known: dict[str, QueueStats] = {}
    if isinstance(broker, Client) and len(names) > 1:
        # A few answers for all queues, not one for each.
        known = {each.queue: each for each in broker.all_stats()}
    counted = {}
    damage = None
    for name in names:
        try:
            counted[name] = known.get(name) or broker.stats(name)
        except QueueNotFound:
            # It was deleted since the names were read.
            continue
        except StoreDamaged as error:
            damage = damage or error
    return counted, damage


@click.command("create")
@click.argument("queue")
@click.option("--fifo", is_flag=True, help="Deliver each group in order, one lease at a time.")
@_settings
@common.store_option
def create(queue: str, store: str, *, fifo: bool, **settings: Any) -> None:
    """Make a queue."""
    ordering = "fifo" if fifo else "standard"
    with open_store(store, make=True) as broker:
        try:
            spec = broker.create_queue(queue, ordering=ordering, **_given(settings))
        except QueueExists as error:
            text = str(error).replace("use update_queue()", f"penstock update {queue} changes them")
            raise QueueExists(text) from None
    common.show_fields(spec, spec.name, "setting", skip="name")


@click.command("update")
@click.argument("queue")
@_settings
@click.option("--no-label", "dropped", metavar="NAME", multiple=True, help="Remove a label.")
@common.store_option
def update(
    queue: str, store: str, labels: dict[str, str], dropped: tuple[str, ...], **settings: Any
) -> None:
    """Change settings of a queue."""
    changes = _given(settings)
    if not changes and not labels and not dropped:
        raise click.UsageError("nothing to change: give at least one setting")
    with open_store(store) as broker:
        if labels or dropped:
            kept = {**broker.queue(queue).labels, **labels}
            changes["labels"] = {n: value for n, value in kept.items() if n not in dropped}
        spec = broker.update_queue(queue, **changes)
    common.show_fields(spec, spec.name, "setting", skip="name")


@click.command("delete")
@click.argument("queue")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--drain", is_flag=True, help="Take nothing more in; remove it once it is empty.")
@common.changes_store
def delete(broker: Broker, queue: str, *, yes: bool, drain: bool) -> None:
    """Remove a queue with every message in it."""
    broker.queue(queue)
    if not yes and not drain:
        click.confirm(f"Remove queue {queue} and every message in it?", abort=True, err=True)
    removed = 0 if drain else common.purge_in_steps(broker, queue, common.STATES)
    # A sweep may have removed one that drains, as soon as it was empty.
    with suppress(*([QueueNotFound] if removed else [])):
        removed += broker.delete_queue(queue, drain=drain)
    still_there = any(spec.name == queue for spec in broker.queues())
    text = f"removed queue {queue} with {removed} messages"
    if drain and still_there:
        text = f"queue {queue} takes nothing more in and goes once it is empty"
    common.answer({"queue": queue, "removed": removed}, text)


@click.command("stats")
@click.argument("queue", required=False)
@click.option("--all", "every", is_flag=True, help="Show all queues, by name.")
@click.option("--top", type=click.IntRange(1), default=20, show_default=True,
              help="Show so many queues: those with the most live messages.")  # fmt: skip
@common.reads_store
def stats(broker: Broker | Reader, queue: str | None, top: int, *, every: bool) -> None:
    """Show depths and totals.

    Of one queue, or the sums of all, the queues with the most messages, and the store.
    """
    if queue is not None:
        # A key for one queue may not look at the whole store.
        one = broker.stats(queue)
        if common.wants_json():
            common.emit_json({"queues": [one]})
        else:
            common.show_fields(one, queue, skip="queue")
        return
    counted, damage = count(broker, [spec.name for spec in broker.queues()])
    found = list(counted.values())
    total = {name: sum(getattr(each, name) for each in found) for name in _DEPTHS}
    if not every:
        found = sorted(found, key=lambda each: (-_live(each), each.queue))[:top]
    whole = broker.store_stats()
    if common.wants_json():
        total = {"queues": len(counted), **total}
        common.emit_json({"queues": found, "total": total, "store": whole})
    else:
        rows = [(each.queue, *(getattr(each, name) for name in _DEPTHS)) for each in found]
        rows.append((f"all {len(counted)} queues", *total.values()))
        common.show_table(("queue", *_HEADINGS), rows)
        common.show_fields(whole, "store")
    if damage is not None:
        raise damage


def _live(stats: QueueStats) -> int:
    return stats.available + stats.delayed + stats.in_flight


# --- top ------------------------------------------------------------------------------------------


@click.command("top")
@click.option("--sort", type=click.Choice(list(SORTS)), default="available", show_default=True,
              help="What comes first.")  # fmt: skip
@click.option(
    "--limit", type=click.IntRange(1), help="Rows at the most.  [default: the screen, or 50]"
)
@click.option("--once", is_flag=True, help="Look twice, for the rates, print once, and end.")
@common.every_option
@common.store_option
def top(store: str, sort: str, limit: int | None, every_ms: int, *, once: bool) -> None:
    """Watch depths and rates of all queues.

    Ctrl-C ends it. With --json each look is a line; without a terminal that can show one look in
    place of another there is one.
    """
    as_json = common.wants_json()
    dumb = os.environ.get("TERM", "").lower() in {"dumb", "unknown"}
    once = once or not (as_json or (sys.stdout.isatty() and not dumb))
    clock = SystemClock()
    at = 0.0
    before: dict[str, QueueStats] = {}
    with (
        suppress(KeyboardInterrupt),
        _screen(on=not (once or as_json)) as draw,
        closing(common.polls(store, every_ms)) as looks,
    ):
        for number, broker in enumerate(looks):
            stats, _ = count(broker, [spec.name for spec in broker.queues()])
            now = clock.seconds()
            rows = [_figures(each, before.get(name), now - at) for name, each in stats.items()]
            rows.sort(key=lambda row: str(row["queue"]))
            if sort != "queue":
                rows.sort(key=lambda row: -(row[SORTS[sort]] or 0))
            at, before = now, stats
            if once and not number:
                continue
            if as_json:
                click.echo(msgspec.json.encode(rows[:limit]))
            else:
                draw(_table(rows, limit))
            if once:
                return


def _figures(stats: QueueStats, before: QueueStats | None, seconds: float) -> dict[str, Any]:
    """Return the row of a queue: depths, the age of its oldest waiting message, and rates."""
    last = before or stats
    came = stats.enqueued_total + stats.moved_in_total - last.enqueued_total - last.moved_in_total
    done = stats.acked_total - last.acked_total
    names = ("queue", "available", "delayed", "in_flight", "failed", "oldest_age_ms")
    return {
        **{name: getattr(stats, name) for name in names},
        # A queue that was made anew counts from 0 again.
        "in_per_second": round(max(0, came) / (seconds or 1), 1),
        "done_per_second": round(max(0, done) / (seconds or 1), 1),
    }


def _table(rows: list[dict[str, Any]], limit: int | None) -> Table:
    from rich import box  # noqa: PLC0415 - --json does without
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    room = limit or ROWS
    if sys.stdout.isatty():
        screen = max(1, os.get_terminal_size().lines - _FRAME_LINES)
        room = min(limit or screen, screen)
    available, failed = (sum(row[name] for row in rows) for name in ("available", "failed"))
    title = f"{len(rows):,} queues, {available:,} messages available, {failed:,} failed"
    table = Table(box=box.SIMPLE_HEAD, title=title)
    table.add_column("queue", overflow="fold")
    for heading in ("available", "delayed", "in flight", "failed", "oldest", "in/s", "done/s"):
        table.add_column(heading, justify="right")
    for row in rows[:room]:
        table.add_row(
            Text(row["queue"]),
            *(f"{row[name]:,}" for name in ("available", "delayed", "in_flight")),
            Text(f"{row['failed']:,}", style="red" if row["failed"] else ""),
            _age(row["oldest_age_ms"]),
            *(
                f"{rate:,.1f}" if (rate := row[f"{name}_per_second"]) else ""
                for name in ("in", "done")
            ),
        )
    if len(rows) > room:
        table.add_row(f"… and {len(rows) - room:,} more")
    return table


def _age(age_ms: int | None) -> str:
    if age_ms is None:
        return ""
    for unit, ms in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000)):
        if age_ms >= 2 * ms:
            return f"{age_ms // ms}{unit}"
    return f"{age_ms / 1000:.1f}s"


@contextmanager
def _screen(*, on: bool) -> Iterator[Callable[[Table], object]]:
    """Give a function that shows a table: in place of the one before, or below it."""
    from rich.console import Console  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120)
    if not on:
        yield console.print
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda table: live.update(table, refresh=True)


# --- filters --------------------------------------------------------------------------------------


def _attributes(ctx: click.Context, param: click.Parameter, given: str) -> dict[str, Any]:
    try:
        attributes: dict[str, Any] = msgspec.json.decode(given, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise click.BadParameter(f"not a JSON object: {error}", ctx, param) from None
    for name, value in attributes.items():
        if isinstance(value, dict | list):
            raise click.BadParameter(f"{name!r} is not flat: no lists or objects", ctx, param)
    return attributes


@click.group("filter")
def filter_group() -> None:
    """Try filters out."""


@filter_group.command("test")
@click.argument("expression")
@click.argument("attributes", callback=_attributes, default="{}")
@click.option("--group", default="", help="What the filter reads as group.")
@click.option("--priority", type=int, default=0, help="What it reads as priority.")
@click.option("--size", type=int, default=0, help="What it reads as size, in bytes.")
@click.option(
    "--published-at", type=int, help="What it reads as published_at, in ms.  [default: now]"
)
@common.json_option
def test(expression: str, published_at: int | None, **fields: Any) -> None:
    """Say whether a filter takes a message, and why: each condition with what it read.

    ATTRIBUTES is a JSON object, such as '{"kind": "book", "price": 12}'.
    """
    at_ms = SystemClock().now_ms() if published_at is None else published_at
    found = explain(parse(expression), Row(published_at_ms=at_ms, **fields))
    if common.wants_json():
        common.emit_json(
            {"matches": found.result is True, "explanation": common.plain_explanation(found)}
        )
        return
    common.show_explanation(found)
    matches = "matches" if found.result is True else "does not match"
    click.echo(f"{matches}: the filter is {common.WORDS[found.result]}")
