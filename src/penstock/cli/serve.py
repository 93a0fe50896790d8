"""Serving a store to others: ``penstock serve`` and ``penstock config``."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import click

from penstock.cli.common import emit_json, json_option, show_table
from penstock.cli.settings import effective, settings_options
from penstock.server import logs

__all__ = ["commands"]


@click.command("serve")
@settings_options
def serve(config_file: str | None, **flags: Any) -> None:
    """Serve a store until SIGTERM or SIGINT.

    Then no more calls are taken, those that run are finished, claims that wait are handed back,
    and the store is closed; a second signal ends it at once. SIGHUP reads keys and certificate
    again. Listeners are those that are named; if none is, native, HTTP and Flight at their usual
    ports of this machine.
    """
    config = effective(config_file, flags).config
    logs.configure(config.log_level, config.log_format)
    try:
        from penstock.server import process  # noqa: PLC0415 - needs an extra
    except ImportError as error:
        raise click.ClickException(
            f"{error}: serving needs pip install 'penstock[server]'"
        ) from error
    process.serve(config, _say)


def _say(line: str) -> None:
    # Where it goes may be a file on a full disk, which is no reason to end.
    with contextlib.suppress(OSError):
        click.echo(line)


@click.command("config")
@json_option
@settings_options
def config(config_file: str | None, *, as_json: bool, **flags: Any) -> None:
    """Show the settings of a server and where each comes from."""
    shown = effective(config_file, flags).shown()
    if as_json:
        emit_json({path: {"value": each.value, "source": each.source} for path, each in
                   shown.items()})  # fmt: skip
        return
    rows = [(path, _text(each.value), each.source) for path, each in shown.items()]
    show_table(("setting", "value", "from"), rows, empty="")


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


commands: Final = {"serve": serve, "config": config}
