"""Is the store right, and what can be read of it if not: ``penstock check``, ``salvage``."""

from __future__ import annotations

import logging
from typing import Final

import click

from penstock.cli.common import (
    STATES,
    emit_json,
    json_option,
    open_store,
    open_to_look,
    plain,
    progress_bar,
    show_table,
    store_option,
)
from penstock.errors import PenstockError
from penstock.salvage import SalvageReport, salvage

MAX_RANGES: Final = 20


@click.command("check")
@click.option("--repair", is_flag=True, help="Mend what can be mended.")
@store_option
@click.pass_context
def check(ctx: click.Context, store: str, *, repair: bool, as_json: bool) -> None:
    """Read the whole store and hold it to its invariants.

    Ends with 1 if anything is wrong, and not repaired. If a part of the store can't be read, the
    rest is checked, and nothing is repaired.
    """
    if repair:
        with open_store(store) as broker:
            report = broker.check(repair=True)
    else:
        with open_to_look(store) as reader:
            report = reader.check()
    if as_json:
        emit_json({"ok": report.ok, **plain(report)})
        ctx.exit(0 if report.ok else 1)
    show_table(("checked", ":count"), sorted(report.checked.items()), empty="nothing is there")
    if report.violations:
        columns = ("violation=kind", "table", "key", "what=text", "repaired")
        show_table(columns, report.violations)
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


class _SalvageFailed(click.ClickException):
    exit_code = 2


@click.command("salvage")
@click.argument("store")
@click.argument("target")
@click.option(
    "--drop-after",
    is_flag=True,
    help="Leave out what the write-ahead log has behind its first damage.",
)
@json_option
@click.pass_context
def salvage_command(
    ctx: click.Context, store: str, target: str, *, drop_after: bool, as_json: bool
) -> None:
    """Read what can be read of the damaged STORE into a new one, TARGET.

    Both are URLs, such as rocksdb:./data. STORE is not changed, and nobody may have it open. Ends
    with 0 if everything was there, with 1 if something is lost or had to be repaired, with 2 if
    nothing could be done.
    """
    # Rows that the audit puts away are in the report, not in thousands of lines before it.
    store_log = logging.getLogger("penstock.store")
    level = store_log.level
    store_log.setLevel(logging.CRITICAL)
    try:
        with progress_bar("salvaging") as progress:
            report = salvage(store, target, drop_after=drop_after, progress=progress)
    except PenstockError as error:
        raise _SalvageFailed(" ".join(str(error).split())) from error
    finally:
        store_log.setLevel(level)
    if as_json:
        emit_json({"complete": report.complete, **plain(report)})
    else:
        _show_report(report)
    ctx.exit(0 if report.complete else 1)


def _show_report(report: SalvageReport) -> None:
    rows = [
        (
            f"{each.name} (settings lost)" if each.settings_lost else each.name,
            "?" if each.expected is None else each.expected,
            *(each.found[state] for state in STATES),
            each.put_back,
            _ranges(each.lost),
        )
        for each in report.queues
    ]
    columns = ("queue", ":expected", *(f":{state}" for state in STATES), ":put back", "lost ids")
    show_table(columns, rows, empty="no queues")
    if report.unreadable:
        show_table(("file", "table", "between", "why"), report.unreadable)
    for note in report.notes:
        click.echo(f"note: {note}")
    if report.complete:
        click.echo("everything was there")
        return
    there = sum(sum(each.found.values()) for each in report.queues)
    put_back = sum(each.put_back for each in report.queues)
    lost = sum(_count(each.lost) for each in report.queues)
    expected = sum(
        max(each.expected or 0, sum(each.found.values()) + _count(each.lost))
        for each in report.queues
    )
    more = expected - there - lost
    click.echo(
        f"{there} messages are there, {put_back} of them put back; {lost} are lost for certain"
        + (f", and {more} more by the queues' counters" if more else "")
        + f"; {sum(report.repaired.values())} violations were repaired"
    )
    files = [each.file for each in report.unreadable]
    if any(file.startswith("wal/") or file.endswith(".log") for file in files):
        click.echo("A part of the log is lost: what nothing else tells of is not counted as lost.")


def _count(ranges: list[tuple[int, int]]) -> int:
    return sum(last - first + 1 for first, last in ranges)


def _ranges(ranges: list[tuple[int, int]]) -> str:
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in ranges[:MAX_RANGES]]
    more = len(ranges) - len(shown)
    return ", ".join(shown) + (f" and {more} more ranges" if more else "")
