"""A store on a SQL database that many processes share: its tokens and zones, and its ring."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import click

from penstock.clock import SystemClock
from penstock.commands.common import (
    duration,
    emit_json,
    plain,
    progress_bar,
    show_table,
    store_option,
)
from penstock.limits import DEFAULT_SWEEP_BUDGET, MAX_RING_SIZE
from penstock.opening import sql_place

if TYPE_CHECKING:
    from penstock.stores.sql import SqlStore
    from penstock.stores.sql.status import ClusterLook, ClusterStatus

__all__ = ["commands"]

# Tokens that are shown of a large ring; JSON has them all.
SHOWN: Final = 20
# Between two looks at how far the re-hash has got.
LOOK_S: Final = 1.0


@click.group("cluster")
def cluster() -> None:
    """Look at a store on a SQL database, and change its ring while brokers run."""


def _look(url: str) -> ClusterLook:
    place = sql_place(url)
    try:
        from penstock.stores.sql.status import ClusterLook  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error.name} is missing: pip install penstock[sql]") from None
    return ClusterLook(place.conninfo, schema=place.schema, dialect=place.dialect)


def _open(url: str, now_ms: int) -> SqlStore:
    from penstock.stores.sql import open_store  # noqa: PLC0415 - an extra

    place = sql_place(url)
    return open_store(
        place.conninfo,
        schema=place.schema,
        dialect=place.dialect,
        store_id=0,
        routing=None,
        random=SystemClock().random,
        now_ms=now_ms,
    )


@cluster.command("status")
@store_option
def status(store: str, *, as_json: bool) -> None:
    """Show tokens, zones, and how far a change of the ring has got."""
    with _look(store) as look:
        now = look.status()
    if as_json:
        emit_json({**plain(now), "rehashed": now.rehashed})
    else:
        _show(now)


def _show(now: ClusterStatus) -> None:
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
        (":token", ":pointers", ":vested", ":oldest lag ms", ""), rows, empty="no token has pointers"
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
    """Have new zones take one of N tokens; brokers may be running.

    A zone keeps its token until it has been empty for half a minute. Ends with 1 if the time is
    over before the last zone has the token of this ring.
    """
    timeout_ms = None if timeout is None else duration(timeout)
    if not 1 <= ring_size <= MAX_RING_SIZE:
        raise click.BadParameter(f"{ring_size} is not from 1 to {MAX_RING_SIZE:,}", param_hint="N")
    collected = collisions = 0
    with _look(store) as look:
        opened = _open(store, look.now_ms())
        try:
            opened.set_ring_size(ring_size, look.now_ms())
            if wait and _wait(look, opened, timeout_ms):
                # Claims need not look at the tokens of the old ring any more.
                opened.set_ring_size(ring_size, look.now_ms())
            collected, collisions = opened.core.zones.collected, opened.core.zones.collisions
        finally:
            opened.close()
        now = look.status()
    if as_json:
        counters = {"collected": collected, "collisions": collisions}
        emit_json({**plain(now), "rehashed": now.rehashed, "this_process": counters})
    else:
        _show(now)
        if wait:
            click.echo(f"{collected:,} zones were collected by this process")
    ctx.exit(1 if wait and now.old_tokens else 0)


def _wait(look: ClusterLook, store: SqlStore, timeout_ms: int | None) -> bool:
    """Wait for the last zone of another ring to be collected; false if the time is over."""
    end_ms = None if timeout_ms is None else look.now_ms() + timeout_ms
    most = look.old_tokens()
    with progress_bar("re-hashing") as progress:
        while (old := look.old_tokens()) > 0:
            if progress is not None:
                most = max(most, old)
                progress(most - old, most)
            now_ms = look.now_ms()
            if end_ms is not None and now_ms >= end_ms:
                return False
            # No broker may be running that would collect them.
            if not store.sweep(now_ms, DEFAULT_SWEEP_BUDGET).removed:
                threading.Event().wait(LOOK_S)
    return True


commands: Final = {"cluster": cluster}
