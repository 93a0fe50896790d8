"""Many messages at once: redrive, move, purge, sweep."""

from __future__ import annotations

from typing import Final

import click

from penstock.cli.common import emit_json, open_store, plain, show_table, store_option
from penstock.model import State, SweepCounts

__all__ = ["commands"]


@click.command("redrive")
@click.argument("queue")
@click.option("--id", "ids", type=int, multiple=True, help="Only this message; can be repeated.")
@click.option("--where", help='Only those that a filter selects, such as "price > 10".')
@store_option
def redrive(
    queue: str, ids: tuple[int, ...], where: str | None, store: str, *, as_json: bool
) -> None:
    """Make failed messages available again."""
    with open_store(store) as broker:
        count = broker.redrive(queue, message_ids=ids or None, where=where)
    if as_json:
        emit_json({"queue": queue, "redriven": count})
    else:
        click.echo(f"{count} messages are available again")


@click.command("move")
@click.argument("queue")
@click.argument("to")
@click.option(
    "--state",
    type=click.Choice([State.FAILED.value, State.AVAILABLE.value, State.DELAYED.value]),
    default=State.FAILED.value,
    show_default=True,
    help="Which messages.",
)
@click.option("--id", "ids", type=int, multiple=True, help="Only this message; can be repeated.")
@click.option("--limit", type=click.IntRange(1), help="At most so many.")
@store_option
def move(
    queue: str,
    to: str,
    state: str,
    ids: tuple[int, ...],
    limit: int | None,
    store: str,
    *,
    as_json: bool,
) -> None:
    """Move messages into another queue."""
    with open_store(store) as broker:
        count = broker.move(queue, to, state=state, message_ids=ids or None, limit=limit)
    if as_json:
        emit_json({"queue": queue, "to": to, "moved": count})
    else:
        click.echo(f"moved {count} messages to {to}")


@click.command("purge")
@click.argument("queue")
@click.option(
    "--state",
    "states",
    type=click.Choice([state.value for state in State]),
    multiple=True,
    default=(State.AVAILABLE.value, State.DELAYED.value),
    show_default=True,
    help="Which messages; can be repeated.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@store_option
def purge(queue: str, states: tuple[str, ...], store: str, *, yes: bool, as_json: bool) -> None:
    """Remove messages by state."""
    with open_store(store) as broker:
        broker.queue(queue)
        if not yes:
            which = ", ".join(states)
            click.confirm(f"Remove messages of {queue} that are {which}?", abort=True, err=True)
        count = broker.purge(queue, states=states)
    if as_json:
        emit_json({"queue": queue, "removed": count})
    else:
        click.echo(f"removed {count} messages")


@click.command("sweep")
@store_option
def sweep(store: str, *, as_json: bool) -> None:
    """Do what is due: expiry, delays, retention."""
    summed = SweepCounts()
    with open_store(store) as broker:
        while True:
            counts = broker.sweep()
            summed = SweepCounts(
                leases_expired=summed.leases_expired + counts.leases_expired,
                came_due=summed.came_due + counts.came_due,
                failed=summed.failed + counts.failed,
                moved=summed.moved + counts.moved,
                removed=summed.removed + counts.removed,
                dedup_forgotten=summed.dedup_forgotten + counts.dedup_forgotten,
                next_due_ms=counts.next_due_ms,
            )
            if not counts.total:
                break
    if as_json:
        emit_json(summed)
        return
    show_table(("swept", ":count"), list(plain(summed).items())[:-1], empty="")


commands: Final = {"redrive": redrive, "move": move, "purge": purge, "sweep": sweep}
