"""The store as a whole: its log, whether it is right, what can be read of it, and its ring."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from contextlib import closing
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal

import click

from penstock.broker.tailer import Tailer, route_once
from penstock.cli import common
from penstock.cli.common import duration, need_store, open_store, open_to_look
from penstock.clock import SystemClock
from penstock.copying import copy
from penstock.errors import PenstockError, needs_extra
from penstock.limits import MAX_LOG_LIMIT, MAX_RING_SIZE
from penstock.salvage import SalvageReport, salvage
from penstock.store.sql.location import parse_sql

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.broker.broker import Broker
    from penstock.broker.reader import Reader
    from penstock.store.sql.inspect import ClusterStatus
    from penstock.store.sql.store import SqlStore

# Tokens of a large ring, logs and lost ranges that are shown of many; JSON has them all.
SHOWN: Final = 20
# The longest that the messages of logs are counted for.
MAX_OVER_MS: Final = 60_000
# Between two looks at how far the re-hash has got.
LOOK_S: Final = 1.0
SWEEP_BUDGET: Final = 1_000


# --- the log --------------------------------------------------------------------------------------


@click.group("log")
def log_group() -> None:
    """Look at the metadata log, or change how it is kept."""


@log_group.command("stats")
@common.reads_store
def log_stats(broker: Broker | Reader) -> None:
    """Show offsets, logs, cursors and retention."""
    common.show_fields(broker.log_stats(), "log", ":value")


@log_group.command("configure")
@click.option("--logs", type=int, help="Spread messages over so many logs from here on.")
@click.option("--retention", type=duration, help="Keep the log for so long; 0: for ever.")
@click.option("--routing", type=click.Choice(["inline", "pipeline"]),
              help="Who routes from here on: publish itself, or a tailer or Spark.")  # fmt: skip
@common.changes_store
def configure(
    broker: Broker,
    logs: int | None,
    retention: int | None,
    routing: Literal["inline", "pipeline"] | None,
) -> None:
    """Change the number of logs, how long they are kept, or who routes.

    A switch of the routing fences every tailer and Spark job. A switch to inline routes the last
    messages itself, and is refused while there are more than 10,000.
    """
    done = broker.configure_log(logs=logs, retention_ms=retention, routing=routing)
    common.show_fields(done, "log", ":value")


@log_group.command("read")
@click.option("--log", "number", type=int, default=0, show_default=True, help="Which log.")
@click.option("--begin", type=int, default=0, show_default=True, help="First offset.")
@click.option("--limit", type=int, default=20, show_default=True, help="Messages at the most.")
@common.reads_store
def read(broker: Broker | Reader, number: int, begin: int, limit: int) -> None:
    """Show what was published, in order."""
    page = broker.read_log(number, begin=begin, limit=limit)
    about = (":offset=message_id", "published=published_at_ms", "group")
    common.show(page.records, (*about, ":priority", ":size", "attributes"), empty="nothing there")


@click.command("route")
@click.option("--follow", is_flag=True,
              help="Go on until SIGTERM or Ctrl-C; fences every tailer and Spark job.")  # fmt: skip
@click.option("--limit", type=click.IntRange(1, MAX_LOG_LIMIT),
              help="Messages of each log at the most: in all (100,000), or in one step of --follow "
              "(2,000).")  # fmt: skip
@common.changes_store
def route(broker: Broker, limit: int | None, *, follow: bool) -> None:
    """Put what the logs hold into the queues.

    For a store whose routing is pipeline, without Spark.
    """
    read = _follow if follow else route_once
    count = read(broker, limit=limit or (2_000 if follow else 100_000))
    stats = broker.log_stats()
    common.say_answer(
        {"read": count, "routed_up_to": stats.routed_up_to, "end": stats.end},
        f"read {count} messages; routed up to offset {stats.routed_up_to} of {stats.end}",
    )


def _follow(broker: Broker, *, limit: int) -> int:
    """Route until a signal; a second signal ends it at once."""
    with common.progress_bar("routing") as bar:
        tailer = Tailer(
            broker, limit=limit, progress=lambda stats: bar(stats.routed_up_to, stats.end)
        )

        def stop(*_: object) -> None:
            tailer.stop()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        return tailer.run()


def _offset_or_time(value: str) -> int | datetime:
    """Read an offset or a time of an option."""
    try:
        return int(value) if value.isdecimal() else datetime.fromisoformat(value).astimezone()
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is neither an offset nor a time such as 2030-01-31T08:00:00+00:00"
        ) from None


@click.command("backfill")
@click.argument("queue")
@click.option("--from", "from_", type=_offset_or_time, metavar="OFFSET|TIME",
              help="By default all that is kept.")  # fmt: skip
@click.option("--to", type=_offset_or_time, metavar="OFFSET|TIME",
              help="By default all that has been routed.")  # fmt: skip
@common.changes_store
def backfill(
    broker: Broker, queue: str, from_: int | datetime | None, to: int | datetime | None
) -> None:
    """Fill a queue from the log with what it wants and has not had.

    A backfill that was interrupted goes on where it stopped; nothing comes in twice.
    """
    with common.progress_bar(f"filling {queue}") as bar:
        done = broker.backfill(
            queue,
            from_="earliest" if from_ is None else from_,
            to=to,
            progress=lambda sums, last: bar(sums.next, last),
        )
    text = f"looked at {done.scanned} messages, added {done.added} to {queue}"
    if done.missing:
        text += f"; {done.missing} have no payload any more"
    common.answer(done, text)


# --- check and salvage ---------------------------------------------------------------------------


@click.command("check")
@click.option("--repair", is_flag=True, help="Mend what can be mended.")
@common.store_option
@click.pass_context
def check(ctx: click.Context, store: str, *, repair: bool) -> None:
    """Read the whole store and hold it to its invariants.

    Ends with 1 if anything is wrong, and not repaired. If a part of the store can't be read, the
    rest is checked, and nothing is repaired.
    """
    need_store(
        store,
        "check",
        "stop the server, or check a backup: penstock backup create, then penstock backup verify "
        "PLACE",
    )
    if repair:
        with open_store(store) as broker:
            report = broker.check(repair=True)
    else:
        with open_to_look(store) as reader:
            report = reader.check()
    if common.wants_json():
        common.emit_json({"ok": report.ok, **common.plain(report)})
        ctx.exit(0 if report.ok else 1)
    common.show_table(
        ("checked", ":count"), sorted(report.checked.items()), empty="nothing is there"
    )
    if report.violations:
        columns = ("violation=kind", "table", "key", "what=text", "repaired")
        common.show_table(columns, report.violations)
    found = sum(report.found.values())
    count = f"{found} violations, {report.left} left" if found else "no violations"
    click.echo(f"{count}, {len(report.notes)} notes")
    if "unreadable" in report.found:
        click.echo(
            "A part of the store can't be read. What depends on it was not checked"
            + (", and nothing was repaired" if repair else "")
            + ". Restore a backup, or bring what can be read into a new store: "
            "penstock salvage STORE TARGET"
        )
    ctx.exit(0 if report.ok else 1)


@click.command("salvage")
@click.argument("store")
@click.argument("target")
@click.option("--drop-after", is_flag=True,
              help="Leave out what the write-ahead log has behind its first damage.")  # fmt: skip
@common.json_option
@click.pass_context
def salvage_command(ctx: click.Context, store: str, target: str, *, drop_after: bool) -> None:
    """Read what can be read of the damaged STORE into a new one, TARGET.

    Both are URLs, such as rocksdb:./data. STORE is not changed, and nobody may have it open. Ends
    with 0 if everything was there, with 1 if something is lost or had to be repaired, with 2 if
    nothing could be done.
    """
    for url in (store, target):
        need_store(url, "salvage", "stop the server, and name its store, such as rocksdb:./data")
    # Rows that the audit puts away are in the report, not in thousands of lines before it.
    store_log = logging.getLogger("penstock.store")
    level = store_log.level
    store_log.setLevel(logging.CRITICAL)
    try:
        with common.progress_bar("salvaging") as progress:
            report = salvage(store, target, drop_after=drop_after, progress=progress)
    except PenstockError as error:
        click.echo(f"Error: {' '.join(str(error).split())}", err=True)
        ctx.exit(2)
    finally:
        store_log.setLevel(level)
    if common.wants_json():
        common.emit_json({"complete": report.complete, **common.plain(report)})
    else:
        _show_report(report)
    ctx.exit(0 if report.complete else 1)


def _show_report(report: SalvageReport) -> None:
    rows = [
        (
            f"{each.name} (settings lost)" if each.settings_lost else each.name,
            "?" if each.expected is None else each.expected,
            *(each.found[state] for state in common.STATES),
            each.put_back,
            _ranges(each.lost),
        )
        for each in report.queues
    ]
    states = (f":{state}" for state in common.STATES)
    columns = ("queue", ":expected", *states, ":put back", "lost ids")
    common.show_table(columns, rows, empty="no queues")
    if report.unreadable:
        common.show_table(("file", "table", "between", "why"), report.unreadable)
    for note in report.notes:
        click.echo(f"note: {note}")
    if report.complete:
        click.echo("everything was there")
        return
    there = put_back = lost = more = 0
    for each in report.queues:
        found = sum(each.found.values())
        gone = sum(last - first + 1 for first, last in each.lost)
        there, put_back, lost = there + found, put_back + each.put_back, lost + gone
        more += max(0, (each.expected or 0) - found - gone)
    click.echo(
        f"{there} messages are there, {put_back} of them put back; {lost} are lost for certain"
        + (f", and {more} more by the queues' counters" if more else "")
        + f"; {sum(report.repaired.values())} violations were repaired"
    )
    if any(
        each.file.startswith("wal/") or each.file.endswith(".log") for each in report.unreadable
    ):
        click.echo("A part of the log is lost: what nothing else tells of is not counted as lost.")


def _ranges(ranges: list[tuple[int, int]]) -> str:
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in ranges[:SHOWN]]
    more = len(ranges) - len(shown)
    return ", ".join(shown) + (f" and {more} more ranges" if more else "")


# --- copy -----------------------------------------------------------------------------------------


@click.command("copy")
@click.argument("source")
@click.argument("target")
@common.json_option
def copy_command(source: str, target: str) -> None:
    """Bring everything of the store SOURCE into a new one, TARGET.

    At the end it compares the two. Both are URLs, such as rocksdb:./data and
    postgresql://db/penstock; SOURCE may be the Flight listener of a server, grpc://HOST:8815. The
    same command again goes on after an interruption.
    """
    try:
        with common.progress_bar("copying") as bar:
            report = copy(source, target, progress=_copy_progress(bar))
    except KeyboardInterrupt:
        raise click.ClickException(
            "interrupted: the same command goes on where this one was"
        ) from None
    if common.wants_json():
        common.emit_json(common.plain(report))
        return
    rows = [(each.name, *(each.messages[state] for state in common.STATES))
            for each in report.queues]  # fmt: skip
    columns = ("queue", *(f":{state}" for state in common.STATES))
    common.show_table(columns, rows, empty="no queues")
    if report.in_flight:
        click.echo(
            f"{report.in_flight} messages were in flight: each is delayed until its lease would end"
        )
    count = sum(sum(each.messages.values()) for each in report.queues)
    click.echo(
        f"store {report.target_id} has everything that store {report.source_id} had at "
        f"{common.when(report.at_ms)}: {count:,} messages in queues, {report.log:,} in the log; "
        "counts and checksums agree"
    )


def _copy_progress(bar: Callable[[int, int], None]) -> Callable[[str, int, int], None]:
    """Draw a bar; without a terminal, write a line whenever a tenth more is done."""
    last = ("", -1)

    def told(text: str, done: int, total: int) -> None:
        nonlocal last
        # Copying and verifying are half of the work each.
        bar(done + total * (text == "verifying"), 2 * total)
        now = (text, done * 10 // max(1, total))
        if now != last and not sys.stderr.isatty():
            click.echo(f"{text}: {done:,} of about {total:,} rows", err=True)
        last = now

    return told


# --- stores on a SQL database: tokens, zones and the ring -----------------------------------------


@click.group("cluster")
def cluster() -> None:
    """Look at a store on a SQL database, and change its ring."""


def _open_sql(url: str) -> closing[SqlStore]:
    """Open a store that is there."""
    need_store(url, "cluster", "name the database, which servers share: --url postgresql://HOST/DB")
    place = parse_sql(url)
    with needs_extra("sql", "penstock cluster"):
        from penstock.store.sql import store as sql  # noqa: PLC0415
    clock = SystemClock()
    return closing(
        sql.open_store(
            place, store_id=0, routing=None, random=clock.random, clock=clock.now_ms, create=False
        )
    )


@cluster.command("status")
@click.option("--over", type=duration, default="1s", show_default=True,
              help="How long the messages of each log are counted, up to a minute.")  # fmt: skip
@common.store_option
def status(over: int, store: str) -> None:
    """Show logs with their rates and waits, tokens, zones, and how far a change of the ring is."""
    with _open_sql(store) as opened:
        _show_cluster(opened.cluster_status(opened.server_ms(), min(over, MAX_OVER_MS) / 1000), {})


def _show_cluster(now: ClusterStatus, more: dict[str, Any]) -> None:
    if common.wants_json():
        common.emit_json({**common.plain(now), "rehashed": now.rehashed, **more})
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
    logs = sorted(now.logs, key=lambda each: (-each.waiting, -each.per_second, each.log))[:SHOWN]
    rows: list[Any] = [
        (each.log, each.head, each.published, round(each.per_second), each.waiting)
        for each in sorted(logs, key=lambda each: each.log)
    ]
    common.show_table((":log", ":head", ":messages", ":a second", ":waiting"), rows)
    if len(now.logs) > SHOWN:
        click.echo(f"the busiest {SHOWN} of {len(now.logs):,} logs")
    tokens = sorted(now.tokens, key=lambda each: (-each.pointers, each.token))[:SHOWN]
    rows = [
        (each.token, each.pointers, each.vested, each.oldest_lag_ms,
         "" if each.token < now.ring_size else "beyond the ring")
        for each in sorted(tokens, key=lambda each: each.token)
    ]  # fmt: skip
    columns = (":token", ":pointers", ":vested", ":oldest lag ms", "")
    common.show_table(columns, rows, empty="no token has pointers")
    if len(now.tokens) > SHOWN:
        click.echo(f"the fullest {SHOWN} of {len(now.tokens):,} tokens that have pointers")


@cluster.command("resize")
@click.argument("ring_size", metavar="N", type=int)
@click.option("--wait", is_flag=True, help="Stay until no zone has a token of another ring.")
@click.option("--timeout", type=duration, help="Wait no longer than this.")
@common.store_option
@click.pass_context
def resize(
    ctx: click.Context, ring_size: int, timeout: int | None, store: str, *, wait: bool
) -> None:
    """Set how many tokens new zones choose from; brokers may be running.

    A zone keeps its token until it has been empty for half a minute. Ends with 1 if the time is
    over before the last zone has the token of this ring.
    """
    if not 1 <= ring_size <= MAX_RING_SIZE:
        raise click.BadParameter(f"{ring_size} is not from 1 to {MAX_RING_SIZE:,}", param_hint="N")
    with _open_sql(store) as opened:
        opened.set_ring_size(ring_size, opened.server_ms())
        if wait and _wait(opened, timeout):
            # Claims need not look at the tokens of the old ring any more.
            opened.set_ring_size(ring_size, opened.server_ms())
        collected = opened.zones.collected
        now = opened.cluster_status(opened.server_ms())
    _show_cluster(now, {"this_process": {"collected": collected}})
    if wait and not common.wants_json():
        click.echo(f"{collected:,} zones were collected by this process")
    ctx.exit(1 if wait and now.old_tokens else 0)


@cluster.command("split")
@click.argument("queue")
@common.store_option
def split(queue: str, store: str) -> None:
    """Give each token of QUEUE a range of its own, which another node may serve (CockroachDB)."""
    with _open_sql(store) as opened:
        made = opened.split_tokens(queue, opened.server_ms())
    text = f"{queue} has a range for each of {made:,} tokens"
    common.answer({"queue": queue, "ranges": made}, text)


def _wait(store: SqlStore, timeout_ms: int | None) -> bool:
    """Wait for the last zone of another ring to be collected; false if the time is over."""
    end_ms = None if timeout_ms is None else store.server_ms() + timeout_ms
    most = 0
    with common.progress_bar("re-hashing") as progress:
        while (old := store.count_old_tokens()[1]) > 0:
            most = max(most, old)
            progress(most - old, most)
            if end_ms is not None and store.server_ms() >= end_ms:
                return False
            # No broker may be running that would collect them.
            collected = store.zones.collected
            store.sweep(store.server_ms(), SWEEP_BUDGET)
            if store.zones.collected == collected:
                threading.Event().wait(LOOK_S)
    return True
