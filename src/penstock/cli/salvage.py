"""``penstock salvage``: reads what is left of a damaged store."""

from __future__ import annotations

import logging
from typing import Final

import click

from penstock.cli.common import emit_json, json_option, plain, progress_bar, show_table
from penstock.errors import PenstockError
from penstock.model import State
from penstock.salvage import SalvageReport, salvage

__all__ = ["commands"]

_SHOWN: Final = 20


class _CantSalvage(click.ClickException):
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
    quiet = logging.getLogger("penstock.store")
    level = quiet.level
    quiet.setLevel(logging.CRITICAL)
    try:
        with progress_bar("salvaging") as progress:
            report = salvage(store, target, drop_after=drop_after, progress=progress)
    except PenstockError as error:
        raise _CantSalvage(" ".join(str(error).split())) from error
    finally:
        quiet.setLevel(level)
    if as_json:
        emit_json({"complete": report.complete, **plain(report)})
    else:
        _show(report)
    ctx.exit(0 if report.complete else 1)


def _show(report: SalvageReport) -> None:
    states = [state.value for state in State]
    rows = [
        (
            f"{each.name} (settings lost)" if each.settings_lost else each.name,
            "?" if each.expected is None else each.expected,
            *(each.found[state] for state in states),
            each.put_back,
            _ranges(each.lost),
        )
        for each in report.queues
    ]
    columns = ("queue", ":expected", *(f":{state}" for state in states), ":put back", "lost ids")
    show_table(columns, rows, empty="no queues")
    if report.unreadable:
        damage = [(each.file, each.table, each.between, each.why) for each in report.unreadable]
        show_table(("file", "table", "between", "why"), damage, empty="")
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
    if any(
        each.file.startswith("wal/") or each.file.endswith(".log") for each in report.unreadable
    ):
        click.echo("A part of the log is lost: what nothing else tells of is not counted as lost.")


def _count(ranges: list[tuple[int, int]]) -> int:
    return sum(last - first + 1 for first, last in ranges)


def _ranges(ranges: list[tuple[int, int]]) -> str:
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in ranges[:_SHOWN]]
    more = len(ranges) - len(shown)
    return ", ".join(shown) + (f" and {more} more ranges" if more else "")


commands: Final = {"salvage": salvage_command}
