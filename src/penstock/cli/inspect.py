"""Looking without touching: browse and attempts."""

from __future__ import annotations

from typing import Final

import click
import msgspec

from penstock.cli.common import (
    emit_json,
    open_to_look,
    preview,
    read_only_option,
    show_table,
    store_option,
    when,
)
from penstock.model import State

__all__ = ["commands"]


@click.command("browse")
@click.argument("queue")
@click.option(
    "--state",
    type=click.Choice([state.value for state in State]),
    default=State.AVAILABLE.value,
    show_default=True,
    help="Which messages.",
)
@click.option("--limit", type=int, default=20, show_default=True, help="How many at most.")
@click.option("--cursor", help="Go on after a page: what the page gave as its next cursor.")
@read_only_option
@store_option
def browse(
    queue: str,
    state: str,
    limit: int,
    cursor: str | None,
    store: str,
    *,
    read_only: bool,
    as_json: bool,
) -> None:
    """Look at messages without claiming them."""
    with open_to_look(store, read_only=read_only) as broker:
        page = broker.browse(queue, state=state, limit=limit, cursor=cursor)
    if as_json:
        emit_json({"entries": list(page), "next_cursor": page.next_cursor})
        return
    times = {"done": "ended", "failed": "ended", "in_flight": "lease ends"}
    show_table(
        (
            ":id",
            "payload",
            "attributes",
            "group",
            ":attempts",
            "published",
            times.get(state, "visible"),
            "note",
        ),
        [
            (
                entry.message_id,
                preview(entry.payload),
                msgspec.json.encode(entry.attributes).decode(),
                entry.group,
                entry.attempts,
                when(entry.published_at_ms),
                when(entry.ended_at_ms or entry.lease_deadline_ms or entry.visible_at_ms),
                entry.reason or entry.consumer,
            )
            for entry in page
        ],
        empty=f"no messages are {state.replace('_', ' ')}",
    )
    if page.next_cursor is not None:
        click.echo(f"there is more: --cursor {page.next_cursor}")


@click.command("attempts")
@click.argument("queue")
@click.argument("message_id", type=int)
@read_only_option
@store_option
def attempts(queue: str, message_id: int, store: str, *, read_only: bool, as_json: bool) -> None:
    """Show every attempt at a message."""
    with open_to_look(store, read_only=read_only) as broker:
        found = broker.attempts(queue, message_id)
    if as_json:
        emit_json(found)
        return
    show_table(
        (":attempt", "consumer", "claimed", "ended", "how", "reason"),
        [
            (
                a.number,
                a.consumer,
                when(a.claimed_at_ms),
                when(a.ended_at_ms),
                a.end.value,
                a.reason,
            )
            for a in found
        ],
        empty="no attempts",
    )


commands: Final = {"browse": browse, "attempts": attempts}
