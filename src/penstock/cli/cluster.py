"""A store on a SQL database that many processes share: its tokens and zones, and its ring."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import click

from penstock.cli.common import (
    duration,
    emit_json,
    plain,
    progress_bar,
    show_table,
    store_option,
)
from penstock.clock import SystemClock
from penstock.limits import MAX_RING_SIZE
from penstock.store.sql.location import parse_sql

if TYPE_CHECKING:
    from penstock.store.sql.inspect import ClusterStatus
    from penstock.store.sql.store import SqlStore

# Tokens that are shown of a large ring; JSON has them all.
SHOWN: Final = 20
# Between two looks at how far the re-hash has got.
LOOK_S: Final = 1.0
SWEEP_BUDGET: Final = 1_000


@click.group("cluster")
def cluster() -> None:
    """Look at a store on a SQL database, and change its ring."""


def _open(url: str) -> closing[SqlStore]:
    """Open a store that is there."""
    place = parse_sql(url)
    try:
        from penstock.store.sql.store import open_store  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error.name} is missing: pip install penstock[sql]") from None
    clock = SystemClock()
    return closing(
        open_store(
            place,
            store_id=0,
            routing=None,
            random=clock.random,
            clock=clock.now_ms,
            create=False,
        )
    )


@cluster.command("status")
@store_option
def status(store: str, *, as_json: bool) -> None:
    """Show tokens, zones, and how far a change of the ring has got."""
    with _open(store) as opened:
        _show(opened.cluster_status(opened.server_ms()), {}, as_json=as_json)


def _show(now: ClusterStatus, more: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        emit_json({**plain(now), "rehashed": now.rehashed, **more})
        return
    rehash = "all have the token of this ring" if not now.old_tokens else (
        f"{now.old_tokens:,} of {now.zones:,} have the token of another ring: "
        f"{now.rehashed:.1%} re-hashed"
    )  # fmt: skip
    click.echo(
        f"store {now.store_id}, routing {now.routing}; ring of {now.ring_size:,}, claims look at "
        f"tokens below {now.ring_high:,}\n"
        f"{now.zones:,} zones, {now.empty_zones:,} empty; {rehash}\n"
        f"{now.vested:,} vested, the oldest for {now.oldest_lag_ms:,} ms\n"
        f"{now.waiting:,} messages waiting, {now.in_flight:,} in flight"
    )
    fullest = sorted(now.tokens, key=lambda each: (-each.pointers, each.token))[:SHOWN]
    rows = [
        (each.token, f"{each.pointers:,}", f"{each.vested:,}", f"{each.oldest_lag_ms:,}",
         "" if each.token < now.ring_size else "beyond the ring")
        for each in sorted(fullest, key=lambda each: each.token)
    ]  # fmt: skip
    show_table(
        (":token", ":pointers", ":vested", ":oldest lag ms", ""),
        rows,
        empty="no token has pointers",
    )
    if len(now.tokens) > SHOWN:
        click.echo(f"the fullest {SHOWN} of {len(now.tokens):,} tokens that have pointers")


@cluster.command("resize")
@click.argument("ring_size", metavar="N", type=int)
@click.option("--wait", is_flag=True, help="Stay until no zone has a token of another ring.")
@click.option("--timeout", metavar="DURATION", help="Wait no longer than this.")
@store_option
@click.pass_context
def resize(
    ctx: click.Context, ring_size: int, timeout: str | None, store: str, *, wait: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Set how many tokens new zones choose from; brokers may be running.

    A zone keeps its token until it has been empty for half a minute. Ends with 1 if the time is
    over before the last zone has the token of this ring.
    """
    timeout_ms = None if timeout is None else duration(timeout)
    if not 1 <= ring_size <= MAX_RING_SIZE:
        raise click.BadParameter(f"{ring_size} is not from 1 to {MAX_RING_SIZE:,}", param_hint="N")
    with _open(store) as opened:
        opened.set_ring_size(ring_size, opened.server_ms())
        if wait and _wait(opened, timeout_ms):
            # Claims need not look at the tokens of the old ring any more.
            opened.set_ring_size(ring_size, opened.server_ms())
        collected = opened.zones.collected
        now = opened.cluster_status(opened.server_ms())
    _show(now, {"this_process": {"collected": collected}}, as_json=as_json)
    if wait and not as_json:
        click.echo(f"{collected:,} zones were collected by this process")
    ctx.exit(1 if wait and now.old_tokens else 0)


@cluster.command("split")
@click.argument("queue")
@store_option
def split(queue: str, store: str, *, as_json: bool) -> None:
    """Give each token of QUEUE a range of its own, which another node may serve (CockroachDB)."""
    with _open(store) as opened:
        made = opened.split_tokens(queue, opened.server_ms())
    if as_json:
        emit_json({"queue": queue, "ranges": made})
    else:
        click.echo(f"{queue} has a range for each of {made:,} tokens")


def _wait(store: SqlStore, timeout_ms: int | None) -> bool:
    """Wait for the last zone of another ring to be collected; false if the time is over."""
    end_ms = None if timeout_ms is None else store.server_ms() + timeout_ms
    most = 0
    with progress_bar("re-hashing") as progress:
        while (old := store.count_old_tokens()[1]) > 0:
            most = max(most, old)
            if progress is not None:
                progress(most - old, most)
            if end_ms is not None and store.server_ms() >= end_ms:
                return False
            # No broker may be running that would collect them.
            collected = store.zones.collected
            store.sweep(store.server_ms(), SWEEP_BUDGET)
            if store.zones.collected == collected:
                threading.Event().wait(LOOK_S)
    return True
