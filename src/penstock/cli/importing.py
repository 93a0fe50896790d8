"""Bringing other queues' databases in."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from penstock.cli.common import (
    emit_json,
    json_option,
    open_store,
    plain,
    progress_bar,
    show_table,
)
from penstock.importers.queueber import import_queueber
from penstock.importers.queueber_source import Source

__all__ = ["commands"]


@click.group("import")
def import_group() -> None:
    """Bring another queue's database in."""


@import_group.command("queueber")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--into", "store", metavar="URL", required=True, envvar="PENSTOCK_STORE",
              show_envvar=True, help="The store, made if it is not there.")  # fmt: skip
@click.option("--queue", required=True, help="The queue, made if it is not there.")
@click.option("--batch", type=int, default=500, show_default=True, help="Items in one commit.")
@click.option("--restart", is_flag=True, help="Forget what was imported before: all once more.")
@json_option
def queueber(
    path: Path, store: str, queue: str, batch: int, *, restart: bool, as_json: bool
) -> None:
    """Publish every item of a Queueber database to a queue, once.

    The database at PATH is only read. An import that was interrupted goes on where it was.
    """
    # A wrong path must not leave an empty store behind.
    Source(path).close()
    with open_store(store, make=True) as broker, progress_bar("importing") as progress:
        report = import_queueber(
            path, broker, queue, batch=batch, progress=progress, restart=restart
        )
    if as_json:
        emit_json({**plain(report), "imported": report.imported})
        return
    rows = [
        (name.replace("_", " "), value)
        for name, value in plain(report).items()
        if isinstance(value, int)
    ]
    show_table((f"imported into {queue}", ":count"), [*rows, ("total", report.imported)], empty="")
    show_table(("problem at", "what"), [(p.key, p.reason) for p in report.problems], empty="")


commands: Final = {"import": import_group}
