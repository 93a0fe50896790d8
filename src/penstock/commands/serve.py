"""Serving a store to others: ``penstock serve``."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

import penstock
from penstock.errors import InvalidInput

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["commands"]

_SIGNALS: Final = {signal.SIGTERM, signal.SIGINT}


@click.command("serve")
@click.option(
    "--flight",
    metavar="HOST:PORT",
    default="127.0.0.1:8815",
    show_default=True,
    help="Where to serve Arrow Flight; port 0 takes a free one.",
)
@click.option(
    "--port-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the port there once it is listened on.",
)
@click.option(
    "--store",
    metavar="URL",
    envvar="PENSTOCK_STORE",
    required=True,
    show_envvar=True,
    help="The store, such as rocksdb:./data; made if it is not there.",
)
def serve(store: str, flight: str, port_file: Path | None) -> None:
    """Serve a store over Arrow Flight until SIGTERM or SIGINT.

    Then no more calls are taken, those that run are finished, and the store is closed.
    There is no encryption and no login: listen only where everybody may read and write.
    """
    host, port = _address(flight)
    listening = _listening()
    # Blocked in every thread from here on, so that they wait for this one to take them.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    with (
        penstock.open(store) as broker,
        listening.in_process_server(broker, host=host, port=port) as server,
    ):
        click.echo(f"serving {store} at {server.location}")
        if port_file is not None:
            # Whoever waits for the file must not find half of it.
            partial = port_file.with_name(port_file.name + ".part")
            partial.write_text(f"{server.port}\n")
            partial.replace(port_file)
        signal.sigwait(_SIGNALS)
        click.echo("stopping: no more calls are taken")
    if port_file is not None:
        port_file.unlink(missing_ok=True)
    click.echo("stopped")


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise InvalidInput(f"{text!r:.100} is not an address such as 127.0.0.1:8815")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _listening() -> ModuleType:
    try:
        from penstock.server import listening  # noqa: PLC0415 - needs an extra
    except ImportError as error:
        raise click.ClickException(
            f"{error}: serving needs pyarrow; pip install 'penstock[flight]'"
        ) from error
    return listening


commands: Final = {"serve": serve}
