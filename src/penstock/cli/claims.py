"""What a worker does: claim, ack, release, extend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from penstock.cli.common import (
    duration,
    emit_json,
    open_store,
    preview,
    show_table,
    store_option,
    when,
)

if TYPE_CHECKING:
    from penstock.model import Outcome

__all__ = ["commands"]


@click.command("claim")
@click.argument("queue")
@click.option("--limit", type=int, default=1, show_default=True, help="How many at most.")
@click.option("--lease", "lease_ms", type=duration, help="How long to hold them.")
@click.option("--wait", "wait_ms", type=duration, default=0, help="Wait for the first so long.")
@click.option("--consumer", default="penstock-cli", show_default=True, help="Who is claiming.")
@store_option
def claim(
    queue: str,
    limit: int,
    lease_ms: int | None,
    wait_ms: int,
    consumer: str,
    store: str,
    *,
    as_json: bool,
) -> None:
    """Take messages under a lease."""
    with open_store(store) as broker:
        deliveries = broker.claim(
            queue, limit=limit, lease_ms=lease_ms, wait_ms=wait_ms, consumer=consumer
        )
    if as_json:
        emit_json(deliveries)
        return
    show_table(
        (":id", "payload", "group", ":attempt", "lease ends", "receipt"),
        [
            (
                d.message_id,
                preview(d.payload),
                d.group,
                d.attempts,
                when(d.lease_deadline_ms),
                d.receipt,
            )
            for d in deliveries
        ],
        empty="nothing to claim",
    )


@click.command("ack")
@click.argument("receipts", metavar="RECEIPT...", nargs=-1, required=True)
@store_option
def ack(receipts: tuple[str, ...], store: str, *, as_json: bool) -> None:
    """Settle messages as done."""
    with open_store(store) as broker:
        outcomes = broker.ack(receipts)
    _show_outcomes(outcomes, as_json=as_json)


@click.command("release")
@click.argument("receipts", metavar="RECEIPT...", nargs=-1, required=True)
@click.option("--delay", "delay_ms", type=duration, help="Instead of the queue's back-off.")
@click.option("--reason", default="", help="Why; kept in the history.")
@store_option
def release(
    receipts: tuple[str, ...], delay_ms: int | None, reason: str, store: str, *, as_json: bool
) -> None:
    """Give messages back, to be tried again or to fail."""
    with open_store(store) as broker:
        outcomes = broker.release(receipts, delay_ms=delay_ms, reason=reason)
    _show_outcomes(outcomes, as_json=as_json)


@click.command("extend")
@click.argument("receipts", metavar="RECEIPT...", nargs=-1, required=True)
@click.option("--lease", "lease_ms", type=duration, required=True, help="From now, so long.")
@store_option
def extend(receipts: tuple[str, ...], lease_ms: int, store: str, *, as_json: bool) -> None:
    """Move the end of a lease."""
    with open_store(store) as broker:
        outcomes = broker.extend(receipts, lease_ms=lease_ms)
    _show_outcomes(outcomes, as_json=as_json)


def _show_outcomes(outcomes: list[Outcome], *, as_json: bool) -> None:
    if as_json:
        emit_json(outcomes)
    else:
        show_table(
            ("receipt", "outcome", "lease ends"),
            [(o.receipt, o.status.value, when(o.lease_deadline_ms)) for o in outcomes],
            empty="no receipts",
        )
    refused = sum(not outcome for outcome in outcomes)
    if refused:
        # A script must see that something was not settled.
        raise click.ClickException(f"{refused} of {len(outcomes)} receipts were refused")


commands: Final = {"claim": claim, "ack": ack, "release": release, "extend": extend}
