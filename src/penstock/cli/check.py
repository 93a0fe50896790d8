"""Is the store right? ``penstock check``."""

from __future__ import annotations

from typing import Final

import click

from penstock.cli.common import (
    emit_json,
    open_store,
    open_to_look,
    plain,
    show_table,
    store_option,
)

__all__ = ["commands"]


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
        with open_to_look(store) as looked_at:
            report = looked_at.check()
    if as_json:
        emit_json({"ok": report.ok, **plain(report)})
    else:
        show_table(("checked", ":count"), sorted(report.checked.items()), empty="nothing is there")
        rows = [
            (each.kind, each.table, each.key, each.text, "yes" if each.repaired else "no")
            for each in report.violations
        ]
        if rows:
            show_table(("violation", "table", "key", "what", "repaired"), rows, empty="")
        found = sum(report.found.values())
        click.echo(
            f"{found} violations, {report.left} left, {len(report.notes)} notes"
            if found
            else f"no violations, {len(report.notes)} notes"
        )
        if "unreadable" in report.found:
            click.echo(
                "A part of the store can't be read. What depends on it was not checked"
                + (", and nothing was repaired" if repair else "")
                + ". Restore a backup, or bring what can be read into a new store: "
                "penstock salvage STORE TARGET"
            )
    ctx.exit(0 if report.ok else 1)


commands: Final = {"check": check}
