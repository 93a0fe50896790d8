"""Trying filters out, without a store."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from penstock.cli.common import emit_json, json_option
from penstock.clock import SystemClock
from penstock.filters import Explanation, Row, explain, parse

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

__all__ = ["commands"]

_WORDS: Final = {True: "true", False: "false", None: "unknown"}
_STYLES: Final = {True: "green", False: "red", None: "yellow"}


def _attributes(ctx: click.Context, param: click.Parameter, given: str) -> dict[str, Any]:
    try:
        attributes: dict[str, Any] = msgspec.json.decode(given, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise click.BadParameter(f"not a JSON object: {error}", ctx, param) from None
    for name, value in attributes.items():
        if isinstance(value, dict | list):
            raise click.BadParameter(f"{name!r} is not flat: no lists or objects", ctx, param)
    return attributes


@click.group("filter")
def filter_group() -> None:
    """Try filters out."""


@filter_group.command("test")
@click.argument("expression")
@click.argument("attributes", callback=_attributes, default="{}")
@click.option("--group", default="", help="What the filter reads as group.")
@click.option("--priority", type=int, default=0, help="What it reads as priority.")
@click.option("--size", type=int, default=0, help="What it reads as size, in bytes.")
@click.option(
    "--published-at", type=int, help="What it reads as published_at, in ms.  [default: now]"
)
@json_option
def test(
    expression: str,
    attributes: dict[str, Any],
    group: str,
    priority: int,
    size: int,
    published_at: int | None,
    *,
    as_json: bool,
) -> None:
    """Say whether a filter takes a message, and why: each condition with what it read.

    ATTRIBUTES is a JSON object, such as '{"kind": "book", "price": 12}'.
    """
    at_ms = SystemClock().now_ms() if published_at is None else published_at
    compiled = parse(expression)
    found = explain(compiled, Row(attributes, group, priority, at_ms, size))
    if as_json:
        emit_json({"matches": found.result is True, "explanation": _plain(found)})
        return
    _show(found)
    verdict = "matches" if found.result is True else "does not match"
    click.echo(f"{verdict}: the filter is {_WORDS[found.result]}")


def _plain(found: Explanation) -> dict[str, Any]:
    return {
        "text": found.text,
        "result": found.result,
        "values": dict(found.values),
        "parts": [_plain(part) for part in found.parts],
    }


def _show(found: Explanation) -> None:
    from rich.console import Console  # noqa: PLC0415 - a JSON answer does without
    from rich.tree import Tree  # noqa: PLC0415

    tree = Tree(_label(found))
    _grow(tree, found)
    Console(file=sys.stdout, soft_wrap=True).print(tree)


def _grow(tree: Tree, found: Explanation) -> None:
    for part in found.parts:
        _grow(tree.add(_label(part)), part)


def _label(found: Explanation) -> Text:
    from rich.text import Text  # noqa: PLC0415

    label = Text(f"{_WORDS[found.result]:8}", style=_STYLES[found.result])
    label.append(found.text, style="default")
    if found.values:
        read = ", ".join(f"{name} is {_literal(value)}" for name, value in found.values)
        label.append(f"   ({read})", style="dim")
    return label


def _literal(value: object) -> str:
    return msgspec.json.encode(value).decode()


commands: Final = {"filter": filter_group}
