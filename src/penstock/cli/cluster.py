"""A store on a SQL database that many processes share: its tokens and zones, and its ring."""

from __future__ import annotations

import threading
from contextlib import ExitStack
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
from penstock.store.sql.location import sql_places

if TYPE_CHECKING:
    from penstock.store.sql.status import ClusterLook, ClusterStatus
    from penstock.store.sql.store import SqlStore

__all__ = ["commands"]

# Tokens that are shown of a large ring; JSON has them all.
SHOWN: Final = 20
# Between two looks at how far the re-hash has got.
LOOK_S: Final = 1.0
SWEEP_BUDGET: Final = 1_000


@click.group("cluster")
def cluster() -> None:
    """Look at a store on a SQL database, and change its ring."""


def _look(url: str, stack: ExitStack) -> dict[str, ClusterLook]:
    """Connect to each database of a store; by what it is called."""
    places = sql_places(url)
    try:
        from penstock.store.sql.status import ClusterLook  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error.name} is missing: pip install penstock[sql]") from None
    return {
        place.shown: stack.enter_context(
            ClusterLook(place.conninfo, schema=place.schema, dialect=place.dialect)
        )
        for place in places
    }


def _open(url: str, now_ms: int, stack: ExitStack) -> list[SqlStore]:
    """Open each database of a store by itself."""
    from penstock.store.sql.store import open_store  # noqa: PLC0415 - an extra

    places, stores = sql_places(url), []
    for number, place in enumerate(places):
        alone = len(places) == 1 and place.cluster is None
        store = open_store(
            place.conninfo,
            schema=place.schema,
            dialect=place.dialect,
            store_id=0,
            routing=None,
            random=SystemClock().random,
            now_ms=now_ms,
            cluster=number if place.cluster is None else place.cluster,
            # One of several: without their number it is opened by itself.
            clusters=1 if alone else 0,
        )
        stack.callback(store.close)
        stores.append(store)
    return stores


@cluster.command("status")
@store_option
def status(store: str, *, as_json: bool) -> None:
    """Show tokens, zones, and how far a change of the ring has got."""
    with ExitStack() as stack:
        found = {name: look.status() for name, look in _look(store, stack).items()}
    _tell(found, {}, as_json=as_json)


def _tell(found: dict[str, ClusterStatus], more: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        each = [{**plain(now), "rehashed": now.rehashed} for now in found.values()]
        emit_json({**each[0], **more} if len(each) == 1 else {"databases": each, **more})
        return
    for name, now in found.items():
        if len(found) > 1:
            click.echo(name)
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
    """Have new zones take one of N tokens; brokers may be running.

    A zone keeps its token until it has been empty for half a minute. Ends with 1 if the time is
    over before the last zone has the token of this ring.
    """
    timeout_ms = None if timeout is None else duration(timeout)
    if not 1 <= ring_size <= MAX_RING_SIZE:
        raise click.BadParameter(f"{ring_size} is not from 1 to {MAX_RING_SIZE:,}", param_hint="N")
    with ExitStack() as stack:
        looks = _look(store, stack)
        now_ms = next(iter(looks.values())).now_ms()
        stores = _open(store, now_ms, stack)
        for each in stores:
            each.set_ring_size(ring_size, now_ms)
        if wait and _wait(list(looks.values()), stores, timeout_ms):
            # Claims need not look at the tokens of the old ring any more.
            for each in stores:
                each.set_ring_size(ring_size, now_ms)
        collected = sum(each.core.zones.collected for each in stores)
        found = {name: look.status() for name, look in looks.items()}
    _tell(found, {"this_process": {"collected": collected}}, as_json=as_json)
    if wait and not as_json:
        click.echo(f"{collected:,} zones were collected by this process")
    ctx.exit(1 if wait and any(now.old_tokens for now in found.values()) else 0)


@cluster.command("split")
@click.argument("queue")
@store_option
def split(queue: str, store: str, *, as_json: bool) -> None:
    """Give each token of QUEUE a range of its own, which another node may serve (CockroachDB)."""
    with ExitStack() as stack:
        now_ms = next(iter(_look(store, stack).values())).now_ms()
        made = [each.split_tokens(queue, now_ms) for each in _open(store, now_ms, stack)]
    if as_json:
        emit_json({"queue": queue, "ranges": sum(made)})
    else:
        click.echo(f"{queue} has a range for each of {made[0]:,} tokens")


def _wait(looks: list[ClusterLook], stores: list[SqlStore], timeout_ms: int | None) -> bool:
    """Wait for the last zone of another ring to be collected; false if the time is over."""
    end_ms = None if timeout_ms is None else looks[0].now_ms() + timeout_ms
    most = 0
    with progress_bar("re-hashing") as progress:
        while (old := sum(look.old_tokens() for look in looks)) > 0:
            most = max(most, old)
            if progress is not None:
                progress(most - old, most)
            if end_ms is not None and looks[0].now_ms() >= end_ms:
                return False
            # No broker may be running that would collect them.
            collected = sum(store.core.zones.collected for store in stores)
            for look, store in zip(looks, stores, strict=True):
                store.sweep(look.now_ms(), SWEEP_BUDGET)
            if sum(store.core.zones.collected for store in stores) == collected:
                threading.Event().wait(LOOK_S)
    return True


commands: Final = {"cluster": cluster}
