"""Queues: list, make, change, remove, count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
import msgspec

from penstock.cli.common import (
    duration,
    emit_json,
    open_store,
    open_to_look,
    plain,
    read_only_option,
    show_table,
    store_option,
)
from penstock.errors import StoreDamaged

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.broker.broker import Broker
    from penstock.broker.reader import Reader
    from penstock.model import QueueSpec, QueueStats

__all__ = ["commands"]

_Command = TypeVar("_Command", bound="Callable[..., Any]")

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
    ("--dead-letter", "dead_letter", str, "The queue that what fails is moved to; '': none."),
)


def _settings(command: _Command) -> _Command:
    for flag, name, kind, text in reversed(_SETTINGS):
        command = click.option(flag, name, type=kind, help=text)(command)
    return command


def _label(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """Take NAME=VALUE apart."""
    labels = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals:
            raise click.BadParameter(f"{each!r}: give NAME=VALUE")
        labels[name] = value
    return labels


_labels = click.option(
    "--label",
    "labels",
    metavar="NAME=VALUE",
    multiple=True,
    callback=_label,
    help="Text to keep with the queue; can be repeated.",
)


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


@click.command("queues")
@store_option
def list_queues(store: str, *, as_json: bool) -> None:
    """List the queues."""
    with open_to_look(store) as broker:
        specs = broker.queues()
        if as_json:
            emit_json(specs)
            return
        counted, damage = _count(broker, [spec.name for spec in specs])
    show_table(
        ("queue", "ordering", "filter", ":available", ":delayed", ":in flight", ":failed"),
        [
            (spec.name, spec.ordering.value, spec.filter, *_depths(counted.get(spec.name)))
            for spec in specs
        ],
        empty="no queues",
    )
    if damage is not None:
        raise damage


def _count(
    broker: Broker | Reader, names: list[str]
) -> tuple[dict[str, QueueStats], StoreDamaged | None]:
    """Count each queue's messages, as far as they can be read; and say what could not be."""
    counted = {}
    damage = None
    for name in names:
        try:
            counted[name] = broker.stats(name)
        except StoreDamaged as error:
            damage = damage or error
    return counted, damage


def _depths(stats: QueueStats | None) -> tuple[object, ...]:
    if stats is None:
        return ("?",) * 4
    return (stats.available, stats.delayed, stats.in_flight, stats.failed)


@click.command("create")
@click.argument("queue")
@click.option("--fifo", is_flag=True, help="Deliver each group in order, one lease at a time.")
@_settings
@_labels
@store_option
def create(queue: str, store: str, *, fifo: bool, as_json: bool, **settings: Any) -> None:
    """Make a queue."""
    ordering = "fifo" if fifo else "standard"
    with open_store(store, make=True) as broker:
        spec = broker.create_queue(queue, ordering=ordering, **_given(settings))
    _show_spec(spec, as_json=as_json)


@click.command("update")
@click.argument("queue")
@_settings
@_labels
@click.option("--no-label", "dropped", metavar="NAME", multiple=True, help="Remove a label.")
@store_option
def update(
    queue: str,
    store: str,
    *,
    labels: dict[str, str],
    dropped: tuple[str, ...],
    as_json: bool,
    **settings: Any,
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
    _show_spec(spec, as_json=as_json)


@click.command("delete")
@click.argument("queue")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--drain", is_flag=True, help="Take nothing more in; remove it once it is empty.")
@store_option
def delete(queue: str, store: str, *, yes: bool, drain: bool, as_json: bool) -> None:
    """Remove a queue with every message in it."""
    with open_store(store) as broker:
        broker.queue(queue)
        if not yes and not drain:
            click.confirm(f"Remove queue {queue} and every message in it?", abort=True, err=True)
        removed = broker.delete_queue(queue, drain=drain)
        still_there = any(spec.name == queue for spec in broker.queues())
    if drain and still_there and not as_json:
        click.echo(f"queue {queue} takes nothing more in and goes once it is empty")
    elif as_json:
        emit_json({"queue": queue, "removed": removed})
    else:
        click.echo(f"removed queue {queue} with {removed} messages")


@click.command("stats")
@click.argument("queue", required=False)
@read_only_option
@store_option
def stats(queue: str | None, store: str, *, read_only: bool, as_json: bool) -> None:
    """Show depths and totals."""
    with open_to_look(store, read_only=read_only) as broker:
        names = [spec.name for spec in broker.queues()] if queue is None else [queue]
        counted, damage = _count(broker, names)
        whole = broker.store_stats()
    if as_json:
        emit_json({"queues": list(counted.values()), "store": whole})
    else:
        for each in counted.values():
            _show_stats(each)
        if queue is None:
            rows = msgspec.structs.asdict(whole).items()
            show_table(("store", ":count"), list(rows), empty="")
    if damage is not None:
        raise damage


def _show_stats(counted: QueueStats) -> None:
    rows = [(name, value) for name, value in plain(counted).items() if name != "queue"]
    show_table((counted.queue, ":count"), rows, empty="")


def _show_spec(spec: QueueSpec, *, as_json: bool) -> None:
    if as_json:
        emit_json(spec)
        return
    rows = [(name, value) for name, value in plain(spec).items() if name != "name"]
    show_table((spec.name, "setting"), rows, empty="")


commands: Final = {
    "queues": list_queues,
    "create": create,
    "update": update,
    "delete": delete,
    "stats": stats,
}
