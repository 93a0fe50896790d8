"""Backups: copies of a store, incremental backups in a place, and stores made of either."""

from __future__ import annotations

from copy import copy as copy_of
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from penstock.cli import common
from penstock.cli.common import duration, find_url, is_server, open_store, url_option
from penstock.client import Client
from penstock.engines.places import place_at
from penstock.server import backup as backups


class _BackupGroup(click.Group):
    """A group for which ``penstock backup DESTINATION`` is ``penstock backup copy DESTINATION``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the command in that was left out."""
        known = {*self.commands, *ctx.help_option_names}
        if args and args[0] not in known:
            args = ["copy", *args]
        return super().parse_args(ctx, args)


@click.group("backup", cls=_BackupGroup)
def backup() -> None:
    """Make, list, verify and prune backups of a store.

    A PLACE is a directory, or s3://BUCKET/PREFIX with the variables AWS_... for the access.

    'penstock backup DESTINATION' is short for 'penstock backup copy DESTINATION'.
    """


@backup.command("copy")
@click.argument("destination")
@url_option("--url", "--store", needed=False, help="A server, or a store nobody has open.")
@click.option("--verify", is_flag=True,
              help="Check the backup DESTINATION; with --url, make it first.")  # fmt: skip
@common.json_option
@click.pass_context
def copy(ctx: click.Context, destination: str, store: str, *, verify: bool) -> None:
    """Copy a RocksDB store to a directory that is not there yet.

    The copy is there whole or not at all. A server makes it in its backup directory, under the
    name DESTINATION, and goes on serving; its key must allow to admin all queues.

    --verify reads the whole backup and changes nothing of it; ends with 1 if anything is wrong.
    It makes one only if --url is on the command line, not for PENSTOCK_URL.
    """
    path = Path(destination)
    report: dict[str, Any] = {}
    lines = []
    # Variables are set for other commands too: they don't make a mistyped name into a backup.
    if verify and ctx.get_parameter_source("store") is not ParameterSource.COMMANDLINE:
        if not path.is_dir():
            raise click.ClickException(f"there is no backup at {path}; --url URL makes one")
    else:
        path, report["bytes"] = _make_copy(destination, find_url(store))
        lines.append(f"backed up to {path}: {report['bytes']} bytes")
        if verify and not path.is_dir():
            raise click.ClickException(
                f"made, and not verified: it is on the server's machine; there, penstock backup "
                f"{path} --verify"
            )
    if verify:
        report["records"] = sum(backups.verify(path).checked.values())
        lines.append(f"{path} is sound: {report['records']} records were read, no violations")
    common.answer({"path": str(path), **report}, "\n".join(lines))


def _make_copy(destination: str, url: str) -> tuple[Path, int]:
    with open_store(url) as broker:
        if isinstance(broker, Client):
            path, size = broker.backup(destination)
            return Path(path), size
        return Path(destination), backups.backup(broker, Path(destination))


@backup.command("create")
@click.argument("place", required=False)
@click.option("--name", default="", help="The backup's name.  [default: the time]")
@url_option("--url", "--store", help="A server, a store nobody has open, or one on object storage.")
@common.json_option
def create(place: str | None, name: str, store: str) -> None:
    """Make an incremental backup of a store.

    PLACE is a directory, or s3://BUCKET/PREFIX. A server writes to its own backup.directory, so
    PLACE is left out; its key must allow to admin all queues. A store on object storage is backed
    up beside its owner.
    """
    if is_server(store) and place:
        raise click.UsageError("a server writes to its own backup.directory: leave PLACE out")
    if not is_server(store) and not place:
        raise click.UsageError("where to? Name a directory, or s3://BUCKET/PREFIX")
    if store.startswith("slatedb"):
        made = backups.create(place_at(place or ""), store, name)
        name, new = made.backup.name, made.new_bytes
    else:
        with open_store(store) as broker:
            if isinstance(broker, Client):
                name, new = broker.backup(name, incremental=True)
            else:
                made = backups.create(place_at(place or ""), store, name, broker)
                name, new = made.backup.name, made.new_bytes
    where = f" at {place}" if place else ""
    common.answer({"name": name, "new_bytes": new}, f"backed up as {name}{where}: {new} new bytes")


@backup.command("list")
@click.argument("place")
@common.json_option
def list_backups(place: str) -> None:
    """List the incremental backups of a place that are whole."""
    found = backups.backups_at(place_at(place))
    names = ("name", "made_at_ms", "engine", "store_id", "files", "bytes")
    rows = [
        (each.name, each.made_at_ms, each.engine, each.store_id, len(each.files), each.size)
        for each in found
    ]
    if common.wants_json():
        common.emit_json([dict(zip(names, row, strict=True)) for row in rows])
        return
    texts = [
        (name, f"{datetime.fromtimestamp(made / 1000, UTC):%Y-%m-%d %H:%M:%S}Z", *rest)
        for name, made, *rest in rows
    ]
    columns = ("name", "made", "engine", "store", ":files", ":bytes")
    common.show_table(columns, texts, empty="no backups")


@backup.command("verify")
@click.argument("place")
@click.argument("name", required=False)
@click.option(
    "--scratch",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where there is room for the copy.  [default: the temporary directory]",
)
@common.json_option
def verify_backup(place: str, name: str | None, scratch: Path | None) -> None:
    """Read a backup, compare every checksum, open a copy of it and check that.

    Without NAME, the newest of the place. Ends with 1 if anything is wrong.
    """
    name, records = backups.verify_backup(place_at(place), name, scratch)
    text = f"{name} is sound: {records} records were read, no violations"
    common.answer({"name": name, "records": records}, text)


@backup.command("prune")
@click.argument("place")
@click.option("--keep", type=click.IntRange(min=1), metavar="N", help="Keep the newest N.")
@click.option("--keep-for", "keep_ms", type=duration, help="Keep those that are younger.")
@common.json_option
def prune(place: str, keep: int | None, keep_ms: int | None) -> None:
    """Remove old backups of a place, and files that no backup has.

    A backup stays if it is among the newest N, or younger than the duration. The newest always
    stays.
    """
    done = backups.prune(place_at(place), keep=keep, keep_ms=keep_ms)
    text = f"removed {len(done.removed)} backups, kept {len(done.kept)}: {done.freed_bytes} bytes"
    common.answer(done._asdict(), f"{text} were freed")


@click.command("restore")
@click.argument("source")
@click.argument("name", required=False)
@click.option("--to", "target", required=True, metavar="DIRECTORY|URL",
              help="Where the new store is to be: empty, or not there.")  # fmt: skip
@common.json_option
def restore(source: str, name: str | None, target: str) -> None:
    """Make a store of a backup.

    SOURCE is a copy, or a place with incremental backups, of which NAME is one; without it, the
    newest. The backup stays as it is, and is verified first.
    """
    path = Path(source)
    if (path / backups.MARK).is_file():
        if name is not None:
            raise click.UsageError(f"{source} is a copy of a store: leave {name} out")
        directory = Path(target.removeprefix("rocksdb:"))
        url, size = f"rocksdb:{directory}", backups.restore(path, directory)
    else:
        name, url, size = backups.restore_backup(place_at(source), name, target)
        source = f"{name} of {source}"
    text = f"restored {source}: {size} bytes; open it as {url}"
    common.answer({"url": url, "bytes": size}, text)


# A copy, since each has its own example.
backup.add_command(copy_of(restore))
