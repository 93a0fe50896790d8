"""The settings of a server as options: every setting of :mod:`penstock.server.config` has one."""

from __future__ import annotations

import os
import typing
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.server.config import SETTINGS, Effective, load

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["effective", "settings_options"]

_Command = TypeVar("_Command", bound="Callable[..., Any]")


def settings_options(command: _Command) -> _Command:
    """Add ``--config`` and an option for each setting; not given, it is None."""
    for setting in reversed(SETTINGS.values()):
        kind = typing.get_args(setting.kind)[0]
        if kind is bool:
            names = f"{setting.flag}/--no-{setting.flag.removeprefix('--')}"
            option = click.option(names, setting.field, default=None, help=setting.about)
        else:
            option = click.option(
                setting.flag,
                setting.field,
                metavar=_metavar(setting.field, kind),
                help=f"{setting.about} [{setting.variable}]",
            )
        command = option(command)
    return click.option(
        "--config", "config_file", metavar="FILE", help="Settings, TOML. [PENSTOCK_CONFIG]"
    )(command)


def _metavar(field: str, kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(each for each in typing.get_args(kind) if each)
    if field == "store":
        return "URL"
    named = {"Duration": "DURATION", "Size": "SIZE", "Address": "HOST:PORT|off", "int": "N"}
    # Of a setting that has no value by default, the other of two kinds.
    kind = (*typing.get_args(kind), kind)[0]
    return named.get(kind.__name__, "FILE" if field != "account_id" else "DIGITS")


def effective(config_file: str | None, flags: dict[str, Any]) -> Effective:
    """Put file, environment and options together."""
    return load(file=config_file, environment=os.environ, flags=flags)
