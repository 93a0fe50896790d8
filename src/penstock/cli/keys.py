"""Access keys: ``penstock keys add|list|remove|check``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import click

from penstock.cli.common import emit_json, json_option, show_table
from penstock.server import security

__all__ = ["commands"]

_file: Final = click.option(
    "--keys",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="PENSTOCK_AUTH_KEYS",
    show_envvar=True,
    required=True,
    help="The keys file: TOML, or JSON if its name ends so.",
)


@click.group("keys")
def keys() -> None:
    """Make, list and remove the access keys of a server."""


@keys.command("add")
@click.argument("key_id")
@click.option(
    "--allow",
    "permissions",
    metavar="ACTION:PATTERN",
    multiple=True,
    required=True,
    help="publish, consume, admin or all, on queues by name, such as publish:orders-*.",
)
@click.option("--sqs", is_flag=True, help="For SQS clients too: the file then holds the secret.")
@click.option("--description", default="", help="Words for people.")
@_file
@json_option
def add(
    path: Path,
    key_id: str,
    permissions: tuple[str, ...],
    description: str,
    *,
    sqs: bool,
    as_json: bool,
) -> None:
    """Make a key and show its secret, this once.

    A running server takes it up by itself. Of the secret the file holds a salted hash only,
    except with --sqs: signatures can't be checked without the secret itself, so whoever can read
    the file can use those keys.
    """
    secret = security.add_key(path, key_id, list(permissions), sqs=sqs, description=description)
    token = f"{key_id}:{secret}"
    if as_json:
        emit_json({"key_id": key_id, "secret": secret, "token": token})
        return
    click.echo(f"key    {key_id}\nsecret {secret}\ntoken  {token}")
    click.echo("The secret is not shown again.", err=True)
    if sqs:
        click.echo(f"{path} holds the secret itself, as SQS signatures need it.", err=True)


@keys.command("list")
@_file
@json_option
def list_keys(path: Path, *, as_json: bool) -> None:
    """List the keys and what they may do; no secrets."""
    found: list[dict[str, Any]] = [
        {
            "key_id": key_id,
            "permissions": key.permissions,
            "sqs": bool(key.secret),
            "description": key.description,
        }
        for key_id, key in sorted(security.read_keys(path).items())
    ]
    if as_json:
        emit_json(found)
        return
    rows = [
        (each["key_id"], " ".join(each["permissions"]), "yes" if each["sqs"] else "no",
         each["description"])
        for each in found
    ]  # fmt: skip
    show_table(("key", "may", "sqs", "description"), rows, empty="there are no keys")


@keys.command("remove")
@click.argument("key_id")
@_file
def remove(path: Path, key_id: str) -> None:
    """Take a key away; a running server refuses it within seconds."""
    security.remove_key(path, key_id)
    click.echo(f"removed {key_id}")


@keys.command("check")
@click.option("--action", type=click.Choice(security.ACTIONS), help="May it do this?")
@click.option("--queue", default="*", show_default=True, help="On which queue?")
@_file
@click.pass_context
def check(ctx: click.Context, path: Path, action: str | None, queue: str) -> None:
    """Check the keys file, and a token (ID:SECRET) if one comes by standard input.

    Ends with 1 if the token is refused, or may not do the action.
    """
    known = security.Keys(path)
    token = "" if _terminal() else sys.stdin.readline().strip()
    if not token:
        click.echo(f"{path} is sound: {len(known)} keys")
        return
    principal = known.by_token(token)
    if principal is None:
        click.echo("the token is refused")
        ctx.exit(1)
    allowed = action is None or principal.may(action, queue)
    what = "" if action is None else f"; it may {'' if allowed else 'not '}{action} on {queue}"
    click.echo(f"the token is that of key {principal.key_id}{what}")
    ctx.exit(0 if allowed else 1)


def _terminal() -> bool:
    return sys.stdin.isatty()


commands: Final = {"keys": keys}
