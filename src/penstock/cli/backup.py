"""Copies of a store: ``penstock backup`` and ``penstock restore``."""

from __future__ import annotations

import http.client
import os
import ssl
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import click
import msgspec
from click.core import ParameterSource

from penstock.cli.common import open_store
from penstock.errors import InvalidInput, NotAllowed, PenstockError, StoreLocked
from penstock.server import backup as backups

__all__ = ["commands"]

_TIMEOUT_SECONDS: Final = 3_600


@click.command("backup")
@click.argument("destination")
@click.option(
    "--store",
    metavar="URL",
    envvar="PENSTOCK_STORE",
    show_envvar=True,
    help="A store nobody has open.",
)
@click.option(
    "--server",
    metavar="URL",
    envvar="PENSTOCK_SERVER",
    show_envvar=True,
    help="A running server's HTTP address; DESTINATION is then a name in its backup directory.",
)
@click.option("--ca", metavar="FILE", help="Who has signed the server's certificate.")
@click.option(
    "--verify",
    is_flag=True,
    help="Check the backup DESTINATION; with --store or --server, make it first.",
)
@click.pass_context
def backup(
    ctx: click.Context,
    destination: str,
    store: str | None,
    server: str | None,
    ca: str | None,
    *,
    verify: bool,
) -> None:
    """Copy a store to a directory that is not there yet.

    The copy is there whole or not at all. With --server the server makes it, and goes on serving;
    if it wants a key, PENSTOCK_TOKEN holds one that may admin all queues, as ID:SECRET.

    --verify reads the whole backup and changes nothing of it; ends with 1 if anything is wrong.
    It makes one only if --store or --server is on the command line, not for PENSTOCK_STORE or
    PENSTOCK_SERVER.
    """
    made = Path(destination)
    if verify and not _asked_to_make(ctx):
        if not made.is_dir():
            raise click.ClickException(
                f"there is no backup at {made}; --store URL or --server URL makes one"
            )
    elif server is not None:
        answer = _ask(server, destination, ca)
        made = Path(answer["path"])
        click.echo(f"backed up to {made}: {answer['bytes']} bytes")
        if verify and not made.is_dir():
            raise click.ClickException(
                f"not verified: it is on the server's machine; there, penstock backup {made} "
                "--verify"
            )
    else:
        _make(made, store)
    if verify:
        report = backups.verify(made)
        count = sum(report.checked.values())
        click.echo(f"{made} is sound: {count} records were read, no violations")


def _asked_to_make(ctx: click.Context) -> bool:
    # Variables are set for other commands too: they don't make a mistyped name into a backup.
    sources = (ctx.get_parameter_source(name) for name in ("store", "server"))
    return ParameterSource.COMMANDLINE in sources


def _make(destination: Path, store: str | None) -> None:
    if store is None:
        raise click.UsageError("which store? Give --store URL, or --server URL if it is served")
    try:
        with open_store(store) as broker:
            size = backups.backup(broker, destination)
    except StoreLocked as error:
        raise click.ClickException(
            f"{error}; if that is a server: penstock backup NAME --server http://HOST:PORT"
        ) from None
    click.echo(f"backed up to {destination}: {size} bytes")


def _ask(server: str, name: str, ca: str | None) -> dict[str, Any]:
    place = urlsplit(server)
    if place.scheme not in {"http", "https"} or not place.hostname:
        raise InvalidInput(f"{server!r:.100} is not a server's address such as http://HOST:8816")
    connection: http.client.HTTPConnection
    if place.scheme == "https":
        connection = http.client.HTTPSConnection(
            place.hostname,
            place.port,
            timeout=_TIMEOUT_SECONDS,
            context=ssl.create_default_context(cafile=ca),
        )
    else:
        connection = http.client.HTTPConnection(
            place.hostname, place.port, timeout=_TIMEOUT_SECONDS
        )
    headers = {"content-type": "application/json"}
    if token := os.environ.get("PENSTOCK_TOKEN"):
        headers["authorization"] = f"Bearer {token}"
    try:
        connection.request("POST", "/admin/backup", msgspec.json.encode({"name": name}), headers)
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise PenstockError(f"no answer from {server}: {error}") from None
    finally:
        connection.close()
    try:
        answer: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError:
        answer = {"message": f"status {response.status}"}
    if response.status in {401, 403}:
        raise NotAllowed(str(answer.get("message")))
    if response.status != 200:
        raise PenstockError(f"{server} made no backup: {answer.get('message')}")
    return answer


@click.command("restore")
@click.argument("source", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--to",
    "target",
    type=click.Path(path_type=Path),
    required=True,
    help="The directory of the new store: empty, or not there.",
)
def restore(source: Path, target: Path) -> None:
    """Make a store of a backup.

    The backup stays as it is, and is verified first.
    """
    size = backups.restore(source, target)
    click.echo(f"restored {source} to {target}: {size} bytes; open it as rocksdb:{target}")


commands: Final = {"backup": backup, "restore": restore}
